//! The `pointsman` program: parses arguments, runs a command, and says how it went.

use std::process::ExitCode;

use clap::Parser;
use pointsman::cli::{Cli, Failure};

fn main() -> ExitCode {
    match Cli::parse().run() {
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
