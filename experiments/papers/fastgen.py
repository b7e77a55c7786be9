"""Claims of FastGen (arXiv 2310.01801). Bytes are those of a text whose first half is the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.papers.paper import (
    FULL,
    Check,
    EqualBytes,
    Finding,
    Measured,
    PaperClaim,
    Wanted,
    alike,
    better,
    of_special,
    ratio,
)

ALL = Wanted(FULL)
FIXED = {"H2O (frequent + local)": "h2o", "local": "window", "frequent": "h2o[recent=1]"}
"""Baselines of the paper: one policy for all heads."""
WITHOUT = {
    "special": ("('punctuation','frequent','local')", "31.16%", "47.64%"),
    "punctuation": ("('special','frequent','local')", "34.23%", "49.56%"),
    "local": ("('special','punctuation','frequent')", "30.18%", "49.06%"),
    "frequent": ("('special','punctuation','local')", "21.26%", "46.08%"),
}
"""Table 4: remaining policies, pruned share and win rate of the answer; 36.04% and 49.75% with all policies."""


def fastgen(threshold: float, settings: str = "") -> Wanted:
    """Return FastGen at a share of recovered attention, with settings as in `fastgen[threshold=0.9,local=0.1]`."""
    return Wanted(f"fastgen[threshold={threshold:g}{f',{settings}' if settings else ''}]")


ABLATED = fastgen(0.98)
LAST = fastgen(0.98, "order=('special','frequent','local','punctuation')")


def at_equal_bytes(policy: str, ours: Wanted) -> Wanted:
    """Return one policy for all heads, with the slots that fit in FastGen's bytes."""
    return Wanted(policy, EqualBytes(ours.policy))


def _without(part: str) -> Wanted:
    return fastgen(0.98, f"order={WITHOUT[part][0]}")


def pruned(measured: Measured, wanted: Wanted) -> float:
    """Return the saved share of a full cache's bytes."""
    return 1 - measured.value(wanted, "cache_bytes") / measured.value(wanted, "full_cache_bytes")


def _prunes(wanted: Wanted, least: float) -> Check:
    def judge(measured: Measured) -> Finding:
        share = pruned(measured, wanted)
        return Finding(f"{share:.1%}", share >= least)

    return Check((wanted,), judge)


def _prunes_less(wanted: Wanted, than: Wanted, by: float = 0.0) -> Check:
    def judge(measured: Measured) -> Finding:
        less, more = pruned(measured, wanted), pruned(measured, than)
        return Finding(f"{less:.1%} against {more:.1%}", less < more - by)

    return Check((wanted, than), judge)


def _least_pruned(part: str) -> Check:
    others = {name: _without(name) for name in WITHOUT}

    def judge(measured: Measured) -> Finding:
        shares = {name: pruned(measured, wanted) for name, wanted in others.items()}
        numbers = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        return Finding(numbers, all(shares[part] < share for name, share in shares.items() if name != part))

    return Check(tuple(others.values()), judge)


def _costs_most(part: str) -> Check:
    others = {name: _without(name) for name in WITHOUT}
    steps = {name: better(wanted, others[part]) for name, wanted in others.items() if name != part}

    def judge(measured: Measured) -> Finding:
        found = {name: step.judge(measured) for name, step in steps.items()}
        shown = [each.shown for each in found.values()]
        numbers = "; ".join(f"{name}: {each.numbers}" for name, each in found.items())
        return Finding(numbers, None if None in shown else all(shown))

    return Check(tuple(others.values()), judge)


def _profiling() -> Check:
    ours = fastgen(0.95)

    def judge(measured: Measured) -> Finding:
        more = measured.value(ours, "prefill_seconds") - measured.value(ALL, "prefill_seconds")
        rate = measured.value(ours, "decode_tokens_per_second") / measured.value(ours, "cases")
        share = max(0.0, more) / (measured.value(ours, "prefill_seconds") + 1024 / rate)
        return Finding(f"{share:.2%} of 1024 tokens", share < 0.0035)

    return Check((ours, ALL), judge)


def _shares(get: Any) -> np.ndarray:
    """Return the share of heads that make each choice, by layer [layers, choices]."""
    chosen = np.asarray(get("choice"))
    return np.stack([(chosen == i).mean((1, 2)) for i in range(get("choices"))], axis=1)


def _layers_differ(get: Any) -> Finding:
    shares = _shares(get)
    spread = float((shares.max(0) - shares.min(0)).max())
    return Finding(f"{100 * spread:.0f} points", spread >= 0.25)


def _heads_differ(get: Any) -> Finding:
    shares = _shares(get)
    mixed = int(((shares >= 0.1).sum(1) >= 2).sum())
    return Finding(f"{mixed} of {len(shares)} layers", 2 * mixed >= len(shares))


def _outer_full(get: Any) -> Finding:
    full = _shares(get)[:, -1]
    outer, middle = (full[0] + full[-1]) / 2, full[1:-1].mean()
    return Finding(f"{outer:.0%} against {middle:.0%}", bool(outer > middle))


def _special_alone(get: Any) -> Finding:
    share = float(_shares(get)[1:-1, 0].mean())
    return Finding(f"{share:.0%}", share > 0.5)


def _parts(recovered: Any) -> np.ndarray:
    """Return the attention that each part adds, the rest last [..., parts]."""
    summed = np.asarray(recovered)
    return np.diff(np.concatenate([summed, np.ones((*summed.shape[:-1], 1))], axis=-1), axis=-1, prepend=0.0)


def _special_largest(get: Any) -> Finding:
    parts = _parts(get("recovered")).mean((0, 1, 2))
    return Finding(f"{parts[0]:.0%} of the attention", int(parts.argmax()) == 0)


def _stable(get: Any) -> Finding:
    same = float((np.asarray(get("choice")) == np.asarray(get("choice_later"))).mean())
    return Finding(f"{same:.1%} choose the same", same >= 0.9)


def _moves_little(get: Any) -> Finding:
    moved = float(np.abs(_parts(get("recovered_later")) - _parts(get("recovered"))).mean())
    return Finding(f"{100 * moved:.2f} points", moved < 0.02)


def _score_memory(get: Any) -> Finding:
    share = get("score_bytes") / get("pair_bytes")
    return Finding(f"{share:.2%}", share <= 0.01)


CLAIMS = [
    *(
        PaperClaim(
            f"beats {name} for all heads at equal bytes (T = {threshold:g})",
            "Figures 2 and 5",
            "50% pruned is better than fixed policies with 15%",
            better(fastgen(threshold), at_equal_bytes(policy, fastgen(threshold))),
        )
        for threshold in (0.8, 0.95)
        for name, policy in FIXED.items()
    ),
    *(
        PaperClaim(
            f"prunes at least {share:.1%} at T = {threshold:g}",
            "Table 1 (7B)",
            f"{share:.1%} at T = {paper}",
            _prunes(fastgen(threshold), share),
        )
        for threshold, share, paper in ((0.98, 0.169, "0.98"), (0.95, 0.398, "0.95"), (0.9, 0.566, "0.91"))
    ),
    PaperClaim("loses nothing at T = 0.98", "Table 1", "win rates of 47.4% to 49.8%", alike(ALL, ABLATED)),
    *(
        PaperClaim(
            f"without {part} tokens less is pruned (T = 0.98)",
            "Table 4",
            f"{share} against 36.04%",
            _prunes_less(_without(part), ABLATED),
        )
        for part, (_, share, _) in WITHOUT.items()
    ),
    PaperClaim("of the four, frequent tokens prune most", "Table 4", "21.26% without them", _least_pruned("frequent")),
    PaperClaim("without frequent tokens quality suffers most", "Table 4", "win rate 46.08%", _costs_most("frequent")),
    PaperClaim(
        "special tokens matter: quality is worse without them",
        "Table 4",
        "win rate 47.64% against 49.75%",
        better(ABLATED, _without("special")),
    ),
    PaperClaim(
        "punctuation last is worse",
        "Table 5",
        "win rate 47.64% against 49.75%",
        better(ABLATED, LAST),
    ),
    PaperClaim(
        "punctuation last prunes a little more", "Table 5", "36.40% against 36.04%", _prunes_less(ABLATED, LAST)
    ),
    PaperClaim(
        "r_f = 0.1 instead of 0.3 keeps 10 points more",
        "Figure 6",
        "+10%",
        _prunes_less(fastgen(0.98, "frequent=0.1"), ABLATED, 0.1),
    ),
    *(
        PaperClaim(
            f"{symbol} hardly changes quality (0.1 beside 0.3)",
            "Figure 6",
            "win rate over 45%",
            alike(ABLATED, fastgen(0.98, f"{name}=0.1")),
        )
        for symbol, name in (("r_f", "frequent"), ("r_l", "local"))
    ),
    PaperClaim(
        "layers differ: some choice is 25 points more frequent in one than in another (T = 0.95)",
        "Figure 3",
        "vastly different",
        of_special("profile", _layers_differ),
    ),
    PaperClaim(
        "heads of one layer differ: in half of the layers two choices have a tenth of the heads each",
        "Figures 1 and 3",
        "no number",
        of_special("profile", _heads_differ),
    ),
    PaperClaim(
        "the first and the last layer have more full heads than those between",
        "Figure 3",
        "no number",
        of_special("profile", _outer_full),
    ),
    PaperClaim(
        "most heads between choose special tokens alone", "Figure 3", "most", of_special("profile", _special_alone)
    ),
    PaperClaim(
        "special tokens get the largest part of the attention",
        "Figure 4",
        "a large part",
        of_special("profile", _special_largest),
    ),
    PaperClaim(
        "nine heads in ten would choose the same after 30 tokens",
        "Figure 4",
        "relatively stable",
        of_special("profile", _stable),
    ),
    PaperClaim(
        "what parts get of the attention moves by less than 2 points in 30 tokens",
        "Figure 4",
        "relatively stable",
        of_special("profile", _moves_little),
    ),
    PaperClaim(
        "decodes faster than a full cache (by a tenth, T = 0.8)",
        "Table 2",
        "16% to 55% less time",
        ratio("decode_tokens_per_second", fastgen(0.8), ALL, least=1.1),
    ),
    PaperClaim("profiling takes below 0.35% of a generation", "Table 3", "0.07% to 0.35%", _profiling()),
    PaperClaim("scores take at most 1% beside the pairs", "section 5.4", "0.78%", of_special("memory", _score_memory)),
]
