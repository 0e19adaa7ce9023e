//! Routers in other languages must decide as this one does: `tests/golden/router` holds parameters, queries and what they
//! come to, for each version of the format.
//!
//! `POINTSMAN_BLESS=1 cargo test router` writes a missing file from the present code.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pointsman::eligible::Eligible;
use pointsman::event::{ModelName, Name, Query};
use pointsman::query_key::QueryKey;
use pointsman::router::{
    ALWAYS, Compiled, DrawKey, HeadTable, Outcomes, Params, Policy, Restriction, Router, Sampling, ScoreForm, uniform,
};
use pointsman::wire::params;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// No draw is this close to where the next model begins: rounding cannot change what it selects.
const MARGIN: f64 = 1e-4;

/// How far numbers may be off, relative to the largest of their kind, or to 1.
const TOLERANCE: f64 = 1e-5;

#[derive(Serialize, Deserialize)]
struct Vectors {
    about: String,
    cases: Vec<Case>,
}

/// Parameters, with requests that they route. Vectors over models are in the order of the parameters' metadata.
#[derive(Serialize, Deserialize)]
struct Case {
    name: String,
    space: String,
    models: Vec<String>,
    dim: usize,
    /// Key of the draws, in base64.
    key: String,
    /// A safetensors file, in base64.
    params: String,
    requests: Vec<Request>,
}

#[derive(Serialize, Deserialize)]
struct Request {
    request_id: String,
    /// Little-endian f32 in base64, not normalised.
    query: String,
    /// The models that may answer, if not all. Policy and propensities are those of these, in the order of the parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    models: Option<Vec<String>>,
    /// What the model is drawn by, if not by the request ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    draw_key: Option<String>,
    u: f64,
    scores: Vec<f64>,
    policy: Vec<f64>,
    propensities: Vec<f64>,
    model: String,
}

#[test]
fn decisions_are_those_of_the_vectors() {
    let cases = check_vectors(&golden("vectors.json", cases));
    assert!(cases.len() >= 8 && cases.iter().all(|(params, _)| params.policy.head.is_empty()));
}

#[test]
fn decisions_on_head_queries_are_those_of_the_vectors() {
    let cases = check_vectors(&golden("vectors-2.json", head_cases));
    assert!(cases.len() >= 3);
    for (params, queries) in cases {
        let hits = queries.iter().filter(|query| params.head(&Query::from_f32(query).unwrap()).is_some()).count();
        assert!(hits >= 4 && queries.len() - hits >= 4, "{hits} hits of {}", queries.len());
    }
}

#[test]
fn decisions_among_eligible_models_that_cost_are_those_of_the_vectors() {
    let vectors = golden("vectors-3.json", priced_cases);
    let cases = check_vectors(&vectors);
    assert!(cases.len() >= 3 && cases.iter().all(|(params, _)| !params.policy.outcomes.is_empty()));
    let vectors: Vectors = serde_json::from_slice(&vectors).unwrap();
    let requests: Vec<&Request> = vectors.cases.iter().flat_map(|case| &case.requests).collect();
    assert!(requests.iter().any(|request| request.draw_key.is_some()));
    let counts = requests.iter().map(|request| request.models.as_ref().map(Vec::len)).collect::<BTreeSet<_>>();
    assert!(counts.len() >= 4, "all, and several numbers of models: {counts:?}");
}

/// Checks all cases; returns their parameters and queries.
fn check_vectors(vectors: &[u8]) -> Vec<(Params, Vec<Vec<f32>>)> {
    let vectors: Vectors = serde_json::from_slice(vectors).unwrap();
    let check = |case: &Case| {
        let params = params::decode(&STANDARD.decode(&case.params).unwrap()).expect(&case.name);
        assert_eq!((params.space.as_str(), params.dim), (case.space.as_str(), case.dim), "{}", case.name);
        assert!(params.models.iter().map(ModelName::as_str).eq(&case.models), "{}", case.name);
        assert!(case.requests.len() >= 8, "{}", case.name);
        let key = STANDARD.decode(&case.key).unwrap();
        for expected in &case.requests {
            let among = Among { models: expected.models.clone(), draw_key: expected.draw_key.clone() };
            let found = decide(&params, &key, &expected.request_id, &floats(&expected.query), among);
            let at = format!("{} {}", case.name, expected.request_id);
            assert_eq!((found.u, &found.model), (expected.u, &expected.model), "{at}");
            check_near(&format!("scores of {at}"), &found.scores, &expected.scores);
            check_near(&format!("policy of {at}"), &found.policy, &expected.policy);
            check_near(&format!("propensities of {at}"), &found.propensities, &expected.propensities);
            assert!(clearance(expected) > MARGIN, "{at}");
        }
        (params, case.requests.iter().map(|request| floats(&request.query)).collect())
    };
    vectors.cases.iter().map(check).collect()
}

fn check_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let magnitude = expected.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
    let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= TOLERANCE * magnitude);
    assert!(near, "{what}: {found:?}, not {expected:?}");
}

/// Distance of a draw to the nearest boundary between models.
fn clearance(request: &Request) -> f64 {
    let mut boundary = 0.0;
    let inner = &request.propensities[..request.propensities.len() - 1];
    let distances = inner.iter().map(|p| {
        boundary += p;
        (request.u - boundary).abs()
    });
    distances.fold(1.0, f64::min)
}

/// What a request says besides its ID and query.
#[derive(Default)]
struct Among {
    models: Option<Vec<String>>,
    draw_key: Option<String>,
}

fn decide(params: &Params, key: &[u8], request_id: &str, query: &[f32], among: Among) -> Request {
    let Among { models, draw_key } = among;
    let key = DrawKey::new(key).unwrap();
    let u = key.draw(&params.space, draw_key.as_deref().unwrap_or(request_id));
    let scores = Compiled::new(params.clone()).scores(query).unwrap();
    let router = Router::new(key);
    assert!(router.offer(params.clone()));
    let restriction = Restriction { models: models.clone(), exclude: Vec::new() };
    let eligible = Eligible::only(restriction.allowed(&params.models, |_| false).unwrap()).unwrap();
    let by = router.space(&params.space).unwrap();
    let answer = router.decide_among(by, request_id, draw_key.as_deref(), query, &eligible).unwrap();
    let of_eligible = |numbers: &[f64]| {
        let numbers = numbers.iter().copied().enumerate();
        numbers.filter(|(m, _)| eligible.allows(*m)).map(|(_, p)| p).collect::<Vec<f64>>()
    };
    Request {
        request_id: request_id.to_owned(),
        query: STANDARD.encode(query.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
        u,
        scores,
        model: answer.model_name().to_string(),
        policy: of_eligible(&answer.distribution.policy),
        propensities: of_eligible(&answer.distribution.propensities),
        models,
        draw_key,
    }
}

fn floats(text: &str) -> Vec<f32> {
    let bytes = STANDARD.decode(text).unwrap();
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

fn golden(name: &str, cases: impl Fn() -> Vec<Case>) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/router").join(name);
    if std::env::var_os("POINTSMAN_BLESS").is_some() && !path.exists() {
        let about = "written by POINTSMAN_BLESS=1 cargo test router; see tests/suite/router.rs".to_owned();
        let vectors = Vectors { about, cases: cases() };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text = serde_json::to_string(&vectors).unwrap();
        let lines = ["name", "request_id"].iter().fold(text, |text, first| {
            // One line a request, so that differences can be read.
            text.replace(&format!("{{\"{first}\""), &format!("\n{{\"{first}\""))
        });
        fs::write(&path, lines + "\n").unwrap();
    }
    fs::read(path).unwrap()
}

fn cases() -> Vec<Case> {
    let gap = |gap| Sampling::InverseGap { gap };
    let mut random = Random(ChaCha8Rng::seed_from_u64(20));
    let plain = |random: &mut Random, dim, ranks: &[usize]| {
        ranks.iter().map(|&rank| random.form(dim, rank, false, false)).collect::<Vec<_>>()
    };
    let mixed = |random: &mut Random, dim| {
        vec![
            random.form(dim, 3, false, false),
            random.form(dim, 0, true, false),
            random.form(dim, 0, false, true),
            random.form(dim, 2, true, true),
            ScoreForm::default(),
        ]
    };
    let constant = |bias: f32| ScoreForm { bias, ..ScoreForm::default() };
    let few = plain(&mut random, 2, &[1, 2]);
    let many = plain(&mut random, 64, &[4, 7, 1, 4, 3, 2, 5, 4]);
    let wide = plain(&mut random, 768, &[6, 6, 6]);
    let gaps = plain(&mut random, 33, &[5, 2, 9]);
    let (linear, linear_gaps) = (mixed(&mut random, 5), mixed(&mut random, 17));
    let floored = plain(&mut random, 16, &[3, 3, 3, 3]);
    [
        ("softmax", Sampling::Softmax, 0.0, uniform(2), few),
        ("softmax of many models", Sampling::Softmax, 0.05, uniform(8), many),
        ("softmax in 768 dimensions", Sampling::Softmax, 0.0, uniform(3), wide),
        ("inverse gap", gap(12.5), 0.0, uniform(3), gaps),
        ("all parts, softmax", Sampling::Softmax, 0.1, uniform(5), linear),
        ("all parts, inverse gap", gap(3.0), 0.2, vec![0.4, 0.3, 0.2, 0.1, 0.0], linear_gaps),
        ("a floor that is not uniform", Sampling::Softmax, 0.5, vec![0.0, 0.7, 0.05, 0.25], floored),
        ("nothing but the floor", Sampling::Softmax, 1.0, vec![0.0, 0.25, 0.0, 0.75], vec![constant(0.5); 4]),
        ("nothing learned, rank 0", Sampling::Softmax, 0.0, uniform(3), vec![ScoreForm::default(); 3]),
        ("equals, inverse gap", gap(100.0), 0.0, uniform(4), [0.25, 0.5, 0.5, 0.25].map(constant).to_vec()),
        ("one always", Sampling::Softmax, 0.0, uniform(3), [0.0, ALWAYS, 3.0].map(constant).to_vec()),
        ("a gap of zero", gap(0.0), 0.0, uniform(3), [1.0, 2.0, 3.0].map(constant).to_vec()),
        ("one model", gap(5.0), 0.3, uniform(1), vec![constant(-2.0)]),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, (name, sampling, floor, floor_distribution, scores))| {
        let dim = scores.iter().map(dimension).max().filter(|&dim| dim > 0).unwrap_or(2);
        let head = HeadTable::default();
        let policy = Policy { sampling, floor, floor_distribution, scores, head, outcomes: Outcomes::default() };
        case(&mut random, i, name, dim, policy, &[], |_| Among::default())
    })
    .collect()
}

/// Parameters with a head table; every other request is one of its queries.
fn head_cases() -> Vec<Case> {
    let mut random = Random(ChaCha8Rng::seed_from_u64(21));
    let shapes = [
        ("head queries, softmax", Sampling::Softmax, 4, vec![2, 0, 3], 12),
        ("head queries, inverse gap", Sampling::InverseGap { gap: 12.5 }, 33, vec![3, 3], 12),
        ("head queries in 768 dimensions", Sampling::Softmax, 768, vec![2, 2, 2, 2], 40),
        ("head queries alone", Sampling::InverseGap { gap: 3.0 }, 7, vec![0; 5], 12),
    ];
    let make = |(i, (name, sampling, dim, ranks, count)): (usize, (&str, Sampling, usize, Vec<usize>, usize))| {
        let scores: Vec<ScoreForm> = ranks.iter().map(|&rank| random.form(dim, rank, rank == 3, i == 0)).collect();
        let models = scores.len();
        let known: Vec<Vec<f32>> = (0..count).map(|_| random.numbers(dim, 1.0)).collect();
        let mut keys: Vec<u64> = known.iter().map(|query| QueryKey::of(&Query::from_f32(query).unwrap()).0).collect();
        keys.sort_unstable();
        let head = HeadTable::new(models, keys, random.numbers(count * models, 2.0)).unwrap();
        let (floor, floor_distribution) = (0.05 * i as f64, uniform(models));
        let policy = Policy { sampling, floor, floor_distribution, scores, head, outcomes: Outcomes::default() };
        case(&mut random, i, name, dim, policy, &known, |_| Among::default())
    };
    shapes.into_iter().enumerate().map(make).collect()
}

/// Models that cost, of which some may answer.
fn priced_cases() -> Vec<Case> {
    let mut random = Random(ChaCha8Rng::seed_from_u64(22));
    let gap = Sampling::InverseGap { gap: 4.0 };
    let shapes = [
        ("outcomes, softmax", Sampling::Softmax, 0.0, uniform(4), vec![0.5]),
        ("outcomes, inverse gap", gap, 0.2, vec![0.0, 0.6, 0.4, 0.0], vec![10.0, -0.25]),
        (
            "outcomes, a floor that is not uniform",
            Sampling::Softmax,
            0.3,
            vec![0.7, 0.0, 0.1, 0.2],
            vec![1e-3, 2.0, 0.0],
        ),
    ];
    let make = |(i, (name, sampling, floor, floor_distribution, prices)): (usize, (&str, _, _, _, Vec<f64>))| {
        let scores: Vec<ScoreForm> = (0..4).map(|m| random.form(6, m, m == 1, true)).collect();
        let names = ["cost", "latency_ms", "größe"].map(str::to_owned)[..prices.len()].to_vec();
        let expected = random.numbers(4 * prices.len(), 1.0);
        let outcomes = Outcomes::new(4, names, prices, expected).unwrap();
        let head = HeadTable::default();
        let policy = Policy { sampling, floor, floor_distribution, scores, head, outcomes };
        let among = |n: usize| Among {
            models: [None, Some(&["bge"][..]), Some(&["e5-large", "zeta"]), Some(&["bge", "mini.lm", "zeta"])][n % 4]
                .map(|names| names.iter().map(|&name| name.to_owned()).collect()),
            draw_key: (n % 3 == 1).then(|| format!("session {n}")),
        };
        case(&mut random, i, name, 6, policy, &[], among)
    };
    shapes.into_iter().enumerate().map(make).collect()
}

fn dimension(form: &ScoreForm) -> usize {
    form.linear.len().max(form.eigenvectors.len() / form.eigenvalues.len().max(1))
}

/// A case; every other request is one of the known queries, where there are some.
fn case(
    random: &mut Random,
    i: usize,
    name: &str,
    dim: usize,
    policy: Policy,
    known: &[Vec<f32>],
    among: impl Fn(usize) -> Among,
) -> Case {
    let spaces = ["default", "shop", "a.b_C-9"];
    let names = ["zeta", "bge", "mini.lm", "e5-large", "m_4", "0", "gte", "Alpha"];
    let long: Vec<u8> = (0..64).map(|byte| byte * 4).collect();
    let keys: [&[u8]; 4] = [b"pointsman", b"k", &[0, 255, 128, 10], &long];
    let params = Params {
        space: Name::try_from(spaces[i % spaces.len()]).unwrap(),
        epoch: i as u64 % 3,
        version: 1000 + i as u64,
        revision: i as u64 % 2,
        models: names[..policy.scores.len()].iter().map(|&name| ModelName::try_from(name).unwrap()).collect(),
        dim,
        created_ms: 1_731_700_000_000,
        algorithm: "hpg".to_owned(),
        policy,
    };
    let key = keys[i % keys.len()];
    let ids = ["r-1", "größe", "gro\u{308}ße", "请求-42", "🚂", "a\u{0}b", " ", &"ü".repeat(128)];
    let more = (0..4).map(|n| format!("{i}-{n}"));
    let requests = ids.into_iter().map(str::to_owned).chain(more).enumerate().map(|(n, id)| {
        // Also lengths whose squares leave the range of f32. Known queries are multiplied by powers of 2, which keep their
        // direction exactly.
        let length = [1.0, 100.0, 1e-30, 1e30][n % 4];
        let exact = [1.0, 0.25, 2.0_f32.powi(-90), 2.0_f32.powi(90)][n / 2 % 4];
        let mut query = |attempt: usize| match known.is_empty() || n % 2 == 0 {
            true => random.numbers(dim, length),
            false => known[(n / 2 + attempt) % known.len()].iter().map(|x| x * exact).collect(),
        };
        let mut tries = (0..100).map(|attempt| decide(&params, key, &id, &query(attempt), among(n)));
        tries.find(|request| clearance(request) > MARGIN).expect("a draw that is far from the boundaries")
    });
    Case {
        name: name.to_owned(),
        space: params.space.to_string(),
        models: params.models.iter().map(ModelName::to_string).collect(),
        dim,
        key: STANDARD.encode(key),
        params: STANDARD.encode(params::encode(&params)),
        requests: requests.collect(),
    }
}

struct Random(ChaCha8Rng);

impl Random {
    fn numbers(&mut self, n: usize, most: f32) -> Vec<f32> {
        (0..n).map(|_| self.0.random_range(-1.0..1.0_f32) * most).collect()
    }

    /// Scores of some units, whatever the dimension.
    fn form(&mut self, dim: usize, rank: usize, linear: bool, bias: bool) -> ScoreForm {
        let unit = 3.0_f32.sqrt();
        ScoreForm {
            eigenvalues: self.numbers(rank, 1.0),
            eigenvectors: self.numbers(rank * dim, unit),
            linear: if linear { self.numbers(dim, unit) } else { Vec::new() },
            bias: if bias { self.numbers(1, 1.0)[0] } else { 0.0 },
        }
    }
}

/// What is announced is what is played: draws by request id fit the propensities.
#[test]
fn draws_fit_the_announced_propensities() {
    let draws = crate::size::sized(1_000_000, 10_000_000);
    let (params, query) = skewed();
    let space = params.space.clone();
    let router = Router::new(DrawKey::new(b"audit").unwrap());
    router.offer(params);
    let announced = router.route(&space, "r", &query).unwrap().unwrap().distribution.propensities;
    let count = |part: usize| {
        let mut counts = vec![0_u64; announced.len()];
        for i in (part..draws).step_by(2) {
            counts[router.route(&space, &format!("request-{i}"), &query).unwrap().unwrap().model] += 1;
        }
        counts
    };
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let other = scope.spawn(|| count(1));
        count(0).iter().zip(other.join().unwrap()).map(|(a, b)| a + b).collect()
    });
    let squares = counts.iter().zip(&announced).map(|(&n, p)| {
        let expected = p * draws as f64;
        (n as f64 - expected).powi(2) / expected
    });
    let chi: f64 = squares.sum();
    println!("{draws} draws: chi-square {chi:.2} of {} degrees of freedom", announced.len() - 1);
    // Beyond 29.9 of 7 degrees lies one in ten thousand; the draws are the same in every run.
    assert!(chi < 29.9, "{counts:?} for {announced:?}");
}

/// Eight models with propensities of many sizes, and a query.
fn skewed() -> (Params, Vec<f32>) {
    let mut policy = Policy::unlearned(8, None);
    for (m, form) in policy.scores.iter_mut().enumerate() {
        *form = ScoreForm {
            eigenvalues: vec![m as f32],
            eigenvectors: vec![0.6, 0.8, 0.0, 0.0],
            bias: -0.3 * m as f32,
            ..ScoreForm::default()
        };
    }
    policy.floor = 0.05;
    let params = Params {
        space: Name::default_space(),
        epoch: 0,
        version: 1,
        revision: 0,
        models: (0..8).map(|m| ModelName::try_from(format!("m{m}")).unwrap()).collect(),
        dim: 4,
        created_ms: 0,
        algorithm: "hpg".to_owned(),
        policy,
    };
    (params, vec![1.0, 1.0, 0.5, 0.0])
}
