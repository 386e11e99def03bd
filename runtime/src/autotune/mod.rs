//! Configurations of a kernel that are chosen by measurement.
//!
//! `#[autotune]` beside `#[kernel]` lists configurations (tile sizes, warps, stages) and names the arguments on which the best
//! one depends, the *key*. A launch without a configuration then takes, in this order,
//!
//! 1. what this machine found before, for the same device, key, kernel and compiler (on disk, `store.rs`);
//! 2. the entry of a table that ships with the kernel (`table.rs`), for the same device and key;
//! 3. what it measures now, if somebody asked for that ([`tuning`], or `TILEWRIGHT_TUNE=seconds`);
//! 4. the nearest entry of 1 and 2: all the same but the sizes, of which none is more than 16 times the other;
//! 5. the kernel's default.
//!
//! Measuring (`tuner.rs`) compiles the candidates in parallel (`load.rs`), drops those that cannot fit, checks each one's outputs against
//! those of the first, on scratch memory so that nothing of the caller's changes, and times what is left in rounds that take
//! turns, with a cold L2 cache. Every step goes to a log on disk (`journal.rs`): a run that is interrupted goes on where it
//! was, and a candidate during which the process ended twice is not tried again.

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

pub use choose::{Choice, Options, Source, choose, chosen, tuning};
pub use config::{Autotune, Config, ConfigDef, KeyPart, KeyValue, Problem, shared, size_bucket, tuned};
pub use journal::{Event as JournalEvent, Journal};
pub use store::{DeviceId, remembered};
pub use table::{Entry, Table};
pub use tuner::{Attempt, Candidate, Outcome, Report};
