//! The formats, one file each; every file has a function `report` or `table` that gives text.

pub mod data;
pub mod latex;
pub mod markdown;
pub mod text;

/// A sentence about the machine for the formats that have a line for it.
fn machine_line(report: &super::Report) -> Option<String> {
    report.machine.as_ref().map(super::Machine::line)
}
