"""Conversations in a cache of fixed size: each turn is added to the tokens that the policy kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.generation.generate import begin, check_room
from kvjax.generation.loop import Begun
from kvjax.generation.prompts import chat_ids, render, token_ids, with_system
from kvjax.inference.cache import Cache
from kvjax.inference.extend import extend
from kvjax.inference.prepare import instead, longest_text, prepare
from kvjax.inference.state import State, cache_bytes, described, held_positions, slot_limits
from kvjax.methods.registry import policy as policy_by_name
from kvjax.types import ROWS
from kvjax.utils.files import directory_aside, recover_directory
from kvjax.utils.settings import check_keywords, keywords, whole_number

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel

SAVED = "conversation.json"
"""Name of the file with the parts of a saved conversation that are not arrays; it is written last."""
FORM = 2
"""Form of saved conversations; those of kvjax 0.2.0 name none."""


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """Memory that a conversation uses in the cache."""

    tokens: int
    """Tokens read so far."""
    slots: float
    """Occupied slots per head, averaged over layers and heads."""
    limit: float
    """Slots that each head may use, averaged over layers and heads."""
    bytes: int
    """Size of the buffers, which does not change."""


def check_devices(data: int) -> None:
    """Refuse a mesh that shards rows over `data`, because a conversation has only one row."""
    if data > 1:
        raise ValueError(
            f"a conversation is one row and cannot be sharded over data={data}; use a mesh without data, such as "
            f"model={data}."
        )


class Conversation:
    """A conversation between a user and the model, whose cache contains the tokens that the policy keeps.

    The tokens of an answer stay in the cache as they were generated. Before the next answer, the model reads the text
    that the chat template puts between two answers. Without a chat template, the model reads the turns unchanged and
    each answer continues them.

    Keys that are in the cache cannot be rotated again. If RoPE has other frequencies for long texts, the model reads
    the whole conversation again before the first answer that could outgrow the original context.

    Args:
        system: the system turn, before all others; None for the template's default.
        context: tokens of the whole conversation, for policies that plan ahead; None for the model's positions.
        settings: those of `kvjax.generation.generate.begin`, for one text.

    Raises:
        ValueError: a setting is out of range, there is a system turn but no chat template, or the template rewrites
            earlier turns when another one follows, so that the cache cannot be extended.
    """

    def __init__(
        self, model: LanguageModel, *, system: str | None = None, context: int | None = None, **settings: Any
    ) -> None:
        self.model, self.system, self.settings = model, system, settings
        self.max_new_tokens = whole_number("max_new_tokens", settings.get("max_new_tokens", 128))
        self.context = model.config.max_positions if context is None else whole_number("context", context, 2)
        self.templated = bool(getattr(model.tokenizer, "chat_template", None))
        known = (name for name in keywords(begin) if name not in ("num_samples", "chat", "rope_length"))
        check_keywords("Conversation", settings, known)
        self._check()
        if system is not None and not self.templated:
            raise ValueError(
                f"the tokenizer of {model.name!r} has no chat template, so no system's turn; leave it out."
            )
        self.begun: Begun | None = None
        """Prefilled state to continue from; None before the first turn."""
        self.text: list[int] = []
        """Ids of the conversation, in order; the last one may not be in the cache yet."""
        self._first, self._between = self._affixes() if self.templated else (("", ""), ("", ""))

    def _check(self) -> None:
        # Raises every error that would occur with any first turn.
        check_devices(1 if self.model.mesh is None else self.model.mesh.shape[ROWS])
        tokens, given = min(64, self.context - 1), self.settings
        policy, budget = policy_by_name(given.get("policy", "full")), given.get("budget", 1.0)
        names = {"plan": "plan", "prefill_chunk": "chunk", "budget_of": "budget_of"}
        reading: dict[str, Any] = {"plan": None} | {names[name]: given[name] for name in names if name in given}
        planned = self.context - tokens
        check_room(tokens, planned, policy, self.model)
        reading |= dict(max_new_tokens=planned, key=None)
        self.policy = prepare(self.model, policy, [[0] * tokens], budget, None, **reading).policy

    def _affixes(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the template's text around the first turn, and around a later turn from the end of the last answer."""
        turn, other, reply = "Qzjx", "Wkvq", "Xjqz"
        first = with_system([{"role": "user", "content": turn}], self.system)
        next_turn = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": other}]
        begins, goes_on = render(self.model, first), render(self.model, next_turn)
        if not goes_on.startswith(begins + reply) or begins.count(turn) != 1 or goes_on.count(other) != 1:
            raise ValueError(
                f"the chat template of {self.model.name!r} writes earlier turns differently when another one follows, "
                "so their cache cannot be continued; use kvjax generate --messages, which reads all turns again."
            )
        before, _, after = begins.partition(turn)
        between, _, end = goes_on.removeprefix(begins + reply).partition(other)
        return (before, after), (between, end)

    def reply(self, turn: str) -> Iterator[str]:
        """Read a turn and yield the answer in pieces.

        To stop the answer, stop iterating: the tokens generated so far stay in the conversation.

        Raises:
            ValueError: the turn is empty, is not valid text, or exceeds the model's positions or the planned length.
        """
        if not turn.strip():
            raise ValueError("the turn is empty; give some text.")
        first = self.begun is None
        before, after = self._first if first else self._between
        text = before + turn + after
        ids = chat_ids(self.model, text) if first and self.templated else token_ids(self.model, text, begins=first)
        begun = self._read(ids)
        for block, piece in begun.pieces():
            if block is not None:
                self.begun = dataclasses.replace(begun, state=block.state)
                self.text += block.tokens[0][block.belongs[0]].tolist()
            if piece:
                yield piece

    def _read(self, ids: list[int]) -> Begun:
        text, begun = self.text + ids, self.begun
        end = self.context if begun is None else int(begun.state.end[0])
        if begun is None:
            self._answer_room(len(text), end)
        room = self._answer_room(len(text), self._end(end))
        rope_length = self._rope_length(len(text) + room)
        if begun is None or self._rotates_otherwise(begun.state, rope_length):
            planned: dict[str, Any] = dict(
                max_new_tokens=max(end - len(text), room), rope_length=rope_length, chat=True
            )
            begun = begin(self.model, [text], **(self.settings | planned))
        else:
            read = int(begun.state.position[0])
            # The last token of an answer that was cut has not been read yet.
            chunk = self.settings.get("prefill_chunk")
            state, logits = extend(begun.state, [text[read:]], prefill_chunk=chunk)
            begun = dataclasses.replace(begun, state=state, logits=logits)
        self.begun, self.text = dataclasses.replace(begun, prompts=[text], max_new_tokens=room), list(text)
        return self.begun

    def _rope_length(self, length: int) -> int:
        """Return the length that decides the frequencies of RoPE, for a conversation with an answer up to `length`.

        If these are not those of a short text, they are those of the whole context.
        """
        both = self.model.config.rope_length(np.array([1, length]))
        return length if both is None or both[0] == both[1] else max(length, self.context)

    def _rotates_otherwise(self, state: State, rope_length: int) -> bool:
        """Return whether keys in the cache have other RoPE frequencies than a text of this length."""
        wanted, cached = self.model.config.rope_length(np.array([rope_length])), state.cache.rope_length
        return wanted is not None and cached is not None and wanted[0] != int(cached[0])

    def _end(self, planned: int) -> float:
        """Return the maximal length of the conversation, in tokens."""
        fixed = self.policy.plan.sizing.fixed_length
        return min(longest_text(self.policy, self.model.config), planned if fixed else math.inf)

    def _answer_room(self, read: int, room: float) -> int:
        if read >= room:
            raise ValueError(
                f"a conversation of {read} tokens leaves no room for an answer in the {room} that are planned; begin a "
                f"new one, plan for more{instead(self.model.config)}."
            )
        return int(min(self.max_new_tokens, room - read))

    def forget(self) -> None:
        """Drop all turns and start a new conversation."""
        self.begun, self.text = None, []

    def use(self) -> CacheUse:
        """Return the cache's usage."""
        state = self._state()
        held = np.mean([(positions >= 0).sum(-1).mean() for positions in held_positions(state)])
        limit = np.mean([limits.mean() for limits in slot_limits(state)])
        return CacheUse(int(state.position[0]), float(held), float(limit), cache_bytes(state))

    def _state(self) -> State:
        if self.begun is None:
            raise ValueError("the conversation has no turn yet; send one first.")
        return self.begun.state

    def save(self, directory: str | Path) -> None:
        """Save the conversation in a directory, atomically, and replace one saved there before.

        Raises:
            ValueError: there has been no turn yet, the directory contains something else, or it cannot be written.
        """
        import orbax.checkpoint as ocp

        directory = Path(directory).absolute()
        recover_directory(directory)
        if directory.exists() and not (directory / SAVED).is_file():
            raise ValueError(f"{directory} exists and is not a saved conversation; give another name.")
        state = self._state()
        leaves = jax.tree.leaves(_stored(state.cache))
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        told = {"form": FORM, "fits": self._fits(state), "text": self.text, "leaves": shapes}
        with directory_aside(directory) as aside:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(aside / "state", leaves)
            (aside / SAVED).write_text(json.dumps(told), encoding="utf-8")

    def load(self, directory: str | Path) -> None:
        """Load a conversation that was saved with the same model, policy and policy settings.

        It keeps the budget and the planned length that it was saved with.

        Raises:
            ValueError: the directory has no conversation, or one of another model or policy.
        """
        import orbax.checkpoint as ocp

        directory = Path(directory).absolute()
        recover_directory(directory)
        if not (directory / SAVED).is_file():
            raise ValueError(f"{directory} has no saved conversation.")
        another = f"{directory} has a conversation of another model, policy or dtype; start with those."
        told = _told(directory / SAVED)
        first = told["text"][:64]  # enough for every policy that could read its first turn
        if max(first) >= self.model.config.vocab_size:
            raise ValueError(another)
        planned: dict[str, Any] = self.settings | {"max_new_tokens": max(self.context - len(first), 1), "chat": True}
        like = begin(self.model, [first], **planned)
        written = kept = _stored(like.state.cache)
        fits = self._fits(like.state) == told["fits"]
        if earlier := told.get("form") != FORM:
            said = f"{directory} was saved by an older kvjax, so its model and policy cannot be checked."
            warnings.warn(said, stacklevel=2)
            written = jax.tree.map(_joined_words, kept, is_leaf=_is_words)
            fits = _kinds(written) == _kinds(told["leaves"])
        if not fits:
            raise ValueError(another)
        empty = [np.empty(leaf.shape, leaf.dtype) for leaf in told["leaves"]]
        with ocp.StandardCheckpointer() as checkpointer:
            leaves = checkpointer.restore(directory / "state", empty)
        found = jax.tree.unflatten(jax.tree.structure(written), map(jnp.asarray, leaves))
        if earlier:
            found = jax.tree.map(_as_words, kept, found, is_leaf=_is_words)
        cache = found.replace(key=jax.random.wrap_key_data(found.key))
        self.begun, self.text = dataclasses.replace(like, state=State(like.state.decoder, cache)), told["text"]

    def _fits(self, state: State) -> str:
        """Return a hash of the model, the policy and the structure of a state, without its arrays."""
        structure = jax.tree.structure(_stored(state.cache)), state.config, *described(state.policy)
        known = hashlib.sha256("\n".join(map(str, structure)).encode())
        known.update(np.asarray(self.model.weights.table.rows(jnp.arange(1))).tobytes())
        return known.hexdigest()


def _told(file: Path) -> dict[str, Any]:
    """Read the parts of a saved conversation that are not arrays; `leaves` become shapes."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        leaves = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in told["leaves"]]
        if "fits" not in told or {type(token) for token in told["text"]} != {int}:
            raise ValueError("there is no text")
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is no saved conversation's; give another name.") from None
    return told | {"leaves": leaves}


def _stored(cache: Cache) -> Cache:
    """Return a cache as it is saved: with random keys as their data."""
    return cache.replace(key=jax.random.key_data(cache.key))


def _is_words(leaf: Any) -> bool:
    """Return whether a leaf is a tuple of LSH-E hash words, which kvjax 0.2.0 saved as one array [b h c words]."""
    return type(leaf) is tuple and len(leaf) > 0 and all(getattr(word, "dtype", None) == jnp.uint32 for word in leaf)


def _kinds(tree: Any) -> list[tuple[int, str]]:
    return [(leaf.ndim, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


def _joined_words(leaf: Any) -> Any:
    return jnp.stack(leaf, -1) if _is_words(leaf) else leaf


def _as_words(now: Any, then: Any) -> Any:
    return tuple(jnp.moveaxis(then, -1, 0)) if _is_words(now) else then
