//! Where two models rank the items that are worth finding (the paper's first figure).
//!
//! Rank 1 is the item that a model finds most similar to the query; of equals the first in the file. An item is good if
//! it has the highest label of the data set. What only one of two models has among its first few shows what routing can
//! gain.

use crate::wire::dataset::Candidates;

/// All models' ranks of all candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// Of each candidate the query, the rank by each model, and whether it is good.
    items: Vec<(usize, Vec<usize>, bool)>,
    models: usize,
}

/// A candidate as two models rank it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Its query.
    pub query: usize,
    /// Its ranks, from 1.
    pub ranks: [usize; 2],
    /// Whether it is worth finding.
    pub good: bool,
}

/// Which of two models has an item among its first few.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The first model alone.
    First,
    /// The second model alone.
    Second,
    /// Both.
    Both,
    /// None.
    Neither,
}

impl Item {
    /// Who has it among the first `top`.
    pub fn found(&self, top: usize) -> Found {
        match self.ranks.map(|rank| rank <= top) {
            [true, false] => Found::First,
            [false, true] => Found::Second,
            [true, true] => Found::Both,
            [false, false] => Found::Neither,
        }
    }
}

impl Ranks {
    /// Ranks the candidates of every query.
    pub fn new(candidates: &Candidates, models: usize) -> Self {
        let highest = candidates.rewards.iter().fold(f64::NEG_INFINITY, |m, &r| m.max(r));
        let mut items = Vec::with_capacity(candidates.rewards.len());
        for (query, ends) in candidates.offsets.windows(2).enumerate() {
            let rows = &candidates.similarities[ends[0] * models..ends[1] * models];
            let of_models: Vec<Vec<usize>> = (0..models)
                .map(|m| ranks(&rows.iter().skip(m).step_by(models).copied().collect::<Vec<f64>>()))
                .collect();
            for (i, &reward) in candidates.rewards[ends[0]..ends[1]].iter().enumerate() {
                items.push((query, of_models.iter().map(|ranks| ranks[i]).collect(), reward == highest));
            }
        }
        Self { items, models }
    }

    /// A quarter of what a query has in the mean, about what the paper takes.
    pub fn default_top(&self) -> usize {
        let queries = self.items.chunk_by(|a, b| a.0 == b.0).count();
        self.items.len().div_ceil(4 * queries.max(1)).max(1)
    }

    /// The candidates as two models rank them.
    pub fn of_pair(&self, [first, second]: [usize; 2]) -> Vec<Item> {
        let item = |(query, ranks, good): &(usize, Vec<usize>, bool)| Item {
            query: *query,
            ranks: [ranks[first], ranks[second]],
            good: *good,
        };
        self.items.iter().map(item).collect()
    }

    /// The two models of which each finds most that the other misses; none if there are not two.
    pub fn telling_pair(&self, top: usize) -> Option<[usize; 2]> {
        let pairs = (0..self.models).flat_map(|i| (i + 1..self.models).map(move |j| [i, j]));
        pairs.rev().max_by_key(|pair| telling(&self.of_pair(*pair), top))
    }
}

/// The query whose good items show best that each model misses what the other finds; of equals the first.
pub fn telling_query(items: &[Item], top: usize) -> Option<usize> {
    let queries = items.chunk_by(|a, b| a.query == b.query);
    queries.rev().max_by_key(|items| telling(items, top)).and_then(|items| items.first()).map(|item| item.query)
}

/// Good items that one model alone finds: those of the model that has fewer, and of both.
fn telling(items: &[Item], top: usize) -> (usize, usize) {
    let count = |found| items.iter().filter(|item| item.good && item.found(top) == found).count();
    let (first, second) = (count(Found::First), count(Found::Second));
    (first.min(second), first + second)
}

fn ranks(similarities: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..similarities.len()).collect();
    order.sort_by(|&i, &j| similarities[j].total_cmp(&similarities[i]));
    let mut ranks = vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(rank, i)| ranks[i] = rank + 1);
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two queries, of four and three candidates, and three models; the second ranks as the first does, reversed.
    fn candidates() -> Candidates {
        let first = [0.9, 0.1, 0.5, 0.2, 0.3, 0.3, 0.1];
        Candidates {
            offsets: vec![0, 4, 7],
            rewards: vec![1.0, 1.0, 0.5, 0.0, 0.5, 0.5, 1.0],
            similarities: first.iter().flat_map(|&s| [s, -s, 0.0]).collect(),
        }
    }

    #[test]
    fn ranks_are_within_a_query_and_ties_in_order() {
        let items = Ranks::new(&candidates(), 3).of_pair([0, 1]);
        let found: Vec<[usize; 2]> = items.iter().map(|item| item.ranks).collect();
        assert_eq!(found, [[1, 4], [4, 1], [2, 3], [3, 2], [1, 2], [2, 3], [3, 1]]);
        assert_eq!(
            items.iter().map(|item| item.good).collect::<Vec<_>>(),
            [true, true, false, false, false, false, true]
        );
        let sides: Vec<Found> = items[..3].iter().map(|item| item.found(2)).collect();
        assert_eq!(sides, [Found::First, Found::Second, Found::First]);
        assert_eq!((items[0].found(4), items[2].found(1)), (Found::Both, Found::Neither));
    }

    #[test]
    fn the_telling_ones_are_those_where_both_miss_something() {
        let ranks = Ranks::new(&candidates(), 3);
        assert_eq!(ranks.telling_pair(1), Some([0, 1]));
        assert_eq!(telling_query(&ranks.of_pair([0, 1]), 1), Some(0));
        assert_eq!(ranks.default_top(), 1);
        assert_eq!(
            Ranks::new(&Candidates { offsets: vec![0], rewards: vec![], similarities: vec![] }, 1).telling_pair(1),
            None
        );
        assert_eq!(telling_query(&[], 1), None);
    }
}
