"""The sections of a configuration: keys, types, ranges, and `--help` texts as docstrings.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
)
from pydantic.fields import FieldInfo

from parallelisms.mesh.parallel_dims import AXES


def require_non_empty(value: object) -> object:
    # An unset shell variable; as a path it would mean the current folder.
    if value == "":
        raise ValueError("must not be empty")
    return value


# of Linux
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095


def require_path(value: object) -> object:
    if "://" in str(value):
        raise ValueError("must be a local or mounted path, not a URL")
    # It would be a line of its own in a batch script.
    if any(not character.isprintable() for character in str(value)):
        raise ValueError("must not contain line breaks or other control characters")
    return require_non_empty(value)


REMOTE_SCHEMES = ("s3", "gs", "az")


def require_remote(value: object) -> object:
    """Whether it is a URL of a bucket and a prefix in it, without anything secret."""
    scheme, separator, rest = str(value).partition("://")
    if separator and ("@" in rest or "?" in rest):
        # The value is not quoted: it would be in logs.
        raise ValueError(
            "must not contain a user, password or query: credentials come from the environment"
        )
    if scheme not in REMOTE_SCHEMES or not re.fullmatch(r"[\w.-]+(/[\w.=+-]+)+/?", rest):
        raise ValueError(
            "must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX"
        )
    return value


def is_remote(value: object) -> bool:
    """Whether this is a URL of object storage, rather than a local path."""
    return str(value).startswith(tuple(f"{scheme}://" for scheme in REMOTE_SCHEMES))


def require_location(value: object) -> object:
    """Whether it is text that is not empty; a URL of object storage must keep its rules."""
    return require_remote(value) if is_remote(value) else require_non_empty(value)


def remote_url(path: object) -> str | None:
    """The URL that a path was made from, of which `Path` keeps one slash; None for a local one."""
    scheme, separator, rest = str(path).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}" if separator and scheme in REMOTE_SCHEMES else None


def require_path_or_url(value: object) -> object:
    """`require_path` that takes the URL of a folder of object storage, too."""
    return require_remote(value) if is_remote(value) else require_path(value)


INITIAL_FORMAT = re.compile(r"hf(-text)?:")


def require_initial(value: object) -> object:
    """Whether it names initial weights; a URL in it must keep the rules of URLs."""
    place = INITIAL_FORMAT.sub("", str(value), count=1)
    return value if is_remote(place) and require_remote(place) else require_non_empty(value)


def require_possible_name(path: Path) -> Path:
    parts = [len(os.fsencode(part)) for part in path.parts]
    if max(parts, default=0) > MAX_NAME_BYTES or sum(parts) + len(parts) > MAX_PATH_BYTES:
        raise ValueError(
            f"must have names of at most {MAX_NAME_BYTES} bytes, and {MAX_PATH_BYTES} in all"
        )
    return path


def as_tuple(value: object) -> object:
    """A tuple of one value or of a list's; any other value as it is."""
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


LENGTH = re.compile(r"(\d+(?:\.\d+)?)([KkMm])")


def read_length(value: object) -> object:
    """Tokens of a length as the field writes it: 128K is 131,072, 1.5M is 1,572,864.

    Anything else as it is.
    """
    if isinstance(value, str) and (found := LENGTH.fullmatch(value)):
        tokens = float(found[1]) * (1 << 10 if found[2] in "Kk" else 1 << 20)
        return int(tokens) if tokens.is_integer() else value
    return value


class LengthValidator(BeforeValidator):
    """Takes `128K` in place of an integer, and says so in the JSON schema."""

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        text = {"type": "string", "pattern": f"^{LENGTH.pattern}$", "examples": ["128K"]}
        return {"anyOf": [handler(core_schema), text]}


AsTokens = LengthValidator(read_length)
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NonEmptyPath = Annotated[Path, BeforeValidator(require_path)]
ExtensionReference = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]

# tokens: attention kernels take document offsets as int32
MAX_SEQ_LEN = 2**31 - 1
# moments converted to float32 at once: trainer/step/optimizer.py
OPTIMIZER_CHUNK_ELEMENTS = 1 << 22


def _join_lines(schema: dict[str, Any]) -> None:
    """Puts descriptions on one line each: they are docstrings, which our own lines wrap."""
    for described in (schema, *schema.get("properties", {}).values()):
        if "description" in described:
            described["description"] = " ".join(described["description"].split())


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, each field documented by the string below
    it.
    """

    # Frozen sections are hashable, so that `_build_model_config` can cache by them. Aliases are
    # keys that Python cannot name a field, such as `async`.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_join_lines,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """Fields by their TOML keys, which differ from the field names for Python keywords."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def describe(cls, key: str) -> str:
        """The description of a key on one line."""
        return " ".join(str(cls.fields_by_key()[key].description).split())


class JobSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")] = "run"
    """Name of the run: letters, digits, `.`, `_` and `-`, at most 200."""
    output_dir: Annotated[NonEmptyPath, AfterValidator(require_possible_name)] | None = None
    """The run folder: configuration, metrics, checkpoints, TensorBoard files; a local or mounted
    path. Left out: `outputs/<job.name>`.
    """
    extension: Annotated[tuple[ExtensionReference, ...], BeforeValidator(as_tuple)] = ()
    """Extensions, as `package.module:function`: code of yours that adds models, kinds of layers,
    trackers and hooks. Imported only from here, never because a run folder or checkpoint names
    it.
    """
    max_minutes: PositiveFloat | None = None
    """Time limit of the run from the launcher's start, restarts included; the run saves and exits
    in time to be started again. Left out: SLURM's limit, if there is one (SLURM_JOB_END_TIME).
    """


class TrainingSection(Section):
    seq_len: Annotated[int, Field(ge=2), AsTokens] = 2048
    """Tokens per sequence; here and wherever a length is taken, `128K` and `1M` are multiples of
    1024.
    """
    global_batch_size: PositiveInt = 8
    """Sequences per step, over all ranks and micro-batches."""
    micro_batch_size: PositiveInt = 1
    """Sequences per rank and forward pass; also the pipeline's micro-batch."""
    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """`bfloat16`: mixed precision, bfloat16 compute over float32 weights; `float32`; `float64`:
    everything, for parity tests.
    """
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of gradient reductions in bfloat16 runs; float32 and float64 runs reduce in their own
    type.
    """
    attention: Literal[
        "auto", "flash", "cudnn", "cudnn+flash", "efficient", "plain", "fa3", "fa4"
    ] = "auto"
    """Attention kernel on CUDA.

    `auto`: the fastest that passes the start-up check; `cudnn+flash`: `cudnn` for long blocks,
    `flash` for windows and short ones. CPUs have one kernel.
    """
    loss: str = "cross_entropy"
    """`cross_entropy`, or what an extension adds. Validation reports cross-entropy either way."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the load-balance loss of experts, summed over layers; 0.01 is common. 1 is its
    value for equal loads.
    """
    balance_over: Literal["step", "sequence"] = "step"
    """Which tokens' load `balance_loss` takes: those of a whole step (in its gradient, the step
    before), or those of each sequence.
    """
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits, summed over layers
    (ST-MoE).
    """
    correction_bias_rate: NonNegativeFloat = 0.0
    """Balances experts without a loss: by how much a step changes the bias of an expert whose load
    is not the mean, with model.correction_bias = true (DeepSeek-V3: 0.001).
    """
    compile: bool | Literal["auto"] = "auto"
    """Compile blocks and the loss head with torch.compile.

    `auto`: on CUDA, if the start-up check finds the same gradients and `deterministic` is false;
    it logs what it does.
    """
    deterministic: bool = False
    """Refuse kernels whose results are not reproducible."""
    gc_interval: PositiveInt = 50
    """Steps between garbage collections of Python, at the same step on all ranks; automatic
    collection is off.
    """

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, without padding."""
        return self.global_batch_size * self.seq_len


class ParallelismSection(Section):
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt | None = None
    """Ranks that shard parameters, gradients and optimizer state (FSDP2).

    Left out: the remaining ranks.
    """
    cp: PositiveInt = 1
    """Ranks that share the tokens of a sequence (context parallelism)."""
    cp_method: Literal["auto", "allgather", "ring", "alltoall", "ulysses", "hybrid"] = "auto"
    """How cp ranks exchange tokens: KV by all-gather, ring send-recv or all-to-all; heads for
    tokens by all-to-all (`ulysses`); or heads within and KV across groups (`hybrid`).
    """
    cp_layout: Literal["auto", "headtail", "balanced", "doc_headtail", "contiguous"] = "auto"
    """Which tokens of a sequence each cp rank holds. `auto` chooses by method."""
    cp_ulysses: PositiveInt | None = None
    """`hybrid`: ranks that exchange heads.

    Left out: as many as the ranks of a node and the heads allow.
    """
    cp_outer_method: Literal["auto", "ring", "alltoall", "allgather"] = "auto"
    """`hybrid`: how KV is exchanged across the groups of `cp_ulysses` ranks."""
    cp_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of KV gradients sent between cp ranks in bfloat16 runs; float32 and float64 runs keep
    their own.
    """
    ranks_per_node: PositiveInt = 8
    """Ranks joined by fast links (NVLink).

    `auto`, and `hybrid` without `cp_ulysses`, exchange heads only among them.
    """
    tp: PositiveInt = 1
    """Ranks that shard each weight matrix (tensor parallelism)."""
    sequence_parallel: bool = True
    """Whether tp ranks shard the tokens of norms and of the residual stream instead of replicating
    them.
    """
    loss_parallel: bool = True
    """Whether tp ranks shard the vocabulary of the output projection and loss."""
    async_tp: bool = False
    """Overlap tp communication with matrix products; needs torch.compile and CUDA devices joined
    by NVLink.
    """
    ep: PositiveInt = 1
    """Ranks of dp_shard x cp among which experts are distributed (expert parallelism); the rest of
    dp_shard x cp shards them as FSDP does.
    """
    pp: PositiveInt = 1
    """Ranks that share the layers (pipeline parallelism)."""
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = "1F1B"
    """Pipeline schedule."""
    pp_stages_per_rank: PositiveInt | None = None
    """Pipeline stages per pp rank. Left out: 2 for `Interleaved1F1B`, else 1."""
    pp_layers: tuple[NonNegativeInt, ...] | None = None
    """Blocks per pipeline stage, first to last.

    Left out: balanced, with embedding and output projection counted as fractions of a block.
    """
    pp_reduce_gradients: Literal["per_step", "per_micro_batch"] = "per_step"
    """When pipelines reduce-scatter gradients over dp and cp ranks.

    `per_micro_batch` keeps only shards of gradients in between, for as many times the
    communication.
    """
    reshard_after_forward: bool = True
    """Whether to free a block's gathered weights after its forward and gather them again for its
    backward. Pipelines keep them, since they would gather them for every micro-batch.
    """

    def degrees(self, world_size: int) -> dict[str, int]:
        """Size of each mesh dimension, in mesh order; dp_shard defaults to the remaining ranks."""
        degrees = {axis: getattr(self, axis) or 1 for axis in AXES}
        if self.dp_shard is None:
            # At least 1: a world that is too small is then reported as a mesh that needs more
            # processes.
            degrees["dp_shard"] = max(1, world_size // prod(degrees.values()))
        return degrees


MIN_LOSS_CHUNK_MIB = 256


class MemorySection(Section):
    recompute: Literal["none", "full", "keep_attention", "auto"] = "keep_attention"
    """Activation checkpointing: what the backward pass recomputes: nothing, every block, or
    (`keep_attention`) everything except attention's output and log-sum-exp. `auto` takes the
    fastest setting that is predicted to fit, choosing those of the keys below that are not
    given.
    """
    device_gib: PositiveFloat | None = None
    """Device memory in GiB, for `recompute` and `loss_chunk_mib`, if they are `auto`.

    Left out: the device's; a CPU rank has its share of the machine's.
    """
    offload: Literal["none", "inputs", "inputs_and_attention"] = "none"
    """Activations that blocks offload to host memory: none, their inputs, or also attention's
    output and log-sum-exp.
    """
    host_budget_gib: PositiveFloat | None = None
    """Host memory per node for offloading, in GiB; what exceeds it stays on the device or is
    recomputed. Left out: no limit.
    """
    blocks_per_checkpoint: PositiveInt = 1
    """One of this many blocks saves its input; the inputs of the others are recomputed from it,
    without running attention again unless `host_budget_gib` leaves no room for its output.
    """
    head_groups: PositiveInt = 1
    """Groups of KV heads that attention processes one after the other; divides attention's
    transient memory.
    """
    mlp_tile_mib: PositiveInt | None = None
    """Memory per tile of tokens in MiB, for everything in a block except attention.

    Left out: all tokens at once.
    """
    loss_chunk_mib: PositiveInt | Literal["auto"] = "auto"
    """Memory per chunk of logits in MiB; the full logits never exist.

    `auto` takes the fastest power of two from 256 to 4096 that fits the device, the smallest of
    equally fast ones, and 256 on a CPU.
    """
    optimizer_placement: Literal["device", "host"] = "device"
    """Where parameters, gradients and optimizer state are stored; `host` fetches each block when
    it runs and steps the optimizer on the CPU.
    """
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of AdamW's two moments in memory; they are updated in float32 and rounded to nearest.
    float64 runs keep their own.
    """

    @property
    def loss_chunk_bytes(self) -> int:
        """Bytes of a chunk of logits; the smallest for `auto`, until the device's memory is known."""
        return (MIN_LOSS_CHUNK_MIB if self.loss_chunk_mib == "auto" else self.loss_chunk_mib) << 20


class OptimizerSection(Section):
    name: str = "adamw"
    """`adamw` (Loshchilov & Hutter, 2019), or what an extension adds."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate, reached after warmup."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms are not decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping: maximum global norm. A huge value only measures."""


class ScheduleSection(Section):
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warmup: cosine decay, linear decay, warmup-stable-decay (constant, then linear), or
    constant.
    """
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: PositiveInt | None = None
    """`wsd`: steps of the final decay. Left out: a tenth of the run."""
    min_lr_factor: Fraction = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    over: Literal["stage", "run"] = "stage"
    """Whether each stage has its own curve, or one curve spans all stages."""


class CheckpointSection(Section):
    enabled: bool = True
    """Whether checkpoints are written and resumed from."""
    interval: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved."""
    interval_minutes: PositiveFloat | None = None
    """Additional limit in minutes between checkpoints, by rank 0's clock.

    Left out: only steps count.
    """
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted."""
    asynchronous: bool = Field(default=True, alias="async")
    """Whether to write checkpoints while training continues, from a host copy as large as the
    state.
    """
    memory_interval: PositiveInt | None = None
    """Steps between in-memory checkpoints, two per rank in the shared memory of its node and, with
    several nodes, two in that of the next; after a crash, a run resumes from them where they
    survive. Left out: none.
    """
    remote: Annotated[str, BeforeValidator(require_remote)] | None = None
    """URL under which each checkpoint is copied in the background, such as `s3://bucket/runs/x`;
    a launch resumes from there if no newer checkpoint is in the run folder. One run a URL. Left
    out: none.
    """
    initial_load_path: Annotated[str, BeforeValidator(require_initial)] | None = None
    """Initial weights of a new run, with a fresh optimizer: `hf:` and the folder of a model in
    Hugging Face's format (`hf-text:`, its language model alone), or the folder of another run or
    checkpoint. Each may be at a URL, as `hf:s3://bucket/models/x`. Left out: random.
    """
    initial_ignore_keys: tuple[str, ...] = ()
    """Keys of the `config.json` of `initial_load_path` that are unknown, and that the model does
    without, as `longhaul hf import --ignore-key` writes them.
    """


class MetricsSection(Section):
    log_interval: PositiveInt = 10
    """Steps between logged metrics; the first and last steps are always logged."""
    peak_flops: PositiveFloat | None = None
    """Peak dense FLOP/s of a device, for MFU.

    Left out: looked up; CPUs have none, so MFU is absent there.
    """
    tensorboard: bool = True
    """Whether TensorBoard files are written."""
    trackers: Annotated[
        tuple[Literal["wandb", "trackio", "mlflow"], ...], BeforeValidator(as_tuple)
    ] = ()
    """Trackers that metrics and events also go to: Weights & Biases, trackio, MLflow.

    Each is a package to install. They write to local files, unless your environment names a server
    or WANDB_MODE.
    """


class HealthSection(Section):
    max_consecutive_skips: PositiveInt = 10
    """Consecutive steps with a non-finite gradient after which the run fails permanently."""
    spike_sigmas: PositiveFloat = 6.0
    """A loss this many standard deviations above the mean of the previous 128 counts as a
    spike.
    """
    rerun_suspicious: bool = True
    """With training.deterministic, run a step whose loss or gradient norm jumps again before the
    optimizer updates weights: another result stops the run and names the rank, an equal one
    accuses the data.
    """
    on_spike: Literal["warn", "roll_back"] = "warn"
    """Reaction to a loss spike: log a warning, or `roll_back`: resume from the newest checkpoint
    and skip the sequences trained on since.
    """
    straggler_ratio: Annotated[float, Field(gt=1)] = 1.3
    """A rank counts as a straggler if its compute or data wait is this many times the median for
    three consecutive metrics lines; the log names it.
    """
    max_dead_experts_pct: Annotated[float, Field(ge=0, le=100)] = 50.0
    """Experts of a layer without tokens, in percent, above which the layer's router counts as
    collapsed after ten steps; the log names it.
    """
    check_replicas: bool = True
    """Compare, before every checkpoint, weights and optimizer moments that several ranks hold as
    copies; copies that differ are not saved. With tp, only if sequence_parallel and loss_parallel
    or training.deterministic keep copies equal.
    """
    replica_check_interval: PositiveInt | None = None
    """Steps between such checks, which then also run before every checkpoint.

    Left out: as `check_replicas` says.
    """


class ProfilerSection(Section):
    trace_step: PositiveInt | None = None
    """First step of a torch.profiler trace, written to `logs/`. Left out: no trace."""
    trace_steps: PositiveInt = 1
    """Steps in the trace."""
    memory_step: PositiveInt | None = None
    """First step of a recording of CUDA allocations, written to `logs/`, also on out-of-memory.

    Left out: no recording.
    """
    memory_steps: PositiveInt = 1
    """Steps in the memory recording."""


class DistributedSection(Section):
    start_timeout_minutes: PositiveInt = 30
    """Collective timeout until the first step completes: covers set-up, loading and
    compilation.
    """
    timeout_minutes: PositiveInt = 20
    """Collective timeout after the first step, also while a checkpoint is written."""
    hang_minutes: PositiveFloat = 15.0
    """Time limit of a step and of a save after the first, raised to ten times the slowest so far.

    Past it, every rank dumps its stack and exits.
    """
    restarts: NonNegativeInt = 2
    """Consecutive restarts of failed workers without a new checkpoint in between; 0: never
    restart.
    """
    restart_seconds: NonNegativeInt = 10
    """Delay in seconds before the restart that follows a launch without a new checkpoint; doubles
    each time, up to five minutes.
    """
    through_host: bool = False
    """Exchange tensors through host memory, over gloo instead of NCCL, so that ranks may share a
    GPU: to check a mesh on one card, slowly.
    """


class PlanSection(Section):
    device: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """Device to plan for: a table by name (`h100-80gb`, `h200`, `a100-80gb`, ...) or a TOML file
    of that format. Left out: the local GPU if it is known, else h100-80gb.
    """
