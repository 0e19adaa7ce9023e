//! The store of a running learner, for those who want a backup of it.
//!
//! A backup holds everything that the learner has learned, and the pending queries. So a request must prove that its sender
//! can read the store's directory: it carries the token that the learner wrote to a file there.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use rand::RngExt;
use subtle::ConstantTimeEq;

use super::StateError;
use super::backup::Backup;
use crate::files;
use crate::store::{DirStore, Shared};
use crate::wire::records::Record;

/// File in the store's directory that holds the token.
pub const TOKEN_FILE: &str = "backup-token";

/// The store, once it is open.
#[derive(Clone, Default)]
pub struct RunningStore(Arc<OnceLock<(Shared<DirStore>, String)>>);

/// Why there is no backup.
#[derive(Debug, thiserror::Error)]
pub enum NoBackup {
    /// The store is not open yet.
    #[error("the learner has not opened its store yet: wait")]
    NotOpen,
    /// The token is missing or wrong.
    #[error("missing or wrong store token: it is in the file {TOKEN_FILE} of the store")]
    WrongToken,
    /// The store cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
}

impl RunningStore {
    /// Announces the store in `dir`, with a new token.
    pub fn set(&self, dir: &Path, store: Shared<DirStore>) -> std::io::Result<()> {
        let token = format!("{:032x}", rand::rng().random::<u128>());
        files::replace(&dir.join(TOKEN_FILE), format!("{token}\n").as_bytes())?;
        let _ = self.0.set((store, token));
        Ok(())
    }

    /// The store, if it is open.
    pub fn get(&self) -> Option<Shared<DirStore>> {
        self.0.get().map(|(store, _)| store.clone())
    }

    /// The newest generation of every lane. Commits wait while the store is read; learning continues.
    pub fn backup(&self, token: &[u8]) -> Result<Vec<u8>, NoBackup> {
        let (store, expected) = self.0.get().ok_or(NoBackup::NotOpen)?;
        if !bool::from(expected.as_bytes().ct_eq(token)) {
            return Err(NoBackup::WrongToken);
        }
        Ok(Backup::of(&*store.lock())?.seal())
    }
}
