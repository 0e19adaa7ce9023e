//! Messages that count together or not at all, and only while nobody else has taken over.
//!
//! Each lane has a name of its own among the brokers' transactions. Whoever begins under that name ends what another had
//! begun and shuts that one out: what it still sends is refused, which is told here as [`Problem::Fenced`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer};

use super::cluster::{CALL, Cluster, Problem, failed, make};
use super::outlet::{Deliveries, Outgoing, Undelivered};

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

/// No broker lets a transaction take longer, unless it is configured.
const LONGEST_MS: u64 = 900_000;

impl Transactions {
    /// Takes over the name of a lane: from here on nobody else writes under it, and all that anybody has written before
    /// is decided. Messages may take so many bytes.
    pub fn take_over(cluster: &Cluster, lane: &str, message_bytes: usize) -> Result<Self, Problem> {
        let undelivered = Arc::new(Undelivered::default());
        let patience_ms = cluster.config.delivery_timeout_ms.min(LONGEST_MS);
        let mut settings = cluster.producer();
        settings
            .set("transactional.id", format!("{}-{lane}", cluster.config.group))
            .set("transaction.timeout.ms", patience_ms.to_string())
            .set("message.timeout.ms", patience_ms.to_string())
            .set("message.max.bytes", message_bytes.clamp(1_000_000, 1_000_000_000).to_string());
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

    /// Begins a transaction and has the brokers take these messages. They do not count yet.
    pub fn deliver(&self, messages: &[Outgoing]) -> Result<(), Problem> {
        let mut attempt = 1;
        loop {
            let problem = match self.try_deliver(messages) {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            };
            self.check_fatal()?;
            self.again_while_it_may_help(|| self.producer.abort_transaction(CALL))?;
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

    fn try_deliver(&self, messages: &[Outgoing]) -> Result<(), Problem> {
        let doing = || format!("a transaction of lane {}", self.lane);
        let failed = |error: KafkaError| failed(doing(), &error);
        self.producer.begin_transaction().map_err(failed)?;
        messages.iter().try_for_each(|message| message.send(&self.producer)).map_err(failed)?;
        // Each message has its own time limit, after which it is told as undelivered.
        while self.producer.in_flight_count() > 0 {
            if self.is_given_up() {
                return Err(Problem::Failed { doing: doing(), problem: "it was given up".to_owned() });
            }
            self.producer.poll(Duration::from_millis(20));
        }
        match self.undelivered.take() {
            (0, _) => Ok(()),
            (number, problem) => Err(Problem::NotDelivered { topic: doing(), number, problem }),
        }
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
