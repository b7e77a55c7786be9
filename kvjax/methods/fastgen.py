"""FastGen: each head keeps the cheapest combination of token classes that recovers its attention on the prompt."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvjax.cache.ranks import sum_of_top
from kvjax.methods.h2o import Accumulated
from kvjax.methods.register import combine, register
from kvjax.models.model import LanguageModel
from kvjax.policies import AttentionSum, LocalAttention, Policy, Sizing, Uniform
from kvjax.policies.protection import Protected, Protection, Quota
from kvjax.types import (
    Heads,
    LayerTokens,
    Limit,
    Parts,
    View,
    at_least,
    check,
    number,
    one_of,
    setting,
    share,
    wide,
    written,
)

PARTS = ("special", "punctuation", "frequent", "local")
SPECIAL, PUNCTUATION, FREQUENT, EVERYTHING = 1, 2, 4, 8
"""Bits for the tokens that a head keeps; the first two are classes of tokens."""

GENERATED = 128
"""Bit of a generated token, beside those of its classes."""

_ORDER = Limit(
    lambda order: 0 < len(set(order) & set(PARTS)) == len(order), f"one or more of {', '.join(PARTS)}, each once"
)

OF_FREQUENT = ("frequent", "frequent_among")
"""Settings that the plan and the protection share."""


class Profile(struct.PyTreeNode):
    """Profile of a layer's heads, computed by the plan and read by the protection."""

    choice: Int[Array, "b h"]
    """Index into `Profiled.choices`."""
    recovered: Float[Array, "b h choices"]
    """Fraction of the prompt's attention that each choice except the full cache recovers, averaged over queries."""
    class_mask: UInt8[Array, "b h"]
    """Bits for the tokens that the choice keeps."""
    local: Float[Array, "b h"]
    """Width of the local window as a fraction of the length; 0 without a window."""


class TokenClasses(Protection):
    """Protection of special tokens, punctuation, local windows and frequent tokens, as each head's profile specifies.

    Such tokens of prompts and turns are never evicted, generated ones are evicted last. The token being read is always
    kept.

    Args:
        sinks: number of first tokens that count as special.
        recent: number of newest tokens that every head keeps, the one being read included; at least 0.
        special: ids that count as special tokens.
        punctuation: ids that count as punctuation.
        markers: sequences of ids that count as special in prompts and turns. If `special`, `punctuation` and `markers`
            are all empty, they come from the model's tokenizer.
        classes: classes of every token id, set by `bind`.
        frequent: r_f, number of most attended tokens as a fraction of the current length, in [0, 1].
        frequent_among: `all` for section 3.2's union; `others` for floor(frequent L) tokens besides those that are kept
            for other reasons, which differs from the paper.
    """

    punctuation: tuple[int, ...] = setting(())
    markers: tuple[tuple[int, ...], ...] = setting(())
    classes: UInt8[Array, " vocab"] | None = None
    frequent: float = number(0.3)
    frequent_among: str = setting("all")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_count = isinstance(self.recent, int) or not written(self.recent)
        check(is_count, "recent", self.recent, "a number of tokens from 0")

    def bind(self, model: LanguageModel) -> TokenClasses:
        size = model.config.vocab_size
        if self.classes is not None:
            if len(self.classes) != size:
                raise ValueError(
                    f"this policy was bound to a vocabulary of {len(self.classes)} tokens, not to the {size} of "
                    f"{model.name!r}; bind the policy that you made, not the one of a state."
                )
            return self
        special, punctuation, markers = self.special, self.punctuation, self.markers
        if not (special or punctuation or markers):
            try:
                token_classes = model.token_classes
            except ValueError as error:
                raise ValueError(f"fastgen needs special=(ids) or punctuation=(ids) here: {error}") from None
            special, punctuation, markers = token_classes.special, token_classes.punctuation, token_classes.markers
        classes = np.zeros(size, np.uint8)
        for ids, bit in ((special, SPECIAL), (punctuation, PUNCTUATION)):
            classes[[i for i in ids if 0 <= i < size]] |= bit
        return self.replace(classes=jnp.asarray(classes), markers=tuple(map(tuple, markers)))

    def init_slot(self, new: LayerTokens, state: Parts) -> UInt8[Array, "b h t"]:
        """Return the classes of new tokens; in prompts and turns, markers and sinks count as special tokens."""
        assert self.classes is not None
        special = (new.position < self.sinks) & new.given
        for marker in self.markers if new.given else ():
            width = new.token.shape[1] - len(marker) + 1
            if width < 1:
                continue
            match = jnp.ones((new.token.shape[0], width), bool)
            for i, token in enumerate(marker):
                match &= (new.token[:, i : i + width] == token) & new.valid[:, i : i + width]
            for i in range(len(marker)):
                special = special.at[:, i : i + width].max(match)
        generated = 0 if new.given else GENERATED
        bits = self.classes[new.token] | (SPECIAL * special + generated).astype(jnp.uint8)
        return jnp.broadcast_to(bits[:, None], new.k.shape[:3])

    def guard(self, view: View, new: LayerTokens) -> Protected:
        """Protect what each head's choice keeps (Algorithm 2); its fractions are of the tokens before the new one."""
        profile: Profile = view.state.plan
        window = _share(profile.local, length_before(new)[:, None])
        in_classes = (view.slots.protection & profile.class_mask[..., None]) > 0
        generated = (view.slots.protection & GENERATED) > 0
        recent = jnp.maximum(window, self.recent - 1) + (not new.given)
        # floor(r_f L) for L earlier tokens; 0 in heads without frequent tokens, no bound in full heads.
        frequent = _share(self.frequent, length_before(new))[:, None]
        limit = jnp.where((profile.class_mask & FREQUENT) > 0, frequent, 0)
        limit = jnp.where((profile.class_mask & EVERYTHING) > 0, jnp.iinfo(jnp.int32).max, limit)
        quota = Quota(limit, self.frequent_among == "all")
        return Protected(jnp.zeros_like(view.limit), recent, in_classes & ~generated, in_classes & generated, quota)


class Profiled(Uniform):
    r"""Plan that gives each head the slots of the cheapest choice that recovers its attention on the prompt.

    .. math::
        C^* = \arg\min_{C \in \mathcal C} \mathrm{cost}(C) \quad \text{such that} \quad
        \frac 1 n \sum_{i=1}^n \sum_{j \in C_i} \bar a_i(j) \ge T \quad \text{(eq. 1)}

    with the attention a averaged over the query heads of a KV head. The choices C are the first one, two, ... of
    `order` together, and the full cache (eq. 2). Row i of the prompt's attention map has its own window in eq. 1: the
    floor(local i) newest tokens, always including token i. Frequent tokens are the floor(frequent n) tokens with the
    most attention from all n queries, the same in every row.

    After L tokens a head keeps those of the following that its choice names (Algorithm 2, line 5):

    - special tokens and punctuation, those of the prompt always and generated ones while their slots suffice;
    - its floor(local L) newest tokens;
    - the floor(frequent L) tokens with the highest scores among all its tokens. A token that is also kept for another
      reason counts here, too, and a token that leaves the local window may stay as a frequent one (section 3.2: the
      union). If the order of scores changes, one step may evict several tokens; evicted tokens never return;
    - everything, under the full cache.

    The next token attends to these and to itself. Its window and its frequent tokens are fractions of the L tokens
    before it.

    Slots are allocated for a text of prompt + `max_new_tokens`; logits beyond that length are NaN. Generated special
    tokens get 8 slots by default, and generated punctuation 0.35 of `max_new_tokens`. In five texts (stories, books,
    Wikipedia; the tokenizers of the embedded model and of SmolLM2) no 1024 tokens have more than 7 special ones, and
    99% of the passages of 32 or more tokens have at most 0.344 punctuation. If these slots still do not suffice, the
    oldest of such tokens outside the local window is evicted, and the run's summary reports the number. If a turn
    exceeds the slots, frequent tokens with the lowest scores are evicted first, then the oldest tokens. Markers of
    several tokens are recognized only in prompts and turns.

    Args:
        threshold: T, fraction of the attention to recover, in (0, 1]; 1 is the full cache.
        local: r_l, width of the local window as a fraction of the current length, in [0, 1].
        frequent, frequent_among, recent: as in `TokenClasses`.
        order: token classes in the order in which choices add them: some of `special`, `punctuation`, `frequent`,
            `local`.
        spare_special: slots for generated special tokens in heads that keep them, at least 0.
        spare_punctuation: slots for generated punctuation, as a fraction of `max_new_tokens`.
    """

    threshold: float = number(0.95, Limit(lambda share: 0 < share <= 1, "a share of attention in (0, 1]"))
    local: float = setting(0.3, share("a share of the length"))
    frequent: float = number(0.3, share("a share of the length"))
    order: tuple[str, ...] = setting(PARTS, _ORDER)
    spare_special: int = number(8, at_least(0, "a number of slots"))
    spare_punctuation: float = number(0.35, share("a share of the new tokens"))
    recent: int = setting(0)
    frequent_among: str = setting("all", one_of("all", "others"))

    @property
    def sizing(self) -> Sizing:
        overtaken = self.frequent_among == "all" and "frequent" in self.order
        return Sizing(mode="profiled", per_head=True, fixed_length=True, may_shrink=overtaken)

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """Token classes of each choice; the full cache comes last and has none."""
        return (*(self.order[: i + 1] for i in range(len(self.order))), ())

    def init_head(self, shape: LayerTokens) -> Profile:
        rows, heads = shape.k.shape[:2]
        none = jnp.zeros((rows, heads), wide(shape.k.dtype))
        return Profile(
            choice=jnp.full((rows, heads), len(self.order), jnp.int32),
            recovered=jnp.zeros((rows, heads, len(self.order)), none.dtype),
            class_mask=jnp.full((rows, heads), EVERYTHING, jnp.uint8),
            local=none,
        )

    def attention_stats(self, heads: Heads, new: LayerTokens) -> tuple[AttentionSum, LocalAttention, LocalAttention]:
        """Request the attention to each prompt token from all queries, from those nearby, and from itself."""
        widest = max(int(self.local * new.position.shape[1]) + 1, self.recent, 1)
        newest = (
            LocalAttention(jnp.full_like(new.position, self.recent), self.recent)
            if self.recent > 1
            else LocalAttention()
        )
        # The window of a row of eq. 1 in tokens, the row's own token included.
        window = jnp.maximum(_share(self.local, new.position + 1), max(1, self.recent))
        return AttentionSum(), LocalAttention(window, widest), newest

    def head_budgets(
        self, stats: tuple[Array, Array, Array], view: View, ranks: Float[Array, "b h c"] | None, new: LayerTokens
    ) -> tuple[Int[Array, "b h"], Profile]:
        """Return the slots of the first choice whose recovered attention, averaged over queries, reaches T (eq. 1)."""
        total, local, newest = stats
        position, classes = view.position, view.slots.protection
        queries = (new.q.shape[2] * new.read)[:, None]
        recovered = []
        for parts in self.choices[:-1]:
            in_classes = view.live & ((classes & _class_mask(parts)) > 0)
            near = local if "local" in parts else newest
            mass = jnp.where(in_classes, total, near).sum(-1)
            if "frequent" in parts:
                among = view.live
                if self.frequent_among == "others":
                    width = self._newest(new.read, "local" in parts)
                    among &= ~in_classes & (position <= (new.newest - width)[:, None, None])
                gain, quota = jnp.where(in_classes, 0.0, total - near), _share(self.frequent, new.read)[:, None]
                mass += sum_of_top(jnp.where(among, total, -jnp.inf), position, gain, quota)
            recovered.append(mass / queries)
        last = len(self.order)
        shares = jnp.stack(recovered, axis=-1)
        enough = (shares >= self.threshold) & (self.threshold < 1)
        choice = jnp.where(enough.any(-1), jnp.argmax(enough, axis=-1).astype(jnp.int32), last)
        class_mask = jnp.asarray([_class_mask(parts) for parts in self.choices], jnp.uint8)[choice]
        window = jnp.asarray([self.local * ("local" in parts) for parts in self.choices], total.dtype)[choice]
        class_tokens = (view.live & ((classes & class_mask[..., None]) > 0)).sum(-1, dtype=jnp.int32)
        return self._slots(choice, class_tokens, new), Profile(choice, shares.astype(total.dtype), class_mask, window)

    def _newest(self, length: Int[Array, "*b"], local: bool | Bool[Array, "b h"]) -> Int[Array, "..."]:
        """Return the number of newest tokens that heads keep after `length` tokens, with a local window or without."""
        return jnp.maximum(jnp.where(local, _share(self.local, length), 0), max(0, self.recent - 1))

    def _has(self, part: str, choice: Int[Array, "b h"]) -> Bool[Array, "b h"]:
        return jnp.asarray([part in parts for parts in self.choices])[choice]

    def _slots(self, choice: Array, class_tokens: Array, new: LayerTokens) -> Int[Array, "b h"]:
        """Return the slots that heads need up to the planned length of the text."""
        end = new.end[:, None]
        spare = jnp.ceil(self.spare_punctuation * new.horizon - 1e-6).astype(jnp.int32)[:, None]
        slots = class_tokens + jnp.where(self._has("special", choice), self.spare_special, 0)
        slots += jnp.where(self._has("punctuation", choice), spare, 0)

        def shares(length: Int[Array, "b 1"]) -> Int[Array, "b h"]:
            frequent = jnp.where(self._has("frequent", choice), _share(self.frequent, length), 0)
            return frequent + self._newest(length, self._has("local", choice))

        # The last token attends to what is kept before it, and itself; a turn may end where the text does.
        slots += jnp.maximum(shares(end - 1) + 1, shares(end))
        return jnp.where(choice == len(self.order), end, jnp.minimum(slots, end))


def length_before(new: LayerTokens) -> Int[Array, " b"]:
    """Return the length L of Algorithm 2: all tokens of a prompt, or in a decode step those before the new one."""
    return jnp.minimum(new.read - (not new.given), new.end)


def _share(share: Any, length: Int[Array, "..."]) -> Int[Array, "..."]:
    return jnp.floor(share * length + 1e-6).astype(jnp.int32)


def _class_mask(parts: tuple[str, ...]) -> int:
    # A choice without parts is the full cache.
    bits = {"special": SPECIAL, "punctuation": PUNCTUATION, "frequent": FREQUENT}
    return sum(bits.get(part, 0) for part in parts) if parts else EVERYTHING


@register(paper="FastGen, eq. 1, 2", group="ranked by attention at every token")
def fastgen(
    *,
    threshold: float = Profiled.threshold,
    local: float = Profiled.local,
    frequent: float = Profiled.frequent,
    frequent_among: str = Profiled.frequent_among,
    order: tuple[str, ...] = Profiled.order,
    punctuation: tuple[int, ...] = TokenClasses.punctuation,
    markers: tuple[tuple[int, ...], ...] = TokenClasses.markers,
    spare_special: int = Profiled.spare_special,
    spare_punctuation: float = Profiled.spare_punctuation,
    sinks: int = 0,
    recent: int = 0,
    special: tuple[int, ...] = (),
    **common: Any,
) -> Policy:
    """Keep in each head the cheapest combination of token classes that recovers its attention on the prompt.

    When: only close to the full cache. A threshold of 0.95 saves 15% of the bytes for 12% in perplexity, and below 0.8
    perplexity collapses (SmolLM2 on WikiText-2).
    """
    of_frequent: dict[str, Any] = dict(frequent=frequent, frequent_among=frequent_among)
    protection = TokenClasses(sinks, recent, special, punctuation=punctuation, markers=markers, **of_frequent)
    plan = Profiled(threshold, local, frequent, order, spare_special, spare_punctuation, recent, frequent_among)
    return combine(Accumulated(), protection=protection, plan=plan, **common)
