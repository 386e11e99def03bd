//! What goes wrong between ranks. Every message names the operation, and the ranks that it is about.

use std::fmt::Write;
use std::time::Duration;

/// Result of everything that talks to other ranks.
pub type Result<T, E = CommError> = std::result::Result<T, E>;

/// Why a collective, or the meeting of the ranks, failed. After such an error a communicator is of no more use: whatever
/// is called next returns it again.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// Ranks called different collectives at the same place of the sequence.
    #[error("the ranks disagree about collective {seq}:{}\n  help: every rank has to call the same collectives, of the same element type and length, in the same order", list(.calls))]
    Disagree {
        seq: u64,
        /// What each rank called, by rank.
        calls: Vec<String>,
    },
    /// Ranks did not come to a collective in time.
    #[error("rank {rank} waited {} for {} at {call}\n  help: they hang or are slower than that; TILEWRIGHT_COMM_TIMEOUT=SECONDS waits longer", seconds(.after), ranks(.missing))]
    TimedOut { rank: usize, call: String, missing: Vec<usize>, after: Duration },
    /// A rank is gone.
    #[error("rank {peer} has ended, seen by rank {rank} at {call}: {why}")]
    Lost { rank: usize, peer: usize, call: String, why: String },
    /// Another rank gave up and said why.
    #[error("rank {by} gave up: {reason}\n  (rank {rank} was at {call})")]
    Aborted { rank: usize, by: usize, call: String, reason: String },
    /// A call that makes no sense on any rank; nothing was sent.
    #[error("{0}")]
    Misuse(String),
    /// The ranks did not find each other.
    #[error("{0}")]
    Setup(String),
    /// What carries the bytes failed.
    #[error("{call} failed on rank {rank}: {message}")]
    Backend { rank: usize, call: String, message: String },
}

/// The ranks for which a line of [`CommError::TimedOut`] says that somebody waited.
pub fn awaited_ranks(line: &str) -> Vec<usize> {
    let waited = line.rsplit_once(" waited ").map(|(_, rest)| rest);
    let names = waited.and_then(|rest| rest.split_once(" s for rank")).and_then(|(_, rest)| rest.split_once(" at "));
    // How many more there are is the number of none.
    let names =
        names.map(|(names, _)| names.strip_suffix(" more").and_then(|n| n.rsplit_once(" and ")).map_or(names, |n| n.0));
    let numbers = names.map(|names| names.split(|c: char| !c.is_ascii_digit()));
    numbers.into_iter().flatten().filter_map(|number| number.parse().ok()).collect()
}

/// The rank of which a line of [`CommError::Lost`] or [`CommError::Aborted`] says that it was to blame.
pub fn failed_peer(line: &str) -> Option<usize> {
    let (_, rest) = line.split_once("rank ")?;
    let (number, what) = rest.split_once(' ')?;
    let number = number.parse().ok()?;
    (what.starts_with("has ended, seen by rank ") || what.starts_with("gave up: ")).then_some(number)
}

fn list(calls: &[String]) -> String {
    let mut text = String::new();
    for (rank, call) in calls.iter().enumerate() {
        let _ = write!(text, "\n  rank {rank}: {call}");
    }
    text
}

/// The most ranks that a message names.
const MAX_NAMED_RANKS: usize = 16;

/// `rank 3`, `ranks 1 and 3`, `ranks 1, 2 and 3`; of more than [`MAX_NAMED_RANKS`], how many more there are.
pub fn ranks(ranks: &[usize]) -> String {
    let mut words: Vec<String> = ranks.iter().take(MAX_NAMED_RANKS).map(usize::to_string).collect();
    if ranks.len() > MAX_NAMED_RANKS {
        words.push(format!("{} more", ranks.len() - MAX_NAMED_RANKS));
    }
    match words.split_last() {
        None => "no rank".to_string(),
        Some((last, [])) => format!("rank {last}"),
        Some((last, rest)) => format!("ranks {} and {last}", rest.join(", ")),
    }
}

/// A duration in seconds, with as many digits as it needs.
pub fn seconds(duration: &Duration) -> String {
    format!("{} s", (duration.as_secs_f64() * 1e3).round() / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_failed_rank() {
        let call = || "barrier".to_string();
        let lost = CommError::Lost { rank: 1, peer: 12, call: call(), why: "its connection is closed".into() };
        let aborted = CommError::Aborted { rank: 1, by: 3, call: call(), reason: "the disk is full".into() };
        let line = |error: CommError| error.to_string().lines().next().unwrap_or_default().to_string();
        assert_eq!(failed_peer(&line(lost.clone())), Some(12));
        assert_eq!(failed_peer(&format!("error: {}", line(aborted))), Some(3));
        let late = CommError::TimedOut { rank: 1, call: call(), missing: vec![2], after: Duration::from_secs(1) };
        assert_eq!(
            [failed_peer(&line(late.clone())), failed_peer("the disk is full"), failed_peer("rank x has ended")],
            [None; 3]
        );
        assert_eq!(awaited_ranks(&format!("error: rank 0 gave up: {}", line(late))), [2]);
        let several =
            CommError::TimedOut { rank: 1, call: call(), missing: vec![2, 10, 3], after: Duration::from_millis(1500) };
        assert_eq!(awaited_ranks(&line(several)), [2, 10, 3]);
        let many = CommError::TimedOut {
            rank: 1,
            call: call(),
            missing: (2..1 << 20).collect(),
            after: Duration::from_secs(1),
        };
        assert!(many.to_string().len() < 300 && many.to_string().contains("17 and 1048558 more at"), "{many}");
        assert_eq!(awaited_ranks(&line(many)), (2..18).collect::<Vec<_>>());
        assert!(awaited_ranks("rank 1 waited for rank 2").is_empty() && awaited_ranks(&line(lost)).is_empty());
    }
}
