"""Models and tokenizers loaded strictly from folders in the format of transformers.

Weights are safetensors, or pickles of which only tensors are read; no code that comes with a model
is run. A missing or unexpected key stops the loading, because transformers would go on with random
numbers in its place. So does anything that would make transformers open other files than those
that `contents_of` names.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from sentencepiece import SentencePieceProcessor

from ..engine.device import GIB, free_bytes
from ..errors import AssetError, IgcoreError, ParameterError, unknown_name
from ..folders import file_digest
from .convert import quiet_transformers
from .hub import SMALL

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# transformers takes the first that is there, or whose index is
WHOLE = ("model.safetensors", "pytorch_model.bin")
# files that make transformers load other weights than these -> what it does then, and what to do
OTHERS = {
    "adapter_config.json": (
        "which adds an adapter where peft is installed; merge it into the weights, or take the "
        "file away"
    ),
    "shard-*-model-*-of-*.safetensors": (
        "a part of a distributed checkpoint; save the model whole, or take these files away"
    ),
}
# settings by which transformers opens files of other names and folders -> their type where they do
ELSEWHERE = {
    "transformers_weights": str,
    "gguf_file": str,
    "vocab": str,
    "merges": str,
    "fast_tokenizer_files": list,
}
TEMPLATES = "additional_chat_templates/*.jinja"
RECORD = "asset.json"  # written by `igcore.models.assets`; of no interest to transformers


def files_of(folder: Path) -> list[Path]:
    """Return the files with weights that transformers loads, by name; empty when there are none.

    Raises
    ------
    AssetError
        When an index is damaged or names what is missing, outside the folder or of another kind, or
        when transformers would load more than these files.
    """
    for pattern, what in OTHERS.items():
        if found := sorted(folder.glob(pattern)):
            raise AssetError(f"{folder} holds {found[0].name}, {what}")
    for name in WHOLE:
        if (path := folder / name).is_file():
            return [path]
        if (index := folder / f"{name}.index.json").is_file():
            return _indexed(index, path.suffix)
    return []


def _indexed(index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names."""
    with one_sentence(index):
        named = sorted(
            {PurePosixPath(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        )
    for name in named:
        if name.is_absolute() or ".." in name.parts or name.suffix != suffix:
            raise AssetError(
                f"{index} names {str(name)!r}, but may name {suffix} files in its folder alone; "
                "fetch the model again"
            )
    paths = [index.parent / name for name in named]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise AssetError(
            f"{index} names {missing[0]}, which is not there; fetch or save the whole model again"
        )
    return paths


class Contents(dict):
    """The sha256 of files by name, and the folder that they were in when they were read."""

    folder: Path


def contents_of(folder: Path, weights: bool = True) -> Contents:
    """Return the sha256 of every file that loading a model and its tokenizer opens.

    The keys are paths relative to the folder. Reads gigabytes: ask once and keep it.

    Parameters
    ----------
    weights : bool
        False for a tokenizer alone.

    Raises
    ------
    AssetError
        As `files_of`, and when a file cannot be read.
    """
    small = [
        path
        for pattern in (*SMALL, TEMPLATES)
        for path in folder.glob(pattern)
        if path.name != RECORD
    ]
    with one_sentence(folder):
        paths = {
            path.relative_to(folder).as_posix(): path
            for path in [*small, *(files_of(folder) if weights else ())]
        }
        found = Contents({name: file_digest(paths[name]) for name in sorted(paths)})
    found.folder = folder
    return found


def check_placement(dtype: str, device: str) -> None:
    """Raise ``ParameterError`` for an unknown dtype or a device that torch does not know."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    try:
        torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ParameterError(
            f"device {device!r} is no torch device; give auto, cpu, cuda or cuda:0"
        ) from error


def placement(folder: Path, dtype: str, device: str) -> str:
    """Return where to put a model: with ``auto``, whole on the GPU with most room if one holds it.

    accelerate alone would split every model over all GPUs: each token would wait for every device,
    and no device would be left to the next model.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if device != "auto" or len(gpus) < 2:
        return device
    needed, free = weight_bytes(folder, dtype), {gpu: free_bytes(torch.device(gpu)) for gpu in gpus}
    holding = [gpu for gpu in gpus if needed <= free[gpu]]
    # whole GiB: small changes of free memory do not move a resumed run to another GPU
    room = {gpu: free[gpu] // GIB for gpu in holding}
    return max(holding, key=room.__getitem__, default="auto")


def weight_bytes(folder: Path, dtype: str) -> int:
    """Return the bytes that all weights of a folder take in a `dtype`, whatever theirs is."""
    numbers = 0
    for path in files_of(folder):
        with one_sentence(folder), _opened(path) as (names, read):
            numbers += sum(read(name).numel() for name in names)
    return numbers * DTYPES[dtype].itemsize


def check_settings(folder: Path) -> None:
    """Raise ``AssetError`` for settings that are damaged or point transformers to other files.

    transformers ignores some damaged settings, such as end tokens.
    """
    for path in sorted(folder.glob("*.json")):
        with one_sentence(path):
            json.loads(path.read_bytes(), object_hook=partial(_check_at_home, path))


def _check_at_home(path: Path, settings: dict) -> dict:
    """Return settings, or raise ``AssetError`` where they name files of other places."""
    for name, kind in ELSEWHERE.items():
        if isinstance(value := settings.get(name), kind):
            raise AssetError(
                f"{path} sets {name} to {str(value)[:100]!r}, where transformers would look for "
                "files; give them their usual names in this folder, and take the setting out"
            )
    return settings


def load_tokenizer(folder: Path):
    """Load a tokenizer from a folder; see `load_model` for what is raised."""
    from transformers import AutoTokenizer

    check_settings(folder)
    with one_sentence(folder), quiet_transformers():
        pieces, whole = folder / "tokenizer.model", folder / "tokenizer.json"
        if pieces.exists() and not whole.exists():
            # transformers takes a damaged file for one of another kind
            SentencePieceProcessor(model_file=str(pieces))
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # transformers goes on with an empty vocabulary
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise AssetError(
            f"{folder} has no tokenizer.json or other vocabulary; fetch or save the whole model "
            "again"
        )
    return tokenizer


def load_model(
    kind,
    folder: Path,
    dtype: str,
    device: str,
    heads: Sequence[str] = (),
    optional: Sequence[str] = (),
    **settings,
):
    """Load a model in evaluation mode, with the tensors of a head of our own beside it.

    Parameters
    ----------
    kind
        One of transformers' ``AutoModel...`` classes.
    dtype : str
        A key of `DTYPES`.
    device : str
        A torch device, or ``auto``, see `placement`.
    heads : sequence of str
        Keys that the files hold besides those of the model.
    optional : sequence of str
        Keys that they may hold, too.
    settings
        Fields of the configuration that replace those of the file.

    Returns
    -------
    model
    tensors : dict of str to Tensor
        Of `heads`, and of `optional` those that are there, on the CPU in the type of the file.

    Raises
    ------
    AssetError
        When files are missing or damaged, or their keys or shapes are not those of the model.
    """
    check_settings(folder)
    found = files_of(folder)
    if not found:
        raise AssetError(
            f"{folder} has no weights ({' or '.join(WHOLE)}, or their index); fetch or save the "
            "whole model again"
        )
    device = placement(folder, dtype, device)
    with one_sentence(folder), quiet_transformers():
        model, report = kind.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            device_map=device,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=found[0].suffix == ".safetensors",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **settings,
        )
    if more := getattr(type(model.config), "extra_files", ()):
        raise AssetError(
            f"{folder} is a {type(model).__name__}, whose {' and '.join(more)} is not read here; "
            "choose another model"
        )
    for key, found_shape, shape in sorted(report["mismatched_keys"]):
        raise AssetError(
            f"{folder} has {key} of shape {tuple(found_shape)} where its config.json asks for "
            f"{tuple(shape)}; fetch or save the whole model again"
        )
    # without the rotary positions of 2023, which transformers leaves out
    unexpected = set(report["unexpected_keys"])
    missing = sorted({*report["missing_keys"], *(set(heads) - unexpected)})
    if missing or (unexpected := sorted(unexpected - {*heads, *optional})):
        what = (
            f"lacks the weights {missing[:4]}"
            if missing
            else f"holds the unknown weights {unexpected[:4]}"
        )
        raise AssetError(
            f"{folder} {what}; fetch or save the whole model again, or choose the adapter that it "
            "was made for"
        )
    return model.eval(), tensors_of(folder, [*heads, *optional])


def check_vocabulary(tokenizer, model, folder: Path) -> None:
    """Raise ``AssetError`` when a tokenizer knows ids for which a model has no embedding."""
    known, rows = (
        max(tokenizer.get_vocab().values()) + 1,
        model.get_input_embeddings().weight.shape[0],
    )
    if known > rows:
        raise AssetError(
            f"the tokenizer in {folder} has {known} tokens, but its model has embeddings for "
            f"{rows}; the two belong to different models, so fetch both again"
        )


def tensors_of(folder: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of these keys that the files of a folder hold, on the CPU."""
    out: dict[str, torch.Tensor] = {}
    for path in files_of(folder) if keys else ():
        with one_sentence(folder), _opened(path) as (names, read):
            out |= {key: read(key) for key in keys if key in names}
    return out


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Sequence[str], object]]:
    """Yield the names of the tensors of a file, and a function that reads one."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            yield file.keys(), file.get_tensor
    else:
        state: Mapping = torch.load(
            path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
        )
        yield state.keys(), state.__getitem__


@contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Turn any loader's error about a damaged folder or file into one sentence.

    transformers, safetensors and torch raise many kinds.
    """
    try:
        yield
    except (IgcoreError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise AssetError(
            f"{path} holds a pickle that is damaged or has more in it than tensors, so it was not "
            "loaded; get the model as safetensors"
        ) from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        raise AssetError(
            f"{path} cannot be loaded ({type(error).__name__}: {reason}); fetch or save the whole "
            "model again"
        ) from error
