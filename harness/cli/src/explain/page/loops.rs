//! The ops of each loop in order, each in the column of its pipe.

use tilewright_codegen::analysis::pipes::Pipe;
use tilewright_codegen::explain::{Loop, LoopOp, loops};
use tilewright_codegen::ir::Func;
use tilewright_codegen::lower::nvptx::SharedMemory;

use super::{OpNames, plural};
use crate::report::escaped;

/// A table for each loop of the function.
pub fn section(func: &Func, shared: &SharedMemory, names: &OpNames) -> String {
    let found = loops(func);
    if found.is_empty() {
        return "<p>The function has no loops.</p>\n".to_string();
    }
    found.iter().enumerate().map(|(n, of)| table(func, n + 1, of, shared, names)).collect()
}

fn table(func: &Func, number: usize, of: &Loop, shared: &SharedMemory, names: &OpNames) -> String {
    let loc = &func.op(of.op).loc;
    let place = if loc.is_unknown() { String::new() } else { format!(", line {}", loc.line) };
    let mut out = format!(
        "<details open>\n<summary>Loop {number} ({}): <code>{}</code>{place}; {}</summary>\n\
         <div class=\"wide\" tabindex=\"0\" role=\"group\" aria-label=\"Loop {number}\"><table class=\"loop\">\n\
         <thead><tr><th class=\"n\">#</th>",
        of.partition.name(),
        escaped(names.short(of.op)),
        summary(of)
    );
    for pipe in Pipe::ALL {
        out += &format!("<th>{}</th>", pipe.name());
    }
    out += "<th class=\"n\">line</th></tr></thead>\n<tbody>\n";
    for (i, op) in of.ops.iter().enumerate() {
        if let Some(pipe) = op.pipe {
            let inserted = shared.barriers.contains(&op.op);
            out += &row(func, i + 1, op, pipe, inserted, names);
        }
    }
    out += "</tbody>\n</table></div>\n";
    let silent = of.ops.iter().filter(|op| op.pipe.is_none()).count();
    if silent > 0 {
        let silent = plural(silent, "op");
        out += &format!(
            "<p class=\"note\">Without {silent} that {} no instructions: constants and changes of shape.</p>\n",
            if silent == "1 op" { "has" } else { "have" }
        );
    }
    out + "</details>\n"
}

fn row(func: &Func, number: usize, op: &LoopOp, pipe: Pipe, inserted: bool, names: &OpNames) -> String {
    let mut out = format!("<tr><td class=\"n\">{number}</td>");
    for column in Pipe::ALL {
        let indent = "↳ ".repeat(op.depth);
        let own = if column == pipe { format!("{indent}{}", names.link(op.op)) } else { String::new() };
        let barrier = if inserted && column == Pipe::Barrier { "barrier before it " } else { "" };
        let class = if column == pipe { format!(" class=\"pipe p{}\"", column as usize) } else { String::new() };
        out += &format!("<td{class}>{barrier}{own}</td>");
    }
    let loc = &func.op(op.op).loc;
    let line = if loc.is_unknown() { String::new() } else { loc.line.to_string() };
    out + &format!("<td class=\"n\">{line}</td></tr>\n")
}

/// The number of ops by pipe: `4 MMA, 2 MUFU`.
fn summary(of: &Loop) -> String {
    let count = |pipe: Pipe| of.ops.iter().filter(|op| op.pipe == Some(pipe)).count();
    let counts = Pipe::ALL.map(|pipe| (pipe, count(pipe)));
    let parts: Vec<String> =
        counts.iter().filter(|(_, n)| *n > 0).map(|(pipe, n)| format!("{n} {}", pipe.name())).collect();
    parts.join(", ")
}
