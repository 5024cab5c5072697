//! Plots, as SVG inside a page. Colours are the page's, so that they follow light and dark.

use std::fmt::Write as _;

use serde::Serialize;

use super::page::escaped;

/// How values are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// Over numbers.
    Lines,
    /// Over names, beside each other.
    Bars,
    /// Over names, on top of each other.
    Stacked,
}

/// What there is from left to right.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Across {
    /// Numbers, and those that are written at the axis; by powers of two if `log`.
    Numbers { log: bool, ticks: Vec<(f64, String)> },
    /// Names. A point's place is a name's number.
    Names(Vec<String>),
}

/// How a series looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Look {
    /// A line, or filled bars.
    Solid,
    /// A dashed line, or bars with an outline only.
    Dashed,
    /// Circles: the paper's own numbers.
    Marks,
}

/// Values of one name.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) look: Look,
    /// One of the page's colours.
    #[serde(skip)]
    pub(super) colour: usize,
    /// Place and value.
    pub(super) points: Vec<[f64; 2]>,
}

impl Series {
    pub(super) fn new(
        name: impl Into<String>,
        colour: usize,
        look: Look,
        points: impl IntoIterator<Item = [f64; 2]>,
    ) -> Self {
        let points = points.into_iter().filter(|point| point.iter().all(|number| number.is_finite()));
        Self { name: name.into(), look, colour: colour % COLOURS, points: points.collect() }
    }

    /// Values at the numbers of names, without those that are missing.
    pub(super) fn named(
        name: impl Into<String>,
        colour: usize,
        look: Look,
        values: impl IntoIterator<Item = Option<f64>>,
    ) -> Self {
        let points = (0_u32..).zip(values).filter_map(|(at, value)| Some([f64::from(at), value?]));
        Self::new(name, colour, look, points)
    }
}

/// Colours of a page: `--c0` and so on.
pub(super) const COLOURS: usize = 8;

/// A plot.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) kind: Kind,
    /// What the horizontal axis counts.
    pub(super) right: &'static str,
    pub(super) across: Across,
    /// What the vertical axis counts.
    pub(super) up: &'static str,
    /// Whether it goes by powers of two, from 1 on.
    pub(super) log: bool,
    pub(super) series: Vec<Series>,
}

const SIZE: (f64, f64) = (720.0, 300.0);
const LEFT: f64 = 58.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 46.0;
/// Names that have room at an axis.
const NAMES: usize = 20;

/// Where values are drawn.
struct Frame<'c> {
    chart: &'c Chart,
    /// The least and the greatest place.
    places: [f64; 2],
    low: f64,
    top: f64,
}

impl Frame<'_> {
    fn y(&self, value: f64) -> f64 {
        let part = if self.chart.log {
            value.max(1.0).log2() / self.top.log2()
        } else {
            (value - self.low) / (self.top - self.low)
        };
        SIZE.1 - BOTTOM - (SIZE.1 - TOP - BOTTOM) * part.clamp(0.0, 1.0)
    }

    /// Top and height of a bar from one value to another.
    fn bar(&self, from: f64, to: f64) -> (f64, f64) {
        let [from, to] = [self.y(from), self.y(to)];
        (from.min(to), (from - to).abs())
    }

    fn x(&self, place: f64) -> f64 {
        let whole = SIZE.0 - LEFT - RIGHT;
        let [low, high] = self.places;
        let part = match &self.chart.across {
            Across::Names(names) => (place + 0.5) / count(names.len().max(1)),
            Across::Numbers { .. } if high <= low => 0.5,
            Across::Numbers { log: true, .. } => (place / low).log2() / (high / low).log2(),
            Across::Numbers { .. } => (place - low) / (high - low),
        };
        LEFT + whole * part
    }

    /// What one name has of the width.
    fn slot(&self) -> f64 {
        match &self.chart.across {
            Across::Names(names) => (SIZE.0 - LEFT - RIGHT) / count(names.len().max(1)),
            Across::Numbers { .. } => 0.0,
        }
    }
}

fn count(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Values that are written at an axis from `least`, at most 0, to `most`: steps of 1, 2 or 5 times
/// a power of ten.
fn ticks(least: f64, most: f64) -> Vec<f64> {
    let raw = ((most - least) / 5.0).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= raw);
    let step = step.unwrap_or(10.0 * power);
    let first = (least / step).floor();
    (0..=8).map(|at| (first + f64::from(at)) * step).take_while(|tick| *tick < most + step).collect()
}

fn powers(most: f64) -> Vec<f64> {
    let last = most.max(2.0).log2().ceil().min(10.0);
    (0..=10).map(f64::from).take_while(|power| *power <= last).map(f64::exp2).collect()
}

/// A number without zeros that say nothing.
fn short(number: f64) -> String {
    let text = if number.abs() < 10.0 { format!("{number:.3}") } else { format!("{number:.1}") };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Chart {
    /// The greatest value that is drawn.
    fn greatest(&self) -> f64 {
        let values = || self.series.iter().flat_map(|series| &series.points);
        if self.kind == Kind::Stacked {
            let at = |place: f64| values().filter(move |point| (point[0] - place).abs() < 0.5);
            return values().map(|point| at(point[0]).map(|point| point[1]).sum::<f64>()).fold(0.0, f64::max);
        }
        values().map(|point| point[1]).fold(0.0, f64::max)
    }

    /// The least value that is drawn, at most 0.
    fn least(&self) -> f64 {
        self.series.iter().flat_map(|series| &series.points).map(|point| point[1]).fold(0.0, f64::min)
    }

    /// Draws it.
    pub(super) fn svg(&self) -> String {
        let most = self.greatest().max(1e-9);
        let ticks = if self.log { powers(most) } else { ticks(self.least(), most) };
        let places = self.series.iter().flat_map(|series| &series.points).map(|point| point[0]);
        let places = places
            .fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], place| [low.min(place), high.max(place)]);
        let [low, top] = [ticks.first(), ticks.last()].map(|tick| tick.copied().unwrap_or(1.0));
        let frame = Frame { chart: self, places, low, top };
        let mut out = format!(
            r#"<svg viewBox="0 0 {} {}" role="img" aria-label="{}">"#,
            SIZE.0,
            SIZE.1,
            escaped(&self.title)
        );
        for tick in ticks {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                SIZE.0 - RIGHT,
                LEFT - 6.0,
                frame.y(tick) + 4.0,
                short(tick),
                y = frame.y(tick),
            );
        }
        let mut at = |place: f64, text: &str| {
            let _ = write!(
                out,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                frame.x(place),
                SIZE.1 - BOTTOM + 17.0,
                escaped(text)
            );
        };
        match &self.across {
            Across::Numbers { ticks, .. } => ticks.iter().for_each(|(place, text)| at(*place, text)),
            Across::Names(names) => {
                let each = names.len().div_ceil(NAMES).max(1);
                (0..names.len()).step_by(each).for_each(|name| at(count(name), &names[name]));
            }
        }
        let middle = f64::midpoint(TOP, SIZE.1 - BOTTOM);
        let _ = write!(
            out,
            r#"<text class="axis" x="{:.1}" y="{:.1}" text-anchor="middle">{}</text><text class="axis" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">{}</text>"#,
            f64::midpoint(LEFT, SIZE.0 - RIGHT),
            SIZE.1 - 8.0,
            escaped(self.right),
            escaped(self.up)
        );
        match self.kind {
            Kind::Lines => self.series.iter().for_each(|series| line(&mut out, &frame, series)),
            Kind::Bars => self.bars(&mut out, &frame),
            Kind::Stacked => self.stacked(&mut out, &frame),
        }
        out.push_str("</svg>");
        out
    }

    fn bars(&self, out: &mut String, frame: &Frame<'_>) {
        let slot = frame.slot() * 0.8;
        let width = slot / count(self.series.len().max(1));
        // Of powers of two the axis begins with 1.
        let zero = if self.log { 1.0 } else { 0.0 };
        for (number, series) in self.series.iter().enumerate() {
            for [place, value] in &series.points {
                let x = frame.x(*place) - slot / 2.0 + width * count(number);
                let (y, height) = frame.bar(zero, *value);
                bar(out, series, [x, y, width, height], &self.said(series, *place, *value));
            }
        }
    }

    fn stacked(&self, out: &mut String, frame: &Frame<'_>) {
        let width = frame.slot() * 0.7;
        let mut below: Vec<(f64, f64)> = Vec::new();
        for series in &self.series {
            for [place, value] in &series.points {
                let at = below.iter().filter(|(at, _)| (at - place).abs() < 0.5);
                let under: f64 = at.map(|(_, of)| of).sum();
                let x = frame.x(*place) - width / 2.0;
                let (y, height) = frame.bar(under, under + value);
                bar(out, series, [x, y, width, height], &self.said(series, *place, *value));
                below.push((*place, *value));
            }
        }
    }

    /// What a bar is, for who points at it.
    fn said(&self, series: &Series, place: f64, value: f64) -> String {
        let name = match &self.across {
            Across::Names(names) => names.iter().enumerate().find(|(at, _)| (count(*at) - place).abs() < 0.5),
            Across::Numbers { .. } => None,
        };
        let name = name.map_or_else(|| short(place), |(_, name)| name.clone());
        format!("{}, {name}: {}", series.name, short(value))
    }
}

fn bar(out: &mut String, series: &Series, [x, y, width, height]: [f64; 4], said: &str) {
    let look = match series.look {
        Look::Solid => "bar",
        Look::Dashed | Look::Marks => "bar open",
    };
    let _ = write!(
        out,
        r#"<rect class="{look} c{}" x="{x:.1}" y="{y:.1}" width="{:.1}" height="{:.1}"><title>{}</title></rect>"#,
        series.colour,
        (width - 1.0).max(0.5),
        height.max(0.0),
        escaped(said)
    );
}

fn line(out: &mut String, frame: &Frame<'_>, series: &Series) {
    let colour = series.colour;
    if series.look != Look::Marks {
        let points = series.points.iter().map(|[x, y]| format!("{:.1},{:.1}", frame.x(*x), frame.y(*y)));
        let dashed = if series.look == Look::Dashed { " dashed" } else { "" };
        let points = points.collect::<Vec<_>>().join(" ");
        let _ = write!(out, r#"<polyline class="line c{colour}{dashed}" points="{points}"/>"#);
    }
    let (dot, radius) = if series.look == Look::Marks { ("mark", 5.0) } else { ("dot", 2.5) };
    for [x, y] in &series.points {
        let _ = write!(
            out,
            r#"<circle class="{dot} c{colour}" cx="{:.1}" cy="{:.1}" r="{radius}"><title>{}: {} at {}</title></circle>"#,
            frame.x(*x),
            frame.y(*y),
            escaped(&series.name),
            short(*y),
            short(*x)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(kind: Kind, across: Across, series: Vec<Series>) -> Chart {
        Chart { title: "a <b>".to_owned(), kind, right: "x", across, up: "y", log: false, series }
    }

    /// Numbers of an attribute, in order.
    fn numbers(svg: &str, attribute: &str) -> Vec<f64> {
        let name = format!(" {attribute}=\"");
        svg.split(&name).skip(1).map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn ticks_reach_over_what_is_drawn_and_are_few() {
        for most in [1e-9, 0.3, 1.0, 6.9, 42.02, 68.99, 238.9, 1e12] {
            let ticks = ticks(0.0, most);
            assert!((3..=8).contains(&ticks.len()), "{most}: {ticks:?}");
            assert!(ticks[0] == 0.0 && *ticks.last().unwrap() >= most * 0.999_999, "{most}: {ticks:?}");
        }
        assert_eq!(ticks(0.0, 42.0), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(ticks(-35.7, 15.0), [-40.0, -20.0, 0.0, 20.0]);
        assert_eq!(powers(5.0), [1.0, 2.0, 4.0, 8.0]);
    }

    #[test]
    fn bars_are_as_high_as_their_values_and_stacks_as_their_sum() {
        let names = || Across::Names(vec!["one".to_owned(), "two".to_owned()]);
        let series = |name: &str, values: [f64; 2]| Series::named(name, 0, Look::Solid, values.map(Some));
        let both = vec![series("a", [1.0, 2.0]), series("b", [3.0, 4.0])];
        let svg = chart(Kind::Bars, names(), both.clone()).svg();
        let heights = numbers(&svg, "height");
        let close = |a: f64, b: f64| (a - b).abs() < 0.11;
        assert!(close(heights[1], 2.0 * heights[0]) && close(heights[2], 3.0 * heights[0]), "{heights:?}");
        let stacked = numbers(&chart(Kind::Stacked, names(), both).svg(), "y");
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("<title>b, two: 4</title>"), "{svg}");
        // What is less than nothing hangs from zero.
        let below = vec![series("a", [-2.0, 4.0])];
        let svg = chart(Kind::Bars, names(), below).svg();
        let (tops, heights) = (numbers(&svg, "y"), numbers(&svg, "height"));
        let bars = &tops[tops.len() - 2..];
        assert!(close(heights[1], 2.0 * heights[0]) && close(bars[0], bars[1] + heights[1]), "{svg}");
        assert!(stacked.iter().all(|y| (0.0..=SIZE.1).contains(y)), "{stacked:?}");
    }

    #[test]
    fn absurd_numbers_are_left_out() {
        let points = [[1.0, f64::NAN], [2.0, f64::INFINITY], [4.0, 3.0]];
        let series = Series::new("a", 9, Look::Dashed, points);
        assert!(series.points == [[4.0, 3.0]] && series.colour < COLOURS);
        let across = Across::Numbers { log: true, ticks: vec![(4.0, "4".to_owned())] };
        let one = chart(Kind::Lines, across, vec![series, Series::named("b", 1, Look::Marks, [None])]);
        assert!(!one.svg().contains("NaN") && !one.svg().contains("inf"));
        let none = chart(Kind::Bars, Across::Names(Vec::new()), Vec::new());
        assert!(!none.svg().contains("NaN"));
    }
}
