//! `./x bench --publish`: a page with the figures, the command, the machine and the date.

#[test]
fn a_page_has_the_table_and_says_where_it_comes_from() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page.md");
    let publish = format!("--publish={}", path.display());
    let output = crate::bench().args([&publish, "deaths", "--mib", "8", "--kills", "1"]).output().unwrap();
    let (text, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{why}");
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page.contains("    ./x bench deaths --mib 8 --kills 1\n"), "{page}");
    assert!(page.contains(text.trim()), "{page}");
    for field in ["processor", "memory", "kernel", "date", "commit"] {
        let row = page.lines().find(|line| line.starts_with(&format!("| {field} | ")));
        assert!(row.is_some_and(|row| row.len() > field.len() + 8), "{field}: {page}");
    }
}

#[test]
fn a_page_that_cannot_be_written_is_an_error() {
    let output = crate::bench()
        .args(["--publish=/proc/page.md", "deaths", "--mib", "8", "--kills", "1"])
        .output()
        .unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("/proc/page.md"), "{why}");
}
