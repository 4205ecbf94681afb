"""The run folder: committed checkpoints, cut metrics, and which configuration can resume."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from models.layers import LayerKind
from tests.artifacts import forge, train_state
from trainer.config.data import PACKING_VERSION
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import ConfigError
from trainer.launch.launcher import load_and_validate
from trainer.storage import manifest
from trainer.storage.artifact import write_artifact
from trainer.storage.manifest import read_state
from trainer.storage.run_dir import (
    ResumeError,
    RunDir,
    check_resume,
    describe_differences,
    finished_message,
    flatten_config,
    keep_packing_version,
    run_identity,
)


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    values = {"job": {"output_dir": str(folder)}, "training": {"steps": 6}, **sections}
    return Config.model_validate(values)


def identity(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    return run_identity(flatten_config(config(folder, **sections)))


def commit(folder: Path, step: int, of: Config) -> Path:
    """A checkpoint without tensors."""
    checkpoint = folder / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    write_artifact(checkpoint / "state.json", train_state(of, step=step))
    (checkpoint / ".metadata").touch()
    seal(checkpoint)
    return checkpoint


def seal(checkpoint: Path) -> None:
    """Writes a manifest of the present files."""
    step = int(checkpoint.name.removeprefix("step-"))
    files = {name: manifest.hash_file(checkpoint / name) for name in ("state.json", ".metadata")}
    about = manifest.Manifest(
        step=step, attempt="a", world_size=1, mesh={}, versions={}, saved="", files=files
    )
    manifest.write(checkpoint, about)


# ---- committed checkpoints


def test_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    for step in (1000, 6, 30, 200):
        commit(tmp_path, step, config(tmp_path))
    assert [step for step, _ in RunDir(tmp_path).committed_checkpoints()] == [6, 30, 200, 1000]
    assert (
        RunDir(tmp_path).resume_checkpoint(config(tmp_path))
        == tmp_path / "checkpoints" / "step-1000"
    )


JUNK = [
    ".tmp-step-9",
    ".tmp-old-step-9",
    "step-",
    "step-9.bak",
    "step--9",
    "step-9a",
    "bad-step-9",
    "step-1e1",
    "steps-9",
]


@pytest.mark.parametrize("name", JUNK)
def test_a_folder_with_another_name_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    for folder in ("step-3", name):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    assert RunDir(tmp_path).committed_checkpoints() == [(3, tmp_path / "checkpoints" / "step-3")]


@pytest.mark.parametrize("name", ["step-09", "step-٩", "step-9²"])
def test_a_noncanonical_number_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert RunDir(tmp_path).committed_checkpoints() == []


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-9").touch()
    assert RunDir(tmp_path).committed_checkpoints() == []


def test_an_empty_or_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "absent").committed_checkpoints() == []
    (tmp_path / "checkpoints").mkdir()
    assert RunDir(tmp_path).committed_checkpoints() == []
    assert RunDir(tmp_path).resume_checkpoint(config(tmp_path)) is None


def test_a_run_with_checkpoints_disabled_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    off = config(tmp_path, checkpoint={"enabled": False})
    assert finished_message(off) is None
    commit(tmp_path, 6, off)
    assert RunDir(tmp_path).resume_checkpoint(off) is None
    with pytest.raises(ResumeError, match="would start over"):
        finished_message(off)


# ---- the folder


def test_create_makes_parents_and_accepts_an_existing_folder(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "a" / "b")
    folder.create()
    folder.create()
    assert [path.name for path in sorted(folder.path.iterdir())] == ["checkpoints", "logs"]


@pytest.mark.parametrize("child", ["", "deeper"])
def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path, child: str) -> None:
    (tmp_path / "taken").touch()
    path = tmp_path / "taken" / child
    with pytest.raises(
        ConfigError,
        match=rf"^job.output_dir = {path} cannot be used: {tmp_path}/taken is not a folder",
    ):
        RunDir(path).create()


def test_a_folder_that_is_not_writable_is_an_error() -> None:
    # /proc refuses root as well, which ignores permissions.
    with pytest.raises(ConfigError, match=r"^job.output_dir = /proc/self/task is not writable: ."):
        RunDir(Path("/proc/self/task")).create()


def test_the_resolved_configuration_is_stored(tmp_path: Path) -> None:
    values = config(tmp_path, optimizer={"lr": 0.125})
    RunDir(tmp_path).record_start(values, 0)
    assert (
        load(["--config", str(tmp_path / "config.toml")]).training_stages == values.training_stages
    )


# ---- metrics and events


def truncate(tmp_path: Path, content: bytes, step: int) -> bytes:
    folder = RunDir(tmp_path)
    folder.metrics_path.write_bytes(content)
    folder.truncate_metrics(step)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    return folder.metrics_path.read_bytes()


def test_metrics_after_the_checkpoint_are_cut_and_others_kept_byte_by_byte(tmp_path: Path) -> None:
    prefix = b'{"step": 1,  "loss":1.00}\n{"step": 3, "caf\xc3\xa9": 1e400}\n'
    assert truncate(tmp_path, prefix + b'{"step": 4}\n{"step": 10}\n', 3) == prefix
    assert truncate(tmp_path, prefix, 3) == prefix
    assert truncate(tmp_path, prefix, 0) == b""


@pytest.mark.parametrize(
    "torn", [b'{"step": 3', b'{"step": 3}', b"{", b'{"step": 3, "x": "\xc3', b"\0\0\0\0"]
)
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    assert truncate(tmp_path, b'{"step": 2}\n' + torn, 5) == b'{"step": 2}\n'


@pytest.mark.parametrize(
    "junk",
    [
        b"junk\n",
        b"\n",
        b"[1]\n",
        b'"step"\n',
        b"null\n",
        b"7\n",
        b'{"loss": 1}\n',
        b'{"step": "2"}\n',
    ],
)
def test_an_invalid_line_is_cut(tmp_path: Path, junk: bytes) -> None:
    assert (
        truncate(tmp_path, b'{"step": 1}\n' + junk + b'{"step": 2}\n', 5)
        == b'{"step": 1}\n{"step": 2}\n'
    )


def test_a_file_with_nothing_to_cut_is_not_rewritten(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.truncate_metrics(3)
    assert not folder.metrics_path.exists()
    folder.metrics_path.write_bytes(b'{"step": 2}\n')
    before = folder.metrics_path.stat().st_ino
    folder.truncate_metrics(3)
    assert folder.metrics_path.stat().st_ino == before


def test_events_are_appended_with_a_timestamp(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.log_event("start", step=0)
    folder.log_event("end", step=6, loss=None)
    first, second = map(json.loads, folder.events_path.read_text().splitlines())
    assert (first.pop("event"), first.pop("step"), list(first)) == ("start", 0, ["time"])
    assert second.pop("time") > 1e9
    assert second == {"event": "end", "step": 6, "loss": None}
    with pytest.raises(ValueError, match="JSON"):
        folder.log_event("end", loss=float("nan"))


# ---- identity of a run


def test_the_same_configuration_is_the_same_run(tmp_path: Path) -> None:
    assert describe_differences(identity(tmp_path), identity(tmp_path / "elsewhere")) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"dim": 128}}, "model.dim was 256 and is now 128"),
        ({"model": {"rope": {"theta": 1e4}}}, "model.rope.theta was 500000.0 and is now 10000.0"),
        ({"model": {"tie_embeddings": True}}, "model.tie_embeddings was false and is now true"),
        (
            {"tokenizer": {"kind": "tiktoken", "path": "x"}},
            'tokenizer.kind was "byte" and is now "tiktoken"',
        ),
        ({"data": {"max_document": 9}}, "data.max_document was null and is now 9"),
        (
            {"data": {"documents": "repository"}},
            'data.documents was "file" and is now "repository"',
        ),
        ({"training": {"steps": 6, "seed": 1}}, "training.seed was 0 and is now 1"),
        ({"training": {"steps": 6, "seq_len": 512}}, "training.seq_len was 2048 and is now 512"),
    ],
)
def test_a_changed_identity_key_is_reported_with_both_values(
    tmp_path: Path, changed: dict[str, dict[str, Any]], message: str
) -> None:
    assert describe_differences(identity(tmp_path), identity(tmp_path, **changed)) == [message]


def test_all_differences_are_reported(tmp_path: Path) -> None:
    other = config(
        tmp_path,
        model={"dim": 128, "num_layers": 2},
        data={"mask": "none"},
        training={"steps": 6, "seed": 3},
    )
    keys = [
        line.split()[0]
        for line in describe_differences(identity(tmp_path), run_identity(flatten_config(other)))
    ]
    assert keys == ["data.mask", "model.dim", "model.num_layers", "training.seed"]
    assert describe_differences({"a": 1}, {"b": 2}) == [
        "a was 1 and is now null",
        "b was null and is now 2",
    ]


def test_a_preset_and_its_explicit_values_are_the_same_model(tmp_path: Path) -> None:
    explicit = {"family": "llama3", "size": "debug", "dim": 256, "num_layers": 4}
    assert identity(tmp_path, model=explicit) == identity(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"job": {"name": "other"}},
        {"data": {"cache_dir": "/x", "bad_files": "error"}},
        {"training": {"steps": 99, "micro_batch_size": 2, "compile": True, "gc_interval": 7}},
        {"parallelism": {"dp_replicate": 2}},
        {"memory": {"recompute": "full"}},
        {"checkpoint": {"keep": 9}, "metrics": {"log_interval": 9}, "profiler": {"trace_step": 1}},
        {"distributed": {"timeout_minutes": 1}},
    ],
)
def test_other_keys_may_change(tmp_path: Path, changed: dict[str, dict[str, Any]]) -> None:
    assert describe_differences(identity(tmp_path), identity(tmp_path, **changed)) == []


def test_an_identity_survives_json(tmp_path: Path) -> None:
    same_run = identity(tmp_path)
    assert json.loads(json.dumps(same_run)) == same_run


# ---- resuming


def test_a_run_is_done_when_its_newest_checkpoint_is_at_the_last_step(tmp_path: Path) -> None:
    same_run = config(tmp_path)
    assert finished_message(same_run) is None
    commit(tmp_path, 3, same_run)
    assert finished_message(same_run) is None
    last = commit(tmp_path, 6, same_run)
    assert str(finished_message(same_run)).startswith(
        f"already done: {last} is at step 6 of 6. To continue, raise --training.steps"
    )
    assert finished_message(config(tmp_path, training={"steps": 7})) is None
    assert finished_message(config(tmp_path, training={"steps": 5})) is not None


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 6, config(tmp_path))
    with pytest.raises(ResumeError) as raised:
        finished_message(config(tmp_path, training={"steps": 6, "seed": 1}))
    assert str(raised.value).splitlines() == [
        f"{checkpoint} belongs to another run:",
        "  training.seed was 0 and is now 1",
        "revert these changes or choose another job.output_dir; to train on from here with them, "
        f"in a run of its own: python -m trainer.branch {tmp_path}@6 NEW --training.seed 1",
    ]


def test_a_difference_that_a_file_must_say_asks_for_a_file(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 6, config(tmp_path))
    mix = [{"source": "corpus", "max_len": 24}]
    with pytest.raises(ResumeError, match=rf"trainer.branch {tmp_path}@6 NEW --config FILE$"):
        check_resume(config(tmp_path, training={"steps": 6}, data={"mix": mix}), checkpoint)


def test_another_model_is_no_branch(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 6, config(tmp_path))
    with pytest.raises(ResumeError, match=r"or choose another job\.output_dir$"):
        check_resume(config(tmp_path, model={"dim": 32}), checkpoint)


def test_a_moved_folder_resumes(tmp_path: Path) -> None:
    commit(tmp_path / "here", 6, config(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = config(tmp_path / "there")
    assert finished_message(moved) is not None
    assert check_resume(moved, tmp_path / "there" / "checkpoints" / "step-6").step == 6


def test_a_stored_layer_of_before_an_option_has_its_default(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 6, config(tmp_path))
    forge(
        checkpoint / "state.json",
        lambda state: state["config"].update({"model.layers": [{"qk_norm": True}]}),
    )
    assert read_state(checkpoint).config["model.layers"] == [asdict(LayerKind(qk_norm=True))]


def test_a_checkpoint_of_before_an_option_resumes(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 6, config(tmp_path))
    for option in ("model.qkv_bias", "model.activation", "model.layers"):
        forge(checkpoint / "state.json", lambda state, option=option: state["config"].pop(option))  # type: ignore[misc]
    assert check_resume(config(tmp_path), checkpoint).step == 6


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"step": 6, "ident\xff'])
def test_an_unreadable_state_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(
        ResumeError, match=rf"^{tmp_path} cannot be read: state.json is (missing|damaged)"
    ):
        read_state(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"step": 6}'])
def test_an_incomplete_state_file_is_named(tmp_path: Path, content: str) -> None:
    same_run = config(tmp_path)
    checkpoint = commit(tmp_path, 6, same_run)
    (checkpoint / "state.json").write_text(content)
    seal(checkpoint)
    with pytest.raises(ResumeError, match=r"state\.json"):
        finished_message(same_run)


def test_a_run_keeps_the_packing_version_of_its_checkpoint(tmp_path: Path) -> None:
    def resolved(*words: str) -> int | None:
        return keep_packing_version(
            load([f"--job.output_dir={tmp_path}", *words])
        ).data.packing_version

    assert resolved() == PACKING_VERSION
    checkpoint = commit(tmp_path, 4, config(tmp_path, data={"packing_version": 2}))
    assert resolved() == 2
    path = checkpoint / "state.json"
    forge(
        path,
        lambda state: (
            state["config"].pop("data.packing_version"),
            state.update(schema_version=1),
        ),
    )
    seal(checkpoint)
    assert resolved() == 1
    assert resolved("--data.packing_version=2") == 2
    kept = keep_packing_version(load([f"--job.output_dir={tmp_path}", "--training.steps=6"]))
    assert run_identity(flatten_config(kept))["data.packing_version"] == 1
    path.write_text("{")
    seal(checkpoint)
    assert resolved() == PACKING_VERSION, "the damage is reported when the run resumes"


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "events.jsonl", "prediction.json"]
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to nothing"])
def test_what_is_no_file_is_named_before_anything_starts(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    _, _, problems = load_and_validate([f"--job.output_dir={tmp_path}"], {"NGPU": "1"})
    assert problems == [f"{path} is not a regular file"]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '"x"',
        "1" * 6000,
        '{"step": 1',
        '{"event": "validation", "set": "a"}',
        "[" * 9999,
    ],
)
def test_a_strange_line_is_passed_over(tmp_path: Path, line: str) -> None:
    run_dir = RunDir(tmp_path)
    for path in (run_dir.metrics_path, run_dir.events_path):
        path.write_text(f"{line}\n" + '{"step": 2, "loss": 3.5}\n')
    assert run_dir.first_validation_loss("a") is None
    assert run_dir.first_loss() in (None, 3.5)
    run_dir.truncate_metrics(2)
    assert run_dir.metrics_path.read_text().endswith('{"step": 2, "loss": 3.5}\n')
