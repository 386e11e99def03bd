//! Block pointers, tensor descriptors, loads, stores and atomics.

use super::arith::Offset;
use super::diag_text;
use super::dtype::Dtype;
use super::handle::{BlockPtr, Data, Ptr, PtrTile, Scalar, Tile, describe};
use super::index::{IndexList, Unset, check_shape};
use super::operand::{FloatLiteral, IntegerLiteral, Operand, Raw, broadcast, constant};
use super::record::{emit, error_here, fail, shape};
use crate::ir::{AtomicOp, DType, Op, Type, Value};
pub use crate::ir::{Eviction, MemScope, MemSem, Padding};

/// A block of the tensor that starts at `base`. All lists have one entry per dimension; shape, strides and offsets are
/// in elements. `order` lists the dimensions from the fastest-varying in memory to the slowest (by default the last one
/// first).
#[track_caller]
pub fn make_block_ptr<T: Dtype>(
    base: Ptr<T>,
    shape: impl AsRef<[Scalar<i64>]>,
    strides: impl AsRef<[Scalar<i64>]>,
    offsets: impl AsRef<[Scalar<i64>]>,
    block_shape: impl AsRef<[usize]>,
    order: &[usize],
) -> BlockPtr<T> {
    let (shape, strides, offsets) = (shape.as_ref(), strides.as_ref(), offsets.as_ref());
    let block = block_shape.as_ref();
    let rank = block.len();
    let lengths = [("shape", shape.len()), ("strides", strides.len()), ("offsets", offsets.len())];
    for (name, len) in lengths {
        if len != rank {
            fail(
                error_here(format!("`{name}` has {len} entries, `block_shape` has {rank}"))
                    .label(format!("this block pointer has {rank} dimensions"))
                    .help("give one entry per dimension in every list"),
            );
        }
    }
    if rank == 0 {
        fail(error_here("a block pointer needs at least one dimension").label("`block_shape` is empty"));
    }
    check_shape(block);
    let order: Vec<usize> = if order.is_empty() { (0..rank).rev().collect() } else { order.to_vec() };
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if sorted != (0..rank).collect::<Vec<_>>() {
        fail(
            error_here(format!("`order` {order:?} is not a permutation of the {rank} dimensions"))
                .label("not a permutation")
                .help("from the fastest-varying dimension in memory to the slowest: `order = [1, 0]` for row-major"),
        );
    }
    let values = |list: &[Scalar<i64>]| list.iter().map(|s| s.value()).collect::<Vec<Value>>();
    let (shape, strides, offsets) = (values(shape), values(strides), values(offsets));
    let v = emit(|b| b.make_view(base.v, &shape, &strides, &offsets, block, &order));
    BlockPtr::new(v, base.writable)
}

/// A tensor in memory whose blocks are read and written at any offsets: a block pointer at the origin. The last stride
/// of a row-major tensor is 1.
#[track_caller]
pub fn make_tensor_descriptor<T: Dtype>(
    base: Ptr<T>,
    shape: impl AsRef<[Scalar<i64>]>,
    strides: impl AsRef<[Scalar<i64>]>,
    block_shape: impl AsRef<[usize]>,
) -> BlockPtr<T> {
    let zero = Scalar::<i64>::from_value(emit(|b| b.int(0, DType::I64)));
    let origin = vec![zero; shape.as_ref().len()];
    make_block_ptr(base, shape, strides, origin, block_shape, &[])
}

/// The block pointer advanced by `offsets`, one per dimension, in elements.
#[track_caller]
pub fn advance<T: Dtype>(block: BlockPtr<T>, offsets: impl IndexList) -> BlockPtr<T> {
    let offsets = offsets.indices();
    let rank = shape(block.v).len();
    if offsets.len() != rank {
        fail(
            error_here(format!("{} offsets for a block pointer of {rank} dimensions", offsets.len()))
                .label(format!("expected {rank} offsets")),
        );
    }
    let offsets: Vec<Value> = offsets.iter().map(|s| s.value()).collect();
    BlockPtr::new(emit(|b| b.advance(block.v, &offsets)), block.writable)
}

impl<T: Dtype> BlockPtr<T> {
    /// See [`advance`].
    #[track_caller]
    pub fn advance(self, offsets: impl IndexList) -> BlockPtr<T> {
        advance(self, offsets)
    }

    /// For tensor descriptors: loads the block at `offsets`. Elements out of bounds read as zero.
    #[track_caller]
    pub fn load(self, offsets: impl IndexList) -> Tile<T> {
        let at = advance(self, offsets);
        let all: Vec<usize> = (0..shape(at.v).len()).collect();
        load(at, Unset, Unset, &all, Padding::Zero, Eviction::Normal, Eviction::Normal)
    }

    /// For tensor descriptors: stores the block at `offsets`. Elements out of bounds are not written.
    #[track_caller]
    pub fn store(self, offsets: impl IndexList, value: impl Operand<T>) {
        let at = advance(self, offsets);
        let all: Vec<usize> = (0..shape(at.v).len()).collect();
        store(at, value, Unset, &all, Eviction::Normal, Eviction::Normal);
    }
}

macro_rules! descriptor_atomics {
    ($($(#[$meta:meta])* $name:ident;)*) => {
        impl<T: Dtype> BlockPtr<T> { $(
            $(#[$meta])*
            #[track_caller]
            pub fn $name(self, offsets: impl IndexList, value: impl Operand<T>) {
                let at = advance(self, offsets);
                let all: Vec<usize> = (0..shape(at.v).len()).collect();
                $name(at, value, Unset, &all, MemSem::Relaxed, MemScope::Gpu);
            }
        )* }
    };
}
descriptor_atomics! {
    /// For tensor descriptors: adds atomically to the block at `offsets`. Elements out of bounds are not written.
    atomic_add;
    /// For tensor descriptors: as `atomic_add`, the minimum.
    atomic_min;
    /// For tensor descriptors: as `atomic_add`, the maximum.
    atomic_max;
    /// For tensor descriptors: as `atomic_add`, the bitwise and of integers.
    atomic_and;
    /// For tensor descriptors: as `atomic_add`, the bitwise or of integers.
    atomic_or;
    /// For tensor descriptors: as `atomic_add`, the bitwise exclusive or of integers.
    atomic_xor;
}

/// See [`BlockPtr::load`].
#[track_caller]
pub fn load_tensor_descriptor<T: Dtype>(descriptor: BlockPtr<T>, offsets: impl IndexList) -> Tile<T> {
    descriptor.load(offsets)
}

/// See [`BlockPtr::store`].
#[track_caller]
pub fn store_tensor_descriptor<T: Dtype>(descriptor: BlockPtr<T>, offsets: impl IndexList, value: impl Operand<T>) {
    descriptor.store(offsets, value);
}

/// An optional mask: a bool tile or scalar.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a mask", label = "expected a bool tile or bool scalar")]
pub trait Mask: Copy {
    #[doc(hidden)]
    fn mask(self) -> Option<Raw>;
}
impl Mask for Unset {
    fn mask(self) -> Option<Raw> {
        None
    }
}
impl Mask for Tile<bool> {
    fn mask(self) -> Option<Raw> {
        Some(self.raw())
    }
}
impl Mask for Scalar<bool> {
    fn mask(self) -> Option<Raw> {
        Some(self.raw())
    }
}
impl Mask for bool {
    fn mask(self) -> Option<Raw> {
        Some(Operand::<bool>::raw(self))
    }
}

/// The value of masked-off elements: anything that converts to the element type. Optional.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not convert to elements of type `{T}`",
    note = "convert with `.to::<…>()`"
)]
pub trait Other<T: Dtype>: Copy {
    #[doc(hidden)]
    fn other(self) -> Option<Raw>;
}
impl<T: Dtype> Other<T> for Unset {
    fn other(self) -> Option<Raw> {
        None
    }
}
macro_rules! others {
    ($($ty:ty),*) => { $(
        impl<T: Dtype> Other<T> for $ty
        where
            $ty: Operand<T>,
        {
            fn other(self) -> Option<Raw> {
                Some(Operand::<T>::raw(self))
            }
        }
    )* };
}
others!(Tile<T>, Scalar<T>, i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, bool, IntegerLiteral, FloatLiteral);

/// Types that `load` and `store` accept: pointers, tiles of pointers, block pointers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a pointer",
    label = "expected a pointer, a tile of pointers or a block pointer"
)]
pub trait Pointer: Copy {
    type Elem: Dtype;
    /// A scalar for one pointer, otherwise a tile.
    type Pointee: Data<Elem = Self::Elem>;
    /// Result of an atomic: the old value; none for block pointers.
    type Old;
    #[doc(hidden)]
    const BLOCK: bool;
    #[doc(hidden)]
    fn address(self) -> (Value, bool);
    #[doc(hidden)]
    fn old(v: Option<Value>) -> Self::Old;
}

macro_rules! raw_pointers {
    ($($handle:ident => $pointee:ident),*) => { $(
        impl<T: Dtype> Pointer for $handle<T> {
            type Elem = T;
            type Pointee = $pointee<T>;
            type Old = $pointee<T>;
            const BLOCK: bool = false;
            fn address(self) -> (Value, bool) {
                (self.v, self.writable)
            }
            fn old(v: Option<Value>) -> $pointee<T> {
                match v {
                    Some(v) => $pointee::from_value(v),
                    None => panic!("internal compiler error: an atomic without result; please report this"),
                }
            }
        }
    )* };
}
raw_pointers!(Ptr => Scalar, PtrTile => Tile);

impl<T: Dtype> Pointer for BlockPtr<T> {
    type Elem = T;
    type Pointee = Tile<T>;
    type Old = ();
    const BLOCK: bool = true;
    fn address(self) -> (Value, bool) {
        (self.v, self.writable)
    }
    fn old(_v: Option<Value>) {}
}

#[track_caller]
fn check_boundary(view: Value, boundary: &[usize]) {
    let rank = shape(view).len();
    for &axis in boundary {
        if axis >= rank {
            fail(
                error_here(format!("`boundary_check` names dimension {axis} of a block pointer of {rank} dimensions"))
                    .label("no such dimension")
                    .help(format!("dimensions are 0 to {}", rank - 1)),
            );
        }
    }
}

#[track_caller]
fn reject_boundary_check(boundary: &[usize]) {
    if !boundary.is_empty() {
        fail(
            error_here("`boundary_check` applies to block pointers, this is a plain pointer")
                .label("a plain pointer has no bounds")
                .help("use `mask = …`, or make a block pointer with `make_block_ptr`"),
        );
    }
}

#[track_caller]
fn reject_on_block_ptr(given: bool, what: &str) {
    if given {
        fail(
            error_here(format!("`{what}` applies to plain pointers, this is a block pointer"))
                .label("a block pointer has bounds")
                .help("use `boundary_check = [0, …]` and `padding = zero`"),
        );
    }
}

/// [`broadcast_to_pointers`] of a value that may not be given. (A closure would lose the caller's line.)
#[track_caller]
fn broadcast_if_given(raw: Option<Raw>, pointers: &[usize], dtype: DType, what: &str) -> Option<Value> {
    Some(broadcast_to_pointers(raw?, pointers, dtype, what))
}

/// A mask or `other` value, broadcast to the shape of the pointers.
#[track_caller]
fn broadcast_to_pointers(raw: Raw, pointers: &[usize], dtype: DType, what: &str) -> Value {
    let v = match raw {
        Raw::Number(n) => return constant(n, dtype, pointers),
        Raw::Value(v) => v,
    };
    let from = shape(v);
    let fits =
        from.is_empty() || (from.len() == pointers.len() && from.iter().zip(pointers).all(|(&m, &n)| m == n || m == 1));
    if !fits {
        let diagnostic = error_here(format!(
            "{what} has shape {}, the pointers have {}",
            diag_text::shape(&from),
            diag_text::shape(pointers)
        ))
        .label("incompatible shapes");
        fail(
            diagnostic
                .help("compute it from the same offsets as the pointers, or insert dimensions with `.expand_dims(…)`"),
        );
    }
    broadcast(v, pointers)
}

/// The eviction priority or the cache operator of an access, which has one of them at most.
#[track_caller]
fn caching(eviction: Eviction, cache_modifier: Eviction, access: &str, legal: [Eviction; 4]) -> Eviction {
    if cache_modifier == Eviction::Normal {
        return eviction;
    }
    if !legal.contains(&cache_modifier) {
        let names = legal.map(|modifier| modifier.name()).join(", ");
        fail(
            error_here(format!("`cache_modifier = {}` of a {access}", cache_modifier.name()))
                .label(format!("a {access} has one of {names}")),
        );
    }
    if eviction != Eviction::Normal {
        fail(
            error_here(format!("a {access} with a cache modifier and an eviction policy"))
                .label("the instruction has one of them")
                .help("leave one out"),
        );
    }
    cache_modifier
}

/// Loads from a pointer, a tile of pointers or a block pointer.
///
/// `cache_modifier` is the cache operator of the load on GPUs: `ca`, `cg`, `cs` or `cv`.
///
/// Plain pointers: where `mask` is false, the result is `other` (by default zero). Block pointers: elements out of
/// bounds in a dimension of `boundary_check` read as `padding`.
#[track_caller]
pub fn load<P: Pointer>(
    pointer: P,
    mask: impl Mask,
    other: impl Other<P::Elem>,
    boundary_check: &[usize],
    padding: Padding,
    eviction: Eviction,
    cache_modifier: Eviction,
) -> P::Pointee {
    let eviction = caching(eviction, cache_modifier, "load", [Eviction::Ca, Eviction::Cg, Eviction::Cs, Eviction::Cv]);
    let (v, _) = pointer.address();
    let dtype = P::Elem::dtype();
    let (mask, other) = (mask.mask(), other.other());
    if P::BLOCK {
        reject_on_block_ptr(mask.is_some(), "mask");
        reject_on_block_ptr(other.is_some(), "other");
        check_boundary(v, boundary_check);
        return Data::from_value(emit(|b| b.load_view(v, boundary_check, padding, eviction)));
    }
    reject_boundary_check(boundary_check);
    if mask.is_none() && other.is_some() {
        fail(error_here("`other` without `mask`").label("nothing is masked here").help("add `mask = …`"));
    }
    let to = shape(v);
    let mask = broadcast_if_given(mask, &to, DType::Bool, "the mask");
    let other = broadcast_if_given(other, &to, dtype, "`other`");
    Data::from_value(emit(|b| b.load(v, mask, other, eviction)))
}

#[track_caller]
pub(super) fn check_writable(writable: bool, what: &str) {
    if !writable {
        fail(
            error_here(format!("`{what}` to memory declared as `In<…>`"))
                .label("this memory is read-only")
                .help("declare the parameter as `Out<…>` or `InOut<…>`"),
        );
    }
}

/// Stores to a pointer, a tile of pointers or a block pointer.
///
/// `cache_modifier` is the cache operator of the store on GPUs: `wb`, `cg`, `cs` or `wt`.
///
/// Plain pointers: only where `mask` is true. Block pointers: elements out of bounds in a dimension of `boundary_check`
/// are not written.
#[track_caller]
pub fn store<P: Pointer>(
    pointer: P,
    value: impl Operand<P::Elem>,
    mask: impl Mask,
    boundary_check: &[usize],
    eviction: Eviction,
    cache_modifier: Eviction,
) {
    let eviction = caching(eviction, cache_modifier, "store", [Eviction::Wb, Eviction::Cg, Eviction::Cs, Eviction::Wt]);
    let (v, writable) = pointer.address();
    check_writable(writable, "store");
    let dtype = P::Elem::dtype();
    let mask = mask.mask();
    let to = shape(v);
    if P::BLOCK {
        reject_on_block_ptr(mask.is_some(), "mask");
        check_boundary(v, boundary_check);
        let value = value_to_store(value.raw(), &to, dtype, v);
        emit(|b| b.store_view(v, value, boundary_check, eviction));
        return;
    }
    reject_boundary_check(boundary_check);
    let value = value_to_store(value.raw(), &to, dtype, v);
    let mask = broadcast_if_given(mask, &to, DType::Bool, "the mask");
    emit(|b| b.store(v, value, mask, eviction));
}

/// A value to be stored, broadcast to the shape that is written.
#[track_caller]
fn value_to_store(raw: Raw, to: &[usize], dtype: DType, pointer: Value) -> Value {
    let v = match raw {
        Raw::Number(n) => return constant(n, dtype, to),
        Raw::Value(v) => v,
    };
    let from = shape(v);
    let fits = from.is_empty() || (from.len() == to.len() && from.iter().zip(to).all(|(&m, &n)| m == n || m == 1));
    if !fits {
        let message = format!("{} cannot be stored through {}", describe(v), describe(pointer));
        fail(error_here(message).label(format!(
            "expected shape {}, found {}",
            diag_text::shape(to),
            diag_text::shape(&from)
        )));
    }
    broadcast(v, to)
}

#[track_caller]
fn atomic<P: Pointer>(
    op: AtomicOp,
    pointer: P,
    value: impl Operand<P::Elem>,
    mask: impl Mask,
    boundary_check: &[usize],
    (sem, scope): (MemSem, MemScope),
) -> P::Old {
    let what = format!("atomic_{}", op.name());
    let (v, writable) = pointer.address();
    check_writable(writable, &what);
    let dtype = P::Elem::dtype();
    let legal = match op {
        AtomicOp::Add | AtomicOp::Min | AtomicOp::Max | AtomicOp::Xchg => dtype.bits() >= 16,
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => dtype.is_int() && dtype.bits() >= 16,
    };
    if !legal {
        fail(
            error_here(format!("`{what}` is not supported for {dtype}"))
                .label(format!("the memory holds {dtype}"))
                .help("use memory of 16, 32 or 64 bits per element; `and`, `or` and `xor` need integers"),
        );
    }
    let mask = mask.mask();
    let to = shape(v);
    let value = value_to_store(value.raw(), &to, dtype, v);
    if P::BLOCK {
        reject_on_block_ptr(mask.is_some(), "mask");
        check_boundary(v, boundary_check);
        if (sem, scope) != (MemSem::Relaxed, MemScope::Gpu) {
            fail(
                error_here(format!("`{what}` of a block pointer is relaxed, at the scope of the device"))
                    .label("`sem` and `scope` apply to plain pointers")
                    .help("compute the addresses as `ptr + offsets`"),
            );
        }
        emit(|b| b.atomic_view(op, v, value, boundary_check));
        return P::old(None);
    }
    reject_boundary_check(boundary_check);
    let mask = broadcast_if_given(mask, &to, DType::Bool, "the mask");
    P::old(Some(emit(|b| {
        let (sem, scope) = (given(sem, MemSem::Relaxed), given(scope, MemScope::Gpu));
        let operands: Vec<Value> = [Some(v), Some(value), mask].into_iter().flatten().collect();
        let ty = b.func.ty(value).clone();
        b.one(Op::AtomicRmw { op, sem, scope }, &operands, ty)
    })))
}

macro_rules! atomics {
    ($($(#[$meta:meta])* $name:ident, $op:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<P: Pointer>(
            pointer: P,
            value: impl Operand<P::Elem>,
            mask: impl Mask,
            boundary_check: &[usize],
            sem: MemSem,
            scope: MemScope,
        ) -> P::Old {
            atomic(AtomicOp::$op, pointer, value, mask, boundary_check, (sem, scope))
        }
    )* };
}
atomics! {
    /// `*p += value`, each element atomic. Returns the old value for plain pointers. For numbers of at least 16 bits.
    /// `sem` orders the program's other accesses (by default, relaxed: not), `scope` says for whom.
    atomic_add, Add;
    /// `*p = min(*p, value)`, atomic, for the same types; see [`atomic_add`].
    atomic_min, Min;
    /// `*p = max(*p, value)`, atomic, for the same types; see [`atomic_add`].
    atomic_max, Max;
    /// `*p &= value`, atomic, for integers of at least 16 bits; see [`atomic_add`].
    atomic_and, And;
    /// `*p |= value`, atomic, for integers of at least 16 bits; see [`atomic_add`].
    atomic_or, Or;
    /// `*p ^= value`, atomic, for integers of at least 16 bits; see [`atomic_add`].
    atomic_xor, Xor;
    /// `*p = value`, atomic, for the same types; see [`atomic_add`].
    atomic_xchg, Xchg;
}

/// Waits until the number at `counter` is `value`, and sees what other programs wrote before their [`semaphore_release`] of that
/// value: with it, programs have an order, or wait for each other's results.
///
/// A program that runs must not wait for one that cannot start before it ends. GPUs start programs in the order of their
/// `program_id`s, axis 0 first.
#[track_caller]
pub fn semaphore_wait(counter: Ptr<i32>, value: impl Operand<i32>) {
    let (counter, value) = semaphore(counter, value, "semaphore_wait");
    emit(|b| b.op(Op::SemaphoreWait, &[counter, value], &[]));
}

/// Sets the number at `counter` to `value`, after all that this program has written: see [`semaphore_wait`].
#[track_caller]
pub fn semaphore_release(counter: Ptr<i32>, value: impl Operand<i32>) {
    let (counter, value) = semaphore(counter, value, "semaphore_release");
    emit(|b| {
        let op = Op::AtomicRmw { op: AtomicOp::Xchg, sem: Some(MemSem::Release), scope: None };
        b.op(op, &[counter, value], &[Type::scalar(DType::I32)])
    });
}

/// The counter of a semaphore, and a value of it.
#[track_caller]
fn semaphore(counter: Ptr<i32>, value: impl Operand<i32>, what: &str) -> (Value, Value) {
    let (v, writable) = counter.address();
    check_writable(writable, what);
    (v, value_to_store(value.raw(), &[], DType::I32, v))
}

/// An attribute, unless it is the default.
fn given<T: PartialEq>(x: T, default: T) -> Option<T> {
    (x != default).then_some(x)
}

/// `if *p == expected { *p = new }`, atomic, for integers of at least 16 bits and plain pointers. Returns the old value.
/// By default acquire-release, device scope.
#[track_caller]
pub fn atomic_cas<P: Pointer>(
    pointer: P,
    expected: impl Operand<P::Elem>,
    new: impl Operand<P::Elem>,
    mask: impl Mask,
    sem: MemSem,
    scope: MemScope,
) -> P::Old {
    let (v, writable) = pointer.address();
    check_writable(writable, "atomic_cas");
    let dtype = P::Elem::dtype();
    if P::BLOCK {
        fail(
            error_here("`atomic_cas` needs plain pointers, this is a block pointer")
                .label("returns no old value")
                .help("compute the addresses as `ptr + offsets`"),
        );
    }
    if !dtype.is_int() || dtype.bits() < 16 {
        fail(
            error_here(format!("`atomic_cas` needs integers of 16, 32 or 64 bits, found {dtype}"))
                .label("unsupported element type"),
        );
    }
    let to = shape(v);
    let expected = value_to_store(expected.raw(), &to, dtype, v);
    let new = value_to_store(new.raw(), &to, dtype, v);
    let mask = broadcast_if_given(mask.mask(), &to, DType::Bool, "the mask");
    P::old(Some(emit(|b| {
        let (sem, scope) = (given(sem, MemSem::AcqRel), given(scope, MemScope::Gpu));
        let operands: Vec<Value> = [Some(v), Some(expected), Some(new), mask].into_iter().flatten().collect();
        let ty = b.func.ty(new).clone();
        b.one(Op::AtomicCas { sem, scope }, &operands, ty)
    })))
}

impl<T: Dtype> Ptr<T> {
    /// The pointer advanced by `offset` elements, as a method: `ptr + offset` outside `#[kernel]`.
    #[track_caller]
    pub fn offset<I: Offset<T>>(self, offset: I) -> I::Moved {
        use super::arith::Combine;
        self.combine(offset, crate::ir::BinaryOp::Add)
    }
}
