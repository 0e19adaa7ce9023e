//! The one owner of a lane: joins, learners, counts. Events in, effects out.
//!
//! [`Engine::step`] is pure: it reads no clock and does no I/O. The caller (replay, daemon, tests) passes inputs in the order
//! of [`Input::key`] and carries the effects out. Every event ends in exactly one count, so that counts
//! balance after every step:
//!
//! ```text
//! queries read = dead_lettered + retired + duplicate + late + joined + expired + evicted + pending
//! rewards read = dead_lettered + used + duplicate + late + orphaned + evicted + pending
//! ```
//!
//! A snapshot of the engine is a small head and many records, of which only the changed ones are written.
//! [`crate::wire::records`] specifies them.
//!
//! # Which spaces exist
//!
//! Only a query creates a space. Rewards that arrive before it are held in the lobby, where they use no learner and do not
//! count towards `learner.spaces_max`; the first query of their space takes them over. The lobby and the number of spaces are
//! bounded: at the limit a new space evicts the most idle space without examples, the one whose newest event is oldest.
//! `default` and listed spaces always fit and are never evicted. Requests of evicted spaces are counted `evicted`. All of
//! this depends on the order of events alone.

mod learned;
mod probation;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;

use serde::Serialize;
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::config::{MissingPropensities, Settings, Spec};
use crate::dead_letters::{Bucket, Recording};
use crate::eligible::Eligible;
use crate::evaluate::rollout::RolloutView;
use crate::evaluate::sample_ratio::{SampleRatio, SampleRatioView};
use crate::evaluate::worth::WorthView;
use crate::event::{Example, ModelName, Name, Preference, Query};
use crate::feedback::Feedback;
use crate::hpg::spectra::Eigen;
use crate::joiner::{BadJoin, JoinCounts, JoinSpec, Joined, Joiner, Payload};
use crate::learner::{BadState, ChargedDecision, Trainer};
use crate::objective::ObjectiveView;
use crate::router::{Outcomes, Policy};
use crate::warnings::{self, Evidence, Warning};
use crate::wire::envelope::{self, Damaged};
use crate::wire::events::{Bad, Parser, Propensities, QueryEvent, RewardEvent};
use crate::wire::export::Spectrum;
use crate::wire::records::Record;
use crate::wire::records::counts::COUNT_MAX;
use crate::wire::records::keys::{self, Key as RecordKey};
pub use crate::wire::records::keys::{is_of_lane, learner as learner_key, space_of};
use crate::wire::records::lane::{BucketRecord, DroppedRecord, LaneRecord};
use crate::wire::records::request::{DecisionRecord, PropensitiesRecord, RequestRecord};
use crate::wire::records::space::SpaceRecord;
pub use learned::Learned;
use probation::{Held, Probation};

/// The input of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Query events.
    Query,
    /// Reward events.
    Reward,
}

/// One event, read but not yet learned from.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    side: Side,
    bytes: Vec<u8>,
    event: Result<Event, Bad>,
    /// The time of its log when it was read.
    after_ms: Option<i64>,
}

#[derive(Debug, Clone, PartialEq)]
enum Event {
    Query(QueryEvent),
    Reward(RewardEvent),
}

/// What events are ordered by: time, queries before rewards, space, request id, bytes.
pub type Key<'a> = (i64, Side, &'a Name, &'a str, &'a [u8]);

impl Input {
    /// Parses an event; a malformed one becomes an input too, so that it is counted.
    /// `record_ms` is the timestamp of the record, if the log has one.
    pub fn parse(parser: &Parser, side: Side, bytes: Vec<u8>, record_ms: Option<i64>) -> Self {
        let event = match side {
            Side::Query => parser.query(&bytes, record_ms).map(Event::Query),
            Side::Reward => parser.reward(&bytes, record_ms).map(Event::Reward),
        };
        Self { side, bytes, event, after_ms: None }
    }

    /// Notes the time of its log when it was read: what tells a wrong timestamp from the end of a gap in the traffic.
    pub fn read_after(&mut self, time_ms: Option<i64>) {
        self.after_ms = time_ms;
    }

    /// An event that cannot be read; of one that is too large its first bytes will do.
    pub fn bad(side: Side, bytes: Vec<u8>, bad: Bad) -> Self {
        Self { side, bytes, event: Err(bad), after_ms: None }
    }

    /// The event, as it was read.
    pub fn content(&self) -> &[u8] {
        &self.bytes
    }

    /// Why it is malformed, if it is.
    pub fn problem(&self) -> Option<&Bad> {
        self.event.as_ref().err()
    }

    /// Size of the event, as it was read.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// What it is ordered by; a bad event has no time and is emitted as soon as it is read.
    pub fn key(&self) -> Option<Key<'_>> {
        let event = self.event.as_ref().ok()?;
        let (ts_ms, space) = event.time();
        Some((ts_ms, self.side, space, event.request_id(), &self.bytes))
    }
}

impl Event {
    fn time(&self) -> (i64, &Name) {
        match self {
            Self::Query(event) => (event.ts_ms, &event.space),
            Self::Reward(event) => (event.ts_ms, &event.space),
        }
    }

    fn request_id(&self) -> &str {
        match self {
            Self::Query(event) => &event.request_id,
            Self::Reward(event) => &event.request_id,
        }
    }
}

/// Effects of a step.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Dead letters: this event, or held ones that it contradicted.
    pub dead_letters: Vec<DeadLetter>,
    /// Examples that were learned from, in order.
    pub applied: Vec<Applied>,
    /// Spaces that were evicted to make room for new ones.
    pub evicted: Vec<Name>,
}

impl Effects {
    /// Whether the event of the step became a dead letter.
    pub fn rejects_its_event(&self) -> bool {
        self.dead_letters.iter().any(|letter| letter.place.is_none())
    }
}

/// A dead letter.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// Query or reward.
    pub side: Side,
    /// Its original bytes; only the first of them if it was too large.
    pub bytes: Vec<u8>,
    /// The problem.
    pub bad: Bad,
    /// Source position of a held event; `None` for the event of this step.
    pub place: Option<String>,
    /// Whether it is recorded.
    pub recording: Recording,
}

/// An example that was learned from.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    /// Its space.
    pub space: Name,
    /// Its request.
    pub request_id: String,
    /// Index of the model that was chosen.
    pub model: usize,
    /// The reward of that model, on the scale of 0..1, if the feedback has one.
    pub reward: Option<f64>,
    /// Event time from the query to its first reward, if one came.
    pub latency_ms: Option<i64>,
    /// Event time of that reward.
    pub rewarded_ms: Option<i64>,
    /// All of it, where [`Engine::show_examples`] asked for it.
    pub example: Option<Example>,
}

/// What a query carries through the join.
#[derive(Debug, Clone, PartialEq)]
struct Decision {
    query: Vec<f32>,
    model: u16,
    propensities: Known,
    policy: Option<Vec<f64>>,
    eligible: Eligible,
    /// What it was charged of each outcome.
    charged: Vec<(String, f64)>,
    /// Whether it was drawn by a key that several requests share.
    is_keyed: bool,
}

/// The known part of the distribution over the space's models.
#[derive(Debug, Clone, PartialEq)]
enum Known {
    Full(Vec<f64>),
    Chosen(f64),
    Nothing,
}

impl Payload for Decision {
    fn bytes(&self) -> usize {
        let full = if let Known::Full(p) = &self.propensities { p.len() } else { 0 };
        let numbers = full + self.policy.as_ref().map_or(0, Vec::len);
        let eligible = self.eligible.mask().map_or(0, <[bool]>::len);
        let charged: usize = self.charged.iter().map(|(name, _)| size_of::<(String, f64)>() + name.len()).sum();
        size_of::<Self>() + 4 * self.query.len() + 8 * numbers + eligible + charged
    }
}

/// All counts of a lane, or of one space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Bad query events.
    pub queries_dead: u64,
    /// Bad reward events.
    pub rewards_dead: u64,
    /// Bad events of both kinds that were counted but not recorded, beyond `events.dead_letters_bytes_max`.
    pub dead_unrecorded: u64,
    /// What the joins made of the good ones.
    pub join: JoinCounts,
    /// Examples learned from, defaulted ones included.
    pub applied: u64,
}

impl Counts {
    /// Query events read.
    pub fn queries(&self) -> u64 {
        self.queries_dead + self.join.queries.read
    }

    /// Reward events read.
    pub fn rewards(&self) -> u64 {
        self.rewards_dead + self.join.rewards.read
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.queries_dead += other.queries_dead;
        self.rewards_dead += other.rewards_dead;
        self.dead_unrecorded += other.dead_unrecorded;
        self.join += other.join;
        self.applied += other.applied;
    }
}

/// Totals of several lanes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Totals {
    /// Their counts, added.
    pub counts: Counts,
    /// Mean of the rewards learned from.
    pub mean_reward: f64,
}

impl Totals {
    /// Of these lanes.
    pub fn of<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Self {
        let (mut counts, mut sum, mut rewarded) = (Counts::default(), 0.0, 0);
        for engine in engines {
            let rewards = engine.rewards();
            (sum, rewarded) = (sum + rewards.0, rewarded + rewards.1);
            counts += engine.counts();
        }
        Self { counts, mean_reward: if rewarded > 0 { sum / rewarded as f64 } else { 0.0 } }
    }
}

/// A lane.
pub struct Engine {
    settings: Settings,
    /// Those in the lobby included.
    spaces: BTreeMap<Name, Space>,
    lobby: Lobby,
    /// Spaces that may be evicted for others: they have a query but no examples, and are not reserved.
    blank: IdleOrder,
    gone: Gone,
    /// Keys of saved records that are to be deleted.
    deleted: Vec<Vec<u8>>,
    queries_dead: u64,
    rewards_dead: u64,
    dead_letters: Bucket,
    /// The record of the lane as it was last saved.
    saved_lane: LaneRecord,
    shows_examples: bool,
}

struct Space {
    /// Absent in the lobby: until its first query.
    trainer: Option<Trainer>,
    /// What its examples were. Absent in the lobby.
    learned: Option<Learned>,
    joiner: Joiner<Decision>,
    /// Events that are too far ahead of the others to be believed yet.
    probation: Probation,
    /// Retired models.
    retired: BTreeSet<ModelName>,
    /// Whether it has neither examples nor imported parameters: its learner is as good as new.
    is_blank: bool,
    /// Whether it has changed since its changes were taken.
    touched: bool,
    /// Whether some of its records are in a snapshot.
    is_saved: bool,
}

/// Names by the time of their newest event, the most idle first.
type IdleOrder = BTreeSet<(Option<i64>, Name)>;

/// Index of the spaces that have rewards but no query so far.
#[derive(Default)]
struct Lobby {
    /// How many there are.
    number: usize,
    /// Those that may be evicted: all but the reserved ones.
    idle: IdleOrder,
    /// What these take.
    bytes: usize,
}

/// Bounds of the lobby: spaces, bytes of the rewards of one, and bytes of all together.
const LOBBY_MAX: usize = 10_000;
const LOBBY_REWARDS_BYTES_MAX: usize = 256 << 10;
const LOBBY_BYTES_MAX: usize = 64 << 20;

/// What a space in the lobby takes besides its events.
const LOBBY_SPACE_BYTES: usize = 4 << 10;

impl Lobby {
    fn is_full(&self) -> bool {
        self.idle.len() > LOBBY_MAX || self.bytes > LOBBY_BYTES_MAX
    }

    /// How rewards wait in it: as in a space, within narrower bounds.
    fn spec(join: &JoinSpec) -> JoinSpec {
        JoinSpec { pending_bytes_max: join.pending_bytes_max.min(LOBBY_REWARDS_BYTES_MAX), ..join.clone() }
    }
}

/// Counts of spaces that were evicted or dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Gone {
    /// Outcomes of their events.
    join: JoinCounts,
    /// Examples that they had learned from.
    applied: u64,
}

/// Why parameters cannot be imported.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct BadImport(String);

/// What a snapshot holds of the engine besides its records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineHead {
    /// Bad query events.
    pub queries_dead: u64,
    /// Bad reward events.
    pub rewards_dead: u64,
}

/// Why a snapshot cannot be restored.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BadSnapshot {
    /// A space does not match the configuration.
    #[error("space {space}: {problem}")]
    Space {
        /// Which one.
        space: String,
        /// The problem.
        problem: BadState,
    },
    /// A join is inconsistent with its records.
    #[error("space {space}: {problem}")]
    Join {
        /// Which one.
        space: String,
        /// The problem.
        problem: BadJoin,
    },
    /// A record is damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// Records of the lane itself contradict themselves or each other.
    #[error("the records of the lane are inconsistent: roll back to an older snapshot, or rebuild the store by replay")]
    Lane,
    /// A record belongs to no space.
    #[error("a record of the snapshot belongs to no space")]
    Stray,
}

/// Figures of one space that are cheap to compute.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally<'a> {
    /// Its name.
    pub name: &'a Name,
    /// Names of its models.
    pub models: &'a [ModelName],
    /// Examples in applied batches.
    pub version: u64,
    /// Outcomes of its events.
    pub counts: Counts,
    /// Sum and number of the rewards learned from.
    pub rewards: (f64, u64),
}

/// One space, as seen from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct SpaceView {
    /// Its name.
    pub name: Name,
    /// Names of its models.
    pub models: Vec<ModelName>,
    /// Examples in applied batches.
    pub version: u64,
    /// Outcomes of its events.
    pub counts: Counts,
    /// Mean of the rewards learned from.
    pub mean_reward: f64,
    /// Retired models.
    pub retired: Vec<ModelName>,
    /// Its parameters, where the algorithm has some.
    pub eigens: Vec<Eigen>,
    /// Estimated lift of routing.
    pub worth: Option<WorthView>,
    /// Warnings about its log.
    pub warnings: Vec<Warning>,
    /// Whether models were played as often as the propensities say.
    pub sample_ratio: SampleRatioView,
    /// The stage of its rollout, and the share of the traffic that follows the policy.
    pub rollout: RolloutView,
    /// What was charged, where more than the reward counts.
    pub objective: Option<ObjectiveView>,
}

impl Engine {
    /// An empty lane.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            spaces: BTreeMap::new(),
            lobby: Lobby::default(),
            blank: IdleOrder::new(),
            gone: Gone::default(),
            deleted: Vec::new(),
            queries_dead: 0,
            rewards_dead: 0,
            dead_letters: Bucket::default(),
            saved_lane: LaneRecord::default(),
            shows_examples: false,
        }
    }

    /// From now on what was applied is shown whole, for those who learn beside it.
    pub fn show_examples(&mut self) {
        self.shows_examples = true;
    }

    /// Restores a snapshot: its head, and its records by key. The settings may differ from those of the snapshot: models are
    /// matched by name, new ones start at zero, missing ones are retired.
    pub fn restore(
        settings: Settings,
        head: EngineHead,
        records: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
    ) -> Result<Self, BadSnapshot> {
        let mut parts: BTreeMap<Name, SpaceParts> = BTreeMap::new();
        let mut lane = LaneParts::default();
        // Keys of 0.1: the next changes replace them.
        let mut deleted = Vec::new();
        for (key, value) in records {
            match RecordKey::parse(&key).ok_or(BadSnapshot::Stray)? {
                RecordKey::Lane => lane.whole = Some(LaneRecord::open(&value)?),
                RecordKey::OldDropped => {
                    lane.dropped = Some(DroppedRecord::open_unversioned(&value)?);
                    deleted.push(key);
                }
                RecordKey::OldDeadLetters => {
                    lane.dead_letters = Some(BucketRecord::open_unversioned(&value)?);
                    deleted.push(key);
                }
                RecordKey::Space(name) => parts.entry(name).or_default().space = Some(SpaceRecord::open(&value)?),
                RecordKey::Lobby(name) => parts.entry(name).or_default().lobby = Some(SpaceRecord::open(&value)?),
                RecordKey::Learner(name) => parts.entry(name).or_default().trainer = Some(value),
                RecordKey::Request(name, request_id) => {
                    let request = RequestRecord::<DecisionRecord>::open(&value)?.map(Decision::from);
                    parts.entry(name).or_default().requests.push((request_id, request));
                }
                RecordKey::OldRequest(name, request_id) => {
                    let request = RequestRecord::<DecisionRecord>::open_unversioned(&value)?.map(Decision::from);
                    let parts = parts.entry(name).or_default();
                    parts.old_ids.push(request_id.clone());
                    parts.requests.push((request_id, request));
                    deleted.push(key);
                }
            }
        }
        let mut engine = Self { deleted, ..Self::new(settings) };
        if head.queries_dead.max(head.rewards_dead) > COUNT_MAX {
            return Err(BadSnapshot::Lane);
        }
        (engine.queries_dead, engine.rewards_dead) = (head.queries_dead, head.rewards_dead);
        engine.restore_lane(lane).ok_or(BadSnapshot::Lane)?;
        let parser = Parser::new(&engine.settings);
        for (name, parts) in parts {
            let space = Space::restore(&engine.settings, &parser, &name, parts)?;
            engine.lobby.number += usize::from(space.is_waiting());
            engine.spaces.insert(name.clone(), space);
            engine.list(&name);
        }
        Ok(engine)
    }

    /// Restores what belongs to no space; `None` if its records contradict themselves or each other.
    fn restore_lane(&mut self, parts: LaneParts) -> Option<()> {
        let is_old = parts.dropped.is_some() || parts.dead_letters.is_some();
        let saved = match parts.whole {
            Some(_) if is_old => return None,
            Some(whole) => whole,
            None => LaneRecord {
                dropped: parts.dropped.unwrap_or_default(),
                dead_letters: parts.dead_letters.unwrap_or_default(),
            },
        };
        self.gone = Gone::from_record(saved.dropped)?;
        self.dead_letters = Bucket::from_record(saved.dead_letters)?;
        // What comes from old keys is not saved under the new one yet.
        self.saved_lane = parts.whole.unwrap_or_default();
        Some(())
    }

    /// What a snapshot holds besides the records.
    pub fn head(&self) -> EngineHead {
        EngineHead { queries_dead: self.queries_dead, rewards_dead: self.rewards_dead }
    }

    /// Records changed since the last call: key, and value unless deleted.
    pub fn take_changes(&mut self) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
        let mut changes = Vec::new();
        for (name, space) in self.spaces.iter_mut().filter(|(_, space)| space.touched) {
            (space.touched, space.is_saved) = (false, true);
            space.joiner.track_changes();
            space.joiner.take_changes(|request_id, record| {
                let value = record.map(|record| record.map(DecisionRecord::from).seal());
                changes.push((keys::request(name, request_id), value));
            });
            if let Some(trainer) = space.trainer.as_ref().filter(|trainer| !space.is_blank || trainer.charges() > 0) {
                changes.push((keys::learner(name), Some(trainer.save())));
            }
            let key = if space.is_waiting() { keys::lobby(name) } else { keys::space(name) };
            changes.push((key, Some(space.to_record().seal())));
        }
        let lane = self.lane_record();
        if lane != self.saved_lane {
            self.saved_lane = lane;
            // Without the record all is zero, so that equal lanes have equal records.
            changes.push((keys::lane(), (lane != LaneRecord::default()).then(|| lane.seal())));
        }
        if !self.deleted.is_empty() {
            // A space that was created again since has rewritten some of these keys.
            let written: BTreeSet<Vec<u8>> = changes.iter().map(|(key, _)| key.clone()).collect();
            let deleted: BTreeSet<Vec<u8>> = self.deleted.drain(..).collect();
            changes.extend(deleted.difference(&written).map(|key| (key.clone(), None)));
        }
        changes
    }

    fn lane_record(&self) -> LaneRecord {
        LaneRecord { dropped: self.gone.to_record(), dead_letters: self.dead_letters.to_record() }
    }

    /// Drops a space with everything it has learned; false if it does not exist.
    pub fn drop_space(&mut self, name: &Name) -> bool {
        self.unlist(name);
        self.remove(name)
    }

    /// Starts the models of a space from given parameters; those that are not named keep what they have.
    pub fn import(&mut self, space: Name, eigens: &[(ModelName, Spectrum)], dim: usize) -> Result<(), BadImport> {
        let spec = self.settings.space(&space);
        if dim != spec.dim {
            return Err(BadImport(format!(
                "the file has dim = {dim}, but space {space} has dim = {}: import into a space of the same dimension",
                spec.dim
            )));
        }
        let places: Vec<Option<usize>> =
            eigens.iter().map(|(name, _)| spec.models.iter().position(|known| known == name)).collect();
        if let Some(at) = places.iter().position(Option::is_none) {
            return Err(BadImport(format!("space {space} has no model {}: add it to learner.models", eigens[at].0)));
        }
        self.unlist(&space);
        self.admit(&space, &mut Vec::new()).map_err(|bad| BadImport(bad.to_string()))?;
        let space = self.spaces.get_mut(&space).expect("it was just admitted");
        let trainer = space.trainer.as_mut().expect("one that is admitted has a learner");
        (space.is_blank, space.touched) = (false, true);
        for (place, (_, (lambda, vectors))) in places.into_iter().flatten().zip(eigens) {
            if !trainer.set(place, lambda, vectors) {
                let spec = trainer.spec();
                let way_out = "use algorithm hpg with mode factored, explicit or exact";
                return Err(BadImport(format!(
                    "algorithm {} does not support imported parameters: {way_out}",
                    spec.algorithm()
                )));
            }
        }
        Ok(())
    }

    /// Whether a space has neither examples nor imported parameters: there is nothing of it to publish.
    pub fn is_blank(&self, space: &Name) -> bool {
        self.spaces.get(space).is_none_or(|space| space.is_blank)
    }

    /// Names of its spaces.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.created().map(|(name, ..)| name)
    }

    /// Its spaces but for those in the lobby.
    fn created(&self) -> impl Iterator<Item = (&Name, &Space, &Trainer)> {
        self.spaces.iter().filter_map(|(name, space)| Some((name, space, space.trainer.as_ref()?)))
    }

    fn trainer(&self, space: &Name) -> Option<&Trainer> {
        self.spaces.get(space)?.trainer.as_ref()
    }

    /// Examples in applied batches of a space.
    pub fn version(&self, space: &Name) -> Option<u64> {
        self.trainer(space).map(Trainer::version)
    }

    /// Estimated lift of routing in a space; `None` without estimates.
    pub fn worth(&self, space: &Name) -> Option<WorthView> {
        self.trainer(space)?.worth()
    }

    /// Warnings about the log of a space.
    pub fn warnings(&self, space: &Name) -> Vec<Warning> {
        self.spaces.get(space).map(Space::warnings).unwrap_or_default()
    }

    /// The sample-ratio test of a space, and the configuration of its learner.
    pub fn sample_ratio(&self, space: &Name) -> Option<(SampleRatio, &Spec)> {
        self.trainer(space).map(|trainer| (trainer.sample_ratio(), trainer.spec()))
    }

    /// The stage of a space's rollout, and the share of the traffic that follows the policy.
    pub fn rollout(&self, space: &Name) -> Option<RolloutView> {
        self.trainer(space).map(Trainer::rollout)
    }

    /// The policy of a space, in the routing form.
    pub fn policy(&self, space: &Name) -> Option<Policy> {
        self.trainer(space).map(Trainer::policy)
    }

    /// Processes one event.
    pub fn step(&mut self, input: Input) -> Effects {
        self.step_from(input, String::new)
    }

    /// Processes one event; `place` returns its source position, in case it is held.
    pub fn step_from(&mut self, input: Input, place: impl FnOnce() -> String) -> Effects {
        let mut effects = Effects::default();
        let Ok((ts_ms, space)) = input.event.as_ref().map(Event::time) else {
            self.take(input, true, None, &mut effects);
            return effects;
        };
        let (space, side) = (space.clone(), input.side);
        self.unlist(&space);
        let reach_ms = self.settings.reach_ms();
        let known = self.spaces.get_mut(&space);
        let is_ahead = known.as_ref().is_some_and(|space| space.probation.is_ahead(ts_ms, reach_ms));
        if let Some(known) = known.filter(|_| is_ahead) {
            let mut joined = Vec::new();
            known.probation.hold(input, ts_ms, false, place());
            known.joiner.observe(ts_ms, &mut joined);
            known.touched = true;
            known.learn(&space, joined, &self.settings, self.shows_examples, &mut effects.applied);
        } else {
            let is_starting = self.spaces.get(&space).is_none_or(|space| space.probation.is_starting());
            let copy = is_starting.then(|| (input.clone(), place()));
            if self.take(input, true, None, &mut effects)
                && let Some(known) = self.spaces.get_mut(&space)
            {
                known.probation.note_taken(side, ts_ms);
                copy.into_iter().for_each(|(input, place)| known.probation.hold(input, ts_ms, true, place));
            }
        }
        self.resolve(&space, &mut effects);
        self.list(&space);
        self.bound_lobby();
        effects
    }

    /// Processes confirmed events on probation, and rejects contradicted ones.
    fn resolve(&mut self, name: &Name, effects: &mut Effects) {
        let reach_ms = self.settings.reach_ms();
        while let Some(space) = self.spaces.get_mut(name) {
            space.probation.note_time(space.joiner.time_ms());
            if space.probation.is_empty() {
                return;
            }
            if let Some(held) = space.probation.release(reach_ms) {
                self.take_held(name, held, effects);
            } else if let Some(held) = space.probation.contradicted() {
                space.joiner.retract(held.ts_ms);
                if !held.is_taken || space.withdraw(&held.input) {
                    let time_ms = space.joiner.time_ms().unwrap_or_default();
                    let bad = Bad::Unconfirmed(held.ts_ms.saturating_sub(time_ms).max(0).unsigned_abs());
                    self.bury(held.input, bad, Some(held.place), effects);
                }
            } else {
                return;
            }
        }
    }

    fn take_held(&mut self, name: &Name, held: Held, effects: &mut Effects) {
        let Held { ts_ms, is_taken, place, input, .. } = held;
        let side = input.side;
        if !is_taken
            && self.take(input, false, Some(place), effects)
            && let Some(space) = self.spaces.get_mut(name)
        {
            space.probation.note_taken(side, ts_ms);
        }
    }

    /// Passes an event to its space; a malformed one becomes a dead letter. Returns whether it was valid. `observes`: whether
    /// its time counts; that of a held event has counted already.
    fn take(&mut self, input: Input, observes: bool, place: Option<String>, effects: &mut Effects) -> bool {
        let Input { side, bytes, event, after_ms } = input;
        let taken = match event {
            Ok(Event::Query(event)) => self.query(event, observes, effects),
            Ok(Event::Reward(event)) => self.reward(event, observes, &mut effects.applied),
            Err(bad) => Err(bad),
        };
        match taken {
            Ok(()) => {
                self.dead_letters.refill();
                true
            }
            Err(bad) => {
                let input = Input { side, bytes, event: Err(bad.clone()), after_ms };
                self.bury(input, bad, place, effects);
                false
            }
        }
    }

    fn bury(&mut self, input: Input, bad: Bad, place: Option<String>, effects: &mut Effects) {
        let Input { side, bytes, .. } = input;
        match side {
            Side::Query => self.queries_dead += 1,
            Side::Reward => self.rewards_dead += 1,
        }
        // Of what was never read the letter is all there is.
        let recording = match bad {
            Bad::Gap { .. } => Recording::Recorded,
            _ => self.dead_letters.take(bytes.len(), self.settings.events.dead_letters_bytes_max),
        };
        effects.dead_letters.push(DeadLetter { side, bytes, bad, place, recording });
    }

    /// Ends a replay: closes all windows, releases events on probation, and applies partial batches.
    pub fn finish(&mut self) -> Effects {
        let mut effects = Effects::default();
        let names: Vec<Name> = self.spaces.keys().cloned().collect();
        for name in names {
            self.unlist(&name);
            self.close(&name, &mut effects);
            let held = self.spaces.get_mut(&name).map(|space| space.probation.take_all()).unwrap_or_default();
            held.into_iter().for_each(|held| self.take_held(&name, held, &mut effects));
            self.close(&name, &mut effects);
            if let Some(space) = self.spaces.get_mut(&name) {
                space.trainer.iter_mut().for_each(Trainer::flush);
                space.touched = true;
            }
            self.list(&name);
        }
        effects
    }

    fn close(&mut self, name: &Name, effects: &mut Effects) {
        let Some(space) = self.spaces.get_mut(name) else { return };
        let mut joined = Vec::new();
        space.joiner.close_all(&mut joined);
        space.learn(name, joined, &self.settings, self.shows_examples, &mut effects.applied);
    }

    /// All counts of the lane.
    pub fn counts(&self) -> Counts {
        let start = Counts {
            queries_dead: self.queries_dead,
            rewards_dead: self.rewards_dead,
            dead_unrecorded: self.dead_letters.unrecorded(),
            ..Counts::default()
        };
        let mut sum = self.spaces.values().fold(start, |mut sum, space| {
            sum += space.counts();
            sum
        });
        sum.join += self.gone.join;
        sum.applied += self.gone.applied;
        sum
    }

    /// Sum and number of all rewards learned from.
    pub fn rewards(&self) -> (f64, u64) {
        let rewards = self.created().map(|(_, _, trainer)| trainer.rewards());
        rewards.fold((0.0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    }

    /// Their mean.
    pub fn mean_reward(&self) -> f64 {
        match self.rewards() {
            (_, 0) => 0.0,
            (sum, number) => sum / number as f64,
        }
    }

    /// Number of decisions that a space was charged for.
    pub fn charges(&self, space: &Name) -> u64 {
        self.trainer(space).map_or(0, Trainer::charges)
    }

    /// What a space was charged; `None` if only the reward counts.
    pub fn objective(&self, space: &Name) -> Option<ObjectiveView> {
        self.trainer(space)?.objective()
    }

    /// Its spaces by name, without their parameters: cheap enough to ask for now and then while it learns.
    pub fn tallies(&self) -> impl Iterator<Item = Tally<'_>> {
        self.created().map(|(name, space, trainer)| Tally {
            name,
            models: &trainer.spec().models,
            version: trainer.version(),
            counts: space.counts(),
            rewards: trainer.rewards(),
        })
    }

    /// Its spaces, by name.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceView> {
        self.created().map(|(name, space, trainer)| SpaceView {
            name: name.clone(),
            models: trainer.spec().models.clone(),
            version: trainer.version(),
            counts: space.counts(),
            mean_reward: trainer.mean_reward(),
            retired: space.retired.iter().cloned().collect(),
            eigens: trainer.eigens(),
            worth: trainer.worth(),
            warnings: space.warnings(),
            sample_ratio: trainer.sample_ratio().view(&trainer.spec().models, trainer.spec().worth.alpha),
            rollout: trainer.rollout(),
            objective: trainer.objective(),
        })
    }

    /// A digest of learners, joins, remembered ids and counts: equal for equal histories.
    pub fn digest(&self) -> String {
        let mut hash = Xxh3::new();
        let mut add = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(&self.queries_dead.to_le_bytes());
        add(&self.rewards_dead.to_le_bytes());
        for (name, space) in &self.spaces {
            add(name.as_str().as_bytes());
            add(&space.trainer.as_ref().map(Trainer::save).unwrap_or_default());
            let mut record = space.to_record();
            // Where an event was read, and when, depends on the split into files.
            record.probation.held.iter_mut().for_each(|held| (held.after_ms, held.place) = (0, String::new()));
            add(&record.seal());
            for (request_id, request) in space.joiner.requests() {
                add(request_id.as_bytes());
                add(&request.map(DecisionRecord::from).seal());
            }
        }
        add(&envelope::encode(&self.gone.to_record()));
        format!("{:032x}", hash.digest128())
    }

    fn query(&mut self, event: QueryEvent, observes: bool, effects: &mut Effects) -> Result<(), Bad> {
        let QueryEvent { request_id, space, ts_ms, query, model, propensities, policy, .. } = event;
        let (params_version, outcomes, is_keyed) = (event.params_version, event.outcomes, event.is_keyed);
        let retired = self.spaces.get(&space).map_or(&NONE_RETIRED, |space| &space.retired);
        let decision = decide(
            self.settings.space(&space),
            retired,
            query,
            &model,
            propensities,
            policy,
            self.settings.missing_propensities,
        )?;
        self.admit(&space, &mut effects.evicted)?;
        let observed = observes.then_some(ts_ms);
        self.within(&space, observed, &mut effects.applied, |space, joined| match decision {
            Some(mut decision) => {
                decision.is_keyed = is_keyed;
                if space.joiner.opens(&request_id, ts_ms) {
                    space.charge(&mut decision, params_version, &outcomes);
                }
                space.joiner.query(&request_id, ts_ms, decision, joined);
            }
            None => space.joiner.retired(),
        });
        Ok(())
    }

    fn reward(&mut self, event: RewardEvent, observes: bool, applied: &mut Vec<Applied>) -> Result<(), Bad> {
        let RewardEvent { request_id, space, ts_ms, feedback, event_id } = event;
        self.check_feedback(&space, &feedback)?;
        if !self.spaces.contains_key(&space) {
            self.check_allowed(&space)?;
            self.lobby.number += 1;
            self.spaces.insert(space.clone(), Space::waiting(Lobby::spec(&self.settings.join)));
        }
        self.within(&space, observes.then_some(ts_ms), applied, |space, joined| {
            space.joiner.reward(&request_id, ts_ms, feedback, event_id.as_deref(), joined);
        });
        Ok(())
    }

    /// Rejects feedback about a model that never existed.
    fn check_feedback(&self, space: &Name, feedback: &Feedback) -> Result<(), Bad> {
        let Some(more) = &feedback.more else { return Ok(()) };
        let spec = self.settings.space(space);
        let retired = self.spaces.get(space).map_or(&NONE_RETIRED, |space| &space.retired);
        let is_known =
            |name: &&ModelName| spec.models.contains(name) || retired.contains(name) || spec.retired.contains(name);
        let preference = more.preference.iter().flat_map(|(preferred, over)| [preferred, over]);
        match more.rewards.keys().chain(preference).find(|name| !is_known(name)) {
            Some(unknown) => Err(Bad::UnknownModel(unknown.clone())),
            None => Ok(()),
        }
    }

    /// Passes an event to the join of its space, and learns from what is complete by then.
    fn within(
        &mut self,
        name: &Name,
        observed_ms: Option<i64>,
        applied: &mut Vec<Applied>,
        event: impl FnOnce(&mut Space, &mut Vec<Joined<Decision>>),
    ) {
        let Some(space) = self.spaces.get_mut(name) else { return };
        let mut joined = Vec::new();
        observed_ms.into_iter().for_each(|ts_ms| space.joiner.observe(ts_ms, &mut joined));
        event(space, &mut joined);
        space.touched = true;
        space.learn(name, joined, &self.settings, self.shows_examples, applied);
    }

    fn check_allowed(&self, name: &Name) -> Result<(), Bad> {
        if self.settings.allows(name) { Ok(()) } else { Err(Bad::UnlistedSpace(name.clone())) }
    }

    /// Makes sure that a space exists, with a learner: takes it from the lobby, or creates it. Where there are too many, it
    /// evicts another.
    fn admit(&mut self, name: &Name, evicted: &mut Vec<Name>) -> Result<(), Bad> {
        if self.spaces.get(name).is_some_and(|space| !space.is_waiting()) {
            return Ok(());
        }
        self.check_allowed(name)?;
        if !self.settings.is_reserved(name) {
            self.make_room(evicted)?;
        }
        if !self.spaces.contains_key(name) {
            self.lobby.number += 1;
            self.spaces.insert(name.clone(), Space::waiting(self.settings.join.clone()));
        }
        let Some(space) = self.spaces.get_mut(name) else { return Ok(()) };
        self.lobby.number -= 1;
        let spec = self.settings.space(name);
        space.learned = Some(Learned::new(spec.models.len(), &self.settings.reward));
        space.trainer = Some(Trainer::new(spec.clone()));
        space.joiner.set_spec(self.settings.join.clone());
        space.touched = true;
        if space.is_saved {
            self.deleted.push(keys::lobby(name));
        }
        Ok(())
    }

    /// Makes room for one more space that is not reserved. Room for listed spaces stays reserved.
    fn make_room(&mut self, evicted: &mut Vec<Name>) -> Result<(), Bad> {
        let most = self.settings.spaces_max;
        let is_there = |name: &Name| self.spaces.get(name).is_some_and(|space| !space.is_waiting());
        let absent = self.settings.spaces.keys().filter(|listed| !is_there(listed)).count();
        if self.spaces.len() - self.lobby.number + absent < most {
            return Ok(());
        }
        let (_, idle) = self.blank.pop_first().ok_or(Bad::TooManySpaces(most))?;
        self.remove(&idle);
        evicted.push(idle);
        Ok(())
    }

    fn bound_lobby(&mut self) {
        while self.lobby.is_full()
            && let Some(name) = self.lobby.idle.first().map(|(_, name)| name.clone())
        {
            self.unlist(&name);
            self.remove(&name);
        }
    }

    /// Takes a space out of the order of eviction, while it changes.
    fn unlist(&mut self, name: &Name) {
        let Some(space) = self.spaces.get(name).filter(|space| space.is_blank) else { return };
        let entry = (space.probation.newest_ms(), name.clone());
        if !space.is_waiting() {
            self.blank.remove(&entry);
        } else if self.lobby.idle.remove(&entry) {
            self.lobby.bytes -= space.lobby_bytes();
        }
    }

    /// Puts a space where it belongs in the order of eviction, if it may be evicted.
    fn list(&mut self, name: &Name) {
        let Some(space) = self.spaces.get(name).filter(|space| space.is_blank) else { return };
        if self.settings.is_reserved(name) {
            return;
        }
        let entry = (space.probation.newest_ms(), name.clone());
        if space.is_waiting() {
            self.lobby.bytes += space.lobby_bytes();
            self.lobby.idle.insert(entry);
        } else {
            self.blank.insert(entry);
        }
    }

    /// Removes a space that is in no order of eviction, and keeps its counts. Its saved records are deleted with the next
    /// changes. False if there is none of this name.
    fn remove(&mut self, name: &Name) -> bool {
        let Some(mut space) = self.spaces.remove(name) else { return false };
        self.lobby.number -= usize::from(space.is_waiting());
        let counts = space.evict_all();
        self.gone.join += counts.join;
        self.gone.applied += counts.applied;
        if space.is_saved {
            self.deleted.extend([keys::space(name), keys::learner(name), keys::lobby(name)]);
            space.joiner.take_changes(|request_id, _| self.deleted.push(keys::request(name, request_id)));
        }
        true
    }
}

static NONE_RETIRED: BTreeSet<ModelName> = BTreeSet::new();

/// Records of a space.
#[derive(Default)]
struct SpaceParts {
    space: Option<SpaceRecord>,
    lobby: Option<SpaceRecord>,
    trainer: Option<Vec<u8>>,
    requests: Vec<(String, RequestRecord<Decision>)>,
    /// Which of the requests came from keys of 0.1.
    old_ids: Vec<String>,
}

/// Records of the lane itself.
#[derive(Default)]
struct LaneParts {
    whole: Option<LaneRecord>,
    dropped: Option<DroppedRecord>,
    dead_letters: Option<BucketRecord>,
}

impl Gone {
    fn to_record(self) -> DroppedRecord {
        DroppedRecord { join: self.join.to_record(), applied: self.applied }
    }

    /// As it was saved; `None` if the record contradicts itself.
    fn from_record(record: DroppedRecord) -> Option<Self> {
        let DroppedRecord { join, applied } = record;
        let join = JoinCounts::from_record(join)?;
        (applied <= COUNT_MAX).then_some(Self { join, applied })
    }
}

impl Space {
    /// One in the lobby, that has not seen anything.
    fn waiting(join: JoinSpec) -> Self {
        let (joiner, probation) = (Joiner::new(join), Probation::new());
        let retired = BTreeSet::new();
        let (trainer, learned) = (None, None);
        Self { trainer, learned, joiner, probation, retired, is_blank: true, touched: true, is_saved: false }
    }

    /// Whether it is in the lobby.
    fn is_waiting(&self) -> bool {
        self.trainer.is_none()
    }

    /// What it takes in the lobby.
    fn lobby_bytes(&self) -> usize {
        LOBBY_SPACE_BYTES + self.joiner.load().bytes + self.probation.bytes()
    }

    /// As it is saved, without its learner and its requests.
    fn to_record(&self) -> SpaceRecord {
        SpaceRecord {
            models: self.trainer.as_ref().map(|trainer| trainer.spec().models.clone()).unwrap_or_default(),
            retired: self.retired.clone(),
            join: self.joiner.to_record(),
            probation: self.probation.to_record(),
            learned: self.learned.as_ref().and_then(Learned::to_record),
        }
    }

    fn restore(settings: &Settings, parser: &Parser, name: &Name, parts: SpaceParts) -> Result<Self, BadSnapshot> {
        let SpaceParts { space, lobby, trainer, requests, old_ids } = parts;
        let bad_join = |problem| BadSnapshot::Join { space: name.to_string(), problem };
        let is_created = space.is_some();
        let SpaceRecord { models, retired, join, probation, learned } = match (space, lobby) {
            (Some(record), None) => record,
            (None, Some(record)) if trainer.is_none() => record,
            _ => return Err(BadSnapshot::Stray),
        };
        let mut joiner = Joiner::restore(join, requests).map_err(bad_join)?;
        old_ids.iter().for_each(|request_id| joiner.mark_changed(request_id));
        let probation = Probation::from_record(probation, name, parser).ok_or_else(|| bad_join(BadJoin))?;
        let mut restored = Self {
            trainer: None,
            learned: None,
            joiner,
            probation,
            retired,
            is_blank: true,
            touched: !old_ids.is_empty(),
            is_saved: true,
        };
        if is_created {
            let learned = Learned::from_record(learned, models.len(), &settings.reward);
            restored.learned = Some(learned.ok_or_else(|| bad_join(BadJoin))?);
            restored.restore_created(settings, name, models, trainer.as_deref())?;
        } else if learned.is_some() || restored.joiner.waiting().next().is_some() {
            return Err(bad_join(BadJoin));
        } else {
            restored.set_join(Lobby::spec(&settings.join));
        }
        Ok(restored)
    }

    /// Restores the learner, and fits a space that had a query to the present configuration. `models` are those it was saved
    /// with.
    fn restore_created(
        &mut self,
        settings: &Settings,
        name: &Name,
        models: Vec<ModelName>,
        trainer: Option<&[u8]>,
    ) -> Result<(), BadSnapshot> {
        let spec = settings.space(name);
        let (trainer, is_blank) = restore_trainer(spec, trainer)
            .map_err(|problem| BadSnapshot::Space { space: name.to_string(), problem })?;
        (self.trainer, self.is_blank) = (Some(trainer), is_blank);
        if self.joiner.waiting().any(|decision| !decision.fits(spec.dim, models.len())) {
            return Err(BadSnapshot::Join { space: name.to_string(), problem: BadJoin });
        }
        self.set_join(settings.join.clone());
        if models != spec.models {
            let places: Vec<Option<usize>> =
                spec.models.iter().map(|model| models.iter().position(|old| old == model)).collect();
            self.joiner.remap(|decision| decision.remap(&places));
            self.learned = Some(Learned::new(spec.models.len(), &settings.reward));
            self.retired.extend(models);
            self.touched = true;
        }
        self.retired.retain(|model| !spec.models.contains(model));
        Ok(())
    }

    fn set_join(&mut self, join: JoinSpec) {
        self.touched |= *self.joiner.spec() != join;
        self.joiner.set_spec(join);
    }

    /// Counts all that it holds as evicted; the counts that it leaves behind.
    fn evict_all(&mut self) -> Counts {
        // Bounds of nothing: the join evicts everything, and tracks what to delete.
        self.joiner.set_spec(JoinSpec { pending_max: 0, remembered_max: 0, ..self.joiner.spec().clone() });
        self.joiner.remap(|_| true);
        let mut counts = self.counts();
        let JoinCounts { queries, rewards } = &mut counts.join;
        // What is left was on probation.
        queries.evicted += std::mem::take(&mut queries.pending);
        rewards.evicted += std::mem::take(&mut rewards.pending);
        counts
    }

    /// Outcomes of its events; those on probation are pending.
    fn counts(&self) -> Counts {
        let mut join = *self.joiner.counts();
        let (queries, rewards) = (self.probation.pending(Side::Query), self.probation.pending(Side::Reward));
        join.queries.read += queries;
        join.queries.pending += queries;
        join.rewards.read += rewards;
        join.rewards.pending += rewards;
        let applied = self.trainer.as_ref().map_or(0, Trainer::learned);
        Counts { join, applied, ..Counts::default() }
    }

    fn warnings(&self) -> Vec<Warning> {
        let Some((trainer, learned)) = self.trainer.as_ref().zip(self.learned.as_ref()) else { return Vec::new() };
        let (models, rule) = (&trainer.spec().models, self.joiner.spec());
        warnings::warnings(Evidence { models, rule, counts: self.joiner.counts(), learned })
    }

    /// Takes back an event that still waits for its counterpart; false if it does not.
    fn withdraw(&mut self, input: &Input) -> bool {
        match &input.event {
            Ok(Event::Query(event)) => self.joiner.withdraw_query(&event.request_id, event.ts_ms),
            Ok(Event::Reward(RewardEvent { request_id, ts_ms, feedback, event_id, .. })) => {
                self.joiner.withdraw_reward(request_id, *ts_ms, feedback, event_id.as_deref())
            }
            Err(_) => false,
        }
    }

    fn learn(
        &mut self,
        name: &Name,
        joined: Vec<Joined<Decision>>,
        settings: &Settings,
        shows_examples: bool,
        applied: &mut Vec<Applied>,
    ) {
        for Joined { request_id, ts_ms, payload, mut feedback, defaulted, rewarded_ms } in joined {
            let model = usize::from(payload.model);
            if let Some(outcomes) = feedback.outcomes() {
                self.trainer_mut().settle(model, &payload.charged, outcomes);
            }
            let more = feedback.more.take().map(|more| *more).unwrap_or_default();
            let failed = more.failed && feedback.reward.is_none();
            let spec = self.trainer_mut().spec();
            let place = |name: &ModelName| spec.models.iter().position(|known| known == name);
            let mut others: Vec<(usize, f64)> =
                more.rewards.iter().filter_map(|(name, reward)| Some((place(name)?, *reward))).collect();
            let preference = more
                .preference
                .as_ref()
                .and_then(|(preferred, over)| Some(Preference { preferred: place(preferred)?, over: place(over)? }));
            if failed {
                self.learned_mut().add_failure(model);
            }
            // Feedback for several models may name the chosen one.
            let own = others.iter().position(|(other, _)| *other == model).map(|at| others.remove(at).1);
            let failed_reward = settings.reward.failed.filter(|_| failed);
            let reward = feedback.reward.or(own).or(failed_reward).map(|reward| {
                let (unit, is_clipped) = self.learned_mut().add(model, reward, defaulted, &settings.reward);
                if is_clipped {
                    self.joiner.count_clipped();
                }
                unit
            });
            if reward.is_none() && others.is_empty() && preference.is_none() {
                continue;
            }
            self.is_blank = false;
            others.iter_mut().for_each(|(_, reward)| *reward = settings.reward.unit(*reward));
            let example = self.example(payload, reward, settings.missing_propensities);
            let example = example.with_others(others).expect("one reward for each model");
            let example = match preference {
                Some(preference) => example.with_preference(preference).expect("two models of this space"),
                None => example,
            };
            let shown = shows_examples.then(|| example.clone());
            self.trainer_mut().learn(example).expect("checked against this space when it came");
            let latency_ms = rewarded_ms.map(|rewarded_ms| rewarded_ms.saturating_sub(ts_ms));
            let (space, example) = (name.clone(), shown);
            applied.push(Applied { space, request_id, model, reward, latency_ms, rewarded_ms, example });
        }
    }

    /// The summary of a space that has had a query.
    fn learned_mut(&mut self) -> &mut Learned {
        self.learned.as_mut().expect("what is joined had a query, which came with a learner")
    }

    /// The learner of a space that has had a query.
    fn trainer_mut(&mut self) -> &mut Trainer {
        self.trainer.as_mut().expect("what is joined had a query, which came with a learner")
    }

    /// Charges a decision whose window opens.
    fn charge(&mut self, decision: &mut Decision, params_version: Option<u64>, outcomes: &BTreeMap<String, f64>) {
        let Some(trainer) = self.trainer.as_mut() else { return };
        let played = if let Known::Full(p) = &decision.propensities { Some(&p[..]) } else { None };
        let (model, policy) = (usize::from(decision.model), decision.policy.as_deref());
        decision.charged = trainer.charge(ChargedDecision { model, played, policy, params_version }, outcomes);
    }

    fn example(&self, decision: Decision, reward: Option<f64>, missing: MissingPropensities) -> Example {
        let query = Query::from_f32(&decision.query).expect("checked when it came");
        let model = usize::from(decision.model);
        let is_stated = match decision.propensities {
            // Draws that requests share say little of how often models are drawn.
            _ if decision.is_keyed => false,
            Known::Full(_) => true,
            Known::Chosen(_) => false,
            Known::Nothing => missing == MissingPropensities::Uniform,
        };
        let (propensities, assumed) = match decision.propensities {
            Known::Full(p) => (p, None),
            Known::Chosen(p) => self.assume(&query, model, Some(p), missing),
            Known::Nothing => self.assume(&query, model, None, missing),
        };
        let policy = decision.policy.or(assumed);
        let example = match reward {
            Some(reward) => Example::new(query, model, propensities, policy, reward),
            None => Example::unrewarded(query, model, propensities, policy),
        };
        let example = example.and_then(|example| example.among(decision.eligible)).expect("checked when it came");
        if is_stated { example } else { example.with_guessed_propensities() }
    }

    /// The full distribution, completed from the propensity of the chosen model, and the policy where it differs.
    fn assume(
        &self,
        query: &Query,
        model: usize,
        chosen: Option<f64>,
        missing: MissingPropensities,
    ) -> (Vec<f64>, Option<Vec<f64>>) {
        let trainer = self.trainer.as_ref().expect("what is joined had a query, which came with a learner");
        let models = trainer.spec().models.len();
        if missing == MissingPropensities::Current {
            let current = trainer.distribution(query).expect("checked when it came");
            let mut propensities = current.propensities;
            // A fixed policy gives all but one model nothing, yet this one was chosen.
            propensities[model] = chosen.unwrap_or(propensities[model]).max(f64::MIN_POSITIVE);
            return (propensities, Some(current.policy));
        }
        let chosen = chosen.unwrap_or(1.0 / models as f64);
        let mut propensities = vec![(1.0 - chosen) / (models - 1) as f64; models];
        propensities[model] = chosen;
        (propensities, None)
    }
}

/// A saved learner, or a new one; and whether it is as good as new.
fn restore_trainer(spec: &Spec, saved: Option<&[u8]>) -> Result<(Trainer, bool), BadState> {
    let new = || Trainer::new(spec.clone());
    let Some(saved) = saved else { return Ok((new(), true)) };
    let trainer = Trainer::restore(spec.clone(), saved)?;
    // Imported parameters come without examples. Prices are no knowledge.
    let scores = |trainer: &Trainer| Policy { outcomes: Outcomes::default(), ..trainer.policy() };
    let is_blank = trainer.learned() == 0 && scores(&trainer) == scores(&new());
    Ok((trainer, is_blank))
}

impl Decision {
    fn fits(&self, dim: usize, models: usize) -> bool {
        let full = |p: &[f64]| p.len() == models && p.iter().all(|p| (0.0..=1.0).contains(p));
        let chosen = usize::from(self.model);
        let known = match &self.propensities {
            Known::Full(p) => full(p) && p.get(chosen).is_some_and(|p| *p > 0.0),
            Known::Chosen(p) => *p > 0.0 && *p <= 1.0,
            Known::Nothing => true,
        };
        known
            && chosen < models
            && self.eligible.mask().is_none_or(|mask| mask.len() == models && mask[chosen])
            && self.charged.iter().all(|(_, amount)| amount.is_finite())
            && self.policy.as_ref().is_none_or(|policy| full(policy))
            && self.query.len() == dim
            && Query::from_f32(&self.query).is_ok()
    }

    /// Moves it to another set of models, of which `places` says where each was; whether its model is still there.
    fn remap(&mut self, places: &[Option<usize>]) -> bool {
        let moved = |p: &[f64]| places.iter().map(|place| place.map_or(0.0, |old| p[old])).collect::<Vec<f64>>();
        if let Known::Full(p) = &self.propensities {
            self.propensities = Known::Full(moved(p));
        }
        self.policy = self.policy.as_deref().map(moved);
        // A new model could not be chosen.
        let eligible = places.iter().map(|place| place.is_some_and(|old| self.eligible.allows(old))).collect();
        self.eligible = Eligible::only(eligible).unwrap_or_default();
        let new = places.iter().position(|place| *place == Some(usize::from(self.model)));
        self.model = new.map_or(0, |new| new as u16);
        new.is_some()
    }
}

impl<'a> From<&'a Decision> for DecisionRecord<'a> {
    fn from(decision: &'a Decision) -> Self {
        let Decision { query, model, propensities, policy, eligible, charged, is_keyed } = decision;
        let propensities = match propensities {
            Known::Full(p) => PropensitiesRecord::Full(Cow::Borrowed(p)),
            Known::Chosen(p) => PropensitiesRecord::Chosen(*p),
            Known::Nothing => PropensitiesRecord::Nothing,
        };
        let policy = policy.as_deref().map(Cow::Borrowed);
        let (eligible, charged) = (eligible.mask().map(Cow::Borrowed), Cow::Borrowed(&charged[..]));
        let is_keyed = *is_keyed;
        Self { vector: Cow::Borrowed(query), model: *model, propensities, policy, eligible, charged, is_keyed }
    }
}

impl From<DecisionRecord<'_>> for Decision {
    fn from(record: DecisionRecord<'_>) -> Self {
        let DecisionRecord { vector, model, propensities, policy, eligible, charged, is_keyed } = record;
        let propensities = match propensities {
            PropensitiesRecord::Full(p) => Known::Full(p.into_owned()),
            PropensitiesRecord::Chosen(p) => Known::Chosen(p),
            PropensitiesRecord::Nothing => Known::Nothing,
        };
        Self {
            query: vector.into_owned(),
            model,
            propensities,
            policy: policy.map(Cow::into_owned),
            // Impossible sets are found when the decision is checked against its space.
            eligible: eligible.map_or(Eligible::ALL, |mask| Eligible::of_saved(mask.into_owned())),
            charged: charged.into_owned(),
            is_keyed,
        }
    }
}

/// Fits a decision to its space: dimension, and models by index. `None` if its model was retired.
fn decide(
    spec: &Spec,
    retired: &BTreeSet<ModelName>,
    query: Vec<f32>,
    model: &ModelName,
    propensities: Propensities,
    policy: Option<Vec<(ModelName, f64)>>,
    missing: MissingPropensities,
) -> Result<Option<Decision>, Bad> {
    if query.len() != spec.dim {
        return Err(Bad::WrongDimension { found: query.len(), expected: spec.dim });
    }
    let index = |name: &ModelName| match spec.models.iter().position(|known| known == name) {
        None if !retired.contains(name) && !spec.retired.contains(name) => Err(Bad::UnknownModel(name.clone())),
        place => Ok(place),
    };
    let spread = |entries: Vec<(ModelName, f64)>| {
        let mut all = vec![0.0; spec.models.len()];
        for (name, p) in entries {
            if let Some(place) = index(&name)? {
                all[place] = p;
            }
        }
        Ok(all)
    };
    let chosen = index(model)?;
    let eligible = match &propensities {
        // Models without an entry could not be chosen.
        Propensities::Full(entries) => {
            let is_listed = |model: &ModelName| entries.iter().any(|(name, _)| name == model);
            Eligible::only(spec.models.iter().map(is_listed).collect()).unwrap_or_default()
        }
        _ => Eligible::ALL,
    };
    let impossible = |entries: &[(ModelName, f64)]| !entries.iter().any(|(name, p)| name == model && *p > 0.0);
    let propensities = match propensities {
        Propensities::Full(entries) if impossible(&entries) => return Err(Bad::ImpossibleChoice(model.clone())),
        Propensities::Full(entries) => Known::Full(spread(entries)?),
        Propensities::Chosen(_) if policy.is_none() && missing == MissingPropensities::Reject => {
            return Err(Bad::MissingPropensities);
        }
        Propensities::Chosen(p) => Known::Chosen(p),
        Propensities::Unknown => match &spec.declared {
            Some(declared) if chosen.is_some_and(|chosen| declared[chosen] <= 0.0) => {
                return Err(Bad::ImpossibleChoice(model.clone()));
            }
            Some(declared) => Known::Full(declared.clone()),
            None if missing == MissingPropensities::Reject => return Err(Bad::MissingPropensities),
            None => Known::Nothing,
        },
    };
    let policy = policy.map(spread).transpose()?;
    Ok(chosen.map(|chosen| Decision {
        model: u16::try_from(chosen).expect("at most 4096 models"),
        query,
        propensities,
        policy,
        eligible,
        charged: Vec::new(),
        is_keyed: false,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::event_time::CONFIRMATIONS;
    use proptest::prelude::*;

    fn step(engine: &mut Engine, side: Side, text: &str) -> Effects {
        let settings = engine.settings.clone();
        engine.step(Input::parse(&Parser::new(&settings), side, text.as_bytes().to_vec(), None))
    }

    fn engine(set: &str) -> Engine {
        Engine::new(toml::from_str::<Config>(set).unwrap().check().unwrap())
    }

    /// A log of `number` requests a second apart, each with its reward at the very end of its window.
    fn traffic(number: i64) -> Vec<(i64, Side, String)> {
        let start = 1_700_000_000_000;
        let pair = |i: i64| {
            let (asked, rewarded) = (start + 1000 * i, start + 1000 * i + 10_000);
            let query = format!(
                r#"{{"request_id":"r{i}","ts_ms":{asked},"query":[1,{i}],"model":"b","propensities":{{"a":0.5,"b":0.5}}}}"#
            );
            let reward = format!(r#"{{"request_id":"r{i}","ts_ms":{rewarded},"reward":1}}"#);
            [(asked, Side::Query, query), (rewarded, Side::Reward, reward)]
        };
        let mut events: Vec<_> = (0..number).flat_map(pair).collect();
        events.sort();
        events
    }

    const NARROW: &str =
        "[learner]\ndim = 2\nmodels = [\"a\", \"b\", \"c\"]\n[join]\nwindow_ms = 10000\nearly_ms = 0\n";

    proptest! {
        /// Up to seven wrong timestamps, anywhere in the log: every other event is joined, in its order.
        #[test]
        fn a_few_wrong_timestamps_cost_no_other_event_anything(
            wrong in prop::collection::vec((any::<i64>(), any::<bool>(), any::<prop::sample::Index>()), 0..CONFIRMATIONS),
            restart in any::<prop::sample::Index>(),
        ) {
            let mut events = traffic(200);
            for (i, (ts_ms, is_query, at)) in wrong.iter().enumerate() {
                let text = match is_query {
                    true => format!(r#"{{"request_id":"w{i}","ts_ms":{ts_ms},"query":[1,1],"model":"b","propensities":{{"b":1}}}}"#),
                    false => format!(r#"{{"request_id":"w{i}","ts_ms":{ts_ms},"reward":1}}"#),
                };
                let side = if *is_query { Side::Query } else { Side::Reward };
                events.insert(at.index(events.len() + 1), (*ts_ms, side, text));
            }
            let mut lane = engine(NARROW);
            let (mut applied, restart) = (Vec::new(), restart.index(events.len()));
            for (i, (_, side, text)) in events.iter().enumerate() {
                if i == restart {
                    let digest = lane.digest();
                    let records = lane.take_changes().into_iter().filter_map(|(key, value)| Some((key, value?)));
                    lane = Engine::restore(lane.settings.clone(), lane.head(), records).unwrap();
                    prop_assert_eq!(lane.digest(), digest);
                }
                applied.extend(step(&mut lane, *side, text).applied);
                prop_assert!(lane.counts().join.balance());
                prop_assert_eq!(lane.counts().queries() + lane.counts().rewards(), i as u64 + 1);
            }
            let held: usize = lane.spaces.values().map(|space| space.probation.len()).sum();
            prop_assert!(held < CONFIRMATIONS);
            applied.extend(lane.finish().applied);
            let ids: Vec<String> = applied.iter().map(|applied| applied.request_id.clone()).filter(|id| id.starts_with('r')).collect();
            prop_assert_eq!(ids, (0..200).map(|i| format!("r{i}")).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_contradicted_event_becomes_a_dead_letter_with_its_bytes_and_its_place() {
        let wrong = r#"{"request_id":"w","ts_ms":1700000000000000,"query":[1,1],"model":"b","propensities":{"b":1}}"#;
        for at in [0, 5, 100] {
            let mut lane = engine(NARROW);
            let mut dead = Vec::new();
            for (i, (_, side, text)) in traffic(200).iter().enumerate() {
                if i == at {
                    let input = Input::parse(&Parser::new(&lane.settings), Side::Query, wrong.into(), None);
                    let effects = lane.step_from(input, || "there".to_owned());
                    assert_eq!(effects, Effects::default());
                    assert_eq!(lane.counts().queries_dead, 0);
                }
                dead.extend(step(&mut lane, *side, text).dead_letters);
            }
            let [DeadLetter { bytes, bad, place, .. }] = &dead[..] else { panic!("{at}: {dead:?}") };
            let found = (bytes.as_slice(), bad.reason(), place.as_deref());
            assert_eq!(found, (wrong.as_bytes(), "future-time", Some("there")), "{at}");
            let counts = lane.counts();
            assert_eq!((counts.queries_dead, counts.join.queries.late, counts.join.rewards.orphaned), (1, 0, 0));
        }
    }

    #[test]
    fn a_gap_is_followed_once_enough_events_confirm_it() {
        let mut lane = engine(NARROW);
        let night = 12 * 3_600_000;
        for (_, side, text) in traffic(100) {
            step(&mut lane, side, &text);
        }
        let before = lane.counts();
        for (i, (ts_ms, side, text)) in traffic(100).into_iter().enumerate() {
            let text = text.replace(&ts_ms.to_string(), &(ts_ms + night).to_string()).replace("\"r", "\"n");
            let text = text.replace("\"nequest_id", "\"request_id").replace("\"neward", "\"reward");
            assert_eq!(step(&mut lane, side, &text).dead_letters, []);
            let held = lane.counts().join.queries.pending - before.join.queries.pending;
            assert!(i < 7 || lane.spaces.values().all(|space| space.probation.is_empty()), "{i}: {held}");
        }
        assert_eq!(lane.counts().applied, 200);
        assert_eq!((lane.counts().queries_dead, lane.counts().rewards_dead), (0, 0));
    }

    #[test]
    fn what_nothing_can_confirm_any_more_is_taken_last() {
        let mut lane = engine(NARROW);
        for (_, side, text) in traffic(50) {
            step(&mut lane, side, &text);
        }
        for (_, side, text) in traffic(1) {
            let text = text.replace("17000000", "17100000").replace("\"r0", "\"end");
            assert_eq!(step(&mut lane, side, &text), Effects::default());
        }
        let counts = lane.counts();
        assert_eq!((counts.join.queries.pending, counts.join.rewards.pending, counts.applied), (1, 1, 50));
        let applied = lane.finish().applied;
        assert_eq!(applied.iter().map(|a| a.request_id.as_str()).collect::<Vec<_>>(), ["end"]);
        assert!(lane.counts().join.balance());
    }

    const SMALL: &str = "[learner]\ndim = 2\nmodels = [\"a\", \"b\", \"c\"]\n";

    #[test]
    fn events_that_do_not_fit_their_space_are_dead_letters() {
        let query = r#"{"request_id":"r","ts_ms":1,"query":[1,1],"model":"a","propensities":{"a":0.5,"b":0.5}}"#;
        for (from, to, reason) in [
            ("[1,1]", "[1,1,1]", "wrong-dimension"),
            ("\"model\":\"a\"", "\"model\":\"x\"", "unknown-model"),
            ("\"b\":0.5", "\"x\":0.5", "unknown-model"),
            ("\"model\":\"a\"", "\"model\":\"c\"", "impossible-choice"),
            ("{\"a\":0.5,\"b\":0.5}", "{\"a\":0,\"b\":1}", "impossible-choice"),
        ] {
            let mut engine = engine(SMALL);
            let text = query.replace(from, to);
            let letter = step(&mut engine, Side::Query, &text).dead_letters.remove(0);
            assert_eq!((letter.bad.reason(), letter.bytes), (reason, text.into_bytes()));
            assert_eq!(engine.counts().queries_dead, 1);
            assert_eq!(engine.spaces().count(), 0, "a bad event makes no space");
        }
    }

    #[test]
    fn rewards_are_mapped_to_the_unit_range_after_aggregation() {
        let set = format!("{SMALL}[join]\nwindow_ms = 10\naggregate = \"sum\"\n[reward]\nrange = [0.0, 4.0]");
        let mut engine = engine(&set);
        let query = r#"{"request_id":"r","ts_ms":1,"query":[1,1],"model":"b","propensities":{"b":1}}"#;
        step(&mut engine, Side::Query, query);
        for (ts_ms, reward) in [(2, 1), (3, 2), (4, -6)] {
            let text = format!(r#"{{"request_id":"r","ts_ms":{ts_ms},"reward":{reward}}}"#);
            assert_eq!(step(&mut engine, Side::Reward, &text), Effects::default());
        }
        // The window closes when enough events are beyond it.
        let other = r#"{"request_id":"s","ts_ms":20,"reward":1}"#;
        let mut applied: Vec<Applied> = Vec::new();
        for _ in 0..CONFIRMATIONS {
            assert_eq!(applied, []);
            applied = step(&mut engine, Side::Reward, other).applied;
        }
        let (space, request_id, rewarded_ms) = (Name::default_space(), "r".to_owned(), Some(2));
        assert_eq!(
            applied,
            [Applied {
                space,
                request_id,
                model: 1,
                reward: Some(0.0),
                latency_ms: Some(1),
                rewarded_ms,
                example: None
            }],
            "-3 is clipped"
        );
    }

    /// A request of model `a` with these rewards, each a millisecond after the one before.
    fn rewarded(engine: &mut Engine, id: &str, rewards: &[f64]) {
        step(engine, Side::Query, &query_of("default", id, 1));
        for (i, reward) in rewards.iter().enumerate() {
            let text = format!(r#"{{"request_id":"{id}","ts_ms":{},"reward":{reward}}}"#, i + 2);
            step(engine, Side::Reward, &text);
        }
    }

    fn restarted(engine: &mut Engine, set: &str) -> Engine {
        let settings = toml::from_str::<Config>(set).unwrap().check().unwrap();
        let records = engine.take_changes().into_iter().filter_map(|(key, value)| Some((key, value?)));
        Engine::restore(settings, engine.head(), records).unwrap()
    }

    #[test]
    fn a_clipped_reward_counts_once_after_aggregation() {
        // Under `first` only the first is learned; the sum of the last request is out of range, none of its parts is.
        for (aggregate, clipped, further) in [("first", 1, 3), ("sum", 2, 0), ("max", 1, 0)] {
            let mut lane = engine(&format!("{SMALL}[join]\naggregate = \"{aggregate}\""));
            for (id, rewards) in [("r", &[1.5, 2.5][..]), ("s", &[0.5]), ("t", &[0.75, 0.5, 0.5])] {
                rewarded(&mut lane, id, rewards);
            }
            lane.finish();
            let rewards = lane.counts().join.rewards;
            assert_eq!((rewards.clipped, rewards.further), (clipped, further), "{aggregate}");
            assert!(lane.counts().join.balance() && rewards.duplicate == further);
        }
    }

    #[test]
    fn the_summary_of_examples_survives_a_restart_unless_its_terms_change() {
        let mut lane = engine(SMALL);
        (0..3).for_each(|i| rewarded(&mut lane, &format!("r{i}"), &[3.0, 0.5]));
        let name = Name::default_space();
        let summary = |lane: &Engine| lane.spaces[&name].learned.clone().unwrap();
        let found = summary(&lane);
        assert_eq!((found.number(), found.clipped, found.only_reward()), (3, 3, Some(1.0)));
        let (same, mut lane) = (found, restarted(&mut lane, SMALL));
        assert_eq!(summary(&lane), same);
        rewarded(&mut lane, "r3", &[0.0]);
        assert_eq!((summary(&lane).examples, summary(&lane).only_reward()), (vec![4, 0, 0], None));
        for set in [format!("{SMALL}[reward]\nrange = [0.0, 3.0]"), SMALL.replace("\"c\"", "\"d\"")] {
            let mut store = engine(SMALL);
            rewarded(&mut store, "r", &[3.0, 0.5]);
            let other = restarted(&mut store, &set);
            assert_eq!(summary(&other).number(), 0, "{set}");
            let rewards = other.counts().join.rewards;
            assert_eq!((rewards.clipped, rewards.further), (1, 1), "counts stay");
        }
    }

    #[test]
    fn missing_propensities_are_assumed_as_configured() {
        for (missing, propensity, expected) in [
            ("uniform", "", vec![1.0 / 3.0; 3]),
            ("uniform", ",\"propensity\":0.5", vec![0.25, 0.5, 0.25]),
            ("current", "", vec![1.0 / 3.0; 3]),
        ] {
            let set = SMALL.replace("dim = 2", &format!("dim = 2\nmissing_propensities = \"{missing}\""));
            let mut engine = engine(&set);
            let text = format!(r#"{{"request_id":"r","ts_ms":1,"query":[1,1],"model":"b"{propensity}}}"#);
            assert_eq!(step(&mut engine, Side::Query, &text).dead_letters, []);
            let space = &engine.spaces[&Name::default_space()];
            let query = Query::new([1.0, 1.0]).unwrap();
            let chosen = if propensity.is_empty() { None } else { Some(0.5) };
            let (found, _) = space.assume(&query, 1, chosen, engine.settings.missing_propensities);
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{missing}: {found:?}");
            let applied = step(&mut engine, Side::Reward, r#"{"request_id":"r","ts_ms":2,"reward":1}"#).applied;
            assert_eq!(applied.len(), 1);
        }
    }

    #[test]
    fn a_logged_policy_is_kept_whatever_is_known_of_the_propensities() {
        let decision = |propensities| Decision {
            query: vec![1.0, 1.0],
            model: 1,
            propensities,
            policy: Some(vec![0.1, 0.7, 0.2]),
            eligible: Eligible::ALL,
            charged: Vec::new(),
            is_keyed: false,
        };
        let mut engine = engine(SMALL);
        engine.admit(&Name::default_space(), &mut Vec::new()).unwrap();
        let space = &engine.spaces[&Name::default_space()];
        for (known, missing, is_stated) in [
            (Known::Full(vec![0.2, 0.6, 0.2]), MissingPropensities::Reject, true),
            (Known::Nothing, MissingPropensities::Uniform, true),
            (Known::Chosen(0.6), MissingPropensities::Uniform, false),
            (Known::Chosen(0.6), MissingPropensities::Current, false),
            (Known::Nothing, MissingPropensities::Current, false),
        ] {
            let example = space.example(decision(known), Some(1.0), missing);
            assert_eq!(example.policy(), [0.1, 0.7, 0.2]);
            assert_eq!(example.has_stated_propensities(), is_stated);
        }
    }

    fn query_of(space: &str, id: &str, ts_ms: i64) -> String {
        format!(
            r#"{{"request_id":"{id}","space":"{space}","ts_ms":{ts_ms},"query":[1,1],"model":"a","propensities":{{"a":0.5,"b":0.5}}}}"#
        )
    }

    fn reward_of(space: &str, id: &str, ts_ms: i64) -> String {
        format!(r#"{{"request_id":"{id}","space":"{space}","ts_ms":{ts_ms},"reward":1}}"#)
    }

    fn names(engine: &Engine) -> Vec<&str> {
        engine.names().map(Name::as_str).collect()
    }

    #[test]
    fn rewards_wait_outside_of_the_limit_and_are_joined_once_their_query_comes() {
        let mut engine = engine(&format!("{SMALL}spaces_max = 2\n"));
        for i in 0..50 {
            let effects = step(&mut engine, Side::Reward, &reward_of(&format!("junk-{i}"), "r", 1));
            assert_eq!(effects, Effects::default());
        }
        step(&mut engine, Side::Reward, &reward_of("shop", "r", 2));
        assert_eq!((names(&engine).len(), engine.counts().join.rewards.pending), (0, 51));
        let applied = step(&mut engine, Side::Query, &query_of("shop", "r", 3)).applied;
        assert_eq!((applied.len(), names(&engine)), (1, vec!["shop"]), "the early reward counts");
        engine.finish();
        let counts = engine.counts();
        assert_eq!((counts.join.rewards.used, counts.join.rewards.orphaned, counts.join.balance()), (1, 50, true));
    }

    #[test]
    fn the_lobby_is_bounded_and_counts_what_it_evicts() {
        let mut engine = engine(SMALL);
        let number = LOBBY_MAX as i64 + 7;
        for i in 0..number {
            step(&mut engine, Side::Reward, &reward_of(&format!("junk-{i}"), "r", i));
        }
        step(&mut engine, Side::Reward, &reward_of("default", "r", 0));
        let rewards = engine.counts().join.rewards;
        assert_eq!((rewards.evicted, rewards.pending, rewards.read), (7, LOBBY_MAX as u64 + 1, number as u64 + 1));
        assert!(engine.spaces.contains_key(&Name::default_space()), "it always fits");
        // One space with more rewards than it may hold: its oldest are evicted, no other space is.
        let before = engine.lobby.number;
        for i in 0..3000 {
            step(&mut engine, Side::Reward, &reward_of("junk-100", &format!("r{i}"), number));
        }
        assert_eq!((engine.lobby.number, engine.spaces.len()), (before, before));
        assert!(engine.counts().join.rewards.evicted > 7 && engine.counts().join.balance());
        let bytes: usize = engine.spaces.values().map(Space::lobby_bytes).sum();
        let reserved = engine.spaces[&Name::default_space()].lobby_bytes();
        assert_eq!(engine.lobby.bytes, bytes - reserved);
    }

    #[test]
    fn a_new_space_evicts_the_most_idle_one_without_examples() {
        let mut engine = engine(&format!("{SMALL}spaces_max = 3\n[spaces.listed]\n"));
        step(&mut engine, Side::Query, &query_of("learned", "r", 1));
        step(&mut engine, Side::Reward, &reward_of("learned", "r", 1));
        step(&mut engine, Side::Query, &query_of("idle", "r", 2));
        let evicted = |effects: Effects| effects.evicted.first().map(ToString::to_string);
        assert_eq!(evicted(step(&mut engine, Side::Query, &query_of("busy", "r", 3))).as_deref(), Some("idle"));
        assert_eq!(evicted(step(&mut engine, Side::Query, &query_of("listed", "r", 4))), None);
        assert_eq!(evicted(step(&mut engine, Side::Query, &query_of("default", "r", 4))), None);
        assert_eq!(names(&engine), ["busy", "default", "learned", "listed"]);
        step(&mut engine, Side::Reward, &reward_of("busy", "r", 5));
        let letter = step(&mut engine, Side::Query, &query_of("late", "r", 6)).dead_letters.remove(0);
        assert_eq!(letter.bad.reason(), "too-many-spaces", "all that may be evicted have examples");
        let counts = engine.counts();
        assert_eq!((counts.join.queries.evicted, counts.applied, counts.join.balance()), (1, 2, true));
        assert!(engine.is_blank(&Name::default_space()), "it has no examples yet");
        assert!(engine.drop_space(&Name::try_from("learned").unwrap()) && !names(&engine).contains(&"learned"));
        assert_eq!((engine.counts().applied, engine.counts().join.balance()), (2, true), "counts outlive a space");
    }

    #[test]
    fn only_listed_spaces_where_the_configuration_says_so() {
        let mut engine = engine(&format!("{SMALL}spaces = \"listed\"\n[spaces.shop]\n"));
        for (space, is_good) in [("shop", true), ("default", true), ("junk", false)] {
            for (side, text) in [(Side::Query, query_of(space, "r", 1)), (Side::Reward, reward_of(space, "s", 1))] {
                let letters = step(&mut engine, side, &text).dead_letters;
                assert_eq!(
                    letters.first().map(|letter| letter.bad.reason()),
                    (!is_good).then_some("unlisted-space"),
                    "{text}"
                );
            }
        }
    }

    proptest! {
        /// However often it is restored, and whatever is evicted: the same state, no record left over, and counts that
        /// balance.
        #[test]
        fn evictions_survive_restarts(
            events in prop::collection::vec((0..8_usize, 0..4_u8, any::<bool>(), 0..3_i64), 1..120),
            every in 1..12_usize,
        ) {
            let set = format!("{SMALL}spaces_max = 3\n[spaces.s7]\n[join]\nwindow_ms = 20\nearly_ms = 10\n");
            let settings = toml::from_str::<Config>(&set).unwrap().check().unwrap();
            let (mut plain, mut restarted) = (Engine::new(settings.clone()), Engine::new(settings.clone()));
            let mut store = BTreeMap::<Vec<u8>, Vec<u8>>::new();
            let mut keep = |engine: &mut Engine| {
                for (key, value) in engine.take_changes() {
                    match value {
                        Some(value) => drop(store.insert(key, value)),
                        None => drop(store.remove(&key)),
                    }
                }
                store.clone()
            };
            let mut now_ms = 0;
            for (i, (space, id, is_query, later)) in events.iter().enumerate() {
                now_ms += later;
                let (space, id) = (format!("s{space}"), format!("r{id}"));
                let (side, text) = match is_query {
                    true => (Side::Query, query_of(&space, &id, now_ms)),
                    false => (Side::Reward, reward_of(&space, &id, now_ms)),
                };
                prop_assert_eq!(step(&mut plain, side, &text), step(&mut restarted, side, &text));
                if i % every == 0 {
                    let records = keep(&mut restarted);
                    restarted = Engine::restore(settings.clone(), restarted.head(), records).unwrap();
                }
            }
            prop_assert_eq!(plain.digest(), restarted.digest());
            prop_assert!(plain.counts().join.balance() && names(&plain).len() <= 3);
            let records = keep(&mut restarted);
            let fresh: BTreeMap<_, _> = plain.take_changes().into_iter().filter_map(|(k, v)| Some((k, v?))).collect();
            prop_assert!(records.keys().eq(fresh.keys()), "records of what was evicted are deleted");
        }
    }

    proptest! {
        /// A record that is damaged, yet passed every checksum: it is refused, or what it holds can be worked with.
        #[test]
        fn damaged_records_do_no_harm(of in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte: u8) {
            let settings = toml::from_str::<Config>(&format!("{SMALL}batch = 3\n")).unwrap().check().unwrap();
            let mut engine = Engine::new(settings.clone());
            for i in 0..8 {
                let query = format!(r#"{{"request_id":"r{i}","ts_ms":{i},"query":[1,{i}],"model":"a","propensities":{{"a":0.5,"b":0.5}}}}"#);
                step(&mut engine, Side::Query, &query);
            }
            for i in 0..4 {
                step(&mut engine, Side::Reward, &format!(r#"{{"request_id":"r{i}","ts_ms":9,"reward":1}}"#));
            }
            let mut records: Vec<(Vec<u8>, Vec<u8>)> =
                engine.take_changes().into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
            let whole = Engine::restore(settings.clone(), engine.head(), records.clone()).unwrap();
            prop_assert_eq!(whole.digest(), engine.digest());
            let chosen = of.index(records.len());
            let value = &mut records[chosen].1;
            let at = at.index(value.len());
            value[at] = byte;
            if let Ok(mut restored) = Engine::restore(settings, engine.head(), records) {
                step(&mut restored, Side::Reward, r#"{"request_id":"r5","ts_ms":10,"reward":0.5}"#);
                restored.finish();
                let _ = restored.digest();
            }
        }
    }

    #[test]
    fn equal_histories_have_equal_digests_and_others_not() {
        let query = r#"{"request_id":"r","ts_ms":1,"query":[1,1],"model":"a","propensities":{"a":0.5,"b":0.5}}"#;
        let run = |texts: &[(Side, &str)]| {
            let mut engine = engine(SMALL);
            texts.iter().for_each(|(side, text)| drop(step(&mut engine, *side, text)));
            engine.digest()
        };
        let reward = r#"{"request_id":"r","ts_ms":2,"reward":1}"#;
        let base = run(&[(Side::Query, query), (Side::Reward, reward)]);
        assert_eq!(base, run(&[(Side::Query, query), (Side::Reward, reward)]));
        for other in [
            &[(Side::Query, query)][..],
            &[(Side::Query, query), (Side::Reward, reward), (Side::Reward, reward)][..],
            &[(Side::Query, query), (Side::Reward, reward), (Side::Reward, "{")][..],
            &[(Side::Reward, reward), (Side::Query, &query.replace("[1,1]", "[1,0]"))][..],
        ] {
            assert_ne!(run(other), base);
        }
    }
}
