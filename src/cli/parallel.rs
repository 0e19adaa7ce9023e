//! Independent work on all cores.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Runs all jobs; the results are in the order of the jobs, regardless of the number of cores.
pub fn map<J: Sync, T: Send>(jobs: &[J], work: impl Fn(&J) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let Some((i, job)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, jobs.get(i)?))) {
            done.push((i, work(job)));
        }
        done
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut all: Vec<(usize, T)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_are_in_the_order_of_jobs() {
        for n in [0, 1, 7, 100] {
            let jobs: Vec<usize> = (0..n).collect();
            assert_eq!(super::map(&jobs, |i| i * i), jobs.iter().map(|i| i * i).collect::<Vec<_>>());
        }
    }
}
