//! Reloads files when they change: certificates and tokens.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;

use crate::telemetry::HttpCounters;

/// Interval between two reads of the files. Only reading them detects every kind of replacement: edits in place, renames,
/// and the symbolic links that Kubernetes swaps.
const EVERY: Duration = Duration::from_secs(1);

/// Reads whole files, in order.
pub fn read_all(paths: &[PathBuf]) -> anyhow::Result<Vec<Vec<u8>>> {
    let read = |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    paths.iter().map(read).collect()
}

/// Reads `paths` and passes their contents to `take`, now and, in the background, whenever they change. An invalid change
/// is logged and counted once; the last valid contents stay in use.
pub fn follow(
    what: &'static str,
    paths: Vec<PathBuf>,
    counters: Arc<HttpCounters>,
    take: impl Fn(&[Vec<u8>]) -> anyhow::Result<()> + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let contents = read_all(&paths)?;
    take(&contents).with_context(|| named(&paths))?;
    let take = Arc::new(take);
    // What was tried last: its contents, or why they could not be read.
    let mut tried = Ok(contents);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(EVERY).await;
            let (paths_read, take) = (paths.clone(), take.clone());
            let read = tokio::task::spawn_blocking(move || read_all(&paths_read).map_err(|e| format!("{e:#}")));
            let Ok(found) = read.await else { continue };
            if found == tried {
                continue;
            }
            let taken = match &found {
                Ok(contents) => take(contents).map_err(|e| format!("{e:#}")),
                Err(problem) => Err(problem.clone()),
            };
            match taken {
                Ok(()) => tracing::info!(what, paths = named(&paths), "reloaded"),
                Err(problem) => {
                    counters.reload_errors.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(what, paths = named(&paths), problem, "cannot reload; keeping the old contents");
                }
            }
            tried = found;
        }
    });
    Ok(())
}

fn named(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| Path::display(path).to_string()).collect::<Vec<_>>().join(", ")
}
