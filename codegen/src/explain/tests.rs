use super::*;
use crate::lower::nvptx::{Contents, shared_memory};
use crate::pipeline::{gpu_ir, lower_gpu};
use crate::target::{CompileOptions, GpuArch};
use crate::text::{parse, print};

/// A kernel of a loop with a dot, for all passes of the GPU pipeline. Locations are line numbers of the text.
fn sample() -> Func {
    let text = "
kernel @k(%a: ptr<bf16> {divisible_by = 16}, %b: ptr<bf16> {divisible_by = 16}, %c: ptr<f32> {divisible_by = 16},
          %n: i32) {
  %0 = constant {value = 0} : i64
  %1 = constant {value = 64} : i64
  %2 = constant {value = 1} : i64
  %3 = make_view %a, %1, %1, %1, %2, %0, %0 {order = [1, 0]} : view<64x64xbf16>
  %4 = make_view %b, %1, %1, %1, %2, %0, %0 {order = [1, 0]} : view<64x64xbf16>
  %5 = make_view %c, %1, %1, %1, %2, %0, %0 {order = [1, 0]} : view<64x64xf32>
  %6 = constant {value = 0.0} : tensor<64x64xf32>
  %7 = constant {value = 0} : i32
  %8 = constant {value = 1} : i32
  %9 = for %7, %n, %8, %6 : tensor<64x64xf32> (%10: i32, %11: tensor<64x64xf32>) {
    %12 = load_view %3 {boundary = [], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %13 = load_view %4 {boundary = [], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %14 = dot %12, %13, %11 {precision = ieee} : tensor<64x64xf32>
    %15 = exp2 %14 : tensor<64x64xf32>
    yield %15
  }
  store_view %5, %9 {boundary = [], eviction = normal}
  return
}
";
    let mut func = parse(text).unwrap_or_else(|error| panic!("{error}"));
    for (line, id) in func.walk().into_iter().enumerate() {
        func.set_loc(id, Loc { file: "k.rs".into(), line: line as u32 + 2, column: 1 });
    }
    func
}

fn trace() -> Trace {
    let func = sample();
    let mut trace = Trace::new(&func);
    gpu_ir(&func, GpuArch::Sm90a, &CompileOptions::default(), &mut trace);
    trace
}

#[test]
fn snapshots_have_each_op_once_and_are_the_functions_text() {
    let trace = trace();
    assert!(trace.snapshots().len() > 20 && trace.snapshots()[0].pass == Trace::RECORDED);
    for Snapshot { pass, lines, .. } in trace.snapshots() {
        let text: String = lines.iter().map(|line| format!("{}{}\n", "  ".repeat(line.depth), line.text)).collect();
        let func = parse(&text).unwrap_or_else(|error| panic!("{pass}: {error}\n{text}"));
        let ops: Vec<&IrOp> = lines.iter().filter_map(|line| line.op.as_ref()).collect();
        assert_eq!(ops.len(), func.walk().len(), "{pass}");
        let mut numbers: Vec<u32> = ops.iter().map(|op| op.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), ops.len(), "{pass}: two ops have one number");
    }
    let last = trace.snapshots().last().unwrap();
    let ops = last.lines.iter().filter_map(|line| line.op.as_ref()).map(|op| op.op);
    assert_eq!(ops.collect::<Vec<_>>(), trace.last().walk());
    let text: String = last.lines.iter().map(|line| format!("{}\n", line.text)).collect();
    assert_eq!(print(&parse(&text).unwrap()), print(trace.last()));
}

/// Layout assignment builds a new function; the others edit it.
#[test]
fn ops_keep_their_numbers_and_values_their_names() {
    let trace = trace();
    let of = |pass: &str, mnemonic: &str| {
        let snapshot = trace.snapshots().iter().find(|snapshot| snapshot.pass == pass).unwrap();
        let line = snapshot.lines.iter().find(|line| line.text.contains(&format!("{mnemonic} "))).unwrap();
        (line.op.as_ref().unwrap().number, line.text.split([' ', ',']).next().unwrap().to_string())
    };
    let recorded = of(Trace::RECORDED, "exp2");
    for pass in ["cse", "dce", "assign_layouts", "dce_layout", "pingpong"] {
        assert_eq!(of(pass, "exp2"), recorded, "{pass}");
    }
    assert_eq!(of("pingpong", "for"), of(Trace::RECORDED, "for"));
}

#[test]
fn loops_list_the_pipes_of_their_ops() {
    let trace = trace();
    let found = loops(trace.last());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].partition, Partition::All);
    let pipe = |mnemonic: &str| found[0].ops.iter().find(|op| op.mnemonic == mnemonic).and_then(|op| op.pipe);
    assert_eq!(pipe("wgmma"), Some(Pipe::Mma));
    assert_eq!(pipe("async_copy"), Some(Pipe::Copy));
    assert_eq!(pipe("exp2"), Some(Pipe::Special));
    assert_eq!(pipe("wgmma_wait"), Some(Pipe::Barrier));
}

#[test]
fn warp_specialized_loops_belong_to_a_partition() {
    let func = sample();
    let mut options = CompileOptions::default();
    options.schedule.warp_specialize = Some(true);
    let mut trace = Trace::new(&func);
    gpu_ir(&func, GpuArch::Sm90a, &options, &mut trace);
    let found = loops(trace.last());
    let partitions: Vec<Partition> = found.iter().map(|of| of.partition).collect();
    assert_eq!(partitions, [Partition::Consumer, Partition::Producer], "{:?}", trace.notes());
    assert!(found[1].ops.iter().any(|op| op.pipe == Some(Pipe::Copy)));
    assert!(found[0].ops.iter().all(|op| op.pipe != Some(Pipe::Copy)));
    assert_eq!(super::partitions(trace.last()).len(), trace.last().walk().len());
}

#[test]
fn layouts_are_listed_once_with_the_ops_that_define_them() {
    let trace = trace();
    let func = trace.last();
    let uses = layouts(func);
    let mut seen: Vec<_> = uses.iter().map(|of| (of.layout, of.elem)).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), uses.len());
    for of in &uses {
        assert_eq!(func.layout(of.layout).is_shared(), of.elem.is_some());
        assert!(!of.ops.is_empty());
    }
    assert!(uses.iter().any(|of| of.elem == Some(DType::BF16)), "the ring of the loads");
}

#[test]
fn shared_memory_is_what_the_lowering_allocates() {
    let func = sample();
    for warp_specialize in [None, Some(true)] {
        let mut options = CompileOptions::default();
        options.schedule.warp_specialize = warp_specialize;
        let mut trace = Trace::new(&func);
        let (manifest, _) = lower_gpu(&func, GpuArch::Sm90a, &options, &mut trace).unwrap();
        let shared = shared_memory(trace.last(), GpuArch::Sm90a);
        assert_eq!(shared.bytes, manifest.shared_bytes);
        assert_eq!(shared.parts.iter().map(|part| part.offset + part.bytes).max(), Some(shared.bytes));
        // Two operands of 64 × 64 bf16, in rings of three stages.
        let rings = shared.parts.iter().filter(|part| part.contents == Contents::Ring);
        assert_eq!(rings.map(|part| part.bytes).collect::<Vec<_>>(), [3 * 64 * 64 * 2; 2]);
        for (i, a) in shared.parts.iter().enumerate() {
            assert!(a.first <= a.last && a.last < trace.last().walk().len());
            for b in &shared.parts[i + 1..] {
                let live_together = a.first <= b.last && b.first <= a.last;
                let overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
                assert!(!(live_together && overlap), "{a:?} and {b:?}");
            }
        }
    }
}
