"""A decoder: the weights of a model and a policy bound to it, with the functions that read tokens into a cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from kvjax.cache.paged.stats import check_asks
from kvjax.cache.paged.table import page_slots
from kvjax.inference.budget import Budget
from kvjax.inference.cache import Bound, Cache
from kvjax.inference.layers import read_block, read_chunks, read_steps
from kvjax.inference.padding import bucket
from kvjax.inference.prefill import Read, bound_prompts, prompt_shapes, read_prompts
from kvjax.inference.prepare import (
    Prompts,
    Tokens,
    bind,
    check_length,
    check_on_host,
    check_tokens,
    checked_lengths,
    checked_turn_chunk,
    prepare_bound,
)
from kvjax.inference.press import on_pages, press, reads_all_first, stored, unevicted
from kvjax.inference.replay import read_again
from kvjax.inference.sharding import (
    bound_specs,
    gather_slots,
    logits_spec,
    placed_policy,
    placed_rows,
    run_on_mesh,
    scatter_slots,
)
from kvjax.inference.windows import with_windows
from kvjax.methods.registry import name_of
from kvjax.models.decoder import unembed
from kvjax.models.model import LanguageModel, ModelOrigin, rows_of
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import OF_ROWS, Kernels, setting
from kvjax.utils.autotune import settle_before
from kvjax.utils.modes import on_the_host
from kvjax.utils.processes import on_host


class Decoder(Bound):
    """Weights, bound policy and settings, which no step changes. `jit` and `scan` over `step` copy no weights.

    Example:
        >>> import jax
        >>> model = kvjax.load("tiny")
        >>> decoder = kvjax.decoder(model, "h2o", budget=16)
        >>> cache, logits = decoder.prefill([[5, 17, 42]], max_new_tokens=8)
        >>> step = jax.jit(lambda decoder, cache, token: decoder.step(cache, token), donate_argnums=1)
        >>> cache, logits = step(decoder, cache, logits.argmax(-1))
        >>> cache.position.tolist(), logits.shape
        ([4], (1, 2048))
    """

    policy_and_budget: tuple[Policy, Any] | None = None
    """Policy and budget with concrete numbers, from which slots of prompts are planned; None inside of programs."""
    origin: ModelOrigin | None = setting(None)
    """Name and tokenizer of the model, for policies that another state's policy is replaced by."""

    def __repr__(self) -> str:
        return f"Decoder({self.policy.label}, {self.config.layers} layers, {self.weights.dtype})"

    def for_steps(self) -> Self:
        """Return the decoder without what only prompts need, as programs of steps take it."""
        return self.replace(policy_and_budget=None)

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        """Decoders of one cache each, the last of which evicts: this one, or those of a full cache and a draft."""
        return (self,)

    def joined(self, caches: Sequence[Cache]) -> Cache:
        """Return one cache of `decoders`' caches, which have read the same tokens."""
        return caches[0]

    @on_the_host
    def prefill(
        self,
        tokens: Tokens,
        lengths: ArrayLike | Sequence[int] | None = None,
        *,
        max_new_tokens: int = 256,
        key: Key[Array, ""] | Key[Array, " b"] | None = None,
        prefill_chunk: int | None = None,
        budget_of: str = "text",
        rope_length: int | None = None,
    ) -> tuple[Cache, Float[Array, "b vocab"]]:
        """Read prompts into a new cache, and return the logits for the first new tokens, too; see `kvjax.prefill`."""
        settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, chunk=prefill_chunk)
        prompts = self.prepare(tokens, lengths, budget_of=budget_of, rope_length=rope_length, **settings)
        first = unevicted(prompts, self.config, self.mesh) if reads_all_first(prompts.policy) else prompts
        return self.fill(prompts, self.read(bound_prompts(self, first), first))

    def prepare(self, tokens: Tokens, lengths: ArrayLike | Sequence[int] | None, **settings: Any) -> Prompts:
        """Check prompts and plan their slots; see `kvjax.inference.prepare.prepare_bound`."""
        assert self.policy_and_budget is not None, "a decoder for prompts comes from kvjax.decoder"
        policy, budget = self.policy_and_budget
        return prepare_bound(self, policy, tokens, budget, lengths, **settings, beyond_window=self.beyond_window)

    def read(self, reader: Bound, prompts: Prompts) -> Read:
        """Read prompts by the decoder's kernels, which are benchmarked first if `auto` needs it."""
        settle_before(
            lambda survey: prompt_shapes(reader.replace(kernels=Kernels(survey)), prompts), self.kernels.implementation
        )
        return read_prompts(reader.replace(kernels=self.kernels), prompts)

    def fill(self, prompts: Prompts, read: Read) -> tuple[Cache, Float[Array, "b vocab"]]:
        """Return the cache of prompts that all layers have read, and the logits for the first new tokens."""
        layers, position, seed, logits = read
        size = page_slots(prompts.tokens.shape[1] + int(prompts.horizon.max()))
        cache = Cache(
            **on_pages(layers, self.policy, size, self.mesh),
            position=position,
            prompt_length=jnp.asarray(prompts.lengths),
            horizon=jnp.asarray(prompts.horizon),
            end=jnp.asarray(prompts.lengths + prompts.horizon),
            key=prompts.keys,
            seed=seed,
            active=jnp.asarray(np.ones(prompts.lengths.shape, bool)),
            rope_length=None if prompts.rope_length is None else jnp.asarray(prompts.rope_length),
        )
        cache = placed_rows(cache, self.mesh)
        if reads_all_first(prompts.policy):
            cache = self._pressed(cache, prompts)
        check_step(self, cache)
        settle_step(self, cache)
        if _any_nan(logits):
            raise ValueError(
                f"{type(self.policy.score).__name__}.score gives NaN for tokens of a prompt, or the model does; a "
                "score has to give numbers, or -inf, +inf."
            )
        return cache, logits

    def _pressed(self, cache: Cache, prompts: Prompts) -> Cache:
        # Prompts that all layers have read are read again, if the score needs it, and then compressed.
        policy, source = placed_policy(prompts.policy.sized(prompts.lines), self.mesh), cache.replace(key=None)
        decoder = self.replace(policy=policy, policy_and_budget=None)
        if policy.score.requires.replay is not None:
            source = read_again(decoder, source, prompts.tokens, prompts.lengths)
        pressed = press(decoder, source, tuple(map(jnp.asarray, prompts.limits)), prompts.capacities)
        return cache.replace(**stored(pressed, decoder, int((prompts.lengths + prompts.horizon).max())))

    def step(self, cache: Cache, token: Int[Array, " b"]) -> tuple[Cache, Float[Array, "b vocab"]]:
        """Read one token per row; call it under `jit` or `scan`. See `kvjax.decode_step`, which compiles it."""
        cache, logits = self.steps(cache, token[:, None])
        return cache, logits[:, 0]

    def steps(
        self, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"] | None = None
    ) -> tuple[Cache, Float[Array, "b n vocab"]]:
        """Read known tokens by decode steps; call it under `jit`.

        `lengths` are the tokens of each row, from 0, if they are padded on the right; logits of padding are
        meaningless.

        The result is that of `step` for one token after another, but each layer reads all of them before the next layer
        does, which is several times faster. Logits take memory for each token, so read long texts in blocks.

        Example:
            >>> import jax
            >>> import numpy as np
            >>> decoder = kvjax.decoder(kvjax.load("tiny"), "h2o", budget=16)
            >>> cache, _ = decoder.prefill([[5, 17, 42]], max_new_tokens=8)
            >>> read = jax.jit(lambda decoder, cache, tokens: decoder.steps(cache, tokens))
            >>> cache, logits = read(decoder, cache, np.asarray([[8, 15, 99]]))
            >>> cache.position.tolist(), logits.shape
            ([6], (1, 3, 2048))
        """
        decoder = self.for_steps()

        def specs() -> tuple[Any, Any]:
            return (bound_specs(decoder), cache.specs, OF_ROWS, OF_ROWS), _step_specs(decoder, cache, True)

        return decoder.run(_steps_on_device, cache, tokens, lengths, specs=specs)

    @on_the_host
    def extend(
        self,
        cache: Cache,
        tokens: ArrayLike | Sequence[Sequence[int]],
        lengths: ArrayLike | Sequence[int] | None = None,
        logits: str = "last",
        *,
        prefill_chunk: int | None = None,
    ) -> tuple[Cache, Float[Array, "b vocab"] | Float[Array, "b n vocab"]]:
        """Read more text on top of a cache; see `kvjax.extend`."""
        check_on_host("extend", cache.position, tokens, lengths)
        if logits not in ("last", "all"):
            raise ValueError(f"logits={logits!r} is not 'last' or 'all'.")
        prefill_chunk = checked_turn_chunk(self.policy, prefill_chunk)
        rows = len(cache.position)
        if isinstance(tokens, (list, tuple)):
            tokens, counted = rows_of(tokens)
            tokens = tokens if tokens.size else np.zeros((len(tokens), 1), np.int64)  # all rows are empty
            lengths = counted if lengths is None else lengths
        ids = np.asarray(tokens)
        if ids.ndim != 2 or len(ids) != rows or ids.shape[1] == 0:
            raise ValueError(f"tokens of shape {ids.shape} are not text for each of {rows} rows [b, n].")
        counts = np.full(rows, ids.shape[1]) if lengths is None else checked_lengths(lengths)
        check_tokens(ids, counts, self.config, shortest=0)
        counts = np.where(on_host(cache.active), counts, 0)
        read, end = on_host(cache.position) + counts, on_host(cache.end)
        check_length(int(read.max()), self.policy, self.config)
        longest = int((read - end).argmax())
        if self.policy.plan.sizing.fixed_length and read[longest] > end[longest]:
            raise ValueError(
                f"a text of {read[longest]} tokens does not fit the {end[longest]} that {name_of(self.policy)} "
                f"allocated in row {longest}; give prefill more max_new_tokens."
            )
        grown = with_windows(cache, self, np.where(counts > 0, read, 0))
        if grown is not cache:
            cache = grown
            settle_step(self, cache)
        size = bucket(ids.shape[1])
        padded = jnp.asarray(np.pad(ids, ((0, 0), (0, size - ids.shape[1]))), jnp.int32)
        texts = padded, jnp.asarray(counts, jnp.int32)
        how: dict[str, Any] = dict(all_logits=logits == "all", chunk=prefill_chunk)
        settle_before(
            lambda survey: read_more.eval_shape(self.replace(kernels=Kernels(survey)), cache, *texts, **how),
            self.kernels.implementation,
        )
        after, next_logits = read_more(self, cache.replace(key=None), *texts, **how)
        after = after.replace(key=cache.key)
        return after, next_logits[:, : ids.shape[1]] if logits == "all" else next_logits


@on_the_host
def decoder(
    model: LanguageModel,
    policy: Policy | str,
    budget: Budget = 1.0,
    *,
    plan: Plan | str | None = None,
    implementation: str | Kernels = "auto",
) -> Decoder:
    """Return a decoder: a model with a policy and a budget, whose arrays are placed for its programs.

    The arguments are those of `kvjax.prefill`, which makes a decoder and calls its `prefill`.

    Raises:
        ValueError: the policy does not fit the model or the budget.
        TypeError: the model or the policy is of another type.

    Example:
        >>> model = kvjax.load("tiny")
        >>> decoder = kvjax.decoder(model, "streaming", budget=8)
        >>> cache, logits = decoder.prefill([[5, 17, 42]], max_new_tokens=8)
        >>> cache, logits = decoder.extend(cache, [[8, 15, 99]])
        >>> cache.position.tolist(), logits.shape
        ([6], (1, 2048))
    """
    bound_policy, budget = bind(model, policy, budget, plan)
    if not isinstance(implementation, Kernels):
        implementation = Kernels(model.automatic if implementation == "auto" else implementation)
    return Decoder(
        weights=model.weights,
        policy=placed_policy(bound_policy, model.mesh),
        policy_and_budget=(bound_policy, budget),
        config=model.config,
        kernels=implementation,
        mesh=model.mesh,
        origin=model.origin,
    )


_any_nan = jax.jit(lambda logits: jnp.isnan(logits).any())


def _step_specs(decoder: Decoder, cache: Cache, all_logits: bool) -> tuple[Cache, PartitionSpec]:
    """Return the specs of a cache, and of logits [b vocab], or [b n vocab] with `all_logits`."""
    logits = logits_spec(decoder.config, decoder.mesh)
    return cache.specs, PartitionSpec(logits[0], None, *logits[1:]) if all_logits else logits


compiled_step = jax.jit(Decoder.step)
compiled_step_in_place = jax.jit(Decoder.step, donate_argnames="cache")


def _steps_on_device(
    decoder: Decoder, cache: Cache, tokens: Int[Array, "b n"], lengths: Int[Array, " b"] | None
) -> tuple[Cache, Float[Array, "b n vocab"]]:
    decoder = decoder.here(shares_slots=cache.pool is None)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    place = cache.position[:, None] + index
    after = jnp.where(cache.active, place[:, -1] + 1, cache.position)
    position = jnp.where(cache.active[:, None], place, -1)
    if lengths is not None:
        after = jnp.where(cache.active, cache.position + lengths, cache.position)
        position = jnp.where(index < lengths[:, None], position, -1)
    reading = cache.reading(tokens, position, after)
    cache, hidden = read_steps(decoder, cache, reading)
    logits = unembed(decoder.weights, decoder.config, hidden)
    if decoder.policy.plan.sizing.fixed_length:
        logits = jnp.where((place < cache.end[:, None])[..., None], logits, jnp.nan)
    if decoder.config.bounded:
        logits = jnp.where((place < decoder.config.max_positions)[..., None], logits, jnp.nan)
    return cache.replace(position=after), logits


def step_shapes(decoder: Decoder, cache: Cache) -> tuple[Cache, Float[Array, "b vocab"]]:
    """Return the shapes of the results of a step, as `jax.ShapeDtypeStruct`."""
    return compiled_step.eval_shape(decoder, cache, jax.ShapeDtypeStruct(cache.active.shape, jnp.int32))


def check_step(decoder: Decoder, cache: Cache) -> None:
    """Refuse a score whose requests at generated tokens need the same slots in all heads, if heads have pages."""

    def check(policy: Policy, cache: Cache) -> tuple[()]:
        shapes = decoder.config.layer_configs
        first = next(index for index, shape in enumerate(shapes) if shape.attends)
        new = cache.newest.replace(given=False).ahead(shapes[first], first, decoder.weights.dtype)
        check_asks(policy, policy.layer(first).score.attention_stats(cache.attending[0], new))
        return ()

    if cache.pool is not None:
        jax.eval_shape(check, decoder.policy, cache.replace(key=None))


def settle_step(decoder: Decoder, cache: Cache) -> None:
    """Benchmark the kernels of a step if `auto` needs it; see `settle_before`."""
    settle_before(
        lambda survey: step_shapes(decoder.replace(kernels=Kernels(survey)), cache), decoder.kernels.implementation
    )


@functools.partial(jax.jit, static_argnames=("all_logits", "chunk"))
def read_more(
    decoder: Decoder,
    cache: Cache,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    all_logits: bool,
    chunk: int | None = None,
) -> tuple[Cache, Float[Array, "b *n vocab"]]:
    """Run `Decoder.extend` on checked tokens, padded on the right, also inside programs that are compiled as a whole.

    Args:
        all_logits: True for logits after every token, False for those after the last token of each row.
        chunk: number of tokens after each of which the cache is compressed, 1 for decode steps; None for the policy's.
    """
    extend_on_device = functools.partial(_extend_on_device, all_logits=all_logits, chunk=chunk)
    return run_on_mesh(
        extend_on_device,
        decoder.for_steps(),
        cache,
        tokens,
        lengths,
        out_specs=lambda: _step_specs(decoder, cache, all_logits),
    )


def _extend_on_device(
    decoder: Decoder,
    cache: Cache,
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    all_logits: bool,
    chunk: int | None,
) -> tuple[Cache, Float[Array, "b *n vocab"]]:
    decoder, reading = decoder.here(), cache.following(tokens, lengths)
    prompt_length = jnp.where(lengths > 0, reading.read, cache.prompt_length)
    reading = reading.replace(prompt_length=prompt_length)
    # While a block is read, pages are unpacked into buffers of one size for all heads.
    gathered = gather_slots(cache, decoder.mesh)
    after = gathered.replace(layers=gathered.unpacked(), pool=None)
    chunk = chunk or decoder.policy.score.requires.prompt_chunk
    if chunk is None:
        layers, hidden = read_block(decoder, after.layers, reading, last=not all_logits)
        after = after.replace(layers=layers)
        hidden = hidden if all_logits else reading.at_last(hidden, otherwise=hidden[:, 0])
    else:
        after, hidden = read_chunks(decoder, after, reading, chunk, every=all_logits)
    cache = cache.packed(after.layers).replace(position=reading.read, prompt_length=prompt_length)
    cache = cache.replace(layers=scatter_slots(cache.layers, decoder.mesh))
    read = reading.position >= 0 if all_logits else lengths > 0
    return cache, jnp.where(read[..., None], unembed(decoder.weights, decoder.config, hidden), jnp.nan)
