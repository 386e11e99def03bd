//! Synchronization between programs of one grid, in the interpreter and in the simulator.

use super::{Global, Launch, SimError, run, run_in_order};
use crate::interp::{self, Memory, Order, RunOptions};
use crate::lower::nvptx::lower;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch};
use crate::text::parse;

/// What executes the programs, and in which order.
#[derive(Clone, Copy, Debug)]
enum Executor {
    Interpreter(Order),
    Simulator { seed: Option<u64>, num_warps: u32 },
}

const EXECUTORS: [Executor; 8] = [
    Executor::Interpreter(Order::Sequential),
    Executor::Interpreter(Order::Interleaved(0)),
    Executor::Interpreter(Order::Interleaved(1)),
    Executor::Interpreter(Order::Interleaved(2)),
    Executor::Simulator { seed: None, num_warps: 1 },
    Executor::Simulator { seed: Some(0), num_warps: 1 },
    Executor::Simulator { seed: Some(1), num_warps: 4 },
    Executor::Simulator { seed: Some(2), num_warps: 2 },
];

/// Runs a kernel with two pointers to i32; returns their memory.
fn launch(body: &str, programs: u32, sizes: [usize; 2], on: Executor) -> Result<[Vec<i32>; 2], String> {
    let text = format!("kernel @k(%flag: ptr<i32>, %data: ptr<i32>) {{\n{body}\n  return\n}}");
    let func = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let grid = [programs, 1, 1];
    let zeros = sizes.map(|n| vec![0u8; 4 * n]);
    let numbers = |bytes: &[u8]| bytes.chunks(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    match on {
        Executor::Interpreter(order) => {
            let mut memory = Memory::new();
            let ids = zeros.map(|bytes| memory.add(bytes));
            let args = ids.map(Into::into);
            let options = RunOptions { order, ..RunOptions::default() };
            interp::run_traced(&func, &args, grid, &mut memory, options, &mut ()).map_err(|e| e.to_string())?;
            Ok(ids.map(|id| numbers(memory.bytes(id))))
        }
        Executor::Simulator { seed, num_warps } => {
            let options = CompileOptions { num_warps, ..CompileOptions::default() };
            let module = lower(&gpu_ir(&func, GpuArch::Sm90a, &options, &mut ()), GpuArch::Sm90a, &options).unwrap();
            let mut global = Global::default();
            let args = zeros.map(|bytes| global.add(bytes));
            let launch = Launch {
                llvm_ir: &module.llvm_ir,
                grid,
                threads: module.threads,
                shared_bytes: module.shared_bytes,
                args: &args,
                tensor_maps: &module.tensor_maps,
                seed: seed.unwrap_or(0),
            };
            match seed {
                Some(_) => run(&launch, &mut global)?,
                None => run_in_order(&launch, &mut global)?,
            }
            Ok(args.map(|address| numbers(global.bytes(address))))
        }
    }
}

/// Body of a kernel: each program spins until the flag equals its index, updates the number, and sets the flag to the
/// next index.
fn flag_handshake(index: &str, wait: &str, signal: &str) -> String {
    format!(
        "  %pid = program_id {{axis = 0}} : i32
           %n = num_programs {{axis = 0}} : i32
           %zero = constant {{value = 0}} : i32
           %one = constant {{value = 1}} : i32
           %three = constant {{value = 3}} : i32
           %last = sub %n, %one : i32
           %other = sub %last, %pid : i32
           while () {{
             %seen = {wait}
             %go = cmp_ne %seen, {index} : bool
             condition %go
           }} () {{ yield }}
           %old = load %data {{eviction = normal}} : i32
           %scaled = mul %old, %three : i32
           %new = add %scaled, %pid : i32
           store %data, %new {{eviction = normal}}
           %next = add {index}, %one : i32
           %done = {signal}"
    )
}

#[test]
fn programs_synchronize_through_atomic_cas() {
    const PROGRAMS: i32 = 6;
    let cas = |index: &str| {
        flag_handshake(
            index,
            &format!("atomic_cas %flag, {index}, {index} : i32"),
            &format!("atomic_cas %flag, {index}, %next : i32"),
        )
    };
    for on in EXECUTORS {
        let up = (0..PROGRAMS).fold(0i32, |x, pid| x.wrapping_mul(3).wrapping_add(pid));
        let found = launch(&cas("%pid"), PROGRAMS as u32, [1, 1], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        assert_eq!(found, [vec![PROGRAMS], vec![up]], "{on:?}");
        // Programs wait for programs that start later.
        let down = (0..PROGRAMS).rev().fold(0i32, |x, pid| x.wrapping_mul(3).wrapping_add(pid));
        let found = launch(&cas("%other"), PROGRAMS as u32, [1, 1], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        assert_eq!(found, [vec![PROGRAMS], vec![down]], "{on:?}");
    }
}

#[test]
fn relaxed_atomics_do_not_synchronize() {
    let relaxed =
        flag_handshake("%pid", "atomic_rmw %flag, %zero {op = add} : i32", "atomic_rmw %flag, %one {op = add} : i32");
    for on in EXECUTORS {
        let error = launch(&relaxed, 3, [1, 1], on).expect_err("the flag is not released");
        assert!(error.contains("data race") && error.contains("relaxed atomics do not"), "{on:?}: {error}");
    }
}

#[test]
fn an_acquire_sees_what_was_released() {
    let handshake = |wait: &str, signal: &str| {
        let (wait, signal) =
            (format!("atomic_rmw %flag, %zero {wait} : i32"), format!("atomic_rmw %flag, %one {signal} : i32"));
        flag_handshake("%pid", &wait, &signal)
    };
    let acquire = "{op = add, sem = acquire}";
    let release = "{op = add, sem = release, scope = sys}";
    let fine = handshake(acquire, release);
    let alone = [
        handshake(acquire, "{op = add}"),
        handshake("{op = add}", release),
        handshake(release, acquire),
        handshake("{op = add, sem = acquire, scope = cta}", release),
    ];
    for on in EXECUTORS {
        let found = launch(&fine, 4, [1, 1], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        assert_eq!(found[0], [4], "{on:?}");
        for body in &alone {
            let error = launch(body, 3, [1, 1], on).expect_err("one side orders nothing");
            assert!(error.contains("data race"), "{on:?}: {error}");
        }
    }
}

#[test]
fn livelock_is_reported() {
    let never = "  %one = constant {value = 1} : i32
      while () {
        %seen = atomic_cas %flag, %one, %one : i32
        %go = cmp_ne %seen, %one : bool
        condition %go
      } () { yield }";
    for on in EXECUTORS {
        for programs in [1, 5] {
            let error = launch(never, programs, [1, 1], on).expect_err("no program sets the flag");
            assert!(error.contains("livelock") && error.contains(&format!("{programs} programs")), "{on:?}: {error}");
        }
    }
}

/// Counted loops make progress even if memory does not change.
#[test]
fn counted_loops_are_not_livelocks() {
    let same = "  %zero = constant {value = 0} : i32
      %one = constant {value = 1} : i32
      %many = constant {value = 3000} : i32
      for %zero, %many, %one (%i: i32) {
        %old = atomic_rmw %flag, %zero {op = max} : i32
        yield
      }
      %sum = for %zero, %many, %one, %zero : i32 (%j: i32, %s: i32) {
        %x = load %flag {eviction = normal} : i32
        %t = add %s, %j : i32
        yield %t
      }
      store %data, %sum {eviction = normal}";
    for on in EXECUTORS {
        let found = launch(same, 1, [1, 1], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        assert_eq!(found, [vec![0], vec![2999 * 3000 / 2]], "{on:?}");
    }
}

#[test]
fn conflicting_stores_of_two_programs_race() {
    let store = "  %pid = program_id {axis = 0} : i32
      store %data, %pid {eviction = normal}";
    let store_and_load = "  %pid = program_id {axis = 0} : i32
      %one = constant {value = 1} : i32
      %own = ptr_add %data, %pid : ptr<i32>
      %next = ptr_add %own, %one : ptr<i32>
      store %own, %pid {eviction = normal}
      %x = load %next {eviction = normal} : i32
      %y = atomic_rmw %flag, %x {op = max} : i32";
    for on in EXECUTORS {
        for body in [store, store_and_load] {
            let error = launch(body, 4, [1, 8], on).expect_err("a race");
            assert!(error.contains("data race"), "{on:?}: {error}");
            // A single program has no race.
            launch(body, 1, [1, 8], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        }
    }
}

#[test]
fn atomics_have_device_scope() {
    let count = "  %pid = program_id {axis = 0} : i32
      %one = constant {value = 1} : i32
      %ticket = atomic_rmw %flag, %one {op = add} : i32
      %own = ptr_add %data, %ticket : ptr<i32>
      store %own, %pid {eviction = normal}";
    let mut orders = Vec::new();
    for on in EXECUTORS {
        let [flag, mut tickets] = launch(count, 20, [1, 20], on).unwrap_or_else(|e| panic!("{on:?}: {e}"));
        assert_eq!(flag, [20], "{on:?}");
        orders.push(tickets.clone());
        tickets.sort_unstable();
        assert_eq!(tickets, (0..20).collect::<Vec<i32>>(), "{on:?}");
    }
    // In order, the tickets equal the program indices; other interleavings give other orders.
    assert_eq!((&orders[0], &orders[4]), (&(0..20).collect(), &(0..20).collect()));
    assert!(orders[1] != orders[0] && orders[2] != orders[1] && orders[5] != orders[4] && orders[6] != orders[5]);
}

#[test]
fn faults_carry_the_source_line() {
    let llvm_ir = "define ptx_kernel void @k(ptr addrspace(1) %x) #0 {
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  ;@ src/kernel.rs:12:9
  %p = getelementptr i8, ptr addrspace(1) %x, i32 %tid
  %v = load i32, ptr addrspace(1) %p, align 4
  ret void
}";
    let mut global = Global::default();
    let args = [global.add(vec![0; 64])];
    let launch =
        Launch { llvm_ir, grid: [1, 2, 1], threads: 32, shared_bytes: 0, args: &args, tensor_maps: &[], seed: 0 };
    let SimError::Fault(error) = run(&launch, &mut global).expect_err("a misaligned load") else {
        panic!("a fault was expected")
    };
    assert_eq!(error.source_loc, "src/kernel.rs:12:9");
    assert!(error.thread.is_some_and(|t| t % 4 != 0) && error.block[0] == 0);
    assert_eq!(error.instruction, "%v = load i32, ptr addrspace(1) %p, align 4");
    assert!(error.message.contains("misaligned global access of 4 bytes"), "{error}");
    assert!(error.to_string().starts_with("src/kernel.rs:12:9: block (0, "), "{error}");
}
