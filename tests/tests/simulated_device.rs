//! `Device::simulated` as a test tool for users: their kernels run on it, and errors name the source line.

use tilewright::kernels::matmul::Options;
use tilewright::prelude::*;
use tilewright_tests::on_device::{
    ColumnMajor, DENSE, GAPS, check_cross_entropy, check_matmul, check_matmul_swiglu, check_scaled_matmul,
};

const ARCHS: [GpuArch; 4] = [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm89, GpuArch::Sm90a];

/// y = softmax(x · w), one program per block of rows.
#[kernel]
fn scores(x: In<f16>, w: In<f16>, y: Out<f32>, rows: i32, #[constexpr] tile: usize, #[constexpr] d: usize) {
    let first = program_id(0) * tile;
    let x_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [d, 1],
        offsets = [first, 0],
        block_shape = [tile, d],
        order = [1, 0],
    );
    let w_block =
        make_block_ptr(w, shape = [d, d], strides = [d, 1], offsets = [0, 0], block_shape = [d, d], order = [1, 0]);
    let s = dot(load(x_block, boundary_check = [0], padding = zero), load(w_block));
    let e = exp(s - max(s, axis = 1, keep_dims = true));
    let y_block = make_block_ptr(
        y,
        shape = [rows, d],
        strides = [d, 1],
        offsets = [first, 0],
        block_shape = [tile, d],
        order = [1, 0],
    );
    store(y_block, e / sum(e, axis = 1, keep_dims = true), boundary_check = [0]);
}

#[test]
fn kernels_match_the_reference() {
    let (rows, d, tile) = (100usize, 32usize, 64usize);
    let wave = |len: usize, f: f32| -> Vec<f16> { (0..len).map(|i| f16::from_f32((i as f32 * f).sin())).collect() };
    let (x, w) = (wave(rows * d, 0.7), wave(d * d, 0.3));
    let mut want = Vec::new();
    for row in x.chunks(d) {
        let s: Vec<f64> =
            (0..d).map(|j| row.iter().enumerate().map(|(k, x)| x.to_f64() * w[k * d + j].to_f64()).sum()).collect();
        let total: f64 = s.iter().map(|s| s.exp()).sum();
        want.extend(s.iter().map(|s| s.exp() / total));
    }
    for arch in ARCHS {
        for seed in [1, 2] {
            let device = Device::simulated_with_seed(arch, seed);
            let (x, w) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &w).unwrap());
            let mut y = Buffer::<f32>::poisoned(&device, rows * d).unwrap();
            let mut kernel = Scores { x: &x, w: &w, y: &mut y, rows: rows as i32, tile, d };
            kernel.launch(&device, rows.div_ceil(tile)).unwrap();
            for (i, (got, want)) in y.to_vec().unwrap().into_iter().zip(&want).enumerate() {
                assert!((f64::from(got) - want).abs() < 1e-5, "{arch:?}: element {i} is {got}, expected {want}");
            }
        }
    }
    assert_eq!(Device::simulated(GpuArch::Sm90a).to_string(), "a simulated sm_90a GPU");
    assert_ne!(Device::simulated(GpuArch::Sm80), Device::simulated(GpuArch::Sm80), "each has its own memory");
}

/// Products of 8-bit matrices by the matrix instructions of each architecture.
/// Results of the operands' type and in f32, also added to c.
#[test]
fn matmul_of_either_order() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let gpu = Device::simulated(arch);
        for columns in [ColumnMajor::default(), ColumnMajor { a: true, b: true, c: false }] {
            check_matmul::<bf16>(&gpu, [72, 48, 40], DENSE, columns, Options::default());
        }
    }
}

/// The gradient overwrites logits that other threads read before: the simulator reports races.
#[test]
fn cross_entropy_in_place() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let gpu = Device::simulated(arch);
        for shape in [[5, 37], [3, 4100]] {
            check_cross_entropy::<bf16>(&gpu, shape, DENSE);
        }
    }
}

/// Two sums of one operand in each program.
#[test]
fn matmul_swiglu_of_either_order() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let gpu = Device::simulated(arch);
        for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
            check_matmul_swiglu::<bf16>(&gpu, [72, 48, 40], DENSE, columns);
            check_matmul_swiglu::<bf16>(&gpu, [200, 160, 128], DENSE, columns);
        }
    }
}

#[test]
fn scaled_matmul_of_either_order() {
    for arch in [GpuArch::Sm80, GpuArch::Sm89, GpuArch::Sm90a] {
        let device = Device::simulated(arch);
        for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
            for (shape, spacing) in [([128, 128, 256], DENSE), ([33, 20, 70], GAPS)] {
                check_scaled_matmul::<F8E4M3, bf16>(&device, shape, spacing, columns, 0.0);
                check_scaled_matmul::<i8, i32>(&device, shape, spacing, columns, 0.0);
            }
        }
    }
}

/// Every program writes its index to the same address: a race.
#[kernel]
fn last_one_wins(y: Out<i32>) {
    store(y + 0, program_id(0));
}

/// Writes out of bounds if `n` is too large.
#[kernel]
fn fill(y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, zeros::<f32>([tile]), mask = i < n);
}

/// Waits for a flag that is never set.
#[kernel]
fn waits(flag: InOut<i32>) {
    let mut seen = atomic_add(flag + 0, 0);
    while seen == 0 {
        seen = atomic_add(flag + 0, 0);
    }
}

/// Writes from four elements before `y` on.
#[kernel]
fn begins_before(x: In<i32>, y: Out<i32>) {
    let i = arange(0, 4);
    store(y + i - 4, load(x + i));
}

#[kernel]
fn asserts(x: In<i32>, y: Out<i32>) {
    let v = load(x + 0);
    device_assert(v > 0, "v is positive");
    store(y + 0, v);
}

#[test]
fn errors_name_the_source_line() {
    let this_file = file!().rsplit('/').next().unwrap();
    let expect = |error: tilewright::Error, parts: &[&str]| {
        let message = error.to_string();
        for part in parts {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    };
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let device = Device::simulated(arch);
        let mut y = Buffer::<i32>::zeros(&device, 4).unwrap();
        // SAFETY: the simulated GPU checks every access.
        let unchecked = |grid: u32| unsafe { LaunchConfig::new(grid).unchecked() };
        expect(LastOneWins { y: &mut y }.launch_with(&device, &unchecked(3)).unwrap_err(), &["race", this_file]);
        LastOneWins { y: &mut y }.launch(&device, 1).unwrap();

        let mut z = Buffer::<f32>::zeros(&device, 100).unwrap();
        Fill { y: &mut z, n: 100, tile: 64 }.launch(&device, 2).unwrap();
        expect(
            Fill { y: &mut z, n: 101, tile: 64 }.launch_with(&device, &unchecked(2)).unwrap_err(),
            &["offset 400 of argument `y`, which has 400 bytes", this_file],
        );
        let mut flag = Buffer::<i32>::zeros(&device, 1).unwrap();
        expect(Waits { flag: &mut flag }.launch(&device, 2).unwrap_err(), &["simulated GPU"]);
        let x = Buffer::from_slice(&device, &[1, 2, 3, 4]).unwrap();
        expect(
            BeginsBefore { x: &x, y: &mut y }.launch_with(&device, &unchecked(1)).unwrap_err(),
            &["of argument `y`, which has 16 bytes", this_file],
        );
        let x = Buffer::from_slice(&device, &[-1]).unwrap();
        expect(Asserts { x: &x, y: &mut y }.launch(&device, 1).unwrap_err(), &["assert"]);
    }
}

#[test]
fn simulated_gpus_do_not_share_memory() {
    let (one, other) = (Device::simulated(GpuArch::Sm80), Device::simulated(GpuArch::Sm80));
    let mut y = Buffer::<i32>::zeros(&one, 4).unwrap();
    assert!(LastOneWins { y: &mut y }.launch(&other, 1).is_err());
}

/// Inline PTX that the simulated GPU supports, with a rounding mode in the instruction.
#[kernel]
fn rounds_to_zero(x: In<f32>, y: Out<f32>) {
    let i = arange(0, 32);
    let v = load(x + i);
    store(y + i, inline_asm_elementwise::<f32>(asm = "mul.rz.f32 $0, $1, $1;", constraints = "=f,f", args = (v,)));
}

#[kernel]
fn votes(x: In<i32>, y: Out<i32>) {
    let i = arange(0, 32);
    let v = load(x + i);
    let asm = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xFFFFFFFF; }";
    store(y + i, inline_asm_elementwise::<i32>(asm = asm, constraints = "=r,r", args = (v,)));
}

#[kernel]
fn waits_in_assembly(x: In<i32>, y: Out<i32>) {
    let i = arange(0, 32);
    let v = load(x + i);
    store(y + i, inline_asm_elementwise::<i32>(asm = "bar.sync 0; mov.b32 $0, $1;", constraints = "=r,r", args = (v,)));
}

#[test]
fn inline_assembly_runs_or_is_reported_with_its_line() {
    let this_file = file!().rsplit('/').next().unwrap();
    for arch in ARCHS {
        let device = Device::simulated(arch);
        let x: Vec<f32> = (0..32).map(|i| 1.0 + (i as f32).sqrt() / 7.0).collect();
        let buffer = Buffer::from_slice(&device, &x).unwrap();
        let mut y = Buffer::<f32>::zeros(&device, 32).unwrap();
        RoundsToZero { x: &buffer, y: &mut y }.launch(&device, 1).unwrap();
        for (x, y) in x.iter().zip(y.to_vec().unwrap()) {
            // The largest f32 that is not above the exact square, which f64 holds.
            let exact = f64::from(*x) * f64::from(*x);
            assert!(f64::from(y) <= exact && exact < f64::from(y.next_up()), "{x}² = {exact}, found {y}");
        }

        let x = Buffer::from_slice(&device, &[1; 32]).unwrap();
        let mut y = Buffer::<i32>::zeros(&device, 32).unwrap();
        let votes = Votes { x: &x, y: &mut y }.launch(&device, 1).unwrap_err().to_string();
        let waits = WaitsInAssembly { x: &x, y: &mut y }.launch(&device, 1).unwrap_err().to_string();
        for (message, named) in [(votes, "vote.sync.ballot.b32"), (waits, "bar.sync 0")] {
            for part in [this_file, named, "the simulated GPU does not support", "setp", "run the kernel on a GPU"] {
                assert!(message.contains(part), "`{part}` is missing in: {message}");
            }
        }
    }
}

#[test]
fn dumps_contain_ir_and_ptx() {
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["errors_name_the_source_line", "--exact", "--nocapture"]);
    let ran = test.env("TILEWRIGHT_DUMP", "tile:last_one_wins,ptx:last_one_wins").output().unwrap();
    let output = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{output}");
    for part in
        ["// last_one_wins, tile", "kernel @last_one_wins(", "// last_one_wins, ptx", ".visible .entry last_one_wins("]
    {
        assert!(output.contains(part), "`{part}` is missing in: {output}");
    }
}
