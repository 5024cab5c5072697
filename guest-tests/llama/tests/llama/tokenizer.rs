//! Tokens and text.

use crate::common::stories;
use lamina_llama::{BOS, Tokenizer, TokenizerError};
use proptest::prelude::*;

#[test]
fn text_becomes_the_pieces_the_model_knows() {
    let (_, _, tokenizer) = stories();
    let pieces = |text: &str| {
        let tokens = tokenizer.encode(text);
        assert_eq!(tokens[0], BOS);
        // A piece behind another keeps its space.
        tokens[1..].iter().map(|&token| tokenizer.decode(&[5, token]).split_off(1)).collect::<Vec<_>>()
    };
    assert_eq!(pieces("the then"), [" the", " the", "n"]);
    assert_eq!(pieces("Once upon"), [" Once", " upon"]);
    // A new line is no piece of this vocabulary, nor is Ω: bytes stand in.
    assert_eq!(tokenizer.encode("a\n")[2..], [3 + 10]);
    assert_eq!(tokenizer.encode("Ω"), [BOS, tokenizer.encode(" ")[1], 3 + 0xce, 3 + 0xa9]);
    assert_eq!(tokenizer.encode(""), [BOS]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("")), "");
}

#[test]
fn special_and_unknown_tokens_are_no_text() {
    let (_, _, tokenizer) = stories();
    assert_eq!(tokenizer.decode(&[0, 1, 2, 512, usize::MAX]), "");
    assert_eq!(tokenizer.decode(&[3 + 0xff]), "\u{fffd}");
}

proptest! {
    #[test]
    fn every_text_comes_back(text in any::<String>()) {
        let (_, _, tokenizer) = stories();
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), text);
    }

    #[test]
    fn english_comes_back_in_fewer_tokens(text in "[a-zA-Z ,.\"'!?\n]{0,300}") {
        let (_, _, tokenizer) = stories();
        let tokens = tokenizer.encode(&text);
        prop_assert!(tokens.len() <= text.len() + 2);
        prop_assert_eq!(tokenizer.decode(&tokens), text);
    }

    #[test]
    fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200), count in 0_usize..600) {
        let _ = Tokenizer::parse(&bytes, count);
    }
}

#[test]
fn broken_vocabularies_are_refused_with_the_place() {
    let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tok512.bin")).unwrap();
    assert!(Tokenizer::parse(&file, 512).is_ok());
    let why = |file: &[u8], count| Tokenizer::parse(file, count).unwrap_err();
    assert_eq!(why(&file, 511), TokenizerError::Count { found: 512, wanted: 511 });
    assert_eq!(why(&[], 512), TokenizerError::Count { found: 0, wanted: 512 });
    let bytes = file.len() - 1;
    assert!(
        matches!(why(&file[..bytes], 512), TokenizerError::CutOff { token: 511, bytes: found, .. } if found == bytes)
    );
    for length in [-1_i32, 0, 4097, i32::MIN] {
        let mut bad = file.clone();
        bad[8..12].copy_from_slice(&length.to_le_bytes());
        assert_eq!(why(&bad, 512), TokenizerError::Length { token: 0, length });
    }
}
