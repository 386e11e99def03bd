//! Parameters of kernels that are tuples, texts, or memory that a launch may leave out.

use tilewright::codegen::target::CompileOptions;
use tilewright::kernels::Tensor;
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

#[kernel]
fn powers(
    x: InOut<i32>,
    #[constexpr] shape: (usize, usize),
    strides: (i64, i64),
    /// A number, and how often it multiplies.
    m_n: (i32, i32),
) {
    let rows = arange(0, shape.0).expand_dims(1) * strides.0;
    let p = x + rows + arange(0, shape.1).expand_dims(0) * strides.1;
    let mut data = load(p);
    for _ in range(0, m_n.1) {
        data = m_n.0 * data;
    }
    store(p, data);
}

#[test]
fn tuples_of_numbers_and_constants_are_parameters() {
    let x: Vec<i32> = (0..64).collect();
    let want: Vec<i32> = x.iter().map(|x| 8 * x).collect();
    for device in devices() {
        let mut y = Buffer::from_slice(&device, &x).unwrap();
        Powers { x: &mut y, shape: (8, 8), strides: (8, 1), m_n: (2, 3) }.launch(&device, 1).unwrap();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

#[kernel]
fn nested(y: Out<i32>, x: ((i32,), (Const<i32>, InOut<f32>))) {
    // The constant shapes a tile.
    static_assert(x.1.0 == 2);
    store(y + arange(0, x.1.0), full([x.1.0], x.0.0));
    let (numbers, (_, memory)) = x;
    store(memory, load(memory) + numbers.0.to::<f32>());
}

#[test]
fn tuples_nest_and_have_constants_among_others() {
    let names: Vec<&str> = NESTED.params.iter().map(|p| p.name).collect();
    assert_eq!(names, ["y", "x_0_0", "x_1_0", "x_1_1"]);
    for device in devices() {
        let mut y = Buffer::<i32>::poisoned(&device, 2).unwrap();
        let mut z = Buffer::from_slice(&device, &[0.5f32]).unwrap();
        Nested { y: &mut y, x: ((7,), (2, &mut z)) }.launch(&device, 1).unwrap();
        assert_eq!((y.to_vec().unwrap(), z.to_vec().unwrap()), (vec![7, 7], vec![7.5]), "{device}");
        let error = Nested { y: &mut y, x: ((7,), (4, &mut z)) }.launch(&device, 1).unwrap_err().to_string();
        assert!(error.contains("static assertion") || error.contains("assert"), "{error}");
    }
}

/// The names of a tuple's members are those of a manifest: code that is compiled by them is that of a launch.
#[test]
fn members_of_tuples_are_given_by_name_ahead_of_time() {
    let ahead = Nested::compile_for(GpuArch::Sm90a).constant("x_1_0", 2).assume("x_0_0 % 16").compile().unwrap();
    let device = Device::simulated(GpuArch::Sm90a);
    let mut y = Buffer::<i32>::poisoned(&device, 2).unwrap();
    let mut z = Buffer::from_slice(&device, &[0.5f32]).unwrap();
    let mut launch = Nested { y: &mut y, x: ((16,), (2, &mut z)) };
    let compiled = launch.compile(&device, &LaunchConfig::new(1)).unwrap();
    let text = |ptx: &str| ptx.lines().filter(|line| !line.starts_with("//")).collect::<Vec<_>>().join("\n");
    let ptx = std::str::from_utf8(ahead.bytes()).unwrap();
    assert!(!text(ptx).is_empty());
    assert_eq!(compiled.manifest().args.len(), 3);
    assert_eq!(compiled.manifest().args[1].divisible_by, 16);
    assert_eq!(
        CompileOptions::default().num_warps * 32,
        compiled.manifest().threads,
        "the options of both are the default ones"
    );
}

#[kernel]
fn sum_of_blocks<T: Num>(
    out: Out<T>,
    payload: (Tensor<T, (m, n)>, Tensor<T, (m2, n2)>, i32),
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
) {
    let first = payload.2 * m_tile;
    let block0 = payload.0.descriptor([m_tile, n_tile]).load([first, n_tile]);
    let block1 = payload.1.descriptor([m_tile, n_tile]).load([first, 2 * n_tile]);
    let at = arange(0, m_tile).expand_dims(1) * n_tile + arange(0, n_tile).expand_dims(0);
    store(out + at, block0 + block1);
}

#[test]
fn tensors_are_in_tuples() {
    let (m_tile, n_tile, block) = (8usize, 16usize, 2usize);
    let (m, n) = (m_tile * 4, n_tile * 4);
    let numbers = |len: usize, step: usize| (0..len).map(|i| (i * step % 32) as f32).collect::<Vec<f32>>();
    let (a, b) = (numbers(m * n, 7), numbers(2 * m * (n + 16), 11));
    let mut want = Vec::new();
    for i in block * m_tile..(block + 1) * m_tile {
        want.extend((0..n_tile).map(|j| a[i * n + n_tile + j] + b[i * (n + 16) + 2 * n_tile + j]));
    }
    for device in devices() {
        let mut out = Buffer::<f32>::poisoned(&device, m_tile * n_tile).unwrap();
        let (a, b) = (Buffer::from_slice(&device, &a).unwrap(), Buffer::from_slice(&device, &b).unwrap());
        let (a, b) = (a.tensor([m, n]).unwrap(), b.tensor([2 * m, n + 16]).unwrap());
        SumOfBlocks { out: &mut out, payload: (&a, &b, block as i32), m_tile, n_tile }.launch(&device, 1).unwrap();
        assert_eq!(out.to_vec().unwrap(), want, "{device}");
    }
}

/// y = x · scale + bias, and which columns are negative.
#[kernel(grid = rows)]
fn affine<T: Float>(
    x: Tensor<T, (rows, d)>,
    bias: Option<Tensor<T, (d,)>>,
    scale: Option<In<f32>>,
    y: TensorMut<f32, (rows, d)>,
    negative: Option<TensorMut<bool, (rows, d)>>,
    #[constexpr] tile: usize,
) {
    let row = program_id(0);
    let mut v = load(x.block([row, 0], [1, tile]), boundary_check = [1], padding = zero).to::<f32>();
    if let Some(scale) = scale {
        v *= load(scale);
    }
    let v = if let Some(bias) = bias {
        v + load(bias.block([0], [tile]), boundary_check = [0], padding = zero).to::<f32>().expand_dims(0)
    } else {
        v
    };
    store(y.block([row, 0], [1, tile]), v, boundary_check = [1]);
    if negative.is_some() {
        store(negative.unwrap().block([row, 0], [1, tile]), v < 0.0, boundary_check = [1]);
    }
}

#[test]
fn memory_may_be_left_out() {
    let (rows, d) = (3usize, 13usize);
    let x: Vec<f32> = (0..rows * d).map(|i| i as f32 - 17.0).collect();
    let bias: Vec<f32> = (0..d).map(|i| i as f32 * 0.5 - 2.0).collect();
    for device in devices() {
        let bx = Buffer::from_slice(&device, &x).unwrap();
        let (bx, bias_there) = (bx.tensor([rows, d]).unwrap(), Buffer::from_slice(&device, &bias).unwrap());
        let scale_there = Buffer::from_slice(&device, &[2.0f32]).unwrap();
        for case in 0..8 {
            let [has_bias, has_scale, has_negative] = [case & 1 != 0, case & 2 != 0, case & 4 != 0];
            let mut y = Buffer::<f32>::poisoned(&device, rows * d).unwrap();
            let mut negative = Buffer::<bool>::zeros(&device, rows * d).unwrap();
            let mut negative_there = negative.tensor_mut([rows, d]).unwrap();
            Affine {
                x: &bx,
                bias: has_bias.then_some(&bias_there as _),
                scale: has_scale.then_some(&scale_there as _),
                y: &mut y.tensor_mut([rows, d]).unwrap(),
                negative: if has_negative { Some(&mut negative_there) } else { None },
                tile: 16,
            }
            .launch(&device)
            .unwrap();
            let scaled = x.iter().map(|x| if has_scale { 2.0 * f64::from(*x) } else { f64::from(*x) });
            let want: Vec<f64> =
                scaled.enumerate().map(|(i, x)| if has_bias { x + f64::from(bias[i % d]) } else { x }).collect();
            let found: Vec<f64> = y.to_vec().unwrap().into_iter().map(f64::from).collect();
            assert_eq!(found, want, "{device}: {case}");
            let signs: Vec<bool> = want.iter().map(|v| has_negative && *v < 0.0).collect();
            assert_eq!(negative.to_vec().unwrap(), signs, "{device}: {case}");
        }
    }
}

/// An extent that does not match, of a tensor that may be left out.
#[test]
fn extents_of_optional_tensors_are_compared() {
    let device = Device::cpu();
    let x = Buffer::<f32>::zeros(&device, 8).unwrap();
    let bias = Buffer::<f32>::zeros(&device, 5).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 8).unwrap();
    let x: Tensor<f32, 2> = x.tensor([2, 4]).unwrap();
    let mut y = y.tensor_mut([2, 4]).unwrap();
    let mut launch = Affine { x: &x, bias: Some(&bias), scale: None, y: &mut y, negative: None, tile: 4 };
    let error = launch.launch(&device).unwrap_err().to_string();
    assert!(error.contains("d = 4") && error.contains("d = 5") && error.contains("`bias`"), "{error}");
}

#[kernel]
fn by_name(y: Out<f32>, x: f32, #[constexpr] mode: &'static str) {
    if mode == "square" {
        store(y, x * x);
    } else {
        static_assert(mode == "the number itself");
        store(y, x);
    }
}

#[test]
fn texts_are_constants() {
    for device in devices() {
        let mut y = Buffer::<f32>::poisoned(&device, 1).unwrap();
        for (mode, want) in [("square", 9.0), ("the number itself", 3.0)] {
            ByName { y: &mut y, x: 3.0, mode }.launch(&device, 1).unwrap();
            assert_eq!(y.to_vec().unwrap(), [want], "{device}: {mode}");
        }
        let error = ByName { y: &mut y, x: 3.0, mode: "cube" }.launch(&device, 1).unwrap_err().to_string();
        assert!(error.contains("assert"), "{error}");
    }
}

#[kernel]
fn chosen_by_flag(x: In<f32>, y: Out<f32>, flag: bool, #[no_specialize] other: bool) {
    let i = arange(0, 16);
    let v = load(x + i);
    let chosen = if flag { v } else { 2.0 };
    store(y + i, where_(other, chosen, chosen + 1.0));
}

#[test]
fn bools_are_parameters() {
    let x: Vec<f32> = (0..16).map(|n| n as f32).collect();
    for device in devices() {
        for (flag, other) in [(false, false), (false, true), (true, false), (true, true)] {
            let at = Buffer::from_slice(&device, &x).unwrap();
            let mut y = Buffer::<f32>::poisoned(&device, 16).unwrap();
            ChosenByFlag { x: &at, y: &mut y, flag, other }.launch(&device, 1).unwrap();
            let want: Vec<f32> =
                x.iter().map(|&x| if flag { x } else { 2.0 } + if other { 0.0 } else { 1.0 }).collect();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, {flag} {other}");
        }
    }
}
