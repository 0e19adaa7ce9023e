//! What rewards look like.

use std::collections::BTreeMap;

use super::column::{Cell, Column};
use super::names;

/// The rewards of a log.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Rewards {
    /// None were found.
    #[default]
    None,
    /// Numbers, or true and false: the least, the greatest, and how many different ones.
    Numbers {
        /// The least.
        low: f64,
        /// The greatest.
        high: f64,
        /// How many different ones there are.
        distinct: usize,
    },
    /// Words, with how often each occurs.
    Words(BTreeMap<String, u64>),
}

/// Most words that rewards may be.
const WORDS_MAX: usize = 20;

/// How much a column looks like the reward; none if it cannot be.
pub fn score(name: &str, column: &Column, rows: usize) -> Option<i32> {
    let is_number = column.cells.iter().all(|(_, cell)| matches!(cell, Cell::Number(_) | Cell::Bool(_)));
    let words = column.categories(rows).is_some_and(|words| words.len() <= WORDS_MAX) || column.is_one_word();
    (column.present() > 0 && (is_number || words)).then(|| names::reward(name) - if is_number { 0 } else { 2 })
}

impl Rewards {
    /// The rewards in some columns.
    pub fn of(columns: &[&Column]) -> Self {
        let cells = || columns.iter().flat_map(|column| column.cells.iter().map(|(_, cell)| cell));
        let number = |cell: &Cell| match cell {
            Cell::Number(x) => Some(*x),
            Cell::Bool(x) => Some(f64::from(u8::from(*x))),
            _ => None,
        };
        let mut numbers: Vec<f64> = cells().filter_map(number).collect();
        if numbers.is_empty() {
            let mut words = BTreeMap::new();
            for cell in cells() {
                if let Cell::Text(word) = cell {
                    *words.entry(word.clone()).or_default() += 1;
                }
            }
            return if words.is_empty() { Self::None } else { Self::Words(words) };
        }
        numbers.sort_by(f64::total_cmp);
        let (low, high) = (numbers[0], numbers[numbers.len() - 1]);
        numbers.dedup();
        Self::Numbers { low, high, distinct: numbers.len() }
    }

    /// The range to configure: the usual ones where they fit.
    pub fn range(&self) -> [f64; 2] {
        let Self::Numbers { low, high, .. } = *self else { return [0.0, 1.0] };
        match (low, high) {
            (low, high) if low >= 0.0 && high <= 1.0 => [0.0, 1.0],
            (low, high) if low >= 1.0 && high <= 5.0 && low.fract() == 0.0 && high.fract() == 0.0 => [1.0, 5.0],
            (low, high) if low >= 0.0 => [0.0, if high > low || high > 0.0 { high } else { 1.0 }],
            (low, high) if high <= 1.0 && low >= -1.0 => [-1.0, 1.0],
            (low, high) if high > low => [low, high],
            (low, _) => [low, low + 1.0],
        }
    }

    /// Whether only successes are logged, so that a query without a reward earned nothing.
    pub fn is_success_only(&self) -> bool {
        match self {
            Self::None => false,
            Self::Numbers { low, high, distinct } => *distinct == 1 && low > &0.0 && high > &0.0,
            Self::Words(words) => words.keys().all(|word| value_of(word) > 0.0),
        }
    }

    /// A reward for every word.
    pub fn values(&self) -> BTreeMap<String, f64> {
        let Self::Words(words) = self else { return BTreeMap::new() };
        let best = words.keys().map(|word| value_of(word)).fold(0.0, f64::max);
        words.keys().map(|word| (word.clone(), if best > 0.0 { value_of(word) / best } else { 0.0 })).collect()
    }
}

/// How good an event is, as far as its name tells.
fn value_of(word: &str) -> f64 {
    let word = word.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| word.contains(part));
    if has(&[
        "impression",
        "view",
        "shown",
        "skip",
        "abandon",
        "dismiss",
        "no_",
        "none",
        "down",
        "dislike",
        "bad",
        "bounce",
    ]) {
        0.0
    } else if has(&["purchas", "order", "buy", "bought", "convert", "conversion", "booking", "subscri", "checkout"]) {
        1.0
    } else if has(&["cart", "save", "like", "share", "wish"]) {
        0.6
    } else if has(&["click", "open", "tap", "select"]) {
        0.3
    } else {
        1.0
    }
}
