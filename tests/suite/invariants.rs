//! What must always hold of the learner, over thousands of steps of friendly and hostile streams.

use pointsman::config::{Algorithm, Estimator, FeatureKind, LearnerConfig, Method, Mode, Spec};
use pointsman::event::{Example, Name, Query};
use pointsman::hpg::factored::Factored;
use pointsman::hpg::gradient::{Baseline, coefficients};
use pointsman::hpg::projection::Ball;
use pointsman::hpg::schedule::shrink;
use pointsman::hpg::spectra::{Eigen, Exact, Explicit, Gradient, Lazy, Spectra, Step, explicit_step};
use pointsman::learner::{Decision, Trainer};
use pointsman::router::{Distribution, Params, Sampling};
use pointsman::wire::params;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use xxhash_rust::xxh3::xxh3_64;

use crate::size::sized;

const MODES: [Mode; 4] = [Mode::Factored, Mode::Explicit, Mode::Exact, Mode::Lazy];

#[derive(Debug, Clone, Copy)]
struct Shape {
    dim: usize,
    models: usize,
    rank: usize,
    batch: usize,
}

const fn shape(dim: usize, models: usize, rank: usize, batch: usize) -> Shape {
    Shape { dim, models, rank, batch }
}

/// The same step is cut to size by all of these: radius, scale, rate, forgetting.
#[derive(Debug, Clone, Copy)]
struct Setting {
    eta: f64,
    tau: f64,
    beta: f64,
    half_life: Option<f64>,
}

const fn setting(eta: f64, tau: f64, beta: f64) -> Setting {
    Setting { eta, tau, beta, half_life: None }
}

const PRACTICAL: Setting = setting(0.015, 1000.0, 30.0);
const SHARP: Setting = setting(0.1, 300.0, 3.0);
const BINDING: Setting = setting(5.0, 1.0, 0.1);
const TINY: Setting = setting(1e-9, 300.0, 3.0);
const WIDE: Setting = setting(1.0, 1e9, 1e-9);
const NARROW: Setting = setting(0.1, 1e-6, 1e6);
const FORGETTING: Setting = Setting { half_life: Some(50.0), ..PRACTICAL };
const SETTINGS: [Setting; 7] = [PRACTICAL, SHARP, BINDING, TINY, WIDE, NARROW, FORGETTING];

#[derive(Debug, Clone, Copy)]
enum Stream {
    Isotropic,
    PowerLaw,
    /// 90% exact duplicates from a small pool.
    Duplicates,
    /// A pool's vectors, with noise of 1e-9 to 1e-2.
    NearDuplicates,
    /// Each query is an earlier one plus noise that shrinks until rounding swallows it.
    Shrinking,
    /// Each query is the one before the last, and a little else: errors that a direction has pass to those after it.
    Chained,
    OneHot,
    Same,
    Alternating,
}

const STREAMS: [Stream; 9] = [
    Stream::Isotropic,
    Stream::PowerLaw,
    Stream::Duplicates,
    Stream::NearDuplicates,
    Stream::Shrinking,
    Stream::Chained,
    Stream::OneHot,
    Stream::Same,
    Stream::Alternating,
];

#[test]
fn sound_after_every_step() {
    let shapes = [
        shape(2, 2, 1, 1),
        shape(3, 2, 3, 1),
        shape(8, 3, 8, 1),
        shape(16, 4, 5, 1),
        shape(24, 3, 24, 1),
        shape(24, 4, 6, 7),
        shape(64, 8, 16, 1),
        shape(33, 5, 16, 64),
    ];
    for (shape, stream, setting) in crossed(&shapes, &SETTINGS) {
        for mode in MODES {
            check_sound(shape, stream, setting, mode);
        }
    }
}

fn check_sound(shape: Shape, stream: Stream, setting: Setting, mode: Mode) {
    let label = format!("{shape:?} {stream:?} {setting:?} {mode:?}");
    let mut trainer = Trainer::new(config(shape, setting, mode).check().unwrap());
    let mut world = World::new(shape, stream);
    let every = 7.max(shape.dim / 2);
    for t in 0..affordable(shape, mode) {
        let turn = world.turn();
        let decision = turn.teach(&mut trainer);
        assert_distribution(&decision.distribution.propensities, &label);
        if t % every == 0 {
            assert_sound(&trainer, &format!("{label} after {t}"));
        }
    }
    trainer.flush();
    assert_sound(&trainer, &label);
}

#[test]
fn factored_and_explicit_equal_exact_at_full_rank() {
    let shapes = [
        shape(2, 2, 2, 1),
        shape(3, 3, 3, 1),
        shape(8, 3, 8, 1),
        shape(17, 2, 17, 1),
        shape(24, 3, 24, 1),
        shape(9, 3, 9, 5),
        shape(24, 2, 24, 7),
    ];
    for (shape, stream, setting) in crossed(&shapes, &SETTINGS) {
        let steps = affordable(shape, Mode::Exact);
        let compared = check_same(shape, stream, setting, &[Mode::Exact, Mode::Factored, Mode::Explicit], steps);
        assert_eq!(compared.skipped, 0, "without a cut there are no ties at it");
    }
}

#[test]
fn factored_and_exact_equal_explicit_at_low_rank() {
    let shapes = [shape(2, 2, 1, 1), shape(5, 3, 2, 1), shape(16, 2, 5, 1), shape(16, 4, 5, 3), shape(24, 4, 6, 7)];
    for (shape, stream, setting) in crossed(&shapes, &SETTINGS) {
        let steps = 3 * affordable(shape, Mode::Exact);
        check_same(shape, stream, setting, &[Mode::Explicit, Mode::Factored, Mode::Exact], steps);
    }
}

#[test]
fn factored_equals_explicit_at_low_rank_for_long() {
    let modes = [Mode::Explicit, Mode::Factored];
    for stream in STREAMS {
        check_same(shape(64, 8, 16, 1), stream, PRACTICAL, &modes, sized(300, 5000));
        check_same(shape(33, 5, 16, 64), stream, PRACTICAL, &modes, sized(1000, 20_000));
    }
    check_same(shape(64, 8, 16, 1), Stream::PowerLaw, PRACTICAL, &modes, sized(5000, 20_000));
    check_same(shape(24, 4, 6, 1), Stream::PowerLaw, BINDING, &modes, sized(5000, 20_000));
}

#[test]
fn lazy_equals_exact_while_the_ball_does_not_bind() {
    let free = setting(0.05, 1e9, 1.0);
    for shape in [shape(2, 2, 2, 1), shape(8, 3, 8, 1), shape(16, 3, 16, 4)] {
        for stream in STREAMS {
            check_same(shape, stream, free, &[Mode::Exact, Mode::Lazy], sized(1000, 20_000));
            check_same(shape, stream, FORGETTING, &[Mode::Exact, Mode::Lazy], sized(200, 5000));
        }
    }
}

#[test]
fn lazy_depends_neither_on_the_order_nor_on_the_number_of_shards() {
    for shape in [shape(3, 2, 3, 1), shape(12, 4, 5, 1), shape(12, 4, 12, 7)] {
        for stream in STREAMS {
            let config = LearnerConfig { baseline: Some(Baseline::None), ..config(shape, PRACTICAL, Mode::Lazy) };
            let mut world = World::new(shape, stream);
            let mut first = Trainer::new(config.check().unwrap());
            let mut examples: Vec<Example> = Vec::new();
            for _ in 0..sized(700, 7000) {
                let turn = world.turn();
                let decision = first.decide(&turn.query).unwrap();
                examples.push(turn.example(&decision, shape.models));
                first.learn(examples.last().unwrap().clone()).unwrap();
            }
            first.flush();
            for round in 0..3 {
                shuffle(&mut examples, round);
                let second = learn_in_shards(&config, &examples, 1 + 2 * round as usize);
                assert_eq!((second.version(), second.learned()), (first.version(), first.learned()));
                // The cut chooses among equals by rounding errors: such sums are the same, what is played need not be.
                if shape.rank == shape.dim || !is_tied_at_end(&config, &examples) {
                    let label = format!("{shape:?} {stream:?} order {round}");
                    assert_same(&first.eigens(), &second.eigens(), shape.dim, &label);
                }
            }
        }
    }
}

/// Each shard learns its examples, and one takes in all others.
fn learn_in_shards(config: &LearnerConfig, examples: &[Example], number: usize) -> Trainer {
    let fresh = || Trainer::new(config.check().unwrap());
    let mut shards: Vec<Trainer> = (0..number).map(|_| fresh()).collect();
    for (i, example) in examples.iter().enumerate() {
        shards[i % number].learn(example.clone()).unwrap();
    }
    let mut all = fresh();
    for shard in &mut shards {
        shard.flush();
        assert!(all.add(shard));
    }
    assert!(!all.add(&Trainer::new(LearnerConfig { mode: Mode::Exact, ..config.clone() }.check().unwrap())));
    all
}

#[test]
fn going_on_from_a_saved_state_is_bit_identical() {
    for (i, config) in every_learner().into_iter().enumerate() {
        check_restore(&config, STREAMS[i % STREAMS.len()], i as u64);
    }
}

fn check_restore(config: &LearnerConfig, stream: Stream, seed: u64) {
    let spec = config.check().unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut world = World::new(shape(config.dim, config.models.len(), 1, 1), stream);
    let turns: Vec<Turn> = (0..sized(160, 1600)).map(|_| world.turn()).collect();
    let mut straight = Trainer::new(spec.clone());
    let mut broken = Trainer::new(spec.clone());
    for (t, turn) in turns.iter().enumerate() {
        if random.random::<f64>() < 0.1 {
            broken = Trainer::restore(spec.clone(), &broken.save()).unwrap();
        }
        assert_eq!(turn.teach(&mut straight), turn.teach(&mut broken), "{config:?} at {t}");
    }
    assert_eq!(straight.save(), broken.save(), "{config:?}");
    assert_eq!(straight.version() + pending(&turns, config), turns.len() as u64);
}

/// Some learners put examples off until there are several. One that is looked at after each cannot.
#[test]
fn nobody_can_tell_that_examples_were_put_off() {
    let shapes = [shape(2, 2, 1, 1), shape(8, 3, 8, 1), shape(24, 3, 6, 1), shape(33, 5, 16, 1), shape(40, 9, 5, 1)];
    for (i, (shape, stream, setting)) in crossed(&shapes, &SETTINGS).into_iter().enumerate() {
        let hpg = config(shape, setting, Mode::Factored);
        let importance = LearnerConfig { estimator: Some(Estimator::Importance), evaluate_every: 3, ..hpg.clone() };
        check_put_off(&[hpg.clone(), importance, parameter_free(hpg)][i % 3], shape, stream);
    }
}

fn check_put_off(config: &LearnerConfig, shape: Shape, stream: Stream) {
    let spec = config.check().unwrap();
    let (mut watched, mut alone) = (Trainer::new(spec.clone()), Trainer::new(spec));
    let mut world = World::new(shape, stream);
    let mut random = ChaCha8Rng::seed_from_u64(9);
    for t in 0..sized(400, 4000) {
        let turn = world.turn();
        // Asking for it is a look.
        let distribution = watched.distribution(&turn.query).unwrap();
        let decision = Decision { model: distribution.draw(random.random()), distribution };
        let example = turn.example(&decision, shape.models);
        watched.learn(example.clone()).unwrap();
        alone.learn(example).unwrap();
        let counts = |trainer: &Trainer| (trainer.version(), trainer.learned(), trainer.rewards());
        assert_eq!(counts(&watched), counts(&alone), "{config:?} {stream:?} at {t}");
        if random.random::<f64>() < 0.03 {
            assert_eq!(watched.save(), alone.save(), "{config:?} {stream:?} at {t}");
        }
    }
    assert_eq!(watched.save(), alone.save(), "{config:?} {stream:?}");
}

/// Steps that come as was said, or otherwise: others in between, some left out, several in one batch.
#[test]
fn what_is_expected_changes_nothing() {
    let shapes = [shape(8, 3, 8, 1), shape(24, 9, 6, 1), shape(40, 2, 5, 1)];
    for (shape, stream, setting) in crossed(&shapes, &SETTINGS) {
        let ball = Ball { tau: setting.tau, beta: setting.beta, rank: shape.rank };
        let step = Step { ball: &ball, rate: setting.eta, shrink: shrink(setting.half_life, 1) };
        let (mut told, mut alone) = (Factored::new(shape.models), Factored::new(shape.models));
        let mut world = World::new(shape, stream);
        let mut random = ChaCha8Rng::seed_from_u64(3);
        for t in 0..sized(60, 600) {
            let coming: Vec<(Query, Vec<f64>)> = (0..random.random_range(1..12))
                .map(|_| (world.turn().query, normals(&mut random, shape.models)))
                .collect();
            told.expect(coming.iter().map(|(query, _)| query.as_slice()));
            let mut left = &coming[..];
            while !left.is_empty() {
                let kind = random.random::<f64>();
                let count = if kind < 0.05 { left.len().min(3) } else { 1 };
                let (now, rest) = left.split_at(count);
                left = rest;
                if kind > 0.97 {
                    continue;
                }
                let other = world.turn().query;
                let gradient = |(query, c): &'_ (Query, Vec<f64>)| (query.as_slice().to_vec(), c.clone());
                let mut batch: Vec<(Vec<f64>, Vec<f64>)> = now.iter().map(gradient).collect();
                if kind > 0.94 {
                    batch[0].0 = other.as_slice().to_vec();
                }
                let gradients: Vec<Gradient> =
                    batch.iter().map(|(query, coefficients)| Gradient { query, coefficients }).collect();
                if count == 1 && kind < 0.5 {
                    told.look(gradients[0].query, &mut vec![0.0; shape.models]);
                }
                told.step(&step, &gradients);
                alone.step(&step, &gradients);
            }
            assert_eq!(told.eigens(shape.dim), alone.eigens(shape.dim), "{shape:?} {stream:?} {setting:?} at {t}");
        }
    }
}

fn pending(turns: &[Turn], config: &LearnerConfig) -> u64 {
    (turns.len() % config.batch.unwrap_or(1)) as u64
}

#[test]
fn states_that_do_not_fit_are_refused() {
    type Change = fn(&mut LearnerConfig);
    let changes: [(&str, Change); 6] = [
        ("dim", |c| (c.dim, c.rank) = (c.dim + 1, Some(1))),
        ("models", |c| c.models.push("another".to_owned())),
        ("order of models", |c| c.models.reverse()),
        ("algorithm", |c| {
            c.algorithm = if c.algorithm == Algorithm::Hpg { Algorithm::HpgParameterFree } else { Algorithm::Hpg };
            (c.tau, c.beta, c.eta, c.estimator) = (None, None, Some(0.1), None);
        }),
        ("mode", |c| c.mode = if c.mode == Mode::Exact { Mode::Lazy } else { Mode::Exact }),
        ("rank", |c| c.rank = Some(1)),
    ];
    for config in every_learner() {
        let saved = taught(&config, Stream::Isotropic, 60).save();
        assert!(Trainer::restore(config.check().unwrap(), &saved).is_ok());
        for (name, change) in &changes {
            let learns = matches!(config.algorithm, Algorithm::Hpg | Algorithm::HpgParameterFree);
            let matters = match *name {
                // Models may come and go, and a lower rank truncates.
                "models" | "order of models" | "rank" => false,
                // Sums of gradients cannot be recovered.
                "mode" => learns && config.mode == Mode::Exact,
                _ => true,
            };
            let mut changed = config.clone();
            change(&mut changed);
            let restored = Trainer::restore(changed.check().unwrap(), &saved);
            assert_eq!(restored.is_err(), matters, "another {name} than {config:?}");
        }
    }
}

#[test]
fn damaged_states_are_refused() {
    for config in every_learner() {
        let saved = taught(&config, Stream::Isotropic, 23).save();
        let spec = config.check().unwrap();
        let stride = (saved.len() / sized(60, 2000)).max(1);
        for at in (0..saved.len()).step_by(stride) {
            let mut flipped = saved.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(Trainer::restore(spec.clone(), &flipped).is_err(), "byte {at} of {config:?}");
            assert!(Trainer::restore(spec.clone(), &saved[..at]).is_err(), "{at} bytes of {config:?}");
            // With a checksum that was made to fit the damage may go unnoticed, but must do no harm.
            if let Ok(mut trainer) = Trainer::restore(spec.clone(), &resealed(flipped)) {
                assert_usable(&mut trainer);
            }
        }
    }
}

fn assert_usable(trainer: &mut Trainer) {
    let query = Query::new((0..trainer.spec().dim).map(|i| 1.0 + i as f64)).unwrap();
    for _ in 0..3 {
        let distribution = trainer.distribution(&query).unwrap();
        assert!((distribution.propensities.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{distribution:?}");
        let decision = trainer.decide(&query).unwrap();
        let Distribution { propensities, policy, .. } = decision.distribution;
        let example = Example::new(query.clone(), decision.model, propensities, Some(policy), 1.0).unwrap();
        trainer.learn(example).unwrap();
    }
}

/// Another tau, beta or eta is no other state: it goes on inside of the new ball.
#[test]
fn hyper_parameters_may_change_between_runs() {
    for mode in [Mode::Exact, Mode::Explicit, Mode::Factored, Mode::Lazy] {
        for (tau, beta) in [(0.5, 1.0), (0.5, 0.01), (1000.0, 5.0)] {
            let models = vec!["a".to_owned(), "b".to_owned(), "c".to_owned()];
            let config =
                LearnerConfig { dim: 6, models, tau: Some(30.0), beta: Some(1.0), mode, ..LearnerConfig::default() };
            let saved = taught(&config, Stream::Isotropic, 60).save();
            let changed = LearnerConfig { tau: Some(tau), beta: Some(beta), eta: Some(0.2), ..config };
            let mut trainer = Trainer::restore(changed.check().unwrap(), &saved).unwrap();
            let inside = |trainer: &Trainer| {
                let norm = |eigen: &Eigen| eigen.lambda.iter().map(|lambda| lambda.abs()).sum::<f64>();
                trainer.eigens().iter().all(|eigen| norm(eigen) <= tau * (1.0 + 1e-9))
            };
            assert!(inside(&trainer), "{mode} {tau} {beta}");
            assert_usable(&mut trainer);
            assert!(inside(&trainer), "{mode} {tau} {beta}");
        }
    }
}

/// Corrects the checksum at the end.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.len() - 8;
    let checksum = xxh3_64(&bytes[..body]);
    bytes[body..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn routers_play_what_the_learner_plays() {
    for config in every_learner() {
        for stream in [Stream::Isotropic, Stream::NearDuplicates, Stream::OneHot] {
            let trainer = taught(&config, stream, sized(200, 2000));
            let spec = trainer.spec();
            let exported = Params {
                space: Name::try_from("space").unwrap(),
                epoch: 1,
                version: trainer.version(),
                revision: 1,
                models: spec.models.clone(),
                dim: spec.dim,
                created_ms: 1,
                algorithm: spec.algorithm().to_owned(),
                policy: trainer.policy(),
            };
            let routed = params::decode(&params::encode(&exported)).unwrap();
            let mut world = World::new(shape(spec.dim, spec.models.len(), 1, 1), stream);
            for _ in 0..50 {
                let query = world.turn().query;
                let (found, expected) = (routed.distribution(&query).unwrap(), trainer.distribution(&query).unwrap());
                assert_close(&found.policy, &expected.policy, 1e-5, &format!("{config:?}"));
                assert_close(&found.propensities, &expected.propensities, 1e-5, &format!("{config:?}"));
            }
        }
    }
}

/// W+ = argmin eta <W, G> + D(W || W_t) over the ball: nothing else in it may be better.
#[test]
fn the_exact_step_is_optimal() {
    let gentle = setting(0.1, 300.0, 3.0);
    for dim in [1, 2, 3, 5] {
        for setting in [gentle, BINDING, setting(0.5, 2.0, 0.5), setting(1.0, 0.01, 10.0)] {
            for stream in [Stream::Isotropic, Stream::PowerLaw, Stream::Same, Stream::OneHot] {
                check_optimal(shape(dim, 2, dim, 1), stream, setting);
            }
        }
    }
}

fn check_optimal(shape: Shape, stream: Stream, setting: Setting) {
    let label = format!("{shape:?} {stream:?} {setting:?}");
    let config = LearnerConfig { baseline: Some(Baseline::None), ..config(shape, setting, Mode::Exact) };
    let mut trainer = Trainer::new(config.check().unwrap());
    let ball = ball(trainer.spec()).unwrap();
    let mut world = World::new(shape, stream);
    for _ in 0..sized(30, 1000) {
        let turn = world.turn();
        let before = trainer.eigens();
        let decision = trainer.decide(&turn.query).unwrap();
        let example = turn.example(&decision, shape.models);
        let mut c = Vec::new();
        coefficients(&example, example.policy(), 0.0, f64::INFINITY, &mut c);
        trainer.learn(example).unwrap();
        for ((old, new), c) in before.iter().zip(&trainer.eigens()).zip(c) {
            let problem = Mirror { ball, old: old.dense(shape.dim), query: turn.query.as_slice(), a: setting.eta * c };
            problem.assert_minimum(&new.dense(shape.dim), &mut world.random, &label);
        }
    }
}

/// The problem that one step solves, from its definition.
struct Mirror<'a> {
    ball: Ball,
    old: Vec<f64>,
    query: &'a [f64],
    a: f64,
}

impl Mirror<'_> {
    fn assert_minimum(&self, w: &[f64], random: &mut ChaCha8Rng, label: &str) {
        let d = self.query.len();
        let best = self.objective(w);
        for scale in [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6] {
            for _ in 0..4 {
                let noise: Vec<f64> = normals(random, d * d);
                let moved = |i: usize| w[i] + self.ball.tau * scale * (noise[i] + noise[i % d * d + i / d]);
                let mut other: Vec<f64> = (0..d * d).map(moved).collect();
                let norm: f64 = jacobi(d, &other).0.iter().map(|x| x.abs()).sum();
                let fit = (self.ball.tau / norm).min(1.0);
                other.iter_mut().for_each(|x| *x *= fit);
                let found = self.objective(&other);
                assert!(found >= best - 1e-9 * best.abs().max(1.0), "{label}: {found} {best} at {scale}");
            }
        }
    }

    /// eta <W, G> + Phi(W) - <grad Phi(W_t), W>, that is D(W || W_t) up to a constant.
    fn objective(&self, w: &[f64]) -> f64 {
        let (d, beta) = (self.query.len(), self.ball.beta);
        let phi: f64 = jacobi(d, w).0.iter().map(|x| x * (x / beta).asinh() - x.hypot(beta) + beta).sum();
        let (values, vectors) = jacobi(d, &self.old);
        let along = |v: &[f64]| (0..d * d).map(|i| v[i / d] * w[i] * v[i % d]).sum::<f64>();
        let linear: f64 = values.iter().zip(vectors.chunks(d)).map(|(x, v)| (x / beta).asinh() * along(v)).sum();
        phi - linear - self.a * along(self.query)
    }
}

/// Eigenvalues and eigenvectors by Jacobi's rotations: slow, obvious, and not what the crate uses.
fn jacobi(d: usize, a: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut a = a.to_vec();
    let mut vectors: Vec<f64> = (0..d * d).map(|i| f64::from(u8::from(i / d == i % d))).collect();
    for _ in 0..20 {
        for (p, q) in (0..d).flat_map(|p| (0..p).map(move |q| (p, q))) {
            if a[p * d + q] != 0.0 {
                let angle = 0.5 * (2.0 * a[p * d + q]).atan2(a[q * d + q] - a[p * d + p]);
                rotate_rows(d, &mut a, p, q, angle);
                transpose(d, &mut a);
                rotate_rows(d, &mut a, p, q, angle);
                rotate_rows(d, &mut vectors, p, q, angle);
            }
        }
    }
    ((0..d).map(|i| a[i * d + i]).collect(), vectors)
}

fn rotate_rows(d: usize, a: &mut [f64], p: usize, q: usize, angle: f64) {
    let (sin, cos) = angle.sin_cos();
    for i in 0..d {
        let (x, y) = (a[p * d + i], a[q * d + i]);
        (a[p * d + i], a[q * d + i]) = (cos * x - sin * y, sin * x + cos * y);
    }
}

fn transpose(d: usize, a: &mut [f64]) {
    for (i, j) in (0..d).flat_map(|i| (0..i).map(move |j| (i, j))) {
        a.swap(i * d + j, j * d + i);
    }
}

#[derive(Debug, Clone)]
struct AnyExample {
    query: Vec<f64>,
    chosen: usize,
    propensity: f64,
    reward: f64,
}

const ANY: Shape = shape(5, 3, 3, 1);

fn any_example() -> impl Strategy<Value = AnyExample> {
    let power = prop_oneof![Just(0), Just(-300), Just(300), Just(-8), -20..20_i32];
    let part = prop_oneof![1 => Just(0.0), 4 => -1.0..1.0_f64];
    let component = (part, power).prop_map(|(x, power)| x * 10_f64.powi(power));
    let propensity = prop_oneof![Just(1e-300), Just(5e-324), Just(1.0), 0.001..1.0_f64];
    let reward = prop_oneof![Just(0.0), Just(1.0)];
    (prop::collection::vec(component, ANY.dim), 0..ANY.models, propensity, reward)
        .prop_map(|(query, chosen, propensity, reward)| AnyExample { query, chosen, propensity, reward })
}

/// The corners of what a configuration may say.
fn any_config() -> impl Strategy<Value = LearnerConfig> {
    let scale = || prop_oneof![Just(1.0), Just(1e-9), Just(1e9), 0.01..10.0_f64];
    let estimator = prop_oneof![Just(Estimator::Logged), Just(Estimator::Importance)];
    let half_life = prop_oneof![Just(None), Just(Some(1.0)), Just(Some(30.0))];
    let mode = prop::sample::select(MODES.to_vec());
    let cap = prop_oneof![Just(1.0), Just(10.0), Just(1e6)];
    (scale(), scale(), scale(), estimator, half_life, mode, cap, 1..=ANY.dim, 1..4_usize, any::<bool>()).prop_map(
        |(eta, tau, beta, estimator, half_life, mode, weight_cap, rank, batch, free)| {
            let shape = Shape { rank, batch, ..ANY };
            let base = config(shape, Setting { eta, tau, beta, half_life }, mode);
            let config = LearnerConfig { estimator: Some(estimator), weight_cap, ..base };
            if free { parameter_free(config) } else { config }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(sized(2000, 100_000) as u32) })]

    #[test]
    fn any_examples_leave_a_sound_learner(
        config in any_config(),
        examples in prop::collection::vec(any_example(), 1..60),
        repeats in 1..4_usize,
    ) {
        let mut trainer = Trainer::new(config.check().unwrap());
        for AnyExample { query, chosen, propensity, reward } in examples.iter().cycle().take(repeats * examples.len()) {
            let Ok(query) = Query::new(query.clone()) else { continue };
            let rest = (1.0 - propensity) / (ANY.models - 1) as f64;
            let mut propensities = vec![rest; ANY.models];
            propensities[*chosen] = *propensity;
            trainer.learn(Example::new(query, *chosen, propensities, None, *reward).unwrap()).unwrap();
            assert_sound(&trainer, &format!("{config:?}"));
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let spec = config(ANY, PRACTICAL, Mode::Factored).check().unwrap();
        prop_assert!(Trainer::restore(spec.clone(), &bytes).is_err());
        // The same bytes in an envelope that is in order.
        let mut sealed = b"POINTSMN\x01\x00\x01\x00".to_vec();
        sealed.extend((bytes.len() as u64).to_le_bytes());
        sealed.extend(bytes);
        sealed.extend([0; 8]);
        prop_assert!(Trainer::restore(spec, &resealed(sealed)).is_err());
    }
}

/// Finite, orthonormal, of rank k, in the ball, and in both spaces the same.
fn assert_sound(trainer: &Trainer, label: &str) {
    let spec = trainer.spec();
    let ball = ball(spec).unwrap();
    let eigens = trainer.eigens();
    assert_eq!(eigens.len(), spec.models.len());
    for eigen in &eigens {
        let r = eigen.gamma.len();
        assert!(r <= ball.rank && eigen.lambda.len() == r && eigen.vectors.len() == r * spec.dim, "{label}");
        let finite = eigen.gamma.iter().chain(&eigen.lambda).chain(&eigen.vectors).all(|x| x.is_finite());
        assert!(finite, "{label}: {eigen:?}");
        let skew = skew(eigen, spec.dim);
        assert!(skew <= 1e-9, "{label}: U'U is off by {skew:e}");
        if matches!(spec.method, Method::Hpg(_)) {
            let norm: f64 = eigen.lambda.iter().map(|lambda| lambda.abs()).sum();
            assert!(norm <= ball.tau * (1.0 + 1e-9), "{label}: nuclear norm {norm:e}, tau {:e}", ball.tau);
            for (gamma, lambda) in eigen.gamma.iter().zip(&eigen.lambda) {
                let expected = (lambda / ball.beta).asinh();
                // Below the least normal number there are fewer digits to agree in.
                let allowed = 1e-9 * expected.abs() + f64::MIN_POSITIVE;
                assert!((gamma - expected).abs() <= allowed, "{label}: {gamma:e} {expected:e}");
            }
        }
    }
    let query = Query::new((0..spec.dim).map(|i| 1.0 + i as f64)).unwrap();
    assert_distribution(&trainer.distribution(&query).unwrap().propensities, label);
}

fn assert_distribution(p: &[f64], label: &str) {
    let sum: f64 = p.iter().sum();
    assert!((sum - 1.0).abs() <= 1e-12 && p.iter().all(|&p| p > 0.0), "{label}: {p:?}");
}

/// The largest entry of |U'U - I|.
fn skew(eigen: &Eigen, dim: usize) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let columns: Vec<&[f64]> = eigen.vectors.chunks_exact(dim).collect();
    let entries = (0..columns.len()).flat_map(|i| (0..=i).map(move |j| (i, j)));
    entries.fold(0.0, |m, (i, j)| m.max((dot(columns[i], columns[j]) - f64::from(u8::from(i == j))).abs()))
}

#[derive(Debug)]
struct Compared {
    steps: usize,
    /// Steps after which rounding errors decide what the cut keeps.
    skipped: usize,
}

/// Takes the same steps in several modes and compares their parameters with those of the first.
fn check_same(shape: Shape, stream: Stream, setting: Setting, modes: &[Mode], examples: usize) -> Compared {
    let ball = Ball { tau: setting.tau, beta: setting.beta, rank: shape.rank };
    let step = Step { ball: &ball, rate: setting.eta, shrink: shrink(setting.half_life, shape.batch) };
    let mut world = World::new(shape, stream);
    let mut rivals: Vec<Spectra> = modes.iter().map(|&mode| zero(mode, shape)).collect();
    let mut compared = Compared { steps: examples / shape.batch, skipped: 0 };
    for t in 0..compared.steps {
        let batch: Vec<(Query, Vec<f64>)> =
            (0..shape.batch).map(|_| world.gradient(&rivals[0], &ball, shape.models)).collect();
        let gradients: Vec<Gradient> =
            batch.iter().map(|(q, c)| Gradient { query: q.as_slice(), coefficients: c }).collect();
        let tied = shape.rank < shape.dim && is_tied(&rivals[0].eigens(&ball, shape.dim), &step, &gradients);
        rivals.iter_mut().for_each(|rival| rival.step(&step, &gradients));
        if tied {
            compared.skipped += 1;
            let common = rivals[0].eigens(&ball, shape.dim);
            rivals = modes.iter().map(|&mode| holding(&common, mode, shape, &ball)).collect();
        } else if t % 5 == 0 || t + 1 == compared.steps {
            let eigens: Vec<Vec<Eigen>> = rivals.iter().map(|rival| rival.eigens(&ball, shape.dim)).collect();
            for (mode, found) in modes.iter().zip(&eigens) {
                let label = format!("{shape:?} {stream:?} {setting:?} {mode:?} after {t}, {compared:?}");
                assert_same(&eigens[0], found, shape.dim, &label);
                assert_opposite(found, shape, &label);
            }
        }
    }
    // Only one-hot queries give eigenvalues that are equal again and again: anywhere else most steps must count.
    let few = compared.skipped <= 1 + compared.steps / 20;
    assert!(few || matches!(stream, Stream::OneHot), "{shape:?} {stream:?} {setting:?} {compared:?}");
    compared
}

/// Whether two |gamma| at the cut are so close that what is kept depends on rounding errors.
fn is_tied(eigens: &[Eigen], step: &Step, gradients: &[Gradient]) -> bool {
    let uncut = Ball { rank: usize::MAX, ..*step.ball };
    let step_uncut = Step { ball: &uncut, ..*step };
    eigens.iter().enumerate().any(|(m, eigen)| {
        let mut eigen = eigen.clone();
        explicit_step(&mut eigen, &step_uncut, m, gradients);
        cut_is_tied(&eigen.gamma, step.ball.rank)
    })
}

fn cut_is_tied(gamma: &[f64], rank: usize) -> bool {
    let mut sizes: Vec<f64> = gamma.iter().map(|gamma| gamma.abs()).collect();
    sizes.sort_by(|x, y| y.total_cmp(x));
    if sizes.len() <= rank || sizes[rank - 1] <= NOISE * sizes[0] {
        return false;
    }
    sizes[rank - 1] - sizes[rank] < TIE * sizes[rank - 1]
}

/// An error of an ulp turns the last vector that is kept by an ulp over the gap: this leaves it far below what is
/// asserted, whatever the vector's own size.
const TIE: f64 = 1e-4;

/// Of what is smaller either may be kept without being seen.
const NOISE: f64 = 1e-11;

fn is_tied_at_end(config: &LearnerConfig, examples: &[Example]) -> bool {
    let uncut = LearnerConfig { rank: Some(config.dim), ..config.clone() };
    let mut trainer = Trainer::new(uncut.check().unwrap());
    examples.iter().for_each(|example| trainer.learn(example.clone()).unwrap());
    trainer.flush();
    trainer.eigens().iter().any(|eigen| cut_is_tied(&eigen.gamma, config.rank.unwrap()))
}

fn zero(mode: Mode, shape: Shape) -> Spectra {
    match mode {
        Mode::Exact => Spectra::Exact(Exact::new(shape.dim, shape.models)),
        Mode::Explicit => Spectra::Explicit(Explicit::new(shape.models)),
        Mode::Factored => Spectra::Factored(Factored::new(shape.models)),
        Mode::Lazy => Spectra::Lazy(Lazy::new(shape.dim, shape.models)),
    }
}

/// Parameters equal to `eigens`, reached from zero in one step that has each eigenvector as a query.
fn holding(eigens: &[Eigen], mode: Mode, shape: Shape, ball: &Ball) -> Spectra {
    let mut parts: Vec<(&[f64], Vec<f64>)> = Vec::new();
    for m in 0..shape.models {
        // Two models are each other's opposite; the tie may have cut them differently.
        let (source, sign) = if shape.models == 2 && m == 1 { (0, -1.0) } else { (m, 1.0) };
        for (gamma, vector) in eigens[source].gamma.iter().zip(eigens[source].vectors.chunks_exact(shape.dim)) {
            let mut c = vec![0.0; shape.models];
            c[m] = sign * gamma;
            parts.push((vector, c));
        }
    }
    let batch: Vec<Gradient> = parts.iter().map(|(query, c)| Gradient { query, coefficients: c }).collect();
    let mut spectra = zero(mode, shape);
    spectra.step(&Step { ball, rate: 1.0, shrink: 1.0 }, &batch);
    spectra
}

/// All W entries within 1e-9 of the largest, or of 1.
fn assert_same(expected: &[Eigen], found: &[Eigen], dim: usize, label: &str) {
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(found) {
        let (expected, found) = (expected.dense(dim), found.dense(dim));
        assert_close(&found, &expected, 1e-9 * magnitude(&expected), label);
    }
}

/// W_1 = -W_2 where there are two models.
fn assert_opposite(eigens: &[Eigen], shape: Shape, label: &str) {
    if let [first, second] = eigens {
        let opposite: Vec<f64> = second.dense(shape.dim).iter().map(|w| -w).collect();
        assert_close(&first.dense(shape.dim), &opposite, 1e-9 * magnitude(&opposite), label);
    }
}

fn magnitude(values: &[f64]) -> f64 {
    values.iter().fold(1.0, |m, x| m.max(x.abs()))
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, label: &str) {
    assert_eq!(found.len(), expected.len(), "{label}");
    let error = found.iter().zip(expected).fold(0.0, |m: f64, (x, y)| m.max((x - y).abs()));
    assert!(error <= tolerance, "{label}: off by {error:e}, allowed {tolerance:e}");
}

/// Every stream with every shape, and the settings in turn; in a soak with every setting.
fn crossed(shapes: &[Shape], settings: &[Setting]) -> Vec<(Shape, Stream, Setting)> {
    let mut cases = Vec::new();
    for (i, &shape) in shapes.iter().enumerate() {
        for (j, &stream) in STREAMS.iter().enumerate() {
            for n in 0..sized(1, settings.len()) {
                cases.push((shape, stream, settings[(i + j + n) % settings.len()]));
            }
        }
    }
    cases
}

/// How many examples the time allows: thousands where they are cheap.
fn affordable(shape: Shape, mode: Mode) -> usize {
    let Shape { dim, models, rank, batch } = shape;
    let cost = match mode {
        Mode::Exact => 40 * dim.pow(3) / batch,
        Mode::Lazy => 40 * dim.pow(3),
        Mode::Explicit => 40 * (rank + batch).min(dim).pow(3) / batch,
        Mode::Factored => 10 * rank * (rank * rank + dim),
    };
    (sized(100_000_000, 1_000_000_000) / (models * cost + 20_000)).clamp(150, sized(3000, 10_000))
}

/// Every algorithm and mode, both estimators, with and without batches, floor and forgetting.
fn every_learner() -> Vec<LearnerConfig> {
    let mut all = Vec::new();
    for (estimator, batch, floor, half_life) in [
        (Estimator::Logged, 1, 0.0, None),
        (Estimator::Importance, 5, 0.1, None),
        (Estimator::Logged, 5, 0.2, Some(50.0)),
        (Estimator::Importance, 1, 0.0, Some(50.0)),
    ] {
        for mode in MODES {
            let base = config(shape(7, 3, 4, batch), Setting { half_life, ..PRACTICAL }, mode);
            let hpg = LearnerConfig { estimator: Some(estimator), exploration_floor: floor, ..base };
            all.extend([hpg.clone(), parameter_free(hpg)]);
        }
        let base = config(shape(7, 3, 4, batch), PRACTICAL, Mode::Factored);
        let base = LearnerConfig { exploration_floor: floor, fixed_model: Some("m1".to_owned()), ..base };
        all.push(LearnerConfig { algorithm: Algorithm::Uniform, ..base.clone() });
        all.push(LearnerConfig { algorithm: Algorithm::Fixed, ..base.clone() });
        let base = LearnerConfig { estimator: Some(estimator), half_life, tau: None, beta: None, ..base };
        all.extend(rivals(&base));
        all.extend(with_critic(&base));
    }
    all
}

/// The learners with a critic.
fn with_critic(base: &LearnerConfig) -> [LearnerConfig; 3] {
    let actor = LearnerConfig { estimator: Some(Estimator::Critic), eta: None, ..base.clone() };
    let small = LearnerConfig { head_queries: 8, feature_rank: Some(2), mode: Mode::Explicit, ..actor.clone() };
    [LearnerConfig { algorithm: Algorithm::HypentropyRegression, ..actor.clone() }, small, actor]
}

/// What HPG is compared with, each in all its forms.
fn rivals(base: &LearnerConfig) -> Vec<LearnerConfig> {
    let of = |algorithm| LearnerConfig { algorithm, eta: None, rank: None, ..base.clone() };
    let linear = |algorithm| LearnerConfig { features: FeatureKind::Linear, ..of(algorithm) };
    vec![
        of(Algorithm::Exp3),
        of(Algorithm::LogLinear),
        of(Algorithm::LogQuadratic),
        LearnerConfig { rank: Some(4), ..of(Algorithm::LogQuadratic) },
        of(Algorithm::LinUcb),
        linear(Algorithm::LinUcb),
        linear(Algorithm::LinThompson),
        of(Algorithm::QuadraticSgd),
    ]
}

fn config(shape: Shape, setting: Setting, mode: Mode) -> LearnerConfig {
    LearnerConfig {
        dim: shape.dim,
        models: (0..shape.models).map(|m| format!("m{m}")).collect(),
        rank: Some(shape.rank),
        batch: Some(shape.batch),
        estimator: Some(Estimator::Logged),
        eta: Some(setting.eta),
        tau: Some(setting.tau),
        beta: Some(setting.beta),
        half_life: setting.half_life,
        mode,
        ..LearnerConfig::default()
    }
}

fn parameter_free(config: LearnerConfig) -> LearnerConfig {
    LearnerConfig { algorithm: Algorithm::HpgParameterFree, tau: None, beta: None, eta: None, ..config }
}

fn ball(spec: &Spec) -> Option<Ball> {
    match &spec.method {
        Method::Hpg(hpg) | Method::HpgParameterFree(hpg) => Some(hpg.ball),
        _ => None,
    }
}

fn taught(config: &LearnerConfig, stream: Stream, examples: usize) -> Trainer {
    let mut trainer = Trainer::new(config.check().unwrap());
    let mut world = World::new(shape(config.dim, config.models.len(), 1, 1), stream);
    for _ in 0..examples {
        world.turn().teach(&mut trainer);
    }
    trainer
}

/// Where queries and rewards come from; it never looks at the learner, so that runs can be compared.
struct World {
    shape: Shape,
    stream: Stream,
    pool: Vec<Vec<f64>>,
    turns: usize,
    random: ChaCha8Rng,
}

/// One query and the luck of whoever answers it.
#[derive(Debug, Clone)]
struct Turn {
    query: Query,
    luck: f64,
}

impl World {
    fn new(shape: Shape, stream: Stream) -> Self {
        let seed = (shape.dim * 1000 + shape.models * 100 + shape.batch) as u64;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let pool = (0..6).map(|_| normals(&mut random, shape.dim)).collect();
        Self { shape, stream, pool, turns: 0, random }
    }

    fn turn(&mut self) -> Turn {
        let components = self.components();
        self.turns += 1;
        Turn { query: Query::new(components).unwrap(), luck: self.random.random() }
    }

    fn components(&mut self) -> Vec<f64> {
        let fresh = normals(&mut self.random, self.shape.dim);
        let pooled = self.pool[self.random.random_range(0..self.pool.len())].clone();
        match self.stream {
            Stream::Isotropic => fresh,
            Stream::PowerLaw => fresh.iter().enumerate().map(|(i, x)| x / (i + 1) as f64).collect(),
            Stream::Duplicates if self.random.random::<f64>() < 0.9 => pooled,
            Stream::Duplicates => fresh,
            Stream::NearDuplicates => {
                plus(&pooled, [1e-9, 1e-7, 1e-4, 1e-2][self.random.random_range(0..4_usize)], &fresh)
            }
            Stream::Shrinking => self.shrinking(&fresh),
            Stream::Chained => {
                let last = self.turns % 2;
                let little = [0.01, 0.02, 0.05, 0.2][self.random.random_range(0..4_usize)];
                self.pool[last] = plus(&self.pool[last], little, &fresh);
                self.pool[last].clone()
            }
            Stream::OneHot => one_hot(self.shape.dim, self.random.random_range(0..self.shape.dim)),
            Stream::Same => self.pool[0].clone(),
            Stream::Alternating if self.turns.is_multiple_of(2) => self.pool[0].clone(),
            Stream::Alternating => self.pool[0].iter().map(|x| -x).collect(),
        }
    }

    /// Clusters of 40; the pool is the current one.
    fn shrinking(&mut self, fresh: &[f64]) -> Vec<f64> {
        let age = self.turns % 40;
        if age == 0 {
            self.pool = vec![fresh.to_vec()];
        } else {
            let earlier = self.random.random_range(0..self.pool.len());
            self.pool.push(plus(&self.pool[earlier], 0.3_f64.powi(age as i32), fresh));
        }
        self.pool[age].clone()
    }

    /// A query and c_m of each model, as a learner with these parameters would meet it.
    fn gradient(&mut self, spectra: &Spectra, ball: &Ball, models: usize) -> (Query, Vec<f64>) {
        let turn = self.turn();
        let mut scores = vec![0.0; models];
        spectra.scores(ball, turn.query.as_slice(), &mut scores);
        let distribution = pointsman::router::Distribution::mix(Sampling::Softmax.core(&scores), 0.0, &scores);
        let decision = Decision { model: distribution.draw(self.random.random()), distribution };
        let example = turn.example(&decision, models);
        let mut c = Vec::new();
        coefficients(&example, example.policy(), 0.4, 10.0, &mut c);
        (turn.query, c)
    }
}

impl Turn {
    /// Routes the query, rewards the decision and learns from it.
    fn teach(&self, trainer: &mut Trainer) -> Decision {
        let decision = trainer.decide(&self.query).unwrap();
        trainer.learn(self.example(&decision, trainer.spec().models.len())).unwrap();
        decision
    }

    /// The largest component names the model that usually earns a reward.
    fn example(&self, decision: &Decision, models: usize) -> Example {
        let q = self.query.as_slice();
        let best = (0..q.len()).fold(0, |best, i| if q[i].abs() > q[best].abs() { i } else { best }) % models;
        let chance = if decision.model == best { 0.8 } else { 0.3 };
        let reward = f64::from(u8::from(self.luck < chance));
        let distribution = decision.distribution.clone();
        Example::new(self.query.clone(), decision.model, distribution.propensities, Some(distribution.policy), reward)
            .unwrap()
    }
}

fn normals(random: &mut ChaCha8Rng, n: usize) -> Vec<f64> {
    (0..n).map(|_| random.sample(StandardNormal)).collect()
}

fn plus(x: &[f64], scale: f64, y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| x + scale * y).collect()
}

fn one_hot(dim: usize, at: usize) -> Vec<f64> {
    (0..dim).map(|i| f64::from(u8::from(i == at))).collect()
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for i in (1..items.len()).rev() {
        items.swap(i, random.random_range(0..=i));
    }
}
