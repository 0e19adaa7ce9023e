//! Routing parameters as a safetensors file: one message of the compacted topic, readable in any language.
//!
//! Metadata are strings; tensors are f32: `<model>.eigenvalues` of shape k, `<model>.eigenvectors` k x dim,
//! `<model>.linear` dim, `<model>.bias` 1. What is absent is zero.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use thiserror::Error;

use crate::event::Name;
use crate::router::{Params, Policy, Sampling, ScoreForm, uniform};

const FORMAT: &str = "pointsman.params";
const FORMAT_VERSION: u64 = 1;

/// Why bytes are not routing parameters.
#[derive(Debug, Error)]
pub enum BadParams {
    /// Not a safetensors file.
    #[error("not a safetensors file: {0}")]
    Container(#[from] safetensors::SafeTensorError),
    /// A metadata entry is missing or has a value that it cannot have.
    #[error("metadata {key}: {problem}")]
    Metadata {
        /// The entry.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor has another type or shape than it must.
    #[error("tensor {name}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Encodes parameters; the same parameters give the same bytes.
pub fn encode(params: &Params) -> Vec<u8> {
    let policy = &params.policy;
    let (sampling, gap) = match policy.sampling {
        Sampling::Softmax => ("softmax", None),
        Sampling::InverseGap { gap } => ("inverse_gap", Some(gap)),
    };
    let mut metadata = HashMap::from(
        [
            ("format", FORMAT.to_owned()),
            ("format_version", FORMAT_VERSION.to_string()),
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
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> =
        params.models.iter().zip(&policy.scores).flat_map(|(name, form)| tensors(name, form, params.dim)).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a shape that fits its data"))
    });
    sort_header(safetensors::serialize(views, Some(metadata)).expect("a header of bounded size"))
}

/// Decodes parameters and checks them.
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
        return Err(meta.bad("format_version", format!("{format_version} is newer than this program reads")));
    }
    let models: Vec<Name> = meta.json("models")?;
    let dim: usize = meta.json("dim")?;
    if models.is_empty() || dim == 0 {
        return Err(meta.bad("models", "no model or no dimension".to_owned()));
    }
    if let Some(name) = models.iter().enumerate().find_map(|(i, name)| models[..i].contains(name).then_some(name)) {
        return Err(meta.bad("models", format!("{name} is there twice")));
    }
    let sampling = match meta.text("sampling")? {
        "softmax" => Sampling::Softmax,
        "inverse_gap" => Sampling::InverseGap { gap: meta.number("inverse_gap", 0.0, f64::MAX)? },
        other => return Err(meta.bad("sampling", format!("{other:?} is none of softmax, inverse_gap"))),
    };
    let floor_distribution = match metadata.contains_key("floor_distribution") {
        true => meta.json::<Vec<f64>>("floor_distribution")?,
        false => uniform(models.len()),
    };
    let is_distribution = floor_distribution.len() == models.len()
        && floor_distribution.iter().all(|p| (0.0..=1.0).contains(p))
        && (floor_distribution.iter().sum::<f64>() - 1.0).abs() < 1e-6;
    if !is_distribution {
        return Err(meta.bad("floor_distribution", "not a distribution over the models".to_owned()));
    }
    let scores = models.iter().map(|name| score_form(&tensors, name, dim)).collect::<Result<_, _>>()?;
    Ok(Params {
        space: meta.text("space")?.try_into().map_err(|e: crate::event::BadName| meta.bad("space", e.to_string()))?,
        epoch: meta.json("epoch")?,
        version: meta.json("version")?,
        revision: meta.json("revision")?,
        created_ms: meta.json("created_ms")?,
        algorithm: meta.text("algorithm")?.to_owned(),
        policy: Policy { sampling, floor: meta.number("floor", 0.0, 1.0)?, floor_distribution, scores },
        models,
        dim,
    })
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("numbers and names are JSON")
}

struct Metadata<'a>(&'a HashMap<String, String>);

impl Metadata<'_> {
    fn bad(&self, key: &'static str, problem: String) -> BadParams {
        BadParams::Metadata { key, problem }
    }

    fn text(&self, key: &'static str) -> Result<&str, BadParams> {
        self.0.get(key).map(String::as_str).ok_or_else(|| self.bad(key, "missing".to_owned()))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, key: &'static str) -> Result<T, BadParams> {
        let text = self.text(key)?;
        serde_json::from_str(text).map_err(|e| self.bad(key, format!("{text:?}: {e}")))
    }

    fn number(&self, key: &'static str, low: f64, high: f64) -> Result<f64, BadParams> {
        let value: f64 = self.json(key)?;
        if (low..=high).contains(&value) { Ok(value) } else { Err(self.bad(key, format!("{value} is out of range"))) }
    }
}

fn tensors(name: &Name, form: &ScoreForm, dim: usize) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let rank = form.eigenvalues.len();
    [
        ("eigenvalues", vec![rank], &form.eigenvalues[..]),
        ("eigenvectors", vec![rank, dim], &form.eigenvectors[..]),
        ("linear", vec![dim], &form.linear[..]),
        ("bias", vec![1], if form.bias == 0.0 { &[][..] } else { std::slice::from_ref(&form.bias) }),
    ]
    .into_iter()
    .filter(|(_, _, values)| !values.is_empty())
    .map(|(kind, shape, values)| {
        (format!("{name}.{kind}"), shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    })
    .collect()
}

fn score_form(tensors: &SafeTensors, name: &Name, dim: usize) -> Result<ScoreForm, BadParams> {
    let read = |kind: &str, expected: &dyn Fn(&[usize]) -> bool| {
        let name = format!("{name}.{kind}");
        let Ok(view) = tensors.tensor(&name) else { return Ok(Vec::new()) };
        if view.dtype() != Dtype::F32 || !expected(view.shape()) {
            let problem = format!("{:?} of shape {:?} does not fit dim = {dim}", view.dtype(), view.shape());
            return Err(BadParams::Tensor { name, problem });
        }
        let (words, _) = view.data().as_chunks::<4>();
        let values: Vec<f32> = words.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        match values.iter().all(|x| x.is_finite()) {
            true => Ok(values),
            false => Err(BadParams::Tensor { name, problem: "not all values are finite".to_owned() }),
        }
    };
    let eigenvalues = read("eigenvalues", &|shape| shape.len() == 1)?;
    let rank = eigenvalues.len();
    let eigenvectors = read("eigenvectors", &|shape| shape == [rank, dim])?;
    if rank.checked_mul(dim) != Some(eigenvectors.len()) {
        let problem = format!("missing, but there are {rank} eigenvalues");
        return Err(BadParams::Tensor { name: format!("{name}.eigenvectors"), problem });
    }
    let linear = read("linear", &|shape| shape == [dim])?;
    let bias = read("bias", &|shape| shape == [1])?.first().copied().unwrap_or(0.0);
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
        let name = |text: &str| Name::try_from(text).unwrap();
        let quadratic = ScoreForm {
            eigenvalues: vec![1.5, -0.5],
            eigenvectors: vec![0.6, 0.8, 0.0, 0.8, -0.6, 0.0],
            ..ScoreForm::default()
        };
        let linear = ScoreForm { linear: vec![1.0, 2.0, 3.0], bias: -0.25, ..ScoreForm::default() };
        Params {
            space: name("shop"),
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
            },
        }
    }

    #[test]
    fn round_trip_in_the_same_bytes_every_time() {
        let bytes = encode(&params());
        assert_eq!(decode(&bytes).unwrap(), params());
        for _ in 0..8 {
            assert_eq!(encode(&params()), bytes);
        }
    }

    #[test]
    fn damage_is_an_error_not_a_panic() {
        let bytes = encode(&params());
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end]).is_err());
        }
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

    #[test]
    fn repeated_models_and_sizes_beyond_all_bounds_are_errors() {
        let mut twice = params();
        twice.models[2] = twice.models[0].clone();
        twice.policy.scores = vec![ScoreForm::default(); 3];
        assert!(decode(&encode(&twice)).unwrap_err().to_string().contains("bge is there twice"));
        let mut endless = params();
        endless.dim = usize::MAX / 2 + 1;
        endless.policy.scores = vec![ScoreForm::default(); 3];
        endless.policy.scores[0].eigenvalues = vec![1.0, 2.0];
        assert!(decode(&encode(&endless)).unwrap_err().to_string().contains("there are 2 eigenvalues"));
    }
}
