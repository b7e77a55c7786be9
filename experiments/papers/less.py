"""Claims of LESS (arXiv 2402.09398), at the training budget of kernels over H2O and at other budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.papers.paper import (
    FULL,
    Check,
    Finding,
    Measured,
    PaperClaim,
    Trained,
    Wanted,
    best,
    better,
    no_worse,
    of_special,
    ratio,
)
from kvjax.evaluation.summary import paired

PERFORMER = "residual.kernels=performer"


def streamed(policy: str, times: float = 1.0) -> Wanted:
    """Return a policy with a multiple of the kernels' training slots; it reads all text token by token."""
    return Wanted(policy, Trained(times), prefix=0.0)


def plus(base: str = "h2o") -> str:
    """Return baseline+: four more slots per head, for the numbers of LESS's memory."""
    return f"baseline_plus[base={base}]"


ALL = Wanted(FULL, prefix=0.0)
BASE, PLUS, LESS = streamed("h2o"), streamed(plus()), streamed("h2o+less")
RANDOM = streamed(f"h2o+less[{PERFORMER}]")


def _gap_closed(least: float) -> Check:
    needs = (ALL, LESS, BASE)

    def judge(measured: Measured) -> Finding:
        full, ours, base = (float(np.mean(measured.cases(each))) for each in needs)
        closed = (base - ours) / (base - full)
        return Finding(f"{closed:.0%}", base > full and closed >= least)

    return Check(needs, judge)


def _gains_more() -> Check:
    needs = (LESS, PLUS, LESS.but(length=0.5), PLUS.but(length=0.5))

    def judge(measured: Measured) -> Finding:
        ours, theirs, ours_short, theirs_short = (np.asarray(measured.cases(each)) for each in needs)
        gains = theirs - ours, theirs_short - ours_short
        more, error = paired(*(gain.tolist() for gain in gains))
        numbers = f"{gains[0].mean():+.4f} against {gains[1].mean():+.4f} nats; {more:+.4f} ± {error:.4f}"
        return Finding(numbers, None if np.isnan(error) else more > 2 * error)

    return Check(needs, judge)


def _nearer() -> Check:
    needs = tuple(each.but(task="fidelity", length=0.5, prefix=0.5) for each in (LESS, BASE))

    def judge(measured: Measured) -> Finding:
        ours, base = (measured.value(each, "hellinger_of_layers") for each in needs)
        nearer = sum(a < b for a, b in zip(ours, base, strict=True))
        return Finding(
            f"{np.mean(ours):.3f} < {np.mean(base):.3f}; in {nearer} of {len(base)} layers", nearer == len(base)
        )

    return Check(needs, judge)


def _parameters(get: Any) -> Finding:
    share = get("kernel_parameters") / get("parameters")
    return Finding(f"{share:.1%}", share < 0.02)


CLAIMS = [
    PaperClaim(
        "LESS beats the baseline (H2O)", "Table 2", "perplexity 9.657 against 9.863 (5%, WikiText)", better(LESS, BASE)
    ),
    PaperClaim("LESS beats baseline+, equal bytes", "Table 2", "9.657 against 9.842", better(LESS, PLUS)),
    PaperClaim("baseline+ beats the baseline", "Table 2", "9.842 against 9.863", better(PLUS, BASE)),
    PaperClaim("LESS is still worse than the full cache", "Table 2", "8.791 against 9.657", better(ALL, LESS)),
    PaperClaim(
        "LESS closes a fifth of the gap between the baseline and the full cache",
        "Table 2, section 4",
        "over 20% (2%, WikiText and PG-19)",
        _gap_closed(0.2),
    ),
    PaperClaim(
        "untrained kernels (Performer) do not help",
        "Table 2",
        "9.863 against 9.863",
        no_worse(BASE, RANDOM),
    ),
    PaperClaim("trained kernels beat untrained ones", "Table 2", "9.657 against 9.863", better(LESS, RANDOM)),
    PaperClaim(
        "kernels help at twice the slots that they were trained at",
        "Table 2",
        "9.239 against 9.295 (5% at 10%)",
        better(streamed("h2o+less", 2), streamed("h2o", 2)),
    ),
    PaperClaim(
        "kernels help at half of the slots",
        "Table 2",
        "9.693 against 9.863 (10% at 5%)",
        better(streamed("h2o+less", 0.5), streamed("h2o", 0.5)),
    ),
    PaperClaim(
        "kernels harm at a fifth of the slots",
        "Table 2",
        "14.577 against 13.333 (10% at 2%)",
        better(streamed("h2o", 0.2), streamed("h2o+less", 0.2)),
    ),
    *(
        PaperClaim(
            f"LESS beats baseline+ and baseline over {name}",
            place,
            number,
            best(streamed(f"{base}+less"), streamed(plus(base)), streamed(base)),
        )
        for name, base, place, number in (
            ("a lambda mask", "lambda_mask", "Tables 3 and 7", "10.12, 10.64, 10.66"),
            ("TOVA", "tova", "Table 7", "9.72, 9.95, 9.97"),
        )
    ),
    PaperClaim(
        "LESS helps where the prompt is read whole",
        "Tables 4 and 5, section 4.2",
        "ROUGE-1 15.42 against 13.38 (MultiNews, 5%)",
        better(LESS.but(prefix=0.5), BASE.but(prefix=0.5)),
    ),
    PaperClaim(
        "attention is nearer to the full cache's in every layer (Hellinger distance)",
        "Figure 6, eq. 7",
        "no number",
        _nearer(),
    ),
    PaperClaim(
        "the gain over baseline+ grows with length (whole passages against their first halves)",
        "Figure 8",
        "diverge for longer ones",
        _gains_more(),
    ),
    PaperClaim(
        "the memory takes no more bytes than four slots (within 5%)",
        "section 4",
        "4 tokens",
        ratio("cache_bytes", LESS, PLUS, most=1.05),
    ),
    PaperClaim(
        "kernels are fewer than 2% of the parameters",
        "section 1",
        "< 2% (Llama 2 13B)",
        of_special("memory", _parameters),
    ),
    PaperClaim(
        "decoding takes at most 17.5% longer than baseline+'s",
        "Table 8",
        "32.96 against 28.05: 1.175×",
        ratio("decode_tokens_per_second", PLUS, LESS, most=1.175),
    ),
    PaperClaim(
        "decoding is faster than with the full cache (by a tenth)",
        "Table 6",
        "1.2× to 1.3×",
        ratio("decode_tokens_per_second", LESS, ALL, least=1.1),
    ),
]
