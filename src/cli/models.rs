//! `pointsman models`: lists, rests and wakes the models of a running router.

use std::time::Duration;

use anyhow::{Context, anyhow};
use serde_json::{Value, json};

use super::Failure;
use super::client::{self, Trust};
use super::output::{out, outln, width};
use super::params::utc;
use crate::config::{Config, REST_MS_MAX};
use crate::event::{ModelName, Name};
use crate::report::{Column, Table};

/// List, rest and wake the models of a running router
///
/// A resting model answers no request. A model rests after router.failures_max failures in a row, for router.cooldown_ms, or
/// because an operator rests it: before maintenance, or while its provider has an outage. What it has learned stays.
///
/// A rest is kept by one router, until that router stops. Run the command for each router. `rest` and `wake` need a token of
/// the role admin, `list` one of the role read.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  pointsman models list
  pointsman models rest bge --for 10m
  pointsman models wake bge
  pointsman models rest BAAI/bge-small-en-v1.5 --space shop --url http://router:9464";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the models of each space, and which of them rest
    List {
        /// Only this space
        #[arg(long)]
        space: Option<String>,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        router: RouterArgs,
    },
    /// Rest a model: it answers no request until the time is over, or until it is woken
    ///
    /// If no other model may answer a request, the request is an error (422; 503 if all models rest), or router.fallback_model
    /// answers it. A second `rest` replaces the first.
    Rest {
        /// Model
        #[arg(value_name = "NAME")]
        model: String,
        /// Space of the model
        #[arg(long, default_value = "default")]
        space: String,
        /// Length of the rest, e.g. 90s, 10m, 2h or 1d [default: until it is woken]
        #[arg(long = "for", value_name = "TIME", value_parser = duration_ms)]
        for_ms: Option<u64>,
        #[command(flatten)]
        router: RouterArgs,
    },
    /// Wake a model: it answers requests again, whatever made it rest, and its failures are forgotten
    Wake {
        /// Model
        #[arg(value_name = "NAME")]
        model: String,
        /// Space of the model
        #[arg(long, default_value = "default")]
        space: String,
        #[command(flatten)]
        router: RouterArgs,
    },
}

/// Which router.
#[derive(Debug, clap::Args)]
struct RouterArgs {
    /// URL of the router, http:// or https:// [default: http.listen, on this machine]
    #[arg(long)]
    url: Option<String>,
    /// Bearer token [default: http.token, e.g. from POINTSMAN__HTTP__TOKEN]
    #[arg(long)]
    token: Option<String>,
}

/// How long a router may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    match &args.command {
        Command::List { space, json, router } => {
            let mut listed = Caller::new(router, config)?.call("/v1/models", None)?;
            if let Some(space) = space {
                keep(&mut listed, space)?;
            }
            if *json {
                outln!("{listed}")?;
            } else {
                out!("{}", table(&listed).text(width()))?;
            }
        }
        Command::Rest { model, space, for_ms, router } => {
            let body = json!({"space": checked(model, space)?, "resting": true, "for_ms": for_ms});
            let rest = Caller::new(router, config)?.call(&path(model), Some(&body))?;
            let until = rest["until_ms"].as_u64().map_or_else(|| "it is woken".to_owned(), utc);
            outln!("{model} of space {space} rests until {until}")?;
        }
        Command::Wake { model, space, router } => {
            let body = json!({"space": checked(model, space)?, "resting": false});
            Caller::new(router, config)?.call(&path(model), Some(&body))?;
            outln!("{model} of space {space} does not rest")?;
        }
    }
    Ok(())
}

/// Checks both names; returns the space.
fn checked(model: &str, space: &str) -> Result<Name, Failure> {
    ModelName::try_from(model).map_err(|bad| Failure::Usage(bad.into()))?;
    Name::try_from(space).context("--space").map_err(Failure::Usage)
}

struct Caller {
    agent: ureq::Agent,
    url: String,
    token: String,
}

impl Caller {
    fn new(args: &RouterArgs, config: &Config) -> Result<Self, Failure> {
        let url = match &args.url {
            Some(url) => client::check_url(url).context("--url").map_err(Failure::Usage)?,
            None => client::local(&config.http),
        };
        let trust = Trust::load(&config.http.tls).map_err(Failure::Usage)?;
        let token = args.token.clone().unwrap_or_else(|| config.http.token.0.clone());
        Ok(Self { agent: client::agent(TIMEOUT, 1, trust), url, token })
    }

    /// Gets a path, or puts a body to it.
    fn call(&self, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url);
        let token = (!self.token.is_empty()).then(|| format!("Bearer {}", self.token));
        let answer = match body {
            None => {
                let request = self.agent.get(&url);
                token.iter().fold(request, |request, token| request.header("authorization", token)).call()
            }
            Some(body) => {
                let request = self.agent.put(&url).header("content-type", "application/json");
                let request = token.iter().fold(request, |request, token| request.header("authorization", token));
                request.send(body.to_string())
            }
        };
        let mut answer = answer.with_context(|| format!("no answer from {url}"))?;
        let (status, text) = (answer.status(), answer.body_mut().read_to_string().unwrap_or_default());
        let found = serde_json::from_str::<Value>(&text).ok();
        if status.is_success() {
            return found.with_context(|| format!("{url} sent an invalid answer; is it a Pointsman router?"));
        }
        let detail = found.and_then(|problem| Some(problem["detail"].as_str()?.to_owned()));
        Err(anyhow!("{url}: {status}: {}", detail.unwrap_or_else(|| text.trim().to_owned())))
    }
}

/// The path of a model. Every byte is encoded that has a meaning in a path: names contain slashes, and plus signs.
fn path(model: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encoded =
        model.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") });
    format!("/v1/models/{}", encoded.collect::<String>())
}

/// Keeps one space of a list.
fn keep(listed: &mut Value, space: &str) -> anyhow::Result<()> {
    let models = listed["spaces"].get(space).cloned();
    let models = models.with_context(|| format!("the router has no space {space}"))?;
    *listed = json!({ "spaces": { space: models } });
    Ok(())
}

fn table(listed: &Value) -> Table {
    let columns = ["space", "model", "state", "since", "until"].map(Column::left);
    let time = |ms: &Value| ms.as_u64().map_or_else(|| "-".to_owned(), utc);
    let row = |space: &String, model: &Value| {
        let state = match model["reason"].as_str() {
            Some("operator") => "rests (operator)",
            Some(_) => "rests (failures)",
            None => "answers",
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let times = [&model["since_ms"], &model["until_ms"]].map(time);
        let mut row = vec![space.clone(), text(&model["model"]), state.to_owned()];
        row.extend(times);
        row.push(model["failures"].to_string());
        row
    };
    let models = |(space, models): (&String, &Value)| {
        models.as_array().into_iter().flatten().map(|model| row(space, model)).collect::<Vec<_>>()
    };
    let mut columns = columns.to_vec();
    columns.push(Column::right("failures in a row"));
    Table { columns, rows: listed["spaces"].as_object().into_iter().flatten().flat_map(models).collect(), note: None }
}

/// A time such as `90s`, in milliseconds.
fn duration_ms(text: &str) -> Result<u64, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        "d" => Some(86_400_000),
        _ => None,
    };
    let ms = number.parse::<u64>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    ms.filter(|ms| (1..=REST_MS_MAX).contains(ms))
        .ok_or_else(|| "expected a whole number with a unit (ms, s, m, h, d), at most 365d, such as 10m".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, ms) in [("250ms", 250), ("90s", 90_000), ("10m", 600_000), ("2h", 7_200_000), ("365d", REST_MS_MAX)]
        {
            assert_eq!(duration_ms(text), Ok(ms));
        }
        for bad in ["", "10", "m", "0s", "366d", "-1s", "1.5h", "10 m", "99999999999999999999s", "9999999999999999d"] {
            assert!(duration_ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_with_slashes_are_one_segment_of_a_path() {
        assert_eq!(path("BAAI/bge-small-en-v1.5"), "/v1/models/BAAI%2Fbge-small-en-v1.5");
        assert_eq!(path("openai:a@b+c_"), "/v1/models/openai%3Aa%40b%2Bc_");
    }
}
