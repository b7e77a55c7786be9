"""Conversations in a cache of fixed size: each turn is added to the tokens that the policy kept."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.generation.generate import begin, check_room
from kvjax.generation.keywords import TextKeywords
from kvjax.generation.loop import PrefilledBatch
from kvjax.generation.prompts import chat_ids, render, token_ids, with_system
from kvjax.generation.sampling import sampling_of
from kvjax.generation.saved_chat import read_conversation, save_conversation
from kvjax.inference.extend import extend
from kvjax.inference.prepare import instead, longest_text, prepare
from kvjax.inference.state import State, cache_bytes, described, held_positions, slot_limits
from kvjax.methods.registry import policy as policy_by_name
from kvjax.models.fingerprint import fingerprint
from kvjax.types import ROWS
from kvjax.utils.settings import check_keywords, keywords, template_settings, whole_number

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


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
        chat: settings of the chat template, such as {"enable_thinking": False}; None for its defaults.
        settings: those of `kvjax.generation.generate.begin`, for one text.

    Raises:
        ValueError: a setting is out of range, there is a system turn but no chat template, or the template rewrites
            earlier turns when another one follows, so that the cache cannot be extended.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        context: int | None = None,
        chat: Mapping[str, Any] | None = None,
        **settings: Unpack[TextKeywords],
    ) -> None:
        self.model, self.system, self.settings = model, system, settings
        self.max_new_tokens = whole_number("max_new_tokens", settings.get("max_new_tokens", 128))
        self.context = model.config.max_positions if context is None else whole_number("context", context, 2)
        self.templated = bool(getattr(model.tokenizer, "chat_template", None))
        names = (name for name in keywords(begin) if name not in ("num_samples", "chat", "rope_length"))
        check_keywords("Conversation", settings, names)
        self._check()
        self.chat = template_settings({} if chat is None else chat)
        for name, value in (("system's turn", system), ("settings of one", chat)):
            if value is not None and not self.templated:
                raise ValueError(f"the tokenizer of {model.name!r} has no chat template, so no {name}; leave it out.")
        self.batch: PrefilledBatch | None = None
        """Prefilled state to continue from; None before the first turn."""
        self.text: list[int] = []
        """Ids of the conversation, in order; the last one may not be in the cache yet."""
        self._first, self._between = self._affixes() if self.templated else (("", ""), ("", ""))

    def _check(self) -> None:
        # Raises every error that would occur with any first turn.
        check_devices(1 if self.model.mesh is None else self.model.mesh.shape[ROWS])
        tokens, settings = min(64, self.context - 1), self.settings
        sampling_of(self.model.sampling_defaults, settings)
        policy, budget = policy_by_name(settings.get("policy", "full")), settings.get("budget", 1.0)
        names = {"plan": "plan", "prefill_chunk": "chunk", "budget_of": "budget_of"}
        reading: dict[str, Any] = {"plan": None} | {names[name]: settings[name] for name in names if name in settings}
        planned = self.context - tokens
        check_room(tokens, planned, policy, self.model)
        reading |= dict(max_new_tokens=planned, key=None)
        prompts = prepare(self.model, policy, [[0] * tokens], budget, None, **reading)
        # Without loss, the full cache bounds the text.
        verifier = settings.get("verifier", "full")
        self.policy = policy_by_name(verifier) if settings.get("lossless") else prompts.policy

    def _affixes(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the template's text around the first turn, and around a later turn from the end of the last answer."""
        turn, follow_up, reply = "Qzjx", "Wkvq", "Xjqz"
        first = with_system([{"role": "user", "content": turn}], self.system)
        next_turn = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": follow_up}]
        begins, goes_on = (render(self.model, turns, settings=self.chat) for turns in (first, next_turn))
        before_reply, _, after_reply = goes_on.partition(reply)
        # The cache keeps what the template puts before a new answer alone, such as thoughts that are empty.
        same = begins.startswith(before_reply) and before_reply.count(turn) == begins.count(turn) == 1
        if not same or after_reply.count(follow_up) != 1:
            raise ValueError(
                f"the chat template of {self.model.name!r} writes earlier turns differently when another one follows, "
                "so their cache cannot be continued; use kvjax generate --messages, which reads all turns again."
            )
        before, _, after = begins.partition(turn)
        between, _, end = after_reply.partition(follow_up)
        return (before, after), (between, end)

    def reply(self, turn: str) -> Iterator[str]:
        """Read a turn and yield the answer in pieces.

        To stop the answer, stop iterating: the tokens generated so far stay in the conversation.

        Raises:
            ValueError: the turn is empty, is not valid text, or exceeds the model's positions or the planned length.
        """
        if not turn.strip():
            raise ValueError("the turn is empty; give some text.")
        first = self.batch is None
        before, after = self._first if first else self._between
        text = before + turn + after
        ids = chat_ids(self.model, text) if first and self.templated else token_ids(self.model, text, begins=first)
        batch = self._read(ids)
        for block, piece in batch.pieces():
            if block is not None:
                self.batch = dataclasses.replace(batch, state=block.state)
                self.text += block.tokens[0][block.belongs[0]].tolist()
            if piece:
                yield piece

    def _read(self, ids: list[int]) -> PrefilledBatch:
        text, batch = self.text + ids, self.batch
        end = self.context if batch is None else int(batch.state.end[0])
        if batch is None:
            self._answer_room(len(text), end)
        room = self._answer_room(len(text), self._end(end))
        rope_length = self._rope_length(len(text) + room)
        if batch is None or self._rotates_otherwise(batch.state, rope_length):
            new = max(end - len(text), room)
            planned: dict[str, Any] = {**self.settings, "max_new_tokens": new, "rope_length": rope_length, "chat": True}
            batch = begin(self.model, [text], **planned)
        else:
            read = int(batch.state.position[0])
            # The last token of an answer that was cut has not been read yet.
            chunk = self.settings.get("prefill_chunk")
            state, logits = extend(batch.state, [text[read:]], prefill_chunk=chunk)
            batch = dataclasses.replace(batch, state=state, logits=logits)
        self.batch, self.text = dataclasses.replace(batch, prompts=[text], max_new_tokens=room), list(text)
        return self.batch

    def _rope_length(self, length: int) -> int:
        """Return the length that decides the frequencies of RoPE, for a conversation with an answer up to `length`.

        If these are not those of a short text, they are those of the whole context.
        """
        both = self.model.config.rope_length(np.array([1, length]))
        return length if both is None or both[0] == both[1] else max(length, self.context)

    def _rotates_otherwise(self, state: State, rope_length: int) -> bool:
        """Return whether keys in the cache have other RoPE frequencies than a text of this length."""
        target, cached = self.model.config.rope_length(np.array([rope_length])), state.cache.rope_length
        return target is not None and cached is not None and target[0] != int(cached[0])

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
        self.batch, self.text = None, []

    def use(self) -> CacheUse:
        """Return the cache's usage."""
        state = self._state()
        slots = np.mean([(positions >= 0).sum(-1).mean() for positions in held_positions(state)])
        limit = np.mean([limits.mean() for limits in slot_limits(state)])
        return CacheUse(int(state.position[0]), float(slots), float(limit), cache_bytes(state))

    def _state(self) -> State:
        if self.batch is None:
            raise ValueError("the conversation has no turn yet; send one first.")
        return self.batch.state

    def save(self, directory: str | Path) -> None:
        """Save the conversation in a directory, atomically, and replace one saved there before.

        Raises:
            ValueError: there has been no turn yet, the directory contains something else, or it cannot be written.
        """
        state = self._state()
        save_conversation(Path(directory).absolute(), self.text, self._fits(state), state.cache)

    def load(self, directory: str | Path) -> None:
        """Load a conversation that was saved with the same model, policy and policy settings.

        It keeps the budget and the planned length that it was saved with.

        Raises:
            ValueError: the directory has no conversation, a damaged one, or one of another model or policy.
        """
        saved = read_conversation(Path(directory).absolute())
        another = f"{saved.directory} has a conversation of another model, policy or dtype; start with those."
        if max(saved.text) >= self.model.config.vocab_size:
            raise ValueError(another)
        first = saved.text[:64]  # enough for every policy that could read its first turn
        planned: dict[str, Any] = self.settings | {"max_new_tokens": max(self.context - len(first), 1), "chat": True}
        like = begin(self.model, [first], **planned)
        if saved.digest is None:
            message = f"{saved.directory} was saved by an older kvjax, so its model and policy cannot be checked."
            warnings.warn(message, stacklevel=2)
        elif saved.fits != self._fits(like.state):
            raise ValueError(another)
        if not saved.matches(like.state.cache):
            raise ValueError(another)
        state = State(like.state.decoder, saved.restore(like.state.cache))
        tokens = int(state.position[0])
        if len(saved.text) - tokens not in (0, 1):  # the last one may not have been read yet
            raise saved.damaged(f"its text has {len(saved.text)} tokens, and its cache is that of {tokens}")
        if any(positions.max() >= tokens for positions in held_positions(state)):
            raise saved.damaged(f"its cache has positions beyond its {tokens} tokens")
        self.batch, self.text = dataclasses.replace(like, state=state), saved.text

    def _fits(self, state: State) -> str:
        """Return a hash of the model, the policy and the structure of a state, without its arrays."""
        structure = (
            jax.tree.structure(state.cache),
            state.config,
            *(described(decoder.policy) for decoder in state.decoder.decoders),
            fingerprint(self.model),
        )
        digest = hashlib.sha256("\n".join(map(str, structure)).encode())
        digest.update(np.asarray(self.model.weights.table.rows(jnp.arange(1))).tobytes())
        return digest.hexdigest()
