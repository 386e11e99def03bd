//! Text form: `linear<reg=[[0,1]], lane=[], warp=[], block=[], shape=[64,64]>` for distributed layouts,
//! `shared<offset=[[0,1]], shape=[64,64]>` for shared ones. Lists start with the lowest bit; spaces are optional.

use std::fmt;
use std::str::FromStr;

use super::linear::{Basis, Dim, LayoutError, LinearLayout, ThreadBases};

/// The dims of a distributed layout, with their names in the text.
const THREAD_DIMS: [(&str, Dim); 4] =
    [("reg", Dim::Register), ("lane", Dim::Lane), ("warp", Dim::Warp), ("block", Dim::Block)];

impl fmt::Display for LinearLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bases = |dim| {
            let list: Vec<String> = self.bases(dim).iter().map(|basis| numbers(basis)).collect();
            format!("[{}]", list.join(","))
        };
        if self.is_shared() {
            write!(f, "shared<offset={}", bases(Dim::Offset))?;
        } else {
            let fields: Vec<String> = THREAD_DIMS.iter().map(|&(name, dim)| format!("{name}={}", bases(dim))).collect();
            write!(f, "linear<{}", fields.join(", "))?;
        }
        write!(f, ", shape={}>", numbers(self.shape()))
    }
}

fn numbers(list: &[u32]) -> String {
    let list: Vec<String> = list.iter().map(u32::to_string).collect();
    format!("[{}]", list.join(","))
}

impl FromStr for LinearLayout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let (layout, rest) = LinearLayout::parse_prefix(text)?;
        let mut reader = Reader { text, at: text.len() - rest.len() };
        reader.skip_spaces();
        if reader.at < text.len() {
            return Err(reader.expected("the end"));
        }
        Ok(layout)
    }
}

impl LinearLayout {
    /// Parses a layout at the start of `text`; returns it and the rest of the text.
    pub fn parse_prefix(text: &str) -> Result<(Self, &str), LayoutError> {
        let mut reader = Reader { text, at: 0 };
        let layout = if reader.take("linear") {
            reader.require("<")?;
            let mut lists: [Vec<Basis>; 4] = Default::default();
            for ((name, _), list) in THREAD_DIMS.iter().zip(&mut lists) {
                *list = reader.field(name, Reader::bases)?;
                reader.require(",")?;
            }
            let shape = reader.field("shape", Reader::numbers)?;
            let [register, lane, warp, block] = lists;
            Self::try_distributed(&shape, ThreadBases { register, lane, warp, block })?
        } else if reader.take("shared") {
            reader.require("<")?;
            let offset = reader.field("offset", Reader::bases)?;
            reader.require(",")?;
            let shape = reader.field("shape", Reader::numbers)?;
            Self::try_shared(&shape, offset)?
        } else {
            return Err(reader.expected("`linear` or `shared`"));
        };
        reader.require(">")?;
        Ok((layout, &text[reader.at..]))
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn skip_spaces(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_spaces();
        let found = self.text[self.at..].starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn require(&mut self, token: &str) -> Result<(), LayoutError> {
        if self.take(token) { Ok(()) } else { Err(self.expected(&format!("`{token}`"))) }
    }

    fn field<T>(&mut self, name: &str, read: impl Fn(&mut Self) -> Result<T, LayoutError>) -> Result<T, LayoutError> {
        self.require(name)?;
        self.require("=")?;
        read(self)
    }

    fn list<T>(&mut self, read: impl Fn(&mut Self) -> Result<T, LayoutError>) -> Result<Vec<T>, LayoutError> {
        self.require("[")?;
        let mut list = Vec::new();
        if self.take("]") {
            return Ok(list);
        }
        loop {
            list.push(read(self)?);
            if self.take("]") {
                return Ok(list);
            }
            if !self.take(",") {
                return Err(self.expected("`,` or `]`"));
            }
        }
    }

    fn numbers(&mut self) -> Result<Vec<u32>, LayoutError> {
        self.list(|reader| {
            reader.skip_spaces();
            let rest = &reader.text[reader.at..];
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let number = rest[..digits].parse().map_err(|_| reader.expected("a 32-bit number"))?;
            reader.at += digits;
            Ok(number)
        })
    }

    fn bases(&mut self) -> Result<Vec<Basis>, LayoutError> {
        self.list(Reader::numbers)
    }

    fn expected(&self, what: &str) -> LayoutError {
        let found: String = self.text[self.at..].chars().take(12).collect();
        let found = if found.is_empty() { "the end".to_string() } else { format!("`{found}`") };
        LayoutError::Syntax { at: self.at, expected: what.to_string(), found }
    }
}
