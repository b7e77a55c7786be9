"""Known tokens that may be taken back: verification of guesses, and roll-back of a cache."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.inference.cache import Bound, Cache
from kvjax.inference.layers import read
from kvjax.inference.sharding import gather_slots, logits_spec, run_on_mesh, scatter_slots
from kvjax.methods.registry import name_of
from kvjax.models.decoder import begin, unembed
from kvjax.policies.policy import Policy
from kvjax.types import OF_HEADS

C = TypeVar("C", bound=Cache)


def verify(
    decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Cache, Float[Array, "b n vocab"]]:
    """Read known tokens in one pass, of which `truncate` then keeps the first ones of each row; call it under `jit`.

    Args:
        decoder: a decoder under a policy that evicts nothing, such as `full`.
        cache: has empty slots for the tokens, as planned by `max_new_tokens`; tokens beyond them are dropped.
        tokens: padded on the right.
        lengths: tokens of each row, from 0.

    Returns:
        The open cache, which only `truncate` takes, and logits after each token; those of padding are meaningless, and
        those beyond the planned length NaN.

    Raises:
        ValueError: the policy evicts tokens, or a layer keeps too little of the text before its window.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import kvjax
        >>> from kvjax.inference.verify import truncate, verify
        >>> decoder = kvjax.decoder(kvjax.load("tiny"), "full")
        >>> cache, _ = decoder.prefill([[5, 17, 42]], max_new_tokens=8)
        >>> opened, logits = jax.jit(verify)(decoder, cache.replace(key=None), jnp.array([[8, 15, 99]]), jnp.array([3]))
        >>> truncate(opened, jnp.array([5])).position.tolist(), logits.shape
        ([5], (1, 3, 2048))
    """
    return verify_with_queries(decoder, cache, tokens, lengths)[:2]


Queries = tuple[Float[Array, "b h g n d"] | None, ...]
"""Queries of some tokens, as they attend, by layer; None for layers without attention."""


def verify_with_queries(
    decoder: Bound, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Cache, Float[Array, "b n vocab"], Queries]:
    """Return the results of `verify`, and the queries of the tokens."""
    check_verifier(decoder, tokens.shape[1])

    def read_on_device(decoder: Bound, cache: Cache, tokens: Array, lengths: Array) -> tuple[Cache, Array, Queries]:
        decoder, place = decoder.here(), cache.position[:, None] + jnp.arange(tokens.shape[1])
        batch = cache.following(tokens, jnp.where(cache.active, lengths, 0)).replace(given=False)
        batch, x = begin(decoder.weights, decoder.config, batch)
        opened = [layer.open() for layer in gather_slots(cache, decoder.mesh).layers]
        layers, _, x = read(decoder.layers, opened, batch, x, close=False)
        logits = unembed(decoder.weights, decoder.config, x)
        logits = jnp.where((place < cache.end[:, None])[..., None], logits, jnp.nan)
        queries = tuple(None if layer.pending is None else layer.pending.new.q for layer in layers)
        layers = tuple(layer.replace(pending=None) for layer in layers)
        return cache.replace(layers=scatter_slots(layers, decoder.mesh), position=batch.read), logits, queries

    def specs() -> tuple[Cache, Any, Any]:
        opened = tuple(type(layer.open()).specs for layer in cache.layers)
        logits = logits_spec(decoder.config, decoder.mesh)
        return cache.specs.replace(layers=opened), PartitionSpec(logits[0], None, *logits[1:]), OF_HEADS

    return run_on_mesh(read_on_device, decoder, cache, tokens, lengths, out_specs=specs)


def check_verifier(decoder: Bound, count: int) -> None:
    """Refuse a decoder whose caches cannot take back `count` tokens, with the errors of `verify`."""
    if decoder.policy.bounded:
        raise ValueError(f"{name_of(decoder.policy)} evicts tokens, which no roll-back brings back; verify under full.")
    for index, shape in enumerate(decoder.config.layer_configs):
        if shape.window is not None and decoder.beyond_window < count:
            raise ValueError(
                f"layer {index} keeps a window of {shape.window} tokens and {decoder.beyond_window} before it, so "
                f"{count} cannot be taken back; use kvjax.speculation, or read them by steps."
            )


def check_used(verifier: Policy | str, refresh: bool, lossless: bool) -> None:
    """Refuse settings of drafts other than the default ones where nothing is drafted."""
    if lossless:
        return
    if refresh:
        raise ValueError("refresh=True chooses the slots of a draft; give lossless=True, too.")
    if verifier != "full":
        label = verifier if isinstance(verifier, str) else verifier.label
        raise ValueError(f"verifier={label!r} has no effect without lossless=True; give that, too, or leave it out.")


def truncate(cache: C, length: Int[Array, " b"]) -> C:
    """Return an open cache from `verify` without the tokens at `length` and later ones, as if they were not read."""
    return cache.replace(layers=tuple(layer.truncate(length) for layer in cache.layers), position=length)
