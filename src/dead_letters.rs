//! Which dead letters are recorded: all of them up to a volume, a sample beyond it. All are counted.
//!
//! The volume is a bucket of `events.dead_letters_bytes_max` bytes per lane. A recorded letter takes its size out of the
//! bucket and every good event puts [`REFILL_BYTES`] back, so that a flood is sampled while the occasional bad event of a
//! healthy log is always recorded. Nothing but the lane's events decides: no clock, no random draw. The bucket is part of
//! the snapshot, so a learner that restarts decides as it did before.

use crate::wire::records::counts::COUNT_MAX;
use crate::wire::records::lane::BucketRecord;

/// Bytes that a good event puts back into the bucket.
pub const REFILL_BYTES: u64 = 64;

/// Beyond the volume one letter in this many is recorded.
pub const SAMPLE: u64 = 1000;

/// Bytes that a letter takes besides its event: reason, detail, position and framing.
const AROUND_BYTES: u64 = 512;

/// The bucket of a lane, and how many letters it did not record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Bytes that are taken out of the bucket.
    taken_bytes: u64,
    /// Letters that found the bucket empty.
    beyond: u64,
    /// Those of them that were not recorded.
    unrecorded: u64,
}

/// How a dead letter is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// It is recorded.
    Recorded,
    /// It is only counted.
    Counted,
}

impl Bucket {
    /// Decides about a letter whose event has `bytes` bytes.
    pub fn take(&mut self, bytes: usize, bytes_max: u64) -> Recording {
        let size = AROUND_BYTES.saturating_add(bytes as u64);
        if let Some(taken) = self.taken_bytes.checked_add(size).filter(|taken| *taken <= bytes_max) {
            self.taken_bytes = taken;
            return Recording::Recorded;
        }
        self.beyond += 1;
        if self.beyond.is_multiple_of(SAMPLE) {
            return Recording::Recorded;
        }
        self.unrecorded += 1;
        Recording::Counted
    }

    /// Records a valid event.
    pub fn refill(&mut self) {
        self.taken_bytes = self.taken_bytes.saturating_sub(REFILL_BYTES);
    }

    /// Letters that were counted but not recorded.
    pub fn unrecorded(&self) -> u64 {
        self.unrecorded
    }

    /// As it is saved.
    pub fn to_record(&self) -> BucketRecord {
        let Self { taken_bytes, beyond, unrecorded } = *self;
        BucketRecord { taken_bytes, beyond, unrecorded }
    }

    /// As it was saved; `None` if the record contradicts itself.
    pub fn from_record(record: BucketRecord) -> Option<Self> {
        let BucketRecord { taken_bytes, beyond, unrecorded } = record;
        (unrecorded <= beyond && beyond <= COUNT_MAX).then_some(Self { taken_bytes, beyond, unrecorded })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_flood_is_recorded_up_to_the_volume_then_sampled() {
        let (mut bucket, bytes_max) = (Bucket::default(), 100 * (AROUND_BYTES + 8));
        let recorded = (0..100_000).filter(|_| bucket.take(8, bytes_max) == Recording::Recorded).count() as u64;
        assert_eq!(recorded, 100 + (100_000 - 100) / SAMPLE);
        assert_eq!(bucket.unrecorded() + recorded, 100_000, "every letter is recorded or counted as not recorded");
    }

    #[test]
    fn good_events_make_room_again() {
        let (mut bucket, bytes_max) = (Bucket::default(), 10 * AROUND_BYTES);
        (0..10).for_each(|_| assert_eq!(bucket.take(0, bytes_max), Recording::Recorded));
        assert_eq!(bucket.take(0, bytes_max), Recording::Counted);
        (0..AROUND_BYTES / REFILL_BYTES).for_each(|_| bucket.refill());
        assert_eq!(bucket.take(0, bytes_max), Recording::Recorded);
        assert_eq!(bucket.take(0, bytes_max), Recording::Counted);
        assert_eq!(Bucket::default().take(usize::MAX, bytes_max), Recording::Counted, "sizes do not overflow");
    }

    proptest! {
        #[test]
        fn a_restart_decides_alike(events in prop::collection::vec(prop::option::of(0..5000_usize), 1..300), cut in 0..300_usize) {
            let bytes_max = 20_000;
            let run = |bucket: &mut Bucket, events: &[Option<usize>]| -> Vec<Recording> {
                let step = |event: &Option<usize>| match event {
                    Some(bytes) => Some(bucket.take(*bytes, bytes_max)),
                    None => {
                        bucket.refill();
                        None
                    }
                };
                events.iter().filter_map(step).collect()
            };
            let whole = run(&mut Bucket::default(), &events);
            let (before, after) = events.split_at(cut.min(events.len()));
            let mut bucket = Bucket::default();
            let mut parts = run(&mut bucket, before);
            let mut restored = Bucket::from_record(bucket.to_record()).unwrap();
            parts.extend(run(&mut restored, after));
            prop_assert_eq!(whole, parts);
        }
    }
}
