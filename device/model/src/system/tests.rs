//! The printed figures come out, ours are said, and what is absurd is refused by its name.

use super::*;

fn system(name: &str, accounting: Accounting, alpha: f64) -> System {
    let server = Server { alpha, ..Server::default() };
    System { shape: Shape::preset(name).unwrap(), server, accounting }
}

fn assert_close(ours: &[f64], others: &[f64]) {
    assert_eq!(ours.len(), others.len());
    assert!(ours.iter().zip(others).all(|(a, b)| (a - b).abs() < 1e-9), "{ours:?} {others:?}");
}

#[test]
fn every_printed_figure_is_reproduced() {
    for check in checks() {
        // They are printed with two places.
        assert!((check.ours - check.paper).abs() < 0.0051, "{check:?}");
        assert!(check.difference().abs() < 0.001, "{check:?}");
    }
    assert_eq!(checks().len(), 21);
}

/// Who reads a ratio of `gcomp` in the figures is told that the paper measured another.
#[test]
fn ratios_say_where_they_are_from() {
    for check in checks().iter().filter(|check| check.design == "gcomp") {
        assert!(check.note.contains("1.33 and 1.259"), "{check:?}");
    }
    for (bits, of_gcomp, of_trace) in [
        (16.0, "weights of Table I;", "Table IV's BF16"),
        (8.0, "taken to be 1: the paper has none", "Table IV's FP8"),
        (4.25, "taken to be 1: the paper has none", "Table IV's INT4"),
    ] {
        let [_, gcomp, trace] = Ratios::paper(bits);
        assert!(gcomp.source.contains(of_gcomp) && gcomp.source.contains("has 1.07"), "{}", gcomp.source);
        assert!(trace.source.contains(of_trace), "{}", trace.source);
    }
}

/// Weights that are coded gain until KV that is not outweighs them, with a ceiling in between only.
#[test]
fn what_gains_for_a_while_is_found() {
    let mut system = system("gpt-oss-120b", Accounting::AsPrinted, 0.8);
    let faster = |system: &System| {
        let report = system.report(&Ratios::printed(), &[64 << 10], None).unwrap();
        report.designs[1].faster_than_plain_from
    };
    assert_eq!(faster(&system), Some(1));
    system.server.ceiling = Some(30.0);
    let from = faster(&system).unwrap();
    let [plain, gcomp, _] = Ratios::printed();
    let gain = |context| system.rate(&gcomp, context) / system.rate(&plain, context);
    assert!(gain(from) > 1.01 && gain(from - 1) <= 1.01 && gain(1 << 30) <= 1.01, "{from}");
}

#[test]
fn the_peaks_of_fig_14_are_where_the_paper_has_them() {
    for (ratios, peak) in Ratios::printed().iter().zip([0.592, 0.592, 0.771]) {
        let rate = |alpha: &f64| {
            let system = system("gpt-oss-120b", Accounting::AsPrinted, *alpha);
            system.point(ratios, 128 << 10).tokens_per_second.unwrap()
        };
        let grid: Vec<f64> = (0..20).map(|step| 0.1 + f64::from(step) * 0.85 / 19.0).collect();
        let best = grid.iter().max_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap();
        assert!((best - peak).abs() < 0.001, "{} at {best}", ratios.design);
    }
}

/// What a reader must be told: 128k gives 30.6 tokens a second and 1.88×, not 68.99 and 4.24×.
#[test]
fn compression_in_the_device_only_gives_what_the_ratio_gives() {
    let system = system("gpt-oss-120b-mxfp4", Accounting::DeviceOnly, 0.8);
    let [plain, _, trace] = Ratios::paper(4.0);
    let rate = |ratios| system.point(ratios, 128 << 10).tokens_per_second.unwrap();
    assert!((rate(&trace) - 30.6).abs() < 0.05, "{}", rate(&trace));
    assert!((rate(&trace) / rate(&plain) - 1.88).abs() < 0.001);
}

#[test]
fn the_link_carries_words_and_may_be_the_bound() {
    let mut system = system("gpt-oss-120b-mxfp4", Accounting::DeviceOnly, 0.8);
    let ratios = Ratios { kv: 4.0, ..Ratios::printed()[2].clone() };
    let point = system.point(&ratios, 128 << 10);
    assert_eq!(point.bound, Bound::Link);
    assert!((point.link_bytes / point.kv_bytes - 4.0).abs() < 1e-9);
    system.server.link_rate = 2e12;
    assert_eq!(system.point(&ratios, 128 << 10).bound, Bound::Ddr);
    assert_eq!(system.point(&ratios, 1024).bound, Bound::Unbound);
    system.server.ceiling = Some(10.0);
    assert_eq!(system.point(&ratios, 1024).bound, Bound::Ceiling);
}

#[test]
fn a_planner_is_told_where_it_spills_and_how_far_it_goes() {
    let system = system("gpt-oss-120b-mxfp4", Accounting::DeviceOnly, 0.8);
    let report = system.report(&Ratios::paper(4.0), &[64 << 10, 128 << 10], Some(20.0)).unwrap();
    let [plain, gcomp, trace] = &report.designs[..] else { panic!("three designs") };
    // More than 15.2e9 bytes of HBM over 3.2 · 73728 bytes a token.
    assert_eq!(plain.spills_at, Some(64_426));
    assert_eq!(trace.spills_at, plain.spills_at);
    assert_eq!(plain.faster_than_plain_from, None);
    assert_eq!(trace.faster_than_plain_from, plain.spills_at);
    // 256e9 / 20 bytes a token, and HBM's, over what a token of context costs.
    assert_eq!(plain.longest_at_target, Some(118_679));
    assert!(trace.longest_at_target > gcomp.longest_at_target);
    assert!(gcomp.longest_at_target > plain.longest_at_target);
    assert!((trace.price_per_gb - 1.0 / 1.88).abs() < 1e-6, "{}", trace.price_per_gb);
    // 16 sequences of 128k: 154.6 GB, 15.2 of them in HBM.
    assert_eq!(plain.points[1].devices, 1);
    let long = system.report(&Ratios::paper(4.0), &[1 << 20], None).unwrap();
    assert_eq!(long.designs[0].points[0].devices, 5);
    assert_eq!(long.designs[2].points[0].devices, 3);
}

#[test]
fn configs_are_counted_as_their_papers_count_them() {
    let llama = r#"{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16", "model_type": "llama"}"#;
    let mixtral = r#"{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}"#;
    let deepseek = r#"{"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}}"#;
    let opt = r#"{"num_hidden_layers": 48, "hidden_size": 7168, "num_attention_heads": 56, "ffn_dim": 28672,
        "vocab_size": 50272, "tie_word_embeddings": true, "model_type": "opt", "torch_dtype": "float16"}"#;
    for (text, preset) in
        [(llama, "llama-3.1-8b"), (mixtral, "mixtral-8x7b"), (deepseek, "deepseek-v3"), (opt, "opt-30b")]
    {
        let (read, known) =
            (Shape::parse("config.json", text, None).unwrap(), Shape::preset(preset).unwrap());
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.01;
        assert!(close(read.parameters, known.parameters), "{preset}: {}", read.parameters);
        assert!(close(read.kv_bytes(), known.kv_bytes()), "{preset}");
        assert!(close(read.weight_bits, known.weight_bits), "{preset}");
        // Reports count an input embedding as read, or not, or without the output's.
        let active = read.active_parameters.unwrap() / known.active_parameters.unwrap();
        assert!((0.92..1.02).contains(&active), "{preset}: {active}");
    }
}

/// By hand from each `config.json`, whose keys are all that count: name, keys, parameters, active
/// parameters and bytes of KV a token. What their authors say of them is within two hundredths:
/// 41.8e9 of falcon-40b with the output embedding twice, 400e9 and 17e9 of Llama 4 Maverick, 2.7e9
/// of Qwen1.5-MoE with both embeddings read, 124e6 of GPT-2 with its table of positions.
const COUNTED: [(&str, &str, [f64; 3]); 8] = [
    (
        "falcon-7b",
        r#""model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71,
        "multi_query": true, "new_decoder_architecture": false, "vocab_size": 65024"#,
        [6.921e9, 6.921e9, 8192.0],
    ),
    (
        "falcon-40b",
        r#""model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
        "multi_query": true, "new_decoder_architecture": true, "vocab_size": 65024"#,
        [41.30e9, 41.30e9, 122_880.0],
    ),
    (
        "Llama-4-Maverick",
        r#""model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202048}"#,
        [400.7e9, 16.13e9, 196_608.0],
    ),
    (
        "Qwen1.5-MoE-A2.7B",
        r#""model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false, "vocab_size": 151936"#,
        [14.31e9, 2.375e9, 196_608.0],
    ),
    (
        "gpt2",
        r#""model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257"#,
        [0.1235e9, 0.1235e9, 36_864.0],
    ),
    (
        "gemma-2-2b",
        r#""model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000"#,
        [2.614e9, 2.614e9, 106_496.0],
    ),
    (
        "phi-2",
        r#""model_type": "phi", "num_hidden_layers": 32, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 10240, "vocab_size": 51200"#,
        [2.779e9, 2.648e9, 327_680.0],
    ),
    (
        "starcoder",
        r#""model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "multi_query": true,
        "vocab_size": 49152"#,
        [15.47e9, 15.47e9, 20_480.0],
    ),
];

#[test]
fn what_a_family_has_and_a_config_leaves_out_is_counted() {
    for (name, keys, [parameters, active, kv_bytes]) in COUNTED {
        let read = Shape::parse("config.json", &format!("{{{keys}}}"), None).unwrap();
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.001;
        assert!(close(read.parameters, parameters), "{name}: {}", read.parameters);
        assert!(close(read.active(), active), "{name}: {}", read.active());
        assert_close(&[read.kv_bytes()], &[kv_bytes]);
        assert_eq!(read.source, "counted from a config.json", "{name}");
    }
}

/// A planner is told that the numbers are those of another family.
#[test]
fn families_that_are_not_known_are_said() {
    let source = |fields: &str| Shape::parse("config.json", &config(fields), None).unwrap().source;
    let other = source(r#", "model_type": "own\u001b[2J""#);
    assert!(
        other.contains(r#"as if it were a Llama's: its model_type "own\u{1b}[2J" is not known"#),
        "{other}"
    );
    assert!(source("").contains("it has no model_type"));
    assert_eq!(source(r#", "model_type": "llama""#), "counted from a config.json");
}

/// A part of what Jamba, Qwen3-Next, Gemma 3n and others say, and what says nothing.
#[test]
fn what_is_not_modelled_is_refused_by_its_name() {
    let parsed = |fields: &str| Shape::parse("a.json", &config(fields), None).map_err(|why| why.to_string());
    for (fields, why) in [
        (
            r#", "attn_layer_period": 8, "expert_layer_period": 2"#,
            "attn_layer_period is 8: it must be 1 at most: ",
        ),
        (r#", "expert_layer_period": 2"#, "expert_layer_period is 2: it must be 1 at most: "),
        (r#", "full_attention_interval": 4"#, "full_attention_interval is 4: it must be 1 at most: "),
        (r#", "num_kv_shared_layers": 10"#, "num_kv_shared_layers is 10: it must be absent: "),
        (r#", "block_types": ["recurrent"]"#, "block_types is given: it must be absent: "),
        (
            r#", "layer_types": ["full_attention", "linear_attention"]"#,
            "layer_types is \"linear_attention\": it must be of ",
        ),
    ] {
        let refused = parsed(fields).unwrap_err();
        assert!(refused.starts_with(&format!("a.json: {why}")), "{refused}");
        assert!(refused.contains("write a TOML file with layers, kv_elements"), "{refused}");
    }
    for fields in [
        r#", "attn_layer_period": 1, "mlp_only_layers": [], "block_types": null, "is_encoder_decoder": false"#,
        r#", "layer_types": ["full_attention", "sliding_attention"]"#,
    ] {
        parsed(fields).unwrap();
    }
}

#[test]
fn toml_says_what_a_preset_says() {
    let text = "name = \"mine\"\nlayers = 32.0\nkv_elements = 2048.0\nparameters = 8.03e9\n";
    let shape = Shape::parse("mine.toml", text, None).unwrap();
    assert_eq!(shape.active_bytes().to_bits(), shape.weight_bytes().to_bits());
    assert_eq!(shape.kv_bytes().to_bits(), 131_072_f64.to_bits());
}

#[test]
fn names_reach_no_terminal_as_they_are() {
    let text = r#"name = "mïne\u001b[2J\n"
source = "\u0007"
layers = 1
kv_elements = 1
parameters = 1"#;
    let shape = Shape::parse("mine.toml", &text.replace("= 1", "= 1.0"), None).unwrap();
    assert_eq!((&*shape.name, &*shape.source), ("mïne\\u{1b}[2J\\n", "\\u{7}"));
}

#[test]
fn absurd_and_missing_fields_are_named() {
    let refused = |text: &str| Shape::parse("shape", text, None).unwrap_err().to_string();
    assert!(refused("name = \"a\"").contains("layers"));
    assert!(
        refused("name = \"a\"\nlayers = 0.0\nkv_elements = 1.0\nparameters = 1.0").contains("layers is 0")
    );
    assert!(refused("name = \"a\"\nlayers = nan\nkv_elements = 1.0\nparameters = 1.0").contains("layers"));
    let more = "name = \"a\"\nlayers = 1.0\nkv_elements = 1.0\nparameters = 1.0\nactive_parameters = 2.0";
    assert!(refused(more).contains("active_parameters"));
    assert!(refused("{\"hidden_size\": 1}").contains("num_hidden_layers is missing"));
    assert!(refused("{\"num_hidden_layers\": -3}").contains("num_hidden_layers is -3"));
    assert!(refused("{\"num_hidden_layers\": 99999999999}").contains("num_hidden_layers"));
    assert!(refused("{").contains("shape"));
    for text in ["name = \"a\"\nlayers = 0\nkv_elements = 1.0\nparameters = 1.0", "{}", "layers"] {
        assert!(refused(text).starts_with("shape: "), "{}", refused(text));
    }
    let mut system = system("opt-30b", Accounting::DeviceOnly, 0.8);
    let ratios = Ratios::printed();
    assert!(system.report(&ratios, &[0], None).unwrap_err().to_string().contains("context is 0"));
    system.server.ddr_rate = 0.0;
    assert!(system.report(&ratios, &[1], None).unwrap_err().to_string().contains("ddr is 0"));
    system.server.ddr_rate = f64::NAN;
    assert!(system.report(&ratios, &[1], None).unwrap_err().to_string().contains("ddr is NaN"));
}

/// Bounds are said in the unit of the option.
#[test]
fn gigabytes_have_bounds_in_gigabytes() {
    for (field, value, why) in [
        ("hbm", 1e7, "hbm is 10000000 GB: it must be from 0 to 1000000 GB"),
        ("hbm", 1e308, "hbm is 1e308 GB: it must be from 0 to 1000000 GB"),
        ("hbm", -1.0, "hbm is -1 GB: it must be from 0 to 1000000 GB"),
        ("link", 0.0, "link is 0 GB/s: it must be from 0.001 to 1000000 GB/s"),
        ("ddr", f64::INFINITY, "ddr is inf GB/s: it must be from 0.001 to 1000000 GB/s"),
        ("device", 0.0, "device is 0 GB: it must be from 0.001 to 1000000000 GB"),
    ] {
        assert_eq!(gigabytes(field, value).unwrap_err().to_string(), why);
    }
    // What is just within them is within those of the server, too.
    for [device_gb, rate] in [[0.001, 0.001], [1e9, 1e6]] {
        let rate = gigabytes("ddr", rate).unwrap();
        let device_bytes = gigabytes("device", device_gb).unwrap();
        let hbm_bytes = gigabytes("hbm", 1e6).unwrap();
        let server = Server { ddr_rate: rate, link_rate: rate, device_bytes, hbm_bytes, ..Server::default() };
        server.check().unwrap();
    }
}

/// A `config.json` of 32 layers of 4096 with these fields besides.
fn config(fields: &str) -> String {
    format!(
        r#"{{"num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000, "num_attention_heads": 32 {fields}}}"#
    )
}

#[test]
fn absurd_configs_are_refused_by_file_field_and_bound() {
    let refused = |text: &str| Shape::parse("a.json", text, None).unwrap_err().to_string();
    for text in ["[]", "null", "7", "\"x\""] {
        assert_eq!(refused(text), "a.json: it must be an object, as the config.json of a model is");
    }
    assert!(refused("[1").starts_with("a.json: EOF") && refused("").starts_with("a.json: EOF"));
    let why = Shape::parse("a.toml", "layers = 1\n\u{1b}[2J = 2", None).unwrap_err().to_string();
    assert!(why.contains("\\u{1b}[2J") && why.contains('\n') && !why.contains('\u{1b}'), "{why}");
    let of = |from: &str, to: &str| {
        let text = config("");
        assert!(text.contains(from));
        text.replace(from, to)
    };
    let divisor = "it must be a divisor of hidden_size, 4096, as there is no head_dim";
    let quantised = |with: &str| config(&format!(r#", "quantization_config": {with}"#));
    let method = |name: &str| {
        format!(
            "quantization_config.quant_method is {name}: it must be fp8, fbgemm_fp8, mxfp4 or bitsandbytes, \
                or have bits beside it; --weight-bits says them, too"
        )
    };
    for (text, why) in [
        (of("_heads\": 32", "_heads\": 30"), format!("num_attention_heads is 30: {divisor}")),
        (of("_heads\": 32", "_heads\": 9999"), format!("num_attention_heads is 9999: {divisor}")),
        (
            config(r#", "num_key_value_heads": 64"#),
            "num_key_value_heads is 64: it must be a divisor of num_attention_heads, 32".to_owned(),
        ),
        (
            of("layers\": 32", "layers\": 10001"),
            "num_hidden_layers is 10001: it must be a whole number from 1 to 10000".to_owned(),
        ),
        (
            of("32000", "100000001"),
            "vocab_size is 100000001: it must be a whole number from 1 to 100000000".to_owned(),
        ),
        (quantised(r#"{"quant_method": "awq"}"#), method("awq")),
        (quantised(r#"{"quant_method": "gptq", "bits": null}"#), method("gptq")),
        (quantised("{}"), "quantization_config.bits is missing".to_owned()),
        (
            quantised(r#"{"quant_method": "gptq", "bits": "4"}"#),
            "quantization_config.bits is \"4\": it must be a number".to_owned(),
        ),
        (
            quantised(r#"{"quant_method": "bitsandbytes", "load_in_4bit": 1}"#),
            "quantization_config.load_in_4bit is 1: it must be true or false".to_owned(),
        ),
        (
            config(r#", "tie_word_embeddings": "true""#),
            "tie_word_embeddings is \"true\": it must be true or false".to_owned(),
        ),
        (
            config(r#", "model_type": "gpt_bigcode", "multi_query": 0"#),
            "multi_query is 0: it must be true or false".to_owned(),
        ),
        (config(r#", "layer_types": "x""#), "layer_types is \"x\": it must be a list".to_owned()),
        (config(r#", "text_config": [1,2]"#), "text_config is [1,2]: it must be an object".to_owned()),
        (quantised(r#"{"bits": 0}"#), "quantization_config.bits is 0: it must be from 1 to 64".to_owned()),
    ] {
        assert_eq!(refused(&text), format!("a.json: {why}"));
    }
    let given = quantised(r#"{"quant_method": "awq"}"#);
    assert!((Shape::parse("a.json", &given, Some(4.0)).unwrap().weight_bits - 4.0).abs() < 1e-9);
    // With `head_dim` heads need not divide anything.
    Shape::parse("a.json", &config(r#", "head_dim": 100"#).replace("4096", "4000"), None).unwrap();
}

/// What is said of the whole model is said of the text model that is a part of it.
#[test]
fn bits_are_found_beside_a_text_config_and_in_it() {
    let bits = |text: &str| Shape::parse("config.json", text, None).unwrap();
    let inner = |fields: &str, outer: &str| format!(r#"{{"text_config": {} {outer}}}"#, config(fields));
    let fp8 = r#", "quantization_config": {"quant_method": "fp8"}"#;
    for (text, expected) in [
        (inner("", ""), 16.0),
        (inner("", fp8), 8.0),
        (inner(fp8, ""), 8.0),
        (inner(r#", "quantization_config": {"bits": 4}"#, fp8), 4.0),
        (inner("", r#", "torch_dtype": "float32""#), 32.0),
        (inner(r#", "dtype": "bfloat16""#, r#", "quantization_config": null"#), 16.0),
        (config(r#", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}"#), 4.0),
    ] {
        let found = bits(&text).weight_bits;
        assert!((found - expected).abs() < 1e-9, "{text}: {found}");
    }
    let tied = bits(&inner("", r#", "tie_word_embeddings": true"#)).parameters;
    assert_close(&[bits(&inner("", "")).parameters - tied], &[32000.0 * 4096.0]);
}

#[test]
fn presets_are_found_in_any_case() {
    assert_eq!(Shape::preset("GPT-OSS-120B"), Shape::preset("gpt-oss-120b"));
    assert!(Shape::preset("Llama-3.1-8B").is_some_and(|shape| shape.name == "llama-3.1-8b"));
    assert!(Shape::preset("llama").is_none());
}

#[test]
fn measured_ratios_are_read_from_what_lamina_prints() {
    let otherwise = Ratios::paper(16.0);
    let analysis = r#"{"tensors": [
        {"logical_bytes": 1000, "layout": {"kind": "weight"}, "codecs": {"tree": {"stored_bytes": 500}, "lz4": {"stored_bytes": 800}},
         "word_major": {"zstd": 1.25}},
        {"logical_bytes": 3000, "layout": {"kind": "kv"}, "codecs": {"tree": {"stored_bytes": 2000}, "lz4": {"stored_bytes": 2000}},
         "word_major": {"zstd": 1.0}}],
        "total": {"codecs": {"tree": {"stored_bytes": 2500}, "lz4": {"stored_bytes": 2800}}}}"#;
    let [_, gcomp, trace] = from_json("a.json", analysis, &otherwise).unwrap();
    assert_close(&[trace.kv, trace.weights, gcomp.kv, gcomp.weights], &[1.5, 2.0, 1.0, 1.25]);
    assert_eq!(trace.source, "measured: a.json, tree");
    let stats = r#"{"device": {"mode": "trace"}, "tensors": [
        {"logical_bytes": 1000, "written_bytes": 4096, "stored_bytes": 800, "layout": {"kind": "weight"}}]}"#;
    let [_, gcomp, trace] = from_json("s.json", stats, &otherwise).unwrap();
    assert_close(&[trace.kv, trace.weights, gcomp.kv], &[1.88, 1.25, 1.33]);
    assert!(trace.source.contains("KV: TRACE"), "{}", trace.source);
    let decode = |kv: &str| {
        let tensors = r#"[{"name": "w", "logical_bytes": 8000, "written_bytes": 1000, "stored_bytes": 625}]"#;
        format!(r#"{{"device": {{}}, "tensors": {tensors}, "decode": {{"tokens": 64, "kv_ratio": {kv}}}}}"#)
    };
    let [_, _, trace] = from_json("d.json", &decode("1.45"), &otherwise).unwrap();
    assert_close(&[trace.kv, trace.weights], &[1.45, 1.6]);
    assert_eq!(trace.source, "measured: d.json, a decode run");
    let [_, _, trace] = from_json("d.json", &decode("null"), &otherwise).unwrap();
    assert_close(&[trace.kv, trace.weights], &[1.88, 1.6]);
    assert!(from_json("d.json", &decode("-1"), &otherwise).unwrap_err().to_string().contains("kv_ratio"));
    let given = r#"{"trace": {"kv": 1.5, "weights": 1.3}}"#;
    assert_eq!(from_json("g.json", given, &otherwise).unwrap()[2].kv.to_bits(), 1.5_f64.to_bits());
    let refused = |text: &str| from_json("r", text, &otherwise).unwrap_err().to_string();
    assert!(refused("{}").contains("lamina analyze"));
    assert!(refused(r#"{"device": {"mode": "trace"}, "tensors": []}"#).contains("tensors"));
    assert!(refused(r#"{"trace": {"kv": 0.0, "weights": 1.0}}"#).contains("trace kv ratio is 0"));
    for (text, why) in [
        (r#"{"trace": {"kv": -1}}"#, "trace kv ratio is -1: it must be a number from 0.5 to 4096"),
        (
            r#"{"gcomp": {"weights": 5000}}"#,
            "gcomp weights ratio is 5000: it must be a number from 0.5 to 4096",
        ),
        (r#"{"trace": {"kv": "1"}}"#, "trace kv ratio is \"1\": it must be a number from 0.5 to 4096"),
        (r#"{"trace": {}}"#, "trace: kv or weights is missing"),
        (
            r#"{"trace": {"kv": 1, "weigths": 3}}"#,
            "a key of trace is weigths: it must be kv, weights or source",
        ),
        (r#"{"trace": {"kv": 1, "weights": 3}, "gcmop": {}}"#, "a key is gcmop: it must be gcomp or trace"),
        (
            r#"{"device": {"mode": "trace"}, "tensors": [{"logical_bytes": 1, "written_bytes": 1, "stored_bytes": 1}, {}]}"#,
            "/tensors/1/stored_bytes is missing",
        ),
        (
            r#"{"device": {"mode": "gcomp"}, "tensors": [{"logical_bytes": 1, "written_bytes": "x", "stored_bytes": 1}]}"#,
            "/tensors/0/written_bytes is \"x\": it must be a number from 0 to 1e18",
        ),
        (r#"{"tensors": [{}]}"#, "/device/mode is missing"),
    ] {
        assert_eq!(refused(text), format!("r: {why}"));
    }
    let [_, _, trace] = from_json("g.json", r#"{"trace": {"weights": 1.3}}"#, &otherwise).unwrap();
    assert_close(&[trace.kv, trace.weights], &[1.88, 1.3]);
    assert!(trace.source.starts_with("given: g.json; kv: TRACE"), "{}", trace.source);
    let escaping = r#"{"trace": {"kv": 2, "weights": 1, "source": "\u001b]0;x"}}"#;
    assert_eq!(from_json("g.json", escaping, &otherwise).unwrap()[2].source, "\\u{1b}]0;x");
}

/// By hand: two tensors that are full, each beside one that is empty and one of which a tenth was
/// written. What is stored with loss says nothing of either.
#[test]
fn what_was_never_written_is_not_compressed() {
    let otherwise = Ratios::paper(16.0);
    let stats = |mode: &str| {
        let tensor = |kind: &str, [logical, written, stored]: [u64; 3]| {
            format!(
                r#"{{"logical_bytes": {logical}, "written_bytes": {written}, "stored_bytes": {stored}, "layout": {{"kind": "{kind}"}}}}"#
            )
        };
        let tensors = [
            tensor("weight", [8192, 8192, 6144]),
            tensor("weight", [1 << 26, 0, 0]),
            tensor("weight", [40_960, 4096, 3072]),
            tensor("kv", [8192, 8192, 5120]),
            tensor("kv", [1 << 30, 4096, 2560]),
            tensor("lossy_kv", [8192, 8192, 64]),
        ];
        format!(r#"{{"device": {{"mode": "{mode}"}}, "tensors": [{}]}}"#, tensors.join(", "))
    };
    let measured = |mode: &str| from_json("s.json", &stats(mode), &otherwise).unwrap();
    let [plain, gcomp, trace] = measured("trace");
    assert_close(&[trace.weights, trace.kv], &[4.0 / 3.0, 1.6]);
    assert_eq!(trace.source, "measured: s.json, a device's counters");
    assert_eq!([&plain, &gcomp], [&otherwise[0], &otherwise[1]]);
    // A device is what its mode says.
    let [plain, gcomp, trace] = measured("gcomp");
    assert_close(&[gcomp.weights, gcomp.kv], &[4.0 / 3.0, 1.6]);
    assert_eq!(([&plain, &trace], gcomp.design), ([&otherwise[0], &otherwise[2]], "gcomp"));
    let why = from_json("s.json", &stats("plain"), &otherwise).unwrap_err().to_string();
    assert_eq!(
        why,
        "s.json: /device/mode is \"plain\": it must be trace or gcomp: no other device compresses"
    );
}

#[test]
fn drawings_hold_every_design() {
    let system = system("gpt-oss-120b", Accounting::AsPrinted, 0.8);
    let report = system.report(&Ratios::printed(), &[4096, 65_536, 131_072], None).unwrap();
    let drawing = svg(&report);
    assert_eq!(drawing.matches("<polyline").count(), 3);
    assert!(drawing.contains("as printed") && drawing.contains("128k"));
    let text = terminal(&report);
    assert!(["p", "g", "t"].iter().all(|mark| text.contains(mark)));
    let one = system.report(&Ratios::printed(), &[4096], None).unwrap();
    assert!(svg(&one).contains("<polyline") && terminal(&one).contains('t'));
}
