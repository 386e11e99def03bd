//! The attention kernels in the interpreter and on the simulated GPU: small and odd shapes, as recorded and after the
//! GPU passes.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::ConstValue;
use tilewright::codegen::target::GpuArch;
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::backward_rows::{
    DQ_SUM_ROWS, FLASH_ATTENTION_BWD_POSTPROCESS, FLASH_ATTENTION_BWD_PREPROCESS,
};
use tilewright::kernels::attention::config::d_tile;
use tilewright::kernels::attention::documents::DOCUMENT_RANGES_OF_SIDE;
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::kernels::attention::reference::{self, ModifierTensors, Modifiers, Problem};
use tilewright::kernels::attention::relative::{FLASH_ATTENTION_BWD_RELATIVE, FLASH_ATTENTION_BWD_RELATIVE_SUM};
use tilewright::kernels::attention::sinks::FLASH_ATTENTION_BWD_SINKS;
use tilewright::kernels::attention::split_kv::FLASH_ATTENTION_FWD_COMBINE;
use tilewright::kernels::column_sum;
use tilewright::prelude::{Device, Precision};
use tilewright_tests::attention::{Case, Expected, Inputs, Layout, SINKS, poisoned_rows};
use tilewright_tests::consts;
use tilewright_tests::interpret::{self, Arg, Form, Loads, interpret};
use tilewright_tests::numerics::HostTensor;

/// Tile sizes of one run.
#[derive(Clone, Copy)]
struct Tiles {
    q: usize,
    k: usize,
}

/// Small tiles: a small problem has several tiles of queries and of keys.
const SMALL: Tiles = Tiles { q: 16, k: 32 };

fn common(form: Form, case: &Case, tiles: Tiles) -> Vec<(&'static str, ConstValue)> {
    let p = &case.problem;
    let group = p.heads_q / p.heads_kv;
    let mut consts = consts! {
        d = p.d, d_tile = d_tile(p.d), d_v = p.d_v, d_v_tile = d_tile(p.d_v), q_tile = tiles.q, k_tile = tiles.k,
        group = group, causal = p.causal,
    }
    .to_vec();
    let modifiers = modifiers(case);
    consts.push(("mask", interpret::constant(modifiers.mask().function)));
    consts.push(("score", interpret::constant(modifiers.score().function)));
    if let Form::WgmmaF32 { .. } = form {
        consts.push(("precision", interpret::constant(Precision::Tf32x3)));
    }
    consts
}

/// The constants of a kernel with one head dimension, and those of `own` names.
fn row_wise(form: Form, case: &Case, tiles: Tiles, d: usize, own: &[&str]) -> Vec<(&'static str, ConstValue)> {
    let mut consts = common(form, case, tiles);
    consts.retain(|(name, _)| own.contains(name));
    consts.extend_from_slice(consts! { d = d, d_tile = d_tile(d) });
    consts
}

fn sinks(case: &Case) -> HostTensor {
    let scores: Vec<f64> = (0..case.problem.heads_q).map(reference::sink_score).collect();
    HostTensor::of(DType::F32, &[scores.len()], &[1], &scores)
}

/// Keys of batch entries, pages, rows and scales, which are not given.
fn no_cache(case: &Case) -> [HostTensor; 6] {
    let Problem { batch, heads_q, heads_kv, .. } = case.problem;
    let scales = |heads| (DType::F32, vec![batch, heads, 1]);
    let (lengths, table) = ((DType::I32, vec![batch]), (DType::I32, vec![batch, 1]));
    let starts = (DType::I32, vec![0]);
    [lengths, table, starts, scales(heads_q), scales(heads_kv), scales(heads_kv)].map(|(dtype, shape)| {
        let zeros = vec![0.0; shape.iter().product()];
        HostTensor::of(dtype, &shape, &vec![1; shape.len()], &zeros)
    })
}

fn with(
    mut consts: Vec<(&'static str, ConstValue)>,
    name: &'static str,
    value: bool,
) -> Vec<(&'static str, ConstValue)> {
    consts.push((name, ConstValue::Bool(value)));
    consts
}

fn grid(extents: [usize; 3]) -> [u32; 3] {
    extents.map(|n| n as u32)
}

fn modifiers(case: &Case) -> ModifierTensors {
    ModifierTensors::new(&Device::cpu(), &case.problem).unwrap()
}

/// The scalar arguments of the kernels with dots: the scale, and the numbers of the modifiers.
fn numbers(case: &Case) -> [Arg<'static>; 3] {
    let p = &case.problem;
    let modifiers = modifiers(case);
    let mask = Arg::Int(modifiers.mask().number.into());
    let score = Arg::Float(modifiers.score().number.into());
    [Arg::Float(p.scale), mask, score]
}

/// The tensors of the modifiers.
fn modifier_tensors(case: &Case) -> [HostTensor; 2] {
    let modifiers = modifiers(case);
    let ranges = modifiers.mask().data.map_or(Vec::new(), |ranges| ranges.to_vec().unwrap());
    let slopes = modifiers.score().data.map_or(Vec::new(), |slopes| slopes.to_vec().unwrap());
    let ranges: Vec<usize> = ranges.into_iter().map(|at| at as usize).collect();
    let slopes: Vec<f64> = slopes.into_iter().map(f64::from).collect();
    [HostTensor::indices(&ranges), HostTensor::of(DType::F32, &[slopes.len()], &[1], &slopes)]
}

fn check_forward(form: Form, case: Case, tiles: Tiles, inputs: &Inputs, expected: &Expected) {
    check_replicas((1, None), form, case, tiles, inputs, expected);
}

/// Programs that share their loads: how many, and the number of blocks if they compute tile after tile.
fn check_replicas(
    (replicas, blocks): (usize, Option<usize>),
    form: Form,
    case: Case,
    tiles: Tiles,
    inputs: &Inputs,
    expected: &Expected,
) {
    let p = &case.problem;
    let mut taken = HostTensor::indices(&[0]);
    let mut o = case.poisoned(case.result_shape());
    let mut lse = poisoned_rows(expected.lse.len());
    let [ranges, slopes] = &modifier_tensors(&case);
    let Inputs { q, k, v, .. } = inputs;
    let (sinks, cache) = (sinks(&case), no_cache(&case));
    let mut tensors = vec![Arg::In(q), Arg::In(k), Arg::In(v), Arg::Out(&mut o), Arg::Out(&mut lse), Arg::In(&sinks)];
    tensors.extend(cache.iter().map(Arg::In));
    tensors.extend([Arg::Out(&mut taken), Arg::In(ranges), Arg::In(slopes)]);
    let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
    args.push(blocks.unwrap_or(0).into());
    let mut consts = with(common(form, &case, tiles), "even_keys", p.n_k.is_multiple_of(tiles.k));
    // As a launch packs the heads of groups.
    let by_head = p.modifiers.alibi || p.modifiers.relative;
    let pack = if p.n_q <= 16 && !by_head { p.heads_q / p.heads_kv } else { 1 };
    let given = p.modifiers.sinks;
    consts.extend_from_slice(consts! {
        replicas = replicas, persistent = blocks.is_some(), sinks_given = given, pack = pack,
    });
    let (places, heads) = ((p.n_q * pack).div_ceil(tiles.q * replicas), p.heads_q / pack);
    let programs = match blocks {
        Some(blocks) => [blocks.min(places * heads * p.batch) * replicas, 1, 1],
        None => [places * replicas, heads, p.batch],
    };
    interpret(form, &FLASH_ATTENTION_FWD, &[case.dtype; 3], &consts, grid(programs), &mut args);
    assert_eq!(taken.values(), [0.0], "the counter of tiles");
    case.check("o", &o, &expected.o);
    case.check_lse(&lse, &expected.lse);
}

fn check_backward(form: Form, case: Case, tiles: Tiles, inputs: &Inputs, expected: &Expected) {
    let ordered = modifiers(&case).mask().function.is_dense().then_some(Ordered);
    // A launch takes it before Hopper.
    let is_older = match form {
        Form::Recorded | Form::Specialized | Form::Native | Form::Cuda => true,
        Form::Gpu(arch) | Form::Simulated { arch, .. } => arch < GpuArch::Sm90a,
        _ => false,
    };
    let lanes_first = is_older.then_some(OnePass { lanes_first: true });
    for backward in [TwoPass, OnePass { lanes_first: false }].into_iter().chain(lanes_first).chain(ordered) {
        check_backward_in(backward, form, case, tiles, inputs, expected);
    }
}

/// How the gradient of q is computed.
#[derive(Clone, Copy, PartialEq)]
enum Backward {
    TwoPass,
    OnePass { lanes_first: bool },
    Ordered,
}
use Backward::{OnePass, Ordered, TwoPass};

fn check_backward_in(backward: Backward, form: Form, case: Case, tiles: Tiles, inputs: &Inputs, expected: &Expected) {
    let (one_pass, lanes_first) = (backward != TwoPass, backward == OnePass { lanes_first: true });
    let p = &case.problem;
    let dtypes = [case.dtype; 2];
    let rows = expected.lse.len();
    let Inputs { q, k, v, d_o } = inputs;
    // The kernels read O as the forward pass rounds it.
    let o = case.tensor(case.result_shape(), &expected.o);
    let lse = HostTensor::of(DType::F32, &[rows], &[1], &expected.lse);
    let (mut delta, mut lse2) = (poisoned_rows(rows), poisoned_rows(rows));
    let sum_rows = p.n_q.next_multiple_of(DQ_SUM_ROWS);
    let mut dq_sum = poisoned_rows(p.batch * p.heads_q * sum_rows * d_tile(p.d));
    let mut args = vec![
        Arg::In(&o),
        Arg::In(d_o),
        Arg::In(&lse),
        Arg::Out(&mut delta),
        Arg::Out(&mut lse2),
        Arg::Out(&mut dq_sum),
    ];
    let mut shape_consts = common(form, &case, tiles);
    shape_consts.retain(|(name, _)| ["d", "d_tile", "d_v", "d_v_tile", "q_tile"].contains(name));
    let query_programs = grid([p.n_q.div_ceil(tiles.q), p.heads_q, p.batch]);
    let consts = with(shape_consts.clone(), "one_pass", one_pass);
    let programs = if one_pass { grid([sum_rows / tiles.q, p.heads_q, p.batch]) } else { query_programs };
    interpret(form, &FLASH_ATTENTION_BWD_PREPROCESS, &dtypes[..1], &consts, programs, &mut args);

    if p.modifiers.sinks {
        let scores = sinks(&case);
        let partials = p.batch * p.n_q.div_ceil(tiles.q);
        let mut sums = HostTensor::poisoned(DType::F32, &[partials, p.heads_q], &[p.heads_q, 1]);
        let mut args = vec![Arg::In(&o), Arg::In(d_o), Arg::In(&lse), Arg::In(&scores), Arg::Out(&mut sums)];
        let consts = row_wise(form, &case, tiles, p.d_v, &["q_tile"]);
        interpret(form, &FLASH_ATTENTION_BWD_SINKS, &dtypes[..1], &consts, query_programs, &mut args);
        let totals = column_sum::reference(&sums.values(), p.heads_q);
        let totals = HostTensor::of(DType::F32, &[p.heads_q], &[1], &totals);
        case.check_sinks(&totals, &o, inputs, expected);
    }

    let (mut dk, mut dv) = (case.poisoned(case.key_shape()), case.poisoned(case.value_shape()));
    let [ranges, slopes] = &modifier_tensors(&case);
    let read = || vec![q, k, v, d_o, &lse2, &delta, ranges, slopes].into_iter().map(Arg::In).collect::<Vec<Arg>>();
    if p.modifiers.relative && !one_pass {
        check_relative_bias(form, &case, read(), expected);
    }
    let mut tensors = read();
    let groups = p.batch * p.heads_q * sum_rows / 16;
    let mut counters = HostTensor::of(DType::I32, &[groups], &[1], &vec![0.0; groups]);
    tensors.extend([Arg::Out(&mut dk), Arg::Out(&mut dv), Arg::Out(&mut dq_sum), Arg::Out(&mut counters)]);
    let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
    let consts = with(common(form, &case, tiles), "even_queries", p.n_q.is_multiple_of(tiles.q));
    let consts = with(consts, "even_keys", p.n_k.is_multiple_of(tiles.k));
    let consts = with(with(consts, "one_pass", one_pass), "lanes_first", lanes_first);
    let consts = with(consts, "ordered", backward == Ordered);
    let key_programs = grid([p.n_k.div_ceil(tiles.k), p.heads_kv, p.batch]);
    interpret(form, &FLASH_ATTENTION_BWD_DKDV, &dtypes, &consts, key_programs, &mut args);
    case.check("dk", &dk, &expected.gradients.dk);
    case.check("dv", &dv, &expected.gradients.dv);
    assert!(counters.values().iter().all(|&number| number == 0.0), "the semaphores");

    let mut dq = case.poisoned(case.query_shape());
    if one_pass {
        // One split.
        let mut args = vec![Arg::In(&dq_sum), Arg::Out(&mut dq), 1.into(), Arg::Float(p.scale)];
        let mut shape_consts = row_wise(form, &case, tiles, p.d, &[]);
        shape_consts.extend_from_slice(consts! { row_tile = tiles.q, fragments = true, lanes_first = lanes_first });
        interpret(form, &FLASH_ATTENTION_BWD_POSTPROCESS, &dtypes[..1], &shape_consts, query_programs, &mut args);
    } else {
        let mut tensors = read();
        tensors.push(Arg::Out(&mut dq));
        let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
        let consts = with(common(form, &case, tiles), "even_keys", p.n_k.is_multiple_of(tiles.k));
        interpret(form, &FLASH_ATTENTION_BWD_DQ, &dtypes, &consts, query_programs, &mut args);
    }
    case.check("dq", &dq, &expected.gradients.dq);
}

/// The gradient of the relative bias, from the inputs of the backward kernels.
fn check_relative_bias(form: Form, case: &Case, read: Vec<Arg>, expected: &Expected) {
    let (p, tile) = (&case.problem, 32);
    let diagonals = p.n_q.div_ceil(tile) + p.n_k.div_ceil(tile) - 1;
    let shape = [p.batch, p.heads_q, diagonals, 2 * tile];
    let strides = [p.heads_q * diagonals * 2 * tile, diagonals * 2 * tile, 2 * tile, 1];
    let mut sums = HostTensor::poisoned(DType::F32, &shape, &strides);
    let mut args: Vec<Arg> = read.into_iter().chain([Arg::Out(&mut sums)]).chain(numbers(case)).collect();
    let mut consts = common(form, case, Tiles { q: tile, k: tile });
    consts.retain(|(name, _)| !["q_tile", "k_tile"].contains(name));
    consts.extend_from_slice(consts! { tile = tile });
    let programs = grid([diagonals, p.heads_q, p.batch]);
    interpret(form, &FLASH_ATTENTION_BWD_RELATIVE, &[case.dtype], &consts, programs, &mut args);
    let width = p.n_q + p.n_k - 1;
    let mut gradient = HostTensor::poisoned(DType::F32, &[p.heads_q, width], &[width, 1]);
    let mut args = vec![Arg::In(&sums), Arg::Out(&mut gradient), p.n_k.into()];
    let programs = grid([diagonals + 1, p.heads_q, 1]);
    interpret(form, &FLASH_ATTENTION_BWD_RELATIVE_SUM, &[], consts! { tile = tile }, programs, &mut args);
    case.check("the gradient of the relative bias", &gradient, &expected.gradients.d_relative);
}

/// The forms that run in the interpreter, and on the GPU if there is one. `native` has the same cases as native code.
fn forms() -> impl Iterator<Item = Form> {
    interpret::forms().into_iter().filter(|form| *form != Form::Native)
}

/// Checks forward and backward in these forms.
fn check_inputs(case: Case, tiles: Tiles, inputs: &Inputs) {
    let expected = case.expected(inputs);
    for form in forms() {
        check_forward(form, case, tiles, inputs, &expected);
        check_backward(form, case, tiles, inputs, &expected);
    }
}

fn check(case: Case) {
    check_inputs(case, SMALL, &case.inputs());
}

#[test]
fn tiles_of_keys_that_all_rows_see() {
    check(Case::new(32, 64, 16));
    check(Case::new(32, 64, 16).dtype(DType::F32));
    check(Case::new(32, 64, 16).dtype(DType::F16));
}

/// Tiles that are large enough to be lowered to MMA instructions.
#[test]
fn large_tiles() {
    let tiles = Tiles { q: 64, k: 64 };
    for case in [Case::new(128, 128, 32).causal(), Case::new(150, 130, 64)] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        for (arch, num_warps) in [(GpuArch::Sm80, 4), (GpuArch::Sm90a, 4), (GpuArch::Sm90a, 8)] {
            let form = Form::Simulated { arch, num_warps, num_stages: 2 };
            check_forward(form, case, tiles, &inputs, &expected);
            check_backward(form, case, tiles, &inputs, &expected);
        }
    }
}

/// The default tiles of f32 launches, with their number of warps, where dots are scalar FMAs.
#[test]
fn default_tiles_of_f32() {
    let case = Case::new(70, 90, 64).causal().dtype(DType::F32);
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    let form = |num_warps| Form::Simulated { arch: GpuArch::Sm90a, num_warps, num_stages: 2 };
    check_forward(form(8), case, Tiles { q: 32, k: 64 }, &inputs, &expected);
    check_backward(form(8), case, Tiles { q: 64, k: 32 }, &inputs, &expected);
    check_backward_in(TwoPass, form(4), case, Tiles { q: 16, k: 64 }, &inputs, &expected);
}

/// Warp specialization with one and two consumer warpgroups: full and masked tiles, unaligned lengths, groups of heads,
/// and more stages than iterations.
#[test]
fn warp_specialized() {
    let tiles = Tiles { q: 64, k: 64 };
    for (case, num_warps, num_stages) in [
        (Case::new(200, 200, 32).causal(), 4, 2),
        (Case::new(150, 130, 64).heads(2, 2, 1), 4, 3),
        (Case::new(128, 256, 64).causal(), 8, 2),
        (Case::new(70, 20, 64).causal(), 4, 1),
    ] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        let on_gpu = forms().filter(|form| *form == Form::Cuda);
        for form in on_gpu.chain([Form::WarpSpecialized { num_warps, num_stages }]) {
            check_forward(form, case, tiles, &inputs, &expected);
            check_backward(form, case, tiles, &inputs, &expected);
        }
    }
}

/// The tiles of dK and dV on Hopper with d = 64: two consumer warpgroups exchange dS in two slots in turn, and dV is in flight at
/// their barrier.
#[test]
fn dv_during_the_barrier() {
    let form = Form::WarpSpecialized { num_warps: 8, num_stages: 2 };
    for case in [Case::new(512, 128, 64), Case::new(300, 200, 64).causal()] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        for backward in [OnePass { lanes_first: false }, Ordered] {
            check_backward_in(backward, form, case, Tiles { q: 128, k: 128 }, &inputs, &expected);
        }
    }
}

/// Two warpgroups share the rows of dQ, and with many columns also those of dK and dV, whose first operands they exchange in
/// shared memory.
#[test]
fn warpgroups_that_share_rows() {
    let form = Form::WarpSpecialized { num_warps: 8, num_stages: 2 };
    let narrow = Tiles { q: 64, k: 128 };
    let wide = Tiles { q: 64, k: 64 };
    for (case, tiles) in [
        (Case::new(130, 140, 80), narrow),
        (Case::new(70, 130, 96).causal(), narrow),
        (Case::new(70, 100, 136).values(72).causal(), wide),
        (Case::new(64, 70, 256), wide),
    ] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        check_backward_in(OnePass { lanes_first: false }, form, case, tiles, &inputs, &expected);
    }
}

/// Programs that share a block and its loads, on Hopper: rows that no program needs, masks, modifiers, and a number of
/// programs that is no power of two. Elsewhere each program is one of its own.
#[test]
fn replicas() {
    let tiles = Tiles { q: 64, k: 64 };
    for (case, replicas, pingpong) in [
        (Case::new(300, 200, 64).causal(), 3, false),
        (Case::new(128, 300, 64).heads(2, 2, 1), 3, true),
        (Case::new(200, 70, 32).causal(), 2, true),
        (Case::new(250, 300, 128).causal().heads(1, 2, 1), 2, true),
        (Case::new(100, 130, 64).causal(), 4, true),
    ] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        for form in [Form::Replicated { pingpong }, Form::Specialized] {
            check_replicas((replicas, None), form, case, tiles, &inputs, &expected);
        }
    }
}

/// Programs that compute tile after tile, on Hopper by a counter: fewer blocks than tiles, as many, and more; tiles that see no
/// key, heads that share keys, entries, and modifiers with loops of no iterations.
#[test]
fn persistent() {
    let tiles = Tiles { q: 64, k: 64 };
    for (case, replicas, blocks, pingpong) in [
        (Case::new(300, 200, 64).causal(), 2, 2, true),
        (Case::new(300, 40, 64).causal(), 2, 1, true),
        (Case::new(130, 150, 64).causal().heads(2, 4, 2), 3, 3, true),
        (Case::new(200, 70, 32).heads(2, 1, 1), 2, 3, false),
        (Case::new(250, 300, 128).causal().heads(1, 2, 1), 2, 1, true),
        (Case::new(100, 130, 64), 4, 7, true),
    ] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        for form in [Form::Replicated { pingpong }, Form::Specialized, Form::Recorded] {
            check_replicas((replicas, Some(blocks)), form, case, tiles, &inputs, &expected);
        }
    }
}

/// With the schedules of the solver: one iteration, several, and unaligned lengths. With head dimension 64, the forward
/// pass casts and sums in the next iteration. The backward pass of one of them: its problems take the solver longest.
#[test]
fn schedules_of_the_solver() {
    for (case, tiles, has_backward) in [
        (Case::new(100, 300, 64).causal(), Tiles { q: 128, k: 128 }, true),
        (Case::new(100, 60, 128), Tiles { q: 128, k: 64 }, false),
    ] {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        let form = Form::Solved { num_warps: 8, num_stages: 2 };
        check_forward(form, case, tiles, &inputs, &expected);
        if has_backward {
            check_backward(form, case, Tiles { q: 64, k: 128 }, &inputs, &expected);
        }
    }
}

/// f32 with wgmma (3xTF32): masked and full tiles, with loads by all threads and by producer warps.
#[test]
fn f32_by_wgmma() {
    let case = Case::new(150, 130, 32).causal().dtype(DType::F32);
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    for (tiles, num_warps, loads, no_overlap) in [
        (Tiles { q: 64, k: 64 }, 4, Loads::AllThreads, false),
        (Tiles { q: 64, k: 64 }, 4, Loads::WarpSpecialized, false),
        (Tiles { q: 128, k: 32 }, 8, Loads::AllThreads, false),
        // Two warpgroups split the columns of each dot.
        (Tiles { q: 64, k: 64 }, 8, Loads::AllThreads, true),
    ] {
        let form = Form::WgmmaF32 { num_warps, num_stages: 2, loads, no_overlap };
        check_forward(form, case, tiles, &inputs, &expected);
        check_backward(form, case, tiles, &inputs, &expected);
    }
}

/// TMA loads in pipelines without warp specialization.
#[test]
fn tma_loads() {
    let tiles = Tiles { q: 64, k: 64 };
    for (case, num_warps, num_stages) in
        [(Case::new(200, 200, 32).causal(), 4, 2), (Case::new(150, 130, 64).heads(2, 2, 1), 8, 3)]
    {
        let inputs = case.inputs();
        let expected = case.expected(&inputs);
        let form = Form::Tma { num_warps, num_stages };
        check_forward(form, case, tiles, &inputs, &expected);
        check_backward(form, case, tiles, &inputs, &expected);
    }
}

#[test]
fn lengths_that_are_no_multiples_of_the_tiles() {
    for (n_q, n_k) in [(1, 1), (17, 17), (1, 70), (70, 1), (33, 31), (16, 65)] {
        check(Case::new(n_q, n_k, 16).dtype(DType::F32));
    }
}

#[test]
fn the_causal_diagonal_ends_in_the_corner() {
    for (n_q, n_k) in [(64, 64), (1, 1), (45, 45), (20, 75), (16, 64), (1, 40)] {
        check(Case::new(n_q, n_k, 16).causal().dtype(DType::F32));
    }
}

#[test]
fn rows_without_keys_give_zeros() {
    for (n_q, n_k) in [(70, 20), (64, 32), (50, 1), (33, 32)] {
        let case = Case::new(n_q, n_k, 16).causal().dtype(DType::F32);
        assert_eq!(case.expected(&case.inputs()).lse[0], f64::NEG_INFINITY);
        check(case);
    }
}

#[test]
fn no_keys_at_all() {
    check(Case::new(20, 0, 16).dtype(DType::F32));
    check(Case::new(20, 0, 16).causal().dtype(DType::F32));
}

#[test]
fn query_heads_share_keys() {
    check(Case::new(20, 40, 16).heads(2, 6, 2).dtype(DType::F32));
    check(Case::new(40, 40, 16).heads(1, 3, 1).causal().dtype(DType::F32));
}

#[test]
fn head_dimensions_that_are_no_powers_of_two() {
    for d in [1, 8, 24, 80, 96] {
        check(Case::new(20, 36, d).causal().dtype(DType::F32));
    }
}

#[test]
fn strides_with_gaps() {
    for layout in [Layout::RowsFirst, Layout::Gaps] {
        check(Case::new(20, 36, 16).heads(2, 4, 2).layout(layout).dtype(DType::F32));
        check(Case::new(36, 36, 24).heads(2, 2, 2).layout(layout).causal());
    }
}

/// Scores of several hundred: exp would overflow without subtraction of the maximum, and so would P of a padded key.
#[test]
fn large_scores_do_not_overflow() {
    for sign in [1.0, -1.0] {
        // Scores of 400 have an error of 1.5e-5, and so has P; in dQ and dK nearly equal terms of size 10 cancel.
        let case = Case::new(20, 36, 16).dtype(DType::F32).with_tolerance(1e-2);
        let mut inputs = case.inputs();
        let keys: Vec<f64> = (0..36 * 16).map(|i| sign * (10.0 + (i / 16 % 3) as f64 / 8.0)).collect();
        inputs.q = case.tensor(case.query_shape(), &[10.0; 20 * 16]);
        inputs.k = case.tensor(case.key_shape(), &keys);
        let expected = case.expected(&inputs);
        assert!(expected.lse[0].abs() > 300.0);
        check_inputs(case, SMALL, &inputs);
        check_forward(Form::Native, case, SMALL, &inputs, &expected);
        check_backward(Form::Native, case, SMALL, &inputs, &expected);
    }
}

/// Maxima that grow from tile to tile of keys by less and by more than a running maximum of heads of 64 ignores (2⁸), by exactly
/// as much, and that shrink again: in all rows of a warp, in some, in none.
#[test]
fn maxima_that_grow_and_shrink() {
    // Of keys 0 to 63, 64 to 127, … in exponents of 2, for rows with the factor 1.
    let levels = [0.0, 7.75, 17.0, 25.0, -3.0];
    let factor = |row: usize| if row < 16 { 1.0 } else { [1.0, 0.25, 0.0, -1.0][row % 4] };
    let (n_q, n_k, d, tiles) = (128, 64 * levels.len(), 64, Tiles { q: 64, k: 64 });
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let case = Case::new(n_q, n_k, d).dtype(dtype);
        let mut inputs = case.inputs();
        let first = |tensor: &HostTensor, value: &dyn Fn(usize) -> f64| {
            let small = tensor.values().into_iter().enumerate();
            small.map(|(i, x)| if i % d == 0 { value(i / d) } else { x / 8.0 }).collect::<Vec<f64>>()
        };
        // The scale is 1/8.
        let q = first(&inputs.q, &|row| 8.0 * factor(row));
        let k = first(&inputs.k, &|key| levels[key / 64] * std::f64::consts::LN_2);
        (inputs.q, inputs.k) = (case.tensor(case.query_shape(), &q), case.tensor(case.key_shape(), &k));
        let expected = case.expected(&inputs);
        if dtype == DType::F32 {
            let form = Form::WgmmaF32 { num_warps: 4, num_stages: 2, loads: Loads::WarpSpecialized, no_overlap: false };
            check_forward(form, case, Tiles { q: 64, k: 32 }, &inputs, &expected);
            check_forward(Form::Recorded, case, tiles, &inputs, &expected);
            continue;
        }
        for form in [Form::Specialized, Form::Tma { num_warps: 4, num_stages: 2 }] {
            check_forward(form, case, tiles, &inputs, &expected);
        }
        check_replicas((2, Some(1)), Form::Replicated { pingpong: true }, case, tiles, &inputs, &expected);
    }
}

/// A poisoned dense f32 tensor [batch · num_splits, …].
fn poisoned_partials(num_splits: usize, [batch, heads, n, d]: [usize; 4]) -> HostTensor {
    HostTensor::poisoned(DType::F32, &[batch * num_splits, heads, n, d], &[heads * n * d, n * d, d, 1])
}

fn check_forward_split_kv(form: Form, case: Case, tiles: Tiles, split_rows: usize) {
    let p = &case.problem;
    let num_splits = p.n_k.div_ceil(split_rows);
    let (inputs, shape, sinks) = (case.inputs(), case.result_shape(), sinks(&case));
    let cache = no_cache(&case);
    let expected = case.expected(&inputs);
    let mut partial_o = poisoned_partials(num_splits, shape);
    let mut partial_lse = poisoned_rows(num_splits * expected.lse.len());
    let mut taken = HostTensor::indices(&[]);
    let [ranges, slopes] = &modifier_tensors(&case);
    let mut tensors = vec![
        Arg::In(&inputs.q),
        Arg::In(&inputs.k),
        Arg::In(&inputs.v),
        Arg::Out(&mut partial_o),
        Arg::Out(&mut partial_lse),
        Arg::In(&sinks),
    ];
    tensors.extend(cache.iter().map(Arg::In));
    tensors.extend([Arg::Out(&mut taken), Arg::In(ranges), Arg::In(slopes)]);
    let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
    args.push(0.into());
    let mut consts = with(common(form, &case, tiles), "even_keys", p.n_k.is_multiple_of(tiles.k));
    consts.extend_from_slice(consts! { split_rows = split_rows, sinks_given = p.modifiers.sinks });
    let programs = grid([p.n_q.div_ceil(tiles.q), p.heads_q, p.batch * num_splits]);
    interpret(form, &FLASH_ATTENTION_FWD, &[case.dtype, DType::F32, case.dtype], &consts, programs, &mut args);

    let (mut o, mut lse) = (case.poisoned(shape), poisoned_rows(expected.lse.len()));
    let mut args = vec![Arg::In(&partial_o), Arg::In(&partial_lse), Arg::Out(&mut o), Arg::Out(&mut lse)];
    args.push(num_splits.into());
    let mut consts = row_wise(form, &case, tiles, p.d_v, &["q_tile"]);
    // Fewer splits than a tile has, and more.
    consts.extend_from_slice(consts! { split_tile = if p.causal { 8usize } else { 2 } });
    let programs = grid([p.n_q.div_ceil(tiles.q), p.heads_q, p.batch]);
    interpret(form, &FLASH_ATTENTION_FWD_COMBINE, &[case.dtype], &consts, programs, &mut args);
    case.check("o", &o, &expected.o);
    case.check_lse(&lse, &expected.lse);
}

/// Checks dK, dV and dQ of split loops.
fn check_backward_split(form: Form, case: Case, tiles: Tiles, split_rows: usize) {
    let p = &case.problem;
    let (dkdv_splits, dq_splits) = (p.n_q.div_ceil(split_rows), p.n_k.div_ceil(split_rows));
    let inputs = case.inputs();
    let Inputs { q, k, v, d_o } = &inputs;
    let expected = case.expected(&inputs);
    let rows = expected.lse.len();
    let lse2: Vec<f64> = expected.lse.iter().map(|l| l * std::f64::consts::LOG2_E).collect();
    let dots = d_o.values().into_iter().zip(&expected.o).map(|(g, o)| g * o).collect::<Vec<f64>>();
    let delta: Vec<f64> = dots.chunks(p.d_v).map(|row| row.iter().sum()).collect();
    let [lse2, delta] = [lse2, delta].map(|values| HostTensor::of(DType::F32, &[rows], &[1], &values));
    let [ranges, slopes] = &modifier_tensors(&case);
    let read = || vec![q, k, v, d_o, &lse2, &delta, ranges, slopes].into_iter().map(Arg::In).collect::<Vec<Arg>>();
    let mut consts = with(common(form, &case, tiles), "even_keys", p.n_k.is_multiple_of(tiles.k));
    consts.extend_from_slice(consts! { split_rows = split_rows });

    let (key_shape, value_shape, query_shape) = (case.key_shape(), case.value_shape(), case.query_shape());
    let [mut dk, mut dv] = [key_shape, value_shape].map(|shape| poisoned_partials(dkdv_splits, shape));
    let mut dq = poisoned_partials(dq_splits, query_shape);
    let [mut sums, mut counters] = [DType::F32, DType::I32].map(|dtype| HostTensor::poisoned(dtype, &[0], &[1]));
    let mut tensors = read();
    tensors.extend([Arg::Out(&mut dk), Arg::Out(&mut dv), Arg::Out(&mut sums), Arg::Out(&mut counters)]);
    let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
    let of_keys = with(consts.clone(), "even_queries", p.n_q.is_multiple_of(tiles.q));
    let programs = grid([p.n_k.div_ceil(tiles.k), p.heads_kv, p.batch * dkdv_splits]);
    interpret(form, &FLASH_ATTENTION_BWD_DKDV, &[case.dtype, DType::F32], &of_keys, programs, &mut args);
    let mut tensors = read();
    tensors.push(Arg::Out(&mut dq));
    let mut args: Vec<Arg> = tensors.into_iter().chain(numbers(&case)).collect();
    let programs = grid([p.n_q.div_ceil(tiles.q), p.heads_q, p.batch * dq_splits]);
    interpret(form, &FLASH_ATTENTION_BWD_DQ, &[case.dtype, DType::F32], &consts, programs, &mut args);

    let gradients = &expected.gradients;
    for (name, all, num_splits, shape, expected) in [
        ("dk", &dk, dkdv_splits, key_shape, &gradients.dk),
        ("dv", &dv, dkdv_splits, value_shape, &gradients.dv),
        ("dq", &dq, dq_splits, query_shape, &gradients.dq),
    ] {
        let mut y = case.poisoned(shape);
        let mut args = vec![Arg::In(all), Arg::Out(&mut y), num_splits.into(), Arg::Float(1.0)];
        let mut consts = row_wise(form, &case, tiles, shape[3], &[]);
        consts.extend_from_slice(consts! { row_tile = 32usize });
        let programs = grid([shape[2].div_ceil(32), shape[1], shape[0]]);
        interpret(form, &FLASH_ATTENTION_BWD_POSTPROCESS, &[case.dtype], &consts, programs, &mut args);
        case.check(name, &y, expected);
    }
}

/// Splits that begin before, on and after the diagonal, empty splits, and lengths that are and are not multiples of the
/// tiles.
#[test]
fn split_kv() {
    let tiles = Tiles { q: 16, k: 32 };
    for case in [
        Case::new(96, 128, 16).dtype(DType::F32),
        Case::new(96, 128, 16).causal().dtype(DType::F32),
        Case::new(130, 70, 20).causal().dtype(DType::F32),
        Case::new(130, 70, 20).causal().dtype(DType::BF16),
        Case::new(50, 150, 16).heads(2, 4, 2).causal().dtype(DType::F32),
        Case::new(50, 150, 40).values(16).modifiers(SINKS).causal().dtype(DType::F32),
    ] {
        for form in forms() {
            check_forward_split_kv(form, case, tiles, 64);
            check_backward_split(form, case, tiles, 64);
        }
    }
}

/// Values of another head dimension than queries and keys, narrower and wider, and a score that each row has beside its keys.
#[test]
fn other_head_dimensions_of_values_and_sinks() {
    let wider = Case::new(20, 35, 16).values(40).heads(1, 2, 1).layout(Layout::Gaps);
    check(wider.modifiers(SINKS).causal().dtype(DType::F32));
    // Some rows see no key.
    check(Case::new(40, 20, 48).values(16).modifiers(SINKS).causal());
    let tiles = Tiles { q: 64, k: 64 };
    let case = Case::new(150, 135, 64).values(32).heads(1, 2, 1).modifiers(SINKS).causal();
    let (inputs, form) = (case.inputs(), Form::WarpSpecialized { num_warps: 4, num_stages: 2 });
    let expected = case.expected(&inputs);
    check_forward(form, case, tiles, &inputs, &expected);
    check_backward(form, case, tiles, &inputs, &expected);
    check_replicas((2, Some(1)), Form::Replicated { pingpong: true }, case, tiles, &inputs, &expected);
}

/// Few queries, of which those of a group of heads are rows of one.
#[test]
fn few_queries_of_groups_of_heads() {
    let case = Case::new(13, 70, 16).heads(2, 6, 2).modifiers(SINKS);
    check(case.causal());
    check(case.layout(Layout::Gaps).dtype(DType::F32));
    check(case.causal().modifiers(Modifiers { window: Some(9), softcap: Some(1.5), ..SINKS }));
    let case = Case::new(13, 135, 64).heads(1, 12, 2).modifiers(SINKS).causal();
    let (inputs, tiles) = (case.inputs(), Tiles { q: 64, k: 64 });
    let expected = case.expected(&inputs);
    check_forward(Form::WarpSpecialized { num_warps: 4, num_stages: 2 }, case, tiles, &inputs, &expected);
    for blocks in [None, Some(1)] {
        check_replicas((2, blocks), Form::Replicated { pingpong: true }, case, tiles, &inputs, &expected);
    }
}

/// Packed sequences, also with other numbers of keys than rows, and rows and keys beyond them.
const DOCUMENTS: &[[usize; 2]] = &[[0, 0], [1, 1], [60, 60], [61, 100], [90, 100], [140, 130]];

fn modified_cases(case: Case) -> Vec<Case> {
    let none = Modifiers::default();
    let all = [
        Modifiers { window: Some(40), ..none },
        Modifiers { prefix: Some(70), ..none },
        Modifiers { documents: Some(DOCUMENTS), ..none },
        Modifiers { documents: Some(DOCUMENTS), window: Some(20), ..none },
        Modifiers { softcap: Some(1.5), ..none },
        Modifiers { relative: true, ..none },
        Modifiers { window: Some(70), softcap: Some(1.5), alibi: true, sinks: true, ..none },
    ];
    all.map(|modifiers| case.modifiers(modifiers)).to_vec()
}

#[test]
fn modifiers_in_every_form() {
    for case in modified_cases(Case::new(150, 135, 16).heads(1, 2, 1)) {
        check_inputs(case.causal(), Tiles { q: 32, k: 32 }, &case.inputs());
    }
}

/// The loops over masked and full tiles with a producer warp, whose trip counts come from memory.
#[test]
fn modifiers_with_warp_specialization() {
    let tiles = Tiles { q: 64, k: 64 };
    for (i, case) in modified_cases(Case::new(150, 135, 32)).into_iter().enumerate() {
        for case in [case, case.causal()] {
            let inputs = case.inputs();
            let expected = case.expected(&inputs);
            let form = Form::WarpSpecialized { num_warps: if i % 2 == 0 { 4 } else { 8 }, num_stages: 2 };
            check_forward(form, case, tiles, &inputs, &expected);
            check_backward(form, case, tiles, &inputs, &expected);
        }
    }
}

/// The ranges of packed sequences, against those of the reference.
#[test]
fn document_ranges() {
    let starts = |side: usize| DOCUMENTS.iter().map(|start| start[side]).collect::<Vec<usize>>();
    for form in interpret::forms() {
        for (rows, causal, window) in [(true, true, None), (true, false, Some(9)), (false, true, Some(9))] {
            let modifiers = Modifiers { window, documents: Some(DOCUMENTS), ..Modifiers::default() };
            let case = Case::new(150, 135, 16).modifiers(modifiers);
            let problem = if causal { case.causal().problem } else { case.problem };
            let n = if rows { problem.n_q } else { problem.n_k };
            let own = HostTensor::indices(&starts(usize::from(!rows)));
            let other = HostTensor::indices(&starts(usize::from(rows)));
            let [mut first, mut end] = [0, 1].map(|_| HostTensor::indices(&vec![usize::MAX; n]));
            let window = Arg::Int(window.map_or(-1, |size| size as i64));
            let tensors = vec![Arg::In(&own), Arg::In(&other), Arg::Out(&mut first), Arg::Out(&mut end)];
            let numbers = vec![n.into(), (DOCUMENTS.len() - 1).into(), window];
            let mut args = tensors.into_iter().chain(numbers).collect::<Vec<Arg>>();
            let consts = consts! { rows = rows, causal = causal, tile = 64usize, block = 4usize };
            let programs = grid([n.div_ceil(64), 1, 1]);
            interpret(form, &DOCUMENT_RANGES_OF_SIDE, &[], consts, programs, &mut args);
            let numbers = |t: &HostTensor| {
                let words = t.bytes.chunks_exact(4);
                words.map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect::<Vec<i32>>()
            };
            let (first, end) = (numbers(&first), numbers(&end));
            for at in 0..n {
                let sees =
                    |other: usize| problem.seen(if rows { at } else { other }).contains(&if rows { other } else { at });
                let others = if rows { problem.n_k } else { problem.n_q };
                let seen: Vec<usize> = (0..others).filter(|&other| sees(other)).collect();
                let found: Vec<usize> = (first[at] as usize..(end[at] as usize).max(first[at] as usize)).collect();
                assert_eq!(found, seen, "position {at}, rows {rows}, causal {causal}");
                // Attention requires that ends do not decrease.
                assert!(at == 0 || first[at - 1] <= first[at] && end[at - 1] <= end[at], "position {at}");
            }
        }
    }
}
