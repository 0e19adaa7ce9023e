//! Quality, cost and violation of a budget, on a stream that another program can replay: `benches/budget_peer` compares with it.
//!
//! `cargo bench --bench budget -- --out DIR` writes DIR/stream.f64 (per round: the query, the expected reward and the cost of each
//! model, and the number in 0..1 below which an expected reward earns 1; all little-endian) and prints one JSON object. d = 64,
//! M = 8, 40,000 rounds; three models change their price midway.

use std::io::Write;

use pointsman::config::{Algorithm, LearnerConfig, ObjectiveConfig, OutcomeConfig};
use pointsman::learner::Trainer;
use pointsman::simulate::World;
use pointsman::simulate::history::History;
use pointsman::simulate::ledger::Ledger;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::priced::{PriceSpec, Priced};
use pointsman::simulate::queries::Shape;
use pointsman::simulate::run::{COST, InProcess, Plan, run};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const DIM: usize = 64;
const MODELS: usize = 8;
const ROUNDS: u64 = 40_000;
const BUDGET: f64 = 0.6;
const SEED: u64 = 101;
const BEGIN: usize = 5000;
const WINDOW: usize = 10_000;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let out = arguments.iter().position(|a| a == "--out").and_then(|at| arguments.get(at + 1));
    if let Some(out) = out {
        write_stream(&std::path::Path::new(out).join("stream.f64"));
    }
    let mut policies = serde_json::Map::new();
    let mut possible = Value::Null;
    for (name, algorithm) in [("hpg", Algorithm::Hpg), ("hypentropy-regression", Algorithm::HypentropyRegression)] {
        let ledger = play(algorithm);
        let all = 0..ledger.rounds();
        let (played, best) = (ledger.played(all.clone()), ledger.best_fixed(all, BUDGET));
        let violation = ledger.worst_violation(BUDGET, BEGIN, WINDOW);
        policies
            .insert(name.to_owned(), json!({"quality": played.quality, "cost": played.cost, "violation": violation}));
        possible = json!({"quality": best.quality, "cost": best.cost});
    }
    let stream = json!({"dim": DIM, "models": MODELS, "rounds": ROUNDS, "begin": BEGIN, "window": WINDOW});
    println!("{}", json!({"stream": stream, "budget": BUDGET, "policies": policies, "possible": possible}));
}

fn world() -> Priced {
    let (dim, models, shape) = (DIM, MODELS, Shape::PowerLaw);
    let world = LogQuadratic::new(LogQuadraticSpec { dim, models, intrinsic_rank: 2, signal: 0.3, shape, seed: SEED });
    Priced::new(Box::new(world), PriceSpec { noise: 0.0, reprice_at: Some(ROUNDS / 2), seed: SEED })
}

fn write_stream(path: &std::path::Path) {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).expect("the stream's file"));
    let mut world = world();
    // The loop's own draws.
    let mut generator = ChaCha8Rng::seed_from_u64(SEED);
    generator.set_stream(u64::MAX);
    for _ in 0..ROUNDS {
        let query = world.next_query();
        let luck: [f64; 3] = generator.random();
        let costs = world.costs().map(|costs| costs.drawn.to_vec()).unwrap_or_default();
        for x in query.as_slice().iter().chain(&world.expected_rewards(&query)).chain(&costs).chain(&luck[2..]) {
            file.write_all(&x.to_le_bytes()).expect("the stream's file");
        }
    }
}

fn play(algorithm: Algorithm) -> Ledger {
    let models = (1..=MODELS).map(|m| format!("model-{m}")).collect();
    let config = LearnerConfig { dim: DIM, models, algorithm, ..LearnerConfig::default() };
    let cost = OutcomeConfig { range: Some([0.0, 1000.0]), budget: Some(BUDGET), ..OutcomeConfig::default() };
    let objective = ObjectiveConfig { floor: None, outcomes: [(COST.to_owned(), cost)].into() };
    let objective = objective.check().expect("a good objective");
    let spec = config.check().and_then(|spec| spec.with_objective(&objective)).expect("a good configuration");
    let mut trainer = Trainer::new(spec);
    let plan = Plan { rounds: ROUNDS, delay: 0, refresh: 1, lost: 0.0, switch_at: None, seed: SEED };
    let mut history = History::new(ROUNDS, 2);
    run(&mut world(), &mut InProcess::new(&mut trainer, 1), &plan, &mut history, |_| ()).expect("they fit");
    history.ledger().clone()
}
