//! `pointsman compare`: several algorithms on the same traffic, or on the same log.

mod frontier;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::json;

use super::contestants::{Contestant, contestants};
use super::evaluate::{self, Shown};
use super::examples::LogArgs;
use super::figures::{mean_and_deviation, percent, spread};
use super::logs::LogFiles;
use super::output::{outln, width};
use super::progress::{Jobs, Unit};
use super::world::{WorldArgs, dimension, exponent, positive, positive_number, share};
use super::{Failure, dataset, outputs, parallel};
use crate::config::{Config, LearnerConfig};
use crate::learner::Trainer;
use crate::report::{Block, Column, Lines, Page, Section, Series, Table};
use crate::simulate::World;
use crate::simulate::dataset::{DatasetSpec, DatasetWorld, Mixture};
use crate::simulate::history::{History, Occurrences, Summary};
use crate::simulate::partial::Partial;
use crate::simulate::run::{InProcess, Plan, run as run_loop};
use crate::simulate::shuffled::Shuffled;
use crate::wire::dataset::Dataset;

/// Compare algorithms on the same simulated traffic, data set or log
///
/// On simulated traffic (the default) and on a data set (--data), every algorithm routes the same queries with the same
/// random numbers, over several runs. The expected rewards are known, so the result is exact: "gap closed" is 0% for always
/// using the best single model and 100% for always using the best model of each query.
///
/// With --budget, the models of simulated traffic have prices, from 0.1 for model-1 to 5 for the last one, and dear models are better on
/// the whole. Each algorithm learns to keep each budget: what a query may cost on average. The result is quality against cost, beside
/// that of every single model and that of the best fixed policy of each budget, which knows the expected rewards. "over at most"
/// is the largest overspending of a window of 10,000 queries. Only algorithms that predict rewards can keep one: hpg (with its critic) and hypentropy-regression.
///
/// On a log (--log-queries and --log-rewards, or --examples) the rewards of other decisions are unknown. Each example is evaluated off-policy,
/// by importance weights, before the algorithm learns from it. See `pointsman evaluate`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Algorithms to compare: values of learner.algorithm, each optionally followed by its own keys of section learner, e.g.
    /// lin-ucb:features=linear:alpha=1; `configured` is the configured learner [default: hpg, hypentropy-regression,
    /// hpg:estimator=logged, lin-ucb, quadratic-sgd, log-quadratic, lin-ucb:features=linear, log-linear, exp3]
    #[arg(long, value_delimiter = ',', default_value = DEFAULT_ALGORITHMS, hide_default_value = true)]
    algorithms: Vec<String>,
    /// Number of queries per run
    #[arg(long, default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(10..))]
    rounds: u64,
    /// Number of runs, each with its own seed; the table shows mean and standard deviation
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,
    /// Seed of the first run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Dimension of simulated query embeddings, 1 to 4096
    #[arg(long, default_value_t = 64, value_parser = dimension)]
    dim: usize,
    /// Number of simulated models
    #[arg(long, default_value_t = 8, value_parser = positive)]
    models: usize,
    #[command(flatten)]
    world: WorldArgs,
    /// Use a data set instead of simulated traffic: a directory with routing.safetensors, or the file itself (see `gap
    /// --help`); queries are drawn evenly, with replacement (but see --zipf and --new)
    #[arg(long, value_name = "DIR|FILE", conflicts_with_all = ["queries_log", "rewards_log", "examples_log"])]
    data: Option<PathBuf>,
    /// With --data: hold out half of the queries and evaluate the learned policy on them at the end
    #[arg(long, requires = "data")]
    unseen: bool,
    /// With --data: draw repeated queries with a probability proportional to 1/rank^EXPONENT, ranked at random by the seed. 0
    /// draws them evenly; 1 resembles search traffic. The table then shows first occurrences and repeats separately
    #[arg(long, value_name = "EXPONENT", requires = "data", value_parser = exponent)]
    zipf: Option<f64>,
    /// With --data: probability, 0 to 1, that the next query is one that did not come before. This share of the distinct
    /// queries is reserved: each of them comes once. When all have come, new queries are synthetic: a random mix of a
    /// reserved query and one of its 8 nearest reserved neighbours, with their rewards mixed in the same proportion. They are
    /// easier to predict than real queries, and models differ less on them. The note below the table says how many there were
    #[arg(long = "new", value_name = "SHARE", requires = "data", value_parser = share)]
    new_share: Option<f64>,
    /// Shuffle rewards across queries, so that there is nothing to learn but the best single model
    #[arg(long)]
    shuffled: bool,
    /// Rounds between a decision and its reward
    #[arg(long, default_value_t = 0)]
    delay: u64,
    /// Rounds between two updates of the router's policy
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    refresh: u64,
    /// Share of rewards that are lost, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    lost: f64,
    /// Round at which the models change abruptly
    #[arg(long, value_name = "ROUND")]
    switch_at: Option<u64>,
    /// Each query may be answered by a random half of the models only
    #[arg(long)]
    partial: bool,
    /// Give the models prices, and every algorithm each of these budgets: the mean cost of a query, on the scale of prices from 0.1 to 5.
    /// Prints quality against cost
    #[arg(long, value_name = "COST", value_delimiter = ',', value_parser = positive_number,
          conflicts_with_all = ["data", "queries_log", "rewards_log", "examples_log"])]
    budget: Vec<f64>,
    /// With --budget: round at which some models change their price by a factor of 4
    #[arg(long, value_name = "ROUND", requires = "budget")]
    reprice_at: Option<u64>,
    /// With --budget: how much queries differ in what they cost, as the standard deviation of its logarithm, 0 to 1
    #[arg(long, default_value_t = 0.0, value_name = "DEVIATION", requires = "budget", value_parser = share)]
    cost_noise: f64,
    /// Compare by off-policy evaluation on this log: query events, in .jsonl, .csv or .parquet
    #[arg(long = "log-queries", num_args = 1.., value_name = "FILE", requires = "rewards_log")]
    queries_log: Vec<PathBuf>,
    /// Reward events of the log
    #[arg(long = "log-rewards", num_args = 1.., value_name = "FILE", requires = "queries_log")]
    rewards_log: Vec<PathBuf>,
    /// Compare by off-policy evaluation on this log, which has a query, its model and its reward in each row
    #[arg(long = "examples", num_args = 1.., value_name = "FILE", conflicts_with = "data")]
    examples_log: Vec<PathBuf>,
    /// Space to evaluate in the log
    #[arg(long, default_value = "default")]
    space: String,
    /// Write an HTML report to this directory
    #[arg(long, value_name = "DIR", default_value = "pointsman-report")]
    report: PathBuf,
    /// Write the charts of the report to this directory, as PNG
    #[arg(long, value_name = "DIR")]
    png: Option<PathBuf>,
    /// Write the figures of every run to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

const DEFAULT_ALGORITHMS: &str = "hpg,hypentropy-regression,hpg:estimator=logged,lin-ucb,quadratic-sgd,log-quadratic,\
lin-ucb:features=linear,log-linear,exp3";

const EXAMPLES: &str = "Examples:
  pointsman compare
  pointsman compare --queries isotropic --runs 10 --csv isotropic.csv
  pointsman compare --algorithms hpg,hpg:estimator=logged,hpg:preset=theory:intrinsic_rank=2:horizon=40000
  pointsman compare --delay 1000 --refresh 1000
  pointsman compare --switch-at 20000
  pointsman compare --budget 0.3,0.6,1 --reprice-at 20000
  pointsman compare --data my-data-set --unseen
  pointsman compare --data my-data-set --zipf 1 --new 0.3
  pointsman compare --config shop.toml --log-queries queries.jsonl --log-rewards rewards.jsonl

Exit codes: 0 success, 1 failed while running, 2 invalid usage or configuration.";

impl Args {
    /// How queries of a data set repeat; none if all alike.
    fn mixture(&self) -> Option<Mixture> {
        let is_mixed = self.zipf.is_some() || self.new_share.is_some();
        let (exponent, new_share) = (self.zipf.unwrap_or(0.0), self.new_share.unwrap_or(0.0));
        is_mixed.then_some(Mixture { exponent, new_share })
    }
}

/// Figures of one algorithm in one run.
struct Outcome {
    seed: u64,
    all: Summary,
    last: Summary,
    /// On held-out queries.
    unseen: Option<Summary>,
    /// On first occurrences and on repeats.
    occurrences: Option<Occurrences>,
    /// Gap closed per bin: rounds, share.
    curve: Vec<(f64, f64)>,
}

/// Bins of a run; the last tenth is a whole number of them.
const BINS: u64 = 50;

/// Number of draws of held-out queries.
const UNSEEN_DRAWS: usize = 5000;

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    config.check().map_err(|e| Failure::Usage(e.into()))?;
    let (queries, rewards) = (args.queries_log.clone(), args.rewards_log.clone());
    let files = LogFiles { queries, rewards, examples: args.examples_log.clone() };
    if !files.is_empty() {
        let log = LogArgs { files, space: args.space.clone() };
        let shown = Shown { csv: args.csv.clone(), png: args.png.clone(), json: args.json, ..Shown::default() };
        return evaluate::on_log(&log, &args.algorithms, &[], config, &shown);
    }
    let data = args.data.as_deref().map(dataset::read).transpose().map_err(Failure::Usage)?;
    let models = match &data {
        Some(data) => data.models.iter().map(ToString::to_string).collect(),
        None => (1..=args.models).map(|m| format!("model-{m}")).collect(),
    };
    let dim = data.as_ref().map_or(args.dim, |data| data.dim);
    let base = LearnerConfig { dim, models, ..config.learner.clone() };
    if !args.budget.is_empty() {
        return frontier::run(args, &base);
    }
    let contestants = contestants(&args.algorithms, &base).map_err(Failure::Usage)?;
    outputs::check(
        &[("--report", Some(&args.report)), ("--png", args.png.as_deref())],
        &[("--csv", args.csv.as_deref())],
    )?;
    let outcomes = run_all(args, data.as_ref(), &contestants)?;
    let of = |contestant: usize| &outcomes[contestant * args.runs as usize..][..args.runs as usize];
    let table = table(args, &contestants, &of);
    let page = page(args, data.as_ref(), &contestants, &of, &table);
    let path = super::write_page(&args.report, "compare", &page)?;
    super::write_pngs(args.png.as_deref(), "compare", &page)?;
    if let Some(csv) = &args.csv {
        std::fs::write(csv, to_csv(&contestants, &of)).with_context(|| format!("cannot write {}", csv.display()))?;
    }
    if args.json {
        outln!("{}", to_json(args, data.as_ref(), &contestants, &of, &path))?;
    } else {
        outln!("{}", table.text(width()))?;
        outln!("Report with curves: {}", path.display())?;
    }
    Ok(())
}

fn run_all(args: &Args, data: Option<&Dataset>, contestants: &[Contestant]) -> anyhow::Result<Vec<Outcome>> {
    let jobs: Vec<(&Contestant, u64)> = contestants
        .iter()
        .flat_map(|contestant| (0..args.runs).map(move |run| (contestant, args.seed.wrapping_add(run))))
        .collect();
    let kinds = (0..jobs.len()).map(|job| job / args.runs as usize).collect();
    let progress = Jobs::new("comparing", kinds, args.rounds, Unit::Of("rounds"));
    let numbered: Vec<_> = jobs.iter().enumerate().collect();
    let outcomes = parallel::map(&numbered, |&(number, (contestant, seed))| {
        progress.begin(number);
        run_one(args, data, contestant, *seed, |rounds| progress.advance(number, rounds, || contestant.name.clone()))
    });
    progress.finish();
    outcomes.into_iter().collect()
}

fn draw_world(args: &Args, data: Option<&Dataset>, seed: u64) -> anyhow::Result<Box<dyn World>> {
    let world = draw_whole(args, data, seed)?;
    Ok(if args.partial { Box::new(Partial::new(world, seed)) } else { world })
}

/// The world in which all models may answer.
fn draw_whole(args: &Args, data: Option<&Dataset>, seed: u64) -> anyhow::Result<Box<dyn World>> {
    if let Some(data) = data {
        let held_out = if args.unseen { 0.5 } else { 0.0 };
        let world = DatasetWorld::new(data, DatasetSpec { shuffled: args.shuffled, held_out, seed })?;
        return Ok(match args.mixture() {
            Some(mixture) => Box::new(world.mixed(mixture)?),
            None => Box::new(world),
        });
    }
    let world = args.world.draw(args.dim, args.models, seed);
    if !args.shuffled {
        return Ok(world);
    }
    // Far from the seeds of other runs.
    let other = args.world.draw(args.dim, args.models, seed.wrapping_add(1 << 32));
    Ok(Box::new(Shuffled::new(world, other)))
}

fn run_one(
    args: &Args,
    data: Option<&Dataset>,
    contestant: &Contestant,
    seed: u64,
    advance: impl Fn(u64),
) -> anyhow::Result<Outcome> {
    let mut world = draw_world(args, data, seed)?;
    let &Args { rounds, delay, refresh, lost, switch_at, .. } = args;
    let plan = Plan { rounds, delay, refresh, lost, switch_at, seed };
    let mut trainer = Trainer::new(contestant.spec.clone());
    let mut history = History::new(rounds, BINS);
    let stride = (rounds / 100).max(1);
    let mut told = 0;
    run_loop(&mut *world, &mut InProcess::new(&mut trainer, refresh).exactly(), &plan, &mut history, |history| {
        let done = history.rounds();
        if done - told >= stride || done == rounds {
            advance(done - told);
            told = done;
        }
    })?;
    let unseen = args.unseen.then(|| judge_unseen(&mut *world, &trainer, history.best_constant())).transpose()?;
    let share = |summary: Summary| summary.gap_closed(summary.policy);
    let curve = history.points().into_iter().map(|point| {
        let (policy, best_constant) = (point.policy, point.best_constant);
        let (uniform, oracle) = (point.uniform, point.oracle);
        (point.round as f64, share(Summary { policy, best_constant, uniform, oracle }))
    });
    let (all, last, curve) = (history.summary(1.0), history.summary(0.1), curve.collect());
    Ok(Outcome { seed, all, last, unseen, occurrences: history.occurrences(), curve })
}

/// Evaluates the learned policy on held-out queries; `best` is the best constant model of the training queries.
fn judge_unseen(world: &mut dyn World, trainer: &Trainer, best: usize) -> anyhow::Result<Summary> {
    world.switch();
    let mut sums = Summary { policy: 0.0, best_constant: 0.0, uniform: 0.0, oracle: 0.0 };
    for _ in 0..UNSEEN_DRAWS {
        let query = world.next_query();
        let expected = world.expected_rewards(&query);
        let played = trainer.distribution(&query)?.propensities;
        sums.policy += played.iter().zip(&expected).map(|(p, r)| p * r).sum::<f64>();
        sums.best_constant += expected[best];
        sums.uniform += expected.iter().sum::<f64>() / expected.len() as f64;
        sums.oracle += expected.iter().fold(0.0_f64, |m, &r| m.max(r));
    }
    let n = UNSEEN_DRAWS as f64;
    let Summary { policy, best_constant, uniform, oracle } = sums;
    Ok(Summary { policy: policy / n, best_constant: best_constant / n, uniform: uniform / n, oracle: oracle / n })
}

/// Relative gain over the best constant model.
fn above_constant(summary: &Summary) -> f64 {
    if summary.best_constant > 0.0 { summary.policy / summary.best_constant - 1.0 } else { 0.0 }
}

fn gap(summary: &Summary) -> f64 {
    summary.gap_closed(summary.policy)
}

fn table<'a>(args: &Args, contestants: &[Contestant], of: &dyn Fn(usize) -> &'a [Outcome]) -> Table {
    let figures =
        |outcomes: &[Outcome], figure: &dyn Fn(&Outcome) -> f64| outcomes.iter().map(figure).collect::<Vec<_>>();
    let mut columns = vec![Column::left("algorithm")];
    let titles = ["gap closed", "last tenth", "mean reward", "vs best constant", "last tenth"];
    columns.extend(titles.map(Column::right));
    if args.unseen {
        columns.push(Column::right("unseen queries"));
    }
    let is_mixed = args.mixture().is_some();
    if is_mixed {
        columns.extend(["first occurrences", "repeats"].map(Column::right));
    }
    let occurrences = |outcomes: &[Outcome], above: &dyn Fn(&Summary) -> f64| {
        let of = |part: &dyn Fn(&Occurrences) -> Summary| {
            percent(&figures(outcomes, &|o| o.occurrences.as_ref().map_or(0.0, |found| above(&part(found)))))
        };
        if is_mixed { vec![of(&|found| found.first), of(&|found| found.repeats)] } else { Vec::new() }
    };
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (i, contestant) in contestants.iter().enumerate() {
        let outcomes = of(i);
        let mut row = vec![
            contestant.name.clone(),
            percent(&figures(outcomes, &|o| gap(&o.all))),
            percent(&figures(outcomes, &|o| gap(&o.last))),
            spread(&figures(outcomes, &|o| o.all.policy), 4, ""),
            percent(&figures(outcomes, &|o| above_constant(&o.all))),
            percent(&figures(outcomes, &|o| above_constant(&o.last))),
        ];
        if args.unseen {
            row.push(percent(&figures(outcomes, &|o| o.unseen.as_ref().map_or(0.0, above_constant))));
        }
        row.extend(occurrences(outcomes, &above_constant));
        rows.push(row);
    }
    let reference = |name: &str, reward: &dyn Fn(&Summary) -> f64| {
        let rewards = figures(of(0), &|o| reward(&o.all));
        let gaps = figures(of(0), &|o| o.all.gap_closed(reward(&o.all)));
        let last = figures(of(0), &|o| o.last.gap_closed(reward(&o.last)));
        let above = |summary: &Summary| above_constant(&Summary { policy: reward(summary), ..*summary });
        let mut row = vec![
            name.to_owned(),
            percent(&gaps),
            percent(&last),
            spread(&rewards, 4, ""),
            percent(&figures(of(0), &|o| above(&o.all))),
            percent(&figures(of(0), &|o| above(&o.last))),
        ];
        if args.unseen {
            row.push(percent(&figures(of(0), &|o| o.unseen.as_ref().map_or(0.0, above))));
        }
        row.extend(occurrences(of(0), &above));
        row
    };
    if !contestants.is_empty() {
        rows.push(reference("best constant model", &|s| s.best_constant));
        rows.push(reference("uniform", &|s| s.uniform));
        rows.push(reference("oracle of every query", &|s| s.oracle));
    }
    let runs = (args.runs > 1).then(|| format!("mean ± standard deviation of {} runs", args.runs));
    let notes: Vec<String> = runs.into_iter().chain(is_mixed.then(|| occurrence_note(args, of(0)))).collect();
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    Table { columns, rows, note }
}

/// How many queries came for the first time, and how many of them are synthetic.
fn occurrence_note(args: &Args, outcomes: &[Outcome]) -> String {
    let mean = |part: &dyn Fn(&Occurrences) -> u64| {
        let rounds = outcomes.iter().filter_map(|o| o.occurrences.as_ref()).map(part).sum::<u64>();
        (rounds as f64 / outcomes.len().max(1) as f64).round()
    };
    let (first, synthetic) = (mean(&|found| found.first_rounds), mean(&|found| found.synthetic_rounds));
    format!(
        "first occurrences and repeats: what was earned beyond the model that is best on all rounds; {first} of {} rounds \
         were first occurrences, {synthetic} of them of synthetic queries",
        args.rounds
    )
}

fn page<'a>(
    args: &Args,
    data: Option<&Dataset>,
    contestants: &[Contestant],
    of: &dyn Fn(usize) -> &'a [Outcome],
    table: &Table,
) -> Page {
    let series = |(i, contestant): (usize, &Contestant)| {
        let outcomes = of(i);
        let point = |(at, &(round, _)): (usize, &(f64, f64))| {
            (round, mean_and_deviation(&outcomes.iter().map(|o| 100.0 * o.curve[at].1).collect::<Vec<_>>()).0)
        };
        let points = outcomes.first().map_or(Vec::new(), |first| first.curve.iter().enumerate().map(point).collect());
        Series { name: contestant.name.clone(), points, dashed: false }
    };
    let curves = Lines {
        title: "Gap closed over time, mean of the runs".to_owned(),
        x_label: "queries".to_owned(),
        y_label: "gap closed (%)".to_owned(),
        series: contestants.iter().enumerate().map(series).collect(),
    };
    Page {
        title: "Pointsman compare".to_owned(),
        lead: "All algorithms route the same queries with the same random numbers, and the expected rewards are known. Gap \
               closed: 0% is always using the best single model, 100% is always using the best model of each query."
            .to_owned(),
        facts: facts(args, data),
        sections: vec![Section {
            heading: "Result".to_owned(),
            text: None,
            body: vec![Block::Table(table.clone()), Block::Chart(curves.html())],
        }],
    }
}

fn facts(args: &Args, data: Option<&Dataset>) -> Vec<(String, String)> {
    let mut facts = match data {
        Some(data) => vec![
            ("queries of the data set", data.len().to_string()),
            ("dimension", data.dim.to_string()),
            ("models", data.models.len().to_string()),
        ],
        None => args.world.facts(args.dim, args.models),
    };
    facts.extend([
        ("rounds", args.rounds.to_string()),
        ("runs", args.runs.to_string()),
        ("first seed", args.seed.to_string()),
        ("delay", format!("{} rounds", args.delay)),
        ("router refresh", format!("{} rounds", args.refresh)),
        ("lost rewards", format!("{}%", 100.0 * args.lost)),
        ("rewards shuffled", args.shuffled.to_string()),
        ("half of the models missing at random", args.partial.to_string()),
    ]);
    facts.extend(args.switch_at.map(|round| ("switch at", format!("round {round}"))));
    facts.extend(args.mixture().into_iter().flat_map(|Mixture { exponent, new_share }| {
        [("zipf exponent", exponent.to_string()), ("new queries", format!("{}%", 100.0 * new_share))]
    }));
    facts.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn to_csv<'a>(contestants: &[Contestant], of: &dyn Fn(usize) -> &'a [Outcome]) -> String {
    let mut csv = "algorithm,seed,gap_closed,gap_closed_last_tenth,mean_reward,best_constant,uniform,oracle,\
                   mean_reward_last_tenth,best_constant_last_tenth,mean_reward_unseen,best_constant_unseen,\
                   first_occurrences,synthetic_queries,mean_reward_first,best_constant_first,mean_reward_repeats,\
                   best_constant_repeats\n"
        .to_owned();
    for (i, contestant) in contestants.iter().enumerate() {
        for o in of(i) {
            let unseen = o.unseen.as_ref().map_or(",".to_owned(), |u| format!("{},{}", u.policy, u.best_constant));
            let occurrences = o.occurrences.as_ref().map_or(",,,,,".to_owned(), |found| {
                let Occurrences { first_rounds, synthetic_rounds, first, repeats, .. } = found;
                format!(
                    "{first_rounds},{synthetic_rounds},{},{},{},{}",
                    first.policy, first.best_constant, repeats.policy, repeats.best_constant
                )
            });
            let Summary { policy, best_constant, uniform, oracle } = o.all;
            // Writing to a string cannot fail.
            let _ = writeln!(
                csv,
                "{},{},{},{},{policy},{best_constant},{uniform},{oracle},{},{},{unseen},{occurrences}",
                contestant.name,
                o.seed,
                gap(&o.all),
                gap(&o.last),
                o.last.policy,
                o.last.best_constant,
            );
        }
    }
    csv
}

fn to_json<'a>(
    args: &Args,
    data: Option<&Dataset>,
    contestants: &[Contestant],
    of: &dyn Fn(usize) -> &'a [Outcome],
    path: &Path,
) -> serde_json::Value {
    let row = |(i, contestant): (usize, &Contestant)| {
        let all = |figure: &dyn Fn(&Outcome) -> f64| of(i).iter().map(figure).collect::<Vec<f64>>();
        let of_occurrences = |figure: &dyn Fn(&Occurrences) -> f64| {
            args.mixture().map(|_| all(&|o| o.occurrences.as_ref().map_or(0.0, figure)))
        };
        json!({
            "algorithm": contestant.name,
            "spec": contestant.spec.method,
            "gap_closed": all(&|o| gap(&o.all)),
            "gap_closed_last_tenth": all(&|o| gap(&o.last)),
            "mean_reward": all(&|o| o.all.policy),
            "above_best_constant": all(&|o| above_constant(&o.all)),
            "above_best_constant_last_tenth": all(&|o| above_constant(&o.last)),
            "above_best_constant_unseen":
                args.unseen.then(|| all(&|o| o.unseen.as_ref().map_or(0.0, above_constant))),
            "above_best_constant_first": of_occurrences(&|found| above_constant(&found.first)),
            "above_best_constant_repeats": of_occurrences(&|found| above_constant(&found.repeats)),
            "first_occurrences": of_occurrences(&|found| found.first_rounds as f64),
            "synthetic_queries": of_occurrences(&|found| found.synthetic_rounds as f64),
        })
    };
    json!({
        "settings": facts(args, data).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "seeds": (0..args.runs).map(|run| args.seed.wrapping_add(run)).collect::<Vec<_>>(),
        "algorithms": contestants.iter().enumerate().map(row).collect::<Vec<_>>(),
        "report": path,
    })
}
