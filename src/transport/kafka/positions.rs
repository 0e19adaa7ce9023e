//! Start positions: those of a snapshot, or `transport.kafka.start` without one; and whether they still exist.
//!
//! Snapshots name a partition `kafka:<topic>#<topic id>/<partition>`, so that a recreated topic is not mistaken for the
//! one that was read.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::cluster::{Cluster, Problem};
use super::scan::read_to;
use crate::config::Start;
use crate::engine::Side;
use crate::merge::{MergeState, Position};

const PREFIX: &str = "kafka:";

/// A partition to read, and its start position.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// Its side.
    pub side: Side,
    /// Its topic.
    pub topic: String,
    /// Its number.
    pub partition: i32,
    /// Its name in snapshots.
    pub name: String,
    /// Position to resume from.
    pub position: Position,
}

/// A range of messages that is skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// Topic and partition.
    pub log: String,
    /// The first missing offset, and the one after the last.
    pub offsets: (u64, u64),
    /// Why.
    pub problem: Problem,
}

/// All partitions of both topics, or those of a `lane`, with their positions; and the accepted gaps.
pub fn resolve(
    cluster: &Cluster,
    state: &MergeState,
    lane: Option<i32>,
    accept_gap: bool,
) -> Result<(Vec<Place>, Vec<Gap>), Problem> {
    let topics = &cluster.config.topics;
    let (queries, rewards) = super::topics::check_partitions(cluster)?;
    let ids = cluster.topic_ids(&[&topics.queries, &topics.rewards])?;
    let begun = !state.positions.is_empty();
    if let Some(other) = state.positions.keys().find(|name| !name.starts_with(PREFIX)) {
        return Err(Problem::OtherLogs(other.clone()));
    }
    let mut unclaimed = state.positions.clone();
    let (mut places, mut gaps) = (Vec::new(), Vec::new());
    for (side, topic, number) in [(Side::Query, &topics.queries, queries), (Side::Reward, &topics.rewards, rewards)] {
        for partition in (0..number as i32).filter(|partition| lane.is_none_or(|lane| lane == *partition)) {
            let name = name(topic, &ids, partition);
            let (low, high) = cluster.watermarks(topic, partition)?;
            let position = match unclaimed.remove(&name) {
                Some(position) => match check(topic, partition, &position, low, high) {
                    None => position,
                    Some(problem) if accept_gap => {
                        gaps.push(Gap { log: short(topic, partition), offsets: (position.floor, low), problem });
                        at(low)
                    }
                    Some(problem) => return Err(problem),
                },
                // Added or recreated partitions are read from their beginning.
                None if begun => at(low),
                None => at(first(cluster, topic, partition, low, high)?),
            };
            places.push(Place { side, topic: topic.clone(), partition, name, position });
        }
    }
    for (name, position) in unclaimed {
        let log = shown(&name);
        let found = "the topic was recreated, renamed, or has fewer partitions".to_owned();
        let problem = Problem::Recreated { log: log.clone(), wanted: position.floor, found };
        if !accept_gap {
            return Err(problem);
        }
        gaps.push(Gap { log, offsets: (position.floor, position.floor), problem });
    }
    Ok((places, gaps))
}

/// Positions of partitions, by their names in snapshots.
pub fn of(places: &[Place]) -> BTreeMap<String, Position> {
    places.iter().map(|place| (place.name.clone(), place.position.clone())).collect()
}

/// The current ends of partitions.
pub fn ends(cluster: &Cluster, places: &[Place]) -> Result<Vec<u64>, Problem> {
    places.iter().map(|place| Ok(cluster.watermarks(&place.topic, place.partition)?.1)).collect()
}

/// The offset of the first unread message of a partition.
pub fn unread(cluster: &Cluster, topic: &str, partition: i32, position: &Position) -> Result<Option<u64>, Problem> {
    let (low, high) = cluster.watermarks(topic, partition)?;
    read_to(cluster, topic, [(partition, position.floor.max(low)..high)].into(), |offset, _| {
        if position.is_done(offset) { ControlFlow::Continue(()) } else { ControlFlow::Break(offset) }
    })
}

/// Fails if a topic was recreated while it is read. Succeeds if no broker answers.
pub fn check_ids(cluster: &Cluster, places: &[Place]) -> Result<(), Problem> {
    let topics = &cluster.config.topics;
    let Ok(ids) = cluster.topic_ids(&[&topics.queries, &topics.rewards]) else { return Ok(()) };
    let known = |place: &&Place| ids.get(&place.topic).is_some_and(|id| !id.is_empty());
    let changed = places.iter().filter(known).find(|place| name(&place.topic, &ids, place.partition) != place.name);
    match changed {
        Some(Place { topic, partition, position, .. }) => Err(Problem::Recreated {
            log: short(topic, *partition),
            wanted: position.floor,
            found: "the topic was deleted and recreated".to_owned(),
        }),
        None => Ok(()),
    }
}

fn check(topic: &str, partition: i32, position: &Position, low: u64, high: u64) -> Option<Problem> {
    let (log, wanted) = (short(topic, partition), position.floor);
    if wanted > high {
        return Some(Problem::Recreated { log, wanted, found: format!("it ends at offset {high}") });
    }
    (wanted < low).then_some(Problem::OffsetsLost { log, wanted, oldest: low })
}

/// Start offset of a partition that was never read.
fn first(cluster: &Cluster, topic: &str, partition: i32, low: u64, high: u64) -> Result<u64, Problem> {
    match cluster.config.start {
        Start::Earliest => Ok(low),
        Start::Latest => Ok(high),
        Start::At(ms) => cluster.offset_at(topic, partition, ms),
    }
}

/// A position with everything before `offset` done and nothing after it.
pub fn at(offset: u64) -> Position {
    Position { floor: offset, read: offset, ..Position::default() }
}

/// The name of a partition in snapshots.
pub fn name(topic: &str, ids: &BTreeMap<String, String>, partition: i32) -> String {
    let id = ids.get(topic).map_or("", String::as_str);
    format!("{PREFIX}{topic}#{id}/{partition}")
}

/// The name of another partition of the same topic.
pub fn sibling(name: &str, partition: i32) -> String {
    let (topic, _) = name.rsplit_once('/').unwrap_or((name, ""));
    format!("{topic}/{partition}")
}

/// Topic and partition of a name in snapshots.
pub fn parse(name: &str) -> Option<(&str, i32)> {
    let (topic, rest) = name.strip_prefix(PREFIX)?.rsplit_once('#')?;
    Some((topic, rest.rsplit_once('/')?.1.parse().ok()?))
}

fn shown(name: &str) -> String {
    parse(name).map_or_else(|| name.to_owned(), |(topic, partition)| short(topic, partition))
}

fn short(topic: &str, partition: i32) -> String {
    format!("{topic}/{partition}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_topic_and_partition() {
        let ids = [("a.b-c".to_owned(), "x_-1".to_owned())].into();
        let name = name("a.b-c", &ids, 12);
        assert_eq!((name.as_str(), parse(&name)), ("kafka:a.b-c#x_-1/12", Some(("a.b-c", 12))));
        assert_eq!(parse("queries/a.jsonl#0123"), None);
        assert_eq!(sibling(&name, 3), "kafka:a.b-c#x_-1/3");
    }

    #[test]
    fn what_is_gone_is_named() {
        let position = at(5);
        assert_eq!(check("q", 0, &position, 5, 5), None);
        assert_eq!(check("q", 0, &position, 0, 9), None);
        assert!(matches!(check("q", 0, &position, 6, 9), Some(Problem::OffsetsLost { wanted: 5, oldest: 6, .. })));
        assert!(matches!(check("q", 0, &position, 0, 4), Some(Problem::Recreated { wanted: 5, .. })));
    }
}
