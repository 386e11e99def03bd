//! Tests that command lines of earlier versions are still accepted.

use clap::{Command, CommandFactory, ValueEnum};

use super::Arguments;
use super::compile::Emit;

/// A flag of an earlier version, and its present name.
type Renamed = (&'static str, &'static str);

/// Commands, with their flags that were renamed.
const OLD_FLAGS: &[(&[&str], &[Renamed])] = &[
    (&["compile", "explain", "run"], &[("take-turns", "pingpong"), ("bulk-copies", "tma")]),
    (
        &["train", "profile", "memory", "report", "bench model", "bench ddp", "bench shard"],
        &[("width", "d-model"), ("hidden", "d-ff")],
    ),
    (&["train", "profile", "memory", "report", "bench model"], &[("vocab", "vocab-size")]),
    (&["train"], &[("evaluate-windows", "evaluate-sequences")]),
    (&["train", "profile"], &[("wire", "comm-dtype")]),
    (&["train", "profile", "bench ddp", "bench shard"], &[("leave-sms", "reserve-sms")]),
    (&["bench ddp"], &[("wires", "comm-dtypes")]),
    (&["profile", "bench comm", "bench ddp", "bench shard", "account ddp"], &[("back-end", "backend")]),
    (&["account memory", "account fsdp"], &[("width", "d-model"), ("hidden", "d-ff")]),
    (&["account fsdp"], &[("shared-activations", "sharded-activations")]),
    (&["memory"], &[("from-bytes", "min-bytes")]),
    (&["bench model"], &[("replay", "cuda-graph")]),
    (
        &["bench attention"],
        &[
            ("length", "seq-len"),
            ("lengths", "seq-lens"),
            ("dim", "head-dim"),
            ("forward", "fwd-tiles"),
            ("keys", "dkdv-tiles"),
            ("queries", "dq-tiles"),
            ("parts", "splits"),
        ],
    ),
    (&["bench compile"], &[("dim", "head-dim")]),
    (&["bench fused"], &[("dims", "head-dims"), ("lengths", "seq-lens")]),
    (&["bench norm"], &[("widths", "d")]),
    (
        &["tune"],
        &[
            ("length", "seq-len"),
            ("dim", "head-dim"),
            ("again", "retune"),
            ("limit", "candidate-timeout"),
            ("columns", "column-major"),
        ],
    ),
    (
        &["leaderboard"],
        &[
            ("length", "seq-len"),
            ("dim", "head-dim"),
            ("full", "non-causal"),
            ("forward", "fwd-tiles"),
            ("keys", "dkdv-tiles"),
            ("queries", "dq-tiles"),
        ],
    ),
];

/// Returns the command with this path.
fn command(path: &str) -> Command {
    let words = path.split(' ').filter(|word| *word != "leaderboard");
    let program = match path {
        "leaderboard" => crate::leaderboard::Arguments::command(),
        _ => Arguments::command(),
    };
    words.fold(program, |command, word| command.find_subcommand(word).unwrap().clone())
}

#[test]
fn old_flags_are_hidden_aliases() {
    for (paths, flags) in OLD_FLAGS {
        for path in *paths {
            let command = command(path);
            for &(old, new) in *flags {
                let argument = command.get_arguments().find(|argument| argument.get_long() == Some(new));
                let argument = argument.unwrap_or_else(|| panic!("{path} has no --{new}"));
                let aliases = argument.get_all_aliases().unwrap_or_default();
                assert!(aliases.contains(&old), "{path} does not accept --{old}, only --{new} and {aliases:?}");
                let shown = argument.get_visible_aliases().unwrap_or_default();
                assert!(shown.is_empty() && !argument.is_hide_set(), "{path} --help shows {shown:?} beside --{new}");
            }
        }
    }
}

#[test]
fn old_flags_have_the_values_of_the_new_ones() {
    let line = |flags: &str| {
        let words = format!("tilewright bench norm {flags}");
        Arguments::command().try_get_matches_from(words.split(' ')).map_err(|error| error.to_string()).unwrap()
    };
    assert_eq!(line("--widths 64,100 --rows 3"), line("--d 64,100 --rows 3"));
    assert_eq!(Emit::from_str("laid", false), Ok(Emit::Layout));
}
