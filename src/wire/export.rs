//! A space's eigen-decompositions as a safetensors file, in double precision: for analysis elsewhere, and to start
//! another learner from.
//!
//! `<model>/eigenvalues` has shape k, `<model>/eigenvectors` dim x k. Metadata: `format=pointsman.eigen`,
//! `format_version=1`, `space`, `version`, `models` (JSON array, in order), `dim`, `algorithm`.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::params::{BadParams, sort_header};
use crate::engine::SpaceView;
use crate::event::ModelName;

const FORMAT: &str = "pointsman.eigen";
const FORMAT_VERSION: &str = "1";

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Export {
    /// Dimension of the eigenvectors.
    pub dim: usize,
    /// Eigenvalues and eigenvectors, vector after vector, of each model.
    pub eigens: Vec<(ModelName, Spectrum)>,
}

/// Eigenvalues, and eigenvectors one after the other.
pub type Spectrum = (Vec<f64>, Vec<f64>);

/// Encodes the parameters of a space.
pub fn encode(view: &SpaceView, dim: usize, algorithm: &str) -> Vec<u8> {
    let metadata = HashMap::from(
        [
            ("format", FORMAT.to_owned()),
            ("format_version", FORMAT_VERSION.to_owned()),
            ("space", view.name.to_string()),
            ("version", view.version.to_string()),
            ("models", serde_json::json!(view.models).to_string()),
            ("dim", dim.to_string()),
            ("algorithm", algorithm.to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    let mut tensors = Vec::new();
    for (model, eigen) in view.models.iter().zip(&view.eigens) {
        let k = eigen.lambda.len();
        let by_component = (0..dim).flat_map(|row| (0..k).map(move |i| eigen.vectors[i * dim + row]));
        tensors.push((format!("{model}/eigenvalues"), vec![k], to_bytes(eigen.lambda.iter().copied())));
        tensors.push((format!("{model}/eigenvectors"), vec![dim, k], to_bytes(by_component)));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F64, shape.clone(), bytes).expect("a shape that fits its data"))
    });
    sort_header(safetensors::serialize(views, Some(metadata)).expect("a header of bounded size"))
}

/// Decodes a file and checks it: shapes, finite numbers, orthonormal vectors.
pub fn decode(bytes: &[u8]) -> Result<Export, BadParams> {
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    let tensors = SafeTensors::deserialize(bytes)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let bad = |key: &'static str, problem: &str| BadParams::Metadata { key, problem: problem.to_owned() };
    let text = |key: &'static str| metadata.get(key).ok_or_else(|| bad(key, "is missing"));
    if text("format")? != FORMAT {
        return Err(bad("format", "is not pointsman.eigen: expected a file of `pointsman snapshots export`"));
    }
    if text("format_version")? != FORMAT_VERSION {
        return Err(bad("format_version", "is newer than this version reads: upgrade pointsman"));
    }
    let dim: usize = text("dim")?.parse().map_err(|_| bad("dim", "is not a number"))?;
    let models: Vec<ModelName> =
        serde_json::from_str(text("models")?).map_err(|error| bad("models", &error.to_string()))?;
    let eigens = models.into_iter().map(|model| {
        let spectrum = spectrum(&tensors, &model, dim)?;
        Ok((model, spectrum))
    });
    Ok(Export { dim, eigens: eigens.collect::<Result<_, BadParams>>()? })
}

fn spectrum(tensors: &SafeTensors, model: &ModelName, dim: usize) -> Result<Spectrum, BadParams> {
    let read = |part: &str| {
        let name = format!("{model}/{part}");
        let bad = |problem: &str| BadParams::Tensor { name: name.clone(), problem: problem.to_owned() };
        let tensor = tensors.tensor(&name)?;
        if tensor.dtype() != Dtype::F64 {
            return Err(bad("must have type F64"));
        }
        let values: Vec<f64> =
            tensor.data().as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        if values.iter().any(|x| !x.is_finite()) {
            return Err(bad("contains a number that is not finite"));
        }
        Ok((tensor.shape().to_vec(), values))
    };
    let ((shape, lambda), (vectors_shape, by_component)) = (read("eigenvalues")?, read("eigenvectors")?);
    let k = lambda.len();
    let bad = |problem: &str| BadParams::Tensor { name: format!("{model}/eigenvectors"), problem: problem.to_owned() };
    if shape != [k] || vectors_shape != [dim, k] {
        return Err(bad("must have shape [dim, number of eigenvalues]"));
    }
    let column = |i: usize| (0..dim).map(|row| by_component[row * k + i]).collect::<Vec<f64>>();
    let columns: Vec<Vec<f64>> = (0..k).map(column).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let skew = |i: usize, j: usize| (dot(&columns[i], &columns[j]) - f64::from(u8::from(i == j))).abs();
    if (0..k).any(|i| (0..=i).any(|j| skew(i, j) > 1e-6)) {
        return Err(bad("are not orthonormal"));
    }
    Ok((lambda, columns.concat()))
}

fn to_bytes(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(f64::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Counts;
    use crate::evaluate::rollout::{Rollout, RolloutSpec};
    use crate::evaluate::sample_ratio::SampleRatio;
    use crate::event::Name;
    use crate::hpg::spectra::Eigen;

    fn view() -> SpaceView {
        let eigen = |lambda: Vec<f64>, vectors: Vec<f64>| Eigen { gamma: lambda.clone(), lambda, vectors };
        SpaceView {
            objective: None,
            name: Name::default_space(),
            models: ["a", "b"].map(|name| ModelName::try_from(name).unwrap()).to_vec(),
            version: 7,
            counts: Counts::default(),
            mean_reward: 0.5,
            retired: Vec::new(),
            eigens: vec![eigen(vec![2.0, -1.5], vec![0.6, 0.8, 0.0, -0.8, 0.6, 0.0]), eigen(vec![], vec![])],
            worth: None,
            warnings: Vec::new(),
            sample_ratio: SampleRatio::new(2).view(&[], 0.05),
            rollout: Rollout::new(&RolloutSpec::default()).view(&RolloutSpec::default(), 0.05, &[]),
        }
    }

    #[test]
    fn round_trip() {
        let bytes = encode(&view(), 3, "hpg");
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let vectors = tensors.tensor("a/eigenvectors").unwrap();
        assert_eq!(vectors.shape(), [3, 2]);
        let numbers: Vec<f64> = vectors.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        assert_eq!(numbers, [0.6, -0.8, 0.8, 0.6, 0.0, 0.0], "component by component");
        let export = decode(&bytes).unwrap();
        assert_eq!(export.eigens[0].1, (vec![2.0, -1.5], vec![0.6, 0.8, 0.0, -0.8, 0.6, 0.0]));
        assert_eq!(export.eigens[1].1, (vec![], vec![]));
    }

    #[test]
    fn what_is_no_export_is_refused() {
        let bytes = encode(&view(), 3, "hpg");
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut]).is_err());
        }
        let mut skewed = view();
        skewed.eigens[0].vectors[0] = 0.7;
        let error = decode(&encode(&skewed, 3, "hpg")).unwrap_err().to_string();
        assert!(error.contains("orthonormal"), "{error}");
    }
}
