"""Tokenizers of Hugging Face folders: the ids of transformers for every family, from the files as
they come.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tests.huggingface_folders import FAMILIES, add_tokens, training_text, write_family
from trainer.config.source import CorpusSpec
from trainer.data import byte_level_bpe, formats, huggingface_tokenizer
from trainer.data.huggingface_tokenizer import HuggingFaceTokenizer, load_huggingface_tokenizer
from trainer.data.prepare import prepare
from trainer.data.text_chunks import cut_nowhere
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import DataError

TEXTS = (
    *(
        "",
        " ",
        "a",
        " a",
        "\n",
        "\na",
        "a\n",
        "▁ end  ",
        "\t",
        "\u00a0",
        "a" * 300,
        " " * 300 + "x",
        "\n" * 70,
    ),
    "  two  spaces\t\ttabs\r\n\n\n x",
    "I'LL we've it's it'\u017f 'tis 1234567 a_b.c=='d'\u00a0\u2003x",
    "!\n/x //\n/ <|notspecial|> </ s>",
    "e\u0301 A\u030a \u1100\u1161 \n\u0301 ﬁ ½ ² Ⅷ naïve Ünï",
    "中文字符日本語かな 한국어 العربية हिन्दी ไทย 🙂👩\u200d🚀🇩🇪 \u200b\ufeff\U000323b0",
    "x = 1\n\n\n\ny\n\n    if x:\n        return\n",
    "<think> a </think>\nb<table>\n\nc<|code|>   \n d|||IP_ADDRESS|||e",
)
NAMES = "</s> <s>a<unk> <|im_end|>\n<|endoftext|><|end_of_text|>s><|begin_of_text|> <|user|>  b</s>\n</s>c"
WORDS = st.sampled_from(
    [*TEXTS, "the ", "def f(x):\n", "\n", " ", "'s", "1", "<think>", "é", "e\u0301", "\n\n", "</"]
)
texts = st.lists(st.one_of(st.text(max_size=30), WORDS), max_size=6).map("".join)


@cache
def family_folder(root: Path, name: str) -> Path:
    return write_family(root / name, name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def ours_of(folder: Path) -> HuggingFaceTokenizer:
    return load_huggingface_tokenizer(folder)


@cache
def theirs_of(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(folder)


def their_ids(folder: Path, text: str) -> list[int]:
    """Without special tokens, whose names are text."""
    ids = theirs_of(folder)(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False
    )["input_ids"]
    return [int(token) for token in ids]


@pytest.fixture(autouse=True)
def tiktoken_for_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_tokenizer, "MIN_TIKTOKEN_CHARS", 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_ids_of_transformers(name: str, root: Path) -> None:
    folder = family_folder(root, name)
    family = FAMILIES[name]
    ours = ours_of(folder)
    theirs = theirs_of(folder)
    assert (ours._tiktoken is not None, ours.may_cut != cut_nowhere) == (
        family.tiktoken,
        family.cuts,
    )
    assert (ours.vocab_size, ours.eos) == (len(theirs), theirs.eos_token_id)
    prefix = [] if family.bos is None else [theirs.convert_tokens_to_ids(family.bos)]
    assert ours.bos == (prefix[0] if prefix else None)
    for text in (*TEXTS, training_text()[:30_000]):
        ids = ours.encode(text).tolist()
        assert ids == their_ids(folder, text), text
        assert [*prefix, *ids] == theirs(text, verbose=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_a_class_of_llama_2_reads_spaces_at_the_beginning_otherwise_than_its_file(
    tokenizer_class: str, tmp_path: Path
) -> None:
    """Transformers 5 replaces the file's normalizer by one that puts no space before a text that
    begins with one.
    """
    folder = write_family(tmp_path, "llama2", tokenizer_class=tokenizer_class)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    for text in (*TEXTS, " the", "▁the", "\n the", "the "):
        ids = load_huggingface_tokenizer(folder).encode(text).tolist()
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert (ids == their_ids(folder, text)) == (not text.startswith((" ", "▁"))), text


@pytest.mark.parametrize("name", FAMILIES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=texts)
def test_any_text_has_the_ids_of_transformers(name: str, root: Path, text: str) -> None:
    folder = family_folder(root, name)
    assert ours_of(folder).encode(text).tolist() == their_ids(folder, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_text_has_the_ids_of_the_whole(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_tokenizer, "PART_CHARS", 50)
    monkeypatch.setattr(huggingface_tokenizer, "TOKEN_CUTS_PART_CHARS", 20)
    monkeypatch.setattr(byte_level_bpe, "MAX_WHITESPACE", 40)
    folder = family_folder(root, name)
    block = (
        "def f(x):\n    return x\n\n\n# !\n/ comment\nNext line is here\n\n1 more\n"
        + NAMES.replace("</s>", "")
        + "\n中文\né\n"
    )
    for text in (
        training_text()[:5000],
        block * 20,
        "a" * 2000 + "\nb" * 300,
        " " * 1000,
        "x\n " * 500,
        "\n" * 900 + "a",
        "a !\n/ b" * 200,
    ):
        assert ours_of(folder).encode(text).tolist() == their_ids(folder, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_special_tokens_are_text(name: str, root: Path) -> None:
    ours = ours_of(family_folder(root, name))
    for text in (NAMES, *ours.special_tokens, "".join(ours.special_tokens)):
        assert not {*ours.encode(text).tolist()} & {*ours.special_tokens.values()}
    if name == "gemma":  # Its merges build "</s>".
        assert ours.decode(ours.encode("x</s>y").tolist()) == "x</s>y"
    else:
        assert ours.encode(NAMES).tolist() == their_ids(family_folder(root, name), NAMES)


@pytest.mark.parametrize("name", ["qwen3", "llama2"])
def test_a_document_in_blocks_has_the_ids_of_the_whole(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BLOCK", 700)
    monkeypatch.setattr(huggingface_tokenizer, "PART_CHARS", 300)
    monkeypatch.setattr(huggingface_tokenizer, "TOKEN_CUTS_PART_CHARS", 100)
    text = "def f(x):\n    return x\n\n\n# !\n/ comment\nNext line is here\n\n" * 100
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/one.txt").write_text(text)
    ours = ours_of(family_folder(root, name))
    spec = CorpusSpec(corpus=str(tmp_path / "corpus"), cache_dir=tmp_path / "prepared")
    dataset = prepare(spec, ours)
    prefix = [] if ours.bos is None else [ours.bos]
    assert dataset.read(0, dataset.num_tokens).tolist() == [
        *prefix,
        *their_ids(family_folder(root, name), text),
        ours.eos,
    ]


def test_workers_get_the_same_tokenizer_and_only_build_the_librarys(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen3", "gemma", "granite"):
        ours = ours_of(family_folder(root, name))
        pickled = pickle.dumps(ours)
        with monkeypatch.context() as patched:
            for finding in ("canonical_json", "proved_cuts", "tiktoken_ranks", "first_token"):
                patched.delattr(huggingface_tokenizer, finding)
            patched.setattr(HuggingFaceTokenizer, "_find_misread_names", None)
            copy = pickle.loads(pickled)
            assert copy.may_cut == ours.may_cut
            assert (copy._tiktoken is None) == (ours._tiktoken is None)
        assert copy.encode(NAMES + TEXTS[-1]).tolist() == ours.encode(NAMES + TEXTS[-1]).tolist()
        assert copy.fingerprint == ours.fingerprint


# ---- what the files say


def rewrite(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    expected = load_huggingface_tokenizer(folder).encode(TEXTS[-1]).tolist()
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding: dict[str, Any] = {
        "strategy": {"Fixed": 500},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    rewrite(
        folder,
        "tokenizer.json",
        lambda content: content.update(truncation=truncation, padding=padding),
    )
    assert load_huggingface_tokenizer(folder).encode(TEXTS[-1]).tolist() == expected


def added(name: str, **flags: bool) -> dict[str, Any]:
    return (
        {"content": name}
        | dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
        | flags
    )


def test_added_tokens_of_the_configuration_count_as_in_transformers(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "olmo2")
    tokens = {
        "800": added("<|endoftext|>", special=True),
        "803": added("<tool>"),
        "804": added("<x>", special=True),
    }
    rewrite(
        folder, "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=tokens)
    )
    ours = load_huggingface_tokenizer(folder)
    text = "a<tool>b<x>c <|endoftext|><|fim_prefix|>"
    assert 803 in ours.encode(text)
    assert ours.special_tokens["<x>"] == 804
    assert ours.encode(text).tolist() == their_ids(folder, text)
    assert ours.vocab_size == len(theirs_of(folder)) == 805


def test_old_folders_list_added_and_special_tokens_in_files_of_their_own(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "mistral", tokenizer_class="PreTrainedTokenizerFast")
    rewrite(
        folder,
        "tokenizer_config.json",
        lambda config: [config.pop(role) for role in ("bos_token", "eos_token")],
    )
    (folder / "added_tokens.json").write_text(
        json.dumps({"<pad>": 1159, "<code>": 1160, "</s>": 2})
    )
    roles = {
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": "<pad>",
        "bos_token": "<s>",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    ours = load_huggingface_tokenizer(folder)
    assert (ours.eos, ours.vocab_size, ours.special_tokens["<pad>"]) == (2, 1161, 1159)
    assert 1160 in ours.encode("a<code>b<pad>")
    assert ours.encode("a<code>b<pad>").tolist() == their_ids(folder, "a<code>b<pad>")


def test_added_tokens_with_other_ids_are_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    tokens = {"900": added("<tool>"), "801": added("<|endoftext|>", special=True)}
    rewrite(
        folder, "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=tokens)
    )
    expected = r'"<\|endoftext\|>" is 801, but 800 by tokenizer.json, "<tool>" is 900, but 803 by tokenizer.json'
    with pytest.raises(DataError, match=expected):
        load_huggingface_tokenizer(folder)


def test_the_end_of_documents_is_the_named_one_or_else_the_models(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    ours = load_huggingface_tokenizer(folder)
    assert (ours.eos, ours.stop_tokens) == (802, frozenset({802}))
    (folder / "config.json").write_text('{"eos_token_id": 801}')
    assert load_huggingface_tokenizer(folder).stop_tokens == {801, 802}
    (folder / "generation_config.json").write_text('{"eos_token_id": [800, 802]}')
    assert load_huggingface_tokenizer(folder).stop_tokens == {800, 802}
    rewrite(folder, "tokenizer_config.json", lambda config: config.update(eos_token=None))
    assert load_huggingface_tokenizer(folder).eos == 800
    (folder / "generation_config.json").write_text('{"eos_token_id": 5000}')
    with pytest.raises(DataError, match="eos_token_id = 5000 is not in the vocabulary"):
        load_huggingface_tokenizer(folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(
        DataError,
        match=r"no token ends documents: no eos_token in tokenizer_config.json or special_tokens_map.json, no "
        r"eos_token_id in generation_config.json or config.json",
    ):
        load_huggingface_tokenizer(folder)


def test_the_vocabulary_ends_with_the_highest_id(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "granite")
    rewrite(
        folder, "tokenizer.json", lambda content: content["model"]["vocab"].update({"zzz": 5000})
    )
    assert load_huggingface_tokenizer(folder).vocab_size == 5001


def test_a_tokenizer_json_names_its_folder(root: Path) -> None:
    folder = family_folder(root, "qwen2")
    assert (
        load_tokenizer("huggingface", folder / "tokenizer.json").fingerprint
        == ours_of(folder).fingerprint
    )


# ---- the fingerprint


def change_model(content: dict[str, Any]) -> None:
    content["model"]["merges"] = content["model"]["merges"][:-1]


def change_format(content: dict[str, Any]) -> None:
    model = content["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    del model["fuse_unk"], content["truncation"]


CHANGES: dict[str, tuple[bool, Callable[[dict[str, Any]], object]]] = {
    "merges": (False, change_model),
    "normalizer": (False, lambda content: content.update(normalizer=None)),
    "pre-tokenizer": (False, lambda content: content["pre_tokenizer"]["pretokenizers"].pop(0)),
    "an added token": (
        False,
        lambda content: content["added_tokens"].append(added("<x>") | {"id": 803}),
    ),
    "the file's format": (True, change_format),
    "decoder": (True, lambda content: content.update(decoder=None)),
    "truncation": (True, lambda content: content.update(padding=None)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_fingerprint_depends_on_ids(name: str, root: Path, tmp_path: Path) -> None:
    folder, (is_same, change) = write_family(tmp_path, "qwen2"), CHANGES[name]
    rewrite(folder, "tokenizer.json", change)
    assert (
        load_huggingface_tokenizer(folder).fingerprint
        == ours_of(family_folder(root, "qwen2")).fingerprint
    ) == is_same


def updating(values: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(values)


@pytest.mark.parametrize(
    ("key", "step", "option"),
    [
        (
            "pre_tokenizer",
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            "use_regex",
        ),
        (
            "pre_tokenizer",
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"},
            "split",
        ),
        (
            "normalizer",
            {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "lowercase": True,
            },
            "strip_accents",
        ),
    ],
)
def test_an_option_that_is_on_unless_the_file_says_otherwise_is_in_the_fingerprint(
    key: str, step: dict[str, Any], option: str, tmp_path: Path
) -> None:
    fingerprints = []
    for number, stated in enumerate(({}, {option: False}, {option: True})):
        folder = write_family(tmp_path / str(number), "granite")
        definition = {key: {"type": "Sequence", key.replace("_", "") + "s": [step | stated]}}
        rewrite(folder, "tokenizer.json", updating(definition))
        fingerprints.append(load_huggingface_tokenizer(folder).fingerprint)
    unstated, off, on = fingerprints
    assert unstated != off != on
    assert (unstated == on) == (option != "strip_accents")


def test_another_end_token_is_another_fingerprint(root: Path, tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2", eos_token="<|endoftext|>")
    assert (
        load_huggingface_tokenizer(folder).fingerprint
        != ours_of(family_folder(root, "qwen2")).fingerprint
    )


# ---- damage


DAMAGE = {
    "empty": ("", "tokenizer.json looks like an empty file"),
    "pointer": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "looks like a Git LFS pointer",
    ),
    "web page": ("<!DOCTYPE html><html></html>", "looks like a web page"),
    "array": ("[]", "tokenizer.json is damaged, or of a newer format"),
    "no model": ('{"added_tokens": []}', "tokenizer.json is damaged, or of a newer format"),
    "null vocabulary": (
        '{"model": {"type": "BPE", "vocab": null, "merges": []}}',
        "is damaged, or of a newer format",
    ),
    "no vocabulary": (
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "tokenizer.json has an empty vocabulary",
    ),
    "deep": ("[" * 100_000, "tokenizer.json is damaged, or of a newer format"),
    "dropout": (
        '{"model": {"type": "BPE", "dropout": 0.1, "vocab": {"a": 0}, "merges": []}}',
        "has model.dropout = 0.1",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_tokenizer_json_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=rf'tokenizer.path = "{tmp_path}": .*{message}'):
        load_tokenizer("huggingface", tmp_path)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
def test_a_truncated_tokenizer_json_is_named(keep: float, tmp_path: Path) -> None:
    path = write_family(tmp_path, "qwen2") / "tokenizer.json"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(DataError, match=r"tokenizer.json is damaged, or of a newer format"):
        load_tokenizer("huggingface", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        (
            "special_tokens_map.json",
            "[1]",
            "special_tokens_map.json must hold an object, not a list",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": "x"}}',
            "unreadable added tokens",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "unreadable added tokens"),
    ],
)
def test_other_damaged_files_are_named(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (write_family(tmp_path, "qwen2") / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer("huggingface", tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r'tokenizer.path = ".*none": .*none/tokenizer.json cannot be read: No such file',
    ):
        load_tokenizer("huggingface", tmp_path / "none")


def test_more_than_one_token_before_a_text_is_refused(tmp_path: Path) -> None:
    built = add_tokens(
        Tokenizer.from_file(str(write_family(tmp_path, "granite") / "tokenizer.json")),
        "<a>",
        "<b>",
    )
    ids = [(name, built.token_to_id(name)) for name in ("<a>", "<b>")]
    built.post_processor = processors.TemplateProcessing(single="<a> <b> $A", special_tokens=ids)
    built.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="more than one token before a text"):
        load_huggingface_tokenizer(tmp_path)


def test_a_word_that_is_a_special_token_of_one_character_is_refused(tmp_path: Path) -> None:
    built = Tokenizer(models.WordLevel({"a": 0, "b": 1, "$": 2}, unk_token="a"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.add_special_tokens([AddedToken("$", special=True)])
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "$"}')
    with pytest.raises(DataError, match=r"the texts \['\$'\] would be encoded as special tokens"):
        load_huggingface_tokenizer(tmp_path)
