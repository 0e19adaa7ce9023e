//! The join of query events with reward events, for one space, in event time.
//!
//! A space's time T is the largest `ts_ms` it has seen. Each event first moves T, then closes what T is past, then is
//! judged itself; so no clock and no arrival rate can change what is learned. With w = `window_ms`, e = `early_ms`:
//!
//! - a reward counts if ts_query - e <= ts_reward <= ts_query + w, both ends included;
//! - a query's window is past when T > ts_query + w, a waiting reward is past when T > ts_reward + e.
//!
//! So a query that is still open and a reward that still waits always fit each other, whatever order they came in.
//!
//! What becomes of a query, the first that applies:
//!
//! | outcome | when |
//! |---|---|
//! | duplicate | its request has an open query, or is finished and remembered |
//! | late | its window is past already; it leaves no trace |
//! | joined | under `first` as soon as it has a reward, else when its window closes with at least one |
//! | expired | its window closed without a reward: dropped, or learned as the default |
//! | evicted | it was the oldest when the bounds were exceeded; never learned, not even as the default |
//! | pending | none of these yet |
//!
//! What becomes of a reward, the first that applies:
//!
//! | outcome | when |
//! |---|---|
//! | duplicate | under `first` its request has joined; else its identity is known in its request |
//! | orphaned | no query within reach: it is older than ts_query - e, or no query came until it was past |
//! | late | its request is finished, however that came about |
//! | used | it went into an example, alone or aggregated |
//! | evicted | it was held for a request that was evicted |
//! | pending | none of these yet |
//!
//! A reward's identity is its `event_id`, or without one its (`ts_ms`, reward). A request is finished when its query
//! has joined, expired or been evicted. It is then remembered, with the identities of its rewards, until T is past both
//! its end + `remember_ms` and its window, so that a query that is sent again is never learned again, however short
//! `remember_ms`. Only the bound on remembered requests can break that.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What a query carries through the join.
pub trait Payload {
    /// The memory it holds. A function of its value alone (not of spare capacity), so that a restored joiner evicts
    /// what the saved one would have evicted.
    fn bytes(&self) -> usize;
}

/// How a space joins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinSpec {
    /// How long after its query a reward still counts.
    pub window_ms: u64,
    /// How long before its query a reward already counts.
    pub early_ms: u64,
    /// How long finished requests are remembered after their end.
    pub remember_ms: u64,
    /// What a query without reward becomes.
    pub on_missing: OnMissing,
    /// How several rewards of a request become one.
    pub aggregate: Aggregate,
    /// Most requests that wait at a time: open queries, and requests with only early rewards.
    pub pending_max: usize,
    /// Most memory that waiting requests may take.
    pub pending_bytes_max: usize,
    /// Most that is remembered at a time: finished requests and identities of their rewards, counted together.
    pub remembered_max: usize,
}

/// What a query becomes whose window closes without a reward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMissing {
    /// Nothing.
    Drop,
    /// An example with this reward.
    Default(f64),
}

/// How several rewards of a request become one. Their order is that of (`ts_ms`, arrival).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregate {
    /// The first, learned at once.
    First,
    /// The last when the window closes.
    Last,
    /// The sum, not clipped.
    Sum,
    /// The mean.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// A query with its reward.
#[derive(Debug, Clone, PartialEq)]
pub struct Joined<P> {
    /// The request's id.
    pub request_id: String,
    /// Event time of the query.
    pub ts_ms: i64,
    /// What the query carried.
    pub payload: P,
    /// The reward, aggregated; finite if all its parts are, but neither mapped nor clipped.
    pub reward: f64,
    /// Whether no reward came, and this one is the default.
    pub defaulted: bool,
}

/// What became of the queries and rewards. Outcomes are disjoint, each side sums up to what was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinCounts {
    /// The queries.
    pub queries: QueryCounts,
    /// The rewards.
    pub rewards: RewardCounts,
}

/// What became of the queries; the module's table says when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryCounts {
    /// All that came: the sum of the others.
    pub read: u64,
    /// Of a request whose query is known.
    pub duplicate: u64,
    /// Came after their own window.
    pub late: u64,
    /// Became examples with a reward.
    pub joined: u64,
    /// Got no reward.
    pub expired: u64,
    /// Had to go for the bounds.
    pub evicted: u64,
    /// Have an open window.
    pub pending: u64,
}

/// What became of the rewards; the module's table says when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardCounts {
    /// All that came: the sum of the others.
    pub read: u64,
    /// Went into examples.
    pub used: u64,
    /// Repeat another, or come second under `first`.
    pub duplicate: u64,
    /// Came after their request was finished.
    pub late: u64,
    /// Have no query within reach.
    pub orphaned: u64,
    /// Had to go for the bounds.
    pub evicted: u64,
    /// Are held for an open window, or wait for their query.
    pub pending: u64,
}

impl AddAssign for JoinCounts {
    fn add_assign(&mut self, other: Self) {
        let (q, r) = (&mut self.queries, &mut self.rewards);
        q.read += other.queries.read;
        q.duplicate += other.queries.duplicate;
        q.late += other.queries.late;
        q.joined += other.queries.joined;
        q.expired += other.queries.expired;
        q.evicted += other.queries.evicted;
        q.pending += other.queries.pending;
        r.read += other.rewards.read;
        r.used += other.rewards.used;
        r.duplicate += other.rewards.duplicate;
        r.late += other.rewards.late;
        r.orphaned += other.rewards.orphaned;
        r.evicted += other.rewards.evicted;
        r.pending += other.rewards.pending;
    }
}

/// How much a joiner holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait: open queries, and requests with only early rewards.
    pub requests: usize,
    /// Memory that they take, estimated from above.
    pub bytes: usize,
    /// Finished requests and identities of their rewards that are remembered.
    pub remembered: usize,
}

/// Why a saved joiner cannot be gone on with.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the saved join contradicts itself: go back to an older snapshot, or replay")]
pub struct BadJoin;

/// The join of one space.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "Saved<P>", bound(deserialize = "P: Payload + Deserialize<'de>"))]
pub struct Joiner<P> {
    spec: JoinSpec,
    time_ms: Option<i64>,
    counts: JoinCounts,
    pool: Pool<P>,
    memory: Memory,
}

impl<P: Payload> Joiner<P> {
    /// A joiner that has not seen anything.
    pub fn new(spec: JoinSpec) -> Self {
        let (pool, memory) = (Pool::from(BTreeMap::new()), Memory::from(BTreeMap::new()));
        Self { spec, time_ms: None, counts: JoinCounts::default(), pool, memory }
    }

    /// Goes on by another rule, from the next event on: for a restart with a changed configuration.
    pub fn set_spec(&mut self, spec: JoinSpec) {
        self.spec = spec;
    }

    /// Takes a query; what is complete by then is appended to `out`, in the order of completion.
    pub fn query(&mut self, request_id: &str, ts_ms: i64, payload: P, out: &mut Vec<Joined<P>>) {
        self.counts.queries.read += 1;
        self.pass(ts_ms, out);
        if self.has_query(request_id) {
            self.counts.queries.duplicate += 1;
        } else if self.is_past(self.deadline(ts_ms)) {
            self.counts.queries.late += 1;
        } else {
            self.accept(request_id, Asked { ts_ms, payload }, out);
        }
        self.keep_bounds();
    }

    /// Takes a reward, a finite number; what is complete by then is appended to `out`, in the order of completion.
    pub fn reward(
        &mut self,
        request_id: &str,
        ts_ms: i64,
        reward: f64,
        event_id: Option<&str>,
        out: &mut Vec<Joined<P>>,
    ) {
        self.counts.rewards.read += 1;
        self.pass(ts_ms, out);
        let identity = identity(ts_ms, reward, event_id);
        if self.memory.contains(request_id) {
            self.follow_up(request_id, ts_ms, identity);
        } else {
            // The number of rewards read so far is as good as a sequence number, and saved already.
            let held = Held { ts_ms, reward, arrival: self.counts.rewards.read };
            self.hold(request_id, identity, held, out);
        }
        self.keep_bounds();
    }

    /// Moves time, for an event of the space that was merged but is not to be joined, such as one of a retired model.
    pub fn advance(&mut self, ts_ms: i64, out: &mut Vec<Joined<P>>) {
        self.pass(ts_ms, out);
        self.keep_bounds();
    }

    /// Closes all windows, as if time had passed; the space's time stays what it is.
    pub fn close_all(&mut self, out: &mut Vec<Joined<P>>) {
        while let Some((ts_ms, id)) = self.pool.open.first().cloned() {
            self.finish(&id, self.deadline(ts_ms), out);
        }
        while self.pool.drop_first_early() {
            self.counts.rewards.orphaned += 1;
        }
        self.keep_bounds();
    }

    /// What became of all that came.
    pub fn counts(&self) -> &JoinCounts {
        &self.counts
    }

    /// How much is held at present.
    pub fn load(&self) -> Load {
        Load { requests: self.pool.requests.len(), bytes: self.pool.bytes, remembered: self.memory.entries }
    }

    /// The space's time: the largest `ts_ms` so far.
    pub fn time_ms(&self) -> Option<i64> {
        self.time_ms
    }

    /// Moves time and closes, in the order of (deadline, request id), what it is past.
    fn pass(&mut self, ts_ms: i64, out: &mut Vec<Joined<P>>) {
        self.time_ms = self.time_ms.max(Some(ts_ms));
        while let Some((ts_ms, id)) = self.pool.open.first().cloned()
            && self.is_past(self.deadline(ts_ms))
        {
            self.finish(&id, self.deadline(ts_ms), out);
        }
        while let Some(&(ts_ms, ..)) = self.pool.early.first()
            && self.is_past(later(ts_ms, self.spec.early_ms))
            && self.pool.drop_first_early()
        {
            self.counts.rewards.orphaned += 1;
        }
        while let Some(&(until_ms, _)) = self.memory.ends.first()
            && self.is_past(until_ms)
        {
            self.memory.forget_first();
        }
    }

    /// Opens a query's window, with the rewards that waited for it.
    fn accept(&mut self, request_id: &str, asked: Asked<P>, out: &mut Vec<Joined<P>>) {
        let (id, rewards) = match self.pool.take(request_id) {
            Some((id, request)) => (id, request.rewards),
            None => (Id::from(request_id), Rewards::new()),
        };
        let complete = self.is_first() && !rewards.is_empty();
        self.pool.put(id.clone(), Waiting { query: Some(asked), rewards });
        if complete {
            self.finish_now(&id, out);
        }
    }

    /// Holds a reward, for its open query or until its query comes.
    fn hold(&mut self, request_id: &str, identity: u64, held: Held, out: &mut Vec<Joined<P>>) {
        let request = self.pool.requests.get(request_id);
        if request.is_some_and(|request| request.rewards.contains_key(&identity)) {
            self.counts.rewards.duplicate += 1;
            return;
        }
        let asked_ms = request.and_then(|request| request.query.as_ref()).map(|asked| asked.ts_ms);
        // Without a query it is judged as if it had come in time and waited since.
        if Some(later(held.ts_ms, self.spec.early_ms)) < asked_ms.or(self.time_ms) {
            self.counts.rewards.orphaned += 1;
            return;
        }
        let id = self.pool.add_reward(request_id, identity, held);
        if asked_ms.is_some() && self.is_first() {
            self.finish_now(&id, out);
        }
    }

    /// Judges a reward whose request is finished.
    fn follow_up(&mut self, request_id: &str, ts_ms: i64, identity: u64) {
        let Some(finished) = self.memory.finished.get(request_id) else { return };
        if finished.settled || finished.seen.contains(&identity) {
            self.counts.rewards.duplicate += 1;
        } else if later(ts_ms, self.spec.early_ms) < finished.ts_ms {
            self.counts.rewards.orphaned += 1;
        } else {
            self.counts.rewards.late += 1;
            self.memory.note_reward(request_id, identity);
        }
    }

    fn finish_now(&mut self, id: &Id, out: &mut Vec<Joined<P>>) {
        if let Some(now_ms) = self.time_ms {
            self.finish(id, now_ms, out);
        }
    }

    /// Ends an open query: joined with the rewards it has, else expired.
    fn finish(&mut self, id: &Id, end_ms: i64, out: &mut Vec<Joined<P>>) {
        let Some((id, Waiting { query: Some(asked), rewards })) = self.pool.take(id.as_str()) else { return };
        let Asked { ts_ms, payload } = asked;
        let defaulted = rewards.is_empty();
        let reward = if defaulted { self.expire() } else { Some(self.join(&rewards)) };
        if let Some(reward) = reward {
            out.push(Joined { request_id: id.as_str().to_owned(), ts_ms, payload, reward, defaulted });
        }
        let settled = self.is_first() && !defaulted;
        self.remember(id, ts_ms, end_ms, settled, &rewards);
    }

    /// Counts a query without reward; returns the reward that is learned nevertheless.
    fn expire(&mut self) -> Option<f64> {
        self.counts.queries.expired += 1;
        match self.spec.on_missing {
            OnMissing::Drop => None,
            OnMissing::Default(reward) => Some(reward),
        }
    }

    /// Counts a query and its rewards; returns the aggregate.
    fn join(&mut self, rewards: &Rewards) -> f64 {
        let number = rewards.len() as u64;
        let used = if self.is_first() { 1 } else { number };
        self.counts.queries.joined += 1;
        self.counts.rewards.used += used;
        self.counts.rewards.duplicate += number - used;
        self.spec.aggregate.of(rewards)
    }

    fn remember(&mut self, id: Id, ts_ms: i64, end_ms: i64, settled: bool, rewards: &Rewards) {
        let until_ms = later(end_ms, self.spec.remember_ms).max(self.deadline(ts_ms));
        let seen = if settled { BTreeSet::new() } else { rewards.keys().copied().collect() };
        self.memory.put(id, Finished { ts_ms, until_ms, settled, seen });
    }

    /// Ends every call: what is beyond the bounds goes, oldest first, and the counts balance again.
    fn keep_bounds(&mut self) {
        while self.pool.requests.len() > self.spec.pending_max || self.pool.bytes > self.spec.pending_bytes_max {
            let Some((id, request)) = self.pool.take_oldest() else { break };
            self.evict(id, request);
        }
        while self.memory.entries > self.spec.remembered_max {
            self.memory.forget_first();
        }
        self.counts.queries.pending = self.pool.open.len() as u64;
        self.counts.rewards.pending = self.pool.rewards;
    }

    fn evict(&mut self, id: Id, request: Waiting<P>) {
        self.counts.rewards.evicted += request.rewards.len() as u64;
        // A request of which only rewards were seen is not finished: its query may come yet.
        if let Some(asked) = request.query {
            self.counts.queries.evicted += 1;
            let now_ms = self.time_ms.unwrap_or(asked.ts_ms);
            self.remember(id, asked.ts_ms, now_ms, false, &request.rewards);
        }
    }

    fn has_query(&self, request_id: &str) -> bool {
        let waiting = self.pool.requests.get(request_id);
        self.memory.contains(request_id) || waiting.is_some_and(|request| request.query.is_some())
    }

    fn is_first(&self) -> bool {
        self.spec.aggregate == Aggregate::First
    }

    fn deadline(&self, ts_ms: i64) -> i64 {
        later(ts_ms, self.spec.window_ms)
    }

    fn is_past(&self, last_ms: i64) -> bool {
        self.time_ms > Some(last_ms)
    }
}

impl JoinCounts {
    /// Whether the outcomes sum up to what was read, on both sides.
    pub fn balance(&self) -> bool {
        let (q, r) = (&self.queries, &self.rewards);
        let queries = [q.duplicate, q.late, q.joined, q.expired, q.evicted, q.pending];
        let rewards = [r.used, r.duplicate, r.late, r.orphaned, r.evicted, r.pending];
        // Wider than a count: damaged ones must not overflow.
        let sum = |outcomes: [u64; 6]| outcomes.into_iter().map(u128::from).sum::<u128>();
        sum(queries) == u128::from(q.read) && sum(rewards) == u128::from(r.read)
    }
}

/// A request's id, shared between a map and its index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Id(Arc<str>);

/// A request that is not finished: an open query, or at least one early reward.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Waiting<P> {
    query: Option<Asked<P>>,
    rewards: Rewards,
}

/// A query whose window is open.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Asked<P> {
    ts_ms: i64,
    payload: P,
}

/// Rewards of a request, by identity.
type Rewards = BTreeMap<u64, Held>;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Held {
    ts_ms: i64,
    reward: f64,
    arrival: u64,
}

/// What is remembered of a finished request.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Finished {
    /// Event time of the query.
    ts_ms: i64,
    until_ms: i64,
    /// Whether all further rewards are duplicates, whatever their identity.
    settled: bool,
    seen: BTreeSet<u64>,
}

/// The requests that wait, with what is needed to find the oldest. Only the requests are saved.
#[derive(Debug, Clone)]
struct Pool<P> {
    requests: BTreeMap<Id, Box<Waiting<P>>>,
    /// Open queries by age, which is also the order of their deadlines.
    open: BTreeSet<(i64, Id)>,
    /// Rewards without a query by age, with their identity.
    early: BTreeSet<(i64, Id, u64)>,
    rewards: u64,
    bytes: usize,
}

/// The requests that are remembered, with what is needed to forget the right one. Only the requests are saved.
#[derive(Debug, Clone)]
struct Memory {
    finished: BTreeMap<Id, Finished>,
    /// Requests by when they are forgotten.
    ends: BTreeSet<(i64, Id)>,
    /// Requests and identities of rewards.
    entries: usize,
}

// What a request costs besides its id and its payload, as measured with half-filled tree nodes and what an allocator
// adds, rounded up. Constants, so that every machine evicts the same.
const REQUEST_BYTES: usize = 256;
const FIRST_REWARD_BYTES: usize = 400;
const REWARD_BYTES: usize = 128;

impl<P: Payload> Pool<P> {
    fn put(&mut self, id: Id, request: Waiting<P>) {
        self.bytes += request.bytes(&id);
        self.rewards += request.rewards.len() as u64;
        if let Some(asked) = &request.query {
            self.open.insert((asked.ts_ms, id.clone()));
        } else {
            self.early.extend(request.early(&id));
        }
        self.requests.insert(id, Box::new(request));
    }

    fn take(&mut self, request_id: &str) -> Option<(Id, Waiting<P>)> {
        let (id, request) = self.requests.remove_entry(request_id)?;
        self.bytes -= request.bytes(&id);
        self.rewards -= request.rewards.len() as u64;
        if let Some(asked) = &request.query {
            self.open.remove(&(asked.ts_ms, id.clone()));
        } else {
            for reward in request.early(&id) {
                self.early.remove(&reward);
            }
        }
        Some((id, *request))
    }

    /// Takes the request with the smallest (`ts_ms`, request id), of a query or of an early reward.
    fn take_oldest(&mut self) -> Option<(Id, Waiting<P>)> {
        let query = self.open.first().map(|(ts_ms, id)| (*ts_ms, id));
        let reward = self.early.first().map(|(ts_ms, id, _)| (*ts_ms, id));
        let (_, id) = query.into_iter().chain(reward).min()?;
        let id = id.clone();
        self.take(id.as_str())
    }

    /// Adds a reward, in place: a request can have many, and each must stay cheap.
    fn add_reward(&mut self, request_id: &str, identity: u64, held: Held) -> Id {
        let Some((id, _)) = self.requests.get_key_value(request_id) else {
            let id = Id::from(request_id);
            self.put(id.clone(), Waiting { query: None, rewards: Rewards::from([(identity, held)]) });
            return id;
        };
        let id = id.clone();
        if let Some(request) = self.requests.get_mut(&id) {
            if request.query.is_none() {
                self.early.insert((held.ts_ms, id.clone(), identity));
            }
            self.bytes -= request.bytes(&id);
            request.rewards.insert(identity, held);
            self.bytes += request.bytes(&id);
            self.rewards += 1;
        }
        id
    }

    /// Drops the oldest reward that has no query, and its request with the last; false if there is none.
    fn drop_first_early(&mut self) -> bool {
        let Some((_, id, identity)) = self.early.pop_first() else { return false };
        if let Some(request) = self.requests.get_mut(&id) {
            self.bytes -= request.bytes(&id);
            self.rewards -= 1;
            request.rewards.remove(&identity);
            if request.rewards.is_empty() {
                self.requests.remove(&id);
            } else {
                self.bytes += request.bytes(&id);
            }
        }
        true
    }
}

impl<P: Payload> From<BTreeMap<Id, Box<Waiting<P>>>> for Pool<P> {
    fn from(requests: BTreeMap<Id, Box<Waiting<P>>>) -> Self {
        let mut pool =
            Self { requests: BTreeMap::new(), open: BTreeSet::new(), early: BTreeSet::new(), rewards: 0, bytes: 0 };
        requests.into_iter().for_each(|(id, request)| pool.put(id, *request));
        pool
    }
}

impl<P: Payload> Waiting<P> {
    fn bytes(&self, id: &Id) -> usize {
        let payload = self.query.as_ref().map_or(0, |asked| asked.payload.bytes());
        let rewards = match self.rewards.len() {
            0 => 0,
            number => FIRST_REWARD_BYTES + (number - 1) * REWARD_BYTES,
        };
        REQUEST_BYTES + id.as_str().len() + payload + rewards
    }

    /// The request's entries in the index of rewards without a query.
    fn early(&self, id: &Id) -> impl Iterator<Item = (i64, Id, u64)> {
        self.rewards.iter().map(|(&identity, held)| (held.ts_ms, id.clone(), identity))
    }
}

impl Memory {
    fn contains(&self, request_id: &str) -> bool {
        self.finished.contains_key(request_id)
    }

    fn put(&mut self, id: Id, finished: Finished) {
        self.entries += finished.entries();
        self.ends.insert((finished.until_ms, id.clone()));
        self.finished.insert(id, finished);
    }

    fn note_reward(&mut self, request_id: &str, identity: u64) {
        if let Some(finished) = self.finished.get_mut(request_id)
            && finished.seen.insert(identity)
        {
            self.entries += 1;
        }
    }

    fn forget_first(&mut self) {
        if let Some((_, id)) = self.ends.pop_first()
            && let Some(finished) = self.finished.remove(&id)
        {
            self.entries -= finished.entries();
        }
    }
}

impl From<BTreeMap<Id, Finished>> for Memory {
    fn from(finished: BTreeMap<Id, Finished>) -> Self {
        let mut memory = Self { finished: BTreeMap::new(), ends: BTreeSet::new(), entries: 0 };
        finished.into_iter().for_each(|(id, finished)| memory.put(id, finished));
        memory
    }
}

impl Finished {
    fn entries(&self) -> usize {
        1 + self.seen.len()
    }
}

impl Aggregate {
    /// One reward of many; 0 of none.
    fn of(self, rewards: &Rewards) -> f64 {
        let mut held: Vec<&Held> = rewards.values().collect();
        held.sort_unstable_by_key(|held| (held.ts_ms, held.arrival));
        let mut rewards = held.iter().map(|held| held.reward);
        match self {
            Self::First => rewards.next(),
            Self::Last => rewards.next_back(),
            Self::Sum => Some(finite(rewards.sum())),
            Self::Mean => Some(finite(rewards.sum()) / held.len().max(1) as f64),
            Self::Max => rewards.reduce(f64::max),
            Self::Min => rewards.reduce(f64::min),
        }
        .unwrap_or_default()
    }
}

/// A joiner as it was saved: the indices are built again.
#[derive(Deserialize)]
#[serde(bound(deserialize = "P: Payload + Deserialize<'de>"))]
struct Saved<P> {
    spec: JoinSpec,
    time_ms: Option<i64>,
    counts: JoinCounts,
    pool: Pool<P>,
    memory: Memory,
}

impl<P: Payload> TryFrom<Saved<P>> for Joiner<P> {
    type Error = BadJoin;

    fn try_from(saved: Saved<P>) -> Result<Self, BadJoin> {
        let Saved { spec, time_ms, counts, pool, memory } = saved;
        let empty = |request: &Waiting<P>| request.query.is_none() && request.rewards.is_empty();
        let pending = counts.queries.pending == pool.open.len() as u64 && counts.rewards.pending == pool.rewards;
        let disjoint = memory.finished.keys().all(|id| !pool.requests.contains_key(id));
        if counts.balance() && pending && disjoint && !pool.requests.values().any(|request| empty(request)) {
            Ok(Self { spec, time_ms, counts, pool, memory })
        } else {
            Err(BadJoin)
        }
    }
}

impl<P: Serialize> Serialize for Pool<P> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.requests.serialize(serializer)
    }
}

impl<'de, P: Payload + Deserialize<'de>> Deserialize<'de> for Pool<P> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self::from)
    }
}

impl Serialize for Memory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.finished.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Memory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self::from)
    }
}

impl Id {
    fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Id {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

/// Looked up by text: the order of ids is that of their text.
impl Borrow<str> for Id {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self(text.into()))
    }
}

/// What makes a reward the same reward within its request: a hash, so that it costs the same whatever the event id.
fn identity(ts_ms: i64, reward: f64, event_id: Option<&str>) -> u64 {
    match event_id {
        Some(event_id) => xxh3_64_with_seed(event_id.as_bytes(), 1),
        None => {
            // Adding zero makes -0 the same reward as 0.
            let bits = (reward + 0.0).to_bits();
            xxh3_64_with_seed([ts_ms.to_le_bytes(), bits.to_le_bytes()].as_flattened(), 0)
        }
    }
}

/// Finite rewards can have an infinite sum, but what leaves the joiner is finite.
fn finite(sum: f64) -> f64 {
    sum.clamp(f64::MIN, f64::MAX)
}

/// The sum, at most the end of time; exact for comparisons with any time.
fn later(ts_ms: i64, by_ms: u64) -> i64 {
    ts_ms.saturating_add_unsigned(by_ms)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    const WIDE: JoinSpec = JoinSpec {
        window_ms: 10,
        early_ms: 5,
        remember_ms: 15,
        on_missing: OnMissing::Drop,
        aggregate: Aggregate::First,
        pending_max: 1000,
        pending_bytes_max: 1 << 20,
        remembered_max: 1000,
    };

    #[test]
    fn both_ends_of_the_window_count() {
        check(
            WIDE,
            "q a 0     -> query pending
             r a 10 1  -> query joined, reward used, a@0=1
             q b 20    -> query pending
             r b 31 1  -> query expired, reward late
             r c 40 1  -> reward pending
             q c 45    -> query joined, reward used, c@45=1
             r d 50 1  -> reward pending
             q d 56    -> query pending, reward orphaned",
        );
    }

    #[test]
    fn windows_close_in_order_before_the_event_that_passed_them() {
        check(
            JoinSpec { on_missing: OnMissing::Default(0.25), ..WIDE },
            "q b 0     -> query pending
             q a 0     -> query pending
             q c -3    -> query pending
             q d 9     -> query expired, c@-3=0.25?
             q e 10    -> query pending
             t 10      ->
             r d 11 1  -> query joined, query expired x2, reward used, a@0=0.25?, b@0=0.25?, d@9=1
             close     -> query expired, e@10=0.25?
             r e 12 1  -> reward late",
        );
    }

    #[test]
    fn under_first_any_further_reward_is_a_duplicate() {
        check(
            WIDE,
            "q a 0      -> query pending
             r a 1 0.5  -> query joined, reward used, a@0=0.5
             r a 2 0.7  -> reward duplicate
             r a 11 0.7 -> reward duplicate
             r a -9 0.7 -> reward duplicate
             r b 21 0.1 -> reward pending
             r b 22 0.2 -> reward pending
             r b 20 0.3 -> reward pending
             q b 23     -> query joined, reward used, reward duplicate x2, b@23=0.3
             q c 40     -> query pending
             r c 51 1   -> query expired, reward late
             r c 52 1   -> reward late
             r c 51 1   -> reward duplicate",
        );
    }

    #[test]
    fn an_early_reward_that_is_past_leaves_its_place_to_the_next() {
        check(
            WIDE,
            "r a 0 0.1 -> reward pending
             r a 4 0.2 -> reward pending
             q a 8     -> query joined, reward used, reward orphaned, a@8=0.2",
        );
    }

    #[test]
    fn the_other_aggregates_wait_for_the_close() {
        let trace = "r a -2 0.25  -> reward pending
                     q a 0        -> query pending
                     r a 9 1.5    -> reward pending
                     r a 3 0.125  -> reward pending
                     r a 9 0.5 x  -> reward pending
                     t 10         ->
                     t 11         -> query joined, reward used x4, a@0=REWARD
                     r a 9 0.5 x  -> reward duplicate
                     r a 9 1.5    -> reward duplicate
                     r a 8 0.5    -> reward late
                     r a 8 0.5    -> reward duplicate";
        let cases = [
            (Aggregate::Last, "0.5"),
            (Aggregate::Sum, "2.375"),
            (Aggregate::Mean, "0.59375"),
            (Aggregate::Max, "1.5"),
            (Aggregate::Min, "0.125"),
        ];
        for (aggregate, reward) in cases {
            check(with(aggregate), &trace.replace("REWARD", reward));
        }
    }

    #[test]
    fn the_identity_of_a_reward_is_its_event_id_else_its_time_and_value() {
        check(
            with(Aggregate::Sum),
            "r a 0 1    -> reward pending
             r a 0 1    -> reward duplicate
             q a 0      -> query pending
             r a 0 1    -> reward duplicate
             r a 0 2    -> reward pending
             r a 1 1    -> reward pending
             r a 0 1 x  -> reward pending
             r a 2 9 x  -> reward duplicate
             r a 0 1 y  -> reward pending
             r a 3 0    -> reward pending
             r a 3 -0   -> reward duplicate
             r b 0 1 x  -> reward pending
             close      -> query joined, reward used x6, reward orphaned, a@0=6",
        );
    }

    #[test]
    fn a_query_of_a_known_request_is_a_duplicate() {
        check(
            WIDE,
            "q a 0    -> query pending
             q a 0    -> query duplicate
             q a 5    -> query duplicate
             q b 11   -> query expired
             r b 12 1 -> query joined, reward used, b@11=1
             q b 12   -> query duplicate
             q a 25   -> query duplicate
             q a 26   -> query pending",
        );
    }

    #[test]
    fn what_is_older_than_its_window_is_late_and_leaves_no_trace() {
        check(
            WIDE,
            "t 100     ->
             q a 89    -> query late
             q a 89    -> query late
             r a 98 1  -> reward pending
             q a 89    -> query late
             q a 90    -> query joined, reward used, a@90=1
             r b 94 1  -> reward orphaned
             r b 95 1  -> reward pending",
        );
    }

    #[test]
    fn a_reward_out_of_reach_of_its_query_is_orphaned_in_either_order() {
        check(
            WIDE,
            "r a 0 1 -> reward pending
             q a 6   -> query pending, reward orphaned
             r a 0 1 -> reward orphaned
             r a 1 1 -> query joined, reward used, a@6=1
             q b 20  -> query pending
             t 31    -> query expired
             r b 14 1 -> reward orphaned
             r b 15 1 -> reward late",
        );
    }

    #[test]
    fn finished_requests_are_remembered_from_their_end() {
        check(
            WIDE,
            "q a 0    -> query pending
             r a 2 1  -> query joined, reward used, a@0=1
             q b 2    -> query pending
             r a 17 1 -> query expired, reward duplicate
             r a 18 1 -> reward pending
             r b 27 1 -> reward late, reward orphaned
             r b 28 1 -> reward pending",
        );
        // However short the memory, the window outlasts it: the query cannot be learned again.
        check(
            JoinSpec { remember_ms: 0, ..WIDE },
            "q a 0    -> query pending
             r a 2 1  -> query joined, reward used, a@0=1
             q a 0    -> query duplicate
             r a 10 1 -> reward duplicate
             q a 0    -> query duplicate
             t 11     ->
             q a 0    -> query late",
        );
    }

    #[test]
    fn the_oldest_are_evicted() {
        check(
            JoinSpec { pending_max: 2, aggregate: Aggregate::Sum, ..WIDE },
            "r c 0 1  -> reward pending
             r c 2 2  -> reward pending
             q b 1    -> query pending
             r b 1 1  -> reward pending
             q a 3    -> query pending, reward evicted x2
             r b 1 1  -> reward duplicate
             q d 0    -> query evicted
             q a2 3   -> query evicted, reward evicted
             r b 1 1  -> reward duplicate
             r b 2 1  -> reward late
             q b 1    -> query duplicate
             q c 4    -> query evicted
             close    -> query expired x2",
        );
        check(
            JoinSpec { pending_bytes_max: 2 * REQUEST_BYTES + 102, ..WIDE },
            "q a 0 50  -> query pending
             q b 1 50  -> query pending
             q c 2 50  -> query evicted
             q d 3 51  -> query evicted x2
             q e 4 900 -> query evicted x2",
        );
        check(JoinSpec { pending_max: 0, ..WIDE }, "q a 0 -> query evicted\n r a 1 1 -> reward late");
        check(JoinSpec { pending_max: 0, ..WIDE }, "r a 0 1 -> reward evicted\n q a 1 -> query evicted");
    }

    #[test]
    fn the_oldest_are_forgotten() {
        check(
            JoinSpec { remembered_max: 2, ..WIDE },
            "q a 0    -> query pending
             q b 1    -> query pending
             q c 2    -> query pending
             t 13     -> query expired x3
             r a 13 1 -> reward pending
             r b 13 1 -> reward late
             r b 13 1 -> reward pending
             r c 13 1 -> reward late
             r c 13 1 -> reward duplicate",
        );
        check(
            JoinSpec { remembered_max: 0, ..WIDE },
            "q a 0   -> query pending
             r a 1 1 -> query joined, reward used, a@0=1
             r a 2 1 -> reward pending",
        );
    }

    #[test]
    fn sums_of_finite_rewards_are_finite() {
        for (aggregate, reward) in [(Aggregate::Sum, f64::MAX), (Aggregate::Mean, f64::MAX / 2.0)] {
            let mut joiner = Joiner::new(with(aggregate));
            let mut out = Vec::new();
            joiner.query("a", 0, Size(0), &mut out);
            joiner.reward("a", 0, f64::MAX, None, &mut out);
            joiner.reward("a", 1, f64::MAX, None, &mut out);
            joiner.close_all(&mut out);
            assert_eq!(out[0].reward, reward);
        }
    }

    #[test]
    fn a_pending_query_of_768_dimensions_stays_below_4_kib() {
        let mut joiner = Joiner::new(with(Aggregate::Sum));
        let id = "x".repeat(64);
        joiner.query(&id, 0, Size(3300), &mut Vec::new());
        joiner.reward(&id, 0, 1.0, None, &mut Vec::new());
        assert_eq!(joiner.load().requests, 1);
        assert!(joiner.load().bytes < 4096, "{:?}", joiner.load());
        joiner.close_all(&mut Vec::new());
        assert_eq!(joiner.load(), Load { requests: 0, bytes: 0, remembered: 2 });
    }

    #[test]
    fn configuration_names_are_kebab_case() {
        let names = ["first", "last", "sum", "mean", "max", "min"];
        let found = names.map(|name| serde_json::from_value::<Aggregate>(name.into()).unwrap());
        assert_eq!(found, AGGREGATES);
        assert_eq!(serde_json::from_str::<OnMissing>("\"drop\"").unwrap(), OnMissing::Drop);
        assert_eq!(serde_json::from_str::<OnMissing>(r#"{"default":0.5}"#).unwrap(), OnMissing::Default(0.5));
    }

    #[test]
    fn a_joiner_that_contradicts_itself_is_refused() {
        let mut joiner = Joiner::new(with(Aggregate::Sum));
        for event in ["q a 0", "r a 1 1", "r b 1 1"] {
            Event::parse(event).feed(&mut joiner);
        }
        let saved = serde_json::to_value(&joiner).unwrap();
        assert!(serde_json::from_value::<Joiner<Size>>(saved.clone()).is_ok());
        let refused = |damage: &dyn Fn(&mut serde_json::Value)| {
            let mut damaged = saved.clone();
            damage(&mut damaged);
            let error = serde_json::from_value::<Joiner<Size>>(damaged).unwrap_err();
            assert_eq!(error.to_string(), BadJoin.to_string());
        };
        refused(&|saved| saved["counts"]["queries"]["read"] = 2.into());
        refused(&|saved| saved["pool"]["b"]["rewards"] = serde_json::json!({}));
        refused(&|saved| {
            saved["memory"]["a"] = serde_json::json!({"ts_ms": 0, "until_ms": 9, "settled": false, "seen": []});
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6000))]

        #[test]
        fn equals_the_naive_joiner((spec, events) in (any_spec(), any_events())) {
            compare(spec, &events)?;
        }

        #[test]
        fn equals_the_naive_joiner_at_the_ends_of_time((spec, events) in (extreme_spec(), extreme_events())) {
            compare(spec, &events)?;
        }

        #[test]
        fn goes_on_under_another_rule((spec, next, events) in (any_spec(), any_spec(), any_events())) {
            let (mut joiner, mut naive) = (Joiner::new(spec.clone()), Naive::new(spec));
            for (i, event) in events.iter().enumerate() {
                if i == events.len() / 2 {
                    joiner.set_spec(next.clone());
                    naive.spec = next.clone();
                }
                compare_step(&mut joiner, &mut naive, event)?;
            }
        }

        #[test]
        fn goes_on_from_a_save_as_if_never_stopped(
            (spec, events, share) in (any_spec(), any_events(), 0.0..1.0),
        ) {
            let mut joiner = Joiner::new(spec);
            let (before, after) = events.split_at((events.len() as f64 * share) as usize);
            before.iter().for_each(|event| drop(event.feed(&mut joiner)));
            let mut restored = restore(&save(&joiner));
            for event in after {
                prop_assert_eq!(event.feed(&mut joiner), event.feed(&mut restored));
                prop_assert_eq!(joiner.counts(), restored.counts());
                prop_assert_eq!(joiner.load(), restored.load());
                prop_assert_eq!(save(&joiner), save(&restored));
            }
        }
    }

    const AGGREGATES: [Aggregate; 6] =
        [Aggregate::First, Aggregate::Last, Aggregate::Sum, Aggregate::Mean, Aggregate::Max, Aggregate::Min];

    fn with(aggregate: Aggregate) -> JoinSpec {
        JoinSpec { aggregate, ..WIDE }
    }

    /// Runs the events left of the arrows and compares, right of them, the counts that grew and what was joined.
    #[track_caller]
    fn check(spec: JoinSpec, trace: &str) {
        let mut joiner = Joiner::new(spec);
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for line in trace.lines() {
            let (event, right) = line.split_once("->").unwrap();
            let before = outcomes(joiner.counts());
            let joined = Event::parse(event).feed(&mut joiner);
            let mut parts = Vec::new();
            for ((name, after), (_, before)) in outcomes(joiner.counts()).into_iter().zip(before) {
                match after.saturating_sub(before) {
                    0 => {}
                    1 => parts.push(name.to_owned()),
                    n => parts.push(format!("{name} x{n}")),
                }
            }
            for Joined { request_id, ts_ms, reward, defaulted, .. } in joined {
                parts.push(format!("{request_id}@{ts_ms}={reward}{}", if defaulted { "?" } else { "" }));
            }
            found.push(format!("{} -> {}", event.trim(), parts.join(", ")));
            expected.push(format!("{} -> {}", event.trim(), right.trim()));
            assert!(joiner.counts().balance());
        }
        assert_eq!(found, expected);
    }

    /// Every count but what was read, by name.
    fn outcomes(counts: &JoinCounts) -> [(&'static str, u64); 12] {
        let (q, r) = (&counts.queries, &counts.rewards);
        [
            ("query duplicate", q.duplicate),
            ("query late", q.late),
            ("query joined", q.joined),
            ("query expired", q.expired),
            ("query evicted", q.evicted),
            ("query pending", q.pending),
            ("reward used", r.used),
            ("reward duplicate", r.duplicate),
            ("reward late", r.late),
            ("reward orphaned", r.orphaned),
            ("reward evicted", r.evicted),
            ("reward pending", r.pending),
        ]
    }

    fn compare(spec: JoinSpec, events: &[Event]) -> Result<(), TestCaseError> {
        let (mut joiner, mut naive) = (Joiner::new(spec.clone()), Naive::new(spec));
        events.iter().try_for_each(|event| compare_step(&mut joiner, &mut naive, event))
    }

    fn compare_step(joiner: &mut Joiner<Size>, naive: &mut Naive, event: &Event) -> Result<(), TestCaseError> {
        prop_assert_eq!(event.feed(joiner), naive.step(event));
        prop_assert_eq!(*joiner.counts(), naive.counts());
        prop_assert!(joiner.counts().balance());
        prop_assert_eq!(joiner.load(), naive.load());
        prop_assert_eq!(joiner.time_ms(), naive.time);
        Ok(())
    }

    fn save(joiner: &Joiner<Size>) -> Vec<u8> {
        bincode::serde::encode_to_vec(joiner, bincode::config::standard()).unwrap()
    }

    fn restore(bytes: &[u8]) -> Joiner<Size> {
        bincode::serde::decode_from_slice(bytes, bincode::config::standard()).unwrap().0
    }

    fn any_spec() -> impl Strategy<Value = JoinSpec> {
        let bounds = (
            prop_oneof![0..5usize, Just(1000)],
            prop_oneof![200..3000usize, Just(1 << 20)],
            prop_oneof![0..6usize, Just(1000)],
        );
        spec(0..9u64, bounds)
    }

    fn extreme_spec() -> impl Strategy<Value = JoinSpec> {
        let ends = vec![0, 1, 5, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX - 1, u64::MAX];
        spec(select(ends), (prop_oneof![1..4usize, Just(1000)], Just(1 << 20), prop_oneof![1..6usize, Just(1000)]))
    }

    fn spec(
        duration: impl Strategy<Value = u64> + Clone,
        bounds: impl Strategy<Value = (usize, usize, usize)>,
    ) -> impl Strategy<Value = JoinSpec> {
        let on_missing = prop_oneof![Just(OnMissing::Drop), Just(OnMissing::Default(0.25))];
        let durations = (duration.clone(), duration.clone(), duration);
        (durations, on_missing, select(AGGREGATES.to_vec()), bounds).prop_map(
            |((window_ms, early_ms, remember_ms), on_missing, aggregate, bounds)| JoinSpec {
                window_ms,
                early_ms,
                remember_ms,
                on_missing,
                aggregate,
                pending_max: bounds.0,
                pending_bytes_max: bounds.1,
                remembered_max: bounds.2,
            },
        )
    }

    /// A walk through time with jitter: mostly in order, sometimes far behind, now and then a leap.
    fn any_events() -> impl Strategy<Value = Vec<Event>> {
        let step = prop_oneof![12 => 0..3i64, 1 => 10..40i64];
        let jitter = prop_oneof![4 => Just(0), 2 => -12..4i64];
        vec((step, any_event(jitter)), 0..60).prop_map(|walk| {
            let mut clock = 0;
            let shift = |(step, event): (i64, Event)| {
                clock += step;
                event.shifted(clock)
            };
            walk.into_iter().map(shift).collect()
        })
    }

    fn extreme_events() -> impl Strategy<Value = Vec<Event>> {
        let ends = vec![i64::MIN, i64::MIN + 1, i64::MIN + 6, -1, 0, 1, i64::MAX - 6, i64::MAX - 1, i64::MAX];
        vec(any_event(select(ends)), 0..30)
    }

    fn any_event(ts: impl Strategy<Value = i64> + Clone) -> impl Strategy<Value = Event> {
        let id = select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned);
        let event_id = option::weighted(0.4, select(vec!["x", "y"]).prop_map(str::to_owned));
        let reward = select(vec![0.0, -0.0, 0.1, 0.7, 1.0, -3.3]);
        prop_oneof![
            20 => (id.clone(), ts.clone(), 0..900usize).prop_map(|(id, ts, size)| Event::Query { id, ts, size }),
            30 => (id, ts.clone(), reward, event_id)
                .prop_map(|(id, ts, reward, event_id)| Event::Reward { id, ts, reward, event_id }),
            2 => ts.prop_map(Event::Advance),
            1 => Just(Event::Close),
        ]
    }

    /// A payload that claims to hold this much.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Size(usize);

    impl Payload for Size {
        fn bytes(&self) -> usize {
            self.0
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Query { id: String, ts: i64, size: usize },
        Reward { id: String, ts: i64, reward: f64, event_id: Option<String> },
        Advance(i64),
        Close,
    }

    impl Event {
        /// `q ID TS [SIZE]`, `r ID TS REWARD [EVENT_ID]`, `t TS` or `close`.
        fn parse(text: &str) -> Self {
            let words: Vec<&str> = text.split_whitespace().collect();
            let ts = || words[words.len().min(3) - 1].parse().unwrap();
            let last = |from: usize| words.get(from).map(|word| (*word).to_owned());
            match words[..] {
                ["q", id, ..] => {
                    Self::Query { id: id.into(), ts: ts(), size: last(3).map_or(0, |w| w.parse().unwrap()) }
                }
                ["r", id, _, reward, ..] => {
                    Self::Reward { id: id.into(), ts: ts(), reward: reward.parse().unwrap(), event_id: last(4) }
                }
                ["t", _] => Self::Advance(ts()),
                ["close"] => Self::Close,
                _ => panic!("not an event: {text}"),
            }
        }

        fn shifted(mut self, by: i64) -> Self {
            match &mut self {
                Self::Query { ts, .. } | Self::Reward { ts, .. } | Self::Advance(ts) => *ts += by,
                Self::Close => {}
            }
            self
        }

        fn feed(&self, joiner: &mut Joiner<Size>) -> Vec<Joined<Size>> {
            let mut out = Vec::new();
            match self {
                Self::Query { id, ts, size } => joiner.query(id, *ts, Size(*size), &mut out),
                Self::Reward { id, ts, reward, event_id } => {
                    joiner.reward(id, *ts, *reward, event_id.as_deref(), &mut out);
                }
                Self::Advance(ts) => joiner.advance(*ts, &mut out),
                Self::Close => joiner.close_all(&mut out),
            }
            out
        }
    }

    /// The slow and obvious joiner: it keeps every event with its fate and looks through all of them each time.
    struct Naive {
        spec: JoinSpec,
        time: Option<i64>,
        queries: Vec<NaiveQuery>,
        rewards: Vec<NaiveReward>,
    }

    struct NaiveQuery {
        id: String,
        ts: i64,
        size: usize,
        fate: Fate,
        /// While remembered: until when.
        until: Option<i128>,
        settled: bool,
    }

    struct NaiveReward {
        id: String,
        ts: i64,
        reward: f64,
        event_id: Option<String>,
        fate: Fate,
        /// The finished query in whose memory it is.
        of: Option<usize>,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Pending,
        Duplicate,
        Late,
        Joined,
        Expired,
        Evicted,
        Used,
        Orphaned,
    }

    impl Naive {
        fn new(spec: JoinSpec) -> Self {
            Self { spec, time: None, queries: Vec::new(), rewards: Vec::new() }
        }

        fn step(&mut self, event: &Event) -> Vec<Joined<Size>> {
            let mut out = Vec::new();
            match event {
                Event::Query { id, ts, size } => {
                    self.pass(*ts, &mut out);
                    let fate = self.fate_of_query(id, *ts);
                    self.queries.push(NaiveQuery {
                        id: id.clone(),
                        ts: *ts,
                        size: *size,
                        fate,
                        until: None,
                        settled: false,
                    });
                    if fate == Fate::Pending {
                        self.join_at_once(id, &mut out);
                    }
                }
                Event::Reward { id, ts, reward, event_id } => {
                    self.pass(*ts, &mut out);
                    let (id, event_id) = (id.clone(), event_id.clone());
                    let mut new = NaiveReward { id, ts: *ts, reward: *reward, event_id, fate: Fate::Pending, of: None };
                    (new.fate, new.of) = self.fate_of_reward(&new);
                    let (id, fate) = (new.id.clone(), new.fate);
                    self.rewards.push(new);
                    if fate == Fate::Pending {
                        self.join_at_once(&id, &mut out);
                    }
                }
                Event::Advance(ts) => self.pass(*ts, &mut out),
                Event::Close => self.close_where(&|_| true, &mut out),
            }
            self.keep_bounds();
            out
        }

        fn pass(&mut self, ts: i64, out: &mut Vec<Joined<Size>>) {
            let time = self.time.map_or(ts, |time| time.max(ts));
            self.time = Some(time);
            self.close_where(&|last| i128::from(time) > last, out);
            for query in &mut self.queries {
                query.until = query.until.filter(|&until| i128::from(time) <= until);
            }
        }

        fn close_where(&mut self, past: &dyn Fn(i128) -> bool, out: &mut Vec<Joined<Size>>) {
            let mut closing: Vec<usize> = (0..self.queries.len())
                .filter(|&q| self.queries[q].fate == Fate::Pending && past(self.deadline(q)))
                .collect();
            closing.sort_by_key(|&q| (self.deadline(q), self.queries[q].id.clone()));
            closing.into_iter().for_each(|q| self.finish(q, self.deadline(q), out));
            for r in 0..self.rewards.len() {
                let reward = &self.rewards[r];
                let waits = reward.fate == Fate::Pending && self.open(&reward.id).is_none();
                if waits && past(self.reach(reward)) {
                    self.rewards[r].fate = Fate::Orphaned;
                }
            }
        }

        fn fate_of_query(&self, id: &str, ts: i64) -> Fate {
            if self.open(id).is_some() || self.remembered(id).is_some() {
                Fate::Duplicate
            } else if i128::from(self.time.unwrap()) > i128::from(ts) + i128::from(self.spec.window_ms) {
                Fate::Late
            } else {
                Fate::Pending
            }
        }

        fn fate_of_reward(&self, new: &NaiveReward) -> (Fate, Option<usize>) {
            let known = |of: Option<usize>, fate: Option<Fate>| {
                self.rewards.iter().any(|old| old.is(new) && old.of == of && fate.is_none_or(|fate| old.fate == fate))
            };
            if let Some(q) = self.remembered(&new.id) {
                if self.queries[q].settled || known(Some(q), None) {
                    (Fate::Duplicate, None)
                } else if self.reach(new) < i128::from(self.queries[q].ts) {
                    (Fate::Orphaned, None)
                } else {
                    (Fate::Late, Some(q))
                }
            } else if known(None, Some(Fate::Pending)) {
                (Fate::Duplicate, None)
            } else {
                let from = self.open(&new.id).map_or(self.time.unwrap(), |q| self.queries[q].ts);
                (if self.reach(new) < i128::from(from) { Fate::Orphaned } else { Fate::Pending }, None)
            }
        }

        fn join_at_once(&mut self, id: &str, out: &mut Vec<Joined<Size>>) {
            if self.spec.aggregate == Aggregate::First
                && !self.held(id).is_empty()
                && let Some(q) = self.open(id)
            {
                self.finish(q, i128::from(self.time.unwrap()), out);
            }
        }

        fn finish(&mut self, q: usize, end: i128, out: &mut Vec<Joined<Size>>) {
            let mut held = self.held(&self.queries[q].id);
            held.sort_by_key(|&r| self.rewards[r].ts);
            let values: Vec<f64> = held.iter().map(|&r| self.rewards[r].reward).collect();
            let sum: f64 = values.iter().sum();
            let first = self.spec.aggregate == Aggregate::First;
            let reward = match (values.is_empty(), self.spec.aggregate) {
                (true, _) => match self.spec.on_missing {
                    OnMissing::Drop => None,
                    OnMissing::Default(reward) => Some(reward),
                },
                (false, Aggregate::First) => Some(values[0]),
                (false, Aggregate::Last) => Some(values[values.len() - 1]),
                (false, Aggregate::Sum) => Some(sum),
                (false, Aggregate::Mean) => Some(sum / values.len() as f64),
                (false, Aggregate::Max) => Some(values.iter().copied().fold(f64::MIN, f64::max)),
                (false, Aggregate::Min) => Some(values.iter().copied().fold(f64::MAX, f64::min)),
            };
            for (i, &r) in held.iter().enumerate() {
                self.rewards[r].fate = if first && i > 0 { Fate::Duplicate } else { Fate::Used };
            }
            self.queries[q].fate = if values.is_empty() { Fate::Expired } else { Fate::Joined };
            self.queries[q].settled = first && !values.is_empty();
            self.remember(q, end, &held);
            let NaiveQuery { id, ts, size, .. } = &self.queries[q];
            out.extend(reward.map(|reward| Joined {
                request_id: id.clone(),
                ts_ms: *ts,
                payload: Size(*size),
                reward,
                defaulted: values.is_empty(),
            }));
        }

        fn remember(&mut self, q: usize, end: i128, held: &[usize]) {
            let until = (end + i128::from(self.spec.remember_ms)).max(self.deadline(q));
            // The joiner forgets in order of times that it can express.
            self.queries[q].until = Some(until.min(i128::from(i64::MAX)));
            held.iter().for_each(|&r| self.rewards[r].of = Some(q));
        }

        fn keep_bounds(&mut self) {
            while self.load().requests > self.spec.pending_max || self.load().bytes > self.spec.pending_bytes_max {
                let id = self.waiting().into_iter().min_by_key(|id| (self.age(id), id.clone())).unwrap();
                let held = self.held(&id);
                held.iter().for_each(|&r| self.rewards[r].fate = Fate::Evicted);
                if let Some(q) = self.open(&id) {
                    self.queries[q].fate = Fate::Evicted;
                    self.remember(q, i128::from(self.time.unwrap()), &held);
                }
            }
            while self.load().remembered > self.spec.remembered_max {
                let remembered = self.queries.iter_mut().filter(|query| query.until.is_some());
                remembered.min_by_key(|query| (query.until, query.id.clone())).unwrap().until = None;
            }
        }

        fn load(&self) -> Load {
            let waiting = self.waiting();
            let bytes = |id: &String| {
                let rewards = match self.held(id).len() {
                    0 => 0,
                    n => FIRST_REWARD_BYTES + (n - 1) * REWARD_BYTES,
                };
                REQUEST_BYTES + id.len() + self.open(id).map_or(0, |q| self.queries[q].size) + rewards
            };
            let remembers = |q: usize| self.queries[q].until.is_some();
            let seen = |reward: &&NaiveReward| reward.of.is_some_and(|q| remembers(q) && !self.queries[q].settled);
            Load {
                requests: waiting.len(),
                bytes: waiting.iter().map(bytes).sum(),
                remembered: (0..self.queries.len()).filter(|&q| remembers(q)).count()
                    + self.rewards.iter().filter(seen).count(),
            }
        }

        fn counts(&self) -> JoinCounts {
            let queries = |fate| self.queries.iter().filter(|query| query.fate == fate).count() as u64;
            let rewards = |fate| self.rewards.iter().filter(|reward| reward.fate == fate).count() as u64;
            JoinCounts {
                queries: QueryCounts {
                    read: self.queries.len() as u64,
                    duplicate: queries(Fate::Duplicate),
                    late: queries(Fate::Late),
                    joined: queries(Fate::Joined),
                    expired: queries(Fate::Expired),
                    evicted: queries(Fate::Evicted),
                    pending: queries(Fate::Pending),
                },
                rewards: RewardCounts {
                    read: self.rewards.len() as u64,
                    used: rewards(Fate::Used),
                    duplicate: rewards(Fate::Duplicate),
                    late: rewards(Fate::Late),
                    orphaned: rewards(Fate::Orphaned),
                    evicted: rewards(Fate::Evicted),
                    pending: rewards(Fate::Pending),
                },
            }
        }

        /// Ids of requests that wait.
        fn waiting(&self) -> BTreeSet<String> {
            let queries = self.queries.iter().filter(|query| query.fate == Fate::Pending).map(|query| &query.id);
            let rewards = self.rewards.iter().filter(|reward| reward.fate == Fate::Pending).map(|reward| &reward.id);
            queries.chain(rewards).cloned().collect()
        }

        fn age(&self, id: &str) -> i64 {
            let oldest_reward = || self.held(id).into_iter().map(|r| self.rewards[r].ts).min().unwrap();
            self.open(id).map_or_else(oldest_reward, |q| self.queries[q].ts)
        }

        fn held(&self, id: &str) -> Vec<usize> {
            let is_held = |reward: &NaiveReward| reward.id == id && reward.fate == Fate::Pending;
            (0..self.rewards.len()).filter(|&r| is_held(&self.rewards[r])).collect()
        }

        fn open(&self, id: &str) -> Option<usize> {
            self.queries.iter().position(|query| query.id == id && query.fate == Fate::Pending)
        }

        fn remembered(&self, id: &str) -> Option<usize> {
            self.queries.iter().position(|query| query.id == id && query.until.is_some())
        }

        fn deadline(&self, q: usize) -> i128 {
            i128::from(self.queries[q].ts) + i128::from(self.spec.window_ms)
        }

        fn reach(&self, reward: &NaiveReward) -> i128 {
            i128::from(reward.ts) + i128::from(self.spec.early_ms)
        }
    }

    impl NaiveReward {
        fn is(&self, other: &Self) -> bool {
            let same = match (&self.event_id, &other.event_id) {
                (None, None) => self.ts == other.ts && self.reward == other.reward,
                (a, b) => a == b,
            };
            self.id == other.id && same
        }
    }
}
