//! Unsupported code is an error with its kind and location, never a panic.

use super::{Global, Launch, SimError, UnsupportedCode, UnsupportedKind, run, run_in_order};
use std::panic::catch_unwind;

fn kernel(body: &str) -> String {
    format!(
        "define ptx_kernel void @kernel(ptr addrspace(1) %x, i32 %n) #0 {{\nentry:\n  ;@ src/user.rs:7:5\n{body}  ret void\n}}\n"
    )
}

fn simulate(llvm_ir: &str) -> Result<(), SimError> {
    let mut global = Global::default();
    let args = [global.add(vec![0; 256]), 3];
    let launch =
        Launch { llvm_ir, grid: [1; 3], threads: 32, shared_bytes: 256, args: &args, tensor_maps: &[], seed: 0 };
    run_in_order(&launch, &mut global.clone()).and(run(&launch, &mut global))
}

/// The error for a kernel with this line.
fn unsupported(line: &str) -> UnsupportedCode {
    let text = kernel(&format!("  %known = add i32 %n, 1\n  {line}\n"));
    match catch_unwind(|| simulate(&text)).unwrap_or_else(|_| panic!("a panic at {line}")) {
        Err(SimError::Unsupported(unsupported)) => *unsupported,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn every_kind_is_reported_with_its_location() {
    let cases = [
        ("%a = freeze i32 %n", UnsupportedKind::Instruction("freeze".into())),
        ("%a = fadd i32 %n, %n", UnsupportedKind::Instruction("fadd i32".into())),
        (
            "%a = add <2 x i32> zeroinitializer, zeroinitializer",
            UnsupportedKind::Type("<2 x i32> as an integer".into()),
        ),
        ("%a = mul i128 1, 1\n  %b = add i128 %a, 1", UnsupportedKind::Instruction("add i128".into())),
        ("%a = icmp near i32 %n, %n", UnsupportedKind::Instruction("icmp near i32".into())),
        ("%a = fcmp true float 0.0, 0.0", UnsupportedKind::Instruction("fcmp true float".into())),
        ("%a = bitcast i32 %n to i16", UnsupportedKind::Instruction("bitcast i32 to i16".into())),
        ("%a = bitcast <3 x i8> poison to i32", UnsupportedKind::Instruction("bitcast <3 x i8> to i32".into())),
        ("%a = fneg i32 %n", UnsupportedKind::Type("i32 as a float".into())),
        (
            "%a = atomicrmw nand ptr addrspace(1) %x, i32 1 monotonic",
            UnsupportedKind::Instruction("atomicrmw nand i32".into()),
        ),
        ("%a = add i65 %n, 1", UnsupportedKind::Type("i65".into())),
        ("%a = load x86_fp80, ptr addrspace(1) %x", UnsupportedKind::Type("x86_fp80".into())),
        ("%a = load { i32, i32 }, ptr addrspace(1) %x", UnsupportedKind::Type("{ i32, i32 }".into())),
        ("%a = call float @llvm.exp.f32(float 0.0)", UnsupportedKind::Function("llvm.exp.f32".into())),
        (
            "%a = call i32 @llvm.nvvm.read.ptx.sreg.laneid()",
            UnsupportedKind::Function("llvm.nvvm.read.ptx.sreg.laneid".into()),
        ),
        ("%a = call i32 @llvm.smax.i32(i32 %n)", UnsupportedKind::Function("llvm.smax.i32".into())),
        ("%a = call i32 @helper(i32 %n)", UnsupportedKind::Function("helper".into())),
    ];
    for (line, what) in cases {
        let found = unsupported(line);
        assert_eq!(found.kind, what, "{line}");
        assert_eq!((found.function.as_str(), found.source_loc.as_str()), ("kernel", "src/user.rs:7:5"), "{line}");
        let last = line.lines().last().unwrap().trim();
        assert_eq!((found.instruction.as_str(), found.line), (last, 4 + line.lines().count()), "{line}");
        let message = found.to_string();
        assert!(message.starts_with("src/user.rs:7:5: the simulated GPU does not support"), "{message}");
        assert!(message.contains("please report"), "{message}");
    }
}

#[test]
fn malformed_llvm_ir_is_an_error() {
    for line in [
        "%a = add i32 %n",
        "%a = add i32 %n, ?",
        "%a = add i32 0xQ, 1",
        "%a add",
        "%a = insertelement <2 x i32> poison, i32 1",
        "%a = load i32, i32 %n",
        "%a = phi i32 [ 0, %nowhere ]",
        "phi i32 [ 0, %entry ]",
        "br label %nowhere",
        "%a = call i32 asm \"mov.b32 $0, 1;",
        "%a = load i32, ptr addrspace(x) %x",
        "%a = select i1 true, i32 1",
        "store i32 1",
        "%a = extractvalue { i32 } poison, x",
        "%a = call i32 @f(i32 %n",
        "%a = load <x i32>, ptr %x",
        "%a = load [2 x i32, ptr %x",
        "%a = add i32 <i32 1>, 1",
    ] {
        assert!(
            matches!(unsupported(line).kind, UnsupportedKind::Syntax(_) | UnsupportedKind::Type(_)),
            "{line}: {:?}",
            unsupported(line).kind
        );
    }
    for text in [
        "define ptx_kernel void kernel() {\n}\n",
        "define ptx_kernel void @kernel(",
        "define ptx_kernel void @kernel(i32 %n) {\nentry:\n}\n",
        "define ptx_kernel void @kernel(i32 %n) {\nentry:\n  %a = add i32 1, 1\n}\n",
        "define ptx_kernel void @kernel(i32) {\n  ret void\n}\n",
    ] {
        assert!(matches!(catch_unwind(|| simulate(text)), Ok(Err(SimError::Unsupported(_)))), "{text}");
    }
}

#[test]
fn mismatched_launch_is_an_error() {
    for text in ["", "define void @f() {\n  ret void\n}\n", "define ptx_kernel void @kernel(i32 %n) {\n  ret void\n}\n"]
    {
        assert!(matches!(catch_unwind(|| simulate(text)), Ok(Err(SimError::Launch(_)))), "{text}");
    }
}

fn assembly(text: &str) -> String {
    format!("%a = call i32 asm \"{text}\", \"=r,r\"(i32 %n) \"user-asm\"")
}

/// Users' assembly other than arithmetic on registers is rejected, even if the lowering emits the same text.
#[test]
fn inline_assembly() {
    for text in [
        "frobnicate.b32 $0, $1;",
        "add.rx.f32 $0, $1, $1;",
        "bar.sync 0;",
        "ld.global.b32 $0, [$1];",
        "mov.u32 $0, %nctaid.x;",
        "wgmma.fence.sync.aligned;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 $0, $1, $1, $1;",
        "cp.async.wait_group 0;",
        "mbarrier.arrive.shared::cta.b64 _, [$1];",
        "{ .reg .b32 t; vote.sync.ballot.b32 t, 1, 1; }",
    ] {
        let found = unsupported(&assembly(text));
        let message = found.to_string();
        assert!(message.starts_with("src/user.rs:7:5: "), "{message}");
        match found.kind {
            UnsupportedKind::Assembly { statement } => {
                assert!(text.contains(&statement), "{statement}");
                // The message lists the supported instructions.
                assert!(message.contains("abs, add, and,") && message.contains("setp"), "{message}");
            }
            UnsupportedKind::MalformedAssembly { statement, .. } => assert!(text.contains("%nctaid"), "{statement}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    for text in
        ["add.s32 $0, $1, $7;", "add.s32 $0, $1, t;", "add.s32 t, $1, 1;", "@p", ".reg", "mov.b32 $0, {$1, $1, $1};"]
    {
        let found = unsupported(&assembly(text));
        assert!(matches!(found.kind, UnsupportedKind::MalformedAssembly { .. }), "{text}: {:?}", found.kind);
    }
    simulate(&kernel(&format!("  {}\n", assembly("add.rz.f32 $0, $1, $1;")))).unwrap_or_else(|e| panic!("{e}"));
}

/// Truncated assembly of the lowering, or with wrong operands: an error when it is parsed or executed.
#[test]
fn assembly_of_the_lowering_that_is_malformed() {
    let texts = [
        "ld.global.b32 $0, [$1];",
        "@$2 ld.global.b32 $0, [$1];",
        "ld.global.b32 $0, [$9];",
        "ld.global.b32 $0",
        "ld.global",
        "st.global.b32 [$0], $1;",
        "st.shared.b32 [$0], $1;",
        "atom.global.gpu.relaxed.add.f32 $0, [$1], $2;",
        "red.global.gpu.relaxed.add.v4.f32 [$0], {$1};",
        "cp.async.ca.shared.global [$0], [$1], 4, $2;",
        "cp.async.ca.shared.global [$0], [$1];",
        "cp.async.wait_group;",
        "cp.async.wait_group x;",
        "cp.async.bulk.wait_group.read;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], 16;",
        "mbarrier.init.shared::cta.b64 [$0];",
        "mbarrier.init.shared::cta.b64 [$0], 1;",
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        "mbarrier.frobnicate",
        "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again;}",
        "bar.sync 1, x;",
        "bar.arrive",
        "mma.sync.aligned;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0};",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0}, $1, $2, p, 1, 1, 0, 0;",
        "wgmma.wait_group.sync.aligned x;",
        "setmaxnreg.inc.sync.aligned.u32 40;",
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        "mov.u32 $0, %nctaid.w;",
    ];
    for text in texts {
        for (constraints, args) in
            [("", ""), ("r", "i32 %n"), ("=r", ""), ("=r,r", "i32 %n"), ("l", "ptr addrspace(1) %x")]
        {
            let ty = if constraints.starts_with('=') { "i32" } else { "void" };
            let result = if ty == "i32" { "%a = " } else { "" };
            let line = format!("  {result}call {ty} asm sideeffect \"{text}\", \"{constraints}\"({args}) #1\n");
            assert!(catch_unwind(|| simulate(&kernel(&line))).is_ok(), "a panic at {line}");
        }
    }
}

/// Kernels with a part of a line removed or replaced, as a faulty lowering might emit them: an error, or a run.
#[test]
fn damaged_kernels_never_panic() {
    use crate::lower::nvptx::lower;
    use crate::pipeline::gpu_ir;
    use crate::target::{CompileOptions, GpuArch};
    use crate::testgen::Rng;
    let mut rng = Rng::new(11);
    for (text, runs) in [
        (include_str!("programs/attention64.tile"), 0),
        (include_str!("programs/warp_specialized_copy.tile"), 0),
        (include_str!("programs/add_rows.tile"), 300),
    ] {
        let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let options = CompileOptions { num_warps: 4, ..CompileOptions::default() };
        let has_gpu_passes = crate::verify::stage_of(&func) != crate::ir::Stage::Tile;
        let gpu_func = if has_gpu_passes { func } else { gpu_ir(&func, GpuArch::Sm90a, &options, &mut ()) };
        let module = lower(&gpu_func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
        let lines: Vec<&str> = module.llvm_ir.lines().collect();
        let parts = [" ", "%", ",", "i32", "i1", "<2 x float>", "\"", "(", "128", "$7", "[", ";", "@", "=", "x"];
        for i in 0..600 {
            let at = rng.next_u64() as usize % lines.len();
            let line = lines[at];
            let [a, b] = [0; 2].map(|_| rng.next_u64() as usize % (line.len() + 1));
            let (from, to) = (a.min(b), a.max(b).min(a.min(b) + 12));
            let part = parts[rng.next_u64() as usize % parts.len()];
            let Some((head, tail)) = line.get(..from).zip(line.get(to..)) else { continue };
            let damaged = if i % 2 == 0 { format!("{head}{tail}") } else { format!("{head}{part}{tail}") };
            let mut all = lines.clone();
            all[at] = &damaged;
            let text = all.join("\n");
            let outcome = catch_unwind(|| {
                if i >= runs {
                    return super::parse::parse(&text).map(drop);
                }
                let mut global = Global::default();
                let args = [global.add(vec![0; 150 * 32 * 4]), global.add(vec![0; 150 * 32 * 4]), 150];
                let (threads, shared_bytes) = (module.threads, module.shared_bytes);
                let tensor_maps = &module.tensor_maps;
                run(
                    &Launch { llvm_ir: &text, grid: [1; 3], threads, shared_bytes, args: &args, tensor_maps, seed: 0 },
                    &mut global,
                )
            });
            assert!(outcome.is_ok(), "a panic at `{damaged}`, which was `{line}`");
        }
    }
}
