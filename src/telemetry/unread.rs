//! Backlog of the log files.

use serde::Serialize;

use crate::engine::Side;

/// Maximum number of logs listed: those with the largest backlog.
const LOGS_MAX: usize = 20;

/// Unread bytes of log files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Unread {
    /// Of all logs of queries.
    pub query_bytes: u64,
    /// Of all logs of rewards.
    pub reward_bytes: u64,
    /// Logs with a backlog and its size, largest first.
    pub logs: Vec<(String, u64)>,
}

impl Unread {
    /// The backlog of these logs.
    pub fn of<'a>(logs: impl IntoIterator<Item = (Side, &'a str, u64)>) -> Self {
        let mut unread = Self::default();
        let mut left = Vec::new();
        for (side, name, bytes) in logs {
            *match side {
                Side::Query => &mut unread.query_bytes,
                Side::Reward => &mut unread.reward_bytes,
            } += bytes;
            if bytes > 0 {
                left.push((name, bytes));
            }
        }
        left.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        unread.logs = left.into_iter().take(LOGS_MAX).map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        unread
    }

    /// Of all logs together.
    pub fn bytes(&self) -> u64 {
        self.query_bytes + self.reward_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_most_is_left_of_are_named() {
        let names: Vec<String> = (0..LOGS_MAX + 5).map(|i| format!("queries/{i:02}.jsonl")).collect();
        let queries = names.iter().zip(0..).map(|(name, bytes)| (Side::Query, name.as_str(), bytes));
        let unread =
            Unread::of(queries.chain([(Side::Reward, "rewards/a.jsonl", 7), (Side::Reward, "rewards/b.jsonl", 0)]));
        assert_eq!((unread.query_bytes, unread.reward_bytes, unread.bytes()), (300, 7, 307));
        assert_eq!(unread.logs.len(), LOGS_MAX);
        assert_eq!(unread.logs[0], ("queries/24.jsonl".to_owned(), 24));
        assert!(unread.logs.iter().any(|(name, _)| name == "rewards/a.jsonl"));
        assert_eq!(Unread::of([(Side::Reward, "rewards/b.jsonl", 0)]), Unread::default());
    }
}
