//! Why events were rejected.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::engine::Side;
use crate::event::excerpt;
use crate::transport::Letter;

/// How many events were rejected for each reason, with the first of them as an example. Bounded: there are few reasons.
#[derive(Debug, Clone, Default)]
pub struct Reasons(BTreeMap<(Side, &'static str), Reason>);

/// The events of a side that were rejected for the same reason.
#[derive(Debug, Clone)]
pub struct Reason {
    /// Query or reward.
    pub side: Side,
    /// Reason code.
    pub code: &'static str,
    /// Number of events.
    pub number: u64,
    /// What is wrong with the first one.
    pub detail: String,
    /// Source position of the first one.
    pub place: Value,
    /// The beginning of the first one.
    pub event: String,
    /// The keys of the first one, if it is a JSON object.
    pub keys: Vec<String>,
}

/// Longest excerpt of an event, in bytes.
const EVENT_BYTES_MAX: usize = 120;
/// Limits on the keys that are kept.
const KEYS_MAX: usize = 24;
const KEY_BYTES_MAX: usize = 64;

impl Reasons {
    /// Counts a rejected event; returns the number of events with its reason.
    pub fn add(&mut self, letter: &Letter) -> u64 {
        let (side, code) = (letter.letter.side, letter.letter.bad.reason());
        let reason = self.0.entry((side, code)).or_insert_with(|| Reason {
            side,
            code,
            number: 0,
            detail: letter.detail(),
            place: letter.place.clone(),
            event: beginning(&letter.letter.bytes),
            keys: keys(&letter.letter.bytes),
        });
        reason.number += 1;
        reason.number
    }

    /// All reasons, ordered by side and code.
    pub fn all(&self) -> impl Iterator<Item = &Reason> {
        self.0.values()
    }

    /// The reasons of a side, or of both, the most frequent first.
    pub fn top(&self, side: Option<Side>) -> Vec<&Reason> {
        let mut top: Vec<&Reason> = self.all().filter(|reason| side.is_none_or(|side| reason.side == side)).collect();
        top.sort_by_key(|reason| std::cmp::Reverse(reason.number));
        top
    }

    /// Number of rejected events of a side.
    pub fn number(&self, side: Side) -> u64 {
        self.top(Some(side)).iter().map(|reason| reason.number).sum()
    }
}

impl Reason {
    /// The source position of the example in words: `queries.jsonl, line 3`.
    pub fn position(&self) -> String {
        let Value::Object(place) = &self.place else { return String::new() };
        let part = |key: &str| {
            let text = match place.get(key)? {
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            Some(if key == "source" { text } else { format!("{key} {text}") })
        };
        let is_file = place.contains_key("line");
        let keys = if is_file { &["source", "line"][..] } else { &["source", "partition", "offset"] };
        keys.iter().filter_map(|key| part(key)).collect::<Vec<_>>().join(", ")
    }
}

fn beginning(bytes: &[u8]) -> String {
    // Cut first: an event may have megabytes.
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * EVENT_BYTES_MAX)]);
    match excerpt(text.trim_end(), EVENT_BYTES_MAX) {
        short if short.len() == text.trim_end().len() => short.into_owned(),
        long => long.rsplit_once("...").map_or(long.to_string(), |(start, _)| format!("{start}...")),
    }
}

fn keys(bytes: &[u8]) -> Vec<String> {
    let object: BTreeMap<String, serde::de::IgnoredAny> = serde_json::from_slice(bytes).unwrap_or_default();
    object.into_keys().filter(|key| key.len() <= KEY_BYTES_MAX).take(KEYS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letters::Recording;
    use crate::engine::DeadLetter;
    use crate::wire::events::Bad;
    use serde_json::json;

    fn letter(side: Side, bad: Bad, bytes: &[u8], place: Value) -> Letter {
        let letter = DeadLetter { side, bytes: bytes.to_vec(), bad, place: None, recording: Recording::Counted };
        Letter { letter, place, origin: None, time_ms: 0 }
    }

    #[test]
    fn the_most_frequent_reason_comes_first_with_its_first_event() {
        let mut reasons = Reasons::default();
        let file = |line: u64| json!({"source": "q.jsonl", "line": line, "offset": 100 * line});
        reasons.add(&letter(Side::Query, Bad::ZeroVector, b"{\"b\":1,\"a\":[1,2]}", file(3)));
        for line in 4..6 {
            let long = "x".repeat(1000);
            reasons.add(&letter(Side::Query, Bad::NotJson("expected value".into()), long.as_bytes(), file(line)));
        }
        let kafka = json!({"source": "rewards", "partition": 2, "offset": 7, "log": "kafka:rewards"});
        reasons.add(&letter(Side::Reward, Bad::ZeroVector, b"{}", kafka));
        let top = reasons.top(None);
        assert_eq!(top.iter().map(|reason| (reason.code, reason.number)).collect::<Vec<_>>()[0], ("not-json", 2));
        assert_eq!(top[0].position(), "q.jsonl, line 4");
        assert_eq!(top[0].event, format!("{}...", "x".repeat(EVENT_BYTES_MAX)));
        let zero = reasons.top(Some(Side::Query))[1];
        assert_eq!((zero.keys.join(" "), zero.event.as_str()), ("a b".to_owned(), "{\"b\":1,\"a\":[1,2]}"));
        assert_eq!(reasons.top(Some(Side::Reward))[0].position(), "rewards, partition 2, offset 7");
        assert_eq!((reasons.number(Side::Query), reasons.number(Side::Reward)), (3, 1));
    }
}
