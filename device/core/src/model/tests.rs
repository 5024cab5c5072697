//! What is read from good files, and what is said about bad ones.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

use super::{MAX_HEADER_BYTES, MAX_NAME_BYTES, ModelError, ModelFile};

/// A file with `contents` in a folder that lasts as long as the first value.
fn file(contents: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, contents).expect("a file");
    (folder, path)
}

/// The bytes of a file with this header and this many bytes behind it.
fn contents(header: &[u8], data: usize) -> Vec<u8> {
    let mut contents = (header.len() as u64).to_le_bytes().to_vec();
    contents.extend_from_slice(header);
    contents.extend((0..data).map(|i| i.to_le_bytes()[0]));
    contents
}

fn open(contents: &[u8]) -> Result<ModelFile, ModelError> {
    let (_folder, path) = file(contents);
    ModelFile::open(&path)
}

/// The message about a file with this header and this many bytes behind it, without the path.
fn refusal(header: &str, data: usize) -> String {
    message(&contents(header.as_bytes(), data))
}

fn message(contents: &[u8]) -> String {
    let (_folder, path) = file(contents);
    let message = ModelFile::open(&path).expect_err("a bad file").to_string();
    let path = format!("{}: ", path.display());
    message.strip_prefix(&path).unwrap_or_else(|| panic!("{message} does not name {path}")).to_owned()
}

#[test]
fn tensors_come_in_file_order_with_their_bytes() {
    let header = r#"{"b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        "__metadata__": {"who": "me", "what": "weights"},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4], "later": [{"fields": 1}]}}   "#;
    let (_folder, path) = file(&contents(header.as_bytes(), 16));
    let model = ModelFile::open(&path).expect("a good file");
    let start = 8 + header.len() as u64;
    let [a, b] = model.tensors() else { panic!("{:?}", model.tensors()) };
    assert_eq!((a.name.as_str(), a.dtype.as_str(), a.format), ("a", "F32", "fp32"));
    assert_eq!((a.shape.as_slice(), a.offset, a.length), (&[][..], start, 4));
    assert_eq!((b.name.as_str(), b.dtype.as_str(), b.format), ("b", "BF16", "bf16"));
    assert_eq!((b.shape.as_slice(), b.offset, b.length), (&[2, 3][..], start + 4, 12));
    assert_eq!(
        model.metadata().iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(),
        ["what=weights", "who=me"]
    );

    let mut whole = [0; 12];
    model.read(b, 0, &mut whole).expect("its bytes");
    assert_eq!(whole, [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    let mut last = [0; 1];
    model.read(b, 11, &mut last).expect("its last byte");
    assert_eq!(last, [15]);
    model.read(b, 12, &mut []).expect("nothing, at its end");
}

#[test]
fn what_the_safetensors_crate_writes_is_read_back() {
    let (one, two) = (vec![1u8; 24], (0..32).collect::<Vec<u8>>());
    let view = |dtype, shape, data| safetensors::tensor::TensorView::new(dtype, shape, data).expect("a view");
    let bytes = safetensors::serialize(
        [
            ("one", view(safetensors::Dtype::I64, vec![3, 1], &one)),
            ("two", view(safetensors::Dtype::F16, vec![4, 4], &two)),
            ("none", view(safetensors::Dtype::I8, vec![0, 7], &[])),
        ],
        None,
    )
    .expect("a file");
    let (_folder, path) = file(&bytes);
    let model = ModelFile::open(&path).expect("a good file");
    assert_eq!(model.tensors().len(), 3);
    for tensor in model.tensors() {
        let (format, expected) = match tensor.name.as_str() {
            "one" => ("opaque", &one[..]),
            "two" => ("fp16", &two[..]),
            _ => ("int8", &[][..]),
        };
        let mut out = vec![0; expected.len()];
        model.read(tensor, 0, &mut out).expect("its bytes");
        assert_eq!((tensor.format, tensor.length, out.as_slice()), (format, expected.len() as u64, expected));
    }
}

#[test]
fn every_dtype_has_a_format() {
    for (dtype, bits, format) in [
        ("F32", 32, "fp32"),
        ("F16", 16, "fp16"),
        ("BF16", 16, "bf16"),
        ("F8_E4M3", 8, "fp8_e4m3fn"),
        ("F8_E5M2", 8, "fp8_e5m2"),
        ("I8", 8, "int8"),
        ("U8", 8, "opaque"),
        ("BOOL", 8, "opaque"),
        ("I16", 16, "opaque"),
        ("U16", 16, "opaque"),
        ("I32", 32, "opaque"),
        ("U32", 32, "opaque"),
        ("I64", 64, "opaque"),
        ("U64", 64, "opaque"),
        ("F64", 64, "opaque"),
        ("C64", 64, "opaque"),
        ("F4", 4, "fp4_e2m1"),
        ("F6_E2M3", 6, "opaque"),
        ("F6_E3M2", 6, "opaque"),
        ("F8_E8M0", 8, "e8m0"),
        ("F8_E4M3FNUZ", 8, "opaque"),
        ("F8_E5M2FNUZ", 8, "opaque"),
    ] {
        let header = format!(r#"{{"t": {{"dtype": "{dtype}", "shape": [8], "data_offsets": [0, {bits}]}}}}"#);
        let model = open(&contents(header.as_bytes(), bits)).unwrap_or_else(|why| panic!("{dtype}: {why}"));
        assert_eq!((model.tensors()[0].dtype.as_str(), model.tensors()[0].format), (dtype, format));
    }
    let unknown = refusal(r#"{"t": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}"#, 3);
    assert!(
        unknown.starts_with("the header is not what safetensors wants: \"t\": unknown variant `F3`"),
        "{unknown}"
    );
    assert_eq!(
        refusal(r#"{"t": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}"#, 2),
        "tensor \"t\" has 2 bytes, but 3 elements of F4 are 12 bits"
    );
}

#[test]
fn empty_files_of_tensors_and_empty_tensors_are_fine() {
    assert_eq!(open(&contents(b"{}", 0)).expect("no tensors").tensors(), []);
    let header = r#"{"z": {"dtype": "F32", "shape": [0, 18446744073709551615, 9], "data_offsets": [0, 0]},
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "e": {"dtype": "BF16", "shape": [4, 0], "data_offsets": [2, 2]}, "__metadata__": null}"#;
    let model = open(&contents(header.as_bytes(), 2)).expect("empty tensors");
    assert_eq!(
        model.tensors().iter().map(|t| (t.name.as_str(), t.length)).collect::<Vec<_>>(),
        [("z", 0), ("a", 2), ("e", 0)]
    );
}

#[test]
fn what_is_not_a_readable_file_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let why = |path: &Path| ModelFile::open(path).expect_err("no file").to_string();
    let there = folder.path().display().to_string();
    assert_eq!(
        why(folder.path()),
        format!("{there}: not a regular file; give the path of a .safetensors, .gguf or .npy file")
    );
    assert!(why(Path::new("/dev/zero")).contains("not a regular file"));
    let missing = why(&folder.path().join("missing"));
    assert!(missing.starts_with(&format!("{there}/missing: cannot open: No such file")), "{missing}");
    let plain = folder.path().join("plain");
    fs::write(&plain, "").expect("a file");
    assert!(why(&plain.join("below")).contains("cannot open: Not a directory"));
    assert_eq!(
        why(&plain),
        format!("{there}/plain: 0 bytes are no safetensors file, which begins with 8 bytes of header length")
    );
}

#[test]
fn a_pipe_is_refused_without_waiting_for_its_other_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    assert!(matches!(ModelFile::open(&pipe), Err(ModelError::NotAFile { .. })));
}

#[test]
fn a_header_length_that_lies_is_refused() {
    assert_eq!(
        message(&[1, 0, 0]),
        "3 bytes are no safetensors file, which begins with 8 bytes of header length"
    );
    assert_eq!(
        message(&[3, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']),
        "the header would end at byte 11, but the file has only 10; it is cut short or no safetensors file"
    );
    assert_eq!(
        message(b"{\n  \"metadata\": {}, \"weight_map\": {} }"),
        "this is JSON and no checkpoint; of a model in several files give these, not their index"
    );
    for length in [MAX_HEADER_BYTES + 1, u64::MAX, u64::MAX - 7, 1 << 63] {
        assert_eq!(
            message(&length.to_le_bytes()),
            format!(
                "the header would have {length} bytes, more than the 100000000 allowed; is it a safetensors file?"
            )
        );
    }
    // The longest length allowed is not believed either.
    assert!(message(&MAX_HEADER_BYTES.to_le_bytes()).starts_with("the header would end at byte 100000008"));
}

#[test]
fn a_header_that_is_not_the_right_json_is_refused() {
    for header in [
        "",
        "x",
        "{",
        "[]",
        "7",
        "null",
        "{}x",
        r#"{"t": 7}"#,
        r#"{"t": {}}"#,
        r#"{"t": null}"#,
        r#"{"t"}"#,
        r#"{"t": {"dtype": "F32", "shape": [1]}}"#,
        r#"{"t": {"dtype": "F32", "data_offsets": [0, 4]}}"#,
        r#"{"t": {"shape": [1], "data_offsets": [0, 4]}}"#,
        r#"{"t": {"dtype": "f32", "shape": [1], "data_offsets": [0, 4]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}"#,
        r#"{"t": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, -4]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}"#,
        r#"{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 18446744073709551616]}}"#,
        r#"{"t": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#,
        r#"{"__metadata__": {"a": 1}}"#,
        r#"{"__metadata__": "a"}"#,
    ] {
        let why = message(&contents(header.as_bytes(), 4));
        assert!(why.starts_with("the header is not what safetensors wants: "), "{header}: {why}");
        assert!(!header.contains(r#""t": "#) || why.contains(r#""t": "#), "{header}: {why} names no tensor");
    }
    let broken = message(&contents(b"{\"t\xff\": {}}", 0));
    assert!(broken.contains("invalid unicode"), "{broken}");
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let header = format!(r#"{{"t": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": {deep}}}}}"#);
    // Fields that safetensors does not know are passed over, and however deep they are the stack
    // holds.
    assert_eq!(open(&contents(header.as_bytes(), 4)).expect("a good file").tensors().len(), 1);
}

#[test]
fn a_truncated_file_is_refused_by_the_tensor_that_lost_bytes() {
    let header = r#"{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}"#;
    assert!(open(&contents(header.as_bytes(), 8)).is_ok());
    assert_eq!(
        refusal(header, 7),
        "tensor \"b\" ends at byte 8 behind the header, but only 7 bytes are there; the file is cut short or its header lies"
    );
    // At every other length there is some refusal too.
    let whole = contents(header.as_bytes(), 8);
    for length in 0..whole.len() {
        assert!(open(&whole[..length]).is_err(), "cut to {length} bytes");
    }
}

#[test]
fn ranges_must_cover_the_data_once_and_in_order() {
    let two = |a: (u64, u64), b: (u64, u64)| {
        let entry = |name: &str, (begin, end): (u64, u64)| {
            let length = end.wrapping_sub(begin);
            format!(r#""{name}": {{"dtype": "U8", "shape": [{length}], "data_offsets": [{begin}, {end}]}}"#)
        };
        refusal(&format!("{{{}, {}}}", entry("a", a), entry("b", b)), 8)
    };
    assert_eq!(two((0, 5), (4, 8)), "tensor \"b\" begins at byte 4, inside \"a\", which ends at 5");
    assert_eq!(two((0, 8), (0, 8)), "tensor \"b\" begins at byte 0, inside \"a\", which ends at 8");
    assert_eq!(two((0, 3), (4, 8)), "bytes 3 to 4 behind the header belong to no tensor");
    assert_eq!(two((1, 4), (4, 8)), "bytes 0 to 1 behind the header belong to no tensor");
    assert_eq!(two((0, 3), (3, 7)), "bytes 7 to 8 behind the header belong to no tensor");
    assert_eq!(two((0, 4), (4, 1)), "tensor \"b\" begins at byte 4, behind its end at 1");
    assert_eq!(
        two((0, 4), (4, u64::MAX)),
        format!(
            "tensor \"b\" ends at byte {} behind the header, but only 8 bytes are there; the file is cut short or its header lies",
            u64::MAX
        )
    );
    assert_eq!(refusal("{}", 1), "bytes 0 to 1 behind the header belong to no tensor");
}

#[test]
fn a_shape_must_fill_its_range() {
    let shape = |dtype: &str, shape: &str| {
        refusal(&format!(r#"{{"t": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [0, 8]}}}}"#), 8)
    };
    assert_eq!(shape("F32", "[3]"), "tensor \"t\" has 8 bytes, but 3 elements of F32 are 96 bits");
    assert_eq!(shape("F32", "[]"), "tensor \"t\" has 8 bytes, but 1 elements of F32 are 32 bits");
    assert_eq!(shape("F64", "[0]"), "tensor \"t\" has 8 bytes, but 0 elements of F64 are 0 bits");
    assert_eq!(
        shape("F32", "[4611686018427387905, 2]"),
        "tensor \"t\" has 8 bytes, but 9223372036854775810 elements of F32 are 295147905179352825920 bits"
    );
    assert_eq!(
        shape("F32", "[4294967296, 4294967296, 2]"),
        "tensor \"t\" has the shape [4294967296, 4294967296, 2], whose elements are too many to count"
    );
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let header = r#"{"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "t": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}"#;
    assert_eq!(refusal(header, 8), "there are two tensors \"t\"");
    let header = r#"{"t": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "\u0074": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}"#;
    assert_eq!(refusal(header, 4), "there are two tensors \"t\"");
}

#[test]
fn names_may_be_odd_but_not_endless() {
    let named = |name: &str| {
        let name = serde_json::to_string(name).expect("a JSON string");
        contents(
            format!(r#"{{{name}: {{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}}}"#).as_bytes(),
            4,
        )
    };
    for name in ["", "\0", "a\nb\t\u{7f}", "../../etc", "wörter 🦀", &"n".repeat(MAX_NAME_BYTES)] {
        assert_eq!(open(&named(name)).expect("a good file").tensors()[0].name, name);
    }
    assert_eq!(
        message(&named(&"ü".repeat(MAX_NAME_BYTES / 2 + 1))),
        format!("the name of tensor \"{}\"… has 4098 bytes, more than the 4096 allowed", "ü".repeat(64))
    );
    // An error shows a name escaped, and an endless one shortened.
    assert!(refusal("{\"a\\nb\": 7}", 0).contains(r#""a\nb": invalid type"#));
    assert!(refusal(&format!("{{\"{}\": 7}}", "n".repeat(1 << 20)), 0).len() < 500);
}

#[test]
fn reads_past_a_tensor_are_refused_though_the_file_goes_on() {
    let header = r#"{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}"#;
    let (_folder, path) = file(&contents(header.as_bytes(), 8));
    let model = ModelFile::open(&path).expect("a good file");
    let a = &model.tensors()[0];
    let mut out = [0; 5];
    for (at, wanted) in [(0, 5), (3, 2), (5, 0), (u64::MAX, 1), (u64::MAX, 0)] {
        let why = model.read(a, at, &mut out[..wanted]).expect_err("past the end").to_string();
        assert!(
            why.ends_with(&format!(": {wanted} bytes from byte {at} on go past the 4 bytes of tensor \"a\"")),
            "{why}"
        );
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error_of_the_read() {
    let header = r#"{"a": {"dtype": "U8", "shape": [8192], "data_offsets": [0, 8192]}}"#;
    let (_folder, path) = file(&contents(header.as_bytes(), 8192));
    let model = ModelFile::open(&path).expect("a good file");
    let a = &model.tensors()[0];
    let shrunk = a.offset + 4096;
    fs::OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(shrunk)).expect("shorter");
    let mut out = [0; 4096];
    model.read(a, 0, &mut out).expect("what is still there");
    assert_eq!(out[..3], [0, 1, 2]);
    let why = model.read(a, 1, &mut out).expect_err("one byte is gone");
    assert!(matches!(&why, ModelError::Shrunk { end, .. } if *end == shrunk + 1), "{why:?}");
    assert_eq!(
        why.to_string(),
        format!(
            "{}: the file was cut short after it was opened: tensor \"a\" needs its bytes up to {}",
            path.display(),
            shrunk + 1
        )
    );
}

#[test]
fn a_file_far_larger_than_memory_opens_at_once() {
    let length = 1u64 << 40;
    let header = format!(
        r#"{{"a": {{"dtype": "BF16", "shape": [1, {}], "data_offsets": [0, {length}]}}}}"#,
        length / 2
    );
    let (_folder, path) = file(&contents(header.as_bytes(), 0));
    let all = 8 + header.len() as u64 + length;
    let file = fs::OpenOptions::new().write(true).open(&path).expect("the file");
    file.set_len(all).expect("a file of a tebibyte, all hole");
    let model = ModelFile::open(&path).expect("a good file");
    let mut last = [7; 2];
    model.read(&model.tensors()[0], length - 2, &mut last).expect("a hole of the file");
    assert_eq!(last, [0, 0]);
}

proptest! {
    #[test]
    fn bytes_of_any_kind_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), honest in any::<bool>()) {
        if honest && bytes.len() >= 8 {
            let header = bytes.len() as u64 - 8;
            bytes[..8].copy_from_slice(&header.to_le_bytes());
        }
        // Nothing but an empty header is a good file by accident.
        if let Ok(model) = open(&bytes) {
            prop_assert!(model.tensors().is_empty());
        }
    }

    #[test]
    fn a_good_file_with_one_byte_changed_is_refused_or_still_consistent(at in 0usize..200, to in any::<u8>()) {
        let header = br#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "I8", "shape": [3, 1], "data_offsets": [8, 11]}}"#;
        let mut bytes = contents(header, 11);
        let at = at % bytes.len();
        bytes[at] = to;
        let (_folder, path) = file(&bytes);
        if let Ok(model) = ModelFile::open(&path) {
            let mut next = model.tensors().first().map_or(bytes.len() as u64, |tensor| tensor.offset);
            for tensor in model.tensors() {
                prop_assert_eq!(tensor.offset, next);
                next += tensor.length;
                let mut out = vec![0; usize::try_from(tensor.length).expect("small")];
                prop_assert!(model.read(tensor, 0, &mut out).is_ok());
            }
            prop_assert_eq!(next, bytes.len() as u64);
        }
    }

    #[test]
    fn any_cut_of_the_data_into_tensors_is_read_back(lengths in proptest::collection::vec(0usize..50, 0..12), seed in any::<u64>()) {
        // Entries in a shuffled order; offsets decide.
        let mut entries: Vec<(String, usize, usize)> = Vec::new();
        let mut at = 0;
        for (i, length) in lengths.iter().enumerate() {
            entries.push((format!("t{i}"), at, at + length));
            at += length;
        }
        let expected: Vec<usize> = entries.iter().map(|entry| entry.2 - entry.1).filter(|&length| length > 0).collect();
        entries.sort_by_key(|entry| (entry.1 as u64 + 1).wrapping_mul(seed | 1));
        let mut header = String::new();
        for (name, begin, end) in entries {
            let comma = if header.is_empty() { "{" } else { ", " };
            let _ = write!(header, r#"{comma}"{name}": {{"dtype": "U8", "shape": [{}], "data_offsets": [{begin}, {end}]}}"#, end - begin);
        }
        header.push_str(if header.is_empty() { "{}" } else { "}" });
        let (_folder, path) = file(&contents(header.as_bytes(), at));
        let model = ModelFile::open(&path).expect("a good file");
        let mut byte = 0usize;
        let mut found = Vec::new();
        for tensor in model.tensors().iter().filter(|tensor| tensor.length > 0) {
            let mut out = vec![0; usize::try_from(tensor.length).expect("small")];
            model.read(tensor, 0, &mut out).expect("its bytes");
            for value in &out {
                prop_assert_eq!(*value, byte.to_le_bytes()[0]);
                byte += 1;
            }
            found.push(out.len());
        }
        prop_assert_eq!(found, expected);
    }
}
