"""In float64 every mesh computes the same run, and a checkpoint of one is a checkpoint of all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelisms.parallel_dims import AXES
from parallelisms.pipeline_plan import SPLIT_BACKWARD_SCHEDULES
from tests.system.runs import digests, forked, metrics, state, tensors, write_run

pytestmark = pytest.mark.ranks

Options = tuple[str, ...]
UPDATES = 3
# Eight rows: three data-parallel ranks leave one of their nine places empty.
RUN: Options = (
    "--model.num_layers=4",
    "--training.dtype=float64",
    "--training.global_batch_size=8",
    f"--training.steps={UPDATES}",
    "--checkpoint.interval=2",
)
FULL, KEEP = ("--memory.recompute=full",), ("--memory.recompute=keep_attention",)
TOKENS_WHOLE, LOSS_WHOLE = ("--parallelism.sequence_parallel=false",), ("--parallelism.loss_parallel=false",)
ROWS = ("--training.micro_batch_size=4",)
TILES = ("--memory.mlp_tile_mib=1", "--memory.recompute=full")
HOST = ("--memory.optimizer_placement=host",)
ON_HOST = (*KEEP, "--memory.offload=inputs_and_attention")
INPUTS_ON_HOST = (*FULL, "--memory.offload=inputs")
NO_GROUPS = (*ON_HOST, "--memory.blocks_per_checkpoint=2", "--memory.mlp_tile_mib=1")
EVERYTHING = (*NO_GROUPS, "--memory.head_groups=2")
GROUPS = (*KEEP, "--memory.head_groups=2")
EVERY = (*KEEP, "--memory.blocks_per_checkpoint=2", "--memory.mlp_tile_mib=1")
LITTLE = ("--memory.host_budget_gib=0.0004",)
TIED = ("--model.family=qwen3",)  # Which normalises heads too.
# Of layers that a pipeline cuts into twice two, the first of the second half is not rotated. Where a gradient is nothing
# but rounding, AdamW divides it by little more than eps.
MIXED = (
    "--optimizer.eps=1e-5",
    "--model.qk_norm=true",
    "--model.nope_every=3",
    "--model.num_heads=8",
    "--model.num_kv_heads=4",
    "--model.rope.kind=yarn",
    "--model.rope.factor=4",
    "--model.rope.original_length=16",
)
HEADTAIL = ("--parallelism.cp_layout=headtail",)
HYBRID = ("--parallelism.cp_ulysses=2",)


def mesh(*, method: str = "auto", schedule: str = "1F1B", **degrees: int) -> tuple[int, Options]:
    """Processes, if dp_shard is 1 or given, and options."""
    stated: dict[str, Any] = dict(degrees)
    if degrees.get("cp", 1) > 1:
        stated["cp_method"] = method
    if degrees.get("pp", 1) > 1:
        stated["pp_schedule"] = schedule
    once = ("--memory.recompute=none",) if schedule in SPLIT_BACKWARD_SCHEDULES else ()  # They go back twice.
    return prod(degrees.values()), (*(f"--parallelism.{key}={value}" for key, value in stated.items()), *once)


def case(
    name: str, ranks_and_options: tuple[int, Options], *more: Options, slow: bool = False
) -> tuple[str, int, Options, bool]:
    ranks, options = ranks_and_options
    return name, ranks, (*options, *(word for words in more for word in words)), slow


CASES = [
    case("dp_shard 4", mesh(dp_shard=4), slow=True),
    case("dp_replicate 2 x dp_shard 2", mesh(dp_replicate=2, dp_shard=2), slow=True),
    case("dp_shard 3, a place empty", mesh(dp_shard=3)),
    case("dp_shard 2, whole rows at once", mesh(dp_shard=2), ROWS, slow=True),
    case("dp_shard 2, state on the host", mesh(dp_shard=2), HOST, slow=True),
    case("dp_shard 2, feed-forwards by tiles", mesh(dp_shard=2), TILES, slow=True),
    # Context parallelism
    case("cp 4 ring", mesh(cp=4, method="ring"), KEEP, slow=True),
    case("cp 3 alltoall, rows that do not divide", mesh(cp=3, method="alltoall")),
    case("cp 2 alltoall, head-tail, rows at once", mesh(cp=2, method="alltoall"), HEADTAIL, ROWS, slow=True),
    case("cp 4 allgather", mesh(cp=4, method="allgather"), slow=True),
    case("dp_shard 2 x cp 2 ulysses", mesh(dp_shard=2, cp=2, method="ulysses"), FULL),
    case("dp_replicate 2 x cp 2 auto", mesh(dp_replicate=2, cp=2), slow=True),
    case("cp 4 hybrid", mesh(cp=4, method="hybrid"), HYBRID, slow=True),
    case("dp_replicate 2 x cp 2, state on the host", mesh(dp_replicate=2, cp=2), HOST, slow=True),
    case("dp_shard 2, blocks on the host", mesh(dp_shard=2), ON_HOST, slow=True),
    case("cp 2 ulysses, blocks on the host, little of it", mesh(cp=2, method="ulysses"), ON_HOST, LITTLE, slow=True),
    case("dp_shard 2, everything", mesh(dp_shard=2), EVERYTHING, slow=True),
    case("cp 4 ring, everything", mesh(cp=4, method="ring"), EVERYTHING, slow=True),
    case("cp 2 alltoall, head groups", mesh(cp=2, method="alltoall"), GROUPS, slow=True),
    case("cp 2 allgather, everything", mesh(cp=2, method="allgather"), EVERYTHING, slow=True),
    case("cp 2 ulysses, everything", mesh(cp=2, method="ulysses"), EVERYTHING, slow=True),
    case("cp 4 hybrid, everything", mesh(cp=4, method="hybrid"), HYBRID, EVERYTHING, slow=True),
    case("dp_replicate 2, one input of two", mesh(dp_replicate=2), EVERY),
    # Tensor parallelism
    case("tp 2, all but head groups", mesh(tp=2), NO_GROUPS, slow=True),
    case("tp 2, all but head groups, tokens whole", mesh(tp=2), NO_GROUPS, TOKENS_WHOLE, slow=True),
    case("tp 2, all but head groups, rows at once", mesh(tp=2), NO_GROUPS, ROWS, slow=True),
    case("dp_shard 2 x tp 2, all but head groups", mesh(dp_shard=2, tp=2), NO_GROUPS, slow=True),
    case("cp 2 ring x tp 2, all but head groups", mesh(cp=2, tp=2, method="ring"), NO_GROUPS, slow=True),
    case("pp 2, everything", mesh(pp=2), EVERYTHING),
    case("tp 2", mesh(tp=2), slow=True),
    case("tp 2, tokens whole", mesh(tp=2), TOKENS_WHOLE, slow=True),
    case("tp 2, loss whole", mesh(tp=2), LOSS_WHOLE, slow=True),
    case("tp 2, tokens and loss whole, rows at once", mesh(tp=2), TOKENS_WHOLE, LOSS_WHOLE, ROWS, slow=True),
    case("tp 4, key heads shared", mesh(tp=4), slow=True),
    case("tp 2, state on the host", mesh(tp=2), HOST, KEEP, slow=True),
    case("dp_shard 2 x tp 2", mesh(dp_shard=2, tp=2), KEEP),
    case("dp_shard 3 x tp 2, a place empty", mesh(dp_shard=3, tp=2), slow=True),
    case("dp_shard 2 x tp 2, tokens whole", mesh(dp_shard=2, tp=2), TOKENS_WHOLE, slow=True),
    case("dp_shard 2 x tp 2, loss whole", mesh(dp_shard=2, tp=2), LOSS_WHOLE, KEEP, slow=True),
    case("dp_shard 2 x tp 4, key heads shared", mesh(dp_shard=2, tp=4), slow=True),
    case("dp_replicate 2 x tp 2", mesh(dp_replicate=2, tp=2), FULL, slow=True),
    case("dp_replicate 2 x tp 2, loss whole", mesh(dp_replicate=2, tp=2), LOSS_WHOLE, slow=True),
    case("dp_replicate 2 x tp 4, key heads shared", mesh(dp_replicate=2, tp=4), slow=True),
    case("tp 2, inputs on the host", mesh(tp=2), INPUTS_ON_HOST, slow=True),
    # Context and tensor parallelism
    case("cp 2 ring x tp 2", mesh(cp=2, tp=2, method="ring"), KEEP, slow=True),
    case("cp 2 allgather x tp 2, loss whole", mesh(cp=2, tp=2, method="allgather"), LOSS_WHOLE, slow=True),
    case("cp 2 ulysses x tp 2", mesh(cp=2, tp=2, method="ulysses"), FULL, slow=True),
    case("cp 2 alltoall x tp 2, tokens whole", mesh(cp=2, tp=2, method="alltoall"), TOKENS_WHOLE, slow=True),
    case("cp 3 ring x tp 2, rows that do not divide", mesh(cp=3, tp=2, method="ring"), slow=True),
    case("cp 2 ring x tp 4, key heads shared", mesh(cp=2, tp=4, method="ring"), slow=True),
    case("cp 4 hybrid x tp 2", mesh(cp=4, tp=2, method="hybrid"), HYBRID, slow=True),
    # Pipelines
    case("pp 2", mesh(pp=2), KEEP),
    case("pp 2 GPipe, rows at once", mesh(pp=2, schedule="GPipe"), ROWS, slow=True),
    case("pp 2 Interleaved1F1B", mesh(pp=2, schedule="Interleaved1F1B"), FULL),
    case("pp 2 InterleavedZeroBubble", mesh(pp=2, schedule="InterleavedZeroBubble")),
    case("pp 2 ZBVZeroBubble", mesh(pp=2, schedule="ZBVZeroBubble"), slow=True),
    case("pp 2 DualPipeV", mesh(pp=2, schedule="DualPipeV"), slow=True),
    case("pp 2, layers as given", mesh(pp=2), ("--parallelism.pp_layers=3,1",), slow=True),
    case("pp 2, state on the host", mesh(pp=2), HOST, slow=True),
    case("pp 2 Interleaved1F1B, state on the host", mesh(pp=2, schedule="Interleaved1F1B"), HOST),
    case("pp 4", mesh(pp=4), slow=True),
    case("dp_replicate 2 x pp 2", mesh(dp_replicate=2, pp=2), slow=True),
    case("dp_replicate 2 x pp 2 Interleaved1F1B", mesh(dp_replicate=2, pp=2, schedule="Interleaved1F1B"), slow=True),
    case("dp_replicate 2 x pp 2 DualPipeV", mesh(dp_replicate=2, pp=2, schedule="DualPipeV"), slow=True),
    case("dp_shard 2 x pp 2 Interleaved1F1B", mesh(dp_shard=2, pp=2, schedule="Interleaved1F1B"), KEEP, slow=True),
    case("dp_shard 2 x pp 2 ZBVZeroBubble", mesh(dp_shard=2, pp=2, schedule="ZBVZeroBubble")),
    # Pipelines with the others
    case("cp 2 ring x pp 2", mesh(cp=2, pp=2, method="ring"), KEEP, slow=True),
    case(
        "cp 2 ring x pp 2 Interleaved1F1B, blocks on the host",
        mesh(cp=2, pp=2, method="ring", schedule="Interleaved1F1B"),
        ON_HOST,
    ),
    case("cp 2 x tp 2 x pp 2, blocks on the host", mesh(cp=2, tp=2, pp=2), ON_HOST, slow=True),
    case(
        "cp 2 allgather x pp 2 ZBVZeroBubble", mesh(cp=2, pp=2, method="allgather", schedule="ZBVZeroBubble"), slow=True
    ),
    case("cp 2 ulysses x pp 2 DualPipeV", mesh(cp=2, pp=2, method="ulysses", schedule="DualPipeV"), slow=True),
    case("cp 2 alltoall x pp 2 GPipe", mesh(cp=2, pp=2, method="alltoall", schedule="GPipe"), FULL, slow=True),
    case("cp 4 hybrid x pp 2", mesh(cp=4, pp=2, method="hybrid"), HYBRID, slow=True),
    case("tp 2 x pp 2", mesh(tp=2, pp=2), KEEP, slow=True),
    case("tp 4 x pp 2, key heads shared", mesh(tp=4, pp=2), slow=True),
    case("tp 2 x pp 2 GPipe, loss whole", mesh(tp=2, pp=2, schedule="GPipe"), LOSS_WHOLE, slow=True),
    case("tp 2 x pp 2 InterleavedZeroBubble", mesh(tp=2, pp=2, schedule="InterleavedZeroBubble"), slow=True),
    case("tp 2 x pp 2 DualPipeV, tokens whole", mesh(tp=2, pp=2, schedule="DualPipeV"), TOKENS_WHOLE, slow=True),
    # Three axes and more on eight ranks
    case("dp_replicate 2 x dp_shard 2 x tp 2", mesh(dp_replicate=2, dp_shard=2, tp=2), slow=True),
    case("dp_shard 2 x cp 2 x tp 2", mesh(dp_shard=2, cp=2, tp=2, method="ring"), KEEP, slow=True),
    case("dp_shard 2 x tp 2 x pp 2", mesh(dp_shard=2, tp=2, pp=2), FULL, slow=True),
    case("dp_replicate 2 x cp 2 x pp 2", mesh(dp_replicate=2, cp=2, pp=2, method="alltoall"), slow=True),
    case("cp 2 x tp 2 x pp 2", mesh(cp=2, tp=2, pp=2, method="ring", schedule="Interleaved1F1B"), KEEP),
    case("cp 2 x tp 2 x pp 2 ZBVZeroBubble", mesh(cp=2, tp=2, pp=2, schedule="ZBVZeroBubble"), slow=True),
    case("dp_shard 2 x pp 4", mesh(dp_shard=2, pp=4), slow=True),
    # Tied embeddings
    case("tied, dp_shard 2 x tp 2", mesh(dp_shard=2, tp=2), TIED, slow=True),
    case("tied, tp 2, loss whole", mesh(tp=2), TIED, LOSS_WHOLE),
    # Heads normalised, some layers not rotated, frequencies stretched
    case(
        "mixed, dp_shard 2 x cp 2 ring x tp 2, everything",
        mesh(dp_shard=2, cp=2, tp=2, method="ring"),
        MIXED,
        EVERYTHING,
        slow=True,
    ),
    case("mixed, cp 2 x tp 2 x pp 2, everything", mesh(cp=2, tp=2, pp=2), MIXED, EVERYTHING, slow=True),
]
REFERENCES = {"alone": (), "tied": TIED, "mixed": MIXED}
MESHES = {name: (1, options) for name, options in REFERENCES.items()} | {
    name: (ranks, options) for name, ranks, options, _ in CASES
}
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of a mesh's run, by its name; each is run when it is first asked for."""
    root = tmp_path_factory.mktemp("parity")
    config = write_run(root)

    def run(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        if not folder.exists():
            processes, options = MESHES[name]
            done = forked(config, folder, *RUN, *options, processes=processes, seconds=240)
            assert done.statuses == [0] * processes, done.said
        return folder

    return run


def assert_same_run(folder: Path, reference: Path) -> None:
    assert metrics(folder, "step", "tokens", "lr") == metrics(reference, "step", "tokens", "lr")
    ours, theirs = (
        torch.tensor(metrics(path, "loss", "grad_norm"), dtype=torch.float64) for path in (folder, reference)
    )
    assert ours.shape == (UPDATES, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def assert_same_state(folder: Path, reference: Path) -> None:
    """Weights and moments of the last update, each within a part of its largest value."""
    ours, theirs = (tensors(path / "checkpoints" / f"step-{UPDATES}") for path in (folder, reference))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        atol = 1e-11 * float(tensor.abs().max())
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=name)
    mine, other = (state(path / "checkpoints" / f"step-{UPDATES}")["trainer"] for path in (folder, reference))
    assert [side.pop("goodput")["productive_seconds"] > 0 for side in (mine, other)] == [True, True]  # Its own times.
    assert mine["losses"].pop("losses") == pytest.approx(other["losses"].pop("losses"), rel=1e-11)
    assert mine == other


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if slow else []) for name, _, _, slow in CASES]
)
def test_every_mesh_is_one_process(runs: Runs, name: str) -> None:
    kind = name.partition(",")[0]
    reference = runs(kind if kind in REFERENCES else "alone")
    assert_same_run(runs(name), reference)
    assert_same_state(runs(name), reference)


def degrees(options: Iterable[str]) -> dict[str, int]:
    stated = (option.removeprefix("--parallelism.").split("=") for option in options)
    return {words[0]: int(words[1]) for words in stated if words[0] in AXES}


def test_the_matrix_has_every_pair_of_axes_every_method_and_every_schedule() -> None:
    pairs = {pair for _, _, options, _ in CASES for pair in combinations(sorted(degrees(options)), 2)}
    assert pairs == set(combinations(sorted(AXES), 2))
    for axis in ("tp", "pp"):
        said = {word for _, _, options, _ in CASES if axis in degrees(options) for word in options}
        for method in ("ring", "alltoall", "allgather", "ulysses", "hybrid"):
            assert f"--parallelism.cp_method={method}" in said
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert any(f"--parallelism.pp_schedule={schedule}" in options for _, _, options, _ in CASES)


def test_the_runs_are_not_trivially_equal(runs: Runs) -> None:
    first, last = (tensors(runs("alone") / "checkpoints" / step) for step in ("step-2", f"step-{UPDATES}"))
    for key in first:
        assert not torch.equal(first[key], last[key]), f"{key} did not move"
    norms = [norm for (norm,) in metrics(runs("alone"), "grad_norm")]
    assert max(norms) > 1 > 0.1 * min(norms) > 0, "clipping should matter"


HALF = ("--training.dtype=bfloat16",)
GENTLE = ("--optimizer.lr=1e-3",)  # Else rounding is amplified from update to update, on one process too.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("dp_shard 2 x tp 2", "cp 2 x tp 2 x pp 2")]
)
def test_half_precision_on_a_mesh_is_as_near_as_on_one_process(runs: Runs, tmp_path: Path, name: str) -> None:
    found = {}
    for label, mesh_name, more in (("exact", "alone", ()), ("alone", "alone", HALF), ("mesh", name, HALF)):
        processes, options = MESHES[mesh_name]
        folder = tmp_path / label
        done = forked(runs("alone").parent / "run.toml", folder, *RUN, *options, *GENTLE, *more, processes=processes)
        assert done.statuses == [0] * processes, done.said
        found[label] = torch.tensor(metrics(folder, "loss", "grad_norm"))
    off = {label: (values / found["exact"] - 1).abs().amax(0) for label, values in found.items()}
    assert (off["alone"] > 0).all()
    assert (off["alone"] < 0.01).all()
    assert (off["mesh"] < 0.01).all()


NARROW = ("--training.dtype=float32", "--memory.optimizer_dtype=bfloat16")


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "dp_shard 2 x tp 2",
                "pp 2 Interleaved1F1B, state on the host",
                "dp_replicate 2 x cp 2, state on the host",
            )
        ),
    ],
)
def test_moments_in_bfloat16_on_a_mesh_are_those_of_one_process(runs: Runs, tmp_path: Path, name: str) -> None:
    config, found, kept = runs("alone").parent / "run.toml", [], []
    for place, mesh_name in (("alone", "alone"), ("mesh", name)):
        processes, options = MESHES[mesh_name]
        done = forked(config, tmp_path / place, *RUN, *options, *GENTLE, *NARROW, processes=processes)
        assert done.statuses == [0] * processes, done.said
        found.append(torch.tensor(metrics(tmp_path / place, "loss", "grad_norm")))
        kept.append(tensors(tmp_path / place / "checkpoints" / f"step-{UPDATES}"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)
    ours, theirs = kept
    assert {x.dtype for key, x in ours.items() if "exp_avg" in key} == {torch.bfloat16}
    for key, tensor in theirs.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            ours[key], tensor, rtol=0.02, atol=0.01 * scale if "exp_avg" in key else 1e-3 * scale
        )


@pytest.mark.parametrize("moments", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_state_on_the_host_changes_no_bit_of_a_run(runs: Runs, tmp_path: Path, moments: str) -> None:
    """Where blocks are updated when they next run, and micro-batches are several."""
    config, places = runs("alone").parent / "run.toml", ("device", "host")
    for place in places:
        options = (f"--memory.optimizer_placement={place}", f"--memory.optimizer_dtype={moments}", *HALF, *FULL)
        done = forked(config, tmp_path / place, *RUN, *options, processes=2)
        assert done.statuses == [0, 0], done.said
    assert metrics(tmp_path / "host", "loss", "grad_norm") == metrics(tmp_path / "device", "loss", "grad_norm")
    for step in ("step-2", f"step-{UPDATES}"):
        ours, theirs = (digests(tmp_path / place / "checkpoints" / step) for place in places)
        assert ours == theirs


RESHARDED = [
    ("cp 2 x tp 2 x pp 2", "alone", False),
    ("cp 2 x tp 2 x pp 2", "pp 2 ZBVZeroBubble", False),
    ("cp 2 x tp 2 x pp 2", "dp_shard 3, a place empty", True),
    ("cp 2 x tp 2 x pp 2", "dp_shard 2 x tp 2", True),
    ("alone", "tp 2 x pp 2", False),
    ("alone", "dp_replicate 2 x dp_shard 2 x tp 2", True),
    ("pp 2 ZBVZeroBubble", "cp 4 ring", True),
    ("pp 2 ZBVZeroBubble", "pp 2 Interleaved1F1B", True),
    ("dp_replicate 2 x dp_shard 2", "pp 2 DualPipeV", True),
    ("dp_shard 2 x tp 2", "dp_shard 2 x pp 2 ZBVZeroBubble", True),
    ("dp_shard 2 x tp 2", "tp 2, loss whole", True),
    ("dp_shard 2 x tp 2", "tp 4, key heads shared", True),
    ("cp 4 ring", "alone", True),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*names, marks=[pytest.mark.slow] if slow else []) for *names, slow in RESHARDED],
)
def test_a_checkpoint_of_one_mesh_is_continued_on_another(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(runs(before), folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{UPDATES}")
    processes, options = MESHES[after]
    done = forked(runs(before).parent / "run.toml", folder, *RUN, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    assert f"resumed from {folder}/checkpoints/step-2: next are step 3 and sequence 16" in done.said
    assert_same_run(folder, runs("alone"))
    assert_same_state(folder, runs("alone"))
    assert metrics(folder, "loss")[:2] == metrics(runs(before), "loss")[:2]


QUICK = ("dp_shard 2 x cp 2 ulysses", "cp 2 x tp 2 x pp 2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MESHES]
)
def test_a_run_that_was_resumed_on_its_mesh_is_bit_by_bit_the_same(runs: Runs, tmp_path: Path, name: str) -> None:
    folder, whole = tmp_path / "copied", runs(name)
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{UPDATES}")
    processes, options = MESHES[name]
    done = forked(whole.parent / "run.toml", folder, *RUN, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    assert f"resumed from {folder}/checkpoints/step-2: next are step 3 and sequence 16" in done.said
    assert metrics(folder, "step", "loss", "grad_norm") == metrics(whole, "step", "loss", "grad_norm")
    assert digests(folder / "checkpoints" / f"step-{UPDATES}") == digests(whole / "checkpoints" / f"step-{UPDATES}")
