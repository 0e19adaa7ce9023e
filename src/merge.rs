//! Several logs, each roughly in the order of time, merged into one in the contract's order.
//!
//! Each log is read ahead until it is `reorder_ms` past the earliest event held from it; the earliest of all logs goes
//! next. What is further out of order than that goes when it is met, and is counted. Memory is bounded by the window
//! and, should the clock of a log stand still, by a number of events and of bytes.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::engine::Input;

/// An event with where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Sourced {
    /// The event.
    pub input: Input,
    /// Index of the log.
    pub log: usize,
    /// Where in the log, counted from 1.
    pub line: u64,
}

/// The most events held of one log, and their most bytes.
const HELD_MAX: usize = 100_000;
const HELD_BYTES_MAX: usize = 256 << 20;

/// Merges logs of events, each an iterator that may fail.
pub struct Merge<I> {
    logs: Vec<Log<I>>,
    reorder_ms: u64,
    last_ms: Option<i64>,
    out_of_order: u64,
}

struct Log<I> {
    events: I,
    ended: bool,
    newest_ms: i64,
    held: BinaryHeap<Held>,
    held_bytes: usize,
    /// A bad event that was met: it goes at once.
    bad: Option<Sourced>,
}

/// Ordered so that the greatest is the one to go first.
struct Held(Sourced);

impl<I, E> Merge<I>
where
    I: Iterator<Item = Result<Sourced, E>>,
{
    /// Merges `logs`.
    pub fn new(logs: impl IntoIterator<Item = I>, reorder_ms: u64) -> Self {
        let log = |events| Log {
            events,
            ended: false,
            newest_ms: i64::MIN,
            held: BinaryHeap::new(),
            held_bytes: 0,
            bad: None,
        };
        Self { logs: logs.into_iter().map(log).collect(), reorder_ms, last_ms: None, out_of_order: 0 }
    }

    /// Events that went after a later one.
    pub fn out_of_order(&self) -> u64 {
        self.out_of_order
    }

    fn earliest(&self) -> Option<usize> {
        let heads = self.logs.iter().enumerate().filter_map(|(i, log)| log.held.peek().map(|held| (held, i)));
        heads.max_by(|a, b| a.0.cmp(b.0).then(b.1.cmp(&a.1))).map(|(_, i)| i)
    }
}

impl<I, E> Iterator for Merge<I>
where
    I: Iterator<Item = Result<Sourced, E>>,
{
    type Item = Result<Sourced, E>;

    fn next(&mut self) -> Option<Self::Item> {
        for log in &mut self.logs {
            if let Err(error) = log.read_ahead(self.reorder_ms) {
                return Some(Err(error));
            }
            if let Some(bad) = log.bad.take() {
                return Some(Ok(bad));
            }
        }
        let earliest = self.earliest()?;
        let log = &mut self.logs[earliest];
        let Held(event) = log.held.pop()?;
        log.held_bytes -= event.input.bytes();
        let ts_ms = event.input.key().map(|key| key.0);
        self.out_of_order += u64::from(ts_ms < self.last_ms);
        self.last_ms = self.last_ms.max(ts_ms);
        Some(Ok(event))
    }
}

impl<I, E> Log<I>
where
    I: Iterator<Item = Result<Sourced, E>>,
{
    /// Reads until the earliest held event is out of the window, or a bad event is met.
    fn read_ahead(&mut self, reorder_ms: u64) -> Result<(), E> {
        let room = |log: &Self| log.held.len() < HELD_MAX && log.held_bytes < HELD_BYTES_MAX;
        while !self.ended && self.bad.is_none() && room(self) && !self.is_ahead(reorder_ms) {
            match self.events.next().transpose()? {
                None => self.ended = true,
                Some(event) => match event.input.key().map(|key| key.0) {
                    None => self.bad = Some(event),
                    Some(ts_ms) => {
                        self.newest_ms = self.newest_ms.max(ts_ms);
                        self.held_bytes += event.input.bytes();
                        self.held.push(Held(event));
                    }
                },
            }
        }
        Ok(())
    }

    fn is_ahead(&self, reorder_ms: u64) -> bool {
        let earliest = self.held.peek().and_then(|held| held.0.input.key()).map(|key| key.0);
        earliest.is_some_and(|ts_ms| self.newest_ms > ts_ms.saturating_add_unsigned(reorder_ms))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.input.key().cmp(&self.0.input.key()).then(other.0.line.cmp(&self.0.line))
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
    use std::convert::Infallible;

    fn parser() -> Parser {
        let settings = Config::default().check().unwrap();
        Parser::new(settings.events, settings.reward, settings.missing_propensities)
    }

    fn reward(ts_ms: i64, id: u8, log: usize, line: u64) -> Result<Sourced, Infallible> {
        let bytes = format!(r#"{{"request_id":"r{id}","ts_ms":{ts_ms},"reward":1}}"#).into_bytes();
        Ok(Sourced { input: Input::parse(&parser(), Side::Reward, bytes), log, line })
    }

    fn merged(logs: &[Vec<(i64, u8)>], reorder_ms: u64) -> (Vec<(i64, String)>, u64) {
        let events = logs.iter().enumerate().map(|(log, events)| {
            let of_log = |(line, &(ts_ms, id)): (usize, &(i64, u8))| reward(ts_ms, id, log, line as u64);
            events.iter().enumerate().map(of_log).collect::<Vec<_>>().into_iter()
        });
        let mut merge = Merge::new(events, reorder_ms);
        let keys = merge.by_ref().map(|event| {
            let Ok(event) = event;
            let (ts_ms, _, _, id, _) = event.input.key().unwrap();
            (ts_ms, id.to_owned())
        });
        let keys = keys.collect();
        (keys, merge.out_of_order())
    }

    proptest! {
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
                logs[log].push((*ts_ms, *id));
            }
            let mut expected: Vec<_> = events.iter().map(|(ts_ms, id, _)| (*ts_ms, format!("r{id}"))).collect();
            expected.sort();
            prop_assert_eq!(merged(&logs, 10), (expected, 0));
        }
    }

    #[test]
    fn what_is_too_late_goes_when_it_is_met() {
        let logs = [vec![(100, 1), (200, 2), (50, 3), (300, 4)]];
        let (keys, out_of_order) = merged(&logs, 10);
        assert_eq!(keys.iter().map(|(ts_ms, _)| *ts_ms).collect::<Vec<_>>(), [100, 50, 200, 300]);
        assert_eq!(out_of_order, 1);
    }

    #[test]
    fn bad_events_and_errors_come_through() {
        let bad = |line| Ok(Sourced { input: Input::parse(&parser(), Side::Query, b"{".to_vec()), log: 0, line });
        let events = vec![bad(1), Err("torn"), bad(3)];
        let merge = Merge::new([events.into_iter()], 10);
        let lines: Vec<_> = merge.map(|event| event.map(|event| event.line)).collect();
        assert_eq!(lines, [Ok(1), Err("torn"), Ok(3)]);
    }
}
