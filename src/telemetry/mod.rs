//! Facts in, metrics out: every name that dashboards and alerts rely on is in this room.
//!
//! What happens is told as a fact, where it happens ([`Facts`], [`router::Metrics`]); when somebody asks, facts and the
//! [`News`] that the engine's thread tells now and then become metrics and what the page shows. Label values are
//! bounded: spaces beyond a limit are told together as `other`.

mod episodes;
mod facts;
mod history;
mod http;
mod learner;
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
pub use sheet::CONTENT_TYPE;
pub use timing::Timing;
pub use unread::Unread;

use crate::event::Name;

/// Spaces that are named one by one in metrics; those beyond are `other`.
const SPACES_MAX: usize = 100;

/// Models of all spaces together that are named one by one in metrics; those beyond are `other`.
const MODELS_MAX: usize = 1000;

/// What stands for all that is not named.
const OTHER: &str = "other";

/// The space that is asked for if it is there, else the default one, else the first.
fn pick(asked: &str, is_there: impl Fn(&str) -> bool, first: Option<&str>) -> String {
    let default = Name::default_space();
    let wanted = [asked, default.as_str()].into_iter().find(|name| is_there(name));
    wanted.or(first).unwrap_or_default().to_owned()
}
