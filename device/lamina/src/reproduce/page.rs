//! A book as one HTML file that needs no network.

use std::fmt::Write as _;

use super::book::{Book, How, Paper, Row, Section};
use super::chart::{Chart, Kind, Look};

const STYLE: &str = include_str!("page.css");

/// Text that may stand in HTML, between quotes too. Names come from files.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
pub(super) fn html(book: &Book) -> String {
    let counts = book.counts().said();
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
            content=\"width=device-width, initial-scale=1\">\n<title>TRACE and CXL-NDP, \
            reproduced</title>\n<style>\n{STYLE}</style>\n<h1>TRACE and CXL-NDP, \
            reproduced</h1>\n<p>The papers' tables and figures beside what ran here. \
            {counts}.\nA number in the column <i>paper</i> is quoted; with an asterisk it is not \
            printed, and worked out from numbers that are. Ours is one of:</p>\n<ul>\n"
    );
    for (how, said) in [
        (How::Measured, "something was run here and gave it; the section says on what"),
        (How::Modelled, "it comes from formulas and numbers of others; the section says which"),
        (How::Fitted, "the same, with a constant fitted to that very number: no prediction of it"),
        (How::Quoted, "it is the paper's, and nothing here computes it"),
        (How::NotRun, "what it takes was not given to this run"),
        (How::NotObtainable, "it cannot be had here, and the section says why"),
    ] {
        let _ = writeln!(out, "<li>{} {said}</li>", tag(how));
    }
    out.push_str("</ul>\n<table class=\"facts\">\n");
    for (name, value) in &book.facts {
        let _ = writeln!(out, "<tr><td>{name}</td><td class=\"how\">{}</td></tr>", escaped(value));
    }
    out.push_str("</table>\n<nav aria-label=\"Sections\">\n");
    for paper in [Paper::Trace, Paper::Ndp] {
        let _ = writeln!(out, "<b>{}</b>", paper.name());
        for section in book.sections.iter().filter(|section| section.paper == paper) {
            let _ = writeln!(out, "<a href=\"#{}\">{}</a>", section.id, section.number);
        }
    }
    out.push_str("</nav>\n<main>\n");
    book.sections.iter().for_each(|section| add(&mut out, section));
    out.push_str("</main>\n</html>\n");
    out
}

fn tag(how: How) -> String {
    let name = how.name();
    format!("<span class=\"tag {}\">{name}</span>", name.replace(' ', "-"))
}

fn add(out: &mut String, section: &Section) {
    let Section { id, paper, number, title, source, rows, charts, notes } = section;
    let _ = writeln!(
        out,
        "<section id=\"{id}\">\n<h2>{}, {number} <span>{}</span></h2>\n<p>{}</p>",
        paper.name(),
        escaped(title),
        escaped(source)
    );
    for chart in charts {
        figure(out, chart);
    }
    if !rows.is_empty() {
        out.push_str(
            "<div class=\"scroll\"><table>\n<tr><th>of</th><th>paper</th><th>ours</th><th>differs</th><th class=\"how\">how</th></tr>\n",
        );
        for row in rows {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"how\">{}</td></tr>",
                escaped(&row.what),
                number_of(row, row.paper, if row.derived { "*" } else { "" }),
                number_of(row, row.ours, ""),
                row.differs().unwrap_or_default(),
                tag(row.how)
            );
        }
        out.push_str("</table></div>\n");
    }
    if !notes.is_empty() {
        out.push_str("<ul>\n");
        for note in notes {
            let _ = writeln!(out, "<li>{}</li>", escaped(note));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</section>\n");
}

fn number_of(row: &Row, number: Option<f64>, mark: &str) -> String {
    number.map_or_else(|| "–".to_owned(), |number| format!("{number:.*}{mark} {}", row.places, row.unit))
}

fn figure(out: &mut String, chart: &Chart) {
    let _ = writeln!(out, "<figure><figcaption>{}</figcaption>\n<div class=\"key\">", escaped(&chart.title));
    for series in &chart.series {
        let look = match (series.look, chart.kind) {
            (Look::Solid, _) => "",
            (Look::Marks, Kind::Lines) => "open mark",
            (Look::Dashed, Kind::Lines) => "open dashed",
            (Look::Dashed | Look::Marks, _) => "open",
        };
        let _ = writeln!(out, "<span class=\"c{} {look}\">{}</span>", series.colour, escaped(&series.name));
    }
    let _ = writeln!(out, "</div>\n<div class=\"scroll\">{}</div></figure>", chart.svg());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint may be called anything.
    #[test]
    fn names_become_text_and_never_markup() {
        let name = "<script>alert(\"x\")</script>&";
        let row = Row::new(name, "×", 2, Some(1.0)).ours(How::Measured, Some(1.5));
        let derived = Row::new("", "%", 1, Some(15.9)).derived().again();
        let section = Section::new(Paper::Trace, "Table I", "t", name).rows([row, derived]).note(name);
        let book = Book { facts: vec![("weights", name.to_owned())], sections: vec![section] };
        let page = html(&book);
        assert!(!page.contains("<script") && page.matches("&lt;script&gt;").count() == 4, "{page}");
        assert!(page.contains("<td>1.00 ×</td><td>1.50 ×</td><td>+50.0 %</td>"), "{page}");
        assert!(page.contains("<td>15.9* %</td>"), "{page}");
        assert!(page.contains("Of 1 numbers quoted here 1 have one of ours"), "{page}");
        assert!(page.contains("id=\"trace-table-i\"") && page.contains("href=\"#trace-table-i\""));
    }
}
