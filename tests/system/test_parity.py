"""In float64, meshes compute the same run, with its files, and checkpoints resume on any mesh.

All other settings and meshes are those of the random configurations
(tests/selfcheck/test_random_configs.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.runs import digests, forked, metrics, state, tensors, write_run

pytestmark = pytest.mark.ranks

Options = tuple[str, ...]
STEPS = 3
# Eight sequences: with three data-parallel ranks, one of nine micro-batches is empty.
RUN: Options = (
    "--model.num_layers=4",
    "--training.dtype=float64",
    "--training.global_batch_size=8",
    f"--training.steps={STEPS}",
    "--checkpoint.interval=2",
)
FULL = ("--memory.recompute=full",)
KEEP = ("--memory.recompute=keep_attention",)
OPTIMIZER_ON_HOST = ("--memory.optimizer_placement=host",)
EVERYTHING = (
    *KEEP,
    "--memory.offload=inputs_and_attention",
    "--memory.blocks_per_checkpoint=2",
    "--memory.mlp_tile_mib=1",
    "--memory.head_groups=2",
)
TIED = ("--model.family=qwen3",)  # It also has QK norm.
# With two pipeline stages, the first layer of the second one has no rope. A larger eps keeps AdamW
# from amplifying gradients that are only rounding.
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


def mesh(*, method: str = "auto", schedule: str = "1F1B", **degrees: int) -> tuple[int, Options]:
    """Number of ranks, with dp_shard = 1 unless given, and options."""
    stated: dict[str, Any] = dict(degrees)
    if degrees.get("cp", 1) > 1:
        stated["cp_method"] = method
    if degrees.get("pp", 1) > 1:
        stated["pp_schedule"] = schedule
    return prod(degrees.values()), tuple(
        f"--parallelism.{key}={value}" for key, value in stated.items()
    )


def case(
    name: str, ranks_and_options: tuple[int, Options], *more: Options, slow: bool = False
) -> tuple[str, int, Options, bool]:
    ranks, options = ranks_and_options
    return name, ranks, (*options, *(option for options in more for option in options)), slow


CASES = [
    case("dp_shard 3, an empty micro-batch", mesh(dp_shard=3), slow=True),
    case("dp_replicate 2 x dp_shard 2", mesh(dp_replicate=2, dp_shard=2), slow=True),
    case("dp_shard 2 x tp 2", mesh(dp_shard=2, tp=2), KEEP, slow=True),
    case("dp_replicate 2 x dp_shard 2 x tp 2", mesh(dp_replicate=2, dp_shard=2, tp=2), slow=True),
    case(
        "dp_replicate 2 x cp 2, optimizer on the host",
        mesh(dp_replicate=2, cp=2),
        OPTIMIZER_ON_HOST,
        slow=True,
    ),
    case("cp 4 ring", mesh(cp=4, method="ring"), KEEP, slow=True),
    case(
        "tp 2, no loss parallelism", mesh(tp=2), ("--parallelism.loss_parallel=false",), slow=True
    ),
    case("tp 4, replicated KV heads", mesh(tp=4), slow=True),
    case("pp 2 Interleaved1F1B", mesh(pp=2, schedule="Interleaved1F1B"), FULL, slow=True),
    case(
        "pp 2 Interleaved1F1B, optimizer on the host",
        mesh(pp=2, schedule="Interleaved1F1B"),
        OPTIMIZER_ON_HOST,
        slow=True,
    ),
    case("pp 2 GPipe", mesh(pp=2, schedule="GPipe"), slow=True),
    case(
        "dp_shard 2 x pp 2 Interleaved1F1B",
        mesh(dp_shard=2, pp=2, schedule="Interleaved1F1B"),
        slow=True,
    ),
    case("tp 2 x pp 2", mesh(tp=2, pp=2), KEEP, slow=True),
    case(
        "cp 2 x tp 2 x pp 2",
        mesh(cp=2, tp=2, pp=2, method="ring", schedule="Interleaved1F1B"),
        KEEP,
        slow=True,
    ),
    case("tied, dp_shard 2 x tp 2", mesh(dp_shard=2, tp=2), TIED, slow=True),
    # Heads normalised, some layers not rotated, frequencies stretched
    case(
        "mixed, cp 2 x tp 2 x pp 2, everything",
        mesh(cp=2, tp=2, pp=2),
        MIXED,
        EVERYTHING,
        slow=True,
    ),
]
REFERENCES = {"one rank": (), "tied": TIED, "mixed": MIXED}
MESHES = {name: (1, options) for name, options in REFERENCES.items()} | {
    name: (ranks, options) for name, ranks, options, _ in CASES
}
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns the folder of a mesh's run by its name; runs it at the first call."""
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
        torch.tensor(metrics(path, "loss", "grad_norm"), dtype=torch.float64)
        for path in (folder, reference)
    )
    assert ours.shape == (STEPS, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def assert_same_state(folder: Path, reference: Path) -> None:
    """Weights and optimizer state after the last step, relative to the largest value of each
    tensor.
    """
    ours, theirs = (
        tensors(path / "checkpoints" / f"step-{STEPS}") for path in (folder, reference)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        atol = 1e-11 * float(tensor.abs().max())
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=name)
    mine, other = (
        state(path / "checkpoints" / f"step-{STEPS}")["trainer"] for path in (folder, reference)
    )
    # Timings differ.
    assert [side.pop("goodput")["productive_seconds"] > 0 for side in (mine, other)] == [
        True,
        True,
    ]
    assert mine["losses"].pop("losses") == pytest.approx(other["losses"].pop("losses"), rel=1e-11)
    assert mine == other


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if slow else []) for name, _, _, slow in CASES],
)
def test_every_mesh_matches_one_rank(runs: Runs, name: str) -> None:
    kind = name.partition(",")[0]
    reference = runs(kind if kind in REFERENCES else "one rank")
    assert_same_run(runs(name), reference)
    assert_same_state(runs(name), reference)


def test_the_reference_run_moves_all_weights_and_clips_gradients(runs: Runs) -> None:
    first, last = (
        tensors(runs("one rank") / "checkpoints" / step) for step in ("step-2", f"step-{STEPS}")
    )
    for key in first:
        assert not torch.equal(first[key], last[key]), f"{key} did not change"
    norms = [norm for (norm,) in metrics(runs("one rank"), "grad_norm")]
    assert max(norms) > 1 > 0.1 * min(norms) > 0, "clipping should take effect"


HALF = ("--training.dtype=bfloat16",)
# Otherwise rounding grows from step to step, on one rank, too.
GENTLE = ("--optimizer.lr=1e-3",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("dp_shard 2 x tp 2", "cp 2 x tp 2 x pp 2")
    ],
)
def test_bfloat16_on_a_mesh_is_as_accurate_as_on_one_rank(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    found = {}
    for label, mesh_name, more in (
        ("exact", "one rank", ()),
        ("one rank", "one rank", HALF),
        ("mesh", name, HALF),
    ):
        processes, options = MESHES[mesh_name]
        folder = tmp_path / label
        done = forked(
            runs("one rank").parent / "run.toml",
            folder,
            *RUN,
            *options,
            *GENTLE,
            *more,
            processes=processes,
        )
        assert done.statuses == [0] * processes, done.said
        found[label] = torch.tensor(metrics(folder, "loss", "grad_norm"))
    off = {label: (values / found["exact"] - 1).abs().amax(0) for label, values in found.items()}
    assert (off["one rank"] > 0).all()
    assert (off["one rank"] < 0.01).all()
    assert (off["mesh"] < 0.01).all()


NARROW = ("--training.dtype=float32", "--memory.optimizer_dtype=bfloat16")


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "dp_shard 2 x tp 2",
                "pp 2 Interleaved1F1B, optimizer on the host",
                "dp_replicate 2 x cp 2, optimizer on the host",
            )
        ),
    ],
)
def test_bfloat16_optimizer_state_on_a_mesh_matches_one_rank(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    config = runs("one rank").parent / "run.toml"
    found = []
    kept = []
    for place, mesh_name in (("one rank", "one rank"), ("mesh", name)):
        processes, options = MESHES[mesh_name]
        done = forked(
            config, tmp_path / place, *RUN, *options, *GENTLE, *NARROW, processes=processes
        )
        assert done.statuses == [0] * processes, done.said
        found.append(torch.tensor(metrics(tmp_path / place, "loss", "grad_norm")))
        kept.append(tensors(tmp_path / place / "checkpoints" / f"step-{STEPS}"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)
    ours, theirs = kept
    assert {x.dtype for key, x in ours.items() if "exp_avg" in key} == {torch.bfloat16}
    for key, tensor in theirs.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            ours[key], tensor, rtol=0.02, atol=0.01 * scale if "exp_avg" in key else 1e-3 * scale
        )


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_optimizer_on_the_host_is_bitwise(runs: Runs, tmp_path: Path, moments: str) -> None:
    """With deferred updates and several micro-batches."""
    config = runs("one rank").parent / "run.toml"
    places = ("device", "host")
    for place in places:
        options = (
            f"--memory.optimizer_placement={place}",
            f"--memory.optimizer_dtype={moments}",
            *HALF,
            *FULL,
        )
        done = forked(config, tmp_path / place, *RUN, *options, processes=2)
        assert done.statuses == [0, 0], done.said
    assert metrics(tmp_path / "host", "loss", "grad_norm") == metrics(
        tmp_path / "device", "loss", "grad_norm"
    )
    for step in ("step-2", f"step-{STEPS}"):
        ours, theirs = (digests(tmp_path / place / "checkpoints" / step) for place in places)
        assert ours == theirs


RESHARDED = [
    ("tp 2 x pp 2", "one rank", False),
    ("cp 2 x tp 2 x pp 2", "one rank", True),
    ("cp 2 x tp 2 x pp 2", "pp 2 GPipe", True),
    ("cp 2 x tp 2 x pp 2", "dp_shard 3, an empty micro-batch", True),
    ("cp 2 x tp 2 x pp 2", "dp_shard 2 x tp 2", True),
    ("one rank", "tp 2 x pp 2", True),
    ("one rank", "dp_replicate 2 x dp_shard 2 x tp 2", True),
    ("pp 2 GPipe", "pp 2 Interleaved1F1B", True),
    ("pp 2 Interleaved1F1B", "cp 4 ring", True),
    ("dp_replicate 2 x dp_shard 2", "pp 2 Interleaved1F1B", True),
    ("dp_shard 2 x tp 2", "dp_shard 2 x pp 2 Interleaved1F1B", True),
    ("dp_shard 2 x tp 2", "tp 2, no loss parallelism", True),
    ("dp_shard 2 x tp 2", "tp 4, replicated KV heads", True),
    ("cp 4 ring", "one rank", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*names, marks=[pytest.mark.slow] if slow else []) for *names, slow in RESHARDED],
)
def test_a_checkpoint_resumes_on_another_mesh(
    runs: Runs, tmp_path: Path, before: str, after: str
) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(runs(before), folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    processes, options = MESHES[after]
    done = forked(runs(before).parent / "run.toml", folder, *RUN, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    assert (
        f"resumed from {folder}/checkpoints/step-2: continuing with step 3, sequence 16"
        in done.said
    )
    assert_same_run(folder, runs("one rank"))
    assert_same_state(folder, runs("one rank"))
    assert metrics(folder, "loss")[:2] == metrics(runs(before), "loss")[:2]


QUICK = ("tp 2 x pp 2",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MESHES],
)
def test_resume_on_the_same_mesh_is_bitwise(runs: Runs, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copied"
    whole = runs(name)
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    processes, options = MESHES[name]
    done = forked(whole.parent / "run.toml", folder, *RUN, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    assert (
        f"resumed from {folder}/checkpoints/step-2: continuing with step 3, sequence 16"
        in done.said
    )
    assert metrics(folder, "step", "loss", "grad_norm") == metrics(
        whole, "step", "loss", "grad_norm"
    )
    assert digests(folder / "checkpoints" / f"step-{STEPS}") == digests(
        whole / "checkpoints" / f"step-{STEPS}"
    )
