//! Pictures that commands leave behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tiny_skia::Pixmap;

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
