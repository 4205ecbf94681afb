"""`job.extension`: parts from other packages, registered beside the built-in ones.
docs/extending.md has an example.

An extension is code. It is imported for the configuration that a user names, and for nothing that
is found in a run folder, a checkpoint or an export (`recorded_problem`). Imports no torch by
itself.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from models import hf_families, layers, presets
from models.config import ModelConfig
from models.hf_family import Family
from models.layers import Parameter, SublayerKind
from trainer.config import extension_errors
from trainer.config.data import COMPRESSIONS, FILE_KINDS, TokenizerSection
from trainer.config.sections import OptimizerSection
from trainer.errors import ConfigError

OWN_PACKAGES = ("models", "parallelisms", "trainer", "train", "longhaul")
"""Top-level packages of Longhaul, reserved in every process that it starts."""
BUILT_IN_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
BUILT_IN_OPTIMIZERS = ("adamw",)
BUILT_IN_LOSSES = ("cross_entropy",)
BUILT_IN_TOKENIZERS = ("byte", "tiktoken", "sentencepiece", "huggingface")
BUILT_IN_SOURCES = (*FILE_KINDS, *COMPRESSIONS)
SOURCE_SUFFIX = re.compile(r"\.[a-z][a-z0-9_+-]{0,15}")
"""Form of a corpus file's suffix: a dot, a lower-case letter, and at most 15 more characters."""


class Sublayer(NamedTuple):
    """A kind of mixer or of feed-forward: its declaration, and the function that builds a layer's
    module from the model's configuration and the layer's kind.
    """

    declaration: SublayerKind
    build: Callable[..., Any]


class StepView(NamedTuple):
    """Read-only state of a run after a step."""

    step: int
    total_steps: int
    rank: int
    world_size: int
    lr: float
    modules: Mapping[int, Any]
    """The parts of the model on this rank, by pipeline stage."""


class TrackedRun(NamedTuple):
    """Facts about a run that a tracker receives when it is created."""

    name: str
    folder: Path
    """The run folder."""
    first_step: int
    """First step that this launch logs. Values that an earlier launch logged from this step on are
    void.
    """
    config: Mapping[str, Any]
    """Values of the configuration by section and key."""
    toml: str
    """The configuration as a file."""
    prediction: Mapping[str, Any]
    """The launcher's prediction: device, step time and memory; empty without one."""
    lineage: Mapping[str, str]
    """The run whose weights this one continued from: `branch`, the checkpoint and what was taken
    from it, or `initial_load_path`, with the `run_id` of the run that wrote it if it is known.
    """


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Parts that a package adds. No name may be that of a built-in part."""

    name: str
    version: str = "0"
    families: Mapping[str, Mapping[str, ModelConfig]] = field(default_factory=dict)
    """Presets, by `model.family` and `model.size`."""
    hf_families: Mapping[str, Family] = field(default_factory=dict)
    """Families of Hugging Face models by the `model_type` of config.json: rows of
    `models.hf_families.FAMILIES`.
    """
    mixers: Mapping[str, Sublayer] = field(default_factory=dict)
    """Mixers by `LayerKind.mixer`."""
    feed_forwards: Mapping[str, Sublayer] = field(default_factory=dict)
    """Feed-forwards by `LayerKind.feed_forward`."""
    norms: Mapping[str, Mapping[str, Mapping[str, Parameter]]] = field(default_factory=dict)
    """Placements of norms by `LayerKind.norms`, as in `models.layers.NORMS`."""
    optimizers: Mapping[str, Callable[[OptimizerSection, Any], Any]] = field(default_factory=dict)
    """Factories of a `trainer.step.optimizer.UpdateRule` by `optimizer.name`. Arguments:
    [optimizer] and the dtype of moments (None: that of the weights).
    """
    losses: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Losses of each token [C] from logits [C, vocabulary] and targets [C], by `training.loss`;
    autograd differentiates them.
    """
    trackers: Mapping[str, Callable[[TrackedRun], Any]] = field(default_factory=dict)
    """Factories of a `trainer.metrics.trackers.Tracker` by name, called on rank 0.

    A tracker that raises is left out of the rest of the run. One with `note(step, kind, text)`
    is given events in words, too.
    """
    sources: Mapping[str, Callable[[BinaryIO, str], Iterator[str]]] = field(default_factory=dict)
    """Readers of corpus files by suffix, such as `.warc`: each yields a file's texts in order.
    Arguments: the decompressed file and `data.text_key`.
    """
    tokenizers: Mapping[str, Callable[[TokenizerSection], Any]] = field(default_factory=dict)
    """Factories of a `trainer.data.tokenizer.Tokenizer` by `tokenizer.kind`. Argument:
    [tokenizer]. The tokenizer is pickled for the workers of a preparation.
    """
    on_step: Callable[[StepView], None] | None = None
    """Called on every rank after each step."""
    on_checkpoint: Callable[[int, Path], None] | None = None
    """Called on rank 0 with the step and the folder of a committed checkpoint."""
    on_end: Callable[[StepView, str], None] | None = None
    """Called on every rank at the end of a launch, with the reason of a preemption, or ""."""

    def problems(self) -> list[str]:
        """Every field of a wrong type, and every broken rule of a declaration."""
        found = [
            f"{key} = {value!r} must be a text"
            for key, value in (("name", self.name), ("version", self.version))
            if not (isinstance(value, str) and value)
        ]
        found += [
            f"{hook} must be a function, not {type(called).__name__}"
            for hook in HOOKS
            if not ((called := getattr(self, hook)) is None or callable(called))
        ]
        if no_tables := [
            f"{table} must be a dict of parts by name, not {type(parts).__name__}"
            for table in PART_PROBLEMS
            if not isinstance(parts := getattr(self, table), Mapping)
        ]:
            return found + no_tables
        return found + [
            f'{table} "{name}" {problem}'
            for table, problems_of in PART_PROBLEMS.items()
            for name, part in getattr(self, table).items()
            for problem in problems_of(part)
        ]


# ---- what a part must be


def _family_problems(part: object) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield f"must be a dict of ModelConfig by size, not {type(part).__name__}"
        return
    for size, model in part.items():
        if not isinstance(model, ModelConfig):
            yield f'size "{size}" must be a ModelConfig, not {type(model).__name__}'


def _hf_family_problems(part: object) -> Iterator[str]:
    if not isinstance(part, Family):
        yield f"must be a Family, not {type(part).__name__}"


def _sublayer_problems(part: object) -> Iterator[str]:
    if not isinstance(part, Sublayer):
        yield f"must be a Sublayer(declaration, build), not {_type_name(part)}"
        return
    if not callable(part.build):
        yield f"must have a class or a function as build, not {_type_name(part.build)}"
    kind = part.declaration
    if not isinstance(kind, SublayerKind):
        yield f"must have a SublayerKind as declaration, not {_type_name(kind)}"
    else:
        yield from kind.width_problems()
        tables = {"parameters": kind.parameters, "buffers": kind.buffers}
        yield from _declaration_problems(tables, kind.widths)


def _norms_problems(part: object) -> Iterator[str]:
    if not (isinstance(part, Mapping) and part.keys() == {"attention", "feed_forward"}):
        yield 'must be a dict of "attention" and "feed_forward"'
    else:
        yield from _declaration_problems(part)


def _declaration_problems(
    declared: Mapping[str, Mapping[str, Parameter]], widths: Mapping[str, int] = {}
) -> Iterator[str]:
    for table, parameters in declared.items():
        if not isinstance(parameters, Mapping):
            yield f"{table} must be a dict of Parameter by name, not {_type_name(parameters)}"
            continue
        for name, each in parameters.items():
            if isinstance(each, Parameter):
                problems = each.problems(widths)
                yield from (f"{table}: {name} {problem}" for problem in problems)
            else:
                yield f"{table}: {name} must be a Parameter, not {_type_name(each)}"


def _callable_problems(part: object) -> Iterator[str]:
    if not callable(part):
        yield f"must be a class or a function, not {_type_name(part)}"


def _type_name(value: object) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


HOOKS = ("on_step", "on_checkpoint", "on_end")
CALLED = ("optimizers", "losses", "trackers", "sources", "tokenizers")
PART_PROBLEMS: dict[str, Callable[[object], Iterator[str]]] = {
    "families": _family_problems,
    "hf_families": _hf_family_problems,
    "mixers": _sublayer_problems,
    "feed_forwards": _sublayer_problems,
    "norms": _norms_problems,
    **dict.fromkeys(CALLED, _callable_problems),
}
"""Functions that say why a value is no part, by the field of `Extension`."""


class Installed(NamedTuple):
    extension: Extension
    reference: str
    """The name in `job.extension`, such as `package.module:function`."""
    folder: Path
    """Folder of the source; a file for a module in no package."""
    source_hash: str

    def holds(self, file: Path) -> bool:
        return self.folder == file or self.folder in file.parents


_installed: dict[str, Installed] = {}
"""Extensions of this process by reference."""


def installed() -> list[Installed]:
    return [*_installed.values()]


def references() -> tuple[str, ...]:
    """References for another process of the run, which installs them to have the same parts."""
    return (*_installed,)


def adding(table: str, name: str) -> Installed | None:
    """The extension whose table of this name has a part of this name; None if it is ours."""
    found = (each for each in _installed.values() if name in getattr(each.extension, table))
    return next(found, None)


def added_source(suffix: str) -> Installed | None:
    """The extension that reads files of this suffix."""
    return adding("sources", suffix)


def is_no_attention(mixer: str) -> bool:
    """Whether an added mixer is no `Attention`: context parallelism and generation exchange its
    core for another.
    """
    if (added := adding("mixers", mixer)) is None:
        return False
    from models.attention import Attention  # Imports torch.

    build = added.extension.mixers[mixer].build
    return isinstance(build, type) and not issubclass(build, Attention)


def identity() -> dict[str, str]:
    """Name and version of every extension; a run is resumed with the same."""
    return {f"extension.{each.extension.name}": each.extension.version for each in installed()}


def source_hashes() -> dict[str, str]:
    return {f"extension_source.{each.extension.name}": each.source_hash for each in installed()}


def install(references: Iterable[str]) -> None:
    """Imports the extensions and adds their parts to our tables, once in a process.

    Raises ConfigError.
    """
    for reference in references:
        if reference not in _installed:
            installing = _load(reference)
            _add_parts(installing)
            _installed[reference] = installing


def recorded_problem(recorded: Iterable[str], given: Iterable[str], found_in: Path) -> list[str]:
    """The problem of extensions that a file on disk names and the user did not; empty if none."""
    # A run folder or checkpoint may come from a stranger, whose code must not run because somebody
    # opened it.
    missing = [each for each in recorded if each not in given]
    if not missing:
        return []
    return [
        f"{found_in} names job.extension = {', '.join(missing)}, code that is imported only if you name it too: "
        f"add --job.extension {','.join(missing)}"
    ]


def describe_error(error: BaseException) -> str | None:
    """Names the extension that an error comes from, with file and line; None if it comes from
    none.
    """
    return extension_errors.describe(error, installed())


def _raised(error: BaseException, frame: traceback.FrameSummary) -> str:
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _load(reference: str) -> Installed:
    module_name, _, function_name = reference.partition(":")
    if module_name.partition(".")[0] in OWN_PACKAGES:
        raise _refused(
            reference, f"its package must not be called {', '.join(OWN_PACKAGES)}, which are ours"
        )
    if (working_folder := str(Path.cwd())) not in sys.path:
        sys.path.append(working_folder)  # Last: ours are found first.
    try:
        module = import_module(module_name)
        extension = getattr(module, function_name)()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever somebody else's code raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise _refused(
            reference, f"it cannot be imported and called: {_raised(error, frame)}"
        ) from None
    if not isinstance(extension, Extension):
        raise _refused(reference, f"it must return an Extension, not {type(extension).__name__}")
    same_name = [each.reference for each in installed() if each.extension.name == extension.name]
    if same_name:
        raise _refused(reference, f'its name "{extension.name}" is that of {same_name[0]}')
    folder = _source(module_name)
    return Installed(extension, reference, folder, _hash_of(folder))


def _source(module_name: str) -> Path:
    """The folder of the top-level package, or the file of a module that lies in none."""
    spec = find_spec(module_name.partition(".")[0])
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(str(spec.origin if spec else None)).resolve()


def _hash_of(source: Path) -> str:
    # Names relative to the package: the same source has the same hash wherever it is installed.
    # Zero bytes separate names from contents, so that text cannot move between files unnoticed.
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
        digest.update(
            str(file.relative_to(source.parent)).encode() + b"\0" + file.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]


def _add_parts(installing: Installed) -> None:
    extension = installing.extension
    if mistaken := extension.problems():
        raise _refused(installing.reference, "; ".join(mistaken))
    if wrong := [suffix for suffix in extension.sources if not SOURCE_SUFFIX.fullmatch(suffix)]:
        raise _refused(
            installing.reference,
            f"sources {', '.join(wrong)}: a suffix is written .name, in lower case",
        )
    # Built-in tables are extended in place. Optimizers, trackers, sources and tokenizers are
    # looked up in `installed()` instead: for them a temporary table of known names finds
    # conflicts.
    tables: list[tuple[str, MutableMapping[str, Any], Mapping[str, Any]]] = [
        ("mixers", layers.MIXERS, _declarations(extension.mixers)),
        ("feed_forwards", layers.FEED_FORWARDS, _declarations(extension.feed_forwards)),
        ("norms", layers.NORMS, extension.norms),
        ("families", presets.FAMILIES, extension.families),
        ("hf_families", hf_families.FAMILIES, extension.hf_families),
        ("optimizers", dict.fromkeys(optimizer_names()), extension.optimizers),
        ("losses", dict.fromkeys(loss_names()), extension.losses),
        ("trackers", dict.fromkeys(_tracker_names()), extension.trackers),
        ("sources", dict.fromkeys(_source_suffixes()), extension.sources),
        ("tokenizers", dict.fromkeys(tokenizer_kinds()), extension.tokenizers),
    ]
    taken = [
        f'{table} "{name}"'
        for table, ours, theirs in tables
        for name, part in theirs.items()
        # Compared by identity: adding the same object twice is harmless. Names of a temporary
        # table have the value None and always conflict.
        if ours.get(name, part) is not part
    ]
    if taken:
        raise _refused(installing.reference, f"it may not replace {', '.join(taken)}")
    for _, ours, theirs in tables:
        ours.update(theirs)
    if extension.mixers or extension.feed_forwards:
        from models import transformer  # Imports torch.

        transformer.MIXERS.update({name: each.build for name, each in extension.mixers.items()})
        transformer.FEED_FORWARDS.update(
            {name: each.build for name, each in extension.feed_forwards.items()}
        )
    # Presets are checked last, since they may use kinds of layers that were added just now.
    problems = [
        f"family {family}, size {size}: {problem}"
        for family, sizes in extension.families.items()
        for size, model in sizes.items()
        for problem in model.problems()
    ]
    if problems:
        raise _refused(installing.reference, "; ".join(problems))


def _declarations(sublayers: Mapping[str, Sublayer]) -> dict[str, SublayerKind]:
    return {name: each.declaration for name, each in sublayers.items()}


def _names(built_in: Iterable[str], table: str) -> list[str]:
    """Names in a table of parts: ours, then those of extensions."""
    added = (getattr(each.extension, table) for each in installed())
    return [*built_in, *chain.from_iterable(added)]


def optimizer_names() -> list[str]:
    return _names(BUILT_IN_OPTIMIZERS, "optimizers")


def loss_names() -> list[str]:
    return _names(BUILT_IN_LOSSES, "losses")


def added_loss(name: str) -> Callable[[Any, Any], Any] | None:
    """A loss that an extension adds; None for ours."""
    found = (each.extension.losses.get(name) for each in installed())
    return next((loss for loss in found if loss is not None), None)


def _tracker_names() -> list[str]:
    return _names(BUILT_IN_TRACKERS, "trackers")


def _source_suffixes() -> list[str]:
    return _names(BUILT_IN_SOURCES, "sources")


def tokenizer_kinds() -> list[str]:
    return _names(BUILT_IN_TOKENIZERS, "tokenizers")


def _refused(reference: str, problem: str) -> ConfigError:
    return ConfigError([f"job.extension = {reference}: {problem}"])
