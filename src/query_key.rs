//! Keys of queries: 64 bits that a router in any language computes alike, without a hash library.
//!
//! ```text
//! x_i = floor(65536 q_i + 1/2)            q: the query, normalised in f64; x_i: a signed 64-bit integer
//! key = sum_i x_i c_i  mod 2^64           c_i: output number i of splitmix64 with seed 0
//! ```
//!
//! Queries whose components agree after rounding to 2^-16 have the same key. Two other queries have the same key with a
//! probability of about 2^-64, unless an adversary constructs them.

use crate::event::Query;

/// The key of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueryKey(pub u64);

/// Computes the keys of queries of one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryKeys {
    /// c_i
    constants: Vec<u64>,
}

/// Steps per unit of a component.
const STEPS: f64 = 65536.0;

/// Adding it to a small number rounds that number to the nearest integer, which are then the last bits of the sum.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// A product this close to where rounding changes is computed again as defined. The bound exceeds the difference between
/// two orders of summation of 65,536 squares.
const MARGIN: f64 = 1e-6;

impl QueryKey {
    /// The key of a query. [`QueryKeys`] computes the keys of many queries faster.
    pub fn of(query: &Query) -> Self {
        Self::defined(query, (0..).map(splitmix64))
    }

    /// The definition.
    fn defined(query: &Query, constants: impl Iterator<Item = u64>) -> Self {
        let steps = query.as_slice().iter().map(|q| (STEPS * q + 0.5).floor() as i64 as u64);
        Self(steps.zip(constants).fold(0, |sum, (x, c)| sum.wrapping_add(x.wrapping_mul(c))))
    }
}

impl QueryKeys {
    /// For queries of dimension `dim`.
    pub fn new(dim: usize) -> Self {
        Self { constants: (0..dim as u64).map(splitmix64).collect() }
    }

    /// The key of a query of this dimension.
    pub fn key(&self, query: &Query) -> QueryKey {
        self.rounded(query.as_slice(), STEPS).unwrap_or_else(|| self.defined(query))
    }

    /// The key of a good query of this dimension that is not normalised. `square` is its squared length, summed in any order.
    pub fn key_of_f32(&self, components: &[f32], square: f64) -> QueryKey {
        self.rounded(components, STEPS / square.sqrt()).unwrap_or_else(|| {
            let query = Query::from_f32(components).expect("a query whose length is positive and finite");
            self.defined(&query)
        })
    }

    fn defined(&self, query: &Query) -> QueryKey {
        QueryKey::defined(query, self.constants.iter().copied())
    }

    /// The key, computed in several lanes; none if an ulp could change it.
    fn rounded<T: Copy + Into<f64>>(&self, components: &[T], scale: f64) -> Option<QueryKey> {
        debug_assert_eq!(components.len(), self.constants.len());
        let mut lanes = Lanes::default();
        let (chunks, rest) = components.as_chunks::<LANES>();
        let (chunk_constants, rest_constants) = self.constants.as_chunks::<LANES>();
        for (chunk, constants) in chunks.iter().zip(chunk_constants) {
            for lane in 0..LANES {
                lanes.add(lane, scale * chunk[lane].into(), constants[lane]);
            }
        }
        for (&component, &constant) in rest.iter().zip(rest_constants) {
            lanes.add(0, scale * component.into(), constant);
        }
        lanes.key()
    }
}

/// Terms that are computed side by side.
const LANES: usize = 4;

/// Partial sums of a key, and the largest distance of a product from its nearest integer.
#[derive(Default)]
struct Lanes {
    sums: [u64; LANES],
    distances: [f64; LANES],
}

impl Lanes {
    #[inline(always)]
    fn add(&mut self, lane: usize, product: f64, constant: u64) {
        let shifted = product + ROUNDER;
        let x = shifted.to_bits().wrapping_sub(ROUNDER.to_bits());
        self.sums[lane] = self.sums[lane].wrapping_add(x.wrapping_mul(constant));
        let distance = (product - (shifted - ROUNDER)).abs();
        // Not f64::max, whose treatment of NaN costs instructions.
        self.distances[lane] = if distance > self.distances[lane] { distance } else { self.distances[lane] };
    }

    fn key(&self) -> Option<QueryKey> {
        let is_certain = self.distances.iter().all(|&distance| distance < 0.5 - MARGIN);
        is_certain.then(|| QueryKey(self.sums.iter().fold(0, |sum, &lane| sum.wrapping_add(lane))))
    }
}

/// Output number `i` of splitmix64 with seed 0.
fn splitmix64(i: u64) -> u64 {
    let z = i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;

    /// Published outputs of splitmix64 with seed 0.
    #[test]
    fn constants_are_those_of_splitmix64() {
        let expected = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F, 0xF88B_B8A8_724C_81EC];
        assert_eq!(QueryKeys::new(4).constants, expected);
    }

    #[derive(Deserialize)]
    struct Golden {
        keys: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        query: Vec<f32>,
        key: String,
    }

    /// The file was written by integer arithmetic of unlimited precision; clients in other languages read it too.
    #[test]
    fn keys_are_those_of_the_golden_file() {
        let golden: Golden = serde_json::from_str(include_str!("../tests/golden/router/query-keys.json")).unwrap();
        assert!(golden.keys.len() >= 8);
        for Case { query, key } in golden.keys {
            let expected = QueryKey(key.parse().unwrap());
            let unit = Query::from_f32(&query).unwrap();
            let keys = QueryKeys::new(query.len());
            let square = query.iter().rev().map(|&x| f64::from(x).powi(2)).sum();
            assert_eq!(QueryKey::of(&unit), expected, "{query:?}");
            assert_eq!(keys.key(&unit), expected, "{query:?}");
            assert_eq!(keys.key_of_f32(&query, square), expected, "{query:?}");
        }
    }

    #[test]
    fn products_between_two_integers_are_rounded_as_defined() {
        // A half step, one ulp below and one above; and halves of other sizes.
        for half in [0.5, 0.5_f64.next_down(), 0.5_f64.next_up(), -0.5, 1.5, 40_000.5, -40_000.5] {
            let x = half / STEPS;
            let query = Query::from_unit(vec![x, (1.0 - x * x).sqrt()]).unwrap();
            let keys = QueryKeys::new(2);
            assert_eq!(keys.rounded(query.as_slice(), STEPS), None, "{half}");
            assert_eq!(keys.key(&query), QueryKey::of(&query), "{half}");
        }
        assert_eq!(QueryKey::of(&Query::new([1.0]).unwrap()), QueryKey(splitmix64(0).wrapping_mul(65536)));
        assert_eq!(
            QueryKey::of(&Query::new([-1.0]).unwrap()),
            QueryKey(splitmix64(0).wrapping_mul(65536).wrapping_neg())
        );
    }

    proptest! {
        #[test]
        fn fast_keys_equal_the_definition(
            mut query in prop::collection::vec(prop_oneof![-1.0..1.0_f32, Just(0.0), Just(0.5), -1e-5..1e-5_f32], 1..300),
            magnitude in prop_oneof![Just(1.0_f32), Just(1e-37), Just(1e37)],
        ) {
            query[0] += 1.5;
            query.iter_mut().for_each(|x| *x *= magnitude);
            let unit = Query::from_f32(&query).unwrap();
            let keys = QueryKeys::new(query.len());
            let square = query.iter().rev().map(|&x| f64::from(x).powi(2)).sum();
            prop_assert_eq!(keys.key(&unit), QueryKey::of(&unit));
            prop_assert_eq!(keys.key_of_f32(&query, square), QueryKey::of(&unit));
        }
    }
}
