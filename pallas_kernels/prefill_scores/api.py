"""Causal attention of a prompt that also says how much attention each key received."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import choose, first_limit, pallas_form, platform_of
from pallas_kernels.prefill_scores import reference
from pallas_kernels.prefill_scores.reference import PromptAttention


def prefill_scores(
    q: Float[Array, "b h g n d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c d"],
    query_position: Int[Array, "b n"],
    key_position: Int[Array, "b #h c"],
    *,
    scores: bool = True,
    weights: Float[Array, "b #h n"] | None = None,
    noise: Float[Array, "b h c"] | None = None,
    tau: float = 1.0,
    window: int | None = None,
    slopes: Float[Array, "h g"] | None = None,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> PromptAttention:
    r"""Attend in blocks, in memory linear in the prompt, and sum each key's probabilities over the queries.

    .. math::
        s_j = \sum_i w_i \frac{e^{(x_{ij} + \zeta_j) / \tau}}{\sum_l e^{(x_{il} + \zeta_l) / \tau}}, \qquad
        x_{ij} = q_i k_j / \sqrt{d}

    which is the accumulated attention of H2O (Algorithm 1) without noise at tau = 1, and Keyformer's Gumbel softmax
    (equation 9) with it; the output always is plain attention.

    Implementations: `xla` everywhere, any dtype (float64 as itself), holding the weights of a few thousand query rows,
    so that a logit is computed once; `pallas` in two passes, the second of which computes the logits again and holds
    nothing: float32 or bfloat16, d a multiple of 8 up to 256 on TPU and a power of two from 16 to 256 on GPU. Its TPU
    form compiles, its GPU form lowers to Triton; both have run in interpreters, never on a chip.

    Args:
        q: queries of tokens in the order of the text.
        k: keys; the last n are the queries' own tokens in the same order, c - n cached ones before them in any order.
        v: values.
        query_position: positions that rise by one from token to token; -1 marks padding, which sees nothing.
        key_position: of each key, for all heads or each; -1 marks an empty slot or padding, which nobody sees.
        scores: whether the sums are wanted; without them the attention alone is cheaper.
        weights: w, how much each query counts (0: its block is not summed at all); None counts them all once.
        noise: zeta, one number per key (`pallas_kernels.noise.gumbel`), in a head no more than 60 apart; None is none.
        tau: temperature of the scores, above 0.
        window: how many of the newest tokens a query sees; None is all.
        slopes: ALiBi, added to the logits as slope * (key position - query position).
        implementation: `auto`, `xla` or `pallas`.
        interpret: as for `pallas_call`.
        platform: for which the program is compiled; None for that of `jax.default_backend()`.

    Raises:
        Unsupported: the implementation asked for cannot run.
        ValueError: shapes do not fit each other, or a setting is out of range.
    """
    n, c = q.shape[3], k.shape[2]
    if c < n:
        raise ValueError(f"{c} keys are fewer than the {n} queries' own; append the queries' keys to the cached ones.")
    if tau <= 0:
        raise ValueError(f"tau={tau} is not a temperature above 0.")
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not a number of tokens from 1.")
    form = pallas_form(platform)
    limits = {"pallas": limit(q, k, v, form)}
    chosen = choose("prefill_scores", implementation, limits, platform=platform, interpret=interpret)
    settings: dict[str, Any] = dict(tau=tau, scores=scores, window=window)
    if chosen == "pallas":
        # Pallas is imported where it is used: it takes longer to import than kvjax.
        name = "pallas_gpu" if form == "gpu" else "pallas"
        return importlib.import_module(f"pallas_kernels.prefill_scores.{name}").prefill_scores(
            q, k, v, query_position, key_position, weights, noise, slopes, interpret=interpret, **settings
        )
    return reference.prefill_scores(
        q, k, v, query_position, key_position, weights, noise, slopes, platform=platform_of(platform), **settings
    )


def limit(q: Array, k: Array, v: Array, form: str) -> str | None:
    """What these arguments ask that the Pallas kernels for `tpu` or `gpu` cannot do, or None."""
    d = q.shape[-1]
    width = (8 <= d <= 256 and d % 8 == 0, f"d={d} is not a multiple of 8 up to 256")
    if form == "gpu":
        width = (16 <= d <= 256 and d & (d - 1) == 0, f"d={d} is not a power of two from 16 to 256")
    same = q.dtype == k.dtype == v.dtype and q.dtype in (jnp.float32, jnp.bfloat16)
    return first_limit(
        (same, f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all float32 or all bfloat16"),
        width,
    )
