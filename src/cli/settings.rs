//! Where configuration comes from: built-in defaults, a file, the environment, the command line; later ones win.

use std::path::Path;

use anyhow::{Context, anyhow};
use config::builder::DefaultState;
use config::{ConfigBuilder, File, FileFormat, Map, Value, ValueKind};

use super::Failure;
use crate::config::Config;

const PREFIX: &str = "POINTSMAN__";

/// Loads the configuration; what is wrong with it is the user's to mend.
pub fn load(
    file: Option<&Path>,
    overrides: &[String],
    environment: impl Iterator<Item = (String, String)>,
) -> Result<Config, Failure> {
    collect(file, overrides, environment).map_err(Failure::Usage)
}

fn collect(
    file: Option<&Path>,
    overrides: &[String],
    environment: impl Iterator<Item = (String, String)>,
) -> anyhow::Result<Config> {
    let mut builder = config::Config::builder();
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        // Parsed alone first, so that an error in the file is told as the file's.
        let table: toml::Table = text.parse().with_context(|| format!("{} is not valid TOML", path.display()))?;
        table.try_into::<Config>().with_context(|| format!("in {}", path.display()))?;
        builder = builder.add_source(File::from_str(&text, FileFormat::Toml));
    }
    let mut variables: Vec<_> = environment.filter(|(name, _)| name.starts_with(PREFIX)).collect();
    variables.sort();
    for (name, text) in &variables {
        let key = name[PREFIX.len()..].to_lowercase().replace("__", ".");
        builder = set(builder, &key, text).with_context(|| format!("in the environment, {name}={text}"))?;
    }
    for option in overrides {
        let (key, text) =
            option.split_once('=').ok_or_else(|| anyhow!("--set {option}: write it as --set section.key=value"))?;
        builder = set(builder, key.trim(), text).with_context(|| format!("in --set {option}"))?;
    }
    Ok(builder.build()?.try_deserialize::<Config>()?)
}

fn set(builder: ConfigBuilder<DefaultState>, key: &str, text: &str) -> anyhow::Result<ConfigBuilder<DefaultState>> {
    let builder = builder.set_override(key, parse(text))?;
    // Tried at once, so that an error is told as this key's.
    builder.build_cloned()?.try_deserialize::<Config>()?;
    Ok(builder)
}

/// A value as TOML writes it; what is none is a string, so that names need no quotes.
fn parse(text: &str) -> Value {
    let table = format!("value = {text}").parse::<toml::Table>();
    let value = table.ok().and_then(|mut table| table.remove("value"));
    value.map_or_else(|| Value::new(None, text.to_owned()), from_toml)
}

fn from_toml(value: toml::Value) -> Value {
    let kind: ValueKind = match value {
        toml::Value::String(x) => x.into(),
        toml::Value::Integer(x) => x.into(),
        toml::Value::Float(x) => x.into(),
        toml::Value::Boolean(x) => x.into(),
        toml::Value::Datetime(x) => x.to_string().into(),
        toml::Value::Array(items) => ValueKind::Array(items.into_iter().map(from_toml).collect()),
        toml::Value::Table(table) => {
            ValueKind::Table(table.into_iter().map(|(k, v)| (k, from_toml(v))).collect::<Map<_, _>>())
        }
    };
    Value::new(None, kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Algorithm, LearnerConfig};

    fn try_load(file: Option<&str>, set: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<Config> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pointsman.toml");
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string()));
        collect(file.map(|_| path.as_path()), &set, environment)
    }

    #[test]
    fn later_sources_win() {
        let file = "[learner]\neta = 0.1\nrank = 4\ndim = 9";
        let environment = [("POINTSMAN__LEARNER__RANK", "5"), ("POINTSMAN__LEARNER__ETA", "0.2"), ("HOME", "/")];
        let set = ["learner.eta=0.3", "learner.algorithm=uniform", "learner.models=[\"a\", \"b\"]"];
        let learner = try_load(Some(file), &set, &environment).unwrap().learner;
        let expected = LearnerConfig {
            dim: 9,
            eta: Some(0.3),
            rank: Some(5),
            algorithm: Algorithm::Uniform,
            models: vec!["a".to_owned(), "b".to_owned()],
            ..LearnerConfig::default()
        };
        assert_eq!(learner, expected);
        assert_eq!(try_load(None, &[], &[]).unwrap(), Config::default());
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        for (file, set, environment, expected) in [
            (Some("[learner]\ntua = 1.0"), None, None, &["pointsman.toml", "tua", "tau"][..]),
            (Some("[learner"), None, None, &["pointsman.toml", "not valid TOML"][..]),
            (Some("[learner]\nalgorithm = \"hgp\""), None, None, &["hgp", "hpg-parameter-free"][..]),
            (None, Some("learner.tua=1"), None, &["--set learner.tua=1", "tua"][..]),
            (None, Some("learner.eta"), None, &["--set section.key=value"][..]),
            (None, Some("learner.eta=fast"), None, &["--set learner.eta=fast"][..]),
            (None, None, Some(("POINTSMAN__LEARNER__DIM", "-1")), &["POINTSMAN__LEARNER__DIM=-1"][..]),
            (None, None, Some(("POINTSMAN__LEARNERS__DIM", "1")), &["POINTSMAN__LEARNERS__DIM=1", "learners"][..]),
        ] {
            let set: Vec<&str> = set.into_iter().collect();
            let environment: Vec<(&str, &str)> = environment.into_iter().collect();
            let error = format!("{:#}", try_load(file, &set, &environment).unwrap_err());
            for part in expected {
                assert!(error.contains(part), "{part:?} is not in: {error}");
            }
        }
    }
}
