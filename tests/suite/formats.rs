//! Every format version that was ever written is read: a file of each stays in `tests/golden/formats`.
//!
//! `POINTSMAN_BLESS=1 cargo test formats` writes files of the present version that are not there yet.

use std::fs;
use std::path::Path;

use pointsman::config::{Algorithm, LearnerConfig};
use pointsman::event::{Example, Name, Query};
use pointsman::learner::Trainer;
use pointsman::router::{Params, Policy, Sampling, ScoreForm};
use pointsman::wire::params;

fn golden(name: &str, present: &[u8]) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats").join(name);
    if std::env::var_os("POINTSMAN_BLESS").is_some() && !path.exists() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, present).unwrap();
    }
    fs::read(path).unwrap()
}

/// A learner in the middle of a batch.
fn learner(algorithm: Algorithm) -> Trainer {
    let models = ["a", "b", "c"].map(String::from).to_vec();
    let config = LearnerConfig { dim: 4, models, algorithm, rank: Some(2), batch: Some(3), ..LearnerConfig::default() };
    let mut trainer = Trainer::new(config.check().unwrap());
    for i in 0..40 {
        let query = Query::new((0..4).map(|j| f64::from((i * 7 + j * 3) % 5) - 1.7)).unwrap();
        let propensities = vec![0.25, 0.25, 0.5];
        let reward = f64::from(u8::from(i % 3 == 1));
        trainer.learn(Example::new(query, i as usize % 3, propensities, None, reward).unwrap()).unwrap();
    }
    trainer
}

#[test]
fn saved_learners() {
    for (name, algorithm) in [
        ("learner-hpg-1.bin", Algorithm::Hpg),
        ("learner-parameter-free-1.bin", Algorithm::HpgParameterFree),
        ("learner-uniform-1.bin", Algorithm::Uniform),
    ] {
        let present = learner(algorithm);
        let bytes = golden(name, &present.save());
        let restored = Trainer::restore(present.spec().clone(), &bytes).expect(name);
        assert_eq!((restored.version(), restored.learned()), (39, 40), "{name}");
        assert_eq!(restored.mean_reward(), present.mean_reward(), "{name}");
        let query = Query::new([0.3, -0.1, 0.8, 0.2]).unwrap();
        let (found, expected) = (restored.distribution(&query).unwrap(), present.distribution(&query).unwrap());
        for (found, expected) in found.propensities.iter().zip(&expected.propensities) {
            assert!((found - expected).abs() < 1e-9, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn routing_parameters() {
    let name = |text: &str| Name::try_from(text).unwrap();
    let quadratic = ScoreForm {
        eigenvalues: vec![1.5, -0.5],
        eigenvectors: vec![0.6, 0.8, 0.0, 0.8, -0.6, 0.0],
        ..ScoreForm::default()
    };
    let linear = ScoreForm { linear: vec![1.0, 2.0, 3.0], bias: -0.25, ..ScoreForm::default() };
    let present = Params {
        space: name("shop"),
        epoch: 2,
        version: 1234,
        revision: 3,
        models: vec![name("bge"), name("mini.lm")],
        dim: 3,
        created_ms: 1_731_700_000_000,
        algorithm: "hpg".to_owned(),
        policy: Policy {
            sampling: Sampling::InverseGap { gap: 30.5 },
            floor: 0.1,
            floor_distribution: vec![0.75, 0.25],
            scores: vec![quadratic, linear],
        },
    };
    let bytes = golden("params-1.safetensors", &params::encode(&present));
    assert_eq!(params::decode(&bytes).unwrap(), present);
    assert_eq!(params::encode(&present), bytes, "the format changed: raise its version and keep the old file");
}
