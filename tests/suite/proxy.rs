//! A TCP proxy between Kafka clients and a broker. It delays, repeats and swallows requests that a test chooses.
//!
//! A client that gets no answer in time closes its connection and retries. The broker may execute the first attempt much
//! later: a late request. The proxy makes such requests at will. It passes everything else on unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::broker::{self, Broker};
use crate::fleet::{DIM, Instance, Load, applied, await_shared, check, check_history, logs, place};
use crate::sidecar::free_port;
use crate::size::sized;

/// API keys of the Kafka protocol.
pub const PRODUCE: i16 = 0;
pub const INIT_PRODUCER_ID: i16 = 22;
pub const ADD_PARTITIONS_TO_TXN: i16 = 24;
pub const ADD_OFFSETS_TO_TXN: i16 = 25;
pub const END_TXN: i16 = 26;
pub const TXN_OFFSET_COMMIT: i16 = 28;

/// Maximum size of a frame, as a guard against streams that are not Kafka.
const FRAME_BYTES_MAX: usize = 256 << 20;

/// How long the broker may take to answer a late request.
const ANSWER: Duration = Duration::from_secs(30);

/// A request of a client, as far as the proxy reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub api_key: i16,
    pub version: i16,
    /// Of requests that begin with one.
    pub transactional_id: Option<String>,
    /// How many requests of this key and transactional ID came before.
    pub number: u64,
}

/// What the proxy does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Passes it on.
    Forward,
    /// Withholds it, and sends it later.
    Delay(When),
    /// Passes it on, and sends it once more later.
    Duplicate(When),
    /// Passes it on, and swallows the response.
    DropResponse,
}

/// When a late request is sent: on a connection of its own, even if its client has closed the one that it came by. Its
/// response is discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// After this time.
    After(Duration),
    /// Between the broker's answer to the next request of this key and transactional ID, and the arrival of that answer at
    /// the client.
    AfterNext(i16),
}

/// What the proxy has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub forwarded: u64,
    pub delayed: u64,
    pub duplicated: u64,
    pub dropped_responses: u64,
    /// Late requests that the broker has answered, by key and error code (0 = executed). Codes are known of EndTxn only.
    pub late: BTreeMap<(i16, Option<i16>), u64>,
}

impl Counts {
    /// Late requests of this key that the broker has answered.
    pub fn late_of(&self, api_key: i16) -> u64 {
        self.late.iter().filter(|((key, _), _)| *key == api_key).map(|(_, number)| number).sum()
    }
}

type Rule = Box<dyn FnMut(&Request) -> Action + Send>;

/// A proxy that runs until it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    upstream: String,
    rule: Mutex<Rule>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    counts: Counts,
    /// Requests so far, by key and transactional ID.
    seen: BTreeMap<(i16, Option<String>), u64>,
    /// Late requests that wait for another request.
    held: Vec<Held>,
    /// Late requests that wait for their time or for their answer.
    under_way: usize,
    /// Both ends of open connections.
    open: BTreeMap<u64, [TcpStream; 2]>,
    connections: u64,
    is_stopped: bool,
}

struct Held {
    api_key: i16,
    transactional_id: Option<String>,
    next: i16,
    frame: Vec<u8>,
}

/// What happens when the answer to a request comes.
#[derive(Default)]
struct Pending {
    late: Vec<Held>,
    drops_response: bool,
    /// Dropped when the late requests are done: until then their connection sends no other request.
    _done: Option<Sender<()>>,
}

impl Proxy {
    /// Listens on a port of loopback. Clients must know the broker by that address.
    pub fn start(listen_port: u16, upstream: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", listen_port)).unwrap();
        let shared = Arc::new(Shared {
            upstream: upstream.to_owned(),
            rule: Mutex::new(Box::new(|_| Action::Forward)),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        let accept = move || {
            for client in listener.incoming() {
                if lock(&of_thread.state).is_stopped {
                    return;
                }
                // A client retries, if it or the broker is not there.
                if let Ok(client) = client {
                    let _ = serve(&of_thread, client);
                }
            }
        };
        Self { shared, port: listen_port, accepting: Some(std::thread::spawn(accept)) }
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Decides on every request from now on.
    pub fn set(&self, rule: impl FnMut(&Request) -> Action + Send + 'static) {
        *lock(&self.shared.rule) = Box::new(rule);
    }

    pub fn counts(&self) -> Counts {
        lock(&self.shared.state).counts.clone()
    }

    /// Late requests that are not answered yet.
    pub fn outstanding(&self) -> usize {
        let state = lock(&self.shared.state);
        state.held.len() + state.under_way
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.is_stopped = true;
        state.open.values().flatten().for_each(close);
        drop(state);
        self.shared.changed.notify_all();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.accepting.take().map(JoinHandle::join);
    }
}

/// Connects a client with the broker, by a thread for each direction.
fn serve(shared: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
    let upstream = TcpStream::connect(&shared.upstream)?;
    [&client, &upstream].into_iter().try_for_each(|stream| stream.set_nodelay(true))?;
    let ends = [client.try_clone()?, upstream.try_clone()?];
    let mut state = lock(&shared.state);
    if state.is_stopped {
        return Ok(());
    }
    let number = state.connections;
    state.connections += 1;
    state.open.insert(number, ends);
    drop(state);
    let pending = Arc::new(Mutex::new(BTreeMap::new()));
    let (from, to) = (client.try_clone()?, upstream.try_clone()?);
    let (of_requests, awaited) = (shared.clone(), pending.clone());
    std::thread::spawn(move || {
        let _ = pass_requests(&of_requests, from, to, &awaited);
        of_requests.disconnect(number);
    });
    let of_responses = shared.clone();
    std::thread::spawn(move || {
        let _ = pass_responses(&of_responses, upstream, client, &pending);
        of_responses.disconnect(number);
        // Nobody waits for an answer that cannot come.
        let left: Vec<Pending> = std::mem::take(&mut *lock(&pending)).into_values().collect();
        lock(&of_responses.state).held.extend(left.into_iter().flat_map(|pending| pending.late));
    });
    Ok(())
}

fn pass_requests(
    shared: &Arc<Shared>,
    mut client: TcpStream,
    mut upstream: TcpStream,
    pending: &Mutex<BTreeMap<i32, Pending>>,
) -> io::Result<()> {
    loop {
        let frame = read_frame(&mut client)?;
        let Some((mut request, correlation_id)) = parse(&frame) else {
            write_frame(&mut upstream, &frame)?;
            continue;
        };
        let (action, late) = shared.decide(&mut request);
        let hold = |when: When| shared.hold(&request, when, frame.clone());
        match action {
            Action::Forward | Action::DropResponse => {}
            Action::Duplicate(when) => hold(when),
            Action::Delay(when) => {
                lock(&shared.state).held.extend(late);
                hold(when);
                continue;
            }
        }
        let drops_response = action == Action::DropResponse;
        if late.is_empty() && !drops_response {
            write_frame(&mut upstream, &frame)?;
            continue;
        }
        let has_late = !late.is_empty();
        let (done, waits) = channel();
        lock(pending).insert(correlation_id, Pending { late, drops_response, _done: Some(done) });
        write_frame(&mut upstream, &frame)?;
        if has_late {
            let _ = waits.recv();
        }
    }
}

fn pass_responses(
    shared: &Arc<Shared>,
    mut upstream: TcpStream,
    mut client: TcpStream,
    pending: &Mutex<BTreeMap<i32, Pending>>,
) -> io::Result<()> {
    loop {
        let frame = read_frame(&mut upstream)?;
        let correlation_id = Fields(&frame).int(4).map_or(-1, |id| id as i32);
        let awaited = lock(pending).remove(&correlation_id).unwrap_or_default();
        lock(&shared.state).under_way += awaited.late.len();
        awaited.late.iter().for_each(|late| shared.send_late(late.api_key, &late.frame));
        if !awaited.drops_response {
            write_frame(&mut client, &frame)?;
        }
    }
}

impl Shared {
    /// What to do with a request, and the late requests that waited for it.
    fn decide(&self, request: &mut Request) -> (Action, Vec<Held>) {
        let mut state = lock(&self.state);
        let seen = state.seen.entry((request.api_key, request.transactional_id.clone())).or_default();
        request.number = *seen;
        *seen += 1;
        let waited = |held: &Held| (held.next, &held.transactional_id) == (request.api_key, &request.transactional_id);
        let (late, held) = std::mem::take(&mut state.held).into_iter().partition(waited);
        state.held = held;
        drop(state);
        let action = (lock(&self.rule))(request);
        let counts = &mut lock(&self.state).counts;
        *match action {
            Action::Forward => &mut counts.forwarded,
            Action::Delay(_) => &mut counts.delayed,
            Action::Duplicate(_) => &mut counts.duplicated,
            Action::DropResponse => &mut counts.dropped_responses,
        } += 1;
        (action, late)
    }

    /// Sends a request later.
    fn hold(self: &Arc<Self>, request: &Request, when: When, frame: Vec<u8>) {
        let api_key = request.api_key;
        match when {
            When::AfterNext(next) => {
                let transactional_id = request.transactional_id.clone();
                lock(&self.state).held.push(Held { api_key, transactional_id, next, frame });
            }
            When::After(delay) => {
                lock(&self.state).under_way += 1;
                let shared = self.clone();
                std::thread::spawn(move || {
                    let (state, until) = (lock(&shared.state), Instant::now() + delay);
                    let runs = |state: &mut State| !state.is_stopped && Instant::now() < until;
                    drop(shared.changed.wait_timeout_while(state, delay, runs));
                    shared.send_late(api_key, &frame);
                });
            }
        }
    }

    /// Sends a late request that is counted as under way, and waits for its answer.
    fn send_late(&self, api_key: i16, frame: &[u8]) {
        let is_stopped = lock(&self.state).is_stopped;
        let answer = if is_stopped { Err(io::ErrorKind::ConnectionAborted.into()) } else { self.ask(frame) };
        let state = &mut *lock(&self.state);
        state.under_way -= 1;
        if let Ok(answer) = answer {
            let code = if api_key == END_TXN { end_txn_error(frame, &answer) } else { None };
            *state.counts.late.entry((api_key, code)).or_default() += 1;
        }
    }

    /// Asks the broker on a connection of its own.
    fn ask(&self, frame: &[u8]) -> io::Result<Vec<u8>> {
        let mut upstream = TcpStream::connect(&self.upstream)?;
        upstream.set_nodelay(true)?;
        upstream.set_read_timeout(Some(ANSWER))?;
        write_frame(&mut upstream, frame)?;
        read_frame(&mut upstream)
    }

    /// Closes both ends of a connection.
    fn disconnect(&self, number: u64) {
        let ends = lock(&self.state).open.remove(&number);
        ends.iter().flatten().for_each(close);
    }
}

fn close(stream: &TcpStream) {
    // It may be closed already.
    let _ = stream.shutdown(Shutdown::Both);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A frame without its size.
fn read_frame(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut size = [0; 4];
    stream.read_exact(&mut size)?;
    let size = u32::from_be_bytes(size) as usize;
    if size > FRAME_BYTES_MAX {
        return Err(io::Error::other(format!("a frame of {size} bytes")));
    }
    let mut frame = vec![0; size];
    stream.read_exact(&mut frame)?;
    Ok(frame)
}

fn write_frame(stream: &mut TcpStream, frame: &[u8]) -> io::Result<()> {
    let size = (frame.len() as u32).to_be_bytes();
    stream.write_all(&[&size, frame].concat())
}

/// The request in a frame, and its correlation ID.
fn parse(frame: &[u8]) -> Option<(Request, i32)> {
    let mut fields = Fields(frame);
    let (api_key, version) = (fields.int(2)? as i16, fields.int(2)? as i16);
    let correlation_id = fields.int(4)? as i32;
    fields.string()?;
    let transactional_id = begins_with_id(api_key, version).and_then(|is_flexible| {
        if is_flexible {
            fields.skip_tags()?;
            fields.compact_string()?
        } else {
            fields.string()?
        }
    });
    Some((Request { api_key, version, transactional_id, number: 0 }, correlation_id))
}

/// Whether a request that begins with a transactional ID has flexible encoding; `None` for other requests.
fn begins_with_id(api_key: i16, version: i16) -> Option<bool> {
    let (first, last, flexible) = match api_key {
        PRODUCE => (3, i16::MAX, 9),
        INIT_PRODUCER_ID => (0, i16::MAX, 2),
        // From version 4 on it holds a batch of transactions.
        ADD_PARTITIONS_TO_TXN => (0, 3, 3),
        ADD_OFFSETS_TO_TXN | END_TXN | TXN_OFFSET_COMMIT => (0, i16::MAX, 3),
        _ => return None,
    };
    (first..=last).contains(&version).then_some(version >= flexible)
}

/// The error code in the answer to an EndTxn request.
fn end_txn_error(request: &[u8], answer: &[u8]) -> Option<i16> {
    let (request, _) = parse(request)?;
    let mut fields = Fields(answer);
    fields.int(4)?;
    if begins_with_id(END_TXN, request.version)? {
        fields.skip_tags()?;
    }
    let _throttle_ms = fields.int(4)?;
    fields.int(2).map(|code| code as i16)
}

/// Fields of a frame that are not read yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, number: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(number)?;
        self.0 = rest;
        Some(bytes)
    }

    /// A big-endian integer of at most four bytes, without its sign.
    fn int(&mut self, number: usize) -> Option<u32> {
        Some(self.bytes(number)?.iter().fold(0, |value, byte| (value << 8) | u32::from(*byte)))
    }

    fn varint(&mut self) -> Option<usize> {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = self.bytes(1)?[0];
            value |= usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
            if shift > 28 {
                return None;
            }
        }
    }

    /// A nullable string.
    fn string(&mut self) -> Option<Option<String>> {
        match self.int(2)? as i16 {
            length if length < 0 => Some(None),
            length => self.text(length as usize).map(Some),
        }
    }

    /// A compact nullable string.
    fn compact_string(&mut self) -> Option<Option<String>> {
        match self.varint()? {
            0 => Some(None),
            more => self.text(more - 1).map(Some),
        }
    }

    fn text(&mut self, length: usize) -> Option<String> {
        self.bytes(length).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    fn skip_tags(&mut self) -> Option<()> {
        for _ in 0..self.varint()? {
            self.varint()?;
            let size = self.varint()?;
            self.bytes(size)?;
        }
        Some(())
    }
}

#[test]
fn transactional_ids_are_read_in_both_encodings() {
    let old = b"\x00\x1a\x00\x01\x00\x00\x00\x07\x00\x01c\x00\x06shop-3more";
    let flexible = b"\x00\x1a\x00\x03\x00\x00\x00\x07\x00\x01c\x01\x05\x02xx\x07shop-3more";
    let nobody = b"\x00\x1a\x00\x01\x00\x00\x00\x07\xff\xff\x00\x06shop-3";
    for (frame, version) in [(&old[..], 1), (&flexible[..], 3), (&nobody[..], 1)] {
        let id = Some("shop-3".to_owned());
        let request = Request { api_key: END_TXN, version, transactional_id: id, number: 0 };
        assert_eq!(parse(frame), Some((request, 7)));
        assert_eq!(parse(&frame[..7]), None);
    }
    let metadata = b"\x00\x03\x00\x09\x00\x00\x00\x08\x00\x01c\x00\x06shop-3";
    let request = Request { api_key: 3, version: 9, transactional_id: None, number: 0 };
    assert_eq!(parse(metadata), Some((request, 8)));
    let rejected = b"\x00\x00\x00\x07\x00\x00\x00\x00\x00\x2f";
    assert_eq!(end_txn_error(old, rejected), Some(47));
}

/// Shorter than what the proxy delays, so that clients give up on requests and retry them.
const SOCKET_TIMEOUT: Duration = Duration::from_millis(1000);

/// EndTxn requests of one lane that the proxy withholds in a row: a client that waits a second for each, and then reconnects,
/// needs longer for them than a call of the daemon waits.
const WITHHELD: u64 = 8;

/// What happens to EndTxn requests. A request is late or unanswered only if its client has given up on it.
struct Troubles {
    rng: ChaCha8Rng,
    /// Transactional IDs whose newest EndTxn was withheld or has no answer.
    retrying: BTreeSet<String>,
    /// A transactional ID of which requests in a row are withheld, and how many are left.
    silent: String,
    left: u64,
}

impl Troubles {
    fn new(silent: String) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(26), retrying: BTreeSet::new(), silent, left: WITHHELD }
    }

    fn decide(&mut self, request: &Request) -> Action {
        let Some(id) = &request.transactional_id else { return Action::Forward };
        if request.api_key == INIT_PRODUCER_ID && *id == self.silent {
            // A new producer has taken over: it is answered.
            self.left = 0;
        }
        if request.api_key != END_TXN {
            return Action::Forward;
        }
        if self.left > 0 && *id == self.silent {
            self.left -= 1;
            self.retrying.insert(id.clone());
            return Action::Delay(When::AfterNext(ADD_PARTITIONS_TO_TXN));
        }
        let when = match self.rng.random_range(0..3) {
            0 => When::After(SOCKET_TIMEOUT + Duration::from_millis(self.rng.random_range(0..1500))),
            1 => When::AfterNext(ADD_PARTITIONS_TO_TXN),
            _ => When::AfterNext(PRODUCE),
        };
        if self.retrying.remove(id) {
            return if self.rng.random() { Action::Duplicate(when) } else { Action::Forward };
        }
        let action = match self.rng.random_range(0..8) {
            0..3 => Action::Delay(when),
            3 => Action::DropResponse,
            _ => Action::Forward,
        };
        if action != Action::Forward {
            self.retrying.insert(id.clone());
        }
        action
    }
}

/// Waits for a condition, while all instances run.
fn await_that(instances: &mut [Instance], proxy: &Proxy, is_so: impl Fn(&[Instance]) -> bool) {
    let (start, patience) = (Instant::now(), Duration::from_secs(sized(90, 1200) as u64));
    while !is_so(instances) {
        let ended = instances.iter_mut().any(Instance::has_ended);
        let is_late = start.elapsed() > patience;
        assert!(!ended, "an instance has ended: {:?}\n{}", proxy.counts(), logs(instances));
        assert!(!is_late, "{} applied, {:?}\n{}", applied(instances), proxy.counts(), logs(instances));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A late EndTxn must not end a transaction that was begun after its client gave up on it.
#[test]
fn late_requests_corrupt_no_transaction() {
    if !broker::possible() {
        return;
    }
    let (lanes, spaces, late) = (4, 20, sized(20, 400) as u64);
    let port = free_port();
    let kafka = Broker::start(&["--proxied", &port.to_string()]);
    let proxy = Proxy::start(port, kafka.proxied_address());
    let place = place(kafka.address(), lanes);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    for instance in &instances {
        let text = std::fs::read_to_string(&instance.config).unwrap();
        let text = text.replace(kafka.address(), &proxy.address());
        let timeout = format!("\"socket.timeout.ms\" = {}\n", SOCKET_TIMEOUT.as_millis());
        let client = "[transport.kafka.client]\n";
        std::fs::write(&instance.config, text.replace(client, &format!("{client}{timeout}"))).unwrap();
    }
    instances.iter_mut().for_each(Instance::start);
    let load = Load::start(&place, kafka.address(), spaces, DIM);
    await_shared(&instances, lanes);
    let group = place.topic("queries").strip_suffix("-queries").unwrap();
    let troubles = Arc::new(Mutex::new(Troubles::new(format!("{group}-partition-0"))));
    let deciding = troubles.clone();
    proxy.set(move |request| lock(&deciding).decide(request));
    await_that(&mut instances, &proxy, |_| {
        let counts = proxy.counts();
        let kinds = [counts.delayed, counts.duplicated, counts.dropped_responses];
        lock(&troubles).left == 0 && counts.late_of(END_TXN) >= late && kinds.iter().all(|number| *number > 0)
    });
    proxy.set(|_| Action::Forward);
    await_that(&mut instances, &proxy, |_| proxy.outstanding() == 0);
    let (requests, rewarded) = load.stop();
    await_that(&mut instances, &proxy, |instances| applied(instances) == rewarded.len() as u64);
    instances.iter_mut().for_each(Instance::leave);
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
    println!("{requests} requests, {:?}", proxy.counts());
}
