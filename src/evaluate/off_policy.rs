//! The value of a policy on events that another one chose.
//!
//! ```text
//! w = pi(m) / p(m)        value = sum w r / sum w        deviation^2 = sum w^2 (r - value)^2 / (sum w)^2
//! effective examples = (sum w)^2 / sum w^2
//! ```
//!
//! Self-normalised importance sampling: r is the reward of the model m that was drawn from p.

use std::ops::AddAssign;

use crate::wire::records::learner::value::WeightsRecord;

/// What a policy would have earned, so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OffPolicy {
    weight: f64,
    reward: f64,
    square: f64,
    square_reward: f64,
    square_reward_square: f64,
}

impl OffPolicy {
    /// Adds an event: how much likelier the policy makes what was chosen, and what that earned.
    pub fn add(&mut self, weight: f64, reward: f64) {
        self.weight += weight;
        self.reward += weight * reward;
        self.square += weight * weight;
        self.square_reward += weight * weight * reward;
        self.square_reward_square += weight * weight * reward * reward;
    }

    /// Sum of w r.
    pub fn weighted_reward(&self) -> f64 {
        self.reward
    }

    /// Mean reward of the policy.
    pub fn value(&self) -> f64 {
        if self.weight > 0.0 { self.reward / self.weight } else { 0.0 }
    }

    /// Standard deviation of that.
    pub fn deviation(&self) -> f64 {
        let v = self.value();
        let sum = self.square_reward_square - 2.0 * v * self.square_reward + v * v * self.square;
        if self.weight > 0.0 { sum.max(0.0).sqrt() / self.weight } else { f64::INFINITY }
    }

    /// How many examples of its own it is worth.
    pub fn effective(&self) -> f64 {
        if self.square > 0.0 { self.weight * self.weight / self.square } else { 0.0 }
    }

    /// The record of its state.
    pub fn record(&self) -> WeightsRecord {
        let Self { weight, reward, square, square_reward, square_reward_square } = *self;
        WeightsRecord { weight, reward, square, square_reward, square_reward_square }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &WeightsRecord) -> Option<Self> {
        let &WeightsRecord { weight, reward, square, square_reward, square_reward_square } = record;
        Some(Self { weight, reward, square, square_reward, square_reward_square }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        let Self { weight, reward, square, square_reward, square_reward_square } = *self;
        [weight, reward, square, square_reward, square_reward_square].iter().all(|x| *x >= 0.0 && x.is_finite())
    }
}

impl AddAssign for OffPolicy {
    fn add_assign(&mut self, other: Self) {
        self.weight += other.weight;
        self.reward += other.reward;
        self.square += other.square;
        self.square_reward += other.square_reward;
        self.square_reward_square += other.square_reward_square;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Logged by one policy, judged for another: the truth is within three deviations, and deviations are honest.
    #[test]
    fn estimates_another_policy() {
        let (logged, other, rewards) = ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.8]);
        let truth: f64 = other.iter().zip(&rewards).map(|(p, r)| p * r).sum();
        let mut generator = ChaCha8Rng::seed_from_u64(1);
        let mut distances = Vec::new();
        for _ in 0..200 {
            let mut estimate = OffPolicy::default();
            for _ in 0..500 {
                let (u, luck): (f64, f64) = generator.random();
                let m = if u < 0.7 {
                    0
                } else if u < 0.9 {
                    1
                } else {
                    2
                };
                estimate.add(other[m] / logged[m], f64::from(u8::from(luck < rewards[m])));
            }
            assert!(estimate.effective() < 500.0 && estimate.effective() > 50.0);
            distances.push((estimate.value() - truth) / estimate.deviation());
        }
        let within = |z: f64| distances.iter().filter(|d| d.abs() < z).count();
        assert!((175..=199).contains(&within(1.96)), "{}", within(1.96));
        assert!(distances.iter().sum::<f64>().abs() / 200.0 < 0.3);
    }

    #[test]
    fn nothing_is_known_of_a_policy_that_was_never_followed() {
        let mut estimate = OffPolicy::default();
        estimate.add(0.0, 1.0);
        assert_eq!((estimate.value(), estimate.effective()), (0.0, 0.0));
        assert!(estimate.deviation().is_infinite());
    }
}
