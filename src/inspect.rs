//! Recognises the layout of logs that were not written for Pointsman: which column holds the query embedding, the model, the
//! request ID, the time and the reward, and how queries and rewards belong together.
//!
//! A column is recognised by what it holds, then by its name. What is left open is a [`Question`], which the caller answers:
//! a person at a terminal, or the best guess. Everything that was assumed is listed in [`Layout::assumptions`].

mod column;
mod names;
mod reward;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;
use thiserror::Error;

use crate::config::TimeUnit;
use column::Column;
pub use reward::Rewards;

/// The first rows of a log.
pub struct Sample {
    path: PathBuf,
    rows: usize,
    columns: BTreeMap<String, Column>,
}

/// Columns that the caller names, by column or JSON pointer.
#[derive(Debug, Clone, Default)]
pub struct Named {
    /// The query embedding.
    pub vector: Option<String>,
    /// The chosen model.
    pub model: Option<String>,
    /// The request ID.
    pub id: Option<String>,
    /// The time of a query.
    pub time: Option<String>,
    /// The reward.
    pub reward: Option<String>,
    /// The distribution, or the probability of the chosen model.
    pub propensities: Option<String>,
    /// The request ID in reward logs, where it has another name.
    pub reward_id: Option<String>,
    /// The time of a reward, where it has another name.
    pub reward_time: Option<String>,
}

/// Several columns may be what is looked for.
pub struct Question<'a> {
    /// What is looked for: `the request ID`.
    pub wanted: &'static str,
    /// The option that answers it.
    pub option: &'static str,
    /// The log.
    pub path: &'a PathBuf,
    /// The candidates with an example of each, the best first.
    pub candidates: Vec<(&'a str, String)>,
}

/// Returns the number of the chosen candidate.
pub type Answer<'a> = &'a mut dyn FnMut(&Question) -> usize;

/// Why logs cannot be used.
#[derive(Debug, Error)]
pub enum Unrecognised {
    /// No column holds something that is needed.
    #[error("{path}: no column looks like {wanted}: name it with {option}; the columns are {columns}")]
    Missing {
        /// The log.
        path: String,
        /// What is missing.
        wanted: &'static str,
        /// The option that names it.
        option: &'static str,
        /// The columns.
        columns: String,
    },
    /// A named column does not exist, or does not hold what it should.
    #[error("{path}: {option} {name}: {problem}; the columns are {columns}")]
    Unfit {
        /// The log.
        path: String,
        /// The option.
        option: &'static str,
        /// The name.
        name: String,
        /// What is wrong.
        problem: String,
        /// The columns.
        columns: String,
    },
    /// The logs do not belong together.
    #[error("{0}")]
    Unrelated(String),
}

/// Where a field is: a JSON pointer.
type Pointer = String;

/// The layout of some logs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Layout {
    /// Logs of query events.
    pub queries: Vec<PathBuf>,
    /// Logs of reward events.
    pub rewards: Vec<PathBuf>,
    /// Logs with a query and its reward in each row.
    pub examples: Vec<PathBuf>,
    /// Dimension of the embeddings.
    pub dim: usize,
    /// How often each model was played, the most frequent first.
    pub models: Vec<(String, u64)>,
    /// Rows with a query.
    pub rows: u64,
    /// Fields of query events.
    pub query: Pointer,
    /// The chosen model.
    pub model: Pointer,
    /// The request ID; none if rows have none.
    pub id: Option<Pointer>,
    /// The time; none if rows have none.
    pub time: Option<Pointer>,
    /// The distribution, if it was logged.
    pub propensities: Option<Pointer>,
    /// The probability of the chosen model, if only that was logged.
    pub propensity: Option<Pointer>,
    /// The reward.
    pub reward: Pointer,
    /// The request ID of reward events.
    pub reward_id: Option<Pointer>,
    /// The time of reward events.
    pub reward_time: Option<Pointer>,
    /// The ID of reward events themselves.
    pub event_id: Option<Pointer>,
    /// Unit of times that are numbers.
    pub time_unit: TimeUnit,
    /// The rewards found.
    pub reward_scale: Rewards,
    /// Share of the queries that have a reward.
    pub rewarded: f64,
    /// Largest number of rewards of a query.
    pub rewards_per_query: usize,
    /// Times from a query to its reward, nearly all of them: the earliest and the latest.
    pub delays_ms: Option<(i64, i64)>,
    /// How far rows are behind the latest time before them.
    pub disorder_ms: i64,
    /// What was assumed without proof.
    pub assumptions: Vec<String>,
}

impl Sample {
    /// No rows yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, rows: 0, columns: BTreeMap::new() }
    }

    /// Adds a row.
    pub fn add(&mut self, row: &Value) {
        let row_number = self.rows;
        column::walk(row, "", 0, &mut |pointer, cell| {
            self.columns.entry(pointer.to_owned()).or_default().add(row_number, cell);
        });
        self.rows += 1;
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Joins numbered columns (`emb_0`, `emb_1`...) to vectors. Call it after the last row.
    pub fn finish(&mut self) {
        column::join_numbered(&mut self.columns, self.rows);
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.columns.keys().take(30).map(|pointer| &pointer[1..]).collect();
        names.join(", ")
    }

    /// The column of this name or JSON pointer.
    fn find(&self, name: &str) -> Option<(&str, &Column)> {
        let pointer = if name.starts_with('/') { name.to_owned() } else { format!("/{}", column::escape(name)) };
        self.columns.get_key_value(&pointer).map(|(pointer, column)| (pointer.as_str(), column))
    }

    fn has_vector(&self) -> bool {
        self.columns.values().any(|column| column.vector_dim(self.rows).is_some())
    }

    /// The column that scores best. Asks where the first is not clearly better than the second.
    fn choose<'a>(
        &'a self,
        role: Role,
        named: Option<&String>,
        taken: &[&str],
        score: impl Fn(&str, &Column) -> Option<i32>,
        answer: Answer,
    ) -> Result<Option<(&'a str, &'a Column)>, Unrecognised> {
        if let Some(name) = named {
            let unfit = |problem: &str| Unrecognised::Unfit {
                path: self.path.display().to_string(),
                option: role.option,
                name: name.clone(),
                problem: problem.to_owned(),
                columns: self.names(),
            };
            let (pointer, column) = self.find(name).ok_or_else(|| unfit("there is no such column"))?;
            return match score(pointer, column) {
                Some(_) => Ok(Some((pointer, column))),
                None => Err(unfit(&format!("it does not hold {}", role.wanted))),
            };
        }
        let free = self.columns.iter().filter(|(pointer, _)| !taken.contains(&pointer.as_str()));
        let mut scored: Vec<(i32, &str, &Column)> =
            free.filter_map(|(pointer, column)| Some((score(pointer, column)?, pointer.as_str(), column))).collect();
        scored.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.len().cmp(&b.1.len())).then(a.1.cmp(b.1)));
        let is_clear = match scored.as_slice() {
            [] => return Ok(None),
            [only] => only.0 >= CLEAR,
            [first, second, ..] => first.0 >= CLEAR && first.0 > second.0,
        };
        let mut chosen = 0;
        if !is_clear {
            let candidates = scored.iter().take(9).map(|(_, pointer, column)| (*pointer, column.example())).collect();
            let question = Question { wanted: role.wanted, option: role.option, path: &self.path, candidates };
            chosen = answer(&question).min(scored.len() - 1);
        }
        Ok(scored.get(chosen).map(|(_, pointer, column)| (*pointer, *column)))
    }

    fn missing(&self, role: Role) -> Unrecognised {
        Unrecognised::Missing {
            path: self.path.display().to_string(),
            wanted: role.wanted,
            option: role.option,
            columns: self.names(),
        }
    }
}

/// A score from which a column is recognised without a question.
const CLEAR: i32 = 5;

/// What a column may be.
#[derive(Clone, Copy)]
struct Role {
    wanted: &'static str,
    option: &'static str,
}

const VECTOR: Role = Role { wanted: "the query embedding", option: "--vector" };
const MODEL: Role = Role { wanted: "the chosen model", option: "--model" };
const ID: Role = Role { wanted: "the request ID", option: "--id" };
const REWARD_ID: Role = Role { wanted: "the request ID", option: "--reward-id" };
const TIME: Role = Role { wanted: "the time", option: "--time" };
const REWARD_TIME: Role = Role { wanted: "the time", option: "--reward-time" };
const REWARD: Role = Role { wanted: "the reward", option: "--reward" };
const PROPENSITIES: Role = Role { wanted: "the propensities", option: "--propensities" };

/// Recognises the layout of logs.
pub fn recognise(samples: &[Sample], named: &Named, answer: Answer) -> Result<Layout, Unrecognised> {
    if let Some(empty) = samples.iter().find(|sample| sample.rows == 0) {
        return Err(Unrecognised::Unrelated(format!("{}: the log has no rows", empty.path.display())));
    }
    let (with_queries, rewards): (Vec<&Sample>, Vec<&Sample>) = samples.iter().partition(|sample| sample.has_vector());
    let Some(first) = with_queries.first() else {
        return Err(samples
            .first()
            .map_or_else(|| Unrecognised::Unrelated("no logs".to_owned()), |sample| sample.missing(VECTOR)));
    };
    let mut layout = Layout::default();
    let mut taken = Vec::new();
    let (query, column) = first
        .choose(
            VECTOR,
            named.vector.as_ref(),
            &taken,
            |name, column| column.vector_dim(first.rows).map(|_| names::vector(name)),
            answer,
        )?
        .ok_or_else(|| first.missing(VECTOR))?;
    taken.push(query);
    (layout.query, layout.dim) = (query.to_owned(), column.vector_dim(first.rows).unwrap_or(0));
    let distribution = |name: &str, column: &Column| {
        let is_one = column.distribution_keys(first.rows).is_some() || column.is_probability(first.rows);
        is_one.then(|| names::propensities(name, column.distribution_keys(first.rows).is_some())).filter(|s| *s > 0)
    };
    let propensities = first.choose(PROPENSITIES, named.propensities.as_ref(), &taken, distribution, answer)?;
    let keys = propensities.and_then(|(_, column)| column.distribution_keys(first.rows));
    if let Some((pointer, _)) = propensities {
        taken.push(pointer);
        let place = if keys.is_some() { &mut layout.propensities } else { &mut layout.propensity };
        *place = Some(pointer.to_owned());
    }
    let model_score = |name: &str, column: &Column| {
        let values = column.categories(first.rows)?;
        let fits = keys.as_ref().is_some_and(|keys| values.keys().all(|value| keys.contains(value)));
        Some(names::model(name) + if fits { 20 } else { 0 })
    };
    let (model, _) =
        first.choose(MODEL, named.model.as_ref(), &taken, model_score, answer)?.ok_or_else(|| first.missing(MODEL))?;
    taken.push(model);
    model.clone_into(&mut layout.model);
    let time = choose_time(first, TIME, named.time.as_ref(), &taken, answer)?;
    taken.extend(time);
    layout.time = time.map(str::to_owned);
    if let Some(reward_log) = rewards.first() {
        recognise_pair(first, reward_log, named, &mut layout, &taken, answer)?;
        layout.queries = paths(&with_queries);
        layout.rewards = paths(&rewards);
    } else {
        recognise_examples(first, named, &mut layout, &taken, answer)?;
        layout.examples = paths(&with_queries);
    }
    check_alike(&with_queries, &rewards, &layout)?;
    count_models(&with_queries, &mut layout, keys.as_ref());
    describe_rewards(first, &with_queries, &rewards, &mut layout);
    Ok(layout)
}

fn paths(samples: &[&Sample]) -> Vec<PathBuf> {
    samples.iter().map(|sample| sample.path.clone()).collect()
}

fn choose_time<'a>(
    sample: &'a Sample,
    role: Role,
    named: Option<&String>,
    taken: &[&str],
    answer: Answer,
) -> Result<Option<&'a str>, Unrecognised> {
    let score = |name: &str, column: &Column| {
        let unit = column.time_unit(sample.rows)?;
        // A number is a time only if its name says so: IDs are numbers too.
        let score = names::time(name);
        (score > 0 || unit.is_none() || named.is_some()).then_some(score + if unit.is_none() { 4 } else { 0 })
    };
    Ok(sample.choose(role, named, taken, score, answer)?.map(|(pointer, _)| pointer))
}

/// Queries and rewards in separate logs: their IDs are the columns that share the most values.
fn recognise_pair(
    queries: &Sample,
    rewards: &Sample,
    named: &Named,
    layout: &mut Layout,
    taken: &[&str],
    answer: Answer,
) -> Result<(), Unrecognised> {
    let ids: Vec<(&str, BTreeSet<String>)> =
        rewards.columns.iter().filter_map(|(name, column)| Some((name.as_str(), column.ids()?))).collect();
    let shared = |column: &Column, others: &BTreeSet<String>| {
        let own = column.ids().unwrap_or_default();
        others.iter().filter(|id| own.contains(*id)).count() * 30 / others.len().max(1)
    };
    let best = |column: &Column| ids.iter().map(|(_, others)| shared(column, others)).max().unwrap_or(0);
    let score = |name: &str, column: &Column| {
        column.is_unique(queries.rows).then(|| names::id(name) + i32::try_from(best(column)).unwrap_or(0))
    };
    let (id, id_column) =
        queries.choose(ID, named.id.as_ref(), taken, score, answer)?.ok_or_else(|| queries.missing(ID))?;
    let named_id = named.reward_id.as_ref().or_else(|| named.id.as_ref().filter(|name| rewards.find(name).is_some()));
    let score = |name: &str, column: &Column| {
        let shared = shared(id_column, &column.ids()?);
        (shared > 0 || named_id.is_some()).then(|| names::id(name) + i32::try_from(shared).unwrap_or(0))
    };
    let Some((reward_id, _)) = rewards.choose(REWARD_ID, named_id, &[], score, answer)? else {
        return Err(Unrecognised::Unrelated(format!(
            "no column of {} shares values with {} of {}: name the request IDs with --id and --reward-id",
            rewards.path.display(),
            &id[1..],
            queries.path.display()
        )));
    };
    (layout.id, layout.reward_id) = (Some(id.to_owned()), Some(reward_id.to_owned()));
    if layout.time.is_none() {
        return Err(queries.missing(TIME));
    }
    let named_time =
        named.reward_time.as_ref().or_else(|| named.time.as_ref().filter(|name| rewards.find(name).is_some()));
    let time = choose_time(rewards, REWARD_TIME, named_time, &[reward_id], answer)?;
    layout.reward_time = Some(time.ok_or_else(|| rewards.missing(REWARD_TIME))?.to_owned());
    let taken = [Some(reward_id), time].into_iter().flatten().collect::<Vec<_>>();
    let (reward, _) = rewards
        .choose(
            REWARD,
            named.reward.as_ref(),
            &taken,
            |name, column| reward::score(name, column, rewards.rows),
            answer,
        )?
        .ok_or_else(|| rewards.missing(REWARD))?;
    reward.clone_into(&mut layout.reward);
    layout.event_id = rewards.find("event_id").filter(|(name, _)| *name != reward_id).map(|(name, _)| name.to_owned());
    Ok(())
}

/// A query and its reward in each row.
fn recognise_examples(
    sample: &Sample,
    named: &Named,
    layout: &mut Layout,
    taken: &[&str],
    answer: Answer,
) -> Result<(), Unrecognised> {
    let score = |name: &str, column: &Column| {
        reward::score(name, column, sample.rows).filter(|score| *score > 0 || named.reward.is_some())
    };
    let (reward, _) =
        sample.choose(REWARD, named.reward.as_ref(), taken, score, answer)?.ok_or_else(|| sample.missing(REWARD))?;
    reward.clone_into(&mut layout.reward);
    let taken: Vec<&str> = taken.iter().copied().chain([reward]).collect();
    let score = |name: &str, column: &Column| {
        let score = names::id(name);
        (column.is_unique(sample.rows) && (score > 0 || named.id.is_some())).then_some(score)
    };
    let id = sample.choose(ID, named.id.as_ref(), &taken, score, answer)?.map(|(name, _)| name.to_owned());
    (layout.id, layout.reward_id) = (id.clone(), id);
    if layout.id.is_none() {
        layout.assumptions.push("rows have no request ID: each row is a request of its own".to_owned());
    }
    layout.reward_time.clone_from(&layout.time);
    if let Some(name) = &named.reward_time {
        layout.reward_time = choose_time(sample, REWARD_TIME, Some(name), &[], answer)?.map(str::to_owned);
    }
    if layout.time.is_none() {
        layout
            .assumptions
            .push("rows have no time: they are taken in the order of the file, a second apart".to_owned());
    }
    Ok(())
}

/// All logs of a kind have the columns that were recognised in the first.
fn check_alike(queries: &[&Sample], rewards: &[&Sample], layout: &Layout) -> Result<(), Unrecognised> {
    let lacks = |samples: &[&Sample], pointer: &str| {
        samples
            .iter()
            .find(|sample| !sample.columns.contains_key(pointer))
            .map(|sample| sample.path.display().to_string())
    };
    let of_queries = [Some(&layout.query), Some(&layout.model), layout.id.as_ref(), layout.time.as_ref()];
    let of_rewards = [Some(&layout.reward), layout.reward_id.as_ref(), layout.reward_time.as_ref()];
    let missing = of_queries.into_iter().flatten().find_map(|pointer| Some((lacks(queries, pointer)?, pointer)));
    let missing = missing
        .or_else(|| of_rewards.into_iter().flatten().find_map(|pointer| Some((lacks(rewards, pointer)?, pointer))));
    match missing {
        Some((path, pointer)) => Err(Unrecognised::Unrelated(format!(
            "{path} has no column {}, unlike the first log of its kind: inspect logs of one layout at a time",
            &pointer[1..]
        ))),
        None => Ok(()),
    }
}

fn count_models(samples: &[&Sample], layout: &mut Layout, keys: Option<&BTreeSet<String>>) {
    let mut counts: BTreeMap<String, u64> = keys.into_iter().flatten().map(|name| (name.clone(), 0)).collect();
    for sample in samples {
        for (model, number) in sample.columns[&layout.model].texts() {
            *counts.entry(model).or_default() += number;
        }
        layout.rows += sample.rows as u64;
    }
    layout.models = counts.into_iter().collect();
    layout.models.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
}

fn describe_rewards(first: &Sample, queries: &[&Sample], rewards: &[&Sample], layout: &mut Layout) {
    let sources = if rewards.is_empty() { queries } else { rewards };
    let columns: Vec<&Column> = sources.iter().map(|sample| &sample.columns[&layout.reward]).collect();
    layout.reward_scale = Rewards::of(&columns);
    let units = [(first, layout.time.as_ref()), (sources[0], layout.reward_time.as_ref())];
    let unit =
        |(sample, pointer): (&Sample, Option<&Pointer>)| sample.columns[pointer?].time_unit(sample.rows).flatten();
    layout.time_unit = units.into_iter().find_map(unit).unwrap_or_default();
    if rewards.is_empty() {
        let number: usize = columns.iter().map(|column| column.present()).sum();
        layout.rewarded = number as f64 / layout.rows.max(1) as f64;
        layout.rewards_per_query = 1;
        return;
    }
    let (Some(id), Some(time)) = (&layout.id, &layout.time) else { return };
    let (Some(reward_id), Some(reward_time)) = (&layout.reward_id, &layout.reward_time) else { return };
    layout.disorder_ms = queries
        .iter()
        .map(|sample| (sample, id, time))
        .chain(rewards.iter().map(|sample| (sample, reward_id, reward_time)))
        .map(|(sample, id, time)| disorder_ms(&sample.columns[id].keyed_times(&sample.columns[time], layout.time_unit)))
        .max()
        .unwrap_or(0);
    let mut asked = BTreeMap::new();
    for sample in queries {
        asked.extend(sample.columns[id].keyed_times(&sample.columns[time], layout.time_unit));
    }
    let (mut delays, mut numbers) = (Vec::new(), BTreeMap::<String, usize>::new());
    for sample in rewards {
        for (request, at_ms) in sample.columns[reward_id].keyed_times(&sample.columns[reward_time], layout.time_unit) {
            let Some(asked_ms) = asked.get(&request) else { continue };
            delays.push(at_ms - asked_ms);
            *numbers.entry(request).or_default() += 1;
        }
    }
    // A sample of the rewards says nothing of the queries that came after it.
    let last = delays.len();
    let covered = asked.keys().filter(|request| numbers.contains_key(*request)).count();
    layout.rewarded = covered as f64 / asked.len().max(1) as f64;
    layout.rewards_per_query = numbers.values().copied().max().unwrap_or(0);
    delays.sort_unstable();
    if last > 0 {
        layout.delays_ms = Some((delays[last / 1000], delays[last - 1 - last / 1000]));
    }
}

fn disorder_ms(times: &[(String, i64)]) -> i64 {
    let mut latest = i64::MIN;
    times.iter().fold(0, |most, (_, at_ms)| {
        latest = latest.max(*at_ms);
        most.max(latest - at_ms)
    })
}

impl Layout {
    /// The probability of each model, if they were drawn at random with their observed shares; shares that fit a split in
    /// steps of 5% are taken for that split.
    pub fn split(&self) -> BTreeMap<String, f64> {
        let total = self.models.iter().map(|(_, number)| number).sum::<u64>().max(1) as f64;
        let share = |number: u64| number as f64 / total;
        let rounded: Vec<f64> = self.models.iter().map(|(_, number)| (share(*number) * 20.0).round() / 20.0).collect();
        let fits = |((_, number), p): (&(String, u64), &f64)| {
            (share(*number) - p).abs() <= 3.0 * (p * (1.0 - p) / total).sqrt() && (*p > 0.0 || *number == 0)
        };
        let is_split = (rounded.iter().sum::<f64>() - 1.0).abs() < 1e-9 && self.models.iter().zip(&rounded).all(fits);
        let mut split: Vec<f64> = match is_split {
            true => rounded.iter().map(|p| (p * 100.0).round() / 100.0).collect(),
            false => self.models.iter().map(|(_, number)| (share(*number) * 1e4).round() / 1e4).collect(),
        };
        if let (false, Some(first)) = (is_split, split.first().copied()) {
            // The shares sum to 1 after rounding too.
            split[0] = ((first + 1.0 - split.iter().sum::<f64>()) * 1e4).round() / 1e4;
        }
        self.models.iter().map(|(name, _)| name.clone()).zip(split).collect()
    }

    /// The join window that nearly all rewards fall into, from a list of usual ones.
    pub fn window_ms(&self) -> i64 {
        let latest = self.delays_ms.map_or(0, |(_, latest)| latest);
        usual_ms(latest + latest / 2).max(USUAL_MS[0])
    }

    /// How long before their queries rewards may come.
    pub fn early_ms(&self) -> i64 {
        let earliest = self.delays_ms.map_or(0, |(earliest, _)| -earliest);
        if earliest <= 60_000 { 120_000 } else { usual_ms(earliest + earliest / 2) }
    }
}

const MINUTE_MS: i64 = 60_000;
const DAY_MS: i64 = 24 * 60 * MINUTE_MS;

/// Usual lengths of windows.
const USUAL_MS: [i64; 9] = [
    10 * MINUTE_MS,
    30 * MINUTE_MS,
    60 * MINUTE_MS,
    6 * 60 * MINUTE_MS,
    DAY_MS,
    2 * DAY_MS,
    7 * DAY_MS,
    14 * DAY_MS,
    30 * DAY_MS,
];

fn usual_ms(least_ms: i64) -> i64 {
    USUAL_MS.into_iter().find(|usual| *usual >= least_ms).unwrap_or(least_ms)
}

#[cfg(test)]
mod tests;
