//! What HPG is compared with.

pub mod constant;
