//! Progress of long work with rate and remaining time: a bar on a terminal, periodic lines elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, ProgressBar, ProgressState, ProgressStyle};

use super::output::{self, outln};
use crate::transport::lock;

/// Minimum number of lines over the whole work, without a terminal.
const LINES: u64 = 10;

/// Work that takes longer reports before it is done.
const SHORT: Duration = Duration::from_secs(1);

/// Longest time without a line.
const SILENCE: Duration = Duration::from_secs(30);

/// What is counted.
#[derive(Debug, Clone, Copy)]
pub enum Unit {
    /// Things of this name.
    Of(&'static str),
    /// Bytes.
    Bytes,
}

impl Unit {
    fn rate(self, per_s: f64) -> String {
        match self {
            Self::Of(name) => format!("{per_s:.0} {name}/s"),
            Self::Bytes => format!("{}/s", DecimalBytes(per_s as u64)),
        }
    }
}

/// Progress over `total` steps, to standard error.
pub struct Progress {
    bar: Option<ProgressBar>,
    what: String,
    unit: Unit,
    total: u64,
    /// Whether the end of short work is reported, without a terminal.
    tells_end: bool,
    done: AtomicU64,
    start: Instant,
    told: Mutex<Instant>,
}

impl Progress {
    /// Starts the progress of work that is usually short: reports only if it takes long.
    pub fn of_errand(what: &str, total: u64, unit: Unit) -> Self {
        Self { tells_end: false, ..Self::new(what, total, unit) }
    }

    /// Starts the progress.
    pub fn new(what: &str, total: u64, unit: Unit) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let rate = move |state: &ProgressState, text: &mut dyn std::fmt::Write| {
                // Writing into a line cannot fail.
                let _ = text.write_str(&unit.rate(state.per_sec()));
            };
            let template = "{prefix} {bar:32} {percent:>3}%  {msg}  {rate}, {eta} left";
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(total).with_prefix(what.to_owned());
            bar.set_style(style.with_key("rate", rate));
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        let start = Instant::now();
        let (what, done, told) = (what.to_owned(), AtomicU64::new(0), Mutex::new(start));
        Self { bar, what, unit, total, tells_end: true, done, start, told }
    }

    /// Adds completed steps. `message` describes the state and is called only when it is shown.
    pub fn advance(&self, steps: u64, message: impl FnOnce() -> String) {
        let done = self.done.fetch_add(steps, Ordering::Relaxed) + steps;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message());
                bar.inc(steps);
            }
            None if self.is_due(done - steps, done) => output::report(&self.line(done, &message())),
            None => {}
        }
    }

    /// Prints a line of the result without disturbing the bar.
    pub fn print(&self, line: &str) -> anyhow::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| outln!("{line}")),
            None => outln!("{line}"),
        }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn is_due(&self, before: u64, done: u64) -> bool {
        let (total, elapsed) = (self.total.max(1), self.start.elapsed());
        let another = before * LINES / total < done * LINES / total;
        let ended = before < self.total && done >= self.total;
        let mut told = lock(&self.told);
        let due = (ended && self.tells_end) || (elapsed >= SHORT && (another || told.elapsed() >= SILENCE));
        if due {
            *told = Instant::now();
        }
        due
    }

    fn line(&self, done: u64, message: &str) -> String {
        let elapsed = self.start.elapsed().as_secs_f64();
        let (percent, rate) = (done * 100 / self.total.max(1), done as f64 / elapsed.max(1e-9));
        let left = self.total.saturating_sub(done) as f64 / rate.max(1e-9);
        let left = if left >= 0.5 { format!(", {} left", duration(left)) } else { String::new() };
        format!("{} {percent}%  {message}  {}{left}", self.what, self.unit.rate(rate))
    }
}

/// Formats a duration for people.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(total: u64, since: Duration) -> Progress {
        let start = Instant::now().checked_sub(since).unwrap();
        let (what, unit, told) = ("doing".to_owned(), Unit::Of("steps"), Mutex::new(start));
        Progress { bar: None, what, unit, total, tells_end: true, done: AtomicU64::new(0), start, told }
    }

    #[test]
    fn short_work_is_told_once_and_long_work_now_and_then() {
        let short = progress(100, Duration::ZERO);
        let told = (0..100).filter(|&i| short.is_due(i, i + 1)).count();
        assert_eq!(told, 1, "at its end");
        let errand = |since| Progress { tells_end: false, ..progress(100, since) };
        let [quick, slow] = [Duration::ZERO, Duration::from_secs(2)].map(errand);
        let told = |progress: &Progress| (0..100).filter(|&i| progress.is_due(i, i + 1)).count();
        assert_eq!((told(&quick), told(&slow)), (0, 10));
        let long = progress(100, Duration::from_secs(2));
        let told: Vec<u64> = (0..100).filter(|&i| long.is_due(i, i + 1)).map(|i| i + 1).collect();
        assert_eq!(told, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
        let slow = progress(1_000_000, SILENCE);
        assert!(slow.is_due(1, 2) && !slow.is_due(2, 3), "a sign of life");
    }

    #[test]
    fn lines_have_a_rate_and_the_time_that_is_left() {
        let line = progress(1000, Duration::from_secs(100)).line(250, "so far");
        assert_eq!(line, "doing 25%  so far  2 steps/s, 5 min left");
        assert_eq!(progress(10, Duration::from_secs(5)).line(10, "all"), "doing 100%  all  2 steps/s");
        assert_eq!(Unit::Bytes.rate(5_300_000.0), "5.30 MB/s");
    }
}
