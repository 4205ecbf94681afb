"""Tokenizer files for Hugging Face transformers that produce the token ids of training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models.files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, read_beneath, read_regular
from trainer.config.data import TOKENIZER_FILE, TokenizerSection, tokenizer_folder
from trainer.data.byte_level_bpe import PATTERNS, PROBE, bytes_to_unicode
from trainer.data.sentencepiece_tokenizer import SentencePieceTokenizer
from trainer.data.tiktoken_tokenizer import TiktokenTokenizer
from trainer.data.tokenizer import Tokenizer, load_tokenizer, local_section, open_tokenizer
from trainer.data.tokenizer_file_types import SENTENCEPIECE, TIKTOKEN, detect_file_type
from trainer.data.tokenizer_folder import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    read_object,
)
from trainer.errors import DataError

BYTE_SPECIALS = ("<|bos|>", "<|eos|>", *(f"<|reserved_{n}|>" for n in range(6)))
META_TOKENIZER_PATH = Path("original/tokenizer.model")  # as in Meta's repositories
COPIED_FILES = (
    *(TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, GENERATION_FILE),
    *(
        "tokenizer.model",
        str(META_TOKENIZER_PATH),
        "vocab.json",
        "merges.txt",
        "tekken.json",
        "chat_template.json",
    ),
)
COPIED_PATTERNS = ("*.jinja", "additional_chat_templates/*.jinja")


def hf_tokenizer_files(
    stated: TokenizerSection, *, max_length: int
) -> tuple[Tokenizer, dict[Path, bytes]]:
    """The tokenizer and its Hugging Face files by name. Raises `DataError` as `open_tokenizer`."""
    stated = local_section(stated)
    tokenizer = open_tokenizer(stated)
    path = stated.path
    if stated.kind == "huggingface" and path is not None:
        return tokenizer, copied_files(tokenizer_folder(path), max_length=max_length)
    # By default transformers 4 adds token_type_ids, which models reject.
    inputs = ["input_ids", "attention_mask"]
    config = dict[str, Any](
        clean_up_tokenization_spaces=False, model_max_length=max_length, model_input_names=inputs
    )
    if path is not None and isinstance(tokenizer, SentencePieceTokenizer):
        # LlamaTokenizer prepends a space by default. With a dummy prefix in the model,
        # transformers 4 needs `legacy` to prepend it also to a text that starts with a space;
        # transformers 5 never does.
        config |= {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": tokenizer.add_dummy_prefix,
            "add_prefix_space": tokenizer.add_dummy_prefix,
            "add_bos_token": tokenizer.bos is not None,
            "add_eos_token": False,
            **tokenizer.special_token_names,
        }
        return tokenizer, {
            Path("tokenizer.model"): _content(path),
            Path("tokenizer_config.json"): _to_json(config),
        }
    files = dict[Path, bytes]()
    tokenizer_json = byte_tokenizer_json()
    bos: str | None = BYTE_SPECIALS[0]
    eos = BYTE_SPECIALS[1]
    if path is not None and isinstance(tokenizer, TiktokenTokenizer):
        files = {META_TOKENIZER_PATH: _content(path)}
        bos = tokenizer.bos_name
        eos = tokenizer.eos_name
        tokenizer_json = byte_level_bpe(
            tokenizer.ranks, tokenizer.special_token_names, pattern=tokenizer.pattern, bos=bos
        )
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    contents = {TOKENIZER_FILE: _to_json(tokenizer_json), CONFIG_FILE: _to_json(config)}
    # Tests compare the named patterns at every code point; a user's own is compared on a probe.
    if isinstance(tokenizer, TiktokenTokenizer) and tokenizer.pattern not in PATTERNS:
        _require_same_ids(tokenizer, contents)
    return tokenizer, files | {Path(name): content for name, content in contents.items()}


def _require_same_ids(tokenizer: TiktokenTokenizer, contents: dict[str, bytes]) -> None:
    """Raises `DataError` if Hugging Face's library reads a stated pattern otherwise than
    tiktoken.
    """
    from trainer.data.huggingface_tokenizer import HuggingFaceTokenizer

    if HuggingFaceTokenizer(contents).encode(PROBE).tolist() != tokenizer.encode(PROBE).tolist():
        raise DataError(
            f'tokenizer.pattern = "{tokenizer.pattern}" splits texts otherwise in Hugging Face\'s library than in '
            "tiktoken, so that no tokenizer.json gives the ids of training"
        )


def copied_files(folder: Path, *, max_length: int) -> dict[Path, bytes]:
    """The tokenizer, chat template and generation files of a folder, of which only a lower
    `model_max_length` changes.
    """
    paths = {folder / name for name in COPIED_FILES}.union(*map(folder.glob, COPIED_PATTERNS))
    names = [path.relative_to(folder) for path in sorted(paths) if path.is_file()]
    files = {name: _copied_file(folder, name) for name in names}
    config = read_json_file(folder / CONFIG_FILE)
    stated = config.get("model_max_length")
    # transformers warns of longer inputs and may truncate to this limit.
    if isinstance(stated, int | float) and stated < max_length:
        files[Path(CONFIG_FILE)] = _to_json(config | {"model_max_length": max_length})
    return files


def _content(path: Path) -> bytes:
    return read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)


def _copied_file(folder: Path, name: Path) -> bytes:
    """Raises `DataError` for what cannot be read, and for a link to a file elsewhere, which an
    export would publish.
    """
    try:
        return read_beneath(folder, name, max_bytes=MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"{folder / name} cannot be copied: {error.strerror}") from None


def changes_of_copy(folder: Path, files: Mapping[Path, bytes]) -> list[str]:
    """A line for each file that differs from that of the folder."""
    changed = [name for name, content in files.items() if _copied_file(folder, name) != content]
    return [
        f"{name}: model_max_length raised to the trained length, all else as it was"
        for name in changed
    ]


def model_token_ids(folder: Path, *, bos: int | None, eos: int) -> tuple[Any, Any]:
    """(bos_token_id, eos_token_id) of a folder's config.json, which may be lists; those given
    where it has none.
    """
    config = read_json_file(folder / MODEL_FILE)
    return config.get("bos_token_id", bos), config.get("eos_token_id", eos)


def bos_remarks(folder: Path) -> Iterator[str]:
    """A comment if tokenizer_config.json says otherwise than tokenizer.json, which transformers 5
    follows.
    """
    stated = read_json_file(folder / CONFIG_FILE).get("add_bos_token")
    if stated is None or not (folder / TOKENIZER_FILE).exists():
        return
    bos = load_tokenizer("huggingface", folder).bos
    if bool(stated) != (bos is not None):
        yield (
            f"# {CONFIG_FILE} has add_bos_token = {json.dumps(stated)}, but {TOKENIZER_FILE} begins texts with "
            f"{f'token {bos}' if bos is not None else 'no token'}. Documents begin as {TOKENIZER_FILE} says."
        )


def read_json_file(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is none."""
    files = (
        {path.name: read_beneath(path.parent, path.name, max_bytes=MAX_CONFIG_BYTES)}
        if path.is_file()
        else {}
    )
    return read_object(files, path.name)


def byte_tokenizer_json() -> dict[str, Any]:
    """The contents of tokenizer.json for `tokenizer.kind` = "byte"."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return byte_level_bpe(ranks, BYTE_SPECIALS, pattern=None, bos=BYTE_SPECIALS[0])


def byte_level_bpe(
    ranks: dict[bytes, int], specials: tuple[str, ...], *, pattern: str | None, bos: str | None
) -> dict[str, Any]:
    """The contents of tokenizer.json.

    Special tokens follow the ranks; `bos`, one of them, is prepended to every text.
    """
    # JSON holds text, so bytes are written as GPT-2's characters for them.
    byte_chars = bytes_to_unicode()
    token_strings = {
        rank: "".join(byte_chars[byte] for byte in token) for token, rank in ranks.items()
    }
    first_special_id = len(ranks)
    byte_level_step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    pre_tokenizer: dict[str, Any] = byte_level_step
    if pattern:
        pattern_step = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [pattern_step, byte_level_step]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first_special_id + n, "content": name, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for n, name in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None
        if bos is None
        else prepend_token(bos, first_special_id + specials.index(bos)),
        "decoder": byte_level_step,
        "model": {
            "type": "BPE",
            **dict.fromkeys(
                ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
            ),
            "fuse_unk": False,
            "byte_fallback": False,
            # tiktoken, too, looks up a whole word before it merges.
            "ignore_merges": True,
            "vocab": {token_strings[rank]: rank for rank in sorted(token_strings)},
            "merges": [
                [token_strings[left], token_strings[right]] for left, right in bpe_merges(ranks)
            ],
        },
    }


def prepend_token(name: str, token: int) -> dict[str, Any]:
    """The post-processor that puts a special token before every text."""
    first_sequence = {"Sequence": {"id": "A", "type_id": 0}}
    second_sequence = {"Sequence": {"id": "B", "type_id": 1}}
    item, second_item = ({"SpecialToken": {"id": name, "type_id": type_id}} for type_id in (0, 1))
    return {
        "type": "TemplateProcessing",
        "single": [item, first_sequence],
        "pair": [item, first_sequence, second_item, second_sequence],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def bpe_merges(ranks: dict[bytes, int]) -> list[tuple[int, int]]:
    """All pairs of tokens that merge into a token, in tiktoken's merge order: by rank of the
    merged token.
    """
    merges = []
    for token, rank in ranks.items():
        splits = (
            (ranks.get(token[:position]), ranks.get(token[position:]))
            for position in range(1, len(token))
        )
        merges += [
            (rank, left, right) for left, right in splits if left is not None and right is not None
        ]
    return [(left, right) for _, left, right in sorted(merges)]


def detect_tokenizer(folder: Path) -> tuple[str, Path | None] | None:
    """(tokenizer.kind, tokenizer.path) that reads a model's tokenizer, damaged or not; None if no
    kind does.
    """
    if (folder / TOKENIZER_FILE).exists():
        return (
            ("byte", None)
            if _is_byte_tokenizer(folder / TOKENIZER_FILE)
            else ("huggingface", folder)
        )
    for path in (folder / "tokenizer.model", folder / META_TOKENIZER_PATH):
        if path.is_file() and (kind := kind_of_file(path)):
            return kind, path
    return None


def kind_of_file(path: Path) -> str | None:
    """The `tokenizer.kind` that reads a single file; None if none does. Raises OSError."""
    kinds = {TIKTOKEN: "tiktoken", SENTENCEPIECE: "sentencepiece"}
    return kinds.get(detect_file_type(_content(path)))


def _is_byte_tokenizer(path: Path) -> bool:
    try:
        tokenizer_json = json.loads(_content(path))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(tokenizer_json == byte_tokenizer_json())


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
