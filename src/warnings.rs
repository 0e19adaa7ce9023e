//! Warnings about what a log says: signs that a space learns less, or something else, than its log is meant to say.
//!
//! [`warnings`] is pure: counts and a summary of the examples in, sentences out. Each names the key that changes it. Every
//! warning has a minimum number of events, so that a young stream gives none.

use serde::Serialize;

use crate::engine::Learned;
use crate::event::ModelName;
use crate::joiner::{Aggregate, JoinCounts, JoinSpec, OnMissing};

/// Examples with the same reward, before that is worth a warning.
pub const EQUAL_REWARDS_MIN: u64 = 200;

/// Share of open queries that may still become the default reward, at most, for "every reward is the same" to be final.
pub const OPEN_QUERIES_MAX: f64 = 0.05;

/// Queries whose window is closed or that have a reward, before the share of unrewarded ones is judged.
pub const UNREWARDED_MIN: u64 = 200;

/// Largest share of unrewarded queries without a warning.
pub const UNREWARDED_MAX: f64 = 0.5;

/// Rewards learned, before the share of clipped ones is judged.
pub const CLIPPED_MIN: u64 = 200;

/// Largest share of clipped rewards without a warning.
pub const CLIPPED_MAX: f64 = 0.05;

/// Rewards used and further ones, before the share of the latter is judged.
pub const FURTHER_MIN: u64 = 200;

/// Largest share of further rewards without a warning. Small: purchases after clicks are few, and say most.
pub const FURTHER_MAX: f64 = 0.01;

/// Examples before a model without one is worth a warning, and the same per model.
pub const UNPLAYED_MIN: u64 = 1000;
/// See [`UNPLAYED_MIN`].
pub const UNPLAYED_MIN_PER_MODEL: u64 = 50;

/// Limit on the number of models that a warning lists.
const MODELS_LISTED: usize = 5;

/// Kind of a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// Every example has the same reward.
    AllRewardsEqual,
    /// Most queries have no reward and are dropped.
    MostQueriesUnrewarded,
    /// Many rewards are outside of `reward.range`.
    ManyRewardsClipped,
    /// Rewards after the first of a request are ignored.
    FurtherRewardsIgnored,
    /// A configured model has no example.
    ModelNeverPlayed,
}

impl Code {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::AllRewardsEqual,
        Self::MostQueriesUnrewarded,
        Self::ManyRewardsClipped,
        Self::FurtherRewardsIgnored,
        Self::ModelNeverPlayed,
    ];

    /// As it is serialised, and the label of its metric.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllRewardsEqual => "all-rewards-equal",
            Self::MostQueriesUnrewarded => "most-queries-unrewarded",
            Self::ManyRewardsClipped => "many-rewards-clipped",
            Self::FurtherRewardsIgnored => "further-rewards-ignored",
            Self::ModelNeverPlayed => "model-never-played",
        }
    }
}

/// A warning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Its kind.
    pub code: Code,
    /// A sentence: what the log says, and what to do.
    pub text: String,
    /// The configuration key that changes it.
    pub key: &'static str,
}

/// What is known of a space.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Its models.
    pub models: &'a [ModelName],
    /// How it joins.
    pub rule: &'a JoinSpec,
    /// Outcomes of its events.
    pub counts: &'a JoinCounts,
    /// Its examples.
    pub learned: &'a Learned,
}

/// The warnings about a space, in the order of [`Code::ALL`].
pub fn warnings(evidence: Evidence<'_>) -> Vec<Warning> {
    let checks = [all_rewards_equal, most_queries_unrewarded, many_rewards_clipped, further_ignored, never_played];
    Code::ALL
        .into_iter()
        .zip(checks)
        .filter_map(|(code, check)| check(evidence).map(|(key, text)| Warning { code, text, key }))
        .collect()
}

/// The key, and the sentence.
type Finding = Option<(&'static str, String)>;

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

fn all_rewards_equal(Evidence { rule, counts, learned, .. }: Evidence<'_>) -> Finding {
    let reward = learned.only_reward().filter(|_| learned.number() >= EQUAL_REWARDS_MIN)?;
    // It was scaled to 0..1 and back.
    let nothing = format!("every reward is {}: there is nothing to learn from.", (reward * 1e6).round() / 1e6);
    if share(learned.clipped, learned.rewarded) > UNREWARDED_MAX {
        let (low, high) = learned.range();
        let advice =
            format!("Most were clipped to reward.range = [{low}, {high}]: set it to the range of your rewards");
        return Some(("reward.range", format!("{nothing} {advice}")));
    }
    if rule.on_missing == OnMissing::Drop {
        let advice =
            "If only clicks are logged, set join.on_missing = \"default\", so that a query without one counts as 0";
        return Some(("join.on_missing", format!("{nothing} {advice}")));
    }
    // The first window is still open: so far only clicks were learned.
    let open = share(counts.queries.pending, counts.queries.pending + learned.number());
    let advice = "Check that events.fields.reward maps the field that tells a good answer from a bad one";
    (open <= OPEN_QUERIES_MAX).then(|| ("events.fields.reward", format!("{nothing} {advice}")))
}

fn most_queries_unrewarded(Evidence { rule, counts, .. }: Evidence<'_>) -> Finding {
    let (expired, all) = (counts.queries.expired, counts.queries.joined + counts.queries.expired);
    let is_most = all >= UNREWARDED_MIN && share(expired, all) > UNREWARDED_MAX;
    (is_most && rule.on_missing == OnMissing::Drop).then(|| {
        let advice = "If no reward means a bad answer, set join.on_missing = \"default\"; if rewards come later, raise \
                      join.window_ms";
        ("join.on_missing", format!("{expired} of {all} queries have no reward and are not learned from. {advice}"))
    })
}

fn many_rewards_clipped(Evidence { learned, .. }: Evidence<'_>) -> Finding {
    let (clipped, all) = (learned.clipped, learned.rewarded);
    (all >= CLIPPED_MIN && share(clipped, all) > CLIPPED_MAX).then(|| {
        let (low, high) = learned.range();
        let found = format!("{clipped} of {all} rewards are outside reward.range = [{low}, {high}] and were clipped.");
        ("reward.range", format!("{found} Set it to the range of your rewards"))
    })
}

fn further_ignored(Evidence { rule, counts, .. }: Evidence<'_>) -> Finding {
    let (further, all) = (counts.rewards.further, counts.rewards.used + counts.rewards.further);
    let is_much = all >= FURTHER_MIN && share(further, all) > FURTHER_MAX;
    (is_much && rule.aggregate == Aggregate::First).then(|| {
        let found = format!("{further} of {all} rewards came after the first of their request and were ignored.");
        let advice =
            "To learn from all rewards of a request, set join.aggregate to \"sum\", \"max\" or another aggregate";
        ("join.aggregate", format!("{found} {advice}"))
    })
}

fn never_played(Evidence { models, learned, .. }: Evidence<'_>) -> Finding {
    let (number, enough) = (learned.number(), UNPLAYED_MIN.max(UNPLAYED_MIN_PER_MODEL * models.len() as u64));
    let unplayed: Vec<&str> = models
        .iter()
        .zip(&learned.examples)
        .filter(|(_, examples)| **examples == 0)
        .map(|(model, _)| model.as_str())
        .collect();
    (number >= enough && !unplayed.is_empty()).then(|| {
        let named = unplayed[..unplayed.len().min(MODELS_LISTED)].join(", ");
        let more = unplayed.len().saturating_sub(MODELS_LISTED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let (model, them) = if unplayed.len() == 1 { ("model", "it") } else { ("models", "them") };
        let advice = format!("Nothing can be learned about {them}: route some queries there, or remove {them} from");
        let text = format!("none of {number} examples played the {model} {named}{more}. {advice} learner.models");
        ("learner.models", text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{JoinConfig, RewardSpec};
    use crate::joiner::{QueryCounts, RewardCounts};

    /// A space in brief.
    #[derive(Clone, Copy)]
    struct Case {
        on_missing: OnMissing,
        aggregate: Aggregate,
        /// Examples of each of three models.
        examples: [u64; 3],
        /// Rewards as joined, which the examples have in turn.
        rewards: &'static [f64],
        expired: u64,
        pending: u64,
        further: u64,
    }

    /// An ordinary log.
    const GOOD: Case = Case {
        on_missing: OnMissing::Drop,
        aggregate: Aggregate::First,
        examples: [400, 300, 300],
        rewards: &[0.0, 1.0, 0.5],
        expired: 0,
        pending: 0,
        further: 0,
    };

    fn found(case: Case) -> Vec<Warning> {
        let Case { on_missing, aggregate, examples, rewards, expired, pending, further } = case;
        let range = RewardSpec { low: 0.0, high: 1.0, reject: false, failed: None };
        let mut learned = Learned::new(3, &range);
        let models = examples.iter().enumerate().flat_map(|(model, number)| (0..*number).map(move |_| model));
        for (model, reward) in models.zip(rewards.iter().cycle()) {
            learned.add(model, *reward, false, &range);
        }
        let joined = learned.number();
        let queries = QueryCounts { joined, expired, pending, ..QueryCounts::default() };
        let rewards = RewardCounts { used: joined, duplicate: further, further, ..RewardCounts::default() };
        let rule = JoinSpec { on_missing, aggregate, ..JoinConfig::default().check().unwrap() };
        let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
        let counts = JoinCounts { queries, rewards };
        warnings(Evidence { models: &models, rule: &rule, counts: &counts, learned: &learned })
    }

    #[track_caller]
    fn check(case: Case, expected: &[(Code, &str, &str)]) {
        let found = found(case);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (warning, (code, key, text)) in found.iter().zip(expected) {
            assert_eq!((warning.code, warning.key), (*code, *key), "{}", warning.text);
            assert!(warning.text.contains(key) && warning.text.contains(text), "{text}: {}", warning.text);
            assert!(!warning.text.ends_with('.'), "{}", warning.text);
        }
    }

    #[test]
    fn an_ordinary_log_has_no_warnings() {
        check(GOOD, &[]);
        check(Case { examples: [0; 3], ..GOOD }, &[]);
    }

    #[test]
    fn every_reward_is_the_same() {
        let code = Code::AllRewardsEqual;
        let clicks = Case { rewards: &[1.0], ..GOOD };
        check(clicks, &[(code, "join.on_missing", "every reward is 1: there is nothing to learn from.")]);
        let default = Case { on_missing: OnMissing::Default(0.0), ..clicks };
        check(default, &[(code, "events.fields.reward", "every reward is 1:")]);
        // The first window is open: what has no click yet will count as 0.
        check(Case { pending: 60, ..default }, &[]);
        check(Case { pending: 50, ..default }, &[(code, "events.fields.reward", "every reward is 1:")]);
        let clipped = Case { rewards: &[5.0, 4.0], ..GOOD };
        let both =
            [(code, "reward.range", "every reward is 1:"), (Code::ManyRewardsClipped, "reward.range", "1000 of")];
        check(clipped, &both);
        check(Case { examples: [100, 99, 0], ..clicks }, &[]);
        check(Case { examples: [100, 100, 0], ..clicks }, &[(code, "join.on_missing", "every reward is 1:")]);
        check(Case { rewards: &[0.25], ..GOOD }, &[(code, "join.on_missing", "every reward is 0.25:")]);
    }

    #[test]
    fn most_queries_have_no_reward() {
        let (code, key) = (Code::MostQueriesUnrewarded, "join.on_missing");
        check(Case { expired: 1000, ..GOOD }, &[]);
        check(Case { expired: 1001, ..GOOD }, &[(code, key, "1001 of 2001 queries have no reward")]);
        check(Case { expired: 1001, on_missing: OnMissing::Default(0.0), ..GOOD }, &[]);
        let few = Case { examples: [10, 0, 0], ..GOOD };
        check(Case { expired: 189, ..few }, &[]);
        check(Case { expired: 190, ..few }, &[(code, key, "190 of 200 queries")]);
    }

    #[test]
    fn many_rewards_are_clipped() {
        const RARE: &[f64] =
            &[0.0, 1.0, 0.5, 0.1, 0.2, 0.0, 1.0, 0.5, 0.1, 0.2, 0.0, 1.0, 0.5, 0.1, 0.2, 0.0, 1.0, 0.5, 0.1, 2.0];
        check(Case { rewards: RARE, ..GOOD }, &[]);
        let often = Case { rewards: &RARE[2..], ..GOOD };
        let expected = "55 of 1000 rewards are outside reward.range = [0, 1] and were clipped";
        check(often, &[(Code::ManyRewardsClipped, "reward.range", expected)]);
        check(Case { examples: [100, 50, 49], ..often }, &[]);
    }

    #[test]
    fn further_rewards_are_ignored() {
        let (code, key) = (Code::FurtherRewardsIgnored, "join.aggregate");
        check(Case { further: 10, ..GOOD }, &[]);
        check(Case { further: 11, ..GOOD }, &[(code, key, "11 of 1011 rewards came after the first")]);
        check(Case { further: 500, aggregate: Aggregate::Sum, ..GOOD }, &[]);
        check(Case { further: 99, examples: [50, 50, 0], ..GOOD }, &[]);
    }

    #[test]
    fn a_model_was_never_played() {
        let (code, key) = (Code::ModelNeverPlayed, "learner.models");
        check(Case { examples: [500, 500, 0], ..GOOD }, &[(code, key, "none of 1000 examples played the model c.")]);
        check(Case { examples: [500, 499, 0], ..GOOD }, &[]);
        check(Case { examples: [0, 0, 1000], ..GOOD }, &[(code, key, "played the models a, b.")]);
        let range = RewardSpec { low: 0.0, high: 1.0, reject: false, failed: None };
        let models: Vec<ModelName> = (0..30).map(|i| ModelName::try_from(format!("m-{i}")).unwrap()).collect();
        let mut learned = Learned::new(30, &range);
        learned.examples[0] = 1499;
        let (rule, counts) = (JoinConfig::default().check().unwrap(), JoinCounts::default());
        let many =
            |learned: &Learned| never_played(Evidence { models: &models, rule: &rule, counts: &counts, learned });
        assert_eq!(many(&learned), None, "30 models need 1500 examples");
        learned.examples[0] = 1500;
        let (_, text) = many(&learned).unwrap();
        assert!(text.contains("m-1, m-2, m-3, m-4, m-5 and 24 more"), "{text}");
    }

    #[test]
    fn codes_are_serialised_as_their_names() {
        for code in Code::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }
}
