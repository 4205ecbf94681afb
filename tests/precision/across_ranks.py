"""Accumulators across ranks and micro-batches. Every function here runs on each rank; ranks return
the same.

Shape suffixes: R ranks, S tokens of this rank, T tokens of all ranks, E model dim, V vocabulary, X
tokens, Y remote tokens, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from models.config import ModelConfig
from models.linear import Linear, local_parameter
from models.loss_head import LinearCrossEntropy, VocabShard
from models.norm import RMSNorm
from models.transformer import Transformer
from parallelisms import fsdp, tensor_parallel
from parallelisms.context.attention_plan import RingPlace, rank_attention_plan
from parallelisms.context.ring import RingAttentionCore
from parallelisms.context.ulysses import SeqToHeads, UlyssesGroup
from parallelisms.fsdp import FSDPConfig
from parallelisms.mesh import collectives
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.mesh.pipeline_plan import PipelinePlan, PipelineSchedule
from parallelisms.pipeline import Pipeline
from parallelisms.tensor_parallel import TensorParallelizer
from tests.models.small_models import SMALL, gradients, packed, small_model
from tests.precision.errors import Results, positive
from trainer.metrics.accumulator import MetricAccumulator

HALF = torch.bfloat16


def world() -> tuple[str, int, int]:
    """Name of the group of all ranks, their number, and this rank."""
    group = cast(distributed.ProcessGroup, distributed.group.WORLD)
    return group.group_name, group.size(), group.rank()


def mesh(axis: str, replicas: int = 1) -> Mesh:
    """All ranks along one dimension, or some of them along `dp_replicate`."""
    degrees = dict.fromkeys(AXES, 1) | {"dp_replicate": replicas}
    return Mesh(
        "cpu",
        degrees | {axis: distributed.get_world_size() // replicas},
        rank=distributed.get_rank(),
    )


def local_grad(parameter: Tensor) -> Tensor:
    return collectives.to_local(cast(Tensor, parameter.grad))


# ---- tensor parallelism


def shared_weights() -> Results:
    """Weights that tp ranks share: a norm of heads, and a KV projection of which each rank uses
    the same head.
    """
    _, size, rank = world()
    parallelizer = TensorParallelizer(init_device_mesh("cpu", (size,)), sequence_parallel=True)
    norm = RMSNorm(512, eps=1e-6).to(HALF)
    projection = Linear(64, 8).to(HALF)
    parallelizer.distribute(norm, "replicate_partial")
    parallelizer.distribute(projection, "replicate")
    parallelizer.select_kv_head(projection, 1)
    results = {}
    modules: dict[str, RMSNorm | Linear] = {"norm": norm, "projection": projection}
    for name, module in modules.items():
        grads = positive(size, *module.weight.shape)
        local_parameter(module).backward(grads[rank])
        results[name] = (local_grad(module.weight), grads.double().sum(0))
    return results


def sharded_vocabulary() -> Results:
    name, size, rank = world()
    group = collectives.resolve_process_group(name)
    x_BSE = positive(1, 64, 8)
    weight_VE = positive(64, 8, seed=1)
    labels_BS = torch.arange(64).view(1, 64)
    shard = VocabShard(
        vocab_start_index=rank * 64 // size,
        num_shards=size,
        all_reduce_max=partial(collectives.all_reduce_max, group),
        all_reduce_sum=partial(collectives.all_reduce, group),
    )
    losses_BS = LinearCrossEntropy.apply(x_BSE, weight_VE.chunk(size)[rank], labels_BS, 16, shard)
    # Products rounded to bfloat16 are the input of the sums over the vocabulary.
    logits_BSV = (x_BSE @ weight_VE.T).double()
    return {"loss": (losses_BS[0], F.cross_entropy(logits_BSV[0], labels_BS[0], reduction="none"))}


def tp_activations() -> Results:
    """Partial sums of o_proj and down_proj, in the compute dtype."""
    name, size, rank = world()
    parts_RBTE = positive(size, 1, 64, 16)
    total_BTE = parts_RBTE.double().sum(0)
    scattered = tensor_parallel.ReduceScatter.apply(parts_RBTE[rank], name, size)
    reduced = tensor_parallel.AllReduce.apply(parts_RBTE[rank], name, size)
    return {
        "reduce-scatter": (scattered, total_BTE.chunk(size, dim=1)[rank]),
        "all-reduce": (reduced, total_BTE),
    }


# ---- context parallelism


def gathered_kv(reduce_dtype: torch.dtype = torch.float32) -> Results:
    """The gradients of gathered KV: a reduce-scatter."""
    name, size, rank = world()
    boundaries_12 = torch.tensor([[0, 32 * size]], dtype=torch.int32)
    core = RingAttentionCore("allgather", "headtail", name, reduce_dtype, "plain")
    q_BSNH = torch.empty(1, 32, 1, 8, dtype=HALF)
    exchange = core.exchange(q_BSNH, q_BSNH, boundaries_12)
    dkv = torch.empty(0)
    exact_RX = torch.zeros(size * 2 * 32, 1, 8, dtype=torch.float64)
    for source in range(size):
        plan = rank_attention_plan(
            boundaries_12, 1, 32 * size, RingPlace("headtail", size, source)
        )
        index_2Y = plan.remote_kv_index(q_BSNH.device)
        dkv_2YKH = positive(*index_2Y.shape, 1, 8, seed=source).float()
        exact_RX[index_2Y.flatten()] += dkv_2YKH.double().flatten(0, 1)
        if source == rank:
            pending = exchange.send_grads(dkv_2YKH, None)
            dkv = pending.wait()
    return {"dkv": (dkv, exact_RX.view(size, 2, 32, 1, 8)[rank])}


def repeated_kv_heads() -> Results:
    """Ulysses over more ranks than KV heads: with autograd, and below it."""
    name, size, rank = world()
    group = UlyssesGroup(name, size)
    x_BSKH = positive(1, 16, 1, 32)
    grads_RBTKH = positive(size, 1, 16 * size, 1, 32, seed=1)
    group.seq_to_heads(x_BSKH.requires_grad_()).backward(grads_RBTKH[rank])
    exact_BSKH = grads_RBTKH.double().sum(0).chunk(size, dim=1)[rank]
    started = SeqToHeads(x_BSKH.detach(), group)
    started.wait()
    return {
        "autograd": (local_grad(x_BSKH), exact_BSKH),
        "manual": (started.backward(grads_RBTKH[rank]), exact_BSKH),
    }


# ---- data parallelism and micro-batches

ONE_LAYER = replace(SMALL, num_layers=1)
# Parts differ, because the sum of two equal ones needs no rounding.
BATCHES = [packed([20], seed=seed) for seed in range(3)]


def sharded(
    model: Transformer, on: Mesh, reduce_dtype: torch.dtype = torch.float32
) -> Transformer:
    precision = FSDPConfig(
        param_dtype=HALF, reduce_dtype=reduce_dtype, reshard_after_forward=False
    )
    fsdp.apply(model, on.fsdp_mesh, precision)
    return model


def summed_grads(models: list[Transformer], parts: int, config: ModelConfig = SMALL) -> Results:
    """The gradients of a model or its stages, against the sum of those of `parts`
    micro-batches.
    """
    exact: dict[str, Tensor] = {}
    whole = small_model(config, dtype=torch.float32).to(HALF)
    for number, batch in enumerate(BATCHES[:parts]):
        count = len(range(number, parts, len(BATCHES)))
        for name, grad in gradients(whole, batch)[1].items():
            exact[name] = exact.get(name, 0) + count * grad.double()
    return {
        name: (collectives.full_tensor(cast(Tensor, x.grad)), exact[name])
        for model in models
        for name, x in model.named_parameters()
    }


def run_batch(model: Transformer, number: int) -> None:
    batch = BATCHES[number % len(BATCHES)]
    (model(batch).sum() / batch.num_targets()).backward()


def data_parallel(replicas: int, reduce_dtype: torch.dtype = torch.float32) -> Results:
    """Ranks with a micro-batch each: FSDP's reduce-scatter, then the all-reduce between
    replicas.
    """
    model = sharded(
        small_model(ONE_LAYER, dtype=torch.float32), mesh("dp_shard", replicas), reduce_dtype
    )
    run_batch(model, distributed.get_rank())
    return summed_grads([model], distributed.get_world_size(), ONE_LAYER)


def pipelined(schedule: PipelineSchedule, parts: int) -> Results:
    """Micro-batches in a pipeline over all ranks."""
    on = mesh("pp")
    plan = PipelinePlan(
        pp=on.size, schedule=schedule, num_layers=SMALL.num_layers, num_micro_batches=parts
    )
    weights = small_model(dtype=torch.float32).state_dict()
    stages = {}
    for stage in plan.stages_of(on.rank):
        model = Transformer(SMALL, stage=plan.stage_module(stage))
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        stages[stage] = sharded(model, on)
    pipeline = Pipeline(
        stages, plan, on.pp_group, device=torch.device("cpu"), shape=(1, 20, SMALL.dim), dtype=HALF
    )
    batches = [BATCHES[number % len(BATCHES)] for number in range(parts)]
    pipeline.run(batches, BATCHES[0].num_targets(), lambda *_: None)
    return summed_grads([*stages.values()], parts)


def metrics() -> Results:
    """The metric vector of one batch per rank."""
    accumulator = MetricAccumulator(mesh("dp_shard"), torch.device("cpu"))
    vector = accumulator.new_vector()
    losses_BS = positive(1, 20).float()
    accumulator.add(vector, losses_BS, BATCHES[0])
    found = accumulator.all_reduce(vector)
    total = distributed.get_world_size() * losses_BS.double().sum().view(1)
    return {name: (found[name], total) for name in ("loss", "loss_by_shard")}


# With the dtype of the results.
ACCUMULATORS: dict[str, tuple[Callable[[], Results], torch.dtype]] = {
    "weights that tp ranks share": (shared_weights, HALF),
    "softmax: vocabulary shards": (sharded_vocabulary, torch.float32),
    "all-gather: ranks' dk, dv": (gathered_kv, torch.float32),
    "Ulysses: repeated KV heads": (repeated_kv_heads, HALF),
    "FSDP ranks, 2 replicas": (partial(data_parallel, 2), torch.float32),
    "metrics: ranks": (metrics, torch.float32),
}
EXCEPTIONS: dict[str, Callable[[], Results]] = {
    "activations that tp ranks sum": tp_activations,
    'parallelism.cp_reduce_dtype = "bfloat16", all-gather': partial(gathered_kv, HALF),
    'training.reduce_dtype = "bfloat16"': partial(data_parallel, 2, HALF),
}


def all_results() -> dict[str, Results]:
    """Every accumulator above, so that processes meet once."""
    results = {name: compute() for name, (compute, _) in ACCUMULATORS.items()}
    return results | {name: compute() for name, compute in EXCEPTIONS.items()}
