//! The figures as tables, and as JSON.

use std::collections::HashMap;

use pointsman::report::{Column, Table};
use serde_json::{Value, json};

use crate::support::machine::{Limit, Machine};
use crate::{DIM, MODELS, Stage};

pub fn machine_table(machine: &Machine, limits: &[(usize, [Limit; 2])]) -> Table {
    let headings =
        ["k", "GF/s", "divisions/s", "next", "scores", "S'q", "compaction", "rotation", "secular", "roofline"];
    let row = |rank: usize, next: &str, limit: &Limit| {
        let parts = [limit.score, limit.recent, limit.compaction, limit.rotation, limit.secular, limit.total()];
        let rates = [rank.to_string(), format!("{:.0}", machine.flops / 1e9), format!("{:.1e}", machine.divisions)];
        rates.into_iter().chain([next.to_owned()]).chain(parts.map(us)).collect()
    };
    let rows =
        |(rank, [known, unknown]): &(usize, [Limit; 2])| [row(*rank, "known", known), row(*rank, "unknown", unknown)];
    let note = format!(
        "d = {DIM}, M = {MODELS}, one core, f64: the least that the parts of an update can take here, where the queries \
         that come next are known and where they are not."
    );
    let rows = limits.iter().flat_map(rows).collect();
    Table { columns: headings.map(Column::right).to_vec(), rows, note: Some(note) }
}

pub fn stage_table(stages: &[Stage]) -> Table {
    let mut columns =
        ["", "k", "time", "per second", "roofline", "times roofline", "", "takes", "times faster"].map(Column::right);
    columns[0] = Column::left("stage");
    columns[6] = Column::left("naive alternative");
    let rows = stages.iter().flat_map(rows).collect();
    Table { columns: columns.to_vec(), rows, note: Some(format!("d = {DIM}, M = {MODELS}, batch 1, one thread.")) }
}

/// A row for each alternative.
fn rows(stage: &Stage) -> Vec<Vec<String>> {
    let own = [
        stage.name.to_owned(),
        stage.rank.map_or("any".to_owned(), |rank| rank.to_string()),
        us(stage.time),
        format!("{:.0}", 1.0 / stage.time),
        stage.limit.map_or("-".to_owned(), us),
        stage.limit.map_or("-".to_owned(), |limit| ratio(stage.time / limit)),
    ];
    let alternative = |(i, (name, time)): (usize, &(&str, f64))| {
        let own = own.iter().map(|text| if i == 0 { text.clone() } else { String::new() });
        own.chain([(*name).to_owned(), us(*time), ratio(time / stage.time)]).collect()
    };
    stage.alternatives.iter().enumerate().map(alternative).collect()
}

fn us(seconds: f64) -> String {
    let us = 1e6 * seconds;
    if us < 100.0 { format!("{us:.2} us") } else { format!("{us:.0} us") }
}

fn ratio(x: f64) -> String {
    if x < 10.0 { format!("{x:.2}") } else { format!("{x:.0}") }
}

pub fn as_json(machine: &Machine, limits: &[(usize, [Limit; 2])], stages: &[Stage]) -> Value {
    let stage = |stage: &Stage| {
        let alternatives: HashMap<&str, f64> = stage.alternatives.iter().copied().collect();
        json!({
            "stage": stage.name, "rank": stage.rank, "seconds": stage.time, "roofline_seconds": stage.limit,
            "alternatives_seconds": alternatives,
        })
    };
    let limit = |(rank, [limit, _]): &(usize, [Limit; 2])| {
        json!({
            "rank": rank, "score": limit.score, "recent": limit.recent, "compaction": limit.compaction,
            "rotation": limit.rotation, "secular": limit.secular, "total": limit.total(),
        })
    };
    json!({
        "dim": DIM, "models": MODELS, "flops_per_second": machine.flops, "divisions_per_second": machine.divisions,
        "update_roofline_seconds": limits.iter().map(limit).collect::<Vec<_>>(),
        "stages": stages.iter().map(stage).collect::<Vec<_>>(),
    })
}
