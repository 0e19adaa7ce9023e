//! Data sets on disk.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, anyhow};

use crate::wire::dataset::{BadDataset, Dataset, decode};

/// The files of a data set that is a directory.
const TENSORS: &str = "routing.safetensors";
const TEXT: &str = "queries.tsv";

/// Reads a data set: a directory with `routing.safetensors` and optionally `queries.tsv`, or the safetensors file itself.
pub fn read(path: &Path) -> anyhow::Result<Dataset> {
    let tensors = if path.is_dir() { path.join(TENSORS) } else { path.to_owned() };
    let bytes = std::fs::read(&tensors).with_context(|| format!("cannot read {}", tensors.display()))?;
    let lines = tensors.with_file_name(TEXT);
    let text = match std::fs::read_to_string(&lines) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", lines.display())),
    };
    // As one message: the error already includes the text of its source.
    decode(&bytes, text.as_deref()).map_err(|error| match error {
        BadDataset::Text { .. } => anyhow!("{} does not match the data set: {error}", lines.display()),
        _ => anyhow!("{} is not a valid data set: {error}", tensors.display()),
    })
}
