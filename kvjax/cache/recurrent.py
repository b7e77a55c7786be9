"""Caches of layers without slots: inputs that a convolution needs next, and a decaying sum of outer products."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.layer import LayerCache
from kvjax.types import HEADS, OF_HEADS, OF_ROWS, ROWS, TokenBatch, wide
from kvjax.utils.fields import values_of

_OF_COLUMNS: Any = PartitionSpec(ROWS, None, HEADS)


class Writes(NamedTuple):
    """Outer products that some tokens add to a state, of which each decays with every later token."""

    k: Float[Array, "b h t d"]
    u: Float[Array, "b h r t e"]
    decay: Float[Array, "b h r t"]
    """Logarithm of the factor of the state at each token, at most 0."""


def written(state: Float[Array, "b h r d e"], writes: Writes) -> Float[Array, "b h r d e"]:
    r"""Return a state after some tokens, without a pass over the tokens one by one.

    .. math:: S_t = e^{G_t} S_0 + \sum_{j \le t} e^{G_t - G_j} k_j u_j^\top, \quad G_t = \sum_{j \le t} g_j
    """
    total = jnp.cumsum(writes.decay, axis=-1)
    last = total[..., -1:]
    later = writes.u * jnp.exp(last - total)[..., None]
    return jnp.exp(last)[..., None] * state + jnp.einsum("bhtd,bhrte->bhrde", writes.k, later, precision="highest")


class Columns(LayerCache, kw_only=True):
    """Newest inputs of a causal convolution, which are all that a layer keeps of a text of any length."""

    kind: ClassVar[str] = "recurrent"
    rewinds: ClassVar[bool] = False

    columns: Float[Array, "b s h f"]
    """Inputs, the oldest first: one fewer than the convolution has taps."""

    def convolve(
        self, x: Float[Array, "b t h f"], taps: Float[Array, "h f w"], tokens: TokenBatch
    ) -> tuple[Float[Array, "b t h f"], Self]:
        """Return the causal convolution of new inputs, which are 0 for padding, and the cache with the newest ones.

        The results have at least float32.
        """
        columns = jnp.concatenate([self.columns, x], axis=1)
        dtype, factors = wide(x.dtype), jnp.moveaxis(taps, -1, 0)
        out = jnp.zeros(x.shape, dtype)
        for tap, factor in enumerate(factors):
            out += factor.astype(dtype) * columns[:, tap : tap + x.shape[1]].astype(dtype)
        return out, self.replace(columns=_newest(columns, tokens.counts, self.columns.shape[1]))

    def open(self) -> OpenColumns:
        return OpenColumns(**values_of(Columns, self))


class Recurrent(Columns, kw_only=True):
    """State of a layer that reads a text of any length in constant memory, and the inputs of a convolution before it.

    The state has at least float32, and `r` value heads for each of `h` key heads.
    """

    state: Float[Array, "b h r d e"]

    def advance(self, state: Float[Array, "b h r d e"], writes: Writes) -> Self:
        """Return the cache with the state after some tokens, to which their writes lead."""
        return self.replace(state=state)

    def open(self) -> OpenRecurrent:
        return OpenRecurrent(**values_of(Recurrent, self))


class Trail(NamedTuple):
    """What known tokens leave, to make the state after the first of them: no weights, and no other layer."""

    position: Int[Array, "b t"]
    inputs: Float[Array, "b t h f"]
    """Inputs of the convolution."""
    writes: Writes | None = None


class OpenColumns(Columns, kw_only=True):
    """Inputs before some known tokens, and their trail, along which `truncate` goes as far as they are kept."""

    trail: Trail | None = None

    def convolve(
        self, x: Float[Array, "b t h f"], taps: Float[Array, "h f w"], tokens: TokenBatch
    ) -> tuple[Float[Array, "b t h f"], Self]:
        out, _ = super().convolve(x, taps, tokens)
        return out, self.replace(trail=Trail(tokens.position, x))

    def follow(self, length: Int[Array, " b"]) -> tuple[Trail, Bool[Array, "b t"], Float[Array, "b s h f"]]:
        """Return the trail, a mask of its tokens before `length`, and the newest inputs up to the last of them."""
        if self.trail is None:
            raise ValueError("a recurrent layer cannot take back tokens that were read before it was opened.")
        kept = (self.trail.position >= 0) & (self.trail.position < length[:, None])
        columns = jnp.concatenate([self.columns, self.trail.inputs], axis=1)
        return self.trail, kept, _newest(columns, kept.sum(1, dtype=jnp.int32), self.columns.shape[1])

    def truncate(self, length: Int[Array, " b"]) -> Columns:
        """Return the cache after the tokens before `length`."""
        return Columns(columns=self.follow(length)[2])


class OpenRecurrent(OpenColumns, Recurrent, kw_only=True):
    """The state before some known tokens, and their trail."""

    def advance(self, state: Float[Array, "b h r d e"], writes: Writes) -> Self:
        assert self.trail is not None
        return self.replace(trail=self.trail._replace(writes=writes))

    def truncate(self, length: Int[Array, " b"]) -> Recurrent:
        """Return the cache after the tokens before `length`; others have neither written nor let the state decay."""
        trail, kept, columns = self.follow(length)
        writes, at = trail.writes, kept[:, None, None]
        assert writes is not None
        writes = writes._replace(u=jnp.where(at[..., None], writes.u, 0), decay=jnp.where(at, writes.decay, 0))
        return Recurrent(columns=columns, state=written(self.state, writes))


def _newest(columns: Float[Array, "b n h f"], start: Int[Array, " b"], count: int) -> Float[Array, "b s h f"]:
    # `count` columns of each row from `start` on.
    return jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, count))(columns, start)


Recurrent.specs = Recurrent(columns=_OF_COLUMNS, state=OF_HEADS)
OpenRecurrent.specs = OpenRecurrent(
    columns=_OF_COLUMNS, state=OF_HEADS, trail=Trail(OF_ROWS, _OF_COLUMNS, Writes(OF_HEADS, OF_HEADS, OF_HEADS))
)
