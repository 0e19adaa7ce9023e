//! Every stage between an event and a decision, beside what the machine could do at best and what a plain implementation
//! takes, all in one run.
//!
//!   cargo bench --bench stages
//!   cargo bench --bench stages -- --json
//!
//! The ratios are what counts. The roofline of the update is explained in `support/machine.rs`; that of a stage that only
//! moves data is one copy of it. Times are the least of many, after a warm-up that fills the rank.

use std::hint::black_box;
use std::time::Duration;

use support::machine::Machine;
use support::{Size, fastest, queries, timed};

mod events;
mod learning;
mod output;
mod routing;
#[path = "../support/mod.rs"]
mod support;

const DIM: usize = 768;
const MODELS: usize = 8;
const RANKS: [usize; 2] = [16, 32];

/// How long a stage and its alternatives are measured together.
const BUDGET: Duration = Duration::from_secs(2);

/// Updates, queries or events in one stretch of time.
const STRETCH: usize = 128;

/// What was measured of a stage, in seconds.
struct Stage {
    name: &'static str,
    rank: Option<usize>,
    time: f64,
    limit: Option<f64>,
    alternatives: Vec<(&'static str, f64)>,
}

fn main() {
    let machine = Machine::measure();
    let mut stages = Vec::new();
    let mut limits = Vec::new();
    for rank in RANKS {
        let size = Size { dim: DIM, models: MODELS, rank, batch: 1 };
        let of_rank = machine.limits(size);
        let (learning, trainer) = learning::learning(size, &of_rank);
        stages.extend(learning);
        stages.extend(routing::routing(&trainer, rank, &machine));
        limits.push((rank, of_rank));
    }
    stages.extend(events::decoding());
    stages.push(events::joining());
    if std::env::args().any(|argument| argument == "--json") {
        println!("{}", output::as_json(&machine, &limits, &stages));
        return;
    }
    println!("{}", output::machine_table(&machine, &limits).text(120));
    println!("{}", output::stage_table(&stages).text(120));
}

/// Queries as routers get them.
fn singles(count: usize) -> Vec<Vec<f32>> {
    queries(DIM, count, 4).iter().map(|query| query.as_slice().iter().map(|&x| x as f32).collect()).collect()
}

/// Seconds of one, over all of them.
fn each<T>(all: &[T], work: impl FnMut(&T)) -> f64 {
    timed(|| all.iter().for_each(work)) / all.len() as f64
}

/// Seconds to copy so many bytes from one buffer to another.
fn copy(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let rounds = (1 << 20) / bytes + 1;
    let mut copy = || (0..rounds).for_each(|_| black_box(&mut to).copy_from_slice(black_box(&from)));
    fastest(BUDGET / 20, [&mut || timed(&mut copy)])[0] / rounds as f64
}
