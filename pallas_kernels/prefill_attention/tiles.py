"""Division of a prompt into the kernels' blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.attention import pad_to
from pallas_kernels.blocks import input_block
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised, SplitKV
from pallas_kernels.prefill_attention.api import PrefillAttention, QueryTokens


@dataclass(frozen=True)
class Tiles:
    """Blocks of queries and of keys, and which of them attend to which."""

    n: int
    c: int
    size: int
    """Queries of a block."""
    width: int
    """Keys of a block."""
    window: int | None
    of: int
    """Number of tokens that are being read, whose keys are the last."""
    ranges: Any = None
    """Result of `ranges_of`, or a reference to it; None if the queries are of all of these tokens."""

    @property
    def queries(self) -> int:
        """Blocks of queries."""
        return -(-self.n // self.size)

    @property
    def keys(self) -> int:
        """Blocks of keys."""
        return -(-self.c // self.width)

    def ranges_of(self, query_tokens: QueryTokens) -> Int[Array, "3 m"]:
        """Return each query block's first token and the one after its last, and each key block's `first_queries`."""
        tokens = jnp.pad(query_tokens.token, (0, self.queries * self.size - self.n), mode="edge").reshape(-1, self.size)
        begin, end = tokens[:, 0], tokens[:, -1] + 1
        earlier = end <= jnp.arange(self.keys)[:, None] * self.width - (self.c - self.of)
        rows = begin, end, earlier.sum(1)
        return jnp.stack([jnp.pad(row, (0, max(self.queries, self.keys) - len(row))) for row in rows]).astype(jnp.int32)

    def with_refs(self, refs: Mapping[str, Any] | None = None) -> Tiles:
        """Return the division for a kernel's references, of which `ranges` are those of this one's."""
        return replace(self, ranges=(refs or {}).get("ranges"))

    def begin(self, i: Any) -> Any:
        """Return the first token of block i of the queries."""
        return i * self.size if self.ranges is None else self.ranges[0, i]

    def end(self, i: Any) -> Any:
        """Return the token after the last one of block i of the queries."""
        return (i + 1) * self.size if self.ranges is None else self.ranges[1, i]

    def first(self, i: Any) -> Any:
        """Return the first block of keys that block i of the queries attends to.

        A window can skip blocks only without cached keys, as those are in no order.
        """
        windowed = self.window is not None and self.c == self.of
        return jnp.maximum(self.begin(i) - self.window + 1, 0) // self.width if windowed else 0

    def last(self, i: Any) -> Any:
        """Return the last block of keys that block i of the queries attends to."""
        return jnp.minimum((self.c - self.of + self.end(i) - 1) // self.width, self.keys - 1)

    def visible(self, i: Any, j: Any) -> Any:
        """Return whether block i of the queries attends to block j of the keys."""
        return (j >= self.first(i)) & (j <= self.last(i))

    # Unused blocks are not fetched: the index stays at a used block.
    def of_keys(self, i: Any, j: Any) -> Any:
        """Return the block of keys to fetch for step j of block i of the queries."""
        return jnp.clip(j, self.first(i), self.last(i))

    def of_queries(self, i: Any, j: Any) -> Any:
        """Return the block of queries to fetch for step i of block j of the keys."""
        return jnp.maximum(i, jnp.minimum(self.first_queries(j), self.queries - 1))

    def first_queries(self, j: Any) -> Any:
        """Return the first block of queries that attends to block j of the keys."""
        if self.ranges is not None:
            return self.ranges[2, j]
        return jnp.maximum(j * self.width - (self.c - self.of), 0) // self.size

    def padded(self, x: PrefillAttention) -> dict[str, Array]:
        """Return arrays by name, padded to whole blocks; padding is masked, numbers per token are [b, heads, 1, n]."""
        queries, keys = self.queries * self.size, self.keys * self.width
        b, h, g, n, d = x.q.shape
        k, v = (pad_to(array_of(y), 2, keys) for y in (x.k, x.v))
        q = pad_to(x.q.reshape(b, h * g, n, d), 2, queries)
        query, key = row(x.query_position[:, None], queries, -1), row(x.key_position, keys, -1)
        return {"q": q, "k": k, "v": v, "query": query, "key": key}

    def inputs(self, blocks: dict[str, Array], at: Callable[..., Any], looped: str = "") -> OrderedDict[str, Any]:
        """Return arrays in whole blocks as inputs of a kernel.

        Args:
            blocks: arrays by name, as `padded` lays them out.
            at: function from this division and a grid step to its row, query head, block of queries and of keys.
            looped: `queries` or `keys` if programs loop over all of them; their blocks have no axes of rows and heads.
        """
        heads, lead = blocks["q"].shape[1], None if looped else 1

        def input_of(name: str, array: Array) -> Any:
            if name == "ranges":
                return input_block(array, pl.BlockSpec(array.shape, lambda *_: (0, 0)))
            of_queries = name in ("q", "query", "lse", "weight")
            split, axis = name != "slope" and looped != ("queries" if of_queries else "keys"), int(name not in "qkv")
            sizes, share = [*array.shape[2:]], heads // array.shape[1]  # query heads per head of this array
            if split:
                sizes[axis] = self.size if of_queries else self.width

            def index(*step: Any) -> tuple[Any, ...]:
                r, m, i, j = at(self.with_refs(*step[5:]), *step[:5])
                along = (i if of_queries else j) if split else 0
                return 0 if name == "slope" else r, m // share, *((0, along) if axis else (along, 0))

            return input_block(array, pl.BlockSpec((lead, lead, *sizes), index))

        # JAX would sort a dict's names, and the compiler's schedules depend on the order.
        return OrderedDict((name, input_of(name, array)) for name, array in blocks.items())

    def weights(self, weights: Array | None, b: int) -> Array:
        """Return the weight of each query, [b, heads or 1, m, n] in whole blocks."""
        weights = jnp.ones((b, 1, 1, self.n)) if weights is None else weights
        return pad_to(weights.astype(jnp.float32), 3, self.queries * self.size)


def array_of(operand: Operand | SplitKV) -> Array:
    """Return keys or values, which the kernels' limits restrict to arrays."""
    assert not isinstance(operand, Quantised | Encoded | LazyRope | SplitKV)
    return operand


def row(x: Array, size: int, fill: int) -> Array:
    """Pad numbers per head and token to `size` tokens, and return them as [b, heads, 1, size]."""
    return pad_to(x, 2, size, fill)[:, :, None]
