//! Routing parameters as a safetensors file: one message of the compacted topic, readable in any language.
//!
//! Metadata are strings; tensors are f32: `<model>.eigenvalues` of shape k, `<model>.eigenvectors` k x dim,
//! `<model>.linear` dim, `<model>.bias` 1. What is absent is zero.
//!
//! Version 2 adds the head table: `.head.keys` of shape n (u64) and `.head.corrections` n x models. No model's name starts
//! with a dot, so no model's tensor has such a name. It also adds priced outcomes: the metadata `outcomes` (names) and
//! `lambda` (prices), and `<model>.outcomes` of shape n. Parameters with neither are written as version 1, which routers of
//! earlier releases read.

use std::collections::{BTreeSet, HashMap};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use thiserror::Error;

use crate::config::{DIM_MAX, MODELS_MAX, Settings};
use crate::event::{ModelName, Name};
use crate::router::{
    HEAD_QUERIES_MAX, HeadTable, OUTCOME_NAME_BYTES_MAX, OUTCOMES_MAX, Outcomes, Params, Policy, Sampling, ScoreForm,
    uniform,
};

const FORMAT: &str = "pointsman.params";
/// The newest version that is read.
const FORMAT_VERSION: u64 = 2;
/// The first version with a head table.
const HEAD_VERSION: u64 = 2;
/// The first version with outcomes.
const OUTCOMES_VERSION: u64 = 2;
/// Metadata entries of outcomes: their names and prices.
const OUTCOMES: &str = "outcomes";
const LAMBDA: &str = "lambda";
/// Metadata entry of a publication. Readers that do not know it ignore it.
const OLDEST_REWARD: &str = "oldest_reward_ms";
const HEAD_KEYS: &str = ".head.keys";
const HEAD_CORRECTIONS: &str = ".head.corrections";

/// Largest epoch, version and revision: every JSON reader holds numbers up to here exactly.
pub const STAMP_MAX: u64 = 1 << 53;

/// Latest `created_ms`: the end of the year 9999.
const CREATED_MS_MAX: u64 = 253_402_300_799_999;

/// Longest `algorithm`, in bytes.
const ALGORITHM_BYTES_MAX: usize = 64;

/// Bounds on the magnitude of scales (eigenvalues, linear parts, biases, corrections, outcomes, prices, the inverse gap) and of components of
/// eigenvectors. No score overflows within them, neither in f64 nor in the router's products in f32.
const SCALE_MAX: f64 = 1e24;
const COMPONENT_MAX: f64 = 1e6;

/// Why bytes are not routing parameters.
#[derive(Debug, Error)]
pub enum BadParams {
    /// Not a safetensors file.
    #[error("not a safetensors file: {0}")]
    Container(#[from] safetensors::SafeTensorError),
    /// A metadata entry is missing or invalid.
    #[error("metadata {key}: {problem}")]
    Metadata {
        /// The entry.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor has the wrong type or shape.
    #[error("tensor {name}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The parameters do not match the configuration of their space.
    #[error("space {space} {problem}")]
    Space {
        /// The space.
        space: Name,
        /// What differs, and what to do.
        problem: String,
    },
}

/// Encodes parameters; the same parameters give the same bytes.
pub fn encode(params: &Params) -> Vec<u8> {
    encode_publication(params, None)
}

/// Encodes parameters with the event time of the oldest reward that they are the first to contain. It belongs to the
/// publication: the same parameters published again have none.
pub fn encode_publication(params: &Params, oldest_reward_ms: Option<i64>) -> Vec<u8> {
    let policy = &params.policy;
    let (sampling, gap) = match policy.sampling {
        Sampling::Softmax => ("softmax", None),
        Sampling::InverseGap { gap } => ("inverse_gap", Some(gap)),
    };
    let version_of = |is_empty: bool, version: u64| if is_empty { 1 } else { version };
    let (head, outcomes) = (&policy.head, &policy.outcomes);
    let format_version =
        version_of(head.is_empty(), HEAD_VERSION).max(version_of(outcomes.is_empty(), OUTCOMES_VERSION));
    let mut metadata = HashMap::from(
        [
            ("format", FORMAT.to_owned()),
            ("format_version", format_version.to_string()),
            ("space", params.space.to_string()),
            ("epoch", params.epoch.to_string()),
            ("version", params.version.to_string()),
            ("revision", params.revision.to_string()),
            ("models", json(&params.models)),
            ("dim", params.dim.to_string()),
            ("sampling", sampling.to_owned()),
            ("floor", json(&policy.floor)),
            ("floor_distribution", json(&policy.floor_distribution)),
            ("created_ms", params.created_ms.to_string()),
            ("algorithm", params.algorithm.clone()),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    metadata.extend(gap.map(|gap| ("inverse_gap".to_owned(), json(&gap))));
    metadata.extend(oldest_reward_ms.map(|ms| (OLDEST_REWARD.to_owned(), ms.to_string())));
    if !outcomes.is_empty() {
        metadata.insert(OUTCOMES.to_owned(), json(&outcomes.names()));
        metadata.insert(LAMBDA.to_owned(), json(&outcomes.prices()));
    }
    let forms = params.models.iter().zip(&policy.scores).flat_map(|(name, form)| tensors(name, form, params.dim));
    let costs = params.models.iter().enumerate().map(|(m, name)| (name, outcomes.expected(m)));
    let costs = costs.filter(|(_, expected)| expected.iter().any(|x| *x != 0.0));
    let costs = costs.map(|(name, x)| Tensor::f32(format!("{name}.{OUTCOMES}"), vec![x.len()], x));
    let all: Vec<Tensor> = forms.chain(costs).chain(head_tensors(head, params.models.len())).collect();
    let views = all.iter().map(|Tensor { name, dtype, shape, bytes }| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a shape that fits its data"))
    });
    sort_header(safetensors::serialize(views, Some(metadata)).expect("a header of bounded size"))
}

/// Decodes parameters. Every number is within bounds, so that routing by the result can neither fail nor yield NaN.
pub fn decode(bytes: &[u8]) -> Result<Params, BadParams> {
    let tensors = SafeTensors::deserialize(bytes)?;
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let meta = Metadata(&metadata);
    if meta.text("format")? != FORMAT {
        return Err(meta.bad("format", format!("expected {FORMAT}")));
    }
    let format_version: u64 = meta.json("format_version")?;
    if format_version > FORMAT_VERSION {
        return Err(meta.bad(
            "format_version",
            format!("{format_version} is newer than this version reads ({FORMAT_VERSION}): upgrade pointsman"),
        ));
    }
    let models = meta.models()?;
    let dim = meta.integer("dim", 1, DIM_MAX as u64)? as usize;
    let sampling = match meta.text("sampling")? {
        "softmax" => Sampling::Softmax,
        "inverse_gap" => Sampling::InverseGap { gap: meta.number("inverse_gap", 0.0, SCALE_MAX)? },
        _ => return Err(meta.bad("sampling", "must be softmax or inverse_gap".to_owned())),
    };
    let scores = models.iter().map(|name| score_form(&tensors, name, dim)).collect::<Result<_, _>>()?;
    let head = head_table(&tensors, format_version, models.len())?;
    let outcomes = outcomes(&meta, &tensors, format_version, &models)?;
    Ok(Params {
        space: meta.text("space")?.try_into().map_err(|e: crate::event::BadName| meta.bad("space", e.to_string()))?,
        epoch: meta.integer("epoch", 0, STAMP_MAX)?,
        version: meta.integer("version", 0, STAMP_MAX)?,
        revision: meta.integer("revision", 0, STAMP_MAX)?,
        created_ms: meta.integer("created_ms", 0, CREATED_MS_MAX)?,
        algorithm: meta.algorithm()?,
        policy: Policy {
            sampling,
            floor: meta.number("floor", 0.0, 1.0)?,
            floor_distribution: meta.floor_distribution(models.len())?,
            scores,
            head,
            outcomes,
        },
        models,
        dim,
    })
}

/// Event time of the oldest reward that published parameters are the first to contain, in milliseconds since 1970. `None` if
/// the publication does not say.
pub fn oldest_reward_ms(bytes: &[u8]) -> Option<i64> {
    let (_, header) = SafeTensors::read_metadata(bytes).ok()?;
    header.metadata().as_ref()?.get(OLDEST_REWARD)?.parse().ok()
}

/// Decodes parameters that must agree with the configuration: a space that may exist, of the same dimension, and no
/// model that is not configured. Configured models may be missing: a learner may know fewer.
pub fn decode_for(settings: &Settings, bytes: &[u8]) -> Result<Params, BadParams> {
    let params = decode(bytes)?;
    let differs = |problem: String| Err(BadParams::Space { space: params.space.clone(), problem });
    if !settings.allows(&params.space) {
        return differs("is not listed in [spaces], and learner.spaces = \"listed\": add it to [spaces]".to_owned());
    }
    let spec = settings.space(&params.space);
    if params.dim != spec.dim {
        return differs(format!("has dim = {}, but the configuration has learner.dim = {}", params.dim, spec.dim));
    }
    match params.models.iter().find(|model| !spec.models.contains(model)) {
        Some(model) => differs(format!("has model {model}, which is not configured: add it to learner.models")),
        None => Ok(params),
    }
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("numbers and names are JSON")
}

/// The start of a text that may be long, for an error.
fn start(text: &str) -> String {
    text.chars().take(40).collect()
}

struct Metadata<'a>(&'a HashMap<String, String>);

impl Metadata<'_> {
    fn bad(&self, key: &'static str, problem: String) -> BadParams {
        BadParams::Metadata { key, problem }
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn text(&self, key: &'static str) -> Result<&str, BadParams> {
        self.0.get(key).map(String::as_str).ok_or_else(|| self.bad(key, "missing".to_owned()))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, key: &'static str) -> Result<T, BadParams> {
        let text = self.text(key)?;
        serde_json::from_str(text).map_err(|e| self.bad(key, format!("{:?}: {e}", start(text))))
    }

    fn number(&self, key: &'static str, low: f64, high: f64) -> Result<f64, BadParams> {
        self.within(key, low, high)
    }

    fn integer(&self, key: &'static str, low: u64, high: u64) -> Result<u64, BadParams> {
        self.within(key, low, high)
    }

    fn within<T: serde::de::DeserializeOwned + PartialOrd + std::fmt::Display>(
        &self,
        key: &'static str,
        low: T,
        high: T,
    ) -> Result<T, BadParams> {
        let value: T = self.json(key)?;
        if value >= low && value <= high {
            return Ok(value);
        }
        Err(self.bad(key, format!("{value} is not between {low} and {high}")))
    }

    fn models(&self) -> Result<Vec<ModelName>, BadParams> {
        let models: Vec<ModelName> = self.json("models")?;
        if !(1..=MODELS_MAX).contains(&models.len()) {
            return Err(self.bad("models", format!("has {} names: must have 1 to {MODELS_MAX}", models.len())));
        }
        let mut seen = BTreeSet::new();
        match models.iter().find(|name| !seen.insert(*name)) {
            Some(twice) => Err(self.bad("models", format!("{twice} is listed twice"))),
            None => Ok(models),
        }
    }

    fn algorithm(&self) -> Result<String, BadParams> {
        let text = self.text("algorithm")?;
        if text.len() > ALGORITHM_BYTES_MAX || text.chars().any(char::is_control) {
            let problem = format!("must have at most {ALGORITHM_BYTES_MAX} bytes and no control characters");
            return Err(self.bad("algorithm", problem));
        }
        Ok(text.to_owned())
    }

    fn floor_distribution(&self, models: usize) -> Result<Vec<f64>, BadParams> {
        if !self.has("floor_distribution") {
            return Ok(uniform(models));
        }
        let distribution: Vec<f64> = self.json("floor_distribution")?;
        let is_distribution = distribution.len() == models
            && distribution.iter().all(|p| (0.0..=1.0).contains(p))
            && (distribution.iter().sum::<f64>() - 1.0).abs() < 1e-6;
        if is_distribution {
            return Ok(distribution);
        }
        Err(self.bad("floor_distribution", "is not a distribution over the models".to_owned()))
    }
}

/// A tensor to write.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn f32(name: String, shape: Vec<usize>, values: &[f32]) -> Self {
        Self { name, dtype: Dtype::F32, shape, bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }
}

fn tensors(name: &ModelName, form: &ScoreForm, dim: usize) -> Vec<Tensor> {
    let rank = form.eigenvalues.len();
    [
        ("eigenvalues", vec![rank], &form.eigenvalues[..]),
        ("eigenvectors", vec![rank, dim], &form.eigenvectors[..]),
        ("linear", vec![dim], &form.linear[..]),
        ("bias", vec![1], if form.bias == 0.0 { &[][..] } else { std::slice::from_ref(&form.bias) }),
    ]
    .into_iter()
    .filter(|(_, _, values)| !values.is_empty())
    .map(|(kind, shape, values)| Tensor::f32(format!("{name}.{kind}"), shape, values))
    .collect()
}

fn head_tensors(head: &HeadTable, models: usize) -> Vec<Tensor> {
    if head.is_empty() {
        return Vec::new();
    }
    let bytes = head.keys().iter().flat_map(|key| key.to_le_bytes()).collect();
    let keys = Tensor { name: HEAD_KEYS.to_owned(), dtype: Dtype::U64, shape: vec![head.len()], bytes };
    vec![keys, Tensor::f32(HEAD_CORRECTIONS.to_owned(), vec![head.len(), models], head.corrections())]
}

fn head_table(tensors: &SafeTensors, format_version: u64, models: usize) -> Result<HeadTable, BadParams> {
    let bad = |name: &str, problem: String| Err(BadParams::Tensor { name: name.to_owned(), problem });
    let (keys, corrections) = match (tensors.tensor(HEAD_KEYS).ok(), tensors.tensor(HEAD_CORRECTIONS).ok()) {
        (None, None) => return Ok(HeadTable::default()),
        (Some(keys), Some(corrections)) => (keys, corrections),
        (None, Some(_)) => return bad(HEAD_KEYS, format!("missing, but there is {HEAD_CORRECTIONS}")),
        (Some(_), None) => return bad(HEAD_CORRECTIONS, format!("missing, but there is {HEAD_KEYS}")),
    };
    if format_version < HEAD_VERSION {
        return bad(HEAD_KEYS, format!("needs format_version {HEAD_VERSION}, but it is {format_version}"));
    }
    if keys.dtype() != Dtype::U64 || keys.shape().len() != 1 || keys.shape()[0] > HEAD_QUERIES_MAX {
        let problem = format!("type {:?} with shape {:?} is not U64 [n]", keys.dtype(), keys.shape());
        return bad(HEAD_KEYS, format!("{problem} with n of at most {HEAD_QUERIES_MAX}"));
    }
    let queries = keys.shape()[0];
    let (words, _) = keys.data().as_chunks::<8>();
    let keys = words.iter().map(|&bytes| u64::from_le_bytes(bytes)).collect();
    let expected = format!("F32 [{queries}, {models}]");
    let corrections = floats(&corrections, HEAD_CORRECTIONS, SCALE_MAX, &expected, |shape| shape == [queries, models])?;
    HeadTable::new(models, keys, corrections).or_else(|error| bad(HEAD_KEYS, error.to_string()))
}

fn outcomes(
    meta: &Metadata,
    tensors: &SafeTensors,
    format_version: u64,
    models: &[ModelName],
) -> Result<Outcomes, BadParams> {
    let tensor = |model: &ModelName| format!("{model}.{OUTCOMES}");
    match (meta.has(OUTCOMES), meta.has(LAMBDA)) {
        (true, true) => {}
        (true, false) => return Err(meta.bad(LAMBDA, format!("missing, but there is {OUTCOMES}"))),
        (false, true) => return Err(meta.bad(OUTCOMES, format!("missing, but there is {LAMBDA}"))),
        (false, false) => {
            return match models.iter().map(tensor).find(|name| tensors.tensor(name).is_ok()) {
                Some(name) => Err(meta.bad(OUTCOMES, format!("missing, but there is tensor {name}"))),
                None => Ok(Outcomes::default()),
            };
        }
    }
    if format_version < OUTCOMES_VERSION {
        let problem = format!("needs format_version {OUTCOMES_VERSION}, but it is {format_version}");
        return Err(meta.bad(OUTCOMES, problem));
    }
    let names: Vec<String> = meta.json(OUTCOMES)?;
    if !(1..=OUTCOMES_MAX).contains(&names.len()) {
        return Err(meta.bad(OUTCOMES, format!("has {} names: must have 1 to {OUTCOMES_MAX}", names.len())));
    }
    let mut seen = BTreeSet::new();
    for name in &names {
        if !(1..=OUTCOME_NAME_BYTES_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
            let problem = format!("names must have 1 to {OUTCOME_NAME_BYTES_MAX} bytes and no control characters");
            return Err(meta.bad(OUTCOMES, problem));
        }
        if !seen.insert(name) {
            return Err(meta.bad(OUTCOMES, format!("{name} is listed twice")));
        }
    }
    let prices: Vec<f64> = meta.json(LAMBDA)?;
    if prices.len() != names.len() {
        let problem = format!("has {} prices for {} outcomes: must have one each", prices.len(), names.len());
        return Err(meta.bad(LAMBDA, problem));
    }
    if let Some(price) = prices.iter().find(|price| price.is_nan() || price.abs() > SCALE_MAX) {
        return Err(meta.bad(LAMBDA, format!("{price:e} is not between -{SCALE_MAX:e} and {SCALE_MAX:e}")));
    }
    let (n, mut expected) = (names.len(), Vec::new());
    for model in models {
        let name = tensor(model);
        expected.extend(match tensors.tensor(&name) {
            Ok(view) => floats(&view, &name, SCALE_MAX, &format!("F32 [{n}]"), |shape| shape == [n])?,
            Err(_) => vec![0.0; n],
        });
    }
    Ok(Outcomes::new(models.len(), names, prices, expected).expect("as many prices and expectations as names"))
}

/// The numbers of a tensor of an expected shape, within bounds.
fn floats(
    view: &TensorView,
    name: &str,
    most: f64,
    expected: &str,
    is_expected: impl Fn(&[usize]) -> bool,
) -> Result<Vec<f32>, BadParams> {
    let bad = |problem: String| Err(BadParams::Tensor { name: name.to_owned(), problem });
    if view.dtype() != Dtype::F32 || !is_expected(view.shape()) {
        return bad(format!("type {:?} with shape {:?} does not match {expected}", view.dtype(), view.shape()));
    }
    let (words, _) = view.data().as_chunks::<4>();
    let values: Vec<f32> = words.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    match values.iter().find(|x| x.is_nan() || f64::from(x.abs()) > most) {
        None => Ok(values),
        Some(x) => bad(format!("{x:e} is not between -{most:e} and {most:e}")),
    }
}

fn score_form(tensors: &SafeTensors, name: &ModelName, dim: usize) -> Result<ScoreForm, BadParams> {
    let read = |kind: &str, most: f64, expected: &dyn Fn(&[usize]) -> bool| {
        let name = format!("{name}.{kind}");
        let Ok(view) = tensors.tensor(&name) else { return Ok(Vec::new()) };
        floats(&view, &name, most, &format!("dim = {dim}"), expected)
    };
    // A quadratic form has no more eigenvalues than dimensions.
    let eigenvalues = read("eigenvalues", SCALE_MAX, &|shape| shape.len() == 1 && shape[0] <= dim)?;
    let rank = eigenvalues.len();
    let eigenvectors = read("eigenvectors", COMPONENT_MAX, &|shape| shape == [rank, dim])?;
    if rank.checked_mul(dim) != Some(eigenvectors.len()) {
        let problem = format!("missing, but there are {rank} eigenvalues");
        return Err(BadParams::Tensor { name: format!("{name}.eigenvectors"), problem });
    }
    let linear = read("linear", SCALE_MAX, &|shape| shape == [dim])?;
    let bias = read("bias", SCALE_MAX, &|shape| shape == [1])?.first().copied().unwrap_or(0.0);
    Ok(ScoreForm { eigenvalues, eigenvectors, linear, bias })
}

/// Orders the header's keys: the library writes metadata in the random order of a hash map.
pub(super) fn sort_header(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("the library's own JSON");
    let sorted = header.to_string().into_bytes();
    bytes[8..8 + length].fill(b' ');
    bytes[8..8 + sorted.len()].copy_from_slice(&sorted);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> Params {
        let name = |text: &str| ModelName::try_from(text).unwrap();
        let quadratic = ScoreForm {
            eigenvalues: vec![1.5, -0.5],
            eigenvectors: vec![0.6, 0.8, 0.0, 0.8, -0.6, 0.0],
            ..ScoreForm::default()
        };
        let linear = ScoreForm { linear: vec![1.0, 2.0, 3.0], bias: -0.25, ..ScoreForm::default() };
        Params {
            space: Name::try_from("shop").unwrap(),
            epoch: 2,
            version: 1234,
            revision: 3,
            models: vec![name("bge"), name("mini.lm"), name("zero")],
            dim: 3,
            created_ms: 1_731_700_000_000,
            algorithm: "hpg".to_owned(),
            policy: Policy {
                sampling: Sampling::InverseGap { gap: 30.5 },
                floor: 0.1,
                floor_distribution: vec![0.5, 0.25, 0.25],
                scores: vec![quadratic, linear, ScoreForm::default()],
                head: HeadTable::default(),
                outcomes: Outcomes::default(),
            },
        }
    }

    /// The same with a head table, and with a model whose name resembles its tensors.
    fn params_with_head() -> Params {
        let mut params = params();
        params.models[2] = ModelName::try_from("head").unwrap();
        params.policy.scores[2].bias = 0.5;
        let corrections = vec![0.5, -0.25, 0.0, 1.0, 2.0, -3.0];
        params.policy.head = HeadTable::new(3, vec![7, u64::MAX], corrections).unwrap();
        params
    }

    /// The same with priced outcomes; the model without any costs nothing.
    fn params_with_outcomes() -> Params {
        let mut params = params();
        let names = vec!["cost".to_owned(), "latency_ms".to_owned()];
        params.policy.outcomes =
            Outcomes::new(3, names, vec![10.0, 0.001], vec![0.5, 120.0, 0.0, 0.0, 0.25, -80.0]).unwrap();
        params
    }

    #[test]
    fn round_trip_in_the_same_bytes_every_time() {
        let mut both = params_with_head();
        both.policy.outcomes = params_with_outcomes().policy.outcomes;
        for params in [params(), params_with_head(), params_with_outcomes(), both] {
            let bytes = encode(&params);
            assert_eq!(decode(&bytes).unwrap(), params);
            for _ in 0..8 {
                assert_eq!(encode(&params), bytes);
            }
        }
    }

    #[test]
    fn a_publication_carries_its_oldest_reward_beside_the_parameters() {
        let params = params();
        for oldest in [None, Some(1_731_700_000_123), Some(-1)] {
            let bytes = encode_publication(&params, oldest);
            assert_eq!((decode(&bytes).unwrap(), oldest_reward_ms(&bytes)), (params.clone(), oldest));
        }
        assert_eq!(encode_publication(&params, None), encode(&params));
        assert_eq!(oldest_reward_ms(b"no parameters"), None);
    }

    #[test]
    fn only_parameters_with_a_head_table_or_outcomes_have_version_2() {
        for (params, expected) in [(params(), "1"), (params_with_head(), "2"), (params_with_outcomes(), "2")] {
            let bytes = encode(&params);
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(header.metadata().as_ref().unwrap()["format_version"], expected);
        }
    }

    #[test]
    fn bad_outcomes_are_errors() {
        let check = |from: &str, to: &str, expected: &str| {
            let error = decode(&lying_with(&params_with_outcomes(), from, to)).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        let names = r#""outcomes":"[\"cost\",\"latency_ms\"]""#;
        let prices = r#""lambda":"[10.0,0.001]""#;
        check(r#""format_version":"2""#, r#""format_version":"1""#, "outcomes: needs format_version 2, but it is 1");
        check(r#""lambda":"#, r#""lambada":"#, "metadata lambda: missing, but there is outcomes");
        check(r#""outcomes":"#, r#""outgoings":"#, "metadata outcomes: missing, but there is lambda");
        check(prices, r#""lambda":"[10.0]""#, "has 1 prices for 2 outcomes");
        check(prices, r#""lambda":"[10.0,-2e24]""#, "lambda: -2e24 is not between");
        check(prices, r#""lambda":"[10.0,null]""#, "lambda: ");
        check(names, r#""outcomes":"[\"cost\",\"cost\"]""#, "cost is listed twice");
        check(names, r#""outcomes":"[\"cost\",\"\"]""#, "must have 1 to 64 bytes");
        check(names, r#""outcomes":"[]""#, "has 0 names");
        check(names, r#""outcomes":"[\"cost\"]""#, "has 2 prices for 1 outcomes");
        for x in [f32::NAN, f32::INFINITY, -2e24] {
            let mut params = params_with_outcomes();
            let names = vec!["cost".to_owned()];
            params.policy.outcomes = Outcomes::new(3, names, vec![1.0], vec![0.0, x, 0.0]).unwrap();
            let error = decode(&encode(&params)).unwrap_err().to_string();
            assert!(error.contains("mini.lm.outcomes: "), "{error}");
        }
        let mut one = params_with_outcomes();
        one.policy.outcomes = Outcomes::new(3, vec!["cost".to_owned()], vec![1.0], vec![1.0; 3]).unwrap();
        let bytes = lying_bytes(&encode(&one), r#""[1.0]""#, r#""[1.0,1.0]""#);
        let error = decode(&lying_bytes(&bytes, r#"[\"cost\"]"#, r#"[\"a\",\"b\"]"#)).unwrap_err().to_string();
        assert!(error.contains("bge.outcomes: type F32 with shape [1] does not match F32 [2]"), "{error}");
        let without = lying_bytes(&encode(&one), r#""lambda":"#, r#""lambada":"#);
        let error = decode(&lying_bytes(&without, r#""outcomes":"#, r#""outgoings":"#)).unwrap_err().to_string();
        assert!(error.contains("metadata outcomes: missing, but there is tensor bge.outcomes"), "{error}");
    }

    #[test]
    fn bad_head_tables_are_errors() {
        let check = |bytes: Vec<u8>, expected: &str| {
            let error = decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        let lying = |from: &str, to: &str| lying_with(&params_with_head(), from, to);
        let version = r#""format_version":"2""#;
        check(lying(version, r#""format_version":"1""#), ".head.keys: needs format_version 2, but it is 1");
        check(lying(version, r#""format_version":"3""#), "3 is newer than this version reads (2)");
        check(lying("\".head.keys\"", "\".head.kays\""), ".head.keys: missing, but there is .head.corrections");
        check(lying(".head.corrections", ".head.correctness"), ".head.corrections: missing, but there is .head.keys");
        let keys = r#"".head.keys":{"data_offsets":[0,16],"dtype":"U64","shape":[2]}"#;
        for (dtype, shape) in [("I64", "[2]"), ("U64", "[2,1]"), ("U64", "[1,2]"), ("F64", "[2]")] {
            let other = format!(r#"".head.keys":{{"data_offsets":[0,16],"dtype":"{dtype}","shape":{shape}}}"#);
            check(lying(keys, &other), ".head.keys: type ");
        }
        for shape in ["[3,2]", "[6]", "[2,3,1]", "[1,6]"] {
            check(
                lying(r#""shape":[2,3]},".head"#, &format!(r#""shape":{shape}}},".head"#)),
                "does not match F32 [2, 3]",
            );
        }
        // Keys are the first tensor.
        let bytes = encode(&params_with_head());
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (key, expected) in [(u64::MAX, "key 1 is not above"), (3, "")] {
            let mut changed = bytes.clone();
            changed[start..start + 8].copy_from_slice(&key.to_le_bytes());
            match expected {
                "" => assert_eq!(decode(&changed).unwrap().policy.head.keys(), [3, u64::MAX]),
                _ => check(changed, expected),
            }
        }
        for x in [f32::NAN, f32::INFINITY, -1e25] {
            let mut params = params_with_head();
            params.policy.head = HeadTable::new(3, vec![1], vec![0.0, x, 0.0]).unwrap();
            check(encode(&params), ".head.corrections: ");
        }
        // More models than the corrections have columns.
        let mut wider = params_with_head();
        wider.models.push(ModelName::try_from("more").unwrap());
        wider.policy.scores.push(ScoreForm::default());
        wider.policy.floor_distribution = uniform(4);
        wider.policy.head = HeadTable::new(4, vec![7], vec![0.0; 4]).unwrap();
        let fewer = r#"[\"bge\",\"mini.lm\",\"head\"]"#;
        let all = r#"[\"bge\",\"mini.lm\",\"head\",\"more\"]"#;
        let bytes = lying_with(&wider, all, fewer);
        check(lying_bytes(&bytes, "[0.25,0.25,0.25,0.25]", "[0.5,0.25,0.25]"), "does not match F32 [1, 3]");
    }

    /// One query more than a table may have.
    #[test]
    fn oversized_head_tables_are_errors() {
        let mut params = params();
        let keys: Vec<u64> = (0..HEAD_QUERIES_MAX as u64).collect();
        params.policy.head = HeadTable::new(3, keys, vec![0.0; 3 * HEAD_QUERIES_MAX]).unwrap();
        let bytes = encode(&params);
        assert_eq!(decode(&bytes).unwrap(), params);
        let (length, more) = (u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize, HEAD_QUERIES_MAX + 1);
        let header = str::from_utf8(&bytes[8..8 + length]).unwrap().trim_end();
        let mut header: serde_json::Value = serde_json::from_str(header).unwrap();
        let sizes = [
            (HEAD_KEYS, serde_json::json!([more]), 8 * more),
            (HEAD_CORRECTIONS, serde_json::json!([more, 3]), 12 * more),
        ];
        let mut from = 0;
        for (name, shape, size) in sizes {
            header[name]["shape"] = shape;
            header[name]["data_offsets"] = serde_json::json!([from, from + size]);
            from += size;
        }
        let models = ["bge.eigenvalues", "bge.eigenvectors", "mini.lm.bias", "mini.lm.linear"];
        models.iter().for_each(|name| drop(header.as_object_mut().unwrap().remove(*name)));
        let header = header.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; from]].concat();
        let error = decode(&bytes).unwrap_err().to_string();
        assert!(
            error.contains(".head.keys: type U64 with shape [65537] is not U64 [n] with n of at most 65536"),
            "{error}"
        );
    }

    #[test]
    fn damage_is_an_error_not_a_panic() {
        let bytes = encode(&params_with_head());
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end]).is_err());
        }
        let bytes = encode(&params());
        for (from, to) in [
            ("\"2\"", "\"x\""),
            ("pointsman.params", "pointsman.parade"),
            ("inverse_gap\",", "inverse_gaq\","),
            ("[0.5,", "[0.9,"),
            ("\"0.1\"", "\"1.1\""),
            ("\"dim\":\"3\"", "\"dim\":\"4\""),
            ("\"shop\"", "\".hop\""),
        ] {
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect(from);
            let mut changed = bytes.clone();
            changed[at..at + to.len()].copy_from_slice(to.as_bytes());
            assert!(decode(&changed).is_err(), "{from} -> {to}");
        }
    }

    /// Encodes parameters whose text in the header was replaced.
    fn lying(from: &str, to: &str) -> Vec<u8> {
        lying_with(&params(), from, to)
    }

    fn lying_with(params: &Params, from: &str, to: &str) -> Vec<u8> {
        lying_bytes(&encode(params), from, to)
    }

    fn lying_bytes(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = str::from_utf8(&bytes[8..8 + length]).unwrap();
        assert!(header.contains(from), "{header}");
        let header = header.replace(from, to);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat()
    }

    #[test]
    fn numbers_beyond_their_bounds_are_errors() {
        for (from, to, expected) in [
            (r#""dim":"3""#, r#""dim":"9223372036854775808""#, "dim"),
            (r#""dim":"3""#, r#""dim":"65537""#, "65537 is not between 1 and 65536"),
            (r#""dim":"3""#, r#""dim":"0""#, "dim"),
            (r#""epoch":"2""#, r#""epoch":"18446744073709551615""#, "epoch"),
            (r#""version":"1234""#, r#""version":"18446744073709551615""#, "version"),
            (r#""revision":"3""#, r#""revision":"9007199254740993""#, "revision"),
            (r#""created_ms":"1731700000000""#, r#""created_ms":"18446744073709551615""#, "created_ms"),
            (r#""inverse_gap":"30.5""#, r#""inverse_gap":"1e300""#, "inverse_gap"),
            (r#""algorithm":"hpg""#, r#""algorithm":"h\n""#, "algorithm"),
            (r#"[\"bge\",\"mini.lm\",\"zero\"]"#, "[]", "models: has 0 names"),
        ] {
            let error = decode(&lying(from, to)).unwrap_err().to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
        let many: Vec<String> = (0..=MODELS_MAX).map(|i| format!("m{i}")).collect();
        let many = serde_json::to_string(&json(&many)).unwrap();
        let error = decode(&lying(r#""[\"bge\",\"mini.lm\",\"zero\"]""#, &many)).unwrap_err().to_string();
        assert!(error.contains("4097 names"), "{error}");
    }

    #[test]
    fn repeated_models_and_tensors_beyond_their_bounds_are_errors() {
        let check = |change: &dyn Fn(&mut Params), expected: &str| {
            let mut params = params();
            change(&mut params);
            let error = decode(&encode(&params)).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        let twice = |params: &mut Params| {
            params.models[2] = params.models[0].clone();
            params.policy.scores = vec![ScoreForm::default(); 3];
        };
        check(&twice, "bge is listed twice");
        check(&|params| params.policy.scores[0].eigenvectors[1] = 1e30, "bge.eigenvectors: 1e30 is not");
        check(&|params| params.policy.scores[0].eigenvalues[1] = -1e25, "bge.eigenvalues");
        check(&|params| params.policy.scores[1].linear[1] = f32::NAN, "mini.lm.linear");
        check(&|params| params.policy.scores[1].bias = f32::INFINITY, "mini.lm.bias");
        let more_eigenvalues_than_dimensions = |params: &mut Params| {
            params.policy.scores[0].eigenvalues = vec![1.0; 4];
            params.policy.scores[0].eigenvectors = vec![0.0; 12];
        };
        check(&more_eigenvalues_than_dimensions, "bge.eigenvalues: type F32 with shape [4]");
        let without_eigenvectors = |params: &mut Params| params.policy.scores[0].eigenvectors.clear();
        check(&without_eigenvectors, "there are 2 eigenvalues");
    }

    /// The largest parameters that decode still route: no score overflows.
    #[test]
    fn parameters_at_the_bounds_yield_distributions() {
        use crate::router::Compiled;
        let mut params = params();
        params.policy.sampling = Sampling::InverseGap { gap: SCALE_MAX };
        params.policy.scores[0].eigenvalues = vec![SCALE_MAX as f32 * 0.99; 2];
        params.policy.scores[0].eigenvectors = vec![COMPONENT_MAX as f32; 6];
        params.policy.scores[1].linear = vec![-SCALE_MAX as f32 * 0.99; 3];
        let key = crate::query_key::QueryKey::of(&crate::event::Query::new([1.0, 1.0, 1.0]).unwrap());
        params.policy.head = HeadTable::new(3, vec![key.0], vec![SCALE_MAX as f32 * 0.99; 3]).unwrap();
        let names = (0..OUTCOMES_MAX).map(|i| i.to_string()).collect();
        let expected =
            (0..3 * OUTCOMES_MAX).map(|i| SCALE_MAX as f32 * if i % 2 == 0 { 0.99 } else { -0.99 }).collect();
        params.policy.outcomes = Outcomes::new(3, names, vec![SCALE_MAX; OUTCOMES_MAX], expected).unwrap();
        for sampling in [params.policy.sampling, Sampling::Softmax] {
            params.policy.sampling = sampling;
            let compiled = Compiled::new(decode(&encode(&params)).unwrap());
            for query in [[1.0_f32, 1.0, 1.0], [9e5, -1.0, 1e-3], [3e38, 3e38, 3e38], [1e-38, 0.0, 0.0]] {
                let found = compiled.distribution(&query).unwrap();
                let sum: f64 = found.propensities.iter().sum();
                assert!((sum - 1.0).abs() < 1e-9 && found.propensities.iter().all(|p| *p >= 0.0), "{found:?}");
            }
        }
    }

    #[test]
    fn parameters_must_agree_with_the_configuration() {
        let settings = |text: &str| toml::from_str::<crate::config::Config>(text).unwrap().check().unwrap();
        let good = "dim = 3\nmodels = [\"zero\", \"mini.lm\", \"bge\", \"new\"]";
        let bytes = encode(&params());
        for (text, expected) in [
            (format!("[learner]\n{good}"), None),
            (format!("[learner]\n{good}\nspaces = \"listed\""), Some("is not listed")),
            (format!("[learner]\nspaces = \"listed\"\n[spaces.shop]\n{good}"), None),
            (
                format!("[learner]\n{good}\n[spaces.shop]\ndim = 4"),
                Some("has dim = 3, but the configuration has learner.dim = 4"),
            ),
            (
                "[learner]\ndim = 3\nmodels = [\"bge\", \"zero\"]".to_owned(),
                Some("has model mini.lm, which is not configured"),
            ),
        ] {
            let found = decode_for(&settings(&text), &bytes);
            match expected {
                None => assert_eq!(found.unwrap(), params(), "{text}"),
                Some(expected) => {
                    let error = found.unwrap_err().to_string();
                    assert!(error.starts_with("space shop") && error.contains(expected), "{text}: {error}");
                }
            }
        }
    }
}
