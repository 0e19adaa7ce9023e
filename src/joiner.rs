//! The join of query events with reward events, for one space, in event time.
//!
//! A space's time T is an [`EventTime`]: the 8th largest `ts_ms` observed, so that a few wrong timestamps close no window.
//! The caller observes an event's timestamp first, which moves T and closes what T is past, and then passes the
//! event; so no clock and no arrival rate can change what is learned. With w = `window_ms`, e = `early_ms`:
//!
//! - a reward counts if ts_query - e <= ts_reward <= ts_query + w, both ends included;
//! - a query's window is past when T > ts_query + w, a waiting reward is past when T > ts_reward + e.
//!
//! The outcome of a query is the first that applies:
//!
//! | outcome | when |
//! |---|---|
//! | retired | its model was removed, before it came or while it was open; it leaves no trace |
//! | duplicate | its request has an open query, or is finished and remembered |
//! | late | its window is past already, or it is older than the horizon; it leaves no trace |
//! | joined | under `first` as soon as it has a reward, else when its window closes with at least one |
//! | expired | its window closed without a reward: dropped, or learned as the default |
//! | evicted | it was the oldest when the bounds were exceeded; never learned, not even as the default |
//! | pending | none of these yet |
//!
//! The outcome of a reward is the first that applies:
//!
//! | outcome | when |
//! |---|---|
//! | duplicate | under `first` its request has joined; else its identity is known in its request |
//! | orphaned | no query within reach: it is older than ts_query - e, none came until it was past, or it was retired |
//! | late | its request is finished, however that came about, or it is newer than ts_query + w |
//! | used | it went into an example, alone or aggregated |
//! | evicted | it was held for a request that was evicted |
//! | pending | none of these yet |
//!
//! Two counts are parts of these: *further* are the duplicates that repeat no reward of their request, so that `first`
//! ignores them; *clipped* are the used rewards, each after aggregation, that the caller found outside of the range.
//!
//! A reward event may say more than a reward ([`Feedback`]), or something else. What says how good the decision was counts as a
//! reward here. One that carries outcomes alone waits for more: it goes into the example with the others, or is handed on
//! without an example when the window closes.
//!
//! A reward's identity is its `event_id`, or without one its (`ts_ms`, feedback). A request is finished when its query
//! has joined, expired or been evicted. It is then remembered, with the identities of its rewards, until T is past both
//! its end + `remember_ms` and its window, so that a query that is sent again is never learned again, however short
//! `remember_ms`. Only the bound on remembered requests can break that.
//!
//! A restart may change the rule. A longer window must not reopen what the shorter one closed: requests that were forgotten
//! have ts_query < T - w. So [`Joiner::set_spec`] raises the *horizon* to that time before it lengthens w, and remembers the
//! finished requests it still holds until the longer window is past. The horizon never falls.
//!
//! A joiner is saved as a [`JoinRecord`] and one [`RequestRecord`] per request. So that a save costs what the traffic since
//! the last one costs, not what the window holds, a joiner can track which requests changed and hand out only these.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::AddAssign;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::event_time::{CONFIRMATIONS, EventTime};
use crate::feedback::Feedback;
use crate::wire::envelope;
use crate::wire::records::counts::{COUNT_MAX, JoinCountsRecord, QueryCountsRecord, RewardCountsRecord};
use crate::wire::records::request::{FinishedRecord, PendingRecord, QueryRecord, RequestRecord, RewardRecord};
use crate::wire::records::space::{AggregateRecord, JoinRecord, JoinSpecRecord, OnMissingRecord};

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
    /// All feedback together, the reward aggregated; finite if all its parts are, but neither mapped nor clipped. Without an
    /// answer if only outcomes came and the query is dropped.
    pub feedback: Feedback,
    /// Whether no answer came, and the reward is the default.
    pub defaulted: bool,
    /// Event time of its first reward, if one came.
    pub rewarded_ms: Option<i64>,
}

/// Outcomes of queries and rewards. They are disjoint, and each side sums to the events read. Reports print them as JSON.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct JoinCounts {
    /// The queries.
    pub queries: QueryCounts,
    /// The rewards.
    pub rewards: RewardCounts,
}

/// Outcomes of queries; see the table of the module.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct QueryCounts {
    /// All that came: the sum of the others.
    pub read: u64,
    /// Of a model that was removed.
    pub retired: u64,
    /// Of a request whose query is known.
    pub duplicate: u64,
    /// Came after their own window.
    pub late: u64,
    /// Became examples with a reward.
    pub joined: u64,
    /// Got no reward.
    pub expired: u64,
    /// Evicted because of the limits.
    pub evicted: u64,
    /// Have an open window.
    pub pending: u64,
}

/// Outcomes of rewards; see the table of the module.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
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
    /// Evicted because of the limits.
    pub evicted: u64,
    /// Are held for an open window, or wait for their query.
    pub pending: u64,
    /// Part of `duplicate`: come second under `first`, and repeat no other.
    pub further: u64,
    /// Part of `used`: were clipped, each after aggregation.
    pub clipped: u64,
}

impl AddAssign for JoinCounts {
    fn add_assign(&mut self, other: Self) {
        let (q, r) = (&mut self.queries, &mut self.rewards);
        q.read += other.queries.read;
        q.retired += other.queries.retired;
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
        r.further += other.rewards.further;
        r.clipped += other.rewards.clipped;
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

/// Why a saved joiner cannot be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the saved join is inconsistent: roll back to an older snapshot, or rebuild the store by replay")]
pub struct BadJoin;

/// The join of one space.
#[derive(Debug, Clone)]
pub struct Joiner<P> {
    spec: JoinSpec,
    clock: EventTime,
    /// Queries older than this are late, whatever the window.
    horizon_ms: Option<i64>,
    counts: JoinCounts,
    pool: Pool<P>,
    memory: Memory,
}

impl<P: Payload> Joiner<P> {
    /// An empty joiner.
    pub fn new(spec: JoinSpec) -> Self {
        Self::with_clock(spec, EventTime::new(CONFIRMATIONS))
    }

    fn with_clock(spec: JoinSpec, clock: EventTime) -> Self {
        let (pool, memory) = (Pool::new(), Memory::default());
        Self { spec, clock, horizon_ms: None, counts: JoinCounts::default(), pool, memory }
    }

    /// The joiner that was saved, from its own record and the last record of every request, in any order.
    ///
    /// It tracks changes from here on, and has none yet: what it holds is saved already.
    pub fn restore(
        record: JoinRecord,
        requests: impl IntoIterator<Item = (String, RequestRecord<P>)>,
    ) -> Result<Self, BadJoin> {
        let JoinRecord { spec, clock, counts, remembered, horizon_ms } = record;
        let clock = EventTime::from_record(clock).ok_or(BadJoin)?;
        let counts = JoinCounts::from_record(counts).ok_or(BadJoin)?;
        let mut joiner = Self { horizon_ms, counts, ..Self::with_clock(JoinSpec::from(spec), clock) };
        for (request_id, record) in requests {
            joiner.put_back(&request_id, record)?;
        }
        let pending = joiner.pending() == (counts.queries.pending, counts.rewards.pending);
        if !pending || joiner.memory.entries as u64 != remembered {
            return Err(BadJoin);
        }
        joiner.pool.touched = Touched::nothing_yet();
        joiner.memory.touched = Touched::nothing_yet();
        Ok(joiner)
    }

    /// Counts a request as changed, so that the next changes include it.
    pub fn mark_changed(&mut self, request_id: &str) {
        if let Some((id, _)) = self.pool.requests.get_key_value(request_id) {
            self.pool.touched.add(id);
        } else if let Some((id, _)) = self.memory.finished.get_key_value(request_id) {
            self.memory.touched.add(id);
        }
    }

    /// Applies another rule from the next event on: for a restart with a changed configuration. What the old window has
    /// closed stays closed.
    pub fn set_spec(&mut self, spec: JoinSpec) {
        if spec.window_ms > self.spec.window_ms {
            let closed_ms = self.clock.time_ms().map(|time_ms| time_ms.saturating_sub_unsigned(self.spec.window_ms));
            self.horizon_ms = self.horizon_ms.max(closed_ms);
            self.memory.keep_for(spec.window_ms);
        }
        self.spec = spec;
    }

    /// The rule at present.
    pub fn spec(&self) -> &JoinSpec {
        &self.spec
    }

    /// Takes an event's timestamp into account, before the event itself, and closes what the space's time is past then;
    /// what is complete is appended to `out`, in the order of completion.
    pub fn observe(&mut self, ts_ms: i64, out: &mut Vec<Joined<P>>) {
        self.clock.observe(ts_ms);
        self.pass(out);
        (self.counts.queries.pending, self.counts.rewards.pending) = self.pending();
    }

    /// Takes back a timestamp that turned out to be wrong: it confirms no other any more.
    pub fn retract(&mut self, ts_ms: i64) {
        self.clock.retract(ts_ms);
    }

    /// Takes a query; what is complete by then is appended to `out`, in the order of completion.
    pub fn query(&mut self, request_id: &str, ts_ms: i64, payload: P, out: &mut Vec<Joined<P>>) {
        self.counts.queries.read += 1;
        if self.has_query(request_id) {
            self.counts.queries.duplicate += 1;
        } else if self.is_late(ts_ms) {
            self.counts.queries.late += 1;
        } else {
            self.accept(request_id, Asked { ts_ms, payload }, out);
        }
        self.keep_bounds();
    }

    /// Whether a query would open a window: it is neither a duplicate nor late.
    pub fn opens(&self, request_id: &str, ts_ms: i64) -> bool {
        !self.has_query(request_id) && !self.is_late(ts_ms)
    }

    fn is_late(&self, ts_ms: i64) -> bool {
        self.is_past(self.deadline(ts_ms)) || self.horizon_ms > Some(ts_ms)
    }

    /// Takes feedback, whose numbers are finite; what is complete by then is appended to `out`, in the order of completion.
    pub fn reward(
        &mut self,
        request_id: &str,
        ts_ms: i64,
        feedback: Feedback,
        event_id: Option<&str>,
        out: &mut Vec<Joined<P>>,
    ) {
        self.counts.rewards.read += 1;
        let identity = identity(ts_ms, &feedback, event_id);
        if self.memory.contains(request_id) {
            self.follow_up(request_id, ts_ms, identity);
        } else {
            // The number of rewards read so far is as good as a sequence number, and saved already.
            let held = Held { ts_ms, feedback, arrival: self.counts.rewards.read };
            self.hold(request_id, identity, held, out);
        }
        self.keep_bounds();
    }

    /// Counts a reward that was joined and had to be clipped.
    pub fn count_clipped(&mut self) {
        self.counts.rewards.clipped += 1;
    }

    /// Counts a query whose model was removed.
    pub fn retired(&mut self) {
        self.counts.queries.read += 1;
        self.counts.queries.retired += 1;
        self.keep_bounds();
    }

    /// Takes back an open query, as if it had never been read, and drops the rewards held for it; false if it is not open.
    pub fn withdraw_query(&mut self, request_id: &str, ts_ms: i64) -> bool {
        let request = self.pool.requests.get(request_id);
        let is_open = request.and_then(|request| request.query.as_ref()).is_some_and(|asked| asked.ts_ms == ts_ms);
        if is_open && let Some((_, request)) = self.pool.take(request_id) {
            self.counts.queries.read -= 1;
            self.counts.rewards.orphaned += request.rewards.len() as u64;
            self.keep_bounds();
        }
        is_open
    }

    /// Takes back a reward that waits for its query, as if it had never been read; false if it does not wait.
    pub fn withdraw_reward(
        &mut self,
        request_id: &str,
        ts_ms: i64,
        feedback: &Feedback,
        event_id: Option<&str>,
    ) -> bool {
        let waits = self.pool.drop_early(request_id, ts_ms, identity(ts_ms, feedback, event_id));
        if waits {
            self.counts.rewards.read -= 1;
            self.keep_bounds();
        }
        waits
    }

    /// Rewrites the payloads of all open queries, in the order of their ids: for a restart with other models. Where
    /// `remap` returns false the model is gone: the query is retired and its request forgotten, as if it never came.
    pub fn remap(&mut self, remap: impl FnMut(&mut P) -> bool) {
        for id in self.pool.remap(remap) {
            if let Some((_, request)) = self.pool.take(id.as_str()) {
                self.counts.queries.retired += 1;
                self.counts.rewards.orphaned += request.rewards.len() as u64;
            }
        }
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

    /// Outcomes of all events.
    pub fn counts(&self) -> &JoinCounts {
        &self.counts
    }

    /// How much is held at present.
    pub fn load(&self) -> Load {
        Load { requests: self.pool.requests.len(), bytes: self.pool.bytes, remembered: self.memory.entries }
    }

    /// The space's time.
    pub fn time_ms(&self) -> Option<i64> {
        self.clock.time_ms()
    }

    /// What to save besides the requests; it fits their records as of the same moment.
    pub fn to_record(&self) -> JoinRecord {
        JoinRecord {
            spec: JoinSpecRecord::from(&self.spec),
            clock: self.clock.to_record(),
            counts: self.counts.to_record(),
            remembered: self.memory.entries as u64,
            horizon_ms: self.horizon_ms,
        }
    }

    /// Records of all requests: those that wait, then those that are remembered, each in ID order.
    pub fn requests(&self) -> impl Iterator<Item = (&str, RequestRecord<&P>)> {
        let waiting = self.pool.requests.iter().map(|(id, request)| (id.as_str(), request.to_record()));
        let finished = self.memory.finished.iter().map(|(id, finished)| (id.as_str(), finished.to_record()));
        waiting.chain(finished)
    }

    /// What the queries carry that wait.
    pub fn waiting(&self) -> impl Iterator<Item = &P> {
        self.pool.requests.values().filter_map(|request| request.query.as_ref()).map(|asked| &asked.payload)
    }

    /// Tracks from now on which requests change; all that are held count as changed. Nothing new if it tracks already.
    ///
    /// Off in a new joiner, since what is tracked grows with the traffic until it is taken.
    pub fn track_changes(&mut self) {
        self.pool.touched.start(self.pool.requests.keys());
        self.memory.touched.start(self.memory.finished.keys());
    }

    /// Returns every request that changed since the last call, in ID order: its current record, or none if it is no longer
    /// held. It may never have been returned before.
    pub fn take_changes(&mut self, mut each: impl FnMut(&str, Option<RequestRecord<&P>>)) {
        let mut touched = self.pool.touched.take();
        touched.append(&mut self.memory.touched.take());
        for id in touched {
            each(id.as_str(), self.record(id.as_str()));
        }
    }

    fn record(&self, request_id: &str) -> Option<RequestRecord<&P>> {
        let waiting = || self.pool.requests.get(request_id).map(|request| request.to_record());
        let finished = || self.memory.finished.get(request_id).map(Finished::to_record);
        waiting().or_else(finished)
    }

    /// Takes in a saved request; refuses one that is there already, waiting or finished, and one without content.
    fn put_back(&mut self, request_id: &str, record: RequestRecord<P>) -> Result<(), BadJoin> {
        if self.pool.requests.contains_key(request_id) || self.memory.contains(request_id) {
            return Err(BadJoin);
        }
        let id = Id::from(request_id);
        match record {
            RequestRecord::Pending(record) => self.pool.put(id, Waiting::from_record(record).ok_or(BadJoin)?),
            RequestRecord::Finished(record) => self.memory.put(id, Finished::from_record(record).ok_or(BadJoin)?),
        }
        Ok(())
    }

    /// Queries and rewards that wait.
    fn pending(&self) -> (u64, u64) {
        (self.pool.open.len() as u64, self.pool.rewards)
    }

    /// Closes, in the order of (deadline, request id), what time is past.
    fn pass(&mut self, out: &mut Vec<Joined<P>>) {
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
        let (id, mut rewards) = match self.pool.take(request_id) {
            Some((id, request)) => (id, request.rewards),
            None => (Id::from(request_id), Rewards::new()),
        };
        rewards.retain(|_, held| self.fits(asked.ts_ms, held.ts_ms));
        let complete = self.is_first() && rewards.values().any(|held| held.feedback.is_answer());
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
        let fits = match asked_ms {
            Some(asked_ms) => self.fits(asked_ms, held.ts_ms),
            // Without a query it is judged as if it had come in time and waited since.
            None if self.is_past(later(held.ts_ms, self.spec.early_ms)) => {
                self.counts.rewards.orphaned += 1;
                false
            }
            None => true,
        };
        if !fits {
            return;
        }
        let is_answer = held.feedback.is_answer();
        let id = self.pool.add_reward(request_id, identity, held);
        if asked_ms.is_some() && self.is_first() && is_answer {
            self.finish_now(&id, out);
        }
    }

    /// Whether a reward is within reach of its query, by their timestamps; counts it if it is not.
    fn fits(&mut self, asked_ms: i64, rewarded_ms: i64) -> bool {
        if later(rewarded_ms, self.spec.early_ms) < asked_ms {
            self.counts.rewards.orphaned += 1;
            return false;
        }
        let late = rewarded_ms > self.deadline(asked_ms);
        self.counts.rewards.late += u64::from(late);
        !late
    }

    /// Judges a reward whose request is finished.
    fn follow_up(&mut self, request_id: &str, ts_ms: i64, identity: u64) {
        let Some(finished) = self.memory.finished.get(request_id) else { return };
        if finished.has_seen(identity) {
            self.counts.rewards.duplicate += 1;
        } else if finished.settled != Settled::No {
            self.counts.rewards.duplicate += 1;
            self.counts.rewards.further += 1;
            self.memory.note_reward(request_id, identity);
        } else if later(ts_ms, self.spec.early_ms) < finished.ts_ms {
            self.counts.rewards.orphaned += 1;
        } else {
            self.counts.rewards.late += 1;
            self.memory.note_reward(request_id, identity);
        }
    }

    /// Ends an open query that has its reward: at the later of the two, whatever the space's time is.
    fn finish_now(&mut self, id: &Id, out: &mut Vec<Joined<P>>) {
        let Some(request) = self.pool.requests.get(id) else { return };
        let asked_ms = request.query.as_ref().map(|asked| asked.ts_ms);
        if let Some(end_ms) = request.rewards.values().map(|held| held.ts_ms).chain(asked_ms).max() {
            self.finish(id, end_ms, out);
        }
    }

    /// Ends an open query: joined with the rewards it has, else expired.
    fn finish(&mut self, id: &Id, end_ms: i64, out: &mut Vec<Joined<P>>) {
        let Some((id, Waiting { query: Some(asked), rewards })) = self.pool.take(id.as_str()) else { return };
        let Asked { ts_ms, payload } = asked;
        let answers = rewards.values().filter(|held| held.feedback.is_answer()).count() as u64;
        let defaulted = answers == 0;
        let feedback = if defaulted { self.expire(&rewards) } else { self.join(&rewards, answers) };
        if feedback.is_answer() || feedback.more.is_some() {
            let answered = rewards.values().filter(|held| held.feedback.is_answer());
            let (request_id, rewarded_ms) = (id.as_str().to_owned(), answered.map(|held| held.ts_ms).min());
            out.push(Joined { request_id, ts_ms, payload, feedback, defaulted, rewarded_ms });
        }
        let settled = if self.is_first() { Settled::by(&rewards) } else { Settled::No };
        self.remember(id, ts_ms, end_ms, settled, &rewards);
    }

    /// Counts a query without an answer, and the outcomes that came; returns what is learned nevertheless.
    fn expire(&mut self, outcomes: &Rewards) -> Feedback {
        self.counts.queries.expired += 1;
        self.counts.rewards.used += outcomes.len() as u64;
        let reward = match self.spec.on_missing {
            OnMissing::Drop => None,
            OnMissing::Default(reward) => Some(reward),
        };
        Feedback { reward, ..self.spec.aggregate.of(outcomes) }
    }

    /// Counts a query and its rewards, of which so many are answers; returns the aggregate.
    fn join(&mut self, rewards: &Rewards, answers: u64) -> Feedback {
        let number = rewards.len() as u64;
        let unused = if self.is_first() { answers - 1 } else { 0 };
        self.counts.queries.joined += 1;
        self.counts.rewards.used += number - unused;
        self.counts.rewards.duplicate += unused;
        self.counts.rewards.further += unused;
        self.spec.aggregate.of(rewards)
    }

    fn remember(&mut self, id: Id, ts_ms: i64, end_ms: i64, settled: Settled, rewards: &Rewards) {
        let until_ms = later(end_ms, self.spec.remember_ms).max(self.deadline(ts_ms));
        let seen = rewards.keys().copied().filter(|identity| settled != Settled::By(*identity)).collect();
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
        (self.counts.queries.pending, self.counts.rewards.pending) = self.pending();
    }

    fn evict(&mut self, id: Id, request: Waiting<P>) {
        self.counts.rewards.evicted += request.rewards.len() as u64;
        // A request of which only rewards were seen is not finished: its query may come yet.
        if let Some(asked) = request.query {
            self.counts.queries.evicted += 1;
            self.remember(id, asked.ts_ms, self.deadline(asked.ts_ms), Settled::No, &request.rewards);
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
        self.clock.time_ms() > Some(last_ms)
    }
}

impl JoinCounts {
    /// Whether the outcomes sum up to what was read, on both sides, and the parts do not exceed them.
    pub fn balance(&self) -> bool {
        let (q, r) = (&self.queries, &self.rewards);
        let queries = [q.retired, q.duplicate, q.late, q.joined, q.expired, q.evicted, q.pending];
        let rewards = [r.used, r.duplicate, r.late, r.orphaned, r.evicted, r.pending];
        // Wider than a count: damaged ones must not overflow.
        let sum = |outcomes: &[u64]| outcomes.iter().copied().map(u128::from).sum::<u128>();
        let parts = r.further <= r.duplicate && r.clipped <= r.used;
        sum(&queries) == u128::from(q.read) && sum(&rewards) == u128::from(r.read) && parts
    }

    /// As they are saved.
    pub fn to_record(&self) -> JoinCountsRecord {
        let QueryCounts { read, retired, duplicate, late, joined, expired, evicted, pending } = self.queries;
        let queries = QueryCountsRecord { read, retired, duplicate, late, joined, expired, evicted, pending };
        let RewardCounts { read, used, duplicate, late, orphaned, evicted, pending, further, clipped } = self.rewards;
        let rewards = RewardCountsRecord { read, used, duplicate, late, orphaned, evicted, pending, further, clipped };
        JoinCountsRecord { queries, rewards }
    }

    /// As they were saved; `None` if they do not balance or no log can have so many events.
    pub fn from_record(record: JoinCountsRecord) -> Option<Self> {
        let QueryCountsRecord { read, retired, duplicate, late, joined, expired, evicted, pending } = record.queries;
        let queries = QueryCounts { read, retired, duplicate, late, joined, expired, evicted, pending };
        let RewardCountsRecord { read, used, duplicate, late, orphaned, evicted, pending, further, clipped } =
            record.rewards;
        let rewards = RewardCounts { read, used, duplicate, late, orphaned, evicted, pending, further, clipped };
        let counts = Self { queries, rewards };
        (counts.balance() && queries.read.max(rewards.read) <= COUNT_MAX).then_some(counts)
    }
}

impl From<&JoinSpec> for JoinSpecRecord {
    fn from(spec: &JoinSpec) -> Self {
        let JoinSpec { window_ms, early_ms, remember_ms, on_missing, aggregate, .. } = *spec;
        let JoinSpec { pending_max, pending_bytes_max, remembered_max, .. } = *spec;
        Self {
            window_ms,
            early_ms,
            remember_ms,
            on_missing: match on_missing {
                OnMissing::Drop => OnMissingRecord::Drop,
                OnMissing::Default(reward) => OnMissingRecord::Default(reward),
            },
            aggregate: match aggregate {
                Aggregate::First => AggregateRecord::First,
                Aggregate::Last => AggregateRecord::Last,
                Aggregate::Sum => AggregateRecord::Sum,
                Aggregate::Mean => AggregateRecord::Mean,
                Aggregate::Max => AggregateRecord::Max,
                Aggregate::Min => AggregateRecord::Min,
            },
            pending_max: pending_max as u64,
            pending_bytes_max: pending_bytes_max as u64,
            remembered_max: remembered_max as u64,
        }
    }
}

impl From<JoinSpecRecord> for JoinSpec {
    fn from(record: JoinSpecRecord) -> Self {
        let JoinSpecRecord { window_ms, early_ms, remember_ms, on_missing, aggregate, .. } = record;
        let JoinSpecRecord { pending_max, pending_bytes_max, remembered_max, .. } = record;
        // A limit beyond the address space limits nothing.
        let limit = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        Self {
            window_ms,
            early_ms,
            remember_ms,
            on_missing: match on_missing {
                OnMissingRecord::Drop => OnMissing::Drop,
                OnMissingRecord::Default(reward) => OnMissing::Default(reward),
            },
            aggregate: match aggregate {
                AggregateRecord::First => Aggregate::First,
                AggregateRecord::Last => Aggregate::Last,
                AggregateRecord::Sum => Aggregate::Sum,
                AggregateRecord::Mean => Aggregate::Mean,
                AggregateRecord::Max => Aggregate::Max,
                AggregateRecord::Min => Aggregate::Min,
            },
            pending_max: limit(pending_max),
            pending_bytes_max: limit(pending_bytes_max),
            remembered_max: limit(remembered_max),
        }
    }
}

/// A request's id, shared between a map and its index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Id(Arc<str>);

/// A request that is not finished: an open query, or at least one early reward.
#[derive(Debug, Clone)]
struct Waiting<P> {
    query: Option<Asked<P>>,
    rewards: Rewards,
}

/// A query whose window is open.
#[derive(Debug, Clone)]
struct Asked<P> {
    ts_ms: i64,
    payload: P,
}

/// Rewards of a request, by identity.
type Rewards = BTreeMap<u64, Held>;

#[derive(Debug, Clone)]
struct Held {
    ts_ms: i64,
    feedback: Feedback,
    arrival: u64,
}

/// What is remembered of a finished request.
#[derive(Debug, Clone)]
struct Finished {
    /// Event time of the query.
    ts_ms: i64,
    until_ms: i64,
    settled: Settled,
    /// Identities of its rewards, but for the one in `settled`.
    seen: BTreeSet<u64>,
}

/// Whether all further rewards of a finished request are duplicates, whatever their identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Settled {
    No,
    /// By the reward of this identity.
    By(u64),
    /// By a reward whose identity was not saved: any further one may repeat it.
    Unknown,
}

impl Settled {
    /// By the first of these rewards, if there is one.
    fn by(rewards: &Rewards) -> Self {
        let answers = rewards.iter().filter(|(_, held)| held.feedback.is_answer());
        let first = answers.min_by_key(|(_, held)| (held.ts_ms, held.arrival));
        first.map_or(Self::No, |(identity, _)| Self::By(*identity))
    }
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
    touched: Touched,
}

/// The requests that are remembered, with what is needed to forget the right one. Only the requests are saved.
#[derive(Debug, Clone, Default)]
struct Memory {
    finished: BTreeMap<Id, Finished>,
    /// Requests by when they are forgotten.
    ends: BTreeSet<(i64, Id)>,
    /// Requests and identities of rewards.
    entries: usize,
    touched: Touched,
}

/// The requests that were put, changed or taken away since these were last taken; none if nobody asks for them.
#[derive(Debug, Clone, Default)]
struct Touched(Option<BTreeSet<Id>>);

// What a request costs besides its id and its payload, as measured with half-filled tree nodes and what an allocator
// adds, rounded up. Constants, so that every machine evicts the same.
const REQUEST_BYTES: usize = 256;
const FIRST_REWARD_BYTES: usize = 400;
const REWARD_BYTES: usize = 128;

impl<P: Payload> Pool<P> {
    fn new() -> Self {
        Self {
            requests: BTreeMap::new(),
            open: BTreeSet::new(),
            early: BTreeSet::new(),
            rewards: 0,
            bytes: 0,
            touched: Touched::default(),
        }
    }

    fn put(&mut self, id: Id, request: Waiting<P>) {
        self.touched.add(&id);
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
        self.touched.add(&id);
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
        self.touched.add(&id);
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
        let Some((ts_ms, id, identity)) = self.early.first().cloned() else { return false };
        self.drop_early(id.as_str(), ts_ms, identity)
    }

    /// Drops a reward that has no query, and its request with the last; false if there is no such reward.
    fn drop_early(&mut self, request_id: &str, ts_ms: i64, identity: u64) -> bool {
        let id = Id::from(request_id);
        if !self.early.remove(&(ts_ms, id.clone(), identity)) {
            return false;
        }
        self.touched.add(&id);
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

    /// Rewrites the payloads in place; returns the requests for which `remap` returned false, still in the pool.
    fn remap(&mut self, mut remap: impl FnMut(&mut P) -> bool) -> Vec<Id> {
        let mut gone = Vec::new();
        for (id, request) in &mut self.requests {
            self.bytes -= request.bytes(id);
            if let Some(asked) = &mut request.query {
                self.touched.add(id);
                if !remap(&mut asked.payload) {
                    gone.push(id.clone());
                }
            }
            self.bytes += request.bytes(id);
        }
        gone
    }
}

impl<P: Payload> Waiting<P> {
    fn bytes(&self, id: &Id) -> usize {
        let payload = self.query.as_ref().map_or(0, |asked| asked.payload.bytes());
        let rewards = match self.rewards.len() {
            0 => 0,
            number => FIRST_REWARD_BYTES + (number - 1) * REWARD_BYTES,
        };
        let more: usize = self.rewards.values().map(|held| held.feedback.bytes()).sum();
        REQUEST_BYTES + id.as_str().len() + payload + rewards + more
    }

    fn to_record(&self) -> RequestRecord<&P> {
        let query = self.query.as_ref().map(|asked| QueryRecord { ts_ms: asked.ts_ms, decision: &asked.payload });
        let reward = |(&identity, held): (&u64, &Held)| {
            let Held { ts_ms, feedback: Feedback { reward, more }, arrival } = held.clone();
            RewardRecord { identity, ts_ms, reward, more, arrival }
        };
        RequestRecord::Pending(PendingRecord { query, rewards: self.rewards.iter().map(reward).collect() })
    }

    /// As it was saved; `None` if it has no content, or its rewards are not in order or not finite.
    fn from_record(record: PendingRecord<P>) -> Option<Self> {
        let PendingRecord { query, rewards } = record;
        let in_order = rewards.is_sorted_by(|a, b| a.identity < b.identity);
        if !in_order || query.is_none() && rewards.is_empty() {
            return None;
        }
        let query = query.map(|QueryRecord { ts_ms, decision }| Asked { ts_ms, payload: decision });
        let held = |RewardRecord { identity, ts_ms, reward, more, arrival }| {
            let feedback = Feedback { reward, more };
            feedback.is_finite().then_some((identity, Held { ts_ms, feedback, arrival }))
        };
        Some(Self { query, rewards: rewards.into_iter().map(held).collect::<Option<_>>()? })
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
        self.touched.add(&id);
        self.entries += finished.entries();
        self.ends.insert((finished.until_ms, id.clone()));
        self.finished.insert(id, finished);
    }

    fn note_reward(&mut self, request_id: &str, identity: u64) {
        let Some((id, _)) = self.finished.get_key_value(request_id) else { return };
        let id = id.clone();
        if let Some(finished) = self.finished.get_mut(&id)
            && finished.seen.insert(identity)
        {
            self.entries += 1;
            self.touched.add(&id);
        }
    }

    /// Remembers every request at least until a window of this length is past.
    fn keep_for(&mut self, window_ms: u64) {
        for (id, finished) in &mut self.finished {
            let until_ms = later(finished.ts_ms, window_ms);
            if until_ms > finished.until_ms {
                self.ends.remove(&(finished.until_ms, id.clone()));
                self.ends.insert((until_ms, id.clone()));
                finished.until_ms = until_ms;
                self.touched.add(id);
            }
        }
    }

    fn forget_first(&mut self) {
        if let Some((_, id)) = self.ends.pop_first()
            && let Some(finished) = self.finished.remove(&id)
        {
            self.entries -= finished.entries();
            self.touched.add(&id);
        }
    }
}

impl Touched {
    fn nothing_yet() -> Self {
        Self(Some(BTreeSet::new()))
    }

    fn start<'a>(&mut self, held: impl Iterator<Item = &'a Id>) {
        self.0.get_or_insert_with(|| held.cloned().collect());
    }

    fn add(&mut self, id: &Id) {
        if let Some(ids) = &mut self.0 {
            ids.insert(id.clone());
        }
    }

    fn take(&mut self) -> BTreeSet<Id> {
        self.0.as_mut().map(mem::take).unwrap_or_default()
    }
}

impl Finished {
    fn entries(&self) -> usize {
        1 + self.seen.len()
    }

    /// Whether a reward repeats another, as far as that is known.
    fn has_seen(&self, identity: u64) -> bool {
        self.settled == Settled::Unknown || self.settled == Settled::By(identity) || self.seen.contains(&identity)
    }

    fn to_record<D>(&self) -> RequestRecord<D> {
        let Self { ts_ms, until_ms, settled, ref seen } = *self;
        let (settled, used) = match settled {
            Settled::No => (false, None),
            Settled::By(identity) => (true, Some(identity)),
            Settled::Unknown => (true, None),
        };
        let seen = seen.iter().copied().collect();
        RequestRecord::Finished(FinishedRecord { ts_ms, until_ms, settled, used, seen })
    }

    /// As it was saved; `None` if its identities are not in order, or it was learned without being settled.
    fn from_record(record: FinishedRecord) -> Option<Self> {
        let FinishedRecord { ts_ms, until_ms, settled, used, seen } = record;
        let settled = match (settled, used) {
            (false, None) => Settled::No,
            (true, None) => Settled::Unknown,
            (true, Some(identity)) if !seen.contains(&identity) => Settled::By(identity),
            _ => return None,
        };
        let in_order = seen.is_sorted_by(|a, b| a < b);
        in_order.then(|| Self { ts_ms, until_ms, settled, seen: seen.into_iter().collect() })
    }
}

impl Aggregate {
    /// All feedback of a request together. Under `first` only the first answer counts, with all outcomes.
    fn of(self, rewards: &Rewards) -> Feedback {
        let mut held: Vec<&Held> = rewards.values().collect();
        held.sort_unstable_by_key(|held| (held.ts_ms, held.arrival));
        if self == Self::First {
            let mut is_answered = false;
            held.retain(|held| !held.feedback.is_answer() || !std::mem::replace(&mut is_answered, true));
        }
        let mut all = Feedback::default();
        held.iter().for_each(|held| all.extend(&held.feedback));
        let known = || held.iter().filter_map(|held| held.feedback.reward);
        let sum = || (known().count() > 0).then(|| finite(known().sum()));
        all.reward = match self {
            Self::First => known().next(),
            Self::Last => known().next_back(),
            Self::Sum => sum(),
            Self::Mean => sum().map(|sum| sum / known().count() as f64),
            Self::Max => known().reduce(f64::max),
            Self::Min => known().reduce(f64::min),
        };
        all
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

/// What makes a reward the same reward within its request: a hash, so that it costs the same whatever the event id.
fn identity(ts_ms: i64, feedback: &Feedback, event_id: Option<&str>) -> u64 {
    if let Some(event_id) = event_id {
        return xxh3_64_with_seed(event_id.as_bytes(), 1);
    }
    // Adding zero makes -0 the same reward as 0.
    let bits = (feedback.reward.unwrap_or_default() + 0.0).to_bits();
    let numbers = [ts_ms.to_le_bytes(), bits.to_le_bytes()];
    match &feedback.more {
        None => xxh3_64_with_seed(numbers.as_flattened(), 0),
        Some(more) => xxh3_64_with_seed(&[numbers.as_flattened(), &envelope::encode(more)].concat(), 2),
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
    use crate::wire::records::request::SavedDecision;
    use proptest::bool::weighted;
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
             t 10      -> query retired
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
             r a 2 0.7  -> reward duplicate, reward further
             r a 11 0.7 -> reward duplicate, reward further
             r a -9 0.7 -> reward duplicate, reward further
             r a 1 0.5  -> reward duplicate
             r a 11 0.7 -> reward duplicate
             r a 1 0.6  -> reward duplicate, reward further
             r b 21 0.1 -> reward pending
             r b 22 0.2 -> reward pending
             r b 20 0.3 -> reward pending
             q b 23     -> query joined, reward used, reward duplicate x2, reward further x2, b@23=0.3
             r b 20 0.3 -> reward duplicate
             r b 22 0.2 -> reward duplicate
             r b 23 0.2 -> reward duplicate, reward further
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
                     t 10         -> query retired
                     t 11         -> query retired, query joined, reward used x4, a@0=REWARD
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
            "t 100     -> query retired
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
             t 31    -> query retired, query expired
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
             r a 17 1 -> query expired, reward duplicate, reward further
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
             r a 10 1 -> reward duplicate, reward further
             q a 0    -> query duplicate
             t 11     -> query retired
             q a 0    -> query late",
        );
    }

    #[test]
    fn a_longer_window_reopens_nothing() {
        let run = |joiner: &mut Joiner<Size>, events: &str| -> Vec<String> {
            let joined = events.split(", ").flat_map(|event| Event::parse(event).feed(joiner));
            joined.map(|joined| format!("{}@{}", joined.request_id, joined.ts_ms)).collect()
        };
        let short = JoinSpec { remember_ms: 0, ..WIDE };
        let long = JoinSpec { window_ms: 100, ..short.clone() };
        let mut joiner = exact(short.clone());
        assert_eq!(run(&mut joiner, "q a 0, r a 0 1, q b 15, r b 15 1, t 20"), ["a@0", "b@15"]);
        assert_eq!((joiner.load().remembered, joiner.horizon_ms), (1, None), "a is forgotten, b is not");
        joiner.track_changes();
        changes(&mut joiner);
        joiner.set_spec(long.clone());
        assert_eq!((joiner.horizon_ms, changes(&mut joiner).as_str()), (Some(10), "b finished"));
        // The window of a has closed; that of c would still be open; b is remembered for the longer window.
        assert_eq!(run(&mut joiner, "q a 0, q c 9, q d 10, r d 10 1, t 50, q b 15"), ["d@10"]);
        let queries = joiner.counts().queries;
        assert_eq!((queries.late, queries.duplicate), (2, 1));
        joiner.set_spec(short);
        assert_eq!(joiner.horizon_ms, Some(10), "a shorter window closes more than the horizon does");
        joiner.set_spec(long);
        assert_eq!(joiner.horizon_ms, Some(40));
    }

    #[test]
    fn the_horizon_stays_where_the_window_does() {
        let mut joiner = exact(WIDE);
        Event::parse("t 100").feed(&mut joiner);
        let record = joiner.to_record();
        joiner.set_spec(WIDE);
        assert_eq!(joiner.to_record(), record);
        joiner.set_spec(JoinSpec { early_ms: 50, remember_ms: 70, pending_max: 7, ..WIDE });
        joiner.set_spec(JoinSpec { window_ms: 9, ..WIDE });
        assert_eq!(joiner.horizon_ms, None);
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
             t 13     -> query retired, query expired x3
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
            let mut joiner = exact(with(aggregate));
            let mut out = Vec::new();
            joiner.query("a", 0, Size(0), &mut out);
            joiner.reward("a", 0, Feedback::reward(f64::MAX), None, &mut out);
            joiner.reward("a", 1, Feedback::reward(f64::MAX), None, &mut out);
            joiner.close_all(&mut out);
            assert_eq!(out[0].feedback, Feedback::reward(reward));
        }
    }

    #[test]
    fn a_pending_query_of_768_dimensions_stays_below_4_kib() {
        let mut joiner = exact(with(Aggregate::Sum));
        let id = "x".repeat(64);
        joiner.query(&id, 0, Size(3300), &mut Vec::new());
        joiner.reward(&id, 0, Feedback::reward(1.0), None, &mut Vec::new());
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
    fn a_query_of_a_retired_model_only_moves_time() {
        check(
            WIDE,
            "r a 0 1 -> reward pending
             q b 1   -> query pending
             t 5     -> query retired
             t 5     -> query retired
             t 2     -> query retired
             t 6     -> query retired, reward orphaned
             t 12    -> query retired, query expired",
        );
    }

    #[test]
    fn open_queries_of_a_model_that_goes_are_retired_and_forgotten() {
        check(
            JoinSpec { aggregate: Aggregate::Sum, ..WIDE },
            "q a 0 2  -> query pending
             r a 1 1  -> reward pending
             r a 2 1  -> reward pending
             q b 0 3  -> query pending
             r b 2 1  -> reward pending
             r c 2 1  -> reward pending
             remap 1  -> query retired, reward orphaned x2
             r a 2 1  -> reward pending
             q a 3 2  -> query pending
             remap 2  -> query retired, reward orphaned
             close    -> query joined, reward used, reward orphaned, a@3=1",
        );
    }

    #[test]
    fn payloads_that_grew_keep_the_bounds() {
        check(
            JoinSpec { pending_bytes_max: 2 * REQUEST_BYTES + 22, ..WIDE },
            "q a 0 10 -> query pending
             q b 1 10 -> query pending
             remap 0  ->
             remap 1  -> query evicted",
        );
    }

    #[test]
    fn only_what_changed_is_handed_out() {
        let run = |joiner: &mut Joiner<Size>, events: &str| {
            events.split(", ").for_each(|event| drop(Event::parse(event).feed(joiner)));
            changes(joiner)
        };
        let mut joiner = exact(with(Aggregate::Sum));
        assert_eq!(run(&mut joiner, "q z 0, r z 0 1"), "", "nobody asked for changes");
        joiner.track_changes();
        let cases = [
            ("q a 1, q b 0, r a 1 1", "a waiting, b waiting, z waiting"),
            ("q a 1, r a 1 1, t 2", ""),
            ("r c 5 1, r b 5 1", "b waiting, c waiting"),
            ("q d 11 2", "b finished, c gone, d waiting, z finished"),
            ("r z 11 1, r b 5 1, q e 11 1, remap 2", "a waiting, d waiting, e gone, z finished"),
        ];
        for (events, changed) in cases {
            assert_eq!(run(&mut joiner, events), changed, "{events}");
        }
    }

    #[test]
    fn a_joiner_that_contradicts_itself_is_refused() {
        let mut joiner = exact(with(Aggregate::Sum));
        for event in ["q f 0", "q a 20", "r a 21 1", "r b 21 1"] {
            Event::parse(event).feed(&mut joiner);
        }
        joiner.track_changes();
        let mut stored = Stored { joiner, records: BTreeMap::new() };
        stored.save();
        let (saved, head) = (stored.records.clone(), stored.joiner.to_record());
        let from = |id: &str| (id.to_owned(), RequestRecord::open(&saved[id]).unwrap());
        let all = || saved.keys().map(|id| from(id)).collect::<Records>();
        let refused = |damage: &dyn Fn(&mut JoinRecord, &mut Records)| {
            let (mut head, mut records) = (head.clone(), all());
            damage(&mut head, &mut records);
            assert_eq!(Joiner::restore(head, records).unwrap_err(), BadJoin);
        };
        assert!(Joiner::restore(head.clone(), all().into_iter().rev()).is_ok());
        for i in 0..3 {
            refused(&|_, records| drop(records.remove(i)));
            refused(&|_, records| records.push(("new".into(), records[i].1.clone())));
            refused(&|_, records| records.push(records[i].clone()));
            refused(&|_, records| records[i].1 = records[(i + 1) % 3].1.clone());
        }
        // Also where the sums agree: nothing is there twice, or waiting and finished at a time, or without content.
        refused(&|head, records| {
            head.remembered += 1;
            records.push(from("f"));
        });
        refused(&|head, records| {
            head.remembered += 1;
            records.push(("a".into(), from("f").1));
        });
        refused(&|_, records| {
            let nothing = PendingRecord { query: None, rewards: Vec::new() };
            records.push(("new".into(), RequestRecord::Pending(nothing)));
        });
        // Rewards are finite, and identities in order, so that a record has one encoding.
        let reward = RewardRecord { identity: 2, ts_ms: 21, reward: Some(1.0), more: None, arrival: 1 };
        let swap = |head: &mut JoinRecord, records: &mut Records, rewards: Vec<RewardRecord>| {
            records.retain(|(id, _)| id != "b");
            head.counts.rewards.read += rewards.len() as u64 - 1;
            head.counts.rewards.pending += rewards.len() as u64 - 1;
            records.push(("b".into(), RequestRecord::Pending(PendingRecord { query: None, rewards })));
        };
        let (mut sound_head, mut sound) = (head.clone(), all());
        swap(&mut sound_head, &mut sound, vec![RewardRecord { identity: 1, ..reward.clone() }, reward.clone()]);
        assert!(Joiner::restore(sound_head, sound).is_ok());
        refused(&|head, records| {
            swap(head, records, vec![reward.clone(), RewardRecord { identity: 1, ..reward.clone() }])
        });
        refused(&|head, records| swap(head, records, vec![reward.clone(), reward.clone()]));
        refused(&|head, records| swap(head, records, vec![RewardRecord { reward: Some(f64::NAN), ..reward.clone() }]));
        refused(&|head, records| {
            head.remembered += 2;
            records.retain(|(id, _)| id != "f");
            let f = FinishedRecord { ts_ms: 0, until_ms: 25, settled: false, used: None, seen: vec![2, 1] };
            records.push(("f".into(), RequestRecord::Finished(f)));
        });
        refused(&|head, _| {
            head.counts.queries.read += COUNT_MAX;
            head.counts.queries.late += COUNT_MAX;
        });
        refused(&|head, _| head.clock.newest.most = 0);
        refused(&|head, _| head.clock.time_ms = None);
        refused(&|head, _| head.counts.queries.read += 1);
        refused(&|head, _| head.counts.rewards.orphaned += 1);
        refused(&|head, _| {
            head.counts.queries.pending -= 1;
            head.counts.queries.joined += 1;
        });
        refused(&|head, _| head.remembered -= 1);
        refused(&|head, _| head.counts.rewards.further = head.counts.rewards.duplicate + 1);
        refused(&|head, _| head.counts.rewards.clipped = head.counts.rewards.used + 1);
        let settled = |settled, used| {
            RequestRecord::Finished(FinishedRecord { ts_ms: 0, until_ms: 25, settled, used, seen: vec![1] })
        };
        let (mut larger, mut records) = (head.clone(), all());
        larger.remembered += 1;
        records.retain(|(id, _)| id != "f");
        records.push(("f".into(), settled(true, Some(2))));
        assert!(Joiner::restore(larger, records).is_ok());
        for (is_settled, used) in [(false, Some(2)), (true, Some(1))] {
            refused(&|head, records| {
                head.remembered += 1;
                records.retain(|(id, _)| id != "f");
                records.push(("f".into(), settled(is_settled, used)));
            });
        }
    }

    #[test]
    fn a_request_that_was_settled_by_an_unknown_reward_counts_none_as_further() {
        let mut joiner = exact(WIDE);
        ["q a 0", "r a 1 1"].into_iter().for_each(|event| drop(Event::parse(event).feed(&mut joiner)));
        let finished = FinishedRecord { ts_ms: 0, until_ms: 16, settled: true, used: None, seen: Vec::new() };
        let records = vec![("a".to_owned(), RequestRecord::Finished(finished))];
        let mut restored: Joiner<Size> = Joiner::restore(joiner.to_record(), records).unwrap();
        for event in ["r a 1 1", "r a 2 1", "r a 2 1"] {
            Event::parse(event).feed(&mut restored);
        }
        let rewards = restored.counts().rewards;
        assert_eq!((rewards.used, rewards.duplicate, rewards.further), (1, 3, 0));
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
        fn goes_on_under_another_rule(
            (spec, next, events) in prop_oneof![
                (any_spec(), any_spec(), any_events()).boxed(),
                (extreme_spec(), extreme_spec(), extreme_events()).boxed(),
            ],
        ) {
            let (mut joiner, mut naive) = (exact(spec.clone()), Naive::new(spec));
            for (i, event) in events.iter().enumerate() {
                if i == events.len() / 2 {
                    joiner.set_spec(next.clone());
                    naive.set_spec(next.clone());
                }
                compare_step(&mut joiner, &mut naive, event)?;
            }
        }

        #[test]
        fn goes_on_from_what_was_saved_as_if_never_stopped(
            (spec, events, saves, tracked) in (any_spec(), any_events(), vec(weighted(0.15), 60), 0..60usize),
        ) {
            // The first was never stopped, each other was restored from the one before it, and all go on.
            let mut runs = vec![Stored { joiner: exact(spec), records: BTreeMap::new() }];
            for (i, event) in events.iter().enumerate() {
                let joined = runs[0].feed(event);
                for run in &mut runs[1..] {
                    prop_assert_eq!(run.feed(event), joined.clone());
                }
                if i == tracked {
                    runs[0].joiner.track_changes();
                }
                if i >= tracked && saves[i] {
                    runs.iter_mut().for_each(|run| drop(run.save()));
                    let restored = runs[runs.len() - 1].restored();
                    runs.push(restored);
                }
                for run in &runs[1..] {
                    prop_assert_eq!(run.joiner.load(), runs[0].joiner.load());
                    prop_assert_eq!(run.joiner.to_record(), runs[0].joiner.to_record());
                    prop_assert_eq!(records(&run.joiner), records(&runs[0].joiner));
                }
            }
        }

        /// Every request has one query, sent any number of times.
        #[test]
        fn whatever_the_rules_no_request_is_learned_twice(
            (first, asked, steps) in (
                unbounded_spec(),
                vec(0..80_i64, 1..8),
                vec((any::<prop::sample::Index>(), 0..12_u8, 0..12_i64, option::weighted(0.1, unbounded_spec())), 1..80),
            ),
        ) {
            let mut run = Stored { joiner: exact(first), records: BTreeMap::new() };
            run.joiner.track_changes();
            let (mut learned, mut now) = (BTreeSet::new(), 0);
            for (request, kind, by, restart) in steps {
                let request = request.index(asked.len());
                let (id, asked_ms) = (format!("r{request}"), asked[request]);
                let event = match kind {
                    0..5 => Event::Query { id, ts: asked_ms, size: 1 },
                    5..9 => Event::Reward { id, ts: asked_ms + by, reward: 1.0, event_id: None },
                    _ => {
                        now += by;
                        Event::Retired(now)
                    }
                };
                for joined in run.feed(&event) {
                    prop_assert!(learned.insert(joined.request_id.clone()), "{} was learned twice", joined.request_id);
                }
                if let Some(spec) = restart {
                    run.save();
                    run = run.restored();
                    run.joiner.set_spec(spec);
                }
            }
        }

        #[test]
        fn hands_out_no_more_than_what_changed(
            (spec, events, saves) in (any_spec(), any_events(), vec(weighted(0.3), 60)),
        ) {
            let mut run = Stored { joiner: exact(spec), records: BTreeMap::new() };
            run.joiner.track_changes();
            let mut touched = BTreeSet::new();
            for (event, save) in events.iter().zip(saves) {
                let before = records(&run.joiner);
                run.feed(event);
                let after = records(&run.joiner);
                let changed = |id: &&String| before.get(*id) != after.get(*id);
                touched.extend(before.keys().chain(after.keys()).filter(changed).cloned());
                match event {
                    // It may have come and gone at once.
                    Event::Query { id, .. } | Event::Reward { id, .. } => drop(touched.insert(id.clone())),
                    Event::Remap(_) => touched.extend(after.into_keys()),
                    Event::Retired(_) | Event::Close => {}
                }
                if save {
                    let taken = run.save();
                    prop_assert!(taken.is_sorted());
                    prop_assert!(taken.iter().all(|id| touched.remove(id)), "{taken:?} once each, of {touched:?}");
                    prop_assert_eq!(&run.records, &records(&run.joiner));
                    prop_assert!(run.save().is_empty());
                    touched.clear();
                }
            }
        }
    }

    const AGGREGATES: [Aggregate; 6] =
        [Aggregate::First, Aggregate::Last, Aggregate::Sum, Aggregate::Mean, Aggregate::Max, Aggregate::Min];

    fn with(aggregate: Aggregate) -> JoinSpec {
        JoinSpec { aggregate, ..WIDE }
    }

    /// A joiner whose time is the largest timestamp observed: the rules are easiest to see where every event moves time.
    fn exact(spec: JoinSpec) -> Joiner<Size> {
        Joiner::with_clock(spec, EventTime::new(1))
    }

    /// Runs the events left of the arrows and compares, right of them, the counts that grew and what was joined.
    #[track_caller]
    fn check(spec: JoinSpec, trace: &str) {
        let mut joiner = exact(spec);
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
            for Joined { request_id, ts_ms, feedback, defaulted, .. } in joined {
                let reward = feedback.reward.unwrap_or_default();
                parts.push(format!("{request_id}@{ts_ms}={reward}{}", if defaulted { "?" } else { "" }));
            }
            found.push(format!("{} -> {}", event.trim(), parts.join(", ")));
            expected.push(format!("{} -> {}", event.trim(), right.trim()));
            assert!(joiner.counts().balance());
        }
        assert_eq!(found, expected);
    }

    /// Every count but what was read, by name.
    fn outcomes(counts: &JoinCounts) -> [(&'static str, u64); 14] {
        let (q, r) = (&counts.queries, &counts.rewards);
        [
            ("query retired", q.retired),
            ("query duplicate", q.duplicate),
            ("query late", q.late),
            ("query joined", q.joined),
            ("query expired", q.expired),
            ("query evicted", q.evicted),
            ("query pending", q.pending),
            ("reward used", r.used),
            ("reward duplicate", r.duplicate),
            ("reward further", r.further),
            ("reward late", r.late),
            ("reward orphaned", r.orphaned),
            ("reward evicted", r.evicted),
            ("reward pending", r.pending),
        ]
    }

    fn compare(spec: JoinSpec, events: &[Event]) -> Result<(), TestCaseError> {
        let (mut joiner, mut naive) = (exact(spec.clone()), Naive::new(spec));
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

    type Records = Vec<(String, RequestRecord<Size>)>;

    /// A joiner with its records as they would be on disk.
    struct Stored {
        joiner: Joiner<Size>,
        records: BTreeMap<String, Vec<u8>>,
    }

    impl Stored {
        fn feed(&mut self, event: &Event) -> Vec<Joined<Size>> {
            event.feed(&mut self.joiner)
        }

        /// Brings the records up to date; returns what was handed out.
        fn save(&mut self) -> Vec<String> {
            let mut taken = Vec::new();
            self.joiner.take_changes(|id, record| {
                taken.push(id.to_owned());
                match record {
                    Some(record) => drop(self.records.insert(id.to_owned(), record.seal())),
                    None => drop(self.records.remove(id)),
                }
            });
            taken
        }

        fn restored(&self) -> Self {
            let records = self.records.iter().map(|(id, bytes)| (id.clone(), RequestRecord::open(bytes).unwrap()));
            let joiner = Joiner::restore(self.joiner.to_record(), records).unwrap();
            Self { joiner, records: self.records.clone() }
        }
    }

    /// All records at present, tracked or not.
    fn records(joiner: &Joiner<Size>) -> BTreeMap<String, Vec<u8>> {
        joiner.requests().map(|(id, record)| (id.to_owned(), record.seal())).collect()
    }

    /// The changes by name: waiting, finished or gone.
    fn changes(joiner: &mut Joiner<Size>) -> String {
        let mut parts = Vec::new();
        joiner.take_changes(|id, record| {
            let state = match record {
                Some(RequestRecord::Pending(_)) => "waiting",
                Some(RequestRecord::Finished(_)) => "finished",
                None => "gone",
            };
            parts.push(format!("{id} {state}"));
        });
        parts.join(", ")
    }

    fn any_spec() -> impl Strategy<Value = JoinSpec> {
        let bounds = (
            prop_oneof![0..5usize, Just(1000)],
            prop_oneof![200..3000usize, Just(1 << 20)],
            prop_oneof![0..6usize, Just(1000)],
        );
        spec(0..9u64, bounds)
    }

    /// Any rule under which nothing is evicted.
    fn unbounded_spec() -> impl Strategy<Value = JoinSpec> {
        spec(prop_oneof![0..9u64, 0..60u64], (Just(1000), Just(1 << 20), Just(1000)))
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
            2 => ts.prop_map(Event::Retired),
            1 => (0..600usize).prop_map(Event::Remap),
            1 => Just(Event::Close),
        ]
    }

    /// A payload that claims to hold this much.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Size(usize);

    impl SavedDecision for Size {
        type Old = Self;
    }

    impl Payload for Size {
        fn bytes(&self) -> usize {
            self.0
        }
    }

    impl Size {
        /// Grows or shrinks; one size in three stands for a model that is gone.
        fn remap(&mut self, by: usize) -> bool {
            self.0 = (self.0 + by) % 900;
            !self.0.is_multiple_of(3)
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Query { id: String, ts: i64, size: usize },
        Reward { id: String, ts: i64, reward: f64, event_id: Option<String> },
        Retired(i64),
        Remap(usize),
        Close,
    }

    impl Event {
        /// `q ID TS [SIZE]`, `r ID TS REWARD [EVENT_ID]`, `t TS` of a retired model, `remap BY` or `close`.
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
                ["t", _] => Self::Retired(ts()),
                ["remap", by] => Self::Remap(by.parse().unwrap()),
                ["close"] => Self::Close,
                _ => panic!("not an event: {text}"),
            }
        }

        fn shifted(mut self, by: i64) -> Self {
            match &mut self {
                Self::Query { ts, .. } | Self::Reward { ts, .. } | Self::Retired(ts) => *ts += by,
                Self::Remap(_) | Self::Close => {}
            }
            self
        }

        fn feed(&self, joiner: &mut Joiner<Size>) -> Vec<Joined<Size>> {
            let mut out = Vec::new();
            if let Self::Query { ts, .. } | Self::Reward { ts, .. } | Self::Retired(ts) = self {
                joiner.observe(*ts, &mut out);
            }
            match self {
                Self::Query { id, ts, size } => joiner.query(id, *ts, Size(*size), &mut out),
                Self::Reward { id, ts, reward, event_id } => {
                    joiner.reward(id, *ts, Feedback::reward(*reward), event_id.as_deref(), &mut out);
                }
                Self::Retired(_) => joiner.retired(),
                Self::Remap(by) => joiner.remap(|size| size.remap(*by)),
                Self::Close => joiner.close_all(&mut out),
            }
            out
        }
    }

    /// The slow and obvious joiner: it keeps every event with its fate and looks through all of them each time.
    struct Naive {
        spec: JoinSpec,
        time: Option<i64>,
        /// What a window has closed under any rule so far.
        horizon: i128,
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
        /// Whether it repeats no other, though it is a duplicate.
        is_further: bool,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Pending,
        Retired,
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
            Self { spec, time: None, horizon: i128::MIN, queries: Vec::new(), rewards: Vec::new() }
        }

        fn set_spec(&mut self, spec: JoinSpec) {
            if let Some(time) = self.time {
                self.horizon = self.horizon.max(i128::from(time) - i128::from(self.spec.window_ms));
            }
            self.spec = spec;
            for q in 0..self.queries.len() {
                let deadline = self.deadline(q).min(i128::from(i64::MAX));
                let until = &mut self.queries[q].until;
                *until = until.map(|until| until.max(deadline));
            }
        }

        fn step(&mut self, event: &Event) -> Vec<Joined<Size>> {
            let mut out = Vec::new();
            match event {
                Event::Query { id, ts, size } => {
                    self.pass(*ts, &mut out);
                    let fate = self.fate_of_query(id, *ts);
                    self.note_query(id, *ts, *size, fate);
                    if fate == Fate::Pending {
                        for r in self.held(id) {
                            self.rewards[r].fate = self.fate_beside(&self.rewards[r], *ts);
                        }
                        self.join_at_once(id, &mut out);
                    }
                }
                Event::Reward { id, ts, reward, event_id } => {
                    self.pass(*ts, &mut out);
                    let (id, event_id) = (id.clone(), event_id.clone());
                    let (fate, of, is_further) = (Fate::Pending, None, false);
                    let mut new = NaiveReward { id, ts: *ts, reward: *reward, event_id, fate, of, is_further };
                    (new.fate, new.of) = self.fate_of_reward(&new);
                    new.is_further = new.fate == Fate::Duplicate && new.of.is_some();
                    let (id, fate) = (new.id.clone(), new.fate);
                    self.rewards.push(new);
                    if fate == Fate::Pending {
                        self.join_at_once(&id, &mut out);
                    }
                }
                Event::Retired(ts) => {
                    self.pass(*ts, &mut out);
                    self.note_query("", *ts, 0, Fate::Retired);
                }
                Event::Remap(by) => self.remap(*by),
                Event::Close => self.close_where(&|_| true, &mut out),
            }
            self.keep_bounds();
            out
        }

        fn note_query(&mut self, id: &str, ts: i64, size: usize, fate: Fate) {
            self.queries.push(NaiveQuery { id: id.to_owned(), ts, size, fate, until: None, settled: false });
        }

        fn remap(&mut self, by: usize) {
            for q in (0..self.queries.len()).filter(|&q| self.queries[q].fate == Fate::Pending).collect::<Vec<_>>() {
                let mut size = Size(self.queries[q].size);
                if !size.remap(by) {
                    let held = self.held(&self.queries[q].id);
                    held.into_iter().for_each(|r| self.rewards[r].fate = Fate::Orphaned);
                    self.queries[q].fate = Fate::Retired;
                }
                self.queries[q].size = size.0;
            }
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
            } else if i128::from(self.time.unwrap()) > i128::from(ts) + i128::from(self.spec.window_ms)
                || i128::from(ts) < self.horizon
            {
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
                if known(Some(q), None) {
                    (Fate::Duplicate, None)
                } else if self.queries[q].settled {
                    (Fate::Duplicate, Some(q))
                } else if self.reach(new) < i128::from(self.queries[q].ts) {
                    (Fate::Orphaned, None)
                } else {
                    (Fate::Late, Some(q))
                }
            } else if known(None, Some(Fate::Pending)) {
                (Fate::Duplicate, None)
            } else {
                let fate = match self.open(&new.id) {
                    Some(q) => self.fate_beside(new, self.queries[q].ts),
                    None if self.reach(new) < i128::from(self.time.unwrap()) => Fate::Orphaned,
                    None => Fate::Pending,
                };
                (fate, None)
            }
        }

        /// The fate of a reward beside an open query, by their timestamps alone.
        fn fate_beside(&self, reward: &NaiveReward, asked: i64) -> Fate {
            if self.reach(reward) < i128::from(asked) {
                Fate::Orphaned
            } else if i128::from(reward.ts) > i128::from(asked) + i128::from(self.spec.window_ms) {
                Fate::Late
            } else {
                Fate::Pending
            }
        }

        fn join_at_once(&mut self, id: &str, out: &mut Vec<Joined<Size>>) {
            if self.spec.aggregate == Aggregate::First
                && !self.held(id).is_empty()
                && let Some(q) = self.open(id)
            {
                let rewarded = self.held(id).into_iter().map(|r| self.rewards[r].ts).max().unwrap();
                self.finish(q, i128::from(rewarded.max(self.queries[q].ts)), out);
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
                self.rewards[r].is_further = first && i > 0;
            }
            self.queries[q].fate = if values.is_empty() { Fate::Expired } else { Fate::Joined };
            self.queries[q].settled = first && !values.is_empty();
            self.remember(q, end, &held);
            let NaiveQuery { id, ts, size, .. } = &self.queries[q];
            out.extend(reward.map(|reward| Joined {
                request_id: id.clone(),
                ts_ms: *ts,
                payload: Size(*size),
                feedback: Feedback::reward(reward),
                defaulted: values.is_empty(),
                rewarded_ms: held.first().map(|&r| self.rewards[r].ts),
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
                    self.remember(q, self.deadline(q), &held);
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
            // The reward that settled a request is part of its entry.
            let is_part = |q: usize, reward: &NaiveReward| self.queries[q].settled && reward.fate == Fate::Used;
            let seen = |reward: &&NaiveReward| reward.of.is_some_and(|q| remembers(q) && !is_part(q, reward));
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
                    retired: queries(Fate::Retired),
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
                    further: self.rewards.iter().filter(|reward| reward.is_further).count() as u64,
                    clipped: 0,
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
