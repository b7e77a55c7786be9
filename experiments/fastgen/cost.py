"""Time of FastGen's choice: Table 3, and speed against H2O."""

from __future__ import annotations

import jax

from experiments.claims import Claim, Section
from experiments.fastgen.measurements import Report
from kvjax import methods
from kvjax.evaluation.bench import decoder, race, reader
from kvjax.model import Model
from kvjax.types import HEADS, ROWS, SLOTS
from kvjax.utils.markdown import markdown_table

GENERATED = (128, 256, 512, 1024)
"""Lengths in tokens of the generations whose time the share refers to."""


def profiling(report: Report) -> Section:
    """Report Table 3: the time of the choice, as a share of generation."""
    runs = report.runs
    tokens, steps = runs.passages.tokens[:1, : runs.prefix], 64
    device = _device(runs.model)
    settings = runs.settings(prompt=runs.prefix, threshold=0.95, steps=steps, devices=device, among=report.among)

    def make() -> dict[str, float]:
        full, ours = methods.policy("full"), report.policy(0.95)
        racing = [reader(runs.model, policy, 1.0, tokens) for policy in (full, ours)]
        racing.append(decoder(runs.model, ours, 1.0, tokens, steps))
        race(racing, 15)
        return {name: c.median for name, c in zip(("full", "fastgen", "steps"), racing, strict=True)}

    seconds = report.measured(f"profiling time{report.suffix}", settings, make)
    extra, step = max(0.0, seconds["fastgen"] - seconds["full"]), seconds["steps"] / steps
    rows = [
        [n, f"{1e3 * (seconds['fastgen'] + n * step):.1f}", f"{1e3 * extra:.2f}", f"{1e3 * step:.3f}",
         f"{extra / (seconds['fastgen'] + n * step):.2%}"]
        for n in GENERATED
    ]  # fmt: skip
    last = extra / (seconds["fastgen"] + GENERATED[-1] * step)
    claims = [Claim(f"below 0.35% of generating {GENERATED[-1]} tokens", last < 0.0035, f"{last:.2%}")]
    headings = ["generated tokens", "whole, ms", "profiling, ms", "one token, ms", "profiling / whole"]
    body = (
        f"One prompt of {runs.prefix} tokens on {device}, medians of 15 runs. Profiling is what "
        "a prompt takes longer than with the full cache: summing attention, choosing, moving what stays into pages. "
        f"The paper's 0.07% to 0.35% are of a 65B model.\n\n{markdown_table(headings, rows)}"
    )
    return Section("Profiling time (Table 3)", claims, body)


def cost(report: Report) -> Section:
    """Report speed against H2O at equal slots, and against reading with the full cache."""
    runs, model, steps = report.runs, report.runs.model, 64
    tokens = runs.passages.tokens[:8, : runs.prefix]
    device = _device(model)
    settings = runs.settings(prompt=runs.prefix, threshold=0.9, rows=len(tokens), steps=steps, device=device)
    settings |= {"among": report.among}

    def make() -> dict[str, list[float | None]]:
        full, ours = methods.policy("full"), report.policy(0.9)
        decoding = decoder(model, ours, 1.0, tokens, steps)
        slots = max(2, round(decoding.slots or 0))
        racing = {
            "prefill, full": reader(model, full, 1.0, tokens),
            "prefill, h2o": reader(model, "h2o", slots, tokens),
            "prefill, fastgen": reader(model, ours, 1.0, tokens),
            "decode, full": decoder(model, full, 1.0, tokens, steps),
            "decode, h2o": decoder(model, "h2o", slots, tokens, steps),
            "decode, fastgen": decoding,
        }
        race(list(racing.values()), 15)
        return {name: [c.median, c.slots, c.cache_bytes] for name, c in racing.items()}

    made = report.measured(f"cost{report.suffix}", settings, make)
    counts = {"prefill": runs.prefix * len(tokens), "decode": steps * len(tokens)}
    rows = [
        [name, round(slots), round(held / 1e3), f"{1e3 * seconds:.1f}", f"{counts[name.split(',')[0]] / seconds:,.0f}"]
        for name, (seconds, slots, held) in made.items()
    ]
    reading = made["prefill, fastgen"][0] / made["prefill, full"][0]
    writing = made["decode, fastgen"][0] / made["decode, h2o"][0]
    claims = [
        Claim("prompts take less than 1.5 times as long as with the full cache", reading < 1.5, f"{reading:.2f}"),
        Claim("tokens take less than 1.2 times as long as h2o's at equal slots", writing < 1.2, f"{writing:.2f}"),
    ]
    body = (
        f"{len(tokens)} prompts of {runs.prefix} tokens, {steps} steps, T = 0.9, on {device}; medians of 15 runs in "
        "turn. In a model of this size overhead weighs more than memory; "
        "`kvjax bench decode --policies fastgen,h2o --budgets same --set special=[1]` asks a larger one.\n\n"
        + markdown_table(["what", "slots", "cache, KB", "ms", "tokens/s"], rows)
    )
    return Section("Cost", claims, body)


def _device(model: Model) -> str:
    kind = jax.devices()[0].device_kind
    if model.mesh is None:
        return kind
    rows, heads, slots = (model.mesh.shape[axis] for axis in (ROWS, HEADS, SLOTS))
    return f"{kind}, data={rows},model={heads * slots}"
