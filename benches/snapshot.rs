//! What a snapshot costs: the pause of the engine, and the durable commit, beside a plain file of the same bytes; what a
//! restart costs, beside reading the same bytes from a file; and what it would cost to multiply eigenvectors out.
//!
//! `cargo bench --bench snapshot`. d = 768, M = 8, k = 16, with 2000 updates and their traffic between two snapshots,
//! as configured by default: each request's reward comes when so many later requests wait as the row says. The plain
//! file is written, synced and renamed, beside each snapshot with the bytes of what has changed, and in the end with
//! those of the whole state: the ratios are what counts, they come from one disk in one run.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use base64::Engine as _;
use pointsman::config::{Config, Settings, StoreKind};
use pointsman::engine::{Engine, Input, Side};
use pointsman::report::{Column, Table};
use pointsman::simulate::queries::{Queries, Shape};
use pointsman::snapshot::{LaneHead, fingerprint};
use pointsman::state::backup::Backup;
use pointsman::state::{Change, LaneStore, Retention};
use pointsman::store::{self, Access, DirStore, SnapshotStore};
use pointsman::wire::events::Parser;
use pointsman::wire::records::Record;

const DIM: usize = 768;
const MODELS: usize = 8;
const UPDATES: u64 = 2000;
const SNAPSHOTS: usize = 30;
const KEEP: usize = 3;

/// Requests that wait for their reward at any time.
const PENDING: [u64; 2] = [0, 50_000];

fn main() {
    let columns = [
        "pending joins",
        "store",
        "changed MB",
        "pause p50",
        "p99",
        "commit p50",
        "p99",
        "plain file p50",
        "p99",
        "ratio",
        "full file p50",
        "ratio",
        "MB on disk",
        "times live",
    ];
    let mut columns: Vec<Column> = columns.map(Column::right).into_iter().collect();
    columns[1] = Column::left("store");
    let note = format!(
        "Times in ms, over {SNAPSHOTS} snapshots, {UPDATES} updates apart. Ratio: commit to the plain file beside it, medians."
    );
    let commits = Table { columns, rows: Vec::new(), note: Some(note) };
    let restarts = ["pending joins", "store", "records", "MB", "open", "restore", "first commit", "file", "ratio"];
    let factors = ["pending joins", "pause p50", "multiply out p50", "share of pause", "factors MB", "vectors MB"];
    let plain = |names: &[&str], note: &str| {
        let columns = names.iter().map(|name| Column::right(*name)).collect();
        Table { columns, rows: Vec::new(), note: Some(note.to_owned()) }
    };
    let mut tables = [
        commits,
        plain(
            &restarts,
            "Times in ms, medians of 5. Open: the database with its own integrity check. Restore: all records read, verified and \
             decoded into an engine. File: the same records read from one file, verified and decoded. Ratio: restore to file.",
        ),
        plain(
            &factors,
            "Times in ms. Multiply out: the eigenvectors of all models. A restart that continues bit for bit needs the factors, so \
             storing eigenvectors too would add their bytes.",
        ),
    ];
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-snapshot");
    for pending in PENDING {
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("target can be written");
        measure(pending, &directory, &mut tables);
    }
    let _ = std::fs::remove_dir_all(&directory);
    tables.iter().for_each(|table| println!("{}", table.text(120)));
}

/// One engine, and each of its snapshots into every store.
fn measure(pending: u64, directory: &Path, tables: &mut [Table; 3]) {
    let [table, restarts, factors] = tables;
    let kinds = [StoreKind::Redb, StoreKind::Sled];
    let open = |kind: StoreKind| {
        let store = store::open(&directory.join(kind.to_string()), Access::Create(kind)).expect("a store");
        LaneStore::new(store, "file", Retention::newest(KEEP))
    };
    let mut stores = kinds.map(open);
    let mut traffic = Traffic::new(pending);
    traffic.warm_up();
    let (mut pauses, mut multiplied) = (Times::default(), Times::default());
    let mut commits = kinds.map(|_| Times::default());
    let (mut plain, mut full) = (Times::default(), Times::default());
    let (mut changed_bytes, mut live_bytes) = (0, 0);
    for number in 0..=SNAPSHOTS {
        traffic.update(UPDATES);
        let start = Instant::now();
        let (changes, head) = traffic.take_snapshot();
        let pause = start.elapsed().as_secs_f64();
        let bytes: usize = head.len() + changes.iter().map(change_bytes).sum::<usize>();
        let mut times = Vec::new();
        for store in &mut stores {
            times.push(timed(|| commit(store, &head, &changes)));
        }
        // The first holds all that waits, and the disk is cold: not measured.
        if number == 0 {
            live_bytes = bytes;
            eprintln!("{pending} pending: the first snapshot has {bytes} bytes, redb took {:.1} ms", 1e3 * times[0]);
            continue;
        }
        changed_bytes += bytes;
        pauses.0.push(pause);
        multiplied.0.push(timed(|| drop(traffic.engine.spaces().map(|space| space.eigens).collect::<Vec<_>>())));
        commits.iter_mut().zip(times).for_each(|(all, time)| all.0.push(time));
        let content = content(bytes);
        plain.0.push(timed(|| replace(&directory.join("changed"), &content)));
    }
    let content = content(live_bytes);
    (0..5).for_each(|_| full.0.push(timed(|| replace(&directory.join("whole"), &content))));
    for ((kind, store), commits) in kinds.iter().zip(&stores).zip(&mut commits) {
        let newest = store.newest().expect("a store that can be read").snapshot;
        let live: usize =
            newest.map_or(0, |s| s.head.len() + s.records.iter().map(|(_, value)| value.len()).sum::<usize>());
        let on_disk = store.store().bytes_on_disk().expect("a directory") as f64;
        let ms = |x: f64| format!("{:.2}", 1e3 * x);
        let mb = |bytes: f64| format!("{:.2}", bytes / 1e6);
        table.rows.push(vec![
            pending.to_string(),
            kind.to_string(),
            mb(changed_bytes as f64 / SNAPSHOTS as f64),
            ms(pauses.at(0.5)),
            ms(pauses.at(0.99)),
            ms(commits.at(0.5)),
            ms(commits.at(0.99)),
            ms(plain.at(0.5)),
            ms(plain.at(0.99)),
            format!("{:.2}", commits.at(0.5) / plain.at(0.5)),
            ms(full.at(0.5)),
            format!("{:.2}", commits.at(0.5) / full.at(0.5)),
            mb(on_disk),
            format!("{:.2}", on_disk / live as f64),
        ]);
    }
    let ms = |x: f64| format!("{:.2}", 1e3 * x);
    let mb = |bytes: usize| format!("{:.2}", bytes as f64 / 1e6);
    let eigens: Vec<_> = traffic.engine.spaces().flat_map(|space| space.eigens).collect();
    let vectors: usize = eigens.iter().map(|eigen| 8 * (eigen.vectors.len() + 2 * eigen.gamma.len())).sum();
    let newest = stores[0].newest().expect("a store that can be read").snapshot.expect("a snapshot");
    let learner: usize = newest.records.iter().filter(|(key, _)| key[0] == b't').map(|(_, value)| value.len()).sum();
    factors.rows.push(vec![
        pending.to_string(),
        ms(pauses.at(0.5)),
        ms(multiplied.at(0.5)),
        format!("{:.0}%", 100.0 * multiplied.at(0.5) / pauses.at(0.5)),
        mb(learner),
        mb(vectors),
    ]);
    let (records, bytes) = (newest.records.len(), newest.records.iter().map(|(_, value)| value.len()).sum::<usize>());
    let file = directory.join("backup");
    replace(&file, &Backup::of(stores[0].store()).expect("a store that can be read").seal());
    drop(stores);
    for kind in kinds {
        let [mut opens, mut restores, mut commits, mut files] = [(); 4].map(|()| Times::default());
        for _ in 0..5 {
            let start = Instant::now();
            let mut lane = open(kind);
            opens.0.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            let mut restored = lane.restore(&traffic.settings).expect("a good store").expect("a snapshot");
            restores.0.push(start.elapsed().as_secs_f64());
            let changes = restored.engine.take_changes();
            commits.0.push(timed(|| commit(&mut lane, &restored.head.seal(), &changes)));
            files.0.push(timed(|| {
                let bytes = std::fs::read(&file).expect("a file");
                let backup = Backup::open(&bytes).expect("a good backup").lanes.remove(0);
                let head = LaneHead::open(&backup.head).expect("a good head");
                drop(Engine::restore(traffic.settings.clone(), head.engine, backup.records).expect("good records"));
            }));
        }
        restarts.rows.push(vec![
            pending.to_string(),
            kind.to_string(),
            records.to_string(),
            mb(bytes),
            ms(opens.at(0.5)),
            ms(restores.at(0.5)),
            ms(commits.at(0.5)),
            ms(files.at(0.5)),
            format!("{:.2}", restores.at(0.5) / files.at(0.5)),
        ]);
    }
}

/// An engine and the events that it gets.
struct Traffic {
    settings: Settings,
    engine: Engine,
    head: LaneHead,
    parser: Parser,
    queries: Vec<String>,
    propensities: String,
    ts_ms: u64,
    next: u64,
    pending: u64,
}

impl Traffic {
    fn new(pending: u64) -> Self {
        let names: Vec<String> = (0..MODELS).map(|m| format!("m{m}")).collect();
        // One request a millisecond; joined ones are remembered for as many more as two snapshots are apart.
        let text = format!(
            "[learner]\ndim = {DIM}\nmodels = {names:?}\nrank = 16\n\
             [join]\nwindow_ms = {}\nearly_ms = 0\nremember_ms = 0\n",
            pending + 2 * UPDATES
        );
        let settings: Settings =
            toml::from_str::<Config>(&text).expect("good TOML").check().expect("a good configuration");
        let mut draws = Queries::new(Shape::PowerLaw, DIM, 1);
        let query = |_| {
            let bytes: Vec<u8> = draws.draw().as_slice().iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            base64::engine::general_purpose::STANDARD.encode(bytes)
        };
        let queries = (0..500).map(query).collect();
        let uniform: Vec<String> = names.iter().map(|name| format!("\"{name}\":{}", 1.0 / MODELS as f64)).collect();
        Self {
            parser: Parser::new(&settings),
            head: LaneHead { configuration: fingerprint(&settings), ..LaneHead::default() },
            engine: Engine::new(settings.clone()),
            settings,
            queries,
            propensities: uniform.join(","),
            ts_ms: 1_700_000_000_000,
            next: 0,
            pending,
        }
    }

    fn query(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        self.ts_ms += 1;
        let (query, model) = (&self.queries[id as usize % self.queries.len()], id as usize * 3 % MODELS);
        let event = format!(
            r#"{{"request_id":"request-{id:010}","ts_ms":{},"query":"{query}","model":"m{model}","propensities":{{{}}}}}"#,
            self.ts_ms, self.propensities
        );
        self.step(Side::Query, event);
        id
    }

    fn step(&mut self, side: Side, event: String) {
        let effects = self.engine.step(Input::parse(&self.parser, side, event.into_bytes(), None));
        assert_eq!(effects.dead_letters, []);
    }

    /// Until as many requests wait and are remembered as in the long run, and the rank is full.
    fn warm_up(&mut self) {
        for _ in 0..self.pending {
            self.query();
        }
        self.update(3 * UPDATES);
    }

    /// Queries, each with the reward of an earlier one.
    fn update(&mut self, count: u64) {
        for _ in 0..count {
            let id = self.query() - self.pending;
            let reward = u8::from(id * 7 % 5 < 2);
            let event = format!(r#"{{"request_id":"request-{id:010}","ts_ms":{},"reward":{reward}}}"#, self.ts_ms);
            self.step(Side::Reward, event);
        }
    }

    /// What blocks the engine's thread.
    fn take_snapshot(&mut self) -> (Vec<Change>, Vec<u8>) {
        self.head.engine = self.engine.head();
        (self.engine.take_changes(), self.head.seal())
    }
}

fn change_bytes((key, value): &Change) -> usize {
    key.len() + value.as_ref().map_or(0, Vec::len)
}

fn commit(store: &mut LaneStore<DirStore>, head: &[u8], changes: &[Change]) {
    store.commit(head, changes).expect("a disk that can be written");
}

/// The plainest durable write.
fn replace(path: &Path, bytes: &[u8]) {
    let write = || {
        let beside = path.with_extension("new");
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    write().expect("a disk that can be written");
}

/// Bytes that no disk can make smaller.
fn content(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Seconds.
fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn at(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        self.0[((self.0.len() - 1) as f64 * share).round() as usize]
    }
}
