//! JSON bodies of requests to the router. Unknown fields are errors.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Maximum number of queries in a batch.
pub const BATCH_MAX: usize = 1000;

/// A query to route.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteBody {
    /// Its space; absent means `default`.
    pub space: Option<String>,
    /// The request's ID; if absent, the router generates one.
    pub request_id: Option<String>,
    /// The query.
    pub query: Vector,
    /// The models that may answer; absent: all.
    pub models: Option<Vec<String>>,
    /// Models that may not answer.
    pub exclude: Option<Vec<String>>,
    /// What the model is drawn by; absent: the request's ID.
    pub draw_key: Option<String>,
}

/// Several queries of one space.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchBody {
    /// Their space; absent means `default`.
    pub space: Option<String>,
    /// The queries.
    pub requests: Items,
}

/// One query of a batch.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchItem {
    /// The request's ID; if absent, the router generates one.
    pub request_id: Option<String>,
    /// The query.
    pub query: Vector,
    /// The models that may answer; absent: all.
    pub models: Option<Vec<String>>,
    /// Models that may not answer.
    pub exclude: Option<Vec<String>>,
    /// What the model is drawn by; absent: the request's ID.
    pub draw_key: Option<String>,
}

/// What came of a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardBody {
    /// Its space; absent means `default`.
    pub space: Option<String>,
    /// The request's ID.
    pub request_id: String,
    /// The reward.
    pub reward: Option<f64>,
    /// Outcomes of the decision, such as costs, by name.
    pub outcomes: Option<BTreeMap<String, f64>>,
    /// Whether the model did not answer.
    pub failed: Option<bool>,
    /// Rewards of several models.
    pub rewards: Option<BTreeMap<String, f64>>,
    /// The model that was preferred.
    pub preferred: Option<String>,
    /// The model that it was preferred to.
    pub over: Option<String>,
    /// Identifies it among the rewards of the request.
    pub event_id: Option<String>,
}

/// An operator rests or wakes a model.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestBody {
    /// The space; absent means `default`.
    pub space: Option<String>,
    /// Whether the model rests.
    pub resting: bool,
    /// For how long; absent: until it is woken.
    pub for_ms: Option<u64>,
}

/// A query to explain.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainBody {
    /// Its space; absent means `default`.
    pub space: Option<String>,
    /// The query.
    pub query: Vector,
    /// The models that may answer; absent: all.
    pub models: Option<Vec<String>>,
    /// Models that may not answer.
    pub exclude: Option<Vec<String>>,
}

/// A struct that is written as an object. By itself serde also takes an array of the fields in order.
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A query vector: an array of numbers, or base64 of little-endian f32.
pub struct Vector(pub Vec<f32>);

impl<'de> Deserialize<'de> for Vector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Vector;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of numbers, or base64 of little-endian f32")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Vector, A::Error> {
                let mut vector = Vec::new();
                while let Some(x) = numbers.next_element::<f32>()? {
                    vector.push(x);
                }
                Ok(Vector(vector))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vector, E> {
                let bytes = base64::engine::general_purpose::STANDARD.decode(text);
                let vector = bytes.ok().and_then(|bytes| floats(&bytes));
                vector.map(Vector).ok_or_else(|| E::custom("must be base64 of little-endian f32"))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// The queries of a batch. Their number is checked while they are read, so that too many take no memory.
pub struct Items(pub Vec<Object<BatchItem>>);

impl<'de> Deserialize<'de> for Items {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded;
        impl<'de> Visitor<'de> for Bounded {
            type Value = Items;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of objects")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Items, A::Error> {
                let mut all = Vec::new();
                while all.len() < BATCH_MAX {
                    match items.next_element()? {
                        Some(item) => all.push(item),
                        None => return Ok(Items(all)),
                    }
                }
                match items.next_element::<IgnoredAny>()? {
                    Some(_) => Err(serde::de::Error::custom(format!("must have at most {BATCH_MAX} items"))),
                    None => Ok(Items(all)),
                }
            }
        }
        deserializer.deserialize_seq(Bounded)
    }
}

/// Little-endian f32, or none if the bytes are not a whole number of them.
pub fn floats(bytes: &[u8]) -> Option<Vec<f32>> {
    let (chunks, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
}
