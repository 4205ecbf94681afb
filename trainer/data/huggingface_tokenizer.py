"""The tokenizer of a Hugging Face folder, with the ids of transformers.

Only this module imports tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from trainer.config.data import TOKENIZER_FILE
from trainer.data.byte_level_bpe import (
    PROBE,
    TiktokenBpe,
    is_plain_bpe,
    merge_list,
    split_pattern,
    tiktoken_ranks,
)
from trainer.data.huggingface_cuts import TokenCuts, proved_cuts
from trainer.data.normalizer_growth import definition_growth, require_normalized_length
from trainer.data.text_chunks import EncodingError, MayCut, encode_parts, joined, split_text
from trainer.data.tokenizer_file_types import sha256_of
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
"""Shorter texts, such as prompts, do not wait until the tokenizer is compared with tiktoken, about
a second.
"""

PART_CHARS = 400_000
TOKEN_CUTS_PART_CHARS = 1000
"""The time per character of a BPE that does not split into words grows with the length of the
text.
"""
MAX_CHARS = 1 << 24
"""Most characters in one call of the library, which takes 100 to 360 bytes of memory for each, the
most for characters of several tokens.
"""

MAX_NAME_CHARS = 1 << 27
"""Texts of all added tokens, normalized."""

ON_BY_DEFAULT = {"ByteLevel": "use_regex", "Metaspace": "split"}
"""Options of pre-tokenizers that are on if the file does not have them."""
OFF_OR_NOTHING = "strip_accents"
"""Option of a normalizer that follows another option if it is absent, so that false differs from
absent.
"""


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a folder, or of the folder of a tokenizer.json. Raises DataError."""
    files = read_tokenizer_files(path)
    try:
        return HuggingFaceTokenizer(files, name=f'tokenizer.path = "{path}"')
    except DataError as error:
        raise DataError(f'tokenizer.path = "{path}": {error}') from error


class HuggingFaceTokenizer:
    """The tokenizer of a folder's files.

    Raises DataError for files that tokenizers cannot read, and for a tokenizer that cannot delimit
    documents. Pickling sends all results of the checks to other processes, which only build the
    library's tokenizer.
    """

    def __init__(self, files: Files, *, name: str = TOKENIZER_FILE) -> None:
        self._files = files
        self._name = name
        try:
            definition = read_object(files, TOKENIZER_FILE)
        except DataError as error:
            raise DataError(
                f"{TOKENIZER_FILE} is damaged, or of a newer format: {error}"
            ) from error
        self._growth = definition_growth(definition)
        require_bounded_names(files, definition, self._growth)
        self._tokenizer = build_tokenizer(files)
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = definition["model"]["vocab"]
        last = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=0)
        # Ids may have gaps: the largest one counts, not the number of tokens.
        self.vocab_size: int = max(last, *added) + 1
        self.bos: int | None = first_token(self._tokenizer)
        eos = self._tokenizer.token_to_id(end_token(self._tokenizer, files))
        assert eos is not None  # noqa: S101 - `end_token` names a token of the tokenizer
        self.eos: int = eos
        self.stop_tokens = frozenset({self.eos, *end_token_ids(files)})
        unknown = definition["model"].get("unk_token")
        self.special_tokens: dict[str, int] = {
            # All but the token of unknown characters, which `encode` may return.
            token.content: token_id
            for token_id, token in added.items()
            if token.special and (token.content != unknown or token_id in (self.bos, self.eos))
        }
        identity = (canonical_json(definition), describe_added_tokens(added), self.bos, self.eos)
        self.fingerprint = "huggingface-" + sha256_of(identity)
        self.may_cut: MayCut = proved_cuts(definition, [*added.values()], self._normalize)
        self._suits_tiktoken = split_pattern(definition) is not None and is_plain_bpe(definition)
        self._newline = self._encode_with_library("\n")
        # Some tokenizers put a space before every text, which must not stand where a text was
        # split.
        self._has_prefix = self._encode_with_library(
            "\na"
        ) != self._newline + self._encode_with_library("a")
        self._inside_misread_names = self._find_misread_names()

    def __getstate__(self) -> dict[str, Any]:
        # Reading `_tiktoken` below compares the two libraries now, which takes a second, so that
        # workers need not.
        kept = {
            name: each
            for name, each in vars(self).items()
            if name not in ("_tokenizer", "_is_special")
        }
        return {"_tiktoken": self._tiktoken} | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokenizer = build_tokenizer(self._files)

    def encode(self, text: str) -> Tensor:
        return joined(self.encode_blocks([text]))

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[Tensor]:
        part_chars = TOKEN_CUTS_PART_CHARS if isinstance(self.may_cut, TokenCuts) else PART_CHARS
        parts = split_text(blocks, self.may_cut, part_chars=part_chars, max_chars=MAX_CHARS)
        return map(self._require_text, encode_parts(parts, self._encode_text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _require_text(self, ids: Tensor) -> Tensor:
        """The ids. Raises EncodingError where normalization or merges turn other text into a
        special token.
        """
        # a hundredth of the time of the encoding
        special = self._is_special.index_select(0, ids)
        if special.any():
            found = {*ids[special].tolist()}
            names = ", ".join(
                f'"{name}"' for name, token in self.special_tokens.items() if token in found
            )
            raise EncodingError(
                f"a text is encoded as the special token {names}, which would end it or begin another"
            )
        return ids

    @cached_property
    def _is_special(self) -> Tensor:
        """[vocab_size] bool: whether an id is that of a special token."""
        is_special = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_special[[*self.special_tokens.values()]] = True
        return is_special

    def _find_misread_names(self) -> re.Pattern[str] | None:
        """A pattern that matches after the first character of names that the model would read as
        their token; None if there are none.

        Raises DataError for such a name of one character.
        """
        misread = [
            name
            for name, token in self.special_tokens.items()
            if token in self._encode_with_library(name)
        ]
        if hopeless := [name for name in misread if len(name) < 2]:
            raise DataError(f"the texts {hopeless} would be encoded as special tokens")
        # Lookarounds split such a name after its first character and drop nothing of the text.
        places = (f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in misread)
        return re.compile("|".join(places)) if misread else None

    def _encode_text(self, text: str) -> list[int]:
        if self._inside_misread_names is None:
            return self._encode_part(text)
        first, *others = self._inside_misread_names.split(text)
        ids = self._encode_part(first)
        for part in others:
            ids += self._encode_later_part(part)
        return ids

    def _encode_part(self, text: str) -> list[int]:
        if len(text) >= MIN_TIKTOKEN_CHARS and self._tiktoken is not None:
            ids = self._tiktoken.encode(text)
            if ids is not None:
                return ids
        return self._encode_with_library(text)

    def _encode_later_part(self, text: str) -> list[int]:
        if not self._has_prefix:
            return self._encode_part(text)
        return self._encode_part(f"\n{text}")[len(self._newline) :]

    def _encode_with_library(self, text: str) -> list[int]:
        require_normalized_length(
            text, self._growth, self._normalize, max_chars=2 * MAX_CHARS, name=self._name
        )
        # Of a batch, because only batches leave out the offsets of tokens, a third of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return str(normalizer.normalize_str(text)) if normalizer else text

    @cached_property
    def _tiktoken(self) -> TiktokenBpe | None:
        """The same tokenizer in tiktoken, if that gives the same ids."""
        if not self._suits_tiktoken:
            return None
        definition = read_object(self._files, TOKENIZER_FILE)
        pattern = split_pattern(definition)
        with merges_alone(self._tokenizer.model) as builds:
            ranks = tiktoken_ranks(definition["model"], builds)
        if pattern is None or ranks is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder().values()
        normalizer = self._tokenizer.normalizer
        # Merges are proved equal. The probe compares what no proof covers: how the releases of
        # both libraries split Unicode.
        candidate = TiktokenBpe(
            ranks,
            pattern,
            normalize=normalizer.normalize_str if normalizer else str,
            added_names=[token.content for token in added if not token.special],
        )
        return candidate if candidate.encode(PROBE) == self._encode_with_library(PROBE) else None


# ---- building


def require_bounded_names(files: Files, definition: Mapping[str, Any], growth: int) -> None:
    """Raises DataError if the names of added tokens, which are normalized, may become too long."""
    listed = definition.get("added_tokens")
    num_chars = sum(len(str(token)) for token in (listed if isinstance(listed, list) else ()))
    num_chars += sum(len(content) for name, content in files.items() if name != TOKENIZER_FILE)
    if num_chars * growth > MAX_NAME_CHARS:
        raise DataError(
            f"{TOKENIZER_FILE}: its normalizer may make {growth:,} characters of one, too many for added tokens of "
            f"{num_chars:,} characters: at most {MAX_NAME_CHARS:,}"
        )


def build_tokenizer(files: Files) -> Tokenizer:
    """The tokenizer of tokenizer.json with the added and special tokens of the other files.

    Raises DataError.
    """
    try:
        built = Tokenizer.from_buffer(files[TOKENIZER_FILE])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # tokenizers raises Exception itself, and Rust panics
        raise DataError(f"{TOKENIZER_FILE} is damaged, or of a newer format: {error}") from error
    if not built.get_vocab_size():
        raise DataError(f"{TOKENIZER_FILE} has an empty vocabulary")
    if dropout := getattr(built.model, "dropout", None):
        raise DataError(
            f"{TOKENIZER_FILE} has model.dropout = {dropout}, which makes ids random; set it to null"
        )
    # A file may carry the truncation and padding of whoever saved it.
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # As text.
    add_configured_tokens(built, files)
    specials = {
        *named_special_tokens(files).values(),
        *extra_special_tokens(files),
        end_token(built, files),
    }
    specials -= {
        token.content for token in built.get_added_tokens_decoder().values() if token.special
    }
    built.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in sorted(specials)]
    )
    return built


def add_configured_tokens(built: Tokenizer, files: Files) -> None:
    """Adds the tokens of the other files, or changes their flags.

    Raises DataError if ids disagree.
    """
    known = built.get_added_tokens_decoder()
    configured = configured_added_tokens(files)
    tokens = {token_id: AddedToken(**fields) for token_id, fields in configured.items()}
    if CONFIG_FILE not in files or "added_tokens_decoder" not in read_object(files, CONFIG_FILE):
        tokens = {token_id: token for token_id, token in tokens.items() if token_id not in known}
    built.add_tokens(
        [token for token_id, token in tokens.items() if repr(known.get(token_id)) != repr(token)]
    )
    ids = {token.content: built.token_to_id(token.content) for token in tokens.values()}
    wrong = [
        (token.content, token_id)
        for token_id, token in tokens.items()
        if ids[token.content] != token_id
    ]
    if wrong:
        stated = ", ".join(
            f'"{name}" is {token_id}, but {ids[name]} by {TOKENIZER_FILE}'
            for name, token_id in wrong
        )
        raise DataError(f"{CONFIG_FILE} or {ADDED_TOKENS_FILE}: {stated}")


def first_token(built: Tokenizer) -> int | None:
    """The token that the post-processor puts before every text.

    Raises DataError if it is not one.
    """
    text, with_specials = (
        built.encode("a", add_special_tokens=added).ids for added in (False, True)
    )
    # The post-processor may add one token before the text, and any number after it.
    for number in range(2):
        if with_specials[number : number + len(text)] == text:
            return with_specials[0] if number else None
    raise DataError(
        f"{TOKENIZER_FILE} puts {with_specials} around {text}: more than one token before a text"
    )


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
    """The parts of the file that ids of texts depend on, equal for any way to write the same file."""
    options = {key: value for key, value in definition["model"].items() if key != "vocab"}
    model = without_defaults(options) | {"vocab": definition["model"]["vocab"]}
    if model.get("type") == "BPE":
        model["merges"] = merge_list(model)
    steps = (without_defaults(definition.get(key)) for key in ("normalizer", "pre_tokenizer"))
    return json.dumps([model, *steps], sort_keys=True)


def without_defaults(value: Any) -> Any:
    """The value without options that are off, and without one that moves offsets only. Options
    that are on by default are stated.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {
        key: item
        for key, item in value.items()
        if item is not None and item != "" and (item is not False or key == OFF_OR_NOTHING)
    }
    stated = ON_BY_DEFAULT.get(str(value.get("type")))
    if stated is not None and value.get(stated) is None:
        kept[stated] = True
    return {key: without_defaults(item) for key, item in kept.items() if key != "trim_offsets"}


def describe_added_tokens(added: Mapping[int, AddedToken]) -> list[tuple[object, ...]]:
    """Flags of special tokens have no effect, because their names are encoded as text."""
    return [
        (token_id, token.content, True)
        if token.special
        else (
            token_id,
            token.content,
            token.single_word,
            token.lstrip,
            token.rstrip,
            token.normalized,
        )
        for token_id, token in sorted(added.items())
    ]


@contextmanager
def merges_alone(model: Any) -> Iterator[Callable[[str], bool]]:
    """Whether a BPE model's merges build a token, without looking it up first."""
    has_lookup = model.ignore_merges
    model.ignore_merges = False
    try:
        yield lambda token: len(model.tokenize(token)) == 1
    finally:
        model.ignore_merges = has_lookup
