//! `pointsman snapshots`: what is in a store.

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

/// Look into a store: its snapshots, what they hold, whether they are whole
///
/// A store keeps several generations of snapshots (snapshot.keep); each is all that a learner needs to go on. None of
/// these commands needs the configuration that the store was made with. The daemon must not be running on it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory of the store; without it store.dir
    #[arg(long, global = true, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Which lane, where the store has several (transport.kafka.lanes = "partition")
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
        /// File for the table as comma-separated values
        #[arg(long, value_name = "FILE")]
        csv: Option<PathBuf>,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Show one generation: counts, versions, positions, digest
    Show {
        /// Which one; without it the newest that is whole
        #[arg(long, value_name = "N")]
        generation: Option<u64>,
        /// File for the table of counts as comma-separated values
        #[arg(long, value_name = "FILE")]
        csv: Option<PathBuf>,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Read every generation to its last byte; fails if one is damaged
    Verify,
    /// Write a space's eigen-decompositions as safetensors, in double precision
    ///
    /// `<model>/eigenvalues` has shape k, `<model>/eigenvectors` dim x k.
    Export {
        /// Which space
        #[arg(long, default_value = "default")]
        space: String,
        /// Which generation; without it the newest that is whole
        #[arg(long, value_name = "N")]
        generation: Option<u64>,
        /// Where to
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Start a space from exported eigen-decompositions, or the reading at other positions
    ///
    /// --from: models are matched by name; those that the file lacks keep what they have. Pending joins, counts and
    /// positions stay as they are, and a new epoch begins. --start-at: all else stays, but `learn` goes on in the Kafka
    /// topics at the positions in a file that `dump` wrote, rather than where the store was left, be it in files or in
    /// topics: so a store that has learned from a dump goes on where the dump ends. Partitions that the file does not
    /// name are read from their oldest message. A store that does not exist is made, with the learner as configured.
    Import {
        /// Which space
        #[arg(long, default_value = "default")]
        space: String,
        /// A file that `export` wrote
        #[arg(long, value_name = "FILE", required_unless_present = "start_at")]
        from: Option<PathBuf>,
        /// The positions.json of a dump
        #[arg(long, value_name = "FILE")]
        start_at: Option<PathBuf>,
    },
    /// Drop spaces with all that they have learned; a new epoch begins
    ///
    /// Their pending joins are counted as evicted. Routers keep the parameters that were published: delete the file
    /// params/SPACE.safetensors, or write a tombstone for the key on the parameters topic, and restart the routers. A later
    /// query of the space creates it anew.
    Drop {
        /// Which space; may be repeated
        #[arg(long, required = true, num_args = 1.., value_name = "NAME")]
        space: Vec<String>,
    },
    /// Go back to an older generation for good; a new epoch begins
    ///
    /// Positions go back too: what came after it is read again from the logs, and learned again.
    Rollback {
        /// Which generation
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

/// A store, and the lane of it that is asked for.
#[derive(Clone, Copy)]
struct Place<'a> {
    dir: &'a Path,
    lane: Option<&'a str>,
}

impl Place<'_> {
    /// The lane that is asked for, or the only one; `None` if there is none.
    fn choose(&self, archive: &DirArchive) -> anyhow::Result<Option<String>> {
        let lanes = archive.lanes()?;
        match (self.lane, &lanes[..]) {
            (Some(lane), _) if lanes.iter().any(|known| known == lane) => Ok(Some(lane.to_owned())),
            (Some(lane), _) => Err(anyhow!("there is no lane {lane}; there are {}", lanes.join(", "))),
            (None, []) => Ok(None),
            (None, [lane]) => Ok(Some(lane.clone())),
            (None, _) => Err(anyhow!("the store has several lanes, choose one with --lane: {}", lanes.join(", "))),
        }
    }
}

/// A snapshot, made into an engine again.
struct Opened {
    lane: String,
    generation: u64,
    head: LaneHead,
    settings: Settings,
    engine: Engine,
}

impl Opened {
    /// Tells of every record that is made into a part of the engine.
    fn new(lane: &str, snapshot: Snapshot, tell: &mut dyn FnMut()) -> anyhow::Result<Self> {
        let head = LaneHead::open(&snapshot.head)?;
        let settings: Settings =
            serde_json::from_str(&head.configuration).context("the configuration in the snapshot cannot be read")?;
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
            "positions": self.head.merge.positions,
        });
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
            value.extend(more);
        }
        value
    }
}

/// The generations never change here but by `rollback`, `import` and `drop`: none is to be deleted.
const KEEP_ALL: usize = usize::MAX;

fn open(place: Place<'_>) -> anyhow::Result<(DirArchive, String)> {
    let archive = store::open_existing(place.dir, KEEP_ALL)?;
    let lane = place.choose(&archive)?;
    let lane = lane.ok_or_else(|| anyhow!("the store {} has no snapshot yet", place.dir.display()))?;
    Ok((archive, lane))
}

/// Reads generations of a lane, and tells how far it is: each record is met twice, when it is read and when it is made
/// into a part of the engine.
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
            // Of some records there are older versions too, which are no further steps.
            if left > 0 {
                left -= 1;
                self.progress.advance(1, message);
            }
        };
        let snapshot = self.archive.read_telling(self.lane, generation, &mut step);
        // What is damaged has fewer; the work is done all the same.
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

/// One generation, or the newest that is whole.
fn read(archive: &DirArchive, lane: &str, generation: Option<u64>) -> anyhow::Result<Opened> {
    let generations = archive.generations(lane)?;
    match generation {
        Some(generation) if !generations.contains(&generation) => {
            let there: Vec<String> = generations.iter().map(ToString::to_string).collect();
            Err(anyhow!("there is no generation {generation}; there are {}", there.join(", ")))
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
                tracing::error!(problem = %error, "a snapshot is damaged");
            }
            opened => return opened,
        }
    }
    Err(anyhow!("no snapshot is whole"))
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
            (row.chain(["whole".to_owned()]).collect(), value)
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
    outln!("generation {}, epoch {}, made {}", opened.generation, opened.head.epoch, utc(opened.head.created_ms))?;
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
                reading.progress.print(&format!("generation {generation}: whole, state digest {digest}"))?;
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
    let view = view.ok_or_else(|| anyhow!("there is no space {space} in the snapshot"))?;
    let spec = opened.settings.space(space);
    let bytes = export::encode(&view, spec.dim, spec.algorithm());
    std::fs::write(out, bytes).with_context(|| format!("cannot write {}", out.display()))?;
    outln!("space {space}, version {}, generation {}: {}", view.version, opened.generation, out.display())?;
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
            .with_context(|| format!("{} does not fit", path.display()))?;
        head.epoch = next_epoch(head.epoch);
        head.publications.remove(&space);
    }
    if let Some((_, positions)) = &starts {
        if lane != store::ONE_LANE {
            return Err(anyhow!("--start-at is for all partitions together, but {lane} is a lane of some of them"));
        }
        head.merge.positions = positions.clone();
    }
    let generation = archive.commit(&lane, &head.seal(), engine.take_changes())?;
    note(place.dir, &lane, generation)?;
    let epoch = head.epoch;
    if let Some((path, _)) = export {
        outln!("space {space} starts from {}: generation {generation}, epoch {epoch}", path.display())?;
    }
    if let Some((path, positions)) = starts {
        let number = positions.len();
        outln!("{number} partitions are read on from {}: generation {generation}, epoch {epoch}", path.display())?;
    }
    Ok(())
}

fn read_export(path: &Path) -> anyhow::Result<export::Export> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    export::decode(&bytes).with_context(|| format!("cannot read {}", path.display()))
}

fn read_positions(path: &Path) -> anyhow::Result<BTreeMap<String, Position>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let no_positions = || format!("{} holds no positions as `pointsman dump` writes them", path.display());
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
            return Err(anyhow!("there is no space {space} in lane {lane}; there are {}", there.join(", ")));
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

/// The newest generation that is whole, to continue from: what is damaged must not get into the next.
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
    outln!("generation {generation} is generation {to} again, in epoch {}", head.epoch)?;
    Ok(())
}

/// So that the learner does not take what was given up for lost.
fn note(dir: &Path, lane: &str, generation: u64) -> anyhow::Result<()> {
    Witness::new(dir, lane).note(generation).context("cannot note the snapshot beside its store")
}

fn name(space: &str) -> Result<Name, Failure> {
    Name::try_from(space).map_err(|error| Failure::Usage(error.into()))
}
