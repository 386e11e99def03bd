//! The linear map: definition, application, inversion and composition.

use std::ops::BitXor;

use super::gf2::{self, Span};

/// Maximum tensor rank of a layout.
pub const MAX_RANK: usize = 8;

/// A named group of input bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Dim {
    /// Register of a thread.
    Register,
    /// Lane of a warp.
    Lane,
    /// Warp of a program.
    Warp,
    /// Thread block of a cluster.
    Block,
    /// Element offset in a shared-memory buffer.
    Offset,
}

impl Dim {
    /// All dims. A preimage prefers the bits of earlier ones.
    pub const ALL: [Dim; 5] = [Dim::Register, Dim::Lane, Dim::Warp, Dim::Block, Dim::Offset];
}

/// Domain of a layout: places in registers, or in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// Domain (register, lane, warp, block).
    Distributed,
    /// Domain: element offset in shared memory.
    Shared,
}

/// A place: one input of a layout, which holds one element.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Index {
    pub register: u32,
    pub lane: u32,
    pub warp: u32,
    pub block: u32,
    pub offset: u32,
}

impl Index {
    /// A register of the first thread.
    pub fn register(register: u32) -> Index {
        Index { register, ..Index::default() }
    }

    /// The index with only this bit set.
    pub fn unit(dim: Dim, bit: usize) -> Index {
        let mut index = Index::default();
        *index.get_mut(dim) = 1 << bit;
        index
    }

    /// The component along `dim`.
    pub fn get(&self, dim: Dim) -> u32 {
        match dim {
            Dim::Register => self.register,
            Dim::Lane => self.lane,
            Dim::Warp => self.warp,
            Dim::Block => self.block,
            Dim::Offset => self.offset,
        }
    }

    fn get_mut(&mut self, dim: Dim) -> &mut u32 {
        match dim {
            Dim::Register => &mut self.register,
            Dim::Lane => &mut self.lane,
            Dim::Warp => &mut self.warp,
            Dim::Block => &mut self.block,
            Dim::Offset => &mut self.offset,
        }
    }
}

impl BitXor for Index {
    type Output = Index;

    fn bitxor(self, other: Index) -> Index {
        Index {
            register: self.register ^ other.register,
            lane: self.lane ^ other.lane,
            warp: self.warp ^ other.warp,
            block: self.block ^ other.block,
            offset: self.offset ^ other.offset,
        }
    }
}

/// The image of one input bit: its coordinate along each axis.
pub type Basis = Vec<u32>;

/// The images of the bits of a distributed layout's domain, lowest bit first.
#[derive(Clone, Debug, Default)]
pub struct ThreadBases {
    pub register: Vec<Basis>,
    pub lane: Vec<Basis>,
    pub warp: Vec<Basis>,
    pub block: Vec<Basis>,
}

/// Error in the bases of a layout, or in its text.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    #[error("a layout has at most {MAX_RANK} axes, found {0}")]
    Rank(usize),
    #[error("axis {axis} has extent {extent}, expected a power of two of at most 2^31")]
    Extent { axis: usize, extent: u32 },
    #[error("{dim:?} basis {bit} is {found:?}, expected one coordinate for each of the {rank} axes")]
    BasisRank { dim: Dim, bit: usize, found: Basis, rank: usize },
    #[error("{dim:?} basis {bit} is {found:?}, which lies outside the shape {shape:?}")]
    BasisRange { dim: Dim, bit: usize, found: Basis, shape: Vec<u32> },
    #[error("{dim:?} has {found} bits, expected at most {limit}")]
    Bits { dim: Dim, found: usize, limit: usize },
    #[error("expected {expected} at byte {at} of the layout, found {found}")]
    Syntax { at: usize, expected: String, found: String },
}

/// A linear map over GF(2) from the bits of a place to tensor coordinates; see [`crate::layout`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LinearLayout {
    space: Space,
    shape: Vec<u32>,
    /// Bases per dim, in the order of [`Dim::ALL`]; empty for the dims of the other space.
    bases: [Vec<Basis>; 5],
}

/// Panics with an internal compiler error.
#[track_caller]
pub(super) fn bug(message: impl std::fmt::Display) -> ! {
    panic!("internal compiler error: {message}; please report this")
}

impl LinearLayout {
    /// A distributed layout from the images of its bits.
    ///
    /// # Errors
    /// If an extent is not a power of two, or there are too many axes or bits, or a basis has another rank or lies
    /// outside the shape.
    pub fn try_distributed(shape: &[u32], bases: ThreadBases) -> Result<Self, LayoutError> {
        let ThreadBases { register, lane, warp, block } = bases;
        Self::checked(Space::Distributed, shape, [register, lane, warp, block, Vec::new()])
    }

    /// As [`Self::try_distributed`], for bases computed by a pass.
    ///
    /// # Panics
    /// If the bases are inconsistent: a compiler bug.
    #[track_caller]
    pub fn distributed(shape: &[u32], bases: ThreadBases) -> Self {
        Self::try_distributed(shape, bases).unwrap_or_else(|error| bug(error))
    }

    /// A shared layout from the images of its offset bits.
    ///
    /// # Errors
    /// As [`Self::try_distributed`].
    pub fn try_shared(shape: &[u32], offset: Vec<Basis>) -> Result<Self, LayoutError> {
        let [a, b, c, d] = Default::default();
        Self::checked(Space::Shared, shape, [a, b, c, d, offset])
    }

    /// As [`Self::try_shared`], for bases computed by a pass.
    ///
    /// # Panics
    /// If the bases are inconsistent: a compiler bug.
    #[track_caller]
    pub fn shared(shape: &[u32], offset: Vec<Basis>) -> Self {
        Self::try_shared(shape, offset).unwrap_or_else(|error| bug(error))
    }

    fn checked(space: Space, shape: &[u32], bases: [Vec<Basis>; 5]) -> Result<Self, LayoutError> {
        let rank = shape.len();
        if rank > MAX_RANK {
            return Err(LayoutError::Rank(rank));
        }
        if let Some(axis) = shape.iter().position(|extent| !extent.is_power_of_two()) {
            return Err(LayoutError::Extent { axis, extent: shape[axis] });
        }
        for dim in Dim::ALL {
            let list = &bases[dim as usize];
            // A preimage packs the bits of all dims into one word, which limits the bits of each.
            let limit = if dim == Dim::Offset { 31 } else { 15 };
            if list.len() > limit {
                return Err(LayoutError::Bits { dim, found: list.len(), limit });
            }
            for (bit, basis) in list.iter().enumerate() {
                if basis.len() != rank {
                    return Err(LayoutError::BasisRank { dim, bit, found: basis.clone(), rank });
                }
                if basis.iter().zip(shape).any(|(coordinate, extent)| coordinate >= extent) {
                    let (found, shape) = (basis.clone(), shape.to_vec());
                    return Err(LayoutError::BasisRange { dim, bit, found, shape });
                }
            }
        }
        if shape.iter().map(|extent| extent.ilog2()).sum::<u32>() > 60 {
            let axis = (0..rank).max_by_key(|&axis| shape[axis]).unwrap_or(0);
            return Err(LayoutError::Extent { axis, extent: shape[axis] });
        }
        Ok(LinearLayout { space, shape: shape.to_vec(), bases })
    }

    /// A layout of the same space with other coordinates: maps every basis by `image`.
    pub(super) fn map_bases(&self, shape: &[u32], image: impl Fn(&Basis) -> Basis) -> Self {
        let bases = self.bases.each_ref().map(|list| list.iter().map(&image).collect());
        Self::checked(self.space, shape, bases).unwrap_or_else(|error| bug(error))
    }

    /// The same layout with other bases for one dim.
    pub(super) fn with_bases(&self, dim: Dim, list: Vec<Basis>) -> Self {
        let mut bases = self.bases.clone();
        bases[dim as usize] = list;
        Self::checked(self.space, &self.shape, bases).unwrap_or_else(|error| bug(error))
    }

    /// The extents of the tensor, one per axis.
    pub fn shape(&self) -> &[u32] {
        &self.shape
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn space(&self) -> Space {
        self.space
    }

    pub fn is_distributed(&self) -> bool {
        self.space == Space::Distributed
    }

    pub fn is_shared(&self) -> bool {
        self.space == Space::Shared
    }

    /// Number of elements of the tensor.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().map(|&extent| extent as usize).product()
    }

    /// The images of the bits of `dim`, lowest bit first.
    pub fn bases(&self, dim: Dim) -> &[Basis] {
        &self.bases[dim as usize]
    }

    /// Number of input bits of `dim`.
    pub fn bits(&self, dim: Dim) -> usize {
        self.bases(dim).len()
    }

    /// Number of input values of `dim`: two to the power of its bits.
    pub fn size(&self, dim: Dim) -> usize {
        1 << self.bits(dim)
    }

    /// Number of registers per thread.
    pub fn num_registers(&self) -> usize {
        self.size(Dim::Register)
    }

    pub fn num_warps(&self) -> usize {
        self.size(Dim::Warp)
    }

    /// The coordinates of the element at this offset of a shared layout.
    pub fn apply_offset(&self, offset: u32) -> Vec<u32> {
        self.apply(Index { offset, ..Index::default() })
    }

    /// The coordinates of the element at a place. Bits that a dim does not have are ignored.
    pub fn apply(&self, index: Index) -> Vec<u32> {
        let mut coordinates = vec![0; self.rank()];
        for dim in Dim::ALL {
            for (bit, basis) in self.bases(dim).iter().enumerate() {
                if index.get(dim) >> bit & 1 == 1 {
                    coordinates.iter_mut().zip(basis).for_each(|(sum, image)| *sum ^= image);
                }
            }
        }
        coordinates
    }

    /// Row-major position of coordinates. Extents are powers of two, so it concatenates their bits and is linear.
    pub(super) fn flatten(&self, coordinates: &[u32]) -> u64 {
        flatten(&self.shape, coordinates)
    }

    /// The flattened images of one dim's bits.
    pub(super) fn columns(&self, dim: Dim) -> Vec<u64> {
        self.bases(dim).iter().map(|basis| self.flatten(basis)).collect()
    }

    /// The flattened images of every input bit, in the order of [`Dim::ALL`].
    pub(super) fn all_columns(&self) -> Vec<u64> {
        Dim::ALL.iter().flat_map(|&dim| self.columns(dim)).collect()
    }

    /// log2 of the number of distinct elements in the layout.
    fn image_bits(&self) -> usize {
        Span::of_columns(&self.all_columns()).rank()
    }

    /// Whether no two places hold the same element.
    pub fn is_injective(&self) -> bool {
        self.image_bits() == self.all_columns().len()
    }

    /// Whether every element has a place.
    pub fn is_surjective(&self) -> bool {
        1usize << self.image_bits() == self.num_elements()
    }

    /// Bits of `dim` that are redundant: their bases depend on those of lower bits (of this dim, or of an earlier one
    /// in [`Dim::ALL`]), so places that differ only in such a bit and in lower bits hold the same elements.
    pub fn free_mask(&self, dim: Dim) -> u32 {
        let free = gf2::dependent_columns(&self.all_columns());
        let before: usize = Dim::ALL.iter().take(dim as usize).map(|&dim| self.bits(dim)).sum();
        (free >> before) as u32 & ((1u64 << self.bits(dim)) - 1) as u32
    }

    /// The map from each element to its smallest place.
    ///
    /// # Panics
    /// If the layout does not cover the tensor ([`Self::is_surjective`]): a compiler bug.
    #[track_caller]
    pub fn pseudo_invert(&self) -> InverseLayout {
        let span = Span::of_columns(&self.all_columns());
        let axes = (0..self.rank()).map(|axis| {
            let unit = |bit| {
                let mut coordinates = vec![0; self.rank()];
                coordinates[axis] = 1u32 << bit;
                match span.solve(self.flatten(&coordinates)) {
                    Some(packed) => self.unpack(packed),
                    None => bug(format!("the layout {self} does not reach {coordinates:?}")),
                }
            };
            (0..self.shape[axis].ilog2()).map(unit).collect()
        });
        InverseLayout { shape: self.shape.clone(), bases: axes.collect() }
    }

    /// The inverse, if the layout holds every element exactly once.
    pub fn invert(&self) -> Option<InverseLayout> {
        (self.is_injective() && self.is_surjective()).then(|| self.pseudo_invert())
    }

    /// For each place of `self`, the place where `other` holds the same element: `other⁻¹ ∘ self`. If `other` is a
    /// shared layout, this is the address computation of a load or store.
    ///
    /// # Panics
    /// If the shapes differ or `other` does not cover the tensor: a compiler bug.
    #[track_caller]
    pub fn locate_in(&self, other: &LinearLayout) -> IndexMap {
        self.compose(&other.pseudo_invert())
    }

    /// `inverse ∘ self`.
    #[track_caller]
    pub fn compose(&self, inverse: &InverseLayout) -> IndexMap {
        // Shared memory may have room for more columns than a tile.
        if self.shape.len() != inverse.shape.len()
            || self.shape.iter().zip(&inverse.shape).any(|(own, room)| own > room)
        {
            bug(format!("composed layouts of shapes {:?} and {:?}", self.shape, inverse.shape));
        }
        let images = self.bases.each_ref().map(|list| list.iter().map(|basis| inverse.apply(basis)).collect());
        IndexMap { space: self.space, images }
    }

    /// Splits a packed number into the bits of the dims, in order.
    fn unpack(&self, mut packed: u64) -> Index {
        let mut index = Index::default();
        for dim in Dim::ALL {
            *index.get_mut(dim) = (packed & ((1 << self.bits(dim)) - 1)) as u32;
            packed >>= self.bits(dim);
        }
        index
    }
}

pub(super) fn flatten(shape: &[u32], coordinates: &[u32]) -> u64 {
    shape.iter().zip(coordinates).fold(0, |flat, (&extent, &coordinate)| flat << extent.ilog2() | u64::from(coordinate))
}

pub(super) fn unflatten(shape: &[u32], mut flat: u64) -> Vec<u32> {
    let mut coordinates = vec![0; shape.len()];
    for (coordinate, extent) in coordinates.iter_mut().zip(shape).rev() {
        *coordinate = (flat & u64::from(extent - 1)) as u32;
        flat >>= extent.ilog2();
    }
    coordinates
}

/// A linear map from tensor coordinates to places.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct InverseLayout {
    shape: Vec<u32>,
    /// By axis and coordinate bit.
    bases: Vec<Vec<Index>>,
}

impl InverseLayout {
    /// The place of the element at these coordinates.
    pub fn apply(&self, coordinates: &[u32]) -> Index {
        let mut index = Index::default();
        for (list, coordinate) in self.bases.iter().zip(coordinates) {
            for (bit, image) in list.iter().enumerate() {
                if coordinate >> bit & 1 == 1 {
                    index = index ^ *image;
                }
            }
        }
        index
    }

    /// The places of the coordinate bits of an axis, lowest bit first.
    pub fn bases(&self, axis: usize) -> &[Index] {
        &self.bases[axis]
    }
}

/// A linear map from the places of one layout to those of another.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct IndexMap {
    space: Space,
    images: [Vec<Index>; 5],
}

impl IndexMap {
    /// The images of the bits of `dim`, lowest bit first. A lowering computes the images of lane and warp bits
    /// at run time and XORs the constant image of each register.
    pub fn images(&self, dim: Dim) -> &[Index] {
        &self.images[dim as usize]
    }

    pub fn apply(&self, index: Index) -> Index {
        let mut sum = Index::default();
        for dim in Dim::ALL {
            for (bit, image) in self.images(dim).iter().enumerate() {
                if index.get(dim) >> bit & 1 == 1 {
                    sum = sum ^ *image;
                }
            }
        }
        sum
    }

    /// `layout ∘ self`: a layout of the places that this map starts from.
    pub fn then(&self, layout: &LinearLayout) -> LinearLayout {
        let list = |dim| -> Vec<Basis> { self.images(dim).iter().map(|&image| layout.apply(image)).collect() };
        LinearLayout::checked(self.space, layout.shape(), Dim::ALL.map(list)).unwrap_or_else(|error| bug(error))
    }
}
