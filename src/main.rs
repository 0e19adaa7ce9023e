//! The `pointsman` program: parses arguments, runs a command, and says how it went.

use std::process::ExitCode;

use clap::Parser;
use pointsman::cli::Cli;

/// Events are made by one thread and done with by another, and with the system's allocator these wait for each other.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ExitCode::from(failure.report()),
    }
}
