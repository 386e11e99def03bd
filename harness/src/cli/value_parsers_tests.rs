//! Tests that every option with a fractional number or a duration uses a parser of [`tilewright_cli::value_parsers`].

use std::any::TypeId;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory};

/// Options that accept negative numbers.
const MAY_BE_NEGATIVE: [&str; 1] = ["--addend"];

/// Returns the command line that leads to each option with a fraction or a duration: subcommands, then the option.
fn options(command: &Command, words: &[String]) -> Vec<Vec<String>> {
    let kinds = [TypeId::of::<f64>(), TypeId::of::<f32>(), TypeId::of::<Duration>()];
    let takes_fraction = |arg: &&clap::Arg| kinds.iter().any(|kind| arg.get_value_parser().type_id() == *kind);
    let name = |arg: &clap::Arg| format!("--{}", arg.get_long().expect("an option with a long name"));
    let own = command.get_arguments().filter(takes_fraction).map(|arg| [words, &[name(arg)]].concat());
    let below =
        command.get_subcommands().flat_map(|sub| options(sub, &[words, &[sub.get_name().to_string()]].concat()));
    own.chain(below).collect()
}

#[test]
fn every_numeric_option_refuses_nan_infinity_and_negatives() {
    let programs = [crate::cli::Arguments::command(), crate::leaderboard::Arguments::command()];
    let mut seen = 0;
    for program in &programs {
        for words in options(program, &["program".to_string()]) {
            seen += 1;
            let (option, before) = words.split_last().unwrap();
            for value in ["nan", "NaN", "-nan", "inf", "-inf", "infinity", "1e999", "-1", "", "x"] {
                if value == "-1" && MAY_BE_NEGATIVE.contains(&option.as_str()) {
                    continue;
                }
                let line = before.iter().cloned().chain([format!("{option}={value}")]);
                let error = program.clone().try_get_matches_from(line).expect_err(&format!("{words:?} takes {value}"));
                let refused = [ErrorKind::ValueValidation, ErrorKind::InvalidValue].contains(&error.kind());
                assert!(refused && error.to_string().contains(option.as_str()), "{words:?} {value}: {error}");
            }
        }
    }
    assert!(seen > 40, "{seen} options were found");
}

/// Returns all options that take a duration, with their help texts.
fn times(command: &Command) -> Vec<(String, String)> {
    let is_time = |arg: &&clap::Arg| {
        let names = arg.get_value_names().unwrap_or_default();
        ["SECONDS", "MINUTES", "MS"].iter().any(|unit| names.iter().any(|name| name.as_str() == *unit))
    };
    let help = |arg: &clap::Arg| {
        let name = arg.get_long().unwrap_or_default();
        (format!("{} --{name}", command.get_name()), arg.get_help().map(ToString::to_string).unwrap_or_default())
    };
    let own = command.get_arguments().filter(is_time).map(help);
    own.chain(command.get_subcommands().flat_map(times)).collect()
}

#[test]
fn help_says_how_long_a_time_may_be() {
    let programs = [crate::cli::Arguments::command(), crate::leaderboard::Arguments::command()];
    let times: Vec<_> = programs.iter().flat_map(times).collect();
    assert!(times.len() > 10, "{times:?}");
    for (option, help) in times {
        // `explain --time-ms` is a measured time, without an upper limit.
        assert!(help.contains("at most") || option == "explain --time-ms", "{option}: {help}");
    }
}
