//! Moves of 8 × 8 matrices of 16-bit elements between the registers of a warp and shared memory, by one instruction for
//! up to four matrices (`ldmatrix`, `stmatrix`).

use super::linear::{Dim, Index, LinearLayout};

/// Elements of a row of a matrix: 16 bytes, contiguous in memory.
const ROW: u32 = 8;

/// How a warp moves a tile as matrices (PTX ISA, `stmatrix`): lane `8 · m + r` has the address of row `r` of matrix `m`;
/// of each matrix, lane `t` has elements `2 · (t mod 4)` and the next one of row `t / 4`, or, transposed, of column
/// `t / 4`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixMove {
    /// The memory offsets of the bits of the lane that has a row's address, in elements.
    pub lane: [u32; 5],
    /// The memory offsets of the bits of the warp.
    pub warp: Vec<u32>,
    pub transposed: bool,
    /// For each instruction the memory offset of its registers, which is XORed with that of the thread, and the first of
    /// the two registers of each of its matrices: one, two or four.
    pub moves: Vec<(u32, Vec<usize>)>,
}

impl LinearLayout {
    /// The moves between the registers of all threads and `memory`, a shared layout, of a tile of 16-bit elements; `None`
    /// where rows of matrices are not contiguous in memory, or several lanes or registers hold one element. (Several warps
    /// may: they load it, and one of them would have to store it.)
    pub fn matrix_move(&self, memory: &LinearLayout) -> Option<MatrixMove> {
        let map = self.locate_in(memory);
        let images = |dim| -> Vec<u32> { map.images(dim).iter().map(|image: &Index| image.offset).collect() };
        let (register, lane, warp) = (images(Dim::Register), images(Dim::Lane), images(Dim::Warp));
        let unique = [Dim::Register, Dim::Lane].iter().all(|&dim| self.free_mask(dim) == 0);
        let one_block = images(Dim::Block).is_empty();
        let (&pair, rest) = register.split_first()?;
        let [l0, l1, l2, l3, l4] = lane[..] else { return None };
        let (within, row, transposed) = match [pair, l0, l1] {
            [1, 2, 4] => ([pair, l0, l1], [l2, l3, l4], false),
            _ => ([l2, l3, l4], [pair, l0, l1], true),
        };
        let rows_are_contiguous = within == [1, 2, 4] && row.iter().chain(rest).chain(&warp).all(|at| at % ROW == 0);
        if !unique || !one_block || !rows_are_contiguous {
            return None;
        }
        // The next two bits of the register number tell the matrices of an instruction apart.
        let (of_matrix, others) = rest.split_at(rest.len().min(2));
        let [m0, m1] = [0, 1].map(|bit| of_matrix.get(bit).copied().unwrap_or(0));
        let first = |matrix: usize, other: usize| (other << of_matrix.len() | matrix) << 1;
        let moves = (0..1usize << others.len()).map(|other| {
            let offset = others.iter().enumerate().filter(|(bit, _)| other >> bit & 1 == 1);
            let offset = offset.fold(0, |sum, (_, at)| sum ^ at);
            (offset, (0..1 << of_matrix.len()).map(|matrix| first(matrix, other)).collect())
        });
        Some(MatrixMove { lane: [row[0], row[1], row[2], m0, m1], warp, transposed, moves: moves.collect() })
    }
}
