//! The files of a log: those that a command names, or those that the configuration names.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context, anyhow};

use super::Failure;
use crate::config::{Config, LogsConfig, Settings};
use crate::engine::Side;
use crate::merge::{Merge, MergeState};
use crate::transport::ahead::{self, Ahead};
use crate::transport::directory::{base_name, log_name};
use crate::transport::file::{AtEnd, LogFile, fingerprint};
use crate::wire::events::Parser;

/// The files of a log: JSON lines (.jsonl), CSV (.csv, .tsv), both also as .gz and .zst, or Parquet (.parquet).
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LogFiles {
    /// Logs of query events: .jsonl or .csv, also with .gz or .zst, or .parquet [default: logs.queries]
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub queries: Vec<PathBuf>,
    /// Logs of reward events [default: logs.rewards]
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub rewards: Vec<PathBuf>,
    /// Logs with a query, its model and its reward in each row. Rows without an ID or a time get one from their order; rows
    /// without a reward are queries without one (join.on_missing) [default: logs.examples]
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub examples: Vec<PathBuf>,
}

impl LogFiles {
    /// These files, or the configured ones if none are named.
    pub fn or_configured(&self, config: &Config) -> Result<Self, Failure> {
        let LogsConfig { queries, rewards, examples } = config.logs.clone();
        let configured = Self { queries, rewards, examples };
        let (files, source) = match self.is_empty() {
            true => (configured, "section logs of the configuration"),
            false => (self.clone(), "the command line"),
        };
        let problem = match (files.queries.is_empty(), files.rewards.is_empty(), files.examples.is_empty()) {
            (true, true, true) => {
                "no logs: name them with --queries and --rewards, or --examples for logs with a query and its reward in each \
                 row; or write a configuration that names them with `pointsman init FILE..`"
                    .to_owned()
            }
            (true, false, _) => format!("{source} names rewards but no queries: add the logs of query events"),
            (false, true, _) => format!(
                "{source} names queries but no rewards: add the logs of reward events, or use --examples if each row holds a \
                 query and its reward"
            ),
            _ => return Ok(files),
        };
        Err(Failure::Usage(anyhow!(problem)))
    }

    /// Whether no files are named.
    pub fn is_empty(&self) -> bool {
        self.queries.is_empty() && self.rewards.is_empty() && self.examples.is_empty()
    }

    /// Adds all logs, each at its position in the state; returns the number of bytes to read.
    pub fn add_to(
        &self,
        merge: &mut Merge<Ahead>,
        settings: &Settings,
        state: &MergeState,
        bytes_read: &Arc<AtomicU64>,
    ) -> anyhow::Result<u64> {
        let parser = Arc::new(Parser::new(settings));
        let reader = ahead::Reader::start()?;
        let of = |paths: &[PathBuf], side: Side, is_examples: bool| {
            paths.iter().map(|path| (path.clone(), side, is_examples)).collect::<Vec<_>>()
        };
        let logs = [
            of(&self.queries, Side::Query, false),
            of(&self.rewards, Side::Reward, false),
            of(&self.examples, Side::Query, true),
            of(&self.examples, Side::Reward, true),
        ];
        let mut names = BTreeMap::<String, u32>::new();
        let mut total = 0;
        for (path, side, is_examples) in logs.concat() {
            let cannot = || format!("cannot read {}", path.display());
            total += std::fs::metadata(&path).with_context(cannot)?.len();
            let Some(print) = fingerprint(&path, AtEnd::Complete).with_context(cannot)? else { continue };
            let base = base_name(&path).or_else(|| path.file_name()?.to_str()).unwrap_or_default();
            let mut name = log_name(side, base, print);
            let copies = names.entry(name.clone()).or_default();
            *copies += 1;
            if *copies > 1 {
                name = format!("{name}~{copies}");
            }
            let position = state.positions.get(&name);
            let mut log = LogFile::new(&path, side, parser.clone(), AtEnd::Complete, position, bytes_read.clone());
            if is_examples {
                log = log.of_examples(format!("{print:016x}"));
            }
            let first_ms = if position.is_none() { log.first_ms().with_context(cannot)? } else { None };
            merge.add(name, reader.follow(log), position.cloned(), first_ms);
        }
        Ok(total)
    }
}
