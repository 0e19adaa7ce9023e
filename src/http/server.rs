//! The server loop that learner and router share: accepts connections, limits and times them out, shuts down.
//!
//! Clients can open connections faster than the process can serve them, and a process without free descriptors can neither
//! answer a health check nor open its own files. So the number of connections stays well below the descriptor limit. At the
//! limit a new connection evicts the one that has been idle longest. Some connections are reserved: while too many requests
//! are in progress, they answer only health checks.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router as Routes;
use axum::body::{Body, HttpBody};
use axum::http::{HeaderValue, Request, Response, header};
use axum::response::IntoResponse;
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};

use super::access::is_probe;
use super::{Access, Problem, Tls};
use crate::config::HttpConfig;
use crate::telemetry::HttpCounters;
use crate::transport::lock;

/// Maximum number of connections, regardless of descriptors.
const CONNECTIONS_MAX: u64 = 4096;

/// Maximum number of connections reserved for health checks.
const RESERVE_MAX: usize = 32;

/// Most bytes of a request's head, and of what is read of its body at a time.
const BUFFER_BYTES: usize = 16 << 10;

/// How long to wait for an evicted connection to close before the next one is evicted.
const EVICTION: Duration = Duration::from_millis(10);

/// Pauses after a failure to accept, the first and the longest.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Raises the soft limit of open descriptors to the hard limit. Returns the limit that holds then.
pub fn raise_descriptor_limit() -> u64 {
    // Without a readable limit the least that POSIX systems start with is assumed.
    rlimit::increase_nofile_limit(u64::MAX).or_else(|_| rlimit::Resource::NOFILE.get_soft()).unwrap_or(256)
}

/// A listener with its limits.
pub struct Server {
    listener: TcpListener,
    tls: Option<Tls>,
    access: Arc<Access>,
    limits: Limits,
    timeout: Duration,
    keep_alive: Duration,
    counters: Arc<HttpCounters>,
}

impl Server {
    /// Listens on `http.listen`. Fails if a listener beyond loopback has no token, or TLS has no usable certificate.
    pub async fn bind(config: &HttpConfig, counters: Arc<HttpCounters>) -> anyhow::Result<Self> {
        config.check_listen()?;
        let tls = Tls::load(&config.tls, counters.clone())?;
        let access = Arc::new(Access::load(config, counters.clone())?);
        let listener = TcpListener::bind(&config.listen).await?;
        let limits = Limits::new(raise_descriptor_limit());
        let (timeout, keep_alive) = (config.timeout_ms, config.keep_alive_ms);
        let [timeout, keep_alive] = [timeout, keep_alive].map(Duration::from_millis);
        Ok(Self { listener, tls, access, limits, timeout, keep_alive, counters })
    }

    /// The access rules.
    pub fn access(&self) -> Arc<Access> {
        self.access.clone()
    }

    /// The counters.
    pub fn counters(&self) -> Arc<HttpCounters> {
        self.counters.clone()
    }

    /// Where it listens, as a URL.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        self.listener.local_addr().map_or_else(|_| scheme.to_owned(), |address| format!("{scheme}://{address}"))
    }

    /// Serves until `stop` resolves, then closes idle connections and waits for requests in progress.
    pub async fn serve(self, routes: Routes, stop: impl Future<Output = ()>) {
        let (stopping, stopped) = watch::channel(false);
        // Every connection holds a sender: the channel closes with the last one.
        let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
        let connections = Arc::new(Connections::new(self.limits, self.counters.clone()));
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(self.keep_alive).max_buf_size(BUFFER_BYTES);
        let shared = Arc::new(Shared { builder, routes, tls: self.tls.clone(), timeout: self.timeout });
        let accept = async {
            let mut pause = BACK_OFF.0;
            loop {
                match self.listener.accept().await {
                    Ok((stream, _)) => {
                        pause = BACK_OFF.0;
                        let connection = connections.open().await;
                        tokio::spawn(shared.clone().run(stream, connection, stopped.clone(), open.clone()));
                    }
                    Err(error) if is_of_the_peer(&error) => {}
                    Err(error) => {
                        if self.counters.accept_failed(&error, Instant::now()) {
                            tracing::error!(%error, "cannot accept connections; retrying");
                        }
                        connections.evict_idle();
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(BACK_OFF.1);
                    }
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = stop => {}
        }
        drop((self.listener, open));
        stopping.send_replace(true);
        all_closed.recv().await;
    }
}

/// Whether the peer disconnected before it was accepted, which is not an error of this process.
fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// How many connections and requests there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limits {
    connections: usize,
    /// Requests in progress, health checks not counted. Fewer than connections: the rest is the reserve.
    requests: usize,
}

impl Limits {
    /// Half of the descriptors are left to everything else.
    fn new(descriptors: u64) -> Self {
        let connections = (descriptors / 2).clamp(2, CONNECTIONS_MAX) as usize;
        Self { connections, requests: connections - (connections / 4).clamp(1, RESERVE_MAX) }
    }
}

/// What all connections share.
struct Shared {
    builder: http1::Builder,
    routes: Routes,
    tls: Option<Tls>,
    timeout: Duration,
}

impl Shared {
    async fn run(
        self: Arc<Self>,
        stream: TcpStream,
        connection: Connection,
        stopped: watch::Receiver<bool>,
        _open: mpsc::Sender<Infallible>,
    ) {
        // Answers are small and written at once: waiting to fill a packet would only delay them.
        let _ = stream.set_nodelay(true);
        let first_by = tokio::time::Instant::now() + self.timeout;
        match self.tls.as_ref() {
            None => self.drive(stream, connection, stopped, first_by).await,
            Some(tls) => {
                let mut stopping = stopped.clone();
                let encrypted = tokio::select! {
                    encrypted = tls.accept(stream) => encrypted,
                    () = connection.0.evicted.notified() => return,
                    () = tokio::time::sleep_until(first_by) => return,
                    _ = stopping.wait_for(|stopping| *stopping) => return,
                };
                match encrypted {
                    Ok(encrypted) => self.drive(encrypted, connection, stopped, first_by).await,
                    Err(error) => tracing::debug!(%error, "TLS handshake failed"),
                }
            }
        }
    }

    /// Serves the requests of one connection until it ends, is evicted, times out or the server stops.
    async fn drive<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        connection: Connection,
        mut stopped: watch::Receiver<bool>,
        first_by: tokio::time::Instant,
    ) {
        let routes = TowerToHyperService::new(self.routes.clone());
        let slot = connection.0.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let begun = slot.begin(is_probe(request.uri().path()));
            let answer = begun.as_ref().map(|_| routes.call(request));
            async move {
                let (Some(answer), Some(busy)) = (answer, begun) else { return Ok::<_, Infallible>(overloaded()) };
                Ok(answer.await?.map(|body| Body::new(Sent { body, _busy: busy })))
            }
        });
        let mut served = pin!(self.builder.serve_connection(TokioIo::new(stream), service));
        let (mut is_stopping, mut is_new) = (false, true);
        loop {
            tokio::select! {
                // What has arrived is read first: a request that came before the server stops is still answered.
                biased;
                _ = served.as_mut() => return,
                () = connection.0.evicted.notified() => return,
                () = tokio::time::sleep_until(first_by), if is_new => {
                    if !connection.0.has_begun() {
                        return;
                    }
                    is_new = false;
                }
                _ = stopped.wait_for(|stopping| *stopping), if !is_stopping => {
                    // Waiting for a connection without a request in progress would delay the stop for nothing.
                    if connection.0.is_idle() {
                        return;
                    }
                    served.as_mut().graceful_shutdown();
                    is_stopping = true;
                }
            }
        }
    }
}

fn overloaded() -> Response<Body> {
    let mut response = Problem::unavailable("too many requests in progress: retry later").into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// All open connections.
struct Connections {
    limits: Limits,
    counters: Arc<HttpCounters>,
    /// One permit for each socket that may still be open. An evicted connection has left the table before its socket is
    /// closed: the table alone would let a burst take more descriptors than the limit.
    sockets: Arc<Semaphore>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    open: BTreeMap<u64, Entry>,
    /// Requests in progress that are no health checks.
    requests: usize,
}

struct Entry {
    /// Since when it waits for a request; `None` while one is in progress.
    idle_since: Option<Instant>,
    has_begun: bool,
    slot: Arc<Slot>,
}

/// One connection's place in the table.
struct Slot {
    id: u64,
    connections: Arc<Connections>,
    evicted: Notify,
}

/// Owns a slot: leaves the table when it is dropped. To be dropped after its socket.
struct Connection(Arc<Slot>, #[expect(dead_code, reason = "held until the socket is closed")] OwnedSemaphorePermit);

/// A request in progress, until the last byte of its response is passed on.
struct Busy {
    slot: Arc<Slot>,
    is_counted: bool,
}

impl Connections {
    fn new(limits: Limits, counters: Arc<HttpCounters>) -> Self {
        let sockets = Arc::new(Semaphore::new(limits.connections));
        Self { limits, counters, sockets, table: Mutex::default() }
    }

    /// Adds a connection, in place of the one that has been idle longest if there are too many.
    async fn open(self: &Arc<Self>) -> Connection {
        loop {
            if let Ok(permit) = self.sockets.clone().try_acquire_owned() {
                return self.insert(permit);
            }
            self.evict_idle();
            if let Ok(Ok(permit)) = tokio::time::timeout(EVICTION, self.sockets.clone().acquire_owned()).await {
                return self.insert(permit);
            }
        }
    }

    fn insert(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Connection {
        let mut table = lock(&self.table);
        let id = table.next;
        table.next += 1;
        let slot = Arc::new(Slot { id, connections: self.clone(), evicted: Notify::new() });
        let entry = Entry { idle_since: Some(Instant::now()), has_begun: false, slot: slot.clone() };
        table.open.insert(id, entry);
        self.report(&table);
        Connection(slot, permit)
    }

    /// Closes the connection that has been idle longest, if there is one.
    fn evict_idle(&self) {
        let mut table = lock(&self.table);
        let idle = table.open.values().filter_map(|entry| Some((entry.idle_since?, entry.slot.id)));
        let Some((_, id)) = idle.min() else { return };
        if let Some(entry) = table.open.remove(&id) {
            entry.slot.evicted.notify_one();
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        self.report(&table);
    }

    fn report(&self, table: &Table) {
        self.counters.connections.store(table.open.len() as u64, Ordering::Relaxed);
    }
}

impl Slot {
    /// Begins a request. `None` if it was evicted a moment ago, or too many requests are in progress.
    fn begin(self: &Arc<Self>, is_probe: bool) -> Option<Busy> {
        let mut table = lock(&self.connections.table);
        let is_full = table.requests >= self.connections.limits.requests;
        let entry = table.open.get_mut(&self.id)?;
        entry.has_begun = true;
        if is_full && !is_probe {
            self.connections.counters.overloaded.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        entry.idle_since = None;
        table.requests += usize::from(!is_probe);
        Some(Busy { slot: self.clone(), is_counted: !is_probe })
    }

    fn is_idle(&self) -> bool {
        let table = lock(&self.connections.table);
        table.open.get(&self.id).is_none_or(|entry| entry.idle_since.is_some())
    }

    fn has_begun(&self) -> bool {
        lock(&self.connections.table).open.get(&self.id).is_some_and(|entry| entry.has_begun)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let connections = &self.0.connections;
        let mut table = lock(&connections.table);
        table.open.remove(&self.0.id);
        connections.report(&table);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut table = lock(&self.slot.connections.table);
        table.requests -= usize::from(self.is_counted);
        if let Some(entry) = table.open.get_mut(&self.slot.id) {
            entry.idle_since = Some(Instant::now());
        }
    }
}

/// A response's body, with the request that it belongs to.
struct Sent {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(connections: usize, requests: usize) -> Arc<Connections> {
        Arc::new(Connections::new(Limits { connections, requests }, Arc::default()))
    }

    #[test]
    fn limits_leave_descriptors_and_a_reserve() {
        assert_eq!(Limits::new(1024), Limits { connections: 512, requests: 480 });
        assert_eq!(Limits::new(u64::MAX), Limits { connections: 4096, requests: 4064 });
        assert_eq!(Limits::new(20), Limits { connections: 10, requests: 8 });
        assert_eq!(Limits::new(0), Limits { connections: 2, requests: 1 });
    }

    fn open(connections: &Arc<Connections>, number: usize) -> Vec<Connection> {
        (0..number).map(|_| connections.insert(connections.sockets.clone().try_acquire_owned().unwrap())).collect()
    }

    #[test]
    fn the_connection_idle_longest_is_evicted() {
        let all = connections(3, 2);
        let held = open(&all, 3);
        let ids = || lock(&all.table).open.keys().copied().collect::<Vec<_>>();
        let busy = held[0].0.begin(false);
        assert!(busy.is_some());
        all.evict_idle();
        assert_eq!(ids(), [0, 2], "the first is busy, the second was idle longest");
        assert!(held[1].0.begin(false).is_none(), "it was evicted");
        drop(busy);
        all.evict_idle();
        assert_eq!(ids(), [0], "the first became idle after the third");
        assert_eq!(all.sockets.available_permits(), 0, "until they are closed");
        drop(held);
        assert!(ids().is_empty() && all.sockets.available_permits() == 3);
        assert_eq!(all.counters.evicted.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn health_checks_are_answered_beyond_the_limit_of_requests() {
        let all = connections(3, 1);
        let held = open(&all, 3);
        let busy = held[0].0.begin(false);
        assert!(held[1].0.begin(false).is_none());
        let probe = held[2].0.begin(true);
        assert!(busy.is_some() && probe.is_some());
        drop((busy, probe));
        assert!(held[1].0.begin(false).is_some());
        assert_eq!(all.counters.overloaded.load(Ordering::Relaxed), 1);
    }
}
