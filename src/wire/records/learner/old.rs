//! Older versions of a learner's record.
//!
//! Up to the policy value, which was the last part of their payload, they share one layout.

use serde::Deserialize;

use super::objective::ObjectiveRecord;
use super::value::{
    BoundRecord, EstimateRecord, EvaluationRecord, ModelRewardsRecord, PolicyValueRecord, SampleRatioRecord,
    SharesRecord, WeightsRecord,
};
use super::{AlgorithmRecord, ExampleRecord, GeneratorRecord, LearnerRecord, LessonRecord, RewardMeanRecord};
use crate::wire::envelope::{Damaged, decode};

/// Version 1: everything before the policy value.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct Unevaluated {
    algorithm: String,
    dim: u64,
    models: Vec<String>,
    generator: GeneratorRecord,
    pending: Vec<RewardedLesson>,
    reward_mean: RewardMeanRecord,
    reward_sum: f64,
    learned: u64,
    version: u64,
    state: AlgorithmRecord,
}

/// A lesson up to version 5: a reward of the chosen model and nothing else.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct RewardedLesson {
    example: RewardedExample,
    mean_before: f64,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct RewardedExample {
    query: Vec<f64>,
    model: u64,
    propensities: Vec<f64>,
    policy: Option<Vec<f64>>,
    reward: f64,
}

/// The policy value of version 4, and of version 5 before its sample-ratio test: a guard in place of the rollout.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct GuardedValue {
    examples: u64,
    evaluation: GuardedEvaluation,
    rewards: Vec<ModelRewardsRecord>,
    fallback_mix: Vec<f64>,
    _incumbent: Option<u64>,
    _pays: bool,
}

/// What all versions with estimates have in common.
#[derive(Clone)]
struct Unguarded {
    examples: u64,
    evaluation: EvaluationRecord,
    rewards: Vec<ModelRewardsRecord>,
    fallback_mix: Vec<f64>,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct GuardedEvaluation {
    models: u64,
    events: u64,
    all: Vec<GuardedEstimate>,
    block_events: u64,
    blocks: Vec<Vec<GuardedEstimate>>,
    blocks_dropped: u64,
}

/// Sums over examples for one policy, with those of the guard.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct GuardedEstimate {
    weights: WeightsRecord,
    robust: f64,
    robust_square: f64,
    value: [BoundRecord; 2],
    lifts: Vec<[BoundRecord; 2]>,
    _over_incumbent: BoundRecord,
}

/// The policy value of version 3, and of version 2 since it has a mix.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct UnpairedValue {
    examples: u64,
    evaluation: UnpairedEvaluation,
    rewards: Vec<ModelRewardsRecord>,
    fallback_mix: Vec<f64>,
    _pays: bool,
}

/// The policy value in version 2 before commit c3372b6: one best model instead of a mix.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct UnpairedValueWithBest {
    examples: u64,
    evaluation: UnpairedEvaluation,
    rewards: Vec<ModelRewardsRecord>,
    /// Index of the model that earned the most alone, if any was played.
    best: Option<u64>,
    _pays: bool,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct UnpairedEvaluation {
    models: u64,
    events: u64,
    all: Vec<UnpairedEstimate>,
    block_events: u64,
    blocks: Vec<Vec<UnpairedEstimate>>,
    blocks_dropped: u64,
}

/// Sums over examples without paired differences.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Clone, serde::Serialize))]
struct UnpairedEstimate {
    weights: WeightsRecord,
    robust: f64,
    robust_square: f64,
    /// Of x = w r, then of x = w (1 - r).
    value: [BoundRecord; 2],
    /// Per model b of x = (w r + v (1 - r)) / 2, then of x = (v r + w (1 - r)) / 2; v is 1 / p if b was chosen, else 0.
    lifts: Vec<[BoundRecord; 2]>,
}

/// Policies that are evaluated beside those that always play one model.
const POLICIES: usize = 3;

/// Decodes the payload of version 1, 2, 3, 4 or 5.
pub(super) fn upgrade(version: u16, payload: &[u8]) -> Result<LearnerRecord, Damaged> {
    match version {
        5 => {
            let (learner, (value, sample_ratio)): (Unevaluated, (GuardedValue, SampleRatioRecord)) = decode(payload)?;
            Ok(learner.with_policy_value(value.unguarded(), Some(sample_ratio)))
        }
        4 => {
            let (learner, value): (Unevaluated, GuardedValue) = decode(payload)?;
            Ok(learner.with_policy_value(value.unguarded(), None))
        }
        3 => upgrade_unpaired(payload),
        2 => upgrade_unpaired(payload).or_else(|problem| upgrade_best(payload).unwrap_or(Err(problem))),
        1 => decode::<Unevaluated>(payload).map(Unevaluated::without_policy_value),
        _ => Err(Damaged::unknown_version(version)),
    }
}

fn upgrade_unpaired(payload: &[u8]) -> Result<LearnerRecord, Damaged> {
    let (learner, value): (Unevaluated, UnpairedValue) = decode(payload)?;
    Ok(learner.with_policy_value(value.paired(), None))
}

/// Decodes the older layout of version 2; none if the payload has another layout. A payload decodes in one layout only,
/// unless the two encode the same value: an empty mix and no best model.
fn upgrade_best(payload: &[u8]) -> Option<Result<LearnerRecord, Damaged>> {
    let (learner, value): (Unevaluated, UnpairedValueWithBest) = decode(payload).ok()?;
    let models = learner.models.len();
    Some(match value.best {
        Some(best) if best >= models as u64 => Err(Damaged::Corrupt(format!("there is no model {best}"))),
        best => Ok(learner.with_policy_value(value.with_mix(best, models).paired(), None)),
    })
}

impl UnpairedValueWithBest {
    /// The guard played only the best model beside the policy. That is a mix with probability 1 on it, which holds until
    /// the guard looks again, after 256 evaluated examples at the latest.
    fn with_mix(self, best: Option<u64>, models: usize) -> UnpairedValue {
        let one_hot = |best: u64| (0..models as u64).map(|m| f64::from(u8::from(m == best))).collect();
        UnpairedValue {
            examples: self.examples,
            evaluation: self.evaluation,
            rewards: self.rewards,
            fallback_mix: best.map(one_hot).unwrap_or_default(),
            _pays: self._pays,
        }
    }
}

impl GuardedValue {
    /// A rollout begins as it is configured.
    fn unguarded(self) -> Unguarded {
        let unguarded = |estimates: Vec<GuardedEstimate>| {
            let of = |estimate: GuardedEstimate| {
                let GuardedEstimate { weights, robust, robust_square, value, lifts, .. } = estimate;
                EstimateRecord { weights, robust, robust_square, value, lifts }
            };
            estimates.into_iter().map(of).collect()
        };
        let GuardedEvaluation { models, events, all, block_events, blocks, blocks_dropped } = self.evaluation;
        let evaluation = EvaluationRecord {
            models,
            events,
            all: unguarded(all),
            block_events,
            blocks: blocks.into_iter().map(unguarded).collect(),
            blocks_dropped,
        };
        Unguarded { examples: self.examples, evaluation, rewards: self.rewards, fallback_mix: self.fallback_mix }
    }
}

impl UnpairedValue {
    fn paired(self) -> Unguarded {
        Unguarded {
            examples: self.examples,
            evaluation: self.evaluation.paired(),
            rewards: self.rewards,
            fallback_mix: self.fallback_mix,
        }
    }
}

impl UnpairedEvaluation {
    fn paired(self) -> EvaluationRecord {
        let paired = |estimates: Vec<UnpairedEstimate>| estimates.into_iter().map(UnpairedEstimate::paired).collect();
        EvaluationRecord {
            models: self.models,
            events: self.events,
            all: paired(self.all),
            block_events: self.block_events,
            blocks: self.blocks.into_iter().map(paired).collect(),
            blocks_dropped: self.blocks_dropped,
        }
    }
}

impl UnpairedEstimate {
    /// The same evidence in the present units. w (1 - r) has the mean 1 - value, and is 1 above an estimate of minus the value.
    /// (w r + v (1 - r)) / 2 has the mean (1 + lift) / 2, and 2 x - 1 estimates the lift; likewise the other way round.
    fn paired(self) -> EstimateRecord {
        let minus_value = |bound: BoundRecord| BoundRecord { sum: bound.sum - bound.count as f64, ..bound };
        let lift = |bound: BoundRecord| BoundRecord {
            count: bound.count,
            sum: 2.0 * bound.sum - bound.count as f64,
            variation: 4.0 * bound.variation,
        };
        let [earned, missed] = self.value;
        EstimateRecord {
            weights: self.weights,
            robust: self.robust,
            robust_square: self.robust_square,
            value: [earned, minus_value(missed)],
            lifts: self.lifts.into_iter().map(|pair| pair.map(lift)).collect(),
        }
    }
}

impl RewardedLesson {
    fn with_feedback(self) -> LessonRecord {
        let RewardedExample { query, model, propensities, policy, reward } = self.example;
        let example = ExampleRecord {
            query,
            model,
            propensities,
            policy,
            reward: Some(reward),
            eligible: None,
            others: Vec::new(),
            preference: None,
        };
        LessonRecord { example, mean_before: self.mean_before, tolls: Vec::new() }
    }
}

impl Unevaluated {
    /// Nothing was evaluated. The configured window replaces the length of a block.
    fn without_policy_value(self) -> LearnerRecord {
        let models = self.models.len();
        let lifts: [BoundRecord; 2] = Default::default();
        let mut all = vec![EstimateRecord { lifts: vec![lifts; models], ..EstimateRecord::default() }; POLICIES];
        all.resize(POLICIES + models, EstimateRecord::default());
        let evaluation = EvaluationRecord {
            models: models as u64,
            events: 0,
            all,
            block_events: 1,
            blocks: Vec::new(),
            blocks_dropped: 0,
        };
        let rewards = vec![ModelRewardsRecord { sum: 0.0, count: 0 }; models];
        self.with_policy_value(Unguarded { examples: 0, evaluation, rewards, fallback_mix: Vec::new() }, None)
    }

    /// Every example had a reward and no outcomes. Without a record of it, the sample-ratio test begins with the next one.
    fn with_policy_value(self, value: Unguarded, sample_ratio: Option<SampleRatioRecord>) -> LearnerRecord {
        let Unguarded { examples, evaluation, rewards, fallback_mix } = value;
        let untested =
            || SampleRatioRecord { models: vec![SharesRecord::default(); self.models.len()], log_evidence: 0.0 };
        let sample_ratio = sample_ratio.unwrap_or_else(untested);
        let policy_value =
            PolicyValueRecord { examples, evaluation, rewards, fallback_mix, rollout: None, sample_ratio };
        let Self { algorithm, dim, models, generator, pending, reward_mean, reward_sum, learned, version, state } =
            self;
        LearnerRecord {
            algorithm,
            dim,
            models,
            generator,
            pending: pending.into_iter().map(RewardedLesson::with_feedback).collect(),
            reward_mean,
            reward_sum,
            learned,
            version,
            state,
            policy_value,
            rewarded: learned,
            objective: ObjectiveRecord::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::envelope::encode;

    fn learner() -> Unevaluated {
        Unevaluated {
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
        }
    }

    fn value(fallback_mix: Vec<f64>) -> UnpairedValue {
        let bound = |count, sum| BoundRecord { count, sum, variation: 0.5 };
        let estimate = UnpairedEstimate {
            weights: WeightsRecord::default(),
            robust: 1.0,
            robust_square: 1.5,
            value: [bound(2, 0.75), bound(2, 1.25)],
            lifts: vec![[bound(2, 1.5), bound(2, 0.5)]],
        };
        let evaluation = UnpairedEvaluation {
            models: 3,
            events: 2,
            all: vec![estimate.clone()],
            block_events: 5,
            blocks: vec![vec![estimate]],
            blocks_dropped: 1,
        };
        UnpairedValue { examples: 2, evaluation, rewards: Vec::new(), fallback_mix, _pays: true }
    }

    fn guarded(value: UnpairedValue) -> GuardedValue {
        let Unguarded { examples, evaluation, rewards, fallback_mix } = value.paired();
        let EvaluationRecord { models, events, all, block_events, blocks, blocks_dropped } = evaluation;
        let guarded = |estimates: Vec<EstimateRecord>| {
            let of = |estimate: EstimateRecord| {
                let EstimateRecord { weights, robust, robust_square, value, lifts } = estimate;
                let _over_incumbent = BoundRecord { count: 1, sum: 0.25, variation: 0.5 };
                GuardedEstimate { weights, robust, robust_square, value, lifts, _over_incumbent }
            };
            estimates.into_iter().map(of).collect()
        };
        let evaluation = GuardedEvaluation {
            models,
            events,
            all: guarded(all),
            block_events,
            blocks: blocks.into_iter().map(guarded).collect(),
            blocks_dropped,
        };
        GuardedValue { examples, evaluation, rewards, fallback_mix, _incumbent: Some(2), _pays: true }
    }

    #[test]
    fn version_5_has_a_guard() {
        let value = || value(vec![0.25, 0.25, 0.5]);
        let sample_ratio =
            SampleRatioRecord { models: vec![SharesRecord { played: 2, expected: 1.5 }; 3], log_evidence: 0.5 };
        let upgraded = upgrade(5, &encode(&(learner(), (guarded(value()), sample_ratio.clone())))).unwrap();
        assert_eq!(upgraded, learner().with_policy_value(value().paired(), Some(sample_ratio)));
        assert_eq!(upgraded.policy_value.rollout, None);
    }

    #[test]
    fn version_4_has_no_sample_ratio_test() {
        let value = || value(vec![0.25, 0.25, 0.5]);
        let upgraded = upgrade(4, &encode(&(learner(), guarded(value())))).unwrap();
        assert_eq!(upgraded, learner().with_policy_value(value().paired(), None));
        let SampleRatioRecord { models, log_evidence } = upgraded.policy_value.sample_ratio;
        assert_eq!((models, log_evidence), (vec![SharesRecord::default(); 3], 0.0));
    }

    #[test]
    fn version_3_has_the_same_evidence_in_other_units() {
        let upgraded = upgrade(3, &encode(&(learner(), value(vec![0.25, 0.25, 0.5])))).unwrap();
        let PolicyValueRecord { evaluation, fallback_mix, .. } = upgraded.policy_value;
        assert_eq!(fallback_mix, vec![0.25, 0.25, 0.5]);
        let bound = |sum, variation| BoundRecord { count: 2, sum, variation };
        let expected = EstimateRecord {
            weights: WeightsRecord::default(),
            robust: 1.0,
            robust_square: 1.5,
            // 0.375 was earned, 0.625 missed; the lifts are 2 x 0.75 - 1 and 2 x 0.25 - 1.
            value: [bound(0.75, 0.5), bound(-0.75, 0.5)],
            lifts: vec![[bound(1.0, 2.0), bound(-1.0, 2.0)]],
        };
        assert_eq!((&evaluation.all[0], &evaluation.blocks[0][0]), (&expected, &expected));
    }

    #[test]
    fn version_2_has_two_layouts() {
        let with_mix = |mix: Vec<f64>| learner().with_policy_value(value(mix).paired(), None);
        let with_best = |best: Option<u64>| {
            let UnpairedValue { examples, evaluation, rewards, _pays, .. } = value(Vec::new());
            encode(&(learner(), UnpairedValueWithBest { examples, evaluation, rewards, best, _pays }))
        };
        let mix = vec![0.25, 0.25, 0.5];
        assert_eq!(upgrade(2, &encode(&(learner(), value(mix.clone())))).unwrap(), with_mix(mix));
        assert_eq!(upgrade(2, &with_best(None)).unwrap(), with_mix(Vec::new()));
        assert_eq!(upgrade(2, &with_best(Some(2))).unwrap(), with_mix(vec![0.0, 0.0, 1.0]));
        assert_eq!(upgrade(2, &with_best(Some(3))), Err(Damaged::Corrupt("there is no model 3".to_owned())));
        let mut neither = with_best(Some(2));
        let option = neither.len() - 3;
        neither[option] = 2;
        assert!(upgrade(2, &neither).is_err());
    }

    #[test]
    fn version_1_has_no_policy_value() {
        let payload = encode(&learner());
        let upgraded = upgrade(1, &payload).unwrap();
        assert_eq!(upgraded.policy_value.examples, 0);
        assert_eq!(upgraded, learner().without_policy_value());
        assert!(upgrade(0, &payload).is_err());
    }
}
