//! What a snapshot of a lane holds besides the engine's records: positions, configuration, publications; and, where lanes
//! move between instances, their previous owners.

use std::collections::BTreeMap;

use crate::config::Settings;
use crate::engine::EngineHead;
use crate::event::Name;
use crate::merge::MergeState;
use crate::wire::envelope::Damaged;
use crate::wire::params::STAMP_MAX;
use crate::wire::records::Record;
use crate::wire::records::head::HeadRecord;
pub use crate::wire::records::head::{Audit, Publication, SharedHead};

/// The head of a snapshot.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LaneHead {
    /// The engine's own head.
    pub engine: EngineHead,
    /// Positions in every log.
    pub merge: MergeState,
    /// Grows when history forks.
    pub epoch: u64,
    /// The last publication of each space, made right after the snapshot that names it.
    pub publications: BTreeMap<Name, Publication>,
    /// The settings that learning depends on, as JSON.
    pub configuration: String,
    /// Length of the log of applied requests.
    pub audit_bytes: u64,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
}

/// The next epoch. Saturates at the largest that parameters can carry: it must never wrap to 0, which routers would take
/// for older than everything they have.
pub fn next_epoch(epoch: u64) -> u64 {
    if epoch >= STAMP_MAX {
        return STAMP_MAX;
    }
    epoch + 1
}

/// Maximum number of instances to remember. Beyond it, the least recent owners are dropped.
const AUDITS_MAX: usize = 1000;

impl SharedHead {
    /// As bytes.
    pub fn seal(&self) -> Vec<u8> {
        Record::seal(self)
    }

    /// From bytes.
    pub fn open(bytes: &[u8]) -> Result<Self, Damaged> {
        Record::open(bytes)
    }

    /// Records the current length of the writer's log.
    pub fn note_audit(&mut self, bytes: u64) {
        self.audits.insert(self.instance.clone(), Audit { bytes, term: self.term });
        while self.audits.len() > AUDITS_MAX
            && let Some(oldest) = self.audits.iter().min_by_key(|(_, audit)| audit.term).map(|(name, _)| name.clone())
        {
            self.audits.remove(&oldest);
        }
    }
}

impl LaneHead {
    /// As bytes.
    pub fn seal(&self) -> Vec<u8> {
        let Self { engine, merge, epoch, publications, configuration, audit_bytes, created_ms } = self;
        let record = HeadRecord {
            queries_dead: engine.queries_dead,
            rewards_dead: engine.rewards_dead,
            merge: merge.to_record(),
            epoch: *epoch,
            publications: publications.clone(),
            configuration: configuration.clone(),
            audit_bytes: *audit_bytes,
            created_ms: *created_ms,
        };
        record.seal()
    }

    /// From bytes.
    pub fn open(bytes: &[u8]) -> Result<Self, Damaged> {
        let HeadRecord {
            queries_dead,
            rewards_dead,
            merge,
            epoch,
            publications,
            configuration,
            audit_bytes,
            created_ms,
        } = HeadRecord::open(bytes)?;
        let bad_clock = || Damaged::Corrupt("the time of a log contradicts itself".to_owned());
        let merge = MergeState::from_record(merge).ok_or_else(bad_clock)?;
        let engine = EngineHead { queries_dead, rewards_dead };
        Ok(Self { engine, merge, epoch, publications, configuration, audit_bytes, created_ms })
    }

    /// Configuration keys that differ from `settings`, with their old and new values.
    pub fn changed_settings(&self, settings: &Settings) -> Vec<(String, String, String)> {
        let before = serde_json::from_str(&self.configuration).unwrap_or_default();
        let now = serde_json::to_value(settings).unwrap_or_default();
        let mut changed = Vec::new();
        differences("", &before, &now, &mut changed);
        changed
    }
}

/// The settings that learning depends on, as stored in a snapshot.
pub fn fingerprint(settings: &Settings) -> String {
    serde_json::to_string(settings).unwrap_or_default()
}

fn differences(
    path: &str,
    before: &serde_json::Value,
    now: &serde_json::Value,
    changed: &mut Vec<(String, String, String)>,
) {
    match (before.as_object(), now.as_object()) {
        (Some(a), Some(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let at = |map: &serde_json::Map<_, _>| map.get(key).cloned().unwrap_or_default();
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differences(&path, &at(a), &at(b), changed);
            }
        }
        _ if before != now => changed.push((path.to_owned(), before.to_string(), now.to_string())),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use proptest::prelude::*;

    #[test]
    fn names_the_settings_that_changed() {
        let mut config = Config::default();
        let head = LaneHead { configuration: fingerprint(&config.check().unwrap()), ..LaneHead::default() };
        assert_eq!(head.changed_settings(&config.check().unwrap()), []);
        config.join.window_ms = 5;
        config.learner.eta = Some(0.5);
        let changed = head.changed_settings(&config.check().unwrap());
        let keys: Vec<&str> = changed.iter().map(|change| change.0.as_str()).collect();
        assert_eq!(keys, ["join.remember_ms", "join.window_ms", "learner.method.actor-critic.eta"]);
        assert_eq!((changed[1].1.as_str(), changed[1].2.as_str()), ("600000", "5"));
    }

    #[test]
    fn epochs_never_wrap() {
        assert_eq!([0, STAMP_MAX - 1, STAMP_MAX, u64::MAX].map(next_epoch), [1, STAMP_MAX, STAMP_MAX, STAMP_MAX]);
    }

    #[test]
    fn the_instances_of_longest_ago_are_forgotten() {
        let mut head = SharedHead::default();
        for term in 0..AUDITS_MAX as u64 + 2 {
            (head.instance, head.term) = (format!("i{term}"), term);
            head.note_audit(10 * term);
            head.note_audit(10 * term + 1);
        }
        assert_eq!(head.audits.len(), AUDITS_MAX);
        assert!(!head.audits.contains_key("i1") && head.audits["i2"] == Audit { bytes: 21, term: 2 });
        assert_eq!(SharedHead::open(&head.seal()), Ok(head));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(LaneHead::open(&bytes).is_err());
            let _ = crate::wire::envelope::decode::<HeadRecord>(&bytes);
        }
    }
}
