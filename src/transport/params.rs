//! File output: parameters, one atomically replaced file per space; and dead letters.

use std::io;
use std::path::{Path, PathBuf};

use super::append::Appender;
use super::{Letter, Lines, Outlet, TransportError};
use crate::event::Name;
use crate::failpoint;
use crate::files;
use crate::router::Params;
use crate::wire::params;

/// A directory of `<space>.safetensors`.
#[derive(Debug, Clone)]
pub struct ParamsDir(PathBuf);

impl ParamsDir {
    /// The parameters in `dir`, which the first publication creates.
    pub fn new(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// The newest readable parameters of every space.
    pub fn published(&self) -> Vec<Params> {
        // Before the first publication there is no directory.
        let entries = std::fs::read_dir(&self.0).into_iter().flatten();
        let file_names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names = file_names.filter_map(|name| Name::try_from(name.strip_suffix(".safetensors")?).ok());
        names.filter_map(|space| self.newest(&space)).collect()
    }

    fn newest(&self, space: &Name) -> Option<Params> {
        let path = self.path(space);
        let bytes = files::read(&path).ok()?;
        match params::decode(&bytes) {
            Ok(params) => Some(params),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "published parameters are invalid; they will be replaced");
                None
            }
        }
    }

    /// Atomically replaces the published parameters of a space.
    pub fn publish(&self, space: &Name, bytes: &[u8]) -> io::Result<()> {
        failpoint::reach("before-publish");
        let path = self.path(space);
        let replace = || {
            files::create_dirs(&self.0)?;
            let beside = files::write_beside(&path, bytes)?;
            failpoint::reach("mid-publish");
            files::put_in_place(&beside, &path)
        };
        replace().map_err(|error| {
            io::Error::new(error.kind(), format!("cannot publish parameters to {}: {error}", path.display()))
        })?;
        failpoint::reach("after-publish");
        Ok(())
    }

    fn path(&self, space: &Name) -> PathBuf {
        self.0.join(format!("{space}.safetensors"))
    }
}

/// File output: dead letters as lines, parameters as one file per space.
pub struct Files {
    /// Dead letters.
    pub dead_letters: Appender,
    /// Parameters, if they are published.
    pub params: Option<ParamsDir>,
}

impl Outlet for Files {
    fn dead_letters(&mut self, letters: &[Letter]) -> Result<(), TransportError> {
        let lines: String = letters.iter().map(Letter::line).collect();
        Ok(self.dead_letters.append(lines.as_bytes())?)
    }

    fn publishes(&self) -> bool {
        self.params.is_some()
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> Result<(), TransportError> {
        let Some(dir) = &self.params else { return Ok(()) };
        Ok(params.iter().try_for_each(|(space, bytes)| dir.publish(space, bytes))?)
    }
}
