//! `pointsman params`, as a user runs it: what a file holds, and how it routes.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pointsman::event::{ModelName, Name};
use pointsman::router::{HeadTable, Outcomes, Params, Policy, Sampling, ScoreForm, uniform};
use pointsman::wire::params;
use serde_json::{Value, json};

/// Runs `pointsman params` with this standard input.
fn run(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.arg("params").args(arguments).env_remove("RUST_LOG").env("COLUMNS", "200");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that fails before it reads closes the pipe: that is no failure of the test.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn printed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_str(&printed(output)).unwrap()
}

fn golden() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats/params-1.safetensors");
    path.to_str().unwrap().to_owned()
}

fn name(text: &str) -> Name {
    Name::try_from(text).unwrap()
}

/// Every kind of score function: quadratic, with a zero eigenvalue, linear, constant, all of them, nothing.
fn made(sampling: Sampling, floor: f64) -> Params {
    let axes = |n: usize| (0..n).flat_map(|i| (0..4).map(move |j| f32::from(u8::from(i == j)))).collect();
    let all = ScoreForm {
        eigenvalues: vec![0.1],
        eigenvectors: vec![0.5, -0.5, 0.5, -0.5],
        linear: vec![0.25, 0.0, -1.0, 3.0],
        bias: 0.7,
    };
    let scores = vec![
        ScoreForm { eigenvalues: vec![2.0, 0.0, -3.5], eigenvectors: axes(3), ..ScoreForm::default() },
        ScoreForm { linear: vec![0.0, 1.0, 0.5, -2.0], ..ScoreForm::default() },
        ScoreForm { bias: -0.125, ..ScoreForm::default() },
        all,
        ScoreForm::default(),
    ];
    Params {
        space: name("default"),
        epoch: 0,
        version: 41,
        revision: 1,
        models: ["quadratic", "linear", "constant", "all", "nothing"]
            .map(|name| ModelName::try_from(name).unwrap())
            .to_vec(),
        dim: 4,
        created_ms: 951_782_400_000,
        algorithm: "log-quadratic".to_owned(),
        policy: Policy {
            sampling,
            floor,
            floor_distribution: uniform(5),
            scores,
            head: HeadTable::default(),
            outcomes: Outcomes::default(),
        },
    }
}

fn write(directory: &Path, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path: PathBuf = directory.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn show_tells_the_golden_file() {
    let shown = object(&run(&["show", &golden(), "--json"], ""));
    let expected = json!({
        "space": "shop", "epoch": 2, "version": 1234, "revision": 3, "algorithm": "hpg",
        "sampling": "inverse_gap", "inverse_gap": 30.5, "floor": 0.1,
        "floor_distribution": {"bge": 0.75, "mini.lm": 0.25},
        "created_ms": 1_731_700_000_000_u64, "created": "2024-11-15T19:46:40Z", "dim": 3, "head_queries": 0,
        "models": [
            {"name": "bge", "rank": 2, "largest_eigenvalue": 1.5, "smallest_eigenvalue": -0.5, "nuclear_norm": 2.0,
             "linear": false, "bias": 0.0},
            {"name": "mini.lm", "rank": 0, "largest_eigenvalue": null, "smallest_eigenvalue": null,
             "nuclear_norm": 0.0, "linear": true, "bias": -0.25},
        ],
    });
    assert_eq!(shown, expected);
    // The rule is as wide as the path, and that depends on where the tests run.
    let text = printed(&run(&["show", &golden()], ""));
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('─')).collect();
    let expected = "\
space         shop
epoch         2
version       1234
revision      3
algorithm     hpg
sampling      inverse_gap, g = 30.5
floor         0.1, distributed as below
created       2024-11-15T19:46:40Z
dimension     3
head queries  0

model    rank  largest eigenvalue  smallest eigenvalue  nuclear norm  linear     bias  floor share
bge         2              1.5000              -0.5000        2.0000      no        0       0.7500
mini.lm     0                   -                    -             0     yes  -0.2500       0.2500";
    assert_eq!(lines[0], format!("parameters    {}", golden()));
    assert_eq!(lines[1..].join("\n"), expected);
    let directory = tempfile::tempdir().unwrap();
    let csv = directory.path().join("params.csv");
    printed(&run(&["show", &golden(), "--csv", csv.to_str().unwrap()], ""));
    let csv = fs::read_to_string(csv).unwrap();
    let (facts, spectra) = csv.split_once("\n\n").unwrap();
    assert!(facts.starts_with("parameters,") && facts.contains("\nsampling,\"inverse_gap, g = 30.5\"\n"), "{csv}");
    let expected = "\
model,rank,largest eigenvalue,smallest eigenvalue,nuclear norm,linear,bias,floor share
bge,2,1.5000,-0.5000,2.0000,no,0,0.7500
mini.lm,0,-,-,0,yes,-0.2500,0.2500
";
    assert_eq!(spectra, expected);
}

#[test]
fn show_leaves_out_what_is_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path(), "made.safetensors", params::encode(&made(Sampling::Softmax, 0.0)));
    let shown = object(&run(&["show", &path, "--json"], ""));
    assert_eq!((&shown["sampling"], &shown["created"]), (&json!("softmax"), &json!("2000-02-29T00:00:00Z")));
    assert!(shown.get("inverse_gap").is_none() && shown.get("floor_distribution").is_none());
    let quadratic = &shown["models"][0];
    assert_eq!((&quadratic["rank"], &quadratic["nuclear_norm"]), (&json!(2), &json!(5.5)));
    assert_eq!((&quadratic["largest_eigenvalue"], &quadratic["smallest_eigenvalue"]), (&json!(2.0), &json!(-3.5)));
    let text = printed(&run(&["show", &path], ""));
    assert!(text.contains("floor         0, uniform") && !text.contains("floor share"), "{text}");
}

#[test]
fn head_queries_are_counted_and_corrected() {
    let path = golden().replace("params-1", "params-2");
    assert_eq!(object(&run(&["show", &path, "--json"], ""))["head_queries"], 2);
    assert!(printed(&run(&["show", &path], "")).contains("\nhead queries  2\n"));
    let score = |path: &str, query: &str| object(&run(&["score", "--params", path, "--query", "-"], query));
    for (query, expected) in [
        ("[0.6, 0.8, 0]", Some([0.5, -0.125])),
        ("[3, 4, 0]", Some([0.5, -0.125])),
        ("[0, 0, -7]", Some([-2.0, 4.0])),
        ("[0, 0, 7]", None),
        ("[0.6, 0.8, 0.001]", None),
    ] {
        let (with, without) = (score(&path, query), score(&golden(), query));
        let named = expected.map(|[bge, mini]| json!({"bge": bge, "mini.lm": mini}));
        assert_eq!(with.get("head_corrections"), named.as_ref(), "{query}");
        for (model, correction) in ["bge", "mini.lm"].iter().zip(expected.unwrap_or_default()) {
            let [with, without] = [&with, &without].map(|scored| scored["scores"][model].as_f64().unwrap());
            assert!((with - without - correction).abs() < 1e-12, "{query}: {with} {without}");
        }
        assert_eq!(with["propensities"] == without["propensities"], expected.is_none(), "{query}");
    }
}

#[test]
fn outcomes_are_shown_and_charged() {
    let path = golden().replace("params-1", "params-2-outcomes");
    let shown = object(&run(&["show", &path, "--json"], ""));
    assert_eq!(shown["lambda"], json!({"cost": 10.0, "latency_ms": 0.5}));
    assert_eq!(shown["models"][0]["outcomes"], json!({"cost": 0.25, "latency_ms": 3.0}));
    let text = printed(&run(&["show", &path], ""));
    assert!(text.contains("\noutcomes      cost at 10.0000, latency_ms at 0.5000\n"), "{text}");
    let row = text.lines().find(|line| line.starts_with("bge")).unwrap();
    assert!(row.ends_with("0.2500      3.0000"), "{text}");
    let score = |path: &str| object(&run(&["score", "--params", path, "--query", "-"], "[0.6, 0.8, 0]"));
    let (with, without) = (score(&path), score(&golden()));
    assert_eq!((&with["charges"], without.get("charges")), (&json!({"bge": 4.0, "mini.lm": 0.0}), None));
    for (model, charge) in [("bge", 4.0), ("mini.lm", 0.0)] {
        let [with, without] = [&with, &without].map(|scored| scored["scores"][model].as_f64().unwrap());
        assert!((without - with - charge).abs() < 1e-12, "{with} {without}");
    }
}

#[test]
fn scores_among_the_named_models() {
    let path = golden();
    let score = |more: &[&str]| run(&[&["score", "--params", &path, "--query", "-"], more].concat(), "[0.6, 0.8, 0]");
    let (all, one) = (object(&score(&[])), object(&score(&["--models", "bge"])));
    assert_eq!((&one["propensities"], &one["scores"]), (&json!({"bge": 1.0}), &all["scores"]));
    let both = object(&score(&["--models", "mini.lm,bge"]));
    assert_eq!(both, all);
    let unknown = score(&["--models", "bge,e5"]);
    let error = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(unknown.status.code() == Some(1) && error.contains("there is no model \"e5\""), "{error}");
}

/// The contract's formula, in plain loops: scores, the core distribution, and the mixture.
fn formula(params: &Params, components: &[f32]) -> [Vec<f64>; 3] {
    let norm = components.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let q: Vec<f64> = components.iter().map(|&x| f64::from(x) / norm).collect();
    let policy = &params.policy;
    let mut scores = Vec::new();
    for form in &policy.scores {
        let mut score = f64::from(form.bias);
        for (&x, q) in form.linear.iter().zip(&q) {
            score += f64::from(x) * q;
        }
        for i in 0..form.eigenvalues.len() {
            let mut product = 0.0;
            for (j, q) in q.iter().enumerate() {
                product += f64::from(form.eigenvectors[i * params.dim + j]) * q;
            }
            score += f64::from(form.eigenvalues[i]) * product * product;
        }
        scores.push(score);
    }
    let count = scores.len();
    let best = (0..count).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
    let mut core = vec![0.0; count];
    match policy.sampling {
        Sampling::Softmax => {
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            for m in 0..count {
                core[m] = scores[m].exp() / sum;
            }
        }
        Sampling::InverseGap { gap } => {
            for m in (0..count).filter(|&m| m != best) {
                core[m] = 1.0 / (count as f64 + gap * (scores[best] - scores[m]));
            }
            core[best] = 1.0 - core.iter().sum::<f64>();
        }
    }
    let f = policy.floor;
    let mixed = (0..count).map(|m| (1.0 - f) * core[m] + f * policy.floor_distribution[m]).collect();
    [scores, core, mixed]
}

#[test]
fn scores_follow_the_formula_however_the_query_comes() {
    let directory = tempfile::tempdir().unwrap();
    let decoded = params::decode(&fs::read(golden()).unwrap()).unwrap();
    let mut cases = vec![(golden(), decoded)];
    for (i, sampling) in [Sampling::Softmax, Sampling::InverseGap { gap: 7.0 }].into_iter().enumerate() {
        for floor in [0.0, 0.2] {
            let params = made(sampling, floor);
            let file = format!("{i}-{floor}.safetensors");
            cases.push((write(directory.path(), &file, params::encode(&params)), params));
        }
    }
    for (path, params) in &cases {
        let query = &[0.3_f32, -1.7, 2.5, 0.04][..params.dim];
        let bytes: Vec<u8> = query.iter().flat_map(|x| x.to_le_bytes()).collect();
        let base64 = json!(STANDARD.encode(bytes));
        let event = json!({"request_id": "r-1", "ts_ms": 5, "query": query, "model": "gone", "more": {}});
        let mapped = json!({"meta": {"embedding": base64}});
        let score = |text: &Value, more: &[&str]| {
            let file = write(directory.path(), "query.json", text.to_string());
            let from_file = object(&run(&[&["score", "--params", path, "--query", &file], more].concat(), ""));
            let line = format!("{text}\n");
            let from_input = object(&run(&[&["score", "--params", path, "--query", "-"], more].concat(), &line));
            assert_eq!(from_file, from_input, "{text}");
            from_file
        };
        let found = score(&json!(query), &[]);
        for text in [base64.clone(), event, json!({"query": base64})] {
            assert_eq!(score(&text, &[]), found, "{text}");
        }
        assert_eq!(score(&mapped, &["--set", "events.fields.query=/meta/embedding"]), found);

        let [scores, core, mixed] = formula(params, query);
        assert_eq!((&found["space"], &found["params_version"]), (&json!(params.space), &json!(params.version)));
        let mut expected = vec![("scores", scores), ("propensities", mixed)];
        if params.policy.floor > 0.0 {
            expected.push(("policy", core));
        }
        assert_eq!(found.as_object().unwrap().len(), 2 + expected.len(), "{found}");
        for (key, values) in expected {
            assert_eq!(found[key].as_object().unwrap().len(), params.models.len());
            for (model, value) in params.models.iter().zip(values) {
                let found = found[key][model.as_str()].as_f64().unwrap();
                assert!((found - value).abs() < 1e-12, "{path}: {key} of {model} is {found}, not {value}");
            }
        }
    }
}

#[test]
fn bad_queries_and_files_exit_with_1_and_say_why() {
    let golden = golden();
    for (query, expected) in [
        ("[1, 2]", "the query has 2 components, but the space has dim = 3"),
        ("[1, 2, 3, 4]", "parameters of space shop"),
        ("[0, 0, -0.0]", "zero vector"),
        ("[]", "zero vector"),
        ("[1e39, 0, 0]", "the query contains a number that is not finite"),
        ("\"AADAfwAAgD8AAIA/\"", "the query contains a number that is not finite"),
        ("{\"query\":\"AADAfwAAgD8AAIA/\"}", "/query contains a number that is not finite"),
        ("[NaN, 0, 1]", "expected one JSON value: an array of numbers"),
        ("AACAPwAAgD8AAIA/", "expected one JSON value: an array of numbers"),
        ("", "standard input contains no valid query"),
        ("[1, 2, 3]\n[1, 2, 3]\n", "trailing characters at line 2"),
        ("\"AACAPwAA\"", "the query must be an array of numbers or base64"),
        ("7", "the query must be an array of numbers or base64"),
        ("[1, \"x\", 3]", "the query must be an array of numbers or base64"),
        ("{\"query\":{}}", "/query must be an array of numbers or base64"),
        ("{\"embedding\":[1, 2, 3]}", "/query is missing"),
    ] {
        check(&["score", "--params", &golden, "--query", "-"], query, 1, expected);
    }
    let limit = ["score", "--params", &golden, "--query", "-", "--set", "events.bytes_max=64"];
    check(&limit, &format!("[1, 2, 3{}]", " ".repeat(64)), 1, "larger than events.bytes_max = 64 bytes");
    check(&["score", "--params", &golden, "--query", "/nowhere.json"], "", 1, "cannot read /nowhere.json");

    let directory = tempfile::tempdir().unwrap();
    let bytes = fs::read(&golden).unwrap();
    let changed = |from: &str, to: &str| {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect(from);
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    };
    let place = directory.path().to_str().unwrap().to_owned();
    for (file, expected) in [
        ("/nowhere.safetensors".to_owned(), "cannot read /nowhere.safetensors"),
        (place, "cannot read"),
        (
            write(directory.path(), "empty", ""),
            "empty is not a valid parameter file: not a safetensors file: header too small",
        ),
        (
            write(directory.path(), "cut", &bytes[..bytes.len() - 1]),
            "cut is not a valid parameter file: not a safetensors file",
        ),
        (
            write(directory.path(), "text", "[1, 2, 3] and more of it"),
            "text is not a valid parameter file: not a safetensors file",
        ),
        (write(directory.path(), "other", changed("pointsman.params", "pointsman.parade")), "metadata format:"),
        (write(directory.path(), "dim", changed("\"dim\":\"3\"", "\"dim\":\"4\"")), "does not match dim = 4"),
        (write(directory.path(), "floor", changed("\"0.1\"", "\"1.1\"")), "metadata floor: 1.1 is not between 0 and 1"),
    ] {
        check(&["show", &file], "", 1, expected);
        check(&["show", &file, "--json"], "", 1, expected);
        check(&["score", "--params", &file, "--query", "-"], "[1, 2, 3]", 1, expected);
    }
}

#[test]
fn bad_usage_exits_with_2() {
    let golden = golden();
    for (arguments, expected) in [
        (&[][..], "Usage: pointsman params"),
        (&["shwo", &golden][..], "show"),
        (&["show"][..], "<FILE>"),
        (&["show", &golden, &golden][..], "unexpected argument"),
        (&["score", "--params", &golden][..], "--query"),
        (&["score", "--query", "-"][..], "--params"),
        (&["score", "--params", &golden, "--query", "-", "--set", "events.fields.query=query"][..], "JSON pointer"),
    ] {
        check(arguments, "[1, 2, 3]", 2, expected);
    }
}

fn check(arguments: &[&str], input: &str, code: i32, expected: &str) {
    let output = run(arguments, input);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?} {input}: {said}");
    assert!(said.contains(expected), "{arguments:?} {input}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?} {input}");
}

#[test]
fn help_teaches_by_example() {
    for (command, example) in [
        ("show", "pointsman params show data/log/params/default.safetensors"),
        ("score", "echo '[0.12, -0.03]' | pointsman params score --params default.safetensors --query -"),
    ] {
        let help = printed(&run(&[command, "--help"], ""));
        assert!(help.contains(example), "{help}");
    }
}
