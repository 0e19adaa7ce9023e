//! What several benches share: the stream of examples, and what the machine can do.

use std::time::Duration;

use pointsman::config::{LearnerConfig, Mode};
use pointsman::event::{Example, Query};
use pointsman::learner::Trainer;
use pointsman::simulate::queries::{Queries, Shape};

pub mod machine;

/// What varies between measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub dim: usize,
    pub models: usize,
    pub rank: usize,
    pub batch: usize,
}

/// A learner of this size that has not seen anything.
pub fn trainer(size: Size, mode: Mode) -> Trainer {
    let Size { dim, models, rank, batch } = size;
    let models = model_names(models);
    let config = LearnerConfig { dim, models, rank: Some(rank), batch: Some(batch), mode, ..LearnerConfig::default() };
    Trainer::new(config.check().expect("a good configuration"))
}

pub fn model_names(models: usize) -> Vec<String> {
    (0..models).map(|m| format!("m{m}")).collect()
}

/// Queries with the spectrum of real embeddings.
pub fn queries(dim: usize, count: usize, seed: u64) -> Vec<Query> {
    let mut queries = Queries::new(Shape::PowerLaw, dim, seed);
    (0..count).map(|_| queries.draw()).collect()
}

/// These queries as a router that still plays uniformly logs them.
pub fn examples(queries: impl IntoIterator<Item = Query>, models: usize) -> Vec<Example> {
    let uniform = vec![1.0 / models as f64; models];
    let example = |(i, query): (usize, Query)| {
        let reward = f64::from(u8::from(i * 7 % 5 < 2));
        Example::new(query, i * 3 % models, uniform.clone(), None, reward).expect("a good example")
    };
    queries.into_iter().enumerate().map(example).collect()
}

/// Learns from copies of so many of the examples, from number `at` on and round again; returns the seconds of one.
pub fn learn(trainer: &mut Trainer, examples: &[Example], at: usize, count: usize) -> f64 {
    learn_and(trainer, examples, at, count, |_| {})
}

/// The same, with something done after each.
pub fn learn_and(
    trainer: &mut Trainer,
    examples: &[Example],
    at: usize,
    count: usize,
    then: impl Fn(&mut Trainer),
) -> f64 {
    let copies: Vec<Example> = examples.iter().cycle().skip(at % examples.len()).take(count).cloned().collect();
    let learn = |example| {
        trainer.learn(example).expect("an example of this shape");
        then(trainer);
    };
    timed(|| copies.into_iter().for_each(learn)) / count as f64
}

/// The least that each of some works has taken. They take turns until `budget` is spent, at least three, so that a busy
/// moment of the machine falls on all; the least, since other programs can only ever add to a time.
pub fn fastest<const N: usize>(budget: Duration, mut works: [&mut dyn FnMut() -> f64; N]) -> [f64; N] {
    let mut least = [f64::INFINITY; N];
    let (start, mut turns) = (clock(), 0);
    while turns < 3 || clock() - start < budget.as_secs_f64() {
        for (work, least) in works.iter_mut().zip(&mut least) {
            *least = least.min(work());
        }
        turns += 1;
    }
    least
}

/// Seconds of work.
pub fn timed(work: impl FnOnce()) -> f64 {
    let start = clock();
    work();
    clock() - start
}

/// Processor time of this thread, in seconds: what the system gives to other programs meanwhile does not count.
#[cfg(unix)]
fn clock() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the place that it is given, and to nothing else.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "no clock of processor time");
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// Seconds since the first call.
#[cfg(not(unix))]
fn clock() -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}
