//! Pictures over the ops of a function in order: shared memory and registers.

use tilewright_codegen::analysis::registers::{self, Point};
use tilewright_codegen::explain::{Partition, loops, partitions};
use tilewright_codegen::ir::{Func, Op, OpId};
use tilewright_codegen::lower::nvptx::{Contents, SharedMemory};

use super::svg::{Picture, Rect, Svg};
use super::{OpNames, plural};

const LEFT: f64 = 70.0;
const TOP: f64 = 12.0;
const PLOT: (f64, f64) = (880.0, 260.0);
/// Height of a row of loops or partitions below the axis.
const BAND: f64 = 18.0;

/// The ops of a function along the x axis.
pub struct OpAxis<'a> {
    func: &'a Func,
    names: &'a OpNames,
    order: Vec<OpId>,
}

impl<'a> OpAxis<'a> {
    pub fn new(func: &'a Func, names: &'a OpNames) -> OpAxis<'a> {
        OpAxis { func, names, order: func.walk() }
    }

    fn x(&self, position: usize) -> f64 {
        LEFT + PLOT.0 * position as f64 / self.order.len().max(1) as f64
    }

    fn position(&self, id: OpId) -> usize {
        self.order.iter().position(|&op| op == id).unwrap_or_default()
    }

    /// A picture with a y axis from 0 to `top`, marks at `marks`, and bands for partitions and loops below.
    fn frame(&self, top: f64, marks: &[(f64, String)]) -> Svg {
        let bands = self.bands();
        let rows = bands.iter().map(|band| band.row + 1).max().unwrap_or(0);
        let mut svg = Svg::new(LEFT + PLOT.0 + 90.0, TOP + PLOT.1 + 8.0 + BAND * (rows + 1) as f64);
        let bottom = TOP + PLOT.1;
        svg.line((LEFT, TOP), (LEFT, bottom), "axis");
        svg.line((LEFT, bottom), (LEFT + PLOT.0, bottom), "axis");
        for (value, label) in marks {
            let y = bottom - PLOT.1 * value / top;
            svg.line((LEFT - 4.0, y), (LEFT, y), "axis");
            svg.text(LEFT - 8.0, y + 4.0, "end small", label);
        }
        for band in bands {
            let (x, y) = (self.x(band.first), bottom + 6.0 + BAND * band.row as f64);
            let width = self.x(band.last + 1) - x;
            let (height, op, tooltip) = (BAND - 3.0, self.names.number(self.order[band.first]), band.name.as_str());
            svg.rect(&Rect { x, y, width, height, class: "band", op, tooltip });
            // About 6 pixels per character.
            if width > 6.0 * band.name.len() as f64 {
                svg.text(x + 4.0, y + 12.0, "small", &band.name);
            }
        }
        let y = bottom + 6.0 + BAND * rows as f64 + 12.0;
        svg.text(LEFT, y, "small", format!("{}, in the order of the text →", plural(self.order.len(), "op")));
        svg
    }

    /// Partitions in the first row, then loops by nesting.
    fn bands(&self) -> Vec<Band> {
        let mut bands: Vec<Band> = Vec::new();
        for (i, (_, partition)) in partitions(self.func).into_iter().enumerate() {
            if partition == Partition::All {
                continue;
            }
            match bands.last_mut() {
                Some(band) if band.name == partition.name() => band.last = i,
                _ => bands.push(Band { name: partition.name().to_string(), row: 0, first: i, last: i }),
            }
        }
        let row = usize::from(!bands.is_empty());
        let mut spans: Vec<(usize, usize)> = Vec::new();
        for (n, found) in loops(self.func).iter().enumerate() {
            let first = self.position(found.op);
            let inside = self.func.op(found.op).regions.iter().flat_map(|&region| self.func.walk_from(region));
            let last = inside.last().map_or(first, |id| self.position(id));
            let depth = spans.iter().filter(|(start, end)| *start < first && last <= *end).count();
            spans.push((first, last));
            bands.push(Band { name: format!("loop {}", n + 1), row: row + depth, first, last });
        }
        bands
    }

    /// The buffers in shared memory, over address and time.
    pub fn shared(&self, shared: &SharedMemory, limit: u32) -> Picture {
        let top = f64::from(limit.max(shared.bytes));
        let marks = [0, shared.bytes, limit].map(|bytes| (f64::from(bytes), kib(bytes)));
        let marks: Vec<_> = marks.into_iter().filter(|(at, _)| *at == top || top - at > top * 0.04).collect();
        let mut svg = self.frame(top, &marks);
        let bottom = TOP + PLOT.1;
        for part in &shared.parts {
            let (x, end) = (self.x(part.first), self.x(part.last + 1));
            let height = (PLOT.1 * f64::from(part.bytes) / top).max(3.0);
            let y = bottom - PLOT.1 * f64::from(part.offset) / top - height;
            let (class, what) = match part.contents {
                Contents::Buffer => ("cell c0", "buffer"),
                Contents::Ring => ("cell c1", "ring of asynchronous copies"),
                Contents::Mbarriers => ("cell c2", "mbarriers"),
                Contents::Scratch => ("cell c3", "scratch memory"),
                Contents::BulkReduction => ("cell c4", "operand of bulk reductions"),
            };
            let name = self.names.short(part.op);
            let tooltip = format!(
                "{what} of {name}: {} bytes at {}, live from op {} to {}",
                part.bytes, part.offset, part.first, part.last
            );
            let op = self.names.number(part.op);
            svg.rect(&Rect { x, y, width: (end - x).max(2.0), height, class, op, tooltip: &tooltip });
            let label = format!("{name}: {what}, {}", kib(part.bytes));
            if height >= 13.0 && end - x > 6.5 * label.len() as f64 {
                svg.text(x + 4.0, y + height / 2.0 + 4.0, "small cellno", label);
            }
        }
        let y = bottom - PLOT.1 * f64::from(limit) / top;
        svg.line((LEFT, y), (LEFT + PLOT.0, y), "limit");
        svg.text(LEFT + PLOT.0 + 4.0, y + 4.0, "small", "limit");
        svg.finish("shared-memory", "Shared memory by address and op")
    }

    /// The live registers at each op, with the limit of its partition.
    pub fn registers(&self, profile: &[Point], available: u32) -> Picture {
        let limits = self.limits(available);
        let peak = profile.iter().map(|point| point.live).max().unwrap_or(0);
        let top = f64::from(limits.iter().copied().chain([peak, 1]).max().unwrap_or(1)) * 1.05;
        let marks: Vec<(f64, String)> =
            (0..=4).map(|n| 64 * n).filter(|&n| f64::from(n) <= top).map(|n| (f64::from(n), n.to_string())).collect();
        let mut svg = self.frame(top, &marks);
        let bottom = TOP + PLOT.1;
        let width = (PLOT.0 / self.order.len().max(1) as f64).max(0.5);
        for point in profile.iter().filter(|point| point.live > 0) {
            let position = self.position(point.op);
            let height = PLOT.1 * f64::from(point.live) / top;
            let (class, what) = match point.is_sync_point {
                true if point.live > limits[position] => ("bar over", "held as a whole, above the limit"),
                true => ("bar", "held as a whole"),
                false => ("bar passing", "of live tiles; processed element by element"),
            };
            let tooltip = format!("{}: {} registers, {what}", self.names.short(point.op), point.live);
            let (x, op) = (self.x(position), self.names.number(point.op));
            svg.rect(&Rect { x, y: bottom - height, width, height, class, op, tooltip: &tooltip });
        }
        let mut start = 0;
        for end in 1..=limits.len() {
            if end == limits.len() || limits[end] != limits[start] {
                let y = bottom - PLOT.1 * f64::from(limits[start]) / top;
                svg.line((self.x(start), y), (self.x(end), y), "limit");
                if end - start > limits.len() / 12 {
                    svg.text(
                        (self.x(start) + self.x(end)) / 2.0,
                        y - 4.0,
                        "middle small",
                        format!("limit {}", limits[start]),
                    );
                }
                start = end;
            }
        }
        svg.finish("registers", "Live registers per thread by op")
    }

    /// The registers that a thread may use at each op.
    fn limits(&self, available: u32) -> Vec<u32> {
        let by_partition = self.order.iter().find_map(|&id| match &self.func.op(id).op {
            Op::WarpSpecialize { registers, .. } => match registers[..] {
                [consumer, producer] => Some((consumer, producer)),
                _ => None,
            },
            _ => None,
        });
        let of = |partition| match (partition, by_partition) {
            (Partition::Consumer, Some((consumer, _))) => consumer,
            (Partition::Producer, Some((_, producer))) => producer,
            (Partition::All | Partition::Consumer | Partition::Producer, _) => available,
        };
        partitions(self.func).into_iter().map(|(_, partition)| of(partition)).collect()
    }
}

/// A range of ops.
struct Band {
    name: String,
    row: usize,
    first: usize,
    last: usize,
}

fn kib(bytes: u32) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ => format!("{} KiB", (f64::from(bytes) / 102.4).round() / 10.0),
    }
}

/// The highest number of registers that the tiles need at once.
pub fn peak(profile: &[Point]) -> u32 {
    profile.iter().filter(|point| point.is_sync_point).map(|point| point.live).max().unwrap_or(0)
}

/// Registers available to a thread of a block of this many threads.
pub fn available(threads: u32, max_registers: Option<u32>) -> u32 {
    let available = registers::available(threads);
    max_registers.map_or(available, |most| most.min(available))
}
