//! The HTML document around tables and charts.

use super::{Table, plain};
use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A report of one page.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The title of the document, and its heading.
    pub title: String,
    /// A sentence or two that say what came out.
    pub lead: String,
    /// Settings and circumstances, by name.
    pub facts: Vec<(String, String)>,
    /// What there is to show, in order.
    pub sections: Vec<Section>,
}

/// A part of a page under its own heading.
#[derive(Debug, Clone, Default)]
pub struct Section {
    /// The heading.
    pub heading: String,
    /// A paragraph that introduces the blocks.
    pub text: Option<String>,
    /// Tables, charts and notes, in order.
    pub body: Vec<Block>,
}

/// One thing to show.
#[derive(Debug, Clone)]
pub enum Block {
    /// A table.
    Table(Table),
    /// A chart, as its `html` made it.
    Chart(Markup),
    /// A remark in smaller type.
    Note(String),
}

impl Page {
    /// The whole document, as HTML5.
    pub fn render(&self) -> String {
        let document = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    // The browser itself then vouches that the page loads nothing and runs nothing.
                    meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                    title { (plain(&self.title)) }
                    style { (PreEscaped(STYLE)) }
                }
                body { main { (self.header()) @for section in &self.sections { (section.html()) } } }
            }
        };
        document.into_string()
    }

    /// Every chart, in order, with the heading above it.
    pub fn charts(&self) -> impl Iterator<Item = (&str, &Markup)> {
        let blocks = self.sections.iter().flat_map(|section| section.body.iter().map(move |block| (section, block)));
        blocks.filter_map(|(section, block)| match block {
            Block::Chart(chart) => Some((section.heading.as_str(), chart)),
            _ => None,
        })
    }

    fn header(&self) -> Markup {
        html! {
            header {
                h1 { (plain(&self.title)) }
                @if !self.lead.is_empty() { p.lead { (plain(&self.lead)) } }
                @if !self.facts.is_empty() {
                    dl { @for (name, value) in &self.facts { div { dt { (plain(name)) } dd { (plain(value)) } } } }
                }
            }
        }
    }
}

impl Section {
    fn html(&self) -> Markup {
        html! {
            section {
                h2 { (plain(&self.heading)) }
                @if let Some(text) = &self.text { p { (plain(text)) } }
                @for block in &self.body { (block.html()) }
            }
        }
    }
}

impl Block {
    fn html(&self) -> Markup {
        match self {
            Block::Table(table) => table.html(),
            Block::Chart(chart) => chart.clone(),
            Block::Note(note) => html! { p.note { (plain(note)) } },
        }
    }
}

/// What reports and the page look like. The ten colours extend the palette of Okabe and Ito, which colour-blind readers
/// can tell apart. Dark colours are for screens only, so that a report prints in ink on paper.
pub const STYLE: &str = include_str!("style.css");

#[cfg(test)]
mod tests {
    use super::super::testing::assert_well_formed;
    use super::super::{Column, Lines};
    use super::*;

    fn page(text: &str) -> Page {
        let columns = vec![Column::left(text)];
        let body = vec![
            Block::Table(Table { columns, rows: vec![vec![text.into()]], note: Some(text.into()) }),
            Block::Chart(Lines { title: text.into(), ..Lines::default() }.html()),
            Block::Note(text.into()),
        ];
        let section = Section { heading: text.into(), text: Some(text.into()), body };
        Page { title: text.into(), lead: text.into(), facts: vec![(text.into(), text.into())], sections: vec![section] }
    }

    #[test]
    fn any_text_gives_a_sound_document() {
        for text in ["", "plain", "<script>alert(\"1\")</script>", "a & b", "</style>", "\u{0}\u{1b}[31m"] {
            let html = page(text).render();
            assert_well_formed(&html);
            assert!(html.starts_with("<!DOCTYPE html><html lang=\"en\">") && !html.contains("<script"));
            assert_eq!(html.matches("</style>").count(), 1);
        }
        assert_well_formed(&Page::default().render());
    }

    #[test]
    fn the_document_loads_nothing() {
        let html = page("x").render();
        for loader in ["http:", "https:", "url(", "@import", " src=", " href=", "<link"] {
            assert!(!html.contains(loader), "{loader}");
        }
    }

    #[test]
    fn the_same_data_gives_the_same_bytes() {
        assert_eq!(page("x").render(), page("x").render());
    }

    #[test]
    fn every_colour_is_styled_for_light_and_dark() {
        for i in 0..10 {
            assert_eq!(STYLE.matches(&format!("--c{i}:#")).count(), 2);
            assert_eq!(STYLE.matches(&format!(".c{i}{{")).count(), 1);
        }
    }
}
