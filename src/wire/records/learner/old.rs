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
        _ => Err(Damaged::unknown_version(version)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::envelope::encode;

    fn record(fallback_mix: Vec<f64>) -> LearnerRecord {
        let unevaluated = Unevaluated {
            algorithm: "uniform".to_owned(),
            dim: 2,
            models: vec!["a".to_owned(), "b".to_owned(), "c".to_owned()],
            generator: GeneratorRecord { seed: [7; 32], stream: 1, word_position: 300 },
            pending: Vec::new(),
            reward_mean: RewardMeanRecord { sum: 1.0, weight: 2.0 },
            reward_sum: 1.0,
            learned: 2,
            version: 2,
            state: AlgorithmRecord::Stateless,
        };
        let mut record = unevaluated.without_policy_value();
        (record.policy_value.fallback_mix, record.policy_value.pays) = (fallback_mix, true);
        record
    }

    /// A payload of version 2 in its older layout: `best` in place of an empty mix.
    fn with_best(best: &[u8]) -> Vec<u8> {
        let payload = encode(&record(Vec::new()));
        let (before, end) = payload.split_at(payload.len() - 2);
        assert_eq!(end, [0, 1], "the length of the mix, and that it pays");
        [before, best, &[1]].concat()
    }

    #[test]
    fn version_2_has_two_layouts() {
        let mix = record(vec![0.25, 0.25, 0.5]);
        assert_eq!(upgrade(2, &encode(&mix)).unwrap(), mix);
        assert_eq!(upgrade(2, &with_best(&[0])).unwrap(), record(Vec::new()));
        assert_eq!(upgrade(2, &with_best(&[1, 2])).unwrap(), record(vec![0.0, 0.0, 1.0]));
        assert_eq!(upgrade(2, &with_best(&[1, 3])), Err(Damaged::Corrupt("there is no model 3".to_owned())));
        assert!(upgrade(2, &with_best(&[2, 3])).is_err());
    }

    #[test]
    fn version_1_has_no_policy_value() {
        let record = record(Vec::new());
        let payload = encode(&record);
        let value = encode(&record.policy_value);
        let upgraded = upgrade(1, &payload[..payload.len() - value.len()]).unwrap();
        assert!(!upgraded.policy_value.pays && upgraded.policy_value.examples == 0);
        assert_eq!(LearnerRecord { policy_value: record.policy_value.clone(), ..upgraded }, record);
        assert!(upgrade(0, &payload).is_err());
    }
}
