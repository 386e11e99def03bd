//! Output formats, one file each, each with functions `report` or `table` that return text.

pub mod data;
pub mod latex;
pub mod markdown;
pub mod text;

/// The line about the machine, for formats that have one.
fn machine_line(report: &super::Report) -> Option<String> {
    report.machine.as_ref().map(super::Machine::line)
}
