//! What HPG is compared with: what is particular to it. What holds of every learner is tested in `invariants`.

use pointsman::config::{Algorithm, Estimator, FeatureKind, LearnerConfig, Mode};
use pointsman::event::{Example, Query};
use pointsman::hpg::gradient::coefficients;
use pointsman::learner::Trainer;
use pointsman::query_key::QueryKey;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const DIM: usize = 6;

fn config(algorithm: Algorithm, change: impl FnOnce(&mut LearnerConfig)) -> LearnerConfig {
    let models = ["a", "b", "c"].map(String::from).to_vec();
    let mut config = LearnerConfig { dim: DIM, models, algorithm, feature_rank: Some(3), ..LearnerConfig::default() };
    change(&mut config);
    config
}

fn trainer(config: &LearnerConfig) -> Trainer {
    Trainer::new(config.check().unwrap())
}

/// Every rival, hypentropy regression, and HPG with a critic, in all their forms.
fn rivals() -> Vec<LearnerConfig> {
    let plain = |algorithm| config(algorithm, |_| ());
    vec![
        plain(Algorithm::Exp3),
        plain(Algorithm::LogLinear),
        plain(Algorithm::LogQuadratic),
        config(Algorithm::LogQuadratic, |c| c.rank = Some(2)),
        plain(Algorithm::LinUcb),
        config(Algorithm::LinUcb, |c| c.features = FeatureKind::Linear),
        plain(Algorithm::LinThompson),
        plain(Algorithm::QuadraticSgd),
        plain(Algorithm::HypentropyRegression),
        config(Algorithm::HypentropyRegression, |c| c.feature_rank = Some(0)),
        config(Algorithm::HypentropyRegression, |c| (c.feature_rank, c.mode) = (Some(DIM), Mode::Explicit)),
        config(Algorithm::Hpg, |c| c.estimator = Some(Estimator::Critic)),
        config(Algorithm::Hpg, |c| (c.mode, c.head_queries) = (Mode::Explicit, 0)),
    ]
}

/// Examples by a uniform router, nine of ten queries from a pool of four: model m is good where |q_m| is large.
fn examples(n: usize, seed: u64) -> Vec<Example> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut fresh = || (0..DIM).map(|i| (random.random::<f64>() - 0.4) / (i + 1) as f64).collect::<Vec<f64>>();
    let pool: Vec<Vec<f64>> = (0..4).map(|_| fresh()).collect();
    let drawn: Vec<Vec<f64>> = (0..n).map(|_| fresh()).collect();
    let example = |(i, fresh): (usize, Vec<f64>)| {
        let query =
            Query::new(if i % 10 == 0 { fresh } else { pool[random.random_range(0..4_usize)].clone() }).unwrap();
        let model = random.random_range(0..3_usize);
        let chance = query.as_slice()[model].abs();
        let reward = f64::from(u8::from(random.random::<f64>() < chance));
        Example::new(query, model, vec![0.25, 0.25, 0.5], None, reward).unwrap()
    };
    drawn.into_iter().enumerate().map(example).collect()
}

fn teach(trainer: &mut Trainer, examples: &[Example]) {
    examples.iter().for_each(|example| trainer.learn(example.clone()).unwrap());
}

fn query(seed: u64) -> Query {
    examples(1, seed).remove(0).query().clone()
}

/// Also across the moment when the directions of quadratic features become known, and with exact play.
#[test]
fn going_on_from_a_saved_state_is_bit_identical() {
    let all = examples(620, 1);
    for base in rivals() {
        for (batch, half_life) in [(1, None), (7, Some(100.0))] {
            let config = LearnerConfig { batch: Some(batch), half_life, ..base.clone() };
            let (mut straight, mut broken) = (trainer(&config), trainer(&config));
            for (t, example) in all.iter().enumerate() {
                if [3, 40, 333, 495, 500, 505].contains(&t) {
                    broken = Trainer::restore(config.check().unwrap(), &broken.save()).unwrap();
                }
                let [one, other] = [&mut straight, &mut broken].map(|trainer| {
                    let decisions = (trainer.decide_exactly(example.query()), trainer.decide(example.query()));
                    trainer.learn(example.clone()).unwrap();
                    decisions
                });
                assert_eq!(one, other, "{config:?} at {t}");
            }
            assert_eq!(straight.save(), broken.save(), "{config:?}");
        }
    }
}

#[test]
fn routers_play_what_the_learner_plays() {
    for base in rivals() {
        for half_life in [None, Some(100.0)] {
            let config = LearnerConfig { half_life, ..base.clone() };
            let mut trainer = trainer(&config);
            teach(&mut trainer, &examples(630, 2));
            let policy = trainer.policy();
            let taught = examples(630, 2).into_iter().step_by(90).map(|example| example.query().clone());
            for query in (0..40).map(query).chain(taught) {
                let mut scores: Vec<f64> = policy.scores.iter().map(|form| form.score(query.as_slice())).collect();
                let head = policy.head.get(QueryKey::of(&query)).into_iter().flatten();
                scores.iter_mut().zip(head).for_each(|(score, more)| *score += f64::from(*more));
                let (found, expected) = (policy.sampling.core(&scores), trainer.distribution(&query).unwrap().policy);
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-5, "{config:?}: {found} {expected}");
                }
            }
        }
    }
}

/// b goes, d comes, and the order is another: also while the first examples are kept, and in the middle of recent steps.
#[test]
fn models_that_stay_keep_their_scores() {
    for config in rivals() {
        for taught in [100, 630] {
            let mut before = trainer(&config);
            teach(&mut before, &examples(taught, 3));
            let changed = LearnerConfig { models: ["c", "d", "a"].map(String::from).to_vec(), ..config.clone() };
            let mut after = Trainer::restore(changed.check().unwrap(), &before.save()).unwrap();
            let (old, new) = (before.policy().scores, after.policy().scores);
            for seed in 0..10 {
                let query = query(seed);
                let of = |form: &pointsman::router::ScoreForm| form.score(query.as_slice());
                let (old, new): (Vec<f64>, Vec<f64>) = (old.iter().map(of).collect(), new.iter().map(of).collect());
                // What exponential weights say is relative.
                let found = new[2] - new[0];
                let expected = old[0] - old[2];
                assert!((found - expected).abs() < 1e-5, "{config:?}: {found} {expected}");
                if config.algorithm == Algorithm::Exp3 {
                    assert_eq!(new[1], new[0].max(new[2]), "a new model is tried as often as the best");
                } else {
                    assert!((new[2] - old[0]).abs() < 1e-6 && new[1].abs() < 1e-6, "{config:?}: {new:?} {old:?}");
                }
            }
            teach(&mut after, &examples(600, 4));
            let d = &after.policy().scores[1];
            assert!(
                d.score(query(1).as_slice()) != 0.0 || config.algorithm == Algorithm::Exp3,
                "{config:?}: has learned"
            );
        }
    }
}

#[test]
fn states_of_another_shape_are_refused() {
    type Change = fn(&mut LearnerConfig);
    let all: [(Algorithm, Change, Change, bool); 12] = [
        (Algorithm::LinUcb, |_| (), |c| c.features = FeatureKind::Linear, false),
        (Algorithm::LinUcb, |_| (), |c| c.feature_rank = Some(2), false),
        (Algorithm::LinUcb, |_| (), |c| c.algorithm = Algorithm::LinThompson, false),
        (Algorithm::LinUcb, |_| (), |c| (c.ridge, c.alpha) = (Some(3.0), Some(2.0)), true),
        (Algorithm::LogQuadratic, |_| (), |c| c.rank = Some(3), true),
        (Algorithm::LogQuadratic, |c| c.rank = Some(3), |c| c.rank = Some(2), true),
        (Algorithm::LogQuadratic, |c| c.rank = Some(2), |c| c.rank = Some(3), true),
        (Algorithm::LogLinear, |_| (), |c| (c.ridge, c.eta) = (Some(3.0), Some(2.0)), true),
        (Algorithm::HypentropyRegression, |_| (), |c| c.feature_rank = Some(2), true),
        (Algorithm::HypentropyRegression, |_| (), |c| c.feature_rank = Some(4), true),
        (Algorithm::HypentropyRegression, |_| (), |c| (c.ridge, c.tau) = (Some(5.0), Some(0.5)), true),
        (Algorithm::HypentropyRegression, |_| (), |c| c.mode = Mode::Explicit, true),
    ];
    for (algorithm, saved, changed, fits) in all {
        for taught in [100, 600] {
            let mut config = config(algorithm, saved);
            let mut trainer = trainer(&config);
            teach(&mut trainer, &examples(taught, 5));
            changed(&mut config);
            let restored = Trainer::restore(config.check().unwrap(), &trainer.save());
            assert_eq!(restored.is_ok(), fits, "{config:?}");
            if let Ok(mut trainer) = restored {
                teach(&mut trainer, &examples(50, 6));
            }
        }
    }
}

/// Against the sum that it is; cut at full rank, it is not cut.
#[test]
fn log_quadratic_is_a_sum_of_gradients() {
    for (batch, rank) in [(1, None), (5, None), (1, Some(DIM)), (5, Some(DIM))] {
        let config = config(Algorithm::LogQuadratic, |c| (c.batch, c.rank, c.eta) = (Some(batch), rank, Some(0.7)));
        let mut trainer = trainer(&config);
        let mut sums = vec![vec![0.0; DIM * DIM]; 3];
        let (mut earned, mut c) = (0.0, Vec::new());
        for (t, example) in examples(400, 7).iter().enumerate() {
            let mean = if t == 0 { 0.5 } else { earned / t as f64 };
            coefficients(example, example.policy(), mean, 10.0, &mut c);
            let q = example.query().as_slice();
            for (sum, c) in sums.iter_mut().zip(&c) {
                sum.iter_mut().enumerate().for_each(|(at, w)| *w += 0.7 * c * q[at / DIM] * q[at % DIM]);
            }
            earned += example.reward().unwrap();
            trainer.learn(example.clone()).unwrap();
        }
        for (eigen, sum) in trainer.eigens().iter().zip(&sums) {
            let close = |(found, expected): (f64, &f64)| (found - expected).abs() < 1e-9;
            assert!(eigen.dense(DIM).into_iter().zip(sum).all(close), "batch {batch}, rank {rank:?}");
        }
    }
}

#[test]
fn a_cut_keeps_its_rank() {
    let mut trainer = trainer(&config(Algorithm::LogQuadratic, |c| c.rank = Some(2)));
    let mut largest = 0;
    for example in examples(200, 8) {
        trainer.learn(example).unwrap();
        let ranks = trainer.eigens().iter().map(|eigen| eigen.lambda.len()).max();
        largest = largest.max(ranks.unwrap());
        if trainer.version().is_multiple_of(32) {
            assert!(ranks <= Some(2), "{ranks:?}");
        }
    }
    assert!(largest > 2, "recent steps are exact");
}

#[test]
fn exact_play_is_a_point_mass_but_for_the_floor() {
    for algorithm in [Algorithm::LinUcb, Algorithm::LinThompson] {
        let mut trainer = trainer(&config(algorithm, |c| c.exploration_floor = 0.3));
        teach(&mut trainer, &examples(600, 9));
        let mut best = [0; 3];
        for seed in 0..100 {
            let decision = trainer.decide_exactly(&query(seed)).unwrap().unwrap();
            let chosen = decision.distribution.policy.iter().position(|p| *p == 1.0).unwrap();
            assert_eq!(decision.distribution.policy.iter().sum::<f64>(), 1.0);
            assert!((decision.distribution.propensities[chosen] - 0.8).abs() < 1e-12);
            assert!(decision.distribution.propensities[decision.model] > 0.0);
            best[chosen] += 1;
        }
        assert!(best.iter().filter(|count| **count > 0).count() > 1, "it depends on the query: {best:?}");
        assert!(trainer.decide_exactly(&Query::new([1.0]).unwrap()).is_err());
    }
    for algorithm in [Algorithm::Hpg, Algorithm::Exp3, Algorithm::QuadraticSgd] {
        assert_eq!(trainer(&config(algorithm, |_| ())).decide_exactly(&query(1)).unwrap(), None);
    }
}

/// Before anything is known every model is tried, though none is better.
#[test]
fn a_bonus_makes_every_model_be_tried() {
    let mut trainer = trainer(&config(Algorithm::LinUcb, |_| ()));
    let mut tried = [0; 3];
    for example in examples(30, 10) {
        let decision = trainer.decide_exactly(example.query()).unwrap().unwrap();
        tried[decision.model] += 1;
        let propensities = decision.distribution.propensities;
        trainer.learn(Example::new(example.query().clone(), decision.model, propensities, None, 0.5).unwrap()).unwrap();
    }
    assert_eq!(tried, [10; 3]);
}
