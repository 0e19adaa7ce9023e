//! The promise of the rollout: the cumulative loss against the incumbent stays within the budget.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;

use pointsman::config::{Algorithm, LearnerConfig, Promote};
use pointsman::evaluate::rollout::{RolloutView, Stage};
use pointsman::evaluate::worth::{Floor, Outlook, Scratch, Worth, WorthSpec};
use pointsman::event::{Example, ModelName, Query};
use pointsman::learner::Trainer;
use pointsman::simulate::World;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::queries::Shape;
use pointsman::simulate::shuffled::Shuffled;
use pointsman::wire::dataset::decode;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64;

use crate::size::sized;

/// What a run knows by the truth.
struct Ledger {
    budget: f64,
    /// Decisions whose reward may not have been learned from yet.
    in_flight: usize,
    recent: VecDeque<f64>,
    round: u64,
    /// The round in which the promise has begun.
    begun: Option<u64>,
    /// Sum of what was earned above the incumbent's reward less the budget, and the least that it ever was.
    sum: f64,
    least: f64,
    /// Per round the expected rewards of what was played, of the policy alone and of the incumbent.
    earned: [f64; 3],
    full: Option<u64>,
}

impl Ledger {
    fn new(budget: f64, in_flight: usize) -> Self {
        let (recent, earned) = (VecDeque::new(), [0.0; 3]);
        Self { budget, in_flight, recent, round: 0, begun: None, sum: 0.0, least: 0.0, earned, full: None }
    }

    /// Adds a decision before its reward is known.
    fn add(&mut self, view: &RolloutView, played: f64, policy: f64, incumbent: f64) {
        let x = played - (1.0 - self.budget) * incumbent;
        self.recent.push_back(x);
        if self.recent.len() > self.in_flight + 1 {
            self.recent.pop_front();
        }
        match self.begun {
            Some(_) => self.sum += x,
            None if view.allowance.is_some() => {
                // The first example that counts was decided when the oldest of these was.
                self.begun = Some(self.round);
                self.sum = self.recent.iter().sum();
            }
            None => {}
        }
        self.least = self.least.min(self.sum);
        self.earned.iter_mut().zip([played, policy, incumbent]).for_each(|(sum, reward)| *sum += reward);
        if view.stage == Stage::Full {
            self.full.get_or_insert(self.round);
        }
        self.round += 1;
    }

    fn is_broken(&self) -> bool {
        self.least < -1e-9
    }

    /// Of what was played, in percent of the incumbent's reward.
    fn gain(&self) -> f64 {
        100.0 * (self.earned[0] / self.earned[2] - 1.0)
    }
}

fn quantile(values: impl Iterator<Item = f64>, at: f64) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all[((all.len() - 1) as f64 * at).round() as usize]
}

fn rounds(quantile: f64) -> String {
    if quantile.is_finite() { format!("{quantile:.0}") } else { "never".to_owned() }
}

/// A line of the table, and how many runs broke the promise.
fn report(name: &str, runs: &[Ledger]) -> usize {
    let broken = runs.iter().filter(|run| run.is_broken()).count();
    let gains = || runs.iter().map(Ledger::gain);
    let full = |at| rounds(quantile(runs.iter().map(|run| run.full.map_or(f64::INFINITY, |n| n as f64)), at));
    println!(
        "{name}: budget exceeded in {broken} of {} runs; gain over the incumbent: median {:+.2}%, least {:+.2}%; full after {} \
         (quartile {})",
        runs.len(),
        quantile(gains(), 0.5),
        quantile(gains(), 0.0),
        full(0.5),
        full(0.25),
    );
    broken
}

/// The rollout as configured by default, from shadow on.
fn rollout(models: usize, incumbent: Option<usize>, automatic: bool) -> WorthSpec {
    let name = |m: usize| format!("model-{m}");
    let config = LearnerConfig {
        dim: 1,
        rank: Some(1),
        models: (0..models).map(name).collect(),
        stage: if automatic { Stage::Shadow } else { Stage::Canary },
        promote: if automatic { Promote::Automatic } else { Promote::Manual },
        incumbent: incumbent.map(name),
        ..LearnerConfig::default()
    };
    config.check().unwrap().worth
}

/// What comes in a round: the distribution of the policy, and the expected reward of each model.
trait Game {
    fn models(&self) -> usize;
    /// `taught` is the number of examples so far that did not play the incumbent.
    fn next(&mut self, round: u64, taught: f64, random: &mut ChaCha8Rng) -> (Vec<f64>, Vec<f64>);
}

/// Plays a game through the rollout alone. Rewards come `delay` rounds after the decision.
fn play(game: &mut dyn Game, spec: &WorthSpec, count: u64, delay: usize, seed: u64) -> (Ledger, Option<usize>) {
    let models = game.models();
    let names: Vec<ModelName> = (0..models).map(|m| ModelName::try_from(format!("model-{m}")).unwrap()).collect();
    let (mut worth, mut scratch) = (Worth::new(spec, models), Scratch::default());
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut open: VecDeque<(Example, Vec<f64>)> = VecDeque::new();
    let mut ledger = Ledger::new(spec.rollout.budget, delay);
    let (mut taught, mut incumbent, query) = (0.0, None, Query::new([1.0]).unwrap());
    for round in 0..count {
        let (policy, rewards) = game.next(round, taught, &mut random);
        let Floor { share, distribution } = worth.floor(spec, 0.0);
        let played: Vec<f64> =
            policy.iter().zip(&distribution).map(|(p, other)| (1.0 - share) * p + share * other).collect();
        let view = worth.rollout(spec, &names);
        incumbent = view.incumbent.as_ref().and_then(|name| names.iter().position(|other| other == name));
        let value = |p: &[f64]| p.iter().zip(&rewards).map(|(p, r)| p * r).sum::<f64>();
        ledger.add(&view, value(&played), value(&policy), rewards[incumbent.unwrap_or(0)]);
        let [mut draw, luck]: [f64; 2] = random.random();
        let drawn = played.iter().position(|p| {
            draw -= p;
            draw < 0.0
        });
        let model = drawn.unwrap_or_else(|| (0..models).rfind(|m| played[*m] > 0.0).unwrap());
        let reward = f64::from(u8::from(luck < rewards[model]));
        let example = Example::new(query.clone(), model, played, Some(policy.clone()), reward).unwrap();
        open.push_back((example, policy));
        if open.len() > delay {
            let (example, policy) = open.pop_front().unwrap();
            taught += 1.0 - example.propensities()[incumbent.unwrap_or(0)];
            let outlook = Outlook { policy: &policy, predicted: None, exploration: 0.0 };
            worth.see(spec, &example, Some(outlook), &mut scratch);
        }
    }
    (ledger, incumbent)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// One model is best for every query. The policy plays others.
    Useless,
    /// Each kind of query has a model that suits it, which the policy finds.
    Useful,
    /// The same, until in the middle of the run each kind needs another model. The policy never notices.
    Drifting,
}

/// Four kinds of queries, four models. The policy learns from what the incumbent does not decide.
struct Kinds {
    kind: Kind,
    rounds: u64,
}

impl Game for Kinds {
    fn models(&self) -> usize {
        4
    }

    fn next(&mut self, round: u64, taught: f64, random: &mut ChaCha8Rng) -> (Vec<f64>, Vec<f64>) {
        let of_query = random.random_range(0..4);
        let needed = match self.kind {
            Kind::Drifting if round >= self.rounds / 2 => (of_query + 1) % 4,
            _ => of_query,
        };
        let skill = (taught / 1500.0).min(0.9);
        let policy = |m| (1.0 - skill) / 4.0 + if m == of_query { skill } else { 0.0 };
        let reward = |m: usize| match self.kind {
            Kind::Useless => 0.47 - 0.05 * m as f64,
            _ => 0.45 + if m == 0 { 0.02 } else { 0.0 } + if m == needed { 0.1 } else { 0.0 },
        };
        ((0..4).map(policy).collect(), (0..4).map(reward).collect())
    }
}

#[test]
fn the_cumulative_loss_stays_within_the_budget() {
    let (runs, count) = (sized(20, 200) as u64, sized(20_000, 60_000) as u64);
    for (delay, incumbent) in [(0, Some(0)), (300, Some(0)), (0, None)] {
        for kind in [Kind::Useless, Kind::Useful, Kind::Drifting] {
            let spec = rollout(4, incumbent, true);
            let game = || Kinds { kind, rounds: count };
            let all: Vec<Ledger> =
                (1001..=1000 + runs).map(|seed| play(&mut game(), &spec, count, delay, seed).0).collect();
            let free = quantile(all.iter().map(|run| 100.0 * (run.earned[1] / run.earned[2] - 1.0)), 0.5);
            let known = if incumbent.is_some() { "incumbent known" } else { "incumbent searched for" };
            let broken = report(&format!("{kind:?}, {known}, delay {delay}, policy alone {free:+.2}%"), &all);
            assert!(broken as f64 <= spec.alpha * runs as f64, "{kind:?}, {delay}: {broken} of {runs}");
            assert!(all.iter().all(|run| run.begun.is_some()), "{kind:?}, {delay}: no promise");
            if incumbent.is_some() {
                assert!(all.iter().all(|run| run.gain() >= -1.0), "{kind:?}, {delay}");
            }
        }
    }
}

/// Rewards by query and model, the domain of each query, and a policy that knows the domain and nothing else.
struct Domains {
    rewards: Vec<Vec<f64>>,
    domains: Vec<usize>,
    /// Per domain its distribution.
    policy: Vec<Vec<f64>>,
    best: usize,
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = values.collect();
    all.iter().sum::<f64>() / all.len() as f64
}

impl Domains {
    /// Real queries of ten domains where they are there, else ones with means by domain and model that differ by up to 0.2. The
    /// policy plays the best model of the domain, mixed with a uniform choice so that its lift is `lift` of the reward.
    fn new(lift: f64) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/many-domains");
        let (rewards, domains) = match fs::read(directory.join("routing.safetensors")) {
            Ok(bytes) => {
                let text = fs::read_to_string(directory.join("queries.tsv")).unwrap();
                let data = decode(&bytes, Some(&text)).unwrap();
                let mut domains = vec![0; data.len()];
                for (domain, queries) in data.categories().into_values().enumerate() {
                    queries.into_iter().for_each(|i| domains[i] = domain);
                }
                ((0..data.len()).map(|i| data.rewards(i).to_vec()).collect(), domains)
            }
            Err(_) => made_domains(),
        };
        let models = rewards[0].len();
        let number = 1 + domains.iter().max().unwrap();
        let value = |policy: &dyn Fn(usize, usize) -> f64, domain: Option<usize>| {
            let of = |i: &usize| domain.is_none_or(|domain| domains[*i] == domain);
            let earned = |i: usize| (0..models).map(|m| policy(domains[i], m) * rewards[i][m]).sum::<f64>();
            mean((0..domains.len()).filter(of).map(earned))
        };
        let alone = |m: usize, domain: Option<usize>| value(&|_, other| f64::from(u8::from(m == other)), domain);
        let best = |domain: Option<usize>| {
            (0..models).map(|m| (alone(m, domain), m)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
        };
        let experts: Vec<usize> = (0..number).map(|domain| best(Some(domain)).1).collect();
        let (best_value, best) = best(None);
        let expert = value(&|domain, m| f64::from(u8::from(experts[domain] == m)), None);
        let uniform = value(&|_, _| 1.0 / models as f64, None);
        let share = ((1.0 + lift) * best_value - uniform) / (expert - uniform);
        assert!((0.0..=1.0).contains(&share), "a lift of {lift} is out of reach");
        let play =
            |domain: usize, m: usize| (1.0 - share) / models as f64 + if experts[domain] == m { share } else { 0.0 };
        let policy = (0..number).map(|domain| (0..models).map(|m| play(domain, m)).collect()).collect();
        Self { rewards, domains, policy, best }
    }
}

impl Game for Domains {
    fn models(&self) -> usize {
        self.rewards[0].len()
    }

    fn next(&mut self, _: u64, _: f64, random: &mut ChaCha8Rng) -> (Vec<f64>, Vec<f64>) {
        let i = random.random_range(0..self.rewards.len());
        (self.policy[self.domains[i]].clone(), self.rewards[i].clone())
    }
}

/// Ten domains; three of the eight models are far behind.
fn made_domains() -> (Vec<Vec<f64>>, Vec<usize>) {
    let luck = |numbers: [u64; 3]| xxh3_64(&numbers.map(u64::to_le_bytes).concat()) as f64 / u64::MAX as f64;
    let reward = |i: u64, m: u64| {
        let level = 0.525 - if m < 3 { 0.05 } else { 0.0 };
        level + 0.1 * (luck([i % 10, m, 1]) - 0.5) + 0.8 * (luck([i, m, 2]) - 0.5)
    };
    let rewards = (0..2000).map(|i| (0..8).map(|m| reward(i, m)).collect()).collect();
    (rewards, (0..2000).map(|i| i % 10).collect())
}

/// As good as the incumbent and no better: the hardest case. A policy of ten domains that earns a little more.
#[test]
fn small_lifts_of_ten_domains() {
    let (runs, count) = (sized(4, 50) as u64, sized(20_000, 150_000) as u64);
    for lift in [0.0, 0.03] {
        let mut world = Domains::new(lift);
        let spec = rollout(world.models(), Some(world.best), true);
        let all: Vec<Ledger> = (1001..=1000 + runs).map(|seed| play(&mut world, &spec, count, 0, seed).0).collect();
        let broken = report(&format!("ten domains, lift {:.0}%", 100.0 * lift), &all);
        assert!(broken as f64 <= spec.alpha * runs as f64, "{lift}: {broken} of {runs}");
        if lift == 0.0 {
            let full = all.iter().filter(|run| run.full.is_some()).count();
            assert!(full as f64 <= spec.alpha * runs as f64, "{full} of {runs} were promoted without a lift");
        }
    }
}

fn log_quadratic(seed: u64) -> Box<dyn World> {
    let shape = Shape::PowerLaw;
    Box::new(LogQuadratic::new(LogQuadraticSpec { dim: 64, models: 8, intrinsic_rank: 2, signal: 0.3, shape, seed }))
}

fn world(kind: Kind, seed: u64) -> Box<dyn World> {
    match kind {
        Kind::Useless => Box::new(Shuffled::new(log_quadratic(seed), log_quadratic(seed + (1 << 32)))),
        Kind::Useful | Kind::Drifting => log_quadratic(seed),
    }
}

/// The model that is best alone, by the truth.
fn best_alone(world: &mut dyn World) -> usize {
    let mut sums = vec![0.0; world.models()];
    for _ in 0..4000 {
        let query = world.next_query();
        sums.iter_mut().zip(world.expected_rewards(&query)).for_each(|(sum, r)| *sum += r);
    }
    (0..sums.len()).max_by(|a, b| sums[*a].total_cmp(&sums[*b])).unwrap()
}

/// A learner from its first example on.
fn learn(kind: Kind, config: &LearnerConfig, incumbent: usize, count: u64, seed: u64) -> Ledger {
    let mut world = world(kind, seed);
    let mut trainer = Trainer::new(config.check().unwrap());
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(u64::MAX);
    let mut ledger = Ledger::new(config.guard_budget, 0);
    for round in 0..count {
        if kind == Kind::Drifting && round == count / 2 {
            world.switch();
        }
        let query = world.next_query();
        let rewards = world.expected_rewards(&query);
        let decision = trainer.decide(&query).unwrap();
        let value = |p: &[f64]| p.iter().zip(&rewards).map(|(p, r)| p * r).sum::<f64>();
        let (model, distribution) = (decision.model, decision.distribution);
        let (played, policy) = (value(&distribution.propensities), value(&distribution.policy));
        ledger.add(&trainer.rollout(), played, policy, rewards[incumbent]);
        let reward = f64::from(u8::from(random.random::<f64>() < rewards[model]));
        let (propensities, policy) = (distribution.propensities, Some(distribution.policy));
        trainer.learn(Example::new(query, model, propensities, policy, reward).unwrap()).unwrap();
    }
    ledger
}

#[test]
fn hpg_stays_within_the_budget() {
    learners_stay_within_the_budget(Algorithm::Hpg);
}

#[test]
fn hypentropy_regression_stays_within_the_budget() {
    learners_stay_within_the_budget(Algorithm::HypentropyRegression);
}

fn learners_stay_within_the_budget(algorithm: Algorithm) {
    let (seeds, count) = (sized(1, 4) as u64, sized(8_000, 40_000) as u64);
    for kind in [Kind::Useless, Kind::Useful, Kind::Drifting] {
        let mut gains = Vec::new();
        for (name, stage, budget) in
            [("full", Stage::Full, 0.01), ("canary", Stage::Canary, 0.01), ("canary", Stage::Canary, 0.05)]
        {
            let run = |seed: u64| {
                let incumbent = best_alone(&mut *world(kind, seed));
                let config = LearnerConfig {
                    dim: 64,
                    models: (0..8).map(|m| format!("model-{m}")).collect(),
                    algorithm,
                    stage,
                    promote: if stage == Stage::Canary { Promote::Automatic } else { Promote::Manual },
                    incumbent: Some(format!("model-{incumbent}")),
                    guard_budget: budget,
                    ..LearnerConfig::default()
                };
                learn(kind, &config, incumbent, count, seed)
            };
            let all: Vec<Ledger> = (1001..=1000 + seeds).map(run).collect();
            let broken = report(&format!("{algorithm}, {kind:?}, {name}, budget {budget}"), &all);
            if stage == Stage::Canary {
                assert_eq!(broken, 0, "{algorithm}, {kind:?}");
            }
            gains.push(mean(all.iter().map(Ledger::gain)));
        }
        assert!(gains[1] >= -1.0 && gains[2] >= -5.0, "{algorithm}, {kind:?}: {gains:?}");
    }
}
