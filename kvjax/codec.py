"""How keys stand in a slot: rotated by the position in the text, or so that the model sees the place in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import QUERY_BLOCK
from kvjax.models.config import ModelConfig
from kvjax.rope import rotate, rotate_by_rank
from kvjax.types import LayerCache, NewTokens

if TYPE_CHECKING:
    from kvjax.policies.base import Policy

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

    def settle(self, config: ModelConfig, cache: LayerCache, new: NewTokens, raw: Keys) -> LayerCache:
        """The cache as attention may read it, after new tokens with these unrotated keys have been stored."""
        return cache


class OriginalPositions(Codec):
    """Keys rotated by the position in the text (*Org Pos* in Keyformer, Table 3)."""

    def encode(self, config, raw, position):
        return rotate(config.rope, raw, position[:, None])

    def read(self, config, cache):
        return cache.kv.k, cache.position

    def query(self, config, cache, raw, position):
        return rotate(config.rope, raw, position[:, None, None]), position[:, None]

    def restore(self, config, stored, position):
        return stored


class CachePositions(Codec):
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


class SlidingPositions(OriginalPositions):
    """Cache positions of sinks and a window: attention sees distances, and only those to the sinks differ.

    All other live tokens are as far apart as in the text. So the sinks alone are kept raw, too, and before each
    attention rotated to where they are to be seen: right before the window, which costs a few keys instead of all.
    """

    def read(self, config, cache):
        gap = _gap(cache, cache.position.max(-1) + 1)[..., None]
        sinks = (cache.position >= 0) & (cache.position < cache.sinks.shape[2])
        return cache.kv.k, jnp.where(sinks, cache.position + gap, cache.position)

    def settle(self, config, cache, new, raw):
        count = cache.sinks.shape[2]
        if count == 0:
            return cache
        place = jnp.arange(count)
        index = place - new.position[:, :1]  # texts are read in order
        arrives = (index >= 0) & (place < new.read[:, None]) & new.valid[:, :1]
        arriving = jnp.take_along_axis(raw, jnp.clip(index, 0, raw.shape[2] - 1)[:, None, :, None], axis=2)
        sinks = jnp.where(arrives[:, None, :, None], arriving, cache.sinks)
        # Sinks lie first (`kvjax.cache.compress`); where they have just been read they may not, but there is no gap.
        place = place[: cache.capacity]
        slot = jnp.where(cache.position[:, :, : len(place)] == place, place, cache.capacity + place)
        gap = _gap(cache, new.read[:, None])
        turned = rotate(config.rope, sinks[:, :, : len(place)], place + gap[..., None])
        row, head = jnp.arange(slot.shape[0])[:, None, None], jnp.arange(slot.shape[1])[:, None]
        keys = cache.kv.k.at[row, head, slot].set(turned, unique_indices=True, mode="drop")
        return cache.replace(kv=cache.kv.replace(k=keys), sinks=sinks)


def _gap(cache: LayerCache, read: Int[Array, "b #h"]) -> Int[Array, "b h"]:
    """How many tokens of the text read so far are not live."""
    return read - (cache.position >= 0).sum(-1)


def _older(slots: Int[Array, "b h c"], position: Int[Array, "b t"]) -> Int[Array, "b h t"]:
    """How many live slots hold an earlier position."""
    if position.shape[1] <= QUERY_BLOCK:
        live = slots[:, :, None, :]
        return ((live >= 0) & (live < position[:, None, :, None])).sum(-1)
    # A whole prompt against all of its slots would be n x n.
    live = jnp.sort(jnp.where(slots >= 0, slots, jnp.iinfo(slots.dtype).max), axis=-1)
    return jnp.vectorize(jnp.searchsorted, signature="(c),(t)->(t)")(live, position[:, None])


def codec_of(policy: Policy) -> Codec:
    """How the keys stand in the slots of a policy."""
    if policy.positions == "original":
        return OriginalPositions()
    return SlidingPositions() if policy.slides else CachePositions()
