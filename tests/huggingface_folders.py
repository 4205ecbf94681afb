"""Small tokenizers as the families have them: their normalizers, pre-tokenizers, models, decoders
and post-processors.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from trainer.data.byte_level_bpe import LLAMA3_PATTERN, O200K_PATTERN, QWEN2_PATTERN

LANGUAGES = "中文字符 日本語 한국어 naïve Ünï ﬁ e\u0301 🙂🙂 हिन्दी العربية I'LL we've 1234567\u00a0\u2003x\n        indented\n \n"
SPACE = "▁"


@cache
def training_text() -> str:
    """Sources of the standard library, and words of other languages."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-c]*.py")))
    return LANGUAGES * 5 + "".join(files)[:100_000]


@dataclass(frozen=True)
class Family:
    """How a family's tokenizer is made, and its tokenizer_config.json."""

    build: Callable[[], Tokenizer]
    eos: str
    bos: str | None = None
    """Prepended by the tokenizer itself."""
    config: dict[str, Any] = field(default_factory=dict)
    tiktoken: bool = False
    """Whether tiktoken gives its ids."""
    cuts: bool = True
    """Whether some cuts are proved to keep its ids."""


# ---- byte-level


def byte_level_bpe(
    pre_tokenizer: Any, *, vocab: Sequence[str] = (), size: int = 800, **options: Any
) -> Tokenizer:
    """Trained on the text; `vocab` are special tokens that stand first, in the model's
    vocabulary.
    """
    built = Tokenizer(models.BPE(**options))
    built.pre_tokenizer = pre_tokenizer
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[*vocab], show_progress=False
    )
    # gpt-oss's pattern puts a slash at the start of a line into the word before the line break.
    built.train_from_iterator(
        [*training_text().splitlines(keepends=True), "a !\n/ b" * 300], trainer
    )
    return built


def split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def add_tokens(built: Tokenizer, *special: str, others: Sequence[AddedToken] = ()) -> Tokenizer:
    built.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    built.add_tokens([*others])
    return built


def begin_with(built: Tokenizer, bos: str) -> Tokenizer:
    template = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, built.token_to_id(bos))],
    )
    built.post_processor = template
    return built


def plain(*names: str) -> list[AddedToken]:
    return [AddedToken(name, normalized=False) for name in names]


def llama3() -> Tokenizer:
    built = byte_level_bpe(split_by(LLAMA3_PATTERN), ignore_merges=True)
    add_tokens(built, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    begin_with(built, "<|begin_of_text|>")
    built.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), built.post_processor]
    )
    return built


def qwen2(*others: str) -> Tokenizer:
    built = byte_level_bpe(split_by(QWEN2_PATTERN))
    built.normalizer = normalizers.NFC()
    built.post_processor = processors.ByteLevel(trim_offsets=False)
    return add_tokens(built, "<|endoftext|>", "<|im_start|>", "<|im_end|>", others=plain(*others))


def qwen3() -> Tokenizer:
    return qwen2("<think>", "</think>", "<tool_call>")


def smollm3() -> Tokenizer:
    return add_tokens(
        byte_level_bpe(split_by(LLAMA3_PATTERN)), "<|end_of_text|>", others=plain("<think>")
    )


def gpt_oss() -> Tokenizer:
    return add_tokens(
        byte_level_bpe(split_by(O200K_PATTERN)), "<|startoftext|>", "<|return|>", "<|call|>"
    )


def granite() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built = byte_level_bpe(pre_tokenizer, vocab=["<|end_of_text|>", "<fim_prefix>"])
    built.post_processor = processors.ByteLevel(trim_offsets=True)
    return built


def gpt_neox() -> Tokenizer:
    """Runs of spaces are added tokens, normalized and not special, as in OLMo's."""
    built = byte_level_bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=False), vocab=["<|endoftext|>", "<|padding|>"]
    )
    built.normalizer = normalizers.NFC()
    return add_tokens(
        built, others=[AddedToken(" " * length, normalized=True) for length in range(24, 1, -1)]
    )


def olmo2() -> Tokenizer:
    built = byte_level_bpe(split_by(LLAMA3_PATTERN))
    return add_tokens(
        built, "<|endoftext|>", "<|fim_prefix|>", others=[AddedToken("|||IP_ADDRESS|||")]
    )


def falcon() -> Tokenizer:
    """Several pre-tokenizers, one of which tiktoken has not."""
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    return add_tokens(byte_level_bpe(pre_tokenizers.Sequence(steps)), "<|endoftext|>")


# ---- sentencepiece, converted


def converted_bpe(*, newlines: bool = False) -> Tokenizer:
    """BPE over characters, with bytes for unknown ones, and without splits into words."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"{SPACE}*[^{SPACE}\n]+|{SPACE}+"), "isolated"
    )
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, limit_alphabet=120)
    trained.train_from_iterator([line for line in training_text().splitlines() if line], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [tuple(pair) for pair in model["merges"]]
    if newlines:
        merges += [("\n", "\n"), ("\n\n", "\n\n"), ("<", "/"), ("</", "s>"), ("s", ">")]
        pieces += ["\n", "\n\n", "\n\n\n\n", "</", "s>"]
    pieces = [*dict.fromkeys([*pieces, *sorted(model["vocab"], key=model["vocab"].get)])]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    built = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    return add_tokens(built, "<unk>", "<s>", "</s>")


def decode_spaces(built: Tokenizer, *, strip: bool) -> Tokenizer:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return built


def llama2() -> Tokenizer:
    built = decode_spaces(converted_bpe(), strip=True)
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    return begin_with(built, "<s>")


def mistral() -> Tokenizer:
    built = decode_spaces(converted_bpe(), strip=True)
    built.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    return begin_with(built, "<s>")


def metaspace_always() -> Tokenizer:
    built = decode_spaces(converted_bpe(), strip=True)
    built.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)
    return begin_with(add_tokens(built, others=plain("<table>")), "<s>")


def phi3() -> Tokenizer:
    built = add_tokens(llama2(), "<|endoftext|>")
    rstripped = [
        AddedToken(name, rstrip=True, normalized=False, special=True)
        for name in ("<|user|>", "<|end|>")
    ]
    built.add_special_tokens(rstripped)
    built.add_tokens([AddedToken("<|code|>", rstrip=True, normalized=False)])
    return built


def gemma() -> Tokenizer:
    """Merges also build the name of a special token."""
    built = decode_spaces(converted_bpe(newlines=True), strip=False)
    built.normalizer = normalizers.Replace(" ", SPACE)
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return begin_with(
        add_tokens(built, "<end_of_turn>", others=plain("<table>", "<unused0>")), "<s>"
    )


SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAMILIES = {
    "llama3": Family(
        llama3,
        "<|end_of_text|>",
        "<|begin_of_text|>",
        {"bos_token": "<|begin_of_text|>"},
        tiktoken=True,
    ),
    "qwen2": Family(
        qwen2,
        "<|im_end|>",
        config={"tokenizer_class": "Qwen2Tokenizer", "bos_token": None},
        tiktoken=True,
    ),
    "qwen3": Family(
        qwen3, "<|im_end|>", config={"tokenizer_class": "Qwen2Tokenizer"}, tiktoken=True
    ),
    "smollm3": Family(smollm3, "<|end_of_text|>", tiktoken=True),
    "gpt_oss": Family(
        gpt_oss, "<|return|>", config={"bos_token": "<|startoftext|>"}, tiktoken=True
    ),
    "granite": Family(granite, "<|end_of_text|>", tiktoken=True),
    "gpt_neox": Family(gpt_neox, "<|endoftext|>"),
    "olmo2": Family(olmo2, "<|endoftext|>", tiktoken=True),
    "falcon": Family(falcon, "<|endoftext|>", cuts=False),
    "llama2": Family(llama2, "</s>", "<s>", {"add_bos_token": True, **SENTENCEPIECE}),
    "mistral": Family(
        mistral, "</s>", "<s>", {"tokenizer_class": "LlamaTokenizerFast", **SENTENCEPIECE}
    ),
    "metaspace_always": Family(metaspace_always, "</s>", "<s>", SENTENCEPIECE),
    "phi3": Family(phi3, "<|endoftext|>", "<s>", {**SENTENCEPIECE, "eos_token": "<|endoftext|>"}),
    "gemma": Family(gemma, "</s>", "<s>", SENTENCEPIECE),
}


@cache
def tokenizer_json(name: str) -> str:
    return str(FAMILIES[name].build().to_str(pretty=True))


def write_family(folder: Path, name: str, **config: Any) -> Path:
    """Writes the tokenizer of a family and returns the folder.

    `config` adds to tokenizer_config.json.
    """
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    values |= {"eos_token": family.eos, **family.config, **config}
    (folder / "tokenizer.json").write_text(tokenizer_json(name))
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")
    return folder
