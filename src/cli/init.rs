//! `pointsman init`: writes a configuration for existing logs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, IsTerminal, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::output::{outln, paragraph};
use super::{Failure, outputs};
use crate::config::{Config, JoinConfig, TimeUnit};
use crate::files;
use crate::inspect::{Layout, Named, Question, Rewards, Sample, recognise};
use crate::transport::file;

/// Write a configuration for the logs that you have
///
/// Reads the first rows of the files (JSON lines, CSV or Parquet; plain, .gz or .zst) and finds out which columns hold the
/// query embedding, the chosen model, the request ID, the time and the reward; the dimension, the models and their shares;
/// whether rewards are in the same rows or in files of their own; and whether propensities were logged. It prints what it
/// found and what it assumes, and writes a short configuration that names the logs, so that doctor, evaluate and replay need
/// no further arguments.
///
/// On a terminal it asks where several columns are possible. Otherwise, and with --yes, it takes the likeliest; options name
/// columns, as a name or as a JSON pointer (/meta/id).
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Logs: of queries and of rewards, in any order, or with a query and its reward in each row
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the configuration to this file
    #[arg(long, value_name = "FILE", default_value = super::CONFIG_FILE)]
    out: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Ask nothing: take the likeliest column
    #[arg(long, short)]
    yes: bool,
    /// Column of the query embedding; numbered columns (emb_0, emb_1..) by their common name
    #[arg(long, value_name = "COLUMN")]
    vector: Option<String>,
    /// Column of the chosen model
    #[arg(long, value_name = "COLUMN")]
    model: Option<String>,
    /// Column of the request ID
    #[arg(long, value_name = "COLUMN")]
    id: Option<String>,
    /// Column of the time
    #[arg(long, value_name = "COLUMN")]
    time: Option<String>,
    /// Column of the reward: numbers, true and false, or words
    #[arg(long, value_name = "COLUMN")]
    reward: Option<String>,
    /// Column of the propensities: of all models, or of the chosen one
    #[arg(long, value_name = "COLUMN")]
    propensities: Option<String>,
    /// Column of the request ID in reward logs [default: as --id, if there is such a column]
    #[arg(long, value_name = "COLUMN")]
    reward_id: Option<String>,
    /// Column of the time of a reward [default: as --time, if there is such a column]
    #[arg(long, value_name = "COLUMN")]
    reward_time: Option<String>,
    /// What a query without a reward means: drop (nothing is known), or the reward that it earned, such as 0
    #[arg(long, value_name = "drop|REWARD", value_parser = missing)]
    missing: Option<Missing>,
    /// The split of an experiment, for logs without propensities: the probability of each model
    #[arg(long, value_name = "MODEL=P,..", value_delimiter = ',', value_parser = probability)]
    split: Vec<(String, f64)>,
}

const EXAMPLES: &str = "Examples:
  pointsman init searches.parquet
  pointsman init queries.jsonl.zst clicks.csv --out shop.toml
  pointsman init searches.csv --yes --reward clicked --split bge=0.5,e5=0.3,minilm=0.2

Exit codes: 0 success, 1 the layout was not recognised, 2 invalid usage.";

/// What a query without a reward means.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Missing {
    Drop,
    Reward(f64),
}

fn missing(text: &str) -> Result<Missing, String> {
    match text.parse::<f64>() {
        _ if text == "drop" => Ok(Missing::Drop),
        Ok(reward) if reward.is_finite() => Ok(Missing::Reward(reward)),
        _ => Err("must be drop or a number".to_owned()),
    }
}

fn probability(text: &str) -> Result<(String, f64), String> {
    let (model, p) = text.rsplit_once('=').ok_or("must be MODEL=PROBABILITY")?;
    let p = p.parse::<f64>().ok().filter(|p| (0.0..=1.0).contains(p)).ok_or("must be a probability between 0 and 1")?;
    Ok((model.to_owned(), p))
}

/// Rows of each log that are inspected.
const ROWS_MAX: usize = 20_000;

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Failure> {
    if args.out.exists() && !args.force {
        let out = args.out.display();
        return Err(Failure::Usage(anyhow!("{out} exists: name another file with --out, or replace it with --force")));
    }
    outputs::check(&[], &[("--out", Some(&args.out))])?;
    let samples = args.files.iter().map(|path| sample(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let named = Named {
        vector: args.vector.clone(),
        model: args.model.clone(),
        id: args.id.clone(),
        time: args.time.clone(),
        reward: args.reward.clone(),
        propensities: args.propensities.clone(),
        reward_id: args.reward_id.clone(),
        reward_time: args.reward_time.clone(),
    };
    let asks = !args.yes && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let mut guesses = Vec::new();
    let mut answer = |question: &Question| match asks {
        true => ask(question),
        false => {
            guesses.push(guess(question));
            0
        }
    };
    let mut layout = recognise(&samples, &named, &mut answer).map_err(|error| Failure::Run(error.into()))?;
    layout.assumptions.splice(0..0, guesses);
    let proposal = propose(args, &mut layout);
    for line in findings(&layout) {
        outln!("{line}")?;
    }
    if !layout.assumptions.is_empty() {
        outln!("\nAssumed:")?;
        for assumption in &layout.assumptions {
            outln!("{}", paragraph(&format!("- {assumption}")))?;
        }
    }
    // What is written has to be valid, whatever was found.
    let config: Config = toml::from_str(&proposal).context("cannot express this layout as a configuration")?;
    config.check().map_err(|error| anyhow!("these logs cannot be learned from: {error}"))?;
    if asks && !confirm(&args.out) {
        return Err(Failure::Run(anyhow!("nothing was written")));
    }
    files::replace(&args.out, proposal.as_bytes()).with_context(|| format!("cannot write {}", args.out.display()))?;
    let option = match args.out.as_path() == Path::new(super::CONFIG_FILE) {
        true => String::new(),
        false => format!(" --config {}", args.out.display()),
    };
    outln!("\nWrote {}. Next:", args.out.display())?;
    let (store, params) = (config.store.dir.display(), config.transport.file.dir.join("params"));
    let replay = format!("replay{option} --store {store} --keep-open --params {}", params.display());
    for (purpose, command) in [
        ("check it against the logs", format!("doctor{option}")),
        ("does routing pay?", format!("evaluate{option}")),
        ("learn the history, for the learner and for routers", replay),
        ("learner, router and page in one process, from there on", format!("up{option}")),
    ] {
        outln!("  pointsman {command}\n      {purpose}")?;
    }
    Ok(())
}

fn sample(path: &Path) -> anyhow::Result<Sample> {
    let cannot = || format!("cannot read {}", path.display());
    let mut rows = file::rows(path).with_context(cannot)?;
    let (mut sample, mut line, mut bad) = (Sample::new(path.to_owned()), Vec::new(), 0_usize);
    while sample.rows() < ROWS_MAX {
        line.clear();
        if rows.read_until(b'\n', &mut line).with_context(cannot)? == 0 {
            break;
        }
        let text = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line);
        match serde_json::from_slice(text) {
            Ok(row @ serde_json::Value::Object(_)) => sample.add(&row),
            _ if text.trim_ascii().is_empty() => {}
            _ => bad += 1,
        }
        if bad > 100 && bad > sample.rows() {
            break;
        }
    }
    if bad > sample.rows() {
        return Err(anyhow!(
            "{}: most lines are not JSON objects: init reads JSON lines (.jsonl), CSV (.csv) and Parquet (.parquet), recognised \
             by the name of the file",
            path.display()
        ));
    }
    sample.finish();
    Ok(sample)
}

fn ask(question: &Question) -> usize {
    let Question { wanted, path, candidates, .. } = question;
    let mut error = std::io::stderr().lock();
    let _ = writeln!(error, "\nWhich column of {} is {wanted}?", path.display());
    for (i, (pointer, example)) in candidates.iter().enumerate() {
        let _ = writeln!(error, "  {}. {} ({example})", i + 1, &pointer[1..]);
    }
    let _ = write!(error, "Number [1]: ");
    let _ = error.flush();
    read_line().trim().parse::<usize>().map_or(0, |number| number.saturating_sub(1))
}

fn confirm(out: &Path) -> bool {
    let mut error = std::io::stderr().lock();
    let _ = write!(error, "\nWrite {}? [Y/n] ", out.display());
    let _ = error.flush();
    !read_line().trim().eq_ignore_ascii_case("n")
}

fn read_line() -> String {
    let mut line = String::new();
    let _ = std::io::stdin().lock().read_line(&mut line);
    line
}

fn guess(question: &Question) -> String {
    let Question { wanted, option, candidates, .. } = question;
    let names: Vec<&str> = candidates.iter().map(|(pointer, _)| &pointer[1..]).collect();
    match names.as_slice() {
        [only] => format!("{wanted} is column {only} ({option} names another)"),
        [first, others @ ..] => {
            format!("{wanted} is column {first}; it could also be {} ({option} names it)", others.join(", "))
        }
        [] => String::new(),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn findings(layout: &Layout) -> Vec<String> {
    let line = |what: &str, found: &str| format!("{what:<18}{found}");
    let list = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    let mut lines = Vec::new();
    for (what, paths) in
        [("queries", &layout.queries), ("rewards", &layout.rewards), ("queries + rewards", &layout.examples)]
    {
        if !paths.is_empty() {
            lines.push(line(what, &list(paths)));
        }
    }
    let column = |pointer: Option<&String>| pointer.map_or("none", |pointer| &pointer[1..]).to_owned();
    let both = |a: Option<&String>, b: Option<&String>| match a == b || layout.rewards.is_empty() && b.is_none() {
        true => column(a),
        false => format!("{}, of rewards {}", column(a), column(b)),
    };
    let total: u64 = layout.models.iter().map(|(_, number)| number).sum();
    let share = |(model, number): &(String, u64)| format!("{model} {}", percent(*number as f64 / total.max(1) as f64));
    let models: Vec<String> = layout.models.iter().map(share).collect();
    lines.push(line("embedding", &format!("{}, {} dimensions", &layout.query[1..], layout.dim)));
    lines.push(line("model", &format!("{}: {}", &layout.model[1..], models.join(", "))));
    lines.push(line("request ID", &both(layout.id.as_ref(), layout.reward_id.as_ref())));
    lines.push(line("time", &both(layout.time.as_ref(), layout.reward_time.as_ref())));
    let scale = match &layout.reward_scale {
        Rewards::None => "none".to_owned(),
        Rewards::Numbers { low, high, distinct: 1 } if low == high => format!("always {low}"),
        Rewards::Numbers { low, high, .. } => format!("{low} to {high}"),
        Rewards::Words(words) => {
            words.iter().map(|(word, number)| format!("{word} {number}x")).collect::<Vec<_>>().join(", ")
        }
    };
    let rewarded = format!("{}: {scale}; {} of the queries have one", &layout.reward[1..], percent(layout.rewarded));
    lines.push(line("reward", &rewarded));
    let propensities = match (&layout.propensities, &layout.propensity) {
        (Some(pointer), _) => pointer[1..].to_owned(),
        (None, Some(pointer)) => format!("{}, of the chosen model", &pointer[1..]),
        (None, None) => "none".to_owned(),
    };
    lines.push(line("propensities", &propensities));
    lines
}

/// The configuration; adds what it assumes to the assumptions.
fn propose(args: &Args, layout: &mut Layout) -> String {
    let sections = [
        learner(args, layout),
        logs(layout),
        events(layout),
        fields("events.fields", &of_queries(layout), &[]),
        fields("events.reward_fields", &of_rewards(layout), &of_queries(layout)),
        rewards(layout),
        join(args, layout),
    ];
    let mut text =
        "# Written by `pointsman init`. Every other key has its default: see `pointsman check-config`.\n".to_owned();
    for Table { name, lines } in sections.iter().filter(|section| !section.lines.is_empty()) {
        let _ = write!(text, "\n[{name}]\n{}\n", lines.join("\n"));
    }
    text
}

/// A section of the configuration.
struct Table {
    name: &'static str,
    lines: Vec<String>,
}

impl Table {
    fn new(name: &'static str) -> Self {
        Self { name, lines: Vec::new() }
    }

    fn comment(&mut self, text: &str) {
        self.lines.push(format!("# {text}"));
    }

    fn set(&mut self, key: &str, value: impl Into<toml::Value>) {
        self.lines.push(format!("{key} = {}", value.into()));
    }
}

fn texts<'a>(items: impl Iterator<Item = &'a str>) -> toml::Value {
    toml::Value::Array(items.map(toml::Value::from).collect())
}

fn numbers(items: &BTreeMap<String, f64>) -> toml::Table {
    items.iter().map(|(name, number)| (name.clone(), toml::Value::Float(*number))).collect()
}

fn learner(args: &Args, layout: &mut Layout) -> Table {
    let mut table = Table::new("learner");
    table.set("dim", layout.dim as i64);
    table.set("models", texts(layout.models.iter().map(|(name, _)| name.as_str())));
    if layout.propensities.is_some() {
        return table;
    }
    if layout.propensity.is_some() && args.split.is_empty() {
        let assumed = "only the probability of the chosen model was logged: the other models share the rest evenly";
        layout.assumptions.push(format!("{assumed} (learner.missing_propensities)"));
        table.comment("Only the probability of the chosen model was logged: the other models share the rest evenly.");
        table.set("missing_propensities", "uniform");
        return table;
    }
    let split = if args.split.is_empty() { layout.split() } else { args.split.iter().cloned().collect() };
    if args.split.is_empty() {
        let shown: Vec<String> = split.iter().map(|(model, p)| format!("{model} {}", percent(*p))).collect();
        layout.assumptions.push(format!(
            "no propensities were logged: models were drawn at random, whatever the query, as in an experiment with the \
             split {}. If the model depended on the query, no verdict from this log is valid. --split declares another split",
            shown.join(", ")
        ));
    }
    table.comment("The split of the experiment. Valid only if models were drawn at random, whatever the query.");
    table.set("declared_propensities", numbers(&split));
    table
}

fn logs(layout: &Layout) -> Table {
    let mut table = Table::new("logs");
    table.comment("Read by doctor, evaluate and replay when no files are named.");
    for (key, paths) in [("queries", &layout.queries), ("rewards", &layout.rewards), ("examples", &layout.examples)] {
        if !paths.is_empty() {
            let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            table.set(key, texts(paths.iter().map(String::as_str)));
        }
    }
    table
}

fn events(layout: &Layout) -> Table {
    let mut table = Table::new("events");
    let unit = match layout.time_unit {
        TimeUnit::S => "s",
        TimeUnit::Ms => return table,
        TimeUnit::Us => "us",
        TimeUnit::Ns => "ns",
    };
    table.set("time_unit", unit);
    table
}

/// Keys of event fields and where they are.
type Pointers = Vec<(&'static str, String)>;

fn of_queries(layout: &Layout) -> Pointers {
    let fields = [
        ("request_id", layout.id.as_ref()),
        ("ts_ms", layout.time.as_ref()),
        ("query", Some(&layout.query)),
        ("model", Some(&layout.model)),
        ("propensities", layout.propensities.as_ref()),
        ("propensity", layout.propensity.as_ref()),
    ];
    fields.into_iter().filter_map(|(key, pointer)| Some((key, pointer?.clone()))).collect()
}

fn of_rewards(layout: &Layout) -> Pointers {
    let fields = [
        ("request_id", layout.reward_id.as_ref()),
        ("ts_ms", layout.reward_time.as_ref()),
        ("reward", Some(&layout.reward)),
        ("event_id", layout.event_id.as_ref()),
    ];
    fields.into_iter().filter_map(|(key, pointer)| Some((key, pointer?.clone()))).collect()
}

/// The fields that are not where they would be looked for: where `shared` says, or under their own name.
fn fields(name: &'static str, fields: &Pointers, shared: &[(&'static str, String)]) -> Table {
    let mut table = Table::new(name);
    for (key, pointer) in fields {
        let expected = shared.iter().find(|(other, _)| other == key);
        let expected = expected.map_or_else(|| format!("/{key}"), |(_, pointer)| pointer.clone());
        if *pointer != expected {
            table.set(key, pointer.as_str());
        }
    }
    table
}

fn rewards(layout: &Layout) -> Table {
    let mut table = Table::new("reward");
    let (range, values) = (layout.reward_scale.range(), layout.reward_scale.values());
    if range != [0.0, 1.0] {
        table.comment("The rewards that are mapped to 0 and to 1.");
        table.set("range", range.map(toml::Value::Float).to_vec());
    }
    if !values.is_empty() {
        table.comment("What each event is worth.");
        table.set("values", numbers(&values));
    }
    table
}

fn join(args: &Args, layout: &mut Layout) -> Table {
    let mut table = Table::new("join");
    let defaults = JoinConfig::default();
    for (key, found, default) in
        [("window_ms", layout.window_ms(), defaults.window_ms), ("early_ms", layout.early_ms(), defaults.early_ms)]
    {
        if found.unsigned_abs() > default {
            table.set(key, found);
        }
    }
    let disorder_ms = layout.disorder_ms + layout.disorder_ms / 2;
    if disorder_ms.unsigned_abs() > defaults.reorder_ms {
        table.comment("Rows are not sorted by time.");
        table.set("reorder_ms", disorder_ms);
        layout.assumptions.push(format!(
            "rows are up to {:.0} s behind earlier ones: sort the logs by time if they are large, since at most 100,000 rows \
             are held back for ordering",
            layout.disorder_ms as f64 / 1000.0
        ));
    }
    let is_implied = layout.reward_scale.is_success_only() && layout.rewarded < 1.0;
    let missing = args.missing.unwrap_or(if is_implied { Missing::Reward(0.0) } else { Missing::Drop });
    if let Missing::Reward(reward) = missing {
        table.comment("A query without a reward earned this much.");
        table.set("on_missing", "default");
        if reward != defaults.default_reward {
            table.set("default_reward", reward);
        }
    }
    let without = percent(1.0 - layout.rewarded);
    match missing {
        _ if args.missing.is_some() || layout.rewarded > 0.999 => {}
        Missing::Reward(_) => layout.assumptions.push(format!(
            "only successes are logged: the {without} of the queries without a reward earned 0. --missing drop ignores them"
        )),
        Missing::Drop => layout.assumptions.push(format!(
            "nothing is known of the {without} of the queries without a reward: they are dropped. --missing 0 takes them for \
             failures"
        )),
    }
    if layout.rewards_per_query > 1 {
        table.comment("The best of several rewards of a query counts.");
        table.set("aggregate", "max");
        layout.assumptions.push(format!(
            "of several rewards of a query (up to {}) the best counts (join.aggregate)",
            layout.rewards_per_query
        ));
    }
    if !layout.reward_scale.values().is_empty() {
        let values = layout.reward_scale.values();
        let shown: Vec<String> = values.iter().map(|(word, value)| format!("{word} = {value}")).collect();
        layout.assumptions.push(format!("what each event is worth: {} (reward.values)", shown.join(", ")));
    }
    table
}
