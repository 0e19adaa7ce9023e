//! Restoring a saved learner with another rank or mode, and from damaged bytes.

use std::sync::LazyLock;

use pointsman::config::{Algorithm, Estimator, FeatureKind, LearnerConfig, Mode, Spec};
use pointsman::evaluate::rollout::Stage;
use pointsman::event::{Example, Query};
use pointsman::hpg::spectra::Eigen;
use pointsman::learner::{BadState, Trainer};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use crate::size::sized;

const DIM: usize = 40;
const MODELS: usize = 3;

fn config(algorithm: Algorithm, rank: usize) -> LearnerConfig {
    LearnerConfig {
        dim: DIM,
        models: ["a", "b", "c"].map(String::from).to_vec(),
        algorithm,
        rank: Some(rank),
        estimator: (algorithm == Algorithm::Hpg).then_some(Estimator::Logged),
        ..LearnerConfig::default()
    }
}

/// Every learner that keeps a rank, in every mode.
fn ranked(rank: usize) -> Vec<LearnerConfig> {
    let mut all = vec![config(Algorithm::LogQuadratic, rank)];
    for mode in [Mode::Factored, Mode::Explicit, Mode::Exact, Mode::Lazy] {
        for batch in [1, 4] {
            let of = |algorithm| LearnerConfig { mode, batch: Some(batch), ..config(algorithm, rank) };
            all.extend([of(Algorithm::Hpg), of(Algorithm::HpgParameterFree)]);
        }
    }
    all
}

/// A pseudo-random query.
fn query(dim: usize, seed: usize) -> Query {
    let component = |i: usize| ((seed * 7919 + i * 104_729 + 1) as f64 * 0.618_033_988_749_894_9).fract() - 0.5;
    Query::new((0..dim).map(|i| component(i * (seed % 13 + 1)))).unwrap()
}

fn teach(trainer: &mut Trainer, examples: std::ops::Range<usize>) {
    for i in examples {
        let query = query(trainer.spec().dim, i);
        let reward = f64::from(u8::from(query.as_slice()[i % MODELS] > 0.0));
        trainer.learn(Example::new(query, i % MODELS, vec![0.25, 0.25, 0.5], None, reward).unwrap()).unwrap();
    }
}

fn taught(config: &LearnerConfig) -> Trainer {
    let mut trainer = Trainer::new(config.check().unwrap());
    teach(&mut trainer, 0..162);
    trainer
}

fn rank(trainer: &Trainer) -> usize {
    trainer.eigens().iter().map(|eigen| eigen.lambda.len()).max().unwrap()
}

/// The eigenvalues of largest magnitude and their vectors.
fn truncated(eigen: &Eigen, rank: usize) -> Eigen {
    let mut order: Vec<usize> = (0..eigen.gamma.len()).collect();
    order.sort_by(|&i, &j| eigen.gamma[j].abs().total_cmp(&eigen.gamma[i].abs()));
    order.truncate(rank);
    let pick = |values: &[f64]| order.iter().map(|&i| values[i]).collect();
    let vectors = order.iter().flat_map(|&i| &eigen.vectors[i * DIM..(i + 1) * DIM]).copied().collect();
    Eigen { gamma: pick(&eigen.gamma), lambda: pick(&eigen.lambda), vectors }
}

fn assert_same_scores(found: &Trainer, expected: &[Eigen], label: &str) {
    for seed in 1000..1020 {
        let query = query(DIM, seed);
        for (found, expected) in found.eigens().iter().zip(expected) {
            let (found, expected) = (found.score(query.as_slice()), expected.score(query.as_slice()));
            assert!((found - expected).abs() <= 1e-12 * (1.0 + expected.abs()), "{label}: {found} {expected}");
        }
    }
}

#[test]
fn a_lower_rank_truncates() {
    for (before, after) in ranked(16).into_iter().zip(ranked(4)) {
        let label = format!("{} {} batch {:?}", before.algorithm, before.mode, before.batch);
        let trainer = taught(&before);
        assert!(rank(&trainer) >= 16, "{label}: {}", rank(&trainer));
        let mut restored = Trainer::restore(after.check().unwrap(), &trainer.save()).expect(&label);
        assert!(rank(&restored) <= 4, "{label}: {}", rank(&restored));
        let expected: Vec<Eigen> = trainer.eigens().iter().map(|eigen| truncated(eigen, 4)).collect();
        assert_same_scores(&restored, &expected, &label);
        assert_eq!((restored.version(), restored.learned()), (trainer.version(), trainer.learned()), "{label}");
        let again = Trainer::restore(after.check().unwrap(), &restored.save()).expect(&label);
        assert_eq!(again.save(), restored.save(), "{label}");
        let policy = restored.policy();
        teach(&mut restored, 200..300);
        assert_ne!(restored.policy(), policy, "{label}: continues to learn");
        // Log-quadratic works its last steps in later.
        let most = if before.algorithm == Algorithm::LogQuadratic { 4 + 31 } else { 4 };
        assert!(rank(&restored) <= most, "{label}: {}", rank(&restored));
    }
}

#[test]
fn a_higher_rank_grows() {
    for (before, after) in ranked(16).into_iter().zip(ranked(32)) {
        let label = format!("{} {} batch {:?}", before.algorithm, before.mode, before.batch);
        let trainer = taught(&before);
        let mut restored = Trainer::restore(after.check().unwrap(), &trainer.save()).expect(&label);
        if before.mode != Mode::Lazy {
            // What a lazy learner has not played is still in its sums.
            assert_same_scores(&restored, &trainer.eigens(), &label);
        }
        teach(&mut restored, 200..500);
        assert!(rank(&restored) > 16, "{label}: {}", rank(&restored));
    }
}

/// With a rank and without.
#[test]
fn log_quadratic_changes_its_form() {
    let truncating = config(Algorithm::LogQuadratic, 16);
    let dense = LearnerConfig { rank: None, ..truncating.clone() };
    let trainer = taught(&truncating);
    let restored = Trainer::restore(dense.check().unwrap(), &trainer.save()).unwrap();
    assert_same_scores(&restored, &trainer.eigens(), "dense");
    let trainer = taught(&dense);
    let expected: Vec<Eigen> = trainer.eigens().iter().map(|eigen| truncated(eigen, 16)).collect();
    let mut restored = Trainer::restore(truncating.check().unwrap(), &trainer.save()).unwrap();
    assert_same_scores(&restored, &expected, "truncated");
    teach(&mut restored, 200..300);
}

#[test]
fn another_mode_keeps_the_scores() {
    let modes = [Mode::Factored, Mode::Explicit, Mode::Exact, Mode::Lazy];
    for algorithm in [Algorithm::Hpg, Algorithm::HpgParameterFree] {
        for from in modes {
            let trainer = taught(&LearnerConfig { mode: from, ..config(algorithm, 8) });
            for to in modes {
                let changed = LearnerConfig { mode: to, ..config(algorithm, 8) };
                let label = format!("{algorithm} {from} {to}");
                let restored = Trainer::restore(changed.check().unwrap(), &trainer.save());
                if to == Mode::Lazy && from != Mode::Lazy {
                    assert_eq!(restored.err(), Some(BadState::Shape), "{label}");
                    continue;
                }
                let mut restored = restored.expect(&label);
                assert_same_scores(&restored, &trainer.eigens(), &label);
                teach(&mut restored, 200..230);
                assert_eq!(restored.learned(), 192, "{label}");
            }
        }
    }
}

/// A learner of every algorithm, in every form, with a batch that is incomplete where it may be.
static SAVED: LazyLock<Vec<(Spec, Vec<u8>)>> = LazyLock::new(|| {
    let base = |algorithm: Algorithm| LearnerConfig {
        dim: 5,
        models: ["a", "b", "c"].map(String::from).to_vec(),
        algorithm,
        rank: Some(3),
        batch: Some(4),
        stage: Stage::Canary,
        incumbent: Some("b".to_owned()),
        fixed_model: (algorithm == Algorithm::Fixed).then(|| "b".to_owned()),
        ..LearnerConfig::default()
    };
    let unranked = |config: LearnerConfig| LearnerConfig { rank: None, ..config };
    let linear = |config: LearnerConfig| LearnerConfig { features: FeatureKind::Linear, ..config };
    let mut configs = Vec::new();
    for mode in [Mode::Factored, Mode::Explicit, Mode::Exact, Mode::Lazy] {
        let stage = if mode == Mode::Lazy { Stage::Full } else { Stage::Canary };
        let of = |algorithm| LearnerConfig { mode, stage, ..base(algorithm) };
        let logged = LearnerConfig { estimator: Some(Estimator::Logged), ..of(Algorithm::Hpg) };
        configs.extend([logged, of(Algorithm::Hpg), of(Algorithm::HpgParameterFree)]);
        if mode != Mode::Lazy {
            configs.push(of(Algorithm::HypentropyRegression));
        }
    }
    configs.push(LearnerConfig { batch: Some(1), ..base(Algorithm::Hpg) });
    configs.push(LearnerConfig { batch: Some(1), half_life: Some(30.0), ..base(Algorithm::HypentropyRegression) });
    configs.extend([Algorithm::Uniform, Algorithm::Fixed].map(|algorithm| unranked(base(algorithm))));
    let rivals = [Algorithm::LinUcb, Algorithm::QuadraticSgd, Algorithm::LogQuadratic, Algorithm::LogLinear];
    configs.extend(rivals.map(|algorithm| unranked(base(algorithm))));
    configs.push(base(Algorithm::LogQuadratic));
    configs.push(unranked(base(Algorithm::Exp3)));
    configs.extend([Algorithm::LinUcb, Algorithm::LinThompson].map(|algorithm| linear(unranked(base(algorithm)))));
    let mut saved = Vec::new();
    for config in configs {
        let spec = config.check().unwrap();
        let mut trainer = Trainer::new(spec.clone());
        teach(&mut trainer, 0..43);
        saved.push((spec, trainer.save()));
    }
    // Beyond the warm-up of its features.
    let spec = unranked(base(Algorithm::LinUcb)).check().unwrap();
    let mut trainer = Trainer::new(spec.clone());
    teach(&mut trainer, 0..510);
    saved.push((spec, trainer.save()));
    saved
});

/// Bytes of the envelope before the payload.
const HEAD: usize = 20;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(sized(6000, 300_000) as u32) })]

    #[test]
    fn damage_is_refused_or_harmless(
        which in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        bit in 0..8,
    ) {
        let (spec, saved) = &SAVED[which.index(SAVED.len())];
        let mut damaged = saved.clone();
        damaged[at.index(saved.len())] ^= 1_u8 << bit;
        prop_assert!(Trainer::restore(spec.clone(), &damaged).is_err());
        // With a correct checksum only the payload is damaged.
        let body = saved.len() - 8;
        let mut damaged = saved.clone();
        damaged[HEAD + at.index(body - HEAD)] ^= 1_u8 << bit;
        let checksum = xxh3_64(&damaged[..body]);
        damaged[body..].copy_from_slice(&checksum.to_le_bytes());
        if let Ok(mut trainer) = Trainer::restore(spec.clone(), &damaged) {
            use_everything(&mut trainer);
        }
    }
}

fn use_everything(trainer: &mut Trainer) {
    let dim = trainer.spec().dim;
    for i in 0..4 {
        let decision = trainer.decide(&query(dim, 50 + i)).unwrap();
        let sum: f64 = decision.distribution.propensities.iter().sum();
        assert!((sum - 1.0).abs() < 1e-9, "{decision:?}");
        trainer.decide_exactly(&query(dim, 60 + i)).unwrap();
        teach(trainer, 100 + 10 * i..110 + 10 * i);
    }
    trainer.flush();
    assert_eq!(trainer.policy().scores.len(), MODELS);
    assert!(trainer.eigens().iter().flat_map(|eigen| &eigen.lambda).all(|lambda| lambda.is_finite()));
    serde_json::to_value(trainer.worth()).unwrap();
    // What grew out of damage may be refused the next time, without a panic.
    Trainer::restore(trainer.spec().clone(), &trainer.save()).ok();
}
