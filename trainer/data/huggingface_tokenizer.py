"""The tokenizer of a Hugging Face folder, with the ids of transformers. Only this module imports tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, product, repeat, starmap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from trainer.config.data import TOKENIZER_FILE
from trainer.data import text_chunks
from trainer.data.byte_level_bpe import (
    PROBE,
    TiktokenBpe,
    is_plain_bpe,
    merge_list,
    split_pattern,
    tiktoken_ranks,
)
from trainer.data.file_types import sha256_of
from trainer.data.text_chunks import encode_chunks, last_line_start
from trainer.data.tokenizer_folder import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    Files,
    configured_added_tokens,
    end_token_ids,
    extra_special_tokens,
    named_special_tokens,
    read_object,
    read_tokenizer_files,
)
from trainer.errors import DataError

MIN_TIKTOKEN_CHARS = 256
"""Shorter texts, such as prompts, do not wait until the tokenizer is compared with tiktoken, about a second."""

# Before and after a line break at which texts are split.
LINE_ENDS = (
    "a",
    "1",
    "x = 1;",
    "don'",
    "the ",
    "\t",
    "  \n ",
    "\n",
    "\n\n\n",
    "\r",
    "/",
    "!\n/",
    "_",
    "é",
    "中",
    "🙂",
    "</s>",
)
LINE_STARTS = ("a", "A", "1", "12345", "s", "S're", "re ", "a b", "x\n", "the quick", "é", "Ünï", "ﬁ", "中文")
LINE_START = re.compile(r"\n(?=[^\W_])")
TOKEN_ACROSS_LINES = re.compile(r"[\nĊ](?![ĠĊčĉ▁])[\w\u00d7]")
"""In byte-level vocabularies Ċ is a line break; Ġ, č and ĉ are other whitespace, and U+00D7 begins Hebrew letters."""


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a folder, or of the folder of a tokenizer.json. Raises DataError."""
    files = read_tokenizer_files(path)
    try:
        return HuggingFaceTokenizer(files)
    except DataError as error:
        raise DataError(f'tokenizer.path = "{path}": {error}') from error


class HuggingFaceTokenizer:
    """Raises DataError for files that tokenizers cannot read, and for a tokenizer that cannot delimit documents."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._tokenizer = build_tokenizer(files)
        self._definition = read_object(files, TOKENIZER_FILE)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values()) + 1
        self.bos: int | None = first_token(self._tokenizer)
        self.eos: int = ids[end_token(self._tokenizer, files)]
        self.stop_tokens = frozenset({self.eos, *end_token_ids(files)})
        self._added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = self._find_special_tokens()
        identity = (canonical_json(self._definition), describe_added_tokens(self._added), self.bos, self.eos)
        self.fingerprint = "huggingface-" + sha256_of(identity)
        self._newline = self._encode_with_library("\n")
        # Some tokenizers put a space before every text, which must not stand where a text was split.
        self._has_prefix = self._encode_with_library("\na") != self._newline + self._encode_with_library("a")
        self._inside_misread_names = self._find_misread_names()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[Files]]:
        return HuggingFaceTokenizer, (self._files,)

    def encode(self, text: str) -> Tensor:
        encoders = chain((self._encode_text,), repeat(self._encode_part))
        return encode_chunks(self._split(text), lambda part: next(encoders)(part))

    def encode_continuation(self, text: str) -> Tensor:
        return encode_chunks(self._split(text), self._encode_part)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _find_special_tokens(self) -> dict[str, int]:
        """All but the token of unknown characters, which `encode` may return."""
        unknown = self._definition["model"].get("unk_token")
        return {
            token.content: token_id
            for token_id, token in self._added.items()
            if token.special and (token.content != unknown or token_id in (self.bos, self.eos))
        }

    def _find_misread_names(self) -> re.Pattern[str] | None:
        """Matches after the first character of names that the model would read as their token. Raises DataError."""
        misread = [name for name, token in self.special_tokens.items() if token in self._encode_with_library(name)]
        if hopeless := [name for name in misread if len(name) < 2]:
            raise DataError(f"the texts {hopeless} would be encoded as special tokens")
        places = (f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in misread)
        return re.compile("|".join(places)) if misread else None

    def _split(self, text: str) -> Iterator[str]:
        """Parts that are encoded one by one: as long as possible, but at most MAX_CHUNK_CHARS if splits are exact."""
        limit, chunks = text_chunks.MAX_CHUNK_CHARS, iter((text,))
        if len(text) > limit and self._splits_at_lines:
            chunks = split_at_line_starts(text, limit)
        if self._inside_misread_names is None:
            return chunks
        return chain.from_iterable(map(self._inside_misread_names.split, chunks))

    def _encode_text(self, text: str) -> list[int]:
        if len(text) >= MIN_TIKTOKEN_CHARS and self._tiktoken is not None:
            ids = self._tiktoken.encode(text)
            if ids is not None:
                return ids
        return self._encode_with_library(text)

    def _encode_part(self, text: str) -> list[int]:
        if not self._has_prefix:
            return self._encode_text(text)
        return self._encode_text(f"\n{text}")[len(self._newline) :]

    def _encode_with_library(self, text: str) -> list[int]:
        # Of a batch, because only batches leave out the offsets of tokens, a third of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _splits_at_lines(self) -> bool:
        """Whether splits at line starts change no ids, by structure and by a probe."""
        matched = [token for token in self._added.values() if not token.special]
        names = [*self._tokenizer.get_vocab(with_added_tokens=False), *(token.content for token in matched)]
        return (
            self._definition["model"].get("type") == "BPE"
            and has_local_normalizer(self._definition)
            and not any(token.lstrip or token.rstrip for token in matched)
            and not any(self._has_prefix and token.content.endswith("\n") for token in matched)
            and not any(map(TOKEN_ACROSS_LINES.search, names))
            and all(starmap(self._splits_between, product(LINE_ENDS, LINE_STARTS)))
        )

    def _splits_between(self, end: str, start: str) -> bool:
        first, second = f"{end}\n", start
        return self._encode_with_library(first + second) == [
            *self._encode_with_library(first),
            *self._encode_part(second),
        ]

    @cached_property
    def _tiktoken(self) -> TiktokenBpe | None:
        """The same tokenizer in tiktoken, if that gives the same ids."""
        pattern = split_pattern(self._definition)
        if pattern is None or not is_plain_bpe(self._definition):
            return None
        with merges_alone(self._tokenizer.model) as builds:
            ranks = tiktoken_ranks(self._definition["model"], builds)
        if ranks is None:
            return None
        normalizer = self._tokenizer.normalizer
        normalize = normalizer.normalize_str if normalizer else str
        matched = [token.content for token in self._added.values() if not token.special]
        candidate = TiktokenBpe(ranks, pattern, normalize=normalize, added_names=matched)
        return candidate if candidate.encode(PROBE) == self._encode_with_library(PROBE) else None


# ---- building


def build_tokenizer(files: Files) -> Tokenizer:
    """The tokenizer of tokenizer.json with the added and special tokens of the other files. Raises DataError."""
    try:
        built = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises Exception itself, and Rust panics
        raise DataError(f"{TOKENIZER_FILE} is damaged, or of a newer format: {error}") from error
    definition = read_object(files, TOKENIZER_FILE)
    if not built.get_vocab_size():
        raise DataError(f"{TOKENIZER_FILE} has an empty vocabulary")
    if dropout := definition["model"].get("dropout"):
        raise DataError(f"{TOKENIZER_FILE} has model.dropout = {dropout}, which makes ids random; set it to null")
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # As text.
    add_configured_tokens(built, files)
    specials = {*named_special_tokens(files).values(), *extra_special_tokens(files), end_token(built, files)}
    specials -= {token.content for token in built.get_added_tokens_decoder().values() if token.special}
    built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(specials)])
    return built


def add_configured_tokens(built: Tokenizer, files: Files) -> None:
    """Adds the tokens of the other files, or changes their flags. Raises DataError if ids disagree."""
    known, configured = built.get_added_tokens_decoder(), configured_added_tokens(files)
    tokens = {token_id: AddedToken(**fields) for token_id, fields in configured.items()}
    if CONFIG_FILE not in files or "added_tokens_decoder" not in read_object(files, CONFIG_FILE):
        tokens = {token_id: token for token_id, token in tokens.items() if token_id not in known}
    built.add_tokens([token for token_id, token in tokens.items() if repr(known.get(token_id)) != repr(token)])
    ids = {token.content: built.token_to_id(token.content) for token in tokens.values()}
    wrong = [(token.content, token_id) for token_id, token in tokens.items() if ids[token.content] != token_id]
    if wrong:
        stated = ", ".join(f'"{name}" is {token_id}, but {ids[name]} by {TOKENIZER_FILE}' for name, token_id in wrong)
        raise DataError(f"{CONFIG_FILE} or {ADDED_TOKENS_FILE}: {stated}")


def first_token(built: Tokenizer) -> int | None:
    """The token that the post-processor puts before every text. Raises DataError if it is not one."""
    text, with_specials = (built.encode("a", add_special_tokens=added).ids for added in (False, True))
    for number in range(2):
        if with_specials[number : number + len(text)] == text:
            return with_specials[0] if number else None
    raise DataError(f"{TOKENIZER_FILE} puts {with_specials} around {text}: more than one token before a text")


def end_token(built: Tokenizer, files: Files) -> str:
    """The token that ends documents. Raises DataError if the folder names none."""
    if name := named_special_tokens(files).get("eos_token"):
        return name
    for token_id in end_token_ids(files)[:1]:
        if name := built.id_to_token(token_id):
            return name
        raise DataError(f"eos_token_id = {token_id} is not in the vocabulary")
    raise DataError(
        f"no token ends documents: no eos_token in {CONFIG_FILE} or {SPECIAL_TOKENS_FILE}, no eos_token_id in "
        f"{GENERATION_FILE} or {MODEL_FILE}"
    )


# ---- what ids depend on


def canonical_json(definition: Mapping[str, Any]) -> str:
    """What ids of texts depend on, for any way to write the same file."""
    model = without_defaults(definition["model"])
    if model.get("type") == "BPE":
        model["merges"] = merge_list(model)
    steps = (without_defaults(definition.get(key)) for key in ("normalizer", "pre_tokenizer"))
    return json.dumps([model, *steps], sort_keys=True)


def without_defaults(value: Any) -> Any:
    """Without options that are off, and one that moves offsets only."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if item is not None and item is not False and item != ""}
    return {key: without_defaults(item) for key, item in kept.items() if key != "trim_offsets"}


def describe_added_tokens(added: Mapping[int, AddedToken]) -> list[tuple[object, ...]]:
    """Flags of special tokens have no effect, because their names are encoded as text."""
    return [
        (token_id, token.content, True)
        if token.special
        else (token_id, token.content, token.single_word, token.lstrip, token.rstrip, token.normalized)
        for token_id, token in sorted(added.items())
    ]


def has_local_normalizer(definition: Mapping[str, Any]) -> bool:
    """Whether a line is normalized as it is within a text."""
    step = definition.get("normalizer") or {"type": "NFC"}
    return all(map(is_local, step.get("normalizers", [step])))


def is_local(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return "\n" not in normalizer["pattern"].get("String", "\n")  # A regular expression may match anything.
    return normalizer["type"] in ("NFC", "Prepend")


def split_at_line_starts(text: str, max_chars: int) -> Iterator[str]:
    """Parts of at most `max_chars`, or up to the next line that starts with a letter or a digit."""
    start = 0
    while len(text) - start > max_chars:
        stop = last_line_start(text, start, start + max_chars, str.isalnum)
        if stop is None:
            following = LINE_START.search(text, start + max_chars - 1)
            stop = following.end() if following else len(text)
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


@contextmanager
def merges_alone(model: Any) -> Iterator[Callable[[str], bool]]:
    """Whether a BPE model's merges build a token, without looking it up first."""
    has_lookup, model.ignore_merges = model.ignore_merges, False
    try:
        yield lambda token: len(model.tokenize(token)) == 1
    finally:
        model.ignore_merges = has_lookup
