//! Matmuls outside of the autograd graph: c = a·b, and c += a·b to accumulate gradients.
//!
//! Uses the `gemm` crate on the CPU; on a GPU Tilewright's kernel, and cuBLAS where that is faster (`gpu_matmul`). All take
//! row-major and column-major operands, so no matmul copies a transposed matrix. bf16 and f16 products are exact and
//! accumulate in f32; the result is rounded once.

use std::cell::Cell;

use candle_core::{DType, Result, Tensor};
use tilewright::ViewMut;
use tilewright::kernels::FloatElement;
#[cfg(feature = "cuda")]
use tilewright::prelude::Precision;
use tilewright::trace::span;

use crate::check::{bad_argument, same_device};
#[cfg(feature = "cuda")]
use crate::gpu_matmul;
use crate::memory::{Elem, OutputAlloc, Read, for_float_type, same_storage, write};

thread_local! {
    static RESERVED_SMS: Cell<u32> = const { Cell::new(0) };
}

/// Reserves `count` SMs of the GPU for other work, such as collectives: later matmuls of this thread are planned for
/// the remaining SMs. 0 releases them. A matmul whose thread blocks fill the GPU exactly once takes twice as long if
/// some SMs are occupied. On a GPU the bits of the results may depend on `count`.
pub fn reserve_sms(count: u32) {
    RESERVED_SMS.set(count);
}

/// The number of SMs that [`reserve_sms`] reserved on this thread.
pub fn reserved_sms() -> u32 {
    RESERVED_SMS.get()
}

/// Sizes of a matmul a·b, for a [m, k] and b [k, n].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

impl GemmShape {
    /// # Errors
    /// Shapes that do not match, different dtypes or devices.
    fn of(a: &Tensor, b: &Tensor) -> Result<GemmShape> {
        let ((m, k), (l, n)) = (a.dims2()?, b.dims2()?);
        if k != l || a.dtype() != b.dtype() {
            let say = |t: &Tensor| format!("{:?} of {}", t.dims(), t.dtype().as_str());
            return Err(candle_core::Error::Msg(format!("cannot multiply {} by {}", say(a), say(b))));
        }
        same_device("matmul", a, "b", b)?;
        if m.checked_mul(n).is_none() {
            return Err(candle_core::Error::Msg(format!("a matmul with {m} rows and {n} columns is too large")));
        }
        Ok(GemmShape { m, k, n })
    }
}

/// The matrix, or a copy if it is neither row-major nor column-major.
fn major(x: &Tensor) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let fits = match *x.stride() {
        [row, 1] => row >= columns || rows <= 1,
        [1, column] => column >= rows || columns <= 1,
        _ => false,
    };
    if fits { Ok(x.clone()) } else { x.force_contiguous() }
}

/// The elements of a view in host memory.
fn host<'a, C: Elem>(view: &'a mut ViewMut<'_, C>) -> Result<&'a mut [C]> {
    view.as_mut_slice().ok_or_else(|| candle_core::Error::Msg("a matmul on the CPU expects memory of the CPU".into()))
}

/// Returns a·b for a [m, k] and b [k, n] of one float dtype, which is also that of the result [m, n].
///
/// # Errors
/// Shapes that do not match.
pub fn multiply(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let GemmShape { m, n, .. } = GemmShape::of(a, b)?;
    for_float_type!(a.dtype(), "a matmul", T => Ok(matmul_alloc::<T>(a, b)?.into_tensor((m, n))))
}

/// As [`multiply`], but returns an allocation that can be recorded in the autograd graph.
///
/// # Errors
/// As [`multiply`]; also operands of another dtype than T.
pub fn matmul_alloc<T: Elem + FloatElement>(a: &Tensor, b: &Tensor) -> Result<OutputAlloc<T>> {
    let _span = span("matmul");
    let shape = GemmShape::of(a, b)?;
    let device = a.device();
    let mut c = OutputAlloc::<T>::new(device, shape.m * shape.n)?;
    let (a, b) = (major(a)?, major(b)?);
    let (a, b) = (Read::<T>::new(&a)?, Read::<T>::new(&b)?);
    let (a, b) = (a.strided::<2>()?, b.strided::<2>()?);
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(cuda) = device {
        gpu_matmul::multiply(cuda, a, b, gpu_matmul::Addend::Zero, c.view()?, shape)?;
        return Ok(c);
    }
    cpu::multiply(&a, &b, host(&mut c.view()?)?, shape, false)?;
    Ok(c)
}

/// Returns base + a·b in f32, for a contiguous f32 base of m·n elements, and a [m, k] and b [k, n] of one float dtype.
///
/// # Errors
/// As [`multiply`]; also a base with another number of elements.
pub fn matmul_add(base: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let _span = span("matmul");
    let shape = GemmShape::of(a, b)?;
    let GemmShape { m, n, .. } = shape;
    if base.elem_count() != m * n {
        let message = format!("cannot accumulate a matmul result of shape {:?} into {:?}", [m, n], base.dims());
        return Err(candle_core::Error::Msg(message));
    }
    same_device("matmul", a, "the base", base)?;
    #[cfg(feature = "cuda")]
    let device = a.device();
    for_float_type!(a.dtype(), "a matmul", T => {
        let (a, b) = (major(a)?, major(b)?);
        let (a, b) = (Read::<T>::new(&a)?, Read::<T>::new(&b)?);
        let (a, b) = (a.strided::<2>()?, b.strided::<2>()?);
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(cuda) = device {
            let source = Read::<f32>::new(base)?;
            let mut c = OutputAlloc::<f32>::new(device, m * n)?;
            gpu_matmul::multiply(cuda, a, b, gpu_matmul::Addend::Other(source.view()?), c.view()?, shape)?;
            return Ok(c.into_tensor(base.shape()));
        }
        let mut c = OutputAlloc::<f32>::copy_of(base)?;
        cpu::multiply(&a, &b, host(&mut c.view()?)?, shape, true)?;
        Ok(c.into_tensor(base.shape()))
    })
}

/// Computes c += a·b for a contiguous c [m, n] in f32 or the dtype of a and b, and a [m, k] and b [k, n] of one float
/// dtype.
///
/// # Errors
/// As [`multiply`].
pub fn matmul_accumulate(c: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    matmul_into(c, a, b, true)
}

/// Computes c = a·b, or with `accumulate` c += a·b: see [`matmul_accumulate`].
///
/// # Errors
/// As [`multiply`].
pub fn matmul_into(c: &Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    let _span = span("matmul");
    let shape = GemmShape::of(a, b)?;
    let GemmShape { m, n, .. } = shape;
    if c.dims() != [m, n] {
        return Err(candle_core::Error::Msg(format!(
            "cannot accumulate a matmul result of shape {:?} into {:?}",
            [m, n],
            c.dims()
        )));
    }
    same_device("matmul", a, "c", c)?;
    // c is locked while it is written: operands in its memory are copied first.
    let apart = |x: &Tensor| if same_storage(x, c) { x.force_contiguous() } else { Ok(x.clone()) };
    let (a, b) = (&apart(a)?, &apart(b)?);
    for_float_type!(a.dtype(), "a matmul", T => match c.dtype() {
        DType::F32 => matmul_write::<T, f32>(c, a, b, shape, accumulate),
        same if same == a.dtype() => matmul_write::<T, T>(c, a, b, shape, accumulate),
        other => Err(candle_core::Error::Msg(format!(
            "expected f32 or {0} as the target of a {0} matmul, found {1}",
            a.dtype().as_str(),
            other.as_str()
        ))),
    })
}

/// y = silu(gate) · value [m, d] for the halves gate and value of a·b [m, 2d], which is written to `products`, contiguous;
/// a is [m, k] and b [k, 2d], and all are of the dtype T.
///
/// On Hopper, one kernel computes bf16 and f16: y of sums that are not rounded.
///
/// # Errors
/// As [`multiply`]; an odd number of columns.
pub fn matmul_swiglu<T: Elem + FloatElement>(products: &Tensor, a: &Tensor, b: &Tensor) -> Result<OutputAlloc<T>> {
    let GemmShape { m, n, .. } = GemmShape::of(a, b)?;
    if products.dims() != [m, n] || !n.is_multiple_of(2) {
        let expected = format!("a matrix [{m}, {n}] with an even number of columns");
        return Err(bad_argument("matmul_swiglu", "products", expected, format!("the shape {:?}", products.dims())));
    }
    if m * n == 0 {
        return OutputAlloc::new(a.device(), 0);
    }
    #[cfg(feature = "cuda")]
    if a.device().is_cuda()
        && gpu_matmul::precision_of_kernel::<T>(crate::memory::kernel_device(a.device())?) == Some(Precision::Ieee)
        && ![a, b].into_iter().any(|x| same_storage(x, products))
    {
        let _span = span("matmul");
        return gpu_matmul::multiply_swiglu::<T>(&major(a)?, &major(b)?, products, [m, n / 2]);
    }
    matmul_into(products, a, b, false)?;
    crate::elementwise::swiglu_forward::<T>(products)
}

fn matmul_write<T: Elem + FloatElement, C: Elem + FloatElement>(
    c: &Tensor,
    a: &Tensor,
    b: &Tensor,
    shape: GemmShape,
    accumulate: bool,
) -> Result<()> {
    #[cfg(feature = "cuda")]
    let device = a.device();
    let (a, b) = (major(a)?, major(b)?);
    let (a, b) = (Read::<T>::new(&a)?, Read::<T>::new(&b)?);
    let (a, b) = (a.strided::<2>()?, b.strided::<2>()?);
    write::<C, ()>(c, |_, mut target| {
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(cuda) = device {
            let addend = if accumulate { gpu_matmul::Addend::Itself } else { gpu_matmul::Addend::Zero };
            return gpu_matmul::multiply(cuda, a, b, addend, target, shape);
        }
        cpu::multiply(&a, &b, host(&mut target)?, shape, accumulate)
    })
}

mod cpu {
    use candle_core::Result;
    use gemm::Parallelism;
    use rayon::prelude::*;
    use tilewright::kernels;

    use super::{Elem, GemmShape};

    type Matrix<'a, T> = kernels::Tensor<'a, T, 2>;

    /// Computes c = a·b, or with `accumulate` c += a·b, rounded to the dtype of c once.
    pub fn multiply<T: Elem, C: Elem>(
        a: &Matrix<T>,
        b: &Matrix<T>,
        c: &mut [C],
        shape: GemmShape,
        accumulate: bool,
    ) -> Result<()> {
        if let Ok(c) = bytemuck::try_cast_slice_mut::<C, f32>(c)
            && <C as candle_core::WithDType>::DTYPE == candle_core::DType::F32
        {
            return in_f32(a, b, c, shape, accumulate);
        }
        let mut exact = vec![0.0; c.len()];
        if accumulate {
            C::to_f32s(c, &mut exact);
        }
        in_f32(a, b, &mut exact, shape, accumulate)?;
        c.par_chunks_mut(CHUNK).zip(exact.par_chunks(CHUNK)).for_each(|(c, exact)| {
            C::from_f32s(exact, c);
        });
        Ok(())
    }

    /// Elements that a thread converts at a time.
    const CHUNK: usize = 1 << 14;

    /// An operand in f32 with its strides: borrowed, or converted.
    enum Operand<'a> {
        Same(&'a [f32], [isize; 2]),
        Converted(Vec<f32>, [isize; 2]),
    }

    impl<'a> Operand<'a> {
        fn new<T: Elem>(matrix: &Matrix<'a, T>) -> Operand<'a> {
            let strides = matrix.strides().map(|s| s as isize);
            let elements = matrix.view().as_slice().expect("both operands are on the device of the result");
            if let (Ok(same), candle_core::DType::F32) =
                (bytemuck::try_cast_slice(elements), <T as candle_core::WithDType>::DTYPE)
            {
                return Operand::Same(same, strides);
            }
            // The view may extend beyond the matrix, up to the end of all parameters.
            let [m, n] = matrix.shape();
            let last =
                m.saturating_sub(1) * strides[0].unsigned_abs() + n.saturating_sub(1) * strides[1].unsigned_abs();
            let elements = &elements[..elements.len().min(last + 1)];
            let mut converted = vec![0.0_f32; elements.len()];
            converted.par_chunks_mut(CHUNK).zip(elements.par_chunks(CHUNK)).for_each(|(to, from)| {
                T::to_f32s(from, to);
            });
            Operand::Converted(converted, strides)
        }

        fn parts(&self) -> (*const f32, [isize; 2]) {
            match self {
                Operand::Same(elements, strides) => (elements.as_ptr(), *strides),
                Operand::Converted(elements, strides) => (elements.as_ptr(), *strides),
            }
        }
    }

    fn in_f32<T: Elem>(a: &Matrix<T>, b: &Matrix<T>, c: &mut [f32], shape: GemmShape, add: bool) -> Result<()> {
        let GemmShape { m, k, n } = shape;
        if m * n == 0 {
            return Ok(());
        }
        let (a, b) = (Operand::new(a), Operand::new(b));
        let ((a_at, a_strides), (b_at, b_strides)) = (a.parts(), b.parts());
        // Below this number of multiplications threads cost more time than they save.
        let parallelism = if m * k * n < 1 << 18 { Parallelism::None } else { Parallelism::Rayon(0) };
        assert!(
            c.len() >= m * n,
            "internal error: a matmul result of {m} x {n} for {} elements; please report this",
            c.len()
        );
        // SAFETY: a and b are [m, k] and [k, n] in their strides, which `Tensor::strided` checked against their memory;
        // c has m·n elements, row-major, borrowed exclusively. With `read_dst` unset, c is only written.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n as isize,
                add,
                a_at,
                a_strides[1],
                a_strides[0],
                b_at,
                b_strides[1],
                b_strides[0],
                if add { 1.0 } else { 0.0 },
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
        Ok(())
    }
}
