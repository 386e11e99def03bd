//! Description of a collective: operation, element type, length. All ranks have to agree on it.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How the values of all ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    /// The sum divided by the world size; floats only.
    Avg,
    /// NaN if any rank has NaN.
    Max,
}

/// Element types of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F64,
    Bf16,
    F16,
    I32,
    I64,
    U8,
    U32,
    U64,
}

impl Dtype {
    /// All types; the index is the code in headers.
    pub const ALL: [Dtype; 9] =
        [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16, Dtype::I32, Dtype::I64, Dtype::U8, Dtype::U32, Dtype::U64];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::U8 => 1,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
        }
    }

    /// Whether averages are defined.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F64 | Dtype::Bf16 | Dtype::F16)
    }

    /// Name as in kernel signatures and records.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
            Dtype::U32 => "u32",
            Dtype::U64 => "u64",
        }
    }
}

/// A Rust type that collectives support.
pub trait Element: Pod + Send + Sync {
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => { $(impl Element for $type { const DTYPE: Dtype = Dtype::$dtype; })* };
}
elements!(f32 => F32, f64 => F64, bf16 => Bf16, f16 => F16, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64);

/// The collectives. All but an exchange work in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Every rank ends with the reduction of all ranks' buffers.
    AllReduce(Reduce),
    /// The buffer is `world` equal chunks; rank r ends with the reduction of all ranks' chunks r in its chunk r. Its
    /// other chunks are undefined afterwards.
    ReduceScatter(Reduce),
    /// The buffer is `world` equal chunks; every rank ends with chunk r of rank r, for all r.
    AllGather,
    /// Every rank ends with the root's buffer.
    Broadcast { root: usize },
    /// No rank returns before all ranks have called it.
    Barrier,
    /// Exchange between two ranks: each sends its buffer, which stays unchanged, to the peer's receive buffer
    /// (`Communicator::set_peer_buffer`). With peer reads nothing is sent: neither rank continues before both have
    /// arrived, and each may then read the other's memory.
    Exchange,
}

/// A collective as a rank calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub op: Op,
    pub dtype: Dtype,
    /// Elements of the whole buffer.
    pub count: usize,
    /// Type to which floats are rounded for communication; sums are f32 in any case.
    pub comm_dtype: Option<Dtype>,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reduce = |reduce| match reduce {
            Reduce::Sum => "sum",
            Reduce::Avg => "avg",
            Reduce::Max => "max",
        };
        match self.op {
            Op::Barrier => return f.write_str("barrier"),
            Op::AllReduce(r) => write!(f, "all_reduce({})", reduce(r))?,
            Op::ReduceScatter(r) => write!(f, "reduce_scatter({})", reduce(r))?,
            Op::AllGather => f.write_str("all_gather")?,
            Op::Exchange => f.write_str("exchange")?,
            Op::Broadcast { root } => write!(f, "broadcast(from rank {root})")?,
        }
        write!(f, " of {} {}", self.count, self.dtype.name())?;
        match self.comm_dtype {
            Some(comm_dtype) => write!(f, " sent as {}", comm_dtype.name()),
            None => Ok(()),
        }
    }
}

/// Size of the header that ranks exchange: a call with its sequence number, in 8 words of 4 bytes.
pub(super) const HEADER_BYTES: usize = 32;

/// Writes the header of `call`.
pub(super) fn encode(seq: u64, call: &Call) -> [u8; HEADER_BYTES] {
    let reduce = |r| match r {
        Reduce::Sum => 0,
        Reduce::Avg => 1,
        Reduce::Max => 2,
    };
    let (op, detail) = match call.op {
        Op::AllReduce(r) => (0, reduce(r)),
        Op::ReduceScatter(r) => (1, reduce(r)),
        Op::AllGather => (2, 0),
        Op::Broadcast { root } => (3, root as u32),
        Op::Barrier => (4, 0),
        Op::Exchange => (5, 0),
    };
    let comm_dtype = call.comm_dtype.map_or(0, |comm_dtype| comm_dtype as u32 + 1);
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..8].copy_from_slice(&seq.to_le_bytes());
    bytes[8..16].copy_from_slice(&(call.count as u64).to_le_bytes());
    for (slot, word) in bytes[16..].chunks_exact_mut(4).zip([op, detail, call.dtype as u32, comm_dtype]) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Reads a header; `None` if it is invalid.
pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<(u64, Call)> {
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
    let reduce = match word(20) {
        0 => Some(Reduce::Sum),
        1 => Some(Reduce::Avg),
        2 => Some(Reduce::Max),
        _ => None,
    };
    let op = match word(16) {
        0 => Op::AllReduce(reduce?),
        1 => Op::ReduceScatter(reduce?),
        2 => Op::AllGather,
        3 => Op::Broadcast { root: word(20) as usize },
        4 => Op::Barrier,
        5 => Op::Exchange,
        _ => return None,
    };
    let comm_dtype = match word(28) {
        0 => None,
        code => Some(*Dtype::ALL.get(code as usize - 1)?),
    };
    Some((long(0), Call { op, dtype: *Dtype::ALL.get(word(24) as usize)?, count: long(8) as usize, comm_dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let ops = [
            Op::AllReduce(Reduce::Avg),
            Op::ReduceScatter(Reduce::Max),
            Op::AllGather,
            Op::Broadcast { root: 7 },
            Op::Barrier,
            Op::Exchange,
        ];
        for op in ops {
            for dtype in Dtype::ALL {
                for comm_dtype in [None, Some(Dtype::Bf16)] {
                    let call = Call { op, dtype, count: 5_000_000_000, comm_dtype };
                    assert_eq!(decode(&encode(42, &call)), Some((42, call)));
                }
            }
        }
        assert_eq!(decode(&[255; HEADER_BYTES]), None);
    }

    #[test]
    fn calls_are_displayed() {
        let call = Call { op: Op::AllReduce(Reduce::Sum), dtype: Dtype::F32, count: 3, comm_dtype: Some(Dtype::Bf16) };
        assert_eq!(call.to_string(), "all_reduce(sum) of 3 f32 sent as bf16");
    }
}
