//! Instances: the runtime's own lanes, slots, claims and commits, on a simulated cluster and disk.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::broker::{Address, SimBroker, transient};
use super::disk::{SimDisk, stored};
use super::world::{Actor, SimClock, Without, World};
use crate::config::{Settings, SnapshotConfig, Topics};
use crate::engine::{Input, Side};
use crate::event::Name;
use crate::merge::{Merge, Position, Read, Source, Sourced};
use crate::runner::claim::{Broker, Claims, Disk, Opened};
use crate::runner::commit::Keeper;
use crate::runner::error::{LaneError, Result};
use crate::runner::lane::{Lane, Places};
use crate::runner::retry::Retry;
use crate::runner::slots::{Closed, Feed, Running, Slots};
use crate::snapshot::LaneHead;
use crate::state::{LaneStore, Retention};
use crate::transport::kafka::consumer::Rebalance;
use crate::transport::kafka::outlet::LetterLimits;
use crate::transport::kafka::positions::at;
use crate::transport::{Letter, Log, Outlet, TransportError, lock};
use crate::wire::events::Parser;
use crate::wire::params;

/// What all instances of a history have in common.
pub struct Plan {
    pub settings: Settings,
    pub topics: Topics,
    /// Number of partitions.
    pub partitions: usize,
    /// Whether instances share lanes.
    pub is_shared: bool,
    /// How long an event is held for earlier ones; unlimited if none.
    pub hold: Option<Duration>,
}

/// An instance, running or not.
pub struct Instance {
    pub world: World,
    pub node: usize,
    pub disk: SimDisk,
    pub plan: Arc<Plan>,
    process: Mutex<Option<Process>>,
}

/// A running instance.
struct Process {
    claims: Option<Claims<SimBroker, SimDisk>>,
    slots: Arc<Slots<SimFeed>>,
    member: u64,
}

impl Instance {
    pub fn new(world: &World, node: usize, plan: &Arc<Plan>) -> Arc<Self> {
        let disk = SimDisk::new(world.clone(), node);
        Arc::new(Self { world: world.clone(), node, disk, plan: plan.clone(), process: Mutex::new(None) })
    }

    /// Starts a process, with a cadence of its own.
    fn start(&self) -> Result<Process> {
        let crashed = self.world.begin_life(self.node);
        let clock = Arc::new(SimClock { world: self.world.clone() });
        let retry = Retry::until(crashed, Arc::default()).by(clock);
        let (every_updates, every_ms) = (1 + self.world.below(20) as u64, 20 + self.world.below(300) as u64);
        let cadence = SnapshotConfig { every_updates, every_ms, keep: 3, keep_hourly: 0, keep_daily: 0 };
        self.world.record(|| format!("instance {} starts, with a snapshot every {every_updates} updates", self.node));
        let here = |commit| Ok(Keeper::here(commit));
        if !self.plan.is_shared {
            let running = retry.run("open_lane", || self.open_alone(&cadence, &retry))?;
            return Ok(Process { claims: None, slots: Arc::new(Slots::of([(0, running)], retry)), member: 0 });
        }
        let broker = SimBroker { world: self.world.clone(), node: self.node, topics: self.plan.topics.clone() };
        let claims = Claims {
            broker: Arc::new(broker),
            disk: self.disk.clone(),
            settings: self.plan.settings.clone(),
            cadence,
            hold: self.plan.hold,
            instance: format!("i{}", self.node),
            partitions: self.plan.partitions,
            limits: LetterLimits { value_bytes: 1 << 20, message_bytes: 1 << 20 },
            facts: Arc::default(),
            retry: retry.clone(),
            keeper: here,
        };
        let slots = Arc::new(Slots::new(claims.lanes(), retry));
        let member = self.world.with(|shared| shared.group.join(self.node));
        Ok(Process { claims: Some(claims), slots, member })
    }

    /// Opens the only lane, which has all partitions.
    fn open_alone(&self, cadence: &SnapshotConfig, retry: &Retry) -> Result<Running<SimFeed>> {
        self.world.effect(self.node)?;
        let address = (self.plan.topics.params.clone(), 0);
        let published = self.world.with(|shared| {
            let decode = |(_, value): (&[u8], Option<&[u8]>)| params::decode(value?).ok();
            shared.cluster.committed(&address).filter_map(decode).collect()
        });
        let store = self.disk.lane(&stored(0, false));
        let outlet = SimOutlet { world: self.world.clone(), disk: self.disk.clone(), topics: self.plan.topics.clone() };
        let places = Places {
            store: Some(store),
            audit: self.disk.audit(0),
            outlet: Box::new(outlet),
            published,
            facts: Arc::default(),
            retry: retry.clone(),
        };
        let (mut lane, state) = Lane::open(&self.plan.settings, cadence, places, |commit| Ok(Keeper::here(commit)))?;
        lane.merge.set_hold(self.plan.hold);
        let partitions: Vec<i32> = (0..self.world.with(|shared| shared.partitions) as i32).collect();
        let feed = self.feed(partitions.clone());
        feed.add(&mut lane.merge, &partitions, |name, end| match state.positions.get(name) {
            Some(_) if self.world.without() == Some(Without::Position) => at(end as u64),
            position => position.cloned().unwrap_or_else(|| at(0)),
        });
        let state = lane.merge.state();
        lane.begin(state)?;
        Ok(Running { lane, feed })
    }

    fn feed(&self, partitions: Vec<i32>) -> SimFeed {
        let parser = Arc::new(Parser::new(&self.plan.settings));
        let topics = self.plan.topics.clone();
        let is_shared = self.plan.is_shared;
        SimFeed { world: self.world.clone(), node: self.node, topics, parser, partitions, is_shared }
    }

    /// Does something: follows an order of the group, or processes events.
    fn step(&self, process: &mut Process) -> Result<()> {
        let Process { slots, claims, member } = process;
        if let Some(claims) = claims {
            if let Some(rebalance) = self.world.with(|shared| shared.group.next(*member)) {
                return self.rebalance(slots, claims, member, rebalance);
            }
            if !self.world.with(|shared| shared.group.is_member(*member)) {
                *member = self.world.with(|shared| shared.group.join(self.node));
            }
        }
        let lanes: Vec<i32> = slots.lanes().collect();
        let lane = lanes[self.world.below(lanes.len())];
        match slots.step(lane) {
            Err(error) if error.is_taken() && claims.is_some() => {
                self.world.record(|| format!("instance {} notices that lane {lane} was taken over", self.node));
                self.rejoin(slots, member)
            }
            stepped => stepped.map(drop),
        }
    }

    fn rebalance(
        &self,
        slots: &Slots<SimFeed>,
        claims: &Claims<SimBroker, SimDisk>,
        member: &mut u64,
        rebalance: Rebalance,
    ) -> Result<()> {
        self.world.record(|| format!("instance {}: {rebalance:?}", self.node));
        match rebalance {
            Rebalance::Revoked { lanes, lost } => lanes.into_iter().try_for_each(|lane| {
                self.close(slots, lane, lost)?;
                self.world.with(|shared| shared.group.released(*member, lane));
                Ok(())
            }),
            Rebalance::Assigned(lanes) => lanes.into_iter().try_for_each(|lane| {
                let turn = slots.assign(lane);
                let open = || {
                    let Opened { lane: mut opened, places } = claims.open(lane, turn.given_up())?;
                    let feed = self.feed(vec![lane]);
                    let position = |name: &str| places.iter().find(|place| place.name == name);
                    feed.add(&mut opened.merge, &[lane], |name, _| {
                        position(name).map_or_else(Position::default, |place| place.position.clone())
                    });
                    Ok(Running { lane: opened, feed })
                };
                match slots.open(lane, &turn, open) {
                    Err(error) if error.is_taken() => self.rejoin(slots, member),
                    opened => opened.map(drop),
                }
            }),
        }
    }

    fn close(&self, slots: &Slots<SimFeed>, lane: i32, lost: bool) -> Result<Closed> {
        match slots.end_turn(lane, lost) {
            Some(turn) => slots.close(lane, &turn, lost),
            None => Ok(Closed::Absent),
        }
    }

    /// Leaves the group and joins it again.
    fn rejoin(&self, slots: &Slots<SimFeed>, member: &mut u64) -> Result<()> {
        slots.assigned().into_iter().try_for_each(|lane| self.close(slots, lane, false).map(drop))?;
        let before = *member;
        *member = self.world.with(|shared| {
            shared.group.leave(before);
            shared.group.join(self.node)
        });
        Ok(())
    }

    /// The open lanes, if each has read all of its logs.
    pub fn lanes_at_end(&self) -> Option<Vec<i32>> {
        let process = lock(&self.process);
        let Some(process) = &*process else { return Some(Vec::new()) };
        if self.world.is_crashed(self.node) {
            return None;
        }
        let lanes: Vec<i32> = process.slots.look(|lanes| lanes.iter().map(|(lane, _)| *lane).collect());
        lanes.iter().all(|lane| process.slots.is_at_end(*lane)).then_some(lanes)
    }

    /// Stops in order: every lane takes a last snapshot. False if a lane was dropped, since another instance had fenced it.
    pub fn stop(&self) -> Result<bool> {
        // Held until it has stopped: no other process can use its disk before.
        let mut running = lock(&self.process);
        let stopped = running.as_ref().map_or(Ok(true), |process| self.stop_process(process));
        *running = None;
        stopped
    }

    fn stop_process(&self, process: &Process) -> Result<bool> {
        if process.claims.is_none() {
            process.slots.take_open().into_iter().try_for_each(|mut running| running.lane.finish())?;
            return Ok(true);
        }
        let mut is_whole = true;
        for lane in process.slots.assigned() {
            is_whole &= self.close(&process.slots, lane, false)? != Closed::Dropped;
        }
        self.world.with(|shared| shared.group.leave(process.member));
        Ok(is_whole)
    }

    /// Truncates logs of applied requests to what is committed, as instances do when they start and at intervals.
    pub fn settle(&self) -> Result<()> {
        let process = self.start()?;
        let Some(claims) = &process.claims else { return Ok(()) };
        for lane in claims.lanes().filter(|lane| self.disk.has_audit(*lane)) {
            let heads = claims.broker.heads(&[lane])?;
            heads.get(&lane).map_or(Ok(true), |head| claims.settle(lane, head))?;
        }
        self.world.with(|shared| shared.group.leave(process.member));
        Ok(())
    }
}

impl Actor for Instance {
    fn act(&self) {
        // Held while it stalls in the middle of an action.
        let Ok(mut process) = self.process.try_lock() else {
            self.trouble();
            return;
        };
        if self.world.is_crashed(self.node) && process.take().is_some() {
            self.disk.crash(!self.plan.is_shared && self.world.chance(4));
        }
        if process.is_none() {
            match (self.world.chance(4) || self.world.is_quiet()).then(|| self.start()) {
                Some(Ok(started)) => *process = Some(started),
                Some(Err(error)) => self.failed(&error),
                None => {}
            }
            return;
        }
        if !self.world.is_quiet() && self.world.chance(200) {
            self.world.record(|| format!("instance {} stops", self.node));
            let stopped = process.as_ref().map_or(Ok(true), |process| self.stop_process(process));
            *process = None;
            if let Err(error) = stopped {
                self.failed(&error);
            }
            return;
        }
        if let Some(running) = &mut *process
            && let Err(error) = self.step(running)
        {
            self.failed(&error);
            *process = None;
        }
    }
}

impl Instance {
    /// An instance ends with an error only if it was killed.
    fn failed(&self, error: &LaneError) {
        if !self.world.is_crashed(self.node) {
            self.world.violated(format!("instance {} ends: {error}", self.node));
        }
        self.world.crash(self.node);
        self.disk.crash(false);
    }

    /// Things that happen to an instance while it is in the middle of an action.
    fn trouble(&self) {
        if self.world.chance(60) {
            self.world.crash(self.node);
        }
    }
}

/// The coordinator of the group acts too: it gives up on members and moves lanes.
pub struct Coordinator(pub World, pub Vec<Arc<Instance>>);

impl Actor for Coordinator {
    fn act(&self) {
        let members = self.0.with(|shared| shared.group.members());
        for (member, node) in members {
            let stalls = self.1[node].process.try_lock().is_err();
            let is_dead = self.0.is_crashed(node) || self.0.with(|shared| shared.group.is_dead(member));
            if is_dead && self.0.below(4) == 0 || stalls && self.0.chance(3) || self.0.chance(400) {
                self.0.count("session expired");
                self.0.record(|| format!("the group gives up on instance {node}"));
                self.0.with(|shared| shared.group.expire(member));
            }
        }
        self.0.with(|shared| shared.group.rebalance());
    }
}

/// Sends the events of a history.
pub struct Traffic {
    pub world: World,
    pub events: Mutex<VecDeque<(Address, Vec<u8>)>>,
}

impl Actor for Traffic {
    fn act(&self) {
        if self.world.chance(150) {
            self.world.restart_brokers();
        }
        let mut events = lock(&self.events);
        for _ in 0..1 + self.world.below(6) {
            if let Some((address, bytes)) = events.pop_front() {
                self.world.with(|shared| {
                    // A partition exists from its first event on.
                    shared.partitions = shared.partitions.max(address.1 as usize + 1);
                    shared.cluster.append(&address, bytes);
                });
            }
        }
        if events.is_empty() {
            self.world.with(|shared| shared.is_complete = true);
        }
    }
}

/// The partitions of a lane.
pub struct SimFeed {
    world: World,
    node: usize,
    topics: Topics,
    parser: Arc<Parser>,
    partitions: Vec<i32>,
    is_shared: bool,
}

impl SimFeed {
    fn add(&self, merge: &mut Merge<SimLog>, partitions: &[i32], position: impl Fn(&str, usize) -> Position) {
        for partition in partitions {
            for (side, topic) in [(Side::Query, &self.topics.queries), (Side::Reward, &self.topics.rewards)] {
                let (name, address) = (format!("{topic}/{partition}"), (topic.clone(), *partition));
                let position = position(&name, self.world.with(|shared| shared.cluster.end(&address)));
                let next = position.floor as usize;
                let (world, parser) = (self.world.clone(), self.parser.clone());
                merge.add(name, SimLog { world, address, side, parser, next }, Some(position), None);
            }
        }
    }
}

impl Feed for SimFeed {
    type Log = SimLog;

    fn refresh(&mut self, merge: &mut Merge<SimLog>) -> Result<()> {
        self.world.effect(self.node)?;
        if self.world.request_fails(self.node, "read failed") {
            return Err(transient("cannot read").into());
        }
        let known = self.partitions.len() as i32;
        let now = self.world.with(|shared| shared.partitions) as i32;
        if !self.is_shared && now > known {
            let new: Vec<i32> = (known..now).collect();
            self.world.record(|| format!("instance {} reads new partitions {new:?}", self.node));
            self.add(merge, &new, |_, _| at(0));
            self.partitions.extend(new);
        }
        Ok(())
    }
}

/// A partition, as it is read.
pub struct SimLog {
    world: World,
    address: Address,
    side: Side,
    parser: Arc<Parser>,
    next: usize,
}

impl Source for SimLog {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        let (value, is_complete) =
            self.world.with(|shared| (shared.cluster.value(&self.address, self.next), shared.is_complete));
        let Some(value) = value else { return Ok(if is_complete { Read::End } else { Read::Pending }) };
        let start = self.next as u64;
        self.next += 1;
        let input = Input::parse(&self.parser, self.side, value, None);
        Ok(Read::Event(Sourced { input, start, end: start + 1, line: 0, origin: None }))
    }
}

impl Log for SimLog {
    fn place(&self, start: u64, _line: u64) -> Value {
        json!({"source": self.address.0, "partition": self.address.1, "offset": start})
    }
}

/// Publishes the results of a lane that is not shared.
struct SimOutlet {
    world: World,
    disk: SimDisk,
    topics: Topics,
}

impl SimOutlet {
    fn write(&self, topic: &str, values: impl Iterator<Item = Vec<u8>>) -> Result<(), TransportError> {
        self.world.effect(self.disk.node)?;
        if self.world.request_fails(self.disk.node, "write lost") {
            return Err(transient("cannot write").into());
        }
        let address = (topic.to_owned(), 0);
        values.for_each(|value| self.world.with(|shared| shared.cluster.append(&address, value)));
        self.world.effect(self.disk.node)?;
        if self.world.fails(self.disk.node, "answer lost") { Err(transient("cannot write").into()) } else { Ok(()) }
    }

    /// Notes a violation if a restart would unlearn these parameters.
    fn check(&self, space: &Name, bytes: &[u8]) {
        let store = LaneStore::new(self.disk.durable(), &stored(0, false), Retention::newest(3));
        let newest = store.newest().ok().and_then(|resumed| resumed.snapshot);
        let head = newest.and_then(|snapshot| LaneHead::open(&snapshot.head).ok());
        let durable = head.and_then(|head| head.publications.get(space).map(|publication| publication.version));
        let version = params::decode(bytes).map_or(0, |params| params.version);
        if durable.is_none_or(|durable| durable < version) {
            self.world.violated(format!("version {version} of {space} is published, but {durable:?} is durable"));
        }
    }
}

impl Outlet for SimOutlet {
    fn dead_letters(&mut self, letters: &[Letter]) -> Result<(), TransportError> {
        if letters.is_empty() {
            return Ok(());
        }
        self.write(&self.topics.dead_letters, letters.iter().map(|letter| letter.line().into_bytes()))
    }

    fn publishes(&self) -> bool {
        true
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> Result<(), TransportError> {
        if !self.world.is_crashed(self.disk.node) {
            params.iter().for_each(|(space, bytes)| self.check(space, bytes));
        }
        self.write(&self.topics.params, params.iter().map(|(_, bytes)| bytes.clone()))
    }
}
