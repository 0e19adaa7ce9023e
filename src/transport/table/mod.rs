//! Tables as logs: every row of a CSV or Parquet file becomes one line of JSON, with the columns that events are read from.
//!
//! So a table has the positions, dead letters and order of any other log. Vectors become base64 where that is cheaper to
//! read than numbers. An empty cell is a missing field.

mod csv;
mod parquet;

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::wire::rows::Columns;

/// How the rows of a file are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON lines.
    Json,
    /// Comma-separated values, or separated by semicolons, tabs or bars.
    Csv,
    /// Apache Parquet.
    Parquet,
}

impl Format {
    /// The format of a file with this name; anything unknown is read as JSON lines.
    pub fn of(path: &Path) -> Self {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_ascii_lowercase();
        let name = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
        match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("csv" | "tsv") => Self::Csv,
            Some("parquet" | "pq") => Self::Parquet,
            _ => Self::Json,
        }
    }
}

/// Reads a table, whose file is decompressed by `decoded` unless it is Parquet.
pub(super) fn open(
    format: Format,
    file: File,
    columns: &Columns,
    bytes_read: &Arc<AtomicU64>,
    decoded: impl FnOnce(File) -> io::Result<Box<dyn BufRead + Send>>,
) -> io::Result<Box<dyn BufRead + Send>> {
    Ok(match format {
        Format::Json => decoded(file)?,
        Format::Csv => Box::new(RowLines::new(csv::CsvRows::open(decoded(file)?, columns)?)),
        Format::Parquet => Box::new(RowLines::new(parquet::ParquetRows::open(file, columns, bytes_read)?)),
    })
}

/// The rows of a table, one after the other.
trait Rows {
    /// Appends the next row to `line` as a JSON object without a line end; false after the last one.
    fn next_row(&mut self, line: &mut Vec<u8>) -> io::Result<bool>;
}

/// Rows as lines.
struct RowLines<R> {
    rows: R,
    line: Vec<u8>,
    read: usize,
}

impl<R: Rows> RowLines<R> {
    fn new(rows: R) -> Self {
        Self { rows, line: Vec::new(), read: 0 }
    }
}

impl<R: Rows> Read for RowLines<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let number = self.fill_buf()?.read(buffer)?;
        self.consume(number);
        Ok(number)
    }
}

impl<R: Rows> BufRead for RowLines<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.read == self.line.len() {
            self.line.clear();
            self.read = 0;
            if self.rows.next_row(&mut self.line)? {
                self.line.push(b'\n');
            } else {
                self.line.clear();
            }
        }
        Ok(&self.line[self.read..])
    }

    fn consume(&mut self, number: usize) {
        self.read += number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_by_name() {
        for (name, format) in [
            ("q.jsonl", Format::Json),
            ("q.jsonl.zst", Format::Json),
            ("q", Format::Json),
            ("a.b/q.csv.gz", Format::Csv),
            ("q.TSV", Format::Csv),
            ("q.parquet", Format::Parquet),
        ] {
            assert_eq!(Format::of(Path::new(name)), format, "{name}");
        }
    }
}
