//! Sums over ranks: the reduction that SMs compute after copy engines have gathered the inputs of all ranks.

use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// y[i] = Σᵣ inputᵣ[i] in the order of ranks r = 0, 1, …, or their average.
///
/// The sum is accumulated in f32 and rounded once. With `average` it is multiplied by 1 / `world` before the rounding,
/// which is exact for a power of two. The input of `rank` is the previous content of y; the inputs of the other ranks
/// are the rows of x [world − 1, n], in rank order. With `write_copy` the result is also written to `copy`.
///
/// One program per tile; a smaller grid loops over tiles with a stride of the grid size.
#[kernel]
#[alias(copies = write_copy, has_copy = write_copy)]
pub fn rank_sum<T: Float>(
    y: InOut<T>,
    x: In<T>,
    copy: Out<T>,
    x_stride_rank: i64,
    n: i64,
    #[constexpr] tile: usize,
    #[constexpr] rank: usize,
    #[constexpr] world: usize,
    #[constexpr = false] average: bool,
    #[constexpr = false] write_copy: bool,
) {
    let first = program_id(0).to::<i64>() * tile;
    for start in range(first, n, num_programs(0).to::<i64>() * tile) {
        let offsets = start + arange(0, tile);
        let inside = offsets < n;
        // Starts from the first input, not from zero: a sum of negative zeros is a negative zero.
        let mut total =
            if rank == 0 { load(y + offsets, mask = inside) } else { load(x + offsets, mask = inside) }.to::<f32>();
        for r in static_range(1, world) {
            if r == rank {
                total = total + load(y + offsets, mask = inside).to::<f32>();
            } else {
                let slot: usize = if r < rank { r } else { r - 1 };
                total = total + load(x + x_stride_rank * slot + offsets, mask = inside).to::<f32>();
            }
        }
        if average {
            total = total * (1.0 / world as f32);
        }
        store(y + offsets, total.to::<T>(), mask = inside);
        if write_copy {
            store(copy + offsets, total.to::<T>(), mask = inside);
        }
    }
}

/// The reduction that a rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankReduction {
    /// The rank whose input is in y.
    pub rank: usize,
    /// Number of ranks, and so of inputs.
    pub world: usize,
    /// Divide the sum by `world`.
    pub average: bool,
}

/// Bytes of a program's tile: four 16-byte vectors for each of 128 threads.
const TILE_BYTES: usize = 8192;

/// Sets y, and `copy` if given, to the sum or average of y and the inputs of the other ranks, which begin at multiples
/// of `stride` elements in x. The grid has at most `max_programs` programs, if given.
///
/// # Errors
/// A rank outside of the world; x too short; a copy of another length; tensors on another device; launch errors.
pub fn reduce<T: FloatElement>(
    device: &Device,
    mut y: ViewMut<'_, T>,
    (x, stride): (View<'_, T>, usize),
    copy: Option<ViewMut<'_, T>>,
    ranks: RankReduction,
    max_programs: Option<usize>,
) -> Result<()> {
    const NAME: &str = "rank_sum";
    let RankReduction { rank, world, average } = ranks;
    let (n, write_copy) = (y.len(), copy.is_some());
    let invalid_argument = |name: &'static str, expected: String, found: usize| {
        Err(Error::Argument { kernel: NAME.into(), name, expected, found: found.to_string() })
    };
    if rank >= world {
        return invalid_argument("rank", format!("a rank below {world}, the number of ranks"), rank);
    }
    let required = if world == 1 { 0 } else { (world - 2) * stride + n };
    if x.len() < required || (world > 2 && stride < n) {
        return invalid_argument("x", format!("{} inputs of {n} elements at a stride of {stride}", world - 1), x.len());
    }
    if let Some(copy) = &copy
        && copy.len() != n
    {
        return invalid_argument("copy", format!("{n} elements, as many as `y`"), copy.len());
    }
    let mut none = Buffer::<T>::uninit(device, 0)?;
    let mut copy = match copy {
        Some(copy) => copy,
        None => none.view_mut(),
    };
    let tile = TILE_BYTES / size_of::<T>();
    let tiles = n.div_ceil(tile);
    RankSum {
        y: &mut y,
        x: &x,
        copy: &mut copy,
        x_stride_rank: stride as i64,
        n: n as i64,
        tile,
        rank,
        world,
        average,
        write_copy,
    }
    .launch(device, max_programs.map_or(tiles, |max| tiles.min(max.max(1))))
}

/// The reference in f64; `inputs` has one input per rank.
pub fn reference(inputs: &[Vec<f64>], average: bool) -> Vec<f64> {
    let divisor = if average { inputs.len() as f64 } else { 1.0 };
    (0..inputs[0].len()).map(|i| inputs.iter().map(|input| input[i]).sum::<f64>() / divisor).collect()
}
