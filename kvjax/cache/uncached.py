"""Attention of whole texts that leaves no cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.rope import rotate
from pallas_kernels.attention import QUERY_BLOCK, attend, join_queries, query_block, split_queries, with_sink


class Uncached(LayerCache):
    """Cache that stores nothing: the tokens of a text attend to each other alone, by full causal attention."""

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Uncached]:
        """Attend in blocks of queries, which avoids an n x n matrix."""
        shape, positions, length = tokens.shape, tokens.reading.position, tokens.reading.rope_length
        q = rotate(shape.rope, q, positions[:, None, None], length)
        k = rotate(shape.rope, k, positions[:, None], length)
        spec, key_positions = shape.spec, positions[:, None]

        def attend_block(queries: tuple[Array, Int[Array, "b t"]]) -> Float[Array, "b h g t e"]:
            q, at = queries
            bias = spec.bias(at[:, None], key_positions)
            partial, _ = attend(q, k, v, spec.mask(at, key_positions), spec, bias)
            return with_sink(partial, sink_logits).out.astype(q.dtype)

        rows, t = positions.shape
        size = query_block(QUERY_BLOCK, rows)
        if t <= size:
            return attend_block((q, positions)), self
        padding = -t % size
        q = jnp.pad(q, [(0, 0)] * 3 + [(0, padding), (0, 0)])
        at = jnp.pad(positions, [(0, 0), (0, padding)])
        blocks = jax.lax.map(attend_block, (split_queries(q, -2, size), split_queries(at, -1, size)))
        return join_queries(blocks, -2)[..., :t, :], self
