//! `pointsman snapshots`: inspects, changes and backs up a store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use super::client::{self, Trust};
use super::output::{outln, width};
use super::params::utc;
use super::progress::{Progress, Unit};
use super::{Failure, summary, warned};
use crate::config::Config;
use crate::event::{ModelName, Name};
use crate::files;
use crate::http::backup::TOKEN_HEADER;
use crate::merge::Position;
use crate::report::{Column, Table};
use crate::state::backup::Backup;
use crate::state::repair::Plan;
use crate::state::running::TOKEN_FILE;
use crate::state::{DamagedSnapshot, LaneStore, Opened, Retention, Snapshot, StateError, generations};
use crate::store::{self, Access, DirStore, ONE_LANE, SnapshotStore, StoreError};
use crate::transport::kafka::positions;
use crate::wire::export;
use crate::wire::records::Record;

/// Inspect, change and back up a store: list, show, verify, export, import, drop, roll back, back up, restore, repair
///
/// A store keeps the newest generations of snapshots (snapshot.keep), and checkpoints of older ones: one per hour and one per
/// day (snapshot.keep_hourly, snapshot.keep_daily). Each is everything that a learner needs to resume. `list`, `show`,
/// `verify` and `export` write nothing to the store. All commands but `backup` need the daemon to be stopped. They do not need
/// the configuration that the store was created with.
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
  pointsman snapshots rollback --store data/store --to 41
  pointsman snapshots backup --store data/store --out pointsman.backup
  pointsman snapshots restore --store data/new --from pointsman.backup
  pointsman snapshots repair --store data/store --dry-run";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the generations and checkpoints, newest last
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
    /// Read all generations and checkpoints completely; exit code 1 if one is damaged
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
    /// Roll back to an older generation or checkpoint; begins a new epoch
    ///
    /// Adds a generation with the older state, so a rollback can be undone by another one. Positions roll back too: later
    /// events are read and learned again, if the logs still hold them.
    Rollback {
        /// Generation to roll back to
        #[arg(long, value_name = "N")]
        to: u64,
    },
    /// Write a backup: the newest generation of every lane, in one file
    ///
    /// Works while the learner runs: the learner at http.listen then sends the backup, consistent and durable. docs/formats.md
    /// specifies the file.
    Backup {
        /// Output file
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Restore a backup into a new store; begins a new epoch
    ///
    /// The directory must not hold a store. The learner then continues from the positions in the backup: later events are read
    /// and learned again.
    Restore {
        /// File written by `snapshots backup`, or a checkpoint
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
    },
    /// Repair a damaged store: print what is given up, then do it
    ///
    /// Deletes damaged generations. If the database itself is damaged, copies the newest intact generation of every lane to a new
    /// database and renames the damaged one. If no generation is intact, restores the newest checkpoint.
    Repair {
        /// Print what would be done, and change nothing
        #[arg(long)]
        dry_run: bool,
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
            let (generation, epoch) = place.open(Access::Write)?.drop_spaces(&spaces).map_err(anyhow::Error::from)?;
            let names: Vec<&str> = spaces.iter().map(Name::as_str).collect();
            outln!("dropped {}: generation {generation}, epoch {epoch}", names.join(", "))?;
        }
        Command::Rollback { to } => {
            let (generation, epoch) = place.open(Access::Write)?.rollback(*to).map_err(anyhow::Error::from)?;
            outln!("rolled back to generation {to}: new generation {generation}, epoch {epoch}")?;
        }
        Command::Backup { out } => backup(place, config, out)?,
        Command::Restore { from } => restore(place, config, from)?,
        Command::Repair { dry_run } => repair(place, *dry_run)?,
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
    fn choose(&self, store: &DirStore) -> anyhow::Result<Option<String>> {
        let lanes = generations::lanes(store)?;
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

    /// Opens the lane. No command here deletes a generation to save space.
    fn open(&self, access: Access) -> anyhow::Result<LaneStore<DirStore>> {
        let store = store::open(self.dir, access)?;
        if store.is_damaged() {
            tracing::error!(
                "the database fails its integrity check; `pointsman snapshots repair --store {}` saves what is intact",
                self.dir.display()
            );
        }
        let lane = self.choose(&store)?.ok_or_else(|| StateError::Empty(self.dir.display().to_string()))?;
        Ok(LaneStore::new(store, &lane, Retention::ALL))
    }
}

/// Reads one generation or checkpoint, or the newest undamaged generation.
fn read(lane: &LaneStore<DirStore>, generation: Option<u64>) -> anyhow::Result<Opened> {
    let progress = Progress::of_errand("reading", 1, Unit::Of("generations"));
    let snapshot = match generation {
        Some(generation) => lane.read(generation)?,
        None => newest(lane)?,
    };
    let opened = Opened::new(snapshot)?;
    progress.advance(1, || format!("generation {}", opened.generation));
    progress.finish();
    Ok(opened)
}

fn newest(lane: &LaneStore<DirStore>) -> anyhow::Result<Snapshot> {
    let resumed = lane.newest()?;
    for DamagedSnapshot { generation, problem } in &resumed.damaged {
        tracing::error!(generation, problem, "snapshot is damaged; trying the previous generation");
    }
    resumed.snapshot.ok_or_else(|| {
        let dir = lane.store().place();
        anyhow!(
            "all generations are damaged: run `pointsman snapshots repair --store {dir}`, or move the store away and rebuild it from \
             the logs, with `pointsman replay --keep-open --store {dir}`"
        )
    })
}

/// Restores every generation and checkpoint, with progress.
fn read_all(
    lane: &LaneStore<DirStore>,
    mut each: impl FnMut(&Progress, u64, Result<Opened, StateError>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let progress = Progress::of_errand("reading", lane.all_generations()?.len() as u64, Unit::Of("generations"));
    let mut outcome = Ok(());
    lane.verify(|generation, opened| {
        if outcome.is_ok() {
            outcome = each(&progress, generation, opened);
        }
        progress.advance(1, || format!("generation {generation}"));
    })?;
    progress.finish();
    outcome
}

fn list(place: Place<'_>, csv: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let lane = place.open(Access::Read)?;
    let in_database = lane.generations()?;
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    read_all(&lane, |_, generation, opened| {
        let kept = if in_database.contains(&generation) { "generation" } else { "checkpoint" };
        let (row, value) = listed(generation, kept, opened);
        rows.push(row);
        values.push(value);
        Ok(())
    })?;
    let bytes = lane.store().bytes_on_disk()?;
    let right = ["generation", "made", "epoch", "spaces", "applied", "pending"].map(Column::right);
    let columns = right.into_iter().chain(["kept as", "state"].map(Column::left)).collect();
    let table = Table { columns, rows, note: Some(format!("{bytes} bytes on disk, lane {}", lane.lane())) };
    super::write_csv(csv, &[&table])?;
    if json {
        outln!("{}", json!({"lane": lane.lane(), "bytes_on_disk": bytes, "generations": values}))?;
    } else {
        outln!("{}", table.text(width()))?;
    }
    Ok(())
}

/// A generation as a row of the table, and as JSON.
fn listed(generation: u64, kept: &str, opened: Result<Opened, StateError>) -> (Vec<String>, Value) {
    match opened {
        Ok(opened) => {
            let (counts, head) = (opened.engine.counts(), &opened.head);
            let pending = counts.join.queries.pending;
            let spaces = opened.engine.names().count() as u64;
            let figures = [head.epoch, spaces, counts.applied, pending].map(|figure| figure.to_string());
            let row = [generation.to_string(), utc(head.created_ms)].into_iter().chain(figures);
            let value = json!({
                "generation": generation, "created_ms": head.created_ms, "epoch": head.epoch,
                "applied": counts.applied, "pending": pending, "kept_as": kept, "whole": true,
            });
            (row.chain([kept.to_owned(), "ok".to_owned()]).collect(), value)
        }
        Err(error) => {
            let problem = error.to_string();
            let row = std::iter::once(generation.to_string()).chain(std::iter::repeat_n("-".to_owned(), 5));
            let value = json!({"generation": generation, "kept_as": kept, "whole": false, "problem": problem});
            (row.chain([kept.to_owned(), problem]).collect(), value)
        }
    }
}

fn show(place: Place<'_>, generation: Option<u64>, csv: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let lane = place.open(Access::Read)?;
    let opened = read(&lane, generation)?;
    let table = summary::table(&opened.engine, opened.head.merge.out_of_order);
    super::write_csv(csv, &[&table])?;
    if json {
        outln!("{}", as_json(lane.lane(), &opened))?;
        return Ok(());
    }
    outln!("{}", table.text(width()))?;
    for line in warned::lines(&warned::of([&opened.engine])) {
        outln!("{line}")?;
    }
    outln!("generation {}, epoch {}, created {}", opened.generation, opened.head.epoch, utc(opened.head.created_ms))?;
    for view in opened.engine.spaces() {
        let models: Vec<&str> = view.models.iter().map(ModelName::as_str).collect();
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

fn as_json(lane: &str, opened: &Opened) -> Value {
    let mut value = summary::json(std::slice::from_ref(&opened.engine), opened.head.merge.out_of_order);
    let more = json!({
        "lane": lane,
        "generation": opened.generation,
        "epoch": opened.head.epoch,
        "created_ms": opened.head.created_ms,
        "publications": opened.head.publications,
        "positions": opened.head.merge.to_record().positions,
    });
    if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
        value.extend(more);
    }
    value
}

fn verify(place: Place<'_>) -> anyhow::Result<()> {
    let lane = place.open(Access::Read)?;
    let (mut damaged, mut number) = (0, 0);
    read_all(&lane, |progress, generation, opened| {
        number += 1;
        match opened {
            Ok(opened) => {
                let digest = opened.engine.digest();
                progress.print(&format!("generation {generation}: ok, state digest {digest}"))
            }
            Err(error) => {
                damaged += 1;
                progress.print(&format!("generation {generation}: {error}"))
            }
        }
    })?;
    if damaged > 0 {
        bail!("{damaged} of {number} generations are damaged");
    }
    if lane.store().is_damaged() {
        bail!("the database fails its integrity check");
    }
    if let Some(lost) = lane.lost()? {
        bail!("generation {lost} was committed, but is missing: the database lost it");
    }
    Ok(())
}

fn export(place: Place<'_>, space: &Name, generation: Option<u64>, out: &Path) -> anyhow::Result<()> {
    let opened = read(&place.open(Access::Read)?, generation)?;
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
    let store = store::open(place.dir, Access::Create(config.store.kind))?;
    let lane = place.choose(&store)?.unwrap_or_else(|| ONE_LANE.to_owned());
    if starts.is_some() && lane != ONE_LANE {
        bail!("--start-at requires a store with one lane (transport.kafka.lanes = \"one\"), but this is lane {lane}");
    }
    let mut lane = LaneStore::new(store, &lane, Retention::ALL);
    let parameters = export.as_ref().map(|(_, export)| (&space, export));
    let positions = starts.as_ref().map(|(_, positions)| positions.clone());
    let imported = lane.import(config.check()?, parameters, positions);
    let (generation, epoch) = imported.with_context(|| match from {
        Some(path) => format!("cannot import {} into space {space}", path.display()),
        None => "cannot set the positions".to_owned(),
    })?;
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

fn backup(place: Place<'_>, config: &Config, out: &Path) -> anyhow::Result<()> {
    let bytes = match store::open(place.dir, Access::Read) {
        Ok(store) => Backup::of(&store)?.seal(),
        Err(StoreError::InUse(_)) => fetch_backup(place.dir, config)?,
        Err(error) => return Err(error.into()),
    };
    // Also what came over the network is verified before it replaces an older backup.
    let Backup { lanes } = Backup::open(&bytes).context("the learner sent a damaged backup")?;
    files::replace(out, &bytes).with_context(|| format!("cannot write {}", out.display()))?;
    for lane in lanes {
        let (records, generation) = (lane.records.len(), lane.generation);
        outln!("backed up lane {}, generation {generation}, {records} records, to {}", lane.lane, out.display())?;
    }
    Ok(())
}

/// How long a running learner may take to send a backup.
const BACKUP_TIMEOUT: Duration = Duration::from_secs(600);

/// Asks the learner that runs on the store for a backup.
fn fetch_backup(dir: &Path, config: &Config) -> anyhow::Result<Vec<u8>> {
    let url = client::local(&config.http);
    let in_use = || {
        format!(
            "the store {} is in use, and no learner sent a backup from {url} (http.listen): use the configuration of that learner, \
             or stop it",
            dir.display()
        )
    };
    let token = std::fs::read_to_string(dir.join(TOKEN_FILE)).with_context(in_use)?;
    let agent = client::agent(BACKUP_TIMEOUT, 1, Trust::load(&config.http.tls)?);
    let mut request = agent.get(format!("{url}/v1/backup")).header(TOKEN_HEADER, token.trim());
    if !config.http.token.0.is_empty() {
        request = request.header("authorization", format!("Bearer {}", config.http.token.0));
    }
    let mut response = request.call().with_context(in_use)?;
    let status = response.status();
    let body = response.body_mut().with_config().limit(u64::MAX).read_to_vec().with_context(in_use)?;
    if !status.is_success() {
        bail!("{}: {status}: {}", in_use(), String::from_utf8_lossy(&body));
    }
    Ok(body)
}

fn restore(place: Place<'_>, config: &Config, from: &Path) -> anyhow::Result<()> {
    let bytes = files::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    let backup = Backup::open(&bytes).with_context(|| format!("cannot read {}", from.display()))?;
    let lanes: Vec<(String, u64)> = backup.lanes.iter().map(|lane| (lane.lane.clone(), lane.generation)).collect();
    backup.restore_into(store::open(place.dir, Access::Create(config.store.kind))?)?;
    for (lane, generation) in lanes {
        outln!("restored lane {lane} from generation {generation} to {}", place.dir.display())?;
    }
    Ok(())
}

fn repair(place: Place<'_>, dry_run: bool) -> anyhow::Result<()> {
    let store = store::open(place.dir, if dry_run { Access::Read } else { Access::Repair })?;
    let plan = Plan::new(&store)?;
    if plan.is_empty() {
        outln!("nothing to repair: every generation is intact")?;
        return Ok(());
    }
    if plan.replaces_store {
        outln!("the database is damaged: copy what is intact to a new one, and rename the damaged one")?;
    }
    for lane in &plan.lanes {
        outln!("{lane}")?;
    }
    if !dry_run {
        plan.carry_out(store)?;
        outln!("done")?;
    }
    Ok(())
}

fn name(space: &str) -> Result<Name, Failure> {
    Name::try_from(space).map_err(|error| Failure::Usage(error.into()))
}
