"""The cache of a layer that reads the keys and values of an earlier layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.types import setting


class Shared(LayerCache, kw_only=True):
    """Cache without arrays of its own: its layer attends to the slots of an earlier one (Gemma 3n and 4).

    The earlier cache has the method `attend_only`. It evicts only after its last reader has read a block of text.
    """

    source: int = setting(0)
    """Index of the layer whose slots are read."""
    slots: Any = None
    """Cache of that layer, while this one runs."""

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    def waits_after(self, tokens: MixerInput) -> bool:
        return True  # the source may evict for a later token what this layer reads for an earlier one

    def link(self, earlier: Sequence[Any], pool: Any) -> Self:
        return self.replace(slots=earlier[self.source].link(earlier, pool))

    def unlink(self, pool: Any) -> tuple[Self, Any]:
        return self.replace(slots=None), pool

    def unpacked(self) -> LayerCache:
        return self.replace(slots=None)

    def truncate(self, length: Int[Array, " b"]) -> LayerCache:
        return self

    def attend(
        self, tokens: MixerInput, q: Float[Array, "b h g t d"], sink_logits: Float[Array, "h g"] | None
    ) -> tuple[Float[Array, "b h g t e"], Self]:
        """Attend from queries, before RoPE, to the earlier layer's slots, in which the tokens have a place already."""
        return self.slots.attend_only(tokens, q, sink_logits), self
