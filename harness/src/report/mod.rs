//! What a measurement hands to people and to other programs: tables, plots, and the machine that they come from.
//!
//! A command makes a [`Report`] of [`Table`]s and [`Plot`]s, and takes [`Outputs`] among its arguments; those print the
//! tables and write the files that were asked for. A table knows nothing of formats, a format nothing of benchmarks.
//!
//! ```
//! use tilewright_harness::report::{Cell, Column, Report, Table};
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

pub use machine::Machine;
pub use outputs::{Error, Outputs};
pub use plot::{Axis, Bar, Plot, Point, Scale, Series};
pub use table::{Cell, Column, Table};

/// Everything that one command found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Start of the names of files in a folder of outputs: words joined by `-`.
    pub name: String,
    pub title: String,
    /// Where it was measured; commands fill it in through [`Outputs::write`].
    pub machine: Option<Machine>,
    pub parts: Vec<Part>,
}

/// One thing of a [`Report`], in the order in which it is read.
#[derive(Clone, Debug)]
pub enum Part {
    Table(Table),
    Plot(Plot),
    /// A paragraph: what the next table shows, or what follows from the last one.
    Text(String),
    /// A whole SVG image made elsewhere, a flame graph for example: its name and its source.
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

    /// For a terminal: the texts and tables. The machine is one line at the top.
    pub fn to_text(&self) -> String {
        format::text::report(self)
    }

    /// An object with `title`, `machine`, `tables`, `plots` and `texts`; numbers are numbers, whatever has none is a string (`"OOM"`).
    pub fn to_json(&self) -> serde_json::Value {
        format::data::json(self)
    }

    /// Reads what [`Report::to_json`] gave: texts, then tables, then plots.
    ///
    /// # Errors
    /// What is missing in it.
    pub fn from_json(value: &serde_json::Value) -> Result<Report, String> {
        format::data::from_json(value)
    }

    pub fn to_markdown(&self) -> String {
        format::markdown::report(self)
    }

    /// Tables for LaTeX with the package `booktabs`.
    pub fn to_latex(&self) -> String {
        format::latex::report(self)
    }

    /// One page that needs no other file.
    pub fn to_html(&self) -> String {
        html::page(&self.title, std::slice::from_ref(self))
    }
}

/// Several reports on one HTML page that needs no other file. The machine stands at the top, once.
pub fn to_html_page(title: &str, reports: &[Report]) -> String {
    html::page(title, reports)
}

#[cfg(test)]
mod tests;
