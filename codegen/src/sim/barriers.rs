//! Mbarriers, the TMA loads that they track, and named barriers (`bar.sync` and `bar.arrive` with a thread count).

use super::Global;
use super::clock::SyncClocks;
use super::machine::{Block, Waiting, operand};
use super::memory::in_cluster as in_cluster_of;
use super::parse::{Operand, Ty};
use crate::ir::DType;
use crate::target::{HostExpr, TensorMapDesc};

/// Base of the handles that kernels get for tensor maps.
pub const MAP_BASE: u64 = 0x7A90_0000_0000_0000;

/// The largest number of arrivals, and of bytes, that an mbarrier counts (PTX ISA, "mbarrier").
const MAX_COUNT: u32 = (1 << 20) - 1;
/// The named barriers of a block.
const NAMED_BARRIERS: usize = 16;

/// State of one mbarrier.
pub(super) struct Mbarrier {
    arrivals: u32,
    pending_arrivals: u32,
    /// Expected bytes (`expect_tx`) that have not been written yet; of these, the bytes of copies in flight. Other blocks of the
    /// cluster may copy before this one expects it.
    bytes: i64,
    bytes_in_flight: i64,
    phase: u32,
    /// Its index among the sources of events (see [`super::clock`]).
    source: u32,
    /// Clocks of the threads that have arrived, of the current phase (`arrived`) and of all complete phases
    /// (`completed`).
    arrived: SyncClocks,
    completed: SyncClocks,
    initialized_by: (u32, u32),
    fenced: bool,
    /// The last phase (from 1) that tracks a copy, and the last phase whose end a thread has waited for.
    last_copy_phase: u32,
    last_awaited_phase: u32,
}

impl Mbarrier {
    fn step(&mut self) {
        if self.pending_arrivals == 0 && self.bytes == 0 {
            self.pending_arrivals = self.arrivals;
            self.phase += 1;
            let arrived = std::mem::take(&mut self.arrived);
            self.completed.join(&arrived);
            let (at, events) = (self.source as usize, &mut self.completed.events);
            if events.len() <= at {
                events.resize(at + 1, 0);
            }
            events[at] = self.phase;
        }
    }
}

impl Mbarrier {
    /// Checks that it can count the bytes.
    fn check_bytes(&self) -> Result<(), String> {
        match self.bytes.unsigned_abs() > u64::from(MAX_COUNT) {
            true => Err(format!("an mbarrier expects {} bytes: it counts up to {MAX_COUNT}", self.bytes)),
            false => Ok(()),
        }
    }

    /// Checks that a thread has waited for the last copy. Without a wait, nothing orders the end of the copy.
    fn check_copies_awaited(&self) -> Result<(), String> {
        match self.last_copy_phase > self.last_awaited_phase {
            true => Err("the block may end before a bulk copy completes: no thread waits for its mbarrier".into()),
            false => Ok(()),
        }
    }
}

/// A named barrier at which some threads have arrived.
#[derive(Default)]
pub(super) struct NamedBarrier {
    arrived: SyncClocks,
    /// The thread count that the first arrival gave.
    count: usize,
    arrivals_so_far: usize,
    waiting: Vec<usize>,
}

/// A TMA load whose bytes its mbarrier has not counted yet.
pub(super) struct BulkCopy {
    barrier: u64,
    bytes: i64,
}

impl<'a> Block<'a> {
    /// Executes assembly of barriers and TMA loads. `None` if the assembly is something else, `Some(false)` if the
    /// thread waits.
    #[expect(clippy::too_many_lines, reason = "one arm per instruction")]
    pub(super) fn barrier_asm(
        &mut self,
        t: usize,
        text: &str,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<Option<bool>, String> {
        let arg = |this: &Self, i: usize| this.bits(t, operand(args, i)?);
        if text.starts_with("@$0 mbarrier.arrive.shared::cta.b64 ") {
            if arg(self, 0)? & 1 == 1 {
                self.arrive(t, arg(self, 1)?)?;
            }
            return Ok(Some(true));
        }
        let guarded = text.strip_prefix("@$0 ").filter(|text| text.starts_with("cp.async.bulk.prefetch."));
        let unguarded = guarded.unwrap_or(text).trim_start_matches("{.reg .pred done; again: ");
        let in_cluster = unguarded.strip_prefix("{.reg .b32 at; mapa.shared::cluster.u32 at, $0, $1; ");
        let unguarded = in_cluster.unwrap_or(unguarded);
        let op = unguarded.split([' ', ';']).next().unwrap_or("");
        match op {
            "mbarrier.init.shared::cta.b64" => {
                let arrivals = last_number(text)?;
                if !(1..=MAX_COUNT).contains(&arrivals) {
                    return Err(format!("an mbarrier of {arrivals} arrivals: expected 1 to {MAX_COUNT}"));
                }
                let at = self.mbarrier_key(t, arg(self, 0)?);
                if self.mbarriers.contains_key(&at) {
                    return Err("mbarrier.init at the address of a live mbarrier".into());
                }
                let source = self.threads.len() as u32 + self.next_barrier;
                self.next_barrier += 1;
                let initialized_by = (t as u32, self.shared.clocks.now(t as u32));
                let new = Mbarrier {
                    arrivals,
                    pending_arrivals: arrivals,
                    bytes: 0,
                    bytes_in_flight: 0,
                    phase: 0,
                    source,
                    arrived: SyncClocks::default(),
                    completed: SyncClocks::default(),
                    initialized_by,
                    fenced: false,
                    last_copy_phase: 0,
                    last_awaited_phase: 0,
                };
                self.mbarriers.insert(at, new);
            }
            "mbarrier.inval.shared::cta.b64" => {
                let at = self.mbarrier_key(t, arg(self, 0)?);
                let b = self.mbarrier(t, at)?;
                if b.pending_arrivals != b.arrivals || b.bytes != 0 {
                    return Err("mbarrier.inval in the middle of a phase".into());
                }
                b.check_copies_awaited()?;
                self.mbarriers.remove(&at);
            }
            "fence.mbarrier_init.release.cluster" => {
                for b in self.mbarriers.values_mut().filter(|b| b.initialized_by.0 == t as u32) {
                    b.fenced = true;
                }
            }
            "mbarrier.arrive.expect_tx.shared::cta.b64" => {
                let bytes = last_number(text)?;
                let at = arg(self, 0)?;
                let b = self.mbarrier(t, at)?;
                b.bytes += i64::from(bytes);
                b.check_bytes()?;
                self.arrive(t, at)?;
            }
            "mbarrier.arrive.shared::cta.b64" => self.arrive(t, arg(self, 0)?)?,
            "mbarrier.arrive.shared::cluster.b64" if in_cluster.is_some() => {
                self.arrive_in_cluster(t, in_cluster_of(arg(self, 0)?, arg(self, 1)?))?;
            }
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64" => {
                let open = std::mem::take(&mut self.threads[t].uncommitted_copies);
                self.threads[t].copy_groups.push(open);
                self.wait_copies(t, 0)?;
                self.arrive(t, arg(self, 0)?)?;
            }
            "mbarrier.try_wait.parity.shared::cta.b64" => {
                let (at, parity) = (self.mbarrier_key(t, arg(self, 0)?), arg(self, 1)?);
                let b = self.mbarrier(t, at)?;
                if u64::from(b.phase % 2) == parity {
                    self.threads[t].waiting = Some(Waiting::Phase(at, parity));
                    return Ok(Some(false));
                }
                b.last_awaited_phase = b.phase;
                let known = b.completed.clone();
                self.shared.clocks.acquire(t as u32, &known);
            }
            "setmaxnreg.inc.sync.aligned.u32" | "setmaxnreg.dec.sync.aligned.u32" => {
                let registers = last_number(text)?;
                if !(24..=256).contains(&registers) || !registers.is_multiple_of(8) {
                    return Err(format!("`{text}`: expected a multiple of 8 from 24 to 256"));
                }
            }
            // The L2 cache is not simulated.
            _ if op.starts_with("cp.async.bulk.prefetch.tensor.") => {
                if arg(self, 0)? & 1 == 1 {
                    let (map, at) = (self.tensor_map(arg(self, 1)?)?, self.box_coordinates(t, args, 2..args.len())?);
                    box_places(map, self.launch.args, &at)?;
                }
            }
            _ if op.starts_with("cp.async.bulk.tensor.") => {
                self.tensor_load_asm(t, op.ends_with(".multicast::cluster"), args, global)?;
            }
            "bar.sync" | "bar.arrive" if text.contains(',') => {
                let count = last_number(text)? as usize;
                let id = match args.is_empty() {
                    true => text
                        .split([' ', ','])
                        .nth(1)
                        .and_then(|s| s.parse().ok())
                        .ok_or("expected the number of a barrier")?,
                    false => arg(self, 0)? as usize,
                };
                if id >= NAMED_BARRIERS {
                    return Err(format!("barrier {id}: a block has barriers 0 to {}", NAMED_BARRIERS - 1));
                }
                let threads = self.launch.threads as usize;
                if count == 0 || !count.is_multiple_of(32) || count > threads {
                    return Err(format!(
                        "barrier {id} with a count of {count} threads: expected a multiple of 32 up to the {threads} of the block"
                    ));
                }
                let block = t / threads;
                return self.named_barrier(t, NAMED_BARRIERS * block + id, count, op == "bar.sync");
            }
            _ => return Ok(None),
        }
        Ok(Some(true))
    }

    fn arrive_in_cluster(&mut self, t: usize, at: u64) -> Result<(), String> {
        self.check_block_runs(t, at)?;
        self.arrive(t, at)
    }

    fn tensor_load_asm(
        &mut self,
        t: usize,
        multicast: bool,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<(), String> {
        let arg = |this: &Self, i: usize| this.bits(t, operand(args, i)?);
        let rank = args.len().saturating_sub(3 + usize::from(multicast));
        let at = self.box_coordinates(t, args, 2..2 + rank)?;
        let [to, map, barrier] = [arg(self, 0)?, arg(self, 1)?, arg(self, 2 + rank)?];
        match multicast {
            true => self.multicast(t, [to, map, barrier, arg(self, 3 + rank)?], &at, global),
            false => self.tma_load(t, [to, map, barrier], &at, global),
        }
    }

    /// Unlike an address, the same for all blocks of the cluster.
    fn mbarrier_key(&self, t: usize, address: u64) -> u64 {
        if self.threads.len() == self.launch.threads as usize {
            return address;
        }
        let (rank, own) = self.shared.block_of(address, t as u32);
        in_cluster_of(own, rank)
    }

    /// A copy to the blocks of the cluster that `mask` selects: to the same address, and with the mbarrier of the same address.
    fn multicast(
        &mut self,
        t: usize,
        [to, map, barrier, mask]: [u64; 4],
        at: &[i64],
        global: &mut Global,
    ) -> Result<(), String> {
        for rank in (0..16).filter(|rank| mask >> rank & 1 == 1) {
            let [to, barrier] = [to, barrier].map(|address| in_cluster_of(address, rank));
            self.check_block_runs(t, to)?;
            self.tma_load(t, [to, map, barrier], at, global)?;
            // The phase ends after this thread has issued the copy, so after the phases that it has waited for.
            let phases = self.shared.clocks.phases(t as u32);
            self.mbarrier(t, barrier)?.arrived.join(&phases);
        }
        Ok(())
    }

    /// Checks that the block of an address has threads that have not exited: its shared memory ends with it.
    fn check_block_runs(&self, t: usize, address: u64) -> Result<(), String> {
        let (rank, _) = self.shared.block_of(address, t as u32);
        let threads = self.launch.threads as usize;
        let own = self.threads.get(rank as usize * threads..(rank as usize + 1) * threads);
        let own = own.ok_or_else(|| format!("the cluster has no block of rank {rank}"))?;
        match own.iter().all(|thread| thread.waiting == Some(Waiting::Done)) {
            true => Err(format!("access of the shared memory of the block of rank {rank}, which has exited")),
            false => Ok(()),
        }
    }

    fn mbarrier(&mut self, t: usize, at: u64) -> Result<&mut Mbarrier, String> {
        let at = self.mbarrier_key(t, at);
        let Some(b) = self.mbarriers.get_mut(&at) else {
            return Err(format!("no mbarrier is initialized at {at}"));
        };
        if !self.shared.clocks.happens_before(t as u32, b.initialized_by.0, b.initialized_by.1) {
            return Err(format!(
                "race: thread {t} uses an mbarrier that thread {} initialized, without a block barrier in between",
                b.initialized_by.0
            ));
        }
        Ok(b)
    }

    fn arrive(&mut self, t: usize, at: u64) -> Result<(), String> {
        let at = self.mbarrier_key(t, at);
        let (source, phase) = {
            let b = self.mbarrier(t, at)?;
            (b.source, b.phase)
        };
        // Without this order, the arrive could have counted for the previous phase: the number of arrivals per phase
        // would depend on timing.
        if phase > 0 && !self.shared.clocks.happens_before(t as u32, source, phase) {
            return Err(format!(
                "thread {t} arrives in phase {phase} of an mbarrier without having seen that phase {} is complete: one arrive too many, or a \
                 missing wait",
                phase - 1
            ));
        }
        let arrived = self.shared.clocks.release(t as u32);
        let b = self.mbarrier(t, at)?;
        if b.pending_arrivals == 0 {
            return Err(format!("one arrive too many: a phase takes {}", b.arrivals));
        }
        b.pending_arrivals -= 1;
        b.arrived.join(&arrived);
        b.step();
        self.wake(at);
        Ok(())
    }

    /// Wakes the threads that wait for a phase that is now complete.
    fn wake(&mut self, at: u64) {
        let parity = u64::from(self.mbarriers[&at].phase % 2);
        for thread in &mut self.threads {
            if let Some(Waiting::Phase(p, wanted)) = thread.waiting
                && p == at
                && wanted != parity
            {
                thread.waiting = None;
            }
        }
    }

    /// Completes one copy in flight: its mbarrier counts the bytes. Returns false if no copy is in flight.
    pub(super) fn complete_bulk_copy(&mut self, which: usize) -> bool {
        if self.bulk_copies.is_empty() {
            return false;
        }
        let copy = self.bulk_copies.swap_remove(which % self.bulk_copies.len());
        if let Some(b) = self.mbarriers.get_mut(&copy.barrier) {
            b.bytes -= copy.bytes;
            b.bytes_in_flight -= copy.bytes;
            b.step();
            self.wake(copy.barrier);
        }
        true
    }

    fn tma_load(
        &mut self,
        t: usize,
        [to, map, barrier]: [u64; 3],
        at: &[i64],
        global: &mut Global,
    ) -> Result<(), String> {
        let (barrier, cluster) = (self.mbarrier_key(t, barrier), self.threads.len() > self.launch.threads as usize);
        let map = self.tensor_map(map)?;
        let (size, places) = box_places(map, self.launch.args, at)?;
        let mut bytes = Vec::with_capacity(places.len() * size);
        for place in places {
            match place {
                Some(address) => bytes.extend(self.read_global(t, global, address, size)?),
                None => bytes.extend(std::iter::repeat_n(0, size)),
            }
        }
        let n = bytes.len() as i64;
        let b = self.mbarrier(t, barrier)?;
        if !b.fenced {
            return Err("a bulk copy completes on an mbarrier that was initialized without a fence".into());
        }
        if b.bytes - b.bytes_in_flight < n && !cluster {
            return Err(format!(
                "a bulk copy writes {n} bytes, but only {} more are expected by expect_tx",
                b.bytes - b.bytes_in_flight
            ));
        }
        b.bytes_in_flight += n;
        b.last_copy_phase = b.phase + 1;
        let (source, when) = (b.source, b.phase + 1);
        self.bulk_copies.push(BulkCopy { barrier, bytes: n });
        for (chunk, place) in bytes.chunks(16).zip(swizzled_chunks(map, to)?) {
            self.shared.write_bulk(place, chunk, t as u32, source, when)?;
        }
        Ok(())
    }

    /// The tensor map of a handle.
    pub(super) fn tensor_map(&self, handle: u64) -> Result<&'a TensorMapDesc, String> {
        let map = handle.checked_sub(MAP_BASE).and_then(|i| self.launch.tensor_maps.get(i as usize));
        map.ok_or_else(|| "unknown tensor map".into())
    }

    /// The coordinates of a box.
    pub(super) fn box_coordinates(
        &self,
        t: usize,
        args: &[(Ty, Operand)],
        which: std::ops::Range<usize>,
    ) -> Result<Vec<i64>, String> {
        which.map(|i| Ok(i64::from(self.bits(t, operand(args, i)?)? as u32 as i32))).collect()
    }

    fn named_barrier(&mut self, t: usize, id: usize, count: usize, waits: bool) -> Result<Option<bool>, String> {
        let arrived = self.shared.clocks.release(t as u32);
        let named = self.named.entry(id).or_default();
        named.arrived.join(&arrived);
        if named.arrivals_so_far == 0 {
            named.count = count;
        }
        if named.count != count {
            let (id, other) = (id % NAMED_BARRIERS, named.count);
            return Err(format!("barrier {id} has a count of {count} threads here, and of {other} elsewhere"));
        }
        named.arrivals_so_far += 1;
        if waits {
            named.waiting.push(t);
            self.threads[t].waiting = Some(Waiting::NamedBarrier(id));
        }
        if named.arrivals_so_far > count {
            return Err(format!("more than {count} threads arrive at barrier {}", id % NAMED_BARRIERS));
        }
        if named.arrivals_so_far == count {
            let done = std::mem::take(named);
            for w in done.waiting {
                self.shared.clocks.acquire(w as u32, &done.arrived);
                self.threads[w].waiting = None;
                if w != t {
                    self.finish(w, None, super::value::Value::Undef);
                }
            }
            return Ok(Some(true));
        }
        Ok(Some(!waits))
    }

    /// Checks what must hold when all threads have exited.
    pub(super) fn barriers_at_end(&self) -> Result<(), String> {
        if !self.bulk_copies.is_empty() {
            return Err(format!("the block ends while {} bulk copies are in flight", self.bulk_copies.len()));
        }
        self.mbarriers.values().try_for_each(Mbarrier::check_copies_awaited)
    }

    /// The barriers that are in an incomplete phase, for the report of a deadlock.
    pub(super) fn incomplete_phases(&self) -> String {
        let mut list: Vec<String> = self
            .mbarriers
            .iter()
            .filter(|(_, b)| b.pending_arrivals != b.arrivals || b.bytes != 0)
            .map(|(at, b)| {
                format!(
                    "; the mbarrier at {at} is missing {} of {} arrivals and {} bytes",
                    b.pending_arrivals, b.arrivals, b.bytes
                )
            })
            .collect();
        list.sort();
        list.concat()
    }
}

pub(super) fn last_number(text: &str) -> Result<u32, String> {
    let word = text.trim_end_matches(';').rsplit(' ').next().unwrap_or("");
    word.parse().map_err(|_| format!("`{text}`"))
}

/// The shared addresses of the chunks of 16 bytes of a box that starts at `start`. With a swizzle, rows start at multiples of
/// the span.
pub(super) fn swizzled_chunks(map: &TensorMapDesc, start: u64) -> Result<impl Iterator<Item = u64>, String> {
    let span = u64::from(map.swizzle_bytes);
    let rows = (span / 16).saturating_sub(1);
    if !start.is_multiple_of(if span > 0 { 8 * span } else { 128 }) {
        return Err(format!("a bulk copy at shared address {start}, which is not aligned to the swizzle pattern"));
    }
    let row = map.block[0] as u64 * DType::from_name(&map.elem).map_or(0, DType::bytes) as u64;
    let (chunks, pitch) = if span > row { (row / 16, span) } else { (1, 16) };
    Ok((0..)
        .map(move |i| start + i / chunks * pitch + i % chunks * 16)
        .map(move |linear| linear ^ (((linear >> 7) & rows) << 4)))
}

/// The size of an element, and the addresses of a box's elements in the order of shared memory without a swizzle, `None`
/// for elements outside of the tensor.
pub(super) fn box_places(map: &TensorMapDesc, args: &[u64], at: &[i64]) -> Result<(usize, Vec<Option<u64>>), String> {
    let value = |e: &HostExpr| match *e {
        HostExpr::Const(c) => Ok(c),
        HostExpr::Arg(i) => args.get(i).map(|&bits| bits as i64).ok_or("a tensor map of a missing argument"),
    };
    let size = DType::from_name(&map.elem).map_or(0, DType::bytes);
    let shape: Vec<i64> = map.shape.iter().map(value).collect::<Result<_, _>>()?;
    let mut strides = vec![1];
    for stride in &map.strides {
        strides.push(value(stride)?);
    }
    if [at.len(), strides.len(), map.block.len()] != [shape.len(); 3] {
        return Err(format!("{} coordinates for a tensor map of {} dimensions", at.len(), shape.len()));
    }
    let base = *args.get(map.base).ok_or("a tensor map of a missing argument")?;
    for (i, &s) in strides.iter().enumerate().skip(1) {
        if shape[i] > 1 && s.wrapping_mul(size as i64) % 16 != 0 {
            return Err(format!(
                "a tensor map with a stride of {} bytes: expected a multiple of 16",
                s.wrapping_mul(size as i64)
            ));
        }
    }
    if !base.is_multiple_of(16) {
        return Err("a tensor map of a tensor that is not aligned to 16 bytes".into());
    }
    if at.first().is_some_and(|first| first.wrapping_mul(size as i64) % 16 != 0) {
        return Err(format!(
            "a box starts at column {} of elements of {size} bytes: expected a multiple of 16 bytes",
            at[0]
        ));
    }
    let total: u32 = map.block.iter().product();
    let mut places = Vec::with_capacity(total as usize);
    for linear in 0..total {
        let (mut rest, mut address, mut inside) = (linear, base as i64, true);
        for d in 0..shape.len() {
            let x = at[d] + i64::from(rest % map.block[d]);
            rest /= map.block[d];
            inside &= (0..shape[d]).contains(&x);
            address = address.wrapping_add(x.wrapping_mul(strides[d]).wrapping_mul(size as i64));
        }
        places.push(inside.then_some(address as u64));
    }
    Ok((size, places))
}
