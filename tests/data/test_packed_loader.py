"""A StatefulDataLoader over packed corpora for the loops of others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from models.batch import IGNORE_INDEX
from trainer.config.source import CorpusSpec
from trainer.data.packed_loader import PackedDataLoader, open_packed
from trainer.data.prepare import prepare
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

SEQ_LEN = 8
TEXTS = [f"text {number} of {number**3}" for number in range(15)]
GLOBAL_BATCH_SIZE = 6
MESHES = [(1, 6, 0), (2, 1, 2), (3, 2, 0), (4, 1, 1)]
"""dp_size, micro_batch_size, num_workers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    (root / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "corpus" / f"{number:02}").write_text(text)
    spec = CorpusSpec(corpus=str(root / "corpus"), cache_dir=root / "cache")
    return prepare(spec, ByteTokenizer()).folder


def loaders(folder: Path, ranks: int, micro: int, workers: int) -> list[PackedDataLoader]:
    dataset = open_packed(folder, seq_len=SEQ_LEN, seed=3, packing="concat", mask="none")
    return [
        PackedDataLoader(
            dataset,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=micro,
            global_batch_size=GLOBAL_BATCH_SIZE,
            num_workers=workers,
        )
        for rank in range(ranks)
    ]


Sequence = tuple[tuple[int, ...], tuple[int, ...]]


def read_steps(ranks: Iterable[PackedDataLoader], steps: int) -> list[list[Sequence]]:
    """(tokens, labels) of the sequences of each step, of all ranks, sorted; without padding."""
    by_step: list[list[Sequence]] = [[] for _ in range(steps)]
    for loader in ranks:
        per_step = loader._dealer.num_micro_batches
        for number, item in enumerate(islice(loader, steps * per_step)):
            pairs = zip(item["input_ids"].tolist(), item["shift_labels"].tolist(), strict=True)
            by_step[number // per_step] += [
                (tuple(tokens), tuple(labels))
                for tokens, labels in pairs
                if set(labels) != {IGNORE_INDEX}
            ]
    return [sorted(step) for step in by_step]


def cut_stream() -> list[Sequence]:
    """The sequences of an epoch, cut from the texts without any of our code."""
    bos, eos = ByteTokenizer.bos, ByteTokenizer.eos
    documents = [[bos, *text.encode(), eos] for text in TEXTS]
    stream = [token for document in documents for token in document]
    labels = [label for document in documents for label in [*document[1:], IGNORE_INDEX]]
    padding = -len(stream) % SEQ_LEN
    stream += [eos] * padding
    labels += [IGNORE_INDEX] * padding
    starts = range(0, len(stream), SEQ_LEN)
    return [(tuple(stream[at : at + SEQ_LEN]), tuple(labels[at : at + SEQ_LEN])) for at in starts]


@pytest.mark.filterwarnings("ignore:global_batch_size")
def test_a_position_continues_on_any_number_of_ranks_and_workers(folder: Path) -> None:
    truth = cut_stream()
    # Whole epochs, and more than one part for each mesh.
    steps = len(truth)
    seen: list[list[Sequence]] = []
    states: list[dict[str, Any]] = [{}]
    parts = [5, 7, 3, 9, steps - 24]
    for part, mesh in zip(parts, [*MESHES, MESHES[0]], strict=True):
        ranks = loaders(folder, *mesh)
        for loader in ranks:
            loader.load_state_dict(states[0])
        seen += read_steps(ranks, part)
        states = [loader.state_dict() for loader in ranks]
        positions = [
            {key: value for key, value in state.items() if key != "mesh"} for state in states
        ]
        assert positions == [positions[0]] * len(ranks)
    assert states[0]["next_sequence"] == GLOBAL_BATCH_SIZE * len(truth)
    flat = [pair for step in seen for pair in step]
    assert sorted(flat) == sorted(truth * GLOBAL_BATCH_SIZE), "no sequence is lost or repeated"
    whole = read_steps(loaders(folder, 1, 6, 0), steps)
    assert seen == whole, "each step has the sequences of the run without an interruption"


def test_a_position_is_that_of_the_items_taken_and_not_of_those_read_ahead(folder: Path) -> None:
    (loader,) = loaders(folder, 1, 2, 2)
    items = iter(loader)
    taken = [next(items)["input_ids"].tolist() for _ in range(4)]
    state = loader.state_dict()
    assert (state["next_sequence"], state["micro_batch"]) == (6, 1)
    following = [next(items)["input_ids"].tolist() for _ in range(4)]
    (resumed,) = loaders(folder, 1, 2, 0)
    resumed.load_state_dict(state)
    assert [each["input_ids"].tolist() for each in islice(resumed, 4)] == following
    # A new iterator goes on; an old position goes back.
    loader.load_state_dict({**state, "next_sequence": 0, "micro_batch": 0})
    assert [each["input_ids"].tolist() for each in islice(loader, 4)] == taken
    assert [each["input_ids"].tolist() for each in islice(loader, 4)] == following


def test_a_position_of_other_data_or_of_a_part_of_another_step_is_refused(folder: Path) -> None:
    (loader,) = loaders(folder, 1, 2, 0)
    next(iter(loader))
    state = loader.state_dict()
    other = PackedDataLoader(open_packed(folder, seq_len=SEQ_LEN, seed=4))
    with pytest.raises(ValueError, match="of other tokens, or of another seq_len"):
        other.load_state_dict(state)
    (first, *_) = loaders(folder, 2, 1, 0)
    with pytest.raises(ValueError, match=r"after micro-batch 1, with .* take states after whole"):
        first.load_state_dict(state)
    assert first.state_dict()["next_sequence"] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_keeps_its_error_and_its_name(workers: int, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "shard-00000.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "shard-00000.bin").write_bytes(content)
    loader = PackedDataLoader(open_packed(tmp_path, seq_len=SEQ_LEN), num_workers=workers)
    with pytest.raises(DataError, match=r"^sequences \[0\]: .*shard-00000.bin is damaged: check"):
        next(iter(loader))


def test_it_is_a_stateful_dataloader_that_leaves_the_generator_of_training_alone(
    folder: Path,
) -> None:
    state = torch.get_rng_state()
    loader = PackedDataLoader(
        open_packed(folder, folder, seq_len=SEQ_LEN, weights=[3, 1]),
        convert=lambda batch: ({"input": batch.tokens}, batch.labels),
    )
    assert isinstance(loader, StatefulDataLoader)
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == labels.shape == (1, SEQ_LEN)
    assert torch.equal(torch.get_rng_state(), state)


def test_folders_and_weights_belong_together(folder: Path) -> None:
    with pytest.raises(ValueError, match="1 weights for 2 folders"):
        open_packed(folder, folder, seq_len=SEQ_LEN, weights=[1])
    with pytest.raises(ValueError, match="0 weights for 0 folders"):
        open_packed(seq_len=SEQ_LEN)
    with pytest.raises(DataError, match="is no prepared folder: run"):
        open_packed(folder / "none", seq_len=SEQ_LEN)


def test_options_are_those_of_a_configuration(folder: Path) -> None:
    loader = PackedDataLoader(open_packed(folder, seq_len="1K"))
    assert next(iter(loader))["input_ids"].shape == (1, 1024)
    with pytest.raises(
        ValueError, match=r"^open_packed: training.seq_len = \"1T\" must be an integer"
    ):
        open_packed(folder, seq_len="1T")
    with pytest.raises(
        ValueError, match=r"data.packing = \"tight\" must .*; open_packed: data.mask"
    ):
        open_packed(folder, seq_len=64, packing="tight", mask="all")  # type: ignore[arg-type]


def test_places_that_do_not_exist_are_refused_and_empty_items_said(folder: Path) -> None:
    dataset = open_packed(folder, seq_len=SEQ_LEN)
    with pytest.raises(ValueError, match="dp_rank = 2 must be at least 0 and below dp_size = 2"):
        PackedDataLoader(dataset, dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match="dp_rank = -1 must be"):
        PackedDataLoader(dataset, dp_rank=-1, dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size = 0 must be at least 1"):
        PackedDataLoader(dataset, global_batch_size=0)
    with pytest.warns(UserWarning, match="a mean over their targets is NaN"):
        PackedDataLoader(dataset, dp_size=3, global_batch_size=8)
