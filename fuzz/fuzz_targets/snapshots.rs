//! Records of snapshots. The checksum keeps accidents out, not somebody who can compute it: the harness writes a valid
//! envelope around arbitrary payloads. The first byte chooses the kind of record, the second its version.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use pointsman::config::{Config, LearnerConfig, Settings};
use pointsman::engine::{Engine, EngineHead};
use pointsman::learner::Trainer;
use pointsman::snapshot::{LaneHead, SharedHead};
use xxhash_rust::xxh3::xxh3_64;

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let models = ["a", "b"].map(String::from).to_vec();
    let learner = LearnerConfig { dim: 3, models, rank: Some(2), ..LearnerConfig::default() };
    Config { learner, ..Config::default() }.check().expect("a valid configuration")
});

/// An envelope with a checksum that matches.
fn sealed(kind: u16, version: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"POINTSMN".to_vec();
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
    bytes
}

fuzz_target!(|data: &[u8]| {
    let [kind, version, payload @ ..] = data else { return };
    let version = u16::from(version % 4);
    match kind % 6 {
        0 => drop(LaneHead::open(&sealed(3, version, payload))),
        1 => drop(SharedHead::open(&sealed(4, version, payload))),
        2 => drop(Trainer::restore(SETTINGS.learner.clone(), &sealed(1, version, payload))),
        3 => {
            // A space without a learner, with one request.
            let at = payload.len().min(payload.first().map_or(0, |byte| usize::from(*byte)) + 1);
            let (space, request) = payload.split_at(at);
            let records = [
                (b"sdefault".to_vec(), sealed(2, version, space.get(1..).unwrap_or_default())),
                (b"qdefault\0r".to_vec(), request.to_vec()),
            ];
            drop(Engine::restore(SETTINGS.clone(), EngineHead::default(), records));
        }
        4 => {
            let records = [(b"rdefault".to_vec(), sealed(2, version, payload))];
            drop(Engine::restore(SETTINGS.clone(), EngineHead::default(), records));
        }
        _ => {
            // Without the envelope: any bytes under any key.
            let (key, value) = payload.split_at(payload.len().min(9));
            drop(Engine::restore(SETTINGS.clone(), EngineHead::default(), [(key.to_vec(), value.to_vec())]));
            drop(LaneHead::open(payload));
        }
    }
});
