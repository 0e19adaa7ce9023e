//! Draws that are reproducible with the key.
//!
//! ```text
//! u = first 53 bits of BLAKE2b-64(key, space | 0 | request id), read as a little-endian number, / 2^53
//! ```
//!
//! A request draws the same u wherever it is routed, so a decision can be audited: parameters, query, space and request
//! id say which model it must have been. The key keeps callers from choosing ids that draw what they like.

use blake2::Blake2bMac;
use blake2::digest::Mac;
use blake2::digest::consts::U8;
use thiserror::Error;

use crate::event::Name;

/// The draw key.
#[derive(Clone)]
pub struct DrawKey(Blake2bMac<U8>);

/// Why a draw key is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the draw key has {0} bytes: use 1 to 64 bytes")]
pub struct BadKey(usize);

impl DrawKey {
    /// A key of 1 to 64 bytes.
    pub fn new(key: &[u8]) -> Result<Self, BadKey> {
        if key.is_empty() {
            return Err(BadKey(0));
        }
        Mac::new_from_slice(key).map(Self).map_err(|_| BadKey(key.len()))
    }

    /// The draw of a request, in 0..1.
    pub fn draw(&self, space: &Name, request_id: &str) -> f64 {
        let mut hash = self.0.clone();
        hash.update(space.as_str().as_bytes());
        // Names contain no zero byte, so the encoding is unambiguous.
        hash.update(&[0]);
        hash.update(request_id.as_bytes());
        let bytes: [u8; 8] = hash.finalize().into_bytes().into();
        (u64::from_le_bytes(bytes) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_even_and_depend_on_all_parts() {
        let key = DrawKey::new(b"pointsman").unwrap();
        let space = Name::default_space();
        let other = Name::try_from("defaul").unwrap();
        assert_ne!(key.draw(&space, "r"), key.draw(&other, "tr"));
        assert_ne!(key.draw(&space, "r"), DrawKey::new(b"other").unwrap().draw(&space, "r"));
        let mut bins = [0_u32; 16];
        for i in 0..160_000 {
            bins[(key.draw(&space, &i.to_string()) * 16.0) as usize] += 1;
        }
        let chi: f64 = bins.iter().map(|&n| (f64::from(n) - 10_000.0).powi(2) / 10_000.0).sum();
        assert!(chi < 50.0, "chi-square {chi} of 15 degrees");
    }

    #[test]
    fn keys_have_a_length() {
        for (key, good) in [(&[][..], false), (&[1; 1], true), (&[1; 64], true), (&[1; 65], false)] {
            assert_eq!(DrawKey::new(key).is_ok(), good);
        }
    }
}
