"""Reports on generated texts: as JSON, and as a summary of a few lines."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax import methods
from kvjax.cache.buffers import host_bytes
from kvjax.generation.detokenize import Spelling
from kvjax.generation.generate import Generation, texts_of
from kvjax.inference.state import allocated_slots, bytes_by_kind, cache_bytes, full_cache_bytes, slot_limits
from kvjax.methods.fastgen import PUNCTUATION, SPECIAL, Profiled, TokenClasses
from kvjax.policies.policy import Policy
from kvjax.types import Heads

if TYPE_CHECKING:
    from kvjax.model import Model


def print_written(what: str, place: Path) -> None:
    """Print on standard error what a command has written, and where."""
    print(f"wrote a {what} to {place}", file=sys.stderr, flush=True)


def report(generation: Generation, policy: Policy, seed: int, texts: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON fields of one prompt: its texts, from `samples`, and what they cost."""
    state, local, small = generation.state, _local_windows(generation), generation.state.evicting
    attending = [index for index, layer in enumerate(small.layers) if isinstance(layer, Heads)]
    limits = zip(attending, slot_limits(small), strict=True)
    rounds, kinds = generation.tokens_per_round, bytes_by_kind(state)
    return {
        "text": texts["text"],
        "prompt_tokens": len(generation.prompts[0]),
        "new_tokens": len(generation.tokens[0]),
        "policy": methods.name_of(policy),
        "budget": round(float(np.mean([limit for index, limit in limits if index not in local]))),
        "allocated_slots": round(allocated_slots(small)),
        "cache_bytes": cache_bytes(state),
        "full_cache_bytes": full_cache_bytes(state),
        **({} if len(kinds) < 2 else {"cache_bytes_by_kind": kinds}),
        "compile_seconds": generation.compile_seconds,
        "prefill_seconds": generation.prefill_seconds,
        "decode_tokens_per_second": generation.decode_tokens_per_second,
        "seed": seed,
        **({} if rounds is None else {"tokens_per_round": rounds, "draft_cache_bytes": cache_bytes(small)}),
        **({"host_cache_bytes": on_host} if (on_host := host_bytes(state.cache.memory)) else {}),
        **({"local_windows": local} if local else {}),
        **_choices(generation),
        **texts,
    }


def _local_windows(generation: Generation) -> dict[int, int]:
    """Return the window of each layer whose sliding window overrides the budget, by the layer's index."""
    layers, end = enumerate(generation.state.config.layer_configs), int(np.max(generation.state.end))
    return {index: layer.window for index, layer in layers if layer.window is not None and layer.bounded_by_window(end)}


def text_fields(model: Model, generation: Generation, stop: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the JSON fields of each text."""
    rows = zip(texts_of(model, generation, stop), generation.prompts, generation.tokens, strict=True)
    texts = [{"text": text, "prompt_tokens": len(ids), "new_tokens": len(new)} for text, ids, new in rows]
    if generation.logprobs is None:
        return texts
    spelling = Spelling(model.tokenizer)
    for fields, logprobs in zip(texts, generation.logprobs, strict=True):
        fields["logprobs"] = [
            {"token": token, "text": spelling.name(token), "bytes": spelling.byte_list(token), "logprob": logprob}
            | ({"likeliest": [{"token": id, "logprob": value} for id, value in likeliest]} if likeliest else {})
            for token, logprob, likeliest in logprobs
        ]
    return texts


def samples(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of one prompt's `text_fields`, with all of them as `samples` if there are several."""
    return texts[0] | ({"samples": texts} if len(texts) > 1 else {})


def _choices(generation: Generation) -> dict[str, Any]:
    """Return the choice of each head of the first row, by layer, for policies that profile heads."""
    state = generation.state.evicting
    plan = state.policy.plan
    if not isinstance(plan, Profiled):
        return {}
    maps: dict[str, Any] = {}
    if generation.beams == 1:  # a beam search leaves paged storage
        heads = state.cache.attending
        maps["policy_map"] = [np.asarray(layer.state.plan.choice)[0].tolist() for layer in heads]
    return {
        "choices": ["+".join(parts) or "full" for parts in plan.choices],
        **maps,
        "slots": [limit[0].tolist() for limit in slot_limits(state)],
    }


def summary(generation: Generation, report: dict[str, Any]) -> str:
    """Summarize a report in a few lines."""
    tokens = np.mean([(positions >= 0).sum(-1).mean() for positions in generation.cache_positions])
    speed = _speed(report["decode_tokens_per_second"])
    of_host = f" ({report['host_cache_bytes']:,} in host memory)" if "host_cache_bytes" in report else ""
    return (
        f"prompt: {report['prompt_tokens']} tokens in {report['prefill_seconds']:.2f} s; "
        f"new: {report['new_tokens']} tokens, {speed}; compilation: {report['compile_seconds']:.1f} s\n"
        f"cache: {report['cache_bytes']:,} bytes{of_host}, a full cache {report['full_cache_bytes']:,} bytes; "
        f"{report['policy']} kept {tokens:.0f} of {report['prompt_tokens']} prompt tokens per head, "
        f"budget {report['budget']}: {report['allocated_slots']} slots{_kinds(report)}{_local(generation)}"
        f"{_excess(generation, report)}{_spare(generation)}{_drafts(report)}"
    )


def _kinds(report: dict[str, Any]) -> str:
    """Report the bytes of layers without slots by kind, if there are some."""
    kinds: dict[str, int] = report.get("cache_bytes_by_kind", {})
    sizes = [f"{kinds[kind]:,} of {kind} layers" for kind in kinds if kind != "slots"]
    return f"\n{' and '.join(sizes)} are among these bytes under any policy and budget." if sizes else ""


def _drafts(report: dict[str, Any]) -> str:
    if "tokens_per_round" not in report:
        return ""
    full, speed = report.get("full_tokens_per_second"), report["decode_tokens_per_second"]
    ratio = "" if full is None or speed is None else f", {speed / full:.2f} times the full cache's {full:.1f} tokens/s"
    to = f" to {report['verifier']}" if "verifier" in report else ""
    return (
        f"\nlossless{to}: {report['tokens_per_round']:.2f} tokens a verification{ratio}; drafts take "
        f"{report['draft_cache_bytes']:,} bytes of the cache"
    )


@dataclasses.dataclass
class Totals:
    """What the batches of a file have cost so far."""

    lines: int = 0
    tokens: int = 0
    timed_tokens: int = 0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    cache_bytes: int = 0
    """Bytes of the largest batch, as in the next field."""
    full_cache_bytes: int = 0

    def add(self, generation: Generation, lines: int) -> None:
        """Add a batch of some lines."""
        self.lines += lines
        self.tokens += sum(map(len, generation.tokens))
        self.timed_tokens += generation.timed_tokens
        self.decode_seconds += generation.decode_seconds
        self.compile_seconds += generation.compile_seconds
        self.cache_bytes = max(self.cache_bytes, cache_bytes(generation.state))
        self.full_cache_bytes = max(self.full_cache_bytes, full_cache_bytes(generation.state))

    @property
    def speed(self) -> str:
        """Generated tokens of all rows per second, as text."""
        return _speed(self.timed_tokens / self.decode_seconds if self.timed_tokens else None)

    def summary(self, file: Path | None) -> str:
        """Summarize the batches in two lines; `file` has their results, None for standard output."""
        return (
            f"lines: {self.lines:,}; new: {self.tokens:,} tokens, {self.speed}; compilation: "
            f"{self.compile_seconds:.1f} s\ncache: {self.cache_bytes:,} bytes in the largest batch, a full cache "
            f"{self.full_cache_bytes:,} bytes; results: {file or 'standard output'}"
        )


def _speed(rate: float | None) -> str:
    return "too few to time" if rate is None else f"{rate:,.0f} tokens/s"


def _local(generation: Generation) -> str:
    """Name the layers that the budget does not apply to, if there are any."""
    windows, layers = _local_windows(generation), generation.state.config.layers
    if not windows:
        return ""
    return (
        f"\n{len(windows)} of {layers} layers see {', '.join(map(str, sorted(set(windows.values()))))} tokens only and "
        "hold so many under any policy; the budget is that of the other layers."
    )


def _spare(generation: Generation) -> str:
    """Report the slots that FastGen sets aside for new special tokens and punctuation, and whether they sufficed."""
    plan, protection = generation.state.policy.plan, generation.state.policy.protection
    if not isinstance(plan, Profiled) or not isinstance(protection, TokenClasses) or protection.classes is None:
        return ""
    classes = np.asarray(protection.classes)
    token_ids = [np.asarray(tokens, np.int64) for tokens in generation.tokens]
    special, marks = (max(int((classes[ids] & bit > 0).sum()) for ids in token_ids) for bit in (SPECIAL, PUNCTUATION))
    slots = int(plan.spare_special), math.ceil(plan.spare_punctuation * int(np.max(generation.state.horizon)) - 1e-6)
    sentence = f"\n{slots[0]} and {slots[1]} slots are set aside for special tokens and punctuation that are written"
    if special <= slots[0] and marks <= slots[1]:
        return f"{sentence}; {special} and {marks} were."
    return f"{sentence}, but {special} and {marks} were: in heads that keep them the oldest may have left."


def _excess(generation: Generation, report: dict[str, Any]) -> str:
    """Explain why a cache is larger than the full one, if it is."""
    saves = report["cache_bytes"] <= report["full_cache_bytes"]
    if report["policy"] == "full" or saves or "tokens_per_round" in report:
        return ""
    needed = int(np.max(generation.state.end))
    if report["budget"] >= needed:
        return f"\nThis is more than a full cache, for the whole text has no more than {needed} tokens."
    return (
        "\nThis is more than a full cache, for what the policy remembers beside keys and values takes more than the "
        "slots that it saves; texts that are long for their budget save memory."
    )
