//! Moves spaces to the lanes of their new partitions after a topic has grown.
//!
//! With more partitions most spaces map to another one. Their state moves between lanes on the snapshots topic in one
//! transaction over all lanes, so either all spaces have moved or none; an instance that starts in between is rejected.
//! Unread messages would reach lanes that no longer hold their space, so everything must be read first.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use super::claim::{compare, lane_name};
use super::fleet::check_stopped;
use crate::engine::{is_of_lane, space_of};
use crate::event::Name;
use crate::snapshot::{LaneHead, SharedHead};
use crate::state::generations::difference;
use crate::state::{LaneStore, Records, Resumed, Retention};
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::homes::partition_of;
use crate::transport::kafka::outlet::Outgoing;
use crate::transport::kafka::positions;
use crate::transport::kafka::state::{self, Entries, Mirror};
use crate::transport::kafka::topics::check_partitions;
use crate::transport::kafka::transaction::{KafkaProducers, Outcome, Transactions};

/// Result of a repartitioning.
#[derive(Debug, PartialEq, Eq, serde::Serialize)]
pub struct Moved {
    /// Partitions before.
    pub before: usize,
    /// Partitions now.
    pub now: usize,
    /// Number of spaces.
    pub spaces: usize,
    /// Spaces that moved to another lane.
    pub moved: usize,
}

/// The state of a lane.
struct State {
    store: LaneStore<Mirror>,
    shared: SharedHead,
    head: LaneHead,
    records: Records,
}

/// Transactional ID of the one transaction over all lanes.
const NAME: &str = "repartition";

/// Maximum message size: all messages are parts of states.
const MESSAGE_BYTES: usize = 1_000_000;

/// Distributes all spaces over the current partitions. `accept_gap` permits unread messages. Calls `tell` with each lane
/// read and the number of lanes.
pub fn repartition(cluster: &Cluster, accept_gap: bool, mut tell: impl FnMut(i32, usize)) -> anyhow::Result<Moved> {
    check_stopped(cluster)?;
    let (now, _) = check_partitions(cluster)?;
    let lanes: Vec<i32> = (0..now as i32).collect();
    let heads = state::heads(cluster, &lanes)?;
    let before = heads.values().map(|head| head.partitions as usize).next();
    let before = before.ok_or_else(|| anyhow!("no lane has a state on the snapshots topic: nothing to move"))?;
    if before == now {
        let queries = &cluster.config.topics.queries;
        return Err(anyhow!(
            "the spaces are already distributed over the {now} partitions of {queries}: nothing to do"
        ));
    }
    let take_over = |name: &str| {
        Transactions::take_over(KafkaProducers::new(cluster, name, MESSAGE_BYTES, None), name, &Arc::default())
    };
    let mut whole = take_over(NAME)?;
    let (mut states, mut owners) = (Vec::new(), Vec::new());
    for lane in &lanes {
        // Fences a stale owner of the lane.
        owners.push(take_over(&lane_name(*lane))?);
        states.push(read(cluster, *lane)?);
        tell(*lane, lanes.len());
    }
    if !accept_gap {
        check_read(cluster, &states[..before])?;
    }
    let before_move: Vec<SharedHead> = states.iter().map(|state| state.shared.clone()).collect();
    let (messages, moved) = spread(&mut states)?;
    let attempted: Vec<_> = lanes
        .iter()
        .zip(&before_move)
        .zip(&states)
        .map(|((lane, before), state)| (*lane, before, &state.shared))
        .collect();
    let ask = &mut || Ok(compare(state::heads(cluster, &lanes)?, &attempted));
    if whole.deliver(messages, ask)? == Outcome::NotCommitted {
        whole.commit(ask)?;
    }
    Ok(Moved { before, now, ..moved })
}

fn read(cluster: &Cluster, lane: i32) -> anyhow::Result<State> {
    let topic = &cluster.config.topics.snapshots;
    let bad = |problem: String| Problem::BadState { lane: format!("{topic}/{lane}"), problem };
    let mirror = Mirror::open(topic, lane, state::read(cluster, lane, Entries::new(), 0)?)?;
    let mut store = LaneStore::new(mirror, &lane_name(lane), Retention::newest(1));
    let Resumed { snapshot: found, damaged } = store.resume()?;
    if let (None, Some(damage)) = (&found, damaged.first()) {
        return Err(bad(damage.to_string()).into());
    }
    let Some(found) = found else {
        return Ok(State { store, shared: SharedHead::default(), head: LaneHead::default(), records: Vec::new() });
    };
    let shared = SharedHead::open(&found.head).map_err(|error| bad(error.to_string()))?;
    let head = LaneHead::open(&shared.lane).map_err(|error| bad(error.to_string()))?;
    Ok(State { store, shared, head, records: found.records })
}

/// Fails if a lane has unread messages in its partitions.
fn check_read(cluster: &Cluster, states: &[State]) -> anyhow::Result<()> {
    let topics = &cluster.config.topics;
    let ids = cluster.topic_ids(&[&topics.queries, &topics.rewards])?;
    for (lane, state) in (0..).zip(states) {
        for topic in [&topics.queries, &topics.rewards] {
            let start = positions::at(cluster.watermarks(topic, lane)?.0);
            let position = state.head.merge.positions.get(&positions::name(topic, &ids, lane)).unwrap_or(&start);
            if let Some(offset) = positions::unread(cluster, topic, lane, position)? {
                return Err(anyhow!(
                    "{topic}/{lane} has unread messages from offset {offset} on: messages of spaces that move would become dead \
                     letters. Before adding partitions, stop the producers, then the fleet, and run `pointsman learn --once`. \
                     To accept the loss now, run `pointsman repartition --accept-gap`"
                ));
            }
        }
    }
    Ok(())
}

/// The messages that move every space to the lane of its current partition.
fn spread(states: &mut [State]) -> anyhow::Result<(Vec<Outgoing>, Moved)> {
    let number = states.len();
    let home = |space: &Name| partition_of(space, number) as usize;
    let mut records: Vec<Records> = vec![Vec::new(); number];
    let mut publications = vec![BTreeMap::new(); number];
    let mut homes = BTreeMap::<Name, (usize, usize)>::new();
    for (lane, state) in states.iter().enumerate() {
        for (key, value) in &state.records {
            if is_of_lane(key) {
                records[lane].push((key.clone(), value.clone()));
                continue;
            }
            let space = space_of(key).context("a record of the lane belongs to no space")?;
            records[home(&space)].push((key.clone(), value.clone()));
            let before = homes.insert(space.clone(), (lane, home(&space)));
            if before.is_some_and(|(other, _)| other != lane) {
                return Err(anyhow!(
                    "space {space} has shards in several lanes (spaces.{space}.shards): its requests would map to other lanes, so it \
                     cannot be repartitioned"
                ));
            }
        }
        for (space, publication) in &state.head.publications {
            publications[home(space)].insert(space.clone(), *publication);
        }
    }
    // Routers keep the highest epoch: no space may fall behind its published epoch.
    let epoch = states.iter().map(|state| state.head.epoch).max().unwrap_or(0);
    let configuration = states.iter().map(|state| &state.head.configuration).find(|text| !text.is_empty()).cloned();
    let mut messages = Vec::new();
    for ((state, records), publications) in states.iter_mut().zip(records).zip(publications) {
        (state.head.epoch, state.head.publications) = (epoch, publications);
        if state.head.configuration.is_empty() {
            state.head.configuration = configuration.clone().unwrap_or_default();
        }
        state.shared.instance = NAME.to_owned();
        (state.shared.partitions, state.shared.lane) = (number as u32, state.head.seal());
        state.shared.term += 1;
        let changes = difference(&state.records, &records);
        state.store.commit(&state.shared.seal(), &changes)?;
        messages.extend(state.store.store_mut().take_outbox());
    }
    let moved = homes.values().filter(|(from, to)| from != to).count();
    Ok((messages, Moved { before: 0, now: number, spaces: homes.len(), moved }))
}
