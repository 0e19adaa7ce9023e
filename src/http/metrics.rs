//! What the router counts, under names that dashboards rely on.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::router::Router;

/// Spaces beyond these are not named one by one.
const SPACES_MAX: usize = 100;

/// All metrics of a router.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    duration: Histogram,
    events: Family<EventLabels, Counter>,
    repeats: Counter,
    version: Family<SpaceLabels, Gauge<u64, AtomicU64>>,
    deliveries: Family<DeliveryLabels, Gauge<u64, AtomicU64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeliveryLabels {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpaceLabels {
    space: String,
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("pointsman_router");
        let (requests, events, repeats) = (Family::default(), Family::default(), Counter::default());
        let duration = Histogram::new(exponential_buckets(1e-5, 2.0, 18));
        let (version, deliveries) = (Family::default(), Family::default());
        registry.register("requests", "Requests, by endpoint and status", requests.clone());
        registry.register_with_unit("request_duration", "Time of a request", Unit::Seconds, duration.clone());
        registry.register("events", "Events, by kind and what became of them", events.clone());
        registry.register("repeats", "Requests that came again and got the answer that they got", repeats.clone());
        registry.register("params_version", "Version of the parameters of each space", version.clone());
        let of_accepted = "Events that the brokers have by now, or that could not be delivered in time";
        registry.register("deliveries", of_accepted, deliveries.clone());
        Self { registry, requests, duration, events, repeats, version, deliveries }
    }

    /// A request was answered.
    pub fn request(&self, endpoint: &'static str, code: u16, took: Duration) {
        self.requests.get_or_create(&RequestLabels { endpoint, code }).inc();
        self.duration.observe(took.as_secs_f64());
    }

    /// So many events of a kind came to this.
    pub fn events(&self, kind: &'static str, outcome: &'static str, number: u64) {
        self.events.get_or_create(&EventLabels { kind, outcome }).inc_by(number);
    }

    /// A request was answered as before.
    pub fn repeat(&self) {
        self.repeats.inc();
    }

    /// In the format of OpenMetrics.
    pub fn text(&self, router: &Router, deliveries: Option<(u64, u64)>) -> String {
        if let Some((delivered, lost)) = deliveries {
            for (outcome, number) in [("delivered", delivered), ("lost", lost)] {
                self.deliveries.get_or_create(&DeliveryLabels { outcome }).set(number);
            }
        }
        self.version.clear();
        for compiled in router.spaces().iter().take(SPACES_MAX) {
            let labels = SpaceLabels { space: compiled.space().to_string() };
            self.version.get_or_create(&labels).set(compiled.params().version);
        }
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
