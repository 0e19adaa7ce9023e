//! The documented defaults are the built-in ones.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use pointsman::config::{
    Config, Estimator, JoinConfig, LearnerConfig, LearningRate, ObjectiveConfig, OutcomeConfig, RouterConfig,
};
use pointsman::hpg::gradient::Baseline;

fn default_toml() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("config/default.toml")).unwrap()
}

#[test]
fn default_toml_equals_the_built_in_defaults() {
    assert_eq!(toml::from_str::<Config>(&default_toml()).unwrap(), Config::default());
}

/// Also with its optional keys, which are there as comments, uncommented.
#[test]
fn default_toml_documents_every_key_and_only_those() {
    let learner = LearnerConfig {
        fixed_model: Some(String::new()),
        tau: Some(1.0),
        beta: Some(1.0),
        eta: Some(1.0),
        rank: Some(1),
        batch: Some(1),
        learning_rate: Some(LearningRate::Constant),
        horizon: Some(1),
        intrinsic_rank: Some(1),
        half_life: Some(1.0),
        estimator: Some(Estimator::Critic),
        baseline: Some(Baseline::Mean),
        feature_rank: Some(1),
        alpha: Some(1.0),
        ridge: Some(1.0),
        ..LearnerConfig::default()
    };
    let join = JoinConfig { remember_ms: Some(1), ..JoinConfig::default() };
    let router = RouterConfig { fallback_model: Some(String::new()), ..RouterConfig::default() };
    let cost = OutcomeConfig {
        field: Some(String::new()),
        range: Some([0.0, 1.0]),
        budget: Some(1.0),
        models: ["minilm", "bge"].map(|model| (model.to_owned(), 1.0)).into(),
        ..OutcomeConfig::default()
    };
    let objective = ObjectiveConfig { floor: Some(1.0), outcomes: [("cost".to_owned(), cost)].into() };
    let complete = toml::Table::try_from(Config { learner, join, router, objective, ..Config::default() }).unwrap();
    let documented = documented();
    assert_eq!(keys(&complete), keys(&documented));
    documented.try_into::<Config>().expect("every documented value is a valid one");
}

#[test]
fn kafka_toml_is_a_fleet() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/kafka.toml");
    let config: Config = toml::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    config.check().unwrap();
    assert_eq!(config.transport.kafka.lanes, pointsman::config::Lanes::Partition);
}

/// What the file documents, optional keys included.
fn documented() -> toml::Table {
    let optional_key = |line: &str| {
        let text = line.strip_prefix("# ")?;
        if text.starts_with('[') && text.ends_with(']') && !text.contains(' ') {
            return Some(text.to_owned());
        }
        let (key, _) = text.split_once(" = ")?;
        key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_').then(|| text.to_owned())
    };
    let uncommented: String =
        default_toml().lines().map(|line| optional_key(line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
    uncommented.parse().unwrap()
}

/// Every key that the file documents, with its sections.
pub fn documented_keys() -> BTreeSet<String> {
    keys(&documented())
}

/// All keys of a table, with their sections.
fn keys(table: &toml::Table) -> BTreeSet<String> {
    let below = |(key, value): (&String, &toml::Value)| match value.as_table() {
        Some(table) => keys(table).iter().map(|inner| format!("{key}.{inner}")).collect(),
        None => vec![key.clone()],
    };
    table.iter().flat_map(below).collect()
}
