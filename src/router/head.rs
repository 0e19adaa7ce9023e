//! The head table: corrections of the scores of frequent queries, each found by the exact key of its query.

use thiserror::Error;

use crate::query_key::QueryKey;

/// Largest number of queries in a head table.
pub const HEAD_QUERIES_MAX: usize = 65_536;

/// Corrections of the scores of frequent queries. It affects these queries alone.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadTable {
    /// Keys of the queries, strictly ascending.
    keys: Vec<u64>,
    /// One correction per model, query by query.
    corrections: Vec<f32>,
}

/// Why keys and corrections are not a [`HeadTable`].
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BadHeadTable {
    /// Too many queries.
    #[error("has {0} queries: must have at most {HEAD_QUERIES_MAX}")]
    TooMany(usize),
    /// Keys that are not strictly ascending.
    #[error("keys must be strictly ascending, but key {0} is not above the one before")]
    Order(usize),
    /// Not one correction per query and model.
    #[error("has {found} corrections, but {queries} queries and {models} models")]
    Length {
        /// Corrections.
        found: usize,
        /// Queries.
        queries: usize,
        /// Models.
        models: usize,
    },
}

impl HeadTable {
    /// A table from strictly ascending keys and, for each of them, one correction per model.
    pub fn new(models: usize, keys: Vec<u64>, corrections: Vec<f32>) -> Result<Self, BadHeadTable> {
        let (queries, found) = (keys.len(), corrections.len());
        if queries > HEAD_QUERIES_MAX {
            return Err(BadHeadTable::TooMany(queries));
        }
        if queries.checked_mul(models) != Some(found) {
            return Err(BadHeadTable::Length { found, queries, models });
        }
        match keys.windows(2).position(|pair| pair[0] >= pair[1]) {
            Some(i) => Err(BadHeadTable::Order(i + 1)),
            None => Ok(Self { keys, corrections }),
        }
    }

    /// Number of queries.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether it has no query.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys of its queries, strictly ascending.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// The corrections of all queries, in the order of the keys.
    pub fn corrections(&self) -> &[f32] {
        &self.corrections
    }

    /// The correction of each model's score, for a query in the table.
    pub fn get(&self, QueryKey(key): QueryKey) -> Option<&[f32]> {
        let row = self.keys.binary_search(&key).ok()?;
        let models = self.corrections.len() / self.keys.len();
        Some(&self.corrections[row * models..(row + 1) * models])
    }

    /// Multiplies all corrections.
    pub fn scale(&mut self, by: f32) {
        self.corrections.iter_mut().for_each(|x| *x *= by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_queries_are_found() {
        let table = HeadTable::new(2, vec![3, 7, u64::MAX], vec![0.5, -0.5, 1.0, 2.0, 0.0, 4.0]).unwrap();
        assert_eq!((table.len(), table.is_empty()), (3, false));
        let expected =
            [(3, Some([0.5, -0.5])), (7, Some([1.0, 2.0])), (u64::MAX, Some([0.0, 4.0])), (0, None), (5, None)];
        for (key, row) in expected {
            assert_eq!(table.get(QueryKey(key)), row.as_ref().map(|row| &row[..]), "{key}");
        }
        assert_eq!(HeadTable::default().get(QueryKey(0)), None);
        let mut scaled = table.clone();
        scaled.scale(-2.0);
        assert_eq!((scaled.keys(), scaled.corrections()), (table.keys(), &[-1.0, 1.0, -2.0, -4.0, -0.0, -8.0][..]));
    }

    #[test]
    fn bad_tables_are_errors() {
        let table = |keys: &[u64], corrections: usize| HeadTable::new(2, keys.to_vec(), vec![0.0; corrections]);
        assert_eq!(table(&[1, 1], 4), Err(BadHeadTable::Order(1)));
        assert_eq!(table(&[1, 5, 4], 6), Err(BadHeadTable::Order(2)));
        assert_eq!(table(&[1, 2], 3), Err(BadHeadTable::Length { found: 3, queries: 2, models: 2 }));
        assert_eq!(table(&[], 2), Err(BadHeadTable::Length { found: 2, queries: 0, models: 2 }));
        let many: Vec<u64> = (0..=HEAD_QUERIES_MAX as u64).collect();
        assert_eq!(table(&many, 2 * many.len()), Err(BadHeadTable::TooMany(65_537)));
        assert_eq!(table(&many[1..], 2 * HEAD_QUERIES_MAX).map(|table| table.len()), Ok(HEAD_QUERIES_MAX));
    }
}
