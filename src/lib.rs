//! Pointsman learns online, from the events you already log, which embedding model should answer each query.
//!
//! # The map
//!
//! The core is pure: no clock, no randomness of its own, no I/O. Time, draws and bytes come in as arguments, results go
//! out as values, so it cannot fail for outside reasons.
//!
//! - [`engine`]: the loop's one owner of joins and learners: `step(input) -> effects`.
//! - [`merge`]: several logs into one, in the order of event time.
//! - [`joiner`]: queries matched with rewards, in event time.
//! - [`event_time`]: a space's time, which a few wrong timestamps cannot move.
//! - [`event`]: names, unit queries, examples. A value of these types is already checked.
//! - [`config`]: keys as written, and the checked settings that they come to.
//! - [`hpg`]: the paper's mathematics, with its notation table.
//! - [`policy`]: what it is compared with.
//! - [`learner`]: the [`Learner`](learner::Learner) trait of all algorithms, and the [`Trainer`](learner::Trainer)
//!   that owns one with all that they share.
//! - [`snapshot`] and [`store`]: what is kept of a lane, and generations of it in a small ordered map on disk.
//! - [`router`]: parameters and a query in, a distribution over models out.
//! - [`wire`]: versioned formats of what leaves the process.
//! - [`simulate`]: worlds that know the truth, and traffic in them.
//! - [`evaluate`]: what policies are worth, where every reward is known and on logs of what was chosen.
//!
//! The edges, behind the feature `daemon`: `cli` (the program's commands), `runner` (what drives the engine),
//! `transport` (where events come from and parameters go), `http` (the router sidecar, the learner's state, the page of
//! both), `telemetry` (facts in, metrics out), the stores on disk in `store`, `report` (tables, plots, HTML reports), `files`
//! (how files are opened and created), `fatal` (panics end the process) and `failpoint` (where tests let it crash). The core never
//! reaches for an edge; `cargo check --lib --no-default-features` fails when it does.
//!
//! # Invariants
//!
//! - Parameters are finite, of rank at most k, of nuclear norm at most tau (parameter-free HPG: up to the scale that it
//!   finds), with orthonormal eigenvectors; probabilities are positive and sum to 1.
//! - A learner's state is all in what [`Trainer::save`](learner::Trainer::save) returns: restored, it goes on bit for bit.
//! - Same examples, same configuration, same binary and CPU type: same bits.
//! - A lane that moves has one history, on the snapshots topic, whoever believes to own it (`runner::lane`).
//! - Every event ends in exactly one count; event time alone decides what is learned, never the clock.
//!
//! # In one process
//!
//! ```
//! use pointsman::config::LearnerConfig;
//! use pointsman::event::{Example, Query};
//! use pointsman::learner::Trainer;
//!
//! let models = vec!["minilm".to_owned(), "bge".to_owned()];
//! let spec = LearnerConfig { dim: 3, models, ..LearnerConfig::default() }.check()?;
//! let mut trainer = Trainer::new(spec);
//!
//! let query = Query::from_f32(&[0.2, -0.5, 0.1])?;
//! let decision = trainer.decide(&query)?;
//! let reward = if decision.model == 1 { 1.0 } else { 0.0 };
//! let distribution = decision.distribution;
//! let (played, policy) = (distribution.propensities, Some(distribution.policy));
//! trainer.learn(Example::new(query, decision.model, played, policy, reward)?)?;
//! assert_eq!(trainer.version(), 1);
//!
//! let saved = trainer.save();
//! let restored = Trainer::restore(trainer.spec().clone(), &saved)?;
//! assert_eq!(restored.save(), saved);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]

#[cfg(feature = "daemon")]
pub mod cli;
pub mod config;
pub mod dead_letters;
pub mod engine;
pub mod evaluate;
pub mod event;
pub mod event_time;
#[cfg(feature = "daemon")]
pub mod failpoint;
#[cfg(feature = "daemon")]
pub mod fatal;
#[cfg(feature = "daemon")]
pub mod files;
pub mod hpg;
#[cfg(feature = "daemon")]
pub mod http;
pub mod joiner;
pub mod learner;
pub mod merge;
pub mod policy;
#[cfg(feature = "daemon")]
pub mod report;
pub mod router;
#[cfg(feature = "daemon")]
pub mod runner;
pub mod simulate;
pub mod snapshot;
pub mod store;
#[cfg(feature = "daemon")]
pub mod telemetry;
#[cfg(feature = "daemon")]
pub mod transport;
pub mod wire;
