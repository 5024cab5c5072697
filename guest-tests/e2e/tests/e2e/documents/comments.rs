//! What holds of all comments: their width.

use std::{ffi::OsStr, fs, path::Path};

use crate::root;

/// Columns that a line of a comment may have.
const MAX_COLUMNS: usize = 100;
/// A folder whose comments are not held to it: what is made of it is made anew when a byte changes.
const NOT_HELD: &str = "images";

#[test]
fn comments_keep_to_their_width() {
    let (mut checked, mut wrong) = (0, Vec::new());
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            let is_held = name != NOT_HELD;
            if path.is_dir() {
                // Hidden ones are tools', and in `target` is what was built.
                folders.extend(
                    Some(path.clone()).filter(|_| is_held && name != "target" && !name.starts_with('.')),
                );
            } else if let Some((text, marks)) = source(&path) {
                checked += 1;
                let wide = wide_comments(&text, marks);
                wrong.extend(wide.into_iter().map(|line| format!("{}:{line}", path.display())));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new(), "comments of more than {MAX_COLUMNS} columns");
    assert!(checked > 100, "{checked} files");
}

/// The text of a program's file, and how a line of it that is a comment begins.
fn source(path: &Path) -> Option<(String, &'static [&'static str])> {
    let marks: &[_] = match path.extension().and_then(OsStr::to_str) {
        Some("rs") => &["//"],
        Some("c" | "h") => &["//", "/*", "*"],
        Some("py" | "sh") | None => &["#"],
        Some(_) => return None,
    };
    let text = fs::read(path).ok().and_then(|bytes| String::from_utf8(bytes).ok())?;
    (path.extension().is_some() || text.starts_with("#!")).then_some((text, marks))
}

/// The numbers of the lines that begin with one of `marks` and are too wide. Rows of tables, what
/// stands between fences, and single words such as links are as wide as they are.
fn wide_comments(text: &str, marks: &[&str]) -> Vec<usize> {
    let (mut wide, mut in_code) = (Vec::new(), false);
    for (number, line) in (1..).zip(text.lines()) {
        let begun = line.trim_start();
        let Some(mark) = marks.iter().find(|mark| begun.starts_with(**mark)) else {
            in_code = false;
            continue;
        };
        let said = begun[mark.len()..].trim_start_matches(['/', '!', ':', ' ']);
        in_code ^= said.starts_with("```");
        let is_fixed = in_code || said.starts_with('|') || !said.trim_end().contains(' ');
        if !is_fixed && line.chars().count() > MAX_COLUMNS {
            wide.push(number);
        }
    }
    wide
}

#[test]
fn wide_comments_are_found() {
    let (fits, wide) = ("é ".repeat(48), "e ".repeat(50));
    let rust = format!("//! {fits}\n//! {wide}\n    // {wide}\n");
    let exempt =
        format!("//! | {wide} |\n//! ```\n//! {wide}\n//! ```\n// {}\ncode({wide});\n", "e".repeat(99));
    assert_eq!(wide_comments(&format!("{rust}{exempt}/// {wide}\n"), &["//"]), [2, 3, 10]);
    assert_eq!(wide_comments(&format!("/*\n * {wide}\n */\n#{wide}\n"), &["//", "/*", "*"]), [2]);
    assert_eq!(wide_comments(&format!("#: {wide}\n// {wide}\n"), &["#"]), [1]);
}
