//! Escapes text from files, other programs or the network for messages.

use std::fmt::Write;

/// Approximate maximum number of characters shown of a text.
const MAX_CHARS: usize = 2000;

/// Escapes control characters, including line ends, and characters that reorder or hide others (`\u{1b}`), and
/// truncates after 2000 characters. A terminal shows the result as one line, and interprets nothing in it.
pub fn printable(text: &str) -> String {
    let mut shown = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MAX_CHARS {
            let _ = write!(shown, "... ({} bytes)", text.len());
            break;
        }
        push(&mut shown, c);
    }
    shown
}

/// Same as [`printable`], for a message that may have several lines, and for bytes that may not be UTF-8, which are
/// escaped too (`\xff`).
pub fn printable_lines(bytes: &[u8]) -> String {
    let mut shown = String::new();
    let mut count = 0;
    for chunk in bytes.utf8_chunks() {
        let invalid = chunk.invalid().iter().map(|byte| Err(*byte));
        for piece in chunk.valid().chars().map(Ok).chain(invalid) {
            if count == MAX_CHARS {
                let _ = write!(shown, "... ({} bytes)", bytes.len());
                return shown;
            }
            count += 1;
            match piece {
                Ok('\n') => shown.push('\n'),
                Ok(c) => push(&mut shown, c),
                Err(byte) => drop(write!(shown, "\\x{byte:02x}")),
            }
        }
    }
    shown
}

fn push(shown: &mut String, c: char) {
    match c.is_control() || is_invisible(c) {
        true => shown.extend(c.escape_unicode()),
        false => shown.push(c),
    }
}

/// Line and paragraph separators, direction marks and overrides, joiners, the byte order mark, and tags.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("blocks.0.norm é 語"), "blocks.0.norm é 語");
        assert_eq!(printable("a\u{1b}[2Jb\r\nc\u{202e}d\u{9b}"), r"a\u{1b}[2Jb\u{d}\u{a}c\u{202e}d\u{9b}");
        let long = printable(&"x".repeat(100_000));
        assert!(long.len() < 2100 && long.ends_with("(100000 bytes)"), "{long}");
    }

    #[test]
    fn line_breaks_of_messages_are_kept() {
        let message = "rank 3: größer als „2“\n  help: it's `--lr`";
        assert_eq!(printable_lines(message.as_bytes()), message);
        assert_eq!(printable_lines(b"\x1b]0;owned\x07\x1b[2J\rx\t"), r"\u{1b}]0;owned\u{7}\u{1b}[2J\u{d}x\u{9}");
        assert_eq!(printable_lines("\u{202e}a\u{9b}1m\u{200b}".as_bytes()), r"\u{202e}a\u{9b}1m\u{200b}");
        assert_eq!(printable_lines(b"a\xff\xfeb"), r"a\xff\xfeb");
        let long = printable_lines(&vec![0xff; 1 << 20]);
        assert!(long.len() < 8100 && long.ends_with("(1048576 bytes)"), "{}", long.len());
    }
}
