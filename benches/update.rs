//! One update of all models: exact, explicit and factored, on the same examples in the same run.
//!
//! `cargo bench --bench update`. The ratios are what counts: they come from one machine in one run. Times are medians
//! over stretches of updates, after a warm-up that fills the rank.

use std::time::{Duration, Instant};

use pointsman::config::{LearnerConfig, Mode};
use pointsman::event::Example;
use pointsman::learner::Trainer;
use pointsman::report::{Column, Table};
use pointsman::simulate::queries::{Queries, Shape};

/// (d, M, k)
const SIZES: [(usize, usize, usize); 3] = [(64, 8, 16), (768, 8, 16), (768, 8, 32)];

/// How long each mode is measured, unless one update takes longer.
const BUDGET: Duration = Duration::from_secs(3);

fn main() {
    let columns = ["d", "M", "k", "mode", "time an update", "updates/s", "times faster than exact", "than explicit"];
    let columns = columns.map(Column::right).into_iter().collect();
    let mut table = Table { columns, rows: Vec::new(), note: None };
    for (dim, models, rank) in SIZES {
        let examples = examples(dim, models, 2000);
        let seconds = [Mode::Exact, Mode::Explicit, Mode::Factored].map(|mode| {
            let seconds = measure(mode, rank, &examples);
            eprintln!("d={dim} M={models} k={rank} {mode}: {seconds:.3e} s");
            (mode, seconds)
        });
        for (mode, time) in seconds {
            table.rows.push(vec![
                dim.to_string(),
                models.to_string(),
                rank.to_string(),
                mode.to_string(),
                format!("{:.1} us", 1e6 * time),
                format!("{:.0}", 1.0 / time),
                ratio(seconds[0].1 / time),
                ratio(seconds[1].1 / time),
            ]);
        }
    }
    println!("{}", table.text());
}

fn ratio(x: f64) -> String {
    if x < 10.0 { format!("{x:.3}") } else { format!("{x:.0}") }
}

/// Examples as a router that still plays uniformly logs them.
fn examples(dim: usize, models: usize, count: usize) -> Vec<Example> {
    let mut queries = Queries::new(Shape::PowerLaw, dim, 1);
    let uniform = vec![1.0 / models as f64; models];
    let example = |i: usize| {
        let reward = f64::from(u8::from(i * 7 % 5 < 2));
        Example::new(queries.draw(), i * 3 % models, uniform.clone(), None, reward).expect("a good example")
    };
    (0..count).map(example).collect()
}

/// Median seconds of one update.
fn measure(mode: Mode, rank: usize, examples: &[Example]) -> f64 {
    let models = examples[0].propensities().len();
    let dim = examples[0].query().as_slice().len();
    let names = (0..models).map(|m| format!("m{m}")).collect();
    let config = LearnerConfig { dim, models: names, rank: Some(rank), mode, ..LearnerConfig::default() };
    let mut trainer = Trainer::new(config.check().expect("a good configuration"));
    let mut next = examples.iter().cycle().cloned();
    let mut learn = |n: usize| {
        let batch: Vec<Example> = next.by_ref().take(n).collect();
        let start = Instant::now();
        for example in batch {
            trainer.learn(example).expect("an example of this shape");
        }
        start.elapsed()
    };
    // A dense decomposition costs the same whatever the rank reached: one is warm-up enough.
    let first = learn(1);
    let slow = first > BUDGET / 50;
    let stretch = if slow { 1 } else { 100 };
    if !slow {
        learn(4 * rank);
    }
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 3 || start.elapsed() < BUDGET {
        times.push(learn(stretch).as_secs_f64() / stretch as f64);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
