//! Autotuning: configurations of a kernel that are selected by measurement.
//!
//! `#[autotune]` above `#[kernel]` lists configurations (tile sizes, warps, stages) and names the arguments on which
//! the best one depends, the *key*. A launch without a configuration uses that of a table that the program names
//! ([`use_table`]), else the first of these that exists:
//!
//! 1. that of code for the same types and constants of the key that this program embeds, unless a measurement is
//!    requested;
//! 2. what this machine measured before, for the same device, key, kernel and compiler (on disk, `store.rs`);
//! 3. a measurement now, if it was requested ([`tuning`], or `TILEWRIGHT_TUNE=seconds`);
//! 4. the entry of a table that ships with the kernel (`table.rs`), for the same device and key;
//! 5. the nearest entry of 2 and 4: its key is equal except for sizes, each within a factor of 16;
//! 6. the kernel's default.
//!
//! A measurement (`tuner.rs`) compiles the candidates in parallel (`load.rs`), drops those that cannot fit, checks each
//! candidate's outputs against those of the first, on scratch memory so that the caller's memory does not change, and
//! times the remaining ones in interleaved rounds with a cold L2 cache. Every step goes to a log on disk
//! (`journal.rs`): an interrupted run resumes where it stopped, and a candidate during which the process ended twice is
//! not tried again.

mod choose;
mod compare;
mod config;
mod journal;
mod load;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod tuner;

pub use choose::{Choice, Options, Source, choose, current_choices, has_table, tuning, use_table};
pub use config::{
    Autotune, Config, ConfigDef, EvaluateKey, KeyDef, KeyPart, KeyValue, Problem, shared_configs, size_bucket, tuned,
};
pub use journal::{Event as JournalEvent, Journal};
pub use store::{DeviceId, saved_choices};
pub use table::{Entry, Table};
pub use tuner::{Candidate, CandidateLaunch, Outcome, Report};
