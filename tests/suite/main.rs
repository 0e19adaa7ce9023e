//! The integration tests, in one binary so that the crate is linked once.

mod broker;
mod cli;
mod compare;
mod config;
mod crash;
mod deploy;
mod evaluate;
mod fleet;
mod formats;
mod gap;
mod golden;
mod invariants;
mod kafka;
mod kafka_history;
mod learning;
mod models;
mod params;
mod replay;
mod rivals;
mod router;
mod sidecar;
mod simulate;
mod site;
mod size;
mod snapshots;
mod store;
