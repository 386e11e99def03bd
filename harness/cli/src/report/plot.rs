//! SVG plots: lines over linear or logarithmic axes, horizontal bars, and stacked areas.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::{Deserialize, Serialize};

/// A plot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// Stem of file names: words joined by `-`.
    pub name: String,
    pub title: String,
    pub kind: PlotKind,
}

/// Kind and data of a plot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PlotKind {
    /// One line per series.
    Lines { x: Axis, y: Axis, series: Vec<Series> },
    /// Horizontal bars, the first entry at the top.
    Bars { x: Axis, bars: Vec<Bar> },
    /// Stacked areas, the first series at the bottom. All series have the same x, in ascending order.
    Stack { x: Axis, y: Axis, series: Vec<Series> },
}

/// Label and scale of an axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// Label with unit.
    pub label: String,
    pub scale: Scale,
}

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    /// Linear. Starts at zero unless all values are far from it.
    Linear,
    /// Logarithmic, with ticks at powers of two.
    Log2,
    /// Logarithmic, with ticks at powers of ten.
    Log10,
}

/// One line or area.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
}

/// A point of a line; `error` is half the length of its error bar.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub error: Option<f64>,
}

/// A bar with its name. Bars of the same `group` share a color and an entry in the legend; an empty group has no entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bar {
    pub name: String,
    pub group: String,
    pub value: f64,
    /// Half the length of the error bar.
    pub error: Option<f64>,
}

impl Axis {
    pub fn linear(label: &str) -> Axis {
        Axis { label: label.to_string(), scale: Scale::Linear }
    }

    pub fn log2(label: &str) -> Axis {
        Axis { label: label.to_string(), scale: Scale::Log2 }
    }

    pub fn log10(label: &str) -> Axis {
        Axis { label: label.to_string(), scale: Scale::Log10 }
    }
}

impl Series {
    pub fn new(name: &str, points: impl IntoIterator<Item = Point>) -> Series {
        Series { name: name.to_string(), points: points.into_iter().collect() }
    }
}

impl From<(f64, f64)> for Point {
    fn from((x, y): (f64, f64)) -> Point {
        Point { x, y, error: None }
    }
}

impl Plot {
    pub fn lines(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Plot {
        Plot { name: name.to_string(), title: title.to_string(), kind: PlotKind::Lines { x, y, series } }
    }

    pub fn bars(name: &str, title: &str, x: Axis, bars: Vec<Bar>) -> Plot {
        Plot { name: name.to_string(), title: title.to_string(), kind: PlotKind::Bars { x, bars } }
    }

    pub fn stack(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Plot {
        Plot { name: name.to_string(), title: title.to_string(), kind: PlotKind::Stack { x, y, series } }
    }

    /// Drops non-finite points and bars, because JSON has no NaN and no infinities.
    #[must_use]
    pub fn finite(mut self) -> Plot {
        match &mut self.kind {
            PlotKind::Lines { series, .. } | PlotKind::Stack { series, .. } => {
                for s in series {
                    s.points.retain(|p| p.x.is_finite() && p.y.is_finite() && p.error.is_none_or(f64::is_finite));
                }
            }
            PlotKind::Bars { bars, .. } => {
                bars.retain(|bar| bar.value.is_finite() && bar.error.is_none_or(f64::is_finite));
            }
        }
        self
    }

    /// Renders the plot on white, with generic fonts. Values that an axis cannot show (NaN, infinities, non-positive
    /// values on a logarithmic axis) are skipped; a plot without values says so.
    pub fn to_svg(&self) -> String {
        let height = match &self.kind {
            PlotKind::Bars { bars, .. } => 110 + 26 * bars.len().max(2) as u32,
            PlotKind::Lines { .. } | PlotKind::Stack { .. } => 480,
        };
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        self.draw(&area).and_then(|()| area.present()).expect("drawing into memory does not fail");
        drop(area);
        svg
    }

    fn draw(&self, area: &Area) -> DrawResult {
        area.fill(&WHITE)?;
        let area = area.titled(&self.title, (FONT, 20))?;
        match &self.kind {
            PlotKind::Lines { x, y, series } => lines(&area, x, y, series),
            PlotKind::Bars { x, bars } => self::bars(&area, x, bars),
            PlotKind::Stack { x, y, series } => stack(&area, x, y, series),
        }
    }
}

const WIDTH: u32 = 860;
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<AxisTicks, AxisTicks>>;
type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Color of series `index`: a palette for all types of color vision (after Okabe and Ito), then darker shades of it.
fn color(index: usize) -> RGBColor {
    const COLORS: [RGBColor; 8] = [
        RGBColor(0, 114, 178),
        RGBColor(213, 94, 0),
        RGBColor(0, 158, 115),
        RGBColor(204, 121, 167),
        RGBColor(230, 159, 0),
        RGBColor(86, 180, 233),
        RGBColor(110, 110, 110),
        RGBColor(240, 210, 60),
    ];
    let RGBColor(r, g, b) = COLORS[index % COLORS.len()];
    let dimmed = |c: u8| (f64::from(c) * 0.65_f64.powi((index / COLORS.len()) as i32)) as u8;
    RGBColor(dimmed(r), dimmed(g), dimmed(b))
}

/// An axis with its range and ticks.
#[derive(Clone)]
struct AxisTicks {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl AxisTicks {
    /// Creates an axis that covers the values it can show; with `from_zero`, as for areas and bars, also zero. `None`
    /// without such values.
    fn around(scale: Scale, values: impl Iterator<Item = f64>, from_zero: bool) -> Option<AxisTicks> {
        let (low, high) = values
            .filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        (low <= high).then(|| match scale {
            Scale::Linear => AxisTicks::linear(low, high, from_zero),
            Scale::Log2 => AxisTicks::logarithmic(scale, 2.0, low, high),
            Scale::Log10 => AxisTicks::logarithmic(scale, 10.0, low, high),
        })
    }

    fn linear(low: f64, high: f64, from_zero: bool) -> AxisTicks {
        let near_zero = low > 0.0 && low < 0.5 * high;
        let low = if from_zero || near_zero { low.min(0.0) } else { low };
        let high = if high > low { high.max(if from_zero { 0.0 } else { high }) } else { low + low.abs().max(1.0) };
        let step = round_step((high - low) / 6.0);
        let first = (low / step).floor() as i64;
        let last = (high / step).ceil() as i64;
        let ticks: Vec<f64> = (first..=last).map(|i| i as f64 * step).collect();
        AxisTicks { scale: Scale::Linear, low: ticks[0], high: ticks[ticks.len() - 1], ticks }
    }

    fn logarithmic(scale: Scale, base: f64, low: f64, high: f64) -> AxisTicks {
        // A value that is a power of the base up to rounding lies on its tick.
        let first = (low.log(base) + 1e-9).floor() as i32;
        let last = ((high.log(base) - 1e-9).ceil() as i32).max(first + 1);
        let every = ((last - first) / 12 + 1) as usize;
        let ticks = (first..=last).step_by(every).map(|i| base.powi(i)).collect();
        AxisTicks { scale, low: base.powi(first), high: base.powi(last), ticks }
    }

    /// The position of `v` along the axis, from 0 to 1 between the ends.
    fn position(&self, v: f64) -> f64 {
        match self.scale {
            Scale::Linear => (v - self.low) / (self.high - self.low),
            Scale::Log2 | Scale::Log10 => (v / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    fn can_show(&self, v: f64) -> bool {
        self.position(v).is_finite()
    }
}

/// The smallest 1, 2 or 5 times a power of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= step * (1.0 - 1e-9)).unwrap_or(step)
}

impl Ranged for AxisTicks {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        // Clamp points far outside, such as ends of error bars, because coordinates are small integers.
        limit.0 + (self.position(*value).clamp(-1.0, 2.0) * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, _: H) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for AxisTicks {
    fn format_ext(&self, value: &f64) -> String {
        tick_label(*value)
    }
}

/// Formats a tick label with up to six decimals, without trailing zeros; scientific below 1e-4 and from 1e6.
fn tick_label(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_string(),
        1e-4..1e6 => {
            let text = format!("{value:.6}");
            text.trim_end_matches('0').trim_end_matches('.').to_string()
        }
        _ => {
            let text = format!("{value:.2e}");
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
    }
}

/// Draws the text that stands for a plot without data.
fn draw_placeholder(area: &Area) -> DrawResult {
    area.draw_text("no data", &(FONT, 14).into_text_style(area), (40, 40))
}

fn lines(area: &Area, x: &Axis, y: &Axis, series: &[Series]) -> DrawResult {
    let points = || series.iter().flat_map(|s| &s.points);
    let extent = |p: &Point| [p.y, p.y - p.error.unwrap_or(0.0), p.y + p.error.unwrap_or(0.0)];
    let ys = AxisTicks::around(y.scale, points().flat_map(extent), false);
    let (Some(xs), Some(ys)) = (AxisTicks::around(x.scale, points().map(|p| p.x), false), ys) else {
        return draw_placeholder(area);
    };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(xs.clone(), ys.clone())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(&x.label)
        .y_desc(&y.label)
        .label_style((FONT, 13))
        .draw()?;
    for (i, s) in series.iter().enumerate() {
        let color = color(i);
        let shown: Vec<&Point> = s.points.iter().filter(|p| xs.can_show(p.x) && ys.can_show(p.y)).collect();
        // Draw the points only if they are few: many points are a curve.
        let radius = if shown.len() <= 40 { 3 } else { 0 };
        chart
            .draw_series(LineSeries::new(shown.iter().map(|p| (p.x, p.y)), color.stroke_width(2)).point_size(radius))?
            .label(&s.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(3)));
        let bars = shown.iter().filter_map(|p| p.error.map(|e| (p.x, p.y, e)));
        // On a logarithmic axis an error bar that reaches below zero ends at the bottom of the plot.
        let low = |y: f64, e: f64| if ys.can_show(y - e) { y - e } else { ys.low };
        chart.draw_series(
            bars.map(|(x, y, e)| ErrorBar::new_vertical(x, low(y, e), y, y + e, color.stroke_width(1), 6)),
        )?;
    }
    let positions =
        points().filter(|p| xs.can_show(p.x) && ys.can_show(p.y)).map(|p| (xs.position(p.x), ys.position(p.y)));
    legend(&mut chart, series.len(), emptiest_corner(positions))
}

/// The corner with the fewest points near it. Positions are from 0 to 1, from the left and from the bottom.
fn emptiest_corner(positions: impl Iterator<Item = (f64, f64)>) -> SeriesLabelPosition {
    use SeriesLabelPosition::{LowerLeft, LowerRight, UpperLeft, UpperRight};
    let mut counts = [0_usize; 4];
    for (x, y) in positions {
        // The legend covers about a third of each dimension.
        let near = [(x < 0.35, y > 0.6), (x > 0.65, y > 0.6), (x < 0.35, y < 0.4), (x > 0.65, y < 0.4)];
        for (count, (x, y)) in counts.iter_mut().zip(near) {
            *count += usize::from(x && y);
        }
    }
    let best = (0..4).min_by_key(|&corner| counts[corner]).unwrap_or(0);
    match best {
        0 => UpperLeft,
        1 => UpperRight,
        2 => LowerLeft,
        _ => LowerRight,
    }
}

fn bars(area: &Area, x: &Axis, bars: &[Bar]) -> DrawResult {
    let ends = bars.iter().flat_map(|bar| [0.0, bar.value, bar.value + bar.error.unwrap_or(0.0)]);
    // Bars are linear from zero: a length on a logarithmic axis is meaningless.
    let Some(xs) = AxisTicks::around(Scale::Linear, ends, true) else { return draw_placeholder(area) };
    if bars.is_empty() {
        return draw_placeholder(area);
    }
    let longest = bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0) as u32;
    let n = bars.len() as f64;
    let rows = AxisTicks { scale: Scale::Linear, low: n - 0.5, high: -0.5, ticks: Vec::new() };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(60)
        .x_label_area_size(44)
        .y_label_area_size((longest * 7 + 16).clamp(40, WIDTH / 2))
        .build_cartesian_2d(xs, rows)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(&x.label)
        .label_style((FONT, 13))
        .draw()?;
    let mut groups: Vec<&str> = Vec::new();
    for bar in bars {
        if !groups.contains(&bar.group.as_str()) {
            groups.push(&bar.group);
        }
    }
    for (g, group) in groups.iter().enumerate() {
        let color = color(g);
        let of_group = bars.iter().enumerate().filter(|(_, bar)| bar.group == *group && bar.value.is_finite());
        let rectangle = |(i, bar): (usize, &Bar)| {
            Rectangle::new([(0.0, i as f64 - 0.36), (bar.value, i as f64 + 0.36)], color.filled())
        };
        let drawn = chart.draw_series(of_group.map(rectangle))?;
        if !group.is_empty() {
            drawn.label(*group).legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], color.filled()));
        }
    }
    // Chart coordinates are those of the whole image; those of the area start below the title.
    let (area_left, area_top) = area.get_base_pixel();
    let place = |chart: &Chart<'_>, x: f64, row: f64| {
        let (x, y) = chart.backend_coord(&(x, row));
        (x - area_left, y - area_top)
    };
    for (i, bar) in bars.iter().enumerate() {
        let row = i as f64;
        if let Some(error) = bar.error.filter(|_| bar.value.is_finite()) {
            chart.draw_series([ErrorBar::new_horizontal(
                row,
                bar.value - error,
                bar.value,
                bar.value + error,
                BLACK.stroke_width(1),
                6,
            )])?;
        }
        let (left, middle) = place(&chart, 0.0, row);
        let name = (FONT, 13).into_text_style(area).pos(Pos::new(HPos::Right, VPos::Center));
        area.draw_text(&bar.name, &name, (left - 6, middle))?;
        let end = match bar.value.is_finite() {
            true => place(&chart, bar.value.max(0.0) + bar.error.unwrap_or(0.0), row).0,
            false => left,
        };
        let value = (FONT, 12).into_text_style(area).pos(Pos::new(HPos::Left, VPos::Center));
        let text = super::table::Precision::Significant(3).format(bar.value);
        area.draw_text(&text, &value, (end + 4, middle))?;
    }
    // The last bars are usually the shortest.
    let entries = groups.iter().filter(|group| !group.is_empty()).count();
    legend(&mut chart, entries, SeriesLabelPosition::LowerRight)
}

fn stack(area: &Area, x: &Axis, y: &Axis, series: &[Series]) -> DrawResult {
    let len = series.iter().map(|s| s.points.len()).min().unwrap_or(0);
    let mut below = vec![0.0; len];
    let mut tops: Vec<Vec<f64>> = Vec::new();
    for s in series {
        for (sum, point) in below.iter_mut().zip(&s.points) {
            *sum += point.y;
        }
        tops.push(below.clone());
    }
    let at = |i: usize| series[0].points[i].x;
    let xs = AxisTicks::around(x.scale, (0..len).map(at), false);
    let ys = AxisTicks::around(Scale::Linear, below.iter().copied().chain([0.0]), true);
    let (Some(xs), Some(ys)) = (xs, ys) else { return draw_placeholder(area) };
    let mut chart =
        ChartBuilder::on(area).margin(12).x_label_area_size(44).y_label_area_size(70).build_cartesian_2d(xs, ys)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(&x.label)
        .y_desc(&y.label)
        .label_style((FONT, 13))
        .draw()?;
    // Draw from the top down: each area covers the bottom of the one above it.
    for (i, s) in series.iter().enumerate().rev() {
        let color = color(i);
        let top = tops[i].iter().enumerate().map(|(j, &sum)| (at(j), sum));
        chart
            .draw_series(AreaSeries::new(top, 0.0, color.mix(1.0)))?
            .label(&s.name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], color.filled()));
    }
    legend(&mut chart, series.len(), SeriesLabelPosition::UpperLeft)
}

/// Draws the legend, except for a single series.
fn legend<'a>(chart: &mut Chart<'a>, entries: usize, position: SeriesLabelPosition) -> DrawResult {
    if entries < 2 {
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.4))
        .label_font((FONT, 13))
        .draw()
}
