//! HTML output: one page with style, tables, and plots as inline SVG.

use std::fmt::Write;

use super::{Part, Report, Table};

const STYLE: &str = "\
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 3rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
thead th { border-top: 2px solid #1a1a1a; border-bottom: 1px solid #1a1a1a; text-align: left; }
tbody tr:last-child td { border-bottom: 2px solid #1a1a1a; }
td, th { padding: .15rem .7rem; }
.n { text-align: right; }
.note { color: #444; max-width: 50rem; }
.facts th { text-align: left; font-weight: 600; border: none; }
.facts td { border: none !important; }
svg, img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
nav ul { columns: 2; }
";

/// A page with title, machine, table of contents (for several reports), and the reports; a single report may have
/// interactive sections.
pub fn page(title: &str, reports: &[Report]) -> String {
    let mut out = String::new();
    let title = escaped(title);
    let interactive = match reports {
        [report] => report.interactive.as_ref(),
        _ => None,
    };
    let own_style = interactive.map_or("", |sections| sections.style);
    out += &format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>\n{STYLE}{own_style}</style>\n</head>\n\
         <body>\n<h1>{title}</h1>\n"
    );
    if let Some(machine) = reports.iter().find_map(|report| report.machine.as_ref()) {
        out += "<table class=\"facts\"><tbody>\n";
        for (name, value) in machine.facts() {
            out += &format!("<tr><th>{}</th><td>{}</td></tr>\n", escaped(name), escaped(&value));
        }
        out += "</tbody></table>\n";
    }
    if reports.len() > 1 {
        out += "<nav><ul>\n";
        for report in reports {
            out += &format!("<li><a href=\"#{}\">{}</a></li>\n", escaped(&report.name), escaped(&report.title));
        }
        out += "</ul></nav>\n";
    }
    for report in reports {
        if reports.len() > 1 {
            out += &format!("<h2 id=\"{}\">{}</h2>\n", escaped(&report.name), escaped(&report.title));
        }
        for part in &report.parts {
            out += &self::part(part);
        }
    }
    if let Some(sections) = interactive {
        out += &format!("{}<script>\n{}</script>\n", sections.body, sections.script);
    }
    out + "</body>\n</html>\n"
}

fn part(part: &Part) -> String {
    match part {
        Part::Text(text) => text.split("\n\n").map(|paragraph| format!("<p>{}</p>\n", escaped(paragraph))).collect(),
        Part::Table(table) => self::table(table),
        Part::Plot(plot) => format!("<div class=\"wide\">\n{}</div>\n", inline(&plot.to_svg())),
        Part::Image { title, svg, .. } => {
            let (title, data) = (escaped(title), percent_encoded(inline(svg)));
            format!("<h3>{title}</h3>\n<img alt=\"{title}\" src=\"data:image/svg+xml,{data}\">\n")
        }
    }
}

/// An SVG file without its XML prolog.
fn inline(svg: &str) -> &str {
    svg.find("<svg").map_or(svg, |start| &svg[start..])
}

/// Percent-encodes an image for a data URL, which isolates its scripts and ids from the page.
fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 5 / 4);
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z'
            | b'A'..=b'Z'
            | b'0'..=b'9'
            | b' '
            | b'='
            | b'/'
            | b':'
            | b';'
            | b','
            | b'.'
            | b'-'
            | b'_'
            | b'('
            | b')' => {
                out.push(char::from(byte));
            }
            byte => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

fn table(table: &Table) -> String {
    let mut out = format!("<div class=\"wide\"><table>\n<caption>{}</caption>\n<thead><tr>", escaped(&table.title));
    let class = |numeric: bool| if numeric { " class=\"n\"" } else { "" };
    for column in &table.columns {
        let _ = write!(out, "<th{}>{}</th>", class(column.numeric), escaped(&column.heading()));
    }
    out += "</tr></thead>\n<tbody>\n";
    for row in &table.rows {
        out += "<tr>";
        for (column, cell) in table.columns.iter().zip(row) {
            let _ = write!(out, "<td{}>{}</td>", class(column.numeric), escaped(&column.format(cell)));
        }
        out += "</tr>\n";
    }
    out += "</tbody>\n</table></div>\n";
    for note in &table.notes {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escaped(note));
    }
    out
}

/// Escapes text for HTML.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
