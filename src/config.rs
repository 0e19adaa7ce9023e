//! Configuration: raw keys as written, and the validated settings that the rest of the crate uses.
//!
//! `config/default.toml` documents every key. Unknown keys are errors. An error names the key, its value and what is
//! permitted. Files, environment and command line are read at an edge (`cli::settings`), not here.

mod kafka;
mod live;
pub mod mistakes;
mod objective;
mod rivals;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use kafka::{ClientSettings, Create, KafkaConfig, Lanes, MASK, OWN_FILES, Start, Topics, is_harmless, parse_time};
pub use live::Changes;
pub use objective::{ObjectiveConfig, OutcomeConfig};
pub use rivals::FeatureKind;

use crate::evaluate::rollout::{RolloutSpec, Stage};
use crate::evaluate::worth::WorthSpec;
use crate::event::{ModelName, Name};
use crate::hpg::actor_critic::ActorCriticSpec;
use crate::hpg::critic::CriticSpec;
use crate::hpg::gradient::{self, Baseline};
use crate::hpg::projection::Ball;
use crate::hpg::schedule::Rate;
use crate::joiner::{Aggregate, JoinSpec, OnMissing};
use crate::objective::ObjectiveSpec;
use crate::policy::linear_bandit::{Exploration, LinearBanditSpec};
use crate::policy::log_linear::LogLinearSpec;
use crate::policy::log_quadratic::LogQuadraticSpec;
use crate::policy::quadratic_sgd::QuadraticSgdSpec;

/// The whole configuration, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What to learn, and how.
    pub learner: LearnerConfig,
    /// Overrides of `[learner]` keys for single spaces, by space name.
    pub spaces: BTreeMap<String, serde_json::Map<String, serde_json::Value>>,
    /// The logs that commands read when none are named.
    pub logs: LogsConfig,
    /// How events are parsed.
    pub events: EventsConfig,
    /// How queries and rewards are joined.
    pub join: JoinConfig,
    /// The reward scale.
    pub reward: RewardConfig,
    /// What is maximised besides the reward.
    pub objective: ObjectiveConfig,
    /// When snapshots are taken.
    pub snapshot: SnapshotConfig,
    /// Where snapshots are stored.
    pub store: StoreConfig,
    /// Record of the requests learned from.
    pub audit: AuditConfig,
    /// Where events are read from and parameters are published.
    pub transport: TransportConfig,
    /// How queries are routed.
    pub router: RouterConfig,
    /// How HTTP is served.
    pub http: HttpConfig,
    /// Threads of the learner.
    pub runtime: RuntimeConfig,
    /// Log format.
    pub log: LogConfig,
}

/// `[runtime]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuntimeConfig {
    /// Threads that learn; 0 = one fewer than there are cores.
    pub workers: usize,
}

impl RuntimeConfig {
    /// Number of threads that learn.
    pub fn workers(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if self.workers > 0 { self.workers } else { cores().saturating_sub(1).max(1) }
    }

    fn check(&self) -> Result<(), BadSetting> {
        within("runtime.workers", self.workers, 0, WORKERS_MAX)
    }
}

/// Limit on the threads that learn.
const WORKERS_MAX: usize = 1024;

/// `[logs]`, as written: what `doctor`, `replay` and `evaluate` read when no files are given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogsConfig {
    /// Logs of query events.
    pub queries: Vec<PathBuf>,
    /// Logs of reward events.
    pub rewards: Vec<PathBuf>,
    /// Logs with a query, its model and its reward in each row.
    pub examples: Vec<PathBuf>,
}

/// `[log]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Format of its lines.
    pub format: LogFormat,
}

/// `log.format`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Human-readable.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// `[router]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Key of the random draws.
    pub key: Secret,
    /// The model that is played until parameters are available, and where no other may answer; `None`: uniform, and an error.
    pub fallback_model: Option<String>,
    /// How long decisions are remembered, to answer repeated requests alike.
    pub remember_ms: u64,
    /// Limit on remembered decisions.
    pub remember_max: usize,
    /// Failures in a row after which a model rests; 0 = never.
    pub failures_max: u32,
    /// How long it then rests.
    pub cooldown_ms: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            key: Secret("pointsman".to_owned()),
            fallback_model: None,
            remember_ms: 600_000,
            remember_max: 100_000,
            failures_max: 5,
            cooldown_ms: 30_000,
        }
    }
}

/// Longest rest of a model with a known end: a year.
pub const REST_MS_MAX: u64 = 365 * 86_400_000;

/// `[http]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    /// Address and port.
    pub listen: String,
    /// Bearer token that grants every role; empty = none.
    pub token: Secret,
    /// File of further tokens, each with its roles; empty = none.
    pub tokens_file: PathBuf,
    /// Whether to listen beyond loopback without any token.
    pub open: bool,
    /// Host names that requests may address, besides those of loopback.
    pub hosts: Vec<String>,
    /// Largest request body in bytes, regardless of dimension and batch size.
    pub body_bytes_max: usize,
    /// Limit on the bytes of all bodies held at one time.
    pub in_flight_bytes_max: usize,
    /// Requests per second; a batch counts its items. 0 = unlimited.
    pub requests_per_s_max: u32,
    /// Time limit of a request, and for the first request of a new connection.
    pub timeout_ms: u64,
    /// How long an idle connection stays open.
    pub keep_alive_ms: u64,
    /// TLS.
    pub tls: TlsConfig,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9464".to_owned(),
            token: Secret::default(),
            tokens_file: PathBuf::new(),
            open: false,
            hosts: Vec::new(),
            body_bytes_max: 4 << 20,
            in_flight_bytes_max: 64 << 20,
            requests_per_s_max: 0,
            timeout_ms: 5000,
            keep_alive_ms: 75_000,
            tls: TlsConfig::default(),
        }
    }
}

/// `[http.tls]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// PEM file of the server's certificate chain; empty = plain HTTP.
    pub certificate: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the certificates that clients trust; empty = `certificate`, without one the public authorities.
    pub ca: PathBuf,
}

impl TlsConfig {
    /// Whether the server speaks TLS.
    pub fn is_on(&self) -> bool {
        !self.certificate.as_os_str().is_empty()
    }

    fn check(&self) -> Result<(), BadSetting> {
        let (certificate, key) = (&self.certificate, &self.key);
        if self.is_on() == key.as_os_str().is_empty() {
            let (set, value, other) = match self.is_on() {
                true => ("http.tls.certificate", certificate, "http.tls.key"),
                false => ("http.tls.key", key, "http.tls.certificate"),
            };
            return Err(bad(
                set,
                value.display(),
                format!("TLS also needs {other}: set both, or neither for plain HTTP"),
            ));
        }
        Ok(())
    }
}

impl HttpConfig {
    /// Whether any caller needs a token.
    pub fn has_token(&self) -> bool {
        !self.token.0.is_empty() || !self.tokens_file.as_os_str().is_empty()
    }

    /// The host part of `listen`, without the brackets of an IPv6 address.
    pub fn listen_host(&self) -> &str {
        let host = self.listen.rsplit_once(':').map_or(self.listen.as_str(), |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Whether only programs on this machine can connect. A name other than `localhost` may resolve to anything.
    pub fn is_local(&self) -> bool {
        let host = self.listen_host();
        let address = host.parse::<IpAddr>();
        host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.to_canonical().is_loopback())
    }

    /// Rejects a listener that is reachable from other machines and requires no token. For commands that listen.
    pub fn check_listen(&self) -> Result<(), BadSetting> {
        if self.listen.is_empty() || self.is_local() || self.has_token() || self.open {
            return Ok(());
        }
        let way_out = "an address beyond loopback requires a token, otherwise anyone could route, send rewards and \
                       read: set http.token or http.tokens_file, or http.open = true on a trusted network";
        Err(bad("http.listen", &self.listen, way_out))
    }

    fn check(&self) -> Result<(), BadSetting> {
        within("http.body_bytes_max", self.body_bytes_max, 64, 1 << 30)?;
        within("http.in_flight_bytes_max", self.in_flight_bytes_max, self.body_bytes_max, 1 << 40)?;
        within("http.timeout_ms", self.timeout_ms, 1, 3_600_000)?;
        within("http.keep_alive_ms", self.keep_alive_ms, 1, 3_600_000)?;
        let is_name = |host: &&String| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
            !host.is_empty() && host.chars().all(allowed) && (!host.contains(':') || host.parse::<Ipv6Addr>().is_ok())
        };
        if let Some(host) = self.hosts.iter().find(|host| !is_name(host)) {
            return Err(bad(
                "http.hosts",
                host,
                "must be host names or addresses only, without scheme, port or brackets",
            ));
        }
        self.tls.check()
    }
}

/// Text that is never shown.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}

impl Secret {
    fn shown(&self) -> &'static str {
        if self.0.is_empty() { "" } else { MASK }
    }
}

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.shown())
    }
}

/// `[snapshot]`: when to snapshot, whichever comes first. Each snapshot is followed by a publication.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotConfig {
    /// Examples between two snapshots.
    pub every_updates: u64,
    /// Time between two snapshots.
    pub every_ms: u64,
    /// Number of newest generations to keep.
    pub keep: usize,
    /// Hours of which a checkpoint is kept; 0 = none.
    pub keep_hourly: usize,
    /// Days of which a checkpoint is kept; 0 = none.
    pub keep_daily: usize,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self { every_updates: 2000, every_ms: 1000, keep: 3, keep_hourly: 24, keep_daily: 7 }
    }
}

/// `[store]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Directory of the store.
    pub dir: PathBuf,
    /// Storage engine of a new store.
    pub kind: StoreKind,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { dir: "data/store".into(), kind: StoreKind::Redb }
    }
}

/// `store.kind`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// redb: a single compact file.
    Redb,
    /// sled 0.34.
    Sled,
}

/// `[audit]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// JSON lines file of the requests learned from; empty = disabled.
    pub applied_log: PathBuf,
}

impl AuditConfig {
    /// The file, unless disabled.
    pub fn path(&self) -> Option<PathBuf> {
        Some(self.applied_log.clone()).filter(|path| !path.as_os_str().is_empty())
    }
}

/// `[transport]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransportConfig {
    /// Which transport is used.
    pub kind: TransportKind,
    /// Settings of the file transport.
    pub file: FileTransportConfig,
    /// Settings of the Kafka transport.
    pub kafka: KafkaConfig,
}

impl Default for TransportConfig {
    fn default() -> Self {
        let (file, kafka) = (FileTransportConfig::default(), KafkaConfig::default());
        Self { kind: TransportKind::File, file, kafka }
    }
}

/// `transport.kind`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportKind {
    /// A directory of log files.
    File,
    /// Apache Kafka topics.
    Kafka,
}

/// `[transport.file]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FileTransportConfig {
    /// The directory.
    pub dir: PathBuf,
    /// Interval between checks for new files and lines.
    pub poll_ms: u64,
    /// How long the merge waits for a file that does not grow.
    pub idle_ms: u64,
}

impl Default for FileTransportConfig {
    fn default() -> Self {
        Self { dir: "data/log".into(), poll_ms: 100, idle_ms: 1000 }
    }
}

/// `[events]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// Largest event in bytes.
    pub bytes_max: usize,
    /// Bytes of dead letters that a lane records before it samples them.
    pub dead_letters_bytes_max: u64,
    /// What a router does when its event queue is full.
    pub on_full: OnFull,
    /// Capacity of that queue, in events.
    pub queue_max: usize,
    /// Unit of times that are numbers.
    pub time_unit: TimeUnit,
    /// Where the fields of an event are.
    pub fields: Fields,
    /// The same for query events only, where it differs.
    pub query_fields: FieldOverrides,
    /// The same for reward events only, where it differs.
    pub reward_fields: FieldOverrides,
}

/// `events.time_unit`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeUnit {
    /// Seconds, with decimals if need be.
    S,
    /// Milliseconds.
    #[default]
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
}

impl TimeUnit {
    /// A whole number of this unit in milliseconds, rounded down; none if it is out of range.
    pub fn to_ms(self, number: i64) -> Option<i64> {
        match self {
            Self::S => number.checked_mul(1000),
            Self::Ms => Some(number),
            Self::Us => Some(number.div_euclid(1000)),
            Self::Ns => Some(number.div_euclid(1_000_000)),
        }
    }
}

/// `events.on_full`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFull {
    /// Reject the request with 503.
    Reject,
    /// Answer the request; drop and count its event.
    Drop,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            bytes_max: 1 << 20,
            dead_letters_bytes_max: dead_letters_bytes_max(),
            on_full: OnFull::Reject,
            queue_max: 10_000,
            time_unit: TimeUnit::Ms,
            fields: Fields::default(),
            query_fields: FieldOverrides::default(),
            reward_fields: FieldOverrides::default(),
        }
    }
}

fn dead_letters_bytes_max() -> u64 {
    64 << 20
}

macro_rules! event_fields {
    ($($field:ident),*) => {
        /// `[events.fields]`: JSON pointers to the fields of events.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        #[expect(missing_docs, reason = "each is the location of the field of that name")]
        pub struct Fields {
            $(pub $field: String,)*
        }

        impl Default for Fields {
            fn default() -> Self {
                Self { $($field: concat!("/", stringify!($field)).to_owned(),)* }
            }
        }

        impl Fields {
            /// Every field with its location.
            pub fn all(&self) -> Vec<(&'static str, &str)> {
                vec![$((stringify!($field), self.$field.as_str()),)*]
            }

            /// These fields, where none is set in `overrides`.
            pub fn with(&self, overrides: &FieldOverrides) -> Self {
                Self { $($field: overrides.$field.as_ref().unwrap_or(&self.$field).clone(),)* }
            }
        }

        /// `[events.query_fields]` and `[events.reward_fields]`: the fields of one kind of event, where they differ.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        #[expect(missing_docs, reason = "each is the location of the field of that name")]
        pub struct FieldOverrides {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<String>,)*
        }
    };
}
event_fields!(
    request_id,
    space,
    ts_ms,
    query,
    model,
    propensities,
    propensity,
    policy,
    params_version,
    reward,
    event_id,
    failed,
    rewards,
    preferred,
    over
);

/// `[join]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JoinConfig {
    /// How long after its query a reward counts, in event time.
    pub window_ms: u64,
    /// How long before its query a reward counts, in event time.
    pub early_ms: u64,
    /// How long finished requests are remembered.
    pub remember_ms: Option<u64>,
    /// What happens to a query without a reward.
    pub on_missing: Missing,
    /// The reward of such a query, if it is learned.
    pub default_reward: f64,
    /// How several rewards of a request are combined.
    pub aggregate: Aggregate,
    /// How far a file may be out of order.
    pub reorder_ms: u64,
    /// How long a live learner holds an event for earlier ones.
    pub live_hold_ms: u64,
    /// How far an event may be ahead of its record timestamp.
    pub future_ms: u64,
    /// Limit on pending requests per space.
    pub pending_max: usize,
    /// Limit on their memory, in bytes.
    pub pending_bytes_max: usize,
    /// Limit on remembered finished requests per space.
    pub remembered_max: usize,
}

impl Default for JoinConfig {
    fn default() -> Self {
        Self {
            window_ms: 600_000,
            early_ms: 120_000,
            remember_ms: None,
            on_missing: Missing::Drop,
            default_reward: 0.0,
            aggregate: Aggregate::First,
            reorder_ms: 10_000,
            live_hold_ms: 200,
            future_ms: 3_600_000,
            pending_max: 1_000_000,
            pending_bytes_max: 4 << 30,
            remembered_max: 4_000_000,
        }
    }
}

/// `join.on_missing`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Missing {
    /// Drop it.
    Drop,
    /// Learn it with `default_reward`.
    Default,
}

/// `[reward]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardConfig {
    /// The rewards that are mapped to 0 and to 1.
    pub range: [f64; 2],
    /// What happens to rewards outside the range.
    pub out_of_range: OutOfRange,
    /// Rewards that are words: word -> reward.
    pub values: BTreeMap<String, f64>,
    /// What happens to decisions whose model did not answer.
    pub on_failed: OnFailed,
    /// The reward of such a decision, if it is learned.
    pub failed_reward: f64,
}

/// `reward.on_failed`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailed {
    /// Drop it.
    Drop,
    /// Learn it with `failed_reward`.
    Learn,
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self {
            range: [0.0, 1.0],
            out_of_range: OutOfRange::Clip,
            values: BTreeMap::new(),
            on_failed: OnFailed::Drop,
            failed_reward: 0.0,
        }
    }
}

/// `reward.out_of_range`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutOfRange {
    /// Clip to the range.
    Clip,
    /// The event becomes a dead letter.
    Reject,
}

/// `learner.missing_propensities`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingPropensities {
    /// The event becomes a dead letter.
    Reject,
    /// Assume that all models without a logged propensity were equally likely.
    Uniform,
    /// Assume the policy at the time of learning.
    Current,
}

/// `[learner]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnerConfig {
    /// Dimension of query embeddings.
    pub dim: usize,
    /// Names of the models to route to.
    pub models: Vec<String>,
    /// Names of models that were routed to in the past.
    pub retired: Vec<String>,
    /// The learning algorithm.
    pub algorithm: Algorithm,
    /// The model that `algorithm = "fixed"` always plays.
    pub fixed_model: Option<String>,
    /// Set of hyper-parameters that single keys override.
    pub preset: Preset,
    /// Nuclear-norm bound.
    pub tau: Option<f64>,
    /// Hypentropy scale.
    pub beta: Option<f64>,
    /// Learning rate.
    pub eta: Option<f64>,
    /// Number of eigenvalues kept per model.
    pub rank: Option<usize>,
    /// Examples summed into one update.
    pub batch: Option<usize>,
    /// Representation of the parameters.
    pub mode: Mode,
    /// Schedule of the learning rate.
    pub learning_rate: Option<LearningRate>,
    /// The paper's T: examples that the theory preset is tuned for, or at which a moving rate equals eta.
    pub horizon: Option<u64>,
    /// The paper's s: rank of the models' kernels, for the theory preset.
    pub intrinsic_rank: Option<usize>,
    /// Half-life of the learned parameters, in examples.
    pub half_life: Option<f64>,
    /// Gradient estimator; by default a critic where the algorithm has one.
    pub estimator: Option<Estimator>,
    /// Upper bound on importance weights.
    pub weight_cap: f64,
    /// Baseline subtracted from the rewards.
    pub baseline: Option<Baseline>,
    /// What is assumed of events without propensities.
    pub missing_propensities: MissingPropensities,
    /// The split of an experiment, for events without propensities: model -> probability.
    pub declared_propensities: BTreeMap<String, f64>,
    /// Share of uniform exploration mixed into the policy.
    pub exploration_floor: f64,
    /// Evaluate the policy on every nth example; 0 = never.
    pub evaluate_every: u64,
    /// Number of most recent evaluated examples that are also evaluated separately.
    pub evaluate_window: u64,
    /// Probability that any reported confidence range is ever wrong.
    pub evaluate_alpha: f64,
    /// Whose decisions are played.
    pub stage: Stage,
    /// Who changes the stage.
    pub promote: Promote,
    /// The model that is served today.
    pub incumbent: Option<String>,
    /// What the rollout may lose, relative to the reward of the incumbent.
    pub guard_budget: f64,
    /// Query features of linear bandits.
    pub features: FeatureKind,
    /// Number of leading query directions whose products are features.
    pub feature_rank: Option<usize>,
    /// Width of the confidence bonus, or scale of the posterior.
    pub alpha: Option<f64>,
    /// Ridge regularisation.
    pub ridge: Option<f64>,
    /// g / sqrt(t), for algorithms that sample by inverse gap weighting.
    pub inverse_gap: f64,
    /// Whether predicted rewards are clipped to 0..1.
    pub clip_predictions: bool,
    /// Reaction to drift.
    pub drift: OnDrift,
    /// How steeply predicted rewards are played, over the square root of the number of examples.
    pub steepness: f64,
    /// Frequent queries that are remembered one by one.
    pub head_queries: usize,
    /// Which spaces may exist.
    pub spaces: Spaces,
    /// Limit on the number of spaces.
    pub spaces_max: usize,
    /// Number of partitions that a space is spread over.
    pub shards: usize,
    /// Seed of the learner's own draws.
    pub seed: u64,
}

impl Default for LearnerConfig {
    fn default() -> Self {
        let worth = WorthSpec::default();
        Self {
            dim: 768,
            models: vec!["minilm".to_owned(), "bge".to_owned()],
            retired: Vec::new(),
            algorithm: Algorithm::Hpg,
            fixed_model: None,
            preset: Preset::Practical,
            tau: None,
            beta: None,
            eta: None,
            rank: None,
            batch: None,
            mode: Mode::Factored,
            learning_rate: None,
            horizon: None,
            intrinsic_rank: None,
            half_life: None,
            estimator: None,
            weight_cap: 10.0,
            baseline: None,
            missing_propensities: MissingPropensities::Reject,
            declared_propensities: BTreeMap::new(),
            exploration_floor: 0.0,
            evaluate_every: worth.every,
            evaluate_window: worth.window,
            evaluate_alpha: worth.alpha,
            stage: worth.rollout.stage,
            promote: Promote::Manual,
            incumbent: None,
            guard_budget: 0.01,
            features: FeatureKind::Quadratic,
            feature_rank: None,
            alpha: None,
            ridge: None,
            inverse_gap: 30.0,
            clip_predictions: true,
            drift: OnDrift::Detect,
            steepness: 0.4,
            head_queries: 4096,
            spaces: Spaces::Any,
            spaces_max: 1000,
            shards: 1,
            seed: 1,
        }
    }
}

/// `learner.algorithm`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Hypentropy policy gradient, Algorithm 1.
    Hpg,
    /// Algorithm 2: magnitudes by coin betting.
    HpgParameterFree,
    /// Regression of the reward in the paper's geometry.
    HypentropyRegression,
    /// Every model alike.
    Uniform,
    /// Always `fixed_model`.
    Fixed,
    /// Linear bandit with an upper confidence bonus.
    LinUcb,
    /// Linear bandit with Thompson sampling.
    LinThompson,
    /// Quadratic regression by stochastic gradient descent, with inverse gap weighting.
    QuadraticSgd,
    /// Euclidean policy gradient in the log-quadratic class.
    LogQuadratic,
    /// Natural policy gradient in the log-linear class.
    LogLinear,
    /// Exponential weights over models.
    Exp3,
}

/// `learner.preset`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Learns well in practice.
    Practical,
    /// Has the paper's regret bound.
    Theory,
}

/// `learner.estimator`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// The expected gradient under predicted rewards.
    Critic,
    /// REINFORCE under the policy that routed the event.
    Logged,
    /// REINFORCE under the current policy, with importance weights.
    Importance,
}

/// `learner.mode`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Factored eigenvectors: fast.
    Factored,
    /// Explicit eigenvectors.
    Explicit,
    /// A dense eigendecomposition at every step: the reference.
    Exact,
    /// Dual averaging: unprojected sums, projected only to score.
    Lazy,
}

/// `learner.drift`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnDrift {
    /// None.
    None,
    /// Lower the confidence in what was learned when errors have grown permanently.
    Detect,
}

/// `learner.spaces`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spaces {
    /// The first query of a space creates it.
    Any,
    /// Only `default` and the spaces listed in `[spaces]`.
    Listed,
}

/// `learner.promote`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Promote {
    /// The configuration.
    Manual,
    /// Evidence.
    Automatic,
}

/// `learner.learning_rate`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRate {
    /// eta
    Constant,
    /// eta sqrt(horizon / t)
    Anytime,
    /// Like `Anytime`, but changes only at powers of two.
    Doubling,
}

macro_rules! display_as_written {
    ($($type:ty),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        }
    )*};
}
display_as_written!(Algorithm, Preset, Estimator, Mode, LearningRate, StoreKind, TransportKind);

/// A key has an invalid value, or lacks a value that is required.
#[derive(Debug, Error, PartialEq)]
#[error("{problem}")]
pub struct BadSetting {
    /// The key, with its section.
    pub key: String,
    /// The key, its value, and what is permitted or what to do.
    pub problem: String,
}

/// The whole configuration, validated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The learner of spaces not listed below.
    pub learner: Spec,
    /// The learners of listed spaces.
    pub spaces: BTreeMap<Name, Spec>,
    /// Whether all other spaces are rejected.
    #[serde(default)]
    pub only_listed: bool,
    /// Limit on the number of spaces, listed ones included.
    pub spaces_max: usize,
    /// What is assumed of events without propensities.
    pub missing_propensities: MissingPropensities,
    /// How events are parsed.
    pub events: EventsSpec,
    /// The reward scale.
    pub reward: RewardSpec,
    /// How queries and rewards are joined.
    pub join: JoinSpec,
    /// How far a file may be out of order.
    pub reorder_ms: u64,
    /// How far an event may be ahead of its record timestamp.
    pub future_ms: u64,
}

impl Settings {
    /// How far an event may be ahead of the others of its space before they have to confirm it.
    pub fn reach_ms(&self) -> u64 {
        self.join.window_ms
    }

    /// Whether events without propensities are malformed in every space.
    pub fn requires_propensities(&self) -> bool {
        let mut specs = std::iter::once(&self.learner).chain(self.spaces.values());
        self.missing_propensities == MissingPropensities::Reject && specs.all(|spec| spec.declared.is_none())
    }

    /// The learner of a space.
    pub fn space(&self, name: &Name) -> &Spec {
        self.spaces.get(name).unwrap_or(&self.learner)
    }

    /// Whether a space always fits, however many there are: `default` and those that are listed.
    pub fn is_reserved(&self, name: &Name) -> bool {
        self.spaces.contains_key(name) || name.is_default()
    }

    /// Whether a space may exist.
    pub fn allows(&self, name: &Name) -> bool {
        !self.only_listed || self.is_reserved(name)
    }

    /// Spaces that are spread over several partitions, and over how many.
    pub fn sharded(&self) -> BTreeMap<Name, usize> {
        let shards = |(name, spec): (&Name, &Spec)| (spec.shards > 1).then(|| (name.clone(), spec.shards));
        self.spaces.iter().filter_map(shards).collect()
    }
}

/// How events are parsed, validated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventsSpec {
    /// Largest event in bytes.
    pub bytes_max: usize,
    /// Bytes of dead letters that a lane records before it samples them. Older snapshots lack it.
    #[serde(default = "dead_letters_bytes_max")]
    pub dead_letters_bytes_max: u64,
    /// Unit of times that are numbers.
    #[serde(default)]
    pub time_unit: TimeUnit,
    /// Where the fields of query events are: valid JSON pointers.
    pub fields: Fields,
    /// Where those of reward events are, if that is elsewhere.
    #[serde(default)]
    pub reward_fields: Option<Fields>,
    /// Rewards that are words.
    #[serde(default)]
    pub reward_values: BTreeMap<String, f64>,
    /// Where outcomes are.
    #[serde(default)]
    pub outcomes: Vec<OutcomeField>,
}

/// Where an outcome is in events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutcomeField {
    /// Its name.
    pub name: String,
    /// A JSON pointer, in events of both kinds.
    pub field: String,
    /// Least and greatest value; others are clipped.
    pub range: (f64, f64),
}

impl OutcomeField {
    /// A value of an event, clipped to the range.
    pub fn clip(&self, value: f64) -> f64 {
        value.clamp(self.range.0, self.range.1)
    }

    /// Where routers write an outcome of this name.
    fn own(name: &str) -> String {
        format!("/outcomes/{name}")
    }
}

impl EventsSpec {
    /// Where the fields of reward events are.
    pub fn reward_fields(&self) -> &Fields {
        self.reward_fields.as_ref().unwrap_or(&self.fields)
    }

    /// Where outcomes are, in the order of their configuration.
    pub fn outcome_fields(&self) -> Vec<String> {
        self.outcomes.iter().map(|outcome| outcome.field.clone()).collect()
    }

    /// The same for events in the layout that routers write.
    pub fn in_own_layout(&self) -> Self {
        let own = |outcome: &OutcomeField| OutcomeField { field: OutcomeField::own(&outcome.name), ..outcome.clone() };
        let outcomes = self.outcomes.iter().map(own).collect();
        Self { time_unit: TimeUnit::Ms, fields: Fields::default(), reward_fields: None, outcomes, ..self.clone() }
    }
}

/// The reward scale, validated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RewardSpec {
    /// The reward that is mapped to 0.
    pub low: f64,
    /// The reward that is mapped to 1.
    pub high: f64,
    /// Whether rewards outside the range become dead letters.
    pub reject: bool,
    /// The reward of a decision whose model did not answer; `None`: it is not learned. Older snapshots lack it.
    #[serde(default)]
    pub failed: Option<f64>,
}

impl RewardSpec {
    /// Whether a reward lies in the range.
    pub fn contains(&self, reward: f64) -> bool {
        (self.low..=self.high).contains(&reward)
    }

    /// A logged reward on the scale of 0..1, clipped.
    pub fn unit(&self, reward: f64) -> f64 {
        ((reward - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// Specification of a learner: validated, complete, presets resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Dimension of queries.
    pub dim: usize,
    /// Models to route to: at least two, no name twice.
    pub models: Vec<ModelName>,
    /// Models whose events are counted and skipped.
    pub retired: BTreeSet<ModelName>,
    /// The algorithm with its own settings.
    pub method: Method,
    /// Examples summed into one update.
    pub batch: usize,
    /// Half-life of the learned parameters, in examples.
    pub half_life: Option<f64>,
    /// The distribution that models of events without propensities were drawn from, if it is declared.
    #[serde(default)]
    pub declared: Option<Vec<f64>>,
    /// Share of uniform exploration.
    pub exploration_floor: f64,
    /// How the policy value is estimated, and the rollout that depends on it.
    #[serde(default)]
    pub worth: WorthSpec,
    /// What is maximised besides the reward.
    #[serde(default)]
    pub objective: ObjectiveSpec,
    /// Partitions that the space is spread over.
    #[serde(default = "one")]
    pub shards: usize,
    /// Seed of the draws.
    pub seed: u64,
}

fn one() -> usize {
    1
}

/// An algorithm with its checked settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Algorithm 1.
    Hpg(HpgSpec),
    /// Algorithm 2; the settings are those of the inner Algorithm 1.
    HpgParameterFree(HpgSpec),
    /// Algorithm 1 with a critic.
    ActorCritic(ActorCriticSpec),
    /// Hypentropy regression.
    HypentropyRegression(CriticSpec),
    /// Every model alike.
    Uniform,
    /// Always the model of this index.
    Fixed(usize),
    /// LinUCB or linear Thompson sampling.
    LinearBandit(LinearBanditSpec),
    /// Quadratic regression.
    QuadraticSgd(QuadraticSgdSpec),
    /// Euclidean policy gradient.
    LogQuadratic(LogQuadraticSpec),
    /// Natural policy gradient.
    LogLinear(LogLinearSpec),
    /// EXP3 with this learning rate.
    Exp3(Rate),
}

/// Checked hyper-parameters of hypentropy policy gradient.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HpgSpec {
    /// The feasible set of the parameters.
    pub ball: Ball,
    /// Learning rate.
    pub rate: Rate,
    /// Representation of the parameters.
    pub mode: Mode,
    /// Gradient estimator.
    pub estimator: gradient::Estimator,
    /// Baseline subtracted from the rewards.
    pub baseline: Baseline,
    /// Upper bound on importance weights.
    pub weight_cap: f64,
}

impl Spec {
    /// Whether its parameters are sums that are projected only to play.
    pub fn plays_by_sums(&self) -> bool {
        let (Method::Hpg(hpg) | Method::HpgParameterFree(hpg)) = &self.method else { return false };
        hpg.mode == Mode::Lazy
    }

    /// The same with outcomes that models pay for.
    pub fn with_objective(self, objective: &ObjectiveSpec) -> Result<Self, BadSetting> {
        let predicts = matches!(self.method, Method::ActorCritic(_) | Method::HypentropyRegression(_));
        let learns = !matches!(self.method, Method::Uniform | Method::Fixed(_));
        if !objective.is_empty() && learns && !predicts {
            let allowed = "does not predict rewards, so models cannot pay for [objective.outcomes]: use hpg with \
                           estimator = \"critic\" (its default), or hypentropy-regression";
            return Err(bad("learner.algorithm", self.algorithm(), allowed));
        }
        if !objective.is_empty() && self.shards > 1 {
            let allowed = "prices are not added up: use shards = 1, or no [objective.outcomes]";
            return Err(bad("learner.shards", self.shards, allowed));
        }
        Ok(Self { objective: objective.clone(), ..self })
    }

    /// Largest number of queries in the head table that it publishes.
    pub fn head_queries_max(&self) -> usize {
        match &self.method {
            Method::ActorCritic(ActorCriticSpec { critic, .. }) | Method::HypentropyRegression(critic) => {
                critic.head_queries
            }
            _ => 0,
        }
    }

    /// The algorithm's name, as configured.
    pub fn algorithm(&self) -> &'static str {
        match self.method {
            Method::Hpg(_) | Method::ActorCritic(_) => "hpg",
            Method::HpgParameterFree(_) => "hpg-parameter-free",
            Method::HypentropyRegression(_) => "hypentropy-regression",
            Method::Uniform => "uniform",
            Method::Fixed(_) => "fixed",
            Method::LinearBandit(LinearBanditSpec { exploration: Exploration::Ucb, .. }) => "lin-ucb",
            Method::LinearBandit(_) => "lin-thompson",
            Method::QuadraticSgd(_) => "quadratic-sgd",
            Method::LogQuadratic(_) => "log-quadratic",
            Method::LogLinear(_) => "log-linear",
            Method::Exp3(_) => "exp3",
        }
    }
}

impl Config {
    /// Checks every key.
    pub fn check(&self) -> Result<Settings, BadSetting> {
        if self.learner.shards != 1 {
            let allowed = "must be 1 in [learner]: set shards in [spaces.NAME], for one space";
            return Err(bad("learner.shards", self.learner.shards, allowed));
        }
        within("learner.spaces_max", self.learner.spaces_max, self.spaces.len().max(1), 1_000_000)?;
        at_least("snapshot.every_updates", self.snapshot.every_updates, 1)?;
        at_least("snapshot.every_ms", self.snapshot.every_ms, 1)?;
        within("snapshot.keep", self.snapshot.keep, 1, 1000)?;
        within("snapshot.keep_hourly", self.snapshot.keep_hourly, 0, 1000)?;
        within("snapshot.keep_daily", self.snapshot.keep_daily, 0, 1000)?;
        within("events.queue_max", self.events.queue_max, 1, 10_000_000)?;
        self.http.check()?;
        self.runtime.check()?;
        within("router.remember_max", self.router.remember_max, 1, 100_000_000)?;
        within("router.failures_max", self.router.failures_max, 0, 1_000_000)?;
        within("router.cooldown_ms", self.router.cooldown_ms, 1, REST_MS_MAX)?;
        if !(1..=64).contains(&self.router.key.0.len()) {
            let found = format!("{MASK} ({} bytes)", self.router.key.0.len());
            return Err(bad("router.key", found, "must have 1 to 64 bytes"));
        }
        if let Some(model) = self.router.fallback_model.as_ref().filter(|model| !self.learner.models.contains(model)) {
            let allowed = format!("must be one of learner.models: {}", self.learner.models.join(", "));
            return Err(bad("router.fallback_model", model, allowed));
        }
        within("transport.file.poll_ms", self.transport.file.poll_ms, 1, 60_000)?;
        self.transport.kafka.check()?;
        let learner = self.learner.check()?;
        let objective = self.objective.check()?;
        let with_objective = |spec: Spec| spec.with_objective(&objective);
        let spaces: BTreeMap<Name, Spec> = self
            .spaces
            .iter()
            .map(|(name, keys)| {
                let (name, spec) = self.check_space(name, keys)?;
                Ok((name, with_objective(spec)?))
            })
            .collect::<Result<_, _>>()?;
        let learner = with_objective(learner)?;
        self.objective.check_models(std::iter::once(&learner).chain(spaces.values()))?;
        let events = EventsSpec { outcomes: self.objective.fields(), ..self.events.check(&self.reward)? };
        Ok(Settings {
            learner,
            spaces,
            only_listed: self.learner.spaces == Spaces::Listed,
            spaces_max: self.learner.spaces_max,
            missing_propensities: self.learner.missing_propensities,
            events,
            reward: self.reward.check()?,
            join: self.join.check()?,
            reorder_ms: self.join.reorder_ms,
            future_ms: self.join.future_ms,
        })
    }

    fn check_space(
        &self,
        name: &str,
        keys: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<(Name, Spec), BadSetting> {
        let rejected = |problem: String| bad("spaces", name, problem);
        if let Some(key) = SHARED_KEYS.into_iter().find(|key| keys.contains_key(*key)) {
            let key = format!("spaces.{name}.{key}");
            return Err(BadSetting { problem: format!("{key} applies to all spaces: set it in [learner]"), key });
        }
        let section = format!("spaces.{name}");
        let spec = self.learner.with_keys(&section, keys)?.check().map_err(|BadSetting { key, problem }| {
            let own = key.replacen("learner", &section, 1);
            BadSetting { problem: problem.replacen(&key, &own, 1), key: own }
        })?;
        Ok((Name::try_from(name).map_err(|e| rejected(e.to_string()))?, spec))
    }
}

impl EventsConfig {
    /// Checks `[events]`, and which rewards are words.
    pub fn check(&self, reward: &RewardConfig) -> Result<EventsSpec, BadSetting> {
        within("events.bytes_max", self.bytes_max, 64, 1 << 30)?;
        let fields = |section: &'static str, overrides: &FieldOverrides| {
            let fields = self.fields.with(overrides);
            match fields.all().into_iter().find(|(_, pointer)| !pointer.starts_with('/')) {
                Some((field, pointer)) => {
                    // Where it is not overridden the shared field is wrong.
                    let is_shared = self.fields.all().contains(&(field, pointer));
                    let section = if is_shared { "fields" } else { section };
                    let key = format!("events.{section}.{field}");
                    let problem = format!("{key} = {pointer}: must be a JSON pointer, such as /meta/id");
                    Err(BadSetting { key, problem })
                }
                None => Ok(fields),
            }
        };
        let (queries, rewards) =
            (fields("query_fields", &self.query_fields)?, fields("reward_fields", &self.reward_fields)?);
        Ok(EventsSpec {
            bytes_max: self.bytes_max,
            dead_letters_bytes_max: self.dead_letters_bytes_max,
            time_unit: self.time_unit,
            reward_values: reward.values.clone(),
            reward_fields: (rewards != queries).then_some(rewards),
            fields: queries,
            outcomes: Vec::new(),
        })
    }
}

impl RewardConfig {
    /// Checks `[reward]`.
    pub fn check(&self) -> Result<RewardSpec, BadSetting> {
        let [low, high] = self.range;
        if !(low < high && (high - low).is_finite()) {
            return Err(bad("reward.range", format!("[{low}, {high}]"), "must be two finite numbers, the lower first"));
        }
        if let Some((word, value)) = self.values.iter().find(|(_, value)| !value.is_finite()) {
            let key = format!("reward.values.{word}");
            return Err(BadSetting { problem: format!("{key} = {value}: must be a finite number"), key });
        }
        if !self.failed_reward.is_finite() {
            return Err(bad("reward.failed_reward", self.failed_reward, "must be a finite number"));
        }
        let failed = (self.on_failed == OnFailed::Learn).then_some(self.failed_reward);
        Ok(RewardSpec { low, high, reject: self.out_of_range == OutOfRange::Reject, failed })
    }
}

impl JoinConfig {
    /// Checks `[join]`.
    pub fn check(&self) -> Result<JoinSpec, BadSetting> {
        within("join.live_hold_ms", self.live_hold_ms, 0, 3_600_000)?;
        at_least("join.pending_max", self.pending_max, 1)?;
        at_least("join.pending_bytes_max", self.pending_bytes_max, 1 << 16)?;
        if !self.default_reward.is_finite() {
            return Err(bad("join.default_reward", self.default_reward, "must be a finite number"));
        }
        Ok(JoinSpec {
            window_ms: self.window_ms,
            early_ms: self.early_ms,
            remember_ms: self.remember_ms.unwrap_or(self.window_ms.saturating_add(self.early_ms)),
            on_missing: match self.on_missing {
                Missing::Drop => OnMissing::Drop,
                Missing::Default => OnMissing::Default(self.default_reward),
            },
            aggregate: self.aggregate,
            pending_max: self.pending_max,
            pending_bytes_max: self.pending_bytes_max,
            remembered_max: self.remembered_max,
        })
    }
}

/// Keys of `[learner]` that cannot be set per space.
const SHARED_KEYS: [&str; 3] = ["missing_propensities", "spaces", "spaces_max"];

/// Largest dimension of queries.
pub const DIM_MAX: usize = 65_536;

/// Largest number of models of a space.
pub const MODELS_MAX: usize = 4096;

/// Bounds within which no step can leave the range of f64, however long it runs.
const SCALE: (f64, f64) = (1e-9, 1e9);

impl LearnerConfig {
    /// This configuration with some keys replaced. The error names the key within `section`.
    pub fn with_keys(
        &self,
        section: &str,
        keys: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, BadSetting> {
        let replace = |learner: &Self, key: &str, value: &serde_json::Value| {
            let mut all = serde_json::to_value(learner)?;
            if let Some(all) = all.as_object_mut() {
                all.insert(key.to_owned(), value.clone());
            }
            serde_json::from_value::<Self>(all)
        };
        // One by one, since the error itself does not name the key.
        keys.iter().try_fold(self.clone(), |learner, (key, value)| {
            replace(&learner, key, value).map_err(|error| {
                let key = format!("{section}.{key}");
                BadSetting { problem: mistakes::explain(&key, &error.to_string(), true), key }
            })
        })
    }

    /// Checks every key and resolves the preset.
    pub fn check(&self) -> Result<Spec, BadSetting> {
        within("learner.dim", self.dim, 1, DIM_MAX)?;
        let models = self.check_models()?;
        if let Some(half_life) = self.half_life {
            within("learner.half_life", half_life, 1.0, 1e15)?;
        }
        within("learner.exploration_floor", self.exploration_floor, 0.0, 1.0)?;
        let batch = self.batch.unwrap_or(1);
        within("learner.batch", batch, 1, 65_536)?;
        let method = match self.algorithm {
            Algorithm::Hpg if self.check_estimator()? == Estimator::Critic => {
                Method::ActorCritic(self.check_actor_critic(models.len())?)
            }
            Algorithm::Hpg => Method::Hpg(self.check_hpg(models.len())?),
            Algorithm::HpgParameterFree => Method::HpgParameterFree(self.check_parameter_free(models.len())?),
            Algorithm::HypentropyRegression => Method::HypentropyRegression(self.check_regression(models.len())?),
            Algorithm::Uniform => Method::Uniform,
            Algorithm::Fixed => Method::Fixed(self.check_fixed(&models)?),
            Algorithm::LinUcb => Method::LinearBandit(self.check_linear_bandit(Exploration::Ucb)?),
            Algorithm::LinThompson => Method::LinearBandit(self.check_linear_bandit(Exploration::Thompson)?),
            Algorithm::QuadraticSgd => Method::QuadraticSgd(self.check_quadratic_sgd()?),
            Algorithm::LogQuadratic => Method::LogQuadratic(self.check_log_quadratic()?),
            Algorithm::LogLinear => Method::LogLinear(self.check_log_linear()?),
            Algorithm::Exp3 => Method::Exp3(self.check_exp3(models.len())?),
        };
        Ok(Spec {
            dim: self.dim,
            retired: self.check_retired(&models)?,
            declared: self.check_declared(&models)?,
            worth: self.check_worth(&models)?,
            models,
            method,
            batch,
            half_life: self.half_life,
            exploration_floor: self.exploration_floor,
            objective: ObjectiveSpec::default(),
            shards: self.check_shards()?,
            seed: self.seed,
        })
    }

    /// Shards learn independently and are added up, so learning must be a sum over examples: that of a critic, or the plain
    /// one of gradients.
    fn check_shards(&self) -> Result<usize, BadSetting> {
        within("learner.shards", self.shards, 1, 1024)?;
        let is_regression = self.algorithm == Algorithm::HypentropyRegression;
        let is_hpg = self.algorithm == Algorithm::Hpg;
        let has_critic = is_regression || (is_hpg && self.estimator() == Estimator::Critic);
        let is_constant = self.learning_rate.is_none_or(|rate| rate == LearningRate::Constant);
        let plain = [
            ("algorithm = \"hpg\" or \"hypentropy-regression\"", is_hpg || is_regression),
            ("estimator = \"critic\" or mode = \"lazy\"", has_critic || self.mode == Mode::Lazy),
            ("estimator = \"critic\" or \"logged\"", has_critic || self.estimator() == Estimator::Logged),
            ("estimator = \"critic\" or baseline = \"none\"", has_critic || self.baseline == Some(Baseline::None)),
            ("learning_rate = \"constant\"", has_critic || is_constant),
            ("batch = 1", self.batch.unwrap_or(1) == 1),
            ("no half_life", self.half_life.is_none()),
            ("stage = \"observe\" or \"full\"", [Stage::Observe, Stage::Full].contains(&self.stage)),
            ("missing_propensities other than \"current\"", self.missing_propensities != MissingPropensities::Current),
        ];
        match plain.into_iter().find(|(_, holds)| self.shards > 1 && !holds) {
            Some((needed, _)) => {
                let allowed = format!("shards are added up, which requires {needed} in the same space");
                Err(bad("learner.shards", self.shards, allowed))
            }
            None => Ok(self.shards),
        }
    }

    fn check_worth(&self, models: &[ModelName]) -> Result<WorthSpec, BadSetting> {
        within("learner.evaluate_window", self.evaluate_window, 10, 1_000_000_000)?;
        within("learner.evaluate_alpha", self.evaluate_alpha, 1e-9, 0.5)?;
        let (every, window, alpha) = (self.evaluate_every, self.evaluate_window, self.evaluate_alpha);
        Ok(WorthSpec { every, window, alpha, rollout: self.check_rollout(models)? })
    }

    fn check_rollout(&self, models: &[ModelName]) -> Result<RolloutSpec, BadSetting> {
        within("learner.guard_budget", self.guard_budget, 1e-4, 0.5)?;
        let place = |wanted: &String| models.iter().position(|name| name.as_str() == wanted.as_str());
        let incumbent = self.incumbent.as_ref().map(|wanted| {
            let allowed = || format!("must be one of learner.models: {}", self.models.join(", "));
            place(wanted).ok_or_else(|| bad("learner.incumbent", format!("{wanted:?}"), allowed()))
        });
        let (stage, automatic) = (self.stage, self.promote == Promote::Automatic);
        let rollout = RolloutSpec { stage, automatic, incumbent: incumbent.transpose()?, budget: self.guard_budget };
        if automatic && !rollout.has_control() {
            let allowed = "an automatic rollout begins in learner.stage = \"shadow\" or \"canary\": set one of them";
            return Err(bad("learner.promote", "\"automatic\"", allowed));
        }
        if rollout.has_control() && self.evaluate_every != 1 {
            let allowed = "must be 1: learner.stage = \"shadow\" and \"canary\" count every example";
            return Err(bad("learner.evaluate_every", self.evaluate_every, allowed));
        }
        Ok(rollout)
    }

    fn check_models(&self) -> Result<Vec<ModelName>, BadSetting> {
        let rejected = |allowed: String| bad("learner.models", format!("{:?}", self.models), allowed);
        if !(2..=MODELS_MAX).contains(&self.models.len()) {
            return Err(rejected(format!("must be 2 to {MODELS_MAX} names: with one model there is nothing to route")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.models.iter().find(|name| !seen.insert(*name)) {
            return Err(rejected(format!("{twice:?} is listed twice: remove one")));
        }
        self.models.iter().map(|name| ModelName::try_from(name.as_str()).map_err(|e| rejected(e.to_string()))).collect()
    }

    fn check_retired(&self, models: &[ModelName]) -> Result<BTreeSet<ModelName>, BadSetting> {
        let rejected = |allowed: String| bad("learner.retired", format!("{:?}", self.retired), allowed);
        let retired: BTreeSet<ModelName> = self
            .retired
            .iter()
            .map(|name| ModelName::try_from(name.as_str()).map_err(|e| rejected(e.to_string())))
            .collect::<Result<_, _>>()?;
        match models.iter().find(|model| retired.contains(model)) {
            Some(model) => Err(rejected(format!("{model} is also in learner.models: remove it from one of them"))),
            None => Ok(retired),
        }
    }

    fn check_declared(&self, models: &[ModelName]) -> Result<Option<Vec<f64>>, BadSetting> {
        let declared = &self.declared_propensities;
        let rejected = |allowed: &str| bad("learner.declared_propensities", format!("{declared:?}"), allowed);
        if declared.is_empty() {
            return Ok(None);
        }
        if let Some(unknown) = declared.keys().find(|name| models.iter().all(|model| model.as_str() != name.as_str())) {
            return Err(rejected(&format!("{unknown} must be one of learner.models: {}", self.models.join(", "))));
        }
        let probability = |model: &ModelName| declared.get(model.as_str()).copied().unwrap_or(0.0);
        let declared: Vec<f64> = models.iter().map(probability).collect();
        let is_distribution = declared.iter().all(|p| (0.0..=1.0).contains(p));
        match is_distribution && (declared.iter().sum::<f64>() - 1.0).abs() <= 1e-6 {
            true => Ok(Some(declared)),
            false => Err(rejected("must be probabilities between 0 and 1 that sum to 1")),
        }
    }

    fn check_fixed(&self, models: &[ModelName]) -> Result<usize, BadSetting> {
        let Some(wanted) = &self.fixed_model else {
            return Err(missing("learner.fixed_model", "learner.algorithm = \"fixed\" requires one of learner.models"));
        };
        models.iter().position(|name| name.as_str() == wanted).ok_or_else(|| {
            let allowed = format!("must be one of learner.models: {}", self.models.join(", "));
            bad("learner.fixed_model", format!("{wanted:?}"), allowed)
        })
    }

    /// The configured estimator, or the default: a critic for hpg with the practical preset, except where parameters are
    /// plain sums; REINFORCE for everything else.
    fn estimator(&self) -> Estimator {
        let has_critic =
            self.algorithm == Algorithm::Hpg && self.preset == Preset::Practical && self.mode != Mode::Lazy;
        self.estimator.unwrap_or(if has_critic { Estimator::Critic } else { Estimator::Logged })
    }

    /// The estimator of hpg: the theorem's parameters and lazy ones belong to the paper's.
    fn check_estimator(&self) -> Result<Estimator, BadSetting> {
        let estimator = self.estimator();
        let rejected = |what: &str| {
            let allowed = format!("cannot be used with {what}: use logged or importance");
            Err(bad("learner.estimator", estimator, allowed))
        };
        match (estimator, self.preset, self.mode) {
            (Estimator::Critic, Preset::Theory, _) => rejected("learner.preset = \"theory\""),
            (Estimator::Critic, _, Mode::Lazy) => rejected("learner.mode = \"lazy\""),
            _ => Ok(estimator),
        }
    }

    /// The estimator of a policy gradient without a critic.
    fn check_reinforce(&self) -> Result<gradient::Estimator, BadSetting> {
        match self.estimator() {
            Estimator::Logged => Ok(gradient::Estimator::Logged),
            Estimator::Importance => Ok(gradient::Estimator::Importance),
            Estimator::Critic => {
                let allowed = format!("{} has no critic: use logged or importance", self.algorithm);
                Err(bad("learner.estimator", Estimator::Critic, allowed))
            }
        }
    }

    fn check_hpg(&self, models: usize) -> Result<HpgSpec, BadSetting> {
        match self.preset {
            Preset::Practical => self.check_shared(1000.0, 30.0, LearningRate::Constant, Pace::Eta(0.015)),
            Preset::Theory => {
                let required = "learner.preset = \"theory\" requires the rank s of the models' kernels";
                let s = self.intrinsic_rank.ok_or_else(|| missing("learner.intrinsic_rank", required))?;
                self.check_rank("learner.intrinsic_rank", s)?;
                let tau = 2.0 * s as f64;
                let pace = Pace::theory(models, self.dim);
                self.check_shared(tau, tau / self.dim as f64, LearningRate::Constant, pace)
            }
        }
    }

    fn check_parameter_free(&self, models: usize) -> Result<HpgSpec, BadSetting> {
        for (key, value) in [("learner.tau", self.tau), ("learner.beta", self.beta)] {
            if let Some(value) = value {
                return Err(bad(key, value, "must not be set: hpg-parameter-free finds the scale itself"));
            }
        }
        let kind = if self.eta.is_some() { LearningRate::Constant } else { LearningRate::Anytime };
        self.check_shared(1.0, 1.0 / self.dim as f64, kind, Pace::theory(models, self.dim))
    }

    fn check_ball(&self, ball: &Ball) -> Result<(), BadSetting> {
        within("learner.tau", ball.tau, SCALE.0, SCALE.1)?;
        within("learner.beta", ball.beta, SCALE.0, SCALE.1)?;
        self.check_rank("learner.rank", ball.rank)
    }

    fn check_rank(&self, key: &'static str, rank: usize) -> Result<(), BadSetting> {
        let dim = self.dim;
        if rank > dim {
            return Err(bad(key, format!("{rank} exceeds learner.dim = {dim}"), "lower the rank"));
        }
        within(key, rank, 1, dim)
    }

    /// Settings that both algorithms share; the arguments are the defaults.
    fn check_shared(&self, tau: f64, beta: f64, kind: LearningRate, pace: Pace) -> Result<HpgSpec, BadSetting> {
        let (rank, baseline) = match self.preset {
            Preset::Practical => (self.dim.min(16), Baseline::Mean),
            Preset::Theory => (self.dim, Baseline::None),
        };
        let ball =
            Ball { tau: self.tau.unwrap_or(tau), beta: self.beta.unwrap_or(beta), rank: self.rank.unwrap_or(rank) };
        self.check_ball(&ball)?;
        within("learner.weight_cap", self.weight_cap, 1.0, 1e6)?;
        Ok(HpgSpec {
            ball,
            rate: self.check_rate(kind, pace)?,
            mode: self.mode,
            estimator: self.check_reinforce()?,
            baseline: self.baseline.unwrap_or(baseline),
            weight_cap: self.weight_cap,
        })
    }

    fn check_rate(&self, kind: LearningRate, pace: Pace) -> Result<Rate, BadSetting> {
        if let Some(eta) = self.eta {
            within("learner.eta", eta, SCALE.0, SCALE.1)?;
        }
        if self.horizon == Some(0) {
            return Err(bad("learner.horizon", 0, "must be 1 or more examples"));
        }
        let root = self.horizon.map(|horizon| (horizon as f64).sqrt());
        let scale = match (self.eta.map_or(pace, Pace::Eta), root) {
            (Pace::Eta(eta), _) if self.learning_rate.unwrap_or(kind) == LearningRate::Constant => {
                return Ok(Rate::Constant(eta));
            }
            (Pace::Eta(eta), Some(root)) => eta * root,
            (Pace::Eta(_), None) => {
                let required = "a moving learning_rate requires the number of examples at which it equals eta";
                return Err(missing("learner.horizon", required));
            }
            (Pace::Scale(scale), _) => scale,
        };
        match (self.learning_rate.unwrap_or(kind), root) {
            (LearningRate::Anytime, _) => Ok(Rate::Anytime { scale }),
            (LearningRate::Doubling, _) => Ok(Rate::Doubling { scale }),
            (LearningRate::Constant, Some(root)) => Ok(Rate::Constant(scale / root)),
            (LearningRate::Constant, None) => {
                let required =
                    "a constant learning rate by theory requires the number of examples T; or set learner.eta";
                Err(missing("learner.horizon", required))
            }
        }
    }
}

/// Where a learning rate comes from.
#[derive(Debug, Clone, Copy)]
enum Pace {
    /// eta itself.
    Eta(f64),
    /// eta sqrt(T).
    Scale(f64),
}

impl Pace {
    /// The paper's eta = sqrt(M log d / T). At d = 1 the logarithm would stop all learning.
    fn theory(models: usize, dim: usize) -> Self {
        Self::Scale((models as f64 * (dim as f64).max(2.0).ln()).sqrt())
    }
}

fn within<T: PartialOrd + fmt::Display>(key: &'static str, value: T, low: T, high: T) -> Result<(), BadSetting> {
    if value >= low && value <= high { Ok(()) } else { Err(bad(key, value, format!("must be {low} to {high}"))) }
}

fn at_least<T: PartialOrd + fmt::Display>(key: &'static str, value: T, low: T) -> Result<(), BadSetting> {
    if value >= low { Ok(()) } else { Err(bad(key, value, format!("must be {low} or more"))) }
}

fn bad(key: &'static str, value: impl fmt::Display, allowed: impl Into<String>) -> BadSetting {
    BadSetting { key: key.to_owned(), problem: format!("{key} = {value}: {}", allowed.into()) }
}

fn missing(key: &'static str, required: &str) -> BadSetting {
    BadSetting { key: key.to_owned(), problem: format!("{key} is not set: {required}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_need_learning_that_is_a_sum() {
        let plain =
            LearnerConfig { shards: 3, mode: Mode::Lazy, baseline: Some(Baseline::None), ..LearnerConfig::default() };
        assert_eq!(plain.check().unwrap().shards, 3);
        for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
            let critic = LearnerConfig { shards: 3, algorithm, ..LearnerConfig::default() };
            assert_eq!(critic.check().unwrap().shards, 3);
            let forgetful = LearnerConfig { half_life: Some(100.0), ..critic };
            assert!(forgetful.check().is_err());
        }
        let changes: [fn(&mut LearnerConfig); 6] = [
            |c| (c.mode, c.estimator) = (Mode::Factored, Some(Estimator::Logged)),
            |c| c.algorithm = Algorithm::LogQuadratic,
            |c| c.baseline = None,
            |c| c.half_life = Some(100.0),
            |c| c.estimator = Some(Estimator::Importance),
            |c| c.stage = Stage::Canary,
        ];
        for change in changes {
            let mut config = plain.clone();
            change(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with("learner.shards = 3: shards are added up, which requires "), "{error}");
        }
    }

    fn config(change: impl FnOnce(&mut LearnerConfig)) -> LearnerConfig {
        let estimator = Some(Estimator::Logged);
        let mut config = LearnerConfig { dim: 8, estimator, ..LearnerConfig::default() };
        change(&mut config);
        config
    }

    #[test]
    fn bad_settings_name_their_key_and_range() {
        let nan = f64::NAN;
        let check = |change: fn(&mut LearnerConfig), key: &str, allowed: &str| {
            let error = config(change).check().unwrap_err();
            assert_eq!(error.key, key, "{error}");
            assert!(error.to_string().contains(allowed), "{error}");
        };
        check(|c| c.tau = Some(0.0), "learner.tau", "must be 0.000000001 to 1000000000");
        check(|c| c.tau = Some(-1.0), "learner.tau", "-1");
        check(|c| c.tau = Some(f64::NAN), "learner.tau", "NaN");
        check(|c| c.beta = Some(f64::INFINITY), "learner.beta", "inf");
        check(|c| c.eta = Some(0.0), "learner.eta", "must be");
        check(|c| c.rank = Some(0), "learner.rank", "must be 1 to 8");
        check(|c| c.rank = Some(9), "learner.rank", "learner.rank = 9 exceeds learner.dim = 8: lower the rank");
        check(|c| c.batch = Some(0), "learner.batch", "must be 1 to 65536");
        check(|c| c.dim = 0, "learner.dim", "must be 1 to 65536");
        check(|c| c.models.truncate(1), "learner.models", "nothing to route");
        check(|c| c.models.push("bge".to_owned()), "learner.models", "\"bge\" is listed twice");
        check(|c| c.models.push("b g e".to_owned()), "learner.models", "is not a name");
        check(|c| c.half_life = Some(0.5), "learner.half_life", "must be 1 to");
        check(|c| c.exploration_floor = 1.5, "learner.exploration_floor", "must be 0 to 1");
        check(|c| c.weight_cap = 0.5, "learner.weight_cap", "must be 1 to");
        check(|c| c.preset = Preset::Theory, "learner.intrinsic_rank", "learner.intrinsic_rank is not set: ");
        check(
            |c| (c.preset, c.intrinsic_rank) = (Preset::Theory, Some(2)),
            "learner.horizon",
            "learner.horizon is not set: a constant learning rate by theory requires the number of examples T",
        );
        check(
            |c| (c.preset, c.intrinsic_rank, c.horizon) = (Preset::Theory, Some(9), Some(9)),
            "learner.intrinsic_rank",
            "learner.intrinsic_rank = 9 exceeds learner.dim = 8",
        );
        check(|c| c.horizon = Some(0), "learner.horizon", "1 or more");
        check(
            |c| c.learning_rate = Some(LearningRate::Anytime),
            "learner.horizon",
            "is not set: a moving learning_rate",
        );
        check(|c| c.algorithm = Algorithm::Fixed, "learner.fixed_model", "is not set: ");
        check(
            |c| (c.algorithm, c.fixed_model) = (Algorithm::Fixed, Some("e5".to_owned())),
            "learner.fixed_model",
            "learner.fixed_model = \"e5\": must be one of learner.models: minilm, bge",
        );
        check(
            |c| (c.algorithm, c.tau) = (Algorithm::HpgParameterFree, Some(1.0)),
            "learner.tau",
            "finds the scale itself",
        );
        check(|c| c.guard_budget = 0.0, "learner.guard_budget", "must be 0.0001 to 0.5");
        check(
            |c| c.incumbent = Some("e5".to_owned()),
            "learner.incumbent",
            "learner.incumbent = \"e5\": must be one of learner.models: minilm, bge",
        );
        check(
            |c| c.promote = Promote::Automatic,
            "learner.promote",
            "begins in learner.stage = \"shadow\" or \"canary\"",
        );
        check(|c| (c.stage, c.evaluate_every) = (Stage::Canary, 2), "learner.evaluate_every", "must be 1");
        assert!(config(|c| c.exploration_floor = nan).check().is_err());
    }

    #[test]
    fn other_sections_are_checked_too() {
        let check = |change: fn(&mut Config), expected: &str| {
            let mut config = Config::default();
            change(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let space = |key: &str, value: serde_json::Value| [(key.to_owned(), value)].into_iter().collect();
        let mut config = Config::default();
        config.spaces.insert("shop".to_owned(), space("dim", 3.into()));
        assert_eq!(config.check().unwrap().spaces.values().next().unwrap().dim, 3);
        config.spaces.insert("shop".to_owned(), space("rank", 0.into()));
        assert!(config.check().unwrap_err().to_string().starts_with("spaces.shop.rank = 0: must be 1 to 768"));
        config.spaces.insert("shop".to_owned(), space("ranks", 1.into()));
        let unknown = "unknown key spaces.shop.ranks: did you mean spaces.shop.rank?";
        assert_eq!(config.check().unwrap_err().to_string(), unknown);
        config.spaces.insert("shop".to_owned(), space("dim", "wide".into()));
        let mistyped = "spaces.shop.dim = \"wide\": must be a whole number, 0 or more";
        assert_eq!(config.check().unwrap_err().to_string(), mistyped);
        config.spaces.insert("shop".to_owned(), space("spaces_max", 1.into()));
        assert!(
            config
                .check()
                .unwrap_err()
                .to_string()
                .contains("spaces.shop.spaces_max applies to all spaces: set it in [learner]")
        );
        check(|c| drop(c.spaces.insert(".shop".to_owned(), serde_json::Map::new())), "is not a name");
        check(|c| c.events.fields.query = "query".to_owned(), "events.fields.query = query: must be a JSON pointer");
        check(|c| c.events.bytes_max = 1, "events.bytes_max = 1: must be");
        check(|c| c.reward.range = [1.0, 1.0], "reward.range = [1, 1]: must be two finite numbers");
        check(|c| c.reward.range = [f64::NAN, 1.0], "reward.range");
        check(|c| c.join.pending_max = 0, "join.pending_max = 0: must be 1 or more");
        check(|c| c.join.default_reward = f64::INFINITY, "join.default_reward = inf: must be a finite number");
        check(|c| c.learner.spaces_max = 0, "learner.spaces_max = 0: must be");
        check(|c| c.http.keep_alive_ms = 0, "http.keep_alive_ms = 0: must be");
        check(|c| c.http.in_flight_bytes_max = 1, "http.in_flight_bytes_max = 1: must be 4194304 to");
        check(|c| c.http.hosts = vec!["http://shop".to_owned()], "http.hosts = http://shop: must be host names");
        check(|c| c.http.hosts = vec!["shop:80".to_owned()], "http.hosts = shop:80: must be host names");
        check(|c| c.http.tls.key = "k.pem".into(), "http.tls.key = k.pem: TLS also needs http.tls.certificate");
        check(|c| c.http.tls.certificate = "c.pem".into(), "TLS also needs http.tls.key");
        assert_eq!(Config::default().check().unwrap().join.remember_ms, 720_000);
    }

    #[test]
    fn beyond_loopback_a_token_is_needed() {
        let http = |listen: &str| HttpConfig { listen: listen.to_owned(), ..HttpConfig::default() };
        for local in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1", ""] {
            assert_eq!(http(local).check_listen(), Ok(()), "{local}");
        }
        for listen in ["0.0.0.0:1", "[::]:1", "192.168.1.9:1", "shop:1", "localhost.example:1"] {
            let error = http(listen).check_listen().unwrap_err().to_string();
            assert!(error.starts_with(&format!("http.listen = {listen}: ")) && error.contains("http.open"), "{error}");
            let token = Secret("t".to_owned());
            assert_eq!(HttpConfig { token, ..http(listen) }.check_listen(), Ok(()));
            assert_eq!(HttpConfig { tokens_file: "t".into(), ..http(listen) }.check_listen(), Ok(()));
            assert_eq!(HttpConfig { open: true, ..http(listen) }.check_listen(), Ok(()));
        }
    }

    /// A critic where there is one, and the paper's estimator elsewhere, unless a configuration says otherwise.
    #[test]
    fn the_default_estimator_is_a_critic() {
        let has_critic = |change: fn(&mut LearnerConfig)| {
            let mut config = LearnerConfig { dim: 8, ..LearnerConfig::default() };
            change(&mut config);
            matches!(config.check().unwrap().method, Method::ActorCritic(_))
        };
        assert!(has_critic(|_| ()));
        assert!(!has_critic(|c| c.estimator = Some(Estimator::Importance)));
        assert!(!has_critic(|c| c.mode = Mode::Lazy));
        assert!(!has_critic(|c| (c.preset, c.intrinsic_rank, c.horizon) = (Preset::Theory, Some(2), Some(400))));
        assert!(!has_critic(|c| c.algorithm = Algorithm::HpgParameterFree));
    }

    #[test]
    fn presets_resolve_and_are_overridden() {
        let hpg = |config: LearnerConfig| match config.check().unwrap().method {
            Method::Hpg(spec) | Method::HpgParameterFree(spec) => spec,
            other => panic!("{other:?}"),
        };
        let practical = hpg(config(|c| c.dim = 64));
        assert_eq!(practical.ball, Ball { tau: 1000.0, beta: 30.0, rank: 16 });
        assert_eq!((practical.rate, practical.baseline), (Rate::Constant(0.015), Baseline::Mean));
        assert_eq!(hpg(config(|_| ())).ball.rank, 8, "never more than the dimension");

        let theory = |c: &mut LearnerConfig| {
            c.models = ["a", "b", "c", "d"].map(String::from).to_vec();
            (c.preset, c.intrinsic_rank, c.horizon) = (Preset::Theory, Some(2), Some(400));
        };
        let paper = hpg(config(theory));
        assert_eq!(paper.ball, Ball { tau: 4.0, beta: 0.5, rank: 8 });
        assert_eq!((paper.rate, paper.baseline), (Rate::Constant(0.14420268866008829), Baseline::None));
        let anytime = hpg(config(|c| {
            theory(c);
            (c.horizon, c.learning_rate) = (None, Some(LearningRate::Anytime));
        }));
        assert!((anytime.rate.at(400) - 0.14420268866008829).abs() < 1e-15);

        let overridden = hpg(config(|c| {
            theory(c);
            (c.tau, c.eta, c.baseline) = (Some(7.0), Some(0.2), Some(Baseline::Mean));
        }));
        assert_eq!((overridden.ball.tau, overridden.rate), (7.0, Rate::Constant(0.2)));
        assert_eq!((overridden.ball.beta, overridden.baseline), (0.5, Baseline::Mean));

        let free = hpg(config(|c| c.algorithm = Algorithm::HpgParameterFree));
        assert_eq!(free.ball, Ball { tau: 1.0, beta: 0.125, rank: 8 });
        assert!(matches!(free.rate, Rate::Anytime { .. }));
    }

    #[test]
    fn names_display_as_they_are_written() {
        assert_eq!(Algorithm::HpgParameterFree.to_string(), "hpg-parameter-free");
        assert_eq!(Mode::Factored.to_string(), "factored");
    }
}
