//! The sections of `tilewright explain --html`: what the compiler did to a kernel, for a reader who knows Triton.
//!
//! Pictures and tables are HTML and SVG, readable without JavaScript. `page.js` shows the IR after any two passes side
//! by side, from a block of JSON, and connects ops with their source lines. All text from the kernel is escaped.
//!
//! In reading order: this file (the page and its data), [`source`] (the kernel's source), [`svg`], [`timeline`],
//! [`layouts`], [`over_ops`] (shared memory and registers), [`loops`].

#[cfg(test)]
mod browser_tests;
mod layouts;
mod loops;
mod over_ops;
mod source;
mod svg;
#[cfg(test)]
mod tests;
mod timeline;

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use tilewright_codegen::analysis::registers;
use tilewright_codegen::explain::timeline::{self as prediction, Measured, Timeline, timelines};
use tilewright_codegen::explain::{IrLine, Trace};
use tilewright_codegen::ir::{Func, Op, OpId, Stage};
use tilewright_codegen::lower::nvptx::{SharedMemory, shared_memory};
use tilewright_codegen::target::GpuArch;
use tilewright_codegen::target::clocks::Event;

use self::over_ops::OpAxis;
use self::source::Sources;
pub use self::svg::Picture;
use super::occupancy::occupancy;
use crate::report::{Interactive, Table, escaped};

/// What the sections depend on besides the compilation's trace.
pub struct Settings {
    pub arch: GpuArch,
    /// Threads per block.
    pub threads: u32,
    pub max_registers: Option<u32>,
    /// The line of the kernel's function.
    pub kernel_line: u32,
    /// Clocks of a launch, by warpgroup; empty without one.
    pub clocks: Vec<Vec<Event>>,
}

/// A loop's timelines.
pub struct Loop {
    predicted: Timeline,
    measured: Option<Measured>,
}

/// The sections, and the source files that they show.
pub fn sections(trace: &Trace, settings: &Settings) -> (Interactive, Vec<PathBuf>) {
    let sources = Sources::of(trace, settings.kernel_line);
    let interactive = Interactive {
        style: concat!(include_str!("svg.css"), include_str!("page.css")),
        script: include_str!("page.js"),
        body: body(trace, settings, &sources),
    };
    (interactive, sources.paths())
}

fn body(trace: &Trace, settings: &Settings, sources: &Sources) -> String {
    let func = trace.last();
    let names = OpNames::new(trace);
    let shared = shared_memory(func, settings.arch);
    let limit = settings.arch.max_shared_bytes();
    let profile = registers::profile(func);
    let available = over_ops::available(settings.threads, settings.max_registers);
    let pictures = OpAxis::new(func, &names);
    let loops = timed_loops(trace, settings, &shared);
    filled(include_str!("page.html"), |name| match name {
        "source" => sources.html(),
        "final" => escaped(&indented(last_lines(trace))),
        "notes" => crate::compile::distinct(trace.notes()).map(|note| format!("<p>{}</p>\n", escaped(note))).collect(),
        "data" => script_data(&data(trace, sources)),
        "layouts" => layouts::section(func, &names),
        "shared-bytes" => shared.bytes.to_string(),
        "shared-limit" => limit.to_string(),
        "arch" => settings.arch.name().to_string(),
        "shared" => pictures.shared(&shared, limit).html(),
        "blocks" => plural(blocks_per_sm(func, settings, &shared) as usize, "block"),
        "timelines" => timeline::section(func, &loops, !settings.clocks.is_empty(), &trace.schedule(), &names),
        "kind" if settings.clocks.is_empty() => "Predicted, not measured: three".to_string(),
        "kind" => "Predicted, and measured below that: three".to_string(),
        "peak" => over_ops::peak(&profile).to_string(),
        "available" => available.to_string(),
        "registers" => pictures.registers(&profile, available).html(),
        "loops" => loops::section(func, &shared, &names),
        other => unreachable!("page.html names `{other}`"),
    })
}

/// All pictures of the page, with names that differ.
pub fn pictures(trace: &Trace, settings: &Settings) -> Vec<Picture> {
    let func = trace.last();
    let names = OpNames::new(trace);
    let shared = shared_memory(func, settings.arch);
    let available = over_ops::available(settings.threads, settings.max_registers);
    let axis = OpAxis::new(func, &names);
    let schedule = trace.schedule();
    let loops = timed_loops(trace, settings, &shared);
    let pictures = loops.iter().enumerate().flat_map(|(n, of)| timeline::pictures(func, n, of, &schedule, &names));
    let mut all: Vec<Picture> = pictures.collect();
    all.push(axis.shared(&shared, settings.arch.max_shared_bytes()));
    all.push(axis.registers(&registers::profile(func), available));
    all.extend(layouts::pictures(func));
    let mut used: HashMap<String, usize> = HashMap::new();
    for picture in &mut all {
        let count = used.entry(picture.name.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            picture.name += &format!("-{count}");
        }
    }
    all
}

/// The loops with timelines as a table.
pub fn loops_table(trace: &Trace, settings: &Settings) -> Option<Table> {
    let shared = shared_memory(trace.last(), settings.arch);
    timeline::table(trace.last(), &timed_loops(trace, settings, &shared), !settings.clocks.is_empty())
}

fn timed_loops(trace: &Trace, settings: &Settings, shared: &SharedMemory) -> Vec<Loop> {
    let func = trace.last();
    let clocks = &settings.clocks;
    let settings = prediction::Settings {
        arch: settings.arch,
        warps: settings.threads / 32,
        blocks: blocks_per_sm(func, settings, shared),
        barriers: shared.barriers.clone(),
        schedule: trace.schedule(),
    };
    let mut measured = prediction::measured(func, &settings, clocks);
    let with_clocks = |predicted: Timeline| {
        let own = measured.iter().position(|of| of.timeline.op == predicted.op);
        Loop { measured: own.map(|own| measured.swap_remove(own)), predicted }
    };
    timelines(func, &settings).into_iter().map(with_clocks).collect()
}

/// The blocks that an SM holds: an estimate that needs no assembler.
fn blocks_per_sm(func: &Func, settings: &Settings, shared: &SharedMemory) -> u32 {
    /// Registers per thread for addresses, counters and masks, which the estimate of tiles does not have.
    const OTHERS: u32 = 52;
    let launched = over_ops::available(settings.threads, settings.max_registers);
    let specialized = func.walk().into_iter().find_map(|id| match &func.op(id).op {
        // Consumers and four more warps; `setmaxnreg` moves registers between them.
        Op::WarpSpecialize { warps, registers, .. } => match registers[..] {
            [consumer, producer] => Some((consumer * warps + producer * 4).div_ceil(warps + 4)),
            _ => None,
        },
        _ => None,
    });
    let estimate = || (over_ops::peak(&registers::profile(func)) + OTHERS).next_multiple_of(8);
    let registers = specialized.unwrap_or_else(estimate).min(launched);
    occupancy(settings.arch, settings.threads, registers, shared.bytes).blocks.max(1)
}

/// Replaces each `{{name}}` of a template, in one pass: values may contain braces.
fn filled(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut parts = template.split("{{");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |page, part| match part.split_once("}}") {
        Some((name, rest)) => page + &value(name) + rest,
        None => page + "{{" + part,
    })
}

fn last_lines(trace: &Trace) -> &[IrLine] {
    trace.snapshots().last().map_or(&[], |last| &last.lines)
}

fn indented(lines: &[IrLine]) -> String {
    lines.iter().map(|line| format!("{}{}\n", "  ".repeat(line.depth), line.text)).collect()
}

/// The IR after each pass, for `page.js`. Texts, and functions that a pass did not change, are stored once.
fn data(trace: &Trace, sources: &Sources) -> Value {
    let (mut texts, mut index): (Vec<&str>, HashMap<&str, usize>) = Default::default();
    let mut bodies: Vec<Vec<Value>> = Vec::new();
    let mut passes = Vec::new();
    for snapshot in trace.snapshots() {
        let lines = snapshot.lines.iter().map(|line| {
            let text = *index.entry(&line.text).or_insert_with(|| {
                texts.push(&line.text);
                texts.len() - 1
            });
            match &line.op {
                Some(op) => match sources.place(&op.loc) {
                    Some((file, number)) => json!([text, line.depth, op.number, file, number]),
                    None => json!([text, line.depth, op.number]),
                },
                None => json!([text, line.depth]),
            }
        });
        let lines: Vec<Value> = lines.collect();
        if bodies.last() != Some(&lines) {
            bodies.push(lines);
        }
        let stage = match snapshot.stage {
            Stage::Tile => "tile",
            Stage::Layout => "layout",
            Stage::Schedule => "schedule",
            Stage::Async => "async",
        };
        passes.push(json!({ "name": snapshot.pass, "stage": stage, "body": bodies.len() - 1 }));
    }
    json!({ "passes": passes, "bodies": bodies, "texts": texts })
}

/// JSON for a `script` element: without characters that could end the element or begin a comment.
fn script_data(value: &Value) -> String {
    let text = value.to_string();
    text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// The ops of the last function: their numbers, and short names such as `%12 = wgmma`.
pub struct OpNames(HashMap<OpId, (u32, String)>);

impl OpNames {
    fn new(trace: &Trace) -> OpNames {
        let named = |line: &IrLine| line.op.as_ref().map(|op| (op.op, (op.number, short_name(&line.text))));
        OpNames(last_lines(trace).iter().filter_map(named).collect())
    }

    /// The number of an op in the trace, which identifies it on the page.
    fn number(&self, id: OpId) -> Option<u32> {
        self.0.get(&id).map(|(number, _)| *number)
    }

    fn short(&self, id: OpId) -> &str {
        self.0.get(&id).map_or("?", |(_, name)| name)
    }

    /// A link to an op in the IR.
    fn link(&self, id: OpId) -> String {
        let name = escaped(self.short(id));
        match self.number(id) {
            Some(number) => format!("<a href=\"#ir\" data-op=\"{number}\"><code>{name}</code></a>"),
            None => format!("<code>{name}</code>"),
        }
    }

    /// Links to the first of some ops.
    fn links(&self, ids: &[OpId]) -> String {
        const SHOWN: usize = 6;
        let links: Vec<String> = ids.iter().take(SHOWN).map(|&id| self.link(id)).collect();
        let more = match ids.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        links.join(", ") + &more
    }
}

/// The first result and the mnemonic of an op's line.
fn short_name(text: &str) -> String {
    let mnemonic = |text: &str| text.split(' ').next().unwrap_or_default().to_string();
    match text.split_once(" = ") {
        Some((results, rest)) if text.starts_with('%') => {
            let first = results.split(',').next().unwrap_or_default();
            format!("{first} = {}", mnemonic(rest))
        }
        _ => mnemonic(text),
    }
}

/// `1 warp`, `2 warps`.
fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
