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

const MODELS: usize = 8;

fn plain(dim: usize, seed: u64) -> Box<dyn World> {
    let spec = LogQuadraticSpec { dim, models: MODELS, intrinsic_rank: 2, signal: 0.3, shape: Shape::PowerLaw, seed };
    Box::new(LogQuadratic::new(spec))
}

fn learner(dim: usize, algorithm: Algorithm) -> LearnerConfig {
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

impl Case {
    fn run(&self, seed: u64) -> Ledger {
        let Case { dim, rounds, delay, refresh, noise, .. } = *self;
        let mut world = Priced::new(plain(dim, seed), PriceSpec { noise, reprice_at: Some(rounds / 2), seed });
        let cost = OutcomeConfig { range: Some([0.0, 1000.0]), budget: Some(self.budget), ..OutcomeConfig::default() };
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

/// What a run came to.
struct Figures {
    /// Largest violation of the budget over any 10,000 successive requests after the first 5,000.
    violation: f64,
    /// Quality relative to the best fixed policy of each half, in which prices are constant: over all rounds, and after the
    /// first 5,000.
    quality: f64,
    settled: f64,
}

/// Requests after which the budget must hold, and over which.
const BEGIN: usize = 5000;
const WINDOW: usize = 10_000;

fn figures(ledger: &Ledger, budget: f64) -> Figures {
    let rounds = ledger.rounds();
    let relative = |begin: usize| {
        let halves = [begin..rounds / 2, rounds / 2..rounds];
        let possible: f64 = halves.map(|half| half.len() as f64 * ledger.best_fixed(half, budget).quality).iter().sum();
        ledger.played(begin..rounds).quality * (rounds - begin) as f64 / possible
    };
    Figures { violation: ledger.worst_violation(budget, BEGIN, WINDOW), quality: relative(0), settled: relative(BEGIN) }
}

#[test]
fn a_budget_is_held_and_costs_little_quality() {
    let (seeds, dim, rounds) = (sized(2, 10) as u64, sized(32, 64), sized(30_000, 100_000) as u64);
    let base = Case {
        dim,
        algorithm: Algorithm::Hpg,
        rounds,
        budget: 0.6,
        noise: 0.0,
        delay: 0,
        refresh: 1,
        costs_late: false,
    };
    let first: u64 = std::env::var("FIRST").map_or(101, |x| x.parse().unwrap());
    for algorithm in [Algorithm::Hpg, Algorithm::HypentropyRegression] {
        for (name, case) in [
            ("at once", Case { algorithm, ..base }),
            ("0.3", Case { algorithm, budget: 0.3, ..base }),
            ("1.5", Case { algorithm, budget: 1.5, ..base }),
            ("late, noisy", Case { algorithm, noise: 0.5, delay: 200, refresh: 200, costs_late: true, ..base }),
        ] {
            let ledgers: Vec<Ledger> = std::thread::scope(|scope| {
                let threads: Vec<_> = (first..first + seeds).map(|seed| scope.spawn(move || case.run(seed))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for ledger in &ledgers {
                let Figures { violation, quality, settled } = figures(ledger, case.budget);
                let n = ledger.rounds();
                let (a, b) = (ledger.played(BEGIN..n / 2), ledger.played(n / 2..n));
                let free = ledger.best_fixed(0..n / 2, 1e9);
                let fixed = ledger.best_fixed(BEGIN..n / 2, case.budget);
                let fixed2 = ledger.best_fixed(n / 2..n, case.budget);
                println!(
                    "{algorithm}, {name}: worst {:.2}% quality {:.1}% after {BEGIN} {:.1}%  {:.3}@{:.3} of {:.3} | {:.3}@{:.3} of {:.3} free {:.3}@{:.3}",
                    100.0 * violation,
                    100.0 * quality,
                    100.0 * settled,
                    a.quality,
                    a.cost,
                    fixed.quality,
                    b.quality,
                    b.cost,
                    fixed2.quality,
                    free.quality,
                    free.cost
                );
            }
        }
    }
}
