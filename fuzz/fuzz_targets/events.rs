//! Lines of query and reward logs: the quick parser and the tree agree, and the engine counts every line exactly once.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use pointsman::config::{Config, LearnerConfig, Settings};
use pointsman::engine::{Engine, Input, Side};
use pointsman::wire::events::Parser;

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let models = ["model-a", "model-b", "model-c"].map(String::from).to_vec();
    let learner = LearnerConfig { dim: 8, models, rank: Some(2), ..LearnerConfig::default() };
    Config { learner, ..Config::default() }.check().expect("a valid configuration")
});

fuzz_target!(|data: &[u8]| {
    let parser = Parser::new(&SETTINGS);
    let by_tree = Parser::new(&SETTINGS).by_tree();
    let mut engine = Engine::new(SETTINGS.clone());
    let mut number = 0;
    for line in data.split(|byte| *byte == b'\n').take(200) {
        for side in [Side::Query, Side::Reward] {
            let input = Input::parse(&parser, side, line.to_vec(), Some(7));
            // A NaN differs from itself, so values are compared as they are shown.
            let slow = Input::parse(&by_tree, side, line.to_vec(), Some(7));
            assert_eq!(format!("{input:?}"), format!("{slow:?}"));
            engine.step(input);
            number += 1;
        }
    }
    let counts = engine.counts();
    assert_eq!(counts.queries() + counts.rewards(), number);
    assert!(counts.join.balance());
    engine.finish();
    assert!(engine.counts().join.balance());
});
