//! Matrix products of cuBLAS on candle's stream: d = a·b + c, where c may be d itself, another matrix, or nothing.
//!
//! cublasLt rather than cuBLAS: it adds to one matrix and writes another, so that a residual stream is read and written once; and what
//! it works with is given to it, so that a recording allocates nothing of its own. What it chooses for a product depends on the
//! product and on how many multiprocessors are left to others ([`leave_multiprocessors`](super::leave_multiprocessors)): the same numbers
//! have the same bits in every run.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda::cudarc::cublaslt::{result, sys};
use candle_core::cuda::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use candle_core::{CudaDevice, DType, Result, WithDType};
use tilewright::{View, ViewMut, kernels};

use super::memory::Elem;
use super::parts;
use super::product::left_multiprocessors;

/// What a product is added to.
#[derive(Clone, Copy)]
pub enum Base<'a, C: Elem> {
    /// Nothing: the result is written.
    Zero,
    /// What is there.
    Itself,
    /// Another matrix, row by row as the result.
    Other(View<'a, C>),
}

/// d [m, n] = a·b + base, row by row, for a [m, k] and b [k, n] that lie by rows or by columns.
///
/// f32 operands multiply as `candle_core::cuda::gemm_reduced_precision_f32` says: exactly, or rounded to tf32; or by our own kernel in
/// three parts, if [`multiply_by_parts`](super::multiply_by_parts) said so.
///
/// # Errors
/// A matrix that lies neither by rows nor by columns, one with 2³¹ rows or columns, a base of another length, and those of cuBLAS.
pub fn multiply<T: Elem, C: Elem>(
    device: &CudaDevice,
    a: &kernels::Tensor<'_, T, 2>,
    b: &kernels::Tensor<'_, T, 2>,
    base: Base<'_, C>,
    d: &mut ViewMut<'_, C>,
    [m, k, n]: [usize; 3],
) -> Result<()> {
    if m * n == 0 {
        return Ok(());
    }
    if parts::are_wanted() && [<T as WithDType>::DTYPE, <C as WithDType>::DTYPE] == [DType::F32; 2] {
        return parts::multiply(device, a, b, base, d, [m, n]);
    }
    let failed = |error: result::CublasError| {
        candle_core::Error::Msg(format!("cuBLAS failed at a product of {m} x {k} and {k} x {n}: {error}"))
    };
    let (c_address, beta) = match base {
        Base::Zero => (d.address(), 0.0_f32),
        Base::Itself => (d.address(), 1.0),
        Base::Other(other) if other.len() == m * n => (other.address(), 1.0),
        Base::Other(other) => {
            let message = format!("a product of shape {:?} cannot be added to {} numbers", [m, n], other.len());
            return Err(candle_core::Error::Msg(message));
        }
    };
    let (a_op, a_ld) = leading(a.strides(), a.shape())?;
    let (b_op, b_ld) = leading(b.strides(), b.shape())?;
    let addresses = [b.view().address(), a.view().address(), c_address, d.address()];
    // cuBLAS counts by columns: our d by rows is its dᵀ = bᵀ·aᵀ.
    let product = Product {
        sizes: [int(n)?, int(m)?, int(k)?],
        ops: [b_op, a_op],
        leading: [int(b_ld)?, int(a_ld)?],
        operands: data_type::<T>()?,
        result: data_type::<C>()?,
        tf32: <T as WithDType>::DTYPE == DType::F32 && candle_core::cuda::gemm_reduced_precision_f32(),
        adds: beta != 0.0,
        alignments: addresses.map(alignment),
        left: left_multiprocessors(),
    };
    let stream = device.cuda_stream();
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let lt = match open.iter().position(|lt| Arc::ptr_eq(&lt.stream, &stream)) {
        Some(at) => &mut open[at],
        None => {
            open.push(Lt::new(&stream)?);
            let last = open.len() - 1;
            &mut open[last]
        }
    };
    let plan = match lt.plans.get(&product) {
        Some(plan) => plan,
        None => {
            let plan = Plan::new(lt.handle, lt.multiprocessors, &product).map_err(failed)?;
            lt.plans.entry(product).or_insert(plan)
        }
    };
    let alpha = 1.0_f32;
    let (workspace, _) = lt.workspace.device_ptr(&stream);
    let at = addresses.map(|address| address as *mut c_void);
    // SAFETY: the operands borrow memory of this device in the sizes and strides that the plan was made for, d exclusively; the
    // base has as many elements as d; the workspace is as large as said, and used on this stream alone.
    unsafe {
        result::matmul(
            lt.handle,
            plan.description,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            at[0],
            plan.layouts[0],
            at[1],
            plan.layouts[1],
            at[2],
            plan.layouts[2],
            at[3],
            plan.layouts[2],
            &raw const plan.algorithm,
            workspace as *mut c_void,
            WORKSPACE,
            stream.cu_stream().cast(),
        )
    }
    .map_err(failed)
}

/// Bytes to work with, as cuBLAS's documentation asks for on Hopper GPUs.
const WORKSPACE: usize = 32 << 20;

/// One for each stream in use, for good.
static OPEN: Mutex<Vec<Lt>> = Mutex::new(Vec::new());

/// cublasLt on a stream.
struct Lt {
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    /// Of the GPU.
    multiprocessors: i32,
    plans: HashMap<Product, Plan>,
}

// SAFETY: the handle and what plans point to may be used by any thread, one at a time, which the lock sees to.
unsafe impl Send for Lt {}

impl Lt {
    fn new(stream: &Arc<CudaStream>) -> Result<Lt> {
        let failed = |error: &dyn std::fmt::Display| candle_core::Error::Msg(format!("cuBLAS does not start: {error}"));
        let handle = result::create_handle().map_err(|error| failed(&error))?;
        // SAFETY: cuBLAS writes it before it reads it.
        let workspace = unsafe { stream.alloc::<u8>(WORKSPACE) }.map_err(|error| failed(&error))?;
        let multiprocessors = stream.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_err(|error| failed(&error))?;
        Ok(Lt { stream: stream.clone(), handle, workspace, multiprocessors, plans: HashMap::new() })
    }
}

/// All that the choice of an algorithm depends on, as cuBLAS counts: by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    /// Rows of the result, its columns, and what is summed over.
    sizes: [c_int; 3],
    /// Of both operands.
    ops: [Op; 2],
    leading: [c_int; 2],
    operands: sys::cudaDataType,
    result: sys::cudaDataType,
    tf32: bool,
    adds: bool,
    /// Bytes, of both operands, what is added, and the result.
    alignments: [u32; 4],
    /// Multiprocessors that others use.
    left: u32,
}

/// What cuBLAS wants to know again at each call.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// Of both operands and the result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// For a GPU of so many multiprocessors.
    fn new(
        handle: sys::cublasLtHandle_t,
        multiprocessors: i32,
        product: &Product,
    ) -> std::result::Result<Plan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Description;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

        let compute = match product.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let description = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?;
        let attributes = [Description::CUBLASLT_MATMUL_DESC_TRANSA, Description::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, op) in attributes.into_iter().zip(&product.ops) {
            // SAFETY: the description lives, and these attributes are of that type.
            unsafe {
                result::set_matmul_desc_attribute(
                    description,
                    attribute,
                    std::ptr::from_ref(op).cast(),
                    size_of::<Op>(),
                )?;
            }
        }
        if product.left > 0 {
            let target = target(multiprocessors, product.left);
            // SAFETY: as above.
            unsafe {
                result::set_matmul_desc_attribute(
                    description,
                    Description::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                    (&raw const target).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        let [m, n, k] = product.sizes.map(|size| size as u64);
        let layout = |dtype, op, rows, columns, leading: c_int| match op {
            AS_IS => result::create_matrix_layout(dtype, rows, columns, leading.into()),
            _ => result::create_matrix_layout(dtype, columns, rows, leading.into()),
        };
        let [first, second] = product.leading;
        let layouts = [
            layout(product.operands, product.ops[0], m, k, first)?,
            layout(product.operands, product.ops[1], k, n, second)?,
            result::create_matrix_layout(product.result, m, n, m as i64)?,
        ];
        let preference = result::create_matmul_pref()?;
        let mut limits =
            vec![(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE as u64, size_of::<usize>())];
        let names = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        limits.extend(
            names.into_iter().zip(product.alignments).map(|(name, bytes)| (name, bytes.into(), size_of::<u32>())),
        );
        if product.result != sys::cudaDataType_t::CUDA_R_32F {
            // Parts of a sum that is split up would be added in the result's type: they are to be added in f32.
            let mask = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u64;
            let name = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            limits.push((name, mask, size_of::<u32>()));
        }
        // SAFETY: everything was made above. The limit of the workspace is a size_t, the others are u32, of which a little-endian
        // u64 begins with the bytes.
        unsafe {
            for (name, number, bytes) in limits {
                result::set_matmul_pref_attribute(preference, name, (&raw const number).cast(), bytes)?;
            }
            let [a, b, d] = layouts;
            let found = result::get_matmul_algo_heuristic(handle, description, a, b, d, d, preference)?;
            result::destroy_matmul_pref(preference)?;
            tracing::debug!("{product:?}: {:.2} waves, {} bytes to work with", found.wavesCount, found.workspaceSize);
            Ok(Plan { description, layouts, algorithm: found.algo })
        }
    }
}

/// How many of so many multiprocessors a product is made for if others use `left` of them: one at least.
fn target(multiprocessors: i32, left: u32) -> i32 {
    multiprocessors.saturating_sub_unsigned(left).max(1)
}

/// Largest power of two, up to 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A cublasOperation_t: as it is, or transposed.
type Op = i32;
const AS_IS: Op = 0;
const TRANSPOSED: Op = 1;

/// How a matrix by rows reads as one by columns, and the distance of its rows (or columns, if it lies by those).
fn leading(strides: [i64; 2], shape: [usize; 2]) -> Result<(Op, usize)> {
    match strides {
        [row, 1] => Ok((AS_IS, (row as usize).max(shape[1]))),
        [1, column] => Ok((TRANSPOSED, (column as usize).max(shape[0]))),
        _ => Err(candle_core::Error::RequiresContiguous { op: "matrix product" }.bt()),
    }
}

fn int(n: usize) -> Result<c_int> {
    c_int::try_from(n)
        .map_err(|_| candle_core::Error::Msg(format!("a product with {n} rows or columns is too large for cuBLAS")))
}

fn data_type<T: WithDType>() -> Result<sys::cudaDataType> {
    match <T as WithDType>::DTYPE {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        other => Err(candle_core::Error::Msg(format!("cuBLAS does not multiply {}", other.as_str()))),
    }
}
