//! HTTP: the router sidecar, the learner's status, both on one port, the page, and the server that they share.

mod access;
pub mod backup;
mod body;
pub mod both;
pub mod learner;
mod live;
mod models;
mod problem;
mod reconfigure;
mod reload;
mod server;
pub mod sidecar;
mod tls;

pub use access::Access;
pub use problem::Problem;
pub use server::{Server, raise_descriptor_limit};
pub use tls::Tls;
