//! How often queries come again.
//!
//! Where every query is new, what is played on one is tried out on others by the way. Where the same ones come again and
//! again, only the draw explores.

use xxhash_rust::xxh3::Xxh3;

use crate::wire::records::learner::regression::RepeatsRecord;

/// The share of queries that were met before, of late.
#[derive(Debug, Clone, PartialEq)]
pub struct Repeats {
    /// Digests of queries, each where its own value says: a later one takes the place of an earlier one.
    seen: Vec<u64>,
    share: f64,
}

/// Queries that are remembered, at most.
const REMEMBERED: usize = 2048;

/// How many components are taken into the digest at once.
const COMPONENTS: usize = 64;

/// How far one query moves the share.
const STEP: f64 = 1.0 / 512.0;

impl Default for Repeats {
    fn default() -> Self {
        Self { seen: vec![0; REMEMBERED], share: 0.0 }
    }
}

impl Repeats {
    /// The next query.
    pub fn see(&mut self, query: &[f64]) {
        let mut hash = Xxh3::new();
        for components in query.chunks(COMPONENTS) {
            let mut bytes = [[0; size_of::<f64>()]; COMPONENTS];
            bytes.iter_mut().zip(components).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
            hash.update(bytes[..components.len()].as_flattened());
        }
        let digest = hash.digest();
        let place = &mut self.seen[(digest % REMEMBERED as u64) as usize];
        let met = f64::from(u8::from(*place == digest));
        *place = digest;
        self.share += STEP * (met - self.share);
    }

    /// The share of queries that were met before, 0 to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// The record of its state.
    pub fn record(&self) -> RepeatsRecord {
        RepeatsRecord { digests: self.seen.clone(), share: self.share }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: RepeatsRecord) -> Option<Self> {
        let RepeatsRecord { digests: seen, share } = record;
        Some(Self { seen, share }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        self.seen.len() == REMEMBERED && (0.0..=1.0).contains(&self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_repeated_queries_from_new_ones() {
        let share = |distinct: usize| {
            let mut repeats = Repeats::default();
            (0..5000).for_each(|t| repeats.see(&[(t % distinct) as f64, 1.0]));
            assert!(repeats.is_sound());
            repeats.share()
        };
        assert_eq!(share(5000), 0.0);
        assert!(share(1) > 0.99 && share(300) > 0.8, "{}", share(300));
    }
}
