//! Reads a range of the topics, and converts its messages to lines of a file.
//!
//! A file has neither the timestamp of a record nor its headers. So that a replay of the lines has the same result, a line
//! differs from its message where it must: see [`Scribe::line_of`].

use std::borrow::Cow;
use std::ops::Range;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rdkafka::message::{BorrowedMessage, Message};
use serde::Serialize;
use serde_json::{Value, json};

use super::cluster::{Cluster, Problem};
use super::consumer::other_type;
use super::homes::Spread;
use super::positions::{Place, at, name};
use crate::config::{Settings, parse_time};
use crate::engine::Side;
use crate::event::Name;
use crate::wire::events::{Bad, Parser, QueryEvent, RewardEvent};

/// A position in all partitions of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The first message of this time, in milliseconds since 1970, or later.
    Time(i64),
    /// This offset, in every partition.
    Offset(u64),
}

impl FromStr for Mark {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mark = match text.strip_prefix("offset:") {
            Some(offset) => offset.parse().ok().map(Self::Offset),
            None => parse_time(text).map(Self::Time),
        };
        mark.ok_or_else(|| {
            "expected a time such as 2026-01-31T12:00:00Z or 1769860800000, or an offset such as offset:123".to_owned()
        })
    }
}

/// A range of positions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    /// The first message; by default the oldest.
    pub since: Option<Mark>,
    /// The first message after the range; by default the current end.
    pub until: Option<Mark>,
}

/// A range of a partition.
#[derive(Debug, Clone, PartialEq)]
pub struct Stretch {
    /// Its start.
    pub place: Place,
    /// Its end: the offset after its last message.
    pub end: u64,
}

impl Stretch {
    /// Its partition and offsets.
    pub fn range(&self) -> (i32, Range<u64>) {
        (self.place.partition, self.place.position.floor..self.end)
    }

    /// Number of offsets; there may be fewer messages.
    pub fn offsets(&self) -> u64 {
        self.end.saturating_sub(self.place.position.floor)
    }
}

/// The ranges of these sides' partitions for a span.
pub fn stretches(cluster: &Cluster, span: Span, sides: &[Side]) -> Result<Vec<Stretch>, Problem> {
    let topics: Vec<&str> = sides.iter().map(|side| topic(cluster, *side)).collect();
    let numbers = topics.iter().map(|topic| cluster.partitions(topic)).collect::<Result<Vec<_>, _>>()?;
    let ids = cluster.topic_ids(&topics)?;
    let mut all = Vec::new();
    for ((&side, topic), number) in sides.iter().zip(topics).zip(numbers) {
        for partition in 0..number as i32 {
            let watermarks = cluster.watermarks(topic, partition)?;
            let end = bound(cluster, topic, partition, span.until, watermarks, watermarks.1)?;
            let start = bound(cluster, topic, partition, span.since, watermarks, watermarks.0)?.min(end);
            let (name, position) = (name(topic, &ids, partition), at(start));
            all.push(Stretch { place: Place { side, topic: topic.to_owned(), partition, name, position }, end });
        }
    }
    Ok(all)
}

/// The end offsets for these partitions.
pub fn ends(cluster: &Cluster, until: Option<Mark>, places: Vec<Place>) -> Result<Vec<Stretch>, Problem> {
    let end = |place: Place| {
        let watermarks = cluster.watermarks(&place.topic, place.partition)?;
        let end = bound(cluster, &place.topic, place.partition, until, watermarks, watermarks.1)?;
        Ok(Stretch { place, end })
    };
    places.into_iter().map(end).collect()
}

fn topic(cluster: &Cluster, side: Side) -> &str {
    let topics = &cluster.config.topics;
    if side == Side::Query { &topics.queries } else { &topics.rewards }
}

fn bound(
    cluster: &Cluster,
    topic: &str,
    partition: i32,
    mark: Option<Mark>,
    (low, high): (u64, u64),
    default: u64,
) -> Result<u64, Problem> {
    let offset = match mark {
        None => default,
        Some(Mark::Offset(offset)) => offset,
        Some(Mark::Time(ms)) => cluster.offset_at(topic, partition, ms)?,
    };
    Ok(offset.clamp(low, high))
}

/// Number of lines that differ from their messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The timestamp of the record was added.
    pub timed: u64,
    /// Newlines between values became spaces.
    pub joined: u64,
    /// Dead letters that cannot be written as a line: kept as a base64 JSON string.
    pub wrapped: u64,
}

/// Converts messages to lines.
pub struct Scribe {
    parser: Parser,
    bytes_max: usize,
    ts_field: String,
    /// Maps spaces to partitions, where each has its own.
    spread: Option<Spread>,
    /// Changes so far.
    pub changed: Changed,
}

/// What of an event says where and when it is.
struct Key {
    ts_ms: i64,
    space: Name,
    request_id: String,
}

impl Scribe {
    /// By these settings; with the number of partitions, where each space has its own.
    pub fn new(settings: &Settings, partitions: Option<usize>) -> Self {
        let spread = partitions.map(|number| Spread::new(settings, number));
        Self {
            parser: Parser::new(settings),
            bytes_max: settings.events.bytes_max,
            ts_field: settings.events.fields.ts_ms.clone(),
            spread,
            changed: Changed::default(),
        }
    }

    /// The line of a message, without its end.
    pub fn line_of<'a>(&mut self, side: Side, message: &'a BorrowedMessage<'_>) -> Cow<'a, [u8]> {
        let (bytes, record_ms) = (message.payload().unwrap_or_default(), message.timestamp().to_millis());
        if other_type(message).is_some() || self.is_astray(side, message.partition(), bytes, record_ms) {
            return self.wrap(bytes);
        }
        self.line(side, bytes, record_ms)
    }

    /// Whether a good event is in the partition of another space.
    fn is_astray(&self, side: Side, partition: i32, bytes: &[u8], record_ms: Option<i64>) -> bool {
        let belongs = |spread: &Spread| {
            let Key { space, request_id, .. } = self.read(side, bytes, record_ms).ok()?;
            Some(spread.partition(&space, &request_id))
        };
        self.spread.as_ref().and_then(belongs).is_some_and(|expected| expected != partition)
    }

    /// The line with the same outcome as its message: the same event, or a dead letter.
    fn line<'a>(&mut self, side: Side, bytes: &'a [u8], record_ms: Option<i64>) -> Cow<'a, [u8]> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return self.wrap(bytes);
        }
        let newlines = bytes.contains(&b'\n');
        let ts_ms = match self.read(side, bytes, None) {
            // A newline within a string is no JSON; as a space it would be.
            Err(Bad::NotJson(_) | Bad::Oversized { .. }) if newlines => return self.wrap(bytes),
            Err(Bad::MissingField(field)) if field == self.ts_field => None,
            // It is bad whatever its time.
            Err(_) => Some(i64::MIN),
            Ok(Key { ts_ms, .. }) => Some(ts_ms),
        };
        // Only beside its record's time is it too far ahead.
        let ahead = record_ms.is_some() && ts_ms > record_ms;
        if ahead && self.read(side, bytes, record_ms).is_err() {
            return self.wrap(bytes);
        }
        let line = if newlines {
            self.changed.joined += 1;
            let joined = bytes.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte });
            Cow::Owned(joined.collect())
        } else {
            Cow::Borrowed(bytes)
        };
        match (ts_ms, record_ms) {
            (None, Some(record_ms)) => match with_time(&line, &self.ts_field, record_ms) {
                Some(timed) => {
                    self.changed.timed += 1;
                    if timed.len() > self.bytes_max {
                        tracing::warn!(
                            bytes = timed.len(),
                            "event exceeds events.bytes_max once its timestamp is added"
                        );
                    }
                    Cow::Owned(timed)
                }
                None => line,
            },
            _ => line,
        }
    }

    /// Time and space of a good event.
    fn read(&self, side: Side, bytes: &[u8], record_ms: Option<i64>) -> Result<Key, Bad> {
        Ok(match side {
            Side::Query => {
                let QueryEvent { ts_ms, space, request_id, .. } = self.parser.query(bytes, record_ms)?;
                Key { ts_ms, space, request_id }
            }
            Side::Reward => {
                let RewardEvent { ts_ms, space, request_id, .. } = self.parser.reward(bytes, record_ms)?;
                Key { ts_ms, space, request_id }
            }
        })
    }

    fn wrap(&mut self, bytes: &[u8]) -> Cow<'static, [u8]> {
        self.changed.wrapped += 1;
        Cow::Owned(format!("\"{}\"", STANDARD.encode(bytes)).into_bytes())
    }
}

/// An object with its time added; none if there is no place for it.
fn with_time(object: &[u8], field: &str, ms: i64) -> Option<Vec<u8>> {
    let tokens: Vec<String> =
        field.split('/').skip(1).map(|token| token.replace("~1", "/").replace("~0", "~")).collect();
    if let [token] = &tokens[..] {
        // At the end: of fields of one name, null the one, the last counts. All else stays as it is, to the byte.
        let end = object.iter().rposition(|&byte| byte == b'}')?;
        let mut timed = object[..end].to_vec();
        timed.extend_from_slice(format!(",{}:{ms}", json!(token)).as_bytes());
        timed.extend_from_slice(&object[end..]);
        return Some(timed);
    }
    let mut value: Value = serde_json::from_slice(object).ok()?;
    let mut place = &mut value;
    for token in tokens {
        if place.is_null() {
            *place = json!({});
        }
        place = place.as_object_mut()?.entry(token).or_insert(Value::Null);
    }
    *place = json!(ms);
    serde_json::to_vec(&value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn marks_are_times_or_offsets() {
        assert_eq!("offset:12".parse(), Ok(Mark::Offset(12)));
        assert_eq!("1769860800000".parse(), Ok(Mark::Time(1_769_860_800_000)));
        assert_eq!("2026-01-31T12:00:00Z".parse(), Ok(Mark::Time(1_769_860_800_000)));
        for bad in ["", "offset:", "offset:-1", "yesterday", "-5"] {
            assert!(bad.parse::<Mark>().is_err(), "{bad}");
        }
    }

    /// What a line comes to in a file is what its message came to.
    #[test]
    fn lines_come_to_what_messages_came_to() {
        let mut config = Config::default();
        config.events.bytes_max = 120;
        let settings = config.check().unwrap();
        let parser = Parser::new(&settings);
        let large = format!("{{\"request_id\":\"r\",\"ts_ms\":5,{}\"reward\":1}}", "\n".repeat(100));
        for (bytes, timed, joined, wrapped) in [
            (r#"{"request_id":"r","ts_ms":5,"reward":1}"#, 0, 0, 0),
            ("{\"request_id\":\"r\",\n\"ts_ms\":5,\r\n\"reward\":1}\n", 0, 1, 0),
            (r#"{"request_id":"r","reward":1} "#, 1, 0, 0),
            (r#"{"request_id":"r","ts_ms":null,"reward":1}"#, 1, 0, 0),
            ("{\"request_id\":\"r\",\n\"reward\":1}", 1, 1, 0),
            ("{\"request_id\":\"r\n\",\"ts_ms\":5,\"reward\":1}", 0, 0, 1),
            ("", 0, 0, 1),
            (" \n", 0, 0, 1),
            (&large, 0, 0, 1),
            (r#"{"request_id":"r","ts_ms":9999999,"reward":1}"#, 0, 0, 1),
            ("{oops", 0, 0, 0),
            (r#"{"request_id":"","reward":1}"#, 0, 0, 0),
            ("[1]", 0, 0, 0),
        ] {
            let mut scribe = Scribe::new(&settings, None);
            let line = scribe.line(Side::Reward, bytes.as_bytes(), Some(7)).into_owned();
            let expected = Changed { timed, joined, wrapped };
            assert!(!line.contains(&b'\n') && !line.iter().all(u8::is_ascii_whitespace), "{bytes:?}");
            assert_eq!(scribe.changed, expected, "{bytes:?}");
            assert!(expected != Changed::default() || line == bytes.as_bytes(), "{bytes:?}");
            let live = parser.reward(bytes.as_bytes(), Some(7)).ok();
            assert_eq!(parser.reward(&line, None).ok(), live, "{bytes:?}");
        }
    }

    #[test]
    fn an_event_may_be_in_the_partition_of_another_space() {
        let settings = Config::default().check().unwrap();
        let bytes = br#"{"request_id":"r","space":"shop","reward":1}"#;
        let home = super::super::homes::partition_of(&Name::try_from("shop").unwrap(), 6);
        for partition in 0..6 {
            let astray =
                |partitions| Scribe::new(&settings, partitions).is_astray(Side::Reward, partition, bytes, Some(7));
            assert_eq!((astray(Some(6)), astray(None)), (partition != home, false));
        }
    }

    #[test]
    fn times_are_put_where_they_are_looked_for() {
        for (object, field, expected) in [
            (r#"{"a":1}"#, "/t", r#"{"a":1,"t":7}"#),
            (r#"{"a":1}"#, "/a~1\"", r#"{"a":1,"a/\"":7}"#),
            (r#"{"a":1}"#, "/meta/t", r#"{"a":1,"meta":{"t":7}}"#),
            (r#"{"a":1,"meta":{"b":2}}"#, "/meta/t", r#"{"a":1,"meta":{"b":2,"t":7}}"#),
        ] {
            assert_eq!(with_time(object.as_bytes(), field, 7).unwrap(), expected.as_bytes());
        }
        assert_eq!(with_time(br#"{"meta":1}"#, "/meta/t", 7), None);
    }
}
