"""Trackers in packages that a user installs: Weights & Biases, trackio and MLflow.

Each writes to a disk of this machine, unless the user's environment names a server. Each is made
and called in a thread (`InBackground`), so that training waits for no disk and no server. A
package is imported by the run that names it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from trainer.config.extension import TrackedRun
from trainer.metrics.event_words import FAULTS
from trainer.storage.run_id import run_id
from trainer.storage.train_state import flatten

log = logging.getLogger(__name__)

Value = float | Sequence[Sequence[float]]
"""A number, or a table: the load of experts has a row for each layer and a column for each
expert.
"""

PROJECT = "longhaul"
"""Project or experiment, unless the environment names another."""
MAX_WAITING = 10_000
"""Records that wait for a tracker, which is left out if they become more."""
CLOSE_SECONDS = 30.0
"""How long the end of a launch, or a rollback, waits for a tracker."""
EVENT_TEXT = "train_events/text"
"""Name of an event in words."""
FINISHED = ("train_events/end", "train_events/stage")
PREEMPTED = "train_events/preempted"
SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
"""In the names of environment variables."""
MIN_SECRET_CHARS = 6


class Tracker(Protocol):
    """A destination of metrics on rank 0, created at the start of a launch and again after a
    rollback.
    """

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Takes what is known of a step; not necessarily all at once."""

    def close(self) -> None:
        """Ends the tracker. Called once."""


class NotingTracker(Tracker, Protocol):
    """A tracker that takes texts, too. One of an extension need not."""

    def note(self, step: int, kind: str, text: str) -> None:
        """Takes an event of a kind, in words."""


class InBackground:
    """A tracker in a thread of its own, which is given the `run_id` too.

    An error there is raised by the next call here.
    """

    def __init__(self, make: Callable[[TrackedRun, str], NotingTracker], run: TrackedRun) -> None:
        self._waiting: Queue[Callable[[NotingTracker], None] | None] = Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._thread = Thread(
            target=self._work, args=(make, run, run_id(run.folder)), name="tracker", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._put(lambda tracker: tracker.log(step, values))

    def note(self, step: int, kind: str, text: str) -> None:
        self._put(lambda tracker: tracker.note(step, kind, text))

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(
                f"not finished within {CLOSE_SECONDS:g} s; what it has not sent is in metrics.jsonl"
            )
        self._raise_error()

    def _put(self, call: Callable[[NotingTracker], None] | None) -> None:
        self._raise_error()
        try:
            self._waiting.put_nowait(call)
        except Full:
            raise TimeoutError(f"{MAX_WAITING:,} records wait for it") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(
        self, make: Callable[[TrackedRun, str], NotingTracker], run: TrackedRun, identity: str
    ) -> None:
        try:
            tracker = make(run, identity)
            while (call := self._waiting.get()) is not None:
                call(tracker)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - raised in the thread that trains
            self._error = error


class WeightsAndBiases:
    """An offline run in the run folder, or what WANDB_MODE says. `wandb sync` sends it later."""

    def __init__(self, run: TrackedRun, identity: str) -> None:
        # Read on import; an argument would leave the rest of the package online.
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        import wandb

        # Its folders are named by the second: after a quick rollback, the second would replace the
        # first.
        while [*run.folder.glob(f"wandb/*-{time.strftime('%Y%m%d_%H%M%S')}-{identity}")]:
            time.sleep(0.1)
        # Console, code and the git remote may hold what is nobody else's business.
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.folder),
            config=facts(run),
            settings=settings,
        )
        # The steps of W&B only ascend; ours come again after a rollback, and with what is known of
        # them later.
        self._run.define_metric("*", step_metric="step")
        self._seen = set[str]()
        if os.environ["WANDB_MODE"] == "offline":
            folder = Path(self._run.dir).parent
            log.info("Weights & Biases is offline; this sends the run: wandb sync %s", folder)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._seen.update(values)
        if PREEMPTED in values:
            self._run.mark_preempting()
        self._run.log({"step": step, **numbers(values)})

    def note(self, step: int, kind: str, text: str) -> None:
        self._run.log({"step": step, EVENT_TEXT: note_line(step, kind, text)})
        # W&B sends an alert only to users who have asked for them there.
        if kind in FAULTS:
            self._run.alert(kind, f"step {step}: {text}", level="WARN")

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._seen.intersection(FINISHED) else 1)


class Trackio:
    """A run in the folder of trackio (TRACKIO_DIR), or where TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL say.
    """

    def __init__(self, run: TrackedRun, identity: str) -> None:
        import trackio

        self._package = trackio
        # Found again by its name.
        name = f"{run.name}-{identity}"
        self._run = trackio.init(
            project=PROJECT, name=name, resume="allow", config=facts(run), embed=False
        )

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._run.log(numbers(values), step=step)

    def note(self, step: int, kind: str, text: str) -> None:
        report = self._package.Markdown(note_line(step, kind, text))
        self._run.log({EVENT_TEXT: report}, step=step)
        if kind in FAULTS:
            self._run.alert(kind, text, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run in `mlflow.db` of the run folder, or on the server of MLFLOW_TRACKING_URI."""

    TAG = "longhaul.run_id"
    MAX_PARAMS = 100
    """In one request."""
    MAX_PARAM_CHARS = 6000
    EVENTS_TAG = "longhaul.events"
    MAX_TAG_CHARS = 5000

    def __init__(self, run: TrackedRun, identity: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        is_local = "MLFLOW_TRACKING_URI" not in os.environ
        folder = run.folder.absolute()
        uri = f"sqlite:///{folder / 'mlflow.db'}" if is_local else None
        if is_local:
            log.info("MLflow: mlflow ui --backend-store-uri %s shows the run", uri)
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(folder.as_uri() if is_local else None)
        found = self._client.search_runs(
            [experiment], f"tags.`{self.TAG}` = '{identity}'", max_results=1
        )
        if found:
            self._id: str = found[0].info.run_id
            self._events = str(found[0].data.tags.get(self.EVENTS_TAG, ""))
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(
                experiment, tags={self.TAG: identity}, run_name=run.name
            )
            self._id = created.info.run_id
            self._events = ""
            self._log_params(flatten(facts(run)))
        self._seen = set[str]()

    def _experiment(self, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        return str(
            known.experiment_id if known else self._client.create_experiment(name, artifacts)
        )

    def _log_params(self, values: Mapping[str, object]) -> None:
        """Once in a run: MLflow refuses another value."""
        from mlflow.entities import Param

        params = [
            Param(_allowed(key), str(value)[: self.MAX_PARAM_CHARS])
            for key, value in values.items()
        ]
        for first in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + self.MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        from mlflow.entities import Metric

        self._seen.update(values)
        now = int(time.time() * 1000)
        metrics = [
            Metric(_allowed(name), value, now, step) for name, value in numbers(values).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def note(self, step: int, kind: str, text: str) -> None:
        """Adds a line to the tag of events, from which the oldest ones are dropped.

        The run's description is left to its owner.
        """
        lines = [note_line(step, kind, text), *self._events.splitlines()]
        while len("\n".join(lines)) > self.MAX_TAG_CHARS:
            lines.pop()
        self._events = "\n".join(lines)
        self._client.set_tag(self._id, self.EVENTS_TAG, self._events)

    def close(self) -> None:
        self._client.set_terminated(
            self._id, "FINISHED" if self._seen.intersection(FINISHED) else "KILLED"
        )


def note_line(step: int, kind: str, text: str) -> str:
    """An event in words, where it is shown without its step."""
    return f"step {step}, {kind}: {text}"


def _allowed(name: str) -> str:
    """MLflow allows no other characters in names."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Without tables."""
    return {
        name: float(value) for name, value in values.items() if not isinstance(value, Sequence)
    }


def facts(run: TrackedRun) -> dict[str, Any]:
    """The configuration of a run, what is predicted of it, and where its weights come from."""
    return {**run.config, "prediction": run.prediction, "lineage": run.lineage}


def without_secrets(text: str) -> str:
    """Hides passwords of URLs, and values of environment variables whose names say that they are
    secret.
    """
    secrets = [value for name, value in os.environ.items() if SECRET_NAME.search(name.upper())]
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = text.replace(secret, "***")
    return re.sub(r"://[^/\s@]+@", "://***@", text)
