//! Lanes of one process: how much faster several learn than one, and what opening a lane costs the others. The lanes, their
//! slots, keepers and workers are those of the daemon, with a redb store; the logs are in memory.
//!
//!   cargo bench --bench lanes
//!   REQUESTS=40000 ROUNDS=1 SECONDS=5 PENDING=10000 cargo bench --bench lanes
//!
//! d = 768, M = 8, k = 16, defaults everywhere else. A request is a query event and its reward event.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use pointsman::config::{Config, RuntimeConfig, Settings, SnapshotConfig, StoreKind};
use pointsman::engine::{Input, Side};
use pointsman::event::Name;
use pointsman::merge::{Merge, Read, Source, Sourced};
use pointsman::report::{Column, Table};
use pointsman::runner::error::Result;
use pointsman::runner::follow::Workers;
use pointsman::runner::slots::{Closed, Feed, Running, Slots, Turn};
use pointsman::runner::{Keeper, Lane, Places, Retry, Stepped};
use pointsman::simulate::queries::{Queries, Shape};
use pointsman::state::{LaneStore, Retention};
use pointsman::store::{self, Access, DirStore, Shared};
use pointsman::telemetry::Facts;
use pointsman::transport::{Bell, Letter, Log, Outlet, TransportError};
use pointsman::wire::events::Parser;
use serde_json::{Value, json};

/// As in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const DIM: usize = 768;
const MODELS: u64 = 8;
const SPACES: u64 = 4;
const WORKERS: usize = 2;
const EVENTS_PER_S: u64 = 500;

fn main() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-lanes");
    let bench = Bench::new(&directory);
    println!("{}", bench.speed().text(120));
    println!("{}", bench.latency().text(120));
    let _ = std::fs::remove_dir_all(&directory);
}

fn variable(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

struct Bench<'a> {
    directory: &'a Path,
    settings: Settings,
    events: Arc<Events>,
}

impl<'a> Bench<'a> {
    fn new(directory: &'a Path) -> Self {
        let models: Vec<String> = (0..MODELS).map(|m| format!("m{m}")).collect();
        let text = format!("[learner]\ndim = {DIM}\nmodels = {models:?}\n");
        let settings = toml::from_str::<Config>(&text).expect("good TOML").check().expect("a good configuration");
        let events = Arc::new(Events::new(&settings));
        Self { directory, settings, events }
    }

    /// The same events in one lane and in four, with two workers.
    fn speed(&self) -> Table {
        let (requests, rounds) = (variable("REQUESTS", 160_000), variable("ROUNDS", 3));
        let mut best = [(f64::INFINITY, 0.0); 2];
        for _ in 0..rounds {
            for (best, lanes) in best.iter_mut().zip([1, SPACES]) {
                let measured = self.learn(lanes, requests);
                if measured.0 < best.0 {
                    *best = measured;
                }
            }
        }
        let row = |lanes: u64, (took, busy): (f64, f64)| {
            let (rate, cores, ratio) = (2.0 * requests as f64 / took, busy / took, best[0].0 / took);
            let cells = [format!("{took:.1}"), format!("{rate:.0}"), format!("{cores:.2}"), format!("{ratio:.2}")];
            [[lanes.to_string()].as_slice(), &cells].concat()
        };
        Table {
            columns: ["lanes", "seconds", "events/s", "cores used", "times one lane"].map(Column::right).into(),
            rows: vec![row(1, best[0]), row(SPACES, best[1])],
            note: Some(format!(
                "{requests} requests of {SPACES} spaces, {WORKERS} workers, d={DIM} M={MODELS} k=16; best of {rounds} \
                 rounds in turns"
            )),
        }
    }

    /// Seconds in which all lanes together learn from the events, and of processor time. Of n lanes, each has every nth space.
    fn learn(&self, lanes: u64, requests: u64) -> (f64, f64) {
        let store = self.store();
        let open = |number: u64| {
            let tape = Tape { events: self.events.clone(), lane: number, lanes, next: 0, requests, rewards: true };
            (number as i32, self.open(&store, number as i32, tape, Still))
        };
        let slots = Slots::of((0..lanes).map(open).collect::<Vec<_>>(), retry());
        let bell = Bell::default();
        let workers = Workers::new(&slots, &bell, true);
        let (start, busy) = (Instant::now(), processor_s());
        workers.run(WORKERS, &mut || Ok(())).expect("lanes that learn");
        let took = (start.elapsed().as_secs_f64(), processor_s() - busy);
        assert_eq!(workers.events(), 2 * requests);
        let mut applied = 0;
        for mut running in slots.take_open() {
            running.lane.finish().expect("a last snapshot");
            applied += running.lane.engine.counts().applied;
        }
        assert!(requests - applied < 64, "{applied} of {requests}: only the last may still be on probation");
        took
    }

    /// One lane at a steady rate, alone and while another one is opened and closed, again and again.
    fn latency(&self) -> Table {
        let (seconds, pending) = (variable("SECONDS", 10), variable("PENDING", 50_000));
        let workers = variable("WORKERS", RuntimeConfig::default().workers() as u64) as usize;
        let store = self.store();
        self.fill(&store, pending);
        let (bell, queue) = (Arc::new(Bell::default()), Arc::new(Queue::default()));
        let slots = Slots::new([STEADY, OPENED], retry());
        let open = |lane: i32, queue: &Arc<Queue>| {
            let feed = Fed { queue: queue.clone(), bell: bell.clone(), rings: 0, seen: 0 };
            self.open(&store, lane, Partition(queue.clone()), feed)
        };
        let turn = slots.assign(STEADY);
        slots.open(STEADY, &turn, || Ok(open(STEADY, &queue))).expect("a lane");
        let mut phases = [Phase::default(), Phase::default()];
        let over = AtomicBool::new(false);
        let all = Workers::new(&slots, &bell, false);
        std::thread::scope(|scope| {
            scope.spawn(|| self.produce(&queue, &bell, &over));
            let run = scope.spawn(|| all.run(workers, &mut || Ok(())));
            let length = Duration::from_secs(seconds);
            let settle = || std::thread::sleep(Duration::from_millis(500));
            for _ in 0..2 {
                for (with_openings, phase) in phases.iter_mut().enumerate() {
                    settle();
                    queue.take_times();
                    let start = Instant::now();
                    while with_openings == 1 && start.elapsed() < length {
                        phase.openings.push(self.open_and_close(&slots, || Ok(open(OPENED, &Arc::default()))));
                    }
                    std::thread::sleep(length.saturating_sub(start.elapsed()));
                    phase.times.extend(queue.take_times());
                }
            }
            over.store(true, Ordering::Relaxed);
            all.end(Ok(()));
            run.join().expect("workers").expect("lanes that learn");
        });
        slots.take_open().iter_mut().for_each(|running| running.lane.close().expect("a lane"));
        let [alone, beside] = &mut phases;
        let base = alone.row("alone", None);
        let rows = vec![base, beside.row("while another is opened", Some(alone))];
        let columns = ["events", "p50 us", "p99 us", "max us", "times alone, p50", "p99", "openings", "ms each"];
        Table {
            columns: [vec![Column::left("a lane")], columns.map(Column::right).into()].concat(),
            rows,
            note: Some(format!(
                "{EVENTS_PER_S} events/s, from available until learned, {workers} workers; the other lane has {pending} \
                 pending joins, and is opened and closed without a pause; twice {seconds} s each, in turns"
            )),
        }
    }

    /// Writes the state of a lane with so many pending joins.
    fn fill(&self, store: &Shared<DirStore>, pending: u64) {
        let events = self.events.clone();
        let tape = Tape { events, lane: 0, lanes: 1, next: 0, requests: pending, rewards: false };
        let mut running = self.open(store, OPENED, tape, Still);
        while running.lane.step().expect("a lane that learns") != Stepped::End {}
        running.lane.finish().expect("a last snapshot");
        assert_eq!(running.lane.engine.counts().join.queries.pending, pending);
    }

    /// Opens and closes a lane, each on a thread of its own as the daemon does; returns how long opening took.
    fn open_and_close<F: Feed>(&self, slots: &Slots<F>, open: impl Fn() -> Result<Running<F>> + Sync) -> Duration
    where
        Slots<F>: Sync,
    {
        let turn: Turn = slots.assign(OPENED);
        let on_a_thread = |job: &(dyn Fn() + Sync)| {
            std::thread::scope(|scope| scope.spawn(job).join().expect("a lane"));
        };
        let start = Instant::now();
        on_a_thread(&|| assert!(slots.open(OPENED, &turn, &open).expect("a lane")));
        let took = start.elapsed();
        let ended = slots.end_turn(OPENED, false).expect("its turn");
        on_a_thread(&|| assert_eq!(slots.close(OPENED, &ended, false).expect("a lane"), Closed::Whole));
        took
    }

    /// Appends events to a queue at a steady rate; they are parsed here, as on the polling thread of a consumer.
    fn produce(&self, queue: &Queue, bell: &Bell, over: &AtomicBool) {
        let start = Instant::now();
        for n in 0.. {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let due = Duration::from_nanos(n * 1_000_000_000 / EVENTS_PER_S);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let side = if n % 2 == 0 { Side::Query } else { Side::Reward };
            let event = sourced(self.events.event(side, n / 2, 0), n);
            let mut waiting = queue.0.lock().expect("no panic");
            waiting.events.push_back(event);
            waiting.available.push_back(Instant::now());
            drop(waiting);
            bell.ring();
        }
    }

    fn store(&self) -> Shared<DirStore> {
        let _ = std::fs::remove_dir_all(self.directory);
        std::fs::create_dir_all(self.directory).expect("target can be written");
        Shared::new(store::open(self.directory, Access::Create(StoreKind::Redb)).expect("a store"))
    }

    /// Opens a lane that reads one log, from its snapshot if it has one.
    fn open<F: Feed>(&self, store: &Shared<DirStore>, lane: i32, log: F::Log, feed: F) -> Running<F> {
        let places = Places {
            store: Some(LaneStore::new(store.clone(), &format!("partition-{lane}"), Retention::newest(3))),
            audit: None,
            outlet: Box::new(Nowhere),
            published: Vec::new(),
            facts: Arc::default(),
            retry: retry(),
        };
        let opened = Lane::open(&self.settings, &SnapshotConfig::default(), places, Keeper::start);
        let (mut lane, state) = opened.expect("a lane");
        let position = state.positions.get(LOG).cloned();
        lane.begin(state).expect("a first snapshot");
        lane.merge.add(LOG.to_owned(), log, position, None);
        Running { lane, feed }
    }
}

/// The lane that gets events, and the one that is opened beside it.
const STEADY: i32 = 0;
const OPENED: i32 = 1;

/// The name of a lane's log.
const LOG: &str = "events";

fn retry() -> Retry {
    Retry::until(Arc::default(), Arc::<Facts>::default())
}

/// Processor time of this process, in seconds. Where other programs leave it fewer cores than it has workers, the ratio says
/// nothing.
#[cfg(unix)]
fn processor_s() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the place that it is given, and to nothing else.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "no clock of processor time");
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// Unknown.
#[cfg(not(unix))]
fn processor_s() -> f64 {
    f64::NAN
}

/// What was measured, with openings or without.
#[derive(Default)]
struct Phase {
    times: Vec<Duration>,
    openings: Vec<Duration>,
}

impl Phase {
    fn row(&mut self, name: &str, beside: Option<&mut Self>) -> Vec<String> {
        let own = [0.5, 0.99, 1.0].map(|share| self.at(share));
        let base = beside.map_or(own, |beside| [0.5, 0.99, 1.0].map(|share| beside.at(share)));
        let opened = self.openings.iter().sum::<Duration>().as_secs_f64() * 1e3 / self.openings.len().max(1) as f64;
        let numbers = own.map(|us| format!("{us:.0}"));
        let ratios = [0, 1].map(|i| format!("{:.2}", own[i] / base[i]));
        let openings = [self.openings.len().to_string(), format!("{opened:.0}")];
        let counts = [name.to_owned(), self.times.len().to_string()];
        [counts.as_slice(), &numbers, &ratios, &openings].concat()
    }

    /// A quantile, in microseconds.
    fn at(&mut self, share: f64) -> f64 {
        self.times.sort_unstable();
        self.times[((self.times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e6
    }
}

/// What the events are made of.
struct Events {
    parser: Parser,
    vectors: Vec<String>,
    spaces: Vec<Name>,
    propensities: String,
}

impl Events {
    fn new(settings: &Settings) -> Self {
        let mut draws = Queries::new(Shape::PowerLaw, DIM, 1);
        let vector = |_| {
            let bytes: Vec<u8> = draws.draw().as_slice().iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            base64::engine::general_purpose::STANDARD.encode(bytes)
        };
        let share = 1.0 / MODELS as f64;
        let propensities: Vec<String> = (0..MODELS).map(|m| format!("\"m{m}\":{share}")).collect();
        let space = |n| Name::try_from(format!("space-{n}").as_str()).expect("a good name");
        Self {
            parser: Parser::new(settings),
            vectors: (0..4000).map(vector).collect(),
            spaces: (0..SPACES).map(space).collect(),
            propensities: propensities.join(","),
        }
    }

    fn event(&self, side: Side, request: u64, space: u64) -> Input {
        let (space, ts_ms) = (self.spaces[space as usize].as_str(), 1_700_000_000_000 + 10 * request);
        let line = match side {
            Side::Query => {
                let vector = &self.vectors[request as usize % self.vectors.len()];
                let (model, propensities) = (request / SPACES * 3 % MODELS, &self.propensities);
                format!(
                    r#"{{"request_id":"request-{request:010}","space":"{space}","ts_ms":{ts_ms},"query":"{vector}","model":"m{model}","propensities":{{{propensities}}}}}"#
                )
            }
            Side::Reward => {
                let (ts_ms, reward) = (ts_ms + 5, u8::from(request / SPACES * 7 % 5 < 2));
                format!(
                    r#"{{"request_id":"request-{request:010}","space":"{space}","ts_ms":{ts_ms},"reward":{reward}}}"#
                )
            }
        };
        Input::parse(&self.parser, side, line.into_bytes(), None)
    }
}

fn sourced(input: Input, start: u64) -> Sourced {
    Sourced { input, start, end: start + 1, line: 0, origin: None }
}

/// The events of a lane's spaces, parsed as they are read, like those of a file.
struct Tape {
    events: Arc<Events>,
    lane: u64,
    lanes: u64,
    next: u64,
    /// Of all lanes.
    requests: u64,
    /// Whether queries have rewards.
    rewards: bool,
}

impl Source for Tape {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        let start = self.next;
        let side = if self.rewards && start % 2 == 1 { Side::Reward } else { Side::Query };
        let request = if self.rewards { start / 2 } else { start } * self.lanes + self.lane;
        if request >= self.requests {
            return Ok(Read::End);
        }
        self.next += 1;
        Ok(Read::Event(sourced(self.events.event(side, request, request % SPACES), start)))
    }
}

impl Log for Tape {
    fn place(&self, start: u64, _line: u64) -> Value {
        json!({"offset": start})
    }
}

/// Nothing is ever added.
struct Still;

impl Feed for Still {
    type Log = Tape;

    fn refresh(&mut self, _merge: &mut Merge<Tape>) -> Result<()> {
        Ok(())
    }
}

/// Events that wait for their lane, and how long others have waited.
#[derive(Default)]
struct Queue(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    events: VecDeque<Sourced>,
    /// When the events that are not learned yet became available.
    available: VecDeque<Instant>,
    times: Vec<Duration>,
}

impl Queue {
    fn take_times(&self) -> Vec<Duration> {
        std::mem::take(&mut self.0.lock().expect("no panic").times)
    }
}

/// A log that is idle as soon as it is empty, so that the merge never waits for later events: what is measured is the runtime,
/// not how long event time takes to be confirmed.
struct Partition(Arc<Queue>);

impl Source for Partition {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        Ok(self.0.0.lock().expect("no panic").events.pop_front().map_or(Read::Idle, Read::Event))
    }
}

impl Log for Partition {
    fn place(&self, start: u64, _line: u64) -> Value {
        json!({"offset": start})
    }
}

struct Fed {
    queue: Arc<Queue>,
    bell: Arc<Bell>,
    rings: u64,
    /// Events that are learned.
    seen: u64,
}

impl Feed for Fed {
    type Log = Partition;

    /// A worker calls this before each step of the lane, and again directly after a step that has processed events.
    fn refresh(&mut self, merge: &mut Merge<Partition>) -> Result<()> {
        let now = Instant::now();
        let learned = merge.floors().map(|(_, floor)| floor).next().unwrap_or(0);
        let mut waiting = self.queue.0.lock().expect("no panic");
        for _ in self.seen..learned {
            let Some(available) = waiting.available.pop_front() else { break };
            waiting.times.push(now - available);
        }
        self.seen = self.seen.max(learned);
        drop(waiting);
        let rings = self.bell.rings();
        if std::mem::replace(&mut self.rings, rings) != rings {
            merge.wake(0);
        }
        Ok(())
    }
}

/// Keeps nothing; there are no dead letters.
struct Nowhere;

impl Outlet for Nowhere {
    fn dead_letters(&mut self, letters: &[Letter]) -> Result<(), TransportError> {
        assert!(letters.is_empty(), "{}", letters[0].detail());
        Ok(())
    }

    fn publishes(&self) -> bool {
        true
    }

    fn publish(&mut self, _params: &[(Name, Vec<u8>)]) -> Result<(), TransportError> {
        Ok(())
    }
}
