//! A real browser, without a window, driven by the DevTools protocol over a pair of pipes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tool;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Chromium, gone with this value.
pub struct Browser {
    child: Child,
    commands: File,
    answers: Receiver<Value>,
    session: String,
    number: u64,
    complaints: Vec<String>,
    _profile: TempDir,
}

/// Whether there is one.
pub fn possible() -> bool {
    tool::possible("the page", &["chromium"])
}

impl Browser {
    /// A browser with one empty page. Ask [`possible`] first.
    pub fn start() -> Self {
        let profile = tempfile::tempdir().unwrap();
        let ([its_in, our_out], [our_in, its_out]) = (pipe(), pipe());
        let mut command = Command::new("chromium");
        command
            .args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"])
            .args(["--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // The protocol's places for the pipes are 3 and 4. What is moved there first must not be lost in the second
        // move, hence the detour over high numbers.
        let place = move || unsafe {
            let (high_in, high_out) = (libc::fcntl(its_in, libc::F_DUPFD, 64), libc::fcntl(its_out, libc::F_DUPFD, 64));
            let placed = libc::dup2(high_in, 3) == 3 && libc::dup2(high_out, 4) == 4;
            if placed { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        unsafe { command.pre_exec(place) };
        let child = command.spawn().unwrap();
        let (commands, answers) = unsafe {
            libc::close(its_in);
            libc::close(its_out);
            (File::from_raw_fd(our_out), File::from_raw_fd(our_in))
        };
        let (told, heard) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                if told.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut browser = Self {
            child,
            commands,
            answers: heard,
            session: String::new(),
            number: 0,
            complaints: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Runtime.enable", "Log.enable", "Page.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Opens an address in a window of this width.
    pub fn open(&mut self, url: &str, width: u32) {
        let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        self.call("Page.navigate", json!({"url": url}));
        self.wait_for("document.readyState === 'complete'");
    }

    /// The colours that the reader prefers: light or dark.
    pub fn prefer(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// The value of an expression.
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_for(&mut self, expression: &str) {
        let start = Instant::now();
        while self.eval(expression) != json!(true) {
            let shown = || "document.body.innerText";
            assert!(start.elapsed() < PATIENCE, "never: {expression}\n{}", self.eval(shown()));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Types into a field, as a person does.
    pub fn fill(&mut self, id: &str, text: &str) {
        self.eval(&format!("document.getElementById('{id}').focus(), document.getElementById('{id}').select(), true"));
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses a key in whatever has the focus.
    pub fn press(&mut self, key: &str, text: &str) {
        for (kind, text) in [("keyDown", text), ("keyUp", "")] {
            let code = if key == "Enter" { 13 } else { 9 };
            let event = json!({"type": kind, "key": key, "code": key, "text": text, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// A picture of the whole page, kept under target/page.
    pub fn picture(&mut self, name: &str) -> PathBuf {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/page").join(format!("{name}.png"));
        let bytes = self.capture(json!({"format": "png", "captureBeyondViewport": true}));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// A picture of the top of the page, as PNG.
    pub fn top(&mut self, width: u32, height: u32) -> Vec<u8> {
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        self.capture(json!({"format": "png", "captureBeyondViewport": true, "clip": clip}))
    }

    fn capture(&mut self, asked: Value) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", asked);
        base64::engine::general_purpose::STANDARD.decode(shot["data"].as_str().unwrap()).unwrap()
    }

    /// What the console has complained of since the last time.
    pub fn complaints(&mut self) -> Vec<String> {
        // What was said before is heard before this answer.
        self.eval("true");
        std::mem::take(&mut self.complaints)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({"id": self.number, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{method} was never answered"));
            if answer["id"] == json!(self.number) {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(params.to_string()),
            Some("Runtime.consoleAPICalled") if params["type"] == "error" || params["type"] == "warning" => {
                self.complaints.push(params["args"].to_string());
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.complaints.push(params["entry"].to_string());
            }
            _ => {}
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both ends of a pipe, neither inherited by other children.
fn pipe() -> [RawFd; 2] {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    ends
}
