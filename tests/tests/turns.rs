//! Programs that share a block and load different tiles in turn (`range(program_id(0), …, replicas = R)`), in a user's
//! kernel on the simulated GPU: results, and why programs cannot take turns.

use tilewright::prelude::*;
use tilewright_codegen::ir::Op;
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::{consts, notes};

const TILE: usize = 64;

/// Row tile i of c [rows, 64] is Σ_j a_ij · b_ij + `extra`² · a_i0 · b_i0 for the tiles a_ij of a [rows, width], where b_ij
/// is row tile (i + j) mod `width / 64` of b [width, 64]: two loops, one of them in another one. `form` is what differs: 1,
/// each tile has as many steps as its index; 2, the loads are at a number that the loop carries; 3, there are loads in an
/// `if`; 4, the step is 1; 5, a branch before the loop moves the rows; 6, a branch in the loop gives the row, from before it.
#[kernel(grid = blocks as usize * replicas)]
fn row_tiles(
    a: Tensor<f16, (rows, width)>,
    b: Tensor<f16, (width, columns)>,
    c: TensorMut<f32, (rows, columns)>,
    blocks: i32,
    extra: i32,
    #[constexpr] replicas: usize,
    #[constexpr = 0] form: usize,
    #[constexpr = false] wide: bool,
) {
    let steps = width / 64;
    let (first, end, each) = (program_id(0), cdiv(rows, 64), num_programs(0));
    let (own, mut carried, mut shift) = (first * 64, first, scalar::<i32>(0));
    if form == 5 {
        if first >= 3 {
            shift = scalar::<i32>(64);
        }
    }
    let compute = |i: Scalar<i32>, at: Scalar<i32>| {
        let mut row = at * 64 + shift;
        if form == 6 {
            if i == first {
                row = own;
            }
        }
        let mut acc = zeros::<f32>([64, 64]);
        let own_steps = if form == 1 { i } else { steps };
        for j in range(0, own_steps) {
            let left = load(a.block([row, j * 64], [64, 64]), boundary_check = [0], padding = zero);
            let right = load(b.block([(i + j) % steps * 64, 0], [64, 64]));
            acc = dot(left, right, acc = acc);
        }
        if form == 3 {
            if i % 2 == 0 {
                for _j in range(0, steps) {
                    let left = load(a.block([row, 0], [64, 64]), boundary_check = [0], padding = zero);
                    acc = dot(left, load(b.block([i % steps * 64, 0], [64, 64])), acc = acc);
                }
            }
        } else {
            for _j in range(0, extra) {
                for _l in range(0, extra) {
                    let left = load(a.block([row, 0], [64, 64]), boundary_check = [0], padding = zero);
                    acc = dot(left, load(b.block([i % steps * 64, 0], [64, 64])), acc = acc);
                }
            }
        }
        store(c.block([row, 0], [64, 64]), acc, boundary_check = [0]);
    };
    if wide {
        for i in range(first.to::<i64>(), end.to::<i64>(), each.to::<i64>(), replicas = replicas) {
            compute(i.to::<i32>(), i.to::<i32>());
        }
    } else {
        let step = if form == 4 { scalar::<i32>(1) } else { each };
        for i in range(first, end, step, replicas = replicas) {
            if form == 2 {
                compute(i, carried);
                carried = carried + each;
            } else {
                compute(i, i);
            }
        }
    }
}

fn wave(len: usize, f: f64) -> Vec<f16> {
    (0..len).map(|i| f16::from_f64((i as f64 * f).sin())).collect()
}

/// An element of c in f64.
fn want(a: &[f16], b: &[f16], width: usize, extra: usize, row: usize, n: usize) -> f64 {
    let (i, steps) = (row / TILE, width / TILE);
    let product = |j: usize| -> f64 {
        let at = (i + j) % steps * TILE;
        (0..TILE).map(|k| a[row * width + j * TILE + k].to_f64() * b[(at + k) * TILE + n].to_f64()).sum()
    };
    (0..steps).map(product).sum::<f64>() + (extra * extra) as f64 * product(0)
}

#[test]
fn programs_take_turns() {
    for (rows, steps, blocks, replicas, stages, extra, form, wide) in [
        (5 * TILE, 3, 1, 2, 2, 1, 0, false),
        (9 * TILE - 20, 2, 2, 2, 3, 2, 0, true),
        (7 * TILE, 1, 1, 3, 2, 1, 6, false),
        (4 * TILE, 4, 3, 2, 1, 0, 0, false),
        (TILE, 2, 2, 2, 4, 1, 6, false),
    ] {
        let width = steps * TILE;
        let (a, b) = (wave(rows * width, 0.7), wave(width * TILE, 0.3));
        let device = Device::simulated(GpuArch::Sm90a);
        let [a_buffer, b_buffer] = [&a, &b].map(|data| Buffer::from_slice(&device, data).unwrap());
        let mut c = Buffer::<f32>::poisoned(&device, rows * TILE).unwrap();
        let config = LaunchConfig::default().num_warps(4).num_stages(stages).warp_specialize(true);
        RowTiles {
            a: &a_buffer.tensor([rows, width]).unwrap(),
            b: &b_buffer.tensor([width, TILE]).unwrap(),
            c: &mut c.tensor_mut([rows, TILE]).unwrap(),
            blocks,
            extra: extra as i32,
            replicas,
            form,
            wide,
        }
        .launch_with(&device, &config)
        .unwrap();
        for (at, got) in c.to_vec().unwrap().into_iter().enumerate() {
            let want = want(&a, &b, width, extra, at / TILE, at % TILE);
            let case = format!("{rows} rows, {steps} steps, {blocks} blocks of {replicas}: element {at}");
            assert!((f64::from(got) - want).abs() < 1e-2, "{case} is {got}, expected {want}");
        }
    }
}

/// The ops and the notes of a kernel with two programs of a block.
fn compiled(def: &'static KernelDef, form: usize, num_warps: u32) -> (bool, String) {
    let func = def.record(&[], consts! { replicas = 2usize, form = form }, &well_aligned(def)).unwrap();
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps, schedule, ..Default::default() };
    let (ir, notes) = notes::gpu_ir(&func, GpuArch::Sm90a, &options);
    (ir.walk().into_iter().any(|id| ir.op(id).op == Op::PingpongWait), notes.join("\n"))
}

#[test]
fn programs_that_cannot_take_turns_are_explained() {
    assert_eq!(compiled(RowTiles::DEF, 0, 4), (true, String::new()));
    for (form, num_warps, why) in [
        (1, 4, "has other bounds in each iteration"),
        (2, 4, "it carries values that addresses depend on"),
        (3, 4, "only loops may be around them"),
        (4, 4, "its step is not num_programs(0)"),
        (5, 4, "depends on program_id(0) by a branch or another loop"),
        (0, 8, "each of 2 replicas has one warpgroup"),
    ] {
        let (turns, notes) = compiled(RowTiles::DEF, form, num_warps);
        assert!(!turns && notes.contains(why) && (form == 0 || notes.contains("turns.rs:")), "{form}: {notes}");
    }
}
