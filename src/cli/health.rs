//! `pointsman health`: probes a running learner or router.

use std::time::Duration;

use anyhow::{Context, anyhow};

use super::Failure;
use super::client::{self, Trust};
use super::output::outln;
use crate::config::Config;

/// Probe a running learner or router
///
/// For containers and scripts without another HTTP client. /live reports that the process responds, /ready that it does its
/// work: a router is ready when it has parameters (or with --serve-uniform), a learner when it reads events. The probe sends
/// no token and does not verify certificates, because it may use an address that the certificate does not name.
///
/// Exit code 0: the endpoint answered with a success status. 1: it did not, or there was no answer. 2: invalid usage.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// URL to probe [default: /live at http.listen, with https if http.tls is set]
    #[arg(long)]
    url: Option<String>,
    /// Timeout in milliseconds
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout_ms: u64,
}

const EXAMPLES: &str = "Examples:
  pointsman health
  pointsman health --url http://127.0.0.1:9464/ready
  pointsman health --config shop.toml --timeout-ms 500";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let url = match &args.url {
        Some(url) => client::check_url(url).map_err(Failure::Usage)?,
        None => format!("{}/live", client::local(&config.http)),
    };
    let agent = client::agent(Duration::from_millis(args.timeout_ms), 1, Trust::Anyone);
    let mut response = agent.get(&url).call().with_context(|| format!("no answer from {url}"))?;
    if response.status().is_success() {
        outln!("{url}: {}", response.status())?;
        return Ok(());
    }
    let said = response.body_mut().read_to_string().unwrap_or_default();
    Err(anyhow!("{url}: {} {}", response.status(), said.trim()).into())
}
