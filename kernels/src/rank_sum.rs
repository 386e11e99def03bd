//! Sums over ranks: what is left for multiprocessors to do where copy engines bring all ranks' parts together.

use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// y[i] = Σᵣ partᵣ[i] in the order of ranks r = 0, 1, …, or their average.
///
/// Summed in f32 and rounded once. With `average` the sum is multiplied by 1 / `world` before that, which for a power of two is a division.
/// The part of `rank` is what y holds, those of the others lie one behind the other in x [world − 1, n], in rank order. With `copies` the
/// result goes to `copy` too.
///
/// A program per tile, or fewer, which then go on to further tiles.
#[kernel]
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
    #[constexpr = false] copies: bool,
) {
    let first = program_id(0).to::<i64>() * tile;
    for start in range(first, n, num_programs(0).to::<i64>() * tile) {
        let offsets = start + arange(0, tile);
        let inside = offsets < n;
        // The first part, not zero plus it: the sum of no more than negative zeros is one.
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
        if copies {
            store(copy + offsets, total.to::<T>(), mask = inside);
        }
    }
}

/// Which rank's parts are added up how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The rank whose part lies in y.
    pub rank: usize,
    /// How many parts there are.
    pub world: usize,
    /// The sum divided by `world`.
    pub average: bool,
}

/// Bytes of a program's tile: four vectors of 16 for each of 128 threads.
const TILE_BYTES: usize = 8192;

/// y becomes the sum, or average, of it and the parts of the other ranks; so does `copy`. The other parts begin at multiples of `stride`
/// elements in x. At most `programs` programs work on it, if a number is given.
///
/// # Errors
/// A rank that is not in the world, x that is too short, a copy of another length, tensors on another device, and everything that a launch can say.
pub fn reduce<T: FloatElement>(
    device: &Device,
    mut y: ViewMut<'_, T>,
    (x, stride): (View<'_, T>, usize),
    copy: Option<ViewMut<'_, T>>,
    ranks: Ranks,
    programs: Option<usize>,
) -> Result<()> {
    const NAME: &str = "rank_sum";
    let Ranks { rank, world, average } = ranks;
    let (n, copies) = (y.len(), copy.is_some());
    let mistake = |name: &'static str, expected: String, found: usize| {
        Err(Error::Argument { kernel: NAME.into(), name, expected, found: found.to_string() })
    };
    if rank >= world {
        return mistake("rank", format!("a number below the {world} ranks"), rank);
    }
    let wanted = if world == 1 { 0 } else { (world - 2) * stride + n };
    if x.len() < wanted || (world > 2 && stride < n) {
        return mistake("x", format!("{} parts of {n} elements, {stride} from one to the next", world - 1), x.len());
    }
    if let Some(copy) = &copy
        && copy.len() != n
    {
        return mistake("copy", format!("{n} elements, as many as `y`"), copy.len());
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
        copies,
    }
    .launch(device, programs.map_or(tiles, |most| tiles.min(most.max(1))))
}

/// The same in f64: `parts` by rank.
pub fn reference(parts: &[Vec<f64>], average: bool) -> Vec<f64> {
    let divisor = if average { parts.len() as f64 } else { 1.0 };
    (0..parts[0].len()).map(|i| parts.iter().map(|part| part[i]).sum::<f64>() / divisor).collect()
}
