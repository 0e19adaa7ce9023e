//! What leaves by files: parameters, one file a space, each replaced as a whole; and bad events.

use std::io;
use std::path::{Path, PathBuf};

use super::append::Appender;
use super::{Letter, Outlet};
use crate::event::Name;
use crate::failpoint;
use crate::files;
use crate::router::Params;
use crate::wire::params;

/// A directory of `<space>.safetensors`.
#[derive(Debug, Clone)]
pub struct ParamsDir(PathBuf);

impl ParamsDir {
    /// The parameters in `dir`, which is made when there are some.
    pub fn new(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// What was last published of every space, as far as it can be read.
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
                tracing::warn!(path = %path.display(), %error, "published parameters cannot be read and are replaced");
                None
            }
        }
    }

    /// Replaces what is published of a space. A reader sees the old or the new, never a part.
    pub fn publish(&self, space: &Name, bytes: &[u8]) -> io::Result<()> {
        failpoint::reach("before-publish");
        let path = self.path(space);
        let replace = || {
            std::fs::create_dir_all(&self.0)?;
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

/// Files: bad events as lines, parameters as one file a space.
pub struct Files {
    /// Bad events.
    pub dead_letters: Appender,
    /// Parameters, if they are published.
    pub params: Option<ParamsDir>,
}

impl Outlet for Files {
    fn dead_letters(&mut self, letters: &[Letter]) -> anyhow::Result<()> {
        let lines: String = letters.iter().map(Letter::line).collect();
        Ok(self.dead_letters.append(lines.as_bytes())?)
    }

    fn publishes(&self) -> bool {
        self.params.is_some()
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> anyhow::Result<()> {
        let Some(dir) = &self.params else { return Ok(()) };
        Ok(params.iter().try_for_each(|(space, bytes)| dir.publish(space, bytes))?)
    }
}
