"""Tokenizer files for Hugging Face transformers that produce the token ids of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.data.tokenizer import (
    LLAMA3_PATTERN,
    LLAMA3_SPECIAL_TOKENS,
    SENTENCEPIECE,
    TIKTOKEN,
    SentencePieceTokenizer,
    Tokenizer,
    detect_file_type,
    load_tokenizer,
    read_ranks,
)

BYTE_SPECIALS = ("<|bos|>", "<|eos|>", *(f"<|reserved_{n}|>" for n in range(6)))
META_TOKENIZER_PATH = Path("original/tokenizer.model")  # as in Meta's repositories


def hf_tokenizer_files(kind: str, path: Path | None, *, max_length: int) -> tuple[Tokenizer, dict[Path, bytes]]:
    """The tokenizer and its Hugging Face files by name. Raises `DataError` as `load_tokenizer`."""
    tokenizer = load_tokenizer(kind, path)
    inputs = ["input_ids", "attention_mask"]  # By default transformers 4 adds token_type_ids, which models reject.
    config = dict[str, Any](clean_up_tokenization_spaces=False, model_max_length=max_length, model_input_names=inputs)
    if path is not None and isinstance(tokenizer, SentencePieceTokenizer):
        # LlamaTokenizer prepends a space by default. With a dummy prefix in the model, transformers 4 needs `legacy` to
        # prepend it also to a text that starts with a space; transformers 5 never does.
        config |= {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": tokenizer.add_dummy_prefix,
            "add_prefix_space": tokenizer.add_dummy_prefix,
            "add_bos_token": tokenizer.bos is not None,
            "add_eos_token": False,
            **tokenizer.special_token_names,
        }
        return tokenizer, {Path("tokenizer.model"): path.read_bytes(), Path("tokenizer_config.json"): _to_json(config)}
    files, tokenizer_json, specials = dict[Path, bytes](), byte_tokenizer_json(), BYTE_SPECIALS
    if path is not None and kind != "byte":
        files, specials = {META_TOKENIZER_PATH: path.read_bytes()}, LLAMA3_SPECIAL_TOKENS
        ranks = read_ranks(files[META_TOKENIZER_PATH])
        tokenizer_json = byte_level_bpe(ranks, specials, pattern=LLAMA3_PATTERN)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": specials[0], "eos_token": specials[1]}
    contents = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": config}
    return tokenizer, files | {Path(name): _to_json(content) for name, content in contents.items()}


def byte_tokenizer_json() -> dict[str, Any]:
    """The contents of tokenizer.json for `tokenizer.kind` = "byte"."""
    return byte_level_bpe({bytes([byte]): byte for byte in range(256)}, BYTE_SPECIALS, pattern=None)


def byte_level_bpe(ranks: dict[bytes, int], specials: tuple[str, ...], *, pattern: str | None) -> dict[str, Any]:
    """The contents of tokenizer.json. Special tokens follow the ranks; the first one is prepended to every text."""
    byte_chars = _bytes_to_unicode()
    token_strings = {rank: "".join(byte_chars[byte] for byte in token) for token, rank in ranks.items()}
    first_special_id = len(ranks)
    byte_level_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pre_tokenizer: dict[str, Any] = byte_level_step
    if pattern:
        pattern_step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [pattern_step, byte_level_step]}
    bos_item = {"SpecialToken": {"id": specials[0], "type_id": 0}}
    first_sequence, second_sequence = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
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
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos_item, first_sequence],
            "pair": [
                bos_item,
                first_sequence,
                bos_item | {"SpecialToken": {"id": specials[0], "type_id": 1}},
                second_sequence,
            ],
            "special_tokens": {specials[0]: {"id": specials[0], "ids": [first_special_id], "tokens": [specials[0]]}},
        },
        "decoder": byte_level_step,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token_strings[rank]: rank for rank in sorted(token_strings)},
            "merges": [[token_strings[left], token_strings[right]] for left, right in bpe_merges(ranks)],
        },
    }


def bpe_merges(ranks: dict[bytes, int]) -> list[tuple[int, int]]:
    """Every pair of tokens that merges into a token, in tiktoken's merge order: by rank of the merged token."""
    merges = []
    for token, rank in ranks.items():
        splits = ((ranks.get(token[:position]), ranks.get(token[position:])) for position in range(1, len(token)))
        merges += [(rank, left, right) for left, right in splits if left is not None and right is not None]
    return [(left, right) for _, left, right in sorted(merges)]


def detect_tokenizer(folder: Path) -> tuple[str, Path | None] | None:
    """(tokenizer.kind, tokenizer.path) that reads a model's tokenizer; None if no kind does."""
    for path in (folder / "tokenizer.model", folder / META_TOKENIZER_PATH):
        kinds = {TIKTOKEN: "tiktoken", SENTENCEPIECE: "sentencepiece"}
        if path.is_file() and (kind := kinds.get(detect_file_type(path.read_bytes()))):
            return kind, path
    try:
        tokenizer_json = json.loads((folder / "tokenizer.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return ("byte", None) if tokenizer_json == byte_tokenizer_json() else None


def _bytes_to_unicode() -> list[str]:
    """GPT-2's character for each byte: the byte itself if printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
