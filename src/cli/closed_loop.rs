//! The whole loop in one process, made of the real components: a router that draws by request id, event logs in files, the
//! lane that joins, learns, snapshots and publishes, and parameters that the router reads back.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};

use crate::config::{Settings, SnapshotConfig, StoreKind};
use crate::eligible::Eligible;
use crate::event::{Name, Query};
use crate::feedback::Feedback;
use crate::hpg::spectra::Eigen;
use crate::learner::Decision;
use crate::router::{Compiled, DrawKey, Router};
use crate::runner::{Keeper, Lane, Places, Retry, Stepped};
use crate::simulate::run::{Plan, Stack};
use crate::state::{LocalLane, Retention};
use crate::store::{self, Access, ONE_LANE, Shared};
use crate::transport::append::Appender;
use crate::transport::directory::Directory;
use crate::transport::file::{AtEnd, LogFile};
use crate::transport::params::{Files, ParamsDir};
use crate::wire::events::{Parser, query_line, reward_line};

/// Length of a round, in event time.
const ROUND_MS: u64 = 1000;

/// Router, logs and learner under one directory.
pub struct ClosedLoop {
    space: Name,
    router: Router,
    queries: BufWriter<File>,
    rewards: BufWriter<File>,
    directory: Directory,
    lane: Lane<LogFile>,
    params: ParamsDir,
    refresh: u64,
}

impl ClosedLoop {
    /// An empty stack under `dir`. Its router is updated every `refresh` rounds.
    pub fn new(dir: &Path, mut settings: Settings, plan: &Plan) -> anyhow::Result<Self> {
        // The simulation writes in order, and a reward is never later than this.
        settings.reorder_ms = 0;
        settings.join.window_ms = plan.delay.saturating_add(2).saturating_mul(ROUND_MS);
        let space = Name::default_space();
        let router = Router::new(DrawKey::new(format!("seed {}", plan.seed).as_bytes())?);
        let spec = settings.learner.clone();
        router.begin(Compiled::unlearned(space.clone(), spec.models, spec.dim, None));
        let params = ParamsDir::new(&dir.join("params"));
        let store = store::open(&dir.join("store"), Access::Create(StoreKind::Redb))?;
        let places = Places {
            store: Some(LocalLane::new(Shared::new(store), ONE_LANE, Retention::newest(1))),
            audit: None,
            outlet: Box::new(Files {
                dead_letters: Appender::new(&dir.join("dead-letters.jsonl")),
                params: Some(params.clone()),
            }),
            published: Vec::new(),
            facts: Arc::default(),
            retry: Retry::never(),
        };
        // Snapshots are taken when the router is to be updated, and then only.
        let cadence = SnapshotConfig { every_updates: u64::MAX, every_ms: u64::MAX, ..SnapshotConfig::default() };
        // The loop waits for each snapshot anyway.
        let (mut lane, state) = Lane::open(&settings, &cadence, places, |commit| Ok(Keeper::here(commit)))?;
        let at_end = AtEnd::Follow { idle: Duration::ZERO };
        let directory =
            Directory::new(dir, Arc::new(Parser::new(&settings)), at_end, state.positions.clone(), Arc::default());
        directory.create()?;
        lane.begin(state)?;
        let log =
            |side: &str| Ok::<_, std::io::Error>(BufWriter::new(File::create(dir.join(side).join("demo.jsonl"))?));
        let (queries, rewards) = (log("queries")?, log("rewards")?);
        Ok(Self { space, router, queries, rewards, directory, lane, params, refresh: plan.refresh })
    }

    /// The learner's parameters.
    pub fn eigens(&self) -> Vec<Eigen> {
        self.lane.engine.spaces().next().map(|view| view.eigens).unwrap_or_default()
    }

    /// Learns everything logged so far.
    fn learn(&mut self) -> anyhow::Result<()> {
        self.queries.flush()?;
        self.rewards.flush()?;
        self.directory.scan(&mut self.lane.merge)?;
        while let Stepped::Event { .. } = self.lane.step()? {}
        let dead = self.lane.engine.counts();
        if dead.queries_dead + dead.rewards_dead > 0 {
            return Err(anyhow!(
                "the simulated router wrote events that the learner rejects: this is a bug, please report it"
            ));
        }
        Ok(())
    }
}

impl Stack for ClosedLoop {
    type Error = anyhow::Error;

    fn begin(&mut self, round: u64) -> anyhow::Result<()> {
        if round > 0 && round.is_multiple_of(self.refresh) {
            self.learn()?;
            self.lane.snapshot()?;
            for params in self.params.published() {
                self.router.offer(params);
            }
        }
        Ok(())
    }

    fn decide(&mut self, round: u64, query: &Query, _: &Eligible, _luck: f64) -> anyhow::Result<Decision> {
        // The worlds of the demo let all models answer.
        let query: Vec<f32> = query.as_slice().iter().map(|&x| x as f32).collect();
        let request_id = request_id(round);
        let answer = self
            .router
            .route(&self.space, &request_id, &query)
            .context("the router does not know the space of the demo")??;
        let ts_ms = (round * ROUND_MS) as i64;
        self.queries.write_all(&query_line(&request_id, ts_ms, &query, &answer))?;
        Ok(Decision { model: answer.model, distribution: answer.distribution })
    }

    fn reward(&mut self, round: u64, now: u64, reward: f64) -> anyhow::Result<()> {
        // Before the query of its round, which begins then.
        let ts_ms = (now * ROUND_MS - 1) as i64;
        let feedback = Feedback::reward(reward);
        self.rewards.write_all(&reward_line(&request_id(round), &self.space, ts_ms, &feedback, None))?;
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.learn()?;
        self.lane.close_windows();
        Ok(self.lane.finish()?)
    }
}

fn request_id(round: u64) -> String {
    format!("r-{round}")
}
