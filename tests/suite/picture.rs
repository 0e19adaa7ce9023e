//! Pictures that commands leave behind, and those of the documentation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tiny_skia::Pixmap;

use crate::browser::Browser;

/// Width of the documentation's pictures.
pub const WIDTH: u32 = 1100;

/// The documentation's pictures.
const SHOWN: [&str; 4] = ["page-light", "page-dark", "demo-report", "evaluation-report"];

const HEIGHTS: std::ops::Range<u32> = 600..1900;
const BYTES_MAX: usize = 300_000;

/// Whether the documentation's pictures are to be made again: POINTSMAN_TEST_PICTURES=1.
pub fn is_refresh() -> bool {
    std::env::var("POINTSMAN_TEST_PICTURES").as_deref() == Ok("1")
}

fn images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/images")
}

/// Takes a picture of the documentation: the page that is open, [`WIDTH`] wide, down to the first element that a selector
/// matches. It replaces the one in docs/images only where pictures are to be made again.
pub fn show(browser: &mut Browser, name: &str, down_to: &str) {
    assert!(SHOWN.contains(&name), "{name}");
    let bottom = browser.eval(&format!("document.querySelector({down_to:?}).getBoundingClientRect().bottom + scrollY"));
    let height = bottom.as_f64().unwrap() as u32 + 18;
    let bytes = browser.top(WIDTH, height);
    assert_eq!(check_shown(name, &bytes), height, "{name}");
    if is_refresh() {
        fs::create_dir_all(images()).unwrap();
        fs::write(images().join(format!("{name}.png")), bytes).unwrap();
    }
}

/// Panics unless a picture of the documentation has a fitting size and something on it; its height.
fn check_shown(name: &str, bytes: &[u8]) -> u32 {
    let picture = Pixmap::decode_png(bytes).unwrap();
    assert!(picture.width() == WIDTH && HEIGHTS.contains(&picture.height()), "{name} is {} high", picture.height());
    assert!(bytes.len() < BYTES_MAX, "{name} has {} bytes", bytes.len());
    let mut counts = std::collections::BTreeMap::<[u8; 3], usize>::new();
    for pixel in picture.pixels() {
        *counts.entry([pixel.red(), pixel.green(), pixel.blue()]).or_default() += 1;
    }
    let ground = counts.values().max().copied().unwrap_or(0);
    let inked = picture.pixels().len() - ground;
    let is_blank = counts.len() < 100 || inked < picture.pixels().len() / 50;
    assert!(!is_blank, "{name}: {} colours, {inked} pixels", counts.len());
    picture.height()
}

#[test]
fn the_documentation_has_its_pictures() {
    for name in SHOWN {
        let bytes = fs::read(images().join(format!("{name}.png")));
        let hint = "POINTSMAN_TEST_PICTURES=1 cargo test --test suite -- page:: reports:: makes them";
        check_shown(name, &bytes.unwrap_or_else(|error| panic!("docs/images/{name}.png: {error}; {hint}")));
    }
}

/// The pictures in a directory, by name; panics unless each has the width of a report and something on it.
pub fn pictures(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for name in &names {
        let picture = Pixmap::decode_png(&fs::read(directory.join(name)).unwrap()).unwrap();
        assert!(picture.width() == 1360 && (300..3000).contains(&picture.height()), "{name}");
        let pixels = picture.pixels();
        let colours: BTreeSet<[u8; 3]> =
            pixels.iter().map(|pixel| [pixel.red(), pixel.green(), pixel.blue()]).collect();
        let inked = pixels.iter().filter(|pixel| pixel.green() < 250).count();
        assert!(colours.len() > 20 && inked > pixels.len() / 500, "{name}: {} colours, {inked} pixels", colours.len());
    }
    names
}
