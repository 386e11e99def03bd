//! Byte-pair encoding over bytes, so that every text has an encoding and decodes to itself.

use std::path::Path;

use rayon::prelude::*;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};
use tokenizers::{Tokenizer, TokenizerBuilder};

use super::{Error, Result, Text};

/// Size of the pieces that are encoded by themselves. They are a function of the text, so that its encoding is too.
const PIECE_BYTES: usize = 1 << 16;

/// A tokenizer: bytes, and pairs that were merged because they are frequent.
pub struct Bpe {
    inner: Tokenizer,
    json: String,
}

impl Bpe {
    /// Learns at most `vocabulary` entries from `text`: the 256 bytes, and the most frequent merges. A short text has
    /// fewer. The same text gives the same tokenizer.
    ///
    /// # Errors
    /// A vocabulary that does not even hold the bytes.
    pub fn train(text: &Text, vocabulary: usize) -> Result<Bpe> {
        let alphabet: std::collections::HashSet<char> = ByteLevel::alphabet().into_iter().collect();
        if vocabulary < alphabet.len() {
            return Err(Error::VocabularyTooSmall { found: vocabulary, least: alphabet.len() });
        }
        let mut trainer = BpeTrainerBuilder::new()
            // The library takes memory for all of them at once; each merge leaves a text shorter by a byte at least.
            .vocab_size(vocabulary.min(alphabet.len() + text.as_str().len()))
            // A pair that occurs once teaches nothing.
            .min_frequency(2)
            .initial_alphabet(alphabet)
            .show_progress(false)
            .build();
        let bytes = ByteLevel::new(false, false, true);
        let mut tokenizer =
            TokenizerBuilder::<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>::new(
            )
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(bytes)))
            .with_post_processor(None)
            .with_decoder(Some(DecoderWrapper::ByteLevel(bytes)))
            .build()?;
        tokenizer.train(&mut trainer, text.pieces(PIECE_BYTES))?;
        Bpe::from_json(tokenizer.to_string(false)?)
    }

    /// A tokenizer from the JSON that [`Bpe::json`] gave, or that the `tokenizers` library wrote elsewhere.
    ///
    /// # Errors
    /// JSON that is no tokenizer.
    pub fn from_json(json: String) -> Result<Bpe> {
        Ok(Bpe { inner: Tokenizer::from_bytes(json.as_bytes())?, json })
    }

    /// As [`Bpe::from_json`], from a file.
    ///
    /// # Errors
    /// A file that cannot be read, or is no tokenizer.
    pub fn open(path: &Path) -> Result<Bpe> {
        let json = crate::files::read_to_string(path).map_err(Error::file("read", path))?;
        Bpe::from_json(json).map_err(|error| Error::damaged(path, error.to_string()))
    }

    /// The `tokenizer.json` of the `tokenizers` library.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Tells tokenizers apart.
    pub fn hash(&self) -> [u8; 32] {
        *blake3::hash(self.json.as_bytes()).as_bytes()
    }

    /// Number of entries: tokens are below it.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The tokens of a short text.
    ///
    /// # Errors
    /// None for tokenizers that [`Bpe::train`] made.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.inner.encode_fast(text, false)?.get_ids().to_vec())
    }

    /// The tokens of a whole text, in pieces on all cores.
    ///
    /// # Errors
    /// As [`Bpe::encode`].
    pub fn encode_text(&self, text: &Text) -> Result<Vec<u32>> {
        let pieces: Vec<&str> = text.pieces(PIECE_BYTES).collect();
        let tokens: Vec<Vec<u32>> = pieces.par_iter().map(|piece| self.encode(piece)).collect::<Result<_>>()?;
        Ok(tokens.concat())
    }

    /// The text of tokens. Bytes that make no UTF-8 character, as at a cut through one, become �.
    ///
    /// # Errors
    /// As [`Bpe::encode`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.inner.decode(tokens, false)?)
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
    fn vocabularies_without_room_are_refused() {
        let text = Text::of("t", "abc").unwrap();
        let message = Bpe::train(&text, 100).err().unwrap().to_string();
        assert!(message.contains("100") && message.contains("256"), "{message}");
        // More entries than any text has merges: all that there are.
        assert_eq!(Bpe::train(&text, usize::MAX).unwrap().vocabulary(), 256);
        assert!(Bpe::from_json("{}".to_string()).is_err());
    }
}
