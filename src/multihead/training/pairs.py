"""Pairs of sentences to learn translation from: a file of them, or dates and names made from Unicode's CLDR.

The made ones need no download: the `babel` package knows how each language writes dates, and what it calls countries,
languages and currencies. The dates kept back are of years that no date to learn from has, so what is known of them
was not learned by heart.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from multihead.errors import bad_value, check_size
from multihead.packages import need

Pair = tuple[str, str]  # source, target

YEARS = range(1000, 3000)
LEAST_PAIRS = 20  # of a file: fewer leave nothing to judge by
_MOST_KEPT_BACK = 1000
_MOST_NAME = 30  # characters; longer names are rare, and make every batch that they are in long
_MOST_FIELD = 10_000  # characters of one side of a pair
_FORM = "a UTF-8 file whose lines are a source, a tab and a target"

# How English writes a date: with the name of the month, so that day and month can't be mixed up, or as ISO 8601 does.
# The target is CLDR's full form of the other language where the weekday is told, else its long form.
_ENGLISH = (
    ("MMMM d, y", "long"),  # March 5, 1987
    ("MMM d, y", "long"),  # Mar 5, 1987
    ("d MMMM y", "long"),  # 5 March 1987
    ("d MMM y", "long"),  # 5 Mar 1987
    ("y-MM-dd", "long"),  # 1987-03-05
    ("EEEE, MMMM d, y", "full"),  # Thursday, March 5, 1987
    ("EEE, MMM d, y", "full"),  # Thu, Mar 5, 1987
    ("EEEE, d MMMM y", "full"),  # Thursday, 5 March 1987
    ("EEE, d MMM y", "full"),  # Thu, 5 Mar 1987
)


@dataclass(frozen=True)
class Pairs:
    """Pairs to learn from, and two sets that are kept back. No source of one set is in another."""

    train: list[Pair]
    valid: list[Pair]  # to watch the training by
    test: list[Pair]  # to judge by in the end


def made_pairs(to: str = "zh", *, dates: int = 40_000, kept_back: int = 1000, seed: int = 0) -> Pairs:
    """English dates and names with their translation.

    Args:
        to: the locale to translate to, as CLDR calls it: zh, de, pt_BR, zh_Hant ...
        dates: how many dates to learn from. Names are added several times over, for a fourth of all that is learned.
        kept_back: how many dates `valid` and `test` have each. Their years, a tenth of all for each of the two, are in
            no other set. Names are only learned: what a country is called can't be known from others.
        seed: of what is drawn.

    Raises:
        ValueError: there is no such locale. The message names those with a similar name.
        MissingPackage: there is no babel here.
    """
    check_size("dates", dates)
    check_size("kept_back", kept_back)
    check_size("seed", seed, least=0)
    locale = _locale(to)
    draw = random.Random(seed)
    years = list(YEARS)
    draw.shuffle(years)
    tenth = len(years) // 10
    test = _dates(locale, years[:tenth], kept_back, draw)
    valid = _dates(locale, years[tenth : 2 * tenth], kept_back, draw)
    train, called = _dates(locale, years[2 * tenth :], dates, draw), names(to)
    train += called * max(1, round(len(train) / 3 / len(called)))  # each has to be learned by heart
    draw.shuffle(train)
    return Pairs(train, valid, test)


def names(to: str) -> list[Pair]:
    """What English and another language call the months, weekdays, countries, currencies and the larger languages.

    Left out are long names and those with an explanation, such as years, in brackets. Args, raises: as `made_pairs`.
    """
    locale, english = _locale(to), _locale("en")
    found: dict[str, str] = {}
    for kind in ("months", "days"):
        ours, theirs = (getattr(of, kind)["stand-alone"]["wide"] for of in (english, locale))
        found |= {ours[key]: theirs[key] for key in sorted(ours)}
    for kind in ("territories", "languages", "currencies"):
        ours, theirs = getattr(english, kind), getattr(locale, kind)
        keys = (key for key in sorted(ours) if key in theirs and (kind != "languages" or len(key) == 2))
        found = {ours[key]: theirs[key] for key in keys} | found  # of two meanings the first stays
    return [
        pair
        for pair in found.items()
        if max(map(len, pair)) <= _MOST_NAME and all(map(str.strip, pair)) and "(" not in pair[0]
    ]


def _dates(locale: Any, years: Sequence[int], count: int, draw: random.Random) -> list[Pair]:
    """Different dates of these years, in all forms in turn; fewer than `count` where there are no more."""
    format_date = need("babel.dates", "cli", "what is made to translate").format_date
    found: dict[str, str] = {}
    count = min(count, len(years) * 365 * len(_ENGLISH) // 2)  # half of all that there are: soon found by drawing
    while len(found) < count:
        first = date(draw.choice(years), 1, 1)
        day = first + timedelta(draw.randrange((first.replace(year=first.year + 1) - first).days))
        pattern, form = _ENGLISH[len(found) % len(_ENGLISH)]
        found[format_date(day, pattern, locale="en")] = format_date(day, form, locale=locale)
    return list(found.items())


def _locale(name: str) -> Any:
    """CLDR's data of a language."""
    babel = need("babel", "cli", "what is made to translate")
    known = [
        locale
        for locale in need("babel.localedata", "cli", "what is made to translate").locale_identifiers()
        if locale != "root"
    ]
    wanted = name.replace("-", "_").lower()
    for identifier in known:
        if identifier.lower() == wanted:
            return babel.Locale.parse(identifier)
    # People also write a language's name, in English.
    languages = babel.Locale.parse("en").languages
    called = {languages[code].lower(): code for code in known if code in languages}
    called |= {identifier.lower(): identifier for identifier in known}
    near = [called[found] for found in difflib.get_close_matches(wanted, called, n=5, cutoff=0.6)]
    instead = f"Did you mean {' or '.join(dict.fromkeys(near))}?" if near else "Such as zh, de, fr, ja or pt_BR."
    raise bad_value("--to", f"one of CLDR's {len(known):,} locales", repr(name), "", instead)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a UTF-8 file: each line is a source, a tab and a target. Further columns are left out.

    Raises:
        ValueError: it can't be read, is no text, holds no pairs, or a line is no pair: its number, from 1 on, is told.
    """
    text = _text(path)
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):  # no splitlines: it would break at rarer signs too
        columns = [column.strip() for column in line.split("\t")]
        where = f"{str(path)!r}, line {number}"
        if len(columns) < 2:
            got = f"{where}, without a tab" if line.strip() else f"{where}, which is blank"
            raise bad_value("--pairs", _FORM, got, "There is nothing to translate it to.")
        source, target = columns[:2]
        if not source or not target:
            raise bad_value("--pairs", _FORM, f"{where}, whose {'target' if source else 'source'} is blank")
        if max(len(source), len(target)) > _MOST_FIELD:
            form = f"at most {_MOST_FIELD:,} characters on each side"
            raise bad_value("--pairs", form, f"{where}, which has more", "", "Cut it into sentences.")
        pairs.append((source, target))
    return pairs


def _text(path: Path) -> str:
    def unfit(what: str, instead: str) -> ValueError:
        return bad_value("--pairs", _FORM, f"{str(path)!r}, {what}", "", instead)

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise unfit("which does not exist", "Check the path.") from None
    except IsADirectoryError:
        raise unfit("a directory", "Name one file.") from None
    except OSError as error:
        raise unfit(f"which can't be read ({error.strerror})", "Check the path.") from None
    if b"\0" in data:  # UTF-8 knows it, text does not: it is UTF-16 or no text at all
        raise unfit(f"whose byte {data.index(0)} (counted from 0), 0x00, is in no text", "Save it as UTF-8 first.")
    try:
        text = data.decode().removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise unfit(f"whose line {line} is not UTF-8", "Save it as UTF-8 first.") from None
    if not text.strip():
        raise unfit("which is empty", "Leave --pairs out for pairs that are made here.")
    return text


def split_pairs(pairs: Sequence[Pair], *, seed: int = 0) -> Pairs:
    """Keep a twentieth of all sources, up to 1,000, back for each of `valid` and `test`; with all their translations.

    Raises:
        ValueError: there are fewer than 20 different sources.
    """
    sources = list(dict.fromkeys(source for source, _ in pairs))
    if len(sources) < LEAST_PAIRS:
        otherwise = "Some are kept back to judge by, and there would be nothing to learn from."
        raise bad_value("--pairs", f"at least {LEAST_PAIRS} different sources", len(sources), otherwise)
    random.Random(seed).shuffle(sources)
    count = min(_MOST_KEPT_BACK, len(sources) // 20)
    test, valid = set(sources[:count]), set(sources[count : 2 * count])
    return Pairs(
        [pair for pair in pairs if pair[0] not in test and pair[0] not in valid],
        [pair for pair in pairs if pair[0] in valid],
        [pair for pair in pairs if pair[0] in test],
    )
