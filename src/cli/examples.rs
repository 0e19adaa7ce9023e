//! The examples of one space in a log, in learning order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, anyhow};
use serde_json::Value;

use super::Failure;
use super::logs::LogFiles;
use super::progress::{Progress, Unit};
use super::rejected::{self, FirstEvents};
use super::warned::{self, Warned};
use crate::config::{Config, LearnerConfig, Method};
use crate::engine::{Applied, DeadLetter, Engine};
use crate::event::{Example, Name};
use crate::merge::{Merge, MergeState, Next, Sourced};
use crate::runner::place_of;
use crate::telemetry::Reasons;
use crate::transport::Letter;

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
        let (mut reasons, mut first) = (Reasons::default(), FirstEvents::default());
        let mut take = |applied: Vec<Applied>, number: &mut u64| {
            let examples = applied.iter().filter(|applied| applied.space == space).filter_map(|a| a.example.as_ref());
            examples.into_iter().try_for_each(|example| {
                *number += 1;
                show(example)
            })
        };
        loop {
            match merge.next().context("cannot read a log")? {
                Next::Event(event, log) => {
                    let Sourced { input, start, line, .. } = event;
                    let place = || place_of(&merge, log, start, line);
                    let effects = engine.step_from(input, || place().to_string());
                    let rejected = effects.rejects_its_event().then_some(line);
                    count(&mut reasons, effects.dead_letters, place);
                    if first.are_all_rejected(log, rejected) {
                        progress.finish();
                        return Err(rejected::hopeless(&reasons, &place()).into());
                    }
                    take(effects.applied, &mut number)?;
                }
                Next::Wait => {}
                Next::End => break,
            }
            let now = bytes_read.load(Ordering::Relaxed);
            progress.advance(now - told, || format!("{number} examples"));
            told = now;
        }
        progress.finish();
        let effects = engine.finish();
        count(&mut reasons, effects.dead_letters, Value::default);
        take(effects.applied, &mut number)?;
        rejected::conclude(&reasons, &engine.counts(), None)?;
        if number == 0 {
            let advice = "run `pointsman replay` on the same logs to see what happened to their events";
            return Err(Failure::Run(anyhow!("no example of space {space} in the logs: {advice}")));
        }
        Ok(warned::of_space(&engine, &space))
    }
}

/// Counts dead letters by reason. `place` is where the event is that led to them.
fn count(reasons: &mut Reasons, letters: Vec<DeadLetter>, place: impl Fn() -> Value) {
    for letter in letters {
        let earlier = letter.place.as_ref().map(|place| serde_json::from_str(place).unwrap_or_default());
        reasons.add(&Letter { place: earlier.unwrap_or_else(&place), letter, origin: None, time_ms: 0 });
    }
}
