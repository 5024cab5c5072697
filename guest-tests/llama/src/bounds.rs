//! How much attention a page may get, from the range of its keys alone.
//!
//! As in Quest: a page keeps each channel's least and greatest key, which bound every key's product
//! with a query. Quest ranks pages by that bound, each query head for itself ([`by_head`]). Since a
//! cache keeps all heads of a token in one row, there is one order of pages for all heads, too
//! ([`scores`]): each head turns its bounds into shares of its attention, and a page's score is the
//! sum of its shares.
//!
//! The bounds live with whoever reads, in ordinary memory: two rows a page.

use crate::{
    config::Config,
    math::{number, softmax},
};

/// The range of the keys of one page in each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    least: Vec<f32>,
    greatest: Vec<f32>,
}

impl Bounds {
    /// The range of no keys.
    pub fn empty(channels: usize) -> Self {
        Self { least: vec![f32::INFINITY; channels], greatest: vec![f32::NEG_INFINITY; channels] }
    }

    /// Takes one more key in. A NaN bounds nothing and is left out.
    pub fn include(&mut self, key: &[f32]) {
        for ((least, greatest), key) in self.least.iter_mut().zip(&mut self.greatest).zip(key) {
            *least = least.min(*key);
            *greatest = greatest.max(*key);
        }
    }

    /// The most that a key of this page can give with `query`, in the channels of one head from
    /// `start` on.
    fn product(&self, start: usize, query: &[f32]) -> f32 {
        let channels = self.least[start..].iter().zip(&self.greatest[start..]);
        query
            .iter()
            .zip(channels)
            .fold(0.0, |sum, (q, (least, greatest))| sum + (q * least).max(q * greatest))
    }
}

/// For each query head the most that a key of each page can give with `query`, before the softmax.
pub fn by_head(config: &Config, query: &[f32], pages: &[Bounds]) -> Vec<Vec<f32>> {
    let size = config.head_size();
    let of = |(head, query): (usize, &[f32])| {
        let start = config.kv_head(head) * size;
        pages.iter().map(|page| page.product(start, query) / number(size).sqrt()).collect()
    };
    query.chunks_exact(size).enumerate().map(of).collect()
}

/// A score for each page, all of them with as many tokens: the greater, the more attention it may
/// get from `query`, all heads together.
pub fn scores(config: &Config, query: &[f32], pages: &[Bounds]) -> Vec<f32> {
    let mut scores = vec![0.0; pages.len()];
    for mut shares in by_head(config, query, pages) {
        softmax(&mut shares);
        for (score, share) in scores.iter_mut().zip(shares) {
            *score += share;
        }
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> Config {
        Config {
            dim: 8,
            hidden_dim: 1,
            n_layers: 1,
            n_heads: 2,
            n_kv_heads: 1,
            vocab_size: 1,
            seq_len: 1,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            experts: None,
        }
    }

    proptest! {
        #[test]
        fn no_key_of_a_page_gives_more_than_its_bound(
            keys in prop::collection::vec(prop::collection::vec(-8_i8..8, 4), 1..9),
            query in prop::collection::vec(-8_i8..8, 4),
        ) {
            // Small whole numbers, so that sums are exact whatever their order.
            let numbers = |row: &Vec<i8>| row.iter().map(|&x| f32::from(x)).collect::<Vec<_>>();
            let mut page = Bounds::empty(4);
            for key in &keys {
                page.include(&numbers(key));
            }
            let query = numbers(&query);
            let product = |key: &Vec<i8>| numbers(key).iter().zip(&query).map(|(k, q)| k * q).sum::<f32>();
            let greatest = keys.iter().map(product).fold(f32::NEG_INFINITY, f32::max);
            let bound = page.product(0, &query);
            prop_assert!(bound >= greatest);
            // A page of one key is known exactly.
            prop_assert!(keys.len() > 1 || bound <= greatest);
        }
    }

    #[test]
    fn a_page_that_the_query_looks_at_scores_higher() {
        let page = |key: [f32; 4]| {
            let mut page = Bounds::empty(4);
            page.include(&key);
            page
        };
        let pages = [page([1.0, 0.0, 0.0, 0.0]), page([0.0, 5.0, 0.0, 0.0]), page([0.0; 4])];
        let query = [0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0];
        let scores = scores(&config(), &query, &pages);
        // The first head looks at the second page, the second head, less sharply, at the first.
        assert!(scores[1] > scores[0] && scores[0] > scores[2], "{scores:?}");
        assert!((scores.iter().sum::<f32>() - 2.0).abs() < 1e-5, "each head has one share to give");
        // Each head for itself: products over the root of four channels.
        assert_eq!(by_head(&config(), &query, &pages), [[0.0, 5.0, 0.0], [1.5, 0.0, 0.0]]);
    }
}
