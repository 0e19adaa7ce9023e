//! Checks that results can be written before the work for them starts. Leaves no files behind.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::anyhow;

use crate::files::parent;

/// Checks that files can be created in directories, which may not exist yet, and that files can be written. Both come with
/// the option that names them; a path of none is skipped.
pub fn check(directories: &[(&str, Option<&Path>)], files: &[(&str, Option<&Path>)]) -> anyhow::Result<()> {
    for (option, path) in directories.iter().filter_map(|(option, path)| Some((option, (*path)?))) {
        check_directory(path).map_err(|(existing, error)| {
            let of = if existing == path { (*option).to_owned() } else { format!("{option} {}", path.display()) };
            anyhow!("cannot create files in {} ({of}): {error}", existing.display())
        })?;
    }
    for (option, path) in files.iter().filter_map(|(option, path)| Some((option, (*path)?))) {
        check_file(path).map_err(|error| anyhow!("cannot write {} ({option}): {error}", path.display()))?;
    }
    Ok(())
}

/// Checks that files can be created in a directory, or in the nearest one above it that exists; otherwise names that one.
pub fn check_directory(directory: &Path) -> Result<(), (PathBuf, io::Error)> {
    let above = directory.ancestors().find(|path| !path.as_os_str().is_empty() && path.exists());
    let existing = above.unwrap_or(Path::new("."));
    tempfile::tempfile_in(existing).map(drop).map_err(|error| (existing.to_owned(), error))
}

fn check_file(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(metadata) if metadata.is_file() => File::options().append(true).open(path).map(drop),
        // A device, or a pipe whose reader would take this for the end.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => tempfile::tempfile_in(parent(path)).map(drop),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_is_named_and_nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "kept").unwrap();
        let fails = |directory: Option<&Path>, file: Option<&Path>| {
            check(&[("--report", directory)], &[("--csv", file)]).map_err(|error| error.to_string()).unwrap_err()
        };
        let (file, inside) = (path("file"), path("file/report"));
        for (error, expected) in [
            (fails(Some(&file), None), format!("cannot create files in {} (--report): ", file.display())),
            (fails(Some(&inside), None), format!("(--report {}): ", inside.display())),
            (fails(None, Some(&path("missing/a.csv"))), "a.csv (--csv): No such file or directory".to_owned()),
            (fails(None, Some(dir.path())), "(--csv): is a directory".to_owned()),
        ] {
            assert!(error.contains(&expected), "{expected:?} is not in {error:?}");
        }
        check(&[("--report", Some(&path("deep/report"))), ("--png", None)], &[("--csv", Some(&path("a.csv")))])
            .unwrap();
        check(&[], &[("--csv", Some(&file)), ("--csv", Some(Path::new("/dev/full")))]).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    }
}
