//! Fault injection into the synchronization of lowered code (mutation testing): tests run the mutants on the simulator,
//! which must report them.
//!
//! [`mutants`] takes the LLVM IR of a kernel and changes one synchronizing instruction at a time: it removes it, moves
//! it across the next or the previous access of shared memory, or changes its parity, count, number of bytes or
//! barrier. Each mutant is well-formed LLVM IR: every value is defined before its uses.

use std::collections::BTreeSet;
use std::fmt;

/// The kind of instruction that is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// `bar.sync` of the block.
    BlockBarrier,
    /// `bar.sync` and `bar.arrive` with a thread count.
    NamedBarrier,
    /// `bar.warp.sync`.
    WarpBarrier,
    /// `mbarrier.init`.
    MbarrierInit,
    /// `fence.mbarrier_init`.
    InitFence,
    /// `mbarrier.arrive.expect_tx`.
    Expect,
    /// `mbarrier.arrive`, and `cp.async.mbarrier.arrive`.
    Arrive,
    /// `mbarrier.try_wait`.
    Wait,
    /// `fence.proxy.async`.
    ProxyFence,
    /// `wgmma.fence`.
    WgmmaFence,
    /// `wgmma.commit_group`.
    WgmmaCommit,
    /// `wgmma.wait_group`.
    WgmmaWait,
    /// `cp.async.commit_group`.
    CopyCommit,
    /// `cp.async.wait_group`.
    CopyWait,
    /// A TMA load or store.
    Tma,
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`, with or without `.read`.
    BulkWait,
}

/// The change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    Removed,
    /// Executed twice.
    Repeated,
    /// Moved after the next access of shared memory.
    Later,
    /// Moved before the previous access of shared memory.
    Earlier,
    /// Waits for the other parity.
    Parity,
    /// One more or fewer: groups, arrivals, or a warp of threads.
    CountUp,
    CountDown,
    /// 16 bytes more or fewer.
    BytesUp,
    BytesDown,
    /// Applied to the adjacent barrier.
    Neighbor,
}

/// A kernel with one injected fault.
#[derive(Clone, Debug)]
pub struct Mutant {
    pub class: Class,
    pub change: Change,
    /// The changed line of the module, from 1.
    pub line: usize,
    /// Whether the line is in a loop.
    pub in_loop: bool,
    /// The original line.
    pub instruction: String,
    pub llvm_ir: String,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} (line {}): `{}`", self.class, self.change, self.line, self.instruction)
    }
}

const WGMMA_WAIT: &str = "wgmma.wait_group.sync.aligned ";
const COPY_WAIT: &str = "cp.async.wait_group ";
const BULK_WAIT: &str = "cp.async.bulk.wait_group.read ";
const EXPECT: &str = "mbarrier.arrive.expect_tx";

fn class(line: &str) -> Option<Class> {
    let has = |text: &str| line.contains(text);
    if !has("call ") {
        return None;
    }
    Some(match () {
        () if has("bar.sync 0;") || has("barrier.cluster.") => Class::BlockBarrier,
        () if has("\"bar.sync") || has("\"bar.arrive") => Class::NamedBarrier,
        () if has("@llvm.nvvm.bar.warp.sync") => Class::WarpBarrier,
        () if has("\"mbarrier.init") => Class::MbarrierInit,
        () if has("\"fence.mbarrier_init") => Class::InitFence,
        () if has(EXPECT) => Class::Expect,
        () if has("\"mbarrier.arrive")
            || has("\"@$0 mbarrier.arrive")
            || has("\"cp.async.mbarrier.arrive")
            || has("mbarrier.arrive.shared::cluster") =>
        {
            Class::Arrive
        }
        () if has("mbarrier.try_wait") => Class::Wait,
        () if has("@llvm.nvvm.fence.proxy.async") => Class::ProxyFence,
        () if has("\"wgmma.fence") => Class::WgmmaFence,
        () if has("\"wgmma.commit_group") => Class::WgmmaCommit,
        () if has(WGMMA_WAIT) => Class::WgmmaWait,
        () if has("\"cp.async.commit_group") => Class::CopyCommit,
        () if has(COPY_WAIT) => Class::CopyWait,
        () if has("cp.async.bulk.tensor") => Class::Tma,
        () if has("\"cp.async.bulk.commit_group") => Class::BulkCommit,
        () if has("cp.async.bulk.wait_group") => Class::BulkWait,
        () => return None,
    })
}

/// Whether a line accesses shared memory, synchronously or asynchronously.
fn accesses_shared(line: &str) -> bool {
    let has = |text: &str| line.contains(text);
    let direct = has("ptr addrspace(3)") && (has("= load ") || line.trim_start().starts_with("store "));
    direct
        || [
            "wgmma.mma_async",
            "cp.async.bulk.tensor",
            "cp.async.ca.shared",
            "cp.async.cg.shared",
            "cp.reduce.async.bulk",
        ]
        .iter()
        .any(|op| has(op))
}

/// All mutants of a module, in the order of its lines.
pub fn mutants(llvm_ir: &str) -> Vec<Mutant> {
    let lines: Vec<&str> = llvm_ir.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(class) = class(line) else { continue };
        for (change, changed) in changes(&lines, at, class) {
            let instruction = line.trim().to_string();
            let in_loop = in_loop(&lines, at);
            found.push(Mutant { class, change, line: at + 1, in_loop, instruction, llvm_ir: changed.join("\n") });
        }
    }
    found
}

/// The module with a trap before a line: it runs without an error if and only if the line is never executed.
pub fn with_trap(llvm_ir: &str, line: usize) -> String {
    let mut lines: Vec<&str> = llvm_ir.lines().collect();
    lines.insert(line - 1, "  call void @llvm.trap()");
    lines.join("\n")
}

/// Whether a line lies between the labels `bodyN` and `exitM` that the lowering gives to loops.
fn in_loop(lines: &[&str], at: usize) -> bool {
    let mut depth = 0;
    for line in &lines[..at] {
        depth += i32::from(is_label(line) && line.starts_with("body"));
        depth -= i32::from(is_label(line) && line.starts_with("exit"));
    }
    depth > 0
}

type Lines = Vec<String>;

fn changes(lines: &[&str], at: usize, class: Class) -> Vec<(Change, Lines)> {
    let mut list = Vec::new();
    let mut add = |change: Change, changed: Option<Lines>| list.extend(changed.map(|lines| (change, lines)));
    add(Change::Removed, removed(lines, at));
    match class {
        Class::BlockBarrier | Class::WarpBarrier | Class::CopyWait | Class::ProxyFence | Class::BulkWait => {
            add(Change::Later, later(lines, at, class));
            add(Change::Earlier, earlier(lines, at));
        }
        Class::NamedBarrier => {
            add(Change::Later, later(lines, at, class));
            add(Change::Earlier, earlier(lines, at));
            add(Change::CountUp, with_count(lines, at, ", ", 32));
            add(Change::CountDown, with_count(lines, at, ", ", -32));
            add(Change::Neighbor, other_operand(lines, at, "i32 ", |v| format!("xor i32 {v}, 1")));
        }
        Class::MbarrierInit => {
            add(Change::CountUp, with_count(lines, at, "[$0], ", 1));
            add(Change::CountDown, with_count(lines, at, "[$0], ", -1));
        }
        Class::Expect => {
            add(Change::BytesUp, with_count(lines, at, "[$0], ", 16));
            add(Change::BytesDown, with_count(lines, at, "[$0], ", -16));
            add(Change::Repeated, repeated(lines, at));
            add(Change::Neighbor, neighbor(lines, at));
        }
        Class::Arrive => {
            add(Change::Repeated, repeated(lines, at));
            add(Change::Earlier, earlier(lines, at));
            add(Change::Neighbor, neighbor(lines, at));
        }
        Class::Wait => {
            add(Change::Later, later(lines, at, class));
            add(Change::Parity, other_operand(lines, at, ", i32 ", |v| format!("xor i32 {v}, 1")));
            add(Change::Neighbor, neighbor(lines, at));
        }
        Class::WgmmaFence | Class::WgmmaCommit | Class::CopyCommit => add(Change::Later, later(lines, at, class)),
        Class::Tma => add(Change::Neighbor, neighbor(lines, at)),
        Class::InitFence | Class::BulkCommit | Class::WgmmaWait => {}
    }
    let groups = match class {
        Class::WgmmaWait => WGMMA_WAIT,
        Class::CopyWait => COPY_WAIT,
        Class::BulkWait => BULK_WAIT,
        _ => return list,
    };
    list.extend(with_count(lines, at, groups, 1).map(|lines| (Change::CountUp, lines)));
    list
}

fn owned(lines: &[&str]) -> Lines {
    lines.iter().map(|line| line.to_string()).collect()
}

/// The module without the instruction. A wait that forwards values stays, but waits for nothing.
fn removed(lines: &[&str], at: usize) -> Option<Lines> {
    if result(lines[at]).is_some() {
        return with_count(lines, at, WGMMA_WAIT, 1000);
    }
    let mut changed = owned(lines);
    changed.remove(at);
    Some(changed)
}

fn repeated(lines: &[&str], at: usize) -> Option<Lines> {
    let mut changed = owned(lines);
    changed.insert(at, lines[at].into());
    Some(changed)
}

/// Adds `by` to the number that follows `before` in the assembly.
fn with_count(lines: &[&str], at: usize, before: &str, by: i64) -> Option<Lines> {
    let line = lines[at];
    let start = line.find(before)? + before.len();
    let digits = line[start..].find(|c: char| !c.is_ascii_digit())?;
    let number: i64 = line[start..start + digits].parse().ok()?;
    // A barrier has at least one arrival.
    let changed = Some(number + by).filter(|&n| n > 0)?;
    let mut list = owned(lines);
    list[at] = format!("{}{changed}{}", &line[..start], &line[start + digits..]);
    Some(list)
}

/// Replaces an operand of the call by a value computed from it.
fn other_operand(lines: &[&str], at: usize, before: &str, compute: impl Fn(&str) -> String) -> Option<Lines> {
    let line = lines[at];
    let call = line.rfind("\"(")?;
    let start = call + line[call..].rfind(before)? + before.len();
    let length = line[start..].find([',', ')'])?;
    let mut list = owned(lines);
    list[at] = format!("{}%mutated{}", &line[..start], &line[start + length..]);
    list.insert(at, format!("  %mutated = {}", compute(&line[start..start + length])));
    Some(list)
}

fn neighbor(lines: &[&str], at: usize) -> Option<Lines> {
    other_operand(lines, at, "ptr addrspace(3) ", |p| format!("getelementptr i8, ptr addrspace(3) {p}, i32 8"))
}

/// The register that a line defines.
fn result(line: &str) -> Option<&str> {
    line.trim_start().split_once(" = ").map(|(name, _)| name).filter(|name| name.starts_with('%'))
}

/// The registers that a line names.
fn registers(line: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for (at, _) in line.match_indices('%') {
        let rest = &line[at..];
        let end = rest[1..].find(|c: char| !(c.is_alphanumeric() || "._".contains(c))).map_or(rest.len(), |n| n + 1);
        found.insert(&rest[..end]);
    }
    found
}

fn is_label(line: &str) -> bool {
    line.ends_with(':') && !line.starts_with(' ')
}

/// The label after a branch around a few instructions: `br i1 …, label %whenN, label %afterN`.
fn skip_label(line: &str) -> Option<&str> {
    let (_, labels) = line.trim_start().strip_prefix("br i1 ")?.split_once(", label %when")?;
    labels.split_once(", label %").map(|(_, after)| after)
}

/// The lines from the branch to the label after it, if a line is in such a conditional region.
fn conditional(lines: &[&str], at: usize) -> Option<(usize, usize)> {
    let label = (0..at).rev().find(|&i| is_label(lines[i]))?;
    let after = skip_label(lines[label.checked_sub(1)?])?;
    let end = (at..lines.len()).find(|&i| lines[i].strip_suffix(':') == Some(after))?;
    Some((label - 1, end))
}

/// Whether an instruction of class `moved` must not move past a line: for most classes an access; for a commit, the
/// wait; for a proxy fence, an asynchronous access or the arrive that releases the written data.
fn must_come_before(moved: Class, line: &str) -> bool {
    match moved {
        Class::WgmmaCommit => class(line) == Some(Class::WgmmaWait),
        Class::CopyCommit => class(line) == Some(Class::CopyWait),
        Class::ProxyFence => {
            matches!(class(line), Some(Class::Arrive | Class::Tma))
                || line.contains("wgmma.mma_async")
                || line.contains("cp.reduce.async.bulk")
        }
        _ => accesses_shared(line),
    }
}

/// Moves the line past the next lines that it must precede, up to the next wait, and only across lines that run, or may
/// run, whenever the line runs.
fn later(lines: &[&str], at: usize, moved: Class) -> Option<Lines> {
    if result(lines[at]).is_some() || conditional(lines, at).is_some() {
        return None;
    }
    let mut behind: Option<&str> = None;
    let mut last = None;
    for i in at + 1..lines.len() {
        let line = lines[i];
        if let Some(after) = skip_label(line) {
            behind = Some(after);
        } else if is_label(line) {
            if line.starts_with("when") {
                continue;
            }
            if behind != line.strip_suffix(':') {
                break;
            }
            behind = None;
        } else if line.trim_start().starts_with("ret ") || line.trim_start().starts_with("br ") && behind.is_none() {
            break;
        }
        let waits = |c| {
            use Class::*;
            matches!(c, BlockBarrier | NamedBarrier | Wait | CopyWait | WgmmaWait | BulkWait)
        };
        if class(line).is_some_and(waits) && last.is_some() && !must_come_before(moved, line) {
            break;
        }
        if must_come_before(moved, line) {
            last = Some((i, behind));
        }
    }
    let (i, behind) = last?;
    let mut to = match behind {
        Some(after) => (i..lines.len()).find(|&k| lines[k].strip_suffix(':') == Some(after))? + 1,
        None => i + 1,
    };
    while lines.get(to).is_some_and(|line| line.contains(" = phi ")) {
        to += 1;
    }
    let mut changed = owned(lines);
    changed.insert(to, lines[at].into());
    changed.remove(at);
    Some(changed)
}

/// Moves the line before the last access that has run whenever the line runs.
fn earlier(lines: &[&str], at: usize) -> Option<Lines> {
    let (first, last) = conditional(lines, at).unwrap_or((at, at));
    let mut i = first;
    while i > 0 {
        i -= 1;
        let line = lines[i];
        if let Some(name) = line.strip_suffix(':').filter(|_| is_label(line)) {
            // A conditional region: continue before the branch around it.
            let branch = (0..i).rev().find(|&k| skip_label(lines[k]) == Some(name))?;
            if (branch..i).any(|k| accesses_shared(lines[k])) {
                return moved_up(lines, (first, last), branch, at);
            }
            i = branch;
            continue;
        }
        if line.contains(" = phi ") || line.trim_start().starts_with("br ") {
            return None;
        }
        if accesses_shared(line) {
            return access_moved_down(lines, i, (first, last)).or_else(|| moved_up(lines, (first, last), i, at));
        }
    }
    None
}

/// Moves the line itself up, if its operands are defined there and it is not in a conditional region.
fn moved_up(lines: &[&str], (first, last): (usize, usize), to: usize, at: usize) -> Option<Lines> {
    let needed = registers(lines[at]);
    let defined_between = (to..at).any(|i| result(lines[i]).is_some_and(|r| needed.contains(r)));
    if first != last || defined_between || result(lines[at]).is_some() {
        return None;
    }
    let mut changed = owned(lines);
    let line = changed.remove(at);
    changed.insert(to, line);
    Some(changed)
}

/// Moves an access, with the values computed from it, down past the synchronizing lines.
fn access_moved_down(lines: &[&str], access: usize, (first, last): (usize, usize)) -> Option<Lines> {
    let mut moved: BTreeSet<usize> = [access].into();
    let mut values: BTreeSet<&str> = result(lines[access]).into_iter().collect();
    for i in access + 1..=last {
        if registers(lines[i]).is_disjoint(&values) {
            continue;
        }
        let pure =
            ["extractelement", "insertelement", "bitcast", "extractvalue"].iter().any(|op| lines[i].contains(op));
        if !pure || i >= first {
            return None;
        }
        moved.insert(i);
        values.extend(result(lines[i]));
    }
    let mut changed = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        if !moved.contains(&i) {
            changed.push(line.to_string());
        }
        if i == last {
            changed.extend(moved.iter().map(|&m| lines[m].to_string()));
        }
    }
    Some(changed)
}
