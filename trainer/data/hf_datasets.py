"""Data sets of Hugging Face, saved on this disk or read as a stream. Only this file knows `datasets`.

    hf:NAME[,config=NAME][,split=NAME][,data_files=PATH][,revision=NAME]

NAME is a data set of the Hub, a format (`json`, `parquet`, `text`, ...) with its `data_files`, or a folder that
`save_to_disk` wrote. Code of a data set is never run: `datasets` has known no such thing since version 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.errors import DataError, missing_package

HUB_PREFIX = "hf:"
OPTIONS = ("config", "split", "data_files", "revision")
BATCH_ROWS = 64  # in memory at once


class OpenedDataset(NamedTuple):
    """A data set. Its parts are rows if it lies on this disk, else the files that it is streamed from."""

    dataset: Any
    version: str
    """Differs where the data differ."""
    num_parts: int
    num_bytes: int
    """Bytes, if they are known."""


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


@cache
def open_dataset(spec: str) -> OpenedDataset:
    """What `hf:...` names. Raises DataError."""
    name, *option_texts = spec.removeprefix(HUB_PREFIX).split(",")
    options = dict(option.partition("=")[::2] for option in option_texts)
    if not name or (unknown := set(options) - set(OPTIONS)) or not all(options.values()):
        hint = f", not {', '.join(sorted(unknown))}" if name and unknown else ""
        raise DataError(
            f'data.corpus = "{spec}": it is written hf:NAME,split=NAME; options: {", ".join(OPTIONS)}{hint}'
        )
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", f'data.corpus = "{spec}"') from error
    split = options.pop("split", "train")
    try:
        if is_saved_dataset(Path(name)):
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
            return OpenedDataset(data, data._fingerprint, len(data), data.data.nbytes)
        builder = datasets.load_dataset_builder(name, options.pop("config", None), **options)
        data = builder.as_streaming_dataset(split=split)
        return OpenedDataset(data, f"{builder.config_id}-{builder.hash}-{split}", data.num_shards, 0)
    except Exception as error:
        raise DataError(f'data.corpus = "{spec}" cannot be opened: {type(error).__name__}: {error}') from error


def read_dataset(spec: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object]]:
    """Number within its part, from 1, and value of each row of parts `start` to `stop`. Raises DataError.

    What a network does is not to decide what is in a corpus: a stream that fails is no bad text.
    """
    source = open_dataset(spec)
    on_disk = hasattr(source.dataset, "select")
    part = source.dataset.select(range(start, stop)) if on_disk else source.dataset.shard(source.num_parts, start)
    first_row = start + 1 if on_disk else 1
    try:
        if key not in (columns := part.column_names or [key]):
            raise DataError(f'data.corpus = "{spec}" has no column "{key}", but {", ".join(columns)}')
        for number, batch in enumerate(part.select_columns([key]).iter(BATCH_ROWS)):
            yield from enumerate(batch[key], first_row + number * BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f'data.corpus = "{spec}" cannot be read: {type(error).__name__}: {error}') from error
