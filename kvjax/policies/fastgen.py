"""FastGen: the prompt tells each head what it may forget."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import last_resort
from kvjax.policies.base import Policy, check
from kvjax.types import NewTokens, Weighing, setting, wide

PARTS = ("special", "punctuation", "frequent", "local")
SPECIAL, PUNCTUATION = 1, 2


class FastGenState(struct.PyTreeNode):
    """What a layer's heads were found to do."""

    choice: Int[Array, "b h"]
    """Index into `FastGen.choices`."""
    recovered: Float[Array, "b h choices"]
    """Share of the prompt's attention that each choice but the full cache recovers, a mean over query rows."""


@struct.dataclass(kw_only=True)
class FastGen(Policy):
    r"""A cache of its own for every head, the cheapest that recovers the prompt's attention.

    .. math::
        C^* = \arg\min_{C \in \mathcal C} \mathrm{cost}(C) \quad \text{such that} \quad
        \frac 1 n \sum_{i=1}^n \sum_{j \in C_i} \bar a_i(j) \ge T \quad \text{(eq. 1)}

    with the attention a averaged over the query heads of a KV head, and C the first one, two, ... of `order` together,
    or the full cache (eq. 2). At a text of L tokens a head then holds

    - special tokens and punctuation of the prompt, always, and those that are generated,
    - its floor(local L) newest tokens,
    - of the others those floor(frequent L) that gathered most attention,
    - or everything,

    as far as its choice names them. The newest token is always there, in eq. 1, too. Slots are set aside for a text of
    prompt + `max_new_tokens`; logits beyond are NaN. When generated punctuation outgrows the slots set aside for it,
    its oldest token outside the local window leaves. Markers of several tokens are recognised in the prompt only.

    Args:
        threshold: T, share of the attention to recover, in (0, 1]; 1 is the full cache.
        local: r_l, the newest tokens' share of the current length, in [0, 1].
        frequent: r_f, the most attended tokens' share of the current length, in [0, 1].
        order: what is tried, one more at a time: some of `special`, `punctuation`, `frequent`, `local`.
        special: ids that count as special tokens.
        punctuation: ids that count as punctuation.
        markers: sequences of ids that count as special. If none of these three is given, the model's tokenizer tells.
        spare_special: slots set aside for generated special tokens, in heads that keep them.
        spare_punctuation: slots set aside for generated punctuation, as a share of `max_new_tokens`.
        sinks: first tokens that count as special.
        recent: newest tokens that every head holds, a number from 0.
    """

    needs_probs = True
    decides_slots = True
    pages = True
    ends = True
    paper = "FastGen, arXiv 2310.01801, equations 1 and 2, Algorithms 1 and 2"

    threshold: float = setting(0.95)
    local: float = setting(0.3)
    frequent: float = setting(0.3)
    order: tuple[str, ...] = setting(PARTS)
    punctuation: tuple[int, ...] = setting(())
    markers: tuple[tuple[int, ...], ...] = setting(())
    spare_special: int = setting(4)
    spare_punctuation: float = setting(0.2)
    classes: Any = None
    """uint8 [vocab]: bits SPECIAL and PUNCTUATION; made by `bind`."""

    def __post_init__(self):
        super().__post_init__()
        check(0 < self.threshold <= 1, "threshold", self.threshold, "a share of attention in (0, 1]")
        check(0 <= self.local <= 1, "local", self.local, "a share of the length in [0, 1]")
        check(0 <= self.frequent <= 1, "frequent", self.frequent, "a share of the length in [0, 1]")
        known = isinstance(self.order, tuple) and set(self.order) <= set(PARTS)
        check(known and len(set(self.order)) == len(self.order), "order", self.order, f"some of {', '.join(PARTS)}")
        check(isinstance(self.recent, int), "recent", self.recent, "a number of tokens from 0")
        whole = isinstance(self.spare_special, int) and self.spare_special >= 0
        check(whole, "spare_special", self.spare_special, "a number of slots from 0")
        share = 0 <= self.spare_punctuation <= 1
        check(share, "spare_punctuation", self.spare_punctuation, "a share of the new tokens in [0, 1]")
        check(self.positions == "original", "positions", self.positions, "'original', which heads of own sizes need")

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """What each choice keeps, the full cache last and without parts."""
        return (*(self.order[: i + 1] for i in range(len(self.order))), ())

    def bind(self, model):
        """The policy with the classes of the model's tokens."""
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
                found = model.token_classes
            except ValueError as error:
                raise ValueError(f"fastgen needs special=(ids) or punctuation=(ids) here: {error}") from None
            special, punctuation, markers = found.special, found.punctuation, found.markers
        classes = np.zeros(size, np.uint8)
        for ids, bit in ((special, SPECIAL), (punctuation, PUNCTUATION)):
            classes[[i for i in ids if 0 <= i < size]] |= bit
        # From here on the table says what is special: ids in `special` would be protected in every head.
        return dataclasses.replace(self, classes=jnp.asarray(classes), markers=tuple(map(tuple, markers)), special=())

    def init(self, new):
        """Nothing is known."""
        rows, heads = new.k.shape[:2]
        recovered = jnp.zeros((rows, heads, len(self.order)), wide(new.k.dtype))
        return FastGenState(jnp.full((rows, heads), len(self.order), jnp.int32), recovered)

    def stats(self, new, state):
        """Of a prompt the attention that each token gets: of all queries, of those it is local to, of itself."""
        nothing = jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
        if new.k.shape[2] != 1:
            return nothing, nothing, nothing
        return nothing, self._kept(self.classes[new.token], state.choice)

    def observe(self, cache, probs, new):
        """Accumulated attention, as in H2O."""
        total, kept = cache.stats
        return cache.replace(stats=(total + probs.sum((2, 3)), kept))

    def weighing(self, cache, new):
        """Every query counts."""
        return Weighing()

    def summed(self, cache, sums, new):
        """Accumulated attention, all of the prompt at once."""
        return cache.replace(stats=(sums.sum(2), *cache.stats[1:]))

    def near(self, cache, sums, new):
        """Of a prompt also what falls into the local windows, and on the newest tokens, of its queries."""
        most = max(int(self.local * new.position.shape[1]) + 1, self.recent, 1)
        local = sums(self._window(new.position + 1), most)
        newest = sums(jnp.full_like(new.position, self.recent), self.recent) if self.recent > 1 else sums()
        return cache.replace(stats=(cache.stats[0], local, newest))

    def commit(self, cache, new):
        """Equation 1: the first choice whose recovered attention, a mean over the prompt's queries, reaches T."""
        total, local, newest = cache.stats
        position = cache.position
        classes = self._prompt_classes(new)[:, None]
        queries = (new.q.shape[2] * new.read)[:, None]
        live = position >= 0
        recovered = []
        for parts in self.choices[:-1]:
            kept = live & jnp.broadcast_to(self._is_kept(classes, parts), position.shape)
            near = local if "local" in parts else newest
            mass = jnp.where(kept, total, near).sum(-1)
            if "frequent" in parts:
                width = self._window(new.read) if "local" in parts else jnp.full_like(new.read, max(1, self.recent))
                free = live & ~kept & (position <= (new.newest - width)[:, None, None])
                mass += _gain_of_most(jnp.where(free, total, -1.0), position, total - near, self._frequent(new.read))
            recovered.append(mass / queries)
        last = len(self.order)
        choice, shares = jnp.full(position.shape[:2], last, jnp.int32), jnp.zeros((*position.shape[:2], last))
        if recovered:
            shares = jnp.stack(recovered, axis=-1)
            enough = (shares >= self.threshold) & (self.threshold < 1)
            choice = jnp.where(enough.any(-1), jnp.argmax(enough, axis=-1).astype(jnp.int32), last)
        kept = self._kept(classes[:, 0], choice) & live
        state = FastGenState(choice, shares.astype(total.dtype))
        limit = self._slots(choice, kept.sum(-1, dtype=jnp.int32), new)
        return cache.replace(stats=(total, kept), state=state, limit=limit)

    def score(self, cache, new):
        """Score = accumulated attention; the local window, special tokens and punctuation stay."""
        total, kept = cache.stats
        window = self._window(self._length(new))[:, None]
        width = jnp.where(self._has("local", cache.state.choice), window, max(1, self.recent))
        inside = cache.position > (new.newest[:, None] - width)[..., None]
        in_prompt = cache.position < new.prompt_length[:, None, None]
        stays = jnp.where(in_prompt, jnp.inf, last_resort(total.dtype))
        return jnp.where(inside, jnp.inf, jnp.where(kept, stays, total))

    def competing(self, cache, new):
        """The floor(r_f L) most attended; none in heads without them, all in full ones."""
        choice = cache.state.choice
        most = jnp.where(self._has("frequent", choice), self._frequent(self._length(new))[:, None], 0)
        return jnp.where(choice == len(self.order), jnp.iinfo(jnp.int32).max, most)

    def _length(self, new: NewTokens) -> Int[Array, " b"]:
        return jnp.minimum(new.read, new.prompt_length + new.horizon)

    def _window(self, length: Array) -> Array:
        return jnp.maximum(jnp.floor(self.local * length + 1e-6).astype(jnp.int32), max(1, self.recent))

    def _frequent(self, length: Array) -> Array:
        return jnp.floor(self.frequent * length + 1e-6).astype(jnp.int32)

    def _has(self, part: str, choice: Int[Array, "b h"]) -> Bool[Array, "b h"]:
        return jnp.asarray([part in parts for parts in self.choices])[choice]

    def _kept(self, classes: Int[Array, "b t"], choice: Int[Array, "b h"]) -> Bool[Array, "b h t"]:
        # Full heads need no flags: nothing in them competes.
        wanted = SPECIAL * self._has("special", choice) + PUNCTUATION * self._has("punctuation", choice)
        return (classes[:, None] & wanted[..., None].astype(jnp.uint8)) > 0

    def _is_kept(self, classes: Array, parts: tuple[str, ...]) -> Array:
        return (classes & (SPECIAL * ("special" in parts) + PUNCTUATION * ("punctuation" in parts))) > 0

    def _prompt_classes(self, new: NewTokens) -> Int[Array, "b t"]:
        """Classes of a prompt's tokens, those of markers and sinks included."""
        classes = self.classes[new.token]
        special = new.position < self.sinks
        for marker in self.markers:
            width = new.token.shape[1] - len(marker) + 1
            if width < 1:
                continue
            match = jnp.ones((new.token.shape[0], width), bool)
            for i, token in enumerate(marker):
                match &= (new.token[:, i : i + width] == token) & new.valid[:, i : i + width]
            for i in range(len(marker)):
                special = special.at[:, i : i + width].max(match)
        return classes | (SPECIAL * special).astype(jnp.uint8)

    def _slots(self, choice: Array, kept: Array, new: NewTokens) -> Int[Array, "b h"]:
        """Slots that heads call for, up to the text's planned end."""
        end = (new.prompt_length + new.horizon)[:, None]
        spare = jnp.ceil(self.spare_punctuation * new.horizon - 1e-6).astype(jnp.int32)[:, None]
        slots = kept + jnp.where(self._has("special", choice), self.spare_special, 0)
        slots += jnp.where(self._has("punctuation", choice), spare, 0)
        slots += jnp.where(self._has("frequent", choice), self._frequent(end), 0)
        slots += jnp.where(self._has("local", choice), self._window(end), max(1, self.recent))
        return jnp.where(choice == len(self.order), end, jnp.minimum(slots, end))


def _gain_of_most(
    score: Float[Array, "b h c"], position: Int[Array, "b h c"], gain: Float[Array, "b h c"], most: Int[Array, " b"]
) -> Float[Array, "b h"]:
    """What the `most` highest scores gain together; of equals the newest count, negative scores never."""
    ranked, _, gained = jax.lax.sort((-score, -position, gain), num_keys=2)
    counts = (jnp.arange(score.shape[-1]) < most[:, None, None]) & (ranked <= 0)
    return jnp.where(counts, gained, 0.0).sum(-1)
