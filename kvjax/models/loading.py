"""Reading Hugging Face checkpoints straight into JAX arrays."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.families import Family, LoadError, read_config, token_ids
from kvjax.models.weights import leaf_name, weight_shapes

_TINY = Path(__file__).resolve().parents[1] / "tiny" / "weights"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("float32", "bfloat16", "float64")
_STORED = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Args:
        weights: pytree of arrays, all of one dtype.
        config: the model's shape.
        name: how it was asked for.
        directory: where its files are, its tokenizer's among them.
    """

    weights: Weights
    config: ModelConfig
    name: str
    directory: Path


def read_checkpoint(
    path_or_hub_id: str | Path, dtype: DTypeLike | None = None, revision: str | None = None
) -> Checkpoint:
    """Read a checkpoint from the package, a Hugging Face directory or the Hugging Face hub.

    Arguments and errors are those of `kvjax.load`.
    """
    wanted = _dtype(dtype)
    directory = _locate(path_or_hub_id, revision)
    file = directory / "config.json"
    try:
        family, config = read_config(_read_json(file))
    except LoadError as error:
        raise error if str(error).startswith(str(file)) else LoadError(f"{file}: {error}") from None
    generation = directory / "generation_config.json"
    if generation.exists() and (eos := token_ids(_read_json(generation), "eos_token_id")):
        config = dataclasses.replace(config, eos=eos)
    weights = _read_weights(directory, family, config, wanted)
    return Checkpoint(weights, config, str(path_or_hub_id), directory)


def _dtype(dtype: DTypeLike | None) -> jnp.dtype:
    try:
        wanted = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        raise ValueError(f"Unknown dtype {dtype!r}: give one of {', '.join(_DTYPES)}.") from None
    if wanted.name not in _DTYPES:
        raise ValueError(f"dtype {wanted.name} is not supported: give one of {', '.join(_DTYPES)}.")
    if wanted.name == "float64" and jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError("dtype float64 needs 64-bit JAX: call jax.config.update('jax_enable_x64', True) first.")
    return wanted


def _locate(path_or_hub_id: str | Path, revision: str | None) -> Path:
    """The directory that holds the checkpoint, downloaded if it is not on this machine."""
    if path_or_hub_id == "tiny":
        return _TINY
    if not isinstance(path_or_hub_id, (str, Path)) or not str(path_or_hub_id).strip():
        raise LoadError(f"{path_or_hub_id!r} names no model: give tiny, a directory with config.json, or a hub id.")
    directory = Path(path_or_hub_id).expanduser()
    if directory.is_dir():
        return directory
    # A hub id is one name or owner/name; anything else can only have been meant as a path.
    if isinstance(path_or_hub_id, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path_or_hub_id):
        what = "is a file" if directory.exists() else "does not exist"
        raise LoadError(f"{directory} {what}: give a directory with config.json and safetensors, or a hub id.")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            path_or_hub_id,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],  # other formats' copies of the same weights
        )
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        at = "" if revision is None else f" at revision {revision!r}"
        raise LoadError(
            f"{path_or_hub_id!r} is no directory here and could not be downloaded from the hub{at} "
            f"({type(error).__name__}: {reason}); check the name and the network, or give a directory."
        ) from error
    return Path(found)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} is missing: a model directory needs it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise LoadError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def _weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files: all that the index names, or the only one."""
    index = directory / _INDEX
    if not index.exists():
        if not (directory / _SINGLE).exists():
            raise LoadError(
                f"{directory} has neither {_SINGLE} nor {_INDEX}: only safetensors checkpoints can be read."
            )
        return [directory / _SINGLE]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise LoadError(f"{index} has no weight_map from tensor names to file names.")
    shards = sorted(set(names.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise LoadError(f"{index} names the shard {shard!r}, which is not a file name in its directory.")
        if not (directory / shard).is_file():
            raise LoadError(f"{index} names the shard {shard}, which is missing from {directory}.")
    return [directory / shard for shard in shards]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} is truncated or not a safetensors file ({error}).") from None


def _stored(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """File, shape and type of every tensor, from the files' headers."""
    stored = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary, and cannot be iterated)
                header = tensors.get_slice(name)
                stored[name] = (file, tuple(header.get_shape()), header.get_dtype())
    return stored


def _read_weights(directory: Path, family: Family, config: ModelConfig, dtype: jnp.dtype) -> Weights:
    """Check every name and shape, then move the tensors one by one to the device."""
    files = _weight_files(directory)
    stored = _stored(files)
    shapes = weight_shapes(config)
    place = files[0] if len(files) == 1 else directory / _INDEX
    sources = {leaf_name(path): family.source(leaf_name(path)) for path, _ in jax.tree.leaves_with_path(shapes)}
    for leaf, source in sources.items():
        bare = source.name.removeprefix(family.base)
        if source.name not in stored and bare in stored:
            sources[leaf] = dataclasses.replace(source, name=bare)

    for path, leaf in jax.tree.leaves_with_path(shapes):
        source = sources[leaf_name(path)]
        expected = leaf.shape if source.shape is None else source.shape(leaf.shape, config)
        if source.name not in stored:
            raise LoadError(f"{place}: tensor {source.name} of shape {list(expected)} is missing.")
        file, shape, kind = stored[source.name]
        if shape != expected:
            raise LoadError(
                f"{file}: tensor {source.name} has shape {list(shape)}, but config.json asks for {list(expected)}."
            )
        if kind not in _STORED:
            raise LoadError(f"{file}: tensor {source.name} is stored as {kind}; supported are {', '.join(_STORED)}.")
    known = {source.name for source in sources.values()}
    if config.tied:
        known.add(family.sources["unembedding.weight"].name)  # some checkpoints store the tied table twice
    for name in sorted(stored.keys() - known):
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            file, shape, _ = stored[name]
            raise LoadError(f"{file}: tensor {name} of shape {list(shape)} has no place in the model of config.json.")

    def read(path: tuple[Any, ...], _: Any) -> Array:
        source = sources[leaf_name(path)]
        # Opened anew for each tensor: a file that stays mapped keeps all that was read of it in memory.
        with _open(stored[source.name][0]) as tensors:
            tensor = tensors.get_tensor(source.name)
        if source.read is not None:
            tensor = source.read(tensor, config)
        tensor = tensor.astype(dtype, copy=False)
        if not _finite(tensor):
            file = stored[source.name][0]
            raise LoadError(f"{file}: tensor {source.name} has numbers that are NaN or infinite: it is damaged.")
        # One at a time, or host copies pile up behind slow transfers.
        return jax.device_put(tensor).block_until_ready()

    return jax.tree_util.tree_map_with_path(read, shapes)


def _finite(tensor: np.ndarray) -> bool:
    """Whether all numbers are finite, from their bits: NumPy compares integers of any size fast, and without a copy."""
    width = tensor.dtype.itemsize
    infinity = np.array(np.inf, tensor.dtype).view(f"i{width}")
    bits = tensor.reshape(-1).view(f"i{width}")
    # The bits of positive numbers have their order, NaN above infinity; those of negative ones as unsigned numbers.
    positive, negative = (np.max(view, initial=0) for view in (bits, bits.view(f"u{width}")))
    sign = 1 << (8 * width - 1)
    return bool(positive < infinity and int(negative) < sign + int(infinity))
