//! Mutation tests of synchronization: for each fault that is injected into the shipped kernels, the simulated GPU must
//! report an error, or the outputs must differ.
//!
//! By default some mutants of each kernel run; `TILEWRIGHT_MUTANTS=all` runs all of them, and `TILEWRIGHT_MUTANTS=n`
//! runs n of each kernel. `TILEWRIGHT_MUTANTS_OF=matmul` selects kernels by name. A mutant that survives must be one of
//! those that [`equivalent`] explains.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tilewright::kernels::attention::Backward;
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::backward_rows::DQ_SUM_ROWS;
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::kernels::attention::modifiers::{DENSE, DOCUMENTS};
use tilewright::kernels::layer_norm::LAYER_NORM_BWD;
use tilewright::kernels::matmul::MATMUL;
use tilewright::kernels::softmax::SOFTMAX_WIDE_ROWS;
use tilewright_codegen::interp::{self, ArgValue, Memory};
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, Specialization};
use tilewright_codegen::lower::nvptx::{GpuModule, lower};
use tilewright_codegen::pipeline::gpu_ir;
use tilewright_codegen::sim::mutate::{Change, Class, Mutant, mutants, with_trap};
use tilewright_codegen::sim::{self, Global, Launch};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::consts;
use tilewright_tests::numerics::{HostTensor, Random, relative_error};

/// Mutants of each kernel that run by default.
const MUTANTS_PER_KERNEL: usize = 8;
/// Interleavings that are tried before a mutant counts as survived.
const SEEDS: u64 = 3;

enum Arg {
    In(HostTensor),
    Out(HostTensor),
    Int(i64),
    Float(f32),
}

/// A kernel with arguments and compiled code.
struct Case {
    name: &'static str,
    func: Func,
    module: GpuModule,
    grid: [u32; 3],
    args: Vec<Arg>,
}

impl Case {
    fn new(
        name: &'static str,
        def: &KernelDef,
        dtypes: &[DType],
        consts: &[(&str, ConstValue)],
        grid: [u32; 3],
        args: Vec<Arg>,
        arch: GpuArch,
        options: &CompileOptions,
    ) -> Case {
        let spec = |arg: &Arg| match arg {
            Arg::In(_) | Arg::Out(_) => ArgSpec { divisible_by: 16, equal_to: None },
            Arg::Int(1) => ArgSpec { divisible_by: 1, equal_to: Some(1) },
            Arg::Int(n) if n % 16 == 0 => ArgSpec { divisible_by: 16, equal_to: None },
            Arg::Int(_) | Arg::Float(_) => ArgSpec::default(),
        };
        let specialization = Specialization { args: args.iter().map(spec).collect() };
        let func = def.record(dtypes, consts, &specialization).unwrap_or_else(|d| panic!("{name}: {d}"));
        let gpu_func = gpu_ir(&func, arch, options, &mut ());
        let module = lower(&gpu_func, arch, options).unwrap_or_else(|e| panic!("{name}: {e}"));
        Case { name, func, module, grid, args }
    }

    /// The outputs of the interpreter, one per output tensor.
    fn interpret(&self) -> Vec<Vec<u8>> {
        let mut memory = Memory::new();
        let mut outputs = Vec::new();
        let mut values = Vec::new();
        for arg in &self.args {
            values.push(match arg {
                Arg::In(tensor) => memory.add(tensor.bytes.clone()).into(),
                Arg::Out(tensor) => {
                    let id = memory.add(tensor.bytes.clone());
                    outputs.push(id);
                    id.into()
                }
                Arg::Int(n) => ArgValue::Int(*n),
                Arg::Float(x) => ArgValue::Float(f64::from(*x)),
            });
        }
        interp::run(&self.func, &values, self.grid, &mut memory).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        outputs.into_iter().map(|id| memory.bytes(id).to_vec()).collect()
    }

    fn simulate(&self, llvm_ir: &str, seed: u64) -> Result<Vec<Vec<u8>>, String> {
        let mut global = Global::default();
        let mut outputs = Vec::new();
        let mut bits = Vec::new();
        for arg in &self.args {
            bits.push(match arg {
                Arg::In(tensor) => global.add(tensor.bytes.clone()),
                Arg::Out(tensor) => {
                    let address = global.add(tensor.bytes.clone());
                    outputs.push(address);
                    address
                }
                Arg::Int(n) => *n as u64,
                Arg::Float(x) => u64::from(x.to_bits()),
            });
        }
        let launch = Launch {
            llvm_ir,
            grid: [
                self.grid[0] / self.module.programs_per_block * self.module.ctas_per_program,
                self.grid[1],
                self.grid[2],
            ],
            threads: self.module.threads,
            shared_bytes: self.module.shared_bytes,
            args: &bits,
            tensor_maps: &self.module.tensor_maps,
            seed,
        };
        sim::run(&launch, &mut global)?;
        Ok(outputs.iter().map(|&address| global.bytes(address).to_vec()).collect())
    }

    fn numbers(&self, outputs: &[Vec<u8>]) -> Vec<f64> {
        let tensors = self.args.iter().filter_map(|arg| if let Arg::Out(tensor) = arg { Some(tensor) } else { None });
        let all = tensors.zip(outputs).map(|(t, bytes)| HostTensor { bytes: bytes.clone(), ..t.clone() }.values());
        all.flatten().collect()
    }
}

fn options(num_warps: u32, num_stages: u32, schedule: Schedule) -> CompileOptions {
    CompileOptions { num_warps, num_stages, schedule, ..CompileOptions::default() }
}

fn with_cp_async() -> Schedule {
    Schedule { tma: Some(false), ..Schedule::default() }
}

fn with_tma() -> Schedule {
    Schedule { tma: Some(true), ..Schedule::default() }
}

fn specialized(pingpong: bool) -> Schedule {
    Schedule { warp_specialize: Some(true), pingpong: Some(pingpong), ..Schedule::default() }
}

/// c = a·b of bf16 by one program.
fn matmul(name: &'static str, arch: GpuArch, k_tile: usize, options: &CompileOptions) -> Case {
    matmul_of(name, arch, k_tile, [64, 64, 9 * k_tile + 16], 0, options)
}

/// The same by one program that computes three tiles, and stores them by TMA.
fn persistent_matmul(name: &'static str, arch: GpuArch, k_tile: usize, options: &CompileOptions) -> Case {
    matmul_of(name, arch, k_tile, [160, 64, 3 * k_tile], 1, options)
}

/// The same by two programs that take turns: two tiles and one.
fn matmul_in_turns(name: &'static str, options: &CompileOptions) -> Case {
    matmul_of(name, GpuArch::Sm90a, 32, [160, 64, 3 * 32], 2, options)
}

/// The same by the two CTAs of a cluster, which share the loads of b.
fn matmul_of_cluster(name: &'static str, options: &CompileOptions) -> Case {
    matmul_of(name, GpuArch::Sm90a, 32, [128, 64, 5 * 32], 0, &CompileOptions { num_ctas: 2, ..options.clone() })
}

fn matmul_of(
    name: &'static str,
    arch: GpuArch,
    k_tile: usize,
    [m, n, k]: [usize; 3],
    replicas: usize,
    options: &CompileOptions,
) -> Case {
    let mut random = Random::new(1);
    let mut matrix =
        |rows: usize, columns: usize| HostTensor::random(DType::BF16, &[rows, columns], &[columns, 1], &mut random);
    let (a, b) = (matrix(m, k), matrix(k, n));
    let unused = HostTensor::random(DType::BF16, &[16], &[1], &mut Random::new(2));
    let c = HostTensor::poisoned(DType::BF16, &[m, n], &[n, 1]);
    let numbers = [1, n, 1, m, n, k, k, 1, n, 1, n, 1].map(|n| Arg::Int(n as i64));
    let args = [Arg::In(a), Arg::In(b), Arg::In(unused.clone()), Arg::In(unused), Arg::Out(c)];
    let consts = consts! {
        m_tile = 64 * options.num_ctas as usize, n_tile = 64usize, k_tile = k_tile, persistent = replicas > 0, replicas = replicas.max(1),
    };
    let args = args.into_iter().chain(numbers).collect();
    Case::new(name, &MATMUL, &[DType::BF16; 2], consts, [replicas.max(1) as u32, 1, 1], args, arch, options)
}

/// Head dimension of attention.
const D: usize = 64;

fn attention_tensor(rows: usize, random: &mut Random) -> HostTensor {
    HostTensor::random(DType::BF16, &[1, 1, rows, D], &[rows * D, rows * D, D, 1], random)
}

fn attention_output(rows: usize) -> HostTensor {
    HostTensor::poisoned(DType::BF16, &[1, 1, rows, D], &[rows * D, rows * D, D, 1])
}

/// Lists the arguments: tensors, the lengths, the scale, the numbers of the modifiers, the strides of the tensors with
/// four dimensions, and batch, heads, heads of the keys and entries, which are 1. `programs` is the argument of the
/// forward kernel.
fn attention_arguments(tensors: Vec<Arg>, queries: usize, keys: usize, programs: Option<i64>) -> Vec<Arg> {
    let strides = |arg: &Arg| match arg {
        Arg::In(t) | Arg::Out(t) if t.shape.len() == 4 => t.strides.clone(),
        _ => Vec::new(),
    };
    // Those of a table of pages, of starts and of scales, which the forward kernel may have.
    let optional = if programs.is_some() { vec![1; 2 + 1 + 3 * 3] } else { Vec::new() };
    let strides = tensors.iter().flat_map(strides).chain(optional);
    let strides: Vec<Arg> = strides.map(|n| Arg::Int(n as i64)).collect();
    let lengths = [Arg::Int(queries as i64), Arg::Int(keys as i64)];
    let numbers = lengths.into_iter().chain([Arg::Float(1.0 / (D as f32).sqrt()), Arg::Int(0), Arg::Float(0.0)]);
    let extents = match programs {
        Some(_) => vec![1, 1, 1, 1, keys as i64, 1, 1, 1, 0, 1, 1, 1],
        None => vec![1; 4],
    };
    let extents = extents.into_iter().map(Arg::Int);
    tensors.into_iter().chain(numbers).chain(programs.map(Arg::Int)).chain(strides).chain(extents).collect()
}

fn forward(name: &'static str, arch: GpuArch, q_tile: usize, options: &CompileOptions) -> Case {
    forward_of(name, arch, [q_tile; 2], 1, &[], options)
}

/// Two programs that share loads, each with its own Q.
fn forward_replicated(name: &'static str, options: &CompileOptions) -> Case {
    forward_of(name, GpuArch::Sm90a, [64, 128], 2, &[], options)
}

/// As [`forward_replicated`]; the block takes three tiles by a counter.
fn forward_persistent(name: &'static str, options: &CompileOptions) -> Case {
    forward_of(name, GpuArch::Sm90a, [64, 330], 2, &[], options)
}

/// Packed sequences: two loops over masked tiles, and one over full ones, whose trip counts come from memory.
fn forward_packed(name: &'static str, options: &CompileOptions) -> Case {
    let (queries, keys) = (64, 304);
    let first = (0..queries).map(|row| if row < 30 { 10 } else { 50 });
    let end = (0..queries).map(|row| if row < 30 { 250 } else { 260 + row / 2 });
    // The kernel does not read the ranges of rows.
    let ranges: Vec<usize> = first.chain(end).chain(std::iter::repeat_n(0, 2 * keys)).collect();
    forward_of(name, GpuArch::Sm90a, [queries; 2], 1, &ranges, options)
}

fn forward_of(
    name: &'static str,
    arch: GpuArch,
    [q_tile, queries]: [usize; 2],
    replicas: usize,
    ranges: &[usize],
    options: &CompileOptions,
) -> Case {
    let keys = 304;
    let random = &mut Random::new(3);
    let tensors = vec![
        Arg::In(attention_tensor(queries, random)),
        Arg::In(attention_tensor(keys, random)),
        Arg::In(attention_tensor(keys, random)),
        Arg::Out(attention_output(queries)),
        Arg::Out(HostTensor::poisoned(DType::F32, &[queries], &[1])),
        Arg::In(HostTensor::poisoned(DType::F32, &[queries], &[1])),
        Arg::In(HostTensor::indices(&[])),
        Arg::In(HostTensor::indices(&[])),
        Arg::In(HostTensor::indices(&[])),
        Arg::In(HostTensor::poisoned(DType::F32, &[1], &[1])),
        Arg::In(HostTensor::poisoned(DType::F32, &[1], &[1])),
        Arg::In(HostTensor::poisoned(DType::F32, &[1], &[1])),
        Arg::Out(HostTensor::indices(&[0])),
        Arg::In(HostTensor::indices(ranges)),
        Arg::In(HostTensor::indices(&[])),
    ];
    let args = attention_arguments(tensors, queries, keys, Some(1));
    let mask = if ranges.is_empty() { &DENSE } else { &DOCUMENTS };
    let consts = consts! { d = D, d_tile = D, d_v = D, d_v_tile = D, q_tile = q_tile, k_tile = 32usize, replicas = replicas, mask = mask, persistent = queries > q_tile * replicas };
    let grid = [replicas as u32, 1, 1];
    Case::new(name, &FLASH_ATTENTION_FWD, &[DType::BF16; 3], consts, grid, args, arch, options)
}

/// The inputs of the kernels of the backward pass.
fn backward_inputs(queries: usize, keys: usize) -> Vec<Arg> {
    let random = &mut Random::new(4);
    let row = |random: &mut Random| HostTensor::random(DType::F32, &[queries], &[1], random);
    vec![
        Arg::In(attention_tensor(queries, random)),
        Arg::In(attention_tensor(keys, random)),
        Arg::In(attention_tensor(keys, random)),
        Arg::In(attention_tensor(queries, random)),
        Arg::In(row(random)),
        Arg::In(row(random)),
        Arg::In(HostTensor::indices(&[])),
        Arg::In(HostTensor::indices(&[])),
    ]
}

fn dkdv(name: &'static str, arch: GpuArch, form: Backward, options: &CompileOptions) -> Case {
    let (one_pass, ordered) = (form != Backward::TwoPass, form == Backward::Ordered);
    // Two programs add to the same rows.
    let (queries, keys) = (304, if ordered { 128 } else { 64 });
    let q_tile = if one_pass { 64usize } else { 32 };
    let mut tensors = backward_inputs(queries, keys);
    let sum_rows = queries.next_multiple_of(DQ_SUM_ROWS);
    let zeros = HostTensor::of(DType::F32, &[sum_rows, D], &[D, 1], &vec![0.0; sum_rows * D]);
    let counters = HostTensor::indices(&vec![0; sum_rows / 16]);
    let outputs = [attention_output(keys), attention_output(keys), zeros, counters];
    tensors.extend(outputs.map(Arg::Out));
    let args = attention_arguments(tensors, queries, keys, None);
    let lanes_first = one_pass && arch < GpuArch::Sm90a;
    let consts = consts! {
        d = D, d_tile = D, d_v = D, d_v_tile = D, q_tile = q_tile, k_tile = 64usize, one_pass = one_pass, ordered = ordered,
        lanes_first = lanes_first,
    };
    let grid = [keys.div_ceil(64) as u32, 1, 1];
    Case::new(name, &FLASH_ATTENTION_BWD_DKDV, &[DType::BF16; 2], consts, grid, args, arch, options)
}

fn dq(name: &'static str, arch: GpuArch, tile: usize, options: &CompileOptions) -> Case {
    let (queries, keys) = (tile, 304);
    let mut tensors = backward_inputs(queries, keys);
    tensors.push(Arg::Out(attention_output(queries)));
    let args = attention_arguments(tensors, queries, keys, None);
    let consts = consts! { d = D, d_tile = D, d_v = D, d_v_tile = D, q_tile = tile, k_tile = 32usize };
    Case::new(name, &FLASH_ATTENTION_BWD_DQ, &[DType::BF16; 2], consts, [1, 1, 1], args, arch, options)
}

fn softmax(name: &'static str) -> Case {
    let (rows, d) = (4, 600);
    let random = |seed| HostTensor::random(DType::F32, &[rows, d], &[d, 1], &mut Random::new(seed));
    let y = HostTensor::poisoned(DType::F32, &[rows, d], &[d, 1]);
    let numbers = [d, 1, d, 1, rows, d].map(|n| Arg::Int(n as i64));
    let args = [Arg::In(random(5)), Arg::Out(y)].into_iter().chain(numbers).collect();
    let consts = consts! { rows_tile = 1usize, d_tile = 256usize };
    let options = options(4, 1, Schedule::default());
    Case::new(name, &SOFTMAX_WIDE_ROWS, &[DType::F32], consts, [rows as u32, 1, 1], args, GpuArch::Sm80, &options)
}

fn layer_norm(name: &'static str, stages: usize) -> Case {
    let (rows, d) = (19, 200);
    let random = &mut Random::new(6);
    let mut matrix = || HostTensor::random(DType::F32, &[rows, d], &[d, 1], random);
    let (x, grad_y) = (matrix(), matrix());
    let mut vector = |n: usize| Arg::In(HostTensor::random(DType::F32, &[n], &[1], random));
    let (w, mean, rstd) = (vector(d), vector(rows), vector(rows));
    let sums = || Arg::Out(HostTensor::poisoned(DType::F32, &[2, d], &[d, 1]));
    let grad_x = Arg::Out(HostTensor::poisoned(DType::F32, &[rows, d], &[d, 1]));
    let numbers = [10, d, 1, 1, 1, 1, d, 1, d, 1, d, 1, d, 1, rows, d, 2].map(|n| Arg::Int(n as i64));
    let args =
        [Arg::In(x), w, mean, rstd, Arg::In(grad_y), grad_x, sums(), sums()].into_iter().chain(numbers).collect();
    let consts = consts! { rows_tile = 2usize, d_tile = 256usize, whole_rows = true, stages = stages };
    let options = options(4, 1, Schedule::default());
    Case::new(name, &LAYER_NORM_BWD, &[DType::F32], consts, [2, 1, 1], args, GpuArch::Sm90a, &options)
}

fn cases() -> Vec<Case> {
    let (sm80, sm90) = (GpuArch::Sm80, GpuArch::Sm90a);
    vec![
        matmul("matmul sm_80", sm80, 32, &options(2, 3, Schedule::default())),
        matmul("matmul cp.async", sm90, 64, &options(4, 2, with_cp_async())),
        matmul("matmul TMA", sm90, 32, &options(4, 3, with_tma())),
        matmul("matmul specialized", sm90, 32, &options(4, 2, specialized(false))),
        persistent_matmul("matmul specialized, persistent", sm90, 32, &options(4, 2, specialized(false))),
        matmul_in_turns("matmul specialized, persistent, in turns", &options(4, 2, specialized(false))),
        matmul_of_cluster("matmul specialized, of a cluster", &options(4, 2, specialized(false))),
        forward("forward sm_80", sm80, 32, &options(2, 2, Schedule::default())),
        forward("forward cp.async", sm90, 64, &options(4, 2, with_cp_async())),
        forward("forward TMA", sm90, 64, &options(4, 2, with_tma())),
        forward("forward specialized", sm90, 64, &options(4, 2, specialized(false))),
        forward_packed("packed forward specialized", &options(4, 2, specialized(false))),
        forward("forward ping-pong", sm90, 128, &options(8, 1, specialized(true))),
        forward_replicated("forward specialized replicas", &options(4, 1, specialized(false))),
        forward_persistent("forward persistent", &options(4, 1, specialized(true))),
        dkdv("dK/dV cp.async", sm90, Backward::TwoPass, &options(4, 2, with_cp_async())),
        dkdv("dK/dV specialized", sm90, Backward::TwoPass, &options(4, 2, specialized(false))),
        dkdv("dK/dV one pass", sm90, Backward::OnePass, &options(4, 2, with_cp_async())),
        dkdv("dK/dV specialized, ordered", sm90, Backward::Ordered, &options(4, 2, specialized(false))),
        dq("dQ sm_80", sm80, 32, &options(2, 2, Schedule::default())),
        dq("dQ specialized", sm90, 64, &options(4, 2, specialized(false))),
        softmax("softmax"),
        layer_norm("layer norm", 1),
        layer_norm("layer norm pipelined", 3),
    ]
}

/// Explains why a surviving mutant is equivalent to the kernel: each access still happens after those that it must
/// follow. `None` if no explanation is known, which fails the test.
fn equivalent(case: &Case, mutant: &Mutant) -> Option<&'static str> {
    let specialized = case.name.contains("specialized") || case.name.contains("ping-pong");
    let pingpong = mutant.instruction.contains("bar.sync $0") || mutant.instruction.contains("bar.arrive $0");
    // The loop over tiles of a persistent program is around the loops with MMAs.
    let in_loop = mutant.in_loop && !(case.name.contains("persistent") && loop_depth(case, mutant) == 1);
    Some(match (mutant.class, mutant.change) {
        (Class::InitFence, Change::Removed) if specialized => {
            "thread 0 initializes the groups of mbarriers one after the other, and each fence covers all earlier ones: a later fence \
             replaces this one, and after the last fence come mbarriers that count no copies, which `bar.sync` alone makes visible"
        }
        (Class::WarpBarrier, Change::Removed) if specialized => {
            "only `wgmma` reads the buffer: all lanes execute `wgmma.wait_group.sync.aligned` together, so that lane 0 arrives after the \
             reads of the whole warp"
        }
        (Class::Arrive, Change::Removed | Change::Repeated | Change::Neighbor) if specialized && !mutant.in_loop => {
            "after the loop: the producer fills no more buffers, and no thread waits for the phase"
        }
        (Class::Arrive, Change::Removed) if specialized && in_last_loop(case, mutant) => {
            "in the remainder loop, which runs once: the producer fills no more buffers, and no thread waits for the phase"
        }
        (Class::Arrive, Change::Earlier) if specialized && case.name.contains("dK/dV") => {
            "the producer refills the slot when all buffers of the stage are released, and those of Q and dO are released after these reads"
        }
        (Class::Wait, Change::Neighbor) if specialized && case.name.contains("dK/dV") => {
            "the phase of the adjacent mbarrier is completed by the same threads, after their arrivals at this one"
        }
        (Class::Wait, Change::Later) if specialized && case.name.contains("dK/dV") && in_producer(case, mutant) => {
            "the producer has waited for the buffer of Q of the stage, which every warp releases after all others of that stage"
        }
        (Class::Wait, Change::Later) if specialized && case.name.contains("dK/dV") => {
            "it moves past MMAs that read other buffers: this thread's reads of its own buffer still come after it"
        }
        (Class::Wait, Change::Later) if case.name.contains("TMA") && !mutant.in_loop => {
            "it moves past copies to the next slot: each thread still waits for the copies to this slot before its MMAs read them"
        }
        (Class::Wait, Change::Removed) if specialized && mutant.in_loop => {
            "the producer has just waited for the buffer of the other operand: every warp arrives for both after one wait for its MMAs"
        }
        (Class::NamedBarrier, Change::Earlier) if case.name.contains("ordered") && !mutant.in_loop => {
            "at the end of the consumers, the memory of a tile is not filled again: only the last request comes after the barrier"
        }
        (Class::NamedBarrier, _) if pingpong => {
            "ping-pong barriers order the MMAs of the warpgroups; accesses to buffers are ordered by the mbarriers"
        }
        (Class::WgmmaWait, Change::Removed) if !in_loop => {
            "before the loop: `wait_group 1` with one group in flight returns immediately; after it: a wait for all comes before"
        }
        (Class::WgmmaWait, Change::Removed) if effects_after(case, mutant).next().is_some_and(waits_for_all_mmas) => {
            "the next effect is a wait for all MMAs: before accumulators are used, and before buffers are written or released"
        }
        (Class::WgmmaWait, Change::Removed) if case.name == "dK/dV specialized" => {
            "the buffer of dO is released while MMAs read it, but the producer refills it after its wait for that of Q, which every warp \
             releases after a wait for all MMAs"
        }
        (Class::WgmmaCommit, Change::Removed)
            if effects_after(case, mutant).find(|line| line.contains("wgmma.wait")).is_some_and(waits_for_all_mmas) =>
        {
            "the next commit includes this MMA, and the next wait is for all groups, before either result is used"
        }
        (Class::WgmmaCommit, Change::Removed | Change::Later) if !in_loop => {
            "outside of loops: the next commit includes this MMA, and the wait for both comes before either result is used"
        }
        (Class::CopyCommit, Change::Removed) if !mutant.in_loop => {
            "outside of loops: the next commit includes these copies, and the wait for both comes before either is read"
        }
        (Class::BlockBarrier | Class::NamedBarrier | Class::ProxyFence, Change::Removed) if !mutant.in_loop => {
            "a peeled first or last iteration of a loop: its slot is not used before, or not again, and for all other accesses the next \
             barrier, or a later fence by the same threads, lies between the same accesses"
        }
        (Class::CopyCommit, Change::Removed) if is_last(case, mutant, "cp.async.commit_group") => {
            "in the remainder loop, which runs once: it prefetches nothing, and the group is empty"
        }
        (Class::BlockBarrier, Change::Earlier) if case.name.contains("TMA") && !mutant.in_loop => {
            "it still makes the mbarriers visible to all threads; the store that it moves before is released by the next barrier of the \
             block, before MMAs read what it wrote"
        }
        (Class::BlockBarrier, Change::Later) if case.name.contains("TMA") && !mutant.in_loop => {
            "it makes the mbarriers visible to all threads: until then only the thread that initialized them uses them, and all others \
             still wait for them after it"
        }
        (Class::MbarrierInit, Change::CountUp) if is_last(case, mutant, "mbarrier.init") => {
            "in the remainder loop, which runs once: it fills one slot, and the last mbarrier counts no copy"
        }
        (Class::ProxyFence, Change::Earlier) if case.name.contains("TMA") => {
            "it moves past a bulk async copy and no thread's write: the writes that it orders still come before it, and the MMAs after it"
        }
        (Class::BulkWait, Change::Removed) if mutant.instruction.contains("wait_group 0") => {
            "each element of c is stored once: no store has to come after another"
        }
        (Class::BulkWait, Change::Later) if case.name.contains("persistent") => {
            "it moves after the copy from the buffer: the thread then waits for its own copy at once"
        }
        (Class::BulkWait, Change::Removed) => {
            "no bulk reduction is in flight here, in any iteration: it waits for nothing"
        }
        _ => return None,
    })
}

/// The lines after the mutated one.
fn lines_after<'a>(case: &'a Case, mutant: &Mutant) -> impl Iterator<Item = &'a str> {
    case.module.llvm_ir.lines().skip(mutant.line)
}

/// The lines after the mutated one that synchronize or access shared memory.
fn effects_after<'a>(case: &'a Case, mutant: &Mutant) -> impl Iterator<Item = &'a str> {
    let accesses =
        |line: &str| ["= load ", " store "].iter().any(|op| line.contains(op)) && line.contains("addrspace(3)");
    lines_after(case, mutant).filter(move |line| {
        line.contains("asm sideeffect")
            || ["@llvm.nvvm.bar", "@llvm.nvvm.fence"].iter().any(|f| line.contains(f))
            || accesses(line)
    })
}

fn waits_for_all_mmas(line: &str) -> bool {
    line.contains("wgmma.wait_group.sync.aligned 0;")
}

/// The number of loops around the line.
fn loop_depth(case: &Case, mutant: &Mutant) -> usize {
    let before = case.module.llvm_ir.lines().take(mutant.line).filter(|line| line.ends_with(':'));
    before.fold(0, |depth: usize, label| match label {
        _ if label.starts_with("body") => depth + 1,
        _ if label.starts_with("exit") => depth.saturating_sub(1),
        _ => depth,
    })
}

/// Whether the line is in the producer partition.
fn in_producer(case: &Case, mutant: &Mutant) -> bool {
    !lines_after(case, mutant).any(|line| line.starts_with("produce") && !line.starts_with("produced"))
}

/// Whether the line is in the last loop of the consumer partition.
fn in_last_loop(case: &Case, mutant: &Mutant) -> bool {
    mutant.in_loop
        && !lines_after(case, mutant)
            .take_while(|line| !line.starts_with("produce"))
            .any(|line| line.starts_with("body"))
}

/// Whether no line with this text follows the mutated one.
fn is_last(case: &Case, mutant: &Mutant, text: &str) -> bool {
    !lines_after(case, mutant).any(|line| line.contains(text))
}

/// Whether the mutated instruction could also be removed: then only the removal is counted.
fn is_redundant(case: &Case, all: &[Mutant], mutant: &Mutant, expected: &[Vec<u8>]) -> bool {
    let moved = [Change::Later, Change::Earlier, Change::Repeated, Change::CountUp].contains(&mutant.change);
    let removed = all.iter().find(|other| other.line == mutant.line && other.change == Change::Removed);
    moved && removed.is_some_and(|removed| matches!(try_mutant(case, removed, expected), Outcome::Survived))
}

/// The outcome of a mutant.
enum Outcome {
    /// The simulated GPU reported an error.
    Reported,
    OutputsDiffer,
    Survived,
    Panicked,
}

fn try_mutant(case: &Case, mutant: &Mutant, expected: &[Vec<u8>]) -> Outcome {
    for seed in 0..SEEDS {
        let run = std::panic::AssertUnwindSafe(|| case.simulate(&mutant.llvm_ir, seed));
        match std::panic::catch_unwind(run) {
            Ok(Ok(found)) if found == expected => {}
            Ok(Ok(_)) => return Outcome::OutputsDiffer,
            Ok(Err(_)) => return Outcome::Reported,
            Err(_) => return Outcome::Panicked,
        }
    }
    Outcome::Survived
}

/// Counts by kernel and class: mutants, reported, outputs differ, equivalent.
type Table = BTreeMap<(&'static str, Class), [usize; 4]>;

fn total(table: &Table) -> [usize; 4] {
    table.values().fold([0; 4], |sum, row| std::array::from_fn(|i| sum[i] + row[i]))
}

fn print(table: &Table) {
    let line = |name: &str, class: &str, row: [String; 4]| {
        let [all, reported, differ, equivalent] = row;
        println!("{name:<22} {class:<14} {all:>8} {reported:>9} {differ:>14} {equivalent:>11}");
    };
    line("kernel", "class", ["mutants", "reported", "outputs differ", "equivalent"].map(String::from));
    for ((name, class), row) in table {
        line(name, &format!("{class:?}"), row.map(|n| n.to_string()));
    }
    line("all", "", total(table).map(|n| n.to_string()));
}

/// The number of mutants of each kernel that run.
fn mutants_per_kernel() -> usize {
    match std::env::var("TILEWRIGHT_MUTANTS").ok().as_deref() {
        Some("all") => usize::MAX,
        Some(number) => number.parse().unwrap_or_else(|_| panic!("TILEWRIGHT_MUTANTS={number}: `all` or a number")),
        None => MUTANTS_PER_KERNEL,
    }
}

/// The numbers below `n`, in steps that spread over the whole range.
fn spread(n: usize) -> impl Iterator<Item = usize> {
    let coprime = (n * 5 / 8 + 1..)
        .find(|&step| (2..=step.min(n)).all(|d| !step.is_multiple_of(d) || !n.is_multiple_of(d)))
        .unwrap_or(1);
    (0..n).map(move |i| i * coprime % n)
}

/// The results of the mutants of one kernel or of several.
#[derive(Default)]
struct Report {
    table: Table,
    wrong: Vec<String>,
}

fn test_case(case: &Case, per_kernel: usize) -> Report {
    let mut report = Report::default();
    let expected = match case.simulate(&case.module.llvm_ir, 0) {
        Ok(found) => found,
        Err(e) => {
            report.wrong.push(format!("{} without a fault: {e}", case.name));
            return report;
        }
    };
    let error = relative_error(&case.numbers(&expected), &case.numbers(&case.interpret()));
    if !(error < 2e-2) {
        report.wrong.push(format!("{}: relative error {error}", case.name));
    }
    for seed in 1..SEEDS {
        let again = case.simulate(&case.module.llvm_ir, seed);
        if again.as_ref() != Ok(&expected) {
            report.wrong.push(format!("{} without a fault, seed {seed}: {:?}", case.name, again.err()));
        }
    }
    let all = mutants(&case.module.llvm_ir);
    // A mutation of a line that these arguments never execute is no fault.
    let mut runs = BTreeMap::new();
    let mut count = 0;
    for mutant in spread(all.len()).map(|i| &all[i]) {
        let line = mutant.line;
        if count == per_kernel
            || !*runs.entry(line).or_insert_with(|| case.simulate(&with_trap(&case.module.llvm_ir, line), 0).is_err())
        {
            continue;
        }
        let outcome = try_mutant(case, mutant, &expected);
        if matches!(outcome, Outcome::Survived) && is_redundant(case, &all, mutant, &expected) {
            continue;
        }
        count += 1;
        let row = report.table.entry((case.name, mutant.class)).or_default();
        row[0] += 1;
        match outcome {
            Outcome::Reported => row[1] += 1,
            Outcome::OutputsDiffer => row[2] += 1,
            Outcome::Survived if equivalent(case, mutant).is_some() => row[3] += 1,
            Outcome::Survived => report.wrong.push(format!("{}: survived: {mutant}", case.name)),
            Outcome::Panicked => report.wrong.push(format!("{}: panicked: {mutant}", case.name)),
        }
    }
    report
}

#[test]
fn injected_faults_are_detected() {
    let per_kernel = mutants_per_kernel();
    let only = std::env::var("TILEWRIGHT_MUTANTS_OF").unwrap_or_default();
    let cases: Vec<Case> = cases().into_iter().filter(|case| case.name.contains(&only)).collect();
    let all = Mutex::new(Report::default());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let report = test_case(case, per_kernel);
            eprintln!("{}: {:.1} s", case.name, start.elapsed().as_secs_f64());
            report.wrong.iter().for_each(|line| eprintln!("{line}"));
            let mut all = all.lock().unwrap();
            all.table.extend(report.table);
            all.wrong.extend(report.wrong);
        }
    };
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let Report { table, wrong } = all.into_inner().unwrap();
    print(&table);
    assert!(wrong.is_empty(), "{} mutants\n{}", wrong.len(), wrong.join("\n"));
    let [count, _, _, equivalent] = total(&table);
    // A small sample may have a larger fraction.
    assert!(per_kernel < usize::MAX || 10 * equivalent <= count, "{equivalent} of {count} mutants are equivalent");
}

/// Every kind of mutation occurs in some kernel.
#[test]
fn there_are_mutants_of_every_kind() {
    let all: Vec<Mutant> = cases().iter().flat_map(|case| mutants(&case.module.llvm_ir)).collect();
    let classes = [
        Class::BlockBarrier,
        Class::NamedBarrier,
        Class::WarpBarrier,
        Class::MbarrierInit,
        Class::InitFence,
        Class::Expect,
        Class::Arrive,
        Class::Wait,
        Class::ProxyFence,
        Class::WgmmaFence,
        Class::WgmmaCommit,
        Class::WgmmaWait,
        Class::CopyCommit,
        Class::CopyWait,
        Class::Tma,
        Class::BulkCommit,
        Class::BulkWait,
    ];
    for class in classes {
        assert!(all.iter().any(|m| m.class == class), "no mutant of {class:?}");
    }
    let changes = [
        Change::Removed,
        Change::Repeated,
        Change::Later,
        Change::Earlier,
        Change::Parity,
        Change::CountUp,
        Change::CountDown,
        Change::BytesUp,
        Change::BytesDown,
        Change::Neighbor,
    ];
    for change in changes {
        assert!(all.iter().any(|m| m.change == change), "no mutant with {change:?}");
    }
    assert!(all.len() >= 200, "only {} mutants", all.len());
}
