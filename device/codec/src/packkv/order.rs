//! Orders in which neighbouring tokens are alike.

use serde::{Deserialize, Serialize};

use super::{PackKvError, PackTokens, Quantized, TOKENS, bits::Reader};

/// How the order of tokens is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Repack {
    /// It stays.
    None,
    /// Pack by pack: the token that is most like the mean of those left, then always the one that
    /// makes the pack longest by the fewest bits (the paper's Algorithm 1, with the published
    /// code's likeness: the cosine).
    Greedy,
    /// By the median of each token's quantised V, greatest first; of a block without V, of its K.
    Median,
}

impl Repack {
    /// All that there are.
    pub const ALL: [Self; 3] = [Self::None, Self::Greedy, Self::Median];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Greedy => "greedy",
            Self::Median => "median",
        }
    }
}

/// An order of the tokens of a block, the same of K and V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order([u8; TOKENS]);

impl Order {
    /// The tokens' own.
    pub fn own() -> Self {
        Self(std::array::from_fn(number))
    }

    /// As `repack` says.
    ///
    /// # Panics
    /// If K and V are no sides of a block.
    pub fn new(repack: Repack, pack: PackTokens, k: &Quantized, v: &Quantized) -> Self {
        match repack {
            Repack::None => Self::own(),
            Repack::Greedy => greedy(pack, k, v),
            Repack::Median => {
                let v = if v.channels() > 0 { v } else { k };
                let mut order = Self::own();
                order.0.sort_by_key(|token| std::cmp::Reverse(median(v.row((*token).into()))));
                order
            }
        }
    }

    /// For each place the number of its token.
    pub fn places(&self) -> &[u8; TOKENS] {
        &self.0
    }

    /// One that is stored, 6 bits for each place.
    pub(super) fn stored(bytes: &[u8]) -> Result<Self, PackKvError> {
        let mut reader = Reader::new(bytes);
        let mut seen = 0_u64;
        let mut places = [0; TOKENS];
        for place in &mut places {
            let token = reader.take(6);
            if seen >> token & 1 == 1 {
                let bound = "each token once";
                return Err(PackKvError::Field { field: "order", value: token.into(), bound });
            }
            seen |= 1 << token;
            *place = number(token as usize);
        }
        Ok(Self(places))
    }
}

fn number(token: usize) -> u8 {
    u8::try_from(token).expect("less than 64")
}

/// The lower median.
fn median(row: &[u8]) -> u8 {
    let mut counts = [0_usize; 256];
    for value in row {
        counts[usize::from(*value)] += 1;
    }
    let mut left = row.len().saturating_sub(1) / 2;
    for (value, count) in (0..).zip(counts) {
        if left < count {
            return value;
        }
        left -= count;
    }
    u8::MAX
}

fn greedy(pack: PackTokens, k: &Quantized, v: &Quantized) -> Order {
    let rows: Vec<Vec<u8>> = (0..TOKENS).map(|token| [k.row(token), v.row(token)].concat()).collect();
    let mut sums = vec![0_u32; rows[0].len()];
    for row in &rows {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += u32::from(*value));
    }
    let mut left: Vec<usize> = (0..TOKENS).collect();
    let mut order = Vec::with_capacity(TOKENS);
    while !left.is_empty() {
        let mean = mean(&sums, left.len());
        let seed = first_best(&left, |token| likeness(&rows[token], &mean));
        let (mut least, mut most) = (rows[left[seed]].clone(), rows[left[seed]].clone());
        let mut take = |at: usize, left: &mut Vec<usize>| {
            let token = left.remove(at);
            sums.iter_mut().zip(&rows[token]).for_each(|(sum, value)| *sum -= u32::from(*value));
            order.push(number(token));
            token
        };
        take(seed, &mut left);
        for _ in 1..pack.tokens() {
            // Fewest bits more: the greatest of their negatives.
            let next = first_best(&left, |token| -f64::from(bits_with(&least, &most, &rows[token])));
            let token = take(next, &mut left);
            for ((least, most), value) in least.iter_mut().zip(&mut most).zip(&rows[token]) {
                (*least, *most) = ((*least).min(*value), (*most).max(*value));
            }
        }
    }
    Order(order.try_into().expect("every token once"))
}

/// The mean of `count` rows with these sums, rounded, half to even.
fn mean(sums: &[u32], count: usize) -> Vec<u8> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "of at most 64 values of 8 bits"
    )]
    let mean = |sum: &u32| (f64::from(*sum) / count as f64).round_ties_even() as u8;
    sums.iter().map(mean).collect()
}

/// Where the first of `left` is that is best.
fn first_best(left: &[usize], worth: impl Fn(usize) -> f64) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (at, token) in left.iter().enumerate() {
        let worth = worth(*token);
        if worth > best.1 {
            best = (at, worth);
        }
    }
    best.0
}

/// The cosine between two rows, but for the length of the second, which all are held against. That
/// of a row of zeros is 0.
fn likeness(row: &[u8], mean: &[u8]) -> f64 {
    let (dot, square) = products(row, mean);
    if square == 0 { 0.0 } else { float(dot) / float(square).sqrt() }
}

#[expect(clippy::cast_precision_loss, reason = "exact up to 2^53, and as good for an order beyond")]
fn float(number: u64) -> f64 {
    number as f64
}

/// The products of a row with another one and with itself.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn products(row: &[u8], other: &[u8]) -> (u64, u64) {
    // So many that 32 bits hold their products.
    const MANY: usize = 1 << 16;
    let (mut dot, mut square) = (0, 0);
    for (row, other) in row.chunks(MANY).zip(other.chunks(MANY)) {
        let pairs = || row.iter().zip(other).map(|(a, b)| (u32::from(*a), u32::from(*b)));
        dot += u64::from(pairs().map(|(a, b)| a * b).sum::<u32>());
        square += u64::from(pairs().map(|(a, _)| a * a).sum::<u32>());
    }
    (dot, square)
}

/// Bits of a token's values in a pack that has these least and greatest ones and takes `row` up.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn bits_with(least: &[u8], most: &[u8], row: &[u8]) -> u32 {
    let mut sum = 0;
    // So few that their bits fit 8 bits: 31 of at most 8.
    for ((least, most), row) in least.chunks(31 * 32).zip(most.chunks(31 * 32)).zip(row.chunks(31 * 32)) {
        let mut lanes = [0_u8; 32];
        for ((least, most), row) in least.chunks(32).zip(most.chunks(32)).zip(row.chunks(32)) {
            for (((lane, least), most), value) in lanes.iter_mut().zip(least).zip(most).zip(row) {
                let range = (*most).max(*value) - (*least).min(*value);
                // The bits that hold it, without a branch.
                *lane += u8::from(range >= 1)
                    + u8::from(range >= 2)
                    + u8::from(range >= 4)
                    + u8::from(range >= 8)
                    + u8::from(range >= 16)
                    + u8::from(range >= 32)
                    + u8::from(range >= 64)
                    + u8::from(range >= 128);
            }
        }
        sum += lanes.iter().map(|lane| u32::from(*lane)).sum::<u32>();
    }
    sum
}
