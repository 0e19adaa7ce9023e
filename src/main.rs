//! The `pointsman` program: parses arguments, starts logging, runs a command, and says how it went.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use pointsman::cli::{Cli, Failure};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(error)) => {
            eprintln!("pointsman: {error:#}");
            ExitCode::from(2)
        }
        Err(Failure::Run(error)) => {
            eprintln!("pointsman: {error:#}");
            ExitCode::FAILURE
        }
    }
}
