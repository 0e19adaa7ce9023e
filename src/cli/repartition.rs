//! `pointsman repartition`: spaces follow their partitions when a topic has grown.

use serde_json::json;

use super::Failure;
use super::output::outln;
use super::progress::{Progress, Unit};
use crate::config::{Config, Lanes};
use crate::runner::repartition::repartition;
use crate::transport::kafka::cluster::Cluster;

/// Move spaces to the lanes of their new partitions, after topics have grown (transport.kafka.lanes = "partition")
///
/// A space is where its key's partition is; with more partitions, most have another. In this order: stop what writes
/// events; stop the fleet; `pointsman learn --once`, to read all that is there; add partitions to queries, to rewards and to
/// snapshots, as many to each; `pointsman repartition`; start the fleet, then what writes events. The states of all lanes
/// are held in memory meanwhile. It is done as a whole or not at all, and can be run again.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Go on although there are messages that were not learned from: those of spaces that move become dead letters
    #[arg(long)]
    accept_gap: bool,
    /// Print what was done as one JSON object
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman learn --config shop.toml --once
  kafka-topics.sh --bootstrap-server broker:9092 --alter --topic queries --partitions 24   (rewards, pointsman-snapshots too)
  pointsman repartition --config shop.toml";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    config.check().map_err(|e| Failure::Usage(e.into()))?;
    let kafka = &config.transport.kafka;
    if kafka.lanes != Lanes::Partition {
        let problem = "transport.kafka.lanes = \"one\": all partitions are one lane, and may grow as they are";
        return Err(Failure::Usage(anyhow::anyhow!(problem)));
    }
    let cluster = Cluster::new(kafka).map_err(anyhow::Error::from)?;
    cluster.reach().map_err(anyhow::Error::from)?;
    let mut progress = None;
    let tell = |lane: i32, lanes: usize| {
        let errand = || Progress::of_errand("reading", lanes as u64, Unit::Of("lanes"));
        progress.get_or_insert_with(errand).advance(1, || format!("lane {lane}"));
    };
    let moved = repartition(&cluster, args.accept_gap, tell);
    if let Some(progress) = &progress {
        progress.finish();
    }
    let moved = moved?;
    if args.json {
        outln!("{}", json!(moved))?;
    } else {
        outln!(
            "{} partitions, were {}: {} of {} spaces have moved",
            moved.now,
            moved.before,
            moved.moved,
            moved.spaces
        )?;
    }
    Ok(())
}
