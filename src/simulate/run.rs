//! The closed loop: a router plays a policy in a world, a learner learns from what comes back.

use std::collections::VecDeque;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use super::World;
use super::history::History;
use crate::event::{BadExample, BadQuery, Example, Name, Query};
use crate::learner::{Decision, Trainer};
use crate::router::Params;

/// How the loop runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Number of queries.
    pub rounds: u64,
    /// Rounds between a decision and its reward.
    pub delay: u64,
    /// Rounds between two updates of the router's policy; 1 routes with the learner's own.
    pub refresh: u64,
    /// Share of rewards that never come.
    pub lost: f64,
    /// Round before which the world switches.
    pub switch_at: Option<u64>,
    /// Seed of draws, noise and losses.
    pub seed: u64,
}

/// Regret is measured against W* scaled to this nuclear norm, the practical preset's tau: W* itself would be played
/// almost uniformly, and beaten by everyone.
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

/// Runs the loop; `progress` is told after every round.
pub fn run(
    world: &mut dyn World,
    trainer: &mut Trainer,
    plan: &Plan,
    history: &mut History,
    mut progress: impl FnMut(&History),
) -> Result<(), Misfit> {
    let mut generator = ChaCha8Rng::seed_from_u64(plan.seed);
    // Stream 0 may be the world's own: noise must not be the queries' numbers again.
    generator.set_stream(u64::MAX);
    let mut waiting: VecDeque<(u64, Example)> = VecDeque::new();
    let mut router = Router::new(plan.refresh, trainer);
    for round in 0..plan.rounds {
        if plan.switch_at == Some(round) {
            world.switch();
        }
        while waiting.front().is_some_and(|(due, _)| *due <= round) {
            if let Some((_, example)) = waiting.pop_front() {
                trainer.learn(example)?;
            }
        }
        router.refresh(round, trainer);
        let query = world.next_query();
        let luck: [f64; 3] = generator.random();
        let decision = router.decide(trainer, &query, luck[0])?;
        let expected = world.expected_rewards(&query);
        let sharpness = COMPARATOR_NORM / world.true_norm().max(f64::MIN_POSITIVE);
        let best_scores: Vec<f64> = world.true_scores(&query).iter().map(|score| sharpness * score).collect();
        history.add(&expected, &best_scores, &decision);
        if luck[1] >= plan.lost {
            let reward = f64::from(u8::from(luck[2] < expected[decision.model]));
            let example = to_example(query, decision, reward)?;
            waiting.push_back((round.saturating_add(plan.delay).saturating_add(1), example));
        }
        progress(history);
    }
    for (_, example) in waiting {
        trainer.learn(example)?;
    }
    trainer.flush();
    Ok(())
}

/// The router's side of the loop: a policy that may be older than the learner's.
struct Router {
    refresh: u64,
    params: Params,
}

impl Router {
    fn new(refresh: u64, trainer: &Trainer) -> Self {
        Self { refresh, params: params(trainer) }
    }

    fn refresh(&mut self, round: u64, trainer: &Trainer) {
        if self.refresh > 1 && round.is_multiple_of(self.refresh) {
            self.params = params(trainer);
        }
    }

    fn decide(&self, trainer: &Trainer, query: &Query, u: f64) -> Result<Decision, BadQuery> {
        let distribution =
            if self.refresh > 1 { self.params.distribution(query)? } else { trainer.distribution(query)? };
        Ok(Decision { model: distribution.draw(u), distribution })
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
    Example::new(query, model, distribution.propensities, Some(distribution.policy), reward)
}
