//! What models cost besides their reward, as routers hold it: expected outcomes per model, and their prices.

/// Largest number of priced outcomes.
pub const OUTCOMES_MAX: usize = 64;

/// Longest name of an outcome, in bytes.
pub const OUTCOME_NAME_BYTES_MAX: usize = 64;

/// Expected outcomes of each model and their prices, in units of the score. Without names there are none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcomes {
    /// Names of the outcomes.
    names: Vec<String>,
    /// lambda: what one unit of each outcome takes from a score.
    prices: Vec<f64>,
    /// The expected outcomes of each model, model by model.
    expected: Vec<f32>,
}

/// Why numbers are not [`Outcomes`]: not one price per name, or not one expectation per model and name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadOutcomes;

impl Outcomes {
    /// Outcomes of this many models, `expected` model by model.
    pub fn new(models: usize, names: Vec<String>, prices: Vec<f64>, expected: Vec<f32>) -> Result<Self, BadOutcomes> {
        let fits = prices.len() == names.len() && expected.len() == models * names.len();
        if fits { Ok(Self { names, prices, expected }) } else { Err(BadOutcomes) }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Names of the outcomes.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The price of each outcome.
    pub fn prices(&self) -> &[f64] {
        &self.prices
    }

    /// The expected outcomes of a model.
    pub fn expected(&self, model: usize) -> &[f32] {
        let n = self.names.len();
        &self.expected[model * n..(model + 1) * n]
    }

    /// What the expected outcomes of a model cost.
    pub fn charge_of(&self, model: usize) -> f64 {
        self.prices.iter().zip(self.expected(model)).map(|(price, &x)| price * f64::from(x)).sum()
    }

    /// Subtracts from each model's score what its expected outcomes cost.
    pub fn charge(&self, scores: &mut [f64]) {
        if !self.is_empty() {
            scores.iter_mut().enumerate().for_each(|(model, score)| *score -= self.charge_of(model));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_pay_for_outcomes() {
        let names = || vec!["cost".to_owned(), "latency_ms".to_owned()];
        let outcomes = Outcomes::new(2, names(), vec![10.0, 0.5], vec![0.5, 2.0, 0.0, 4.0]).unwrap();
        let mut scores = [1.0, 2.0];
        outcomes.charge(&mut scores);
        assert_eq!(scores, [-5.0, 0.0]);
        assert_eq!(outcomes.expected(1), [0.0, 4.0]);
        Outcomes::default().charge(&mut scores);
        assert_eq!(scores, [-5.0, 0.0]);
        assert_eq!(Outcomes::new(2, names(), vec![1.0], vec![0.0; 4]), Err(BadOutcomes));
        assert_eq!(Outcomes::new(2, names(), vec![1.0; 2], vec![0.0; 3]), Err(BadOutcomes));
    }
}
