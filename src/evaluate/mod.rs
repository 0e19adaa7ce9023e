//! What a policy is worth, offline.
//!
//! - [`classes`]: the best policy of a class, where the reward of every model is known for every query.
//! - [`gap`]: how far the classes stay behind the best model of every query: the paper's table, and what it leaves out.
//! - [`off_policy`]: what a policy would have earned on events that another one chose.
//! - [`ranks`]: where two models rank the items that are worth finding: the paper's figure.

pub mod classes;
pub mod gap;
pub mod off_policy;
pub mod ranks;
