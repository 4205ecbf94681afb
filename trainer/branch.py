"""`longhaul branch RUN[@STEP] NEW`: a run that starts from a checkpoint of another one.

Writes the run folder NEW and starts nothing. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.initial_weights import find_checkpoint
from trainer.command_table import typed
from trainer.commands import (
    CHECKPOINT_HELP,
    CommandParser,
    checkpoint_path,
    overrides_help,
    print_lines,
    run_command,
)
from trainer.config import checks, extension
from trainer.config.job_config import Config, TrainingStage
from trainer.config.parse import COMMAND_LINE, load, parse_arguments
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError, ResumeError
from trainer.launch.initial_checks import validate_initial_weights
from trainer.storage import lineage, manifest
from trainer.storage.durable_io import atomic_folder, format_bytes, fsync_path, write_and_fsync
from trainer.storage.lineage import Lineage
from trainer.storage.manifest import Manifest
from trainer.storage.run_dir import (
    RunDir,
    describe_differences,
    find_checkpoints,
    flatten_config,
    is_fixed,
    run_identity,
    stage_position,
)
from trainer.storage.train_state import TrainState

DESCRIPTION = """\
Makes the run folder NEW, a run that starts from a checkpoint of RUN: the newest one, or that of STEP. Weights, optimizer,
data position and step continue, and so does the configuration of RUN with the keys that you give. Starts nothing.

Unchanged, a branch trains bitwise as RUN does. Other data, lengths or seeds start the data from its beginning, and another
optimizer starts without state; the command says so. The model and the tokenizer cannot change, except for RoPE."""
INITIAL_FOLDER = "initial"
"""Folder of the weights that a branch of weights alone starts from."""

LAUNCH_SECTIONS = (
    "parallelism.",
    "memory.",
    "checkpoint.",
    "metrics.",
    "profiler.",
    "distributed.",
)
"""Sections that may differ between two launches of one run."""


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("branch"), DESCRIPTION, run=make_branch, overrides=overrides_help)
    add = parser.add_argument
    add("parent", type=checkpoint_path, metavar="RUN[@STEP]", help=CHECKPOINT_HELP)
    add("folder", type=Path, metavar="NEW", help="run folder to create")
    add(
        "--config",
        metavar="NAME|PATH",
        help="configuration of the branch, stages included; default: that of RUN",
    )
    add(
        "--fresh-optimizer",
        action="store_true",
        help="start without optimizer state",
    )
    add(
        "--fresh-data",
        action="store_true",
        help="start at the first sequence, with counters of tokens at zero",
    )
    add(
        "--weights-only",
        action="store_true",
        help="take nothing but weights: steps, schedule, data and optimizer start from the beginning",
    )
    return parser


def make_branch(options: Namespace, overrides: list[str]) -> None:
    """Writes the folder, and prints what it is and the command that trains it."""
    folder: Path = options.folder
    if folder.is_symlink() or folder.exists():
        raise ConfigError([f"{folder} exists already; a branch needs a new folder"])
    if options.weights_only and (options.fresh_optimizer or options.fresh_data):
        raise ConfigError(
            [f"{COMMAND_LINE}: --weights-only includes --fresh-optimizer and --fresh-data"]
        )
    parent, checkpoint = find_parent(options.parent)
    checkpoint_manifest = manifest.read_intact(checkpoint, check_hashes=False)
    state = lineage.read_state(parent, checkpoint)
    config = _branch_config(options, overrides, parent, state)
    if options.weights_only:
        record = _weights_lineage(folder, parent, checkpoint, state, config)
    else:
        record = _continued_lineage(options, parent, checkpoint, state, config)
    if problems := RunDir(folder).problems():
        raise ConfigError(problems)
    place = Path(INITIAL_FOLDER) if options.weights_only else _step_folder(state.step)
    with atomic_folder(folder) as draft:
        linked = _link_checkpoint(checkpoint, draft / place, checkpoint_manifest)
        write_and_fsync(draft / RunDir(draft).config_path.name, to_toml(config).encode())
        lineage.write(draft, record)
    start = state.step if record.carries_step else 0
    stages = [each for each in config.training_stages if each.name and each.end_step > start]
    size = format_bytes(checkpoint_manifest.bytes)
    how = "shares its files" if linked else "copied"
    print_lines(
        f"{folder}: branch of {parent} at step {state.step} ({size}, {how})",
        *(f"{line}" for line in record.describe_parts().split("; ")),
        *(f"changed: {change}" for change in record.describe_changes()),
        *(each.summary() for each in stages),
        f"to train it: {typed('train', '--config', folder / 'config.toml')}",
    )


def _step_folder(step: int) -> Path:
    return Path("checkpoints") / f"step-{step}"


# ---- the parent


def find_parent(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that a path names, of a run folder the newest intact one.

    Raises `ConfigError` if there is none, `ResumeError` if it is not intact.
    """
    run_dir, checkpoints = find_checkpoints(path)
    if not checkpoints:
        committed = [each.name for _, each in run_dir.committed_checkpoints()]
        raise ConfigError(
            [
                f"{path} is no checkpoint of a run; {run_dir.checkpoints_dir} contains {', '.join(committed) or 'none'}"
            ]
        )
    return run_dir.path, find_checkpoint(path)


# ---- the configuration


def _branch_config(
    options: Namespace, overrides: Sequence[str], parent: Path, state: TrainState
) -> Recipe:
    """The configuration of the branch: that of the parent or of --config, with the given keys.

    Raises `ConfigError`.
    """
    given = parse_arguments(overrides).values
    job = given.get("job", {})
    if "output_dir" in job:
        raise ConfigError([f"{COMMAND_LINE}: --job.output_dir is the folder NEW; leave it out"])
    arguments = [*overrides, f"--job.output_dir={options.folder}"]
    if "name" not in job:
        arguments.append(f"--job.name={options.folder.name}")
    if options.config is None:
        arguments = ["--config", str(RunDir(parent).config_path.resolve()), *arguments]
        recorded = load(arguments, imports_extensions=False).job.extension
        if problems := extension.recorded_problem(
            recorded, job.get("extension", ()), RunDir(parent).config_path
        ):
            raise ConfigError(problems)
    config = load(arguments)
    problems = checks.stage_problems(config) or [
        problem for stage in config.training_stages for problem in stage.config.model.problems()
    ]
    if problems:
        raise ConfigError(problems)
    initial = options.folder.absolute() / INITIAL_FOLDER if options.weights_only else None
    checkpoint = config.checkpoint.model_copy(
        update={"initial_load_path": initial and str(initial)}
    )
    # Another version would pack the documents into other sequences.
    version = config.data.packing_version or state.config.get("data.packing_version")
    data = config.data.model_copy(update={"packing_version": version})
    return config.model_copy(update={"checkpoint": checkpoint, "data": data})


def _weights_lineage(
    folder: Path, parent: Path, checkpoint: Path, state: TrainState, config: Recipe
) -> Lineage:
    """The lineage of a branch that takes weights alone.

    Raises `ConfigError` if they do not fit its model.
    """
    first = config.training_stages[0]
    section = first.config.checkpoint.model_copy(update={"initial_load_path": str(checkpoint)})
    validate_initial_weights(first.config.model_copy(update={"checkpoint": section}))
    return lineage.new_lineage(
        folder,
        parent,
        checkpoint,
        step=state.step,
        carries_step=False,
        carries_data=False,
        optimizer_start=0,
        stage=stage_position(first),
        changed=_changes(state.config, flatten_config(first.config)),
    )


def _continued_lineage(
    options: Namespace, parent: Path, checkpoint: Path, state: TrainState, config: Recipe
) -> Lineage:
    """The lineage of a branch that continues at the parent's step.

    Raises `ConfigError` with what a branch cannot change.
    """
    stage = _stage_at(config, state.step)
    values = flatten_config(stage.config)
    was = run_identity(state.config)
    now = run_identity(values)
    differing = {key for key in was.keys() | now.keys() if was.get(key) != now.get(key)}
    problems = _fixed_problems(state, values, differing) + _end_problems(config, state.step)
    if problems:
        raise ConfigError(problems)
    starts_optimizer = options.fresh_optimizer or "optimizer.name" in differing
    position = stage_position(stage)
    same_sequences = (position.index, position.start_step) == (
        state.stage.index,
        state.stage.start_step,
    ) and not any(key.startswith(("data.", "training.")) for key in differing)
    carries_data = same_sequences and not options.fresh_data
    # The checkpoint may be the one that the parent itself branched from: what was fresh there is
    # fresh here, and the changes add up.
    stored = manifest.read_state(checkpoint)
    before = lineage.read(parent)
    if before is not None and before.starts_at(checkpoint):
        carries_data = carries_data and before.carries_data
        starts_optimizer = starts_optimizer or not before.carries_optimizer
    return lineage.new_lineage(
        options.folder,
        parent,
        checkpoint,
        step=state.step,
        carries_step=True,
        carries_data=carries_data,
        optimizer_start=state.step if starts_optimizer else _optimizer_start(state),
        stage=position,
        changed=_changes(stored.config, values),
    )


def _stage_at(config: Config, step: int) -> TrainingStage:
    """The stage of the branch that the checkpoint belongs to."""
    stages = config.training_stages
    return next((stage for stage in stages if step <= stage.end_step), stages[-1])


def _end_problems(config: Config, step: int) -> list[str]:
    stages = config.training_stages
    total = stages[-1].end_step
    more = "another [[stage]]" if stages[0].name else f"--training.steps above {step}"
    problem = (
        f"the branch starts at step {step} and would be done at step {total}: it needs {more}"
    )
    return [problem] if step >= total else []


def _fixed_problems(
    state: TrainState, values: Mapping[str, Any], differing: set[str]
) -> list[str]:
    """One line per value that a branch cannot change."""
    dtypes = {state.config.get("training.dtype"), values["training.dtype"]}
    fixed = [key for key in differing if is_fixed(key)]
    # Tensors of float64 have no other form; the others are float32 in every checkpoint.
    if len(dtypes) > 1 and "float64" in dtypes:
        fixed.append("training.dtype")
    return [
        f"{line}: a branch cannot change it"
        for line in describe_differences(
            {key: state.config.get(key) for key in fixed}, {key: values.get(key) for key in fixed}
        )
    ]


def _optimizer_start(state: TrainState) -> int:
    """The step after which the optimizer of a checkpoint started, by the steps that it counts."""
    counted = state.optimizer_steps
    undisturbed = state.step - state.trainer.skipped
    return 0 if counted in (None, undisturbed) else state.step - counted


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that make the branch another run than its parent."""
    return {
        key: (was.get(key), now.get(key))
        for key in sorted(was.keys() | now.keys())
        # A checkpoint holds what "auto" was resolved to.
        if was.get(key) != now.get(key)
        and now.get(key) != "auto"
        and not key.startswith(LAUNCH_SECTIONS)
    }


# ---- the files


def _link_checkpoint(checkpoint: Path, target: Path, listed: Manifest) -> bool:
    """Gives the files of a checkpoint a second name, or copies them; whether all are shared.

    Nothing writes into a file of a checkpoint, so two runs can share one. Raises `ResumeError` if
    the checkpoint is removed meanwhile.
    """
    target.mkdir(parents=True)
    try:
        linked = [
            _link_or_copy(checkpoint / name, target / name)
            for name in sorted((*listed.files, manifest.MANIFEST_FILE))
        ]
    except FileNotFoundError as error:
        raise ResumeError(f"{error.filename} was removed meanwhile; choose another step") from None
    for made in (target, target.parent):
        fsync_path(made)
    return all(linked)


def _link_or_copy(source: Path, target: Path) -> bool:
    # Somebody else could write into his file later, and thereby into the branch.
    if source.lstat().st_uid == os.geteuid():
        # Another file system, or one without hard links.
        with suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            return True
    shutil.copyfile(source, target, follow_symlinks=False)
    fsync_path(target)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
