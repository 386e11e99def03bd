//! Terminal output.

use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Style};

use crate::report::{Part, Report, Table};

/// Texts and tables in order.
pub fn report(report: &Report) -> String {
    let mut parts: Vec<String> = super::machine_line(report).into_iter().collect();
    parts.extend(report.parts.iter().filter_map(|part| match part {
        Part::Table(table) => Some(format!("{}\n{}", table.title, self::table(table))),
        Part::Text(text) => Some(wrapped(text, 100)),
        Part::Plot(_) | Part::Image { .. } => None,
    }));
    parts.join("\n\n") + "\n"
}

/// The table with its notes below.
pub fn table(table: &Table) -> String {
    let mut builder = Builder::default();
    builder.push_record(table.columns.iter().map(super::super::Column::heading));
    for row in &table.rows {
        builder.push_record(table.columns.iter().zip(row).map(|(column, cell)| column.format(cell)));
    }
    let mut grid = builder.build();
    grid.with(Style::sharp());
    for (i, column) in table.columns.iter().enumerate() {
        if column.numeric {
            grid.modify(Columns::one(i), Alignment::right());
        }
    }
    let notes: String = table.notes.iter().map(|note| format!("\n{}", wrapped(note, 100))).collect();
    format!("{grid}{notes}")
}

/// Wraps text at `width` characters where possible.
fn wrapped(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for paragraph in text.lines() {
        lines.push(String::new());
        for word in paragraph.split_whitespace() {
            let line = lines.last_mut().expect("a paragraph has a line");
            if line.is_empty() {
                line.push_str(word);
            } else if line.chars().count() + 1 + word.chars().count() <= width {
                line.push(' ');
                line.push_str(word);
            } else {
                lines.push(word.to_string());
            }
        }
    }
    lines.join("\n")
}
