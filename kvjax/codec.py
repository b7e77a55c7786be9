"""How keys stand in a slot: rotated once by original position, or stored raw and rotated on read by cache position."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import QUERY_BLOCK
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import rotate, rotate_by_rank
from kvjax.types import LayerCache

Keys = Float[Array, "b h c d"]
Queries = Float[Array, "b h g t d"]


class Codec(Protocol):
    """Translates between keys as the model computes them and keys as slots hold them."""

    def encode(self, config: ModelConfig, raw: Keys, position: Int[Array, "b t"]) -> Keys:
        """Unrotated keys of new tokens, as a slot stores them."""
        ...

    def read(self, config: ModelConfig, cache: LayerCache) -> tuple[Keys, Int[Array, "b h c"]]:
        """All keys of a layer as attention needs them, and the positions at which the model sees them."""
        ...

    def query(
        self, config: ModelConfig, cache: LayerCache, raw: Queries, position: Int[Array, "b t"]
    ) -> tuple[Queries, Int[Array, "b #h t"]]:
        """Unrotated queries as attention needs them, and the positions at which the model sees them."""
        ...

    def restore(self, config: ModelConfig, stored: Keys, position: Int[Array, "b h c"]) -> Keys:
        """Stored keys rotated by their original positions."""
        ...


class OriginalPositions:
    """Keys rotated by the position in the text (*Org Pos* in Keyformer, Table 3)."""

    def encode(self, config, raw, position):
        return rotate(config.rope, raw, position[:, None])

    def read(self, config, cache):
        return cache.kv.k, cache.position

    def query(self, config, cache, raw, position):
        return rotate(config.rope, raw, position[:, None, None]), position[:, None]

    def restore(self, config, stored, position):
        return stored


class CachePositions:
    """Keys stored raw and rotated by their rank among the live slots (StreamingLLM; *New Pos* in Keyformer)."""

    def encode(self, config, raw, position):
        return raw

    def read(self, config, cache):
        return rotate_by_rank(config.rope, cache.kv.k, cache.order), cache.order

    def query(self, config, cache, raw, position):
        older = _older(cache.position, position)
        return rotate(config.rope, raw, older[:, :, None]), older

    def restore(self, config, stored, position):
        return rotate(config.rope, stored, position)


def _older(slots: Int[Array, "b h c"], position: Int[Array, "b t"]) -> Int[Array, "b h t"]:
    """How many live slots hold an earlier position."""
    if position.shape[1] <= QUERY_BLOCK:
        live = slots[:, :, None, :]
        return ((live >= 0) & (live < position[:, None, :, None])).sum(-1)
    # A whole prompt against all of its slots would be n x n.
    live = jnp.sort(jnp.where(slots >= 0, slots, jnp.iinfo(slots.dtype).max), axis=-1)
    return jnp.vectorize(jnp.searchsorted, signature="(c),(t)->(t)")(live, position[:, None])


CODECS: dict[str, Codec] = {"original": OriginalPositions(), "cache": CachePositions()}
