//! Progress of long work with rate and remaining time: a bar on a terminal, periodic lines elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, HumanDuration, ProgressBar, ProgressState, ProgressStyle};

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

/// Progress of jobs that run on all cores, in order, to standard error. Steps of different kinds of jobs differ in cost, by
/// orders of magnitude: the remaining time is estimated from the measured cost of each kind.
pub struct Jobs {
    progress: Progress,
    costs: Arc<Mutex<Costs>>,
}

impl Jobs {
    /// Starts the progress of jobs of these kinds, of `steps` each.
    pub fn new(what: &str, kinds: Vec<usize>, steps: u64, unit: Unit) -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let total = steps.saturating_mul(kinds.len() as u64);
        let costs = Arc::new(Mutex::new(Costs::new(kinds, steps, threads)));
        let shared = costs.clone();
        let left = move || lock(&shared).left(Instant::now());
        Self { progress: Progress::with_estimate(what, total, unit, Some(Arc::new(left))), costs }
    }

    /// Starts a job.
    pub fn begin(&self, job: usize) {
        lock(&self.costs).begin(job, Instant::now());
    }

    /// Adds completed steps of a job. `message` describes the state and is called only when it is shown.
    pub fn advance(&self, job: usize, steps: u64, message: impl FnOnce() -> String) {
        lock(&self.costs).add(job, steps, Instant::now());
        self.progress.advance(steps, message);
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.progress.finish();
    }
}

/// What the jobs have cost so far.
struct Costs {
    jobs: Vec<JobCost>,
    steps: u64,
    threads: usize,
}

struct JobCost {
    kind: usize,
    done: u64,
    /// From its start to its last report.
    spent: Duration,
    started: Option<Instant>,
}

impl Costs {
    fn new(kinds: Vec<usize>, steps: u64, threads: usize) -> Self {
        let jobs = kinds.into_iter().map(|kind| JobCost { kind, done: 0, spent: Duration::ZERO, started: None });
        Self { jobs: jobs.collect(), steps, threads }
    }

    fn begin(&mut self, job: usize, now: Instant) {
        if let Some(job) = self.jobs.get_mut(job) {
            job.started = Some(now);
        }
    }

    fn add(&mut self, job: usize, steps: u64, now: Instant) {
        let Some(job) = self.jobs.get_mut(job) else { return };
        job.done += steps;
        job.spent = now.saturating_duration_since(*job.started.get_or_insert(now));
    }

    /// Seconds per step of a kind, if any were measured.
    fn per_step(&self, kind: usize) -> Option<f64> {
        let own = self.jobs.iter().filter(|job| job.kind == kind && job.done > 0);
        let (steps, spent) =
            own.fold((0, 0.0), |(steps, spent), job| (steps + job.done, spent + job.spent.as_secs_f64()));
        (steps > 0).then(|| spent / steps as f64)
    }

    /// The remaining time: that of the thread that finishes last, if each takes the next job when it is done.
    fn left(&self, now: Instant) -> Left {
        let (mut busy, mut is_complete) = (Vec::new(), true);
        for job in self.jobs.iter().filter(|job| job.done < self.steps) {
            let cost = self.per_step(job.kind);
            is_complete &= cost.is_some();
            let whole = cost.unwrap_or(0.0) * (self.steps - job.done) as f64;
            let since = job
                .started
                .map_or(0.0, |started| now.saturating_duration_since(started).saturating_sub(job.spent).as_secs_f64());
            let seconds = (whole - since).max(0.0);
            if busy.len() < self.threads {
                busy.push(seconds);
            } else if let Some(first) = busy.iter_mut().min_by(|a, b| a.total_cmp(b)) {
                *first += seconds;
            }
        }
        Left { seconds: busy.into_iter().fold(0.0, f64::max), is_complete }
    }
}

/// An estimate of the remaining time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Left {
    seconds: f64,
    /// Whether all kinds of work were measured; otherwise it takes longer.
    is_complete: bool,
}

impl Left {
    fn text(self) -> String {
        match self.is_complete {
            true => duration(self.seconds),
            false => format!("more than {}", duration(self.seconds)),
        }
    }
}

/// Estimates the remaining time.
type Estimate = Arc<dyn Fn() -> Left + Send + Sync>;

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
    /// How the remaining time is estimated, if not by the mean rate.
    estimate: Option<Estimate>,
}

impl Progress {
    /// Starts the progress of work that is usually short: reports only if it takes long.
    pub fn of_errand(what: &str, total: u64, unit: Unit) -> Self {
        Self { tells_end: false, ..Self::new(what, total, unit) }
    }

    /// Starts the progress.
    pub fn new(what: &str, total: u64, unit: Unit) -> Self {
        Self::with_estimate(what, total, unit, None)
    }

    fn with_estimate(what: &str, total: u64, unit: Unit, estimate: Option<Estimate>) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let rate = move |state: &ProgressState, text: &mut dyn std::fmt::Write| {
                // Writing into a line cannot fail.
                let _ = text.write_str(&unit.rate(state.per_sec()));
            };
            let own = estimate.clone();
            let left = move |state: &ProgressState, text: &mut dyn std::fmt::Write| {
                let _ = match &own {
                    Some(own) => text.write_str(&own().text()),
                    None => write!(text, "{:#}", HumanDuration(state.eta())),
                };
            };
            let template = "{prefix} {bar:32} {percent:>3}%  {msg}  {rate}, {left} left";
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(total).with_prefix(what.to_owned());
            bar.set_style(style.with_key("rate", rate).with_key("left", left));
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        let start = Instant::now();
        let (what, done, told) = (what.to_owned(), AtomicU64::new(0), Mutex::new(start));
        Self { bar, what, unit, total, tells_end: true, done, start, told, estimate }
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
        let by_rate = || Left { seconds: self.total.saturating_sub(done) as f64 / rate.max(1e-9), is_complete: true };
        let left = self.estimate.as_ref().map_or_else(by_rate, |estimate| estimate());
        let is_over = left.is_complete && left.seconds < 0.5;
        let left = if is_over { String::new() } else { format!(", {} left", left.text()) };
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
        Progress { bar: None, what, unit, total, tells_end: true, done: AtomicU64::new(0), start, told, estimate: None }
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
    fn the_time_that_is_left_is_by_the_cost_of_each_kind() {
        // Two threads, two cheap jobs and two that cost a hundred times as much.
        let mut costs = Costs::new(vec![0, 1, 0, 1], 100, 2);
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        [0, 1].into_iter().for_each(|job| costs.begin(job, start));
        costs.add(0, 50, at(5));
        assert_eq!(costs.left(at(5)), Left { seconds: 10.0, is_complete: false }, "the other kind is unknown");
        costs.add(0, 50, at(10));
        costs.add(1, 1, at(10));
        assert_eq!(
            costs.left(at(10)),
            Left { seconds: 1010.0, is_complete: true },
            "of two long jobs the second is last"
        );
        costs.begin(2, at(10));
        assert_eq!(costs.left(at(12)), Left { seconds: 1008.0, is_complete: true }, "time passes between reports");
        costs.add(2, 100, at(20));
        assert_eq!(costs.per_step(0), Some(0.1));
        costs.begin(3, at(20));
        costs.add(3, 1, at(30));
        assert_eq!(costs.per_step(1), Some(10.0));
        assert_eq!(costs.left(at(30)), Left { seconds: 990.0, is_complete: true });
        let unknown = Left { seconds: 90.0, is_complete: false };
        assert_eq!(unknown.text(), "more than 90 s");
    }

    #[test]
    fn lines_have_a_rate_and_the_time_that_is_left() {
        let line = progress(1000, Duration::from_secs(100)).line(250, "so far");
        assert_eq!(line, "doing 25%  so far  2 steps/s, 5 min left");
        assert_eq!(progress(10, Duration::from_secs(5)).line(10, "all"), "doing 100%  all  2 steps/s");
        assert_eq!(Unit::Bytes.rate(5_300_000.0), "5.30 MB/s");
    }
}
