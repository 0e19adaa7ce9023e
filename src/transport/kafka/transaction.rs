//! Messages that count together or not at all, and only while nobody else has taken over.
//!
//! Each lane has a name of its own among the brokers' transactions. Whoever begins under that name ends what another had
//! begun and shuts that one out: what it still sends is refused, which is told here as [`Problem::Fenced`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer};

use super::cluster::{CALL, Cluster, Problem, failed, make};
use super::outlet::{Deliveries, Failures, LetterLimits, Outgoing, Undelivered, as_large, shrink};

/// The right to write in the name of a lane.
pub struct Transactions {
    producer: BaseProducer<Deliveries>,
    undelivered: Arc<Undelivered>,
    lane: String,
    patience: Duration,
    given_up: Arc<AtomicBool>,
}

/// A transaction that the brokers ended, or that had to be, is tried so often.
const ATTEMPTS: usize = 3;

/// How long the client is polled for reports at a time.
const POLL: Duration = Duration::from_millis(20);

/// No broker lets a transaction take longer, unless it is configured.
const LONGEST_MS: u64 = 900_000;

impl Transactions {
    /// Takes over the name of a lane: from here on nobody else writes under it, and all that anybody has written before
    /// is decided. Messages may take so many bytes; where there are dead letters among them, these have limits.
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
        let producer: BaseProducer<Deliveries> = make(&settings, context)?;
        let patience = Duration::from_millis(patience_ms);
        let lane = lane.to_owned();
        let transactions = Self { producer, undelivered, lane, patience, given_up: Arc::default() };
        transactions.again_while_it_may_help(|| transactions.producer.init_transactions(CALL))?;
        Ok(transactions)
    }

    /// What makes it give up whatever it is at, once it is set.
    pub fn given_up(&self) -> Arc<AtomicBool> {
        self.given_up.clone()
    }

    /// Begins a transaction and has the brokers take these messages, or smaller ones in the place of those that are too
    /// large. They do not count yet.
    pub fn deliver(&self, mut messages: Vec<Outgoing>) -> Result<(), Problem> {
        let mut attempt = 1;
        loop {
            let Err((problem, mut too_large)) = self.try_deliver(&messages) else { return Ok(()) };
            self.check_fatal()?;
            self.abort()?;
            too_large.extend(self.undelivered.take().too_large);
            if !too_large.is_empty() && !self.is_given_up() {
                // This is no attempt of its own: each message shrinks twice at most. What was not tried any more because
                // the first had failed fails likewise, if it is as large.
                too_large.extend(as_large(&messages, &too_large));
                messages = shrink(messages, &too_large).ok_or(problem)?;
                continue;
            }
            if attempt == ATTEMPTS || self.is_given_up() {
                return Err(problem);
            }
            tracing::warn!(lane = self.lane, attempt, "a transaction is tried again: {problem}");
            attempt += 1;
        }
    }

    /// Makes what was delivered count.
    pub fn commit(&self) -> Result<(), Problem> {
        self.again_while_it_may_help(|| self.producer.commit_transaction(CALL))
    }

    /// The error comes with the numbers of messages that are too large, as far as they are known.
    fn try_deliver(&self, messages: &[Outgoing]) -> Result<(), (Problem, BTreeSet<usize>)> {
        let doing = || format!("a transaction of lane {}", self.lane);
        let failed = |error: KafkaError| (failed(doing(), &error), self.undelivered.take().too_large);
        self.producer.begin_transaction().map_err(failed)?;
        for (number, message) in messages.iter().enumerate() {
            message.send(&self.producer, number).map_err(failed)?;
        }
        // Each message has its own time limit, after which it is reported as undelivered. One that is undelivered is enough:
        // the client sends no other until the transaction is aborted.
        while self.producer.in_flight_count() > 0 && !self.is_given_up() && !self.undelivered.any() {
            self.producer.poll(POLL);
        }
        let Failures { number, problem, too_large } = self.undelivered.take();
        if self.is_given_up() {
            return Err((Problem::Failed { doing: doing(), problem: "it was given up".to_owned() }, too_large));
        }
        match number + too_large.len() {
            0 => Ok(()),
            number => Err((Problem::NotDelivered { topic: doing(), number, problem }, too_large)),
        }
    }

    /// Aborts the transaction. The client drops what it has not sent, but waits until that is reported, which happens only
    /// when it is polled: so it gets little time while it has messages.
    fn abort(&self) -> Result<(), Problem> {
        self.again_while_it_may_help(|| {
            let timeout = if self.producer.in_flight_count() > 0 { POLL } else { CALL };
            self.producer.abort_transaction(timeout).inspect_err(|_| self.producer.poll(POLL))
        })
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Calls until it succeeds, as long as the client says that it may, and there is time.
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
                return Err(failed(format!("a transaction of lane {}", self.lane), &error));
            }
        }
    }

    fn check_fatal(&self) -> Result<(), Problem> {
        match self.producer.client().fatal_error() {
            None => Ok(()),
            Some((code, _)) if is_fence(code) => Err(Problem::Fenced(self.lane.clone())),
            Some((_, problem)) => {
                Err(Problem::Failed { doing: format!("a transaction of lane {}", self.lane), problem })
            }
        }
    }
}

/// Whether an error says that another has taken over.
fn is_fence(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    [Code::Fenced, Code::ProducerFenced, Code::InvalidProducerEpoch].contains(&code)
}
