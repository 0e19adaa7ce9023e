//! A JSON scanner without a tree of values, for common shapes, with exactly the results of `serde_json`.
//!
//! Every method returns `None` for input that is invalid or merely rare, and the caller falls back to `serde_json`. So the
//! one requirement is that accepted input is read as `serde_json` reads it. Rare parts (escapes, long numbers) are passed
//! to it one by one.

use std::borrow::Cow;

use memchr::{memchr, memchr_iter};

/// Maximum nesting that is skipped here; `serde_json` permits 128.
const DEPTH_MAX: u32 = 64;

/// What `serde_json` begins the keys with that mean something to itself.
const PRIVATE: &str = "$serde_json::private";

/// A place in a text.
pub struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// A number as it was written: (-1)^`negative` `digits` 10^`exponent`.
struct Decimal<'a> {
    negative: bool,
    digits: u64,
    exponent: i32,
    /// Whether it is a whole number, written as one.
    whole: bool,
    /// Whether `digits` and `exponent` are all of it: 19 digits at most, of an exponent that was not cut.
    exact: bool,
    text: &'a [u8],
}

impl<'a> Scanner<'a> {
    /// At the beginning of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Whether nothing follows.
    pub fn is_done(&mut self) -> bool {
        self.peek().is_none()
    }

    /// The next byte that is not white space.
    pub fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.bytes.get(self.at) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied()
    }

    /// Reads an object; `entry` reads the value of each key.
    pub fn object(&mut self, mut entry: impl FnMut(&mut Self, &str) -> Option<()>) -> Option<()> {
        self.list(b'{', b'}', |this| {
            let key = this.string()?;
            this.take(b':')?;
            if key.starts_with(PRIVATE) { None } else { entry(this, &key) }
        })
    }

    /// Reads a string.
    pub fn string(&mut self) -> Option<Cow<'a, str>> {
        self.take(b'"')?;
        let start = self.at;
        let mut escaped = false;
        loop {
            match *self.bytes.get(self.at)? {
                b'"' => break,
                b'\\' => {
                    escaped = true;
                    self.at += 2;
                }
                0..0x20 => return None,
                _ => self.at += 1,
            }
        }
        let end = self.at;
        self.at += 1;
        if escaped {
            serde_json::from_slice::<String>(&self.bytes[start - 1..=end]).ok().map(Cow::Owned)
        } else {
            str::from_utf8(&self.bytes[start..end]).ok().map(Cow::Borrowed)
        }
    }

    /// Reads a string as the bytes that it is written with, whatever they are.
    pub fn raw_string(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let rest = &self.bytes[self.at..];
        let text = &rest[..memchr(b'"', rest)?];
        self.at += text.len() + 1;
        Some(text)
    }

    /// Reads a number.
    pub fn number(&mut self) -> Option<f64> {
        self.decimal()?.to_f64()
    }

    /// Reads a whole number that is written as one.
    pub fn integer(&mut self) -> Option<i64> {
        let decimal = self.decimal()?;
        // -0 is no whole number to serde_json.
        let plain = decimal.whole && decimal.exact && !(decimal.negative && decimal.digits == 0);
        let value = i64::try_from(decimal.digits).ok().filter(|_| plain)?;
        Some(if decimal.negative { -value } else { value })
    }

    /// Reads an array of numbers, each rounded to f64 and then to f32.
    pub fn vector(&mut self) -> Option<Vec<f32>> {
        self.peek();
        let rest = &self.bytes[self.at..];
        let commas = memchr_iter(b',', &rest[..memchr(b']', rest)?]).count();
        let mut vector = Vec::with_capacity(commas + 1);
        self.list(b'[', b']', |this| {
            vector.push(this.decimal()?.to_f32()?);
            Some(())
        })?;
        Some(vector)
    }

    /// Reads `null`, if it is that.
    pub fn null(&mut self) -> Option<bool> {
        if self.peek()? == b'n' { self.word(b"null").map(|()| true) } else { Some(false) }
    }

    /// Reads `true` or `false`.
    pub fn bool(&mut self) -> Option<bool> {
        match self.peek()? {
            b't' => self.word(b"true").map(|()| true),
            _ => self.word(b"false").map(|()| false),
        }
    }

    /// Reads any value, and forgets it.
    pub fn skip(&mut self) -> Option<()> {
        self.skip_within(DEPTH_MAX)
    }

    fn skip_within(&mut self, depth: u32) -> Option<()> {
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => self.object(|this, _| this.skip_within(depth.checked_sub(1)?)),
            b'[' => self.list(b'[', b']', |this| this.skip_within(depth.checked_sub(1)?)),
            b'n' => self.word(b"null"),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            // What is too large is no number to serde_json: it is asked where that may be.
            _ => self.number().map(drop),
        }
    }

    /// Reads what is between `open` and `close`, with commas between.
    fn list(&mut self, open: u8, close: u8, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.take(open)?;
        if self.peek()? == close {
            self.at += 1;
            return Some(());
        }
        loop {
            item(self)?;
            let next = self.peek()?;
            self.at += 1;
            match next {
                b',' => {}
                _ if next == close => return Some(()),
                _ => return None,
            }
        }
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        let found = self.peek()? == byte;
        self.at += usize::from(found);
        found.then_some(())
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        let found = self.bytes[self.at..].starts_with(word);
        self.at += word.len();
        found.then_some(())
    }

    #[inline]
    fn decimal(&mut self) -> Option<Decimal<'a>> {
        self.peek();
        let start = self.at;
        let negative = self.bytes.get(start) == Some(&b'-');
        self.at += usize::from(negative);
        let first = self.at;
        let mut digits = match self.bytes.get(first..first + 2) {
            // By far the most have one digit before the point.
            Some(&[digit @ b'0'..=b'9', b'.']) => {
                self.at += 1;
                u64::from(digit - b'0')
            }
            _ => self.digits(0),
        };
        let mut read = self.at - first;
        if read == 0 || (read > 1 && self.bytes[first] == b'0') {
            return None;
        }
        let mut exponent = 0;
        let fraction = self.bytes.get(self.at) == Some(&b'.');
        if fraction {
            self.at += 1;
            let point = self.at;
            digits = self.digits(digits);
            let places = self.at - point;
            if places == 0 {
                return None;
            }
            read += places;
            exponent = -i32::try_from(places).ok()?;
        }
        let mut exact = read <= DIGITS_MAX || read - leading_zeros(&self.bytes[first..self.at]) <= DIGITS_MAX;
        let scaled = matches!(self.bytes.get(self.at), Some(b'e' | b'E'));
        if scaled {
            let (power, whole) = self.power()?;
            exponent += power;
            exact &= whole;
        }
        let whole = !fraction && !scaled;
        Some(Decimal { negative, digits, exponent, whole, exact, text: &self.bytes[start..self.at] })
    }

    /// Reads an exponent; whether that was all of it.
    fn power(&mut self) -> Option<(i32, bool)> {
        self.at += 1;
        let sign = self.bytes.get(self.at);
        let negative = sign == Some(&b'-');
        self.at += usize::from(negative || sign == Some(&b'+'));
        let first = self.at;
        let digits = self.digits(0);
        match self.at - first {
            0 => None,
            1..=4 => Some((if negative { -(digits as i32) } else { digits as i32 }, true)),
            _ => Some((0, false)),
        }
    }

    /// Reads digits and appends them to `sum`, which overflows beyond [`DIGITS_MAX`] of them.
    fn digits(&mut self, mut sum: u64) -> u64 {
        // Sixteen at a time, even if there are fewer: their number is unpredictable, and a mispredicted branch costs more
        // than all of this.
        while let Some(sixteen) = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<16>) {
            let (low, high) = (Eight::new(&sixteen[..8]), Eight::new(&sixteen[8..]));
            let high = if low.number == 8 { high } else { Eight { number: 0, ..high } };
            sum = high.append_to(low.append_to(sum));
            self.at += (low.number + high.number) as usize;
            if high.number < 8 {
                return sum;
            }
        }
        while let Some(digit @ b'0'..=b'9') = self.bytes.get(self.at) {
            self.at += 1;
            sum = sum.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
        }
        sum
    }
}

/// Eight bytes, of which the first `number` are digits.
#[derive(Clone, Copy)]
struct Eight {
    /// What is written in each, if it is a digit; the first in the lowest byte.
    values: u64,
    number: u32,
}

impl Eight {
    #[inline]
    fn new(bytes: &[u8]) -> Self {
        let values = bytes.try_into().map_or(0, u64::from_le_bytes) ^ 0x3030_3030_3030_3030;
        // The high bits of bytes that are no digits: the lowest is right, and it is all that is asked for.
        let others = (values.wrapping_add(0x7676_7676_7676_7676) | values) & 0x8080_8080_8080_8080;
        Self { values, number: others.trailing_zeros() / 8 }
    }

    /// Appends the digits to a number: first they are joined to pairs, then to fours, then all.
    #[inline]
    fn append_to(self, sum: u64) -> u64 {
        let digits = self.values.checked_shl(64 - 8 * self.number).unwrap_or(0);
        let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
        let outer = (pairs & 0x0000_00ff_0000_00ff).wrapping_mul(100 + (1_000_000 << 32));
        let inner = ((pairs >> 16) & 0x0000_00ff_0000_00ff).wrapping_mul(1 + (10_000 << 32));
        let value = outer.wrapping_add(inner) >> 32;
        sum.wrapping_mul(POWERS[self.number as usize]).wrapping_add(value)
    }
}

/// The most digits that surely fit into 64 bits.
const DIGITS_MAX: usize = 19;

const POWERS: [u64; 9] = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// Powers of ten that are exact in f64.
const EXACT_POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

fn leading_zeros(number: &[u8]) -> usize {
    number.iter().take_while(|&&byte| byte == b'0' || byte == b'.').filter(|&&byte| byte == b'0').count()
}

impl Decimal<'_> {
    /// The nearest f64, as `serde_json` finds it.
    fn to_f64(&self) -> Option<f64> {
        // Both parts are exact, so there is one rounding.
        match self.digits <= 1 << 53 {
            true => self.estimate().or_else(|| self.ask()),
            false => self.ask(),
        }
    }

    /// The f32 that is nearest to the nearest f64.
    #[inline]
    fn to_f32(&self) -> Option<f32> {
        let Some(estimate) = self.estimate() else { return self.ask().map(|x| x as f32) };
        if self.digits <= 1 << 53 {
            return Some(estimate as f32);
        }
        // The estimate was rounded twice, the nearest f64 once: they are less than four steps apart. Where all within
        // four steps go to the same f32, so does the nearest.
        let step = |steps: i64| f64::from_bits(estimate.to_bits().wrapping_add_signed(steps)) as f32;
        let (low, high) = (step(-4), step(4));
        if low == high { Some(low) } else { self.ask().map(|x| x as f32) }
    }

    /// The number, of two roundings: one of the digits, one of the product. None if there might be more to it.
    #[inline]
    fn estimate(&self) -> Option<f64> {
        let power = *EXACT_POWERS.get(self.exponent.unsigned_abs() as usize).filter(|_| self.exact)?;
        let digits = self.digits as f64;
        let size = if self.exponent < 0 { digits / power } else { digits * power };
        Some(if self.negative { -size } else { size })
    }

    #[cold]
    fn ask(&self) -> Option<f64> {
        serde_json::from_slice(self.text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// Checks a number against `serde_json`: in every way that it can be read.
    fn check_number(text: &str) {
        let tree = serde_json::from_str::<Value>(text).ok();
        let expected = tree.as_ref().and_then(Value::as_f64);
        let bytes = text.as_bytes();
        let all_of = |mut scanner: Scanner<'_>| scanner.is_done();
        let mut scanner = Scanner::new(bytes);
        let number = scanner.number().filter(|_| all_of(scanner));
        assert_eq!(number.map(f64::to_bits), expected.map(f64::to_bits), "{text}");
        let array = format!("[{text}]");
        let mut scanner = Scanner::new(array.as_bytes());
        let vector = scanner.vector().filter(|_| all_of(scanner));
        let single = vector.as_ref().map(|vector| vector[0].to_bits());
        assert_eq!(single, expected.map(|x| (x as f32).to_bits()), "{text}");
        assert_eq!(vector.map_or(0, |vector| vector.capacity()), usize::from(expected.is_some()));
        let mut scanner = Scanner::new(bytes);
        if let Some(integer) = scanner.integer().filter(|_| all_of(scanner)) {
            assert_eq!(tree.and_then(|value| value.as_i64()), Some(integer), "{text}");
        }
    }

    #[test]
    fn numbers_as_serde_json_reads_them() {
        let long = "1234567890".repeat(40);
        let zeros = "0".repeat(400);
        for text in [
            "0",
            "-0",
            "-0.0",
            "1",
            "-1",
            "12345678",
            "123456789",
            "9007199254740993",
            "9223372036854775807",
            "-9223372036854775808",
            "9223372036854775808",
            "18446744073709551615",
            "18446744073709551616",
            "0.1",
            "1.5",
            "-4.0",
            "1e5",
            "1E+5",
            "1e-5",
            "2.5e-3",
            "1e22",
            "1e23",
            "1e38",
            "1e39",
            "3.4028235677973366e38",
            "1e308",
            "1e309",
            "-1e400",
            "1e-400",
            "0e999999999999",
            "1e-999999999999",
            "1e999999999999",
            "0.000000000000000000000012345678901234567",
            "16777217",
            "16777217.000000000000001",
            "1.0000000596046448",
            "1.00000005960464477539",
            "1.000000059604644775390625",
            "1.0000000596046447753906250000001",
            "5e-324",
            "2.2250738585072011e-308",
            "1.40129846432481707e-45",
            "7.0064923216240853e-46",
            "0.012345678955316544",
            "-0.0012345678955316544",
            "0.00000000012345678955316544",
            // None of these is one.
            "",
            "-",
            "+1",
            ".5",
            "5.",
            "01",
            "-01",
            "00",
            "1e",
            "1e+",
            "1.e5",
            "0x10",
            "1_000",
            "NaN",
            "nan",
            "Infinity",
            "-Infinity",
            "inf",
            "1 2",
            "1,2",
            "--1",
            "1.2.3",
            "1e5.5",
            "1f",
            "\u{661}",
            // Without end.
            &long,
            &format!("0.{zeros}1"),
            &format!("1{zeros}"),
            &format!("1{zeros}e-400"),
            &format!("0.{zeros}1e401"),
        ] {
            if text.contains(',') || text.is_empty() {
                assert_eq!(Scanner::new(text.as_bytes()).number().filter(|_| text.is_empty()), None);
            } else {
                check_number(text);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn any_float_in_any_spelling(bits in any::<u64>(), single in any::<u32>(), places in 0..25_usize) {
            let (x, y) = (f64::from_bits(bits), f32::from_bits(single));
            if x.is_finite() {
                check_number(&x.to_string());
                check_number(&format!("{x:e}"));
            }
            if y.is_finite() {
                check_number(&y.to_string());
                check_number(&f64::from(y).to_string());
                check_number(&format!("{y:.places$}"));
                check_number(&format!("{y:.places$e}"));
            }
        }

        #[test]
        fn embeddings(x in -1.0..1.0_f32, y in -1.0..1.0_f64) {
            check_number(&f64::from(x).to_string());
            check_number(&x.to_string());
            check_number(&y.to_string());
        }

        /// Halfway between two f32, and next to it: where rounding twice shows.
        #[test]
        fn halfway(single in any::<u32>(), off in -3..4_i64, digits in 16..24_usize) {
            let x = f32::from_bits(single);
            prop_assume!(x.is_finite());
            let half = f64::from_bits(f64::from(x).to_bits() + (1 << 28));
            let near = f64::from_bits(half.to_bits().wrapping_add_signed(off));
            check_number(&format!("{near:.digits$}"));
            check_number(&format!("{near:.digits$e}"));
        }

        #[test]
        fn any_digits(text in "-?[0-9]{1,30}(\\.[0-9]{0,30})?([eE][-+]?[0-9]{0,5})?") {
            check_number(&text);
        }

        /// Whatever is skipped, `serde_json` reads.
        #[test]
        fn what_is_skipped_is_json(text in "[\\[\\]{}:,\"\\\\ntrue0-9.eE\\-a \\n\u{0}-\u{1f}ü]{0,24}") {
            let mut scanner = Scanner::new(text.as_bytes());
            if scanner.skip().is_some() && scanner.is_done() {
                prop_assert!(serde_json::from_str::<Value>(&text).is_ok(), "{}", text);
            }
        }
    }

    #[test]
    fn strings_as_serde_json_reads_them() {
        for bytes in [
            &b"\"\""[..],
            b"\"plain\"",
            "\"ü \u{1f600} \u{7f}\"".as_bytes(),
            br#""\" \\ \/ \b \f \n \r \t \u00fc \ud83d\ude00""#,
            br#""\ud83d""#,
            br#""\ude00\ud83d""#,
            br#""\x""#,
            br#""\u00g0""#,
            br#""\"#,
            br#""\""#,
            br#""open"#,
            b"\"\n\"",
            b"\"\0\"",
            b"\"\xff\"",
            b"\"\\n\xff\"",
            b"\"\xed\xa0\x80\"",
            b"'single'",
        ] {
            let expected = serde_json::from_slice::<String>(bytes).ok();
            let mut scanner = Scanner::new(bytes);
            assert_eq!(scanner.string().map(Cow::into_owned), expected, "{bytes:?}");
            assert_eq!(Scanner::new(bytes).skip().is_some(), expected.is_some(), "{bytes:?}");
        }
    }

    #[test]
    fn what_is_nested_is_skipped_or_left() {
        let nested = |depth: usize| format!("{}1{}", "[{\"a\":".repeat(depth), "}]".repeat(depth));
        for (text, skipped) in [
            (r#"{"a":[1,{"b":null}],"c":[true,false,"x"],"d":{}}"#, true),
            (" [ ] ", true),
            (&nested(30), true),
            (&nested(40), false),
            (&nested(100_000), false),
            (&"[".repeat(100_000), false),
            (r#"{"$serde_json::private::RawValue":"1"}"#, false),
            (r#"{"\u0024serde_json::private::RawValue":"1"}"#, false),
            ("[1,]", false),
            ("[,1]", false),
            ("[1 2]", false),
            (r#"{"a" 1}"#, false),
            (r#"{"a":1,}"#, false),
            ("{1:1}", false),
            ("[1}", false),
            ("nul", false),
            ("truefalse", false),
            ("[1e999]", false),
        ] {
            let mut scanner = Scanner::new(text.as_bytes());
            assert_eq!(scanner.skip().is_some() && scanner.is_done(), skipped, "{text:.60}");
        }
    }
}
