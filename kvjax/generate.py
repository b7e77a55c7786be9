"""Continue prompts on a fixed KV budget: `python -m kvjax.generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import decode, paged, policies
from kvjax.commands import finish, use_compilation_cache
from kvjax.loop import generate_tokens
from kvjax.policies.base import Policy
from kvjax.sampling import Sampling
from kvjax.settings import parse_budget, parse_settings, read_config

if TYPE_CHECKING:
    from kvjax.models import Model


@dataclasses.dataclass
class Generation:
    """What came out of a batch of prompts, and what it cost.

    Times are in seconds; `decode_seconds` leaves out the first dispatch, which may have compiled.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    state: decode.State
    cache_positions: list[np.ndarray]
    """For each layer [b, h, c]: positions held when the prompt had been read."""
    prefill_seconds: float
    decode_seconds: float
    timed_tokens: int

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens of all rows per second; None if too few were made to tell."""
        return self.timed_tokens / self.decode_seconds if self.timed_tokens else None


def encode(model: Model, prompt: str, chat: bool = False) -> list[int]:
    """A prompt's token ids, as the model's tokenizer starts a text; as one turn of a conversation if `chat`.

    Raises:
        ValueError: the prompt is empty, or the tokenizer has no chat template.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text.")
    if not chat:
        return list(model.tokenizer(prompt)["input_ids"])
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {model.name!r} has no chat template; leave out --chat.")
    turns = [{"role": "user", "content": prompt}]
    text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def generate_ids(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    policy: str | Policy = "full",
    budget: int | float | Sequence[int] = 1.0,
    plan: Any = None,
    prefill_chunk: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_at_eos: bool = True,
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Generation:
    """Continue token ids; see `generate_texts` for the settings.

    Args:
        on_tokens: called with each new block of tokens [b, n] and which of them belong to their row's text.
    """
    chosen = policies.policy(policy) if isinstance(policy, str) else policy
    sampling = Sampling(temperature, top_k, top_p)
    longest, room = max((len(prompt) for prompt in prompts), default=0), model.config.max_positions
    if longest + max_new_tokens > room and chosen.positions == "original":
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit the model's {room} positions; "
            "ask for fewer, or use a policy with positions='cache'."
        )
    keys = jax.random.key(seed) if isinstance(seed, int) else jax.numpy.stack([jax.random.key(s) for s in seed])
    if keys.ndim and len(keys) != len(prompts):
        raise ValueError(f"{len(keys)} seeds do not fit {len(prompts)} prompts; give one seed, or one for each.")
    arguments: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=keys, plan=plan, prefill_chunk=prefill_chunk)
    began = time.perf_counter()
    state, logits = decode.prefill(model, chosen, [list(prompt) for prompt in prompts], budget, **arguments)
    jax.block_until_ready(logits)
    prefill_seconds = time.perf_counter() - began
    held = decode.held_positions(state)
    eos = model.config.eos if stop_at_eos else ()
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds, timed, last, blocks = 0.0, 0, time.perf_counter(), 0
    for block, belongs, after in generate_tokens(state, logits, max_new_tokens, sampling, eos):
        now = time.perf_counter()
        if blocks > 1:
            seconds, timed = seconds + now - last, timed + block.size
        state, blocks = after, blocks + 1
        for row, ids, keep in zip(tokens, block, belongs, strict=True):
            row += ids[keep].tolist()
        if on_tokens is not None:
            on_tokens(block, belongs)
        last = time.perf_counter()
    return Generation([list(p) for p in prompts], tokens, state, held, prefill_seconds, seconds, timed)


def generate_texts(model: Model, prompts: str | Sequence[str], *, chat: bool = False, **settings: Any) -> list[str]:
    """Texts that continue prompts.

    Args:
        model: from `kvjax.load`.
        prompts: texts; one text counts as a list of one.
        chat: wrap each prompt as a user's turn with the tokenizer's chat template.
        settings: `policy` ("full"), `budget` (1.0), `plan`, `prefill_chunk`: see `kvjax.prefill`;
            `max_new_tokens` (128); `temperature` (0.8, 0 is greedy), `top_k`, `top_p`: see `Sampling`;
            `seed` (0): one number, or one for each prompt; the same seed gives a prompt the same text in any batch;
            `stop_at_eos` (True).

    Raises:
        ValueError: a prompt is empty or too long, or a setting is out of range.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    made = generate_ids(model, [encode(model, text, chat) for text in texts], **settings)
    return [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in made.tokens]


class Stream:
    """Prints a row's text as its tokens arrive, holding back a character whose bytes are not all there yet."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        # Text up to `shown` has been printed; tokens from `context` are decoded with what follows, not the whole text.
        self.context, self.shown = 0, 0

    def __call__(self, block: np.ndarray, belongs: np.ndarray) -> None:
        self.ids += block[0][belongs[0]].tolist()
        if not self._decode(self.ids[self.context :]).endswith("\ufffd"):
            self.flush()

    def flush(self) -> None:
        """Print what has not been printed of the text so far."""
        if len(self.ids) == self.shown:
            return
        before = self._decode(self.ids[self.context : self.shown])
        self.write(self._decode(self.ids[self.context :])[len(before) :])
        self.context, self.shown = self.shown, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = argparse.ArgumentParser(prog="kvjax generate", description=__doc__, allow_abbrev=False)
    options.add_argument("--model", default="tiny", help="tiny (embedded), a directory, or a hub id")
    source = options.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; standard input if neither this nor a file is given")
    source.add_argument("--prompt-file", type=Path, help="a file with the text to continue")
    options.add_argument("--policy", help="which tokens stay in the cache; `list` shows them (default: full)")
    options.add_argument("--budget", help="slots per head, or a fraction of prompt + new tokens (default: 1.0)")
    options.add_argument("--plan", help="how the budget is spread over layers")
    options.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
    options.add_argument("--less-checkpoint", metavar="DIR", help="kernels of --policy less, from kvjax.train_less")
    options.add_argument("--config", help="a TOML file or the name of a shipped one; options override it")
    options.add_argument("--prefill-chunk", type=int, help="compress after every so many prompt tokens")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.8)
    options.add_argument("--top-k", type=int)
    options.add_argument("--top-p", type=float)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--ignore-eos", action="store_true", help="go on past the end of a text")
    options.add_argument("--chat", action="store_true", help="wrap the prompt with the tokenizer's chat template")
    options.add_argument("--json", action="store_true", help="print one object instead of the text")
    options.add_argument("--show-cache", action="store_true", help="print the prompt, shaded by what the cache holds")
    options.add_argument("--save-cache-map", type=Path, metavar="FILE.png", help="draw layers x positions held")
    return options


def list_policies() -> str:
    """One line for each policy, then its settings and their defaults."""
    lines = []
    for name, kind in policies.REGISTRY.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        settings = ", ".join(f"{key}={value!r}" for key, value in policies.settings_of(name).items())
        lines.append(f"{name:<16} {summary}\n{'':<16} {settings}")
    return "\n".join(lines)


def _choice(options: argparse.Namespace) -> tuple[Policy, int | float | Sequence[int], str | None, int | None]:
    config = read_config(options.config) if options.config else {}
    same = options.policy in (None, config.get("policy"))
    settings = (config.get("settings", {}) if same else {}) | parse_settings(options.settings)
    if options.less_checkpoint is not None:
        settings |= {"checkpoint": options.less_checkpoint}
    policy = policies.policy(options.policy or config.get("policy", "full"), **settings)
    budget = config.get("budget", 1.0) if options.budget is None else parse_budget(options.budget)
    chunk = config.get("prefill_chunk") if options.prefill_chunk is None else options.prefill_chunk
    return policy, budget, options.plan or config.get("plan"), chunk


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is None:
        return sys.stdin.read()
    if not options.prompt_file.is_file():
        raise ValueError(f"{options.prompt_file} is not a file; give a text file.")
    try:
        return options.prompt_file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{options.prompt_file} is not UTF-8 text.") from None


def _report(made: Generation, policy: Policy, seed: int, text: str) -> dict[str, Any]:
    rate = made.decode_tokens_per_second
    return {
        "text": text,
        "prompt_tokens": len(made.prompts[0]),
        "new_tokens": len(made.tokens[0]),
        "policy": policies.name_of(policy),
        "budget": round(float(np.mean(decode.slot_limits(made.state)))),
        "cache_bytes": decode.cache_bytes(made.state),
        "full_cache_bytes": decode.full_cache_bytes(made.state),
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": rate,
        "seed": seed,
        **_choices(made),
    }


def _choices(made: Generation) -> dict[str, Any]:
    """What each head of the first row was found to need, by layer, for policies that choose so."""
    if not isinstance(made.state.policy, policies.FastGen):
        return {}
    bound, pool = made.state.policy, made.state.caches
    assert isinstance(pool, paged.Pool)
    return {
        "choices": ["+".join(parts) or "full" for parts in bound.choices],
        "policy_map": [np.asarray(layer.choice)[0].tolist() for layer in pool.state],
        "slots": [limit[0].tolist() for limit in decode.slot_limits(made.state)],
    }


def _summary(made: Generation, report: dict[str, Any]) -> str:
    kept = np.mean([(positions >= 0).sum(-1).mean() for positions in made.cache_positions])
    rate = report["decode_tokens_per_second"]
    speed = "too few to time" if rate is None else f"{rate:,.0f} tokens/s"
    prompt_rate = report["prompt_tokens"] / report["prefill_seconds"]
    return (
        f"prompt: {report['prompt_tokens']} tokens, {prompt_rate:,.0f} tokens/s with compilation; "
        f"new: {report['new_tokens']} tokens, {speed}\n"
        f"cache: {report['cache_bytes']:,} bytes, a full cache {report['full_cache_bytes']:,} bytes; "
        f"{report['policy']} kept {kept:.0f} of {report['prompt_tokens']} prompt tokens per head, "
        f"budget {report['budget']}"
    )


def run(options: argparse.Namespace) -> None:
    """What the command line asks for.

    Raises:
        ValueError: it asks for something that cannot be, said in one sentence.
    """
    if options.policy == "list":
        print(list_policies())
        return
    from kvjax.models import load

    policy, budget, plan, chunk = _choice(options)
    Sampling(options.temperature, options.top_k, options.top_p)
    prompt = _prompt(options)
    model = load(options.model, dtype=options.dtype)
    ids = encode(model, prompt, options.chat)
    stream = Stream(model.tokenizer, lambda text: print(text, end="", flush=True))
    made = generate_ids(
        model,
        [ids],
        policy=policy,
        budget=budget,
        plan=plan,
        prefill_chunk=chunk,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_at_eos=not options.ignore_eos,
        on_tokens=None if options.json else stream,
    )
    text = model.tokenizer.decode(made.tokens[0], skip_special_tokens=True)
    report = _report(made, policy, options.seed, text)
    if options.json:
        print(json.dumps(report))
    else:
        stream.flush()
        print(flush=True)
        print(_summary(made, report), file=sys.stderr)
    if "policy_map" in report:
        from kvjax import policy_map

        policy_map.show(report["choices"], report["policy_map"], sys.stderr)
    if options.show_cache or options.save_cache_map:
        from kvjax import cache_map

        held = cache_map.share_held(made.cache_positions, len(ids))
        if options.show_cache:
            cache_map.show(model.tokenizer, ids, held.mean(0), sys.stderr if options.json else sys.stdout)
        if options.save_cache_map:
            cache_map.save(held, options.save_cache_map, policies.name_of(policy))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    options = parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
    use_compilation_cache()
    return finish("generate", lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
