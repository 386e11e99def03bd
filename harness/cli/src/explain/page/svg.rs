//! Pictures as SVG: elements of the page, and files. Colors come from the classes of `svg.css`.

use std::fmt::{Display, Write};

use crate::report::escaped;

/// A picture of fixed size, which is measured in pixels.
pub struct Svg {
    width: f64,
    height: f64,
    /// The elements, with tooltips and numbers of ops.
    body: String,
    /// The elements without these.
    plain: String,
}

/// A finished picture.
pub struct Picture {
    /// Stem of a file name.
    pub name: String,
    /// What it shows, for screen readers.
    label: String,
    svg: Svg,
}

/// The style of a picture that is not a part of the page.
const STYLE: &str = include_str!("svg.css");

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
        Svg { width, height, body: String::new(), plain: String::new() }
    }

    pub fn rect(&mut self, rect: &Rect) {
        let Rect { x, y, width, height, class, op, tooltip } = *rect;
        let (x, y, width, height) = (Px(x), Px(y), Px(width), Px(height));
        let shape = format!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" class=\"{class}\"");
        self.body += &shape;
        let _ = writeln!(self.plain, "{shape}/>");
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
        self.add(&format!("<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{text}</text>\n"));
    }

    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        let (x1, y1, x2, y2) = (Px(x1), Px(y1), Px(x2), Px(y2));
        self.add(&format!("<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" class=\"{class}\"/>\n"));
    }

    fn add(&mut self, element: &str) {
        self.body += element;
        self.plain += element;
    }

    /// The picture with the stem of its file's name; `label` describes it for screen readers.
    pub fn finish(self, name: impl Into<String>, label: impl Into<String>) -> Picture {
        Picture { name: name.into(), label: label.into(), svg: self }
    }
}

impl Picture {
    /// The picture as an element of a page, in a box that scrolls where the page is narrower.
    pub fn html(&self) -> String {
        let label = escaped(&self.label);
        format!(
            "<div class=\"picture\" tabindex=\"0\" role=\"group\" aria-label=\"{label}\">\n{}</div>\n",
            self.element("", &self.svg.body)
        )
    }

    /// The picture as a file of its own.
    pub fn file(&self) -> String {
        let background = "<rect width=\"100%\" height=\"100%\" class=\"paper\"/>\n";
        self.element(&format!("<style>\n{STYLE}</style>\n{background}"), &self.svg.plain)
    }

    fn element(&self, before: &str, body: &str) -> String {
        let Svg { width, height, .. } = self.svg;
        let (width, height, label) = (Px(width), Px(height), escaped(&self.label));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" role=\"img\" aria-label=\"{label}\">\n{before}{body}</svg>\n"
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
