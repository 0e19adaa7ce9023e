//! What happened in a simulated run, measured against the truth.
//!
//! Rewards are expected ones, under the distribution that was played: the noise of the draw and of the reward is
//! averaged out. The gap is what lies between always playing the model that is best on the whole and always playing
//! the one that is best for the query.

use super::ledger::Ledger;
use super::{Costs, Occurrence};
use crate::learner::Decision;
use crate::router::Sampling;

/// Sums over a stretch of rounds.
#[derive(Debug, Clone, Default)]
struct Sums {
    rounds: u64,
    policy: f64,
    oracle: f64,
    constants: Vec<f64>,
    traffic: Vec<f64>,
    regret: f64,
    linearized_regret: f64,
}

impl Sums {
    fn new(models: usize) -> Self {
        Self { constants: vec![0.0; models], traffic: vec![0.0; models], ..Self::default() }
    }

    /// Adds the rewards of a round; returns the mean of the policy.
    fn add(&mut self, expected: &[f64], decision: &Decision) -> f64 {
        let played = &decision.distribution.propensities;
        let mean: f64 = played.iter().zip(expected).map(|(p, r)| p * r).sum();
        self.rounds += 1;
        self.policy += mean;
        let eligible = &decision.distribution.eligible;
        let may = || expected.iter().enumerate().filter(|(m, _)| eligible.allows(*m)).map(|(_, r)| *r);
        self.oracle += may().fold(0.0_f64, f64::max);
        // Where a model may not answer, always playing it is a uniform choice.
        let instead = if eligible.is_all() { 0.0 } else { may().sum::<f64>() / may().count() as f64 };
        let alone = |m: usize, r: f64| if eligible.allows(m) { r } else { instead };
        self.constants.iter_mut().zip(expected).enumerate().for_each(|(m, (sum, r))| *sum += alone(m, *r));
        self.traffic[decision.model] += 1.0;
        mean
    }

    fn joined(&self, other: &Self) -> Self {
        let add = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect();
        Self {
            rounds: self.rounds + other.rounds,
            policy: self.policy + other.policy,
            oracle: self.oracle + other.oracle,
            constants: add(&self.constants, &other.constants),
            traffic: add(&self.traffic, &other.traffic),
            regret: self.regret + other.regret,
            linearized_regret: self.linearized_regret + other.linearized_regret,
        }
    }
}

/// A run, in bins of equal length.
#[derive(Debug, Clone)]
pub struct History {
    bin_rounds: u64,
    bins_max: usize,
    bins: Vec<Sums>,
    /// Over the whole run, of the worlds that keep track: first occurrences, synthetic queries, repeats.
    occurrences: [Sums; 3],
    /// Of the worlds where models cost something.
    ledger: Ledger,
}

/// What was earned on queries that had not come before, and on those that had.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occurrences {
    /// Rounds with a query that had not come before, synthetic ones included.
    pub first_rounds: u64,
    /// Rounds with a synthetic query.
    pub synthetic_rounds: u64,
    /// Rounds with a query that had come before.
    pub repeat_rounds: u64,
    /// What was earned on the first two kinds.
    pub first: Summary,
    /// What was earned on repeats.
    pub repeats: Summary,
}

/// A point of the curves.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Rounds until the end of the bin.
    pub round: u64,
    /// Mean expected rewards within the bin: of the policy, of the best constant model, of uniform, of the oracle.
    pub policy: f64,
    /// See `policy`.
    pub best_constant: f64,
    /// See `policy`.
    pub uniform: f64,
    /// See `policy`.
    pub oracle: f64,
    /// Sum, until the end of the bin, of what pi_W* earns more.
    pub regret: f64,
    /// Sum, until the end of the bin, of <grad L_t(W_t), W_t - W*>.
    pub linearized_regret: f64,
    /// Share of each model in the bin's traffic.
    pub traffic: Vec<f64>,
}

/// A stretch of rounds in figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Mean expected reward of the policy.
    pub policy: f64,
    /// That of the model which is best on the whole run.
    pub best_constant: f64,
    /// That of the mean over models.
    pub uniform: f64,
    /// That of the best model for each query.
    pub oracle: f64,
}

impl Summary {
    /// Share of the gap between best constant and oracle that a mean reward closes.
    pub fn gap_closed(&self, reward: f64) -> f64 {
        let gap = self.oracle - self.best_constant;
        if gap > 0.0 { (reward - self.best_constant) / gap } else { 0.0 }
    }
}

impl History {
    /// For `rounds` rounds in at most `bins` bins.
    pub fn new(rounds: u64, bins: u64) -> Self {
        Self { bin_rounds: rounds.div_ceil(bins.max(1)).max(1), bins_max: usize::MAX, ..Self::unbounded(2) }
    }

    /// For a run whose length nobody knows, in at most `bins` bins: when there are more, two become one.
    pub fn unbounded(bins: usize) -> Self {
        Self {
            bin_rounds: 1,
            bins_max: bins.max(2),
            bins: Vec::new(),
            occurrences: Default::default(),
            ledger: Ledger::default(),
        }
    }

    /// Adds a round: expected rewards, scores of the policy that regret is measured against, and the decision.
    pub fn add(&mut self, expected: &[f64], best_scores: &[f64], decision: &Decision) {
        let full = |bin: &Sums| bin.rounds == self.bin_rounds;
        if self.bins.len() == self.bins_max && self.bins.last().is_some_and(full) {
            self.coarsen();
        }
        if self.bins.last().is_none_or(|bin| bin.rounds == self.bin_rounds) {
            self.bins.push(Sums::new(expected.len()));
        }
        let Some(bin) = self.bins.last_mut() else { return };
        let mean = bin.add(expected, decision);
        let mut best = best_scores.to_vec();
        Sampling::Softmax.turn_among(&mut best, &decision.distribution.eligible);
        bin.regret += best.iter().zip(expected).map(|(p, r)| p * r).sum::<f64>() - mean;
        // <grad L, W - W*> = sum_m pi_m (r_m - mean) log(pi*_m / pi_m), the paper's Proposition on both regrets.
        let policy = &decision.distribution.policy;
        let own_mean: f64 = policy.iter().zip(expected).map(|(p, r)| p * r).sum();
        // What is never played adds nothing, in the limit.
        let terms = policy.iter().zip(&best).zip(expected).filter(|((p, _), _)| **p > 0.0);
        let terms = terms.map(|((p, b), r)| p * (r - own_mean) * (b / p).ln());
        bin.linearized_regret += terms.sum::<f64>();
    }

    /// Adds a round, already added as such, to those of its kind.
    pub fn add_occurrence(&mut self, occurrence: Occurrence, expected: &[f64], decision: &Decision) {
        let kind = match occurrence {
            Occurrence::First => 0,
            Occurrence::Synthetic => 1,
            Occurrence::Repeat => 2,
        };
        let models = expected.len();
        self.occurrences.iter_mut().filter(|sums| sums.constants.is_empty()).for_each(|sums| *sums = Sums::new(models));
        self.occurrences[kind].add(expected, decision);
    }

    /// Adds what models cost in a round, already added as such.
    pub fn add_costs(&mut self, costs: Costs, expected: &[f64], decision: &Decision) {
        self.ledger.add(expected, costs.expected, decision, costs.drawn[decision.model]);
    }

    /// Quality and cost of all rounds; without rounds if models cost nothing.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What was earned on queries that had not come before, and on those that had; none if the world did not keep track.
    pub fn occurrences(&self) -> Option<Occurrences> {
        let [first, synthetic, repeats] = &self.occurrences;
        let best = self.best_constant();
        let summary = |sums: &[&Sums]| summary_of(sums.iter().copied(), best);
        let is_known = self.occurrences.iter().any(|sums| sums.rounds > 0);
        is_known.then(|| Occurrences {
            first_rounds: first.rounds + synthetic.rounds,
            synthetic_rounds: synthetic.rounds,
            repeat_rounds: repeats.rounds,
            first: summary(&[first, synthetic]),
            repeats: summary(&[repeats]),
        })
    }

    /// Makes one bin of every two.
    fn coarsen(&mut self) {
        let pairs = self.bins.chunks(2).map(|pair| match pair {
            [first, second] => first.joined(second),
            rest => rest.first().cloned().unwrap_or_default(),
        });
        self.bins = pairs.collect();
        self.bin_rounds *= 2;
    }

    /// Rounds so far.
    pub fn rounds(&self) -> u64 {
        self.bins.iter().map(|bin| bin.rounds).sum()
    }

    /// Mean expected reward so far.
    pub fn mean_reward(&self) -> f64 {
        self.bins.iter().map(|bin| bin.policy).sum::<f64>() / self.rounds().max(1) as f64
    }

    /// Index of the model that is best on the whole run.
    pub fn best_constant(&self) -> usize {
        let sum = |m: usize| self.bins.iter().map(|bin| bin.constants[m]).sum::<f64>();
        let models = self.bins.first().map_or(0, |bin| bin.constants.len());
        (0..models).fold(0, |best, m| if sum(m) > sum(best) { m } else { best })
    }

    /// The last `share` of the run (1 is all of it), in figures.
    pub fn summary(&self, share: f64) -> Summary {
        self.summary_against(share, self.best_constant())
    }

    /// The same, with this model for the best constant one.
    pub fn summary_against(&self, share: f64, model: usize) -> Summary {
        let skip = ((1.0 - share) * self.bins.len() as f64).round() as usize;
        summary_of(self.bins[skip.min(self.bins.len())..].iter(), model)
    }

    /// The curves, a point a bin.
    pub fn points(&self) -> Vec<Point> {
        let best = self.best_constant();
        let (mut round, mut regret, mut linearized_regret) = (0, 0.0, 0.0);
        let mut point = |bin: &Sums| {
            let rounds = bin.rounds.max(1) as f64;
            round += bin.rounds;
            regret += bin.regret;
            linearized_regret += bin.linearized_regret;
            Point {
                round,
                policy: bin.policy / rounds,
                best_constant: bin.constants[best] / rounds,
                uniform: average(&bin.constants) / rounds,
                oracle: bin.oracle / rounds,
                regret,
                linearized_regret,
                traffic: bin.traffic.iter().map(|n| n / rounds).collect(),
            }
        };
        self.bins.iter().map(&mut point).collect()
    }
}

/// Sums in figures, with this model for the best constant one.
fn summary_of<'a>(sums: impl Iterator<Item = &'a Sums> + Clone, model: usize) -> Summary {
    let rounds = sums.clone().map(|sums| sums.rounds).sum::<u64>().max(1) as f64;
    let mean = |of: &dyn Fn(&Sums) -> f64| sums.clone().map(of).sum::<f64>() / rounds;
    Summary {
        policy: mean(&|sums| sums.policy),
        best_constant: mean(&|sums| sums.constants.get(model).copied().unwrap_or_default()),
        uniform: mean(&|sums| average(&sums.constants)),
        oracle: mean(&|sums| sums.oracle),
    }
}

fn average(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::{Distribution, uniform};

    /// Two models, model 0 best on even rounds, model 1 on odd ones; the policy knows.
    #[test]
    fn figures_of_a_run_known_in_full() {
        let mut history = History::new(100, 10);
        for t in 0..100 {
            let expected = if t % 2 == 0 { [1.0, 0.0] } else { [0.5, 1.0] };
            let policy = if t < 50 { uniform(2) } else { vec![f64::from(1 - t % 2), f64::from(t % 2)] };
            let decision =
                Decision { model: t as usize % 2, distribution: Distribution::mix(policy, 0.0, &uniform(2)) };
            history.add(&expected, &[0.0, 0.0], &decision);
        }
        let all = history.summary(1.0);
        assert_eq!(history.best_constant(), 0);
        assert_eq!((all.best_constant, all.oracle, all.uniform), (0.75, 1.0, 0.625));
        assert_eq!(all.policy, 0.5 * 0.625 + 0.5);
        assert_eq!(all.gap_closed(0.875), 0.5);
        assert_eq!(history.summary(0.1).policy, 1.0);
        let points = history.points();
        assert_eq!((points.len(), points[9].round), (10, 100));
        assert_eq!(points[0].traffic, [0.5, 0.5]);
        // Against the uniform policy of W* = 0: nothing lost in the first half, 0.375 a round won in the second.
        assert!((points[4].regret).abs() < 1e-12 && (points[9].regret + 50.0 * 0.375).abs() < 1e-12);
        assert!(points[4].linearized_regret.abs() < 1e-12);
    }

    /// The reference of both kinds is the model that is best on the whole run.
    #[test]
    fn first_occurrences_and_repeats_apart() {
        let mut history = History::new(100, 10);
        assert_eq!(history.occurrences(), None);
        for t in 0..100 {
            let (occurrence, expected) = match t % 10 {
                0 => (Occurrence::First, [0.0, 1.0]),
                1 | 2 => (Occurrence::Synthetic, [0.25, 1.0]),
                _ => (Occurrence::Repeat, [1.0, 0.0]),
            };
            let decision = Decision { model: 0, distribution: Distribution::mix(vec![0.75, 0.25], 0.0, &uniform(2)) };
            history.add(&expected, &[0.0, 0.0], &decision);
            history.add_occurrence(occurrence, &expected, &decision);
        }
        let found = history.occurrences().unwrap();
        assert_eq!((found.first_rounds, found.synthetic_rounds, found.repeat_rounds), (30, 20, 70));
        assert_eq!((found.repeats.policy, found.repeats.best_constant, found.repeats.oracle), (0.75, 1.0, 1.0));
        assert!((found.first.best_constant - 5.0 / 30.0).abs() < 1e-12 && found.first.oracle == 1.0, "{found:?}");
        assert!((found.first.policy - (2.5 + 20.0 * 0.4375) / 30.0).abs() < 1e-12);
        let all = (30.0 * found.first.policy + 70.0 * found.repeats.policy) / 100.0;
        assert!((all - history.summary(1.0).policy).abs() < 1e-12);
    }

    #[test]
    fn a_run_without_end_keeps_a_bounded_number_of_bins() {
        let (mut open, mut known) = (History::unbounded(20), History::new(1000, 1000));
        for t in 0..1000 {
            let expected = if t < 900 { [0.5, 0.25] } else { [0.0, 1.0] };
            let decision = Decision { model: 1, distribution: Distribution::mix(uniform(2), 0.0, &uniform(2)) };
            open.add(&expected, &[0.0, 0.0], &decision);
            known.add(&expected, &[0.0, 0.0], &decision);
            assert!(open.bins.len() <= 20 && open.rounds() == t + 1);
        }
        assert_eq!(open.summary(1.0), known.summary(1.0));
        assert!((open.summary(0.1).oracle - known.summary(0.1).oracle).abs() < 0.3);
        assert_eq!(open.summary_against(1.0, 1).best_constant, 0.325);
    }
}
