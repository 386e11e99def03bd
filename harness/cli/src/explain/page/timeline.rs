//! Pictures of predicted timelines: a row per group of warps and pipe, a bar per op.

use std::collections::HashMap;

use tilewright_codegen::analysis::pipes::Pipe;
use tilewright_codegen::explain::Scheduled;
use tilewright_codegen::explain::timeline::{Bar, SHOWN, Timeline};
use tilewright_codegen::ir::{Func, OpId};

use super::svg::{Picture, Rect, Svg};
use super::{OpNames, plural};
use crate::report::escaped;
use crate::report::{Cell, Column, Table};

const LEFT: f64 = 190.0;
const TOP: f64 = 22.0;
const PLOT: f64 = 860.0;
const ROW: f64 = 20.0;
/// Space between the rows of two groups.
const GAP: f64 = 8.0;
/// Average width of a character of a label.
const CHARACTER: f64 = 7.0;
/// Blocks of the SM that are drawn: the others run in the same way.
const BLOCKS: usize = 2;
/// Iterations of different colors.
const COLORS: i64 = 4;

type Schedule = HashMap<OpId, Scheduled>;

/// A part of the page for each loop.
pub fn section(func: &Func, timelines: &[Timeline], schedule: &Schedule, names: &OpNames) -> String {
    if timelines.is_empty() {
        return "<p>No innermost loop of the function has a timeline.</p>\n".to_string();
    }
    (0..timelines.len()).map(|n| part(func, n, timelines, schedule, names)).collect()
}

fn part(func: &Func, number: usize, timelines: &[Timeline], schedule: &Schedule, names: &OpNames) -> String {
    let of = &timelines[number];
    let busy: Vec<String> = of
        .busy
        .iter()
        .map(|(pipe, cycles)| format!("{} {cycles:.0} ({:.0} %)", pipe.name(), 100.0 * cycles / of.interval))
        .collect();
    format!(
        "<details{}>\n<summary>{}, <code>{}</code>: {:.0} cycles per iteration; bound by {}</summary>\n{}\
         <p class=\"note\">Cycles per iteration in which each pipe is busy: {}.</p>\n</details>\n",
        if number < 2 { " open" } else { "" },
        place(func, timelines, number),
        escaped(names.short(of.op)),
        of.interval,
        escaped(&of.bound_in_words()),
        picture(func, number, of, schedule, names).html(),
        escaped(&busy.join(", "))
    )
}

/// The line of loop `number`, and which of the loops of this line it is: the compiler splits loops.
fn place(func: &Func, timelines: &[Timeline], number: usize) -> String {
    let line = |of: &Timeline| func.op(of.op).loc.line;
    let own = &func.op(timelines[number].op).loc;
    let alike = |timelines: &[Timeline]| timelines.iter().filter(|of| line(of) == own.line).count();
    let place = if own.is_unknown() { "Loop".to_string() } else { format!("Loop, line {}", own.line) };
    match alike(timelines) {
        0 | 1 => place,
        all => format!("{place} ({} of {all})", alike(&timelines[..=number])),
    }
}

/// Intervals and bounds as a table.
pub fn table(func: &Func, timelines: &[Timeline]) -> Option<Table> {
    let columns = [
        Column::text("loop"),
        Column::integer("cycles per iteration").key("cycles"),
        Column::text("bound by").key("bound"),
    ];
    let mut table = Table::new("loops", "Predicted loops, on an SM at its peak rates", columns);
    for (number, of) in timelines.iter().enumerate() {
        table.push([
            place(func, timelines, number).into(),
            Cell::from(of.interval.round() as usize),
            of.bound_in_words().into(),
        ]);
    }
    let blocks = timelines.first().map_or(1, blocks);
    let note = format!(
        "For {} per SM: an iteration of each. A prediction from the compiled loop and the hardware's rates, not a \
         measurement.",
        plural(blocks, "block")
    );
    (!timelines.is_empty()).then(|| table.note(note))
}

/// The blocks of the SM.
fn blocks(of: &Timeline) -> usize {
    of.groups.iter().map(|group| group.block + 1).max().unwrap_or(1)
}

/// The timeline of a loop.
pub fn picture(func: &Func, number: usize, of: &Timeline, schedule: &Schedule, names: &OpNames) -> Picture {
    let rows = rows(of);
    let mut groups = 0;
    let bottom = rows.last().map_or(TOP, |row| row.y + ROW);
    let mut svg = Svg::new(LEFT + PLOT + 60.0, bottom + 44.0);
    let others = blocks(of).saturating_sub(BLOCKS);
    if others > 0 {
        svg.text(4.0, bottom + 29.0, "small", format!("and {}", plural(others, "more block")));
    }
    let x = |cycles: f64| LEFT + PLOT * cycles.clamp(0.0, of.length()) / of.length();
    for n in 0..=SHOWN {
        let at = of.interval * n as f64;
        svg.line((x(at), TOP - 4.0), (x(at), bottom + 2.0), "grid");
        let unit = if n == SHOWN { " cycles" } else { "" };
        svg.text(x(at), TOP - 8.0, "middle small", format!("{at:.0}{unit}"));
    }
    let mut last = None;
    for row in &rows {
        if last != Some(row.group) {
            last = Some(row.group);
            groups += 1;
            svg.text(4.0, row.y + 13.0, "small", of.group_name(row.group));
        }
        svg.text(
            LEFT - 6.0,
            row.y + 13.0,
            "end small",
            if row.pipe == Pipe::Barrier { "waits" } else { row.pipe.name() },
        );
        svg.line((LEFT, row.y + ROW), (LEFT + PLOT, row.y + ROW), "grid");
        for bar in of.bars.iter().filter(|bar| (bar.group, bar.pipe) == (row.group, row.pipe)) {
            let tooltip = tooltip(func, of, bar, schedule, names);
            draw(func, of, bar, (row.y, x(bar.begin), x(bar.end)), names.number(bar.op), &tooltip, &mut svg);
        }
    }
    legend(of, bottom + 18.0, &mut svg);
    let label = format!(
        "Predicted timeline of {SHOWN} iterations of a loop, {:.0} cycles each, for {}",
        of.interval,
        plural(groups, "group of warps")
    );
    svg.finish(format!("timeline-{}", number + 1), label)
}

struct Row {
    group: usize,
    pipe: Pipe,
    y: f64,
}

/// The rows with bars.
fn rows(of: &Timeline) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut y = TOP;
    for bar in of.bars.iter().filter(|bar| of.groups[bar.group].block < BLOCKS) {
        match rows.last() {
            Some(row) if (row.group, row.pipe) == (bar.group, bar.pipe) => continue,
            Some(row) if row.group != bar.group => y += GAP,
            _ => {}
        }
        rows.push(Row { group: bar.group, pipe: bar.pipe, y });
        y += ROW;
    }
    rows
}

fn draw(
    func: &Func,
    of: &Timeline,
    bar: &Bar,
    (y, begin, end): (f64, f64, f64),
    op: Option<u32>,
    tooltip: &str,
    svg: &mut Svg,
) {
    let color = (bar.iteration as i64 - of.first as i64).rem_euclid(COLORS);
    let waits = bar.pipe == Pipe::Barrier;
    let class = if waits { "wait".to_string() } else { format!("cell c{color}") };
    let (width, height) = ((end - begin).max(0.5), ROW - 4.0);
    svg.rect(&Rect { x: begin, y: y + 2.0, width, height, class: &class, op, tooltip });
    let name = func.op(bar.op).op.mnemonic();
    if width > CHARACTER * name.len() as f64 {
        svg.text((begin + end) / 2.0, y + 14.0, if waits { "middle small" } else { "middle cellno" }, name);
    }
}

/// An op's name, line and place in the schedule; then who runs it, where and when.
fn tooltip(func: &Func, of: &Timeline, bar: &Bar, schedule: &Schedule, names: &OpNames) -> String {
    let loc = &func.op(bar.op).loc;
    let line = if loc.is_unknown() { String::new() } else { format!(", line {}", loc.line) };
    let scheduled = schedule.get(&bar.op);
    let place = scheduled.map_or(String::new(), |at| format!(", stage {} order {}", at.stage, at.order));
    format!(
        "{}{line}{place}: {}, {}{}, {}, cycles {:.0} to {:.0}",
        names.short(bar.op),
        of.group_name(bar.group),
        if bar.pipe == Pipe::Barrier { "waits at the " } else { "" },
        bar.pipe.name(),
        iteration(of, bar.iteration),
        bar.begin,
        bar.end
    )
}

/// An iteration's name: `iteration i`, `iteration i+1`.
fn iteration(of: &Timeline, number: usize) -> String {
    match number as i64 - of.first as i64 {
        0 => "iteration i".to_string(),
        offset @ 1.. => format!("iteration i+{offset}"),
        offset => format!("iteration i−{}", -offset),
    }
}

/// The colors of the iterations whose ops the picture has.
fn legend(of: &Timeline, y: f64, svg: &mut Svg) {
    let ops = of.bars.iter().filter(|bar| bar.pipe != Pipe::Barrier && of.groups[bar.group].block < BLOCKS);
    let mut shown: Vec<usize> = ops.map(|bar| bar.iteration).collect();
    shown.sort_unstable();
    shown.dedup();
    let mut x = LEFT;
    for number in shown {
        let color = (number as i64 - of.first as i64).rem_euclid(COLORS);
        let class = format!("cell c{color}");
        svg.rect(&Rect { x, y, width: 14.0, height: 14.0, class: &class, op: None, tooltip: "" });
        svg.text(x + 20.0, y + 11.0, "small", iteration(of, number));
        x += 110.0;
    }
}
