"""One seed gives bitwise the same initial weights on every mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, distributed

from models.config import ModelConfig
from models.transformer import Transformer
from parallelisms import fsdp
from parallelisms.init_weights import initialize, normal_rows
from parallelisms.mesh.collectives import full_tensor
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from tests.models.small_models import SMALL
from tests.ranks import run_ranks

# Two random blocks in the embedding; numbers of rows not divisible by the ranks, and fewer rows
# than ranks.
CONFIG = replace(SMALL, vocab_size=5003, num_kv_heads=1, head_dim=2)
TIED = replace(CONFIG, tie_embeddings=True)


def initial_weights(
    config: ModelConfig, sizes: dict[str, int], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    mesh = Mesh("cpu", {axis: sizes.get(axis, 1) for axis in AXES}, rank=distributed.get_rank())
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    fsdp_config = fsdp.FSDPConfig(
        param_dtype=dtype, reduce_dtype=dtype, reshard_after_forward=True
    )
    fsdp.apply(model, mesh.fsdp_mesh, fsdp_config)
    initialize(model, seed=seed, device=torch.device("cpu"))
    assert (
        model.get_parameter("head.proj.weight") is model.get_parameter("embed.weight")
    ) == config.tie_embeddings
    return {name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()}


def single_process_weights(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    initialize(model, seed=seed, device=torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


cached_weights = cache(single_process_weights)


@pytest.mark.ranks
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"dp_shard": 3},
        {"dp_replicate": 2, "dp_shard": 2},
        *(
            pytest.param(sizes, marks=pytest.mark.slow)
            for sizes in ({"dp_shard": 2}, {"dp_shard": 4})
        ),
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_seed_gives_bitwise_equal_weights_on_every_mesh(
    sizes: dict[str, int], config: ModelConfig
) -> None:
    expected = cached_weights(config)
    for found in run_ranks(
        initial_weights,
        sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1),
        config,
        sizes,
        0,
        torch.float32,
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tied_model_has_the_same_weights_as_untied() -> None:
    tied = cached_weights(TIED)
    untied = cached_weights(CONFIG)
    assert untied.keys() - tied.keys() == {"head.proj.weight"}
    assert all(torch.equal(tied[name], untied[name]) for name in tied)


def test_float64_model_starts_from_the_same_values() -> None:
    double = single_process_weights(CONFIG, dtype=torch.float64)
    assert all(
        torch.equal(double[name], tensor.double())
        for name, tensor in cached_weights(CONFIG).items()
    )


def test_seeds_and_parameter_names_give_different_values() -> None:
    first = cached_weights(CONFIG)
    second = single_process_weights(CONFIG, seed=1)
    matrices = [name for name, tensor in first.items() if tensor.ndim == 2]
    assert not any((first[name] == second[name]).any() for name in matrices)
    layers = [first[f"blocks.{layer}.feed_forward.up_proj.weight"] for layer in (0, 1)]
    assert not (layers[0] == layers[1]).any()
    assert not (first["embed.weight"] == first["head.proj.weight"]).any()


def test_weights_are_normal_with_init_std_norms_are_one_and_biases_zero() -> None:
    config = replace(
        SMALL,
        vocab_size=3000,
        dim=128,
        ffn_dim=512,
        num_kv_heads=4,
        head_dim=32,
        num_layers=8,
        qkv_bias=True,
    )
    for name, tensor in single_process_weights(config).items():
        if tensor.ndim == 1:
            assert tensor.eq(0 if name.endswith(".bias") else 1).all()
            continue
        expected = 0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        noise = tensor.numel() ** -0.5
        assert float(tensor.mean()) == pytest.approx(0, abs=5 * noise * expected)
        assert float(tensor.std()) == pytest.approx(expected, rel=5 * noise)
        assert float((tensor.abs() < expected).double().mean()) == pytest.approx(
            0.6827, abs=5 * noise
        )


@pytest.mark.parametrize(
    ("rows", "width"), [(37, 16), (5003, 16), (10, 1 << 16), (3, 100_000), (1 << 17, 1)]
)
def test_any_range_of_rows_equals_the_slice_of_the_matrix(rows: int, width: int) -> None:
    shape = torch.Size((rows, width))
    everything = normal_rows(shape, std=0.5, key="0/name", first_row=0, end_row=rows)
    assert everything.shape == shape
    assert not (everything[1:] == everything[:-1]).all(-1).any()
    generator = torch.Generator().manual_seed(0)
    bounds = torch.randint(rows + 1, (10, 2), generator=generator).sort(1).values.tolist()
    for first, last in [*bounds, (0, 0), (rows, rows), (rows - 1, rows), (0, 1)]:
        assert torch.equal(
            normal_rows(shape, std=0.5, key="0/name", first_row=first, end_row=last),
            everything[first:last],
        )


def test_global_rng_state_is_unchanged() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    single_process_weights(SMALL)
    assert torch.equal(torch.get_rng_state(), state)
