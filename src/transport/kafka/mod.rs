//! Apache Kafka: events from topics, parameters and dead letters to topics.
//!
//! | file | does |
//! |---|---|
//! | `cluster` | the brokers: clients, what is there, named problems |
//! | `topics` | what topics must be like; makes and checks them |
//! | `positions` | where to read on, from a snapshot or a rule, and whether that can still be had |
//! | `consumer` | partitions as logs of the merge |
//! | `history` | a stretch of the topics, for files and for replay |
//! | `outlet` | parameters and dead letters, delivered before they count |
//! | `events` | what a router writes |
//! | `params` | the parameters topic, read to its end and on |
//! | `transaction` | messages that count together, and only while nobody else has taken over |
//! | `state` | the snapshots topic: the state of lanes that move |
//! | `unreadable` | batches that the client cannot read |
//! | `standby` | copies of lanes that others have |

pub mod cluster;
pub mod consumer;
pub mod events;
pub mod history;
pub mod homes;
pub mod outlet;
pub mod params;
pub mod positions;
pub mod standby;
pub mod state;
pub mod topics;
pub mod transaction;
pub mod unreadable;
