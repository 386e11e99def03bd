//! Translates steps to driver commands with addresses.

use super::block::Block;
use super::plan::Step;

/// A command for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Copies `bytes`; one of the addresses may be another GPU's memory.
    Copy { to: u64, from: u64, bytes: usize },
    /// Writes a u32.
    Write { at: u64, value: u32 },
    /// Waits until the u32 at `at` [has reached](super::plan::is_reached) the value.
    Wait { at: u64, value: u32 },
    /// Replaces `bytes` at `own` by the reduction of them and the receive slots: the other ranks' data in rank order,
    /// `stride` bytes apart. Also writes it to the send slot, if there is one.
    Reduce { own: u64, recv: u64, stride: usize, send: Option<u64>, bytes: usize },
}

/// Addresses of all ranks' blocks in this process.
#[derive(Clone, Debug)]
pub struct Addresses {
    pub rank: usize,
    pub block: Block,
    /// By rank, including this rank's.
    pub blocks: Vec<u64>,
}

impl Addresses {
    fn own(&self, at: usize) -> u64 {
        self.at(self.rank, at)
    }

    fn at(&self, rank: usize, at: usize) -> u64 {
        self.blocks[rank] + at as u64
    }

    /// Address of the flag of `lane` that `from` sets here.
    pub fn flag(&self, lane: usize, from: usize) -> u64 {
        self.own(self.block.flag(lane, from))
    }

    /// The commands of a step of `lane`, in order, for a collective on the memory at `buffer`. `peer_address` is the
    /// destination of an exchange in the peer's memory; other collectives ignore it.
    pub fn commands(
        &self,
        lane: usize,
        step: &Step,
        buffer: u64,
        peer_address: u64,
    ) -> impl Iterator<Item = Command> + use<> {
        let block = &self.block;
        let at = |offset: usize| buffer + offset as u64;
        let (first, second) = match step {
            Step::Push { to, from } => {
                let slot = self.at(*to, block.recv_slot(lane, *to, self.rank));
                (Command::Copy { to: slot, from: at(from.start), bytes: from.len() }, None)
            }
            Step::Send { from } => {
                let to = peer_address + from.start as u64;
                (Command::Copy { to, from: at(from.start), bytes: from.len() }, None)
            }
            Step::Pull { from, into } => {
                let slot = self.at(*from, block.send_slot(lane));
                (Command::Copy { to: at(into.start), from: slot, bytes: into.len() }, None)
            }
            Step::Stage { from } => {
                (Command::Copy { to: self.own(block.send_slot(lane)), from: at(from.start), bytes: from.len() }, None)
            }
            Step::Reduce { of, stage } => {
                let send = stage.then(|| self.own(block.send_slot(lane)));
                let (own, recv) = (at(of.start), self.own(block.recv_slots(lane)));
                (Command::Reduce { own, recv, stride: block.segment, send, bytes: of.len() }, None)
            }
            Step::Signal { to, value } => {
                // A stream writes only memory of its GPU; a copy transfers the value. The cell is overwritten only
                // after that copy, on the same lane.
                let (cell, flag) = (self.own(block.cell(lane, *to)), self.at(*to, block.flag(lane, self.rank)));
                (Command::Write { at: cell, value: *value }, Some(Command::Copy { to: flag, from: cell, bytes: 4 }))
            }
            Step::Await { from, value } => (Command::Wait { at: self.flag(lane, *from), value: *value }, None),
        };
        [Some(first), second].into_iter().flatten()
    }
}
