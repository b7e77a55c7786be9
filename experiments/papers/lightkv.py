"""Claims of the LightKV report: a mask whose whole width is C_l / omega, and arithmetic budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.papers.paper import (
    FULL,
    Finding,
    PaperClaim,
    Wanted,
    alike,
    better,
    falling,
    near,
    no_worse,
    of_special,
    ratio,
)

ALL = Wanted(FULL)
NEEDLES: dict[str, Any] = dict(column="string_match_of_cases", higher=True)


def lightkv(share: float, settings: str = "") -> Wanted:
    """Return LightKV at a share of the text, with settings as in `lightkv[omega=8]`."""
    return Wanted(f"lightkv[{settings}]" if settings else "lightkv", share)


def masked(omega: int) -> Wanted:
    """Return LightKV with equal numbers of middle tokens and sinks, as in section 4: the mask determines the memory."""
    return lightkv(0.25, f"middle=mask,omega={omega}")


def asked(wanted: Wanted, depth: float) -> Wanted:
    """Return the same policy in a retrieval task, with a needle at a depth."""
    return wanted.but(task="retrieval", depth=depth)


LAMBDA = Wanted("lambda_mask", 0.25)


def _funnels(get: Any) -> Finding:
    """Judge Figure 1: concentration against depth, by ranks."""
    layers = np.asarray(get("top_10"))
    rank = np.argsort(np.argsort(layers))
    correlation = float(np.corrcoef(np.arange(len(layers)), rank)[0, 1])
    return Finding(f"rank correlation {correlation:+.2f}", correlation < 0.5)


def _edges(get: Any) -> Finding:
    """Judge Figure 1: sinks and streaming tokens in the last third of the layers."""
    both = np.asarray(get("sinks")) + np.asarray(get("newest"))
    last = float(both[-max(1, len(both) // 3) :].mean())
    return Finding(f"{last:.0%} of the attention", last > 0.5)


CLAIMS = [
    PaperClaim(
        "lower layers deserve larger caches: arithmetic budgets beat uniform ones",
        "section 3.1, eq. 2",
        "no number",
        better(lightkv(0.25), Wanted("lightkv+uniform", 0.25)),
    ),
    PaperClaim(
        "attention does not funnel: its concentration does not rise with the layers",
        "Figure 1",
        "no clear pattern (Mistral-7B, Llama-3.1-8B)",
        of_special("attention", _funnels),
    ),
    PaperClaim(
        "in the last layers sinks and streaming tokens get most of the attention",
        "Figure 1",
        "mainly these",
        of_special("attention", _edges),
    ),
    PaperClaim(
        "a lambda mask loses needles in the middle (depth 50% against the full cache)",
        "Figure 2",
        "degrading accuracy in the middle",
        better(asked(ALL, 0.5), asked(LAMBDA, 0.5), **NEEDLES),
    ),
    PaperClaim(
        "a lambda mask finds needles better under the mask (depth 90%) than in the middle",
        "Figure 2",
        "higher at 30% and 90%",
        better(asked(LAMBDA, 0.9), asked(LAMBDA, 0.5), **NEEDLES),
    ),
    PaperClaim(
        "attention to the middle finds needles there that a lambda mask loses",
        "abstract, section 3.2",
        "no number",
        better(asked(lightkv(0.25), 0.5), asked(LAMBDA, 0.5), **NEEDLES),
    ),
    PaperClaim(
        "attention to the middle beats a lambda mask on text",
        "abstract, section 3.2",
        "no number",
        better(lightkv(0.25), LAMBDA),
    ),
    PaperClaim(
        "needles at the end survive compression (25% of the text)",
        "Table 1",
        "15 of 29 pass",
        no_worse(asked(lightkv(0.25), 1.0), asked(ALL, 1.0), **NEEDLES),
    ),
    PaperClaim(
        "narrow masks suffice: 1/8 and 1/32 are no worse than 1/2",
        "Table 1, section 4",
        "1/2: 3 of 5 pass; 1/4: 4, 1/8: 2, 1/16: 4, 1/32: 2 of 6",
        alike(*(lightkv(0.25, f"omega={omega}") for omega in (2, 8, 32))),
    ),
    PaperClaim(
        "memory falls without loss of accuracy at 25% of the text (nats at most 1% higher)",
        "abstract",
        "no number",
        near(lightkv(0.25), ALL, 0.01),
    ),
    PaperClaim(
        "bytes fall with the context limit (caches of 25%, 12.5%, 6.25% of the text)",
        "Figure 3, Table 1",
        "21.7, 19.8, 18.9 GB",
        falling("cache_bytes", lightkv(0.25), lightkv(0.125), lightkv(0.0625)),
    ),
    PaperClaim(
        "bytes fall as the mask narrows (1/2, 1/8, 1/32; as many middle tokens as sinks)",
        "Figure 4, Table 1",
        "21.7, 18.9, 18.3 GB",
        falling("cache_bytes", masked(2), masked(8), masked(32)),
    ),
    PaperClaim(
        "a narrow mask fits where the full cache does not (bytes of the full cache over those of 1/32)",
        "Figure 5",
        "out of memory against 20.6 GB",
        ratio("cache_bytes", ALL, masked(32), least=2),
    ),
    PaperClaim(
        "narrow masks keep the accuracy at less memory: 1/8 as good as 1/2",
        "Table 1, section 4",
        "at 2048 + 512 both pass",
        no_worse(masked(8), masked(2)),
    ),
    PaperClaim(
        "decodes faster than H2O, whose evictions cost time, at equal slots (by a tenth)",
        "section 2",
        "considerable latency overhead",
        ratio("decode_tokens_per_second", lightkv(0.25), Wanted("h2o", 0.25), least=1.1),
    ),
]
