//! `pointsman dump`: exports a range of the Kafka topics to log files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rdkafka::message::Message;
use serde_json::{Value, json};

use super::Failure;
use super::output::{out, outln, width};
use super::outputs;
use super::progress::{Progress, Unit};
use crate::config::{Config, Lanes, Settings};
use crate::engine::Side;
use crate::files;
use crate::report::{Column, Table};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::history::{Changed, Mark, Scribe, Span, Stretch, stretches};
use crate::transport::kafka::positions::Place;
use crate::transport::kafka::scan::read_to;
use crate::transport::kafka::topics::check_partitions;

/// Export a range of the Kafka topics queries and rewards to log files, for `replay` or as an archive
///
/// Each partition becomes one file, DIR/queries/TOPIC-PARTITION.jsonl.zst or DIR/rewards/... `replay` learns the same from
/// these files as from the topics. Only committed messages are written. The file positions.json records where the dump
/// ends, for `snapshots import --start-at`.
///
/// Each line is the message value, with three exceptions, which are counted: (1) An event without a time gets its record
/// timestamp, as its last field (events.fields.ts_ms). (2) Newlines between JSON values become spaces. (3) A message that
/// is a dead letter on Kafka for a reason that a file cannot express (empty message, newlines in invalid JSON, a content-type
/// other than JSON, a ts_ms beyond join.future_ms, a space in the wrong partition) is written as a base64 JSON string, which
/// `replay` also turns into a dead letter.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Output directory; must not contain a dump
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Start: a record time (2026-01-31T12:00:00Z, or milliseconds since 1970), or offset:123 in every partition
    /// [default: the oldest message]
    #[arg(long, value_name = "T")]
    since: Option<Mark>,
    /// End, exclusive, in the same format [default: the present end of the topics]
    #[arg(long, value_name = "T")]
    until: Option<Mark>,
    /// Topics to export
    #[arg(long, value_delimiter = ',', default_value = "queries,rewards", value_name = "TOPICS")]
    topics: Vec<Topic>,
    /// Write the table to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman dump --config shop.toml --out january \\
      --since 2026-01-01T00:00:00Z --until 2026-02-01T00:00:00Z
  pointsman replay --config shop.toml \\
      --queries january/queries/*.zst --rewards january/rewards/*.zst

To learn from history first and then continue live from where it ended (requires transport.kafka.lanes = \"one\"):
  pointsman dump --config shop.toml --out history
  pointsman replay --config shop.toml --store data/store --keep-open \\
      --queries history/queries/*.zst --rewards history/rewards/*.zst
  pointsman snapshots import --store data/store --start-at history/positions.json
  pointsman learn --config shop.toml --set store.dir=data/store";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Topic {
    Queries,
    Rewards,
}

/// Records where a dump ends. Written last.
const POSITIONS: &str = "positions.json";

/// A partition that was written.
struct Written {
    file: PathBuf,
    messages: u64,
    start: u64,
    end: u64,
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let mut topics = args.topics.clone();
    topics.sort_unstable();
    topics.dedup();
    if let Some(there) = [POSITIONS, "queries", "rewards"].iter().map(|name| args.out.join(name)).find(|p| p.exists()) {
        let problem = "it belongs to another dump, maybe an incomplete one: remove it, or choose another --out";
        return Err(Failure::Usage(anyhow!("{} already exists: {problem}", there.display())));
    }
    outputs::check(&[("--out", Some(&args.out))], &[("--csv", args.csv.as_deref())])?;
    let (written, changed) = dump(args, &topics, config, &settings)?;
    let table = table(&written, changed);
    super::write_csv(args.csv.as_deref(), &[&table])?;
    if args.json {
        outln!("{}", as_json(&written, changed))?;
    } else {
        out!("{}", table.text(width()))?;
    }
    Ok(())
}

fn dump(
    args: &Args,
    topics: &[Topic],
    config: &Config,
    settings: &Settings,
) -> anyhow::Result<(Vec<Written>, Changed)> {
    let cluster = Cluster::new(&config.transport.kafka)?;
    cluster.reach()?;
    let sides: Vec<Side> = topics.iter().map(|topic| topic.side()).collect();
    let stretches = stretches(&cluster, Span { since: args.since, until: args.until }, &sides)?;
    let progress = Progress::new("dumping", stretches.iter().map(Stretch::offsets).sum(), Unit::Of("messages"));
    let by_space = config.transport.kafka.lanes == Lanes::Partition;
    let mut scribe = Scribe::new(settings, by_space.then(|| check_partitions(&cluster)).transpose()?.map(|n| n.0));
    let mut written = Vec::new();
    for topic in topics {
        let its: Vec<Stretch> = stretches.iter().filter(|s| s.place.side == topic.side()).cloned().collect();
        written.extend(dump_topic(&cluster, &args.out.join(topic.directory()), &its, &mut scribe, &progress)?);
    }
    progress.finish();
    let positions: BTreeMap<&str, u64> = stretches.iter().map(|s| (s.place.name.as_str(), s.end)).collect();
    write_positions(&args.out, &positions)?;
    Ok((written, scribe.changed))
}

/// A file that is being written.
struct Log {
    lines: zstd::Encoder<'static, BufWriter<File>>,
    written: Written,
    /// Offsets that are done.
    reached: u64,
}

fn dump_topic(
    cluster: &Cluster,
    directory: &Path,
    stretches: &[Stretch],
    scribe: &mut Scribe,
    progress: &Progress,
) -> anyhow::Result<Vec<Written>> {
    let Some(Place { side, topic, .. }) = stretches.first().map(|stretch| &stretch.place) else {
        return Ok(Vec::new());
    };
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let mut logs = BTreeMap::new();
    for stretch in stretches {
        logs.insert(stretch.place.partition, Log::new(directory, stretch)?);
    }
    let mut messages = 0_u64;
    let error = read_to(cluster, topic, stretches.iter().map(Stretch::range).collect(), |offset, message| {
        let Some(log) = logs.get_mut(&message.partition()) else { return ControlFlow::Continue(()) };
        if let Err(error) = log.add(&scribe.line_of(*side, message)) {
            return ControlFlow::Break(error);
        }
        messages += 1;
        let so_far = || format!("{messages} messages");
        progress.advance((offset + 1).saturating_sub(log.reached), so_far);
        log.reached = offset + 1;
        ControlFlow::Continue(())
    })?;
    error.map_or(Ok(()), Err)?;
    logs.into_values().map(Log::finish).collect()
}

impl Log {
    fn new(directory: &Path, stretch: &Stretch) -> anyhow::Result<Self> {
        let place = &stretch.place;
        let file = directory.join(format!("{}-{}.jsonl.zst", place.topic, place.partition));
        let make = || zstd::Encoder::new(BufWriter::new(File::create_new(&file)?), zstd::DEFAULT_COMPRESSION_LEVEL);
        let lines = make().with_context(|| format!("cannot write {}", file.display()))?;
        let start = place.position.floor;
        Ok(Self { lines, written: Written { file, messages: 0, start, end: stretch.end }, reached: start })
    }

    fn add(&mut self, line: &[u8]) -> anyhow::Result<()> {
        let added = self.lines.write_all(line).and_then(|()| self.lines.write_all(b"\n"));
        added.with_context(|| format!("cannot write {}", self.written.file.display()))?;
        self.written.messages += 1;
        Ok(())
    }

    fn finish(self) -> anyhow::Result<Written> {
        let Self { lines, written, .. } = self;
        let end = || lines.finish()?.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all();
        end().with_context(|| format!("cannot write {}", written.file.display()))?;
        Ok(written)
    }
}

/// Marks the dump as complete.
fn write_positions(out: &Path, positions: &BTreeMap<&str, u64>) -> anyhow::Result<()> {
    let path = out.join(POSITIONS);
    let text = format!("{:#}\n", json!(positions));
    files::replace(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}

impl Topic {
    fn side(self) -> Side {
        match self {
            Self::Queries => Side::Query,
            Self::Rewards => Side::Reward,
        }
    }

    fn directory(self) -> &'static str {
        match self {
            Self::Queries => "queries",
            Self::Rewards => "rewards",
        }
    }
}

fn as_json(written: &[Written], changed: Changed) -> Value {
    let file = |w: &Written| json!({"file": w.file, "messages": w.messages, "since": w.start, "until": w.end});
    json!({
        "messages": written.iter().map(|w| w.messages).sum::<u64>(),
        "changed": changed,
        "files": written.iter().map(file).collect::<Vec<_>>(),
    })
}

fn table(written: &[Written], changed: Changed) -> Table {
    let row = |w: &Written| {
        vec![w.file.display().to_string(), w.messages.to_string(), w.start.to_string(), w.end.to_string()]
    };
    let columns = ["messages", "from offset", "to before"].map(Column::right);
    let Changed { timed, joined, wrapped } = changed;
    Table {
        columns: [Column::left("file")].into_iter().chain(columns).collect(),
        rows: written.iter().map(row).collect(),
        note: Some(format!(
            "{} messages; {timed} got their record timestamp, {joined} had newlines replaced, {wrapped} were written as \
             base64 strings (dead letters)",
            written.iter().map(|w| w.messages).sum::<u64>()
        )),
    }
}
