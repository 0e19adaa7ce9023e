//! Recent decisions, so that a repeated request gets the same answer and is logged once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::event::Name;

/// How much is remembered, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentSpec {
    /// Maximum number of decisions.
    pub max: usize,
    /// How long each is remembered.
    pub keep_ms: u64,
}

/// Decisions of type `T`, by space and request id. Bounded; safe to share.
pub struct Recent<T> {
    spec: RecentSpec,
    seed: u64,
    shards: Vec<Mutex<Shard<T>>>,
}

struct Shard<T> {
    decisions: HashMap<u128, T>,
    /// Keys by age, with the time until which they are remembered.
    ages: VecDeque<(u64, u128)>,
}

/// Number of shards, each with a lock of its own.
const SHARDS: usize = 16;

impl<T: Clone> Recent<T> {
    /// An empty table. `seed` should be random: it prevents callers from choosing IDs that collide.
    pub fn new(spec: RecentSpec, seed: u64) -> Self {
        let shard = || Mutex::new(Shard { decisions: HashMap::new(), ages: VecDeque::new() });
        Self { spec, seed, shards: (0..SHARDS).map(|_| shard()).collect() }
    }

    /// The remembered decision of a request, or a new one from `decide`, which is then remembered; and whether it is new. Of
    /// concurrent repeats only one decides.
    pub fn get_or<E>(
        &self,
        space: &Name,
        request_id: &str,
        now_ms: u64,
        decide: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, bool), E> {
        let key = self.key(space, request_id);
        let mut shard = self.shard(key);
        shard.forget(now_ms, (self.spec.max / SHARDS).max(1));
        if let Some(known) = shard.decisions.get(&key) {
            return Ok((known.clone(), false));
        }
        let decision = decide()?;
        shard.decisions.insert(key, decision.clone());
        shard.ages.push_back((now_ms.saturating_add(self.spec.keep_ms), key));
        Ok((decision, true))
    }

    /// The remembered decision of a request.
    pub fn get(&self, space: &Name, request_id: &str, now_ms: u64) -> Option<T> {
        let key = self.key(space, request_id);
        let mut shard = self.shard(key);
        shard.forget(now_ms, usize::MAX);
        shard.decisions.get(&key).cloned()
    }

    /// Removes a decision whose event was not written.
    pub fn forget(&self, space: &Name, request_id: &str) {
        let key = self.key(space, request_id);
        self.shard(key).decisions.remove(&key);
    }

    fn key(&self, space: &Name, request_id: &str) -> u128 {
        let text = [space.as_str(), "\0", request_id].concat();
        xxh3_128_with_seed(text.as_bytes(), self.seed)
    }

    fn shard(&self, key: u128) -> std::sync::MutexGuard<'_, Shard<T>> {
        let shard = &self.shards[(key % SHARDS as u128) as usize];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Shard<T> {
    /// Makes room for one more, and removes expired decisions.
    fn forget(&mut self, now_ms: u64, max: usize) {
        while let Some(&(until_ms, key)) = self.ages.front()
            && (until_ms < now_ms || self.ages.len() >= max)
        {
            self.ages.pop_front();
            self.decisions.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn recent(max: usize, keep_ms: u64) -> Recent<u64> {
        Recent::new(RecentSpec { max, keep_ms }, 7)
    }

    fn get(recent: &Recent<u64>, id: &str, now_ms: u64, value: u64) -> (u64, bool) {
        let Ok(found) = recent.get_or(&Name::default_space(), id, now_ms, || Ok::<_, Infallible>(value));
        found
    }

    #[test]
    fn remembers_for_a_while() {
        let recent = recent(1000, 10);
        assert_eq!(get(&recent, "a", 100, 1), (1, true));
        assert_eq!(get(&recent, "a", 110, 2), (1, false));
        assert_eq!(recent.get(&Name::default_space(), "a", 110), Some(1));
        assert_eq!(recent.get(&Name::default_space(), "a", 111), None);
        assert_eq!(get(&recent, "a", 111, 3), (3, true));
        recent.forget(&Name::default_space(), "a");
        assert_eq!(get(&recent, "a", 111, 4), (4, true));
        let failed: Result<(u64, bool), &str> = recent.get_or(&Name::default_space(), "b", 0, || Err("no"));
        assert_eq!(failed, Err("no"));
        assert_eq!(get(&recent, "b", 0, 5), (5, true), "what failed is not remembered");
    }

    #[test]
    fn is_bounded() {
        let recent = recent(160, u64::MAX);
        for i in 0..10_000 {
            get(&recent, &i.to_string(), i, i);
        }
        let held: usize = recent.shards.iter().map(|shard| shard.lock().unwrap().decisions.len()).sum();
        assert!((100..=160).contains(&held), "{held}");
        assert_eq!(get(&recent, "9999", 10_000, 0), (9999, false));
    }

    #[test]
    fn of_many_at_once_one_decides() {
        let recent = recent(1000, 1000);
        let deciders: usize = std::thread::scope(|scope| {
            let recent = &recent;
            let threads: Vec<_> = (0..8).map(|i| scope.spawn(move || get(recent, "r", 0, i))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|(_, decided)| *decided).count()
        });
        assert_eq!(deciders, 1);
    }
}
