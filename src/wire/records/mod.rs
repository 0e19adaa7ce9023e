//! Records of a snapshot, as bytes.
//!
//! One struct per record kind and version, separate from the structures in memory: a change of the fast path is not a change
//! of the format. A domain type converts itself to the newest struct and back. An older struct converts to the newest one in
//! a `From` that states every default. `docs/formats.md` specifies the bytes, `tests/golden/formats` holds a file of every
//! kind and version.
//!
//! | key | record | framing |
//! |---|---|---|
//! | `l` | counts of dropped spaces, volume of dead letters ([`lane`]) | envelope |
//! | `s` space, `r` space | a space, or a space that has only rewards so far, without learner and requests ([`space`]) | envelope |
//! | `t` space | the learner of a space ([`learner`]); absent while the space has no examples | envelope |
//! | `p` space `\0` request ID | a request, pending or remembered ([`request`]) | version byte |
//! | `q` space `\0` request ID | a request as 0.1 wrote it | none |
//! | `g` | counts of dropped spaces as 0.1 wrote them | none |
//! | `d` | volume of dead letters as 0.1 wrote it | none |
//!
//! The keys of 0.1 are read only. The first snapshot after a restore replaces them by `p` and `l`.
//!
//! The head of a snapshot ([`head`]) is not a record: a store keeps it beside them. A [`backup`] is a file with the head and all
//! records of a generation.
//!
//! To change a format: copy its struct under the next version, raise `VERSION`, write the conversion, and add a golden file
//! (`POINTSMAN_BLESS=1 cargo test formats`).

pub mod backup;
pub mod clock;
pub mod counts;
pub mod head;
pub mod keys;
pub mod lane;
pub mod learner;
pub mod request;
pub mod space;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::envelope::{self, Damaged, Kind};

/// The newest version of a record in an [`envelope`].
pub trait Record: Serialize + DeserializeOwned {
    /// What the envelope says it holds.
    const KIND: Kind;
    /// Version that is written.
    const VERSION: u16;

    /// Decodes the payload of an older version.
    fn upgrade(version: u16, payload: &[u8]) -> Result<Self, Damaged>;

    /// As bytes, in the newest version.
    fn seal(&self) -> Vec<u8> {
        envelope::seal(Self::KIND, Self::VERSION, self)
    }

    /// From bytes of any version.
    fn open(bytes: &[u8]) -> Result<Self, Damaged> {
        match envelope::open(Self::KIND, Self::VERSION, bytes)? {
            (version, payload) if version == Self::VERSION => envelope::decode(payload),
            (version, payload) => Self::upgrade(version, payload),
        }
    }
}
