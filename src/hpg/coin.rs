//! Coin betting through online Newton steps: a learning rate for one number, without a parameter.
//!
//! ```text
//! bet      x = v wealth,  play z = max(x, 0)
//! see g    g~ = 0 if x < 0 and g > 0, else g             (the gradient of the clamped problem)
//! wealth   wealth <- wealth - g~ x
//! fraction y = g~ / (1 - g~ v),  A <- A + y^2,  v <- clamp(v - 2 / (2 - log 3) y / A, -1/2, 1/2)
//! ```
//!
//! Cutkosky and Orabona 2018, Algorithm 1, restricted to z >= 0; |g| <= 1. The paper's Algorithm 2 runs one for each
//! model's magnitude.

use crate::wire::records::learner::hpg::BettorRecord;

/// One bettor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bettor {
    wealth: f64,
    fraction: f64,
    curvature: f64,
}

impl Bettor {
    /// A bettor that has not seen anything yet.
    pub fn new(wealth: f64) -> Self {
        Self { wealth, fraction: 0.0, curvature: 1.0 }
    }

    /// The magnitude to play next.
    pub fn magnitude(&self) -> f64 {
        self.bet().max(0.0)
    }

    /// Learns from the gradient of the loss at the magnitude played; beyond -1..1 it is clipped.
    pub fn step(&mut self, gradient: f64) {
        let bet = self.bet();
        let outward = bet < 0.0 && gradient > 0.0;
        let g = if outward { 0.0 } else { gradient.clamp(-1.0, 1.0) };
        // At a fraction of 1/2 wealth at most doubles; it is capped so that no stream can make it infinite.
        self.wealth = (self.wealth - g * bet).clamp(WEALTH_MIN, WEALTH_MAX);
        let y = g / (1.0 - g * self.fraction);
        self.curvature += y * y;
        self.fraction = (self.fraction - 2.0 / (2.0 - 3_f64.ln()) * y / self.curvature).clamp(-0.5, 0.5);
    }

    /// The record of its state.
    pub fn record(&self) -> BettorRecord {
        let Self { wealth, fraction, curvature } = *self;
        BettorRecord { wealth, fraction, curvature }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &BettorRecord) -> Option<Self> {
        let &BettorRecord { wealth, fraction, curvature } = record;
        Some(Self { wealth, fraction, curvature }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        (WEALTH_MIN..=WEALTH_MAX).contains(&self.wealth)
            && (-0.5..=0.5).contains(&self.fraction)
            && self.curvature >= 1.0
            && self.curvature.is_finite()
    }

    fn bet(&self) -> f64 {
        self.fraction * self.wealth
    }
}

const WEALTH_MIN: f64 = 1e-100;
const WEALTH_MAX: f64 = 1e9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wealth_stays_finite_and_positive_whatever_comes() {
        for gradient in [-1.0, 1.0, 0.0, -1e300] {
            let mut bettor = Bettor::new(1.0);
            for _ in 0..100_000 {
                bettor.step(gradient);
                assert!(bettor.is_sound(), "{bettor:?}");
            }
        }
    }

    #[test]
    fn bets_more_on_a_biased_coin() {
        let mut bettor = Bettor::new(1.0);
        for t in 0..200 {
            bettor.step(if t % 4 == 0 { 0.5 } else { -0.5 });
        }
        assert!(bettor.magnitude() > 10.0);
    }
}
