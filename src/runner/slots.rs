//! The lanes of a process. Any thread may open, step or close a lane; none of these delays another lane.
//!
//! Each lane has a slot. A claim on the slot ends when the lane is revoked: an opening that is under way then gives up, and its
//! result is dropped. Opening and closing a lane exclude each other; workers skip a lane that somebody else holds.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::error::{LaneError, Result};
use super::lane::{Lane, Stepped};
use super::retry::Retry;
use crate::merge::{Merge, MergeState};
use crate::transport::{Log, lock};

/// Where the logs of a lane come from.
pub trait Feed: Send {
    /// A log.
    type Log: Log;

    /// Adds new logs to the merge and wakes those that have news.
    fn refresh(&mut self, merge: &mut Merge<Self::Log>) -> Result<()>;

    /// A snapshot with these positions is durable.
    fn reached(&mut self, _positions: &MergeState) {}
}

/// A lane with its feed.
pub struct Running<F: Feed> {
    /// The lane.
    pub lane: Lane<F::Log>,
    /// Its feed.
    pub feed: F,
}

/// The right to open and step a lane, until it is revoked.
#[derive(Clone, Default)]
pub struct Turn {
    over: Arc<AtomicBool>,
    given_up: Arc<AtomicBool>,
}

impl Turn {
    /// Whether the lane was revoked.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Set to end the transactions of the lane at once: an opening that is revoked, or a lane that is lost.
    pub fn given_up(&self) -> &Arc<AtomicBool> {
        &self.given_up
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.over, &other.over)
    }

    fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
    }
}

/// The place of a lane in this process.
struct Slot<F: Feed> {
    turn: Mutex<Option<Turn>>,
    /// The turn in which the open lane was opened.
    opened_in: Mutex<Option<Turn>>,
    /// Held while the lane is opened or closed.
    changing: Mutex<()>,
    lane: Mutex<Option<Running<F>>>,
    /// Threads that wait for the lane: workers leave it to them.
    wanted: AtomicUsize,
    pause: Mutex<Option<Pause>>,
    at_end: AtomicBool,
}

/// A pause after a failed read.
#[derive(Clone, Copy)]
struct Pause {
    until: Duration,
    next: Duration,
}

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The lanes of a process, by number.
pub struct Slots<F: Feed> {
    slots: BTreeMap<i32, Slot<F>>,
    retry: Retry,
}

/// How a lane was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// It was not open.
    Absent,
    /// Everything is committed.
    Whole,
    /// Another instance resumes from its last committed snapshot.
    Dropped,
}

impl<F: Feed> Slots<F> {
    /// Slots of these lanes, none open.
    pub fn new(lanes: impl IntoIterator<Item = i32>, retry: Retry) -> Self {
        Self { slots: lanes.into_iter().map(|lane| (lane, Slot::default())).collect(), retry }
    }

    /// Slots of open lanes that never move.
    pub fn of(open: impl IntoIterator<Item = (i32, Running<F>)>, retry: Retry) -> Self {
        let slot = |running| Slot { lane: Mutex::new(Some(running)), ..Slot::default() };
        Self { slots: open.into_iter().map(|(lane, running)| (lane, slot(running))).collect(), retry }
    }

    /// The lanes.
    pub fn lanes(&self) -> impl Iterator<Item = i32> {
        self.slots.keys().copied()
    }

    /// The lanes that are assigned to this process, open or not.
    pub fn assigned(&self) -> Vec<i32> {
        self.slots.iter().filter(|(_, slot)| lock(&slot.turn).is_some()).map(|(lane, _)| *lane).collect()
    }

    /// Begins a turn of a lane, which ends the one before it.
    pub fn assign(&self, lane: i32) -> Turn {
        let turn = Turn::default();
        if let Some(slot) = self.slots.get(&lane)
            && let Some(before) = lock(&slot.turn).replace(turn.clone())
        {
            before.over.store(true, Ordering::SeqCst);
            before.give_up();
        }
        turn
    }

    /// Ends the turn of a lane; an opening that is under way gives up, and so do the transactions of a lost lane. `None` if the
    /// lane has no turn.
    pub fn end_turn(&self, lane: i32, lost: bool) -> Option<Turn> {
        let slot = self.slots.get(&lane)?;
        let turn = lock(&slot.turn).take()?;
        turn.over.store(true, Ordering::SeqCst);
        // An opening has committed nothing that a new owner would miss.
        if lost || slot.lane.try_lock().is_ok_and(|held| held.is_none()) {
            turn.give_up();
        }
        Some(turn)
    }

    /// Opens a lane, unless its turn is over by then. Retries what may succeed later. Returns whether the lane is open.
    pub fn open(&self, lane: i32, turn: &Turn, open: impl FnMut() -> Result<Running<F>>) -> Result<bool> {
        let Some(slot) = self.slots.get(&lane) else { return Ok(false) };
        let _changing = lock(&slot.changing);
        // One of an earlier turn.
        if let Some(mut before) = slot.hold().take() {
            let _ = before.lane.close();
        }
        if turn.is_over() {
            return Ok(false);
        }
        let opened = self.retry.or_until(turn.over.clone()).run("open_lane", open);
        let mut opened = match opened {
            Err(_) if turn.is_over() => return Ok(false),
            opened => opened?,
        };
        let mut held = slot.hold();
        if turn.is_over() {
            drop(held);
            let _ = opened.lane.close();
            return Ok(false);
        }
        slot.at_end.store(false, Ordering::Release);
        *lock(&slot.opened_in) = Some(turn.clone());
        *held = Some(opened);
        Ok(true)
    }

    /// Closes the lane of a turn that has ended: with a last snapshot, or, if it is lost, without. A later turn may have begun
    /// meanwhile; its lane stays open.
    pub fn close(&self, lane: i32, ended: &Turn, lost: bool) -> Result<Closed> {
        let Some(slot) = self.slots.get(&lane) else { return Ok(Closed::Absent) };
        let _changing = lock(&slot.changing);
        if !lock(&slot.opened_in).as_ref().is_some_and(|turn| turn.is(ended)) {
            return Ok(Closed::Absent);
        }
        let Some(mut running) = slot.hold().take() else { return Ok(Closed::Absent) };
        // What the keeper fails with first is why the lane ends.
        let last = if lost { Ok(()) } else { running.lane.snapshot() };
        let closed = last.and(running.lane.close());
        if let Some(positions) = running.lane.take_reached() {
            running.feed.reached(&positions);
        }
        match closed {
            Ok(()) if !lost => Ok(Closed::Whole),
            Err(error) if lost || error.is_taken() => {
                tracing::warn!(lane, %error, "cannot take the last snapshot of a lane");
                Ok(Closed::Dropped)
            }
            Ok(()) => Ok(Closed::Dropped),
            Err(error) => Err(error),
        }
    }

    /// Processes some events of a lane: how many. `None` if the lane is closed, or if another thread holds it.
    pub fn step(&self, lane: i32) -> Result<Option<u64>> {
        let Some(slot) = self.slots.get(&lane) else { return Ok(None) };
        let now = self.retry.clock().now();
        if slot.wanted.load(Ordering::Acquire) > 0 || slot.is_paused(now) {
            return Ok(None);
        }
        let mut held = match slot.lane.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let Some(Running { lane, feed }) = &mut *held else { return Ok(None) };
        let mut step = || {
            feed.refresh(&mut lane.merge)?;
            lane.step_some()
        };
        let (events, last) = match step() {
            Err(LaneError::Transient(error)) if self.retry.is_patient() => {
                // All logs of the lane wait, so that readable ones do not run ahead of the others.
                self.retry.facts().failed(READ, &error);
                slot.pause(now);
                return Ok(Some(0));
            }
            stepped => stepped?,
        };
        if lock(&slot.pause).take().is_some() {
            self.retry.facts().succeeded(READ);
        }
        if let Some(positions) = lane.take_reached() {
            feed.reached(&positions);
        }
        slot.at_end.store(last == Some(Stepped::End), Ordering::Release);
        Ok(Some(events))
    }

    /// Whether every lane is open and has read all of its logs.
    pub fn at_end(&self) -> bool {
        self.slots.values().all(|slot| slot.at_end.load(Ordering::Acquire))
    }

    /// Whether a lane has read all of its logs.
    pub fn is_at_end(&self, lane: i32) -> bool {
        self.slots.get(&lane).is_some_and(|slot| slot.at_end.load(Ordering::Acquire))
    }

    /// Calls `look` with all open lanes, by number.
    pub fn look<T>(&self, look: impl FnOnce(&[(i32, &Running<F>)]) -> T) -> T {
        let held: Vec<(i32, MutexGuard<'_, Option<Running<F>>>)> =
            self.slots.iter().map(|(lane, slot)| (*lane, slot.hold())).collect();
        let open: Vec<(i32, &Running<F>)> =
            held.iter().filter_map(|(lane, held)| Some((*lane, held.as_ref()?))).collect();
        look(&open)
    }

    /// Takes out all open lanes.
    pub fn take_open(&self) -> Vec<Running<F>> {
        self.slots.values().filter_map(|slot| slot.hold().take()).collect()
    }
}

/// Name of the retried operation that reads logs.
const READ: &str = "read";

impl<F: Feed> Default for Slot<F> {
    fn default() -> Self {
        Self {
            turn: Mutex::new(None),
            opened_in: Mutex::new(None),
            changing: Mutex::new(()),
            lane: Mutex::new(None),
            wanted: AtomicUsize::new(0),
            pause: Mutex::new(None),
            at_end: AtomicBool::new(false),
        }
    }
}

impl<F: Feed> Slot<F> {
    /// Waits for the lane; workers leave it alone meanwhile.
    fn hold(&self) -> MutexGuard<'_, Option<Running<F>>> {
        self.wanted.fetch_add(1, Ordering::AcqRel);
        let held = lock(&self.lane);
        self.wanted.fetch_sub(1, Ordering::AcqRel);
        held
    }

    fn is_paused(&self, now: Duration) -> bool {
        lock(&self.pause).is_some_and(|pause| now < pause.until)
    }

    fn pause(&self, now: Duration) {
        let mut pause = lock(&self.pause);
        let this = pause.map_or(PAUSE_MIN, |before| before.next);
        *pause = Some(Pause { until: now + this, next: (2 * this).min(PAUSE_MAX) });
    }
}
