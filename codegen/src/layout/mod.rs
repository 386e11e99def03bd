//! Layouts: where each element of a tensor lives, as linear maps over GF(2).
//!
//! # The map
//!
//! A tensor is spread over the registers of many threads, or over bytes of shared memory. Its layout is the
//! function from a *place* to the coordinates of the element that lies there. A place in a **distributed**
//! layout is (register, lane, warp, block): which of a thread's values, in which thread. A place in a
//! **shared** layout is an element offset. All extents are powers of two, so places and coordinates are bit
//! strings, and every layout that hardware or we care for has one property: flipping a bit of the place always
//! flips the same bits of the coordinates, whatever the other bits are. So a layout is a short table, one row
//! (a *basis*) per bit of the place, and the coordinates of a place are the XOR of the rows of its set bits.
//!
//! # An example
//!
//! One warp holds an 8×8 tensor, two neighbouring columns per thread, four threads to a row. That is
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
//! Register 1 of lane 6 = 0b00110: the XOR of `[0,1]`, `[0,4]` and `[1,0]` is row 1, column 5. It is also the
//! accumulator fragment of `mma.m16n8`, upper half: the tensor-core instructions need no case of their own.
//!
//! A swizzled shared layout is a table too. With 16-byte chunks, a 128-byte row of eight chunks, and the chunk
//! XORed with the row, an offset bit that advances the row by one also flips the chunk: its basis is
//! `[1, 8]` where a plain row-major layout has `[1, 0]` (for two-byte elements).
//!
//! # Copies
//!
//! A zero basis means that its bit does not matter: the places on both sides hold the same element. That is
//! what a tensor smaller than its program looks like, and a sum along the rows, of which every lane of a row
//! holds a copy. More generally a bit is *free* ([`LinearLayout::free_mask`]) where its basis is a XOR of the
//! bases before it. Whoever writes to memory once, or combines each element once, skips free bits. Broadcasting
//! along an axis moves nothing either: the operand's layout is the result's with that coordinate forgotten
//! ([`LinearLayout::unbroadcast`]).
//!
//! # Conversion is a quotient
//!
//! Let `src` and `dst` be layouts of one tensor. The thread that needs the element of place `p` of `dst` finds
//! it at `src⁻¹(dst(p))`, once more a linear map on bits, from places to places. Which bits it changes says
//! what moving the tensor costs ([`Conversion::between`]): none, nothing; registers only, other names for the
//! same values; lanes, shuffles; warps, a trip through shared memory. Elements with copies have several
//! preimages, and the classification takes the nearest. With a shared layout in place of `src` the same
//! quotient ([`LinearLayout::locate_in`]) is the address that each thread reads: the images of lane and warp bits
//! are XORed at run time, those of registers are constants.
//!
//! # Renaming
//!
//! Transpose, reshape, slices, broadcasts, join and split change coordinates, not places. Each gives the layout
//! of its result and, for each register of the result, the register of the operand that it is.
//!
//! In reading order: `linear` (the map, its inverse, composition), `construct` and `shared` (the layouts we
//! use), `rename` (shape operations), `convert` (the quotient), `reduce`, `access` (vector widths), `text`, and `gf2`, the
//! elimination under all of them.

mod access;
mod construct;
mod convert;
mod gf2;
mod linear;
mod reduce;
mod rename;
mod shared;
#[cfg(test)]
mod tests;
mod text;

pub use access::VectorAccess;
pub use construct::LayoutBuilder;
pub use convert::{Conversion, LanePlan, Shuffle};
pub use linear::{Basis, Dim, Index, IndexMap, InverseLayout, LayoutError, LinearLayout, MAX_RANK, Space};
pub use reduce::Reduction;
pub use rename::{Join, Renaming, Split};
pub use shared::Swizzle;
