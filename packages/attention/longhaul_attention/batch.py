"""Inspection and preparation of a batch, before `ContextParallel.shard_batch` selects a rank's
tokens.

Shape suffixes: B sequences, T tokens of the full sequence, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.batch import IGNORE_INDEX, require_ascending
from models.ranges import concatenated_ranges

VARLEN_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that collators give to variable-length kernels: they repeat the documents of
`position_ids`.
"""
PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
MASK_AND_RESTARTS = (
    "attention_mask is given and position_ids restart: transformers takes such a sequence for one document; drop "
    "attention_mask if it holds several, or give boundaries"
)


class Documents:
    """The documents of a batch's full sequences: what attention needs besides this rank's tokens.

    Not a tensor: trainers move tensors to the device, and the boundaries are read on the host.
    """

    def __init__(
        self,
        boundaries_BD: Tensor,
        *,
        seq_len: int,
        checksum: Tensor,
        longest: tuple[int, int],
        context_key: int,
        plan: tuple[Any, ...],
        positions_given: bool,
        keys: set[str],
    ) -> None:
        self.boundaries_BD = boundaries_BD
        """int32 on the CPU: the document starts of each sequence, then its padded length,
        repeated.
        """
        self.seq_len = seq_len
        """Tokens of each sequence, without the padding of `shard_batch`."""
        self.checksum = checksum
        """Checksum of tokens and boundaries, int64 [2]: equal on ranks that were given the same
        batch.
        """
        self.longest = longest
        """Positions of the batch, and of the rank where the last position is the smallest: what
        its last one is, plus 1.
        """
        self.context_key = context_key
        """Key of the `ContextParallel` that sharded the batch."""
        self.plan = plan
        """Method, layout, mesh and rank by which it was sharded."""
        self.positions_given = positions_given
        self.keys = frozenset(keys)
        """Keys of the batch: a model may pass them all on to attention."""
        self.is_verified = False
        """Whether the ranks have compared their checksums."""

    def __repr__(self) -> str:
        return f"Documents({self.boundaries_BD.tolist()})"


def find_boundaries(batch: Mapping[str, Any], boundaries: Any) -> Tensor:
    """int32 [B, D] on the CPU: those given or, as transformers finds them, the places where
    `position_ids` do not go up by one; padding that `attention_mask` hides is a document of its
    own. Else each sequence is one document.

    Raises ValueError for what transformers would read otherwise.
    """
    batch_size, seq_len = batch["input_ids"].shape
    mask_BT = batch.get("attention_mask")
    if mask_BT is not None and mask_BT.shape != (batch_size, seq_len):
        raise ValueError(
            f"attention_mask must hide padding, [{batch_size}, {seq_len}], and not have shape {tuple(mask_BT.shape)}; "
            "causal masks and documents are made from the boundaries"
        )
    if mask_BT is not None and int(mask_BT.max()) > 1:
        raise ValueError(
            f"attention_mask has values up to {int(mask_BT.max())}: it says which tokens are padding, with 0 and 1; give "
            "documents as position_ids that restart, or as boundaries"
        )
    if boundaries is not None:
        boundaries_BD = _stated(boundaries, seq_len).expand(batch_size, -1)
        require_ascending(boundaries_BD, seq_len)
        starts_BT = torch.zeros(batch_size, seq_len + 1, dtype=torch.bool, device="cpu")
        starts_BT[torch.arange(batch_size, device="cpu")[:, None], boundaries_BD.long()] = True
        return _boundaries(starts_BT[:, :seq_len] | _mask_starts(mask_BT, batch))
    starts_BT = _position_starts(batch)
    if mask_BT is not None and bool(starts_BT[:, 1:].any()):
        raise ValueError(MASK_AND_RESTARTS)
    found_BD = _boundaries(starts_BT | _mask_starts(mask_BT, batch))
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(key) is not None and not _same_documents(batch[key], found_BD, seq_len):
            raise ValueError(
                f"{key} = {batch[key].tolist()} are not the documents of position_ids: {found_BD.tolist()}"
            )
    return found_BD


def _stated(boundaries: Any, seq_len: int) -> Tensor:
    """int32 [1 or B, D] of a tensor or a list: for all sequences, or for each."""
    rows = boundaries.tolist() if isinstance(boundaries, Tensor) else [*boundaries]
    rows = rows if rows and isinstance(rows[0], list) else [rows]
    longest = max(map(len, rows))
    return torch.tensor(
        [[*row, *[seq_len] * (longest - len(row))] for row in rows],
        dtype=torch.int32,
        device="cpu",
    )


def _position_starts(batch: Mapping[str, Any]) -> Tensor:
    batch_size, seq_len = batch["input_ids"].shape
    positions_BT = batch.get("position_ids")
    starts_BT = torch.zeros(batch_size, seq_len, dtype=torch.bool, device="cpu")
    starts_BT[:, 0] = True
    if positions_BT is not None:
        if positions_BT.ndim != 2 or positions_BT.shape[1] != seq_len:
            raise ValueError(
                f"position_ids must be [{batch_size}, {seq_len}], not {list(positions_BT.shape)}: positions in several "
                "dimensions (M-RoPE) are not supported"
            )
        starts_BT[:, 1:] |= (positions_BT.diff(dim=1) != 1).cpu()
    return starts_BT


def _mask_starts(mask_BT: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
    """Places where padding begins or ends. Raises ValueError for hidden tokens between others."""
    starts_BT = torch.zeros(batch["input_ids"].shape, dtype=torch.bool, device="cpu")
    if mask_BT is not None:
        changes_BT = F.pad(mask_BT.cpu().bool().int(), (1, 0)).diff(dim=1)
        starts_BT[:, 1:] = changes_BT[:, 1:] != 0
        # Visible tokens may begin once: where they begin again, something between them is hidden.
        is_inside = (changes_BT > 0).sum(1) > 1
        if bool(is_inside.any()):
            raise ValueError(
                "attention_mask hides tokens between others; it may hide padding at the ends only"
            )
    return starts_BT


def _boundaries(starts_BT: Tensor) -> Tensor:
    seq_len = starts_BT.shape[1]
    starts_BT[:, 0] = True
    rows = [
        torch.cat((row.nonzero().flatten(), torch.tensor([seq_len], device="cpu")))
        for row in starts_BT
    ]
    # Repeated ends are documents without tokens.
    padded: Tensor = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=seq_len)
    return padded.int()


def _same_documents(cu_seq_lens: Tensor, boundaries_BD: Tensor, seq_len: int) -> bool:
    """Whether cumulative lengths, which count over all sequences, are those of these documents."""
    starts_B1 = torch.arange(len(boundaries_BD), device="cpu")[:, None] * seq_len
    return torch.equal(cu_seq_lens.cpu().long().unique(), (boundaries_BD + starts_B1).unique())


def pad_boundaries(boundaries_BD: Tensor, seq_len: int, padded_length: int) -> Tensor:
    """The boundaries, with the padding as one more document."""
    if padded_length == seq_len:
        return boundaries_BD
    return F.pad(boundaries_BD, (0, 1), value=padded_length)


def positions_of(boundaries_BD: Tensor, seq_len: int) -> Tensor:
    """int64 [B, T]: each token's offset in its document."""
    lengths = boundaries_BD.long().diff(dim=1).flatten()
    return concatenated_ranges(torch.zeros_like(lengths), lengths).view(-1, seq_len)


def shift(labels_BT: Tensor) -> Tensor:
    """The label of the next token, as transformers' loss shifts them; that of the last is
    ignored.
    """
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


def require_shift(tokens_BT: Tensor, shifted_BT: Tensor, mask_BT: Tensor | None) -> None:
    """Raises ValueError for labels that are not those of the next token, as far as the tokens
    themselves tell, and for those of tokens that the mask hides.
    """
    if mask_BT is not None and bool((shifted_BT[~mask_BT.bool()] != IGNORE_INDEX).any()):
        raise ValueError(
            "tokens that attention_mask hides have labels to predict: with padding on the left, set the label of the first "
            "token after it to -100, or pad on the right"
        )
    next_BT = shift(tokens_BT)
    if _equal_targets(shifted_BT, next_BT):
        return
    if _equal_targets(shifted_BT, tokens_BT):
        raise ValueError("shift_labels are input_ids, not shifted: give them as labels")
    if _equal_targets(shifted_BT, shift(next_BT)):
        raise ValueError(
            "labels are shifted already, and would be shifted again: give them as shift_labels"
        )


def _equal_targets(labels_BT: Tensor, tokens_BT: Tensor) -> bool:
    is_target = (labels_BT != IGNORE_INDEX) & (tokens_BT != IGNORE_INDEX)
    return int(is_target.sum()) > 1 and bool((labels_BT == tokens_BT)[is_target].all())


def checksum(tokens_BT: Tensor, boundaries_BD: Tensor) -> Tensor:
    """int64 [2], which differ for other tokens or boundaries but by chance; does not wait for a
    device.
    """
    # Every factor is odd, and so invertible modulo 2 ** 64: a change of one number always shows.
    # The multiplier is Knuth's, which spreads neighbouring numbers.
    sums = [
        (
            x.long().flatten()
            * torch.arange(1, 2 * x.numel(), 2, device=x.device).mul_(2654435761)
        ).sum()
        for x in (tokens_BT, boundaries_BD.to(tokens_BT.device))
    ]
    return torch.stack(sums)
