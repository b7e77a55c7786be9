"""Whole decode steps compiled for a TPU that is not there.

`python -m tests.benchmarks.aot.tpu_steps CHIP`, with jax[tpu], prints for each policy the kernels that its
program calls, and the compiler's bytes, and those of programs whose prompts are in host memory.
"""

from __future__ import annotations

import dataclasses
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
from kvjax.cache.host import HostSlots
from kvjax.generation.sampling import Sampling
from kvjax.generation.speculative import draw_rounds
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
    arguments = jax.tree.map(
        jnp.asarray, (state.decoder, state.cache, jnp.zeros(ROWS, jnp.int32))
    )  # settings are numbers
    return facts(run, chip, arguments) | {"cache": kvjax.cache_bytes(state)}


def facts(run: Callable[..., Any], chip: str, arguments: tuple[Any, ...], prompt: int = 0) -> dict[str, Any]:
    """The kernels and bytes of a function that changes its second argument; prompts on the host get `prompt` slots."""
    mesh = aot.mesh_of(chip)

    def shape_of(x: Any, *slots: int) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if x.sharding.memory_kind == "pinned_host" else "device"
        place = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.ShapeDtypeStruct((*x.shape[:2], *(slots or x.shape[2:3]), *x.shape[3:]), x.dtype, sharding=place)

    def shapes_of(node: Any) -> Any:
        if not isinstance(node, HostSlots):
            return shape_of(node)
        longer = jax.tree.map(lambda x: shape_of(x, prompt), (node.prompt, node.prompt_position))
        return jax.tree.map(shape_of, node).replace(prompt=longer[0], prompt_position=longer[1])

    shapes = jax.tree.map(shapes_of, arguments, is_leaf=lambda node: isinstance(node, HostSlots))
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, donate_argnums=1).trace(*shapes).lower(lowering_platforms=("tpu",))
        memory = lowered.compile().memory_analysis()
    assert memory is not None
    return {
        "kernels": sorted(set(re.findall(r'kernel_name = "(\w+)"', lowered.as_text()))),
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "host_alias": memory.host_alias_size_in_bytes,
    }


def rounds(decoder: Any, cache: Any, token: jax.Array, in_text: jax.Array) -> Any:
    """Four rounds of drafts and verifications in one loop."""
    key = jax.vmap(jax.random.key)(token)
    texts = key, token, in_text, in_text[0], Sampling(0.0), cache.end
    return draw_rounds(decoder, cache, *texts, rounds=4, logprobs=None)


def in_host_memory(chip: str) -> dict[str, dict[str, Any]]:
    """Bytes of programs over eight layers whose prompts are in host memory, by the program, and of one prompt."""
    model = random_model(dataclasses.replace(CONFIG, layers=8), dtype=jnp.bfloat16)
    policy, found = kvjax.policy("full", memory="host"), dict[str, dict[str, Any]]()
    token = jnp.zeros(2, jnp.int32)
    for name, decoder, run, more in (
        ("step", kvjax.decoder(model, policy), Decoder.step, ()),
        ("rounds", kvjax.speculation(model, "h2o", 256, verifier=policy), rounds, (jnp.zeros((2, 64), bool),)),
    ):
        cache, _ = decoder.prefill(np.ones((2, 300), int), max_new_tokens=256)
        arguments = decoder.for_steps(), cache.replace(key=None), token, *more
        found[name] = facts(run, chip, jax.tree.map(jnp.asarray, arguments), prompt=4096)
        found[name]["prompt"] = 2 * 2 * 8 * 4096 * 128 * 2
    return found


if __name__ == "__main__":
    os.environ.update(aot.ENVIRONMENT)
    found = {name: compiled(policy, sys.argv[1]) | {"expected": names} for name, (policy, names) in cases().items()}
    found["verification"] = compiled(kvjax.policy("full"), sys.argv[1], verified) | {"expected": ["decode_attention"]}
    few = compiled(kvjax.policy("streaming"), sys.argv[1], slots=64)
    found["streaming-64"] = few | {"expected": cases()["streaming"][1]}
    print(json.dumps({"device": found, "host": in_host_memory(sys.argv[1])}, indent=1))
