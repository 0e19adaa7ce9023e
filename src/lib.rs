//! Pointsman learns online, from the events you already log, which embedding model should answer each query.

#[cfg(feature = "daemon")]
pub mod cli;
pub mod config;
pub mod event;
pub mod hpg;
pub mod learner;
pub mod policy;
#[cfg(feature = "daemon")]
pub mod report;
pub mod router;
pub mod simulate;
pub mod wire;
