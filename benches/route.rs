//! Routing in the library, beside the bare matrix-vector product that it cannot do without; with a head table; and while
//! parameters are being replaced.
//!
//!   cargo bench --bench route

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use faer::linalg::matmul::matmul;
use faer::{Accum, Col, Mat, Par};
use pointsman::event::{ModelName, Name, Query};
use pointsman::query_key::QueryKey;
use pointsman::report::{Column, Table};
use pointsman::router::{DrawKey, HeadTable, Params, Policy, Router, ScoreForm};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const QUERIES: usize = 512;

/// Queries in the head table, of which every other query that is routed is one.
const HEAD_QUERIES: usize = 1024;

fn main() {
    let mut rows = Vec::new();
    for (dim, models, rank) in [(768, 8, 16), (768, 8, 32), (64, 8, 16)] {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let queries: Vec<Vec<f32>> = (0..QUERIES).map(|_| numbers(dim, &mut random)).collect();
        let ids: Vec<String> = (0..QUERIES).map(|i| format!("request-{i}")).collect();
        let router = Router::new(DrawKey::new(b"bench").expect("a key"));
        router.offer(params(1, dim, models, rank));
        let space = Name::default_space();
        let route = |i: usize| {
            let answer = router.route(&space, &ids[i], &queries[i]).expect("a space").expect("a good query");
            black_box(answer.model);
        };
        let with_head = Router::new(DrawKey::new(b"bench").expect("a key"));
        with_head.offer(headed(params(1, dim, models, rank), &queries));
        let route_head = |i: usize| {
            let answer = with_head.route(&space, &ids[i], &queries[i]).expect("a space").expect("a good query");
            black_box(answer.model);
        };
        let matrix = Mat::<f32>::from_fn(models * rank, dim, |_, _| random.random_range(-1.0..1.0));
        let transposed = matrix.transpose().to_owned();
        let columns: Vec<Col<f32>> = queries.iter().map(|q| Col::from_fn(dim, |i| q[i])).collect();
        let mut out = Col::<f32>::zeros(models * rank);
        let mut bare = |i: usize| {
            matmul(&mut out, Accum::Replace, transposed.transpose(), &columns[i], 1.0, Par::Seq);
            black_box(&out);
        };
        // Taken in turns, so that a busy moment of the machine falls on all.
        let [route_us, head_us, bare_us] = medians([&mut { route }, &mut { route_head }, &mut bare]);
        rows.push(vec![
            dim.to_string(),
            models.to_string(),
            rank.to_string(),
            format!("{route_us:.2} us"),
            format!("{bare_us:.2} us"),
            format!("{:.2}", route_us / bare_us),
            format!("{head_us:.2} us"),
            format!("{:.2}", head_us / route_us),
        ]);
    }
    let headings = ["d", "M", "k", "route", "bare product", "ratio", "with head table", "ratio to route"];
    let note = Some(format!(
        "one thread; medians of 200 rounds; the product is faer's, of the same matrix in the same order; the head table has \
         {HEAD_QUERIES} queries, and every other query is one of them"
    ));
    println!("{}", Table { columns: headings.map(Column::right).to_vec(), rows, note }.text(120));
    println!("{}", swaps().text(120));
}

/// Median time of each, in microseconds.
fn medians<const N: usize>(mut works: [&mut dyn FnMut(usize); N]) -> [f64; N] {
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..200 {
        for (work, times) in works.iter_mut().zip(&mut times) {
            let start = Instant::now();
            (0..QUERIES).for_each(&mut **work);
            times.push(start.elapsed().as_secs_f64() * 1e6 / QUERIES as f64);
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

/// Latency of single decisions, with and without parameters being replaced every millisecond.
fn swaps() -> Table {
    let (dim, models, rank) = (768, 8, 16);
    let mut random = ChaCha8Rng::seed_from_u64(2);
    let query = numbers(dim, &mut random);
    let router = Router::new(DrawKey::new(b"bench").expect("a key"));
    router.offer(params(1, dim, models, rank));
    let space = Name::default_space();
    let measure = || {
        let mut times: Vec<f64> = (0..200_000)
            .map(|i| {
                let id = i.to_string();
                let start = Instant::now();
                black_box(router.route(&space, &id, &query).expect("a space").expect("a good query").model);
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        [0.5, 0.99, 0.999].map(|share| times[(share * times.len() as f64) as usize])
    };
    let still = measure();
    let stop = AtomicBool::new(false);
    let swapping = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut version = 2;
            while !stop.load(Ordering::Relaxed) {
                router.offer(params(version, dim, models, rank));
                version += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let swapping = measure();
        stop.store(true, Ordering::Relaxed);
        swapping
    });
    let line = |name: &str, times: [f64; 3]| {
        [name.to_owned()].into_iter().chain(times.map(|time| format!("{time:.2} us"))).collect()
    };
    let ratio = |i: usize| format!("{:.2}", swapping[i] / still[i]);
    Table {
        columns: [Column::left("(768, 8, 16)")].into_iter().chain(["p50", "p99", "p99.9"].map(Column::right)).collect(),
        rows: vec![
            line("no swaps", still),
            line("a swap every ms", swapping),
            ["ratio".to_owned()].into_iter().chain((0..3).map(ratio)).collect(),
        ],
        note: None,
    }
}

fn params(version: u64, dim: usize, models: usize, rank: usize) -> Params {
    let mut random = ChaCha8Rng::seed_from_u64(version);
    let mut policy = Policy::unlearned(models, None);
    for form in &mut policy.scores {
        let (eigenvalues, eigenvectors) = (numbers(rank, &mut random), numbers(rank * dim, &mut random));
        *form = ScoreForm { eigenvalues, eigenvectors, ..ScoreForm::default() };
    }
    Params {
        space: Name::default_space(),
        epoch: 0,
        version,
        revision: 0,
        models: (0..models).map(|m| ModelName::try_from(format!("m{m}")).expect("a name")).collect(),
        dim,
        created_ms: 0,
        algorithm: "hpg".to_owned(),
        policy,
    }
}

/// Adds a head table with every other of these queries.
fn headed(mut params: Params, queries: &[Vec<f32>]) -> Params {
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let hits = queries.iter().step_by(2).map(|query| QueryKey::of(&Query::from_f32(query).expect("a good query")).0);
    let mut keys: Vec<u64> = hits.collect();
    keys.resize_with(HEAD_QUERIES, || random.random());
    keys.sort_unstable();
    let models = params.models.len();
    let corrections = numbers(HEAD_QUERIES * models, &mut random);
    params.policy.head = HeadTable::new(models, keys, corrections).expect("distinct keys");
    params
}

fn numbers(n: usize, random: &mut ChaCha8Rng) -> Vec<f32> {
    (0..n).map(|_| random.random_range(-1.0..1.0)).collect()
}
