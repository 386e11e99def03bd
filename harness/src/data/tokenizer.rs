//! Byte-level byte-pair encoding (BPE): every text has an encoding, which decodes to the same text.

use rayon::prelude::*;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};
use tokenizers::{Tokenizer, TokenizerBuilder, TokenizerImpl};

use super::{Error, Result, Text};

/// Size of the pieces that are encoded independently. The pieces depend on the text only, so the encoding does too.
const PIECE_BYTES: usize = 1 << 16;

/// A BPE tokenizer: the 256 bytes, and merges of frequent pairs.
pub struct Bpe {
    inner: Tokenizer,
    json: String,
}

impl Bpe {
    /// Trains at most `vocabulary` entries on `text`: the 256 bytes, and the most frequent merges. A short text gives
    /// fewer. Deterministic: the same text gives the same tokenizer.
    ///
    /// # Errors
    /// A vocabulary of less than 256 entries.
    pub fn train(text: &Text, vocabulary: usize) -> Result<Bpe> {
        let alphabet: std::collections::HashSet<char> = ByteLevel::alphabet().into_iter().collect();
        if vocabulary < alphabet.len() {
            return Err(Error::VocabularyTooSmall { found: vocabulary, least: alphabet.len() });
        }
        let mut trainer = BpeTrainerBuilder::new()
            // The library allocates memory for all entries at the start. Each merge shortens a text by at least one
            // byte, which bounds their number.
            .vocab_size(vocabulary.min(alphabet.len() + text.as_str().len()))
            // Ignore pairs that occur once.
            .min_frequency(2)
            .initial_alphabet(alphabet)
            .show_progress(false)
            .build();
        let mut tokenizer = untrained()?;
        tokenizer.train(&mut trainer, text.pieces(PIECE_BYTES))?;
        Bpe::from_json(tokenizer.to_string(false)?)
    }

    /// Parses the JSON of [`Bpe::json`].
    ///
    /// # Errors
    /// JSON that is not a tokenizer of the kind that [`Bpe::train`] creates, or a modified one: missing or duplicate
    /// entries, token ids other than 0 to the number of entries, merges of unknown entries.
    pub fn from_json(json: String) -> Result<Bpe> {
        // The library panics on some inconsistencies.
        check(&json)?;
        Ok(Bpe { inner: Tokenizer::from_bytes(json.as_bytes())?, json })
    }

    /// The `tokenizer.json` of the `tokenizers` library.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// BLAKE3 hash of [`Bpe::json`], which identifies the tokenizer.
    pub fn hash(&self) -> [u8; 32] {
        *blake3::hash(self.json.as_bytes()).as_bytes()
    }

    /// Vocabulary size: token ids are below it.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Encodes a short text.
    ///
    /// # Errors
    /// None for tokenizers that [`Bpe::train`] created.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.inner.encode_fast(text, false)?.get_ids().to_vec())
    }

    /// Encodes a whole text, in pieces on all cores.
    ///
    /// # Errors
    /// As [`Bpe::encode`].
    pub fn encode_text(&self, text: &Text) -> Result<Vec<u32>> {
        let pieces: Vec<&str> = text.pieces(PIECE_BYTES).collect();
        let tokens: Vec<Vec<u32>> = pieces.par_iter().map(|piece| self.encode(piece)).collect::<Result<_>>()?;
        Ok(tokens.concat())
    }

    /// Decodes tokens. Bytes that are not valid UTF-8, for example at a cut through a character, become �.
    ///
    /// # Errors
    /// As [`Bpe::encode`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.inner.decode(tokens, false)?)
    }
}

type Untrained = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A byte-level tokenizer before training.
fn untrained() -> Result<Untrained> {
    let bytes = ByteLevel::new(false, false, true);
    let builder =
        TokenizerBuilder::<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>::new();
    Ok(builder
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(bytes)))
        .with_post_processor(None)
        .with_decoder(Some(DecoderWrapper::ByteLevel(bytes)))
        .build()?)
}

/// Fails unless `json` is a tokenizer of the kind that [`Bpe::train`] creates, with consistent entries and merges.
fn check(json: &str) -> Result<()> {
    let wrong = |reason: String| Error::Tokenizer(format!("it is not a tokenizer of `tilewright train`: {reason}"));
    crate::tensor_file::check_unique_keys(json.as_bytes()).map_err(|problem| wrong(problem.to_string()))?;
    let parse = |json: &str| serde_json::from_str::<Value>(json).map_err(|error| wrong(error.to_string()));
    let (mut found, mut expected) = (parse(json)?, parse(&untrained()?.to_string(false)?)?);
    let mut take = |name: &str| {
        let taken = found["model"].as_object_mut().and_then(|model| model.remove(name));
        if let Some(model) = expected["model"].as_object_mut() {
            model.remove(name);
        }
        taken.ok_or_else(|| wrong(format!("it has no `{name}`")))
    };
    let (vocabulary, merges) = (take("vocab")?, take("merges")?);
    if let Some(difference) = difference("", &expected, &found) {
        return Err(wrong(difference));
    }
    let vocabulary = vocabulary.as_object().ok_or_else(|| wrong("its `vocab` is not an object".to_string()))?;
    let mut taken = vec![false; vocabulary.len()];
    for (entry, number) in vocabulary {
        let place = number.as_u64().and_then(|number| taken.get_mut(usize::try_from(number).ok()?));
        match place {
            Some(taken) if !*taken => *taken = true,
            _ => {
                return Err(wrong(format!(
                    "the entry `{entry}` has the number {number}, expected each of 0 to {} exactly once",
                    vocabulary.len() - 1
                )));
            }
        }
    }
    if let Some(byte) = ByteLevel::alphabet().into_iter().find(|byte| !vocabulary.contains_key(&byte.to_string())) {
        return Err(wrong(format!("it has no entry for the byte `{byte}`")));
    }
    let merges = merges.as_array().ok_or_else(|| wrong("its `merges` are not a list".to_string()))?;
    for merge in merges {
        let pair = merge.as_array().map(Vec::as_slice);
        let known = match pair {
            Some([Value::String(a), Value::String(b)]) => {
                [a, b, &format!("{a}{b}")].iter().all(|entry| vocabulary.contains_key(*entry))
            }
            _ => false,
        };
        if !known {
            return Err(wrong(format!("the merge {merge} is of unknown entries")));
        }
    }
    Ok(())
}

/// Describes the first difference of `found` from `expected`. Missing keys are no difference: the library has defaults.
fn difference(name: &str, expected: &Value, found: &Value) -> Option<String> {
    match (expected.as_object(), found.as_object()) {
        (Some(expected), Some(found)) => found.iter().find_map(|(key, found)| {
            let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
            difference(&name, expected.get(key).unwrap_or(&Value::Null), found)
        }),
        _ if expected == found => None,
        _ => Some(format!("`{name}` is {found}, expected {expected}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_decodes_to_itself_with_fewer_tokens_than_bytes() {
        let book = Text::shipped();
        let bpe = Bpe::train(&book, 600).unwrap();
        assert_eq!(bpe.vocabulary(), 600);
        let tokens = bpe.encode_text(&book).unwrap();
        assert!(tokens.iter().all(|&token| token < 600));
        assert!(tokens.len() * 2 < book.as_str().len(), "{} tokens", tokens.len());
        assert_eq!(bpe.decode(&tokens).unwrap(), book.as_str());
        for text in ["naïve — 日本語 🦀", "\n\n  two\ttabs  \r\n", "\u{0}"] {
            assert_eq!(bpe.decode(&bpe.encode(text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn the_same_text_gives_the_same_tokenizer() {
        let text = Text::of("t", "the cat sat on the mat, the cat sat on the hat ".repeat(50)).unwrap();
        let (a, b) = (Bpe::train(&text, 300).unwrap(), Bpe::train(&text, 300).unwrap());
        assert_eq!(a.json(), b.json());
        assert_eq!(a.hash(), Bpe::from_json(a.json().to_string()).unwrap().hash());
        assert_ne!(a.hash(), Bpe::train(&text, 260).unwrap().hash());
    }

    #[test]
    fn vocabularies_smaller_than_the_alphabet_are_refused() {
        let text = Text::of("t", "abc").unwrap();
        let message = Bpe::train(&text, 100).err().unwrap().to_string();
        assert!(message.contains("100") && message.contains("256"), "{message}");
        // A vocabulary larger than the number of merges gives all merges.
        assert_eq!(Bpe::train(&text, usize::MAX).unwrap().vocabulary(), 256);
        assert!(Bpe::from_json("{}".to_string()).is_err());
    }

    /// Some corruptions give another valid tokenizer; cached tokenizers have checksums for that case.
    #[test]
    fn a_corrupted_tokenizer_is_refused_or_works() {
        use rand::rngs::StdRng;
        use rand::{RngExt, SeedableRng};

        let text = "the cat sat on the mat, the cat sat on the hat ".repeat(50);
        let whole = Bpe::train(&Text::of("t", text.as_str()).unwrap(), 300).unwrap().json().to_string().into_bytes();
        let (mut refused, mut random) = (0, StdRng::seed_from_u64(18));
        for case in 0..200 {
            let mut bytes = whole.clone();
            match case % 3 {
                0 | 1 => bytes[random.random_range(0..whole.len())] ^= 1 << random.random_range(0..8),
                _ => bytes.truncate(random.random_range(0..whole.len())),
            }
            let tokenizer = String::from_utf8(bytes).ok().and_then(|json| Bpe::from_json(json).ok());
            let Some(tokenizer) = tokenizer else {
                refused += 1;
                continue;
            };
            let tokens = tokenizer.encode(&text).unwrap();
            assert!(tokens.iter().all(|&token| (token as usize) < tokenizer.vocabulary()), "case {case}");
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text, "case {case}");
        }
        assert!(refused > 100, "{refused}");
    }

    #[test]
    fn inconsistent_tokenizers_are_refused_with_the_reason() {
        let whole = Bpe::train(&Text::of("t", "the cat sat on the mat ".repeat(50)).unwrap(), 280).unwrap();
        let refuse = |change: &dyn Fn(&mut Value)| {
            let mut json: Value = serde_json::from_str(whole.json()).unwrap();
            change(&mut json);
            Bpe::from_json(json.to_string()).err().unwrap().to_string()
        };
        for (message, part) in [
            (refuse(&|json| json["model"]["vocab"]["a"] = 9_999.into()), "the entry `a` has the number 9999"),
            (refuse(&|json| json["model"]["vocab"]["a"] = json["model"]["vocab"]["b"].clone()), "the number"),
            (refuse(&|json| json["model"]["merges"][0] = serde_json::json!(["q", "zz"])), "merge [\"q\",\"zz\"]"),
            (
                refuse(&|json| json["model"]["dropout"] = serde_json::json!(0.5)),
                "`model.dropout` is 0.5, expected null",
            ),
            (refuse(&|json| json["pre_tokenizer"]["type"] = "Metaspace".into()), "`pre_tokenizer.type`"),
            (refuse(&|json| json["model"]["vocab"]["\u{1b}[2J"] = 99_999.into()), r"\u{1b}[2J"),
        ] {
            assert!(message.contains(part) && !message.contains('\u{1b}'), "`{part}` is missing in: {message}");
        }
    }
}
