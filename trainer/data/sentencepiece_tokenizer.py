"""A sentencepiece model. A document's ids are those of one call of the library, in parts only
where that is proved.

A BPE model joins neighbours only into a piece. Where no piece holds the characters on both sides
of a place side by side, no piece spans it, and each side is joined as if it stood alone. That
needs a text that is normalized character by character: no rules, no removal of spaces, and no
space after the text. A space before the text does not matter: a later part is encoded behind the
character before it, whose ids are left out, and with them the space. That character must be known
by itself, because a run of unknown characters becomes one id.

A unigram model has such places too, but adds up scores from the beginning of the text, in 32 bits:
its choice between nearly equal scores depends on the length of what stands before. It gets the
whole text, as do all other models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from trainer.data.normalizer_growth import charsmap_growth, require_normalized_length
from trainer.data.text_chunks import (
    MayCut,
    cut_nowhere,
    encode_parts,
    joined,
    neighbours,
    split_text,
)
from trainer.data.tokenizer_file_types import sha256_of
from trainer.errors import DataError

PART_CHARS = 1000
"""A BPE's time per character grows with the length of the text."""
MAX_CHARS = 1 << 25
"""Most characters in one call of the library, which takes 54 bytes of memory for each, and the
ids.
"""
SPACE = "▁"


class SentencePieceTokenizer:
    """The tokenizer of a sentencepiece model. Raises DataError if it cannot end documents."""

    def __init__(self, content: bytes) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        if model.eos_id() < 0:
            raise DataError("no end-of-sentence piece, which must end every document")
        self._model = model
        self.vocab_size: int = model.get_piece_size()
        self.bos: int | None = model.bos_id() if model.bos_id() >= 0 else None
        self.eos: int = model.eos_id()
        self.stop_tokens = frozenset({self.eos})
        specials = {
            "bos_token": model.bos_id(),
            "eos_token": model.eos_id(),
            "unk_token": model.unk_id(),
        }
        self.special_token_names: dict[str, str] = {
            role: model.id_to_piece(token) for role, token in specials.items() if token >= 0
        }
        self.special_tokens: dict[str, int] = {
            model.id_to_piece(token): token
            for token in range(self.vocab_size)
            if model.is_control(token)
        }
        charsmap = self._definition.normalizer_spec.precompiled_charsmap
        self._growth = charsmap_growth(charsmap)
        self.add_dummy_prefix: bool = model.encode("a", out_type=str)[0] != "a"
        """Whether the model prepends a space to every text."""
        # The pieces and a probe of the normalization. The file also holds paths of the machine it
        # was trained on.
        pieces = [
            (model.id_to_piece(n), model.get_score(n), model.is_control(n))
            for n in range(self.vocab_size)
        ]
        identity = (
            pieces,
            model.encode(" a  b\tC\n\n \uff21\u00e9e\u0301 "),
            *unusual_parts(self._definition),
        )
        self.fingerprint = "sentencepiece-" + sha256_of(identity)

    def encode(self, text: str) -> Tensor:
        return joined(self.encode_blocks([text]))

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[Tensor]:
        parts = split_text(blocks, self.may_cut, part_chars=PART_CHARS, max_chars=MAX_CHARS)
        return encode_parts(parts, self._encode_part)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))

    def _encode_part(self, part: str) -> list[int]:
        require_normalized_length(
            part,
            self._growth,
            self._model.normalize,
            max_chars=2 * MAX_CHARS,
            name="the sentencepiece model",
        )
        ids: list[int] = self._model.encode(part)
        return ids

    @property
    def _definition(self) -> Any:
        from sentencepiece import sentencepiece_model_pb2

        protobuf: Any = sentencepiece_model_pb2
        return protobuf.ModelProto.FromString(self._model.serialized_model_proto())

    @cached_property
    def may_cut(self) -> MayCut:
        return proved_cuts(self._definition)


@dataclass(frozen=True)
class PieceCuts:
    """A text may be cut between characters that stand together in no piece, behind one that is
    never unknown.
    """

    together: frozenset[str]
    known: frozenset[str] | None
    """Characters that have a piece; None if bytes replace unknown characters."""

    def __call__(self, pair: str) -> bool:
        return pair not in self.together and (self.known is None or pair[0] in self.known)


def proved_cuts(proto: Any) -> MayCut:
    """The places where a text may be cut, by the model's definition."""
    normalizer = proto.normalizer_spec
    trainer = proto.trainer_spec
    types = proto.SentencePiece
    is_by_character = not normalizer.precompiled_charsmap and normalizer.escape_whitespaces
    has_free_ends = (
        not normalizer.remove_extra_whitespaces and not trainer.treat_whitespace_as_suffix
    )
    if trainer.model_type != trainer.BPE or not is_by_character or not has_free_ends:
        return cut_nowhere
    pieces = {
        each.piece
        for each in proto.pieces
        if each.type in (types.NORMAL, types.USER_DEFINED, types.UNUSED)
    }
    together = neighbours(pieces, space=SPACE)
    if trainer.byte_fallback:  # The library requires all 256 bytes.
        return PieceCuts(together, known=None)
    known = {
        each.piece for each in proto.pieces if each.type in (types.NORMAL, types.USER_DEFINED)
    }
    # A text has a space where pieces have the character that stands for it.
    characters = {piece for piece in known if len(piece) == 1}
    return PieceCuts(together, frozenset(characters | ({" "} if SPACE in characters else set())))


# ---- what ids depend on


def unusual_parts(proto: Any) -> tuple[object, ...]:
    """The parts of a model that ids depend on beside pieces and scores; empty for a model of the
    kind of Llama 2's and of docs/data.md.
    """
    normalizer = proto.normalizer_spec
    trainer = proto.trainer_spec
    parts = {
        "types": [
            (number, piece.type)
            for number, piece in enumerate(proto.pieces)
            if piece.type != usual_type(piece)
        ],
        "model_type": trainer.model_type,
        "byte_fallback": trainer.byte_fallback,
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "charsmap": normalizer.precompiled_charsmap.hex(),
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        "escape_whitespaces": normalizer.escape_whitespaces,
        "ends": (trainer.bos_piece, trainer.eos_piece),
    }
    usual = {
        "types": [],
        "model_type": trainer.BPE,
        "byte_fallback": True,
        "treat_whitespace_as_suffix": False,
        "charsmap": "",
        "remove_extra_whitespaces": False,
        "escape_whitespaces": True,
        "ends": ("<s>", "</s>"),
    }
    # Nothing for the usual parts: folders that were prepared before they counted keep their key.
    return () if parts == usual else (parts, normalizer.add_dummy_prefix)


def usual_type(piece: Any) -> int:
    """The type that the text of a piece suggests.

    Whether it is a control piece is known otherwise.
    """
    if piece.type == piece.CONTROL:
        return int(piece.CONTROL)
    if re.fullmatch("<0x[0-9A-F]{2}>", piece.piece):
        return int(piece.BYTE)
    return int({"<unk>": piece.UNKNOWN, "\n": piece.USER_DEFINED}.get(piece.piece, piece.NORMAL))
