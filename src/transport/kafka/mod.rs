//! Apache Kafka: events from topics, parameters and dead letters to topics.
//!
//! | file | does |
//! |---|---|
//! | `client` | clients that close within a deadline |
//! | `cluster` | settings of clients, metadata of topics, errors |
//! | `topics` | requirements on topics; creates and checks them |
//! | `positions` | start positions, from a snapshot or `transport.kafka.start`, and whether they still exist |
//! | `consumer` | partitions as logs of the merge |
//! | `history` | a range of the topics, for files and for replay |
//! | `outlet` | producer of parameters and dead letters |
//! | `events` | producer of a router's events |
//! | `params` | reader of the parameters topic |
//! | `scan` | reads partitions to an offset, or follows them: one policy for errors |
//! | `transaction` | transactions of a lane, with fencing |
//! | `state` | the snapshots topic: the state of lanes that move |
//! | `unreadable` | batches that the client cannot read |
//! | `standby` | standby copies of the lanes of other instances |

pub mod client;
pub mod cluster;
pub mod consumer;
pub mod events;
pub mod history;
pub mod homes;
pub mod outlet;
pub mod params;
pub mod positions;
pub mod scan;
pub mod standby;
pub mod state;
pub mod topics;
pub mod transaction;
pub mod unreadable;
