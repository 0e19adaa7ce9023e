//! `pointsman topics`: the topics that Pointsman needs.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use serde_json::json;

use super::Failure;
use super::output::{out, outln, width};
use crate::config::Config;
use crate::report::{Column, Table};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::topics::{Found, init};

/// Make and check the Kafka topics: queries, rewards, parameters, snapshots, dead letters
///
/// Their names are those of transport.kafka.topics. Topics that are there are never changed: what is not as it should be
/// is explained, and the exit code is then 1.
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
    /// Make the topics that are missing, as transport.kafka.create says, and check the others
    Init(Shown),
    /// Only check them
    Check(Shown),
}

/// How it is shown.
#[derive(Debug, clap::Args)]
struct Shown {
    /// File for the table as comma-separated values
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
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
        number => Err(anyhow!("{number} things are not as they should be").into()),
    }
}

fn table(found: &[Found]) -> Table {
    let row = |topic: &Found| {
        let state = match (topic.created, topic.differences.is_empty()) {
            (true, _) => "made".to_owned(),
            (false, true) => "good".to_owned(),
            (false, false) => topic.differences.join("; "),
        };
        vec![topic.topic.clone(), topic.partitions.to_string(), state]
    };
    let columns = vec![Column::left("topic"), Column::right("partitions"), Column::left("state")];
    Table { columns, rows: found.iter().map(row).collect(), note: None }
}
