//! LaTeX output: `booktabs` tables, with escaped text.

use crate::report::{Cell, Column, Report, Table};

/// The tables, one `table` environment each. The machine is a comment, because a paper states it once.
pub fn report(report: &Report) -> String {
    let machine: String = super::machine_line(report).map(|line| format!("% {line}\n")).unwrap_or_default();
    let tables: Vec<String> = report.tables().map(table).collect();
    format!("% \\usepackage{{booktabs}}\n{machine}\n{}\n", tables.join("\n\n"))
}

/// A table with its caption, and a label from its name.
pub fn table(table: &Table) -> String {
    let alignment: String = table.columns.iter().map(|column| if column.numeric { 'r' } else { 'l' }).collect();
    let line = |cells: Vec<String>| format!("    {} \\\\", cells.join(" & "));
    let mut lines = vec![
        "\\begin{table}".to_string(),
        "  \\centering".to_string(),
        format!("  \\caption{{{}}}", escaped(&table.title)),
        format!("  \\label{{tab:{}}}", table.name),
        format!("  \\begin{{tabular}}{{{alignment}}}"),
        "    \\toprule".to_string(),
        line(table.columns.iter().map(|column| escaped(&column.heading())).collect()),
        "    \\midrule".to_string(),
    ];
    lines.extend(
        table.rows.iter().map(|row| line(table.columns.iter().zip(row).map(|(c, cell)| show(c, cell)).collect())),
    );
    lines.push("    \\bottomrule".to_string());
    lines.push("  \\end{tabular}".to_string());
    lines.extend(table.notes.iter().map(|note| format!("\n  {}", escaped(note))));
    lines.push("\\end{table}".to_string());
    lines.join("\n")
}

fn show(column: &Column, cell: &Cell) -> String {
    let shown = column.format(cell);
    match cell {
        Cell::Number(_) | Cell::MeanStd(..) | Cell::Integer(_) => number(&shown),
        Cell::Text(_) | Cell::Empty | Cell::NotApplicable | Cell::OutOfMemory => escaped(&shown),
    }
}

/// A number in math mode, with its power of ten written out.
fn number(shown: &str) -> String {
    let part = |text: &str| match text.split_once('e') {
        Some((digits, exponent)) if exponent.parse::<i32>().is_ok() => format!("{digits} \\cdot 10^{{{exponent}}}"),
        _ if text.contains(char::is_alphabetic) => format!("\\text{{{text}}}"),
        _ => text.to_string(),
    };
    let parts: Vec<String> = shown.split(" ± ").map(part).collect();
    format!("${}$", parts.join(" \\pm "))
}

/// Escapes text for LaTeX. Characters that its default fonts lack become commands.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => out.extend(['\\', c]),
            '\\' => out.push_str("\\textbackslash{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '<' => out.push_str("\\textless{}"),
            '>' => out.push_str("\\textgreater{}"),
            '|' => out.push_str("\\textbar{}"),
            '×' => out.push_str("$\\times$"),
            '·' => out.push_str("$\\cdot$"),
            '±' => out.push_str("$\\pm$"),
            'µ' => out.push_str("$\\mu$"),
            '²' => out.push_str("$^2$"),
            '≥' => out.push_str("$\\geq$"),
            '≤' => out.push_str("$\\leq$"),
            '≈' => out.push_str("$\\approx$"),
            '→' => out.push_str("$\\rightarrow$"),
            '√' => out.push_str("$\\surd$"),
            '–' => out.push_str("--"),
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
