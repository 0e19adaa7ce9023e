//! The command line: one file a subcommand.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod check_config;
mod client;
mod closed_loop;
mod compare;
mod contestants;
mod dataset;
mod demo;
mod dump;
mod evaluate;
mod examples;
mod figures;
mod gap;
mod health;
mod help;
mod learn;
mod logging;
mod output;
mod panel;
mod parallel;
mod params;
mod progress;
mod repartition;
mod replay;
mod route;
mod settings;
mod simulate;
mod snapshots;
mod summary;
mod topics;
mod world;

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Parser, Subcommand};

use crate::config::Config;
use crate::fatal;
use crate::report::{Page, Table, png};

/// Learns online, from the events you already log, which embedding model should answer each query.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "Configuration: built-in defaults, then --config FILE, then the environment \
(POINTSMAN__LEARNER__ETA=0.3), then --set learner.eta=0.3. config/default.toml documents every key.

Exit codes: 0 done, 1 failed while running, 2 bad usage or configuration.";

/// Options of every command.
#[derive(Debug, Args)]
struct Common {
    /// Configuration file (TOML); without it the built-in defaults hold
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Override one configuration key, e.g. --set learner.eta=0.3; may be repeated
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(Box<demo::Args>),
    Learn(learn::Args),
    Route(route::Args),
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

/// How a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The user asked for something that cannot be.
    Usage(anyhow::Error),
    /// Something went wrong while running.
    Run(anyhow::Error),
}

impl Failure {
    /// Prints it to standard error; the exit code. Line ends stay, since errors of TOML files show the lines.
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
        let config = match self.command {
            // Help is there whatever the configuration.
            Command::Completions(_) | Command::Man(_) => Config::default(),
            _ => settings::load(self.common.config.as_deref(), &self.common.set, variables()?)?,
        };
        logging::start(&config.log);
        fatal::make_panics_fatal();
        // Manual pages and completions are for everybody.
        if !matches!(self.command, Command::Completions(_) | Command::Man(_)) {
            crate::files::make_private();
        }
        match self.command {
            Command::Demo(args) => demo::run(&args, &config),
            Command::Learn(args) => learn::run(&args, &config),
            Command::Route(args) => route::run(&args, &config),
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
        }
    }
}

/// Our environment variables. One that is not text is an error: a token that is ignored would protect nothing.
fn variables() -> Result<Vec<(String, String)>, Failure> {
    let ours = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = ours.filter(|(name, _)| name.starts_with(settings::PREFIX));
    let text = |(name, value): (String, std::ffi::OsString)| match value.into_string() {
        Ok(value) => Ok((name, value)),
        Err(_) => Err(Failure::Usage(anyhow!("the environment variable {name} is not valid UTF-8"))),
    };
    ours.map(text).collect()
}

/// Writes tables as comma-separated values, an empty line between them, if a file is named.
fn write_csv(path: Option<&Path>, tables: &[&Table]) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = tables.iter().map(|table| table.csv()).collect::<Vec<_>>().join("\n");
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a page into a directory, which is made if need be.
fn write_page(directory: &Path, name: &str, page: &Page) -> anyhow::Result<PathBuf> {
    write_into(directory, &format!("{name}.html"), page.render().as_bytes())
}

/// Writes every chart of a page as a picture of its own into a directory, if one is named: `demo-1-reward-over-time.png`.
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

/// What is left of a heading in the name of a file: the first words, of plain letters and digits.
fn file_name(heading: &str) -> String {
    let words = heading.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.take(8).map(|word| word.to_lowercase().chars().take(16).collect()).collect::<Vec<String>>().join("-")
}
