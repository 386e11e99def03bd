//! One configuration of every kernel, for the tests that compile it for snapshots and assemble it.

use crate::consts;
use tilewright::autotune::Config;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::attention::config::{Pass, default_tiles};
use tilewright::kernels::scaled_matmul::Scaling;
use tilewright::kernels::{
    KERNELS, activation, adamw, attention, cast, column_sum, cross_entropy, embedding, layer_norm, matmul,
    matmul_swiglu, rank_sum, rms_norm, rope, scaled_matmul, softmax, swiglu, weighted_sum,
};
use tilewright::prelude::Precision;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::target::{CompileOptions, GpuArch, Target};

/// The PTX version of all code that is compared or assembled.
pub const PTX_VERSION: u32 = 84;

/// The compile options of a configuration of the autotuner.
pub fn compile_options(config: &Config) -> CompileOptions {
    CompileOptions {
        num_warps: config.num_warps,
        num_ctas: config.num_ctas,
        num_stages: config.num_stages,
        max_registers: config.max_registers,
        schedule: config.schedule,
        ptx_version: PTX_VERSION,
        ..CompileOptions::default()
    }
}

/// A kernel with element types, constants and compile options.
#[derive(Clone, Debug)]
pub struct Configuration {
    pub def: &'static KernelDef,
    pub dtypes: Vec<DType>,
    pub consts: Vec<(&'static str, ConstValue)>,
    pub options: CompileOptions,
}

/// The specialization of a launch with well-aligned, dense tensors: pointers and extents are multiples of 16, innermost
/// strides are 1.
pub fn well_aligned(def: &KernelDef) -> Specialization {
    let innermost = |name: &str| {
        let of_pointer = ["_stride", "_stride_d", "_stride_dim", "a_stride_k", "b_stride_n", "c_stride_n"];
        match def.tensors.iter().find(|t| t.strides.contains(&name)) {
            Some(tensor) => tensor.strides.last() == Some(&name),
            None => of_pointer.iter().any(|end| name.ends_with(end)),
        }
    };
    let args = def.params.iter().filter_map(|p| match p.kind {
        ParamKind::Constexpr { .. } => None,
        _ if !p.specialize => Some(ArgSpec::default()),
        ParamKind::Scalar(elem) if !elem.resolve(&[]).is_some_and(DType::is_int) => Some(ArgSpec::default()),
        ParamKind::Scalar(_) if innermost(p.name) => Some(ArgSpec { divisible_by: 1, equal_to: Some(1) }),
        ParamKind::Scalar(_) | ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) => {
            Some(ArgSpec { divisible_by: 16, equal_to: None })
        }
    });
    Specialization { args: args.collect() }
}

impl Configuration {
    /// Records the kernel as Tile IR.
    pub fn record(&self, specialization: &Specialization) -> Func {
        let result = self.def.record(&self.dtypes, &self.consts, specialization);
        result.unwrap_or_else(|d| panic!("{}: {d}", self.def.name))
    }
}

fn options(num_warps: u32, num_stages: u32) -> CompileOptions {
    CompileOptions { num_warps, num_stages, ptx_version: PTX_VERSION, ..CompileOptions::default() }
}

/// Constants and compile options of one kernel, as its host function chooses them for large inputs.
fn configuration(def: &'static KernelDef, dtype: DType) -> Configuration {
    let rows = |rows_tile: usize, d_tile: usize| consts! { rows_tile = rows_tile, d_tile = d_tile }.to_vec();
    let norm = |rows_tile: usize, d_tile: usize| {
        consts! { rows_tile = rows_tile, d_tile = d_tile, whole_rows = true }.to_vec()
    };
    let is = |other: &'static KernelDef| std::ptr::eq(def, other);
    let (consts, options) = if is(&column_sum::COLUMN_SUM) {
        (rows(64, 32), options(4, 3))
    } else if is(&weighted_sum::WEIGHTED_SUM_FWD) || is(&weighted_sum::WEIGHTED_SUM_BWD) || is(&softmax::SOFTMAX_ROWS) {
        (rows(8, 1024), options(8, 3))
    } else if is(&softmax::SOFTMAX_WIDE_ROWS) || is(&softmax::SOFTMAX_BWD) {
        (rows(2, 4096), options(8, 3))
    } else if [&cross_entropy::CROSS_ENTROPY_FWD, &cross_entropy::CROSS_ENTROPY_FWD_BWD].iter().any(|k| is(k)) {
        let size_per_thread = 16 / dtype.bytes();
        (
            consts! { rows_tile = 1usize, d_tile = 4096usize, slots = 128usize, size_per_thread = size_per_thread }
                .to_vec(),
            options(4, 3),
        )
    } else if is(&activation::ACTIVATION_FWD) {
        let consts = consts! {
            rows_tile = 2usize, d_tile = 1024usize, activation = Activation::Gelu, has_bias = true, has_residual = true,
        };
        (consts.to_vec(), options(4, 3))
    } else if is(&activation::ACTIVATION_BWD) {
        let consts = consts! {
            rows_tile = 2usize, d_tile = 1024usize, activation = Activation::GeluTanh, has_bias = true,
        };
        (consts.to_vec(), options(4, 3))
    } else if [&swiglu::SWIGLU_FWD, &swiglu::SWIGLU_BWD].iter().any(|k| is(k))
        || is(&cast::CAST)
        || is(&cast::SCALE)
        || is(&cross_entropy::CROSS_ENTROPY_BWD)
    {
        (rows(2, 1024), options(4, 3))
    } else if is(&attention::documents::DOCUMENT_RANGES_OF_SIDE) {
        (consts! { rows = true, causal = true }.to_vec(), options(4, 1))
    } else if is(&embedding::EMBEDDING_BWD) {
        (consts! { ids_tile = 512usize, d_tile = 512usize }.to_vec(), options(1, 3))
    } else if is(&rope::ROPE_AT) || is(&rope::ROPE_FROM) {
        (consts! { tokens_tile = 32usize, heads_tile = 8usize, d_tile = 64usize }.to_vec(), options(4, 3))
    } else if [&adamw::ADAMW, &adamw::ADAMW_CONTROLLED, &adamw::ADAMW_WITH_COMPUTE_WEIGHTS].iter().any(|k| is(k)) {
        (consts! { tile = 1024usize }.to_vec(), options(4, 3))
    } else if is(&adamw::ADAMW_TWO_PEERS) {
        (consts! { tile = 2048usize }.to_vec(), options(8, 3))
    } else if is(&rank_sum::RANK_SUM) {
        let tile = 8192 / dtype.bytes();
        (
            consts! { tile = tile, rank = 0usize, world = 2usize, average = true, write_copy = true }.to_vec(),
            options(4, 3),
        )
    } else if [
        &rms_norm::RMS_NORM_FWD,
        &rms_norm::RMS_NORM_BWD,
        &layer_norm::LAYER_NORM_FWD,
        &layer_norm::LAYER_NORM_BWD,
    ]
    .iter()
    .any(|k| is(k))
    {
        // Column sums are kept in registers together with the operands.
        let backward = is(&rms_norm::RMS_NORM_BWD) || is(&layer_norm::LAYER_NORM_BWD);
        (norm(if backward { 4 } else { 8 }, 1024), options(8, 3))
    } else if is(&matmul::MATMUL) {
        let (tile, k_tile, warps, stages) = if dtype.bytes() == 2 { (128usize, 64usize, 8, 4) } else { (64, 16, 4, 3) };
        let consts = consts! {
            m_tile = tile, n_tile = tile, k_tile = k_tile, activation = Activation::None, precision = Precision::Ieee,
        };
        (consts.to_vec(), options(warps, stages))
    } else if is(&matmul_swiglu::MATMUL_SWIGLU) {
        let (m_tile, n_tile, k_tile, warps) =
            if dtype.bytes() == 2 { (128usize, 64usize, 64usize, 8) } else { (32, 32, 16, 4) };
        let consts = consts! { m_tile = m_tile, n_tile = n_tile, k_tile = k_tile, b_col_major = true };
        (consts.to_vec(), options(warps, 3))
    } else if is(&scaled_matmul::SCALED_MATMUL) {
        let consts = consts! {
            m_tile = 128usize, n_tile = 128usize, k_tile = 64usize, b_col_major = true, scaling = Scaling::Rowwise,
        };
        (consts.to_vec(), options(8, 3))
    } else {
        attention_configuration(def, dtype)
    };
    let dtypes = match def.name {
        "scaled_matmul" => vec![DType::F8E4M3, dtype],
        "quantize_rows" => vec![dtype, DType::F8E4M3],
        "transpose_values" => vec![DType::F8E4M3],
        "column_sum" => vec![DType::F32, dtype],
        "adamw_controlled" | "adamw_two_peers" | "adamw_with_compute_weights" | "cast" | "scale" => {
            vec![dtype, DType::BF16]
        }
        "cross_entropy_fwd" | "cross_entropy_bwd" | "cross_entropy_fwd_bwd" | "embedding_bwd" | "rope_at" => {
            vec![dtype, DType::I64]
        }
        // One for each type parameter.
        _ => vec![dtype; def.generics.len()],
    };
    Configuration { def, dtypes, consts, options }
}

/// Causal attention with head dimension 64: constants and compile options.
fn attention_configuration(def: &'static KernelDef, dtype: DType) -> (Vec<(&'static str, ConstValue)>, CompileOptions) {
    let is = |other: &'static KernelDef| std::ptr::eq(def, other);
    let pass = if is(&attention::forward::FLASH_ATTENTION_FWD) {
        Pass::Forward
    } else if is(&attention::backward::FLASH_ATTENTION_BWD_DKDV) {
        Pass::Dkdv
    } else if is(&attention::backward::FLASH_ATTENTION_BWD_DQ) {
        Pass::Dq
    } else if is(&attention::backward_rows::FLASH_ATTENTION_BWD_PREPROCESS) {
        let consts = consts! { d = 64usize, d_tile = 64usize, d_v = 64usize, d_v_tile = 64usize, q_tile = 64usize };
        return (consts.to_vec(), options(4, 1));
    } else if is(&attention::relative::FLASH_ATTENTION_BWD_RELATIVE) {
        let consts = consts! { d = 64usize, d_tile = 64usize, d_v = 64usize, d_v_tile = 64usize, tile = 64usize };
        return (consts.to_vec(), options(4, 2));
    } else if is(&attention::relative::FLASH_ATTENTION_BWD_RELATIVE_SUM) {
        return (consts! { tile = 64usize }.to_vec(), options(4, 1));
    } else if is(&attention::eight_bit::QUANTIZE_ROWS) {
        return (consts! { d_tile = 64usize }.to_vec(), options(8, 1));
    } else if is(&attention::eight_bit::TRANSPOSE_VALUES) {
        return (consts! { row_tile = 32usize, d_tile = 64usize, descale_given = true }.to_vec(), options(4, 1));
    } else if is(&attention::sinks::FLASH_ATTENTION_BWD_SINKS) {
        return (consts! { d = 64usize, d_tile = 64usize, q_tile = 32usize }.to_vec(), options(4, 1));
    } else if is(&attention::backward_rows::FLASH_ATTENTION_BWD_POSTPROCESS) {
        return (consts! { d = 64usize, d_tile = 64usize, row_tile = 64usize }.to_vec(), options(4, 1));
    } else if is(&attention::split_kv::FLASH_ATTENTION_FWD_COMBINE) {
        let consts = consts! { d = 64usize, d_tile = 64usize, q_tile = 32usize, split_tile = 4usize };
        return (consts.to_vec(), options(4, 1));
    } else {
        panic!("`{}` is in KERNELS: give it a configuration in tests/src/configurations.rs", def.name);
    };
    // Tiles that every GPU supports without warp specialization.
    let tiles = default_tiles(pass, 64, dtype.bytes(), &Target::Nvptx(GpuArch::Sm80));
    let consts = consts! {
        d = 64usize, d_tile = 64usize, d_v = 64usize, d_v_tile = 64usize, q_tile = tiles.q_tile, k_tile = tiles.k_tile,
        causal = true,
    };
    (consts.to_vec(), options(tiles.num_warps, tiles.num_stages))
}

/// Every kernel, for one element type.
pub fn configurations(dtype: DType) -> Vec<Configuration> {
    KERNELS.iter().map(|def| configuration(def, dtype)).collect()
}
