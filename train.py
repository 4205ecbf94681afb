"""A run of Longhaul: parse -> check -> build -> loop -> exit status. Usually started by ./run_train.sh."""

from __future__ import annotations

import os
import sys

from trainer.resilience.signals import Asked, Requests

REQUESTS = Requests()

if __name__ == "__main__":
    # Importing torch takes seconds, in which the launcher may die and leave its workers to themselves, or somebody may
    # ask this process to leave.
    from trainer.launch.parent_death import die_with_launcher

    die_with_launcher()
    REQUESTS.listen()

import faulthandler
import logging
import traceback
from contextlib import suppress
from dataclasses import replace

from trainer.checkpoint.initial_weights import require_initial
from trainer.checkpoint.run_dir import ResumeError, RunFolder, finished, next_stage
from trainer.config.job_config import Config, Stage
from trainer.config.parse import load
from trainer.data import DataError, held_out_of, rows_of
from trainer.data.holdout import HeldOut
from trainer.data.sequences import Rows
from trainer.distributed import place, process_group, require_agreement, require_same_start, settled
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, ConfigError, InUseError, RankError, RunError
from trainer.metrics import log_setup
from trainer.resilience import exit_markers
from trainer.resilience.anomalies import LostError
from trainer.resilience.hang_report import suspects
from trainer.resilience.preemption import Stops, end_of_time
from trainer.train_loop import train

log = logging.getLogger("trainer")

EXIT_SECONDS = 120.0


def main(argv: list[str], requests: Requests | None = None) -> int:
    rank, world_size, local = place(os.environ)
    # One rank of each node, since nodes may differ; from the process group on, all find the same.
    speaks, who = local == 0, f"[rank {rank}] " if rank else ""
    log_setup.configure(rank)
    if requests is None:
        requests = Requests()
        requests.listen()
    folder: RunFolder | None = None
    try:
        config = load(argv)
        folder = RunFolder(config.output_dir)
        # Nobody waits yet, and there is nothing to save.
        with requests.raised():
            if problems := config.stage_problems():
                raise ConfigError(problems)
            stage = next_stage(config)
            config.require(world_size, first=stage.index if stage else 0)
            if stage is None:
                log.info(finished(config))
                return DONE
            require_initial(stage.config)
            folder.make()
            log_setup.keep(folder.logs, rank)
            # Before the process group exists: its patience is not made for tokenizing a corpus.
            rows = [rows_of(each.config, stage=each.index) for each in config.stages[stage.index :]]
            sets = held_out_of(config)
        speaks = rank == 0
        run(config, stage, folder, rows, sets, requests)
    except Asked:
        # No marker: a peer that fails also has srun ask all others to leave.
        return refuse(None, FAILED, *(["asked to leave before the first update"] if rank == 0 else ()))
    except RankError as error:
        return refuse(folder, error.status, f"[rank {rank}] {error}")
    except InUseError as error:
        return refuse(None, BAD_CONFIGURATION, str(error))  # The markers there are the other run's.
    except ConfigError as error:
        return refuse(folder, BAD_CONFIGURATION, *(who + problem for problem in error.problems if speaks))
    except (DataError, LostError, ResumeError) as error:
        return refuse(folder, NO_RETRY, *[f"{who}{error}"] * speaks)
    except RunError as error:
        return refuse(folder, FAILED, *[f"{who}{error}"] * speaks)
    return DONE


def run(
    config: Config, stage: Stage, folder: RunFolder, rows: list[Rows], sets: list[HeldOut], requests: Requests
) -> None:
    """Runs a stage on all ranks, and says how it ended."""
    rank, _, _ = place(os.environ)
    with folder.locked(leading=rank == 0), process_group(config.distributed) as world:
        if rank == 0:
            take_over(folder, world.size)
        facts = {f"fingerprint of {name}": value for name, value in rows[0].fingerprints.items()}
        facts |= {f"fingerprint of the set {each.name}": each.fingerprint for each in sets}
        require_agreement(stage.config, facts)
        require_same_start(f"{stage} from {folder.newest(config)}")
        stops = Stops(config, requests, leading=rank == 0, limit=end_of_time(config, os.environ))
        stage = replace(stage, config=settled(stage.config, world))
        reason = train(config, stage, folder, world, rows=rows, sets=sets, stops=stops)
        # All is saved: whoever waits for ranks that have left must not wait for ever.
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
        if reason and not config.checkpoint.enabled:
            raise LostError(f"{reason}: left without a checkpoint, because checkpoint.enabled = false")
        if rank == 0 and (reason or stage.index + 1 == stage.count):
            mark(folder, "REQUEUE" if reason else "DONE", reason or "all updates are done")


def take_over(folder: RunFolder, ranks: int) -> None:
    """What the start before left is told, and says nothing about this one."""
    for line in suspects(folder.hangs, ranks):
        log.warning("the start before hung: %s", line)
    with suppress(OSError):
        exit_markers.clear(folder.path)


def refuse(folder: RunFolder | None, status: int, *problems: str) -> int:
    """Tells what is wrong, and whatever started this that a retry would not mend it."""
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    if folder is not None and problems and status in (NO_RETRY, BAD_CONFIGURATION):
        mark(folder, "STOP", "; ".join(problems))
    return status


def mark(folder: RunFolder, kind: exit_markers.Kind, reason: str) -> None:
    # A folder that cannot be written to is what is told, then.
    with suppress(OSError):
        exit_markers.write(folder.path, kind, reason=reason, attempt=os.environ.get(exit_markers.ATTEMPT))


if __name__ == "__main__":
    status = FAILED
    try:
        status = main(sys.argv[1:], REQUESTS)
    except BaseException:  # noqa: BLE001 - whatever it is, peers are not to wait for what the interpreter does at its end
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors, which may wait for ever for processes that have left.
    os._exit(status)
