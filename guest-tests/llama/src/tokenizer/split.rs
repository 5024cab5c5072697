//! Words, as GPT-2 cuts a text into them, each digit for itself.
//!
//! A word is what stands first of this, as long as it can be:
//!
//! 1. a digit or another number;
//! 2. `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`;
//! 3. letters, with a space before them or not;
//! 4. what is neither letter, number nor white space, with a space before it or not;
//! 5. white space. Its last character stays for the next word if something other than a number
//!    follows, and it is not the only one.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory as _};

const ENDINGS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Space,
    Other,
}

fn class(c: char) -> Class {
    match c.general_category_group() {
        _ if c.is_whitespace() => Class::Space,
        GeneralCategoryGroup::Letter => Class::Letter,
        GeneralCategoryGroup::Number => Class::Number,
        _ => Class::Other,
    }
}

/// The words of `text`, in order; together they are `text`.
pub(super) fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut left = text;
    while !left.is_empty() {
        let (word, rest) = left.split_at(first(left));
        words.push(word);
        left = rest;
    }
    words
}

/// Bytes of the first word of `text`, which has one.
fn first(text: &str) -> usize {
    let of = |text: &str| text.chars().next().map(class);
    let run = |text: &str, wanted| text.find(|c| class(c) != wanted).unwrap_or(text.len());
    if let Some(ending) = ENDINGS.iter().find(|ending| text.starts_with(**ending)) {
        return ending.len();
    }
    let behind = text.strip_prefix(' ').unwrap_or(text);
    let spaces = text.len() - behind.len();
    match of(behind) {
        Some(Class::Number) if spaces == 0 => text.chars().next().map_or(0, char::len_utf8),
        Some(wanted @ (Class::Letter | Class::Other)) => spaces + run(behind, wanted),
        _ => {
            let white = run(text, Class::Space);
            match of(&text[white..]) {
                None | Some(Class::Number) => white,
                Some(_) => {
                    let last = text[..white].chars().next_back().map_or(0, char::len_utf8);
                    if white > last { white - last } else { white }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_as_gpt_2_cuts_it() {
        for (text, wanted) in [
            ("Hello world", &["Hello", " world"][..]),
            ("it's we'll 'tis", &["it", "'s", " we", "'ll", " '", "tis"]),
            ("a  b\n\nc \n", &["a", " ", " b", "\n", "\n", "c", " \n"]),
            ("in 1984, 5x", &["in", " ", "1", "9", "8", "4", ",", " ", "5", "x"]),
            ("x   7", &["x", "   ", "7"]),
            ("über—alles!?", &["über", "—", "alles", "!?"]),
            ("", &[]),
        ] {
            assert_eq!(words(text), wanted, "{text:?}");
        }
    }
}
