//! How an update grows with the dimension, the models, the rank, the batch and the spaces, each alone from (768, 8, 16).
//!
//!   cargo bench --bench scaling
//!
//! Prints a table, and leaves it with its curves in `target/bench-report/scaling.html`. Times are the least of many, of one
//! example, after a warm-up that fills the rank; the roofline is that of `support/machine.rs`.

use std::path::Path;
use std::time::Duration;

use pointsman::config::Mode;
use pointsman::event::Example;
use pointsman::learner::Trainer;
use pointsman::report::{Block, Column, Lines, Page, Section, Series, Table};

use support::machine::Machine;
use support::{Size, examples, fastest, learn, queries, trainer};

mod support;

const FROM: Size = Size { dim: 768, models: 8, rank: 16, batch: 1 };

const DIMS: [usize; 7] = [64, 128, 256, 384, 768, 1024, 1536];
const MODELS: [usize; 6] = [2, 4, 8, 16, 32, 64];
const RANKS: [usize; 7] = [4, 8, 12, 16, 24, 32, 64];
const BATCHES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const SPACES: [usize; 4] = [1, 10, 100, 1000];

/// With many spaces, queries are shorter.
const DIM_OF_SPACES: usize = 256;

/// Examples of one learner in one stretch of time, if that is not too long.
const TURNS: usize = 64;

/// How long each size is measured.
const BUDGET: Duration = Duration::from_millis(700);

/// One thing varied.
struct Curve {
    what: &'static str,
    points: Vec<Point>,
}

struct Point {
    at: usize,
    /// Seconds of one example.
    time: f64,
    /// The least that it can take, where one example is one update.
    limit: Option<f64>,
    /// Resident bytes of a space, where these were counted.
    bytes: Option<f64>,
}

fn main() {
    let machine = Machine::measure();
    // First, while no memory that others have given back can be taken again unseen.
    let spaces = spaces();
    let vary = |what, values: &[usize], size: &dyn Fn(usize) -> Size| {
        let points = values.iter().map(|&at| measure(&machine, at, size(at))).collect();
        Curve { what, points }
    };
    let curves = [
        vary("d, dimension", &DIMS, &|dim| Size { dim, ..FROM }),
        vary("M, models", &MODELS, &|models| Size { models, ..FROM }),
        vary("k, rank", &RANKS, &|rank| Size { rank, ..FROM }),
        vary("b, batch", &BATCHES, &|batch| Size { batch, ..FROM }),
        spaces,
    ];
    let (table, state) = (table(&curves), state_bytes());
    println!("{}", table.text(120));
    println!("state of a learner at (768, 8, 16): {:.2} MB", state as f64 / 1e6);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench-report/scaling.html");
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("target can be written");
    std::fs::write(&path, page(&machine, &curves, table, state).render()).expect("target can be written");
    println!("curves: {}", path.display());
}

fn measure(machine: &Machine, at: usize, size: Size) -> Point {
    let examples = examples(queries(size.dim, 1024, 1), size.models);
    let mut trainer = trainer(size, Mode::Factored);
    // Whole batches, so that every stretch does the same work.
    let stretch = TURNS.next_multiple_of(size.batch);
    let mut next = warm_up(&mut trainer, &examples, size);
    let mut update = || {
        next += stretch;
        learn(&mut trainer, &examples, next, stretch)
    };
    let [time] = fastest(BUDGET, [&mut update]);
    let limit = (size.batch == 1).then(|| machine.limits(size)[0].total());
    eprintln!("{size:?}: {:.1} us", 1e6 * time);
    Point { at, time, limit, bytes: None }
}

/// Until the rank is full and the buffers have turned over.
fn warm_up(trainer: &mut Trainer, examples: &[Example], size: Size) -> usize {
    let count = (8 * size.rank).next_multiple_of(size.batch);
    learn(trainer, examples, 0, count);
    count
}

/// One example for each space in turn, so that no space finds its parameters in a cache that they do not fit.
fn spaces() -> Curve {
    let size = Size { dim: DIM_OF_SPACES, ..FROM };
    let examples = examples(queries(size.dim, 1024, 1), size.models);
    let before = resident_bytes();
    let mut trainers: Vec<Trainer> = Vec::new();
    let point = |spaces: usize| {
        while trainers.len() < spaces {
            let mut trainer = trainer(size, Mode::Factored);
            let next = warm_up(&mut trainer, &examples, size);
            // Out of step with each other, or all would multiply out their factors at once.
            learn(&mut trainer, &examples, next, trainers.len() % TURNS + 1);
            trainers.push(trainer);
        }
        let bytes = resident_bytes().zip(before).map(|(now, before)| (now - before) / spaces as f64);
        let turns = TURNS.min(100 * TURNS / spaces);
        let mut next = 0;
        let mut round = || {
            let mut time = 0.0;
            for _ in 0..turns {
                next += 1;
                let learn_one = |(i, trainer)| learn(trainer, &examples, next + i, 1);
                time += trainers.iter_mut().enumerate().map(learn_one).sum::<f64>();
            }
            time / (turns * spaces) as f64
        };
        let [time] = fastest(BUDGET, [&mut round]);
        eprintln!("{spaces} spaces: {:.1} us", 1e6 * time);
        Point { at: spaces, time, limit: None, bytes }
    };
    Curve { what: "spaces, at d = 256", points: SPACES.map(point).into_iter().collect() }
}

/// Memory of this process, where the system tells.
fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(1024.0 * line.trim().strip_suffix(" kB")?.parse::<f64>().ok()?)
}

fn state_bytes() -> usize {
    let examples = examples(queries(FROM.dim, 256, 1), FROM.models);
    let mut trainer = trainer(FROM, Mode::Factored);
    // The largest that it gets between two multiplications of its factors.
    let size = |i| {
        learn(&mut trainer, &examples, i, 1);
        trainer.save().len()
    };
    (0..examples.len()).map(size).max().unwrap_or(0)
}

fn table(curves: &[Curve]) -> Table {
    let mut columns =
        ["", "", "time", "examples/s", "roofline", "times roofline", "resident MB a space"].map(Column::right);
    columns[0] = Column::left("varied");
    let row = |curve: &Curve, point: &Point| {
        let or_dash = |text: Option<String>| text.unwrap_or("-".to_owned());
        vec![
            curve.what.to_owned(),
            point.at.to_string(),
            us(point.time),
            format!("{:.0}", 1.0 / point.time),
            or_dash(point.limit.map(us)),
            or_dash(point.limit.map(|limit| format!("{:.2}", point.time / limit))),
            or_dash(point.bytes.map(|bytes| format!("{:.2}", bytes / 1e6))),
        ]
    };
    let rows = curves.iter().flat_map(|curve| curve.points.iter().map(move |point| row(curve, point))).collect();
    let note = "From d = 768, M = 8, k = 16, b = 1 with one thing varied at a time. Time of one example.".to_owned();
    Table { columns: columns.to_vec(), rows, note: Some(note) }
}

fn us(seconds: f64) -> String {
    format!("{:.1} us", 1e6 * seconds)
}

fn page(machine: &Machine, curves: &[Curve], table: Table, state: usize) -> Page {
    let section = |curve: &Curve| Section {
        heading: curve.what.to_owned(),
        text: None,
        body: vec![Block::Chart(lines(curve).html())],
    };
    let all = Section { heading: "All figures".to_owned(), text: None, body: vec![Block::Table(table)] };
    Page {
        title: "Pointsman: how an update grows".to_owned(),
        lead: "One thing varied at a time, from d = 768, M = 8, k = 16, batch 1, on one core. Both axes are logarithms: a \
               straight line is a power, and its slope the exponent."
            .to_owned(),
        facts: vec![
            ("matrix product".to_owned(), format!("{:.0} GF/s", machine.flops / 1e9)),
            ("divisions".to_owned(), format!("{:.1}e9/s", machine.divisions / 1e9)),
            ("state of a learner".to_owned(), format!("{:.2} MB", state as f64 / 1e6)),
        ],
        sections: curves.iter().map(section).chain([all]).collect(),
    }
}

/// A curve on two logarithmic axes, with its roofline where it has one.
fn lines(curve: &Curve) -> Lines {
    let points = |time: &dyn Fn(&Point) -> Option<f64>| {
        let point = |p: &Point| Some(((p.at as f64).log2(), (1e6 * time(p)?).log2()));
        curve.points.iter().filter_map(point).collect::<Vec<_>>()
    };
    let mut series = vec![Series { name: "one example".to_owned(), points: points(&|p| Some(p.time)), dashed: false }];
    let limits = points(&|p| p.limit);
    if limits.len() > 1 {
        series.push(Series { name: "roofline".to_owned(), points: limits, dashed: true });
    }
    Lines {
        title: format!("Time of one example over {}", curve.what),
        x_label: format!("log2 of {}", curve.what),
        y_label: "log2 of microseconds".to_owned(),
        series,
    }
}
