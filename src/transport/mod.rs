//! Where events come from and where results go.

pub mod append;
pub mod directory;
pub mod file;
pub mod params;
pub mod writer;
