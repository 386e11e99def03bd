//! cuBLAS matmuls on candle's stream: d = a·b + c, where c is d itself, another matrix, or zero.
//!
//! Uses cublasLt instead of cuBLAS for two reasons: c and d may differ, so a residual stream is read and written once;
//! and the caller passes the workspace, so a CUDA graph capture allocates nothing. The chosen algorithm depends only on
//! the problem and on the number of reserved SMs ([`reserve_sms`](crate::matmul::reserve_sms)): equal inputs give equal bits in
//! every run.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda::cudarc::cublaslt::{result, sys};
use candle_core::cuda::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use candle_core::{CudaDevice, DType, Result, WithDType};
use tilewright::{ViewMut, kernels};

use crate::gpu_matmul::Addend;
use crate::matmul::{GemmShape, reserved_sms};
use crate::memory::{Elem, is_per_thread, stream_key};

/// Computes d [m, n] = a·b + addend, row-major, for a [m, k] and b [k, n] that are row-major or column-major.
///
/// The precision of f32 matmuls follows `candle_core::cuda::gemm_reduced_precision_f32`: f32, or operands rounded to
/// tf32.
///
/// # Errors
/// A matrix that is neither row-major nor column-major, one with 2³¹ rows or columns, an addend of another length, and
/// those of cuBLAS.
pub fn multiply<T: Elem, C: Elem>(
    device: &CudaDevice,
    a: &kernels::Tensor<'_, T, 2>,
    b: &kernels::Tensor<'_, T, 2>,
    addend: Addend<'_, C>,
    d: &mut ViewMut<'_, C>,
    GemmShape { m, k, n }: GemmShape,
) -> Result<()> {
    if m * n == 0 {
        return Ok(());
    }
    let failed = |error: result::CublasError| {
        candle_core::Error::Msg(format!("cuBLAS failed at a matmul of {m} x {k} and {k} x {n}: {error}"))
    };
    let (c_address, beta) = match addend {
        Addend::Zero => (d.address(), 0.0_f32),
        Addend::Itself => (d.address(), 1.0),
        Addend::Other(other) if other.len() == m * n => (other.address(), 1.0),
        Addend::Other(other) => {
            let message =
                format!("cannot accumulate a matmul result of shape {:?} into {} elements", [m, n], other.len());
            return Err(candle_core::Error::Msg(message));
        }
    };
    let (a_op, a_ld) = op_and_leading_dim(a.strides(), a.shape())?;
    let (b_op, b_ld) = op_and_leading_dim(b.strides(), b.shape())?;
    let addresses = [b.view().address(), a.view().address(), c_address, d.address()];
    // cuBLAS is column-major: the row-major d is its dᵀ = bᵀ·aᵀ.
    let key = MatmulKey {
        sizes: [int(n)?, int(m)?, int(k)?],
        ops: [b_op, a_op],
        leading_dims: [int(b_ld)?, int(a_ld)?],
        operands: data_type::<T>()?,
        result: data_type::<C>()?,
        tf32: <T as WithDType>::DTYPE == DType::F32 && candle_core::cuda::gemm_reduced_precision_f32(),
        accumulate: beta != 0.0,
        alignments: addresses.map(alignment),
        reserved_sms: reserved_sms(),
    };
    let stream = device.cuda_stream();
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let lt = match open.iter().position(|lt| stream_key(&lt.stream) == stream_key(&stream)) {
        Some(at) => &mut open[at],
        None => {
            open.push(Lt::new(&stream)?);
            let last = open.len() - 1;
            &mut open[last]
        }
    };
    let plan = match lt.plans.get(&key) {
        Some(plan) => plan,
        None => {
            let plan = Plan::new(lt.handle, lt.sms, &key).map_err(failed)?;
            lt.plans.entry(key).or_insert(plan)
        }
    };
    let alpha = 1.0_f32;
    let allocated = match &lt.workspace {
        Some(_) => None,
        None => Some(allocate_workspace(&stream)?),
    };
    let workspace = lt.workspace.as_ref().or(allocated.as_ref()).map_or(0, |slice| slice.device_ptr(&stream).0);
    let at = addresses.map(|address| address as *mut c_void);
    // SAFETY: the operands borrow memory of this device in the sizes and strides of the plan, d exclusively; the addend
    // has as many elements as d; the workspace has the stated size, and is used on this stream only: that of a call is freed
    // in the order of the stream.
    unsafe {
        result::matmul(
            lt.handle,
            plan.matmul_desc,
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

/// Workspace in bytes, as the cuBLAS documentation recommends for Hopper GPUs.
const WORKSPACE: usize = 32 << 20;

fn allocate_workspace(stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>> {
    // SAFETY: cuBLAS writes the workspace before it reads it.
    unsafe { stream.alloc::<u8>(WORKSPACE) }
        .map_err(|error| candle_core::Error::Msg(format!("cannot allocate the workspace of cuBLAS: {error}")))
}

/// Handles, one per stream in use, never freed.
static OPEN: Mutex<Vec<Lt>> = Mutex::new(Vec::new());

/// A cublasLt handle for one stream.
struct Lt {
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    /// `None` for the default stream of each thread, which is another stream in every thread: calls allocate theirs.
    workspace: Option<CudaSlice<u8>>,
    /// Number of SMs of the GPU.
    sms: i32,
    plans: HashMap<MatmulKey, Plan>,
}

// SAFETY: any thread may use the handle and the objects that plans point to, one at a time, which the lock ensures.
unsafe impl Send for Lt {}

impl Lt {
    fn new(stream: &Arc<CudaStream>) -> Result<Lt> {
        let failed =
            |error: &dyn std::fmt::Display| candle_core::Error::Msg(format!("cannot initialize cuBLAS: {error}"));
        let handle = result::create_handle().map_err(|error| failed(&error))?;
        let workspace = if is_per_thread(stream) { None } else { Some(allocate_workspace(stream)?) };
        let sms = stream.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let sms = sms.map_err(|error| failed(&error))?;
        Ok(Lt { stream: stream.clone(), handle, workspace, sms, plans: HashMap::new() })
    }
}

/// Cache key: everything that the choice of an algorithm depends on, in column-major terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MatmulKey {
    /// m, n and k.
    sizes: [c_int; 3],
    /// Operation on each operand: none or transpose.
    ops: [Op; 2],
    /// Leading dimension of each operand.
    leading_dims: [c_int; 2],
    operands: sys::cudaDataType,
    result: sys::cudaDataType,
    tf32: bool,
    accumulate: bool,
    /// Alignment in bytes of both operands, the base and the result.
    alignments: [u32; 4],
    /// SMs that are reserved for other work.
    reserved_sms: u32,
}

/// Arguments of a cublasLt call, created once per key.
struct Plan {
    matmul_desc: sys::cublasLtMatmulDesc_t,
    /// Layouts of both operands and of the result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    /// Creates a plan for a GPU with this number of SMs.
    fn new(handle: sys::cublasLtHandle_t, sms: i32, key: &MatmulKey) -> std::result::Result<Plan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Description;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

        let compute = match key.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let matmul_desc = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?;
        let attributes = [Description::CUBLASLT_MATMUL_DESC_TRANSA, Description::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, op) in attributes.into_iter().zip(&key.ops) {
            // SAFETY: the descriptor is alive, and these attributes have that type.
            unsafe {
                result::set_matmul_desc_attribute(
                    matmul_desc,
                    attribute,
                    std::ptr::from_ref(op).cast(),
                    size_of::<Op>(),
                )?;
            }
        }
        if key.reserved_sms > 0 {
            let target = sm_count_target(sms, key.reserved_sms);
            // SAFETY: as above.
            unsafe {
                result::set_matmul_desc_attribute(
                    matmul_desc,
                    Description::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                    (&raw const target).cast(),
                    size_of::<i32>(),
                )?;
            }
        }
        let [m, n, k] = key.sizes.map(|size| size as u64);
        let layout = |dtype, op, rows, columns, leading_dim: c_int| match op {
            OP_N => result::create_matrix_layout(dtype, rows, columns, leading_dim.into()),
            _ => result::create_matrix_layout(dtype, columns, rows, leading_dim.into()),
        };
        let [first, second] = key.leading_dims;
        let layouts = [
            layout(key.operands, key.ops[0], m, k, first)?,
            layout(key.operands, key.ops[1], k, n, second)?,
            result::create_matrix_layout(key.result, m, n, m as i64)?,
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
        limits
            .extend(names.into_iter().zip(key.alignments).map(|(name, bytes)| (name, bytes.into(), size_of::<u32>())));
        if key.result != sys::cudaDataType_t::CUDA_R_32F {
            // Split-K partial sums would be reduced in the dtype of the result: require f32.
            let mask = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u64;
            let name = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            limits.push((name, mask, size_of::<u32>()));
        }
        // SAFETY: everything was created above. The limit of the workspace is a size_t; the others are u32, which equal
        // the first bytes of a little-endian u64.
        unsafe {
            for (name, number, bytes) in limits {
                result::set_matmul_pref_attribute(preference, name, (&raw const number).cast(), bytes)?;
            }
            let [a, b, d] = layouts;
            let found = result::get_matmul_algo_heuristic(handle, matmul_desc, a, b, d, d, preference)?;
            result::destroy_matmul_pref(preference)?;
            tracing::debug!("{key:?}: {:.2} waves, {} bytes of workspace", found.wavesCount, found.workspaceSize);
            Ok(Plan { matmul_desc, layouts, algorithm: found.algo })
        }
    }
}

/// Number of SMs for which a matmul is planned if `reserved_sms` of `sms` are reserved: at least one.
fn sm_count_target(sms: i32, reserved_sms: u32) -> i32 {
    sms.saturating_sub_unsigned(reserved_sms).max(1)
}

/// Largest power of two, up to 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A cublasOperation_t: none or transpose.
type Op = i32;
const OP_N: Op = 0;
const OP_T: Op = 1;

/// The operation that reads a row-major matrix as a column-major one, and its leading dimension.
fn op_and_leading_dim(strides: [i64; 2], shape: [usize; 2]) -> Result<(Op, usize)> {
    match strides {
        [row, 1] => Ok((OP_N, (row as usize).max(shape[1]))),
        [1, column] => Ok((OP_T, (column as usize).max(shape[0]))),
        _ => Err(candle_core::Error::RequiresContiguous { op: "matmul" }.bt()),
    }
}

fn int(n: usize) -> Result<c_int> {
    c_int::try_from(n)
        .map_err(|_| candle_core::Error::Msg(format!("a matmul with {n} rows or columns is too large for cuBLAS")))
}

fn data_type<T: WithDType>() -> Result<sys::cudaDataType> {
    match <T as WithDType>::DTYPE {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        other => Err(candle_core::Error::Msg(format!("cuBLAS does not multiply {}", other.as_str()))),
    }
}
