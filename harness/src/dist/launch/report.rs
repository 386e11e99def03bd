//! Formats how ranks ended, and finds the one that failed first.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::cli::STOPPED;
use crate::dist::comm::error::{awaited_ranks, failed_peer};
use crate::signals;

/// Failures within this many seconds are treated as simultaneous.
const SIMULTANEOUS_SECONDS: f64 = 1.0;

/// How a rank ended.
#[derive(Clone, Debug)]
pub struct End {
    pub rank: usize,
    pub status: ExitStatus,
    /// Seconds since the start.
    pub after: f64,
    /// The rank's last output lines, at most [`super::LAST_LINES`].
    pub last: Vec<String>,
    /// Whether the launcher terminated the rank, because it did not end in time.
    pub terminated_by_launcher: bool,
    /// The rank's process group, if SIGKILL did not end all of its processes.
    pub remaining_group: Option<i32>,
}

impl End {
    /// Formats the exit status: `with exit code 1`, `by signal 9 (SIGKILL)`.
    pub fn describe(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(0), _) => "regularly".into(),
            (Some(code), _) => format!("with exit code {code}"),
            (None, Some(signal)) => match signals::name(signal) {
                name if name.starts_with("SIG") => format!("by signal {signal} ({name})"),
                _ => format!("by signal {signal}"),
            },
            (None, None) => "with an unknown status".into(),
        }
    }

    /// Whether it ended in response to a stop signal, with its state saved.
    pub fn has_saved(&self) -> bool {
        self.status.code() == Some(STOPPED.into())
    }

    /// Whether one of these signals ended it.
    fn is_by(&self, signals: &[i32]) -> bool {
        self.status.signal().is_some_and(|signal| signals.contains(&signal))
    }
}

/// A rank that the launcher terminated and that another rank waited for, with that rank's message.
fn hung(ends: &[End]) -> Option<(&End, &String)> {
    ends.iter().filter(|end| end.terminated_by_launcher).find_map(|end| {
        let others = ends.iter().filter(|other| other.rank != end.rank);
        others
            .flat_map(|other| &other.last)
            .find(|line| awaited_ranks(line).contains(&end.rank))
            .map(|line| (end, line))
    })
}

/// The report if a rank failed; `None` if all ended regularly, after a stop signal, or by one of `forwarded`, which the
/// launcher passed on.
pub fn report(ends: &[End], forwarded: &[i32]) -> Option<String> {
    let fails =
        |end: &&End| !end.status.success() && !end.has_saved() && !end.terminated_by_launcher && !end.is_by(forwarded);
    let failures: Vec<&End> = ends.iter().filter(fails).collect();
    let seen = failures.first()?;
    let together = || failures.iter().filter(|end| end.after < seen.after + SIMULTANEOUS_SECONDS);
    // A killed rank did not end because of another rank, even if another one was seen first; nor did a rank that names
    // no other failed rank.
    let killed = together().find(|end| end.status.signal().is_some());
    let names = |end: &End, other: &End| end.last.iter().any(|line| failed_peer(line) == Some(other.rank));
    let alone = together().find(|end| !failures.iter().any(|other| other.rank != end.rank && names(end, other)));
    let hung = hung(ends).filter(|_| killed.is_none());
    let first = hung.map(|(end, _)| end).or(killed.or(alone).copied()).unwrap_or(seen);
    let mut text = match hung {
        Some((_, line)) => format!(
            "rank {} hung, and the launcher terminated it: it ended {} after {:.1} s; another rank reported: {}",
            first.rank,
            first.describe(),
            first.after,
            line.strip_prefix("error: ").unwrap_or(line)
        ),
        None => format!("rank {} failed first: it ended {} after {:.1} s", first.rank, first.describe(), first.after),
    };
    match first.last.is_empty() {
        true if hung.is_some() => text += "; it printed nothing",
        true => text += ", and printed nothing",
        false => {
            text += "; its last lines:";
            for line in &first.last {
                text += &format!("\n  | {line}");
            }
        }
    }
    let others: Vec<&End> = ends.iter().filter(|end| end.rank != first.rank).collect();
    if !others.is_empty() {
        text += &format!("\n{}", per_rank_lines(&others));
    }
    Some(text)
}

/// One line per rank.
pub fn per_rank_lines(ends: &[&End]) -> String {
    let line = |end: &&End| {
        let cause = match (end.terminated_by_launcher, end.status.signal()) {
            (true, Some(_)) => ", which the launcher sent",
            (true, None) => ", after the launcher's signal,",
            (false, _) => "",
        };
        format!("rank {} ended {}{cause} after {:.1} s", end.rank, end.describe(), end.after)
    };
    ends.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, code: i32, after: f64, last: &str) -> End {
        let status = std::process::ExitStatus::from_raw(if code > 0 { code << 8 } else { -code });
        End {
            rank,
            status,
            after,
            last: vec!["working".into(), last.to_string()],
            terminated_by_launcher: false,
            remaining_group: None,
        }
    }

    fn first(ends: &[End]) -> String {
        let text = report(ends, &[]).unwrap();
        text.split(" failed first").next().unwrap().to_string()
    }

    #[test]
    fn the_first_failure_is_the_rank_that_others_name() {
        let lost = "rank 2 has ended, seen by rank 0 at barrier: its connection is closed";
        // A process closes its connections shortly before its end is seen.
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 7, 1.01, "the disk is full")]), "rank 2");
        let told = "rank 0 aborted: rank 2 has ended, seen by rank 0 at barrier: its connection is closed";
        assert_eq!(first(&[end(1, 3, 1.0, told), end(0, 3, 1.0, lost), end(2, 7, 1.01, "the disk is full")]), "rank 2");
        // A killed rank, whatever its last line; and a failure long before the others.
        assert_eq!(first(&[end(0, 3, 1.0, "no"), end(2, -9, 1.01, lost)]), "rank 2");
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 7, 9.0, "the disk is full")]), "rank 0");
        // Each names the other: the one seen first.
        let other = "rank 0 has ended, seen by rank 2 at barrier: its connection is closed";
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 3, 1.0, other)]), "rank 0");
        assert!(report(&[end(0, 0, 1.0, "done")], &[]).is_none());
        // A hanging rank ends last, when it is terminated.
        let waited = "error: rank 0 waited 300 s for rank 2 at barrier";
        let hung = End { terminated_by_launcher: true, ..end(2, -9, 9.0, "step 7") };
        let ends = [end(0, 1, 1.0, waited), end(1, 1, 1.0, &format!("error: rank 0 aborted: {waited}")), hung];
        let text = report(&ends, &[]).unwrap();
        assert!(
            text.starts_with("rank 2 hung, and the launcher terminated it: it ended by signal 9 (SIGKILL)"),
            "{text}"
        );
        assert!(
            text.contains("another rank reported: rank 0 waited 300 s for rank 2") && text.contains("| step 7"),
            "{text}"
        );
        // Ranks that saved after a stop signal, and ranks that the signal itself ended, have not failed.
        let asked = [end(0, 75, 1.0, "stopped"), end(1, -15, 1.0, "working")];
        assert!(report(&asked, &[15]).is_none() && report(&asked, &[2]).is_some());
    }
}
