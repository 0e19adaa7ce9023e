//! `pointsman route`: the router sidecar.

use std::sync::Arc;

use anyhow::Context;

use super::Failure;
use crate::config::{Config, Settings};
use crate::http::raise_descriptor_limit;
use crate::router::{DrawKey, Router};
use crate::serve::{Load, Reload, Routing, Signals, listen};

/// Run the router sidecar: chooses a model for each query over HTTP and logs the decision
///
/// With transport.kind = "file" it reads the parameters from params/ in transport.file.dir, reloads them when they are
/// replaced, and writes decisions to queries/ and rewards to rewards/, where `learn` reads them; with "kafka" it uses the
/// topics of transport.kafka.topics. It listens on http.listen (by default on loopback) and serves a status page at /. On
/// SIGTERM or SIGINT it finishes open requests and exits with 0. On SIGHUP or POST /v1/reload it reads its configuration again,
/// as `learn` does.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Report ready without parameters: route uniformly (or to router.fallback_model) until some are published
    #[arg(long)]
    serve_uniform: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman route --config shop.toml --serve-uniform &
  curl -s localhost:9464/v1/route --json '{\"query\": [0.1, 0.2, ...]}'
  curl -s localhost:9464/v1/rewards --json '{\"request_id\": \"...\", \"reward\": 1}'

GET /openapi.json describes all endpoints.

Exit codes: 0 stopped by a signal, 1 failed while running, 2 invalid usage or configuration.";

/// Runs the command.
pub fn run(args: &Args, config: &Config, load: Load) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    raise_descriptor_limit();
    let key = DrawKey::new(config.router.key.0.as_bytes()).map_err(|e| Failure::Usage(e.into()))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the async runtime")?;
    Ok(runtime.block_on(serve(args, config, settings, Router::new(key), load))?)
}

async fn serve(args: &Args, config: &Config, settings: Settings, router: Router, load: Load) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let server = listen(&config.http, Arc::default(), "a free address").await?;
    let url = server.url();
    let routing = Routing::start(config, &settings, router, args.serve_uniform, server)?;
    tracing::info!(listen = url, transport = %config.transport.kind, "router started");
    let stop = async move { tracing::info!("received {}, stopping", signals.received().await) };
    let reload = Reload::new(config, load);
    reload.on_hangup()?;
    routing.serve(None, reload, stop).await
}
