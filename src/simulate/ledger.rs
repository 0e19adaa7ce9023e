//! Quality and cost of a simulated run: what was played, what single models would have given, and what was possible.
//!
//! ```text
//! best fixed policy of a budget b:   max mean_t r_t,m(t)   subject to   mean_t c_t,m(t) <= b
//! its Lagrangian:                    m(t) = argmax_m r_t,m - lambda c_t,m        the least lambda >= 0 that keeps b
//! ```
//!
//! Rewards are expected ones. The policy knows them, and mixes the two policies between which the budget is met. Where prices
//! change, there is one lambda for each stretch of constant prices: the budget is kept in each of them.

use std::ops::Range;

use crate::learner::Decision;

/// A policy by what it costs and what it earns, on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Mean cost of a request.
    pub cost: f64,
    /// Mean expected reward of a request.
    pub quality: f64,
}

/// All rounds of a run.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    models: usize,
    /// Expected reward and cost of each model in each round; minus infinity and 0 if it could not answer.
    options: Vec<Point>,
    /// What was played: expected reward over the distribution, and the expected cost.
    played: Vec<Point>,
    /// What was spent until the beginning of each round, and in all.
    spent: Vec<f64>,
    /// The costs of all models at present, and the rounds before which they changed.
    costs: Vec<f64>,
    changes: Vec<usize>,
}

/// Bisections of lambda.
const BISECTIONS: usize = 50;

impl Ledger {
    /// Adds a round: the expected rewards and costs of all models, the decision, and what it cost.
    pub fn add(&mut self, rewards: &[f64], costs: &[f64], decision: &Decision, spent: f64) {
        self.models = rewards.len();
        if self.costs != costs {
            self.costs = costs.to_vec();
            self.changes.push(self.rounds());
        }
        let eligible = &decision.distribution.eligible;
        let option = |(m, (&quality, &cost)): (usize, (&f64, &f64))| match eligible.allows(m) {
            true => Point { cost, quality },
            false => Point { cost: 0.0, quality: f64::NEG_INFINITY },
        };
        self.options.extend(rewards.iter().zip(costs).enumerate().map(option));
        let played = &decision.distribution.propensities;
        let mean = |x: &[f64]| played.iter().zip(x).map(|(p, x)| p * x).sum();
        self.played.push(Point { cost: mean(costs), quality: mean(rewards) });
        let before = self.spent.last().copied().unwrap_or_default();
        if self.spent.is_empty() {
            self.spent.push(0.0);
        }
        self.spent.push(before + spent);
    }

    /// Number of rounds.
    pub fn rounds(&self) -> usize {
        self.played.len()
    }

    /// What was played in some rounds: mean expected reward, and mean of what was spent.
    pub fn played(&self, rounds: Range<usize>) -> Point {
        let n = rounds.len().max(1) as f64;
        let quality = self.played[rounds.clone()].iter().map(|point| point.quality).sum::<f64>() / n;
        Point { cost: (self.spent[rounds.end] - self.spent[rounds.start]) / n, quality }
    }

    /// How far spending was above a budget at most, and how far below, relative to it, over any `length` successive rounds from
    /// `begin` on.
    pub fn worst_windows(&self, budget: f64, begin: usize, length: usize) -> [f64; 2] {
        let windows = begin..(self.rounds() + 1).saturating_sub(length);
        let mean = |at: usize| (self.spent[at + length] - self.spent[at]) / length as f64 / budget - 1.0;
        windows.map(mean).fold([0.0, 0.0], |[over, under], x| [f64::max(over, x), f64::max(under, -x)])
    }

    /// The larger of the two.
    pub fn worst_violation(&self, budget: f64, begin: usize, length: usize) -> f64 {
        let [over, under] = self.worst_windows(budget, begin, length);
        over.max(under)
    }

    /// Always one model, where it could answer.
    pub fn alone(&self, rounds: Range<usize>, model: usize) -> Point {
        let could = |point: &&Point| point.quality.is_finite();
        mean(self.of(rounds).map(|options| &options[model]).filter(could).copied())
    }

    /// All models alike.
    pub fn uniform(&self, rounds: Range<usize>) -> Point {
        mean(self.of(rounds).flatten().filter(|point| point.quality.is_finite()).copied())
    }

    /// The best fixed policy that keeps a budget while prices are constant.
    pub fn best_fixed(&self, rounds: Range<usize>, budget: f64) -> Point {
        let ends = self.changes.iter().skip(1).copied().chain([self.rounds()]);
        let stretches =
            self.changes.iter().zip(ends).map(|(begin, end)| (*begin).max(rounds.start)..end.min(rounds.end));
        let (mut sum, n) = (Point { cost: 0.0, quality: 0.0 }, rounds.len().max(1) as f64);
        for stretch in stretches.filter(|stretch| !stretch.is_empty()) {
            let share = stretch.len() as f64 / n;
            let Point { cost, quality } = self.best_at_constant_prices(stretch, budget);
            sum = Point { cost: sum.cost + share * cost, quality: sum.quality + share * quality };
        }
        sum
    }

    fn best_at_constant_prices(&self, rounds: Range<usize>, budget: f64) -> Point {
        let (mut low, mut high) = (0.0, 1.0);
        let mut over = self.at(rounds.clone(), low);
        if over.cost <= budget {
            return over;
        }
        let mut within = self.at(rounds.clone(), high);
        // Some budgets are below what the cheapest models cost.
        while within.cost > budget && high < 1e9 {
            high *= 4.0;
            within = self.at(rounds.clone(), high);
        }
        for _ in 0..BISECTIONS {
            let middle = 0.5 * (low + high);
            let point = self.at(rounds.clone(), middle);
            if point.cost > budget { (low, over) = (middle, point) } else { (high, within) = (middle, point) }
        }
        let share = if over.cost > within.cost { (budget - within.cost) / (over.cost - within.cost) } else { 0.0 };
        let mix = |a: f64, b: f64| b + share.clamp(0.0, 1.0) * (a - b);
        Point { cost: mix(over.cost, within.cost), quality: mix(over.quality, within.quality) }
    }

    /// The best fixed policy where a unit of cost is worth `lambda`.
    fn at(&self, rounds: Range<usize>, lambda: f64) -> Point {
        let utility = |point: &Point| point.quality - lambda * point.cost;
        let better = |a: Point, b: &Point| if utility(b) > utility(&a) { *b } else { a };
        mean(self.of(rounds).map(|options| options[1..].iter().fold(options[0], better)))
    }

    fn of(&self, rounds: Range<usize>) -> impl Iterator<Item = &[Point]> {
        self.options[rounds.start * self.models..rounds.end * self.models].chunks_exact(self.models)
    }
}

fn mean(points: impl Iterator<Item = Point>) -> Point {
    let (mut sum, mut n) = (Point { cost: 0.0, quality: 0.0 }, 0.0_f64);
    points.for_each(|point| (sum.cost, sum.quality, n) = (sum.cost + point.cost, sum.quality + point.quality, n + 1.0));
    Point { cost: sum.cost / n.max(1.0), quality: sum.quality / n.max(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eligible::Eligible;
    use crate::router::{Distribution, uniform};

    /// On even rounds the dear model earns much more, on odd ones a little.
    #[test]
    fn the_best_fixed_policy_spends_where_it_earns_most() {
        let mut ledger = Ledger::default();
        for t in 0..1000 {
            let rewards = [0.2, if t % 2 == 0 { 0.9 } else { 0.4 }];
            let distribution = Distribution::mix(vec![0.5, 0.5], 0.0, &uniform(2));
            ledger.add(&rewards, &[0.0, 1.0], &Decision { model: t % 2, distribution }, (t % 2) as f64);
        }
        for (budget, cost, quality) in [(2.0, 1.0, 0.65), (0.5, 0.5, 0.55), (0.25, 0.25, 0.375), (0.75, 0.75, 0.6)] {
            let best = ledger.best_fixed(0..1000, budget);
            assert!((best.cost - cost).abs() < 1e-9 && (best.quality - quality).abs() < 1e-9, "{budget}: {best:?}");
        }
        assert!((ledger.alone(0..1000, 1).quality - 0.65).abs() < 1e-9);
        let (played, uniform) = (ledger.played(0..1000), ledger.uniform(0..1000));
        assert!((played.quality - 0.425).abs() < 1e-9 && (uniform.quality - 0.425).abs() < 1e-9);
        assert_eq!((played.cost, uniform.cost), (0.5, 0.5));
        assert_eq!(ledger.worst_violation(0.5, 0, 10), 0.0);
        assert!((ledger.worst_violation(0.4, 0, 10) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn the_best_fixed_policy_is_among_the_eligible_models() {
        let mut ledger = Ledger::default();
        let eligible = Eligible::only(vec![true, false]).unwrap();
        let distribution = Distribution::mix_among(vec![1.0, 0.0], 0.0, &uniform(2), eligible);
        ledger.add(&[0.2, 0.9], &[1.0, 0.1], &Decision { model: 0, distribution }, 1.0);
        assert_eq!(ledger.best_fixed(0..1, 5.0), Point { cost: 1.0, quality: 0.2 });
        assert_eq!(ledger.uniform(0..1), Point { cost: 1.0, quality: 0.2 });
    }
}
