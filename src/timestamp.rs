//! Times as text: RFC 3339 and the variants that data frames and databases write.

use chrono::{DateTime, NaiveDate, NaiveDateTime};

/// Layouts of a date with time and offset, beside RFC 3339.
const WITH_OFFSET: [&str; 2] = ["%Y-%m-%d %H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M:%S%.f%#z"];

/// Layouts of a date with time and without an offset, which is UTC.
const WITHOUT_OFFSET: [&str; 2] = ["%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f"];

/// Parses a time as text, in milliseconds since 1970. A time without an offset is UTC, a date alone its midnight.
pub fn parse(text: &str) -> Option<i64> {
    let text = text.trim();
    let with_offset = || WITH_OFFSET.iter().find_map(|layout| DateTime::parse_from_str(text, layout).ok());
    if let Some(time) = DateTime::parse_from_rfc3339(text).ok().or_else(with_offset) {
        return Some(time.timestamp_millis());
    }
    let in_utc = text.strip_suffix(" UTC").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let without = WITHOUT_OFFSET.iter().find_map(|layout| NaiveDateTime::parse_from_str(in_utc, layout).ok());
    let midnight = || NaiveDate::parse_from_str(text, "%Y-%m-%d").ok()?.and_hms_opt(0, 0, 0);
    without.or_else(midnight).map(|time| time.and_utc().timestamp_millis())
}

/// Writes milliseconds since 1970 as RFC 3339 in UTC; as the number, where the year is beyond what RFC 3339 can say.
pub fn format(ts_ms: i64) -> String {
    let is_in_range = |time: &DateTime<_>| (0..10_000).contains(&chrono::Datelike::year(time));
    match DateTime::from_timestamp_millis(ts_ms).filter(is_in_range) {
        Some(time) => time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true),
        None => ts_ms.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_layouts_are_read() {
        for text in [
            "2026-01-31T12:00:00Z",
            "2026-01-31T12:00:00.000Z",
            "2026-01-31T12:00:00+00:00",
            "2026-01-31T14:00:00.000000+02:00",
            "2026-01-31t12:00:00z",
            "2026-01-31 12:00:00",
            "2026-01-31 12:00:00Z",
            "2026-01-31 12:00:00 UTC",
            "2026-01-31 12:00:00.000000",
            "2026-01-31 14:00:00+02:00",
            "2026-01-31 14:00:00+02",
            "2026-01-31T14:00:00+0200",
            "2026-01-31T12:00:00",
            " 2026-01-31T12:00:00 ",
        ] {
            assert_eq!(parse(text), Some(1_769_860_800_000), "{text}");
        }
        assert_eq!(parse("2026-01-31"), Some(1_769_817_600_000));
        assert_eq!(parse("2026-01-31T12:00:00.123456Z"), Some(1_769_860_800_123));
        for text in ["", "now", "12:00:00", "2026-13-01", "31.01.2026", "2026-01-31T25:00:00Z", "1769860800000"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for ts_ms in [0, 1, 1_769_860_800_123, -1, 253_402_300_799_999] {
            assert_eq!(parse(&format(ts_ms)), Some(ts_ms));
        }
        assert_eq!(format(1_769_860_800_000), "2026-01-31T12:00:00.000Z");
        assert_eq!(format(i64::MAX), i64::MAX.to_string());
    }
}
