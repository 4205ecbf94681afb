"""Training process: parse the run, load data, join the process group, train.

Usually launched by ./run_train.sh.
"""

from __future__ import annotations

import gc
import os
import sys

from trainer.resilience.signals import Interrupted, SignalHandler, die_with_launcher

SIGNAL_HANDLER = SignalHandler()

if __name__ == "__main__":
    # Before the imports below: torch takes seconds, in which the launcher may die or a stop signal
    # arrive.
    die_with_launcher()
    SIGNAL_HANDLER.install()
    # A sixth of the imports' time goes to the collector of cycles, which finds none in them.
    gc.disable()

import faulthandler
import logging
import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from parallelisms.mesh.values import ValueExchangeError
from trainer.config import extension
from trainer.config.job_config import TrainingStage
from trainer.config.run_spec import RunSpec
from trainer.config.training_stages import Recipe
from trainer.data.datasets import build_train_dataset, build_validation_sets
from trainer.data.holdout import ValidationSet
from trainer.data.sequences import BlendedDataset
from trainer.errors import (
    EXIT_FAILURE,
    EXIT_SUCCESS,
    DivergedError,
    RankFailedError,
    RunError,
    RunFailedError,
    RunFolderHeldElsewhereError,
    RunFolderInUseError,
    failure_ending,
)
from trainer.metrics import loggers
from trainer.metrics.prediction import Prediction, write_prediction
from trainer.resilience.preemption import Preemption, job_deadline
from trainer.resilience.watchdog import summarize_hang
from trainer.run.auto_compile import resolve_auto_compile
from trainer.run.train_loop import train
from trainer.step.added_parts import require_sound_parts
from trainer.step.process_group import (
    process_group,
    rank_from_environment,
    require_same_checkpoint,
    require_same_config,
    resolve_auto_memory,
)
from trainer.storage import exit_markers
from trainer.storage.durable_io import keep_others_from_writing
from trainer.storage.lease import Lease
from trainer.storage.run_dir import RunDir, finished_message, next_stage
from trainer.storage.uploads import Uploads, finish_uploads, uploads_of

log = logging.getLogger("trainer")

EXIT_TIMEOUT_SECONDS = 120.0


def main(argv: list[str], signal_handler: SignalHandler | None = None) -> int:
    """Trains this rank's part of a run and returns the exit code.

    `argv` is the JSON of a `RunSpec`, or launcher flags.
    """
    # torchrun starts this script on each rank with the launcher's flags.
    if not argv or not argv[0].startswith("{"):
        exec_launcher(argv)
    keep_others_from_writing()
    rank, _, local_rank = rank_from_environment()
    # One rank per node reports errors, since nodes may differ; inside the process group, errors
    # are the same on all.
    should_report = local_rank == 0
    prefix = f"[rank {rank}] " if rank else ""
    loggers.configure_logging(rank)
    if signal_handler is None:
        signal_handler = SignalHandler()
        signal_handler.install()
    spec = RunSpec.model_validate_json(argv[0])
    config = spec.config
    folder = RunDir(spec.config.output_dir)
    try:
        extension.install(config.job.extension)
        # Signals may raise here: no peer waits yet, and there is nothing to save.
        with signal_handler.raising():
            stage = next_stage(config)
            if stage is None:
                report_finished(config, is_leader=rank == 0)
                return EXIT_SUCCESS
            folder.create()
            loggers.add_log_file(folder.logs_dir, rank)
            # Before the process group exists: its timeout is too short for packing a large corpus.
            # Those of later stages, too, because their problems should show before this stage is
            # trained.
            dataset, *_ = [
                build_train_dataset(each.config, spec.datasets, stage=each.index)
                for each in config.training_stages[stage.index :]
            ]
            validation_sets = build_validation_sets(config, spec.datasets)
        should_report = rank == 0
        run_stage(spec, stage, folder, dataset, validation_sets, signal_handler)
    except Interrupted:
        # No marker: when a rank fails, srun signals all others, too.
        return report_failure(
            None, EXIT_FAILURE, "signalled before the first step", is_printed=rank == 0
        )
    except RankFailedError as error:
        return report_failure(folder, error.status, f"[rank {rank}] {error}")
    except RunFolderInUseError as error:
        # Its markers belong to the other launch.
        return report_failure(None, error.status, str(error))
    except RunFolderHeldElsewhereError as error:
        write_marker(folder, "RETRY", str(error), clears_others=False)
        return report_failure(None, error.status, str(error))
    except ValueExchangeError as error:  # All ranks receive the same.
        return report_failure(folder, EXIT_FAILURE, str(error), is_printed=should_report)
    except RunError as error:
        problems = [prefix + problem for problem in error.problems]
        return report_failure(folder, error.status, *problems, is_printed=should_report)
    return EXIT_SUCCESS


def report_finished(config: Recipe, *, is_leader: bool) -> None:
    """Says that the run is done, once its checkpoints are uploaded. Raises `RunFailedError`."""
    if is_leader:
        finish_uploads(config)
    log.info(finished_message(config))


def exec_launcher(argv: list[str]) -> NoReturn:
    """Replaces this process by the launcher, which prepares the run and executes this script
    again; for torchrun.
    """
    root = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # -P keeps the working directory off the path: a file there could shadow a module. PYTHONPATH
    # has the root instead.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "trainer.launch", *argv])


def run_stage(
    spec: RunSpec,
    stage: TrainingStage,
    folder: RunDir,
    dataset: BlendedDataset,
    validation_sets: list[ValidationSet],
    signal_handler: SignalHandler,
) -> None:
    """Trains a stage on all ranks; rank 0 holds the run folder and uploads its checkpoints."""
    config = spec.config
    rank, _, _ = rank_from_environment()
    uploads: Uploads | None = None
    with ExitStack() as held:
        if rank == 0:
            with signal_handler.raising():  # It may be waited for.
                job, attempt = (
                    os.environ.get(name, "")
                    for name in ("SLURM_JOB_ID", exit_markers.ATTEMPT_VARIABLE)
                )
                lease = held.enter_context(Lease(folder.logs_dir, job=job, attempt=attempt))
            folder.require_lease = lease.require
            # Not before the lease: another launch may hold the folder.
            if spec.prediction is not None:
                write_prediction(
                    folder.prediction_path,
                    Prediction.model_validate(spec.prediction, strict=False),
                )
            if (uploads := uploads_of(config, folder)) is not None:
                held.enter_context(uploads)
        reason = run_on_all_ranks(spec, stage, folder, dataset, validation_sets, signal_handler)
        # The other ranks exit meanwhile: nothing is left that they would wait for.
        if uploads is not None and (reason or stage.index + 1 == stage.num_stages):
            wait_for_uploads(uploads, signal_handler, is_done=not reason)


def run_on_all_ranks(
    spec: RunSpec,
    stage: TrainingStage,
    folder: RunDir,
    dataset: BlendedDataset,
    validation_sets: list[ValidationSet],
    signal_handler: SignalHandler,
) -> str:
    """Trains a stage in the process group of all ranks; rank 0 writes the exit marker.

    Returns the reason of a preemption, or "" at the end of the stage.
    """
    config = spec.config
    rank, _, _ = rank_from_environment()
    with process_group(config.distributed) as world:
        if rank == 0:
            report_previous_hang(folder, world.size)
        # Before the model: ranks with other configurations or data would hang in collectives, or
        # train on garbage.
        require_same_config(stage.config, _fingerprints(dataset, validation_sets))
        require_same_checkpoint(f"{stage} from {folder.resume_checkpoint(config)}")
        preemption = Preemption(
            config, signal_handler, is_leader=rank == 0, deadline=job_deadline(config, os.environ)
        )
        require_sound_parts(stage.config, world.device, is_sharded=world.size > 1)
        # Compilation first: what memory "auto" chooses depends on it.
        compiled = resolve_auto_compile(stage.config, world)
        stage = replace(stage, config=resolve_auto_memory(compiled, world, folder.prediction_path))
        reason = train(
            config,
            stage,
            folder,
            world,
            dataset=dataset,
            validation_sets=validation_sets,
            preemption=preemption,
        )
        # Everything is saved, so the exit must not wait for ranks that have already exited.
        faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True)
        if reason and not config.checkpoint.enabled:
            raise DivergedError(
                f"{reason}: stopped without a checkpoint, because checkpoint.enabled = false"
            )
        if rank == 0 and (reason or stage.index + 1 == stage.num_stages):
            write_marker(folder, "REQUEUE" if reason else "DONE", reason or "all steps are done")
    return reason


def wait_for_uploads(uploads: Uploads, signal_handler: SignalHandler, *, is_done: bool) -> None:
    """Waits for the copies of all checkpoints.

    Raises `RunFailedError` if a run that is done lacks one. A preempted run only logs it: its next
    launch uploads it.
    """
    # An upload may take longer than an exit.
    faulthandler.cancel_dump_traceback_later()
    # The signal that preempted a run, and its repeats, do not end the wait.
    problem = uploads.finish(lambda: is_done and signal_handler.signal is not None)
    faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True)
    if problem and is_done:
        raise RunFailedError(f"the run is done, but {problem}; the same command uploads it")
    if problem:
        log.warning("%s; the next launch uploads it", problem)


def _fingerprints(dataset: BlendedDataset, validation_sets: list[ValidationSet]) -> dict[str, str]:
    """Fingerprints of all data that the ranks read, by what they are of."""
    return (
        {f"fingerprint of {name}": value for name, value in dataset.fingerprints.items()}
        | {f"packing plan of {name}": value for name, value in dataset.plan_fingerprints.items()}
        | {
            f"fingerprint of validation set {each.name}": each.fingerprint
            for each in validation_sets
        }
    )


def report_previous_hang(folder: RunDir, world_size: int) -> None:
    """Logs a hang of the previous launch, and removes its exit markers."""
    for line in summarize_hang(folder.hangs_dir, world_size):
        log.warning("the previous launch hung: %s", line)
    with suppress(OSError):
        exit_markers.clear(folder.path)


def report_failure(
    folder: RunDir | None, status: int, *problems: str, is_printed: bool = True
) -> int:
    """Writes the marker of this ending, and prints the problems. Returns the status.

    Every rank writes the marker: the first that exits may end the others, before one of them does.
    """
    if folder is not None:
        write_marker(folder, failure_ending(status).marker, "; ".join(problems))
    if is_printed:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


def write_marker(folder: RunDir, kind: str, reason: str, *, clears_others: bool = True) -> None:
    attempt = os.environ.get(exit_markers.ATTEMPT_VARIABLE)
    # An unwritable folder is already the reported problem.
    with suppress(OSError):
        exit_markers.write(
            folder.path, kind, reason=reason, attempt=attempt, clears_others=clears_others
        )


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    status = EXIT_FAILURE
    try:
        status = main(sys.argv[1:], SIGNAL_HANDLER)
    except BaseException as error:  # noqa: BLE001 - peers must not wait for this interpreter's shutdown
        if culprit := extension.describe_error(error):
            loggers.write_traceback(error)
            sys.stderr.write(f"error: {culprit}\n")
        else:
            traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors, which may wait forever for ranks that have exited.
    os._exit(status)
