"""`longhaul hf export | import`: convert a checkpoint to a Hugging Face folder, and start a run
from one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from models import hf
from models.config import ModelConfig
from models.hf import HuggingFaceError, read_config, text_model_values
from models.hf_config import ROPES, config_remarks, model_config_from_hf
from models.hf_config_write import config_differences, model_config_to_hf
from models.hf_rope import rope_fields
from models.hf_write import write_safetensors
from models.layers import LayerKind
from models.presets import FAMILIES
from trainer.checkpoint.initial_weights import HF_PREFIX, HF_TEXT_PREFIX, find_checkpoint
from trainer.command_table import typed
from trainer.commands import (
    CHECKPOINT_HELP,
    CommandParser,
    Run,
    checkpoint_path,
    folder_or_url,
    number,
    print_lines,
    run_command,
)
from trainer.config import extension
from trainer.config.data import (
    COPY_CORPUS,
    DEFAULT_SOURCE,
    DataSection,
    TokenizerSection,
    tokenizer_folder,
)
from trainer.config.toml_format import toml_value
from trainer.errors import ConfigError, DataError
from trainer.launch.initial_checks import model_config_from_values
from trainer.metrics.loggers import log_plainly
from trainer.storage import manifest
from trainer.storage.durable_io import atomic_folder, fsync_path, write_and_fsync
from trainer.storage.progress import progress
from trainer.storage.remote_models import fetch_model, local_output, upload_model
from trainer.storage.run_dir import ResumeError

DESCRIPTION = """\
Converts a checkpoint to a Hugging Face folder, or starts a run from one. Models are not downloaded. Here, an unusable checkpoint, tokenizer or model exits with 2, too."""
EXPORT = """\
write config.json, generation_config.json, safetensors and tokenizer files from a checkpoint (of a run folder, the
newest), read them back, and compare every tensor bitwise"""
IMPORT = """\
check every tensor of a model and write a configuration that starts a run from it: the nearest preset with
overrides, the tokenizer, and checkpoint.initial_load_path. Copies no weights: each rank of the run reads its shards
from the model's folder"""
EXTENSION = "MODULE:FUNCTION"
EXTENSION_HELP = "as job.extension, whose tables of models are used, too; may be repeated"


def main(argv: Sequence[str]) -> int:
    return run_command(argv, build_parser())


def build_parser() -> CommandParser:
    parser = CommandParser(typed("hf"), DESCRIPTION)
    add = parser.add_command("export", EXPORT, run=refusing(run_export)).add_argument
    add("source", type=checkpoint_path, metavar="RUN_FOLDER|CHECKPOINT", help=CHECKPOINT_HELP)
    output_help = "folder to create, which may exist if empty, or URL as s3://BUCKET/PREFIX"
    add("output", type=folder_or_url, metavar="OUTPUT", help=output_help)
    add("--dtype", choices=("bfloat16", "float32"), help="default: the run's training.dtype")
    add(
        "--max-shard-gib",
        type=number(positive=True),
        default=4.0,
        metavar="N",
        help="maximum file size; default: 4",
    )
    tokenizer_help = "a path or URL; default: the run's tokenizer.path"
    add("--tokenizer", type=folder_or_url, metavar="PATH", help=tokenizer_help)
    add("--extension", action="append", default=[], metavar=EXTENSION, help=EXTENSION_HELP)
    add = parser.add_command("import", IMPORT, run=refusing(run_import)).add_argument
    add("folder", type=folder_or_url, metavar="HF_DIR", help="or its URL, as s3://BUCKET/PREFIX")
    add("output", type=Path, nargs="?", metavar="OUTPUT.toml", help="default: standard output")
    add(
        "--text-only",
        action="store_true",
        help="of a model of several modalities, import the language model",
    )
    help_text = (
        "a key of config.json that is unknown, and that the model does without; may be repeated"
    )
    add("--ignore-key", action="append", default=[], metavar="NAME", help=help_text)
    add("--extension", action="append", default=[], metavar=EXTENSION, help=EXTENSION_HELP)
    return parser


def refusing(convert: Callable[[Namespace], None]) -> Run:
    """Turns what is unusable into a wrong argument."""

    def run(options: Namespace, _: Sequence[str]) -> None:
        log_plainly()
        extension.install(options.extension)
        try:
            convert(options)
        except (HuggingFaceError, ResumeError, DataError) as error:
            # Here these are mistakes in arguments: no run exists that a retry could continue.
            raise ConfigError(error.problems) from error

    return run


# ---- export


def _problems_of_export(folder: Path, model: ModelConfig) -> list[str]:
    """Configuration keys and tensors of a written folder that read back otherwise."""
    exported = model_config_from_hf(read_config(folder))
    changed = config_differences(exported, model)
    problems = [f"{key} changed to {value}" for key, (value, _) in changed.items()]
    return problems + hf.SafetensorsReader(folder).problems(exported)


def run_export(options: Namespace) -> None:
    with local_output(options.output, upload_model, key="command line: OUTPUT") as output:
        export(Namespace(**vars(options) | {"output": output}))
    if output != options.output:
        print_lines(f"{options.output}: uploaded, each file with its hash")


def export(options: Namespace) -> None:
    """Writes the folder `options.output` atomically and verifies it.

    Raises `ResumeError` for an unreadable checkpoint, `DataError` for its tokenizer,
    `HuggingFaceError` otherwise.
    """
    import torch

    from trainer.checkpoint.load import MODEL_PREFIX, read_full_tensor
    from trainer.evaluation.load_checkpoint import open_model

    checkpoint = find_checkpoint(options.source)
    output = options.output
    values = manifest.read_state(checkpoint).config
    require_extensions(checkpoint, values)
    model = model_config_from_values(values)
    seq_len = values["training.seq_len"]
    dtype = options.dtype or ("bfloat16" if values["training.dtype"] == "bfloat16" else "float32")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise HuggingFaceError([f"{output} exists already"])
    bos, eos, files = tokenizer_files(values, options.tokenizer, seq_len=seq_len)
    with hinting_at_tables():
        hf_config = model_config_to_hf(model, max_length=seq_len, dtype=dtype, bos=bos, eos=eos)
    # transformers' nearest architecture decides the names of tensors.
    written = dataclasses.replace(model, model_type=hf_config["model_type"])
    manifest.read_verified(checkpoint)
    tensors = model.parameters | model.buffers
    shapes = {name: each.shape_of(model.sizes) for name, each in tensors.items()}
    reader = open_model(checkpoint, shapes)
    print_lines(
        f"{checkpoint}: {model.parameter_summary} as {dtype}, context of {seq_len:,} tokens"
    )
    total = model.num_parameters * getattr(torch, dtype).itemsize
    with (
        atomic_folder(output) as folder,
        progress(f"exporting {output.name}", total=total) as shown,
    ):
        for path in write_safetensors(
            folder,
            written,
            lambda name: read_full_tensor(reader, f"{MODEL_PREFIX}{name}"),
            dtype=getattr(torch, dtype),
            file_bytes=int(options.max_shard_gib * 2**30),
            on_bytes=shown.advance,
        ):
            fsync_path(path)
            print_lines(path.name)
        for name, content in {**_config_files(hf_config), **files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_and_fsync(folder / name, content)
            print_lines(str(name))
        # The files are read back before the folder gets its name: a lossy export must not exist.
        if problems := _problems_of_export(folder, model):
            raise HuggingFaceError(
                [f"{output} was not written: {problem}" for problem in problems]
            )
    print_lines(f"{output} is complete: every tensor was read back and is bitwise equal")


@contextmanager
def hinting_at_tables() -> Iterator[None]:
    """Adds to a `HuggingFaceError` that the extensions have no tables for their models."""
    try:
        yield
    except HuggingFaceError as error:
        installed = extension.installed()
        if not installed or any(each.extension.hf_families for each in installed):
            raise
        hint = "no --extension has hf_families, which say how such a model is written"
        raise HuggingFaceError([*error.problems, hint]) from error


def _config_files(hf_config: dict[str, Any]) -> dict[Path, bytes]:
    generation = {key: hf_config[key] for key in ("bos_token_id", "eos_token_id")}
    contents = {hf.CONFIG_FILE: hf_config, "generation_config.json": generation}
    return {
        Path(name): (json.dumps(item, indent=2) + "\n").encode() for name, item in contents.items()
    }


def require_extensions(checkpoint: Path, values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for extensions of the run that are not given: a checkpoint's word
    imports no code.
    """
    recorded = {key.partition(".")[2] for key in values if key.startswith("extension.")}
    if missing := sorted(recorded - {each.extension.name for each in extension.installed()}):
        names = ", ".join(f'"{name}"' for name in missing)
        raise ConfigError(
            [f"{checkpoint} was trained with extension {names}: name it, --extension {EXTENSION}"]
        )


def tokenizer_files(
    values: dict[str, Any], tokenizer_path: Path | str | None, *, seq_len: int
) -> tuple[Any, Any, dict[Path, bytes]]:
    """(bos_token_id, eos_token_id, tokenizer files by name); (None, None, {}) for synthetic
    data.
    """
    from trainer.data.hf_tokenizer import changes_of_copy, hf_tokenizer_files, model_token_ids
    from trainer.data.tokenizer import local_section, open_tokenizer

    mix_sources = {
        item["source"] for item in values.get("data.mix") or [{"source": DEFAULT_SOURCE}]
    }
    if values.get("data.corpus") == COPY_CORPUS and mix_sources == {DEFAULT_SOURCE}:
        print_lines("no tokenizer: the run trained on synthetic tokens")
        return None, None, {}
    keys = {
        name: value
        for key, value in values.items()
        if (name := key.removeprefix("tokenizer.")) != key
    }
    stated = local_section(
        TokenizerSection.model_validate(
            keys | ({"path": str(tokenizer_path)} if tokenizer_path else {})
        )
    )
    if stated.kind in extension.BUILT_IN_TOKENIZERS:
        tokenizer, files = hf_tokenizer_files(stated, max_length=seq_len)
    else:
        tokenizer = open_tokenizer(stated)
        files = {}
        print_lines(f'no tokenizer files: tokenizer.kind = "{stated.kind}" is of an extension')
    separators = values.get("data.separators", "bos_eos")
    # transformers' tokenizers prepend bos by themselves, which this run's documents do not begin
    # with.
    if separators != "bos_eos" and tokenizer.bos is not None:
        print_lines(
            f'warning: the run has data.separators = "{separators}", but the exported tokenizer prepends '
            "its first token; call it with add_special_tokens=False"
        )
    last = tokenizer.special_tokens.get(separators, tokenizer.eos)
    if stated.kind != "huggingface" or stated.path is None:
        return tokenizer.bos, last, files
    source = tokenizer_folder(stated.path)
    print_lines(f"tokenizer: the files of {source}", *changes_of_copy(source, files))
    return *model_token_ids(source, bos=tokenizer.bos, eos=last), files


# ---- import


def run_import(options: Namespace) -> None:
    import_model(
        options.folder, options.output, text_only=options.text_only, ignore_keys=options.ignore_key
    )


def import_model(
    place: Path | str,
    output: Path | None,
    *,
    text_only: bool = False,
    ignore_keys: Sequence[str] = (),
) -> None:
    """Writes or prints a configuration that starts from the model in a folder, or at a URL.

    Raises `HuggingFaceError`.
    """
    if output is not None and output.exists():
        raise HuggingFaceError([f"{output} exists already"])
    imported = read_model(place, text_only=text_only, ignore_keys=ignore_keys)
    if output is None:
        sys.stdout.write(imported.toml)
        return
    output.write_text(imported.toml)
    rope = imported.model.rope
    fields = ", ".join(f"{key} {json.dumps(getattr(rope, key))}" for key in rope_fields(rope))
    print_lines(
        f"{imported.model.parameter_summary}; every tensor found",
        *imported.remarks,
        f"rope: {fields}",
        f"wrote {output}",
    )


@dataclasses.dataclass(frozen=True)
class ImportedModel:
    """A model's folder whose every tensor was found, and the configuration that starts from it."""

    model: ModelConfig
    max_positions: object
    """`max_position_embeddings` of its config.json."""
    remarks: Sequence[str]
    """Lines on what a run does without."""
    toml: str


def read_model(
    place: Path | str, *, text_only: bool = False, ignore_keys: Sequence[str] = ()
) -> ImportedModel:
    """Checks every tensor of the model in a folder, or at a URL, of which it makes a local copy
    where a run of this folder looks for it.

    Raises `HuggingFaceError`, and as `fetch_model`.
    """
    url = place if isinstance(place, str) else None
    folder = Path(place) if url is None else fetch_model(url, DataSection().cache_dir, key="model")
    # A model of several modalities nests the configuration of its language model.
    values = text_model_values(stored := read_config(folder), text_only=text_only)
    text_only = values is not stored
    model = model_config_from_hf(values, ignore_keys)
    weights = hf.SafetensorsReader(folder, text_only=text_only)
    with progress(f"checking {folder.name}", total=weights.num_files, unit="files") as shown:
        found = weights.problems(model, on_file=partial(shown.advance, 1))
    if problems := found or weights.tied_head_problems(model):
        raise HuggingFaceError([f"{folder}: {problem}" for problem in problems])
    left_out = [*config_remarks(values, ignore_keys), *check_tokenizer(folder, model)]
    left_out += [f"left out: {name} ({count} tensors)" for name, count in weights.left_out.items()]
    if count := weights.num_extra_tensors(model):
        left_out.append(
            f"left out: the layer after the last, which predicts further tokens ({count} tensors)"
        )
    if (loss := values.get("router_aux_loss_coef")) is not None:
        left_out.append(f"left out: router_aux_loss_coef = {loss}; see training.balance_loss")
    length = values.get("max_position_embeddings")
    lines = config_lines(
        folder, model, length, text_only=text_only, ignore_keys=ignore_keys, url=url
    )
    toml = "\n".join([*(f"# {line}" for line in left_out), *lines]) + "\n"
    return ImportedModel(model, length, left_out, toml)


def check_tokenizer(folder: Path, model: ModelConfig) -> list[str]:
    """Remarks on a tokenizer.

    Raises `DataError` for a damaged one, `HuggingFaceError` for one with texts of tokens that the
    model does not have.
    """
    from trainer.data.hf_tokenizer import detect_tokenizer
    from trainer.data.tokenizer import load_tokenizer
    from trainer.data.vocabulary import text_vocab_size, tokens_without_embedding

    if (detected := detect_tokenizer(folder)) is None:
        return []
    tokenizer = load_tokenizer(*detected)
    if (size := text_vocab_size(tokenizer)) > model.vocab_size:
        raise HuggingFaceError(
            [f"{folder}: the tokenizer has {size} tokens, but the model {model.vocab_size}"]
        )
    missing = tokens_without_embedding(tokenizer, model.vocab_size)
    line = f"ignored: special tokens that no text has, beyond the model's {model.vocab_size}: {', '.join(missing)}"
    return [line] if missing else []


def config_lines(
    folder: Path,
    model: ModelConfig,
    max_positions: object,
    *,
    text_only: bool = False,
    ignore_keys: Sequence[str] = (),
    url: str | None = None,
) -> Iterator[str]:
    """The lines of a configuration; paths are below `url` if the folder is a copy of it."""
    from trainer.data.hf_tokenizer import bos_remarks, detect_tokenizer

    family, size, overrides = nearest_preset(model)
    yield f"# {model.parameter_summary}; max_position_embeddings = {json.dumps(max_positions)}"
    if extensions := [*extension.references()]:
        yield from ("[job]", f"extension = {toml_value(extensions)}", "")
    yield from ("[model]", f'family = "{family}"', f'size = "{size}"')
    yield from (f"{key} = {toml_value(value)}" for key, value in overrides.items())
    for name in ROPES if model.has_local_rope else ROPES[:1]:
        rope = {
            key: getattr(getattr(model, name), key) for key in rope_fields(getattr(model, name))
        }
        yield from ("", f"[model.{name}]")
        yield from (
            f"{key} = {json.dumps(item)}" for key, item in rope.items() if item is not None
        )
    if detected := detect_tokenizer(folder):
        kind, path = detected
        yield from ("", "[tokenizer]", *bos_remarks(folder), f'kind = "{kind}"')
        if path is not None:
            inner = "" if path == folder else f"/{path.relative_to(folder)}"
            yield f"path = {json.dumps(f'{url}{inner}' if url else str(path.resolve()))}"
    else:
        yield from (
            "",
            "# The folder has no tokenizer that can be read. Add [tokenizer]: its default, bytes, is refused.",
        )
    prefix = HF_TEXT_PREFIX if text_only else HF_PREFIX
    yield from (
        "",
        "[checkpoint]",
        f"initial_load_path = {json.dumps(f'{prefix}{url or folder.resolve()}')}",
    )
    if ignore_keys:
        yield f"initial_ignore_keys = {toml_value(sorted(ignore_keys))}"


def nearest_preset(model: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """(family, size, overrides but for ropes) of the preset that differs from the model in the
    fewest fields.
    """
    differences = {
        (family, size): config_differences(model, preset)
        for family, presets in FAMILIES.items()
        for size, preset in presets.items()
    }

    def distance(name: tuple[str, str]) -> tuple[int, bool]:
        # A tie goes to the preset of the same architecture.
        return len(differences[name]), FAMILIES[name[0]][name[1]].model_type != model.model_type

    family, size = nearest = min(differences, key=distance)
    preset = FAMILIES[family][size]
    differing = differences[nearest]
    overrides = {
        key: value
        for key, (value, _) in differing.items()
        if not key.startswith((*ROPES, "layers"))
    }
    # New `layers` replace the preset's, whose shared options go with them: those are stated again.
    if differing.keys() & {"layers", "rope.layers"} or overrides.get("window", 0) is None:
        inherited = {
            each.name: each.default for each in dataclasses.fields(LayerKind)
        } | preset.common_options
        overrides |= {
            key: value for key, value in model.common_options.items() if value != inherited[key]
        }
        overrides = {**overrides, "window": None, "layers": layer_tables(model, inherited)}
    if preset.model_type != model.model_type:
        overrides["model_type"] = model.model_type
    return family, size, {key: value for key, value in overrides.items() if value is not None}


def layer_tables(model: ModelConfig, inherited: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of `model.layers`, without what all layers share, or what they inherit from the
    preset.
    """
    tables = list[dict[str, Any]]()
    shared = model.common_options.keys() - {"window"}
    pattern = model.layers or model.layer_kinds[: model.nope_every or 1]
    for kind in pattern:
        defaults = {each.name: each.default for each in dataclasses.fields(kind)} | {
            name: value for name, value in inherited.items() if name != "window"
        }
        table = {
            name: value
            for name, default in defaults.items()
            if name not in shared and (value := getattr(kind, name)) != default
        }
        # Equal neighbours become one table with `repeat`.
        if tables and {**tables[-1], "repeat": 1} == {**table, "repeat": 1}:
            tables[-1]["repeat"] = tables[-1].get("repeat", 1) + 1
        else:
            tables.append(table)
    return tables


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
