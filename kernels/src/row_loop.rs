//! The row loop of kernels whose programs each loop over a contiguous range of rows and keep column sums in registers.
//!
//! The grid has as many programs as the device runs concurrently, so that few partial sums remain to be reduced by
//! [`column_sum`](crate::column_sum). The rows of a program do not depend on `rows_tile`: the autotuner can compare the
//! outputs of all configurations.

use crate::tensor::{floor_power_of_two, warps};
use tilewright_codegen::target::Target;
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// The partition of rows among programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLoop {
    pub programs: usize,
    /// Rows of every program but the last: a multiple of every configuration's `rows_tile`.
    pub rows_per_program: usize,
}

/// Elements of a tile, unless one row has more: 16 per thread of 256 threads leave registers for the operands and sums
/// of several resident programs.
const ELEMENTS: usize = 4096;
/// Largest `rows_tile` among the configurations.
const MAX_ROWS: usize = 16;

impl RowLoop {
    /// Partitions `rows` rows, whose columns are covered by `column_tiles` programs of `d_tile` columns each.
    pub fn new(device: &Device, rows: usize, d_tile: usize, column_tiles: usize) -> RowLoop {
        let sms = device.is_cuda().then(|| device.info().compute_units as usize);
        RowLoop::for_sms(sms, rows, d_tile, column_tiles)
    }

    fn for_sms(sms: Option<usize>, rows: usize, d_tile: usize, column_tiles: usize) -> RowLoop {
        // Elements of the tiles that are resident on an SM (streaming multiprocessor). Programs of wide rows are large
        // and write wide partial sums: with half as many programs, rms_norm_bwd of 4096 and 8192 columns in bf16 takes
        // 1 % less on an H200, and of 1024 columns 23 % more.
        let elements_per_sm = if d_tile < ELEMENTS { 4 * ELEMENTS } else { 2 * ELEMENTS };
        /// Programs on a CPU: a fixed number, so that sums have the same bits on every machine.
        const CPU_PROGRAMS: usize = 64;
        let max_programs = match sms {
            Some(sms) => sms * (elements_per_sm / d_tile.max(ELEMENTS)).max(1),
            None => CPU_PROGRAMS,
        };
        let rows_multiple = MAX_ROWS.max(ELEMENTS / d_tile);
        let rows_per_program = rows
            .div_ceil(max_programs.div_ceil(column_tiles.max(1)))
            .next_multiple_of(rows_multiple)
            .max(rows_multiple);
        RowLoop { programs: rows.div_ceil(rows_per_program), rows_per_program }
    }
}

/// The configuration where no tuning entry applies. The key has `d_tile` and `rows`.
///
/// Loads of the next tiles are prefetched into as many stages as shared memory holds, at most three: on an H200 that
/// took rows of 8192 from 84 to 94 % of the throughput of a copy.
pub(crate) fn default_row_loop(problem: &Problem) -> Config {
    /// Largest number of matrices that a kernel with a row loop reads.
    const INPUT_MATRICES: usize = 2;
    let size = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let rows_tile = floor_power_of_two(ELEMENTS / size("d_tile")).min(size("rows").next_power_of_two());
    let num_warps = warps(rows_tile * size("d_tile") / 512);
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let stages = match problem.target {
        Target::Nvptx(arch) => arch.max_shared_bytes() as usize / (INPUT_MATRICES * rows_tile * size("d_tile") * bytes),
        Target::Host(_) => 1,
    };
    Config::default().set("rows_tile", rows_tile).set("stages", stages.clamp(1, 3)).num_warps(num_warps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_cover_all_rows() {
        for sms in [None, Some(2), Some(132)] {
            for (rows, d_tile, column_tiles) in
                [(0, 16, 1), (1, 64, 3), (65, 8192, 1), (1000, 1024, 8), (50_000, 16, 1)]
            {
                let row_loop = RowLoop::for_sms(sms, rows, d_tile, column_tiles);
                assert!(row_loop.programs * row_loop.rows_per_program >= rows, "{row_loop:?}");
                assert!(
                    row_loop.programs * row_loop.rows_per_program < rows + row_loop.rows_per_program,
                    "{row_loop:?}"
                );
                let default = (ELEMENTS / d_tile).max(1);
                assert!(
                    [1, 2, 4, 8, 16, default].iter().all(|tile| row_loop.rows_per_program.is_multiple_of(*tile)),
                    "{row_loop:?}"
                );
            }
        }
        let programs = |d_tile, column_tiles| RowLoop::for_sms(Some(132), 50_000, d_tile, column_tiles).programs;
        assert_eq!([programs(1024, 1), programs(8192, 1), programs(1024, 8)], [521, 131, 66]);
    }
}
