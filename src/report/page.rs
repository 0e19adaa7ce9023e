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

/// The ten colours extend the palette of Okabe and Ito, which colour-blind readers can tell apart.
/// Dark colours are for screens only, so that a report prints in ink on paper.
const STYLE: &str = r#"
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2127;--soft:#5a6470;--rule:#dfe3e8;--axis:#8a949f;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#882255;--c7:#999933;--c8:#5b4fc4;--c9:#7f868d}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e4e8ec;--soft:#9da7b2;--rule:#2c333b;--axis:#66717d;
--c0:#3f9fdb;--c1:#f07f3c;--c2:#2bbd92;--c3:#e39fc6;--c4:#f3b53b;--c5:#93d3f8;--c6:#c9567f;--c7:#c3c05c;--c8:#9a8df2;--c9:#98a0a8}}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}.c8{--c:var(--c8)}.c9{--c:var(--c9)}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:48rem;margin:0 auto;padding:2.5rem 1.25rem 4rem;overflow-wrap:break-word}
h1{font-size:1.9rem;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 .6rem}
h2{font-size:1.25rem;line-height:1.3;font-weight:650;margin:3rem 0 .5rem;padding-top:1.1rem;border-top:1px solid var(--rule)}
p{margin:.5rem 0 1rem;max-width:42rem}
.lead{font-size:1.125rem;color:var(--soft)}
.note{font-size:.875rem;color:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.8rem 1.5rem;margin:1.5rem 0 0}
dl div{min-width:0}
dt{font-size:.8125rem;color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.table{overflow-x:auto;margin:1.25rem 0 .75rem}
table{border-collapse:collapse;width:100%;font-size:.9375rem;font-variant-numeric:tabular-nums}
td:not(.num){white-space:nowrap}
th,td{text-align:left;vertical-align:baseline;padding:.4rem 1.25rem .4rem 0;border-bottom:1px solid var(--rule)}
th{font-weight:600;color:var(--soft);border-bottom-color:var(--axis);white-space:nowrap}
th:last-child,td:last-child{padding-right:0}
.num{text-align:right;white-space:nowrap}
figure{margin:1.75rem 0}
.chart+.note{margin-top:-1rem}
figcaption{font-weight:600;margin-bottom:.35rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.25rem;margin:0 0 .6rem;padding:0;font-size:.875rem;color:var(--soft)}
.legend li{min-width:0}
.key{display:inline-block;width:1.4rem;margin-right:.45rem;vertical-align:.25em;border-top:3px solid var(--c)}
.key.dashed{border-top-style:dashed}
.key.block{width:0;vertical-align:-.05em;border:.375rem solid var(--c)}
svg{display:block;width:100%;height:auto;overflow:visible}
text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.halo{paint-order:stroke;stroke:var(--paper);stroke-width:6px}
.middle{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--rule)}.axis{stroke:var(--axis)}
.line{fill:none;stroke:var(--c);stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.line,.grid,.axis{vector-effect:non-scaling-stroke}
.line.dashed{stroke-dasharray:6 5}
circle.line{fill:var(--c)}
.area{fill:var(--c);stroke:var(--paper);stroke-width:.75;stroke-linejoin:round}
.bar{fill:var(--c)}.bar.negative{opacity:.65}
.grey{--c:var(--c9)}.faint{--c:var(--axis)}
.spots circle{fill:var(--c);fill-opacity:.8;stroke:var(--paper);stroke-width:.75}
.cross{stroke:var(--c);opacity:.6}
.limit{stroke:var(--soft);stroke-dasharray:6 5}
.cross,.limit{vector-effect:non-scaling-stroke}
.key.dot{width:.7rem;height:.7rem;border:0;border-radius:50%;background:var(--c);vertical-align:-.05em}
.key.cross{width:auto;border:0;vertical-align:0;opacity:1;color:var(--c)}.key.cross::before{content:"×"}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:1rem 1.25rem}
.panel{min-width:0}
.panel p{margin:0;font-size:.875rem;color:var(--soft);white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
@media screen and (max-width:34rem){main{padding-top:1.5rem}h1{font-size:1.6rem}td:not(.num){min-width:7.5rem}.chart text{font-size:18px}.panels text{font-size:12px}}
@media print{body{font-size:11pt}main{max-width:none;padding:0}figure,tr,.panel,dl{break-inside:avoid}h2,figcaption{break-after:avoid}}
"#;

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
