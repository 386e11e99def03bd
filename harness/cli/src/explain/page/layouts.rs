//! Pictures of layouts: the owner of each element of a tile in registers, and the bank of each element in shared
//! memory.

use std::fmt::Write;

use tilewright_codegen::explain::{LayoutUse, layouts};
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::layout::{Dim, InverseLayout, LinearLayout};

use super::svg::{Picture, Rect, Svg};
use super::{OpNames, plural};
use crate::report::escaped;

/// Elements (or words of shared memory) of a tile that are shown: a corner of it.
const MAX_ROWS: u32 = 16;
const MAX_COLUMNS: u32 = 32;
const CELL: (f64, f64) = (24.0, 18.0);
/// Left and top margin of a grid, for coordinates.
const MARGIN: (f64, f64) = (34.0, 18.0);
/// Number of colors in `page.css`.
const COLORS: u32 = 8;
/// Banks of shared memory, of four bytes each.
const BANKS: u32 = 32;
const BANK_BYTES: u32 = 4;

/// A part of the page for each layout of the function.
pub fn section(func: &Func, names: &OpNames) -> String {
    let uses = layouts(func);
    if uses.is_empty() {
        return "<p>The function has no tiles.</p>\n".to_string();
    }
    uses.iter().map(|of| layout(func, of, names)).collect()
}

fn layout(func: &Func, of: &LayoutUse, names: &OpNames) -> String {
    let layout = func.layout(of.layout);
    let shape = layout.shape().iter().map(u32::to_string).collect::<Vec<_>>().join("×");
    let name = format!("#l{}", of.layout.0);
    let places = Dim::ALL.iter().map(|&dim| layout.bits(dim)).sum::<usize>();
    let copies = (1usize << places) / layout.num_elements().max(1);
    let replicated = match copies {
        0 | 1 => String::new(),
        _ => format!("; each element is stored {copies} times, the first place is shown"),
    };
    let what = match of.elem {
        _ if !layout.is_surjective() => "incomplete".to_string(),
        None => {
            let registers = plural(layout.num_registers(), "element");
            format!("registers: {registers} per thread, {}{replicated}", plural(layout.num_warps(), "warp"))
        }
        Some(elem) => format!("shared memory, {elem}"),
    };
    let shown = grids(func, of).into_iter().map(|Grid { heading, picture, note }| {
        let note = if note.is_empty() { note } else { format!("<p class=\"note\">{note}</p>\n") };
        format!("<h4>{heading}</h4>\n{}{note}", picture.html())
    });
    let pictures: String = shown.collect();
    let mut out = format!(
        "<details{}>\n<summary><code>{name}</code> {shape}, {}</summary>\n{pictures}",
        if of.elem.is_some() || layout.num_warps() > 1 && layout.rank() > 1 { " open" } else { "" },
        escaped(&what)
    );
    let _ = writeln!(out, "<p class=\"note\"><code>{}</code></p>", escaped(&layout.to_string()));
    let _ = writeln!(out, "<p class=\"note\">Defined by {}.</p>\n</details>", names.links(&of.ops));
    out
}

/// A picture with the text around it.
struct Grid {
    heading: String,
    picture: Picture,
    /// Empty if all of the tile is shown.
    note: String,
}

/// The pictures of all layouts, named by what they show.
pub fn pictures(func: &Func) -> Vec<Picture> {
    layouts(func).iter().flat_map(|of| grids(func, of)).map(|grid| grid.picture).collect()
}

fn grids(func: &Func, of: &LayoutUse) -> Vec<Grid> {
    let layout = func.layout(of.layout);
    let shape = layout.shape().iter().map(u32::to_string).collect::<Vec<_>>().join("x");
    let op = of.ops.first().map_or("tile", |&id| func.op(id).op.mnemonic());
    match of.elem {
        _ if !layout.is_surjective() => Vec::new(),
        None => {
            let name = format!("registers-{shape}-{op}");
            overview(layout, &name).into_iter().chain([owners(layout, &name)]).collect()
        }
        Some(elem) => vec![banks(layout, elem, &format!("shared-{shape}-{elem}"))],
    }
}

/// How the coordinates of a tile are arranged on a page: the last two axes, or rows of a one-dimensional tile.
struct Sheet {
    rows: u32,
    columns: u32,
    /// The axis along a row; the rows of a tile of two or more axes are along another one.
    column_axis: usize,
    row_axis: Option<usize>,
    rank: usize,
}

impl Sheet {
    fn new(layout: &LinearLayout, column_axis: usize) -> Sheet {
        let (shape, rank) = (layout.shape(), layout.rank());
        match rank {
            0 | 1 => {
                let extent = shape.first().copied().unwrap_or(1);
                let columns = extent.min(MAX_COLUMNS);
                Sheet { rows: extent / columns, columns, column_axis: 0, row_axis: None, rank }
            }
            _ => {
                let row_axis = if column_axis == rank - 1 { rank - 2 } else { rank - 1 };
                let (rows, columns) = (shape[row_axis], shape[column_axis]);
                Sheet { rows, columns, column_axis, row_axis: Some(row_axis), rank }
            }
        }
    }

    fn coordinates(&self, row: u32, column: u32) -> Vec<u32> {
        let mut at = vec![0; self.rank];
        match self.row_axis {
            Some(axis) => (at[axis], at[self.column_axis]) = (row, column),
            None => at.iter_mut().for_each(|at| *at = row * self.columns + column),
        }
        at
    }

    /// What the page shows of the tile, if not all of it.
    fn note(&self, layout: &LinearLayout, rows: u32, columns: u32) -> String {
        let mut notes = Vec::new();
        if rows < self.rows || columns < self.columns {
            notes.push(format!("the first {rows} of {} rows and {columns} of {} columns", self.rows, self.columns));
        }
        if self.rank > 2 {
            let axes = format!("axes {} and {}", self.row_axis.unwrap_or_default(), self.column_axis);
            notes.push(format!("{axes} of shape {:?}, at 0 of the other axes", layout.shape()));
        }
        if self.rank > 1 && self.column_axis != self.rank - 1 {
            notes.push(format!("axis {}, which is contiguous in memory, from left to right", self.column_axis));
        }
        match notes.is_empty() {
            true => String::new(),
            false => format!("Shown: {}.", notes.join("; ")),
        }
    }
}

fn coordinates(at: &[u32]) -> String {
    at.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Row and column numbers at the margin.
fn axes(svg: &mut Svg, rows: u32, columns: u32, step: u32) {
    for row in 0..rows {
        let y = MARGIN.1 + (f64::from(row) + 0.7) * CELL.1;
        svg.text(MARGIN.0 - 6.0, y, "end small", row);
    }
    for column in (0..columns).step_by(if columns > 8 { 4 } else { 1 }) {
        let x = MARGIN.0 + (f64::from(column) + 0.5) * CELL.0;
        svg.text(x, MARGIN.1 - 5.0, "middle small", column * step);
    }
}

/// The warps of the whole tile.
fn overview(layout: &LinearLayout, name: &str) -> Option<Grid> {
    const SIDE: f64 = 192.0;
    let sheet = Sheet::new(layout, layout.rank().saturating_sub(1));
    let inverse = layout.pseudo_invert();
    if layout.num_warps() == 1 || sheet.row_axis.is_none() || (sheet.rows <= MAX_ROWS && sheet.columns <= MAX_COLUMNS) {
        return None;
    }
    // The largest boxes whose elements have the same warp: a warp bit changes at every multiple of them.
    let warp_at = |row: u32, column: u32| inverse.apply(&sheet.coordinates(row, column)).warp;
    let side = |extent: u32, at: &dyn Fn(u32) -> u32| {
        (0..extent.ilog2()).map(|bit| 1 << bit).find(|&step| at(step) != 0).unwrap_or(extent)
    };
    let height = side(sheet.rows, &|row| warp_at(row, 0));
    let width = side(sheet.columns, &|column| warp_at(0, column));
    let (across, down) = (sheet.columns / width, sheet.rows / height);
    let (cell_width, cell_height) = ((SIDE / f64::from(across)).max(CELL.0), (SIDE / f64::from(down)).max(CELL.1));
    let (all, across, down) = (across * down, across.min(MAX_COLUMNS), down.min(MAX_ROWS));
    let mut svg = Svg::new(f64::from(across) * cell_width + 2.0, f64::from(down) * cell_height + 2.0);
    for row in 0..down {
        for column in 0..across {
            let warp = warp_at(row * height, column * width);
            let (x, y) = (1.0 + f64::from(column) * cell_width, 1.0 + f64::from(row) * cell_height);
            let tooltip = format!(
                "rows {} to {}, columns {} to {}: warp {warp}",
                row * height,
                (row + 1) * height - 1,
                column * width,
                (column + 1) * width - 1
            );
            let class = format!("cell c{}", warp % COLORS);
            svg.rect(&Rect {
                x,
                y,
                width: cell_width,
                height: cell_height,
                class: &class,
                op: None,
                tooltip: &tooltip,
            });
            svg.text(x + cell_width / 2.0, y + cell_height / 2.0 + 4.0, "middle cellno", warp);
        }
    }
    let shown = match across * down {
        shown if shown < all => format!(" ({shown} of {all} blocks)"),
        _ => String::new(),
    };
    let heading = format!("Warps of the tile, in blocks of {height}×{width} elements{shown}");
    let picture = svg.finish(format!("{name}-warps"), heading.clone());
    Some(Grid { heading, picture, note: String::new() })
}

/// The lane of each element, colored by warp.
fn owners(layout: &LinearLayout, name: &str) -> Grid {
    let sheet = Sheet::new(layout, layout.rank().saturating_sub(1));
    let inverse = layout.pseudo_invert();
    let (rows, columns) = (sheet.rows.min(MAX_ROWS), sheet.columns.min(MAX_COLUMNS));
    let cell = |row, column| {
        let at = sheet.coordinates(row, column);
        let place = inverse.apply(&at);
        let tooltip = format!(
            "element [{}]: warp {}, lane {}, register {}",
            coordinates(&at),
            place.warp,
            place.lane,
            place.register
        );
        (place.warp % COLORS, place.lane, tooltip)
    };
    let heading = "Lane of each element, colored by warp".to_string();
    let picture = grid(rows, columns, 1, cell).finish(name, heading.clone());
    Grid { heading, picture, note: sheet.note(layout, rows, columns) }
}

/// The bank of each word of a shared buffer.
fn banks(layout: &LinearLayout, elem: DType, name: &str) -> Grid {
    let contiguous = layout.bases(Dim::Offset).first().and_then(|basis| basis.iter().position(|&step| step != 0));
    let sheet = Sheet::new(layout, contiguous.unwrap_or_default());
    let inverse: InverseLayout = layout.pseudo_invert();
    let bytes = elem.bytes() as u32;
    let per_word = (BANK_BYTES / bytes).max(1).min(sheet.columns);
    let (rows, words) = (sheet.rows.min(MAX_ROWS), (sheet.columns / per_word).min(MAX_COLUMNS));
    let cell = |row, word: u32| {
        let at = sheet.coordinates(row, word * per_word);
        let address = inverse.apply(&at).offset * bytes;
        let bank = address / BANK_BYTES % BANKS;
        let tooltip = format!("element [{}]: byte {address} of the buffer, bank {bank}", coordinates(&at));
        // Chunks of 16 bytes are what a swizzle permutes.
        (bank / (16 / BANK_BYTES) % COLORS, bank, tooltip)
    };
    let heading = format!(
        "Bank of each {BANK_BYTES}-byte word ({}), colored by 16-byte chunk of the {BANKS} banks",
        plural(per_word as usize, "element")
    );
    let picture = grid(rows, words, per_word, cell).finish(name, heading.clone());
    Grid { heading, picture, note: sheet.note(layout, rows, words * per_word) }
}

/// A grid whose cells have a color, a number and a tooltip. Columns are numbered in steps of `step`.
fn grid(rows: u32, columns: u32, step: u32, cell: impl Fn(u32, u32) -> (u32, u32, String)) -> Svg {
    let mut svg = Svg::new(MARGIN.0 + f64::from(columns) * CELL.0 + 2.0, MARGIN.1 + f64::from(rows) * CELL.1 + 2.0);
    axes(&mut svg, rows, columns, step);
    for row in 0..rows {
        for column in 0..columns {
            let (color, number, tooltip) = cell(row, column);
            let (x, y) = (MARGIN.0 + f64::from(column) * CELL.0, MARGIN.1 + f64::from(row) * CELL.1);
            let class = format!("cell c{color}");
            svg.rect(&Rect { x, y, width: CELL.0, height: CELL.1, class: &class, op: None, tooltip: &tooltip });
            svg.text(x + CELL.0 / 2.0, y + CELL.1 * 0.7, "middle cellno", number);
        }
    }
    svg
}
