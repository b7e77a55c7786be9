"""Causal attention of a prompt that also returns the attention each key received."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec, static
from pallas_kernels.common import numbers_of
from pallas_kernels.op import Limit, Op, Options, operation
from pallas_kernels.operands import LazyRope, Operand, SplitKV

ROWS = 16
"""Maximum rows of weights that the Pallas kernels sum in one pass."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryTokens:
    """Tokens of the queries, if they are only some of the tokens that are being read."""

    token: Int[Array, " n"]
    """Rising token numbers from 0."""
    of: int = static()
    """Number of tokens that are being read: their keys are the last, in the order of the text."""


class PromptAttention(NamedTuple):
    """Attention of a prompt's queries, and the attention each key received; float32, or float64 for float64."""

    out: Float[Array, "b h g n e"]
    lse: Float[Array, "b h g n"]
    """Logarithm of each query's sum of exponentials; -inf, with output 0, if a query attends to nothing."""
    scores: Float[Array, "b h m c"] | None
    """Column sums of the probabilities over queries and the heads of a group, one for each row of weights; None if
    not requested."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefillAttention(Op[PromptAttention]):
    r"""Attend in blocks, in memory linear in the prompt, and sum each key's probabilities over the queries.

    .. math::
        s_{mj} = \sum_{gi} w_{mi} \frac{e^{(x_{gij} + \zeta_j) / \tau}}{\sum_l e^{(x_{gil} + \zeta_l) / \tau}}, \qquad
        x_{gij} = cap(scale \, q_{gi} k_j) + bias_{gij}

    Without noise at tau = 1 this is the accumulated attention of H2O (Algorithm 1); with noise it is Keyformer's Gumbel
    softmax (equation 9). The output is always plain attention.

    Implementations: `xla` runs everywhere, in any dtype (float64 as itself). It decodes one block of keys and values at
    a time, and holds the weights of a few thousand query rows, so each logit is computed once. `pallas` takes arrays of
    float32 or bfloat16, d and e a multiple of 8 up to 256 on TPU and a power of two from 16 to 256 on GPU. On TPU it
    holds the exponentials of one block of queries in VMEM, in the dtype of the keys, until their softmax is known.
    Under bfloat16 each term of a sum is off by up to 2^-8 of itself. On GPU, and if there are too many keys for VMEM
    (16 MiB on v4: from about 17,000 in bfloat16), a second pass computes the logits again and holds nothing.

    Args:
        q: queries of tokens in the order of the text.
        k: keys [b h c d]; the last n belong to the queries' tokens in the same order, after c - n cached keys in any
            order. Cached keys in a separate array are the old part of a `SplitKV`.
        v: values [b h c e], in any form but `LazyRope`; joined at the same slot as the keys, if keys are joined.
        query_position: increasing positions; -1 marks padding, which attends to nothing.
        key_position: position of each key, for all heads or each; -1 marks an empty slot or padding, which is masked.
        spec: scale, soft cap, window and slopes.
        scores: True to return the sums; attention alone is cheaper.
        weights: w, the weight of each query, in one row, or in m rows with separate sums. A block of queries with
            weight 0 in every row costs no more than without scores. None gives every query weight 1.
        noise: zeta, one number per key (`pallas_kernels.noise.gumbel`), at most 60 apart within a head; None for no
            noise.
        tau: temperature of the scores, above 0.
        places: model positions of queries and keys for ALiBi, if they differ; the mask uses the positions. Kernels read
            none: their limits exclude places that matter.
        query_tokens: tokens of the queries, if other devices have the rest of the text; None for the tokens of the last
            n keys.
        how: `implementation` (`auto`, `xla` or `pallas`), `interpret` and `platform`; see `pallas_kernels.op.How`.

    Raises:
        ValueError: shapes do not match, or a setting is out of range.
    """

    q: Float[Array, "b h g n d"]
    k: Operand | SplitKV
    v: Operand | SplitKV
    query_position: Int[Array, "b n"]
    key_position: Int[Array, "b #h c"]
    spec: AttentionSpec
    _: dataclasses.KW_ONLY
    scores: bool = static(True)
    weights: Float[Array, "b #h n"] | Float[Array, "b #h m n"] | None = None
    noise: Float[Array, "b h c"] | None = None
    tau: float = static(1.0)
    places: tuple[Int[Array, "b #h n"], Int[Array, "b #h c"]] | None = None
    query_tokens: QueryTokens | None = None

    name = "prefill_attention"
    backends = ("pallas_tpu", "pallas_gpu")

    @property
    def tokens(self) -> int:
        """Number of tokens that are being read."""
        return self.q.shape[3] if self.query_tokens is None else self.query_tokens.of

    def validate(self) -> Self:
        n, c, k, v, window = self.tokens, self.k.shape[2], self.k, self.v, self.spec.window
        if c < n:
            raise ValueError(
                f"{c} keys are fewer than the {n} queries' own; append the queries' keys to the cached ones."
            )
        if _joints(k) != _joints(v):
            raise ValueError(
                f"Keys are joined at slots {_joints(k)}, values at {_joints(v)}; join both at the same slot."
            )
        if isinstance(v, LazyRope):
            raise ValueError("Values are LazyRope, but only keys are rotated; pass an array or Quantised.")
        if self.tau <= 0:
            raise ValueError(f"tau={self.tau} is not a temperature above 0.")
        if window is not None and window < 1:
            raise ValueError(f"window={window} is not a number of tokens from 1.")
        if self.weights is not None and self.weights.ndim == 3:
            return dataclasses.replace(self, weights=self.weights[:, :, None])
        return self

    def run(self, implementation: str, options: Options) -> PromptAttention:
        @jax.custom_jvp
        def run(x: PrefillAttention) -> PromptAttention:
            return Op.run(x, implementation, options)

        @run.defjvp
        def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[PromptAttention, PromptAttention]:
            differentiable = self.module("reference").differentiable
            return run(*primals), jax.jvp(differentiable, primals, tangents)[1]

        return run(self)

    def limits(self, backend: str) -> Iterator[Limit]:
        q, k, v = self.q, self.k, self.v
        for name, x in (("keys", k), ("values", v)):
            yield hasattr(x, "dtype"), f"{name} are {type(x).__name__}, and it reads arrays only"
        dtypes = [x.dtype for x in (q, k, v)]  # type: ignore[union-attr]
        same = len({*dtypes}) == 1 and q.dtype in (jnp.float32, jnp.bfloat16)
        yield same, f"q, k, v of {', '.join(map(str, dtypes))} are not all float32 or all bfloat16"
        d, e = q.shape[-1], v.shape[-1]
        for width, text in ((d, f"d={d} is"), (e, f"values of e={e} are")):
            if backend == "pallas_gpu":
                within = 16 <= width <= 256 and width & (width - 1) == 0
                yield within, f"{text} not a power of two from 16 to 256"
            else:
                yield 8 <= width <= 256 and width % 8 == 0, f"{text} not a multiple of 8 up to 256"
        rows = self._rows()
        yield rows <= ROWS, f"{rows} rows of weights are more than {ROWS}"
        elsewhere = self.places is not None and self.spec.slopes is not None
        yield not elsewhere, "ALiBi at places other than the positions is not in it"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]] | None:
        b, h, g, n, d = self.q.shape
        c, e = self.k.shape[2], self.v.shape[-1]
        if self.query_tokens is not None and self.query_tokens.of < c:
            return None  # there are no random inputs for a chunk that several readers share
        settings = dict(h=h, g=g, d=d, e=e, dtype=self.q.dtype.name)
        settings |= dict(keys=numbers_of(self.k), values=numbers_of(self.v), scores=self.scores)
        settings |= dict(rows=None if self.weights is None else self._rows(), noise=self.noise is not None)
        settings |= dict(tau=None if self.tau == 1 else self.tau, readers=self.query_tokens is not None)
        return dict(b=b, n=n, c=c), settings | self.spec.described()

    def _rows(self) -> int:
        return 1 if self.weights is None else self.weights.shape[2]


prefill_attention = operation(PrefillAttention)


def _joints(x: Operand | SplitKV) -> tuple[int, ...]:
    return (x.old.shape[2],) if isinstance(x, SplitKV) else ()
