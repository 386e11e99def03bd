//! The demo's FlashAttention-2, forward and backward.

use std::collections::BTreeMap;

use tilewright::LaunchArg;
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright::codegen::target::Target;
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::backward_rows::FLASH_ATTENTION_BWD_PREPROCESS;
use tilewright::kernels::attention::config::{Pass, Tiles, d_tile, default_tiles};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::kernels::attention::reference::{self, Problem};

use super::case::{Call, Case, Launches, count, tolerance};
use super::inputs::Inputs;
use crate::cli::tensors::Tensor;
use crate::cli::{CliError, Result};

/// Returns the forward case (O, L) and the backward case (dQ, dK, dV); none if the inputs lack q, k or v.
///
/// # Errors
/// Inconsistent shapes.
pub fn cases(inputs: &Inputs, dtype: DType, causal: bool) -> Result<Vec<Case>> {
    let (Some(q), Some(k), Some(v)) = (inputs.get("q"), inputs.get("k"), inputs.get("v")) else {
        return Ok(Vec::new());
    };
    let problem = problem(inputs, causal)?;
    let d_o = inputs.get_or_ones("d_o", &q.shape)?;
    let [q, k, v, d_o] = [q, k, v, &d_o].map(|tensor| tensor.rounded(dtype));
    let [q64, k64, v64, d_o64] = [&q, &k, &v, &d_o].map(|tensor| tensor.to_f64());
    warn_if_reference_is_slow(&problem);
    let (o64, lse64) = reference::forward(&problem, &q64, &k64, &v64);
    let gradients = reference::backward(&problem, &q64, &k64, &v64, &d_o64);

    let shape = describe_problem(&problem);
    let mask = if causal { "-causal" } else { "" };
    let rows = vec![problem.batch, problem.heads_q, problem.n_q];
    let o = (q.shape.clone(), dtype);
    let forward = Case {
        kernel: "attention".to_string(),
        name: format!("attention{mask}.{dtype}"),
        shape: shape.clone(),
        dtype,
        inputs: BTreeMap::from([("q", q.clone()), ("k", k.clone()), ("v", v.clone())]),
        outputs: [("o", o.clone()), ("lse", (rows.clone(), DType::F32))]
            .into_iter()
            .chain(modifier_tensors(&problem))
            .collect(),
        calls: Box::new(move |target| {
            let calls = vec![LaunchBuilder { problem, dtype, target }.forward()];
            Ok(Launches { calls, ..Launches::default() })
        }),
        expected: vec![("o", o64), ("lse", lse64)],
        tolerance: tolerance(dtype),
    };
    let gradient = |tensor: &Tensor| (tensor.shape.clone(), dtype);
    let backward = Case {
        kernel: "attention backward".to_string(),
        name: format!("attention-backward{mask}.{dtype}"),
        shape,
        dtype,
        outputs: BTreeMap::from([
            ("o", o),
            ("lse", (rows.clone(), DType::F32)),
            ("lse2", (rows.clone(), DType::F32)),
            ("delta", (rows, DType::F32)),
            // Used by the one-pass backward only, which accumulates dQ in the first.
            ("dq_sum", (vec![0], DType::F32)),
            ("counters", (vec![0], DType::I32)),
            ("dq", gradient(&q)),
            ("dk", gradient(&k)),
            ("dv", gradient(&v)),
        ])
        .into_iter()
        .chain(modifier_tensors(&problem))
        .collect(),
        inputs: BTreeMap::from([("q", q), ("k", k), ("v", v), ("d_o", d_o)]),
        // The backward pass reads the outputs of the forward pass.
        calls: Box::new(move |target| {
            let builder = LaunchBuilder { problem, dtype, target };
            let calls = vec![builder.preprocess(), builder.dkdv(), builder.dq()];
            Ok(Launches { setup: vec![builder.forward()], calls })
        }),
        expected: vec![("dq", gradients.dq), ("dk", gradients.dk), ("dv", gradients.dv)],
        tolerance: tolerance(dtype),
    };
    Ok(vec![forward, backward])
}

/// The constants of the head dimensions.
fn head_dims(p: &Problem) -> Vec<(&'static str, ConstValue)> {
    vec![count("d", p.d), count("d_tile", d_tile(p.d)), count("d_v", p.d_v), count("d_v_tile", d_tile(p.d_v))]
}

/// Derives the sizes of the problem from the shapes of q, k and v.
fn problem(inputs: &Inputs, causal: bool) -> Result<Problem> {
    let four = |name: &str| match inputs.get(name).map(|tensor| tensor.shape.as_slice()) {
        Some(&[batch, heads, n, d]) => Ok([batch, heads, n, d]),
        found => Err(CliError::Failure(format!("`{name}` has shape {found:?}: expected [batch, heads, length, d]"))),
    };
    let [batch, heads_q, n_q, d] = four("q")?;
    let [_, heads_kv, n_k, _] = four("k")?;
    inputs.expect_shape("k", &[batch, heads_kv, n_k, d])?;
    inputs.expect_shape("v", &[batch, heads_kv, n_k, d])?;
    if heads_kv == 0 || heads_q % heads_kv != 0 {
        return Err(CliError::Failure(format!(
            "`q` has {heads_q} heads and `k` has {heads_kv}: expected a multiple of the heads of `k`"
        )));
    }
    if d == 0 || d > 256 {
        return Err(CliError::Failure(format!("the head dimension is {d}: expected 1 to 256")));
    }
    let scale = f64::from(1.0 / (d as f32).sqrt());
    Ok(Problem { batch, heads_q, heads_kv, n_q, n_k, d, d_v: d, causal, scale, modifiers: Default::default() })
}

/// Prints a note if the f64 references, which are plain loops, take longer than 20 s.
fn warn_if_reference_is_slow(p: &Problem) {
    const OPERATIONS_PER_SECOND: f64 = 5e8;
    let scores = [p.batch, p.heads_q, p.n_q, p.n_k, p.d].map(|n| n as f64).iter().product::<f64>();
    let seconds = 10.0 * scores / OPERATIONS_PER_SECOND;
    if seconds > 20.0 {
        tilewright::terminal::print_stderr(format_args!(
            "computing the f64 references of attention takes about {:.0} minutes",
            (seconds / 60.0).ceil()
        ));
    }
}

/// Formats the problem as `[batch, heads, length, d]`, with both numbers where queries and keys differ.
fn describe_problem(p: &Problem) -> String {
    let heads = if p.heads_q == p.heads_kv { p.heads_q.to_string() } else { format!("{}/{}", p.heads_q, p.heads_kv) };
    let length = if p.n_q == p.n_k { p.n_q.to_string() } else { format!("{}/{}", p.n_q, p.n_k) };
    let mask = if p.causal { " causal" } else { "" };
    format!("[{}, {heads}, {length}, {}]{mask}", p.batch, p.d)
}

/// The tensors of modifiers and of a cache, and the counter of persistent programs, which these kernels do not access.
fn modifier_tensors(p: &Problem) -> [(&'static str, (Vec<usize>, DType)); 10] {
    [
        ("sinks", (vec![0], DType::F32)),
        ("lengths", (vec![0], DType::I32)),
        ("table", (vec![p.batch, 0], DType::I32)),
        ("row_starts", (vec![0], DType::I32)),
        ("q_descale", (vec![p.batch, p.heads_q, 0], DType::F32)),
        ("k_descale", (vec![p.batch, p.heads_kv, 0], DType::F32)),
        ("v_descale", (vec![p.batch, p.heads_kv, 0], DType::F32)),
        ("mask_data", (vec![0], DType::I32)),
        ("score_data", (vec![0], DType::F32)),
        ("tiles_taken", (vec![0], DType::I32)),
    ]
}

/// Builds the launches of one attention problem.
struct LaunchBuilder<'a> {
    problem: Problem,
    dtype: DType,
    target: &'a Target,
}

impl LaunchBuilder<'_> {
    fn tiles(&self, pass: Pass) -> Tiles {
        default_tiles(pass, self.problem.d, self.dtype.bytes(), self.target)
    }

    fn forward(&self) -> Call {
        let tiles = self.tiles(Pass::Forward);
        let even = ("even_keys", ConstValue::Bool(self.problem.n_k.is_multiple_of(tiles.k_tile)));
        let mut call = self.pass(&FLASH_ATTENTION_FWD, tiles, even, self.over_queries(tiles));
        call.constants.push(count("replicas", tiles.replicas));
        call.scalars.push(("programs", LaunchArg::I32(1)));
        call
    }

    fn preprocess(&self) -> Call {
        let tiles = self.tiles(Pass::Dq);
        let p = &self.problem;
        let mut constants = head_dims(p);
        constants.push(count("q_tile", tiles.q_tile));
        self.call(&FLASH_ATTENTION_BWD_PREPROCESS, tiles, constants, Vec::new(), self.over_queries(tiles))
    }

    fn dkdv(&self) -> Call {
        let (tiles, p) = (self.tiles(Pass::Dkdv), &self.problem);
        let even = ("even_queries", ConstValue::Bool(p.n_q.is_multiple_of(tiles.q_tile)));
        let grid = [p.n_k.div_ceil(tiles.k_tile), p.heads_kv, p.batch];
        self.pass(&FLASH_ATTENTION_BWD_DKDV, tiles, even, grid)
    }

    fn dq(&self) -> Call {
        let tiles = self.tiles(Pass::Dq);
        let even = ("even_keys", ConstValue::Bool(self.problem.n_k.is_multiple_of(tiles.k_tile)));
        self.pass(&FLASH_ATTENTION_BWD_DQ, tiles, even, self.over_queries(tiles))
    }

    fn over_queries(&self, tiles: Tiles) -> [usize; 3] {
        let programs = self.problem.n_q.div_ceil(tiles.q_tile).next_multiple_of(tiles.replicas);
        [programs, self.problem.heads_q, self.problem.batch]
    }

    /// Builds the launch of a kernel that computes scores.
    fn pass(&self, def: &'static KernelDef, tiles: Tiles, even: (&'static str, ConstValue), grid: [usize; 3]) -> Call {
        let p = &self.problem;
        // Tensor cores do not support f32. 3xTF32, the default of the library's own launches, is nearly as accurate as
        // f32.
        let precision = match (self.target, self.dtype) {
            (Target::Nvptx(_), DType::F32) => "tf32x3",
            (Target::Nvptx(_) | Target::Host(_), _) => "ieee",
        };
        let mut constants = head_dims(p);
        constants.extend([
            ("precision", ConstValue::Variant(precision.to_string())),
            count("q_tile", tiles.q_tile),
            count("k_tile", tiles.k_tile),
            count("group", p.heads_q / p.heads_kv),
            ("causal", ConstValue::Bool(p.causal)),
            even,
        ]);
        let scalars = vec![
            ("scale", LaunchArg::F32(p.scale as f32)),
            ("mask_number", LaunchArg::I32(0)),
            ("score_number", LaunchArg::F32(0.0)),
        ];
        self.call(def, tiles, constants, scalars, grid)
    }

    fn call(
        &self,
        def: &'static KernelDef,
        tiles: Tiles,
        constants: Vec<(&'static str, ConstValue)>,
        scalars: Vec<(&'static str, LaunchArg)>,
        grid: [usize; 3],
    ) -> Call {
        Call {
            def,
            dtypes: vec![self.dtype; def.generics.len()],
            constants,
            renamed: Vec::new(),
            scalars,
            grid,
            num_warps: tiles.num_warps,
            num_stages: tiles.num_stages,
        }
    }
}
