"""LSH-E's victim in XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from kvjax.policies import lsh_e
from pallas_kernels.ranking import Protection, victim


def hamming(
    query: UInt32[Array, "b h g w"],
    codes: UInt32[Array, "b h c w"],
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None,
) -> Int[Array, "b h"]:
    """See `api.hamming`."""
    differing = lsh_e.hamming(query[:, :, :, None], codes[:, :, None]).sum(2)
    scores = -differing.astype(jnp.float32)
    sinks, recent, limit = (x[..., None] for x in protection)
    return victim(scores, position, new_position[:, None, None], sinks, recent, limit, keep)[..., 0]
