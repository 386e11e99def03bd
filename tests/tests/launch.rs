//! Kernels launched from their argument structs.

use tilewright::codegen::target::GpuArch;
use tilewright::prelude::*;
use tilewright_runtime::kernel::source_file;
use tilewright_tests::on_device::devices;

/// y = a · x + y
#[kernel]
pub fn axpy<T: Float>(x: In<T>, y: InOut<T>, a: f32, n: i32, #[constexpr = 64] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let sum = load(x + i, mask = mask).to::<f32>() * a + load(y + i, mask = mask).to::<f32>();
    store(y + i, sum.to::<T>(), mask = mask);
}

fn reference(x: &[f32], y: &[f32], a: f32) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| a * x + y).collect()
}

#[test]
fn a_kernel_runs_on_the_cpu() {
    let device = Device::cpu();
    let n = 1000usize;
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let y: Vec<f32> = (0..n).map(|i| (i % 7) as f32).collect();
    let x_buffer = Buffer::from_slice(&device, &x).unwrap();
    let mut y_buffer = Buffer::from_slice(&device, &y).unwrap();
    let mut launch = Axpy { x: &x_buffer, y: &mut y_buffer, a: 0.5, n: n as i32, tile: 64 };
    launch.launch(&device, n.div_ceil(64)).unwrap();
    assert_eq!(y_buffer.to_vec().unwrap(), reference(&x, &y, 0.5));
}

constexpr_enum! {
    pub enum Side { Left, Right }
}

/// out = the constants, as numbers.
#[kernel]
pub fn constants(
    out: Out<f32>,
    n: i32,
    #[constexpr] tile: usize,
    #[constexpr = -3] shift: i32,
    #[constexpr = 2] factor: f32,
    #[constexpr = Right] side: Side,
    #[constexpr = tf32] precision: Precision,
    #[constexpr(default = true)] flag: bool,
) {
    let i = arange(0, tile);
    let right = match side {
        Side::Left => 0.0,
        Side::Right => 1.0,
    };
    let exact = if precision == Precision::Tf32 { 0.5 } else { 0.0 };
    let on = if flag { 100.0 } else { 0.0 };
    store(out + i, (i + shift).to::<f32>() * factor + right + exact + on, mask = i < n);
}

#[test]
fn constants_with_defaults_may_be_left_out() {
    for device in devices() {
        let mut out = Buffer::<f32>::zeros(&device, 2).unwrap();
        ConstantsRequired { out: &mut out, n: 2, tile: 2 }.with_defaults().launch(&device, 1).unwrap();
        assert_eq!(out.to_vec().unwrap(), [95.5, 97.5]);
        let required = ConstantsRequired { out: &mut out, n: 2, tile: 2 };
        Constants { factor: 1.0, side: Side::Left, ..required.with_defaults() }.launch(&device, 1).unwrap();
        assert_eq!(out.to_vec().unwrap(), [97.5, 98.5]);
    }
}

#[test]
fn views_and_other_types_are_separate_variants() {
    for device in devices() {
        let x: Vec<bf16> = (0..100).map(|i| bf16::from_f32(i as f32)).collect();
        let x_buffer = Buffer::from_slice(&device, &x).unwrap();
        let mut y_buffer = Buffer::<bf16>::zeros(&device, 100).unwrap();
        // Not aligned: starts at element 1.
        let x_view = x_buffer.slice(1..).unwrap();
        let mut y_view = y_buffer.slice_mut(1..).unwrap();
        Axpy { x: &x_view, y: &mut y_view, a: 2.0, n: 99, tile: 32 }.launch(&device, (4, 1)).unwrap();
        let expected: Vec<bf16> = x.iter().map(|x| bf16::from_f32(2.0 * x.to_f32())).collect();
        assert_eq!(y_buffer.to_vec().unwrap(), expected);
    }
}

#[test]
fn memory_of_another_device_is_refused_by_name() {
    let (device, other) = (Device::cpu(), Device::simulated(GpuArch::Sm80));
    let x = Buffer::<f32>::zeros(&device, 4).unwrap();
    let mut y = Buffer::<f32>::zeros(&other, 4).unwrap();
    let message = Axpy { x: &x, y: &mut y, a: 1.0, n: 4, tile: 64 }.launch(&device, 1).unwrap_err().to_string();
    assert!(message.contains(&format!("`y` expects memory on {device}, found memory on {other}")), "{message}");
}

#[test]
fn the_erased_launch_checks_types() {
    use tilewright::codegen::ir::DType;
    use tilewright::codegen::lang::kernel::ConstValue;
    use tilewright::kernel::{KernelArg, launch_erased};
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0]).unwrap();
    let mut y = Buffer::from_slice(&device, &[10.0f32, 20.0, 30.0]).unwrap();
    let config = LaunchConfig::new(1);
    let mut args = [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(2.0f32), KernelArg::scalar(3i32)];
    launch_erased(&AXPY, &device, &config, &[DType::F32], &mut args, &[("tile", ConstValue::Int(16))]).unwrap();
    let message = launch_erased(&AXPY, &device, &config, &[DType::F16], &mut args, &[]).unwrap_err().to_string();
    assert!(message.contains("`x` expects memory of f16 to read, found memory of f32"), "{message}");
    let message = launch_erased(&AXPY, &device, &config, &[DType::F32], &mut args[..3], &[]).unwrap_err().to_string();
    assert!(message.contains("takes 4 arguments: found 3"), "{message}");
    assert_eq!(y.to_vec().unwrap(), [12.0, 24.0, 36.0]);
}

/// What a message shows of a line: the line, or only its file on a GPU machine, which has no sources.
fn shown(line: &str) -> &str {
    if source_file(file!()).is_some() { line } else { "tests/launch.rs" }
}

#[kernel]
fn broken(x: In<f32>, y: Out<f32>) {
    store(y + arange(0, 8), load(x + arange(0, 16)));
}

#[test]
fn mistakes_show_the_source_line() {
    let device = Device::cpu();
    let x = Buffer::<f32>::zeros(&device, 16).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 16).unwrap();
    let message = Broken { x: &x, y: &mut y }.launch(&device, 1).unwrap_err().to_string();
    assert!(message.contains(shown("store(y + arange(0, 8), load(x + arange(0, 16)));")), "{message}");
    let message = Broken { x: &x, y: &mut y }.launch(&device, -1).unwrap_err().to_string();
    assert!(message.contains("the grid's x extent is -1"), "{message}");
}

#[test]
fn invalid_num_warps_is_rejected() {
    for device in devices() {
        let x = Buffer::<f32>::zeros(&device, 64).unwrap();
        let mut y = Buffer::<f32>::zeros(&device, 64).unwrap();
        let mut launch = |config: LaunchConfig| {
            Axpy { x: &x, y: &mut y, a: 1.0, n: 64, tile: 64 }.launch_with(&device, &config).map_err(|e| e.to_string())
        };
        for warps in [0, 7, 64] {
            let message = launch(LaunchConfig::new(1).num_warps(warps)).unwrap_err();
            assert!(
                message.contains(&format!("num_warps is {warps}: expected a power of two from 1 to 32")),
                "{message}"
            );
            assert!(message.contains("tests/launch.rs"), "{message}");
        }
        for warps in [1, 32] {
            launch(LaunchConfig::new(1).num_warps(warps)).unwrap();
        }
        assert!(launch(LaunchConfig::new(1).max_registers(256)).unwrap_err().contains("max_registers is 256"));
    }
}

#[test]
fn out_of_bounds_launches_are_rejected() {
    let device = Device::cpu();
    let x = Buffer::<f32>::zeros(&device, 1000).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 900).unwrap();
    let refused = |x: &Buffer<f32>, y: &mut Buffer<f32>, n: i32, grid: i32| {
        Axpy { x, y, a: 1.0, n, tile: 64 }.launch(&device, grid).unwrap_err().to_string()
    };
    let message = refused(&x, &mut y, 1000, 100);
    for part in ["kernel `axpy`", "`y` has 900 elements", "tests/launch.rs:13", "may reach element 999", "help: "] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    // The bound follows from the grid, whatever n is.
    assert!(refused(&x, &mut y, i32::MAX, 15).contains("element 959"));
    for (n, grid) in [(900, 100), (i32::MAX, 14), (-5, 100), (0, 100), (i32::MAX, 0)] {
        Axpy { x: &x, y: &mut y, a: 1.0, n, tile: 64 }.launch(&device, grid).unwrap();
    }
    // A slice of a buffer has its own bounds.
    let part = x.slice(..100).unwrap();
    let message = Axpy { x: &part, y: &mut y, a: 1.0, n: 101, tile: 64 }.launch(&device, 2).unwrap_err().to_string();
    assert!(message.contains("`x` has 100 elements"), "{message}");
}

/// y[i] = table[index[i]]
#[kernel]
fn gather(table: In<f32>, index: In<i32>, y: Out<f32>, n: i32, #[constexpr = 0] entries: usize) {
    let i = arange(0, 16);
    let at = load(index + i, mask = i < n);
    let inside = if entries > 0 { at >= 0 && at < entries } else { i < n };
    store(y + i, load(table + at, mask = inside && i < n, other = -1.0), mask = i < n);
}

#[test]
fn data_dependent_addresses_need_a_mask_or_unchecked() {
    let device = Device::cpu();
    let table = Buffer::from_slice(&device, &[10.0f32, 20.0, 30.0]).unwrap();
    let index = Buffer::from_slice(&device, &[2, 0, 7, -1]).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 4).unwrap();
    let mut gather = |index: &Buffer<i32>, entries: usize, config: &LaunchConfig| {
        Gather { table: &table, index, y: &mut y, n: 4, entries }.launch_with(&device, config)?;
        y.to_vec()
    };
    let config = LaunchConfig::new(1);
    assert_eq!(gather(&index, 3, &config).unwrap(), [30.0, 10.0, -1.0, -1.0]);
    let message = gather(&index, 4, &config).unwrap_err().to_string();
    assert!(message.contains("`table` has 3 elements") && message.contains("element 3"), "{message}");
    let message = gather(&index, 0, &config).unwrap_err().to_string();
    for part in ["cannot prove before the launch", "`table`, which has 3 elements", "mask", "unchecked"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    let inside = Buffer::from_slice(&device, &[2, 0, 1, 2]).unwrap();
    // SAFETY: all indices are below 3.
    let config = unsafe { config.unchecked() };
    assert_eq!(gather(&inside, 0, &config).unwrap(), [30.0, 10.0, 20.0, 30.0]);
}

/// The low bits of an index from memory, and bits above them, are bounded.
#[kernel]
fn masked_bits(table: In<f32>, index: In<i32>, y: Out<f32>) {
    let i = arange(0, 4);
    let at = load(index + i);
    store(y + i, load(table + (at & 7)) + load(table + ((at & 63) >> 3)));
}

#[test]
fn bits_of_an_index_are_bounded() {
    let device = Device::cpu();
    let values: Vec<f32> = (0..8).map(|n| n as f32).collect();
    let index = [-1, 77, 8, i32::MIN];
    let at = Buffer::from_slice(&device, &index).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 4).unwrap();
    let table = Buffer::from_slice(&device, &values).unwrap();
    MaskedBits { table: &table, index: &at, y: &mut y }.launch(&device, 1).unwrap();
    let want = index.map(|n| ((n & 7) + ((n & 63) >> 3)) as f32);
    assert_eq!(y.to_vec().unwrap(), want);
    let short = Buffer::from_slice(&device, &values[..7]).unwrap();
    let refused = MaskedBits { table: &short, index: &at, y: &mut y }.launch(&device, 1).unwrap_err().to_string();
    assert!(
        refused.contains("`table` has 7 elements") || refused.contains("`table`, which has 7 elements"),
        "{refused}"
    );
}

/// y[i] = table[index[i]], with one of two bounds of the index.
#[kernel]
fn half_bounded(table: In<f32>, index: In<i32>, y: Out<f32>, n: i32, #[constexpr] lower: bool) {
    let i = arange(0, 4);
    let at = load(index + i);
    let inside = if lower { at >= 0 } else { at < n };
    store(y + i, load(table + at, mask = inside, other = 0.0));
}

#[test]
fn the_missing_bound_of_an_index_is_named_below_its_line() {
    let device = Device::cpu();
    let table = Buffer::from_slice(&device, &[10.0f32, 20.0, 30.0]).unwrap();
    let index = Buffer::from_slice(&device, &[2, 0, 1, 1]).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 4).unwrap();
    for (lower, missing, mask) in [
        (true, "nothing bounds its index from above", "`mask = index < n && …`"),
        (false, "nothing bounds its index from below", "`mask = index >= 0 && …`"),
    ] {
        let launched = HalfBounded { table: &table, index: &index, y: &mut y, n: 3, lower }.launch(&device, 1);
        let message = launched.unwrap_err().to_string();
        let line = shown("store(y + i, load(table + at, mask = inside, other = 0.0));");
        for part in ["kernel `half_bounded`", "`table`, which has 3 elements", line, missing, mask] {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    }
}

#[kernel]
fn tiny(y: Out<i32>, n: i32) {
    store(y, n);
}

/// Measures the overhead of a launch that compiles nothing, so that it stays small. The bound is loose, since test
/// machines are busy.
#[test]
fn a_second_launch_is_cheap() {
    let device = Device::cpu();
    let mut y = Buffer::<i32>::zeros(&device, 1).unwrap();
    let mut kernel = Tiny { y: &mut y, n: 3 };
    kernel.launch(&device, 1).unwrap();
    let start = std::time::Instant::now();
    let iterations = 2000;
    for _ in 0..iterations {
        kernel.compile(&device, &LaunchConfig::new(1)).unwrap();
    }
    let each = start.elapsed() / iterations;
    assert!(each.as_micros() < 100, "{each:?} for each lookup");
    println!("lookup of a compiled variant: {each:?}");
}

#[test]
fn a_kernel_compiles_ahead_of_time() {
    use tilewright::codegen::ir::DType;
    use tilewright::codegen::lang::kernel::Specialization;
    use tilewright::codegen::target::{Code, CompileOptions, GpuArch, Target};
    let target = Target::Nvptx(GpuArch::Sm90a);
    let spec = Specialization::aligned_memory(&AXPY);
    let artifact =
        tilewright::kernel::compile(&AXPY, &[DType::BF16], &[], &spec, &target, &CompileOptions::default()).unwrap();
    let names: Vec<&str> = artifact.manifest.args.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(names, ["x", "y", "a", "n"]);
    assert_eq!(artifact.manifest.args[0].divisible_by, 16);
    let Code::Ptx(ptx) = artifact.code else { panic!("expected PTX") };
    assert!(ptx.contains(".entry axpy"), "{ptx}");
}

/// c = a · b, as in Triton's tutorial: grouped program order, rows and columns modulo the sizes, advanced pointers, and
/// a remainder mask along k. `mask_form` selects the form of the mask; `mask_slack` is added to its bound.
#[kernel]
fn pointer_matmul(
    a: In<f32>,
    b: In<f32>,
    c: Out<f32>,
    m: i32,
    n: i32,
    k: i32,
    stride_am: i32,
    stride_ak: i32,
    stride_bk: i32,
    stride_bn: i32,
    mask_slack: i32,
    #[constexpr] mask_form: usize,
    #[constexpr = 16] block_m: usize,
    #[constexpr = 8] block_n: usize,
    #[constexpr = 4] block_k: usize,
    #[constexpr = 2] group: usize,
) {
    let pid = program_id(0);
    let tiles_m = cdiv(m, block_m);
    let tiles_n = cdiv(n, block_n);
    let in_group = tiles_n * group;
    let first_m = pid / in_group * group;
    let group_m = minimum(tiles_m - first_m, group);
    let pid_m = first_m + pid % in_group % group_m;
    let pid_n = pid % in_group / group_m;
    let offs_am = (pid_m * block_m + arange(0, block_m)) % m;
    let offs_bn = (pid_n * block_n + arange(0, block_n)) % n;
    let offs_k = arange(0, block_k);
    let mut a_ptrs = a + (offs_am.expand_dims(1) * stride_am + offs_k.expand_dims(0) * stride_ak);
    let mut b_ptrs = b + (offs_k.expand_dims(1) * stride_bk + offs_bn.expand_dims(0) * stride_bn);
    let mut acc = zeros::<f32>([block_m, block_n]);
    let mut rest = k + mask_slack;
    for kk in range(0, cdiv(k, block_k)) {
        let left = k - kk * block_k + mask_slack;
        if mask_form == 0 {
            let at = load(a_ptrs, mask = offs_k.expand_dims(0) < left, other = 0.0);
            let bt = load(b_ptrs, mask = offs_k.expand_dims(1) < left, other = 0.0);
            acc = dot(at, bt, acc);
        } else if mask_form == 1 {
            let at = load(a_ptrs, mask = rest > offs_k.expand_dims(0), other = 0.0);
            let bt = load(b_ptrs, mask = rest > offs_k.expand_dims(1), other = 0.0);
            acc = dot(at, bt, acc);
        } else if mask_form == 2 {
            let at = load(a_ptrs, mask = kk * block_k + offs_k.expand_dims(0) < k + mask_slack, other = 0.0);
            let bt = load(b_ptrs, mask = kk * block_k + offs_k.expand_dims(1) < k + mask_slack, other = 0.0);
            acc = dot(at, bt, acc);
        } else {
            acc = dot(load(a_ptrs), load(b_ptrs), acc);
        }
        a_ptrs += block_k * stride_ak;
        b_ptrs += block_k * stride_bk;
        rest -= block_k;
    }
    let offs_cm = pid_m * block_m + arange(0, block_m);
    let offs_cn = pid_n * block_n + arange(0, block_n);
    let c_ptrs = c + (offs_cm.expand_dims(1) * n + offs_cn.expand_dims(0));
    store(c_ptrs, acc, mask = offs_cm.expand_dims(1) < m && offs_cn.expand_dims(0) < n);
}

/// Sizes of c [m, n] = a [m, k] · b [k, n].
#[derive(Clone, Copy, Debug)]
struct GemmShape {
    m: usize,
    n: usize,
    k: usize,
}

/// The shape of most launches: no size is a multiple of a tile size.
const UNEVEN_SHAPE: GemmShape = GemmShape { m: 33, n: 19, k: 10 };

/// Launches the kernel on integers in f32, with buffers of exactly the operands' size, row-major or (`col_major`)
/// column-major; returns the result and the expected one.
fn launch_pointer_matmul(
    GemmShape { m, n, k }: GemmShape,
    col_major: bool,
    mask_form: usize,
    mask_slack: i32,
) -> tilewright::Result<(Vec<f32>, Vec<f32>)> {
    let device = Device::cpu();
    let a: Vec<f32> = (0..m * k).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
    let b: Vec<f32> = (0..k * n).map(|i| (i * 5 % 13) as f32 - 6.0).collect();
    let strides = |rows: usize, columns: usize| if col_major { [1, rows as i32] } else { [columns as i32, 1] };
    let ([stride_am, stride_ak], [stride_bk, stride_bn]) = (strides(m, k), strides(k, n));
    let at = |x: &[f32], strides: [i32; 2], i: usize, j: usize| x[i * strides[0] as usize + j * strides[1] as usize];
    let element = |i: usize, j: usize| -> f32 {
        (0..k).map(|l| at(&a, [stride_am, stride_ak], i, l) * at(&b, [stride_bk, stride_bn], l, j)).sum()
    };
    let expected = (0..m * n).map(|i| element(i / n, i % n)).collect();
    let (a, b) = (Buffer::from_slice(&device, &a)?, Buffer::from_slice(&device, &b)?);
    let mut c = Buffer::<f32>::poisoned(&device, m * n)?;
    let sizes = PointerMatmulRequired {
        a: &a,
        b: &b,
        c: &mut c,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        mask_slack,
        mask_form,
    };
    sizes.with_defaults().launch(&device, m.div_ceil(16) * n.div_ceil(8))?;
    Ok((c.to_vec()?, expected))
}

#[test]
fn advanced_pointers_with_a_remainder_mask_are_accepted() {
    let (small, large) = (GemmShape { m: 5, n: 3, k: 1 }, GemmShape { m: 16, n: 40, k: 12 });
    for (shape, col_major) in [(UNEVEN_SHAPE, false), (UNEVEN_SHAPE, true), (small, false), (large, true)] {
        for mask_form in 0..3 {
            let (got, expected) =
                launch_pointer_matmul(shape, col_major, mask_form, 0).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(got, expected, "{shape:?}, col_major: {col_major}, mask_form {mask_form}");
        }
    }
    // Without a remainder no mask is needed.
    let shape = GemmShape { k: 12, ..UNEVEN_SHAPE };
    let (got, expected) = launch_pointer_matmul(shape, false, 3, 0).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(got, expected);
}

#[test]
fn advanced_pointers_with_a_wrong_mask_are_rejected() {
    for (mask_form, mask_slack, element) in [(0, 1, 330), (1, 1, 330), (2, 1, 330), (0, 2, 331), (3, 0, 331)] {
        let message = launch_pointer_matmul(UNEVEN_SHAPE, false, mask_form, mask_slack).unwrap_err().to_string();
        for part in ["kernel `pointer_matmul`", "`a` has 330 elements", &format!("may reach element {element}\n")] {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    }
}

/// y = x + the row index, through block pointers.
#[kernel]
pub fn rows_and_numbers(x: In<f32>, y: Out<f32>, rows: i32, d: i64, stride: i64, #[constexpr] tile: usize) {
    assume(stride >= d);
    let first = program_id(0) * tile;
    let block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [multiple_of(stride, 4), 1],
        offsets = [first, 0],
        block_shape = [tile, tile],
        order = [1, 0],
    );
    let out = make_block_ptr(
        y,
        shape = [rows, d],
        strides = [stride, 1],
        offsets = [first, 0],
        block_shape = [tile, tile],
        order = [1, 0],
    );
    let number = (first + arange(0, tile)).expand_dims(1).to::<f32>();
    store(out, load(block, boundary_check = [0, 1], padding = zero) + number, boundary_check = [0, 1]);
}

#[test]
fn launches_check_the_assumptions_of_a_kernel() {
    for device in devices() {
        let x = Buffer::<f32>::zeros(&device, 12 * 20).unwrap();
        let mut y = Buffer::<f32>::zeros(&device, 12 * 20).unwrap();
        let mut launch = |rows: i32, d: i64, stride: i64| {
            RowsAndNumbers { x: &x, y: &mut y, rows, d, stride, tile: 16 }.launch(&device, 1).map_err(|e| e.to_string())
        };
        launch(12, 16, 20).unwrap();
        launch(0, 16, 20).unwrap();
        for ((rows, d, stride), parts) in [
            ((-1, 16, 20), ["`rows` is -1", "extent of dimension 0", "expected 0 or more", "launch.rs:"]),
            ((i32::MIN, 16, 20), ["`rows` is -2147483648", "extent of dimension 0", "help: ", "launch.rs:"]),
            ((12, i64::MIN, 20), ["`d` is -9223372036854775808", "extent of dimension 1", "help: ", "launch.rs:"]),
            (
                (12, 16, 12),
                [
                    "an assumption at",
                    "of `assume`, 12 >= 16, is false; it depends on `d`, `stride`",
                    "help: ",
                    "launch.rs:",
                ],
            ),
            (
                (12, 16, 18),
                ["kernel `rows_and_numbers`", "`multiple_of` must be a multiple of 4", "help: ", "launch.rs:"],
            ),
        ] {
            let message = launch(rows, d, stride).unwrap_err();
            for part in parts {
                assert!(message.contains(part), "`{part}` is missing in: {message}");
            }
        }
        assert_eq!(y.to_vec().unwrap()[20 * 11..20 * 11 + 16], [11.0; 16]);
    }
}

/// Counts the iterations of loops whose bounds are arguments, or are loaded from memory.
#[kernel]
pub fn loops_from_memory(n: In<i32>, y: Out<i32>, first: i32, last: i32, step: i32) {
    let mut count = scalar::<i32>(0);
    for _ in range(first, last, step) {
        count += 1;
    }
    for i in range(load(n), load(n + 1), 1 << 20) {
        count += 1000 + i * 0;
    }
    store(y, count);
}

#[test]
fn loop_bounds_are_checked() {
    let device = Device::cpu();
    let mut y = Buffer::<i32>::zeros(&device, 1).unwrap();
    let mut launch = |bounds: [i32; 2], first: i32, last: i32, step: i32| {
        let n = Buffer::from_slice(&device, &bounds).unwrap();
        let outcome = LoopsFromMemory { n: &n, y: &mut y, first, last, step }.launch(&device, 1);
        outcome.map(|()| y.to_vec().unwrap()[0]).map_err(|e| e.to_string())
    };
    assert_eq!(launch([0, 3 << 20], 0, 10, 3), Ok(3004));
    // The index does not wrap around.
    assert_eq!(launch([i32::MAX - (1 << 25), i32::MAX], 0, 0, 1), Ok(16_000));
    for (first, last, step, part) in [
        (0, 10, 0, "the step of a loop must be positive: it is 0"),
        (0, 10, -1, "the step of a loop must be positive: it is -1"),
        (10, 0, -1, "the step of a loop must be positive: it is -1"),
        (0, i32::MAX, 1 << 20, "its index would overflow"),
    ] {
        let message = launch([0, 0], first, last, step).unwrap_err();
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}

/// Stores where the largest element was found, and through offsets that were reshaped and gathered.
#[kernel]
fn found_positions(x: In<f32>, counts: InOut<i32>, out: Out<i32>) {
    let i = arange(0, 64);
    let v = load(x + i);
    let best = argmax(v, axis = 0);
    store(counts + best, 1);
    let square = i.reshape([8, 8]);
    store(out + square, square);
    let (low, high) = split(i.reshape([32, 2]));
    store(out + 64 + gather(low, arange(0, 8), axis = 0), 1);
    store(out + 64 + max(high, axis = 0), 2);
}

#[test]
fn positions_within_a_tile_are_in_bounds() {
    let device = Device::cpu();
    let x: Vec<f32> = (0..64).map(|i| ((i * 37) % 64) as f32).collect();
    let at = Buffer::from_slice(&device, &x).unwrap();
    let (mut counts, mut out) =
        (Buffer::<i32>::zeros(&device, 64).unwrap(), Buffer::<i32>::zeros(&device, 128).unwrap());
    FoundPositions { x: &at, counts: &mut counts, out: &mut out }.launch(&device, 1).unwrap();
    let best = x.iter().position(|&v| v == 63.0).unwrap();
    assert_eq!(counts.to_vec().unwrap().iter().position(|&n| n == 1), Some(best));
    let out = out.to_vec().unwrap();
    assert_eq!(out[..64], (0..64).collect::<Vec<i32>>());
    assert_eq!((out[64], out[78], out[127]), (1, 1, 2));
    // One element less, and the launch is refused.
    let mut short = Buffer::<i32>::zeros(&device, 63).unwrap();
    let mut out = Buffer::<i32>::zeros(&device, 128).unwrap();
    let error = FoundPositions { x: &at, counts: &mut short, out: &mut out }.launch(&device, 1).unwrap_err();
    assert!(error.to_string().contains("63"), "{error}");
}
