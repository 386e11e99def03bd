//! Linear layouts: where each element of a tensor is stored, as linear maps over GF(2) (as in Triton's `LinearLayout`).
//!
//! # The map
//!
//! A tensor is distributed over the registers of many threads, or over bytes of shared memory. Its layout maps a
//! *place* to the coordinates of the element stored there. A place of a **distributed** layout is (register, lane,
//! warp, block): a register of a thread. A place of a **shared** layout is an element offset. All extents are powers of
//! two, so places and coordinates are bit strings, and every layout that matters in hardware has one property: flipping
//! a bit of the place flips the same bits of the coordinates, whatever the other bits are. So a layout is a short table
//! with one row (a *basis*) per bit of the place, and the coordinates of a place are the XOR of the rows of its set
//! bits.
//!
//! # Example
//!
//! One warp holds an 8×8 tensor, two neighboring columns per thread, four threads per row. That is
//! `LinearLayout::blocked(&[8, 8], &[1, 2], &[8, 4], &[1, 1], &[1, 0])`:
//!
//! ```text
//! column:   0     1     2     3     4     5     6     7          register bit 0 -> [0,1]
//! row 0   t0:0  t0:1  t1:0  t1:1  t2:0  t2:1  t3:0  t3:1         lane bits     -> [0,2] [0,4]
//! row 1   t4:0  t4:1  t5:0  t5:1  t6:0  t6:1  t7:0  t7:1                          [1,0] [2,0] [4,0]
//!  ...                                                           (no warp bits, no block bits)
//! row 7  t28:0 t28:1 t29:0 t29:1 t30:0 t30:1 t31:0 t31:1
//!
//! linear<reg=[[0,1]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], warp=[], block=[], shape=[8,8]>
//! ```
//!
//! Register 1 of lane 6 = 0b00110: the XOR of `[0,1]`, `[0,4]` and `[1,0]` is row 1, column 5. This is also the upper
//! half of the accumulator fragment of `mma.m16n8`: tensor-core instructions need no special case.
//!
//! A swizzled shared layout is such a table too. With 16-byte chunks, a 128-byte row of eight chunks, and the chunk
//! XORed with the row, an offset bit that advances the row by one also flips the chunk: its basis is `[1, 8]` where a
//! plain row-major layout has `[1, 0]` (for two-byte elements).
//!
//! # Replication
//!
//! A zero basis means that its bit does not matter: both places hold the same element. It occurs if a tensor is smaller
//! than the box that the threads of a program cover, and in the result of a reduction along the rows, of which every
//! lane of a row holds a replica.
//! More generally, a bit is *free* ([`LinearLayout::free_mask`]) if its basis is a XOR of earlier bases. Code that
//! writes each element to memory once, or combines each element once, skips free bits. Broadcasting along an axis moves
//! no data either: the layout of the operand is that of the result without this coordinate
//! ([`LinearLayout::unbroadcast`]).
//!
//! # Conversion is a quotient
//!
//! Let `src` and `dst` be layouts of one tensor. The thread that needs the element of place `p` of `dst` finds it at
//! `src⁻¹(dst(p))`, which is again a linear map, from places to places. The bits that it changes determine the cost of
//! the conversion ([`Conversion::between`]): no bits, no cost; only register bits, a renaming of registers; lane bits,
//! shuffles; warp bits, a round trip through shared memory. Replicated elements have several preimages; the
//! classification takes the nearest. If `src` is a shared layout, the same quotient ([`LinearLayout::locate_in`]) is
//! the address that each thread reads: the images of lane and warp bits are XORed at run time, those of register bits
//! are constants.
//!
//! # Shape operations
//!
//! Transpose, reshape, slice, broadcast, join and split change coordinates, not places. Each gives the layout of its
//! result and maps the registers of the result to those of the operand.
//!
//! In reading order: `linear` (the map, its inverse, composition), `construct` and `shared` (constructors), `shape_ops`
//! (shape operations), `convert` (conversions), `reduce`, `gather`, `access` (vector widths), `matrix_move`, `text`, and `gf2`, the Gaussian
//! elimination that they build on.

mod access;
mod construct;
mod convert;
mod gather;
mod gf2;
mod linear;
mod matrix_move;
mod reduce;
mod shape_ops;
mod shared;
#[cfg(test)]
mod tests;
mod text;

pub use access::VectorAccess;
pub use construct::LayoutBuilder;
pub use convert::{Conversion, LanePlan, Shuffle, SourceLane};
pub use gather::LaneGather;
pub use linear::{Basis, Dim, Index, IndexMap, InverseLayout, LayoutError, LinearLayout, MAX_RANK, Space, ThreadBases};
pub use matrix_move::{MatrixMove, NEXT_WORDS};
pub use reduce::Reduction;
pub use shape_ops::{Join, Renaming, Split};
pub use shared::Swizzle;
