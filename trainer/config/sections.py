"""The sections of a configuration: every key, its type, its range and, in its docstring, its `--help`.

Nothing here imports torch. What keys of several sections mean together is `trainer/config/job_config.py`.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from models.config import ModelConfig
from models.presets import FAMILIES
from parallelisms.parallel_dims import AXES


def require_non_empty(value: object) -> object:
    # An unset variable in a shell, which as a path would mean the current folder.
    if value == "":
        raise ValueError("must not be empty")
    return value


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmptyPath = Annotated[Path, BeforeValidator(require_non_empty)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]

MAX_SEQ_LEN = 2**31 - 1  # tokens: kernels take the starts of documents as int32
OPTIMIZER_CHUNK_ELEMENTS = 1 << 22  # elements whose moments are widened at once: trainer/optim/optimizer.py


class Section(BaseModel):
    """What every section is: frozen, without unknown keys, each field documented by the string below it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """What the file writes, and about what: a key that is a word of Python's has a field of another name."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}


class JobSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run: letters, digits, `.`, `_` and `-`."""
    output_dir: NonEmptyPath | None = None
    """The run folder: configuration, metrics, checkpoints, TensorBoard files. Left out: `outputs/<job.name>`."""
    max_minutes: PositiveFloat | None = None
    """How long the run may last from the start of its launcher, restarts included: it saves and leaves in time, to be started again. Left out: as long as SLURM says, if it does (SLURM_JOB_END_TIME)."""


class RopeSection(Section):
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] | None = None
    """How frequencies are stretched: `default` (not at all: for ABF raise `theta`), `linear` (all alike), `llama3` (by wavelength, as Llama 3.1 does), `yarn` (by turns, and scores sharpened), `longrope` (each by its own factor)."""
    theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary frequencies."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """By how much the context is extended beyond `original_length`. For all kinds but `default`, which do nothing without it."""
    low_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths above `original_length / low_freq_factor` are stretched by the whole factor."""
    high_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths below `original_length / high_freq_factor` stay as they are."""
    original_length: PositiveInt | None = None
    """Tokens of context that the frequencies were first trained for."""
    beta_fast: PositiveFloat | None = None
    """`yarn`: frequencies that turn more often than this over `original_length` stay as they are."""
    beta_slow: PositiveFloat | None = None
    """`yarn`: frequencies that turn less often than this over `original_length` are stretched by the whole factor."""
    truncate: bool | None = None
    """`yarn`: whether the ramp between the two begins and ends at whole frequencies."""
    attention_factor: PositiveFloat | None = None
    """`yarn` and `longrope`: what cosine and sine are multiplied by. Left out: 0.1 ln(factor) + 1, and sqrt(1 + ln(factor) / ln(original_length))."""
    short_factors: tuple[float, ...] | None = None
    """`longrope`: what each frequency is divided by where training.seq_len is at most `original_length`; half as many as `head_dim`."""
    long_factors: tuple[float, ...] | None = None
    """`longrope`: the same for longer rows."""
    precision: Literal["float64", "float32"] | None = None
    """Type of angles. `float32` is off by 0.05 rad at position 1M, and bit by bit what Hugging Face computes."""


class ModelSection(Section):
    """A preset, and what differs from it: a key that is left out is the preset's."""

    family: str = "llama3"
    """Family of presets."""
    size: str = "debug"
    """Preset of that family."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and of the head; at least the tokenizer's vocabulary."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    num_layers: PositiveInt | None = None
    """Transformer blocks."""
    num_heads: PositiveInt | None = None
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads; `num_heads` must be a multiple."""
    head_dim: PositiveInt | None = None
    """Width of a head."""
    ffn_dim: PositiveInt | None = None
    """Inner width of the feed-forward."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool | None = None
    """Whether the head uses the embedding's weight."""
    qk_norm: bool | None = None
    """Whether each head of queries and keys is normalised before it is rotated, as in Qwen3."""
    nope_every: PositiveInt | None = None
    """Each layer whose number, from 1 on, is a multiple of this has no rotary embedding, as each 4th of SmolLM3. Left out: as the preset."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding, where it differs from the preset's."""

    def build(self) -> ModelConfig:
        """The preset with the keys given here put over it. The family and size must exist."""
        return _build_model_config(self)

    def problems(self) -> list[str]:
        if self.family not in FAMILIES:
            return [f'model.family = "{self.family}" is unknown; there are {", ".join(FAMILIES)}']
        sizes = FAMILIES[self.family]
        if self.size not in sizes:
            return [f'model.size = "{self.size}" is unknown; family "{self.family}" has {", ".join(sizes)}']
        model = self.build()
        rope_keys = [key for key, value in self.rope if value is not None]
        return [*model.rope.unused_keys(rope_keys), *model.problems()]


class TrainingSection(Section):
    seq_len: Annotated[int, Field(ge=2)] = 2048
    """Tokens in a row."""
    global_batch_size: PositiveInt = 8
    """Rows in one update, over all ranks and micro-batches."""
    micro_batch_size: PositiveInt = 1
    """Rows that a rank carries through the model at once."""
    steps: PositiveInt = 100
    """Updates in the whole run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights and the order of the data."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """`bfloat16`: compute in bfloat16 over float32 weights; `float32`; `float64`: everything, to prove parity."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which bfloat16 gradients are summed over ranks; float32 and float64 runs keep their own."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "plain", "fa3", "fa4"] = "auto"
    """Kernel of attention on CUDA; `auto` takes what suits device, type and documents, and says so. A CPU has one."""
    compile: bool = False
    """Compile each block with torch.compile."""
    deterministic: bool = False
    """Refuse kernels whose result depends on timing."""
    gc_interval: PositiveInt = 50
    """Updates between collections of Python's garbage, at the same step on all ranks; automatic collection is off."""


class ParallelismSection(Section):
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt | None = None
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). Left out: the remaining ranks."""
    cp: PositiveInt = 1
    """Ranks that share one row's tokens (context parallelism)."""
    cp_method: Literal["auto", "allgather", "ring", "alltoall", "ulysses", "hybrid"] = "auto"
    """How they attend to each other's tokens: keys and values are gathered, go round a ring or are sent one by one; heads are exchanged for tokens (`ulysses`); or both (`hybrid`)."""
    cp_layout: Literal["auto", "headtail", "balanced", "doc_headtail", "contiguous"] = "auto"
    """Which tokens of a row each of them holds. `auto` takes what suits the method."""
    cp_ulysses: PositiveInt | None = None
    """`hybrid`: ranks that exchange heads. Left out: as many as a node's ranks and the heads allow."""
    cp_outer_method: Literal["auto", "ring", "alltoall", "allgather"] = "auto"
    """`hybrid`: how keys and values reach the other groups of `cp_ulysses` ranks."""
    cp_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients of keys and values travel between cp ranks in bfloat16 runs; float32 and float64 runs keep their own."""
    ranks_per_node: PositiveInt = 8
    """Ranks joined by fast links (NVLink): `auto` and `hybrid` without `cp_ulysses` exchange heads only among them."""
    tp: PositiveInt = 1
    """Ranks that share each matrix (tensor parallelism)."""
    sequence_parallel: bool = True
    """Whether tp ranks also share the tokens of norms and of the residual stream, instead of holding all of them."""
    loss_parallel: bool = True
    """Whether tp ranks share the vocabulary of the head; else each has all of it."""
    async_tp: bool = False
    """Overlap the communication of tp with its matrix products: compiled, on CUDA devices joined by NVLink."""
    pp: PositiveInt = 1
    """Ranks that share the layers (pipeline parallelism)."""
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"] = (
        "1F1B"
    )
    """Order in which stages run the micro-batches of an update."""
    pp_stages_per_rank: PositiveInt | None = None
    """Stages on each pp rank. Left out: 1, or 2 for schedules that need several."""
    pp_layers: tuple[NonNegativeInt, ...] | None = None
    """Blocks of each stage, first to last. Left out: balanced, embedding and head counted as part of a block."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are freed after its forward and gathered again for its backward. A pipeline keeps them: it would gather them for every micro-batch."""

    def degrees(self, world_size: int) -> dict[str, int]:
        """The size of each axis, in mesh order; an axis that was left out takes the remaining ranks."""
        degrees = {axis: getattr(self, axis) or 1 for axis in AXES}
        if self.dp_shard is None:
            degrees["dp_shard"] = max(1, world_size // prod(degrees.values()))
        return degrees

    def problems(self, world_size: int) -> list[str]:
        degrees = self.degrees(world_size)
        if prod(degrees.values()) == world_size:
            return []
        product = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
        needed = prod(degrees.values())
        return [
            f"the mesh {product} needs {needed:,} processes, but there are {world_size:,} (NGPU x NNODES, or torchrun's)"
        ]


class MemorySection(Section):
    recompute: Literal["none", "full", "keep_attention", "auto"] = "keep_attention"
    """What the backward pass computes again instead of keeping: nothing, every block, or (`keep_attention`) everything but attention's output and log-sum-exp. `auto` takes the fastest that is predicted to fit, with those of the following levers that are not given."""
    device_gib: PositiveFloat | None = None
    """Memory of a device in GiB, for `auto`. Left out: what it has; a CPU's rank has its part of the machine."""
    offload: Literal["none", "inputs", "inputs_and_attention"] = "none"
    """What blocks keep in host memory instead of on the device: nothing, their inputs, or also attention's output and log-sum-exp."""
    host_budget_gib: PositiveFloat | None = None
    """Host memory of a node for that, in GiB; what finds no room stays on the device, or is computed again. Left out: no limit."""
    blocks_per_checkpoint: PositiveInt = 1
    """Of so many blocks, one keeps its input; the others' are computed again from it, which takes no attention unless a budget leaves no room for what that gave."""
    head_groups: PositiveInt = 1
    """Groups of key/value heads that attention takes one after the other, so that what it holds in passing is divided by them."""
    mlp_tile_mib: PositiveInt | None = None
    """Memory for one tile of tokens, in MiB, by which blocks compute all but attention. Left out: all tokens at once."""
    loss_chunk_mib: PositiveInt = 256
    """Memory for one chunk of logits, in MiB; logits never exist whole."""
    optimizer_placement: Literal["device", "host"] = "device"
    """Where parameters, gradients and optimizer state lie between uses; `host` fetches each block when it runs, and updates on the CPU."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW's two moments are kept; they change in float32 and are rounded to nearest. float64 runs keep their own."""

    def problems(self) -> list[str]:
        defaults = {"offload": "none", "blocks_per_checkpoint": 1, "head_groups": 1, "mlp_tile_mib": None}
        non_default = {key: getattr(self, key) for key, default in defaults.items() if getattr(self, key) != default}
        problems = []
        if self.recompute == "none":
            problems += [
                f'memory.{key} = {_toml_literal(value)} needs memory.recompute = "full" or "keep_attention": with "none" autograd '
                "keeps what a block computes"
                for key, value in non_default.items()
            ]
        elif self.recompute == "full":
            unsupported = {"offload": "inputs_and_attention"} | (
                {"blocks_per_checkpoint": self.blocks_per_checkpoint} if self.blocks_per_checkpoint > 1 else {}
            )
            problems += [
                f'memory.{key} = {_toml_literal(value)} needs memory.recompute = "keep_attention", not "full"'
                for key, value in unsupported.items()
                if non_default.get(key) == value
            ]
        if self.host_budget_gib is not None and self.offload == "none" and self.recompute != "auto":
            problems.append(f'memory.host_budget_gib = {self.host_budget_gib} has no use with memory.offload = "none"')
        if self.device_gib is not None and self.recompute != "auto":
            problems.append(f'memory.device_gib = {self.device_gib} is for memory.recompute = "auto"')
        return problems


class OptimizerSection(Section):
    name: Literal["adamw"] = "adamw"
    """AdamW (Loshchilov & Hutter, 2019)."""
    lr: PositiveFloat = 3e-4
    """Highest learning rate, reached after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of matrices; norms are not decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm over the whole mesh; a huge value only measures."""


class ScheduleSection(Section):
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: half a cosine, a line, warm-up-stable-decay (constant, then a line), or constant."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises from zero."""
    decay_steps: PositiveInt | None = None
    """`wsd`: updates of the final decay. Left out: a tenth of the run."""
    min_lr_factor: Fraction = 0.1
    """Learning rate at the last update, as a fraction of the highest."""
    over: Literal["stage", "run"] = "stage"
    """Whether the curve is that of each stage, and starts again with it, or one over all stages."""


class CheckpointSection(Section):
    enabled: bool = True
    """Whether checkpoints are written, and resumed from."""
    interval: PositiveInt = 500
    """Updates between checkpoints; the last update is always saved."""
    interval_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, by the first rank's clock, in addition. Left out: updates alone count."""
    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints of updates that are a multiple of this are kept for ever."""
    asynchronous: bool = Field(default=True, alias="async")
    """Whether they are written while training goes on, from a copy on the host that takes as much memory as the state."""
    initial_load_path: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """Weights that a new run begins with, its optimizer being new: `hf:` and the folder of a model in Hugging Face's format, or another run's folder or checkpoint. Left out: drawn at random."""


class MetricsSection(Section):
    log_interval: PositiveInt = 10
    """Updates between lines of metrics; the first and the last update are always logged."""
    peak_flops: PositiveFloat | None = None
    """Peak dense FLOP/s of a device, for MFU. Left out: looked up; a CPU has none, so MFU is absent there."""
    tensorboard: bool = True
    """Whether TensorBoard files are written."""


class HealthSection(Section):
    max_consecutive_skips: PositiveInt = 10
    """Updates in a row whose gradient is not finite after which the run stops for good."""
    spike_sigmas: PositiveFloat = 6.0
    """A loss so many standard deviations above the mean of the 128 before is told as a spike."""
    on_spike: Literal["tell", "roll_back"] = "tell"
    """`roll_back`: go on from the newest checkpoint, without the rows that were trained on since."""
    straggler_ratio: Annotated[float, Field(gt=1)] = 1.3
    """A rank that works so many times as long as the median, or waits so for data, three lines of metrics in a row, is told."""


class ProfilerSection(Section):
    trace_step: PositiveInt | None = None
    """First update of a torch.profiler trace, written to `logs/`. Left out: no trace."""
    trace_steps: PositiveInt = 1
    """Updates that the trace covers."""
    memory_step: PositiveInt | None = None
    """First update whose CUDA allocations are recorded, written to `logs/`, also when memory runs out."""
    memory_steps: PositiveInt = 1
    """Updates that the recording of memory covers."""


class DistributedSection(Section):
    start_timeout_minutes: PositiveInt = 30
    """How long a rank may wait for the others until the first update is done: for set-up, loading and compilation."""
    timeout_minutes: PositiveInt = 20
    """How long a rank may wait for the others once the first update is done, also while a checkpoint is written."""
    hang_minutes: PositiveFloat = 15.0
    """How long an update may last once the first is done, or ten times as long as the slowest of them: then every rank writes where it is, and ends."""
    restarts: NonNegativeInt = 2
    """How often in a row the launcher starts failed workers again without a new checkpoint in between; 0: never."""
    restart_seconds: NonNegativeInt = 10
    """What the launcher waits before that; twice as long each time, up to five minutes."""


@lru_cache(maxsize=64)
def _build_model_config(section: ModelSection) -> ModelConfig:
    """Plans ask for it a hundred times."""
    preset = FAMILIES[section.family][section.size]
    overrides: dict[str, Any] = {
        key: value for key, value in section if value is not None and key not in ("family", "size", "rope")
    }
    rope: dict[str, Any] = {key: value for key, value in section.rope if value is not None}
    return dataclasses.replace(preset, **overrides, rope=dataclasses.replace(preset.rope, **rope))


class PlanSection(Section):
    device: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """What plans are made for: a table by name (`h100-80gb`, `h200`, `a100-80gb`, ...), or a TOML file like those. Left out: the GPU that is here, if it is known; commands take h100-80gb without one."""


def _toml_literal(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name that is too long, or a folder that may not be looked into.
        return False
