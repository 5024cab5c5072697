//! Which pages of the history are read, and in which view (the paper's Table II).
//!
//! | spelling | reads |
//! |---|---|
//! | `full` | everything, in full |
//! | `window:N` | the last N tokens in full, nothing of the others |
//! | `top:K` | the K best pages in full, nothing of the others |
//! | `top:K=VIEW,K=VIEW,…` | the K best pages in the first view, the next K in the second, and so on; `*` for a count means all that are left |
//! | `packkv…` | everything, from a cache that the device packs with loss, as this spelling says; `packkv:K,V…` gives K and V scales of their own |
//! | `quest:…` | as `top:…`, but each query head has an order of its own, as in the papers |
//!
//! Pages are ranked by [`crate::bounds`], for each layer and each query anew: for `top` one order
//! for all heads, so that a page is read for all of them or not at all; for `quest` an order for
//! each, so that a page is read in each view that any head wants it in. A page that is being filled
//! is not ranked: what is flushed of it is always read in full, and so are the tokens that are not
//! flushed yet, which no view shows.
//!
//! In a view whose elements are smaller than the tensor's, pages are smaller too. The host fetches
//! views by 4 KiB, so there a page may bring its neighbour along; a view that keeps the tensor's
//! own container, such as `e8m3+g2`, does not.

use std::{fmt, ops::Range, str::FromStr};

use crate::element::Element;

/// The view that shows everything.
pub const FULL: &str = "full";

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The last so many tokens in full.
    Window(usize),
    /// The best pages in the first tier, the next in the second and so on.
    Tiers(Vec<Tier>),
    /// The same, for each query head by its own order.
    Heads(Vec<Tier>),
    /// Everything, from a cache that is packed with loss as the device spells it.
    Packed(String),
}

/// A spelling `packkv…` as the device has it for K and for V. `packkv:0.1,0.2,median` is
/// `packkv:0.1,median` and `packkv:0.2,median`; of one scale they are the same.
pub fn packings(spelling: &str) -> [String; 2] {
    let parts: Vec<&str> = spelling.split(',').collect();
    match (parts[0].rsplit_once(':'), &parts[1..]) {
        (Some((name, _)), [scale, rest @ ..]) if scale.parse::<f32>().is_ok() => {
            let of_v = format!("{name}:{scale}");
            [parts[0], &of_v].map(|first| [&[first], rest].concat().join(","))
        }
        _ => [spelling.to_owned(), spelling.to_owned()],
    }
}

/// Pages that are read alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tier {
    /// How many; all that are left if not given.
    pub pages: Option<usize>,
    /// The view they are read in.
    pub view: String,
}

/// Why this is no policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PolicyError {
    /// Not of the form.
    #[error(
        "{policy:?} is no policy: write full, window:TOKENS, packkv:SCALE, top:PAGES, or top:PAGES=VIEW,PAGES=VIEW,… with * for the rest, for example \
         top:2=full,*=fp8_e4m3fn; quest: in place of top: ranks pages for each head"
    )]
    Form {
        /// What was given.
        policy: String,
    },
    /// A tier behind the one that takes all that are left, or too many.
    #[error("{policy:?}: nothing is left behind `*`")]
    BehindRest {
        /// What was given.
        policy: String,
    },
    /// A view that cannot be read.
    #[error(transparent)]
    View(#[from] crate::UnreadableView),
}

impl Policy {
    /// Everything in full.
    pub fn full() -> Self {
        Self::Tiers(vec![Tier { pages: None, view: FULL.to_owned() }])
    }

    /// The views it reads, each once, `full` first.
    pub fn views(&self) -> Vec<String> {
        let mut views = vec![FULL.to_owned()];
        for tier in self.tiers() {
            if !views.contains(&tier.view) {
                views.push(tier.view.clone());
            }
        }
        views
    }

    /// Whether each query head has an order of its own.
    pub fn by_head(&self) -> bool {
        matches!(self, Self::Heads(_))
    }

    fn tiers(&self) -> &[Tier] {
        match self {
            Self::Window(_) | Self::Packed(_) => &[],
            Self::Tiers(tiers) | Self::Heads(tiers) => tiers,
        }
    }

    /// Whether it asks for the scores of `pages` filled pages: not where they cannot change
    /// anything.
    pub fn ranks(&self, pages: usize) -> bool {
        self.tiers().first().is_some_and(|tier| tier.pages.is_some_and(|first| first < pages))
    }

    /// What is read of `flushed` tokens in pages of `page_tokens` when the sequence has `tokens` in
    /// all: ranges of tokens, oldest first, with the index of their view in [`Self::views`].
    /// `scores` has one score a filled page, or is empty if [`Self::ranks`] asks for none. Of
    /// equally good pages the newer is better.
    pub fn select(
        &self,
        tokens: usize,
        flushed: usize,
        page_tokens: usize,
        scores: &[f32],
    ) -> Vec<(Range<usize>, usize)> {
        if let Self::Window(window) = self {
            let from = tokens.saturating_sub(*window);
            return if from < flushed { vec![(from..flushed, 0)] } else { Vec::new() };
        }
        if let Self::Packed(_) = self {
            return Self::full().select(tokens, flushed, page_tokens, scores);
        }
        let views = self.views();
        let pages = flushed / page_tokens;
        let mut best: Vec<usize> = (0..pages).rev().collect();
        if !scores.is_empty() {
            best.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        }
        let mut view_of = vec![None; pages];
        let mut ranked = best.into_iter();
        for tier in self.tiers() {
            let view = views.iter().position(|view| *view == tier.view);
            for page in ranked.by_ref().take(tier.pages.unwrap_or(pages)) {
                view_of[page] = view;
            }
        }
        let filled = view_of.into_iter().enumerate();
        let filled =
            filled.filter_map(|(page, view)| Some((page * page_tokens..(page + 1) * page_tokens, view?)));
        let mut selected: Vec<(Range<usize>, usize)> = Vec::new();
        for (tokens, view) in filled.chain([(pages * page_tokens..flushed, 0)]) {
            match selected.last_mut() {
                Some((last, same)) if *same == view && last.end == tokens.start => last.end = tokens.end,
                _ if tokens.is_empty() => {}
                _ => selected.push((tokens, view)),
            }
        }
        selected
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(policy: &str) -> Result<Self, PolicyError> {
        let form = || PolicyError::Form { policy: policy.to_owned() };
        let count = |text: &str| text.parse::<usize>().ok().filter(|count| *count > 0).ok_or_else(form);
        if policy == FULL {
            return Ok(Self::full());
        }
        if policy == "packkv" || policy.starts_with("packkv:") {
            return Ok(Self::Packed(policy.to_owned()));
        }
        if let Some(tokens) = policy.strip_prefix("window:") {
            return Ok(Self::Window(count(tokens)?));
        }
        let by_head = policy.strip_prefix("quest:");
        let tiers = by_head.or_else(|| policy.strip_prefix("top:")).ok_or_else(form)?;
        let mut parsed: Vec<Tier> = Vec::new();
        for tier in tiers.split(',') {
            if parsed.last().is_some_and(|last| last.pages.is_none()) {
                return Err(PolicyError::BehindRest { policy: policy.to_owned() });
            }
            let (pages, view) = tier.split_once('=').unwrap_or((tier, FULL));
            let pages = if pages == "*" { None } else { Some(count(pages)?) };
            Element::of(view)?;
            parsed.push(Tier { pages, view: view.to_owned() });
        }
        Ok(if by_head.is_some() { Self::Heads(parsed) } else { Self::Tiers(parsed) })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window(tokens) => write!(f, "window:{tokens}"),
            Self::Packed(packing) => f.write_str(packing),
            Self::Tiers(tiers) if *self == Self::full() => f.write_str(&tiers[0].view),
            Self::Tiers(tiers) | Self::Heads(tiers) => {
                f.write_str(if self.by_head() { "quest:" } else { "top:" })?;
                for (index, Tier { pages, view }) in tiers.iter().enumerate() {
                    f.write_str(if index == 0 { "" } else { "," })?;
                    match pages {
                        Some(pages) => write!(f, "{pages}={view}")?,
                        None => write!(f, "*={view}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Policy {
        text.parse().unwrap()
    }

    #[test]
    fn policies_are_spelled_and_told_the_same() {
        for (text, reported) in [
            ("full", "full"),
            ("window:64", "window:64"),
            ("packkv:0.1,greedy,8", "packkv:0.1,greedy,8"),
            ("packkv:0.1,0.2,greedy,8", "packkv:0.1,0.2,greedy,8"),
            ("top:5", "top:5=full"),
            ("top:5=full,3=fp8_e4m3fn@-2,*=e8m0", "top:5=full,3=fp8_e4m3fn@-2,*=e8m0"),
            ("top:*=e8m3+g2:packed", "top:*=e8m3+g2:packed"),
            ("top:*", "full"),
            ("quest:5", "quest:5=full"),
            ("quest:2=full,*=e8m1", "quest:2=full,*=e8m1"),
        ] {
            assert_eq!(policy(text).to_string(), reported);
            assert_eq!(policy(reported), policy(text));
        }
        assert_eq!(policy("top:2=e8m0,1=e8m1,1=full,*=e8m0").views(), ["full", "e8m0", "e8m1"]);
    }

    #[test]
    fn what_is_no_policy_is_refused() {
        for text in [
            "",
            "quest:",
            "Full",
            "window:",
            "window:0",
            "window:-1",
            "top:",
            "top:0",
            "top:5,",
            "top:x=full",
            "top",
        ] {
            let why = text.parse::<Policy>().unwrap_err();
            assert_eq!(why, PolicyError::Form { policy: text.to_owned() });
        }
        let why = "top:*=full,2=e8m0".parse::<Policy>().unwrap_err();
        assert_eq!(why, PolicyError::BehindRest { policy: "top:*=full,2=e8m0".to_owned() });
        for view in ["int4", "e9m3", "e8m8", "", "bf16"] {
            let why = format!("top:2={view}").parse::<Policy>().unwrap_err();
            assert!(matches!(why, PolicyError::View(_)), "{view}: {why}");
        }
    }

    #[test]
    fn k_and_v_may_be_packed_by_scales_of_their_own() {
        for (spelling, k, v) in [
            ("packkv", "packkv", "packkv"),
            ("packkv:0.1", "packkv:0.1", "packkv:0.1"),
            ("packkv:0.1,median,4", "packkv:0.1,median,4", "packkv:0.1,median,4"),
            ("packkv:0.1,0.2", "packkv:0.1", "packkv:0.2"),
            ("packkv:0.1,0.2,none,16", "packkv:0.1,none,16", "packkv:0.2,none,16"),
        ] {
            assert_eq!(packings(spelling), [k, v], "{spelling}");
        }
    }

    #[test]
    fn everything_is_one_range() {
        assert_eq!(policy("full").select(101, 96, 16, &[]), [(0..96, 0)]);
        assert_eq!(policy("packkv:0.1").select(101, 96, 16, &[]), [(0..96, 0)]);
        assert_eq!((policy("packkv").views(), policy("packkv").ranks(9)), (vec![FULL.to_owned()], false));
        assert_eq!(policy("top:*=e8m0").select(101, 96, 16, &[]), [(0..96, 1)]);
        assert_eq!(policy("full").select(7, 0, 16, &[]), []);
    }

    #[test]
    fn a_window_counts_what_is_not_flushed_too() {
        let window = policy("window:20");
        assert!(!window.ranks(9));
        assert_eq!(window.select(101, 96, 16, &[]), [(81..96, 0)]);
        assert_eq!(window.select(15, 10, 16, &[]), [(0..10, 0)]);
        assert_eq!(policy("window:5").select(101, 96, 16, &[]), []);
    }

    #[test]
    fn the_page_that_is_being_filled_is_read_in_full() {
        assert_eq!(policy("top:*=e8m0").select(101, 90, 16, &[]), [(0..80, 1), (80..90, 0)]);
        assert_eq!(policy("top:1").select(40, 39, 10, &[0.1, 0.9, 0.5]), [(10..20, 0), (30..39, 0)]);
        assert_eq!(policy("top:1").select(40, 39, 10, &[0.1, 0.5, 0.9]), [(20..39, 0)]);
        assert_eq!(policy("top:1=e8m0").select(8, 6, 10, &[]), [(0..6, 0)]);
    }

    #[test]
    fn pages_go_to_tiers_by_rank_and_come_back_in_order() {
        let scores = [0.1, 0.9, 0.3, 0.2, 0.8, 0.0];
        let ask = |text: &str, flushed| policy(text).select(flushed + 1, flushed, 10, &scores);
        assert_eq!(ask("top:2", 60), [(10..20, 0), (40..50, 0)]);
        assert_eq!(ask("top:3", 60), [(10..30, 0), (40..50, 0)]);
        assert_eq!(ask("top:2,2=e8m0", 60), [(10..20, 0), (20..40, 1), (40..50, 0)]);
        assert_eq!(
            ask("top:1=full,1=e8m3,*=e8m0", 60),
            [(0..10, 2), (10..20, 0), (20..40, 2), (40..50, 1), (50..60, 2)]
        );
        // A view that comes twice joins what it reads.
        assert_eq!(ask("top:1=full,1=e8m0,1=full", 60), [(10..30, 0), (40..50, 1)]);
    }

    #[test]
    fn of_equals_the_newer_page_is_better_and_few_pages_need_no_rank() {
        let top = policy("top:2");
        assert_eq!(top.select(41, 40, 10, &[0.5; 4]), [(20..40, 0)]);
        assert!(top.ranks(3) && !top.ranks(2));
        assert_eq!(top.select(21, 20, 10, &[]), [(0..20, 0)]);
        assert!(!policy("full").ranks(100));
    }

    #[test]
    fn a_score_that_is_no_number_harms_nothing() {
        let selected = policy("top:1").select(31, 30, 10, &[f32::NAN, 0.5, -f32::NAN]);
        assert_eq!(selected.len(), 1);
    }
}
