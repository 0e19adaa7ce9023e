//! Rows of tables as JSON: cells of text become the values that events are read from.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::config::Fields;
use crate::engine::Side;

/// What a column holds, which decides how its text is written as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Text, even if it looks like a number: IDs and names.
    Text,
    /// A number, or true and false.
    Number,
    /// A time: a number in some unit, or text.
    Time,
    /// A query embedding.
    Vector,
    /// A JSON value.
    Json,
}

/// The columns to read; none: all of them.
#[derive(Debug, Clone, Default)]
pub struct Columns(Option<Vec<(String, Kind)>>);

impl Columns {
    /// The columns that hold the fields of events of a side, and outcomes at these places.
    pub fn of(fields: &Fields, outcomes: &[String], side: Side) -> Self {
        let shared = [(&fields.request_id, Kind::Text), (&fields.space, Kind::Text), (&fields.ts_ms, Kind::Time)];
        let own = match side {
            Side::Query => vec![
                (&fields.query, Kind::Vector),
                (&fields.model, Kind::Text),
                (&fields.propensities, Kind::Json),
                (&fields.propensity, Kind::Number),
                (&fields.policy, Kind::Json),
                (&fields.params_version, Kind::Number),
            ],
            Side::Reward => vec![
                (&fields.reward, Kind::Number),
                (&fields.event_id, Kind::Text),
                (&fields.failed, Kind::Number),
                (&fields.rewards, Kind::Json),
                (&fields.preferred, Kind::Text),
                (&fields.over, Kind::Text),
            ],
        };
        let outcomes = outcomes.iter().map(|pointer| (pointer, Kind::Number));
        let column = |(pointer, kind): (&String, Kind)| {
            let mut keys = pointer.split('/').skip(1);
            let name = keys.next().unwrap_or_default().replace("~1", "/").replace("~0", "~");
            (name, if keys.next().is_some() { Kind::Json } else { kind })
        };
        Self(Some(shared.into_iter().chain(own).chain(outcomes).map(column).collect()))
    }

    /// What a column holds; none if it is not read.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        match &self.0 {
            Some(columns) => columns.iter().find(|column| column.0 == name).map(|column| column.1),
            None => Some(Kind::Text),
        }
    }

    /// Vectors that the table spreads over numbered columns (`emb_0`, `emb_1`...): their name, and their columns in order.
    pub fn spread(&self, header: &[String]) -> Vec<(String, Vec<usize>)> {
        let vectors = self.0.iter().flatten().filter(|(name, kind)| *kind == Kind::Vector && !header.contains(name));
        vectors.filter_map(|(name, _)| Some((name.clone(), numbered(name, header)?))).collect()
    }
}

/// The columns `name0`, `name_1`, `name.2`... in order, if they are numbered without gaps from 0 or 1.
fn numbered(name: &str, header: &[String]) -> Option<Vec<usize>> {
    let number = |column: &String| split_number(column).filter(|(prefix, _)| *prefix == name).map(|(_, number)| number);
    let mut columns: Vec<(usize, usize)> =
        header.iter().enumerate().filter_map(|(i, column)| Some((number(column)?, i))).collect();
    columns.sort_unstable();
    let first = columns.first()?.0;
    let has_no_gap = columns.iter().enumerate().all(|(i, column)| column.0 == first + i);
    (first <= 1 && columns.len() > 1 && has_no_gap).then(|| columns.into_iter().map(|(_, i)| i).collect())
}

/// The name of a numbered column without its number and separator, and the number.
pub fn split_number(column: &str) -> Option<(&str, usize)> {
    let column = column.strip_suffix(']').unwrap_or(column);
    let prefix = column.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = column[prefix.len()..].parse().ok()?;
    Some((prefix.strip_suffix(['_', '.', '-', '[']).unwrap_or(prefix), number))
}

/// Writes a JSON object key by key.
pub struct Object<'a> {
    out: &'a mut Vec<u8>,
    is_first: bool,
}

impl<'a> Object<'a> {
    /// Begins an object.
    pub fn begin(out: &'a mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, is_first: true }
    }

    /// Writes a key; its value is to be written next.
    pub fn key(&mut self, name: &str) -> &mut Vec<u8> {
        if !std::mem::take(&mut self.is_first) {
            self.out.push(b',');
        }
        write_json(self.out, &name);
        self.out.push(b':');
        self.out
    }

    /// Ends the object.
    pub fn end(self) {
        self.out.push(b'}');
    }
}

/// Writes a value as JSON.
pub fn write_json(out: &mut Vec<u8>, value: &(impl serde::Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("text, numbers and trees of them are always JSON");
}

/// Writes the text of a cell as the JSON value that its column holds; text that does not fit stays text, which the parser
/// of events then rejects with a reason.
pub fn write_cell(out: &mut Vec<u8>, kind: Kind, text: &str) {
    let trimmed = text.trim();
    let written = match kind {
        Kind::Text => None,
        Kind::Number | Kind::Time => number(kind, trimmed),
        Kind::Vector => vector(trimmed),
        Kind::Json => json(trimmed),
    };
    match written {
        // A line end inside would end the event.
        Some(json) => out.extend(json.bytes().map(|b| if matches!(b, b'\n' | b'\r') { b' ' } else { b })),
        None => write_json(out, text),
    }
}

fn number(kind: Kind, text: &str) -> Option<String> {
    match text {
        "true" | "True" | "TRUE" if kind == Kind::Number => Some("true".to_owned()),
        "false" | "False" | "FALSE" if kind == Kind::Number => Some("false".to_owned()),
        _ if is_json(text) && text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => Some(text.to_owned()),
        _ => text.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| Value::from(x).to_string()),
    }
}

/// A vector as JSON, from a list with brackets and commas, or from numbers with other separators, as NumPy prints them.
pub fn vector(text: &str) -> Option<String> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    if inner.is_some() && is_json(text) {
        return Some(text.to_owned());
    }
    let is_separator = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '|');
    let numbers = inner.unwrap_or(text).split(is_separator).filter(|part| !part.is_empty());
    let numbers: Option<Vec<String>> = numbers.map(|part| number(Kind::Time, part)).collect();
    numbers.filter(|numbers| inner.is_some() || numbers.len() > 1).map(|numbers| format!("[{}]", numbers.join(",")))
}

/// A JSON value, or a Python dictionary of plain names and numbers.
pub fn json(text: &str) -> Option<String> {
    if is_json(text) {
        return Some(text.to_owned());
    }
    let quoted = text.replace('\'', "\"");
    is_json(&quoted).then_some(quoted)
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_become_what_their_column_holds() {
        for (kind, text, json) in [
            (Kind::Text, "007", r#""007""#),
            (Kind::Text, "a \"b\"", r#""a \"b\"""#),
            (Kind::Number, "0.5", "0.5"),
            (Kind::Number, ".5", "0.5"),
            (Kind::Number, "True", "true"),
            (Kind::Number, "nan", r#""nan""#),
            (Kind::Number, "n/a", r#""n/a""#),
            (Kind::Time, "1731700000000", "1731700000000"),
            (Kind::Time, "2026-01-31 12:00:00", r#""2026-01-31 12:00:00""#),
            (Kind::Vector, "[0.1, -2e-3]", "[0.1, -2e-3]"),
            (Kind::Vector, "[ 0.1  -2.\n 3 ]", "[0.1,-2.0,3]"),
            (Kind::Vector, "0.1;0.2", "[0.1,0.2]"),
            (Kind::Vector, "[0.1 ... 0.2]", r#""[0.1 ... 0.2]""#),
            (Kind::Vector, "AACAPw==", r#""AACAPw==""#),
            (Kind::Json, "{\"a\":\n0.5}", "{\"a\": 0.5}"),
            (Kind::Json, "{'a': 0.5}", "{\"a\": 0.5}"),
            (Kind::Json, "a=0.5", r#""a=0.5""#),
        ] {
            let mut out = Vec::new();
            write_cell(&mut out, kind, text);
            assert_eq!(String::from_utf8(out).unwrap(), json, "{text}");
        }
    }

    #[test]
    fn vectors_spread_over_columns_are_found_by_their_numbers() {
        let header = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<String>>();
        for (names, found) in [
            (vec!["id", "e_1", "e_0", "e_2"], Some(vec![2, 1, 3])),
            (vec!["e1", "e2"], Some(vec![0, 1])),
            (vec!["e[0]", "e[1]", "ee0"], Some(vec![0, 1])),
            (vec!["e_0", "e_2"], None),
            (vec!["e_2", "e_3"], None),
            (vec!["e_0"], None),
            (vec!["e", "x"], None),
        ] {
            assert_eq!(numbered("e", &header(&names)), found, "{names:?}");
        }
    }
}
