//! How the work of a lane becomes durable: a [`Commit`] strategy, and the thread that carries it out so that the engine need
//! not wait for the disk or the brokers.
//!
//! [`Local`] writes lines, then the snapshot that counts them, then publishes the parameters of that snapshot.
//! `Transactional` in [`claim`](super::claim) puts state, parameters and dead letters into one Kafka transaction.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use super::error::{Doing, LaneError, Result};
use super::retry::Retry;
use crate::event::Name;
use crate::failpoint;
use crate::merge::MergeState;
use crate::state::{Change, LaneStore};
use crate::store::SnapshotStore;
use crate::telemetry::{Facts, Published};
use crate::transport::{Letter, Lines, Outlet, lock};

/// What is to be made durable together.
#[derive(Default)]
pub struct Work {
    /// Lines of applied requests.
    pub audit: Vec<u8>,
    /// Bad events.
    pub dead_letters: Vec<Letter>,
    /// A snapshot: its head and what has changed.
    pub snapshot: Option<(Vec<u8>, Vec<Change>)>,
    /// When the snapshot was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// Where in the logs all this is.
    pub positions: MergeState,
    /// Parameters to publish.
    pub params: Vec<(Name, Vec<u8>)>,
    /// Reported once they are published.
    pub news: Vec<(Name, Published)>,
}

/// Makes work durable, then publishes it.
pub trait Commit: Send {
    /// Carries out work, in the caller's thread. Retries what may succeed later.
    fn carry_out(&mut self, work: Work) -> Result<()>;
}

/// Snapshots in a store of this process; parameters are published after the snapshot that holds them.
pub struct Local<S> {
    /// The snapshots; without them nothing outlives the run.
    pub snapshots: Option<LaneStore<S>>,
    /// Requests that were learned from.
    pub audit: Option<Box<dyn Lines>>,
    /// Dead letters and parameters.
    pub outlet: Box<dyn Outlet>,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries what may succeed later, since an abandoned snapshot would be lost.
    pub retry: Retry,
}

impl<S: SnapshotStore> Commit for Local<S> {
    fn carry_out(&mut self, work: Work) -> Result<()> {
        let Self { snapshots, audit, outlet, facts, retry } = self;
        retry.run("dead_letters", || {
            outlet.dead_letters(&work.dead_letters).doing(|| "cannot write dead letters".to_owned())
        })?;
        if let Some(audit) = audit {
            append(retry, &mut **audit, &work.audit)?;
        }
        if let (Some(snapshots), Some((head, changes))) = (&mut *snapshots, &work.snapshot) {
            let begun = Instant::now();
            failpoint::reach("before-persist");
            let generation = retry.run("snapshot", || Ok(snapshots.commit(head, changes)?))?;
            facts.snapshot(snapshots.lane(), generation, changes.len(), begun.elapsed());
        }
        if !work.params.is_empty() {
            retry.run("publish", || Ok(outlet.publish(&work.params)?))?;
            facts.published(work.news);
        }
        if let (Some(snapshots), true) = (snapshots, work.snapshot.is_some()) {
            checkpoint(snapshots, work.created_ms, facts);
        }
        Ok(())
    }
}

/// Appends lines to the log of applied requests.
pub(super) fn append(retry: &Retry, audit: &mut dyn Lines, lines: &[u8]) -> Result<()> {
    retry.run("audit", || audit.append(lines).doing(|| "cannot write audit.applied_log".to_owned()))
}

/// Makes a checkpoint if one is due, after publication: it may take a while. A failure costs no state, so it is reported, and
/// the next snapshot tries again.
pub(super) fn checkpoint<S: SnapshotStore>(lane: &mut LaneStore<S>, created_ms: u64, facts: &Facts) {
    match lane.checkpoint_if_due(created_ms) {
        Ok(made) => {
            facts.succeeded("checkpoint");
            if let Some(made) = made {
                tracing::info!(lane = lane.lane(), generation = made.generation, "checkpoint");
            }
        }
        Err(error) => facts.failed("checkpoint", &error.into()),
    }
}

/// Submitted work that is not done: one at work and one waiting. A lane that has more to submit waits.
const WORK_MAX: usize = 2;

/// Carries out the work of a lane in order, on a thread of its own or in the caller's.
pub struct Keeper {
    how: How,
    /// Submitted work that is not done.
    undone: Arc<AtomicUsize>,
    /// Positions of the newest durable snapshot, until somebody takes them.
    reached: Arc<Mutex<Option<MergeState>>>,
}

enum How {
    Here(Box<dyn Commit>),
    Thread {
        work: SyncSender<Box<Work>>,
        thread: JoinHandle<Result<()>>,
    },
    /// With the kind of error that ended it.
    Ended(Option<LaneError>),
}

impl Keeper {
    /// Starts a thread that carries out the work.
    pub fn start(mut commit: Box<dyn Commit>) -> Result<Self> {
        let (work, inbox) = sync_channel::<Box<Work>>(WORK_MAX);
        let (undone, reached) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(None)));
        let (left, newest) = (undone.clone(), reached.clone());
        let run = move || {
            for work in inbox {
                carry_out(&mut *commit, *work, &newest)?;
                left.fetch_sub(1, Ordering::Release);
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().name("keeper".to_owned()).spawn(run)?;
        Ok(Self { how: How::Thread { work, thread }, undone, reached })
    }

    /// Carries out the work where it is submitted.
    pub fn here(commit: Box<dyn Commit>) -> Self {
        Self { how: How::Here(commit), undone: Arc::default(), reached: Arc::default() }
    }

    /// Whether work can be submitted without waiting.
    pub fn has_room(&self) -> bool {
        self.undone.load(Ordering::Acquire) < WORK_MAX
    }

    /// Submits work; waits while earlier work is queued. Fails if earlier work has failed.
    pub fn submit(&mut self, work: Work) -> Result<()> {
        match &mut self.how {
            How::Here(commit) => {
                let done = carry_out(&mut **commit, work, &self.reached);
                self.end_if_failed(done)
            }
            How::Thread { work: inbox, .. } => {
                self.undone.fetch_add(1, Ordering::Release);
                let sent = inbox.send(Box::new(work)).is_ok();
                if sent { Ok(()) } else { self.finish() }
            }
            How::Ended(cause) => Err(stopped(cause.as_ref())),
        }
    }

    /// Fails if earlier work has failed.
    pub fn check(&mut self) -> Result<()> {
        match &self.how {
            How::Thread { thread, .. } if thread.is_finished() => self.finish(),
            How::Ended(cause) => Err(stopped(cause.as_ref())),
            _ => Ok(()),
        }
    }

    /// Whoever asks later learns of the same kind of error.
    fn end_if_failed(&mut self, done: Result<()>) -> Result<()> {
        if let Err(error) = &done {
            self.how = How::Ended(error.taken());
        }
        done
    }

    /// Positions of the newest snapshot that became durable since the last call.
    pub fn take_reached(&self) -> Option<MergeState> {
        lock(&self.reached).take()
    }

    /// Ends once all work is done.
    pub fn finish(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.how, How::Ended(None)) {
            How::Here(_) => Ok(()),
            How::Thread { work, thread } => {
                drop(work);
                let panicked = "the thread that makes snapshots durable panicked; committed snapshots are intact";
                let done = thread.join().unwrap_or_else(|_| Err(LaneError::last(panicked)));
                self.end_if_failed(done)
            }
            How::Ended(cause) => {
                let error = stopped(cause.as_ref());
                self.how = How::Ended(cause);
                Err(error)
            }
        }
    }
}

fn carry_out(commit: &mut dyn Commit, mut work: Work, reached: &Mutex<Option<MergeState>>) -> Result<()> {
    let positions = work.snapshot.is_some().then(|| std::mem::take(&mut work.positions));
    commit.carry_out(work)?;
    if positions.is_some() {
        *lock(reached) = positions;
    }
    Ok(())
}

fn stopped(cause: Option<&LaneError>) -> LaneError {
    let stopped = || LaneError::last("the thread that makes snapshots durable has stopped");
    cause.and_then(LaneError::taken).unwrap_or_else(stopped)
}
