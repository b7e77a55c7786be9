"""The full cache's choices, with which `kvjax evaluate perplexity` compares those of a policy."""

from __future__ import annotations

import gc
import weakref

import numpy as np

import kvjax
from kvjax.evaluation.tasks.texts import first_choices


def test_choices_are_kept_for_the_next_policy_and_leave_with_the_model() -> None:
    model, tokens = kvjax.load("tiny"), np.arange(1, 13).reshape(2, 6)
    found = first_choices(model, tokens)
    np.testing.assert_array_equal(found[:, 0], tokens[:, 0])
    np.testing.assert_array_equal(found[:, 1:], np.asarray(model.logits(tokens)).argmax(-1)[:, :-1])
    assert first_choices(model, tokens.copy()) is found
    assert first_choices(model, tokens[:1]) is not found
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None
