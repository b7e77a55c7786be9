"""DuoAttention: heads that retrieve keep the whole text, the others its first and newest tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.methods.ends import EndsOrAll, ends_policy
from kvjax.methods.register import register_score
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, block, embed
from kvjax.models.model import LanguageModel
from kvjax.models.weights import require_weights
from kvjax.rope import rotate
from kvjax.types import LayerConfig, New, PyTree, View, at_least, setting, share
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
        require_weights(model.weights, "finding the retrieval heads of duoattention")
        found = np.concatenate(self._attention(model))
        chosen = np.zeros(len(found), bool)
        chosen[np.argsort(-found, kind="stable")[: round(self.retrieval * len(found))]] = True
        masks = np.split(chosen, np.cumsum(sizes)[:-1])
        return self.replace(full=tuple(map(jnp.asarray, masks)))

    def _attention(self, model: LanguageModel) -> list[Float[np.ndarray, " h"]]:
        # F of the heads of each layer.
        config, lag = model.config, min(self.length, model.config.max_positions // 2)
        half = np.random.default_rng(self.seed).integers(0, config.vocab_size, lag)
        tokens = jnp.asarray([[*half, *half]], jnp.int32)
        positions = jnp.arange(2 * lag)[None]
        x, found = embed(model.weights, config, tokens, positions), []
        for layer, shape in zip(model.weights.layers, config.layer_configs, strict=True):
            x, score = _read(layer, x, positions, config=config, shape=shape, lag=lag)
            found.append(np.asarray(score))
        return found

    def head_budgets(
        self, answers: PyTree, view: View, ranks: Float[Array, "b h c"] | None, new: New
    ) -> tuple[Int[Array, "b h"], PyTree]:
        assert isinstance(self.full, jax.Array)
        return self.slots_of(~self.full[None], view, new), view.state.plan


@functools.partial(jax.jit, static_argnames=("config", "shape", "lag"))
def _read(
    layer: LayerWeights,
    x: Float[Array, "1 t width"],
    positions: Int[Array, "1 t"],
    *,
    config: ModelConfig,
    shape: LayerConfig,
    lag: int,
) -> tuple[Float[Array, "1 t width"], Float[Array, " h"]]:
    """Run a layer over a repeated text, and return its output and F of its heads."""

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        q = rotate(shape.rope, q, positions[:, None, None], positions.shape[1])
        k = rotate(shape.rope, k, positions[:, None], positions.shape[1])
        spec, at = shape.spec, positions[:, None]
        partial, probs = attend(q, k, v, spec.mask(positions, at), spec, spec.bias(at, at))
        after = jnp.diagonal(probs[:, :, :, lag:-1, 1:], axis1=3, axis2=4)
        return with_sink(partial, layer.mixer.sinks(shape)).out, after.mean((0, 2, 3))

    return block(layer, config, shape, x, positions, mix)
