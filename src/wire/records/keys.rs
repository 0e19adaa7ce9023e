//! Keys of records. The first byte tells the kind; a space name follows, and for requests a zero byte and the request ID.
//!
//! No name has a zero byte, so the first one ends it. A request ID may have any.

use crate::event::Name;

const LANE: u8 = b'l';
const SPACE: u8 = b's';
const LOBBY: u8 = b'r';
const LEARNER: u8 = b't';
const REQUEST: u8 = b'p';

// Letters of 0.1, which are read but not written any more.
const OLD_REQUEST: u8 = b'q';
const OLD_DROPPED: u8 = b'g';
const OLD_DEAD_LETTERS: u8 = b'd';

/// What a key stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// A [`LaneRecord`](super::lane::LaneRecord).
    Lane,
    /// A [`SpaceRecord`](super::space::SpaceRecord) of a space that had a query.
    Space(Name),
    /// A [`SpaceRecord`](super::space::SpaceRecord) of a space that has only rewards so far.
    Lobby(Name),
    /// The learner of a space.
    Learner(Name),
    /// A [`RequestRecord`](super::request::RequestRecord).
    Request(Name, String),
    /// A request of 0.1: without a version.
    OldRequest(Name, String),
    /// Counts of dropped spaces of 0.1: a [`DroppedRecord`](super::lane::DroppedRecord) without a version.
    OldDropped,
    /// The volume of dead letters of 0.1: a [`BucketRecord`](super::lane::BucketRecord) without a version.
    OldDeadLetters,
}

impl Key {
    /// Parses a key; `None` if no version wrote such a key.
    pub fn parse(key: &[u8]) -> Option<Self> {
        let (&kind, rest) = key.split_first()?;
        let text = str::from_utf8(rest).ok()?;
        let name = |text: &str| Name::try_from(text).ok();
        let request = || {
            let (space, request_id) = text.split_once('\0')?;
            Some((name(space)?, request_id.to_owned()))
        };
        match kind {
            SPACE => name(text).map(Self::Space),
            LOBBY => name(text).map(Self::Lobby),
            LEARNER => name(text).map(Self::Learner),
            REQUEST => request().map(|(space, id)| Self::Request(space, id)),
            OLD_REQUEST => request().map(|(space, id)| Self::OldRequest(space, id)),
            LANE if rest.is_empty() => Some(Self::Lane),
            OLD_DROPPED if rest.is_empty() => Some(Self::OldDropped),
            OLD_DEAD_LETTERS if rest.is_empty() => Some(Self::OldDeadLetters),
            _ => None,
        }
    }

    /// The space that the record belongs to; `None` if it belongs to the lane itself.
    pub fn into_space(self) -> Option<Name> {
        match self {
            Self::Space(name) | Self::Lobby(name) | Self::Learner(name) => Some(name),
            Self::Request(name, _) | Self::OldRequest(name, _) => Some(name),
            Self::Lane | Self::OldDropped | Self::OldDeadLetters => None,
        }
    }
}

/// The key of the record of a lane.
pub fn lane() -> Vec<u8> {
    vec![LANE]
}

/// The key of the record of a space that had a query.
pub fn space(space: &Name) -> Vec<u8> {
    key(SPACE, space)
}

/// The key of the record of a space that has only rewards so far.
pub fn lobby(space: &Name) -> Vec<u8> {
    key(LOBBY, space)
}

/// The key of the learner of a space.
pub fn learner(space: &Name) -> Vec<u8> {
    key(LEARNER, space)
}

/// The key of a request.
pub fn request(space: &Name, request_id: &str) -> Vec<u8> {
    [&[REQUEST][..], space.as_str().as_bytes(), &[0], request_id.as_bytes()].concat()
}

fn key(kind: u8, space: &Name) -> Vec<u8> {
    [&[kind][..], space.as_str().as_bytes()].concat()
}

/// Whether a record belongs to the lane itself and not to a space, by its key.
pub fn is_of_lane(key: &[u8]) -> bool {
    matches!(Key::parse(key), Some(Key::Lane | Key::OldDropped | Key::OldDeadLetters))
}

/// The space that a record belongs to, by its key.
pub fn space_of(key: &[u8]) -> Option<Name> {
    Key::parse(key)?.into_space()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_others_are_rejected() {
        let shop = || Name::try_from("shop").unwrap();
        for (key, parsed) in [
            (lane(), Key::Lane),
            (space(&shop()), Key::Space(shop())),
            (lobby(&shop()), Key::Lobby(shop())),
            (learner(&shop()), Key::Learner(shop())),
            (request(&shop(), "r\0 1"), Key::Request(shop(), "r\0 1".to_owned())),
            (b"qshop\0r1".to_vec(), Key::OldRequest(shop(), "r1".to_owned())),
            (b"g".to_vec(), Key::OldDropped),
            (b"d".to_vec(), Key::OldDeadLetters),
        ] {
            assert_eq!(Key::parse(&key), Some(parsed.clone()), "{key:?}");
            assert_eq!(
                (space_of(&key), is_of_lane(&key)),
                (parsed.clone().into_space(), parsed.into_space().is_none())
            );
        }
        for bad in [&b""[..], b"x", b"lshop", b"gshop", b"d\0", b"s", b"s.a", b"pshop", b"p\0r", b"q\xff\0r"] {
            assert_eq!((Key::parse(bad), space_of(bad), is_of_lane(bad)), (None, None, false), "{bad:?}");
        }
    }
}
