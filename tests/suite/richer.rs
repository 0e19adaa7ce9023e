//! Models that are missing at random, and feedback about more than the chosen model: whole runs in simulated worlds.

use pointsman::config::Algorithm;
use pointsman::event::{Example, Preference};
use pointsman::learner::Trainer;
use pointsman::router::Distribution;
use pointsman::simulate::World;
use pointsman::simulate::history::History;
use pointsman::simulate::partial::Partial;
use pointsman::simulate::run::{InProcess, Plan, run};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::budget::{MODELS, in_parallel, learner, plain};
use crate::size::sized;

/// The gap is that between the best constant model and the oracle, both among the eligible models.
#[test]
fn half_of_the_models_missing_at_random_costs_little() {
    let (seeds, dim, rounds) = (sized(2, 10) as u64, sized(32, 64), sized(20_000, 40_000) as u64);
    for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
        let closed = |is_partial: bool| {
            let each = in_parallel(101..101 + seeds, |seed| {
                let world = plain(dim, seed);
                let mut world: Box<dyn World> = if is_partial { Box::new(Partial::new(world, seed)) } else { world };
                let mut trainer = Trainer::new(learner(dim, algorithm).check().unwrap());
                let mut history = History::new(rounds, 200);
                let plan = Plan { rounds, delay: 0, refresh: 1, lost: 0.0, switch_at: None, seed };
                run(&mut *world, &mut InProcess::new(&mut trainer, 1), &plan, &mut history, |_| ()).unwrap();
                let summary = history.summary(1.0);
                100.0 * summary.gap_closed(summary.policy)
            });
            each.iter().sum::<f64>() / each.len() as f64
        };
        let [whole, partial] = [false, true].map(closed);
        println!(
            "{algorithm}, {seeds} seeds: {partial:.1}% of the gap with half of the models missing, {whole:.1}% with all"
        );
        assert!(partial > whole - 5.0, "{algorithm}: {partial} {whole}");
    }
}

/// What is known besides the reward of the chosen model.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Extra {
    /// Nothing.
    Nothing,
    /// On a tenth of the queries, the rewards of all models.
    AllModels,
    /// On a tenth of the queries, whether the chosen model or a random other one was better.
    Preference,
    /// On every query such a preference, and no reward.
    PreferenceAlone,
}

const BIN: usize = 500;

/// Mean expected reward of each `BIN` queries.
fn curve(algorithm: Algorithm, dim: usize, rounds: usize, extra: Extra, seed: u64) -> Vec<f64> {
    let (mut world, mut luck) = (plain(dim, seed), ChaCha8Rng::seed_from_u64(seed));
    luck.set_stream(7);
    let mut trainer = Trainer::new(learner(dim, algorithm).check().unwrap());
    let mut earned = vec![0.0; rounds / BIN];
    for round in 0..rounds {
        let query = world.next_query();
        let expected = world.expected_rewards(&query);
        let [draw, asked, other, tie]: [f64; 4] = luck.random();
        let rewards: Vec<f64> = expected.iter().map(|r| f64::from(u8::from(luck.random::<f64>() < *r))).collect();
        let distribution = trainer.distribution(&query).unwrap();
        let model = distribution.draw(draw);
        let Distribution { policy, propensities, .. } = distribution;
        earned[round / BIN] += propensities.iter().zip(&expected).map(|(p, r)| p * r).sum::<f64>() / BIN as f64;
        let compared = (model + 1 + (other * (MODELS - 1) as f64) as usize) % MODELS;
        let is_better = rewards[model] > rewards[compared] || (rewards[model] == rewards[compared] && tie < 0.5);
        let (preferred, over) = if is_better { (model, compared) } else { (compared, model) };
        let preference = Preference { preferred, over };
        let example = match extra {
            Extra::PreferenceAlone => Example::unrewarded(query, model, propensities, Some(policy)),
            _ => Example::new(query, model, propensities, Some(policy), rewards[model]),
        };
        let is_asked = asked < 0.1;
        let others = || (0..MODELS).filter(|m| *m != model).map(|m| (m, rewards[m])).collect();
        let example = match extra {
            Extra::AllModels if is_asked => example.unwrap().with_others(others()),
            Extra::Preference if is_asked => example.unwrap().with_preference(preference),
            Extra::PreferenceAlone => example.unwrap().with_preference(preference),
            _ => example,
        };
        trainer.learn(example.unwrap()).unwrap();
    }
    earned
}

/// Mean of the latest 2,000 queries at the end of every bin.
fn smooth(curve: &[f64]) -> Vec<f64> {
    let span = 4;
    (1..=curve.len())
        .map(|end| &curve[end.saturating_sub(span)..end])
        .map(|c| c.iter().sum::<f64>() / c.len() as f64)
        .collect()
}

/// Rewards of all models on a tenth of the queries save requests: fewer are needed for the reward that feedback about the chosen
/// model alone comes to in the end.
#[test]
fn feedback_about_all_models_saves_requests() {
    let (seeds, dim, rounds) = (sized(2, 10) as u64, sized(32, 64), sized(10_000, 20_000));
    for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
        let mean_of = |extra| {
            let each = in_parallel(101..101 + seeds, |seed| smooth(&curve(algorithm, dim, rounds, extra, seed)));
            (0..rounds / BIN).map(|i| each.iter().map(|c| c[i]).sum::<f64>() / each.len() as f64).collect::<Vec<_>>()
        };
        let plain = mean_of(Extra::Nothing);
        let goal = plain.iter().copied().fold(0.0, f64::max);
        let needed = |curve: &[f64]| curve.iter().position(|r| *r >= goal).map(|i| (i + 1) * BIN);
        let reference = needed(&plain).unwrap();
        println!(
            "{algorithm}, {seeds} seeds: reward {goal:.4} after {reference} requests with the reward of the chosen model"
        );
        for extra in [Extra::AllModels, Extra::Preference, Extra::PreferenceAlone] {
            let curve = mean_of(extra);
            let last = curve.last().unwrap();
            match needed(&curve) {
                Some(n) => println!(
                    "{algorithm}, {extra:?}: after {n} requests, {:.0}% saved; {last:.4} in the end",
                    100.0 * (1.0 - n as f64 / reference as f64)
                ),
                None => println!("{algorithm}, {extra:?}: not within {rounds} requests; {last:.4} in the end"),
            }
            if extra == Extra::AllModels {
                let n = needed(&curve).unwrap_or(usize::MAX);
                assert!(n as f64 <= 0.8 * reference as f64, "{algorithm}: {n} {reference}");
            }
            if extra == Extra::PreferenceAlone {
                assert!(*last > plain[3] + 0.02, "{algorithm}: preferences alone teach");
            }
        }
    }
}
