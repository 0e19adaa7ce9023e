//! Merges several logs, each roughly in time order, into one ordered sequence.
//!
//! The merge reads each log ahead until the log's time is `reorder_ms` past the earliest event held from it, and then emits
//! the earliest event of all logs. An event that is further out of order is emitted as soon as it is read, and counted. The
//! time of a log is an [`EventTime`]: a few wrong timestamps do not move it. Memory is bounded by the window and, should
//! the time of a log stand still, by a number of events and of bytes.
//!
//! At the end of live logs that would hold events for as long as it takes the slowest log to pass them. A live merge therefore
//! has a bound ([`Merge::set_hold`]): it emits what it holds, in order, once an event was held for that long and no log is
//! known to have unread ones. A backlog is still merged as if the logs were complete.
//!
//! Years of logs are thousands of files. A log stays closed until an event is due that is within `reorder_ms` of the log's
//! first.
//!
//! Read-ahead events are not done. A log's [`Position`] records what is: everything before its floor, and runs of events
//! beyond it that were emitted early. A merge that resumes from its saved state re-reads each log from its floor and emits
//! exactly the sequence that it would have emitted without the restart. An event that too many later ones have overtaken is
//! emitted out of order, so that the floor never stays far behind.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use crate::engine::Input;
use crate::event_time::{CONFIRMATIONS, EventTime};
use crate::wire::records::head::{MergeRecord, PositionRecord};

/// An event with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Sourced {
    /// The event.
    pub input: Input,
    /// Its start offset in the log.
    pub start: u64,
    /// The start offset of the next one.
    pub end: u64,
    /// Its line in the log, counted from 1; 0 where there are no lines.
    pub line: u64,
    /// Metadata of its record.
    pub origin: Option<Box<Origin>>,
}

/// Metadata of a record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// The message's key, or its first bytes.
    pub key: Option<Vec<u8>>,
    /// Bytes of the whole key.
    pub key_bytes: usize,
    /// Its trace context, as W3C writes it.
    pub traceparent: Option<String>,
}

/// Result of a read from a log.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "nearly all of them are events")]
pub enum Read {
    /// The next event.
    Event(Sourced),
    /// Nothing unread is known, but more may arrive at any moment: the merge waits for it, unless its time is past what is due or
    /// an event was held for too long.
    Pending,
    /// Nothing yet, but more will arrive: the log has unread events. The merge waits for them, so that the order of events does
    /// not depend on when they arrive.
    Awaited,
    /// Idle: the merge continues without it until it is woken.
    Idle,
    /// The log is complete.
    End,
}

/// A log that can be read from a position.
pub trait Source {
    /// Why reading failed.
    type Error;

    /// Reads the next event. The first call after [`Merge::add`] starts at the floor of the position given there.
    fn read(&mut self) -> Result<Read, Self::Error>;
}

/// Next output of a merge.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "nearly all of them are events")]
pub enum Next {
    /// The next event, and the index of its log.
    Event(Sourced, usize),
    /// Waiting for more events of a log.
    Wait,
    /// All logs are complete, or idle.
    End,
}

/// Progress in a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// All events before this offset are done.
    pub floor: u64,
    /// Lines before the floor.
    pub floor_line: u64,
    /// Up to here it was read ahead.
    pub read: u64,
    /// Runs of events between the two that are done, each from where its first begins to where its last ends, in order.
    pub done: Vec<(u64, u64)>,
    /// The log's time at the floor.
    pub time: EventTime,
}

impl Default for Position {
    fn default() -> Self {
        Self { floor: 0, floor_line: 0, read: 0, done: Vec::new(), time: EventTime::new(CONFIRMATIONS) }
    }
}

impl Position {
    /// Whether the event that begins at `start` is done.
    pub fn is_done(&self, start: u64) -> bool {
        let at = self.done.partition_point(|run| run.1 <= start);
        start < self.floor || self.done.get(at).is_some_and(|run| run.0 <= start)
    }

    /// Drops everything beyond `length`: the log was truncated there.
    pub fn cut_to(&mut self, length: u64) {
        self.floor = self.floor.min(length);
        self.read = self.read.min(length);
        self.done.retain(|run| run.0 < length);
        if let Some(run) = self.done.last_mut() {
            run.1 = run.1.min(length);
        }
    }

    /// As it is saved.
    pub fn to_record(&self) -> PositionRecord {
        let Self { floor, floor_line, read, ref done, ref time } = *self;
        PositionRecord { floor, floor_line, read, done: done.clone(), time: time.to_record() }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub fn from_record(record: PositionRecord) -> Option<Self> {
        let PositionRecord { floor, floor_line, read, done, time } = record;
        Some(Self { floor, floor_line, read, done, time: EventTime::from_record(time)? })
    }
}

/// Saved state of a merge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MergeState {
    /// Positions of the logs that were begun, by the name of the log.
    pub positions: BTreeMap<String, Position>,
    /// The largest time emitted in order.
    pub last_ms: Option<i64>,
    /// Events that were emitted after a later one.
    pub out_of_order: u64,
}

impl MergeState {
    /// As it is saved.
    pub fn to_record(&self) -> MergeRecord {
        let positions = self.positions.iter().map(|(name, position)| (name.clone(), position.to_record())).collect();
        MergeRecord { positions, last_ms: self.last_ms, out_of_order: self.out_of_order }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub fn from_record(record: MergeRecord) -> Option<Self> {
        let MergeRecord { positions, last_ms, out_of_order } = record;
        let positions = positions.into_iter().map(|(name, position)| Some((name, Position::from_record(position)?)));
        Some(Self { positions: positions.collect::<Option<_>>()?, last_ms, out_of_order })
    }
}

/// Limits on the events held of one log.
const HELD_MAX: usize = 100_000;
const HELD_BYTES_MAX: usize = 256 << 20;

/// How many later events of its log may overtake an event. This bounds what a restart reads again because of it.
const OVERTAKEN_MAX: usize = 16_384;

/// Merges logs of events.
pub struct Merge<S> {
    logs: BTreeMap<usize, Log<S>>,
    /// The index of the next log.
    index: usize,
    /// Logs that are read, in the order of their index.
    active: Vec<usize>,
    /// Logs whose time has not come, by the earliest that one of their events can be.
    dormant: BTreeSet<(i64, usize)>,
    reorder_ms: u64,
    /// How long an event is held at most; unlimited if none.
    hold: Option<Duration>,
    last_ms: Option<i64>,
    out_of_order: u64,
}

struct Log<S> {
    name: String,
    source: S,
    position: Position,
    /// Where what was read before a restart ends.
    resume: u64,
    held: BinaryHeap<Held>,
    held_bytes: usize,
    /// What was read from the floor on, in the order of the log.
    entries: VecDeque<Entry>,
    /// How many of the entries are done.
    overtaking: usize,
    /// The log's time where it was read to.
    time: EventTime,
    last_line: u64,
    /// A bad event: it is emitted at once.
    bad: Option<Sourced>,
    /// Whether it was idle: the merge reads nothing more until it is woken, however often what is held is asked for.
    asleep: bool,
    /// Whether its position must be kept even before anything is read.
    begun: bool,
    /// Whether its position is obsolete.
    gone: bool,
}

/// An event between the floor and where the log was read to.
struct Entry {
    start: u64,
    end: u64,
    line: u64,
    ts_ms: Option<i64>,
    read_at: Duration,
    is_done: bool,
}

/// Ordered so that the greatest is the one to go first. Small, since a heap moves what it holds about.
struct Held {
    ts_ms: i64,
    event: Box<Sourced>,
}

/// Why a log stopped being read ahead.
#[derive(PartialEq)]
enum Known {
    /// What it holds can go.
    Enough,
    Pending,
    Awaited,
    Idle,
    End,
}

impl<S: Source> Merge<S> {
    /// Resumes from `state`; the logs are added later.
    pub fn new(reorder_ms: u64, state: &MergeState) -> Self {
        Self {
            logs: BTreeMap::new(),
            index: 0,
            active: Vec::new(),
            dormant: BTreeSet::new(),
            reorder_ms,
            hold: None,
            last_ms: state.last_ms,
            out_of_order: state.out_of_order,
        }
    }

    /// Limits how long an event is held for earlier ones that may yet arrive, by the clock of [`next_at`](Self::next_at).
    pub fn set_hold(&mut self, hold: Option<Duration>) {
        self.hold = hold;
    }

    /// Adds a log and returns its index. One that was begun before brings its position. One of which nothing was read is left
    /// alone until its `first_ms`, the time of its first good event, if that is known.
    pub fn add(&mut self, name: String, source: S, position: Option<Position>, first_ms: Option<i64>) -> usize {
        let index = self.index;
        self.index += 1;
        let begun = position.is_some();
        let mut position = position.unwrap_or_default();
        match first_ms {
            Some(ms) => {
                self.dormant.insert((ms.saturating_sub_unsigned(self.reorder_ms), index));
                position.time = EventTime::starting_at(CONFIRMATIONS, ms);
            }
            None => self.active.push(index),
        }
        let log = Log {
            name,
            source,
            resume: position.read,
            last_line: position.floor_line,
            time: position.time.clone(),
            position: Position { read: position.floor, ..position },
            held: BinaryHeap::new(),
            held_bytes: 0,
            entries: VecDeque::new(),
            overtaking: 0,
            bad: None,
            asleep: false,
            begun,
            gone: false,
        };
        self.logs.insert(index, log);
        index
    }

    /// Reads a log again that was idle.
    pub fn wake(&mut self, log: usize) {
        if let Some(log) = self.logs.get_mut(&log) {
            log.asleep = false;
        }
        if !self.dormant.iter().any(|(_, dormant)| *dormant == log) {
            self.activate(log);
        }
    }

    /// Drops the position of a deleted log; events already read are still emitted.
    pub fn forget(&mut self, log: usize) {
        self.wake(log);
        if let Some(log) = self.logs.get_mut(&log) {
            log.gone = true;
        }
    }

    /// Removes a log with all that is held of it; its position, from which it can be added again.
    pub fn remove(&mut self, log: usize) -> Option<Position> {
        self.active.retain(|active| *active != log);
        self.dormant.retain(|(_, dormant)| *dormant != log);
        let log = self.logs.remove(&log)?;
        Some(log.position_now())
    }

    /// A log, by its index.
    pub fn source(&self, log: usize) -> Option<&S> {
        self.logs.get(&log).map(|log| &log.source)
    }

    /// The same, to be changed.
    pub fn source_mut(&mut self, log: usize) -> Option<&mut S> {
        self.logs.get_mut(&log).map(|log| &mut log.source)
    }

    /// The name of a log.
    pub fn name(&self, log: usize) -> Option<&str> {
        self.logs.get(&log).map(|log| log.name.as_str())
    }

    /// The next event of complete logs, if it is known which one that is: no time passes.
    #[expect(clippy::should_implement_trait, reason = "it may fail, and may give nothing for now")]
    pub fn next(&mut self) -> Result<Next, S::Error> {
        self.next_at(Duration::ZERO)
    }

    /// The next event at the time `now` of a monotonic clock, if it is known which one that is.
    pub fn next_at(&mut self, now: Duration) -> Result<Next, S::Error> {
        loop {
            let mut pending = Vec::new();
            let mut i = 0;
            while let Some(&index) = self.active.get(i) {
                let Some(log) = self.logs.get_mut(&index) else { break };
                let known = log.read_ahead(self.reorder_ms, now)?;
                if let Some(bad) = log.bad.take() {
                    log.done(bad.start);
                    return Ok(Next::Event(bad, index));
                }
                if let Some(overtaken) = log.take_overtaken() {
                    return Ok(Next::Event(overtaken, index));
                }
                match known {
                    Known::Awaited => return Ok(Next::Wait),
                    Known::Pending => pending.push(index),
                    _ => {}
                }
                if matches!(known, Known::Idle | Known::End) && log.held.is_empty() {
                    if log.gone {
                        self.logs.remove(&index);
                    }
                    self.active.remove(i);
                } else {
                    i += 1;
                }
            }
            let earliest = self.earliest();
            if !self.rouse(earliest) {
                let may_wait = earliest.is_none() || !self.is_overdue(now);
                return Ok(match earliest {
                    _ if may_wait && pending.iter().any(|index| self.may_precede(*index, earliest)) => Next::Wait,
                    Some(index) => self.take(index),
                    None => Next::End,
                });
            }
        }
    }

    /// The state to resume from.
    pub fn state(&self) -> MergeState {
        let begun = self.logs.values().filter(|log| (log.begun || log.read_so_far() > 0) && !log.gone);
        MergeState {
            positions: begun.map(|log| (log.name.clone(), log.position_now())).collect(),
            last_ms: self.last_ms,
            out_of_order: self.out_of_order,
        }
    }

    /// The offset of every log, by its name, before which all events are done.
    pub fn floors(&self) -> impl Iterator<Item = (&str, u64)> {
        self.logs.values().map(|log| (log.name.as_str(), log.position.floor))
    }

    /// Events emitted after a later one.
    pub fn out_of_order(&self) -> u64 {
        self.out_of_order
    }

    /// Number of events that were read and wait for earlier ones.
    pub fn held_events(&self) -> usize {
        self.logs.values().map(|log| log.held.len()).sum()
    }

    /// Whether an event was held for as long as is allowed.
    fn is_overdue(&self, now: Duration) -> bool {
        let Some(hold) = self.hold else { return false };
        let oldest = self.active.iter().filter_map(|index| self.logs.get(index)?.entries.front());
        oldest.map(|entry| entry.read_at).min().is_some_and(|read_at| now >= read_at.saturating_add(hold))
    }

    /// Begins the first dormant log if the event that is due may not go before its own.
    fn rouse(&mut self, earliest: Option<usize>) -> bool {
        let due_ms = earliest.and_then(|index| self.logs.get(&index)?.earliest_ms());
        let Some(&(from_ms, index)) = self.dormant.first() else { return false };
        let its_turn = due_ms.is_none_or(|due_ms| due_ms >= from_ms);
        if its_turn {
            self.dormant.pop_first();
            self.activate(index);
        }
        its_turn
    }

    /// Whether a log that is pending may yet bring something that goes before what is earliest now.
    fn may_precede(&self, pending: usize, earliest: Option<usize>) -> bool {
        let due_ms = earliest.and_then(|index| self.logs.get(&index)?.earliest_ms());
        let newest_ms = self.logs.get(&pending).and_then(|log| log.time.time_ms());
        due_ms.is_none_or(|due_ms| newest_ms <= Some(due_ms.saturating_add_unsigned(self.reorder_ms)))
    }

    fn activate(&mut self, index: usize) {
        if let Err(at) = self.active.binary_search(&index) {
            self.active.insert(at, index);
        }
    }

    fn earliest(&self) -> Option<usize> {
        let heads = self.active.iter().filter_map(|i| self.logs.get(i)?.held.peek().map(|held| (held, *i)));
        heads.max_by(|a, b| a.0.cmp(b.0).then(b.1.cmp(&a.1))).map(|(_, i)| i)
    }

    fn take(&mut self, index: usize) -> Next {
        let Some(log) = self.logs.get_mut(&index) else { return Next::Wait };
        let Some(Held { ts_ms, event }) = log.held.pop() else { return Next::Wait };
        log.held_bytes -= event.input.bytes();
        log.done(event.start);
        self.out_of_order += u64::from(Some(ts_ms) < self.last_ms);
        // An event that is ahead of its log's time, at the end of the log, may have a wrong timestamp.
        self.last_ms = self.last_ms.max(log.time.time_ms().map(|time_ms| time_ms.min(ts_ms)));
        Next::Event(*event, index)
    }
}

impl<S: Source> Log<S> {
    /// Reads until the earliest held event is out of the window, or a bad event is met.
    fn read_ahead(&mut self, reorder_ms: u64, now: Duration) -> Result<Known, S::Error> {
        while self.bad.is_none() {
            // What was held before a restart is held again, whatever the bounds.
            if self.position.read >= self.resume && (self.is_ahead(reorder_ms) || self.is_full()) {
                break;
            }
            if self.asleep {
                return Ok(Known::Idle);
            }
            match self.source.read()? {
                Read::Event(event) => self.hold(event, reorder_ms, now),
                Read::Pending => return Ok(Known::Pending),
                Read::Awaited => return Ok(Known::Awaited),
                Read::Idle => {
                    self.asleep = true;
                    return Ok(Known::Idle);
                }
                Read::End => return Ok(Known::End),
            }
        }
        Ok(Known::Enough)
    }

    /// How far it was read, in this life or the one before.
    fn read_so_far(&self) -> u64 {
        self.position.read.max(self.resume)
    }

    fn hold(&mut self, mut event: Sourced, reorder_ms: u64, now: Duration) {
        self.position.read = event.end;
        self.last_line = event.line;
        event.input.read_after(self.time.newest_within(reorder_ms));
        let ts_ms = event.input.key().map(|key| key.0);
        ts_ms.into_iter().for_each(|ts_ms| self.time.observe(ts_ms));
        let is_done = self.position.is_done(event.start);
        self.overtaking += usize::from(is_done);
        let Sourced { start, end, line, .. } = event;
        self.entries.push_back(Entry { start, end, line, ts_ms, read_at: now, is_done });
        match ts_ms {
            _ if is_done => {}
            None => self.bad = Some(event),
            Some(ts_ms) => {
                self.held_bytes += event.input.bytes();
                self.held.push(Held { ts_ms, event: Box::new(event) });
            }
        }
    }

    /// Notes that an event was emitted, and moves the floor past all that is done before the first that is not.
    fn done(&mut self, start: u64) {
        if let Ok(at) = self.entries.binary_search_by_key(&start, |entry| entry.start) {
            self.overtaking += usize::from(!self.entries[at].is_done);
            self.entries[at].is_done = true;
        }
        while let Some(entry) = self.entries.front().filter(|entry| entry.is_done) {
            self.overtaking -= 1;
            self.position.floor_line = entry.line;
            entry.ts_ms.into_iter().for_each(|ts_ms| self.position.time.observe(ts_ms));
            self.entries.pop_front();
        }
        self.position.floor = self.entries.front().map_or(self.position.read, |entry| entry.start);
    }

    /// The first event that is not done, if too many after it are.
    fn take_overtaken(&mut self) -> Option<Sourced> {
        if self.overtaking < OVERTAKEN_MAX || self.position.read < self.resume {
            return None;
        }
        let start = self.entries.front()?.start;
        let mut overtaken = None;
        for held in std::mem::take(&mut self.held) {
            if held.event.start == start { overtaken = Some(held.event) } else { self.held.push(held) }
        }
        let event = overtaken?;
        self.held_bytes -= event.input.bytes();
        self.done(start);
        Some(*event)
    }

    /// The position to resume from.
    fn position_now(&self) -> Position {
        let mut done: Vec<(u64, u64)> = Vec::new();
        let mut was_done = false;
        for entry in &self.entries {
            match done.last_mut() {
                Some(run) if entry.is_done && was_done => run.1 = entry.end,
                _ if entry.is_done => done.push((entry.start, entry.end)),
                _ => {}
            }
            was_done = entry.is_done;
        }
        // What was not read again since a restart is as it was then.
        let read = self.position.read;
        done.extend(self.position.done.iter().filter(|run| run.1 > read).map(|run| (run.0.max(read), run.1)));
        Position { read: self.read_so_far(), done, ..self.position.clone() }
    }

    fn is_full(&self) -> bool {
        self.held.len() >= HELD_MAX || self.held_bytes >= HELD_BYTES_MAX
    }

    fn is_ahead(&self, reorder_ms: u64) -> bool {
        let earliest_ms = self.earliest_ms();
        earliest_ms.is_some_and(|ms| self.time.time_ms() > Some(ms.saturating_add_unsigned(reorder_ms)))
    }

    fn earliest_ms(&self) -> Option<i64> {
        self.held.peek().map(|held| held.ts_ms)
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> Ordering {
        let (this, that) = (&self.event, &other.event);
        let same_time = || that.input.key().cmp(&this.input.key()).then(that.start.cmp(&this.start));
        other.ts_ms.cmp(&self.ts_ms).then_with(same_time)
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Held {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Side;
    use crate::wire::events::Parser;
    use proptest::prelude::*;

    /// Events in memory, each as long as one; `None` is a bad one.
    struct Script {
        events: Vec<Option<(i64, u8)>>,
        next: usize,
        at_end: Read,
        fails_at: Option<usize>,
    }

    impl Source for Script {
        type Error = &'static str;

        fn read(&mut self) -> Result<Read, &'static str> {
            let settings = Config::default().check().unwrap();
            let parser = Parser::new(&settings);
            if self.fails_at == Some(self.next) {
                return Err("torn");
            }
            let Some(event) = self.events.get(self.next) else {
                return Ok(match self.at_end {
                    Read::Pending => Read::Pending,
                    Read::Awaited => Read::Awaited,
                    Read::Idle => Read::Idle,
                    _ => Read::End,
                });
            };
            let bytes = match event {
                Some((ts_ms, id)) => format!(r#"{{"request_id":"r{id}","ts_ms":{ts_ms},"reward":1}}"#),
                None => "{".to_owned(),
            };
            let start = self.next as u64;
            self.next += 1;
            let input = Input::parse(&parser, Side::Reward, bytes.into_bytes(), None);
            Ok(Read::Event(Sourced { input, start, end: start + 1, line: start + 1, origin: None }))
        }
    }

    fn script(events: &[Option<(i64, u8)>], from: u64) -> Script {
        Script { events: events.to_vec(), next: from as usize, at_end: Read::End, fails_at: None }
    }

    fn merge(logs: &[Vec<Option<(i64, u8)>>], reorder_ms: u64, state: &MergeState) -> Merge<Script> {
        let mut merge = Merge::new(reorder_ms, state);
        for (i, events) in logs.iter().enumerate() {
            let position = state.positions.get(&i.to_string()).cloned();
            let from = position.as_ref().map_or(0, |position| position.floor);
            let first_ms = events.iter().flatten().take(CONFIRMATIONS).map(|event| event.0).min();
            let first_ms = first_ms.filter(|_| position.is_none());
            merge.add(i.to_string(), script(events, from), position, first_ms);
        }
        merge
    }

    type Shown = (Option<(i64, String)>, usize, u64);

    fn next(merge: &mut Merge<Script>) -> Option<Shown> {
        match merge.next().unwrap() {
            Next::Event(event, log) => {
                let key = event.input.key().map(|(ts_ms, _, _, id, _)| (ts_ms, id.to_owned()));
                assert_eq!(event.line, event.start + 1);
                Some((key, log, event.start))
            }
            Next::Wait | Next::End => None,
        }
    }

    fn merged(logs: &[Vec<Option<(i64, u8)>>], reorder_ms: u64) -> (Vec<Shown>, u64) {
        let mut merge = merge(logs, reorder_ms, &MergeState::default());
        let events = std::iter::from_fn(|| next(&mut merge)).collect();
        (events, merge.out_of_order())
    }

    proptest! {
        /// Where the end of every log is known, the order is that of complete logs, however late each event arrives.
        #[test]
        fn order_does_not_depend_on_arrival(
            logs in prop::collection::vec(
                prop::collection::vec(prop::option::weighted(0.95, (0..200_i64, any::<u8>())), 0..40), 1..4),
            arrivals in prop::collection::vec(0..3_usize, 0..120),
            reorder_ms in 0..50_u64,
        ) {
            let begun = (0..logs.len()).map(|i| (i.to_string(), Position::default())).collect();
            let state = MergeState { positions: begun, ..MergeState::default() };
            let mut complete = merge(&logs, reorder_ms, &state);
            let expected: Vec<Shown> = std::iter::from_fn(|| next(&mut complete)).collect();
            let mut late = merge(&vec![Vec::new(); logs.len()], reorder_ms, &state);
            (0..logs.len()).for_each(|i| late.source_mut(i).unwrap().at_end = Read::Awaited);
            let mut found = Vec::new();
            let rest = (0..logs.len()).flat_map(|i| vec![i; logs[i].len() + 1]);
            for log in arrivals.into_iter().filter(|log| *log < logs.len()).chain(rest) {
                let source = late.source_mut(log).unwrap();
                match logs[log].get(source.events.len()) {
                    Some(event) => source.events.push(*event),
                    None => source.at_end = Read::End,
                }
                found.extend(std::iter::from_fn(|| next(&mut late)));
            }
            prop_assert_eq!(found, expected);
        }

        /// Disorder within the window does not show, and neither does how the events are split over logs.
        #[test]
        fn order_does_not_depend_on_the_split(
            events in prop::collection::vec((0..200_i64, any::<u8>(), 0..10_i64), 0..80),
            splits in prop::collection::vec(0..3_usize, 80),
        ) {
            let mut events = events;
            events.sort_by_key(|(ts_ms, _, shift)| ts_ms + shift);
            let mut logs = vec![Vec::new(); 3];
            for ((ts_ms, id, _), log) in events.iter().zip(splits) {
                logs[log].push(Some((*ts_ms, *id)));
            }
            let mut expected: Vec<_> = events.iter().map(|(ts_ms, id, _)| (*ts_ms, format!("r{id}"))).collect();
            expected.sort();
            let (found, out_of_order) = merged(&logs, 10);
            let found: Vec<_> = found.into_iter().filter_map(|shown| shown.0).collect();
            prop_assert_eq!((found, out_of_order), (expected, 0));
        }

        /// Whatever the disorder, and wherever it is cut: the rest is what it would have been.
        #[test]
        fn a_restart_does_not_show(
            logs in prop::collection::vec(prop::collection::vec(prop::option::weighted(0.9, (0..60_i64, any::<u8>())), 0..25), 1..4),
            cuts in prop::collection::vec(0..20_usize, 0..6),
            reorder_ms in 0..30_u64,
        ) {
            let (expected, out_of_order) = merged(&logs, reorder_ms);
            let mut found = Vec::new();
            let mut state = MergeState::default();
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let mut merge = merge(&logs, reorder_ms, &state);
                found.extend(std::iter::from_fn(|| next(&mut merge)).take(cut));
                state = merge.state();
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!(state.out_of_order, out_of_order);
            prop_assert!(state.positions.values().all(|p| p.done.is_empty() && p.floor == p.read));
        }
    }

    #[test]
    fn an_event_beyond_the_window_is_emitted_when_it_is_read() {
        let times = [vec![100], vec![200; CONFIRMATIONS], vec![50], vec![300; CONFIRMATIONS]].concat();
        let logs = [times.iter().map(|ts_ms| Some((*ts_ms, 1))).collect::<Vec<_>>()];
        let (events, out_of_order) = merged(&logs, 10);
        let found: Vec<i64> = events.iter().map(|(key, ..)| key.as_ref().unwrap().0).collect();
        assert_eq!(found, [vec![100, 50], vec![200; CONFIRMATIONS], vec![300; CONFIRMATIONS]].concat());
        assert_eq!(out_of_order, 1);
    }

    #[test]
    fn an_event_from_the_future_is_emitted_last_and_disturbs_no_other() {
        // Out of order within the window, with a wrong timestamp in front, in the middle and at the end.
        let ordered: Vec<_> = (0..3000_i64).map(|i| Some((1000 + 10 * i + 5 * (i % 3), 1))).collect();
        let expected: Vec<_> = merged(std::slice::from_ref(&ordered), 30).0.into_iter().filter_map(|e| e.0).collect();
        let wrong = 1_700_000_000_000_000;
        let mut events = ordered;
        for at in [3000, 1500, 0] {
            events.insert(at, Some((wrong, 2)));
        }
        let (found, out_of_order) = merged(&[events], 30);
        let found: Vec<_> = found.into_iter().filter_map(|event| event.0).collect();
        assert_eq!(found[..3000], expected);
        assert_eq!(found[3000..], [(wrong, "r2".to_owned()), (wrong, "r2".to_owned()), (wrong, "r2".to_owned())]);
        assert_eq!(out_of_order, 0);
    }

    #[test]
    fn an_overtaken_event_neither_pins_the_floor_nor_grows_the_position() {
        let number = 3 * OVERTAKEN_MAX as i64;
        let mut events: Vec<_> = (0..number).map(|i| Some((1000 + i, 1))).collect();
        events.insert(20, Some((i64::MAX, 2)));
        let logs = [events];
        let (mut merge, mut restarts) = (merge(&logs, 30, &MergeState::default()), 0);
        let (mut emitted, mut wrong_at) = (0, None);
        loop {
            let state = merge.state();
            let position = &state.positions.get("0").cloned().unwrap_or_default();
            assert!(position.done.len() <= 2, "{:?}", position.done);
            assert!(position.read - position.floor <= 2 * OVERTAKEN_MAX as u64);
            if emitted / 5000 > restarts {
                restarts += 1;
                merge = super::tests::merge(&logs, 30, &state);
            }
            let Some((key, ..)) = next(&mut merge) else { break };
            if key.unwrap().0 == i64::MAX {
                wrong_at = Some(emitted);
            }
            emitted += 1;
        }
        assert_eq!((emitted, wrong_at), (number + 1, Some(20 + OVERTAKEN_MAX as i64)));
        assert_eq!(merge.out_of_order(), 0);
    }

    #[test]
    fn a_log_that_was_cut_resumes_at_its_end() {
        let whole = Position { floor: 50, read: 100, done: vec![(60, 70), (80, 90)], ..Position::default() };
        for (length, floor, read, done) in [
            (65, 50, 65, vec![(60, 65)]),
            (60, 50, 60, vec![]),
            (40, 40, 40, vec![]),
            (200, 50, 100, whole.done.clone()),
        ] {
            let mut cut = whole.clone();
            cut.cut_to(length);
            assert_eq!((cut.floor, cut.read, cut.done), (floor, read, done), "cut to {length}");
        }
    }

    #[test]
    fn a_log_that_is_removed_and_added_again_gives_what_it_would_have() {
        let events: Vec<_> = [10, 40, 20, 90, 50].into_iter().map(|ts_ms| Some((ts_ms, 1))).collect();
        let (expected, _) = merged(std::slice::from_ref(&events), 30);
        for taken in 0..expected.len() {
            let mut merge = merge(std::slice::from_ref(&events), 30, &MergeState::default());
            let mut found: Vec<_> = (0..taken).map(|_| next(&mut merge).unwrap()).collect();
            let position = merge.remove(0).unwrap();
            assert_eq!(merge.next(), Ok(Next::End));
            merge.add("0".to_owned(), script(&events, position.floor), Some(position), None);
            found.extend(std::iter::from_fn(|| next(&mut merge)).map(|(key, _, start)| (key, 0, start)));
            assert_eq!(found, expected, "removed after {taken}");
        }
    }

    #[test]
    fn a_log_is_not_read_before_its_time() {
        let day = |from: i64| (from..from + 100).map(|ts_ms| Some((ts_ms, 1))).collect::<Vec<_>>();
        let logs: Vec<_> = (0..50).map(|i| day(i * 100)).collect();
        let mut merge = merge(&logs, 10, &MergeState::default());
        let mut events = 0;
        while next(&mut merge).is_some() {
            events += 1;
            assert!(merge.active.len() <= 2, "{} logs are read at a time", merge.active.len());
        }
        assert_eq!(events, 5000);
    }

    #[test]
    fn bad_events_and_errors_come_through() {
        let mut merge = merge(&[vec![None, None, Some((5, 1)), None]], 10, &MergeState::default());
        merge.source_mut(0).unwrap().fails_at = Some(1);
        assert_eq!(next(&mut merge), Some((None, 0, 0)));
        assert_eq!(merge.next(), Err("torn"));
        merge.source_mut(0).unwrap().fails_at = None;
        assert_eq!(next(&mut merge), Some((None, 0, 1)));
        assert_eq!(next(&mut merge), Some((None, 0, 3)), "a bad event waits for nobody");
        assert_eq!(next(&mut merge), Some((Some((5, "r1".to_owned())), 0, 2)));
        assert_eq!(merge.next(), Ok(Next::End));
    }

    fn at_ms(merge: &mut Merge<Script>, now_ms: u64) -> Option<(i64, String)> {
        match merge.next_at(Duration::from_millis(now_ms)).unwrap() {
            Next::Event(event, _) => event.input.key().map(|(ts_ms, _, _, id, _)| (ts_ms, id.to_owned())),
            Next::Wait => None,
            Next::End => panic!("a live log has no end"),
        }
    }

    /// Two live logs and an event of the first, read at 0 ms, with the bound of 200 ms.
    fn live() -> Merge<Script> {
        let mut merge = merge(&[vec![Some((1000, 1))], vec![]], 10_000, &MergeState::default());
        merge.set_hold(Some(Duration::from_millis(200)));
        [0, 1].into_iter().for_each(|log| merge.source_mut(log).unwrap().at_end = Read::Pending);
        assert_eq!(at_ms(&mut merge, 0), None);
        assert_eq!(merge.held_events(), 1);
        merge
    }

    fn arrives(merge: &mut Merge<Script>, log: usize, ts_ms: i64, id: u8) {
        merge.source_mut(log).unwrap().events.push(Some((ts_ms, id)));
    }

    fn is(ts_ms: i64, id: &str) -> Option<(i64, String)> {
        Some((ts_ms, id.to_owned()))
    }

    #[test]
    fn a_live_event_is_held_no_longer_than_allowed() {
        let mut merge = live();
        assert_eq!(at_ms(&mut merge, 199), None);
        assert_eq!(at_ms(&mut merge, 200), is(1000, "r1"));
        assert_eq!((at_ms(&mut merge, 200), merge.held_events()), (None, 0));
        // Each has the bound of its own, and what goes before it goes with it.
        arrives(&mut merge, 0, 2000, 2);
        assert_eq!(at_ms(&mut merge, 300), None);
        arrives(&mut merge, 1, 1900, 3);
        arrives(&mut merge, 1, 2100, 4);
        assert_eq!((at_ms(&mut merge, 499), merge.held_events()), (None, 3));
        assert_eq!(at_ms(&mut merge, 500), is(1900, "r3"));
        assert_eq!(at_ms(&mut merge, 500), is(2000, "r2"));
        assert_eq!(at_ms(&mut merge, 500), None);
        assert_eq!(at_ms(&mut merge, 699), is(2100, "r4"));
        assert_eq!(merge.out_of_order(), 0);
    }

    #[test]
    fn a_live_event_that_is_late_goes_when_it_is_read() {
        let mut merge = live();
        for i in 0..2 * CONFIRMATIONS as i64 {
            arrives(&mut merge, 0, 2000 + i, 2);
        }
        let emitted = std::iter::from_fn(|| at_ms(&mut merge, 200)).count();
        assert_eq!(emitted, 1, "the others were read just now");
        let emitted = std::iter::from_fn(|| at_ms(&mut merge, 400)).count();
        assert_eq!((emitted, merge.out_of_order()), (2 * CONFIRMATIONS, 0));
        arrives(&mut merge, 1, 1500, 3);
        assert_eq!(at_ms(&mut merge, 500), None);
        assert_eq!(at_ms(&mut merge, 700), is(1500, "r3"));
        assert_eq!(merge.out_of_order(), 1);
    }

    #[test]
    fn a_live_event_waits_for_a_log_with_unread_events() {
        let mut merge = live();
        merge.source_mut(1).unwrap().at_end = Read::Awaited;
        assert_eq!(at_ms(&mut merge, 1_000_000), None);
        arrives(&mut merge, 1, 900, 2);
        merge.source_mut(1).unwrap().at_end = Read::Pending;
        assert_eq!(at_ms(&mut merge, 1_000_000), is(900, "r2"));
        assert_eq!(at_ms(&mut merge, 1_000_000), is(1000, "r1"));
    }

    #[test]
    fn a_live_event_from_the_future_is_not_held_for_longer() {
        let mut merge = live();
        arrives(&mut merge, 1, 1_000_000_000, 2);
        assert_eq!(at_ms(&mut merge, 100), None);
        assert_eq!(at_ms(&mut merge, 200), is(1000, "r1"));
        assert_eq!(at_ms(&mut merge, 299), None);
        assert_eq!(at_ms(&mut merge, 300), is(1_000_000_000, "r2"));
        arrives(&mut merge, 0, 1100, 3);
        assert_eq!(at_ms(&mut merge, 300), None);
        assert_eq!((at_ms(&mut merge, 500), merge.out_of_order()), (is(1100, "r3"), 0));
    }

    proptest! {
        /// A backlog is merged as complete logs are, however long it takes and however short events may be held.
        #[test]
        fn a_backlog_is_merged_like_complete_logs(
            logs in prop::collection::vec(prop::collection::vec(prop::option::weighted(0.9, (0..60_i64, any::<u8>())), 0..25), 1..4),
            reorder_ms in 0..30_u64,
        ) {
            let (expected, out_of_order) = merged(&logs, reorder_ms);
            let mut merge = merge(&logs, reorder_ms, &MergeState::default());
            merge.set_hold(Some(Duration::ZERO));
            let found: Vec<_> = (0..).map_while(|turn| match merge.next_at(Duration::from_secs(turn)).unwrap() {
                Next::Event(event, log) => {
                    Some((event.input.key().map(|(ts_ms, _, _, id, _)| (ts_ms, id.to_owned())), log, event.start))
                }
                _ => None,
            }).collect();
            prop_assert_eq!((found, merge.out_of_order()), (expected, out_of_order));
        }
    }

    #[test]
    fn what_may_come_is_waited_for_and_what_is_idle_is_not() {
        let logs = [vec![Some((5, 1)), Some((100, 2))], vec![Some((20, 3))]];
        let mut merge = merge(&logs, 10, &MergeState::default());
        merge.source_mut(1).unwrap().at_end = Read::Pending;
        merge.source_mut(0).unwrap().at_end = Read::Idle;
        assert_eq!(next(&mut merge), Some((Some((5, "r1".to_owned())), 0, 0)), "nothing in order can precede it");
        assert_eq!(merge.next(), Ok(Next::Wait), "the second log may yet bring something before its 20");
        merge.source_mut(1).unwrap().events.extend([Some((40, 4)); CONFIRMATIONS]);
        assert_eq!(next(&mut merge), Some((Some((20, "r3".to_owned())), 1, 0)));
        assert_eq!(merge.next(), Ok(Next::Wait));
        merge.source_mut(1).unwrap().at_end = Read::Idle;
        for at in 1..=CONFIRMATIONS as u64 {
            assert_eq!(next(&mut merge), Some((Some((40, "r4".to_owned())), 1, at)));
        }
        assert_eq!(next(&mut merge), Some((Some((100, "r2".to_owned())), 0, 1)));
        assert_eq!(merge.next(), Ok(Next::End));
        merge.source_mut(1).unwrap().events.push(Some((50, 5)));
        assert_eq!(merge.next(), Ok(Next::End), "nobody woke it");
        merge.wake(1);
        assert_eq!(next(&mut merge), Some((Some((50, "r5".to_owned())), 1, 9)));
    }
}
