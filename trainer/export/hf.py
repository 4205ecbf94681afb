"""`python -m trainer.hf export | import`: from a checkpoint to a folder in Hugging Face's format, and back."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import hf
from models.config import ModelConfig
from models.hf_config import HuggingFaceError, config_differences, model_config_from_hf, model_config_to_hf, rope_fields
from models.presets import FAMILIES
from trainer.checkpoint.durable_io import fsync_path, write_and_fsync
from trainer.checkpoint.initial_weights import HF_PREFIX, find_checkpoint, model_config_from_state, require_valid_hashes
from trainer.checkpoint.run_dir import ResumeError, read_state
from trainer.config.job_config import COPY_CORPUS, DEFAULT_SOURCE
from trainer.errors import EXIT_BAD_CONFIG, EXIT_FAILURE, EXIT_SUCCESS, RunFailedError

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = """\
export  writes config.json, generation_config.json, safetensors and the tokenizer's files from a checkpoint
        (the newest of a run folder), reads them again, and compares every tensor bit by bit
import  checks every tensor of a model, and writes the configuration that begins a run with it:
        the nearest preset and what differs, the tokenizer, and checkpoint.initial_load_path. No weights are copied:
        a run reads them where they are, each rank its part
"""


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    from trainer.errors import DataError

    try:
        if args.command == "import":
            import_model(args.folder, args.output)
        else:
            max_file_bytes = int(args.max_shard_gib * 2**30)
            export(args.source, args.output, dtype=args.dtype, max_file_bytes=max_file_bytes, tokenizer=args.tokenizer)
    except HuggingFaceError as error:
        return print_errors(*error.problems)
    except (ResumeError, DataError) as error:
        return print_errors(str(error))
    except RunFailedError as error:
        return print_errors(str(error), status=EXIT_FAILURE)
    except OSError as error:
        return print_errors(f"{error.filename}: {error.strerror}", status=EXIT_FAILURE)
    return EXIT_SUCCESS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.hf",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    export_parser = subparsers.add_parser("export", help="a checkpoint as a folder in Hugging Face's format")
    export_parser.add_argument("source", type=Path, metavar="RUN_FOLDER|CHECKPOINT")
    export_parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="a folder that is not there yet, or is empty"
    )
    export_parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: what the run computed in")
    export_parser.add_argument(
        "--max-shard-gib", type=positive_float, default=4.0, metavar="N", help="GiB of a file; default: 4"
    )
    export_parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="where tokenizer.path of the run now lies"
    )
    import_parser = subparsers.add_parser("import", help="a configuration that begins with a Hugging Face model")
    import_parser.add_argument("folder", type=Path, metavar="HF_DIR")
    import_parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT.toml", help="default: it is printed")
    return parser


def positive_float(text: str) -> float:
    """Above 0; argparse says what is not."""
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


# ---- export


def export(source: Path, output: Path, *, dtype: str | None, max_file_bytes: int, tokenizer: Path | None) -> None:
    """Writes `output` under another name, and renames it when it is whole and on disk.

    Raises `ResumeError` for a checkpoint that cannot be read, DataError for its tokenizer, `HuggingFaceError` for the
    rest.
    """
    import torch

    checkpoint = find_checkpoint(source)
    values = (state := read_state(checkpoint))["config"]
    model, seq_len = model_config_from_state(state), values["training.seq_len"]
    dtype = dtype or ("bfloat16" if values["training.dtype"] == "bfloat16" else "float32")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise HuggingFaceError([f"{output} is there already"])
    bos, eos, files = tokenizer_files(values, tokenizer, seq_len=seq_len)
    hf_config = model_config_to_hf(model, max_length=seq_len, dtype=dtype, bos=bos, eos=eos)
    require_valid_hashes(checkpoint)
    read_weight = weight_reader(checkpoint, model)
    print_lines(f"{checkpoint}: {model.num_parameters:,} parameters as {dtype}, {seq_len:,} tokens of context")
    with atomic_folder(output) as folder:
        paths = hf.write_safetensors(
            folder,
            model,
            read_weight,
            dtype=getattr(torch, dtype),
            file_bytes=max_file_bytes,
            on_file_written=print_lines,
        )
        for path in paths:
            fsync_path(path)
        generation = {key: hf_config[key] for key in ("bos_token_id", "eos_token_id")}
        files |= {Path(hf.CONFIG_FILE): encode_json(hf_config), Path("generation_config.json"): encode_json(generation)}
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_and_fsync(folder / name, content)
            print_lines(str(name))
        changed = config_differences(model_config_from_hf(hf.read_config(folder)), model)
        if problems := [
            f"{key} became {exported_value}" for key, (exported_value, _) in changed.items()
        ] + hf.SafetensorsReader(folder).problems(model):
            raise HuggingFaceError([f"{output} was not written: {problem}" for problem in problems])
    print_lines(f"{output} is complete: every tensor was read again and is the same")


def tokenizer_files(
    values: dict[str, Any], tokenizer_path: Path | None, *, seq_len: int
) -> tuple[int | None, int | None, Any]:
    """First and last token of documents, and the files; nothing for a run on tokens that stand for no text."""
    from trainer.export.hf_tokenizer import hf_tokenizer_files

    mix_sources = {item["source"] for item in values.get("data.mix") or [{"source": DEFAULT_SOURCE}]}
    if values.get("data.corpus") == COPY_CORPUS and mix_sources == {DEFAULT_SOURCE}:
        print_lines("the run had no text, and the model has no tokenizer")
        return None, None, {}
    path = tokenizer_path or values.get("tokenizer.path")
    loaded_tokenizer, files = hf_tokenizer_files(
        values["tokenizer.kind"], None if path is None else Path(path), max_length=seq_len
    )
    separators = values.get("data.separators", "bos_eos")
    if separators != "bos_eos":
        print_lines(
            f'remark: documents of this run stand between "{separators}"; this tokenizer puts its first token before a text '
            "all the same, unless it is called with add_special_tokens=False"
        )
    return loaded_tokenizer.bos, loaded_tokenizer.special_tokens.get(separators, loaded_tokenizer.eos), files


def weight_reader(checkpoint: Path, model: ModelConfig) -> Callable[[str], Tensor]:
    """Gives the weights of a checkpoint, each whole, by their names. Raises `ResumeError` unless the model's are there."""
    from trainer.checkpoint.load import MODEL_PREFIX, CheckpointReader, read_full_tensor, require_matching_tensors

    reader = CheckpointReader(checkpoint)
    saved_shapes = {
        name: (*entry.size,) for name, entry in reader.tensor_metadata.items() if name.startswith(MODEL_PREFIX)
    }
    expected_shapes = {f"{MODEL_PREFIX}{name}": (*entry.shape,) for name, entry in hf.tensor_specs(model).items()}
    require_matching_tensors(checkpoint, saved_shapes, expected_shapes)
    return lambda name: read_full_tensor(reader, f"{MODEL_PREFIX}{name}")


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which becomes it in the end, or is removed."""
    temporary = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_path(temporary)
        temporary.rename(output)
        fsync_path(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- import


def import_model(folder: Path, output: Path | None) -> None:
    """Writes, or prints, the configuration that begins with a model. Raises `HuggingFaceError`."""
    if output is not None and output.exists():
        raise HuggingFaceError([f"{output} is there already"])
    values = hf.read_config(folder)
    model = model_config_from_hf(values)
    if problems := hf.SafetensorsReader(folder).problems(model):
        raise HuggingFaceError([f"{folder}: {problem}" for problem in problems])
    text = "\n".join(config_lines(folder, model, values.get("max_position_embeddings"))) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text)
    rope = ", ".join(f"{key} {json.dumps(getattr(model.rope, key))}" for key in rope_fields(model.rope))
    print_lines(
        f"{model.num_parameters:,} parameters; every tensor is there", f"rope: {rope}", f"{output} begins with them"
    )


def config_lines(folder: Path, model: ModelConfig, max_positions: object) -> Iterator[str]:
    from trainer.export.hf_tokenizer import detect_tokenizer

    family, size, overrides = nearest_preset(model)
    yield f"# {model.num_parameters:,} parameters; max_position_embeddings = {json.dumps(max_positions)}"
    yield from ("[model]", f'family = "{family}"', f'size = "{size}"')
    yield from (f"{key} = {json.dumps(value)}" for key, value in overrides.items() if not key.startswith("rope."))
    rope = {key: getattr(model.rope, key) for key in rope_fields(model.rope)}
    yield from ("", "[model.rope]", *(f"{key} = {json.dumps(item)}" for key, item in rope.items() if item is not None))
    if detected := detect_tokenizer(folder):
        kind, path = detected
        yield from ("", "[tokenizer]", f'kind = "{kind}"')
        yield from () if path is None else (f"path = {json.dumps(str(path.resolve()))}",)
    else:
        yield from (
            "",
            "# No file of its tokenizer is one that is read here. Without [tokenizer] tokens are bytes, not its own.",
        )
    yield from ("", "[checkpoint]", f"initial_load_path = {json.dumps(f'{HF_PREFIX}{folder.resolve()}')}")


def nearest_preset(model: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """The preset that differs in the fewest fields: family, size, and the fields with the model's values."""
    presets = [
        (family, size, config_differences(model, preset))
        for family in FAMILIES
        for size, preset in FAMILIES[family].items()
    ]
    family, size, overrides = min(presets, key=lambda preset: len(preset[2]))
    return family, size, {key: value for key, (value, _) in overrides.items() if value is not None}


def encode_json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def print_errors(*problems: str, status: int = EXIT_BAD_CONFIG) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status
