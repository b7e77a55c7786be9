"""A policy is a record of parts, any of which can be replaced by any other of its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.policies.allocation import Plan, Quota, Uniform
from kvjax.policies.base import Part, of_kvjax
from kvjax.policies.protection import Protected, Protection
from kvjax.policies.quantizer import Codec
from kvjax.policies.residual import Residual
from kvjax.policies.score import Score
from kvjax.policies.selection import Selection
from kvjax.types import Heads, New, Parts, PyTree, View, derived, setting
from pallas_kernels.hamming import Hashing

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


@struct.dataclass
class Policy:
    """Which tokens stay in a cache, and how.

    Args:
        score: which cached token matters least.
        protection: which may never leave, which leave last.
        plan: how many slots each layer and head may use, and when.
        residual: what becomes of an evicted pair; None for nothing.
        codec: how a slot lies in memory.
        selection: which of the tokens that are held a query reads; None for all.
        name: for reports; a registered one where that is how it was made.

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
    name: str = setting("")
    kinds: tuple[type, ...] = derived(())
    """Of itself and its parts, for jax takes trees that differ in nothing but classes for equal (0.10.2).

    It would now and then run the program of another policy, where their hashes happen to fall together.
    """

    def __post_init__(self) -> None:
        # Trees of placeholders pass through here, too: only what cannot be one is refused.
        for name, kind in _KINDS.items():
            part = getattr(self, name)
            if isinstance(part, type):
                raise TypeError(f"{name}={part.__name__} is a class; give an instance, {part.__name__}().")
            if isinstance(part, (Part, Codec)):
                _check_part(name, part, kind)
        parts = [getattr(self, name) for name in _KINDS]
        if all(part is None or isinstance(part, (Part, Codec)) for part in parts):
            object.__setattr__(self, "kinds", tuple(_kinds(self)))

    @property
    def bounded(self) -> bool:
        """Whether a budget bounds anything: tokens leave, or are left out of attention."""
        return self.plan.bounded or self.selection is not None

    def bind(self, model: LanguageModel) -> Policy:
        """The policy with whatever its parts need to know of a model; `prefill` calls it, outside of compilation.

        Raises:
            ValueError: what a part has was made for another model.
            TypeError: a part is none.
        """
        for name, kind in _KINDS.items():
            part = getattr(self, name)
            if part is not None or name not in ("residual", "selection"):
                _check_part(name, part, kind)
        return self._each(lambda part: part.bind(model))

    def budgeted(self, budget: Any) -> Policy:
        """The policy with the budget that the user gave, for parts that mean something else by it than slots."""
        return self._each(lambda part: part.budgeted(budget))

    def sized(self, slots: tuple[int, ...]) -> Policy:
        """The policy whose parts make room for as many slots as heads of each layer may use, for its `init`."""
        return self._each(lambda part: part.sized(slots))

    def spread(self, plan: Plan | None) -> Policy:
        """The policy with its budget spread as a plan has it; None for its own."""
        return self if plan is None else dataclasses.replace(self, plan=self.plan.spread_by(plan))

    def _each(self, change: Any) -> Policy:
        names = ("score", "protection", "plan", "residual", "selection")
        parts = {name: getattr(self, name) for name in names}
        return dataclasses.replace(self, **{name: change(part) for name, part in parts.items() if part is not None})

    @property
    def shrinks(self) -> bool:
        """Whether several tokens may have to leave at one step."""
        return self.plan.shrinks

    @property
    def ends(self) -> bool:
        """Whether slots suffice for the planned text only."""
        return self.plan.ends

    @property
    def foresees(self) -> bool:
        """Whether what leaves a layer is known before it has seen the new token: only the position tells."""
        known = of_kvjax(type(self.score)) and of_kvjax(type(self.protection)) and not self.score.compares
        return known and not self.score.offloads and not self.shrinks

    @property
    def slides(self) -> bool:
        """Whether the oldest token leaves first of those that may."""
        return self.score.slides and of_kvjax(type(self.score))

    @property
    def adds(self) -> bool:
        """Whether a score is what its slot remembers, begins at 0, and `fold` adds the answer to it."""
        return self.score.adds and of_kvjax(type(self.score))

    def init(self, shape: New) -> Parts:
        """What the parts remember of a layer before anything is read."""
        return Parts(
            score=self.score.init(shape),
            protection=self.protection.init(shape),
            plan=self.plan.init(shape),
            residual=None if self.residual is None else self.residual.init(shape),
            codec=self.codec.init(shape),
        )

    def slots(self, new: New, state: Parts) -> Parts:
        """What the parts remember of each new token."""
        return Parts(
            score=self.score.slot(new, state),
            protection=self.protection.slot(new, state),
            plan=self.plan.slot(new, state),
            codec=self.codec.slot(new),
        )

    def standing(self, view: View, new: New) -> tuple[Float[Array, "b h c"], Protected]:
        """How much each slot matters, and what protects it.

        Raises:
            ValueError: the scores are not one number for each slot.
        """
        found = self.score.score(view, new)
        shape, kind = jnp.shape(found), jnp.result_type(found)
        if shape != view.position.shape or not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(
                f"{type(self.score).__name__}.score gives {kind} of shape {list(shape)}, not a floating-point number "
                f"for each of the slots {list(view.position.shape)} [b h c]."
            )
        return found, self.protection.guard(view, new)

    def hashing(self, new: New) -> Hashing | None:
        """What codes are made of, where how far apart they are is all that scores say."""
        return self.score.hashing(new) if of_kvjax(type(self.score)) else None

    def room(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Slots that may be used when a text has so many tokens, all of its prompt included."""
        return self.plan.room(limit, length)

    def competing(self, heads: Heads, new: New) -> Quota | None:
        """How many tokens a head may hold for their score alone; None for no such bound."""
        return self.plan.competing(heads, new)

    def fold(self, answers: PyTree, view: View, new: New) -> PyTree:
        """What the score remembers of each slot, after attention.

        Raises:
            ValueError: that is of other shapes than before.
        """
        found, before = self.score.fold(answers, view, new), view.slots.score
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (found, before)]
        if jax.tree.structure(found) != jax.tree.structure(before) or shapes[0] != shapes[1]:
            raise ValueError(
                f"{type(self.score).__name__}.fold gives {shapes[0]}, not what its slot began with: {shapes[1]}."
            )
        return found


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
        if isinstance(inner, (Part, Codec)):
            yield from _kinds(inner)


def _check_part(name: str, part: object, kind: type[Any]) -> None:
    if not isinstance(part, kind):
        remedy = "; kvjax.policy takes names" if isinstance(part, str) else ""
        raise TypeError(f"{name}={part!r} is no {kind.__name__}{remedy}.")
