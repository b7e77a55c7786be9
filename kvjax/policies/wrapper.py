"""A policy around another one: every question goes to the base unless the wrapper answers it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import struct

from kvjax.policies.base import Policy, check


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name), doc=f"`{name}` of the base.")


@struct.dataclass(kw_only=True)
class Wrapper(Policy):
    """Delegates every hook, with the base's own part of the layer's state.

    Args:
        base: the policy that decides what stays.
    """

    wraps = True

    # Not fields of a wrapper: there is one truth, the base's.
    sinks: ClassVar = _of_base("sinks")
    recent: ClassVar = _of_base("recent")
    special: ClassVar = _of_base("special")
    positions: ClassVar = _of_base("positions")
    needs_probs: ClassVar = _of_base("needs_probs")
    evicts: ClassVar = _of_base("evicts")
    prefill_chunk: ClassVar = _of_base("prefill_chunk")
    last_queries: ClassVar = _of_base("last_queries")
    couples_layers: ClassVar = _of_base("couples_layers")
    shrinks: ClassVar = _of_base("shrinks")
    slides: ClassVar = _of_base("slides")
    extra_slots: ClassVar = _of_base("extra_slots")
    offloads: ClassVar = _of_base("offloads")
    decides_slots: ClassVar = _of_base("decides_slots")
    ends: ClassVar = _of_base("ends")

    base: Policy

    def __post_init__(self) -> None:
        check(isinstance(self.base, Policy), "base", self.base, "a policy")

    @classmethod
    def settings(cls) -> dict[str, Any]:
        return super().settings() | {"base": "h2o"}

    @classmethod
    def build(cls, **settings: Any) -> Policy:
        """Its own settings to the wrapper, all others to the base, given by name or as a `Policy`."""
        from kvjax.policies import policy

        own = {name: settings.pop(name) for name in cls.settings() if name in settings}
        base = own.pop("base", "h2o")
        if isinstance(base, Policy):
            for name in settings:
                raise ValueError(f"{name} is no setting of {cls.__name__}; set it on the base policy that you pass.")
        else:
            base = policy(base, **settings)
        return cls(base=base, **own)

    # How the base's part of the layer's state stands in that of the wrapper.
    def inner(self, state: Any) -> Any:
        return state

    def outer(self, state: Any, inner: Any) -> Any:
        return inner

    def _inside(self, cache):
        return cache.replace(state=self.inner(cache.state))

    def _outside(self, cache, inside):
        return inside.replace(state=self.outer(cache.state, inside.state))

    def bind(self, model):
        return dataclasses.replace(self, base=self.base.bind(model))

    def score(self, cache, new):
        return self.base.score(self._inside(cache), new)

    def victim(self, cache, new, protection):
        return self.base.victim(self._inside(cache), new, protection)

    def stats(self, new, state):
        return self.base.stats(new, self.inner(state))

    def init(self, new):
        return self.base.init(new)

    def observe(self, cache, probs, new):
        return self._outside(cache, self.base.observe(self._inside(cache), probs, new))

    def wants(self, new):
        return self.base.wants(new)

    def weighing(self, cache, new):
        return self.base.weighing(self._inside(cache), new)

    def summed(self, cache, sums, new):
        return self._outside(cache, self.base.summed(self._inside(cache), sums, new))

    def near(self, cache, sums, new):
        return self._outside(cache, self.base.near(self._inside(cache), sums, new))

    def commit(self, cache, new):
        return self._outside(cache, self.base.commit(self._inside(cache), new))

    def couple(self, caches):
        coupled = self.base.couple(tuple(self._inside(cache) for cache in caches))
        return tuple(self._outside(cache, inside) for cache, inside in zip(caches, coupled, strict=True))

    def absorb(self, state, evicted):
        return self.outer(state, self.base.absorb(self.inner(state), evicted))

    def memory(self, state, new):
        return self.base.memory(self.inner(state), new)

    def attended(self, cache, partial, probs, new):
        return self.base.attended(self._inside(cache), partial, probs, new)

    def budgeted(self, budget):
        return dataclasses.replace(self, base=self.base.budgeted(budget))

    def allowed(self, limit, read):
        return self.base.allowed(limit, read)

    def buffer_slots(self, limit):
        return self.base.buffer_slots(limit)

    def default_plan(self):
        return self.base.default_plan()

    def sink_slots(self, limit):
        return self.base.sink_slots(limit)

    def recent_slots(self, limit):
        return self.base.recent_slots(limit)

    def check_budget(self, smallest):
        self.base.check_budget(smallest)

    def check_prompt(self, shortest):
        self.base.check_prompt(shortest)
