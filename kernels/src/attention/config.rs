//! Tile sizes, warps and pipeline depth: the defaults per head dimension, element type and target.

use tilewright_codegen::target::Target;

/// The parts of an attention that are kernels with tiles of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    Forward,
    /// dK and dV.
    Keys,
    /// dQ.
    Queries,
}

/// How one kernel is cut into tiles and compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Query rows of a tile: a power of two, at least 16.
    pub q_tile: usize,
    /// Keys of a tile: a power of two, at least 16.
    pub k_tile: usize,
    /// Warps of 32 threads per program (GPU).
    pub num_warps: u32,
    /// Depth of the loops' pipelines (GPU).
    pub num_stages: u32,
}

impl Tiles {
    const fn new(q_tile: usize, k_tile: usize, num_warps: u32, num_stages: u32) -> Tiles {
        Tiles { q_tile, k_tile, num_warps, num_stages }
    }
}

/// The tile's extent along the head dimension: a power of two that the products' instructions can take.
pub fn d_tile(d: usize) -> usize {
    d.next_power_of_two().max(16)
}

/// The tiles that are used where the caller names none.
pub fn default_tiles(pass: Pass, d: usize, element_bytes: usize, target: &Target) -> Tiles {
    let wide = element_bytes > 2;
    match (target, pass) {
        (Target::Host(_), _) => Tiles::new(64, 64, 1, 1),
        // Products of f32 keep their operands in shared memory in twice the room.
        (Target::Nvptx(_), Pass::Forward) if wide => match d_tile(d) {
            ..=64 => Tiles::new(64, 32, 4, 2),
            // The checks of a padded dimension need registers too.
            128 if d < 128 => Tiles::new(64, 16, 4, 2),
            128 => Tiles::new(64, 32, 4, 2),
            _ => Tiles::new(32, 16, 4, 2),
        },
        (Target::Nvptx(_), _) if wide => match d_tile(d) {
            ..=64 => Tiles::new(32, 32, 4, 2),
            128 => Tiles::new(32, 32, 8, 2),
            _ => Tiles::new(16, 16, 4, 2),
        },
        (Target::Nvptx(_), Pass::Forward) => match d_tile(d) {
            ..=64 => Tiles::new(64, 128, 4, 2),
            128 => Tiles::new(128, 128, 8, 2),
            _ => Tiles::new(128, 64, 8, 2),
        },
        (Target::Nvptx(_), Pass::Keys) => match d_tile(d) {
            ..=64 => Tiles::new(64, 64, 4, 2),
            128 if d < 128 => Tiles::new(32, 128, 8, 2),
            128 => Tiles::new(64, 64, 4, 2),
            _ => Tiles::new(32, 64, 8, 2),
        },
        (Target::Nvptx(_), Pass::Queries) => match d_tile(d) {
            ..=64 => Tiles::new(64, 64, 4, 2),
            128 => Tiles::new(64, 64, 4, 2),
            _ => Tiles::new(64, 32, 8, 2),
        },
    }
}
