//! Small problems against enumeration of all schedules, and the errors.

use super::*;
use tilewright_codegen::analysis::pipes::Pipe;
use tilewright_codegen::ir::{Loc, OpId};
use tilewright_codegen::schedule::problem::{Cause, Edge, Node, Slot, Task};

fn node(number: u32, pipe: Pipe, busy: u32, latency: u32) -> Node {
    Node {
        op: OpId(number),
        mnemonic: "op",
        loc: Loc::unknown(),
        task: Task::Compute,
        pipe,
        busy,
        latency,
        can_be_behind: true,
        can_defer: false,
        behind: false,
        deferred: false,
        position: number as usize,
    }
}

fn edge(from: usize, to: usize, delay: u32, distance: u32) -> Edge {
    Edge { from, to, cause: Cause::Value, delay, distance, all_groups: false }
}

fn problem(nodes: Vec<Node>, edges: Vec<Edge>) -> Problem {
    Problem {
        op: OpId(0),
        loc: Loc::unknown(),
        groups: 1,
        warps: 4,
        blocks: 1,
        producer: false,
        nodes,
        edges,
        stages_ahead: 0,
        depth: 0,
        depth_limit: 0,
        ring_bytes: 0,
        registers: None,
        register_floor: 0,
        tiles: Vec::new(),
    }
}

fn solved(problem: &Problem) -> Found {
    solve(problem, &|_| 0, Limits::default()).unwrap_or_else(|e| panic!("{e}\n{problem}"))
}

/// Whether a schedule of one group is right, from the definition: in unrolled time, every op of every iteration.
fn is_right(problem: &Problem, interval: u32, slots: &[Slot]) -> bool {
    let start = |node: usize, iteration: u32| slots[node].at + interval * (iteration + u32::from(slots[node].behind));
    let ordered = problem.edges.iter().all(|e| {
        start(e.to, 4 + e.distance) >= start(e.from, 4) + e.delay && (!slots[e.from].behind || slots[e.to].behind)
    });
    // An iteration of the loop's body ends with all of its ops.
    let in_body = problem.nodes.iter().zip(slots).all(|(node, slot)| slot.at + node.busy <= interval);
    let exclusive = (0..slots.len()).all(|a| {
        (0..slots.len()).all(|b| {
            let (x, y) = (&problem.nodes[a], &problem.nodes[b]);
            let apart = |i: u32, j: u32| start(a, i) + x.busy <= start(b, j) || start(b, j) + y.busy <= start(a, i);
            a == b || x.pipe != y.pipe || (2..5).all(|i| (2..5).all(|j| apart(i, j)))
        })
    });
    ordered && in_body && exclusive
}

/// The least interval, by enumeration.
fn least(problem: &Problem) -> u32 {
    let count = problem.nodes.len();
    (1..)
        .find(|&interval| {
            let choices = (2 * interval as usize).pow(count as u32);
            (0..choices).any(|mut code| {
                let mut slots = Vec::new();
                for _ in 0..count {
                    let digit = code % (2 * interval as usize);
                    code /= 2 * interval as usize;
                    slots.push(Slot { behind: digit % 2 == 1, deferred: false, at: digit as u32 / 2, wait: None });
                }
                is_right(problem, interval, &slots)
            })
        })
        .unwrap_or(0)
}

#[test]
fn intervals_are_those_of_enumeration() {
    // A linear congruential generator: the cases are the same on every machine.
    let mut state = 7u32;
    let mut next = |limit: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % limit
    };
    for case in 0..60 {
        let nodes: Vec<Node> = (0..3)
            .map(|i| node(i, if next(2) == 0 { Pipe::Alu } else { Pipe::Special }, 1 + next(3), next(3)))
            .collect();
        let delay = |from: usize, nodes: &[Node]| nodes[from].busy + nodes[from].latency;
        let mut edges = vec![edge(0, 1, delay(0, &nodes), 0), edge(1, 2, delay(1, &nodes), next(2))];
        if next(2) == 0 {
            edges.push(edge(2, next(2) as usize, delay(2, &nodes), 1));
        }
        let problem = problem(nodes, edges);
        let found = solved(&problem);
        assert_eq!(found.solution.interval, least(&problem), "case {case}\n{problem}");
        assert!(found.is_optimal(), "case {case}\n{problem}");
        let slots: Vec<Slot> = found.solution.slots.iter().flatten().copied().collect();
        assert!(is_right(&problem, found.solution.interval, &slots), "case {case}\n{problem}\n{slots:?}");
        problem.check(&found.solution).unwrap_or_else(|e| panic!("case {case}: {e}\n{problem}"));
    }
}

/// Two groups, each with products of 100 cycles before and after 120 cycles of arithmetic: one group's arithmetic runs
/// under the products of the other, and the pipe of the products is always busy.
#[test]
fn groups_alternate() {
    let mma = |number| Node { task: Task::Mma, ..node(number, Pipe::Mma, 100, 10) };
    let nodes = vec![mma(0), node(1, Pipe::Special, 120, 10), mma(2)];
    let mut problem = problem(nodes, vec![edge(0, 1, 0, 0), edge(1, 2, 130, 0)]);
    let alone = solved(&problem);
    problem.groups = 2;
    let both = solved(&problem);
    // Alone: the first product with its latency, then the arithmetic, during which the warps issue and wait for nothing.
    assert_eq!((alone.solution.interval, both.solution.interval), (230, 400));
    assert_eq!((both.bound, both.bounds.interval()), (400, 400));
}

/// Without the registers to run an op behind the main stage, the best schedule is the serial one.
#[test]
fn registers_limit_the_ops_behind() {
    let nodes = vec![node(0, Pipe::Special, 10, 5), node(1, Pipe::Alu, 10, 5)];
    let mut problem = problem(nodes, vec![edge(0, 1, 15, 0)]);
    // One stage behind: the second op begins within two intervals, 15 cycles after the first, and ends with the second.
    assert_eq!(solved(&problem).solution.interval, 13);
    problem.registers = Some(100);
    let pressure = |behind: &[bool]| if behind.contains(&true) { 101 } else { 50 };
    let found = solve(&problem, &pressure, Limits::default()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((found.solution.interval, found.bound), (25, 25));
}

#[test]
fn errors_say_which_constraint() {
    let fails = |problem: &Problem, limits: Limits| solve(problem, &|_| 0, limits).map(|_| ()).unwrap_err();
    let mut problem = problem(vec![node(0, Pipe::Alu, 10, 5)], Vec::new());
    let none = Limits { time: Duration::ZERO };
    assert_eq!(fails(&problem, none), "no schedule was found in 0 s; none is shorter than 10 cycles");
    (problem.registers, problem.register_floor) = (Some(60), 64);
    let error = fails(&problem, Limits::default());
    assert!(error.contains("registers: ") && error.contains("take 64 registers per thread"), "{error}");
    (problem.registers, problem.depth, problem.ring_bytes) = (None, 3, 4096);
    let error = fails(&problem, Limits::default());
    assert!(error.contains("shared memory: rings of 3 buffers with 4096 bytes"), "{error}");
    problem.nodes.clear();
    let error = fails(&problem, Limits::default());
    assert!(error.contains("there is nothing to schedule"), "{error}");
}
