//! What one core can do, measured in the run that it is compared with, and the least that an update asks of it.
//!
//! An update in factored form, V = [U | S] C with R recent queries in S, cannot do with less than these parts. Each takes
//! at least its flops at the speed of the best matrix product, or its bytes at the speed of the cache that holds the
//! bases, whichever is longer; the parts follow each other, so their times add up.
//!
//! | part | flops | bytes |
//! |---|---|---|
//! | scores: U'q of all models | 2 M d k | 8 M d k, or 8 M d k / R |
//! | S'q, with S half full | d R | 4 d R, or 4 d |
//! | compaction U <- \[U \| S\] C, once in R updates | 2 M d (k + R) k / R | 16 M d k / R |
//! | rotation of C, with S half full | 2 M (k + R / 2) k^2 | in the first cache |
//! | secular equation of n = k + 1 poles | 4 M n^2 divisions | in the first cache |
//!
//! Where it is known which queries come next, U and S need only be read once for all until the next compaction: that is what
//! the second numbers are for. R is free: the limit takes the one with the least sum. The secular equation has n roots over n poles: two iterations
//! is the fewest that reach the last bit from a good start, and the components and the vectors take one pass each. What
//! is left out only makes the limit lower: softmax, projection, sorting, and everything that moves data about.

use std::hint::black_box;
use std::time::Duration;

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};

use super::{Size, fastest, timed};

const BUDGET: Duration = Duration::from_millis(300);

/// Products in one stretch of time.
const ROUNDS: usize = 8;

/// How many times the secular equation passes over all pairs of a root and a pole.
const SECULAR_PASSES: f64 = 4.0;

/// The arithmetic of one core in f64, per second.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub flops: f64,
    pub divisions: f64,
}

/// The least seconds of each part of an update.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    pub score: f64,
    pub recent: f64,
    pub compaction: f64,
    pub rotation: f64,
    pub secular: f64,
}

impl Machine {
    pub fn measure() -> Self {
        let flops = [96, 128, 192, 256].map(product_flops).into_iter().fold(0.0, f64::max);
        Self { flops, divisions: divisions() }
    }

    /// The limits of an update of one example, where the queries of the next ones are known and where they are not.
    pub fn limits(&self, size: Size) -> [Limit; 2] {
        let bandwidth = bandwidth(8 * size.models * size.dim * size.rank);
        [true, false].map(|known| {
            let limits = (1..=8 * size.rank).map(|recent| self.limit_with(size, recent as f64, bandwidth, known));
            limits.min_by(|a, b| a.total().total_cmp(&b.total())).expect("a rank of at least one")
        })
    }

    fn limit_with(&self, size: Size, recent: f64, bandwidth: f64, known: bool) -> Limit {
        let [d, m, k] = [size.dim, size.models, size.rank].map(|x| x as f64);
        let part = |flops: f64, bytes: f64| (flops / self.flops).max(bytes / bandwidth);
        let reads = if known { recent.recip() } else { 1.0 };
        Limit {
            score: part(2.0 * m * d * k, 8.0 * m * d * k * reads),
            recent: part(d * recent, 4.0 * d * recent * reads),
            compaction: part(2.0 * m * d * (k + recent) * k / recent, 16.0 * m * d * k / recent),
            rotation: part(2.0 * m * (k + recent / 2.0) * k * k, 0.0),
            secular: SECULAR_PASSES * m * (k + 1.0).powi(2) / self.divisions,
        }
    }
}

impl Limit {
    pub fn total(&self) -> f64 {
        self.score + self.recent + self.compaction + self.rotation + self.secular
    }
}

/// Bytes a second that are read again and again from a buffer of this size.
pub fn bandwidth(bytes: usize) -> f64 {
    let buffer = vec![1.0; bytes.div_ceil(8)];
    let rounds = (1 << 22) / bytes + 1;
    let read = || (0..rounds).for_each(|_| _ = black_box(widest_sum(black_box(&buffer))));
    (rounds * bytes) as f64 / fastest(BUDGET, [&mut || timed(read)])[0]
}

/// Flops a second of an n x n product; three such matrices fit the second cache.
fn product_flops(n: usize) -> f64 {
    let a = Mat::<f64>::from_fn(n, n, |i, j| (i * 7 + j * 3) as f64 % 5.0);
    let b = a.transpose().to_owned();
    let mut c = Mat::<f64>::zeros(n, n);
    let mut multiply = || {
        for _ in 0..ROUNDS {
            matmul(&mut c, Accum::Replace, &a, &b, 1.0, Par::Seq);
            black_box(&c);
        }
    };
    ROUNDS as f64 * 2.0 * (n as f64).powi(3) / fastest(BUDGET, [&mut || timed(&mut multiply)])[0]
}

/// Divisions a second, of numbers in the first cache.
fn divisions() -> f64 {
    let (mut x, y) = ([1.5; 256], [3.7; 256]);
    let rounds = 256;
    let mut divide = || (0..rounds).for_each(|_| widest_divide(black_box(&mut x), black_box(&y)));
    (rounds * y.len()) as f64 / fastest(BUDGET, [&mut || timed(&mut divide)])[0]
}

/// A function compiled for the vectors of several processors, of which the widest that this one has is called.
macro_rules! widest {
    ($name:ident = $body:ident($($x:ident: $type:ty),*) -> $out:ty) => {
        fn $name($($x: $type),*) -> $out {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn with_avx512($($x: $type),*) -> $out {
                    $body($($x),*)
                }
                #[target_feature(enable = "avx2")]
                fn with_avx2($($x: $type),*) -> $out {
                    $body($($x),*)
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: the processor has it.
                    return unsafe { with_avx512($($x),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has it.
                    return unsafe { with_avx2($($x),*) };
                }
            }
            $body($($x),*)
        }
    };
}

widest!(widest_sum = sum(x: &[f64]) -> f64);
widest!(widest_divide = divide(x: &mut [f64], y: &[f64]) -> ());

#[inline(always)]
fn sum(x: &[f64]) -> f64 {
    let (blocks, rest) = x.as_chunks::<32>();
    let mut sums = [0.0; 32];
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().chain(rest).sum()
}

/// Stays near the square root of y, however often.
#[inline(always)]
fn divide(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x = y / *x);
}
