//! The one owner of a lane: joins, learners, counts. Events in, effects out.
//!
//! [`Engine::step`] is pure: it reads no clock and does no I/O. Whoever drives it (replay, daemon, tests) brings inputs in
//! the order of [`Input::key`] and carries the effects out. Every event ends in exactly one count, so that counts
//! balance after every step:
//!
//! ```text
//! queries read = dead_lettered + retired + duplicate + late + joined + expired + evicted + pending
//! rewards read = dead_lettered + used + duplicate + late + orphaned + evicted + pending
//! ```
//!
//! For snapshots the engine is a small head and many records, of which it hands out those that have changed:
//!
//! | key | record |
//! |---|---|
//! | `s` space | its models, those retired, and the join without its requests |
//! | `t` space | its learner, complete |
//! | `q` space 0 request id | a request that waits for its reward, or is remembered |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::config::{MissingPropensities, Settings, Spec};
use crate::evaluate::worth::WorthView;
use crate::event::{Example, Name, Query};
use crate::hpg::spectra::Eigen;
use crate::joiner::{BadJoin, JoinCounts, JoinHead, Joined, Joiner, Payload, Record};
use crate::learner::{BadState, Trainer};
use crate::router::Policy;
use crate::wire::envelope::{self, Damaged, Kind};
use crate::wire::events::{Bad, Parser, Propensities, QueryEvent, RewardEvent};
use crate::wire::export::Spectrum;

/// Which input an event came in by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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
}

#[derive(Debug, Clone, PartialEq)]
enum Event {
    Query(QueryEvent),
    Reward(RewardEvent),
}

/// What events are ordered by: time, queries before rewards, space, request id, bytes.
pub type Key<'a> = (i64, Side, &'a Name, &'a str, &'a [u8]);

impl Input {
    /// Reads an event; a bad one becomes an input too, so that it is counted.
    /// `record_ms` is when the log says that it was written, if it says so.
    pub fn parse(parser: &Parser, side: Side, bytes: Vec<u8>, record_ms: Option<i64>) -> Self {
        let event = match side {
            Side::Query => parser.query(&bytes, record_ms).map(Event::Query),
            Side::Reward => parser.reward(&bytes, record_ms).map(Event::Reward),
        };
        Self { side, bytes, event }
    }

    /// An event that cannot be read; of one that is too large its first bytes will do.
    pub fn bad(side: Side, bytes: Vec<u8>, bad: Bad) -> Self {
        Self { side, bytes, event: Err(bad) }
    }

    /// Size of the event, as it was read.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// What it is ordered by; a bad event has no time and goes when it is met.
    pub fn key(&self) -> Option<Key<'_>> {
        match &self.event {
            Ok(Event::Query(event)) => Some((event.ts_ms, self.side, &event.space, &event.request_id, &self.bytes)),
            Ok(Event::Reward(event)) => Some((event.ts_ms, self.side, &event.space, &event.request_id, &self.bytes)),
            Err(_) => None,
        }
    }
}

/// What a step asks the outside to do, and what it did.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// The event, if it was bad: to be kept with its reason.
    pub dead_letter: Option<DeadLetter>,
    /// Examples that were learned from, in order.
    pub applied: Vec<Applied>,
}

/// A bad event.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// Where it came in.
    pub side: Side,
    /// Its original bytes; only the first of them if it was too large.
    pub bytes: Vec<u8>,
    /// What was wrong.
    pub bad: Bad,
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
    /// The reward, on the scale of 0..1.
    pub reward: f64,
    /// Event time from the query to its first reward, if one came.
    pub latency_ms: Option<i64>,
    /// All of it, where [`Engine::show_examples`] asked for it.
    pub example: Option<Example>,
}

/// What a query carries through the join.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Decision {
    query: Vec<f32>,
    model: u16,
    propensities: Known,
    policy: Option<Vec<f64>>,
}

/// What is known of the distribution, over the space's models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Known {
    Full(Vec<f64>),
    Chosen(f64),
    Nothing,
}

impl Payload for Decision {
    fn bytes(&self) -> usize {
        let full = if let Known::Full(p) = &self.propensities { p.len() } else { 0 };
        let numbers = full + self.policy.as_ref().map_or(0, Vec::len);
        size_of::<Self>() + 4 * self.query.len() + 8 * numbers
    }
}

/// All counts of a lane, or of one space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Bad query events.
    pub queries_dead: u64,
    /// Bad reward events.
    pub rewards_dead: u64,
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
        self.join += other.join;
        self.applied += other.applied;
    }
}

/// What several lanes have come to together.
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
        let (mut counts, mut rewards) = (Counts::default(), 0.0);
        for engine in engines {
            let of_lane = engine.counts();
            rewards += engine.mean_reward() * of_lane.applied as f64;
            counts += of_lane;
        }
        Self { counts, mean_reward: if counts.applied > 0 { rewards / counts.applied as f64 } else { 0.0 } }
    }
}

/// A lane.
pub struct Engine {
    settings: Settings,
    spaces: BTreeMap<Name, Space>,
    queries_dead: u64,
    rewards_dead: u64,
    shows_examples: bool,
}

struct Space {
    trainer: Trainer,
    joiner: Joiner<Decision>,
    /// Models that were there once.
    retired: BTreeSet<Name>,
    /// Whether it has changed since its changes were taken.
    touched: bool,
}

/// Why parameters cannot be imported.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct BadImport(String);

/// What a snapshot holds of the engine besides its records.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineHead {
    queries_dead: u64,
    rewards_dead: u64,
}

/// A space without its learner and its requests, as saved.
#[derive(Serialize, Deserialize)]
struct SavedSpace {
    models: Vec<Name>,
    retired: BTreeSet<Name>,
    join: JoinHead,
}

const SPACE_VERSION: u16 = 1;

/// Why a snapshot cannot be gone on with.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BadSnapshot {
    /// A space does not fit the configuration.
    #[error("space {space}: {problem}")]
    Space {
        /// Which one.
        space: String,
        /// In what way.
        problem: BadState,
    },
    /// A join does not fit its records.
    #[error("space {space}: {problem}")]
    Join {
        /// Which one.
        space: String,
        /// In what way.
        problem: BadJoin,
    },
    /// A record is not what it should be.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// A record that belongs to nothing.
    #[error("a record belongs to no space")]
    Stray,
}

/// Of one space what costs nothing to tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally<'a> {
    /// Its name.
    pub name: &'a Name,
    /// Names of its models.
    pub models: &'a [Name],
    /// Examples in applied batches.
    pub version: u64,
    /// What became of its events.
    pub counts: Counts,
    /// Sum of the rewards learned from.
    pub reward_sum: f64,
}

/// One space, as seen from outside.
#[derive(Debug, Clone, PartialEq)]
pub struct SpaceView {
    /// Its name.
    pub name: Name,
    /// Names of its models.
    pub models: Vec<Name>,
    /// Examples in applied batches.
    pub version: u64,
    /// What became of its events.
    pub counts: Counts,
    /// Mean of the rewards learned from.
    pub mean_reward: f64,
    /// Models that were there once.
    pub retired: Vec<Name>,
    /// Its parameters, where the algorithm has some.
    pub eigens: Vec<Eigen>,
    /// Whether routing pays.
    pub worth: Option<WorthView>,
}

impl Engine {
    /// A lane that has not seen anything.
    pub fn new(settings: Settings) -> Self {
        Self { settings, spaces: BTreeMap::new(), queries_dead: 0, rewards_dead: 0, shows_examples: false }
    }

    /// From now on what was applied is shown whole, for those who learn beside it.
    pub fn show_examples(&mut self) {
        self.shows_examples = true;
    }

    /// Goes on from a snapshot: its head, and its records by key. The settings may differ from those it was made with:
    /// models are matched by name, new ones start at zero, those that are gone are retired.
    pub fn restore(
        settings: Settings,
        head: EngineHead,
        records: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
    ) -> Result<Self, BadSnapshot> {
        let mut parts: BTreeMap<Name, SpaceParts> = BTreeMap::new();
        for (key, value) in records {
            let (kind, name, request_id) = split_key(&key).ok_or(BadSnapshot::Stray)?;
            let parts = parts.entry(name).or_default();
            match kind {
                SPACE => parts.space = Some(envelope::unseal(Kind::Space, SPACE_VERSION, &value)?),
                TRAINER => parts.trainer = Some(value),
                _ => parts.requests.push((request_id, envelope::decode(&value)?)),
            }
        }
        let mut engine = Self::new(settings);
        (engine.queries_dead, engine.rewards_dead) = (head.queries_dead, head.rewards_dead);
        for (name, parts) in parts {
            let space = Space::restore(&engine.settings, &name, parts)?;
            engine.spaces.insert(name, space);
        }
        Ok(engine)
    }

    /// What a snapshot holds besides the records.
    pub fn head(&self) -> EngineHead {
        EngineHead { queries_dead: self.queries_dead, rewards_dead: self.rewards_dead }
    }

    /// Records that have changed since the last call, or ever: key, and value unless it is gone.
    pub fn take_changes(&mut self) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
        let mut changes = Vec::new();
        for (name, space) in self.spaces.iter_mut().filter(|(_, space)| space.touched) {
            space.touched = false;
            space.joiner.track_changes();
            space.joiner.take_changes(|request_id, record| {
                changes.push((record_key(QUERY, name, request_id), record.map(|record| envelope::encode(&record))));
            });
            changes.push((record_key(TRAINER, name, ""), Some(space.trainer.save())));
            let saved = SavedSpace {
                models: space.trainer.spec().models.clone(),
                retired: space.retired.clone(),
                join: space.joiner.head(),
            };
            changes.push((record_key(SPACE, name, ""), Some(envelope::seal(Kind::Space, SPACE_VERSION, &saved))));
        }
        changes
    }

    /// Starts the models of a space from given parameters; those that are not named keep what they have.
    pub fn import(&mut self, space: Name, eigens: &[(Name, Spectrum)], dim: usize) -> Result<(), BadImport> {
        let spec = self.spec(&space).map_err(|bad| BadImport(bad.to_string()))?;
        if dim != spec.dim {
            return Err(BadImport(format!("it has dim = {dim}, space {space} has {}", spec.dim)));
        }
        let places: Vec<Option<usize>> =
            eigens.iter().map(|(name, _)| spec.models.iter().position(|known| known == name)).collect();
        if let Some(at) = places.iter().position(Option::is_none) {
            return Err(BadImport(format!("space {space} has no model {}", eigens[at].0)));
        }
        let (_, space, _) = self.space(space);
        for (place, (_, (lambda, vectors))) in places.into_iter().flatten().zip(eigens) {
            if !space.trainer.set(place, lambda, vectors) {
                let spec = space.trainer.spec();
                let way_out = "import into hpg in mode factored, explicit or exact";
                return Err(BadImport(format!("{} cannot start from given parameters: {way_out}", spec.algorithm())));
            }
        }
        Ok(())
    }

    /// Names of its spaces.
    pub fn names(&self) -> impl Iterator<Item = &Name> {
        self.spaces.keys()
    }

    /// Examples in applied batches of a space.
    pub fn version(&self, space: &Name) -> Option<u64> {
        self.spaces.get(space).map(|space| space.trainer.version())
    }

    /// Whether routing pays in a space; none if nothing was judged.
    pub fn worth(&self, space: &Name) -> Option<WorthView> {
        self.spaces.get(space)?.trainer.worth()
    }

    /// The policy of a space, in the routing form.
    pub fn policy(&self, space: &Name) -> Option<Policy> {
        self.spaces.get(space).map(|space| space.trainer.policy())
    }

    /// Takes one event.
    pub fn step(&mut self, input: Input) -> Effects {
        let Input { side, bytes, event } = input;
        let mut effects = Effects::default();
        let taken = match event {
            Ok(Event::Query(event)) => self.query(event, &mut effects.applied),
            Ok(Event::Reward(event)) => self.reward(event, &mut effects.applied),
            Err(bad) => Err(bad),
        };
        if let Err(bad) = taken {
            match side {
                Side::Query => self.queries_dead += 1,
                Side::Reward => self.rewards_dead += 1,
            }
            effects.dead_letter = Some(DeadLetter { side, bytes, bad });
        }
        effects
    }

    /// The end of a replay: closes all windows and applies partial batches.
    pub fn finish(&mut self) -> Vec<Applied> {
        let mut applied = Vec::new();
        for (name, space) in &mut self.spaces {
            let mut joined = Vec::new();
            space.joiner.close_all(&mut joined);
            space.learn(name, joined, &self.settings, self.shows_examples, &mut applied);
            space.trainer.flush();
            space.touched = true;
        }
        applied
    }

    /// All counts of the lane.
    pub fn counts(&self) -> Counts {
        let start = Counts { queries_dead: self.queries_dead, rewards_dead: self.rewards_dead, ..Counts::default() };
        self.spaces.values().fold(start, |mut sum, space| {
            sum.join += *space.joiner.counts();
            sum.applied += space.trainer.learned();
            sum
        })
    }

    /// Mean of all rewards learned from.
    pub fn mean_reward(&self) -> f64 {
        let learned: u64 = self.spaces.values().map(|space| space.trainer.learned()).sum();
        let sum: f64 = self.spaces.values().map(|space| space.trainer.reward_sum()).sum();
        if learned == 0 { 0.0 } else { sum / learned as f64 }
    }

    /// Its spaces by name, without their parameters: cheap enough to ask for now and then while it learns.
    pub fn tallies(&self) -> impl Iterator<Item = Tally<'_>> {
        self.spaces.iter().map(|(name, space)| Tally {
            name,
            models: &space.trainer.spec().models,
            version: space.trainer.version(),
            counts: Counts { join: *space.joiner.counts(), applied: space.trainer.learned(), ..Counts::default() },
            reward_sum: space.trainer.reward_sum(),
        })
    }

    /// Its spaces, by name.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceView> {
        self.spaces.iter().map(|(name, space)| SpaceView {
            name: name.clone(),
            models: space.trainer.spec().models.clone(),
            version: space.trainer.version(),
            counts: Counts { join: *space.joiner.counts(), applied: space.trainer.learned(), ..Counts::default() },
            mean_reward: space.trainer.mean_reward(),
            retired: space.retired.iter().cloned().collect(),
            eigens: space.trainer.eigens(),
            worth: space.trainer.worth(),
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
            add(&space.trainer.save());
            add(&envelope::encode(&space.joiner));
        }
        format!("{:032x}", hash.digest128())
    }

    fn query(&mut self, event: QueryEvent, applied: &mut Vec<Applied>) -> Result<(), Bad> {
        let QueryEvent { request_id, space, ts_ms, query, model, propensities, policy } = event;
        let retired = self.spaces.get(&space).map_or(&NONE_RETIRED, |space| &space.retired);
        let decision = decide(self.spec(&space)?, retired, query, &model, propensities, policy)?;
        let shows_examples = self.shows_examples;
        let (name, space, settings) = self.space(space);
        let mut joined = Vec::new();
        match decision {
            Some(decision) => space.joiner.query(&request_id, ts_ms, decision, &mut joined),
            None => space.joiner.retired(ts_ms, &mut joined),
        }
        space.learn(name, joined, settings, shows_examples, applied);
        Ok(())
    }

    fn reward(&mut self, event: RewardEvent, applied: &mut Vec<Applied>) -> Result<(), Bad> {
        self.spec(&event.space)?;
        let shows_examples = self.shows_examples;
        let (name, space, settings) = self.space(event.space);
        let mut joined = Vec::new();
        space.joiner.reward(&event.request_id, event.ts_ms, event.reward, event.event_id.as_deref(), &mut joined);
        space.learn(name, joined, settings, shows_examples, applied);
        Ok(())
    }

    /// The settings of a space, if it is there or may be made.
    fn spec(&self, name: &Name) -> Result<&Spec, Bad> {
        if !self.spaces.contains_key(name) && !self.settings.spaces.contains_key(name) {
            let listed = self.settings.spaces.keys().filter(|listed| !self.spaces.contains_key(*listed)).count();
            if self.spaces.len() + listed >= self.settings.spaces_max {
                return Err(Bad::TooManySpaces(self.settings.spaces_max));
            }
        }
        Ok(self.settings.space(name))
    }

    /// A space, made if it is new.
    fn space(&mut self, name: Name) -> (&Name, &mut Space, &Settings) {
        let settings = &self.settings;
        if !self.spaces.contains_key(&name) {
            let spec = settings.space(&name);
            let (trainer, joiner) = (Trainer::new(spec.clone()), Joiner::new(settings.join.clone()));
            let space = Space { trainer, joiner, retired: BTreeSet::new(), touched: true };
            self.spaces.insert(name.clone(), space);
        }
        let (name, space) = self.spaces.range_mut(&name..).next().expect("it was just made");
        space.touched = true;
        (name, space, settings)
    }
}

static NONE_RETIRED: BTreeSet<Name> = BTreeSet::new();

/// What the records of a space come to.
#[derive(Default)]
struct SpaceParts {
    space: Option<SavedSpace>,
    trainer: Option<Vec<u8>>,
    requests: Vec<(String, Record<Decision>)>,
}

const SPACE: u8 = b's';
const TRAINER: u8 = b't';
const QUERY: u8 = b'q';

fn record_key(kind: u8, space: &Name, request_id: &str) -> Vec<u8> {
    let mut key = vec![kind];
    key.extend_from_slice(space.as_str().as_bytes());
    if kind == QUERY {
        // No name has a zero byte.
        key.push(0);
        key.extend_from_slice(request_id.as_bytes());
    }
    key
}

/// The key of the record that holds the learner of a space.
pub fn learner_key(space: &Name) -> Vec<u8> {
    record_key(TRAINER, space, "")
}

/// The space that a record of a snapshot belongs to, by its key.
pub fn space_of(key: &[u8]) -> Option<Name> {
    split_key(key).map(|(_, space, _)| space)
}

fn split_key(key: &[u8]) -> Option<(u8, Name, String)> {
    let (&kind, rest) = key.split_first()?;
    let text = str::from_utf8(rest).ok()?;
    let (space, request_id) = match kind {
        SPACE | TRAINER => (text, ""),
        QUERY => text.split_once('\0')?,
        _ => return None,
    };
    Some((kind, Name::try_from(space).ok()?, request_id.to_owned()))
}

impl Space {
    fn restore(settings: &Settings, name: &Name, parts: SpaceParts) -> Result<Self, BadSnapshot> {
        let (Some(saved), Some(trainer)) = (parts.space, parts.trainer) else { return Err(BadSnapshot::Stray) };
        let spec = settings.space(name);
        let trainer = Trainer::restore(spec.clone(), &trainer)
            .map_err(|problem| BadSnapshot::Space { space: name.to_string(), problem })?;
        let bad_join = |problem| BadSnapshot::Join { space: name.to_string(), problem };
        let mut joiner = Joiner::restore(saved.join, parts.requests).map_err(bad_join)?;
        if joiner.waiting().any(|decision| !decision.fits(spec.dim, saved.models.len())) {
            return Err(bad_join(BadJoin));
        }
        let touched = joiner.head().spec != settings.join || saved.models != spec.models;
        joiner.set_spec(settings.join.clone());
        let mut retired = saved.retired;
        if saved.models != spec.models {
            let places: Vec<Option<usize>> =
                spec.models.iter().map(|model| saved.models.iter().position(|old| old == model)).collect();
            joiner.remap(|decision| decision.remap(&places));
            retired.extend(saved.models);
        }
        retired.retain(|model| !spec.models.contains(model));
        Ok(Self { trainer, joiner, retired, touched })
    }

    fn learn(
        &mut self,
        name: &Name,
        joined: Vec<Joined<Decision>>,
        settings: &Settings,
        shows_examples: bool,
        applied: &mut Vec<Applied>,
    ) {
        for Joined { request_id, ts_ms, payload, reward, rewarded_ms, .. } in joined {
            let reward = settings.reward.unit(reward);
            let model = usize::from(payload.model);
            let example = self.example(payload, reward, settings.missing_propensities);
            let shown = shows_examples.then(|| example.clone());
            self.trainer.learn(example).expect("checked against this space when it came");
            let latency_ms = rewarded_ms.map(|rewarded_ms| rewarded_ms.saturating_sub(ts_ms));
            applied.push(Applied { space: name.clone(), request_id, model, reward, latency_ms, example: shown });
        }
    }

    fn example(&self, decision: Decision, reward: f64, missing: MissingPropensities) -> Example {
        let query = Query::from_f32(&decision.query).expect("checked when it came");
        let model = usize::from(decision.model);
        let (propensities, assumed) = match decision.propensities {
            Known::Full(p) => (p, None),
            Known::Chosen(p) => self.assume(&query, model, Some(p), missing),
            Known::Nothing => self.assume(&query, model, None, missing),
        };
        let policy = decision.policy.or(assumed);
        Example::new(query, model, propensities, policy, reward).expect("checked when it came")
    }

    /// A whole distribution from what is known of the chosen model, and the policy where it differs.
    fn assume(
        &self,
        query: &Query,
        model: usize,
        chosen: Option<f64>,
        missing: MissingPropensities,
    ) -> (Vec<f64>, Option<Vec<f64>>) {
        let models = self.trainer.spec().models.len();
        if missing == MissingPropensities::Current {
            let current = self.trainer.distribution(query).expect("checked when it came");
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

impl Decision {
    fn fits(&self, dim: usize, models: usize) -> bool {
        let full = |p: &[f64]| p.len() == models && p.iter().all(|p| (0.0..=1.0 + 1e-6).contains(p));
        let chosen = usize::from(self.model);
        let known = match &self.propensities {
            Known::Full(p) => full(p) && p.get(chosen).is_some_and(|p| *p > 0.0),
            Known::Chosen(p) => *p > 0.0 && *p <= 1.0,
            Known::Nothing => true,
        };
        known
            && chosen < models
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
        let new = places.iter().position(|place| *place == Some(usize::from(self.model)));
        self.model = new.map_or(0, |new| new as u16);
        new.is_some()
    }
}

/// Fits a decision to its space: dimension, and models by index. `None` if its model was retired.
fn decide(
    spec: &Spec,
    retired: &BTreeSet<Name>,
    query: Vec<f32>,
    model: &Name,
    propensities: Propensities,
    policy: Option<Vec<(Name, f64)>>,
) -> Result<Option<Decision>, Bad> {
    if query.len() != spec.dim {
        return Err(Bad::WrongDimension { found: query.len(), expected: spec.dim });
    }
    let index = |name: &Name| match spec.models.iter().position(|known| known == name) {
        None if !retired.contains(name) && !spec.retired.contains(name) => Err(Bad::UnknownModel(name.clone())),
        place => Ok(place),
    };
    let spread = |entries: Vec<(Name, f64)>| {
        let mut all = vec![0.0; spec.models.len()];
        for (name, p) in entries {
            if let Some(place) = index(&name)? {
                all[place] = p;
            }
        }
        Ok(all)
    };
    let chosen = index(model)?;
    let impossible = |entries: &[(Name, f64)]| !entries.iter().any(|(name, p)| name == model && *p > 0.0);
    let propensities = match propensities {
        Propensities::Full(entries) if impossible(&entries) => return Err(Bad::ImpossibleChoice(model.clone())),
        Propensities::Full(entries) => Known::Full(spread(entries)?),
        Propensities::Chosen(p) => Known::Chosen(p),
        Propensities::Unknown => Known::Nothing,
    };
    let policy = policy.map(spread).transpose()?;
    Ok(chosen.map(|chosen| Decision {
        model: u16::try_from(chosen).expect("at most 4096 models"),
        query,
        propensities,
        policy,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use proptest::prelude::*;

    fn step(engine: &mut Engine, side: Side, text: &str) -> Effects {
        let settings = engine.settings.clone();
        engine.step(Input::parse(&Parser::new(&settings), side, text.as_bytes().to_vec(), None))
    }

    fn engine(set: &str) -> Engine {
        Engine::new(toml::from_str::<Config>(set).unwrap().check().unwrap())
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
            let letter = step(&mut engine, Side::Query, &text).dead_letter.unwrap();
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
        // The first event beyond the window closes it.
        let other = r#"{"request_id":"s","ts_ms":20,"reward":1}"#;
        let applied = step(&mut engine, Side::Reward, other).applied;
        let space = Name::default_space();
        assert_eq!(
            applied,
            [Applied { space, request_id: "r".to_owned(), model: 1, reward: 0.0, latency_ms: Some(1), example: None }],
            "-3 is clipped"
        );
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
            assert_eq!(step(&mut engine, Side::Query, &text).dead_letter, None);
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
        };
        let mut engine = engine(SMALL);
        let (_, space, _) = engine.space(Name::default_space());
        for (known, missing) in [
            (Known::Full(vec![0.2, 0.6, 0.2]), MissingPropensities::Reject),
            (Known::Chosen(0.6), MissingPropensities::Uniform),
            (Known::Chosen(0.6), MissingPropensities::Current),
            (Known::Nothing, MissingPropensities::Current),
        ] {
            let example = space.example(decision(known), 1.0, missing);
            assert_eq!(example.policy(), [0.1, 0.7, 0.2]);
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
