//! Summary of an engine: counts, mean reward, digest.

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::warned;
use crate::engine::{Counts, Engine, SpaceView, Totals};
use crate::evaluate::sample_ratio::SampleRatioView;
use crate::evaluate::verdict::{Comparison, Finding};
use crate::report::{Column, Table};

/// As one JSON object; totals over several lanes.
pub fn json(engines: &[Engine], out_of_order: u64) -> Value {
    let Totals { counts, mean_reward } = Totals::of(engines);
    let Counts { join, applied, .. } = counts;
    let (q, r) = (join.queries, join.rewards);
    let spaces: Vec<SpaceView> = engines.iter().flat_map(Engine::spaces).collect();
    let space = |view: &SpaceView| {
        let value = json!({
            "version": view.version,
            "applied": view.counts.applied,
            "mean_reward": view.mean_reward,
            "join": view.counts.join,
            "worth": view.worth,
            "sample_ratio": view.sample_ratio,
            "verdict": view.worth.as_ref().and_then(|worth| worth.verdicts.first()).map(|best| &best.sentence),
        });
        (view.name.to_string(), value)
    };
    json!({
        "queries": counts.queries(),
        "rewards": counts.rewards(),
        "applied": applied,
        "joined": q.joined,
        "expired": q.expired,
        "duplicates": q.duplicate + r.duplicate,
        "further": r.further,
        "clipped": r.clipped,
        "retired": q.retired,
        "late": q.late + r.late,
        "orphaned": r.orphaned,
        "evicted": q.evicted + r.evicted,
        "dead_letters": counts.queries_dead + counts.rewards_dead,
        "queries_dead": counts.queries_dead,
        "rewards_dead": counts.rewards_dead,
        "dead_letters_unrecorded": counts.dead_unrecorded,
        "pending": q.pending + r.pending,
        "out_of_order": out_of_order,
        "mean_reward": mean_reward,
        "version": spaces.iter().map(|view| view.version).sum::<u64>(),
        "spaces": spaces.iter().map(space).collect::<serde_json::Map<_, _>>(),
        "warnings": warned::of(engines),
        "state_digest": digest(engines),
    })
}

/// The digest of a lane; for several lanes, a digest of their digests in order.
fn digest(engines: &[Engine]) -> String {
    match engines {
        [engine] => engine.digest(),
        engines => {
            let all: String = engines.iter().map(Engine::digest).collect();
            format!("{:032x}", xxh3_128(all.as_bytes()))
        }
    }
}

/// What to say about whether routing pays, line by line: a warning if models were not played as often as their propensities
/// say, then one sentence per policy, best first, or why there is no verdict.
pub fn verdict_lines(ratio: &SampleRatioView, comparisons: &[Comparison]) -> Vec<String> {
    let mut lines: Vec<String> = ratio.mismatch.then(|| shares(ratio)).into_iter().collect();
    // A contradiction concerns all policies alike.
    let sentences: Vec<&str> = comparisons.iter().map(|one| one.sentence.as_str()).collect();
    match comparisons.first().map(|one| one.result) {
        Some(Finding::Contradiction) => lines.extend(sentences.first().map(ToString::to_string)),
        _ => lines.extend(sentences.into_iter().map(str::to_owned)),
    }
    lines
}

/// The same for a space.
pub fn space_verdicts(view: &SpaceView) -> Vec<String> {
    verdict_lines(&view.sample_ratio, view.worth.as_ref().map_or(&[], |worth| &worth.verdicts))
}

fn shares(ratio: &SampleRatioView) -> String {
    let all: Vec<String> = ratio.models.iter().map(ToString::to_string).collect();
    format!("warning: models were not played as often as their propensities say: {}.", all.join("; "))
}

/// As a table.
pub fn table(engine: &Engine, out_of_order: u64) -> Table {
    let Counts { queries_dead, rewards_dead, dead_unrecorded, join, applied } = engine.counts();
    let (q, r) = (join.queries, join.rewards);
    let lines: [(&str, Option<u64>, Option<u64>); 12] = [
        ("read", Some(queries_dead + q.read), Some(rewards_dead + r.read)),
        ("joined, used", Some(q.joined), Some(r.used)),
        ("of these clipped", None, Some(r.clipped)),
        ("expired", Some(q.expired), None),
        ("duplicate", Some(q.duplicate), Some(r.duplicate)),
        ("of these further (ignored)", None, Some(r.further)),
        ("late", Some(q.late), Some(r.late)),
        ("retired", Some(q.retired), None),
        ("orphaned", None, Some(r.orphaned)),
        ("evicted", Some(q.evicted), Some(r.evicted)),
        ("dead letters", Some(queries_dead), Some(rewards_dead)),
        ("pending", Some(q.pending), Some(r.pending)),
    ];
    let shown = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
    let unrecorded = match dead_unrecorded {
        0 => String::new(),
        number => format!("; {number} dead letters counted but not recorded (events.dead_letters_bytes_max)"),
    };
    Table {
        columns: vec![Column::left("events"), Column::right("queries"), Column::right("rewards")],
        rows: lines.into_iter().map(|(name, q, r)| vec![name.to_owned(), shown(q), shown(r)]).collect(),
        note: Some(format!(
            "{applied} examples applied, mean reward {:.4}, {out_of_order} events out of order{unrecorded}",
            engine.mean_reward(),
        )),
    }
}
