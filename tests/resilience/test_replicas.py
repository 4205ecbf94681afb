"""Copies of weights and moments on several ranks: equal in every healthy run; a changed bit is
found and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from parallelisms.mesh.collectives import to_local
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of, run_here
from tests.system.runs import checkpoints, forked, lines, metrics, steps, train_rank, write_run
from trainer.resilience import replicas
from trainer.resilience.replicas import DriftedRank, find_drifted_ranks
from trainer.run import train_loop
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

Options = tuple[str, ...]
Flips = tuple[tuple[int, str], ...]
"""(rank, tensor): a bit of this rank's shard flips."""
Named = dict[int, list[str]]
"""The first tensors of every rank that is named."""

NO_SP = "--parallelism.sequence_parallel=false"
NO_LP = "--parallelism.loss_parallel=false"
BF16 = "--training.dtype=bfloat16"
ON_HOST = "--memory.optimizer_placement=host"
# Qwen3 also has q and k norms.
BF16_MOMENTS = "--memory.optimizer_dtype=bfloat16"
TIED = "--model.family=qwen3"
MORE_SEQUENCES = "--training.global_batch_size=4"
BLOCK = "model.blocks.0"
SMALL = ("--model.num_layers=1", "--training.seq_len=32", "--training.global_batch_size=2")
EMBED = "model.embed.weight"
HEAD = "model.head.proj.weight"
NORM = f"{BLOCK}.attention_norm.weight"
Q_PROJ, K_PROJ, Q_NORM = (
    f"{BLOCK}.attention.{name}.weight" for name in ("q_proj", "k_proj", "q_norm")
)


def mesh(*options: str, **degrees: int) -> Options:
    return (*(f"--parallelism.{name}={size}" for name, size in degrees.items()), *options)


def moment(weight: str, key: str = "exp_avg") -> str:
    return f"{weight.replace('model', 'optimizer', 1)}.{key}"


def all_ranks(size: int, *tensors: str) -> dict[Flips, Named]:
    """A flip on the last of `size` copies, none of which has a majority."""
    return {((size - 1, tensor),): {rank: [tensor] for rank in range(size)} for tensor in tensors}


def only_rank(rank: int, *tensors: str) -> dict[Flips, Named]:
    return {((rank, tensor),): {rank: [tensor]} for tensor in tensors}


def nobody(rank: int, *tensors: str) -> dict[Flips, Named]:
    return {((rank, tensor),): {} for tensor in tensors}


# By mesh: options, and the ranks that are named after flips of bits.
Cases = dict[str, tuple[Options, dict[Flips, Named]]]
TWO: Cases = {
    "dp_replicate 2": (
        mesh(dp_replicate=2),
        all_ranks(2, Q_PROJ, NORM, moment(EMBED), moment(HEAD, "exp_avg_sq")),
    ),
    "tp 2": (
        mesh(tp=2),
        all_ranks(2, NORM, moment(NORM), moment(NORM, "exp_avg_sq"))
        | nobody(1, Q_PROJ, EMBED, HEAD, moment(Q_PROJ)),
    ),
    "tp 2, no sequence or loss parallelism": (
        mesh(NO_SP, NO_LP, tp=2),
        all_ranks(2, NORM, HEAD) | nobody(1, EMBED),
    ),
    "cp 2": (mesh(cp=2), nobody(1, NORM, moment(HEAD))),
}
TWO_MORE: Cases = {
    "dp_replicate 2, bfloat16": (
        mesh(BF16, BF16_MOMENTS, dp_replicate=2),
        all_ranks(2, Q_PROJ, moment(Q_PROJ)),
    ),
    "dp_replicate 2, optimizer on the host": (
        mesh(ON_HOST, dp_replicate=2),
        all_ranks(2, Q_PROJ, moment(HEAD)),
    ),
    "tp 2, no sequence parallelism": (
        mesh(NO_SP, tp=2),
        all_ranks(2, NORM) | nobody(1, HEAD, K_PROJ),
    ),
    "tp 2, no loss parallelism": (
        mesh(NO_LP, tp=2),
        all_ranks(2, NORM, HEAD) | nobody(1, EMBED, Q_PROJ),
    ),
    "tp 2, tied, no loss parallelism": (
        mesh(NO_LP, TIED, tp=2),
        all_ranks(2, EMBED, Q_NORM) | nobody(1, Q_PROJ),
    ),
    "dp_shard 2": (mesh(dp_shard=2), nobody(1, NORM, HEAD, moment(NORM))),
    "pp 2": (mesh(MORE_SEQUENCES, pp=2), nobody(1, NORM, HEAD)),
}
FOUR: Cases = {
    "tp 4, replicated KV heads": (
        mesh(tp=4),
        only_rank(2, K_PROJ, moment(K_PROJ), NORM) | nobody(3, Q_PROJ),
    ),
    "dp_replicate 2 x tp 2, bfloat16, optimizer on the host": (
        mesh(BF16, BF16_MOMENTS, ON_HOST, dp_replicate=2, tp=2),
        only_rank(3, NORM, moment(NORM))
        | {
            ((3, Q_PROJ),): {1: [Q_PROJ], 3: [Q_PROJ]},
            ((0, NORM), (2, NORM)): {rank: [NORM] for rank in range(4)},
            ((0, NORM), (1, HEAD)): {0: [NORM], 1: [HEAD], 3: [HEAD]},
        },
    ),
    "dp_replicate 2 x pp 2": (
        mesh(MORE_SEQUENCES, pp=2, dp_replicate=2),
        {((3, HEAD),): {2: [HEAD], 3: [HEAD]}, ((0, EMBED),): {0: [EMBED], 1: [EMBED]}},
    ),
}
FOUR_MORE: Cases = {
    "tp 2 x pp 2, only sharded weights in the first stage": (
        mesh("--parallelism.pp_layers=0,1", MORE_SEQUENCES, tp=2, pp=2),
        {((3, NORM),): {2: [NORM], 3: [NORM]}} | nobody(0, EMBED),
    ),
    "dp_replicate 2 x cp 2": (mesh(dp_replicate=2, cp=2), {((1, NORM),): {1: [NORM], 3: [NORM]}}),
}
SIX: Cases = {
    "dp_replicate 3 x dp_shard 2": (
        mesh(dp_replicate=3, dp_shard=2),
        only_rank(0, Q_PROJ)
        | only_rank(5, moment(EMBED))
        | {
            ((1, NORM), (5, HEAD)): {1: [NORM], 5: [HEAD]},
            # The two that changed alike are the majority.
            ((1, NORM), (3, NORM)): {5: [NORM]},
            ((2, NORM), (3, NORM)): {2: [NORM], 3: [NORM]},
            ((4, Q_PROJ), (4, NORM), (4, HEAD), (4, EMBED)): {4: [Q_PROJ, NORM, EMBED]},
        },
    ),
}


def flip(tensor: Tensor, bit: int = 0) -> None:
    """Flips a bit of the last element of this rank's shard."""
    shard = to_local(tensor.detach()).view(-1)
    shard.view(torch.int16 if shard.itemsize == 2 else torch.int32)[-1] ^= 1 << bit


def named(trainer: Trainer) -> Named:
    drifted = find_drifted_ranks(trainer.state_dict())
    assert {each.host for each in drifted} <= {gethostname()}
    return {each.rank: each.first_tensors for each in drifted}


def train_and_flip(run: Path, cases: Cases) -> dict[str, tuple[Named, list[Named]]]:
    """By case: what is named after two healthy steps, and after each of its flips."""
    rank = distributed.get_rank()
    results: dict[str, tuple[Named, list[Named]]] = {}
    # Quick, and tensors have several chunks.
    vars(replicas)["CHUNK_ELEMENTS"] = 1000
    for name, (options, flips) in cases.items():
        config = configured(run, run.parent / "run", *SMALL, *options)
        trainer = Trainer(
            config,
            World(rank, distributed.get_world_size(), torch.device("cpu")),
            dataset_of(config),
        )
        healthy: Named = {}
        for _ in islice(trainer.train_steps(), 2):
            healthy |= named(trainer)
        state = trainer.state_dict()
        after_flips = []
        compared = {
            tensor for copies in replicas._hash_copies(state).values() for tensor in copies
        }
        for each, expected in flips.items():
            own = [tensor for place, tensor in each if place == rank]
            for tensor in own:
                flip(state[tensor])
            assert all((tensor in compared) == bool(expected) for tensor in own), (
                "sharded tensors cost nothing"
            )
            after_flips.append(named(trainer))
            for tensor in own:
                flip(state[tensor])
        results[name] = healthy, after_flips
    return results


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path)
    dataset_of(configured(run, tmp_path / "run", *SMALL))  # Tokenize once, not on every rank.
    return run


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, TWO, id="2 ranks"),
        pytest.param(4, FOUR, id="4 ranks", marks=pytest.mark.slow),
        pytest.param(6, SIX, id="6 ranks"),
        pytest.param(2, TWO_MORE, id="2 ranks, more", marks=pytest.mark.slow),
        pytest.param(4, FOUR_MORE, id="4 ranks, more", marks=pytest.mark.slow),
    ],
)
def test_healthy_copies_are_equal_and_a_flipped_bit_names_its_rank_and_tensor(
    run: Path, ranks: int, cases: Cases
) -> None:
    expected: dict[str, tuple[Named, list[Named]]] = {
        name: ({}, [*flips.values()]) for name, (_, flips) in cases.items()
    }
    for results in run_ranks(train_and_flip, ranks, run, cases):
        assert results == expected


# ---- the hash


def powers(length: int) -> Tensor:
    return torch.full((length,), replicas.MULTIPLIER, dtype=torch.int64).cumprod(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7), (4, 8)])
def test_the_hash_is_the_polynomial_of_all_bits_modulo_2_to_the_64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(replicas, "CHUNK_ELEMENTS", 8)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = 2 if dtype == torch.bfloat16 else 4
    data = bytes(x.reshape(-1).view(torch.uint8).tolist())
    words = [
        int.from_bytes(data[at : at + size], "little", signed=True)
        for at in range(0, len(data), size)
    ]
    expected = 0
    for start in range(0, len(words), 8):
        chunk = words[start : start + 8]
        expected *= replicas.MULTIPLIER**8
        expected += sum(word * replicas.MULTIPLIER ** (at + 1) for at, word in enumerate(chunk))
    found = replicas.polynomial_hash(x, powers(8))
    assert int(found) % 2**64 == expected % 2**64
    transposed = x.t().contiguous().t() if x.ndim == 2 else x
    assert torch.equal(replicas.polynomial_hash(transposed, powers(8)), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_two_changes_of_a_few_bits_share_a_hash(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(replicas, "CHUNK_ELEMENTS", 4)
    x = torch.zeros(9, dtype=dtype)
    hashes = set()
    words = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits = 8 * words.itemsize
    changes = [(0, 0, 0, 0)]  # None.
    changes += [(at, 1 << bit, at, 0) for at in range(len(words)) for bit in range(bits - 1)]
    changes += [
        (at, -(1 << bits - 1), other, -(1 << bits - 1))
        for at in range(len(words))
        for other in range(at + 1)
    ]
    changes += [
        (at, 1, other, -1)
        for at in range(len(words))
        for other in range(len(words))
        if at != other
    ]
    for at, one, other, two in changes:
        words.zero_()
        words[at] = one
        words[other] += two if at != other or one != two else 0
        hashes.add(int(replicas.polynomial_hash(x, powers(4))))
    assert len(hashes) == len(changes)


# ---- in a run


def train_and_flip_at(flips: Flips, step: int, argv: list[str]) -> int:
    """Trains; after the step, a bit of each tensor flips on its rank."""
    from trainer.run import train_loop

    class FlippingTrainer(train_loop.Trainer):  # type: ignore[name-defined, misc]
        def optimizer_step(self, *args: Any) -> Tensor:
            values: Tensor = super().optimizer_step(*args)
            for rank, tensor in flips:
                if (rank, step) == (self.world.rank, self.step):
                    flip(self.state_dict()[tensor], bit=12)
            return values

    vars(train_loop)["Trainer"] = FlippingTrainer
    return train_rank(argv)


@pytest.mark.ranks
def test_a_run_whose_replicas_differ_stops_on_all_ranks_and_resumes_from_equal_copies(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = mesh(*SMALL, "--checkpoint.interval=2", "--training.steps=4", dp_replicate=3)
    options += ("--health.replica_check_interval=3",)
    done = forked(
        run,
        folder,
        *options,
        processes=3,
        train=partial(train_and_flip_at, ((2, moment(NORM)),), 3),
    )
    assert done.statuses == [1, 1, 1]
    message = f"replicas differ after step 3: rank 2 on {gethostname()} in 1 of its tensors ({moment(NORM)})"
    assert [line for line in done.said.splitlines() if "error" in line] == [f"error: {message}"]
    assert "Traceback" not in done.said
    (event,) = (
        event for event in lines(folder / "events.jsonl") if event["event"] == "replica_mismatch"
    )
    assert event["step"] == 3
    assert event["ranks"] == [
        {"rank": 2, "host": gethostname(), "num_tensors": 1, "first_tensors": [moment(NORM)]}
    ]
    assert steps(folder) == [1, 2, 3]
    assert checkpoints(folder) == ["step-2"]
    assert not (folder / "STOP").exists()
    again = forked(run, folder, *options, processes=3)
    assert again.statuses == [0, 0, 0], again.said
    assert steps(folder) == [1, 2, 3, 4]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "interval",
    [(), ("--health.replica_check_interval=100",)],
    ids=["by default", "between checks"],
)
def test_copies_that_differ_are_not_saved(
    run: Path, tmp_path: Path, interval: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    options = mesh(*SMALL, *interval, dp_replicate=2)
    done = forked(
        run,
        folder,
        *options,
        processes=2,
        train=partial(train_and_flip_at, ((1, moment(NORM)),), 1),
    )
    assert done.statuses == [1, 1]
    # The moment has changed its weight; of two copies, either may be wrong.
    tensors = f"in 2 of its tensors ({NORM}, {moment(NORM)})"
    ranks = "; ".join(f"rank {rank} on {gethostname()} {tensors}" for rank in range(2))
    assert f"error: replicas differ after step 3: {ranks}\n" in done.said
    assert checkpoints(folder) == []


def test_checks_run_every_interval_and_before_checkpoints_and_only_if_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = find_drifted_ranks
    calls = Counter[str]()
    for name, option in {"off": (), "on": ("--health.replica_check_interval=4",)}.items():

        def count(state: Mapping[str, Tensor], name: str = name) -> list[DriftedRank]:
            calls[name] += 1
            return find(state)

        monkeypatch.setattr(train_loop, "find_drifted_ranks", count)
        run_here(configured(run, tmp_path / name, *SMALL, "--training.steps=5", *option))
    # Step 4, and the checkpoints of steps 3 and 5.
    assert calls == {"on": 3}
    values = [metrics(tmp_path / name, "step", "loss", "grad_norm") for name in ("off", "on")]
    assert values[0] == values[1]
