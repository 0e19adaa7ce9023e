//! Every format version that was ever written is read: a file of each stays in `tests/golden/formats`.
//!
//! `POINTSMAN_BLESS=1 cargo test formats` writes files of the present version that are not there yet.

mod records;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use pointsman::config::{Algorithm, Config, Estimator, FeatureKind, LearnerConfig, Mode, Settings};
use pointsman::engine::{Counts, Engine, Input, Side};
use pointsman::evaluate::rollout::Stage;
use pointsman::event::{Example, ModelName, Name, Query};
use pointsman::event_time::EventTime;
use pointsman::learner::Trainer;
use pointsman::merge::{MergeState, Position};
use pointsman::query_key::QueryKey;
use pointsman::router::{HeadTable, Outcomes, Params, Policy, Sampling, ScoreForm};
use pointsman::snapshot::{Audit, LaneHead, Publication, SharedHead, fingerprint};
use pointsman::state::generations::difference;
use pointsman::state::{LaneStore, Records, Retention};
use pointsman::store::Memory;
use pointsman::transport::kafka::state::{Entries, Mirror};
use pointsman::wire::events::Parser;
use pointsman::wire::params;
use pointsman::wire::records::Record;
use pointsman::wire::records::learner::critic::{
    ConstantsRecord, CriticLearnerRecord, CriticRecord, ErrorsRecord, HeadQueryRecord, RemainderRecord,
    RidgeModelRecord,
};
use pointsman::wire::records::learner::hpg::{
    BallRecord, BettorRecord, EigenRecord, ExactRecord, FactorRecord, FactoredRecord, HpgRecord, LazyRecord,
    ParameterFreeRecord, ParametersRecord,
};
use pointsman::wire::records::learner::objective::{FadingMeanRecord, FloorRecord, ObjectiveRecord, OutcomeRecord};
use pointsman::wire::records::learner::regression::{
    ConstantRecord, DirectionsRecord, DriftRecord, ModelRegressionRecord, NewtonRecord, OverlapRecord,
    RegressionRecord, RepeatsRecord, TrustRecord,
};
use pointsman::wire::records::learner::rivals::{
    EarlyRecord, Exp3Record, FeaturesRecord, LinearBanditRecord, LinearRecord, LogLinearRecord, LogQuadraticRecord,
    QuadraticRecord, QuadraticSgdRecord, RidgeRecord, SymmetricRecord, TruncatedRecord,
};
use pointsman::wire::records::learner::value::{
    BoundRecord, EstimateRecord, EvaluationRecord, ModelRewardsRecord, PolicyValueRecord, RolloutRecord,
    SampleRatioRecord, SharesRecord, StageRecord, WeightsRecord,
};
use pointsman::wire::records::learner::{
    AlgorithmRecord, ExampleRecord, GeneratorRecord, LearnerRecord, LessonRecord, RewardMeanRecord,
};

fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats")
}

fn golden(name: &str, present: &[u8]) -> Vec<u8> {
    let path = golden_dir().join(name);
    if std::env::var_os("POINTSMAN_BLESS").is_some() && !path.exists() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, present).unwrap();
    }
    fs::read(path).unwrap()
}

/// A learner in the middle of a batch.
fn learner(algorithm: Algorithm) -> Trainer {
    let models = ["a", "b", "c"].map(String::from).to_vec();
    let features = if algorithm == Algorithm::LinThompson { FeatureKind::Linear } else { FeatureKind::Quadratic };
    let base = LearnerConfig { dim: 4, models, algorithm, features, ..LearnerConfig::default() };
    let mut config = LearnerConfig { rank: Some(2), batch: Some(3), ..base };
    if algorithm == Algorithm::Hpg {
        // What the preset said when its file was written.
        (config.eta, config.beta, config.tau) = (Some(0.1), Some(3.0), Some(300.0));
        config.estimator = Some(Estimator::Logged);
    }
    let mut trainer = Trainer::new(config.check().unwrap());
    for i in 0..40 {
        let query = Query::new((0..4).map(|j| f64::from((i * 7 + j * 3) % 5) - 1.7)).unwrap();
        let propensities = vec![0.25, 0.25, 0.5];
        let reward = f64::from(u8::from(i % 3 == 1));
        trainer.learn(Example::new(query, i as usize % 3, propensities, None, reward).unwrap()).unwrap();
    }
    trainer
}

#[test]
fn saved_learners() {
    for (name, algorithm) in [
        ("learner-hpg-1.bin", Algorithm::Hpg),
        ("learner-parameter-free-1.bin", Algorithm::HpgParameterFree),
        ("learner-uniform-1.bin", Algorithm::Uniform),
        ("learner-lin-ucb-1.bin", Algorithm::LinUcb),
        ("learner-lin-thompson-1.bin", Algorithm::LinThompson),
        ("learner-quadratic-sgd-1.bin", Algorithm::QuadraticSgd),
        ("learner-log-quadratic-1.bin", Algorithm::LogQuadratic),
        ("learner-log-linear-1.bin", Algorithm::LogLinear),
        ("learner-exp3-1.bin", Algorithm::Exp3),
    ] {
        let present = learner(algorithm);
        let bytes = golden(name, &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(name);
        assert_eq!((restored.version(), restored.learned()), (39, 40), "{name}");
        assert_eq!(restored.mean_reward(), present.mean_reward(), "{name}");
        let query = Query::new([0.3, -0.1, 0.8, 0.2]).unwrap();
        let (found, expected) = (restored.distribution(&query).unwrap(), present.distribution(&query).unwrap());
        for (found, expected) in found.propensities.iter().zip(&expected.propensities) {
            assert!((found - expected).abs() < 1e-9, "{name}: {found} {expected}");
        }
    }
}

/// A learner of every algorithm, in every mode, in the middle of a batch; with the value estimates of one in a rollout.
fn learners() -> Vec<(String, Trainer)> {
    let base = || LearnerConfig {
        dim: 4,
        models: ["a", "b", "c"].map(String::from).to_vec(),
        rank: Some(2),
        batch: Some(3),
        ..LearnerConfig::default()
    };
    let hpg = |mode: Mode| LearnerConfig {
        algorithm: Algorithm::Hpg,
        estimator: Some(Estimator::Logged),
        mode,
        eta: Some(0.1),
        beta: Some(3.0),
        tau: Some(300.0),
        stage: Stage::Canary,
        ..base()
    };
    let of = |algorithm: Algorithm| LearnerConfig { algorithm, ..base() };
    let linear = |algorithm: Algorithm| LearnerConfig { features: FeatureKind::Linear, ..of(algorithm) };
    let single = |config: LearnerConfig| LearnerConfig { batch: Some(1), ..config };
    let cases = [
        ("hpg-factored", single(hpg(Mode::Factored))),
        ("hpg-factored-batch", hpg(Mode::Factored)),
        ("hpg-explicit", hpg(Mode::Explicit)),
        ("hpg-exact", LearnerConfig { rank: None, ..hpg(Mode::Exact) }),
        ("hpg-lazy", LearnerConfig { stage: Stage::Full, ..hpg(Mode::Lazy) }),
        ("hpg-parameter-free", of(Algorithm::HpgParameterFree)),
        ("hypentropy-regression", of(Algorithm::HypentropyRegression)),
        ("uniform", of(Algorithm::Uniform)),
        ("lin-ucb-warm-up", of(Algorithm::LinUcb)),
        ("lin-ucb-linear", linear(Algorithm::LinUcb)),
        ("lin-thompson-linear", linear(Algorithm::LinThompson)),
        ("quadratic-sgd", of(Algorithm::QuadraticSgd)),
        ("log-quadratic-dense", LearnerConfig { rank: None, ..of(Algorithm::LogQuadratic) }),
        ("log-quadratic-rank", of(Algorithm::LogQuadratic)),
        ("log-linear", of(Algorithm::LogLinear)),
        ("exp3", of(Algorithm::Exp3)),
    ];
    let learner = |(name, config): (&str, LearnerConfig)| {
        let mut trainer = Trainer::new(config.check().unwrap());
        teach(&mut trainer, 0..40);
        (name.to_owned(), trainer)
    };
    let mut learners: Vec<(String, Trainer)> = cases.into_iter().map(learner).collect();
    let mut warm = Trainer::new(of(Algorithm::LinUcb).check().unwrap());
    teach(&mut warm, 0..520);
    learners.push(("lin-ucb-quadratic".to_owned(), warm));
    learners
}

/// Examples of few distinct queries, so that every algorithm meets repeats.
fn teach(trainer: &mut Trainer, examples: std::ops::Range<i32>) {
    for i in examples {
        let query = Query::new((0..4).map(|j| f64::from((i * 7 + j * 3 + i / 20) % 5) - 1.7)).unwrap();
        let reward = f64::from((i * i) % 7) / 6.0;
        let example = Example::new(query, i as usize % 3, vec![0.25, 0.25, 0.5], None, reward).unwrap();
        trainer.learn(example).unwrap();
    }
}

/// Compares two learners by what they do: counters, parameters, and how they continue.
fn check_alike(name: &str, mut found: Trainer, mut expected: Trainer) {
    let close = |found: &Trainer, expected: &Trainer| {
        let figures = |trainer: &Trainer| (trainer.version(), trainer.learned(), trainer.rewards().0.to_bits());
        assert_eq!(figures(found), figures(expected), "{name}");
        let query = Query::new([0.3, -0.1, 0.8, 0.2]).unwrap();
        // Older versions have no rollout, which starts over and may mix otherwise.
        let play = |trainer: &Trainer| trainer.distribution(&query).unwrap().policy;
        for (found, expected) in play(found).into_iter().zip(play(expected)) {
            assert!((found - expected).abs() < 1e-9, "{name}: {found} {expected}");
        }
        let value = |trainer: &Trainer| serde_json::to_value(trainer.worth()).unwrap();
        let (found, expected) = (value(found), value(expected));
        assert_eq!(found["all"]["examples"], expected["all"]["examples"], "{name}");
    };
    close(&found, &expected);
    teach(&mut found, 40..70);
    teach(&mut expected, 40..70);
    close(&found, &expected);
}

/// Hypentropy regression had other parts before version 4. What they had learned is the start of the present ones.
#[test]
fn regressions_of_older_versions_are_continued() {
    let (_, fresh) = learners().into_iter().find(|(name, _)| name == "hypentropy-regression").unwrap();
    for version in 1..=3 {
        let bytes = golden(&format!("learner-hypentropy-regression-{version}.bin"), &[]);
        let mut restored = Trainer::restore(fresh.spec().clone(), &bytes).unwrap();
        assert_eq!((restored.version(), restored.learned()), (39, 40), "{version}");
        let query = Query::new([0.3, -0.1, 0.8, 0.2]).unwrap();
        let policy = restored.distribution(&query).unwrap().policy;
        assert!(policy.iter().any(|p| (p - 1.0 / 3.0).abs() > 0.001), "version {version} knows nothing: {policy:?}");
        teach(&mut restored, 40..70);
        assert_eq!(restored.learned(), 70);
        let again = Trainer::restore(fresh.spec().clone(), &restored.save()).unwrap();
        assert_eq!(again.save(), restored.save());
    }
}

/// Those whose parts are still the same.
fn unchanged_learners() -> impl Iterator<Item = (String, Trainer)> {
    learners().into_iter().filter(|(name, _)| name != "hypentropy-regression")
}

#[test]
fn learners_of_version_2() {
    for (name, present) in unchanged_learners() {
        let bytes = golden(&format!("learner-{name}-2.bin"), &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(&name);
        check_alike(&name, restored, present);
    }
}

#[test]
fn learners_of_version_3() {
    for (name, present) in unchanged_learners() {
        let bytes = golden(&format!("learner-{name}-3.bin"), &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(&name);
        check_alike(&name, restored, present);
    }
}

#[test]
fn learners_of_version_4() {
    for (name, present) in learners() {
        let bytes = golden(&format!("learner-{name}-4.bin"), &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(&name);
        assert_eq!(restored.sample_ratio().examples(), 0, "{name}");
        check_alike(&name, restored, present);
    }
}

#[test]
fn learners_of_version_5() {
    for (name, present) in learners() {
        let bytes = golden(&format!("learner-{name}-5.bin"), &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(&name);
        check_alike(&name, restored, present);
    }
}

#[test]
fn learners_of_version_6() {
    for (name, present) in learners() {
        let bytes = golden(&format!("learner-{name}-6.bin"), &present.save());
        assert_eq!(LearnerRecord::open(&bytes).unwrap().seal(), bytes, "{name}: decoding loses something");
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(&name);
        check_alike(&name, restored, present);
    }
}

/// Version 2 before it had a fallback mix. The guard that wrote the file had not looked yet; the present one has.
#[test]
fn a_learner_of_version_2_without_a_mix() {
    let bytes = golden("learner-hpg-factored-2-best.bin", &[]);
    let (_, mut present) = learners().swap_remove(0);
    let mut restored = Trainer::restore(present.spec().clone(), &bytes).unwrap();
    let query = Query::new([0.3, -0.1, 0.8, 0.2]).unwrap();
    let policy = |trainer: &Trainer| trainer.distribution(&query).unwrap().policy;
    for (found, expected) in policy(&restored).into_iter().zip(policy(&present)) {
        assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    }
    // Both look after 64 examples.
    teach(&mut restored, 40..65);
    teach(&mut present, 40..65);
    check_alike("best", restored, present);
}

/// Numbers that no machine rounds.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 += 1;
        self.0 as f64 / 4.0
    }

    fn list(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.next()).collect()
    }

    fn symmetric(&mut self, n: usize) -> SymmetricRecord {
        SymmetricRecord { size: n as u64, lower: self.list(n * (n + 1) / 2) }
    }

    fn ball(&mut self) -> BallRecord {
        BallRecord { radius: self.next(), scale: self.next(), rank: 300 }
    }

    fn eigen(&mut self) -> EigenRecord {
        EigenRecord { mirror_eigenvalues: self.list(1), eigenvalues: self.list(1), eigenvectors: self.list(2) }
    }

    fn factored(&mut self) -> ParametersRecord {
        let mut factor = |compactions| FactorRecord {
            mirror_eigenvalues: self.list(1),
            eigenvalues: self.list(1),
            basis: self.list(2),
            basis_coefficients: self.list(1),
            recent_coefficients: self.list(1),
            compactions,
            error_growth: self.next(),
        };
        let models = vec![factor(7), factor(70_000)];
        ParametersRecord::Factored(FactoredRecord { recent_queries: self.list(2), models })
    }

    fn hpg(&mut self, parameters: ParametersRecord) -> AlgorithmRecord {
        AlgorithmRecord::Hpg(HpgRecord { ball: self.ball(), parameters })
    }

    fn overlap(&mut self) -> OverlapRecord {
        OverlapRecord { last_query: self.list(2), sum: self.next(), pairs: self.next() }
    }

    fn bandit(&mut self, features: FeaturesRecord) -> AlgorithmRecord {
        let ridge = RidgeRecord { inverse: self.symmetric(3), moment: self.list(3), fade: self.next() };
        AlgorithmRecord::LinearBandit(LinearBanditRecord { ridge: self.next(), features, models: vec![ridge] })
    }

    fn regression(&mut self) -> AlgorithmRecord {
        let model = ModelRegressionRecord {
            parameters: self.factored(),
            newton: NewtonRecord { weights: self.list(2), uncertainty: self.symmetric(2) },
            constant: ConstantRecord { sum: self.next(), weight: self.next() },
            examples: self.next(),
            learned_at: 251,
        };
        AlgorithmRecord::Regression(RegressionRecord {
            ball: self.ball(),
            ridge: self.next(),
            models: vec![model],
            directions: DirectionsRecord {
                vectors: self.list(2),
                energies: self.list(1),
                recent_queries: self.list(2),
                seen: 252,
            },
            basis: self.list(2),
            overlap: self.overlap(),
            repeats: RepeatsRecord { digests: vec![0, u64::MAX], share: self.next() },
            trust: TrustRecord { product: self.next(), square: self.next() },
            drift: DriftRecord { examples: 253, mean: self.next(), spread: self.next(), sum: self.next() },
            changed_at: 254,
        })
    }

    fn trust(&mut self) -> TrustRecord {
        TrustRecord { product: self.next(), square: self.next() }
    }

    fn critic(&mut self, has_actor: bool) -> AlgorithmRecord {
        let ridge = RidgeModelRecord { information: self.symmetric(3), moments: self.list(3), weights: self.list(3) };
        let remainder = RemainderRecord { parameters: self.factored(), examples: self.next(), learned_at: 255 };
        let head = HeadQueryRecord {
            place: 256,
            key: u64::MAX - 1,
            coordinates: vec![0.25, -0.5],
            examples: vec![3.0],
            sums: vec![-1.5],
            credit: 70_000,
        };
        let critic = CriticRecord {
            linear_rank: 2,
            feature_rank: 1,
            basis: self.list(2),
            directions: DirectionsRecord {
                vectors: self.list(2),
                energies: self.list(1),
                recent_queries: self.list(2),
                seen: 257,
            },
            overlap: self.overlap(),
            models: vec![ridge],
            shared: self.list(3),
            ball: self.ball(),
            remainders: vec![remainder],
            head_capacity: 4096,
            head: vec![head],
            evicted: ConstantsRecord { information: self.symmetric(1), moments: self.list(1) },
            evidence: self.trust(),
            held_out: self.trust(),
            remainder_evidence: self.trust(),
            trust: self.next(),
            constants: self.list(1),
            fallback: self.list(1),
            errors: ErrorsRecord { sum: self.next(), weight: self.next() },
            drift: DriftRecord { examples: 258, mean: self.next(), spread: self.next(), sum: self.next() },
            version: 259,
            changed_at: 260,
            next_solution: 261,
            solved_at: 262,
        };
        let actor = has_actor.then(|| HpgRecord { ball: self.ball(), parameters: self.factored() });
        AlgorithmRecord::Critic(Box::new(CriticLearnerRecord { critic, actor }))
    }

    fn bound(&mut self) -> BoundRecord {
        BoundRecord { count: self.0, sum: self.next(), variation: self.next() }
    }

    fn estimate(&mut self, compared: usize) -> EstimateRecord {
        EstimateRecord {
            weights: WeightsRecord {
                weight: self.next(),
                reward: self.next(),
                square: self.next(),
                square_reward: self.next(),
                square_reward_square: self.next(),
            },
            robust: self.next(),
            robust_square: self.next(),
            value: [self.bound(), self.bound()],
            lifts: (0..compared).map(|_| [self.bound(), self.bound()]).collect(),
        }
    }

    fn rollout(&mut self, configured: StageRecord) -> RolloutRecord {
        RolloutRecord {
            configured,
            stage: StageRecord::Full,
            incumbent: Some(255),
            examples: 69_999,
            has_begun: true,
            ledger: self.bound(),
            forgotten: self.next(),
            share: self.next(),
            share_before: self.next(),
            planned_at: 65_536,
            has_arrived: true,
            is_mixed: false,
            late: 300,
            lag: Some(70),
        }
    }

    fn fading(&mut self) -> FadingMeanRecord {
        FadingMeanRecord { sum: self.next(), weight: self.next() }
    }

    fn objective(&mut self) -> ObjectiveRecord {
        let outcome = OutcomeRecord {
            name: "cost".to_owned(),
            observed: vec![self.fading(), FadingMeanRecord::default()],
            price: self.next(),
            debt: -self.next(),
            variance: self.fading(),
            requests: 70_000,
            spent: self.next(),
            recent: self.fading(),
        };
        let (played, alone) = (self.fading(), vec![self.fading(), self.fading()]);
        ObjectiveRecord {
            outcomes: vec![outcome],
            floor: FloorRecord { relief: self.next(), played, alone },
            examples: 70_001,
            examples_per_charge: self.fading(),
            age: self.fading(),
            pace: self.next(),
        }
    }

    fn policy_value(&mut self, rollout: Option<StageRecord>) -> PolicyValueRecord {
        PolicyValueRecord {
            examples: 70_000,
            evaluation: EvaluationRecord {
                models: 2,
                events: 69_999,
                all: vec![self.estimate(2), self.estimate(0)],
                block_events: 5_000,
                blocks: vec![vec![self.estimate(2)], vec![self.estimate(0)]],
                blocks_dropped: 3,
            },
            rewards: vec![ModelRewardsRecord { sum: self.next(), count: 8 }],
            fallback_mix: if rollout.is_some() { self.list(2) } else { Vec::new() },
            rollout: rollout.map(|configured| self.rollout(configured)),
            sample_ratio: SampleRatioRecord {
                models: vec![SharesRecord { played: 40_000, expected: self.next() }, SharesRecord::default()],
                log_evidence: self.next(),
            },
        }
    }
}

/// A record of every variant, with all lists filled and every option in both states.
fn fixed_records() -> Vec<(&'static str, LearnerRecord)> {
    let mut n = Numbers(0);
    let exact =
        ParametersRecord::Exact(ExactRecord { mirrors: vec![n.list(4); 2], eigens: vec![n.eigen(), n.eigen()] });
    let explicit = ParametersRecord::Explicit(vec![n.eigen(), EigenRecord::default()]);
    let (factored, inner) = (n.factored(), n.factored());
    let lazy = ParametersRecord::Lazy(LazyRecord { sums: vec![n.list(3), n.list(3)], rate: n.next() });
    let bettors = vec![BettorRecord { wealth: n.next(), fraction: n.next(), curvature: n.next() }];
    let free = ParameterFreeRecord { hpg: HpgRecord { ball: n.ball(), parameters: inner }, bettors };
    let mut early = |model| EarlyRecord { query: n.list(2), model, reward: n.next() };
    let warm_up = FeaturesRecord::WarmUp(vec![early(Some(1)), early(None)]);
    let quadratic = FeaturesRecord::Quadratic(n.list(2));
    let sgd = QuadraticSgdRecord {
        overlap: n.overlap(),
        models: vec![QuadraticRecord { parameters: n.symmetric(2), examples: n.next() }],
    };
    let kept = TruncatedRecord { eigenvalues: n.list(1), eigenvectors: n.list(2), steps: n.list(1) };
    let truncated = LogQuadraticRecord::Truncated { models: vec![kept], recent_queries: n.list(2) };
    let linear = LinearRecord { parameters: n.list(2), inverse_fisher: n.symmetric(2) };
    let (ridge, examples, ridge_examples) = (n.next(), n.next(), n.next());
    let log_linear = LogLinearRecord { models: vec![linear], ridge, examples, ridge_examples };
    let states = vec![
        ("stateless", AlgorithmRecord::Stateless),
        ("hpg-exact", n.hpg(exact)),
        ("hpg-explicit", n.hpg(explicit)),
        ("hpg-factored", n.hpg(factored)),
        ("hpg-lazy", n.hpg(lazy)),
        ("parameter-free", AlgorithmRecord::ParameterFree(free)),
        ("linear-bandit-linear", n.bandit(FeaturesRecord::Linear)),
        ("linear-bandit-warm-up", n.bandit(warm_up)),
        ("linear-bandit-quadratic", n.bandit(quadratic)),
        ("quadratic-sgd", AlgorithmRecord::QuadraticSgd(sgd)),
        ("log-quadratic-dense", AlgorithmRecord::LogQuadratic(LogQuadraticRecord::Dense(vec![n.symmetric(2)]))),
        ("log-quadratic-truncated", AlgorithmRecord::LogQuadratic(truncated)),
        ("log-linear", AlgorithmRecord::LogLinear(log_linear)),
        ("exp3", AlgorithmRecord::Exp3(Exp3Record { losses: n.list(2), examples: n.next() })),
        ("regression", n.regression()),
        ("critic", n.critic(true)),
        ("critic-alone", n.critic(false)),
    ];
    let record = |(i, (name, state)): (usize, (&'static str, AlgorithmRecord))| {
        let mut lesson = |model: u64| LessonRecord {
            example: ExampleRecord {
                query: n.list(2),
                model,
                propensities: n.list(2),
                policy: (model == 1).then(|| n.list(2)),
                reward: (model == 0).then(|| n.next()),
                eligible: (model == 1).then(|| vec![false, true]),
                others: (model == 1).then(|| (0, n.next())).into_iter().collect(),
                preference: (model == 1).then_some((1, 0)),
            },
            mean_before: n.next(),
            tolls: if model == 1 { n.list(2) } else { Vec::new() },
        };
        let pending = vec![lesson(0), lesson(1)];
        let record = LearnerRecord {
            algorithm: name.to_owned(),
            dim: 2,
            models: vec!["a".to_owned(), "b.c".to_owned()],
            generator: GeneratorRecord {
                seed: std::array::from_fn(|i| 8 * i as u8),
                stream: 1 << 40,
                word_position: (1 << 67) + 5,
            },
            pending,
            reward_mean: RewardMeanRecord { sum: n.next(), weight: n.next() },
            reward_sum: n.next(),
            learned: 300,
            version: 298,
            state,
            policy_value: n.policy_value(
                (i % 2 == 1).then(|| [StageRecord::Shadow, StageRecord::Observe, StageRecord::Canary][i / 2 % 3]),
            ),
            rewarded: 299,
            objective: if i % 2 == 1 { n.objective() } else { ObjectiveRecord::default() },
        };
        (name, record)
    };
    states.into_iter().enumerate().map(record).collect()
}

#[test]
fn the_format_of_a_learner_stays() {
    for (name, record) in fixed_records() {
        let version = LearnerRecord::VERSION;
        let bytes = golden(&format!("record-learner-{name}-{version}.bin"), &record.seal());
        assert_eq!(LearnerRecord::open(&bytes).as_ref(), Ok(&record), "{name}");
        let changed = "the format changed: raise LearnerRecord::VERSION and keep the old file";
        assert!(record.seal() == bytes, "{name}: {changed}");
    }
}

#[test]
fn routing_parameters() {
    let name = |text: &str| Name::try_from(text).unwrap();
    let quadratic = ScoreForm {
        eigenvalues: vec![1.5, -0.5],
        eigenvectors: vec![0.6, 0.8, 0.0, 0.8, -0.6, 0.0],
        ..ScoreForm::default()
    };
    let linear = ScoreForm { linear: vec![1.0, 2.0, 3.0], bias: -0.25, ..ScoreForm::default() };
    let present = Params {
        space: name("shop"),
        epoch: 2,
        version: 1234,
        revision: 3,
        models: ["bge", "mini.lm"].map(|name| ModelName::try_from(name).unwrap()).to_vec(),
        dim: 3,
        created_ms: 1_731_700_000_000,
        algorithm: "hpg".to_owned(),
        policy: Policy {
            sampling: Sampling::InverseGap { gap: 30.5 },
            floor: 0.1,
            floor_distribution: vec![0.75, 0.25],
            scores: vec![quadratic, linear],
            head: HeadTable::default(),
            outcomes: Outcomes::default(),
        },
    };
    let bytes = golden("params-1.safetensors", &params::encode(&present));
    assert_eq!(params::decode(&bytes).unwrap(), present);
    let changed = "the format changed: raise its version and keep the old file";
    assert_eq!(params::encode(&present), bytes, "{changed}");
    let mut with_outcomes = present.clone();
    let names = vec!["cost".to_owned(), "latency_ms".to_owned()];
    with_outcomes.policy.outcomes = Outcomes::new(2, names, vec![10.0, 0.5], vec![0.25, 3.0, 0.0, 0.0]).unwrap();
    let bytes = golden("params-2-outcomes.safetensors", &params::encode(&with_outcomes));
    assert_eq!(params::decode(&bytes).unwrap(), with_outcomes);
    assert_eq!(params::encode(&with_outcomes), bytes, "{changed}");
    let mut with_head = present;
    // The keys of [0.6, 0.8, 0] and of [0, 0, -1].
    let [first, second] = [[0.6, 0.8, 0.0], [0.0, 0.0, -1.0]].map(|query| QueryKey::of(&Query::new(query).unwrap()).0);
    let mut rows = [(first, [0.5, -0.125]), (second, [-2.0, 4.0])];
    rows.sort_by_key(|(key, _)| *key);
    let corrections = rows.iter().flat_map(|(_, row)| *row).collect();
    with_head.policy.head = HeadTable::new(2, rows.iter().map(|(key, _)| *key).collect(), corrections).unwrap();
    let bytes = golden("params-2.safetensors", &params::encode(&with_head));
    assert_eq!(params::decode(&bytes).unwrap(), with_head);
    assert_eq!(params::encode(&with_head), bytes, "{changed}");
}

/// A lane in the middle of its work: two spaces, requests that wait and that are remembered, a partial batch.
fn lane() -> (Engine, LaneHead, LaneStore<Memory>) {
    let text = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\nretired = [\"old\"]\nrank = 2\nbatch = 3\n\
        missing_propensities = \"uniform\"\n[spaces.default]\nestimator = \"logged\"\neta = 0.1\nbeta = 3.0\ntau = 300.0\n\
        [spaces.shop]\nalgorithm = \"hpg-parameter-free\"\n[join]\nwindow_ms = 1000\naggregate = \"mean\"\n";
    let settings = toml::from_str::<Config>(text).unwrap().check().unwrap();
    let parser = Parser::new(&settings);
    let mut engine = Engine::new(settings.clone());
    let mut store = LaneStore::new(Memory::default(), "file", Retention::newest(3));
    let time = EventTime::starting_at(8, 7);
    let position = Position { floor: 10, floor_line: 1, read: 40, done: vec![(30, 31)], time };
    let mut head = LaneHead {
        engine: engine.head(),
        merge: MergeState { positions: [("queries/1".to_owned(), position)].into(), last_ms: Some(5), out_of_order: 2 },
        epoch: 4,
        publications: [(Name::default_space(), Publication { version: 9, revision: 1 })].into(),
        configuration: fingerprint(&settings),
        audit_bytes: 77,
        created_ms: 1_731_700_000_000,
    };
    for i in 0..60 {
        let (space, model) = (["default", "shop"][i % 2], ["a", "b", "b", "old", "a"][i % 5]);
        let known = if i % 4 < 2 { r#","propensities":{"a":0.25,"b":0.5,"old":0.25}"# } else { "" };
        let query = format!(
            r#"{{"request_id":"r{i}","space":"{space}","ts_ms":{},"query":[{},0.5,-1],"model":"{model}"{known}}}"#,
            100 * i,
            i % 7
        );
        let reward = format!(
            r#"{{"request_id":"r{}","space":"{space}","ts_ms":{},"reward":0.{}}}"#,
            i / 3 * 3,
            100 * i + 50,
            i % 10
        );
        for (side, text) in [(Side::Query, query), (Side::Reward, reward)] {
            engine.step(Input::parse(&parser, side, text.into_bytes(), None));
        }
        if i % 20 == 19 {
            head.engine = engine.head();
            store.commit(&head.seal(), &engine.take_changes()).unwrap();
        }
    }
    (engine, head, store)
}

/// The same lane as format version 1 left it: there, the first event beyond a window closed it.
fn lane_1() -> (Engine, LaneHead) {
    let (mut engine, mut head, _) = lane();
    let settings: Settings = serde_json::from_str(&head.configuration).unwrap();
    let parser = Parser::new(&settings);
    for space in ["default", "shop"] {
        for i in 0..8 {
            let text =
                format!(r#"{{"request_id":"e{i}","space":"{space}","ts_ms":5950,"query":[1,1,1],"model":"old"}}"#);
            engine.step(Input::parse(&parser, Side::Query, text.into_bytes(), None));
        }
    }
    // Its times are not taken over, since a single event could set them.
    let positions = &mut head.merge.positions;
    positions.values_mut().for_each(|position| position.time = EventTime::new(8));
    head.merge.last_ms = None;
    (engine, head)
}

/// What became of the events of a lane, without the queries that only move time.
fn outcomes(engine: &Engine) -> Counts {
    let mut counts = engine.counts();
    counts.join.queries.read -= counts.join.queries.retired;
    counts.join.queries.retired = 0;
    counts
}

#[test]
fn snapshots() {
    let (engine, head, store) = lane();
    let (engine_1, head_1) = lane_1();
    let entries = store.store().entries.iter().map(|(key, value)| (BASE64.encode(key), BASE64.encode(value)));
    let present = serde_json::to_vec_pretty(&entries.collect::<BTreeMap<_, _>>()).unwrap();
    check_snapshot(&golden("snapshot-1.json", &present), &engine_1, &head_1);
    check_snapshot(&golden("snapshot-2.json", &present), &engine, &head);
}

fn check_snapshot(golden: &[u8], engine: &Engine, head: &LaneHead) {
    let file: BTreeMap<String, String> = serde_json::from_slice(golden).unwrap();
    let decode = |text: &String| BASE64.decode(text).unwrap();
    let entries = file.iter().map(|(key, value)| (decode(key), decode(value))).collect();
    let store = LaneStore::new(Memory { entries, ..Memory::default() }, "file", Retention::newest(3));
    assert_eq!(store.generations().unwrap(), [1, 2, 3]);
    let open = |generation| {
        let snapshot = store.read(generation).unwrap();
        let head = LaneHead::open(&snapshot.head).unwrap();
        // As the snapshots commands do: with the configuration that is in it.
        let settings: Settings = serde_json::from_str(&head.configuration).unwrap();
        let restored = Engine::restore(settings, head.engine.clone(), snapshot.records).unwrap();
        (head, restored)
    };
    let mut all: Vec<(LaneHead, Engine)> = store.generations().unwrap().into_iter().map(open).collect();
    let (found, restored) = all.pop().unwrap();
    // Keys of the configuration may be added: what was there is still understood.
    assert_eq!(LaneHead { configuration: head.configuration.clone(), ..found }, *head);
    assert_eq!(outcomes(&restored), outcomes(engine));
    assert!(restored.counts().join.queries.pending > 0 && restored.counts().join.queries.retired > 0);
    for (found, expected) in restored.spaces().zip(engine.spaces()) {
        assert_eq!((&found.name, &found.models, found.version), (&expected.name, &expected.models, expected.version));
        for (found, expected) in found.eigens.iter().zip(&expected.eigens) {
            let pairs = found.dense(3).into_iter().zip(expected.dense(3));
            pairs.for_each(|(found, expected)| assert!((found - expected).abs() < 1e-9, "{found} {expected}"));
        }
    }
}

fn full_settings() -> Settings {
    let text = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\nretired = [\"old\"]\nrank = 2\nalgorithm = \"uniform\"\n\
        missing_propensities = \"uniform\"\n[join]\nwindow_ms = 1000\nearly_ms = 300\naggregate = \"mean\"\n\
        on_missing = \"default\"\ndefault_reward = 0.25\n";
    toml::from_str::<Config>(text).unwrap().check().unwrap()
}

/// A lane that has a record of every kind: requests in every state, a space in the lobby, events on probation, dead
/// letters, a dropped space.
fn full_lane() -> Engine {
    let settings = full_settings();
    let parser = Parser::new(&settings);
    let mut engine = Engine::new(settings);
    let mut step = |side: Side, text: String| engine.step(Input::parse(&parser, side, text.into_bytes(), None));
    for i in 0..40_i64 {
        let (space, ts_ms) = (["shop", "blog"][(i % 2) as usize], 100 * i);
        let known = match i % 4 {
            0 => r#","propensities":{"a":0.25,"b":0.5,"old":0.25},"policy":{"a":0.5,"b":0.5}"#,
            1 => r#","propensities":{"a":0.5,"b":0.5}"#,
            2 => r#","propensity":0.5"#,
            _ => "",
        };
        let model = if i % 8 == 4 { "old" } else { ["a", "b"][(i / 2 % 2) as usize] };
        step(
            Side::Query,
            format!(
                r#"{{"request_id":"r{i}","space":"{space}","ts_ms":{ts_ms},"query":[{},0.5,-1],"model":"{model}"{known}}}"#,
                i % 7
            ),
        );
        for (of, after_ms, more) in [(i, 50, ""), (i - 4, 70, r#","event_id":"e""#), (i - 16, 80, ""), (i + 2, 90, "")]
        {
            if i % 3 != 2 {
                let reward = (i % 10) as f64 / 10.0;
                step(
                    Side::Reward,
                    format!(
                        r#"{{"request_id":"r{of}","space":"{space}","ts_ms":{},"reward":{reward}{more}}}"#,
                        ts_ms + after_ms
                    ),
                );
            }
        }
    }
    let far = 86_400_000_000_i64;
    step(Side::Query, format!(r#"{{"request_id":"far","space":"shop","ts_ms":{far},"query":[1,2,3],"model":"a"}}"#));
    step(Side::Reward, r#"{"request_id":"w","space":"lobby","ts_ms":4000,"reward":0.5}"#.to_owned());
    step(Side::Reward, "not JSON".to_owned());
    step(Side::Query, r#"{"request_id":"x"}"#.to_owned());
    step(Side::Query, r#"{"request_id":"g","space":"gone","ts_ms":4000,"query":[1,2,3],"model":"a"}"#.to_owned());
    assert!(engine.drop_space(&Name::try_from("gone").unwrap()));
    engine
}

/// Records of an engine by key, as base64 in JSON.
fn records_json(changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Vec<u8> {
    let there = changes.into_iter().filter_map(|(key, value)| Some((BASE64.encode(key), BASE64.encode(value?))));
    serde_json::to_vec_pretty(&there.collect::<BTreeMap<_, _>>()).unwrap()
}

fn records_of(golden: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let file: BTreeMap<String, String> = serde_json::from_slice(golden).unwrap();
    let decode = |text: &String| BASE64.decode(text).unwrap();
    file.iter().map(|(key, value)| (decode(key), decode(value))).collect()
}

#[test]
fn records_of_0_1() {
    let mut present = full_lane();
    let head = present.head();
    let golden = golden("records-0.1.json", &records_json(present.take_changes()));
    let kinds: std::collections::BTreeSet<u8> = records_of(&golden).iter().map(|(key, _)| key[0]).collect();
    assert_eq!(kinds, b"dgqrst".iter().copied().collect());
    let restored = Engine::restore(full_settings(), head, records_of(&golden)).unwrap();
    // The digest differs: older learners have no paired differences of the policy value.
    assert_eq!(restored.counts(), present.counts());
    let again = Engine::restore(full_settings(), present.head(), records_of(&golden)).unwrap();
    assert_eq!(restored.digest(), again.digest());
}

/// A lane as it is on the snapshots topic.
#[test]
fn lanes_that_move() {
    let (engine, head, store) = lane();
    let (engine_1, head_1) = lane_1();
    let snapshot = store.newest().unwrap().snapshot.unwrap();
    let audits = [("one", 120, 3), ("other", 7, 2)];
    let audits = audits.map(|(instance, bytes, term)| (instance.to_owned(), Audit { bytes, term })).into();
    let shared = SharedHead { instance: "one".to_owned(), partitions: 12, audits, term: 3, lane: snapshot.head };
    let mirror = Mirror::open("snapshots", 5, Entries::new()).unwrap();
    let mut topic = LaneStore::new(mirror, "partition-5", Retention::newest(1));
    topic.commit(&shared.seal(), &difference(&Records::new(), &snapshot.records)).unwrap();
    let messages = topic.store_mut().take_outbox();
    let entries = messages.iter().map(|sent| (BASE64.encode(&sent.key), BASE64.encode(sent.value.as_ref().unwrap())));
    let present = serde_json::to_vec_pretty(&entries.collect::<BTreeMap<_, _>>()).unwrap();
    check_lane(&golden("lane-1.json", &present), &shared, &engine_1, &head_1);
    check_lane(&golden("lane-2.json", &present), &shared, &engine, &head);
}

fn check_lane(golden: &[u8], shared: &SharedHead, engine: &Engine, head: &LaneHead) {
    let file: BTreeMap<String, String> = serde_json::from_slice(golden).unwrap();
    let decode = |text: &String| BASE64.decode(text).unwrap();
    let entries: Entries = file.iter().map(|(key, value)| (decode(key), decode(value))).collect();
    let newer: Entries = entries.clone().into_iter().chain([(b"format".to_vec(), b"2".to_vec())]).collect();
    let mirror = Mirror::open("snapshots", 5, entries).unwrap();
    let found = LaneStore::new(mirror, "partition-5", Retention::newest(1)).newest().unwrap().snapshot.unwrap();
    let found_shared = SharedHead::open(&found.head).unwrap();
    assert_eq!(SharedHead { lane: shared.lane.clone(), ..found_shared.clone() }, *shared);
    let found_head = LaneHead::open(&found_shared.lane).unwrap();
    let settings: Settings = serde_json::from_str(&found_head.configuration).unwrap();
    let restored = Engine::restore(settings, found_head.engine.clone(), found.records).unwrap();
    assert_eq!((outcomes(&restored), found_head.epoch), (outcomes(engine), head.epoch));
    let refused = Mirror::open("snapshots", 5, newer).err().unwrap().to_string();
    assert!(refused.contains("snapshots/5") && refused.contains("upgrade pointsman"), "{refused}");
}
