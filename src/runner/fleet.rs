//! The daemon's loop where many instances share the lanes.
//!
//! This thread owns all lanes of the instance. The polling thread asks it to open assigned lanes and to close revoked
//! ones; it answers between two rounds of events. A revoked lane is closed with a last snapshot. A lost lane, which another
//! instance may own already, is dropped: the new owner resumes from the last committed snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::follow::{CHECK_EVERY, IDLE, Outcome, Run, Teller, check_lanes, check_stopped, finish, tell_kafka};
use super::lane::{Claim, Desk, Opened, lane_name, lane_path};
use super::merger::{Merger, Merging};
use super::{Runner, Stepped};
use crate::engine::Totals;
use crate::event::Name;
use crate::router::Params;
use crate::store;
use crate::telemetry::News;
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::consumer::{Ending, Membership, Partition, Reader, Rebalance};
use crate::transport::kafka::homes::{Spread, partition_of};
use crate::transport::kafka::outlet::KafkaOutlet;
use crate::transport::kafka::params::ParamsTopic;
use crate::transport::kafka::positions::{self, Place};
use crate::transport::kafka::standby::Standby;
use crate::transport::kafka::{state, topics};
use crate::wire::events::Parser;

/// Number of lanes claimed concurrently.
const CLAIMS: usize = 8;

impl Run<'_> {
    /// Runs the lanes that the group assigns; with `--once` all lanes, alone.
    pub(super) fn follow_lanes(&self, cluster: &Cluster) -> anyhow::Result<Option<Outcome>> {
        let Some(mut fleet) = self.open_patiently(|| Fleet::new(self, cluster))? else { return Ok(None) };
        if self.once {
            fleet.run_once()?;
            let runners = std::mem::take(&mut fleet.lanes).into_values().map(|lane| lane.runner).collect();
            let outcome = finish(runners)?;
            self.settings.sharded().into_keys().try_for_each(|space| fleet.merging(space).once())?;
            return Ok(Some(outcome));
        }
        fleet.run_on()?;
        Ok(Some(Outcome { engines: Vec::new(), out_of_order: 0 }))
    }
}

/// The lanes of this instance.
struct Fleet<'a> {
    run: &'a Run<'a>,
    cluster: &'a Cluster,
    desk: Desk<'a>,
    lanes: BTreeMap<i32, Lane>,
    /// Lanes of other instances whose local log of applied requests may hold uncommitted lines.
    unsettled: BTreeSet<i32>,
    /// Spaces whose shards this instance merges.
    mergers: BTreeMap<Name, Merger>,
    hand_overs: u64,
}

/// A pair of partitions.
struct Lane {
    runner: Runner<Partition>,
    places: Vec<Place>,
    /// Its logs in the merge.
    logs: Vec<usize>,
    give_up: Arc<AtomicBool>,
}

impl<'a> Fleet<'a> {
    fn new(run: &'a Run<'a>, cluster: &'a Cluster) -> anyhow::Result<Self> {
        let (partitions, _) = topics::check_partitions(cluster)?;
        let (message_bytes, limits) = run.runtime.block_on(async {
            topics::check_lanes(cluster, run.settings, partitions).await?;
            let message_bytes = topics::check_params(cluster, run.settings).await?;
            Ok::<_, Problem>((message_bytes, topics::letter_limits(cluster, run.settings).await))
        })?;
        let all = 0..partitions as i32;
        let heads = state::heads(cluster, &all.clone().collect::<Vec<i32>>())?;
        let config = run.config;
        let store = run.open_store()?;
        let instance =
            store::instance(&config.store.dir).context("cannot read or write the instance ID in store.dir")?;
        check_lanes(&store, |lane| all.clone().any(|known| lane == lane_name(known)))?;
        let audit = config.audit.path();
        let is_there = |lane: &i32| audit.as_deref().is_some_and(|path| lane_path(path, *lane).exists());
        let unsettled = all.filter(is_there).collect();
        let reader = Arc::new(OnceLock::new());
        let (settings, cadence) = (run.settings, &config.snapshot);
        let message_bytes = message_bytes.max(settings.events.bytes_max + (64 << 10));
        let (kafka, facts) = (&cluster.config, run.status.facts());
        let standby = if kafka.standby && !run.once {
            Some(Standby::start(cluster, partitions, kafka.standby_bytes_max)?)
        } else {
            None
        };
        let desk = Desk {
            cluster,
            settings,
            cadence,
            store,
            instance,
            partitions,
            audit,
            message_bytes,
            limits,
            reader,
            standby,
            facts,
            retry: run.retry(),
        };
        heads.values().try_for_each(|head| desk.check_partitions(head))?;
        Ok(Self { run, cluster, desk, lanes: BTreeMap::new(), unsettled, mergers: BTreeMap::new(), hand_overs: 0 })
    }

    /// Runs all lanes up to their current end, without other members.
    fn run_once(&mut self) -> anyhow::Result<()> {
        check_stopped(self.cluster)?;
        let all: Vec<i32> = (0..self.desk.partitions as i32).collect();
        self.open(&all)?;
        let places: Vec<Place> = self.lanes.values().flat_map(|lane| lane.places.clone()).collect();
        let ends = positions::ends(self.cluster, &places)?;
        let reader = self.read(&places, &Membership::Alone, |i| Ending::Until(ends[i]))?;
        while self.run.goes_on() {
            let (events, ended) = self.step(&reader)?;
            if ended {
                break;
            }
            self.wake(reader.wait(if events > 0 { Duration::ZERO } else { IDLE }));
        }
        Ok(())
    }

    /// Runs the assigned lanes until it is stopped.
    fn run_on(&mut self) -> anyhow::Result<()> {
        self.settle();
        let (owner, inbox) = channel();
        let membership = Membership::Fleet { instance: self.desk.instance.clone(), owner };
        let idle = self.idle();
        let reader = self.read(&[], &membership, |_| idle)?;
        tracing::info!(brokers = self.cluster.config.brokers, instance = self.desk.instance, "learning");
        self.serve(&reader, &inbox)?;
        let counts = Totals::of(self.lanes.values().map(|lane| &lane.runner.engine)).counts;
        let lanes: Vec<i32> = self.lanes.keys().copied().collect();
        self.mergers.clear();
        self.close(&lanes, false)?;
        tracing::info!(?lanes, applied = counts.applied, "stopped");
        // From here on the polling thread waits for no answer.
        drop(inbox);
        self.settle();
        Ok(())
    }

    fn serve(&mut self, reader: &Arc<Reader>, inbox: &Receiver<Rebalance>) -> anyhow::Result<()> {
        let run = self.run;
        let (mut teller, mut checked) = (Teller::new(run.status), Instant::now());
        while run.goes_on() {
            while let Ok(rebalance) = inbox.try_recv() {
                self.rebalance(reader, rebalance)?;
            }
            if checked.elapsed() >= CHECK_EVERY {
                self.check()?;
                checked = Instant::now();
            }
            run.tell_ready(reader);
            let (events, _) = self.step(reader)?;
            let tell = |news: &mut News| {
                tell_kafka(news, reader, self.cluster, self.lanes.values().map(|lane| &lane.runner));
                (news.lanes, news.hand_overs) = (self.lanes.keys().copied().collect(), self.hand_overs);
            };
            let runners = self.lanes.values().map(|lane| &lane.runner);
            if events > 0 {
                teller.events(runners, events, tell);
            } else {
                teller.tell(runners, tell);
            }
            let wait = if events > 0 { Duration::ZERO } else { IDLE };
            self.wake(reader.wait(wait));
        }
        Ok(())
    }

    fn rebalance(&mut self, reader: &Reader, rebalance: Rebalance) -> anyhow::Result<()> {
        let begun = Instant::now();
        let (what, lanes, done) = match rebalance {
            Rebalance::Given { lanes, done } => {
                let run = self.run;
                match run.open_patiently(|| self.open(&lanes)) {
                    Err(error) if is_fenced(&error) => self.rejoin(reader, &lanes),
                    other => drop(other?),
                }
                for lane in &lanes {
                    self.attach(*lane, |place, idle| reader.open(place, idle));
                }
                ("lanes opened", lanes, done)
            }
            Rebalance::Taken { lanes, lost, done } => {
                self.close(&lanes, lost)?;
                (if lost { "lanes lost" } else { "lanes released" }, lanes, done)
            }
        };
        self.merge_shards()?;
        // The polling thread waits for this, unless it has stopped.
        let _ = done.send(());
        tracing::info!(?lanes, ms = begun.elapsed().as_millis(), "{what}");
        self.settle();
        Ok(())
    }

    /// Takes over lanes and takes the first snapshot of each.
    fn open(&mut self, lanes: &[i32]) -> anyhow::Result<()> {
        if let Some(lane) = lanes.iter().find(|lane| **lane >= self.desk.partitions as i32) {
            let (before, now) = (self.desk.partitions, *lane as usize + 1);
            let topic = self.cluster.config.topics.queries.clone();
            return Err(Problem::MorePartitions { topic, before, now }.into());
        }
        let mut published: Option<Vec<Params>> = None;
        let cluster = self.cluster;
        let mut ask = || {
            if published.is_none() {
                published = Some(ParamsTopic::open(cluster)?.newest()?);
            }
            Ok(published.clone().unwrap_or_default())
        };
        for lanes in lanes.chunks(CLAIMS) {
            for (lane, claim) in claim(&self.desk, lanes)? {
                // After a late answer to a rebalance the lane may be open already.
                self.drop_lane(lane);
                let opened = self.desk.open(lane, claim, &mut ask)?;
                self.begin(lane, opened)?;
                self.unsettled.remove(&lane);
                self.hand_overs += 1;
            }
        }
        Ok(())
    }

    fn begin(&mut self, lane: i32, opened: Opened) -> anyhow::Result<()> {
        let Opened { mut runner, mut state, is_published, give_up } = opened;
        let (places, gaps) = positions::resolve(self.cluster, &state, Some(lane), self.run.accept_gap)?;
        if !gaps.is_empty() {
            KafkaOutlet::new(self.cluster, self.desk.message_bytes, self.desk.limits)?.note_gaps(&gaps)?;
        }
        state.positions = positions::of(&places);
        if is_published { runner.begin_quietly(state) } else { runner.begin(state) }?;
        self.lanes.insert(lane, Lane { runner, places, logs: Vec::new(), give_up });
        Ok(())
    }

    /// Adds the logs of a lane to its merge.
    fn attach(&mut self, lane: i32, log: impl Fn(&Place, Ending) -> Partition) {
        let idle = self.idle();
        if let Some(lane) = self.lanes.get_mut(&lane) {
            for place in &lane.places {
                let (name, position) = (place.name.clone(), Some(place.position.clone()));
                lane.logs.push(lane.runner.merge.add(name, log(place, idle), position, None));
            }
        }
    }

    /// Releases lanes; lost lanes are dropped.
    fn close(&mut self, lanes: &[i32], lost: bool) -> anyhow::Result<()> {
        let mut closing: Vec<(i32, Lane)> =
            lanes.iter().filter_map(|lane| Some((*lane, self.lanes.remove(lane)?))).collect();
        for (_, lane) in &mut closing {
            if lost {
                lane.give_up.store(true, Ordering::Relaxed);
            } else {
                // Closing the lane reports the error.
                let _ = lane.runner.snapshot();
            }
        }
        for (key, mut lane) in closing {
            if let Some(standby) = &self.desk.standby {
                standby.give_back(key);
            }
            match lane.runner.close() {
                Err(error) if lost || is_fenced(&error) => {
                    self.unsettled.insert(key);
                    tracing::warn!(lane = key, error = format!("{error:#}"), "dropped lane");
                }
                other => other?,
            }
        }
        Ok(())
    }

    fn drop_lane(&mut self, lane: i32) {
        // A lost lane is dropped regardless of its errors.
        let _ = self.close(&[lane], true);
    }

    /// Processes a round of events: returns how many, and whether all lanes are at their end.
    fn step(&mut self, reader: &Reader) -> anyhow::Result<(u64, bool)> {
        let (mut events, mut ended, mut fenced) = (0, true, Vec::new());
        for (key, lane) in &mut self.lanes {
            match lane.step() {
                Ok((taken, last)) => {
                    events += taken;
                    ended &= last == Some(Stepped::End);
                }
                Err(error) if is_fenced(&error) && !self.run.once => fenced.push(*key),
                Err(error) => return Err(error),
            }
        }
        if !fenced.is_empty() {
            self.rejoin(reader, &fenced);
        }
        Ok((events, ended))
    }

    /// Drops lanes that another instance has taken over, and rejoins the group.
    fn rejoin(&mut self, reader: &Reader, fenced: &[i32]) {
        tracing::warn!(lanes = ?fenced, "another instance took over lanes; rejoining the group");
        fenced.iter().for_each(|lane| self.drop_lane(*lane));
        reader.rejoin();
    }

    fn wake(&mut self, news: bool) {
        if news {
            for lane in self.lanes.values_mut() {
                lane.logs.iter().for_each(|log| lane.runner.merge.wake(*log));
            }
        }
    }

    fn check(&mut self) -> anyhow::Result<()> {
        let places: Vec<Place> = self.lanes.values().flat_map(|lane| lane.places.clone()).collect();
        positions::check_ids(self.cluster, &places)?;
        let (topic, before) = (&self.cluster.config.topics.queries, self.desk.partitions);
        // Ignored while no broker answers.
        if let Ok(now) = self.cluster.partitions(topic)
            && now != before
        {
            return Err(Problem::MorePartitions { topic: topic.clone(), before, now }.into());
        }
        self.settle();
        Ok(())
    }

    /// Truncates logs of applied requests to their committed length, for lanes that other instances took over. Retries
    /// later if the length is unknown.
    fn settle(&mut self) {
        let lanes: Vec<i32> = self.unsettled.iter().filter(|lane| !self.lanes.contains_key(lane)).copied().collect();
        if lanes.is_empty() || self.desk.audit.is_none() {
            return;
        }
        let settled = state::heads(self.cluster, &lanes).map_err(anyhow::Error::from).and_then(|heads| {
            heads.iter().try_for_each(|(lane, head)| {
                if self.desk.settle(*lane, head)? {
                    self.unsettled.remove(lane);
                }
                Ok(())
            })
        });
        if let Err(error) = settled {
            tracing::warn!(error = format!("{error:#}"), "cannot truncate audit.applied_log; retrying");
        }
    }

    /// Merges the shards of the spaces whose home lane is here, and of no others.
    fn merge_shards(&mut self) -> anyhow::Result<()> {
        for space in self.run.settings.sharded().into_keys() {
            if !self.lanes.contains_key(&partition_of(&space, self.desk.partitions)) {
                self.mergers.remove(&space);
            } else if !self.mergers.contains_key(&space) {
                let merger = Merger::start(self.merging(space.clone()))?;
                self.mergers.insert(space, merger);
            }
        }
        Ok(())
    }

    fn merging(&self, space: Name) -> Merging {
        Merging {
            cluster: self.cluster.clone(),
            settings: self.run.settings.clone(),
            space,
            partitions: self.desk.partitions,
            message_bytes: self.desk.message_bytes,
            every: Duration::from_millis(self.run.config.snapshot.every_ms),
        }
    }

    /// Starts to read, as a group member or alone from the given places.
    fn read(
        &mut self,
        places: &[Place],
        membership: &Membership,
        ending: impl Fn(usize) -> Ending,
    ) -> anyhow::Result<Arc<Reader>> {
        let parser = Arc::new(Parser::new(self.run.settings));
        let spread = Some(Spread::new(self.run.settings, self.desk.partitions));
        let accept_gap = self.run.accept_gap;
        let (reader, logs) = Reader::start(self.cluster, parser, places, membership, spread, accept_gap, ending)?;
        if matches!(membership, Membership::Fleet { .. }) {
            let _ = self.desk.reader.set(reader.clone());
        }
        for (place, log) in logs {
            if let Some(lane) = self.lanes.get_mut(&place.partition) {
                lane.logs.push(lane.runner.merge.add(place.name, log, Some(place.position), None));
            }
        }
        Ok(reader)
    }

    fn idle(&self) -> Ending {
        Ending::Follow { idle: Duration::from_millis(self.cluster.config.idle_ms) }
    }
}

impl Lane {
    /// Processes some events, or takes a snapshot if one is due.
    fn step(&mut self) -> anyhow::Result<(u64, Option<Stepped>)> {
        let stepped = self.runner.step_some()?;
        if stepped.0 == 0 {
            self.runner.snapshot_if_due()?;
        }
        Ok(stepped)
    }
}

/// Claims lanes concurrently: most of the time is spent waiting for the brokers.
fn claim(desk: &Desk<'_>, lanes: &[i32]) -> anyhow::Result<Vec<(i32, Claim)>> {
    std::thread::scope(|scope| {
        let claim = |lane: &i32| {
            let (lane, thread) = (*lane, std::thread::Builder::new().name(format!("claim-{lane}")));
            Ok((lane, thread.spawn_scoped(scope, move || desk.claim(lane))?))
        };
        let claims = lanes.iter().map(claim).collect::<anyhow::Result<Vec<_>>>()?;
        let claims = claims.into_iter().map(|(lane, claim)| {
            let claim = claim.join().map_err(|_| anyhow!("the thread that takes over lane {lane} panicked"))?;
            Ok((lane, claim?))
        });
        claims.collect()
    })
}

/// Whether another instance has taken over.
pub(super) fn is_fenced(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(Problem::Fenced(_))))
}
