use super::*;
use crate::explain::Trace;
use crate::lower::nvptx::shared_memory;
use crate::pipeline::gpu_ir;
use crate::target::CompileOptions;
use crate::text::parse;

/// The timelines of a loop over 64 × 64 tiles: of its body, where `%av` and `%bv` are views, `%acc` is carried and
/// `%next` its next value. `producer` is the number of stages of a producer's rings.
fn predicted(body: &str, arch: GpuArch, producer: Option<u32>, blocks: u32) -> Vec<Timeline> {
    of_compiled(compiled("", body, arch, producer, blocks))
}

fn of_compiled((func, settings): (Func, Settings)) -> Vec<Timeline> {
    let found = timelines(&func, &settings);
    found.iter().for_each(check);
    found
}

/// The function with that loop, which may have a hint, after all passes.
fn compiled(hint: &str, body: &str, arch: GpuArch, producer: Option<u32>, blocks: u32) -> (Func, Settings) {
    let text = format!(
        "
kernel @k(%a: ptr<bf16> {{divisible_by = 16}}, %b: ptr<bf16> {{divisible_by = 16}}, %c: ptr<f32> {{divisible_by = 16}},
          %n: i32) {{
  %zero = constant {{value = 0}} : i64
  %k = constant {{value = 64}} : i64
  %unit = constant {{value = 1}} : i64
  %cv = make_view %c, %k, %k, %k, %unit, %zero, %zero {{order = [1, 0]}} : view<64x64xf32>
  %none = constant {{value = 0.0}} : tensor<64x64xf32>
  %start = constant {{value = 0}} : i32
  %step = constant {{value = 1}} : i32
  %sum = for %start, %n, %step, %none{hint} : tensor<64x64xf32> (%i: i32, %acc: tensor<64x64xf32>) {{
    %at = cast %i : i64
    %row = mul %at, %k : i64
    %av = make_view %a, %k, %k, %k, %unit, %zero, %row {{order = [1, 0]}} : view<64x64xbf16>
    %bv = make_view %b, %k, %k, %k, %unit, %row, %zero {{order = [1, 0]}} : view<64x64xbf16>
{body}
    yield %next
  }}
  store_view %cv, %sum {{boundary = [], eviction = normal}}
  return
}}
"
    );
    let func = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut options = CompileOptions::default();
    if let Some(stages) = producer {
        options.schedule.warp_specialize = Some(true);
        options.num_stages = stages;
    }
    let mut trace = Trace::new(&func);
    gpu_ir(&func, arch, &options, &mut trace);
    let barriers = shared_memory(trace.last(), arch).barriers;
    let settings = Settings { arch, warps: options.num_warps, blocks, barriers, schedule: trace.schedule() };
    (trace.last().clone(), settings)
}

/// What holds for every timeline.
fn check(of: &Timeline) {
    // A pipe runs one op at a time, and so an interval is at least as long as the work of each pipe.
    for pipe in Pipe::ALL.into_iter().filter(|pipe| *pipe != Pipe::Barrier) {
        let mut spans: Vec<(f64, f64)> =
            of.bars.iter().filter(|bar| bar.pipe == pipe).map(|bar| (bar.begin, bar.end)).collect();
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-6), "{}: {spans:?}", pipe.name());
    }
    let most = of.busy.iter().map(|(_, cycles)| *cycles).fold(0.0, f64::max);
    assert!(of.interval >= most - 1e-6, "{of}");
    assert!(of.bars.iter().all(|bar| bar.end > 0.0 && bar.begin < of.length() && bar.begin < bar.end), "{of}");
}

const MATMUL: &str = "\
    %x = load_view %av {boundary = [], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %y = load_view %bv {boundary = [], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %next = dot %x, %y, %acc {precision = ieee} : tensor<64x64xf32>";

fn busy(of: &Timeline, pipe: Pipe) -> f64 {
    of.busy.iter().find(|(known, _)| *known == pipe).map_or(0.0, |(_, cycles)| *cycles)
}

#[test]
fn a_producer_and_its_consumers_share_a_timeline() {
    let found = predicted(MATMUL, GpuArch::Sm90a, Some(6), 1);
    assert_eq!(found.len(), 1);
    let of = &found[0];
    let partitions: Vec<Partition> = of.groups.iter().map(|group| group.partition).collect();
    assert_eq!(partitions, [Partition::Consumer, Partition::Producer]);
    // 64³ multiply-adds at 2048 per clock; 16 KiB of two tiles at 128 bytes per clock take as long.
    assert_eq!(busy(of, Pipe::Mma), 128.0);
    // 16 KiB from the L2 cache at 5120 / 108 bytes per clock take longer, so copies bound the loop.
    assert_eq!(busy(of, Pipe::Copy).round(), (16384.0f64 * 108.0 / 5120.0).round());
    assert_eq!(of.bound(), Some(Pipe::Copy), "{of}");
    let is_producer = |bar: &Bar| of.groups[bar.group].partition == Partition::Producer;
    assert!(of.bars.iter().all(|bar| bar.pipe != Pipe::Copy || is_producer(bar)), "{of}");
    // Copies of an iteration end before its MMA begins.
    let of_iteration = |pipe: Pipe| of.bars.iter().filter(move |bar| (bar.pipe, bar.iteration) == (pipe, of.first + 1));
    let copied = of_iteration(Pipe::Copy).map(|bar| bar.end).fold(f64::MIN, f64::max);
    let begun = of_iteration(Pipe::Mma).map(|bar| bar.begin).fold(f64::MAX, f64::min);
    assert!(copied < begun && begun < f64::MAX, "{of}");
}

/// Two buffers are too few for the latency of the L2 cache and of TMA.
#[test]
fn deeper_rings_hide_latency() {
    let [shallow, deep] = [2, 6].map(|stages| predicted(MATMUL, GpuArch::Sm90a, Some(stages), 1).remove(0));
    assert_eq!(shallow.bound(), None, "{shallow}");
    assert!(shallow.interval > 1.2 * deep.interval, "{shallow}\n{deep}");
    // A copy waits until the buffer that it fills is released.
    assert_eq!(busy(&shallow, Pipe::Copy), busy(&deep, Pipe::Copy));
}

#[test]
fn blocks_share_the_pipes_of_an_sm() {
    let one = &predicted(MATMUL, GpuArch::Sm90a, Some(6), 1)[0];
    let two = &predicted(MATMUL, GpuArch::Sm90a, Some(6), 2)[0];
    assert_eq!(two.groups.len(), 4);
    assert_eq!(busy(two, Pipe::Copy), 2.0 * busy(one, Pipe::Copy));
    // Neither block is ahead of the other.
    let last = |block: usize| {
        let of = two.bars.iter().filter(|bar| bar.pipe == Pipe::Mma && two.groups[bar.group].block == block);
        of.map(|bar| bar.iteration).max().unwrap_or_default()
    };
    assert!(last(0).abs_diff(last(1)) <= 1, "{two}");
    assert_eq!((one.group_name(0), two.group_name(2)), ("consumer".to_string(), "block 1, consumer".to_string()));
}

#[test]
fn without_a_producer_all_warps_copy_ahead() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let of = &predicted(MATMUL, arch, None, 1)[0];
        assert_eq!(of.groups.len(), 1);
        assert_eq!(of.groups[0].partition, Partition::All);
        // Copies fill the tiles of later iterations than the MMA beside them reads.
        let middle = of.interval..2.0 * of.interval;
        let latest = |pipe: Pipe| {
            let bars = of.bars.iter().filter(|bar| bar.pipe == pipe && middle.contains(&bar.begin));
            bars.map(|bar| bar.iteration).max().unwrap_or_default()
        };
        assert!(latest(Pipe::Copy) > latest(Pipe::Mma), "{of}");
    }
}

/// The prediction of a loop of exponentials, which needs no memory: 4096 results at 16 per clock.
#[test]
fn the_text_of_a_timeline() {
    let of = &predicted("    %next = exp2 %acc : tensor<64x64xf32>", GpuArch::Sm90a, None, 1)[0];
    let (op, first) = (of.bars[0].op.0, of.first);
    let expected = format!(
        "interval 256 cycles; bound: the MUFU pipe, which is busy 100 % of the time
busy MUFU: 256
all warps, MUFU:
  0 to 256: op {op} of iteration {first}
  256 to 512: op {op} of iteration {}
  512 to 768: op {op} of iteration {}
",
        first + 1,
        first + 2
    );
    assert_eq!(of.to_string(), expected);
}

/// A chain of ops on two pipes, where one needs all of the other's result, keeps no pipe busy all the time.
#[test]
fn dependences_bound_a_chain() {
    let chain = "\
    %m = reduce %acc {axis = 1} : tensor<64xf32> (%p: f32, %q: f32) {
      %r = max %p, %q : f32
      yield %r
    }
    %e = expand_dims %m {axis = 1} : tensor<64x1xf32>
    %w = broadcast %e : tensor<64x64xf32>
    %d = sub %acc, %w : tensor<64x64xf32>
    %next = exp2 %d : tensor<64x64xf32>";
    let of = &predicted(chain, GpuArch::Sm90a, None, 1)[0];
    assert_eq!(of.bound(), None, "{of}");
    assert!(of.bound_in_words().starts_with("dependences between ops"), "{}", of.bound_in_words());
    let reduce = of.bars.iter().find(|bar| bar.pipe == Pipe::Alu && bar.begin >= 0.0).unwrap();
    let exponential = of.bars.iter().find(|bar| bar.pipe == Pipe::Special && bar.begin > reduce.begin).unwrap();
    // 4096 maxima at 64 per clock, then shuffles.
    assert_eq!(reduce.end - reduce.begin, 64.0);
    assert!(exponential.begin > reduce.end + crate::analysis::costs::SHARED_LATENCY, "{of}");
}

#[test]
fn slots_that_a_loop_carries_lag_behind() {
    let text = "
kernel @k(%n: i32) {
  %0 = constant {value = 0} : i32
  %1 = constant {value = 1} : i32
  %2, %3, %4 = for %0, %n, %1, %0, %0, %0 : i32, i32, i32 (%i: i32, %slot: i32, %last: i32, %older: i32) {
    %5 = add %slot, %1 : i32
    yield %5, %slot, %last
  }
  return
}
";
    let func = parse(text).unwrap();
    let found = func.walk().into_iter().find(|&id| matches!(func.op(id).op, Op::For { .. })).unwrap();
    let region = func.op(found).regions[0];
    let params = &func.block(region).params;
    let next = func.op(func.terminator(region)).operands[0];
    let lags = [params[1], params[2], params[3], next, params[0]].map(|v| steps::lag(&func, region, v));
    assert_eq!(lags, [0, 1, 2, -1, 0]);
}

/// Programs that share a block have tiles of their own: each takes the tensor cores for all of its products.
#[test]
fn programs_that_share_a_block_have_whole_tiles() {
    let one = predicted(MATMUL, GpuArch::Sm90a, Some(6), 1);
    let three = of_compiled(compiled(" {replicas = 3}", MATMUL, GpuArch::Sm90a, Some(6), 1));
    assert_eq!((one[0].groups.len(), three[0].groups.len()), (2, 4));
    assert_eq!(busy(&three[0], Pipe::Mma), 3.0 * busy(&one[0], Pipe::Mma));
}

/// Events of a consumer and its producer in five iterations of 1000 cycles, where a `wgmma` is waited for in the next
/// iteration: their exact bars.
#[test]
fn clocks_become_bars() {
    use crate::target::clocks::{Event, Moment};
    let (func, settings) = compiled("", MATMUL, GpuArch::Sm90a, Some(6), 2);
    let groups = groups_of_programs(&func, innermost(&func)[0].0, Partition::Consumer, &settings, u32::MAX);
    let [consumer, producer] = [0, 1].map(|group| groups[group].op);
    let find = |id: OpId, is: &dyn Fn(&Op) -> bool| {
        let body = func.walk_from(func.op(id).regions[0]);
        body.into_iter().find(|&id| is(&func.op(id).op)).expect("an op of the loop")
    };
    let full = find(consumer, &|op| *op == Op::MbarrierWait);
    let dot = find(consumer, &|op| matches!(op, Op::Wgmma { .. }));
    let wait = find(consumer, &|op| matches!(op, Op::WgmmaWait { pending: 1 }));
    let copy = find(producer, &|op| matches!(op, Op::TmaLoad { .. }));
    let event = |op: OpId, moment, clock| Event { op: op.0, moment, clock };
    let span = |op, begin, end| [event(op, Moment::Begin, begin), event(op, Moment::End, end)];
    // From before the first event of the record on.
    let starts = || (0..5).map(|i| 1000 * i - 300);
    let mut own = vec![event(consumer, Moment::Begin, -2000), event(consumer, Moment::End, -1500)];
    for start in starts() {
        own.push(event(consumer, Moment::Begin, start));
        own.extend(span(full, start + 100, start + 150).into_iter().chain(span(dot, start + 200, start + 250)));
        own.extend(span(wait, start + 300, start + 900));
    }
    own.push(event(consumer, Moment::End, 4700));
    let copies = starts().flat_map(|start| {
        std::iter::once(event(producer, Moment::Begin, start)).chain(span(copy, start + 10, start + 30))
    });
    let mut copies: Vec<Event> = copies.collect();
    // The run of one iteration before.
    copies.splice(0..0, [event(producer, Moment::Begin, -2000), event(producer, Moment::End, -1500)]);
    let [of] = &measured(&func, &settings, &[own.clone(), copies])[..] else { panic!("one loop") };
    assert_eq!((of.iterations, of.mean, of.timeline.interval, of.timeline.first), (5, 1000.0, 1000.0, 0));
    let bars = |group: usize, pipe: Pipe| {
        let of_row = of.timeline.bars.iter().filter(move |bar| (bar.group, bar.pipe) == (group, pipe));
        of_row.map(|bar| (bar.op, bar.iteration, bar.begin, bar.end)).collect::<Vec<_>>()
    };
    let expected: Vec<_> = (0..3).map(|i| (dot, i, 1000.0 * i as f64 + 200.0, 1000.0 * i as f64 + 1900.0)).collect();
    assert_eq!(bars(0, Pipe::Mma), expected);
    let waits = [(full, 100.0, 150.0), (wait, 300.0, 900.0)];
    let of_op = |op: OpId| bars(0, Pipe::Barrier).into_iter().filter(move |bar| bar.0 == op).collect::<Vec<_>>();
    for (op, begin, end) in waits {
        let found: Vec<(f64, f64)> = of_op(op).into_iter().map(|(_, _, begin, end)| (begin, end)).collect();
        assert_eq!(found, [0.0, 1000.0, 2000.0].map(|start| (start + begin, start + end)));
    }
    let copied: Vec<(usize, f64)> = bars(1, Pipe::Copy).into_iter().map(|(_, i, begin, _)| (i, begin)).collect();
    assert_eq!(copied, [(0, 10.0), (1, 1010.0), (2, 2010.0)]);
    assert_eq!(of.timeline.busy, [(Pipe::Barrier, 650.0)]);
    // Too few iterations, and clocks that stand still.
    assert_eq!(measured(&func, &settings, &[own[..17].to_vec()]), []);
    let still = own.iter().map(|event| Event { clock: 7, ..*event }).collect();
    assert_eq!(measured(&func, &settings, &[still]), []);
    assert_eq!(measured(&func, &settings, &[]), []);
}
