//! A set of metrics as of one moment, as text.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet};
use prometheus_client::metrics::counter::{self, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{self, Gauge};
use prometheus_client::registry::{Metric, Registry, Unit};

/// The media type of metrics as text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metrics, written down once.
pub struct Sheet {
    own: Registry,
    /// Metrics of the whole loop, whichever process reports them.
    of_loop: Registry,
}

/// Prefix of metrics of the whole loop.
const LOOP: &str = "pointsman";

impl Sheet {
    /// An empty one; all names begin with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self { own: Registry::with_prefix(prefix), of_loop: Registry::with_prefix(LOOP) }
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
        self.own.register(name, help, family);
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
        self.own.register(name, help, family);
    }

    /// Seconds, as a histogram or a moment in time.
    pub fn seconds(&mut self, name: &str, help: &str, metric: impl Metric) {
        self.own.register_with_unit(name, help, Unit::Seconds, metric);
    }

    /// Seconds of the whole loop: the name gets no prefix of a process.
    pub fn seconds_of_loop(&mut self, name: &str, help: &str, metric: impl Metric) {
        self.of_loop.register_with_unit(name, help, Unit::Seconds, metric);
    }

    /// In the format of OpenMetrics.
    pub fn text(self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode_registry(&mut text, &self.own);
        let _ = encode_registry(&mut text, &self.of_loop);
        let _ = encode_eof(&mut text);
        text
    }
}
