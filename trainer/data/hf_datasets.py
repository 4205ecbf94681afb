"""Hugging Face datasets, saved on disk or streamed. Only this module imports `datasets`.

    hf:NAME[,config=NAME][,split=NAME][,data_files=PATH][,revision=NAME]

NAME is a dataset of the Hub, a format (`json`, `parquet`, `text`, ...) with `data_files`, or a
folder written by `save_to_disk`. Dataset scripts never run: `datasets` dropped them in version 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.data import HF_PREFIX
from trainer.errors import DataError, missing_package

OPTIONS = ("config", "split", "data_files", "revision")
BATCH_ROWS = 64  # rows in memory


class OpenedDataset(NamedTuple):
    dataset: Any
    version: str
    """Identifies the data: changes whenever they change."""
    num_parts: int
    """Rows of a dataset on disk, files of a streamed one."""
    num_bytes: int
    """0 for a streamed dataset: unknown."""


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


@cache
def open_dataset(spec: str) -> OpenedDataset:
    """Opens the dataset that `hf:...` names. Raises DataError."""
    name, *option_texts = spec.removeprefix(HF_PREFIX).split(",")
    options = dict(option.partition("=")[::2] for option in option_texts)
    if not name or (unknown := set(options) - set(OPTIONS)) or not all(options.values()):
        hint = f", not {', '.join(sorted(unknown))}" if name and unknown else ""
        raise DataError(
            f'data.corpus = "{spec}" must be hf:NAME[,option=value]...; options: {", ".join(OPTIONS)}{hint}'
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
            # The hash that `datasets` keeps of data and transformations has no public name.
            return OpenedDataset(data, data._fingerprint, len(data), data.data.nbytes)
        builder = datasets.load_dataset_builder(name, options.pop("config", None), **options)
        data = builder.as_streaming_dataset(split=split)
        return OpenedDataset(
            data, f"{builder.config_id}-{builder.hash}-{split}", data.num_shards, 0
        )
    except Exception as error:
        raise DataError(
            f'data.corpus = "{spec}" cannot be opened: {type(error).__name__}: {error}'
        ) from error


def read_dataset(spec: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object]]:
    """(row number from 1, value at `key`) of each row of parts `start` to `stop`. Raises
    DataError.

    A network failure raises DataError too: treated as bad text, it would change the corpus.
    """
    source = open_dataset(spec)
    # Only a dataset on disk has access by row. A streamed one is read file by file, and rows count
    # from the beginning of each.
    on_disk = hasattr(source.dataset, "select")
    part = (
        source.dataset.select(range(start, stop))
        if on_disk
        else source.dataset.shard(source.num_parts, start)
    )
    first_row = start + 1 if on_disk else 1
    try:
        # A streamed dataset may not know its columns before its first row.
        if key not in (columns := part.column_names or [key]):
            raise DataError(
                f'data.corpus = "{spec}" has no column "{key}"; its columns are {", ".join(columns)}'
            )
        for number, batch in enumerate(part.select_columns([key]).iter(BATCH_ROWS)):
            yield from enumerate(batch[key], first_row + number * BATCH_ROWS)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f'data.corpus = "{spec}" cannot be read: {type(error).__name__}: {error}'
        ) from error
