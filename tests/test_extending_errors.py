"""Mistakes in the parts of an extension: refused where they are declared or tried, with the name
of the extension and the line.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import layers, presets, transformer
from models.hf import HuggingFaceError
from models.layers import Parameter, SublayerKind
from models.transformer import Transformer
from parallelisms import gradient_check
from tests.models.small_models import gradients, packed
from trainer.config import checks, extension
from trainer.config import model as model_section
from trainer.config.extension import Extension, StepView, Sublayer
from trainer.config.job_config import Config
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError, RankFailedError
from trainer.generate import run as run_generate
from trainer.hardware.device_specs import DeviceSpec, load_device
from trainer.hf import hinting_at_tables
from trainer.launch import launcher
from trainer.launch.cluster import LaunchWorld
from trainer.metrics.loggers import write_traceback
from trainer.run import hooks
from trainer.selfcheck.processes import _describe
from trainer.step import build
from trainer.step.added_parts import require_sound_parts, verify_rule
from trainer.step.optimizer import RULES

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text()
MIXER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
MORE = """
import helpers

from models.config import ModelConfig
from models.layers import LayerKind


class Signs:
    clips = False

    def __init__(self, config, moment_dtype):
        self.dtype = moment_dtype

    def new_state(self, parameter):
        return {}

    def update(self, weights, states, *, lr, weight_decay, norm):
        for weight in weights:
            weight.sub_(torch.where(norm.isfinite(), lr * weight.grad.sign(), 0))


def token_loss(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def on_step(view):
    pass


def extension():
    tiny = ModelConfig(
        vocab_size=264, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        ffn_dim=64, layers=(LayerKind(mixer="previous"), LayerKind()),
    )
    return Extension(
        name="my lab",
        families={"lab": {"tiny": tiny}},
        mixers={"previous": Sublayer(PREVIOUS, Previous)},
        optimizers={"signs": Signs},
        losses={"mine": token_loss},
        on_step=on_step,
    )
"""
HELPERS = "def fail(*_):\n    raise KeyError('my state')\n"
RUN = Config.model_validate(
    {
        "model": {"family": "llama3", "size": "debug"},
        "data": {"corpus": "copy"},
        "memory": {"recompute": "full"},
        "parallelism": {"dp_shard": 1},
    }
)
CPU = torch.device("cpu")
H100 = load_device("h100-80gb")
Install = Callable[..., Config]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs the mixer of the page with an optimizer, a loss and a hook, after changes to its
    text, for this test alone; returns a run with it.
    """
    monkeypatch.syspath_prepend(tmp_path)
    tables: tuple[dict[str, Any], ...] = (
        *(layers.MIXERS, layers.FEED_FORWARDS, transformer.MIXERS, transformer.FEED_FORWARDS),
        *(presets.FAMILIES, extension._installed, sys.modules),
    )

    def of(*changes: tuple[str, str], **sections: dict[str, object]) -> Config:
        text = MIXER + MORE
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "mine.py").write_text(text)
        (tmp_path / "helpers.py").write_text(HELPERS)
        extension.install(["mine:extension"])
        return Config.model_validate(
            RUN.model_dump()
            | {"model": {"family": "lab", "size": "tiny"}}
            | {"optimizer": {"name": "signs"}, "training": {"loss": "mine"}}
            | sections
        )

    # Both know a model by its names.
    gradient_check._wrong_gradients.cache_clear()
    model_section._build_model_config.cache_clear()
    with ExitStack() as restored:
        for table in tables:
            restored.enter_context(patch.dict(table))
        yield of


def test_the_mixer_of_the_page_is_sound_and_trains(install: Install) -> None:
    config = install()
    require_sound_parts(config, CPU)
    build.require_right_gradients(config)
    model = Transformer(config.model.build())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(*model.init_mean_std(name))
    batch = packed([9, 1, 14], [24])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(float(gradients(model, batch)[0].mean()))
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


RETURN = 'return F.linear(values + weights["share"] * previous, weights["out_proj.weight"])'
SIGNATURE = "def forward(self, x, rotation, boundaries):"
CHANGE = "torch.where(norm.isfinite(), lr * weight.grad.sign(), 0)"
UPDATE = f"weight.sub_({CHANGE})"
LOSS = 'return F.cross_entropy(logits, targets, reduction="none")'


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (".masked_fill(starts[..., None], 0)", "", "of a document change with .* another"),
        ("(0, 0, 1, -1)", "(0, 0, -1, 1)", "of tokens 0 to 7 change with the tokens after them"),
        (
            "F.pad(values, (0, 0, 1, -1))",
            "(F.pad(values, (0, 0, 1, -1)) + F.pad(values, (0, 0, 0, 20))[:, 20:])",
            "of tokens 0 to 199 change with the tokens after",
        ),
        ("    in_pieces=False,\n", "", "Previous overrides forward, .* needs in_pieces=False"),
        (RETURN, f"{RETURN}[:, :1]", r"must return a tensor \[1, 12, 16\], not .* \[1, 1, 16\]"),
        (RETURN, "pass", r"must return a tensor \[1, 12, 16\], not NoneType"),
        (SIGNATURE, "def forward(self, x):", r"forward\(\) takes 2 positional arguments but 4"),
        ('weights["share"] * previous', "previous", "no gradient for share"),
        ('    module_name = "attention"\n', "", 'needs module_name = "attention", not "feed_fo'),
        ("(0, 0, 1, -1))", '(0, 0, 1, -1), mode="no such")', "Unrecognised padding mode|mode"),
        (
            SIGNATURE,
            f"extra = torch.nn.Parameter\n    {SIGNATURE}\n        helpers.fail()",
            r"my state' \(\S*helpers\.py:2\)",
        ),
        (UPDATE, "weight = weight - 1", 'optimizer "signs": 3 updates changed no weight'),
        (CHANGE, "lr * weight.grad.sign()", "whose norm is not finite must change neither"),
        (
            UPDATE,
            f"weight.mul_(1 - lr * weight_decay); {UPDATE}",
            "whose norm is not finite must change neither",
        ),
        ("*, lr, weight_decay, norm)", "lr)", "unexpected keyword argument 'weight_decay'"),
        ("return {}", "return parameter", "new_state must return a dict of tensors by name"),
        ("    clips = False\n", "", "has no attribute 'clips'"),
        ("def token_loss(logits, targets)", "def token_loss(model, logits, targets)", "'targets'"),
        (LOSS, f"{LOSS}.mean()", r"must return a loss per token, \[3\], not \[\]"),
        (LOSS, f"{LOSS}.detach()", "does not require grad"),
    ],
)
def test_a_mistake_is_named_before_the_first_step(
    install: Install, tmp_path: Path, before: str, after: str, problem: str
) -> None:
    config = install((before, after))
    named = rf'^extension "my lab" 0: .*{problem}'
    with pytest.raises(RankFailedError, match=named) as raised:
        require_sound_parts(config, CPU)
    assert raised.value.status == 2
    place = re.search(r"\((\S+):(\d+)\)$", str(raised.value))
    assert place is not None
    assert Path(place[1]).parent == tmp_path
    # The ranks of a self-check pass it on as it is.
    assert _describe(raised.value) == str(raised.value)


@pytest.mark.parametrize(
    ("gpu", "change", "problem"),
    [
        (None, (UPDATE, "pass"), 'optimizer "signs": 3 updates changed no weight'),
        (H100, (UPDATE, "pass"), None),
        (H100, ('weights["share"] * previous', "previous"), "no gradient for share"),
    ],
    ids=["on a CPU", "a rule on a GPU", "layers on a GPU"],
)
def test_a_launch_names_a_mistake_before_it_prepares_a_corpus(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    gpu: DeviceSpec | None,
    change: tuple[str, str],
    problem: str | None,
) -> None:
    """A rule may have kernels of a GPU alone, so ranks try it there."""
    monkeypatch.setattr(launcher, "detect_device", lambda: gpu)
    config = install(change, job={"extension": ["mine:extension"]})
    found = launcher.find_wrong_part(
        Recipe.model_validate(config.model_dump()), LaunchWorld(nproc_per_node=1)
    )
    assert (problem is None and found is None) or (problem is not None and problem in str(found))


SIGNS = "lr * weight.grad.sign()"


CLIPS = ("clips = False", "clips = True")


def test_an_optimizer_that_says_that_it_clips_must(install: Install) -> None:
    config = install((SIGNS, "lr * weight.grad"), CLIPS)
    with pytest.raises(RankFailedError, match=r"max_grad_norm must be clipped where it has clips"):
        require_sound_parts(config, CPU)


def test_an_optimizer_that_clips_is_sound(install: Install) -> None:
    clipped = (SIGNS, "lr * weight.grad * (self.max_norm / norm).clamp(max=1)")
    config = install(
        clipped, ("self.dtype = moment_dtype", "self.max_norm = config.max_grad_norm"), CLIPS
    )
    require_sound_parts(config, CPU)


WHOLE = (SIGNS, "lr * weight.grad / weight.grad.norm()")


def test_an_optimizer_of_whole_matrices_is_refused_where_ranks_hold_shards(
    install: Install,
) -> None:
    config = install(WHOLE)
    require_sound_parts(config, CPU)
    with pytest.raises(RankFailedError, match="two halves of a weight change otherwise than"):
        require_sound_parts(config, CPU, is_sharded=True)


def test_an_optimizer_that_gathers_whole_matrices_says_so(install: Install) -> None:
    config = install(WHOLE, ("clips = False", "clips = elementwise = False"))
    require_sound_parts(config, CPU, is_sharded=True)


@pytest.mark.parametrize("name", RULES)
def test_our_optimizers_pass_the_trial_of_added_ones(name: str) -> None:
    config = RUN.optimizer.model_copy(update={"name": name})
    verify_rule(config, CPU, is_sharded=True)


SHARE = '"share": Parameter("Q", "colwise", "previous.share", "ones"),'
TAPS = '"share": Parameter("QT", "colwise", "previous.share"),'


def test_a_mixer_has_widths_of_its_own(install: Install) -> None:
    config = install(
        (SHARE, TAPS),
        ("in_pieces=False", 'in_pieces=False, widths={"T": 3}'),
        ('weights["share"] * previous', 'weights["share"].sum(1) * previous'),
    )
    require_sound_parts(config, CPU)
    model = config.model.build()
    declared = model.parameters
    (name,) = (name for name in declared if name.endswith("share"))
    assert declared[name].shape_of(model.sizes) == (32, 3)


@pytest.mark.parametrize(
    ("widths", "problem"),
    [
        ('{"Q": 3}', 'widths: "Q": 3 must be a capital letter other than VEGQKHNXMZ'),
        ('{"T": 0}', 'widths: "T": 0 must be a capital letter .*, and a whole number above 0'),
        ("{}", "share has a width that is unknown: T; there are VEGQKHNXMZ and those in `widths`"),
    ],
)
def test_a_width_is_a_letter_of_its_own(install: Install, widths: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        install((SHARE, TAPS), ("in_pieces=False", f"in_pieces=False, widths={widths}"))


def test_a_feed_forward_that_looks_at_other_tokens_is_refused(install: Install) -> None:
    config = install(
        ('    module_name = "attention"\n', ""),
        ('mixers={"previous"', 'feed_forwards={"previous"'),
        ('LayerKind(mixer="previous")', 'LayerKind(feed_forward="previous")'),
    )
    with pytest.raises(RankFailedError, match=r'feed_forward "previous".* before it, which only'):
        require_sound_parts(config, CPU)


def test_an_error_in_the_check_of_recomputation_names_the_extension_too(install: Install) -> None:
    config = install((SIGNATURE, f"{SIGNATURE}\n        raise ValueError('mine')"))
    both = (
        r'memory\.recompute = "full" cannot be used here: extension "my lab" 0: ValueError: mine'
    )
    with pytest.raises(RankFailedError, match=both):
        build.require_right_gradients(config)


def test_a_hook_that_cannot_be_called_is_named_with_its_line(install: Install) -> None:
    install(("def on_step(view)", "def on_step(view, model)"))
    named = (
        r"on_step of extension \"my lab\" 0: TypeError: on_step\(\) missing 1 .* \(.*mine.py:\d+\)"
    )
    with pytest.raises(RankFailedError, match=named):
        hooks.call("on_step", StepView(1, 2, 0, 1, 0.1, {}))


def test_an_error_of_ours_or_of_a_peer_is_not_that_of_an_extension(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    with pytest.raises(ValueError, match="ours") as ours:
        raise ValueError("ours")
    assert extension.describe_error(ours.value) is None
    monkeypatch.chdir(Path(extension.installed()[0].folder).parent)  # Where "<string>" would be.
    with pytest.raises(ZeroDivisionError) as generated:
        exec("1 / 0", {})
    assert extension.describe_error(generated.value) is None
    part = extension.installed()[0].extension.optimizers["signs"]
    source = compile(
        "def lost(rule):\n    raise RuntimeError('peer')", "torch/distributed/x.py", "exec"
    )
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(RuntimeError, match="peer") as peer:
        names["lost"](part)
    assert extension.describe_error(peer.value) is None
    with pytest.raises(MemoryError) as full:
        raise_in_frame_with(part)
    assert extension.describe_error(full.value) is None


def raise_in_frame_with(part: object) -> None:
    del part
    raise MemoryError


def test_a_mixer_that_is_no_attention_refuses_cp_and_generation(install: Install) -> None:
    config = install(("in_pieces=False", "in_pieces=False, attends=True"))
    wide = config.model_copy(
        update={"parallelism": config.parallelism.model_copy(update={"cp": 2})}
    )
    assert any(
        "parallelism.cp = 2 must be 1: mixer previous" in each for each in checks.problems(wide, 2)
    )
    options = type("Options", (), {"prompt": "x", "prompt_file": None, "checkpoint": None})()
    resolved = type("Resolved", (), {"config": config})()
    with (
        patch("trainer.generate.resolve_checkpoint", return_value=resolved),
        pytest.raises(ConfigError, match="mixer previous cannot generate text"),
    ):
        run_generate(options, [])


def test_an_export_says_that_an_extension_has_no_tables(install: Install) -> None:
    def refused() -> None:
        with hinting_at_tables():
            raise HuggingFaceError(["model.layers has no equivalent"])

    with pytest.raises(HuggingFaceError) as plain:
        refused()
    install()
    with pytest.raises(HuggingFaceError) as hinted:
        refused()
    assert len(plain.value.problems) == 1
    assert "no --extension has hf_families" in hinted.value.problems[1]


def test_a_traceback_goes_to_the_log_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.FileHandler(tmp_path / "rank-0.log", delay=True)
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(KeyError) as raised:
            raise KeyError("lost")
        write_traceback(raised.value)
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert "Traceback (most recent call last)" in (tmp_path / "rank-0.log").read_text()
    assert capsys.readouterr().err == ""


MISTAKEN: Any = Sublayer
MISDECLARED: Any = SublayerKind
"""Without types: their arguments are wrong."""
WORD = Parameter("Q", "columnwise", "x", "ones")  # type: ignore[arg-type]
LONG = Parameter("Q", "rowwise", "x", "ones")
ODD = Parameter("Q", "colwise", "x", "twos")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"version": 2}, "version = 2 must be a text"),
        (
            {"mixers": {"a": int}},
            'mixers "a" must be a Sublayer(declaration, build), not class int',
        ),
        ({"mixers": {"a": MISTAKEN({}, int)}}, "a SublayerKind as declaration, not dict"),
        ({"mixers": {"a": MISTAKEN(MISDECLARED({}), 3)}}, "a class or a function as build"),
        ({"mixers": {"a": MISTAKEN(MISDECLARED([]), int)}}, "parameters must be a dict"),
        ({"mixers": {"a": MISTAKEN(MISDECLARED({"w": 1}), int)}}, "w must be a Parameter, not"),
        (
            {"mixers": {"a": MISTAKEN(MISDECLARED({"w": WORD}), int)}},
            'w has style "columnwise"; th',
        ),
        ({"mixers": {"a": MISTAKEN(MISDECLARED({"w": LONG}), int)}}, "its style cannot be"),
        (
            {"mixers": {"a": MISTAKEN(MISDECLARED({"w": ODD}), int)}},
            'w has initial "twos"; there',
        ),
        ({"norms": {"a": {"attention": {}}}}, 'a dict of "attention" and "feed_forward"'),
        ({"families": {"a": 1}}, 'families "a" must be a dict of ModelConfig by size, not int'),
        ({"families": {"a": {"tiny": {"dim": 3}}}}, 'size "tiny" must be a ModelConfig, not dict'),
        ({"hf_families": {"a": {}}}, 'hf_families "a" must be a Family, not dict'),
        ({"losses": {"z": "z"}}, 'losses "z" must be a class or a function, not str'),
        ({"trackers": [1]}, "trackers must be a dict of parts by name, not list"),
        ({"on_end": 3}, "on_end must be a function, not int"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(fields: dict[str, Any], problem: str) -> None:
    (found,) = Extension(**{"name": "x"} | fields).problems()
    assert problem in found


def test_fields_of_the_right_types_have_no_problems() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    assert Extension(name="x", losses={"z": loss}, norms=layers.NORMS).problems() == []
