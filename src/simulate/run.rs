//! The closed loop: a router plays a policy in a world, a learner learns from what comes back.

use std::collections::{BTreeMap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use super::World;
use super::history::History;
use crate::eligible::Eligible;
use crate::event::{BadExample, BadQuery, Example, Name, Query};
use crate::learner::{ChargedDecision, Decision, Trainer};
use crate::router::{Distribution, Params};

/// How the loop runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Number of queries.
    pub rounds: u64,
    /// Rounds between a decision and its reward.
    pub delay: u64,
    /// Rounds between two updates of the router's policy; 1 is the learner's own at every round.
    pub refresh: u64,
    /// Share of rewards that never come.
    pub lost: f64,
    /// Round before which the world switches.
    pub switch_at: Option<u64>,
    /// Seed of draws, noise and losses.
    pub seed: u64,
}

/// Regret is measured against W* scaled to this nuclear norm: W* itself would be played almost uniformly, and beaten by
/// everyone.
pub const COMPARATOR_NORM: f64 = 300.0;

/// Why a loop cannot run: the world and the learner are of different shapes.
#[derive(Debug, Error)]
pub enum Misfit {
    /// The query does not fit the learner.
    #[error(transparent)]
    Query(#[from] BadQuery),
    /// The example does not fit the learner.
    #[error(transparent)]
    Example(#[from] BadExample),
}

/// What is between a query and what is learned from it: a router and a learner, however they are connected.
pub trait Stack {
    /// Why it can fail.
    type Error;

    /// A round begins: what was learned so far may reach the router.
    fn begin(&mut self, round: u64) -> Result<(), Self::Error>;

    /// Routes the query of a round among the eligible models; `luck` in 0..1 is there for those that draw by it.
    fn decide(&mut self, round: u64, query: &Query, eligible: &Eligible, luck: f64) -> Result<Decision, Self::Error>;

    /// What the decision of a round costs, in worlds where models cost something.
    fn cost(&mut self, _round: u64, _cost: f64) {}

    /// The reward of an earlier round's decision comes in, at the beginning of `now`.
    fn reward(&mut self, round: u64, now: u64, reward: f64) -> Result<(), Self::Error>;

    /// All is over: everything that came in is learned.
    fn finish(&mut self) -> Result<(), Self::Error>;
}

/// Runs the loop; `progress` is told after every round.
pub fn run<S: Stack>(
    world: &mut dyn World,
    stack: &mut S,
    plan: &Plan,
    history: &mut History,
    mut progress: impl FnMut(&History),
) -> Result<(), S::Error> {
    let mut generator = ChaCha8Rng::seed_from_u64(plan.seed);
    // Stream 0 may be the world's own: noise must not be the queries' numbers again.
    generator.set_stream(u64::MAX);
    let mut waiting: VecDeque<(u64, u64, f64)> = VecDeque::new();
    for round in 0..plan.rounds {
        if plan.switch_at == Some(round) {
            world.switch();
        }
        while waiting.front().is_some_and(|(due, ..)| *due <= round) {
            if let Some((_, of, reward)) = waiting.pop_front() {
                stack.reward(of, round, reward)?;
            }
        }
        stack.begin(round)?;
        let query = world.next_query();
        let luck: [f64; 3] = generator.random();
        let decision = stack.decide(round, &query, &world.eligible(), luck[0])?;
        let expected = world.expected_rewards(&query);
        let sharpness = COMPARATOR_NORM / world.true_norm().max(f64::MIN_POSITIVE);
        let best_scores: Vec<f64> = world.true_scores(&query).iter().map(|score| sharpness * score).collect();
        history.add(&expected, &best_scores, &decision);
        if let Some(occurrence) = world.occurrence() {
            history.add_occurrence(occurrence, &expected, &decision);
        }
        if let Some(costs) = world.costs() {
            stack.cost(round, costs.drawn[decision.model]);
            history.add_costs(costs, &expected, &decision);
        }
        if luck[1] >= plan.lost {
            let reward = f64::from(u8::from(luck[2] < expected[decision.model]));
            waiting.push_back((round.saturating_add(plan.delay).saturating_add(1), round, reward));
        }
        progress(history);
    }
    for (due, of, reward) in waiting {
        stack.reward(of, due, reward)?;
    }
    stack.finish()
}

/// Router and learner in one process, without anything between them.
pub struct InProcess<'a> {
    trainer: &'a mut Trainer,
    /// Rounds between two updates of the router's policy; 1 routes with the learner's own.
    refresh: u64,
    /// Whether algorithms that have an index of their own play by it.
    exact: bool,
    /// Whether costs are known with the reward only.
    costs_late: bool,
    params: Params,
    open: BTreeMap<u64, Open>,
}

/// A decision whose reward has not come in.
struct Open {
    query: Query,
    decision: Decision,
    /// Version of the parameters that decided.
    version: u64,
    /// What it was charged, and what it turned out to cost, where that is to be settled.
    charged: Vec<(String, f64)>,
    settled: BTreeMap<String, f64>,
}

/// Name of the outcome that simulated models cost.
pub const COST: &str = "cost";

impl<'a> InProcess<'a> {
    /// A router that is updated every `refresh` rounds.
    pub fn new(trainer: &'a mut Trainer, refresh: u64) -> Self {
        let params = params(trainer);
        Self { trainer, refresh, exact: false, costs_late: false, params, open: BTreeMap::new() }
    }

    /// Lets algorithms that play by an index which routers cannot hold do so, always with what is learned by then.
    pub fn exactly(self) -> Self {
        Self { exact: true, ..self }
    }

    /// Costs come with the reward instead of with the decision.
    pub fn with_late_costs(self) -> Self {
        Self { costs_late: true, ..self }
    }
}

impl Stack for InProcess<'_> {
    type Error = Misfit;

    fn begin(&mut self, round: u64) -> Result<(), Misfit> {
        if self.refresh > 1 && round.is_multiple_of(self.refresh) {
            self.params = params(self.trainer);
        }
        Ok(())
    }

    fn decide(&mut self, round: u64, query: &Query, eligible: &Eligible, luck: f64) -> Result<Decision, Misfit> {
        // An index is over all models.
        let by_index = self.exact && eligible.is_all();
        let exact = if by_index { self.trainer.decide_exactly(query)? } else { None };
        let decision = match exact {
            Some(decision) => decision,
            None => {
                let distribution = if self.refresh > 1 {
                    self.params.distribution_among(query, eligible)?
                } else {
                    self.trainer.distribution_among(query, eligible)?
                };
                Decision { model: distribution.draw(luck), distribution }
            }
        };
        let version = if self.refresh > 1 { self.params.version } else { self.trainer.version() };
        let (charged, settled) = Default::default();
        self.open.insert(round, Open { query: query.clone(), decision: decision.clone(), version, charged, settled });
        Ok(decision)
    }

    fn cost(&mut self, round: u64, cost: f64) {
        let Some(open) = self.open.get_mut(&round) else { return };
        let cost = BTreeMap::from([(COST.to_owned(), cost)]);
        let Distribution { policy, propensities, .. } = &open.decision.distribution;
        let decision = ChargedDecision {
            model: open.decision.model,
            played: Some(propensities),
            policy: Some(policy),
            params_version: Some(open.version),
        };
        if self.costs_late {
            open.charged = self.trainer.charge(decision, &BTreeMap::new());
            open.settled = cost;
        } else {
            self.trainer.charge(decision, &cost);
        }
    }

    fn reward(&mut self, round: u64, _now: u64, reward: f64) -> Result<(), Misfit> {
        if let Some(Open { query, decision, charged, settled, .. }) = self.open.remove(&round) {
            // Rewards come in order: what is older was lost.
            self.open = self.open.split_off(&round);
            self.trainer.settle(decision.model, &charged, &settled);
            self.trainer.learn(to_example(query, decision, reward)?)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Misfit> {
        self.trainer.flush();
        Ok(())
    }
}

fn params(trainer: &Trainer) -> Params {
    let spec = trainer.spec();
    Params {
        space: Name::default_space(),
        epoch: 0,
        version: trainer.version(),
        revision: 0,
        models: spec.models.clone(),
        dim: spec.dim,
        created_ms: 0,
        algorithm: spec.algorithm().to_owned(),
        policy: trainer.policy(),
    }
}

fn to_example(query: Query, decision: Decision, reward: f64) -> Result<Example, BadExample> {
    let Decision { model, distribution } = decision;
    let Distribution { policy, propensities, eligible } = distribution;
    Example::new(query, model, propensities, Some(policy), reward)?.among(eligible)
}
