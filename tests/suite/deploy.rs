//! The container image and the compose stack name only what there is: commands, flags, keys, files, ports, metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::json;
use serde_yaml_ng::Value;

use crate::sidecar::{Client, Process, free_port, write_config};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(text: &str) -> Value {
    let mut value: Value = serde_yaml_ng::from_str(text).unwrap();
    value.apply_merge().unwrap();
    value
}

/// `${NAME:-default}` as it is where nobody sets NAME.
fn interpolate(text: &str) -> String {
    let mut parts = text.split("${");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| {
        let (variable, rest) = part.split_once('}').expect("${ without }");
        let (_, default) = variable.split_once(":-").unwrap_or_else(|| panic!("{variable} has no default"));
        done + default + rest
    })
}

fn strings(value: &Value) -> Vec<String> {
    let string = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value:?} is no string")).to_owned();
    value.as_sequence().map(|items| items.iter().map(string).collect()).unwrap_or_default()
}

fn keys(value: &Value) -> BTreeSet<String> {
    let key = |key: &Value| key.as_str().unwrap().to_owned();
    value.as_mapping().map(|map| map.keys().map(key).collect()).unwrap_or_default()
}

fn compose() -> Value {
    yaml(&interpolate(&read("docker-compose.yml")))
}

#[derive(Debug)]
struct Service {
    name: String,
    image: String,
    command: Vec<String>,
    environment: BTreeMap<String, String>,
    /// Where from and where to.
    volumes: Vec<(String, String)>,
    /// On this machine and in the container.
    ports: Vec<(String, String)>,
    all: Value,
}

impl Service {
    fn new(name: &str, all: &Value) -> Self {
        let scalar = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            other => panic!("{name}: {other:?} must be a string or a number"),
        };
        let environment = all["environment"].as_mapping().into_iter().flatten();
        let pair = |text: String| {
            let mut parts = text.rsplit(':');
            let inside = parts.next().unwrap().to_owned();
            (parts.next().unwrap_or_else(|| panic!("{name}: {text}")).to_owned(), inside)
        };
        Self {
            name: name.to_owned(),
            image: all["image"].as_str().unwrap_or_else(|| panic!("{name} has no image")).to_owned(),
            command: strings(&all["command"]),
            environment: environment.map(|(key, value)| (scalar(key), scalar(value))).collect(),
            volumes: strings(&all["volumes"])
                .iter()
                .map(|text| pair(text.trim_end_matches(":ro").to_owned()))
                .collect(),
            ports: strings(&all["ports"]).into_iter().map(pair).collect(),
            all: all.clone(),
        }
    }

    fn is_ours(&self) -> bool {
        self.image.starts_with("pointsman:")
    }

    /// The command with paths of mounted files as they are here.
    fn local_command(&self) -> Vec<String> {
        let local = |word: &String| {
            let mount = self.volumes.iter().find(|(from, to)| from.starts_with("./") && to == word);
            mount.map_or(word.clone(), |(from, _)| root().join(from).to_str().unwrap().to_owned())
        };
        self.command.iter().map(local).collect()
    }

    /// What the program makes of the service's configuration.
    fn settings(&self) -> serde_json::Value {
        let words = self.local_command();
        let pairs = words.iter().map(String::as_str).zip(words.iter().skip(1).map(String::as_str));
        let options = pairs.filter(|(name, _)| ["--config", "--set"].contains(name));
        let options: Vec<&str> = options.flat_map(|(name, value)| [name, value]).collect();
        assert!(options.contains(&"--config"), "{} has no --config", self.name);
        let output = pointsman(&[&["check-config", "--json"][..], &options].concat(), &self.environment);
        assert!(output.status.success(), "{}: {}", self.name, text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["config"].clone()
    }

    /// Ports that something in it listens on.
    fn listens(&self) -> BTreeSet<String> {
        if !self.is_ours() {
            return self.ports.iter().map(|(_, inside)| inside.clone()).collect();
        }
        let serves = ["learn", "route"].contains(&self.command[0].as_str());
        let settings = self.settings();
        let (address, port) = settings["http"]["listen"].as_str().unwrap().rsplit_once(':').unwrap();
        assert_eq!(address, "0.0.0.0", "{}: loopback is the container's own", self.name);
        BTreeSet::from_iter(serves.then(|| port.to_owned()))
    }
}

fn services() -> BTreeMap<String, Service> {
    let compose = compose();
    let service = |name: String| {
        let service = Service::new(&name, &compose["services"][name.as_str()]);
        (name, service)
    };
    keys(&compose["services"]).into_iter().map(service).collect()
}

fn pointsman(arguments: &[&str], environment: &BTreeMap<String, String>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).env_remove("RUST_LOG").envs(environment);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Every command and flag is in the program's help.
fn check_command(words: &[String]) {
    let path: Vec<&str> = words.iter().map(String::as_str).take_while(|word| !word.starts_with('-')).collect();
    let output = pointsman(&[&path[..], &["--help"]].concat(), &BTreeMap::new());
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    let help = text(&output.stdout);
    let known: BTreeSet<&str> = help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).collect();
    for flag in words.iter().filter(|word| word.starts_with("--")) {
        let flag = flag.split('=').next().unwrap();
        assert!(known.contains(flag), "{words:?}: there is no {flag}");
    }
}

/// Instructions of the Dockerfile, those on several lines as one.
fn dockerfile() -> Vec<(String, String)> {
    let lines = read("Dockerfile").replace("\\\n", " ");
    let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let instruction = |line: &str| {
        let (instruction, rest) = line.split_once(' ').unwrap();
        (instruction.to_owned(), rest.trim().to_owned())
    };
    lines.map(instruction).collect()
}

fn instructions(name: &str) -> Vec<String> {
    dockerfile().into_iter().filter(|(instruction, _)| instruction == name).map(|(_, rest)| rest).collect()
}

/// The words of an instruction in its JSON form.
fn json_words(rest: &str) -> Vec<String> {
    serde_json::from_str(&rest[rest.find('[').unwrap()..]).unwrap_or_else(|error| panic!("{rest}: {error}"))
}

#[test]
fn the_image_runs_commands_that_exist_and_nobody_as_root() {
    let [entrypoint, command, health] =
        ["ENTRYPOINT", "CMD", "HEALTHCHECK"].map(|name| json_words(&instructions(name)[0]));
    assert_eq!(entrypoint, ["pointsman"]);
    check_command(&command);
    assert_eq!(health[0], "pointsman");
    check_command(&health[1..]);
    let users = instructions("USER");
    assert!(users.len() == 1 && !users[0].starts_with("0") && !users[0].starts_with("root"), "{users:?}");
    let version = format!("org.opencontainers.image.version=\"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(instructions("LABEL").iter().any(|label| label.contains(&version)), "the label of the version");
}

#[test]
fn commands_flags_and_values_of_the_stack_are_good() {
    for service in services().values().filter(|service| service.is_ours()) {
        check_command(&service.command);
        assert_eq!(service.all["build"]["context"], Value::from("."), "{}", service.name);
        // A key that does not exist, last: it is complained of once all that is before it was found good.
        let mut words = service.local_command();
        words.extend(["--set".to_owned(), "nowhere.key=1".to_owned()]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = pointsman(&words, &service.environment);
        let told = text(&output.stderr);
        assert!(output.status.code() == Some(2) && told.contains("--set nowhere.key"), "{}: {told}", service.name);
        let settings = service.settings();
        assert_eq!(settings["transport"]["kind"], json!("kafka"));
        assert!(service.environment.keys().all(|name| name == "RUST_LOG" || name.starts_with("POINTSMAN__")));
    }
}

#[test]
fn everything_that_is_named_is_there() {
    let (services, compose) = (services(), compose());
    let mut used = BTreeSet::new();
    for service in services.values() {
        let name = &service.name;
        for (from, to) in &service.volumes {
            assert!(to.starts_with('/'), "{name}: {to}");
            match from.strip_prefix("./") {
                Some(path) => assert!(root().join(path).exists(), "{name} mounts {path}, which is not there"),
                None => _ = used.insert(from.clone()),
            }
        }
        for on in keys(&service.all["depends_on"]) {
            let other = services.get(&on).unwrap_or_else(|| panic!("{name} depends on {on}, which is no service"));
            let health = &other.all["healthcheck"];
            match service.all["depends_on"][on.as_str()]["condition"].as_str().unwrap() {
                // The image of ours brings its own check.
                "service_healthy" => assert!(
                    health["disable"] != true && (other.is_ours() || !health["test"].is_null()),
                    "{name} waits for the health of {on}, which has no check"
                ),
                "service_completed_successfully" => assert_eq!(other.all["restart"], Value::from("no"), "{on}"),
                other => panic!("{name}: condition {other}"),
            }
        }
        assert!(!service.all["restart"].is_null(), "{name} has no restart policy");
        if service.is_ours() {
            let does_listen = !service.listens().is_empty();
            let has_check = service.all["healthcheck"]["disable"] != true;
            assert_eq!(does_listen, has_check, "{name}: a check of health where something listens, and only there");
        }
    }
    assert_eq!(used, keys(&compose["volumes"]), "volumes that are used, and that are there");
}

#[test]
fn images_have_versions() {
    let built = instructions("FROM").into_iter().map(|from| from.split(' ').next().unwrap().to_owned());
    for image in services().values().map(|service| service.image.clone()).chain(built) {
        let (_, tag) = image.rsplit_once(':').unwrap_or_else(|| panic!("{image} has no tag"));
        let is_release = tag.contains(|c: char| c.is_ascii_digit()) || tag.starts_with("bookworm");
        assert!(is_release && !tag.contains("latest"), "{image}");
    }
    let services = services();
    assert_eq!(services["router"].image, format!("pointsman:{}", env!("CARGO_PKG_VERSION")));
    // What the tests run on.
    let pom = read("tests/kafka/pom.xml");
    let version = pom.split("<kafka.version>").nth(1).unwrap().split('<').next().unwrap();
    assert_eq!(services["kafka"].image, format!("apache/kafka:{version}"));
}

#[test]
fn whoever_is_asked_listens() {
    let services = services();
    let check = |who: &str, address: &str| {
        let (host, port) = address.rsplit_once(':').unwrap();
        let service = services.get(host).unwrap_or_else(|| panic!("{who}: {host} is no service"));
        assert!(service.listens().contains(port), "{who}: {host} does not listen on {port}");
        let is_named = || service.settings()["http"]["hosts"].as_array().unwrap().contains(&json!(host));
        assert!(!service.is_ours() || is_named(), "{who}: {host} is not in http.hosts");
    };
    let prometheus = yaml(&read("deploy/prometheus.yml"));
    let mut scraped = BTreeSet::new();
    for job in prometheus["scrape_configs"].as_sequence().unwrap() {
        for group in job["static_configs"].as_sequence().unwrap() {
            for target in strings(&group["targets"]) {
                check("Prometheus", &target.replace("localhost", "prometheus"));
                scraped.insert(target.split(':').next().unwrap().to_owned());
            }
        }
    }
    for service in services.values() {
        for (_, inside) in &service.ports {
            assert!(service.listens().contains(inside), "{}: nothing listens on {inside}", service.name);
        }
        if service.is_ours() && !service.listens().is_empty() {
            assert!(scraped.contains(&service.name), "{} is not scraped", service.name);
        }
    }
    let published = services.values().flat_map(|service| strings(&service.all["ports"])).collect::<Vec<_>>();
    assert!(published.iter().all(|port| port.starts_with("127.0.0.1:")), "{published:?}: on loopback alone");
    let outside = services.values().flat_map(|service| service.ports.iter().map(|(port, _)| port));
    assert_eq!(outside.collect::<BTreeSet<_>>().len(), published.len(), "{published:?}: each port once");
    let sources = yaml(&read("deploy/grafana/provisioning/datasources/prometheus.yml"));
    check("Grafana", sources["datasources"][0]["url"].as_str().unwrap().trim_start_matches("http://"));
    let to = services["simulator"].command.iter().find(|word| word.starts_with("http://")).unwrap();
    check("simulator", to.trim_start_matches("http://"));
    let brokers = services["learner"].settings()["transport"]["kafka"]["brokers"].as_str().unwrap().to_owned();
    let advertised = &services["kafka"].environment["KAFKA_ADVERTISED_LISTENERS"];
    assert!(advertised.split(',').any(|listener| listener.ends_with(&format!("://{brokers}"))), "{brokers}");
}

/// Expressions of all dashboards.
pub fn expressions() -> Vec<String> {
    fn find(value: &serde_json::Value, found: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => map.iter().for_each(|(key, value)| match value.as_str() {
                Some(text) if key == "expr" => found.push(text.to_owned()),
                _ => find(value, found),
            }),
            serde_json::Value::Array(items) => items.iter().for_each(|item| find(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join("config/grafana")).unwrap() {
        let dashboard: serde_json::Value = serde_json::from_slice(&fs::read(entry.unwrap().path()).unwrap()).unwrap();
        assert!(dashboard["uid"].is_string() && dashboard["id"].is_null());
        find(&dashboard, &mut found);
    }
    found
}

/// Names in these expressions.
fn charted() -> BTreeSet<String> {
    let names = |text: &String| {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map(str::to_owned);
        words.filter(|word| word.starts_with("pointsman_")).collect::<Vec<_>>()
    };
    expressions().iter().flat_map(names).collect()
}

#[test]
fn dashboards_show_metrics_that_exist() {
    let dir = tempfile::tempdir().unwrap();
    let (port, learner_port) = (free_port(), free_port());
    let config = write_config(dir.path(), port, "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n");
    let listen = format!("http.listen=127.0.0.1:{learner_port}");
    let (router, learner) = (Client::new(port), Client::new(learner_port));
    let _route = Process::start(&config, &["route", "--serve-uniform"]);
    let _learn = Process::start(&config, &["learn", "--set", &listen]);
    router.await_status("/ready", 200);
    learner.await_status("/ready", 200);
    assert_eq!(router.json("/v1/route", &json!({"query": [1, 2, 3]})).0, 200);
    let samples: BTreeSet<String> = [router, learner]
        .iter()
        .flat_map(|client| {
            let shown = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
            let lines = shown.lines().filter(|line| !line.starts_with('#'));
            lines.map(|line| line.split(['{', ' ']).next().unwrap().to_owned()).collect::<Vec<_>>()
        })
        .collect();
    // What has no sample yet is at least there to be told.
    let source = read("src/telemetry/learner.rs") + &read("src/telemetry/router.rs");
    let is_registered = |name: &str| {
        let endings = ["_total", "_bucket", "_seconds"];
        let name = endings.iter().fold(name, |name, ending| name.trim_end_matches(ending));
        let prefixes = ["pointsman_learner_", "pointsman_router_", "pointsman_"];
        let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
        ["counters", "gauges", "seconds"].iter().any(|kind| source.contains(&format!("sheet.{kind}(\"{name}\"")))
    };
    let charted = charted();
    assert!(charted.len() > 5, "{charted:?}");
    for name in charted {
        assert!(samples.contains(&name) || is_registered(&name), "{name} is not among {samples:?}");
    }
}

#[test]
fn dashboards_are_where_grafana_looks() {
    let grafana = &services()["grafana"];
    let providers = yaml(&read("deploy/grafana/provisioning/dashboards/pointsman.yml"));
    let path = providers["providers"][0]["options"]["path"].as_str().unwrap();
    let mounted = |path: &str| -> PathBuf {
        let (from, to) = grafana.volumes.iter().find(|(_, to)| path.starts_with(to.as_str())).unwrap();
        root().join(from).join(path[to.len()..].trim_start_matches('/'))
    };
    assert!(mounted(path).is_dir(), "{path}");
    let home = &grafana.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"];
    assert!(mounted(home).is_file(), "{home}");
}

/// Cargo refuses a manifest whose targets are not there.
#[test]
fn the_build_context_has_all_that_cargo_asks_for() {
    let ignore = read(".dockerignore");
    let kept: Vec<&str> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for path in &kept {
        assert!(root().join(path).exists(), "{path}");
    }
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let targets = ["bin", "test", "bench"].iter().flat_map(|kind| manifest[*kind].as_array().unwrap());
    let copied = instructions("COPY").into_iter().filter(|rest| !rest.starts_with("--from") && rest != ". .");
    let copied = copied.map(|rest| rest.split(' ').next().unwrap().to_owned());
    let needed = targets.map(|target| target["path"].as_str().unwrap().to_owned()).chain(copied);
    for path in needed.chain(["Cargo.lock".to_owned(), "src/lib.rs".to_owned()]) {
        let is_kept = kept.iter().any(|kept| Path::new(&path).starts_with(kept));
        assert!(is_kept, "{path} is not let into the build");
    }
}
