//! The thread that makes effects durable, so that the engine need not wait for the disk.
//!
//! Work arrives through a channel of capacity one: a second snapshot waits until the first is durable. The order is
//! crash-safe: first the lines, then the snapshot that counts them, then the parameters of that snapshot.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, anyhow};

use super::retry::Retry;
use crate::event::Name;
use crate::failpoint;
use crate::merge::MergeState;
use crate::state::{Change, LocalLane};
use crate::telemetry::{Facts, Published};
use crate::transport::append::Appender;
use crate::transport::{Letter, Outlet};

/// Destinations of the work.
pub struct Outlets {
    /// The snapshots.
    pub snapshots: Option<LocalLane>,
    /// Requests that were learned from.
    pub audit: Option<Appender>,
    /// Dead letters and parameters.
    pub outlet: Box<dyn Outlet>,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries failures of the operating system, since an abandoned snapshot would be lost.
    pub retry: Retry,
}

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
    pub told: Vec<(Name, Published)>,
    /// Who wants to know when it is done.
    pub done: Option<SyncSender<()>>,
}

/// What makes work last.
pub trait Carry: Send + 'static {
    /// Carries out work, in the caller's thread.
    fn carry_out(&mut self, work: Work) -> anyhow::Result<()>;
}

/// The thread, as seen by the engine's.
pub struct Keeper {
    work: Option<SyncSender<Work>>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Keeper {
    /// Starts the thread.
    pub fn start(mut outlets: impl Carry) -> anyhow::Result<Self> {
        let (work, inbox) = sync_channel::<Work>(1);
        let run = move || inbox.iter().try_for_each(|work| outlets.carry_out(work));
        let thread = std::thread::Builder::new().name("keeper".to_owned()).spawn(run)?;
        Ok(Self { work: Some(work), thread: Some(thread) })
    }

    /// Submits work; waits while earlier work is queued. Fails if earlier work has failed.
    pub fn hand_over(&mut self, work: Work) -> anyhow::Result<()> {
        let sent = self.work.as_ref().is_some_and(|inbox| inbox.send(work).is_ok());
        if sent { Ok(()) } else { self.finish() }
    }

    /// Fails if earlier work has failed.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        if ended { self.finish() } else { Ok(()) }
    }

    /// Waits until all submitted work is done.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        let (done, news) = sync_channel(1);
        self.hand_over(Work { done: Some(done), ..Work::default() })?;
        match news.recv() {
            Ok(()) => Ok(()),
            Err(_) => self.finish(),
        }
    }

    /// Ends the thread once all work is done.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.work = None;
        let Some(thread) = self.thread.take() else {
            return Err(anyhow!("the thread that makes snapshots durable has stopped"));
        };
        thread.join().unwrap_or_else(|_| {
            Err(anyhow!("the thread that makes snapshots durable panicked; committed snapshots are intact"))
        })
    }
}

/// Makes a checkpoint if one is due, after publication: it may take a while. A failure costs no state, so it is reported, and
/// the next snapshot tries again.
pub fn checkpoint(lane: &mut LocalLane, created_ms: u64, facts: &Facts) {
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

impl Carry for Outlets {
    fn carry_out(&mut self, work: Work) -> anyhow::Result<()> {
        let Self { snapshots, audit, outlet, facts, retry } = self;
        retry.run("dead_letters", || outlet.dead_letters(&work.dead_letters).context("cannot write dead letters"))?;
        if let Some(audit) = audit {
            retry.run("audit", || audit.append(&work.audit).context("cannot write audit.applied_log"))?;
        }
        if let (Some(snapshots), Some((head, changes))) = (&mut *snapshots, &work.snapshot) {
            let begun = Instant::now();
            failpoint::reach("before-persist");
            let generation = retry.run("snapshot", || Ok(snapshots.commit(head, changes)?))?;
            facts.snapshot(snapshots.lane(), generation, changes.len(), begun.elapsed());
        }
        if !work.params.is_empty() {
            retry.run("publish", || outlet.publish(&work.params))?;
            facts.published(work.told);
        }
        self.outlet.reached(&work.positions);
        if let (Some(snapshots), true) = (snapshots, work.snapshot.is_some()) {
            checkpoint(snapshots, work.created_ms, facts);
        }
        if let Some(done) = work.done {
            // The receiver may be gone.
            let _ = done.send(());
        }
        Ok(())
    }
}
