//! A set of metrics as of one moment, as text.

use std::collections::BTreeSet;
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

/// Texts of several sheets as one. A family that several have appears once, with the series of all of them; of two series
/// with the same labels the first counts.
pub fn join(texts: &[String]) -> String {
    let mut families: Vec<(&str, BTreeSet<&str>, String)> = Vec::new();
    for text in texts {
        let mut at = None;
        for line in text.lines().filter(|line| *line != END) {
            let about = ["# HELP ", "# TYPE ", "# UNIT "].iter().find_map(|kind| line.strip_prefix(kind));
            if let Some(name) = about.and_then(|about| about.split(' ').next()) {
                at = families.iter().position(|(known, ..)| *known == name).or_else(|| {
                    families.push((name, BTreeSet::new(), String::new()));
                    Some(families.len() - 1)
                });
            }
            let Some((_, seen, family)) = at.map(|at| &mut families[at]) else { continue };
            let key = if about.is_some() { line } else { line.rsplit_once(' ').map_or(line, |(series, _)| series) };
            if seen.insert(key) {
                family.extend([line, "\n"]);
            }
        }
    }
    let text: String = families.into_iter().map(|(.., family)| family).collect();
    text + END + "\n"
}

/// Last line of a text.
const END: &str = "# EOF";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_texts_have_each_family_and_each_series_once() {
        let sheet = |prefix: &str, shared: &str, number: u64| {
            let mut sheet = Sheet::new("p");
            let row = |side: &str| vec![("side".to_owned(), side.to_owned())];
            sheet.counters(prefix, prefix, [(row("any"), number)]);
            sheet.gauges("shared", "Shared", [(row(shared), number), (row("same"), number)]);
            sheet.text()
        };
        let all = join(&[sheet("router", "r", 1), sheet("learner", "l", 2)]);
        let count = |part: &str| all.matches(part).count();
        assert_eq!((count("# TYPE p_shared gauge"), count("# EOF"), count("# TYPE")), (1, 1, 3), "{all}");
        for series in ["p_router_total{side=\"any\"} 1", "p_learner_total{side=\"any\"} 2", "p_shared{side=\"l\"} 2"] {
            assert_eq!(count(series), 1, "{all}");
        }
        assert_eq!((count("p_shared{side=\"same\"} 1"), count("p_shared{side=\"same\"} 2")), (1, 0), "{all}");
        assert!(all.ends_with("# EOF\n"));
        let alone = sheet("router", "r", 1);
        assert_eq!(join(std::slice::from_ref(&alone)), alone);
    }
}
