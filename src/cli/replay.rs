//! `pointsman replay`: historical logs through the learner.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use base64::Engine as _;
use serde_json::{Value, json};

use super::Failure;
use super::progress::Progress;
use crate::config::{Config, Settings};
use crate::engine::{Applied, Counts, DeadLetter, Engine, Side, SpaceView};
use crate::event::Name;
use crate::merge::Merge;
use crate::report::{Block, Column, Lines, Page, Section, Series, Spectrum, StackedShares, Table};
use crate::transport::file::LogFile;
use crate::wire::events::Parser;

/// Learn from historical logs: queries and rewards, joined in event time and applied in order
///
/// Files are JSON lines, plain, .gz or .zst; however many, they are merged by event time. The same logs and configuration
/// give the same state, whatever the split into files, each in order to within join.reorder_ms. At the end all join windows are closed and a partial batch is
/// applied, unless --keep-open.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Logs of query events
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    queries: Vec<PathBuf>,
    /// Logs of reward events
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    rewards: Vec<PathBuf>,
    /// Leave join windows and a partial batch open at the end
    #[arg(long)]
    keep_open: bool,
    /// Where bad events are added, with their reason; made when the first one comes
    #[arg(long, value_name = "FILE", default_value = "pointsman-dead-letters.jsonl")]
    dead_letters: PathBuf,
    /// Directory for an HTML report
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Example:
  pointsman replay --config shop.toml --queries logs/queries-*.jsonl.zst --rewards logs/rewards-*.jsonl.zst --report out";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let outcome = replay(args, settings)?;
    let report = args.report.as_deref().map(|directory| write_report(directory, &outcome)).transpose()?;
    if args.json {
        println!("{}", to_json(&outcome));
    } else {
        println!("{}", counts_table(&outcome).text());
        println!("state digest {}", outcome.engine.digest());
        if let Some(path) = report {
            println!("Report with rewards, traffic and spectra: {}", path.display());
        }
    }
    Ok(())
}

struct Outcome {
    engine: Engine,
    out_of_order: u64,
    trends: BTreeMap<Name, Trend>,
}

fn replay(args: &Args, settings: Settings) -> anyhow::Result<Outcome> {
    let parser = Parser::new(settings.events.clone(), settings.reward, settings.missing_propensities);
    let bytes_read = Arc::new(AtomicU64::new(0));
    let queries = args.queries.iter().map(|path| (path, Side::Query));
    let paths: Vec<(&PathBuf, Side)> = queries.chain(args.rewards.iter().map(|path| (path, Side::Reward))).collect();
    let mut total = 0;
    let mut logs = Vec::new();
    for (i, (path, side)) in paths.iter().enumerate() {
        let cannot = || format!("cannot read {}", path.display());
        total += std::fs::metadata(path).with_context(cannot)?.len();
        logs.push(LogFile::open(path, *side, parser.clone(), i, bytes_read.clone()).with_context(cannot)?);
    }
    let mut merge = Merge::new(logs, settings.reorder_ms);
    let mut outcome = Outcome { engine: Engine::new(settings), out_of_order: 0, trends: Default::default() };
    let mut dead_letters = DeadLetters { path: &args.dead_letters, file: None };
    let progress = Progress::new("replaying", total);
    let start = Instant::now();
    let speed = |events: u64| format!("{events} events, {:.0}/s", events as f64 / start.elapsed().as_secs_f64());
    let (mut told, mut events) = (0, 0_u64);
    for event in &mut merge {
        let event = event.context("a log cannot be read to its end")?;
        let effects = outcome.engine.step(event.input);
        if let Some(letter) = effects.dead_letter {
            dead_letters.write(&letter, paths[event.log].0, event.line)?;
        }
        note(&mut outcome.trends, &effects.applied);
        events += 1;
        if events.is_multiple_of(1024) {
            let read = bytes_read.load(Ordering::Relaxed);
            progress.advance(read - told, || speed(events));
            told = read;
        }
    }
    progress.advance(bytes_read.load(Ordering::Relaxed) - told, || speed(events));
    progress.finish();
    dead_letters.close()?;
    if !args.keep_open {
        let applied = outcome.engine.finish();
        note(&mut outcome.trends, &applied);
    }
    outcome.out_of_order = merge.out_of_order();
    Ok(outcome)
}

fn note(trends: &mut BTreeMap<Name, Trend>, applied: &[Applied]) {
    for example in applied {
        trends.entry(example.space.clone()).or_default().add(example.model, example.reward);
    }
}

/// Bad events, a JSON object a line.
struct DeadLetters<'a> {
    path: &'a Path,
    file: Option<BufWriter<File>>,
}

impl DeadLetters<'_> {
    fn write(&mut self, letter: &DeadLetter, source: &Path, line: u64) -> anyhow::Result<()> {
        let cannot = || format!("cannot write dead letters to {}", self.path.display());
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let file = File::options().create(true).append(true).open(self.path).with_context(cannot)?;
                self.file.insert(BufWriter::new(file))
            }
        };
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        let record = json!({
            "reason": letter.bad.reason(),
            "detail": letter.bad.to_string(),
            "side": letter.side,
            "source": source,
            "line": line,
            "time_ms": time_ms,
            "bytes": base64::engine::general_purpose::STANDARD.encode(&letter.bytes),
        });
        writeln!(file, "{record}").with_context(cannot)
    }

    fn close(self) -> anyhow::Result<()> {
        let Some(file) = self.file else { return Ok(()) };
        let cannot = || format!("cannot write dead letters to {}", self.path.display());
        let file = file.into_inner().map_err(|e| e.into_error()).with_context(cannot)?;
        file.sync_all().with_context(cannot)
    }
}

fn to_json(outcome: &Outcome) -> Value {
    let counts = outcome.engine.counts();
    let Counts { join, applied, .. } = counts;
    let (q, r) = (join.queries, join.rewards);
    let spaces: Vec<SpaceView> = outcome.engine.spaces().collect();
    let space = |view: &SpaceView| {
        let value = json!({
            "version": view.version,
            "applied": view.counts.applied,
            "mean_reward": view.mean_reward,
            "join": view.counts.join,
        });
        (view.name.to_string(), value)
    };
    json!({
        "queries": counts.queries(),
        "rewards": counts.rewards(),
        "applied": applied,
        "joined": q.joined,
        "expired": q.expired,
        "duplicates": q.duplicate + r.duplicate,
        "late": q.late + r.late,
        "orphaned": r.orphaned,
        "evicted": q.evicted + r.evicted,
        "dead_letters": counts.queries_dead + counts.rewards_dead,
        "pending": q.pending + r.pending,
        "out_of_order": outcome.out_of_order,
        "mean_reward": outcome.engine.mean_reward(),
        "version": spaces.iter().map(|view| view.version).sum::<u64>(),
        "spaces": spaces.iter().map(space).collect::<serde_json::Map<_, _>>(),
        "state_digest": outcome.engine.digest(),
    })
}

fn counts_table(outcome: &Outcome) -> Table {
    let Counts { queries_dead, rewards_dead, join, applied } = outcome.engine.counts();
    let (q, r) = (join.queries, join.rewards);
    let lines: [(&str, Option<u64>, Option<u64>); 9] = [
        ("read", Some(queries_dead + q.read), Some(rewards_dead + r.read)),
        ("joined, used", Some(q.joined), Some(r.used)),
        ("expired", Some(q.expired), None),
        ("duplicate", Some(q.duplicate), Some(r.duplicate)),
        ("late", Some(q.late), Some(r.late)),
        ("orphaned", None, Some(r.orphaned)),
        ("evicted", Some(q.evicted), Some(r.evicted)),
        ("dead letters", Some(queries_dead), Some(rewards_dead)),
        ("pending", Some(q.pending), Some(r.pending)),
    ];
    let shown = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
    Table {
        columns: vec![Column::left("events"), Column::right("queries"), Column::right("rewards")],
        rows: lines.into_iter().map(|(name, q, r)| vec![name.to_owned(), shown(q), shown(r)]).collect(),
        note: Some(format!(
            "{applied} examples applied, mean reward {:.4}, {} events out of order",
            outcome.engine.mean_reward(),
            outcome.out_of_order
        )),
    }
}

/// Rewards and traffic over the examples of a space, in at most twice [`TREND_BINS`] bins of equal length.
#[derive(Default)]
struct Trend {
    bin_examples: u64,
    bins: Vec<Bin>,
}

#[derive(Default, Clone)]
struct Bin {
    examples: u64,
    reward: f64,
    traffic: Vec<u64>,
}

const TREND_BINS: usize = 200;

impl Trend {
    fn add(&mut self, model: usize, reward: f64) {
        self.bin_examples = self.bin_examples.max(1);
        if self.bins.last().is_none_or(|bin| bin.examples >= self.bin_examples) {
            if self.bins.len() >= 2 * TREND_BINS {
                self.bins = self.bins.chunks(2).map(Bin::sum).collect();
                self.bin_examples *= 2;
            }
            self.bins.push(Bin::default());
        }
        if let Some(bin) = self.bins.last_mut() {
            bin.add(&Bin { examples: 1, reward, traffic: one_hot(model) });
        }
    }

    /// Examples until the end of each bin.
    fn ends(&self) -> Vec<f64> {
        self.bins
            .iter()
            .scan(0, |sum, bin| {
                *sum += bin.examples;
                Some(*sum as f64)
            })
            .collect()
    }
}

impl Bin {
    fn add(&mut self, other: &Self) {
        self.examples += other.examples;
        self.reward += other.reward;
        self.traffic.resize(self.traffic.len().max(other.traffic.len()), 0);
        self.traffic.iter_mut().zip(&other.traffic).for_each(|(sum, n)| *sum += n);
    }

    fn sum(bins: &[Self]) -> Self {
        let mut sum = Self::default();
        bins.iter().for_each(|bin| sum.add(bin));
        sum
    }
}

fn one_hot(model: usize) -> Vec<u64> {
    let mut counts = vec![0; model + 1];
    counts[model] = 1;
    counts
}

/// The most spaces that have curves in the report.
const SPACES_SHOWN: usize = 8;

fn write_report(directory: &Path, outcome: &Outcome) -> anyhow::Result<PathBuf> {
    let mut sections = vec![Section {
        heading: "Events".to_owned(),
        text: Some("Every event ends in exactly one of these.".to_owned()),
        body: vec![Block::Table(counts_table(outcome))],
    }];
    let spaces: Vec<SpaceView> = outcome.engine.spaces().collect();
    sections.extend(spaces.iter().take(SPACES_SHOWN).map(|view| space_section(view, outcome.trends.get(&view.name))));
    if spaces.len() > SPACES_SHOWN {
        let text = format!("{} more spaces are not drawn; --json has their figures.", spaces.len() - SPACES_SHOWN);
        sections.push(Section { heading: "More spaces".to_owned(), text: Some(text), body: Vec::new() });
    }
    let page = Page {
        title: "Pointsman replay".to_owned(),
        lead: "What the logs came to, in the order of event time.".to_owned(),
        facts: vec![("state digest".to_owned(), outcome.engine.digest())],
        sections,
    };
    super::write_page(directory, "replay.html", &page)
}

fn space_section(view: &SpaceView, trend: Option<&Trend>) -> Section {
    let names: Vec<String> = view.models.iter().map(ToString::to_string).collect();
    let mut body = Vec::new();
    if let Some(trend) = trend {
        let x = trend.ends();
        let reward = |bin: &Bin| bin.reward / bin.examples.max(1) as f64;
        let rewards = Series {
            name: "reward".to_owned(),
            points: x.iter().copied().zip(trend.bins.iter().map(reward)).collect(),
            dashed: false,
        };
        let lines = Lines {
            title: "Reward".to_owned(),
            x_label: "examples".to_owned(),
            y_label: "mean reward".to_owned(),
            series: vec![rewards],
        };
        let share = |bin: &Bin| {
            let of = |m: usize| bin.traffic.get(m).copied().unwrap_or(0) as f64 / bin.examples.max(1) as f64;
            (0..names.len()).map(of).collect()
        };
        let shares = StackedShares {
            title: "Traffic share of each model".to_owned(),
            x_label: "examples".to_owned(),
            names: names.clone(),
            shares: trend.bins.iter().map(share).collect(),
            x,
        };
        body.extend([Block::Chart(lines.html()), Block::Chart(shares.html())]);
    }
    let values = view.eigens.iter().map(|eigen| eigen.lambda.clone());
    let spectrum =
        Spectrum { title: "Eigenvalues of W at the end".to_owned(), models: names.into_iter().zip(values).collect() };
    body.push(Block::Chart(spectrum.html()));
    Section {
        heading: format!("Space {}", view.name),
        text: Some(format!("{} examples, mean reward {:.4}.", view.counts.applied, view.mean_reward)),
        body,
    }
}
