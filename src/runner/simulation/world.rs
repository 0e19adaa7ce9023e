//! The scheduler: one seed decides who acts next, what fails, and when.
//!
//! Everything runs on one thread. Whenever an instance causes an effect, the world may let others act first, for any number of
//! turns: to them the instance has stalled in the middle of what it does. When it continues, it may be a zombie.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::broker::{Cluster, CommitFault};
use super::group::Group;
use crate::runner::clock::Clock;
use crate::transport::kafka::cluster::Problem;
use crate::transport::lock;

/// A protection that is switched off, to see that its absence is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Without {
    /// A new owner fences the previous one.
    Fence,
    /// After a request whose answer is unknown, a producer begins a new epoch.
    Epoch,
    /// Writes to the disk are flushed.
    Flush,
    /// A lane resumes from the positions in its snapshot.
    Position,
}

/// Somebody who acts when it is their turn.
pub trait Actor: Send + Sync {
    /// Acts once, unless in the middle of an action.
    fn act(&self);
}

/// State of the world.
pub struct Shared {
    /// The brokers.
    pub cluster: Cluster,
    /// The consumer group.
    pub group: Group,
    /// Whether all traffic has been sent.
    pub is_complete: bool,
    /// Number of partitions of the event topics.
    pub partitions: usize,
    /// Until then no broker answers.
    down_until: Duration,
    /// What went wrong.
    pub violations: Vec<String>,
    /// Faults by kind.
    pub faults: std::collections::BTreeMap<&'static str, u64>,
    rng: ChaCha8Rng,
    now: Duration,
    /// Requests that are still under way: when they arrive, transactional ID, epoch.
    late: Vec<(Duration, String, u64)>,
    /// Set when the instance crashes; another one after each start.
    crashed: Vec<Arc<AtomicBool>>,
    actors: Vec<Arc<dyn Actor>>,
    story: Option<Vec<String>>,
    is_quiet: bool,
    without: Option<Without>,
    /// Nested turns.
    depth: usize,
    /// One in this many effects, for each kind of trouble; 0 = never.
    rates: Rates,
}

/// How often things go wrong: one in so many effects.
#[derive(Debug, Clone, Copy)]
struct Rates {
    crash: u32,
    stall: u32,
    fail: u32,
    commit: u32,
}

/// The world, shared by all that live in it.
#[derive(Clone)]
pub struct World(Arc<Mutex<Shared>>);

impl World {
    pub fn new(seed: u64, without: Option<Without>, is_recorded: bool) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // Some histories are calm in some respects, so that faults are also seen alone.
        let mut rate =
            |usual: u32| if rng.random_range(0..4) == 0 { 0 } else { rng.random_range(usual / 2..=2 * usual) };
        let rates = Rates { crash: rate(300), stall: rate(40), fail: rate(60), commit: rate(5) };
        let shared = Shared {
            cluster: Cluster::default(),
            group: Group::default(),
            is_complete: false,
            partitions: 0,
            down_until: Duration::ZERO,
            violations: Vec::new(),
            faults: std::collections::BTreeMap::new(),
            rng,
            now: Duration::ZERO,
            late: Vec::new(),
            crashed: Vec::new(),
            actors: Vec::new(),
            story: is_recorded.then(Vec::new),
            is_quiet: false,
            without,
            depth: 0,
            rates,
        };
        Self(Arc::new(Mutex::new(shared)))
    }

    pub fn with<T>(&self, f: impl FnOnce(&mut Shared) -> T) -> T {
        f(&mut self.shared())
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        lock(&self.0)
    }

    pub fn without(&self) -> Option<Without> {
        self.shared().without
    }

    /// A random number below `n`.
    pub fn below(&self, n: usize) -> usize {
        self.shared().rng.random_range(0..n.max(1))
    }

    /// Whether a chance of one in `n` comes true; never while the world is quiet.
    pub fn chance(&self, n: u32) -> bool {
        let mut shared = self.shared();
        !shared.is_quiet && n > 0 && shared.rng.random_range(0..n) == 0
    }

    /// Adds a line to the story.
    pub fn record(&self, line: impl FnOnce() -> String) {
        if self.shared().story.is_some() {
            let line = line();
            let mut shared = self.shared();
            let ms = shared.now.as_millis();
            let indent = "  ".repeat(shared.depth);
            if let Some(story) = &mut shared.story {
                story.push(format!("{ms:>7} ms  {indent}{line}"));
            }
        }
    }

    pub fn story(&self) -> String {
        self.shared().story.clone().unwrap_or_default().join("\n")
    }

    /// Notes what must not happen.
    pub fn violated(&self, what: String) {
        self.record(|| format!("VIOLATED: {what}"));
        self.shared().violations.push(what);
    }

    pub fn add(&self, actor: Arc<dyn Actor>) {
        self.shared().actors.push(actor);
    }

    /// A flag that is set when instance `node` crashes.
    pub fn begin_life(&self, node: usize) -> Arc<AtomicBool> {
        let mut shared = self.shared();
        if shared.crashed.len() <= node {
            shared.crashed.resize_with(node + 1, Arc::default);
        }
        shared.crashed[node] = Arc::default();
        shared.crashed[node].clone()
    }

    pub fn is_crashed(&self, node: usize) -> bool {
        self.shared().crashed.get(node).is_some_and(|crashed| crashed.load(Ordering::SeqCst))
    }

    /// Kills an instance: its next effect fails, and so do all others.
    pub fn crash(&self, node: usize) {
        self.record(|| format!("instance {node} crashes"));
        let mut shared = self.shared();
        *shared.faults.entry("crash").or_default() += 1;
        if let Some(crashed) = shared.crashed.get(node) {
            crashed.store(true, Ordering::SeqCst);
        }
    }

    /// Called before every effect of an instance: it may crash here, or stall while others act.
    pub fn effect(&self, node: usize) -> Result<(), Problem> {
        let died = || Problem::Failed { doing: format!("instance {node}"), problem: "crashed".to_owned() };
        if self.is_crashed(node) {
            return Err(died());
        }
        self.pass(Duration::from_millis(1));
        let rates = self.shared().rates;
        if self.chance(rates.crash) {
            self.crash(node);
            return Err(died());
        }
        if self.chance(rates.stall) {
            let turns = 1 + self.below(60);
            self.count("stall");
            self.record(|| format!("instance {node} stalls for {turns} turns"));
            self.nested(turns);
            self.record(|| format!("instance {node} continues"));
        }
        if self.is_crashed(node) { Err(died()) } else { Ok(()) }
    }

    /// Lets others act, unless this happens too deep inside of other actions.
    fn nested(&self, turns: usize) {
        if self.shared().depth >= 3 {
            return;
        }
        self.shared().depth += 1;
        (0..turns).for_each(|_| self.turn());
        self.shared().depth -= 1;
    }

    /// One turn of somebody.
    pub fn turn(&self) {
        let actor = {
            let mut shared = self.shared();
            let n = shared.actors.len();
            let at = shared.rng.random_range(0..n.max(1));
            shared.actors.get(at).cloned()
        };
        self.pass(Duration::from_millis(1));
        if let Some(actor) = actor {
            actor.act();
        }
    }

    /// Whether a request of an instance to the brokers fails now.
    pub fn request_fails(&self, node: usize, what: &'static str) -> bool {
        let is_down = {
            let shared = self.shared();
            shared.now < shared.down_until && !shared.is_quiet
        };
        is_down || self.fails(node, what)
    }

    /// Restarts the brokers: for a while none of them answers.
    pub fn restart_brokers(&self) {
        let down = Duration::from_millis(10 + self.below(300) as u64);
        self.count("brokers restarted");
        self.record(|| format!("the brokers restart, which takes {} ms", down.as_millis()));
        let mut shared = self.shared();
        shared.down_until = shared.now + down;
    }

    /// Whether a write of an instance fails now.
    pub fn fails(&self, node: usize, what: &'static str) -> bool {
        let rate = self.shared().rates.fail;
        let fails = self.chance(rate);
        if fails {
            self.count(what);
            self.record(|| format!("instance {node}: {what}"));
        }
        fails
    }

    pub fn commit_fault(&self, node: usize) -> CommitFault {
        let rate = self.shared().rates.commit;
        if !self.chance(rate) {
            return CommitFault::None;
        }
        use CommitFault as Fault;
        let (fault, name) = [
            (Fault::RequestLost, "commit lost"),
            (Fault::AnswerLost, "answer to commit lost"),
            (Fault::Late, "late commit"),
            (Fault::Retried, "commit sent twice"),
        ][self.below(4)];
        self.count(name);
        self.record(|| format!("instance {node}: {name}"));
        fault
    }

    pub fn count(&self, fault: &'static str) {
        *self.shared().faults.entry(fault).or_default() += 1;
    }

    /// A request to commit arrives later.
    pub fn later(&self, id: &str, epoch: u64) {
        let after = Duration::from_millis(self.below(60) as u64);
        let mut shared = self.shared();
        let at = shared.now + after;
        shared.late.push((at, id.to_owned(), epoch));
    }

    /// Time passes; late requests arrive.
    fn pass(&self, time: Duration) {
        let arrived: Vec<_> = {
            let mut shared = self.shared();
            shared.now += time;
            let (now, is_quiet) = (shared.now, shared.is_quiet);
            shared.late.extract_if(.., |late| late.0 <= now || is_quiet).collect()
        };
        for (_, id, epoch) in arrived {
            let ended = self.with(|shared| shared.cluster.end_transaction(&id, epoch, true));
            self.record(|| format!("a late commit of {id} in epoch {epoch} arrives: {ended:?}"));
        }
    }

    /// From now on nothing fails.
    pub fn quiet(&self) {
        self.shared().is_quiet = true;
        self.record(|| "from here on nothing fails".to_owned());
    }

    pub fn is_quiet(&self) -> bool {
        self.shared().is_quiet
    }

    /// Ends the world: its actors hold it too.
    pub fn end(&self) {
        let actors = std::mem::take(&mut self.shared().actors);
        drop(actors);
    }
}

/// The clock of an instance.
pub struct SimClock {
    pub world: World,
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.world.shared().now
    }

    fn wall_ms(&self) -> u64 {
        1_700_000_000_000 + self.world.shared().now.as_millis() as u64
    }

    fn sleep(&self, time: Duration) {
        self.world.pass(time);
        self.world.nested(1);
    }
}
