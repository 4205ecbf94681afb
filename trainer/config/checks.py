"""Problems of a configuration for a world size, each one line: name, value, rule. Imports no torch.

The launcher and the commands report all problems at once, before any training process starts.
"""

from __future__ import annotations

from collections.abc import Set
from functools import reduce
from itertools import pairwise
from math import prod
from pathlib import Path

from parallelisms.parallel_dims import tensor_parallel_problems
from trainer.config.data import COPY_CORPUS, DEFAULT_SOURCE, HF_PREFIX, STDLIB_CORPUS, DataSection, TokenizerSection
from trainer.config.job_config import BYTE_VOCAB_SIZE, Config
from trainer.config.sections import MAX_SEQ_LEN, MemorySection, ParallelismSection
from trainer.config.slurm import SlurmSection, parse_time_limit
from trainer.config.training_stages import STAGE_OVERRIDES, Recipe, StageSection
from trainer.config.validation import ValidationSection, ValidationSetSection
from trainer.errors import ConfigError


def problems(config: Config, world_size: int, *, first_stage: int = 0) -> list[str]:
    """Everything that keeps this run, from stage `first_stage` on, from starting on `world_size` processes."""
    return [*data_problems(config), *layout_problems(config, world_size, first_stage=first_stage)]


def require_valid(config: Config, world_size: int, *, first_stage: int = 0) -> None:
    """Raises `ConfigError` with all problems."""
    if found := problems(config, world_size, first_stage=first_stage):
        raise ConfigError(found)


def require_vocab_size(config: Config, required_vocab_size: int) -> None:
    """Raises `ConfigError` unless the model has an embedding for each of the tokenizer's tokens."""
    if problems := _vocab_size_problems(config, required_vocab_size):
        raise ConfigError(problems)


def data_problems(config: Config) -> list[str]:
    """Problems of corpora and tokenizer, whose files may be on another machine."""
    stages = [] if stage_problems(config) else [stage.config for stage in config.training_stages]
    return [
        *dict.fromkeys(
            problem
            for stage in stages
            for problem in (*_training_tokenizer_problems(stage), *path_problems(stage.data, stage.validation.sources))
        )
    ]


def layout_problems(config: Config, world_size: int, *, first_stage: int = 0) -> list[str]:
    """All other problems. Stages before `first_stage` are done and may have needed another world size."""
    if problems := stage_problems(config):
        return problems
    for stage in config.training_stages[first_stage:]:
        prefix = f"{stage}: " if stage.name else ""
        problems += [prefix + problem for problem in _single_stage_problems(stage.config, world_size)]
    return problems + _profiler_problems(config, config.training_stages[0].total_steps)


def stage_problems(config: Config) -> list[str]:
    """Problems of the stages that keep them from being resolved to configurations."""
    if not isinstance(config, Recipe):
        return []
    names = [stage.name for stage in config.stage]
    problems = [
        f'stage "{stage.name}": {problem}' for stage in config.stage for problem in _stage_section_problems(stage)
    ]
    problems += [f'two stages are named "{name}"' for name in sorted({x for x in names if names.count(x) > 1})]
    redundant = config.training.model_fields_set & {"steps", "seq_len"} if config.stage else ()
    problems += [
        f"training.{key} = {getattr(config.training, key)} is not used with [[stage]]: each stage has its own"
        for key in sorted(redundant)
    ]
    for key, stage_key in STAGE_OVERRIDES.items() if config.stage else ():
        section = reduce(getattr, key.split(".")[:-1], config)
        if key.split(".")[-1] in section.model_fields_set and all(
            stage_key in stage.model_fields_set for stage in config.stage
        ):
            problems.append(f"{key} is not used: every [[stage]] sets {stage_key}")
    if len(names) > 1 and not config.checkpoint.enabled:
        problems.append("checkpoint.enabled = false: each stage starts from a checkpoint of the one before")
    problems += _validation_source_problems(config)
    used = {item.source for mix in (config.data.effective_mix, *(stage.mix for stage in config.stage)) for item in mix}
    used |= config.validation.sources
    problems += [
        f"data.sources.{name}: no mix and no validation set uses this source"
        for name in config.data.sources
        if name not in used
    ]
    return problems


def _validation_source_problems(config: Recipe) -> list[str]:
    """Validation sets on a training corpus that is split into other documents there."""
    mixes = [stage.mix or config.data.mix for stage in config.stage]
    training_sources = {item.source for mix in mixes for item in mix} or {
        item.source for item in config.data.effective_mix
    }
    settings = {
        name: config.data.document_settings(name)
        for name in sorted(training_sources | config.validation.sources)
        if name in {DEFAULT_SOURCE, *config.data.sources}
    }
    return [
        f'validation.sets.{name}: source = "{each.source}" is the corpus of "{other}", which training '
        "splits into other documents; use the same document settings to hold documents out"
        for name, each in config.validation.sets.items()
        for other in sorted(training_sources & settings.keys() - {each.source})
        if each.source in settings
        and settings[each.source]["path"] == settings[other]["path"]
        and settings[each.source] != settings[other]
    ]


def _stage_section_problems(stage: StageSection) -> list[str]:
    problems = []
    if (stage.steps is None) == (stage.tokens is None):
        problems.append("exactly one of steps and tokens must be given")
    if stage.batch_tokens is not None and stage.batch_tokens % stage.seq_len:
        rounded_down = stage.batch_tokens // stage.seq_len * stage.seq_len
        suggestion = " or ".join(str(tokens) for tokens in (rounded_down, rounded_down + stage.seq_len) if tokens)
        problems.append(
            f"batch_tokens = {stage.batch_tokens} must be a multiple of seq_len = {stage.seq_len}, as {suggestion} is"
        )
    if stage.warmup is not None and "warmup_steps" in stage.schedule.model_fields_set:
        problems.append(f"warmup = {stage.warmup} and schedule.warmup_steps are both given; keep one")
    if stage.warmup is not None and stage.schedule.over == "run":
        problems.append(
            f'warmup = {stage.warmup} is a fraction of one stage; with schedule.over = "run" use schedule.warmup_steps'
        )
    return problems


def _single_stage_problems(config: Config, world_size: int) -> list[str]:
    """Problems that do not depend on other stages."""
    problems = [
        *data_section_problems(config.data),
        *_validation_problems(config.validation, config.data),
        *config.model.problems(),
        *_memory_problems(config.memory),
        *slurm_problems(config.slurm),
        *_head_group_problems(config),
        *_optimizer_dtype_problems(config),
        *_parallelism_problems(config.parallelism, world_size),
        *_tensor_problems(config),
        *_context_problems(config),
        *_pipeline_problems(config, world_size),
        *_attention_problems(config),
    ]
    if config.schedule.decay_steps is not None and config.schedule.kind != "wsd":
        decay, kind = config.schedule.decay_steps, config.schedule.kind
        problems.append(f'schedule.decay_steps = {decay} is only used with schedule.kind = "wsd", not "{kind}"')
    return problems + _batch_problems(config)


def _training_tokenizer_problems(config: Config) -> list[str]:
    if config.is_synthetic:
        return []
    vocab_size_is_known = config.tokenizer.kind == "byte" and not config.model.problems()
    return tokenizer_problems(config.tokenizer) + (
        _vocab_size_problems(config, BYTE_VOCAB_SIZE) if vocab_size_is_known else []
    )


def _vocab_size_problems(config: Config, required_vocab_size: int) -> list[str]:
    size, kind = config.model.build().vocab_size, config.tokenizer.kind
    if required_vocab_size <= size:
        return []
    return [
        f'model.vocab_size = {size} must be at least {required_vocab_size}, the vocabulary size of tokenizer.kind = "{kind}"'
    ]


def tokenizer_problems(tokenizer: TokenizerSection) -> list[str]:
    if tokenizer.kind == "byte":
        return [
            f'tokenizer.path = "{tokenizer.path}" is not used by tokenizer.kind = "byte"; '
            'set tokenizer.kind to "tiktoken" or "sentencepiece"'
        ] * (tokenizer.path is not None)
    if tokenizer.path is None:
        return [f'tokenizer.kind = "{tokenizer.kind}" needs tokenizer.path, the tokenizer\'s file']
    if not (_path_exists(tokenizer.path) and tokenizer.path.is_file()):
        return [f'tokenizer.path = "{tokenizer.path}" is not a file']
    return []


def path_problems(data: DataSection, validation_sources: Set[str] = frozenset()) -> list[str]:
    """Problems of corpora that training or validation reads, which may be on another machine."""
    used = validation_sources | {item.source for item in data.effective_mix}
    paths = {"data.corpus": data.corpus} if DEFAULT_SOURCE in used else {}
    paths |= {f"data.sources.{name}.path": source.path for name, source in data.sources.items() if name in used}
    known = f'"{STDLIB_CORPUS}", "{COPY_CORPUS}"'
    return [
        f'{key} = "{path}" is neither {known}, a dataset ("{HF_PREFIX}NAME"), nor an existing file or folder'
        for key, path in paths.items()
        if path not in (STDLIB_CORPUS, COPY_CORPUS) and not path.startswith(HF_PREFIX) and not _path_exists(Path(path))
    ]


def data_section_problems(data: DataSection) -> list[str]:
    known = [DEFAULT_SOURCE, *data.sources]
    labels = [item.label for item in data.mix]
    weights = [item.weight for item in data.mix]
    problems = [f"data.mix: weights {weights} must not differ by more than a factor of 1000"] * (
        bool(weights) and max(weights) > 1000 * min(weights)
    )
    if data.corpus == COPY_CORPUS and any(item.source == DEFAULT_SOURCE for item in data.mix):
        problems.append(f'data.corpus = "{COPY_CORPUS}" cannot be part of data.mix')
    problems += [
        f'data.mix: source = "{item.source}" is not one of {", ".join(known)}'
        for item in data.mix
        if item.source not in known
    ]
    problems += [
        f"data.mix: max_length = {item.max_length} must be above min_length = {item.min_length}"
        for item in data.mix
        if item.max_length is not None and item.min_length is not None and item.max_length <= item.min_length
    ]
    problems += [f"data.mix: {label} occurs twice" for label in sorted({x for x in labels if labels.count(x) > 1})]
    if DEFAULT_SOURCE in data.sources:
        problems.append(f"data.sources.{DEFAULT_SOURCE} is reserved for data.corpus; choose another name")
    max_lengths = {"data.max_document": data.max_document} | {
        f"data.sources.{name}.max_document": source.max_document for name, source in data.sources.items()
    }
    problems += [
        f"data.holdout = {data.holdout} with {key} = {limit} would split documents between training and validation; "
        "split them with max_len in data.mix"
        for key, limit in max_lengths.items()
        if limit is not None and data.holdout
    ]
    problems += [
        f'data.sources.{name}.path = "{COPY_CORPUS}" can only be used as data.corpus'
        for name, source in data.sources.items()
        if source.path == COPY_CORPUS
    ]
    if (
        data.holdout
        and data.corpus == COPY_CORPUS
        and all(item.source == DEFAULT_SOURCE for item in data.effective_mix)
    ):
        problems.append(f'data.holdout = {data.holdout} needs documents; data.corpus = "{COPY_CORPUS}" has none')
    if data.copy_period is not None and data.corpus != COPY_CORPUS:
        problems.append(
            f'data.copy_period = {data.copy_period} is only used with data.corpus = "{COPY_CORPUS}", not "{data.corpus}"'
        )
    return problems


def _validation_problems(validation: ValidationSection, data: DataSection) -> list[str]:
    source_names = [DEFAULT_SOURCE, *data.sources]
    problems_by_set = {name: _validation_set_problems(each, source_names) for name, each in validation.sets.items()}
    for name, each in validation.sets.items():
        if each.source == DEFAULT_SOURCE and data.corpus == COPY_CORPUS:
            problems_by_set[name].append(
                f'source = "{DEFAULT_SOURCE}" is the synthetic "{COPY_CORPUS}" corpus, which has no documents to hold out'
            )
    return [f"validation.sets.{name}: {problem}" for name, problems in problems_by_set.items() for problem in problems]


def _validation_set_problems(section: ValidationSetSection, source_names: list[str]) -> list[str]:
    problems = []
    if section.source not in source_names:
        problems.append(f'source = "{section.source}" is not one of {", ".join(source_names)}')
    if any(shorter >= longer for shorter, longer in pairwise(section.seq_len)):
        problems.append(f"seq_len = {[*section.seq_len]} must ascend")
    if section.tail is not None and len(section.seq_len) == 1:
        problems.append(f"tail = {section.tail} is only used with several lengths in seq_len")
    elif section.tail is not None and section.tail > min(section.seq_len):
        problems.append(f"tail = {section.tail} must be at most {min(section.seq_len)}, the shortest of seq_len")
    return problems


def _batch_problems(config: Config) -> list[str]:
    global_batch_size, micro_batch_size = config.training.global_batch_size, config.training.micro_batch_size
    problems = []
    if config.training.seq_len > MAX_SEQ_LEN:
        problems.append(f"training.seq_len = {config.training.seq_len} must be at most {MAX_SEQ_LEN}")
    period = config.data.copy_period
    if config.data.corpus == COPY_CORPUS and period is not None and period >= config.training.seq_len:
        problems.append(f"data.copy_period = {period} must be below training.seq_len = {config.training.seq_len}")
    if global_batch_size % micro_batch_size:
        problems.append(
            f"training.global_batch_size = {global_batch_size} must be a multiple of training.micro_batch_size = {micro_batch_size}"
        )
    return problems


def _parallelism_problems(section: ParallelismSection, world_size: int) -> list[str]:
    degrees = section.degrees(world_size)
    if prod(degrees.values()) == world_size:
        return []
    product = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
    needed = prod(degrees.values())
    return [
        f"the mesh {product} needs {needed:,} processes, but the world size is {world_size:,} (NGPU x NNODES, or torchrun's)"
    ]


def _tensor_problems(config: Config) -> list[str]:
    if config.model.problems():
        return []
    section, model = config.parallelism, config.model.build()
    requirements = {
        "parallelism.tp above 1": section.tp > 1,
        "parallelism.sequence_parallel = true": section.sequence_parallel,
        "training.compile = true": config.training.compile,
    }
    missing = [requirement for requirement, is_met in requirements.items() if section.async_tp and not is_met]
    problems = [f"parallelism.async_tp = true needs {' and '.join(missing)}"] if missing else []
    return problems + tensor_parallel_problems(
        section.tp,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn_dim=model.ffn_dim,
        vocab_size=model.vocab_size,
        # Only a tied embedding is replicated with its output projection.
        replicate_vocab=model.tie_embeddings and not section.loss_parallel,
    )


def _context_problems(config: Config) -> list[str]:
    if config.model.problems():
        return []
    plan = config.context_plan()
    if plan.heads % plan.kv_heads:  # A problem of tp, reported there.
        return []
    return [f"parallelism.{problem}" for problem in plan.problems()]


def _pipeline_problems(config: Config, world_size: int) -> list[str]:
    is_indivisible = (
        config.training.global_batch_size % config.training.micro_batch_size > 0
    )  # Reported as a problem of the batch size.
    return [] if is_indivisible or config.model.problems() else config.pipeline_plan(world_size).problems()


def _attention_problems(config: Config) -> list[str]:
    kernel, dtype = config.training.attention, config.training.dtype
    if kernel == "cudnn" and config.training.deterministic:
        return ['training.attention = "cudnn" is not deterministic, but training.deterministic = true']
    supported_dtypes = {"efficient": ("bfloat16", "float32")} | dict.fromkeys(
        ("flash", "cudnn", "fa3", "fa4"), ("bfloat16",)
    )
    if kernel not in supported_dtypes or dtype in supported_dtypes[kernel]:
        return []
    return [
        f'training.attention = "{kernel}" supports {" or ".join(supported_dtypes[kernel])}, not training.dtype = "{dtype}"'
    ]


def _memory_problems(memory: MemorySection) -> list[str]:
    defaults = {"offload": "none", "blocks_per_checkpoint": 1, "head_groups": 1, "mlp_tile_mib": None}
    non_default = {key: getattr(memory, key) for key, default in defaults.items() if getattr(memory, key) != default}
    problems = []
    if memory.recompute == "none":
        problems += [
            f'memory.{key} = {_toml_literal(value)} needs memory.recompute = "full" or "keep_attention": with "none" autograd '
            "saves all activations"
            for key, value in non_default.items()
        ]
    elif memory.recompute == "full":
        unsupported = {"offload": "inputs_and_attention"} | (
            {"blocks_per_checkpoint": memory.blocks_per_checkpoint} if memory.blocks_per_checkpoint > 1 else {}
        )
        problems += [
            f'memory.{key} = {_toml_literal(value)} needs memory.recompute = "keep_attention", not "full"'
            for key, value in unsupported.items()
            if non_default.get(key) == value
        ]
    if memory.host_budget_gib is not None and memory.offload == "none" and memory.recompute != "auto":
        problems.append(f'memory.host_budget_gib = {memory.host_budget_gib} is not used with memory.offload = "none"')
    if memory.device_gib is not None and memory.recompute != "auto":
        problems.append(f'memory.device_gib = {memory.device_gib} is only used with memory.recompute = "auto"')
    return problems


def _head_group_problems(config: Config) -> list[str]:
    if config.model.problems() or (groups := config.memory.head_groups) == 1:
        return []
    plan = config.context_plan()
    if plan.kv_heads % groups:
        return [
            f"memory.head_groups = {groups} must divide the {plan.kv_heads} KV heads of a rank "
            "(model.num_kv_heads / parallelism.tp)"
        ]
    if plan.cp > 1 and not plan.problems() and plan.heads // groups % plan.ulysses_degree:
        return [
            f"memory.head_groups = {groups} leaves {plan.heads // groups} query heads per group, which "
            f'{plan.ulysses_degree} ranks cannot divide (parallelism.cp_method = "{plan.resolved_method}")'
        ]
    return []


def _optimizer_dtype_problems(config: Config) -> list[str]:
    if config.memory.optimizer_dtype == "float32":
        return []
    key, max_beta, problems = 'memory.optimizer_dtype = "bfloat16"', max(config.optimizer.betas), []
    if config.training.dtype == "float64":
        problems.append(f'{key} contradicts training.dtype = "float64"')
    if max_beta > 0.99:
        problems.append(f"{key} needs optimizer.betas up to 0.99, not {max_beta}: bfloat16 rounds smaller changes away")
    return problems


def _profiler_problems(config: Config, steps: int) -> list[str]:
    section = config.profiler
    windows = {
        "trace": (section.trace_step, section.trace_steps),
        "memory": (section.memory_step, section.memory_steps),
    }
    return [
        f"profiler.{name}_step = {start} and profiler.{name}_steps = {count} must end by training.steps = {steps}"
        for name, (start, count) in windows.items()
        if start is not None and start + count - 1 > steps
    ]


def slurm_problems(slurm: SlurmSection) -> list[str]:
    problems = []
    if slurm.gpus_per_node and slurm.processes_per_node is not None:
        problems.append(
            f"slurm.processes_per_node = {slurm.processes_per_node} is only used with slurm.gpus_per_node = 0, "
            f"not {slurm.gpus_per_node}: each GPU has one rank"
        )
    limit = parse_time_limit(slurm.time)
    if limit is not None and limit <= slurm.lead_seconds:
        problems.append(
            f'slurm.lead_seconds = {slurm.lead_seconds} must be below slurm.time = "{slurm.time}", {limit} s'
        )
    return problems


def _toml_literal(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # The name is too long, or the folder is not readable.
        return False
