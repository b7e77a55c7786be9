"""Selection of LSH-E's victim for TPU: distances are never written to device memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.blocks import input_block, output_block, run
from pallas_kernels.common import SUBLANES, VMEM_BYTES, tpu_params
from pallas_kernels.hamming.api import HammingVictim
from pallas_kernels.hamming.reference import distances_of_words
from pallas_kernels.ranking import EvictionRules, victim


def hamming(x: HammingVictim, *, interpret: Any) -> Int[Array, "b h"]:
    b, h, c = x.position.shape
    heads = SUBLANES if h % SUBLANES == 0 else h

    def part(*tail: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *tail), lambda b, h: (b, h) + (0,) * len(tail))

    inputs = HammingVictim(
        query=input_block(x.query.reshape(b, h, -1), part(x.query.shape[2] * len(x.codes))),
        codes=[input_block(code, part(c)) for code in x.codes],
        position=input_block(x.position, part(c)),
        new_position=input_block(x.new_position, pl.BlockSpec(memory_space=pltpu.SMEM)),
        protection=EvictionRules(*(input_block(rule[..., None], part(1)) for rule in x.protection.of_heads())),
        keep=None if x.keep is None else input_block(x.keep.astype(jnp.int32), part(c)),
    )
    slots = run(
        _kernel,
        (inputs,),
        output_block((b, h, 1), part(1), jnp.int32),
        grid=(b, pl.cdiv(h, heads)),
        compiler_params=tpu_params(2, vmem=VMEM_BYTES),
        interpret=interpret,
        name="hamming",
    )
    return slots[..., 0]


def _kernel(x: HammingVictim, slot: Any) -> None:
    words = x.query[0]
    query = [words[:, i : i + 1] for i in range(words.shape[1])]
    scores = -distances_of_words(query, [code[0] for code in x.codes]).astype(jnp.float32)
    rules = [rule[0] for rule in x.protection]
    keep = None if x.keep is None else x.keep[0] != 0
    slot[0] = victim(scores, x.position[0], x.new_position[pl.program_id(0)], *rules, keep=keep)
