"""A literal decoder in float64 NumPy: one row, one token, one head at a time, with caches that are growing lists.

It is the specification that kvjax is compared with, token by token. An oracle of a policy subclasses `Oracle`; there
is one object per layer and row. Every KV head h of the layer has `self.heads[h]`, a `Head` of parallel lists, one entry
per cached token, oldest first: `positions`, `tokens`, `keys` (rotated by original position), `raw_keys`, `values` and
`notes` (whatever the policy remembers of the token; the decoder drops a note together with its token).

Reading a prompt, after plain causal attention over all of it:

    read(prompt)         fill self.heads[h].notes, one per prompt token (they are None before)
    lay(prompt)          only before the next line: store its pairs
    reread(h, g, probs, hidden)  only with `again = True`: the prompt is read once more, in chunks of `self.chunk`, the
                         first after the tokens `self.prompt`, others after `self.later` and the `self.overlap` tokens
                         of the prompt before them, over the lists, to which nothing is appended; probs is an array
                         over the list, hidden the layer's input at the query
    couple(oracles)      static, all layers of the row; for policies whose layers share something
    keep(prompt)         -> for each KV head the indices that stay

Decoding one token, layer by layer (a policy with `sequential = True` reads its prompt so, too):

    note(h, new)         -> the note of the new token, then appended with its key and value
    store(h, k, v)       -> the pair as it lies in the lists; unchanged unless overridden
    see(h, q, turn)      -> keys [n, d] and queries [g][d] as the model multiplies them; also kept in `self.saw`
    reads(probs)         -> the indices that a query reads; all of them unless overridden
    attend(h, g, q, probs)  -> [d], what query q of query head g reads from head h; the average unless overridden;
                         called for every prompt token too, whose probs are zero for later tokens
    after(new, probs)    probs[h][g] is an array over the list, the new token included: update notes
    couple(oracles)      after the last layer
    leaving(new)         -> for each KV head the index that leaves, or None

That is the papers' order: append, attend over one token more than the budget, evict one. With `evicts_first`, `leaving`
comes before `note`, as in Algorithm 1 of LSH-E and in kvjax, whose budget and recent window count the token being read;
`Case.oracles` turns its numbers into the papers'.

Reading a turn, more text on top of what is held: a policy with `sequential = True` decodes it. For the others, which no
paper has: as decoding, but without `leaving`, and at the end

    turned(turn)         -> whatever becomes of the notes
    keep(turn)

Whatever leaves besides what `leaving` and `keep` name goes through `retain(h, indices)`.

Most oracles need only `scores(h, new)` (one number per cached token, lowest leaves first, -inf at once) and `note`,
`read`, `after`: `leaving` and `keep` are then those below, with sinks, recent window, special tokens and the limit.
All settings of the parts of the kvjax policy are attributes (`self.recent`, see `settings_of` in tests/cases.py), as
are `layer`, `layers`, `limits` (the budget of each head), `kv_heads`, `groups` and whatever the case
injects (noise, hash matrices).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Head:
    """What one KV head of one layer holds: parallel lists, oldest token first."""

    positions: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    keys: list[np.ndarray] = dataclasses.field(default_factory=list)
    raw_keys: list[np.ndarray] = dataclasses.field(default_factory=list)
    values: list[np.ndarray] = dataclasses.field(default_factory=list)
    notes: list[Any] = dataclasses.field(default_factory=list)

    def retain(self, indices: Sequence[int]) -> None:
        """Drop every token but these."""
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            setattr(self, field.name, [column[i] for i in sorted(indices)])


@dataclasses.dataclass
class Prompt:
    """A prompt or a turn of n tokens as one layer sees it; queries and keys rotated by original position."""

    tokens: list[int]
    queries: list[list[np.ndarray]]
    """[h][g], each [n, d]"""
    keys: list[np.ndarray]
    """[h], each [n, d]"""
    values: list[np.ndarray]
    probs: list[list[np.ndarray]]
    """[h][g], each [n, n], row = query, lower triangular; empty for a turn"""
    horizon: int
    """Tokens that are going to be generated."""
    start: int = 0
    """Position of the first token."""

    @property
    def prompt_length(self) -> int:
        return self.start + len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return self.prompt_length - 1

    def append(self, new: New) -> None:
        """One more token of a turn."""
        self.tokens.append(new.token)
        for h, group in enumerate(new.queries):
            for g, query in enumerate(group):
                self.queries[h][g] = np.array([*self.queries[h][g], query])


@dataclasses.dataclass
class New:
    """The one token of a decode step as one layer sees it; queries and keys rotated by original position."""

    token: int
    position: int
    queries: list[list[np.ndarray]]
    """[h][g], each [d]"""
    keys: list[np.ndarray]
    values: list[np.ndarray]
    prompt_length: int
    horizon: int


class Oracle:
    """A policy for one layer of one row; see the module's docstring."""

    sequential = False
    evicts_first = False
    fills = True
    """Whether kvjax's slot for the next token still has a token of the prompt that is going to leave."""
    layer: int
    layers: int
    limits: list[int]
    kv_heads: int
    groups: int
    sinks: int
    recent: int | float
    recents: list[int]
    """The recent window of each head."""
    special: tuple[int, ...]
    positions: str
    given = False
    """Whether the tokens are those of a turn."""
    again = False
    output: np.ndarray
    """Weights of attention's output [width, query heads * d]."""
    levelled = True
    """Whether codes are of keys whose channels have been divided by factors."""
    alibi = False
    """Whether logits fall with the distance of places."""
    saw: tuple[np.ndarray, list[np.ndarray]]
    """Keys and queries of the head that attends, as the model multiplies them."""

    def __init__(self, limits: Sequence[int], **attributes: Any) -> None:
        vars(self).update(attributes)
        self.limits = list(limits)
        self.heads = [Head() for _ in range(self.kv_heads)]
        self.start()

    def start(self) -> None:
        """Whatever else the policy remembers of the layer."""

    def scores(self, h: int, new: New | Prompt) -> Sequence[float]:
        """One number per token in the lists of head h: lowest leaves first, -inf at once, +inf never."""
        raise NotImplementedError

    def read(self, prompt: Prompt) -> None:
        pass

    def lay(self, prompt: Prompt) -> None:
        """Store the pairs of a prompt as they lie in the lists; unchanged unless overridden."""

    def reread(self, h: int, g: int, probs: np.ndarray, hidden: np.ndarray) -> None:
        pass

    def turned(self, turn: Prompt) -> None:
        pass

    def note(self, h: int, new: New) -> Any:
        return None

    def store(self, h: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return key, value

    def see(
        self, h: int, new: New, raw: Sequence[np.ndarray], turn: Callable[[np.ndarray, int], np.ndarray]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Keys of head h and its group's queries, given the unrotated queries and what rotates a vector to a place."""
        head = self.heads[h]
        if self.positions == "original":
            return np.array(head.keys), new.queries[h]
        last = len(head.raw_keys) - 1
        return np.array([turn(key, i) for i, key in enumerate(head.raw_keys)]), [turn(query, last) for query in raw]

    def places(self, h: int) -> Sequence[int]:
        """Where the model sees the tokens of head h."""
        positions = self.heads[h].positions
        return positions if self.positions == "original" else range(len(positions))

    def bias(self, h: int, g: int, places: Sequence[int]) -> np.ndarray:
        """What is added to the logits of places for a query at the last of them."""
        if not self.alibi:
            return np.zeros(len(places))
        return slope(h * self.groups + g, self.kv_heads * self.groups) * (np.array(places) - places[-1])

    def retain(self, h: int, indices: Sequence[int]) -> None:
        self.heads[h].retain(indices)

    def reads(self, probs: np.ndarray) -> Sequence[int]:
        return range(len(probs))

    def attend(self, h: int, g: int, query: np.ndarray, probs: np.ndarray) -> np.ndarray:
        return probs @ np.array(self.heads[h].values)

    def total(self, h: int, g: int, query: np.ndarray, logits: np.ndarray) -> float:
        """Denominator of what query head g reads from head h."""
        return np.exp(logits)[list(self.reads(softmax(logits)))].sum()

    def after(self, new: New, probs: list[list[np.ndarray]]) -> None:
        pass

    @staticmethod
    def couple(oracles: Sequence[Any]) -> None:
        pass

    def sink_slots(self, h: int) -> int:
        return self.sinks

    def recent_slots(self, h: int) -> int:
        return self.recents[h]

    def protected(self, h: int, i: int, newest: int) -> bool:
        """Whether token i of head h may never leave while `newest` is the newest position."""
        head = self.heads[h]
        sink = head.positions[i] < self.sink_slots(h)
        recent = head.positions[i] > newest - self.recent_slots(h)
        return sink or recent or head.tokens[i] in self.special

    def ranks(self, h: int, new: New | Prompt) -> list[float]:
        return self.with_protected(h, new, self.scores(h, new))

    def contest(self, h: int, new: New | Prompt) -> list[float]:
        """By what its tokens compete with those of other heads."""
        return self.ranks(h, new)

    def with_protected(self, h: int, new: New | Prompt, scores: Sequence[float]) -> list[float]:
        return [
            math.inf if self.protected(h, i, new.position) and scores[i] > -math.inf else float(scores[i])
            for i in range(len(self.heads[h].positions))
        ]

    def leaving(self, new: New) -> Sequence[int | None]:
        leaving: list[int | None] = []
        for h in range(self.kv_heads):
            ranks = self.ranks(h, new)
            if len(ranks) + self.evicts_first > self.limits[h] or -math.inf in ranks:
                leaving.append(ranks.index(min(ranks)))  # the first, so the oldest, of equals
            else:
                leaving.append(None)
        return leaving

    def keep(self, prompt: Prompt) -> list[list[int]]:
        staying = []
        for h in range(self.kv_heads):
            ranks = self.ranks(h, prompt)
            alive = [i for i in range(len(ranks)) if ranks[i] > -math.inf]
            # Of equals the newest stay.
            best = sorted(((ranks[i], i) for i in alive), reverse=True)
            staying.append([i for _, i in best[: self.limits[h]]])
        return staying


@dataclasses.dataclass
class Decoder:
    """A Llama-like model and the oracles of its layers, for one row.

    `attended` has the positions that the newest token attended to, itself included: [layer][KV head], sorted.

    Args:
        weights: kvjax weights with NumPy float64 leaves.
        config: the model's `ModelConfig`.
        oracles: one per layer.
        horizon: tokens that are going to be generated.
    """

    weights: Any
    config: Any
    oracles: list[Oracle]
    horizon: int

    def __post_init__(self) -> None:
        for oracle in self.oracles:
            oracle.alibi = self.config.position == "alibi"
            mixer = self.weights.layers[oracle.layer].mixer
            oracle.output = mixer.output.weight if self.config.latent is None else self._of_latents(mixer)
            oracle.levelled = self.config.latent is None

    def _of_latents(self, mixer) -> np.ndarray:
        """Weights [width, query heads * d] of an output that is made of values, which heads make of latents."""
        unread = np.zeros((self.config.latent.rotated, self.config.width))
        outputs = np.split(mixer.output.weight, self.config.heads, axis=1)
        ups = zip(outputs, mixer.value_up.weight, strict=True)
        return np.concatenate([np.vstack([unread, (output @ up).T]) for output, up in ups]).T

    def prompt(self, tokens: Sequence[int]) -> np.ndarray:
        """Read a prompt and return the logits [vocab] of its last token."""
        self.prompt_length = len(tokens)
        self.next = 0
        if self.oracles[0].sequential:
            return [self.step(token) for token in tokens][-1]
        hidden = [self._embed(token, i) for i, token in enumerate(tokens)]
        prompts = []
        for layer, oracle in zip(self.weights.layers, self.oracles, strict=True):
            prompt, read = self._read_prompt(layer, oracle, [int(token) for token in tokens], hidden)
            oracle.read(prompt)
            prompts.append(prompt)
            hidden = [self._finish(layer, x, heads) for x, heads in zip(hidden, read, strict=True)]
        if any(oracle.again for oracle in self.oracles):
            for oracle, prompt in zip(self.oracles, prompts, strict=True):
                oracle.lay(prompt)
            self._read_again([int(token) for token in tokens])
        self._couple()
        for oracle, prompt in zip(self.oracles, prompts, strict=True):
            for head, staying in zip(oracle.heads, oracle.keep(prompt), strict=True):
                head.retain(staying)
        self.next = len(tokens)
        return self._unembed(hidden[-1])

    def _read_prompt(self, layer, oracle: Oracle, tokens: list[int], hidden: list[np.ndarray]):
        """Plain causal attention: the prompt as the layer sees it, and what each token reads, [token][h][g][d]."""
        n = len(tokens)
        projected = [self._project(layer, oracle.layer, x, i) for i, x in enumerate(hidden)]
        turn, window = functools.partial(self._rotate, oracle.layer), self.config.layer(oracle.layer).window
        queries, probs = [], []
        read: list[list[list[np.ndarray]]] = [[] for _ in range(n)]
        for h, head in enumerate(oracle.heads):
            head.positions, head.tokens, head.notes = list(range(n)), list(tokens), [None] * n
            head.raw_keys = [projected[i][1][h] for i in range(n)]
            head.keys = [turn(head.raw_keys[i], i) for i in range(n)]
            head.values = [projected[i][2][h] for i in range(n)]
            keys = np.array(head.keys)
            queries.append([])
            probs.append([])
            for i in range(n):
                read[i].append([])
            for g in range(oracle.groups):
                rotated = np.array([turn(projected[i][0][h][g], i) for i in range(n)])
                matrix = np.zeros((n, n))
                for i in range(n):
                    seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
                    logits = keys[seen] @ rotated[i] / math.sqrt(keys.shape[1])
                    logits = logits + oracle.bias(h, g, head.positions[seen])
                    matrix[i, seen] = softmax(logits)
                    out = oracle.attend(h, g, rotated[i], matrix[i])
                    total = oracle.total(h, g, rotated[i], logits)
                    read[i][h].append(out * beside_sink(layer, h * oracle.groups + g, total))
                queries[h].append(rotated)
                probs[h].append(matrix)
        keys = [np.array(head.keys) for head in oracle.heads]
        values = [np.array(head.values) for head in oracle.heads]
        return Prompt(tokens, queries, keys, values, probs, self.horizon), read

    def _read_again(self, tokens: list[int]) -> None:
        """Read chunks of the prompt again, each after a request and over the whole prompt; nothing of it stays."""
        said: Any = next(oracle for oracle in self.oracles if oracle.again)
        for first in range(0, len(tokens), said.chunk):
            request = [*said.later, *tokens[max(first - said.overlap, 0) : first]] if first else said.prompt
            text, n = [*request, *tokens[first : first + said.chunk]], len(tokens)
            hidden = [self._embed(token, n + i) for i, token in enumerate(text)]
            for layer, oracle in zip(self.weights.layers, self.oracles, strict=True):
                turn, window = functools.partial(self._rotate, oracle.layer), self.config.layer(oracle.layer).window
                projected = [self._project(layer, oracle.layer, x, n + i) for i, x in enumerate(hidden)]
                after = []
                for i, x in enumerate(hidden):
                    read: list[list[np.ndarray]] = []
                    for h, head in enumerate(oracle.heads):
                        keys = np.array([*head.keys, *(turn(projected[j][1][h], n + j) for j in range(i + 1))])
                        values = np.array([*head.values, *(projected[j][2][h] for j in range(i + 1))])
                        places = [*head.positions, *range(n, n + i + 1)]
                        unseen = [window is not None and n + i - place >= window for place in places]
                        read.append([])
                        for g in range(oracle.groups):
                            query = turn(projected[i][0][h][g], n + i)
                            logits = keys @ query / math.sqrt(len(query)) + oracle.bias(h, g, places)
                            logits = np.where(unseen, -math.inf, logits)
                            probs = softmax(logits)
                            oracle.reread(h, g, probs[:n], x)
                            sink = beside_sink(layer, h * oracle.groups + g, np.exp(logits).sum())
                            read[h].append(probs @ values * sink)
                    after.append(self._finish(layer, x, read))
                hidden = after

    def turn(self, tokens: Sequence[int]) -> np.ndarray:
        """Read more text on top of what is held; mostly nothing leaves before its end: logits [tokens, vocab]."""
        start = self.next
        self.prompt_length = start + len(tokens)
        if any(type(oracle).sequential for oracle in self.oracles):
            return np.array([self.step(int(token)) for token in tokens])
        self.turns = []
        for oracle in self.oracles:
            queries = [[np.zeros((0, 0)) for _ in range(oracle.groups)] for _ in oracle.heads]
            self.turns.append(Prompt([], queries, [], [], [], self.horizon, start))
            oracle.given = True
        logits = np.array([self.step(int(token)) for token in tokens])
        for oracle, turn in zip(self.oracles, self.turns, strict=True):
            oracle.given = False
            oracle.turned(turn)
            for head, staying in zip(oracle.heads, oracle.keep(turn), strict=True):
                head.retain(staying)
        return logits

    def step(self, token: int) -> np.ndarray:
        """Read one more token and return its logits [vocab]."""
        position, self.next = self.next, self.next + 1
        news = []
        x = self._embed(token, position)
        for layer, oracle in zip(self.weights.layers, self.oracles, strict=True):
            raw_q, raw_k, v = self._project(layer, oracle.layer, x, position)
            turn, window = functools.partial(self._rotate, oracle.layer), self.config.layer(oracle.layer).window
            q = [[turn(query, position) for query in group] for group in raw_q]
            k = [turn(key, position) for key in raw_k]
            new = New(int(token), position, q, k, v, self.prompt_length, self.horizon)
            news.append(new)
            if oracle.given:
                self.turns[oracle.layer].append(new)
            elif oracle.evicts_first:
                self._evict(oracle, new)
            read, probs = [], []
            for h, head in enumerate(oracle.heads):
                note = oracle.note(h, new)
                head.positions.append(position)
                head.tokens.append(int(token))
                key, value = oracle.store(h, k[h], v[h])
                head.keys.append(key)
                head.raw_keys.append(raw_k[h])
                head.values.append(value)
                head.notes.append(note)
                seen, queries = oracle.saw = oracle.see(h, new, raw_q[h], turn)
                hidden = [window is not None and position - held >= window for held in head.positions]
                logits = [np.where(hidden, -math.inf, seen @ query / math.sqrt(len(query))) for query in queries]
                logits = [x + oracle.bias(h, g, oracle.places(h)) for g, x in enumerate(logits)]
                probs.append([softmax(x) for x in logits])
                read.append([])
                for g, of_query in enumerate(logits):
                    total = oracle.total(h, g, q[h][g], of_query)
                    out = oracle.attend(h, g, q[h][g], probs[h][g])
                    read[h].append(out * beside_sink(layer, h * oracle.groups + g, total))
            oracle.after(new, probs)
            x = self._finish(layer, x, read)
        self._couple()
        self.attended = self.kept()
        for oracle, new in zip(self.oracles, news, strict=True):
            if not (oracle.given or oracle.evicts_first):
                self._evict(oracle, new)
        return self._unembed(x)

    def _couple(self) -> None:
        # Layers with a window of their own have another kind of oracle.
        for kind in dict.fromkeys(map(type, self.oracles)):
            kind.couple([oracle for oracle in self.oracles if type(oracle) is kind])

    def _evict(self, oracle: Oracle, new: New) -> None:
        for head, leaving in zip(oracle.heads, oracle.leaving(new), strict=True):
            if leaving is not None:
                head.retain([i for i in range(len(head.positions)) if i != leaving])

    def kept(self) -> list[list[list[int]]]:
        """Cached positions [layer][KV head], sorted."""
        return [[sorted(head.positions) for head in oracle.heads] for oracle in self.oracles]

    def _project(self, layer, index: int, x, position: int):
        c, rope = self.config, self.config.layer(index).rope
        normed = self._norm(layer.attention_norm, x)
        if c.latent is not None:
            return self._project_latent(layer.mixer, index, normed, position)
        q = linear(layer.mixer.query, normed).reshape(c.kv_heads, c.heads // c.kv_heads, c.head_width)
        k = linear(layer.mixer.key, normed).reshape(c.kv_heads, c.head_width)
        v = linear(layer.mixer.value, normed).reshape(c.kv_heads, c.head_width)
        if c.query_key_norms and rope is not None:
            assert not c.query_key_scales
            q, k = (y / np.sqrt(np.mean(y * y, -1, keepdims=True) + c.norm_eps) for y in (q, k))
        grown = c.query_growth
        if grown is not None and (rope is None or not grown.unrotated):
            q = q * (1 + grown.slope * math.log(1 + (position + grown.offset) // grown.length))
        return [list(group) for group in q], list(k), list(v)

    def _project_latent(self, mixer, index: int, x, position: int):
        """One KV head for all, whose key is a rotated one and a latent, and its value the same."""
        widths = self.config.latent
        inner = (
            x
            if mixer.query_down is None
            else self._norm(mixer.query_norm, linear(mixer.query_down, x), widths.norm_eps)
        )
        queries = []
        for h, query in enumerate(np.split(linear(mixer.query, inner), self.config.heads)):
            absorbed = query[: widths.key_width] @ mixer.key_up.weight[h]
            queries.append(np.concatenate([query[widths.key_width :], absorbed]))
        latent, key = np.split(linear(mixer.latent, x), [widths.width])
        slot = np.concatenate([key, self._norm(mixer.latent_norm, latent, widths.norm_eps)])
        return [queries], [slot], [self._rotate(index, slot, position)]

    def _finish(self, layer, x, read) -> np.ndarray:
        heads = [out for group in read for out in group]
        if self.config.latent is not None:  # values of heads, from the latents that they read
            latents = [out[self.config.latent.rotated :] for out in heads]
            heads = [up @ latent for up, latent in zip(layer.mixer.value_up.weight, latents, strict=True)]
        x = x + linear(layer.mixer.output, np.concatenate(heads))
        return x + mlp(layer.mlp, self.config, self._norm(layer.mlp_norm, x))

    def _unembed(self, x) -> np.ndarray:
        x = self._norm(self.weights.norm, x)
        if self.weights.unembedding is None:
            return self.weights.embedding @ x
        return linear(self.weights.unembedding, x)

    def _norm(self, norm, x, eps: float | None = None) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + (eps or self.config.norm_eps)) * norm.scale

    def _embed(self, token: int, position: int) -> np.ndarray:
        x = self.weights.table.weight[token]
        return x + self.weights.positions[position] if self.config.position == "learned" else x

    def _rotate(self, layer: int, x: np.ndarray, position: int) -> np.ndarray:
        rope = self.config.layer(layer).rope
        if rope is None:
            return x
        half, longer = rope.width // 2, magnitude(rope)
        cosine, sine = _turn(position, half, rope.theta)
        turned = x.copy()
        one, other = slice(half), slice(half, rope.width)
        if rope.interleaved:
            one, other = slice(0, rope.width, 2), slice(1, rope.width, 2)
        turned[one] = (x[one] * cosine - x[other] * sine) * longer
        turned[other] = (x[other] * cosine + x[one] * sine) * longer
        return turned


def magnitude(rope: Any) -> float:
    """Factor of rotated channels, for YaRN with the frequencies of plain RoPE."""
    assert rope.scaling == "none" or (rope.scaling == "yarn" and rope.factor == 1)
    return rope.attention_factor or 1.0


@functools.cache
def _turn(position: int, half: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    angle = position * theta ** (-np.arange(half) / half)
    return np.cos(angle), np.sin(angle)


def slope(head: int, heads: int) -> float:
    """ALiBi's slope of one of 1, 2, 4, ... heads."""
    assert heads & (heads - 1) == 0
    return 2 ** (-8 * (head + 1) / heads)


def beside_sink(layer, head: int, total: float) -> float:
    """What a learned sink leaves of a softmax with this denominator: all of it in a layer without sinks."""
    logits = getattr(layer.mixer, "sink_logits", None)
    return 1.0 if logits is None else total / (total + math.exp(logits[head]))


def linear(layer, x: np.ndarray) -> np.ndarray:
    y = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def mlp(layer, config, x: np.ndarray) -> np.ndarray:
    """A gated MLP, or the experts of highest router probability, weighted by their probabilities among each other.

    In Llama 4 every token has a further expert, and a sigmoid weights what the others are given.
    """
    if not hasattr(layer, "router"):
        gate = linear(layer.gate, x)
        return linear(layer.down, gate / (1 + np.exp(-gate)) * linear(layer.up, x))
    mixture, logits = config.mixture, layer.router @ x
    probabilities = 1 / (1 + np.exp(-logits)) if mixture.probability == "sigmoid" else softmax(logits)
    used = sorted(range(mixture.count), key=lambda e: -probabilities[e])[: mixture.used]
    total = np.zeros_like(x)
    for e in used:
        of_input, of_output = 1.0, probabilities[e] / (probabilities[used].sum() if mixture.renormalised else 1)
        if mixture.weighted_inputs:
            of_input, of_output = of_output, of_input
        up, down = of_input * (layer.experts.up.weight[e] @ x), layer.experts.down.weight[e]
        gate = of_input * (layer.experts.gate.weight[e] @ x)
        total += of_output * (down @ (gate / (1 + np.exp(-gate)) * up))
    return total if layer.shared is None else total + mlp(layer.shared, config, x)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
