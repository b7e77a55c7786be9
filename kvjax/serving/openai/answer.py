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
from kvjax.serving.openai.bodies import ParsedBody
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

    def __init__(self, serving: Serving, parsed: ParsedBody) -> None:
        self.serving, self.parsed = serving, parsed
        tokenizer = serving.model.tokenizer
        self.choices = [_Choice(Pieces(tokenizer, context=request.prompt)) for request in parsed.requests]
        self._spelling = Spelling(tokenizer)
        self.id = f"{'chatcmpl' if parsed.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    @property
    def unfinished(self) -> bool:
        """True if a text has not ended."""
        return any(choice.finished is None for choice in self.choices)

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before all others."""
        if not self.parsed.chat:
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
        return self._chunk(index, {"content": piece.text} if self.parsed.chat else piece.text, logprobs)

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        """Record the end of a text, and return its chunk."""
        self.choices[index].finished = finished
        chunk = self._chunk(index, {} if self.parsed.chat else "", None, finished.reason)
        kv = _kv(finished.held)
        chunk["choices"][0]["kv"] = kv
        return chunk | {"kv": kv}

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks after all others."""
        if not self.parsed.include_usage:
            return []
        return [self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}]

    def response(self) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self.choices):
            assert choice.finished is not None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message} if self.parsed.chat else {"text": choice.text}
            end = {"finish_reason": choice.finished.reason, "kv": _kv(choice.finished.held)}
            choices.append({"index": index, **content, "logprobs": choice.logprobs or None, **end})
        return self._head("chat.completion") | {"choices": choices, "usage": self.usage(), "kv": choices[0]["kv"]}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of prompt tokens, counting each prompt once, and of generated tokens."""
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        firsts = ends[:: self.parsed.n]
        prompt_tokens, completion_tokens = sum(end.prompt_tokens for end in firsts), sum(end.tokens for end in ends)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(end.reused for end in firsts)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.parsed.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.model.name}

    def _chunk(self, index: int, new: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        new = {"delta" if self.parsed.chat else "text": new}
        choice = {"index": index, **new, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.parsed.include_usage else {}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | usage

    def _logprobs(self, choice: _Choice, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        tokens = [self._token(entry.token, entry.logprob) for entry in logprobs]
        likeliest = [[self._token(*alternative) for alternative in entry.likeliest] for entry in logprobs]
        if self.parsed.chat:
            pairs = zip(tokens, likeliest, strict=True)
            return {"content": [token | {"top_logprobs": alternatives} for token, alternatives in pairs]}
        offsets: list[int] = []
        for entry in logprobs:
            offsets.append(choice.offset)
            choice.offset += len(choice.pieces.add([entry.token]))
        tables: list[dict[str, float]] = []
        for token, alternatives in zip(tokens, likeliest, strict=True):
            tables.append({})
            for candidate in [*alternatives, token]:  # among tokens with equal text, keep the likeliest
                tables[-1].setdefault(candidate["token"], candidate["logprob"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": tables,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        minimum = -9999.0  # JSON has no infinity
        return {
            "token": self._spelling.name(token),
            "logprob": max(logprob, minimum) if math.isfinite(logprob) else minimum,
            "bytes": self._spelling.byte_list(token),
        }


def _kv(usage: Held | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    slots = round(float(usage.kept), 2)  # the mean over layers and heads; an integer if it is whole
    return usage._asdict() | {"kept": int(slots) if slots.is_integer() else slots}
