//! One update of all models: exact, explicit and factored, on the same examples in the same run.
//!
//! `cargo bench --bench update`. The ratios are what counts: they come from one machine in one run. Times are medians
//! over stretches of updates, after a warm-up that fills the rank. Factored is measured a second time where nine in ten
//! queries repeat one of a few, and its allocations are counted: in the end there are none.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pointsman::config::{Algorithm, Estimator, LearnerConfig, Mode};
use pointsman::event::{Example, Query};
use pointsman::learner::Trainer;
use pointsman::report::{Column, Table};
use pointsman::simulate::queries::{Queries, Shape};

/// (d, M, k)
const SIZES: [(usize, usize, usize); 3] = [(64, 8, 16), (768, 8, 16), (768, 8, 32)];

/// How long each mode is measured, unless one update takes longer.
const BUDGET: Duration = Duration::from_secs(3);

/// The system's allocator, with a count of what it is asked for.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    let columns = [
        "d",
        "M",
        "k",
        "mode",
        "time an update",
        "updates/s",
        "times faster than exact",
        "than explicit",
        "allocations",
    ];
    let columns = columns.map(Column::right).into_iter().collect();
    let mut table = Table { columns, rows: Vec::new(), note: None };
    for (dim, models, rank) in SIZES {
        let examples = [false, true].map(|repeated| examples(dim, models, 2000, repeated));
        let modes = [(Mode::Exact, 0), (Mode::Explicit, 0), (Mode::Factored, 0), (Mode::Factored, 1)];
        let measured = modes.map(|(mode, stream)| {
            let found = measure(mode, rank, &examples[stream]);
            let name = format!("{mode}{}", if stream == 1 { ", repeated" } else { "" });
            eprintln!("d={dim} M={models} k={rank} {name}: {:.3e} s", found.seconds);
            (name, found)
        });
        for (name, found) in &measured {
            table.rows.push(vec![
                dim.to_string(),
                models.to_string(),
                rank.to_string(),
                name.clone(),
                format!("{:.1} us", 1e6 * found.seconds),
                format!("{:.0}", 1.0 / found.seconds),
                ratio(measured[0].1.seconds / found.seconds),
                ratio(measured[1].1.seconds / found.seconds),
                format!("{:.2}", found.allocations),
            ]);
        }
    }
    println!("{}", table.text(120));
    println!("{}", learners().text(120));
}

/// Learners that are compared at d = 768, M = 8, k = 16, the default first.
const LEARNERS: [(&str, Algorithm, Option<Estimator>); 4] = [
    ("hpg", Algorithm::Hpg, None),
    ("hpg, estimator = \"logged\"", Algorithm::Hpg, Some(Estimator::Logged)),
    ("hypentropy-regression", Algorithm::HypentropyRegression, None),
    ("lin-ucb", Algorithm::LinUcb, None),
];

/// Examples before the measurement, and in it. A critic solves its regression every few thousand examples: the mean over
/// many of these intervals includes their share.
const WARM_UP: usize = 40_000;
const MEASURED: usize = 3 * 8192;

/// What an example of each learner costs on average, with everything that is done now and then.
fn learners() -> Table {
    let (dim, models) = (768, 8);
    let columns = ["learner", "queries", "time an example", "examples/s", "of hpg, logged", "allocations", "state"];
    let mut table = Table { columns: columns.map(Column::right).into_iter().collect(), rows: Vec::new(), note: None };
    for repeated in [false, true] {
        let examples = examples(dim, models, 20_000, repeated);
        let mut measured = Vec::new();
        for (name, algorithm, estimator) in LEARNERS {
            let models = (0..models).map(|m| format!("m{m}")).collect();
            let config = LearnerConfig { dim, models, algorithm, estimator, ..LearnerConfig::default() };
            let mut trainer = Trainer::new(config.check().expect("a good configuration"));
            let mut next = examples.iter().cycle().cloned();
            let mut learn = |n: usize| {
                let (mut time, mut allocations) = (Duration::ZERO, 0);
                for _ in 0..n / 64 {
                    let batch: Vec<Example> = next.by_ref().take(64).collect();
                    let (start, before) = (Instant::now(), ALLOCATIONS.load(Ordering::Relaxed));
                    for example in batch {
                        trainer.learn(example).expect("an example of this shape");
                    }
                    time += start.elapsed();
                    allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
                }
                (time.as_secs_f64() / n as f64, allocations as f64 / n as f64)
            };
            learn(WARM_UP);
            let (seconds, allocations) = learn(MEASURED);
            eprintln!("{name}, repeated: {repeated}: {seconds:.3e} s");
            measured.push((name, seconds, allocations, trainer.save().len()));
        }
        for (name, seconds, allocations, state) in &measured {
            table.rows.push(vec![
                (*name).to_owned(),
                if repeated { "repeated" } else { "20,000" }.to_owned(),
                format!("{:.1} us", 1e6 * seconds),
                format!("{:.0}", 1.0 / seconds),
                ratio(seconds / measured[1].1),
                format!("{allocations:.2}"),
                format!("{:.1} MB", *state as f64 / 1e6),
            ]);
        }
    }
    table
}

fn ratio(x: f64) -> String {
    if x < 10.0 { format!("{x:.3}") } else { format!("{x:.0}") }
}

/// How many queries are repeated.
const POOL: usize = 12;

/// Examples as a router that still plays uniformly logs them; nine in ten queries are one of a few, if `repeated`.
fn examples(dim: usize, models: usize, count: usize, repeated: bool) -> Vec<Example> {
    let mut queries = Queries::new(Shape::PowerLaw, dim, 1);
    let pool: Vec<Query> = (0..POOL).map(|_| queries.draw()).collect();
    let uniform = vec![1.0 / models as f64; models];
    let example = |i: usize| {
        let reward = f64::from(u8::from(i * 7 % 5 < 2));
        let query = if repeated && !i.is_multiple_of(10) { pool[i * 7 % POOL].clone() } else { queries.draw() };
        Example::new(query, i * 3 % models, uniform.clone(), None, reward).expect("a good example")
    };
    (0..count).map(example).collect()
}

/// What one update takes.
struct Found {
    /// Median over stretches.
    seconds: f64,
    /// In the last stretch.
    allocations: f64,
}

/// HPG without a critic.
fn hpg() -> LearnerConfig {
    LearnerConfig { estimator: Some(Estimator::Logged), ..LearnerConfig::default() }
}

fn measure(mode: Mode, rank: usize, examples: &[Example]) -> Found {
    let models = examples[0].propensities().len();
    let dim = examples[0].query().as_slice().len();
    let names = (0..models).map(|m| format!("m{m}")).collect();
    let config = LearnerConfig { dim, models: names, rank: Some(rank), mode, ..hpg() };
    let mut trainer = Trainer::new(config.check().expect("a good configuration"));
    let mut next = examples.iter().cycle().cloned();
    let mut learn = |n: usize| {
        let batch: Vec<Example> = next.by_ref().take(n).collect();
        let (start, before) = (Instant::now(), ALLOCATIONS.load(Ordering::Relaxed));
        for example in batch {
            trainer.learn(example).expect("an example of this shape");
        }
        (start.elapsed(), (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64 / n as f64)
    };
    // A dense decomposition costs the same whatever the rank reached: one is warm-up enough.
    let (first, _) = learn(1);
    let slow = first > BUDGET / 50;
    let stretch = if slow { 1 } else { 100 };
    if !slow {
        learn(4 * rank);
    }
    let (mut times, mut allocations) = (Vec::new(), 0.0);
    let start = Instant::now();
    while times.len() < 3 || start.elapsed() < BUDGET {
        let (time, count) = learn(stretch);
        times.push(time.as_secs_f64() / stretch as f64);
        allocations = count;
    }
    times.sort_by(f64::total_cmp);
    Found { seconds: times[times.len() / 2], allocations }
}
