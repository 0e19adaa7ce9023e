//! The queries that are seen again and again, with what each model earned on them.
//!
//! ```text
//! r = prediction + d_q + e_qm + noise         d_q: how easy the query is;  e_qm: how much better m does on it than predicted
//! a_m = n_m / (1 + EFFECT n_m)                n_m, x_m: examples of model m on this query, mean of r - prediction
//! d = sum a_m x_m / (1 / LEVEL + sum a_m)     e_m = EFFECT n_m / (1 + EFFECT n_m) (x_m - d)
//! ```
//!
//! d and e are the posterior means of a mixed-effects model whose variances, over that of the noise, are LEVEL and EFFECT.
//! A regression must not take n repetitions of one query for n queries: their weight n / (1 + REPEAT n) is bounded.
//!
//! The table is bounded. A query that is not in it takes the place of the least valuable one of its bucket, once that has
//! lost its credit: every query that finds no place costs it one, every visit earns it one (Misra and Gries 1982).

use super::constants::Constants;
use crate::query_key::QueryKey;
use crate::wire::records::learner::critic::{ConstantsRecord, HeadQueryRecord};

/// The table.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadQueries {
    models: usize,
    linear: usize,
    /// Buckets of [`WAYS`] places each.
    places: Vec<Option<HeadQuery>>,
    /// What queries that are not in the table any more, or found no place, say of the models.
    evicted: Constants,
}

/// One query.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadQuery {
    /// Its key.
    pub key: QueryKey,
    /// Its coordinates in the leading directions.
    pub coordinates: Vec<f32>,
    /// Per model: examples, and the sum of r - 1/2 over them.
    pub seen: Vec<(f32, f32)>,
    credit: u32,
}

/// Places per bucket.
const WAYS: usize = 8;

/// Variance of d_q and of e_qm, over that of the noise.
pub(super) const LEVEL: f64 = 0.3;
const EFFECT: f64 = 0.06;

/// Variance of a query's effect on the regression, over that of the noise: repetitions count for at most 1 / REPEAT.
const REPEAT: f64 = 0.1;

/// Most credit of a query, so that one that is no longer seen is replaced in time.
const CREDIT_MAX: u32 = 64;

impl HeadQueries {
    /// An empty table with room for about `capacity` queries.
    pub fn new(capacity: usize, models: usize, linear: usize) -> Self {
        let places = vec![None; capacity.next_multiple_of(WAYS)];
        Self { models, linear, places, evicted: Constants::new(models) }
    }

    /// The query of a key.
    pub fn get(&self, key: QueryKey) -> Option<&HeadQuery> {
        self.bucket(key).and_then(|range| self.places[range].iter().flatten().find(|query| query.key == key))
    }

    /// Adds an example, and returns by how much the regression's weight and moment of it change. `coordinates` are
    /// kept of the first visit alone: what is left out of a prediction must be what was added to it.
    pub fn add(&mut self, key: QueryKey, coordinates: &[f64], model: usize, target: f64) -> (f64, f64) {
        let Some(place) = self.place(key, coordinates) else {
            self.evicted.add_one(model, target);
            return (weight(1.0), weight(1.0) * target);
        };
        place.credit = (place.credit + 1).min(CREDIT_MAX);
        let (count, sum) = &mut place.seen[model];
        let before = (weight(f64::from(*count)), moment(*count, *sum));
        *count += 1.0;
        *sum += target as f32;
        (weight(f64::from(*count)) - before.0, moment(*count, *sum) - before.1)
    }

    /// What all queries say of the models on the whole, those that were evicted included.
    pub fn constants(&self) -> Constants {
        let mut constants = self.evicted.clone();
        self.iter().for_each(|query| constants.add(&query.seen));
        constants
    }

    /// Counts a model's mean as that of so many evicted queries.
    pub fn add_mean(&mut self, model: usize, weight: f64, mean: f64) {
        self.evicted.add_mean(model, weight, mean);
    }

    /// Forgets all but a share of every example.
    pub fn scale(&mut self, keep: f64) {
        self.evicted.scale(keep);
        for query in self.places.iter_mut().flatten() {
            query.seen.iter_mut().for_each(|(count, sum)| (*count, *sum) = (*count * keep as f32, *sum * keep as f32));
        }
    }

    /// Turns the coordinates by R.
    pub fn turn(&mut self, rotation: &faer::Mat<f64>) {
        let mut turned = vec![0.0; self.linear];
        for query in self.places.iter_mut().flatten() {
            turned.fill(0.0);
            for (a, y) in query.coordinates.iter().enumerate() {
                crate::hpg::linalg::axpy(f64::from(*y), rotation.col_as_slice(a), &mut turned);
            }
            query.coordinates.iter_mut().zip(&turned).for_each(|(y, turned)| *y = *turned as f32);
        }
    }

    /// Moves to another set of models.
    pub fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        self.evicted.remap(places);
        for query in self.places.iter_mut().flatten() {
            query.seen = places.iter().map(|place| place.map_or((0.0, 0.0), |m| query.seen[m])).collect();
        }
    }

    /// All queries, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = &HeadQuery> {
        self.places.iter().flatten()
    }

    /// Adds what another table knows of its queries, whose coordinates must be in the same directions.
    pub fn merge(&mut self, other: &Self) {
        self.evicted.merge(&other.evicted);
        for query in other.iter() {
            let coordinates: Vec<f64> = query.coordinates.iter().map(|y| f64::from(*y)).collect();
            let Some(place) = self.place(query.key, &coordinates) else {
                self.evicted.add(&query.seen);
                continue;
            };
            place.credit = place.credit.saturating_add(query.credit).min(CREDIT_MAX);
            for ((count, sum), (more, more_sum)) in place.seen.iter_mut().zip(&query.seen) {
                (*count, *sum) = (*count + more, *sum + more_sum);
            }
        }
    }

    /// Records of the queries, with their places.
    pub fn record(&self) -> Vec<HeadQueryRecord> {
        let record = |(place, query): (usize, &Option<HeadQuery>)| {
            let HeadQuery { key, coordinates, seen, credit } = query.clone()?;
            let (examples, sums) = seen.into_iter().unzip();
            Some(HeadQueryRecord { place: place as u64, key: key.0, coordinates, examples, sums, credit })
        };
        self.places.iter().enumerate().filter_map(record).collect()
    }

    /// What is left of evicted queries.
    pub fn evicted(&self) -> &Constants {
        &self.evicted
    }

    /// Restores records into an empty table; none if they are impossible. Queries beyond a smaller capacity are evicted.
    pub fn restore(
        mut self,
        records: Vec<HeadQueryRecord>,
        saved_capacity: u64,
        evicted: ConstantsRecord,
    ) -> Option<Self> {
        self.evicted = Constants::from_record(evicted, self.models)?;
        let same = saved_capacity == self.places.len() as u64;
        for record in records {
            let HeadQueryRecord { place, key, coordinates, examples, sums, credit } = record;
            let is_sound = coordinates.len() == self.linear
                && examples.len() == self.models
                && sums.len() == self.models
                && coordinates.iter().all(|y| y.abs() <= 1.001)
                && examples.iter().zip(&sums).all(|(n, s)| (0.0..=1e9).contains(n) && s.abs() <= 0.501 * n + 1e-3)
                && credit <= CREDIT_MAX;
            if !is_sound {
                return None;
            }
            let seen = examples.into_iter().zip(sums).collect();
            let query = HeadQuery { key: QueryKey(key), coordinates, seen, credit };
            if same {
                let at =
                    usize::try_from(place).ok().filter(|at| self.bucket(query.key).is_some_and(|b| b.contains(at)))?;
                self.places[at] = Some(query);
            } else if let Some(range) = self.bucket(query.key)
                && let Some(free) = self.places[range].iter_mut().find(|place| place.is_none())
            {
                *free = Some(query);
            } else {
                self.evicted.add(&query.seen);
            }
        }
        Some(self)
    }

    /// Number of places.
    pub fn capacity(&self) -> usize {
        self.places.len()
    }

    fn bucket(&self, QueryKey(key): QueryKey) -> Option<std::ops::Range<usize>> {
        let buckets = self.places.len() / WAYS;
        // The high bits: the low ones of a key depend on the low ones of its components alone.
        let bucket = ((u128::from(key) * buckets as u128) >> 64) as usize;
        (buckets > 0).then_some(bucket * WAYS..(bucket + 1) * WAYS)
    }

    /// The place of a query, new or known; none if it finds no room.
    fn place(&mut self, key: QueryKey, coordinates: &[f64]) -> Option<&mut HeadQuery> {
        let range = self.bucket(key)?;
        let bucket = &mut self.places[range];
        let known = bucket.iter().position(|place| place.as_ref().is_some_and(|query| query.key == key));
        let at = match known.or_else(|| bucket.iter().position(Option::is_none)) {
            Some(at) => at,
            None => {
                let credit = |place: &Option<HeadQuery>| place.as_ref().map_or(0, |query| query.credit);
                let least = (0..WAYS).min_by_key(|&at| credit(&bucket[at]))?;
                let query = bucket[least].as_mut()?;
                if query.credit > 0 {
                    query.credit -= 1;
                    return None;
                }
                least
            }
        };
        if known.is_none() {
            if let Some(old) = &bucket[at] {
                self.evicted.add(&old.seen);
            }
            // A replaced query leaves its memory to the next.
            let query = bucket[at].get_or_insert_with(|| HeadQuery {
                key,
                coordinates: Vec::with_capacity(coordinates.len()),
                seen: vec![(0.0, 0.0); self.models],
                credit: 0,
            });
            query.key = key;
            query.credit = 0;
            query.coordinates.clear();
            query.coordinates.extend(coordinates.iter().map(|y| *y as f32));
            query.seen.fill((0.0, 0.0));
        }
        bucket[at].as_mut()
    }
}

impl HeadQuery {
    /// Examples of all models.
    pub fn visits(&self) -> f64 {
        self.seen.iter().map(|(count, _)| f64::from(*count)).sum()
    }

    /// The weight that the regression gives to a model's examples, and their mean of r - 1/2; none without examples.
    pub fn mean(&self, model: usize) -> Option<(f64, f64)> {
        let (count, sum) = self.seen[model];
        (count > 0.0).then(|| (weight(f64::from(count)), f64::from(sum) / f64::from(count)))
    }

    /// Precision of a model's mean, over that of one example.
    pub fn precision(&self, model: usize) -> f64 {
        let count = f64::from(self.seen[model].0);
        count / (1.0 + EFFECT * count)
    }

    /// e of each model, and d. `predicted` is each model's prediction of r - 1/2.
    pub fn effects(&self, predicted: &[f64], effects: &mut [f64]) -> f64 {
        let (mut sum, mut precision) = (0.0, LEVEL.recip());
        for (&(count, total), predicted) in self.seen.iter().zip(predicted) {
            let (count, total) = (f64::from(count), f64::from(total));
            // a x, without dividing by a count of 0.
            sum += (total - count * predicted) / (1.0 + EFFECT * count);
            precision += count / (1.0 + EFFECT * count);
        }
        let level = sum / precision;
        for ((&(count, total), predicted), effect) in self.seen.iter().zip(predicted).zip(effects) {
            let (count, total) = (f64::from(count), f64::from(total));
            *effect = EFFECT * (total - count * (predicted + level)) / (1.0 + EFFECT * count);
        }
        level
    }
}

/// What the next example of a query and model adds, over the first: `weight` is that of the examples so far.
pub(super) fn novelty(weight: f64) -> f64 {
    // weight = n / (1 + REPEAT n), so 1 / (1 + REPEAT n) = 1 - REPEAT weight.
    (1.0 - REPEAT * weight).powi(2)
}

/// Weight of n examples of one query and model.
fn weight(n: f64) -> f64 {
    n / (1.0 + REPEAT * n)
}

/// The weight times the mean.
fn moment(count: f32, sum: f32) -> f64 {
    f64::from(sum) / (1.0 + REPEAT * f64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(capacity: usize) -> HeadQueries {
        HeadQueries::new(capacity, 2, 1)
    }

    #[test]
    fn repetitions_count_less_and_less() {
        let mut table = table(64);
        let (mut weights, mut moments) = (0.0, 0.0);
        for t in 0..200 {
            let (weight, moment) = table.add(QueryKey(7), &[0.5], 0, if t % 4 == 0 { 0.5 } else { -0.5 });
            weights += weight;
            moments += moment;
        }
        assert!((weights - 200.0 / 21.0).abs() < 1e-9 && weights < 1.0 / REPEAT);
        assert!((moments / weights + 0.25).abs() < 1e-6, "the moment is the weight times the mean");
        let query = table.get(QueryKey(7)).unwrap();
        assert_eq!((query.visits(), query.mean(1)), (200.0, None));
        let fresh = table.add(QueryKey(8), &[0.5], 1, 0.5);
        assert!((fresh.0 - 1.0 / 1.1).abs() < 1e-9 && (fresh.1 - 0.5 / 1.1).abs() < 1e-9);
    }

    /// Against the posterior mean of (d, e_1, e_2), from the dense precision matrix.
    #[test]
    fn effects_are_the_posterior_mean() {
        let mut table = table(64);
        let data = [(0, 0.5), (0, -0.5), (0, 0.5), (1, -0.5), (0, 0.5)];
        for (model, target) in data {
            table.add(QueryKey(7), &[0.0], model, target);
        }
        let predicted = [0.1, -0.2];
        let mut precision = faer::Mat::<f64>::zeros(3, 3);
        let mut right = faer::Mat::<f64>::zeros(3, 1);
        for (i, variance) in [LEVEL, EFFECT, EFFECT].into_iter().enumerate() {
            precision[(i, i)] = variance.recip();
        }
        for (model, target) in data {
            for i in [0, 1 + model] {
                right[(i, 0)] += target - predicted[model];
                for j in [0, 1 + model] {
                    precision[(i, j)] += 1.0;
                }
            }
        }
        use faer::linalg::solvers::Solve;
        let expected = precision.llt(faer::Side::Lower).unwrap().solve(right);
        let mut effects = [0.0; 2];
        let level = table.get(QueryKey(7)).unwrap().effects(&predicted, &mut effects);
        assert!((level - expected[(0, 0)]).abs() < 1e-6);
        assert!((0..2).all(|m| (effects[m] - expected[(1 + m, 0)]).abs() < 1e-6), "{effects:?} {expected:?}");
    }

    #[test]
    fn frequent_queries_stay() {
        let mut table = table(16);
        let frequent: Vec<QueryKey> = (0..4).map(|i| QueryKey(i << 61)).collect();
        for t in 0..4000_u64 {
            table.add(frequent[t as usize % 4], &[0.0], 0, 0.5);
            table.add(QueryKey(t.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1), &[0.0], 1, -0.5);
        }
        assert!(frequent.iter().all(|&key| table.get(key).is_some_and(|query| query.visits() > 900.0)));
        assert_eq!(table.iter().count(), 16);
        let restored = |capacity: usize, models: usize| {
            HeadQueries::new(capacity, models, 1).restore(table.record(), 16, table.evicted.record())
        };
        let again = restored(16, 2).unwrap();
        assert_eq!(again, table);
        let smaller = restored(8, 2).unwrap();
        assert_eq!(smaller.iter().count(), 8);
        assert!(restored(16, 3).is_none());
        assert_eq!(HeadQueries::new(0, 2, 1).add(QueryKey(3), &[0.0], 0, 0.5).0, weight(1.0));
    }
}
