"""Perplexity of held-out text, read by decode steps through real eviction, and the time and memory of these steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.cache.slots import HOST
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.extend import lower_prefill, prefill
from kvjax.inference.prepare import bind_policy, check_prompt
from kvjax.inference.shapes import empty_state
from kvjax.inference.state import State, cache_bytes, full_cache_bytes
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import wide
from kvjax.utils.compilation import Compiling, temporary_bytes


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Likelihoods of texts under a policy and a budget.

    Args:
        nats: negative log-likelihood of each predicted token.
        likeliest: the model's first choice in the place of each predicted token.
        prefix: tokens read before the first prediction; column i is predicted after `prefix + i` tokens.
        cache_bytes: bytes allocated for all rows.
        full_cache_bytes: bytes that `full` allocates for them.
        state: after the prefix; before it, if it is one token.
        prefill_seconds: seconds of reading the prefix, without compilation; 0 if it is one token.
    """

    nats: Float[np.ndarray, "b m"]
    likeliest: Int[np.ndarray, "b m"]
    prefix: int
    cache_bytes: int
    full_cache_bytes: int
    state: State | None = None
    prefill_seconds: float = 0.0

    def rows(self, beyond: int = 0) -> Float[np.ndarray, " b"]:
        """Return mean nats per token of each row, over predictions made after more than `beyond` tokens.

        Args:
            beyond: the budget, to leave out predictions made before the first eviction.
        """
        first = max(0, beyond + 1 - self.prefix)
        if first >= self.nats.shape[1]:
            raise ValueError(
                f"texts of {self.prefix + self.nats.shape[1]} tokens have no prediction beyond {beyond} slots; "
                "use longer texts or a smaller budget."
            )
        return self.nats[:, first:].mean(1)

    def nats_per_token(self, beyond: int = 0) -> float:
        """Return the mean nats per token of all rows; see `rows`."""
        return float(self.rows(beyond).mean())


class Costs(NamedTuple):
    """Time and memory of decode steps under a policy and a budget."""

    tokens_per_second: float
    """Tokens of all rows together that decode steps read."""
    peak_temporary_bytes: int | None
    """Peak bytes that a program allocates besides its arguments and results; None if the backend does not report
    them."""


LOGITS = 256
"""Most tokens of all rows whose logits are in memory together."""

TIMED_STEPS = 64
"""Most decode steps that `costs` measures."""


def judge(logits: Float[Array, "*b vocab"], token: Int[Array, "*b"]) -> tuple[Float[Array, "*b"], Int[Array, "*b"]]:
    """Return the negative log-likelihood of each token, and the likeliest one in its place."""
    likelihood = jax.nn.log_softmax(logits.astype(wide(logits.dtype)))
    nats = -jnp.take_along_axis(likelihood, token[..., None], axis=-1)[..., 0]
    return nats, jnp.argmax(logits, axis=-1)


@jax.jit
def _read(decoder: Decoder, cache: Cache, tokens: Int[Array, "b n"]) -> tuple[Float[Array, "b m"], Int[Array, "b m"]]:
    """Read tokens but the last, and return the nats of each but the first, and the first choices in their places."""
    rows, count = tokens.shape[0], tokens.shape[1] - 1
    size = max(1, min(LOGITS // rows, count))

    def blocks(tokens: Int[Array, "b m"]) -> Int[Array, "blocks b size"]:
        padded = jnp.pad(tokens, ((0, 0), (0, -count % size)))
        return padded.reshape(rows, -1, size).swapaxes(0, 1)

    def one(cache: Cache, tokens: tuple[Array, Array]) -> tuple[Cache, tuple[Array, Array]]:
        cache, logits = decoder.steps(cache, tokens[0])
        return cache, judge(logits, tokens[1])

    outputs = jax.lax.scan(one, cache, (blocks(tokens[:, :-1]), blocks(tokens[:, 1:])))[1]
    nats, likeliest = (output.swapaxes(0, 1).reshape(rows, -1)[:, :count] for output in outputs)
    return nats, likeliest


@jax.jit
def _step_by_step(decoder: Decoder, cache: Cache, tokens: Int[Array, "b m"]) -> Float[Array, "b vocab"]:
    def one(carry: tuple[Cache, Array], token: Int[Array, " b"]) -> tuple[tuple[Cache, Array], None]:
        return decoder.step(carry[0], token), None

    start = decoder.step(cache, tokens[:, 0])
    return jax.lax.scan(one, start, tokens[:, 1:].T)[0][1]


def begin(
    model: Model,
    policy: Policy | str,
    rows: int,
    length: int,
    budget: int | float | Sequence[int],
    *,
    plan: Plan | str | None = None,
    seed: int = 0,
) -> State:
    """Return an empty state for `rows` texts that are read only by decode steps, as with `prefill_chunk=1`."""
    chosen = bind_policy(model, policy, budget, plan)
    check_prompt(chosen, 1)
    requires = chosen.score.requires
    if chosen.plan.sizing.per_head or requires.replay is not None or requires.whole_prompt:
        raise ValueError(f"policy {name_of(chosen)!r} decides on a whole prompt; give a prefix of more than one token.")
    state = empty_state(model, chosen, rows, length, budget, seed=seed)
    if not requires.host_memory:
        return state
    return state.replace(layers=tuple(layer.moved(HOST) for layer in state.cache.layers))


def stream(
    state: State, logits: Float[Array, "b vocab"], tokens: Int[np.ndarray | Array, "b m"]
) -> tuple[Float[np.ndarray, "b m"], Int[np.ndarray, "b m"]]:
    """Read given tokens into a prefilled state by decode steps, in one program.

    Returns:
        Nats of each token, and the model's first choice in its place.
    """
    ids = jnp.asarray(tokens, jnp.int32)
    after = _read(state.decoder, state.cache, ids)
    nats, likeliest = (
        jnp.concatenate([first[:, None], later], axis=1)
        for first, later in zip(judge(logits, ids[:, 0]), after, strict=True)
    )
    return np.asarray(nats), np.asarray(likeliest)


def perplexity(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike,
    budget: int | float | Sequence[int] = 1.0,
    *,
    prefix: int = 1,
    plan: Plan | str | None = None,
    seed: int = 0,
) -> Streamed:
    """Read texts by decode steps as generation does, and compute the negative log-likelihood of each token.

    Args:
        tokens: texts [b, n] without padding.
        budget: slots per KV head, a fraction of n, or slots for each layer.
        prefix: tokens prefilled before the rest, for policies that need a prompt; 1 reads all by decode steps.
        plan: allocation of the budget to the layers.
        seed: for policies that draw random numbers; row i has its own key.
    """
    ids, seconds = np.asarray(tokens), 0.0
    if ids.ndim != 2 or not 1 <= prefix < ids.shape[1]:
        raise ValueError(f"texts of shape {ids.shape} have nothing to predict after a prefix of {prefix} tokens.")
    model.config.check_bound(ids.shape[1])
    if prefix == 1:
        state = begin(model, policy, len(ids), ids.shape[1], budget, plan=plan, seed=seed)
        nats, likeliest = map(np.asarray, _read(state.decoder, state.cache, jnp.asarray(ids, jnp.int32)))
    else:
        keys, later = jax.random.split(jax.random.key(seed), len(ids)), ids.shape[1] - prefix
        planned: dict[str, Any] = dict(max_new_tokens=later, plan=plan, key=keys)
        with Compiling() as compiling:
            state, logits = prefill(model, policy, ids[:, :prefix], budget, **planned)
            jax.block_until_ready(logits)
            seconds = compiling.lap()
        nats, likeliest = stream(state, logits, ids[:, prefix:])
    return Streamed(nats, likeliest, prefix, cache_bytes(state), full_cache_bytes(state), state, seconds)


def costs(
    model: Model, policy: Policy | str, tokens: ArrayLike, budget: int | float | Sequence[int], likelihoods: Streamed
) -> Costs:
    """Measure up to `TIMED_STEPS` decode steps after the prefix of texts, which `perplexity` has read."""
    ids, prefix, state = np.asarray(tokens), likelihoods.prefix, likelihoods.state
    assert state is not None
    read = jnp.asarray(ids[:, prefix : prefix + TIMED_STEPS], jnp.int32)
    jax.block_until_ready(_step_by_step(state.decoder, state.cache, read))  # compiles
    start = time.perf_counter()
    jax.block_until_ready(_step_by_step(state.decoder, state.cache, read))
    seconds = time.perf_counter() - start
    programs = [_step_by_step.lower(state.decoder, state.cache, read)]
    if prefix > 1:
        programs += lower_prefill(model, policy, ids[:, :prefix], budget, max_new_tokens=ids.shape[1] - prefix)
    return Costs(read.size / seconds, temporary_bytes(programs))
