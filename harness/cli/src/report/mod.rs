//! Reports of measurements: tables, plots, and the machine that they come from.
//!
//! A command builds a [`Report`] of [`Table`]s and [`Plot`]s, and takes [`Outputs`] among its arguments; these print
//! the tables and write the requested files. Tables do not depend on formats, and formats do not depend on benchmarks.
//!
//! ```
//! use tilewright_cli::report::{Cell, Column, Report, Table};
//!
//! let mut table = Table::new("steps", "Time of a step", [
//!     Column::text("size"),
//!     Column::number("forward").unit("ms").decimals(2),
//! ]);
//! table.push([Cell::from("small"), Cell::mean_std(12.345, 0.5)]);
//! table.push([Cell::from("xl"), Cell::OutOfMemory]);
//! let report = Report::new("steps", "Time of a step").table(table);
//! assert!(report.to_markdown().contains("| small | 12.35 ± 0.50 |"));
//! ```
//!
//! In reading order: [`table`], the formats in `format`, [`plot`], `html`, [`machine`], [`outputs`].

mod format;
mod html;
pub mod machine;
pub mod outputs;
pub mod plot;
pub mod table;

pub use html::escaped;
pub use machine::Machine;
pub use outputs::{Error, Outputs};
pub use plot::{Axis, Bar, Plot, Point, Scale, Series};
pub use table::{Cell, Column, Table};

/// The results of one command.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Stem of the file names in an output folder: words joined by `-`.
    pub name: String,
    pub title: String,
    /// The machine of the measurement; [`Outputs::write`] fills it in.
    pub machine: Option<Machine>,
    pub parts: Vec<Part>,
    /// Sections that only the report's own HTML page has.
    pub interactive: Option<Interactive>,
}

/// Sections of an HTML page after the tables, with their own style and script. The caller escapes its text.
#[derive(Clone, Debug)]
pub struct Interactive {
    pub style: &'static str,
    pub body: String,
    pub script: &'static str,
}

/// One element of a [`Report`], in reading order.
#[derive(Clone, Debug)]
pub enum Part {
    Table(Table),
    Plot(Plot),
    /// A paragraph: introduces the next table or interprets the last one.
    Text(String),
    /// A complete SVG image from elsewhere, for example a flame graph.
    Image {
        name: String,
        title: String,
        svg: String,
    },
}

impl Report {
    pub fn new(name: &str, title: &str) -> Report {
        Report { name: name.to_string(), title: title.to_string(), ..Report::default() }
    }

    #[must_use]
    pub fn table(mut self, table: Table) -> Report {
        self.parts.push(Part::Table(table));
        self
    }

    #[must_use]
    pub fn plot(mut self, plot: Plot) -> Report {
        self.parts.push(Part::Plot(plot));
        self
    }

    #[must_use]
    pub fn text(mut self, text: impl Into<String>) -> Report {
        self.parts.push(Part::Text(text.into()));
        self
    }

    #[must_use]
    pub fn image(mut self, name: &str, title: &str, svg: String) -> Report {
        self.parts.push(Part::Image { name: name.to_string(), title: title.to_string(), svg });
        self
    }

    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.parts.iter().filter_map(|part| match part {
            Part::Table(table) => Some(table),
            Part::Plot(_) | Part::Text(_) | Part::Image { .. } => None,
        })
    }

    /// Names and SVG sources of plots and images.
    pub fn images(&self) -> Vec<(String, String)> {
        let image = |part: &Part| match part {
            Part::Plot(plot) => Some((plot.name.clone(), plot.to_svg())),
            Part::Image { name, svg, .. } => Some((name.clone(), svg.clone())),
            Part::Table(_) | Part::Text(_) => None,
        };
        self.parts.iter().filter_map(image).collect()
    }

    /// Formats for a terminal: a line for the machine, then texts and tables.
    pub fn to_text(&self) -> String {
        format::text::report(self)
    }

    /// JSON object with `name`, `title`, `machine`, `tables`, `plots` and `texts`. Numbers are JSON numbers; cells
    /// without a number are strings (`"OOM"`).
    pub fn to_json(&self) -> serde_json::Value {
        format::data::json(self)
    }

    /// Parses the output of [`Report::to_json`]. The parts of the report are its texts, then tables, then plots.
    ///
    /// # Errors
    /// Names the missing part.
    pub fn from_json(value: &serde_json::Value) -> Result<Report, String> {
        format::data::from_json(value)
    }

    pub fn to_markdown(&self) -> String {
        format::markdown::report(self)
    }

    /// Formats the tables for LaTeX, with the package `booktabs`.
    pub fn to_latex(&self) -> String {
        format::latex::report(self)
    }

    /// Formats as a self-contained HTML page.
    pub fn to_html(&self) -> String {
        html::page(&self.title, std::slice::from_ref(self))
    }
}

/// Several reports on one self-contained HTML page, with one description of the machine at the top.
pub fn to_html_page(title: &str, reports: &[Report]) -> String {
    html::page(title, reports)
}

#[cfg(test)]
mod tests;
