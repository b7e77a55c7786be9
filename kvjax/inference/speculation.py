"""Two caches of the same texts: a small one drafts tokens, and a full one verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.inference.budget import Budget
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder, decoder
from kvjax.inference.paired import PairedSlots, paired_reader
from kvjax.inference.prefill import bound_prompts
from kvjax.inference.prepare import Tokens
from kvjax.inference.refresh import check_refresh, refresh_draft
from kvjax.inference.verify import Queries, check_verifier, truncate, verify_with_queries
from kvjax.methods.registry import policy as policy_by_name
from kvjax.models.model import LanguageModel
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import OF_ROWS, Kernels, setting
from kvjax.utils.fields import values_of
from kvjax.utils.modes import on_the_host
from kvjax.utils.settings import whole_number

T = TypeVar("T")

MOST_DRAFT_TOKENS = 16
"""Most tokens that a draft may guess before they are verified."""


class SpeculativeCache(Cache, kw_only=True):
    """The full cache of a batch of texts, and the draft's cache of the same texts."""

    draft: Cache
    """What the draft has read: the texts without the tokens that are `behind`."""
    behind: Int[Array, "b g"]
    """Tokens of each row that the full cache has read and the draft has not, the oldest first, `lag` of them."""

    @staticmethod
    def of(full: Cache, draft: Cache, behind: Int[Array, "b g"]) -> SpeculativeCache:
        """Return both caches as one; random keys are those of the full one."""
        return SpeculativeCache(**values_of(Cache, full), draft=draft.replace(key=None), behind=behind)

    @property
    def full(self) -> Cache:
        """The full cache alone."""
        return Cache(**values_of(Cache, self))

    @property
    def caches(self) -> tuple[Cache, ...]:
        return self.full, self.draft.replace(key=self.key)

    def with_caches(self, caches: Sequence[Cache]) -> SpeculativeCache:
        return SpeculativeCache.of(caches[0], caches[1], self.behind)

    @property
    def specs(self) -> Self:
        return super().specs.replace(draft=self.draft.specs, behind=OF_ROWS)

    @property
    def lag(self) -> Int[Array, " b"]:
        """Number of tokens that the draft has not read."""
        return self.position - self.draft.position

    def unread(self, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]) -> tuple[Array, Int[Array, " b"]]:
        """Return what the draft has to read before and with some new tokens [b g+n], and the number of each row."""
        width = self.behind.shape[1]
        place = jnp.arange(width + tokens.shape[1])
        source = jnp.where(place < self.lag[:, None], place, width + place - self.lag[:, None])
        joined = jnp.concatenate([self.behind, tokens], axis=1)
        ids = jnp.take_along_axis(joined, jnp.minimum(source, joined.shape[1] - 1), axis=1)
        return ids, jnp.where(self.active, self.lag + lengths, 0)

    def truncate(self, length: Int[Array, " b"]) -> Self:
        """Return the caches without the tokens at `length` and later ones, none of which the draft has read."""
        return truncate(self.replace(layers=tuple(layer.open() for layer in self.layers)), length)

    @property
    def memory(self) -> Any:
        """Arrays of all layers of both caches, without those of rows."""
        return super().memory, self.draft.memory

    def take(self, rows: Int[np.ndarray, " m"] | Int[Array, " m"]) -> Self:
        return super().take(rows).replace(draft=self.draft.take(rows), behind=self.behind[rows])

    def put(self, where: Int[np.ndarray, " m"], rows: Cache) -> Self:
        if not isinstance(rows, SpeculativeCache):
            raise ValueError("rows without a draft do not fit a state with one; read them with the same decoder.")
        draft, behind = self.draft.put(where, rows.draft), self.behind.at[where].set(rows.behind)
        return super().put(where, rows).replace(draft=draft, behind=behind)

    def with_own_rows(self) -> Self:
        return super().with_own_rows().replace(draft=self.draft.with_own_rows(), behind=jnp.copy(self.behind))


class Speculation(Decoder, kw_only=True):
    """A decoder whose policy evicts nothing, and another policy of the same model that drafts tokens for it.

    It reads tokens into both caches; its logits are those of the full one.

    Example:
        >>> model = kvjax.load("tiny")
        >>> speculation = kvjax.speculation(model, "h2o", budget=16, draft_tokens=4)
        >>> cache, logits = speculation.prefill([[5, 17, 42]], max_new_tokens=8)
        >>> cache, tokens, counts = kvjax.speculate(speculation, cache, logits.argmax(-1))
        >>> tokens.shape, (cache.position - 3 == counts).tolist()
        ((1, 5), [True])
    """

    draft_without_weights: Any
    """The decoder that drafts, a `Decoder` whose weights, devices and kernels are those of this one."""
    draft_tokens: int = setting(4)
    """Tokens that the draft guesses before they are verified."""
    refresh: bool = setting(False)
    """True to choose the draft's slots anew after each verification, by its attention."""

    def __repr__(self) -> str:
        return f"Speculation({self.draft.policy.label} drafts {self.draft_tokens} tokens for {self.policy.label})"

    @property
    def full(self) -> Decoder:
        """The decoder that verifies, alone."""
        return Decoder(**values_of(Decoder, self))

    @property
    def draft(self) -> Decoder:
        """The decoder that drafts."""
        return self.draft_without_weights.replace(weights=self.weights, kernels=self.kernels, mesh=self.mesh)

    def for_steps(self) -> Self:
        return super().for_steps().replace(draft_without_weights=self.draft_without_weights.for_steps())

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        return self.full, self.draft

    def joined(self, caches: Sequence[Cache]) -> SpeculativeCache:
        full, draft = caches
        return SpeculativeCache.of(full, draft, jnp.zeros((len(full.position), self.draft_tokens), jnp.int32))

    @on_the_host
    def prefill(
        self,
        tokens: Tokens,
        lengths: ArrayLike | Sequence[int] | None = None,
        *,
        max_new_tokens: int = 256,
        key: Key[Array, ""] | Key[Array, " b"] | None = None,
        prefill_chunk: int | None = None,
        budget_of: str = "text",
        rope_length: int | None = None,
    ) -> tuple[SpeculativeCache, Float[Array, "b vocab"]]:
        """Read prompts into two new caches, and return the full one's logits for the first new tokens, too."""
        settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, chunk=prefill_chunk)
        settings |= dict(budget_of=budget_of, rope_length=rope_length)
        prompts, of_full = (each.prepare(tokens, lengths, **settings) for each in (self.draft, self.full))
        reader = paired_reader(bound_prompts(self.draft, prompts), prompts, of_full)
        if reader is None:
            settings["prefill_chunk"] = settings.pop("chunk")
            draft, _ = self.draft.prefill(tokens, lengths, **settings)
            full, logits = self.full.prefill(tokens, lengths, **settings)
        else:
            pairs, position, seed, logits = self.full.read(reader, prompts)
            # The caches may be updated in place, so they share no arrays.
            of_draft = tuple(p.draft if isinstance(p, PairedSlots) else jax.tree.map(jnp.copy, p) for p in pairs)
            of_verifier = tuple(pair.full if isinstance(pair, PairedSlots) else pair for pair in pairs)
            draft, _ = self.draft.fill(prompts, (of_draft, jnp.copy(position), jnp.copy(seed), logits))
            full, logits = self.full.fill(of_full, (of_verifier, position, seed, logits))
        return self.joined((full, draft)), logits

    @on_the_host
    def steps(
        self, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"] | None = None
    ) -> tuple[SpeculativeCache, Float[Array, "b n vocab"]]:
        assert isinstance(cache, SpeculativeCache)
        counts = jnp.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
        draft, _ = self.draft.steps(cache.draft.replace(active=cache.active), *cache.unread(tokens, counts))
        full, logits = self.full.steps(cache.full, tokens, lengths)
        return SpeculativeCache.of(full, draft, cache.behind), logits

    @on_the_host
    def extend(
        self,
        cache: Cache,
        tokens: ArrayLike | Sequence[Sequence[int]],
        lengths: ArrayLike | Sequence[int] | None = None,
        logits: str = "last",
        *,
        prefill_chunk: int | None = None,
    ) -> tuple[SpeculativeCache, Float[Array, "b vocab"] | Float[Array, "b n vocab"]]:
        """Read more text on top of both caches; see `kvjax.extend`."""
        assert isinstance(cache, SpeculativeCache)
        full, next_logits = self.full.extend(cache.full, tokens, lengths, logits, prefill_chunk=prefill_chunk)
        none = jnp.zeros((len(cache.position), 0), jnp.int32), jnp.zeros(len(cache.position), jnp.int32)
        draft = cache.draft.replace(active=cache.active)
        draft, _ = _compiled_steps(self.draft.for_steps(), draft, *cache.unread(*none))
        draft, _ = self.draft.extend(draft, tokens, lengths, prefill_chunk=prefill_chunk)
        return SpeculativeCache.of(full, draft, cache.behind), next_logits


class Verified(NamedTuple):
    """Guesses of a draft, which the full cache has read and may take back."""

    guesses: Int[Array, "b g"]
    logits: Float[Array, "b g+1 vocab"]
    """Logits of the full cache after the newest token, and after each guess."""
    before: SpeculativeCache
    opened: Cache
    """Full cache after all of them."""
    base: Cache
    """Draft's cache after the newest token."""
    queries: Queries
    """Queries of the newest token and of all guesses, by layer."""
    speculation: Speculation

    def keep(self, counts: Int[Array, " b"]) -> SpeculativeCache:
        """Return the caches after so many tokens in each row: the newest one, and guesses after it."""
        full = truncate(self.opened, self.before.position + counts).replace(active=self.before.active)
        fewer = ((0, 0), (0, self.before.behind.shape[1] - self.guesses.shape[1]))
        behind = jnp.where(self.base.active[:, None], jnp.pad(self.guesses, fewer), self.before.behind)
        draft = self.base
        if self.speculation.refresh:
            reads = jnp.where(draft.active, counts, 0)
            draft = refresh_draft(self.speculation.draft.for_steps(), draft, full, self.queries, reads)
        return SpeculativeCache.of(full, draft, behind)


def verify_drafts(
    speculation: Speculation,
    cache: SpeculativeCache,
    token: Int[Array, " b"],
    active: Bool[Array, " b"],
    texts: T,
    guess: Callable[[T, Float[Array, "b vocab"]], tuple[T, Int[Array, " b"]]],
) -> Verified:
    """Guess tokens by the draft, and read them in one pass by the full cache; call it under `jit`.

    Guesses change a copy of the draft's cache alone. It reads the tokens that stay at the start of the next round, in
    the pass that makes the first guess.

    Args:
        token: newest token of each row, which the caches have not read.
        active: True for rows that guess; the others do not change.
        texts: what draws depend on beside logits, before the first guess.
        guess: draws a token of each row after those in `texts`, and adds it to them.
    """
    full, draft = speculation.full.for_steps(), speculation.draft.for_steps()
    ids, unread = cache.replace(active=active).unread(token[:, None], active.astype(jnp.int32))
    base, logits = draft.steps(cache.draft.replace(active=active), ids, unread)
    newest = jnp.take_along_axis(logits, jnp.maximum(unread - 1, 0)[:, None, None], axis=1)[:, 0]
    texts, first = guess(texts, newest)

    def guess_next(carry: tuple[Cache, T, Array], _: None) -> tuple[tuple[Cache, T, Array], Array]:
        of_guess, texts, token = carry
        of_guess, logits = draft.step(of_guess, token)
        texts, token = guess(texts, logits)
        return (of_guess, texts, token), token

    count = speculation.draft_tokens
    _, others = jax.lax.scan(guess_next, (base, texts, first), length=count - 1)
    known = jnp.concatenate([token[None], first[None], others]).T
    lengths = jnp.where(active, count + 1, 0)
    opened, logits, queries = verify_with_queries(full, cache.full.replace(active=active), known, lengths)
    return Verified(known[:, 1:], logits, cache, opened, base, queries, speculation)


_compiled_steps = jax.jit(Decoder.steps)


@on_the_host
def speculation(
    model: LanguageModel,
    policy: Policy | str,
    budget: Budget = 1.0,
    *,
    plan: Plan | str | None = None,
    verifier: Policy | str = "full",
    draft_tokens: int = 4,
    refresh: bool = False,
    implementation: str | Kernels = "auto",
) -> Speculation:
    """Return a model with a policy that drafts tokens on a small cache, which are verified on a full one.

    Args:
        policy: policy that drafts, with its `budget` and `plan`, as for `kvjax.decoder`.
        verifier: policy of the full cache, which evicts nothing: `full`, or `kvjax.policy("full", codec="int8")` for
            the text of a full cache in 8 bits.
        draft_tokens: tokens that are drafted before they are verified together, 1 to 16.
        refresh: True to choose the draft's slots anew after each verification, among all tokens of the full cache, by
            the attention of the tokens that it has verified.
        implementation: as for `kvjax.decoder`.

    Raises:
        ValueError: both policies are the same, the verifier evicts, or a policy does not fit the model, the budget or
            `refresh`.
        TypeError: the model or a policy is of another type.

    Example:
        >>> model = kvjax.load("tiny")
        >>> speculation = kvjax.speculation(model, "h2o", budget=16)
        >>> cache, logits = speculation.prefill([[5, 17, 42]], max_new_tokens=8)
        >>> cache.position.tolist(), cache.draft.position.tolist(), logits.shape
        ([3], [3], (1, 2048))
    """
    draft_tokens = whole_number("draft_tokens", draft_tokens, 1, MOST_DRAFT_TOKENS)
    if policy_by_name(policy) == policy_by_name(verifier):
        raise ValueError(
            f"policy {policy_by_name(policy).label} cannot draft for itself; give one with a smaller cache, such as "
            "policy='snapkv' with budget=0.25."
        )
    draft = decoder(model, policy, budget, plan=plan, implementation=implementation)
    full = decoder(model, verifier, implementation=implementation).replace(beyond_window=draft_tokens + 1)
    check_verifier(full, draft_tokens + 1)
    if refresh:
        check_refresh(draft, full)
    drafts: dict[str, Any] = dict(draft_without_weights=draft.replace(weights=None), draft_tokens=draft_tokens)
    return Speculation(**values_of(Decoder, full), **drafts, refresh=refresh)
