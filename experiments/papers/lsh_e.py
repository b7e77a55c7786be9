"""Claims of LSH-E (HashEvict, arXiv 2412.16187). Its shares of the cache refer to the whole text, as ours do."""

from __future__ import annotations

import itertools

from experiments.papers.paper import (
    FULL,
    Check,
    Finding,
    Measured,
    PaperClaim,
    Wanted,
    alike,
    better,
    falling,
    near,
    no_worse,
    ratio,
)

ALL = Wanted(FULL)
ONCE = Wanted("lsh_e[prompt=one_shot]", 0.5)
"""LSH-E that reads the prompt whole, as the paper's throughput implies."""
BITS = (8, 16, 24, 32)
"""Numbers of bits of Table 10."""


def lsh_e(share: float, settings: str = "") -> Wanted:
    """Return LSH-E by Algorithm 1 at a share of the text; the usual hash has 16 bits."""
    return Wanted(f"lsh_e[{settings}]" if settings else "lsh_e", share)


def l2(share: float) -> Wanted:
    """Return the paper's main baseline, which also keeps the first 4 and the newest 10 tokens."""
    return Wanted("l2[sinks=4,recent=10]", share)


def fastgen(threshold: float) -> Wanted:
    """Return FastGen at a share of recovered attention."""
    return Wanted(f"fastgen[threshold={threshold:g}]")


def beside(wanted: Wanted) -> Wanted:
    """Return the same policy in the fidelity task, beside the full cache."""
    return wanted.but(task="fidelity", length=0.5)


def asked(wanted: Wanted, depth: float = 0.5) -> Wanted:
    """Return the same policy in a retrieval task."""
    return wanted.but(task="retrieval", depth=depth)


def _correlations() -> Check:
    hashes = tuple(beside(lsh_e(0.5, f"bits={bits}")) for bits in BITS)

    def judge(measured: Measured) -> Finding:
        found = [float(measured.value(each, "score_correlation")) for each in hashes]
        numbers = ", ".join(f"{value:.3f}" for value in found)
        return Finding(numbers, all(b > a for a, b in itertools.pairwise(found)))

    return Check(hashes, judge)


def _correlates() -> Check:
    hashed = beside(lsh_e(0.5, "bits=32"))

    def judge(measured: Measured) -> Finding:
        found = float(measured.value(hashed, "score_correlation"))
        return Finding(f"{found:.3f}", found > 0)

    return Check((hashed,), judge)


def _loses_more() -> Check:
    norms, hashed = beside(l2(0.5)), beside(lsh_e(0.5, "bits=16"))

    def judge(measured: Measured) -> Finding:
        of_norms, of_hashes = (float(measured.value(each, "attention_loss_ratio")) for each in (norms, hashed))
        return Finding(f"{of_norms:.4f} against {of_hashes:.4f}", of_norms < of_hashes)

    return Check((norms, hashed), judge)


CLAIMS = [
    *(
        PaperClaim(
            f"beats the L2 norm with {share:.0%} of the cache",
            "Figures 2 and 3, Table 4",
            f"ROUGE-L {numbers} (GSM8K)",
            better(lsh_e(share), l2(share)),
        )
        for share, numbers in (
            (0.1, "0.157 against 0.151"),
            (0.3, "0.341 against 0.288"),
            (0.5, "0.393 against 0.355"),
            (0.7, "0.401 against 0.386"),
            (0.9, "0.403 against 0.400"),
        )
    ),
    *(
        PaperClaim(
            f"is as good as H2O with {share:.0%} of the cache",
            "Figure 2, Table 4",
            f"ROUGE-L {numbers} (GSM8K)",
            no_worse(lsh_e(share), Wanted("h2o", share)),
        )
        for share, numbers in ((0.3, "0.341 and 0.364"), (0.5, "0.393 and 0.398"))
    ),
    PaperClaim(
        "is worse than H2O with 10% of the cache",
        "Figure 2, Table 4",
        "ROUGE-L 0.157 against 0.227 (GSM8K)",
        better(Wanted("h2o", 0.1), lsh_e(0.1)),
    ),
    PaperClaim(
        "beats H2O with 50% of the cache",
        "Figures 3 and 6, Tables 1 and 7",
        "ROUGE-L 0.186 against 0.181 (MultiNews), 0.245 against 0.149 (MedQA)",
        better(lsh_e(0.5), Wanted("h2o", 0.5)),
    ),
    *(
        PaperClaim(
            f"is as good as Scissorhands with {share:.0%} of the cache",
            "Figure 2, Table 4",
            f"ROUGE-L {numbers} (GSM8K)",
            no_worse(lsh_e(share), Wanted("scissorhands", share)),
        )
        for share, numbers in ((0.3, "0.341 and 0.357"), (0.5, "0.393 and 0.389"))
    ),
    PaperClaim(
        "is worse than Scissorhands with 10% of the cache",
        "Figure 2, Table 4",
        "ROUGE-L 0.157 against 0.205 (GSM8K)",
        better(Wanted("scissorhands", 0.1), lsh_e(0.1)),
    ),
    PaperClaim(
        "beats Scissorhands with 50% of the cache",
        "Figure 6, Table 1",
        "ROUGE-L 0.186 against 0.182 (MultiNews)",
        better(lsh_e(0.5), Wanted("scissorhands", 0.5)),
    ),
    *(
        PaperClaim(
            f"with {share:.0%} of the cache hardly anything is lost (nats at most {most:.1%} higher)",
            "Table 4",
            f"{rouge} of 0.403 ROUGE-L",
            near(lsh_e(share), ALL, most),
        )
        for share, most, rouge in ((0.5, 0.025, "0.393"), (0.7, 0.005, "0.401"))
    ),
    PaperClaim(
        "FastGen collapses below T = 0.8: at 0.7 it is worse than LSH-E with 10% of the cache",
        "Table 4",
        "ROUGE-L 0.139 against 0.157",
        better(lsh_e(0.1), fastgen(0.7)),
    ),
    PaperClaim(
        "FastGen gets worse from T = 0.9 over 0.8 to 0.7",
        "Tables 4 to 8",
        "ROUGE-L 0.391, 0.264, 0.139",
        better(fastgen(0.9), fastgen(0.8), fastgen(0.7)),
    ),
    PaperClaim(
        "the number of bits hardly matters (4, 8, 32, 64 beside 16)",
        "Table 9",
        "ROUGE-L 0.397, 0.398, 0.393, 0.390 beside 0.397",
        alike(lsh_e(0.5), *(lsh_e(0.5, f"bits={bits}") for bits in (4, 8, 32, 64))),
    ),
    PaperClaim(
        "few bits are slightly better than many: 4 than 64",
        "Table 9",
        "ROUGE-L 0.397 against 0.390",
        better(lsh_e(0.5, "bits=4"), lsh_e(0.5, "bits=64")),
    ),
    PaperClaim(
        "every bit costs memory: 64 bits more than 32, these more than 4",
        "Table 9",
        "3.25, 3.01, 2.81 GB",
        falling("cache_bytes", *(lsh_e(0.5, f"bits={bits}") for bits in (64, 32, 4))),
    ),
    PaperClaim(
        "hashes take little: at most 4% more than the L2 norm's cache",
        "Table 2",
        "2.89 GB against 2.79 GB: 1.038×",
        ratio("cache_bytes", lsh_e(0.5), l2(0.5), least=1, most=1.04, places=3),
    ),
    *(
        PaperClaim(
            f"reads prompts faster than {name} (by a tenth)",
            "Table 1",
            f"{times}×",
            ratio("prefill_seconds", other, ONCE, least=1.1),
        )
        for name, other, times in (
            ("H2O", Wanted("h2o", 0.5), "1.46"),
            ("Scissorhands", Wanted("scissorhands", 0.5), "1.51"),
            ("FastGen", fastgen(0.8), "17"),
        )
    ),
    PaperClaim(
        "reads prompts as fast as the L2 norm (within a tenth)",
        "Table 1",
        "1.02× at 30%, 1.01× at 70%",
        ratio("prefill_seconds", ONCE, l2(0.5), most=1.1),
    ),
    PaperClaim(
        "decodes as fast as H2O (within a tenth)",
        "Table 1",
        "22.8 against 22.0 tokens/s: 1.04×",
        ratio("decode_tokens_per_second", ONCE, Wanted("h2o", 0.5), least=0.9),
    ),
    PaperClaim(
        "hashes correlate with attention, the more bits the better (8, 16, 24, 32)",
        "Table 10, Figure 9a",
        "0.202, 0.279, 0.335, 0.375",
        _correlations(),
    ),
    PaperClaim("the correlation with attention is positive (32 bits)", "Table 10", "0.375", _correlates()),
    PaperClaim(
        "ranking by key norms loses less attention than by hashes", "Figure 8, eq. 7", "no number", _loses_more()
    ),
    PaperClaim(
        "finds needles as well as the L2 norm does with 50% of the cache",
        "Figure 5b",
        "slightly better",
        no_worse(asked(lsh_e(0.5)), asked(l2(0.5)), column="string_match_of_cases", higher=True),
    ),
    PaperClaim(
        "loses needles below 50% of the cache: 25% against all of it",
        "Figure 5b",
        "a sharp drop",
        better(asked(ALL), asked(lsh_e(0.25)), column="string_match_of_cases", higher=True),
    ),
]
