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
        let widths = fit(&head, &rows, width);
        let rule: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
        let mut lines = self.lines(&head, &widths, Stand::Bottom);
        lines.push(self.line(&rule, &widths));
        lines.extend(rows.iter().flat_map(|row| self.lines(row, &widths, Stand::Top)));
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
                                    td.num[c.is_right()] { (cell) }
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
    fn lines(&self, row: &[String], widths: &[usize], stand: Stand) -> Vec<String> {
        let cells: Vec<Vec<String>> = row.iter().zip(widths).map(|(cell, &width)| wrap(cell, width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let part = |cell: &Vec<String>, line: usize| {
            let above = if stand == Stand::Bottom { height - cell.len() } else { 0 };
            line.checked_sub(above).and_then(|i| cell.get(i)).cloned().unwrap_or_default()
        };
        let line = |i: usize| cells.iter().map(|cell| part(cell, i)).collect::<Vec<_>>();
        (0..height).map(|i| self.line(&line(i), widths)).collect()
    }

    fn line(&self, row: &[String], widths: &[usize]) -> String {
        let padded: Vec<String> = (self.columns.iter().zip(row).zip(widths))
            .map(|((column, cell), &width)| {
                let room = " ".repeat(width.saturating_sub(cell.width()));
                match column.align {
                    Align::Left => format!("{cell}{room}"),
                    Align::Right => format!("{room}{cell}"),
                }
            })
            .collect();
        padded.join(GAP).trim_end().to_owned()
    }
}

/// Between two columns.
const GAP: &str = "  ";
/// No column becomes narrower.
const NARROWEST: usize = 3;

/// Where the lines of a cell stand in a row that is taller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stand {
    Top,
    Bottom,
}

/// Column widths with which a table fits, if any do. Narrows the widest column step by step, then gives back the room
/// that wrapping left over.
fn fit(head: &[String], rows: &[Vec<String>], width: usize) -> Vec<usize> {
    let longest_word = |cell: &String| words(cell).map(|word| word.width()).max().unwrap_or(0);
    let cells =
        |i: usize, measure: &dyn Fn(&String) -> usize| rows.iter().map(|row| measure(&row[i])).max().unwrap_or(0);
    let floors = |i: usize| {
        let (heading, whole) = (longest_word(&head[i]), cells(i, &|cell| cell.width()));
        [heading.max(whole), heading.max(cells(i, &longest_word)), NARROWEST]
    };
    let all: Vec<[usize; 3]> = (0..head.len()).map(floors).collect();
    let natural: Vec<usize> = (0..head.len()).map(|i| head[i].width().max(all[i][0])).collect();
    let mut widths = natural.clone();
    let room = width.saturating_sub(GAP.len() * head.len().saturating_sub(1));
    for stage in 0..3 {
        while widths.iter().sum::<usize>() > room {
            let wide = (0..widths.len()).filter(|&i| widths[i] > all[i][stage]).max_by_key(|&i| widths[i]);
            let Some(i) = wide else { break };
            widths[i] -= 1;
        }
    }
    let used = |i: usize, cell: &String| wrap(cell, widths[i]).iter().map(|line| line.width()).max().unwrap_or(0);
    let mut widths: Vec<usize> =
        (0..head.len()).map(|i| used(i, &head[i]).max(cells(i, &|cell| used(i, cell)))).collect();
    let mut left = room.saturating_sub(widths.iter().sum());
    let mut narrowed: Vec<usize> = (0..head.len()).filter(|&i| widths[i] < natural[i]).collect();
    narrowed.sort_by_key(|&i| natural[i] - widths[i]);
    for i in narrowed {
        let more = left.min(natural[i] - widths[i]);
        widths[i] += more;
        left -= more;
    }
    widths
}

/// Words of a text. A sign of deviation stays with its number.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text.trim();
    std::iter::from_fn(move || {
        let after_sign = rest.strip_prefix("± ").map_or(0, |_| "± ".len());
        let end = rest[after_sign..].find(' ').map_or(rest.len(), |at| at + after_sign);
        let word = &rest[..end];
        rest = rest[end..].trim_start();
        (!word.is_empty()).then_some(word)
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
    for c in word.chars() {
        match pieces.last_mut() {
            Some(piece) if piece.width() + c.width().unwrap_or(0) <= width => piece.push(c),
            _ => pieces.push(c.to_string()),
        }
    }
    pieces
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
            "                 mean reward of all",
            "model                       queries  où",
            "──────────────  ───────────────────  ────────",
            "HPG, practical      0.7123 ± 0.0034  a b",
            "uniform                         0.5  品質管理",
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
    }
}
