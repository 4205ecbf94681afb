"""Small models made to be cut wrongly: their ids are those of one call, or their texts are
refused.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from tests.data.test_tokenizer_contract import LLAMA2, ids_of, places, train
from trainer.config.source import CorpusSpec
from trainer.data import huggingface_tokenizer, sentencepiece_tokenizer
from trainer.data.prepare import prepare
from trainer.data.text_chunks import EncodingError, cut_nowhere
from trainer.data.tokenizer import load_tokenizer
from trainer.data.tokenizer_file_types import sha256_of
from trainer.errors import DataError

# ---- sentencepiece

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PIECES: dict[str, int] = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
PIECES |= dict.fromkeys(["▁▁", "ab", "▁a", "abc", *"abc▁"], NORMAL)


def write_pieces(path: Path, pieces: dict[str, int], **flags: object) -> Path:
    """A BPE model of pieces and their types, the first of which are joined first."""
    from sentencepiece import sentencepiece_model_pb2

    protobuf: Any = sentencepiece_model_pb2
    proto = protobuf.ModelProto()
    for number, (piece, kind) in enumerate(pieces.items()):
        proto.pieces.add(piece=piece, type=kind, score=-number)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.normalizer_spec.remove_extra_whitespaces = False
    for name, value in flags.items():
        spec = (
            proto.normalizer_spec
            if name in proto.normalizer_spec.DESCRIPTOR.fields_by_name
            else proto.trainer_spec
        )
        setattr(spec, name, value)
    path.write_bytes(proto.SerializeToString())
    return path


def random_texts(parts: str, count: int = 400) -> list[str]:
    draw = random.Random(44)
    return ["".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"x☃": USER_DEFINED, "a\nb": USER_DEFINED, "\n\n": USER_DEFINED},
        {"▁▁▁": USER_DEFINED, "▁x": USER_DEFINED, "c▁": USER_DEFINED},
        {"a b": USER_DEFINED, " x": USER_DEFINED, "\n": USER_DEFINED},
        {"bca": UNUSED, "▁b": UNUSED, "x": UNUSED},
        {"x": CONTROL, "ba": CONTROL, "▁b": CONTROL},
    ],
)
def test_unknown_characters_of_a_sentencepiece_model_keep_their_ids(
    others: dict[str, int],
    add_dummy_prefix: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentencepiece_tokenizer, "PART_CHARS", 2)
    path = write_pieces(tmp_path / "model", PIECES | others, add_dummy_prefix=add_dummy_prefix)
    tokenizer = load_tokenizer("sentencepiece", path)
    assert places(tokenizer, "cacb ac") > 2
    one_call = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    for text in random_texts("abc  ▁x☃中\n"):
        assert ids_of(tokenizer, text, 5) == one_call(text), text


USUAL = {"byte_fallback": True, "add_dummy_prefix": True}


@pytest.mark.parametrize(
    ("others", "flags"),
    [
        ({"cab": USER_DEFINED}, {}),
        ({"cab": UNUSED}, {}),
        ({}, {"model_type": 1}),
        ({}, {"treat_whitespace_as_suffix": True}),
        ({}, {"escape_whitespaces": False}),
        ({}, {"remove_extra_whitespaces": True}),
        ({}, {"add_dummy_prefix": False}),
        ({}, {"bos_piece": "</s>", "eos_piece": "<s>"}),
    ],
)
def test_what_ids_of_a_sentencepiece_model_depend_on_is_in_the_fingerprint(
    others: dict[str, int], flags: dict[str, object], tmp_path: Path
) -> None:
    pieces = PIECES | dict.fromkeys(["cab", "\n"], NORMAL) | dict.fromkeys(BYTES, BYTE)
    usual = load_tokenizer("sentencepiece", write_pieces(tmp_path / "usual", pieces, **USUAL))
    other = load_tokenizer(
        "sentencepiece", write_pieces(tmp_path / "other", pieces | others, **USUAL | flags)
    )
    assert usual.fingerprint != other.fingerprint


def test_rules_of_normalization_are_in_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("41\t61\n")
    first = train(tmp_path, normalization_rule_tsv=str(tmp_path / "rules"))
    fingerprint = load_tokenizer("sentencepiece", first).fingerprint
    (tmp_path / "rules").write_text("42\t62\n")
    proto = sentencepiece.SentencePieceProcessor(model_file=str(first)).serialized_model_proto()
    second = train(tmp_path, normalization_rule_tsv=str(tmp_path / "rules"))
    changed = with_charsmap_of(proto, second.read_bytes())
    second.write_bytes(changed)
    assert load_tokenizer("sentencepiece", second).fingerprint != fingerprint


def with_charsmap_of(content: bytes, other: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    protobuf: Any = sentencepiece_model_pb2
    proto, another = (protobuf.ModelProto.FromString(each) for each in (content, other))
    proto.normalizer_spec.precompiled_charsmap = another.normalizer_spec.precompiled_charsmap
    return bytes(proto.SerializeToString())


def test_models_of_the_usual_kind_keep_their_fingerprint(tmp_path: Path) -> None:
    for options in ({}, LLAMA2):
        path = train(tmp_path, **options)
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = [
            (model.id_to_piece(n), model.get_score(n), model.is_control(n))
            for n in range(len(model))
        ]
        expected = sha256_of((pieces, model.encode(" a  b\tC\n\n \uff21\u00e9e\u0301 ")))
        assert load_tokenizer("sentencepiece", path).fingerprint == f"sentencepiece-{expected}"


# ---- Hugging Face

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
LOWERCASE = {"type": "Lowercase"}
VOCAB = ("</s>", "<unk>", *"abc▁", "▁▁", "ab", "▁a", "abc")
MERGES = (("▁", "▁"), ("a", "b"), ("▁", "a"), ("ab", "c"))
WHOLE_WORDS = ("▁bc", "bca", "▁bca")


def write_bpe(
    folder: Path,
    *vocab: str,
    merges: tuple[tuple[str, str], ...] = (),
    pre_tokenizer: Any = METASPACE,
    normalizer: Any = None,
    **options: Any,
) -> Path:
    """A BPE over characters: VOCAB and MERGES, and those stated."""
    numbers = {token: number for number, token in enumerate((*VOCAB, *vocab))}
    model = {"type": "BPE", "vocab": numbers, "merges": [*map(list, MERGES + merges)]} | options
    end = {"id": 0, "content": "</s>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition = {"version": "1.0", "added_tokens": [end], "model": model}
    definition |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


@pytest.mark.parametrize(
    ("definition", "is_cut"),
    [
        ({"unk_token": "<unk>"}, True),
        ({"unk_token": "<unk>", "fuse_unk": True}, True),
        ({"byte_fallback": True, "vocab": BYTES}, True),
        ({"byte_fallback": True, "vocab": BYTES[:200], "unk_token": "<unk>"}, False),
        ({}, False),
        ({"byte_fallback": True, "vocab": BYTES[:200]}, False),
        ({"unk_token": "<unk>", "vocab": ("<unk>a",), "merges": (("<unk>", "a"),)}, False),
        ({"unk_token": "<unk>", "vocab": WHOLE_WORDS, "ignore_merges": True}, False),
    ],
)
def test_unknown_characters_of_a_tokenizer_json_keep_their_ids(
    definition: dict[str, Any],
    is_cut: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_tokenizer, "TOKEN_CUTS_PART_CHARS", 2)
    for splits in (True, False):
        options = definition | {"pre_tokenizer": METASPACE | {"split": splits}}
        tokenizer = load_tokenizer(
            "huggingface", write_bpe(tmp_path, *options.pop("vocab", ()), **options)
        )
        assert isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer)
        assert (tokenizer.may_cut != cut_nowhere) == is_cut
        for text in random_texts("abc  ▁x☃中😀\n"):
            assert ids_of(tokenizer, text, 5) == tokenizer._encode_with_library(text), text


NAME = ("<", "/", "s", ">", "</", "s>")
MERGES_OF_NAME = (("<", "/"), ("s", ">"), ("</", "s>"))


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        ({"type": "NFKC"}, "a \uff1c/s\uff1e b"),
        ({"type": "NFKC"}, "ab \uff1c/s>"),
        (LOWERCASE, "a </S> b"),
    ],
)
def test_a_text_that_becomes_a_special_token_is_refused(
    normalizer: Any, text: str, tmp_path: Path
) -> None:
    folder = write_bpe(
        tmp_path, *NAME, merges=MERGES_OF_NAME, normalizer=normalizer, unk_token="<unk>"
    )
    tokenizer = load_tokenizer("huggingface", folder)
    assert 0 not in tokenizer.encode("a </s> b").tolist()
    with pytest.raises(EncodingError, match='a text is encoded as the special token "</s>"'):
        tokenizer.encode(text)


def test_a_document_that_becomes_a_special_token_is_named(tmp_path: Path) -> None:
    folder = write_bpe(
        tmp_path / "x", *NAME, merges=MERGES_OF_NAME, normalizer=LOWERCASE, unk_token="<unk>"
    )
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/bad.txt").write_text("a </S> b")
    spec = CorpusSpec(corpus=str(tmp_path / "corpus"), cache_dir=tmp_path / "prepared")
    with pytest.raises(
        DataError, match=r'bad\.txt: a text is encoded as the special token "</s>"'
    ):
        prepare(spec, load_tokenizer("huggingface", folder))
