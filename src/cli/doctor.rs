//! `pointsman doctor`: checks everything that a configuration names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::json;

use super::Failure;
use super::client::{self, Trust};
use super::output::{outln, width};
use super::{outputs, rejected};
use crate::config::{Config, Method, Settings, TransportKind};
use crate::engine::{Engine, Input, Side};
use crate::event::excerpt;
use crate::merge::{Read, Source};
use crate::report::wrap;
use crate::state::LocalLane;
use crate::store::{self, Access, ONE_LANE, Shared};
use crate::telemetry::{Reason, Reasons};
use crate::transport::Letter;
use crate::transport::file::{AtEnd, LogFile, fingerprint};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::topics;
use crate::transport::params::ParamsDir;
use crate::wire::events::Parser;
use crate::wire::params;

/// Check the configuration, the logs, the store, the transport and a running router
///
/// Reads the first thousand events of every log of section logs (without any, of the logs in transport.file.dir): are they
/// usable, do queries and rewards belong together, and if not, why? Checks that the store can be read and written, that the
/// brokers answer and the topics have the required settings, that published parameters fit the configuration, and whether a
/// learner or router answers at http.listen. Changes nothing.
///
/// One line per check: ok, warn or fail, with the remedy.
///
/// Exit codes: 0 nothing failed, 1 a check failed, 2 invalid usage or configuration.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman doctor
  pointsman doctor --config shop.toml
  pointsman doctor --config shop.toml --json";

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mark {
    Ok,
    Warn,
    Fail,
}

/// The result of a check.
#[derive(Debug, Serialize)]
struct Check {
    check: String,
    result: Mark,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Check {
    fn ok(check: impl Into<String>, text: impl Into<String>) -> Self {
        Self { check: check.into(), result: Mark::Ok, text: text.into(), remedy: None }
    }

    fn bad(result: Mark, check: impl Into<String>, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check: check.into(), result, text: text.into(), remedy: Some(remedy.into()) }
    }

    fn lines(&self) -> Vec<String> {
        let mark = match self.result {
            Mark::Ok => "ok  ",
            Mark::Warn => "warn",
            Mark::Fail => "fail",
        };
        let remedy = self.remedy.as_ref().map(|remedy| format!("; {remedy}")).unwrap_or_default();
        let text = format!("{}: {}{remedy}", self.check, self.text);
        let lines = wrap(&text, width().saturating_sub(6));
        lines.iter().enumerate().map(|(i, line)| format!("{}  {line}", if i == 0 { mark } else { "    " })).collect()
    }
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let learner = &settings.learner;
    let mut checks = vec![Check::ok(
        "configuration",
        format!("{} models, {} dimensions, algorithm {}", learner.models.len(), learner.dim, learner.algorithm()),
    )];
    checks.extend(check_logs(config, &settings));
    checks.push(check_store(config));
    match config.transport.kind {
        TransportKind::File => checks.extend(check_files(config, &settings)),
        TransportKind::Kafka => checks.extend(check_topics(config, &settings)),
    }
    checks.push(check_server(config));
    if args.json {
        outln!("{}", json!({ "checks": checks }))?;
    } else {
        for line in checks.iter().flat_map(Check::lines) {
            outln!("{line}")?;
        }
    }
    match checks.iter().filter(|check| check.result == Mark::Fail).count() {
        0 => Ok(()),
        1 => Err(anyhow!("1 check failed").into()),
        number => Err(anyhow!("{number} checks failed").into()),
    }
}

/// Events of each log that are read.
const EVENTS_MAX: usize = 1000;

/// The first events of a log.
struct Head {
    name: String,
    side: Side,
    inputs: Vec<Input>,
}

fn check_logs(config: &Config, settings: &Settings) -> Vec<Check> {
    let logs = &config.logs;
    let mut paths: Vec<(PathBuf, Side, bool)> = Vec::new();
    let mut add =
        |list: &[PathBuf], side, is_examples| paths.extend(list.iter().map(|path| (path.clone(), side, is_examples)));
    add(&logs.queries, Side::Query, false);
    add(&logs.rewards, Side::Reward, false);
    add(&logs.examples, Side::Query, true);
    add(&logs.examples, Side::Reward, true);
    if paths.is_empty() && config.transport.kind == TransportKind::File {
        for (folder, side) in [("queries", Side::Query), ("rewards", Side::Reward)] {
            paths.extend(newest(&config.transport.file.dir.join(folder)).map(|path| (path, side, false)));
        }
    }
    if paths.is_empty() {
        let remedy = "`pointsman init FILE..` writes a configuration that names yours";
        return match config.transport.kind {
            TransportKind::File => vec![Check::bad(Mark::Warn, "logs", "none yet", remedy)],
            TransportKind::Kafka => {
                vec![Check::ok("logs", "none named; `pointsman replay --from-kafka` reads the topics")]
            }
        };
    }
    let parser = Arc::new(Parser::new(settings));
    let (mut checks, mut heads) = (Vec::new(), Vec::new());
    for (path, side, is_examples) in paths {
        let name = path.display().to_string();
        match head(&path, side, is_examples, &parser) {
            Ok(inputs) => heads.push(Head { name, side, inputs }),
            // Both sides of the same file fail alike.
            Err(error) if !(is_examples && side == Side::Reward) => checks.push(Check::bad(
                Mark::Fail,
                name,
                format!("{error:#}"),
                "correct section logs, or write it again with `pointsman init`",
            )),
            Err(_) => {}
        }
    }
    checks.extend(check_events(heads, settings));
    checks
}

fn newest(directory: &Path) -> Option<PathBuf> {
    let paths = std::fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    paths.filter(|path| crate::transport::directory::base_name(path).is_some()).max()
}

fn head(path: &Path, side: Side, is_examples: bool, parser: &Arc<Parser>) -> anyhow::Result<Vec<Input>> {
    let cannot = || format!("cannot read {}", path.display());
    let mut log = LogFile::new(path, side, parser.clone(), AtEnd::Complete, None, Arc::default());
    if is_examples {
        let print = fingerprint(path, AtEnd::Complete).with_context(cannot)?.unwrap_or_default();
        log = log.of_examples(format!("{print:016x}"));
    }
    let mut inputs = Vec::new();
    while inputs.len() < EVENTS_MAX {
        match log.read().with_context(cannot)? {
            Read::Event(event) => inputs.push(event.input),
            Read::Pending => {}
            _ => break,
        }
    }
    Ok(inputs)
}

/// What becomes of the events: how many are usable, how many rewards find their query.
fn check_events(heads: Vec<Head>, settings: &Settings) -> Vec<Check> {
    let mut settings = settings.clone();
    // Only the join is of interest.
    settings.learner.method = Method::Uniform;
    settings.spaces.values_mut().for_each(|spec| spec.method = Method::Uniform);
    let mut engine = Engine::new(settings);
    let names: Vec<(String, Side, usize)> =
        heads.iter().map(|head| (head.name.clone(), head.side, head.inputs.len())).collect();
    let mut events: Vec<(usize, Input)> = heads
        .into_iter()
        .enumerate()
        .flat_map(|(i, head)| head.inputs.into_iter().map(move |input| (i, input)))
        .collect();
    events.sort_by(|(_, a), (_, b)| a.key().cmp(&b.key()));
    let mut problems: BTreeMap<usize, Reasons> = BTreeMap::new();
    for (i, input) in events {
        for letter in engine.step(input).dead_letters {
            let place = json!({ "source": names[i].0 });
            problems.entry(i).or_default().add(&Letter { letter, place, origin: None, time_ms: 0 });
        }
    }
    engine.finish();
    let mut checks: Vec<Check> = names
        .iter()
        .enumerate()
        .map(|(i, (name, side, read))| check_log(name, *side, *read, problems.get(&i)))
        .collect();
    let join = engine.counts().join;
    let (read, used) = (join.rewards.read, join.rewards.used + join.rewards.duplicate);
    if read > 0 && join.queries.read > 0 {
        let found =
            format!("{used} of the first {read} rewards belong to one of the first {} queries", join.queries.read);
        checks.push(match used {
            0 => Check::bad(
                Mark::Fail,
                "join",
                found,
                "check that both logs begin at the same time, and events.fields.request_id, events.reward_fields.request_id \
                 and join.window_ms",
            ),
            _ if used * 20 < read => {
                Check::bad(Mark::Warn, "join", found, "check join.window_ms and that both logs begin at the same time")
            }
            _ => Check::ok("join", found),
        });
    }
    checks
}

fn check_log(name: &str, side: Side, read: usize, problems: Option<&Reasons>) -> Check {
    let events = if side == Side::Query { "queries" } else { "rewards" };
    let reasons = problems.map(|problems| problems.top(None)).unwrap_or_default();
    let bad: u64 = reasons.iter().map(|reason| reason.number).sum();
    let usable = (read as u64).saturating_sub(bad);
    let found = format!("{usable} of the first {read} {events} are usable");
    match reasons.split_first() {
        _ if read == 0 => Check::bad(Mark::Warn, name, format!("no {events}"), "is it the right file?"),
        None => Check::ok(name, found),
        Some((worst, others)) => {
            let mark = if usable == 0 { Mark::Fail } else { Mark::Warn };
            let Reason { number, code, detail, .. } = worst;
            let others = match others.len() {
                0 => String::new(),
                others => format!(" and {others} more reasons"),
            };
            let (detail, remedy) = (excerpt(detail, 300), rejected::remedy(worst));
            Check::bad(mark, name, found, format!("{number}x {code}: {detail}{others}; {remedy}"))
        }
    }
}

fn check_store(config: &Config) -> Check {
    let dir = &config.store.dir;
    let name = format!("store {}", dir.display());
    if !dir.exists() {
        return check_writable(&name, dir, "does not exist yet; the learner creates it");
    }
    let resumed = store::open(dir, Access::Read).map(|store| {
        let lane = LocalLane::new(Shared::new(store), ONE_LANE, (&config.snapshot).into());
        lane.newest().map(|resumed| (resumed.snapshot.is_some(), resumed.damaged.len()))
    });
    match resumed {
        Ok(Ok((_, damaged))) if damaged > 0 => Check::bad(
            Mark::Warn,
            name,
            format!("{damaged} newest generations are damaged"),
            "the learner resumes from the newest sound one; `pointsman snapshots verify` lists them",
        ),
        Ok(Ok((true, _))) => check_writable(&name, dir, "readable, has snapshots"),
        Ok(Ok((false, _))) => check_writable(&name, dir, "readable, has no snapshot yet"),
        Ok(Err(error)) => Check::bad(Mark::Fail, name, error.to_string(), "run `pointsman snapshots verify`"),
        Err(error) => Check::bad(Mark::Fail, name, error.to_string(), "run `pointsman snapshots verify`"),
    }
}

/// Whether files can be created in a directory, or in the nearest one above it that exists.
fn check_writable(name: &str, dir: &Path, text: &str) -> Check {
    match outputs::check_directory(dir) {
        Ok(()) => Check::ok(name, text),
        Err((existing, error)) => Check::bad(
            Mark::Fail,
            name,
            format!("cannot create files in {}: {error}", existing.display()),
            "grant the user of the daemon write access, or name another directory",
        ),
    }
}

fn check_files(config: &Config, settings: &Settings) -> Vec<Check> {
    let dir = &config.transport.file.dir;
    let name = format!("directory {}", dir.display());
    let text = if dir.exists() { "writable" } else { "does not exist yet; learner and router create it" };
    let mut checks = vec![check_writable(&name, dir, text)];
    let published = ParamsDir::new(&dir.join("params")).published();
    let unfit = published.iter().find_map(|found| {
        let problem = params::decode_for(settings, &params::encode(found)).err()?;
        Some((found.space.clone(), problem))
    });
    checks.push(match unfit {
        Some((space, problem)) => Check::bad(
            Mark::Fail,
            "parameters",
            format!("space {space}: {problem}"),
            "route with the configuration that they were learned with, or learn into another directory",
        ),
        None if published.is_empty() => {
            Check::ok("parameters", "none published yet; routers choose uniformly until then")
        }
        None => Check::ok("parameters", format!("{} spaces published, fit the configuration", published.len())),
    });
    checks
}

fn check_topics(config: &Config, settings: &Settings) -> Vec<Check> {
    let brokers = format!("brokers {}", config.transport.kafka.brokers);
    let cluster = match Cluster::new(&config.transport.kafka).and_then(|cluster| cluster.reach().map(|()| cluster)) {
        Ok(cluster) => cluster,
        Err(problem) => {
            let remedy = "check transport.kafka.brokers and transport.kafka.client";
            return vec![Check::bad(Mark::Fail, brokers, problem.to_string(), remedy)];
        }
    };
    let mut checks = vec![Check::ok(brokers, "reachable")];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let found = runtime.map(|runtime| runtime.block_on(topics::init(&cluster, settings, true)));
    match found {
        Ok(Ok(found)) => checks.extend(found.iter().map(|topic| match topic.differences.as_slice() {
            [] => Check::ok(format!("topic {}", topic.topic), format!("{} partitions", topic.partitions)),
            differences => Check::bad(
                Mark::Fail,
                format!("topic {}", topic.topic),
                differences.join("; "),
                "create missing topics with `pointsman topics init`",
            ),
        })),
        Ok(Err(problem)) => {
            checks.push(Check::bad(Mark::Fail, "topics", problem.to_string(), "run `pointsman topics check`"))
        }
        Err(error) => checks.push(Check::bad(Mark::Fail, "topics", error.to_string(), "run `pointsman topics check`")),
    }
    checks
}

fn check_server(config: &Config) -> Check {
    if config.http.listen.is_empty() {
        return Check::ok("server", "disabled (http.listen is empty)");
    }
    let url = format!("{}/ready", client::local(&config.http));
    let name = format!("server {url}");
    match client::agent(Duration::from_secs(2), 1, Trust::Anyone).get(&url).call() {
        Ok(response) if response.status().is_success() => Check::ok(name, "ready"),
        Ok(mut response) => {
            let said = response.body_mut().read_to_string().unwrap_or_default();
            Check::bad(Mark::Warn, name, format!("not ready: {}", excerpt(said.trim(), 200)), "see its log")
        }
        Err(_) => Check::bad(
            Mark::Warn,
            name,
            "nothing answers",
            "start `pointsman up`, or `pointsman learn` and `pointsman route`",
        ),
    }
}
