//! An in-memory store, for tests and for runs that keep nothing.

use std::collections::BTreeMap;

use super::{Batch, SnapshotStore, StoreError};

/// A store that is not durable.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// Its entries.
    pub entries: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl SnapshotStore for Memory {
    fn value_bytes_max(&self) -> usize {
        4096
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let from = self.entries.range(prefix.to_vec()..);
        from.take_while(|(key, _)| key.starts_with(prefix)).for_each(|(key, value)| each(key, value));
        Ok(())
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        batch.deletes.iter().for_each(|key| drop(self.entries.remove(key)));
        self.entries.extend(batch.puts);
        Ok(())
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn start_over(&mut self, _saved: bool) -> Result<(), StoreError> {
        self.entries.clear();
        Ok(())
    }
}
