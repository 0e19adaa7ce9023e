//! What names of columns say. A score below zero speaks against a role, zero says nothing.

/// The words of a name, in lowercase: `clickedAt` and `clicked_at` are `clicked` and `at`.
fn words(pointer: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in pointer.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        if c.is_alphanumeric() {
            words.last_mut().into_iter().for_each(|word| word.extend(c.to_lowercase()));
        }
        was_lower = c.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The score of the best and of the worst word.
fn score(pointer: &str, table: &[(&[&str], i32)]) -> i32 {
    let words = words(pointer);
    let scores = table.iter().filter(|(known, _)| words.iter().any(|word| known.contains(&word.as_str())));
    let scores: Vec<i32> = scores.map(|(_, score)| *score).collect();
    scores.iter().copied().filter(|score| *score > 0).max().unwrap_or(0)
        + scores.iter().copied().filter(|score| *score < 0).min().unwrap_or(0)
}

/// The query embedding.
pub fn vector(pointer: &str) -> i32 {
    let table: [(&[&str], i32); 3] = [
        (&["query"], 12),
        (&["embedding", "embeddings", "emb", "vector", "vec", "features", "context"], 10),
        (&["doc", "document", "item", "product", "answer", "passage", "user"], -6),
    ];
    // A vector is hardly anything else.
    score(pointer, &table).max(0) + 5 + score(pointer, &[(table[2].0, -6)])
}

/// The chosen model.
pub fn model(pointer: &str) -> i32 {
    score(
        pointer,
        &[
            (&["model", "models", "arm", "encoder", "embedder", "retriever", "ranker"], 10),
            (
                &[
                    "variant",
                    "backend",
                    "engine",
                    "treatment",
                    "bucket",
                    "route",
                    "routed",
                    "choice",
                    "chosen",
                    "action",
                ],
                6,
            ),
            (
                &["country", "device", "language", "lang", "locale", "platform", "os", "browser", "status", "version"],
                -6,
            ),
        ],
    )
}

/// The request ID.
pub fn id(pointer: &str) -> i32 {
    score(
        pointer,
        &[
            (&["request", "search", "query", "trace", "impression", "decision"], 10),
            (&["id", "uuid", "guid", "key", "rid", "qid"], 8),
            (&["user", "customer", "item", "doc", "document", "product", "session", "visitor", "account"], -9),
        ],
    )
}

/// The time.
pub fn time(pointer: &str) -> i32 {
    score(
        pointer,
        &[
            (&["ts", "time", "timestamp", "datetime", "date", "at", "when", "ms"], 10),
            (&["created", "occurred", "logged", "received", "day"], 6),
            (&["latency", "duration", "took", "elapsed", "updated", "modified", "birth"], -8),
        ],
    )
}

/// The reward.
pub fn reward(pointer: &str) -> i32 {
    score(
        pointer,
        &[
            (&["reward", "rewards"], 12),
            (&["click", "clicked", "clicks", "label", "rating", "stars", "purchase", "purchased", "conversion"], 9),
            (&["converted", "relevance", "relevant", "feedback", "ndcg", "gain", "revenue", "success", "thumbs"], 9),
            (&["event", "action", "type", "kind", "outcome", "value", "score"], 6),
            (&["id", "version", "position", "rank", "price", "latency", "ms", "propensity", "probability"], -10),
        ],
    )
}

/// The propensities: a distribution, or the probability of the chosen model.
pub fn propensities(pointer: &str, is_distribution: bool) -> i32 {
    let known = score(
        pointer,
        &[
            (&["propensity", "propensities", "pscore"], 12),
            (&["probability", "probabilities", "prob", "probs", "p", "weights", "distribution"], 8),
            (&["policy"], -4),
        ],
    );
    // A mapping of words to numbers that sum to 1 is hardly anything else.
    if is_distribution { known.max(0) + 5 } else { known }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_speak() {
        assert_eq!(words("/payload/clickedAt_ms2"), ["payload", "clicked", "at", "ms2"]);
        assert!(id("/search_id") > id("/user_id") && id("/requestId") > 0 && id("/price") == 0);
        assert!(vector("/query_embedding") > vector("/doc_embedding") && vector("/x") > 0);
        assert!(time("/createdAt") > 0 && time("/latency_ms") < time("/ts"));
        assert!(reward("/clicked") > 0 && reward("/position") < 0);
        assert!(propensities("/x", true) > 0 && propensities("/x", false) == 0);
    }
}
