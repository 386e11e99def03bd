//! The kernels as native code, with default tiles and with small ones.

use half::bf16;
use tilewright::codegen::ir::DType;
use tilewright::codegen::target::GpuArch;
use tilewright::kernels::attention::reference::Modifiers;
use tilewright::kernels::attention::{self, Backward, Gradients, Options, Saved, Score, Tensor, TensorMut, Tiles};
use tilewright::prelude::{Buffer, Device, Precision};
use tilewright_tests::attention::{Case, Inputs, Layout, RELATIVE, SINKS, check};
use tilewright_tests::numerics::HostTensor;

/// Small tiles: a small problem has several tiles of queries and of keys.
fn small_tiles() -> Options<'static> {
    let tiles = Some(Tiles::new(16, 32, 1, 1));
    Options { forward_tiles: tiles, dkdv_tiles: tiles, dq_tiles: tiles, ..Options::default() }
}

#[test]
fn every_type() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let case = Case::new(127, 127, 64).heads(1, 2, 2).dtype(dtype);
        check(&Device::cpu(), case, &Options::default());
        check(&Device::cpu(), case.causal(), &Options::default());
    }
}

#[test]
fn lengths() {
    for (n_q, n_k) in [(1, 1), (17, 1000), (1000, 17), (127, 256), (256, 127)] {
        let case = Case::new(n_q, n_k, 32).dtype(DType::F32);
        check(&Device::cpu(), case, &Options::default());
        check(&Device::cpu(), case.causal(), &Options::default());
    }
}

#[test]
fn head_dimensions() {
    for d in [1, 16, 80, 96, 128, 256] {
        check(&Device::cpu(), Case::new(40, 70, d).causal().dtype(DType::F32), &small_tiles());
    }
}

#[test]
fn groups_and_strides() {
    for layout in [Layout::Dense, Layout::RowsFirst, Layout::Gaps] {
        let case = Case::new(36, 70, 24).heads(2, 6, 2).layout(layout).dtype(DType::F32);
        check(&Device::cpu(), case, &small_tiles());
        check(&Device::cpu(), case.causal(), &Options::default());
    }
}

#[test]
fn other_head_dimensions_of_values_and_sinks() {
    for (d, d_v) in [(192, 128), (24, 64), (16, 1)] {
        let case = Case::new(36, 70, d).values(d_v).heads(2, 6, 2).dtype(DType::F32);
        for case in [case, case.causal().layout(Layout::Gaps), case.causal().modifiers(SINKS)] {
            check(&Device::cpu(), case, &small_tiles());
        }
    }
    check(&Device::cpu(), Case::new(700, 600, 16).values(32).modifiers(SINKS).dtype(DType::F32), &in_splits());
}

/// Three splits of the loops over 600 keys.
fn in_splits() -> Options<'static> {
    Options { num_splits: Some(3), ..Options::default() }
}

/// Few queries per head, as in decoding: the heads of a group are rows of one.
#[test]
fn few_queries_of_groups_of_heads() {
    let forms = [(Options::default(), Layout::Dense), (small_tiles(), Layout::RowsFirst), (in_splits(), Layout::Gaps)];
    for (options, layout) in forms {
        let n_q = if layout == Layout::RowsFirst { 1 } else { 7 };
        let case = Case::new(n_q, 600, 16).values(24).heads(2, 6, 2).layout(layout).dtype(DType::F32);
        check(&Device::cpu(), case, &options);
        check(&Device::cpu(), case.causal().modifiers(SINKS), &options);
        if layout == Layout::Dense {
            // Heads that differ in more than their queries.
            check(&Device::cpu(), case.modifiers(Modifiers { alibi: true, ..SINKS }), &options);
            check(&Device::cpu(), case.modifiers(RELATIVE), &options);
        }
        let window = Modifiers { window: Some(99), softcap: Some(2.0), ..SINKS };
        check(&Device::cpu(), case.causal().modifiers(window), &options);
    }
}

/// With this many query heads and one key, the number of heads that fit into the L2 cache exceeds i32::MAX.
#[test]
fn very_many_heads_share_keys() {
    check(&Device::cpu(), Case::new(33, 1, 4).heads(1, 3300, 1).causal().dtype(DType::F32), &small_tiles());
}

/// Lengths that are multiples of the tiles let kernels omit boundary checks: the launch must still prove that each
/// access stays inside its tensor.
#[test]
fn lengths_that_tiles_divide() {
    for (q_tile, k_tile) in [(16, 16), (16, 64), (64, 16)] {
        let tiles = Some(Tiles::new(q_tile, k_tile, 1, 1));
        for backward in [Backward::TwoPass, Backward::OnePass, Backward::Ordered] {
            let options =
                Options { forward_tiles: tiles, dkdv_tiles: tiles, dq_tiles: tiles, backward, ..Options::default() };
            for (n_q, n_k) in [(128, 128), (64, 192), (192, 64)] {
                let case = Case::new(n_q, n_k, 16).heads(2, 4, 2).dtype(DType::F32);
                check(&Device::cpu(), case, &options);
                check(&Device::cpu(), case.causal(), &options);
            }
        }
    }
}

#[test]
fn empty_tensors() {
    check(&Device::cpu(), Case::new(20, 0, 16).dtype(DType::F32), &Options::default());
    check(&Device::cpu(), Case::new(0, 20, 16).dtype(DType::F32), &Options::default());
    check(&Device::cpu(), Case::new(20, 20, 16).heads(0, 1, 1).dtype(DType::F32), &Options::default());
    check(&Device::cpu(), Case::new(0, 20, 16).modifiers(SINKS).dtype(DType::F32), &Options::default());
    check(&Device::cpu(), Case::new(20, 20, 16).heads(0, 1, 1).modifiers(SINKS).dtype(DType::F32), &Options::default());
    check(&Device::cpu(), Case::new(20, 20, 16).heads(1, 0, 0).modifiers(SINKS).dtype(DType::F32), &Options::default());
    for (n_q, n_k) in [(0, 20), (20, 0), (0, 0)] {
        let case = Case::new(n_q, n_k, 16).heads(2, 2, 1).modifiers(RELATIVE).dtype(DType::F32);
        check(&Device::cpu(), case, &Options::default());
    }
}

/// The functions that allocate their outputs, on dense tensors.
#[test]
fn forward_and_backward_allocate_outputs() {
    let device = Device::cpu();
    let case = Case::new(33, 50, 16).heads(1, 2, 1).causal().dtype(DType::F32);
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    let Inputs { q, k, v, d_o } = &inputs;
    let (query, key) = (case.query_shape(), case.key_shape());
    let buffers = [q, k, v, d_o].map(|t| t.upload::<f32>(&device));
    let tensor = |i: usize, shape| Tensor::dense(buffers[i].view(), shape).unwrap();
    let [q, k, v, d_o] = [tensor(0, query), tensor(1, key), tensor(2, key), tensor(3, query)];
    let options = Options::new(true);
    let (o, lse) = attention::forward(&device, q, k, v, &options).unwrap();
    let saved = Saved { q, k, v, o: Tensor::dense(o.view(), query).unwrap(), lse: lse.view(), d_o };
    let Gradients { dq, dk, dv } = attention::backward(&device, saved, &options).unwrap();
    let check = |what, buffer: &Buffer<f32>, shape: [usize; 4], want: &[f64]| {
        let numbers: Vec<f64> = buffer.to_vec().unwrap().into_iter().map(f64::from).collect();
        case.check(what, &case.tensor(shape, &numbers), want);
    };
    check("o", &o, query, &expected.o);
    check("dq", &dq, query, &expected.gradients.dq);
    check("dk", &dk, key, &expected.gradients.dk);
    check("dv", &dv, key, &expected.gradients.dv);
    let numbers: Vec<f64> = lse.to_vec().unwrap().into_iter().map(f64::from).collect();
    case.check_lse(&HostTensor::of(DType::F32, &[numbers.len()], &[1], &numbers), &expected.lse);
}

#[test]
fn mistakes_say_what_is_expected() {
    let device = Device::cpu();
    let buffer = Buffer::<bf16>::zeros(&device, 1 << 12).unwrap();
    let tensor = |shape| Tensor::dense(buffer.view(), shape).unwrap();
    let message = |q, k, v, options: Options| {
        attention::forward(&device, tensor(q), tensor(k), tensor(v), &options).unwrap_err().to_string()
    };
    let shape = [1, 2, 8, 16];
    let sinks = Buffer::<f32>::zeros(&device, 3).unwrap();
    let relative = Score::relative(sinks.view());
    let cases = [
        (message([1, 2, 8, 32], shape, shape, Options::default()), vec!["`k`", "[1, 2, 8, 32]", "[1, 2, 8, 16]"]),
        (message(shape, shape, [1, 2, 9, 16], Options::default()), vec!["`v`", "[1, 2, 8, 16]", "[1, 2, 9, 16]"]),
        (message([1, 2, 4, 16], shape, [1, 2, 4, 512], Options::default()), vec!["`v`", "1 to 256", "[1, 2, 4, 512]"]),
        (
            message(shape, shape, shape, Options { sinks: Some(sinks.view()), ..Options::default() }),
            vec!["`sinks`", "a score for each of 2 heads", "3 scores"],
        ),
        (
            message(shape, shape, shape, Options { score: relative, ..Options::default() }),
            vec!["`relative_bias`", "15 numbers", "8 rows and 8 keys", "2 heads", "3 numbers"],
        ),
        (message([1, 3, 8, 16], shape, shape, Options::default()), vec!["divides", "2 heads", "3"]),
        (message([1, 1, 1, 512], shape, shape, Options::default()), vec!["1 to 256", "512"]),
        (
            message(shape, shape, shape, Options { scale: Some(-1.0), ..Options::default() }),
            vec!["a positive finite number", "-1"],
        ),
        (
            message(
                shape,
                shape,
                shape,
                Options { forward_tiles: Some(Tiles::new(1 << 21, 64, 4, 2)), ..Options::default() },
            ),
            vec!["elements", "1048576"],
        ),
    ];
    for (message, parts) in cases {
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
    let mut o = Buffer::<bf16>::zeros(&device, 1 << 12).unwrap();
    let mut lse = Buffer::<f32>::zeros(&device, 15).unwrap();
    let (q, o) = (tensor(shape), TensorMut::dense(o.view_mut(), shape).unwrap());
    let mut none = Buffer::<f32>::zeros(&device, 0).unwrap();
    let short = attention::forward_into(&device, q, q, q, o, lse.view_mut(), none.view_mut(), &Options::default());
    let message = short.unwrap_err().to_string();
    assert!(
        message.contains("`lse` expects at least 16 elements, one per row of q") && message.contains("found 15"),
        "{message}"
    );
}

/// Precision applies to f32 on GPUs; on the CPU every choice is at least as accurate as requested.
#[test]
fn precisions() {
    for precision in [Precision::Ieee, Precision::Tf32x3] {
        let options = Options { precision: Some(precision), ..Options::default() };
        check(&Device::cpu(), Case::new(30, 30, 16).causal().dtype(DType::F32), &options);
    }
    let options = Options { precision: Some(Precision::Tf32), ..Options::default() };
    check(&Device::cpu(), Case::new(30, 30, 16).causal().dtype(DType::F32).with_tolerance(5e-3), &options);
}

/// Split loops, with rows that see keys in no split, and rows that see keys only in some splits.
#[test]
fn split_kv() {
    for num_splits in [2, 7] {
        let options = Options { num_splits: Some(num_splits), ..Options::default() };
        let needed = attention::forward_workspace::<f32>(
            &Device::cpu(),
            [1, 1, 300, 16],
            [1, 1, 700, 16],
            [1, 1, 700, 16],
            &options,
        );
        assert_eq!(needed, 700_usize.div_ceil(if num_splits == 2 { 512 } else { 256 }) * 300 * 17);
        check(&Device::cpu(), Case::new(300, 700, 16).dtype(DType::F32), &options);
        check(&Device::cpu(), Case::new(1030, 600, 20).causal().dtype(DType::F32), &options);
        check(&Device::cpu(), Case::new(512, 1024, 16).causal().dtype(DType::F32), &options);
        check(&Device::cpu(), Case::new(1024, 512, 16).dtype(DType::F32), &options);
        check(&Device::cpu(), Case::new(520, 1030, 16).heads(2, 4, 2).causal().dtype(DType::F32), &options);
        // Results of splits are f32 for bf16 inputs, too.
        check(&Device::cpu(), Case::new(200, 600, 16).causal().dtype(DType::BF16), &options);
    }
}

#[test]
fn tiles_divide_splits() {
    let device = Device::cpu();
    let shape = [1, 1, 1024, 16];
    let data = Buffer::<f32>::zeros(&device, 1024 * 16).unwrap();
    let q = Tensor::dense(data.view(), shape).unwrap();
    let tiles = Some(Tiles::new(16, 512, 4, 1));
    let options = Options { num_splits: Some(2), forward_tiles: tiles, ..Options::default() };
    let message = attention::forward(&device, q, q, q, &options).unwrap_err().to_string();
    assert!(message.contains("divide 256") && message.contains("16 × 512"), "{message}");
}

/// Packed sequences: empty ones, short ones, and rows and keys beyond them.
const DOCUMENTS: &[[usize; 2]] = &[[0, 0], [1, 1], [1, 1], [40, 40], [43, 43], [100, 100], [120, 120]];
/// Sequences with other numbers of keys than rows, and none of one.
const CROSS: &[[usize; 2]] = &[[0, 0], [10, 30], [10, 40], [50, 40], [60, 90], [64, 91]];

fn modifiers() -> Vec<Modifiers> {
    let none = Modifiers::default();
    let (window, softcap) = (Some(20), Some(1.5));
    vec![
        Modifiers { window, ..none },
        Modifiers { window: Some(0), ..none },
        Modifiers { window: Some(usize::MAX), ..none },
        Modifiers { prefix: Some(0), ..none },
        Modifiers { prefix: Some(37), ..none },
        Modifiers { prefix: Some(90), softcap, alibi: true, ..none },
        Modifiers { prefix: Some(usize::MAX), ..none },
        Modifiers { documents: Some(DOCUMENTS), ..none },
        Modifiers { documents: Some(CROSS), ..none },
        Modifiers { documents: Some(DOCUMENTS), window: Some(7), ..none },
        Modifiers { documents: Some(CROSS), window: Some(7), ..none },
        Modifiers { documents: Some(&[[0, 0]]), ..none },
        Modifiers { softcap, ..none },
        Modifiers { alibi: true, ..none },
        Modifiers { window, softcap, alibi: true, ..none },
        Modifiers { relative: true, ..none },
        Modifiers { documents: Some(DOCUMENTS), relative: true, ..none },
    ]
}

#[test]
fn every_modifier() {
    for (i, modifiers) in modifiers().into_iter().enumerate() {
        let [rows, keys] = modifiers.documents.map_or([0, 0], |starts| starts[starts.len() - 1]);
        let case = |n_q, n_k| Case::new(n_q, n_k, 16).heads(2, 4, 2).dtype(DType::F32).modifiers(modifiers);
        // With other numbers of keys than of rows, the diagonal ends in the bottom right corner.
        let lengths = [(130, 130), (65, 201), (201, 93), (120, 120)];
        for (n_q, n_k) in lengths.into_iter().filter(|&(n_q, n_k)| rows <= n_q && keys <= n_k) {
            check(&Device::cpu(), case(n_q, n_k), &small_tiles());
            check(&Device::cpu(), case(n_q, n_k).causal(), &small_tiles());
        }
        if modifiers.alibi || modifiers.relative {
            check(&Device::cpu(), case(65, 1001), &Options { num_splits: Some(2), ..small_tiles() });
        }
        if i % 6 == 4 {
            check(&Device::cpu(), case(130, 130).dtype(DType::BF16).causal(), &Options::default());
        }
    }
}

/// The tiles that GPUs take for the gradient of a relative bias.
#[test]
fn relative_biases_on_simulated_gpus() {
    for (arch, d, dtype) in [(GpuArch::Sm90a, 64, DType::BF16), (GpuArch::Sm80, 200, DType::BF16)] {
        let case = Case::new(40, 70, d).heads(1, 2, 1).causal().dtype(dtype).modifiers(RELATIVE);
        check(&Device::simulated(arch), case, &Options::default());
    }
}

/// Rows beyond the end of a tile are zeros; a bias that makes their scores large must not reach the gradients.
#[test]
fn large_biases_of_partial_tiles() {
    let device = Device::cpu();
    let case = Case::new(33, 70, 16).dtype(DType::F32);
    let inputs = case.inputs();
    let buffers = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(|t| t.upload::<f32>(&device));
    let tensor = |i: usize, shape| Tensor::dense(buffers[i].view(), shape).unwrap();
    let (query, key) = (case.query_shape(), case.key_shape());
    let [q, k, v, d_o] = [tensor(0, query), tensor(1, key), tensor(2, key), tensor(3, query)];
    let slopes = Buffer::from_slice(&device, &[-50.0_f32]).unwrap();
    // A bias may be −∞.
    let biases = (0..33 + 70 - 1).map(|at| if at == 40 { f32::NEG_INFINITY } else { 0.0 }).collect::<Vec<f32>>();
    let bias = Buffer::from_slice(&device, &biases).unwrap();
    let options = Options { score: Score::relative(bias.view()), ..small_tiles() };
    let (o, lse) = attention::forward(&device, q, k, v, &options).unwrap();
    let saved = Saved { q, k, v, o: Tensor::dense(o.view(), query).unwrap(), lse: lse.view(), d_o };
    let gradient = attention::relative_bias_gradient(&device, saved, &options).unwrap().to_vec().unwrap();
    assert!(gradient.iter().all(|x| x.is_finite()) && gradient[40] == 0.0, "{gradient:?}");
    for backward in [Backward::TwoPass, Backward::OnePass, Backward::Ordered] {
        let options = Options { score: Score::new(None, Some(slopes.view())), backward, ..small_tiles() };
        let (o, lse) = attention::forward(&device, q, k, v, &options).unwrap();
        let saved = Saved { q, k, v, o: Tensor::dense(o.view(), query).unwrap(), lse: lse.view(), d_o };
        let Gradients { dq, dk, dv } = attention::backward(&device, saved, &options).unwrap();
        for gradient in [dq, dk, dv] {
            assert!(gradient.to_vec().unwrap().iter().all(|x| x.is_finite()), "{backward:?}");
        }
    }
}

/// A head without a sink has one of −∞. Rows that see no key add nothing to its gradient.
#[test]
fn sinks_of_minus_infinity() {
    let device = Device::cpu();
    let (heads, n_q, n_k, d) = (2, 5, 3, 16);
    let numbers = |n: usize| (0..n).map(|i| ((i * 37 % 101) as f32 / 50.0) - 1.0).collect::<Vec<_>>();
    let buffer = |n: usize| Buffer::from_slice(&device, &numbers(n)).unwrap();
    let (q, k, d_o) = (buffer(heads * n_q * d), buffer(heads * n_k * d), buffer(heads * n_q * d));
    let sinks = Buffer::from_slice(&device, &[f32::NEG_INFINITY, 0.5]).unwrap();
    let options = Options { sinks: Some(sinks.view()), ..Options::new(true) };
    let [q, k, d_o] = [(&q, n_q), (&k, n_k), (&d_o, n_q)].map(|(x, n)| x.tensor([1, heads, n, d]).unwrap());
    let (o, lse) = attention::forward(&device, q, k, k, &options).unwrap();
    assert!(lse.to_vec().unwrap()[..n_q - n_k].iter().all(|l| *l == f32::NEG_INFINITY), "rows without keys");
    let o = o.tensor([1, heads, n_q, d]).unwrap();
    let found = attention::sink_gradients(&device, sinks.view(), o, lse.view(), d_o).unwrap().to_vec().unwrap();
    assert_eq!(found[0], 0.0);
    // −Σ exp(s − L) · (dO · O).
    let (o, d_o, lse) = (o.view().to_vec().unwrap(), d_o.view().to_vec().unwrap(), lse.to_vec().unwrap());
    let of_row = |row: usize| {
        let dot: f32 = (row * d..(row + 1) * d).map(|i| o[i] * d_o[i]).sum();
        -(0.5 - lse[row]).exp() * dot
    };
    let want: f32 = (n_q..2 * n_q).map(of_row).sum();
    assert!((found[1] - want).abs() < 1e-5 && want.abs() > 1e-3, "{} {want}", found[1]);
}
