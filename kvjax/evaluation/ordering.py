"""Agreement of a policy's scores with the attention of tokens in the full model (LSH-E, appendices E, F)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.evaluation.fidelity import by_position
from kvjax.evaluation.masked import check_replay, replayed
from kvjax.evaluation.perplexity import begin
from kvjax.inference.state import State
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.training.less.record import Replayed
from kvjax.types import New, View


class Ordering(NamedTuple):
    """Agreement of scores and attention, for each head."""

    loss_ratio: Float[np.ndarray, "b layers h"]
    """Attention lost by dropping tokens by score, minus that by dropping them by attention (equation 7), over n."""
    correlation: Float[np.ndarray, "b layers h"]
    """Pearson correlation of scores and mean attention over positions; NaN if all scores are equal."""


def ordering(model: Model, policy: Policy | str, tokens: ArrayLike, *, seed: int = 0) -> Ordering:
    """Read whole texts with every token held, and compare scores with attention (LSH-E, equations 7 to 10, Table 10).

    If scores change with every query, a token's score is the mean over all queries from its own on. Its attention is
    the sum over queries and the mean over the query heads of a KV head, divided by n (equation 8). The arguments are
    those of `perplexity`.
    """
    ids = np.asarray(tokens, np.int32)
    state = begin(model, policy, ids.shape[0], ids.shape[1], 1.0, seed=seed)
    check_replay(state.policy)
    scores, attention = map(np.asarray, _sums(state, jnp.asarray(ids)))
    queries = ids.shape[1] - np.arange(ids.shape[1])
    return compare(scores / queries, attention / ids.shape[1])


def compare(scores: Float[np.ndarray, "*b n"], attention: Float[np.ndarray, "*b n"]) -> Ordering:
    """Return the attention loss ratio over n, and Pearson's correlation, of scores and attention of the same tokens."""
    order = np.argsort(scores, axis=-1, kind="stable")
    lost = np.cumsum(np.take_along_axis(attention, order, axis=-1), axis=-1)
    least = np.cumsum(np.sort(attention, axis=-1), axis=-1)
    s, a = (x - x.mean(-1, keepdims=True) for x in (scores, attention))
    spread = np.sqrt((s**2).sum(-1) * (a**2).sum(-1))
    correlation = np.divide((s * a).sum(-1), spread, out=np.full(spread.shape, np.nan), where=spread > 0)
    return Ordering((lost - least).mean(-1), correlation)


@jax.jit
def _sums(state: State, tokens: Int[Array, "b n"]) -> tuple[Float[Array, "b layers h n"], Float[Array, "b layers h n"]]:
    n = tokens.shape[1]

    def start(view: View) -> tuple[Array, Array, Array]:
        nothing = jnp.zeros(view.position.shape)
        return nothing, nothing, view.position

    def look(
        sums: tuple[Array, Array, Array], view: View, new: New, policy: Policy, found: Replayed
    ) -> tuple[Array, Array, Array]:
        scores, attention, _ = sums
        score = jnp.where(view.live, policy.standing(view, new)[0], 0.0)
        assert found.probs is not None
        return scores + score, attention + found.probs.mean((2, 3)), view.position

    looked = replayed(state, tokens, "decode", look, start)[1]
    scores, attention = (jnp.stack([by_position(found[i], found[2], n) for found in looked], axis=1) for i in (0, 1))
    return scores, attention
