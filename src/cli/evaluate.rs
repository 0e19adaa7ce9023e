//! `pointsman evaluate`: what policies are worth on a log, and whether routing pays.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::contestants::contestants;
use super::examples::LogArgs;
use super::output::{outln, width};
use super::panel::{Panel, Row};
use super::world::positive_number;
use super::{Failure, summary};
use crate::config::Config;
use crate::evaluate::judge::Range;
use crate::evaluate::worth::{EFFECTIVE_MIN, Lift};
use crate::report::{Block, Column, Lines, Page, Section, Series, Table};
use crate::router::Params;
use crate::wire::params::decode;

/// What a policy is worth on a log, and whether routing beats the best single model
///
/// Nobody can know what other decisions would have earned: each example is weighted by how much likelier a policy makes
/// what was chosen than the propensities that were logged with it. Judged are what was logged, parameters as they are
/// (--params), algorithms that learn from the log as they go, each example judged before it is learned from
/// (--algorithms), uniform, and every model alone. Ranges hold at all times at once: look as often as you like, stop when
/// you like, and they are wrong with a probability of --alpha at the most.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    log: LogArgs,
    /// Parameters to judge as they are
    #[arg(long, num_args = 1.., value_name = "FILE")]
    params: Vec<PathBuf>,
    /// Algorithms to judge while they learn: names as in learner.algorithm, each with keys of `learner` of its own after
    /// colons; `configured` is what the configuration says
    #[arg(long, value_delimiter = ',', value_name = "NAME[:KEY=VALUE]..")]
    algorithms: Vec<String>,
    #[command(flatten)]
    shown: Shown,
}

/// How it is shown.
#[derive(Debug, clap::Args)]
pub struct Shown {
    /// Probability that a range is ever wrong
    #[arg(long, default_value_t = ALPHA, value_parser = probability)]
    pub alpha: f64,
    /// How many of the latest examples are judged for themselves, too
    #[arg(long, default_value_t = WINDOW, value_parser = clap::value_parser!(u64).range(10..))]
    pub window: u64,
    /// Directory for an HTML report
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Directory for the charts of the report as PNG
    #[arg(long, value_name = "DIR")]
    pub png: Option<PathBuf>,
    /// File for the table as comma-separated values
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
  pointsman evaluate --config shop.toml --queries logs/q-*.zst --rewards logs/r-*.zst --params params/default.safetensors
  pointsman evaluate --config shop.toml --queries q.jsonl --rewards r.jsonl --algorithms configured,hypentropy-regression \
--report out";

fn probability(text: &str) -> Result<f64, String> {
    positive_number(text).ok().filter(|x| *x <= 0.5).ok_or_else(|| "must be a number from 1e-6 to 0.5".to_owned())
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    on_log(&args.log, &args.algorithms, &args.params, config, &args.shown)
}

/// Judges algorithms and parameters on a log, and shows what came of it.
pub fn on_log(
    log: &LogArgs,
    algorithms: &[String],
    params: &[PathBuf],
    config: &Config,
    shown: &Shown,
) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let spec = settings.space(&log.space()?).clone();
    let contestants = contestants(algorithms, &log.learner(config)?).map_err(Failure::Usage)?;
    let params = params.iter().map(|path| read_params(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut panel = Panel::new(&spec, params, contestants, shown.window)?;
    log.each(config, "evaluating", |example| panel.see(example, shown.alpha))?;
    let page = page(log, &panel, shown);
    let path = shown.report.as_deref().map(|directory| super::write_page(directory, "evaluate", &page)).transpose()?;
    super::write_pngs(shown.png.as_deref(), "evaluate", &page)?;
    let all = table(&panel.rows(), panel.examples(), shown.alpha, shown.alpha);
    super::write_csv(shown.csv.as_deref(), &[&all])?;
    if shown.json {
        outln!("{}", to_json(&panel, shown, path.as_deref()))?;
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
    outln!("{}", verdict(&panel.rows(), shown.alpha))?;
    if let Some(path) = path {
        outln!("Report with the lift over time: {}", path.display())?;
    }
    Ok(())
}

fn read_params(path: &Path) -> anyhow::Result<(String, Params)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let params = decode(&bytes).with_context(|| format!("{} holds no parameters", path.display()))?;
    Ok((path.display().to_string(), params))
}

/// The constant policy that earned the most, by hindsight.
fn best_constant<'r, 'a>(rows: &'r [Row<'a>]) -> Option<&'r Row<'a>> {
    let value = |row: &&Row| row.estimate.self_normalised();
    rows.iter().filter(|row| row.is_constant).max_by(|a, b| value(a).total_cmp(&value(b)))
}

/// How much more than the best constant model.
fn lift(row: &Row, rows: &[Row]) -> f64 {
    row.estimate.self_normalised() - best_constant(rows).map_or(0.0, |best| best.estimate.self_normalised())
}

fn is_poor(row: &Row, examples: u64) -> bool {
    row.estimate.effective() < EFFECTIVE_MIN * examples as f64
}

/// `alpha` is what all ranges together may be wrong with, `each` what these may.
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
        format!("; the log hardly says anything of {}: few of its examples are effective", poor.join(", "))
    };
    let note = format!(
        "{examples} examples, each judged before it was learned from; lift: over the best constant model; \
         ranges hold at all times at once but for a probability of {alpha}{warning}"
    );
    Table { columns, rows: rows.iter().map(line).collect(), note: Some(note) }
}

/// Does routing, as it was logged, pay?
fn verdict(rows: &[Row], alpha: f64) -> String {
    let Some((logged, best)) = rows.first().zip(best_constant(rows)) else { return String::new() };
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
        "best_constant": best_constant(&rows).map(|row| row.name),
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
        title: "Lift of what was logged over the best constant model: where the truth is".to_owned(),
        x_label: "examples".to_owned(),
        y_label: "lift".to_owned(),
        series: vec![bound("at least", |range| range.low), bound("at most", |range| range.high)],
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
        sections.push(section("The latest examples", None, body));
    }
    Page {
        title: "Pointsman evaluate".to_owned(),
        lead: "What policies would have earned on this log, and whether routing pays.".to_owned(),
        facts: vec![("space".to_owned(), log.space.clone()), ("examples".to_owned(), panel.examples().to_string())],
        sections,
    }
}
