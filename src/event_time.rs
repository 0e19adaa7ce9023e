//! Event time that no single event can move.
//!
//! An event time is the k-th largest timestamp observed so far: k - 1 events with arbitrary timestamps, however far in the
//! future, leave it where the other events have brought it. A real gap in the traffic is followed as soon as k events
//! lie beyond it. It never goes back, and depends on what was observed alone.

use crate::wire::records::clock::{ClockRecord, LargestRecord};

/// How many events have to agree before time moves: seven wrong timestamps move nothing.
pub const CONFIRMATIONS: usize = 8;

/// A clock that shows the k-th largest timestamp observed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTime {
    newest: Largest,
    time_ms: Option<i64>,
}

/// The largest of many numbers, in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Largest {
    most: usize,
    values: Vec<i64>,
}

impl EventTime {
    /// A clock that has observed nothing, and shows a time after `confirmations` observations (at least one).
    pub fn new(confirmations: usize) -> Self {
        Self { newest: Largest::new(confirmations.max(1)), time_ms: None }
    }

    /// A clock that starts at a known time.
    pub fn starting_at(confirmations: usize, time_ms: i64) -> Self {
        Self { time_ms: Some(time_ms), ..Self::new(confirmations) }
    }

    /// The time, once enough was observed.
    pub fn time_ms(&self) -> Option<i64> {
        self.time_ms
    }

    /// The largest timestamp observed that is at most `reach_ms` ahead of the time: the newest that is plausible.
    pub fn newest_within(&self, reach_ms: u64) -> Option<i64> {
        let limit_ms = self.time_ms?.saturating_add_unsigned(reach_ms);
        let newest = self.newest.values.iter().rev().find(|ts_ms| **ts_ms <= limit_ms);
        self.time_ms.max(newest.copied())
    }

    /// Takes a timestamp into account.
    pub fn observe(&mut self, ts_ms: i64) {
        self.newest.insert(ts_ms);
        self.time_ms = self.time_ms.max(self.newest.smallest_if_full());
    }

    /// Takes back an observation that turned out to be wrong; the time itself stays.
    pub fn retract(&mut self, ts_ms: i64) {
        self.newest.remove(ts_ms);
    }
}

impl Largest {
    /// None so far, of which at most `most` are kept.
    pub fn new(most: usize) -> Self {
        Self { most, values: Vec::new() }
    }

    /// Keeps a number if it is among the largest.
    pub fn insert(&mut self, value: i64) {
        let at = self.values.partition_point(|&kept| kept <= value);
        if self.values.len() < self.most {
            self.values.insert(at, value);
        } else if at > 0 {
            // The smallest makes room.
            self.values.copy_within(1..at, 0);
            self.values[at - 1] = value;
        }
    }

    /// Forgets one number of this value, if it is kept.
    pub fn remove(&mut self, value: i64) {
        if let Ok(at) = self.values.binary_search(&value) {
            self.values.remove(at);
        }
    }

    /// The largest of all.
    pub fn largest(&self) -> Option<i64> {
        self.values.last().copied()
    }

    /// The smallest of the largest, once there are as many as are kept.
    pub fn smallest_if_full(&self) -> Option<i64> {
        self.values.first().copied().filter(|_| self.values.len() == self.most)
    }

    /// As it is saved.
    pub fn to_record(&self) -> LargestRecord {
        LargestRecord { most: self.most as u64, values: self.values.clone() }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub fn from_record(record: LargestRecord) -> Option<Self> {
        let LargestRecord { most, values } = record;
        let most = usize::try_from(most).ok()?;
        (most > 0 && values.len() <= most && values.is_sorted()).then_some(Self { most, values })
    }
}

impl EventTime {
    /// As it is saved.
    pub fn to_record(&self) -> ClockRecord {
        ClockRecord { newest: self.newest.to_record(), time_ms: self.time_ms }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub fn from_record(record: ClockRecord) -> Option<Self> {
        let ClockRecord { newest, time_ms } = record;
        let newest = Largest::from_record(newest)?;
        (time_ms >= newest.smallest_if_full()).then_some(Self { newest, time_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against sorting all of them.
        #[test]
        fn shows_the_kth_largest(values in prop::collection::vec(any::<i8>(), 0..60), k in 1..12_usize) {
            let mut clock = EventTime::new(k);
            let mut seen: Vec<i64> = Vec::new();
            for value in values {
                clock.observe(i64::from(value));
                seen.push(i64::from(value));
                seen.sort_unstable();
                let expected = seen.len().checked_sub(k).map(|at| seen[at]);
                prop_assert_eq!(clock.time_ms(), expected);
                prop_assert_eq!(EventTime::from_record(clock.to_record()), Some(clock.clone()));
            }
        }

        /// Wrong timestamps, fewer than the confirmations, never bring the clock beyond the true ones.
        #[test]
        fn a_minority_moves_nothing(
            wrong in prop::collection::vec((any::<i64>(), any::<prop::sample::Index>()), 0..CONFIRMATIONS),
            steps in prop::collection::vec(0..100_i64, 1..60),
        ) {
            let mut now = 1_700_000_000_000;
            let mut events: Vec<(i64, bool)> = steps.iter().map(|step| { now += step; (now, true) }).collect();
            for (ts_ms, at) in wrong {
                events.insert(at.index(events.len() + 1), (ts_ms, false));
            }
            let (mut clock, mut newest) = (EventTime::new(CONFIRMATIONS), i64::MIN);
            for (ts_ms, is_true) in events {
                clock.observe(ts_ms);
                newest = if is_true { newest.max(ts_ms) } else { newest };
                prop_assert!(clock.time_ms() <= Some(newest));
            }
        }
    }

    #[test]
    fn a_retracted_observation_confirms_nothing() {
        let mut clock = EventTime::new(2);
        [5, 900].into_iter().for_each(|ts_ms| clock.observe(ts_ms));
        assert_eq!(clock.time_ms(), Some(5));
        clock.retract(900);
        clock.observe(7);
        assert_eq!(clock.time_ms(), Some(5));
        clock.observe(8);
        assert_eq!(clock.time_ms(), Some(7));
    }
}
