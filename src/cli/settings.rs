//! Sources of the configuration: built-in defaults, a file, the environment, the command line. Later ones override earlier
//! ones.
//!
//! The environment and the command line give text. A key that takes a string takes the text verbatim: a password may well
//! be valid TOML. All other values are parsed as TOML. Errors name the source and the key, and quote a value only if it
//! cannot be a secret.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use config::{ConfigError, Map, Source, ValueKind};
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::Failure;
use crate::config::{BadSetting, Config, mistakes};
use crate::serve::Load;

/// Prefix of our environment variables.
pub const PREFIX: &str = "POINTSMAN__";

/// librdkafka settings. The client itself reads the files that they name.
const CLIENT: &str = "transport.kafka.client";

/// Loads the configuration, and where its keys come from. An invalid one is a usage error.
pub fn load(
    file: Option<&Path>,
    overrides: &[String],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<(Config, Sources), Failure> {
    collect(file, overrides, environment).map_err(Failure::Usage)
}

/// Reads the configuration again, from the same sources: for a process that runs.
pub fn loader(file: Option<&Path>, overrides: &[String]) -> Load {
    let (file, overrides) = (file.map(Path::to_owned), overrides.to_vec());
    Box::new(move || {
        let reread = || {
            let (config, sources) = load(file.as_deref(), &overrides, super::variables()?)?;
            let checked = config.check().map_err(|e| sources.locate(&config, Failure::Usage(e.into())));
            checked.map(|settings| (config, settings))
        };
        reread().map_err(|failure| match failure {
            Failure::Usage(error) | Failure::Run(error) => error,
        })
    })
}

fn collect(
    file: Option<&Path>,
    overrides: &[String],
    environment: impl IntoIterator<Item = (String, String)>,
) -> anyhow::Result<(Config, Sources)> {
    let (mut layers, mut sources) = (Layers::default(), Sources::default());
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        layers.file.0 = parse(path, &text)?;
        sources.file = Some((path.to_owned(), text));
        read_secrets(&mut layers.file.0, "").with_context(|| format!("in {}", path.display()))?;
        // Checked alone first, so that the error names the file.
        layers.parse().map_err(|mistake| {
            let place = sources.place(&mistake.key).unwrap_or_else(|| format!("in {}", path.display()));
            anyhow!("{place}: {mistake}")
        })?;
    }
    let mut variables: Vec<_> = environment.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    variables.sort();
    for (name, text) in &variables {
        let key = name[PREFIX.len()..].to_lowercase().replace("__", ".");
        set(&mut layers.environment.0, &key, text)
            .and_then(|()| Ok(layers.parse()?))
            .with_context(|| format!("in the environment variable {name}"))?;
        sources.environment.push((key, name.clone()));
    }
    for option in overrides {
        // Without "=" all of it may be a value.
        let (key, text) = option
            .split_once('=')
            .ok_or_else(|| anyhow!("--set takes SECTION.KEY=VALUE, for example --set learner.eta=0.3"))?;
        set(&mut layers.command_line.0, key.trim(), text)
            .and_then(|()| Ok(layers.parse()?))
            .with_context(|| format!("in --set {}", key.trim()))?;
        sources.command_line.push(key.trim().to_owned());
    }
    Ok((layers.parse()?, sources))
}

/// Where the keys of a configuration were set.
#[derive(Debug, Default)]
pub struct Sources {
    /// The file and its text.
    file: Option<(PathBuf, String)>,
    /// Keys and the variables that set them.
    environment: Vec<(String, String)>,
    /// Keys of --set.
    command_line: Vec<String>,
}

impl Sources {
    /// Adds where the key was set to an error about the value of a key.
    pub fn locate(&self, config: &Config, failure: Failure) -> Failure {
        let Failure::Usage(error) = failure else { return failure };
        let Some(bad) = error.downcast_ref::<BadSetting>() else { return Failure::Usage(error) };
        // Options of a command may have replaced the key.
        let is_of_config =
            [config.check().err(), config.http.check_listen().err()].iter().flatten().any(|own| own == bad);
        match self.place(&bad.key).filter(|_| is_of_config) {
            Some(place) => Failure::Usage(error.context(place)),
            None => Failure::Usage(error),
        }
    }

    /// Where a key was set.
    fn place(&self, key: &str) -> Option<String> {
        let sets = |set: &str| is_within(key, set) || is_within(set, key);
        if let Some(set) = self.command_line.iter().rev().find(|set| sets(set)) {
            return Some(format!("in --set {set}"));
        }
        if let Some((_, name)) = self.environment.iter().rev().find(|(set, _)| sets(set)) {
            return Some(format!("in the environment variable {name}"));
        }
        let (path, text) = self.file.as_ref()?;
        Some(format!("in {}, line {}", path.display(), line_of(text, key)?))
    }
}

/// Whether a key is another one, or below it.
fn is_within(key: &str, outer: &str) -> bool {
    key.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// The line of a TOML file that sets a key, or the nearest section above it that the file has.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let at = position(document.get_ref(), key)?;
    Some(text.get(..at)?.matches('\n').count() + 1)
}

fn position(table: &DeTable<'_>, key: &str) -> Option<usize> {
    // Keys may hold dots themselves.
    let found = table.iter().filter(|(name, _)| is_within(key, name.get_ref()));
    let (name, value) = found.max_by_key(|(name, _)| name.get_ref().len())?;
    let rest = key[name.get_ref().len()..].trim_start_matches('.');
    Some(position_within(value, rest).unwrap_or(name.span().start))
}

fn position_within(value: &Spanned<DeValue<'_>>, rest: &str) -> Option<usize> {
    match value.get_ref() {
        DeValue::Table(table) => position(table, rest),
        DeValue::Array(items) => {
            let (index, rest) = rest.strip_prefix('[')?.split_once(']')?;
            let item = items.get(index.parse::<usize>().ok()?)?;
            Some(position_within(item, rest.trim_start_matches('.')).unwrap_or(item.span().start))
        }
        _ => None,
    }
}

/// Every key that a configuration may have, those of spaces and of the Kafka client aside.
pub fn known_keys() -> Vec<String> {
    let mut text = String::new();
    for line in include_str!("../../config/default.toml").lines() {
        // Optional keys and sections are there as comments.
        let optional = line.strip_prefix("# ").filter(|text| {
            let key = text.split_once(" = ").map_or("", |(key, _)| key);
            let is_section = text.starts_with('[') && text.ends_with(']') && !text.contains(' ');
            is_section || !key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
        });
        text += optional.unwrap_or(line);
        text.push('\n');
    }
    let mut keys = Vec::new();
    add_keys(&text.parse().unwrap_or_default(), "", &mut keys);
    keys
}

fn add_keys(table: &Table, section: &str, keys: &mut Vec<String>) {
    for (name, value) in table {
        let key = format!("{section}{name}");
        match value {
            Value::Table(inner) => add_keys(inner, &format!("{key}."), keys),
            _ => keys.push(key),
        }
    }
}

/// The sources; later ones override earlier ones.
#[derive(Default)]
struct Layers {
    file: Layer,
    environment: Layer,
    command_line: Layer,
}

/// The keys of one source.
#[derive(Debug, Clone, Default)]
struct Layer(Table);

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, config::Value>, ConfigError> {
        Ok(self.0.iter().map(|(key, value)| (key.clone(), from_toml(value))).collect())
    }
}

fn from_toml(value: &Value) -> config::Value {
    let kind: ValueKind = match value {
        Value::String(x) => x.clone().into(),
        Value::Integer(x) => (*x).into(),
        Value::Float(x) => (*x).into(),
        Value::Boolean(x) => (*x).into(),
        Value::Datetime(x) => x.to_string().into(),
        Value::Array(items) => ValueKind::Array(items.iter().map(from_toml).collect()),
        Value::Table(table) => {
            ValueKind::Table(table.iter().map(|(key, value)| (key.clone(), from_toml(value))).collect())
        }
    };
    config::Value::new(None, kind)
}

fn parse(path: &Path, text: &str) -> anyhow::Result<Table> {
    text.parse::<Table>().map_err(|error| {
        // Its own display quotes the line, which may hold a secret.
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        anyhow!("{} is not valid TOML, line {line}: {}", path.display(), error.message())
    })
}

/// Sets a key from text.
fn set(settings: &mut Table, key: &str, text: &str) -> anyhow::Result<()> {
    if let Some(secret) = key.strip_suffix(".file").filter(|key| is_masked(key) && !is_of_client(key)) {
        put(settings, secret, read_secret(secret, text)?);
    } else {
        put(settings, key, value(key, text));
    }
    Ok(())
}

/// The value of a text: the text itself if the key takes a string, otherwise parsed as TOML.
fn value(key: &str, text: &str) -> Value {
    let verbatim = Value::String(text.to_owned());
    if try_key(&type_key(key), verbatim.clone()).is_ok() {
        return verbatim;
    }
    let table = format!("value = {text}").parse::<Table>();
    table.ok().and_then(|mut table| table.remove("value")).unwrap_or(verbatim)
}

/// The key whose type a key has: a key of a space has the type of that key in `[learner]`.
fn type_key(key: &str) -> String {
    match key.strip_prefix("spaces.").and_then(|rest| rest.split_once('.')) {
        Some((_, key)) => format!("learner.{key}"),
        None => key.to_owned(),
    }
}

fn try_key(key: &str, value: Value) -> Result<Config, toml::de::Error> {
    let mut table = Table::new();
    put(&mut table, key, value);
    table.try_into()
}

/// Puts a value at a dotted key and creates the tables on the way.
fn put(table: &mut Table, key: &str, value: Value) {
    let Some((section, rest)) = key.split_once('.') else {
        table.insert(key.to_owned(), value);
        return;
    };
    let inner = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    if !inner.is_table() {
        *inner = Value::Table(Table::new());
    }
    if let Value::Table(inner) = inner {
        put(inner, rest, value);
    }
}

/// Replaces secrets written as `key = { file = "..." }`, which is `key.file = "..."`, by the content of the files.
fn read_secrets(table: &mut Table, section: &str) -> anyhow::Result<()> {
    for (key, value) in table.iter_mut() {
        let key = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
        let Value::Table(inner) = value else { continue };
        match inner.get("file").and_then(Value::as_str).filter(|_| inner.len() == 1 && is_masked(&key)) {
            Some(path) => *value = read_secret(&key, path)?,
            None if is_of_client(&key) => {}
            None => read_secrets(inner, &key)?,
        }
    }
    Ok(())
}

/// The content of a file, without the newline at its end.
fn read_secret(key: &str, path: &str) -> anyhow::Result<Value> {
    // The path stays out of the error: it may be the secret itself, put there by mistake.
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the file named by {key}.file"))?;
    let text = text.trim_end_matches(['\n', '\r']);
    if text.is_empty() {
        return Err(anyhow!("the file named by {key}.file is empty: write the secret to it"));
    }
    Ok(Value::String(text.to_owned()))
}

impl Layers {
    /// Merges the sources. Called after each one, so that the error can name the source.
    fn parse(&self) -> Result<Config, Mistake> {
        let mut merged = config::Config::builder();
        for layer in [&self.file, &self.environment, &self.command_line] {
            merged = merged.add_source(layer.clone());
        }
        // Read as TOML, which does not turn numbers into strings.
        let merged: Table = merged.build()?.try_deserialize()?;
        check_sections(&merged, &Table::try_from(Config::default()).unwrap_or_default(), "")?;
        serde_path_to_error::deserialize(Value::Table(merged)).map_err(|error| {
            let key = error.path().to_string();
            let problem = error.inner().message();
            let quotes = !may_be_secret(&key);
            let explained = match permitted(&key).filter(|_| quotes && !mistakes::is_unknown_key(problem)) {
                Some(permitted) => mistakes::explain_choice(&key, problem, &permitted),
                None => mistakes::explain(&key, problem, quotes),
            };
            let elsewhere = mistakes::is_unknown_key(problem).then(|| elsewhere(&key, &explained)).flatten();
            Mistake { key, problem: explained + &elsewhere.unwrap_or_default() }
        })
    }
}

/// Names the key of another section that has the name of an unknown one, unless one like it was named already.
fn elsewhere(key: &str, explained: &str) -> Option<String> {
    let name = key.rsplit('.').next()?;
    let mut known = known_keys().into_iter().filter(|known| known.rsplit('.').next() == Some(name));
    let known = known.next().filter(|_| !explained.contains("did you mean"))?;
    Some(format!("; did you mean {known}?"))
}

/// Rejects lists in place of sections, which would otherwise be read as the values of their keys in order.
fn check_sections(given: &Table, known: &Table, section: &str) -> Result<(), Mistake> {
    for (name, known) in known.iter().filter_map(|(name, known)| Some((name, known.as_table()?))) {
        let key = format!("{section}{name}");
        match given.get(name) {
            Some(Value::Table(inner)) => check_sections(inner, known, &format!("{key}."))?,
            Some(Value::Array(_)) => {
                let problem = format!("{key}: must be a section, not a list: write [{key}]");
                return Err(Mistake { key, problem });
            }
            _ => {}
        }
    }
    Ok(())
}

/// A key that does not exist or has a value of the wrong type.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
struct Mistake {
    key: String,
    problem: String,
}

impl From<ConfigError> for Mistake {
    fn from(error: ConfigError) -> Self {
        Self { key: String::new(), problem: error.to_string() }
    }
}

/// The permitted values of a key that takes one of several.
fn permitted(key: &str) -> Option<String> {
    let error = try_key(key, Value::String(PROBE.to_owned())).err()?;
    mistakes::permitted(error.message())
}

/// A value that no configuration has.
const PROBE: &str = "pointsman-probe";

/// Whether a key takes a string that is masked when the configuration is shown.
fn is_masked(key: &str) -> bool {
    let config = try_key(key, Value::String(PROBE.to_owned()));
    config.is_ok_and(|config| serde_json::to_string(&config).is_ok_and(|shown| !shown.contains(PROBE)))
}

/// Whether the value of a key must not be quoted: the key is masked, a whole section, or unknown, which may be a misspelt
/// key of a secret.
fn may_be_secret(key: &str) -> bool {
    let unknown = |error: &toml::de::Error| mistakes::is_unknown_key(error.message());
    let is_section = || try_key(key, Value::Table(Table::new())).is_ok();
    is_masked(key) || is_section() || try_key(key, Value::String(PROBE.to_owned())).is_err_and(|error| unknown(&error))
}

fn is_of_client(key: &str) -> bool {
    key.strip_prefix(CLIENT).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
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
        collect(file.map(|_| path.as_path()), &set, environment).map(|(config, _)| config)
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
    fn mistakes_are_reported_with_their_source() {
        for (file, set, environment, expected) in [
            (
                Some("[learner]\ntua = 1.0"),
                None,
                None,
                &["pointsman.toml", "unknown key learner.tua: did you mean learner.tau?"][..],
            ),
            (Some("[learner"), None, None, &["pointsman.toml", "not valid TOML"][..]),
            (
                Some("[learner]\nalgorithm = \"hgp\""),
                None,
                None,
                &["learner.algorithm = \"hgp\": must be one of hpg, hpg-parameter-free, "][..],
            ),
            (
                None,
                Some("learner.tua=1"),
                None,
                &["--set learner.tua", "unknown key learner.tua: did you mean learner.tau?"][..],
            ),
            (None, Some("learner.eta"), None, &["--set takes SECTION.KEY=VALUE"][..]),
            (
                None,
                Some("learner.eta=fast"),
                None,
                &["--set learner.eta", "learner.eta = \"fast\": must be a number"][..],
            ),
            (
                None,
                None,
                Some(("POINTSMAN__LEARNER__DIM", "-1")),
                &["POINTSMAN__LEARNER__DIM", "learner.dim = -1: must be a whole number, 0 or more"][..],
            ),
            (
                None,
                None,
                Some(("POINTSMAN__LEARNERS__DIM", "1")),
                &["POINTSMAN__LEARNERS__DIM", "unknown key learners: did you mean learner?"][..],
            ),
            (
                None,
                Some("learner.zzzzzz=1"),
                None,
                &["unknown key learner.zzzzzz: the keys here are dim, models, "][..],
            ),
            (
                Some("\n[learner]\ndim = 3\n\ntua = 1.0"),
                None,
                None,
                &["pointsman.toml, line 5: unknown key learner.tua: did you mean learner.tau?"][..],
            ),
            (
                Some("dim = 3"),
                None,
                None,
                &["line 1: unknown key dim: the keys here are", "did you mean learner.dim?"][..],
            ),
            (Some("a = 1\n[learner]\nalgorithm = \"hgp\""), None, None, &["line 1: unknown key a: "][..]),
            (
                Some("[learner]\n\nalgorithm = \"hgp\""),
                None,
                None,
                &["line 3: learner.algorithm = \"hgp\": must be", "did you mean hpg?"][..],
            ),
            (
                Some("[learner]\nmodels = [\n\"a\",\n1]"),
                None,
                None,
                &["line 4: learner.models[1]: must be a string"][..],
            ),
            (
                Some("[transport.kafka]\ntopics = { queres = \"q\" }"),
                None,
                None,
                &["line 2: unknown key transport.kafka.topics.queres: did you mean transport.kafka.topics.queries?"][..],
            ),
            (Some("[[learner]]\ndim = 3"), None, None, &["line 1: learner: must be a section, not a list"][..]),
            (Some("[spaces]\na = 1"), None, None, &["line 2: spaces.a: must be a section"][..]),
            (Some("[reward]\n\nrange = [0, \"x\"]"), None, None, &["line 3: reward.range[1]: must be a number"][..]),
            (Some("[transport]\nkind = 5"), None, None, &["transport.kind: must be file or kafka"][..]),
            (Some("[transport]\nkind = [5]"), None, None, &["transport.kind: must be file or kafka"][..]),
            (
                Some("[transport.kafka]\nstart = true"),
                None,
                None,
                &["transport.kafka.start: must be earliest, latest, or"][..],
            ),
            (Some("[reward]\nrange = [1]"), None, None, &["reward.range"][..]),
            (Some("[http]\nlisten = {}"), None, None, &["http.listen: must be a string, not a section"][..]),
        ] {
            let set: Vec<&str> = set.into_iter().collect();
            let environment: Vec<(&str, &str)> = environment.into_iter().collect();
            let error = format!("{:#}", try_load(file, &set, &environment).unwrap_err());
            for part in expected {
                assert!(error.contains(part), "{part:?} is not in: {error}");
            }
        }
    }

    #[test]
    fn bad_values_are_located() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shop.toml");
        std::fs::write(&path, "[learner]\ndim = 4\n\ntau = 0\n[spaces.a]\nranks = 3\n").unwrap();
        let located = |set: &[&str], environment: &[(&str, &str)]| {
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string()));
            let (config, sources) = collect(Some(&path), &set, environment).unwrap();
            let Failure::Usage(error) = sources.locate(&config, Failure::Usage(config.check().unwrap_err().into()))
            else {
                panic!("another failure")
            };
            format!("{error:#}")
        };
        let file = located(&[], &[]);
        assert!(file.contains("shop.toml, line 4: learner.tau = 0: must be"), "{file}");
        let space = located(&["learner.tau=1"], &[]);
        assert!(
            space.contains("shop.toml, line 6: unknown key spaces.a.ranks: did you mean spaces.a.rank?"),
            "{space}"
        );
        let set = located(&["learner.tau=-1"], &[("POINTSMAN__LEARNER__TAU", "1")]);
        assert!(set.starts_with("in --set learner.tau: learner.tau = -1: must be"), "{set}");
        let variable = located(&[], &[("POINTSMAN__LEARNER__TAU", "-1")]);
        assert!(variable.starts_with("in the environment variable POINTSMAN__LEARNER__TAU: "), "{variable}");
    }

    #[test]
    fn every_documented_key_is_known() {
        let keys = known_keys();
        for key in ["learner.dim", "learner.tau", "transport.kafka.topics.queries", "http.tls.key", "join.window_ms"] {
            assert!(keys.iter().any(|known| known == key), "{key} is not in {keys:?}");
        }
    }

    /// Text that TOML reads as something else, or as several things.
    const SECRETS: [&str; 6] = ["8#kJ2mQv9xLpZ", "true", "1e5", "\"quoted\"", "[1, 2]", "{ a = 1 }"];

    #[test]
    fn keys_that_take_strings_take_them_verbatim() {
        for secret in SECRETS {
            let environment = [("POINTSMAN__HTTP__TOKEN", secret)];
            assert_eq!(try_load(None, &[], &environment).unwrap().http.token.0, secret);
            let set = format!("http.token={secret}");
            assert_eq!(try_load(None, &[&set], &[]).unwrap().http.token.0, secret);
            let environment = [("POINTSMAN__TRANSPORT__KAFKA__CLIENT__SASL__PASSWORD", secret)];
            let kafka = try_load(None, &[], &environment).unwrap().transport.kafka;
            assert_eq!(kafka.client.iter().collect::<Vec<_>>(), [("sasl.password", secret)]);
        }
        let set = ["store.dir=5", "spaces.5.dim=3", "spaces.5.algorithm=uniform", "router.fallback_model=7"];
        let config = try_load(None, &set, &[("POINTSMAN__TRANSPORT__KAFKA__START", "1769860800000")]).unwrap();
        assert_eq!((config.store.dir.to_str(), config.router.fallback_model.as_deref()), (Some("5"), Some("7")));
        assert_eq!(config.check().unwrap_err().key, "router.fallback_model");
        assert_eq!(config.spaces["5"]["dim"], 3);
        assert_eq!(config.transport.kafka.start.to_string(), "1769860800000");
    }

    #[test]
    fn errors_never_quote_what_may_be_secret() {
        let secret = "8kJ2mQv9xLpZ";
        let errors = [
            try_load(None, &[], &[("POINTSMAN__HTTP__TOKN", secret)]),
            try_load(None, &[], &[("POINTSMAN__HTP__TOKEN", secret)]),
            try_load(None, &[], &[("POINTSMAN__HTTP", secret)]),
            try_load(None, &[], &[("POINTSMAN__HTTP__TOKEN__FILE", secret)]),
            try_load(None, &[&format!("http.tokn={secret}")], &[]),
            try_load(None, &[secret], &[]),
            try_load(Some(&format!("[http]\ntokn = \"{secret}\"")), &[], &[]),
            try_load(Some(&format!("[http]\ntoken = {secret}")), &[], &[]),
            try_load(Some(&format!("[http]\ntoken = [\"{secret}\"]")), &[], &[]),
            try_load(Some(&format!("[http]\ntoken = \"{secret}")), &[], &[]),
            try_load(Some(&format!("http = \"{secret}\"")), &[], &[]),
        ];
        for error in errors.map(|loaded| format!("{:#}", loaded.unwrap_err())) {
            assert!(!error.contains(secret), "{error}");
        }
        let number = try_load(Some("[http]\ntoken = 12345678"), &[], &[]).unwrap_err();
        assert!(format!("{number:#}").ends_with("http.token: must be a string"), "{number:#}");
    }

    #[test]
    fn secrets_are_read_from_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token").to_str().unwrap().to_owned();
        std::fs::write(&path, "8#k\n").unwrap();
        let in_table = format!("[http]\ntoken = {{ file = {path:?} }}\n[router]\nkey.file = {path:?}");
        let config = try_load(Some(&in_table), &[], &[]).unwrap();
        assert_eq!((config.http.token.0.as_str(), config.router.key.0.as_str()), ("8#k", "8#k"));
        assert_eq!(try_load(None, &[], &[("POINTSMAN__HTTP__TOKEN__FILE", &path)]).unwrap().http.token.0, "8#k");
        assert_eq!(try_load(None, &[&format!("router.key.file={path}")], &[]).unwrap().router.key.0, "8#k");
        let replaced = try_load(Some(&in_table), &["http.token=other"], &[]).unwrap();
        assert_eq!(replaced.http.token.0, "other");
        std::fs::write(&path, "\n").unwrap();
        let empty = try_load(Some(&in_table), &[], &[]).unwrap_err();
        assert!(format!("{empty:#}").contains("the file named by http.token.file is empty"), "{empty:#}");
    }
}
