//! The README and the book: their links, the names that they use, and their commands.
//!
//! A block marked `sh` is run, page by page; `sh example` is only checked for names. `toml` is configuration unless it is
//! marked `toml example`. A block with `file=NAME` is written to that file before the next block runs.

mod markdown;
mod names;
mod script;
mod shell;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use pointsman::config::Config;

use self::markdown::{Block, Page};
use self::names::Names;
use crate::tool;

const README_LINES_MAX: usize = 250;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn page(path: &str) -> Page {
    Page::parse(path, &read(path))
}

/// The pages of the book, by their paths in the repository.
fn book() -> BTreeSet<String> {
    markdown_below("docs")
}

fn markdown_below(directory: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root().join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{directory}/{}", entry.file_name().into_string().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(markdown_below(&path)),
            false => found.extend(path.ends_with(".md").then_some(path)),
        }
    }
    found
}

/// Pages whose every name is checked.
fn pages() -> Vec<Page> {
    let top = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].into_iter().map(str::to_owned);
    top.chain(book()).map(|path| page(&path)).collect()
}

fn assert_none(problems: Vec<String>) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

/// What is wrong with the links of a page; `anchors` are those of another page, if it is there.
fn check_links(page: &Page, exists: &dyn Fn(&str) -> bool, anchors: &dyn Fn(&str) -> BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for link in &page.links {
        let is_elsewhere = ["http:", "https:", "mailto:", "data:"].iter().any(|scheme| link.text.starts_with(scheme));
        if is_elsewhere {
            continue;
        }
        let (path, anchor) = link.text.split_once('#').unwrap_or((&link.text, ""));
        let target = match path {
            "" => Some(page.path.clone()),
            path => resolve(&page.path, path),
        };
        let mut tell = |problem: &str| wrong.push(format!("{}:{}: {}: {problem}", page.path, link.line, link.text));
        match target.filter(|target| exists(target)) {
            None => tell("there is no such file"),
            Some(target) if !anchor.is_empty() && target.ends_with(".md") => {
                if !anchors(&target).contains(anchor) {
                    tell("there is no such heading");
                }
            }
            Some(_) => {}
        }
    }
    wrong
}

/// A path that is relative to a page, from the root of the repository; none if it leaves it.
fn resolve(page: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(parts.pop()?),
            Component::Normal(name) => parts.push(name.to_str()?),
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(parts.join("/"))
}

/// What is wrong with the blocks of a page, without running them.
fn check_blocks(page: &Page, names: &Names) -> Vec<String> {
    let check = |block: &Block| {
        let problems = match block.language() {
            "" if block.text.starts_with("$ ") || block.text.starts_with("pointsman ") => {
                vec!["a command in a block without a language: mark it sh, or sh example".to_owned()]
            }
            "sh" | "bash" | "console" | "shell" => names.check_script(&block.text),
            "toml" if !block.is_marked("example") => check_toml(block),
            _ => Vec::new(),
        };
        // Only sh is run: a block that names another shell would silently be left out.
        let is_odd = matches!(block.language(), "bash" | "console" | "shell");
        let odd = is_odd.then(|| "mark commands sh, or sh example".to_owned());
        let at = format!("{}:{}", page.path, block.line);
        problems.into_iter().chain(odd).map(move |problem| format!("{at}: {problem}")).collect::<Vec<_>>()
    };
    page.blocks.iter().flat_map(check).collect()
}

fn check_toml(block: &Block) -> Vec<String> {
    let parsed = block.text.parse::<toml::Table>().map(without_secret_files);
    let config = parsed.and_then(toml::Table::try_into::<Config>).map_err(|error| error.to_string());
    // A block that becomes a file is a whole configuration; others are parts of one.
    let checked = config.and_then(|config| match block.file() {
        Some(_) => config.check().map(drop).map_err(|error| error.to_string()),
        None => Ok(()),
    });
    checked.err().into_iter().collect()
}

/// `token.file = "..."` is a token.
fn without_secret_files(table: toml::Table) -> toml::Table {
    let inner = |(key, value): (String, toml::Value)| {
        let value = match value {
            toml::Value::Table(inner) if inner.len() == 1 && inner.get("file").is_some_and(toml::Value::is_str) => {
                toml::Value::String("secret".to_owned())
            }
            toml::Value::Table(inner) => toml::Value::Table(without_secret_files(inner)),
            other => other,
        };
        (key, value)
    };
    table.into_iter().map(inner).collect()
}

fn check_spans(page: &Page, names: &Names) -> Vec<String> {
    let at = |line: usize| format!("{}:{line}", page.path);
    let check = |span: &markdown::At| -> Vec<String> {
        names.check_span(&span.text).into_iter().map(|problem| format!("{}: {problem}", at(span.line))).collect()
    };
    page.spans.iter().flat_map(check).collect()
}

#[test]
fn links_lead_somewhere() {
    let exists = |path: &str| root().join(path).exists();
    let anchors = |path: &str| page(path).anchors;
    let all = pages().into_iter().chain([page("CHANGELOG.md")]);
    assert_none(all.flat_map(|page| check_links(&page, &exists, &anchors)).collect());
}

#[test]
fn every_page_is_in_the_summary() {
    let summary = page("docs/SUMMARY.md");
    let listed: Vec<String> = summary.links.iter().filter_map(|link| resolve(&summary.path, &link.text)).collect();
    let listed_once: BTreeSet<String> = listed.iter().cloned().collect();
    let expected: BTreeSet<String> = book().into_iter().filter(|path| *path != summary.path).collect();
    let in_docs: BTreeSet<String> = listed_once.iter().filter(|path| path.starts_with("docs/")).cloned().collect();
    assert_eq!(in_docs, expected, "docs/SUMMARY.md lists the left, docs/ holds the right");
    assert_eq!(listed.len(), listed_once.len(), "a page is listed twice");
}

#[test]
fn the_readme_is_short() {
    let lines = page("README.md").lines;
    assert!(
        lines <= README_LINES_MAX,
        "README.md has {lines} lines, {README_LINES_MAX} are allowed: move some to docs/"
    );
}

#[test]
fn every_name_exists() {
    let names = Names::load();
    let all = pages();
    let problems = all.iter().flat_map(|page| [check_spans(page, &names), check_blocks(page, &names)].concat());
    assert_none(problems.collect());
}

#[test]
fn every_alert_has_a_runbook_entry() {
    let operations = page("docs/operations.md");
    let rules: serde_yaml_ng::Value = serde_yaml_ng::from_str(&read("config/alerts.yml")).unwrap();
    let groups = rules["groups"].as_sequence().unwrap();
    let alerts = groups.iter().flat_map(|group| group["rules"].as_sequence().unwrap());
    let names: Vec<&str> = alerts.map(|rule| rule["alert"].as_str().unwrap()).collect();
    assert_none(missing_entries(&operations, &names));
}

/// Alerts without a heading of their own.
fn missing_entries(page: &Page, alerts: &[&str]) -> Vec<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let has = |alert: &str| page.headings.iter().any(|at| at.text.split(|c| !is_word(c)).any(|word| word == alert));
    let missing = alerts.iter().filter(|alert| !has(alert));
    missing.map(|alert| format!("{}: no heading names the alert {alert}", page.path)).collect()
}

#[test]
fn command_blocks_run() {
    if !tool::possible("command blocks", &["bash", "curl"]) {
        return;
    }
    let left = Mutex::new(pages());
    let problems = Mutex::new(Vec::new());
    let work = || {
        while let Some(page) = { left.lock().unwrap().pop() } {
            if let Some(problem) = script::run(&page, script::LIMIT) {
                problems.lock().unwrap().push(problem);
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
    assert_none(problems.into_inner().unwrap());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_links_are_found() {
        let text = "[a](b.md) [c](../README.md#one) [d](#here) [e](https://x.y/z) ![f](f.png) [g](../../x)\n# Here\n";
        let page = Page::parse("docs/a.md", text);
        let all = |path: &str| ["docs/b.md", "README.md", "docs/a.md", "docs/f.png"].contains(&path);
        let anchors = |path: &str| if path == "README.md" { ["one".to_owned()].into() } else { page.anchors.clone() };
        let left = ["docs/a.md:1: ../../x: there is no such file"];
        assert_eq!(check_links(&page, &all, &anchors), left);
        let none = check_links(&page, &|path| path == "docs/a.md", &anchors);
        assert_eq!(none.len(), 4, "{none:?}");
        let no_anchors = check_links(&page, &all, &|_| BTreeSet::new());
        assert_eq!(
            no_anchors[..2],
            ["docs/a.md:1: ../README.md#one: there is no such heading", "docs/a.md:1: #here: there is no such heading"]
        );
    }

    #[test]
    fn bad_blocks_are_found() {
        let names = Names::load();
        let check = |text: &str, expected: &[&str]| {
            let found = check_blocks(&Page::parse("x.md", text), &names);
            assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "{text}: {found}");
            }
        };
        check("```sh\npointsman demo\n```", &[]);
        check("```sh example\npointsman demo --nonsense\n```", &["x.md:1: pointsman demo has no flag --nonsense"]);
        check("```\n$ pointsman demo\n```", &["without a language"]);
        check("```\npointsman demo\n```", &["without a language"]);
        check("```\nsome output\n```", &[]);
        check("```bash\nls\n```", &["mark commands sh"]);
        check("```toml\n[learner]\neta = 0.3\n[http]\ntoken.file = \"x\"\n```", &[]);
        check("```toml\n[learner]\netta = 0.3\n```", &["unknown field `etta`"]);
        check("```toml example\n[learner]\netta = 0.3\n```", &[]);
        check("```toml file=a.toml\n[learner]\nmodels = []\n```", &["models"]);
        check("```toml\n[transport.kafka.client]\n\"security.protocol\" = \"SASL_SSL\"\n```", &[]);
    }

    #[test]
    fn missing_runbook_entries_are_found() {
        let page = Page::parse("x.md", "## `PointsmanDown`\n### PointsmanLag and more\nPointsmanLogFiles\n");
        assert_eq!(missing_entries(&page, &["PointsmanDown", "PointsmanLag"]), Vec::<String>::new());
        assert_eq!(missing_entries(&page, &["PointsmanLogFiles", "Pointsman"]).len(), 2);
    }
}
