"""Policies: records of parts, each of which can be replaced by any other of its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.allocation import Plan, Sizing, Uniform
from kvjax.policies.base import Part, label_of
from kvjax.policies.codec import Codec
from kvjax.policies.protection import Protected, Protection
from kvjax.policies.quantizer import Quantizer
from kvjax.policies.rankings import Ranking, as_numbers
from kvjax.policies.residual import Residual, Selection, SlotResidual
from kvjax.policies.score import Requirements, Score
from kvjax.types import LayerTokens, Parts, View, derived, setting, wide
from kvjax.utils.fields import at_least, fields_line


class Policy(Part, interface=True):
    """Rules for the tokens that a cache keeps, and for how it stores them.

    Args:
        score: ranks the cached tokens; the lowest one is evicted first.
        protection: tokens that are never evicted, and tokens that are evicted last.
        plan: number of slots that each layer and head may use at each length of the text.
        residual: memory of evicted pairs; None to drop them.
        codec: how a slot is stored.
        selection: cached tokens that each query attends to; None for all.
        evict_every: r, the number of tokens from one eviction to the next. A head with a limit of C slots holds up to C
            + (n - 1) mod r tokens of a text of n tokens, the one being read included. r tokens are evicted before each
            position that is a multiple of r.
        name: name in reports; the registered one if the policy was made by name.

    Example:
        >>> h2o = kvjax.policy("h2o")
        >>> sinks = kvjax.Policy(h2o.score, kvjax.Protection(sinks=4, recent=0.25))
        >>> model = kvjax.load("tiny")
        >>> model.generate("Once upon a time", policy=sinks, budget=16, max_new_tokens=6, temperature=0.0)
        [', there was a little girl']
    """

    score: Score
    protection: Protection = Protection()
    plan: Plan = Uniform()
    residual: Residual | None = None
    codec: Codec = Codec()
    selection: Selection | None = None
    evict_every: int = setting(1, at_least(1, "a number of tokens"))
    name: str = setting("")
    kinds: tuple[type, ...] = derived(())
    """Classes of the policy and of its parts.

    JAX (0.10.2) treats trees that differ only in their classes as equal. If their hashes collide, it would run the
    program compiled for another policy.
    """

    def __post_init__(self) -> None:
        # JAX also builds policies of placeholders, so refuse only what cannot be a placeholder.
        for name, kind in _KINDS.items():
            part = getattr(self, name)
            if isinstance(part, type):
                raise TypeError(f"{name}={part.__name__} is a class; give an instance, {part.__name__}().")
            if isinstance(part, (Part, str)):
                _check_part(name, part, kind)
        if all(isinstance(getattr(self, name), (Part, type(None))) for name in _KINDS):
            object.__setattr__(self, "kinds", tuple(_kinds(self)))

    def __repr__(self) -> str:
        """Show the parts, and of each the settings that are not its defaults."""
        return fields_line(self, hidden=("kinds",))

    @property
    def label(self) -> str:
        """Name in messages: the registered one, or else the class of the score."""
        return self.name or type(self.score).__name__

    @property
    def bounded(self) -> bool:
        """True if a budget has an effect: tokens are evicted, or left out of attention."""
        return self.plan.sizing.mode != "unbounded" or self.selection is not None

    def check_kinds(self) -> None:
        """Refuse parts that are not of their kind, or that declare what they need or give as another type."""
        for name, kind in _KINDS.items():
            part = getattr(self, name)
            if part is not None or name not in ("residual", "selection"):
                _check_part(name, part, kind)
        for part, name, declared in ((self.score, "requires", Requirements), (self.plan, "sizing", Sizing)):
            value = getattr(part, name)
            if not isinstance(value, declared):
                raise TypeError(
                    f"{type(part).__name__}.{name} is {value!r}; make it a property that returns a "
                    f"kvjax.{declared.__name__}."
                )

    def spread(self, plan: Plan | None) -> Policy:
        """Return a copy with the given plan for its budget; None keeps its own plan.

        Raises:
            ValueError: there is no budget that a plan could distribute.
        """
        if plan is None:
            return self
        mode, label = self.plan.sizing.mode, label_of(plan)
        if mode == "unbounded":
            raise ValueError(
                f"this policy evicts nothing, so plan={label} has no effect; leave it out, or choose another policy "
                "such as h2o."
            )
        if mode == "profiled":
            raise ValueError(
                f"{self.label} decides itself how many slots each head gets, so budget and "
                f"plan={label} mean nothing to it; leave both out and change its settings."
            )
        return dataclasses.replace(self, plan=self.plan.spread_by(plan))

    @property
    def may_shrink(self) -> bool:
        """True if one step may have to evict several tokens."""
        return self.plan.sizing.may_shrink or self.evict_every > 1

    def init_head(self, shape: LayerTokens) -> Parts:
        """Return the initial state of all parts for a layer."""
        return self.of_parts(lambda part: part.init_head(shape))

    @property
    def ranks_at_evictions(self) -> bool:
        """True if the score is computed only where tokens leave, and every new token finds an empty slot."""
        return self.evict_every > 1 and self.score.requires.whole_heads

    def slots(self, new: LayerTokens, state: Parts) -> Parts:
        """Return the state of all parts for each new token."""
        return self.of_parts(lambda part: part.init_slot(new, state))

    def of_parts(self, make: Callable[[Part], Any]) -> Parts:
        """Return what a function makes of each part that has a state."""
        residual = None if self.residual is None else make(self.residual)
        return Parts(make(self.score), make(self.protection), make(self.plan), residual, make(self.codec))

    def slot_bias(self, view: View) -> Float[Array, "b h c"] | None:
        """Return what the residual adds to the logits of each slot; None for nothing."""
        return view.slots.residual if isinstance(self.residual, SlotResidual) else None

    def ranking(self, view: View, new: LayerTokens) -> Ranking:
        """Return the score's ranking of the slots.

        A score that needs whole heads is computed only if a token must be evicted. Between two evictions each head has
        an empty slot, and zeros replace the score.
        """
        if new.given or not self.ranks_at_evictions:
            return self.score.score(view, new)
        zeros, score = jnp.zeros(view.position.shape, wide(new.k.dtype)), self.score.score
        due = (new.newest % self.evict_every == 0).any()
        return jax.lax.cond(due, lambda: as_numbers(score(view, new), view).astype(zeros.dtype), lambda: zeros)

    def scores_and_protection(self, view: View, new: LayerTokens) -> tuple[Float[Array, "b h c"], Protected]:
        """Return the score of each slot as a number, and the protection of the slots."""
        return as_numbers(self.ranking(view, new), view), self.protection.guard(view, new)

    def slots_at(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Return the usable slots of each head for a text of `length` tokens, including the whole prompt."""
        usable = self.plan.slots_at(limit, length)
        return usable if self.evict_every == 1 else usable + ((length - 1) % self.evict_every)[:, None]

    def buffer_slots(self, limit: int, shortest: int) -> int:
        """Return the slots that buffers need for heads with a budget of `limit` and texts from `shortest` tokens on."""
        at_first, spare = limit, self.plan.sizing.spare_slots
        if type(self.plan).slots_at is not Plan.slots_at:  # which gives the limit, without calling the device
            slots = self.plan.slots_at(jnp.full((1, 1), limit, jnp.int32), jnp.full(1, shortest, jnp.int32))
            at_first = int(slots[0, 0])
        return (max(at_first, limit + spare) if spare else at_first) + self.evict_every - 1


_KINDS: dict[str, type[Any]] = {
    "score": Score,
    "protection": Protection,
    "plan": Plan,
    "residual": Residual,
    "codec": Codec,
    "selection": Selection,
}


def _kinds(part: Any) -> Iterator[type]:
    yield type(part)
    for field in dataclasses.fields(part):
        inner = getattr(part, field.name)
        if isinstance(inner, Part):
            yield from _kinds(inner)


def _check_part(name: str, part: object, kind: type[Any]) -> None:
    if not isinstance(part, kind):
        remedy = "; kvjax.policy takes names" if isinstance(part, str) else ""
        remedy = f"; give kvjax.Codec(quantizer={part!r})" if isinstance(part, Quantizer) else remedy
        raise TypeError(f"{name}={part!r} is no {kind.__name__}{remedy}.")
