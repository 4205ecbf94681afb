"""Tokenizers as files that Hugging Face's read: each gives the ids that the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.data.tokenizer import (
    LLAMA3_PATTERN,
    LLAMA3_SPECIALS,
    SENTENCEPIECE,
    TIKTOKEN,
    SentencePieceTokenizer,
    Tokenizer,
    describe,
    load_tokenizer,
    read_ranks,
)

BYTE_SPECIALS = ("<|bos|>", "<|eos|>", *(f"<|reserved_{n}|>" for n in range(6)))
ORIGINAL = Path("original/tokenizer.model")  # where Meta's own file lies in its repositories


def files_of(kind: str, path: Path | None, *, length: int) -> tuple[Tokenizer, dict[Path, bytes]]:
    """The tokenizer, and by name the files that say the same. Raises DataError as `load_tokenizer` does."""
    tokenizer = load_tokenizer(kind, path)
    inputs = ["input_ids", "attention_mask"]  # Or transformers 4 adds types of tokens, which models refuse.
    common = {"clean_up_tokenization_spaces": False, "model_max_length": length, "model_input_names": inputs}
    if path is not None and isinstance(tokenizer, SentencePieceTokenizer):
        # By the class alone a space stands before every text. Where it does in the model, `legacy` puts it also before
        # a text that begins with one, in transformers 4; 5 never does.
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": tokenizer.adds_space,
            "add_prefix_space": tokenizer.adds_space,
            "add_bos_token": tokenizer.bos is not None,
            "add_eos_token": False,
            **tokenizer.names,
        }
        return tokenizer, {Path("tokenizer.model"): path.read_bytes(), **_json("tokenizer_config", common | config)}
    if kind == "byte" or path is None:
        specials: tuple[str, ...] = BYTE_SPECIALS
        ranks, split, originals = {bytes([byte]): byte for byte in range(256)}, None, {}
    else:
        content = path.read_bytes()
        specials, ranks, split, originals = LLAMA3_SPECIALS, read_ranks(content), LLAMA3_PATTERN, {ORIGINAL: content}
    names = {"bos_token": specials[0], "eos_token": specials[1]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    made = byte_level(ranks, specials, split=split)
    return tokenizer, {**originals, **_json("tokenizer", made), **_json("tokenizer_config", common | config)}


def byte_level(ranks: dict[bytes, int], specials: tuple[str, ...], *, split: str | None) -> dict[str, Any]:
    """A tokenizer.json of byte sequences; special tokens follow them, and the first begins every text."""
    letters = _letters()
    names = {rank: "".join(letters[byte] for byte in token) for token, rank in ranks.items()}
    first = len(ranks)
    byte_split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    by_pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    before = {"type": "Sequence", "pretokenizers": [by_pattern, byte_split]} if split else byte_split
    begin = {"SpecialToken": {"id": specials[0], "type_id": 0}}
    text, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first + n, "content": name, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for n, name in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin | {"SpecialToken": {"id": specials[0], "type_id": 1}}, second],
            "special_tokens": {specials[0]: {"id": specials[0], "ids": [first], "tokens": [specials[0]]}},
        },
        "decoder": byte_split,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {names[rank]: rank for rank in sorted(names)},
            "merges": [[names[left], names[right]] for left, right in merges_of(ranks)],
        },
    }


def merges_of(ranks: dict[bytes, int]) -> list[tuple[int, int]]:
    """Every pair of tokens that together are one, in the order in which tiktoken merges: by what they become."""
    found = []
    for token, rank in ranks.items():
        parts = ((ranks.get(token[:cut]), ranks.get(token[cut:])) for cut in range(1, len(token)))
        found += [(rank, left, right) for left, right in parts if left is not None and right is not None]
    return [(left, right) for _, left, right in sorted(found)]


def kind_of(folder: Path) -> tuple[str, Path | None] | None:
    """Which kind of ours reads the tokenizer of a model, and from which of its files; None if no kind does."""
    for path in (folder / "tokenizer.model", folder / ORIGINAL):
        kinds = {TIKTOKEN: "tiktoken", SENTENCEPIECE: "sentencepiece"}
        if path.is_file() and (kind := kinds.get(describe(path.read_bytes()))):
            return kind, path
    try:
        made = json.loads((folder / "tokenizer.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    ours = byte_level({bytes([byte]): byte for byte in range(256)}, BYTE_SPECIALS, split=None)
    return ("byte", None) if made == ours else None


def _letters() -> list[str]:
    """A letter for each byte, as GPT-2 has it: itself where it can be seen, else one from beyond."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    beyond = iter(range(256, 512))
    return [chr(byte if byte in seen else next(beyond)) for byte in range(256)]


def _json(name: str, content: dict[str, Any]) -> dict[Path, bytes]:
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    return {Path(f"{name}.json"): text.encode()}
