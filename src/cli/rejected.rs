//! What a command that reads logs says about rejected events, and when it fails because of them.

use std::io::BufRead;
use std::path::Path;

use anyhow::anyhow;
use serde_json::Value;

use super::Failure;
use super::logging::escape;
use super::output;
use crate::engine::{Counts, Side};
use crate::telemetry::{Reason, Reasons};
use crate::transport::file;
use crate::transport::table::Format;

/// A command that reads a log stops when that many events at its beginning are all rejected.
const FIRST_EVENTS: u64 = 1000;

/// Reasons that are listed.
const LISTED: usize = 3;

/// The first events of every log: whether any of them is usable.
#[derive(Default)]
pub struct FirstEvents(Vec<Seen>);

#[derive(Default, Clone)]
struct Seen {
    is_usable: bool,
    rejected: u64,
    /// The last line that was rejected.
    line: u64,
}

impl FirstEvents {
    /// Counts an event of a log, which was rejected in this line (0 where there are no lines) or was not. Returns whether
    /// the log begins with a thousand rejected lines. A usable event between them may come later, since it waits for the
    /// events before it.
    pub fn are_all_rejected(&mut self, log: usize, rejected: Option<u64>) -> bool {
        if self.0.len() <= log {
            self.0.resize(log + 1, Seen::default());
        }
        let seen = &mut self.0[log];
        let Some(line) = rejected.filter(|_| !seen.is_usable) else {
            seen.is_usable = true;
            return false;
        };
        seen.rejected += 1;
        seen.line = seen.line.max(line);
        seen.rejected >= FIRST_EVENTS && (1..=seen.rejected).contains(&seen.line)
    }
}

/// The error of a log whose first events were all rejected; `place` is where the last of them is.
pub fn hopeless(reasons: &Reasons, place: &Value) -> anyhow::Error {
    let of_log = |reason: &&Reason| reason.place["source"] == place["source"];
    let all = reasons.top(None);
    let own: Vec<&Reason> = all.iter().copied().filter(of_log).collect();
    let shown = if own.is_empty() { all } else { own };
    let log = place["source"].as_str().unwrap_or("a log");
    anyhow!("the first {FIRST_EVENTS} events of {log} were all rejected:\n{}", explained(&shown))
}

/// Reports rejected events to standard error. Fails if all queries or all rewards were rejected.
pub fn conclude(reasons: &Reasons, counts: &Counts, dead_letters: Option<&Path>) -> Result<(), Failure> {
    check_usable(reasons, counts)?;
    if let Some(mut warning) = warning(reasons, counts) {
        warning[0] = format!("pointsman: warning: {}:", warning[0]);
        warning.extend(dead_letters.map(|path| format!("  recorded in {}", path.display())));
        output::report(&warning.iter().map(|line| escape(line)).collect::<Vec<_>>().join("\n"));
    }
    Ok(())
}

/// Fails if all queries or all rewards were rejected.
pub fn check_usable(reasons: &Reasons, counts: &Counts) -> Result<(), Failure> {
    for (side, read, dead) in sides(counts) {
        let own = reasons.top(Some(side));
        if dead == read && !own.is_empty() {
            return Err(Failure::Run(anyhow!("none of the {read} {} are usable:\n{}", name(side), explained(&own))));
        }
    }
    Ok(())
}

/// A warning in lines, if any events were rejected: how many, and why.
pub fn warning(reasons: &Reasons, counts: &Counts) -> Option<Vec<String>> {
    let part = |(side, read, dead): (Side, u64, u64)| match reasons.number(side) {
        0 => None,
        // The counts of a store go back further than this run.
        number if number < dead => Some(format!("{number} {}", name(side))),
        number => Some(format!("{number} of {read} {}", name(side))),
    };
    let parts: Vec<String> = sides(counts).into_iter().filter_map(part).collect();
    let title = format!("{} were rejected", parts.join(" and "));
    (!parts.is_empty()).then(|| [vec![title], list(&reasons.top(None))].concat())
}

/// Events read and rejected of both sides.
fn sides(counts: &Counts) -> [(Side, u64, u64); 2] {
    [(Side::Query, counts.queries(), counts.queries_dead), (Side::Reward, counts.rewards(), counts.rewards_dead)]
}

fn name(side: Side) -> &'static str {
    match side {
        Side::Query => "queries",
        Side::Reward => "rewards",
    }
}

/// The most frequent reasons, each with its first event, and what to do about the first one.
fn explained(reasons: &[&Reason]) -> String {
    let mut lines = list(reasons);
    lines.extend(reasons.first().map(|reason| remedy(reason)));
    lines.push(
        "`pointsman init FILE..` recognises the layout of logs and writes a configuration, `pointsman doctor` checks one"
            .to_owned(),
    );
    lines.join("\n")
}

/// The most frequent reasons, each with its first event.
fn list(reasons: &[&Reason]) -> Vec<String> {
    let line = |reason: &&Reason| {
        let Reason { code, number, detail, event, .. } = reason;
        // Whatever the event holds, it does not break the line.
        [
            format!("  {number}x {code}: {}", escape(detail)),
            format!("    {}: {}", escape(&reason.position()), escape(event)),
        ]
    };
    let mut lines: Vec<String> = reasons.iter().take(LISTED).flat_map(line).collect();
    if reasons.len() > LISTED {
        let number: u64 = reasons[LISTED..].iter().map(|reason| reason.number).sum();
        lines.push(format!("  {number}x for {} more reasons", reasons.len() - LISTED));
    }
    lines
}

/// What to do about events that are rejected for a reason.
pub fn remedy(reason: &Reason) -> String {
    let path = Path::new(reason.place["source"].as_str().unwrap_or_default());
    match reason.code {
        "not-json" => not_json(&reason.event, path),
        "missing-field" | "mistyped-field" => {
            let section = match reason.side {
                Side::Query => "events.fields",
                Side::Reward => "events.reward_fields",
            };
            let (has, keys) = match Format::of(path) {
                Format::Json => ("the event has the fields", reason.keys.clone()),
                _ => ("the table has the columns", columns(path)),
            };
            match keys.as_slice() {
                [] => format!("map the fields of the log in [{section}]"),
                keys => format!("{has} {}: map them in [{section}]", escape(&keys.join(", "))),
            }
        }
        "missing-propensities" => "log the probabilities that models were drawn with, or state what they were with \
                                   learner.declared_propensities or learner.missing_propensities"
            .to_owned(),
        "wrong-dimension" => "set learner.dim to the dimension of the embeddings that were logged".to_owned(),
        "future-time" => "check the unit of times: events.time_unit".to_owned(),
        code => format!("docs/events.md says what to do about {code}"),
    }
}

/// What a file probably is whose lines are not JSON objects.
fn not_json(event: &str, path: &Path) -> String {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("the file");
    let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
    let is_header = |separator: char| event.matches(separator).count() >= 2 && !event.starts_with(['{', '[', '"']);
    if event.starts_with("PAR1") {
        format!("{name} is a Parquet file: rename it to {stem}.parquet")
    } else if event.starts_with("\u{1f}\u{fffd}") {
        format!("{name} is compressed by gzip: rename it to end in .gz")
    } else if event.starts_with("(\u{fffd}/\u{fffd}") {
        format!("{name} is compressed by zstd: rename it to end in .zst")
    } else if event.starts_with('[') {
        format!("{name} holds a JSON array: write one object per line, for example with jq -c '.[]'")
    } else if event.starts_with('{') {
        "write each event as one JSON object on a line of its own, for example with jq -c .".to_owned()
    } else if is_header(',') || is_header(';') || is_header('\t') {
        format!("{name} looks like CSV: rename it to {stem}.csv")
    } else {
        "logs are JSON lines (.jsonl), CSV (.csv) or Parquet (.parquet), recognised by the name of the file".to_owned()
    }
}

/// The columns of a table, as far as its first row has them.
fn columns(path: &Path) -> Vec<String> {
    let first = || {
        let mut line = Vec::new();
        file::rows(path).ok()?.read_until(b'\n', &mut line).ok()?;
        let row: serde_json::Map<String, Value> = serde_json::from_slice(&line).ok()?;
        Some(row.into_iter().map(|(name, _)| name).take(24).collect())
    };
    first().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_given_up_when_its_first_thousand_events_are_all_rejected() {
        let mut first = FirstEvents::default();
        let rejects = |first: &mut FirstEvents, log, lines: std::ops::Range<u64>| {
            lines.into_iter().position(|line| first.are_all_rejected(log, Some(line)))
        };
        assert_eq!(rejects(&mut first, 1, 1..2000), Some(999));
        assert!(!first.are_all_rejected(0, None));
        assert_eq!(rejects(&mut first, 0, 2..2000), None, "one was usable");
        assert_eq!(rejects(&mut first, 2, 2..2000), None, "one before them is still to come");
        assert_eq!(rejects(&mut first, 7, 1..500), None);
        assert_eq!(rejects(&mut first, 7, 501..2000), None, "one in between is still to come");
        assert!((0..2000).all(|_| !first.are_all_rejected(3, Some(0))), "a topic has no lines");
    }

    #[test]
    fn the_remedy_names_what_the_file_is() {
        for (event, expected) in [
            ("id,query,model", "logs/q.jsonl looks like CSV: rename it to q.csv"),
            ("id;query;model", "rename it to q.csv"),
            ("PAR1\u{15}\u{4}", "Parquet"),
            ("[{\"a\":1},", "JSON array"),
            ("{", "one JSON object on a line"),
            ("hello", "recognised by the name"),
        ] {
            let remedy = not_json(event, Path::new("logs/q.jsonl"));
            assert!(remedy.contains(expected.trim_start_matches("logs/")), "{event}: {remedy}");
        }
    }
}
