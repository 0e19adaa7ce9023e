//! The policy-gradient estimator, rank one in every model.
//!
//! ```text
//! c_m = w (r - b) (1[m = m_t] - pi_m)             G_m = -c_m q q'
//! c_m = sum_j pi_j (r_j - b) (1[m = j] - pi_m)    if feedback names the rewards r_j of several models: no weight
//! logged       pi: the policy with which the event was routed
//! importance   pi: the current policy
//! w = min(pi(m_t) / p(m_t), cap)                  p: the propensities, exploration floor mixed in
//! ```
//!
//! Paper: Section 4.2, Eq. (REINFORCE), where router and learner are one, so that w = 1 and b = 0.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::event::Example;
use crate::learner::Lesson;
use crate::router::Sampling;

/// Whose policy the gradient is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// The one that routed the event.
    Logged,
    /// The current one, weighted by how much likelier it makes the choice.
    Importance,
}

/// Which baseline is taken off the rewards: it changes no expectation, only the spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Baseline {
    /// 0
    None,
    /// Mean of the rewards before this one; 0.5 before the first.
    Mean,
}

/// How gradients are estimated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GradientSpec {
    /// Whose policy the gradient is of.
    pub estimator: Estimator,
    /// What is taken off the rewards.
    pub baseline: Baseline,
    /// Largest importance weight.
    pub weight_cap: f64,
}

impl GradientSpec {
    /// pi for a lesson; `scores` fills in those of the current policy.
    pub fn policy<'a>(&self, lesson: &'a Lesson, models: usize, scores: impl FnOnce(&mut [f64])) -> Cow<'a, [f64]> {
        match self.estimator {
            Estimator::Logged => Cow::Borrowed(lesson.example.policy()),
            Estimator::Importance => {
                let mut current = vec![0.0; models];
                scores(&mut current);
                Sampling::Softmax.turn_among(&mut current, lesson.example.eligible());
                Cow::Owned(current)
            }
        }
    }

    /// c_m of each model for a lesson, `policy` being pi.
    pub fn coefficients(&self, lesson: &Lesson, policy: &[f64], c: &mut Vec<f64>) {
        if lesson.example.only_reward().is_none() {
            return known_coefficients(&lesson.example, policy, lesson.mean_before, c);
        }
        let baseline = match self.baseline {
            Baseline::None => 0.0,
            Baseline::Mean => lesson.mean_before,
        };
        coefficients(&lesson.example, policy, baseline, self.weight_cap, c);
    }
}

/// c_m of each model where the rewards of several models are known; `mean` stands for the others, so that they change
/// nothing.
fn known_coefficients(example: &Example, policy: &[f64], mean: f64, c: &mut Vec<f64>) {
    c.clear();
    c.resize(policy.len(), 0.0);
    for (model, reward) in example.rewards() {
        let advantage = policy[model] * (reward - mean);
        c.iter_mut().zip(policy).for_each(|(c, pi)| *c -= advantage * pi);
        c[model] += advantage;
    }
}

/// c_m of each model for one example with a reward, `policy` being pi.
pub fn coefficients(example: &Example, policy: &[f64], baseline: f64, cap: f64, c: &mut Vec<f64>) {
    let chosen = example.model();
    let weight = (policy[chosen] / example.propensities()[chosen]).min(cap);
    let advantage = weight * (example.reward().unwrap_or(baseline) - baseline);
    c.clear();
    c.extend(policy.iter().enumerate().map(|(m, pi)| advantage * (f64::from(u8::from(m == chosen)) - pi)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eligible::Eligible;
    use crate::event::Query;

    /// E[c_m] over the draw of the model, by enumeration, against the gradient of sum_j pi_j r_j in score m, by
    /// central differences: the baseline and the floor must not bias it.
    #[test]
    fn unbiased_by_enumeration() {
        let rewards = [0.9, 0.2, 0.6, 0.0];
        let scores = [0.3, -1.0, 0.5, 1.5];
        let softmax = |scores: &[f64]| {
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            scores.iter().map(|s| s.exp() / sum).collect::<Vec<f64>>()
        };
        let value = |scores: &[f64]| softmax(scores).iter().zip(&rewards).map(|(p, r)| p * r).sum::<f64>();
        let pi = softmax(&scores);
        let mixed: Vec<f64> = pi.iter().map(|p| 0.6 * p + 0.1).collect();
        for (baseline, propensities) in [(0.0, &pi), (0.4, &pi), (0.4, &mixed)] {
            let mut expected = [0.0; 4];
            let mut c = Vec::new();
            for m in 0..4 {
                let query = Query::new([1.0]).unwrap();
                let example = Example::new(query, m, propensities.clone(), Some(pi.clone()), rewards[m]).unwrap();
                coefficients(&example, example.policy(), baseline, 10.0, &mut c);
                for (sum, c) in expected.iter_mut().zip(&c) {
                    *sum += propensities[m] * c;
                }
            }
            for m in 0..4 {
                let h = 1e-5;
                let at = |step: f64| {
                    let mut moved = scores;
                    moved[m] += step;
                    value(&moved)
                };
                let slope = (at(h) - at(-h)) / (2.0 * h);
                assert!((expected[m] - slope).abs() < 1e-9, "{} {slope}", expected[m]);
            }
        }
    }

    /// The same with a random set of eligible models: over all sets and all choices among them, against the gradient of the mean
    /// reward of the policy that is conditioned on the set.
    #[test]
    fn unbiased_by_enumeration_over_eligible_sets() {
        let rewards = [0.9, 0.2, 0.6, 0.0];
        let scores = [0.3, -1.0, 0.5, 1.5];
        let share = |set: usize| set as f64 / (1..16).sum::<usize>() as f64;
        let eligible = |set: usize| Eligible::only((0..4).map(|m| set >> m & 1 == 1).collect()).unwrap();
        let conditioned = |scores: [f64; 4], set: usize| {
            let mut p = scores;
            Sampling::Softmax.turn_among(&mut p, &eligible(set));
            p
        };
        let value = |scores: [f64; 4]| {
            let of = |set| conditioned(scores, set).iter().zip(rewards).map(|(p, r)| p * r).sum::<f64>();
            (1..16).map(|set| share(set) * of(set)).sum::<f64>()
        };
        for (baseline, floor) in [(0.0, 0.0), (0.4, 0.0), (0.4, 0.3)] {
            let (mut expected, mut c) = ([0.0; 4], Vec::new());
            for set in 1..16 {
                let pi = conditioned(scores, set);
                let mut explored = [0.25; 4];
                eligible(set).restrict(&mut explored);
                let p: Vec<f64> = pi.iter().zip(explored).map(|(pi, e)| (1.0 - floor) * pi + floor * e).collect();
                for m in (0..4).filter(|m| eligible(set).allows(*m)) {
                    let query = Query::new([1.0]).unwrap();
                    let example = Example::new(query, m, p.clone(), Some(pi.to_vec()), rewards[m]).unwrap();
                    let example = example.among(eligible(set)).unwrap();
                    coefficients(&example, example.policy(), baseline, 10.0, &mut c);
                    expected.iter_mut().zip(&c).for_each(|(sum, c)| *sum += share(set) * p[m] * c);
                }
            }
            for m in 0..4 {
                let h = 1e-5;
                let at = |step: f64| {
                    let mut moved = scores;
                    moved[m] += step;
                    value(moved)
                };
                let slope = (at(h) - at(-h)) / (2.0 * h);
                assert!((expected[m] - slope).abs() < 1e-9, "{} {slope}", expected[m]);
            }
        }
    }

    /// With the rewards of all models known, one example gives the whole gradient, whatever was chosen and whatever the mean.
    #[test]
    fn full_information_is_the_expected_gradient() {
        let (pi, rewards) = ([0.1, 0.2, 0.3, 0.4], [0.9, 0.2, 0.6, 0.0]);
        let query = Query::new([1.0]).unwrap();
        let example = Example::new(query, 2, vec![0.25; 4], Some(pi.to_vec()), rewards[2]).unwrap();
        let example = example.with_others(vec![(0, 0.9), (1, 0.2), (3, 0.0)]).unwrap();
        let value: f64 = pi.iter().zip(&rewards).map(|(p, r)| p * r).sum();
        for mean in [0.0, 0.4] {
            let mut c = Vec::new();
            known_coefficients(&example, &pi, mean, &mut c);
            for m in 0..4 {
                assert!((c[m] - pi[m] * (rewards[m] - value)).abs() < 1e-12, "{c:?}");
            }
        }
        // What is not known changes nothing on the whole.
        let example = Example::new(Query::new([1.0]).unwrap(), 2, vec![0.25; 4], None, 0.4).unwrap();
        let mut c = Vec::new();
        known_coefficients(&example, &pi, 0.4, &mut c);
        assert_eq!(c, [0.0; 4]);
    }

    #[test]
    fn weights_are_capped() {
        let query = Query::new([1.0]).unwrap();
        let example = Example::new(query, 0, vec![0.01, 0.99], None, 1.0).unwrap();
        let mut c = Vec::new();
        coefficients(&example, &[0.9, 0.1], 0.0, 10.0, &mut c);
        assert!((c[0] - 1.0).abs() < 1e-12 && (c[1] + 1.0).abs() < 1e-12, "{c:?}");
    }
}
