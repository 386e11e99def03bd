//! Element types as Rust types, and the traits that kernels are generic over.

use super::record;
use crate::ir::DType;
use half::{bf16, f16};

/// An element type: a Rust number type, `bool`, or a type parameter of the kernel.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an element type",
    note = "element types are bool, i8 to i64, u8 to u64, f16, bf16, f32, f64, F8E4M3 and F8E5M2"
)]
pub trait Dtype: Copy + 'static {
    /// The default accumulator type of a `dot` of these elements.
    type Acc: Num;

    /// The element type; for a type parameter, the type it is bound to in the kernel being recorded.
    fn dtype() -> DType;
}

/// Types that `sum`, `cumsum` and `cumprod` accept, and their result types: Triton's `_pick_sum_dtype` and
/// `_promote_bfloat16_to_float32`.
#[diagnostic::on_unimplemented(message = "elements of type `{Self}` cannot be summed")]
pub trait Summed: Dtype {
    /// Result of `sum`: integers have at least 32 bits and the same signedness.
    type Sum: Num;
    /// Result of `cumsum`: as `Sum`, but f32 for bf16.
    type RunningSum: Num;
    /// Result of `cumprod`: the type itself, but f32 for bf16.
    type RunningProduct: Num;
}

/// Types with arithmetic: integers and floats.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a number type")]
pub trait Num: Summed {}

/// Types with bitwise operations: integers and `bool`.
#[diagnostic::on_unimplemented(message = "bitwise operations need integers or bool, found `{Self}`")]
pub trait Bits: Dtype {}

/// Integers, signed or unsigned.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an integer type",
    note = "convert with `.to::<i32>()`, or declare the type parameter as `T: Int`"
)]
pub trait Int: Num<Acc = i32> + Bits {}

/// Floats of at least 16 bits.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a float type",
    note = "convert with `.to::<f32>()`, or declare the type parameter as `T: Float`"
)]
pub trait Float: Num<Acc = f32> + Summed<Sum = Self> {
    /// The type to accumulate in: f64 for f64, f32 for the others.
    type Compute: Float<Compute = Self::Compute>;
}

macro_rules! dtypes {
    ($($rust:ty => $dtype:ident, $acc:ty, ($sum:ty, $running:ty, $product:ty), [$($class:ident),*];)*) => { $(
        impl Dtype for $rust {
            type Acc = $acc;
            fn dtype() -> DType {
                DType::$dtype
            }
        }
        impl Summed for $rust {
            type Sum = $sum;
            type RunningSum = $running;
            type RunningProduct = $product;
        }
        $(impl $class for $rust {})*
    )* };
}

dtypes! {
    bool => Bool, i32, (u32, u32, u32), [Bits];
    i8 => I8, i32, (i32, i32, i8), [Num, Bits, Int];
    i16 => I16, i32, (i32, i32, i16), [Num, Bits, Int];
    i32 => I32, i32, (i32, i32, i32), [Num, Bits, Int];
    i64 => I64, i32, (i64, i64, i64), [Num, Bits, Int];
    u8 => U8, i32, (u32, u32, u8), [Num, Bits, Int];
    u16 => U16, i32, (u32, u32, u16), [Num, Bits, Int];
    u32 => U32, i32, (u32, u32, u32), [Num, Bits, Int];
    u64 => U64, i32, (u64, u64, u64), [Num, Bits, Int];
    f16 => F16, f32, (f16, f16, f16), [Num];
    bf16 => BF16, f32, (bf16, f32, f32), [Num];
    f32 => F32, f32, (f32, f32, f32), [Num];
    f64 => F64, f32, (f64, f64, f64), [Num];
}

/// The element types that satisfy the bound of a kernel's type parameter, by the name of the trait; `None` for other
/// names. The command line offers these types.
pub fn class_members(class: &str) -> Option<&'static [DType]> {
    use DType::*;
    match class {
        "Float" => Some(&[F16, BF16, F32, F64]),
        "Int" => Some(&[I8, I16, I32, I64, U8, U16, U32, U64]),
        "Bits" => Some(&[Bool, I8, I16, I32, I64, U8, U16, U32, U64]),
        "Num" => Some(&[I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64]),
        "Dtype" => Some(&DType::ALL),
        _ => None,
    }
}

macro_rules! generics {
    ($($(#[$meta:meta])* $name:ident: $($class:ident)*, $acc:ty, $of:expr, [$($summed:ident),*];)*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name<const N: usize>;

        impl<const N: usize> Dtype for $name<N> {
            type Acc = $acc;
            fn dtype() -> DType {
                let of: fn(DType) -> DType = $of;
                of(record::generic(N))
            }
        }
        generics!(@summed $name $($summed)*);
        $(impl<const N: usize> $class for $name<N> {})*
    )* };
    (@summed $name:ident) => {};
    (@summed $name:ident $sum:ident $running:ident $product:ident) => {
        impl<const N: usize> Summed for $name<N> {
            type Sum = $sum<N>;
            type RunningSum = $running<N>;
            type RunningProduct = $product<N>;
        }
    };
}

/// The 32-bit integer type for narrower integers (u32 for bool); other types unchanged.
fn wide(d: DType) -> DType {
    match d {
        DType::I8 | DType::I16 => DType::I32,
        DType::Bool | DType::U8 | DType::U16 => DType::U32,
        d => d,
    }
}

/// The accumulator of a `dot` of this type, as [`Dtype::Acc`].
fn accumulator(d: DType) -> DType {
    if d.is_float() { DType::F32 } else { DType::I32 }
}

/// As [`Float::Compute`].
fn compute(d: DType) -> DType {
    if d == DType::F64 { DType::F64 } else { DType::F32 }
}

/// f32 for bf16; other types unchanged.
fn promoted(d: DType) -> DType {
    if d == DType::BF16 { DType::F32 } else { d }
}

generics! {
    /// Placeholder for a type parameter bounded by `Float` while a kernel is recorded, so that its body is compiled
    /// once for all types.
    GenericFloat: Num, f32, |d| d, [GenericFloat, RunningFloat, RunningFloat];
    /// As [`GenericFloat`], for `Int`.
    GenericInt: Num Bits Int, i32, |d| d, [SumInt, SumInt, GenericInt];
    /// As [`GenericFloat`], for `Num`.
    GenericNum: Num, DotSum<N>, |d| d, [SumNum, RunningNum, ProductNum];
    /// As [`GenericFloat`], for `Bits`.
    GenericBits: Bits, i32, |d| d, [];
    /// As [`GenericFloat`], for `Dtype`.
    GenericDtype: , DotSum<N>, |d| d, [];
    /// Accumulators of dots of `GenericDtype` and `GenericNum`.
    DotSum: Num, DotSum<N>, accumulator, [DotSum, DotSum, DotSum];
    /// Running sums and products of `GenericFloat`.
    RunningFloat: Num, f32, promoted, [RunningFloat, RunningFloat, RunningFloat];
    /// [`Float::Compute`] of `GenericFloat`.
    ComputeFloat: Num, f32, compute, [ComputeFloat, ComputeFloat, ComputeFloat];
    /// Sums of `GenericInt`.
    SumInt: Num Bits Int, i32, wide, [SumInt, SumInt, SumInt];
    /// Sums of `GenericNum`.
    SumNum: Num, DotSum<N>, wide, [SumNum, RunningNum, RunningNum];
    /// Running sums of `GenericNum`.
    RunningNum: Num, DotSum<N>, |d| wide(promoted(d)), [RunningNum, RunningNum, RunningNum];
    /// Running products of `GenericNum`.
    ProductNum: Num, DotSum<N>, promoted, [RunningNum, RunningNum, ProductNum];
}

macro_rules! floats {
    ($([$($parameter:tt)*] $float:ty => $compute:ty;)*) => { $(
        impl<$($parameter)*> Float for $float {
            type Compute = $compute;
        }
    )* };
}

floats! {
    [] f16 => f32;
    [] bf16 => f32;
    [] f32 => f32;
    [] f64 => f64;
    [const N: usize] GenericFloat<N> => ComputeFloat<N>;
    [const N: usize] RunningFloat<N> => ComputeFloat<N>;
    [const N: usize] ComputeFloat<N> => ComputeFloat<N>;
}
