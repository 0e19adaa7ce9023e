//! `pointsman evaluate`: off-policy evaluation on a log: does routing pay?

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::contestants::{CONFIGURED, contestants};
use super::examples::LogArgs;
use super::output::{outln, width};
use super::panel::{Moment, Panel, Row};
use super::warned::{self, Warned};
use super::world::positive_number;
use super::{Failure, outputs, summary};
use crate::config::Config;
use crate::evaluate::judge::Range;
use crate::evaluate::sample_ratio::SampleRatioView;
use crate::evaluate::verdict::{Assessment, Assessments, Comparison, Figures};
use crate::report::{Band, Bands, Block, Column, Page, Section, Table};
use crate::router::Params;
use crate::wire::params::decode;

/// Evaluate policies on a log: does routing beat the best single model?
///
/// Off-policy evaluation: each logged example is weighted by the ratio of a policy's probability of the chosen model to its
/// logged propensity. Evaluated are the policy that was logged, fixed parameters (--params), algorithms that learn from the
/// log as it is read, where each example is evaluated before it is learned (--algorithms), uniform routing, and every single
/// model. Without --algorithms and --params the configured algorithm is evaluated.
///
/// The last lines say for each policy, best first, whether it earns more than the best single model. If models were not played as
/// often as the propensities of the log say, or if confidence bounds cross, the log contradicts its propensities: there are no
/// ranges and no verdict then.
///
/// The confidence ranges are valid at all times simultaneously: evaluate as often as you like and stop whenever you like. The
/// policies share --alpha: the probability that the range of any lift is ever wrong is at most --alpha, for all policies
/// together, and so are the probability that the range of any value is ever wrong and the probability that a log with right
/// propensities is ever found to play models too often.
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
    /// Probability that any range of a lift is ever wrong, for all policies together, 1e-6 to 0.5; the same for the ranges of the
    /// values, and for the test of the propensities
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
    // A newcomer asks whether routing pays, as it is configured.
    let configured = [CONFIGURED.to_owned()];
    let is_asked = !args.algorithms.is_empty() || !args.params.is_empty();
    let algorithms = if is_asked { args.algorithms.as_slice() } else { &configured };
    on_log(&args.log, algorithms, &args.params, config, &args.shown)
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
    let result = Evaluation::of(&panel, shown.alpha)?;
    let page = with_warnings(page(log, &panel, &result), &warned);
    let path = shown.report.as_deref().map(|directory| super::write_page(directory, "evaluate", &page)).transpose()?;
    super::write_pngs(shown.png.as_deref(), "evaluate", &page)?;
    let all = table(&panel.rows(), &result.assessed.all, shown.alpha);
    super::write_csv(shown.csv.as_deref(), &[&all])?;
    if shown.json {
        let mut value = to_json(&panel, &result, shown, path.as_deref());
        value["warnings"] = json!(warned);
        outln!("{value}")?;
        return Ok(());
    }
    outln!("{}", all.text(width()))?;
    if let Some(latest) = result.latest() {
        outln!("{}", table(&panel.rows_of(&panel.latest().0), latest, shown.alpha).text(width()))?;
    }
    for line in &result.lines {
        outln!("{line}")?;
    }
    for line in warned::lines(&warned) {
        outln!("{line}")?;
    }
    if let Some(path) = path {
        outln!("Report with the lifts over time: {}", path.display())?;
    }
    Ok(())
}

/// The page with the warnings first: the estimates depend on them.
fn with_warnings(mut page: Page, warned: &[Warned]) -> Page {
    page.sections.splice(0..0, warned::section(warned));
    page
}

/// What the log says.
struct Evaluation {
    assessed: Assessments,
    comparisons: Vec<Comparison>,
    ratio: SampleRatioView,
    alpha: f64,
    /// Warnings and verdicts.
    lines: Vec<String>,
}

impl Evaluation {
    fn of(panel: &Panel, alpha: f64) -> anyhow::Result<Self> {
        let assessed = panel.assessments(alpha).context("the log has no examples")?;
        let comparisons = assessed.comparisons(&panel.names());
        let ratio = panel.sample_ratio(alpha);
        let lines = summary::verdict_lines(&ratio, &comparisons);
        Ok(Self { assessed, comparisons, ratio, alpha, lines })
    }

    /// The latest examples, if these are not all.
    fn latest(&self) -> Option<&Assessment> {
        self.assessed.latest.as_ref().filter(|latest| latest.examples < self.assessed.all.examples)
    }
}

fn read_params(path: &Path) -> anyhow::Result<(String, Params)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let params = decode(&bytes).with_context(|| format!("{} is not a valid parameter file", path.display()))?;
    Ok((path.display().to_string(), params))
}

/// What one row shows beside its estimate.
struct Standing {
    figures: Figures,
    lift: f64,
    lift_range: Option<Range>,
}

impl Assessment {
    /// The rows in the order of the table: candidates, then models alone. The lift of a model alone is the difference of the
    /// values.
    fn standings(&self) -> Vec<Standing> {
        let best = self.alone[self.best_alone].value;
        let candidates = self.candidates.iter().zip(&self.lifts).map(|(figures, lift)| Standing {
            figures: *figures,
            lift: lift.over_any.map_or(lift.value, |range| range.nearest(lift.value)),
            lift_range: lift.over_any,
        });
        let alone = self.alone.iter().map(|figures| Standing {
            figures: *figures,
            lift: figures.value - best,
            lift_range: None,
        });
        candidates.chain(alone).collect()
    }
}

/// `alpha` is the error probability of all ranges of a column together.
fn table(rows: &[Row], assessed: &Assessment, alpha: f64) -> Table {
    let range = |range: Range| format!("{:.4} to {:.4}", range.low, range.high);
    let standings = assessed.standings();
    let line = |(row, standing): (&Row, &Standing)| {
        let Standing { figures, lift, lift_range } = standing;
        vec![
            row.name.to_owned(),
            format!("{:.4}", figures.value),
            figures.range.map_or_else(|| "none".to_owned(), range),
            format!("{:.4}", figures.inverse_propensity),
            format!("{:.4}", figures.doubly_robust),
            format!("{:+.4}", lift + 0.0),
            match lift_range {
                _ if row.is_constant => String::new(),
                None => "none".to_owned(),
                Some(lift_range) => range(*lift_range),
            },
            format!("{:.0}", figures.effective_examples),
        ]
    };
    let titles = ["value", "range", "by propensity", "doubly robust", "lift", "range", "effective examples"];
    let columns = std::iter::once(Column::left("policy")).chain(titles.map(Column::right)).collect();
    let is_poor = |(_, standing): &(&Row, &Standing)| assessed.is_poor(&standing.figures);
    let poor: Vec<&str> = rows.iter().zip(&standings).filter(is_poor).map(|(row, _)| row.name).collect();
    let warning = if poor.is_empty() {
        String::new()
    } else {
        format!("; unreliable, since few examples are effective: {}", poor.join(", "))
    };
    let ranges = if standings.iter().all(|standing| standing.figures.range.is_none()) {
        "ranges: none, since the log contradicts its propensities".to_owned()
    } else {
        format!("ranges: all of a column together valid at all times with probability {}", 1.0 - alpha)
    };
    let note = format!(
        "{} examples, each evaluated before it was learned; lift: over the best constant model; {ranges}{warning}",
        assessed.examples
    );
    Table { columns, rows: rows.iter().zip(&standings).map(line).collect(), note: Some(note) }
}

fn to_json(panel: &Panel, result: &Evaluation, shown: &Shown, report: Option<&Path>) -> Value {
    let of = |rows: &[Row], assessed: &Assessment| -> Vec<Value> {
        let row = |(row, standing): (&Row, Standing)| {
            let Standing { figures, lift, lift_range } = standing;
            json!({
                "policy": row.name,
                "value": figures.value,
                "deviation": row.estimate.deviation(),
                "range": figures.range,
                "inverse_propensity": figures.inverse_propensity,
                "doubly_robust": figures.doubly_robust,
                "doubly_robust_deviation": row.estimate.doubly_robust_deviation(),
                "lift": lift,
                "lift_range": lift_range,
                "effective_examples": figures.effective_examples,
                "poor_overlap": assessed.is_poor(&figures),
            })
        };
        rows.iter().zip(assessed.standings()).map(row).collect()
    };
    let Assessments { all, latest, contradiction } = &result.assessed;
    json!({
        "examples": all.examples,
        "alpha": shown.alpha,
        "best_constant": panel.names().alone(all.best_alone),
        "policies": of(&panel.rows(), all),
        "latest": latest.as_ref().map(|latest| json!({
            "examples": latest.examples,
            "policies": of(&panel.rows_of(&panel.latest().0), latest),
        })),
        "sample_ratio": result.ratio,
        "contradiction": contradiction,
        "verdicts": result.comparisons,
        "verdict": result.comparisons.first().map(|best| &best.sentence),
        "report": report,
    })
}

fn page(log: &LogArgs, panel: &Panel, result: &Evaluation) -> Page {
    let alpha = result.alpha;
    let chart = Bands {
        title: "Lift over the best constant model, with its confidence range".to_owned(),
        x_label: "examples".to_owned(),
        y_label: "lift".to_owned(),
        bands: panel.names().candidates.iter().enumerate().map(|(i, name)| band(panel, i, name)).collect(),
    };
    let section = |heading: &str, text: Option<String>, body| Section { heading: heading.to_owned(), text, body };
    let mut body = vec![Block::Table(table(&panel.rows(), &result.assessed.all, alpha))];
    if result.assessed.contradiction.is_none() {
        body.push(Block::Chart(chart.html()));
    }
    let mut sections = vec![section("All examples", Some(result.lines.join(" ")), body)];
    if let Some(latest) = result.latest() {
        let body = vec![Block::Table(table(&panel.rows_of(&panel.latest().0), latest, alpha))];
        sections.push(section("Most recent examples", None, body));
    }
    let examples = result.assessed.all.examples.to_string();
    Page {
        title: "Pointsman evaluate".to_owned(),
        lead: "Estimated value of policies on this log: does routing pay?".to_owned(),
        facts: vec![("space".to_owned(), log.space.clone()), ("examples".to_owned(), examples)],
        sections,
    }
}

/// The lift of one candidate over time.
fn band(panel: &Panel, candidate: usize, name: &str) -> Band {
    let point = |Moment { examples, lifts }: &Moment| {
        let (lift, Range { low, high }) = lifts.get(candidate).copied().flatten()?;
        Some((*examples as f64, [lift, low, high]))
    };
    Band { name: name.to_owned(), points: panel.curve().iter().filter_map(point).collect() }
}
