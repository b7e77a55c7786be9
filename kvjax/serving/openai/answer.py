"""Answers: events of the engine in OpenAI's format, as chunks of a stream or as a whole."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvjax.generation.detokenize import Pieces, Spelling
from kvjax.generation.generate import Logprob
from kvjax.serving.openai.bodies import Asked
from kvjax.serving.requests import Finished, Held, Piece, Serving


@dataclasses.dataclass
class _Choice:
    """Output sent so far for one text."""

    pieces: Pieces
    """Decoder of the tokens with log-probabilities, for text offsets."""
    text: str = ""
    offset: int = 0
    """Number of characters decoded by `pieces`."""
    logprobs: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    finished: Finished | None = None


class Answer:
    """Answer in OpenAI's format, as one chunk per piece or whole at the end."""

    def __init__(self, serving: Serving, asked: Asked) -> None:
        self.serving, self.asked = serving, asked
        tokenizer = serving.model.tokenizer
        self.choices = [_Choice(Pieces(tokenizer, context=each.prompt)) for each in asked.requests]
        self._spelling = Spelling(tokenizer)
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    @property
    def unfinished(self) -> bool:
        """True if a text has not ended."""
        return any(choice.finished is None for choice in self.choices)

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before all others."""
        if not self.asked.chat:
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.choices))]

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Record a piece of a text, and return its chunk, or None if it is empty."""
        choice = self.choices[index]
        choice.text += piece.text
        logprobs = None if piece.logprobs is None else self._logprobs(choice, piece.logprobs)
        for name, values in (logprobs or {}).items():
            choice.logprobs.setdefault(name, []).extend(values)
        if not piece.text and not piece.logprobs:
            return None
        return self._chunk(index, {"content": piece.text} if self.asked.chat else piece.text, logprobs)

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        """Record the end of a text, and return its chunk."""
        self.choices[index].finished = finished
        chunk = self._chunk(index, {} if self.asked.chat else "", None, finished.reason)
        kv = _kv(finished.held)
        chunk["choices"][0]["kv"] = kv
        return chunk | {"kv": kv}

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks after all others."""
        if not self.asked.include_usage:
            return []
        return [self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}]

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self.choices):
            assert choice.finished is not None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message} if self.asked.chat else {"text": choice.text}
            end = {"finish_reason": choice.finished.reason, "kv": _kv(choice.finished.held)}
            choices.append({"index": index, **content, "logprobs": choice.logprobs or None, **end})
        return self._head("chat.completion") | {"choices": choices, "usage": self.usage(), "kv": choices[0]["kv"]}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of prompt tokens, counting each prompt once, and of generated tokens."""
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        firsts = ends[:: self.asked.n]
        read, written = sum(each.prompt_tokens for each in firsts), sum(each.tokens for each in ends)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in firsts)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.asked.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.model.name}

    def _chunk(self, index: int, new: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        new = {"delta" if self.asked.chat else "text": new}
        choice = {"index": index, **new, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.asked.include_usage else {}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | usage

    def _logprobs(self, choice: _Choice, told: Sequence[Logprob]) -> dict[str, list[Any]]:
        tokens = [self._token(each.token, each.logprob) for each in told]
        likeliest = [[self._token(*other) for other in each.likeliest] for each in told]
        if self.asked.chat:
            pairs = zip(tokens, likeliest, strict=True)
            return {"content": [token | {"top_logprobs": others} for token, others in pairs]}
        offsets: list[int] = []
        for each in told:
            offsets.append(choice.offset)
            choice.offset += len(choice.pieces.add([each.token]))
        tables: list[dict[str, float]] = []
        for token, others in zip(tokens, likeliest, strict=True):
            tables.append({})
            for other in [*others, token]:  # among tokens with equal text, keep the likeliest
                tables[-1].setdefault(other["token"], other["logprob"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": tables,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        least = -9999.0  # JSON has no infinity
        return {
            "token": self._spelling.name(token),
            "logprob": max(logprob, least) if math.isfinite(logprob) else least,
            "bytes": self._spelling.byte_list(token),
        }


def _kv(held: Held | None) -> dict[str, Any] | None:
    if held is None:
        return None
    kept = round(float(held.kept), 2)  # the mean over layers and heads; an integer if it is whole
    return held._asdict() | {"kept": int(kept) if kept.is_integer() else kept}
