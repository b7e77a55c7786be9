"""Every shipped configuration loads and runs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies import PLANS
from kvjax.settings import PART_KEYS, config_directories, read_config
from tests.models import random_model, small_config

pytestmark = pytest.mark.usefixtures("compiled_fast")
NAMES = sorted({file.stem for directory in config_directories() for file in directory.glob("*.toml")})
TEXT = np.random.default_rng(0).integers(0, 64, (2, 150))


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str) -> None:
    config = read_config(name)
    if config["policy"] == "less" and config["settings"].get("kernels") != "performer":
        pytest.skip("kernels belong to one model; see test_generate.py")
    ids = {"special": (0,), "punctuation": (3, 5)} if config["policy"] == "fastgen" else {}
    parts = {part: config[part] for part in PART_KEYS if part in config}
    policy = kvjax.policy(config["policy"], **parts, **config["settings"], **ids)
    model = random_model(small_config(4, 2, layers=3))
    state, logits = kvjax.prefill(
        model,
        policy,
        TEXT,
        config.get("budget", 1.0),
        lengths=[150, 90],
        max_new_tokens=300,
        prefill_chunk=config.get("prefill_chunk"),
    )
    assert np.isfinite(logits).all()
    _, logits = kvjax.decode_step(state, jnp.zeros(2, jnp.int32))
    assert np.isfinite(logits).all()


def test_every_plan_has_one() -> None:
    assert set(PLANS) - {"uniform"} <= {read_config(name).get("plan") for name in NAMES}
