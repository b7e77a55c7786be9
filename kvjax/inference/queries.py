"""Text that is read over a cache for its queries alone; the cache stays as it is."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from kvjax.inference.cache import Cache, cache_specs
from kvjax.inference.decoder import Decoder, decoder_specs
from kvjax.inference.layers import append_and_attend
from kvjax.inference.sharding import OF_HEADS, OF_ROWS, joined, on_mesh
from kvjax.models.decoder import embed
from kvjax.models.sharding import on_device


@jax.jit
def replayed_queries(
    decoder: Decoder, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Float[Array, "b h g n d"], ...]:
    """Return each layer's queries of a text that is read on top of a cache.

    Args:
        decoder: reads the text.
        cache: what it attends to, beside itself.
        tokens: the text, padded on the right.
        lengths: its tokens in each row.
    """
    decoder = decoder.replace(asked=None)
    given = decoder_specs(decoder), cache_specs(cache), OF_ROWS, OF_ROWS
    made = (OF_HEADS,) * decoder.config.layers
    return on_mesh(_replay_on_device, decoder.mesh, given, made)(decoder, cache, tokens, lengths)


def _replay_on_device(
    decoder: Decoder, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Float[Array, "b h g n d"], ...]:
    config, weights = on_device(decoder.config, decoder.mesh), decoder.weights
    reading = cache.following(tokens, lengths)
    reading = reading.replace(prompt_length=reading.read, kernels=decoder.kernels)
    storage = joined(cache.storage, decoder.mesh).unpack()
    x = embed(weights, config, reading.token, reading.position)
    queries = []
    for index, (layer, shape) in enumerate(zip(weights.layers, config.layer_configs, strict=True)):
        policy = decoder.policy.layer(index)
        storage, told, x = append_and_attend(layer, config, shape, policy, storage, (index, index), reading, x)
        queries.append(told.new.q)
    return tuple(queries)
