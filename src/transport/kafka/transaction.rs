//! Kafka transactions of a lane, with fencing.
//!
//! Each lane has a transactional ID. Initializing a producer under that ID gives it a new epoch: the brokers abort the open
//! transaction of every earlier producer and reject what it still sends, which is reported as [`Problem::Fenced`].
//!
//! A request names its producer and epoch, but not its transaction. So a request that is answered late, or sent twice, can
//! reach the brokers after its own transaction has ended, and end the next one of the same epoch in the middle. Brokers
//! prevent this only for clients that use another epoch for each transaction (KIP-890), which librdkafka does not. Hence the
//! rule of [`Transactions`]: a producer is used again only if each of its requests was sent once and answered. After anything
//! else a new producer is initialized, which fences stragglers, and then the brokers are asked what is committed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer as _};

use super::client::Client;
use super::cluster::{CALL, Cluster, Problem, Trouble, failed};
use super::outlet::{Deliveries, LetterLimits, Outgoing, Undelivered, as_large, shrink};

/// Initializes producers under the transactional ID of a lane.
pub trait Producers: Send {
    /// A producer.
    type Producer: Producer;

    /// Initializes a producer: fences earlier ones and decides their open transactions. Gives up when `given_up` is set.
    fn init(&self, given_up: &AtomicBool) -> Result<Self::Producer, Problem>;
}

/// A transactional producer: one epoch of its transactional ID.
pub trait Producer: Send {
    /// Begins a transaction with these messages; returns once all are acknowledged. Gives up when `given_up` is set.
    fn deliver(&mut self, messages: &[Outgoing], given_up: &AtomicBool) -> Result<(), Undone>;

    /// Commits the transaction.
    fn commit(&mut self) -> Result<Sent, Undone>;
}

/// How often the requests of a committed transaction were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// Once: all of them are answered.
    Once,
    /// Perhaps more than once: one may still arrive.
    PerhapsTwice,
}

/// Why a transaction is not known to be committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undone {
    /// A later producer has fenced this one.
    Fenced,
    /// The brokers reject the size of the messages with these indices.
    TooLarge {
        /// The indices.
        indices: BTreeSet<usize>,
        /// What to report if they cannot be replaced.
        problem: Problem,
    },
    /// Anything else.
    Failed(Problem),
}

/// What is committed of an attempted transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    NotCommitted,
    /// All of it.
    Committed,
    /// A later transaction of another owner.
    Overtaken,
}

/// Finds out what is committed of the last attempted transaction.
pub type Ask<'a> = dyn FnMut() -> Result<Outcome, Problem> + 'a;

/// Transactions of one owner of a lane.
pub struct Transactions<P: Producers> {
    producers: P,
    /// None after a request whose answer is unknown.
    producer: Option<P::Producer>,
    lane: String,
    given_up: Arc<AtomicBool>,
}

impl<P: Producers> Transactions<P> {
    /// Fences previous owners of the lane and decides their open transactions. Every operation ends soon after `given_up` is
    /// set.
    pub fn take_over(producers: P, lane: &str, given_up: &Arc<AtomicBool>) -> Result<Self, Problem> {
        let producer = Some(producers.init(given_up)?);
        Ok(Self { producers, producer, lane: lane.to_owned(), given_up: given_up.clone() })
    }

    /// Begins a transaction with these messages, replacing those that are too large with smaller ones. They are not committed
    /// yet, unless an earlier attempt turns out to be committed: [`Outcome::Committed`].
    pub fn deliver(&mut self, mut messages: Vec<Outgoing>, ask: &mut Ask<'_>) -> Result<Outcome, Problem> {
        loop {
            let mut producer = match self.producer.take() {
                Some(producer) => producer,
                None => match self.renew(ask)? {
                    (_, Outcome::Committed) => return Ok(Outcome::Committed),
                    (producer, _) => producer,
                },
            };
            match producer.deliver(&messages, &self.given_up) {
                Ok(()) => {
                    self.producer = Some(producer);
                    return Ok(Outcome::NotCommitted);
                }
                Err(Undone::TooLarge { mut indices, problem }) if !self.is_given_up() => {
                    // Each message shrinks twice at most. Messages that were not sent after the first failure would fail too
                    // if they are as large.
                    indices.extend(as_large(&messages, &indices));
                    messages = shrink(messages, &indices).ok_or(problem)?;
                }
                Err(undone) => return Err(self.problem(undone)),
            }
        }
    }

    /// Commits what was delivered.
    pub fn commit(&mut self, ask: &mut Ask<'_>) -> Result<(), Problem> {
        let Some(mut producer) = self.producer.take() else {
            return Err(self.not_committed("nothing was delivered"));
        };
        match producer.commit() {
            Ok(Sent::Once) => self.producer = Some(producer),
            Ok(Sent::PerhapsTwice) => {}
            Err(Undone::Fenced) => return Err(self.problem(Undone::Fenced)),
            Err(undone) => {
                let problem = self.problem(undone);
                tracing::warn!(lane = self.lane, %problem, "cannot commit; initializing a new producer to see what is committed");
                drop(producer);
                let (producer, outcome) = self.renew(ask)?;
                self.producer = Some(producer);
                if outcome == Outcome::NotCommitted {
                    return Err(self.not_committed(&problem.to_string()));
                }
            }
        }
        Ok(())
    }

    /// A producer that no earlier request can reach, and what is committed. An owner that was overtaken does not fence its
    /// successor.
    fn renew(&self, ask: &mut Ask<'_>) -> Result<(P::Producer, Outcome), Problem> {
        if self.is_given_up() {
            return Err(Problem::Lost(self.lane.clone()));
        }
        let check = |outcome| match outcome {
            Outcome::Overtaken => Err(Problem::Fenced(self.lane.clone())),
            outcome => Ok(outcome),
        };
        check(ask()?)?;
        let producer = self.producers.init(&self.given_up)?;
        Ok((producer, check(ask()?)?))
    }

    fn problem(&self, undone: Undone) -> Problem {
        match undone {
            Undone::Fenced => Problem::Fenced(self.lane.clone()),
            _ if self.is_given_up() => Problem::Lost(self.lane.clone()),
            Undone::TooLarge { problem, .. } | Undone::Failed(problem) => problem,
        }
    }

    fn not_committed(&self, problem: &str) -> Problem {
        let doing = format!("the last transaction of lane {} is not committed", self.lane);
        Problem::Transient { doing, problem: problem.to_owned() }
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }
}

/// Poll timeout for delivery reports.
const POLL: Duration = Duration::from_millis(20);

/// Timeout of one wait for the initialization.
const INIT_STEP: Duration = Duration::from_secs(1);

/// Default limit of the brokers on the transaction timeout.
const LONGEST_MS: u64 = 900_000;

/// The client's pause before it sends a request again, less its jitter of 20%. A commit that takes less was sent once.
const RETRY_BACKOFF_MS: u64 = 1000;
const SENT_ONCE: Duration = Duration::from_millis(RETRY_BACKOFF_MS * 3 / 4);

/// Producers of librdkafka.
pub struct KafkaProducers {
    settings: ClientConfig,
    trouble: Arc<Trouble>,
    lane: String,
    patience: Duration,
}

impl KafkaProducers {
    /// Producers of a lane. Messages may have up to `message_bytes`; dead letters among them have `limits`.
    pub fn new(cluster: &Cluster, lane: &str, message_bytes: usize, limits: Option<LetterLimits>) -> Self {
        let patience_ms = cluster.config.delivery_timeout_ms.min(LONGEST_MS);
        let mut settings = cluster.producer();
        settings
            .set("transactional.id", format!("{}-{lane}", cluster.config.group))
            .set("transaction.timeout.ms", patience_ms.to_string())
            .set("message.timeout.ms", patience_ms.to_string())
            .set("message.max.bytes", message_bytes.clamp(1_000_000, 1_000_000_000).to_string())
            .set("retry.backoff.ms", RETRY_BACKOFF_MS.to_string())
            .set("retry.backoff.max.ms", RETRY_BACKOFF_MS.to_string());
        if let Some(limits) = limits {
            settings.set("batch.size", limits.batch_bytes().to_string());
        }
        let patience = Duration::from_millis(patience_ms);
        Self { settings, trouble: cluster.trouble.clone(), lane: lane.to_owned(), patience }
    }
}

impl Producers for KafkaProducers {
    type Producer = KafkaProducer;

    fn init(&self, given_up: &AtomicBool) -> Result<KafkaProducer, Problem> {
        let undelivered = Arc::new(Undelivered::default());
        let context = Deliveries { undelivered: undelivered.clone(), trouble: self.trouble.clone() };
        let client = Client::new(&self.settings, context)?;
        let producer = KafkaProducer { client, undelivered, lane: self.lane.clone() };
        let until = Instant::now() + self.patience;
        // Initializing again waits for the same answer.
        while let Err(error) = producer.client.init_transactions(INIT_STEP) {
            match producer.undone(&error) {
                _ if given_up.load(Ordering::Relaxed) => return Err(Problem::Lost(self.lane.clone())),
                Undone::Fenced => return Err(Problem::Fenced(self.lane.clone())),
                Undone::Failed(problem @ Problem::Transient { .. }) if Instant::now() < until => {
                    tracing::debug!(lane = self.lane, %problem, "cannot initialize transactions yet");
                }
                Undone::Failed(problem) | Undone::TooLarge { problem, .. } => return Err(problem),
            }
        }
        Ok(producer)
    }
}

/// A producer of librdkafka. Dropping it drops what it has not sent; its open transaction is aborted by the next producer.
pub struct KafkaProducer {
    client: Client<BaseProducer<Deliveries>>,
    undelivered: Arc<Undelivered>,
    lane: String,
}

impl Producer for KafkaProducer {
    fn deliver(&mut self, messages: &[Outgoing], given_up: &AtomicBool) -> Result<(), Undone> {
        self.client.begin_transaction().map_err(|error| self.undone(&error))?;
        for (number, message) in messages.iter().enumerate() {
            message.send(&self.client, number).map_err(|error| self.undone(&error))?;
        }
        // Each message has a timeout, after which it is reported as undelivered. One is enough to fail.
        let is_given_up = || given_up.load(Ordering::Relaxed);
        while self.client.in_flight_count() > 0 && !is_given_up() && !self.undelivered.any() {
            self.client.poll(POLL);
        }
        self.check_fatal()?;
        let failures = self.undelivered.take();
        let number = failures.number + failures.too_large.len();
        let problem = failures.problem(format!("the topics of lane {}", self.lane), number);
        let indices = failures.too_large;
        match number {
            0 if is_given_up() => Err(Undone::Failed(Problem::Lost(self.lane.clone()))),
            0 => Ok(()),
            _ if indices.is_empty() => Err(Undone::Failed(problem)),
            _ => Err(Undone::TooLarge { indices, problem }),
        }
    }

    fn commit(&mut self) -> Result<Sent, Undone> {
        let begun = Instant::now();
        self.client.commit_transaction(CALL).map_err(|error| self.undone(&error))?;
        Ok(if begun.elapsed() < SENT_ONCE { Sent::Once } else { Sent::PerhapsTwice })
    }
}

impl KafkaProducer {
    fn undone(&self, error: &KafkaError) -> Undone {
        let doing = || format!("transaction of lane {} failed", self.lane);
        if let Err(undone) = self.check_fatal() {
            return undone;
        }
        let is_retriable =
            matches!(error, KafkaError::Transaction(error) if error.is_retriable() || error.txn_requires_abort());
        match error.rdkafka_error_code() {
            Some(code) if is_fence(code) => Undone::Fenced,
            _ if is_retriable => Undone::Failed(Problem::Transient { doing: doing(), problem: error.to_string() }),
            _ => Undone::Failed(failed(doing(), error)),
        }
    }

    fn check_fatal(&self) -> Result<(), Undone> {
        match self.client.client().fatal_error() {
            None => Ok(()),
            Some((code, _)) if is_fence(code) => Err(Undone::Fenced),
            // A producer that cannot be used any more is replaced.
            Some((_, problem)) => {
                let doing = format!("transaction of lane {} failed", self.lane);
                Err(Undone::Failed(Problem::Transient { doing, problem }))
            }
        }
    }
}

/// Whether an error means that another producer has taken over.
fn is_fence(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    [Code::Fenced, Code::ProducerFenced, Code::InvalidProducerEpoch].contains(&code)
}
