//! Routes inside your own process: loads a parameters file, routes a query, logs the decision.
//!
//! ```sh
//! cargo run --example embed_learner -- params.safetensors
//! cargo run --example embed_router -- params.safetensors data/log/queries/app.jsonl
//! ```
//!
//! The learner reads the log: with `transport.file.dir = "data/log"` it follows every file in `queries/`.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pointsman::event::Name;
use pointsman::router::{DrawKey, Router};
use pointsman::wire::events::query_line;
use pointsman::wire::params;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [params, log] = arguments.as_slice() else { return Err("usage: embed_router PARAMS LOG".into()) };
    for (request_id, query) in [("r-1", [0.9, 0.1, 0.0]), ("r-2", [0.1, 0.9, 0.0])] {
        let model = route(Path::new(params), Path::new(log), request_id, &query)?;
        println!("{request_id}: {model}");
    }
    Ok(())
}

/// Routes one query: the name of the model that must answer it.
///
/// A service keeps the router and offers it new parameters as the learner publishes them. Routing never waits for that.
pub fn route(params: &Path, log: &Path, request_id: &str, query: &[f32]) -> Result<String, Box<dyn Error>> {
    // Every router of a space uses the same key (router.key), so that all draw alike for one request.
    let router = Router::new(DrawKey::new(b"pointsman")?);
    router.offer(params::decode(&fs::read(params)?)?);
    let answer =
        router.route(&Name::try_from("default")?, request_id, query).ok_or("no parameters of this space")??;

    let now_ms = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
    if let Some(directory) = log.parent() {
        fs::create_dir_all(directory)?;
    }
    let mut log = File::options().create(true).append(true).open(log)?;
    log.write_all(&query_line(request_id, now_ms, query, &answer))?;
    Ok(answer.model_name().to_string())
}
