//! Correct and incorrect synchronization in small programs: the scenarios of Triton's concurrency sanitizer
//! (triton-lang/triton, `python/test/gluon/test_consan.py`) that apply to Hopper, in the PTX that this compiler emits.
//! Scenarios with clusters, Blackwell features and arrive counts above one are left out: this compiler does not emit
//! such code.
//!
//! A program is a script per partition (a range of warps). The steps of a script are separated by `;` and executed by
//! every thread of the partition. A buffer has 4 KiB.

use super::{Global, Launch, run};
use crate::target::{HostExpr, TensorMapDesc};
use std::fmt::Write;

/// Size of a buffer in bytes.
const BUFFER: u32 = 4096;
/// Offset of the mbarriers in shared memory.
const BARRIERS: u32 = 4 * BUFFER;

/// Writes LLVM IR.
#[derive(Default)]
struct Script {
    text: String,
    names: usize,
}

impl Script {
    fn name(&mut self) -> String {
        self.names += 1;
        format!("%v{}", self.names)
    }

    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "  {line}");
    }

    fn value(&mut self, line: &str) -> String {
        let v = self.name();
        self.line(&format!("{v} = {line}"));
        v
    }

    fn shared(&mut self, offset: &str) -> String {
        self.value(&format!("getelementptr i8, ptr addrspace(3) @smem, i32 {offset}"))
    }

    fn asm(&mut self, text: &str, constraints: &str, args: &str) {
        let separator = if constraints.is_empty() { "" } else { "," };
        self.line(&format!("call void asm sideeffect \"{text}\", \"{constraints}{separator}~{{memory}}\"({args}) #1"));
    }

    /// Emits one step, for all threads of a partition, or, after `first`, for its first thread.
    fn step(&mut self, step: &str, partition: &Partition) {
        let words: Vec<&str> = step.split_whitespace().collect();
        if let Some(rest) = step.trim().strip_prefix("first ") {
            self.names += 1;
            let (then, after) = (format!("when{}", self.names), format!("after{}", self.names));
            self.line(&format!("br i1 %first{}, label %{then}, label %{after}", partition.number));
            let _ = writeln!(self.text, "{then}:");
            self.step(rest, partition);
            self.line(&format!("br label %{after}"));
            let _ = writeln!(self.text, "{after}:");
            return;
        }
        let number = |i: usize| words[i].parse::<u32>().unwrap_or_else(|_| panic!("{step}"));
        match words[0] {
            "sync" => self.asm("bar.sync 0;", "", ""),
            "bar" => self.asm(&format!("bar.sync {}, {};", number(1), number(2)), "", ""),
            "registers" => self.asm(&format!("setmaxnreg.inc.sync.aligned.u32 {};", number(1)), "", ""),
            "fence" => self.line("call void @llvm.nvvm.fence.proxy.async.shared_cta()"),
            "fence_init" => self.asm("fence.mbarrier_init.release.cluster;", "", ""),
            "init" => self.barrier(&format!("mbarrier.init.shared::cta.b64 [$0], {};", number(2)), number(1)),
            "inval" => self.barrier("mbarrier.inval.shared::cta.b64 [$0];", number(1)),
            "arrive" => self.barrier("mbarrier.arrive.shared::cta.b64 _, [$0];", number(1)),
            "expect" => {
                let text = format!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {};", number(2));
                self.barrier(&text, number(1));
            }
            "wait" => {
                let p = self.shared(&(BARRIERS + 8 * number(1)).to_string());
                let text = "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again;}";
                self.asm(text, "r,r", &format!("ptr addrspace(3) {p}, i32 {}", number(2)));
            }
            "tma" => {
                let to = self.shared(&(BUFFER * number(1)).to_string());
                let barrier = self.shared(&(BARRIERS + 8 * number(2)).to_string());
                let text = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2,$3}], [$4];";
                let args = format!("ptr addrspace(3) {to}, ptr %map0, i32 0, i32 0, ptr addrspace(3) {barrier}");
                self.asm(text, "r,l,r,r,r", &args);
            }
            // Each thread writes the word of its own index, and reads a word that another warp writes.
            "read" => {
                let other = self.value(&format!("xor i32 %word{}, 128", partition.number));
                let at = self.value(&format!("add i32 {other}, {}", BUFFER * number(1)));
                let p = self.shared(&at);
                self.value(&format!("load i32, ptr addrspace(3) {p}, align 4"));
            }
            "write" => {
                let at = self.value(&format!("add i32 %word{}, {}", partition.number, BUFFER * number(1)));
                let p = self.shared(&at);
                self.line(&format!("store i32 7, ptr addrspace(3) {p}, align 4"));
            }
            "copy" => {
                let at = self.value(&format!("add i32 %word{}, {}", partition.number, BUFFER * number(1)));
                let p = self.shared(&at);
                let args = format!("ptr addrspace(3) {p}, ptr addrspace(1) %x, i32 4");
                self.asm("cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r", &args);
            }
            // Four bytes per thread, to that distance from the thread's word, which reads nothing.
            "copy_to" => {
                let at = self.value(&format!("add i32 %word{}, {}", partition.number, number(1)));
                let p = self.shared(&at);
                let args = format!("ptr addrspace(3) {p}, ptr addrspace(1) %x, i32 0");
                self.asm("cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r", &args);
            }
            "add_two" => {
                let p = self.value(&format!("getelementptr i8, ptr addrspace(1) %y, i64 {}", number(1)));
                let text = "red.global.add.v2.f32 [$0], {$1,$2};";
                self.asm(text, "l,f,f", &format!("ptr addrspace(1) {p}, float 1.0, float 1.0"));
            }
            "commit" => self.asm("cp.async.commit_group;", "", ""),
            "wait_copies" => self.asm(&format!("cp.async.wait_group {};", number(1)), "", ""),
            "mma" => self.mma(number(1), number(2)),
            "wait_mma" => self.asm(&format!("wgmma.wait_group.sync.aligned {};", number(1)), "", ""),
            "add" => {
                let p = self.shared(&(BUFFER * number(1)).to_string());
                let text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], 512;";
                self.asm(text, "l,r", &format!("ptr addrspace(1) %y, ptr addrspace(3) {p}"));
                self.asm("cp.async.bulk.commit_group;", "", "");
            }
            "load_y" => {
                self.value("load i32, ptr addrspace(1) %y, align 4");
            }
            "wait_reductions" => self.asm(&format!("cp.async.bulk.wait_group.read {};", number(1)), "", ""),
            _ => panic!("{step}"),
        }
    }

    fn barrier(&mut self, text: &str, number: u32) {
        let p = self.shared(&(BARRIERS + 8 * number).to_string());
        self.asm(text, "r", &format!("ptr addrspace(3) {p}"));
    }

    /// An MMA of 64×16 by 16×8 on the first bytes of two buffers, with rows of 32 bytes.
    fn mma(&mut self, a: u32, b: u32) {
        let start = self.value("ptrtoint ptr addrspace(3) @smem to i32");
        let descriptors = [a, b].map(|buffer| {
            let at = self.value(&format!("add i32 {start}, {}", BUFFER * buffer));
            let units = self.value(&format!("lshr i32 {at}, 4"));
            let wide = self.value(&format!("zext i32 {units} to i64"));
            let rest = (3u64 << 62 | 16 << 32 | 16 << 16) as i64;
            self.value(&format!("add i64 {wide}, {rest}"))
        });
        self.asm("wgmma.fence.sync.aligned;", "", "");
        let [a, b] = descriptors;
        let text = "{.reg .pred add; .reg .pred set; setp.eq.u32 add, 0, 0; setp.ne.u32 set, 0, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {$0,$1,$2,$3}, $4, $5, set, 1, 1, 0, 0;}";
        self.value(&format!(
            "call {{ float, float, float, float }} asm sideeffect \"{text}\", \"=&f,=&f,=&f,=&f,l,l,~{{memory}}\"(i64 {a}, i64 {b}) #1"
        ));
        self.asm("wgmma.commit_group.sync.aligned;", "", "");
    }
}

struct Partition {
    number: usize,
    first_warp: u32,
    warps: u32,
}

/// Simulates a program: the number of warps and the script of each partition. All threads synchronize after `setup`.
fn simulate(setup: &str, partitions: &[(u32, &str)], seed: u64) -> Result<(), String> {
    let mut script = Script::default();
    let mut warps = 0;
    let mut list = Vec::new();
    for (number, &(count, _)) in partitions.iter().enumerate() {
        list.push(Partition { number, first_warp: warps, warps: count });
        warps += count;
    }
    script.line("%tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()");
    for p in &list {
        let n = p.number;
        script.line(&format!("%local{n} = sub i32 %tid, {}", 32 * p.first_warp));
        script.line(&format!("%first{n} = icmp eq i32 %local{n}, 0"));
        script.line(&format!("%word{n} = shl i32 %local{n}, 2"));
        script.line(&format!("%in{n} = icmp ult i32 %local{n}, {}", 32 * p.warps));
    }
    for step in setup.split(';').chain(["sync"]).filter(|s| !s.trim().is_empty()) {
        script.step(step, &list[0]);
    }
    for (p, (_, text)) in list.iter().zip(partitions) {
        let n = p.number;
        script.line(&format!("br i1 %in{n}, label %part{n}, label %next{n}"));
        let _ = writeln!(script.text, "part{n}:");
        for step in text.split(';').filter(|s| !s.trim().is_empty()) {
            script.step(step, p);
        }
        script.line(&format!("br label %next{n}"));
        let _ = writeln!(script.text, "next{n}:");
    }
    let llvm_ir = format!(
        "define ptx_kernel void @k(ptr addrspace(1) %x, ptr addrspace(1) %y, ptr byval([128 x i8]) align 64 \"nvvm.grid_constant\" %map0) #0 {{\nentry:\n{}  ret void\n}}\n",
        script.text
    );
    let mut global = Global::default();
    let args = [global.add(vec![0; 4096]), global.add(vec![0; 4096])];
    let map = TensorMapDesc {
        arg: 2,
        base: 0,
        elem: "f16".into(),
        shape: vec![HostExpr::Const(32), HostExpr::Const(64)],
        strides: vec![HostExpr::Const(32)],
        block: vec![32, 64],
        swizzle_bytes: 0,
    };
    let launch = Launch {
        llvm_ir: &llvm_ir,
        grid: [1, 1, 1],
        threads: 32 * warps,
        shared_bytes: BARRIERS + 64,
        args: &args,
        tensor_maps: &[map],
        seed,
    };
    Ok(run(&launch, &mut global)?)
}

/// Checks that every interleaving succeeds, or that every interleaving reports one of the expected errors.
fn check(setup: &str, partitions: &[(u32, &str)], expected: Result<(), &[&str]>) {
    for seed in 0..6 {
        let found = simulate(setup, partitions, seed);
        let right = match (&found, expected) {
            (Ok(()), Ok(())) => true,
            (Err(e), Err(complaints)) => complaints.iter().any(|c| e.contains(c)),
            _ => false,
        };
        assert!(right, "{setup} | {partitions:?}, seed {seed}: expected {expected:?}, found {found:?}");
    }
}

const INIT: &str = "first init 0 1; first init 1 1; first init 2 1; first init 3 1; first fence_init";

/// A thread may also run before the copy.
const EARLY: &[&str] = &["has not waited for", "is uninitialized"];

#[test]
fn tma_writes_are_visible_after_mbarrier_wait() {
    let load = "first expect 0 4096; first tma 0 0";
    check(INIT, &[(4, &format!("{load}; wait 0 0; read 0"))], Ok(()));
    check(INIT, &[(4, &format!("{load}; read 0; wait 0 0"))], Err(EARLY));
    check(INIT, &[(4, load)], Err(&["no thread waits for its mbarrier", "bulk copies are in flight"]));
    // Two buffers on one mbarrier.
    let both = "first expect 0 8192; first tma 0 0; first tma 1 0";
    check(INIT, &[(4, &format!("{both}; wait 0 0; read 0; read 1"))], Ok(()));
    check(INIT, &[(4, &format!("{both}; read 0; read 1; wait 0 0"))], Err(EARLY));
    // Two mbarriers, each for its own copy.
    let two = "first expect 0 4096; first expect 1 4096; first tma 0 0; first tma 1 1";
    check(INIT, &[(4, &format!("{two}; wait 0 0; wait 1 0; read 0; read 1"))], Ok(()));
    check(INIT, &[(4, &format!("{two}; wait 0 0; read 0; read 1; wait 1 0"))], Err(EARLY));
    check(INIT, &[(4, &format!("{two}; wait 1 0; read 1; wait 0 0"))], Ok(()));
    check(INIT, &[(4, &format!("{two}; wait 1 0; read 0; wait 0 0"))], Err(EARLY));
    // Copies to the same buffer are unordered, whichever mbarrier is waited for.
    let same = "first expect 0 4096; first tma 0 0; first expect 1 4096; first tma 0 1";
    check(INIT, &[(4, &format!("{same}; wait 0 0; wait 1 0; read 0"))], Err(&["race: a bulk copy overwrites"]));
}

#[test]
fn expect_tx_must_match_copied_bytes() {
    let load = |bytes: u32| format!("first expect 0 {bytes}; first tma 0 0; wait 0 0; read 0");
    check(INIT, &[(4, &load(4096))], Ok(()));
    check(INIT, &[(4, &load(4080))], Err(&["only 4080 more are expected"]));
    check(INIT, &[(4, &load(4112))], Err(&["deadlock"]));
    check(INIT, &[(4, "first tma 0 0; first expect 0 4096; wait 0 0; read 0")], Err(&["only 0 more are expected"]));
}

#[test]
fn cp_async_completes_by_group() {
    let program = |pending| {
        format!(
            "copy 0; commit; copy 1; commit; wait_copies {pending}; copy 0; commit; wait_copies 0; sync; read 0; read 1"
        )
    };
    check("", &[(4, &program(1))], Ok(()));
    check("", &[(4, &program(2))], Err(&["may still write"]));
    check("", &[(4, "copy 0; commit; wait_copies 0; read 0")], Err(&["race", "is uninitialized"]));
    check("", &[(4, "copy 0; wait_copies 0; sync; read 0")], Err(&["may still write"]));
    // A copy that was waited for before the arrive is visible to the other partition.
    let init = "first init 0 128; first fence_init";
    for (buffer, expected) in [(0, Ok(())), (1, Err(&["may still write"][..]))] {
        let producer = "copy 0; commit; copy 1; commit; wait_copies 1; arrive 0; wait_copies 0";
        check(
            init,
            &[(4, producer), (4, &format!("wait 0 0; read {buffer}"))],
            match expected {
                // The result of the wait at the end depends on the order.
                Err(_) => Err(&["may still write", "race", "is uninitialized"]),
                ok => ok,
            },
        );
    }
    // Two partitions with separate buffers.
    let own = |b: u32| format!("copy {b}; commit; wait_copies 0; copy {}; commit; wait_copies 0", b + 1);
    check("", &[(4, &own(0)), (4, &own(2))], Ok(()));
    check(
        "",
        &[(4, &own(0)), (4, &format!("{}; read 0", own(2)))],
        Err(&["race", "may still write", "is uninitialized"]),
    );
}

#[test]
fn bulk_reductions_read_until_wait_group() {
    let program = |last: &str| {
        format!(
            "write 0; write 1; fence; sync; first add 0; first add 1; first wait_reductions 1; sync; write 0; {last}; write 1; first wait_reductions 0"
        )
    };
    check("", &[(4, &program("first wait_reductions 0; sync"))], Ok(()));
    check("", &[(4, &program("sync"))], Err(&["asynchronous read of it", "another thread read"]));
    check("", &[(4, "write 0; fence; sync; first add 0")], Err(&["exits before"]));
    // The added values are available after the kernel.
    let load_y = "write 0; fence; sync; first add 0; first wait_reductions 0; sync; load_y";
    check("", &[(4, load_y)], Err(&["completes with the kernel"]));
}

#[test]
fn wgmma_reads_until_wait_group() {
    let load = "first expect 0 8192; first tma 0 0; first tma 1 0; wait 0 0";
    check(INIT, &[(4, &format!("{load}; mma 0 1; wait_mma 0; sync; write 0"))], Ok(()));
    check(INIT, &[(4, &format!("{load}; mma 0 1; write 0; wait_mma 0"))], Err(&["asynchronous read of it", "race"]));
    check(INIT, &[(4, &format!("{load}; mma 0 1; sync; write 0; wait_mma 0"))], Err(&["asynchronous read of it"]));
    // One of two MMAs may stay in flight.
    let two = format!("{load}; mma 0 1; mma 0 1; wait_mma 1; sync");
    check(INIT, &[(4, &format!("{two}; wait_mma 0; sync; write 0"))], Ok(()));
    check(INIT, &[(4, &format!("{two}; write 0; wait_mma 0"))], Err(&["asynchronous read of it"]));
    check(INIT, &[(4, &format!("{load}; mma 0 1"))], Err(&["wgmma instructions are in flight"]));
    // Another partition may overwrite the buffers that the arrive releases.
    let init = "first init 0 1; first init 1 128; first fence_init";
    let load = "first expect 0 16384; first tma 0 0; first tma 1 0; first tma 2 0; first tma 3 0; wait 0 0";
    let reader = format!("{load}; mma 0 1; mma 2 3; wait_mma 1; arrive 1; wait_mma 0");
    check(init, &[(4, &reader), (4, "wait 1 0; write 0")], Ok(()));
    check(init, &[(4, &reader), (4, "wait 1 0; write 2")], Err(&["asynchronous read of it", "another thread read"]));
}

#[test]
fn ring_needs_one_more_buffer_than_mmas_in_flight() {
    for (buffers, expected) in [(3, Ok(())), (2, Err(&["asynchronous read of it", "may still be reading"][..]))] {
        let init: Vec<String> = (0..buffers).map(|b| format!("first init {b} 1")).collect();
        let load = |i: usize| {
            let slot = i % buffers;
            format!("first expect {slot} 4096; first tma {slot} {slot}")
        };
        let mut steps = vec![load(0)];
        for i in 0..8 {
            // The next load is issued after all threads have waited for the second to last MMA.
            steps.push("sync".into());
            if i < 7 {
                steps.push(load(i + 1));
            }
            let slot = i % buffers;
            steps.push(format!("wait {slot} {}; mma {slot} {slot}; wait_mma 1", i / buffers % 2));
        }
        steps.push("wait_mma 0".into());
        check(&format!("{}; first fence_init", init.join("; ")), &[(4, &steps.join("; "))], expected);
    }
}

#[test]
fn mbarriers_hand_buffers_between_partitions() {
    const ALL: &str = "first init 0 128; first init 1 128; first init 2 128; first init 3 128";
    let race = Err(&["race", "is uninitialized", "one arrive too many"][..]);
    // Write-wait-read.
    let store = "write 0; arrive 0";
    check(ALL, &[(4, "wait 0 0; read 0"), (4, store)], Ok(()));
    check(ALL, &[(4, "read 0; wait 0 0"), (4, store)], race);
    // Read-wait-write.
    let setup = &format!("{ALL}; write 0; sync");
    check(setup, &[(4, "wait 0 0; write 0"), (4, "read 0; arrive 0")], Ok(()));
    check(setup, &[(4, "write 0; wait 0 0"), (4, "read 0; arrive 0")], race);
    // Two readers on two mbarriers.
    let (a, b) = ((4, "read 0; arrive 0"), (4, "read 0; arrive 1"));
    check(setup, &[a, b, (4, "wait 0 0; wait 1 0; write 0")], Ok(()));
    check(setup, &[a, b, (4, "wait 0 0; write 0")], race);
    check(setup, &[a, b, (4, "wait 1 0; write 0")], race);
    // Two readers on one mbarrier, in partitions of different sizes.
    let setup = &"first init 0 192; first init 1 128; write 0; sync";
    let (a, b) = ((4, "read 0; arrive 0"), (2, "read 0; arrive 0"));
    check(setup, &[a, b, (4, "wait 0 0; write 0")], Ok(()));
    check(setup, &[a, b, (4, "write 0; wait 0 0")], race);
}

#[test]
fn mbarriers_hand_buffers_between_partitions_in_loops() {
    const ROUNDS: usize = 6;
    let rounds = |step: &dyn Fn(usize) -> String| (0..ROUNDS).map(step).collect::<Vec<_>>().join("; ");
    let broken = Err(&["race", "is uninitialized", "deadlock", "one arrive too many"][..]);
    // One writer and two readers: barriers 0 and 1 signal that a reader is done, 2 and 3 that the writer is done.
    let setup = "first init 0 128; first init 1 128; first init 2 128; first init 3 128";
    for missing in [None, Some(0), Some(1), Some(2), Some(3)] {
        let wait = |barrier: usize, parity: usize| match missing == Some(barrier) {
            true => String::new(),
            false => format!("wait {barrier} {parity}"),
        };
        let writer =
            rounds(&|i| format!("{}; {}; write 0; arrive 2; arrive 3", wait(0, (i + 1) % 2), wait(1, (i + 1) % 2)));
        let reader =
            |done: usize, written: usize| rounds(&|i| format!("{}; read 0; arrive {done}", wait(written, i % 2)));
        let (first, second) = (reader(0, 2), reader(1, 3));
        let expected = if missing.is_some() { broken } else { Ok(()) };
        check(setup, &[(4, &writer), (4, &first), (4, &second)], expected);
    }
    // Two buffers, in order: reading the second after the first one's barrier is too early.
    for (buffer, expected) in [(0, Ok(())), (1, broken)] {
        let writer = rounds(&|i| format!("wait 2 {}; write 0; arrive 0; write 1; arrive 1", (i + 1) % 2));
        let reader = rounds(&|i| format!("wait 0 {}; read {buffer}; wait 1 {}; arrive 2", i % 2, i % 2));
        check(setup, &[(4, &writer), (4, &reader)], expected);
    }
    // Two writers and two readers; each barrier counts two partitions.
    let setup = "first init 0 256; first init 2 256";
    for missing in [None, Some(0), Some(1)] {
        let writer = |buffer: usize| rounds(&|i| format!("wait 2 {}; write {buffer}; arrive 0", (i + 1) % 2));
        let reader = |buffer: usize| {
            let skips = missing == Some(buffer);
            rounds(&|i| {
                format!("{}; read {buffer}; arrive 2", if skips { String::new() } else { format!("wait 0 {}", i % 2) })
            })
        };
        let scripts = [writer(0), writer(1), reader(0), reader(1)];
        let partitions: Vec<(u32, &str)> = scripts.iter().map(|s| (4, s.as_str())).collect();
        check(setup, &partitions, if missing.is_some() { broken } else { Ok(()) });
    }
}

#[test]
fn async_reads_need_a_proxy_fence_after_stores() {
    let setup = "first init 0 128";
    for (producer, consumer, fine) in [
        ("write 0; arrive 0", "wait 0 0; first add 0; first wait_reductions 0", false),
        ("write 0; arrive 0; fence", "wait 0 0; first add 0; first wait_reductions 0", false),
        ("write 0; fence; arrive 0", "wait 0 0; first add 0; first wait_reductions 0", true),
        ("write 0; arrive 0", "wait 0 0; fence; first add 0; first wait_reductions 0", true),
    ] {
        let expected = if fine { Ok(()) } else { Err(&["without a proxy fence"][..]) };
        check(setup, &[(4, producer), (4, consumer)], expected);
    }
}

#[test]
fn copies_over_what_threads_have_read_need_a_fence_of_the_reader() {
    let init = "first init 0 1; first init 1 128; first fence_init";
    let load = |phase: u32| format!("first expect 0 4096; first tma 0 0; wait 0 {phase}");
    let fence = Err(&["without a proxy fence of its own"][..]);
    // In one partition, with a barrier of the block.
    for (between, expected) in
        [("fence; sync", Ok(())), ("sync", fence), ("first fence; sync", fence), ("sync; first fence", fence)]
    {
        check(init, &[(4, &format!("{}; read 0; {between}; {}", load(0), load(1)))], expected);
    }
    // A consumer hands the buffer back to a producer.
    let first = |phase: u32| format!("first expect 0 4096; first tma 0 0; first wait 0 {phase}");
    let producer = |before: &str| format!("{}; first wait 1 0; {before} {}", first(0), first(1));
    for (consumer, before, expected) in [
        ("wait 0 0; read 0; fence; arrive 1", "", Ok(())),
        ("wait 0 0; read 0; arrive 1", "", fence),
        ("wait 0 0; read 0; arrive 1; fence", "", fence),
        ("wait 0 0; read 0; arrive 1", "first fence;", fence),
    ] {
        check(init, &[(4, &producer(before)), (4, &format!("{consumer}; wait 0 1"))], expected);
    }
    // What `wgmma` has read needs none.
    let load = |phase: u32| format!("first expect 0 8192; first tma 0 0; first tma 1 0; wait 0 {phase}");
    check(init, &[(4, &format!("{}; mma 0 1; wait_mma 0; sync; {}", load(0), load(1)))], Ok(()));
}

#[test]
fn limits_of_barriers_registers_and_copies_are_checked() {
    check("first init 0 0", &[(4, "")], Err(&["an mbarrier of 0 arrivals"]));
    check("first init 0 1048576", &[(4, "")], Err(&["an mbarrier of 1048576 arrivals"]));
    check(INIT, &[(4, "first expect 0 1048576")], Err(&["an mbarrier expects 1048576 bytes"]));
    let twice = "first init 0 3; first expect 0 600000; first expect 0 600000";
    check(twice, &[(4, "")], Err(&["an mbarrier expects 1200000 bytes"]));
    check("", &[(4, "bar 16 128")], Err(&["a block has barriers 0 to 15"]));
    for count in [0, 100, 160] {
        check("", &[(4, &format!("bar 1 {count}"))], Err(&["expected a multiple of 32 up to the 128"]));
    }
    check("", &[(4, "bar 15 128")], Ok(()));
    check("", &[(4, "registers 20")], Err(&["expected a multiple of 8 from 24 to 256"]));
    check("", &[(4, "registers 240")], Ok(()));
    check("", &[(4, "copy_to 4; commit; wait_copies 0")], Ok(()));
    check("", &[(4, "copy_to 2; commit; wait_copies 0")], Err(&["expected addresses that are multiples of the size"]));
    check("", &[(4, "first add_two 8")], Ok(()));
    check("", &[(4, "first add_two 4")], Err(&["expected numbers at a multiple of their bytes"]));
}

#[test]
fn deadlocks_are_reported() {
    let dead = Err(&["deadlock"][..]);
    check(INIT, &[(4, "wait 0 0"), (4, "wait 1 0")], dead);
    check(INIT, &[(1, ""), (1, "wait 0 0"), (1, "wait 0 0"), (1, "wait 0 0")], dead);
    // The other partitions have exited.
    check(INIT, &[(4, ""), (4, "wait 0 0"), (4, "first arrive 1")], dead);
    // One arrive too many completes the next phase as well.
    check(INIT, &[(4, "first arrive 0; first arrive 0; sync; wait 0 0")], Err(&["one arrive too many"]));
    // One arrive too few.
    let two = "first init 0 2; first init 1 2";
    check(two, &[(4, "first arrive 1; wait 0 0"), (4, "first arrive 0; wait 1 0")], dead);
    // Consecutive phases of one mbarrier.
    let arrived = &format!("{INIT}; first arrive 0");
    check(arrived, &[(4, "first wait 0 0; first arrive 0"), (4, "wait 0 1")], Ok(()));
    // Copies complete phases as well.
    let load = |b: u32| format!("first expect {b} 4096; first tma {b} {b}; wait {b} 0");
    check(INIT, &[(4, &load(0)), (4, &load(1))], Ok(()));
}

#[test]
fn mbarriers_are_valid_between_init_and_inval() {
    let none = Err(&["no mbarrier is initialized"][..]);
    for step in ["wait 0 0", "first arrive 0", "first inval 0", "first expect 0 4096"] {
        check("", &[(4, step)], none);
    }
    for step in ["wait 0 0", "first arrive 0", "first expect 0 4096"] {
        check("first init 0 1; first inval 0", &[(4, step)], none);
    }
    check("first init 0 1; first inval 0; first init 0 1; first inval 0", &[(4, "")], Ok(()));
    check("first init 0 1; first init 0 1", &[(4, "")], Err(&["at the address of a live mbarrier"]));
    check("first init 0 2; first arrive 0; first inval 0", &[(4, "")], Err(&["in the middle of a phase"]));
    // An mbarrier that one thread initializes and others use needs a block barrier in between.
    check("", &[(4, "first init 0 128; arrive 0")], Err(&["without a block barrier", "no mbarrier is initialized"]));
    // TMA needs a fence after the mbarrier's initialization.
    let load = "first expect 0 4096; first tma 0 0; wait 0 0";
    check("first init 0 1", &[(4, load)], Err(&["without a fence"]));
}

/// Two buffers at the same address.
#[test]
fn overlapping_buffers_conflict() {
    let setup = "first init 0 128";
    let race = Err(&["race"][..]);
    check(setup, &[(4, "write 0; arrive 0"), (4, "wait 0 0; write 0")], Ok(()));
    check(setup, &[(4, "write 0; arrive 0"), (4, "write 0; wait 0 0")], race);
    check(setup, &[(4, "write 0; arrive 0"), (4, "write 1; wait 0 0")], Ok(()));
}
