//! Reports: data in, text out.
//!
//! The commands that have something to show (a demo, a replay, a comparison, an evaluation) gather
//! it as [`Table`]s and charts ([`Lines`], [`StackedShares`], [`Spectrum`], [`Scatter`]). A table
//! becomes text for a terminal, and a [`Page`] puts tables and charts into one HTML file that needs nothing
//! else: no script, no font, no picture from anywhere, so it can be mailed, archived and printed.
//! Everything here is a pure function of its input, without a clock and without I/O: the same data
//! gives the same bytes, and a report can be compared with `diff`.

mod page;
mod png;
mod svg;
mod table;

pub use page::{Block, Page, STYLE, Section};
pub use png::{PngError, png};
pub use svg::{Band, Bands, Cloud, Lines, Look, Scatter, Series, Spectrum, StackedShares};
pub use table::{Align, Column, Table, wrap};

/// Names come from configuration and may hold what breaks a line or what XML forbids.
fn plain(text: &str) -> String {
    let unfit = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
    text.replace(unfit, " ")
}

#[cfg(test)]
mod testing {
    /// Elements that HTML leaves open.
    const VOID: [&str; 1] = ["meta"];

    /// Panics unless tags balance, attributes are quoted once each, and text is escaped.
    pub fn assert_well_formed(markup: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = markup.strip_prefix("<!DOCTYPE html>").unwrap_or(markup);
        while let Some((text, after)) = rest.split_once('<') {
            assert_escaped(text);
            let (tag, after) = after.split_once('>').expect("a tag ends");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "in {markup}"),
                None => open.extend(opened(tag)),
            }
            rest = after;
        }
        assert_escaped(rest);
        assert!(open.is_empty(), "left open: {open:?}");
    }

    fn opened(tag: &str) -> Option<&str> {
        let (name, mut rest) = tag.split_once(' ').unwrap_or((tag, ""));
        let mut seen = Vec::new();
        while !rest.is_empty() {
            let (key, after) = rest.split_once("=\"").expect("a quoted attribute");
            let (value, after) = after.split_once('"').expect("a closed attribute");
            assert!(!key.contains(['"', '&']) && !seen.contains(&key), "{tag}");
            assert!(!value.contains("NaN") && !value.contains("inf"), "{tag}");
            assert_escaped(value);
            seen.push(key);
            rest = after.trim_start();
        }
        (!VOID.contains(&name)).then_some(name)
    }

    fn assert_escaped(text: &str) {
        let known = ["amp;", "lt;", "gt;", "quot;"];
        for entity in text.split('&').skip(1) {
            assert!(known.iter().any(|k| entity.starts_with(k)), "&{entity}");
        }
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'));
    }

    #[test]
    fn the_checker_knows_bad_markup() {
        assert_well_formed("<a b=\"c\"><d>&lt;</d></a>");
        for bad in ["<a>", "<a></b>", "<a>&</a>", "<a b=c></a>", "<a b=\"NaN\"></a>", "<a"] {
            let verdict = std::panic::catch_unwind(|| assert_well_formed(bad));
            assert!(verdict.is_err(), "{bad} passed");
        }
    }
}
