//! `pointsman evaluate`: off-policy evaluation on a log: does routing pay?

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::contestants::contestants;
use super::examples::LogArgs;
use super::output::{outln, width};
use super::panel::{Panel, Row};
use super::warned::{self, Warned};
use super::world::positive_number;
use super::{Failure, outputs, summary};
use crate::config::Config;
use crate::evaluate::judge::Range;
use crate::evaluate::worth::{EFFECTIVE_MIN, Lift};
use crate::report::{Block, Column, Lines, Page, Section, Series, Table};
use crate::router::Params;
use crate::wire::params::decode;

/// Evaluate policies on a log: does routing beat the best single model?
///
/// Off-policy evaluation: each logged example is weighted by the ratio of a policy's probability of the chosen model to its
/// logged propensity. Evaluated are the policy that was logged, fixed parameters (--params), algorithms that learn from the
/// log as it is read, where each example is evaluated before it is learned (--algorithms), uniform routing, and every single
/// model.
///
/// The confidence ranges are valid at all times simultaneously: evaluate as often as you like and stop whenever you like; the
/// probability that any of them is ever wrong is at most --alpha.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    log: LogArgs,
    /// Parameter files to evaluate
    #[arg(long, num_args = 1.., value_name = "FILE")]
    params: Vec<PathBuf>,
    /// Algorithms to evaluate while they learn: values of learner.algorithm, each optionally followed by its own keys of
    /// section learner, e.g. hpg:eta=0.3; `configured` is the configured learner
    #[arg(long, value_delimiter = ',', value_name = "NAME[:KEY=VALUE]..")]
    algorithms: Vec<String>,
    #[command(flatten)]
    shown: Shown,
}

/// Output options.
#[derive(Debug, clap::Args)]
pub struct Shown {
    /// Probability that any range is ever wrong, 1e-6 to 0.5
    #[arg(long, default_value_t = ALPHA, value_parser = probability)]
    pub alpha: f64,
    /// Number of most recent examples that are also evaluated separately
    #[arg(long, default_value_t = WINDOW, value_parser = clap::value_parser!(u64).range(10..))]
    pub window: u64,
    /// Write an HTML report to this directory
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Write the charts of the report to this directory, as PNG
    #[arg(long, value_name = "DIR")]
    pub png: Option<PathBuf>,
    /// Write the table to this file, as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

const ALPHA: f64 = 0.05;
const WINDOW: u64 = 10_000;

impl Default for Shown {
    fn default() -> Self {
        Self { alpha: ALPHA, window: WINDOW, report: None, png: None, csv: None, json: false }
    }
}

const EXAMPLES: &str = "Examples:
  pointsman evaluate --config shop.toml --queries queries.jsonl.zst --rewards rewards.jsonl.zst
  pointsman evaluate --config shop.toml --queries logs/q-*.zst --rewards logs/r-*.zst \\
      --params params/default.safetensors
  pointsman evaluate --config shop.toml --queries q.jsonl --rewards r.jsonl \\
      --algorithms configured,hypentropy-regression --report out

Exit codes: 0 success, 1 failed while running (also: no usable example in the log), 2 invalid usage or configuration.";

fn probability(text: &str) -> Result<f64, String> {
    positive_number(text).ok().filter(|x| *x <= 0.5).ok_or_else(|| "must be a number from 1e-6 to 0.5".to_owned())
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    on_log(&args.log, &args.algorithms, &args.params, config, &args.shown)
}

/// Evaluates algorithms and parameters on a log and prints the result.
pub fn on_log(
    log: &LogArgs,
    algorithms: &[String],
    params: &[PathBuf],
    config: &Config,
    shown: &Shown,
) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    outputs::check(
        &[("--report", shown.report.as_deref()), ("--png", shown.png.as_deref())],
        &[("--csv", shown.csv.as_deref())],
    )?;
    let spec = settings.space(&log.space()?).clone();
    let contestants = contestants(algorithms, &log.learner(config)?).map_err(Failure::Usage)?;
    let params = params.iter().map(|path| read_params(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut panel = Panel::new(&spec, params, contestants, shown.window)?;
    let warned = log.each(config, "evaluating", |example| panel.see(example, shown.alpha))?;
    let page = with_warnings(page(log, &panel, shown), &warned);
    let path = shown.report.as_deref().map(|directory| super::write_page(directory, "evaluate", &page)).transpose()?;
    super::write_pngs(shown.png.as_deref(), "evaluate", &page)?;
    let all = table(&panel.rows(), panel.examples(), shown.alpha, shown.alpha);
    super::write_csv(shown.csv.as_deref(), &[&all])?;
    if shown.json {
        let mut value = to_json(&panel, shown, path.as_deref());
        value["warnings"] = json!(warned);
        outln!("{value}")?;
        return Ok(());
    }
    outln!("{}", all.text(width()))?;
    let (latest, number) = panel.latest();
    if number < panel.examples() {
        outln!(
            "{}",
            table(&panel.rows_of(&latest), number, shown.alpha, panel.latest_alpha(shown.alpha)).text(width())
        )?;
    }
    for line in warned::lines(&warned) {
        outln!("{line}")?;
    }
    outln!("{}", verdict(&panel.rows(), shown.alpha))?;
    if let Some(path) = path {
        outln!("Report with the lift over time: {}", path.display())?;
    }
    Ok(())
}

/// The page with the warnings first: the estimates depend on them.
fn with_warnings(mut page: Page, warned: &[Warned]) -> Page {
    page.sections.splice(0..0, warned::section(warned));
    page
}

fn read_params(path: &Path) -> anyhow::Result<(String, Params)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let params = decode(&bytes).with_context(|| format!("{} is not a valid parameter file", path.display()))?;
    Ok((path.display().to_string(), params))
}

/// The constant policy with the highest estimated value, and the index of its model.
fn best_constant<'r, 'a>(rows: &'r [Row<'a>]) -> Option<(usize, &'r Row<'a>)> {
    let value = |row: &Row| row.estimate.self_normalised();
    let constants = rows.iter().filter(|row| row.is_constant).enumerate();
    constants.max_by(|(_, a), (_, b)| value(a).total_cmp(&value(b)))
}

/// Estimated gain over the best constant model: by paired differences, or for another constant model by the two values.
fn lift(row: &Row, rows: &[Row]) -> f64 {
    match best_constant(rows) {
        Some((model, _)) if !row.is_constant => row.estimate.lift_estimate(model).0,
        best => row.estimate.self_normalised() - best.map_or(0.0, |(_, best)| best.estimate.self_normalised()),
    }
}

fn is_poor(row: &Row, examples: u64) -> bool {
    row.estimate.effective() < EFFECTIVE_MIN * examples as f64
}

/// `alpha` is the error probability of all ranges together, `each` that of the ranges in this table.
fn table(rows: &[Row], examples: u64, alpha: f64, each: f64) -> Table {
    let range = |range: Range| format!("{:.4} to {:.4}", range.low, range.high);
    let line = |row: &Row| {
        let estimate = row.estimate;
        vec![
            row.name.to_owned(),
            format!("{:.4}", estimate.self_normalised()),
            range(estimate.range(each)),
            format!("{:.4}", estimate.inverse_propensity()),
            format!("{:.4}", estimate.doubly_robust()),
            format!("{:+.4}", lift(row, rows) + 0.0),
            if row.is_constant { String::new() } else { range(estimate.lift_range(each)) },
            format!("{:.0}", estimate.effective()),
        ]
    };
    let titles = ["value", "range", "by propensity", "doubly robust", "lift", "range", "effective examples"];
    let columns = std::iter::once(Column::left("policy")).chain(titles.map(Column::right)).collect();
    let poor: Vec<&str> = rows.iter().filter(|row| is_poor(row, examples)).map(|row| row.name).collect();
    let warning = if poor.is_empty() {
        String::new()
    } else {
        format!("; unreliable, since few examples are effective: {}", poor.join(", "))
    };
    let note = format!(
        "{examples} examples, each evaluated before it was learned; lift: over the best constant model; ranges: all valid \
         at all times with probability {}{warning}",
        1.0 - alpha
    );
    Table { columns, rows: rows.iter().map(line).collect(), note: Some(note) }
}

/// Does routing as logged pay?
fn verdict(rows: &[Row], alpha: f64) -> String {
    let Some((logged, (_, best))) = rows.first().zip(best_constant(rows)) else { return String::new() };
    let lift = Lift { value: lift(logged, rows), range: logged.estimate.lift_range(alpha) };
    summary::verdict(&lift, best.name)
}

fn to_json(panel: &Panel, shown: &Shown, report: Option<&Path>) -> Value {
    let of = |rows: &[Row], examples: u64, alpha: f64| -> Vec<Value> {
        let row = |row: &Row| {
            let estimate = row.estimate;
            json!({
                "policy": row.name,
                "value": estimate.self_normalised(),
                "deviation": estimate.deviation(),
                "range": estimate.range(alpha),
                "inverse_propensity": estimate.inverse_propensity(),
                "doubly_robust": estimate.doubly_robust(),
                "doubly_robust_deviation": estimate.doubly_robust_deviation(),
                "lift": lift(row, rows),
                "lift_range": (!row.is_constant).then(|| estimate.lift_range(alpha)),
                "effective_examples": estimate.effective(),
                "poor_overlap": is_poor(row, examples),
            })
        };
        rows.iter().map(row).collect()
    };
    let (latest, number) = panel.latest();
    let rows = panel.rows();
    json!({
        "examples": panel.examples(),
        "alpha": shown.alpha,
        "best_constant": best_constant(&rows).map(|(_, row)| row.name),
        "policies": of(&rows, panel.examples(), shown.alpha),
        "latest": {
            "examples": number,
            "policies": of(&panel.rows_of(&latest), number, panel.latest_alpha(shown.alpha)),
        },
        "verdict": verdict(&rows, shown.alpha),
        "report": report,
    })
}

fn page(log: &LogArgs, panel: &Panel, shown: &Shown) -> Page {
    let (latest, number) = panel.latest();
    let rows = panel.rows();
    let bound = |name: &str, of: fn(&Range) -> f64| Series {
        name: name.to_owned(),
        points: panel.curve().iter().map(|(examples, range)| (*examples as f64, of(range))).collect(),
        dashed: false,
    };
    let lines = Lines {
        title: "Lift of the logged policy over the best constant model, confidence range".to_owned(),
        x_label: "examples".to_owned(),
        y_label: "lift".to_owned(),
        series: vec![bound("lower bound", |range| range.low), bound("upper bound", |range| range.high)],
    };
    let section = |heading: &str, text: Option<String>, body| Section { heading: heading.to_owned(), text, body };
    let mut sections = vec![section(
        "All examples",
        Some(verdict(&rows, shown.alpha)),
        vec![Block::Table(table(&rows, panel.examples(), shown.alpha, shown.alpha)), Block::Chart(lines.html())],
    )];
    if number < panel.examples() {
        let each = panel.latest_alpha(shown.alpha);
        let body = vec![Block::Table(table(&panel.rows_of(&latest), number, shown.alpha, each))];
        sections.push(section("Most recent examples", None, body));
    }
    Page {
        title: "Pointsman evaluate".to_owned(),
        lead: "Estimated value of policies on this log: does routing pay?".to_owned(),
        facts: vec![("space".to_owned(), log.space.clone()), ("examples".to_owned(), panel.examples().to_string())],
        sections,
    }
}
