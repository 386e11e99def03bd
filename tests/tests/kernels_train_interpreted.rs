//! The kernels of training steps in the interpreter (as recorded, specialized, and after the GPU passes) and on the
//! simulated GPU, against their f64 references, at small odd shapes with gaps between the elements. No GPU is needed.

use tilewright::kernels::rope::{Direction, Pairs, Rotation};
use tilewright::kernels::{
    activation, adamw, cast, column_sum, cross_entropy, embedding, layer_norm, rank_sum, rope, swiglu,
};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_tests::consts;
use tilewright_tests::interpret::{self, Arg, Form, RowLoopCase, SIMULATED, interpret, row_loops};
use tilewright_tests::numerics::{HostTensor, Random, dense, gapped, tolerance};
use tilewright_tests::on_device::{ACTIVATIONS, activated, indices};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Rows and columns: one, powers of two, and neither.
const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 5], [7, 1], [8, 16], [5, 37]];

/// All forms that run without a GPU.
fn forms() -> impl Iterator<Item = Form> {
    interpret::forms().into_iter().chain(SIMULATED)
}

/// Runs `case` for every type and shape, dense and with gaps.
fn each_case(case: impl Fn(DType, [usize; 2], &[usize])) {
    for dtype in TYPES {
        for shape in SHAPES {
            case(dtype, shape, &dense(&shape));
            case(dtype, shape, &gapped(&shape, 3, 2));
        }
    }
}

/// A one-dimensional grid of `n` programs.
fn grid_of(n: usize) -> [u32; 3] {
    [n as u32, 1, 1]
}

/// The grid of a kernel whose tiles of 2 × 8 cover the matrix.
fn tiles([rows, d]: [usize; 2]) -> [u32; 3] {
    grid_of(rows.div_ceil(2) * d.div_ceil(8))
}

fn floats(dtype: DType, shape: &[usize], strides: &[usize], scale: f64, random: &mut Random) -> HostTensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| scale * random.number()).collect();
    HostTensor::of(dtype, shape, strides, &values)
}

#[test]
fn layer_norm_matches() {
    each_case(|dtype, [rows, d], s| {
        let mut random = Random::new(1);
        let x = HostTensor::random(dtype, &[rows, d], s, &mut random);
        let w = HostTensor::random(dtype, &[d], &[2], &mut random);
        let b = HostTensor::random(dtype, &[d], &[1], &mut random);
        let want = layer_norm::reference::forward(&x.values(), &w.values(), &b.values(), 0.1);
        for (whole_rows, d_tile) in [(true, d.next_power_of_two()), (false, 8)] {
            for form in forms() {
                let mut y = HostTensor::poisoned(dtype, &[rows, d], s);
                let mut mean = HostTensor::poisoned(DType::F32, &[rows], &[1]);
                let mut rstd = HostTensor::poisoned(DType::F32, &[rows], &[3]);
                let mut args: Vec<Arg> = vec![Arg::In(&x), Arg::In(&w), Arg::In(&b)];
                args.extend([Arg::Out(&mut y), Arg::Out(&mut mean), Arg::Out(&mut rstd)]);
                args.push(Arg::Float(0.1));
                let consts = consts! { rows_tile = 2usize, d_tile = d_tile, whole_rows = whole_rows };
                interpret(form, &layer_norm::LAYER_NORM_FWD, &[dtype], consts, grid_of(rows.div_ceil(2)), &mut args);
                y.check("y", &want.y, tolerance(dtype));
                mean.check("mean", &want.mean, 1e-5);
                rstd.check("rstd", &want.rstd, 1e-5);
            }
        }
    });
}

#[test]
fn layer_norm_gradients_match() {
    each_case(|dtype, [rows, d], s| {
        let mut random = Random::new(2);
        let x = HostTensor::random(dtype, &[rows, d], s, &mut random);
        let w = HostTensor::random(dtype, &[d], &[1], &mut random);
        let g = HostTensor::random(dtype, &[rows, d], &dense(&[rows, d]), &mut random);
        let (xs, ws) = (x.values(), w.values());
        let forward = layer_norm::reference::forward(&xs, &ws, &vec![0.0; d], 0.1);
        let mean = HostTensor::of(DType::F32, &[rows], &[1], &forward.mean);
        let rstd = HostTensor::of(DType::F32, &[rows], &[2], &forward.rstd);
        let want = layer_norm::reference::backward(&xs, &ws, &g.values(), 0.1);
        for RowLoopCase { whole_rows, d_tile, programs, stages } in row_loops([rows, d]) {
            for form in forms() {
                let mut grad_x = HostTensor::poisoned(dtype, &[rows, d], s);
                let partial = HostTensor::poisoned(DType::F32, &[programs, d], &[d, 1]);
                let (mut partial_w, mut partial_b) = (partial.clone(), partial);
                let mut args: Vec<Arg> = [&x, &w, &mean, &rstd, &g].map(Arg::In).into_iter().collect();
                args.extend([Arg::Out(&mut grad_x), Arg::Out(&mut partial_w), Arg::Out(&mut partial_b)]);
                let rows_per_program = rows.div_ceil(programs).next_multiple_of(2);
                args.push(rows_per_program.into());
                let consts = consts! { rows_tile = 2usize, d_tile = d_tile, whole_rows = whole_rows, stages = stages };
                interpret(form, &layer_norm::LAYER_NORM_BWD, &[dtype], consts, grid_of(programs), &mut args);
                grad_x.check("grad_x", &want.x, tolerance(dtype));
                for (what, partial, want) in [("grad_w", partial_w, &want.w), ("grad_b", partial_b, &want.b)] {
                    partial.check_gaps(what);
                    let sums = column_sum::reference(&partial.values(), d);
                    HostTensor::of(DType::F32, &[d], &[1], &sums).check(what, want, 1e-5);
                }
            }
        }
    });
}

#[test]
fn swiglu_and_its_gradients_match() {
    each_case(|dtype, shape, s| {
        let mut random = Random::new(3);
        let a = floats(dtype, &shape, s, 8.0, &mut random);
        let [b, g] = [(); 2].map(|()| HostTensor::random(dtype, &shape, s, &mut random));
        let (xs, gs, allowed) = (a.values(), g.values(), tolerance(dtype));
        let consts = consts! { rows_tile = 2usize, d_tile = 8usize };
        let run = |form, def: &'static KernelDef, args: &mut [Arg]| {
            interpret(form, def, &[dtype], consts, tiles(shape), args)
        };
        for form in forms() {
            let mut out = HostTensor::poisoned(dtype, &shape, s);
            let mut second = out.clone();
            run(form, &swiglu::SWIGLU_FWD, &mut [Arg::In(&a), Arg::In(&b), Arg::Out(&mut out)]);
            out.check("swiglu_fwd", &swiglu::reference::forward(&xs, &b.values()), allowed);
            run(
                form,
                &swiglu::SWIGLU_BWD,
                &mut [Arg::In(&a), Arg::In(&b), Arg::In(&g), Arg::Out(&mut out), Arg::Out(&mut second)],
            );
            let (want_a, want_b) = swiglu::reference::backward(&xs, &b.values(), &gs);
            out.check("grad_a", &want_a, allowed);
            second.check("grad_b", &want_b, allowed);
        }
    });
}

#[test]
fn activations_and_their_gradients_match() {
    each_case(|dtype, shape, s| {
        let ([_, d], mut random) = (shape, Random::new(9));
        let x = floats(dtype, &shape, s, 8.0, &mut random);
        let bias = HostTensor::random(dtype, &[d], &[s[1]], &mut random);
        let [residual, g] = [(); 2].map(|()| HostTensor::random(dtype, &shape, s, &mut random));
        let (biases, residuals, gs, allowed) = (bias.values(), residual.values(), g.values(), tolerance(dtype));
        let xs: Vec<f64> = x.values().iter().enumerate().map(|(i, x)| x + biases[i % d]).collect();
        for (form, activation) in forms().flat_map(|form| ACTIVATIONS.map(|activation| (form, activation))) {
            let mut out = HostTensor::poisoned(dtype, &shape, s);
            let tile = consts! { rows_tile = 2usize, d_tile = 8usize, activation = activation, has_bias = true };
            let all: Vec<_> = tile.iter().cloned().chain(consts! { has_residual = true }.iter().cloned()).collect();
            interpret(
                form,
                &activation::ACTIVATION_FWD,
                &[dtype],
                &all,
                tiles(shape),
                &mut [Arg::In(&x), Arg::In(&bias), s[1].into(), Arg::In(&residual), Arg::Out(&mut out)],
            );
            let want = xs.iter().zip(&residuals).map(|(x, r)| activated(*x, activation) + r);
            out.check(&format!("{activation:?}"), &want.collect::<Vec<_>>(), allowed);
            interpret(
                form,
                &activation::ACTIVATION_BWD,
                &[dtype],
                tile,
                tiles(shape),
                &mut [Arg::In(&x), Arg::In(&bias), s[1].into(), Arg::In(&g), Arg::Out(&mut out)],
            );
            let want = xs.iter().zip(&gs).map(|(x, g)| g * activation::reference::derivative(*x, activation));
            out.check(&format!("{activation:?}, grad"), &want.collect::<Vec<_>>(), allowed);
        }
    });
}

#[test]
fn cross_entropy_and_its_gradient_match() {
    const IGNORE: i64 = -100;
    each_case(|dtype, shape, s| {
        let ([rows, d], mut random) = (shape, Random::new(4));
        let x = floats(dtype, &shape, s, 30.0, &mut random);
        let g = HostTensor::random(DType::F32, &[rows], &[2], &mut random);
        let targets: Vec<i64> = (0..rows).map(|r| if r == 2 { IGNORE } else { (7 * r % d) as i64 }).collect();
        let (want_loss, want_lse) = cross_entropy::reference::forward(&x.values(), &targets, d, IGNORE);
        let want = cross_entropy::reference::backward(&x.values(), &targets, d, IGNORE, &g.values(), 0.5);
        let lse_in = HostTensor::of(DType::F32, &[rows], &[1], &want_lse);
        let consts = consts! { rows_tile = 2usize, d_tile = 8usize };
        for index in [DType::I32, DType::I64] {
            let targets = indices(index, 3, &targets);
            for form in forms() {
                let mut loss = HostTensor::poisoned(DType::F32, &[rows], &[1]);
                let mut lse = HostTensor::poisoned(DType::F32, &[rows], &[2]);
                let mut args = vec![Arg::In(&x), Arg::In(&targets), Arg::Out(&mut loss), Arg::Out(&mut lse)];
                args.extend([Arg::Int(IGNORE), Arg::Int(0)]);
                let grid = grid_of(rows.div_ceil(2));
                // I64: two slots of four elements, each two runs of two. I32: one slot for the whole tile.
                let (slots, size_per_thread) = if index == DType::I64 { (2usize, 2usize) } else { (1, 64) };
                let slotted =
                    consts! { rows_tile = 2usize, d_tile = 8usize, slots = slots, size_per_thread = size_per_thread };
                interpret(form, &cross_entropy::CROSS_ENTROPY_FWD, &[dtype, index], slotted, grid, &mut args);
                loss.check("loss", &want_loss, 1e-5);
                lse.check("lse", &want_lse, 1e-5);

                let mut grad = HostTensor::poisoned(dtype, &shape, s);
                let mut args: Vec<Arg> = [&x, &targets, &lse_in, &g].map(Arg::In).into_iter().collect();
                args.push(Arg::Out(&mut grad));
                args.extend([Arg::Int(IGNORE), Arg::Int(0), Arg::Float(0.5)]);
                interpret(form, &cross_entropy::CROSS_ENTROPY_BWD, &[dtype, index], consts, tiles(shape), &mut args);
                grad.check("grad_logits", &want, tolerance(dtype));

                let mut x_and_grad = x.clone();
                let mut loss = HostTensor::poisoned(DType::F32, &[rows], &[1]);
                let mut args = vec![Arg::Out(&mut x_and_grad), Arg::In(&targets), Arg::In(&g), Arg::Out(&mut loss)];
                args.extend([Arg::Int(d as i64), Arg::Int(IGNORE), Arg::Float(0.5)]);
                interpret(form, &cross_entropy::CROSS_ENTROPY_FWD_BWD, &[dtype, index], slotted, grid, &mut args);
                loss.check("loss in place", &want_loss, 1e-5);
                x_and_grad.check("grad_logits in place", &want, tolerance(dtype));
            }
        }
    });
}

/// Unaligned rows that are read in aligned vectors: dense and padded, from the start of memory and at an offset.
#[test]
fn cross_entropy_of_unaligned_rows_matches() {
    const IGNORE: i64 = -100;
    let narrow = [1, 7, 8, 9, 37].into_iter().flat_map(|d| [(d, 0, 0), (d, 3, 5)]);
    for (d, gap, first) in narrow.chain([(33, 0, 1), (100, 4, 3), (1000, 0, 0), (4097, 0, 6)]) {
        for dtype in TYPES {
            let (rows, vector, mut random) = (5, 16 / dtype.bytes(), Random::new(d as u64));
            let (shape, s) = ([rows, d], [d + gap, 1]);
            let x = floats(dtype, &shape, &s, 30.0, &mut random).with_offset(first);
            let g = HostTensor::random(DType::F32, &[rows], &[1], &mut random);
            let listed: Vec<i64> = (0..rows).map(|r| if r == 2 { IGNORE } else { (7 * r % d) as i64 }).collect();
            let targets = indices(DType::I64, 1, &listed);
            let (want_loss, want_lse) = cross_entropy::reference::forward(&x.values(), &listed, d, IGNORE);
            let want = cross_entropy::reference::backward(&x.values(), &listed, d, IGNORE, &g.values(), 0.5);
            let lse_in = HostTensor::of(DType::F32, &[rows], &[1], &want_lse);
            // Wide rows take too long on the simulated GPU.
            let d_tile = if d > 100 { 512usize } else { 16 };
            for form in forms().filter(|form| d <= 100 || *form == Form::Specialized) {
                let tile = consts! { rows_tile = 2usize, d_tile = d_tile, vector = vector };
                let misalignment = Arg::Int((first % vector) as i64);
                let mut loss = HostTensor::poisoned(DType::F32, &[rows], &[1]);
                let mut lse = loss.clone();
                let mut args = vec![Arg::In(&x), Arg::In(&targets), Arg::Out(&mut loss), Arg::Out(&mut lse)];
                args.extend([Arg::Int(IGNORE), misalignment]);
                let slots = [tile, consts! { slots = 2usize, size_per_thread = vector }].concat();
                let types = [dtype, DType::I64];
                interpret(form, &cross_entropy::CROSS_ENTROPY_FWD, &types, &slots, grid_of(3), &mut args);
                loss.check("loss", &want_loss, 1e-5);
                lse.check("lse", &want_lse, 1e-5);

                // Another row stride and another offset, with the same alignment.
                let (apart, behind) = (s[0] + vector, first + 2 * vector);
                let mut grad = HostTensor::poisoned(dtype, &shape, &[apart, 1]).with_offset(behind);
                let mut args: Vec<Arg> = [&x, &targets, &lse_in, &g].map(Arg::In).into_iter().collect();
                args.push(Arg::Out(&mut grad));
                args.extend([Arg::Int(IGNORE), Arg::Int((first % vector) as i64), Arg::Float(0.5)]);
                let grid = grid_of(3 * d.div_ceil(d_tile));
                interpret(form, &cross_entropy::CROSS_ENTROPY_BWD, &types, tile, grid, &mut args);
                grad.check("grad_logits", &want, tolerance(dtype));
            }
        }
    }
}

#[test]
fn rope_matches_in_both_directions() {
    for dtype in TYPES {
        for (shape, d_tile, gap, step) in [([1, 1, 2], 2usize, 0, 1), ([5, 3, 6], 8, 3, 2), ([7, 4, 16], 16, 0, 1)] {
            let [tokens, heads, d] = shape;
            let (s, mut random) = (gapped(&shape, gap, step), Random::new(5));
            let x = HostTensor::random(dtype, &shape, &s, &mut random);
            let theta = HostTensor::of(DType::F64, &[d / 2], &[1], &rope::frequencies(d, 10_000.0));
            let listed: Vec<i64> = (0..tokens as i64).map(|t| 65_000 + 13 * t % 40).collect();
            let counted: Vec<i64> = (0..tokens as i64).map(|t| 9 + t % 3).collect();
            let rotations = [
                (Direction::Forward, Pairs::Adjacent),
                (Direction::Backward, Pairs::Adjacent),
                (Direction::Forward, Pairs::Halves),
                (Direction::Backward, Pairs::Halves),
            ];
            for (direction, pairs) in rotations {
                let rotation = Rotation { direction, pairs };
                let want = |positions| rope::reference(&x.values(), positions, heads, d, 10_000.0, rotation);
                let consts = consts! {
                    tokens_tile = 4usize, heads_tile = 2usize, d_tile = d_tile, direction = direction, pairs = pairs,
                };
                let grid = [tokens.div_ceil(4) as u32, heads.div_ceil(2) as u32, 1];
                for form in forms() {
                    let positions = indices(DType::I64, 2, &listed);
                    let mut y = HostTensor::poisoned(dtype, &shape, &s);
                    let mut args: Vec<Arg> = [&x, &positions, &theta].map(Arg::In).into_iter().collect();
                    args.push(Arg::Out(&mut y));
                    interpret(form, &rope::ROPE_AT, &[dtype, DType::I64], consts, grid, &mut args);
                    y.check("rope_at", &want(&listed), tolerance(dtype));

                    let mut y = HostTensor::poisoned(dtype, &shape, &s);
                    let mut args = vec![Arg::In(&x), Arg::In(&theta), Arg::Out(&mut y)];
                    args.extend([9, 3].map(Arg::Int));
                    interpret(form, &rope::ROPE_FROM, &[dtype], consts, grid, &mut args);
                    y.check("rope_from", &want(&counted), tolerance(dtype));
                }
            }
        }
    }
}

#[test]
fn adamw_matches() {
    let options =
        adamw::Options { lr: 0.01, beta1: 0.75, beta2: 0.9375, eps: 1e-6, weight_decay: 0.1, grad_scale: 2.0 };
    let t = 3;
    let numbers = [
        1.0 - options.beta1,
        1.0 - options.beta2,
        options.lr / (1.0 - options.beta1.powi(t)),
        1.0 / (1.0 - options.beta2.powi(t)).sqrt(),
        options.eps,
        options.lr * options.weight_decay,
        options.grad_scale,
    ];
    for dtype in TYPES {
        for n in [1, 16, 37] {
            let mut random = Random::new(6);
            let [p, m] = [(); 2].map(|()| HostTensor::random(DType::F32, &[n], &[1], &mut random));
            let squares: Vec<f64> = (0..n).map(|_| random.number().powi(2)).collect();
            let v = HostTensor::of(DType::F32, &[n], &[1], &squares);
            let g = HostTensor::random(dtype, &[n], &[1], &mut random);
            let mut want = [&p, &m, &v].map(HostTensor::values);
            let [want_p, want_m, want_v] = &mut want;
            adamw::reference(want_p, want_m, want_v, &g.values(), t as u64, &options);
            let rates = HostTensor::of(DType::F64, &[3], &[1], &[numbers[2], numbers[3], numbers[5]]);
            let step_controls =
                [1.0, 0.0].map(|applied| HostTensor::of(DType::F64, &[2], &[1], &[options.grad_scale, applied]));
            for form in forms() {
                for (step_control, applied) in step_controls.iter().zip([true, false]) {
                    let mut state = [p.clone(), m.clone(), v.clone()];
                    let before = [&p, &m, &v].map(HostTensor::values);
                    let mut compute_weights = HostTensor::of(DType::BF16, &[n], &[1], &vec![0.0; n]);
                    let mut args: Vec<Arg> = state.iter_mut().map(Arg::Out).collect();
                    args.extend([
                        Arg::In(&g),
                        Arg::Out(&mut compute_weights),
                        Arg::In(&rates),
                        Arg::In(step_control),
                        n.into(),
                    ]);
                    args.extend([numbers[0], numbers[1], numbers[4]].map(Arg::Float));
                    let consts = consts! { tile = 8usize, write_compute_weights = true };
                    let types = [dtype, DType::BF16];
                    interpret(form, &adamw::ADAMW_CONTROLLED, &types, consts, grid_of(n.div_ceil(8)), &mut args);
                    for (tensor, want) in state.iter().zip(if applied { &want } else { &before }) {
                        tensor.check("adamw_controlled", want, if applied { 1e-5 } else { 0.0 });
                    }
                    compute_weights.check(
                        "compute weights",
                        &if applied { want[0].clone() } else { vec![0.0; n] },
                        tolerance(DType::BF16),
                    );
                }
            }
            for (form, with_compute_weights) in forms().flat_map(|form| [(form, false), (form, true)]) {
                let mut state = [p.clone(), m.clone(), v.clone()];
                let mut compute_weights = HostTensor::poisoned(DType::BF16, &[n], &[1]);
                let mut args: Vec<Arg> = state.iter_mut().map(Arg::Out).collect();
                args.push(Arg::In(&g));
                let consts = consts! { tile = 8usize };
                let (def, dtypes) = if with_compute_weights {
                    args.push(Arg::Out(&mut compute_weights));
                    (&adamw::ADAMW_WITH_COMPUTE_WEIGHTS, vec![dtype, DType::BF16])
                } else {
                    (&adamw::ADAMW, vec![dtype])
                };
                args.push(n.into());
                args.extend(numbers.map(Arg::Float));
                interpret(form, def, &dtypes, consts, grid_of(n.div_ceil(8)), &mut args);
                for (tensor, want) in state.iter().zip(&want) {
                    tensor.check(def.name, want, 1e-5);
                }
                if with_compute_weights {
                    compute_weights.check("compute weights", &want[0], tolerance(DType::BF16));
                }
            }
        }
    }
}

#[test]
fn sums_over_ranks_match() {
    for (n, max_programs) in [(1, 1), (8, 1), (37, 2), (37, 5)] {
        for dtype in TYPES {
            for (world, rank, average, write_copy) in [(2, 0, false, true), (2, 1, true, false), (3, 1, true, true)] {
                let mut random = Random::new(9);
                let own = HostTensor::random(dtype, &[n], &[1], &mut random);
                let x = HostTensor::random(dtype, &[world - 1, n], &[n + 3, 1], &mut random);
                let mut parts: Vec<Vec<f64>> = x.values().chunks(n).map(<[f64]>::to_vec).collect();
                parts.insert(rank, own.values());
                let want = rank_sum::reference(&parts, average);
                for form in forms() {
                    let (mut y, mut copy) = (own.clone(), HostTensor::poisoned(dtype, &[n], &[1]));
                    let consts = consts! {
                        tile = 8usize, rank = rank, world = world, average = average, write_copy = write_copy,
                    };
                    let args = &mut [Arg::Out(&mut y), Arg::In(&x), Arg::Out(&mut copy), (n + 3).into(), n.into()];
                    interpret(form, &rank_sum::RANK_SUM, &[dtype], consts, grid_of(max_programs), args);
                    y.check("rank_sum", &want, tolerance(dtype));
                    if write_copy {
                        copy.check("rank_sum's copy", &want, tolerance(dtype));
                    }
                }
            }
        }
    }
}

#[test]
fn casts_round_to_nearest() {
    each_case(|dtype, shape, s| {
        let x = HostTensor::random(dtype, &shape, s, &mut Random::new(7));
        let factor = HostTensor::of(DType::F32, &[1], &[1], &[-0.75]);
        let scaled: Vec<f64> = x.values().iter().map(|x| -0.75 * x).collect();
        for to in TYPES {
            let want = HostTensor::of(to, &shape, s, &x.values()).values();
            for form in forms() {
                let mut y = HostTensor::poisoned(to, &shape, s);
                let args = &mut [Arg::In(&x), Arg::Out(&mut y)];
                let consts = consts! { rows_tile = 2usize, d_tile = 8usize };
                interpret(form, &cast::CAST, &[dtype, to], consts, tiles(shape), args);
                y.check("cast", &want, 0.0);

                let mut y = HostTensor::poisoned(to, &shape, s);
                let args = &mut [Arg::In(&x), Arg::In(&factor), Arg::Out(&mut y)];
                interpret(form, &cast::SCALE, &[dtype, to], consts, tiles(shape), args);
                y.check("scale", &scaled, tolerance(to));
            }
        }
    });
}

#[test]
fn gradient_of_an_embedding_matches() {
    each_case(|dtype, shape, s| {
        let ([tokens, d], mut random) = (shape, Random::new(8));
        let g = HostTensor::random(dtype, &shape, s, &mut random);
        let before = HostTensor::random(DType::F32, &[3, d], &[d + 2, 1], &mut random);
        // Two of the five ids are outside of the table.
        let ids: Vec<i64> = (0..tokens as i64).map(|t| (7 * t) % 5 - 1).collect();
        let mut want = before.values();
        embedding::reference(&ids, &g.values(), d, &mut want);
        for index in [DType::I32, DType::I64] {
            let ids = indices(index, 1, &ids);
            for form in forms() {
                let mut grad = before.clone();
                let args = &mut [Arg::In(&ids), Arg::In(&g), Arg::Out(&mut grad)];
                let consts = consts! { ids_tile = 4usize, d_tile = 8usize };
                let grid = grid_of(tokens * d.div_ceil(8));
                interpret(form, &embedding::EMBEDDING_BWD, &[dtype, index], consts, grid, args);
                grad.check("grad_w", &want, 1e-5);
            }
        }
    });
}
