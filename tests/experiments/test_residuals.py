"""Residuals at equal bytes: as many slots as fit beside a residual's state."""

from __future__ import annotations

import pytest

from experiments.residuals import bytes_of, slots_within
from kvjax.methods.notation import combination
from tests.small_models import GQA, random_model


@pytest.mark.parametrize("name", ["h2o", "h2o+momentkv", "h2o+attention_matching"])
def test_slots_fill_the_bytes(name: str) -> None:
    model, policy, limit = random_model(GQA), combination(name), 20_000
    slots = slots_within(model, policy, limit)
    assert bytes_of(model, policy, slots) <= limit < bytes_of(model, policy, slots + 1)


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="h2o with its residual takes more than 100 bytes; give larger shares"):
        slots_within(random_model(GQA), combination("h2o+momentkv"), 100)
