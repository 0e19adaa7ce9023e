//! HTTP: the router sidecar.

mod metrics;
mod problem;
pub mod sidecar;

pub use problem::Problem;
