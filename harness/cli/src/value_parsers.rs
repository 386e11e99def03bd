//! clap value parsers for fractional numbers and durations.
//!
//! Every option that takes a fractional number or a duration uses a parser of this file, which rejects NaN, infinities
//! and, where they have no meaning, negative numbers.

use std::ops::RangeBounds;
use std::time::Duration;

/// The longest accepted duration of options in seconds: thirty years. Their help texts state this limit.
const MAX_SECONDS: f64 = 1e9;
/// The longest accepted duration of options in minutes: 19 years.
const MAX_MINUTES: f64 = 1e7;
/// Seconds per day.
const SECONDS_PER_DAY: f64 = 86400.0;
/// The smallest positive normal number.
const MIN_POSITIVE: f64 = f64::MIN_POSITIVE;

fn number(word: &str, range: impl RangeBounds<f64>, expected: &str) -> Result<f64, String> {
    let number = word.trim().parse::<f64>().ok().filter(|number| number.is_finite() && range.contains(number));
    number.ok_or_else(|| format!("expected {expected}"))
}

/// Parses a whole number; which ones are possible depends on more than the text.
pub fn whole(word: &str) -> Result<u32, String> {
    word.trim().parse().map_err(|_| "expected a whole number above 0".to_string())
}

/// Parses a number of things. `program::parse` gives this parser to every option of type `usize`.
pub fn count(word: &str) -> Result<usize, String> {
    word.trim().parse().map_err(|_| format!("expected a whole number from 0 to {}", usize::MAX))
}

/// Parses a finite number.
pub fn finite(word: &str) -> Result<f64, String> {
    number(word, .., "a finite number")
}

/// Parses a number of at least 0.
pub fn non_negative(word: &str) -> Result<f64, String> {
    number(word, 0.0.., "a number from 0")
}

/// Parses a number above 0.
pub fn positive(word: &str) -> Result<f64, String> {
    number(word, MIN_POSITIVE.., "a number above 0")
}

/// Parses a fraction: a number from 0 to 1.
pub fn fraction(word: &str) -> Result<f64, String> {
    number(word, 0.0..=1.0, "a number from 0 to 1")
}

/// Parses a number above 0, at most 1.
pub fn probability(word: &str) -> Result<f64, String> {
    number(word, MIN_POSITIVE..=1.0, "a probability above 0, at most 1")
}

/// Parses the decay of a moving average: a number from 0 to below 1.
pub fn decay(word: &str) -> Result<f64, String> {
    number(word, 0.0..1.0, "a number from 0 to below 1")
}

/// Parses a bucket size in megabytes (10⁶ bytes).
pub fn bucket_mb(word: &str) -> Result<f64, String> {
    number(word, 0.0..1e9, "a number of megabytes from 0 to below 10⁹")
}

/// Parses the size of a collective's buffer in megabytes (10⁶ bytes).
pub fn size_mb(word: &str) -> Result<f64, String> {
    number(word, MIN_POSITIVE..=1e6, "a number of megabytes above 0, at most 10⁶")
}

/// Parses milliseconds, from 0 to a day.
pub fn milliseconds(word: &str) -> Result<f64, String> {
    number(word, 0.0..=1000.0 * SECONDS_PER_DAY, "a number of milliseconds from 0, at most a day")
}

/// Parses seconds, above 0 and at most a day.
pub fn seconds(word: &str) -> Result<f64, String> {
    number(word, MIN_POSITIVE..=SECONDS_PER_DAY, "a number of seconds above 0, at most a day")
}

/// Parses a duration in seconds, at least 0.
pub fn non_negative_seconds(word: &str) -> Result<Duration, String> {
    number(word, 0.0..=MAX_SECONDS, "a number of seconds from 0, at most 10⁹").map(Duration::from_secs_f64)
}

/// Parses a duration in minutes, at least 0.
pub fn minutes(word: &str) -> Result<Duration, String> {
    let minutes = number(word, 0.0..=MAX_MINUTES, "a number of minutes from 0, at most 10⁷")?;
    Ok(Duration::from_secs_f64(60.0 * minutes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_match_their_messages() {
        assert_eq!((non_negative("0"), positive("1e-300"), decay("0.999")), (Ok(0.0), Ok(1e-300), Ok(0.999)));
        assert!(
            positive("0").is_err() && decay("1").is_err() && fraction("1.01").is_err() && seconds("86401").is_err()
        );
        assert_eq!(
            (non_negative_seconds("0.5"), minutes("0.5")),
            (Ok(Duration::from_millis(500)), Ok(Duration::from_secs(30)))
        );
        assert!(non_negative_seconds("1.1e9").is_err() && minutes("1.1e7").is_err());
        // `Instant` can represent every accepted duration.
        assert!(
            std::time::Instant::now()
                .checked_add(2 * non_negative_seconds("1e9").unwrap() + minutes("1e7").unwrap())
                .is_some()
        );
    }
}
