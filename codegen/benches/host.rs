//! Benchmarks of native code: matmul, attention and memory-bound kernels on one thread (the weighted sum also on two),
//! next to the peak of a loop of independent fused multiply-adds on the same core. Run by `cargo bench -p
//! tilewright-codegen --bench host`.

use std::ffi::{c_char, c_void};
use std::time::{Duration, Instant};
use tilewright_codegen::ir::{self, DType};
use tilewright_codegen::llvm::{self, JitModule, Opt};
use tilewright_codegen::pipeline::compile_host;
use tilewright_codegen::target::{Artifact, Code, CompileOptions, HostCpu, HostHooks};

#[path = "../src/lower/host/tests/kernels.rs"]
mod kernels;

fn main() {
    let cpu = HostCpu::native();
    let peak = peak_flops(&cpu);
    println!("peak FMA rate: {:.1} GFLOP/s", peak / 1e9);
    for (m, n, k) in [(64, 64, 64), (128, 128, 64), (64, 128, 128), (128, 64, 32)] {
        matmul(&cpu, peak, m, n, k);
    }
    matmul_by_pointers(&cpu, peak);
    for transposed in [true, false] {
        for causal in [false, true] {
            attention(&cpu, peak, DType::F32, transposed, causal);
        }
    }
    attention(&cpu, peak, DType::BF16, true, true);
    weighted_sum(&cpu);
    for (name, func) in [
        ("softmax", kernels::softmax(4, 1024)),
        ("argmax", kernels::argmax(4, 1024)),
        ("cumsum", kernels::cumsum(4, 1024)),
    ] {
        over_rows(&cpu, name, &func, 1024);
        over_rows(&cpu, name, &func, 1000);
    }
}

unsafe extern "C" fn print(_: *const c_char, _: *const f64, _: u64, _: *const [i32; 3]) {}
unsafe extern "C" fn assert_failed(_: *const c_char, _: *const [i32; 3]) {}

/// Compiled code, its compile time, and its arena.
struct Kernel {
    module: JitModule,
    arena: Vec<Line>,
    compile: Duration,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u64; 8]);

impl Kernel {
    fn new(func: &ir::Func, cpu: &HostCpu) -> Kernel {
        let start = Instant::now();
        let artifact = compile_host(func, cpu, &CompileOptions::default(), &mut ()).unwrap_or_else(|e| panic!("{e}"));
        let compile = start.elapsed();
        let Artifact { manifest, code: Code::Object(object) } = artifact else { panic!("host code is an object") };
        let module = JitModule::load(&object, &manifest.entry).unwrap_or_else(|e| panic!("{e}"));
        Kernel { module, arena: vec![Line([0; 8]); manifest.arena_bytes.div_ceil(64) as usize], compile }
    }

    fn run(&mut self, slots: &[u64], grid: [i32; 3]) {
        let hooks = HostHooks { print, assert_failed };
        let args: Vec<*const c_void> = slots.iter().map(|s| s as *const u64 as *const c_void).collect();
        for z in 0..grid[2] {
            for y in 0..grid[1] {
                for x in 0..grid[0] {
                    // SAFETY: slots match the kernel's arguments, and their buffers are large enough.
                    unsafe {
                        (self.module.entry())(args.as_ptr(), &[x, y, z], &grid, self.arena.as_mut_ptr().cast(), &hooks)
                    };
                }
            }
        }
    }

    /// The shortest time of several runs, in seconds.
    fn time(&mut self, slots: &[u64], grid: [i32; 3]) -> f64 {
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(400) {
            let start = Instant::now();
            self.run(slots, grid);
            best = best.min(start.elapsed().as_secs_f64());
        }
        best
    }
}

/// FLOP/s of 24 independent chains of vector fused multiply-adds (12 for AVX2).
fn peak_flops(cpu: &HostCpu) -> f64 {
    let lanes = if cpu.features.contains("+avx512f") {
        16
    } else if cpu.features.contains("+avx2") {
        8
    } else {
        4
    };
    let chains = if lanes == 8 { 12 } else { 24 };
    let ty = format!("<{lanes} x float>");
    let mut text = format!("declare {ty} @llvm.fma.v{lanes}f32({ty}, {ty}, {ty})\n");
    text += "define i32 @peak(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) #0 {\nentry:\n";
    text += &format!("  %x = load {ty}, ptr %arena\n  br label %loop\nloop:\n");
    text += "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]\n";
    for c in 0..chains {
        text += &format!("  %a{c} = phi {ty} [ zeroinitializer, %entry ], [ %b{c}, %loop ]\n");
    }
    for c in 0..chains {
        text += &format!("  %b{c} = call {ty} @llvm.fma.v{lanes}f32({ty} %a{c}, {ty} %x, {ty} %x)\n");
    }
    text += "  %next = add i64 %i, 1\n  %more = icmp ult i64 %next, 100000\n  br i1 %more, label %loop, label %done\ndone:\n";
    for c in 0..chains {
        text += &format!(
            "  %p{c} = getelementptr float, ptr %arena, i64 {}\n  store {ty} %b{c}, ptr %p{c}, align 4\n",
            c * lanes
        );
    }
    text += "  ret i32 0\n}\nattributes #0 = { \"min-legal-vector-width\"=\"512\" \"prefer-vector-width\"=\"512\" }\n";
    let object = llvm::object(&text, cpu, &Opt::host()).unwrap_or_else(|e| panic!("{e}")).code;
    let module = JitModule::load(&object, "peak").unwrap_or_else(|e| panic!("{e}"));
    let mut kernel = Kernel { module, arena: vec![Line([0; 8]); 64], compile: Duration::ZERO };
    let seconds = kernel.time(&[], [1, 1, 1]);
    (2 * lanes * chains * 100_000) as f64 / seconds
}

fn address<T>(data: &mut [T]) -> u64 {
    data.as_mut_ptr() as u64
}

fn noise(len: usize) -> Vec<f32> {
    let mut x = 1u32;
    (0..len)
        .map(|_| {
            x = x.wrapping_mul(1664525).wrapping_add(1013904223);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn matmul(cpu: &HostCpu, peak: f64, bm: usize, bn: usize, bk: usize) {
    let (m, n, k) = (512, 512, 512);
    let mut kernel = Kernel::new(&kernels::matmul(DType::F32, bm, bn, bk), cpu);
    let (mut a, mut b, mut c) = (noise(m * k), noise(k * n), vec![0f32; m * n]);
    let slots = [address(&mut a), address(&mut b), address(&mut c), m as u64, n as u64, k as u64, 1];
    let seconds = kernel.time(&slots, [(m / bm) as i32, (n / bn) as i32, 1]);
    let flops = (2 * m * n * k) as f64 / seconds;
    println!(
        "matmul 512³ in tiles {bm}x{bn}x{bk}: {:.1} GFLOP/s, {:.0} % of peak, compiled in {:.0} ms",
        flops / 1e9,
        100.0 * flops / peak,
        kernel.compile.as_secs_f64() * 1e3
    );
}

fn matmul_by_pointers(cpu: &HostCpu, peak: f64) {
    let n = 512;
    let mut kernel = Kernel::new(&kernels::matmul_by_pointers(64, 64, 64), cpu);
    let (mut a, mut b, mut c) = (noise(n * n), noise(n * n), vec![0f32; n * n]);
    let slots = [address(&mut a), address(&mut b), address(&mut c), n as u64, n as u64, n as u64];
    let seconds = kernel.time(&slots, [(n / 64) as i32, (n / 64) as i32, 1]);
    let flops = (2 * n * n * n) as f64 / seconds;
    println!("matmul 512³ through pointer tiles: {:.1} GFLOP/s, {:.0} % of peak", flops / 1e9, 100.0 * flops / peak);
}

fn attention(cpu: &HostCpu, peak: f64, elem: DType, transposed: bool, causal: bool) {
    let (heads, queries, d) = (4, 1024, 64);
    let mut kernel = Kernel::new(&kernels::attention(elem, 64, 64, d, causal, transposed), cpu);
    let n = heads * queries * d;
    let [mut q, mut k, mut v, mut o] = [noise(n), noise(n), noise(n), vec![0f32; n]];
    if elem == DType::BF16 {
        // The upper halves of f32 numbers are bf16 numbers.
        for data in [&mut q, &mut k, &mut v] {
            let bits: Vec<u16> = data.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            for (i, pair) in bits.chunks(2).enumerate() {
                data[i] = f32::from_bits(pair[0] as u32 | (pair[1] as u32) << 16);
            }
        }
    }
    let mut l = vec![0f32; heads * queries];
    let mut slots: Vec<u64> = [&mut q, &mut k, &mut v, &mut o, &mut l].into_iter().map(|b| address(b)).collect();
    slots.extend([queries as u64, queries as u64, 1]);
    let seconds = kernel.time(&slots, [(queries / 64) as i32, heads as i32, 1]);
    let work = if causal { (queries / 64 + 1) as f64 / (queries / 64) as f64 / 2.0 } else { 1.0 };
    let flops = work * (4 * heads * queries * queries * d) as f64 / seconds;
    println!(
        "attention {elem} {}{}: {:.2} ms, {:.1} GFLOP/s, {:.0} % of peak, arena {} KiB, compiled in {:.0} ms",
        if causal { "causal" } else { "full" },
        if transposed { ", k through a transposed view" } else { ", k through trans" },
        seconds * 1e3,
        flops / 1e9,
        100.0 * flops / peak,
        kernel.arena.len() / 16,
        kernel.compile.as_secs_f64() * 1e3
    );
}

/// Times the weighted sum of 64 MiB on one thread and on two, next to the traffic (bytes read plus bytes written) of a
/// copy of the same size.
fn weighted_sum(cpu: &HostCpu) {
    let (rows, d) = (4096, 4096);
    let func = kernels::weighted_sum(DType::F32, 16, 256);
    let mut w = noise(d);
    for threads in [1, 2] {
        let share = rows / threads;
        let mut parts: Vec<(Kernel, Vec<f32>, Vec<f32>)> =
            (0..threads).map(|_| (Kernel::new(&func, cpu), noise(share * d), vec![0f32; share * d])).collect();
        let compile = parts[0].0.compile;
        let w = address(&mut w);
        let read = shortest(&mut parts, |(kernel, x, y)| {
            let slots = [address(x), w, address(y), d as u64, share as u64, d as u64, 1];
            kernel.run(&slots, [(share / 16) as i32, 1, 1]);
        });
        let copied = shortest(&mut parts, |(_, x, y)| y.copy_from_slice(x));
        let bytes = (rows * d * 4) as f64;
        println!(
            "weighted sum {rows}x{d}, {threads} thread(s): {:.1} GB/s, {:.0} % of a copy's {:.1} GB/s, compiled in {:.0} ms",
            bytes / read / 1e9,
            100.0 * copied / (2.0 * read),
            2.0 * bytes / copied / 1e9,
            compile.as_secs_f64() * 1e3
        );
    }
}

/// The shortest time in seconds in which all parts are done, with one thread per part.
fn shortest<P: Send>(parts: &mut [P], work: impl Fn(&mut P) + Sync) -> f64 {
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(600) {
        let start = Instant::now();
        let work = &work;
        std::thread::scope(|scope| {
            for part in parts.iter_mut() {
                scope.spawn(move || work(part));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Times a kernel over tiles of four rows of up to 1024 columns.
fn over_rows(cpu: &HostCpu, name: &str, func: &ir::Func, columns: usize) {
    let rows = 1024;
    let mut kernel = Kernel::new(func, cpu);
    let (mut x, mut y) = (noise(rows * columns), vec![0f32; rows * columns]);
    let slots = [address(&mut x), address(&mut y), rows as u64, columns as u64, 1];
    let seconds = kernel.time(&slots, [(rows / 4) as i32, 1, 1]);
    println!(
        "{name} {rows}x{columns}: {:.3} ns per element, compiled in {:.0} ms",
        seconds * 1e9 / (rows * columns) as f64,
        kernel.compile.as_secs_f64() * 1e3
    );
}
