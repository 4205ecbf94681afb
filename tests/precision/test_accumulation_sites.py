"""Every sum of tensors in the product is in the grid of accumulators, or has a reason not to
be.
"""

from __future__ import annotations

from tests.precision.grid import ACCUMULATORS, EXCEPTIONS
from tests.precision.sites import accumulation_sites

TP_SUMS = "activations that tp ranks sum"
# By function: its sums, and the accumulator of the grid.
IN_GRID = {
    "models.kernels.accumulate_grads": ("+= += +=", "attention: score blocks"),
    "models.kernels._plain_forward": ("logsumexp", "attention: query heads"),
    "models.kernels._plain_backward": ("sum sum sum", "attention: query heads"),
    "models.linear.EmbeddingFunction.backward": (
        "embedding_dense_backward",
        "embedding: equal tokens",
    ),
    "models.loss_head.EagerSoftmax.statistics": ("sum", "loss head: chunks"),
    "models.loss_head.row_statistics": ("sum", "loss head: chunks"),
    "models.wide_products.add_weight_grad": ("+= addmm addmm_", "loss head: chunks"),
    "models.norm.rstd": ("all_reduce vector_norm", "norm statistics: width"),
    "models.norm.rms_norm_backward": ("all_reduce mean sum", "norm weight: tokens"),
    "models.norm.RMSNormFunction.backward": ("+=", "head norm: chunks"),
    "models.dispatch._sum": ("embedding_bag", "experts: rows of a token"),
    "models.tiling.GradAccumulator.add": ("add_", "weight gradients: tiles"),
    "parallelisms.mesh.collectives.all_reduce": ("all_reduce", "softmax: vocabulary shards"),
    "parallelisms.mesh.collectives.reduce_scatter_async": (
        "_reduce_scatter_single",
        "all-gather: ranks' dk, dv",
    ),
    "parallelisms.mesh.collectives.reduce_scatter_tokens": ("reduce_scatter_tensor", TP_SUMS),
    "parallelisms.mesh.collectives.all_reduce_functional": (
        "all_reduce",
        "weights that tp ranks share",
    ),
    "parallelisms.context.ring.Ring.send_grads": ("+=", "ring: hops of dk, dv"),
    "parallelisms.context.ring.AllGather.send_grads": (
        "reduce_scatter",
        "all-gather: ranks' dk, dv",
    ),
    "parallelisms.context.ring.RingAttentionCore._exchange": (
        "reduce_scatter_async",
        "all-gather: ranks' dk, dv",
    ),
    "parallelisms.context.ring.backward": ("+=", "attention: pieces of KV"),
    "models.online_softmax.OnlineSoftmax.merge": ("lerp_ logaddexp", "attention: pieces of KV"),
    "parallelisms.context.ulysses.SeqToHeads.backward": ("sum", "Ulysses: repeated KV heads"),
    "parallelisms.fsdp.apply": ("fully_shard fully_shard", "FSDP ranks, 2 replicas"),
    "parallelisms.tensor_parallel": ("reduce_scatter_tokens reduce_scatter_tokens", TP_SUMS),
    "parallelisms.tensor_parallel.TensorParallelizer.sequence_parallel_comm": (
        "all_reduce_functional reduce_scatter_tokens",
        TP_SUMS,
    ),
    "parallelisms.tensor_parallel.TensorParallelizer.parallelize_head": (
        "all_reduce",
        "softmax: vocabulary shards",
    ),
    "parallelisms.tensor_parallel._all_reduce": ("all_reduce_functional", TP_SUMS),
    "trainer.step.optimizer.Optimizer.__init__": ("all_reduce", "gradient norm: tensors"),
    "trainer.step.optimizer.Optimizer.grad_norm": ("get_total_norm sum", "gradient norm: tensors"),
    "trainer.step.trainer._build_optimizer": ("all_reduce", "gradient norm: tensors"),
    "trainer.step.trainer.Trainer.accumulate_gradients": ("all_reduce sum", "micro-batches"),
    "trainer.metrics.accumulator.MetricAccumulator.add": (
        "+= += += += += += += += index_add_ sum sum",
        "micro-batches",
    ),
    "trainer.run.validation.evaluate_dataset": ("all_reduce", "metrics: ranks"),
    "trainer.metrics.accumulator.MetricAccumulator.all_reduce": ("all_reduce", "metrics: ranks"),
}
INTEGERS = "integers"
FLOAT64 = "in float64"
TWO = (
    "the residual stream: two terms per half of a block, in the compute dtype, however many parts"
)
LOSS = "float32 losses; only the gradient of the sum is used, which is constant"
INTEGER_MODULES = (
    "models.ranges",
    "models.score_blocks",
    "parallelisms.context.attention_plan",
    "parallelisms.context.batch_layout",
)
"""They have int64 tensors only."""
EXEMPT = {
    "models.batch.Batch.num_targets": ("sum", INTEGERS),
    "models.online_softmax.add_sink": ("logaddexp", "two terms, in float32"),
    "models.online_softmax.sink_grad": ("sum sum", "heads and tokens, in float32"),
    "models.kernel_check.matching_sample": ("sum", "the score of a drawn sample"),
    "models.kernel_check.row_scales": ("mean", FLOAT64),
    "models.kernel_reference.exact_results": (
        "+= += += += logaddexp logsumexp sum sum sum",
        FLOAT64,
    ),
    "models.kernel_reference.last_query_on_host": ("logsumexp sum", FLOAT64),
    "models.kernel_reference.term_sizes": ("+= += += += sum sum", FLOAT64),
    "models.kernels._efficient_backward": (
        "sum sum",
        "one float32 sum over query heads, each rounded once; CUDA only",
    ),
    "parallelisms.init_weights.initialize": ("mean mean", "a number"),
    "models.experts.GroupedFeedForward.backward": ("sum", INTEGERS),
    "models.experts.EagerBetween.with_last_bias": ("+=", "an expert's output and its bias"),
    "models.experts._joined": ("+=", INTEGERS),
    "models.experts._part_backward": ("+ += +=", "two terms, in float32 or as in autograd; lists"),
    "models.decode.KVCacheCore.__call__": ("+", INTEGERS),
    "models.experts._parts": ("+ sum", INTEGERS),
    "models.experts.weighted_gate": ("+ +", "a product and its bias"),
    "models.loss_head.LinearTokenLoss.forward": ("sum", "its gradient is one for each token"),
    "models.experts.EagerBetween._with_biases_": ("+=", "a product and its bias"),
    "models.experts._row_dots": ("sum", "the width of an expert, in float32"),
    "models.experts._sum_by_expert": ("sum", "biases: over tokens, in float32"),
    "models.row_groups.padded_ends": ("cumsum", INTEGERS),
    "models.row_groups.padded_shifts": ("cumsum", INTEGERS),
    "parallelisms.expert_parallel._places": ("cumsum cumsum cumsum sum sum", INTEGERS),
    "models.moe.MixtureOfExperts._loads": ("mean sum", FLOAT64),
    "models.moe.MixtureOfExperts.choose": ("+ sum", "two terms, in float32"),
    "models.moe.MixtureOfExperts.route": ("sum", "integers"),
    "models.moe.MixtureOfExperts.route.add_up": ("+=", "float64"),
    "models.router.ScoreRule.weights": ("sum", "experts of a token, in float32"),
    "models.router.probabilities": ("sum", "experts, in float32"),
    "models.router.tile_sums": ("logsumexp sum sum sum sum sum sum", FLOAT64),
    "models.router.weights_and_loss": (
        "logsumexp sum sum sum",
        "experts, in float32; losses, of which only the gradient is used",
    ),
    "models.sublayer.Sublayer.after": ("+", "a product and its bias"),
    "parallelisms.expert_parallel.AllToAll.__init__": ("sum", INTEGERS),
    "parallelisms.expert_parallel.RankDispatcher._route": ("sum sum sum", INTEGERS),
    "parallelisms.expert_parallel.RankDispatcher.sum_over_sequence": ("all_reduce", FLOAT64),
    "parallelisms.expert_parallel._all_reduce": ("all_reduce", "activations that tp ranks sum"),
    "parallelisms.expert_parallel._reduce_rows": (
        "sum",
        "one sum over tp ranks, in float32, rounded once",
    ),
    "parallelisms.expert_recompute.ExpertHalf._agree_on_tiles": ("+=", "a list"),
    "parallelisms.expert_recompute.ExpertHalf.backward.compute_tile": ("add_", TWO),
    "parallelisms.expert_recompute.ExpertHalf.forward.compute_tile": ("add_", TWO),
    "parallelisms.sublayer_pass.SublayerPass.last_grad": (
        "sum",
        "biases: over tokens, in float32",
    ),
    "trainer.step.rerun.StepRerun._loss": ("all_reduce", FLOAT64),
    "trainer.step.routers.Routers.adjust": (
        "mean",
        "float64 counts",
    ),
    "trainer.step.routers.Routers.end_step": ("all_reduce", FLOAT64),
    "trainer.step.routers.router_metrics": (
        "+= += += += mean mean sum sum sum",
        "floats of Python",
    ),
    "models.sublayer.input_grad": ("addmm_", "two or three matrices, as in autograd"),
    "parallelisms.activation_offload.HostActivationPool.has_headroom": ("sum", INTEGERS),
    "parallelisms.activation_offload.HostActivationPool.offload": ("+= sum", INTEGERS),
    "parallelisms.activation_offload.allocated_size": ("sum", INTEGERS),
    "parallelisms.activation_offload.HostActivationPool._allocate": ("+=", INTEGERS),
    "parallelisms.block_recompute.BlockCompute.attention_backward": ("add_", TWO),
    "parallelisms.block_recompute.BlockCompute.feed_forward_backward.compute_tile": ("add_", TWO),
    "parallelisms.sublayer_pass.SublayerPass.residual": ("add_", TWO),
    "parallelisms.sublayer_pass.SublayerPass.linears_backward": (
        "sum",
        "biases: over tokens, in float32",
    ),
    "parallelisms.mesh.collectives": (
        "_reduce_scatter_single",
        "its name in two versions of torch",
    ),
    "parallelisms.mesh.collectives.all_to_all_tokens_async": ("sum", INTEGERS),
    "parallelisms.context.ring.HaloGrads.wait": ("+=", "one term per rank, in float32"),
    "parallelisms.mesh.collectives.all_reduce_max": ("all_reduce", "a maximum"),
    "parallelisms.layer_check._problems": ("sum", INTEGERS),
    "parallelisms.layer_check._unused": ("sum", FLOAT64),
    "parallelisms.gradient_check._gradients": (
        "sum sum sum sum sum",
        "integers; the loss of a float64 sample",
    ),
    "parallelisms.context.ring.AllGather": ("reduce_scatter", "a field"),
    "parallelisms.tensor_parallel.TensorParallelizer.mean_over_ranks": (
        "all_reduce_functional",
        "norm statistics: a number per rank, in float32",
    ),
    "parallelisms.pipeline.Pipeline.run.scaled_loss": ("sum", LOSS),
    "trainer.evaluation.needle.PasskeySentences.max_overhead": ("sum", INTEGERS),
    "trainer.evaluation.needle.evaluate_length": ("all_reduce sum", FLOAT64),
    "trainer.evaluation.needle.evaluate_length.record": ("index_add_ sum", FLOAT64),
    "trainer.metrics.accumulator.MetricAccumulator.__init__": ("sum", INTEGERS),
    "trainer.step.added_parts.verify_loss": ("sum", "three losses, whose value nobody reads"),
    "trainer.step.build.build_host_pool": ("sum", INTEGERS),
    "trainer.step.build.require_right_gradients": ("+=", "a list"),
    "trainer.step.trainer.Trainer.train_steps": (
        "+= sum sum",
        "integers; numbers of pairs, floats of Python",
    ),
    "trainer.step.trainer.Trainer.forward_backward": ("sum", LOSS),
    "trainer.step.trainer.Trainer.optimizer_step": (
        "+= all_reduce",
        "integers; the metric vector",
    ),
}


def test_every_sum_of_tensors_is_in_the_grid_or_exempt() -> None:
    assert not IN_GRID.keys() & EXEMPT.keys()
    found = {
        name: sums
        for name, sums in accumulation_sites().items()
        if not name.startswith(INTEGER_MODULES)
    }
    assert found == {name: sums for name, (sums, _) in (IN_GRID | EXEMPT).items()}


def test_every_accumulator_named_is_in_the_grid() -> None:
    names = {accumulator.name for accumulator in (*ACCUMULATORS, *EXCEPTIONS)}
    assert {accumulator for _, accumulator in IN_GRID.values()} <= names
