//! Why a lane cannot go on. The kind of an error decides what the runtime does, so it is a type and not a text.

use std::io;

use crate::state::StateError;
use crate::store::StoreError;
use crate::transport::TransportError;
use crate::transport::kafka::cluster::Problem;

/// Why a lane cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// Another instance has taken the lane over.
    #[error("lane {0} is fenced: another instance took it over and resumes from its last snapshot")]
    Fenced(String),
    /// The group has given the lane to another instance.
    #[error("lane {0} was lost: the group has assigned it to another instance")]
    Lost(String),
    /// The same operation may succeed later: a disk is full, a broker does not answer.
    #[error("{0:#}")]
    Transient(anyhow::Error),
    /// Nothing but a change to the configuration, the store or the topics helps.
    #[error("{0:#}")]
    Final(anyhow::Error),
}

/// A result of an operation on a lane.
pub type Result<T, E = LaneError> = std::result::Result<T, E>;

impl LaneError {
    /// The same, with what was being done.
    pub fn context(self, doing: impl std::fmt::Display + Send + Sync + 'static) -> Self {
        match self {
            Self::Transient(error) => Self::Transient(error.context(doing)),
            Self::Final(error) => Self::Final(error.context(doing)),
            taken => taken,
        }
    }

    /// Whether another instance owns the lane.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Fenced(_) | Self::Lost(_))
    }

    /// The same error, if another instance owns the lane.
    pub fn taken(&self) -> Option<Self> {
        match self {
            Self::Fenced(lane) => Some(Self::Fenced(lane.clone())),
            Self::Lost(lane) => Some(Self::Lost(lane.clone())),
            _ => None,
        }
    }

    /// An error that no retry cures.
    pub fn last(message: impl std::fmt::Display + std::fmt::Debug + Send + Sync + 'static) -> Self {
        Self::Final(anyhow::anyhow!(message))
    }
}

/// Adds what was being done to an error.
pub trait Doing<T> {
    /// The same, with what was being done.
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<LaneError>> Doing<T> for std::result::Result<T, E> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.into().context(doing()))
    }
}

impl From<Problem> for LaneError {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Fenced(lane) => Self::Fenced(lane),
            Problem::Lost(lane) => Self::Lost(lane),
            Problem::Transient { .. } | Problem::Unreachable { .. } | Problem::NotDelivered { .. } => {
                Self::Transient(problem.into())
            }
            problem => Self::Final(problem.into()),
        }
    }
}

impl From<StoreError> for LaneError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Read { .. } | StoreError::Write { .. } => Self::Transient(error.into()),
            error => Self::Final(error.into()),
        }
    }
}

impl From<StateError> for LaneError {
    fn from(error: StateError) -> Self {
        match error {
            StateError::Store(error) => error.into(),
            error => Self::Final(error.into()),
        }
    }
}

impl From<io::Error> for LaneError {
    fn from(error: io::Error) -> Self {
        Self::Transient(error.into())
    }
}

impl From<TransportError> for LaneError {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::File(error) => error.into(),
            TransportError::Kafka(problem) => problem.into(),
        }
    }
}

impl From<crate::learner::BadState> for LaneError {
    fn from(error: crate::learner::BadState) -> Self {
        Self::Final(error.into())
    }
}

impl From<crate::wire::envelope::Damaged> for LaneError {
    fn from(error: crate::wire::envelope::Damaged) -> Self {
        Self::Final(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_an_error_follows_from_its_cause() {
        let transient = |error: LaneError| matches!(error, LaneError::Transient(_));
        assert!(transient(io::Error::from_raw_os_error(28).into()));
        assert!(transient(StoreError::Write { path: String::new(), problem: String::new() }.into()));
        assert!(transient(StateError::from(StoreError::Read { path: String::new(), problem: String::new() }).into()));
        let (doing, problem) = (String::new(), String::new());
        assert!(transient(Problem::Transient { doing, problem }.into()));
        assert!(matches!(LaneError::from(Problem::Fenced("a".to_owned())).context("x"), LaneError::Fenced(_)));
        assert!(matches!(LaneError::from(Problem::MissingTopic("t".to_owned())), LaneError::Final(_)));
        assert!(matches!(LaneError::from(StoreError::InUse(String::new())), LaneError::Final(_)));
    }
}
