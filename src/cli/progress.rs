//! Progress of long work: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Lines printed over the whole work where there is no terminal.
const LINES: u64 = 10;

/// Progress over `total` steps, to standard error.
pub struct Progress {
    bar: Option<ProgressBar>,
    what: String,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// Starts it.
    pub fn new(what: &str, total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{prefix} {bar:32} {percent:>3}%  {msg}  {eta} left";
            let bar = ProgressBar::new(total).with_prefix(what.to_owned());
            bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, what: what.to_owned(), total, done: AtomicU64::new(0) }
    }

    /// `steps` more are done; `message` says how it goes and is asked for only when it is shown.
    pub fn advance(&self, steps: u64, message: impl FnOnce() -> String) {
        let before = self.done.fetch_add(steps, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => {
                bar.set_message(message());
                bar.inc(steps);
            }
            None if before * LINES / self.total.max(1) < (before + steps) * LINES / self.total.max(1) => {
                let percent = (before + steps) * 100 / self.total.max(1);
                eprintln!("{} {percent}%  {}", self.what, message());
            }
            None => {}
        }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
