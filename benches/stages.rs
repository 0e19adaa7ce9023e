//! Every stage between an event and a decision, beside what the machine could do at best and what a plain implementation
//! takes, all in one run.
//!
//!   cargo bench --bench stages
//!   cargo bench --bench stages -- --json
//!
//! The ratios are what counts. The roofline of the update is explained in `support/machine.rs`; that of a stage that only
//! moves data is one copy of it. Times are the least of many, after a warm-up that fills the rank.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pointsman::config::{Config, Mode, Settings};
use pointsman::event::{Example, Name, Query};
use pointsman::joiner::{Joiner, Payload};
use pointsman::learner::Trainer;
use pointsman::report::{Column, Table};
use pointsman::router::{DrawKey, Params, Router};
use pointsman::wire::events::Parser;
use pointsman::wire::params;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use support::machine::{Limit, Machine, bandwidth};
use support::{Size, examples, fastest, learn, model_names, queries, timed, trainer};

mod support;

const DIM: usize = 768;
const MODELS: usize = 8;
const RANKS: [usize; 2] = [16, 32];

/// How long a stage and its alternatives are measured together.
const BUDGET: Duration = Duration::from_secs(2);

/// Updates, queries or events in one stretch of time.
const STRETCH: usize = 128;

/// Of the queries that repeat, so many are different.
const POOL: usize = 6;

/// Requests that wait for their reward at any time.
const PENDING: usize = 1000;

/// What was measured of a stage, in seconds.
struct Stage {
    name: &'static str,
    rank: Option<usize>,
    time: f64,
    limit: Option<f64>,
    alternatives: Vec<(&'static str, f64)>,
}

fn main() {
    let machine = Machine::measure();
    let mut stages = Vec::new();
    let mut limits = Vec::new();
    let mut state_bytes = Vec::new();
    for rank in RANKS {
        let size = Size { dim: DIM, models: MODELS, rank, batch: 1 };
        let limit = machine.limit(size);
        let (learning, trainer) = learning(size, &limit);
        stages.extend(learning);
        state_bytes.push(trainer.save().len());
        stages.extend(routing(&trainer, rank, &machine));
        limits.push((rank, limit));
    }
    stages.extend(decoding());
    stages.push(joining());
    if std::env::args().any(|argument| argument == "--json") {
        println!("{}", as_json(&machine, &limits, &state_bytes, &stages));
        return;
    }
    println!("{}", machine_table(&machine, &limits).text());
    println!("{}", stage_table(&stages).text());
    for (rank, bytes) in RANKS.iter().zip(state_bytes) {
        println!("state of a learner at k = {rank}: {:.2} MB", bytes as f64 / 1e6);
    }
}

/// Scoring and updates, and the learner that they leave.
fn learning(size: Size, limit: &Limit) -> (Vec<Stage>, Trainer) {
    let distinct = examples(queries(size.dim, 2000, 1), size.models);
    let repeated = examples(repeats(&queries(size.dim, 2000, 2)), size.models);
    let mut main = warm(size, Mode::Factored, &distinct);
    let mut explicit = warm(size, Mode::Explicit, &distinct);
    let mut repeating = warm(size, Mode::Factored, &repeated);
    let [update, explicit_update, repeated_update] = fastest(
        2 * BUDGET,
        [
            &mut stretches(&mut main, &distinct, STRETCH),
            &mut stretches(&mut explicit, &distinct, STRETCH / 8),
            &mut stretches(&mut repeating, &repeated, STRETCH),
        ],
    );
    // A dense decomposition costs the same whatever the rank reached, and takes most of a second: three will do.
    let mut exact = trainer(size, Mode::Exact);
    let [exact_update] = fastest(Duration::ZERO, [&mut stretches(&mut exact, &distinct, 1)]);
    let stage = |name, time, limit, alternatives| Stage { name, rank: Some(size.rank), time, limit, alternatives };
    let modes = vec![("explicit", explicit_update), ("exact", exact_update)];
    let stages = vec![
        scoring(&main, size.rank, limit.score),
        stage("update", update, Some(limit.total()), modes),
        stage("update, 90% repeated", repeated_update, Some(limit.total()), vec![("no repeats", update)]),
    ];
    (stages, main)
}

/// One in ten is new, the others come from a small pool.
fn repeats(fresh: &[Query]) -> Vec<Query> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let draw = |query: &Query| match random.random::<f64>() < 0.9 {
        true => fresh[random.random_range(0..POOL)].clone(),
        false => query.clone(),
    };
    fresh.iter().map(draw).collect()
}

/// A learner whose rank is full, and whose buffers have turned over.
fn warm(size: Size, mode: Mode, examples: &[Example]) -> Trainer {
    let mut trainer = trainer(size, mode);
    learn(&mut trainer, examples, 0, 8 * size.rank);
    trainer
}

/// Goes on learning, a stretch at a time.
fn stretches<'a>(trainer: &'a mut Trainer, examples: &'a [Example], count: usize) -> impl FnMut() -> f64 + 'a {
    let mut at = 0;
    move || {
        at += count;
        learn(trainer, examples, at, count)
    }
}

/// Scores of the learner, against the plain sums over multiplied-out eigenvectors.
fn scoring(trainer: &Trainer, rank: usize, limit: f64) -> Stage {
    let queries = queries(DIM, STRETCH, 3);
    let eigens = trainer.eigens();
    let mut score = || {
        each(&queries, |query| {
            black_box(trainer.distribution(query).expect("a query of this shape"));
        })
    };
    let mut plain = || {
        each(&queries, |query| {
            for eigen in &eigens {
                let vectors = eigen.vectors.chunks_exact(DIM);
                let products = vectors.map(|v| v.iter().zip(query.as_slice()).map(|(v, q)| v * q).sum::<f64>());
                black_box(products.zip(&eigen.lambda).map(|(p, lambda)| lambda * p * p).sum::<f64>());
            }
        })
    };
    let [time, plain] = fastest(BUDGET / 2, [&mut score, &mut plain]);
    Stage { name: "score, f64", rank: Some(rank), time, limit: Some(limit), alternatives: vec![("plain loop", plain)] }
}

/// What leaves a learner and enters a router: parameters, decisions, and the snapshot.
fn routing(trainer: &Trainer, rank: usize, machine: &Machine) -> Vec<Stage> {
    let parameters = published(trainer);
    let encoded = params::encode(&parameters);
    let floats: Vec<&[f32]> = parameters.policy.scores.iter().map(|form| form.eigenvectors.as_slice()).collect();
    let text = serde_json::to_vec(&floats).expect("numbers");
    let saved = trainer.save();
    let eigens = trainer.eigens();
    let stage = |name, time, limit, alternative| Stage {
        name,
        rank: Some(rank),
        time,
        limit: Some(limit),
        alternatives: vec![alternative],
    };
    let [encode, decode, encode_text, decode_text, save, save_text] = fastest(
        BUDGET,
        [
            &mut || timed(|| drop(black_box(params::encode(&parameters)))),
            &mut || timed(|| drop(black_box(params::decode(&encoded).expect("what was encoded")))),
            &mut || timed(|| drop(black_box(serde_json::to_vec(&floats).expect("numbers")))),
            &mut || {
                timed(|| drop(black_box(serde_json::from_slice::<Vec<Vec<f32>>>(&text).expect("what was written"))))
            },
            &mut || timed(|| drop(black_box(trainer.save()))),
            &mut || timed(|| drop(black_box(serde_json::to_vec(&eigens).expect("numbers")))),
        ],
    );
    vec![
        route(parameters.clone(), rank, machine),
        stage("parameters, encode", encode, copy(encoded.len()), ("JSON", encode_text)),
        stage("parameters, decode", decode, copy(encoded.len()), ("JSON", decode_text)),
        stage("snapshot, encode", save, copy(saved.len()), ("JSON", save_text)),
    ]
}

/// What a learner would publish.
fn published(trainer: &Trainer) -> Params {
    Params {
        space: Name::default_space(),
        epoch: 0,
        version: trainer.version(),
        revision: 0,
        models: trainer.spec().models.clone(),
        dim: DIM,
        created_ms: 0,
        algorithm: trainer.spec().algorithm().to_owned(),
        policy: trainer.policy(),
    }
}

/// A whole decision in the library: scores in f32, distribution, draw.
fn route(parameters: Params, rank: usize, machine: &Machine) -> Stage {
    let singles = singles(STRETCH);
    let router = Router::new(DrawKey::new(b"bench").expect("a key"));
    let (space, plain) = (Name::default_space(), parameters.clone());
    router.offer(parameters);
    let mut routed = || {
        each(&singles, |query| {
            let answer = router.route(&space, "request-1", query).expect("a space").expect("a good query");
            black_box(answer.model);
        })
    };
    let mut looped = || {
        each(&singles, |query| {
            let query = Query::from_f32(query).expect("a good query");
            black_box(plain.distribution(&query).expect("a query of this shape").draw(0.5));
        })
    };
    let [time, looped] = fastest(BUDGET, [&mut routed, &mut looped]);
    let products = MODELS * rank * DIM;
    // Vectors hold twice as many f32.
    let limit = (products as f64 / machine.flops).max(4.0 * products as f64 / bandwidth(4 * products));
    let alternatives = vec![("plain loop", looped)];
    Stage { name: "route, f32", rank: Some(rank), time, limit: Some(limit), alternatives }
}

/// Query events, as an array of numbers and as base64.
fn decoding() -> Vec<Stage> {
    let settings = settings();
    let parser = Parser::new(&settings);
    let arrays = events(|query| json!(query));
    let encoded = events(|query| json!(STANDARD.encode(bytes(query))));
    let read = |events: &[Vec<u8>]| each(events, |event| drop(black_box(parser.query(event, None).expect("an event"))));
    let value = |event: &[u8]| serde_json::from_slice::<Value>(event).expect("JSON");
    let mut value_array = || {
        each(&arrays, |event| {
            let value = value(event);
            let numbers = value["query"].as_array().expect("an array").iter();
            black_box(numbers.map(|x| x.as_f64().expect("a number") as f32).collect::<Vec<f32>>());
        })
    };
    let mut value_text = || {
        each(&encoded, |event| {
            let bytes = STANDARD.decode(value(event)["query"].as_str().expect("text")).expect("base64");
            let numbers = bytes.as_chunks().0.iter();
            black_box(numbers.map(|x| f32::from_le_bytes(*x)).collect::<Vec<f32>>());
        })
    };
    let [array, array_plain, text, text_plain] =
        fastest(BUDGET, [&mut || read(&arrays), &mut value_array, &mut || read(&encoded), &mut value_text]);
    let stage = |name, time, events: &[Vec<u8>], plain| Stage {
        name,
        rank: None,
        time,
        limit: Some(copy(events[0].len())),
        alternatives: vec![("serde_json::Value", plain)],
    };
    vec![
        stage("event, decode array", array, &arrays, array_plain),
        stage("event, decode base64", text, &encoded, text_plain),
    ]
}

fn settings() -> Settings {
    let text = format!("[learner]\ndim = {DIM}\nmodels = {:?}\n", model_names(MODELS));
    toml::from_str::<Config>(&text).expect("good TOML").check().expect("a good configuration")
}

/// Query events, each with its vector as `write` has it.
fn events(write: impl Fn(&[f32]) -> Value) -> Vec<Vec<u8>> {
    let propensities: HashMap<String, f64> = model_names(MODELS).into_iter().map(|name| (name, 0.125)).collect();
    let event = |(i, query): (usize, &Vec<f32>)| {
        let (id, model) = (format!("request-{i:08}"), format!("m{}", i % MODELS));
        let event = json!({
            "request_id": id, "ts_ms": 1_700_000_000_000_i64 + i as i64, "query": write(query), "model": model,
            "propensities": propensities,
        });
        event.to_string().into_bytes()
    };
    singles(STRETCH).iter().enumerate().map(event).collect()
}

/// A query and the reward of an earlier one: a request through the join, against a map that knows nothing of time.
fn joining() -> Stage {
    let mut joiner = Joiner::new(settings().join);
    let mut map = HashMap::new();
    let (mut next, mut next_in_map) = (0, 0);
    let mut join = || {
        let (requests, mut out) = (requests(next), Vec::new());
        let request = |(i, (id, earlier, payload)): (usize, (String, String, Waiting))| {
            let ts_ms = 1_700_000_000_000 + (next + i) as i64;
            joiner.query(&id, ts_ms, payload, &mut out);
            joiner.reward(&earlier, ts_ms, 1.0, None, &mut out);
            black_box(&out);
            out.clear();
        };
        let time = timed(|| requests.into_iter().enumerate().for_each(request));
        next += STRETCH;
        time / STRETCH as f64
    };
    let mut look_up = || {
        let requests = requests(next_in_map);
        let request = |(id, earlier, payload)| {
            map.insert(id, payload);
            drop(black_box(map.remove(&earlier)));
        };
        next_in_map += STRETCH;
        timed(|| requests.into_iter().for_each(request)) / STRETCH as f64
    };
    // Until as many wait as in the long run.
    (0..2 * PENDING / STRETCH).for_each(|_| _ = (join(), look_up()));
    let [time, map] = fastest(BUDGET, [&mut join, &mut look_up]);
    Stage {
        name: "join, query and reward",
        rank: None,
        time,
        limit: None,
        alternatives: vec![("HashMap, no time", map)],
    }
}

/// A query in the join.
struct Waiting(Vec<f32>);

impl Payload for Waiting {
    fn bytes(&self) -> usize {
        4 * self.0.len()
    }
}

/// Requests from number `first` on: the id, the id of the one whose reward comes now, and what it carries.
fn requests(first: usize) -> Vec<(String, String, Waiting)> {
    let id = |i: usize| format!("request-{i:010}");
    (first..first + STRETCH).map(|i| (id(i + PENDING), id(i), Waiting(vec![1.0; DIM]))).collect()
}

fn singles(count: usize) -> Vec<Vec<f32>> {
    queries(DIM, count, 4).iter().map(|query| query.as_slice().iter().map(|&x| x as f32).collect()).collect()
}

fn bytes(query: &[f32]) -> Vec<u8> {
    query.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Seconds of one, over all of them.
fn each<T>(all: &[T], work: impl FnMut(&T)) -> f64 {
    timed(|| all.iter().for_each(work)) / all.len() as f64
}

/// Seconds to copy so many bytes from one buffer to another.
fn copy(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let rounds = (1 << 20) / bytes + 1;
    let mut copy = || (0..rounds).for_each(|_| black_box(&mut to).copy_from_slice(black_box(&from)));
    fastest(BUDGET / 20, [&mut || timed(&mut copy)])[0] / rounds as f64
}

fn machine_table(machine: &Machine, limits: &[(usize, Limit)]) -> Table {
    let headings = ["k", "GF/s", "divisions/s", "scores", "S'q", "compaction", "rotation", "secular", "roofline"];
    let row = |(rank, limit): &(usize, Limit)| {
        let parts = [limit.score, limit.recent, limit.compaction, limit.rotation, limit.secular, limit.total()];
        let rates = [rank.to_string(), format!("{:.0}", machine.flops / 1e9), format!("{:.1e}", machine.divisions)];
        rates.into_iter().chain(parts.map(us)).collect()
    };
    let note = format!("d = {DIM}, M = {MODELS}, one core, f64: the least that the parts of an update can take here.");
    Table { columns: headings.map(Column::right).to_vec(), rows: limits.iter().map(row).collect(), note: Some(note) }
}

fn stage_table(stages: &[Stage]) -> Table {
    let mut columns =
        ["", "k", "time", "per second", "roofline", "times roofline", "", "takes", "times faster"].map(Column::right);
    columns[0] = Column::left("stage");
    columns[6] = Column::left("naive alternative");
    let rows = stages.iter().flat_map(rows).collect();
    Table { columns: columns.to_vec(), rows, note: Some(format!("d = {DIM}, M = {MODELS}, batch 1, one thread.")) }
}

/// A row for each alternative.
fn rows(stage: &Stage) -> Vec<Vec<String>> {
    let own = [
        stage.name.to_owned(),
        stage.rank.map_or("any".to_owned(), |rank| rank.to_string()),
        us(stage.time),
        format!("{:.0}", 1.0 / stage.time),
        stage.limit.map_or("-".to_owned(), us),
        stage.limit.map_or("-".to_owned(), |limit| ratio(stage.time / limit)),
    ];
    let alternative = |(i, (name, time)): (usize, &(&str, f64))| {
        let own = own.iter().map(|text| if i == 0 { text.clone() } else { String::new() });
        own.chain([(*name).to_owned(), us(*time), ratio(time / stage.time)]).collect()
    };
    stage.alternatives.iter().enumerate().map(alternative).collect()
}

fn us(seconds: f64) -> String {
    let us = 1e6 * seconds;
    if us < 100.0 { format!("{us:.2} us") } else { format!("{us:.0} us") }
}

fn ratio(x: f64) -> String {
    if x < 10.0 { format!("{x:.2}") } else { format!("{x:.0}") }
}

fn as_json(machine: &Machine, limits: &[(usize, Limit)], state_bytes: &[usize], stages: &[Stage]) -> Value {
    let stage = |stage: &Stage| {
        let alternatives: HashMap<&str, f64> = stage.alternatives.iter().copied().collect();
        json!({
            "stage": stage.name, "rank": stage.rank, "seconds": stage.time, "roofline_seconds": stage.limit,
            "alternatives_seconds": alternatives,
        })
    };
    let limit = |((rank, limit), bytes): (&(usize, Limit), &usize)| {
        json!({
            "rank": rank, "score": limit.score, "recent": limit.recent, "compaction": limit.compaction,
            "rotation": limit.rotation, "secular": limit.secular, "total": limit.total(), "state_bytes": bytes,
        })
    };
    json!({
        "dim": DIM, "models": MODELS, "flops_per_second": machine.flops, "divisions_per_second": machine.divisions,
        "update_roofline_seconds": limits.iter().zip(state_bytes).map(limit).collect::<Vec<_>>(),
        "stages": stages.iter().map(stage).collect::<Vec<_>>(),
    })
}
