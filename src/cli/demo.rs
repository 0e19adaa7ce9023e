//! `pointsman demo`: the whole loop on simulated traffic in one process, measured against known expected rewards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use serde_json::json;
use tempfile::TempDir;

use super::closed_loop::ClosedLoop;
use super::figures::{mean_and_deviation, percent, spread};
use super::output::{outln, paragraph, width};
use super::progress::{Jobs, Unit};
use super::world::{WorldArgs, dimension, positive, share};
use super::{Failure, outputs, parallel};
use crate::config::{Algorithm, Config, LearnerConfig, Preset, Settings, Spec};
use crate::hpg::spectra::Eigen;
use crate::report::{Block, Column, Lines, Page, Section, Series, Spectrum, StackedShares, Table};
use crate::simulate::history::{History, Point, Summary};
use crate::simulate::run::{Plan, run as run_loop};

/// Watch it learn on simulated traffic: prints a table and writes an HTML report
///
/// Runs the whole loop in one process, with temporary files: router, event logs, learner, snapshots, parameters. In each
/// round one query arrives, the current policy draws a model, and the model earns a reward of 0 or 1 with a probability
/// that depends on query and model. The learner sees only that reward.
///
/// In the table, "gap closed" is 0% for always using the best single model and 100% for always using the best model of each
/// query. --dim and --models replace learner.dim and learner.models; all other keys of section learner apply.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of queries
    #[arg(long, default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Dimension of query embeddings, 1 to 4096
    #[arg(long, default_value_t = 64, value_parser = dimension)]
    dim: usize,
    /// Number of models
    #[arg(long, default_value_t = 8, value_parser = positive)]
    models: usize,
    #[command(flatten)]
    world: WorldArgs,
    /// Rounds between a decision and its reward
    #[arg(long, default_value_t = 0)]
    delay: u64,
    /// Rounds between two snapshots; the router gets new parameters after each
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    refresh: u64,
    /// Share of rewards that are lost, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    lost: f64,
    /// Round at which the models change abruptly
    #[arg(long, value_name = "ROUND")]
    switch_at: Option<u64>,
    /// Seed of the first run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of runs, each with its own seed; with several, the table shows mean and standard deviation
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,
    /// Learners to run; the first one is the subject of the summary
    #[arg(long, value_enum, value_delimiter = ',', default_value = "configured,hypentropy-regression,best-rival")]
    learners: Vec<Contestant>,
    /// Write the HTML report to this directory
    #[arg(long, value_name = "DIR", default_value = "pointsman-report")]
    report: PathBuf,
    /// Write the charts of the report to this directory, as PNG
    #[arg(long, value_name = "DIR")]
    png: Option<PathBuf>,
    /// Write the table to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman demo
  pointsman demo --runs 5 --learners configured,theory,parameter-free
  pointsman demo --delay 1000 --refresh 1000 --lost 0.2
  pointsman demo --switch-at 20000 --set learner.half_life=10000
  pointsman demo --set learner.rank=4 --set learner.eta=0.3

The report opens in any browser: pointsman-report/demo.html";

/// A learner of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Contestant {
    /// The configured learner; by default HPG with the practical preset
    Configured,
    /// HPG with the hyper-parameters of the paper's theorem
    Theory,
    /// Parameter-free HPG: finds the scale of its parameters itself
    ParameterFree,
    /// Hypentropy regression: plays the rewards that the critic predicts, without a policy of its own
    HypentropyRegression,
    /// The strongest other algorithm on most streams: LinUCB on quadratic features
    BestRival,
}

/// One learner in one run.
struct Job {
    contestant: usize,
    seed: u64,
}

/// Result of a job.
struct Outcome {
    history: History,
    eigens: Vec<Eigen>,
}

/// Points of each curve.
const BINS: u64 = 200;

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    config.check().map_err(|e| Failure::Usage(e.into()))?;
    let specs = contestants(args, config).map_err(|e| Failure::Usage(e.into()))?;
    let jobs: Vec<Job> = (0..args.runs)
        .flat_map(|run| (0..specs.len()).map(move |contestant| (contestant, run)))
        .map(|(contestant, run)| Job { contestant, seed: args.seed.wrapping_add(run) })
        .collect();
    outputs::check(
        &[("--report", Some(&args.report)), ("--png", args.png.as_deref())],
        &[("--csv", args.csv.as_deref())],
    )?;
    if !args.json {
        outln!("{}\n", paragraph(&introduction(args)))?;
    }
    let outcomes = run_all(args, &specs, &jobs)?;
    let rows = rows(args, &specs, &outcomes);
    let page = page(args, &specs, &rows, &outcomes);
    let path = super::write_page(&args.report, "demo", &page)?;
    super::write_pngs(args.png.as_deref(), "demo", &page)?;
    let table = table(&rows);
    super::write_csv(args.csv.as_deref(), &[&table])?;
    if args.json {
        outln!("{}", to_json(args, &specs, &rows, &path))?;
    } else {
        outln!("{}", table.text(width()))?;
        outln!("{}", conclusion(&rows, &path))?;
    }
    Ok(())
}

fn contestants(args: &Args, config: &Config) -> Result<Vec<(String, Spec)>, crate::config::BadSetting> {
    let base = LearnerConfig {
        dim: args.dim,
        models: (1..=args.models).map(|m| format!("model-{m}")).collect(),
        ..config.learner.clone()
    };
    let fresh = LearnerConfig { dim: base.dim, models: base.models.clone(), ..LearnerConfig::default() };
    let make = |contestant: &Contestant| {
        let (name, learner) = match contestant {
            Contestant::Configured => (name_of(&base), base.clone()),
            Contestant::Theory => {
                let (preset, rank) = (Preset::Theory, Some(args.world.intrinsic_rank));
                (
                    "HPG, theory".to_owned(),
                    LearnerConfig { preset, intrinsic_rank: rank, horizon: Some(args.rounds), ..fresh.clone() },
                )
            }
            Contestant::ParameterFree => {
                let algorithm = Algorithm::HpgParameterFree;
                ("HPG, parameter-free".to_owned(), LearnerConfig { algorithm, ..fresh.clone() })
            }
            Contestant::HypentropyRegression => {
                let algorithm = Algorithm::HypentropyRegression;
                ("hypentropy regression".to_owned(), LearnerConfig { algorithm, ..fresh.clone() })
            }
            Contestant::BestRival => {
                let algorithm = Algorithm::LinUcb;
                ("rival: quadratic LinUCB".to_owned(), LearnerConfig { algorithm, ..fresh.clone() })
            }
        };
        Ok((name, learner.check()?))
    };
    args.learners.iter().map(make).collect()
}

fn name_of(learner: &LearnerConfig) -> String {
    match learner.algorithm {
        Algorithm::Hpg => format!("HPG, {}", learner.preset),
        other => other.to_string(),
    }
}

fn run_all(args: &Args, specs: &[(String, Spec)], jobs: &[Job]) -> anyhow::Result<Vec<Outcome>> {
    let kinds = jobs.iter().map(|job| job.contestant).collect();
    let progress = Jobs::new("learning", kinds, args.rounds, Unit::Of("rounds"));
    let numbered: Vec<(usize, &Job)> = jobs.iter().enumerate().collect();
    let outcomes = parallel::map(&numbered, |&(number, job)| {
        let (name, spec) = &specs[job.contestant];
        let mut told = 0;
        progress.begin(number);
        run_one(args, spec, job.seed, |history| {
            let rounds = history.rounds();
            progress.advance(number, rounds - told, || format!("{name}: reward so far {:.4}", history.mean_reward()));
            told = rounds;
        })
    });
    progress.finish();
    outcomes.into_iter().collect()
}

fn run_one(args: &Args, spec: &Spec, seed: u64, mut report: impl FnMut(&History)) -> anyhow::Result<Outcome> {
    let mut world = args.world.draw(args.dim, args.models, seed);
    let plan = Plan {
        rounds: args.rounds,
        delay: args.delay,
        refresh: args.refresh,
        lost: args.lost,
        switch_at: args.switch_at,
        seed,
    };
    let dir = TempDir::with_prefix("pointsman-demo-").context("cannot create a temporary directory")?;
    let settings = Settings { learner: spec.clone(), spaces: BTreeMap::new(), ..Config::default().check()? };
    let mut stack = ClosedLoop::new(dir.path(), settings, &plan)?;
    let mut history = History::new(args.rounds, BINS);
    let stride = (args.rounds / 200).max(1);
    let mut told = 0;
    run_loop(&mut *world, &mut stack, &plan, &mut history, |history| {
        let rounds = history.rounds();
        if rounds - told >= stride || rounds == args.rounds {
            report(history);
            told = rounds;
        }
    })?;
    Ok(Outcome { history, eigens: stack.eigens() })
}

/// A line of the table: a figure for each run.
struct Row {
    name: String,
    reward: Vec<f64>,
    gap: Vec<f64>,
    last_gap: Vec<f64>,
    regret: Vec<f64>,
    linearized_regret: Option<Vec<f64>>,
}

fn rows(args: &Args, specs: &[(String, Spec)], outcomes: &[Outcome]) -> Vec<Row> {
    let of_contestant = |contestant: usize| outcomes.iter().skip(contestant).step_by(specs.len());
    let row = |name: &str, contestant: usize, reward: &dyn Fn(&Summary) -> f64, own: bool| {
        let histories: Vec<&History> = of_contestant(contestant).map(|outcome| &outcome.history).collect();
        let figures = |of: &dyn Fn(&History) -> f64| histories.iter().map(|history| of(history)).collect::<Vec<f64>>();
        let last = |history: &History| history.points().last().cloned();
        let regret = |history: &History| {
            let (all, end) = (history.summary(1.0), last(history).map_or(0.0, |point| point.regret));
            end + (all.policy - reward(&all)) * args.rounds as f64
        };
        let gap = |history: &History, share: f64| {
            let summary = history.summary(share);
            summary.gap_closed(reward(&summary))
        };
        Row {
            name: name.to_owned(),
            reward: figures(&|history| reward(&history.summary(1.0))),
            gap: figures(&|history| gap(history, 1.0)),
            last_gap: figures(&|history| gap(history, 0.1)),
            regret: figures(&regret),
            linearized_regret: own.then(|| figures(&|h| last(h).map_or(0.0, |point| point.linearized_regret))),
        }
    };
    let mut rows: Vec<Row> = specs.iter().enumerate().map(|(i, (name, _))| row(name, i, &|s| s.policy, true)).collect();
    rows.push(row("best constant model", 0, &|s| s.best_constant, false));
    rows.push(row("uniform", 0, &|s| s.uniform, false));
    rows.push(row("oracle of every query", 0, &|s| s.oracle, false));
    rows
}

fn table(rows: &[Row]) -> Table {
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            spread(&row.reward, 4, ""),
            percent(&row.gap),
            percent(&row.last_gap),
            spread(&row.regret, 0, ""),
            row.linearized_regret.as_ref().map_or("-".to_owned(), |regret| spread(regret, 0, "")),
        ]
    };
    let right = ["mean reward", "gap closed", "in last tenth", "policy regret", "linearized regret"];
    Table {
        columns: std::iter::once(Column::left("policy")).chain(right.map(Column::right)).collect(),
        rows: rows.iter().map(line).collect(),
        note: (rows[0].reward.len() > 1).then(|| format!("mean ± standard deviation of {} runs", rows[0].reward.len())),
    }
}

fn introduction(args: &Args) -> String {
    let Args { rounds, dim, models, .. } = args;
    format!(
        "{models} models, {rounds} queries of dimension {dim}. Each query is routed to one model, and the learner sees\n\
         only the reward of that model. HPG learns the matrices W_m of the policy pi(m|q) ~ exp(q'W_m q)."
    )
}

fn conclusion(rows: &[Row], path: &Path) -> String {
    format!(
        "{} closed {} of the gap between the best single model and the best model of each query.\n\
         Report with curves, traffic and spectra: {}",
        rows[0].name,
        spread(&[100.0 * mean_and_deviation(&rows[0].gap).0], 1, "%"),
        path.display()
    )
}

fn to_json(args: &Args, specs: &[(String, Spec)], rows: &[Row], path: &Path) -> serde_json::Value {
    let row = |row: &Row| {
        json!({
            "policy": row.name,
            "mean_reward": row.reward,
            "gap_closed": row.gap,
            "gap_closed_last_tenth": row.last_gap,
            "policy_regret": row.regret,
            "linearized_policy_regret": row.linearized_regret,
        })
    };
    json!({
        "settings": facts(args).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "seeds": (0..args.runs).map(|run| args.seed.wrapping_add(run)).collect::<Vec<_>>(),
        "learners": specs.iter().map(|(name, spec)| json!({ "name": name, "spec": spec })).collect::<Vec<_>>(),
        "policies": rows.iter().map(row).collect::<Vec<_>>(),
        "report": path,
    })
}

fn facts(args: &Args) -> Vec<(String, String)> {
    let mut facts = vec![("queries", args.rounds.to_string())];
    facts.extend(args.world.facts(args.dim, args.models));
    facts.extend([
        ("delay", format!("{} rounds", args.delay)),
        ("router refresh", format!("{} rounds", args.refresh)),
        ("lost rewards", format!("{}%", 100.0 * args.lost)),
        ("first seed", args.seed.to_string()),
        ("runs", args.runs.to_string()),
    ]);
    facts.extend(args.switch_at.map(|round| ("switch at", format!("round {round}"))));
    facts.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The curves show the first run, the table all runs.
fn page(args: &Args, specs: &[(String, Spec)], rows: &[Row], outcomes: &[Outcome]) -> Page {
    let curves: Vec<(&str, Vec<Point>)> =
        specs.iter().zip(outcomes).map(|((name, _), outcome)| (name.as_str(), outcome.history.points())).collect();
    let series = |name: &str, points: &[Point], dashed: bool, y: &dyn Fn(&Point) -> f64| Series {
        name: name.to_owned(),
        points: points.iter().map(|point| (point.round as f64, y(point))).collect(),
        dashed,
    };
    let lines = |title: &str, y_label: &str, series: Vec<Series>| {
        Block::Chart(
            Lines { title: title.to_owned(), x_label: "queries".to_owned(), y_label: y_label.to_owned(), series }
                .html(),
        )
    };
    let mut rewards: Vec<Series> =
        curves.iter().map(|(name, points)| series(name, points, false, &|point| point.policy)).collect();
    let first = &curves[0].1;
    rewards.push(series("best constant model", first, true, &|point| point.best_constant));
    rewards.push(series("uniform", first, true, &|point| point.uniform));
    rewards.push(series("oracle of every query", first, true, &|point| point.oracle));
    let of_all = |y: &dyn Fn(&Point) -> f64| {
        curves.iter().map(|(name, points)| series(name, points, false, y)).collect::<Vec<_>>()
    };
    let models: Vec<String> = specs[0].1.models.iter().map(ToString::to_string).collect();
    let traffic = |(name, points): &(&str, Vec<Point>)| {
        let shares = StackedShares {
            title: format!("Traffic share of each model: {name}"),
            x_label: "queries".to_owned(),
            names: models.clone(),
            x: points.iter().map(|point| point.round as f64).collect(),
            shares: points.iter().map(|point| point.traffic.clone()).collect(),
        };
        Block::Chart(shares.html())
    };
    let spectrum = |((name, _), outcome): (&(String, Spec), &Outcome)| {
        let values = outcome.eigens.iter().map(|eigen| eigen.lambda.clone());
        let spectrum = Spectrum {
            title: format!("Eigenvalues of W at the end: {name}"),
            models: models.iter().cloned().zip(values).collect(),
        };
        Block::Chart(spectrum.html())
    };
    let section = |heading: &str, text: &str, body: Vec<Block>| Section {
        heading: heading.to_owned(),
        text: Some(text.to_owned()),
        body,
    };
    Page {
        title: "Pointsman demo".to_owned(),
        lead: "Which model should answer each query? The learners see only the rewards of the models that were chosen. The \
               simulation knows all expected rewards, so the results are exact."
            .to_owned(),
        facts: facts(args),
        sections: vec![
            section(
                "Result",
                "Rewards are expected rewards under the sampled distribution. Gap closed: 0% is always using the best \
                 single model, 100% is always using the best model of each query. Policy regret is the additional reward \
                 that the policy of W* would have earned over the whole run, where W* are the true matrices of the \
                 simulation, scaled to a nuclear norm of 300. Linearized policy regret is the paper's surrogate for it.",
                vec![Block::Table(table(rows))],
            ),
            section(
                "Reward over time",
                "Mean expected reward over time, first run.",
                vec![lines("Reward", "mean expected reward", rewards)],
            ),
            section(
                "Regret over time",
                "A flattening curve means that the policy has learned.",
                vec![
                    lines("Policy regret against W*", "sum so far", of_all(&|point| point.regret)),
                    lines("Linearized policy regret", "sum so far", of_all(&|point| point.linearized_regret)),
                ],
            ),
            section("Traffic", "Share of queries that each model answered.", curves.iter().map(traffic).collect()),
            section(
                "Spectra",
                "The parameter of each model is a symmetric low-rank matrix. A positive eigenvalue marks a direction of \
                 queries that the model answers well, a negative one a direction that it answers badly.",
                specs.iter().zip(outcomes).map(spectrum).collect(),
            ),
        ],
    }
}
