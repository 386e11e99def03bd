//! Moves of 8 × 8 matrices of 16-bit elements, or of 8 × 16 of 8-bit elements, between the registers of a warp and shared
//! memory, by one instruction for up to four matrices (`ldmatrix`, `stmatrix`).

use super::linear::{Dim, Index, LinearLayout};

/// How a warp moves a tile as matrices (PTX ISA, `stmatrix`): lane `8 · m + r` has the address of row `r` of matrix `m`;
/// of each matrix, lane `t` has word `t mod 4` (elements `2 · (t mod 4)` and the next one, or four of 8 bits) of row `t / 4`,
/// or, transposed, of column `t / 4`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixMove {
    /// The memory offsets of the bits of the lane that has a row's address, in elements.
    pub lane: [u32; 5],
    /// The memory offsets of the bits of the warp.
    pub warp: Vec<u32>,
    pub transposed: bool,
    /// For each instruction the memory offset of its registers, which is XORed with that of the thread, and the first of
    /// the registers (a word) of each of its matrices: one, two or four.
    pub moves: Vec<(u32, Vec<usize>)>,
}

/// The bits of a register number that tell the words of one instruction apart, as a rule: the two after those within a word.
pub const NEXT_WORDS: [usize; 2] = [0, 1];

impl LinearLayout {
    /// The moves between the registers of all threads and `memory`, a shared layout, of a tile whose elements have 1 or 2
    /// bytes; `None` where rows of matrices are not contiguous in memory, or several lanes or registers hold one element.
    /// (Several warps may: they load it, and one of them would have to store it.) `words`: the bits of the number of a word
    /// in a thread that tell the matrices of one instruction apart.
    pub fn matrix_move(&self, memory: &LinearLayout, bytes: usize, words: [usize; 2]) -> Option<MatrixMove> {
        let (per_word, row_elements) = match bytes {
            1 | 2 => (4 / bytes, 16 / bytes as u32),
            _ => return None,
        };
        let map = self.locate_in(memory);
        let images = |dim| -> Vec<u32> { map.images(dim).iter().map(|image: &Index| image.offset).collect() };
        let (register, lane, warp) = (images(Dim::Register), images(Dim::Lane), images(Dim::Warp));
        let unique = [Dim::Register, Dim::Lane].iter().all(|&dim| self.free_mask(dim) == 0);
        let one_block = images(Dim::Block).is_empty();
        let (in_word, rest) = register.split_at_checked(per_word.ilog2() as usize)?;
        let [l0, l1, l2, l3, l4] = lane[..] else { return None };
        let along: Vec<u32> = in_word.iter().copied().chain([l0, l1]).collect();
        let is_row = |images: &[u32]| images.iter().enumerate().all(|(bit, &at)| at == 1 << bit);
        let (row, transposed) = match along[..] {
            _ if is_row(&along) => ([l2, l3, l4], false),
            [pair, l0, l1] if is_row(&[l2, l3, l4]) => ([pair, l0, l1], true),
            _ => return None,
        };
        let rows_are_contiguous = row.iter().chain(rest).chain(&warp).all(|at| at % row_elements == 0);
        if !unique || !one_block || !rows_are_contiguous {
            return None;
        }
        let of_matrix: Vec<usize> = words.into_iter().filter(|&bit| bit < rest.len()).collect();
        let others: Vec<usize> = (0..rest.len()).filter(|bit| !of_matrix.contains(bit)).collect();
        let [m0, m1] = [0, 1].map(|i| of_matrix.get(i).map_or(0, |&bit| rest[bit]));
        // The number of a word, some bits of which are those of `number`.
        let word = |bits: &[usize], number: usize| -> usize {
            bits.iter().enumerate().map(|(i, bit)| (number >> i & 1) << bit).sum()
        };
        let moves = (0..1usize << others.len()).map(|other| {
            let other = word(&others, other);
            let offset =
                rest.iter().enumerate().filter(|(bit, _)| other >> bit & 1 == 1).fold(0, |sum, (_, at)| sum ^ at);
            let firsts = (0..1 << of_matrix.len()).map(|matrix| (other + word(&of_matrix, matrix)) * per_word);
            (offset, firsts.collect())
        });
        Some(MatrixMove { lane: [row[0], row[1], row[2], m0, m1], warp, transposed, moves: moves.collect() })
    }
}
