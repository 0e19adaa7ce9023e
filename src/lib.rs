//! Pointsman learns online, from the events you already log, which embedding model should answer each query.

pub mod config;
pub mod event;
pub mod hpg;
pub mod learner;
pub mod policy;
#[cfg(feature = "daemon")]
pub mod report;
pub mod router;
pub mod wire;
