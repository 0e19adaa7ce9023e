//! `pointsman snapshots`: inspects and changes a store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde_json::{Value, json};

use super::output::{outln, width};
use super::params::utc;
use super::progress::{Progress, Unit};
use super::{Failure, summary};
use crate::config::{Config, Settings};
use crate::engine::Engine;
use crate::event::Name;
use crate::merge::Position;
use crate::report::{Column, Table};
use crate::snapshot::{LaneHead, next_epoch};
use crate::store::archive::{DamagedSnapshot, Snapshot};
use crate::store::{self, DirArchive, Witness};
use crate::transport::kafka::positions;
use crate::wire::export;

/// Inspect and change a store: list, show, verify, export, import, drop, roll back
///
/// A store keeps several generations of snapshots (snapshot.keep). Each generation is everything that a learner needs to
/// resume. Stop the daemon first: only one process can open a store. The commands do not need the configuration that the
/// store was created with.
///
/// Exit codes: 0 success, 1 failed (also: `verify` found damage), 2 invalid usage.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory of the store [default: store.dir]
    #[arg(long, global = true, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Lane, if the store has several (transport.kafka.lanes = "partition")
    #[arg(long, global = true, value_name = "NAME")]
    lane: Option<String>,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  pointsman snapshots list --store data/store
  pointsman snapshots show --store data/store --json | jq .state_digest
  pointsman snapshots export --store data/store --space shop --out shop.safetensors
  pointsman snapshots import --store data/store --start-at history/positions.json
  pointsman snapshots drop --store data/store --space shop
  pointsman snapshots rollback --store data/store --to 41";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the generations, newest last
    List {
        /// Write the table to this file, as CSV
        #[arg(long, value_name = "FILE")]
        csv: Option<PathBuf>,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Show one generation: counts, versions, state digest
    Show {
        /// Generation to show [default: the newest undamaged one]
        #[arg(long, value_name = "N")]
        generation: Option<u64>,
        /// Write the table of counts to this file, as CSV
        #[arg(long, value_name = "FILE")]
        csv: Option<PathBuf>,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Read all generations completely; exit code 1 if one is damaged
    Verify,
    /// Export the eigendecompositions of a space as safetensors, in f64
    ///
    /// The tensors are `<model>/eigenvalues` of shape (k) and `<model>/eigenvectors` of shape (dim, k).
    Export {
        /// Space to export
        #[arg(long, default_value = "default")]
        space: String,
        /// Generation to export [default: the newest undamaged one]
        #[arg(long, value_name = "N")]
        generation: Option<u64>,
        /// Output file (safetensors)
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Import exported eigendecompositions into a space, or set the positions to resume from
    ///
    /// --from replaces the parameters of a space and begins a new epoch. Models are matched by name; those missing in the file
    /// keep their parameters. Pending joins, counts and positions do not change.
    ///
    /// --start-at makes `learn` resume in the Kafka topics at the positions in a file written by `dump`, so that a store that has
    /// learned from a dump continues where the dump ends. Nothing else changes. Partitions missing in the file are read from
    /// their oldest message.
    ///
    /// If the store does not exist it is created, with the configured learner.
    Import {
        /// Space to import into
        #[arg(long, default_value = "default")]
        space: String,
        /// File written by `snapshots export`
        #[arg(long, value_name = "FILE", required_unless_present = "start_at")]
        from: Option<PathBuf>,
        /// File positions.json written by `dump`
        #[arg(long, value_name = "FILE")]
        start_at: Option<PathBuf>,
    },
    /// Delete spaces with everything they have learned; begins a new epoch
    ///
    /// Their pending joins are counted as evicted. Routers keep the published parameters: to remove these, delete the file
    /// params/SPACE.safetensors, or write a tombstone for the key to the parameters topic, and restart the routers. A later
    /// query of the space creates the space again.
    Drop {
        /// Space to delete; can be repeated
        #[arg(long, required = true, num_args = 1.., value_name = "NAME")]
        space: Vec<String>,
    },
    /// Roll back to an older generation permanently; begins a new epoch
    ///
    /// Positions roll back too: later events are read and learned again.
    Rollback {
        /// Generation to roll back to
        #[arg(long, value_name = "N")]
        to: u64,
    },
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let dir = args.store.as_deref().unwrap_or(&config.store.dir);
    let place = Place { dir, lane: args.lane.as_deref() };
    match &args.command {
        Command::List { csv, json } => list(place, csv.as_deref(), *json)?,
        Command::Show { generation, csv, json } => show(place, *generation, csv.as_deref(), *json)?,
        Command::Verify => verify(place)?,
        Command::Export { space, generation, out } => export(place, &name(space)?, *generation, out)?,
        Command::Import { space, from, start_at } => {
            import(place, config, name(space)?, from.as_deref(), start_at.as_deref())?;
        }
        Command::Drop { space } => {
            let spaces = space.iter().map(|space| name(space)).collect::<Result<Vec<Name>, Failure>>()?;
            drop_spaces(place, &spaces)?;
        }
        Command::Rollback { to } => rollback(place, *to)?,
    }
    Ok(())
}

/// A store and the requested lane.
#[derive(Clone, Copy)]
struct Place<'a> {
    dir: &'a Path,
    lane: Option<&'a str>,
}

impl Place<'_> {
    /// The requested lane, or the only one; `None` if the store is empty.
    fn choose(&self, archive: &DirArchive) -> anyhow::Result<Option<String>> {
        let lanes = archive.lanes()?;
        match (self.lane, &lanes[..]) {
            (Some(lane), _) if lanes.iter().any(|known| known == lane) => Ok(Some(lane.to_owned())),
            (Some(lane), _) => Err(anyhow!("no lane {lane} in the store: it has {}", lanes.join(", "))),
            (None, []) => Ok(None),
            (None, [lane]) => Ok(Some(lane.clone())),
            (None, _) => {
                Err(anyhow!("the store has several lanes: choose one with --lane, out of {}", lanes.join(", ")))
            }
        }
    }
}

/// A snapshot restored into an engine.
struct Opened {
    lane: String,
    generation: u64,
    head: LaneHead,
    settings: Settings,
    engine: Engine,
}

impl Opened {
    /// Calls `tell` for every restored record.
    fn new(lane: &str, snapshot: Snapshot, tell: &mut dyn FnMut()) -> anyhow::Result<Self> {
        let head = LaneHead::open(&snapshot.head)?;
        let settings: Settings =
            serde_json::from_str(&head.configuration).context("cannot read the configuration in the snapshot")?;
        let records = snapshot.records.into_iter().inspect(|_| tell());
        let engine = Engine::restore(settings.clone(), head.engine.clone(), records)?;
        Ok(Self { lane: lane.to_owned(), generation: snapshot.generation, head, settings, engine })
    }

    fn json(&self) -> Value {
        let mut value = summary::json(std::slice::from_ref(&self.engine), self.head.merge.out_of_order);
        let more = json!({
            "lane": self.lane,
            "generation": self.generation,
            "epoch": self.head.epoch,
            "created_ms": self.head.created_ms,
            "publications": self.head.publications,
            "positions": self.head.merge.to_record().positions,
        });
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
            value.extend(more);
        }
        value
    }
}

/// Commands that only read must not delete any generation.
const KEEP_ALL: usize = usize::MAX;

fn open(place: Place<'_>) -> anyhow::Result<(DirArchive, String)> {
    let archive = store::open_existing(place.dir, KEEP_ALL)?;
    let lane = place.choose(&archive)?;
    let lane = lane.ok_or_else(|| {
        anyhow!(
            "the store {} has no snapshot yet: run `pointsman learn` or `replay` with this store first",
            place.dir.display()
        )
    })?;
    Ok((archive, lane))
}

/// Reads generations of a lane with progress. Each record counts twice: when it is read and when it is restored.
struct Reading<'a> {
    archive: &'a DirArchive,
    lane: &'a str,
    progress: Progress,
}

impl<'a> Reading<'a> {
    fn new(archive: &'a DirArchive, lane: &'a str, generations: &[u64]) -> anyhow::Result<Self> {
        let mut records = 0;
        for &generation in generations {
            records += archive.records(lane, generation)?;
        }
        Ok(Self { archive, lane, progress: Progress::of_errand("reading", 2 * records, Unit::Of("steps")) })
    }

    fn read(&self, generation: u64) -> anyhow::Result<Opened> {
        let message = || format!("generation {generation}");
        let records = self.archive.records(self.lane, generation)?;
        let mut left = records;
        let mut step = || {
            // Older versions of a record are not further steps.
            if left > 0 {
                left -= 1;
                self.progress.advance(1, message);
            }
        };
        let snapshot = self.archive.read_telling(self.lane, generation, &mut step);
        // A damaged generation has fewer records, but its work is done.
        self.progress.advance(left, message);
        left = records;
        let mut step = || {
            left -= 1;
            self.progress.advance(1, message);
        };
        let opened = snapshot?.map_err(anyhow::Error::from);
        let opened = opened.and_then(|snapshot| Opened::new(self.lane, snapshot, &mut step));
        self.progress.advance(left, message);
        opened
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.progress.finish();
    }
}

/// Reads one generation, or the newest undamaged one.
fn read(archive: &DirArchive, lane: &str, generation: Option<u64>) -> anyhow::Result<Opened> {
    let generations = archive.generations(lane)?;
    match generation {
        Some(generation) if !generations.contains(&generation) => {
            let there: Vec<String> = generations.iter().map(ToString::to_string).collect();
            Err(anyhow!("no generation {generation} in the store: it has {}", there.join(", ")))
        }
        Some(generation) => Reading::new(archive, lane, &[generation])?.read(generation),
        None => newest(archive, lane, &generations),
    }
}

fn newest(archive: &DirArchive, lane: &str, generations: &[u64]) -> anyhow::Result<Opened> {
    for &generation in generations.iter().rev() {
        let opened = Reading::new(archive, lane, &[generation])?.read(generation);
        match opened {
            Err(error) if error.is::<DamagedSnapshot>() => {
                tracing::error!(problem = %error, "snapshot is damaged; trying the previous generation");
            }
            opened => return opened,
        }
    }
    Err(anyhow!(
        "all generations are damaged: move the store away and rebuild it from the logs, with `pointsman replay --keep-open --store DIR`"
    ))
}

fn list(place: Place<'_>, csv: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let (archive, lane) = open(place)?;
    let generations = archive.generations(&lane)?;
    let reading = Reading::new(&archive, &lane, &generations)?;
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for generation in generations {
        let (row, value) = listed(generation, reading.read(generation));
        rows.push(row);
        values.push(value);
    }
    drop(reading);
    let bytes = {
        use crate::store::SnapshotStore;
        archive.store().bytes_on_disk()?
    };
    let right = ["generation", "made", "epoch", "spaces", "applied", "pending"].map(Column::right);
    let columns = right.into_iter().chain([Column::left("state")]).collect();
    let table = Table { columns, rows, note: Some(format!("{bytes} bytes on disk, lane {lane}")) };
    super::write_csv(csv, &[&table])?;
    if json {
        outln!("{}", json!({"lane": lane, "bytes_on_disk": bytes, "generations": values}))?;
    } else {
        outln!("{}", table.text(width()))?;
    }
    Ok(())
}

/// A generation as a row of the table, and as JSON.
fn listed(generation: u64, opened: anyhow::Result<Opened>) -> (Vec<String>, Value) {
    match opened {
        Ok(opened) => {
            let (counts, head) = (opened.engine.counts(), &opened.head);
            let pending = counts.join.queries.pending;
            let spaces = opened.engine.names().count() as u64;
            let figures = [head.epoch, spaces, counts.applied, pending].map(|figure| figure.to_string());
            let row = [generation.to_string(), utc(head.created_ms)].into_iter().chain(figures);
            let value = json!({
                "generation": generation, "created_ms": head.created_ms, "epoch": head.epoch,
                "applied": counts.applied, "pending": pending, "whole": true,
            });
            (row.chain(["ok".to_owned()]).collect(), value)
        }
        Err(error) => {
            let problem = format!("{error:#}");
            let row = std::iter::once(generation.to_string()).chain(std::iter::repeat_n("-".to_owned(), 5));
            let value = json!({"generation": generation, "whole": false, "problem": problem});
            (row.chain([problem]).collect(), value)
        }
    }
}

fn show(place: Place<'_>, generation: Option<u64>, csv: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let (archive, lane) = open(place)?;
    let opened = read(&archive, &lane, generation)?;
    let table = summary::table(&opened.engine, opened.head.merge.out_of_order);
    super::write_csv(csv, &[&table])?;
    if json {
        outln!("{}", opened.json())?;
        return Ok(());
    }
    outln!("{}", table.text(width()))?;
    outln!("generation {}, epoch {}, created {}", opened.generation, opened.head.epoch, utc(opened.head.created_ms))?;
    for view in opened.engine.spaces() {
        let models: Vec<&str> = view.models.iter().map(Name::as_str).collect();
        outln!(
            "space {}: version {}, mean reward {:.4}, models {}",
            view.name,
            view.version,
            view.mean_reward,
            models.join(", ")
        )?;
    }
    outln!("state digest {}", opened.engine.digest())?;
    Ok(())
}

fn verify(place: Place<'_>) -> anyhow::Result<()> {
    let (archive, lane) = open(place)?;
    let generations = archive.generations(&lane)?;
    let reading = Reading::new(&archive, &lane, &generations)?;
    let mut damaged = 0;
    for &generation in &generations {
        match reading.read(generation) {
            Ok(opened) => {
                let digest = opened.engine.digest();
                reading.progress.print(&format!("generation {generation}: ok, state digest {digest}"))?;
            }
            Err(error) => {
                reading.progress.print(&format!("generation {generation}: {error:#}"))?;
                damaged += 1;
            }
        }
    }
    if damaged > 0 { Err(anyhow!("{damaged} of {} generations are damaged", generations.len())) } else { Ok(()) }
}

fn export(place: Place<'_>, space: &Name, generation: Option<u64>, out: &Path) -> anyhow::Result<()> {
    let (archive, lane) = open(place)?;
    let opened = read(&archive, &lane, generation)?;
    let view = opened.engine.spaces().find(|view| view.name == *space);
    let view = view.ok_or_else(|| anyhow!("no space {space} in the snapshot"))?;
    let spec = opened.settings.space(space);
    let bytes = export::encode(&view, spec.dim, spec.algorithm());
    std::fs::write(out, bytes).with_context(|| format!("cannot write {}", out.display()))?;
    let (version, generation) = (view.version, opened.generation);
    outln!("exported space {space}, version {version}, generation {generation}, to {}", out.display())?;
    Ok(())
}

fn import(
    place: Place<'_>,
    config: &Config,
    space: Name,
    from: Option<&Path>,
    start_at: Option<&Path>,
) -> anyhow::Result<()> {
    let export = from.map(|path| Ok::<_, anyhow::Error>((path, read_export(path)?))).transpose()?;
    let starts = start_at.map(|path| Ok::<_, anyhow::Error>((path, read_positions(path)?))).transpose()?;
    let mut archive = store::open(place.dir, config.store.kind, KEEP_ALL)?;
    let lane = place.choose(&archive)?;
    let (lane, mut head, mut engine) = match lane {
        Some(lane) => {
            let opened = newest_to_change(&mut archive, &lane)?;
            (lane, opened.head, opened.engine)
        }
        None => {
            let settings = config.check()?;
            let configuration = crate::snapshot::fingerprint(&settings);
            let head = LaneHead { configuration, ..LaneHead::default() };
            (store::ONE_LANE.to_owned(), head, Engine::new(settings))
        }
    };
    if let Some((path, export)) = &export {
        engine
            .import(space.clone(), &export.eigens, export.dim)
            .with_context(|| format!("cannot import {} into space {space}", path.display()))?;
        head.epoch = next_epoch(head.epoch);
        head.publications.remove(&space);
    }
    if let Some((_, positions)) = &starts {
        if lane != store::ONE_LANE {
            return Err(anyhow!(
                "--start-at requires a store with one lane (transport.kafka.lanes = \"one\"), but this is lane {lane}"
            ));
        }
        head.merge.positions = positions.clone();
    }
    let generation = archive.commit(&lane, &head.seal(), engine.take_changes())?;
    note(place.dir, &lane, generation)?;
    let epoch = head.epoch;
    if let Some((path, _)) = export {
        outln!("imported {} into space {space}: generation {generation}, epoch {epoch}", path.display())?;
    }
    if let Some((path, positions)) = starts {
        let number = positions.len();
        outln!(
            "set {number} partitions to the positions in {}: generation {generation}, epoch {epoch}",
            path.display()
        )?;
    }
    Ok(())
}

fn read_export(path: &Path) -> anyhow::Result<export::Export> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    export::decode(&bytes).with_context(|| format!("cannot read {}", path.display()))
}

fn read_positions(path: &Path) -> anyhow::Result<BTreeMap<String, Position>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let no_positions = || format!("{} is not a positions.json of `pointsman dump`", path.display());
    let offsets: BTreeMap<String, u64> = serde_json::from_slice(&bytes).with_context(no_positions)?;
    if offsets.is_empty() || offsets.keys().any(|name| positions::parse(name).is_none()) {
        return Err(anyhow!(no_positions()));
    }
    Ok(offsets.into_iter().map(|(name, offset)| (name, positions::at(offset))).collect())
}

fn drop_spaces(place: Place<'_>, spaces: &[Name]) -> anyhow::Result<()> {
    let (mut archive, lane) = open(place)?;
    let Opened { mut head, mut engine, .. } = newest_to_change(&mut archive, &lane)?;
    for space in spaces {
        if !engine.drop_space(space) {
            let there: Vec<&str> = engine.names().map(Name::as_str).take(20).collect();
            let there = if there.is_empty() { "no spaces".to_owned() } else { there.join(", ") };
            return Err(anyhow!("no space {space} in lane {lane}: it has {there}"));
        }
        head.publications.remove(space);
    }
    head.epoch = next_epoch(head.epoch);
    let generation = archive.commit(&lane, &head.seal(), engine.take_changes())?;
    note(place.dir, &lane, generation)?;
    let names: Vec<&str> = spaces.iter().map(Name::as_str).collect();
    outln!("dropped {}: generation {generation}, epoch {}", names.join(", "), head.epoch)?;
    Ok(())
}

/// The newest undamaged generation, to continue from: damage must not reach the next one.
fn newest_to_change(archive: &mut DirArchive, lane: &str) -> anyhow::Result<Opened> {
    let opened = read(archive, lane, None)?;
    if archive.generations(lane)?.last() != Some(&opened.generation) {
        archive.rewind(lane, opened.generation)?;
    }
    Ok(opened)
}

fn rollback(place: Place<'_>, to: u64) -> anyhow::Result<()> {
    let (mut archive, lane) = open(place)?;
    let Opened { mut head, .. } = read(&archive, &lane, Some(to))?;
    let newest = archive.newest(&lane)?.0.map(|snapshot| LaneHead::open(&snapshot.head)).transpose()?;
    head.epoch = next_epoch(newest.map_or(head.epoch, |newest| newest.epoch.max(head.epoch)));
    archive.rewind(&lane, to)?;
    let generation = archive.commit(&lane, &head.seal(), Vec::new())?;
    note(place.dir, &lane, generation)?;
    outln!("rolled back to generation {to}: new generation {generation}, epoch {}", head.epoch)?;
    Ok(())
}

/// Records the generation beside the store, so that the learner does not consider discarded generations lost.
fn note(dir: &Path, lane: &str, generation: u64) -> anyhow::Result<()> {
    Witness::new(dir, lane).note(generation).context("cannot record the generation beside the store")
}

fn name(space: &str) -> Result<Name, Failure> {
    Name::try_from(space).map_err(|error| Failure::Usage(error.into()))
}
