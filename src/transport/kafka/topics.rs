//! Requirements on topics: missing ones are created, existing ones are checked, none is changed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::admin::{NewTopic, OwnedResourceSpecifier, ResourceSpecifier, TopicReplication};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::cluster::{Cluster, Problem, failed};
use super::outlet::LetterLimits;
use super::state::VALUE_BYTES_MAX;
use crate::config::{Lanes, Method, Settings, Spec};
use crate::event::Name;
use crate::policy::log_quadratic::RECENT_MAX;

/// What a topic is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Query or reward events.
    Events,
    /// Parameters or snapshots: the newest of every key.
    State,
    /// Malformed events.
    DeadLetters,
}

/// A required topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub used_for: Use,
    /// Number of partitions to create it with.
    pub partitions: i32,
    /// Settings to create it with.
    pub settings: BTreeMap<&'static str, String>,
    /// Message size that it must permit.
    pub message_bytes: usize,
}

/// Result of the check of a topic.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Found {
    /// Its name.
    pub topic: String,
    /// Whether it was created just now.
    pub created: bool,
    /// Partitions.
    pub partitions: usize,
    /// Deviations from the requirements, and their consequences.
    pub differences: Vec<String>,
}

/// Overhead of a message: headers of a dead letter, the frame of a batch.
const AROUND: usize = 16 << 10;

/// Time allowed for the takeover of a lane whose owner has died.
const TAKE_OVER_MS: u64 = 600_000;

/// How long the brokers may take to serve a new topic.
const CREATED_WITHIN: Duration = Duration::from_secs(60);

/// The brokers' own default of max.message.bytes.
const DEFAULT_MESSAGE_BYTES: usize = 1_048_588;

/// All required topics.
pub fn wanted(cluster: &Cluster, settings: &Settings) -> Vec<Wanted> {
    let config = &cluster.config;
    let create = &config.create;
    let params_bytes = largest_params(settings).1;
    let topic =
        |name: &String, used_for: Use, partitions: i32, message_bytes: usize, more: &[(&'static str, String)]| {
            let bytes = message_bytes.max(DEFAULT_MESSAGE_BYTES).to_string();
            let settings = more.iter().cloned().chain([("max.message.bytes", bytes)]).collect();
            Wanted { name: name.clone(), used_for, partitions, settings, message_bytes }
        };
    let compact = [("cleanup.policy", "compact".to_owned())];
    // A takeover reads the partition from its beginning, so it is compacted early and in small segments.
    let state = [
        ("cleanup.policy", "compact".to_owned()),
        ("segment.bytes", (16 << 20).to_string()),
        ("segment.ms", 600_000.to_string()),
        ("min.cleanable.dirty.ratio", "0.1".to_owned()),
        ("delete.retention.ms", 3_600_000.to_string()),
    ];
    let kept = |ms: i64| [("cleanup.policy", "delete".to_owned()), ("retention.ms", ms.to_string())];
    let (events, topics) = (settings.events.bytes_max, &config.topics);
    vec![
        topic(&topics.queries, Use::Events, create.partitions, 0, &kept(create.retention_ms)),
        topic(&topics.rewards, Use::Events, create.partitions, 0, &kept(create.retention_ms)),
        topic(&topics.params, Use::State, 1, params_bytes, &compact),
        topic(&topics.snapshots, Use::State, create.partitions, VALUE_BYTES_MAX + AROUND, &state),
        topic(&topics.dead_letters, Use::DeadLetters, 1, events + AROUND, &kept(create.dead_letters_retention_ms)),
    ]
}

/// The space with the largest parameters, and their maximum size.
pub fn largest_params(settings: &Settings) -> (Name, usize) {
    let listed = settings.spaces.iter().map(|(name, spec)| (name.clone(), params_bytes(spec)));
    let default = [(Name::default_space(), params_bytes(&settings.learner))];
    let largest = listed.chain(default).max_by_key(|(_, bytes)| *bytes);
    largest.unwrap_or_else(|| (Name::default_space(), AROUND))
}

/// Parameters of a space at their full rank and with a full head table, with their frame.
fn params_bytes(spec: &Spec) -> usize {
    let models = spec.models.len();
    models * rank(spec) * model_bytes(spec) + head_bytes(spec.head_queries_max(), models) + AROUND + models * 512
}

/// Head table: a key and one correction per model for each query.
fn head_bytes(queries: usize, models: usize) -> usize {
    queries * (8 + 4 * models)
}

fn model_bytes(spec: &Spec) -> usize {
    4 * (spec.dim + 1)
}

fn rank(spec: &Spec) -> usize {
    match &spec.method {
        Method::Hpg(hpg) | Method::HpgParameterFree(hpg) => hpg.ball.rank,
        // A linear part is as large as an eigenvector.
        Method::ActorCritic(actor) => 1 + actor.ball.rank,
        Method::HypentropyRegression(critic) => 1 + spec.dim.min(critic.ball.rank + critic.feature_rank),
        Method::Uniform | Method::Fixed(_) | Method::Exp3(_) => 0,
        Method::LogLinear(_) => 1,
        Method::LinearBandit(bandit) => bandit.feature_rank,
        Method::QuadraticSgd(_) => spec.dim,
        Method::LogQuadratic(log) => log.rank.map_or(spec.dim, |rank| spec.dim.min(rank + RECENT_MAX)),
    }
}

/// Creates missing topics, unless `check` is set; reports deviations of the others.
pub async fn init(cluster: &Cluster, settings: &Settings, check: bool) -> Result<Vec<Found>, Problem> {
    let mut wanted = wanted(cluster, settings);
    // A lane has a partition of its own there.
    let lanes = cluster.partitions(&cluster.config.topics.queries).unwrap_or(0) as i32;
    let snapshots = wanted.iter_mut().find(|topic| topic.name == cluster.config.topics.snapshots);
    snapshots.into_iter().for_each(|topic| topic.partitions = topic.partitions.max(lanes));
    let mut all = Vec::new();
    for topic in &wanted {
        let created = match cluster.partitions(&topic.name) {
            Err(Problem::MissingTopic(_)) if !check => {
                create(cluster, topic).await?;
                true
            }
            Err(Problem::MissingTopic(name)) => {
                let differences = vec!["missing: create it with `pointsman topics init`".to_owned()];
                all.push(Found { topic: name, created: false, partitions: 0, differences });
                continue;
            }
            other => other.map(|_| false)?,
        };
        let partitions = if created { topic.partitions as usize } else { cluster.partitions(&topic.name)? };
        let differences = if created { Vec::new() } else { differences(cluster, topic).await? };
        all.push(Found { topic: topic.name.clone(), created, partitions, differences });
    }
    for found in all.iter().filter(|found| found.created) {
        await_created(cluster, found).await?;
    }
    if let [queries, rewards, ..] = &mut all[..]
        && queries.partitions != rewards.partitions
        && cluster.config.lanes == Lanes::Partition
    {
        let problem = unequal(cluster, queries.partitions, rewards.partitions);
        rewards.differences.push(problem.to_string());
    }
    if let [queries, _, _, snapshots, _] = &mut all[..]
        && snapshots.partitions < queries.partitions
        && cluster.config.lanes == Lanes::Partition
    {
        let (found, wanted) = (snapshots.partitions, queries.partitions);
        snapshots
            .differences
            .push(format!("has {found} partitions, but {} has {wanted}: add partitions", queries.topic));
    }
    Ok(all)
}

async fn create(cluster: &Cluster, topic: &Wanted) -> Result<(), Problem> {
    let replication = TopicReplication::Fixed(cluster.config.create.replication);
    let mut new = NewTopic::new(&topic.name, topic.partitions, replication);
    for (key, value) in &topic.settings {
        new = new.set(key, value);
    }
    let doing = format!("cannot create topic {}", topic.name);
    let made = cluster.admin()?.create_topics(&[new], &Cluster::admin_options()).await;
    match made.map_err(|error| failed(&doing, &error))?.into_iter().next() {
        // Another process created it first.
        None | Some(Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(()),
        Some(Err((_, code))) => Err(Problem::Failed { doing, problem: code.to_string() }),
    }
}

/// Waits until every partition of a new topic can be read. The controller acknowledges a topic before the brokers serve it,
/// so a learner started right away would find it missing.
async fn await_created(cluster: &Cluster, found: &Found) -> Result<(), Problem> {
    let begun = Instant::now();
    let is_served = || {
        cluster.partitions(&found.topic)?;
        (0..found.partitions as i32).try_for_each(|partition| cluster.watermarks(&found.topic, partition).map(drop))
    };
    loop {
        match is_served() {
            Err(_) if begun.elapsed() < CREATED_WITHIN => tokio::time::sleep(Duration::from_millis(100)).await,
            served => return served,
        }
    }
}

/// Deviations of an existing topic from its requirements.
async fn differences(cluster: &Cluster, topic: &Wanted) -> Result<Vec<String>, Problem> {
    let found = settings_of(cluster, &topic.name).await?;
    let mut differences = Vec::new();
    let policy = found.get("cleanup.policy").map_or("", String::as_str);
    match topic.used_for {
        Use::State if policy != "compact" => differences.push(format!(
            "cleanup.policy is {policy:?}, not \"compact\": retention would delete the newest value of a key, and routers or \
             learners that start later would not find it"
        )),
        Use::Events | Use::DeadLetters if policy.contains("compact") => differences.push(format!(
            "cleanup.policy is {policy:?}, not \"delete\": compaction would delete events of the same key before they are read"
        )),
        _ => {}
    }
    let most = message_bytes(&found);
    if most < topic.message_bytes {
        differences.push(format!(
            "max.message.bytes is {most}, but messages may have {} bytes: raise it",
            topic.message_bytes
        ));
    }
    Ok(differences)
}

async fn settings_of(cluster: &Cluster, topic: &str) -> Result<BTreeMap<String, String>, Problem> {
    Ok(settings_of_all(cluster, &[topic]).await?.swap_remove(0))
}

/// The settings of each of these topics.
async fn settings_of_all(cluster: &Cluster, topics: &[&str]) -> Result<Vec<BTreeMap<String, String>>, Problem> {
    let doing = format!("cannot get the settings of topics {}", topics.join(", "));
    let asked: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let answer = cluster.admin()?.describe_configs(&asked, &Cluster::admin_options()).await;
    let answer = answer.map_err(|error| failed(&doing, &error))?;
    let mut found = BTreeMap::new();
    for resource in answer {
        let resource = resource.map_err(|code| failed(&doing, &KafkaError::MetadataFetch(code)))?;
        let entries: BTreeMap<String, String> =
            resource.entries.into_iter().filter_map(|entry| Some((entry.name, entry.value?))).collect();
        if let OwnedResourceSpecifier::Topic(name) = resource.specifier {
            found.insert(name, entries);
        }
    }
    let of = |topic: &&str| {
        found.remove(*topic).ok_or_else(|| Problem::Failed {
            doing: doing.clone(),
            problem: "the brokers returned no settings".to_owned(),
        })
    };
    topics.iter().map(of).collect()
}

fn message_bytes(settings: &BTreeMap<String, String>) -> usize {
    settings.get("max.message.bytes").and_then(|bytes| bytes.parse().ok()).unwrap_or(usize::MAX)
}

/// Checks that parameters fit into the messages of their topic; returns the maximum message size.
pub async fn check_params(cluster: &Cluster, settings: &Settings) -> Result<usize, Problem> {
    let topic = &cluster.config.topics.params;
    cluster.partitions(topic)?;
    let most = message_bytes(&settings_of(cluster, topic).await?);
    let (space, bytes) = largest_params(settings);
    if bytes <= most {
        return Ok(most);
    }
    let spec = settings.space(&space);
    let around = bytes - spec.models.len() * rank(spec) * model_bytes(spec);
    let rank = most.saturating_sub(around) / (spec.models.len() * model_bytes(spec)).max(1);
    Err(Problem::OversizedParams { space: space.to_string(), bytes, most, topic: topic.clone(), rank })
}

/// Size limits of dead letters. Falls back to the default of the brokers.
pub async fn letter_limits(cluster: &Cluster, settings: &Settings) -> LetterLimits {
    let found = settings_of(cluster, &cluster.config.topics.dead_letters).await;
    let message_bytes = found.map_or(DEFAULT_MESSAGE_BYTES, |found| message_bytes(&found));
    LetterLimits { value_bytes: settings.events.bytes_max, message_bytes }
}

/// Checks that lanes can move: the snapshots topic holds their states, and the events that a takeover re-reads are
/// retained.
pub async fn check_lanes(cluster: &Cluster, settings: &Settings, partitions: usize) -> Result<(), Problem> {
    let topics = &cluster.config.topics;
    let topic = topics.snapshots.clone();
    let bad =
        |problem: String, wanted: String| Err(Problem::BadSnapshotsTopic { topic: topic.clone(), problem, wanted });
    let found = cluster.partitions(&topic)?;
    if found < partitions {
        let wanted = format!("it needs at least the {partitions} partitions of {}: add partitions", topics.queries);
        return bad(format!("has {found} partitions"), wanted);
    }
    let all = settings_of_all(cluster, &[&topic, &topics.queries, &topics.rewards]).await?;
    let of_topic = &all[0];
    let policy = of_topic.get("cleanup.policy").map_or("", String::as_str);
    if policy != "compact" {
        let wanted = "it must be \"compact\", or retention would delete the states of lanes: change it".to_owned();
        return bad(format!("has cleanup.policy = {policy:?}"), wanted);
    }
    let (most, least) = (message_bytes(of_topic), VALUE_BYTES_MAX + AROUND);
    if most < least {
        return bad(format!("has max.message.bytes = {most}"), format!("it must be at least {least}: raise it"));
    }
    let join = &settings.join;
    let wanted = (join.window_ms + join.early_ms + settings.reorder_ms).saturating_add(TAKE_OVER_MS);
    for (topic, of_topic) in [&topics.queries, &topics.rewards].into_iter().zip(&all[1..]) {
        // Absent or negative means unlimited.
        let retention = of_topic.get("retention.ms").and_then(|ms| ms.parse::<u64>().ok());
        if let Some(found) = retention.filter(|found| *found < wanted) {
            return Err(Problem::ShortRetention { topic: topic.clone(), found, wanted });
        }
    }
    Ok(())
}

/// Number of partitions of queries and of rewards, which must be equal with `lanes = "partition"`.
pub fn check_partitions(cluster: &Cluster) -> Result<(usize, usize), Problem> {
    let topics = &cluster.config.topics;
    let (queries, rewards) = (cluster.partitions(&topics.queries)?, cluster.partitions(&topics.rewards)?);
    if queries != rewards && cluster.config.lanes == Lanes::Partition {
        return Err(unequal(cluster, queries, rewards));
    }
    Ok((queries, rewards))
}

fn unequal(cluster: &Cluster, of_queries: usize, of_rewards: usize) -> Problem {
    let topics = &cluster.config.topics;
    let (queries, rewards) = (topics.queries.clone(), topics.rewards.clone());
    Problem::UnequalPartitions { queries, of_queries, rewards, of_rewards }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// The remainder's directions, those of the quadratic part, and a linear part.
    #[test]
    fn the_largest_parameters_of_regression_have_all_its_parts() {
        let text = "[learner]\ndim = 768\nalgorithm = \"hypentropy-regression\"\nrank = 16\nfeature_rank = 24\n";
        let settings = toml::from_str::<Config>(text).unwrap().check().unwrap();
        let (vectors, models) = (16 + 24 + 1, 2);
        assert!(largest_params(&settings).1 >= models * vectors * 4 * (768 + 1));
    }

    /// The frame and a head table are no larger than the space reserved for them.
    #[test]
    fn encoded_parameters_are_no_larger_than_reserved() {
        use crate::router::{HeadTable, Params, Policy, ScoreForm};
        let text = "[learner]\ndim = 32\nalgorithm = \"hpg\"\nrank = 4\nhead_queries = 3000\n";
        let settings = toml::from_str::<Config>(text).unwrap().check().unwrap();
        let (spec, queries) = (&settings.learner, 3000);
        let mut policy = Policy::unlearned(spec.models.len(), None);
        policy.scores.fill(ScoreForm {
            eigenvalues: vec![1.0; 4],
            eigenvectors: vec![0.1; 4 * 32],
            linear: vec![0.1; 32],
            bias: 0.5,
        });
        let corrections = vec![0.5; queries * spec.models.len()];
        policy.head = HeadTable::new(spec.models.len(), (0..queries as u64).collect(), corrections).unwrap();
        let (space, models) = (Name::default_space(), spec.models.clone());
        let algorithm = "hpg".to_owned();
        let params =
            Params { space, epoch: 1, version: 1, revision: 1, models, dim: 32, created_ms: 1, algorithm, policy };
        let bytes = crate::wire::params::encode(&params).len();
        let reserved = params_bytes(spec);
        assert!((reserved - AROUND - 1024..=reserved).contains(&bytes), "{bytes} of {reserved}");
    }
}
