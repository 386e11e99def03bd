//! Tensor parameters: memory with a shape and strides, from which block pointers are made.

use super::dtype::Dtype;
use super::handle::{BlockPtr, Data, Ptr, Scalar};
use super::index::{ExtentList, Index, IndexList, check_axis};
use super::memory::make_block_ptr;
use super::operand::{IntegerLiteral, to_i64};
use super::record::{emit, error_here, fail};
use crate::ir::{BinaryOp, DType, Value};
use crate::layout::MAX_RANK;

/// A tensor in global memory: what a parameter `x: Tensor<T, (rows, d)>` is in the body. A pointer to the first element,
/// the extent of each dimension, and its stride in elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorPtr<T: Dtype> {
    base: Ptr<T>,
    rank: usize,
    dims: [TensorDim; MAX_RANK],
    strides: [Option<Value>; MAX_RANK],
}

/// The extent of a dimension.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum TensorDim {
    /// An i32 or i64 scalar.
    Scalar(Value),
    /// Known at specialization.
    Const(i64),
}

macro_rules! scalar_dims {
    ($($ty:ty),*) => { $(
        impl From<Scalar<$ty>> for TensorDim {
            fn from(extent: Scalar<$ty>) -> TensorDim {
                TensorDim::Scalar(extent.value())
            }
        }
    )* };
}
scalar_dims!(i32, i64);

macro_rules! const_dims {
    ($($ty:ty),*) => { $(
        impl From<$ty> for TensorDim {
            fn from(extent: $ty) -> TensorDim {
                TensorDim::Const(extent as i64)
            }
        }
    )* };
}
const_dims!(usize, i32, i64, u32, u64);

impl TensorDim {
    #[track_caller]
    fn index(self) -> Scalar<i64> {
        Scalar::from_value(match self {
            TensorDim::Scalar(v) => to_i64(v),
            TensorDim::Const(n) => IntegerLiteral(n.into()).index(),
        })
    }
}

impl<T: Dtype> TensorPtr<T> {
    /// A tensor with as many strides as dimensions; called by code that `#[kernel]` generates.
    #[doc(hidden)]
    pub fn new(base: Ptr<T>, dims: &[TensorDim], strides: &[Scalar<i64>]) -> TensorPtr<T> {
        let mut tensor =
            TensorPtr { base, rank: dims.len(), dims: [TensorDim::Const(1); MAX_RANK], strides: [None; MAX_RANK] };
        tensor.dims[..dims.len()].copy_from_slice(dims);
        for (slot, stride) in tensor.strides.iter_mut().zip(strides) {
            *slot = Some(stride.value());
        }
        tensor
    }

    /// Number of dimensions.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// The pointer to the first element.
    pub fn ptr(self) -> Ptr<T> {
        self.base
    }

    /// The extent of a dimension; negative numbers count from the end.
    #[track_caller]
    pub fn dim(self, axis: i32) -> Scalar<i32> {
        let axis = check_axis(axis, self.rank, "dim");
        match self.dims[axis] {
            TensorDim::Scalar(v) => Scalar::from_value(emit(|b| b.cast(v, DType::I32))),
            TensorDim::Const(n) => Scalar::from_value(emit(|b| b.int(n, DType::I32))),
        }
    }

    /// The stride of a dimension, in elements; negative numbers count from the end.
    #[track_caller]
    pub fn stride(self, axis: i32) -> Scalar<i64> {
        let axis = check_axis(axis, self.rank, "stride");
        self.stride_of(axis)
    }

    fn stride_of(self, axis: usize) -> Scalar<i64> {
        match self.strides[axis] {
            Some(v) => Scalar::from_value(v),
            None => panic!("internal compiler error: a tensor dimension without stride; please report this"),
        }
    }

    /// The sub-tensor at these positions of the first dimensions, which it does not have any more: `q.index([batch,
    /// head])` of a tensor [batch, heads, rows, d] is a tensor [rows, d].
    #[track_caller]
    pub fn index(self, positions: impl IndexList) -> TensorPtr<T> {
        let positions = positions.indices();
        let (given, rank) = (positions.len(), self.rank);
        if given > rank {
            fail(
                error_here(format!("{given} positions in a tensor of {rank} dimensions"))
                    .label(format!("expected at most {rank} positions")),
            );
        }
        let mut offset: Option<Value> = None;
        for (axis, position) in positions.into_iter().enumerate() {
            let (position, stride) = (position.value(), self.stride_of(axis).value());
            let term = emit(|b| b.binary(BinaryOp::Mul, position, stride));
            offset = Some(match offset {
                None => term,
                Some(sum) => emit(|b| b.binary(BinaryOp::Add, sum, term)),
            });
        }
        let mut inner = self;
        if let Some(offset) = offset {
            inner.base = self.base.offset(Scalar::<i64>::from_value(offset));
        }
        inner.rank = rank - given;
        inner.dims.copy_within(given..rank, 0);
        inner.strides.copy_within(given..rank, 0);
        inner
    }

    /// The same elements with the dimensions in another order: dimension i of the result is dimension `dims[i]`.
    #[track_caller]
    pub fn permute<const R: usize>(self, dims: [usize; R]) -> TensorPtr<T> {
        let mut sorted = dims.to_vec();
        sorted.sort_unstable();
        if sorted != (0..self.rank).collect::<Vec<_>>() {
            fail(
                error_here(format!("{dims:?} is not a permutation of the {} dimensions of a tensor", self.rank))
                    .label("not a permutation"),
            );
        }
        let mut permuted = self;
        for (to, &from) in dims.iter().enumerate() {
            permuted.dims[to] = self.dims[from];
            permuted.strides[to] = self.strides[from];
        }
        permuted
    }

    /// A block pointer to the block of shape `block_shape` at `offsets`, one per dimension, in elements.
    #[track_caller]
    pub fn block(self, offsets: impl IndexList, block_shape: impl ExtentList) -> BlockPtr<T> {
        let block_shape = block_shape.extents();
        self.check_rank(block_shape.len(), "`block_shape`");
        // Loops, not closures, which would lose the caller's location.
        let (mut dims, mut strides) = (Vec::with_capacity(self.rank), Vec::with_capacity(self.rank));
        for axis in 0..self.rank {
            dims.push(self.dims[axis].index());
            strides.push(self.stride_of(axis));
        }
        let offsets = offsets.indices();
        self.check_rank(offsets.len(), "`offsets`");
        make_block_ptr(self.base, dims, strides, offsets, block_shape, &[])
    }

    /// A tensor descriptor: the blocks of shape `block_shape`, which are read and written at any offsets with all
    /// bounds checked.
    #[track_caller]
    pub fn descriptor(self, block_shape: impl ExtentList) -> BlockPtr<T> {
        let zero = Scalar::<i64>::from_value(emit(|b| b.int(0, DType::I64)));
        self.block(vec![zero; self.rank], block_shape)
    }

    #[track_caller]
    fn check_rank(self, found: usize, what: &str) {
        if found != self.rank {
            let rank = self.rank;
            fail(
                error_here(format!("{what} has {found} entries, the tensor has {rank} dimensions"))
                    .label(format!("expected {rank} entries"))
                    .help("give one entry per dimension, or select a sub-tensor with `.index([…])` first"),
            );
        }
    }
}
