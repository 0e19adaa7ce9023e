//! Explains values that have the wrong type: turns the messages of serde, which name Rust types, into messages that name
//! the key, its value and what is permitted.

/// Explains an error of serde at a key. `quotes`: whether the value may be shown; a secret must not be.
pub fn explain(key: &str, problem: &str, quotes: bool) -> String {
    if let Some((field, known)) = problem.strip_prefix("unknown field ").and_then(unknown) {
        return unknown_key(key, field, &known);
    }
    if let Some((value, known)) = problem.strip_prefix("unknown variant ").and_then(unknown) {
        if !quotes {
            return format!("{key}: {}", one_of(&known));
        }
        let hint = nearest(value, &known).map(|name| format!("; did you mean {name}?")).unwrap_or_default();
        return format!("{key} = {value:?}: {}{hint}", one_of(&known));
    }
    let Some((found, expected)) = mismatch(problem) else {
        return match problem.starts_with('"') {
            true if quotes => format!("{key} = {problem}"),
            _ if quotes => format!("{key}: {problem}"),
            _ => format!("{key}: the value has the wrong type"),
        };
    };
    let must = format!("must be {}", type_in_words(expected));
    match found_in_words(found) {
        Found::Value(_) if !quotes => format!("{key}: {must}"),
        found => found.against(key, &must),
    }
}

/// Explains an error of serde at a key whose permitted values are known.
pub fn explain_choice(key: &str, problem: &str, permitted: &str) -> String {
    match mismatch(problem) {
        Some((found, _)) => found_in_words(found).against(key, permitted),
        None => explain(key, problem, true),
    }
}

/// The permitted values of a key, if that is what an error of serde lists.
pub fn permitted(problem: &str) -> Option<String> {
    problem.strip_prefix("unknown variant ").and_then(unknown).map(|(_, known)| one_of(&known))
}

/// Whether an error of serde is about a key that does not exist.
pub fn is_unknown_key(problem: &str) -> bool {
    problem.starts_with("unknown field")
}

fn unknown_key(key: &str, field: &str, known: &[&str]) -> String {
    let section = key.strip_suffix(field).unwrap_or(key).trim_start_matches('.');
    let section = if section.is_empty() || section.ends_with('.') { section.to_owned() } else { format!("{section}.") };
    if let Some((_, remedy)) =
        REPLACED.iter().find(|(old, _)| format!("{section}{field}").ends_with(&format!(".{old}")))
    {
        return format!("{section}{field} does not exist any more: {remedy}");
    }
    match nearest(field, known) {
        Some(nearest) => format!("unknown key {section}{field}: did you mean {section}{nearest}?"),
        None => format!("unknown key {section}{field}: the keys here are {}", known.join(", ")),
    }
}

/// Keys of `[learner]` and of a space that were replaced, and what to write instead.
const REPLACED: [(&str, &str); 4] = [
    (
        "guard",
        "for \"best-constant\" set stage = \"canary\" and, if you serve one model today, incumbent to its name; for \"none\" remove it",
    ),
    ("guard_share", "guard_budget says how much may be lost, and the share of the traffic follows from it: remove it"),
    ("guard_control", "5% of the traffic stay with the incumbent: remove it"),
    ("guard_margin", "the policy has to earn as much as the incumbent less guard_budget: remove it"),
];

/// The known name that is most like a misspelt one, if one is.
fn nearest<'a>(written: &str, known: &[&'a str]) -> Option<&'a str> {
    let likeness = |name: &&str| strsim::osa_distance(name, written);
    known.iter().copied().min_by_key(likeness).filter(|name| likeness(name) <= 1 + written.len() / 4)
}

fn one_of(known: &[&str]) -> String {
    match known {
        [] => "no value is permitted".to_owned(),
        [only] => format!("must be {only}"),
        [first, second] => format!("must be {first} or {second}"),
        all => format!("must be one of {}", all.join(", ")),
    }
}

/// What serde does not know, and what it knows: "`x`, expected one of `a`, `b`".
fn unknown(rest: &str) -> Option<(&str, Vec<&str>)> {
    let (name, known) = rest.strip_prefix('`')?.split_once("`, expected ")?;
    Some((name, known.split('`').skip(1).step_by(2).collect()))
}

/// What serde found, and what it expected.
fn mismatch(problem: &str) -> Option<(&str, &str)> {
    let starts = ["invalid type: ", "invalid value: ", "invalid "];
    starts.iter().find_map(|start| problem.strip_prefix(start))?.rsplit_once(", expected ")
}

/// What serde found: a value that can be quoted, or only its kind.
enum Found<'a> {
    Value(&'a str),
    Kind(&'a str),
    Other,
}

impl Found<'_> {
    fn against(&self, key: &str, must: &str) -> String {
        match self {
            Self::Value(value) => format!("{key} = {value}: {must}"),
            Self::Kind(kind) => format!("{key}: {must}, not {kind}"),
            Self::Other => format!("{key}: {must}"),
        }
    }
}

fn found_in_words(found: &str) -> Found<'_> {
    let number = ["integer `", "floating point `", "boolean `"].iter().find_map(|start| found.strip_prefix(start));
    match (found, number, found.strip_prefix("string ")) {
        (_, Some(value), _) => Found::Value(value.trim_end_matches('`')),
        (_, _, Some(text)) => Found::Value(text),
        ("sequence", ..) => Found::Kind("a list"),
        ("map", ..) => Found::Kind("a section"),
        ("null" | "unit value", ..) => Found::Kind("empty"),
        (length, ..) if length.starts_with("length ") => Found::Kind(length),
        _ => Found::Other,
    }
}

fn type_in_words(expected: &str) -> String {
    let unsigned = ["u8", "u16", "u32", "u64", "usize"].contains(&expected);
    let signed = ["i8", "i16", "i32", "i64", "isize"].contains(&expected);
    match expected {
        _ if unsigned => "a whole number, 0 or more".to_owned(),
        _ if signed => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a section".to_owned(),
        "path string" | "string or table" | "string or map" => "a string".to_owned(),
        _ if expected.starts_with("struct ") => "a section".to_owned(),
        _ => expected.replace("an array of length", "a list of length"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_key_the_value_and_what_is_permitted() {
        for (key, problem, expected) in [
            (
                "learner.tua",
                "unknown field `tua`, expected one of `eta`, `tau`",
                "unknown key learner.tua: did you mean learner.tau?",
            ),
            (
                "spaces.shop.guard_margin",
                "unknown field `guard_margin`, expected `guard_budget` or `tau`",
                "spaces.shop.guard_margin does not exist any more: the policy has to earn as much as the incumbent less \
                 guard_budget: remove it",
            ),
            (
                "learner",
                "unknown field `x`, expected `dim` or `tau`",
                "unknown key learner.x: the keys here are dim, tau",
            ),
            (
                "lerner",
                "unknown field `lerner`, expected one of `learner`, `log`",
                "unknown key lerner: did you mean learner?",
            ),
            ("a", "unknown variant `xyz`, expected one of `k`, `l`, `m`", "a = \"xyz\": must be one of k, l, m"),
            ("a", "unknown variant `xyz`, expected `k` or `l`", "a = \"xyz\": must be k or l"),
            (
                "learner.algorithm",
                "unknown variant `hgp`, expected one of `hpg`, `uniform`",
                "learner.algorithm = \"hgp\": must be hpg or uniform; did you mean hpg?",
            ),
            ("a", "invalid type: string \"fast\", expected f64", "a = \"fast\": must be a number"),
            ("a", "invalid value: integer `-1`, expected usize", "a = -1: must be a whole number, 0 or more"),
            ("a", "invalid type: sequence, expected struct Config", "a: must be a section, not a list"),
            ("a", "invalid length 3, expected an array of length 2", "a: must be a list of length 2, not length 3"),
            ("a", "\"x\": must be a time", "a = \"x\": must be a time"),
            ("a", "must be a time", "a: must be a time"),
        ] {
            assert_eq!(explain(key, problem, true), expected);
        }
    }

    #[test]
    fn secrets_are_not_quoted() {
        for problem in [
            "invalid type: string \"s3cret\", expected struct Config",
            "invalid type: integer `s3cret`, expected a string",
            "unknown variant `s3cret`, expected `k` or `l`",
            "\"s3cret\": must be a time",
            "s3cret",
        ] {
            assert!(!explain("a", problem, false).contains("s3cret"), "{problem}");
        }
    }
}
