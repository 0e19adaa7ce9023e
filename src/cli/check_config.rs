//! `pointsman check-config`: validates the configuration and prints it with presets resolved.

use anyhow::Context;
use serde::Serialize;

use super::Failure;
use super::output::outln;
use crate::config::{Config, Settings};

/// Validate the configuration and print it with all presets resolved
///
/// Reads all sources (--config, environment, --set), prints every key with its value, and as comments the settings that
/// the learner derives from them. Secrets are masked. The output is itself a valid configuration file.
///
/// Exit code 0: the configuration is valid. 2: it is not; the error names the key, its value and what is permitted.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print one JSON object instead of TOML
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman check-config --config shop.toml
  pointsman check-config --config shop.toml --set learner.rank=32
  pointsman check-config --json | jq .resolved.learner";

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
    outln!(
        "# Configuration\n{written}\n# Resolved settings (presets applied, for information only)\n{}",
        commented(&resolved)
    )?;
    Ok(())
}

/// Resolved settings are not keys. As comments, they keep the output a valid configuration file.
fn commented(text: &str) -> String {
    text.lines().map(|line| format!("# {line}\n")).collect()
}
