//! Kafka transactions of a lane, with fencing.
//!
//! Each lane has a transactional ID. Initializing transactions under that ID aborts the open transaction of the previous
//! owner and fences it: the brokers reject what it still sends, which is reported as [`Problem::Fenced`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer};

use super::client::Client;
use super::cluster::{CALL, Cluster, Problem, failed};
use super::outlet::{Deliveries, Failures, LetterLimits, Outgoing, Undelivered, as_large, shrink};

/// A transactional producer of a lane.
pub struct Transactions {
    producer: Client<BaseProducer<Deliveries>>,
    undelivered: Arc<Undelivered>,
    lane: String,
    patience: Duration,
    given_up: Arc<AtomicBool>,
}

/// Maximum attempts of an aborted transaction.
const ATTEMPTS: usize = 3;

/// Poll timeout for delivery reports.
const POLL: Duration = Duration::from_millis(20);

/// Default limit of the brokers on the transaction timeout.
const LONGEST_MS: u64 = 900_000;

impl Transactions {
    /// Takes over the transactional ID of a lane: fences previous owners and decides their open transactions. Messages may
    /// have up to `message_bytes`; dead letters among them have `limits`.
    pub fn take_over(
        cluster: &Cluster,
        lane: &str,
        message_bytes: usize,
        limits: Option<LetterLimits>,
    ) -> Result<Self, Problem> {
        let undelivered = Arc::new(Undelivered::default());
        let patience_ms = cluster.config.delivery_timeout_ms.min(LONGEST_MS);
        let mut settings = cluster.producer();
        settings
            .set("transactional.id", format!("{}-{lane}", cluster.config.group))
            .set("transaction.timeout.ms", patience_ms.to_string())
            .set("message.timeout.ms", patience_ms.to_string())
            .set("message.max.bytes", message_bytes.clamp(1_000_000, 1_000_000_000).to_string());
        if let Some(limits) = limits {
            settings.set("batch.size", limits.batch_bytes().to_string());
        }
        let context = Deliveries { undelivered: undelivered.clone(), trouble: cluster.trouble.clone() };
        let producer: Client<BaseProducer<Deliveries>> = Client::new(&settings, context)?;
        let patience = Duration::from_millis(patience_ms);
        let lane = lane.to_owned();
        let transactions = Self { producer, undelivered, lane, patience, given_up: Arc::default() };
        transactions.again_while_it_may_help(|| transactions.producer.init_transactions(CALL))?;
        Ok(transactions)
    }

    /// A flag that aborts the current operation once it is set.
    pub fn given_up(&self) -> Arc<AtomicBool> {
        self.given_up.clone()
    }

    /// Begins a transaction and delivers these messages, replacing those that are too large with smaller ones. They are not
    /// committed yet.
    pub fn deliver(&self, mut messages: Vec<Outgoing>) -> Result<(), Problem> {
        let mut attempt = 1;
        loop {
            let Err((problem, mut too_large)) = self.try_deliver(&messages) else { return Ok(()) };
            self.check_fatal()?;
            self.abort()?;
            too_large.extend(self.undelivered.take().too_large);
            if !too_large.is_empty() && !self.is_given_up() {
                // Not counted as an attempt: each message shrinks twice at most. Messages that were not sent after the
                // first failure would fail too if they are as large.
                too_large.extend(as_large(&messages, &too_large));
                messages = shrink(messages, &too_large).ok_or(problem)?;
                continue;
            }
            if attempt == ATTEMPTS || self.is_given_up() {
                return Err(problem);
            }
            tracing::warn!(lane = self.lane, attempt, %problem, "transaction failed; retrying");
            attempt += 1;
        }
    }

    /// Commits the delivered messages.
    pub fn commit(&self) -> Result<(), Problem> {
        self.again_while_it_may_help(|| self.producer.commit_transaction(CALL))
    }

    /// The error carries the indices of messages that are too large, as far as known.
    fn try_deliver(&self, messages: &[Outgoing]) -> Result<(), (Problem, BTreeSet<usize>)> {
        let doing = || format!("transaction of lane {} failed", self.lane);
        let failed = |error: KafkaError| (failed(doing(), &error), self.undelivered.take().too_large);
        self.producer.begin_transaction().map_err(failed)?;
        for (number, message) in messages.iter().enumerate() {
            message.send(&self.producer, number).map_err(failed)?;
        }
        // Each message has a timeout, after which it is reported as undelivered. One is enough: the client sends no other
        // until the transaction is aborted.
        while self.producer.in_flight_count() > 0 && !self.is_given_up() && !self.undelivered.any() {
            self.producer.poll(POLL);
        }
        let Failures { number, problem, too_large } = self.undelivered.take();
        if self.is_given_up() {
            return Err((
                Problem::Failed { doing: doing(), problem: "aborted because the lane was lost".to_owned() },
                too_large,
            ));
        }
        match number + too_large.len() {
            0 => Ok(()),
            number => Err((
                Problem::NotDelivered { topic: format!("the topics of lane {}", self.lane), number, problem },
                too_large,
            )),
        }
    }

    /// Aborts the transaction. The client drops unsent messages but waits until they are reported, which happens only when
    /// it is polled: so the timeout is short while it has messages.
    fn abort(&self) -> Result<(), Problem> {
        self.again_while_it_may_help(|| {
            let timeout = if self.producer.in_flight_count() > 0 { POLL } else { CALL };
            self.producer.abort_transaction(timeout).inspect_err(|_| self.producer.poll(POLL))
        })
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Retries a call while the client reports the error as retriable and there is time.
    fn again_while_it_may_help(&self, call: impl Fn() -> Result<(), KafkaError>) -> Result<(), Problem> {
        let until = Instant::now() + self.patience;
        loop {
            let error = match call() {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            self.check_fatal()?;
            let code = error.rdkafka_error_code();
            if code.is_some_and(is_fence) {
                return Err(Problem::Fenced(self.lane.clone()));
            }
            let may_help = match &error {
                KafkaError::Transaction(error) => error.is_retriable(),
                _ => code == Some(RDKafkaErrorCode::OperationTimedOut),
            };
            if !may_help || self.is_given_up() || Instant::now() >= until {
                return Err(failed(format!("transaction of lane {} failed", self.lane), &error));
            }
        }
    }

    fn check_fatal(&self) -> Result<(), Problem> {
        match self.producer.client().fatal_error() {
            None => Ok(()),
            Some((code, _)) if is_fence(code) => Err(Problem::Fenced(self.lane.clone())),
            Some((_, problem)) => {
                Err(Problem::Failed { doing: format!("transaction of lane {} failed", self.lane), problem })
            }
        }
    }
}

/// Whether an error means that another instance has taken over.
fn is_fence(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    [Code::Fenced, Code::ProducerFenced, Code::InvalidProducerEpoch].contains(&code)
}
