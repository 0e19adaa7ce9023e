//! HPG with a critic: what is particular to it. What holds of every learner is tested in `rivals` and `invariants`.

use pointsman::config::{Algorithm, Estimator, LearnerConfig, Mode};
use pointsman::event::{Example, Query};
use pointsman::learner::{BadState, Trainer};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const DIM: usize = 8;

fn config(change: impl FnOnce(&mut LearnerConfig)) -> LearnerConfig {
    let models = ["a", "b", "c"].map(String::from).to_vec();
    let mut config = LearnerConfig { dim: DIM, models, estimator: Some(Estimator::Critic), ..LearnerConfig::default() };
    change(&mut config);
    config
}

fn trainer(config: &LearnerConfig) -> Trainer {
    Trainer::new(config.check().unwrap())
}

fn draw(random: &mut ChaCha8Rng) -> Query {
    Query::new((0..DIM).map(|_| random.random::<f64>() - 0.5)).unwrap()
}

/// The reward that a model is expected to earn on a query.
type Truth = dyn Fn(&Query, usize) -> f64;

/// Uniformly routed examples of queries from a source.
fn teach(
    trainer: &mut Trainer,
    n: usize,
    random: &mut ChaCha8Rng,
    next: &mut dyn FnMut(&mut ChaCha8Rng) -> Query,
    truth: &Truth,
) {
    for _ in 0..n {
        let query = next(random);
        let model = random.random_range(0..3_usize);
        let reward = f64::from(u8::from(random.random::<f64>() < truth(&query, model)));
        trainer.learn(Example::new(query, model, vec![1.0 / 3.0; 3], None, reward).unwrap()).unwrap();
    }
}

/// Mean of what a policy earns on a hundred queries, less that of the best constant model.
fn lift(trainer: &Trainer, queries: &[Query], truth: &Truth) -> f64 {
    let mean = |of: &dyn Fn(&Query) -> f64| queries.iter().map(of).sum::<f64>() / queries.len() as f64;
    let constant = (0..3).map(|m| mean(&|query| truth(query, m))).fold(0.0, f64::max);
    let played = |query: &Query| {
        let policy = trainer.distribution(query).unwrap().policy;
        policy.iter().enumerate().map(|(m, p)| p * truth(query, m)).sum()
    };
    mean(&played) - constant
}

/// Model m is good where component m is large: linear, so that HPG without a constant component could not represent it.
fn linear(query: &Query, model: usize) -> f64 {
    (0.5 + 0.8 * query.as_slice()[model]).clamp(0.0, 1.0)
}

/// Which model is best says nothing of other queries.
fn arbitrary(query: &Query, model: usize) -> f64 {
    let bits = query.as_slice()[0].to_bits() >> 20;
    let base = if model == 0 { 0.5 } else { 0.4 };
    base + if bits % 3 == model as u64 { 0.3 } else { 0.0 }
}

#[test]
fn learns_a_linear_difference_and_carries_it_to_new_queries() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut trainer = trainer(&config(|_| ()));
    teach(&mut trainer, 6000, &mut random, &mut draw, &linear);
    let unseen: Vec<Query> = (0..200).map(|_| draw(&mut random)).collect();
    let best = unseen.iter().map(|q| (0..3).map(|m| linear(q, m)).fold(0.0, f64::max)).sum::<f64>() / 200.0;
    let constant = (0..3).map(|m| unseen.iter().map(|q| linear(q, m)).sum::<f64>() / 200.0).fold(0.0, f64::max);
    let lift = lift(&trainer, &unseen, &linear);
    assert!(lift > 0.7 * (best - constant), "{lift} {best} {constant}");
}

/// What cannot carry over is remembered query by query, and unfamiliar queries get the best constant model.
#[test]
fn remembers_frequent_queries_and_falls_back_on_others() {
    let mut random = ChaCha8Rng::seed_from_u64(2);
    let pool: Vec<Query> = (0..200).map(|_| draw(&mut random)).collect();
    let mut next = |random: &mut ChaCha8Rng| pool[random.random_range(0..pool.len())].clone();
    let unseen: Vec<Query> = (0..300).map(|_| draw(&mut ChaCha8Rng::seed_from_u64(random.random()))).collect();
    let mut of = |head_queries: usize| {
        let mut trainer = trainer(&config(|c| c.head_queries = head_queries));
        teach(&mut trainer, 16_000, &mut random, &mut next, &arbitrary);
        (lift(&trainer, &pool, &arbitrary), lift(&trainer, &unseen, &arbitrary), trainer.policy().head.len())
    };
    let (seen, others, exported) = of(4096);
    assert_eq!(exported, 200);
    assert!(seen > 0.07 && others > -0.05, "{seen} {others}");
    let (without, _, exported) = of(0);
    assert_eq!(exported, 0);
    assert!(without < seen - 0.02, "{without} {seen}");
}

/// A store that HPG wrote without a critic is the start of the critic's policy.
#[test]
fn a_policy_learned_without_a_critic_is_continued() {
    let quadratic = |query: &Query, model: usize| (0.2 + 2.0 * query.as_slice()[model].powi(2)).clamp(0.0, 1.0);
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let logged = config(|c| c.estimator = Some(Estimator::Logged));
    let mut before = trainer(&logged);
    teach(&mut before, 6000, &mut random, &mut draw, &quadratic);
    let saved = before.save();
    let mut after = Trainer::restore(config(|_| ()).check().unwrap(), &saved).unwrap();
    assert_eq!(after.version(), 6000);
    let unseen: Vec<Query> = (0..200).map(|_| draw(&mut random)).collect();
    let [old, new] = [&before, &after].map(|trainer| lift(trainer, &unseen, &quadratic));
    assert!(old > 0.03 && new > 0.7 * old, "{old} {new}");
    teach(&mut after, 2000, &mut random, &mut draw, &quadratic);
    assert!(lift(&after, &unseen, &quadratic) > 0.7 * old);
    let back = Trainer::restore(logged.check().unwrap(), &after.save());
    assert!(matches!(back, Err(BadState::Mismatch { key: "learner.estimator", .. })), "{:?}", back.err());
}

/// The rank and the representation of a saved learner may change; neither is part of what was learned.
#[test]
fn rank_and_mode_may_change() {
    for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let saved = config(|c| c.algorithm = algorithm);
        let mut trainer = trainer(&saved);
        teach(&mut trainer, 3000, &mut random, &mut draw, &linear);
        let restored = |change: &dyn Fn(&mut LearnerConfig)| {
            let mut config = saved.clone();
            change(&mut config);
            Trainer::restore(config.check().unwrap(), &trainer.save()).unwrap()
        };
        let mut explicit = restored(&|c| c.mode = Mode::Explicit);
        let query = draw(&mut random);
        let [found, expected] = [&explicit, &trainer].map(|trainer| trainer.distribution(&query).unwrap().policy);
        assert!(found.iter().zip(&expected).all(|(p, q)| (p - q).abs() < 1e-6), "{found:?} {expected:?}");
        let mut lower = restored(&|c| c.rank = Some(3));
        for trainer in [&mut explicit, &mut lower] {
            teach(trainer, 1000, &mut random, &mut draw, &linear);
            let unseen: Vec<Query> = (0..200).map(|_| draw(&mut random)).collect();
            assert!(lift(trainer, &unseen, &linear) > 0.03);
        }
    }
}

#[test]
fn a_new_model_starts_without_examples() {
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let mut trainer = trainer(&config(|_| ()));
    teach(&mut trainer, 3000, &mut random, &mut draw, &linear);
    let more = config(|c| c.models = ["b", "a", "d", "c"].map(String::from).to_vec()).check().unwrap();
    let moved = Trainer::restore(more, &trainer.save()).unwrap();
    let query = draw(&mut random);
    let [old, new] = [&trainer, &moved].map(|trainer| trainer.distribution(&query).unwrap().policy);
    let ratio = |policy: &[f64], i: usize, j: usize| policy[i] / policy[j];
    assert!((ratio(&old, 0, 1) / ratio(&new, 1, 0) - 1.0).abs() < 1e-6, "{old:?} {new:?}");
    assert!(new.iter().all(|p| *p > 0.0) && (new.iter().sum::<f64>() - 1.0).abs() < 1e-9);
}

/// Sums of two shards, added, predict what one learner of all examples does.
#[test]
fn shards_add_up() {
    let spec = config(|_| ()).check().unwrap();
    let [mut whole, mut left, mut right] = [(); 3].map(|()| Trainer::new(spec.clone()));
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for t in 0..8000 {
        let (query, model) = (draw(&mut random), t % 3);
        let reward = f64::from(u8::from(random.random::<f64>() < linear(&query, model)));
        let example = Example::new(query, model, vec![1.0 / 3.0; 3], None, reward).unwrap();
        whole.learn(example.clone()).unwrap();
        if t / 3 % 2 == 0 { &mut left } else { &mut right }.learn(example).unwrap();
    }
    assert!(left.add(&right));
    assert_eq!(left.version(), 8000);
    let unseen: Vec<Query> = (0..200).map(|_| draw(&mut random)).collect();
    let [all, added] = [&whole, &left].map(|trainer| lift(trainer, &unseen, &linear));
    assert!(added > 0.9 * all && all > 0.05, "{added} {all}");
}

#[test]
fn settings_that_a_critic_cannot_have_are_errors() {
    type Change = fn(&mut LearnerConfig);
    let changes: [(&str, Change); 5] = [
        ("learner.estimator", |c| c.mode = Mode::Lazy),
        ("learner.estimator", |c| {
            (c.preset, c.intrinsic_rank, c.horizon) = (pointsman::config::Preset::Theory, Some(1), Some(9))
        }),
        ("learner.estimator", |c| c.algorithm = Algorithm::LogQuadratic),
        ("learner.steepness", |c| c.steepness = 0.0),
        ("learner.head_queries", |c| c.head_queries = 65_537),
    ];
    for (key, change) in changes {
        let error = config(change).check().unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}
