//! The examples of one space in a log, in learning order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, anyhow};

use super::Failure;
use super::logs::LogFiles;
use super::progress::{Progress, Unit};
use super::warned::{self, Warned};
use crate::config::{Config, LearnerConfig, Method};
use crate::engine::{Applied, Engine};
use crate::event::{Example, Name};
use crate::merge::{Merge, MergeState, Next};

/// A log and a space in it.
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    #[command(flatten)]
    pub files: LogFiles,
    /// Space to evaluate in the log
    #[arg(long, default_value = "default")]
    pub space: String,
}

impl LogArgs {
    /// The space's name.
    pub fn space(&self) -> Result<Name, Failure> {
        Name::try_from(self.space.as_str()).map_err(|e| Failure::Usage(anyhow!("--space: {e}")))
    }

    /// The `[learner]` keys of the space.
    pub fn learner(&self, config: &Config) -> Result<LearnerConfig, Failure> {
        match config.spaces.get(&self.space) {
            Some(keys) => {
                let section = format!("spaces.{}", self.space);
                config.learner.with_keys(&section, keys).map_err(|e| Failure::Usage(e.into()))
            }
            None => Ok(config.learner.clone()),
        }
    }

    /// Joins the log and passes every example to `show`; returns the warnings about the space.
    pub fn each(
        &self,
        config: &Config,
        doing: &'static str,
        mut show: impl FnMut(&Example) -> anyhow::Result<()>,
    ) -> Result<Vec<Warned>, Failure> {
        let space = self.space()?;
        let files = self.files.or_configured(config)?;
        let mut settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
        // Only the join of the engine is needed; it does not have to learn.
        settings.learner.method = Method::Uniform;
        settings.spaces.values_mut().for_each(|spec| spec.method = Method::Uniform);
        let state = MergeState::default();
        let (mut merge, bytes_read) = (Merge::new(settings.reorder_ms, &state), Arc::new(AtomicU64::new(0)));
        let total = files.add_to(&mut merge, &settings, &state, &bytes_read)?;
        let mut engine = Engine::new(settings);
        engine.show_examples();
        let progress = Progress::new(doing, total, Unit::Bytes);
        let (mut told, mut number) = (0, 0);
        let mut take = |applied: Vec<Applied>, number: &mut u64| {
            let examples = applied.iter().filter(|applied| applied.space == space).filter_map(|a| a.example.as_ref());
            examples.into_iter().try_for_each(|example| {
                *number += 1;
                show(example)
            })
        };
        loop {
            match merge.next().context("cannot read a log")? {
                // Dead letters are discarded here: `replay` reports them.
                Next::Event(event, _) => take(engine.step(event.input).applied, &mut number)?,
                Next::Wait => {}
                Next::End => break,
            }
            let now = bytes_read.load(Ordering::Relaxed);
            progress.advance(now - told, || format!("{number} examples"));
            told = now;
        }
        progress.finish();
        take(engine.finish().applied, &mut number)?;
        if number == 0 {
            let advice = "run `pointsman replay` on the same logs to see what happened to their events";
            return Err(Failure::Run(anyhow!("no example of space {space} in the logs: {advice}")));
        }
        Ok(warned::of_space(&engine, &space))
    }
}
