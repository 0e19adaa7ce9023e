//! Data sets on disk.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, anyhow};

use crate::wire::dataset::{BadDataset, Dataset, decode};

/// The files of a data set that is a directory.
const TENSORS: &str = "routing.safetensors";
const TEXT: &str = "queries.tsv";

/// Reads a data set: a directory with `routing.safetensors` and perhaps `queries.tsv`, or such a safetensors file, beside
/// which `queries.tsv` may lie.
pub fn read(path: &Path) -> anyhow::Result<Dataset> {
    let tensors = if path.is_dir() { path.join(TENSORS) } else { path.to_owned() };
    let bytes = std::fs::read(&tensors).with_context(|| format!("cannot read {}", tensors.display()))?;
    let lines = tensors.with_file_name(TEXT);
    let text = match std::fs::read_to_string(&lines) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", lines.display())),
    };
    // Said in one go: the error's text already has that of its source.
    decode(&bytes, text.as_deref()).map_err(|error| match error {
        BadDataset::Text { .. } => anyhow!("{} does not fit: {error}", lines.display()),
        _ => anyhow!("{} is no data set: {error}", tensors.display()),
    })
}
