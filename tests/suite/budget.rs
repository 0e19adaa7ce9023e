//! Budgets: is one held, and what does it cost in quality? Whole runs in simulated worlds where models have prices.

use pointsman::config::{Algorithm, LearnerConfig, ObjectiveConfig, OutcomeConfig};
use pointsman::learner::Trainer;
use pointsman::simulate::World;
use pointsman::simulate::history::History;
use pointsman::simulate::ledger::Ledger;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::priced::{PriceSpec, Priced};
use pointsman::simulate::queries::Shape;
use pointsman::simulate::run::{COST, InProcess, Plan, run};

use crate::size::sized;

pub const MODELS: usize = 8;

/// A world without prices.
pub fn plain(dim: usize, seed: u64) -> Box<dyn World> {
    let spec = LogQuadraticSpec { dim, models: MODELS, intrinsic_rank: 2, signal: 0.3, shape: Shape::PowerLaw, seed };
    Box::new(LogQuadratic::new(spec))
}

pub fn learner(dim: usize, algorithm: Algorithm) -> LearnerConfig {
    let models = (1..=MODELS).map(|m| format!("model-{m}")).collect();
    LearnerConfig { dim, models, algorithm, ..LearnerConfig::default() }
}

/// A run with a budget.
#[derive(Clone, Copy)]
struct Case {
    dim: usize,
    algorithm: Algorithm,
    rounds: u64,
    budget: f64,
    noise: f64,
    delay: u64,
    refresh: u64,
    costs_late: bool,
}

const AT_ONCE: Case = Case {
    dim: 32,
    algorithm: Algorithm::Hpg,
    rounds: 30_000,
    budget: 0.6,
    noise: 0.0,
    delay: 0,
    refresh: 1,
    costs_late: false,
};

impl Case {
    fn run(&self, seed: u64) -> Ledger {
        let Case { dim, rounds, delay, refresh, noise, .. } = *self;
        let mut world = Priced::new(plain(dim, seed), PriceSpec { noise, reprice_at: Some(rounds / 2), seed });
        // A price list that nobody updates.
        let prices = world.costs().unwrap().expected;
        let listed = (1..).zip(prices).map(|(m, price)| (format!("model-{m}"), *price)).collect();
        let cost = OutcomeConfig {
            range: Some([0.0, 1000.0]),
            budget: Some(self.budget),
            models: listed,
            ..OutcomeConfig::default()
        };
        let objective = ObjectiveConfig { floor: None, outcomes: [(COST.to_owned(), cost)].into() };
        let spec = learner(dim, self.algorithm).check().unwrap();
        let mut trainer = Trainer::new(spec.with_objective(&objective.check().unwrap()).unwrap());
        let plan = Plan { rounds, delay, refresh, lost: 0.0, switch_at: None, seed };
        let mut history = History::new(rounds, 2);
        let stack = InProcess::new(&mut trainer, refresh);
        let mut stack = if self.costs_late { stack.with_late_costs() } else { stack };
        run(&mut world, &mut stack, &plan, &mut history, |_| ()).unwrap();
        history.ledger().clone()
    }
}

/// Runs of several seeds at once.
pub fn in_parallel<T: Send>(seeds: std::ops::Range<u64>, run: impl Fn(u64) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = seeds
            .map(|seed| {
                scope.spawn({
                    let run = &run;
                    move || run(seed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Requests after which the budget must hold, and over which.
const BEGIN: usize = 5000;
const WINDOW: usize = 10_000;

/// The seeds are not those that the controller was tuned on, 1 to 4.
///
/// Where costs are known at once, a window is violated by no more than 1%. Where prices change and nobody knows of it for 200 requests,
/// these are charged wrong, and no controller can help it: 4%.
#[test]
fn a_budget_is_held_and_costs_little_quality() {
    let (seeds, dim, rounds) = (sized(2, 10) as u64, sized(32, 64), sized(30_000, 100_000) as u64);
    let at_once = Case { dim, algorithm: Algorithm::Hpg, rounds, ..AT_ONCE };
    let refreshed = Case { refresh: 50, noise: 0.5, ..at_once };
    let late = Case { refresh: 20, delay: 200, noise: 0.5, costs_late: true, ..at_once };
    for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
        for (name, case, violation_max) in
            [("at once", at_once, 0.01), ("refresh 50, noise", refreshed, 0.015), ("late by 200, noise", late, 0.04)]
        {
            let case = Case { algorithm, ..case };
            let runs = in_parallel(101..101 + seeds, |seed| {
                let ledger = case.run(seed);
                let n = ledger.rounds();
                let quality =
                    |begin: usize| ledger.played(begin..n).quality / ledger.best_fixed(begin..n, case.budget).quality;
                let violation = ledger.worst_violation(case.budget, BEGIN, WINDOW);
                [violation, quality(0), quality(BEGIN), quality(n - n / 5)].map(|x| 100.0 * x)
            });
            let worst = runs.iter().map(|run| run[0]).fold(0.0, f64::max);
            let [whole, settled, last] =
                [1, 2, 3].map(|i| runs.iter().map(|run| run[i]).sum::<f64>() / runs.len() as f64);
            let all: Vec<String> = runs.iter().map(|run| format!("{:.2}", run[0])).collect();
            println!(
                "{algorithm}, {name}, {seeds} seeds of {rounds}: worst violation {worst:.2}% ({}); quality {whole:.1}% of the best fixed \
                 policy, {settled:.1}% after the first {BEGIN}, {last:.1}% in the last fifth",
                all.join(" ")
            );
            assert!(worst <= 100.0 * violation_max, "{algorithm}, {name}: {worst}");
            assert!(
                settled >= sized(92, 94) as f64 && last >= sized(94, 95) as f64,
                "{algorithm}, {name}: {settled} {last}"
            );
        }
    }
}
