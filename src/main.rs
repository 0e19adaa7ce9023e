//! The `pointsman` program: parses arguments, runs a command, and returns its exit code.

use std::process::ExitCode;

use clap::Parser;
use pointsman::cli::Cli;

/// Events are allocated by one thread and freed by another; the system allocator makes these threads contend for locks.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ExitCode::from(failure.report()),
    }
}
