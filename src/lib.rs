//! Pointsman learns online, from the events you already log, which embedding model should answer each query.
//!
//! # Route in your own process
//!
//! A [`Router`](router::Router) holds the parameters of all spaces and draws a model for each query, without locks and without I/O.
//! It needs the crate without its default features. `examples/embed_router.rs` also writes the decision to the log that the learner
//! reads.
//!
//! ```
//! use pointsman::event::Name;
//! use pointsman::router::{DrawKey, Router};
//! use pointsman::wire::params;
//!
//! // All routers of a space use the same key (`router.key`) and so draw alike for one request.
//! let router = Router::new(DrawKey::new(b"a secret of your own")?);
//! # let published = std::fs::read("tests/golden/formats/params-1.safetensors")?;
//! // Bytes from the parameters topic or file. Offer them whenever they are published: the newest stay.
//! router.offer(params::decode(&published)?);
//!
//! let space = Name::try_from("shop")?;
//! if let Some(answer) = router.route(&space, "request-1", &[0.2, -0.5, 0.1]) {
//!     let answer = answer?;
//!     println!("ask {}", answer.model_name());
//! } else {
//!     // No parameters of this space yet: choose uniformly, or a default.
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Learn in your own process
//!
//! A [`Trainer`](learner::Trainer) decides, takes the reward and learns. `examples/embed_learner.rs` does so from a log of events,
//! with the [`engine`].
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
//!
//! # Module map
//!
//! The core is pure: no clock, no randomness of its own, no I/O. Time, random draws and bytes come in as arguments, results
//! go out as values, so it cannot fail for outside reasons.
//!
//! - [`engine`]: owns joins and learners of one lane: `step(input) -> effects`.
//! - [`merge`]: merges several logs into one, in event-time order.
//! - [`joiner`]: joins queries with rewards, in event time.
//! - [`event_time`]: the event time of a space, robust against a few wrong timestamps.
//! - [`timestamp`]: times as text.
//! - [`event`]: names, unit queries, examples. A value of these types is already validated.
//! - [`feedback`]: what came of a decision. [`eligible`]: which models may answer a request.
//! - [`objective`]: what is maximised: the reward, less priced outcomes, within budgets.
//! - [`config`]: raw keys, and the validated settings made from them.
//! - [`hpg`]: the paper's mathematics, with its notation table.
//! - [`policy`]: the algorithms that HPG is compared with.
//! - [`learner`]: the [`Learner`](learner::Learner) trait of all algorithms, and the [`Trainer`](learner::Trainer),
//!   which owns one learner and everything that all algorithms share.
//! - [`state`]: the only owner of durable state: restores, commits, verifies and backs up the snapshots of a lane.
//! - [`snapshot`]: the head of a snapshot. [`store`]: the small ordered maps that hold snapshots.
//! - [`warnings`]: warnings about what a log says, from counts and a summary of the examples.
//! - [`dead_letters`]: which dead letters are recorded and which only counted.
//! - [`query_key`]: keys of queries, computed alike in every language.
//! - [`router`]: parameters and a query in, a distribution over models out.
//! - [`wire`]: versioned formats of events, parameters and snapshots.
//! - [`inspect`]: recognises the layout of logs that were written for something else.
//! - [`simulate`]: simulated worlds with known rewards, and traffic in them.
//! - [`evaluate`]: policy value, with known rewards and off-policy from logs.
//!
//! The edges are behind the feature `daemon`: `cli` (the commands), `serve` (runs a learner and a router in a process),
//! `runner` (runs lanes), `transport` (events in, parameters and dead letters out), `http` (router sidecar, learner status, both on
//! one port, the page), `telemetry` (facts in, metrics and log lines out), the stores on disk in `store`, `report` (tables, charts,
//! HTML reports), `files` (opens and creates files), `fatal` (a panic ends the process) and `failpoint` (where tests crash the
//! process). The core never depends on an edge: `cargo check --lib --no-default-features` fails if it does.
//!
//! # Invariants
//!
//! - Parameters are finite, of rank at most k, of nuclear norm at most tau (parameter-free HPG: up to the scale it
//!   finds), with orthonormal eigenvectors. Probabilities are positive and sum to 1.
//! - [`Trainer::save`](learner::Trainer::save) returns the whole state of a learner. A restored learner continues bit for bit.
//! - The same examples, configuration, binary and CPU type give the same bits.
//! - A lane that moves between instances has one history, on the snapshots topic. A stale owner is fenced (`runner::claim`).
//! - Every event ends in exactly one count. Event time alone decides what is learned, never the clock.

#![warn(missing_docs)]

#[cfg(feature = "daemon")]
pub mod cli;
pub mod config;
pub mod dead_letters;
pub mod eligible;
pub mod engine;
pub mod evaluate;
pub mod event;
pub mod event_time;
#[cfg(feature = "daemon")]
pub mod failpoint;
#[cfg(feature = "daemon")]
pub mod fatal;
pub mod feedback;
#[cfg(feature = "daemon")]
pub mod files;
pub mod hpg;
#[cfg(feature = "daemon")]
pub mod http;
pub mod inspect;
pub mod joiner;
pub mod learner;
pub mod merge;
pub mod objective;
pub mod policy;
pub mod query_key;
#[cfg(feature = "daemon")]
pub mod report;
pub mod router;
#[cfg(feature = "daemon")]
pub mod runner;
#[cfg(feature = "daemon")]
pub mod serve;
pub mod simulate;
pub mod snapshot;
pub mod state;
pub mod store;
#[cfg(feature = "daemon")]
pub mod telemetry;
pub mod timestamp;
#[cfg(feature = "daemon")]
pub mod transport;
pub mod warnings;
pub mod wire;
