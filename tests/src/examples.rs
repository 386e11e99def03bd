//! The files of `examples/` as modules, so that tests can call the `run` function of each.

// Each file also has a `main`, and some share `examples/common`.
#![allow(dead_code, clippy::duplicate_mod)]

#[path = "../../examples/10_argmax_topk.rs"]
mod argmax_topk;
#[path = "../../examples/12_attention_modifiers.rs"]
mod attention_modifiers;
#[path = "../../examples/04_dropout.rs"]
mod dropout;
#[path = "../../examples/06_flash_attention.rs"]
mod flash_attention;
#[path = "../../examples/21_fp8_matmul.rs"]
mod fp8_matmul;
#[path = "../../examples/22_fused_mlp.rs"]
pub mod fused_mlp;
#[path = "../../examples/02_fused_softmax.rs"]
mod fused_softmax;
#[path = "../../examples/08_grouped_gemm.rs"]
mod grouped_gemm;
#[path = "../../examples/11_histogram.rs"]
mod histogram;
#[path = "../../examples/05_layer_norm.rs"]
mod layer_norm;
#[path = "../../examples/07_math_functions.rs"]
mod math_functions;
#[path = "../../examples/03_matmul.rs"]
mod matmul;
#[path = "../../examples/14_paged_decoding.rs"]
pub mod paged_decoding;
#[path = "../../examples/09_persistent_matmul.rs"]
mod persistent_matmul;
#[path = "../../examples/20_variable_length_attention.rs"]
mod variable_length_attention;
#[path = "../../examples/01_vector_add.rs"]
mod vector_add;
#[path = "../../examples/13_weight_only_matmul.rs"]
mod weight_only_matmul;
#[path = "../../examples/19_windowed_attention.rs"]
mod windowed_attention;

#[path = "../../examples/18_bias_gelu_dropout.rs"]
mod bias_gelu_dropout;
#[path = "../../examples/17_mixture_of_experts.rs"]
pub mod mixture_of_experts;
#[path = "../../examples/15_selective_scan.rs"]
mod selective_scan;
#[path = "../../examples/16_welford_layer_norm.rs"]
mod welford_layer_norm;
use crate::configurations::compile_options;
use tilewright::autotune::Autotune;
use tilewright::codegen::lang::kernel::{ConstValue, DType, KernelDef};
use tilewright::codegen::target::CompileOptions;
use tilewright::prelude::Device;

/// Runs an example on a device; the example checks its results.
pub type Run = fn(&Device) -> Result<(), Box<dyn std::error::Error>>;

/// Every example, by the name of its file.
pub const EXAMPLES: [(&str, Run); 22] = [
    ("01_vector_add", vector_add::run),
    ("02_fused_softmax", fused_softmax::run),
    ("03_matmul", matmul::run),
    ("04_dropout", dropout::run),
    ("05_layer_norm", layer_norm::run),
    ("06_flash_attention", flash_attention::run),
    ("07_math_functions", math_functions::run),
    ("08_grouped_gemm", grouped_gemm::run),
    ("09_persistent_matmul", |device| persistent_matmul::cases(device, false).map(drop)),
    ("10_argmax_topk", argmax_topk::run),
    ("11_histogram", histogram::run),
    ("12_attention_modifiers", attention_modifiers::run),
    ("13_weight_only_matmul", |device| weight_only_matmul::cases(device, false).map(drop)),
    ("14_paged_decoding", |device| paged_decoding::cases(device, false).map(drop)),
    ("15_selective_scan", |device| selective_scan::cases(device, false).map(drop)),
    ("16_welford_layer_norm", |device| welford_layer_norm::cases(device, false).map(drop)),
    ("17_mixture_of_experts", |device| mixture_of_experts::cases(device, false).map(drop)),
    ("18_bias_gelu_dropout", |device| bias_gelu_dropout::cases(device, false).map(drop)),
    ("19_windowed_attention", |device| windowed_attention::cases(device, false).map(drop)),
    ("20_variable_length_attention", |device| variable_length_attention::cases(device, false).map(drop)),
    ("21_fp8_matmul", |device| fp8_matmul::cases(device, false).map(drop)),
    ("22_fused_mlp", |device| fused_mlp::cases(device, false).map(drop)),
];

/// The `main` of an example, with arguments.
type Main = fn(&[String]) -> Result<(), Box<dyn std::error::Error>>;

macro_rules! mains {
    ($($module:ident),*) => {
        [$((stringify!($module), |arguments| $module::common::with_arguments($module::cases, arguments))),*]
    };
}

/// The examples that have the form `--bench`, by the name of their counterpart in `scripts/triton_examples`.
pub const MAINS: [(&str, Main); 11] = mains!(
    persistent_matmul,
    weight_only_matmul,
    paged_decoding,
    selective_scan,
    welford_layer_norm,
    mixture_of_experts,
    bias_gelu_dropout,
    windowed_attention,
    variable_length_attention,
    fp8_matmul,
    fused_mlp
);

/// A kernel of an example, with the element types and constants that the example uses.
pub struct Variant {
    pub def: &'static KernelDef,
    pub dtypes: Vec<DType>,
    pub consts: Vec<(&'static str, ConstValue)>,
    /// How many of them, from the first on, no configuration sets.
    pub fixed: usize,
    /// Those of a configuration, or the defaults.
    pub options: CompileOptions,
}

fn variant(def: &'static KernelDef, dtypes: &[DType], consts: &[(&'static str, i64)]) -> Variant {
    let fixed = consts.len();
    let consts = consts.iter().map(|(name, value)| (*name, ConstValue::Int(*value))).collect();
    Variant { def, dtypes: dtypes.to_vec(), consts, fixed, options: CompileOptions::default() }
}

/// Every configuration of an autotuned kernel, with these other constants.
fn tuned(
    autotune: &'static Autotune,
    dtypes: &[DType],
    consts: &[(&'static str, i64)],
) -> impl Iterator<Item = Variant> {
    let kernel = variant(autotune.def, dtypes, consts);
    autotune.configs().map(move |config| {
        let consts = kernel.consts.iter().cloned().chain(config.constants.iter().cloned()).collect();
        let (dtypes, options) = (kernel.dtypes.clone(), compile_options(&config));
        Variant { def: kernel.def, dtypes, consts, fixed: kernel.fixed, options }
    })
}

/// Every kernel of the examples, in one configuration for each choice of its constants that no configuration sets.
pub fn variants() -> Vec<Variant> {
    let (mut all, mut seen) = (Vec::new(), Vec::new());
    for variant in simple().into_iter().chain(configurations()) {
        let kernel = (variant.def.name, variant.dtypes.clone(), variant.consts[..variant.fixed].to_vec());
        if !seen.contains(&kernel) {
            seen.push(kernel);
            all.push(variant);
        }
    }
    all
}

/// The kernels of the examples that have a counterpart in Triton, those that are autotuned in every configuration, with
/// constants of realistic sizes.
pub fn configurations() -> Vec<Variant> {
    let mut all = Vec::new();
    all.extend(tuned(&persistent_matmul::PERSISTENT_MATMUL_AUTOTUNE, &[DType::BF16], &[("group", 8)]));
    for bits in [8, 4] {
        let consts = [("bits", bits), ("group", 128)];
        all.extend(tuned(&weight_only_matmul::WEIGHT_ONLY_MATMUL_AUTOTUNE, &[DType::F16], &consts));
    }
    let consts = [("rows", 16), ("page", 16), ("d", 128)];
    all.extend(tuned(&paged_decoding::PAGED_DECODE_AUTOTUNE, &[DType::BF16], &consts));
    all.push(variant(&paged_decoding::COMBINE_SPLITS, &[DType::BF16], &[("most", 4), ("d", 128)]));
    all.extend(tuned(&selective_scan::SELECTIVE_SCAN_AUTOTUNE, &[], &[("states", 16)]));
    all.extend(tuned(&welford_layer_norm::WELFORD_LAYER_NORM_AUTOTUNE, &[DType::BF16], &[]));
    all.push(variant(&mixture_of_experts::GATE, &[], &[("top", 2), ("tile", 8)]));
    all.push(variant(&mixture_of_experts::ROUTE, &[], &[("tile", 1024)]));
    let tiles = [("top", 2), ("m_tile", 128), ("n_tile", 128), ("k_tile", 64)];
    let mut matmul = variant(&mixture_of_experts::EXPERT_MATMUL, &[DType::BF16], &tiles);
    matmul.options.num_warps = 8;
    all.push(matmul);
    for def in [&bias_gelu_dropout::BIAS_GELU_DROPOUT_FWD, &bias_gelu_dropout::BIAS_GELU_DROPOUT_BWD] {
        all.push(variant(def, &[DType::BF16], &[("tile", 1024)]));
    }
    let mut mlp = variant(&fused_mlp::FUSED_MLP, &[DType::BF16], &[("d", 128), ("rows_tile", 128), ("h_tile", 64)]);
    (mlp.options.num_warps, mlp.options.num_stages) = (8, 4);
    mlp.options.schedule.warp_specialize = Some(true);
    all.push(mlp);
    all
}

/// The kernels of the examples that have no counterpart in Triton.
pub fn simple() -> Vec<Variant> {
    let matmul_tiles = [("m_tile", 64), ("n_tile", 64), ("k_tile", 32)];
    let mut all = vec![
        variant(&vector_add::VECTOR_ADD, &[], &[("tile", 1024)]),
        variant(&fused_softmax::SOFTMAX_ROWS, &[DType::F32], &[("tile", 1024)]),
        variant(&fused_softmax::SOFTMAX_ROWS, &[DType::BF16], &[("tile", 1024)]),
        variant(&dropout::DROPOUT, &[], &[("tile", 1024)]),
        variant(&layer_norm::LAYER_NORM_FWD, &[], &[("tile", 1024)]),
        variant(&layer_norm::LAYER_NORM_BWD, &[], &[("tile", 1024)]),
        variant(&layer_norm::COLUMN_SUM, &[], &[("row_tile", 16), ("col_tile", 64)]),
        variant(&flash_attention::ATTENTION_FWD, &[DType::F16], &[("d", 64), ("q_tile", 64), ("k_tile", 64)]),
        variant(&math_functions::MATH_FUNCTIONS, &[], &[("tile", 1024)]),
        variant(&grouped_gemm::GROUPED_GEMM, &[], &matmul_tiles),
        variant(&argmax_topk::ARGMAX_ROWS, &[], &[("row_tile", 4), ("col_tile", 256)]),
        variant(&argmax_topk::TOP_K, &[], &[("tile", 1024)]),
        variant(&histogram::HISTOGRAM_DIRECT, &[], &[("tile", 1024)]),
        variant(&histogram::HISTOGRAM_PRIVATE, &[], &[("tile", 128), ("bins", 64)]),
    ];
    for activation in ["Identity", "Relu", "LeakyRelu"] {
        let mut matmul = variant(&matmul::MATMUL, &[], &matmul_tiles);
        matmul.consts.push(("group", ConstValue::Int(8)));
        matmul.consts.push(("activation", ConstValue::Variant(activation.to_string())));
        matmul.fixed = matmul.consts.len();
        all.push(matmul);
    }
    all
}
