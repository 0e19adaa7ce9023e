//! An in-memory store, for tests and for runs that keep nothing.

use std::collections::BTreeMap;

use super::{Batch, SnapshotStore, StoreError};

/// A store that is not durable.
#[derive(Debug, Default, Clone)]
pub struct Memory {
    /// Its entries.
    pub entries: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Its checkpoint files.
    pub checkpoints: BTreeMap<String, Vec<u8>>,
}

impl SnapshotStore for Memory {
    fn place(&self) -> String {
        "in memory".to_owned()
    }

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
        let entries = self.entries.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
        Ok((entries + self.checkpoints.values().map(Vec::len).sum::<usize>()) as u64)
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.entries.clear();
        Ok(())
    }

    fn checkpoint_names(&self) -> Result<Vec<String>, StoreError> {
        Ok(self.checkpoints.keys().cloned().collect())
    }

    fn read_checkpoint(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        self.checkpoints.get(name).cloned().ok_or_else(|| StoreError::Missing(name.to_owned()))
    }

    fn write_checkpoint(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.checkpoints.insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    fn remove_checkpoint(&mut self, name: &str) -> Result<(), StoreError> {
        self.checkpoints.remove(name);
        Ok(())
    }
}
