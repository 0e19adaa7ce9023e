//! `pointsman check-config`: is this configuration good, and what does it come to?

use anyhow::Context;
use serde::Serialize;

use super::Failure;
use super::output::outln;
use crate::config::{Config, Settings};

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
    resolved: &'a Settings,
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let resolved = config.check().map_err(|e| Failure::Usage(e.into()))?;
    config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    if args.json {
        let checked = serde_json::to_string(&Checked { config, resolved: &resolved })
            .context("cannot print the configuration")?;
        outln!("{checked}")?;
        return Ok(());
    }
    let written = toml::to_string(config).context("cannot print the configuration")?;
    let resolved = toml::to_string(&resolved).context("cannot print the resolved configuration")?;
    outln!("# Keys as configured\n{written}\n# What they come to, presets resolved\n{}", commented(&resolved))?;
    Ok(())
}

/// Resolved settings are not keys: commented out, the whole output is a valid configuration file.
fn commented(text: &str) -> String {
    text.lines().map(|line| format!("# {line}\n")).collect()
}
