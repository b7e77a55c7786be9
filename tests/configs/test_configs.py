"""Every shipped configuration loads and runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.prepare import prepare
from kvjax.methods import PLANS
from kvjax.utils.settings import PART_KEYS, config_directories, read_config
from tests.held import kept
from tests.small_models import random_model, small_config

NAMES = sorted({file.stem for directory in config_directories() for file in directory.glob("*.toml")})
TEXT = np.random.default_rng(0).integers(0, 64, (2, 600))
MODEL = random_model(small_config(4, 2))
DECODED = ("parts", "less_performer", "pyramidkv", "lightkv", "adakv", "fastgen")
"""Configs of parts that no other test combines, or whose programs differ after a prompt."""


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str) -> None:
    config = read_config(name)
    if config["policy"] == "less" and config["settings"].get("kernels") != "performer":
        pytest.skip("kernels belong to one model; see generation/test_generate.py")
    ids = {"special": (0,), "punctuation": (3, 5)} if config["policy"] == "fastgen" else {}
    parts = {part: config[part] for part in PART_KEYS if part in config}
    policy = kvjax.policy(config["policy"], **parts, **config["settings"], **ids)
    model = random_model(small_config(4, 2, max_positions=1000))
    state, logits = kvjax.prefill(
        model,
        policy,
        TEXT,
        config.get("budget", 1.0),
        budget_of=config.get("budget_of", "text"),
        lengths=[600, 90],
        max_new_tokens=40,
        prefill_chunk=config.get("prefill_chunk"),
    )
    fewest = min(len(head) for layer in kept(state, 0) for head in layer)
    assert (fewest < 600) == (state.policy.plan.sizing.mode != "unbounded" and name != "fastgen"), fewest
    if name in DECODED:
        state, logits = kvjax.decode_step(state, jnp.zeros(2, jnp.int32))
    assert np.isfinite(logits).all()


WHOLES = {"text": 12 + 28, "prompt": 12, "context": 4096}


@pytest.mark.parametrize("whole", WHOLES)
def test_a_fraction_is_of_what_it_is_said_to_be(whole: str) -> None:
    found = prepare(MODEL, "window", [[3] * 12], 0.5, None, max_new_tokens=28, key=None, plan=None, budget_of=whole)
    assert {int(limit.max()) for limit in found.limits} == {WHOLES[whole] // 2}


def test_an_unknown_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_of='half' is not one of text, prompt, context"):
        kvjax.prefill(MODEL, "window", [[3] * 12], 0.5, budget_of="half")


def test_every_plan_has_one() -> None:
    assert set(PLANS) - {"uniform"} <= {read_config(name).get("plan") for name in NAMES}
