//! Markdown output, in the dialect of GitHub.

use crate::report::{Part, Report, Table};

/// A page: title, machine, then the parts.
pub fn report(report: &Report) -> String {
    let mut parts = vec![format!("## {}", report.title)];
    parts.extend(super::machine_line(report));
    parts.extend(report.parts.iter().filter_map(|part| match part {
        Part::Table(table) if table.title != report.title => {
            Some(format!("### {}\n\n{}", table.title, self::table(table)))
        }
        Part::Table(table) => Some(self::table(table)),
        Part::Text(text) => Some(text.clone()),
        Part::Plot(_) | Part::Image { .. } => None,
    }));
    parts.join("\n\n") + "\n"
}

/// The table with its notes below.
pub fn table(table: &Table) -> String {
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let mut lines = vec![
        line(table.columns.iter().map(|column| escaped(&column.heading())).collect()),
        line(table.columns.iter().map(|column| if column.numeric { "---:" } else { "---" }.to_string()).collect()),
    ];
    for row in &table.rows {
        lines.push(line(table.columns.iter().zip(row).map(|(column, cell)| escaped(&column.format(cell))).collect()));
    }
    let notes: String = table.notes.iter().map(|note| format!("\n\n{note}")).collect();
    lines.join("\n") + &notes
}

/// Escapes text for a table cell, on one line.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '|' | '\\' | '*' | '_' | '<' | '`' => out.extend(['\\', c]),
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
