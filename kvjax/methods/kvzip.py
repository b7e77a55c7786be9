"""KVzip (arXiv 2505.23416): tokens with the most attention in a second reading of the text."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.adakv import AdaKV
from kvjax.methods.outputs import output_weights
from kvjax.methods.register import register_score
from kvjax.models.model import LanguageModel
from kvjax.policies import UNRANKED, Peak, Replay, Requirements, StoredScore
from kvjax.types import Heads, LayerTokens, View, at_least, nothing, setting, wide

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@register_score(
    "kvzip", paper="KVzip, 2025", group="ranked once for each prompt or turn", recent=32, plan=AdaKV(0.0, "model")
)
class Reconstruction(StoredScore):
    r"""Largest attention to a token in a second reading of the text, with one ranking for all layers and heads.

    .. math:: F(i) = \max_{t, g} a_{tg}(i), \quad
        F^+(i) = \max_{t, g} a_{tg}(i) \frac{\lVert W^O_g v_i \rVert_2}{\lVert h_t \rVert_2}

    over the tokens t of a request to repeat the text and of the text itself, and the query heads g of a KV head; h is
    the input of the layer, and W^O_g are the columns of the output weights that belong to a query head. Nothing is
    evicted before the second reading, so the cache temporarily holds the whole text. A chunk attends to the whole
    cache; the authors' code normalizes only over its first tokens and the same chunk. Generated tokens and later turns
    are not read again and are evicted first, the oldest before the others.

    In the authors' code, the end of the user's turn and the beginning of the model's follow each request, by the chat
    template. Here the text follows directly, unless `prompt` ends with these tokens. For F+, kvpress divides by the
    norm of attention's input, which is h after the layer's first normalization.

    When: if a prompt is compressed once and used often, because the second reading takes more than twice the time of
    the first. It has not been measured on many models yet. The paper evicts nothing after the prompt. Here generated
    tokens are evicted first, except the newest `recent` ones.

    Args:
        prompt: the request, a text or its token ids.
        chunk: number of tokens per chunk of the second reading, each read after a request; fewer at the end of the
            model's positions.
        later: the request before all chunks but the first.
        overlap: number of tokens before such a chunk that end its request.
        normalized: True for KVzip+, whose F+ scales attention by the norm of the value's contribution to the output.
        gram: products of the columns of W^O of each layer, set by `bind`; after `layer`, those of one layer.
    """

    of_heads = ("gram",)

    prompt: str | tuple[int, ...] = setting(REPEAT)
    chunk: int = setting(2048, at_least(1, "a number of tokens"))
    later: str | tuple[int, ...] = setting(REPEAT_LATER)
    overlap: int = setting(8, at_least(0, "a number of tokens"))
    normalized: bool = setting(False)
    gram: tuple[Float[Array, "h g e e"], ...] | Float[Array, "h g e e"] | None = None

    @property
    def requires(self) -> Requirements:
        """A second reading of each prompt."""
        prompt, later = (() if isinstance(request, str) else request for request in (self.prompt, self.later))
        return Requirements(replay=Replay(prompt, self.chunk, later, self.overlap))

    def bind(self, model: LanguageModel) -> Reconstruction:
        """Return a copy with the requests' token ids and the output weights of a model."""
        prompt, later, gram = _ids("prompt", self.prompt, model), _ids("later", self.later, model), self.gram
        if self.normalized:
            gram = output_weights(model, lambda columns: jnp.einsum("hgew,hgfw->hgef", columns, columns))
        return self.replace(prompt=prompt, later=later, gram=gram)

    def init_slot(self, new: LayerTokens, state: object) -> Float[Array, "b h t"]:
        """Return the lowest score, that of tokens that have not been read again."""
        return jnp.full_like(nothing(new), UNRANKED)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> Peak | None:
        """Request the largest attention from tokens that are read again, divided by the norm of h for F+."""
        if not new.replayed:
            return None
        if not self.normalized:
            return Peak()
        norm = jnp.linalg.norm(new.hidden.astype(wide(new.q.dtype)), axis=-1)
        return Peak(jnp.where(new.valid, 1 / jnp.maximum(norm, 1e-30), 0.0)[:, None])

    def update_slot(self, stats: Float[Array, "b h g c"], view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the larger one of the score and the new attention."""
        if self.gram is not None:
            values = view.values(new).astype(stats.dtype)
            squares = jnp.einsum("bhce,hgef,bhcf->bhgc", values, self.gram, values)
            stats = stats * jnp.sqrt(jnp.maximum(squares, 0.0))
        return jnp.maximum(view.slots.score, stats.max(2))


def _ids(name: str, request: str | tuple[int, ...], model: LanguageModel) -> tuple[int, ...]:
    if not isinstance(request, str):
        return request
    try:
        return tuple(model.tokenizer.encode(request, add_special_tokens=False))
    except ValueError:
        raise ValueError(
            f"kvzip needs the token ids of {request.strip()!r} here, because the model {model.name!r} comes without a "
            f"tokenizer; give {name}=[...]."
        ) from None
