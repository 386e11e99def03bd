//! Loops whose iterations the blocks of a launch take from a counter (`range(…, dynamic = counter)`), in a user's kernel: results
//! on the CPU and the simulated GPU, and what is refused.

use tilewright::prelude::*;
use tilewright_codegen::ir::Op;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::{consts, notes};

const TILE: usize = 64;

/// What differs between the forms of [`row_tiles`].
const PLAIN: usize = 0;
const OTHER_BOUNDS: usize = 1;
const READS_COUNTER: usize = 2;
const OTHER_ENDS: usize = 3;

/// c = a · Σ_j b_j for j up to the number of the tile of a, in tiles of 64 rows; b has tiles b_j of [64, 64].
#[kernel(grid = blocks as usize * replicas)]
fn row_tiles(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    taken: InOut<i32>,
    blocks: i32,
    #[constexpr] replicas: usize,
    #[constexpr = 0] form: usize,
) {
    let all = cdiv(rows, TILE * replicas);
    let (own, number) = (program_id(0) / replicas, num_programs(0) / replicas);
    let (first, step) = if form == OTHER_BOUNDS { (own * 2, number * 2) } else { (own, number) };
    let end = if form == OTHER_ENDS { minimum(all, own + 5) } else { all };
    for i in range(first, end, step, replicas = replicas, dynamic = taken) {
        let row = i * (TILE * replicas) + program_id(0) % replicas * TILE;
        let own = load(a.block([row, 0], [TILE, TILE]), boundary_check = [0], padding = zero);
        let mut acc = zeros::<f32>([TILE, TILE]);
        for j in range(0, minimum(i + 1, keys / TILE), replicas = replicas) {
            let tile = load(b.block([j * TILE, 0], [TILE, TILE]));
            acc = dot(own, tile, acc = acc);
        }
        if form == READS_COUNTER {
            acc = acc + load(taken).to::<f32>();
        }
        store(c.block([row, 0], [TILE, TILE]), acc, boundary_check = [0]);
    }
}

/// c = a · Σ_j b_j in tiles of 64 rows, and then the sums of the columns of b_0, for each of two programs.
#[kernel(grid = 2)]
fn sum_of_tiles(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    sums: Out<f32>,
    taken: InOut<i32>,
) {
    for i in range(program_id(0), cdiv(rows, TILE), num_programs(0), dynamic = taken) {
        let own = load(a.block([i * TILE, 0], [TILE, TILE]), boundary_check = [0], padding = zero);
        let mut acc = zeros::<f32>([TILE, TILE]);
        for j in range(0, keys / TILE) {
            acc = dot(own, load(b.block([j * TILE, 0], [TILE, TILE])), acc = acc);
        }
        store(c.block([i * TILE, 0], [TILE, TILE]), acc, boundary_check = [0]);
    }
    let at = arange(0, TILE).expand_dims(1) * TILE + arange(0, TILE).expand_dims(0);
    let columns = sum(load(b.ptr() + at).to::<f32>(), axis = 0);
    store(sums + program_id(0) * TILE + arange(0, TILE), columns);
}

/// c_i = 2 (a_i + a_1) · Σ_j b_j + a_0 · Σ_j b_j: a_1 is loaded in a loop around the inner one, a_0 between two loops.
#[kernel(grid = 2)]
fn nested(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (keys, width)>,
    c: TensorMut<f32, (rows, width)>,
    taken: InOut<i32>,
) {
    for i in range(program_id(0), cdiv(rows, TILE), num_programs(0), dynamic = taken) {
        let own = load(a.block([i * TILE, 0], [TILE, TILE]), boundary_check = [0], padding = zero);
        let mut acc = zeros::<f32>([TILE, TILE]);
        for h in range(0, 2) {
            let second = load(a.block([TILE * (h + 1 - h), 0], [TILE, TILE]));
            for j in range(0, keys / TILE) {
                let tile = load(b.block([j * TILE, 0], [TILE, TILE]));
                acc = dot(own, tile, acc = acc);
                acc = dot(second, tile, acc = acc);
            }
        }
        let first = load(a.block([0, 0], [TILE, TILE]));
        for j in range(0, keys / TILE) {
            acc = dot(first, load(b.block([j * TILE, 0], [TILE, TILE])), acc = acc);
        }
        store(c.block([i * TILE, 0], [TILE, TILE]), acc, boundary_check = [0]);
    }
}

/// Sums indices in an order that is not that of the loop.
#[kernel(grid = 1)]
fn carries(taken: InOut<i32>, sum: Out<i32>, n: i32) {
    let mut total = scalar::<i32>(0);
    for i in range(program_id(0), n, num_programs(0), dynamic = taken) {
        total = total + i;
    }
    store(sum, total);
}

#[kernel(grid = 1)]
fn reads_only(taken: In<i32>, sum: Out<i32>, n: i32) {
    for i in range(program_id(0), n, num_programs(0), dynamic = taken) {
        store(sum + i, i);
    }
}

#[kernel(grid = (1, rows as usize, 1))]
fn writes_indices(taken: InOut<i32>, list: Out<i32>, n: i32, rows: i32) {
    for i in range(program_id(0), n, num_programs(0), dynamic = taken) {
        store(list + i, i);
    }
}

fn wave(len: usize, f: f64) -> Vec<f16> {
    (0..len).map(|i| f16::from_f64((i as f64 * f).sin())).collect()
}

fn options(warp_specialize: bool) -> LaunchConfig {
    LaunchConfig::default().num_warps(4).num_stages(2).warp_specialize(warp_specialize)
}

/// Launches twice with one counter, and checks results and counter each time.
fn check(device: &Device, rows: usize, keys: usize, blocks: i32, replicas: usize, warp_specialize: bool) {
    let what = format!("{rows} rows, {keys} keys, {blocks} blocks of {replicas}, specialized: {warp_specialize}");
    let (a, b) = (wave(rows * TILE, 0.7), wave(keys * TILE, 0.3));
    let a_buffer = Buffer::from_slice(device, &a).unwrap();
    let b_buffer = Buffer::from_slice(device, &b).unwrap();
    let mut taken = Buffer::<i32>::zeros(device, 1).unwrap();
    for launch in 0..2 {
        let mut c = Buffer::<f32>::poisoned(device, rows * TILE).unwrap();
        let mut kernel = RowTiles {
            a: &a_buffer.tensor([rows, TILE]).unwrap(),
            b: &b_buffer.tensor([keys, TILE]).unwrap(),
            c: &mut c.tensor_mut([rows, TILE]).unwrap(),
            taken: &mut taken,
            blocks,
            replicas,
            form: PLAIN,
        };
        kernel.launch_with(device, &options(warp_specialize)).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (at, got) in c.to_vec().unwrap().into_iter().enumerate() {
            let (row, n) = (at / TILE, at % TILE);
            let tiles = (row / (TILE * replicas) + 1).min(keys / TILE);
            let want: f64 =
                (0..tiles * TILE).map(|k| a[row * TILE + k % TILE].to_f64() * b[k * TILE + n].to_f64()).sum();
            assert!((f64::from(got) - want).abs() < 1e-2, "{what}: element {at} is {got}, expected {want}");
        }
        assert_eq!(taken.to_vec().unwrap(), [0], "{what}: the counter after launch {launch}");
    }
}

#[test]
fn blocks_take_each_iteration_once() {
    for (rows, keys, blocks, replicas) in [
        (TILE * 5, TILE * 3, 2, 1),
        (TILE * 3 - 7, TILE * 2, 1, 1),
        (TILE * 2, TILE, 5, 1),
        (TILE * 7, TILE * 2, 2, 2),
        (TILE * 6, TILE * 4, 3, 3),
    ] {
        for seed in 0..3 {
            let device = Device::simulated_with_seed(GpuArch::Sm90a, seed);
            check(&device, rows, keys, blocks, replicas, true);
        }
        check(&Device::simulated(GpuArch::Sm80), rows, keys, blocks, replicas, false);
        check(&Device::cpu(), rows, keys, blocks, replicas, false);
    }
}

/// Without, the results would be those of the static order.
#[test]
fn the_counter_decides() {
    let consts = consts! { replicas = 2usize };
    for (def, consts) in [
        (RowTiles::DEF, consts),
        (RowTiles::DEF, consts! { replicas = 1usize }),
        (SumOfTiles::DEF, &[]),
        (Nested::DEF, &[]),
    ] {
        let (ir, notes) = gpu_ir(def, consts);
        let has = |op: Op| ir.walk().into_iter().any(|id| ir.op(id).op == op);
        assert!(has(Op::TakeIndex) && has(Op::TakenIndex) && !has(Op::DynamicIndex), "{}: {notes}", def.name);
        assert_eq!(notes, "");
    }
}

/// Memory of the loop is used again after it, while some warps still read the last index.
#[test]
fn what_follows_the_loop_waits_for_it() {
    let (rows, keys) = (TILE * 5, TILE * 2);
    let (a, b) = (wave(rows * TILE, 0.7), wave(keys * TILE, 0.3));
    for seed in 0..6 {
        let device = Device::simulated_with_seed(GpuArch::Sm90a, seed);
        let [a_buffer, b_buffer] = [&a, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
        let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
        let mut sums = Buffer::<f32>::poisoned(&device, 2 * TILE).unwrap();
        let mut taken = Buffer::<i32>::zeros(&device, 1).unwrap();
        let mut kernel = SumOfTiles {
            a: &a_buffer.tensor([rows, TILE]).unwrap(),
            b: &b_buffer.tensor([keys, TILE]).unwrap(),
            c: &mut c.tensor_mut([rows, TILE]).unwrap(),
            sums: &mut sums,
            taken: &mut taken,
        };
        kernel.launch_with(&device, &options(true)).unwrap();
        let all = b.iter().take(TILE * TILE).map(|x| x.to_f64());
        let columns: Vec<f64> = all.enumerate().fold(vec![0.0; TILE], |mut sums, (i, x)| {
            sums[i % TILE] += x;
            sums
        });
        for (i, got) in sums.to_vec().unwrap().into_iter().enumerate() {
            assert!(
                (f64::from(got) - columns[i % TILE]).abs() < 1e-2,
                "sum {i} is {got}, expected {}",
                columns[i % TILE]
            );
        }
    }
}

/// Loads around the inner loops, before and between them, and loops around these.
#[test]
fn loads_around_and_between_loops_are_issued_once() {
    let (rows, keys) = (TILE * 3, TILE * 2);
    let (a, b) = (wave(rows * TILE, 0.7), wave(keys * TILE, 0.3));
    let sum = |tile: usize| -> Vec<f64> { b[tile * TILE * TILE..][..TILE * TILE].iter().map(|x| x.to_f64()).collect() };
    let both: Vec<f64> = sum(0).into_iter().zip(sum(1)).map(|(x, y)| x + y).collect();
    for seed in 0..3 {
        let device = Device::simulated_with_seed(GpuArch::Sm90a, seed);
        let [a_buffer, b_buffer] = [&a, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
        let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
        let mut taken = Buffer::<i32>::zeros(&device, 1).unwrap();
        let mut kernel = Nested {
            a: &a_buffer.tensor([rows, TILE]).unwrap(),
            b: &b_buffer.tensor([keys, TILE]).unwrap(),
            c: &mut c.tensor_mut([rows, TILE]).unwrap(),
            taken: &mut taken,
        };
        kernel.launch_with(&device, &options(true)).unwrap();
        for (at, got) in c.to_vec().unwrap().into_iter().enumerate() {
            let (row, n) = (at / TILE, at % TILE);
            let of = |matrix: &[f64], row: usize| -> f64 {
                (0..TILE).map(|k| a[row * TILE + k].to_f64() * matrix[k * TILE + n]).sum()
            };
            // Twice around the inner loop, then the first tile of a in a loop of its own.
            let want = 2.0 * of(&both, row) + 2.0 * of(&both, row % TILE + TILE) + of(&both, row % TILE);
            assert!((f64::from(got) - want).abs() < 3e-2, "element {at} is {got}, expected {want}");
        }
    }
}

fn gpu_ir(def: &'static KernelDef, consts: &[(&str, ConstValue)]) -> (tilewright_codegen::ir::Func, String) {
    let func = def.record(&[], consts, &well_aligned(def)).unwrap();
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 4, schedule, ..Default::default() };
    let (ir, notes) = notes::gpu_ir(&func, GpuArch::Sm90a, &options);
    (ir, notes.join("\n"))
}

/// Loops that cannot be dynamic run in their static order, and a note says why.
#[test]
fn what_stays_static_is_explained() {
    let note = |form: usize| gpu_ir(RowTiles::DEF, consts! { replicas = 1usize, form = form }).1;
    let why = note(OTHER_BOUNDS);
    assert!(why.contains("is not dynamic: it is not `range(program_id(0), …, num_programs(0))`"), "{why}");
    assert!(why.contains("dynamic.rs:"), "{why}");
    assert!(note(OTHER_ENDS).contains("its end may differ between programs"), "{}", note(OTHER_ENDS));
    assert!(note(READS_COUNTER).contains("the `load` at"), "{}", note(READS_COUNTER));
    let why = gpu_ir(WritesIndices::DEF, &[]).1;
    assert!(why.contains("is not dynamic: no producer loads for it"), "{why}");
}

#[test]
fn loops_that_depend_on_their_order_are_refused() {
    let refused = |def: &'static KernelDef| def.record(&[], &[], &well_aligned(def)).unwrap_err().to_string();
    let error = refused(Carries::DEF);
    assert!(error.contains("a `dynamic` loop carries no values") && error.contains("dynamic.rs:"), "{error}");
    let error = refused(ReadsOnly::DEF);
    assert!(error.contains("`dynamic` to memory declared as `In<…>`"), "{error}");
}

/// The counter counts for all programs, and is one element.
#[test]
fn launches_that_do_not_fit_the_counter_are_refused() {
    let device = Device::simulated(GpuArch::Sm90a);
    let mut list = Buffer::<i32>::zeros(&device, 4).unwrap();
    let mut launch = |counters: usize, rows: i32| {
        let mut taken = Buffer::<i32>::zeros(&device, counters).unwrap();
        WritesIndices { taken: &mut taken, list: &mut list, n: 4, rows }.launch(&device)
    };
    launch(1, 1).unwrap();
    let error = launch(0, 1).unwrap_err().to_string();
    assert!(error.contains("taken"), "{error}");
    let error = launch(1, 2).unwrap_err().to_string();
    assert!(error.contains("assum"), "{error}");
    assert_eq!(list.to_vec().unwrap(), [0, 1, 2, 3]);
}
