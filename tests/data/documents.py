"""Documents of any size, with and without line breaks and spaces, which come in blocks that end
anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

SENTENCES = """the of and to in step done loss return self import def class 0 12 3.14 1,000 don't I'll naïve Zürich über x=1; a/b //
(y) [z] {} == != ... -- \u201cso\u201d qzx jv 中文 的 字符 日本語 かな 한국어 हिन्दी العربية 🙂 e\u0301 \ufb01 \u00bd \u3231 A\u030a"""
WORDS = SENTENCES.split()
CHINESE = "的一是不了在人有我他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生"
ODD = (
    "▁",
    "▁▁",
    " ▁",
    "\x01",
    "\x1f",
    "\x7f",
    "\x85",
    "\u00a0",
    "\u2028",
    "\u3000",
    "\ufeff",
    "\u200b",
    "\t",
    "\r",
    "\u0301",
    "豈",
)


def lines(draw: random.Random) -> Iterator[str]:
    while True:
        indent = " " * draw.choice((0, 0, 0, 1, 4, 8))
        yield (
            indent
            + " ".join(draw.choices(WORDS, k=draw.randint(0, 12)))
            + draw.choice(("", "", " "))
            + "\n"
        )


def one_line(draw: random.Random) -> Iterator[str]:
    return (draw.choice(WORDS) + " " * draw.choice((1, 1, 1, 2)) for _ in iter(int, 1))


def without_spaces(draw: random.Random) -> Iterator[str]:
    return ("".join(draw.choices("etaoinshrdlucmfwypvbgkqjxz", k=50)) for _ in iter(int, 1))


def chinese(draw: random.Random) -> Iterator[str]:
    return ("".join(draw.choices(CHINESE, k=50)) for _ in iter(int, 1))


def log(_: random.Random) -> Iterator[str]:
    return (f"  {number}: step done\n" for number in range(1 << 30))


def crlf(draw: random.Random) -> Iterator[str]:
    return (line.replace("\n", "\r\n") for line in lines(draw))


def odd(draw: random.Random) -> Iterator[str]:
    return (draw.choice((*ODD, *WORDS, " ", "\n", "  ", "\n\n")) for _ in iter(int, 1))


def equal(_: random.Random) -> Iterator[str]:
    return ("a" * 1000 for _ in iter(int, 1))


def spaces(_: random.Random) -> Iterator[str]:
    return (" " * 1000 for _ in iter(int, 1))


TEXTS = {
    kind.__name__: kind
    for kind in (lines, one_line, without_spaces, chinese, log, crlf, odd, equal, spaces)
}


@cache
def text_of(name: str, size: int) -> str:
    """A text of so many bytes, or a few less."""
    found = []
    length = 0
    for each in TEXTS[name](random.Random(name)):
        length += len(each.encode())
        if length > size:
            break
        found.append(each)
    return "".join(found) or next(TEXTS[name](random.Random(name)))[:size]


def in_blocks(text: str, longest: int) -> Iterator[str]:
    """The text, cut anywhere."""
    draw = random.Random(len(text))
    start = 0
    while start < len(text):
        stop = start + draw.randint(1, longest)
        yield text[start:stop]
        start = stop
