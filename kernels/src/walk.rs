//! The row loop of kernels whose programs each loop over a contiguous range of rows and keep column sums in registers.
//!
//! The grid has as many programs as the device runs concurrently, so that few partial sums remain to be reduced by
//! [`column_sum`](crate::column_sum). The rows of a program do not depend on `rows_tile`: the autotuner can compare the
//! outputs of all configurations.

use tilewright_codegen::target::Target;
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// The partition of rows among programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub programs: usize,
    /// Rows of every program but the last: a multiple of every configuration's `rows_tile`.
    pub rows_each: usize,
}

/// Elements of a tile that is narrower than its rows: 16 per thread of 256 threads leave registers for the operands and
/// sums of several resident programs.
const ELEMENTS: usize = 4096;
/// Largest `rows_tile` among the configurations.
const MAX_ROWS: usize = 16;

impl Walk {
    /// Partitions `rows` rows, whose columns are covered by `across` programs of `d_tile` columns each.
    pub fn new(device: &Device, rows: usize, d_tile: usize, across: usize) -> Walk {
        let processors = device.is_cuda().then(|| device.info().processors as usize);
        Walk::on(processors, rows, d_tile, across)
    }

    fn on(processors: Option<usize>, rows: usize, d_tile: usize, across: usize) -> Walk {
        // Elements of the tiles that are resident on an SM (streaming multiprocessor). Programs of wide rows are large
        // and write wide partial sums: with half as many programs, rms_norm_bwd of 4096 and 8192 columns in bf16 takes
        // 1 % less on an H200, and of 1024 columns 23 % more.
        let at_a_time = if d_tile < ELEMENTS { 4 * ELEMENTS } else { 2 * ELEMENTS };
        /// Programs on a CPU: a fixed number, so that sums have the same bits on every machine.
        const ON_CPU: usize = 64;
        let most = match processors {
            Some(processors) => processors * (at_a_time / d_tile.max(ELEMENTS)).max(1),
            None => ON_CPU,
        };
        let unit = MAX_ROWS.max(ELEMENTS / d_tile);
        let rows_each = rows.div_ceil(most.div_ceil(across.max(1))).next_multiple_of(unit).max(unit);
        Walk { programs: rows.div_ceil(rows_each), rows_each }
    }
}

/// The configuration where no tuning entry applies. The key has `d_tile` and `rows`.
///
/// Loads of the next tiles are prefetched into as many stages as shared memory holds, at most three: on an H200 that
/// took rows of 8192 from 84 to 94 % of the throughput of a copy.
pub(crate) fn default_walk(problem: &Problem) -> Config {
    /// Largest number of matrices that a kernel with a row loop reads.
    const READ: usize = 2;
    let of = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let rows_tile = (ELEMENTS / of("d_tile")).clamp(1, of("rows").next_power_of_two());
    let num_warps = ((rows_tile * of("d_tile") / 512) as u32).clamp(4, 16);
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let stages = match problem.target {
        Target::Nvptx(arch) => arch.max_shared_bytes() as usize / (READ * rows_tile * of("d_tile") * bytes),
        Target::Host(_) => 1,
    };
    Config::default().set("rows_tile", rows_tile).set("stages", stages.clamp(1, 3)).num_warps(num_warps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_have_all_rows() {
        for processors in [None, Some(2), Some(132)] {
            for (rows, d_tile, across) in [(0, 16, 1), (1, 64, 3), (65, 8192, 1), (1000, 1024, 8), (50_000, 16, 1)] {
                let walk = Walk::on(processors, rows, d_tile, across);
                assert!(walk.programs * walk.rows_each >= rows, "{walk:?}");
                assert!(walk.programs * walk.rows_each < rows + walk.rows_each, "{walk:?}");
                let default = (ELEMENTS / d_tile).max(1);
                assert!([1, 2, 4, 8, 16, default].iter().all(|tile| walk.rows_each.is_multiple_of(*tile)), "{walk:?}");
            }
        }
        let of = |d_tile, across| Walk::on(Some(132), 50_000, d_tile, across).programs;
        assert_eq!([of(1024, 1), of(8192, 1), of(1024, 8)], [521, 131, 66]);
    }
}
