//! Pictures of predicted and measured timelines: a row per group of warps and pipe, a bar per op.

use std::collections::HashMap;

use tilewright_codegen::analysis::pipes::Pipe;
use tilewright_codegen::explain::timeline::{Bar, Measured, SHOWN, Timeline};
use tilewright_codegen::explain::{Partition, Scheduled};
use tilewright_codegen::ir::{Func, OpId};

use super::svg::{Picture, Rect, Svg};
use super::{Loop, OpNames, plural};
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
const COLORS: i64 = 8;

type Schedule = HashMap<OpId, Scheduled>;

/// A part of the page for each loop.
pub fn section(func: &Func, loops: &[Loop], has_clocks: bool, schedule: &Schedule, names: &OpNames) -> String {
    if loops.is_empty() {
        return "<p>No innermost loop of the function has a timeline.</p>\n".to_string();
    }
    (0..loops.len()).map(|n| part(func, n, loops, has_clocks, schedule, names)).collect()
}

fn part(func: &Func, number: usize, loops: &[Loop], has_clocks: bool, schedule: &Schedule, names: &OpNames) -> String {
    let Loop { predicted: of, measured } = &loops[number];
    let busy: Vec<String> = of
        .busy
        .iter()
        .map(|(pipe, cycles)| format!("{} {cycles:.0} ({:.0} %)", pipe.name(), 100.0 * cycles / of.interval))
        .collect();
    format!(
        "<details{}>\n<summary>{}, <code>{}</code>: {:.0} cycles per iteration; bound by {}</summary>\n{}\
         <p class=\"note\">Cycles per iteration in which each pipe is busy: {}.</p>\n{}</details>\n",
        if number < 2 { " open" } else { "" },
        place(func, loops, number),
        escaped(names.short(of.op)),
        of.interval,
        escaped(&of.bound_in_words()),
        picture(func, number, of, false, schedule, names).html(),
        escaped(&busy.join(", ")),
        match measured {
            Some(_) => measured_part(func, number, &loops[number], schedule, names),
            None if has_clocks => {
                format!("<p>Not measured: it ran for fewer than {} iterations in this block.</p>\n", SHOWN + 1)
            }
            None => String::new(),
        }
    )
}

/// The measured timeline of a loop, with what it adds to the prediction.
fn measured_part(func: &Func, number: usize, loops: &Loop, schedule: &Schedule, names: &OpNames) -> String {
    let Loop { predicted, measured: Some(Measured { timeline, iterations, mean }) } = loops else {
        return String::new();
    };
    let who = match timeline.groups[0].partition {
        Partition::All => "The first warp of the block waits",
        Partition::Consumer | Partition::Producer => "Consumers wait",
    };
    let products = match tensor_cores(predicted, *mean) {
        None => String::new(),
        Some(share) => format!(" The products take {share:.0} % of the time of the tensor cores, at their peak rate."),
    };
    let absent: Vec<String> = (0..timeline.groups.len())
        .filter(|&group| timeline.bars.iter().all(|bar| bar.group != group))
        .map(|group| timeline.group_name(group))
        .collect();
    let absent = match absent.is_empty() {
        true => String::new(),
        false => format!(" Not in this loop meanwhile: {}.", absent.join(", ")),
    };
    format!(
        "<p>Measured: {mean:.0} cycles per iteration, on average over {}. In the three that are shown: {} cycles each. \
         {who} for {:.0} % of them.{products}{absent}</p>\n{}\
         <p class=\"note\">The first warp of each warpgroup of one block recorded clocks where it waits, and where it \
         starts products and copies. What is between two of these is one bar of arithmetic, with the op that would take \
         longest there; it includes loads, stores and the barriers inside of ops. A wgmma has its bar until its wait has \
         ended: it may have completed before. Recording adds a few instructions to each event.</p>\n",
        plural(*iterations, "iteration"),
        timeline.interval.round(),
        100.0 * waits(timeline) / timeline.interval,
        picture(func, number, timeline, true, schedule, names).html()
    )
}

/// The percentage of a measured time for which the matrix products of an iteration keep the tensor cores busy.
fn tensor_cores(predicted: &Timeline, cycles: f64) -> Option<f64> {
    let blocks = blocks(predicted) as f64;
    let busy = predicted.busy.iter().find(|(pipe, _)| *pipe == Pipe::Mma)?.1;
    (blocks == 1.0).then_some(100.0 * busy / cycles)
}

/// The cycles of an iteration that a warpgroup waits.
fn waits(measured: &Timeline) -> f64 {
    measured.busy.iter().find(|(pipe, _)| *pipe == Pipe::Barrier).map_or(0.0, |(_, cycles)| *cycles)
}

/// The line of loop `number`, and which of the loops of this line it is: the compiler splits loops.
fn place(func: &Func, loops: &[Loop], number: usize) -> String {
    let line = |of: &Loop| func.op(of.predicted.op).loc.line;
    let own = &func.op(loops[number].predicted.op).loc;
    let alike = |loops: &[Loop]| loops.iter().filter(|of| line(of) == own.line).count();
    let place = if own.is_unknown() { "Loop".to_string() } else { format!("Loop, line {}", own.line) };
    match alike(loops) {
        0 | 1 => place,
        all => format!("{place} ({} of {all})", alike(&loops[..=number])),
    }
}

/// Intervals and bounds as a table.
pub fn table(func: &Func, loops: &[Loop], has_clocks: bool) -> Option<Table> {
    let columns = [
        Column::text("loop"),
        Column::integer("cycles per iteration").key("cycles"),
        Column::text("bound by").key("bound"),
        Column::integer("measured cycles").key("measured_cycles"),
        Column::number("waiting").unit("%").key("measured_waiting"),
        Column::integer("iterations").key("measured_iterations"),
    ];
    let is_measured = loops.iter().any(|of| of.measured.is_some());
    let title =
        if is_measured { "Loops, predicted and measured" } else { "Predicted loops, on an SM at its peak rates" };
    let mut table = Table::new("loops", title, columns);
    for (number, Loop { predicted, measured }) in loops.iter().enumerate() {
        table.push([
            place(func, loops, number).into(),
            Cell::from(predicted.interval.round() as usize),
            predicted.bound_in_words().into(),
            Cell::from(measured.as_ref().map(|of| of.mean.round() as usize)),
            Cell::from(measured.as_ref().map(|of| 100.0 * waits(&of.timeline) / of.timeline.interval)),
            Cell::from(measured.as_ref().map(|of| of.iterations)),
        ]);
    }
    let table = table.without_empty_columns();
    let blocks = loops.first().map_or(1, |of| blocks(&of.predicted));
    let note = format!(
        "For {} per SM: an iteration of each. A prediction from the compiled loop and the hardware's rates, not a \
         measurement.",
        plural(blocks, "block")
    );
    let clocks = match (is_measured, has_clocks) {
        (true, _) => {
            "Measured: cycles from one iteration of the block to the next, on average over the iterations of the \
                      loop's longest run; and the time for which consumers wait. --html shows more."
                .to_string()
        }
        (false, true) => format!("No loop ran for {} iterations in the block whose clocks were recorded.", SHOWN + 1),
        (false, false) => String::new(),
    };
    let table = table.note(note);
    let table = if clocks.is_empty() { table } else { table.note(clocks) };
    (!loops.is_empty()).then_some(table)
}

/// The blocks of the SM.
fn blocks(of: &Timeline) -> usize {
    of.groups.iter().map(|group| group.block + 1).max().unwrap_or(1)
}

/// The timelines of a loop.
pub fn pictures(func: &Func, number: usize, of: &Loop, schedule: &Schedule, names: &OpNames) -> Vec<Picture> {
    let measured = of.measured.iter().map(|of| (&of.timeline, true));
    let all = std::iter::once((&of.predicted, false)).chain(measured);
    all.map(|(of, is_measured)| picture(func, number, of, is_measured, schedule, names)).collect()
}

fn picture(
    func: &Func,
    number: usize,
    of: &Timeline,
    is_measured: bool,
    schedule: &Schedule,
    names: &OpNames,
) -> Picture {
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
            match row.pipe {
                Pipe::Barrier => "waits",
                Pipe::Alu if is_measured => "arithmetic",
                pipe => pipe.name(),
            },
        );
        svg.line((LEFT, row.y + ROW), (LEFT + PLOT, row.y + ROW), "grid");
        let bars = of.bars.iter().filter(|bar| (bar.group, bar.pipe) == (row.group, row.pipe));
        let bars: Vec<&Bar> = bars.collect();
        for (n, bar) in bars.iter().enumerate() {
            // The next one covers the end of one that overlaps with it.
            let seen = bars.get(n + 1).map_or(bar.end, |next| next.begin.min(bar.end));
            let tooltip = tooltip(func, of, bar, is_measured, schedule, names);
            let place = (row.y, [bar.begin, bar.end, seen].map(x));
            draw(func, of, bar, place, names.number(bar.op), &tooltip, &mut svg);
        }
    }
    legend(of, bottom + 18.0, &mut svg);
    let (kind, name) = if is_measured { ("Measured", "measured") } else { ("Predicted", "timeline") };
    let label = format!(
        "{kind} timeline of {SHOWN} iterations of a loop, {:.0} cycles each, for {} of warps",
        of.interval,
        plural(groups, "group")
    );
    svg.finish(format!("{name}-{}", number + 1), label)
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
    (y, [begin, end, seen]): (f64, [f64; 3]),
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
    if seen - begin > CHARACTER * name.len() as f64 {
        svg.text((begin + seen) / 2.0, y + 14.0, if waits { "middle small" } else { "middle cellno" }, name);
    }
}

/// An op's name, line and place in the schedule; then who runs it, where and when.
fn tooltip(func: &Func, of: &Timeline, bar: &Bar, is_measured: bool, schedule: &Schedule, names: &OpNames) -> String {
    let loc = &func.op(bar.op).loc;
    let line = if loc.is_unknown() { String::new() } else { format!(", line {}", loc.line) };
    let scheduled = schedule.get(&bar.op);
    let place = scheduled.map_or(String::new(), |at| format!(", stage {} order {}", at.stage, at.order));
    format!(
        "{}{line}{place}: {}, {}{}, {}, cycles {:.0} to {:.0}",
        names.short(bar.op),
        of.group_name(bar.group),
        if bar.pipe == Pipe::Barrier { "waits at the " } else { "" },
        if is_measured && bar.pipe == Pipe::Alu { "arithmetic" } else { bar.pipe.name() },
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
