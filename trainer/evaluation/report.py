"""Reports a grid of scores as a console table, a PNG and TensorBoard scalars."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

CELL_SIZE, LEFT_MARGIN, TOP_MARGIN = 96, 64, 48  # pixels


@dataclass(frozen=True, kw_only=True)
class ScoreGrid:
    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: dict[tuple[str, str], tuple[float, float]]
    """(fraction of successful trials, mean log-probability in nats) by (row, column)."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    rich_table = Table()
    for column in columns:
        rich_table.add_column(column, justify="right")
    for row in rows:
        rich_table.add_row(*row)
    console = Console()
    sys.stdout.write(f"{title}\n" + "".join(segment.text for segment in console.render(rich_table)))


def print_grid(grid: ScoreGrid) -> None:
    rows = [
        [
            row,
            *(
                f"{fraction:.0%} ({log_probability:.2f})"
                for column in grid.columns
                for fraction, log_probability in [grid.values[row, column]]
            ),
        ]
        for row in grid.rows
    ]
    print_table(f"{grid.title}: trials found (mean log-probability)", ["depth", *grid.columns], rows)


def draw_grid(grid: ScoreGrid, path: Path) -> Any:
    """Writes a PNG (green for found, red for missed) and returns the image. Returns None if pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        log.warning("no PNG: pillow is not installed (pip install pillow)")
        return None
    size = (LEFT_MARGIN + CELL_SIZE * len(grid.columns) + 8, TOP_MARGIN + CELL_SIZE // 2 * len(grid.rows) + 8)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((8, 6), grid.title[-(size[0] - 16) // 6 :], fill="black")
    for x, column in enumerate(grid.columns):
        draw.text((LEFT_MARGIN + CELL_SIZE * x + 8, TOP_MARGIN - 18), column, fill="black")
        for y, row in enumerate(grid.rows):
            fraction, log_probability = grid.values[row, column]
            corner = (LEFT_MARGIN + CELL_SIZE * x, TOP_MARGIN + CELL_SIZE // 2 * y)
            colour = (round(235 - 155 * fraction), round(80 + 125 * fraction), 90)
            draw.rectangle((corner, (corner[0] + CELL_SIZE - 2, corner[1] + CELL_SIZE // 2 - 2)), fill=colour)
            draw.text((corner[0] + 8, corner[1] + 8), f"{fraction:.0%}", fill="black")
            draw.text((corner[0] + 8, corner[1] + 24), f"{log_probability:.2f}", fill="black")
    for y, row in enumerate(grid.rows):
        draw.text((8, TOP_MARGIN + CELL_SIZE // 2 * y + 14), row, fill="black")
    image.save(path)
    return image


def write_tensorboard(grid: ScoreGrid, name: str, folder: Path, *, step: int, image: Any) -> None:
    """Writes the mean of each column, and the image if there is one."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))
    for column in grid.columns:
        row_values = [grid.values[row, column] for row in grid.rows]
        length = column.replace(",", "")
        for tag, values in zip((name, f"{name}_log_probability"), zip(*row_values, strict=True), strict=True):
            writer.add_scalar(f"{tag}/{length}", sum(values) / len(values), step)
    if image is not None:
        width, height = image.size
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3)
        writer.add_image(name, pixels, step, dataformats="HWC")
    writer.close()
