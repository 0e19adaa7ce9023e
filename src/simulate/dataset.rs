//! A data set as a world: real queries, drawn evenly and again and again, with the rewards that were measured for them.
//!
//! There is no W* behind it: scores and norm of the truth are 0, so that regret is measured against uniform play.

use std::collections::HashMap;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::World;
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
        Ok(Self { dim: data.dim, models, queries, rewards, rows, seen: order, unseen, switched: false, generator })
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

impl World for DatasetWorld {
    fn dim(&self) -> usize {
        self.dim
    }

    fn models(&self) -> usize {
        self.models
    }

    fn next_query(&mut self) -> Query {
        let from = if self.switched { &self.unseen } else { &self.seen };
        self.queries[from[self.generator.random_range(0..from.len())]].clone()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        self.rewards[self.row(query)].clone()
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
    use crate::event::Name;

    /// Query i is at angle i / 10; its rewards are i / 100 and 1 - i / 100. The last has the first's embedding.
    fn data() -> Dataset {
        let n = 21;
        let angle = |i: usize| (i % (n - 1)) as f32 / 10.0;
        Dataset {
            dim: 2,
            models: ["a", "b"].map(|name| Name::try_from(name).unwrap()).to_vec(),
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

    #[test]
    fn the_same_seed_is_the_same_world() {
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
