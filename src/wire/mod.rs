//! Versioned formats of what leaves the process. Domain types know nothing of them.

pub mod dataset;
pub mod envelope;
pub mod events;
pub mod export;
pub mod params;
mod quick;
pub mod requests;
mod scan;
