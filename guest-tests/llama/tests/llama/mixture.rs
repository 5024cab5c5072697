//! The mixture that is made of the bundled model.

use std::collections::BTreeMap;

use crate::common::{Checkpoint, bundled, model, stories};
use lamina_llama::{
    Decoder, Element, Experts, PlainCache, Route, Viewed, judge,
    mixture::{MixtureError, of_safetensors},
};

const EXPERTS: Experts = Experts { count: 4, used: 2 };

fn made() -> Vec<u8> {
    of_safetensors(&bundled("stories260K-bf16.safetensors"), EXPERTS).unwrap()
}

#[test]
fn it_says_about_what_the_dense_model_says() {
    let text = String::from_utf8(bundled("story.txt")).unwrap();
    let perplexity = |(config, bytes, tokenizer): (_, _, lamina_llama::Tokenizer)| {
        let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        let text = tokenizer.encode(&text);
        judge(&mut decoder, &weights, &mut cache, &text, 64).unwrap().perplexity().unwrap()
    };
    let (dense, mixture) = (perplexity(stories()), perplexity(model(&Checkpoint::of(&made()))));
    assert!((mixture / dense - 1.0).abs() < 0.1, "{mixture} of {dense}");
    assert_ne!(mixture.to_bits(), dense.to_bits());
}

#[test]
fn its_experts_are_used_and_not_alike() {
    let (config, bytes, tokenizer) = model(&Checkpoint::of(&made()));
    let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
    let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
    let text = tokenizer.encode(&String::from_utf8(bundled("story.txt")).unwrap());
    decoder.steps(&weights, &mut cache, &text).unwrap();
    let mut tokens = BTreeMap::<_, Vec<&Route>>::new();
    for route in decoder.routes() {
        tokens.entry((route.layer, route.position)).or_default().push(route);
    }
    assert_eq!(tokens.len(), config.n_layers * text.len());
    for used in tokens.values() {
        assert_eq!(used.len(), EXPERTS.used);
        assert!((used.iter().map(|route| route.share).sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(used[0].expert < used[1].expert && used[1].expert < EXPERTS.count);
    }
    let mut counts = vec![0; EXPERTS.count];
    decoder.routes().iter().for_each(|route| counts[route.expert] += 1);
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(*least > 0 && most > least, "{counts:?}");
}

#[test]
fn it_is_the_same_every_time_and_of_no_other_file() {
    let mixture = made();
    assert!(mixture == made());
    let refused = |file: &[u8], experts| of_safetensors(file, experts).unwrap_err();
    assert!(matches!(refused(&mixture, EXPERTS), MixtureError::Mixture(4)));
    let dense = bundled("stories260K-bf16.safetensors");
    assert!(matches!(refused(&dense, Experts { count: 2, used: 3 }), MixtureError::Config(_)));
    for cut in [0, 7, 8, 100] {
        assert!(matches!(refused(&dense[..cut], EXPERTS), MixtureError::File(_)), "{cut}");
    }
    assert!(matches!(refused(&dense[..dense.len() - 1], EXPERTS), MixtureError::Tensor { .. }));
    assert!(matches!(refused(&[255; 64], EXPERTS), MixtureError::File(_)));
}
