//! Programs that share a block and the loads of a producer (`range(…, replicas = R)`), in a user's kernel on the simulated
//! GPU: results, launches that do not fit, and loads that cannot be shared.

use tilewright::prelude::*;
use tilewright_codegen::ir::{Op, OpData};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::{consts, notes};

const TILE: usize = 64;

/// c = a · Σ_j b_j: program i has rows 64 · i to 64 · i + 63 of a [rows, 64]; b has `tiles` tiles b_j [64, 64]. With
/// `own_tiles`, program i begins with tile i mod `tiles`.
#[kernel(grid = cdiv(rows, 64))]
fn rows_times_sum(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    #[constexpr] replicas: usize,
    #[constexpr = false] own_tiles: bool,
) {
    let first = program_id(0) * 64;
    let own = load(a.block([first, 0], [64, 64]), boundary_check = [0], padding = zero);
    let mut acc = zeros::<f32>([64, 64]);
    let tiles = keys / 64;
    for j in range(0, tiles, replicas = replicas) {
        let at = if own_tiles { (j + program_id(0)) % tiles } else { j };
        let tile = load(b.block([at * 64, 0], [64, 64]));
        acc = dot(own, tile, acc = acc);
    }
    store(c.block([first, 0], [64, 64]), acc, boundary_check = [0]);
}

/// c = Σ_h (a · b_h + k_h · b_h) for two heads h, where a and each k_h are loaded around the loops that use them: two
/// operands of one type, in two loops around each other.
#[kernel(grid = cdiv(rows, 64))]
fn operands_around_loops(
    a: Tensor<f16, (rows, width)>,
    k: Tensor<f16, (heads_rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    #[constexpr] heads: usize,
) {
    let first = program_id(0) * 64;
    let own = load(a.block([first, 0], [64, 64]), boundary_check = [0], padding = zero);
    let mut acc = zeros::<f32>([64, 64]);
    for h in range(0, heads) {
        let of_head = load(k.block([h * 64, 0], [64, 64]));
        for j in range(0, keys / 64) {
            let tile = load(b.block([j * 64, 0], [64, 64]));
            acc = dot(own, tile, acc = acc);
            acc = dot(of_head, tile, acc = acc);
        }
    }
    store(c.block([first, 0], [64, 64]), acc, boundary_check = [0]);
}

/// As [`rows_times_sum`], and program i adds i mod 2 products more, in a loop of its own.
#[kernel(grid = cdiv(rows, 64))]
fn uneven(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    #[constexpr] replicas: usize,
    #[constexpr] other: usize,
) {
    let first = program_id(0) * 64;
    let own = load(a.block([first, 0], [64, 64]), boundary_check = [0], padding = zero);
    let mut acc = zeros::<f32>([64, 64]);
    for j in range(0, keys / 64, replicas = replicas) {
        acc = dot(own, load(b.block([j * 64, 0], [64, 64])), acc = acc);
    }
    let again = load(b.block([0, 0], [64, 64]));
    for _j in range(0, program_id(0) % 2, replicas = other) {
        acc = dot(own, again, acc = acc);
    }
    store(c.block([first, 0], [64, 64]), acc, boundary_check = [0]);
}

/// c = a · Σ_j b_j + k_i · Σ_j b_j, where k_i is the tile of `k` that begins at the largest of 64 · 16
/// elements of `a`: only consumers know that.
#[kernel(grid = cdiv(rows, 64))]
fn operand_at_a_maximum(
    a: Tensor<f16, (rows, width)>,
    k: Tensor<f16, (heads_rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
) {
    let first = program_id(0) * 64;
    let own = load(a.block([first, 0], [64, 64]), boundary_check = [0], padding = zero);
    let sixteen = load(a.block([first, 0], [16, 64]), boundary_check = [0], padding = zero);
    let at = max(max(sixteen, axis = 1), axis = 0).to::<i32>();
    let found = load(k.block([at, 0], [64, 64]), boundary_check = [0], padding = zero);
    let mut acc = zeros::<f32>([64, 64]);
    for j in range(0, keys / 64) {
        let tile = load(b.block([j * 64, 0], [64, 64]));
        acc = dot(own, tile, acc = acc);
        acc = dot(found, tile, acc = acc);
    }
    store(c.block([first, 0], [64, 64]), acc, boundary_check = [0]);
}

fn wave(len: usize, f: f64) -> Vec<f16> {
    (0..len).map(|i| f16::from_f64((i as f64 * f).sin())).collect()
}

/// The product of rows of `a` and a [64, 64] matrix.
fn product(a: &[f16], matrix: &[f64], row: usize, n: usize) -> f64 {
    (0..TILE).map(|k| a[row * TILE + k].to_f64() * matrix[k * TILE + n]).sum()
}

/// The sum of the tiles of `b`.
fn sum_of_tiles(b: &[f16]) -> Vec<f64> {
    (0..TILE * TILE).map(|i| b.chunks(TILE * TILE).map(|tile| tile[i].to_f64()).sum()).collect()
}

fn options(pingpong: bool) -> LaunchConfig {
    LaunchConfig::default().num_warps(4).num_stages(2).warp_specialize(true).pingpong(pingpong)
}

#[test]
fn programs_of_a_block_share_loads() {
    for (rows, tiles, replicas, pingpong) in
        [(384, 3, 3, false), (350, 1, 2, true), (384, 2, 3, true), (256, 3, 4, false), (64, 2, 1, false)]
    {
        let keys = tiles * TILE;
        let (a, b) = (wave(rows * TILE, 0.7), wave(keys * TILE, 0.3));
        let sums = sum_of_tiles(&b);
        let device = Device::simulated(GpuArch::Sm90a);
        let (a_buffer, b_buffer) = (Buffer::from_slice(&device, &a).unwrap(), Buffer::from_slice(&device, &b).unwrap());
        let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
        let mut kernel = RowsTimesSum {
            a: &a_buffer.tensor([rows, TILE]).unwrap(),
            b: &b_buffer.tensor([keys, TILE]).unwrap(),
            c: &mut c.tensor_mut([rows, TILE]).unwrap(),
            replicas,
            own_tiles: false,
        };
        kernel.launch_with(&device, &options(pingpong)).unwrap();
        for (i, got) in c.to_vec().unwrap().into_iter().enumerate() {
            let (row, n) = (i / TILE, i % TILE);
            let want = product(&a, &sums, row, n);
            assert!((f64::from(got) - want).abs() < 1e-3, "replicas {replicas}: element {i} is {got}, expected {want}");
        }
    }
}

#[test]
fn operands_in_loops_around_each_other_have_buffers_of_their_own() {
    let (rows, tiles, heads) = (100, 3, 2);
    let (a, k, b) = (wave(rows * TILE, 0.7), wave(heads * TILE * TILE, 0.9), wave(tiles * TILE * TILE, 0.3));
    let device = Device::simulated(GpuArch::Sm90a);
    let [a_buffer, k_buffer, b_buffer] = [&a, &k, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
    let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
    let mut kernel = OperandsAroundLoops {
        a: &a_buffer.tensor([rows, TILE]).unwrap(),
        k: &k_buffer.tensor([heads * TILE, TILE]).unwrap(),
        b: &b_buffer.tensor([tiles * TILE, TILE]).unwrap(),
        c: &mut c.tensor_mut([rows, TILE]).unwrap(),
        heads,
    };
    kernel.launch_with(&device, &options(false)).unwrap();
    let sums = sum_of_tiles(&b);
    for (i, got) in c.to_vec().unwrap().into_iter().enumerate() {
        let (row, n) = (i / TILE, i % TILE);
        let of_heads = (0..heads).map(|h| product(&k[h * TILE * TILE..], &sums, row % TILE, n));
        let want = heads as f64 * product(&a, &sums, row, n) + of_heads.sum::<f64>();
        assert!((f64::from(got) - want).abs() < 1e-2, "element {i} is {got}, expected {want}");
    }
}

/// A load that only consumers can address stays with them, and the producer keeps the others.
#[test]
fn operands_that_consumers_address_leave_the_others_to_the_producer() {
    let (rows, tiles, at) = (100, 3, 5);
    let mut a = wave(rows * TILE, 0.7);
    for program in 0..rows.div_ceil(TILE) {
        a[program * TILE * TILE] = f16::from_f64(at as f64 + 0.5);
    }
    let (k, b) = (wave(2 * TILE * TILE, 0.9), wave(tiles * TILE * TILE, 0.3));
    let device = Device::simulated(GpuArch::Sm90a);
    let [a_buffer, k_buffer, b_buffer] = [&a, &k, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
    let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
    let mut kernel = OperandAtAMaximum {
        a: &a_buffer.tensor([rows, TILE]).unwrap(),
        k: &k_buffer.tensor([2 * TILE, TILE]).unwrap(),
        b: &b_buffer.tensor([tiles * TILE, TILE]).unwrap(),
        c: &mut c.tensor_mut([rows, TILE]).unwrap(),
    };
    kernel.launch_with(&device, &options(false)).unwrap();
    let sums = sum_of_tiles(&b);
    for (i, got) in c.to_vec().unwrap().into_iter().enumerate() {
        let (row, n) = (i / TILE, i % TILE);
        let want = product(&a, &sums, row, n) + product(&k[at * TILE..], &sums, row % TILE, n);
        assert!((f64::from(got) - want).abs() < 1e-2, "element {i} is {got}, expected {want}");
    }

    let func = OperandAtAMaximum::DEF.record(&[], &[], &well_aligned(OperandAtAMaximum::DEF)).unwrap();
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 4, schedule, ..Default::default() };
    let ir = notes::gpu_ir(&func, GpuArch::Sm90a, &options).0;
    let loads = |data: &&OpData| matches!(data.op, Op::TmaLoad { .. });
    assert_eq!(ir.walk().into_iter().map(|id| ir.op(id)).filter(loads).count(), 2, "the loads of a and b");
}

/// Ping-pong scheduling would wait forever in a loop that the programs of a block run differently often.
#[test]
fn programs_of_a_block_may_run_other_loops_differently_often() {
    let (rows, tiles) = (256, 2);
    let (a, b) = (wave(rows * TILE, 0.7), wave(tiles * TILE * TILE, 0.3));
    let device = Device::simulated(GpuArch::Sm90a);
    let [a_buffer, b_buffer] = [&a, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
    let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
    let mut kernel = Uneven {
        a: &a_buffer.tensor([rows, TILE]).unwrap(),
        b: &b_buffer.tensor([tiles * TILE, TILE]).unwrap(),
        c: &mut c.tensor_mut([rows, TILE]).unwrap(),
        replicas: 2,
        other: 1,
    };
    kernel.launch_with(&device, &options(true)).unwrap();
    let (sums, first) = (sum_of_tiles(&b), sum_of_tiles(&b[..TILE * TILE]));
    for (i, got) in c.to_vec().unwrap().into_iter().enumerate() {
        let (row, n) = (i / TILE, i % TILE);
        let more = (row / TILE % 2) as f64;
        let want = product(&a, &sums, row, n) + more * product(&a, &first, row, n);
        assert!((f64::from(got) - want).abs() < 1e-2, "element {i} is {got}, expected {want}");
    }
}

#[test]
fn a_grid_that_blocks_do_not_cover_is_refused() {
    let device = Device::simulated(GpuArch::Sm90a);
    let zeros = |rows: usize| Buffer::<f16>::zeros(&device, rows * TILE).unwrap();
    let (rows, keys) = (5 * TILE, TILE);
    let (a, b) = (zeros(rows), zeros(keys));
    let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
    let mut kernel = RowsTimesSum {
        a: &a.tensor([rows, TILE]).unwrap(),
        b: &b.tensor([keys, TILE]).unwrap(),
        c: &mut c.tensor_mut([rows, TILE]).unwrap(),
        replicas: 2,
        own_tiles: false,
    };
    let error = kernel.launch_with(&device, &options(false)).unwrap_err().to_string();
    for part in ["x extent is 5", "2 programs share a block", "round the grid up to a multiple of 2"] {
        assert!(error.contains(part), "{error}");
    }
    // Without warp specialization, each program has a block of its own.
    kernel.launch_with(&device, &options(false).warp_specialize(false)).unwrap();
}

/// A loop with hints that the compiler may not be able to follow.
#[kernel(grid = 1)]
fn hints(c: TensorMut<f32, (n,)>, #[constexpr] stages: u32, #[constexpr] unroll: u32, #[constexpr] replicas: u32) {
    let mut sum = scalar::<f32>(0.0);
    for _ in range(0, n, num_stages = stages, unroll = unroll, replicas = replicas) {
        sum = sum + 1.0;
    }
    store(c.block([0], [1]), broadcast_to(sum, [1]), boundary_check = [0]);
}

#[test]
fn hints_out_of_range_are_refused_where_they_are_given() {
    let record = |stages: u32, unroll: u32, replicas: u32| {
        let consts = consts! { stages = stages, unroll = unroll, replicas = replicas };
        Hints::DEF.record(&[], consts, &well_aligned(Hints::DEF)).map(|_| ()).map_err(|e| e.to_string())
    };
    for (stages, unroll, replicas) in [(1, 1, 1), (16, 256, 7)] {
        record(stages, unroll, replicas).unwrap();
    }
    for ((stages, unroll, replicas), wanted) in [
        ((0, 1, 1), ["`num_stages` of `range` is 0", "1 to 16"]),
        ((17, 1, 1), ["`num_stages` of `range` is 17", "1 to 16"]),
        ((1, 0, 1), ["`unroll` of `range` is 0", "1 to 256"]),
        ((1, 257, 1), ["`unroll` of `range` is 257", "1 to 256"]),
        ((1, 1, 0), ["`replicas` of `range` is 0", "1 to 7"]),
        ((1, 1, 8), ["`replicas` of `range` is 8", "1 to 7"]),
    ] {
        let error = record(stages, unroll, replicas).unwrap_err();
        assert!(wanted.iter().all(|part| error.contains(part)) && error.contains("replicas.rs:"), "{error}");
    }
}

/// What cannot be shared runs in blocks of its own, and a note says why.
#[test]
fn loads_that_differ_are_explained() {
    let notes_of = |def: &'static KernelDef, consts: &[(&str, ConstValue)], num_warps: u32| {
        let func = def.record(&[], consts, &well_aligned(def)).unwrap();
        let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
        let options = CompileOptions { num_warps, schedule, ..Default::default() };
        notes::gpu_ir(&func, GpuArch::Sm90a, &options).1.join("\n")
    };
    let note = |own_tiles: bool, num_warps: u32| {
        notes_of(RowsTimesSum::DEF, consts! { replicas = 2usize, own_tiles = own_tiles }, num_warps)
    };
    assert_eq!(note(false, 4), "");
    let why = note(true, 4);
    let line = "depends on program_id(0) in another way than by program_id(0) / 2";
    assert!(why.contains(line) && why.contains("replicas.rs:"), "{why}");
    assert!(note(false, 8).contains("num_warps is 8"), "{}", note(false, 8));
    let why = notes_of(Uneven::DEF, consts! { replicas = 2usize, other = 3usize }, 4);
    assert!(why.contains("replicas 2 and 3: give both the same number"), "{why}");
}
