//! The log on standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::debug_fn;

use crate::config::{LogConfig, LogFormat};

/// Starts logging. `RUST_LOG` sets the level, by default info. Does nothing if logging has started already.
pub fn start(config: &LogConfig) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // No internal errors: tracing reports them with eprintln!, which panics once standard error is closed.
    let log = log.log_internal_errors(false);
    let started = match config.format {
        LogFormat::Text => {
            let fields = debug_fn(|writer, field, value| match field.name() {
                // Fields of events from the crate log; the header already has them.
                name if name.starts_with("log.") => Ok(()),
                "message" => write!(writer, "{}", escape(&format!("{value:?}"))),
                name => write!(writer, "{name}={}", escape(&format!("{value:?}"))),
            });
            log.with_ansi(in_colour()).fmt_fields(fields.delimited(" ")).try_init()
        }
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    if let Err(error) = started {
        tracing::warn!(%error, "logging had already been started");
    }
}

/// Escapes line ends and terminal control characters: names and IDs are external input and must not forge log lines.
pub fn escape(text: &str) -> String {
    let steers = |c: char| {
        c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if steers(c) { escaped.extend(c.escape_default()) } else { escaped.push(c) }
    }
    escaped
}

/// On a terminal, unless NO_COLOR is set (<https://no-color.org>).
fn in_colour() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_ends_a_line_or_steers_a_terminal() {
        let text = "a\nb\r\u{1b}[2J\u{7}\u{9b}1m\u{2028}\u{202e}é";
        assert_eq!(escape(text), r"a\nb\r\u{1b}[2J\u{7}\u{9b}1m\u{2028}\u{202e}é");
    }
}
