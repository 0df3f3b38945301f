"""Text to tokens and back: byte pairs, which spell any text, or the characters that a text has.

Both are saved as tokenizer.json: byte pairs as the tokenizers library reads it, characters in a form of our own.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, Protocol

from multihead.errors import bad_value
from multihead.packages import need

_BYTES = 256


class Tokenizer(Protocol):
    """Text to tokens and back."""

    unit: str  # what a token is, in the plural: "tokens" or "characters"

    @property
    def size(self) -> int:
        """How many different tokens there are."""
        ...

    def encode(self, text: str, argument: str = "text") -> list[int]:
        """The tokens of a text. ValueError, by the argument's name, if it has characters that no token stands for."""
        ...

    def spell(self, token: int) -> bytes:
        """A token's UTF-8 bytes: perhaps only a part of a character's."""
        ...

    def to_json(self) -> str:
        """What `tokenizer_from` reads."""
        ...


class Characters:
    """Each character of a text is a token.

    Args:
        vocabulary: the characters, each once.
    """

    unit = "characters"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self._token_of = {character: i for i, character in enumerate(vocabulary)}

    @classmethod
    def of(cls, text: str) -> Characters:
        """Those of a text, in their order in Unicode."""
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        """How many different characters there are."""
        return len(self.vocabulary)

    def encode(self, text: str, argument: str = "text") -> list[int]:
        """The tokens of a text. ValueError, by the argument's name, for characters that are not in the vocabulary."""
        strange = "".join(dict.fromkeys(character for character in text if character not in self._token_of))
        if strange:
            instead = "The model knows no others: write it without them."
            raise bad_value(argument, "characters that occur in the text", ascii(strange), "", instead)
        return [self._token_of[character] for character in text]

    def spell(self, token: int) -> bytes:
        """A character's UTF-8 bytes."""
        return self.vocabulary[token].encode()

    def to_json(self) -> str:
        """What `tokenizer_from` reads."""
        return json.dumps({"format": "multihead characters", "characters": self.vocabulary}, ensure_ascii=False)


class BytePairs:
    """Pieces of words (byte-pair encoding: Sennrich et al. 2016) over bytes, so that any text can be spelt (GPT-2).

    Args:
        inner: a tokenizers.Tokenizer of byte-level byte pairs.
    """

    unit = "tokens"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        character_of = _byte_alphabet()
        byte_of = {character: byte for byte, character in enumerate(character_of)}
        names = [inner.id_to_token(token) for token in range(inner.get_vocab_size())]
        self._bytes = [bytes(byte_of[character] for character in name) for name in names]

    @classmethod
    def of(cls, text: str, vocabulary: int) -> BytePairs:
        """At most `vocabulary` tokens, at least 256, learned from a text: the pairs that are there most often first."""
        library = _library()
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        inner.train_from_iterator([text], trainer)
        return cls(inner)

    @property
    def size(self) -> int:
        """How many different tokens there are."""
        return len(self._bytes)

    def encode(self, text: str, argument: str = "text") -> list[int]:
        """The tokens of a text. ValueError, by the argument's name, if it is none that UTF-8 can write."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # what Python makes of bytes on the command line that are not UTF-8
            raise bad_value(argument, "text in UTF-8", f"{text[error.start]!a} in it") from None
        tokens: list[int] = self.inner.encode(text).ids
        return tokens

    def spell(self, token: int) -> bytes:
        """A token's bytes: perhaps only a part of a character's."""
        return self._bytes[token]

    def to_json(self) -> str:
        """What the tokenizers library, and `tokenizer_from`, read."""
        told: str = self.inner.to_str(pretty=True)
        return told


def tokenizer_from(path: Path) -> Tokenizer:
    """The tokenizer that a file describes.

    Raises:
        ValueError: it can't be read, or describes none.
    """
    try:
        told = path.read_text(encoding="utf-8")
        found = json.loads(told)
        if found.get("format") == "multihead characters":
            return Characters(found["characters"])
        return BytePairs(_library().Tokenizer.from_str(told))
    except FileNotFoundError:
        raise bad_value(str(path), "a tokenizer", "no file", "", "Is this the folder of a run?") from None
    except ImportError:
        raise
    except Exception as error:  # the library raises nothing more special
        why = " ".join(str(error).split()) or type(error).__name__
        raise bad_value(str(path), "a tokenizer", f"something else ({why})", "", "The file is damaged.") from None


class Speller:
    """Spells tokens as they come, and holds back a character of which only the first bytes have come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """What can be shown now that this token has come."""
        return self._decoder.decode(self.tokenizer.spell(token))

    def end(self) -> str:
        """What was held back, with U+FFFD in place of a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


def spell(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of tokens, with U+FFFD in place of what is no UTF-8."""
    return b"".join(tokenizer.spell(token) for token in tokens).decode(errors="replace")


def _library() -> Any:
    """The tokenizers library."""
    return need("tokenizers", "models", "a vocabulary of byte pairs")


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in the tokens' names.

    A byte that is a visible character of Latin-1 stands for itself; the others, in order, are shifted past them.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = (chr(_BYTES + i) for i in range(_BYTES))
    return [chr(byte) if byte in visible else next(shifted) for byte in range(_BYTES)]
