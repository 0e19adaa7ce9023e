//! Envelope of saved state: its kind, format version and checksum.
//!
//! ```text
//! "POINTSMN" | kind: u16 | version: u16 | length of payload: u64 | payload | xxh3 of all before: u64    little-endian
//! ```
//!
//! Records that are too many for an envelope have one version byte before the payload ([`seal_short`]); the store beneath has
//! their checksum.
//!
//! The payload is bincode. bincode is unmaintained; the envelope permits a later change of the encoding.

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"POINTSMN";
const HEAD: usize = MAGIC.len() + 2 + 2 + 8;

/// Limit on the decoder's allocations, far above any real state. Short payloads have lower limits, about 256 times their
/// length: a wrong length field must not allocate gigabytes.
const DECODED_MAX: usize = 1 << 34;

/// What an envelope holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// A learner's complete state.
    Learner = 1,
    /// A space of an engine, without its learner and its requests.
    Space = 2,
    /// The head of a snapshot.
    Snapshot = 3,
    /// The head of a snapshot that instances share.
    Shared = 4,
    /// What belongs to no space of a lane.
    Lane = 5,
    /// Complete copies of generations.
    Backup = 6,
}

/// Why an envelope cannot be opened.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Damaged {
    /// The magic number is missing.
    #[error("the data was not written by pointsman")]
    Foreign,
    /// It is of another kind.
    #[error("the data is of kind {found}, expected kind {expected}")]
    Kind {
        /// What it holds.
        found: u16,
        /// What was asked for.
        expected: u16,
    },
    /// It was written by a newer version.
    #[error("the data has format version {found}, but this version reads up to {newest}: upgrade pointsman")]
    Newer {
        /// Its version.
        found: u16,
        /// The newest known.
        newest: u16,
    },
    /// Its bytes were truncated or changed.
    #[error("the data is damaged: {0}")]
    Corrupt(String),
}

impl Damaged {
    /// A version that was never written.
    pub fn unknown_version(version: u16) -> Self {
        Self::Corrupt(format!("no release wrote format version {version}"))
    }
}

/// Seals a value.
pub fn seal<T: Serialize>(kind: Kind, version: u16, value: &T) -> Vec<u8> {
    let payload = encode(value);
    let mut bytes = Vec::with_capacity(HEAD + payload.len() + 8);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(kind as u16).to_le_bytes());
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&payload);
    bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
    bytes
}

/// Opens an envelope; returns its format version and payload.
pub fn open(kind: Kind, newest: u16, bytes: &[u8]) -> Result<(u16, &[u8]), Damaged> {
    let head = bytes.get(..HEAD).filter(|head| head.starts_with(MAGIC)).ok_or(Damaged::Foreign)?;
    let (body, checksum) = bytes.split_last_chunk::<8>().ok_or(Damaged::Foreign)?;
    let length = u64::from_le_bytes(head[12..20].try_into().expect("eight bytes"));
    if body.len() < HEAD || (body.len() - HEAD) as u64 != length {
        return Err(Damaged::Corrupt(format!(
            "it has {} bytes, but its header specifies a payload of {length}",
            bytes.len()
        )));
    }
    if xxh3_64(body) != u64::from_le_bytes(*checksum) {
        return Err(Damaged::Corrupt("the checksum does not match".to_owned()));
    }
    let number = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let (found, version) = (number(8), number(10));
    if found != kind as u16 {
        return Err(Damaged::Kind { found, expected: kind as u16 });
    }
    if version > newest {
        return Err(Damaged::Newer { found: version, newest });
    }
    Ok((version, &body[HEAD..]))
}

/// Seals a value with a version byte in place of an envelope.
pub fn seal_short<T: Serialize>(version: u8, value: &T) -> Vec<u8> {
    let mut bytes = vec![version];
    bincode::serde::encode_into_std_write(value, &mut bytes, bincode::config::standard())
        .expect("encoding into memory fails on no type of this crate");
    bytes
}

/// Opens what [`seal_short`] sealed; returns its format version and payload.
pub fn open_short(newest: u8, bytes: &[u8]) -> Result<(u8, &[u8]), Damaged> {
    match bytes.split_first() {
        None => Err(Damaged::Corrupt("it is empty".to_owned())),
        Some((&version, _)) if version > newest => Err(Damaged::Newer { found: version.into(), newest: newest.into() }),
        Some((&version, payload)) => Ok((version, payload)),
    }
}

/// Encodes a payload.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    bincode::serde::encode_to_vec(value, bincode::config::standard())
        .expect("encoding into memory fails on no type of this crate")
}

/// Decodes a payload, all of it.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Damaged> {
    match payload.len() {
        0..0x1000 => decode_within::<T, { 1 << 20 }>(payload),
        0x1000..0x1_0000 => decode_within::<T, { 1 << 24 }>(payload),
        0x1_0000..0x10_0000 => decode_within::<T, { 1 << 28 }>(payload),
        _ => decode_within::<T, DECODED_MAX>(payload),
    }
}

fn decode_within<T: DeserializeOwned, const MOST: usize>(payload: &[u8]) -> Result<T, Damaged> {
    let config = bincode::config::standard().with_limit::<MOST>();
    let (value, read) =
        bincode::serde::decode_from_slice(payload, config).map_err(|e| Damaged::Corrupt(e.to_string()))?;
    if read == payload.len() {
        Ok(value)
    } else {
        Err(Damaged::Corrupt("unexpected bytes after the payload".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<Vec<f64>, Damaged> {
        let (version, payload) = open(Kind::Learner, 3, bytes)?;
        assert_eq!(version, 3);
        decode(payload)
    }

    proptest! {
        #[test]
        fn any_change_is_noticed(values in prop::collection::vec(any::<f64>(), 0..20), at in any::<prop::sample::Index>(), bit in 0..8) {
            let sealed = seal(Kind::Learner, 3, &values);
            let bits = |values: &[f64]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&read(&sealed).unwrap()), bits(&values));
            let at = at.index(sealed.len());
            let mut flipped = sealed.clone();
            flipped[at] ^= 1_u8 << bit;
            prop_assert!(read(&flipped).is_err());
            prop_assert!(read(&sealed[..at]).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(read(&bytes).is_err());
            let _ = decode::<Vec<f64>>(&bytes);
        }
    }

    #[test]
    fn a_length_that_lies_costs_no_memory() {
        // A string that claims 4 GiB, in five bytes.
        let lying = [252, 0, 0, 0, 255];
        assert_eq!(decode::<String>(&lying), Err(Damaged::Corrupt("LimitExceeded".to_owned())));
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(open(Kind::Learner, 3, b"{}"), Err(Damaged::Foreign));
        let newer = seal(Kind::Learner, 4, &());
        assert_eq!(open(Kind::Learner, 3, &newer), Err(Damaged::Newer { found: 4, newest: 3 }));
        assert_eq!(open_short(3, &seal_short(4, &())), Err(Damaged::Newer { found: 4, newest: 3 }));
        assert_eq!(open_short(3, &seal_short(2, &7_u8)), Ok((2, &[7][..])));
        assert!(matches!(open_short(3, &[]), Err(Damaged::Corrupt(_))));
    }
}
