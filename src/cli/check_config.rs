//! `pointsman check-config`: is this configuration good, and what does it come to?

use anyhow::Context;
use serde::Serialize;

use super::Failure;
use crate::config::{Config, Spec};

/// Validate the configuration and print what it comes to, presets resolved
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object instead of TOML
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Checked<'a> {
    config: &'a Config,
    resolved: Resolved<'a>,
}

#[derive(Serialize)]
struct Resolved<'a> {
    learner: &'a Spec,
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let spec = config.learner.check().map_err(|e| Failure::Usage(e.into()))?;
    let resolved = Resolved { learner: &spec };
    if args.json {
        let checked = serde_json::to_string(&Checked { config, resolved }).context("cannot print the configuration")?;
        println!("{checked}");
        return Ok(());
    }
    let written = toml::to_string(config).context("cannot print the configuration")?;
    let resolved = toml::to_string(&resolved).context("cannot print the resolved learner")?;
    println!("# Keys as configured\n{written}\n# What they come to, presets resolved\n{}", commented(&resolved));
    Ok(())
}

/// Resolved settings are not keys: commented out, the whole output is a valid configuration file.
fn commented(text: &str) -> String {
    text.lines().map(|line| format!("# {line}\n")).collect()
}
