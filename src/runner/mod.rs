//! Runs lanes: events come in from a merge, go through the engine, and what follows from them is made durable.
//!
//! | file | does |
//! |---|---|
//! | `lane` | a lane: merge, engine, and when a snapshot is due |
//! | `commit` | how the work of a lane becomes durable, and the thread that does it |
//! | `claim` | takes over a lane that moves between instances, and commits it in transactions |
//! | `slots` | the lanes of a process: opened, stepped and closed by several threads |
//! | `follow` | `learn`: the threads that step the slots; log files |
//! | `fleet` | `learn` on topics; lanes that many instances share |
//! | `merger` | merges the shards of a space |
//! | `repartition` | spaces that move between lanes |
//! | `clock` | time |
//! | `retry` | retries operations that may succeed later |
//! | `error` | kinds of errors |

pub mod claim;
pub mod clock;
pub mod commit;
pub mod error;
mod fleet;
pub mod follow;
pub mod lane;
mod merger;
pub mod repartition;
mod retry;
#[cfg(test)]
mod simulation;
pub mod slots;

pub use commit::Keeper;
pub use lane::{Lane, Places, Stepped, place_of};
pub use retry::Retry;

use crate::config::StoreConfig;
use crate::state::StateError;
use crate::state::repair::{Plan, Source};
use crate::store::{self, Access, DirStore, Shared, SnapshotStore, StoreError};

/// Size at which a dead-letter file is rotated.
pub const DEAD_LETTERS_BYTES: u64 = 64 << 20;

/// Opens the store of a daemon. Repairs a damaged one if every lane has an intact generation, and logs what it gives up.
pub fn open_store(config: &StoreConfig) -> Result<Shared<DirStore>, StateError> {
    let mut store = store::open(&config.dir, Access::Learn(config.kind))?;
    if store.is_damaged() {
        let plan = Plan::new(&store)?;
        if let Some(lost) = plan.lanes.iter().find(|lane| !matches!(lane.from, Source::Generation(_))) {
            let problem = format!("the database is damaged and holds no intact snapshot ({lost})");
            return Err(StoreError::Damaged { path: store.place(), problem }.into());
        }
        if plan.lanes.is_empty() {
            let problem = "the database is damaged and holds no intact snapshot".to_owned();
            return Err(StoreError::Damaged { path: store.place(), problem }.into());
        }
        for lane in &plan.lanes {
            tracing::error!(store = store.place(), plan = lane.to_string(), "repairing the damaged store");
        }
        store = plan.carry_out(store)?;
    }
    Ok(Shared::new(store))
}
