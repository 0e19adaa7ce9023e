//! Summary of an engine: counts, mean reward, digest.

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::warned;
use crate::engine::{Counts, Engine, SpaceView, Totals};
use crate::evaluate::judge::Range;
use crate::evaluate::worth::{Lift, Verdict, WorthView};
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

/// States in one sentence whether routing pays.
pub fn verdict(lift: &Lift, best: &str) -> String {
    let Lift { value, range: Range { low, high } } = *lift;
    if low > 0.0 {
        format!(
            "Routing pays: the logged policy earned {value:.4} more per request than the best single model ({best}); \
             confidence range {low:+.4} to {high:+.4}."
        )
    } else if high < 0.0 {
        let less = -value;
        format!(
            "Routing does not pay: the logged policy earned {less:.4} less per request than the best single model ({best}); \
             confidence range {low:+.4} to {high:+.4}."
        )
    } else {
        format!(
            "Undecided: the logged policy earned {value:+.4} per request relative to the best single model ({best}), but \
             the confidence range {low:+.4} to {high:+.4} includes 0. More examples will narrow it."
        )
    }
}

/// The same for a space, with a warning if its log has poor overlap.
pub fn space_verdict(worth: &WorthView) -> String {
    let Verdict { logged_lift, best_alone, poor_overlap, examples, policy, .. } = &worth.all;
    let said = verdict(logged_lift, worth.models[*best_alone].as_str());
    if !poor_overlap {
        return said;
    }
    let effective = policy.effective_examples;
    format!(
        "{said} The log says little about the learned policy: only {effective:.0} of {examples} examples are effective."
    )
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
