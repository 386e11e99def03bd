//! 8-bit floats: products of 8 bits, with and without scales, and the tensors that `quantize` makes.

use half::bf16;
use tilewright::codegen::ir::DType;
use tilewright::codegen::target::{GpuArch, Schedule};
use tilewright::kernels::attention::reference::{self, Modifiers};
use tilewright::kernels::attention::{Cache, Descale, Options, Tiles, forward, quantize};
use tilewright::prelude::{Buffer, Device, F8E4M3, F8E5M2};
use tilewright_tests::attention::{Case, Layout, SINKS};
use tilewright_tests::attention_8_bit::{Scales, check_8_bit};
use tilewright_tests::numerics::relative_error;

fn small_tiles() -> Options<'static> {
    Options { forward_tiles: Some(Tiles::new(16, 32, 1, 1)), ..Options::default() }
}

fn case(n_q: usize, n_k: usize, d: usize) -> Case {
    Case::new(n_q, n_k, d).dtype(DType::F8E4M3)
}

/// Keys that end within groups of 16, and blocks of 128 rows that end within tiles.
#[test]
fn lengths_and_scales() {
    let device = Device::cpu();
    for (n_q, n_k) in [(1, 1), (17, 70), (140, 300), (128, 256), (20, 0), (0, 20)] {
        for scales in [Scales::None, Scales::PerHead, Scales::PerBlock] {
            let case = case(n_q, n_k, 16).heads(2, 4, 2);
            check_8_bit(&device, case, scales, &small_tiles());
            check_8_bit(&device, case.causal().layout(Layout::Gaps), scales, &small_tiles());
        }
    }
}

#[test]
fn head_dimensions_types_and_splits() {
    let device = Device::cpu();
    for (d, d_v) in [(1, 16), (80, 64), (128, 128)] {
        check_8_bit(&device, case(40, 70, d).values(d_v), Scales::PerBlock, &Options::default());
    }
    check_8_bit(&device, case(40, 70, 16).dtype(DType::F8E5M2), Scales::PerBlock, &Options::default());
    let in_splits = Options { num_splits: Some(3), ..Options::default() };
    check_8_bit(&device, case(300, 700, 16).causal(), Scales::PerBlock, &in_splits);
}

#[test]
fn modifiers() {
    let (device, window) = (Device::cpu(), Some(20));
    for modifiers in [
        Modifiers { window, softcap: Some(1.5), alibi: true, ..SINKS },
        Modifiers { documents: Some(&[[0, 0], [1, 1], [40, 40], [120, 130]]), ..SINKS },
        Modifiers { relative: true, ..SINKS },
    ] {
        let case = case(130, 140, 16).heads(1, 2, 1).causal().modifiers(modifiers);
        check_8_bit(&device, case, Scales::PerBlock, &small_tiles());
    }
    // A few queries of several heads are not packed: their scales differ.
    check_8_bit(&device, case(3, 300, 16).heads(1, 4, 1), Scales::PerBlock, &Options::default());
}

/// Without 8-bit instructions (8.0), with those of `mma.sync` (8.9), and with `wgmma`: default tiles of small grids, and those of
/// large ones.
#[test]
fn on_simulated_gpus() {
    let device = Device::simulated(GpuArch::Sm90a);
    let schedule = Schedule { warp_specialize: Some(true), overlap: Some(true), ..Schedule::default() };
    let tiles = |q_tile, num_warps, num_stages| Tiles { schedule, ..Tiles::new(q_tile, 128, num_warps, num_stages) };
    let large = [
        (64, Tiles { replicas: 3, persistent: true, ..tiles(64, 4, 2) }),
        (128, tiles(128, 8, 3)),
        (128, Tiles { replicas: 2, persistent: true, ..tiles(64, 4, 3) }),
    ];
    for (d, tiles) in large {
        let options = Options { forward_tiles: Some(tiles), ..Options::default() };
        check_8_bit(&device, case(200, 300, d).heads(1, 2, 1).causal(), Scales::PerBlock, &options);
        check_8_bit(&device, case(140, 390, d), Scales::PerBlock, &options);
    }
    for arch in [GpuArch::Sm80, GpuArch::Sm89, GpuArch::Sm90a] {
        let device = Device::simulated(arch);
        for d in [64, 128] {
            check_8_bit(&device, case(70, 300, d).causal(), Scales::PerBlock, &Options::default());
        }
        check_8_bit(&device, case(70, 140, 32), Scales::None, &Options::default());
    }
}

/// A block's largest element becomes the largest number of the type; the error of others is at most half a unit of it.
#[test]
fn quantized_tensors() {
    let device = Device::cpu();
    let shape @ [batch, heads, rows, d] = [2, 3, 200, 24];
    let at = |i: usize| (i / d % rows, i / d / rows);
    // Each block has its own magnitude; one is all zeros.
    let magnitude = |i: usize| if at(i).0 >= 128 && at(i).1 == 1 { 0.0 } else { (at(i).1 + 1) as f32 * 3.7 };
    let x: Vec<bf16> = (0..batch * heads * rows * d)
        .map(|i| bf16::from_f32((i as f32 * 0.37).sin() * magnitude(i) * if at(i).0 < 128 { 1.0 } else { 1e-3 }))
        .collect();
    let x = Buffer::from_slice(&device, &x).unwrap();
    let quantized = quantize::<bf16, F8E4M3>(&device, x.tensor(shape).unwrap()).unwrap();
    let (values, descale) = (quantized.values.to_vec().unwrap(), quantized.descale.to_vec().unwrap());
    let x = x.to_vec().unwrap();
    for head in 0..batch * heads {
        for block in 0..2 {
            let of_block = |i: &usize| at(*i).1 == head && at(*i).0 / 128 == block;
            let largest = (0..x.len()).filter(of_block).map(|i| x[i].to_f32().abs()).fold(0.0, f32::max);
            let scale = descale[head * 2 + block];
            let want = largest / 448.0;
            assert!((scale - want).abs() <= 1e-6 * want, "head {head}, block {block}: {scale}, expected {want}");
            for i in (0..x.len()).filter(of_block) {
                let (found, x) = (values[i].to_f32() * scale, x[i].to_f32());
                // Numbers of 4 bits; those below 2⁻⁶ are multiples of 2⁻⁹.
                let half_unit = (x.abs() / 16.0).max(scale * 2f32.powi(-10));
                assert!((found - x).abs() <= half_unit * 1.001, "{i}: {found}, expected {x}");
            }
        }
    }
    let largest = quantize::<f32, F8E5M2>(
        &device,
        Buffer::from_slice(&device, &[2.0f32, -7.0]).unwrap().tensor([1, 1, 1, 2]).unwrap(),
    );
    let largest = largest.unwrap();
    assert_eq!(largest.values.to_vec().unwrap()[1].to_f32(), -57344.0);
    let none = Buffer::<f32>::zeros(&device, 0).unwrap();
    assert!(quantize::<f32, F8E4M3>(&device, none.tensor([1, 0, 5, 4]).unwrap()).unwrap().values.is_empty());
}

/// Scales of 0 are those of zeros, wherever they are; negative ones, of which the largest score is not known, give NaN. Large and
/// small ones of one head neither overflow nor hide what is large.
#[test]
fn unusual_scales() {
    let device = Device::cpu();
    let shape = [1, 1, 400, 16];
    let bytes: Vec<F8E4M3> = (0..400 * 16).map(|i| F8E4M3::from_f32(((i * 37 % 101) as f32 / 25.0) - 2.0)).collect();
    let x = Buffer::from_slice(&device, &bytes).unwrap();
    let numbers: Vec<f64> = bytes.iter().map(|x| f64::from(x.to_f32())).collect();
    let run = |k: [f32; 4], v: [f32; 4]| {
        let [q, of_k, of_v] = [[0.1; 4], k, v].map(|scales| Buffer::from_slice(&device, &scales).unwrap());
        let [q, of_k, of_v] = [&q, &of_k, &of_v].map(|scales| scales.tensor([1, 1, 4]).unwrap());
        let descale = Some(Descale { q: Some(q), k: of_k, v: of_v });
        let x = x.tensor(shape).unwrap();
        let (o, _) = forward(&device, x, x, x, &Options { descale, ..small_tiles() }).unwrap();
        let scaled =
            |scales: [f32; 4]| numbers.iter().enumerate().map(move |(i, x)| x * f64::from(scales[i / 16 / 128]));
        let problem = case(400, 400, 16).problem;
        let want = reference::forward(
            &problem,
            &scaled([0.1; 4]).collect::<Vec<_>>(),
            &scaled(k).collect::<Vec<_>>(),
            &scaled(v).collect::<Vec<_>>(),
        )
        .0;
        let found: Vec<f64> = o.to_vec().unwrap().into_iter().map(f64::from).collect();
        (relative_error(&found, &want), found)
    };
    for v in [
        [0.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 2.0],
        [1e30, 1e-30, 0.0, 1e30],
        [1e-30, 1e20, 1e-38, 1e-3],
        [1e-40, 1e-30, 1e-30, 1e-30],
    ] {
        let (error, _) = run([1.0, 0.0, 0.5, 2.0], v);
        assert!(error < 0.06, "{v:?}: {error}");
    }
    let (_, zeros) = run([0.0; 4], [0.0; 4]);
    assert!(zeros.iter().all(|x| *x == 0.0));
    for (k, v) in [([1.0, -1.0, 1.0, 1.0], [1.0; 4]), ([1.0; 4], [1.0, 1.0, -1.0, 1.0])] {
        assert!(run(k, v).1.iter().all(|x| x.is_nan()), "{k:?} {v:?}");
    }
}

/// A sink that is much larger than the scores of keys takes most of the weight: what is left to the keys keeps its bits.
#[test]
fn large_sinks() {
    let device = Device::cpu();
    let (n_k, d) = (600, 16);
    let bytes: Vec<F8E4M3> = (0..n_k * d).map(|i| F8E4M3::from_f32(((i * 37 % 101) as f32 / 50.0) - 0.5)).collect();
    let x = Buffer::from_slice(&device, &bytes).unwrap();
    let x = x.tensor([1, 1, n_k, d]).unwrap();
    let plain = |options: &Options| {
        let (o, lse) = forward(&device, x, x, x, options).unwrap();
        (o.to_vec().unwrap(), lse.to_vec().unwrap())
    };
    let (o, lse) = plain(&small_tiles());
    for (sink, num_splits) in [(8.0f32, None), (20.0, None), (60.0, None), (20.0, Some(2)), (-20.0, None)] {
        let sinks = Buffer::from_slice(&device, &[sink]).unwrap();
        let options = Options { sinks: Some(sinks.view()), num_splits, ..small_tiles() };
        let (found, found_lse) = plain(&options);
        for row in 0..n_k {
            // The weight of the keys: 1 / (1 + e^(sink − L)).
            let left = 1.0 / (1.0 + f64::from(sink - lse[row]).exp());
            let want_lse = f64::from(lse[row]) - left.ln();
            assert!(
                (f64::from(found_lse[row]) / want_lse - 1.0).abs() < 1e-4,
                "sink {sink}: {} {want_lse}",
                found_lse[row]
            );
            for i in row * d..(row + 1) * d {
                let want = left * f64::from(o[i]);
                // Splits round P relative to their own maxima.
                let error = (f64::from(found[i]) - want).abs() / (left * 0.5);
                assert!(error < if num_splits.is_some() { 0.1 } else { 0.02 }, "sink {sink}: {} {want}", found[i]);
            }
        }
    }
}

/// As the kernels of a stream of one's own, which the device's waits for.
#[test]
fn another_stream() {
    let device = Device::cpu();
    let options = Options { stream: Some(device.new_stream().unwrap()), ..small_tiles() };
    check_8_bit(&device, case(40, 70, 16), Scales::PerBlock, &options);
}

#[test]
fn mistakes_say_what_is_expected() {
    let device = Device::cpu();
    let bytes = Buffer::<F8E4M3>::zeros(&device, 1 << 12).unwrap();
    let numbers = Buffer::<f32>::zeros(&device, 64).unwrap();
    let shape = [2, 2, 8, 16];
    let message = |q: [usize; 3], k: [usize; 3], v: [usize; 3]| {
        let scales = |shape| numbers.tensor(shape).unwrap();
        let descale = Some(Descale { q: Some(scales(q)), k: scales(k), v: scales(v) });
        let x = bytes.tensor(shape).unwrap();
        let options = Options { descale, ..Options::default() };
        forward(&device, x, x, x, &options).err().map(|e| e.to_string())
    };
    let one = [2, 2, 1];
    assert_eq!(message(one, one, one), None);
    let error = message([2, 3, 1], one, one).unwrap();
    assert!(error.contains("`q_descale` expects scales of 2 batch entries × 2 heads × 1 blocks"), "{error}");
    let error = message(one, [2, 2, 2], one).unwrap();
    assert!(error.contains("`k_descale` expects"), "{error}");
    let error = message(one, one, [1, 2, 1]).unwrap();
    assert!(error.contains("`v_descale` expects"), "{error}");
    let x = bytes.tensor(shape).unwrap();
    let lengths = Buffer::<i32>::zeros(&device, 2).unwrap();
    let options = Options { cache: Some(Cache::new(lengths.view())), ..Options::default() };
    let error = forward(&device, x, x, x, &options).err().unwrap().to_string();
    assert!(error.contains("`q` expects elements of f16, bf16 or f32 beside a cache, found f8e4m3"), "{error}");
    let scales = numbers.tensor(one).unwrap();
    let wide = Options {
        forward_tiles: Some(Tiles::new(256, 64, 1, 1)),
        descale: Some(Descale { q: None, k: scales, v: scales }),
        ..Options::default()
    };
    let error = forward(&device, x, x, x, &wide).err().unwrap().to_string();
    assert!(error.contains("tile sizes of at most 128, the rows of a scale, found 256 × 64"), "{error}");
    let wide = quantize::<f32, F8E4M3>(&device, numbers.tensor([1, 1, 0, 300]).unwrap()).err().unwrap().to_string();
    assert!(wide.contains("`x` expects a head dimension of 1 to 256"), "{wide}");
    let x = Buffer::<f32>::zeros(&device, 1 << 9).unwrap();
    let error = quantize::<f32, i8>(&device, x.tensor(shape).unwrap()).err().unwrap().to_string();
    assert!(error.contains("`y` expects elements of type f8e4m3 or f8e5m2, found i8"), "{error}");
}
