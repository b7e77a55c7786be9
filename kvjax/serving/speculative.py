"""Rows whose texts a small cache drafts and the full cache verifies, of many texts at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.generation.loop import Drawn
from kvjax.inference.speculation import Speculation, SpeculativeCache, verify_drafts
from kvjax.models.sharding import on_mesh
from kvjax.serving.batch import Advance, Rows, add_tokens, sample_tokens
from kvjax.types import OF_ROWS


def draft_and_verify(decoder: Speculation, rows: Rows, logprobs: int) -> Advance:
    """Draw one token per active row and those that the draft guesses after it, if the full cache draws them, too.

    A guess is drawn with the settings, penalties and random numbers of its row and place, as the token itself. A row
    whose guess is wrong draws the right token at the start of the next round.
    """
    cache, count = rows.cache, decoder.draft_tokens
    assert isinstance(cache, SpeculativeCache)
    draw = on_mesh(lambda rows: sample_tokens(rows, logprobs), decoder.mesh, lambda: ((OF_ROWS,), OF_ROWS))
    add = on_mesh(add_tokens, decoder.mesh, lambda: ((OF_ROWS, OF_ROWS, OF_ROWS), OF_ROWS))

    # Texts and wishes alone, whose caches follow at the end.
    texts = rows.replace(cache=cache.full.replace(layers=()))
    first = draw(texts)
    texts, belongs = add(texts, first.token, cache.active)
    active = texts.cache.active

    def guess(texts: Rows, logits: Float[Array, "b vocab"]) -> tuple[Rows, Int[Array, " b"]]:
        texts = _after(texts, texts.cache.active, logits)
        token = draw(texts).token
        return add(texts, token, texts.cache.active)[0], token

    verified = verify_drafts(decoder, cache, first.token, active, texts, guess)

    def confirm(
        carry: tuple[Rows, Bool[Array, " b"]], at: tuple[Float[Array, "b vocab"], Int[Array, " b"]]
    ) -> tuple[tuple[Rows, Bool[Array, " b"]], tuple[Drawn, Bool[Array, " b"]]]:
        (texts, goes_on), (logits, guess) = carry, at
        texts = _after(texts, goes_on, logits)
        drawn = draw(texts)
        texts, belongs = add(texts, drawn.token, goes_on & (drawn.token == guess))
        return (texts, belongs & texts.cache.active), (drawn, belongs)

    places = jnp.moveaxis(verified.logits[:, :count], 1, 0), verified.guesses.T
    (texts, goes_on), (confirmed, right) = jax.lax.scan(confirm, (texts, active), places)
    texts = _after(texts, goes_on, verified.logits[:, count])
    later: Drawn = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), confirmed)
    drawn: Drawn = jax.tree.map(lambda one, more: jnp.concatenate([one[:, None], more], axis=1), first, later)
    after = verified.keep(texts.cache.position - cache.position).replace(active=texts.cache.active)
    return Advance(texts.replace(cache=after), drawn, belongs + right.sum(0, dtype=jnp.int32))


def _after(texts: Rows, reads: Bool[Array, " b"], logits: Float[Array, "b vocab"]) -> Rows:
    """Return texts of which some have read one more token, with the logits after it."""
    position = texts.cache.position + reads
    return texts.replace(
        cache=texts.cache.replace(position=position), logits=jnp.where(reads[:, None], logits, texts.logits)
    )
