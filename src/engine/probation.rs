//! Events whose timestamp no other event has confirmed yet.
//!
//! Once a space has a time, an event is *trusted* if it is at most `reach` ahead of the trusted events before it. One that is
//! further ahead is either the first after a gap in the traffic or wrong, and only later events can tell:
//!
//! - the space's time comes within `reach` of it (eight events lie there): it is released, in the order of time;
//! - [`CONTRADICTIONS`] trusted events of its side are newer than what it was written after: it is contradicted, and becomes a
//!   dead letter.
//!
//! What an event was written after is the time of its log when it was read, not the moment at which it reaches the engine. So the
//! outcome does not depend on how long a merge held it.
//!
//! The first events of a space have nothing to be compared with. They are taken at once, and a copy of each stays here until
//! the space has a time: one that is contradicted then is withdrawn, if it still waits for its counterpart.
//!
//! Fewer than eight events can be ahead of the eighth largest timestamp, so at most seven are held per space.

use super::{Event, Input, Side};
use crate::event::Name;
use crate::event_time::Largest;
use crate::wire::events::Parser;
use crate::wire::records::space::{HeldRecord, ProbationRecord, SideRecord};

/// How many later events of the same side contradict one that is ahead of all of them.
pub(super) const CONTRADICTIONS: usize = 64;

/// The events on probation of one space.
#[derive(Debug, Clone)]
pub(super) struct Probation {
    /// The largest timestamp of a trusted event.
    trusted_ms: Option<i64>,
    /// The newest trusted events of each side.
    recent: [Largest; 2],
    /// In the order of their keys.
    held: Vec<Held>,
}

/// An event on probation.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) ts_ms: i64,
    /// The time of its log when it was read.
    after_ms: i64,
    /// Whether it was taken already, and this is a copy.
    pub(super) is_taken: bool,
    /// Where it was read, for its dead letter.
    pub(super) place: String,
    pub(super) input: Input,
}

impl Probation {
    pub(super) fn new() -> Self {
        let recent = || Largest::new(CONTRADICTIONS);
        Self { trusted_ms: None, recent: [recent(), recent()], held: Vec::new() }
    }

    /// Whether the space has no time yet to compare events with.
    pub(super) fn is_starting(&self) -> bool {
        self.trusted_ms.is_none()
    }

    /// Whether an event is too far ahead to be taken at once.
    pub(super) fn is_ahead(&self, ts_ms: i64, reach_ms: u64) -> bool {
        self.trusted_ms.is_some_and(|trusted_ms| ts_ms > trusted_ms.saturating_add_unsigned(reach_ms))
    }

    /// Notes that an event was taken.
    pub(super) fn note_taken(&mut self, side: Side, ts_ms: i64) {
        self.recent[side as usize].insert(ts_ms);
        if !self.is_starting() {
            self.trusted_ms = self.trusted_ms.max(Some(ts_ms));
        }
    }

    /// Notes the space's time, once it has one.
    pub(super) fn note_time(&mut self, time_ms: Option<i64>) {
        self.trusted_ms = self.trusted_ms.max(time_ms);
    }

    /// Holds an event, or a copy of one that was taken.
    pub(super) fn hold(&mut self, input: Input, ts_ms: i64, is_taken: bool, place: String) {
        // Without a log it was written when it came.
        let after_ms = input.after_ms.or(self.trusted_ms).unwrap_or(i64::MIN);
        let at = self.held.partition_point(|held| held.input.key() <= input.key());
        self.held.insert(at, Held { ts_ms, after_ms, is_taken, place, input });
    }

    /// The earliest held event that is not too far ahead any more.
    pub(super) fn release(&mut self, reach_ms: u64) -> Option<Held> {
        let first = self.held.first().filter(|held| !self.is_starting() && !self.is_ahead(held.ts_ms, reach_ms))?;
        self.trusted_ms = self.trusted_ms.max(Some(first.ts_ms));
        Some(self.held.remove(0))
    }

    /// The earliest held event that enough later ones contradict.
    pub(super) fn contradicted(&mut self) -> Option<Held> {
        let contradicts = |held: &Held| self.recent[held.input.side as usize].smallest_if_full() > Some(held.after_ms);
        let at = self.held.iter().position(|held| !self.is_starting() && contradicts(held))?;
        let held = self.held.remove(at);
        if held.is_taken {
            // It was counted among the recent events before anything could contradict it.
            self.recent[held.input.side as usize].remove(held.ts_ms);
        }
        Some(held)
    }

    /// All that are held, in order: for the end of a log, where nothing can confirm or contradict them any more.
    pub(super) fn take_all(&mut self) -> Vec<Held> {
        std::mem::take(&mut self.held)
    }

    /// The largest timestamp of an event that was taken.
    pub(super) fn newest_ms(&self) -> Option<i64> {
        self.recent.iter().filter_map(Largest::largest).max()
    }

    /// What the held events take.
    pub(super) fn bytes(&self) -> usize {
        self.held.iter().map(|held| size_of::<Held>() + held.place.len() + held.input.bytes.len()).sum()
    }

    /// How many are held, copies included.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is held.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Events of a side that are held and were not taken.
    pub(super) fn pending(&self, side: Side) -> u64 {
        self.held.iter().filter(|held| !held.is_taken && held.input.side == side).count() as u64
    }

    /// As it is saved.
    pub(super) fn to_record(&self) -> ProbationRecord {
        let [recent_queries, recent_rewards] = self.recent.each_ref().map(Largest::to_record);
        let held = self.held.iter().map(Held::to_record).collect();
        ProbationRecord { trusted_ms: self.trusted_ms, recent_queries, recent_rewards, held }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub(super) fn from_record(record: ProbationRecord, space: &Name, parser: &Parser) -> Option<Self> {
        let ProbationRecord { trusted_ms, recent_queries, recent_rewards, held } = record;
        let recent = [Largest::from_record(recent_queries)?, Largest::from_record(recent_rewards)?];
        let held = held.into_iter().map(|held| Held::from_record(held, space, parser)).collect();
        Some(Self { trusted_ms, recent, held })
    }
}

impl Held {
    fn to_record(&self) -> HeldRecord {
        HeldRecord {
            ts_ms: self.ts_ms,
            after_ms: self.after_ms,
            is_taken: self.is_taken,
            place: self.place.clone(),
            side: match self.input.side {
                Side::Query => SideRecord::Query,
                Side::Reward => SideRecord::Reward,
            },
            bytes: self.input.bytes.clone(),
        }
    }

    /// Parses the event again. Its time and its space are what they were when it was held, however the configuration maps
    /// fields now.
    fn from_record(record: HeldRecord, space: &Name, parser: &Parser) -> Self {
        let HeldRecord { ts_ms, after_ms, is_taken, place, side, bytes } = record;
        let side = match side {
            SideRecord::Query => Side::Query,
            SideRecord::Reward => Side::Reward,
        };
        let mut input = Input::parse(parser, side, bytes, Some(ts_ms));
        match &mut input.event {
            Ok(Event::Query(event)) => (event.ts_ms, event.space) = (ts_ms, space.clone()),
            Ok(Event::Reward(event)) => (event.ts_ms, event.space) = (ts_ms, space.clone()),
            Err(_) => {}
        }
        Self { ts_ms, after_ms, is_taken, place, input }
    }
}
