//! Runs kernels in the interpreter, as recorded and after the GPU pipelines, as native code, and on the simulated GPU.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::erased::{self, Value};
use crate::numerics::HostTensor;
use crate::solved;
use tilewright::prelude::Device;
use tilewright_codegen::interp::{self, ArgValue, BufferId, Memory};
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::lower;
use tilewright_codegen::pipeline;
use tilewright_codegen::sim::{self, Global, Launch};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};

/// An argument of a kernel.
pub enum Arg<'a> {
    In(&'a HostTensor),
    /// Memory that is written, or read and written.
    Out(&'a mut HostTensor),
    Int(i64),
    Float(f64),
}

impl Arg<'_> {
    /// The bytes of memory that the kernel may write.
    fn written(&self) -> Option<Vec<u8>> {
        match self {
            Arg::Out(tensor) => Some(tensor.bytes.clone()),
            Arg::In(_) | Arg::Int(_) | Arg::Float(_) => None,
        }
    }
}

impl From<usize> for Arg<'_> {
    fn from(n: usize) -> Self {
        Arg::Int(n as i64)
    }
}

/// The form in which a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Tile IR as recorded, without specialization.
    Recorded,
    /// Tile IR as recorded for the specialization of these arguments.
    Specialized,
    /// Specialized Tile IR after the passes for that GPU.
    Gpu(GpuArch),
    /// On the CPU.
    Native,
    /// On the GPU of this machine.
    Cuda,
    /// On the simulated GPU, which checks every access and reports races.
    Simulated { arch: GpuArch, num_warps: u32, num_stages: u32 },
    /// As `Simulated` on sm_90a, with TMA loads; also the IR of the last stage in the interpreter.
    Tma { num_warps: u32, num_stages: u32 },
    /// As `Simulated` on sm_90a, with warp specialization; also the IR of the last stage in the interpreter.
    WarpSpecialized { num_warps: u32, num_stages: u32 },
    /// As `WarpSpecialized`, with a warpgroup for each of several programs that share loads, with and without ping-pong
    /// scheduling.
    Replicated { pingpong: bool },
    /// As `WarpSpecialized`, with the schedules that the solver finds.
    Solved { num_warps: u32, num_stages: u32 },
    /// As `Simulated` on sm_90a, with wgmma for f32; loads by all threads, by TMA, or by producer warps; and MMA
    /// overlap as the compiler chooses, or none (`no_overlap`).
    WgmmaF32 { num_warps: u32, num_stages: u32, loads: Loads, no_overlap: bool },
}

/// Which threads load operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loads {
    AllThreads,
    Tma,
    WarpSpecialized,
}

/// Forms that run in the interpreter, and on the devices of this machine.
pub fn forms() -> Vec<Form> {
    let interpreted = [Form::Recorded, Form::Specialized, Form::Gpu(GpuArch::Sm80), Form::Gpu(GpuArch::Sm90a)];
    interpreted.into_iter().chain(on_devices()).collect()
}

/// The forms for the devices of this machine: the CPU, and the GPU if there is one.
pub fn on_devices() -> Vec<Form> {
    let gpu = cuda().is_some().then_some(Form::Cuda);
    std::iter::once(Form::Native).chain(gpu).collect()
}

fn cuda() -> Option<&'static Device> {
    static CUDA: LazyLock<Option<Device>> = LazyLock::new(|| Device::cuda(0).ok());
    CUDA.as_ref()
}

/// Forms that run on the simulated GPU, which is many times slower: several warps, and on Hopper a warpgroup.
pub const SIMULATED: [Form; 2] = [
    Form::Simulated { arch: GpuArch::Sm80, num_warps: 2, num_stages: 3 },
    Form::Simulated { arch: GpuArch::Sm90a, num_warps: 4, num_stages: 3 },
];

/// A launch of a backward kernel of the norms, with tiles of two rows.
#[derive(Clone, Copy, Debug)]
pub struct RowLoopCase {
    pub whole_rows: bool,
    pub d_tile: usize,
    pub programs: usize,
    pub stages: usize,
}

/// Row loops: programs of two tiles; one program with three stages; a program per tile with two stages; and tiles that
/// are narrower than a row.
pub fn row_loops([rows, d]: [usize; 2]) -> [RowLoopCase; 4] {
    let (tiles, d_tile) = (rows.div_ceil(2), d.next_power_of_two());
    let whole = |programs, stages| RowLoopCase { whole_rows: true, d_tile, programs, stages };
    let narrow = RowLoopCase { whole_rows: false, d_tile: 8, programs: tiles, stages: 1 };
    [whole(tiles.div_ceil(2), 1), whole(1, 3), whole(tiles, 2), narrow]
}

/// The specialization of a launch: which pointers and integers are multiples of 16, and which integers are 1.
fn specialization(args: &[Arg]) -> Specialization {
    let spec = |arg: &Arg| match arg {
        Arg::In(tensor) if tensor.first_byte() % 16 != 0 => ArgSpec::default(),
        Arg::Out(tensor) if tensor.first_byte() % 16 != 0 => ArgSpec::default(),
        Arg::In(_) | Arg::Out(_) => ArgSpec { divisible_by: 16, equal_to: None },
        Arg::Int(1) => ArgSpec { divisible_by: 1, equal_to: Some(1) },
        Arg::Int(n) if n % 16 == 0 => ArgSpec { divisible_by: 16, equal_to: None },
        Arg::Int(_) | Arg::Float(_) => ArgSpec::default(),
    };
    Specialization { args: args.iter().map(spec).collect() }
}

/// Records the kernel as Tile IR.
pub fn record(
    def: &KernelDef,
    dtypes: &[DType],
    consts: &[(&str, ConstValue)],
    specialization: &Specialization,
) -> Func {
    def.record(dtypes, consts, specialization).unwrap_or_else(|d| panic!("{d}"))
}

/// The arguments of the kernel: `given`, which has all but strides and extents of tensor parameters, and these.
fn with_tensors<'a>(def: &KernelDef, given: &'a mut [Arg<'_>]) -> Vec<Arg<'a>> {
    let is_stride = |name: &str| def.tensors.iter().any(|tensor| tensor.strides.contains(&name));
    let passed = || def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    let names: Vec<&str> =
        passed().map(|p| p.name).filter(|name| !is_stride(name) && !def.dims.contains(name)).collect();
    assert_eq!(names.len(), given.len(), "{} takes {names:?}", def.name);
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    for tensor in def.tensors {
        let place = names.iter().position(|name| *name == tensor.name);
        let (shape, strides) = match place.map(|place| &given[place]) {
            Some(Arg::In(tensor)) => (&tensor.shape, &tensor.strides),
            Some(Arg::Out(tensor)) => (&tensor.shape, &tensor.strides),
            _ => panic!("{}: `{}` is a tensor", def.name, tensor.name),
        };
        numbers.extend(tensor.strides.iter().copied().zip(strides.iter().copied()));
        for (&dim, &extent) in tensor.dims.iter().zip(shape) {
            let name = def.dims[dim];
            assert_eq!(*numbers.entry(name).or_insert(extent), extent, "{}: `{name}` in `{}`", def.name, tensor.name);
        }
    }
    let mut given = given.iter_mut();
    let mut next = || match given.next() {
        Some(Arg::In(tensor)) => Arg::In(tensor),
        Some(Arg::Out(tensor)) => Arg::Out(tensor),
        Some(Arg::Int(n)) => Arg::Int(*n),
        Some(Arg::Float(x)) => Arg::Float(*x),
        None => unreachable!("as many arguments as names"),
    };
    passed().map(|p| numbers.get(p.name).map_or_else(&mut next, |&n| n.into())).collect()
}

/// Runs the kernel in `form`, and writes its results to the tensors of `Arg::Out`. `args` has all arguments but strides
/// and extents of tensor parameters.
pub fn interpret(
    form: Form,
    def: &'static KernelDef,
    dtypes: &[DType],
    consts: &[(&str, ConstValue)],
    grid: [u32; 3],
    args: &mut [Arg],
) {
    let args = &mut with_tensors(def, args)[..];
    let spec = if form == Form::Recorded { Specialization::default() } else { specialization(args) };
    let func = record(def, dtypes, consts, &spec);
    let result = match form {
        Form::Recorded | Form::Specialized => run(&func, grid, args),
        Form::Native | Form::Cuda => {
            let device = if form == Form::Cuda { cuda().expect("a GPU").clone() } else { Device::cpu() };
            let before: Vec<Value> = args.iter().map(value).collect();
            run(&func, grid, args).map(|()| {
                // SAFETY: the interpreter has checked the accesses.
                let memory = unsafe { erased::launch(&device, def, dtypes, consts, grid, &before) };
                for (arg, bytes) in args.iter_mut().zip(memory) {
                    if let (Arg::Out(tensor), Some(bytes)) = (arg, bytes) {
                        tensor.bytes = bytes;
                    }
                }
            })
        }
        Form::Gpu(arch) => run(&pipeline::gpu_ir(&func, arch, &CompileOptions::default(), &mut ()), grid, args),
        Form::Simulated { arch, num_warps, num_stages } => {
            let options = CompileOptions { num_warps, num_stages, ..CompileOptions::default() };
            simulate(&func, arch, &options, grid, args)
        }
        Form::WgmmaF32 { num_warps, num_stages, loads, no_overlap } => {
            let options = CompileOptions {
                num_warps,
                num_stages,
                schedule: Schedule {
                    tma: Some(loads != Loads::AllThreads),
                    warp_specialize: Some(loads == Loads::WarpSpecialized),
                    wgmma_f32: Some(true),
                    overlap: no_overlap.then_some(false),
                    ..Schedule::default()
                },
                ..CompileOptions::default()
            };
            simulate(&func, GpuArch::Sm90a, &options, grid, args)
        }
        Form::Tma { .. } | Form::WarpSpecialized { .. } | Form::Solved { .. } | Form::Replicated { .. } => {
            let (num_warps, num_stages, pingpong) = match form {
                Form::Tma { num_warps, num_stages }
                | Form::WarpSpecialized { num_warps, num_stages }
                | Form::Solved { num_warps, num_stages } => (num_warps, num_stages, None),
                Form::Replicated { pingpong } => (4, 2, Some(pingpong)),
                _ => unreachable!("the forms above"),
            };
            let (tma, warp_specialize) = (Some(true), Some(!matches!(form, Form::Tma { .. })));
            let mut options = CompileOptions {
                num_warps,
                num_stages,
                schedule: Schedule { tma, warp_specialize, pingpong, ..Schedule::default() },
                ..CompileOptions::default()
            };
            if let Form::Solved { .. } = form {
                let found = solved::solve_loops(&func, GpuArch::Sm90a, &options);
                let (schedules, _) = found.unwrap_or_else(|e| panic!("{e}"));
                options.loops = (!schedules.0.is_empty()).then(|| schedules.to_string());
            }
            let before: Vec<Option<Vec<u8>>> = args.iter().map(Arg::written).collect();
            let gpu_func = pipeline::gpu_ir(&func, GpuArch::Sm90a, &options, &mut ());
            let text = tilewright_codegen::text::print(&gpu_func);
            assert!(!matches!(form, Form::Replicated { .. }) || text.contains("replicas = "), "no replicas: {text}");
            let interpreted = run(&gpu_func, grid, args);
            for (arg, bytes) in args.iter_mut().zip(before) {
                if let (Arg::Out(tensor), Some(bytes)) = (arg, bytes) {
                    tensor.bytes = bytes;
                }
            }
            interpreted.and_then(|()| simulate(&func, GpuArch::Sm90a, &options, grid, args))
        }
    };
    if let Err(e) = result {
        panic!("{form:?}: {e}\n{}", tilewright_codegen::text::print(&func));
    }
}

fn value(arg: &Arg) -> Value {
    match arg {
        Arg::In(tensor) => Value::Memory(tensor.bytes.clone(), tensor.first_byte()),
        Arg::Out(tensor) => Value::Memory(tensor.bytes.clone(), tensor.first_byte()),
        Arg::Int(n) => Value::Int(*n),
        Arg::Float(x) => Value::Float(*x),
    }
}

/// A pointer to a tensor's first element, and the buffer that holds it.
fn pointer(memory: &mut Memory, tensor: &HostTensor) -> (ArgValue, Option<BufferId>) {
    let id = memory.add(tensor.bytes.clone());
    (ArgValue::Address(memory.address(id) + tensor.first_byte() as u64), Some(id))
}

fn run(func: &Func, grid: [u32; 3], args: &mut [Arg]) -> Result<(), String> {
    let mut memory = Memory::new();
    let mut buffers = Vec::new();
    let mut values = Vec::new();
    for arg in args.iter() {
        let (value, buffer) = match arg {
            Arg::In(tensor) => pointer(&mut memory, tensor),
            Arg::Out(tensor) => pointer(&mut memory, tensor),
            Arg::Int(n) => (ArgValue::Int(*n), None),
            Arg::Float(x) => (ArgValue::Float(*x), None),
        };
        values.push(value);
        buffers.push(buffer);
    }
    interp::run(func, &values, grid, &mut memory).map_err(|e| e.to_string())?;
    for (arg, buffer) in args.iter_mut().zip(buffers) {
        if let (Arg::Out(tensor), Some(id)) = (arg, buffer) {
            tensor.bytes.copy_from_slice(memory.bytes(id));
        }
    }
    Ok(())
}

fn simulate(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
    grid: [u32; 3],
    args: &mut [Arg],
) -> Result<(), String> {
    let gpu_func = pipeline::gpu_ir(func, arch, options, &mut ());
    let module = lower::nvptx::lower(&gpu_func, arch, options).map_err(|e| e.to_string())?;
    let mut global = Global::default();
    let bits: Vec<u64> = args
        .iter()
        .map(|arg| match arg {
            Arg::In(tensor) => global.add(tensor.bytes.clone()) + tensor.first_byte() as u64,
            Arg::Out(tensor) => global.add(tensor.bytes.clone()) + tensor.first_byte() as u64,
            Arg::Int(n) => *n as u64,
            Arg::Float(x) => u64::from((*x as f32).to_bits()),
        })
        .collect();
    let [programs, y, z] = grid;
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: [programs / module.programs_per_block * module.ctas_per_program, y, z],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &bits,
        tensor_maps: &module.tensor_maps,
        seed: 1,
    };
    sim::run(&launch, &mut global)?;
    for (arg, address) in args.iter_mut().zip(bits) {
        if let Arg::Out(tensor) = arg {
            let start = address - tensor.first_byte() as u64;
            tensor.bytes.copy_from_slice(global.bytes(start));
        }
    }
    Ok(())
}

/// Constants by name.
#[macro_export]
macro_rules! consts {
    ($($name:ident = $value:expr),* $(,)?) => {
        &[$((stringify!($name), $crate::interpret::constant($value))),*][..]
    };
}

/// Converts a Rust value to the value of a constexpr parameter.
pub fn constant(value: impl tilewright_codegen::lang::kernel::Constexpr) -> ConstValue {
    value.to_const()
}
