"""A run, as data: every key of the TOML file, its type, its range and, in its docstring, its `--help`.

Nothing here imports torch: a configuration is checked, for the world size it would run at, in one process and in a
fraction of a second, before any worker starts. Reading files and the command line is `trainer/load.py`.
"""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from models import FAMILIES
from models.config import ModelConfig
from trainer.status import ConfigError


def _not_empty(value: object) -> object:
    # An unset variable in a shell, which as a path would mean the current folder.
    if value == "":
        raise ValueError("must not be empty")
    return value


Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Location = Annotated[Path, BeforeValidator(_not_empty)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]

LONGEST_ROW = 2**31 - 1  # tokens: kernels take the starts of documents as int32
BYTE_TOKENS = 264  # the byte tokenizer's: 256 values and 8 special tokens

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Section(BaseModel):
    """What every section is: frozen, without unknown keys, each field documented by the string below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class JobSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run: letters, digits, `.`, `_` and `-`."""
    output_dir: Location | None = None
    """The run folder: configuration, metrics, checkpoints, TensorBoard files. Left out: `outputs/<job.name>`."""


class RopeSection(Section):
    kind: Literal["default", "llama3"] | None = None
    """How frequencies are stretched: `default` (not at all), or `llama3` (by wavelength, as Llama 3.1 does)."""
    theta: Positive | None = None
    """Base of the rotary frequencies."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """By how much the context is extended beyond `original_length`."""
    low_freq_factor: Positive | None = None
    """`llama3`: wavelengths above `original_length / low_freq_factor` are stretched by the whole factor."""
    high_freq_factor: Positive | None = None
    """`llama3`: wavelengths below `original_length / high_freq_factor` stay as they are."""
    original_length: Count | None = None
    """Tokens of context that the frequencies were first trained for."""


class ModelSection(Section):
    """A preset, and what differs from it: a key that is left out is the preset's."""

    family: str = "llama3"
    """Family of presets."""
    size: str = "debug"
    """Preset of that family."""
    vocab_size: Count | None = None
    """Rows of the embedding and of the head; at least the tokenizer's vocabulary."""
    dim: Count | None = None
    """Width of the residual stream."""
    num_layers: Count | None = None
    """Transformer blocks."""
    num_heads: Count | None = None
    """Query heads."""
    num_kv_heads: Count | None = None
    """Key and value heads; `num_heads` must be a multiple."""
    head_dim: Count | None = None
    """Width of a head."""
    ffn_dim: Count | None = None
    """Inner width of the feed-forward."""
    norm_eps: Positive | None = None
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool | None = None
    """Whether the head uses the embedding's weight."""
    rope: RopeSection = RopeSection()
    """Rotary position embedding, where it differs from the preset's."""

    def build(self) -> ModelConfig:
        """The preset with the keys given here put over it. The family and size must exist."""
        preset = FAMILIES[self.family][self.size]
        given: dict[str, Any] = {
            key: value for key, value in self if value is not None and key not in ("family", "size", "rope")
        }
        rope: dict[str, Any] = {key: value for key, value in self.rope if value is not None}
        return dataclasses.replace(preset, **given, rope=dataclasses.replace(preset.rope, **rope))

    def problems(self) -> list[str]:
        if self.family not in FAMILIES:
            return [f'model.family = "{self.family}" is unknown; there are {", ".join(FAMILIES)}']
        sizes = FAMILIES[self.family]
        if self.size not in sizes:
            return [f'model.size = "{self.size}" is unknown; family "{self.family}" has {", ".join(sizes)}']
        built = self.build()
        if self.rope.factor is not None and built.rope.kind == "default":
            return [f'model.rope.factor = {self.rope.factor} has no use with model.rope.kind = "default"']
        return built.problems()


class TokenizerSection(Section):
    kind: Literal["byte", "tiktoken", "sentencepiece"] = "byte"
    """`byte` needs no file; `tiktoken` reads a BPE file (Llama 3's `tokenizer.model`), `sentencepiece` a model."""
    path: Location | None = None
    """The tokenizer's file; none for `byte`."""

    def problems(self) -> list[str]:
        if self.kind == "byte":
            return (
                [] if self.path is None else [f'tokenizer.path = "{self.path}" has no use with tokenizer.kind = "byte"']
            )
        if self.path is None:
            return [f'tokenizer.kind = "{self.kind}" needs tokenizer.path, the file to read']
        if not (_is_there(self.path) and self.path.is_file()):
            return [f'tokenizer.path = "{self.path}" is not a file']
        return []


class DataSection(Section):
    corpus: Annotated[str, BeforeValidator(_not_empty)] = "python-stdlib"
    """`python-stdlib` (the sources of the running interpreter's library), or a text or `.jsonl` file, or a folder."""
    documents: Literal["file", "repository"] = "file"
    """What is one document: a file (or a line of `.jsonl`), or all files of one top-level folder in path order."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Longest document in tokens, its first and last special ones included; longer ones are cut into several. Left out: uncut."""
    packing: Literal["best_fit", "concat", "single"] = "best_fit"
    """How documents fill rows: best-fit, end to end, or one per row."""
    mask: Literal["document", "none"] = "document"
    """Whether attention stays inside a document."""
    bad_files: Literal["skip", "refuse"] = "skip"
    """What to do about a file that cannot be read as text: name and skip it, or name it and stop."""
    cache_dir: Location = Path("prepared")
    """Where tokenized corpora are kept."""

    def problems(self) -> list[str]:
        if self.corpus == "python-stdlib" or _is_there(Path(self.corpus)):
            return []
        return [f'data.corpus = "{self.corpus}" is neither "python-stdlib" nor an existing file or folder']


class TrainingSection(Section):
    seq_len: Annotated[int, Field(ge=2)] = 2048
    """Tokens in a row."""
    global_batch_size: Count = 8
    """Rows in one update, over all ranks and micro-batches."""
    micro_batch_size: Count = 1
    """Rows that a rank carries through the model at once."""
    steps: Count = 100
    """Updates in the whole run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights and the order of the data."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """`bfloat16`: compute in bfloat16 over float32 weights; `float32`; `float64`: everything, to prove parity."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which bfloat16 gradients are summed over ranks; float32 and float64 runs keep their own."""
    compile: bool = False
    """Compile each block with torch.compile."""
    deterministic: bool = False
    """Refuse kernels whose result depends on timing."""
    gc_interval: Count = 50
    """Updates between collections of Python's garbage, at the same step on all ranks; automatic collection is off."""


class ParallelismSection(Section):
    dp_replicate: Count = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: Count | None = None
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). Left out: the remaining ranks."""
    cp: Count = 1
    """Ranks that share one row's tokens (context parallelism)."""
    tp: Count = 1
    """Ranks that share each matrix (tensor parallelism)."""
    pp: Count = 1
    """Stages that share the layers (pipeline parallelism)."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are freed after its forward and gathered again for its backward."""

    def degrees(self, world_size: int) -> dict[str, int]:
        """The size of each axis, in mesh order; an axis that was left out takes the remaining ranks."""
        stated = {axis: getattr(self, axis) or 1 for axis in AXES}
        if self.dp_shard is None:
            stated["dp_shard"] = max(1, world_size // prod(stated.values()))
        return stated

    def problems(self, world_size: int) -> list[str]:
        found = [
            f"parallelism.{axis} = {getattr(self, axis)} is not supported yet; it must be 1"
            for axis in ("cp", "tp", "pp")
            if getattr(self, axis) > 1
        ]
        degrees = self.degrees(world_size)
        if prod(degrees.values()) != world_size:
            product = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
            found.append(f"the mesh {product} needs {prod(degrees.values())} processes, but there are {world_size}")
        return found


class MemorySection(Section):
    recompute: Literal["none", "full"] = "none"
    """What the backward pass computes again instead of keeping: nothing, or every block."""
    head_chunk_mib: Count = 256
    """Memory for one chunk of logits, in MiB; logits never exist whole."""


class OptimizerSection(Section):
    name: Literal["adamw"] = "adamw"
    """AdamW (Loshchilov & Hutter, 2019)."""
    lr: Positive = 3e-4
    """Highest learning rate, reached after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of matrices; norms are not decayed."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm over the whole mesh; a huge value only measures."""


class ScheduleSection(Section):
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: half a cosine, a line, warm-up-stable-decay (constant, then a line), or constant."""
    warmup_steps: Amount = 0
    """Updates over which the learning rate rises from zero."""
    decay_steps: Count | None = None
    """`wsd`: updates of the final decay. Left out: a tenth of the run."""
    final: Fraction = 0.1
    """Learning rate at the last update, as a fraction of the highest."""


class CheckpointSection(Section):
    enabled: bool = True
    """Whether checkpoints are written, and resumed from."""
    interval: Count = 500
    """Updates between checkpoints; the last update is always saved."""
    keep: Count = 3
    """Newest checkpoints that are kept."""


class MetricsSection(Section):
    log_interval: Count = 10
    """Updates between lines of metrics; the first and the last update are always logged."""
    peak_flops: Positive | None = None
    """Peak dense FLOP/s of a device, for MFU. Left out: looked up; a CPU has none, so MFU is absent there."""
    tensorboard: bool = True
    """Whether TensorBoard files are written."""


class ProfilerSection(Section):
    trace_step: Count | None = None
    """First update of a torch.profiler trace, written to `logs/`. Left out: no trace."""
    trace_steps: Count = 1
    """Updates that the trace covers."""
    memory_step: Count | None = None
    """First update whose CUDA allocations are recorded, written to `logs/`, also when memory runs out."""
    memory_steps: Count = 1
    """Updates that the recording of memory covers."""


class DistributedSection(Section):
    timeout_minutes: Count = 30
    """How long a collective may take before the run is given up; the first includes set-up and compilation."""


class Config(Section):
    """A run of Longhaul."""

    job: JobSection = JobSection()
    """The run and its folder."""
    model: ModelSection = ModelSection()
    """What is trained."""
    tokenizer: TokenizerSection = TokenizerSection()
    """How text becomes tokens."""
    data: DataSection = DataSection()
    """What it is trained on."""
    training: TrainingSection = TrainingSection()
    """Batch, length and number of updates."""
    parallelism: ParallelismSection = ParallelismSection()
    """The mesh."""
    memory: MemorySection = MemorySection()
    """What is kept and what is computed again."""
    optimizer: OptimizerSection = OptimizerSection()
    """How weights are updated."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate over the run."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When state is saved."""
    metrics: MetricsSection = MetricsSection()
    """What is measured and when it is written."""
    profiler: ProfilerSection = ProfilerSection()
    """Traces and memory recordings."""
    distributed: DistributedSection = DistributedSection()
    """Processes and their patience."""

    @property
    def output_dir(self) -> Path:
        return self.job.output_dir or Path("outputs") / self.job.name

    def problems(self, world_size: int) -> list[str]:
        """Everything that would stop this run on `world_size` processes, all at once; empty when it can start."""
        found = [
            *self.model.problems(),
            *self.tokenizer.problems(),
            *self.data.problems(),
            *self.parallelism.problems(world_size),
        ]
        if self.tokenizer.kind == "byte" and not self.model.problems():
            found += self._vocabulary_problems(BYTE_TOKENS)
        if self.schedule.decay_steps is not None and self.schedule.kind != "wsd":
            decay, kind = self.schedule.decay_steps, self.schedule.kind
            found.append(f'schedule.decay_steps = {decay} has no use with schedule.kind = "{kind}"')
        return found + self._batch_problems() + self._profiler_problems()

    def require(self, world_size: int) -> None:
        """Raises `ConfigError` with all problems, if there are any."""
        if problems := self.problems(world_size):
            raise ConfigError(problems)

    def require_vocabulary(self, tokens: int) -> None:
        """Raises `ConfigError` unless the model has a row for each of the tokenizer's tokens."""
        if problems := self._vocabulary_problems(tokens):
            raise ConfigError(problems)

    def _vocabulary_problems(self, tokens: int) -> list[str]:
        size, kind = self.model.build().vocab_size, self.tokenizer.kind
        if tokens <= size:
            return []
        return [f'model.vocab_size = {size} must be at least {tokens}, the tokens of tokenizer.kind = "{kind}"']

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(micro-batches of one update, how many of them each data-parallel rank runs); the last may be empty."""
        degrees = self.parallelism.degrees(world_size)
        total = self.training.global_batch_size // self.training.micro_batch_size
        return total, -(-total // (degrees["dp_replicate"] * degrees["dp_shard"]))

    def remarks(self, world_size: int) -> list[str]:
        """What is allowed on `world_size` processes, and seldom meant."""
        total, each = self.micro_batches(world_size)
        degrees = self.parallelism.degrees(world_size)
        slots = each * degrees["dp_replicate"] * degrees["dp_shard"]
        steps, warmup = self.training.steps, self.schedule.warmup_steps
        found = []
        if slots != total:
            found.append(
                f"training.global_batch_size = {self.training.global_batch_size} makes {total} micro-batches for "
                f"{slots} places on {slots // each} data-parallel ranks: {slots - total} run empty in every update"
            )
        if warmup >= steps:
            found.append(
                f"schedule.warmup_steps = {warmup} is all of training.steps = {steps}: the learning rate only rises"
            )
        return found

    def _batch_problems(self) -> list[str]:
        rows, micro = self.training.global_batch_size, self.training.micro_batch_size
        found = []
        if self.training.seq_len > LONGEST_ROW:
            found.append(f"training.seq_len = {self.training.seq_len} must be at most {LONGEST_ROW}")
        if rows % micro:
            found.append(
                f"training.global_batch_size = {rows} must be a multiple of training.micro_batch_size = {micro}"
            )
        return found

    def _profiler_problems(self) -> list[str]:
        section, steps = self.profiler, self.training.steps
        windows = {
            "trace": (section.trace_step, section.trace_steps),
            "memory": (section.memory_step, section.memory_steps),
        }
        return [
            f"profiler.{name}_step = {first} and profiler.{name}_steps = {count} reach past training.steps = {steps}"
            for name, (first, count) in windows.items()
            if first is not None and first + count - 1 > steps
        ]


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name that is too long, or a folder that may not be looked into.
        return False
