//! Kernels whose programs walk down the rows of a matrix, each over its own, with sums of columns in registers.
//!
//! There are as many programs as a device runs at a time, so that few partial sums are left to add up.

use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// How rows are shared among programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    rows: usize,
    d_tile: usize,
    /// Programs beside each other, each with its own columns.
    across: usize,
    /// Of a GPU.
    processors: Option<usize>,
}

impl Walk {
    /// For `rows` rows, whose columns are shared by `across` programs with `d_tile` columns each.
    pub fn new(device: &Device, rows: usize, d_tile: usize, across: usize) -> Walk {
        let processors = device.is_cuda().then(|| device.info().processors as usize);
        Walk { rows, d_tile, across: across.max(1), processors }
    }

    /// Programs for tiles of that many rows. All have the same number of tiles, but for the last.
    pub fn programs(&self, rows_tile: usize) -> usize {
        let tiles = self.rows.div_ceil(rows_tile);
        tiles.div_ceil(tiles.div_ceil(self.limit(rows_tile)).max(1))
    }

    /// At least as many as there are programs, whatever the tile.
    pub fn most_programs(&self) -> usize {
        self.rows.min(self.limit(1))
    }

    fn limit(&self, rows_tile: usize) -> usize {
        /// Elements of the tiles that a multiprocessor works on at a time.
        const ELEMENTS: usize = 16384;
        /// On a CPU: the same on every machine, and with it the last bits of sums.
        const ON_CPU: usize = 64;
        let along = match self.processors {
            Some(processors) => processors * (ELEMENTS / (rows_tile * self.d_tile)).clamp(1, 8),
            None => ON_CPU,
        };
        along.div_ceil(self.across)
    }
}

/// Where nothing was measured: 16 elements a thread leave room for operands and sums of several programs. The key has
/// `d_tile` and `rows`.
pub(crate) fn default_walk(problem: &Problem) -> Config {
    const ELEMENTS: usize = 4096;
    let of = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let rows_tile = (ELEMENTS / of("d_tile")).clamp(1, of("rows").next_power_of_two());
    let num_warps = ((rows_tile * of("d_tile") / 512) as u32).clamp(4, 16);
    Config::default().set("rows_tile", rows_tile).num_warps(num_warps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_shared_evenly() {
        let programs = |rows, rows_tile| Walk::new(&Device::cpu(), rows, 16, 1).programs(rows_tile);
        assert_eq!([0, 1, 64, 65, 128].map(|rows| programs(rows, 1)), [0, 1, 64, 33, 64]);
        assert_eq!(programs(100, 4), 25);
        let gpu = Walk { rows: 50_000, d_tile: 1024, across: 1, processors: Some(132) };
        assert_eq!([1, 4, 16].map(|rows_tile| gpu.programs(rows_tile)), [1042, 521, 131]);
        assert_eq!(Walk { across: 8, ..gpu }.programs(4), 66);
    }

    #[test]
    fn there_is_room_for_all_programs() {
        for processors in [None, Some(2), Some(132)] {
            for (rows, across) in [(0, 1), (1, 3), (65, 1), (1000, 8), (50_000, 1)] {
                let walk = Walk { rows, d_tile: 64, across, processors };
                for rows_tile in [1, 2, 4, 8, 16, 64, 4096] {
                    let programs = walk.programs(rows_tile);
                    assert!(programs <= walk.most_programs(), "{programs} programs: {walk:?} by {rows_tile} rows");
                }
            }
        }
    }
}
