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

from models import FAMILIES, hf
from models.config import ModelConfig
from models.hf_config import HuggingFaceError, differences, read_model, rope_fields, write_model
from trainer.checkpoint.durable_io import sync, write_synced
from trainer.checkpoint.initial_weights import HUGGING_FACE, checkpoint_of, model_of, require_hashes
from trainer.checkpoint.run_dir import ResumeError, read_state
from trainer.config.job_config import COPY, CORPUS
from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, RunError

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = """\
export  writes config.json, generation_config.json, safetensors and the tokenizer's files from a checkpoint
        (the newest of a run folder), reads them again, and compares every tensor bit by bit
import  checks every tensor of a model, and writes the configuration that begins a run with it:
        the nearest preset and what differs, the tokenizer, and checkpoint.initial. No weights are copied:
        a run reads them where they are, each rank its part
"""


def main(words: Sequence[str]) -> int:
    asked = parser().parse_args(words)
    from trainer.data.errors import DataError

    try:
        if asked.command == "import":
            bring_in(asked.folder, asked.output)
        else:
            most = int(asked.max_shard_gib * 2**30)
            export(asked.source, asked.output, dtype=asked.dtype, file_bytes=most, tokenizer=asked.tokenizer)
    except HuggingFaceError as error:
        return refuse(*error.problems)
    except (ResumeError, DataError) as error:
        return refuse(str(error))
    except RunError as error:
        return refuse(str(error), status=FAILED)
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}", status=FAILED)
    return DONE


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m trainer.hf",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = found.add_subparsers(dest="command", required=True)
    export_ = commands.add_parser("export", help="a checkpoint as a folder in Hugging Face's format")
    export_.add_argument("source", type=Path, metavar="RUN_FOLDER|CHECKPOINT")
    export_.add_argument("output", type=Path, metavar="OUTPUT", help="a folder that is not there yet, or is empty")
    export_.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: what the run computed in")
    export_.add_argument("--max-shard-gib", type=size, default=4.0, metavar="N", help="GiB of a file; default: 4")
    export_.add_argument("--tokenizer", type=Path, metavar="FILE", help="where tokenizer.path of the run now lies")
    import_ = commands.add_parser("import", help="a configuration that begins with a Hugging Face model")
    import_.add_argument("folder", type=Path, metavar="HF_DIR")
    import_.add_argument("output", type=Path, nargs="?", metavar="OUTPUT.toml", help="default: it is printed")
    return found


def size(text: str) -> float:
    """Above 0; argparse says what is not."""
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


# ---- export


def export(source: Path, output: Path, *, dtype: str | None, file_bytes: int, tokenizer: Path | None) -> None:
    """Writes `output` under another name, and renames it when it is whole and on disk.

    Raises `ResumeError` for a checkpoint that cannot be read, DataError for its tokenizer, `HuggingFaceError` for the
    rest.
    """
    import torch

    checkpoint = checkpoint_of(source)
    values = (state := read_state(checkpoint))["config"]
    model, length = model_of(state), values["training.seq_len"]
    dtype = dtype or ("bfloat16" if values["training.dtype"] == "bfloat16" else "float32")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise HuggingFaceError([f"{output} is there already"])
    bos, eos, files = tokenizer_of(values, tokenizer, length=length)
    described = write_model(model, length=length, dtype=dtype, bos=bos, eos=eos)
    require_hashes(checkpoint)
    read = saved_in(checkpoint, model)
    say(f"{checkpoint}: {model.num_parameters:,} parameters as {dtype}, {length:,} tokens of context")
    with renamed(output) as folder:
        written = hf.write(folder, model, read, dtype=getattr(torch, dtype), file_bytes=file_bytes, written=say)
        for path in written:
            sync(path)
        generation = {key: described[key] for key in ("bos_token_id", "eos_token_id")}
        files |= {Path(hf.CONFIG): encoded(described), Path("generation_config.json"): encoded(generation)}
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_synced(folder / name, content)
            say(str(name))
        there = differences(read_model(hf.read_config(folder)), model)
        if problems := [f"{key} became {told}" for key, (told, _) in there.items()] + hf.Weights(folder).problems(
            model
        ):
            raise HuggingFaceError([f"{output} was not written: {problem}" for problem in problems])
    say(f"{output} is complete: every tensor was read again and is the same")


def tokenizer_of(values: dict[str, Any], moved: Path | None, *, length: int) -> tuple[int | None, int | None, Any]:
    """First and last token of documents, and the files; nothing for a run on tokens that stand for no text."""
    from trainer.export.hf_tokenizer import files_of

    drawn = {item["source"] for item in values.get("data.mix") or [{"source": CORPUS}]}
    if values.get("data.corpus") == COPY and drawn == {CORPUS}:
        say("the run had no text, and the model has no tokenizer")
        return None, None, {}
    path = moved or values.get("tokenizer.path")
    found, files = files_of(values["tokenizer.kind"], None if path is None else Path(path), length=length)
    separators = values.get("data.separators", "bos_eos")
    if separators != "bos_eos":
        say(
            f'remark: documents of this run stand between "{separators}"; this tokenizer puts its first token before a text '
            "all the same, unless it is called with add_special_tokens=False"
        )
    return found.bos, found.specials.get(separators, found.eos), files


def saved_in(checkpoint: Path, model: ModelConfig) -> Callable[[str], Tensor]:
    """Gives the weights of a checkpoint, each whole, by their names. Raises `ResumeError` unless the model's are there."""
    from trainer.checkpoint.load import WEIGHTS, Reader, require_alike, whole

    reader = Reader(checkpoint)
    there = {name: (*entry.size,) for name, entry in reader.entries.items() if name.startswith(WEIGHTS)}
    needed = {f"{WEIGHTS}{name}": (*entry.shape,) for name, entry in hf.entries(model).items()}
    require_alike(checkpoint, there, needed)
    return lambda name: whole(reader, f"{WEIGHTS}{name}")


@contextmanager
def renamed(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, which becomes it in the end, or is removed."""
    temporary = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync(temporary)
        temporary.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- import


def bring_in(folder: Path, output: Path | None) -> None:
    """Writes, or prints, the configuration that begins with a model. Raises `HuggingFaceError`."""
    if output is not None and output.exists():
        raise HuggingFaceError([f"{output} is there already"])
    values = hf.read_config(folder)
    model = read_model(values)
    if problems := hf.Weights(folder).problems(model):
        raise HuggingFaceError([f"{folder}: {problem}" for problem in problems])
    text = "\n".join(lines_of(folder, model, values.get("max_position_embeddings"))) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text)
    rope = ", ".join(f"{key} {json.dumps(getattr(model.rope, key))}" for key in rope_fields(model.rope))
    say(f"{model.num_parameters:,} parameters; every tensor is there", f"rope: {rope}", f"{output} begins with them")


def lines_of(folder: Path, model: ModelConfig, length: object) -> Iterator[str]:
    from trainer.export.hf_tokenizer import kind_of

    family, size, changed = nearest(model)
    yield f"# {model.num_parameters:,} parameters; max_position_embeddings = {json.dumps(length)}"
    yield from ("[model]", f'family = "{family}"', f'size = "{size}"')
    yield from (f"{key} = {json.dumps(value)}" for key, value in changed.items() if not key.startswith("rope."))
    rope = {key: getattr(model.rope, key) for key in rope_fields(model.rope)}
    yield from ("", "[model.rope]", *(f"{key} = {json.dumps(it)}" for key, it in rope.items() if it is not None))
    if found := kind_of(folder):
        kind, path = found
        yield from ("", "[tokenizer]", f'kind = "{kind}"')
        yield from () if path is None else (f"path = {json.dumps(str(path.resolve()))}",)
    else:
        yield from (
            "",
            "# No file of its tokenizer is one that is read here. Without [tokenizer] tokens are bytes, not its own.",
        )
    yield from ("", "[checkpoint]", f"initial = {json.dumps(f'{HUGGING_FACE}{folder.resolve()}')}")


def nearest(model: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """The preset that differs in the fewest fields: family, size, and the fields with the model's values."""
    presets = [
        (family, size, differences(model, preset)) for family in FAMILIES for size, preset in FAMILIES[family].items()
    ]
    family, size, changed = min(presets, key=lambda preset: len(preset[2]))
    return family, size, {key: mine for key, (mine, _) in changed.items() if mine is not None}


def encoded(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def refuse(*problems: str, status: int = BAD_CONFIGURATION) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status
