//! Opens and creates files. New files are readable by their owner only; only regular files are read.

use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Makes all new files private to their owner: mode 0600, directories 0700. The umask also covers what libraries create,
/// such as the databases of the store.
pub fn make_private() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Opens a regular file for reading. Anything else is an error: opening a FIFO would block, a device may never end.
pub fn open(path: &Path) -> io::Result<File> {
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblocking).open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// Fails unless this is a regular file.
pub fn check_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")) }
}

/// Reads a regular file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Replaces a file atomically and durably: readers see the old content or the new.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = write_beside(path, bytes)?;
    put_in_place(&beside, path)
}

/// Writes and syncs a temporary file beside `path`, for [`put_in_place`].
pub fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let mut file = create_temporary(&beside)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if written.is_err() {
        // On a full disk a partial copy would take room that the next attempt needs.
        let _ = std::fs::remove_file(&beside);
    }
    written.map(|()| beside)
}

/// Renames a temporary file to `path`, durably.
pub fn put_in_place(beside: &Path, path: &Path) -> io::Result<()> {
    std::fs::rename(beside, path)?;
    File::open(parent(path))?.sync_all()
}

/// Creates a temporary file, in place of one that a crash left behind. Never opens what is there: it could be a symlink to
/// a file that must not be overwritten.
pub fn create_temporary(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::options().read(true).write(true).create_new(true).open(path)
}

/// Creates a directory with its parents, durably: syncs the parent of every directory that it creates.
pub fn create_dirs(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    create_dirs(parent(path))?;
    match std::fs::create_dir(path) {
        // Another process may have created it meanwhile.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !path.is_dir() => return Err(error),
        _ => {}
    }
    File::open(parent(path))?.sync_all()
}

/// The directory of a file.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Identity and state of a file: differs after the file is written, replaced, or made readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Its length.
    pub length: u64,
    file: (u64, u64),
    modified: (i64, i64),
    /// Also moves when another file takes over the inode: its creation sets it.
    changed: (i64, i64),
}

impl Stamp {
    /// Of a file with this metadata.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            length: metadata.len(),
            file: (metadata.dev(), metadata.ino()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// Whether a resource of the process or machine is exhausted, so that the error is not about this file.
pub fn is_exhausted(error: &io::Error) -> bool {
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS, Errno::INTR, Errno::AGAIN];
    error.raw_os_error().is_some_and(|code| exhausted.iter().any(|errno| errno.raw_os_error() == code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        for odd in [path.as_path(), dir.path(), Path::new("/dev/null")] {
            assert_eq!(open(odd).unwrap_err().to_string(), "not a regular file", "{odd:?}");
        }
    }

    #[test]
    fn a_temporary_file_replaces_a_planted_symlink() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("params"));
        std::fs::write(&victim, "precious").unwrap();
        symlink(&victim, dir.path().join("params.new")).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(read(&path).unwrap(), b"new");
        assert!(std::fs::symlink_metadata(&path).unwrap().is_file());
    }
}
