//! Names that documents use, and those that there are.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{ArgAction, Command, CommandFactory};
use pointsman::cli::Cli;

use super::shell::{arguments_of, commands};
use super::{read, root};
use crate::config::documented_keys;

/// Every name that there is.
pub struct Names {
    program: Command,
    flags: BTreeSet<String>,
    keys: BTreeSet<String>,
    metrics: BTreeSet<String>,
}

/// Flags of other programs that stand alone in code spans.
const FOREIGN_FLAGS: [&str; 9] = [
    "--all-targets",
    "--cacert",
    "--features",
    "--install",
    "--lib",
    "--locked",
    "--no-default-features",
    "--release",
    "--document-private-items",
];

/// Where repository paths begin.
const PLACES: [&str; 10] =
    ["src/", "docs/", "config/", "tests/", "benches/", "deploy/", "clients/", "examples/", "fuzz/", ".github/"];

/// Endings of file names that look like keys, e.g. `router.rs`.
const ENDINGS: [&str; 20] = [
    "rs",
    "md",
    "toml",
    "json",
    "jsonl",
    "zst",
    "gz",
    "py",
    "yml",
    "yaml",
    "html",
    "css",
    "js",
    "png",
    "svg",
    "log",
    "txt",
    "csv",
    "safetensors",
    "redb",
];

impl Names {
    pub fn load() -> Self {
        let mut program = Cli::command();
        program.build();
        let mut flags = BTreeSet::new();
        collect_flags(&program, &mut flags);
        let keys = with_sections(documented_keys());
        Self { program, flags, keys, metrics: metrics() }
    }

    /// What is wrong with a script.
    pub fn check_script(&self, script: &str) -> Vec<String> {
        let words = commands(script);
        let run =
            words.iter().filter_map(|command| arguments_of(command)).flat_map(|words| self.check_arguments(words));
        run.chain(self.check_variables(script)).chain(self.check_metrics(script)).collect()
    }

    /// What is wrong with a code span.
    pub fn check_span(&self, span: &str) -> Vec<String> {
        let words: Vec<String> = commands(span).into_iter().next().unwrap_or_default();
        let first = words.first().map(String::as_str).unwrap_or_default();
        let mut wrong = Vec::new();
        if first == "pointsman" {
            wrong.extend(self.check_script(span));
        } else if self.program.find_subcommand(first).is_some() && words.iter().any(|word| word.starts_with("--")) {
            wrong.extend(self.check_arguments(&words));
        } else if first.starts_with("--") {
            let flag = first.split(['=', ' ']).next().unwrap_or_default();
            let is_known = self.flags.contains(flag) || FOREIGN_FLAGS.contains(&flag);
            wrong.extend((!is_known).then(|| format!("no command has the flag {flag}")));
            wrong.extend(words.get(1).filter(|_| flag == "--set").and_then(|word| self.check_set(word)));
        } else {
            wrong.extend(self.check_key_span(span));
            wrong.extend(check_path(span));
        }
        wrong.extend(self.check_variables(span).chain(self.check_metrics(span)));
        wrong.sort();
        wrong.dedup();
        wrong
    }

    fn check_arguments(&self, words: &[String]) -> Vec<String> {
        let mut wrong = Vec::new();
        let (mut command, mut path) = (&self.program, "pointsman".to_owned());
        let mut words = words.iter().map(|word| word.trim_matches(['[', ']'])).peekable();
        while let Some(word) = words.next() {
            let is_placeholder = word.starts_with(['<', '$', '.', '…']) || word.chars().all(|c| c.is_ascii_uppercase());
            if let Some(flag) = word.strip_prefix("--").filter(|flag| !flag.is_empty()) {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(name)) else {
                    wrong.push(format!("{path} has no flag --{name}"));
                    words.next_if(|word| value.is_none() && !word.starts_with("--"));
                    continue;
                };
                let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
                let most = arg.get_num_args().map_or(1, |range| range.max_values());
                let mut values: Vec<&str> = value.into_iter().collect();
                while takes_value && values.len() < most {
                    match words.next_if(|word| !word.starts_with("--")) {
                        Some(word) => values.push(word),
                        None => break,
                    }
                }
                wrong.extend(values.first().filter(|_| name == "set").and_then(|value| self.check_set(value)));
            } else if word.starts_with('-') && word.len() == 2 {
                let short = word.chars().nth(1);
                let is_known = command.get_arguments().any(|arg| arg.get_short() == short);
                wrong.extend((!is_known).then(|| format!("{path} has no flag {word}")));
            } else if let Some(inner) = command.find_subcommand(word) {
                path = format!("{path} {word}");
                command = inner;
            } else if is_placeholder && !command.get_positionals().any(|_| true) {
                break;
            } else if command.has_subcommands() {
                wrong.push(format!("{path} has no command {word}"));
                break;
            } else if !command.get_positionals().any(|_| true) {
                wrong.push(format!("{path} takes no argument {word}"));
            }
        }
        wrong
    }

    fn check_set(&self, setting: &str) -> Option<String> {
        let key = setting.split('=').next().unwrap_or_default();
        let is_placeholder =
            key.is_empty() || key.chars().all(|c| c.is_ascii_uppercase()) || key == "key" || key.starts_with('$');
        (!is_placeholder && !self.is_key(key)).then(|| format!("--set: there is no key {key}"))
    }

    fn check_key_span(&self, span: &str) -> Option<String> {
        let key = span.split(" = ").next().unwrap_or_default().split('=').next().unwrap_or_default();
        let key = key.strip_prefix('[').and_then(|key| key.strip_suffix(']')).unwrap_or(key);
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '*' | '<' | '>');
        let (section, rest) = key.split_once('.')?;
        let last = rest.rsplit('.').next()?;
        let is_section = self.keys.iter().any(|known| known.split('.').next() == Some(section));
        let is_meant = is_section && key.chars().all(fits) && !rest.is_empty() && !ENDINGS.contains(&last);
        (is_meant && !self.is_key(key)).then(|| format!("there is no key {key}"))
    }

    /// Environment variables that set keys.
    fn check_variables<'a>(&'a self, text: &'a str) -> impl Iterator<Item = String> + 'a {
        const PREFIX: &str = "POINTSMAN__";
        let name_at = |(at, _): (usize, &str)| names_from(&text[at + PREFIX.len()..]).to_owned();
        text.match_indices(PREFIX).map(name_at).filter_map(|name| {
            let key = name.to_lowercase().replace("__", ".");
            let is_placeholder = matches!(key.as_str(), "" | "section.key");
            (!is_placeholder && !self.is_key(&key)).then(|| format!("{PREFIX}{name}: there is no key {key}"))
        })
    }

    fn check_metrics<'a>(&'a self, text: &'a str) -> impl Iterator<Item = String> + 'a {
        let starts = text.match_indices("pointsman_").filter(|(at, _)| {
            !text[..*at].ends_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '-'))
        });
        let name_at = |(at, _): (usize, &str)| {
            let name = names_from(&text[at..]);
            (name.to_owned(), &text[at + name.len()..])
        };
        starts.map(name_at).flat_map(|(name, after)| {
            // pointsman_learner_lift_{lower,upper} are two names, pointsman_learner_lag{topic="x"} is one.
            let listed = after.strip_prefix('{').and_then(|list| list.split_once('}')).filter(|_| name.ends_with('_'));
            let all = match listed {
                Some((list, _)) => list.split(',').map(|end| format!("{name}{}", end.trim())).collect(),
                None if after.starts_with('*') => vec![format!("{name}*")],
                None => vec![name],
            };
            all.into_iter().filter(|name| !self.is_metric(name)).map(|name| format!("there is no metric {name}"))
        })
    }

    fn is_metric(&self, name: &str) -> bool {
        match name.strip_suffix('*') {
            Some(start) => self.metrics.iter().any(|known| known.starts_with(start)),
            None => self.metrics.contains(name),
        }
    }

    /// Whether it is a key, a section, or one of the keys that any name can stand in.
    pub fn is_key(&self, key: &str) -> bool {
        if let Some(start) = key.strip_suffix('*') {
            return self.keys.iter().any(|known| known.starts_with(start)) || self.is_key(start.trim_end_matches('.'));
        }
        let of_space = key.strip_prefix("spaces.").map(|rest| rest.split_once('.').map(|(_, key)| key));
        let is_secret = || key.strip_suffix(".file").is_some_and(|key| ["router.key", "http.token"].contains(&key));
        let of_outcome = key.strip_prefix("objective.outcomes.").map(|rest| rest.split_once('.').map(|(_, key)| key));
        if let Some(of_outcome) = of_outcome {
            return of_outcome.is_none_or(|key| self.keys.contains(&format!("objective.outcomes.cost.{key}")));
        }
        match of_space {
            Some(None) => true,
            Some(Some(key)) => self.keys.contains(&format!("learner.{key}")),
            None => self.keys.contains(key) || key.starts_with("transport.kafka.client.") || is_secret(),
        }
    }
}

/// The name at the beginning of a text.
fn names_from(text: &str) -> &str {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap_or_default()
}

fn collect_flags(command: &Command, flags: &mut BTreeSet<String>) {
    flags.extend(command.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?))));
    command.get_subcommands().for_each(|inner| collect_flags(inner, flags));
}

fn with_sections(keys: BTreeSet<String>) -> BTreeSet<String> {
    let sections =
        |key: &String| -> Vec<String> { key.match_indices('.').map(|(at, _)| key[..at].to_owned()).collect() };
    let all: Vec<String> = keys.iter().flat_map(sections).collect();
    let empty = [
        "spaces",
        "transport.kafka.client",
        "learner.declared_propensities",
        "reward.values",
        "events.query_fields",
        "events.reward_fields",
    ]
    .map(str::to_owned);
    keys.into_iter().chain(all).chain(empty).collect()
}

/// Every metric by every name that a query may use. Read from the source: families without a series are not exposed.
pub fn metrics() -> BTreeSet<String> {
    let of = |file: &str, prefix: &str| -> Vec<String> {
        let source = read(&format!("src/telemetry/{file}.rs"));
        let kinds = [
            ("counters", vec!["", "_total"]),
            ("gauges", vec![""]),
            ("seconds", vec!["_seconds", "_seconds_bucket", "_seconds_sum", "_seconds_count"]),
            // Without the prefix of a process.
            ("seconds_of_loop", vec!["_seconds"]),
        ];
        let mut found = Vec::new();
        for (kind, endings) in kinds {
            let start = format!("sheet.{kind}(");
            for (at, _) in source.match_indices(&start) {
                let name =
                    source[at + start.len()..].trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next());
                let name = name.unwrap_or_else(|| panic!("{file}.rs: a metric without a literal name"));
                let process = if kind == "seconds_of_loop" { String::new() } else { format!("{prefix}_") };
                found.extend(endings.iter().map(|ending| format!("pointsman_{process}{name}{ending}")));
            }
        }
        found
    };
    let files = [("learner", "learner"), ("http", "learner"), ("router", "router"), ("http", "router")];
    files.into_iter().flat_map(|(file, prefix)| of(file, prefix)).collect()
}

/// What is wrong with a path of the repository.
pub fn check_path(span: &str) -> Option<String> {
    let is_meant = PLACES.iter().any(|place| span.starts_with(place)) && !span.contains([' ', '<', '(', '$']);
    let path = span.split(['#', ':']).next().unwrap_or_default().trim_end_matches('/');
    let exists = braces(path).iter().all(|path| matches_one(&root(), path));
    (is_meant && !exists).then(|| format!("there is no {path}"))
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn braces(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((list, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    list.split(',').flat_map(|part| braces(&format!("{before}{part}{after}"))).collect()
}

/// Whether a path, with `*` for any part of a name and `**` for any directories, names something.
fn matches_one(directory: &Path, pattern: &str) -> bool {
    let (part, rest) = pattern.split_once('/').map_or((pattern, None), |(part, rest)| (part, Some(rest)));
    if !part.contains('*') {
        let path = directory.join(part);
        return rest.map_or(path.exists(), |rest| path.is_dir() && matches_one(&path, rest));
    }
    let Ok(entries) = std::fs::read_dir(directory) else { return false };
    let mut entries = entries.filter_map(Result::ok);
    if part == "**" {
        let rest = rest.unwrap_or("*");
        return matches_one(directory, rest) || entries.any(|e| e.path().is_dir() && matches_one(&e.path(), pattern));
    }
    entries.any(|entry| {
        let is_like = fits(&entry.file_name().to_string_lossy(), part);
        is_like && rest.is_none_or(|rest| entry.path().is_dir() && matches_one(&entry.path(), rest))
    })
}

/// Whether a name is like a pattern with `*`.
fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((start, rest)) => {
            let Some(name) = name.strip_prefix(start) else { return false };
            (0..=name.len()).filter(|at| name.is_char_boundary(*at)).any(|at| fits(&name[at..], rest))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_names_are_found() {
        let names = Names::load();
        let check = |span: &str, expected: &[&str]| assert_eq!(names.check_span(span), expected, "{span}");
        // Commands and flags.
        check("pointsman demo --rounds 5 --report out", &[]);
        check("pointsman --config shop.toml learn --once", &[]);
        check("pointsman snapshots list --json", &[]);
        check("pointsman <command>", &[]);
        check("pointsman COMMAND --help", &[]);
        check("pointsman", &[]);
        check("pointsman replay --queries a b --rewards c [--json]", &[]);
        check("pointsman lern", &["pointsman has no command lern"]);
        check("pointsman snapshots forget", &["pointsman snapshots has no command forget"]);
        check("pointsman demo --round 5", &["pointsman demo has no flag --round"]);
        check("pointsman learn now", &["pointsman learn takes no argument now"]);
        check("learn --onze", &["pointsman learn has no flag --onze"]);
        check("learn --once", &[]);
        check("--accept-gap", &[]);
        check("--accept-gaps", &["no command has the flag --accept-gaps"]);
        // Keys.
        check("pointsman learn --set learner.eta=1 --set http.token.file=x", &[]);
        check("pointsman learn --set learner.etta=1", &["--set: there is no key learner.etta"]);
        check("--set join.window=1", &["--set: there is no key join.window"]);
        for key in [
            "learner.eta",
            "learner.eta = 0.3",
            "spaces.NAME.shards",
            "events.fields.query",
            "events.fields.*",
            "learner.*",
        ] {
            check(key, &[]);
        }
        for key in [
            "transport.kafka.client.sasl.password",
            "router.key.file",
            "[transport.kafka]",
            "[spaces.shop]",
            "learner.rs",
        ] {
            check(key, &[]);
        }
        check("learner.etta", &["there is no key learner.etta"]);
        check("http.listen.file", &["there is no key http.listen.file"]);
        check("spaces.shop.shard", &["there is no key spaces.shop.shard"]);
        check("[transport.kafak]", &["there is no key transport.kafak"]);
        check("POINTSMAN__LEARNER__ETA=0.3", &[]);
        check("POINTSMAN__LEARNER__ETTA", &["POINTSMAN__LEARNER__ETTA: there is no key learner.etta"]);
        // Metrics.
        check("pointsman_learner_events_total", &[]);
        check("rate(pointsman_learner_events_total{kind=\"query\"}[5m])", &[]);
        check("pointsman_learner_update_duration_seconds_bucket", &[]);
        check("pointsman_learner_lift_{lower,upper}", &[]);
        check("pointsman_router_*", &[]);
        check("pointsman_learner_evens_total", &["there is no metric pointsman_learner_evens_total"]);
        check("pointsman_learner_lag_total", &["there is no metric pointsman_learner_lag_total"]);
        check("pointsman_learner_lift_{lower,uper}", &["there is no metric pointsman_learner_lift_uper"]);
        // Paths.
        check("config/default.toml", &[]);
        check("src/{lib,main}.rs", &[]);
        check("src/cli/", &[]);
        check("tests/**/docs.rs", &[]);
        check("src/telemetry/*.rs", &[]);
        check("src/engine.rs:12", &[]);
        check("config/defaults.toml", &["there is no config/defaults.toml"]);
        check("src/telemetry/*.py", &["there is no src/telemetry/*.py"]);
        check("src/{lib,mian}.rs", &["there is no src/{lib,mian}.rs"]);
    }

    #[test]
    fn wrong_names_in_scripts_are_found() {
        let names = Names::load();
        let script =
            "pointsman demo --rounds 5 &\ncurl -s localhost | grep pointsman_learner_lagg\npointsman lern | cat\n";
        let expected = ["pointsman has no command lern", "there is no metric pointsman_learner_lagg"];
        assert_eq!(names.check_script(script), expected);
    }

    /// The metrics that a learner exposes are among those read from the source.
    #[test]
    fn exposed_metrics_are_known() {
        let known = metrics();
        let text = pointsman::telemetry::Status::default().metrics();
        let exposed: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        assert!(exposed.len() > 10, "{text}");
        assert!(exposed.iter().all(|name| known.contains(*name)), "{exposed:?}");
    }
}
