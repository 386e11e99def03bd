//! The constraints of a schedule with a given interval.

use std::time::{Duration, Instant};

use pumpkin_conflict_resolvers::resolvers::ResolutionResolver;
use pumpkin_constraints as constraints;
use pumpkin_core::Solver;
use pumpkin_core::constraints::Constraint;
use pumpkin_core::predicate;
use pumpkin_core::predicates::Predicate;
use pumpkin_core::proof::ConstraintTag;
use pumpkin_core::results::{ProblemSolution, SatisfactionResult};
use pumpkin_core::termination::TimeBudget;
use pumpkin_core::variables::{AffineView, DomainId, Literal, TransformableVariable};
use tilewright_codegen::schedule::problem::{Cause, Event, Node, Point, Problem, Slot, Solution, Task};

/// The answer for one interval.
pub enum Answer {
    Found(Solution),
    /// There is no schedule of this interval.
    Impossible,
    /// The time ran out.
    Unknown,
}

/// What a schedule must have beside the constraints of its problem.
pub struct Demand<'a> {
    pub interval: u32,
    /// Buffers per ring.
    pub depth: u32,
    /// The maximum number of nodes behind the main stage.
    pub behind: usize,
    /// Keeps the stages, deferred waits and issue order that the function has.
    pub keep: bool,
    /// Sets of nodes behind the main stage that take too many registers.
    pub refused: &'a [Vec<bool>],
}

/// Cycles from a time that the schedule repeats to the beginning of the body, at most, in intervals.
const REPETITIONS: i32 = 3;

/// The variables of a node. Times count from the beginning of the loop's body.
#[derive(Clone, Copy)]
struct Vars {
    /// Begins to execute.
    begin: DomainId,
    /// Of a `wgmma`; of others, the beginning.
    issue: DomainId,
    wait: DomainId,
    /// 1: runs behind the main stage.
    behind: DomainId,
    /// 1: the wait is left to the next iteration.
    deferred: DomainId,
}

struct Model<'a> {
    problem: &'a Problem,
    demand: &'a Demand<'a>,
    interval: i32,
    solver: Solver,
    nodes: Vec<Vars>,
    /// Cycles by which each group of warps of the SM is later than the first, blocks first.
    phases: Vec<Vec<DomainId>>,
    tag: ConstraintTag,
}

/// Finds a schedule of this interval, or proves that there is none.
pub fn schedule(problem: &Problem, demand: &Demand, end: Instant) -> Answer {
    let mut model = Model::new(problem, demand);
    model.constrain();
    let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| *left > Duration::ZERO) else {
        return Answer::Unknown;
    };
    if model.solver.is_inconsistent() {
        return Answer::Impossible;
    }
    let mut brancher = model.solver.default_brancher();
    let mut resolver = ResolutionResolver::default();
    let Model { mut solver, nodes, .. } = model;
    match solver.satisfy(&mut brancher, &mut TimeBudget::starting_now(left), &mut resolver) {
        SatisfactionResult::Satisfiable(found) => {
            let found = found.solution();
            Answer::Found(solution(problem, demand, &nodes, &|v| found.get_integer_value(v)))
        }
        SatisfactionResult::Unsatisfiable(..) => Answer::Impossible,
        SatisfactionResult::Unknown(..) => Answer::Unknown,
    }
}

/// The schedule that the values of the variables say.
fn solution(problem: &Problem, demand: &Demand, nodes: &[Vars], value: &dyn Fn(DomainId) -> i32) -> Solution {
    let time = |v| u32::try_from(value(v)).unwrap_or(0);
    let slot = |(vars, node): (&Vars, &Node)| {
        let deferred = value(vars.deferred) == 1;
        let wait = (node.task == Task::Mma && !deferred).then(|| time(vars.wait));
        let slot = Slot { behind: value(vars.behind) == 1, deferred, at: time(vars.issue), wait };
        (node.task != Task::Copy).then_some(slot)
    };
    let slots = nodes.iter().zip(&problem.nodes).map(slot).collect();
    Solution { interval: demand.interval, slots, depth: demand.depth }
}

/// A term of a linear constraint.
type Term = AffineView<DomainId>;

impl Model<'_> {
    fn new<'a>(problem: &'a Problem, demand: &'a Demand<'a>) -> Model<'a> {
        let interval = demand.interval as i32;
        let mut solver = Solver::default();
        let ahead = -interval * (demand.depth.max(problem.stages_ahead) as i32 + 1);
        // All warps meet at a barrier at the beginning of an iteration in which they load.
        let first = if problem.producer || problem.stages_ahead == 0 { 0 } else { problem.barrier() as i32 };
        let flag = |solver: &mut Solver, open: bool, given: bool| match (demand.keep, open) {
            (true, _) => solver.new_bounded_integer(i32::from(given), i32::from(given)),
            (false, open) => solver.new_bounded_integer(0, i32::from(open)),
        };
        let nodes = problem.nodes.iter().map(|node| {
            let behind = flag(&mut solver, node.can_be_behind, node.behind);
            let deferred = flag(&mut solver, node.can_defer, node.deferred);
            let busy = node.busy as i32;
            match node.task {
                Task::Copy => {
                    let begin = solver.new_bounded_integer(ahead, interval);
                    Vars { begin, issue: begin, wait: begin, behind, deferred }
                }
                Task::Read | Task::Compute => {
                    let begin = solver.new_bounded_integer(first, (interval - busy).max(first));
                    Vars { begin, issue: begin, wait: begin, behind, deferred }
                }
                Task::Mma => Vars {
                    begin: solver.new_bounded_integer(first, 2 * interval),
                    issue: solver.new_bounded_integer(first, interval),
                    wait: solver.new_bounded_integer(first, interval),
                    behind,
                    deferred,
                },
            }
        });
        let nodes = nodes.collect();
        let mut phase = |first: bool| solver.new_bounded_integer(0, if first { 0 } else { interval - 1 });
        let phases = (0..problem.blocks)
            .map(|block| (0..problem.groups).map(|group| phase(block == 0 && group == 0)).collect())
            .collect();
        let tag = solver.new_constraint_tag();
        Model { problem, demand, interval, solver, nodes, phases, tag }
    }

    fn constrain(&mut self) {
        // Variables first: none can be added to a contradiction.
        let pairs = self.pairs();
        self.dependences();
        self.stages();
        for pair in pairs {
            self.post_pair(pair);
        }
        for refused in self.demand.refused {
            let other = self.nodes.iter().zip(refused).zip(&self.problem.nodes).filter(|(_, node)| node.can_be_behind);
            let clause: Vec<Predicate> = other
                .map(|((vars, &behind), _)| match behind {
                    true => predicate!(vars.behind <= 0),
                    false => predicate!(vars.behind >= 1),
                })
                .collect();
            self.solver.add_clause(clause, self.tag);
        }
    }

    /// Posts Σ terms ≤ limit.
    fn at_most(&mut self, terms: Vec<Term>, limit: i32) {
        if !self.solver.is_inconsistent() {
            constraints::less_than_or_equals(terms, limit, self.tag).post(&mut self.solver);
        }
    }

    /// Posts literal → Σ terms ≤ limit.
    fn at_most_if(&mut self, literal: Literal, terms: Vec<Term>, limit: i32) {
        if !self.solver.is_inconsistent() {
            constraints::less_than_or_equals(terms, limit, self.tag).implied_by(&mut self.solver, literal);
        }
    }

    /// The time of an event as terms, in cycles from the beginning of the iteration of the source loop.
    fn time(&self, event: Event, sign: i32) -> Vec<Term> {
        let vars = self.nodes[event.node];
        let stage = |v: DomainId| v.scaled(sign * self.interval);
        match event.point {
            Point::Issue => vec![vars.issue.scaled(sign), stage(vars.behind)],
            Point::Begin => vec![vars.begin.scaled(sign), stage(vars.behind)],
            Point::Wait => vec![vars.wait.scaled(sign), stage(vars.behind), stage(vars.deferred)],
        }
    }

    fn dependences(&mut self) {
        for order in self.problem.orders(self.demand.depth) {
            let limit = order.distance as i32 * self.interval - order.delay as i32;
            let terms = [self.time(order.from, 1), self.time(order.to, -1)].concat();
            self.at_most(terms.clone(), limit);
            if !order.all_groups {
                continue;
            }
            // A copy has the phase of its block's first group.
            let groups = |event: Event| match self.problem.nodes[event.node].task {
                Task::Copy => 1,
                Task::Read | Task::Mma | Task::Compute => self.problem.groups as usize,
            };
            for block in self.phases.clone() {
                for from in 0..groups(order.from) {
                    for to in (0..groups(order.to)).filter(|&to| to != from) {
                        let phases = vec![block[from].scaled(1), block[to].scaled(-1)];
                        self.at_most([terms.clone(), phases].concat(), limit);
                    }
                }
            }
        }
        let copies: Vec<usize> = (0..self.nodes.len())
            .filter(|&i| self.problem.nodes[i].task == Task::Copy && !self.problem.producer)
            .collect();
        for copy in copies {
            // Issued some iterations before, complete when the iteration begins.
            let node = &self.problem.nodes[copy];
            let time = (node.busy + node.latency) as i32;
            let begin = self.nodes[copy].begin;
            self.at_most(vec![begin.scaled(1)], -time);
            self.at_most(vec![begin.scaled(-1)], self.problem.stages_ahead as i32 * self.interval);
        }
    }

    /// Rules about stages: what uses a result of an op behind is behind, and what the tiles between stages take.
    fn stages(&mut self) {
        let is_copy = |node: usize| self.problem.nodes[node].task == Task::Copy;
        for edge in &self.problem.edges {
            let is_value = matches!(edge.cause, Cause::Value | Cause::Accumulate);
            if is_value && edge.from != edge.to && !is_copy(edge.from) && !is_copy(edge.to) {
                let [from, to] = [edge.from, edge.to].map(|node| self.nodes[node].behind);
                self.at_most(vec![from.scaled(1), to.scaled(-1)], 0);
            }
        }
        let open = |v: &DomainId, solver: &Solver| solver.upper_bound(v) > 0;
        let deferred: Vec<DomainId> = self.nodes.iter().map(|vars| vars.deferred).collect();
        let behind: Vec<DomainId> = self.nodes.iter().map(|vars| vars.behind).collect();
        let all: Vec<Term> = behind.iter().map(|v| v.scaled(1)).collect();
        self.at_most(all, self.demand.behind as i32);
        for (number, wait) in deferred.iter().enumerate().filter(|(_, v)| open(v, &self.solver)).collect::<Vec<_>>() {
            for stage in behind.iter().filter(|v| open(v, &self.solver)).copied().collect::<Vec<_>>() {
                self.at_most(vec![wait.scaled(1), stage.scaled(1)], 1);
            }
            // The next iteration has issued its own before it waits.
            let Vars { issue, wait: time, .. } = self.nodes[number];
            let terms = vec![issue.scaled(1), time.scaled(-1), wait.scaled(self.interval)];
            self.at_most(terms, self.interval);
        }
    }

    /// Pairs of which one is before the other, with the literals or repetitions that say which.
    fn pairs(&mut self) -> Vec<Pair> {
        let nodes = &self.problem.nodes;
        let mut found = Vec::new();
        for a in 0..nodes.len() {
            for b in 0..nodes.len() {
                let is_copy = [a, b].map(|node| nodes[node].task == Task::Copy);
                if is_copy != [false; 2] {
                    continue;
                }
                let shares = nodes[a].pipe == nodes[b].pipe && nodes[a].busy > 0 && nodes[b].busy > 0;
                if a < b && shares {
                    let is_first = self.solver.new_literal();
                    found.push(Pair::Same { a, b, is_first });
                }
                if nodes[a].task == Task::Mma && nodes[b].task != Task::Mma && nodes[b].busy > 0 {
                    for point in [Point::Issue, Point::Wait] {
                        let is_first = self.solver.new_literal();
                        found.push(Pair::Point { event: Event { node: a, point }, op: b, is_first });
                    }
                }
            }
        }
        let groups: Vec<DomainId> = self.phases.iter().flatten().copied().collect();
        let blocks: Vec<DomainId> = self.phases.iter().map(|groups| groups[0]).collect();
        for a in 0..nodes.len() {
            for b in 0..nodes.len() {
                if nodes[a].pipe != nodes[b].pipe || nodes[a].busy == 0 || nodes[b].busy == 0 {
                    continue;
                }
                let is_copy = nodes[a].task == Task::Copy;
                let runners = if is_copy { &blocks } else { &groups };
                for (i, &first) in runners.iter().enumerate() {
                    for &second in &runners[i + usize::from(!is_copy || a >= b)..] {
                        let far = REPETITIONS + if is_copy { self.demand.depth as i32 + 1 } else { 0 };
                        let repetitions = self.solver.new_bounded_integer(-far, far);
                        found.push(Pair::Other { a, b, first, second, repetitions });
                    }
                }
            }
        }
        found
    }

    fn post_pair(&mut self, pair: Pair) {
        let busy = |node: usize| self.problem.nodes[node].busy as i32;
        match pair {
            Pair::Same { a, b, is_first } => {
                let is_mma = |node: usize| self.problem.nodes[node].task == Task::Mma;
                for (first, second, literal) in [(a, b, is_first), (b, a, !is_first)] {
                    let [x, y] = [first, second].map(|node| self.nodes[node]);
                    self.at_most_if(literal, vec![x.begin.scaled(1), y.begin.scaled(-1)], -busy(first));
                    if is_mma(first) && is_mma(second) {
                        // In the order of their issue, and before the next iteration's.
                        self.at_most_if(literal, vec![x.issue.scaled(1), y.issue.scaled(-1)], 0);
                        let next = vec![y.begin.scaled(1), x.begin.scaled(-1)];
                        self.at_most_if(literal, next, self.interval - busy(second));
                    }
                }
                self.keep(is_first, a, b);
            }
            Pair::Point { event, op, is_first } => {
                let time = match event.point {
                    Point::Wait => self.nodes[event.node].wait,
                    Point::Issue | Point::Begin => self.nodes[event.node].issue,
                };
                let begin = self.nodes[op].begin;
                self.at_most_if(is_first, vec![time.scaled(1), begin.scaled(-1)], 0);
                self.at_most_if(!is_first, vec![begin.scaled(1), time.scaled(-1)], -busy(op));
                if event.point == Point::Issue {
                    self.keep(is_first, event.node, op);
                }
            }
            Pair::Other { a, b, first, second, repetitions } => {
                let [x, y] = [a, b].map(|node| self.nodes[node].begin);
                let interval = self.interval;
                let offset = |sign: i32| {
                    let phases = [first.scaled(sign), second.scaled(-sign)];
                    let begins = [x.scaled(sign), y.scaled(-sign)];
                    [&begins[..], &phases, &[repetitions.scaled(-sign * interval)]].concat()
                };
                self.at_most(offset(1), -busy(a));
                self.at_most(offset(-1), self.interval - busy(b));
            }
        }
    }

    /// Fixes the order of two nodes where the schedule keeps that of the function.
    fn keep(&mut self, is_first: Literal, a: usize, b: usize) {
        if self.demand.keep && !self.solver.is_inconsistent() {
            let position = |node: usize| (self.problem.nodes[node].position, node);
            let literal = if position(a) < position(b) { is_first } else { !is_first };
            self.solver.add_clause([literal.get_true_predicate()], self.tag);
        }
    }
}

/// Two nodes, or a node and the issue or wait of a `wgmma`.
enum Pair {
    /// Of one group, on one pipe.
    Same { a: usize, b: usize, is_first: Literal },
    /// Of one group, where the warps run in order: no op is running at the issue or wait of another.
    Point { event: Event, op: usize, is_first: Literal },
    /// Of two groups of the SM, on one pipe; `b` is some iterations later than `a`.
    Other { a: usize, b: usize, first: DomainId, second: DomainId, repetitions: DomainId },
}
