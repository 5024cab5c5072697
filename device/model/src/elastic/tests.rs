//! What planes save, by hand and against what must hold.

use super::*;

fn profile() -> Profile {
    Profile::named("ddr5-4800").unwrap()
}

fn fetched(base: u32, mix: &str, chunk: u64) -> Fetched {
    fetch_mix(&profile(), base, &Mix::parse(mix).unwrap(), chunk, 1 << 19).unwrap()
}

/// By hand: 2048 weights of 16 bits are a block: 64 lines by words, four of each of the planes.
#[test]
fn lines_are_those_of_words_and_planes() {
    let chunk = |bits| Work { base: 16, chunks: vec![Chunk { weights: 2048, bits }] };
    for bits in [1, 8, 16] {
        let fetched = fetch(&profile(), &chunk(bits)).unwrap();
        assert!((fetched.words.bits - 16.0).abs() < 1e-9);
        assert!((fetched.planes.bits - f64::from(bits)).abs() < 1e-9);
    }
    let none = fetch(&profile(), &chunk(0)).unwrap();
    assert!(none.words.pj() == 0.0 && none.planes.pj() == 0.0 && none.energy_saved == 0.0);
    // A chunk of 100 weights is a line of each plane, and four lines of words.
    let part = Work { base: 16, chunks: vec![Chunk { weights: 100, bits: 3 }] };
    let part = fetch(&profile(), &part).unwrap();
    assert!((part.words.bits * 100.0 - 4.0 * 512.0).abs() < 1e-6);
    assert!((part.planes.bits * 100.0 - 3.0 * 512.0).abs() < 1e-6);
}

/// Large chunks save as the bits do: half of them half, and nothing where all are wanted.
#[test]
fn large_chunks_save_what_is_not_wanted() {
    assert!(fetched(16, "16:1", 1 << 16).energy_saved.abs() < 0.02);
    let half = fetched(16, "8:1", 1 << 16);
    assert!((half.energy_saved - 0.5).abs() < 0.02, "{half:?}");
    assert!((half.time_saved - 0.5).abs() < 0.06, "{half:?}");
    // Where half is not fetched at all, words do not fetch it either.
    let pruned = fetched(16, "16:0.5,0:0.5", 1 << 16);
    assert!(pruned.energy_saved.abs() < 0.03 && (pruned.words.bits - 8.0).abs() < 0.5, "{pruned:?}");
}

/// A chunk that fills no row opens one for each of its planes: neurons save less than heads, as in
/// the paper.
#[test]
fn small_chunks_save_less() {
    let [large, small] = [1 << 16, 7200].map(|chunk| fetched(16, "4:0.5,8:0.5", chunk));
    assert!(small.energy_saved < large.energy_saved - 0.02, "{small:?} {large:?}");
    assert!(small.planes.activate_pj > 3.0 * large.planes.activate_pj);
}

#[test]
fn the_papers_numbers_are_beside_ours() {
    let all = beside(&profile()).unwrap();
    assert_eq!(all.len(), 22);
    for beside in &all {
        assert!(!beside.reason.is_empty() && beside.ours_pj[0] > 0.0, "{beside:?}");
    }
    for beside in &all {
        let [paper, ours] = [beside.paper, beside.ours].map(|part| 100.0 * part);
        println!("{}: {paper:.1} {ours:.1} at {} bits, {:?}", beside.what, beside.bits, beside.ours_pj);
    }
    // Experts: what is fitted is met, and nothing else is called so.
    for beside in &all[..10] {
        assert_eq!((beside.ours - beside.paper).abs() < 1e-5, beside.fitted, "{beside:?}");
    }
    assert_eq!(all.iter().filter(|beside| beside.reason.contains("tCCD_L")).count(), 1);
    // Mixtral and Llama 70B in bf16: the time is that of the mix of the energy, and no fit.
    for (energy, time) in [(2, 6), (1, 7)] {
        let [energy, time] = [energy, time].map(|number| &all[number]);
        assert!(energy.fitted && !time.fitted && energy.mix == time.mix, "{energy:?} {time:?}");
        assert!((time.ours - time.paper).abs() < 0.03, "{time:?}");
    }
    // Parts that the paper does not print are those of its milliseconds.
    let derived: Vec<_> = all.iter().filter(|beside| beside.derived).collect();
    for (beside, percent) in derived.iter().zip([15.9, 14.7]) {
        assert!((100.0 * beside.paper - percent).abs() < 0.05 && beside.paper_ms.is_some(), "{beside:?}");
    }
    assert_eq!(derived.len(), 2);
    // Heads: within a tenth of what the paper saves.
    for beside in &all[10..13] {
        assert!((beside.ours - beside.paper).abs() < 0.1, "{beside:?}");
    }
    // Of time they save less than of energy: rows go over four channels whole.
    for (energy, time) in all[10..16].iter().zip(&all[16..]) {
        assert!(energy.bits.to_bits() == time.bits.to_bits() && energy.what == time.what);
        assert!(time.ours < energy.ours && time.ours < time.paper, "{time:?}");
    }
    let saved = |bits: &str| fetched(16, bits, 1 << 16).time_saved;
    assert!((saved("9:1") - saved("12:1")).abs() < 0.02 && saved("8:1") > saved("9:1") + 0.2);
    // What is said of a figure is what was fetched.
    for beside in &all {
        let time = beside.what.contains(" ms") || beside.figure.starts_with("CXL-NDP");
        let saved = if time { beside.fetched.time_saved } else { beside.fetched.energy_saved };
        assert!((beside.ours - saved).abs() < 1e-12, "{beside:?}");
        // It has the bits that are said of it, and moves them. The last line of a plane of a neuron
        // is not full.
        assert!((beside.fetched.bits - beside.bits).abs() < 0.02, "{beside:?}");
        assert!((beside.mix.bits() - beside.bits).abs() < 0.02, "{beside:?}");
        let moved = beside.fetched.planes.bits / beside.bits;
        let full = if beside.what.contains("neurons") { 7200.0 / 7680.0 } else { 1.0 };
        assert!((moved * full - 1.0).abs() < 0.005, "{beside:?}");
    }
}

#[test]
fn mixes_and_maps_are_read_and_absurd_ones_refused() {
    let mix = Mix::parse("16:0.5, 8:0.25,0:0.25").unwrap();
    assert!((mix.bits() - 10.0).abs() < 1e-9);
    let refused = |text: &str| Mix::parse(text).unwrap_err().to_string();
    for wrong in ["", "16", "x:1", "16:y"] {
        assert!(refused(wrong).contains("mix"), "{wrong}");
    }
    assert!(refused("16:0.5").contains("sum of a mix is 0.5"));
    assert!(refused("65:1").contains("bits of a mix is 65"));
    assert!(refused("16:1.5,8:-0.5").contains("part of a mix"));
    assert_eq!(
        parse_map("# head\n3700 8\n7200,16 # neuron\n", 16).unwrap(),
        [Chunk { weights: 3700, bits: 8 }, Chunk { weights: 7200, bits: 16 }]
    );
    for (text, why) in [
        ("12\n", "bits of line 1 is missing"),
        ("\na 1\n", "weights of line 2 is a: it must be a whole number"),
        ("1 1\n100 99\n", "bits of line 2 is 99: it must be from 0 to 16"),
        ("1,000,000 8", "end of line 1 is 000: it must be nothing more"),
        ("100 8 more", "end of line 1 is more: it must be nothing more"),
        ("0 8", "weights of line 1 is 0: it must be from 1 to 1125899906842624"),
        ("", "a line of weights and bits is missing"),
        ("# nothing\n\n", "a line of weights and bits is missing"),
    ] {
        assert!(parse_map(text, 16).unwrap_err().to_string().starts_with(why), "{text}");
    }
    for weights in [0.0, -1.0, 1e99, f64::NAN] {
        let why = check_weights(weights).unwrap_err().to_string();
        assert!(why.contains("it must be from 1 to 1125899906842624"), "{why}");
    }
    check_weights(46.7e9).unwrap();
    let work = |base, weights, bits| {
        let work = Work { base, chunks: vec![Chunk { weights, bits }] };
        fetch(&profile(), &work).unwrap_err().to_string()
    };
    assert!(work(7, 1, 1).contains("base is 7"));
    assert!(work(8, 0, 1).contains("weights of a chunk is 0"));
    assert!(work(8, 1, 9).contains("bits of a chunk is 9"));
    assert!(work(8, u64::MAX, 1).contains("weights of a chunk"));
    let none = Work { base: 16, chunks: Vec::new() };
    assert!(fetch(&profile(), &none).unwrap_err().to_string().contains("chunks is missing"));
    let refused = |base, chunk| fetch_mix(&profile(), base, &mix, chunk, 1).unwrap_err().to_string();
    assert!(refused(16, 0).contains("chunk is 0"));
    assert!(refused(0, 1).starts_with("base is 0"));
    assert!(refused(8, 1).contains("bits of a mix is 16"));
}

#[test]
fn scores_become_the_bits_of_their_thresholds() {
    let mode = Thresholds::default();
    assert_eq!(Thresholds::parse("0.8:16, 0.6:12,0.4:8,0.2:4").unwrap(), mode);
    for (score, bits) in [(1.0, 16), (0.81, 16), (0.8, 12), (0.6, 8), (0.41, 8), (0.4, 4), (0.2, 0), (0.0, 0)]
    {
        assert_eq!(mode.bits(score), bits, "{score}");
    }
    assert_eq!(
        parse_scores("4096 0.9 # an expert\n4096 0.1\n", 16, &mode).unwrap(),
        [Chunk { weights: 4096, bits: 16 }, Chunk { weights: 4096, bits: 0 }]
    );
    let refused = |text: &str| parse_scores(text, 16, &mode).unwrap_err().to_string();
    assert!(refused("7 1.5").contains("score of line 1 is 1.5"));
    assert!(refused("7 nan").contains("score of line 1 is NaN"));
    assert!(refused("7").contains("score of line 1 is missing"));
    assert!(refused("").contains("a line of weights and score is missing"));
    let narrow = parse_scores("7 0.1\n7 0.9", 8, &mode).unwrap_err().to_string();
    assert_eq!(narrow, "bits of line 2 is 16: it must be from 0 to 8");
    for wrong in ["", "0.8", "0.6:12,0.8:16", "0.8:16,0.8:12", "nan:16", "2:16", "0.8:x"] {
        assert!(Thresholds::parse(wrong).unwrap_err().to_string().contains("thresholds"), "{wrong}");
    }
}

/// However small a part is, it counts as what it is. Of chunks that fill rows planes move what is
/// wanted, and words all of what is not left out.
#[test]
fn a_mix_is_fetched_as_it_was_given() {
    for text in [
        "16:0.02,4:0.98",
        "16:0.01,8:0.01,4:0.02,0:0.96",
        "0:0.97,16:0.03",
        "16:0.27,4:0.73",
        "16:0.0003,1:0.9997",
    ] {
        let mix = Mix::parse(text).unwrap();
        let fetched = fetched(16, text, PART);
        let read: f64 = mix.0.iter().filter(|(bits, _)| *bits > 0).map(|(_, part)| part).sum();
        for (ours, wanted) in
            [(fetched.bits, mix.bits()), (fetched.planes.bits, mix.bits()), (fetched.words.bits, 16.0 * read)]
        {
            assert!((ours / wanted - 1.0).abs() < 1e-9, "{text}: {ours} for {wanted}");
        }
    }
}

/// What a mix costs is what all of its chunks cost when they are read in turns.
#[test]
fn kinds_by_themselves_cost_as_much_as_together() {
    for (text, kinds) in [("16:0.25,8:0.5,0:0.25", [16, 8, 0, 8]), ("4:0.5,12:0.5", [4, 12, 4, 12])] {
        let apart = fetched(16, text, PART);
        let chunks = (0..20).map(|number| Chunk { weights: PART, bits: kinds[number % 4] }).collect();
        let together = fetch(&profile(), &Work { base: 16, chunks }).unwrap();
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.03;
        assert!(close(apart.words.pj(), together.words.pj()), "{apart:?} {together:?}");
        assert!(close(apart.planes.pj(), together.planes.pj()), "{apart:?} {together:?}");
        assert!(close(apart.words.time_ps, together.words.time_ps), "{apart:?} {together:?}");
        assert!(close(apart.planes.time_ps, together.planes.time_ps), "{apart:?} {together:?}");
    }
}

/// However large the chunks of a mix are, each kind is among those that are read.
#[test]
fn a_mix_of_large_chunks_is_sampled_as_one_of_small_ones() {
    let mix = Mix::parse("16:0.25,8:0.5,0:0.25").unwrap();
    let fetched = |chunk| fetch_mix(&profile(), 16, &mix, chunk, 1 << 20).unwrap();
    let small = fetched(PART);
    assert!((small.bits - mix.bits()).abs() < 1e-9, "{}", small.bits);
    for chunk in [LARGE, 3_700_000, 1 << 23, MAX_SAMPLE] {
        let large = fetched(chunk);
        assert!((large.bits - mix.bits()).abs() < 1e-9, "{chunk}: {}", large.bits);
        let saved = [large.energy_saved - small.energy_saved, large.time_saved - small.time_saved];
        assert!(saved.iter().all(|points| points.abs() < 0.01), "{chunk}: {saved:?}");
    }
}

/// A sample of chunks that are large and many has their bits, and costs what all of them cost.
#[test]
fn a_sample_of_large_chunks_is_as_all_of_them() {
    let chunk = |number: usize| Chunk { weights: 3_700_000, bits: [16, 8, 4, 0][number % 4] };
    let few: Vec<_> = (0..8).map(chunk).collect();
    let many: Vec<_> = (0..8000).map(chunk).collect();
    let whole = fetch(&profile(), &Work { base: 16, chunks: few.clone() }).unwrap();
    for chunks in [few, many] {
        let sampled = fetch(&profile(), &Work::of(16, &chunks).unwrap()).unwrap();
        assert!((sampled.bits - 7.0).abs() < 0.6, "{}", sampled.bits);
        let close = |ours: f64, all: f64| (ours / all - 1.0).abs() < 0.1;
        assert!(close(sampled.planes.pj(), whole.planes.pj()) && close(sampled.words.pj(), whole.words.pj()));
    }
    // What is small enough is taken as it is.
    let small: Vec<_> = (1..100).map(|weights| Chunk { weights, bits: 3 }).collect();
    assert_eq!(Work::of(16, &small).unwrap().chunks, small);
    let refused = |chunks: &[Chunk]| Work::of(16, chunks).unwrap_err().to_string();
    assert!(refused(&[Chunk { weights: u64::MAX, bits: 1 }]).contains("weights of a chunk"));
    assert!(refused(&[Chunk { weights: 1 << 49, bits: 1 }; 4]).contains("weights of all chunks"));
    assert!(refused(&[Chunk { weights: 0, bits: 1 }]).contains("weights of a chunk is 0"));
    assert!(refused(&[Chunk { weights: 1, bits: 17 }]).contains("bits of a chunk is 17"));
    assert!(refused(&[]).contains("chunks is missing"));
}
