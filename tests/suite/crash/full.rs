//! A disk without room.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use super::logs::{Disorder, Split, VARIANTS, Variant};
use super::place::{Outcome, Place, copy_tree, scratch};

/// A small file system, gone with this value.
pub struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    /// `None` if this machine does not let tests mount; in CI that is a failure.
    pub fn mount(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(dir.path());
        let problem = match mount.output() {
            Ok(output) if output.status.success() => return Some(Self { dir }),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cannot mount a tmpfs: {problem}");
        eprintln!("skipped: cannot mount a tmpfs: {problem}");
        None
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, so that it works whatever is still open.
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}

/// Learns until there is no room, which must be told with the path; then goes on where there is.
fn check(variant: &Variant, full: &Place, path: &Path, roomy: &Place, expected: &Outcome) {
    let output = full.command(&["learn", "--once"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{}: {told}", variant.name);
    let error = told.lines().rev().find(|line| line.starts_with("pointsman: ")).unwrap_or_default();
    assert!(error.contains(&path.display().to_string()), "{}: {told}", variant.name);
    assert!(error.contains("No space left on device"), "{}: {told}", variant.name);
    for (from, to) in [(&full.store, &roomy.store), (&full.transport, &roomy.transport)] {
        if from != to {
            copy_tree(from, to);
        }
    }
    if full.audit != roomy.audit && full.audit.exists() {
        std::fs::copy(&full.audit, &roomy.audit).unwrap();
    }
    assert!(roomy.newest_snapshot().is_some(), "{}: there is something to go on from", variant.name);
    roomy.check_remains(expected, variant.name);
    expected.check_same(&roomy.learn_once(), variant.name);
}

/// A place, what an uninterrupted run comes to there, and the bytes that its store and what is beside it then take.
fn place(root: &Path, variant: &Variant) -> (Place, Outcome, u64, u64) {
    let place = Place::new(root, variant, &variant.logs(1200, Disorder::Beyond), Split::Segments(3));
    let expected = place.learn_once();
    let store = allocated(&place.store);
    let transport = allocated(&place.transport) + allocated(&place.audit);
    place.wipe();
    (place.clone(), expected, store, transport - allocated(&place.transport))
}

#[test]
fn no_room_for_the_store() {
    for variant in &VARIANTS {
        let root = scratch();
        let (roomy, expected, store, _) = place(root.path(), variant);
        let Some(small) = Small::mount(store / 4 * 3) else { return };
        let full = Place { store: small.path().join("store"), ..roomy.clone() };
        check(variant, &full, &full.store, &roomy, &expected);
    }
}

#[test]
fn no_room_for_what_is_written_beside() {
    for variant in &VARIANTS {
        let root = scratch();
        let (roomy, expected, _, beside) = place(root.path(), variant);
        let Some(small) = Small::mount(allocated(&roomy.transport) + beside / 4 * 3) else { return };
        let (transport, audit) = (small.path().join("log"), small.path().join("audit.jsonl"));
        copy_tree(&roomy.transport, &transport);
        let full = Place { transport, audit, ..roomy.clone() };
        check(variant, &full, small.path(), &roomy, &expected);
    }
}

/// What a file, or a directory with all that is in it, takes of the disk.
pub fn allocated(path: &Path) -> u64 {
    let metadata = path.metadata().unwrap();
    let entries = path.read_dir().into_iter().flatten().map(|entry| allocated(&entry.unwrap().path()));
    metadata.blocks() * 512 + entries.sum::<u64>()
}
