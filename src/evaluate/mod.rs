//! What a policy is worth, offline.
//!
//! - [`classes`]: the best policy of a class, where the reward of every model is known for every query.
//! - [`confidence`]: a lower confidence bound on a mean, valid at all times simultaneously.
//! - [`gap`]: how far the classes stay behind the best model of every query: the paper's table, and what it leaves out.
//! - [`judge`]: what several policies would have earned on events that another one chose, with confidence ranges.
//! - [`off_policy`]: what a policy would have earned on events that another one chose.
//! - [`ranks`]: where two models rank the items that are worth finding: the paper's figure.
//! - [`rollout`]: the stages of a rollout, and the share of the traffic that a budget permits.
//! - [`sample_ratio`]: whether each model was played as often as the log says, tested at all times.
//! - [`verdict`]: what the estimates say about each policy, in a sentence; or that the log contradicts its propensities.
//! - [`worth`]: whether routing pays, evaluated while a learner learns; and the search for the incumbent of a rollout.

pub mod classes;
pub mod confidence;
pub mod gap;
pub mod judge;
pub mod off_policy;
pub mod ranks;
pub mod rollout;
pub mod sample_ratio;
pub mod verdict;
pub mod worth;
