//! Routing parameters: what decodes can be served, and encodes to what decodes to the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman::router::Compiled;
use pointsman::wire::params::{decode, encode};

fuzz_target!(|data: &[u8]| {
    let Ok(params) = decode(data) else { return };
    assert_eq!(decode(&encode(&params)).expect("what was encoded decodes"), params);
    let query: Vec<f32> = (0..params.dim).map(|i| (i % 7) as f32 - 2.5).collect();
    let compiled = Compiled::new(params);
    let Ok(distribution) = compiled.distribution(&query) else { return };
    let sum: f64 = distribution.propensities.iter().sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    assert!(distribution.propensities.iter().all(|p| (0.0..=1.0 + 1e-9).contains(p)));
});
