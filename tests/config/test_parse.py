"""Parsing of configuration files and command lines, and their error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.parse import CONFIG_DIR, deep_merge, load, parse_arguments, section_keys
from trainer.config.toml_format import to_toml
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(argv)
    return error.value.problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[training]\nseq_length = 5",
            "training.seq_length = 5: unknown key; did you mean training.seq_len?",
        ),
        ("[model]\nseq_len = 5", "model.seq_len = 5: unknown key; seq_len belongs to [training]"),
        (
            "[metrics]\nname = 'x'",
            'metrics.name = "x": unknown key; name belongs to [job] or [optimizer]',
        ),
        (
            "[memory]\nzebra = 1",
            "memory.zebra = 1: unknown key; [memory] has recompute, device_gib",
        ),
        ("seq_len = 5", "seq_len = 5: unknown key; seq_len belongs to [training]"),
        ("[trainig]\nsteps = 5", "[trainig]: unknown section [trainig]; did you mean [training]?"),
        (
            "[zebra]\nsteps = 5",
            "[zebra]: unknown section [zebra]; the sections are job, model, model.rope",
        ),
        (
            "[model.ropes]\ntheta = 5",
            "[model.ropes]: unknown section [model.ropes]; did you mean [model.rope]?",
        ),
        ('[training]\nsteps = "50"', 'training.steps = "50" must be an integer, not a string'),
        ("[training]\nsteps = true", "training.steps = true must be an integer, not a boolean"),
        ("[training]\nsteps = 50.0", "training.steps = 50.0 must be an integer, not a float"),
        ("[training]\nsteps = 0", "training.steps = 0 must be at least 1"),
        (
            "[training]\nseed = 9223372036854775808",
            "training.seed = 9223372036854775808 must be below 9223372036854775808",
        ),
        (
            "[training]\ncompile = 1",
            'training.compile = 1 must be true or false, or "auto", not an integer',
        ),
        (
            '[training]\ncompile = "true"',
            'training.compile = "true" must be true or false, or "auto", not a string',
        ),
        (
            '[training]\ndtype = "fp8"',
            'training.dtype = "fp8" must be "bfloat16", "float32" or "float64"',
        ),
        ("[training]\ndtype = 16", 'training.dtype = 16 must be "bfloat16"'),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan must be finite"),
        ("[optimizer]\nlr = -inf", "optimizer.lr = -inf must be finite"),
        ("[optimizer]\nlr = 0", "optimizer.lr = 0 must be above 0"),
        ("[optimizer]\nlr = true", "optimizer.lr = true must be a number, not a boolean"),
        (
            "[optimizer]\nlr = 2024-01-01",
            "optimizer.lr = 2024-01-01 must be a number, not a date or time",
        ),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas = [0.9]: item 2 is missing"),
        (
            "[optimizer]\nbetas = [0.9, 1.0]",
            "optimizer.betas = [0.9, 1.0]: item 2 must be below 1",
        ),
        (
            "[optimizer]\nbetas = [0.9, '1']",
            'optimizer.betas = [0.9, "1"]: item 2 must be a number',
        ),
        (
            "[optimizer]\nbetas = [0, 0, 0]",
            "optimizer.betas = [0, 0, 0] must have no more than 2 items",
        ),
        ("[optimizer]\nbetas = 0.9", "optimizer.betas = 0.9 must be a list, not a float"),
        ("[schedule]\nmin_lr_factor = 1.5", "schedule.min_lr_factor = 1.5 must be at most 1"),
        ("[job]\nname = 5", "job.name = 5 must be text, not an integer"),
        (
            "[job]\nname = 'a b'",
            'job.name = "a b" must match ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$ (Name of the run: letters',
        ),
        ("[job]\noutput_dir = []", "job.output_dir = [] must be text, not an array"),
        ("[job.name]\nx = 1", "[job.name] must be text, not a table"),
        ("training = 5", "training = 5 must be a section, not an integer"),
        ("[[training]]\nsteps = 5", "must be a section, not an array"),
        ("training = 1979-05-27T07:32:00Z", "must be a section, not a date or time"),
    ],
)
def test_an_error_in_a_file_names_file_key_value_and_rule(
    cwd: Path, text: str, problem: str
) -> None:
    (cwd / "mine.toml").write_text(text)
    problems = load_problems("--config", "mine.toml")
    assert len(problems) == 1
    assert problems[0].startswith("mine.toml: ")
    assert problem in problems[0]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"[job]\nname = 'a'\nname = 'b'", "mine.toml:3: defined twice: name = 'b'"),
        (b"[job]\n[job]", "mine.toml:2: defined twice: [job]"),
        (
            b"[job]\nname 'a'",
            "mine.toml:2: Expected '=' after a key in a key/value pair: name 'a'",
        ),
        (b"[job", "mine.toml:1: Expected ']' at the end of a table declaration: [job"),
        (b'[job]\nname = "a', 'mine.toml:2: Unterminated string: name = "a'),
        (b"[job]\nname = '\xff'", "mine.toml:2: byte 14 (0xff) is not valid UTF-8"),
        (
            b"x = " + b"[" * 5000,
            "mine.toml: TOML inline arrays/tables are nested more than the allowed",
        ),
        (b"x = " + b"9" * 5000, "mine.toml: Exceeds the limit"),
    ],
)
def test_invalid_toml_is_an_error_with_its_line(cwd: Path, raw: bytes, problem: str) -> None:
    (cwd / "mine.toml").write_bytes(raw)
    assert [problems[: len(problem)] for problems in load_problems("--config", "mine.toml")] == [
        problem
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            "--training.seq_length 5",
            "--training.seq_length 5: unknown key; did you mean training.seq_len?",
        ),
        ("--training.seq-len 5", "--training.seq-len 5: unknown key; did you mean seq_len?"),
        ("--seq_len 5", "--seq_len 5: unknown key; seq_len belongs to [training]"),
        ("--model.seq_len=5", "--model.seq_len 5: unknown key; seq_len belongs to [training]"),
        (
            "--trainig.steps 5",
            "--trainig.steps 5: unknown section [trainig]; did you mean [training]?",
        ),
        (
            "--training 5",
            "--training 5: a section, not a key; [training] has seq_len, global_batch_size",
        ),
        ("--zebra", "--zebra: unknown key; see --help"),
        ("--cnfig debug", "--cnfig debug: unknown key"),
        ("--training.", '"--training." is not an option'),
        ("--training.steps", "--training.steps needs a value"),
        ("--checkpoint.enabled", "--checkpoint.enabled needs a value: true or false"),
        ("--config", "--config needs a value"),
        ("train", '"train" is not an option; options are written --section.key VALUE'),
        ("-training.steps 5", '"-training.steps" is not an option'),
        ("--", '"--" is not an option'),
        ("--training.steps many", "--training.steps many must be an integer"),
        ("--training.steps 5.5", "--training.steps 5.5 must be an integer"),
        ("--training.steps true", "--training.steps true must be an integer"),
        ("--training.steps=", "--training.steps '' must be an integer"),
        ("--training.steps null", "--training.steps null must be an integer"),
        ("--training.steps -1", "--training.steps -1 must be at least 1"),
        ("--checkpoint.enabled maybe", "--checkpoint.enabled maybe must be true or false"),
        ("--optimizer.lr nan", "--optimizer.lr nan must be finite"),
        ("--optimizer.lr ten", "--optimizer.lr ten must be a number"),
        ("--optimizer.betas 0.9", "--optimizer.betas 0.9: item 2 is missing"),
        ("--optimizer.betas 0.9,x", "--optimizer.betas 0.9,x: item 2 must be a number"),
        (
            "--optimizer.betas [0.9,",
            "--optimizer.betas [0.9, must be a list such as 1,2 or [1, 2]",
        ),
        (
            "--training.dtype fp8",
            '--training.dtype fp8 must be "bfloat16", "float32" or "float64"',
        ),
        (
            "--model.rope.kind x",
            '--model.rope.kind x must be "default", "linear", "llama3", "yarn" or "longrope"',
        ),
        ("--job.name null", "--job.name null must be text"),
        ("--job.name=\udcff", "the value is not valid UTF-8"),
    ],
)
def test_an_error_on_the_command_line_names_option_value_and_rule(argv: str, problem: str) -> None:
    problems = load_problems(*argv.split())
    assert problems[0].startswith("command line: ")
    assert problem in problems[0]


def test_errors_of_file_and_command_line_are_reported_together(cwd: Path) -> None:
    (cwd / "mine.toml").write_text(
        "[training]\nsteps = 0\nseqlen = 5\n[optimizer]\nlr = nan\n[zebra]\n"
    )
    problems = load_problems(
        "--config", "mine.toml", "--training.dtype", "fp8", "--zebra", "--job.name=", "stray"
    )
    assert len(problems) == 8
    assert sum(problem.startswith("mine.toml: ") for problem in problems) == 4
    assert all("\n" not in problem for problem in problems)


def test_an_invalid_file_does_not_hide_errors_on_the_command_line(cwd: Path) -> None:
    (cwd / "mine.toml").write_text("[")
    assert len(load_problems("--config", "mine.toml", "--training.steps", "0")) == 2


def test_an_error_about_a_multiline_value_is_one_line() -> None:
    assert "\n" not in load_problems("--job.name", "a\nb")[0]


@pytest.mark.usefixtures("cwd")
def test_a_missing_file_gives_the_names_of_shipped_files() -> None:
    available = ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("*.toml")))
    assert load_problems("--config", "debg") == [
        f"debg: no such file; did you mean debug? train_configs/ holds {available}"
    ]
    assert "no such file" in load_problems("--config", "./debug.toml")[0]
    assert "File name too long" in load_problems("--config", "n" * 500)[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("folder", "a folder"), (".", "a folder"), ("/dev/null", "not a regular file")],
)
def test_config_must_be_a_regular_file(cwd: Path, name: str, kind: str) -> None:
    (cwd / "folder").mkdir()
    assert load_problems("--config", name) == [f"{name}: --config needs a TOML file, not {kind}"]


def test_a_bare_name_is_a_shipped_file_and_a_path_is_relative(cwd: Path) -> None:
    (cwd / "debug.toml").write_text("[job]\nname = 'mine'")
    (cwd / "other.toml").write_text("[job]\nname = 'other'")
    assert load([]).job.name == "debug"
    assert load(["--config", "debug"]).job.name == "debug"
    assert load(["--config", "debug.toml"]).job.name == "debug"
    assert load(["--config", "./debug.toml"]).job.name == "mine"
    assert load(["--config", str(cwd / "debug.toml")]).job.name == "mine"
    assert load(["--config", "other.toml"]).job.name == "other"


def test_the_last_of_a_repeated_option_counts(cwd: Path) -> None:
    (cwd / "mine.toml").write_text("")
    config = load(
        [
            "--config",
            "nowhere",
            "--training.steps",
            "wrong",
            "--config",
            "./mine.toml",
            "--training.steps=7",
        ]
    )
    assert (config.training.steps, config.job.name) == (7, "run")
    config = load(["--optimizer.betas", "0.1,0.2", "--optimizer.betas", "[0.3, 0.4]"])
    assert config.optimizer.betas == (0.3, 0.4)


def test_text_on_the_command_line_becomes_the_keys_type() -> None:
    options = (
        "--training.steps 7 --checkpoint.enabled false --training.compile true --optimizer.lr 1e-4 --job.output_dir a/b "
        "--optimizer.betas 0.8,0.9 --job.name 5 --model.rope.theta 1e6 --model.tie_embeddings true --data.corpus [1]"
    )
    config = load(options.split())
    assert (config.training.steps, config.checkpoint.enabled, config.training.compile) == (
        7,
        False,
        True,
    )
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert (config.output_dir, config.job.name, config.data.corpus) == (Path("a/b"), "5", "[1]")
    assert (config.model.rope.theta, config.model.tie_embeddings) == (1e6, True)


def test_null_unsets_a_value_of_the_file() -> None:
    assert load(["--config", "llama3_8b"]).parallelism.dp_shard == 8
    assert (
        load(["--config", "llama3_8b", "--parallelism.dp_shard", "null"]).parallelism.dp_shard
        is None
    )


@pytest.mark.parametrize("key", ["job.extension", "parallelism.pp_layers", "metrics.trackers"])
def test_null_unsets_a_list(key: str, cwd: Path) -> None:
    (cwd / "mine.toml").write_text(
        "[job]\nextension = 'lab:parts'\n[metrics]\ntrackers = ['wandb']\n"
        "[parallelism]\npp = 2\npp_layers = [1, 2]\n"
    )
    values = parse_arguments(["--config", "./mine.toml", f"--{key}", "null"]).values
    section, name = key.split(".")
    assert values == {section: {name: None}}


def test_toml_integers_are_numbers_and_strings_are_paths(cwd: Path) -> None:
    (cwd / "mine.toml").write_text("[optimizer]\nlr = 1\n[job]\noutput_dir = 'x'")
    config = load(["--config", "./mine.toml"])
    assert (config.optimizer.lr, config.job.output_dir) == (1.0, Path("x"))


def test_byte_order_marks_and_crlf_are_valid(cwd: Path) -> None:
    (cwd / "mine.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 5\r\n")
    assert load(["--config", "./mine.toml"]).training.steps == 5


def test_environment_variables_set_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING", '{"steps": 5}')
    monkeypatch.setenv("JOB__NAME", "other")
    config = load([])
    assert config.training.steps != 5
    assert config.job.name == "debug"


def test_the_resolved_file_parses_to_an_equal_configuration(cwd: Path) -> None:
    options = (
        "--config llama3_1b --optimizer.eps 1e-15 --optimizer.betas 0.1,0.30000000000000004 --metrics.peak_flops 989e12 "
        "--model.rope.factor 4 --model.rope.kind llama3 --parallelism.dp_shard null --training.seed 9007199254740993"
    )
    awkward = 'a "quoted" \\ back\tslash, DEL \x7f, é and 日本'
    for config in (Recipe(), load([]), load([*options.split(), "--data.corpus", awkward])):
        (cwd / "resolved.toml").write_text(to_toml(config), encoding="utf-8")
        assert load(["--config", "./resolved.toml"]) == config


def test_the_resolved_file_has_the_sections_in_order() -> None:
    headings = [line for line in to_toml(load([])).splitlines() if line.startswith("[")]
    assert headings[:4] == ["[job]", "[model]", "[tokenizer]", "[data]"]


def test_parsing_the_command_line_does_not_read_the_file() -> None:
    arguments = parse_arguments(["--config", "nowhere", "--training.steps=5"])
    assert (arguments.config, arguments.values, arguments.problems) == (
        "nowhere",
        {"training": {"steps": "5"}},
        [],
    )


def test_deep_merge_keeps_other_keys() -> None:
    assert deep_merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": {}}) == {
        "a": {"b": 4, "c": 2},
        "d": 3,
        "e": {},
    }
    assert deep_merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_a_key_may_be_a_python_keyword(cwd: Path) -> None:
    (cwd / "some.toml").write_text("[checkpoint]\nasync = false\n")
    config = load(["--config", "some.toml"])
    assert not config.checkpoint.asynchronous
    assert "\nasync = false\n" in to_toml(config)
    assert load(["--config", "some.toml", "--checkpoint.async", "true"]).checkpoint.asynchronous
    assert "async" in section_keys("checkpoint")
    assert not {"asynchronous"} & {*section_keys("checkpoint"), *config.model_dump()["checkpoint"]}
    assert load_problems("--checkpoint.async", "maybe") == [
        "command line: --checkpoint.async maybe must be true or false"
    ]
    assert load_problems("--checkpoint.async") == [
        "command line: --checkpoint.async needs a value: true or false"
    ]
    (cwd / "some.toml").write_text("[checkpoint]\nasynchronous = false\nasync = 1\n")
    problems = load_problems("--config", "some.toml")
    assert problems[0].startswith("some.toml: checkpoint.async = 1 must be true or false")
    assert problems[1].startswith(
        "some.toml: checkpoint.asynchronous = false: unknown key; [checkpoint] has "
    )
