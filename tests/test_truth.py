"""Formulas that planner, metrics and a run of one process share, against tests/truth.py, over
grids of small cases.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch.nn import functional as F

from benchmarks import memory_grid
from models import attention_op, mxfp4
from models.config import ModelConfig
from models.feed_forward import GATES
from models.loss_head import LogitTransform
from models.ranges import concatenated_ranges
from models.rope_config import RopeConfig
from models.score_pairs import Windows, causal_pairs
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.mesh.context_plan import LAYOUTS_BY_ROTATE_METHOD, RotateMethod, ShardLayout
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.shard_layout import SeqLayout
from tests import truth
from tests.data.test_every_token import corpus
from tests.models.small_models import DEEPSEEK, GPT_OSS, OLMOE, SMALL, TIED, packed, starts
from trainer.config.parse import load
from trainer.config.sections import ScheduleSection
from trainer.data.packing import PackedDataset, Packing, pack_documents
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.evaluation.needle import FillerText, NeedleDataset, PasskeySentences, evaluate_length
from trainer.metrics.accumulator import MetricAccumulator, position_bucket_names
from trainer.step.build import ParallelModel
from trainer.step.lr_schedule import lr_factor
from trainer.step.process_group import process_group
from trainer.trace.record import trace_step

WINDOWS = (None, 1, 2, 3, 5, 8, 100)
DOCUMENTS = ([1], [7], [16], [3, 1, 5], [1, 1, 1], [9, 2, 4, 1])
LAYOUTS: tuple[ShardLayout, ...] = get_args(ShardLayout)


def test_the_truth_imports_nothing_of_the_product() -> None:
    tree = ast.parse(Path(truth.__file__).read_text())
    imported = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import from the package of the tests"
            imported.add(str(node.module))
    assert imported == {"__future__", "collections.abc", "math"}
    assert not {"importlib", "__import__", "eval", "exec"} & {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
    }


# ---- (query, key) pairs


@pytest.mark.parametrize("window", WINDOWS)
def test_pairs_of_documents_are_those_that_the_mask_allows(window: int | None) -> None:
    lengths = range(13)
    expected = [truth.attended_pairs([length], window) for length in lengths]
    assert [causal_pairs(length, window) for length in lengths] == expected
    assert causal_pairs(torch.arange(13), window).tolist() == expected


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_sees_the_pairs_that_the_mask_allows(
    documents: list[int], window: int | None
) -> None:
    """Compared with the attention of torch under the mask of the truth."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, sum(documents), 2, 4, generator=generator, dtype=torch.float64)
        for _ in range(3)
    )
    allowed = torch.tensor(truth.mask(truth.document_of(documents), window))
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    found, _ = attention_op.attention(q, k, v, starts(documents), window=window)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-12)


def queries_by_rank(layout: BatchLayout, ranks: int) -> list[list[int]]:
    spans = [layout.of_rank(rank) for rank in range(ranks)]
    return [concatenated_ranges(of_rank.start, of_rank.length).tolist() for of_rank in spans]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_rank_counts_the_keys_that_its_queries_see(
    kind: ShardLayout, window: int | None
) -> None:
    for ranks, documents in product(
        (1, 2, 3), ([24], [5, 1, 18], [11, 13], [1, 2, 3, 4, 5, 6, 3])
    ):
        layout = BatchLayout(kind, ranks, starts(documents))
        queries = queries_by_rank(layout, ranks)
        assert sorted(chain.from_iterable(queries)) == [*range(24)]
        allowed = truth.mask(truth.document_of(documents), window)
        expected = [sum(sum(allowed[query]) for query in of_rank) for of_rank in queries]
        assert layout.pairs_per_rank(window) == expected
        bounds = tuple(starts(documents)[0].tolist())
        assert [*SeqLayout(kind, ranks, bounds).pairs_per_rank(window)] == expected


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        pytest.param(
            method, each, marks=[pytest.mark.slow] * ((method, each) != ("ring", "contiguous"))
        )
        for method, layouts in LAYOUTS_BY_ROTATE_METHOD.items()
        for each in layouts
    ],
)
def test_traces_attend_to_the_pairs_of_every_rank(method: RotateMethod, layout: str) -> None:
    options = {
        "parallelism.cp": 2,
        "parallelism.cp_method": method,
        "parallelism.cp_layout": layout,
    }
    sizes = {
        "training.seq_len": 64,
        "training.global_batch_size": 1,
        "model.num_layers": 3,
        "model.layers": '[{"window":5},{"window":16},{}]',
    }
    config = memory_grid.configured({"data.corpus": "copy", **sizes, **options})
    model = config.model.build()
    kind: Any = config.context_plan().resolved_layout
    for rank, queries in enumerate(queries_by_rank(BatchLayout(kind, 2, starts([64])), 2)):
        pairs = 0
        for window in (5, 16, None):
            allowed = truth.mask([0] * 64, window)
            pairs += sum(sum(allowed[query]) for query in queries)
        found = trace_step(config, 2, rank).whole.work.attention_flops["forward"]
        assert found == 4 * model.num_heads * model.head_dim * pairs


# ---- FLOPs


def matrices(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of every product with a weight that a token takes part in."""
    heads = model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    for kind in model.layer_kinds:
        yield from (
            (heads, model.dim),
            (kv_heads, model.dim),
            (kv_heads, model.dim),
            (model.dim, heads),
        )
        gated = [model.ffn_dim]
        if kind.feed_forward == "moe":
            yield model.num_experts, model.dim
            gated = [model.expert_dim] * model.top_k + [
                model.shared_expert_dim or 0
            ] * kind.shared_expert
        for width in gated:
            yield from ((width, model.dim), (width, model.dim), (model.dim, width))
    yield model.vocab_size, model.dim


WINDOWED = replace(
    SMALL,
    num_layers=3,
    layers=tuple(replace(SMALL.layer_kinds[0], window=each) for each in (2, 6, None)),
)


@pytest.mark.parametrize("model", [SMALL, TIED, OLMOE, GPT_OSS, DEEPSEEK, WINDOWED])
def test_model_flops_are_those_of_every_product(model: ModelConfig) -> None:
    assert model.flops(tokens=9, pairs=0) == truth.matrix_flops([*matrices(model)], 9)
    of_scores = [
        truth.score_flops(model.num_heads, model.head_dim, truth.attended_pairs([9], kind.window))
        for kind in model.layer_kinds
    ]
    assert model.flops(tokens=0, pairs=model.mean_pairs(9)) == pytest.approx(
        sum(of_scores), rel=1e-14
    )


# ---- activations


INPUTS = [
    -40.0,
    -20.0,
    -9.0,
    -7.5,
    -6.5,
    -3.0,
    -1.0,
    -0.3,
    0.0,
    0.4,
    1.0,
    2.5,
    6.5,
    7.5,
    9.0,
    20.0,
    40.0,
]
GATES_BY_DEFINITION = {
    "silu": truth.swiglu,
    "gelu_tanh": truth.geglu,
    "clamped_swiglu": truth.clamped_swiglu,
}
STEP = 1e-5


def test_every_activation_has_a_definition() -> None:
    assert GATES_BY_DEFINITION.keys() == GATES.keys()


@pytest.mark.parametrize("name", GATES_BY_DEFINITION)
def test_activations_and_their_slopes_equal_the_definition(name: str) -> None:
    """Also beyond every limit; slopes as differences."""
    define = GATES_BY_DEFINITION[name]
    pairs = [*product(INPUTS, INPUTS)]
    gates, ups = (
        torch.tensor(side, dtype=torch.float64, requires_grad=True)
        for side in zip(*pairs, strict=True)
    )
    with torch.no_grad():
        plain = GATES[name](gates.clone(), ups.clone())
    out = GATES[name](gates * 1, ups * 1)
    expected = torch.tensor([define(*pair) for pair in pairs], dtype=torch.float64)
    for found in (plain, out.detach()):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = [
        (
            (define(g + STEP, u) - define(g - STEP, u)) / 2 / STEP,
            (define(g, u + STEP) - define(g, u - STEP)) / 2 / STEP,
        )
        for g, u in pairs
    ]
    for found, slope in zip(
        torch.autograd.grad(out.sum(), (gates, ups)), zip(*slopes, strict=True), strict=True
    ):
        torch.testing.assert_close(
            found, torch.tensor(slope, dtype=torch.float64), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps_of_logits_equal_the_definition(cap: float) -> None:
    found, _ = LogitTransform(scaling=2.0, softcap=cap).apply(
        torch.tensor(INPUTS, dtype=torch.float64)
    )
    expected = torch.tensor([truth.soft_cap(x / 2, cap) for x in INPUTS], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_part_of_a_head_has_the_dimensions_that_lie_in_it_wholly() -> None:
    for head_dim, fraction in product(
        (6, 8, 10, 64, 80), (0.25, 0.3, 0.4, 0.5, 0.55, 0.75, 0.95, 1.0)
    ):
        assert RopeConfig(partial=fraction).rotary_dim(head_dim) == truth.rotated_dimensions(
            head_dim, fraction
        )


# ---- sequences

CORPORA = ([7], [1, 1, 1, 1], [12, 3, 1, 30, 2, 2, 9], [5, 5, 5, 5, 5], [40, 1])
PACKINGS: tuple[Packing, ...] = get_args(Packing)
COUNTED: Windows = {None: 1, 3: 2}
"""Layers by window."""


def segments(tokens: Sequence[int], document_of: Sequence[int]) -> list[int]:
    """Lengths of the runs of consecutive tokens of one document."""
    lengths = [1]
    for before, token in pairwise(tokens):
        if token == before + 1 and document_of[token] == document_of[before]:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def pairs_of(lengths: Sequence[int]) -> float:
    return (
        sum(layers * truth.attended_pairs(lengths, window) for window, layers in COUNTED.items())
        / 3
    )


@pytest.mark.parametrize("mask", ["document", "none"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seq_len", [2, 5, 11, 64])
def test_sequences_have_the_labels_positions_and_pairs_of_the_definition(
    packing: Packing, seq_len: int, mask: Any
) -> None:
    for documents in CORPORA:
        prepared = corpus(documents)
        document_of = truth.document_of(documents)
        plan = pack_documents(prepared.document_lengths, seq_len=seq_len, packing=packing)
        dataset = BlendedDataset(
            [PackedDataset(prepared, plan, seed=0)], seq_len=seq_len, mask=mask, windows=COUNTED
        )
        for index in range(plan.num_sequences):
            batch = dataset.read([index])
            tokens = [token for token in batch.tokens[0].tolist() if token != prepared.eos]
            padding = seq_len - len(tokens)
            lengths = segments(tokens, document_of)
            labels = [truth.labels(documents, token, 1)[0] for token in tokens]
            assert batch.labels[0].tolist() == labels + [truth.NO_LABEL] * padding
            attended = lengths if mask == "document" else [len(tokens)]
            with_padding = [*lengths, padding] if mask == "document" else [seq_len]
            assert batch.positions[0].tolist() == truth.positions(with_padding)
            assert batch.num_tokens == len(tokens)
            assert batch.num_pairs == pytest.approx(pairs_of(attended))
            assert batch.num_computed_pairs == pytest.approx(pairs_of(with_padding))
            assert dataset.computed_pairs(index) == pytest.approx(pairs_of(with_padding))


# ---- metrics


def test_a_loss_counts_in_the_bucket_of_its_position() -> None:
    assert position_bucket_names() == [*truth.BUCKETS]
    edges = [covered.start for covered in truth.BUCKETS.values()]
    positions = sorted({max(0, edge + offset) for edge in edges for offset in (-2, -1, 0, 1, 2)})
    losses = [1 + 0.5**number for number in range(len(positions))]
    batch = packed([len(positions)])
    batch = replace(
        batch, positions=torch.tensor([positions]), labels=torch.zeros_like(batch.labels)
    )
    mesh = cast(Mesh, SimpleNamespace(degrees={"cp": 1}, coordinate={"cp": 0}))
    accumulator = MetricAccumulator(mesh, torch.device("cpu"))
    vector = accumulator.new_vector()
    accumulator.add(vector, torch.tensor([losses], dtype=torch.float64), batch)
    views = accumulator.layout.split(vector)
    for name, total, count in zip(
        truth.BUCKETS, views["loss_by_position"], views["targets_by_position"], strict=True
    ):
        inside = [
            loss
            for loss, position in zip(losses, positions, strict=True)
            if truth.bucket(position) == name
        ]
        assert float(total) == pytest.approx(sum(inside), rel=1e-14)
        assert int(count) == len(inside) > 2


TRIALS = 7
WIDTH = ByteTokenizer.vocab_size
"""With so many trials, the digits of the last number follow each other without contradiction."""
NORMED = (1 / WIDTH + 1e-5) ** -0.5
"""The one entry of a unit vector after the norm of the head."""


@contextmanager
def model_that_follows(successor: dict[int, int]) -> Iterator[ParallelModel]:
    """A model whose likeliest token depends on the one before it alone; in float64, on one
    process.

    Embeddings are unit vectors, attention and feed-forward add nothing, and the head has a row for
    each token.
    """
    sizes = {
        "dim": WIDTH,
        "vocab_size": WIDTH,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
    }
    options = [f"--model.{key}={value}" for key, value in sizes.items()]
    config = load(
        ["--data.corpus=copy", "--training.dtype=float64", "--training.seq_len=90", *options]
    )
    with process_group(config.distributed) as world:
        model = ParallelModel(config, world, kernel="plain")
        weights = dict(model.stage_modules[0].named_parameters())
        with torch.no_grad():
            weights["embed.weight"].copy_(torch.eye(WIDTH))
            for name, weight in weights.items():
                if name.endswith(("o_proj.weight", "down_proj.weight", "head.proj.weight")):
                    weight.zero_()
            for token, following in successor.items():
                weights["head.proj.weight"][following, token] = 1
        yield model


def test_a_needle_is_found_if_every_digit_is_the_likeliest() -> None:
    """The model knows every digit of one number, and some of the others."""
    letters = torch.arange(200) % 26 + ord("a")
    eos = 0
    prepared: Any = SimpleNamespace(
        document_starts=torch.tensor([0, 200]),
        eos=eos,
        fingerprint="",
        read=lambda start, stop: letters[start:stop],
    )
    text = FillerText(prepared, [0])
    sentences = PasskeySentences(ByteTokenizer())
    dataset = NeedleDataset(text, sentences, length=90, depths=2, trials=TRIALS)
    sequences = [dataset.sequence(number)[0].tolist() for number in range(2 * TRIALS)]
    successor = dict[int, int]()
    for sequence in reversed(sequences):
        for token, following in pairwise(sequence[-6:]):
            successor.setdefault(token, following)
    with model_that_follows(successor) as model:
        cells = evaluate_length(dataset, model)
    for depth, cell in enumerate(cells):
        found = []
        partly = []
        log_probabilities = []
        for sequence in sequences[depth::2]:
            predicted = [successor.get(token, 0) for token in sequence[-6:-1]]
            found.append(truth.is_found(predicted, sequence[-5:]))
            partly.append(
                any(guess == digit for guess, digit in zip(predicted, sequence[-5:], strict=True))
            )
            for guess, digit in zip(predicted, sequence[-5:], strict=True):
                logits = [0.0] * WIDTH
                logits[guess] = NORMED
                log_probabilities.append(truth.log_probability(logits, digit))
        assert cell.found == sum(found) / TRIALS == 1 / TRIALS
        assert sum(partly) > 3
        assert cell.log_probability == pytest.approx(
            sum(log_probabilities) / len(log_probabilities)
        )


# ---- learning rates, files


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_learning_rates_equal_the_definition(kind: Any) -> None:
    for steps, warmup, decay, floor in product(
        (1, 2, 7, 20), (0, 1, 3, 10), (None, 1, 5), (0.0, 0.3)
    ):
        if decay is not None and kind != "wsd":
            continue
        options = {
            "kind": kind,
            "warmup_steps": warmup,
            "min_lr_factor": floor,
            "decay_steps": decay,
        }
        schedule = ScheduleSection.model_validate(
            {key: each for key, each in options.items() if each is not None}
        )
        falling = max(1, steps // 10) if decay is None else decay
        for step in range(1, steps + 1):
            expected = truth.learning_rate(
                kind, step, steps, warmup=warmup, decay=falling, floor=floor
            )
            assert lr_factor(schedule, step=step, num_steps=steps) == pytest.approx(
                expected, rel=1e-12, abs=1e-15
            )


def test_every_byte_of_mxfp4_is_decoded_as_its_definition_says() -> None:
    packed_bytes = [[16 * row + column for column in range(16)] for row in range(16)]
    for scale in (0, 1, 100, 127, 140, 254, 255):
        blocks = torch.tensor(packed_bytes, dtype=torch.uint8).view(1, 1, 16, 16)
        scales = torch.full((1, 1, 16), scale, dtype=torch.uint8)
        found = mxfp4.dequantize(blocks, scales).view(16, 32)
        expected = torch.tensor(
            [truth.mxfp4(row, scale) for row in packed_bytes], dtype=torch.float64
        ).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
