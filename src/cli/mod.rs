//! The command line: one file per subcommand.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod check_config;
mod client;
mod closed_loop;
mod compare;
mod contestants;
mod dataset;
mod demo;
mod doctor;
mod dump;
mod evaluate;
mod examples;
mod figures;
mod gap;
mod health;
mod help;
mod init;
mod learn;
mod logging;
mod logs;
mod models;
mod output;
mod outputs;
mod panel;
mod parallel;
mod params;
mod progress;
mod rejected;
mod repartition;
mod replay;
mod route;
mod settings;
mod simulate;
mod snapshots;
mod summary;
mod topics;
mod traffic;
mod up;
mod warned;
mod world;

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Parser, Subcommand};

use crate::fatal;
use crate::report::{Page, Table, png};

/// Learns online, from the events you already log, which embedding model should answer each query.
///
/// Routers log their decisions (query events) and what these earned (reward events). `pointsman learn` joins both from
/// files or Kafka topics, learns a routing policy, and publishes small parameter files that any router can evaluate.
/// `pointsman up` runs all of it in one process, on one port; `pointsman up --demo` adds simulated traffic, and `pointsman
/// demo` writes a report of a simulation.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "Examples:
  pointsman demo
  pointsman up --demo
  pointsman check-config --config shop.toml
  pointsman replay --config shop.toml --queries queries.jsonl --rewards rewards.jsonl
  pointsman up --config shop.toml

Configuration: built-in defaults, overridden by --config FILE (or pointsman.toml in the working directory), then by the environment \
(POINTSMAN__LEARNER__ETA=0.3), then by --set learner.eta=0.3. config/default.toml documents every key.

Logs go to standard error; RUST_LOG sets the level (default: info).

Exit codes: 0 success, 1 failed while running, 2 invalid usage or configuration.";

/// Options of every command.
#[derive(Debug, Args)]
struct Common {
    /// Configuration file (TOML) [default: pointsman.toml in the working directory if there is one]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Override a configuration key, e.g. --set learner.eta=0.3; can be repeated
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Common {
    fn file(&self) -> Option<&Path> {
        let present = || Some(Path::new(CONFIG_FILE)).filter(|path| path.is_file());
        self.config.as_deref().or_else(present)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(Box<demo::Args>),
    Init(Box<init::Args>),
    Doctor(doctor::Args),
    Up(up::Args),
    Learn(learn::Args),
    Route(route::Args),
    Models(models::Args),
    Simulate(Box<simulate::Args>),
    Replay(replay::Args),
    Compare(Box<compare::Args>),
    Gap(gap::Args),
    Evaluate(evaluate::Args),
    Snapshots(snapshots::Args),
    Params(params::Args),
    Topics(topics::Args),
    Repartition(repartition::Args),
    Dump(dump::Args),
    Health(health::Args),
    CheckConfig(check_config::Args),
    Completions(help::CompletionsArgs),
    Man(help::ManArgs),
}

/// The configuration in the working directory, which is read when no other is named.
const CONFIG_FILE: &str = "pointsman.toml";

/// How a command failed.
#[derive(Debug)]
pub enum Failure {
    /// Invalid usage or configuration.
    Usage(anyhow::Error),
    /// The command failed while running.
    Run(anyhow::Error),
}

impl Failure {
    /// Prints the error to standard error and returns the exit code. Keeps line ends: errors of TOML files span lines.
    pub fn report(&self) -> u8 {
        let (Self::Usage(error) | Self::Run(error)) = self;
        let text: Vec<String> = format!("pointsman: {error:#}").lines().map(logging::escape).collect();
        output::report(&text.join("\n"));
        if matches!(self, Self::Usage(_)) { 2 } else { 1 }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Run(error)
    }
}

impl Cli {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let (config, sources) = match self.command {
            // Help must work with any configuration.
            Command::Init(_) | Command::Completions(_) | Command::Man(_) => Default::default(),
            _ => settings::load(self.common.file(), &self.common.set, variables()?)?,
        };
        let load = settings::loader(self.common.file(), &self.common.set);
        logging::start(&config.log);
        fatal::make_panics_fatal();
        // Manual pages and completions are readable by all users.
        if !matches!(self.command, Command::Completions(_) | Command::Man(_)) {
            crate::files::make_private();
        }
        let done = match self.command {
            Command::Demo(args) => demo::run(&args, &config),
            Command::Init(args) => init::run(&args),
            Command::Doctor(args) => doctor::run(&args, &config),
            Command::Up(args) => up::run(&args, &config, load),
            Command::Learn(args) => learn::run(&args, &config, load),
            Command::Route(args) => route::run(&args, &config, load),
            Command::Models(args) => models::run(&args, &config),
            Command::Simulate(args) => simulate::run(&args, &config),
            Command::Replay(args) => replay::run(&args, &config),
            Command::Compare(args) => compare::run(&args, &config),
            Command::Gap(args) => gap::run(&args, &config),
            Command::Evaluate(args) => evaluate::run(&args, &config),
            Command::Snapshots(args) => snapshots::run(&args, &config),
            Command::Params(args) => params::run(&args, &config),
            Command::Topics(args) => topics::run(&args, &config),
            Command::Repartition(args) => repartition::run(&args, &config),
            Command::Dump(args) => dump::run(&args, &config),
            Command::Health(args) => health::run(&args, &config),
            Command::CheckConfig(args) => check_config::run(&args, &config),
            Command::Completions(args) => help::completions(&args),
            Command::Man(args) => help::man(&args),
        };
        done.map_err(|failure| sources.locate(&config, failure))
    }
}

/// Our environment variables. Invalid UTF-8 is an error: a token that is ignored would protect nothing.
fn variables() -> Result<Vec<(String, String)>, Failure> {
    let ours = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = ours.filter(|(name, _)| name.starts_with(settings::PREFIX));
    let text = |(name, value): (String, std::ffi::OsString)| match value.into_string() {
        Ok(value) => Ok((name, value)),
        Err(_) => Err(Failure::Usage(anyhow!("the value of the environment variable {name} is not valid UTF-8"))),
    };
    ours.map(text).collect()
}

/// Writes tables as CSV, separated by an empty line, if a file is given.
fn write_csv(path: Option<&Path>, tables: &[&Table]) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = tables.iter().map(|table| table.csv()).collect::<Vec<_>>().join("\n");
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a page into a directory, which is created if missing.
fn write_page(directory: &Path, name: &str, page: &Page) -> anyhow::Result<PathBuf> {
    write_into(directory, &format!("{name}.html"), page.render().as_bytes())
}

/// Writes each chart of a page as a PNG into a directory, if one is given: `demo-1-reward-over-time.png`.
fn write_pngs(directory: Option<&Path>, name: &str, page: &Page) -> anyhow::Result<()> {
    let Some(directory) = directory else { return Ok(()) };
    for (i, (heading, chart)) in page.charts().enumerate() {
        let file = format!("{name}-{}-{}.png", i + 1, file_name(heading));
        write_into(directory, &file, &png(chart).with_context(|| format!("cannot draw {file}"))?)?;
    }
    Ok(())
}

fn write_into(directory: &Path, name: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    let path = directory.join(name);
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// A file name from a heading: its first words, in lowercase letters and digits.
fn file_name(heading: &str) -> String {
    let words = heading.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.take(8).map(|word| word.to_lowercase().chars().take(16).collect()).collect::<Vec<String>>().join("-")
}
