//! Pictures as SVG. Colors come from the classes of `page.css`.

use std::fmt::{Display, Write};

use crate::report::escaped;

/// A picture of fixed size, which is measured in pixels.
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// A rectangle.
pub struct Rect<'a> {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
    pub class: &'a str,
    /// The number of the op that pointing at it highlights.
    pub op: Option<u32>,
    pub tooltip: &'a str,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Svg {
        Svg { width, height, body: String::new() }
    }

    pub fn rect(&mut self, rect: &Rect) {
        let Rect { x, y, width, height, class, op, tooltip } = *rect;
        let (x, y, width, height) = (Px(x), Px(y), Px(width), Px(height));
        let _ = write!(self.body, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" class=\"{class}\"");
        if let Some(op) = op {
            let _ = write!(self.body, " data-op=\"{op}\"");
        }
        let _ = match tooltip {
            "" => writeln!(self.body, "/>"),
            _ => writeln!(self.body, "><title>{}</title></rect>", escaped(tooltip)),
        };
    }

    /// Writes text; `class` sets its anchor.
    pub fn text(&mut self, x: f64, y: f64, class: &str, text: impl Display) {
        let (x, y, text) = (Px(x), Px(y), escaped(&text.to_string()));
        let _ = writeln!(self.body, "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{text}</text>");
    }

    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        let (x1, y1, x2, y2) = (Px(x1), Px(y1), Px(x2), Px(y2));
        let _ = writeln!(self.body, "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" class=\"{class}\"/>");
    }

    /// The picture as an element of a page, in a box that scrolls where the page is narrower. `label` describes it for
    /// screen readers.
    pub fn finish(self, label: &str) -> String {
        let Svg { width, height, body } = self;
        let (width, height, label) = (Px(width), Px(height), escaped(label));
        format!(
            "<div class=\"picture\" tabindex=\"0\" role=\"group\" aria-label=\"{label}\">\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" role=\"img\" aria-label=\"{label}\">\n{body}</svg>\n</div>\n"
        )
    }
}

/// A length with at most two decimals.
struct Px(f64);

impl Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", (self.0 * 100.0).round() / 100.0)
    }
}
