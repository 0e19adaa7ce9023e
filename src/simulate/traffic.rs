//! Traffic for a router that is elsewhere: who asks when, and who is rewarded when.
//!
//! Time and answers come in as arguments, so that all of this is the same for a router on another machine and for one
//! in a test. The luck of a request is drawn with its query, before the answer is known: runs of one seed ask the same,
//! lose the same rewards and wait as long for the others, whatever the router answers and however many ask at a time.

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::World;
use super::history::History;
use super::run::COMPARATOR_NORM;
use crate::eligible::Eligible;
use crate::event::Query;
use crate::learner::Decision;
use crate::router::Distribution;

/// What traffic there is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrafficSpec {
    /// Number of requests; none: without end.
    pub requests: Option<u64>,
    /// Requests a second; 0: one whenever one can be sent.
    pub rate: f64,
    /// Mean time between an answer and its reward; the times are exponential.
    pub delay_ms: f64,
    /// Share of rewards that never come.
    pub loss: f64,
    /// Request before which the world switches.
    pub switch_at: Option<u64>,
    /// Seed of noise, losses and delays.
    pub seed: u64,
}

/// A query that is to be routed, and all that will come of each answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Counted from 0.
    pub number: u64,
    /// The query.
    pub query: Query,
    expected: Vec<f64>,
    best_scores: Vec<f64>,
    luck: Luck,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Luck {
    is_lost: bool,
    delay_us: u64,
    noise: f64,
}

/// A reward that is to be sent now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Earned {
    /// Number of the request that earned it.
    pub number: u64,
    /// 0 or 1.
    pub reward: f64,
}

/// What there is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Task {
    /// Ask the router; then tell [`Traffic::answered`], or [`Traffic::abandoned`].
    Ask(Box<Ask>),
    /// Send a reward.
    Reward(Earned),
    /// Nothing before this time, unless an answer comes.
    WaitUntil(u64),
    /// Nothing before an answer comes.
    WaitForAnswer,
    /// Nothing any more.
    Done,
}

/// A run of requests that goes on.
pub struct Traffic {
    world: Box<dyn World>,
    spec: TrafficSpec,
    generator: ChaCha8Rng,
    asked: u64,
    open: u64,
    next_us: f64,
    stopped: bool,
    /// By when they are due, then by request.
    waiting: BTreeMap<(u64, u64), f64>,
    lost: u64,
    unsent: u64,
    history: History,
    recent: History,
}

/// A run that was held up catches up with no more than this.
const CATCH_UP_US: f64 = 1e6;

/// Stretches that a run is remembered in: the last tenth is known to within a tenth of itself.
const BINS: usize = 200;

impl Traffic {
    /// Traffic in a world, from time 0 on.
    pub fn new(world: Box<dyn World>, spec: TrafficSpec) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
        // Stream 0 may be the world's own: noise must not be the queries' numbers again.
        generator.set_stream(u64::MAX);
        Self {
            world,
            spec,
            generator,
            asked: 0,
            open: 0,
            next_us: 0.0,
            stopped: false,
            waiting: BTreeMap::new(),
            lost: 0,
            unsent: 0,
            history: History::unbounded(BINS),
            recent: History::unbounded(2),
        }
    }

    /// What to do at this time. Rewards go before requests: they are what is learned from.
    pub fn next(&mut self, now_us: u64) -> Task {
        let due = self.waiting.first_key_value().map(|((due, _), _)| *due);
        if due.is_some_and(|due| due <= now_us)
            && let Some(((_, number), reward)) = self.waiting.pop_first()
        {
            return Task::Reward(Earned { number, reward });
        }
        if self.is_over() {
            return match (due, self.open) {
                (Some(due), _) => Task::WaitUntil(due),
                (None, 0) => Task::Done,
                (None, _) => Task::WaitForAnswer,
            };
        }
        if self.next_us > now_us as f64 {
            let next = self.next_us.ceil() as u64;
            return Task::WaitUntil(due.map_or(next, |due| due.min(next)));
        }
        if self.spec.rate > 0.0 {
            self.next_us = self.next_us.max(now_us as f64 - CATCH_UP_US) + 1e6 / self.spec.rate;
        }
        Task::Ask(Box::new(self.ask()))
    }

    /// The router has answered: a model, and what it was drawn from.
    pub fn answered(&mut self, ask: &Ask, model: usize, propensities: Vec<f64>, now_us: u64) {
        self.open = self.open.saturating_sub(1);
        let distribution = Distribution { policy: propensities.clone(), propensities, eligible: Eligible::ALL };
        let decision = Decision { model, distribution };
        self.history.add(&ask.expected, &ask.best_scores, &decision);
        self.recent.add(&ask.expected, &ask.best_scores, &decision);
        if ask.luck.is_lost {
            self.lost += 1;
        } else if self.stopped {
            self.unsent += 1;
        } else {
            let reward = f64::from(u8::from(ask.luck.noise < ask.expected[model]));
            self.waiting.insert((now_us.saturating_add(ask.luck.delay_us), ask.number), reward);
        }
    }

    /// The router was asked, and will not answer.
    pub fn abandoned(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// A reward could not be sent.
    pub fn undelivered(&mut self) {
        self.unsent += 1;
    }

    /// No more requests, and no rewards but those that are being sent.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.unsent += self.waiting.len() as u64;
        self.waiting.clear();
    }

    /// All answers so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Those since this was asked last.
    pub fn take_recent(&mut self) -> History {
        std::mem::replace(&mut self.recent, History::unbounded(2))
    }

    /// Rewards that never come.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Rewards that would have come, had it not been stopped.
    pub fn unsent(&self) -> u64 {
        self.unsent
    }

    fn is_over(&self) -> bool {
        self.stopped || self.spec.requests.is_some_and(|requests| self.asked >= requests)
    }

    fn ask(&mut self) -> Ask {
        let number = self.asked;
        self.asked += 1;
        self.open += 1;
        if self.spec.switch_at == Some(number) {
            self.world.switch();
        }
        let query = self.world.next_query();
        let luck: [f64; 3] = self.generator.random();
        // 1 - u is never 0, whose logarithm is infinite.
        let delay_us = (-1e3 * self.spec.delay_ms * libm::log(1.0 - luck[1])) as u64;
        let sharpness = COMPARATOR_NORM / self.world.true_norm().max(f64::MIN_POSITIVE);
        Ask {
            number,
            expected: self.world.expected_rewards(&query),
            best_scores: self.world.true_scores(&query).iter().map(|score| sharpness * score).collect(),
            query,
            luck: Luck { is_lost: luck[0] < self.spec.loss, delay_us, noise: luck[2] },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
    use crate::simulate::queries::Shape;

    const SPEC: TrafficSpec =
        TrafficSpec { requests: Some(400), rate: 0.0, delay_ms: 5.0, loss: 0.25, switch_at: None, seed: 7 };

    fn traffic(spec: TrafficSpec) -> Traffic {
        let world =
            LogQuadraticSpec { dim: 4, models: 2, intrinsic_rank: 1, signal: 0.3, shape: Shape::Isotropic, seed: 7 };
        Traffic::new(Box::new(LogQuadratic::new(world)), spec)
    }

    /// Runs to the end, `at_once` requests open at a time, each answered by the model of its number; returns what was
    /// asked, and rewards in the order of requests with the time from answer to reward.
    fn run(mut traffic: Traffic, at_once: usize) -> (Vec<Ask>, Vec<(u64, u64, f64)>, Traffic) {
        let (mut now, mut open, mut asks, mut rewards) = (0, Vec::new(), Vec::new(), Vec::new());
        let mut answers = BTreeMap::new();
        loop {
            let task = traffic.next(now);
            let waits = !matches!(task, Task::Ask(_) | Task::Reward(_));
            match task {
                Task::Ask(ask) => {
                    asks.push((*ask).clone());
                    open.push(ask);
                }
                Task::Reward(Earned { number, reward }) => rewards.push((number, now - answers[&number], reward)),
                Task::WaitUntil(time) if open.is_empty() => now = time,
                Task::WaitUntil(_) | Task::WaitForAnswer => {}
                Task::Done => break,
            }
            if open.len() >= at_once || (waits && !open.is_empty()) {
                let ask = open.swap_remove(0);
                answers.insert(ask.number, now);
                traffic.answered(&ask, ask.number as usize % 2, vec![0.5, 0.5], now);
            }
        }
        rewards.sort_by_key(|(number, ..)| *number);
        (asks, rewards, traffic)
    }

    #[test]
    fn runs_of_one_seed_are_the_same_however_many_ask_at_a_time() {
        let (asks, rewards, end) = run(traffic(SPEC), 1);
        let (asks_of_7, rewards_of_7, _) = run(traffic(SPEC), 7);
        assert_eq!(asks, asks_of_7);
        let earned = |rewards: &[(u64, u64, f64)]| rewards.iter().map(|(n, _, r)| (*n, *r)).collect::<Vec<_>>();
        assert_eq!(earned(&rewards), earned(&rewards_of_7));
        assert_eq!((end.history().rounds(), end.lost() + rewards.len() as u64, end.unsent()), (400, 400, 0));
        assert!((70..130).contains(&end.lost()), "{} of 400 lost", end.lost());
        let other = run(traffic(TrafficSpec { seed: 8, ..SPEC }), 1).1;
        assert_ne!(earned(&rewards), earned(&other));
    }

    #[test]
    fn rewards_come_after_their_delay() {
        let rewards = run(traffic(TrafficSpec { loss: 0.0, rate: 1000.0, ..SPEC }), 1).1;
        let mean = rewards.iter().map(|(_, after, _)| *after as f64).sum::<f64>() / rewards.len() as f64;
        assert!((4000.0..7000.0).contains(&mean), "{mean} us instead of 5000");
        let at_once = run(traffic(TrafficSpec { loss: 0.0, delay_ms: 0.0, ..SPEC }), 1).1;
        assert!(at_once.iter().all(|(_, after, _)| *after == 0));
    }

    #[test]
    fn requests_keep_their_rate_and_do_not_burst_after_a_hold_up() {
        let spec = TrafficSpec { requests: None, rate: 100.0, loss: 1.0, ..SPEC };
        let mut traffic = traffic(spec);
        let mut asked = |now: u64| {
            let mut number = 0;
            while matches!(traffic.next(now), Task::Ask(_)) {
                number += 1;
            }
            number
        };
        assert_eq!((asked(0), asked(9_999), asked(10_000), asked(100_000)), (1, 0, 1, 9));
        assert!((100..=102).contains(&asked(60_000_000)), "a minute's requests are not made up for");
    }

    #[test]
    fn a_stop_ends_it_and_counts_what_was_to_come() {
        let mut traffic = traffic(TrafficSpec { requests: None, loss: 0.0, ..SPEC });
        let asks: Vec<_> = (0..3).map(|_| traffic.next(0)).collect();
        let [Task::Ask(first), Task::Ask(second), Task::Ask(_)] = &asks[..] else { panic!("{asks:?}") };
        traffic.answered(first, 0, vec![0.5, 0.5], 1);
        traffic.stop();
        assert_eq!(traffic.next(2), Task::WaitForAnswer);
        traffic.answered(second, 0, vec![0.5, 0.5], 3);
        traffic.abandoned();
        assert_eq!((traffic.next(4), traffic.unsent(), traffic.history().rounds()), (Task::Done, 2, 2));
    }
}
