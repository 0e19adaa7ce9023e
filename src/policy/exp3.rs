//! Exponential weights over models, whatever the query: the constant class.
//!
//! ```text
//! pi(m) = softmax(-eta_t L_m)         L_m += (1 - r) / (p_m + gamma_t), the played model only      gamma_t = eta_t / 2
//! eta_t = sqrt(2 log M / (M t))       anytime, unless configured
//! ```
//!
//! EXP3: Auer et al. 2002. p is the logged propensity of the played model. gamma is implicit exploration (EXP3-IX: Neu
//! 2015), a little bias for bounded weights: regret is small with high probability, where mixing in uniform
//! exploration, as EXP3.P does, would pay for it in every round. An exploration floor can still be configured; p has it
//! in it.

use crate::event::Query;
use crate::hpg::schedule::{Rate, shrink};
use crate::hpg::spectra::pick;
use crate::learner::{Learner, Lesson};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::rivals::Exp3Record;

/// EXP3-IX.
#[derive(Debug, Clone)]
pub struct Exp3 {
    rate: Rate,
    half_life: Option<f64>,
    /// L.
    losses: Vec<f64>,
    /// Examples, of which old ones count less where forgetting is asked for.
    examples: f64,
}

/// The most that a sum can have become in any stream.
const SUM_MAX: f64 = 1e30;

impl Exp3 {
    /// L = 0.
    pub fn new(rate: Rate, models: usize, half_life: Option<f64>) -> Self {
        Self { rate, half_life, losses: vec![0.0; models], examples: 0.0 }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(rate: Rate, models: usize, half_life: Option<f64>, record: Exp3Record) -> Option<Self> {
        let Exp3Record { losses, examples } = record;
        let is_sound = |sum: &f64| (0.0..=SUM_MAX).contains(sum);
        let fits = losses.len() == models && losses.iter().all(is_sound) && is_sound(&examples);
        fits.then_some(Self { rate, half_life, losses, examples })
    }

    fn rate(&self) -> f64 {
        self.rate.at(self.examples.round() as u64)
    }

    /// Scores with the best at zero: their differences are small beside the sums.
    fn biases(&self) -> impl Iterator<Item = f64> {
        let (rate, best) = (self.rate(), self.losses.iter().copied().fold(f64::INFINITY, f64::min));
        self.losses.iter().map(move |loss| rate * (best - loss))
    }
}

impl Learner for Exp3 {
    fn scores(&self, _query: &Query, scores: &mut [f64]) {
        scores.iter_mut().zip(self.biases()).for_each(|(score, bias)| *score = bias);
    }

    fn apply(&mut self, batch: &[Lesson], _version: u64) {
        let keep = shrink(self.half_life, batch.len());
        self.losses.iter_mut().for_each(|loss| *loss *= keep);
        self.examples *= keep;
        for Lesson { example, mean_before, .. } in batch {
            self.examples += 1.0;
            let gamma = 0.5 * self.rate();
            match example.only_reward() {
                Some(reward) => {
                    let model = example.model();
                    self.losses[model] += (1.0 - reward) / (example.propensities()[model] + gamma);
                }
                // What is known needs no weight. Unknown rewards count as the mean.
                None => {
                    self.losses.iter_mut().for_each(|loss| *loss += 1.0 - mean_before);
                    example.rewards().for_each(|(model, reward)| self.losses[model] += mean_before - reward);
                }
            }
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        self.biases().map(|bias| ScoreForm { bias: bias as f32, ..ScoreForm::default() }).collect()
    }

    /// A new model is tried as often as the best.
    fn remap(&mut self, places: &[Option<usize>]) {
        let kept = places.iter().flatten().filter_map(|&place| self.losses.get(place));
        let best = kept.copied().reduce(f64::min).unwrap_or(0.0);
        pick(&mut self.losses, places, || best);
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Exp3(Exp3Record { losses: self.losses.clone(), examples: self.examples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Example;
    use crate::router::Sampling;

    fn lesson(model: usize, propensities: &[f64], reward: f64) -> Lesson {
        let query = Query::new([1.0]).unwrap();
        let example = Example::new(query, model, propensities.to_vec(), None, reward).unwrap();
        Lesson::new(example, 0.5)
    }

    #[test]
    fn finds_the_best_model() {
        let scale = (2.0 * 3_f64.ln() / 3.0).sqrt();
        let mut exp3 = Exp3::new(Rate::Anytime { scale }, 3, None);
        let query = Query::new([1.0]).unwrap();
        let chances = [0.4, 0.7, 0.5];
        let mut scores = [0.0; 3];
        let mut luck = 0.5_f64;
        let mut next = || {
            luck = (luck + 0.618_033_988_749_894_9).fract();
            luck
        };
        for t in 0..20_000 {
            exp3.scores(&query, &mut scores);
            let core = Sampling::Softmax.core(&scores);
            let u = next();
            let model = if u < core[0] { 0 } else { 1 + usize::from(u >= core[0] + core[1]) };
            let reward = f64::from(u8::from((next() * 7919.0).fract() < chances[model]));
            exp3.apply(&[lesson(model, &core, reward)], t);
        }
        exp3.scores(&query, &mut scores);
        assert!(Sampling::Softmax.core(&scores)[1] > 0.9, "{scores:?}");
    }

    #[test]
    fn losses_are_weighted_by_propensity() {
        let mut exp3 = Exp3::new(Rate::Constant(0.2), 2, None);
        exp3.apply(&[lesson(0, &[0.4, 0.6], 0.25), lesson(1, &[0.4, 0.6], 1.0)], 0);
        assert!((exp3.losses[0] - 0.75 / 0.5).abs() < 1e-15 && exp3.losses[1] == 0.0);
    }
}
