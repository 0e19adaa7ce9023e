//! Learning rates and forgetting, as functions of the number of examples applied.
//!
//! ```text
//! constant   eta                       (the default)
//! anytime    eta sqrt(h / t)           t: examples applied, this one included; h: the horizon
//! doubling   eta sqrt(h / 2^ceil(log2 t))
//! forgetting Y <- 2^(-n / half_life) Y before a batch of n examples
//! ```
//!
//! The paper's eta = sqrt(M log d / T) needs the horizon T; the other two do without it, at a constant factor.

use serde::{Deserialize, Serialize};

/// A learning rate eta_t.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rate {
    /// The same for ever.
    Constant(f64),
    /// scale / sqrt(t)
    Anytime {
        /// eta sqrt(horizon)
        scale: f64,
    },
    /// scale / sqrt of the next power of two; the state is kept from one period to the next.
    Doubling {
        /// eta sqrt(horizon)
        scale: f64,
    },
}

impl Rate {
    /// The rate of a step that makes `t` examples applied.
    pub fn at(self, t: u64) -> f64 {
        let t = t.max(1);
        match self {
            Self::Constant(eta) => eta,
            Self::Anytime { scale } => scale / (t as f64).sqrt(),
            Self::Doubling { scale } => scale / (t.checked_next_power_of_two().unwrap_or(t) as f64).sqrt(),
        }
    }
}

/// What is left of the past after `examples` more examples.
pub fn shrink(half_life: Option<f64>, examples: usize) -> f64 {
    half_life.map_or(1.0, |half_life| (-(examples as f64) / half_life).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        let (anytime, doubling) = (Rate::Anytime { scale: 2.0 }, Rate::Doubling { scale: 2.0 });
        for (t, expected_anytime, expected_doubling) in
            [(0, 2.0, 2.0), (1, 2.0, 2.0), (3, 2.0 / 3_f64.sqrt(), 1.0), (4, 1.0, 1.0)]
        {
            assert_eq!(Rate::Constant(0.1).at(t), 0.1);
            assert_eq!(anytime.at(t), expected_anytime);
            assert_eq!(doubling.at(t), expected_doubling);
        }
        assert!(doubling.at(u64::MAX) > 0.0);
    }

    #[test]
    fn half_of_the_past_is_left_after_a_half_life() {
        assert_eq!(shrink(None, 1000), 1.0);
        assert_eq!(shrink(Some(500.0), 1000), 0.25);
    }
}
