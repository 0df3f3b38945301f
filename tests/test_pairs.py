"""Pairs to learn translation from: those that are made, those of files, and how they become batches and figures."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest
import torch

from multihead.models.beam import translate
from multihead.models.translator import Translator
from multihead.packages import MissingPackage
from multihead.training import pairs as pairs_module
from multihead.training.loop import Trainer
from multihead.training.options import Options
from multihead.training.pairs import LEAST_PAIRS, Pairs, made_pairs, names, read_pairs, split_pairs
from multihead.training.parallel import Processes
from multihead.training.tokenizers import BytePairs, Characters
from multihead.training.translation import (
    END,
    PAD,
    START,
    UNKNOWN,
    Batch,
    Codec,
    Translation,
    judge,
    translate_texts,
)

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
MONTHS = {name: number for number, name in enumerate(_MONTHS, 1)}
WEEKDAYS = dict(zip(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"), "一二三四五六日", strict=True))


def parsed(english):
    """The date of an English form, by rules of its own."""
    iso = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", english)
    if iso:
        return tuple(int(part) for part in iso.groups())
    (month,) = [number for name, number in MONTHS.items() if re.search(rf"\b{name}", english)]
    (year,) = re.findall(r"\d{4}", english)
    (day,) = re.findall(r"\b\d{1,2}\b", english)
    return int(year), month, int(day)


@pytest.fixture(scope="module")
def chinese():
    return made_pairs(dates=900, kept_back=180)


def test_dates_are_right(chinese):
    forms = set()
    for source, target in chinese.test + chinese.valid:
        year, month, day = parsed(source)
        weekday = re.match(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun)", source)
        told = f"星期{WEEKDAYS[weekday[0]]}" if weekday else ""
        assert target == f"{year}年{month}月{day}日{told}"
        forms.add(re.sub(r"\d+", "0", re.sub(r"[A-Z][a-z]{3,}", "Name", re.sub(r"\b[A-Z][a-z]{2}\b", "Nam", source))))
    assert len(forms - {"Nam 0, 0"}) >= 8, "May is short and long at once"


def test_the_years_kept_back_are_in_no_other_set(chinese):
    years = [{target.split("年")[0] for _, target in side if "年" in target} for side in (chinese.test, chinese.valid)]
    learned = {target.split("年")[0] for _, target in chinese.train if re.match(r"\d{4}年", target)}
    assert len(chinese.test) == len(chinese.valid) == 180
    assert min(map(len, years)) > 50
    assert len(learned) > 500
    assert not years[0] & years[1]
    assert not learned & (years[0] | years[1])


def test_a_thousand_dates_are_kept_back_by_default():
    pairs = made_pairs("de", dates=9)
    assert len(pairs.test) == len(pairs.valid) == 1000
    assert len({source for source, _ in pairs.test}) == 1000


def test_they_repeat_with_a_seed(chinese):
    assert made_pairs(dates=900, kept_back=180) == chinese
    other = made_pairs(dates=900, kept_back=180, seed=1)
    assert other.test != chinese.test
    assert made_pairs(dates=100, kept_back=180).test == chinese.test, (
        "what is judged by does not depend on what is learned"
    )


def test_there_are_no_more_dates_than_there_are(monkeypatch):
    monkeypatch.setattr(pairs_module, "YEARS", range(1990, 2000))
    pairs = made_pairs(dates=1, kept_back=10**6)
    assert len(pairs.test) == 365 * 9 // 2, "of one year; half of them, which are soon found by drawing"


def test_names():
    found = dict(names("zh"))
    assert found["China"] == "中国"
    assert found["German"] == "德语"
    assert found["March"] == "三月"
    assert found["Thursday"] == "星期四"
    assert found["Japanese Yen"] == "日元"
    assert 500 < len(found) < 1000
    assert not [name for name in found if "(" in name or len(name) > 30]
    assert dict(names("de"))["Thursday"] == "Donnerstag"


def test_names_are_a_fourth_of_what_is_learned():
    called = names("zh")
    for dates, times in ((10_000, range(4, 7)), (9, [1])):
        learned = Counter(made_pairs(dates=dates, kept_back=9).train)
        assert {learned[pair] for pair in called} <= set(times)
        assert len({learned[pair] for pair in called}) == 1
        assert sum(learned.values()) == dates + len(called) * learned[called[0]]


@pytest.mark.parametrize("to", ["pt_BR", "pt-br", "PT_br"])
def test_locales_are_found_as_people_write_them(to):
    assert dict(names(to))["March"] == "março"


@pytest.mark.parametrize(
    ("to", "near"),
    [("chinese", "zh"), ("German", "de"), ("zh_Han", "zh_Hant"), ("zzzzzz", "Such as zh, de"), ("", "Such as zh, de")],
)
def test_an_unknown_locale_is_refused_with_those_like_it(to, near):
    with pytest.raises(
        ValueError, match=rf"^--to: expected one of CLDR's [\d,]+ locales, got '{to}'\. .*{near}"
    ) as error:
        made_pairs(to)
    assert "\n" not in str(error.value)


def test_without_babel(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(MissingPackage, match=r"what is made to translate needs babel .*pip install 'multihead\[cli\]'"):
        made_pairs()


# Files ----------------------------------------------------------------------------------------------------------------


def file(tmp_path, content):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_is_read(tmp_path):
    content = "\ufeffa b\tc\r\n d \t e f \tmore\t\r\n你好\u2028吗\thello\n\n"
    wanted = [("a b", "c"), ("d", "e f"), ("你好\u2028吗", "hello")]
    assert read_pairs(file(tmp_path, content)) == wanted
    assert read_pairs(file(tmp_path, content.rstrip())) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "which is empty"),
        (" \n\t\n", "which is empty"),
        ("a\tb\nab\nc\td\n", r"line 2, without a tab. There is nothing to translate it to"),
        ("a\tb\n\nc\td\n", r"line 2, which is blank"),
        ("a\tb\nc\t \n", r"line 2, whose target is blank"),
        ("\tb\n", r"line 1, whose source is blank"),
        ("a\tb\n" + "c" * 10_001 + "\td", r"at most 10,000 characters on each side, got .*line 2, which has more"),
        (b"a\tb\nc\t\xff\n", r"whose line 2 is not UTF-8. Save it as UTF-8 first"),
        (b"\x89PNG\0\0", r"whose byte 4 \(counted from 0\), 0x00, is in no text"),
        ("a\tb\n".encode("utf-16"), "is not UTF-8|is in no text"),
    ],
    ids=range(10),
)
def test_no_pairs(tmp_path, content, words):
    path = file(tmp_path, content)
    with pytest.raises(ValueError, match=rf"^--pairs: expected .*{words}") as error:
        read_pairs(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"^--pairs: .*which does not exist\. Check the path\."):
        read_pairs(tmp_path / "no.tsv")
    with pytest.raises(ValueError, match=r"^--pairs: .*a directory\. Name one file\."):
        read_pairs(tmp_path)


def test_splitting_keeps_a_source_in_one_set():
    pairs = [(f"source {i % 100}", f"target {i}") for i in range(300)]
    split = split_pairs(pairs)
    sets = [{source for source, _ in side} for side in (split.train, split.valid, split.test)]
    assert [len(side) for side in sets] == [90, 5, 5]
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]
    assert sorted(split.train + split.valid + split.test) == sorted(pairs)
    assert split_pairs(pairs) == split
    assert split_pairs(pairs, seed=1) != split


def test_at_most_a_thousand_are_kept_back():
    split = split_pairs([(str(i), "x") for i in range(25_000)])
    assert (len(split.valid), len(split.test)) == (1000, 1000)


def test_too_few_to_split():
    pairs = [(str(i), "x") for i in range(LEAST_PAIRS)]
    assert len(split_pairs(pairs).train) == LEAST_PAIRS - 2
    with pytest.raises(ValueError, match="--pairs: expected at least 20 different sources, got 19"):
        split_pairs([*pairs[1:], pairs[1]])


# As a task ------------------------------------------------------------------------------------------------------------

SOME = Pairs([("ab", "ba"), ("abc", "cba"), ("b", "b"), ("ac", "ca")] * 5, [("cab", "bac")], [("ca", "ac")])


def make_task(**options):
    codec = Codec(Characters.of("".join(side for pair in SOME.train for side in pair)))
    torch.manual_seed(0)
    model = Translator(codec.size, codec.size, 8, 1, 2, dropout=0.0, shared_embeddings=True)
    return Translation(model, SOME, codec, **({"batch": 6} | options))


def test_a_codec_spells_what_it_reads():
    for tokenizer in (Characters.of("abc 年"), BytePairs.of("abc 年 abc 年", 260)):
        codec = Codec(tokenizer)
        tokens = codec.encode("cab 年")
        assert tokens[-1] == END
        assert min(tokens[:-1]) > UNKNOWN
        assert max(tokens) < codec.size
        assert codec.decode([START, *tokens, PAD]) == "cab 年"
    codec = Codec(Characters.of("ab"))
    assert codec.encode("axb") == [4, UNKNOWN, 5, END]
    assert codec.encode("axb")[:1] == codec.encode("a", "TEXT")[:1]
    with pytest.raises(ValueError, match=r"^TEXT: expected characters that occur in the text, got 'x'"):
        codec.encode("axb", "TEXT")
    assert [codec.name(token) for token in codec.encode("ab")] == ["a", "b", "end"]


def test_a_codec_reads_its_vocabulary_once():
    """Tens of thousands of sentences are encoded before a run begins."""
    reads = []

    class Watched(Characters):
        def __getattribute__(self, name):
            if name in ("vocabulary", "_token_of"):
                reads.append(name)
            return super().__getattribute__(name)

    codec = Codec(Watched("ab"))
    reads.clear()
    assert codec.encode("axb") == [4, UNKNOWN, 5, END]
    assert reads == []


def test_batches_are_of_similar_length_and_cover_all_pairs():
    pairs = Pairs([("a" * n, "a" * n) for n in range(1, 65)], SOME.valid, SOME.test)
    codec = Codec(Characters.of("abc"))
    task = Translation(Translator(codec.size, codec.size, 8, 1, 2), pairs, codec, batch=8)
    seen, spread = torch.zeros(66), []
    for step in range(600):
        parts = task.batches(torch.Generator().manual_seed(step), step, 2)
        assert [len(part.source) for part in parts] == [4, 4]
        lengths = torch.cat([(part.source != PAD).sum(1) for part in parts])
        assert torch.equal(lengths, torch.cat([(part.target != PAD).sum(1) for part in parts]) - 1)
        seen += torch.bincount(lengths, minlength=66)
        spread.append(int(lengths.max() - lengths.min()))
    assert seen[2:].min() > 40, "75 are expected of each"
    assert seen[2:].max() < 120
    assert sum(spread) / len(spread) < 10


def test_batches_follow_from_the_generator_alone():
    def drawn(seed, parts, step=0):
        return make_task().batches(torch.Generator().manual_seed(seed), step, parts)

    one, again = drawn(3, 1)[0], drawn(3, 1, step=9)[0]
    assert torch.equal(one.source, again.source)
    parts = drawn(3, 3)
    rows = [row[row != PAD].tolist() for part in parts for row in part.source]
    assert rows == [row[row != PAD].tolist() for row in one.source]
    assert sum(make_task().count(part) for part in parts) == make_task().count(one)


def test_the_loss_is_a_mean_over_tokens():
    task = make_task(smoothing=0.0)
    pairs = task.train[:3]
    whole, parts = Batch.of(pairs), [Batch.of([pair]) for pair in pairs]
    assert task.count(whole) == 3 + 4 + 2
    with torch.no_grad():
        summed = sum(task.loss(task.model, part) * task.count(part) for part in parts)
        assert task.loss(task.model, whole).item() == pytest.approx(summed.item() / 9, abs=1e-5)
        logits, wanted = whole.logits(task.model)
        logs = logits.log_softmax(-1)
        right = logs.gather(-1, wanted[..., None])[..., 0]
        spread = -(0.7 * right + 0.3 * logs.mean(-1))[wanted != PAD].mean()
        smooth = make_task(smoothing=0.3).loss(task.model, whole)
        torch.testing.assert_close(smooth, spread, atol=1e-5, rtol=0)


def test_validation_finds_what_greedy_search_finds():
    torch.manual_seed(1)
    task = make_task(smoothing=0.0)
    trainer = Trainer(task, Options(steps=80, learning_rate=1e-2, weight_decay=0.0), Processes())
    for _ in range(80):
        step = trainer.advance()
    assert step.loss < 0.2, "it has learned by heart"
    task.model.eval()
    wrong = (task.train[0][0], task.train[1][1])
    task.valid = [*task.train[:4], wrong, (task.train[2][0], [UNKNOWN, END])]
    found = 0
    for source, target in task.valid:
        ((best,),) = translate(task.model, torch.tensor([source]), START, END, beams=1, max_length=9)
        found += [*best.tokens, END] == target
    assert found == 4
    with torch.no_grad():
        assert task.validate()["exact_match"] == 4 / 6
    greedy = translate_texts(
        task.model, [source for source, _ in task.train[:4]], beams=1, length_penalty=0.0, longest=4
    )
    assert [[*tokens, END] for tokens in greedy] == [target for _, target in task.train[:4]]


def test_a_translation_is_cut_by_its_own_source_and_holds_no_token_of_ours():
    model = make_task().model
    for parameter in model.parameters():
        parameter.data.zero_()
    with torch.no_grad():  # whatever the source, the padding is likeliest, then other tokens of ours, and END never
        for token, weight in ((PAD, 4.0), (START, 3.0), (UNKNOWN, 2.0), (4, 1.0)):
            model.target_embedding.weight[token] = weight
        model.decoder_norm.bias.fill_(1.0)
    sources = [[4] * 29 + [END], [4, END], [4] * 7 + [END]]
    for longest, lengths in ((8, [76, 26, 32]), (100, [141] * 3)):  # 16 more than 2 S, or than 5/4 of the longest
        found = translate_texts(model, sources, beams=1, length_penalty=0.0, longest=longest)
        assert found == [[4] * n for n in lengths]


def test_what_is_not_in_the_vocabulary_is_not_right():
    task = make_task()
    task.valid = [(task.train[0][0], [UNKNOWN, END])]
    for parameter in task.model.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        task.model.target_embedding.weight[UNKNOWN] = 1.0
        task.model.decoder_norm.bias.fill_(1.0)
        assert task.validate()["exact_match"] == 0.0


def test_judging():
    pairs = [("a", "the cat sat on the mat"), ("b", "a dog ran in the park today")]
    perfect = judge([target for _, target in pairs], pairs)
    assert (perfect.pairs, perfect.exact, perfect.words) == (2, 2, "13a")
    assert perfect.bleu == pytest.approx(100.0)
    assert perfect.chrf == pytest.approx(100.0)
    worse = judge(["the cat sat on a mat", "a dog ran in the park today"], pairs)
    assert worse.exact == 1
    assert 30 < worse.bleu < 90
    assert 50 < worse.chrf < 99
    assert judge(["no", "nothing"], pairs).bleu < 5


@pytest.mark.parametrize(
    ("target", "words"),
    [("我今天去公园了", "zh"), ("今日は公園に行きました", "char"), ("1987 5", "13a"), ("ich ging heute", "13a")],
)
def test_words_are_told_apart_as_the_language_needs_it(target, words):
    quality = judge([target] * 2, [("x", target)] * 2)
    assert quality.words == words
    assert quality.exact == 2
