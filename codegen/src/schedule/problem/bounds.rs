//! What no schedule of a loop can beat: pipes, and cycles of dependences.

use super::{Cause, Edge, Problem, Task};
use crate::analysis::pipes::Pipe;
use std::collections::BTreeMap;
use std::fmt;

/// A moment of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event {
    pub node: usize,
    pub point: Point,
}

/// Of a `wgmma` all three; others only begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    Issue,
    Begin,
    Wait,
}

/// `to` of iteration `i + distance` is at least `delay` cycles after `from` of iteration `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    pub from: Event,
    pub to: Event,
    pub delay: u32,
    pub distance: u32,
    pub all_groups: bool,
}

/// Lower bounds of the initiation interval, in cycles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Cycles for which each pipe of the SM is busy in an iteration of all groups.
    pub pipes: Vec<(Pipe, u32)>,
    /// The longest cycle of dependences, per iteration.
    pub dependences: u32,
}

impl Bounds {
    /// The largest lower bound.
    pub fn interval(&self) -> u32 {
        self.pipes.iter().map(|(_, busy)| *busy).fold(self.dependences, u32::max).max(1)
    }

    /// What gives the largest lower bound, in words.
    pub fn cause(&self) -> String {
        match self.pipes.iter().max_by_key(|(_, busy)| *busy) {
            Some((pipe, busy)) if *busy >= self.dependences => format!("the {} pipe", pipe.name()),
            _ => "dependences between ops".into(),
        }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pipes = self.pipes.iter().map(|(pipe, busy)| format!("{} {busy}, ", pipe.name()));
        let pipes: String = pipes.collect();
        let interval = self.interval();
        writeln!(f, "bounds: {pipes}dependences {}: interval at least {interval} cycles", self.dependences)
    }
}

impl Problem {
    /// The moment of a node that an edge from it counts from, and that of a node that an edge to it constrains.
    fn events(&self, edge: &Edge) -> (Event, Event) {
        let is_mma = |node: usize| self.nodes[node].task == Task::Mma;
        let (from, to) = match edge.cause {
            Cause::Accumulate => (Point::Begin, Point::Begin),
            _ => (Point::Wait, Point::Issue),
        };
        let event = |node, point| Event { node, point: if is_mma(node) { point } else { Point::Begin } };
        (event(edge.from, from), event(edge.to, to))
    }

    /// All dependences, between moments of nodes, with rings of this depth.
    pub fn orders(&self, depth: u32) -> Vec<Order> {
        let mut found = Vec::new();
        for (node, data) in self.nodes.iter().enumerate().filter(|(_, data)| data.task == Task::Mma) {
            let [issue, begin, wait] = [Point::Issue, Point::Begin, Point::Wait].map(|point| Event { node, point });
            let order = |from, to, delay| Order { from, to, delay, distance: 0, all_groups: false };
            found.extend([order(issue, begin, 0), order(begin, wait, data.busy + data.latency)]);
        }
        found.extend(self.edges.iter().map(|edge| {
            let (from, to) = self.events(edge);
            let distance = if edge.cause == Cause::Ring { depth } else { edge.distance };
            Order { from, to, delay: edge.delay, distance, all_groups: edge.all_groups }
        }));
        found
    }

    /// Lower bounds of the initiation interval.
    pub fn bounds(&self) -> Bounds {
        let mut pipes: BTreeMap<Pipe, u32> = BTreeMap::new();
        for (number, node) in self.nodes.iter().enumerate() {
            *pipes.entry(node.pipe).or_default() += node.busy * self.copies(number);
        }
        let orders = self.orders(self.depth_limit);
        // The least interval without a cycle that takes longer than its iterations.
        let (mut low, mut high) = (0, orders.iter().map(|order| order.delay).sum());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.has_long_cycle(&orders, middle) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Bounds { pipes: pipes.into_iter().collect(), dependences: low }
    }

    /// Whether a cycle of dependences takes longer than `interval` per iteration (Bellman and Ford).
    fn has_long_cycle(&self, orders: &[Order], interval: u32) -> bool {
        let mut times: BTreeMap<Event, i64> =
            orders.iter().flat_map(|order| [(order.from, 0), (order.to, 0)]).collect();
        for _ in 0..=times.len() {
            let mut is_stable = true;
            for order in orders {
                let weight = i64::from(order.delay) - i64::from(order.distance) * i64::from(interval);
                let earliest = times[&order.from] + weight;
                if earliest > times[&order.to] {
                    times.insert(order.to, earliest);
                    is_stable = false;
                }
            }
            if is_stable {
                return false;
            }
        }
        true
    }
}
