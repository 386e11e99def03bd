//! Compares native code and simulated GPUs with the interpreter: every op, every element type, odd boundaries.

mod control;
mod dots;
mod elementwise;
mod fusion;
mod generated;
mod kernels;
mod math;
mod memory;
mod reductions;

use crate::interp::{self, ArgValue, BufferId, Memory};
use crate::ir::{BinaryOp, DType, Elem, Func, Op};
use crate::llvm::{self, JitModule, Opt};
use crate::lower::nvptx;
use crate::num;
use crate::pipeline::{compile_host, gpu_ir};
use crate::target::{Artifact, Code, CompileOptions, GpuArch, HostCpu, HostHooks, Manifest};
use crate::testgen::{Argument, Program, check::simulate, saved::Saved};
use crate::text::parse;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};

/// An argument: a buffer by number, or a scalar.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    Buffer(usize),
    Int(i64),
    Float(f64),
}

/// The elements of a buffer, as the interpreter stores them.
#[derive(Clone, Debug)]
pub struct Data {
    pub elem: DType,
    pub bits: Vec<u64>,
}

impl Data {
    pub fn floats(elem: DType, values: impl IntoIterator<Item = f64>) -> Data {
        Data { elem, bits: values.into_iter().map(|x| num::encode(elem, x)).collect() }
    }

    pub fn ints(elem: DType, values: impl IntoIterator<Item = i64>) -> Data {
        Data { elem, bits: values.into_iter().map(|x| num::encode_int(elem, x as i128)).collect() }
    }

    /// `len` pseudo-random elements: floats in [−2, 2), integers over their range.
    pub fn random(elem: DType, len: usize, seed: u64) -> Data {
        let mut random = Random(seed);
        let bits = (0..len)
            .map(|_| match elem {
                DType::Bool => random.next() & 1,
                d if d.is_float() => num::encode(d, random.float() * 4.0 - 2.0),
                d => num::encode_int(d, random.next() as i64 as i128),
            })
            .collect();
        Data { elem, bits }
    }

    /// Elements that every kernel must overwrite.
    pub fn poison(elem: DType, len: usize) -> Data {
        let bits = match elem {
            DType::Bool => 1,
            d if d.is_float() => num::encode(d, 77.0),
            d => num::encode_int(d, 77),
        };
        Data { elem, bits: vec![bits; len] }
    }

    fn bytes(&self) -> Vec<u8> {
        let n = self.elem.bytes();
        self.bits.iter().flat_map(|b| b.to_le_bytes()[..n].to_vec()).collect()
    }

    fn from_bytes(elem: DType, bytes: &[u8]) -> Data {
        let element = |c: &[u8]| c.iter().rev().fold(0, |sum, &b| sum << 8 | b as u64);
        Data { elem, bits: bytes.chunks(elem.bytes()).map(element).collect() }
    }

    pub fn values(&self) -> Vec<f64> {
        let d = self.elem;
        let value = |&b: &u64| if d.is_float() { num::decode(d, b) } else { num::decode_int(d, b) as f64 };
        self.bits.iter().map(value).collect()
    }
}

/// xorshift64*.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn float(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The machines that tests compile for: this one and, where it has AVX-512, this one limited to AVX2.
pub fn machines() -> Vec<HostCpu> {
    let native = HostCpu::native();
    let mut list = vec![native.clone()];
    if native.features.contains("+avx512f") {
        let cut: Vec<String> = native
            .features
            .split(',')
            .map(|f| if f.starts_with("+avx512") || f.starts_with("+avx10") { f.replace('+', "-") } else { f.into() })
            .collect();
        list.push(HostCpu { features: cut.join(","), cpu: "x86-64-v3".into(), ..native });
    }
    list
}

thread_local! {
    static OUTPUT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn record_print(prefix: *const c_char, values: *const f64, len: u64, pid: *const [i32; 3]) {
    // SAFETY: the contract of `HostHooks`.
    let (prefix, values, pid) = unsafe {
        let values: &[f64] = if len == 0 { &[] } else { std::slice::from_raw_parts(values, len as usize) };
        (CStr::from_ptr(prefix).to_string_lossy(), values, *pid)
    };
    OUTPUT.with_borrow_mut(|o| o.push(format!("{pid:?} {prefix} {values:?}")));
}

unsafe extern "C" fn record_failure(message: *const c_char, pid: *const [i32; 3]) {
    // SAFETY: the contract of `HostHooks`.
    let (message, pid) = unsafe { (CStr::from_ptr(message).to_string_lossy(), *pid) };
    OUTPUT.with_borrow_mut(|o| o.push(format!("{pid:?} {message}")));
}

/// The output of the hooks on this thread since the last call.
pub fn output() -> Vec<String> {
    OUTPUT.take()
}

pub fn read(text: &str) -> Func {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    crate::verify::verify(&func, crate::ir::Stage::Tile).unwrap_or_else(|e| panic!("{}\n{text}", e[0]));
    func
}

/// Compiles native code by the whole pipeline, as users do.
pub fn compile(func: &Func, cpu: &HostCpu) -> Artifact {
    compile_host(func, cpu, &CompileOptions::default(), &mut ())
        .unwrap_or_else(|e| panic!("{e}\n{}", crate::text::print(func)))
}

/// Compiles native code of the function as it is, without passes before the lowering.
fn compile_plain(func: &Func, cpu: &HostCpu) -> Artifact {
    let module = super::lower(func, cpu, &CompileOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let object = llvm::object(&module.llvm_ir, cpu, &Opt::host())
        .unwrap_or_else(|e| panic!("{e}\n{}", crate::text::print(func)));
    let manifest = Manifest {
        kernel: func.name.clone(),
        entry: module.entry,
        target: "host".into(),
        args: module.args,
        threads: 1,
        shared_bytes: 0,
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes: module.arena_bytes,
        tensor_maps: Vec::new(),
        source: String::new(),
        clocks_of: None,
        footprint: None,
    };
    Artifact { manifest, code: Code::Object(object.code) }
}

/// Linked code with its arena.
pub struct Loaded {
    module: JitModule,
    arena: Vec<Line>,
}

/// A cache line of the arena.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(align(64))]
struct Line([u64; 8]);

const GUARD: Line = Line([0x7ff8_dead_7fc0_beef; 8]);

impl Loaded {
    pub fn new(artifact: &Artifact) -> Loaded {
        let Code::Object(object) = &artifact.code else { panic!("host code is an object") };
        let module = JitModule::load(object, &artifact.manifest.entry).unwrap_or_else(|e| panic!("{e}"));
        // One more line than requested, as a guard.
        let lines = artifact.manifest.arena_bytes.div_ceil(64) as usize;
        Loaded { module, arena: vec![GUARD; lines + 1] }
    }

    /// Runs the grid in order. Returns the first non-zero status.
    pub fn run(&mut self, slots: &[u64], grid: [u32; 3]) -> i32 {
        let hooks = HostHooks { print: record_print, assert_failed: record_failure };
        let args: Vec<*const c_void> = slots.iter().map(|s| s as *const u64 as *const c_void).collect();
        let extents = grid.map(|n| n as i32);
        for z in 0..extents[2] {
            for y in 0..extents[1] {
                for x in 0..extents[0] {
                    // SAFETY: the arguments match the kernel's, buffers are alive and large enough, as the interpreter
                    // checked on the same program before.
                    let status = unsafe {
                        (self.module.entry())(
                            args.as_ptr(),
                            &[x, y, z],
                            &extents,
                            self.arena.as_mut_ptr().cast(),
                            &hooks,
                        )
                    };
                    if status != 0 {
                        return status;
                    }
                }
            }
        }
        let last = self.arena.last().expect("the arena has a guard line");
        assert_eq!(*last, GUARD, "the kernel wrote past the end of its arena");
        0
    }
}

/// The tolerance of a comparison.
#[derive(Clone, Copy, Debug)]
pub enum Tolerance {
    /// The same numbers (any NaN is NaN, −0 is +0).
    Exact,
    /// |difference| ≤ relative · max(|expected|, floor).
    Near { relative: f64, floor: f64 },
}

/// The relative tolerance of a type for results of several roundings.
pub fn near(elem: DType) -> Tolerance {
    let relative = match elem {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 0.3,
    };
    Tolerance::Near { relative, floor: 1.0 }
}

/// Runs a kernel in the interpreter, as native code on each machine, and on simulated GPUs, and compares every buffer.
/// Returns the buffers after the run.
pub fn check(text: &str, inputs: &[Input], buffers: &[Data], grid: [u32; 3], tolerance: Tolerance) -> Vec<Data> {
    check_func(&read(text), inputs, buffers, grid, tolerance)
}

pub fn check_func(func: &Func, inputs: &[Input], buffers: &[Data], grid: [u32; 3], tolerance: Tolerance) -> Vec<Data> {
    let expected = check_native_func(func, inputs, buffers, grid, tolerance);
    let program = program(func, inputs, buffers, grid);
    save(&program, inputs, &expected, tolerance);
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let got = run_simulated(&program, inputs, buffers, arch);
        compare_all(func, arch.name(), &expected, &got, tolerance);
    }
    expected
}

/// As [`check`], without GPUs.
pub fn check_native(text: &str, inputs: &[Input], buffers: &[Data], grid: [u32; 3], tolerance: Tolerance) -> Vec<Data> {
    check_native_func(&read(text), inputs, buffers, grid, tolerance)
}

fn check_native_func(
    func: &Func,
    inputs: &[Input],
    buffers: &[Data],
    grid: [u32; 3],
    tolerance: Tolerance,
) -> Vec<Data> {
    let expected = interpret(func, inputs, buffers, grid);
    let machines = machines();
    let (first, last) = (&machines[0], &machines[machines.len() - 1]);
    for (cpu, artifact) in [(first, compile(func, first)), (last, compile_plain(func, last))] {
        let got = run_native(&artifact, func, inputs, buffers, grid);
        compare_all(func, &cpu.cpu, &expected, &got, tolerance);
    }
    expected
}

/// The kernel with its arguments, of which each buffer is one.
fn program(func: &Func, inputs: &[Input], buffers: &[Data], grid: [u32; 3]) -> Program {
    let argument = |input: &Input| match *input {
        Input::Buffer(i) => Argument::Output { dtype: buffers[i].elem, bytes: buffers[i].bytes() },
        Input::Int(n) => Argument::Int(n),
        Input::Float(x) => Argument::Float(x),
    };
    Program { func: func.clone(), args: inputs.iter().map(argument).collect(), grid }
}

/// The numbers of the buffers, in the order of arguments.
fn buffer_args(inputs: &[Input]) -> impl Iterator<Item = usize> {
    inputs.iter().filter_map(|input| match *input {
        Input::Buffer(i) => Some(i),
        Input::Int(_) | Input::Float(_) => None,
    })
}

/// Writes the program and its results for `tests/tests/gpu_random.rs` to the folder that TILEWRIGHT_TEST_CASES names, to a file
/// with the name of the test.
fn save(program: &Program, inputs: &[Input], expected: &[Data], tolerance: Tolerance) {
    let Some(folder) = std::env::var_os("TILEWRIGHT_TEST_CASES") else { return };
    let is_f32 = |v| program.func.ty(v).dtype() == Some(DType::F32);
    let divides = program
        .func
        .walk()
        .iter()
        .map(|&id| program.func.op(id))
        .any(|data| matches!(data.op, Op::Binary(BinaryOp::Div)) && is_f32(data.results[0]));
    let near = match tolerance {
        // Two units in the last place: `div.full.f32`.
        Tolerance::Exact if divides => Some([2.4e-7, f64::from(f32::MIN_POSITIVE)]),
        Tolerance::Exact => None,
        Tolerance::Near { relative, floor } => Some([relative, floor]),
    };
    let expected = buffer_args(inputs).map(|i| expected[i].bytes()).collect();
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("test").replace("::", "-");
    let saved = Saved { program: program.clone(), expected, near };
    saved.append(folder.as_ref(), &name).unwrap_or_else(|e| panic!("{name}: {e}"));
}

/// Runs a kernel on a simulated GPU; returns the buffers.
fn run_simulated(program: &Program, inputs: &[Input], buffers: &[Data], arch: GpuArch) -> Vec<Data> {
    let func = &program.func;
    let options = CompileOptions::default();
    let fail =
        |error: &dyn std::fmt::Display| -> ! { panic!("{}: {error}\n{}", arch.name(), crate::text::print(func)) };
    let module = nvptx::lower(&gpu_ir(func, arch, &options, &mut ()), arch, &options).unwrap_or_else(|e| fail(&e));
    let memory = simulate(program, func, &module, 0).unwrap_or_else(|e| fail(&e));
    let mut got = buffers.to_vec();
    for (i, bytes) in buffer_args(inputs).zip(memory) {
        got[i] = Data::from_bytes(buffers[i].elem, &bytes);
    }
    got
}

pub fn interpret(func: &Func, inputs: &[Input], buffers: &[Data], grid: [u32; 3]) -> Vec<Data> {
    let mut memory = Memory::new();
    let ids: Vec<BufferId> = buffers.iter().map(|b| memory.add(b.bytes())).collect();
    let params = &func.block(func.body).params;
    let args: Vec<ArgValue> = inputs
        .iter()
        .zip(params)
        .map(|(input, &p)| match *input {
            Input::Buffer(i) => ArgValue::Buffer(ids[i]),
            Input::Int(i) if func.ty(p).dtype() == Some(DType::Bool) => ArgValue::Bool(i != 0),
            Input::Int(i) => ArgValue::Int(i),
            Input::Float(x) => ArgValue::Float(x),
        })
        .collect();
    interp::run(func, &args, grid, &mut memory).unwrap_or_else(|e| panic!("{e}\n{}", crate::text::print(func)));
    ids.iter().zip(buffers).map(|(&id, b)| Data::from_bytes(b.elem, memory.bytes(id))).collect()
}

pub fn run_native(artifact: &Artifact, func: &Func, inputs: &[Input], buffers: &[Data], grid: [u32; 3]) -> Vec<Data> {
    let mut memory: Vec<Vec<u8>> = buffers.iter().map(Data::bytes).collect();
    let slots = slots(func, inputs, &mut memory);
    let status = Loaded::new(artifact).run(&slots, grid);
    assert_eq!(status, 0, "{:?}", output());
    memory.iter().zip(buffers).map(|(m, b)| Data::from_bytes(b.elem, m)).collect()
}

/// Argument values as the launch passes them.
pub fn slots(func: &Func, inputs: &[Input], memory: &mut [Vec<u8>]) -> Vec<u64> {
    let params = &func.block(func.body).params;
    let elem = |i: usize| func.ty(params[i]).elem().expect("arguments are scalars");
    let slot = |(i, input): (usize, &Input)| match (*input, elem(i)) {
        (Input::Buffer(b), _) => memory[b].as_mut_ptr() as u64,
        (Input::Int(v), Elem::Num(d)) => num::encode_int(d, v as i128),
        (Input::Float(x), Elem::Num(d)) => num::encode(d, x),
        (input, elem) => panic!("{input:?} is not of type {elem}"),
    };
    inputs.iter().enumerate().map(slot).collect()
}

fn compare_all(func: &Func, machine: &str, expected: &[Data], got: &[Data], tolerance: Tolerance) {
    for (i, (e, g)) in expected.iter().zip(got).enumerate() {
        compare(&format!("{}: buffer {i} on {machine}", func.name), e, g, tolerance);
    }
}

pub fn compare(what: &str, expected: &Data, got: &Data, tolerance: Tolerance) {
    let (e, g) = (expected.values(), got.values());
    for (i, (&e, &g)) in e.iter().zip(&g).enumerate() {
        let same = e == g || (e.is_nan() && g.is_nan());
        let close = match tolerance {
            Tolerance::Exact => same,
            Tolerance::Near { relative, floor } => {
                same || e.is_finite() && (e - g).abs() <= relative * e.abs().max(floor)
            }
        };
        assert!(close, "{what}, element {i}: expected {e:e}, got {g:e} ({tolerance:?})");
    }
}

/// Text of ops that read a `rows` × `cols` tile of `%name` densely, as `%name_t`.
pub fn load_dense(name: &str, shape: &[usize], elem: DType) -> String {
    let (view, tensor) = types(shape, elem);
    format!(
        "{}\n  %{name}_t = load_view %{name}_v {{boundary = [], padding = zero, eviction = normal}} : {tensor}\n",
        dense_view(name, shape, &view)
    )
}

/// Text of ops that write `value` densely to `%name`.
pub fn store_dense(name: &str, shape: &[usize], elem: DType, value: &str) -> String {
    let (view, _) = types(shape, elem);
    format!(
        "{}\n  store_view %{name}_v, {value} {{boundary = [], eviction = normal}}\n",
        dense_view(name, shape, &view)
    )
}

fn types(shape: &[usize], elem: DType) -> (String, String) {
    let extents: String = shape.iter().map(|n| format!("{n}x")).collect();
    (format!("view<{extents}{elem}>"), format!("tensor<{extents}{elem}>"))
}

fn dense_view(name: &str, shape: &[usize], ty: &str) -> String {
    let mut text = String::new();
    let mut constant = |what: &str, d: usize, value: usize| {
        text.push_str(&format!("  %{name}_{what}{d} = constant {{value = {value}}} : i64\n"));
        format!("%{name}_{what}{d}")
    };
    let mut operands = vec![format!("%{name}")];
    for (d, &n) in shape.iter().enumerate() {
        operands.push(constant("n", d, n));
    }
    for (d, s) in super::loop_nest::row_major(shape).into_iter().enumerate() {
        operands.push(constant("s", d, s));
    }
    for d in 0..shape.len() {
        operands.push(constant("o", d, 0));
    }
    let order: Vec<String> = (0..shape.len()).rev().map(|d| d.to_string()).collect();
    format!("{text}  %{name}_v = make_view {} {{order = [{}]}} : {ty}", operands.join(", "), order.join(", "))
}
