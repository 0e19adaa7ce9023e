//! Tables, as aligned text and as HTML.

use super::plain;
use maud::{Markup, html};

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
    /// Lines for a terminal or a log, each ended by a newline and free of trailing spaces.
    pub fn text(&self) -> String {
        let head: Vec<String> = self.columns.iter().map(|c| plain(&c.title)).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| self.cells(row)).collect();
        let widths: Vec<usize> = (0..head.len())
            .map(|i| rows.iter().chain([&head]).map(|row| row[i].chars().count()).max().unwrap_or(0))
            .collect();
        let rule: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
        let mut lines: Vec<String> = [head, rule].iter().chain(&rows).map(|row| self.line(row, &widths)).collect();
        lines.extend(self.note.as_deref().map(plain));
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

    fn line(&self, row: &[String], widths: &[usize]) -> String {
        let padded: Vec<String> = (self.columns.iter().zip(row).zip(widths))
            .map(|((column, cell), &width)| match column.align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            })
            .collect();
        padded.join("  ").trim_end().to_owned()
    }
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
        assert_eq!(table(&rows, Some("means of 3 runs")).text(), expected);
    }

    #[test]
    fn empty_tables_are_fine() {
        assert_eq!(table(&[], None).text(), "model  reward  où\n─────  ──────  ──\n");
        assert_well_formed(&Table::default().html().into_string());
        assert_eq!(Table::default().text().trim(), "");
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
