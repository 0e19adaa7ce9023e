//! Numbers that begin at a line of the processor's cache.
//!
//! A vector that crosses from one line into the next takes two loads, and a list of numbers begins anywhere: products of
//! long columns take half the time where it does not.

use std::ops::{Deref, DerefMut};

const LINE_BYTES: usize = 64;
const LINE: usize = LINE_BYTES / size_of::<f64>();

/// A list of numbers that begins at a line.
#[derive(Debug, Default)]
pub struct Aligned {
    /// Never grown in place, which could move it off the line.
    buffer: Vec<f64>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Makes it empty.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Changes its length. What is new in it is whatever was there.
    pub fn set_len(&mut self, len: usize) {
        if self.start + len > self.buffer.len() {
            let room = len.max(2 * self.len) + LINE;
            let old = std::mem::replace(&mut self.buffer, vec![0.0; room]);
            let old = &old[self.start..self.start + self.len];
            self.start = self.buffer.as_ptr().align_offset(LINE_BYTES).min(LINE);
            self.buffer[self.start..self.start + old.len()].copy_from_slice(old);
        }
        self.len = len;
    }

    /// Adds to its end.
    pub fn extend_from_slice(&mut self, values: &[f64]) {
        let len = self.len;
        self.set_len(len + values.len());
        self[len..].copy_from_slice(values);
    }
}

impl Deref for Aligned {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.buffer[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f64] {
        &mut self.buffer[self.start..self.start + self.len]
    }
}

impl From<&[f64]> for Aligned {
    fn from(values: &[f64]) -> Self {
        let mut aligned = Self::default();
        aligned.extend_from_slice(values);
        aligned
    }
}

impl Clone for Aligned {
    fn clone(&self) -> Self {
        Self::from(&self[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_and_stays_at_a_line() {
        let (mut aligned, mut plain) = (Aligned::default(), Vec::new());
        for n in 0..40 {
            let values: Vec<f64> = (0..n).map(f64::from).collect();
            aligned.extend_from_slice(&values);
            plain.extend_from_slice(&values);
            assert_eq!(aligned[..], plain[..]);
            assert!(aligned.is_empty() || aligned.as_ptr().addr().is_multiple_of(LINE_BYTES));
            assert_eq!(aligned.clone()[..], plain[..]);
        }
        aligned.clear();
        assert!(aligned.is_empty());
    }
}
