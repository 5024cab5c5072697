//! What a reproduction says: a section for each table and figure, a row for each number.
//!
//! JSON and page come from the same book, so they cannot differ.

use serde::Serialize;

use super::chart::Chart;

/// How a number was had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum How {
    /// Something was run here and gave it.
    Measured,
    /// From formulas and numbers of others.
    Modelled,
    /// The same, but a constant was fitted to the paper's number: ours is no prediction of it.
    Fitted,
    /// The paper's. Nothing here computes it.
    Quoted,
    /// What it takes was not given to this run.
    NotRun,
    /// It cannot be had here.
    NotObtainable,
}

impl How {
    /// As the page has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Modelled => "modelled",
            Self::Fitted => "fitted",
            Self::Quoted => "quoted",
            Self::NotRun => "not run",
            Self::NotObtainable => "not obtainable",
        }
    }
}

/// Without what only binary fractions say: 27.8, and not 27.800000000000004.
fn tidy(number: f64) -> f64 {
    (number * 1e6).round() / 1e6
}

/// A number of a paper and ours beside it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Of what.
    pub(super) what: String,
    /// The paper's number, quoted; null where it prints none.
    pub(super) paper: Option<f64>,
    /// Whether it is not printed, and worked out from numbers that are.
    pub(super) derived: bool,
    /// Ours; null where there is none.
    pub(super) ours: Option<f64>,
    /// The unit of both.
    pub(super) unit: &'static str,
    /// Places that the page shows.
    #[serde(skip)]
    pub(super) places: usize,
    /// How ours was had.
    pub(super) how: How,
    /// Whether the paper's number is that of another row, or follows of one: it is counted there.
    pub(super) again: bool,
}

impl Row {
    /// A row with the paper's number and nothing beside it.
    pub(super) fn new(
        what: impl Into<String>,
        unit: &'static str,
        places: usize,
        paper: Option<f64>,
    ) -> Self {
        let (what, paper, how) = (what.into(), paper.map(tidy), How::NotObtainable);
        Self { what, paper, derived: false, ours: None, unit, places, how, again: false }
    }

    /// A row with a number that is the paper's alone.
    pub(super) fn quoted(what: impl Into<String>, unit: &'static str, places: usize, paper: f64) -> Self {
        Self { how: How::Quoted, ..Self::new(what, unit, places, Some(paper)) }
    }

    /// With a number that the paper does not print, worked out from others of it.
    pub(super) fn derived(mut self) -> Self {
        self.derived = true;
        self
    }

    /// With a number of the paper that another row has.
    pub(super) fn again(mut self) -> Self {
        self.again = true;
        self
    }

    /// With ours. Without a number nothing was run that gave one.
    pub(super) fn ours(mut self, how: How, ours: Option<f64>) -> Self {
        self.ours = ours.filter(|ours| ours.is_finite()).map(tidy);
        self.how = if self.ours.is_some() { how } else { How::NotRun };
        self
    }

    /// How ours differs from the paper's: percentages by points, all else by its part.
    pub(super) fn differs(&self) -> Option<String> {
        let (paper, ours) = (self.paper?, self.ours?);
        // No sign without a difference.
        let text = |number: f64| format!("{:+.1}", if number.abs() < 0.05 { 0.0 } else { number });
        if self.unit == "%" {
            return Some(format!("{} points", text(ours - paper)));
        }
        (paper != 0.0).then(|| format!("{} %", text(100.0 * (ours / paper - 1.0))))
    }
}

/// A paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Paper {
    /// TRACE: Traffic-Reduced Architecture for Compression and Elasticity.
    #[serde(rename = "TRACE")]
    Trace,
    /// CXL-NDP, of which TRACE grew.
    #[serde(rename = "CXL-NDP")]
    Ndp,
}

impl Paper {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Trace => "TRACE",
            Self::Ndp => "CXL-NDP",
        }
    }
}

/// A table or figure.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Section {
    /// Its name in addresses: `trace-fig-12`.
    pub(super) id: String,
    /// Whose it is.
    pub(super) paper: Paper,
    /// Its number there: `Fig. 12`.
    pub(super) number: &'static str,
    /// What it shows.
    pub(super) title: &'static str,
    /// How ours was had: on which model, from what, or why not.
    pub(super) source: String,
    /// The numbers.
    pub(super) rows: Vec<Row>,
    /// The plots.
    pub(super) charts: Vec<Chart>,
    /// What a reader must be told.
    pub(super) notes: Vec<String>,
}

impl Section {
    pub(super) fn new(
        paper: Paper,
        number: &'static str,
        title: &'static str,
        source: impl Into<String>,
    ) -> Self {
        let id = format!("{}-{number}", paper.name()).to_lowercase().replace(". ", "-").replace(' ', "-");
        let (rows, charts, notes) = (Vec::new(), Vec::new(), Vec::new());
        Self { id, paper, number, title, source: source.into(), rows, charts, notes }
    }

    pub(super) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    pub(super) fn chart(mut self, chart: Chart) -> Self {
        self.charts.push(chart);
        self
    }

    pub(super) fn rows(mut self, rows: impl IntoIterator<Item = Row>) -> Self {
        self.rows.extend(rows);
        self
    }

    /// Its rows, counted.
    pub(super) fn counts(&self) -> Counts {
        let quoted = || self.rows.iter().filter(|row| row.paper.is_some() && !row.again);
        let ours =
            |fitted| quoted().filter(|row| row.ours.is_some() && (row.how == How::Fitted) == fitted).count();
        Counts { quoted: quoted().count(), beside: ours(false), fitted: ours(true) }
    }
}

/// Numbers of the papers that are quoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// All of them.
    pub(super) quoted: usize,
    /// Those with one of ours beside them that could have come out otherwise.
    pub(super) beside: usize,
    /// Those that ours were fitted to.
    pub(super) fitted: usize,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Book {
    /// What was run on, by name.
    pub(super) facts: Vec<(&'static str, String)>,
    /// The sections, those of TRACE first.
    pub(super) sections: Vec<Section>,
}

impl Book {
    /// All rows, counted.
    pub(super) fn counts(&self) -> Counts {
        self.sections.iter().map(Section::counts).fold(Counts::default(), |all, one| Counts {
            quoted: all.quoted + one.quoted,
            beside: all.beside + one.beside,
            fitted: all.fitted + one.fitted,
        })
    }
}

impl Counts {
    /// The sentence of a page and of a list.
    pub(super) fn said(&self) -> String {
        let Self { quoted, beside, fitted } = self;
        format!(
            "Of {quoted} numbers quoted here {beside} have one of ours beside them, and {fitted} more \
                have one that was fitted to them"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gave_no_number_was_not_run() {
        for how in [How::Measured, How::Modelled, How::Fitted] {
            for none in [None, Some(f64::NAN)] {
                assert_eq!(Row::new("", "", 0, Some(1.0)).ours(how, none).how, How::NotRun);
            }
            assert_eq!(Row::new("", "", 0, None).ours(how, Some(1.0)).how, how);
        }
    }

    /// A fit is no prediction, and a number that stands twice is one.
    #[test]
    fn fits_are_counted_apart() {
        let row = |how| Row::new("", "", 0, Some(1.0)).ours(how, Some(1.0));
        let rows = [
            row(How::Fitted),
            row(How::Modelled),
            row(How::Measured),
            row(How::Measured).again(),
            Row::quoted("", "", 0, 1.0),
            Row::new("", "", 0, None).ours(How::Measured, Some(1.0)),
        ];
        let section = Section::new(Paper::Trace, "Fig. 1", "", "").rows(rows);
        assert_eq!(section.counts(), Counts { quoted: 4, beside: 2, fitted: 1 });
    }
}
