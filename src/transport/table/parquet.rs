//! Rows of Parquet files.
//!
//! Lists of floats are read column by column, a thousand times faster than value by value; all else by the record reader
//! of the parquet crate. Arrow is not needed for either.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parquet::basic::{ConvertedType, LogicalType, TimeUnit, Type as Physical};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::{ColumnDescriptor, Type};

use super::Rows;
use crate::timestamp;
use crate::wire::rows::{Columns, Kind, Object, write_cell, write_json};

/// The rows of a Parquet file.
pub(super) struct ParquetRows {
    file: SerializedFileReader<File>,
    /// The columns that are not vectors; none if there are no others.
    rest: Option<RowIter<'static>>,
    columns: Vec<Column>,
    vectors: Vec<VectorColumn>,
    /// Vectors that are spread over several columns, by the place of these.
    spread: Vec<(String, Vec<usize>)>,
    row_group: usize,
    /// Rows that are not yet read of the current row group.
    left: usize,
    progress: Progress,
}

/// A column that is not a vector.
struct Column {
    name: String,
    kind: Kind,
    /// Whether it is not written itself: it is a part of a vector.
    is_part: bool,
    /// Whether its whole numbers are times in nanoseconds, which the record reader does not know.
    is_nanos: bool,
}

/// A column of lists of floats, and the vectors of the current row group that were read ahead.
struct VectorColumn {
    name: String,
    leaf: usize,
    levels: Levels,
    reader: Option<ColumnReader>,
    ahead: VecDeque<Option<Vec<f32>>>,
}

/// Definition levels of the elements of a list.
#[derive(Clone, Copy)]
struct Levels {
    /// Of a number.
    number: i16,
    /// Of a null in the list, if there may be any.
    null: Option<i16>,
}

impl Levels {
    fn of(leaf: &ColumnDescriptor) -> Self {
        let number = leaf.max_def_level();
        Self { number, null: leaf.self_type().is_optional().then(|| number - 1) }
    }
}

/// Rows read as bytes of the file.
struct Progress {
    bytes: u64,
    rows: u64,
    done: u64,
    bytes_read: Arc<AtomicU64>,
}

/// Vectors that are read at one time.
const BATCH: usize = 64;

impl ParquetRows {
    pub(super) fn open(file: File, columns: &Columns, bytes_read: &Arc<AtomicU64>) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        let reader = SerializedFileReader::new(file.try_clone()?).map_err(invalid)?;
        let metadata = reader.metadata().file_metadata();
        let schema = metadata.schema_descr_ptr();
        let header: Vec<String> =
            schema.root_schema().get_fields().iter().map(|field| field.name().to_owned()).collect();
        let spread = columns.spread(&header);
        let is_part = |i: usize| spread.iter().any(|(_, parts)| parts.contains(&i));
        let is_read = |i: usize, name: &str| columns.kind(name).is_some() || is_part(i);
        let is_vector_leaf = |leaf: usize| is_vector(&schema.column(leaf)) && !is_map(schema.get_column_root(leaf));
        let leaves = (0..schema.num_columns()).filter(|&leaf| is_vector_leaf(leaf));
        let vectors: Vec<VectorColumn> = leaves
            .map(|leaf| (leaf, schema.column(leaf).path().parts()[0].clone()))
            .filter(|(_, name)| columns.kind(name).is_some())
            .map(|(leaf, name)| {
                let levels = Levels::of(&schema.column(leaf));
                VectorColumn { name, leaf, levels, reader: None, ahead: VecDeque::new() }
            })
            .collect();
        let is_vector = |name: &str| vectors.iter().any(|column| column.name == name);
        let fields = schema.root_schema().get_fields();
        let kept: Vec<usize> =
            (0..fields.len()).filter(|&i| is_read(i, &header[i]) && !is_vector(&header[i])).collect();
        let projection = Type::group_type_builder(schema.root_schema().name())
            .with_fields(kept.iter().map(|&i| fields[i].clone()).collect())
            .build()
            .map_err(invalid)?;
        let rest = if kept.is_empty() {
            None
        } else {
            let source = SerializedFileReader::new(file).map_err(invalid)?;
            Some(RowIter::from_file_into(Box::new(source)).project(Some(projection)).map_err(invalid)?)
        };
        let column = |i: usize| Column {
            name: header[i].clone(),
            kind: columns.kind(&header[i]).unwrap_or(Kind::Number),
            is_part: is_part(i),
            is_nanos: is_nanos(&fields[i]),
        };
        let place = |i: &usize| kept.iter().position(|other| other == i).unwrap_or_default();
        let spread = spread.iter().map(|(name, parts)| (name.clone(), parts.iter().map(place).collect())).collect();
        let progress = Progress {
            bytes,
            rows: u64::try_from(metadata.num_rows()).unwrap_or(0).max(1),
            done: 0,
            bytes_read: bytes_read.clone(),
        };
        let columns = kept.iter().map(|&i| column(i)).collect();
        Ok(Self { file: reader, rest, columns, vectors, spread, row_group: 0, left: 0, progress })
    }

    /// Begins the next row group that has rows; false if there is none.
    fn begin_row_group(&mut self) -> io::Result<bool> {
        while self.left == 0 {
            if self.row_group == self.file.num_row_groups() {
                return Ok(false);
            }
            let group = self.file.get_row_group(self.row_group).map_err(invalid)?;
            self.left = usize::try_from(group.metadata().num_rows()).unwrap_or(0);
            for column in &mut self.vectors {
                column.reader = Some(group.get_column_reader(column.leaf).map_err(invalid)?);
                column.ahead.clear();
            }
            self.row_group += 1;
        }
        Ok(true)
    }
}

impl Rows for ParquetRows {
    fn next_row(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        if !self.begin_row_group()? {
            return Ok(false);
        }
        self.left -= 1;
        self.progress.add_row();
        let cells = match &mut self.rest {
            Some(rows) => rows.next().ok_or_else(too_few)?.map_err(invalid)?.into_columns(),
            None => Vec::new(),
        };
        let mut object = Object::begin(line);
        for (column, (_, cell)) in self.columns.iter().zip(&cells) {
            if !column.is_part && !is_missing(cell) {
                write_field(object.key(&column.name), cell, column.kind, column.is_nanos);
            }
        }
        for (name, parts) in &self.spread {
            let out = object.key(name);
            for (place, &part) in parts.iter().enumerate() {
                out.push(if place == 0 { b'[' } else { b',' });
                write_field(out, cells.get(part).map_or(&Field::Null, |cell| &cell.1), Kind::Number, false);
            }
            out.push(b']');
        }
        for column in &mut self.vectors {
            if let Some(vector) = column.next()? {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                let out = object.key(&column.name);
                out.push(b'"');
                out.extend(STANDARD.encode(bytes).as_bytes());
                out.push(b'"');
            }
        }
        object.end();
        Ok(true)
    }
}

impl VectorColumn {
    fn next(&mut self) -> io::Result<Option<Vec<f32>>> {
        if self.ahead.is_empty() {
            match &mut self.reader {
                Some(ColumnReader::FloatColumnReader(reader)) => {
                    read_lists(reader, self.levels, |x| x, &mut self.ahead)?
                }
                Some(ColumnReader::DoubleColumnReader(reader)) => {
                    read_lists(reader, self.levels, |x| x as f32, &mut self.ahead)?;
                }
                _ => {}
            }
        }
        self.ahead.pop_front().ok_or_else(too_few)
    }
}

/// Reads some lists of numbers; an element that is null becomes NaN, which no query may have.
fn read_lists<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    levels: Levels,
    number: impl Fn(T::T) -> f32,
    lists: &mut VecDeque<Option<Vec<f32>>>,
) -> io::Result<()>
where
    T::T: Copy,
{
    let (mut present, mut repeated, mut values) = (Vec::new(), Vec::new(), Vec::new());
    reader.read_records(BATCH, Some(&mut present), Some(&mut repeated), &mut values).map_err(invalid)?;
    let mut values = values.into_iter();
    for (present, repeated) in present.into_iter().zip(repeated) {
        if repeated == 0 {
            lists.push_back(None);
        }
        let value = match present {
            present if present == levels.number => values.next().map_or(f32::NAN, &number),
            present if Some(present) == levels.null => f32::NAN,
            // The list itself is empty or null.
            _ => continue,
        };
        if let Some(list) = lists.back_mut() {
            list.get_or_insert_default().push(value);
        }
    }
    Ok(())
}

impl Progress {
    fn add_row(&mut self) {
        let before = self.bytes * self.done / self.rows;
        self.done = (self.done + 1).min(self.rows);
        self.bytes_read.fetch_add(self.bytes * self.done / self.rows - before, Ordering::Relaxed);
    }
}

/// Whether a leaf is the numbers of a list that is a column of its own.
fn is_vector(leaf: &ColumnDescriptor) -> bool {
    matches!(leaf.physical_type(), Physical::FLOAT | Physical::DOUBLE)
        && leaf.max_rep_level() == 1
        && leaf.path().parts().len() <= 3
}

/// Whether a column is a map, whose values are numbers of a list of its entries.
fn is_map(column: &Type) -> bool {
    let info = column.get_basic_info();
    matches!(info.converted_type(), ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE)
        || matches!(info.logical_type_ref(), Some(LogicalType::Map))
}

fn is_nanos(field: &Type) -> bool {
    let logical = field.get_basic_info().logical_type_ref();
    field.is_primitive() && matches!(logical, Some(LogicalType::Timestamp(stamp)) if stamp.unit == TimeUnit::NANOS)
}

fn is_missing(field: &Field) -> bool {
    match field {
        Field::Null => true,
        Field::Float(x) => x.is_nan(),
        Field::Double(x) => x.is_nan(),
        _ => false,
    }
}

fn write_field(out: &mut Vec<u8>, field: &Field, kind: Kind, is_nanos: bool) {
    let time = |ms: i64| timestamp::format(ms);
    match field {
        Field::Null => out.extend(b"null"),
        Field::Bool(x) => write_json(out, x),
        Field::Byte(x) => write_json(out, x),
        Field::Short(x) => write_json(out, x),
        Field::Int(x) => write_json(out, x),
        Field::Long(x) if is_nanos => write_json(out, &time(x.div_euclid(1_000_000))),
        Field::Long(x) => write_json(out, x),
        Field::UByte(x) => write_json(out, x),
        Field::UShort(x) => write_json(out, x),
        Field::UInt(x) => write_json(out, x),
        Field::ULong(x) => write_json(out, x),
        // JSON has no NaN: such a number becomes null.
        Field::Float16(x) => write_json(out, &x.to_f32()),
        Field::Float(x) => write_json(out, x),
        Field::Double(x) => write_json(out, x),
        Field::Decimal(_) => write_cell(out, Kind::Number, &field.to_string()),
        Field::Str(text) => write_cell(out, kind, text),
        Field::Bytes(bytes) => match str::from_utf8(bytes.data()) {
            Ok(text) if kind != Kind::Vector => write_cell(out, kind, text),
            _ => write_json(out, &STANDARD.encode(bytes.data())),
        },
        Field::Date(days) => write_json(out, &time(i64::from(*days) * 86_400_000)),
        Field::TimeMillis(x) => write_json(out, x),
        Field::TimeMicros(x) => write_json(out, x),
        Field::TimestampMillis(ms) => write_json(out, &time(*ms)),
        Field::TimestampMicros(us) => write_json(out, &time(us.div_euclid(1000))),
        Field::Group(row) => {
            let mut object = Object::begin(out);
            for (name, field) in row.get_column_iter().filter(|(_, field)| !is_missing(field)) {
                write_field(object.key(name), field, Kind::Text, false);
            }
            object.end();
        }
        Field::MapInternal(map) => {
            let mut object = Object::begin(out);
            for (name, field) in map.entries().iter().filter(|(_, field)| !is_missing(field)) {
                let name = if let Field::Str(name) = name { name.clone() } else { name.to_string() };
                write_field(object.key(&name), field, Kind::Text, false);
            }
            object.end();
        }
        Field::ListInternal(list) => {
            out.push(b'[');
            for (i, field) in list.elements().iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                write_field(out, field, Kind::Text, false);
            }
            out.push(b']');
        }
    }
}

fn invalid(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(error) => io::Error::new(io::ErrorKind::InvalidData, error),
        ParquetError::General(text) if text.contains("Disabled feature") => io::Error::new(
            io::ErrorKind::InvalidData,
            "its compression is not supported: write it with snappy, gzip, zstd, lz4 or none",
        ),
        other => io::Error::new(io::ErrorKind::InvalidData, format!("not a valid Parquet file: {other}")),
    }
}

fn too_few() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not a valid Parquet file: a column has fewer rows than the file")
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;
    use crate::config::Fields;
    use crate::engine::Side;

    /// Lists of numbers and maps to numbers have the same levels; only their annotations differ.
    #[test]
    fn maps_of_numbers_are_not_vectors() {
        let schema = "message rows {
            optional group query (LIST) { repeated group list { optional double element; } }
            optional group propensities (MAP) {
                repeated group key_value { required binary key (STRING); optional double value; }
            }
        }";
        let path = tempfile::NamedTempFile::new().unwrap();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = Arc::new(WriterProperties::default());
        let mut file = SerializedFileWriter::new(path.reopen().unwrap(), schema, properties).unwrap();
        let mut group = file.next_row_group().unwrap();
        let mut query = group.next_column().unwrap().unwrap();
        query.typed::<DoubleType>().write_batch(&[0.5, -1.0], Some(&[3, 3]), Some(&[0, 1])).unwrap();
        query.close().unwrap();
        let mut keys = group.next_column().unwrap().unwrap();
        let names = [ByteArray::from("a"), ByteArray::from("b")];
        keys.typed::<ByteArrayType>().write_batch(&names, Some(&[2, 2]), Some(&[0, 1])).unwrap();
        keys.close().unwrap();
        let mut values = group.next_column().unwrap().unwrap();
        values.typed::<DoubleType>().write_batch(&[0.25, 0.75], Some(&[3, 3]), Some(&[0, 1])).unwrap();
        values.close().unwrap();
        group.close().unwrap();
        file.close().unwrap();

        for columns in [Columns::default(), Columns::of(&Fields::default(), &[], Side::Query)] {
            let file = File::open(path.path()).unwrap();
            let mut rows = ParquetRows::open(file, &columns, &Arc::default()).unwrap();
            let mut line = Vec::new();
            assert!(rows.next_row(&mut line).unwrap());
            let row: serde_json::Value = serde_json::from_slice(&line).unwrap();
            assert_eq!(row["propensities"], serde_json::json!({ "a": 0.25, "b": 0.75 }));
            assert_eq!(row["query"], STANDARD.encode([0.5_f32, -1.0].map(f32::to_le_bytes).concat()));
            assert!(!rows.next_row(&mut line).unwrap());
        }
    }
}
