"""Page tables, which assign pages to heads, built on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


def page_slots(tokens: int) -> int:
    """Return the slots in a page for texts of up to `tokens` tokens: few, so that a head's last page wastes little."""
    return 16 if tokens <= 256 else 32 if tokens <= 512 else 64


def round_pages(pages: int) -> int:
    """Round up the number of pages in a pool, by at most 6.25%.

    The result is the next multiple of a sixteenth of the next lower power of two.
    """
    unit = max(1, 1 << (max(1, pages).bit_length() - 5)) if pages >= 16 else 1
    return -(-pages // unit) * unit


class Table(NamedTuple):
    """Page table of a pool; if several devices have pools, their tables are concatenated."""

    owner: Int[np.ndarray, " P"]
    first: Int[np.ndarray, " P"]
    start: Int[np.ndarray, " layers_and_1"]
    most: int


def table(limits: Int[np.ndarray, "layers b h"], page_size: int, devices: tuple[int, int] = (1, 1)) -> Table:
    """Assign pages to all heads; `devices` are the numbers of devices that shard rows and heads."""
    parts = [of_head for of_row in np.split(limits, devices[0], 1) for of_head in np.split(of_row, devices[1], 2)]
    pages = [-(-part.reshape(len(part), -1) // page_size) for part in parts]
    total = round_pages(max(int(part.sum()) for part in pages))
    owners, firsts, starts = [], [], []
    for part in pages:
        start, flat = np.concatenate([[0], np.cumsum(part.sum(1))]), part.reshape(-1)
        before, rest = np.repeat(np.cumsum(flat) - flat, flat), (0, total - start[-1])
        owners.append(np.pad(np.repeat(np.arange(flat.size) % part.shape[1], flat), rest))
        firsts.append(np.pad((np.arange(start[-1]) - before) * page_size, rest))
        starts.append(start)
    owner, first, start = (np.concatenate(x).astype(np.int32) for x in (owners, firsts, starts))
    return Table(owner, first, start, max(16, 1 << (int(limits.max()) - 1).bit_length()))
