//! The library on windows in ordinary files.

mod common;

use std::{os::unix::fs::FileExt, thread, time::Duration};

use common::{ELEMENTS, WINDOW, Windows, willing_device};
use lamina_abi::{DIRECTORY_BYTES, Directory, DirectoryError, encode};
use lamina_shim::{Access, BASE, Error, Lamina, Role, WindowError};

fn loaded(lamina: &Lamina, tensor: &str, view: &str) -> Vec<u8> {
    let span = lamina.span(tensor, view).unwrap();
    let mut bytes = vec![0; span.len()];
    span.load(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_view_is_the_bytes_at_its_place() {
    let windows = Windows::new();
    let lamina = Lamina::open(&windows.options()).unwrap();
    assert_eq!(lamina.directory(), &windows.directory);
    assert_eq!(lamina.views_of("w"), ["base", "full", "e8m3", "e8m3:packed"]);
    for tensor in ["w", "kv"] {
        for view in lamina.views_of(tensor) {
            assert_eq!(loaded(&lamina, tensor, &view), windows.expected(tensor, &view), "{tensor} {view}");
        }
    }
    let location = lamina.locate("w", "e8m3:packed").unwrap();
    assert_eq!(location.bytes, (ELEMENTS * 12).div_ceil(8));
    assert_eq!((location.window, location.elements), (Role::Views, ELEMENTS));
}

#[test]
fn parts_of_a_view_are_bounded_by_the_view() {
    let windows = Windows::new();
    let lamina = Lamina::open(&windows.options()).unwrap();
    let span = lamina.span("w", "e8m3").unwrap();
    let bytes = span.len() as u64;
    let mut two = [0; 2];
    span.load(bytes - 2, &mut two).unwrap();
    assert_eq!(two[..], windows.expected("w", "e8m3")[span.len() - 2..]);
    assert!(span.part(bytes, 0).unwrap().is_empty());
    for (offset, length) in [(bytes - 1, 2), (bytes, 1), (u64::MAX, 2), (2, u64::MAX), (0, bytes + 1)] {
        let error = span.part(offset, length).unwrap_err();
        assert!(
            matches!(error, WindowError::End { bytes: end, .. } if end == bytes),
            "{offset} + {length}: {error}"
        );
    }
    let window = lamina.window(Role::Views).unwrap();
    assert!(window.span(WINDOW, 1).unwrap_err().to_string().contains("16777216 bytes"));
}

#[test]
fn stores_go_to_the_base_window_and_nowhere_else() {
    let windows = Windows::new();
    let mut options = windows.options();
    let lamina = Lamina::open(&options).unwrap();
    assert!(matches!(lamina.span("w", BASE).unwrap().store(0, &[1]), Err(WindowError::ReadOnly { .. })));
    drop(lamina);

    options.base_access = Access::ReadWrite;
    let lamina = Lamina::open(&options).unwrap();
    lamina.span("w", BASE).unwrap().store(5, b"stored").unwrap();
    assert_eq!(windows.bytes("base", 4096 + 5, 6), b"stored");
    assert!(matches!(lamina.span("w", "full").unwrap().store(0, &[1]), Err(WindowError::ReadOnly { .. })));
    let end = lamina.span("w", BASE).unwrap().store(2 * ELEMENTS - 1, b"ab");
    assert!(matches!(end, Err(WindowError::End { .. })));
}

/// A tensor, one of its views, and what is made untrue about it.
type Lie = (&'static str, &'static str, fn(&mut Directory));

#[test]
fn a_lying_directory_is_an_error_where_it_lies_and_nowhere_else() {
    let windows = Windows::new();
    let lies: [Lie; 7] = [
        ("w", "e8m3", |d| d.views[1].offset = WINDOW - 2),
        ("w", "e8m3", |d| d.views[1].length = WINDOW),
        ("w", "e8m3", |d| d.views[1].offset = u64::MAX - 1),
        ("w", "e8m3", |d| d.views[1].offset = DIRECTORY_BYTES - 1),
        ("w", "e8m3", |d| d.views[1].elements = u64::MAX),
        ("w", "base", |d| d.tensors[0].dpa = WINDOW - 1),
        ("w", "base", |d| d.tensors[0].length = u64::MAX),
    ];
    for (number, (tensor, view, lie)) in lies.into_iter().enumerate() {
        let mut directory = windows.directory.clone();
        lie(&mut directory);
        windows.write_directory(&directory);
        let lamina = Lamina::open(&windows.options()).unwrap();
        let error = lamina.span(tensor, view).unwrap_err();
        assert!(matches!(error, Error::Lie { .. }), "lie {number}: {error}");
        assert!(error.to_string().contains("the directory lies about view"), "{error}");
        assert_eq!(loaded(&lamina, "kv", "full"), windows.expected("kv", "full"), "lie {number}");
    }
}

#[test]
fn a_directory_of_larger_windows_is_refused() {
    let windows = Windows::new();
    for base in [true, false] {
        let mut directory = windows.directory.clone();
        *if base { &mut directory.base_bytes } else { &mut directory.views_bytes } = WINDOW + 1;
        windows.write_directory(&directory);
        let error = Lamina::open(&windows.options()).unwrap_err();
        assert!(matches!(error, Error::ShortWindow { stated, .. } if stated == WINDOW + 1), "{error}");
    }
}

#[test]
fn windows_the_wrong_way_round_are_noticed() {
    let windows = Windows::new();
    let mut options = windows.options();
    std::mem::swap(&mut options.base, &mut options.views);
    let error = Lamina::open(&options).unwrap_err();
    assert!(matches!(error, Error::Directory { cause: DirectoryError::Magic { .. }, .. }), "{error}");
    assert!(error.to_string().contains("the right way round"), "{error}");
}

#[test]
fn a_directory_that_is_just_being_written_is_read_again() {
    let windows = Windows::new();
    let mut torn = encode(&windows.directory).unwrap();
    let last = torn.len() - 1;
    torn[last] ^= 1;
    windows.file("views").write_all_at(&torn, 0).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            windows.write_directory(&windows.directory);
        });
        assert_eq!(Lamina::open(&windows.options()).unwrap().directory(), &windows.directory);
    });

    windows.file("views").write_all_at(&torn, 0).unwrap();
    let error = Lamina::open(&windows.options()).unwrap_err();
    assert!(matches!(error, Error::Directory { cause: DirectoryError::Checksum { .. }, .. }), "{error}");
}

#[test]
fn any_lie_behind_a_good_checksum_is_an_error_or_stays_in_the_windows() {
    let windows = Windows::new();
    let good = encode(&windows.directory).unwrap();
    let fields = (16..good.len() - 3).step_by(4).filter(|at| !(24..32).contains(at));
    let mut refused = 0;
    for (at, value) in fields.flat_map(|at| [0_u32, 1, 0x7fff_ffff, u32::MAX].map(|value| (at, value))) {
        let mut bad = good.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bad[12..16].fill(0);
        let checksum = crc32c::crc32c(&bad);
        bad[12..16].copy_from_slice(&checksum.to_le_bytes());
        windows.file("views").write_all_at(&bad, 0).unwrap();
        let Ok(lamina) = Lamina::open(&windows.options()) else {
            refused += 1;
            continue;
        };
        for tensor in &lamina.directory().tensors {
            for view in lamina.views_of(&tensor.name) {
                // Loading the last byte would be a fault if a span could leave its window.
                if let Ok(span) = lamina.span(&tensor.name, &view)
                    && !span.is_empty()
                {
                    span.load(span.len() as u64 - 1, &mut [0]).unwrap();
                }
            }
        }
    }
    assert!(refused > 50, "only {refused} lies were refused at once");
}

#[test]
fn a_directory_that_says_it_uses_more_than_there_is_is_refused() {
    let windows = Windows::new();
    for used in [0_u64, 127, DIRECTORY_BYTES + 1, u64::MAX] {
        windows.file("views").write_all_at(&used.to_le_bytes(), 24).unwrap();
        assert!(matches!(Lamina::open(&windows.options()), Err(Error::Directory { .. })), "{used}");
    }
}

#[test]
fn unusable_files_are_refused_by_name() {
    let windows = Windows::new();
    windows.file("empty");
    let mut options = windows.options();
    for (path, says) in [("missing", "cannot open the window"), ("empty", "no usable size"), ("", "window")] {
        options.views = Some(windows.path(path));
        let error = Lamina::open(&options).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains(windows.path(path).to_str().unwrap()), "{error}");
    }
    options.views = Some("/dev/null".into());
    let error = Lamina::open(&options).unwrap_err().to_string();
    assert!(error.contains("/dev/null has no usable size"), "{error}");
}

#[test]
fn without_a_base_window_the_views_still_read() {
    let windows = Windows::new();
    let mut options = windows.options();
    options.base = None;
    let lamina = Lamina::open(&options).unwrap();
    assert_eq!(loaded(&lamina, "w", "full"), windows.expected("w", "full"));
    assert!(matches!(lamina.span("w", BASE), Err(Error::NoBase)));
    assert_eq!(lamina.views_of("kv"), ["full"]);
}

#[test]
fn unknown_names_say_what_there_is() {
    let windows = Windows::new();
    let lamina = Lamina::open(&windows.options()).unwrap();
    let error = lamina.span("nope", "full").unwrap_err().to_string();
    assert!(error.contains("\"nope\"") && error.contains('2'), "{error}");
    let error = lamina.span("kv", "e8m3").unwrap_err().to_string();
    assert!(error.contains("base, full"), "{error}");
}

#[test]
fn a_new_view_shows_after_a_refresh() {
    let windows = Windows::new();
    let mut lamina = Lamina::open(&windows.options()).unwrap();
    let mut directory = windows.directory.clone();
    directory.generation += 1;
    directory.views.push(lamina_abi::ViewEntry { spelling: "e8m0".into(), ..directory.views[0].clone() });
    windows.write_directory(&directory);
    assert!(lamina.span("w", "e8m0").is_err());
    assert_eq!(lamina.refresh().unwrap().generation, 8);
    assert_eq!(loaded(&lamina, "w", "e8m0"), windows.expected("w", "full"));
}

#[test]
fn flush_goes_to_the_device() {
    let windows = Windows::new();
    let requests = willing_device(&windows.path("ctl"));
    let lamina = Lamina::open(&windows.options()).unwrap();
    lamina.flush(Some((4096, 10))).unwrap();
    lamina.flush(None).unwrap();
    lamina.invalidate(Some((0, 64))).unwrap();
    let requests: Vec<serde_json::Value> =
        requests.lock().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(requests[0], serde_json::json!({ "op": "flush", "offset": 4096, "length": 10 }));
    assert_eq!(requests[1], serde_json::json!({ "op": "flush" }));
    assert_eq!(requests[2], serde_json::json!({ "op": "invalidate", "offset": 0, "length": 64 }));
}
