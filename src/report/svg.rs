//! Charts as inline SVG, coloured by the classes `c0` to `c9` that the page's style defines.
//!
//! Titles and legends are HTML around the drawing: they wrap and keep their size on a phone, where
//! the drawing shrinks. A value that is not finite, or beyond ±1e300 where spans would overflow, is
//! left out. Long data is thinned to some 400 points per series, always keeping the first and the
//! last: lines keep the lowest and the highest point of each stretch, so that spikes stay visible;
//! shares and eigenvalues are sampled evenly, so that each row drawn is a row of the data.

use super::plain;
use maud::{Markup, html};

/// Curves over a common axis.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lines {
    /// Shown above the chart.
    pub title: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// What the vertical axis measures.
    pub y_label: String,
    /// The curves, in the order of the legend.
    pub series: Vec<Series>,
}

/// One curve.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// The points as (x, y), joined in this order.
    pub points: Vec<(f64, f64)>,
    /// Whether the line is dashed, as fits a baseline or a bound.
    pub dashed: bool,
}

/// Estimates over a common axis, each between two bounds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bands {
    /// Shown above the chart.
    pub title: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// What the vertical axis measures.
    pub y_label: String,
    /// The estimates, in the order of the legend.
    pub bands: Vec<Band>,
}

/// One estimate with its bounds, which are drawn as dashed lines of its colour.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Band {
    /// What the legend says.
    pub name: String,
    /// The points as (x, [estimate, lower bound, upper bound]), joined in this order.
    pub points: Vec<(f64, [f64; 3])>,
}

/// Parts of a whole over time, such as the traffic of each model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StackedShares {
    /// Shown above the chart.
    pub title: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// The parts, stacked from the bottom.
    pub names: Vec<String>,
    /// Where each row of shares stands, in any order.
    pub x: Vec<f64>,
    /// For each `x` one share per name. Rows are scaled to sum to 1, and empty ones left out.
    pub shares: Vec<Vec<f64>>,
}

/// The signed eigenvalues of each model, in small charts of one scale.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spectrum {
    /// Shown above the charts.
    pub title: String,
    /// The models by name, with their eigenvalues in any order.
    pub models: Vec<(String, Vec<f64>)>,
}

/// Items by two measures, such as their ranks by two models.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scatter {
    /// Shown above the chart.
    pub title: String,
    /// What the horizontal axis measures.
    pub x_label: String,
    /// What the vertical axis measures.
    pub y_label: String,
    /// The items, in the order of the legend; those named first are drawn on top.
    pub clouds: Vec<Cloud>,
    /// Where a dashed line is drawn across each axis.
    pub limits: Option<(f64, f64)>,
}

/// Items of one kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cloud {
    /// What the legend says.
    pub name: String,
    /// The items as (x, y). Those at the same place become one mark, of an area that grows with their number.
    pub points: Vec<(f64, f64)>,
    /// How they look.
    pub look: Look,
}

/// How much a cloud catches the eye.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Look {
    /// Dots in a colour of their own.
    #[default]
    Bright,
    /// Grey dots.
    Grey,
    /// Faint crosses.
    Faint,
}

impl Lines {
    /// The chart, as a `<figure>`.
    pub fn html(&self) -> Markup {
        let drawn: Vec<_> = self.series.iter().map(|s| thin_line(&fit_points(&s.points))).collect();
        let x = Axis::within(drawn.iter().flatten().map(|p| p.0), 5.0);
        let y = Axis::covering(drawn.iter().flatten().map(|p| p.1), 5.0);
        let frame = Frame::wide(x, y);
        let marks: Vec<Option<Markup>> =
            (self.series.iter().zip(&drawn).enumerate()).map(|(i, (s, points))| frame.line(i, s, points)).collect();
        let ends: Vec<String> = self.series.iter().zip(&drawn).map(|(s, points)| ending(&s.name, points)).collect();
        let desc = format!("{} by {}. {}", self.y_label, self.x_label, ends.join(" "));
        let svg = frame.svg([&self.title, &desc], [&self.x_label, &self.y_label], marks);
        let keys = self.series.iter().map(|s| (s.name.as_str(), if s.dashed { "dashed key" } else { "key" }));
        figure(&self.title, legend(keys), svg)
    }
}

impl Bands {
    /// The chart, as a `<figure>`.
    pub fn html(&self) -> Markup {
        let lines = |(i, band): (usize, &Band)| band.lines().map(|line| (i, line));
        let drawn: Vec<(usize, Series)> = self.bands.iter().enumerate().flat_map(lines).collect();
        let points = || drawn.iter().flat_map(|(_, series)| &series.points);
        let frame = Frame::wide(Axis::within(points().map(|p| p.0), 5.0), Axis::covering(points().map(|p| p.1), 5.0));
        let marks = drawn.iter().map(|(i, series)| frame.line(*i, series, &series.points)).collect();
        let ends: Vec<String> = drawn.iter().map(|(_, series)| ending(&series.name, &series.points)).collect();
        let desc = format!("{} by {}. {}", self.y_label, self.x_label, ends.join(" "));
        let svg = frame.svg([&self.title, &desc], [&self.x_label, &self.y_label], marks);
        figure(&self.title, legend(self.bands.iter().map(|band| (band.name.as_str(), "key"))), svg)
    }
}

impl Band {
    /// The estimate, and its bounds.
    fn lines(&self) -> [Series; 3] {
        let name = &self.name;
        let names = [(0, name.clone()), (1, format!("{name}, lower bound")), (2, format!("{name}, upper bound"))];
        names.map(|(i, name)| {
            let points: Vec<(f64, f64)> = self.points.iter().map(|(x, y)| (*x, y[i])).collect();
            Series { name, points: thin_line(&fit_points(&points)), dashed: i > 0 }
        })
    }
}

impl StackedShares {
    /// The chart, as a `<figure>`.
    pub fn html(&self) -> Markup {
        let rows = self.stacked_rows();
        let frame = Frame::wide(Axis::within(rows.iter().map(|row| row.0), 5.0), Axis::percent());
        let columns = frame.columns(&rows);
        let marks: Vec<Option<Markup>> =
            (self.names.iter().enumerate()).map(|(i, name)| frame.area(i, name, &columns)).collect();
        let desc = format!("Shares of {} over {}.", self.names.join(", "), self.x_label);
        let svg = frame.svg([&self.title, &desc], [&self.x_label, "share"], marks);
        figure(&self.title, legend(self.names.iter().map(|name| (name.as_str(), "block key"))), svg)
    }

    /// For each x, in order, the running totals of its shares, from 0 to 1.
    fn stacked_rows(&self) -> Vec<(f64, Vec<f64>)> {
        let mut rows: Vec<(f64, Vec<f64>)> = (self.x.iter().zip(&self.shares))
            .filter(|(x, _)| fits(**x))
            .filter_map(|(x, row)| Some((*x, running_totals(row, self.names.len())?)))
            .collect();
        rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        sample(rows)
    }
}

impl Spectrum {
    /// The charts, as one `<figure>`.
    pub fn html(&self) -> Markup {
        let sorted: Vec<Vec<f64>> = self.models.iter().map(|(_, values)| descending(values)).collect();
        let y = Axis::covering(sorted.iter().flatten().copied().chain([0.0]), 3.0);
        let panels = html! {
            div.panels {
                @for (i, ((name, _), values)) in self.models.iter().zip(&sorted).enumerate() {
                    div.panel { p title=(plain(name)) { (plain(name)) } (panel(i, name, values, y.clone())) }
                }
                @if self.models.is_empty() { p { "no data" } }
            }
        };
        figure(&self.title, html! {}, panels)
    }
}

impl Scatter {
    /// The chart, as a `<figure>`.
    pub fn html(&self) -> Markup {
        let drawn: Vec<_> = self.clouds.iter().map(|cloud| sample(heaps(&cloud.points))).collect();
        let spots = || drawn.iter().flatten().map(|heap| heap.0);
        let limit = |limit: f64| fits(limit).then_some(limit);
        let x_limit = self.limits.and_then(|limits| limit(limits.0)).filter(|_| spots().next().is_some());
        let y_limit = self.limits.and_then(|limits| limit(limits.1)).filter(|_| spots().next().is_some());
        let x = Axis::covering(spots().map(|p| p.0).chain(x_limit), 5.0);
        let y = Axis::covering(spots().map(|p| p.1).chain(y_limit), 5.0);
        let frame = Frame::square(x, y);
        let most = drawn.iter().flatten().map(|heap| heap.1).max().unwrap_or(1);
        let clouds = self.clouds.iter().zip(&drawn).enumerate().rev();
        let mut marks: Vec<Option<Markup>> =
            clouds.map(|(i, (cloud, heaps))| frame.cloud(i, cloud, heaps, most)).collect();
        marks.extend(x_limit.map(|at| Some(rule("limit", [frame.px(at), frame.top], [frame.px(at), frame.bottom]))));
        marks.extend(y_limit.map(|at| Some(rule("limit", [frame.left, frame.py(at)], [frame.right, frame.py(at)]))));
        let counts: Vec<String> = self.clouds.iter().map(|cloud| counted(&cloud.name, &cloud.points)).collect();
        let desc = format!("{} against {}. {}", self.y_label, self.x_label, counts.join(" "));
        let svg = frame.svg([&self.title, &desc], [&self.x_label, &self.y_label], marks);
        let keys = self.clouds.iter().map(|cloud| (cloud.name.as_str(), cloud.look.key()));
        figure(&self.title, legend(keys), svg)
    }
}

impl Look {
    fn key(self) -> &'static str {
        match self {
            Look::Bright => "dot key",
            Look::Grey => "grey dot key",
            Look::Faint => "faint cross key",
        }
    }
}

const MOST_POINTS: usize = 400;
const COLOURS: usize = 10;
const LARGEST: f64 = 1e300;
/// Below this, steps between ticks would be too small to divide by.
const SMALLEST: f64 = 1e-290;

/// A scale with its labelled ticks.
#[derive(Debug, Clone)]
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Ends at the ticks around the data.
    fn covering(values: impl Iterator<Item = f64>, most_steps: f64) -> Self {
        Self::reaching(values, most_steps, 1.0 - 1e-9)
    }

    /// Ends with the data, unless a tick is near: rounds that count from 1 get an axis from 0.
    fn within(values: impl Iterator<Item = f64>, most_steps: f64) -> Self {
        Self::reaching(values, most_steps, 0.1)
    }

    /// Ends at a tick where one lies no further than `reach` steps beyond the data.
    fn reaching(values: impl Iterator<Item = f64>, most_steps: f64, reach: f64) -> Self {
        let (low, high) = range(values);
        let (step, exponent) = nice_step((high - low) / most_steps);
        let (first, last) = ((low / step - reach).ceil(), (high / step + reach).floor());
        let ticks = ticks(first, last, step, exponent);
        Self { low: low.min(first * step), high: high.max(last * step), ticks }
    }

    fn percent() -> Self {
        let ticks = [0, 25, 50, 75, 100].map(|p| (f64::from(p) / 100.0, format!("{p}%")));
        Self { low: 0.0, high: 1.0, ticks: ticks.to_vec() }
    }

    fn at(&self, value: f64, from: f64, to: f64) -> f64 {
        from + (value - self.low) / (self.high - self.low) * (to - from)
    }
}

/// A range that is never empty: data without extent gets some room on both sides.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let ends = (f64::INFINITY, f64::NEG_INFINITY);
    let (low, high) = values.fold(ends, |(low, high), v| (low.min(v), high.max(v)));
    let size = low.abs().max(high.abs());
    match high - low {
        _ if low > high => (0.0, 1.0),
        _ if size < SMALLEST => (-1.0, 1.0),
        // A narrower range would need labels of more digits than there is room for.
        span if span < size * 1e-6 => (low - size / 2.0, high + size / 2.0),
        _ => (low, high),
    }
}

/// The first of 1, 2, 5, 10, 20... that is no smaller than `least`, and its power of ten.
fn nice_step(least: f64) -> (f64, i32) {
    let exponent = least.log10().floor() as i32;
    let power = 10f64.powi(exponent);
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= least * (1.0 - 1e-9));
    digit.map_or((10f64.powi(exponent + 1), exponent + 1), |digit| (digit * power, exponent))
}

fn ticks(first: f64, last: f64, step: f64, exponent: i32) -> Vec<(f64, String)> {
    let largest = first.abs().max(last.abs()) * step;
    let count = (last - first) as usize + 1;
    let values = (0..count).map(|i| (first + i as f64) * step);
    values.map(|value| (value, tick_label(value, largest, exponent))).collect()
}

/// One unit for the whole axis, and as many decimals as its step has.
fn tick_label(value: f64, largest: f64, exponent: i32) -> String {
    let (unit, suffix) = match largest {
        _ if value == 0.0 => return "0".to_owned(),
        l if !(1e-3..1e15).contains(&l) => return scientific(value, exponent),
        l if l >= 1e12 => (12, "T"),
        l if l >= 1e9 => (9, "G"),
        l if l >= 1e6 => (6, "M"),
        l if l >= 1e4 => (3, "k"),
        _ => (0, ""),
    };
    let decimals = (unit - exponent).max(0) as usize;
    format!("{:.decimals$}{suffix}", value / 10f64.powi(unit)).replace('-', "−")
}

fn scientific(value: f64, exponent: i32) -> String {
    let decimals = (value.abs().log10().floor() as i32 - exponent).max(0) as usize;
    format!("{value:.decimals$e}").replace('-', "−")
}

/// A number in running text, to four significant digits.
fn number(value: f64) -> String {
    let size = value.abs();
    if value != 0.0 && !(1e-3..1e7).contains(&size) {
        return format!("{value:.3e}").replace('-', "−");
    }
    let decimals = (3.0 - size.max(1e-3).log10().floor()).max(0.0) as usize;
    let digits = format!("{value:.decimals$}").replace('-', "−");
    match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits,
    }
}

fn percentage(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// A drawing area with its axes. The margins leave room for the larger type used on a phone.
struct Frame {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x: Axis,
    y: Axis,
}

impl Frame {
    fn wide(x: Axis, y: Axis) -> Self {
        let (width, height) = (640.0, 300.0);
        Self { width, height, left: label_room(&y, 10.0), right: 616.0, top: 32.0, bottom: 246.0, x, y }
    }

    fn square(x: Axis, y: Axis) -> Self {
        let (width, height) = (640.0, 480.0);
        Self { width, height, left: label_room(&y, 10.0), right: 616.0, top: 32.0, bottom: 426.0, x, y }
    }

    fn small(x: Axis, y: Axis) -> Self {
        let (width, height) = (180.0, 120.0);
        Self { width, height, left: label_room(&y, 7.0), right: 178.0, top: 8.0, bottom: 112.0, x, y }
    }

    fn px(&self, x: f64) -> f64 {
        self.x.at(x, self.left, self.right)
    }

    fn py(&self, y: f64) -> f64 {
        self.y.at(y, self.bottom, self.top)
    }

    fn svg(&self, [title, desc]: [&str; 2], [x_label, y_label]: [&str; 2], marks: Vec<Option<Markup>>) -> Markup {
        let view = format!("0 0 {} {}", self.width, self.height);
        html! {
            svg viewBox=(view) role="img" {
                title { (plain(title)) }
                desc { (plain(desc)) }
                (self.y_axis(y_label))
                @if marks.iter().all(Option::is_none) {
                    @let (x, y) = ((self.left + self.right) / 2.0, (self.top + self.bottom) / 2.0);
                    text.middle.halo x=(px(x)) y=(px(y)) dy="0.35em" { "no data" }
                }
                @for mark in marks.iter().flatten() { (mark) }
                @if !self.x.ticks.is_empty() { (self.x_axis(x_label)) }
            }
        }
    }

    fn y_axis(&self, label: &str) -> Markup {
        html! {
            @for (value, tick) in &self.y.ticks {
                @let y = self.py(*value);
                (rule(if *value == 0.0 { "axis" } else { "grid" }, [self.left, y], [self.right, y]))
                text.end x=(px(self.left - 8.0)) y=(px(y)) dy="0.35em" { (tick) }
            }
            @if !label.is_empty() { text.label x="0" y="16" { (plain(label)) } }
        }
    }

    fn x_axis(&self, label: &str) -> Markup {
        html! {
            (rule("axis", [self.left, self.bottom], [self.right, self.bottom]))
            @for (value, tick) in &self.x.ticks {
                @let x = self.px(*value);
                (rule("axis", [x, self.bottom], [x, self.bottom + 5.0]))
                text.middle x=(px(x)) y=(px(self.bottom + 21.0)) { (tick) }
            }
            text.label.end x=(px(self.right)) y=(px(self.bottom + 44.0)) { (plain(label)) }
        }
    }

    fn line(&self, i: usize, series: &Series, points: &[(f64, f64)]) -> Option<Markup> {
        let spots: Vec<[f64; 2]> = points.iter().map(|p| [self.px(p.0), self.py(p.1)]).collect();
        let class = format!("line c{}{}", i % COLOURS, if series.dashed { " dashed" } else { "" });
        let hover = ending(&series.name, points);
        Some(match spots.as_slice() {
            [] => return None,
            [[x, y]] => {
                html! { circle class=(class) cx=(px(*x)) cy=(px(*y)) r="4" { title { (hover) } } }
            }
            _ => {
                html! { polyline class=(class) points=(path(spots.into_iter())) { title { (hover) } } }
            }
        })
    }

    fn cloud(&self, i: usize, cloud: &Cloud, heaps: &[((f64, f64), usize)], most: usize) -> Option<Markup> {
        let class = match cloud.look {
            Look::Bright => format!("spots c{}", i % COLOURS),
            Look::Grey => "spots grey".to_owned(),
            Look::Faint => "spots faint".to_owned(),
        };
        let spot = |((x, y), count): &((f64, f64), usize)| {
            let (x, y) = (self.px(*x), self.py(*y));
            let radius = if most > 1 { 2.5 + 9.5 * (*count as f64 / most as f64).sqrt() } else { 4.0 };
            match cloud.look {
                Look::Faint => html! {
                    (rule("cross", [x - 3.0, y - 3.0], [x + 3.0, y + 3.0]))
                    (rule("cross", [x - 3.0, y + 3.0], [x + 3.0, y - 3.0]))
                },
                _ => html! { circle cx=(px(x)) cy=(px(y)) r=(px(radius)) {} },
            }
        };
        (!heaps.is_empty()).then(|| {
            html! {
                g class=(class) {
                    title { (counted(&cloud.name, &cloud.points)) }
                    @for heap in heaps { (spot(heap)) }
                }
            }
        })
    }

    /// Where rows of shares are drawn. A lone row would have no area, so it is given some width.
    fn columns<'a>(&self, rows: &'a [(f64, Vec<f64>)]) -> Vec<(f64, &'a [f64])> {
        let columns: Vec<_> = rows.iter().map(|(x, totals)| (self.px(*x), totals.as_slice())).collect();
        match columns.as_slice() {
            [(x, totals)] => vec![(x - 16.0, *totals), (x + 16.0, *totals)],
            _ => columns,
        }
    }

    fn area(&self, i: usize, name: &str, columns: &[(f64, &[f64])]) -> Option<Markup> {
        let (first, last) = columns.first().zip(columns.last())?;
        let share = |column: &(f64, &[f64])| percentage(column.1[i + 1] - column.1[i]);
        let upper = columns.iter().map(|(x, totals)| [*x, self.py(totals[i + 1])]);
        let lower = columns.iter().rev().map(|(x, totals)| [*x, self.py(totals[i])]);
        Some(html! {
            polygon class={ "area c" (i % COLOURS) } points=(path(upper.chain(lower))) {
                title { (plain(name)) ": " (share(first)) " at first, " (share(last)) " at last" }
            }
        })
    }

    fn bar(&self, i: usize, rank: usize, value: f64) -> Markup {
        let (from, to) = (self.px(rank as f64), self.px(rank as f64 + 1.0));
        let (zero, end) = (self.py(0.0), self.py(value));
        let class = format!("bar c{}{}", i % COLOURS, if value < 0.0 { " negative" } else { "" });
        let (width, height) = ((to - from) * 0.8, (zero - end).abs());
        html! {
            rect class=(class) x=(px(from)) y=(px(zero.min(end))) width=(px(width)) height=(px(height)) {
                title { (number(value)) }
            }
        }
    }
}

fn panel(i: usize, name: &str, values: &[f64], y: Axis) -> Markup {
    let x = Axis { low: -0.2, high: values.len().max(1) as f64, ticks: Vec::new() };
    let frame = Frame::small(x, y);
    let bars = values.iter().enumerate().map(|(rank, v)| Some(frame.bar(i, rank, *v))).collect();
    let desc = match values {
        [] => "No eigenvalues.".to_owned(),
        [largest, .., least] => format!("Eigenvalues from {} down to {}.", number(*largest), number(*least)),
        [only] => format!("One eigenvalue, {}.", number(*only)),
    };
    frame.svg([name, &desc], ["", ""], bars)
}

fn figure(title: &str, legend: Markup, drawing: Markup) -> Markup {
    html! {
        figure.chart {
            @if !title.is_empty() { figcaption { (plain(title)) } }
            (legend)
            (drawing)
        }
    }
}

fn legend<'a>(keys: impl Iterator<Item = (&'a str, &'a str)>) -> Markup {
    html! {
        ul.legend {
            @for (i, (name, class)) in keys.enumerate() {
                li { span class={ (class) " c" (i % COLOURS) } {} (plain(name)) }
            }
        }
    }
}

fn rule(class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) -> Markup {
    html! { line class=(class) x1=(px(x1)) y1=(px(y1)) x2=(px(x2)) y2=(px(y2)) {} }
}

fn label_room(axis: &Axis, per_char: f64) -> f64 {
    let longest = axis.ticks.iter().map(|(_, label)| label.chars().count()).max();
    longest.unwrap_or(0) as f64 * per_char + 12.0
}

fn path(spots: impl Iterator<Item = [f64; 2]>) -> String {
    spots.map(|[x, y]| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}

fn px(length: f64) -> String {
    format!("{length:.1}")
}

fn ending(name: &str, points: &[(f64, f64)]) -> String {
    match points.last() {
        Some((x, y)) => format!("{} ends with {} at {}.", plain(name), number(*y), number(*x)),
        None => format!("{} has no data.", plain(name)),
    }
}

fn counted(name: &str, points: &[(f64, f64)]) -> String {
    format!("{}: {}.", plain(name), fit_points(points).len())
}

/// The places of points, in order, and how many there are at each.
fn heaps(points: &[(f64, f64)]) -> Vec<((f64, f64), usize)> {
    let mut points = fit_points(points);
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    points.chunk_by(|a, b| a == b).map(|heap| (heap[0], heap.len())).collect()
}

fn fits(value: f64) -> bool {
    value.abs() <= LARGEST
}

fn fit_points(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    points.iter().copied().filter(|(x, y)| fits(*x) && fits(*y)).collect()
}

fn running_totals(row: &[f64], names: usize) -> Option<Vec<f64>> {
    let share = |i| row.get(i).copied().filter(|s| fits(*s) && *s > 0.0).unwrap_or(0.0);
    let sum: f64 = (0..names).map(share).sum();
    let totals = (0..names).scan(0.0, |total, i| {
        *total += share(i) / sum;
        Some(*total)
    });
    (sum > 0.0).then(|| std::iter::once(0.0).chain(totals).collect())
}

fn descending(values: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| fits(*v)).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sample(sorted)
}

/// Evenly spaced items, the first and the last among them.
fn sample<T: Clone>(items: Vec<T>) -> Vec<T> {
    if items.len() <= MOST_POINTS {
        return items;
    }
    let last = items.len() - 1;
    (0..MOST_POINTS).map(|i| items[i * last / (MOST_POINTS - 1)].clone()).collect()
}

/// The first and the last point, and the lowest and highest of each stretch between them.
fn thin_line(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let [first, inner @ .., last] = points else {
        return points.to_vec();
    };
    if points.len() <= MOST_POINTS {
        return points.to_vec();
    }
    let stretches = inner.chunks(inner.len().div_ceil(MOST_POINTS / 2 - 1));
    let kept = stretches.flat_map(extremes);
    std::iter::once(*first).chain(kept).chain([*last]).collect()
}

fn extremes(stretch: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let height = |i: &usize, j: &usize| stretch[*i].1.total_cmp(&stretch[*j].1);
    let mut kept: Vec<usize> =
        [(0..stretch.len()).min_by(height), (0..stretch.len()).max_by(height)].into_iter().flatten().collect();
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().map(|i| stretch[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::assert_well_formed;
    use super::*;

    const ODD: [f64; 12] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e300,
        -1e300,
        f64::MAX,
        f64::MIN_POSITIVE,
        5e-324,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
    ];

    fn lines(points: Vec<(f64, f64)>) -> String {
        let series = Series { name: "<script>alert(1)</script>\u{0}".into(), points, dashed: true };
        let text = || "a \"quoted\" & <b>".to_owned();
        let chart = Lines { title: text(), x_label: text(), y_label: text(), series: vec![series] };
        chart.html().into_string()
    }

    #[test]
    fn bands_have_three_lines_of_one_colour_and_one_key() {
        let band = |name: &str, shift: f64| Band {
            name: name.to_owned(),
            points: (0..5).map(|i| (f64::from(i), [shift, shift - 0.1, shift + 0.1])).collect(),
        };
        let bands = vec![band("<hpg> & co", 0.1), band("uniform", f64::NAN), band("exp3", -0.1)];
        let text = || "a & b".to_owned();
        let chart = Bands { title: text(), x_label: text(), y_label: text(), bands }.html().into_string();
        assert_well_formed(&chart);
        let count = |part: &str| chart.matches(part).count();
        assert_eq!((count("\"line c0"), count("\"line c1"), count("\"line c2")), (3, 0, 3), "{chart}");
        assert_eq!((count("dashed\""), count("<li>")), (4, 3), "{chart}");
    }

    fn shares(x: Vec<f64>, shares: Vec<Vec<f64>>) -> String {
        let names = vec!["<script>".to_owned(), "b & c".to_owned()];
        StackedShares { title: "t".into(), x_label: "round".into(), names, x, shares }.html().into_string()
    }

    fn spectrum(values: Vec<f64>) -> String {
        let models = vec![("<script>".to_owned(), values), ("b".to_owned(), vec![])];
        Spectrum { title: "t".into(), models }.html().into_string()
    }

    fn scatter(points: Vec<(f64, f64)>, limit: f64) -> String {
        let cloud = |look| Cloud { name: "<script>".into(), points: points.clone(), look };
        let clouds = [Look::Bright, Look::Grey, Look::Faint].map(cloud).to_vec();
        let text = || "a & <b>".to_owned();
        let limits = Some((limit, 2.0));
        Scatter { title: text(), x_label: text(), y_label: text(), clouds, limits }.html().into_string()
    }

    fn assert_sound(markup: &str) {
        assert_well_formed(markup);
        assert!(markup.contains("<svg") && markup.contains("<desc>") && !markup.contains("<script"));
    }

    #[test]
    fn odd_data_gives_sound_charts() {
        for a in ODD {
            assert_sound(&lines(vec![(a, a)]));
            assert_sound(&spectrum(vec![a]));
            assert_sound(&shares(vec![a], vec![vec![a, 1.0]]));
            assert_sound(&scatter(vec![(a, a)], a));
            for b in ODD {
                assert_sound(&lines(vec![(0.0, a), (1.0, b)]));
                assert_sound(&lines(vec![(a, 2.0), (b, 2.0)]));
                assert_sound(&scatter(vec![(a, b), (b, a), (1.0, a)], b));
                assert_sound(&spectrum(vec![a, b, 0.5]));
                assert_sound(&shares(vec![a, b, 3.0], vec![vec![a, b], vec![], vec![b]]));
            }
        }
    }

    #[test]
    fn no_data_says_so() {
        let empty = [Lines::default().html(), StackedShares::default().html(), Spectrum::default().html()];
        let drawn = [lines(vec![]), lines(vec![(f64::NAN, 1.0)]), shares(vec![], vec![]), spectrum(vec![])];
        let scattered = [Scatter::default().html().into_string(), scatter(vec![], 5.0)];
        for markup in empty.into_iter().map(Markup::into_string).chain(drawn).chain(scattered) {
            assert_well_formed(&markup);
            assert!(markup.contains("no data"), "{markup}");
        }
    }

    #[test]
    fn ticks_cover_the_range_and_are_few() {
        let ends = [0.0, 1e-9, 3e-4, 0.07, 0.5, 1.0, 9.99, 47.0, 1234.5, 40_000.0, 8e9, 3e18, 1e300];
        let signed = || ends.into_iter().flat_map(|v| [v, -v]);
        for (low, high) in signed().flat_map(|a| signed().map(move |b| (a, b))).filter(|(a, b)| a <= b) {
            let axis = Axis::covering([low, high].into_iter(), 5.0);
            let (first, last) = (axis.ticks[0].0, axis.ticks[axis.ticks.len() - 1].0);
            let slack = (axis.high - axis.low) * 1e-6;
            assert!(first <= low + slack && high <= last + slack, "{axis:?} for {low}..{high}");
            assert!((2..=7).contains(&axis.ticks.len()), "{axis:?}");
            assert!(axis.ticks.is_sorted_by(|a, b| a.0 < b.0 && a.1 != b.1), "{axis:?}");
            let within = Axis::within([low, high].into_iter(), 5.0);
            assert!((2..=7).contains(&within.ticks.len()), "{within:?}");
        }
    }

    #[test]
    fn tick_labels_are_short() {
        let cases = [
            (1.0, 40_000.0, "0 10k 20k 30k 40k"),
            (0.0, 1000.0, "0 200 400 600 800 1000"),
            (0.1, 0.32, "0.10 0.15 0.20 0.25 0.30 0.35"),
            (-1.0, 1.5, "−1.0 −0.5 0 0.5 1.0 1.5"),
            (0.0, 2.4e6, "0 0.5M 1.0M 1.5M 2.0M 2.5M"),
            (0.0, 4e-7, "0 1e−7 2e−7 3e−7 4e−7"),
            (0.0, 1e18, "0 2e17 4e17 6e17 8e17 1.0e18"),
        ];
        for (low, high, expected) in cases {
            let axis = Axis::covering([low, high].into_iter(), 5.0);
            let labels: Vec<&str> = axis.ticks.iter().map(|(_, label)| label.as_str()).collect();
            assert_eq!(labels.join(" "), expected);
        }
    }

    #[test]
    fn an_axis_within_ends_with_the_data_or_a_tick_nearby() {
        let cases = [(1.0, 40_000.0, 0.0, 40_000.0), (0.0, 43_000.0, 0.0, 43_000.0), (7.0, 31.0, 7.0, 31.0)];
        for (low, high, from, to) in cases {
            let axis = Axis::within([low, high].into_iter(), 5.0);
            assert_eq!((axis.low, axis.high), (from, to));
        }
    }

    #[test]
    fn numbers_are_short() {
        let cases = [(0.0, "0"), (0.5, "0.5"), (40_000.0, "40000"), (-0.71234, "−0.7123"), (1e-9, "1.000e−9")];
        for (value, expected) in cases {
            assert_eq!(number(value), expected);
        }
    }

    #[test]
    fn thinning_keeps_ends_and_spikes() {
        for count in [0, 1, 2, 399, 400, 401, 402, 1000, 40_000] {
            let mut points: Vec<(f64, f64)> = (0..count).map(|i| (i as f64, 0.0)).collect();
            if let Some(point) = points.get_mut(count / 3) {
                point.1 = 9.0;
            }
            let thin = thin_line(&points);
            assert!(thin.len() <= MOST_POINTS && (count > MOST_POINTS || thin.len() == count));
            assert_eq!((thin.first(), thin.last()), (points.first(), points.last()));
            assert_eq!(thin.iter().any(|p| p.1 == 9.0), count > 0);
            assert!(thin.is_sorted_by(|a, b| a.0 < b.0));
            let even = sample(points.clone());
            assert!(even.len() == count.min(MOST_POINTS) && even.last() == points.last());
        }
    }

    #[test]
    fn a_scatter_draws_each_place_once_larger_where_there_are_more() {
        let points = vec![(1.0, 2.0), (3.0, 1.0), (1.0, 2.0), (1.0, 2.0), (f64::NAN, 1.0), (1.0, 2.0)];
        let markup = scatter(points, 2.5);
        let radii: Vec<&str> =
            markup.split("<circle").skip(1).filter_map(|mark| mark.split("r=\"").nth(1)?.split('"').next()).collect();
        assert_eq!(radii, ["12.0", "7.2", "12.0", "7.2"], "two clouds of dots");
        assert_eq!(markup.matches("class=\"cross\"").count(), 2 * 2);
        assert_eq!(markup.matches("class=\"limit\"").count(), 2);
        assert_eq!(markup.matches(": 5.").count(), 2 * 3, "in the description and on hovering");
        assert!(markup.contains("a &amp; &lt;b&gt; against"));
        let (faint, bright) = (markup.find("spots faint").unwrap(), markup.find("spots c0").unwrap());
        assert!(faint < bright, "what matters is drawn last");
    }

    #[test]
    fn a_spectrum_draws_each_value_once_in_order() {
        let markup = spectrum(vec![-0.5, 2.0, f64::NAN, 0.25, -3.0]);
        let bars = markup.split("<rect").skip(1);
        let values: Vec<&str> = bars.filter_map(|bar| bar.split("title>").nth(1)).collect();
        assert_eq!(values, ["2</", "0.25</", "−0.5</", "−3</"]);
        assert_eq!(markup.matches("negative").count(), 2);
    }

    #[test]
    fn shares_fill_the_whole_height() {
        for row in [vec![0.25, 0.75], vec![2.0, 6.0], vec![1.0], vec![f64::NAN, 0.1, 9.0], vec![-1.0, 3.0]] {
            let totals = running_totals(&row, 2).expect("a row with something in it");
            assert!(totals.len() == 3 && totals.is_sorted() && (totals[2] - 1.0).abs() < 1e-12, "{totals:?}");
        }
        assert_eq!(running_totals(&[0.0, f64::INFINITY], 2), None);
    }
}
