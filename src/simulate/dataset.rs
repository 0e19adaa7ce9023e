//! A data set as a world: real queries, drawn evenly and again and again, with the rewards that were measured for them.
//!
//! A [`Mixture`] draws them as traffic does: some queries often, others once. Its new queries are those of a reserved part
//! of the data set, each once. When all of them have come, new queries are synthetic: (1 - t) a + t b, normalised, of a
//! reserved query a, one of its nearest reserved neighbours b and a random t; their rewards are mixed in the same
//! proportion. Rewards of such queries vary smoothly, so they are easier to predict than those of real queries; and since
//! they are averages, models differ less in them.
//!
//! There is no W* behind it: scores and norm of the truth are 0, so that regret is measured against uniform play.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use super::{Occurrence, World};
use crate::event::{BadQuery, Query};
use crate::hpg::linalg::dot;
use crate::wire::dataset::Dataset;

/// How a data set is played.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatasetSpec {
    /// Rewards change places between queries: nothing is left to learn but which model is best on the whole.
    pub shuffled: bool,
    /// Share of the queries that do not come before the switch; after it only these do.
    pub held_out: f64,
    /// Seed of everything.
    pub seed: u64,
}

/// How queries repeat, instead of all alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mixture {
    /// Repeated queries are drawn in proportion to 1 / rank^exponent, ranked by the seed.
    pub exponent: f64,
    /// Probability that the next query is a new one. The same share of the distinct queries is reserved for that.
    pub new_share: f64,
}

/// A data set is too small for a [`Mixture`].
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "the data set has {distinct} distinct queries to draw from: a mixture of repeated and new queries needs at least \
     {DISTINCT_MIN}"
)]
pub struct TooFewQueries {
    /// Distinct queries, without those held out.
    pub distinct: usize,
}

/// One to repeat, two to mix.
const DISTINCT_MIN: usize = 3;

/// Nearest neighbours that a query is mixed with.
const NEIGHBOURS: usize = 8;

/// Share of the neighbour in a mixed query: far enough from both for the query to be new.
const NEIGHBOUR_SHARES: Range<f64> = 0.25..0.75;

/// The state of a [`Mixture`].
struct Mixed {
    new_share: f64,
    /// Repeated queries by rank, and the sums of their weights.
    repeated: Vec<usize>,
    cumulative: Vec<f64>,
    /// Queries that come once, in this order.
    reserved: Vec<usize>,
    /// How many of them came.
    used: usize,
    /// Nearest neighbours of a place in `reserved`, as such places.
    neighbours: HashMap<usize, Vec<usize>>,
    /// Rows of the queries that came.
    came: HashSet<usize>,
    /// The last query, if it is synthetic, and its rewards.
    synthetic: Option<(Query, Vec<f64>)>,
    occurrence: Option<Occurrence>,
}

/// The world itself.
pub struct DatasetWorld {
    dim: usize,
    models: usize,
    queries: Vec<Query>,
    rewards: Vec<Vec<f64>>,
    /// The rewards of a query by the bits of its components.
    rows: HashMap<Vec<u64>, usize>,
    /// Which queries come before the switch, and which after it.
    seen: Vec<usize>,
    unseen: Vec<usize>,
    switched: bool,
    shuffled: bool,
    mixed: Option<Mixed>,
    generator: ChaCha8Rng,
}

impl DatasetWorld {
    /// Prepares a data set.
    pub fn new(data: &Dataset, spec: DatasetSpec) -> Result<Self, BadQuery> {
        let n = data.len();
        let queries = (0..n).map(|i| Query::from_f32(data.query(i))).collect::<Result<Vec<Query>, _>>()?;
        let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
        // Streams of their own: neither depends on whether the other is drawn.
        generator.set_stream(1);
        let mut order: Vec<usize> = (0..n).collect();
        shuffle(&mut order, &mut generator);
        let held_out = ((n as f64 * spec.held_out).round() as usize).min(n - 1);
        let unseen = order.split_off(n - held_out);
        let mut sources: Vec<usize> = (0..n).collect();
        if spec.shuffled {
            generator.set_stream(2);
            shuffle(&mut sources, &mut generator);
        }
        let (rewards, rows) = by_query(&queries, sources.iter().map(|&i| data.rewards(i)));
        let generator = ChaCha8Rng::seed_from_u64(spec.seed);
        let models = data.models.len();
        let (dim, seen, shuffled) = (data.dim, order, spec.shuffled);
        Ok(Self {
            dim,
            models,
            queries,
            rewards,
            rows,
            seen,
            unseen,
            switched: false,
            shuffled,
            mixed: None,
            generator,
        })
    }

    /// Draws queries by a mixture. Held-out queries are still drawn evenly.
    pub fn mixed(self, mixture: Mixture) -> Result<Self, TooFewQueries> {
        let mut rows = HashSet::new();
        let mut repeated: Vec<usize> =
            self.seen.iter().copied().filter(|&i| rows.insert(self.row(&self.queries[i]))).collect();
        let distinct = repeated.len();
        if distinct < DISTINCT_MIN {
            return Err(TooFewQueries { distinct });
        }
        // The order is a seeded shuffle already.
        let reserved = (distinct as f64 * mixture.new_share).round() as usize;
        let reserved = if mixture.new_share > 0.0 { reserved.clamp(2, distinct - 1) } else { 0 };
        let reserved = repeated.split_off(distinct - reserved);
        let weight = |rank: usize| libm::pow(rank as f64, -mixture.exponent);
        let cumulative = (1..=repeated.len()).scan(0.0, |sum, rank| {
            *sum += weight(rank);
            Some(*sum)
        });
        let mixed = Mixed {
            new_share: mixture.new_share,
            cumulative: cumulative.collect(),
            repeated,
            reserved,
            used: 0,
            neighbours: HashMap::new(),
            came: HashSet::new(),
            synthetic: None,
            occurrence: None,
        };
        Ok(Self { mixed: Some(mixed), ..self })
    }

    /// The next query of the mixture.
    fn next_mixed(&mut self, mut mixed: Mixed) -> Query {
        let luck: f64 = self.generator.random();
        mixed.synthetic = None;
        let known = if self.switched {
            Some(self.unseen[self.generator.random_range(0..self.unseen.len())])
        } else if luck >= mixed.new_share {
            Some(mixed.repeat(&mut self.generator))
        } else {
            mixed.next_reserved()
        };
        let query = match known {
            Some(i) => {
                let query = self.queries[i].clone();
                let is_first = mixed.came.insert(self.row(&query));
                mixed.occurrence = Some(if is_first { Occurrence::First } else { Occurrence::Repeat });
                query
            }
            None => {
                let (query, mut rewards) = self.synthetic(&mut mixed);
                if self.shuffled {
                    // Those of another synthetic query.
                    rewards = self.synthetic(&mut mixed).1;
                }
                mixed.synthetic = Some((query.clone(), rewards));
                mixed.occurrence = Some(Occurrence::Synthetic);
                query
            }
        };
        self.mixed = Some(mixed);
        query
    }

    /// A query between two reserved ones, with rewards between theirs.
    fn synthetic(&mut self, mixed: &mut Mixed) -> (Query, Vec<f64>) {
        let place = self.generator.random_range(0..mixed.reserved.len());
        let neighbours = mixed.neighbours.entry(place).or_insert_with(|| self.neighbours(&mixed.reserved, place));
        let neighbour = neighbours[self.generator.random_range(0..neighbours.len())];
        let share = self.generator.random_range(NEIGHBOUR_SHARES);
        let mix = |a: &[f64], b: &[f64]| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| (1.0 - share) * a + share * b).collect()
        };
        let [a, b] = [place, neighbour].map(|place| &self.queries[mixed.reserved[place]]);
        // Only opposite queries have no direction between them.
        let query = Query::new(mix(a.as_slice(), b.as_slice())).unwrap_or_else(|_| a.clone());
        (query, mix(&self.rewards[self.row(a)], &self.rewards[self.row(b)]))
    }

    /// The nearest neighbours of a place in `among`, by cosine.
    fn neighbours(&self, among: &[usize], place: usize) -> Vec<usize> {
        let query = |place: usize| self.queries[among[place]].as_slice();
        let others = (0..among.len()).filter(|&other| other != place);
        let mut others: Vec<(f64, usize)> = others.map(|other| (dot(query(place), query(other)), other)).collect();
        others.sort_by(|(a, i), (b, j)| b.total_cmp(a).then(i.cmp(j)));
        others.into_iter().take(NEIGHBOURS).map(|(_, other)| other).collect()
    }

    /// Queries with the same embedding have the mean of their rewards: nobody can tell them apart.
    fn row(&self, query: &Query) -> usize {
        self.rows.get(&bits(query)).copied().unwrap_or_else(|| self.nearest(query))
    }

    /// For a query that is not of the data set.
    fn nearest(&self, query: &Query) -> usize {
        let cosine = |i: &usize| dot(self.queries[*i].as_slice(), query.as_slice());
        let nearest = (0..self.queries.len()).max_by(|i, j| cosine(i).total_cmp(&cosine(j)));
        nearest.and_then(|i| self.rows.get(&bits(&self.queries[i]))).copied().unwrap_or(0)
    }
}

impl Mixed {
    /// A repeated query, by rank.
    fn repeat(&self, generator: &mut impl Rng) -> usize {
        let total = self.cumulative.last().copied().unwrap_or(0.0);
        let at = total * generator.random::<f64>();
        let rank = self.cumulative.partition_point(|&sum| sum <= at);
        self.repeated[rank.min(self.repeated.len() - 1)]
    }

    /// The next reserved query, while there are some.
    fn next_reserved(&mut self) -> Option<usize> {
        let next = self.reserved.get(self.used).copied();
        self.used += usize::from(next.is_some());
        next
    }
}

impl World for DatasetWorld {
    fn dim(&self) -> usize {
        self.dim
    }

    fn models(&self) -> usize {
        self.models
    }

    fn next_query(&mut self) -> Query {
        if let Some(mixed) = self.mixed.take() {
            return self.next_mixed(mixed);
        }
        let from = if self.switched { &self.unseen } else { &self.seen };
        self.queries[from[self.generator.random_range(0..from.len())]].clone()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        match self.mixed.as_ref().and_then(|mixed| mixed.synthetic.as_ref()) {
            Some((synthetic, rewards)) if synthetic == query => rewards.clone(),
            _ => self.rewards[self.row(query)].clone(),
        }
    }

    fn true_scores(&self, _query: &Query) -> Vec<f64> {
        vec![0.0; self.models]
    }

    fn true_norm(&self) -> f64 {
        0.0
    }

    /// From now on only queries come that did not come before; where none were held out nothing changes.
    fn switch(&mut self) {
        self.switched = !self.unseen.is_empty();
    }

    fn occurrence(&self) -> Option<Occurrence> {
        self.mixed.as_ref()?.occurrence
    }
}

/// Each distinct query's rewards, and where they are.
fn by_query<'a>(
    queries: &[Query],
    rewards: impl Iterator<Item = &'a [f64]>,
) -> (Vec<Vec<f64>>, HashMap<Vec<u64>, usize>) {
    let (mut sums, mut rows) = (Vec::<(f64, Vec<f64>)>::new(), HashMap::new());
    for (query, rewards) in queries.iter().zip(rewards) {
        let row = *rows.entry(bits(query)).or_insert(sums.len());
        if row == sums.len() {
            sums.push((0.0, vec![0.0; rewards.len()]));
        }
        sums[row].0 += 1.0;
        sums[row].1.iter_mut().zip(rewards).for_each(|(sum, r)| *sum += r);
    }
    (sums.into_iter().map(|(count, sum)| sum.iter().map(|r| r / count).collect()).collect(), rows)
}

fn bits(query: &Query) -> Vec<u64> {
    query.as_slice().iter().map(|x| x.to_bits()).collect()
}

/// Fisher and Yates.
pub(crate) fn shuffle(order: &mut [usize], generator: &mut impl Rng) {
    for i in (1..order.len()).rev() {
        order.swap(i, generator.random_range(0..=i));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::event::ModelName;

    /// Query i is at angle i / 10; its rewards are i / 100 and 1 - i / 100. The last has the first's embedding.
    fn data() -> Dataset {
        let n = 21;
        let angle = |i: usize| (i % (n - 1)) as f32 / 10.0;
        Dataset {
            dim: 2,
            models: ["a", "b"].map(|name| ModelName::try_from(name).unwrap()).to_vec(),
            queries: (0..n).flat_map(|i| [angle(i).cos(), angle(i).sin()]).collect(),
            expected_rewards: (0..n).flat_map(|i| [i as f64 / 100.0, 1.0 - i as f64 / 100.0]).collect(),
            top1_rewards: None,
            candidates: None,
            similarity_scale: None,
            labels: Vec::new(),
        }
    }

    fn world(shuffled: bool, held_out: f64, seed: u64) -> DatasetWorld {
        DatasetWorld::new(&data(), DatasetSpec { shuffled, held_out, seed }).unwrap()
    }

    fn key(query: &Query) -> u64 {
        query.as_slice()[0].to_bits()
    }

    #[test]
    fn rewards_are_those_of_the_file() {
        let mut world = world(false, 0.0, 1);
        let first = Query::from_f32(data().query(0)).unwrap();
        assert_eq!(world.expected_rewards(&first), [0.1, 0.9], "the mean of rows 0 and 20");
        let near = Query::new([f64::cos(0.71), f64::sin(0.71)]).unwrap();
        assert_eq!(world.expected_rewards(&near), data().rewards(7));
        let drawn: BTreeSet<u64> = (0..500).map(|_| key(&world.next_query())).collect();
        assert_eq!(drawn.len(), 20, "all come, again and again");
        assert_eq!((world.true_scores(&near), world.true_norm()), (vec![0.0; 2], 0.0));
    }

    #[test]
    fn shuffling_keeps_what_each_model_earns_on_the_whole() {
        let of = |shuffled| {
            let world = world(shuffled, 0.0, 3);
            (1..20).map(|i| world.expected_rewards(&Query::from_f32(data().query(i)).unwrap())[0]).collect::<Vec<f64>>()
        };
        let (plain, mut shuffled) = (of(false), of(true));
        assert_ne!(plain, shuffled);
        shuffled.sort_by(f64::total_cmp);
        shuffled.dedup();
        assert_eq!(shuffled.len(), 19, "every query has another's rewards");
    }

    #[test]
    fn held_out_queries_come_after_the_switch_alone() {
        let mut world = world(false, 0.3, 7);
        let draw = |world: &mut DatasetWorld| (0..400).map(|_| key(&world.next_query())).collect::<BTreeSet<u64>>();
        let before = draw(&mut world);
        world.switch();
        let after = draw(&mut world);
        assert!((13..=15).contains(&before.len()) && (5..=6).contains(&after.len()), "{before:?} {after:?}");
        // The two rows that share an embedding may be on both sides.
        assert!(before.intersection(&after).count() <= 1);
    }

    fn mixed(spec: (bool, f64, u64), exponent: f64, new_share: f64) -> DatasetWorld {
        let (shuffled, held_out, seed) = spec;
        world(shuffled, held_out, seed).mixed(Mixture { exponent, new_share }).unwrap()
    }

    /// Times each query comes, the most frequent first.
    fn counts(world: &mut DatasetWorld, draws: usize) -> Vec<usize> {
        let mut counts = HashMap::new();
        (0..draws).for_each(|_| *counts.entry(key(&world.next_query())).or_default() += 1);
        let mut counts: Vec<usize> = counts.into_values().collect();
        counts.sort_by(|a, b| b.cmp(a));
        counts
    }

    #[test]
    fn repeated_queries_come_by_their_rank() {
        let mut world = mixed((false, 0.0, 4), 1.0, 0.0);
        let found = counts(&mut world, 60_000);
        let total: f64 = (1..=20).map(|rank| 1.0 / f64::from(rank)).sum();
        assert_eq!(found.len(), 20, "the two rows of one embedding are one query");
        for (i, &count) in found.iter().enumerate().take(5) {
            let expected = 60_000.0 / (i + 1) as f64 / total;
            assert!((count as f64 - expected).abs() < 5.0 * expected.sqrt(), "{i}: {count}, not {expected}");
        }
        let even = counts(&mut mixed((false, 0.0, 4), 0.0, 0.0), 60_000);
        assert!(even[0] < 3300 && even[19] > 2700, "{even:?}");
        let first = |seed| key(&mixed((false, 0.0, seed), 20.0, 0.0).next_query());
        assert!((2..20).any(|seed| first(seed) != first(1)), "the seed ranks them");
    }

    #[test]
    fn new_queries_never_came_before() {
        let mut world = mixed((false, 0.0, 9), 1.0, 0.5);
        let (mut came, mut kinds) = (BTreeSet::new(), [0_usize; 3]);
        for _ in 0..4000 {
            let query = world.next_query();
            let is_new = came.insert(bits(&query));
            let rewards = world.expected_rewards(&query);
            let occurrence = world.occurrence().unwrap();
            kinds[occurrence as usize] += 1;
            assert_eq!(is_new, occurrence != Occurrence::Repeat, "{occurrence:?}");
            assert_eq!(occurrence == Occurrence::Synthetic, !world.rows.contains_key(&bits(&query)));
            assert!((rewards[0] + rewards[1] - 1.0).abs() < 1e-12 && rewards[0] < 0.2, "{rewards:?}");
        }
        let [first, synthetic, repeats] = kinds;
        assert_eq!(first, 20, "each query of the data set has one first time");
        assert!((1900..2080).contains(&(synthetic + 10)) && repeats + synthetic + first == 4000, "{kinds:?}");
    }

    #[test]
    fn synthetic_queries_are_between_neighbours_and_so_are_their_rewards() {
        let mut world = mixed((false, 0.0, 5), 1.0, 1.0);
        let reserved: Vec<Query> = {
            let mixed = world.mixed.as_ref().unwrap();
            assert_eq!((mixed.repeated.len(), mixed.reserved.len()), (1, 19));
            mixed.reserved.iter().map(|&i| world.queries[i].clone()).collect()
        };
        for query in &reserved {
            assert_eq!(
                (&world.next_query(), world.occurrence()),
                (query, Some(Occurrence::First)),
                "each once, in order"
            );
        }
        for _ in 0..500 {
            let query = world.next_query();
            assert_eq!(world.occurrence(), Some(Occurrence::Synthetic));
            let rewards = world.expected_rewards(&query);
            // Angles between neighbours are at most 0.8 plus gaps; rewards are angles / 10, except for query 0.
            let angle = query.as_slice()[1].atan2(query.as_slice()[0]);
            assert!((rewards[0] - angle / 10.0).abs() < 0.11, "{angle} {rewards:?}");
            assert!(!reserved.contains(&query));
        }
    }

    #[test]
    fn shuffled_synthetic_queries_have_rewards_of_others() {
        let mut world = mixed((true, 0.0, 5), 1.0, 1.0);
        (0..19).for_each(|_| drop(world.next_query()));
        let mut draw = || {
            let query = world.next_query();
            (query.as_slice()[1].atan2(query.as_slice()[0]), world.expected_rewards(&query)[0])
        };
        let drawn: Vec<(f64, f64)> = (0..3000).map(|_| draw()).collect();
        let n = drawn.len() as f64;
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| drawn.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(&|d| d.0), mean(&|d| d.1));
        let covariance = mean(&|d| (d.0 - x) * (d.1 - y));
        let deviations = (mean(&|d| (d.0 - x).powi(2)) * mean(&|d| (d.1 - y).powi(2))).sqrt();
        assert!((covariance / deviations).abs() < 0.06, "correlation {}", covariance / deviations);
    }

    #[test]
    fn mixtures_hold_out_the_same_queries() {
        let held_out = |world: &DatasetWorld| world.unseen.clone();
        let mut world = mixed((false, 0.5, 6), 1.0, 0.4);
        assert_eq!(held_out(&world), held_out(&self::world(false, 0.5, 6)));
        let draw = |world: &mut DatasetWorld| (0..400).map(|_| bits(&world.next_query())).collect::<BTreeSet<_>>();
        let before = draw(&mut world);
        world.switch();
        let after = draw(&mut world);
        assert!(after.iter().all(|query| world.rows.contains_key(query)), "none is synthetic");
        assert!(before.intersection(&after).count() <= 1 && after.len() <= 11);
        let few = Dataset { queries: vec![1.0, 0.0], expected_rewards: vec![0.5; 2], ..data() };
        let few = DatasetWorld::new(&few, DatasetSpec { shuffled: false, held_out: 0.0, seed: 1 }).unwrap();
        let error = few.mixed(Mixture { exponent: 1.0, new_share: 0.5 });
        assert_eq!(error.err(), Some(TooFewQueries { distinct: 1 }));
    }

    #[test]
    fn the_same_seed_is_the_same_world() {
        let stream = |seed| {
            let mut world = mixed((true, 0.5, seed), 0.8, 0.4);
            let mut round = || {
                let query = world.next_query();
                (key(&query), world.expected_rewards(&query), world.occurrence())
            };
            (0..200).map(|_| round()).collect::<Vec<_>>()
        };
        assert_eq!(stream(1), stream(1));
        assert_ne!(stream(1), stream(2));
        let stream = |seed| {
            let mut world = world(true, 0.5, seed);
            let mut round = || {
                let query = world.next_query();
                (key(&query), world.expected_rewards(&query))
            };
            (0..50).map(|_| round()).collect::<Vec<_>>()
        };
        assert_eq!(stream(1), stream(1));
        assert_ne!(stream(1), stream(2));
    }
}
