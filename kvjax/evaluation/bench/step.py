"""Benchmark of decode steps of a whole model with and without LESS: `kvjax bench kernels --step`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax.evaluation.bench.models import SHAPES, random_model
from kvjax.evaluation.bench.race import decoder, race
from kvjax.evaluation.bench.tables import print_timings
from kvjax.methods import policy
from kvjax.methods.less.feature_maps import init_kernels


def time_decode_steps(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time decode steps of a whole model on a filled cache, with and without LESS."""
    config = SHAPES[options.step_model]
    model, steps = random_model(config, options.dtype), 16
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config.vocab_size, (options.step_batch, options.step_slots))
    kernels = init_kernels(jax.random.key(1), config)
    contenders = []
    for base in ("streaming", "h2o"):
        for name, made in ((base, policy(base)), (f"less on {base}", policy("less", base=base, kernels=kernels))):
            contender = decoder(model, made, options.step_slots, tokens, steps)
            contenders.append(dataclasses.replace(contender, name=name))
    race(contenders, options.repeats)
    title = (
        f"{steps} steps: {model.name}, {options.step_batch} rows, {options.step_slots} slots, {options.dtype}; {device}"
    )
    return {"title": title, "rows": print_timings(contenders, options.step_batch * steps, title)}
