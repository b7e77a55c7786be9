"""Whole decode steps compiled for a TPU that is not there.

`python -m tests.benchmarks.aot.tpu_steps CHIP`, with jax[tpu], prints for each policy the kernels that its
program calls, and the compiler's bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from benchmarks import aot
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.verify import truncate, verify
from kvjax.methods.less.feature_maps import init_kernels
from kvjax.models import Rope
from tests.small_models import random_model, small_config

CONFIG = small_config(32, 8, head_width=128, rope=Rope(width=128), width=256)
ROWS, SLOTS = 16, 2048


def cases() -> dict[str, tuple[kvjax.Policy, tuple[str, ...]]]:
    """Policies, and the kernels that a step under each is to call."""
    kernels = init_kernels(jax.random.key(0), CONFIG)
    stepping = ("rope", "fused_decode")
    # A head that keeps everything has all slots, so that the pool is large.
    classes: dict[str, Any] = {
        "special": (1,),
        "punctuation": (2,),
        "threshold": 1.0,
    }
    return {
        "streaming": (kvjax.policy("streaming"), stepping),
        "h2o": (kvjax.policy("h2o"), stepping),
        "h2o-int8": (kvjax.policy("h2o", codec="int8"), stepping),
        "keyformer": (kvjax.policy("keyformer"), stepping),
        "less": (kvjax.policy("less", base="keyformer", kernels=kernels), (*stepping, "less_remember")),
        "lsh_e": (kvjax.policy("lsh_e"), stepping),
        "fastgen": (kvjax.policy("fastgen", **classes), ("rope", "paged_attention")),
        "less-fastgen": (
            kvjax.policy("fastgen", **classes, **{"residual.kernels": kernels}),
            ("rope", "paged_attention", "less_phi", "less_psi"),
        ),
    }


def verified(decoder: Decoder, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
    """The cache after five known tokens, of which the last is taken back, and logits."""
    tokens = jnp.broadcast_to(token[:, None], (ROWS, 5))
    opened, logits = verify(decoder, cache.replace(key=None), tokens, jnp.full(ROWS, 5))
    return truncate(opened, cache.position + 4), logits


def compiled(
    policy: kvjax.Policy, chip: str, run: Callable[..., Any] = Decoder.step, slots: int = SLOTS
) -> dict[str, Any]:
    """The kernels and bytes of a step, or of another function of a decoder, a cache and tokens."""
    model = random_model(CONFIG, dtype=jnp.bfloat16)
    budget = slots if policy.plan.sizing.mode == "budget" else 1.0
    state, _ = kvjax.prefill(model, policy, np.ones((ROWS, 40), int), budget, max_new_tokens=SLOTS)
    mesh = aot.mesh_of(chip)
    place = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        jnp.asarray, (state.decoder, state.cache, jnp.zeros(ROWS, jnp.int32))
    )  # settings are numbers
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, donate_argnums=1).trace(*shapes).lower(lowering_platforms=("tpu",))
        memory = lowered.compile().memory_analysis()
    assert memory is not None
    return {
        "kernels": sorted(set(re.findall(r'kernel_name = "(\w+)"', lowered.as_text()))),
        "cache": kvjax.cache_bytes(state),
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    os.environ.update(aot.ENVIRONMENT)
    found = {name: compiled(policy, sys.argv[1]) | {"expected": names} for name, (policy, names) in cases().items()}
    found["verification"] = compiled(kvjax.policy("full"), sys.argv[1], verified) | {"expected": ["decode_attention"]}
    few = compiled(kvjax.policy("streaming"), sys.argv[1], slots=64)
    found["streaming-64"] = few | {"expected": cases()["streaming"][1]}
    print(json.dumps(found, indent=1))
