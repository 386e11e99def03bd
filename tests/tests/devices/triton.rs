//! Forms of Triton's tests that no other test has, as native code, on simulated GPUs and on a GPU (`docs/triton.md`).

use tilewright::codegen::ir::{BinaryOp, Op, UnaryOp};
use tilewright::codegen::lang::kernel::{KernelDef, Specialization};
use tilewright::codegen::pipeline::compile;
use tilewright::codegen::target::{Code, CompileOptions, GpuArch, Target};
use tilewright::kernels::Tensor;
use tilewright::prelude::*;
use tilewright_tests::numerics::Random;
use tilewright_tests::on_device::{devices, outputs};
use tilewright_tests::{consts, ptxas};

fn gpus() -> Vec<Device> {
    devices().into_iter().filter(|device| device.is_simulated() || device.is_cuda()).collect()
}

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.number() as f32).collect()
}

#[kernel]
fn third_axis(y: Out<i32>) {
    store(y, program_id(3));
}

#[test]
fn an_axis_of_the_grid_is_0_1_or_2() {
    let error = THIRD_AXIS.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    assert!(error.contains("`program_id(3)`: a grid has the axes 0, 1 and 2"), "{error}");
}

#[kernel]
fn atomic_of_bytes(y: InOut<i8>) {
    atomic_add(y, scalar::<i8>(1));
}

#[test]
fn atomics_have_16_bits_and_more() {
    let error = ATOMIC_OF_BYTES.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    assert!(error.contains("i8") && error.contains("16"), "{error}");
}

#[kernel(grid = rows)]
fn copy_rows(x: Tensor<f32, (rows, d)>, y: TensorMut<f32, (rows, d)>, #[constexpr] d_tile: usize) {
    let at = [program_id(0), 0];
    let row = load(x.block(at, [1, d_tile]), boundary_check = [1], padding = zero);
    store(y.block(at, [1, d_tile]), row, boundary_check = [1]);
}

#[test]
fn strides_of_zero_repeat_elements() {
    let x = numbers(6, 1);
    for (strides, want) in [([0, 1], [0, 1, 2, 0, 1, 2]), ([2, 0], [0, 0, 0, 2, 2, 2]), ([0, 0], [0; 6])] {
        let found = outputs(devices(), 6, |device, y| {
            let x = Buffer::from_slice(device, &x)?;
            let x = Tensor::strided(x.view(), [2, 3], strides)?;
            CopyRows { x: &x, y: &mut y.tensor_mut([2, 3])?, d_tile: 4 }.launch(device)
        });
        for (device, y) in found {
            assert_eq!(y, want.map(|at: usize| x[at]), "{device}: {strides:?}");
        }
    }
}

#[kernel]
fn pairs(x: In<f32>, y: Out<f32>) {
    let (first, second) = split(load(x + arange(0, 2)));
    store(y, second.scalar());
    store(y + 1 + arange(0, 2), interleave(second.scalar(), first.scalar()));
    store(y + 3, load(x + arange(0, 1)).scalar() + 1.0);
    let limit = load(x + 2);
    store(y + 4 + arange(0, 4), clamp(load(x + 3 + arange(0, 4)), -limit, limit));
}

#[test]
fn scalars_come_from_tiles_and_clamps_may_be_symmetric() {
    let x = [3.0f32, 5.0, 1.5, -9.0, -1.0, 1.0, f32::INFINITY];
    let found = outputs(devices(), 8, |device, y| Pairs { x: &Buffer::from_slice(device, &x)?, y }.launch(device, 1));
    for (device, y) in found {
        assert_eq!(y, [5.0, 5.0, 3.0, 4.0, -1.5, -1.0, 1.0, 1.5], "{device}");
    }
}

#[kernel]
fn signs(x: In<f32>, y: Out<f32>, extrema: InOut<f32>) {
    let i = arange(0, 8);
    let v = load(x + i);
    store(y + i, -v);
    store(y + 8 + i, sqrt(abs(v)));
    atomic_max(extrema, 0.0);
    atomic_min(extrema + 1, scalar::<f32>(-0.0));
    atomic_max(extrema + 2, scalar::<f32>(-0.0));
    atomic_min(extrema + 3, 0.0);
}

/// Zeros keep their signs, and square roots are rounded to nearest.
#[test]
fn signs_of_zeros_and_square_roots() {
    let x = [0.0f32, -0.0, 2.0, -3.0, f32::MIN_POSITIVE, -1e-40, 1e30, 0.1];
    let root = |v: &f32| f64::from(v.abs()).sqrt() as f32;
    let want: Vec<u32> = x.iter().map(|v| -v).chain(x.iter().map(root)).map(f32::to_bits).collect();
    for device in devices() {
        let mut y = Buffer::<f32>::poisoned(&device, 16).unwrap();
        let mut extrema = Buffer::from_slice(&device, &[-0.0f32, 0.0, 0.0, -0.0]).unwrap();
        let x = Buffer::from_slice(&device, &x).unwrap();
        Signs { x: &x, y: &mut y, extrema: &mut extrema }.launch(&device, 1).unwrap();
        let bits = |buffer: &Buffer<f32>| buffer.to_vec().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&y), want, "{device}");
        // −0 is below 0.
        assert_eq!(bits(&extrema), [0.0f32, -0.0, 0.0, -0.0].map(f32::to_bits), "{device}");
    }
}

/// x·w without a dot, from two halves of x that are joined, and of tiles that are not loaded.
#[kernel]
fn products(x: In<f32>, w: In<f32>, y: Out<f32>) {
    let (i, j) = (arange(0, 16).expand_dims(1), arange(0, 16).expand_dims(0));
    let (xt, wt) = (load(x + (i * 16 + j)), load(w + (i * 16 + j)));
    let at = i * 16 + j;
    store(y + at, sum(xt.expand_dims(2) * wt.expand_dims(0), axis = 1));
    let half = arange(0, 8).expand_dims(0);
    let joined = join(load(x + (i * 16 + half * 2)), load(x + (i * 16 + half * 2 + 1))).reshape([16, 16]);
    store(y + 256 + at, dot(joined, wt));
    store(y + 512 + at, dot(full::<f32>([16, 16], 0.5), full::<f32>([16, 16], 3.0)));
    let halves = cat(load(x + (i * 16 + half)), load(x + (i * 16 + half + 8)), axis = 1);
    store(y + 768 + at, dot(halves, wt));
}

#[test]
fn products_by_broadcasting_and_of_joined_tiles() {
    let (x, w) = (numbers(256, 2), numbers(256, 3));
    let element = |at: usize| (0..16).map(|k| f64::from(x[at / 16 * 16 + k]) * f64::from(w[k * 16 + at % 16])).sum();
    let product: Vec<f64> = (0..256).map(element).collect();
    let want = [product.clone(), product.clone(), vec![24.0; 256], product].concat();
    let found = outputs(devices(), 1024, |device, y| {
        let (x, w) = (Buffer::from_slice(device, &x)?, Buffer::from_slice(device, &w)?);
        Products { x: &x, w: &w, y }.launch(device, 1)
    });
    for (device, y) in found {
        for (at, (found, want)) in y.iter().zip(&want).enumerate() {
            assert!((f64::from(*found) - want).abs() < 1e-5, "{device}: element {at} is {found}, expected {want}");
        }
    }
}

#[kernel]
fn swizzled(y: Out<i32>, #[constexpr] rows: usize, #[constexpr] columns: usize, #[constexpr] group: usize) {
    let (i, j) = (program_id(0), program_id(1));
    let (p, q) = swizzle2d(i, j, rows, columns, group);
    store(y + (p * columns + q), i * columns + j);
}

/// The order of the programs of Triton's matrix multiplication: `group` rows at a time, column by column.
#[test]
fn swizzle2d_goes_by_groups_of_rows() {
    let (rows, columns, group) = (8, 4, 2);
    let mut want = vec![0; 32];
    let order =
        (0..rows / group).flat_map(|g| (0..columns).flat_map(move |q| (0..group).map(move |p| (g * group + p, q))));
    for (number, (p, q)) in order.enumerate() {
        want[p * columns + q] = number as i32;
    }
    let found =
        outputs(devices(), 32, |device, y| Swizzled { y, rows, columns, group }.launch(device, (rows, columns)));
    for (device, y) in found {
        assert_eq!(y, want, "{device}");
    }
    let none = |device, y| Swizzled { y, rows, columns, group: 0 }.launch(device, (rows, columns));
    let mut y = Buffer::<i32>::poisoned(&Device::cpu(), 32).unwrap();
    let error = none(&Device::cpu(), &mut y).unwrap_err().to_string();
    assert!(error.contains("`size_g` of `swizzle2d` is 0"), "{error}");
}

/// Stores in a loop with several stages: to places that are loaded, and under a condition.
#[kernel]
fn scattered(x: In<f32>, to: In<i32>, y: Out<f32>, counts: Out<i32>, n: i32) {
    let i = arange(0, 16);
    let mut odd = scalar::<i32>(0);
    for start in range(0, n, 16, num_stages = 3) {
        let inside = start + i < n;
        let at = load(to + start + i, mask = inside, other = -1);
        store(y + at, load(x + start + i, mask = inside), mask = inside && (at >= 0) && (at < n));
        if start % 32 == 16 {
            store(counts + odd, start, mask = (odd >= 0) && (odd < 4));
            odd += 1;
        }
    }
}

#[test]
fn pipelined_loops_scatter_and_store_under_conditions() {
    let n = 120;
    let (x, to): (_, Vec<i32>) = (numbers(n, 4), (0..n as i32).map(|k| k * 7 % n as i32).collect());
    let mut want = vec![0.0; n];
    for (x, &to) in x.iter().zip(&to) {
        want[to as usize] = *x;
    }
    for device in devices() {
        let (x, to) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &to).unwrap());
        let (mut y, mut counts) = (Buffer::poisoned(&device, n).unwrap(), Buffer::zeros(&device, 4).unwrap());
        let mut kernel = Scattered { x: &x, to: &to, y: &mut y, counts: &mut counts, n: n as i32 };
        kernel.launch(&device, 1).unwrap_or_else(|error| panic!("{device}: {error}"));
        assert_eq!((y.to_vec().unwrap(), counts.to_vec().unwrap()), (want.clone(), vec![16, 48, 80, 112]), "{device}");
    }
}

/// The block below, and its sum.
#[device_fn]
fn below(block: BlockPtr<f32>) -> (BlockPtr<f32>, Scalar<f32>) {
    let next = block.advance([2, 0]);
    (next, sum(load(next, boundary_check = [0, 1], padding = zero)))
}

#[kernel]
fn moved(x: Tensor<f32, (rows, d)>, y: Out<f32>) {
    let (next, first) = below(x.block([0, 0], [2, 4]));
    let (_, second) = below(next);
    store(y, first);
    store(y + 1, second);
}

#[test]
fn device_functions_take_and_return_blocks() {
    let x: Vec<f32> = (0..15).map(|n| n as f32).collect();
    let found = outputs(devices(), 2, |device, y| {
        Moved { x: &Buffer::from_slice(device, &x)?.tensor([5, 3])?, y }.launch(device, 1)
    });
    for (device, y) in found {
        assert_eq!(y, [(6..12).sum::<i32>() as f32, (12..15).sum::<i32>() as f32], "{device}");
    }
}

#[kernel]
fn shifted(x: In<u8>, y: Out<u8>) {
    let i = arange(0, 1024);
    let shifted = inline_asm_elementwise::<u8>(
        asm = "and.b32 $0, $1, 0x1F1F1F1F; shl.b32 $0, $0, 3;",
        constraints = "=r,r",
        args = (load(x + i),),
        is_pure = true,
        pack = 4,
    );
    store(y + i, shifted);
}

#[test]
fn assembly_of_four_packed_bytes() {
    let x: Vec<u8> = (0..1024).map(|n| (n * 37 % 256) as u8).collect();
    let want: Vec<u8> = x.iter().map(|x| x << 3).collect();
    let found = outputs(gpus(), 1024, |device, y| Shifted { x: &Buffer::from_slice(device, &x)?, y }.launch(device, 1));
    for (device, y) in found {
        assert_eq!(y, want, "{device}");
    }
}

#[kernel]
fn cached(x: Tensor<f32, (n,)>, y: TensorMut<f32, (n,)>, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    let mask = i < n;
    let (px, py) = (x.ptr(), y.ptr());
    store(py + i, load(px + i, mask = mask, cache_modifier = ca), mask = mask, cache_modifier = wb);
    store(py + i, load(px + i, mask = mask, cache_modifier = cs), mask = mask, cache_modifier = cs);
    store(py + i, load(px + i, mask = mask, cache_modifier = cv), mask = mask, cache_modifier = wt);
    let block = load(x.block([0], [tile]), boundary_check = [0], padding = zero, cache_modifier = cg);
    store(y.block([0], [tile]), block, boundary_check = [0], cache_modifier = cg);
}

#[test]
fn cache_modifiers_are_in_the_instructions() {
    let x = numbers(60, 9);
    let found = outputs(devices(), 60, |device, y| {
        let x = Buffer::from_slice(device, &x)?;
        Cached { x: &x, y, tile: 64 }.launch(device, 1)
    });
    for (device, y) in found {
        assert_eq!(y, x, "{device}");
    }
    let func = CACHED.record(&[], consts! { tile = 64 }, &Specialization::default()).unwrap();
    let target = Target::Nvptx(GpuArch::Sm80);
    let artifact = compile(&func, &target, &CompileOptions::default(), &mut ()).unwrap();
    let Code::Ptx(ptx) = &artifact.code else { panic!("no PTX") };
    for (access, modifiers) in [("ld", ["ca", "cs", "cv", "cg"]), ("st", ["wb", "cs", "wt", "cg"])] {
        for modifier in modifiers {
            assert!(ptx.contains(&format!("{access}.global.{modifier}.")), "{access} {modifier}: {ptx}");
        }
    }
    if let Some(ptxas) = ptxas::find() {
        ptxas::assemble(&ptxas, ptx, "sm_80").unwrap();
    }
}

#[kernel]
fn stores_with_an_operator_of_loads(y: Out<f32>) {
    store(y, 1.0, cache_modifier = cv);
}

#[kernel]
fn loads_with_both(x: In<f32>, y: Out<f32>) {
    store(y, load(x, eviction = evict_first, cache_modifier = cg));
}

#[test]
fn an_access_has_one_cache_operator_of_its_own() {
    let message = |def: &KernelDef| def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    let (store, both) = (message(&STORES_WITH_AN_OPERATOR_OF_LOADS), message(&LOADS_WITH_BOTH));
    assert!(store.contains("`cache_modifier = cv` of a store"), "{store}");
    assert!(store.contains("a store has one of wb, cg, cs, wt"), "{store}");
    assert!(both.contains("a load with a cache modifier and an eviction policy"), "{both}");
}

/// -1, 0 or 1; where the numbers are far apart, their distance. Second, the larger one.
#[device_fn]
fn compared(x: Scalar<f32>, y: Scalar<f32>, limit: Scalar<f32>) -> (Scalar<i32>, Scalar<f32>) {
    let mut order = scalar::<i32>(0);
    if x < y {
        order = scalar::<i32>(-1);
        if y - x > limit {
            order = (x - y).to::<i32>();
        }
    } else if x > y {
        order = 1;
    }
    (order, if x > y { x } else { y })
}

#[kernel]
fn mapped(x: In<f32>, y: In<f32>, order: Out<i32>, larger: Out<f32>, limit: f32) {
    let i = arange(0, 32).expand_dims(1) * 4 + arange(0, 4).expand_dims(0);
    let (a, b) = map_elementwise((load(x + i), load(y + i)), |(x, y)| compared(x, y, limit));
    store(order + i, a);
    store(larger + i, map_elementwise(b, |x| if x > 0.0 { x } else { scalar::<f32>(0.0) }));
}

#[test]
fn functions_of_scalars_are_mapped() {
    let (x, mut y) = (numbers(128, 10), numbers(128, 11));
    y[5] = x[5];
    let (x, y): (Vec<f32>, Vec<f32>) = (x.iter().map(|x| x * 8.0).collect(), y.iter().map(|y| y * 8.0).collect());
    let order = |(x, y): (&f32, &f32)| match x.partial_cmp(y) {
        Some(std::cmp::Ordering::Less) if y - x > 2.0 => (x - y) as i32,
        other => other.unwrap() as i32,
    };
    let want: Vec<i32> = x.iter().zip(&y).map(order).collect();
    let want_larger: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x.max(*y).max(0.0)).collect();
    for device in devices() {
        let mut a = Buffer::<i32>::poisoned(&device, 128).unwrap();
        let mut b = Buffer::<f32>::poisoned(&device, 128).unwrap();
        let (x, y) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &y).unwrap());
        Mapped { x: &x, y: &y, order: &mut a, larger: &mut b, limit: 2.0 }.launch(&device, 1).unwrap();
        assert_eq!(a.to_vec().unwrap(), want, "{device}");
        assert_eq!(b.to_vec().unwrap(), want_larger, "{device}");
    }
}

#[kernel]
fn mapped_sum(x: In<f32>, y: Out<f32>) {
    let i = arange(0, 8);
    store(y + i, map_elementwise(load(x + i), |v| sum(zeros::<f32>([8]) + v)));
}

#[kernel]
fn reduced_sum(x: In<f32>, y: Out<f32>) {
    let w = load(x + arange(0, 8));
    store(y, reduce(load(x + arange(0, 8)), axis = 0, |a, b| a + b + sum(w)));
}

#[kernel]
fn maps_a_load(x: In<f32>, y: Out<f32>) {
    store(y + arange(0, 8), map_elementwise(arange(0, 8), |i| load(x + i)));
}

#[kernel]
fn maps_a_loop(x: In<f32>, y: Out<f32>) {
    let halved = map_elementwise(load(x + arange(0, 8)), |x| {
        let mut x = x;
        while x > 1.0 {
            x = x * 0.5;
        }
        x
    });
    store(y + arange(0, 8), halved);
}

#[test]
fn a_mapped_function_computes_with_scalars() {
    let message = |def: &KernelDef| def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    let (load, branch) = (message(&MAPS_A_LOAD), message(&MAPS_A_LOOP));
    assert!(load.contains("the function of `map_elementwise` cannot contain `load`"), "{load}");
    assert!(branch.contains("a function of scalars has no loops over run-time values"), "{branch}");
    let (mapped, combining) = (message(&MAPPED_SUM), message(&REDUCED_SUM));
    assert!(mapped.contains("the function of `map_elementwise` cannot contain `reduce`"), "{mapped}");
    assert!(combining.contains("a combining function cannot contain `reduce`"), "{combining}");
}

const BEFORE_MAPS_ON_LINES: u32 = line!();
#[kernel]
fn maps_on_lines(x: In<f32>, y: Out<f32>) {
    let mapped = map_elementwise(load(x + arange(0, 8)), |x| {
        let x = x * 0.5;
        x.exp()
    });
    store(y + arange(0, 8), mapped);
}

#[test]
fn ops_of_a_mapped_function_have_its_lines() {
    let func = MAPS_ON_LINES.record(&[], &[], &Specialization::default()).unwrap();
    let line = |is: fn(&Op) -> bool| {
        let found = func.block(func.body).ops.iter().map(|&id| func.op(id)).find(|data| is(&data.op)).unwrap();
        assert!(found.loc.file.ends_with("triton.rs"), "{}", found.loc.file);
        found.loc.line - BEFORE_MAPS_ON_LINES
    };
    assert_eq!(line(|op| matches!(op, Op::Load { .. })), 3);
    assert_eq!(line(|op| matches!(op, Op::Binary(BinaryOp::Mul))), 4);
    assert_eq!(line(|op| matches!(op, Op::Unary(UnaryOp::Exp))), 5);
}

#[kernel]
fn sums_and_differences(x: In<f32>, y: Out<f32>) {
    let i = arange(0, 256);
    let (a, b) = (load(x + i), load(x + 256 + i));
    let (sum, difference) = inline_asm_elementwise::<(f32, f32)>(
        asm = "add.f32 $0, $2, $3; sub.f32 $1, $2, $3;",
        constraints = "=&f,=&f,f,f",
        args = (a, b),
    );
    store(y + i, sum);
    store(y + 256 + i, difference);
    // Four bytes in each register: their complements, and their low halves.
    let i = arange(0, 1024);
    let bytes = (i * 37).to::<u8>();
    let (complements, halves) = inline_asm_elementwise::<(u8, u8)>(
        asm = "not.b32 $0, $2; and.b32 $1, $2, 0x0F0F0F0F;",
        constraints = "=&r,=&r,r",
        args = (bytes,),
        pack = 4,
    );
    store(y + 512 + i, complements.to::<f32>());
    store(y + 1536 + i, halves.to::<f32>());
}

#[test]
fn assembly_of_several_results() {
    let x = numbers(512, 12);
    let bytes = || (0..1024).map(|i| (i * 37 % 256) as u8);
    let pairs = || x[..256].iter().zip(&x[256..]);
    let results: Vec<f32> = pairs().map(|(a, b)| a + b).chain(pairs().map(|(a, b)| a - b)).collect();
    let of_bytes = bytes().map(|byte| f32::from(!byte)).chain(bytes().map(|byte| f32::from(byte & 15)));
    let want: Vec<f32> = results.into_iter().chain(of_bytes).collect();
    let found = outputs(gpus(), 2560, |device, y| {
        SumsAndDifferences { x: &Buffer::from_slice(device, &x)?, y }.launch(device, 1)
    });
    for (device, y) in found {
        assert_eq!(y, want, "{device}");
    }
}

#[kernel]
fn loads_by_assembly(x: In<f32>, y: Out<f32>) {
    let i = arange(0, 128);
    let loaded = inline_asm_elementwise::<f32>(
        asm = "ld.global.f32 $0, [$1];",
        constraints = "=f,l",
        args = (x + i,),
        is_pure = false,
    );
    store(y + i, loaded);
}

/// No checked launch has accesses by assembly; the code is what `ptxas` takes.
#[test]
fn assembly_with_pointers_compiles() {
    let func = LOADS_BY_ASSEMBLY.record(&[], &[], &Specialization::default()).unwrap();
    let target = Target::Nvptx(GpuArch::Sm80);
    let artifact = compile(&func, &target, &CompileOptions::default(), &mut ()).unwrap();
    let Code::Ptx(ptx) = &artifact.code else { panic!("no PTX") };
    assert!(ptx.contains("ld.global.f32 %"), "{ptx}");
    if let Some(ptxas) = ptxas::find() {
        ptxas::assemble(&ptxas, ptx, "sm_80").unwrap();
    }
    let device = Device::simulated(GpuArch::Sm80);
    let (x, mut y) = (Buffer::from_slice(&device, &[0.0f32; 128]).unwrap(), Buffer::poisoned(&device, 128).unwrap());
    let error = LoadsByAssembly { x: &x, y: &mut y }.launch(&device, 1).unwrap_err().to_string();
    assert!(error.contains("cannot prove before the launch that this access"), "{error}");
}

/// The last element of x and its first one above a half; of no elements, none is loaded.
#[kernel]
fn guarded(x: In<f32>, y: Out<i32>, #[no_specialize] n: i32) {
    store(y, (n > 0 && load(x + (n - 1)) > 0.5).to::<i32>());
    store(y + 1, (n <= 0 || load(x + (n - 1)) > 0.5).to::<i32>());
    let mut i = 0;
    while i >= 0 && i < n && load(x + i) <= 0.5 {
        i += 1;
    }
    store(y + 2, i);
    if (n > 1 && n < 100) && load(x + 1) > 0.5 {
        store(y + 3, 1);
    } else {
        store(y + 3, 0);
    }
}

#[test]
fn the_right_side_is_loaded_only_if_it_decides() {
    let x = [0.0f32, 1.0, 0.25, 0.75, 0.5];
    for n in 0..=x.len() {
        let last = x[..n].last().map(|last| *last > 0.5);
        let first = x[..n].iter().position(|x| *x > 0.5).unwrap_or(n);
        let want = [i32::from(last.unwrap_or(false)), i32::from(last.unwrap_or(true)), first as i32, i32::from(n > 1)];
        let found = outputs(devices(), 4, |device, y| {
            // At least one element: a device has no empty buffers.
            let x = Buffer::from_slice(device, &x[..n.max(1)])?;
            Guarded { x: &x, y, n: n as i32 }.launch(device, 1)
        });
        for (device, y) in found {
            assert_eq!(y, want, "{device}: {n}");
        }
    }
}
