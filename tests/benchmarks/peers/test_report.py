"""The arithmetic of the page about kvjax and kvpress."""

import math

import numpy as np
import pytest

from benchmarks.peers.cpu import compared
from benchmarks.peers.report import overlap, paired


def test_overlap_is_of_what_is_kept_whatever_the_layer_and_the_order() -> None:
    one = np.array([[[0, 1, 2, 3], [4, 5, 6, 7]]])
    other = np.array([[[3, 2, 1, 9], [4, 5, 6, 7]]])
    assert overlap(one, other) == (0.875, 0.75)
    assert overlap(one, one[:, ::-1]) == (0.0, 0.0)


def test_differences_are_paired() -> None:
    mean, error = paired([1.0, 2.0, 6.0], [2.0, 4.0, 9.0])
    assert mean == pytest.approx(2.0)
    assert error == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(paired([1.0], [2.0])[1])


def test_ratios_are_of_speeds_to_the_first_side_and_of_bytes_to_the_file() -> None:
    peer, ours = dict(prompt=1.0, token=0.1, bytes=2e8, peak=3e8), dict(prompt=2.0, token=0.05, bytes=3e8, peak=5e8)
    rows = {"llama.cpp": [peer], "kvjax": [ours, {**ours, "token": 0.2}]}
    *_, first, second = compared(rows, 100_000_000).splitlines()
    assert first == "| llama.cpp | 1.00 (1.00) | 1.00 (1.00) | 2.0 | 3.0 |"
    assert second == "| kvjax | 2.00 (0.80) | 0.50 (0.50) | 3.0 | 5.0 |"
