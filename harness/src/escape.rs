//! Text that came from a file or from another program, made fit for a message.

use std::fmt::Write;

/// Most characters that are shown of one text.
const MOST: usize = 2000;

/// `text` with control characters, line ends among them, and characters that reorder or hide others written as escapes
/// (`\u{1b}`), and cut after 2000 characters. A terminal shows the result as one line, and obeys nothing in it.
pub fn printable(text: &str) -> String {
    let mut shown = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MOST {
            let _ = write!(shown, "... ({} bytes)", text.len());
            break;
        }
        match c {
            c if c.is_control() || is_invisible(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    shown
}

/// Line and paragraph separators, marks and overrides of direction, joiners, the byte order mark, and tags.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{61c}' | '\u{feff}'
        | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_message_moves_the_cursor() {
        assert_eq!(printable("blocks.0.norm é 語"), "blocks.0.norm é 語");
        assert_eq!(printable("a\u{1b}[2Jb\r\nc\u{202e}d\u{9b}"), r"a\u{1b}[2Jb\u{d}\u{a}c\u{202e}d\u{9b}");
        let long = printable(&"x".repeat(100_000));
        assert!(long.len() < 2100 && long.ends_with("(100000 bytes)"), "{long}");
    }
}
