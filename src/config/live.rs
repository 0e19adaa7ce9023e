//! Which keys can change while a process runs.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Config;

/// Sections of which every key can change, apart from the keys below.
const LIVE: [&str; 7] = ["learner", "spaces", "objective", "reward", "join", "snapshot", "events"];

/// Keys of these sections that cannot: what is learned depends on them, or they size a queue.
const FIXED: [&str; 12] = [
    "dim",
    "algorithm",
    "fixed_model",
    "preset",
    "estimator",
    "mode",
    "features",
    "feature_rank",
    "shards",
    "batch",
    "queue_max",
    "on_full",
];

/// The keys in which two configurations differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Those that can change while a process runs.
    pub live: Vec<String>,
    /// Those that need a restart.
    pub fixed: Vec<String>,
}

impl Changes {
    /// Compares two configurations.
    pub fn between(old: &Config, new: &Config) -> Self {
        let json = |config: &Config| serde_json::to_value(config).expect("settings are JSON");
        let mut keys = BTreeSet::new();
        compare(&json(old), &json(new), String::new(), &mut keys);
        let (live, fixed) = keys.into_iter().partition(|key| is_live(key));
        Self { live, fixed }
    }
}

fn is_live(key: &str) -> bool {
    let (section, rest) = key.split_once('.').unwrap_or((key, ""));
    // Names of outcomes and models are no keys.
    let has_fixed = !matches!(section, "objective" | "reward");
    let name = rest.rsplit('.').next().unwrap_or_default();
    LIVE.contains(&section) && !(has_fixed && FIXED.contains(&name))
}

/// Adds the keys of the leaves that differ.
fn compare(old: &Value, new: &Value, key: String, keys: &mut BTreeSet<String>) {
    let (Value::Object(a), Value::Object(b)) = (old, new) else {
        if old != new {
            keys.insert(key);
        }
        return;
    };
    for name in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
        let inner = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
        let of = |side: &serde_json::Map<String, Value>| side.get(name).cloned().unwrap_or(Value::Null);
        compare(&of(a), &of(b), inner, keys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let config = |text: &str| toml::from_str::<Config>(text).unwrap();
        let changes = |old: &str, new: &str| Changes::between(&config(old), &config(new));
        assert_eq!(changes("", ""), Changes::default());
        let found = changes(
            "[objective.outcomes.cost]\nrange = [0.0, 1.0]\nbudget = 0.1\n[spaces.a]\nrank = 3\n",
            "[learner]\nmodels = [\"a\", \"b\"]\ndim = 3\n[objective.outcomes.cost]\nrange = [0.0, 1.0]\nbudget = 0.2\n\
             [spaces.a]\ndim = 4\n[http]\nlisten = \"127.0.0.1:1\"\n[events]\nqueue_max = 5\ntime_unit = \"s\"\n",
        );
        let live = ["events.time_unit", "learner.models", "objective.outcomes.cost.budget", "spaces.a.rank"];
        assert_eq!(found.live, live);
        assert_eq!(found.fixed, ["events.queue_max", "http.listen", "learner.dim", "spaces.a.dim"]);
        // A new section as a whole can change, whatever it is called.
        assert_eq!(changes("", "[spaces.dim]\nrank = 3\n").fixed, Vec::<String>::new());
    }
}
