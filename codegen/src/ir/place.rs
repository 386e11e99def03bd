//! Placements: when and where the ops of a scheduled loop run.

use super::attr::{Attr, AttrValue};

/// When and where an op of a scheduled loop runs. [`crate::schedule`] has the meaning of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// The pipeline stage. While the loop runs stage `s` of iteration `i`, it runs stage `s + 1` of iteration `i − 1`.
    pub stage: u32,
    /// The position among the ops that run together: ops run by increasing order; ops of one order run as in the text.
    pub order: u32,
    /// The warps that run the op, where the schedule has several partitions.
    pub partition: Partition,
    /// For a load: the number of buffers of the ring that it fills ahead of its use.
    pub depth: Option<u32>,
    /// For a load with a ring: TMA copies, not `cp.async`.
    pub tma: bool,
}

/// Warps of a block that run a part of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Partition {
    /// All warps, or the consumer warps of a warp-specialized kernel.
    #[default]
    Consumer,
    /// The warps that load.
    Producer,
}

/// The attributes of a placement in the text, in this order.
const NAMES: [&str; 5] = ["stage", "order", "partition", "depth", "tma"];

impl Placement {
    /// Attributes in text order, without those that equal their default; the stage is always there.
    pub fn attributes(&self) -> Vec<(&'static str, Attr)> {
        let mut list = vec![("stage", self.stage.to_attr())];
        if self.order != 0 {
            list.push(("order", self.order.to_attr()));
        }
        if self.partition == Partition::Producer {
            list.push(("partition", Attr::Ident("producer".into())));
        }
        if let Some(depth) = self.depth {
            list.push(("depth", depth.to_attr()));
        }
        if self.tma {
            list.push(("tma", true.to_attr()));
        }
        list
    }

    /// The placement with these attributes.
    ///
    /// # Errors
    /// The attribute that is missing, unknown or malformed.
    pub fn from_attributes(attributes: &[(String, Attr)]) -> Result<Placement, String> {
        let mut place = Placement::default();
        let mut has_stage = false;
        for (name, attr) in attributes {
            let wrong = |expected: String| format!("`{name}` of a placement should be {expected}, found `{attr}`");
            let number = || u32::from_attr(attr).ok_or_else(|| wrong(u32::expected()));
            match name.as_str() {
                "stage" => {
                    place.stage = number()?;
                    has_stage = true;
                }
                "order" => place.order = number()?,
                "depth" => place.depth = Some(number()?),
                "tma" => place.tma = bool::from_attr(attr).ok_or_else(|| wrong(bool::expected()))?,
                "partition" => {
                    place.partition = match attr {
                        Attr::Ident(word) if word == "consumer" => Partition::Consumer,
                        Attr::Ident(word) if word == "producer" => Partition::Producer,
                        _ => return Err(wrong("consumer or producer".into())),
                    }
                }
                _ => return Err(format!("a placement has no `{name}`: it has {}", NAMES.join(", "))),
            }
        }
        has_stage.then_some(place).ok_or_else(|| "a placement needs the attribute `stage`".into())
    }
}
