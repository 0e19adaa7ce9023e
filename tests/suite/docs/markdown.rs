//! As much of Markdown as the checks need: fenced blocks, code spans, links, headings.

use std::collections::{BTreeMap, BTreeSet};

/// A page of the documentation.
pub struct Page {
    /// Its path in the repository.
    pub path: String,
    pub lines: usize,
    pub blocks: Vec<Block>,
    pub spans: Vec<At>,
    pub links: Vec<At>,
    pub headings: Vec<At>,
    /// What a link to this page may name after `#`.
    pub anchors: BTreeSet<String>,
}

/// A text and the line that it begins on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct At {
    pub line: usize,
    pub text: String,
}

/// A fenced block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The line of its fence.
    pub line: usize,
    pub info: String,
    pub text: String,
}

impl Block {
    /// The language, which is the first word of the info string.
    pub fn language(&self) -> &str {
        self.info.split_whitespace().next().unwrap_or_default()
    }

    /// Whether another word of the info string is this one.
    pub fn is_marked(&self, word: &str) -> bool {
        self.info.split_whitespace().skip(1).any(|other| other == word)
    }

    /// The file that the block is written to.
    pub fn file(&self) -> Option<&str> {
        self.info.split_whitespace().find_map(|word| word.strip_prefix("file="))
    }
}

impl Page {
    pub fn parse(path: &str, text: &str) -> Self {
        let (blocks, prose) = split_blocks(text);
        let headings = headings(&prose);
        let (spans, prose) = split_spans(&prose);
        let anchors =
            slugs(&headings).into_iter().chain(attributes(&prose, &["id", "name"]).map(|at| at.text)).collect();
        let links = links(&prose).chain(attributes(&prose, &["href", "src", "srcset"])).collect();
        Self { path: path.to_owned(), lines: text.lines().count(), blocks, spans, links, headings, anchors }
    }
}

/// The fenced blocks, and the text with empty lines in their place.
fn split_blocks(text: &str) -> (Vec<Block>, String) {
    let (mut blocks, mut prose) = (Vec::new(), String::new());
    let mut open: Option<(Block, String, usize)> = None;
    for (i, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let fence: String = {
            let mark = line.trim_start().chars().next().filter(|c| matches!(c, '`' | '~'));
            line.trim_start().chars().take_while(|c| Some(*c) == mark).collect()
        };
        match open.take() {
            Some((block, outer, _)) if fence.starts_with(&outer) && line.trim() == fence => blocks.push(block),
            Some((mut block, outer, outer_indent)) => {
                block.text += line.get(outer_indent.min(indent)..).unwrap_or_default();
                block.text.push('\n');
                open = Some((block, outer, outer_indent));
            }
            None if fence.len() >= 3 => {
                let info = line.trim()[fence.len()..].trim().to_owned();
                open = Some((Block { line: i + 1, info, text: String::new() }, fence, indent));
            }
            None => prose += line,
        }
        prose.push('\n');
    }
    blocks.extend(open.map(|(block, ..)| block));
    (blocks, prose)
}

/// The code spans, and the text with blanks in their place.
fn split_spans(prose: &str) -> (Vec<At>, String) {
    let (mut spans, mut rest_of_prose) = (Vec::new(), String::new());
    let mut rest = prose;
    while let Some(start) = rest.find('`') {
        let ticks = rest[start..].len() - rest[start..].trim_start_matches('`').len();
        let after = &rest[start + ticks..];
        rest_of_prose += &rest[..start];
        let line = rest_of_prose.matches('\n').count() + 1;
        // A span ends within its paragraph.
        let paragraph = after.find("\n\n").map_or(after, |end| &after[..end]);
        match closing(paragraph, ticks) {
            Some(end) => {
                let text = paragraph[..end].replace('\n', " ").trim().to_owned();
                let blank = |c: char| if c == '\n' { '\n' } else { ' ' };
                rest_of_prose.extend(rest[start..start + ticks + end + ticks].chars().map(blank));
                rest = &after[end + ticks..];
                spans.push(At { line, text });
            }
            None => {
                rest_of_prose += &rest[start..start + ticks];
                rest = after;
            }
        }
    }
    (spans, rest_of_prose + rest)
}

/// Where a run of exactly so many backticks begins.
fn closing(text: &str, ticks: usize) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = text[from..].find('`').map(|at| at + from) {
        let run = text[at..].len() - text[at..].trim_start_matches('`').len();
        if run == ticks {
            return Some(at);
        }
        from = at + run;
    }
    None
}

fn headings(prose: &str) -> Vec<At> {
    let heading = |(i, line): (usize, &str)| {
        let text = line.trim_start_matches('#');
        let level = line.len() - text.len();
        let is_heading = (1..=6).contains(&level) && text.starts_with(' ');
        is_heading.then(|| At { line: i + 1, text: text.trim().trim_end_matches('#').trim().to_owned() })
    };
    prose.lines().enumerate().filter_map(heading).collect()
}

/// The anchors of headings, as GitHub makes them: a repeated one gets a number.
pub fn slugs(headings: &[At]) -> Vec<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let slug = |heading: &At| {
        let slug = slug(&heading.text);
        let before = seen.entry(slug.clone()).or_default();
        *before += 1;
        if *before == 1 { slug } else { format!("{slug}-{}", *before - 1) }
    };
    headings.iter().map(slug).collect()
}

fn slug(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    without_targets(heading).to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A text whose links are reduced to their words.
fn without_targets(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("](") {
        plain += before;
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    plain + rest
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Targets of `[words](target "title")` and `[name]: target`.
fn links(prose: &str) -> impl Iterator<Item = At> {
    let target = |text: &str| text.split_whitespace().next().unwrap_or_default().trim_matches(['<', '>']).to_owned();
    let inline = prose.match_indices("](").filter_map(move |(at, open)| {
        let (inner, _) = prose[at + open.len()..].split_once(')')?;
        Some(At { line: line_of(prose, at), text: target(inner) })
    });
    let defined = prose.lines().enumerate().filter_map(move |(i, line)| {
        let (_, to) = line.strip_prefix('[')?.split_once("]: ")?;
        Some(At { line: i + 1, text: target(to) })
    });
    inline.chain(defined)
}

/// Values of HTML attributes.
fn attributes<'a>(prose: &'a str, names: &'a [&'a str]) -> impl Iterator<Item = At> + 'a {
    names.iter().flat_map(move |name| {
        let start = format!(" {name}=\"");
        let found: Vec<At> = prose
            .match_indices(&start)
            .filter_map(|(at, _)| {
                let (value, _) = prose[at + start.len()..].split_once('"')?;
                Some(At { line: line_of(prose, at), text: value.to_owned() })
            })
            .collect();
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(found: &[At]) -> Vec<&str> {
        found.iter().map(|at| at.text.as_str()).collect()
    }

    #[test]
    fn a_page_is_taken_apart() {
        let text = "\
# A page: `demo`, _and_ more
See [the `first`
part](other.md#a-b \"title\"), ![picture](a.png) and ``a ` b``.

- an item
  ```sh example
  one
    two `no span`
  ```

## Same
## Same
[ref]: docs/x.md
<img alt=\"\" src=\"b.png\"> <a id=\"by-hand\"></a>
~~~
# no heading
~~~
an ` open one
";
        let page = Page::parse("x.md", text);
        let (sh, bare) = (&page.blocks[0], &page.blocks[1]);
        assert_eq!((sh.line, sh.language(), sh.text.as_str()), (6, "sh", "one\n  two `no span`\n"));
        assert!(sh.is_marked("example") && !sh.is_marked("sh") && bare.info.is_empty());
        assert_eq!(bare.text, "# no heading\n");
        assert_eq!(texts(&page.spans), ["demo", "first", "a ` b"]);
        assert_eq!(page.spans[2].line, 3);
        assert_eq!(texts(&page.links), ["other.md#a-b", "a.png", "docs/x.md", "b.png"]);
        assert_eq!(page.links[0].line, 3);
        let anchors = ["a-page-demo-_and_-more", "by-hand", "same", "same-1"];
        assert_eq!(page.anchors.iter().map(String::as_str).collect::<Vec<_>>(), anchors);
    }

    #[test]
    fn blocks_name_their_files() {
        let page = Page::parse("x.md", "```toml file=shop.toml\na = 1\n```\n");
        assert_eq!(page.blocks[0].file(), Some("shop.toml"));
    }
}
