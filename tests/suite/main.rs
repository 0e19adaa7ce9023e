//! The integration tests, in one binary so that the crate is linked once.

mod golden;
mod invariants;
mod size;
