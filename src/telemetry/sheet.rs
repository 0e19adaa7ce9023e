//! A set of metrics as of one moment, as text.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet};
use prometheus_client::metrics::counter::{self, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{self, Gauge};
use prometheus_client::registry::{Metric, Registry, Unit};

/// The media type of metrics as text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metrics, written down once.
pub struct Sheet(Registry);

impl Sheet {
    /// An empty one; all names begin with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self(Registry::with_prefix(prefix))
    }

    /// Numbers that only grow. Those with the same labels are added up.
    pub fn counters<L, N>(&mut self, name: &str, help: &str, rows: impl IntoIterator<Item = (L, N)>)
    where
        L: EncodeLabelSet + Clone + Hash + Eq + Debug + Send + Sync + 'static,
        N: EncodeCounterValue + Debug + Send + Sync + 'static,
        AtomicU64: counter::Atomic<N>,
    {
        let family = Family::<L, Counter<N, AtomicU64>>::default();
        for (labels, number) in rows {
            family.get_or_create(&labels).inc_by(number);
        }
        self.0.register(name, help, family);
    }

    /// Numbers that go up and down. Those with the same labels are added up.
    pub fn gauges<L, N>(&mut self, name: &str, help: &str, rows: impl IntoIterator<Item = (L, N)>)
    where
        L: EncodeLabelSet + Clone + Hash + Eq + Debug + Send + Sync + 'static,
        N: EncodeGaugeValue + Debug + Send + Sync + 'static,
        AtomicU64: gauge::Atomic<N>,
    {
        let family = Family::<L, Gauge<N, AtomicU64>>::default();
        for (labels, number) in rows {
            family.get_or_create(&labels).inc_by(number);
        }
        self.0.register(name, help, family);
    }

    /// Seconds, as a histogram or a moment in time.
    pub fn seconds(&mut self, name: &str, help: &str, metric: impl Metric) {
        self.0.register_with_unit(name, help, Unit::Seconds, metric);
    }

    /// In the format of OpenMetrics.
    pub fn text(self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.0);
        text
    }
}
