//! `pointsman replay`: learns from historical logs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::Failure;
use super::logs::LogFiles;
use super::output::{outln, width};
use super::outputs;
use super::progress::{Progress, Unit};
use super::rejected::{self, FirstEvents};
use super::{summary, warned};
use crate::config::{Config, Lanes, Settings, StoreConfig};
use crate::engine::{Applied, Engine, Side, SpaceView};
use crate::event::Name;
use crate::files;
use crate::merge::MergeState;
use crate::report::{Block, Lines, Page, Section, Series, Spectrum, StackedShares};
use crate::runner::{Keeper, Lane, Places, Retry, Stepped, place_of};
use crate::state::LocalLane;
use crate::store::{self, Access, DirStore, ONE_LANE, Shared};
use crate::telemetry::Reasons;
use crate::transport::append::Appender;
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::consumer::{Ending, Membership, Partition, ReadOptions, Reader};
use crate::transport::kafka::history::{Mark, Span, Stretch, ends, stretches};
use crate::transport::kafka::homes::Spread;
use crate::transport::kafka::positions;
use crate::transport::params::{Files, ParamsDir};
use crate::transport::{self, Bell, Log};
use crate::wire::events::Parser;

/// Learn from historical logs, joined and applied in event-time order
///
/// Reads JSON lines, CSV and Parquet files, merged by event time; without files those of section logs of the configuration,
/// which `pointsman init` writes. The same logs and configuration give the same state, however the logs are split into files;
/// each file must be in order to within join.reorder_ms. With --from-kafka it reads the Kafka topics of queries and rewards
/// (transport.kafka), up to their present end or --until.
///
/// At the end it closes all join windows and applies a partial batch, unless --keep-open is given. It prints what happened to
/// every event, and for each space whether routing pays.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    files: LogFiles,
    /// Read the Kafka topics of queries and rewards instead of files; commits no offsets
    #[arg(long, conflicts_with_all = ["queries", "rewards", "examples"])]
    from_kafka: bool,
    /// Kafka: start at this record time (2026-01-31T12:00:00Z, or milliseconds since 1970), or at offset:123 in every
    /// partition [default: the position in the store, otherwise the oldest message]
    #[arg(long, value_name = "T", conflicts_with_all = ["queries", "rewards", "examples"])]
    since: Option<Mark>,
    /// Kafka: stop before this time or offset, in the same format [default: the present end of the topics]
    #[arg(long, value_name = "T", conflicts_with_all = ["queries", "rewards", "examples"])]
    until: Option<Mark>,
    /// Keep snapshots in this store and resume from them: repeat the command to resume an interrupted replay, or run `learn`
    /// to continue after a replay with --keep-open
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Write the routing parameters of every space to this directory, as SPACE.safetensors; created when needed
    #[arg(long, value_name = "DIR")]
    params: Option<PathBuf>,
    /// Leave join windows and a partial batch open at the end, to continue later
    #[arg(long)]
    keep_open: bool,
    /// Append rejected events to this file, with the reason; created when needed
    #[arg(long, value_name = "FILE", default_value = DEAD_LETTERS)]
    dead_letters: PathBuf,
    /// Write an HTML report to this directory
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

/// Where rejected events are recorded by default.
const DEAD_LETTERS: &str = "pointsman-dead-letters.jsonl";

const EXAMPLES: &str = "Examples:
  pointsman replay --config shop.toml --queries logs/q-*.zst --rewards logs/r-*.zst --report out
  pointsman replay --config shop.toml --examples searches.parquet --params params
  pointsman replay --config shop.toml --from-kafka --since 2026-01-01T00:00:00Z --report out

To learn from the whole topics first and then continue live:
  pointsman replay --config shop.toml --from-kafka --store data/store --keep-open
  pointsman learn --config shop.toml --set store.dir=data/store

Exit codes: 0 success, 1 failed while running (also: all queries or all rewards were rejected), 2 invalid usage or
configuration.";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    check_outputs(args)?;
    let outcome = replay(args, config, &settings)?;
    let page = page(&outcome);
    let report = args.report.as_deref().map(|directory| super::write_page(directory, "replay", &page)).transpose()?;
    super::write_pngs(args.png.as_deref(), "replay", &page)?;
    let table = summary::table(&outcome.engine, outcome.out_of_order);
    super::write_csv(args.csv.as_deref(), &[&table])?;
    if args.json {
        outln!("{}", summary::json(std::slice::from_ref(&outcome.engine), outcome.out_of_order))?;
    } else {
        outln!("{}", table.text(width()))?;
        for line in warned::lines(&warned::of([&outcome.engine])) {
            outln!("{line}")?;
        }
        for view in outcome.engine.spaces().take(SPACES_SHOWN) {
            for line in summary::space_verdicts(&view) {
                outln!("space {}: {line}", view.name)?;
            }
        }
        outln!("state digest {}", outcome.engine.digest())?;
        if let Some(path) = report {
            outln!("Report with rewards, traffic and spectra: {}", path.display())?;
        }
    }
    rejected::conclude(&outcome.reasons, &outcome.engine.counts(), Some(&args.dead_letters))
}

fn check_outputs(args: &Args) -> anyhow::Result<()> {
    // The default file is only created if there are dead letters.
    let letters = Some(args.dead_letters.as_path()).filter(|path| *path != Path::new(DEAD_LETTERS));
    let directories = [
        ("--report", args.report.as_deref()),
        ("--png", args.png.as_deref()),
        ("--params", args.params.as_deref()),
        ("--dead-letters", letters.filter(|path| !path.exists()).map(files::parent)),
    ];
    let files = [("--csv", args.csv.as_deref()), ("--dead-letters", letters.filter(|path| path.exists()))];
    outputs::check(&directories, &files)
}

struct Outcome {
    engine: Engine,
    reasons: Reasons,
    out_of_order: u64,
    trends: BTreeMap<Name, Trend>,
}

/// Where a replay stores its state and output.
type StorePlaces = Places<Shared<DirStore>>;

/// The lane of the store; a damaged store is an error.
fn open_lane(store: &StoreConfig, config: &Config) -> anyhow::Result<LocalLane> {
    let opened = store::open(&store.dir, Access::Create(store.kind))?;
    Ok(LocalLane::new(Shared::new(opened), ONE_LANE, (&config.snapshot).into()).strict())
}

fn replay(args: &Args, config: &Config, settings: &Settings) -> Result<Outcome, Failure> {
    let files = if args.from_kafka { LogFiles::default() } else { args.files.or_configured(config)? };
    let store = args.store.clone().map(|dir| StoreConfig { dir, ..config.store.clone() });
    let params = args.params.as_deref().map(ParamsDir::new);
    let places = Places {
        store: store.map(|store| open_lane(&store, config)).transpose()?,
        audit: config.audit.path().map(|path| Box::new(Appender::new(&path)) as Box<dyn transport::Lines>),
        outlet: Box::new(Files { dead_letters: Appender::new(&args.dead_letters), params: params.clone() }),
        published: params.map_or_else(Vec::new, |params| params.published()),
        facts: Arc::default(),
        retry: Retry::never(),
    };
    if args.from_kafka {
        Ok(replay_topics(args, config, settings, places)?)
    } else {
        Ok(replay_files(args, &files, config, settings, places)?)
    }
}

fn replay_files(
    args: &Args,
    files: &LogFiles,
    config: &Config,
    settings: &Settings,
    places: StorePlaces,
) -> anyhow::Result<Outcome> {
    let bytes_read = Arc::new(AtomicU64::new(0));
    let (mut lane, state) = Lane::open(settings, &config.snapshot, places, Keeper::start)?;
    let total = files.add_to(&mut lane.merge, settings, &state, &bytes_read)?;
    lane.begin(state)?;
    // Complete files never have to be waited for.
    drive(args, lane, (total, Unit::Bytes), |_| bytes_read.load(Ordering::Relaxed), || ())
}

fn replay_topics(args: &Args, config: &Config, settings: &Settings, places: StorePlaces) -> anyhow::Result<Outcome> {
    let kafka = &config.transport.kafka;
    if args.store.is_some() && kafka.lanes == Lanes::Partition {
        return Err(anyhow!("--from-kafka --store requires transport.kafka.lanes = \"one\": the store holds one lane"));
    }
    let cluster = Cluster::new(kafka)?;
    cluster.reach()?;
    let (mut lane, mut state) = Lane::<Partition>::open(settings, &config.snapshot, places, Keeper::start)?;
    let stretches = resolve(args, &cluster, &state)?;
    state.positions = stretches.iter().map(|s| (s.place.name.clone(), s.place.position.clone())).collect();
    lane.begin(state)?;
    let places: Vec<_> = stretches.iter().map(|stretch| stretch.place.clone()).collect();
    let parser = Arc::new(Parser::new(settings));
    let ending = |i: usize| Ending::Until(stretches.get(i).map_or(0, |stretch| stretch.end));
    let number = places.iter().filter(|place| place.side == Side::Query).count();
    let spread = (kafka.lanes == Lanes::Partition).then(|| Spread::new(settings, number));
    let bell = Arc::new(Bell::default());
    let options = ReadOptions { parser, spread, accept_gap: false, bell: bell.clone(), facts: Arc::default() };
    let (_reader, logs) = Reader::start(&cluster, options, &places, &Membership::Alone, ending)?;
    for (place, mut log) in logs {
        // As with files, so that a replay of a dump reads in the same order.
        let is_new = place.position == positions::at(place.position.floor);
        let first_ms = if is_new { log.first_ms()? } else { None };
        lane.merge.add(place.name, log, Some(place.position), first_ms);
    }
    let total = stretches.iter().map(Stretch::offsets).sum();
    let mut rings = 0;
    let wait = || rings = bell.wait(rings, Duration::from_millis(20));
    drive(args, lane, (total, Unit::Of("messages")), |events| events, wait)
}

/// The ranges of the topics to read: from the positions in the store, if it has any.
fn resolve(args: &Args, cluster: &Cluster, state: &MergeState) -> anyhow::Result<Vec<Stretch>> {
    if state.positions.is_empty() {
        let span = Span { since: args.since, until: args.until };
        return Ok(stretches(cluster, span, &[Side::Query, Side::Reward])?);
    }
    if args.since.is_some() {
        return Err(anyhow!(
            "--since conflicts with the positions in the store: omit --since to resume, or use another --store"
        ));
    }
    let (places, _) = positions::resolve(cluster, state, None, false)?;
    Ok(ends(cluster, args.until, places)?)
}

/// Processes all events, then finishes; `done` maps a number of events to progress out of `total`.
fn drive<S: Log>(
    args: &Args,
    mut lane: Lane<S>,
    (total, unit): (u64, Unit),
    done: impl Fn(u64) -> u64,
    mut wait: impl FnMut(),
) -> anyhow::Result<Outcome> {
    let mut trends = BTreeMap::new();
    let progress = Progress::new("replaying", total, unit);
    let start = Instant::now();
    let speed = |events: u64| format!("{events} events, {:.0}/s", events as f64 / start.elapsed().as_secs_f64());
    let (mut told, mut events, mut first) = (0, 0_u64, FirstEvents::default());
    loop {
        match lane.step()? {
            Stepped::Event { log, rejected, applied } => {
                if first.are_all_rejected(log, rejected) {
                    progress.finish();
                    return Err(rejected::hopeless(&lane.reasons(), &place_of(&lane.merge, log, 0, 0)));
                }
                note(&mut trends, &applied);
            }
            Stepped::Wait => {
                wait();
                continue;
            }
            Stepped::End => break,
        }
        events += 1;
        if events.is_multiple_of(1024) {
            let now = done(events);
            progress.advance(now - told, || speed(events));
            told = now;
        }
    }
    progress.advance(done(events) - told, || speed(events));
    progress.finish();
    if !args.keep_open {
        note(&mut trends, &lane.close_windows());
    }
    lane.finish()?;
    let reasons = lane.reasons();
    Ok(Outcome { out_of_order: lane.merge.out_of_order(), engine: lane.engine, reasons, trends })
}

fn note(trends: &mut BTreeMap<Name, Trend>, applied: &[Applied]) {
    for example in applied {
        let Some(reward) = example.reward else { continue };
        match trends.get_mut(&example.space) {
            Some(trend) => trend.add(example.model, reward),
            None => trends.entry(example.space.clone()).or_default().add(example.model, reward),
        }
    }
}

/// Rewards and traffic of a space over its examples, in at most twice [`TREND_BINS`] bins of equal length.
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
            bin.count(model, reward);
        }
    }

    /// Number of examples at the end of each bin.
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
    fn count(&mut self, model: usize, reward: f64) {
        self.examples += 1;
        self.reward += reward;
        self.traffic.resize(self.traffic.len().max(model + 1), 0);
        self.traffic[model] += 1;
    }

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

/// Limit on the number of spaces shown individually.
const SPACES_SHOWN: usize = 8;

fn page(outcome: &Outcome) -> Page {
    let mut sections = vec![Section {
        heading: "Events".to_owned(),
        text: Some(
            "Every event is counted in exactly one of these rows; \"of these\" are part of the row above.".to_owned(),
        ),
        body: vec![Block::Table(summary::table(&outcome.engine, outcome.out_of_order))],
    }];
    sections.extend(warned::section(&warned::of([&outcome.engine])));
    let spaces: Vec<SpaceView> = outcome.engine.spaces().collect();
    sections.extend(spaces.iter().take(SPACES_SHOWN).map(|view| space_section(view, outcome.trends.get(&view.name))));
    if spaces.len() > SPACES_SHOWN {
        let text = format!("{} more spaces are not shown here; --json lists all of them.", spaces.len() - SPACES_SHOWN);
        sections.push(Section { heading: "More spaces".to_owned(), text: Some(text), body: Vec::new() });
    }
    Page {
        title: "Pointsman replay".to_owned(),
        lead: "What was learned from the logs, in event-time order.".to_owned(),
        facts: vec![("state digest".to_owned(), outcome.engine.digest())],
        sections,
    }
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
    let verdicts: String = summary::space_verdicts(view).iter().map(|line| format!(" {line}")).collect();
    Section {
        heading: format!("Space {}", view.name),
        text: Some(format!("{} examples, mean reward {:.4}.{verdicts}", view.counts.applied, view.mean_reward)),
        body,
    }
}
