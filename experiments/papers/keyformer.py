"""Claims of Keyformer (arXiv 2403.09054). Its shares of the cache refer to the prompt, half as much of our texts."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.papers.paper import (
    FULL,
    Check,
    Finding,
    PaperClaim,
    Wanted,
    best,
    better,
    near,
    of_special,
    ratio,
)

ALL = Wanted(FULL)
TAKEN = 0.3
"""Share for 60% of the prompt, as in the captions of Tables 3 and 4; section 4.4.3 has a reduction by 60%."""
HALF = 0.25
"""Share for 50% of the prompt."""


def keyformer(share: float, settings: str = "") -> Wanted:
    """Return Keyformer at a share of the text, with settings as in `keyformer[noise=none]`."""
    return Wanted(f"keyformer[{settings}]" if settings else "keyformer", share)


DAMPED = tuple(keyformer(HALF, f"noise=none,tau_end=1,recent=0.2,damping={alpha}") for alpha in (0.9, 0.99))
"""Accumulated attention times alpha after each token, with a recent window of 20% (section 2.3.3)."""


def _mass(key: str, least: float) -> Check:
    def judge(get: Any) -> Finding:
        layers = get(key)
        mean = sum(layers) / len(layers)
        return Finding(f"{mean:.1%}; layers {min(layers):.0%} to {max(layers):.0%}", mean >= least)

    return of_special("attention", judge)


def _sparser(get: Any) -> Finding:
    """Judge Figure 11."""
    shares = [sum(layer) / len(layer) for layer in get("sparsity")]
    numbers = ", ".join(f"{share:.1%}" for share in shares)
    return Finding(f"{numbers} at 0% to 5%", all(b > a for a, b in itertools.pairwise(shares)))


def _uneven(get: Any) -> Finding:
    """Judge Figure 3a."""
    layers = get("sparsity")[1]
    return Finding(f"{min(layers):.0%} to {max(layers):.0%} at 1%", max(layers) - min(layers) >= 0.1)


def _entropies(get: Any) -> Finding:
    """Judge equation 8."""
    noisy, plain = get("entropy_gumbel"), get("entropy")
    higher = sum(a > b for a, b in zip(noisy, plain, strict=True))
    means = sum(noisy) / len(noisy), sum(plain) / len(plain)
    return Finding(f"{means[0]:.3f} > {means[1]:.3f} nats; in {higher} of {len(plain)} layers", higher == len(plain))


CLAIMS = [
    *(
        PaperClaim(
            f"beats H2O with {percent}% of the prompt",
            "Figure 7" if percent != 50 else "Figures 7 and 8",
            "consistently higher ROUGE-2",
            better(keyformer(share), Wanted("h2o", share)),
        )
        for percent, share in ((20, 0.1), (50, HALF), (60, TAKEN), (90, 0.45))
    ),
    *(
        PaperClaim(
            f"beats window attention with {percent}% of the prompt",
            "Figure 7",
            "17.60 against 4.27 ROUGE-2 at 60% (Table 3)",
            better(keyformer(share), Wanted("window", share)),
        )
        for percent, share in ((20, 0.1), (60, TAKEN), (90, 0.45))
    ),
    PaperClaim(
        "70% of the prompt keep 99% of the full cache's quality (nats at most 1% higher)",
        "Figure 7, section 4.1",
        "≥ 99%",
        near(keyformer(0.35), ALL, 0.01),
    ),
    PaperClaim(
        "H2O does not keep 99% with 90% of the prompt",
        "Figure 7, section 4.1",
        "< 99%",
        near(Wanted("h2o", 0.45), ALL, 0.01, within=False),
    ),
    PaperClaim(
        "beats the full cache where little is evicted (90% of the prompt)",
        "section 4.1",
        "up to 1.73% higher ROUGE-2",
        better(keyformer(0.45), ALL),
    ),
    PaperClaim(
        "Gumbel noise is better than none",
        "Table 4",
        "ROUGE-2 19.44, 15.25, 17.57 against 18.87, 12.73, 16.38",
        better(keyformer(TAKEN), keyformer(TAKEN, "noise=none")),
    ),
    PaperClaim(
        "no noise is better than Gaussian",
        "Table 4",
        "18.87, 12.73, 16.38 against 14.53, 9.54, 10.17",
        better(keyformer(TAKEN, "noise=none"), keyformer(TAKEN, "noise=gaussian")),
    ),
    PaperClaim(
        "Gaussian noise is better than a constant (which cancels in eq. 9: it is no noise)",
        "Table 4",
        "14.53, 9.54, 10.17 against 12.49, 8.98, 7.56",
        better(keyformer(TAKEN, "noise=gaussian"), keyformer(TAKEN, "noise=constant")),
    ),
    PaperClaim(
        "original positions are better than new ones",
        "Table 3, section 4.4.2",
        "17.60 against 16.91",
        better(keyformer(TAKEN), keyformer(TAKEN, "positions=cache")),
    ),
    PaperClaim(
        "with new positions it still beats H2O",
        "Table 3, section 4.4.2",
        "16.91 against 16.39",
        better(keyformer(TAKEN, "positions=cache"), Wanted("h2o", TAKEN)),
    ),
    PaperClaim(
        "a score for each layer is better than a shared one",
        "Table 3, section 4.4.1",
        "17.60 against 17.37",
        better(keyformer(TAKEN), keyformer(TAKEN, "shared=true")),
    ),
    PaperClaim(
        "a shared score still beats H2O",
        "Table 3",
        "17.37 against 16.39",
        better(keyformer(TAKEN, "shared=true"), Wanted("h2o", TAKEN)),
    ),
    PaperClaim(
        "H2O beats window attention",
        "Table 3",
        "16.39 against 4.27",
        better(Wanted("h2o", TAKEN), Wanted("window", TAKEN)),
    ),
    PaperClaim(
        "StreamingLLM is worse than window attention",
        "Table 3, appendix A.7",
        "0.018 against 4.27",
        better(Wanted("window", TAKEN), Wanted("streaming", TAKEN)),
    ),
    PaperClaim(
        "a temperature that rises from 1 to 2 is better than one of 1",
        "Figure 16, appendix A.8",
        "no number",
        better(keyformer(TAKEN), keyformer(TAKEN, "tau_end=1")),
    ),
    PaperClaim(
        "a temperature that rises from 1 to 2 is better than one of 2",
        "Figure 16, appendix A.8",
        "no number",
        better(keyformer(TAKEN), keyformer(TAKEN, "tau_init=2")),
    ),
    PaperClaim(
        "a recent window of 25% is better than one of 10%",
        "Figure 12, appendix A.4",
        "best at 20% to 30%",
        better(keyformer(0.35), keyformer(0.35, "recent=0.1")),
    ),
    PaperClaim(
        "a recent window of 25% is better than one of 50%",
        "Figure 12, appendix A.4",
        "best at 20% to 30%",
        better(keyformer(0.35), keyformer(0.35, "recent=0.5")),
    ),
    PaperClaim(
        "damped scores (α = 0.9, 0.99) do not reach the full cache's quality at 50%",
        "Figure 5, section 2.3.3",
        "no α does",
        best(ALL, *DAMPED),
    ),
    PaperClaim("90% of the attention is on 40% of the tokens", "Figure 3b", "90%", _mass("top_40", 0.9)),
    PaperClaim(
        "half of the tokens hold at least 90% of the attention", "section 2.3.3", "90% to 95%", _mass("top_50", 0.9)
    ),
    PaperClaim("layers differ in sparsity (10 points)", "Figure 3a", "no number", of_special("attention", _uneven)),
    PaperClaim(
        "sparsity rises with the threshold, 0% to 5% of the largest score",
        "Figure 11, appendix A.3",
        "no number",
        of_special("attention", _sparser),
    ),
    PaperClaim(
        "Gumbel noise makes the expected softmax more even, in every layer",
        "eq. 8",
        "H(E[z_Gumbel]) > H(E[z])",
        of_special("attention", _entropies),
    ),
    PaperClaim(
        "50% of the prompt mean 2.9 times less traffic of the cache (bytes allocated)",
        "Figure 10",
        "2.9×",
        ratio("cache_bytes", ALL, keyformer(HALF), least=2.9),
    ),
    PaperClaim(
        "50% of the prompt generate faster than a full cache (by a tenth)",
        "Table 1",
        "1.29×, 1.62×, 2.05×",
        ratio("decode_tokens_per_second", keyformer(HALF), ALL, least=1.1),
    ),
    PaperClaim(
        "50% of the prompt generate faster than H2O with 90% (by a tenth)",
        "Table 1",
        "1.15×, 1.19×, 1.21×",
        ratio("decode_tokens_per_second", keyformer(HALF), Wanted("h2o", 0.45), least=1.1),
    ),
]
