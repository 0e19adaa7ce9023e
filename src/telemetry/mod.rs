//! Facts in, metrics out: every metric name that dashboards and alerts rely on is in this module.
//!
//! Code reports facts where they happen ([`Facts`], [`router::Metrics`]). On a request, facts and the latest [`News`] of the
//! engine's thread become metrics and the data of the status page. Label values are bounded: spaces beyond a limit are
//! aggregated as `other`.

mod episodes;
mod facts;
mod history;
mod http;
mod learner;
mod reasons;
pub mod router;
mod sheet;
mod timing;
mod unread;
mod usable;

pub use episodes::Episodes;
pub use facts::{DeadNews, Facts, ModelNews, Published, SnapshotNews};
pub use history::History;
pub use http::HttpCounters;
pub use learner::{Lift, News, SpaceNews, Status};
pub use reasons::{Reason, Reasons};
pub use sheet::{CONTENT_TYPE, join};
pub use timing::Timing;
pub use unread::Unread;

use crate::event::Name;

/// Maximum number of spaces with labels of their own; the rest is aggregated as `other`.
const SPACES_MAX: usize = 100;

/// Maximum number of models of all spaces with labels of their own; the rest is aggregated as `other`.
const MODELS_MAX: usize = 1000;

/// Label value of the aggregated rest.
const OTHER: &str = "other";

/// The requested space if it exists, else the default one, else the first.
fn pick(asked: &str, is_there: impl Fn(&str) -> bool, first: Option<&str>) -> String {
    let default = Name::default_space();
    let wanted = [asked, default.as_str()].into_iter().find(|name| is_there(name));
    wanted.or(first).unwrap_or_default().to_owned()
}
