//! Rows of CSV files with a header.

use std::io::{self, BufRead, Read};

use super::Rows;
use crate::wire::rows::{Columns, Kind, Object, write_cell};

/// The rows of a CSV file.
pub(super) struct CsvRows {
    reader: csv::Reader<Box<dyn Read + Send>>,
    record: csv::StringRecord,
    /// Columns that are read: their place, name and kind.
    columns: Vec<(usize, String, Kind)>,
    /// Vectors that are spread over several columns.
    spread: Vec<(String, Vec<usize>)>,
}

impl CsvRows {
    /// Reads the header, by which the separator is recognised.
    pub(super) fn open(mut source: Box<dyn BufRead + Send>, columns: &Columns) -> io::Result<Self> {
        let mut header = Vec::new();
        source.read_until(b'\n', &mut header)?;
        let count = |separator: &u8| header.iter().filter(|byte| *byte == separator).count();
        // Of as many the first: the most common one.
        let delimiter = b",;\t|".iter().rev().max_by_key(|separator| count(separator)).copied().unwrap_or(b',');
        let whole: Box<dyn Read + Send> = Box::new(io::Cursor::new(header).chain(source));
        let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(whole);
        let header: Vec<String> =
            reader.headers().map_err(invalid)?.iter().map(|name| name.trim().to_owned()).collect();
        let of_column = |(i, name): (usize, &String)| Some((i, name.clone(), columns.kind(name)?));
        let columns_read = header.iter().enumerate().filter_map(of_column).collect();
        Ok(Self { reader, record: csv::StringRecord::new(), columns: columns_read, spread: columns.spread(&header) })
    }
}

impl Rows for CsvRows {
    fn next_row(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        if !self.reader.read_record(&mut self.record).map_err(invalid)? {
            return Ok(false);
        }
        let mut object = Object::begin(line);
        for (i, name, kind) in &self.columns {
            if let Some(text) = self.record.get(*i).filter(|text| !text.is_empty()) {
                write_cell(object.key(name), *kind, text);
            }
        }
        for (name, columns) in &self.spread {
            let out = object.key(name);
            for (place, i) in columns.iter().enumerate() {
                out.push(if place == 0 { b'[' } else { b',' });
                match self.record.get(*i).unwrap_or_default() {
                    "" => out.extend(b"null"),
                    text => write_cell(out, Kind::Number, text),
                }
            }
            out.push(b']');
        }
        object.end();
        Ok(true)
    }
}

fn invalid(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        csv::ErrorKind::Utf8 { pos, err } => {
            let line = pos.map_or(0, |pos| pos.line());
            io::Error::new(io::ErrorKind::InvalidData, format!("line {line} is not valid UTF-8: {err}"))
        }
        other => io::Error::new(io::ErrorKind::InvalidData, format!("not valid CSV: {other:?}")),
    }
}
