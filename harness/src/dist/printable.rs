//! Text that came over a network, made fit for terminals, logs and messages.

/// The longest text that is shown, in bytes of UTF-8.
const LONGEST: usize = 4096;

/// `bytes` as text of printable characters and line breaks: everything else (escapes of terminals, other control characters, marks that
/// turn the direction of writing, bytes that are no UTF-8) is written as an escape of Rust's. Cut off behind 4096 bytes.
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\n' => text.push('\n'),
                // It escapes what is not printable, and quotes and backslashes, which are.
                '\\' | '\'' | '"' => text.push(character),
                _ => text.extend(character.escape_debug()),
            }
            if text.len() > LONGEST {
                return text + " …";
            }
        }
        for byte in chunk.invalid() {
            text += &format!("\\x{byte:02x}");
        }
        if text.len() > LONGEST {
            return text + " …";
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_through_that_terminals_obey() {
        assert_eq!(
            printable("rank 3: größer als „2“\n  help: it's `--lr`".as_bytes()),
            "rank 3: größer als „2“\n  help: it's `--lr`"
        );
        assert_eq!(printable(b"\x1b]0;owned\x07\x1b[2J\rx\t"), "\\u{1b}]0;owned\\u{7}\\u{1b}[2J\\rx\\t");
        assert_eq!(printable("\u{202e}a\u{9b}1m\u{200b}".as_bytes()), "\\u{202e}a\\u{9b}1m\\u{200b}");
        assert_eq!(printable(b"a\xff\xfeb"), "a\\xff\\xfeb");
        let long = printable(&vec![0xff; 1 << 20]);
        assert!(long.len() < 4200 && long.ends_with('…'), "{}", long.len());
        assert!(printable("é".repeat(1 << 20).as_bytes()).len() < 4200);
    }
}
