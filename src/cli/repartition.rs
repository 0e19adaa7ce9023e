//! `pointsman repartition`: moves spaces to their new lanes after partitions were added.

use serde_json::json;

use super::Failure;
use super::output::outln;
use super::progress::{Progress, Unit};
use crate::config::{Config, Lanes};
use crate::runner::repartition::repartition;
use crate::transport::kafka::cluster::Cluster;

/// Move spaces to their new lanes after partitions were added (transport.kafka.lanes = "partition")
///
/// A space belongs to the partition of its key; with more partitions, most spaces belong to another one. Steps: (1) stop the
/// producers of events; (2) stop all learners; (3) run `pointsman learn --once` to read what is left; (4) add partitions to the
/// topics queries, rewards and snapshots, the same number to each; (5) run `pointsman repartition`; (6) start the learners, then
/// the producers.
///
/// The states of all lanes are held in memory during the move. The move is atomic and can be repeated.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Continue although some messages have not been learned: those of moving spaces become dead letters
    #[arg(long)]
    accept_gap: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman learn --config shop.toml --once
  kafka-topics.sh --bootstrap-server broker:9092 --alter --topic queries --partitions 24
  (the same for the topics rewards and pointsman-snapshots)
  pointsman repartition --config shop.toml";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    config.check().map_err(|e| Failure::Usage(e.into()))?;
    let kafka = &config.transport.kafka;
    if kafka.lanes != Lanes::Partition {
        let problem = "transport.kafka.lanes = \"one\": repartition applies to \"partition\" only; with one lane, partitions can \
                       be added at any time";
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
            "{} partitions (before: {}): moved {} of {} spaces",
            moved.now,
            moved.before,
            moved.moved,
            moved.spaces
        )?;
    }
    Ok(())
}
