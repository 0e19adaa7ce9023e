//! `pointsman params`: decodes parameters and scores a query with them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::Value;

use super::Failure;
use super::logging::escape;
use super::output::{out, outln, width};
use crate::config::{Config, EventsSpec};
use crate::eligible::Eligible;
use crate::event::{ModelName, Name, Query};
use crate::report::{Column, Table};
use crate::router::{Outcomes, Params, Restriction, Sampling, ScoreForm, uniform};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::params;
use crate::wire::events::{Bad, vector};
use crate::wire::params::decode;

/// Inspect routing parameters, and score a query with them
///
/// Parameters are everything that a stateless router needs: one score function per model, and how scores become
/// probabilities. Each space has one safetensors file.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  pointsman params show data/log/params/default.safetensors
  echo '[0.12, -0.03]' | pointsman params score --params default.safetensors --query -";

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(Show),
    Score(Score),
}

/// Show a parameter file or the parameters topic: version, sampling, and the spectrum of each model
///
/// The newest parameters of a space have the highest (epoch, version, revision). The version counts learned examples, the
/// revision counts publications at one version, and the epoch increases when history forks (rollback, import, rebuilt
/// store).
///
/// A model scores a normalised query q by bias + linear . q + q'Wq, and a correction if q is one of the head queries: frequent
/// queries whose scores the parameters correct one by one. What its expected outcomes cost, such as latency or money, is
/// subtracted, at the price of each. The table shows of W the rank (number of nonzero
/// eigenvalues), the largest and smallest eigenvalue (together with 0 they bound q'Wq), and the nuclear norm (the sum of
/// their absolute values).
#[derive(Debug, clap::Args)]
#[command(after_help = SHOW_EXAMPLES)]
struct Show {
    /// Parameter file (safetensors)
    #[arg(value_name = "FILE", required_unless_present = "topic")]
    file: Option<PathBuf>,
    /// Read the newest parameters from the Kafka topic (transport.kafka.topics.params) instead of a file
    #[arg(long, conflicts_with = "file")]
    topic: bool,
    /// With --topic: the space
    #[arg(long, default_value = "default", conflicts_with = "file")]
    space: String,
    /// Write the tables to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    json: bool,
}

const SHOW_EXAMPLES: &str = "Examples:
  pointsman params show data/log/params/default.safetensors
  pointsman params show data/log/params/default.safetensors --json | jq .version
  pointsman params show --config shop.toml --topic --space shop";

/// Score one query and print the distribution that its model is drawn from, as one JSON object
///
/// The query file holds one JSON value: an array of numbers, a base64 string of little-endian f32, or a whole query event,
/// whose field `query` is used (or the field named by events.fields.query). The query does not have to be normalised.
///
/// The output has `scores` and `propensities` by model, and `policy`, the distribution before the exploration floor was
/// mixed in, if it differs. `head_corrections` is present if the query is one of the head queries: what they add to each
/// score. `charges` is present if outcomes have prices: what they take from each score. With --models the distribution is
/// that among these models.
#[derive(Debug, clap::Args)]
#[command(after_help = SCORE_EXAMPLES)]
struct Score {
    /// Parameter file (safetensors)
    #[arg(long, value_name = "FILE")]
    params: PathBuf,
    /// Query file (JSON); - = standard input
    #[arg(long, value_name = "FILE")]
    query: PathBuf,
    /// Models that may answer, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    models: Option<Vec<String>>,
}

const SCORE_EXAMPLES: &str = "Examples:
  echo '[0.12, -0.03]' | pointsman params score --params default.safetensors --query -
  head -n 1 queries.jsonl | pointsman params score --params default.safetensors --query -
  echo '[0.12, -0.03]' | pointsman params score --params default.safetensors --query - --models bge,minilm

The second command shows how these parameters route the first query of a log. Example output:
  {\"space\":\"default\",\"params_version\":12,
   \"scores\":{\"bge\":1.5,\"minilm\":0.1},\"propensities\":{\"bge\":0.8,\"minilm\":0.2}}";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    match &args.command {
        Command::Show(args) => show(args, config)?,
        Command::Score(args) => {
            let events = config.events.check(&config.reward).map_err(|e| Failure::Usage(e.into()))?;
            score(args, &events)?;
        }
    }
    Ok(())
}

fn show(args: &Show, config: &Config) -> anyhow::Result<()> {
    let (params, source) = match &args.file {
        Some(file) => (read_params(file)?, file.display().to_string()),
        None => (newest(config, &args.space)?, format!("topic {}", config.transport.kafka.topics.params)),
    };
    let shown = Shown::new(&params);
    let (facts, spectra) = (shown.facts(source), shown.spectra());
    super::write_csv(args.csv.as_deref(), &[&facts, &spectra])?;
    if args.json {
        outln!("{}", serde_json::to_string(&shown).context("cannot print the parameters")?)?;
    } else {
        outln!("{}", facts.text(width()))?;
        out!("{}", spectra.text(width()))?;
    }
    Ok(())
}

/// The newest parameters of a space on the topic.
fn newest(config: &Config, space: &str) -> anyhow::Result<Params> {
    let cluster = Cluster::new(&config.transport.kafka)?;
    cluster.reach()?;
    let mut all = params::newest(&cluster)?;
    match all.iter().position(|params| params.space.as_str() == space) {
        Some(i) => Ok(all.swap_remove(i)),
        None => {
            let spaces: Vec<&str> = all.iter().map(|params| params.space.as_str()).collect();
            let spaces =
                if spaces.is_empty() { "it is empty".to_owned() } else { format!("it has {}", spaces.join(", ")) };
            let topic = &config.transport.kafka.topics.params;
            Err(anyhow!("no parameters of space {space} on topic {topic}: {spaces}"))
        }
    }
}

fn score(args: &Score, events: &EventsSpec) -> anyhow::Result<()> {
    let params = read_params(&args.params)?;
    let source = match args.query.to_str() {
        Some("-") => "standard input".to_owned(),
        _ => args.query.display().to_string(),
    };
    let bytes = read_query(&args.query, events).with_context(|| format!("cannot read {source}"))?;
    let components = components(&bytes, events).with_context(|| format!("{source} contains no valid query"))?;
    let restriction = Restriction { models: args.models.clone(), exclude: Vec::new() };
    let eligible = restriction.allowed(&params.models, |_| false).context("--models")?;
    let eligible = Eligible::only(eligible).context("--models: name at least one model")?;
    let scored = Scored::new(&params, &components, &eligible).with_context(|| {
        format!("{source} does not match the parameters of space {} in {}", params.space, args.params.display())
    })?;
    outln!("{}", serde_json::to_string(&scored).context("cannot print the scores")?)?;
    Ok(())
}

fn read_params(path: &Path) -> anyhow::Result<Params> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    // As one message: the error already includes the text of its source.
    decode(&bytes).map_err(|error| anyhow!("{} is not a valid parameter file: {error}", path.display()))
}

/// Reads the query file, at most one byte beyond the limit.
fn read_query(path: &Path, events: &EventsSpec) -> io::Result<Vec<u8>> {
    let source: Box<dyn Read> =
        if path == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
    let mut bytes = Vec::new();
    source.take(events.bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn components(bytes: &[u8], events: &EventsSpec) -> anyhow::Result<Vec<f32>> {
    if bytes.len() > events.bytes_max {
        return Err(anyhow!("larger than events.bytes_max = {} bytes", events.bytes_max));
    }
    let value: Value = serde_json::from_slice(bytes).context(
        "expected one JSON value: an array of numbers, a base64 string of little-endian f32, or one query event",
    )?;
    let field = &events.fields.query;
    let components = match &value {
        Value::Object(_) => {
            let query = value.pointer(field).ok_or_else(|| Bad::MissingField(field.clone()))?;
            vector(query, field)
        }
        other => vector(other, "the query"),
    };
    Ok(components?)
}

/// What `score` prints.
#[derive(Serialize)]
struct Scored<'a> {
    space: &'a Name,
    params_version: u64,
    scores: BTreeMap<&'a ModelName, f64>,
    propensities: BTreeMap<&'a ModelName, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<BTreeMap<&'a ModelName, f64>>,
    /// Only for a head query.
    #[serde(skip_serializing_if = "Option::is_none")]
    head_corrections: Option<BTreeMap<&'a ModelName, f64>>,
    /// Only where outcomes have prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    charges: Option<BTreeMap<&'a ModelName, f64>>,
}

impl<'a> Scored<'a> {
    fn new(params: &'a Params, components: &[f32], eligible: &Eligible) -> anyhow::Result<Self> {
        let query = Query::from_f32(components)?;
        let scores = params.scores(&query)?;
        let distribution = params.distribution_among(&query, eligible)?;
        let by_model = |values: &[f64]| params.models.iter().zip(values.iter().copied()).collect();
        let among = |values: &[f64]| {
            let values = params.models.iter().zip(values.iter().copied()).enumerate();
            values.filter(|(m, _)| eligible.allows(*m)).map(|(_, of)| of).collect()
        };
        let outcomes = &params.policy.outcomes;
        let charges: Vec<f64> = (0..params.models.len()).map(|m| outcomes.charge_of(m)).collect();
        let differs = distribution.policy != distribution.propensities;
        Ok(Self {
            space: &params.space,
            params_version: params.version,
            scores: by_model(&scores),
            propensities: among(&distribution.propensities),
            policy: differs.then(|| among(&distribution.policy)),
            head_corrections: params
                .head(&query)
                .map(|row| params.models.iter().zip(row.iter().map(|&x| x.into())).collect()),
            charges: (!outcomes.is_empty()).then(|| by_model(&charges)),
        })
    }
}

/// What `show` prints.
#[derive(Serialize)]
struct Shown {
    space: Name,
    epoch: u64,
    version: u64,
    revision: u64,
    algorithm: String,
    sampling: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    inverse_gap: Option<f64>,
    floor: f64,
    /// By model; only where it is not uniform.
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_distribution: Option<BTreeMap<ModelName, f64>>,
    created_ms: u64,
    created: String,
    dim: usize,
    head_queries: usize,
    /// Prices of the outcomes; only where there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    lambda: Option<BTreeMap<String, f64>>,
    models: Vec<ShownModel>,
}

#[derive(Serialize)]
struct ShownModel {
    name: ModelName,
    rank: usize,
    largest_eigenvalue: Option<f64>,
    smallest_eigenvalue: Option<f64>,
    nuclear_norm: f64,
    linear: bool,
    bias: f64,
    /// Expected outcomes; only where there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcomes: Option<BTreeMap<String, f64>>,
}

impl Shown {
    fn new(params: &Params) -> Self {
        let policy = &params.policy;
        let (sampling, inverse_gap) = match policy.sampling {
            Sampling::Softmax => ("softmax", None),
            Sampling::InverseGap { gap } => ("inverse_gap", Some(gap)),
        };
        let floor = &policy.floor_distribution;
        // Tolerates rounding by other writers.
        let is_uniform = floor.iter().zip(uniform(floor.len())).all(|(p, u)| (p - u).abs() < 1e-9);
        let by_model = || params.models.iter().cloned().zip(floor.iter().copied()).collect();
        let (models, outcomes) = (params.models.iter().zip(&policy.scores).enumerate(), &policy.outcomes);
        Self {
            space: params.space.clone(),
            epoch: params.epoch,
            version: params.version,
            revision: params.revision,
            algorithm: params.algorithm.clone(),
            sampling,
            inverse_gap,
            floor: policy.floor,
            floor_distribution: (!is_uniform).then(by_model),
            created_ms: params.created_ms,
            created: utc(params.created_ms),
            dim: params.dim,
            head_queries: policy.head.len(),
            lambda: (!outcomes.is_empty()).then(|| by_name(outcomes.names(), outcomes.prices().iter().copied())),
            models: models.map(|(m, (name, form))| ShownModel::new(name, form, outcomes, m)).collect(),
        }
    }

    fn facts(&self, source: String) -> Table {
        let gap = self.inverse_gap.map(|gap| format!(", g = {gap}")).unwrap_or_default();
        let floor = match &self.floor_distribution {
            Some(_) => format!("{}, distributed as below", self.floor),
            None => format!("{}, uniform", self.floor),
        };
        let mut facts = vec![
            ("space", self.space.to_string()),
            ("epoch", self.epoch.to_string()),
            ("version", self.version.to_string()),
            ("revision", self.revision.to_string()),
            ("algorithm", self.algorithm.clone()),
            ("sampling", format!("{}{gap}", self.sampling)),
            ("floor", floor),
            ("created", self.created.clone()),
            ("dimension", self.dim.to_string()),
            ("head queries", self.head_queries.to_string()),
        ];
        if let Some(prices) = &self.lambda {
            let price = |(name, price): (&String, &f64)| format!("{} at {}", escape(name), figure(*price));
            facts.push(("outcomes", prices.iter().map(price).collect::<Vec<_>>().join(", ")));
        }
        Table {
            columns: vec![Column::left("parameters"), Column::left(source)],
            rows: facts.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect(),
            note: None,
        }
    }

    fn spectra(&self) -> Table {
        let titles = ["rank", "largest eigenvalue", "smallest eigenvalue", "nuclear norm", "linear", "bias"];
        let mut columns = vec![Column::left("model")];
        columns.extend(titles.map(Column::right));
        columns.extend(self.floor_distribution.iter().map(|_| Column::right("floor share")));
        columns.extend(self.lambda.iter().flatten().map(|(name, _)| Column::right(escape(name))));
        let row = |model: &ShownModel| {
            let mut row = vec![
                model.name.to_string(),
                model.rank.to_string(),
                model.largest_eigenvalue.map_or("-".to_owned(), figure),
                model.smallest_eigenvalue.map_or("-".to_owned(), figure),
                figure(model.nuclear_norm),
                if model.linear { "yes" } else { "no" }.to_owned(),
                figure(model.bias),
            ];
            row.extend(self.floor_distribution.iter().map(|shares| figure(shares[&model.name])));
            row.extend(model.outcomes.iter().flatten().map(|(_, expected)| figure(*expected)));
            row
        };
        Table { columns, rows: self.models.iter().map(row).collect(), note: None }
    }
}

impl ShownModel {
    fn new(name: &ModelName, form: &ScoreForm, outcomes: &Outcomes, model: usize) -> Self {
        let expected = || outcomes.expected(model).iter().copied().map(f64::from);
        let eigenvalues = || form.eigenvalues.iter().copied().map(f64::from);
        Self {
            name: name.clone(),
            rank: eigenvalues().filter(|&value| value != 0.0).count(),
            largest_eigenvalue: eigenvalues().reduce(f64::max),
            smallest_eigenvalue: eigenvalues().reduce(f64::min),
            nuclear_norm: eigenvalues().map(f64::abs).sum(),
            linear: form.linear.iter().any(|&x| x != 0.0),
            bias: f64::from(form.bias),
            outcomes: (!outcomes.is_empty()).then(|| by_name(outcomes.names(), expected())),
        }
    }
}

fn by_name(names: &[String], values: impl Iterator<Item = f64>) -> BTreeMap<String, f64> {
    names.iter().cloned().zip(values).collect()
}

/// Formats a number for a table: four decimals, or scientific notation for very small and very large ones.
fn figure(x: f64) -> String {
    if x == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e6).contains(&x.abs()) {
        format!("{x:.4}")
    } else {
        format!("{x:.3e}")
    }
}

/// Formats milliseconds since 1970 as RFC 3339, in UTC.
pub(super) fn utc(ms: u64) -> String {
    let (days, seconds) = (ms / 86_400_000, ms / 1000 % 86_400);
    // Years begin in March here, so that a leap day is the last of its year; 719468 days led from 0000-03-01 to 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", era * 400 + year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_731_700_000, "2024-11-15T19:46:40Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (13_574_563_200, "2400-02-29T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds * 1000 + 999), expected);
        }
        assert!(utc(u64::MAX).ends_with('Z'));
    }

    #[test]
    fn figures() {
        for (x, expected) in [(0.0, "0"), (-0.5, "-0.5000"), (1.5e-7, "1.500e-7"), (-2e9, "-2.000e9")] {
            assert_eq!(figure(x), expected);
        }
    }
}
