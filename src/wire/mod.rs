//! Versioned formats of data that leaves the process. Domain types do not depend on them.

pub mod dataset;
pub mod envelope;
pub mod events;
pub mod export;
pub mod params;
mod quick;
pub mod records;
pub mod requests;
pub mod rows;
mod scan;
