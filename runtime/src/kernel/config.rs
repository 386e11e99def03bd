//! Launch configuration: the grid, and compiler options.

use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::target::{CompileOptions, Schedule};

use crate::error::{Error, Result};
use crate::stream::Stream;

/// Number of program instances along each axis. Converts from one to three numbers: `64`, `(64, 8)`, `[64, 8, 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid([i64; 3]);

impl Grid {
    /// The extents as u32; an error if one is negative or exceeds 32 bits.
    pub(crate) fn extents(&self, def: &KernelDef) -> Result<[u32; 3]> {
        self.checked(&format_args!("`{}` ({}:{})", def.name, def.file, def.line))
    }

    /// The extents.
    pub fn to_array(self) -> [i64; 3] {
        self.0
    }

    /// The extents as u32, for a launch of the kernel that messages call `kernel`.
    ///
    /// # Errors
    /// An extent that is negative or exceeds 32 bits.
    pub fn checked(&self, kernel: &dyn std::fmt::Display) -> Result<[u32; 3]> {
        let mut extents = [0; 3];
        for (axis, (out, &extent)) in extents.iter_mut().zip(&self.0).enumerate() {
            *out = u32::try_from(extent).map_err(|_| Error::GridExtent {
                kernel: kernel.to_string(),
                axis: ['x', 'y', 'z'][axis],
                found: extent,
            })?;
        }
        Ok(extents)
    }
}

macro_rules! grids {
    ($($ty:ty),*) => {$(
        impl From<$ty> for Grid {
            fn from(x: $ty) -> Grid {
                Grid([extent(x), 1, 1])
            }
        }
        impl From<($ty,)> for Grid {
            fn from((x,): ($ty,)) -> Grid {
                Grid([extent(x), 1, 1])
            }
        }
        impl From<($ty, $ty)> for Grid {
            fn from((x, y): ($ty, $ty)) -> Grid {
                Grid([extent(x), extent(y), 1])
            }
        }
        impl From<($ty, $ty, $ty)> for Grid {
            fn from((x, y, z): ($ty, $ty, $ty)) -> Grid {
                Grid([extent(x), extent(y), extent(z)])
            }
        }
        impl From<[$ty; 3]> for Grid {
            fn from([x, y, z]: [$ty; 3]) -> Grid {
                Grid([extent(x), extent(y), extent(z)])
            }
        }
    )*};
}
grids!(i32, u32, i64, usize);

/// Saturates: a value that does not fit exceeds every limit, and the launch reports it.
fn extent(x: impl TryInto<i64>) -> i64 {
    x.try_into().unwrap_or(i64::MAX)
}

/// Whether a launch proves that the kernel's accesses are in bounds. True except for configurations of
/// [`LaunchConfig::unchecked`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoundsCheck {
    skipped: bool,
}

impl BoundsCheck {
    pub(crate) fn is_enabled(self) -> bool {
        !self.skipped
    }
}

/// Configuration of a launch.
#[derive(Clone)]
pub struct LaunchConfig {
    pub grid: Grid,
    /// Warps of 32 threads per program instance (GPU): a power of two, 1 to 32.
    pub num_warps: u32,
    /// CTAs of the cluster that shares each program instance (Hopper): 1, 2, 4 or 8 ([`CompileOptions::num_ctas`]).
    pub num_ctas: u32,
    /// Number of stages of software pipelines in loops that do not specify it (GPU).
    pub num_stages: u32,
    /// Check `device_assert`s; if false, they are removed.
    pub debug_asserts: bool,
    /// Whether a product and a sum of floats may become one `fma`, which rounds once (GPU).
    pub fp_fusion: bool,
    /// Maximum number of registers per thread (GPU).
    pub max_registers: Option<u32>,
    /// Schedules of loops that a solver found or a person wrote, as text ([`CompileOptions::loops`]).
    pub loops: Option<String>,
    /// Record clocks of this block, by its linear index in the grid, for [`CompiledKernel::clocks`] (GPU): an intra-kernel
    /// profile, with which a launch takes a little longer. Launches on several streams at a time mix their clocks.
    ///
    /// [`CompiledKernel::clocks`]: crate::CompiledKernel::clocks
    pub clocks: Option<u32>,
    /// Options of the scheduling of loops with dots (GPU).
    pub schedule: Schedule,
    /// Stream of the launch; default: the device's stream.
    pub stream: Option<Stream>,
    /// Whether the launch proves that the kernel's accesses are in bounds.
    pub bounds_check: BoundsCheck,
}

/// One program instance, which kernels that give their grid replace by it, and the compiler's default options.
impl Default for LaunchConfig {
    fn default() -> LaunchConfig {
        LaunchConfig::new(1)
    }
}

impl LaunchConfig {
    /// A configuration with this grid and the compiler's default options.
    pub fn new(grid: impl Into<Grid>) -> LaunchConfig {
        let CompileOptions { num_warps, num_ctas, num_stages, debug_asserts, fp_fusion, max_registers, .. } =
            CompileOptions::default();
        LaunchConfig {
            grid: grid.into(),
            num_warps,
            num_ctas,
            num_stages,
            debug_asserts,
            fp_fusion,
            max_registers,
            loops: None,
            clocks: None,
            schedule: Schedule::default(),
            stream: None,
            bounds_check: BoundsCheck::default(),
        }
    }

    pub fn num_warps(mut self, num_warps: u32) -> LaunchConfig {
        self.num_warps = num_warps;
        self
    }

    /// Sets [`LaunchConfig::num_ctas`].
    pub fn num_ctas(mut self, num_ctas: u32) -> LaunchConfig {
        self.num_ctas = num_ctas;
        self
    }

    pub fn num_stages(mut self, num_stages: u32) -> LaunchConfig {
        self.num_stages = num_stages;
        self
    }

    pub fn max_registers(mut self, max_registers: u32) -> LaunchConfig {
        self.max_registers = Some(max_registers);
        self
    }

    /// Sets [`LaunchConfig::fp_fusion`].
    pub fn fp_fusion(mut self, fp_fusion: bool) -> LaunchConfig {
        self.fp_fusion = fp_fusion;
        self
    }

    /// Sets [`LaunchConfig::clocks`].
    pub fn clocks(mut self, block: u32) -> LaunchConfig {
        self.clocks = Some(block);
        self
    }

    /// Sets [`Schedule::tma`].
    pub fn tma(mut self, tma: bool) -> LaunchConfig {
        self.schedule.tma = Some(tma);
        self
    }

    /// Sets [`Schedule::warp_specialize`].
    pub fn warp_specialize(mut self, warp_specialize: bool) -> LaunchConfig {
        self.schedule.warp_specialize = Some(warp_specialize);
        self
    }

    /// Sets [`Schedule::pingpong`].
    pub fn pingpong(mut self, pingpong: bool) -> LaunchConfig {
        self.schedule.pingpong = Some(pingpong);
        self
    }

    /// Sets [`Schedule::overlap`].
    pub fn overlap(mut self, overlap: bool) -> LaunchConfig {
        self.schedule.overlap = Some(overlap);
        self
    }

    /// Sets [`Schedule::wgmma_f32`].
    pub fn wgmma_f32(mut self, wgmma_f32: bool) -> LaunchConfig {
        self.schedule.wgmma_f32 = Some(wgmma_f32);
        self
    }

    /// Sets [`Schedule::tma_stores`].
    pub fn tma_stores(mut self, tma_stores: bool) -> LaunchConfig {
        self.schedule.tma_stores = Some(tma_stores);
        self
    }

    #[doc(hidden)]
    #[deprecated(note = "use `tma`")]
    pub fn bulk_copies(self, bulk_copies: bool) -> LaunchConfig {
        self.tma(bulk_copies)
    }

    #[doc(hidden)]
    #[deprecated(note = "use `pingpong`")]
    pub fn take_turns(self, take_turns: bool) -> LaunchConfig {
        self.pingpong(take_turns)
    }

    pub fn stream(mut self, stream: &Stream) -> LaunchConfig {
        self.stream = Some(stream.clone());
        self
    }

    /// Skips the proof that every access of the kernel is in bounds of its arguments' memory: for kernels whose bounds
    /// do not follow from the arguments, such as those that read addresses from memory.
    ///
    /// # Safety
    /// In each launch with this configuration, every load, store and atomic of the kernel stays inside the memory of
    /// the argument that its address is computed from; every `multiple_of` in the kernel is true, and no index of its
    /// loops overflows.
    pub unsafe fn unchecked(mut self) -> LaunchConfig {
        self.bounds_check = BoundsCheck { skipped: true };
        self
    }

    /// The compiler's options.
    pub fn options(&self) -> CompileOptions {
        CompileOptions {
            num_warps: self.num_warps,
            num_ctas: self.num_ctas,
            num_stages: self.num_stages,
            debug_asserts: self.debug_asserts,
            fp_fusion: self.fp_fusion,
            max_registers: self.max_registers,
            loops: self.loops.clone(),
            clocks: self.clocks,
            schedule: self.schedule,
            ..CompileOptions::default()
        }
    }
}
