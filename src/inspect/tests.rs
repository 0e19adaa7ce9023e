use serde_json::{Value, json};

use super::*;

/// Logs of 40 rows each, from a function of the row's number.
fn sample(name: &str, row: impl Fn(u64) -> Value) -> Sample {
    let mut sample = Sample::new(PathBuf::from(name));
    (0..40).for_each(|i| sample.add(&row(i)));
    sample.finish();
    sample
}

fn vector(i: u64) -> Vec<f64> {
    (0..8).map(|j| f64::from(u32::try_from(i * 8 + j).unwrap()).sin()).collect()
}

fn model(i: u64) -> &'static str {
    ["BAAI/bge-small-en-v1.5", "openai:text-embedding-3-large"][usize::from(i % 4 == 3)]
}

/// The layout, taking the first candidate of every question; the questions that were asked.
fn layout(samples: &[Sample], named: &Named) -> (Result<Layout, String>, Vec<String>) {
    let mut asked = Vec::new();
    let mut answer = |question: &Question| {
        asked.push(format!("{} of {}", question.wanted, question.path.display()));
        0
    };
    let layout = recognise(samples, named, &mut answer).map_err(|error| error.to_string());
    (layout, asked)
}

/// What was found, one word a field.
fn found(layout: &Layout) -> String {
    let of = |pointer: &Option<Pointer>| pointer.clone().unwrap_or_else(|| "-".to_owned());
    format!(
        "{} {}d {} id {} time {} p {} p_chosen {} | reward {} id {} time {} | {:?}",
        layout.query,
        layout.dim,
        layout.model,
        of(&layout.id),
        of(&layout.time),
        of(&layout.propensities),
        of(&layout.propensity),
        layout.reward,
        of(&layout.reward_id),
        of(&layout.reward_time),
        layout.time_unit,
    )
}

#[test]
fn layouts_of_many_logs() {
    let text = |x: Vec<f64>| x.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let spread = |i: u64| {
        let numbers = vector(i).into_iter().enumerate().map(|(j, x)| (format!("emb_{j}"), json!(x)));
        let others = [("arm".to_owned(), json!(model(i))), ("stars".to_owned(), json!(1 + i % 5))];
        Value::Object(numbers.chain(others).collect())
    };
    let cases: Vec<(&str, Vec<Sample>, &str)> = vec![
        (
            "searches and clicks in logs of their own",
            vec![
                sample("searches", |i| {
                    json!({"search_id": format!("s{i}"), "user_id": i % 7, "created_at": "2026-01-31T12:00:00Z",
                           "query_embedding": vector(i), "doc_embedding": vector(i + 1), "encoder": model(i), "country": "de"})
                }),
                sample("clicks", |i| {
                    json!({"search_id": format!("s{}", i / 2), "clicked_at": "2026-01-31T12:00:05Z", "item_id": i % 3,
                           "event": (["click", "purchase"][usize::from(i % 9 == 0)])})
                }),
            ],
            "/query_embedding 8d /encoder id /search_id time /created_at p - p_chosen - | reward /event id /search_id time \
             /clicked_at | Ms",
        ),
        (
            "the layout of Pointsman",
            vec![
                sample("queries", |i| {
                    json!({"request_id": format!("r{i}"), "ts_ms": 1_731_700_000_000_u64 + i, "query": vector(i),
                           "model": model(i), "propensities": {(model(0)): 0.7, (model(3)): 0.3}})
                }),
                sample(
                    "rewards",
                    |i| json!({"request_id": format!("r{i}"), "ts_ms": 1_731_700_000_500_u64 + i, "reward": 0.1 * (i % 10) as f64}),
                ),
            ],
            "/query 8d /model id /request_id time /ts_ms p /propensities p_chosen - | reward /reward id /request_id time /ts_ms | \
             Ms",
        ),
        (
            "rewards in the same rows, nested, with the probability of the chosen model",
            vec![sample("log", |i| {
                json!({"meta": {"trace": format!("t{i}"), "at": 1_731_700_000 + i}, "ctx": {"vec": vector(i)},
                       "route": {"model": model(i), "prob": if i % 4 == 3 { 0.25 } else { 0.75 }}, "feedback": {"label": i % 2}})
            })],
            "/ctx/vec 8d /route/model id /meta/trace time /meta/at p - p_chosen /route/prob | reward /feedback/label id \
             /meta/trace time /meta/at | S",
        ),
        (
            "numbered columns, no ID, no time",
            vec![sample("table", spread)],
            "/emb 8d /arm id - time - p - p_chosen - | reward /stars id - time - | Ms",
        ),
        (
            "a table in which everything is text",
            vec![sample("table", |i| {
                json!({"qid": format!("{:04}", i), "ts": (1_731_700_000_000_000_u64 + i).to_string(), "vector": text(vector(i)),
                       "variant": model(i), "clicked": (if i % 3 == 0 { "True" } else { "False" })})
            })],
            "/vector 8d /variant id /qid time /ts p - p_chosen - | reward /clicked id /qid time /ts | Us",
        ),
    ];
    for (case, samples, expected) in cases {
        let (layout, _) = layout(&samples, &Named::default());
        assert_eq!(layout.map(|layout| found(&layout)).as_deref(), Ok(expected), "{case}");
    }
}

#[test]
fn doubts_become_questions_and_names_answer_them() {
    let log = || {
        [sample("log", |i| {
            json!({"id": i, "ts": 1_731_700_000 + i, "a": vector(i), "b": vector(i), "x": model(i), "y": (["p", "q"][(i % 2) as usize]),
                   "reward": i % 2})
        })]
    };
    let (guessed, asked) = layout(&log(), &Named::default());
    assert_eq!(asked, ["the query embedding of log", "the chosen model of log"]);
    assert_eq!(guessed.map(|layout| (layout.query, layout.model)), Ok(("/a".to_owned(), "/x".to_owned())));
    let named = Named { vector: Some("b".to_owned()), model: Some("/y".to_owned()), ..Named::default() };
    let (answered, asked) = layout(&log(), &named);
    assert_eq!(answered.map(|layout| (layout.query, layout.model)), Ok(("/b".to_owned(), "/y".to_owned())));
    assert!(asked.is_empty(), "{asked:?}");
}

#[test]
fn what_is_missing_is_named() {
    let row = |i: u64| json!({"id": format!("r{i}"), "ts": 1_731_700_000 + i, "vec": vector(i), "model": model(i), "reward": 1});
    let without = |key: &'static str| {
        sample("log", move |i| {
            let mut row = row(i);
            row.as_object_mut().unwrap().remove(key);
            row
        })
    };
    let named = |name: &str| Named { vector: Some(name.to_owned()), ..Named::default() };
    let other_ids = sample("rewards", |i| json!({"request": format!("x{i}"), "ts": 1_731_700_000 + i, "reward": 1}));
    for (samples, named, expected) in [
        (vec![without("vec")], Named::default(), "no column looks like the query embedding: name it with --vector"),
        (vec![without("model")], Named::default(), "no column looks like the chosen model: name it with --model"),
        (vec![without("reward")], Named::default(), "no column looks like the reward: name it with --reward"),
        (vec![sample("log", row)], named("vek"), "--vector vek: there is no such column; the columns are id, model"),
        (vec![sample("log", row)], named("model"), "--vector model: it does not hold the query embedding"),
        (vec![sample("queries", row), other_ids], Named::default(), "shares values with id of queries"),
        (vec![Sample::new(PathBuf::from("empty"))], Named::default(), "empty: the log has no rows"),
    ] {
        let (layout, _) = layout(&samples, &named);
        let problem = layout.unwrap_err();
        assert!(problem.contains(expected), "{problem}\ndoes not contain\n{expected}");
    }
}

#[test]
fn shares_that_fit_a_split_are_taken_for_it() {
    let layout = |counts: &[(&str, u64)]| Layout {
        models: counts.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect(),
        ..Layout::default()
    };
    for (counts, expected) in [
        (vec![("a", 5013), ("b", 2967), ("c", 2020)], vec![0.5, 0.3, 0.2]),
        (vec![("a", 3340), ("b", 3330), ("c", 3330)], vec![0.334, 0.333, 0.333]),
        (vec![("a", 10), ("b", 0)], vec![1.0, 0.0]),
    ] {
        let split: Vec<f64> = layout(&counts).split().into_values().collect();
        assert_eq!(split, expected, "{counts:?}");
        assert!((split.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    }
}

#[test]
fn windows_cover_the_delays_of_rewards() {
    for (delays_ms, window_ms, early_ms) in [
        (None, 600_000, 120_000),
        (Some((-500, 30_000)), 600_000, 120_000),
        (Some((0, 3_600_000)), 6 * 3_600_000, 120_000),
        (Some((-600_000, 86_400_000)), 2 * 86_400_000, 1_800_000),
        (Some((0, 100 * DAY_MS)), 150 * DAY_MS, 120_000),
    ] {
        let layout = Layout { delays_ms, ..Layout::default() };
        assert_eq!((layout.window_ms(), layout.early_ms()), (window_ms, early_ms), "{delays_ms:?}");
    }
}

#[test]
fn rewards_speak_for_themselves() {
    let of = |values: &[Value]| {
        let mut sample = Sample::new(PathBuf::from("rewards"));
        values.iter().for_each(|value| sample.add(&json!({"reward": value})));
        Rewards::of(&[&sample.columns["/reward"]])
    };
    for (values, range, is_success_only) in [
        (vec![json!(0), json!(1)], [0.0, 1.0], false),
        (vec![json!(1), json!(1)], [0.0, 1.0], true),
        (vec![json!(true), json!(false)], [0.0, 1.0], false),
        (vec![json!(1), json!(5), json!(3)], [1.0, 5.0], false),
        (vec![json!(-1), json!(1)], [-1.0, 1.0], false),
        (vec![json!(0), json!(19.9)], [0.0, 19.9], false),
        (vec![json!("click"), json!("purchase")], [0.0, 1.0], true),
        (vec![json!("view"), json!("click")], [0.0, 1.0], false),
    ] {
        let rewards = of(&values);
        assert_eq!((rewards.range(), rewards.is_success_only()), (range, is_success_only), "{values:?}");
    }
    let values = of(&[json!("impression"), json!("click"), json!("add_to_cart"), json!("purchase")]).values();
    assert_eq!(values.into_values().collect::<Vec<_>>(), [0.6, 0.3, 0.0, 1.0]);
}
