//! Standard output and standard error that tolerate a closed pipe.
//!
//! `println!` panics when a pipe is closed. A reader that closes it (`pointsman check-config | head -1`) has read what it
//! wanted, so that is not an error; a full disk behind a redirection is.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, IsTerminal, Write};

use anyhow::Context;

use crate::report::wrap;

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

/// Columns of standard output where neither the environment nor a terminal says how many it has.
const COLUMNS: usize = 80;
/// Below this a table is unreadable anyway.
const COLUMNS_MIN: usize = 40;

/// Columns that a table may take: what COLUMNS says, else the terminal's width, else 80.
pub fn width() -> usize {
    let environment = || std::env::var("COLUMNS").ok()?.parse::<usize>().ok();
    let terminal = || {
        let output = io::stdout();
        let size = rustix::termios::tcgetwinsize(&output).ok().filter(|_| output.is_terminal())?;
        Some(usize::from(size.ws_col))
    };
    let known = environment().or_else(terminal).filter(|columns| *columns > 0);
    known.unwrap_or(COLUMNS).max(COLUMNS_MIN)
}

/// A paragraph in lines that fit.
pub fn paragraph(text: &str) -> String {
    wrap(&text.replace('\n', " "), width()).join("\n")
}
