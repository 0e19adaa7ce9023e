//! Data sets with full information: the expected reward of every model for every query, measured offline.
//!
//! A safetensors file, floats as f32 or f64, integers as i32, i64, u32 or u64:
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `query` | n, d | embeddings, normalised when read |
//! | `expected_reward` | n, M | from 0 to 1 |
//! | `top1_reward` | n, M | optional: the reward of the item that each model ranks first |
//! | `candidate_offsets` | n + 1 | optional, with the next two: where each query's candidates begin and end |
//! | `candidate_reward` | c | the label of each candidate |
//! | `candidate_similarity` | c, M | how each model scores it |
//! | `similarity_scale` | M | optional: how far each model's similarities spread within a query |
//!
//! Metadata `models` is a JSON array of names; without it they are `model-1` and so on. Beside it may lie lines of text,
//! one a query: id, tab, text, and optionally tab, category. If no line has a category, a query's is what its id has
//! before the first `-`, as the collections' names in ids like `QALD2_te-39`.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use thiserror::Error;

use crate::event::ModelName;

/// A data set; all is in the order of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// d.
    pub dim: usize,
    /// The models, M of them.
    pub models: Vec<ModelName>,
    /// Unit vectors, one after the other: n x d.
    pub queries: Vec<f32>,
    /// Row by row, n x M.
    pub expected_rewards: Vec<f64>,
    /// Row by row, n x M.
    pub top1_rewards: Option<Vec<f64>>,
    /// What the models choose from.
    pub candidates: Option<Candidates>,
    /// How far each model's similarities spread within a query.
    pub similarity_scale: Option<Vec<f64>>,
    /// Text and category of each query; empty without a text file.
    pub labels: Vec<Label>,
}

/// The judged items of each query.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidates {
    /// n + 1 numbers that never fall: query i has the candidates from the i-th to the next.
    pub offsets: Vec<usize>,
    /// The label of each candidate.
    pub rewards: Vec<f64>,
    /// Row by row, c x M.
    pub similarities: Vec<f64>,
}

/// A query in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Its id in the collection that it is from.
    pub id: String,
    /// What was asked.
    pub text: String,
    /// What kind of query it is.
    pub category: Option<String>,
}

/// Why a data set cannot be read.
#[derive(Debug, Error)]
pub enum BadDataset {
    /// Not a safetensors file.
    #[error("not a safetensors file: {0}")]
    Container(#[from] safetensors::SafeTensorError),
    /// A metadata entry has an invalid value.
    #[error("metadata {key}: {problem}")]
    Metadata {
        /// The entry.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing or invalid.
    #[error("tensor {name}: {problem}")]
    Tensor {
        /// Its name.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The lines of text do not match the tensors.
    #[error("queries.tsv{}: {problem}", line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Text {
        /// Where, counted from 1.
        line: Option<usize>,
        /// What is wrong.
        problem: String,
    },
}

impl Dataset {
    /// Number of queries.
    pub fn len(&self) -> usize {
        self.expected_rewards.len() / self.models.len()
    }

    /// Never: a data set without a query is not read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A query's embedding.
    pub fn query(&self, i: usize) -> &[f32] {
        &self.queries[i * self.dim..(i + 1) * self.dim]
    }

    /// A query's expected rewards, in the order of the models.
    pub fn rewards(&self, i: usize) -> &[f64] {
        let m = self.models.len();
        &self.expected_rewards[i * m..(i + 1) * m]
    }

    /// The categories, in the order of the alphabet, with their queries; queries without one are in none.
    pub fn categories(&self) -> std::collections::BTreeMap<&str, Vec<usize>> {
        let mut categories = std::collections::BTreeMap::<&str, Vec<usize>>::new();
        for (i, label) in self.labels.iter().enumerate() {
            if let Some(category) = &label.category {
                categories.entry(category).or_default().push(i);
            }
        }
        categories
    }
}

/// Decodes the tensors and, where there are any, the lines of text.
pub fn decode(bytes: &[u8], text: Option<&str>) -> Result<Dataset, BadDataset> {
    let tensors = SafeTensors::deserialize(bytes)?;
    let (_, header) = SafeTensors::read_metadata(bytes)?;
    let (shape, mut queries) = floats32(&required(&tensors, "query")?, "query")?;
    let &[n, dim] = &shape[..] else {
        return Err(unfit("query", &shape, "[n, d]: one row per query"));
    };
    if n == 0 || dim == 0 {
        return Err(unfit("query", &shape, "[n, d] with n, d > 0"));
    }
    normalise(&mut queries, dim)?;
    let (shape, expected_rewards) = floats(&required(&tensors, "expected_reward")?, "expected_reward")?;
    let models = match &shape[..] {
        &[rows, m] if rows == n && m > 0 => m,
        _ => return Err(unfit("expected_reward", &shape, &format!("[{n}, M]: one row per query"))),
    };
    if let Some(at) = expected_rewards.iter().position(|r| !(0.0..=1.0).contains(r)) {
        let problem =
            format!("row {} has {}: expected rewards must be between 0 and 1", at / models, expected_rewards[at]);
        return Err(BadDataset::Tensor { name: "expected_reward", problem });
    }
    let names = header.metadata().as_ref().and_then(|metadata| metadata.get("models"));
    Ok(Dataset {
        dim,
        models: names_of(names.map(String::as_str), models)?,
        queries,
        expected_rewards,
        top1_rewards: of_shape(&tensors, "top1_reward", &[n, models])?,
        candidates: candidates(&tensors, n, models)?,
        similarity_scale: of_shape(&tensors, "similarity_scale", &[models])?,
        labels: text.map(|text| labels(text, n)).transpose()?.unwrap_or_default(),
    })
}

fn names_of(text: Option<&str>, models: usize) -> Result<Vec<ModelName>, BadDataset> {
    let bad = |problem: String| BadDataset::Metadata { key: "models", problem };
    let names: Vec<String> = match text {
        Some(text) => {
            serde_json::from_str(text).map_err(|e| bad(format!("{text:?} is not a JSON array of names: {e}")))?
        }
        None => (1..=models).map(|m| format!("model-{m}")).collect(),
    };
    if names.len() != models {
        return Err(bad(format!("has {} names, but expected_reward has {models} columns", names.len())));
    }
    if let Some(name) = names.iter().enumerate().find_map(|(i, name)| names[..i].contains(name).then_some(name)) {
        return Err(bad(format!("{name} is listed twice")));
    }
    names.into_iter().map(|name| ModelName::try_from(name).map_err(|e| bad(e.to_string()))).collect()
}

fn candidates(tensors: &SafeTensors, n: usize, models: usize) -> Result<Option<Candidates>, BadDataset> {
    let parts = ["candidate_offsets", "candidate_reward", "candidate_similarity"];
    if parts.iter().all(|name| tensors.tensor(name).is_err()) {
        return Ok(None);
    }
    let offsets = integers(&required(tensors, parts[0])?, parts[0])?;
    let (shape, rewards) = floats(&required(tensors, parts[1])?, parts[1])?;
    let &[count] = &shape[..] else {
        return Err(unfit(parts[1], &shape, "[c]: one label per candidate"));
    };
    let sound = offsets.len() == n + 1 && offsets[0] == 0 && offsets[n] == count && offsets.is_sorted();
    if !sound {
        let problem = format!("must be {} increasing numbers from 0 to {count}, the number of candidates", n + 1);
        return Err(BadDataset::Tensor { name: parts[0], problem });
    }
    let similarities = of_shape(tensors, parts[2], &[count, models])?;
    let similarities = similarities.ok_or_else(|| missing(parts[2]))?;
    Ok(Some(Candidates { offsets, rewards, similarities }))
}

fn labels(text: &str, n: usize) -> Result<Vec<Label>, BadDataset> {
    let label = |(i, line): (usize, &str)| {
        let bad = |problem: &str| BadDataset::Text { line: Some(i + 1), problem: problem.to_owned() };
        let mut fields = line.split('\t').map(str::trim);
        let (id, text, category) = (fields.next(), fields.next(), fields.next());
        match (id, text, fields.next()) {
            (Some(id), Some(text), None) if !id.is_empty() => Ok(Label {
                id: id.to_owned(),
                text: text.to_owned(),
                category: category.filter(|category| !category.is_empty()).map(str::to_owned),
            }),
            _ => Err(bad("expected tab-separated id, text and optionally category")),
        }
    };
    let mut labels = text.lines().enumerate().map(label).collect::<Result<Vec<Label>, _>>()?;
    if labels.len() != n {
        let problem = format!("has {} lines for {n} queries: expected one line per query", labels.len());
        return Err(BadDataset::Text { line: None, problem });
    }
    if labels.iter().all(|label| label.category.is_none()) {
        for label in &mut labels {
            label.category =
                label.id.split_once('-').map(|(prefix, _)| prefix).filter(|p| !p.is_empty()).map(str::to_owned);
        }
    }
    Ok(labels)
}

fn normalise(queries: &mut [f32], dim: usize) -> Result<(), BadDataset> {
    for (i, query) in queries.chunks_exact_mut(dim).enumerate() {
        let norm = query.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        if norm == 0.0 {
            let problem = format!("row {i} is the zero vector, which has no direction");
            return Err(BadDataset::Tensor { name: "query", problem });
        }
        query.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
    Ok(())
}

fn missing(name: &'static str) -> BadDataset {
    BadDataset::Tensor { name, problem: "missing".to_owned() }
}

fn unfit(name: &'static str, shape: &[usize], expected: &str) -> BadDataset {
    BadDataset::Tensor { name, problem: format!("has shape {shape:?}, expected {expected}") }
}

fn required<'a>(tensors: &SafeTensors<'a>, name: &'static str) -> Result<TensorView<'a>, BadDataset> {
    tensors.tensor(name).map_err(|_| missing(name))
}

/// A tensor of this shape, if there is one of this name.
fn of_shape(tensors: &SafeTensors, name: &'static str, expected: &[usize]) -> Result<Option<Vec<f64>>, BadDataset> {
    let Ok(view) = tensors.tensor(name) else { return Ok(None) };
    let (shape, values) = floats(&view, name)?;
    if shape == expected { Ok(Some(values)) } else { Err(unfit(name, &shape, &format!("{expected:?}"))) }
}

fn floats(view: &TensorView, name: &'static str) -> Result<(Vec<usize>, Vec<f64>), BadDataset> {
    let values: Vec<f64> = match view.dtype() {
        Dtype::F32 => words(view).iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect(),
        Dtype::F64 => words(view).iter().map(|&bytes| f64::from_le_bytes(bytes)).collect(),
        other => return Err(mistyped(name, other, "F32 or F64")),
    };
    check_finite(name, values.iter().all(|x| x.is_finite()))?;
    Ok((view.shape().to_vec(), values))
}

/// In single precision: embeddings are by far the largest part.
fn floats32(view: &TensorView, name: &'static str) -> Result<(Vec<usize>, Vec<f32>), BadDataset> {
    let values: Vec<f32> = match view.dtype() {
        Dtype::F32 => words(view).iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        Dtype::F64 => words(view).iter().map(|&bytes| f64::from_le_bytes(bytes) as f32).collect(),
        other => return Err(mistyped(name, other, "F32 or F64")),
    };
    check_finite(name, values.iter().all(|x| x.is_finite()))?;
    Ok((view.shape().to_vec(), values))
}

fn integers(view: &TensorView, name: &'static str) -> Result<Vec<usize>, BadDataset> {
    let values: Option<Vec<usize>> = match view.dtype() {
        Dtype::I32 => words(view).iter().map(|&bytes| i32::from_le_bytes(bytes).try_into().ok()).collect(),
        Dtype::I64 => words(view).iter().map(|&bytes| i64::from_le_bytes(bytes).try_into().ok()).collect(),
        Dtype::U32 => words(view).iter().map(|&bytes| u32::from_le_bytes(bytes).try_into().ok()).collect(),
        Dtype::U64 => words(view).iter().map(|&bytes| u64::from_le_bytes(bytes).try_into().ok()).collect(),
        other => return Err(mistyped(name, other, "I32, I64, U32 or U64")),
    };
    let problem = || "contains a negative number".to_owned();
    values.ok_or_else(|| BadDataset::Tensor { name, problem: problem() })
}

fn words<'a, const SIZE: usize>(view: &TensorView<'a>) -> &'a [[u8; SIZE]] {
    view.data().as_chunks::<SIZE>().0
}

fn mistyped(name: &'static str, found: Dtype, expected: &str) -> BadDataset {
    BadDataset::Tensor { name, problem: format!("has type {found:?}, expected {expected}") }
}

fn check_finite(name: &'static str, finite: bool) -> Result<(), BadDataset> {
    let problem = || "contains a number that is not finite".to_owned();
    if finite { Ok(()) } else { Err(BadDataset::Tensor { name, problem: problem() }) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

    fn f32s(name: &'static str, shape: &[usize], values: &[f32]) -> Tensor {
        (name, Dtype::F32, shape.to_vec(), values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn i32s(name: &'static str, shape: &[usize], values: &[i32]) -> Tensor {
        (name, Dtype::I32, shape.to_vec(), values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Two queries of dimension 2, two models, three candidates.
    fn tensors() -> Vec<Tensor> {
        vec![
            f32s("query", &[2, 2], &[3.0, 4.0, 0.0, -2.0]),
            f32s("expected_reward", &[2, 2], &[0.25, 0.5, 1.0, 0.0]),
            f32s("top1_reward", &[2, 2], &[0.0, 0.5, 0.5, 0.0]),
            i32s("candidate_offsets", &[3], &[0, 1, 3]),
            f32s("candidate_reward", &[3], &[0.0, 0.5, 1.0]),
            f32s("candidate_similarity", &[3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            f32s("similarity_scale", &[2], &[1.0, 2.0]),
        ]
    }

    fn file(tensors: &[Tensor], models: Option<&str>) -> Vec<u8> {
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        let metadata = models.map(|models| HashMap::from([("models".to_owned(), models.to_owned())]));
        safetensors::serialize(views, metadata).unwrap()
    }

    #[test]
    fn all_of_a_file_is_read() {
        let data = decode(&file(&tensors(), Some("[\"a\",\"b\"]")), Some("x-1\tone\nx-2\ttwo\n")).unwrap();
        assert_eq!((data.len(), data.dim, data.models[1].as_str()), (2, 2, "b"));
        assert_eq!((data.query(0), data.query(1)), (&[0.6, 0.8][..], &[0.0, -1.0][..]));
        assert_eq!((data.rewards(1), &data.top1_rewards), (&[1.0, 0.0][..], &Some(vec![0.0, 0.5, 0.5, 0.0])));
        assert_eq!(data.candidates.unwrap().offsets, [0, 1, 3]);
        assert_eq!((data.labels[1].text.as_str(), data.labels[1].category.as_deref()), ("two", Some("x")));
        let bare = decode(&file(&tensors()[..2], None), None).unwrap();
        assert_eq!((bare.models[0].as_str(), bare.candidates, bare.labels.len()), ("model-1", None, 0));
    }

    #[test]
    fn categories_are_given_or_before_the_dash() {
        for (text, expected) in [
            ("a-1\tone\na-2\ttwo", [Some("a"), Some("a")]),
            ("QALD2_te-1\tone\nplain\ttwo", [Some("QALD2_te"), None]),
            ("a-1\tone\tshort\nb-2\ttwo\tlong", [Some("short"), Some("long")]),
            ("a-1\tone\tshort\nb-2\ttwo", [Some("short"), None]),
            ("-1\tone\n-2\t", [None, None]),
        ] {
            let data = decode(&file(&tensors(), None), Some(text)).unwrap();
            let found: Vec<Option<&str>> = data.labels.iter().map(|label| label.category.as_deref()).collect();
            assert_eq!(found, expected, "{text:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (long, wide) = ([0.5_f32; 6], [0.5_f32; 8]);
        for (name, replacement, expected) in [
            ("query", None, "tensor query: missing"),
            ("expected_reward", None, "tensor expected_reward: missing"),
            ("query", Some(f32s("query", &[4], &[1.0; 4])), "shape [4], expected [n, d]"),
            ("query", Some(f32s("query", &[2, 2], &[1.0, 1.0, 0.0, 0.0])), "tensor query: row 1 is the zero vector"),
            (
                "query",
                Some(f32s("query", &[2, 2], &[1.0, f32::NAN, 0.0, 0.0])),
                "tensor query: contains a number that is not finite",
            ),
            ("query", Some(f32s("query", &[0, 2], &[])), "with n, d > 0"),
            ("query", Some(i32s("query", &[2, 2], &[1; 4])), "tensor query: has type I32, expected F32 or F64"),
            ("expected_reward", Some(f32s("expected_reward", &[3, 2], &long)), "expected [2, M]"),
            ("expected_reward", Some(f32s("expected_reward", &[2, 2], &[0.5, 0.5, 1.5, 0.5])), "row 1 has 1.5"),
            ("expected_reward", Some(f32s("expected_reward", &[2, 4], &wide)), "models: has 2 names"),
            ("top1_reward", Some(f32s("top1_reward", &[2], &[0.5; 2])), "tensor top1_reward: has shape [2]"),
            ("candidate_offsets", None, "tensor candidate_offsets: missing"),
            (
                "candidate_offsets",
                Some(i32s("candidate_offsets", &[3], &[0, 2, 1])),
                "3 increasing numbers from 0 to 3",
            ),
            ("candidate_offsets", Some(i32s("candidate_offsets", &[3], &[0, -1, 3])), "contains a negative number"),
            ("candidate_offsets", Some(f32s("candidate_offsets", &[3], &[0.0; 3])), "expected I32, I64"),
            ("candidate_reward", None, "tensor candidate_reward: missing"),
            ("candidate_similarity", None, "tensor candidate_similarity: missing"),
            ("similarity_scale", Some(f32s("similarity_scale", &[1], &[1.0])), "expected [2]"),
        ] {
            let kept = tensors().into_iter().filter(|tensor| tensor.0 != name).chain(replacement).collect::<Vec<_>>();
            let error = decode(&file(&kept, Some("[\"a\",\"b\"]")), None).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        for (models, expected) in
            [("[\"a\"]", "has 1 names"), ("a,b", "not a JSON array"), ("[\"a\",\"a\"]", "a is listed twice")]
        {
            let error = decode(&file(&tensors(), Some(models)), None).unwrap_err().to_string();
            assert!(error.starts_with("metadata models") && error.contains(expected), "{error}");
        }
        for (text, expected) in [
            ("a\tone", "queries.tsv: has 1 lines for 2 queries"),
            ("a\tone\nb", "queries.tsv, line 2: expected tab-separated id, text"),
            ("a\tone\tx\ty\nb\ttwo", "line 1"),
        ] {
            let error = decode(&file(&tensors(), None), Some(text)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn damage_is_an_error_not_a_panic() {
        let bytes = file(&tensors(), Some("[\"a\",\"b\"]"));
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end], None).is_err());
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x15;
            let _ = decode(&changed, None);
        }
    }
}
