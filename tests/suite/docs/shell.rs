//! Command lines, taken apart as far as a check of names needs it.

/// The words of every simple command of a script.
pub fn commands(script: &str) -> Vec<Vec<String>> {
    let mut all: Vec<Vec<String>> = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut chars = script.chars().peekable();
    let end_word = |word: &mut Option<String>, all: &mut Vec<Vec<String>>| {
        if let (Some(word), Some(command)) = (word.take(), all.last_mut()) {
            command.push(word);
        }
    };
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') => match chars.next() {
                Some('\n') | None => end_word(&mut word, &mut all),
                Some(other) => word.get_or_insert_default().push(other),
            },
            (None, '#') if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            (None, ' ' | '\t') => end_word(&mut word, &mut all),
            (None, '&') if word.as_ref().is_some_and(|word| word.ends_with('>')) => {
                word.get_or_insert_default().push(c)
            }
            (None, '\n' | ';' | '|' | '&' | '(' | ')' | '`') => {
                end_word(&mut word, &mut all);
                all.push(Vec::new());
            }
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    end_word(&mut word, &mut all);
    let all = all.into_iter().map(without_redirections);
    all.filter(|command| !command.is_empty()).collect()
}

/// The words of a command but for `2> /dev/null` and the like.
fn without_redirections(command: Vec<String>) -> Vec<String> {
    let mut words = command.into_iter();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        let rest = word.trim_start_matches(|c: char| c.is_ascii_digit());
        // <this> is a placeholder.
        let is_redirection = rest.starts_with('>') || rest.starts_with('<') && !rest.ends_with('>');
        match is_redirection {
            true if rest.chars().all(|c| matches!(c, '>' | '<' | '&')) => drop(words.next()),
            true => {}
            false => kept.push(word),
        }
    }
    kept
}

/// What stands before a command without being one.
const PREFIXES: [&str; 16] = [
    "if", "then", "else", "while", "until", "do", "!", "nice", "exec", "sudo", "time", "nohup", "env", "$", "kubectl",
    "docker",
];

/// The arguments that a simple command gives to the program, if it runs it.
pub fn arguments_of(command: &[String]) -> Option<&[String]> {
    let is_assignment = |word: &String| word.split_once('=').is_some_and(|(name, _)| name.chars().all(is_name));
    let start = command.iter().position(|word| !is_assignment(word))?;
    let command = &command[start..];
    if is_program(&command[0]) {
        return Some(&command[1..]);
    }
    // cargo run --release -- demo
    if command[0] == "cargo" && command.get(1).is_some_and(|word| word == "run") {
        let to = command.iter().position(|word| word == "--")?;
        return (!command.iter().any(|word| word == "--example" || word == "--bin")).then(|| &command[to + 1..]);
    }
    let is_timed = command[0] == "timeout";
    let runs = match command[0].as_str() {
        "docker" | "kubectl" => command.iter().take(4).any(|word| word == "run" || word == "exec"),
        first => is_timed || PREFIXES.contains(&first),
    };
    let at = command.iter().position(|word| is_program(word)).filter(|_| runs)?;
    Some(&command[at + 1..])
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// `pointsman`, by whatever path, or an image of that name.
fn is_program(word: &str) -> bool {
    word.rsplit('/').next().and_then(|name| name.split(':').next()) == Some("pointsman")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found() {
        let cases: [(&str, &[&str]); 14] = [
            ("pointsman demo --rounds 5 # a comment --no", &["demo --rounds 5"]),
            ("cd x && A=1 ./target/debug/pointsman learn \\\n  --once & sleep 1", &["learn --once"]),
            ("curl -s localhost | pointsman params show 'a b'", &["params show a b"]),
            ("x=$(pointsman health); echo \"pointsman nothing\"", &["health"]),
            ("until pointsman health; do sleep 1; done", &["health"]),
            ("docker run -p 1:1 pointsman:0.1 learn --once", &["learn --once"]),
            ("docker build -t pointsman .", &[]),
            ("docker compose exec learner pointsman health", &["health"]),
            ("cargo run --release -- demo --runs 2", &["demo --runs 2"]),
            ("git clone https://example.com/pointsman", &[]),
            ("pip install pointsman", &[]),
            ("pointsman health > /dev/null 2>&1 --json 2>/dev/null", &["health --json"]),
            ("pointsman <command> < file", &["<command>"]),
            ("timeout 5 pointsman learn", &["learn"]),
        ];
        for (script, expected) in cases {
            let all = commands(script);
            let found: Vec<String> = all.iter().filter_map(|c| arguments_of(c)).map(|words| words.join(" ")).collect();
            assert_eq!(found, expected, "{script}");
        }
    }
}
