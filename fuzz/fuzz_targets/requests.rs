//! Bodies of HTTP requests. The first byte chooses the endpoint.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman::event::Query;
use pointsman::wire::requests::{BATCH_MAX, BatchBody, ExplainBody, Object, RewardBody, RouteBody, Vector, floats};

fuzz_target!(|data: &[u8]| {
    let Some((endpoint, body)) = data.split_first() else { return };
    let check = |vector: &Vector| drop(Query::from_f32(&vector.0));
    match endpoint % 5 {
        0 => serde_json::from_slice::<Object<RouteBody>>(body).iter().for_each(|body| check(&body.0.query)),
        1 => serde_json::from_slice::<Object<BatchBody>>(body).iter().for_each(|body| {
            assert!(body.0.requests.0.len() <= BATCH_MAX);
            body.0.requests.0.iter().for_each(|item| check(&item.0.query));
        }),
        2 => serde_json::from_slice::<Object<RewardBody>>(body).iter().for_each(|body| assert!(body.0.reward.is_finite())),
        3 => serde_json::from_slice::<Object<ExplainBody>>(body).iter().for_each(|body| check(&body.0.query)),
        _ => floats(body).into_iter().for_each(|vector| check(&Vector(vector))),
    }
});
