//! Fast path: parses events in one pass over their bytes, without a tree of JSON values.
//!
//! Only valid events are accepted here. `None` means that the parser of `events.rs` decides, which also finds the reason. So
//! the fast path returns either the same result or none.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::events::DRAW_KEY;
use super::scan::Scanner;
use crate::config::Fields;
use crate::event::{ModelName, Name};

/// A field of an event.
#[derive(Debug, Clone, Copy)]
enum Field {
    RequestId,
    Space,
    Time,
    Query,
    Model,
    Propensities,
    Propensity,
    Policy,
    Reward,
    EventId,
    Version,
    /// The configured outcome of this index.
    Outcome(usize),
    Failed,
    Rewards,
    Preferred,
    Over,
    DrawKey,
}

/// Where the fields of an event are: a tree of keys.
#[derive(Debug, Clone)]
pub struct Plan(Vec<Branch>);

#[derive(Debug, Clone)]
struct Branch {
    key: String,
    to: To,
}

#[derive(Debug, Clone)]
enum To {
    Field(Field),
    Inside(Vec<Branch>),
}

/// A time as it is logged.
#[derive(Debug, PartialEq)]
pub enum Time {
    /// Since 1970, in the unit of the log.
    Number(i64),
    /// As text.
    Text(String),
}

/// The fields that an event has, each well-formed for itself.
#[derive(Debug, Default)]
pub struct Found {
    /// The request's id: any string.
    pub request_id: Option<String>,
    /// The space.
    pub space: Option<Name>,
    /// The time, in any unit.
    pub ts_ms: Option<Time>,
    /// The query, whatever its numbers.
    pub query: Option<Vec<f32>>,
    /// The model.
    pub model: Option<ModelName>,
    /// The distribution by model, in the order of their names, whatever its numbers.
    pub propensities: Option<Vec<(ModelName, f64)>>,
    /// The propensity of the chosen model.
    pub propensity: Option<f64>,
    /// As the propensities.
    pub policy: Option<Vec<(ModelName, f64)>>,
    /// The reward.
    pub reward: Option<f64>,
    /// The reward's id: any string.
    pub event_id: Option<String>,
    /// Version of the parameters that decided.
    pub params_version: Option<u64>,
    /// Outcomes by the index of their configuration.
    pub outcomes: Vec<(usize, f64)>,
    /// Whether the model did not answer.
    pub failed: Option<bool>,
    /// Rewards by model, in the order of their names.
    pub rewards: Option<Vec<(ModelName, f64)>>,
    /// The model that was preferred.
    pub preferred: Option<ModelName>,
    /// The model that it was preferred to.
    pub over: Option<ModelName>,
    /// Whether it was drawn by a key that several requests share.
    pub is_keyed: bool,
}

impl Plan {
    /// For query events with outcomes at these places; none if fields lie within each other.
    pub fn of_queries(fields: &Fields, outcomes: &[String]) -> Option<Self> {
        Self::of(
            outcomes,
            &[
                (&fields.request_id, Field::RequestId),
                (&fields.space, Field::Space),
                (&fields.ts_ms, Field::Time),
                (&fields.query, Field::Query),
                (&fields.model, Field::Model),
                (&fields.propensities, Field::Propensities),
                (&fields.propensity, Field::Propensity),
                (&fields.policy, Field::Policy),
                (&fields.params_version, Field::Version),
                (&DRAW_KEY.to_owned(), Field::DrawKey),
            ],
        )
    }

    /// For reward events with outcomes at these places; none if fields lie within each other.
    pub fn of_rewards(fields: &Fields, outcomes: &[String]) -> Option<Self> {
        Self::of(
            outcomes,
            &[
                (&fields.request_id, Field::RequestId),
                (&fields.space, Field::Space),
                (&fields.ts_ms, Field::Time),
                (&fields.reward, Field::Reward),
                (&fields.event_id, Field::EventId),
                (&fields.failed, Field::Failed),
                (&fields.rewards, Field::Rewards),
                (&fields.preferred, Field::Preferred),
                (&fields.over, Field::Over),
            ],
        )
    }

    fn of(outcomes: &[String], fields: &[(&String, Field)]) -> Option<Self> {
        let mut branches = Vec::new();
        let outcomes = outcomes.iter().enumerate().map(|(j, pointer)| (pointer, Field::Outcome(j)));
        for (pointer, field) in fields.iter().copied().chain(outcomes) {
            let keys: Vec<String> =
                pointer.split('/').skip(1).map(|key| key.replace("~1", "/").replace("~0", "~")).collect();
            grow(&mut branches, &keys, field)?;
        }
        Some(Self(branches))
    }

    /// Reads an event.
    pub fn read(&self, bytes: &[u8]) -> Option<Found> {
        let mut scanner = Scanner::new(bytes);
        let mut found = Found::default();
        read_object(&mut scanner, &self.0, &mut found)?;
        scanner.is_done().then_some(found)
    }
}

fn grow(branches: &mut Vec<Branch>, keys: &[String], field: Field) -> Option<()> {
    let (key, rest) = keys.split_first()?;
    let known = branches.iter_mut().find(|branch| branch.key == *key);
    match (known, rest.is_empty()) {
        (None, true) => branches.push(Branch { key: key.clone(), to: To::Field(field) }),
        (None, false) => {
            let mut inside = Vec::new();
            grow(&mut inside, rest, field)?;
            branches.push(Branch { key: key.clone(), to: To::Inside(inside) });
        }
        (Some(Branch { to: To::Inside(inside), .. }), false) => grow(inside, rest, field)?,
        _ => return None,
    }
    Some(())
}

fn read_object(scanner: &mut Scanner<'_>, branches: &[Branch], found: &mut Found) -> Option<()> {
    let mut seen = 0_u32;
    scanner.object(|scanner, key| {
        let Some(at) = branches.iter().position(|branch| branch.key == key) else { return scanner.skip() };
        // Of keys that repeat the last counts, with all that is inside.
        if seen & (1 << at) != 0 {
            return None;
        }
        seen |= 1 << at;
        match &branches[at].to {
            To::Field(field) => field.read(scanner, found),
            To::Inside(inside) => match scanner.peek()? {
                b'{' => read_object(scanner, inside, found),
                // A pointer can lead through its elements.
                b'[' => None,
                _ => scanner.skip(),
            },
        }
    })
}

impl Field {
    fn read(self, scanner: &mut Scanner<'_>, found: &mut Found) -> Option<()> {
        if scanner.null()? {
            return Some(());
        }
        match self {
            Self::RequestId => found.request_id = Some(id(scanner)?),
            Self::Space => found.space = Some(name(scanner)?),
            Self::Time => {
                found.ts_ms = Some(match scanner.peek()? {
                    b'"' => Time::Text(scanner.string()?.into_owned()),
                    _ => Time::Number(scanner.integer()?),
                });
            }
            Self::Query => found.query = Some(vector(scanner)?),
            Self::Model => found.model = Some(name(scanner)?),
            Self::Propensities => found.propensities = Some(distribution(scanner)?),
            Self::Propensity => found.propensity = Some(scanner.number()?),
            Self::Policy => found.policy = Some(distribution(scanner)?),
            Self::Reward => found.reward = Some(scanner.number()?),
            Self::EventId => found.event_id = Some(id(scanner)?),
            Self::Version => found.params_version = Some(scanner.integer()?.try_into().ok()?),
            Self::Outcome(j) => found.outcomes.push((j, scanner.number()?)),
            Self::Failed => found.failed = Some(scanner.bool()?),
            Self::Rewards => found.rewards = Some(distribution(scanner)?),
            Self::Preferred => found.preferred = Some(name(scanner)?),
            Self::Over => found.over = Some(name(scanner)?),
            Self::DrawKey => {
                found.is_keyed = true;
                scanner.skip()?;
            }
        }
        Some(())
    }
}

fn id(scanner: &mut Scanner<'_>) -> Option<String> {
    if scanner.peek()? == b'"' { Some(scanner.string()?.into_owned()) } else { Some(scanner.integer()?.to_string()) }
}

fn name<N: for<'a> TryFrom<&'a str>>(scanner: &mut Scanner<'_>) -> Option<N> {
    N::try_from(&*scanner.string()?).ok()
}

fn vector(scanner: &mut Scanner<'_>) -> Option<Vec<f32>> {
    if scanner.peek()? == b'"' { from_base64(scanner.raw_string()?) } else { scanner.vector() }
}

/// Decodes base64 of little-endian f32, piece by piece, without the bytes in between.
fn from_base64(text: &[u8]) -> Option<Vec<f32>> {
    // Whole numbers of f32 and of base64's quads: 16 characters are 12 bytes.
    const PIECE: usize = 1024;
    let mut vector = Vec::with_capacity(text.len() / 16 * 3 + 3);
    let mut bytes = [0_u8; PIECE / 4 * 3];
    let mut ended = false;
    for piece in text.chunks(PIECE) {
        let length = STANDARD.decode_slice(piece, &mut bytes).ok().filter(|_| !ended)?;
        // Nothing comes after padding.
        ended = length < bytes.len();
        let (words, rest) = bytes[..length].as_chunks::<4>();
        vector.extend(words.iter().map(|&word| f32::from_le_bytes(word)));
        if !rest.is_empty() {
            return None;
        }
    }
    Some(vector)
}

fn distribution(scanner: &mut Scanner<'_>) -> Option<Vec<(ModelName, f64)>> {
    let mut all = Vec::new();
    scanner.object(|scanner, model| {
        all.push((ModelName::try_from(model).ok()?, scanner.number()?));
        Some(())
    })?;
    if !all.is_sorted_by(|a, b| a.0 < b.0) {
        all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    }
    // Of keys that repeat the last counts.
    all.is_sorted_by(|a, b| a.0 < b.0).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::wire::events::Parser;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    const SETTINGS: [&str; 6] = [
        "",
        "[objective.outcomes.a]\nrange = [0.0, 10.0]\nbudget = 1.0\n[objective.outcomes.b]\nrange = [0.0, 1.0]\nfield = \"/a/b\"",
        "[learner]\nmissing_propensities = \"uniform\"\n[events]\nbytes_max = 5000\n[join]\nfuture_ms = 10",
        "[reward]\nrange = [1.0, 5.0]\nout_of_range = \"reject\"\n[events.fields]\nrequest_id = \"/a/b\"\nmodel = \"/a/model\"",
        "[events.fields]\nquery = \"/a/b/c\"\nrequest_id = \"/a/0\"\npropensities = \"/a~1b/~0\"\nreward = \"/a/b\"",
        "[events.fields]\nquery = \"/a\"\nmodel = \"/a/b\"\nreward = \"/ts_ms\"",
    ];

    fn parsers() -> Vec<Parser> {
        let parser = |set: &&str| Parser::new(&toml::from_str::<Config>(set).unwrap().check().unwrap());
        SETTINGS.iter().map(parser).collect()
    }

    /// Whether an event is read just as by a tree, to the last bit and the last reason; as a query, as a reward.
    fn check(parsers: &[Parser], bytes: &[u8]) {
        for parser in parsers {
            let by_tree = parser.clone().by_tree();
            for record_ms in [None, Some(5)] {
                let text = String::from_utf8_lossy(bytes);
                // Printed, since 0 and -0 are equal otherwise.
                let shown = format!("{:?}", parser.query(bytes, record_ms));
                assert_eq!(shown, format!("{:?}", by_tree.query(bytes, record_ms)), "{text}");
                let shown = format!("{:?}", parser.reward(bytes, record_ms));
                assert_eq!(shown, format!("{:?}", by_tree.reward(bytes, record_ms)), "{text}");
            }
        }
    }

    const QUERY: &str = r#"{"request_id":"r-1","space":"shop","ts_ms":17,"query":[3,-4.0,1e-3,-0.0123456789012345678],"model":"bge",
        "propensities":{"minilm":0.2,"bge":0.8},"params_version":12,"more":[{}],"text":"a \"b\" \u00fc"}"#;
    const REWARD: &str = r#" {"ts_ms":17, "reward":0.25, "request_id":"r\/1", "event_id":"e", "space":null, "x":{"y":[1e5]}}
"#;

    const KEYS: [&str; 29] = [
        "\"request_id\"",
        "\"space\"",
        "\"ts_ms\"",
        "\"query\"",
        "\"model\"",
        "\"propensities\"",
        "\"propensity\"",
        "\"policy\"",
        "\"reward\"",
        "\"event_id\"",
        "\"params_version\"",
        "\"outcomes\"",
        "\"failed\"",
        "\"rewards\"",
        "\"preferred\"",
        "\"over\"",
        "\"draw_key\"",
        "\"a\"",
        "\"a/b\"",
        "\"~\"",
        "\"other\"",
        "\"\"",
        "\"\\u0071uery\"",
        "\"que\\ry\"",
        "\"\\ud800\"",
        "\"$serde_json::private::RawValue\"",
        "query",
        "1",
        "\"model\" ",
    ];

    const VALUES: [&str; 64] = [
        "\"r-1\"",
        "\"bge\"",
        "\"b\\u0067e\"",
        "\"b g e\"",
        "\".x\"",
        "\"\"",
        "\"ü\"",
        "\"\\ud83d\\ude00\"",
        "\"\\ud83d\"",
        "\"\n\"",
        "\"open",
        "17",
        "-17",
        "0",
        "-0",
        "1.5",
        "0.5",
        "1",
        "1e3",
        "1e400",
        "-1e400",
        "1e-400",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "123456789012345678901234567890",
        "01",
        "+1",
        "1.",
        ".5",
        "1e",
        "0x1",
        "NaN",
        "Infinity",
        "null",
        "nul",
        "true",
        "false",
        "[]",
        "{}",
        "[1,2]",
        "[1,2,]",
        "[1,null]",
        "[1,[2]]",
        "[0,-0.0]",
        "[1e39,1]",
        "[1e400]",
        "[0.1,0.30000001192092896,1.00000005960464477539]",
        "\"AABAQAAAgMA=\"",
        "\"AABAQAAAgMB=\"",
        "\"AABAQAAAgMA\"",
        "\"AAAAAAAA\"",
        "\"AABAQAAAgMA=AABAQAAAgMA=\"",
        "\"AABA\\u0051AAAgMA=\"",
        "\"AADAfwAAgD8=\"",
        "{\"minilm\":0.2,\"bge\":0.8}",
        "{\"bge\":0.8,\"minilm\":0.2}",
        "{\"bge\":0.5,\"bge\":1}",
        "{\"a b\":1}",
        "{\"bge\":1e0}",
        "{\"b\":{\"c\":[1,2]},\"model\":\"bge\"}",
        "{\"b\":\"r\",\"b\":\"s\",\"0\":\"t\"}",
        "[\"r\",{\"b\":1}]",
        "{\"b\":[{}]}",
    ];

    #[test]
    fn common_events_are_read_here() {
        let fields = Fields::default();
        let found = Plan::of_queries(&fields, &[]).unwrap().read(QUERY.as_bytes()).unwrap();
        assert_eq!(found.query.unwrap()[1..3], [-4.0, 1e-3]);
        let found = Plan::of_rewards(&fields, &[]).unwrap().read(REWARD.as_bytes()).unwrap();
        assert_eq!((found.request_id.as_deref(), found.reward), (Some("r/1"), Some(0.25)));
        let nested = Fields { query: "/data/vector".to_owned(), model: "/data/model".to_owned(), ..fields };
        let text = br#"{"data":{"model":"bge","vector":"AABAQAAAgMA=","more":[]}}"#;
        let found = Plan::of_queries(&nested, &[]).unwrap().read(text).unwrap();
        assert_eq!((found.query, found.model), (Some(vec![3.0, -4.0]), ModelName::try_from("bge").ok()));
        let within = Fields { model: "/data".to_owned(), ..nested };
        assert!(Plan::of_queries(&within, &[]).is_none());
    }

    #[test]
    fn whatever_the_value_of_a_field() {
        let parsers = parsers();
        for key in KEYS {
            for value in VALUES {
                for event in [QUERY, REWARD] {
                    let event = event.trim();
                    check(&parsers, event.replacen('{', &format!("{{{key}:{value},"), 1).as_bytes());
                    check(&parsers, format!("{},{key}:{value}}}", &event[..event.len() - 1]).as_bytes());
                }
            }
        }
        for value in VALUES {
            check(&parsers, QUERY.replace("[3,-4.0,1e-3,-0.0123456789012345678]", value).as_bytes());
            check(&parsers, QUERY.replace("{\"minilm\":0.2,\"bge\":0.8}", value).as_bytes());
            check(&parsers, QUERY.replace("0.2", value).as_bytes());
            check(&parsers, QUERY.replace("17", value).as_bytes());
            check(&parsers, REWARD.replace("0.25", value).as_bytes());
            check(&parsers, value.as_bytes());
        }
    }

    #[test]
    fn whatever_surrounds_it_and_however_large_it_is() {
        let parsers = parsers();
        for (before, after) in
            [("", "}"), ("", "\0"), ("", " x"), ("\u{feff}", ""), ("[", "]"), (" \t\r\n", "\n"), ("\u{a0}", "")]
        {
            for event in [QUERY, REWARD] {
                check(&parsers, format!("{before}{event}{after}").as_bytes());
            }
        }
        let with = |value: &str| QUERY.replace("[3,-4.0,1e-3,-0.0123456789012345678]", value);
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        for depth in [60, 63, 64, 65, 125, 126, 127, 128, 129, 100_000] {
            check(&parsers, with(&nested(depth)).as_bytes());
            check(&parsers, QUERY.replace("[{}]", &nested(depth)).as_bytes());
        }
        let numbers = vec!["-0.05"; 100_000].join(" , ");
        check(&parsers, with(&format!("[{numbers}]")).as_bytes());
        check(&parsers, with(&format!("[{numbers},x]")).as_bytes());
        for length in [255, 256, 257, 1021, 1022, 1023, 1024, 2048] {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 37 % 251) as u8 & 0xbf).collect();
            let text = STANDARD.encode(&bytes);
            check(&parsers, with(&format!("\"{text}\"")).as_bytes());
            check(&parsers, with(&format!("\"{text}{text}\"")).as_bytes());
            check(&parsers, QUERY.replace("r-1", &text).as_bytes());
        }
        let mut invalid = QUERY.as_bytes().to_vec();
        for at in 0..invalid.len() {
            for byte in [0xff, 0xc3, b'"', b'\\', 0] {
                let kept = std::mem::replace(&mut invalid[at], byte);
                check(&parsers[..1], &invalid);
                invalid[at] = kept;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn any_fields(
            fields in vec((select(&KEYS[..]), select(&VALUES[..])), 0..10),
            space in select(&["", " ", "\n\t"][..]),
        ) {
            let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{space}{key}{space}:{space}{value}")).collect();
            check(&parsers(), format!("{{{}}}", fields.join(&format!("{space},"))).as_bytes());
        }

        #[test]
        fn good_queries(
            query in vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 1..40),
            as_text in any::<bool>(),
            widened in any::<bool>(),
            id in "\\PC{0,12}",
            p in 0.0..=1.0_f64,
        ) {
            let vector = match (as_text, widened) {
                (true, _) => STANDARD.encode(query.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).into(),
                (_, true) => query.iter().map(|&x| f64::from(x)).collect::<Vec<_>>().into(),
                _ => serde_json::from_str::<serde_json::Value>(&format!("{query:?}")).unwrap(),
            };
            let event = serde_json::json!({
                "request_id": id, "ts_ms": 3, "query": vector, "model": "m", "propensities": {"m": p, "l": 1.0 - p},
                "policy": {"m": 1}, "more": {"text": id},
            });
            check(&parsers(), event.to_string().as_bytes());
            check(&parsers(), serde_json::to_string_pretty(&event).unwrap().as_bytes());
        }

        #[test]
        fn mangled_events(
            query in any::<bool>(),
            changes in vec((any::<Index>(), any::<Index>(), any::<u8>(), 0..5), 1..6),
        ) {
            let mut bytes = if query { QUERY } else { REWARD }.as_bytes().to_vec();
            for (at, other, byte, kind) in changes {
                if bytes.is_empty() {
                    break;
                }
                let (at, other) = (at.index(bytes.len()), other.index(bytes.len()));
                match kind {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    2 => drop(bytes.remove(at)),
                    3 => bytes.swap(at, other),
                    _ => {
                        let piece = bytes[at.min(other)..at.max(other)].to_vec();
                        bytes.splice(at..at, piece);
                    }
                }
            }
            check(&parsers(), &bytes);
        }
    }
}
