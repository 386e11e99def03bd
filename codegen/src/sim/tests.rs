//! Compares the lowering with the interpreter, without a GPU. (Random programs: `testgen/tests.rs`.)

use super::{Global, Launch, run};
use crate::ir::Func;
use crate::lower::nvptx::lower;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch, Schedule};

/// An attention kernel of `programs/`, with a number of queries. Runs it on the same inputs in the interpreter and in
/// the simulator; both give its output O.
pub(super) struct Attention {
    func: Func,
    queries: usize,
    tile: usize,
    dim: usize,
}

impl Attention {
    pub(super) fn new(text: &str, queries: usize, tile: usize, dim: usize) -> Attention {
        Attention { func: crate::text::parse(text).unwrap_or_else(|e| panic!("{e}")), queries, tile, dim }
    }

    fn inputs(&self) -> Vec<Vec<u8>> {
        let mut numbers = uniform(12345).map(|x| half::bf16::from_f32(x).to_le_bytes());
        (0..3).map(|_| numbers.by_ref().take(self.queries * self.dim).flatten().collect()).collect()
    }

    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.dim as f32).sqrt()
    }

    fn grid(&self) -> [u32; 3] {
        [self.queries.div_ceil(self.tile) as u32, 1, 1]
    }

    fn numbers(bytes: &[u8]) -> Vec<f64> {
        bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
    }

    pub(super) fn interpret(&self) -> Vec<f64> {
        let mut memory = crate::interp::Memory::new();
        let mut args: Vec<crate::interp::ArgValue> = self.inputs().into_iter().map(|b| memory.add(b).into()).collect();
        let o = memory.add(vec![0xFF; self.queries * self.dim * 2]);
        args.push(o.into());
        args.push(memory.add(vec![0xFF; self.queries * 4]).into());
        args.push(crate::interp::ArgValue::Int(self.queries as i64));
        args.push(crate::interp::ArgValue::Float(f64::from(self.scale())));
        crate::interp::run(&self.func, &args, self.grid(), &mut memory).unwrap_or_else(|e| panic!("{e}"));
        Attention::numbers(memory.bytes(o))
    }

    pub(super) fn llvm_ir(&self, arch: GpuArch, options: &CompileOptions) -> crate::lower::nvptx::GpuModule {
        lower(&gpu_ir(&self.func, arch, options, &mut ()), arch, options).unwrap_or_else(|e| panic!("{e}"))
    }

    pub(super) fn simulate(
        &self,
        llvm_ir: &str,
        module: &crate::lower::nvptx::GpuModule,
        seed: u64,
    ) -> Result<Vec<f64>, String> {
        let mut global = Global::default();
        let mut args: Vec<u64> = self.inputs().into_iter().map(|b| global.add(b)).collect();
        let o = global.add(vec![0xFF; self.queries * self.dim * 2]);
        args.push(o);
        args.push(global.add(vec![0xFF; self.queries * 4]));
        args.push(self.queries as u64);
        args.push(u64::from(self.scale().to_bits()));
        let (threads, shared_bytes) = (module.threads, module.shared_bytes);
        let launch = Launch {
            llvm_ir,
            grid: self.grid(),
            threads,
            shared_bytes,
            args: &args,
            tensor_maps: &module.tensor_maps,
            seed,
        };
        run(&launch, &mut global)?;
        Ok(Attention::numbers(global.bytes(o)))
    }
}

/// Uniform numbers in [−1, 1), determined by the seed.
pub(super) fn uniform(seed: u32) -> impl Iterator<Item = f32> {
    let mut x = seed;
    std::iter::repeat_with(move || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// Runs one program on two inputs and an output of `count` f32; returns the output and the kernel's code.
pub(super) fn run_two_inputs(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
    inputs: [Vec<u8>; 2],
    count: usize,
    seed: u64,
) -> (Vec<f64>, String) {
    let module = lower(&gpu_ir(func, arch, options, &mut ()), arch, options).unwrap_or_else(|e| panic!("{e}"));
    let mut global = Global::default();
    let [a, b] = inputs.map(|bytes| global.add(bytes));
    let c = global.add(vec![0xFF; count * 4]);
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: [1, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[a, b, c],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global).unwrap_or_else(|e| panic!("{e}"));
    let found = global.bytes(c).chunks(4).map(|c| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]])));
    (found.collect(), module.llvm_ir)
}

/// ‖found − expected‖ / ‖expected‖; NaN if any element is NaN.
pub(super) fn relative_error(expected: &[f64], found: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = expected.iter().zip(found).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|&a| square(a)).sum::<f64>()).sqrt()
}

fn attention64() -> Attention {
    Attention::new(include_str!("programs/attention64.tile"), 112, 64, 64)
}

#[test]
fn tensor_core_attention_matches_interpreter() {
    let small = Attention::new(include_str!("programs/attention32.tile"), 80, 32, 32);
    let cases = [
        (attention64(), GpuArch::Sm90a, 4, 2, "wgmma.mma_async"),
        (attention64(), GpuArch::Sm90a, 8, 3, "wgmma.mma_async"),
        (attention64(), GpuArch::Sm80, 4, 2, "mma.sync"),
        (small, GpuArch::Sm90a, 2, 3, "mma.sync"),
    ];
    for (seed, (case, arch, num_warps, num_stages, instruction)) in cases.into_iter().enumerate() {
        let options = CompileOptions { num_warps, num_stages, ..CompileOptions::default() };
        let module = case.llvm_ir(arch, &options);
        assert!(module.llvm_ir.contains(instruction) && module.llvm_ir.contains("cp.async"));
        let found = case.simulate(&module.llvm_ir, &module, seed as u64).unwrap_or_else(|e| panic!("case {seed}: {e}"));
        let error = relative_error(&case.interpret(), &found);
        assert!(error < 4e-3, "case {seed}: relative error {error}");
    }
}

/// Each of these bugs might go undetected on a GPU: the simulator must report it.
#[test]
fn missing_synchronization_is_reported() {
    let case = attention64();
    let options = CompileOptions { num_warps: 4, num_stages: 2, ..CompileOptions::default() };
    let module = case.llvm_ir(GpuArch::Sm90a, &options);
    for (removed, expected_error) in [
        ("bar.sync 0;", "race"),
        ("fence.proxy.async", "without a proxy fence"),
        ("cp.async.wait_group", "may still write"),
        ("wgmma.wait_group", "before it was waited for"),
    ] {
        let broken: Vec<&str> =
            module.llvm_ir.lines().filter(|l| removed == "wgmma.wait_group" || !l.contains(removed)).collect();
        // A wgmma wait forwards values, so it cannot be removed: it waits for nothing instead.
        let broken = broken.join("\n").replace("wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 9");
        let broken = if removed == "wgmma.wait_group" { broken } else { broken.replace("aligned 9", "aligned 0") };
        match case.simulate(&broken, &module, 1) {
            Err(e) => assert!(e.contains(expected_error), "without {removed}: {e}"),
            Ok(_) => panic!("without {removed}: no error"),
        }
    }
}

fn long_attention64() -> Attention {
    Attention::new(include_str!("programs/attention64.tile"), 208, 64, 64)
}

fn overlapped(num_warps: u32, num_stages: u32, overlap: bool) -> CompileOptions {
    let schedule = Schedule { overlap: Some(overlap), ..Schedule::default() };
    CompileOptions { num_warps, num_stages, schedule, ..CompileOptions::default() }
}

/// The result is the same whether or not the second MMA of an iteration overlaps the arithmetic of the next iteration.
#[test]
fn overlapped_mmas_match_interpreter() {
    let case = long_attention64();
    let expected = case.interpret();
    for (num_warps, num_stages, overlap) in [(4, 2, true), (4, 3, true), (8, 2, true), (4, 2, false)] {
        let module = case.llvm_ir(GpuArch::Sm90a, &overlapped(num_warps, num_stages, overlap));
        assert_eq!(module.llvm_ir.contains("wgmma.wait_group.sync.aligned 1;"), overlap);
        let found = case.simulate(&module.llvm_ir, &module, 7).unwrap_or_else(|e| panic!("{num_stages} stages: {e}"));
        let error = relative_error(&expected, &found);
        assert!(error < 4e-3, "{num_warps} warps, {num_stages} stages: relative error {error}");
    }
}

#[test]
fn missing_wgmma_wait_is_reported() {
    let case = long_attention64();
    let module = case.llvm_ir(GpuArch::Sm90a, &overlapped(4, 2, true));
    for (wait, instead) in [("aligned 1;", "aligned 2;"), ("aligned 0;", "aligned 1;")] {
        let broken = module
            .llvm_ir
            .replace(&format!("wgmma.wait_group.sync.{wait}"), &format!("wgmma.wait_group.sync.{instead}"));
        let e = case.simulate(&broken, &module, 1).expect_err("nothing was noticed");
        assert!(e.contains("before it was waited for"), "{e}");
    }
}

/// A ring without the one additional buffer: copies overwrite data that an MMA still reads.
#[test]
fn early_overwrite_of_a_ring_buffer_is_reported() {
    use crate::passes::{delay_waits, pipeline_loads, rotate_loops};
    let case = long_attention64();
    let options = overlapped(4, 2, true);
    let mut observed = Scheduled::default();
    gpu_ir(&case.func, GpuArch::Sm90a, &options, &mut observed);
    let mut func = observed.0.expect("a function with a schedule");
    let mut spare_buffers = 0;
    for id in func.walk() {
        if let Some(place) = func.op(id).place
            && let Some(depth) = place.depth
        {
            let needed = depth.min(options.num_stages);
            spare_buffers += depth - needed;
            func.set_place(id, Some(crate::ir::Placement { depth: Some(needed), ..place }));
        }
    }
    assert!(spare_buffers > 0, "no ring has an additional buffer");
    pipeline_loads::run(&mut func, GpuArch::Sm90a).unwrap_or_else(|e| panic!("{e}"));
    rotate_loops::run(&mut func);
    delay_waits::run(&mut func);
    let module = lower(&func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
    let e = case.simulate(&module.llvm_ir, &module, 1).expect_err("nothing was noticed");
    assert!(e.contains("race") || e.contains("in flight"), "{e}");
}

/// Keeps the function with its schedule.
#[derive(Default)]
struct Scheduled(Option<Func>);

impl crate::pipeline::Observer for Scheduled {
    fn after(&mut self, pass: &'static str, _: crate::ir::Stage, func: &Func) {
        if pass == "schedule_loops" {
            self.0 = Some(func.clone());
        }
    }
    fn llvm_ir(&mut self, _: &str) {}
}
