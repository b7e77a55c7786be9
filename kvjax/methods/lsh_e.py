"""LSH-E (arXiv 2412.16187, Algorithm 1): evict the key whose hash differs most from the query's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from kvjax.methods.register import register_score
from kvjax.models.model import LanguageModel
from kvjax.policies import HammingDistance, Requirements, Score
from kvjax.types import SEED, LayerTokens, Limit, PyTree, View, one_of, setting
from pallas_kernels.hamming import Hashing


@register_score(
    "lsh_e", paper="LSH-E, eq. 2, 5, 6", group="ranked by keys, values or chance, without attention", sinks=4, recent=10
)
class Hamming(Score):
    r"""Hamming distance between hashes of the newest query and of the keys, computed at every step (eq. 2, 5, 6).

    .. math::
        h(x) = \mathbb 1[R x \ge 0], \quad R \sim \mathcal N(0, 1)^{bits \times d}, \qquad
        F_t(i) = -\sum_g d_H(h(q_{t,g}), h(k_i))

    R is one matrix per layer and KV head, shared by its keys and all g query heads. Queries and keys include rotary
    embeddings. Equation 6 uses q_{t-1} and Algorithm 1 uses q_t; this class follows Algorithm 1. The paper does not
    specify ties: here the oldest token is evicted. With 16 bits more than half of all evictions are ties, so results
    depend on this rule.

    When: if attention probabilities are not available and the content of tokens matters. At a quarter of the slots it
    equals `streaming` (perplexity 17.5 against 17.4, SmolLM2 on WikiText-2), with fewer slots it is worse.

    Args:
        bits: length of a hash, from 1 to 256; the paper tries 4 to 64 (Table 9) and reports 16. A slot stores
            ceil(bits / 32) words of 4 bytes.
        prompt: `sequential` fills the cache with the first tokens of the prompt and then reads it by Algorithm 1,
            token by token; `one_shot` reads the whole prompt and then keeps the tokens nearest to its last query.
        seed: seed of the matrices R.
        planes: R of each layer, set by `bind`; after `layer`, that of one layer.
    """

    of_heads = ("planes",)

    bits: int = setting(16, Limit(lambda bits: 1 <= bits <= 256, "a whole number from 1 to 256"))
    prompt: str = setting("sequential", one_of("sequential", "one_shot"))
    seed: int = setting(0, SEED)
    planes: tuple[Float[Array, "h bits d"], ...] | Float[Array, "h bits d"] | None = None

    @property
    def requires(self) -> Requirements:
        """Algorithm 1 evicts before every token."""
        return Requirements(prompt_chunk=1 if self.prompt == "sequential" else None)

    def bind(self, model: LanguageModel) -> Hamming:
        layers = enumerate(model.config.layer_configs)
        planes = (projections(self.seed, i, layer.kv_heads, self.bits, layer.key_width) for i, layer in layers)
        return self.replace(planes=tuple(planes))

    def _hashing(self, new: LayerTokens) -> Hashing:
        # R, q_t and k_t.
        planes: Any = self.planes
        if planes is None:
            raise ValueError("lsh_e has no hyperplanes yet: call bind(model), as prefill does.")
        if new.head is not None and new.k.shape[1] < len(planes):  # heads on pages, each on its own
            planes = planes[new.head - new.spread.first(len(planes))]
        return Hashing(planes, new.last_query, new.k)

    def init_slot(self, new: LayerTokens, state: PyTree) -> tuple[UInt32[Array, "b h t"], ...]:
        """Return h(k), with a buffer for each word; one buffer for all words would be padded to 128 lanes on a TPU."""
        return self._hashing(new).of_keys()

    def score(self, view: View, new: LayerTokens) -> HammingDistance:
        return HammingDistance(self._hashing(new), view.slots.score)


def projections(seed: int, layer: int, heads: int, bits: int, width: int) -> Float[Array, "h bits d"]:
    """Draw the hyperplanes R of a layer, in float32, so that hashes do not depend on the model's dtype."""
    key = jax.random.fold_in(jax.random.key(seed), layer)
    return jax.random.normal(key, (heads, bits, width), jnp.float32)
