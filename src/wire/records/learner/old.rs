//! Older versions of a learner's record.
//!
//! All versions so far share the structs of the present one. They differ in the policy value, the last part of the payload.

use serde::Deserialize;

use super::value::{BoundRecord, EstimateRecord, EvaluationRecord, ModelRewardsRecord, PolicyValueRecord};
use super::{AlgorithmRecord, GeneratorRecord, LearnerRecord, LessonRecord, RewardMeanRecord};
use crate::wire::envelope::{Damaged, decode};

/// Version 1: everything before the policy value.
#[derive(Deserialize)]
struct Unevaluated {
    algorithm: String,
    dim: u64,
    models: Vec<String>,
    generator: GeneratorRecord,
    pending: Vec<LessonRecord>,
    reward_mean: RewardMeanRecord,
    reward_sum: f64,
    learned: u64,
    version: u64,
    state: AlgorithmRecord,
}

/// The policy value in version 2 before commit c3372b6: one best model instead of a mix.
#[derive(Deserialize)]
struct PolicyValueWithBest {
    examples: u64,
    evaluation: EvaluationRecord,
    rewards: Vec<ModelRewardsRecord>,
    /// Index of the model that earned the most alone, if any was played.
    best: Option<u64>,
    pays: bool,
}

/// Policies that are evaluated beside those that always play one model.
const POLICIES: usize = 3;

/// Decodes the payload of version 1 or 2.
pub(super) fn upgrade(version: u16, payload: &[u8]) -> Result<LearnerRecord, Damaged> {
    match version {
        2 => decode(payload).or_else(|problem| upgrade_best(payload).unwrap_or(Err(problem))),
        1 => decode::<Unevaluated>(payload).map(Unevaluated::without_policy_value),
        _ => Err(Damaged::Corrupt(format!("there is no format version {version}"))),
    }
}

/// Decodes the older layout of version 2; none if the payload has another layout. A payload decodes in one layout only,
/// unless the two encode the same value: an empty mix and no best model.
fn upgrade_best(payload: &[u8]) -> Option<Result<LearnerRecord, Damaged>> {
    let (learner, value): (Unevaluated, PolicyValueWithBest) = decode(payload).ok()?;
    let models = learner.models.len();
    Some(match value.best {
        Some(best) if best >= models as u64 => Err(Damaged::Corrupt(format!("there is no model {best}"))),
        best => Ok(learner.with_policy_value(value.with_mix(best, models))),
    })
}

impl PolicyValueWithBest {
    /// The guard played only the best model beside the policy. That is a mix with probability 1 on it, which holds until
    /// the guard looks again, after 256 evaluated examples at the latest.
    fn with_mix(self, best: Option<u64>, models: usize) -> PolicyValueRecord {
        let one_hot = |best: u64| (0..models as u64).map(|m| f64::from(u8::from(m == best))).collect();
        PolicyValueRecord {
            examples: self.examples,
            evaluation: self.evaluation,
            rewards: self.rewards,
            fallback_mix: best.map(one_hot).unwrap_or_default(),
            pays: self.pays,
        }
    }
}

impl Unevaluated {
    /// Nothing was evaluated. The configured window replaces the length of a block.
    fn without_policy_value(self) -> LearnerRecord {
        let models = self.models.len();
        let lifts: [BoundRecord; 2] = Default::default();
        let mut all = vec![EstimateRecord { lifts: vec![lifts; models], ..EstimateRecord::default() }; POLICIES];
        all.resize(POLICIES + models, EstimateRecord::default());
        self.with_policy_value(PolicyValueRecord {
            examples: 0,
            evaluation: EvaluationRecord {
                models: models as u64,
                events: 0,
                all,
                block_events: 1,
                blocks: Vec::new(),
                blocks_dropped: 0,
            },
            rewards: vec![ModelRewardsRecord { sum: 0.0, count: 0 }; models],
            fallback_mix: Vec::new(),
            pays: false,
        })
    }

    fn with_policy_value(self, policy_value: PolicyValueRecord) -> LearnerRecord {
        let Self { algorithm, dim, models, generator, pending, reward_mean, reward_sum, learned, version, state } =
            self;
        LearnerRecord {
            algorithm,
            dim,
            models,
            generator,
            pending,
            reward_mean,
            reward_sum,
            learned,
            version,
            state,
            policy_value,
        }
    }
}
