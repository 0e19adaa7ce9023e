//! Standard output and standard error that tolerate a closed pipe.
//!
//! `println!` panics when a pipe is closed. A reader that closes it (`pointsman check-config | head -1`) has read what it
//! wanted, so that is not an error; a full disk behind a redirection is.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

use anyhow::Context;

/// Prints a line to standard output; fails unless it was written or the reader has closed the pipe.
macro_rules! outln {
    ($($arguments:tt)*) => { $crate::cli::output::print(format_args!("{}\n", format_args!($($arguments)*))) };
}

/// Like [`outln!`], without the line end.
macro_rules! out {
    ($($arguments:tt)*) => { $crate::cli::output::print(format_args!($($arguments)*)) };
}

pub(super) use {out, outln};

/// Prints to standard output.
pub fn print(text: Arguments<'_>) -> anyhow::Result<()> {
    print_bytes(text.to_string().as_bytes())
}

/// Prints bytes to standard output.
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to standard output"),
        _ => Ok(()),
    }
}

/// Prints a line to standard error; drops it if that is closed.
pub fn report(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}
