//! Layouts by name and as they are spelled, and what windows of an unusual one do.

use super::*;

#[test]
fn presets_are_the_layouts_of_vllm() {
    // The cache of a layer by its dimensions: K or V, block, token, head, element. FlashAttention's
    // backend has them in this order, FlashInfer's has the block first (`get_kv_cache_shape`); in
    // memory, HND then swaps the fourth and the third (`get_kv_cache_stride_order`).
    const LENGTHS: [usize; 5] = [2, 6, 16, 4, 32];
    let (flash_attention, flash_infer) = ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4]);
    let (nhd, hnd) = ([0, 1, 2, 3, 4], [0, 1, 3, 2, 4]);
    for (dimensions, stride_order, preset) in [
        (flash_attention, nhd, Preset::Nhd),
        (flash_attention, hnd, Preset::Hnd),
        (flash_infer, nhd, Preset::NhdKv),
        (flash_infer, hnd, Preset::HndKv),
    ] {
        let (mut strides, mut stride) = ([0; 5], 1);
        for dimension in stride_order.into_iter().rev().map(|at| dimensions[at]) {
            strides[dimension] = stride;
            stride *= LENGTHS[dimension];
        }
        // Every element is its number, token by token.
        let [kinds, blocks, tokens, heads, size] = LENGTHS;
        let together = matches!(preset, Preset::NhdKv | Preset::HndKv);
        let mut memory = vec![0; 2 * stride];
        let (mut rows, mut number) = (Vec::new(), 0_u16);
        for tensor in 0..if together { 1 } else { kinds } {
            for (block, token) in (0..blocks).flat_map(|block| (0..tokens).map(move |token| (block, token))) {
                for kind in if together { 0..kinds } else { tensor..tensor + 1 } {
                    for (head, element) in (0..heads).flat_map(|head| (0..size).map(move |at| (head, at))) {
                        let place = [kind, block, token, head, element];
                        let at: usize = place.iter().zip(strides).map(|(place, stride)| place * stride).sum();
                        memory[2 * at..2 * at + 2].copy_from_slice(&number.to_le_bytes());
                        rows.extend(number.to_le_bytes());
                        number += 1;
                    }
                }
            }
        }
        let (heads, size, tokens) = (small(heads).into(), small(size).into(), small(tokens).into());
        let layout = KvLayout::preset(preset, heads, size, tokens, 96).unwrap();
        let shape = Shape::new(Format::Bf16, &layout).unwrap().unwrap();
        let window = shape.blocks() * BLOCK_BYTES;
        assert_eq!(memory.len(), if together { window } else { 2 * window }, "{preset:?}");
        for (memory, rows) in memory.chunks(window).zip(rows.chunks(window)) {
            // The transform sees whole tokens, all heads of K and then of V,
            let mut seen = memory.to_vec();
            if let Some(paged) = shape.paged() {
                paged.gather_rows(memory, &mut seen);
            }
            assert!(seen == rows, "{preset:?}");
            // and a view shows the cache as it lies in memory.
            let mut bundles = Vec::new();
            let coded = encode(&shape, 0, Codec::Tree, memory, Some(Coding::Deltas), &mut bundles);
            assert_eq!(coded.coding, Coding::Deltas, "{preset:?}");
            for mask in [PlaneMask(0xffff), PlaneMask(0xfff0)] {
                assert!(decode(&shape, 0, &bundles, mask) == want(Format::Bf16, mask, memory), "{preset:?}");
            }
        }
    }
}

#[test]
fn layouts_are_read_as_written_and_refused_with_the_bound() {
    let read = |text: &str| text.parse::<KvLayout>();
    assert_eq!(read("64"), Ok(KvLayout::rows(64, 128)));
    assert_eq!(read("64,32"), Ok(KvLayout::rows(64, 32)));
    assert_eq!(read("64,stride=80"), Ok(KvLayout { stride: Some(80), ..KvLayout::rows(64, 128) }));
    let lossy = KvLayout { lossy: Some("packkv:0.2,none,4".parse().unwrap()), ..KvLayout::rows(64, 32) };
    assert_eq!(read("64,32,lossy=packkv:0.2,none,4"), Ok(lossy));
    assert!(read("64,32,lossy=packkv:7").unwrap_err().to_string().contains("from 0.01 to 1"));
    assert_eq!(read("64,32,stride=80"), Ok(KvLayout { stride: Some(80), ..KvLayout::rows(64, 32) }));
    assert_eq!(read("hnd:8,128,16"), KvLayout::preset(Preset::Hnd, 8, 128, 16, 128));
    assert_eq!(read("nhd:8,128,16,64"), Ok(KvLayout::rows(1024, 64)));
    for wrong in [
        "",
        "x",
        "64,",
        "64,32,80",
        "64,32,stride=",
        "64,stride=1,32",
        "hnd:8,128",
        "xyz:1,2,3",
        "nhd:1,2,3,4,5",
    ] {
        assert!(read(wrong).unwrap_err().to_string().contains("CHANNELS"), "{wrong}");
    }
    let json = |text: &str| serde_json::from_str::<KvLayout>(text);
    assert_eq!(json(r#"{"channels":8}"#).unwrap(), KvLayout::rows(8, 128));
    let preset = r#"{"preset":"hnd_kv","heads":8,"head_size":128,"block_size":16,"window":64}"#;
    assert_eq!(json(preset).unwrap(), KvLayout::preset(Preset::HndKv, 8, 128, 16, 64).unwrap());
    let paged = r#"{"channels":8,"window":4,"paged":{"groups":2,"block":4}}"#;
    assert_eq!(serde_json::to_string(&json(paged).unwrap()).unwrap(), paged);
    for wrong in [
        r"{}",
        r#"{"channels":8,"preset":"nhd"}"#,
        r#"{"preset":"nhd"}"#,
        r#"{"channels":8,"heads":2}"#,
        r#"{"preset":"x","heads":1,"head_size":1,"block_size":1}"#,
    ] {
        assert!(json(wrong).is_err(), "{wrong}");
    }
    let refused = |layout: KvLayout, part: &str| {
        let why = Shape::new(Format::Bf16, &layout).unwrap_err().to_string();
        assert!(why.contains("kv") || why.contains("channels") || why.contains("paged"), "{why}");
        assert!(why.contains(part), "{why}");
    };
    refused(KvLayout::rows(0, 1), "and 0");
    refused(KvLayout::rows(1, 257), "257");
    refused(KvLayout { stride: Some(7), ..KvLayout::rows(8, 8) }, "not 7");
    let paged = |groups, block| Some(PagedRows { groups, block });
    refused(KvLayout { paged: paged(3, 8), ..KvLayout::rows(8, 8) }, "3 groups");
    refused(KvLayout { paged: paged(0, 8), ..KvLayout::rows(8, 8) }, "0 groups");
    refused(KvLayout { paged: paged(2, 8), stride: Some(9), ..KvLayout::rows(8, 8) }, "not 9");
    refused(KvLayout { paged: paged(1, u32::MAX), ..KvLayout::rows(u32::MAX, 8) }, "at most");
    assert!(KvLayout::preset(Preset::Hnd, u32::MAX, 2, 1, 1).is_err());
    // Whose parts have no channels.
    let empty = KvLayout::preset(Preset::HndKv, u32::MAX, 0, 1, 1).unwrap();
    assert_eq!(Shape::new(Format::Bf16, &empty), Err(KvError::Size { channels: 0, window: 1 }));
}

#[test]
fn columns_that_are_longer_than_blocks_come_back() {
    // One page of 65536 tokens is a window.
    for (layout, format) in [("hnd:2,1,65536", Format::Bf16), ("hnd:2,1,65536", Format::Fp8E4m3fn)] {
        let shape = Shape::new(format, &layout.parse().unwrap()).unwrap().unwrap();
        let data = cache(format, 2, shape.blocks() * BLOCK_BYTES, 7);
        for codec in Codec::ALL {
            for way in [None, Some(Coding::Channels), Some(Coding::Deltas)] {
                let mut bundles = Vec::new();
                encode(&shape, 0, codec, &data, way, &mut bundles);
                assert!(decode(&shape, 0, &bundles, PlaneMask::all(format)) == data, "{codec} {way:?}");
            }
        }
    }
}
