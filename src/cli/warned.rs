//! Warnings about logs, as the commands show them.

use serde::Serialize;

use crate::engine::Engine;
use crate::event::Name;
use crate::report::{Block, Column, Section, Table};
use crate::warnings::Warning;

/// A warning about a space.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Warned {
    space: Name,
    #[serde(flatten)]
    warning: Warning,
}

/// Limit on the number of warnings that are shown as text.
const SHOWN: usize = 20;

/// All warnings, by space.
pub fn of<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Vec<Warned> {
    engines.into_iter().flat_map(|engine| engine.names().flat_map(|space| of_space(engine, space))).collect()
}

/// The warnings about one space.
pub fn of_space(engine: &Engine, space: &Name) -> Vec<Warned> {
    engine.warnings(space).into_iter().map(|warning| Warned { space: space.clone(), warning }).collect()
}

/// Lines for a terminal.
pub fn lines(warned: &[Warned]) -> Vec<String> {
    let line = |Warned { space, warning }: &Warned| format!("warning: space {space}: {}", warning.text);
    let mut lines: Vec<String> = warned.iter().take(SHOWN).map(line).collect();
    lines.extend(more(warned));
    lines
}

/// A section of a report; none without warnings.
pub fn section(warned: &[Warned]) -> Option<Section> {
    if warned.is_empty() {
        return None;
    }
    let row =
        |Warned { space, warning }: &Warned| vec![space.to_string(), warning.key.to_owned(), warning.text.clone()];
    let table = Table {
        columns: ["space", "key", "warning"].map(Column::left).to_vec(),
        rows: warned.iter().take(SHOWN).map(row).collect(),
        note: more(warned),
    };
    Some(Section { heading: "Warnings".to_owned(), text: None, body: vec![Block::Table(table)] })
}

/// What is not shown.
fn more(warned: &[Warned]) -> Option<String> {
    (warned.len() > SHOWN).then(|| format!("{} more warnings: --json lists all", warned.len() - SHOWN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::warnings::Code;

    #[test]
    fn many_warnings_are_cut_off_as_text() {
        let warning = Warning { code: Code::ModelNeverPlayed, text: "never".to_owned(), key: "learner.models" };
        let warned = |number| vec![Warned { space: Name::default_space(), warning: warning.clone() }; number];
        assert_eq!((lines(&[]), section(&[]).is_none()), (Vec::new(), true));
        assert_eq!(lines(&warned(1)), ["warning: space default: never"]);
        assert_eq!(lines(&warned(SHOWN)).len(), SHOWN);
        let lines = lines(&warned(SHOWN + 2));
        assert_eq!((lines.len(), lines[SHOWN].as_str()), (SHOWN + 1, "2 more warnings: --json lists all"));
        let Some(Block::Table(table)) = section(&warned(SHOWN + 2)).unwrap().body.pop() else { panic!("no table") };
        assert_eq!((table.rows.len(), table.note.as_deref()), (SHOWN, Some("2 more warnings: --json lists all")));
        let json = serde_json::to_value(warned(1)).unwrap();
        let expected = serde_json::json!([
            {"space": "default", "code": "model-never-played", "key": "learner.models", "text": "never"}
        ]);
        assert_eq!(json, expected);
    }
}
