"""A run of Longhaul: parse -> check -> build -> loop -> exit status. Usually started by ./run_train.sh."""

from __future__ import annotations

import os
import sys

from trainer.resilience.signals import Interrupted, SignalHandler, die_with_launcher

SIGNAL_HANDLER = SignalHandler()

if __name__ == "__main__":
    # Importing torch takes seconds: the launcher may die, or a stop signal may arrive, before it is done.
    die_with_launcher()
    SIGNAL_HANDLER.install()

import faulthandler
import logging
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from trainer.checkpoint.run_dir import ResumeError, RunDir, finished_message, next_stage
from trainer.config.job_config import Config, TrainingStage
from trainer.data.datasets import build_train_dataset, build_validation_sets
from trainer.data.holdout import ValidationSet
from trainer.data.sequences import BlendedDataset
from trainer.distributed import (
    process_group,
    rank_from_environment,
    require_same_checkpoint,
    require_same_config,
    resolve_auto,
)
from trainer.errors import (
    EXIT_BAD_CONFIG,
    EXIT_FAILURE,
    EXIT_NO_RETRY,
    EXIT_SUCCESS,
    ConfigError,
    DataError,
    RankFailedError,
    RunFailedError,
    RunFolderInUseError,
)
from trainer.metrics import log_setup
from trainer.resilience import exit_markers
from trainer.resilience.anomalies import DivergedError
from trainer.resilience.hang_report import summarize_hang
from trainer.resilience.preemption import Preemption, job_deadline
from trainer.run_spec import RunSpec
from trainer.train_loop import train

log = logging.getLogger("trainer")

EXIT_TIMEOUT_SECONDS = 120.0


def main(argv: list[str], signal_handler: SignalHandler | None = None) -> int:
    """Trains on this rank what `argv` specifies as the JSON of a `RunSpec`; returns the exit code."""
    if not argv or not argv[0].startswith("{"):
        become_launcher(argv)
    rank, _, local_rank = rank_from_environment(os.environ)
    # One rank of each node, since nodes may differ; from the process group on, all find the same.
    should_report, prefix = local_rank == 0, f"[rank {rank}] " if rank else ""
    log_setup.configure(rank)
    if signal_handler is None:
        signal_handler = SignalHandler()
        signal_handler.install()
    spec = RunSpec.from_json(argv[0])
    config, folder = spec.config, RunDir(spec.config.output_dir)
    try:
        # Nobody waits yet, and there is nothing to save.
        with signal_handler.raising():
            stage = next_stage(config)
            if stage is None:
                log.info(finished_message(config))
                return EXIT_SUCCESS
            folder.create()
            log_setup.add_file_handler(folder.logs_dir, rank)
            # Before the process group exists: its timeout is too short for packing a large corpus.
            datasets = [
                build_train_dataset(each.config, spec.datasets, stage=each.index)
                for each in config.training_stages[stage.index :]
            ]
            validation_sets = build_validation_sets(config, spec.datasets)
        should_report = rank == 0
        run_stage(config, stage, folder, datasets, validation_sets, signal_handler)
    except Interrupted:
        # No marker: a peer that fails also has srun ask all others to leave.
        return report_failure(None, EXIT_FAILURE, *(["asked to leave before the first update"] if rank == 0 else ()))
    except RankFailedError as error:
        return report_failure(folder, error.status, f"[rank {rank}] {error}")
    except RunFolderInUseError as error:
        return report_failure(None, EXIT_BAD_CONFIG, str(error))  # The markers there are the other run's.
    except ConfigError as error:
        return report_failure(
            folder, EXIT_BAD_CONFIG, *(prefix + problem for problem in error.problems if should_report)
        )
    except (DataError, DivergedError, ResumeError) as error:
        return report_failure(folder, EXIT_NO_RETRY, *[f"{prefix}{error}"] * should_report)
    except RunFailedError as error:
        return report_failure(folder, EXIT_FAILURE, *[f"{prefix}{error}"] * should_report)
    return EXIT_SUCCESS


def become_launcher(argv: list[str]) -> NoReturn:
    """The launcher checks the configuration, prepares the data, and becomes this script again: for torchrun."""
    root = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-m", "trainer.launch", *argv])


def run_stage(
    config: Config,
    stage: TrainingStage,
    folder: RunDir,
    datasets: list[BlendedDataset],
    validation_sets: list[ValidationSet],
    signal_handler: SignalHandler,
) -> None:
    """Runs a stage on all ranks, and says how it ended."""
    rank, _, _ = rank_from_environment(os.environ)
    with folder.lock(is_rank_zero=rank == 0), process_group(config.distributed) as world:
        if rank == 0:
            report_previous_hang(folder, world.size)
        fingerprints = {f"fingerprint of {name}": value for name, value in datasets[0].fingerprints.items()}
        fingerprints |= {f"fingerprint of the set {each.name}": each.fingerprint for each in validation_sets}
        require_same_config(stage.config, fingerprints)
        require_same_checkpoint(f"{stage} from {folder.resume_checkpoint(config)}")
        preemption = Preemption(config, signal_handler, is_leader=rank == 0, deadline=job_deadline(config, os.environ))
        stage = replace(stage, config=resolve_auto(stage.config, world, folder.prediction_path))
        reason = train(
            config, stage, folder, world, datasets=datasets, validation_sets=validation_sets, preemption=preemption
        )
        # All is saved: whoever waits for ranks that have left must not wait for ever.
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True)
        if reason and not config.checkpoint.enabled:
            raise DivergedError(f"{reason}: left without a checkpoint, because checkpoint.enabled = false")
        if rank == 0 and (reason or stage.index + 1 == stage.num_stages):
            write_marker(folder, "REQUEUE" if reason else "DONE", reason or "all updates are done")


def report_previous_hang(folder: RunDir, world_size: int) -> None:
    """What the start before left is told, and says nothing about this one."""
    for line in summarize_hang(folder.hangs_dir, world_size):
        log.warning("the start before hung: %s", line)
    with suppress(OSError):
        exit_markers.clear(folder.path)


def report_failure(folder: RunDir | None, status: int, *problems: str) -> int:
    """Tells what is wrong, and whatever started this that a retry would not mend it."""
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    if folder is not None and problems and status in (EXIT_NO_RETRY, EXIT_BAD_CONFIG):
        write_marker(folder, "STOP", "; ".join(problems))
    return status


def write_marker(folder: RunDir, kind: exit_markers.ExitMarker, reason: str) -> None:
    # A folder that cannot be written to is what is told, then.
    with suppress(OSError):
        exit_markers.write(folder.path, kind, reason=reason, attempt=os.environ.get(exit_markers.ATTEMPT_VARIABLE))


if __name__ == "__main__":
    status = EXIT_FAILURE
    try:
        status = main(sys.argv[1:], SIGNAL_HANDLER)
    except BaseException:  # noqa: BLE001 - whatever it is, peers are not to wait for what the interpreter does at its end
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors, which may wait for ever for processes that have left.
    os._exit(status)
