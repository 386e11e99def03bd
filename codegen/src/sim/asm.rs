//! Executes the PTX that the GPU lowering writes as inline assembly.

use super::Global;
use super::machine::{Block, Waiting, WgmmaInFlight, operand};
use super::matrix::{self, Descriptor};
use super::parse::{Operand, Ty};
use super::value::{Value, mask};
use crate::ir::DType;
use crate::lower::nvptx::RECORD_CLOCK;
use crate::mma::Instruction;
use crate::num;
use std::collections::HashMap;

/// Prefixes of assembly texts whose last part varies.
const WAIT_WGMMA: &str = "wgmma.wait_group.sync.aligned ";
const WAIT_COPY: &str = "cp.async.wait_group ";
const CREATE_POLICY: &str = "createpolicy.fractional.L2::";
const GRID_SIZE: &str = "mov.u32 $0, %nctaid.";

/// Whether the lowering may have written an assembly text: accesses of memory, synchronization, MMAs, and the
/// instructions that only these need.
pub fn is_compiler_asm(text: &str) -> bool {
    const NAMES: [&str; 21] = [
        "ld.global",
        "st.global",
        "st.shared",
        "atom.global",
        "red.global",
        "cp.async",
        "cp.reduce.async",
        "mbarrier.",
        "fence.mbarrier_init",
        "bar.sync",
        "barrier.cluster.",
        "mapa.",
        "bar.arrive",
        "mma.sync",
        "ldmatrix.",
        "stmatrix.",
        "wgmma.",
        "setmaxnreg.",
        "%clock",
        CREATE_POLICY,
        GRID_SIZE,
    ];
    NAMES.iter().any(|name| text.contains(name))
}

/// The axis (0 to 2) named by the text between `prefix` and `;`.
pub fn axis_of(text: &str, prefix: &str) -> Option<usize> {
    let axis = text.strip_prefix(prefix)?.trim_end_matches(';');
    ["x", "y", "z"].iter().position(|name| *name == axis)
}

/// Row and column of the warpgroup's accumulator tile that register `r` of a thread holds.
fn accumulator(thread: usize, r: usize) -> (usize, usize) {
    let (row, col) = matrix::accumulator(thread % 32, r);
    (row + 16 * (thread / 32), col)
}

/// Parses the operands `name, $n, number` of an addition.
fn parse_add(operands: &str) -> Result<(&str, usize, u64), String> {
    let wrong = || format!("expected an operand and a number, found `{operands}`");
    let [name, base, units] = operands.split(", ").collect::<Vec<_>>()[..] else { return Err(wrong()) };
    Ok((name, operand_index(base), units.parse().map_err(|_| wrong())?))
}

/// Parses the index `n` of an operand `$n` in an assembly text; `usize::MAX` if there is none.
fn operand_index(token: &str) -> usize {
    token
        .trim()
        .trim_start_matches(['@', '[', '{', '$'])
        .trim_end_matches([']', '}', ';', ','])
        .trim()
        .parse()
        .unwrap_or(usize::MAX)
}

/// The input that an assembly text calls `$number`; the first `outputs` numbers are outputs.
fn input(args: &[(Ty, Operand)], number: usize, outputs: usize) -> Result<&Operand, String> {
    number
        .checked_sub(outputs)
        .ok_or_else(|| format!("expected an input, found the output `${number}`"))
        .and_then(|i| operand(args, i))
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
}

/// The first MMA instruction that a text names, and its number of columns (N).
fn matrix_instruction(text: &str) -> Result<(&'static Instruction, u32), String> {
    let named = text.find("wgmma.mma_async").map_or(text, |at| &text[at..]);
    Instruction::parse_mnemonic(named).ok_or_else(|| format!("unsupported MMA instruction: `{text}`"))
}

/// The number that an MMA reads in the low bits of a word: f32 as tf32.
fn decode_operand(dtype: DType, bits: u64) -> f64 {
    let bits = bits & if dtype == DType::F32 { matrix::TF32_MASK } else { mask(dtype.bits() as u32) };
    if dtype.is_float() { num::decode(dtype, bits) } else { num::decode_int(dtype, bits) as f64 }
}

/// The numbers that an MMA reads in a word.
fn decode_word(dtype: DType, bits: u64) -> impl Iterator<Item = f64> {
    let size = dtype.bits();
    (0..(32 / size).max(1)).map(move |e| decode_operand(dtype, bits >> (size * e)))
}

/// `acc + a · b` for one element of an accumulator of this type. Integers wrap around.
fn accumulate(dtype: DType, acc: u64, products: impl Iterator<Item = (f64, f64)>) -> u64 {
    let products = products.map(|(a, b)| a * b);
    match dtype {
        DType::I32 => num::encode_int(dtype, num::decode_int(dtype, acc) + products.map(|x| x as i128).sum::<i128>()),
        _ => num::encode(dtype, num::decode(dtype, acc) + products.sum::<f64>()),
    }
}

fn is_matrix_move(text: &str) -> bool {
    text.starts_with("ldmatrix") || text.starts_with("stmatrix")
}

fn outputs(constraints: &[String]) -> usize {
    constraints.iter().filter(|c| c.starts_with('=')).count()
}

impl Block<'_> {
    /// Executes inline assembly for one thread. `None` if the thread waits for other threads.
    #[expect(clippy::too_many_lines, reason = "one arm per instruction")]
    pub(super) fn asm(
        &mut self,
        t: usize,
        text: &str,
        constraints: &[String],
        ty: &Ty,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<Option<Value>, String> {
        if self.bulk_write_asm(t, text, args, global)? {
            return Ok(Some(Value::Undef));
        }
        if let Some(continues) = self.barrier_asm(t, text, args, global)? {
            return Ok(continues.then_some(Value::Undef));
        }
        let wait = if text.starts_with("bar.sync 0") {
            Some(Waiting::Block)
        } else if text.starts_with("barrier.cluster.") {
            Some(Waiting::Cluster)
        } else if text.starts_with("mma.sync") || is_matrix_move(text) {
            Some(Waiting::Warp)
        } else if text.contains("wgmma.mma_async") || text.starts_with("wgmma.commit") || text.starts_with(WAIT_WGMMA) {
            Some(Waiting::Warpgroup)
        } else {
            None
        };
        if wait.is_some() {
            self.threads[t].waiting = wait;
            return Ok(None);
        }
        if text.starts_with("wgmma.fence") {
            let fenced = &mut self.wgmma_groups.entry(t as u32 / 128).or_default().fenced;
            fenced.resize(128, false);
            fenced[t % 128] = true;
            return Ok(Some(Value::Undef));
        }
        if text.starts_with("cp.async.commit") {
            let open = std::mem::take(&mut self.threads[t].uncommitted_copies);
            self.threads[t].copy_groups.push(open);
            return Ok(Some(Value::Undef));
        }
        if let Some(rest) = text.strip_prefix(WAIT_COPY) {
            let pending: usize = rest.trim_end_matches(';').parse().map_err(|_| format!("`{text}`"))?;
            return self.wait_copies(t, pending).map(|()| Some(Value::Undef));
        }
        if text.starts_with(CREATE_POLICY) {
            return Ok(Some(Value::Bits(0)));
        }
        if let Some(axis) = axis_of(text, GRID_SIZE) {
            return Ok(Some(Value::Bits(u64::from(self.launch.grid[axis]))));
        }
        if text == RECORD_CLOCK {
            if self.bits(t, operand(args, 2)?)? & 1 == 1 {
                let [p, tag] = [self.bits(t, operand(args, 0)?)?, self.bits(t, operand(args, 1)?)?];
                let event = [tag as u32, self.steps as u32].map(u32::to_le_bytes);
                self.write_global(t, global, p, &event.concat())?;
            }
            return Ok(Some(Value::Undef));
        }
        let n = outputs(constraints);
        // Accesses of memory: an optional fill value, an optional guard, and the instruction.
        let (guard, body) = match text.find('@') {
            Some(at) => {
                let (g, rest) = text[at..].split_once(' ').ok_or("a guard without an instruction")?;
                (Some(operand_index(g)), rest)
            }
            None => (None, text),
        };
        let on = match guard {
            Some(g) => self.bits(t, input(args, g, n)?)? & 1 == 1,
            None => true,
        };
        let (op, operands) = body.split_once(' ').ok_or("an instruction without operands")?;
        let width =
            op.rsplit('.').next().and_then(|s| s.strip_prefix('b')).and_then(|b| b.parse::<usize>().ok()).unwrap_or(32)
                / 8;
        if op.starts_with("ld.global") {
            // The cache policy follows the address.
            let address = operands.split(['[', ']']).nth(1).map(operand_index).ok_or("no address")?;
            let words: Vec<Value> = if on {
                let p = self.bits(t, input(args, address, n)?)?;
                let bytes = self.read_global(t, global, p, width * n)?;
                bytes.chunks(width).map(|w| super::value::from_bytes(&Ty::Int(width as u32 * 8), w)).collect()
            } else {
                // The fill values are the arguments tied to the outputs; they follow the address.
                (1..=n)
                    .map(|i| Ok(self.get(t, input(args, address.saturating_add(i), n)?)))
                    .collect::<Result<_, String>>()?
            };
            return Ok(Some(match &words[..] {
                [word] => word.clone(),
                _ => Value::aggregate(words),
            }));
        }
        if op.starts_with("st.shared") {
            if on {
                let [p, v] = [self.bits(t, operand(args, 0)?)?, self.bits(t, operand(args, 1)?)?];
                self.shared.write(p, &v.to_le_bytes()[..width], t as u32)?;
            }
            return Ok(Some(Value::Undef));
        }
        if op.starts_with("st.global") {
            if on {
                let p = self.bits(t, operand(args, 0)?)?;
                let inputs = constraints.iter().filter(|c| ["h", "r", "l"].contains(&c.as_str())).count();
                let values = inputs.saturating_sub(1 + usize::from(op.contains("cache_hint")));
                let mut bytes = Vec::new();
                for (_, v) in args.iter().skip(1).take(values) {
                    bytes.extend_from_slice(&self.bits(t, v)?.to_le_bytes()[..width]);
                }
                self.write_global(t, global, p, &bytes)?;
            }
            return Ok(Some(Value::Undef));
        }
        if op.starts_with("atom.global") {
            let float = if *ty == Ty::Int(16) { Ty::Half } else { ty.clone() };
            if !on {
                return Ok(Some(Value::Bits(0)));
            }
            let p = self.bits(t, operand(args, 0)?)?;
            let v = self.bits(t, operand(args, 1)?)?;
            // `atom.global.SCOPE.ORDER.NAME.TYPE`, without scope and order where they are LLVM's default.
            let mut parts = op.split('.').rev();
            let kind = parts.next().unwrap_or_default();
            let name = parts.find(|part| *part != "noftz").unwrap_or_default();
            let (function, ty) = match (name, kind.as_bytes().first()) {
                ("add", Some(b'f')) => ("fadd", &float),
                ("exch", _) => ("xchg", ty),
                ("min", Some(b'u')) => ("umin", ty),
                ("max", Some(b'u')) => ("umax", ty),
                (name, _) => (name, ty),
            };
            let change = |old| Ok(Some(super::machine::atomic(function, ty, old, v)?));
            let old = self.atomic_global(t, global, p, ty, change)?;
            global.synchronize(p, self.number, super::parse::memory_order(op));
            return Ok(Some(Value::Bits(old)));
        }
        if op.starts_with("red.global") {
            if on {
                let p = self.bits(t, operand(args, 0)?)?;
                let n = constraints.iter().filter(|c| *c == "f").count();
                if n == 0 || !p.is_multiple_of(4 * n as u64) {
                    return Err(format!("`{op}` of {n} f32 at {p:#x}: expected numbers at a multiple of their bytes"));
                }
                for (i, (_, v)) in args.iter().skip(1).take(n).enumerate() {
                    let v = self.bits(t, v)?;
                    let add = |old| Ok(Some(super::machine::atomic("fadd", &Ty::Float, old, v)?));
                    self.atomic_global(t, global, p + 4 * i as u64, &Ty::Float, add)?;
                }
            }
            return Ok(Some(Value::Undef));
        }
        if op.starts_with("cp.async") {
            if on {
                let (to, from) = (self.bits(t, operand(args, 0)?)?, self.bits(t, operand(args, 1)?)?);
                let size: usize = operands.split(',').nth(2).and_then(|s| s.trim().parse().ok()).ok_or("no size")?;
                let read = self.bits(t, operand(args, 2)?)? as usize;
                // The addresses must be aligned even where nothing is read.
                let is_aligned = [to, from].iter().all(|address| address.is_multiple_of(size as u64));
                let sizes: &[usize] = if op.contains(".cg.") { &[16] } else { &[4, 8, 16] };
                if !sizes.contains(&size) || read > size || !is_aligned {
                    return Err(format!(
                        "`{op}` of {read} bytes of {size} from {from:#x} to {to:#x}: expected addresses that are multiples of the size, \
                         one of {sizes:?}"
                    ));
                }
                let mut bytes = if read == 0 { Vec::new() } else { self.read_global(t, global, from, read)? };
                bytes.resize(size, 0);
                self.shared.start_copy(to, size, t as u32)?;
                self.threads[t].uncommitted_copies.push((to, bytes));
            }
            return Ok(Some(Value::Undef));
        }
        Err(format!("unsupported assembly `{text}`"))
    }

    /// Completes all but the last `pending` `cp.async` groups of a thread.
    pub(super) fn wait_copies(&mut self, t: usize, pending: usize) -> Result<(), String> {
        let done = self.threads[t].copy_groups.len().saturating_sub(pending);
        let groups: Vec<_> = self.threads[t].copy_groups.drain(..done).collect();
        for (to, bytes) in groups.into_iter().flatten() {
            self.shared.end_copy(to, &bytes, t as u32)?;
        }
        Ok(())
    }

    pub(super) fn asm_collective(
        &mut self,
        members: &[usize],
        result: Option<usize>,
        text: &str,
        constraints: &[String],
        args: &[(Ty, Operand)],
        _global: &mut Global,
    ) -> Result<(), String> {
        if text.starts_with("bar.sync") || text.starts_with("barrier.cluster.") {
            self.shared.clocks.barrier(members);
            for &t in members {
                self.finish(t, None, Value::Undef);
            }
        } else if text.starts_with("mma.sync") {
            let values = self.mma(members, text, args)?;
            for (&t, v) in members.iter().zip(values) {
                self.finish(t, result, v);
            }
        } else if is_matrix_move(text) {
            let values = self.move_matrices(members, text, args)?;
            for (&t, v) in members.iter().zip(values) {
                self.finish(t, result, v);
            }
        } else if text.starts_with("wgmma.commit") {
            let wgmma_groups = self.wgmma_groups.entry(members[0] as u32 / 128).or_default();
            let open = std::mem::take(&mut wgmma_groups.uncommitted);
            wgmma_groups.committed.push(open);
            wgmma_groups.fenced.clear();
            for &t in members {
                self.finish(t, None, Value::Undef);
            }
        } else if let Some(rest) = text.strip_prefix(WAIT_WGMMA) {
            let pending: usize = rest.trim_end_matches(';').parse().map_err(|_| format!("`{text}`"))?;
            self.wait_wgmma(members, result, pending, outputs(constraints), args)?;
        } else {
            self.wgmma(members, result, text, constraints, args)?;
        }
        for &t in members {
            self.threads[t].waiting = None;
        }
        Ok(())
    }

    /// Executes `ldmatrix` or `stmatrix` of a warp; returns the words that each thread loads.
    fn move_matrices(&mut self, members: &[usize], text: &str, args: &[(Ty, Operand)]) -> Result<Vec<Value>, String> {
        if members.len() != 32 {
            return Err(format!("`{text}` is executed by {} threads: expected 32", members.len()));
        }
        let count = [1, 2, 4].into_iter().find(|n| text.contains(&format!(".x{n}"))).ok_or("no number of matrices")?;
        let transposed = text.contains(".trans");
        // The place of element `e` of a lane's word in its matrix: row and byte.
        let place = |lane: usize, e: usize| {
            let (row, column) = (lane / 4, 2 * (lane % 4) + e);
            if transposed { (column, 2 * row) } else { (row, 2 * column) }
        };
        let mut rows = Vec::new();
        for &t in &members[..8 * count] {
            let address = self.bits(t, operand(args, 0)?)?;
            if address % 16 != 0 {
                return Err(format!("the address {address} of a row of `{text}` is not a multiple of 16"));
            }
            rows.push(address);
        }
        let mut words = vec![vec![0u64; count]; 32];
        if text.starts_with("ldmatrix") {
            // Each lane reads what it receives, so that it is ordered as any other load of the lane.
            for (lane, &t) in members.iter().enumerate() {
                for m in 0..count {
                    for e in 0..2 {
                        let (row, byte) = place(lane, e);
                        let half = self.shared.read(rows[8 * m + row] + byte as u64, 2, t as u32)?;
                        words[lane][m] |= little_endian(&half) << (16 * e);
                    }
                }
            }
        } else {
            for (lane, &t) in members.iter().enumerate() {
                for m in 0..count {
                    let word = self.bits(t, operand(args, 1 + m)?)?;
                    for e in 0..2 {
                        let (row, byte) = place(lane, e);
                        let half = ((word >> (16 * e)) as u16).to_le_bytes();
                        self.shared.write(rows[8 * m + row] + byte as u64, &half, t as u32)?;
                    }
                }
            }
        }
        let value = |words: Vec<u64>| match words[..] {
            [word] => Value::Bits(word),
            _ => Value::aggregate(words.into_iter().map(Value::Bits).collect()),
        };
        Ok(words.into_iter().map(value).collect())
    }

    fn mma(&mut self, members: &[usize], text: &str, args: &[(Ty, Operand)]) -> Result<Vec<Value>, String> {
        let (instruction, _) = matrix_instruction(text)?;
        if members.len() != 32 {
            return Err(format!("mma.sync is executed by {} threads: expected 32", members.len()));
        }
        let ([a_dtype, b_dtype], per_word) = (instruction.operands, instruction.per_word());
        let (rows, depth) = (instruction.m as usize, instruction.k as usize);
        // A word of each lane has four columns of four words along K, and eight rows or columns.
        let (a_words, b_words) = (rows * depth / (32 * per_word), 8 * depth / (32 * per_word));
        let (mut a, mut b) = (vec![vec![0f64; depth]; rows], vec![vec![0f64; 8]; depth]);
        for (lane, &t) in members.iter().enumerate() {
            for w in 0..a_words {
                for (e, x) in decode_word(a_dtype, self.bits(t, operand(args, w)?)?).enumerate() {
                    let (row, k) = matrix::a(lane, w, e, per_word);
                    a[row][k] = x;
                }
            }
            for w in 0..b_words {
                for (e, x) in decode_word(b_dtype, self.bits(t, operand(args, a_words + w)?)?).enumerate() {
                    let (k, col) = matrix::b(lane, w, e, per_word);
                    b[k][col] = x;
                }
            }
        }
        let mut results = Vec::new();
        for (lane, &t) in members.iter().enumerate() {
            // Two sums of f16 are in one word.
            let (per_word, bits) = if instruction.acc == DType::F16 { (2, 16) } else { (1, 64) };
            let mut list = vec![0; rows / 4 / per_word];
            for r in 0..rows / 4 {
                let ((row, col), shift) = (matrix::accumulator(lane, r), bits * (r % per_word));
                let c = self.bits(t, operand(args, a_words + b_words + r / per_word)?)?;
                let c = (c >> shift) & (u64::MAX >> (64 - bits));
                let products = (0..depth).map(|k| (a[row][k], b[k][col]));
                list[r / per_word] |= accumulate(instruction.acc, c, products) << shift;
            }
            results.push(Value::aggregate(list.into_iter().map(Value::Bits).collect()));
        }
        Ok(results)
    }

    /// Executes a statement with one `wgmma` for each step along K: `{.reg …; setp …; setp …; wgmma …; wgmma …; }`.
    fn wgmma(
        &mut self,
        members: &[usize],
        result: Option<usize>,
        text: &str,
        constraints: &[String],
        args: &[(Ty, Operand)],
    ) -> Result<(), String> {
        if members.len() != 128 {
            return Err(format!("wgmma is executed by {} threads: expected 128", members.len()));
        }
        self.check_wgmma_fence(members)?;
        let n_out = outputs(constraints);
        let (instruction, columns) = matrix_instruction(text)?;
        let (n, [a_dtype, b_dtype]) = (columns as usize, instruction.operands);
        if n != n_out * 2 {
            return Err(format!("wgmma has {n_out} accumulator registers for {n} columns"));
        }
        let (bytes, depth) = (a_dtype.bytes() as u64, instruction.k as usize);
        let tied = constraints.get(n_out).is_some_and(|c| c == "0");
        // Zero has the same bits in all types of accumulators.
        let mut acc = vec![vec![0u64; n]; 64];
        if tied {
            for (m, &t) in members.iter().enumerate() {
                for r in 0..n_out {
                    let (row, col) = accumulator(m, r);
                    acc[row][col] = match self.get(t, operand(args, r)?) {
                        Value::Pending(_, bits) => bits,
                        v => v.bits()?,
                    };
                }
            }
        }
        let reader = members[0] as u32;
        let mut reads = Vec::new();
        // Descriptors that the statement computes: the operand they start from, and the offset.
        let mut computed_descriptors: HashMap<&str, (usize, u64)> = HashMap::new();
        for step in text.trim_matches(['{', '}']).split(';') {
            if let Some(sum) = step.trim().strip_prefix("add.s64 ") {
                let (name, base, units) = parse_add(sum)?;
                computed_descriptors.insert(name, (base, units));
            }
            if !step.contains("wgmma.mma_async") {
                continue;
            }
            let descriptor = |this: &Self, name: &str| {
                let (base, units) = computed_descriptors.get(name).copied().unwrap_or_else(|| (operand_index(name), 0));
                Descriptor::decode(this.bits(members[0], input(args, base, n_out)?)?.wrapping_add(units))
            };
            // Output list, a, b, scale-d, of floats 1, 1, transposes.
            let after = step.split_once("}, ").ok_or("a wgmma without outputs")?.1;
            let (a_text, rest) = match after.strip_prefix('{') {
                Some(r) => r.split_once("}, ").ok_or("a wgmma without operand b")?,
                None => after.split_once(", ").ok_or("a wgmma without operand b")?,
            };
            let fields: Vec<&str> = rest.split(", ").collect();
            let flag = |i: usize| fields.get(i) == Some(&"1");
            if fields.get(1) == Some(&"set") {
                acc = vec![vec![0; n]; 64];
            }
            let from_registers = after.starts_with('{');
            let b_trans = flag(if from_registers { 4 } else { 5 });
            let mut a = vec![vec![0f64; depth]; 64];
            if from_registers {
                let words: Vec<usize> = a_text.split(',').map(operand_index).collect();
                (words.len() == 4).then_some(()).ok_or("expected four registers for operand A")?;
                for (m, &t) in members.iter().enumerate() {
                    for (w, &word) in words.iter().enumerate() {
                        let bits = self.bits(t, input(args, word, n_out)?)?;
                        for (e, x) in decode_word(a_dtype, bits).enumerate() {
                            let (row, k) = matrix::a(m % 32, w, e, instruction.per_word());
                            a[row + 16 * (m / 32)][k] = x;
                        }
                    }
                }
            } else {
                let d = descriptor(self, a_text)?;
                let elements = self.shared_matrix(d, [64, depth], !flag(4), bytes, reader, &mut reads)?;
                for (at, bits) in elements.into_iter().enumerate() {
                    a[at / depth][at % depth] = decode_operand(a_dtype, bits);
                }
            }
            let d = descriptor(self, fields.first().ok_or("a wgmma without operand b")?)?;
            let b = self.shared_matrix(d, [n, depth], !b_trans, bytes, reader, &mut reads)?;
            let b: Vec<f64> = b.into_iter().map(|bits| decode_operand(b_dtype, bits)).collect();
            for row in 0..64 {
                for col in 0..n {
                    let products = (0..depth).map(|k| (a[row][k], b[col * depth + k]));
                    acc[row][col] = accumulate(instruction.acc, acc[row][col], products);
                }
            }
        }
        self.next_wgmma += 1;
        let number = self.next_wgmma;
        for &(p, len) in &reads {
            self.shared.begin_async_read(p, len, reader)?;
        }
        let group = members[0] as u32 / 128;
        self.wgmma_groups.entry(group).or_default().uncommitted.push(WgmmaInFlight { number, reads });
        for (m, &t) in members.iter().enumerate() {
            let list = (0..n_out)
                .map(|r| {
                    let (row, col) = accumulator(m, r);
                    Value::Pending(number, acc[row][col])
                })
                .collect();
            self.finish(t, result, Value::aggregate(list));
        }
        Ok(())
    }

    /// Checks that all members have executed a `wgmma.fence` since their last commit.
    fn check_wgmma_fence(&self, members: &[usize]) -> Result<(), String> {
        let fenced =
            self.wgmma_groups.get(&(members[0] as u32 / 128)).map_or(&[][..], |wgmma_groups| &wgmma_groups.fenced);
        match !fenced.is_empty() && fenced.iter().all(|&f| f) {
            true => Ok(()),
            false => {
                Err("wgmma without a wgmma.fence since the last commit: its registers may still be written".into())
            }
        }
    }

    /// Reads a matrix operand from shared memory: the bits of its elements, with K fastest. Appends the addresses and
    /// lengths read to `reads`.
    fn shared_matrix(
        &mut self,
        matrix: Descriptor,
        [rows, depth]: [usize; 2],
        k_major: bool,
        bytes: u64,
        reader: u32,
        reads: &mut Vec<(u64, usize)>,
    ) -> Result<Vec<u64>, String> {
        let mut elements = Vec::with_capacity(rows * depth);
        for at in 0..rows * depth {
            let p = matrix.address([(at / depth) as u64, (at % depth) as u64], k_major, bytes);
            elements.push(little_endian(&self.shared.read_async(p, bytes as usize, reader)?));
            reads.push((p, bytes as usize));
        }
        Ok(elements)
    }

    /// Completes all but the last `pending` committed wgmma groups.
    fn wait_wgmma(
        &mut self,
        members: &[usize],
        result: Option<usize>,
        pending: usize,
        n_out: usize,
        args: &[(Ty, Operand)],
    ) -> Result<(), String> {
        let wgmma_groups = self.wgmma_groups.entry(members[0] as u32 / 128).or_default();
        let done = wgmma_groups.committed.len().saturating_sub(pending);
        let finished: Vec<WgmmaInFlight> = wgmma_groups.committed.drain(..done).flatten().collect();
        let open: Vec<u64> =
            wgmma_groups.committed.iter().flatten().chain(&wgmma_groups.uncommitted).map(|f| f.number).collect();
        // The first thread of each warp acquires the completion for its warp.
        let warps: Vec<u32> = members.iter().step_by(32).map(|&t| t as u32).collect();
        for mma in &finished {
            for &(p, len) in &mma.reads {
                self.shared.end_async_read(p, len, &warps)?;
            }
        }
        for &t in members {
            let mut list = Vec::new();
            for (_, v) in args.iter().take(n_out) {
                list.push(match self.get(t, v) {
                    Value::Pending(number, bits) if !open.contains(&number) => Value::Bits(bits),
                    v => v,
                });
            }
            self.finish(t, result, Value::aggregate(list));
        }
        Ok(())
    }
}
