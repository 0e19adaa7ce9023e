//! Columns of a sample, by what they hold.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::config::TimeUnit;
use crate::event::ModelName;
use crate::timestamp;
use crate::wire::events;
use crate::wire::rows;

/// What a cell holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    /// Text that is none of the others.
    Text(String),
    /// A number.
    Number(f64),
    /// A whole number.
    Bool(bool),
    /// A vector of this dimension.
    Vector(usize),
    /// Names with numbers that sum to 1.
    Distribution(Vec<String>),
}

/// The cells of a column that are not empty, by row.
#[derive(Debug, Default)]
pub struct Column {
    pub(super) cells: Vec<(usize, Cell)>,
}

/// How deep columns may lie in objects.
const DEPTH_MAX: usize = 4;

/// Fewer numbers in a row are no embedding.
const DIM_MIN: usize = 2;

/// A text with fewer components is rather an ID.
const TEXT_DIM_MIN: usize = 8;

/// Most models that a log may have.
const MODELS_MAX: usize = 64;

/// A key within a JSON pointer.
pub fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Shows every cell of a row.
pub fn walk(value: &Value, pointer: &str, depth: usize, show: &mut dyn FnMut(&str, Cell)) {
    match value {
        Value::Object(object) if depth == 0 || (distribution(value).is_none() && depth < DEPTH_MAX) => {
            for (key, value) in object {
                walk(value, &format!("{pointer}/{}", escape(key)), depth + 1, show);
            }
        }
        Value::Null => {}
        _ => {
            if let Some(cell) = cell(value) {
                show(pointer, cell);
            }
        }
    }
}

fn cell(value: &Value) -> Option<Cell> {
    match value {
        Value::Bool(x) => Some(Cell::Bool(*x)),
        Value::Number(x) => x.as_f64().map(Cell::Number),
        Value::Object(_) => distribution(value).map(Cell::Distribution),
        Value::Array(items) => {
            (items.len() >= DIM_MIN && events::vector(value, "").is_ok()).then_some(Cell::Vector(items.len()))
        }
        Value::String(text) => Some(of_text(text)),
        Value::Null => None,
    }
}

/// What a text stands for: in CSV everything is text.
fn of_text(text: &str) -> Cell {
    let trimmed = text.trim();
    let json = || serde_json::from_str::<Value>(&rows::json(trimmed)?).ok();
    if let Some(keys) = trimmed.starts_with('{').then(json).flatten().and_then(|value| distribution(&value)) {
        return Cell::Distribution(keys);
    }
    if trimmed.len() >= TEXT_DIM_MIN {
        let value = rows::vector(trimmed).and_then(|json| serde_json::from_str(&json).ok());
        let found = events::vector(&value.unwrap_or_else(|| Value::from(trimmed)), "").ok();
        let is_plausible = |x: &f32| *x == 0.0 || (1e-12..1e4).contains(&x.abs());
        if let Some(vector) = found.filter(|v| v.len() >= TEXT_DIM_MIN && v.iter().all(is_plausible)) {
            return Cell::Vector(vector.len());
        }
    }
    match trimmed {
        "true" | "True" | "TRUE" => Cell::Bool(true),
        "false" | "False" | "FALSE" => Cell::Bool(false),
        _ => {
            // A text with leading zeros is an ID.
            let is_padded = trimmed.len() > 1 && trimmed.starts_with('0') && !trimmed.starts_with("0.");
            match trimmed.parse::<f64>().ok().filter(|x| x.is_finite() && !is_padded) {
                Some(number) => Cell::Number(number),
                None => Cell::Text(text.to_owned()),
            }
        }
    }
}

/// The names of a distribution.
fn distribution(value: &Value) -> Option<Vec<String>> {
    let object = value.as_object()?;
    let numbers: Option<Vec<f64>> = object
        .values()
        .filter(|value| !value.is_null())
        .map(|value| value.as_f64().filter(|x| (0.0..=1.0).contains(x)))
        .collect();
    let is_one = (numbers?.iter().sum::<f64>() - 1.0).abs() < 1e-3;
    (is_one && object.len() > 1).then(|| object.keys().cloned().collect())
}

/// Joins numbered columns of numbers to vectors, if there are enough of them.
pub fn join_numbered(columns: &mut BTreeMap<String, Column>, rows: usize) {
    let mut groups = BTreeMap::<String, Vec<(usize, String)>>::new();
    for (pointer, column) in columns.iter() {
        let is_numeric =
            column.cells.len() * 10 >= rows * 9 && column.cells.iter().all(|(_, cell)| matches!(cell, Cell::Number(_)));
        if let Some((prefix, number)) = rows::split_number(pointer).filter(|_| is_numeric) {
            groups.entry(prefix.to_owned()).or_default().push((number, pointer.clone()));
        }
    }
    for (prefix, mut group) in groups {
        group.sort();
        let first = group[0].0;
        let is_vector =
            first <= 1 && group.len() >= TEXT_DIM_MIN && group.iter().enumerate().all(|(i, one)| one.0 == first + i);
        if is_vector && !columns.contains_key(&prefix) {
            let cells = (0..rows).map(|row| (row, Cell::Vector(group.len()))).collect();
            group.iter().for_each(|(_, pointer)| _ = columns.remove(pointer));
            columns.insert(prefix, Column { cells });
        }
    }
}

impl Column {
    /// Adds a cell.
    pub fn add(&mut self, row: usize, cell: Cell) {
        self.cells.push((row, cell));
    }

    /// Number of rows that have a value.
    pub fn present(&self) -> usize {
        self.cells.len()
    }

    /// Whether nearly all rows have a value.
    fn is_full(&self, rows: usize) -> bool {
        self.cells.len() * 20 >= rows * 19
    }

    /// The dimension of its vectors, if it holds vectors: that of most.
    pub fn vector_dim(&self, rows: usize) -> Option<usize> {
        let mut dims = BTreeMap::<usize, usize>::new();
        for (_, cell) in &self.cells {
            let Cell::Vector(dim) = cell else { continue };
            *dims.entry(*dim).or_default() += 1;
        }
        let (dim, number) = dims.into_iter().max_by_key(|(_, number)| *number)?;
        (number * 2 > rows).then_some(dim)
    }

    /// The names of its distributions, if it holds distributions.
    pub fn distribution_keys(&self, rows: usize) -> Option<BTreeSet<String>> {
        let keys = |(_, cell): &(usize, Cell)| match cell {
            Cell::Distribution(keys) => Some(keys.clone()),
            _ => None,
        };
        let all: Option<Vec<Vec<String>>> = self.cells.iter().map(keys).collect();
        all.filter(|_| self.is_full(rows)).map(|all| all.into_iter().flatten().collect())
    }

    /// Whether it holds probabilities above 0.
    pub fn is_probability(&self, rows: usize) -> bool {
        let is_one = |(_, cell): &(usize, Cell)| matches!(cell, Cell::Number(p) if *p > 0.0 && *p <= 1.0);
        self.is_full(rows) && self.cells.iter().all(is_one)
    }

    /// How often each text occurs.
    pub fn texts(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for (_, cell) in &self.cells {
            if let Cell::Text(text) = cell {
                *counts.entry(text.clone()).or_default() += 1;
            }
        }
        counts
    }

    /// Its words with their numbers, if it holds a few words that may name models.
    pub fn categories(&self, rows: usize) -> Option<BTreeMap<String, u64>> {
        let is_text = self.is_full(rows) && self.cells.iter().all(|(_, cell)| matches!(cell, Cell::Text(_)));
        let counts = is_text.then(|| self.texts())?;
        let is_few = (2..=MODELS_MAX).contains(&counts.len()) && (counts.len() * 2 <= rows || rows < 10);
        (is_few && counts.keys().all(|text| ModelName::try_from(text.as_str()).is_ok())).then_some(counts)
    }

    /// Whether it always holds the same word.
    pub fn is_one_word(&self) -> bool {
        let counts = self.texts();
        counts.len() == 1 && counts.values().sum::<u64>() == self.cells.len() as u64
    }

    /// Its values as IDs, if it may hold any.
    pub fn ids(&self) -> Option<BTreeSet<String>> {
        self.cells.iter().map(|(_, cell)| id(cell)).collect()
    }

    /// Whether every row has a value of its own.
    pub fn is_unique(&self, rows: usize) -> bool {
        self.is_full(rows) && self.ids().is_some_and(|ids| ids.len() * 100 >= self.cells.len() * 95)
    }

    /// Whether it holds times: None if not, `Some(None)` for text, else the unit of the numbers.
    pub fn time_unit(&self, rows: usize) -> Option<Option<TimeUnit>> {
        let unit = |(_, cell): &(usize, Cell)| match cell {
            Cell::Text(text) => timestamp::parse(text).map(|_| None),
            Cell::Number(x) => unit_of(*x).map(Some),
            _ => None,
        };
        let units: Option<Vec<Option<TimeUnit>>> = self.cells.iter().map(unit).collect();
        let units = units.filter(|units| self.is_full(rows) && !units.is_empty())?;
        units.iter().all(|unit| *unit == units[0]).then(|| units[0])
    }

    /// Times by ID, for a column of IDs.
    pub fn keyed_times(&self, times: &Self, unit: TimeUnit) -> Vec<(String, i64)> {
        let by_row: BTreeMap<usize, i64> =
            times.cells.iter().filter_map(|(row, cell)| Some((*row, time_ms(cell, unit)?))).collect();
        self.cells.iter().filter_map(|(row, cell)| Some((id(cell)?, *by_row.get(row)?))).collect()
    }

    /// One of its values.
    pub fn example(&self) -> String {
        match self.cells.first().map(|(_, cell)| cell) {
            Some(Cell::Text(text)) => crate::event::excerpt(text, 40).into_owned(),
            Some(Cell::Number(x)) => x.to_string(),
            Some(Cell::Bool(x)) => x.to_string(),
            Some(Cell::Vector(dim)) => format!("{dim} numbers"),
            Some(Cell::Distribution(keys)) => format!("a distribution over {}", keys.join(", ")),
            None => "empty".to_owned(),
        }
    }
}

fn id(cell: &Cell) -> Option<String> {
    match cell {
        Cell::Text(text) => Some(text.clone()),
        Cell::Number(x) if x.fract() == 0.0 => Some(format!("{x:.0}")),
        _ => None,
    }
}

fn time_ms(cell: &Cell, unit: TimeUnit) -> Option<i64> {
    match cell {
        Cell::Text(text) => timestamp::parse(text),
        Cell::Number(x) if unit == TimeUnit::S => Some((x * 1000.0).round() as i64),
        Cell::Number(x) => unit.to_ms(*x as i64),
        _ => None,
    }
}

/// The unit in which a number is a time between 2000 and 2100.
fn unit_of(x: f64) -> Option<TimeUnit> {
    let units = [(TimeUnit::S, 1.0), (TimeUnit::Ms, 1e3), (TimeUnit::Us, 1e6), (TimeUnit::Ns, 1e9)];
    units
        .into_iter()
        .find(|(_, factor)| (946_684_800.0 * factor..4_102_444_800.0 * factor).contains(&x))
        .map(|(unit, _)| unit)
}
