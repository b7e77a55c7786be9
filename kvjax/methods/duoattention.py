"""DuoAttention: heads that retrieve keep the whole text, the others its first and newest tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.methods.ends import EndsOrAll, ends_policy
from kvjax.methods.register import register_score
from kvjax.models.decoder import Layer, begin, block, layers_of
from kvjax.models.model import LanguageModel
from kvjax.models.weights import require_weights
from kvjax.rope import rotate
from kvjax.types import LayerTokens, PyTree, TokenBatch, View, at_least, setting, share
from pallas_kernels.attention import attend, with_sink


@register_score(
    "duoattention", paper="DuoAttention, 2024", group="ranked by position", make=ends_policy, sinks=128, recent=256
)
class RetrievalHeads(EndsOrAll):
    r"""Keep everything in retrieval heads, and the first `sinks` and the newest `recent` tokens in the others.

    Retrieval heads attend to what followed the same token before.

    .. math:: F_h = \frac 1 {G (L - 1)} \sum_{t = L}^{2 L - 2} \sum_g a_{tg}(t - L + 1)

    in a text of L random tokens that is repeated once. The given fraction of the model's KV heads, those with the
    largest F, are retrieval heads; the others keep s first and w newest tokens. Slots are for N = prompt +
    `max_new_tokens`, beyond which logits are NaN. Special tokens of the prompt get additional slots, generated ones
    do not. The paper trains a number for each head instead; its published lists of heads are not read.

    When: with prompts much longer than `sinks` + `recent`. It has not been measured on many models yet. The heads are
    found anew whenever a prompt is read, unless the policy is bound to its model: `kvjax.policy(...).bind(model)`.

    Args:
        retrieval: fraction of retrieval heads, in [0, 1]; in the paper 0.25 with and 0.5 without one KV head for each
            query head.
        length: L, in tokens; half of the model's positions if they are fewer.
        seed: of the random tokens.
        full: masks of the retrieval heads of each layer, made by `bind`; in a layer its own.
    """

    of_heads = ("full",)

    retrieval: float = setting(0.5, share("a fraction of the heads"))
    length: int = setting(512, at_least(2, "a number of tokens"))
    seed: int = setting(0, at_least(0, "a whole number"))
    full: tuple[Bool[Array, " h"], ...] | Bool[Array, " h"] | None = None

    def bind(self, model: LanguageModel) -> RetrievalHeads:
        sizes = [layer.kv_heads for layer in model.config.layer_configs]
        if self.full is not None:
            if [len(mask) for mask in self.full] != sizes:
                raise ValueError(
                    f"this policy was bound to a model with KV heads {[len(mask) for mask in self.full]} by layer, "
                    f"and {model.name!r} has {sizes}; bind the policy that you made, not the one of a state."
                )
            return self
        model.config.check_all_store("finding the retrieval heads of duoattention")
        require_weights(model.weights, "finding the retrieval heads of duoattention")
        attention = np.concatenate(self._attention(model))
        chosen = np.zeros(len(attention), bool)
        chosen[np.argsort(-attention, kind="stable")[: round(self.retrieval * len(attention))]] = True
        masks = np.split(chosen, np.cumsum(sizes)[:-1])
        return self.replace(full=tuple(map(jnp.asarray, masks)))

    def _attention(self, model: LanguageModel) -> list[Float[np.ndarray, " h"]]:
        # F of the heads of each layer.
        config, lag = model.config, min(self.length, model.config.max_positions // 2)
        half = np.random.default_rng(self.seed).integers(0, config.vocab_size, lag)
        tokens = jnp.asarray([[*half, *half]], jnp.int32)
        reading, scores = TokenBatch.of_text(tokens, jnp.full(1, 2 * lag)), []
        reading, x = begin(model.weights, config, reading)
        for layer in layers_of(model.weights, config):
            x, score = _read(layer.replace(number=0), reading, x, lag=lag)
            scores.append(np.asarray(score))
        return scores

    def head_budgets(
        self, stats: PyTree, view: View, ranks: Float[Array, "b h c"] | None, new: LayerTokens
    ) -> tuple[Int[Array, "b h"], PyTree]:
        assert isinstance(self.full, jax.Array)
        return self.slots_of(~self.full[None], view, new), view.state.plan


class _Repetition(LayerCache):
    """Attention of a repeated text, which scores heads and stores nothing."""

    lag: int = setting(0)
    score: Float[Array, " h"] | None = None

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "1 h g t d"],
        k: Float[Array, "1 h t d"],
        v: Float[Array, "1 h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "1 h g t e"], _Repetition]:
        shape, positions, length = tokens.shape, tokens.reading.position, tokens.reading.rope_length
        q = rotate(shape.rope, q, positions[:, None, None], length)
        k = rotate(shape.rope, k, positions[:, None], length)
        spec, at = shape.spec, positions[:, None]
        partial, probs = attend(q, k, v, spec.mask(positions, at), spec, spec.bias(at, at))
        after = jnp.diagonal(probs[:, :, :, self.lag : -1, 1:], axis1=3, axis2=4)
        return with_sink(partial, sink_logits).out, self.replace(score=after.mean((0, 2, 3)))


@functools.partial(jax.jit, static_argnames="lag")
def _read(
    layer: Layer, reading: TokenBatch, x: Float[Array, "1 t width"], *, lag: int
) -> tuple[Float[Array, "1 t width"], Float[Array, " h"]]:
    """Run a layer over a repeated text, and return its output and F of its heads."""
    if not layer.shape.attends:
        none = jnp.zeros((len(x), 0), jnp.int32)
        return block(layer, layer.init_cache(none, 0, x.dtype), reading, x)[0], jnp.zeros(0, x.dtype)
    x, cache = block(layer, _Repetition(lag=lag), reading, x)
    return x, cache.score
