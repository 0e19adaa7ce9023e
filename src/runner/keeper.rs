//! The thread that makes things last, so that the engine need not wait for the disk.
//!
//! Work comes through a channel of one place: a second snapshot waits until the first is durable. Each is carried out
//! in the one order that a crash cannot turn into a lie: lines, then the snapshot that counts them, then the parameters
//! that it justifies.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, anyhow};

use super::retry::Retry;
use crate::config::StoreConfig;
use crate::event::Name;
use crate::failpoint;
use crate::merge::MergeState;
use crate::store::archive::Change;
use crate::store::{self, DirArchive, ONE_LANE, StoreError, Witness};
use crate::telemetry::{Facts, Published};
use crate::transport::append::Appender;
use crate::transport::{Letter, Outlet};

/// Where things go.
pub struct Outlets {
    /// The snapshots.
    pub snapshots: Option<Snapshots>,
    /// Requests that were learned from.
    pub audit: Option<Appender>,
    /// Bad events and parameters.
    pub outlet: Box<dyn Outlet>,
    /// Where it is told what happens.
    pub facts: Arc<Facts>,
    /// What the system fails is retried, since a snapshot that is given up would be lost.
    pub retry: Retry,
}

/// Where the snapshots of a lane go.
pub struct Snapshots {
    /// The store, which lanes share.
    pub archive: Arc<Mutex<DirArchive>>,
    /// Its directory.
    pub dir: PathBuf,
    /// The lane.
    pub lane: String,
    /// What remembers how far it had come.
    pub witness: Witness,
}

impl Snapshots {
    /// The one lane of a store.
    pub fn open(store: &StoreConfig, keep: usize) -> Result<Self, StoreError> {
        let archive = Arc::new(Mutex::new(store::open(&store.dir, store.kind, keep)?));
        Ok(Self::new(archive, &store.dir, ONE_LANE))
    }

    fn new(archive: Arc<Mutex<DirArchive>>, dir: &Path, lane: &str) -> Self {
        Self { archive, dir: dir.to_owned(), lane: lane.to_owned(), witness: Witness::new(dir, lane) }
    }

    /// Another lane of the same store.
    pub fn of_lane(&self, lane: &str) -> Self {
        Self::new(self.archive.clone(), &self.dir, lane)
    }

    /// Makes the next generation of the lane durable; its number.
    pub fn commit(&self, retry: &Retry, head: &[u8], changes: &[Change]) -> anyhow::Result<u64> {
        let generation = retry.run("snapshot", || Ok(self.archive().commit(&self.lane, head, changes)?))?;
        failpoint::reach("after-persist");
        let cannot = "cannot note the snapshot beside its store";
        retry.run("snapshot", || self.witness.note(generation).context(cannot))?;
        Ok(generation)
    }

    /// The store.
    pub fn archive(&self) -> MutexGuard<'_, DirArchive> {
        // A commit is atomic in the store: whoever panicked left it whole.
        self.archive.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    /// Where in the logs all this is.
    pub positions: MergeState,
    /// Parameters to publish.
    pub params: Vec<(Name, Vec<u8>)>,
    /// What is told of them once they are published.
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

    /// Hands over work; waits while there is some before it. Fails if earlier work has failed.
    pub fn hand_over(&mut self, work: Work) -> anyhow::Result<()> {
        let sent = self.work.as_ref().is_some_and(|inbox| inbox.send(work).is_ok());
        if sent { Ok(()) } else { self.finish() }
    }

    /// Fails if earlier work has failed.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        if ended { self.finish() } else { Ok(()) }
    }

    /// Waits until all work that was handed over is done.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        let (done, news) = sync_channel(1);
        self.hand_over(Work { done: Some(done), ..Work::default() })?;
        match news.recv() {
            Ok(()) => Ok(()),
            Err(_) => self.finish(),
        }
    }

    /// Ends the thread, once all work is done.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.work = None;
        let Some(thread) = self.thread.take() else { return Err(anyhow!("the keeper has stopped")) };
        thread.join().unwrap_or_else(|_| Err(anyhow!("the keeper panicked; what was acknowledged before is intact")))
    }
}

impl Carry for Outlets {
    fn carry_out(&mut self, work: Work) -> anyhow::Result<()> {
        let Self { snapshots, audit, outlet, facts, retry } = self;
        retry
            .run("dead_letters", || outlet.dead_letters(&work.dead_letters).context("dead letters must not be lost"))?;
        if let Some(audit) = audit {
            retry.run("audit", || audit.append(&work.audit).context("audit.applied_log"))?;
        }
        if let (Some(snapshots), Some((head, changes))) = (snapshots, &work.snapshot) {
            let begun = Instant::now();
            failpoint::reach("before-persist");
            let generation = snapshots.commit(retry, head, changes)?;
            facts.snapshot(&snapshots.lane, generation, changes.len(), begun.elapsed());
        }
        if !work.params.is_empty() {
            retry.run("publish", || outlet.publish(&work.params))?;
            facts.published(work.told);
        }
        self.outlet.reached(&work.positions);
        if let Some(done) = work.done {
            // Whoever asked may have gone.
            let _ = done.send(());
        }
        Ok(())
    }
}
