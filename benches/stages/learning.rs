//! Scores and updates.

use std::hint::black_box;
use std::time::Duration;

use pointsman::config::Mode;
use pointsman::event::{Example, Query};
use pointsman::learner::Trainer;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::machine::Limit;
use crate::support::{Size, examples, fastest, learn, learn_and, queries, trainer};
use crate::{BUDGET, DIM, STRETCH, Stage, each};

/// Of the queries that repeat, so many are different.
const POOL: usize = 6;

/// Scoring and updates, and the learner that they leave.
pub fn learning(size: Size, [known, unknown]: &[Limit; 2]) -> (Vec<Stage>, Trainer) {
    let distinct = examples(queries(size.dim, 2000, 1), size.models);
    let repeated = examples(repeats(&queries(size.dim, 2000, 2)), size.models);
    let mut main = warm(size, Mode::Factored, &distinct);
    let mut explicit = warm(size, Mode::Explicit, &distinct);
    let mut repeating = warm(size, Mode::Factored, &repeated);
    let mut watched = warm(size, Mode::Factored, &distinct);
    let [update, explicit_update, repeated_update, single_update] = fastest(
        2 * BUDGET,
        [
            &mut stretches(&mut main, &distinct, STRETCH),
            &mut stretches(&mut explicit, &distinct, STRETCH / 8),
            &mut stretches(&mut repeating, &repeated, STRETCH),
            &mut singles(&mut watched, &distinct),
        ],
    );
    // A dense decomposition costs the same whatever the rank reached, and takes most of a second: three will do.
    let mut exact = trainer(size, Mode::Exact);
    let [exact_update] = fastest(Duration::ZERO, [&mut stretches(&mut exact, &distinct, 1)]);
    let stage = |name, time, limit, alternatives| Stage { name, rank: Some(size.rank), time, limit, alternatives };
    let modes = vec![("explicit", explicit_update), ("exact", exact_update)];
    let stages = vec![
        scoring(&main, size.rank, unknown.score),
        stage("update", update, Some(known.total()), modes),
        stage("update, 90% repeated", repeated_update, Some(known.total()), vec![("no repeats", update)]),
        stage("update, next unknown", single_update, Some(unknown.total()), vec![("next known", update)]),
    ];
    (stages, main)
}

/// One in ten is new, the others come from a small pool.
fn repeats(fresh: &[Query]) -> Vec<Query> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let draw = |query: &Query| match random.random::<f64>() < 0.9 {
        true => fresh[random.random_range(0..POOL)].clone(),
        false => query.clone(),
    };
    fresh.iter().map(draw).collect()
}

/// A learner whose rank is full, and whose buffers have turned over.
fn warm(size: Size, mode: Mode, examples: &[Example]) -> Trainer {
    let mut trainer = trainer(size, mode);
    learn(&mut trainer, examples, 0, 8 * size.rank);
    trainer
}

/// Goes on learning, a stretch at a time.
fn stretches<'a>(trainer: &'a mut Trainer, examples: &'a [Example], count: usize) -> impl FnMut() -> f64 + 'a {
    let mut at = 0;
    move || {
        at += count;
        learn(trainer, examples, at, count)
    }
}

/// The same with a look after each example, so that none can be put off until the next is known.
fn singles<'a>(trainer: &'a mut Trainer, examples: &'a [Example]) -> impl FnMut() -> f64 + 'a {
    let mut at = 0;
    move || {
        at += STRETCH;
        learn_and(trainer, examples, at, STRETCH, Trainer::flush)
    }
}

/// Scores of the learner, against the plain sums over multiplied-out eigenvectors.
fn scoring(trainer: &Trainer, rank: usize, limit: f64) -> Stage {
    let queries = queries(DIM, STRETCH, 3);
    let eigens = trainer.eigens();
    let mut score = || {
        each(&queries, |query| {
            black_box(trainer.distribution(query).expect("a query of this shape"));
        })
    };
    let mut plain = || {
        each(&queries, |query| {
            for eigen in &eigens {
                let vectors = eigen.vectors.chunks_exact(DIM);
                let products = vectors.map(|v| v.iter().zip(query.as_slice()).map(|(v, q)| v * q).sum::<f64>());
                black_box(products.zip(&eigen.lambda).map(|(p, lambda)| lambda * p * p).sum::<f64>());
            }
        })
    };
    let [time, plain] = fastest(BUDGET / 2, [&mut score, &mut plain]);
    Stage { name: "score, f64", rank: Some(rank), time, limit: Some(limit), alternatives: vec![("plain loop", plain)] }
}
