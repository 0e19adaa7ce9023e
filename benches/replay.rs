//! Replay of historical logs, decode and join included: the program as it is run, what each stage takes alone, and the
//! alternatives in the same run: all on one thread, and events decoded by a tree of values.
//!
//!   cargo bench --bench replay
//!   REQUESTS=50000 ROUNDS=5 DIM=256 cargo bench --bench replay
//!
//! A request is a query event and its reward event: what is counted a second are requests, learned from.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use pointsman::config::{Algorithm, Config};
use pointsman::engine::{Engine, Input, Side};
use pointsman::merge::{Merge, MergeState, Next, Source};
use pointsman::report::{Column, Table};
use pointsman::transport::TransportError;
use pointsman::transport::ahead::Reader;
use pointsman::transport::file::{AtEnd, LogFile};
use pointsman::wire::events::Parser;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MODELS: usize = 8;
const RANK: usize = 16;

/// Logs of one form of vector.
struct Logs {
    form: &'static str,
    queries: PathBuf,
    rewards: PathBuf,
}

/// What is measured, and over how much.
struct Bench {
    requests: usize,
    rounds: usize,
    dim: usize,
    config: PathBuf,
    logs: [Logs; 3],
}

fn main() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (requests, rounds, dim) = (variable("REQUESTS", 10_000), variable("ROUNDS", 3), variable("DIM", 768));
    let models: Vec<String> = (0..MODELS).map(|m| format!("model-{m}")).collect();
    let config = dir.path().join("pointsman.toml");
    let text = format!("[learner]\ndim = {dim}\nmodels = {models:?}\nrank = {RANK}\n");
    std::fs::write(&config, text).expect("a configuration");
    let logs = ["array", "array of f64", "base64"].map(|form| write_logs(dir.path(), form, requests, dim, &models));
    let bench = Bench { requests, rounds, dim, config, logs };
    println!("{}", bench.programs(dir.path()).text(120));
    println!("{}", bench.alternatives().text(120));
    println!("{}", bench.stages().text(120));
}

fn variable(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

impl Bench {
    /// The program from start to exit; beside the learner also a policy that learns nothing: all but the update.
    fn programs(&self, dir: &Path) -> Table {
        let algorithms = ["hpg", "uniform"];
        let best = self.best(|logs, times: &mut [Duration; 2]| {
            for (time, algorithm) in times.iter_mut().zip(algorithms) {
                let start = Instant::now();
                self.program(dir, logs, algorithm);
                *time = start.elapsed();
            }
        });
        let rows = best.iter().map(|(form, times)| {
            let rates = times.map(|time| format!("{:.0}", self.requests as f64 / time.as_secs_f64()));
            [vec![(*form).to_owned()], rates.to_vec()].concat()
        });
        let columns = ["requests/s", "uniform: all but the update"].map(Column::right);
        Table {
            columns: [vec![Column::left("pointsman replay")], columns.into()].concat(),
            rows: rows.collect(),
            note: Some(format!(
                "{} requests with their rewards, d={} M={MODELS} k={RANK}, from start to exit",
                self.requests, self.dim
            )),
        }
    }

    fn program(&self, dir: &Path, logs: &Logs, algorithm: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.current_dir(dir).args(["replay", "--json", "--set", &format!("learner.algorithm={algorithm}")]);
        command.arg("--config").arg(&self.config).arg("--queries").arg(&logs.queries);
        let output = command.arg("--rewards").arg(&logs.rewards).output().expect("pointsman");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The same in this process, with a thread that reads ahead or without, and with either decoder.
    fn alternatives(&self) -> Table {
        let ways = [(true, false), (false, false), (true, true), (false, true)];
        let best = self.best(|logs, times: &mut [Duration; 4]| {
            for (time, (ahead, by_tree)) in times.iter_mut().zip(ways) {
                *time = self.replay(logs, Algorithm::Hpg, ahead, by_tree);
            }
        });
        let row = |(form, times): &(&str, [Duration; 4])| {
            let cell = |time: &Duration| {
                let ratio = time.as_secs_f64() / times[0].as_secs_f64();
                format!("{:.0}  {ratio:.2}x", self.requests as f64 / time.as_secs_f64())
            };
            [vec![(*form).to_owned()], times.iter().map(cell).collect()].concat()
        };
        let names = ["two threads", "one thread", "two, by tree", "one, by tree"];
        Table {
            columns: [vec![Column::left("requests/s, time")], names.map(Column::right).into()].concat(),
            rows: best.iter().map(row).collect(),
            note: Some("in this process; time as a multiple of the first column's".to_owned()),
        }
    }

    /// What the stages take, each alone on one thread.
    fn stages(&self) -> Table {
        let names = ["read", "decode", "decode by tree", "merge and join", "update"];
        let best = self.best(|logs, times: &mut [Duration; 5]| {
            let lines = |path: &Path| {
                BufReader::new(File::open(path).expect("a log")).split(b'\n').map(|line| line.expect("a line"))
            };
            let start = Instant::now();
            let all: Vec<(Side, Vec<u8>)> = lines(&logs.queries)
                .map(|line| (Side::Query, line))
                .chain(lines(&logs.rewards).map(|line| (Side::Reward, line)))
                .collect();
            times[0] = start.elapsed();
            for (time, parser) in times[1..].iter_mut().zip([self.parser(), self.parser().by_tree()]) {
                let all = all.clone();
                let start = Instant::now();
                for (side, line) in all {
                    black_box(Input::parse(&parser, side, line, None));
                }
                *time = start.elapsed();
            }
            let join = self.replay(logs, Algorithm::Uniform, false, false);
            times[3] = join.saturating_sub(times[0] + times[1]);
            times[4] = self.replay(logs, Algorithm::Hpg, false, false).saturating_sub(join);
        });
        let row = |(form, times): &(&str, [Duration; 5])| {
            let cell = |time: &Duration| format!("{:.1} us", time.as_secs_f64() * 1e6 / self.requests as f64);
            [vec![(*form).to_owned()], times.iter().map(cell).collect()].concat()
        };
        Table {
            columns: [vec![Column::left("a request")], names.map(Column::right).into()].concat(),
            rows: best.iter().map(row).collect(),
            note: Some("each alone, one thread; the last two by difference".to_owned()),
        }
    }

    /// The shortest times of several rounds, each of which goes through all.
    fn best<const N: usize>(&self, measure: impl Fn(&Logs, &mut [Duration; N])) -> Vec<(&'static str, [Duration; N])> {
        let mut best: Vec<_> = self.logs.iter().map(|logs| (logs.form, [Duration::MAX; N])).collect();
        for _ in 0..self.rounds {
            for (logs, (_, best)) in self.logs.iter().zip(&mut best) {
                let mut times = [Duration::ZERO; N];
                measure(logs, &mut times);
                best.iter_mut().zip(times).for_each(|(best, time)| *best = time.min(*best));
            }
        }
        best
    }

    fn settings(&self, algorithm: Algorithm) -> pointsman::config::Settings {
        let text = std::fs::read_to_string(&self.config).expect("a configuration");
        let mut config: Config = toml::from_str(&text).expect("a configuration");
        config.learner.algorithm = algorithm;
        config.check().expect("settings")
    }

    fn parser(&self) -> Parser {
        Parser::new(&self.settings(Algorithm::Hpg))
    }

    fn replay(&self, logs: &Logs, algorithm: Algorithm, ahead: bool, by_tree: bool) -> Duration {
        let parser = Arc::new(if by_tree { self.parser().by_tree() } else { self.parser() });
        let settings = self.settings(algorithm);
        let log = |path: &Path, side| LogFile::new(path, side, parser.clone(), AtEnd::Complete, None, Arc::default());
        let sources = [log(&logs.queries, Side::Query), log(&logs.rewards, Side::Reward)];
        let start = Instant::now();
        let learned = if ahead {
            let reader = Reader::start().expect("a thread");
            learn(settings, sources.map(|log| reader.follow(log)))
        } else {
            learn(settings, sources)
        };
        let time = start.elapsed();
        assert_eq!(learned, self.requests as u64);
        time
    }
}

fn learn<S: Source<Error = TransportError>>(settings: pointsman::config::Settings, sources: [S; 2]) -> u64 {
    let mut merge = Merge::new(settings.reorder_ms, &MergeState::default());
    for (i, source) in sources.into_iter().enumerate() {
        merge.add(i.to_string(), source, None, None);
    }
    let mut engine = Engine::new(settings);
    while let Next::Event(event, _) = merge.next().expect("a log") {
        engine.step(event.input);
    }
    engine.finish();
    engine.counts().applied
}

fn write_logs(dir: &Path, form: &'static str, requests: usize, dim: usize, models: &[String]) -> Logs {
    let path = |side: &str| dir.join(format!("{}-{side}.jsonl", form.replace(' ', "-")));
    let logs = Logs { form, queries: path("queries"), rewards: path("rewards") };
    let create = |path: &Path| BufWriter::new(File::create(path).expect("a log"));
    let (mut queries, mut rewards) = (create(&logs.queries), create(&logs.rewards));
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let share = 1.0 / models.len() as f64;
    let propensities: serde_json::Map<String, serde_json::Value> =
        models.iter().map(|model| (model.clone(), share.into())).collect();
    for i in 0..requests {
        let vector: Vec<f32> = (0..dim).map(|_| random.random_range(-0.1..0.1_f32)).collect();
        let vector = match form {
            "base64" => serde_json::json!(
                base64::engine::general_purpose::STANDARD
                    .encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
            ),
            // As a program writes it that computes in f64: up to 17 digits.
            "array of f64" => vector.iter().map(|&x| f64::from(x)).collect(),
            _ => serde_json::from_str(&format!("{vector:?}")).expect("an array"),
        };
        let (id, ts_ms) = (format!("request-{i:08}"), 1_700_000_000_000 + 10 * i as u64);
        let query = serde_json::json!({
            "request_id": id, "space": "default", "ts_ms": ts_ms, "query": vector, "model": models[i % models.len()],
            "propensities": propensities, "params_version": 12,
        });
        let reward = f64::from(u8::from(random.random_bool(0.5)));
        let reward = serde_json::json!({"request_id": id, "space": "default", "ts_ms": ts_ms + 5, "reward": reward});
        writeln!(queries, "{query}").expect("written");
        writeln!(rewards, "{reward}").expect("written");
    }
    logs
}
