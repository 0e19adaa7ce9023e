//! The page of learner and router, in a real browser, under real load.

use std::fs;
use std::io::Write;
use std::process::Command;

use serde_json::{Value, json};

use crate::browser::{self, Browser};
use crate::picture;
use crate::sidecar::{Client, Process, free_port, write_config};
use crate::stack::{Stack, WORLD};

fn number(browser: &mut Browser, tile: &str) -> f64 {
    let read = format!(
        "[...document.querySelectorAll('#tiles div')].find(div => div.firstChild.textContent === '{tile}')
            .lastChild.firstChild.textContent.replaceAll(',', '')"
    );
    browser.eval(&read).as_str().unwrap().parse().unwrap_or(f64::NAN)
}

/// Numbers move: the tile shows more than it did.
fn await_growth(browser: &mut Browser, tile: &str) {
    browser.wait_for(&format!("document.querySelector('#tiles')?.innerText.includes('{tile}') ?? false"));
    let before = number(browser, tile);
    let start = std::time::Instant::now();
    while number(browser, tile).max(0.0) <= before.max(0.0) {
        assert!(start.elapsed().as_secs() < 60, "{tile} stays {before}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

fn await_at_least(browser: &mut Browser, tile: &str, least: f64) {
    let start = std::time::Instant::now();
    while number(browser, tile).max(0.0) < least {
        assert!(start.elapsed().as_secs() < 300, "{tile} never comes to {least}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// What a reader who cannot see, or has only keys, needs; and text that stands out from its ground.
const SOUND: &str = r#"(() => {
  const wrong = [], seen = node => node.getClientRects().length > 0;
  const all = selector => [...document.querySelectorAll(selector)].filter(seen);
  for (const node of all("input, textarea")) if (!node.labels.length) wrong.push("no label: " + node.id);
  for (const node of all("button")) if (!node.textContent.trim()) wrong.push("a button without a name");
  for (const node of all("svg")) if (node.getAttribute("aria-hidden") !== "true" && !node.getAttribute("aria-label")) wrong.push("a drawing without a description");
  for (const node of all("section")) if (!document.getElementById(node.getAttribute("aria-labelledby"))?.textContent) wrong.push("a section without a name");
  if (all("main").length !== 1 || all("h1").length !== 1) wrong.push("landmarks");
  const scroll = document.documentElement.scrollWidth - innerWidth;
  if (scroll > 0) wrong.push(`wider than the window by ${scroll}`);
  const rgb = text => (text.match(/[\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * x + .7152 * y + .0722 * z; };
  const ground = node => { for (; node; node = node.parentElement) { const c = rgb(getComputedStyle(node).backgroundColor); if (c.length === 3 || c[3] > 0) return c; } return rgb(getComputedStyle(document.documentElement).backgroundColor); };
  for (const node of all("body *")) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) || node.closest("script, style, .unseen, .skip")) continue;
    const style = getComputedStyle(node), ink = light(rgb(node.namespaceURI.endsWith("svg") ? style.fill : style.color)), paper = light(ground(node));
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${node.textContent.trim().slice(0, 30)}`);
  }
  return [...new Set(wrong)];
})()"#;

fn check_looks(browser: &mut Browser, url: &str, name: &str, settled: &str) {
    for (scheme, width) in [("light", 1280), ("dark", 1280), ("light", 390)] {
        browser.prefer(scheme);
        browser.open(url, width);
        browser.wait_for(settled);
        assert_eq!(browser.eval(SOUND), json!([]), "{name} in {scheme}, {width} wide");
        let picture = browser.picture(&format!("{name}-{scheme}-{width}"));
        assert!(fs::metadata(picture).unwrap().len() > 20_000, "an empty picture");
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn the_page_shows_learner_and_router_at_work() {
    if !browser::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let stack = Stack::start(dir.path());
    stack.write_bad_events();
    let mut browser = Browser::start();

    let learner = format!("http://127.0.0.1:{}/", stack.learner);
    browser.open(&learner, 1280);
    await_growth(&mut browser, "Examples learned");
    browser.wait_for("document.querySelector('#health').dataset.state === 'good'");
    browser.wait_for(
        "document.querySelectorAll('#dead tr').length === 2 && document.querySelectorAll('#dead b').length === 0",
    );
    browser.wait_for("document.querySelectorAll('#snapshots tr').length > 2");
    // What the server tells of its log files: a router writes them, the learner keeps up.
    browser.wait_for("!document.getElementById('unread-card').hidden && document.getElementById('lags-card').hidden");
    browser.wait_for("document.querySelector('#tiles').innerText.includes('bytes of log files')");
    browser.eval(
        "paused = true, now.unread = {query_bytes: 1200, reward_bytes: 34, logs: [['queries/a.jsonl#0f', 1200], ['rewards/<b>.jsonl#1e', 34]]}, show(), true",
    );
    assert_eq!(number(&mut browser, "Backlog"), 1234.0);
    let listed = browser.eval("[...document.querySelectorAll('#unread td')].map(cell => cell.textContent)");
    assert_eq!(listed, json!(["queries/a.jsonl", "1,200", "rewards/<b>.jsonl", "34"]));
    browser.eval("document.getElementById('pause').click(), true");
    browser.wait_for("document.querySelectorAll('#spectra .panel').length === 4");
    browser.wait_for(
        "document.querySelectorAll('#traffic path').length === 4 && !!document.querySelector('#reward path')",
    );
    // An estimate of the lift, put into what the server told: a line, its band, and zero.
    browser.eval(
        "paused = true, now.lift = {policy: .61, best_constant: 'bge', best: .55, lift: .06, lower: .02, upper: .1, examples: 900},
         points.forEach((x, i) => x.of_space && (x.of_space.lift = [.06, .06 - .2 / (i + 2), .06 + .2 / (i + 2)])), show(), true",
    );
    let drawn = "['.band', '.line', '.limit'].every(part => document.querySelector('#lift ' + part))";
    assert_eq!(browser.eval(drawn), json!(true));
    assert_eq!(
        browser.eval("document.querySelector('#lift-says').textContent.includes('with bge, the best single model')"),
        json!(true)
    );
    browser.picture("learner-lift");
    browser.eval("document.getElementById('pause').click(), true");
    // By keys alone: a search, and another space.
    browser.fill("find", "sho");
    browser.wait_for("document.querySelectorAll('#spaces tr').length === 1");
    browser.eval("document.querySelector('#spaces button').focus(), true");
    browser.press("Enter", "\r");
    browser.wait_for("document.querySelector('h2 .space-name').textContent === 'shop'");
    browser.wait_for("document.querySelectorAll('#traffic path').length === 4");
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let settled =
        "!!document.querySelector('#reward path') && document.querySelectorAll('#spectra .panel').length === 4";
    check_looks(&mut browser, &learner, "learner", settled);
    // Enough for curves worth a picture, where it is kept.
    let examples = if picture::is_refresh() { 9000.0 } else { 500.0 };
    await_at_least(&mut browser, "Examples learned", examples);
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        browser.open(&learner, picture::WIDTH);
        browser.wait_for(settled);
        picture::show(&mut browser, &format!("page-{scheme}"), "section:has(#lift)");
    }

    let router = format!("http://127.0.0.1:{}/", stack.router);
    browser.open(&router, 1280);
    await_growth(&mut browser, "Decisions");
    browser.fill("vector", "1 0 0 0  0 0 0 0  0 0 0 0  0 0 0 2");
    browser.eval("document.getElementById('try-go').focus(), true");
    browser.press("Enter", "\r");
    browser.wait_for("document.querySelectorAll('#try-bars > div').length === 4");
    let shown = browser.eval("[...document.querySelectorAll('#try-bars .num')].map(x => parseFloat(x.textContent))");
    let sum: f64 = shown.as_array().unwrap().iter().map(|share| share.as_f64().unwrap()).sum();
    assert!((sum - 100.0).abs() < 0.5, "{shown}");
    browser.fill("vector", "[1, 2]");
    browser.press("Tab", "");
    browser.press("Enter", "\r");
    browser.wait_for("document.getElementById('try-problem').textContent.includes('16')");
    // The refusal of a vector is the one thing that the console may tell.
    let told = browser.complaints();
    assert!(told.iter().all(|line| line.contains("/v1/explain") && line.contains("422")), "{told:?}");
    let settled =
        "document.querySelectorAll('#traffic path').length === 4 && !!document.querySelector('#latency path')";
    check_looks(&mut browser, &router, "router", settled);
}

#[test]
fn one_page_shows_learner_and_router_of_one_process() {
    if !browser::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, WORLD);
    let up = Process::start(&config, &["up", "--demo"]);
    Client::new(port).await_status("/ready", 200);
    let url = format!("http://127.0.0.1:{port}/");
    let mut browser = Browser::start();
    browser.open(&url, 1280);
    await_growth(&mut browser, "Examples learned");
    await_growth(&mut browser, "Decisions");
    assert_eq!(browser.eval("document.getElementById('role').textContent"), json!("learner and router"));
    // By version: what the router routes by has been learned here.
    let counted = "Number(document.querySelector('#spaces tr td:nth-child(2)').textContent.replaceAll(',', ''))";
    browser.wait_for(&format!("{counted} > 0"));
    browser.eval("document.getElementById('try-random').click(), true");
    browser.wait_for("document.querySelectorAll('#try-bars > div').length === 4");
    let settled = "['#decisions', '#rate', '#latency', '#reward', '#traffic'].every(plot => document.querySelector(plot + ' path'))
        && document.querySelectorAll('#spectra .panel').length === 4 && !document.querySelector('[data-role][hidden]')";
    check_looks(&mut browser, &url, "up", settled);
    up.terminate();
}

#[test]
fn a_token_is_asked_for_and_kept_in_the_tab() {
    if !browser::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, WORLD);
    let _learn = Process::start(&config, &["learn", "--set", "http.token=open-sesame"]);
    Client::new(port).await_status("/ready", 200);
    let url = format!("http://127.0.0.1:{port}/");
    let mut browser = Browser::start();
    browser.open(&url, 800);
    let asks = "!document.getElementById('token-form').hidden && document.getElementById('all').hidden";
    browser.wait_for(asks);
    browser.fill("token", "wrong");
    browser.press("Enter", "\r");
    browser.wait_for("document.getElementById('token-problem').textContent !== ''");
    assert_eq!(browser.eval(SOUND), json!([]));
    browser.picture("token");
    browser.fill("token", "open-sesame");
    browser.press("Enter", "\r");
    browser.wait_for("!document.getElementById('all').hidden && document.getElementById('token-form').hidden");
    let told = browser.complaints();
    assert!(told.iter().all(|line| line.contains("401")), "{told:?}");
    browser.open(&url, 800);
    browser.wait_for("!document.getElementById('all').hidden");
    assert_eq!(browser.complaints(), Vec::<String>::new(), "the tab has kept it");
}

#[test]
fn a_report_looks_right_and_its_tables_copy_cell_by_cell() {
    if !browser::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let small = ["demo", "--rounds", "2000", "--dim", "8", "--models", "3", "--report"];
    let mut demo = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    assert!(demo.args(small).arg(dir.path()).output().unwrap().status.success());
    let mut browser = Browser::start();
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        browser.open(&format!("file://{}", dir.path().join("demo.html").display()), 1000);
        browser.picture(&format!("report-{scheme}"));
    }
    let copied =
        browser.eval("getSelection().selectAllChildren(document.querySelector('table')), String(getSelection())");
    let lines: Vec<&str> = copied.as_str().unwrap().lines().collect();
    let cells = |line: &&str| line.split('\t').count();
    assert!(lines.len() > 5 && cells(&lines[0]) > 2, "{copied}");
    assert!(lines.iter().all(|line| cells(line) == cells(&lines[0])), "{copied}");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn events_are_told_as_they_are_and_end_when_the_router_stops() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, WORLD);
    let route = Process::start(&config, &["route", "--serve-uniform", "--set", "http.token=t"]);
    Client::new(port).await_status("/ready", 200);
    assert_eq!(Client::new(port).get("/v1/events").unwrap().0, 401);
    let address = format!("127.0.0.1:{port}");
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET /v1/events?space=none HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer t\r\n\r\n").unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stream)).map(Result::unwrap);
    let data = |line: String| line.strip_prefix("data: ").map(|data| serde_json::from_str::<Value>(data).unwrap());
    assert!(lines.find_map(data).unwrap()["router"].is_array(), "the past comes first");
    let now = lines.find_map(data).unwrap();
    assert_eq!((&now["router"]["role"], &now["router"]["ready"]), (&json!("router"), &json!(true)));
    assert_eq!(now.as_object().unwrap().len(), 1, "{now}");
    // It does not wait for those who look on.
    let begun = std::time::Instant::now();
    route.terminate();
    lines.for_each(drop);
    assert!(begun.elapsed().as_secs() < 4, "it waited for a stream");
}
