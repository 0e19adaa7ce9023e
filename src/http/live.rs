//! The status page, and the event stream that updates it.

use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::http::header;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use futures_util::stream;
use rand::RngExt;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::Problem;
use crate::report::STYLE;

/// Maximum number of concurrent streams.
const WATCHERS_MAX: usize = 32;

/// Interval of updates.
const EVERY: Duration = Duration::from_secs(1);

/// Query parameters of a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// The space to show in full.
    #[serde(default)]
    pub space: String,
    /// A substring that filters the listed spaces.
    #[serde(default)]
    pub find: String,
}

/// A source of the page's data: a learner or a router.
pub trait Watched: Send + Sync + 'static {
    /// Which it is.
    fn role(&self) -> &'static str;

    /// The space to show: `space`, or an existing one.
    fn pick(&self, space: &str) -> String;

    /// History of the process and of one space, oldest first.
    fn history(&self, space: &str) -> Value;

    /// Current values.
    fn now(&self, space: &str, find: &str) -> Value;
}

/// Limits the concurrent streams.
#[derive(Clone)]
pub struct Seats {
    free: Arc<Semaphore>,
    closing: watch::Sender<bool>,
}

impl Default for Seats {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(WATCHERS_MAX)), closing: watch::channel(false).0 }
    }
}

impl Seats {
    /// Ends all streams, so that none keeps a server from stopping.
    pub fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Streams the history once, as event `history`, then the current values every second, as events `now`. Each has the
    /// data of every source, by role.
    pub fn watch(&self, watched: Vec<Arc<dyn Watched>>, wanted: Wanted) -> Result<Response, Problem> {
        let Ok(seat) = self.free.clone().try_acquire_owned() else {
            return Err(Problem::unavailable(format!("{WATCHERS_MAX} status pages are already open: close one")));
        };
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let state = (watched, wanted, ticks, self.closing.subscribe(), seat, true);
        let events = stream::unfold(state, |(watched, wanted, mut ticks, mut closing, seat, is_first)| async move {
            let seat: OwnedSemaphorePermit = seat;
            if !is_first {
                tokio::select! {
                    _ = ticks.tick() => {}
                    _ = closing.wait_for(|closing| *closing) => return None,
                }
            }
            let space = pick(&watched, &wanted.space);
            let event = if is_first {
                Event::default().event("history").data(by_role(&watched, |source| source.history(&space)).to_string())
            } else {
                let now = by_role(&watched, |source| source.now(&space, &wanted.find));
                Event::default().event("now").data(now.to_string())
            };
            Some((Ok::<_, Infallible>(event), (watched, wanted, ticks, closing, seat, false)))
        });
        Ok(([(header::CACHE_CONTROL, "no-store")], Sse::new(events)).into_response())
    }
}

fn by_role(watched: &[Arc<dyn Watched>], data: impl Fn(&dyn Watched) -> Value) -> Value {
    Value::Object(watched.iter().map(|source| (source.role().to_owned(), data(&**source))).collect())
}

/// The space that all sources show: the wanted one if any of them has it.
fn pick(watched: &[Arc<dyn Watched>], wanted: &str) -> String {
    let picked: Vec<String> = watched.iter().map(|source| source.pick(wanted)).collect();
    let found = picked.iter().find(|space| *space == wanted).or_else(|| picked.iter().find(|space| !space.is_empty()));
    found.cloned().unwrap_or_default()
}

/// The page. It loads no external resources and runs only its own script.
pub async fn page() -> Response {
    let nonce = base64::engine::general_purpose::STANDARD.encode(rand::rng().random::<[u8; 16]>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, &policy),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE.replace("NONCE", &nonce)).into_response()
}

static PAGE: LazyLock<String> = LazyLock::new(|| include_str!("page.html").replace("/*STYLE*/", STYLE));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_has_no_handlers_in_its_markup() {
        for loader in
            ["http:", "https:", "url(", "@import", "<link", "innerHTML", "outerHTML", "document.write", "eval("]
        {
            // The icon, which is in the page itself.
            let allowed = match loader {
                "http:" => PAGE.matches("http://www.w3.org/").count(),
                "<link" => PAGE.matches("<link rel=\"icon\" href=\"data:").count(),
                _ => 0,
            };
            assert_eq!(PAGE.matches(loader).count(), allowed, "{loader}");
        }
        assert!(!PAGE.contains(" onclick=") && !PAGE.contains(" style="), "the policy forbids them");
        assert_eq!(PAGE.matches("nonce=\"NONCE\"").count(), 2, "one style, one script");
        assert!(!PAGE.contains("/*STYLE*/"));
    }
}
