//! Timestamps that lie.

use std::fs;

use serde_json::{Value, json};

use crate::site::{Site, traffic};

const CONFIG: &str = "[learner]\ndim = 4\nmodels = [\"a\", \"b\"]\n[join]\nwindow_ms = 5000\n";

fn request(id: &str, ts_ms: u64) -> (Value, Value) {
    let query = json!({
        "request_id": id, "ts_ms": ts_ms, "query": [1, 2, 3, 4], "model": "a", "propensities": {"a": 0.5, "b": 0.5},
    });
    (query, json!({"request_id": id, "ts_ms": ts_ms + 100, "reward": 1}))
}

fn replay(site: &Site, names: &[String]) -> Value {
    let files = |side: &str| names.iter().map(|name| format!("data/log/{side}/{name}.jsonl")).collect::<Vec<_>>();
    let (queries, rewards) = (files("queries"), files("rewards"));
    let mut arguments = vec!["replay", "--json", "--queries"];
    arguments.extend(queries.iter().map(String::as_str));
    arguments.push("--rewards");
    arguments.extend(rewards.iter().map(String::as_str));
    site.json(&arguments)
}

/// Requests with an event in microseconds in front, an event an hour ahead in the middle, and one of each near both.
fn poisoned() -> (Vec<Value>, Vec<Value>) {
    let (mut queries, mut rewards) = traffic(4, &["a", "b"], 0..600);
    let wrong = |id: &str, ts_ms| request(id, ts_ms);
    queries.insert(300, wrong("hour", 1_700_000_000_000 + 59 * 60_000).0);
    queries.insert(0, wrong("micros", 1_700_000_000_000_000).0);
    rewards.insert(200, wrong("nanos", 1_700_000_000_000_000_000).1);
    rewards.insert(0, wrong("past", 1).1);
    (queries, rewards)
}

#[test]
fn wrong_timestamps_cost_no_other_event_anything() {
    let clean = Site::new(CONFIG);
    clean.log("a", &traffic(4, &["a", "b"], 0..600));
    let expected = clean.learn();
    assert_eq!(expected["applied"], 480);

    let site = Site::new(CONFIG);
    site.log("a", &poisoned());
    let found = site.learn();
    for key in ["applied", "joined", "expired", "late", "pending"] {
        assert_eq!(found[key], expected[key], "{key}: {found}");
    }
    // The reward from the past has no query, the other three are dead letters with a reason.
    assert_eq!((&found["orphaned"], &found["dead_letters"]), (&json!(1), &json!(3)), "{found}");
    let letters = fs::read_dir(site.path("data/log/dead-letters")).unwrap();
    let letters: String = letters.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    let reasons: Vec<Value> = letters.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for letter in &reasons {
        assert_eq!(letter["reason"], "future-time", "{letter}");
        assert!(letter["source"].is_string() && letter["line"].is_u64(), "{letter}");
    }
    assert_eq!(reasons.len(), 3);
}

#[test]
fn the_decision_depends_on_the_log_alone() {
    let whole = Site::new(CONFIG);
    whole.log("a", &poisoned());
    let (once, replayed) = (whole.learn()["state_digest"].clone(), replay(&whole, &["a".to_owned()]));

    // In segments one after the other, read by one run, by a run each, and by a replay.
    let (queries, rewards) = poisoned();
    let segment = |events: &[Value], i: usize| {
        let from = i * events.len() / 5;
        events[from..(i + 1) * events.len() / 5].to_vec()
    };
    let (together, apart) = (Site::new(CONFIG), Site::new(CONFIG));
    let mut last = Value::Null;
    for i in 0..5 {
        let events = (segment(&queries, i), segment(&rewards, i));
        together.log(&format!("s{i}"), &events);
        apart.log(&format!("s{i}"), &events);
        last = apart.learn();
    }
    assert_eq!(together.learn()["state_digest"], once);
    assert_eq!(last["applied"], 480, "{last}");
    assert_eq!((&last["dead_letters"], &last["late"]), (&json!(3), &json!(0)), "{last}");
    let names: Vec<String> = (0..5).map(|i| format!("s{i}")).collect();
    assert_eq!(replay(&together, &names), replayed);

    // Every third line in a file of its own: they overlap in time.
    let spread = Site::new(CONFIG);
    let names: Vec<String> = (0..3).map(|i| format!("t{i}")).collect();
    for (i, name) in names.iter().enumerate() {
        let third = |events: &[Value]| events.iter().skip(i).step_by(3).cloned().collect::<Vec<_>>();
        spread.log(name, &(third(&queries), third(&rewards)));
    }
    assert_eq!(replay(&spread, &names), replayed);
}

#[test]
fn a_gap_is_followed_and_an_unconfirmed_end_waits_for_more() {
    let site = Site::new(CONFIG);
    site.log("a", &traffic(4, &["a", "b"], 0..100));
    // A night later, too few to believe them.
    let morning = 1_700_000_000_000 + 12 * 3_600_000;
    let pairs: Vec<(Value, Value)> = (0..3).map(|i| request(&format!("m{i}"), morning + 1000 * i)).collect();
    site.log("b", &pairs.into_iter().unzip());
    let kept = site.learn();
    assert_eq!((&kept["applied"], &kept["dead_letters"]), (&json!(80), &json!(0)), "{kept}");
    // At the end of a finite log nothing can confirm them any more, and nothing can become late.
    let replayed = replay(&site, &["a".to_owned(), "b".to_owned()]);
    assert_eq!((&replayed["applied"], &replayed["pending"]), (&json!(83), &json!(0)), "{replayed}");
    // Confirmed after a restart, they are learned from like all others.
    let pairs: Vec<(Value, Value)> = (3..20).map(|i| request(&format!("m{i}"), morning + 1000 * i)).collect();
    site.log("c", &pairs.into_iter().unzip());
    let followed = site.learn();
    assert_eq!((&followed["applied"], &followed["late"]), (&json!(100), &json!(0)), "{followed}");
}
