"""Problems of a configuration for a world size, each one line: name, value, rule. Imports no
torch.

The launcher and the commands report all problems at once, before any training process starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from functools import reduce
from itertools import pairwise
from math import prod
from pathlib import Path

from models import kernel_choice
from parallelisms.mesh.parallel_dims import (
    expert_parallel_problems,
    head_groups_problem,
    tensor_parallel_problems,
)
from trainer.config import extension
from trainer.config.data import (
    COPY_CORPUS,
    DEFAULT_SOURCE,
    HF_PREFIX,
    STDLIB_CORPUS,
    TOKENIZER_FILE,
    DataSection,
    TokenizerSection,
    ValidationSection,
    download_hint,
    is_hub_name,
    tokenizer_folder,
)
from trainer.config.job_config import BYTE_VOCAB_SIZE, Config
from trainer.config.router_checks import router_problems
from trainer.config.sections import MAX_SEQ_LEN, MemorySection, is_remote, remote_url
from trainer.config.slurm import SlurmSection, parse_time_limit
from trainer.config.source import corpus_spec
from trainer.config.toml_format import toml_value
from trainer.config.training_stages import Recipe, StageSection
from trainer.errors import ConfigError

MAX_ABSOLUTE_LR = 1e-3
"""A fraction below it, and below the learning rate, is taken for a learning rate itself."""


def problems(config: Config, world_size: int, *, first_stage: int = 0) -> list[str]:
    """Everything that keeps this run, from stage `first_stage` on, from starting on `world_size`
    processes.
    """
    return [*data_problems(config), *layout_problems(config, world_size, first_stage=first_stage)]


def require_valid(config: Config, world_size: int, *, first_stage: int = 0) -> None:
    """Raises `ConfigError` with all problems."""
    if found := problems(config, world_size, first_stage=first_stage):
        raise ConfigError(found)


def require_vocab_size(config: Config, required_vocab_size: int) -> None:
    """Raises `ConfigError` unless the model has an embedding for each token of a document."""
    if found := [*_vocab_size_problems(config, required_vocab_size)]:
        raise ConfigError(found)


def data_problems(config: Config) -> list[str]:
    """Problems of corpora and tokenizer, whose files may be on another machine."""
    # Stages that cannot be resolved are reported by `layout_problems`. Stages often share a
    # corpus, whose problems are reported once, in order.
    stages = () if stage_problems(config) else config.training_stages
    return [
        *dict.fromkeys(
            problem for stage in stages for problem in _stage_data_problems(stage.config)
        )
    ]


def _stage_data_problems(config: Config) -> Iterator[str]:
    if not config.data.is_synthetic:
        yield from tokenizer_problems(config.tokenizer)
        if config.tokenizer.kind == "byte" and not config.model.problems():
            yield from _vocab_size_problems(config, BYTE_VOCAB_SIZE)
    yield from path_problems(config.data, config.validation.sources)


def layout_problems(config: Config, world_size: int, *, first_stage: int = 0) -> list[str]:
    """All other problems.

    Stages before `first_stage` are done and may have needed another world size.
    """
    # Later checks read resolved stages, so problems of resolving them are reported alone.
    if found := stage_problems(config):
        return found
    for stage in config.training_stages[first_stage:]:
        prefix = f"{stage}: " if stage.name else ""
        found += [prefix + problem for problem in _single_stage_problems(stage.config, world_size)]
    # The profiler counts the steps of the whole run, not those of a stage.
    return [*found, *_profiler_problems(config, config.training_stages[0].total_steps)]


def stage_problems(config: Config) -> list[str]:
    """Problems of the stages that keep them from being resolved to configurations."""
    return [*_recipe_problems(config)] if isinstance(config, Recipe) else []


def _recipe_problems(config: Recipe) -> Iterator[str]:
    for stage in config.stage:
        yield from (
            f'stage "{stage.name}": {problem}' for problem in _stage_section_problems(stage)
        )
    yield from (
        f'two stages are named "{name}"'
        for name in _repeated(stage.name for stage in config.stage)
    )
    if config.stage:
        # Only keys that the user wrote contradict the stages; defaults do not.
        for key in sorted(config.training.model_fields_set & {"steps", "seq_len"}):
            value = getattr(config.training, key)
            yield f"training.{key} = {value} is not used with [[stage]]: each stage has its own"
        for name, stage_key in config.unused_keys.items():
            *path, key = name.split(".")
            if key in reduce(getattr, path, config).model_fields_set:
                yield f"{name} is not used: every [[stage]] sets {stage_key}"
    if len(config.stage) > 1 and not config.checkpoint.enabled:
        yield "checkpoint.enabled = false: each stage starts from a checkpoint of the one before"
    yield from _checkpoint_problems(config)
    yield from _holdout_problems(config)
    mixes = (config.data.effective_mix, *(stage.mix for stage in config.stage))
    used = config.validation.sources | {item.source for mix in mixes for item in mix}
    for name in config.data.sources:
        if name not in used:
            yield f"data.sources.{name}: no mix and no validation set uses this source"


def _checkpoint_problems(config: Recipe) -> Iterator[str]:
    section = config.checkpoint
    if section.remote is not None and not section.enabled:
        yield f'checkpoint.remote = "{section.remote}" needs checkpoint.enabled = true'
    if section.memory_interval is not None and not section.enabled:
        yield f"checkpoint.memory_interval = {section.memory_interval} needs checkpoint.enabled = true"


def _holdout_problems(config: Recipe) -> Iterator[str]:
    """Validation sets on a training corpus that is split into other documents there."""
    mixes = [stage.mix or config.data.effective_mix for stage in config.stage] or [
        config.data.effective_mix
    ]
    known = {DEFAULT_SOURCE, *config.data.sources}
    training_sources = sorted({item.source for mix in mixes for item in mix} & known)
    for name, section in config.validation.sets.items():
        if section.source not in known:
            continue
        # `holdout_mask` hashes document numbers. If one corpus is split in two ways, the numbers
        # differ, and training would see validation text.
        held_out = corpus_spec(config.data, section.source)
        for other in training_sources:
            trained = corpus_spec(config.data, other)
            if (
                held_out.corpus == trained.corpus
                and held_out.document_settings != trained.document_settings
            ):
                yield (
                    f'validation.sets.{name}: source = "{section.source}" is the corpus of "{other}", which training '
                    "splits into other documents; use the same document settings to hold documents out"
                )


def _stage_section_problems(stage: StageSection) -> Iterator[str]:
    if (stage.steps is None) == (stage.tokens is None):
        yield "exactly one of steps and tokens must be given"
    if stage.batch_tokens is not None and stage.batch_tokens % stage.seq_len:
        below = stage.batch_tokens // stage.seq_len * stage.seq_len
        multiples = " or ".join(str(tokens) for tokens in (below, below + stage.seq_len) if tokens)
        yield f"batch_tokens = {stage.batch_tokens} must be a multiple of seq_len = {stage.seq_len}, as {multiples} is"
    if stage.warmup is not None and "warmup_steps" in stage.schedule.model_fields_set:
        yield f"warmup = {stage.warmup} and schedule.warmup_steps are both given; keep one"
    if stage.warmup is not None and stage.schedule.over == "run":
        rule = 'with schedule.over = "run" use schedule.warmup_steps'
        yield f"warmup = {stage.warmup} is a fraction of one stage; {rule}"


def _single_stage_problems(config: Config, world_size: int) -> Iterator[str]:
    """Problems that do not depend on other stages."""
    yield from unplaced_problems(config)
    yield from placed_problems(config, world_size, is_model_valid=not config.model.problems())


def unplaced_problems(config: Config) -> Iterator[str]:
    """Problems on any mesh, with any memory options."""
    yield from data_section_problems(config.data)
    yield from _validation_problems(config.validation, config.data)
    yield from config.model.problems()
    yield from slurm_problems(config.slurm)
    yield from _schedule_problems(config)


def placed_problems(
    config: Config, world_size: int, *, is_model_valid: bool = True
) -> Iterator[str]:
    """All other problems of a stage.

    A model with problems cannot be built. Checks that need its shapes are skipped then, so that
    one mistake is not reported as many.
    """
    yield from _memory_problems(config.memory)
    if is_model_valid:
        yield from _head_group_problems(config)
        yield from _attention_problems(config)
    yield from _loss_problems(config)
    yield from _optimizer_problems(config)
    yield from _optimizer_dtype_problems(config)
    yield from _world_size_problems(config, world_size)
    if is_model_valid:
        yield from _parallelism_problems(config, world_size)
    yield from _batch_problems(config)
    if is_model_valid:
        yield from router_problems(config.training, config.model.build())


def _schedule_problems(config: Config) -> Iterator[str]:
    kind = config.schedule.kind
    decay = config.schedule.decay_steps
    if decay is not None and kind != "wsd":
        yield f'schedule.decay_steps = {decay} is only used with schedule.kind = "wsd", not "{kind}"'
    factor = config.schedule.min_lr_factor
    lr = config.optimizer.lr
    if 0 < factor <= min(lr, MAX_ABSOLUTE_LR):
        meant = (
            f"for a last learning rate of {factor:g} write {factor / lr:.3g}, for none at all 0"
        )
        yield f"schedule.min_lr_factor = {factor:g} is a fraction of optimizer.lr = {lr:g}: {meant}"


def _vocab_size_problems(config: Config, required_vocab_size: int) -> Iterator[str]:
    size = config.model.build().vocab_size
    kind = config.tokenizer.kind
    if required_vocab_size > size:
        rule = f'at least {required_vocab_size}, the vocabulary size of tokenizer.kind = "{kind}"'
        yield f"model.vocab_size = {size} must be {rule}"


def tokenizer_problems(tokenizer: TokenizerSection) -> Iterator[str]:
    if tokenizer.kind in extension.BUILT_IN_TOKENIZERS:
        yield from _built_in_tokenizer_problems(tokenizer)
    elif tokenizer.kind not in (known := extension.tokenizer_kinds()):
        # Else the extension looks at the other keys.
        yield f'tokenizer.kind = "{tokenizer.kind}" is unknown; there are {", ".join(known)}'


def _built_in_tokenizer_problems(tokenizer: TokenizerSection) -> Iterator[str]:
    for name in ("pattern", "special_tokens", "bos", "eos"):
        if getattr(tokenizer, name) and tokenizer.kind != "tiktoken":
            yield f'tokenizer.{name} is not used by tokenizer.kind = "{tokenizer.kind}", only by "tiktoken"'
    if tokenizer.kind == "byte":
        if tokenizer.path is not None:
            yield (
                f'tokenizer.path = "{tokenizer.path}" is not used by tokenizer.kind = "byte"; '
                'set tokenizer.kind to "tiktoken", "sentencepiece" or "huggingface"'
            )
    elif tokenizer.path is None:
        needed = (
            "the model's folder" if tokenizer.kind == "huggingface" else "the tokenizer's file"
        )
        yield f'tokenizer.kind = "{tokenizer.kind}" needs tokenizer.path, {needed}'
    elif remote_url(tokenizer.path) is not None:
        # Opening it asks the store.
        return
    elif tokenizer.kind == "huggingface":
        if not _path_exists(tokenizer_folder(tokenizer.path) / TOKENIZER_FILE):
            hint = download_hint(str(tokenizer.path))
            reason = f"; tokenizers are not downloaded{hint}" if hint else ""
            yield f'tokenizer.path = "{tokenizer.path}" is not a folder with {TOKENIZER_FILE}{reason}'
    elif not (_path_exists(tokenizer.path) and tokenizer.path.is_file()):
        yield f'tokenizer.path = "{tokenizer.path}" is not a file'


def path_problems(data: DataSection, validation_sources: Set[str] = frozenset()) -> Iterator[str]:
    """Problems of corpora that training or validation reads, which may be on another machine."""
    used = validation_sources | {item.source for item in data.effective_mix}
    paths = {"data.corpus": data.corpus} if DEFAULT_SOURCE in used else {}
    paths |= {
        f"data.sources.{name}.path": source.path
        for name, source in data.sources.items()
        if name in used
    }
    for key, path in paths.items():
        # Opening a dataset may need the network, so its errors are left to the preparation.
        if path in (STDLIB_CORPUS, COPY_CORPUS) or path.startswith(HF_PREFIX) or is_remote(path):
            continue
        if _path_exists(Path(path)) and not (Path(path).is_file() or Path(path).is_dir()):
            yield f'{key} = "{path}" is neither a file nor a folder'
        elif not _path_exists(Path(path)):
            yield (
                f'{key} = "{path}" is neither "{STDLIB_CORPUS}", "{COPY_CORPUS}", a dataset ("{HF_PREFIX}{path if is_hub_name(path) else "NAME"}"), '
                "nor an existing file or folder"
            )


def data_section_problems(data: DataSection) -> Iterator[str]:
    yield from _mix_problems(data)
    if DEFAULT_SOURCE in data.sources:
        yield f"data.sources.{DEFAULT_SOURCE} is reserved for data.corpus; choose another name"
    max_lengths = {"data.max_document": data.max_document}
    max_lengths |= {
        f"data.sources.{name}.max_document": source.max_document
        for name, source in data.sources.items()
    }
    for key, limit in max_lengths.items():
        if limit is not None and data.holdout:
            yield (
                f"data.holdout = {data.holdout} with {key} = {limit} would split documents between training and "
                "validation; split them with max_len in data.mix"
            )
    for name, source in data.sources.items():
        if source.path == COPY_CORPUS:
            yield f'data.sources.{name}.path = "{COPY_CORPUS}" can only be used as data.corpus'
    if data.holdout and data.is_synthetic:
        yield f'data.holdout = {data.holdout} needs documents; data.corpus = "{COPY_CORPUS}" has none'
    yield from _corpus_problems(data)
    if data.copy_period is not None and data.corpus != COPY_CORPUS:
        rule = f'only used with data.corpus = "{COPY_CORPUS}", not "{data.corpus}"'
        yield f"data.copy_period = {data.copy_period} is {rule}"


def _corpus_problems(data: DataSection) -> Iterator[str]:
    corpora = {"data": (data.corpus, data.files)} | {
        f"data.sources.{name}": (source.path, source.files)
        for name, source in data.sources.items()
    }
    for key, (corpus, files) in corpora.items():
        if files is not None and (
            corpus in (STDLIB_CORPUS, COPY_CORPUS)
            or corpus.startswith(HF_PREFIX)
            or is_remote(corpus)
        ):
            yield f'{key}.files = {toml_value([*files])} is only used with a file or folder, not "{corpus}"'
        if data.workers and is_remote(corpus):
            # The library of the store does not live through a fork.
            yield f"data.workers = {data.workers} must be 0 with a corpus at a URL ({key}): a thread reads it ahead"


def _mix_problems(data: DataSection) -> Iterator[str]:
    known = [DEFAULT_SOURCE, *data.sources]
    weights = [item.weight for item in data.mix]
    # `WeightedRoundRobin` rounds weights to integers that sum to at most MAX_PERIOD. A weight that
    # rounds to 0 would never be drawn.
    if weights and max(weights) > 1000 * min(weights):
        yield f"data.mix: weights {weights} must not differ by more than a factor of 1000"
    if data.corpus == COPY_CORPUS and any(item.source == DEFAULT_SOURCE for item in data.mix):
        yield f'data.corpus = "{COPY_CORPUS}" cannot be part of data.mix'
    for item in data.mix:
        if item.source not in known:
            yield f'data.mix: source = "{item.source}" is not one of {", ".join(known)}'
    for item in data.mix:
        if (
            item.max_length is not None
            and item.min_length is not None
            and item.max_length <= item.min_length
        ):
            yield f"data.mix: max_length = {item.max_length} must be above min_length = {item.min_length}"
    yield from (
        f"data.mix: {label} occurs twice" for label in _repeated(item.label for item in data.mix)
    )


def _validation_problems(validation: ValidationSection, data: DataSection) -> Iterator[str]:
    known = [DEFAULT_SOURCE, *data.sources]
    for name, section in validation.sets.items():
        prefix = f"validation.sets.{name}:"
        shortest = min(section.seq_len)
        if section.source not in known:
            yield f'{prefix} source = "{section.source}" is not one of {", ".join(known)}'
        if any(shorter >= longer for shorter, longer in pairwise(section.seq_len)):
            yield f"{prefix} seq_len = {[*section.seq_len]} must ascend"
        if section.tail is not None and len(section.seq_len) == 1:
            yield f"{prefix} tail = {section.tail} is only used with several lengths in seq_len"
        elif section.tail is not None and section.tail > shortest:
            yield f"{prefix} tail = {section.tail} must be at most {shortest}, the shortest of seq_len"
        if section.source == DEFAULT_SOURCE and data.corpus == COPY_CORPUS:
            rule = f'the synthetic "{COPY_CORPUS}" corpus, which has no documents to hold out'
            yield f'{prefix} source = "{DEFAULT_SOURCE}" is {rule}'


def _batch_problems(config: Config) -> Iterator[str]:
    training = config.training
    period = config.data.copy_period
    if training.seq_len > MAX_SEQ_LEN:
        yield f"training.seq_len = {training.seq_len} must be at most {MAX_SEQ_LEN}"
    if config.data.corpus == COPY_CORPUS and period is not None and period >= training.seq_len:
        yield f"data.copy_period = {period} must be below training.seq_len = {training.seq_len}"
    if training.global_batch_size % training.micro_batch_size:
        rule = f"must be a multiple of training.micro_batch_size = {training.micro_batch_size}"
        yield f"training.global_batch_size = {training.global_batch_size} {rule}"


def _world_size_problems(config: Config, world_size: int) -> Iterator[str]:
    degrees = config.parallelism.degrees(world_size)
    needed = prod(degrees.values())
    product = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
    if needed != world_size:
        rule = f"the world size is {world_size:,} (NGPU x NNODES, or torchrun's)"
        yield f"the mesh {product} needs {needed:,} processes, but {rule}"


def _parallelism_problems(config: Config, world_size: int) -> Iterator[str]:
    """The model must have no problems."""
    section = config.parallelism
    training = config.training
    model = config.model.build()
    context_plan = config.context_plan()
    requirements = {
        "parallelism.tp above 1": section.tp > 1,
        "parallelism.sequence_parallel = true": section.sequence_parallel,
        "training.compile = true": training.compile,
        "distributed.through_host = false": not config.distributed.through_host,
    }
    if section.async_tp and not all(requirements.values()):
        missing = [requirement for requirement, is_met in requirements.items() if not is_met]
        yield f"parallelism.async_tp = true needs {' and '.join(missing)}"
    yield from tensor_parallel_problems(
        model,
        section.tp,
        # Only a tied embedding is replicated with its output projection.
        replicate_vocab=model.tie_embeddings and not section.loss_parallel,
    )
    degrees = section.degrees(world_size)
    yield from expert_parallel_problems(
        model, section.ep, num_shards=degrees["dp_shard"] * degrees["cp"]
    )
    others = sorted(
        {
            kind.mixer
            for kind in model.kinds
            if not kind.sublayers["attention"].attends or extension.is_no_attention(kind.mixer)
        }
    )
    if section.cp > 1 and others:
        yield f"parallelism.cp = {section.cp} must be 1: mixer {', '.join(others)} has no context parallelism"
    if context_plan.heads % context_plan.kv_heads == 0:  # Else a problem of tp, reported above.
        yield from (f"parallelism.{problem}" for problem in context_plan.problems())
    # Else reported as a problem of the batch size.
    if training.global_batch_size % training.micro_batch_size == 0:
        yield from config.pipeline_plan(world_size).problems()


def _attention_problems(config: Config) -> Iterator[str]:
    """Problems that the configured kernel has on every device."""
    if config.training.attention != "auto":
        # A choice of two kernels may lack the same twice.
        yield from dict.fromkeys(
            kernel_choice.problems(config.training.attention, config.attention_needs())
        )


def _memory_problems(memory: MemorySection) -> Iterator[str]:
    for key in ("offload", "blocks_per_checkpoint", "head_groups", "mlp_tile_mib"):
        value = getattr(memory, key)
        if value == MemorySection.model_fields[key].default:
            continue
        assignment = f"memory.{key} = {toml_value(value)}"
        if memory.recompute == "none":
            yield f'{assignment} needs memory.recompute = "full" or "keep_attention": with "none" autograd saves all activations'
        elif memory.recompute == "full" and (
            key == "blocks_per_checkpoint" or value == "inputs_and_attention"
        ):
            yield f'{assignment} needs memory.recompute = "keep_attention", not "full"'
    if (
        # `auto` may still choose to offload, so a budget without an offload is no mistake there.
        memory.host_budget_gib is not None
        and memory.offload == "none"
        and memory.recompute != "auto"
    ):
        yield f'memory.host_budget_gib = {memory.host_budget_gib} is not used with memory.offload = "none"'
    if memory.device_gib is not None and "auto" not in (memory.recompute, memory.loss_chunk_mib):
        yield (
            f"memory.device_gib = {memory.device_gib} is only used with memory.recompute or memory.loss_chunk_mib = "
            '"auto"'
        )


def _head_group_problems(config: Config) -> Iterator[str]:
    groups = config.memory.head_groups
    plan = config.context_plan()
    if problem := head_groups_problem(config.model.build(), groups):
        yield problem
    heads_per_group = plan.heads // groups
    if plan.kv_heads % groups:
        rule = f"must divide the {plan.kv_heads} KV heads of a rank (model.num_kv_heads / parallelism.tp)"
        yield f"memory.head_groups = {groups} {rule}"
    elif (
        # Ulysses exchanges the heads of one group at a time, so its ranks must divide each group.
        groups > 1
        and plan.cp > 1
        and not plan.problems()
        and heads_per_group % plan.ulysses_degree
    ):
        yield (
            f"memory.head_groups = {groups} leaves {heads_per_group} query heads per group, which "
            f'{plan.ulysses_degree} ranks cannot divide (parallelism.cp_method = "{plan.resolved_method}")'
        )


def _loss_problems(config: Config) -> Iterator[str]:
    name = config.training.loss
    if name not in (known := extension.loss_names()):
        yield f'training.loss = "{name}" is unknown; there are {", ".join(known)}'
    elif extension.added_loss(name) and config.parallelism.tp > 1:
        yield (
            f'training.loss = "{name}" needs all logits of a token on a rank, '
            f"which parallelism.tp = {config.parallelism.tp} splits"
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    if config.optimizer.name not in (known := extension.optimizer_names()):
        yield f'optimizer.name = "{config.optimizer.name}" is unknown; there are {", ".join(known)}'


def _optimizer_dtype_problems(config: Config) -> Iterator[str]:
    key = 'memory.optimizer_dtype = "bfloat16"'
    max_beta = max(config.optimizer.betas)
    if config.memory.optimizer_dtype == "float32":
        return
    if config.training.dtype == "float64":
        yield f'{key} contradicts training.dtype = "float64"'
    # bfloat16 has 8 significant bits: rounding to nearest drops changes below 2^-9 to 2^-8 of a
    # value. With beta 0.999 a step moves a moment by about a thousandth, so it would stand still.
    if max_beta > 0.99:
        yield f"{key} needs optimizer.betas up to 0.99, not {max_beta}: bfloat16 rounds smaller changes away"


def _profiler_problems(config: Config, steps: int) -> Iterator[str]:
    for name in ("trace", "memory"):
        start, count = (getattr(config.profiler, f"{name}_{key}") for key in ("step", "steps"))
        if start is not None and start + count - 1 > steps:
            rule = f"must end by training.steps = {steps}"
            yield f"profiler.{name}_step = {start} and profiler.{name}_steps = {count} {rule}"


def slurm_problems(slurm: SlurmSection) -> Iterator[str]:
    if slurm.gpus_per_node and slurm.processes_per_node is not None:
        yield (
            f"slurm.processes_per_node = {slurm.processes_per_node} is only used with slurm.gpus_per_node = 0, "
            f"not {slurm.gpus_per_node}: each GPU has one rank"
        )
    limit = parse_time_limit(slurm.time)
    if limit is not None and limit <= slurm.lead_seconds:
        yield f'slurm.lead_seconds = {slurm.lead_seconds} must be below slurm.time = "{slurm.time}", {limit} s'


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # The name is too long, or the folder is not readable.
        return False
