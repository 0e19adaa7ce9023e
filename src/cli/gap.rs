//! `pointsman gap`: regret of the best policy of each class, in sample, held out and on shuffled rewards.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow};
use serde_json::{Value, json};

use super::output::{outln, paragraph, width};
use super::progress::{Progress, Unit};
use super::world::positive;
use super::{Failure, dataset, outputs, parallel};
use crate::config::Config;
use crate::evaluate::classes::Problem;
use crate::evaluate::gap::{Gaps, Group, Row, Study};
use crate::evaluate::ranks::{Found, Item, Ranks, telling_query};
use crate::report::{Block, Cloud, Column, Look, Page, Scatter, Section, Table};
use crate::wire::dataset::Dataset;

/// Is there anything to route? Measure policy classes on a data set that has the reward of every model
///
/// The data set has the expected reward of every model for every query. The gap of a policy is the reward that it loses
/// against always using the best model of each query; lower is better. The table shows the gap of the best constant model,
/// of the best log-linear policy, pi(m|q) ~ exp(theta_m . q), and of the best log-quadratic policy, pi(m|q) ~ exp(q'W_m q)
/// with W_m of rank --rank or lower.
///
/// Each gap is measured three ways. In sample: optimised and measured on the same queries, as in the paper. Held out:
/// optimised on some queries and measured on the others, by cross-validation with early stopping on a fifth of the training
/// queries. Shuffled: in sample with the rewards shuffled across queries, so that there is nothing to learn. A class that
/// does as well on shuffled rewards has memorised the queries; only the held-out gap predicts the reward of new queries.
///
/// --data is a directory with routing.safetensors (tensors query [n, d] and expected_reward [n, M]; metadata models, a JSON
/// array of names; optionally candidate_offsets, candidate_reward and candidate_similarity for the figure), and optionally
/// queries.tsv (columns id, text, and optionally category, separated by tabs; without the category, the part of the id
/// before the first - is used). Categories of at least 30 queries get their own row.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Data set: a directory with routing.safetensors, or the file itself
    #[arg(long, value_name = "DIR|FILE")]
    data: PathBuf,
    /// Rank of the log-quadratic class [default: 16, or the dimension if smaller]
    #[arg(long, value_name = "K", value_parser = positive)]
    rank: Option<usize>,
    /// Number of cross-validation folds, 2 to 100
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=100))]
    folds: u64,
    /// Seed of folds, shuffling and initialisation
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Two models to compare in the figure, by name or number from 1 [default: the pair that differs most]
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1..)]
    models: Vec<String>,
    /// Items up to rank K count as found in the figure [default: a quarter of a query's candidates]
    #[arg(long, value_name = "K", value_parser = positive)]
    top: Option<usize>,
    /// Write an HTML report with the figure to this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
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
  pointsman gap --data dbpedia-entity
  pointsman gap --data dbpedia-entity --report report --models minilm_l6,bm25
  pointsman gap --data routing.safetensors --rank 4 --folds 10 --seed 2
  pointsman gap --data dbpedia-entity --json | jq '.rows[0].log_quadratic'

Time grows with queries x dimension x models x rank. A few hundred queries take seconds, 20,000 of dimension 768 a few \
minutes; for larger data sets start with --folds 2 --rank 4.";

/// Smaller categories get no row: cross-validation on them would be noise.
const CATEGORY_MIN: usize = 30;

/// Runs the command.
pub fn run(args: &Args, _config: &Config) -> Result<(), Failure> {
    let data = dataset::read(&args.data)?;
    let setting = Setting::new(args, &data).map_err(Failure::Usage)?;
    let figure = Figure::new(args, &data).map_err(Failure::Usage)?;
    outputs::check(
        &[("--report", args.report.as_deref()), ("--png", args.png.as_deref())],
        &[("--csv", args.csv.as_deref())],
    )?;
    if !args.json {
        outln!("{}\n", paragraph(&setting.introduction(&data)))?;
    }
    let rows = measure(&setting.study);
    if let Some(path) = &args.csv {
        std::fs::write(path, csv(&rows)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let page = page(args, &data, &setting, &rows, figure.as_ref());
    let report = args.report.as_deref().map(|directory| super::write_page(directory, "gap", &page)).transpose()?;
    super::write_pngs(args.png.as_deref(), "gap", &page)?;
    if args.json {
        outln!("{}", to_json(args, &data, &setting, &rows, figure.as_ref(), report.as_deref()))?;
        return Ok(());
    }
    outln!("{}", setting.narrow_table(&rows).text(width()))?;
    outln!("{}", rows[0].verdict())?;
    if let Some(figure) = &figure {
        outln!("\n{}", figure.summary())?;
    }
    if let Some(path) = report {
        outln!("\nReport: {}", path.display())?;
    }
    Ok(())
}

fn measure(study: &Study) -> Vec<Row> {
    let jobs = study.jobs();
    let progress = Progress::new("optimising", jobs.iter().map(|job| study.units(*job)).sum(), Unit::Of("steps"));
    let done = AtomicUsize::new(0);
    let outcomes = parallel::map(&jobs, |job| {
        let message = || format!("{} of {} policies", done.load(Ordering::Relaxed), jobs.len());
        let outcome = study.run(*job, |units| progress.advance(units, message));
        done.fetch_add(1, Ordering::Relaxed);
        outcome
    });
    progress.finish();
    study.rows(&outcomes)
}

/// What to measure.
struct Setting {
    study: Study,
    rank: usize,
    folds: usize,
    /// Categories without a row, and their number of queries.
    left_out: Vec<(String, usize)>,
}

impl Setting {
    fn new(args: &Args, data: &Dataset) -> anyhow::Result<Self> {
        let (n, models, folds) = (data.len(), data.models.len(), args.folds as usize);
        let rank = args.rank.unwrap_or(16.min(data.dim));
        if models < 2 {
            return Err(anyhow!("{} has only one model: there is nothing to route", args.data.display()));
        }
        if rank > data.dim {
            return Err(anyhow!("--rank {rank} exceeds the dimension {} of the queries: lower the rank", data.dim));
        }
        if n < 10 || n < 2 * folds {
            let least = 10.max(2 * folds);
            return Err(anyhow!("--folds {folds} needs at least {least} queries, but {} has {n}", args.data.display()));
        }
        let whole = Problem::new(data.dim, models, data.queries.clone(), data.expected_rewards.clone());
        let categories = data.categories();
        let (mut groups, mut left_out) = (Vec::new(), Vec::new());
        for (name, queries) in categories.iter().filter(|(_, queries)| queries.len() < n) {
            match queries.len() >= CATEGORY_MIN.max(2 * folds) {
                true => groups.push(Group { name: (*name).to_owned(), problem: whole.pick(queries) }),
                false => left_out.push(((*name).to_owned(), queries.len())),
            }
        }
        groups.insert(0, Group { name: "all".to_owned(), problem: whole });
        Ok(Self { study: Study::new(groups, rank, folds, args.seed), rank, folds, left_out })
    }

    fn introduction(&self, data: &Dataset) -> String {
        format!(
            "{} queries of dimension {}, {} models. Gap to the best model of each query, lower is better:\n\
             in sample, on held-out queries ({} folds), and in sample with rewards shuffled across queries.\n\
             Linear: pi ~ exp(theta_m . q). Quadratic: pi ~ exp(q'W_m q), rank of W_m at most {}.",
            data.len(),
            data.dim,
            data.models.len(),
            self.folds,
            self.rank
        )
    }

    fn table(&self, rows: &[Row]) -> Table {
        let right = [
            "number",
            "constant",
            "linear",
            "quadratic",
            "held out: constant",
            "linear",
            "quadratic",
            "shuffled: linear",
            "quadratic",
        ];
        let line = |row: &Row| {
            let gaps = figures(row).into_iter().map(|(_, gap)| format!("{gap:.4}"));
            [row.name.clone(), row.queries.to_string()].into_iter().chain(gaps).collect()
        };
        Table {
            columns: std::iter::once(Column::left("queries")).chain(right.map(Column::right)).collect(),
            rows: rows.iter().map(line).collect(),
            note: self.note(),
        }
    }

    /// The same with a line per class, which fits a terminal.
    fn narrow_table(&self, rows: &[Row]) -> Table {
        let gap = |gap: f64| format!("{gap:.4}");
        let lines = |row: &Row| {
            let classes = [("constant", &row.constant), ("linear", &row.log_linear), ("quadratic", &row.log_quadratic)];
            let line = |(i, (class, gaps)): (usize, (&str, &Gaps))| {
                let group = if i == 0 { [row.name.clone(), row.queries.to_string()] } else { Default::default() };
                // The best constant model earns the same however rewards are shuffled.
                let shuffled = if i == 0 { "-".to_owned() } else { gap(gaps.shuffled) };
                group.into_iter().chain([class.to_owned(), gap(gaps.in_sample), gap(gaps.held_out), shuffled]).collect()
            };
            classes.into_iter().enumerate().map(line).collect::<Vec<_>>()
        };
        let right = ["in sample", "held out", "shuffled"].map(Column::right);
        let columns = [Column::left("queries"), Column::right("number"), Column::left("class")];
        Table {
            columns: columns.into_iter().chain(right).collect(),
            rows: rows.iter().flat_map(lines).collect(),
            note: self.note(),
        }
    }

    fn note(&self) -> Option<String> {
        const SHOWN: usize = 5;
        let mut names: Vec<String> =
            self.left_out.iter().take(SHOWN).map(|(name, count)| format!("{name} ({count})")).collect();
        if self.left_out.len() > SHOWN {
            names.push(format!("{} more", self.left_out.len() - SHOWN));
        }
        (!names.is_empty()).then(|| format!("categories with too few queries for their own row: {}", names.join(", ")))
    }
}

/// The gaps of a row, by name, in the order of the table.
fn figures(row: &Row) -> [(&'static str, f64); 8] {
    [
        ("constant", row.constant.in_sample),
        ("log_linear", row.log_linear.in_sample),
        ("log_quadratic", row.log_quadratic.in_sample),
        ("held_out_constant", row.constant.held_out),
        ("held_out_log_linear", row.log_linear.held_out),
        ("held_out_log_quadratic", row.log_quadratic.held_out),
        ("shuffled_log_linear", row.log_linear.shuffled),
        ("shuffled_log_quadratic", row.log_quadratic.shuffled),
    ]
}

fn csv(rows: &[Row]) -> String {
    let quoted = |text: &str| match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let line = |row: &Row| {
        let gaps: Vec<String> = figures(row).iter().map(|(_, gap)| gap.to_string()).collect();
        format!("{},{},{}\n", quoted(&row.name), row.queries, gaps.join(","))
    };
    let head = rows.first().map(|row| figures(row).map(|(name, _)| name).join(",")).unwrap_or_default();
    std::iter::once(format!("category,queries,{head}\n")).chain(rows.iter().map(line)).collect()
}

/// Shares of the best constant model's gap that the classes close, and their gains on held-out queries.
fn shares(rows: &[Row]) -> Table {
    let percent = |share: f64| format!("{:.1}%", (1000.0 * share).round() / 10.0 + 0.0);
    let line = |row: &Row, name: &str, gaps: &Gaps| {
        let [in_sample, held_out, shuffled] = row.closed(gaps).map(percent);
        let gain = format!("{:+.4} ± {:.4}", gaps.held_out_gain, gaps.held_out_error);
        vec![row.name.clone(), name.to_owned(), in_sample, held_out, shuffled, gain]
    };
    let lines = |row: &Row| [line(row, "log-linear", &row.log_linear), line(row, "log-quadratic", &row.log_quadratic)];
    let right = ["in sample", "held out", "shuffled", "held-out gain"];
    Table {
        columns: [Column::left("queries"), Column::left("class")].into_iter().chain(right.map(Column::right)).collect(),
        rows: rows.iter().flat_map(lines).collect(),
        note: Some(
            "held-out gain: mean reward minus that of the best constant model, ± standard error over queries"
                .to_owned(),
        ),
    }
}

/// Two models' ranks of the same items.
struct Figure {
    names: [String; 2],
    top: usize,
    items: Vec<Item>,
    /// The query that shows the difference best, with its text.
    example: Option<(usize, String)>,
}

impl Figure {
    /// None if the data set has no candidates.
    fn new(args: &Args, data: &Dataset) -> anyhow::Result<Option<Self>> {
        let asked = pair(&args.models, data)?;
        let Some(candidates) = &data.candidates else {
            return match asked {
                Some(_) => Err(anyhow!(
                    "--models selects the models of the figure, but the data set has no candidates to draw it from"
                )),
                None => Ok(None),
            };
        };
        let ranks = Ranks::new(candidates, data.models.len());
        let top = args.top.unwrap_or_else(|| ranks.default_top());
        let Some(models) = asked.or_else(|| ranks.telling_pair(top)) else { return Ok(None) };
        let items = ranks.of_pair(models);
        let words = |query: usize| match data.labels.get(query) {
            Some(label) => format!("{} ({})", label.text, label.id),
            None => format!("query {}", query + 1),
        };
        let example = telling_query(&items, top).map(|query| (query, words(query)));
        Ok(Some(Self { names: models.map(|m| data.models[m].to_string()), top, items, example }))
    }

    fn count(&self, found: Found) -> usize {
        self.items.iter().filter(|item| item.good && item.found(self.top) == found).count()
    }

    fn summary(&self) -> String {
        let [first, second] = &self.names;
        format!(
            "Of {} items with the highest label, {} are in the top {} of {first} only, {} of {second} only, {} of both, \
             and {} of neither.",
            self.items.iter().filter(|item| item.good).count(),
            self.count(Found::First),
            self.top,
            self.count(Found::Second),
            self.count(Found::Both),
            self.count(Found::Neither),
        )
    }

    fn scatter<'a>(&self, title: String, items: impl Iterator<Item = &'a Item> + Clone, others: bool) -> Scatter {
        let cloud = |name: String, look: Look, keep: &dyn Fn(&Item) -> bool| Cloud {
            name,
            look,
            points: items.clone().filter(|item| keep(item)).map(|item| item.ranks.map(|r| r as f64).into()).collect(),
        };
        let top = self.top;
        let alone = |found: Found| move |item: &Item| item.good && item.found(top) == found;
        let [first, second] = &self.names;
        let mut clouds = vec![
            cloud(format!("good, found by {first} only"), Look::Bright, &alone(Found::First)),
            cloud(format!("good, found by {second} only"), Look::Bright, &alone(Found::Second)),
            cloud("good, found by both or neither".to_owned(), Look::Grey, &|item| {
                item.good && matches!(item.found(top), Found::Both | Found::Neither)
            }),
        ];
        if others {
            clouds.push(cloud("other items".to_owned(), Look::Faint, &|item| !item.good));
        }
        // Between the last rank that counts as found and the next.
        let limit = top as f64 + 0.5;
        let label = |name: &str| format!("rank by {name}");
        Scatter { title, x_label: label(first), y_label: label(second), clouds, limits: Some((limit, limit)) }
    }

    fn section(&self) -> Section {
        let all = self.scatter("Good items of all queries".to_owned(), self.items.iter(), false);
        let mut body = vec![Block::Chart(all.html())];
        if let Some((query, words)) = &self.example {
            let items = self.items.iter().filter(|item| item.query == *query);
            body.push(Block::Chart(self.scatter(format!("One query: {words}"), items, true).html()));
        }
        Section {
            heading: format!("{} against {}", self.names[0], self.names[1]),
            text: Some(format!(
                "Ranks of the same items by two models; 1 is best. Found: in the top {} of a model (dashed lines). Good: has \
                 the highest label. Larger dots stand for more items. {}",
                self.top,
                self.summary()
            )),
            body,
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "models": self.names,
            "top": self.top,
            "good": self.items.iter().filter(|item| item.good).count(),
            "found_by_first_alone": self.count(Found::First),
            "found_by_second_alone": self.count(Found::Second),
            "found_by_both": self.count(Found::Both),
            "found_by_neither": self.count(Found::Neither),
        })
    }
}

/// The two requested models.
fn pair(asked: &[String], data: &Dataset) -> anyhow::Result<Option<[usize; 2]>> {
    let all = || data.models.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let find = |text: &String| {
        let named = data.models.iter().position(|name| name.as_str() == text);
        let numbered = || text.parse::<usize>().ok()?.checked_sub(1).filter(|&m| m < data.models.len());
        named.or_else(numbered).ok_or_else(|| anyhow!("--models: no model {text:?} in the data set; it has {}", all()))
    };
    match asked {
        [] => Ok(None),
        [first, second] => match (find(first)?, find(second)?) {
            (first, second) if first == second => Err(anyhow!("--models: name two different models out of {}", all())),
            (first, second) => Ok(Some([first, second])),
        },
        _ => Err(anyhow!("--models: name exactly two models out of {}", all())),
    }
}

fn page(args: &Args, data: &Dataset, setting: &Setting, rows: &[Row], figure: Option<&Figure>) -> Page {
    let facts = [
        ("queries", data.len().to_string()),
        ("dimension", data.dim.to_string()),
        ("models", data.models.len().to_string()),
        ("rank", setting.rank.to_string()),
        ("folds", setting.folds.to_string()),
        ("seed", args.seed.to_string()),
    ];
    let mut sections = vec![
        Section {
            heading: "Gap of each class".to_owned(),
            text: Some(format!(
                "Reward that the best policy of each class loses against always using the best model of each query; lower \
                 is better. Constant: always the same model. Linear: pi ~ exp(theta_m . q). Quadratic: pi ~ exp(q'W_m q), \
                 rank of W_m at most {}. The first three columns are in sample: optimised and measured on the same queries. \
                 Held out: optimised on some queries and measured on others, by cross-validation with {} folds. Shuffled: \
                 in sample with the rewards shuffled across queries, so that there is nothing to learn.",
                setting.rank, setting.folds
            )),
            body: vec![Block::Table(setting.table(rows))],
        },
        Section {
            heading: "Share of the gap closed".to_owned(),
            text: Some("0% is the best constant model, 100% is the best model of each query.".to_owned()),
            body: vec![Block::Table(shares(rows))],
        },
    ];
    sections.extend(figure.map(Figure::section));
    Page {
        title: "Is there anything to route?".to_owned(),
        lead: rows[0].verdict(),
        facts: facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        sections,
    }
}

fn to_json(
    args: &Args,
    data: &Dataset,
    setting: &Setting,
    rows: &[Row],
    figure: Option<&Figure>,
    report: Option<&Path>,
) -> Value {
    let row = |row: &Row| {
        json!({
            "category": row.name,
            "queries": row.queries,
            "constant": row.constant,
            "log_linear": row.log_linear,
            "log_quadratic": row.log_quadratic,
            "verdict": row.verdict(),
        })
    };
    json!({
        "queries": data.len(),
        "dim": data.dim,
        "models": data.models,
        "rank": setting.rank,
        "folds": setting.folds,
        "seed": args.seed,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
        "categories_left_out": setting.left_out.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        "verdict": rows[0].verdict(),
        "figure": figure.map(Figure::to_json),
        "report": report,
    })
}
