"""Attention of whole texts that leaves no cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.rope import rotate
from pallas_kernels.attention import QUERY_BLOCK, attend, join_queries, query_block, split_queries, with_sink


class Uncached(LayerCache, kw_only=True):
    """Cache of one whole text, whose tokens attend to each other alone, by full causal attention."""

    k: Float[Array, "b h t d"] | None = None
    """Rotated keys, for later layers that read them."""
    v: Float[Array, "b h t e"] | None = None

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Uncached]:
        """Attend in blocks of queries, which avoids an n x n matrix; queries and keys are not rotated yet."""
        reading = tokens.reading
        k = rotate(tokens.shape.rope, k, reading.position[:, None], reading.rope_length)
        after = self.replace(k=k, v=v)
        return after.attend_only(tokens, q, sink_logits), after

    def attend_only(
        self, tokens: MixerInput, q: Float[Array, "b h g t d"], sink_logits: Float[Array, "h g"] | None
    ) -> Float[Array, "b h g t e"]:
        """Attend from the queries of the text's tokens in this layer, or in a later one, to the keys of this layer."""
        shape, positions, length = tokens.shape, tokens.reading.position, tokens.reading.rope_length
        q = rotate(shape.rope, q, positions[:, None, None], length)
        k, v, spec, key_positions = self.k, self.v, shape.spec, positions[:, None]
        assert k is not None and v is not None

        def attend_block(queries: tuple[Array, Int[Array, "b t"]]) -> Float[Array, "b h g t e"]:
            q, at = queries
            bias = spec.bias(at[:, None], key_positions)
            partial, _ = attend(q, k, v, spec.mask(at, key_positions), spec, bias)
            return with_sink(partial, sink_logits).out.astype(q.dtype)

        rows, t = positions.shape
        size = query_block(QUERY_BLOCK, rows)
        if t <= size:
            return attend_block((q, positions))
        padding = -t % size
        q = jnp.pad(q, [(0, 0)] * 3 + [(0, padding), (0, 0)])
        at = jnp.pad(positions, [(0, 0), (0, padding)])
        blocks = jax.lax.map(attend_block, (split_queries(q, -2, size), split_queries(at, -1, size)))
        return join_queries(blocks, -2)[..., :t, :]
