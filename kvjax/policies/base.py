"""What a policy is: the one thing that the papers disagree on, *which cached token matters least*."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.plan import Plan, Uniform
from kvjax.types import Evicted, LayerCache, NewTokens, Partial, PyTree, Weighing, setting

if TYPE_CHECKING:
    from kvjax.model import Model
    from pallas_kernels.decode_attention import Gumbel, LowRank
    from pallas_kernels.ranking import Protection


@struct.dataclass(kw_only=True)
class Policy(abc.ABC):
    """Scores the slots of a cache; everything else about eviction is shared.

    A policy is a pytree: hyperparameters are static, arrays are leaves. Per layer and step, kvjax calls

    1. `score`, and gives the slot that ranks lowest to the new token (an empty one first, if there is any),
    2. `stats` of the new token, stored beside its key and value,
    3. after attention `observe` with its probabilities, or `summed` with sums of them, if it `wants` any.

    In the prompt, `observe` is called for one block of queries after another, or `summed` once where `weighing` says
    what it needs to know; then `commit` once, then the slots that rank highest stay. With `prefill_chunk` this happens
    after every chunk.

    Args:
        sinks: first tokens of the text that never leave.
        recent: newest tokens that never leave, the one being read included: slots, or a fraction of the budget.
        special: token ids that never leave.
        positions: `original`, or `cache` to let the model see a key's rank in the cache as its position.

    Raises:
        ValueError: a setting is out of range, naming it, the value and the range.
    """

    needs_probs: ClassVar[bool] = False
    """Whether `observe` and `attended` are called, with attention probabilities; if not, none are computed."""
    last_queries: ClassVar[int | None] = None
    """How many of a prompt's newest queries `observe` reads, where `weighing` is None; None for all of them."""
    evicts: ClassVar[bool] = True
    """Whether tokens may leave at all; if not, the budget is the whole text."""
    prefill_chunk: ClassVar[int | None] = None
    """Prompt tokens read between two compressions; None for the whole prompt, 1 for one decode step each."""
    paper: ClassVar[str] = ""
    """Where the method comes from, with its equation."""

    extra_slots: ClassVar[int] = 0
    """Slots per head beyond the budget that the user names, for comparisons at equal memory."""
    wraps: ClassVar[bool] = False
    """Whether settings that are not its own belong to a policy inside."""

    sinks: int = setting(0)
    recent: int | float = setting(0)
    special: tuple[int, ...] = setting(())
    positions: str = setting("original")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in ("wants", "weighing") if "observe" in vars(cls) else ():
            if name not in vars(cls) and getattr(cls, name) is not getattr(Policy, name):
                raise TypeError(
                    f"{cls.__name__} has an `observe` of its own that would never be called, as it inherits `{name}`, "
                    f"which asks for sums instead; give it `{name} = kvjax.Policy.{name}`, or one of its own."
                )

    def __post_init__(self) -> None:
        check(isinstance(self.sinks, int) and self.sinks >= 0, "sinks", self.sinks, "a whole number from 0")
        fraction = isinstance(self.recent, float) and 0 <= self.recent <= 1
        whole = isinstance(self.recent, int) and self.recent >= 0
        check(fraction or whole, "recent", self.recent, "a number of slots from 0, or a fraction from 0.0 to 1.0")
        check(self.positions in ("original", "cache"), "positions", self.positions, "'original' or 'cache'")
        check(all(isinstance(token, int) for token in self.special), "special", self.special, "a list of token ids")

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """The settings a user may give by name, with their defaults."""
        fields = (field for field in dataclasses.fields(cls) if field.init)
        return {field.name: field.default for field in fields if not field.metadata.get("pytree_node", True)}

    @classmethod
    def build(cls, **settings: Any) -> Policy:
        """The policy with these settings, as `kvjax.policy` makes it."""
        return cls(**settings)

    def bind(self, model: Model) -> Policy:
        """The policy with whatever it needs to know of a model; `prefill` calls it first, outside of compilation.

        Raises:
            ValueError: what it has was made for another model.
        """
        return self

    @abc.abstractmethod
    def score(self, cache: LayerCache, new: NewTokens) -> Float[Array, "b h c"]:
        """How much each slot matters: the lowest leaves first, -inf at once, +inf never.

        Args:
            cache: the layer's slots; what an empty one scores is ignored. Of equal scores the oldest leaves.
            new: what is being read: the token that wants a slot, or the prompt.
        """

    def victim(self, cache: LayerCache, new: NewTokens, protection: Protection) -> Int[Array, "b h"] | None:
        """The slot that the new token of each row takes, for policies with a kernel that finds it without scores.

        None: the slot that ranks lowest by `score`. Both have to agree.
        """
        return None

    def stats(self, new: NewTokens, state: PyTree) -> PyTree:
        """What to remember of new tokens besides key and value, given the layer's state: arrays [b h t ...]."""
        return None

    def init(self, new: NewTokens) -> PyTree:
        """What the policy remembers of the layer before it has read anything; `new` holds no tokens, only shapes."""
        return None

    def observe(self, cache: LayerCache, probs: Float[Array, "b h g t c"], new: NewTokens) -> LayerCache:
        """The cache after seeing how new tokens attended to its slots; rows of padding are all zero."""
        return cache

    def wants(self, new: NewTokens) -> str | Gumbel | None:
        """What a new token's attention has to tell, as `scores` of `pallas_kernels.decode_attention`.

        `each` probability goes to `observe`; what is added up over a KV head's queries, `sum` or a `Gumbel`, goes to
        `summed` as [b h 1 c].
        """
        return "each" if self.needs_probs else None

    def weighing(self, cache: LayerCache, new: NewTokens) -> Weighing | None:
        """Which sums over a prompt's queries are all that `observe` needs: `summed` gets them in its place.

        The prompt is then read by one kernel, several times as fast. None: `observe` wants every probability.
        """
        return None

    def summed(self, cache: LayerCache, sums: Float[Array, "b h g c"], new: NewTokens) -> LayerCache:
        """`observe`, given what each key got from all queries of a prompt, chunk or step together."""
        raise NotImplementedError(f"{type(self).__name__} asks for sums, but has no `summed`.")

    def near(self, cache: LayerCache, sums: Callable[..., Float[Array, "b h t"]], new: NewTokens) -> LayerCache:
        """The cache after `summed`, for policies that also ask what each token got from queries near it.

        Args:
            cache: of a whole prompt.
            sums: `kvjax.attention.near_sums`, given all but its last two arguments.
            new: the prompt.
        """
        return cache

    def commit(self, cache: LayerCache, new: NewTokens) -> LayerCache:
        """The cache when a prompt (or a chunk of it) has been read, before anything of it leaves."""
        return cache

    def couple(self, caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """The caches of all layers after they read the same tokens, for policies whose layers share scores."""
        return caches

    couples_layers: ClassVar[bool] = False
    """Whether `couple` does anything: a prompt is then compressed only after its last layer."""

    def absorb(self, state: PyTree, evicted: Evicted) -> PyTree:
        """The layer's state with evicted pairs folded in."""
        return state

    def memory(self, state: PyTree, new: NewTokens) -> LowRank | None:
        """The evicted tokens' share of the attention of `new.q`, merged into that over the slots."""
        return None

    def attended(
        self, cache: LayerCache, partial: Partial, probs: Float[Array, "b h g t c"], new: NewTokens
    ) -> Partial:
        """The attention over the slots as the model gets it, for oracles that look at all of it and use a part."""
        return partial

    def budgeted(self, budget: Any) -> Policy:
        """The policy with the budget that the user gave, for oracles that mean something else by it than slots."""
        return self

    shrinks: ClassVar[bool] = False
    """Whether `allowed` may fall while tokens are generated."""

    slides: ClassVar[bool] = False
    """Whether what is live beyond the sinks is always the newest tokens, without a gap."""

    pages: ClassVar[bool] = False
    """Whether heads may have budgets of their own: `score` and `observe` then see a head's slots in parts."""
    decides_slots: ClassVar[bool] = False
    """Whether `commit` finds out how many slots each head gets, in `limit`; there is no budget then."""
    ends: ClassVar[bool] = False
    """Whether the slots suffice for `max_new_tokens` only; logits beyond are NaN."""
    normalises: ClassVar[bool] = False
    """Whether, for heads with budgets of their own, `gather` reads the shares of `share` in place of `observe`."""

    def share(self, cache: LayerCache, probs: Float[Array, "b h g t c"], new: NewTokens) -> Float[Array, "b h g t c"]:
        """Attention as the policy weighs it, for kvjax to normalise over all slots of a head."""
        return probs

    def gather(self, cache: LayerCache, shares: Float[Array, "b h g t c"], new: NewTokens) -> LayerCache:
        """`observe`, given normalised shares instead of probabilities."""
        return self.observe(cache, shares, new)

    def competing(self, cache: LayerCache, new: NewTokens) -> Int[Array, "b h"] | None:
        """How many tokens a head may hold for their score alone, in policies that decide slots; None for no limit.

        Scores of `kvjax.cache.last_resort` and above do not compete: such tokens leave when nothing else can.
        """
        return None

    def allowed(self, limit: Int[Array, "b h"], read: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Slots that heads with a budget of `limit` may use when `read` tokens have been read."""
        return limit

    def buffer_slots(self, limit: int) -> int:
        """Slots that the buffers of heads with a budget of `limit` have to hold."""
        return limit

    offloads: ClassVar[bool] = False
    """Whether `stats` wait in host memory from one token to the next."""

    def default_plan(self) -> Plan:
        """How the budget is spread over the layers unless the user says otherwise."""
        return Uniform()

    def sink_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many first tokens stay, for heads of `limit` slots."""
        return jnp.full_like(limit, self.sinks)

    def recent_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The recent window in slots, for heads of `limit` slots."""
        if isinstance(self.recent, float):
            return jnp.floor(self.recent * limit + 1e-6).astype(jnp.int32)
        return jnp.full_like(limit, self.recent)

    def check_budget(self, smallest: int) -> None:
        """Refuse a budget that leaves no slot to choose, given the slots of the poorest head.

        Raises:
            ValueError: sinks and recent window do not fit in the budget.
        """
        recent = int(self.recent * smallest + 1e-6) if isinstance(self.recent, float) else self.recent
        if self.evicts and self.sinks + recent > smallest:
            raise ValueError(
                f"sinks + recent = {self.sinks} + {recent} slots do not fit in a budget of {smallest} slots per head; "
                f"use a budget of at least {self.sinks + recent} or protect fewer tokens."
            )

    def check_prompt(self, shortest: int) -> None:
        """Refuse prompts that are too short for the settings, given the tokens of the shortest.

        Raises:
            ValueError: a setting asks for more of the prompt than there is.
        """
        return None


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Refuse a bad setting with one sentence.

    Raises:
        ValueError: `ok` is False.
    """
    if not ok:
        raise ValueError(f"{name}={value!r} is not {expected}.")
