"""Texts and tokenizers: what is read and how it is split, spelled and saved."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.packages import MissingPackage
from multihead.training import tokenizers
from multihead.training.texts import read_text, read_texts, split
from multihead.training.tokenizers import BytePairs, Characters, Speller, Tokenizer, spell, tokenizer_from

POEM = "the cat sat on the mat, and the cat ate the hat. " * 20
BYTES = BytePairs.of(POEM, 270)
CHARACTER = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)  # no halves of pairs
WRITTEN = st.lists(CHARACTER, max_size=50).map("".join)


# Byte pairs -----------------------------------------------------------------------------------------------------------


@given(WRITTEN)
@settings(max_examples=200, deadline=None)
def test_byte_pairs_spell_any_text(text: str):
    assert spell(BYTES, BYTES.encode(text)) == text


def test_byte_pairs_are_learned_from_the_text():
    assert BYTES.size == 270
    assert BytePairs.of(POEM, 10_000).size < 300  # there are no more pairs
    tokens = BYTES.encode("the cat")
    assert [BYTES.spell(token) for token in tokens] == [b"the", b" cat"]
    assert len(BYTES.encode(POEM)) < len(POEM) / 2
    assert max(BYTES.encode("ÿ☃𝄞\n\x00")) < 270


def test_every_byte_has_a_token():
    small = BytePairs.of("a", 256)
    assert sorted(small.spell(token) for token in range(small.size)) == [bytes([byte]) for byte in range(256)]


def test_the_same_text_gives_the_same_tokens():
    assert BytePairs.of(POEM, 270).to_json() == BYTES.to_json()


def test_byte_pairs_are_read_by_their_library(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BYTES.to_json(), encoding="utf-8")
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    text = "the café\n ☃ the  mat"
    assert theirs.encode(text).ids == BYTES.encode(text)
    assert theirs.decode(BYTES.encode(text)) == text


# Characters -----------------------------------------------------------------------------------------------------------


def test_characters_are_those_of_the_text():
    made = Characters.of("hello ☃")
    assert made.vocabulary == " ehlo☃"
    assert made.size == 6
    assert made.encode("hole") == [2, 4, 3, 1]
    assert spell(made, made.encode("☃ hello")) == "☃ hello"


def test_characters_refuse_others_by_the_arguments_name():
    told = "--prompt: expected characters that occur in the text, got 'x\\xe9'. The model knows no others"
    with pytest.raises(ValueError, match=re.escape(told)):
        Characters("abc").encode("xaéxb", "--prompt")


# Both -----------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("made", [BYTES, Characters.of("the cat, ☃\n")], ids=["bytes", "characters"])


@BOTH
def test_saved_and_read(tmp_path: Path, made: Tokenizer):
    path = tmp_path / "tokenizer.json"
    path.write_text(made.to_json(), encoding="utf-8")
    again = tokenizer_from(path)
    assert type(again) is type(made)
    assert again.size == made.size
    assert again.encode("the cat ☃\n") == made.encode("the cat ☃\n")
    assert again.unit == made.unit


@BOTH
def test_a_speller_never_breaks_a_character(made: Tokenizer):
    speller = Speller(made)
    pieces = [speller.feed(token) for token in made.encode("the ☃ cat ☃")]
    assert "".join(pieces) + speller.end() == "the ☃ cat ☃"
    assert "\ufffd" not in "".join(pieces)


def test_a_speller_holds_back_what_is_not_complete():
    tokens = BYTES.encode("☃a")  # the snowman's three bytes occur nowhere in the poem: a token each
    assert len(tokens) == 4
    speller = Speller(BYTES)
    assert [speller.feed(token) for token in tokens] == ["", "", "☃", "a"]
    assert speller.end() == ""
    assert [speller.feed(token) for token in tokens[:2]] == ["", ""]
    assert speller.end() == "\ufffd"
    assert Speller(BYTES).feed(tokens[1]) == "\ufffd"  # from the middle of a character


@pytest.mark.parametrize(
    "told", ["", "{", "[]", "{}", '{"format": "multihead characters"}', '{"model": {"type": "X"}}']
)
def test_refuses_what_is_no_tokenizer(tmp_path: Path, told: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(told, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"{path}: expected a tokenizer, got something else")) as error:
        tokenizer_from(path)
    assert "\n" not in str(error.value)


def test_refuses_a_missing_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match="expected a tokenizer, got no file"):
        tokenizer_from(tmp_path / "tokenizer.json")


def test_says_how_to_get_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.json").write_text(BYTES.to_json(), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # how Python marks a module that can't be imported
    for call in (lambda: BytePairs.of("abc", 256), lambda: tokenizer_from(tmp_path / "tokenizer.json")):
        with pytest.raises(MissingPackage, match=re.escape("Next: pip install 'multihead[models]'")):
            call()
    assert Characters.of("abc").encode("cab") == [2, 0, 1]  # needs none


def test_the_json_of_characters_is_plain():
    assert json.loads(Characters("aé☃").to_json()) == {"format": "multihead characters", "characters": "aé☃"}


def test_the_byte_alphabet_is_the_librarys():
    alphabet = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    assert sorted(tokenizers._byte_alphabet()) == sorted(alphabet)


# Texts ----------------------------------------------------------------------------------------------------------------


def test_texts_are_joined_and_read_as_written(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("\ufeffeins\r\nzwei\r".encode())
    (tmp_path / "b.txt").write_bytes("ß\n".encode())
    assert read_texts([tmp_path / "a.txt", tmp_path / "b.txt"]) == "eins\nzwei\n\nß\n"
    assert read_texts([]) == read_text(None)
    assert len(read_text(None)) > 100_000


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "which is empty"),
        (b"caf\xe9 au lait", "whose byte 3 (counted from 0), 0xe9, is not UTF-8"),
        ("text".encode("utf-16-le"), "whose byte 1 (counted from 0), 0x00, is in no text"),
        ("text".encode("utf-16"), "whose byte 0 (counted from 0), 0xff, is not UTF-8"),
    ],
)
def test_refuses_what_is_no_text(tmp_path: Path, data: bytes, told: str):
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"--text: expected a UTF-8 text file, got '{path}', {told}.")):
        read_texts([path])


@given(WRITTEN.filter(lambda text: len(text) > 1), st.floats(0.001, 0.999))
@settings(deadline=None)
def test_a_text_is_split_into_two_parts(text: str, share: float):
    learned, kept_back = split(text, share)
    assert learned + kept_back == text
    assert learned
    assert kept_back
    assert abs(len(kept_back) - share * len(text)) <= 1


def test_a_tenth_is_the_last_tenth():
    assert split("abcdefghijklmnopqrst", 0.1) == ("abcdefghijklmnopqr", "st")
