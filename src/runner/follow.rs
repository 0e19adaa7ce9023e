//! `learn`: worker threads step the lanes of this process, while the calling thread opens lanes and reports progress.
//!
//! | thread | does |
//! |---|---|
//! | `engine` (calls [`Run::follow`]) | opens and closes lanes by asking others to, reports status |
//! | `worker-n` | steps lanes: reads, joins, learns |
//! | `keeper`, one per lane | makes snapshots durable and publishes them |
//! | `kafka` | polls the brokers for events |
//! | `metadata` | asks the brokers whether topics and group have changed |
//!
//! None of them waits for another, except that a lane waits for its own keeper.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::commit::Keeper;
use super::error::{Doing, LaneError, Result};
use super::lane::{Lane, Places};
use super::slots::{Feed, Running, Slots};
use super::{DEAD_LETTERS_BYTES, Retry};
use crate::config::{Config, Lanes, Settings, TransportKind};
use crate::engine::{Engine, Totals};
use crate::merge::{Merge, MergeState};
use crate::state::running::RunningStore;
use crate::state::{LocalLane, generations};
use crate::store::{DirStore, ONE_LANE, Shared};
use crate::telemetry::{News, Status, Unread};
use crate::transport::append::Appender;
use crate::transport::directory::Directory;
use crate::transport::file::{AtEnd, LogFile};
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::params::{Files, ParamsDir};
use crate::transport::{Bell, Lines, lock};
use crate::wire::events::Parser;

/// Options of a run.
pub struct Run<'a> {
    /// Whether it stops at the current end of its inputs.
    pub once: bool,
    /// Whether lost messages are skipped.
    pub accept_gap: bool,
    /// The configuration.
    pub config: &'a Config,
    /// The validated configuration.
    pub settings: &'a Settings,
    /// Set to stop the run.
    pub stop: &'a Arc<AtomicBool>,
    /// Receives progress reports.
    pub status: &'a Status,
    /// Receives the store once it is open.
    pub store: &'a RunningStore,
    /// Runtime for admin requests to the brokers.
    pub runtime: &'a Handle,
}

/// Result of a run.
pub struct Outcome {
    /// The engine of each lane.
    pub engines: Vec<Engine>,
    /// Events that arrived beyond the reorder window.
    pub out_of_order: u64,
}

/// Interval of progress lines in the log.
const PROGRESS_EVERY: Duration = Duration::from_secs(30);

/// Interval of status updates; longer if an update takes more than this share of the time.
const STATUS_EVERY: Duration = Duration::from_millis(250);
const STATUS_SHARE: f64 = 0.01;

/// How long idle threads wait for news.
const IDLE: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// Runs until it is done or stopped. `None` if it was stopped before it started.
    pub fn follow(&self) -> anyhow::Result<Option<Outcome>> {
        let outcome = match self.config.transport.kind {
            TransportKind::File => self.follow_files(),
            TransportKind::Kafka => self.follow_topics(),
        };
        Ok(outcome?)
    }

    pub(super) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// The daemon retries what may succeed later; `--once` fails with an exit code.
    pub(super) fn retry(&self) -> Retry {
        if self.once { Retry::never() } else { Retry::until(self.stop.clone(), self.status.facts()) }
    }

    /// How long an event is held for earlier ones. A run that ends waits for all that is there, and for nothing else.
    pub(super) fn hold(&self) -> Option<Duration> {
        (!self.once).then(|| Duration::from_millis(self.config.join.live_hold_ms))
    }

    /// Opens the store. The daemon retries while the disk is full.
    pub(super) fn open_store(&self) -> Result<Shared<DirStore>> {
        // After a reload it is open already.
        if let Some(store) = self.store.get() {
            return Ok(store);
        }
        let store = self.retry().run("open_store", || Ok(super::open_store(&self.config.store)?))?;
        if let Err(error) = self.store.set(&self.config.store.dir, store.clone()) {
            tracing::warn!(%error, "cannot write backup-token to store.dir; `snapshots backup` has to wait for a restart");
        }
        Ok(store)
    }

    /// The snapshots of a lane in the store.
    pub(super) fn lane_store(&self, store: &Shared<DirStore>, lane: &str) -> LocalLane {
        LocalLane::new(store.clone(), lane, (&self.config.snapshot).into())
    }

    /// The log of applied requests.
    pub(super) fn audit(&self) -> Option<Box<dyn Lines>> {
        let path = self.config.audit.path()?;
        Some(Box::new(Appender::new(&path)))
    }

    /// Opens something. A daemon retries while the brokers or the disk cannot answer: `None` if it has to stop before they do.
    pub(super) fn open_patiently<T>(&self, open: impl FnMut() -> Result<T>) -> Result<Option<T>> {
        match self.retry().run("open_lane", open) {
            Err(_) if !self.once && !self.goes_on() => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn follow_files(&self) -> Result<Option<Outcome>> {
        let store = self.open_store()?;
        let Some(running) = self.open_patiently(|| self.open_files(&store))? else { return Ok(None) };
        let slots = Slots::of([(0, running)], self.retry());
        tracing::info!(dir = %self.config.transport.file.dir.display(), once = self.once, "learning");
        self.status.set_ready(true);
        let report = |lanes: &[(i32, &Running<FileFeed>)], news: &mut News| {
            for (_, Running { lane, feed }) in lanes {
                news.unread = Some(Unread::of(feed.directory.unread(&lane.merge)));
                news.skipped_files = feed.directory.skipped(&lane.merge);
            }
        };
        self.drive(&slots, &Bell::default(), &mut |_| Ok(()), &report)?;
        finish(&slots).map(Some)
    }

    fn open_files(&self, store: &Shared<DirStore>) -> Result<Running<FileFeed>> {
        let file = &self.config.transport.file;
        let idle = Duration::from_millis(file.idle_ms);
        let at_end = if self.once { AtEnd::Stop } else { AtEnd::Follow { idle } };
        let dead_letters = Appender::rotating(&file.dir.join("dead-letters"), "dead-letters", DEAD_LETTERS_BYTES);
        let params = ParamsDir::new(&file.dir.join("params"));
        let published = params.published();
        let outlet = Box::new(Files { dead_letters, params: Some(params) });
        let store = Some(self.lane_store(store, ONE_LANE));
        let facts = self.status.facts();
        let places =
            Places { store, audit: self.audit(), outlet, published, facts: facts.clone(), retry: self.retry() };
        let (mut lane, state) = Lane::open(self.settings, &self.config.snapshot, places, Keeper::start)?;
        lane.merge.set_hold(self.hold());
        let parser = Arc::new(Parser::new(self.settings));
        let directory = Directory::new(&file.dir, parser, at_end, state.positions.clone(), facts);
        let poll = (!self.once).then(|| Duration::from_millis(file.poll_ms));
        let mut feed = FileFeed { directory, poll, scanned: Instant::now(), dir: file.dir.display().to_string() };
        self.retry().run("read", || feed.directory.create().doing(|| feed.cannot_read()))?;
        lane.begin(state)?;
        self.retry().run("read", || feed.scan(&mut lane.merge))?;
        for log in feed.directory.missing() {
            tracing::warn!(log, "log file is missing; it was read before");
        }
        Ok(Running { lane, feed })
    }

    fn follow_topics(&self) -> Result<Option<Outcome>> {
        let cluster = Cluster::new(&self.config.transport.kafka)?;
        if self.once {
            cluster.reach()?;
        } else if !cluster.await_reach(|| self.goes_on())? {
            return Ok(None);
        }
        match cluster.config.lanes {
            Lanes::One => self.follow_one(&cluster),
            Lanes::Partition => self.follow_fleet(&cluster),
        }
    }

    /// Steps the lanes until the run is stopped, fails or, with `--once`, is at its end. Calls `tend` at short intervals, with the
    /// lanes that other instances have taken over; `report` completes status reports.
    pub(super) fn drive<F: Feed>(
        &self,
        slots: &Slots<F>,
        bell: &Bell,
        tend: &mut dyn FnMut(Vec<i32>) -> Result<()>,
        report: &Report<'_, F>,
    ) -> Result<()> {
        let workers = Workers::new(slots, bell, self.once);
        let mut reporter = Reporter::new(self.status);
        workers.run(self.config.runtime.workers(), &mut || {
            if !self.goes_on() {
                workers.end(Ok(()));
                return Ok(());
            }
            tend(std::mem::take(&mut *lock(&workers.taken)))?;
            reporter.report(&workers, report);
            Ok(())
        })
    }
}

/// Completes a status report.
pub(super) type Report<'r, F> = dyn Fn(&[(i32, &Running<F>)], &mut News) + 'r;

/// The threads that step the lanes of a process.
pub struct Workers<'a, F: Feed> {
    slots: &'a Slots<F>,
    bell: &'a Bell,
    once: bool,
    events: AtomicU64,
    /// Lanes that other instances have taken over.
    taken: Mutex<Vec<i32>>,
    over: AtomicBool,
    ended: Bell,
    result: Mutex<Option<Result<()>>>,
}

impl<'a, F: Feed> Workers<'a, F> {
    /// Workers of these lanes, which wait for the bell while there is nothing to do. With `once` they end at the end of all logs.
    pub fn new(slots: &'a Slots<F>, bell: &'a Bell, once: bool) -> Self {
        Self {
            slots,
            bell,
            once,
            events: AtomicU64::new(0),
            taken: Mutex::default(),
            over: AtomicBool::new(false),
            ended: Bell::default(),
            result: Mutex::default(),
        }
    }

    /// Steps the lanes with up to `threads` threads until the run ends; calls `tend` at short intervals, and ends when it fails.
    pub fn run(&self, threads: usize, tend: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            for n in 0..threads.min(self.slots.lanes().count()) {
                let worker = std::thread::Builder::new().name(format!("worker-{n}"));
                if let Err(error) = worker.spawn_scoped(scope, || self.step()) {
                    self.end(Err(error.into()));
                }
            }
            while !self.is_over() {
                if let Err(error) = tend() {
                    self.end(Err(error));
                }
                self.wait(IDLE);
            }
        });
        lock(&self.result).take().unwrap_or(Ok(()))
    }

    /// Ends the run; the first result counts.
    pub fn end(&self, result: Result<()>) {
        lock(&self.result).get_or_insert(result);
        self.over.store(true, Ordering::SeqCst);
        self.ended.ring();
        self.bell.ring();
    }

    /// Events that they have processed.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// A worker: steps all lanes in turn.
    fn step(&self) {
        let lanes: Vec<i32> = self.slots.lanes().collect();
        while !self.is_over() {
            let (rings, mut events) = (self.bell.rings(), 0);
            for lane in &lanes {
                match self.slots.step(*lane) {
                    Ok(taken) => events += taken.unwrap_or(0),
                    Err(error) if error.is_taken() && !self.once => self.report_taken(*lane, &error),
                    Err(error) => return self.end(Err(error)),
                }
            }
            self.events.fetch_add(events, Ordering::Relaxed);
            if events == 0 {
                if self.once && self.slots.at_end() {
                    return self.end(Ok(()));
                }
                self.bell.wait(rings, IDLE);
            }
        }
    }

    fn report_taken(&self, lane: i32, error: &LaneError) {
        let mut taken = lock(&self.taken);
        if !taken.contains(&lane) {
            tracing::warn!(lane, %error, "another instance owns the lane");
            taken.push(lane);
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits, but not beyond the end.
    fn wait(&self, time: Duration) {
        if !self.is_over() {
            self.ended.wait(0, time);
        }
    }
}

/// The logs of a directory.
struct FileFeed {
    directory: Directory,
    /// Interval of scans; none with `--once`.
    poll: Option<Duration>,
    scanned: Instant,
    dir: String,
}

impl FileFeed {
    fn scan(&mut self, merge: &mut Merge<LogFile>) -> Result<()> {
        self.scanned = Instant::now();
        let scanned = self.directory.scan(merge);
        scanned.doing(|| self.cannot_read())
    }

    fn cannot_read(&self) -> String {
        format!("cannot read the log directory {} (transport.file.dir)", self.dir)
    }
}

impl Feed for FileFeed {
    type Log = LogFile;

    fn refresh(&mut self, merge: &mut Merge<LogFile>) -> Result<()> {
        let is_due = self.poll.is_some_and(|poll| self.scanned.elapsed() >= poll);
        if is_due { self.scan(merge) } else { Ok(()) }
    }

    fn reached(&mut self, _positions: &MergeState) {}
}

/// Fails if the store holds an unknown lane.
pub(super) fn check_lanes(store: &Shared<DirStore>, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    match generations::lanes(&*store.lock())?.into_iter().find(|lane| !is_ours(lane)) {
        Some(other) => Err(Problem::OtherLanes(other).into()),
        None => Ok(()),
    }
}

/// Takes the last snapshot of every lane.
pub(super) fn finish<F: Feed>(slots: &Slots<F>) -> Result<Outcome> {
    let mut open = slots.take_open();
    for Running { lane, feed } in &mut open {
        lane.finish()?;
        if let Some(positions) = lane.take_reached() {
            feed.reached(&positions);
        }
    }
    let out_of_order = open.iter().map(|running| running.lane.merge.out_of_order()).sum();
    let engines: Vec<Engine> = open.into_iter().map(|running| running.lane.engine).collect();
    let counts = Totals::of(&engines).counts;
    tracing::info!(queries = counts.queries(), rewards = counts.rewards(), applied = counts.applied, "stopped");
    Ok(Outcome { engines, out_of_order })
}

/// Reports progress: to the log at intervals, and to the status endpoints.
struct Reporter<'a> {
    status: &'a Status,
    logged: Instant,
    reported: Instant,
    took: Duration,
    /// Events when progress was last logged.
    events: u64,
}

impl<'a> Reporter<'a> {
    fn new(status: &'a Status) -> Self {
        let (logged, reported) = (Instant::now(), Instant::now());
        Self { status, logged, reported, took: Duration::ZERO, events: 0 }
    }

    fn report<F: Feed>(&mut self, workers: &Workers<'_, F>, more: &Report<'_, F>) {
        if self.reported.elapsed() < STATUS_EVERY.max(self.took.div_f64(STATUS_SHARE)) {
            return;
        }
        let begun = Instant::now();
        let news = workers.slots.look(|lanes| {
            let merges = || lanes.iter().map(|(_, running)| &running.lane.merge);
            let out_of_order = merges().map(Merge::out_of_order).sum();
            let mut news = News::of(lanes.iter().map(|(_, running)| &running.lane.engine), out_of_order);
            news.held_events = merges().map(|merge| merge.held_events() as u64).sum();
            more(lanes, &mut news);
            news
        });
        self.log(workers.events(), &news);
        self.status.tell(news);
        (self.reported, self.took) = (Instant::now(), begun.elapsed());
    }

    fn log(&mut self, events: u64, news: &News) {
        let seconds = self.logged.elapsed();
        if seconds < PROGRESS_EVERY || events == self.events {
            return;
        }
        tracing::info!(
            events_per_s = ((events - self.events) as f64 / seconds.as_secs_f64()).round(),
            applied = news.counts.applied,
            pending = news.counts.join.queries.pending,
            mean_reward = news.mean_reward,
            lag = (!news.lags.is_empty()).then(|| news.lag()),
            unread_bytes = news.unread.as_ref().map(Unread::bytes),
            "learning"
        );
        (self.logged, self.events) = (Instant::now(), events);
    }
}
