//! Tables, as aligned text and as HTML.

use super::plain;
use maud::{Markup, html};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// A table with one head row.
///
/// A row that is too short is filled up with empty cells; cells beyond the last column are left
/// out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// The columns, from the left.
    pub columns: Vec<Column>,
    /// The cells, row by row, already formatted.
    pub rows: Vec<Vec<String>>,
    /// A remark shown below the table.
    pub note: Option<String>,
}

/// The head of one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// What the head says.
    pub title: String,
    /// Where the head and the cells stand.
    pub align: Align,
}

/// The side on which a column's cells line up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

impl Column {
    /// A column of words.
    pub fn left(title: impl Into<String>) -> Self {
        let title = title.into();
        Self { title, align: Align::Left }
    }

    /// A column of numbers.
    pub fn right(title: impl Into<String>) -> Self {
        let title = title.into();
        Self { title, align: Align::Right }
    }
}

impl Table {
    /// Lines for a terminal or a log, at most `width` columns wide, each ended by a newline and free of trailing spaces.
    ///
    /// A table that is too wide loses nothing: headings wrap first, then cells at spaces, and only then inside words.
    pub fn text(&self, width: usize) -> String {
        let head: Vec<String> = self.columns.iter().map(|c| plain(&c.title)).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| self.cells(row)).collect();
        let layout = Layout::fit(&head, &rows, width);
        let rule: Vec<String> = layout.widths.iter().map(|w| "─".repeat(*w)).collect();
        let mut lines = self.lines(&head, &layout, Stand::Bottom);
        lines.push(self.line(&rule, &layout));
        lines.extend(rows.iter().flat_map(|row| self.lines(row, &layout, Stand::Top)));
        lines.extend(self.note.as_deref().into_iter().flat_map(|note| wrap(&plain(note), width)));
        lines.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Comma-separated values (RFC 4180, but with plain newlines), without the note.
    pub fn csv(&self) -> String {
        let field = |cell: String| {
            let needs_quotes = cell.contains([',', '"', '\n', '\r']);
            if needs_quotes { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
        };
        let line = |cells: Vec<String>| cells.into_iter().map(field).collect::<Vec<_>>().join(",") + "\n";
        let head = line(self.columns.iter().map(|column| plain(&column.title)).collect());
        head + &self.rows.iter().map(|row| line(self.cells(row))).collect::<String>()
    }

    /// A `<table>` that copies into a spreadsheet cell by cell.
    pub fn html(&self) -> Markup {
        html! {
            div.table {
                table {
                    thead {
                        tr { @for c in &self.columns { th.num[c.is_right()] scope="col" { (plain(&c.title)) } } }
                    }
                    tbody {
                        @for row in &self.rows {
                            tr {
                                @for (c, cell) in self.columns.iter().zip(self.cells(row)) {
                                    td.num[c.is_right()] { @if c.is_right() { (unbroken(&cell)) } @else { (cell) } }
                                }
                            }
                        }
                    }
                }
            }
            @if let Some(note) = &self.note { p.note { (plain(note)) } }
        }
    }

    fn cells(&self, row: &[String]) -> Vec<String> {
        let cell = |i: usize| row.get(i).map(|cell| plain(cell)).unwrap_or_default();
        (0..self.columns.len()).map(cell).collect()
    }

    /// The lines of one row: as many as its tallest cell has.
    fn lines(&self, row: &[String], layout: &Layout, stand: Stand) -> Vec<String> {
        let cells: Vec<Vec<String>> = row.iter().zip(&layout.widths).map(|(cell, &width)| wrap(cell, width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let part = |cell: &Vec<String>, line: usize| {
            let above = if stand == Stand::Bottom { height - cell.len() } else { 0 };
            line.checked_sub(above).and_then(|i| cell.get(i)).cloned().unwrap_or_default()
        };
        let line = |i: usize| cells.iter().map(|cell| part(cell, i)).collect::<Vec<_>>();
        (0..height).map(|i| self.line(&line(i), layout)).collect()
    }

    fn line(&self, row: &[String], layout: &Layout) -> String {
        let padded: Vec<String> = (self.columns.iter().zip(row).zip(&layout.widths))
            .map(|((column, cell), &width)| {
                let room = " ".repeat(width.saturating_sub(cell.width()));
                match column.align {
                    Align::Left => format!("{cell}{room}"),
                    Align::Right => format!("{room}{cell}"),
                }
            })
            .collect();
        padded.join(&" ".repeat(layout.gap)).trim_end().to_owned()
    }
}

/// A cell for HTML: a narrow table breaks ranges and deviations only before the "to" and the "±".
fn unbroken(cell: &str) -> String {
    cell.replace(" to ", " to\u{a0}").replace("± ", "±\u{a0}")
}

/// Spaces between two columns, and where there is no room for them.
const GAPS: [usize; 2] = [2, 1];
/// No column becomes narrower.
const NARROWEST: usize = 3;

/// Where the lines of a cell stand in a row that is taller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stand {
    Top,
    Bottom,
}

/// How wide columns are, and the spaces between them.
struct Layout {
    widths: Vec<usize>,
    gap: usize,
}

impl Layout {
    /// A layout that fits, if any does. Narrows the widest column step by step: until headings wrap, until cells wrap,
    /// with less space between columns, until words break. Then gives the room that wrapping leaves over to columns
    /// that need fewer lines with it.
    fn fit(head: &[String], rows: &[Vec<String>], width: usize) -> Self {
        let column = |i: usize| ColumnCells { cells: rows.iter().map(|row| &row[i]).chain([&head[i]]).collect() };
        let columns: Vec<ColumnCells<'_>> = (0..head.len()).map(column).collect();
        let natural: Vec<usize> = columns.iter().map(|column| column.widest(|cell| cell.width())).collect();
        let words: Vec<usize> = columns.iter().map(|column| column.widest(longest_segment)).collect();
        let body = |i: usize| rows.iter().map(|row| row[i].width()).max().unwrap_or(0);
        let headings: Vec<usize> = (0..head.len()).map(|i| body(i).max(longest_segment(&head[i]))).collect();
        let narrowest = vec![NARROWEST; head.len()];
        let [wide, tight] = GAPS;
        let stages = [(&headings, wide), (&words, wide), (&words, tight), (&narrowest, tight)];
        let (mut widths, mut gap) = (natural.clone(), wide);
        let room = |gap: usize| width.saturating_sub(gap * head.len().saturating_sub(1));
        for (floors, with_gap) in stages {
            if widths.iter().sum::<usize>() <= room(gap) {
                break;
            }
            gap = with_gap;
            narrow(&mut widths, floors, room(gap));
        }
        for (width, column) in widths.iter_mut().zip(&columns) {
            *width = column.widest(|cell| wrap(cell, *width).iter().map(|line| line.width()).max().unwrap_or(0));
        }
        while let Some((more, i)) = cheapest_line(&columns, &widths, &natural, room(gap)) {
            widths[i] += more;
        }
        Self { widths, gap }
    }
}

/// The cells of one column, its heading among them.
struct ColumnCells<'a> {
    cells: Vec<&'a String>,
}

impl ColumnCells<'_> {
    fn widest(&self, measure: impl Fn(&str) -> usize) -> usize {
        self.cells.iter().map(|cell| measure(cell)).max().unwrap_or(0)
    }

    /// Lines of all cells together.
    fn height(&self, width: usize) -> usize {
        self.cells.iter().map(|cell| wrap(cell, width).len()).sum()
    }
}

/// Takes from the widest column, down to the floors, until there is room.
fn narrow(widths: &mut [usize], floors: &[usize], room: usize) {
    while widths.iter().sum::<usize>() > room {
        let wide = (0..widths.len()).filter(|&i| widths[i] > floors[i]).max_by_key(|&i| widths[i]);
        let Some(i) = wide else { return };
        widths[i] -= 1;
    }
}

/// The least that a column must be widened by to need fewer lines, and which.
fn cheapest_line(
    columns: &[ColumnCells<'_>],
    widths: &[usize],
    natural: &[usize],
    room: usize,
) -> Option<(usize, usize)> {
    let left = room.saturating_sub(widths.iter().sum());
    let more = |i: usize| {
        let height = columns[i].height(widths[i]);
        let most = left.min(natural[i].saturating_sub(widths[i]));
        Some(((1..=most).find(|more| columns[i].height(widths[i] + more) < height)?, i))
    };
    (0..columns.len()).filter_map(more).min()
}

fn longest_segment(text: &str) -> usize {
    words(text).flat_map(segments).map(|segment| segment.width()).max().unwrap_or(0)
}

/// Words of a text. A deviation keeps its sign, the end of a range its "to".
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text.trim();
    std::iter::from_fn(move || {
        let is_number = |text: &&str| text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+'));
        let after = ["± ", "to "].iter().find_map(|lead| rest.strip_prefix(lead).filter(is_number));
        let lead = after.map_or(0, |after| rest.len() - after.len());
        let end = rest[lead..].find(' ').map_or(rest.len(), |at| at + lead);
        let word = &rest[..end];
        rest = rest[end..].trim_start();
        (!word.is_empty()).then_some(word)
    })
}

/// Parts that a long word may be broken into: `data/`, `log/`, `hypentropy-`, `regression`.
fn segments(word: &str) -> impl Iterator<Item = &str> {
    let mut rest = word;
    std::iter::from_fn(move || {
        let is_break = |at: usize, c: char| {
            let (before, after) = (&rest[..at], &rest[at + c.len_utf8()..]);
            before.ends_with(char::is_alphabetic) && after.starts_with(char::is_alphabetic)
        };
        let found = rest.char_indices().find(|&(at, c)| matches!(c, '-' | '/' | '_' | ':' | '=') && is_break(at, c));
        let (segment, after) = rest.split_at(found.map_or(rest.len(), |(at, c)| at + c.len_utf8()));
        rest = after;
        (!segment.is_empty()).then_some(segment)
    })
}

/// Text in lines of at most `width` columns. Breaks at spaces, and inside a word that does not fit on a line.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for piece in words(text).flat_map(|word| pieces(word, width)) {
        if !line.is_empty() && line.width() + 1 + piece.width() > width {
            lines.push(std::mem::take(&mut line));
        }
        line = if line.is_empty() { piece } else { format!("{line} {piece}") };
    }
    lines.push(line);
    lines
}

/// A word, cut into pieces of at most `width` columns.
fn pieces(word: &str, width: usize) -> Vec<String> {
    if word.width() <= width {
        return vec![word.to_owned()];
    }
    let mut pieces: Vec<String> = Vec::new();
    for segment in segments(word) {
        match pieces.last_mut() {
            Some(piece) if piece.width() + segment.width() <= width => piece.push_str(segment),
            _ => pieces.extend(chunks(segment, width)),
        }
    }
    pieces
}

/// A text, cut wherever a line is full.
fn chunks(text: &str, width: usize) -> Vec<String> {
    let mut chunks: Vec<String> = Vec::new();
    for c in text.chars() {
        match chunks.last_mut() {
            Some(chunk) if chunk.width() + c.width().unwrap_or(0) <= width => chunk.push(c),
            _ => chunks.push(c.to_string()),
        }
    }
    chunks
}

impl Column {
    fn is_right(&self) -> bool {
        self.align == Align::Right
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::assert_well_formed;
    use super::*;

    fn table(rows: &[&[&str]], note: Option<&str>) -> Table {
        Table {
            columns: vec![Column::left("model"), Column::right("reward"), Column::left("où")],
            rows: rows.iter().map(|row| row.iter().map(|s| s.to_string()).collect()).collect(),
            note: note.map(str::to_owned),
        }
    }

    #[test]
    fn text_lines_up() {
        let rows: [&[&str]; 3] = [&["élan", "0.5", "ici"], &["b"], &["two\nlines", "12.25", "", "x"]];
        let expected = "\
model      reward  où
─────────  ──────  ───
élan          0.5  ici
b
two lines   12.25
means of 3 runs
";
        assert_eq!(table(&rows, Some("means of 3 runs")).text(80), expected);
    }

    #[test]
    fn empty_tables_are_fine() {
        assert_eq!(table(&[], None).text(80), "model  reward  où\n─────  ──────  ──\n");
        assert_well_formed(&Table::default().html().into_string());
        assert_eq!(Table::default().text(80).trim(), "");
    }

    #[test]
    fn a_wide_table_wraps_headings_then_cells_then_words() {
        let rows: [&[&str]; 2] = [&["HPG, practical", "0.7123 ± 0.0034", "a b"], &["uniform", "0.5", "品質管理"]];
        let mut table = table(&rows, Some("means of the runs"));
        table.columns[1].title = "mean reward of all queries".into();
        let wide = ["model           mean reward of all queries  où"];
        let headings = [
            "                mean reward of all",
            "model                      queries  où",
            "──────────────  ──────────────────  ────────",
            "HPG, practical     0.7123 ± 0.0034  a b",
            "uniform                        0.5  品質管理",
            "means of the runs",
        ];
        let cells = [
            "               mean",
            "             reward",
            "             of all",
            "model       queries  où",
            "─────────  ────────  ────────",
            "HPG,         0.7123  a b",
            "practical  ± 0.0034",
            "uniform         0.5  品質管理",
            "means of the runs",
        ];
        let cases = [(80, wide.join("\n")), (45, headings.join("\n")), (29, cells.join("\n"))];
        for (width, expected) in cases {
            let text = table.text(width);
            assert!(text.starts_with(&expected), "at {width}:\n{text}");
        }
        let path = ["data/log/", "params/", "default.s", "afetensor", "s"];
        assert_eq!(wrap("data/log/params/default.safetensors", 9), path);
        assert_eq!(wrap("0.1 to 0.2 or -0.3", 6), ["0.1", "to 0.2", "or", "-0.3"]);
        for width in 13..80 {
            let text = table.text(width);
            assert!(text.lines().all(|line| line.width() <= width), "at {width}:\n{text}");
            let letters = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).count();
            assert_eq!(letters(&text), letters(&table.text(1000)), "at {width}:\n{text}");
        }
    }

    #[test]
    fn csv_quotes_what_needs_it() {
        let rows: [&[&str]; 2] = [&["a, \"b\"", "1"], &["two\nlines", "2", "c", "d"]];
        assert_eq!(table(&rows, Some("not this")).csv(), "model,reward,où\n\"a, \"\"b\"\"\",1,\ntwo lines,2,c\n");
    }

    #[test]
    fn html_is_escaped_and_regular() {
        let rows: [&[&str]; 2] = [&["<script>\u{1}", "1"], &["a & b", "2", "c", "d"]];
        let html = table(&rows, Some("<b>")).html().into_string();
        assert_well_formed(&html);
        assert!(!html.contains("<script>") && !html.contains("<b>"));
        assert_eq!(html.matches("<td").count(), 2 * 3);
        assert_eq!(html.matches("class=\"num\"").count(), 3);
        let range = Table { columns: vec![Column::right("x")], rows: vec![vec!["0.1 to 0.2 ± 3".into()]], note: None };
        assert!(range.html().into_string().contains("0.1 to\u{a0}0.2 ±\u{a0}3"), "a range breaks in one place");
    }
}
