//! `pointsman topics`: creates and checks the Kafka topics.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use serde_json::json;

use super::Failure;
use super::output::{out, outln, width};
use crate::config::Config;
use crate::report::{Column, Table};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::topics::{Found, init};

/// Create and check the Kafka topics: queries, rewards, parameters, snapshots, dead letters
///
/// The names come from transport.kafka.topics. Existing topics are never changed; every difference from the required settings
/// is reported.
///
/// Exit codes: 0 all topics are correct, 1 a topic differs or the cluster is unreachable, 2 invalid usage or configuration.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  pointsman topics init --set transport.kafka.brokers=broker:9092
  pointsman topics init --config shop.toml --set transport.kafka.create.replication=3
  pointsman topics check --config shop.toml --json";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Create missing topics with the settings in transport.kafka.create, and check the others
    Init(Shown),
    /// Check the topics without creating any
    Check(Shown),
}

/// Output options.
#[derive(Debug, clap::Args)]
struct Shown {
    /// Write the table to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let (shown, check) = match &args.command {
        Command::Init(shown) => (shown, false),
        Command::Check(shown) => (shown, true),
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the async runtime")?;
    let found = runtime.block_on(async {
        let cluster = Cluster::new(&config.transport.kafka)?;
        cluster.reach()?;
        init(&cluster, &settings, check).await
    });
    let found = found.map_err(anyhow::Error::from)?;
    let table = table(&found);
    super::write_csv(shown.csv.as_deref(), &[&table])?;
    if shown.json {
        outln!("{}", json!({ "topics": found }))?;
    } else {
        out!("{}", table.text(width()))?;
    }
    match found.iter().map(|topic| topic.differences.len()).sum::<usize>() {
        0 => Ok(()),
        number => Err(anyhow!("{number} topic settings differ from what Pointsman requires: see the table").into()),
    }
}

fn table(found: &[Found]) -> Table {
    let row = |topic: &Found| {
        let state = match (topic.created, topic.differences.is_empty()) {
            (true, _) => "created".to_owned(),
            (false, true) => "ok".to_owned(),
            (false, false) => topic.differences.join("; "),
        };
        vec![topic.topic.clone(), topic.partitions.to_string(), state]
    };
    let columns = vec![Column::left("topic"), Column::right("partitions"), Column::left("state")];
    Table { columns, rows: found.iter().map(row).collect(), note: None }
}
