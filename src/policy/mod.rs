//! What HPG is compared with.

pub mod constant;
pub mod exp3;
pub mod features;
pub mod linear_bandit;
pub mod log_linear;
pub mod log_quadratic;
pub mod quadratic_sgd;
pub mod ridge;
pub mod symmetric;

use crate::learner::Play;

/// How regressions play: by inverse gaps, g_t = `scale` sqrt(t), where t is the next example.
pub(crate) fn square_cb(scale: f64, version: u64) -> Play {
    Play::inverse_gap(scale * (version as f64 + 1.0).sqrt())
}
