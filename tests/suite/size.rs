//! How much to run: `tests/run` at a size that fits a coffee, `tests/soak` (POINTSMAN_TEST_SIZE=soak) at full size.

/// `small` ordinarily, `full` in a soak.
pub fn sized(small: usize, full: usize) -> usize {
    match std::env::var("POINTSMAN_TEST_SIZE").as_deref() {
        Ok("soak") => full,
        Err(_) | Ok("run") => small,
        Ok(other) => panic!("POINTSMAN_TEST_SIZE={other}: use run or soak"),
    }
}
