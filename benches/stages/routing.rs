//! What leaves a learner and enters a router.

use std::hint::black_box;

use pointsman::event::{Name, Query};
use pointsman::learner::Trainer;
use pointsman::router::{DrawKey, Params, Router};
use pointsman::wire::params;
use pointsman::wire::records::Record;
use pointsman::wire::records::learner::LearnerRecord;

use crate::support::machine::{Machine, bandwidth};
use crate::support::{fastest, timed};
use crate::{BUDGET, DIM, MODELS, STRETCH, Stage, copy, each, singles};

/// Parameters, decisions, and the snapshot.
pub fn routing(trainer: &Trainer, rank: usize, machine: &Machine) -> Vec<Stage> {
    let parameters = published(trainer);
    let encoded = params::encode(&parameters);
    let floats: Vec<&[f32]> = parameters.policy.scores.iter().map(|form| form.eigenvectors.as_slice()).collect();
    let text = serde_json::to_vec(&floats).expect("numbers");
    let saved = trainer.save();
    let record = LearnerRecord::open(&saved).expect("what was saved");
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
            &mut || timed(|| drop(black_box(serde_json::to_vec(&record).expect("numbers")))),
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
