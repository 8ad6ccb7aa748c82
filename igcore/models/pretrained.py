"""Strict loading of models and tokenizers from folders in the format of transformers.

Weights are safetensors, or pickles read without code; no code in a model's folder runs. A missing
or unexpected key raises an error, because transformers would continue with random weights.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch

from ..engine.device import multiplies_bfloat16, usable
from ..errors import AssetError, IgcoreError, one_line
from ..files import file_digest
from ..settings import one_of
from .convert import quiet_transformers
from .hub import SMALL

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# transformers uses the first that exists, as a file or by its index
WHOLE = ("model.safetensors", "pytorch_model.bin")
TEMPLATES = "additional_chat_templates/*.jinja"
AGAIN = "fetch or save the whole model again"
# files found instead of a complete model -> remedy
INSTEAD = {
    "adapter_config.json": "merge the adapter into its model (merge_and_unload), and save the sum",
    "*.gguf": "read the GGUF file by from_pretrained(folder, gguf_file=...), and save the model",
}


Dtype = Annotated[str, one_of(DTYPES)]


# --- the files of a folder ------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Return the weight files that transformers loads, by name; empty if there are none.

    Raises
    ------
    AssetError
        When an index is damaged or names a file outside the folder, or the folder has an adapter,
        which transformers would add to the model.
    """
    adapter = "adapter_config.json"
    if (folder / adapter).is_file():
        raise AssetError(f"{folder} has an {adapter}; {INSTEAD[adapter]}")
    for name in WHOLE:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return [path]
        if index.is_file():
            with one_sentence(index):
                shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                own = [Path(shard).name == shard for shard in shards]
            if not all(own):
                raise AssetError(
                    f"{index} names {shards}, but may name only files in its own folder; {AGAIN}"
                )
            return [folder / shard for shard in shards]
    return []


class Contents(dict[str, str]):
    """The sha256 of files by name, and the folder that contains them."""

    folder: Path


def contents_of(folder: Path, weights: bool = True) -> Contents:
    """Return the sha256 of every file that loading a model and its tokenizer reads.

    The keys are paths relative to the folder. Hashing reads gigabytes, so call it once and keep the
    result. Without weights it reads the settings and the tokenizer alone.

    Raises
    ------
    AssetError
        As for `files_of`, and when a file cannot be read.
    """
    paths = files_of(folder) if weights else []
    for pattern in (*SMALL, TEMPLATES):
        paths += folder.glob(pattern)
    names = {path.relative_to(folder).as_posix() for path in paths}
    with one_sentence(folder):
        found = Contents({name: file_digest(folder / name) for name in sorted(names)})
    found.folder = folder
    return found


def settings_of(folder: Path) -> str:
    """Return the text of config.json; raise ``AssetError`` if it is missing."""
    if not (folder / "config.json").is_file():
        raise missing_part(folder, "config.json")
    return (folder / "config.json").read_text(encoding="utf-8")


def missing_part(folder: Path, part: str) -> AssetError:
    """Return the error for a folder that lacks a part of a model, with a remedy."""
    helps = [helps for pattern, helps in INSTEAD.items() if next(folder.glob(pattern), None)]
    helps.append("give a folder as save_pretrained of transformers writes it")
    return AssetError(f"{folder} has no {part}; {helps[0]}")


def automatic_dtype(folder: Path, device: str) -> str:
    """Return the type of the saved weights if the device supports it, else ``float32``.

    config.json names the type. A GPU supports ``bfloat16`` and ``float16``, a CPU at most
    ``bfloat16``; without hardware support a model is ten times as slow.
    """
    settings = json.loads(settings_of(folder))
    saved: str | None = settings.get("dtype") or settings.get("torch_dtype")
    gpu = device != "cpu" and torch.accelerator.is_available()
    if saved and saved in DTYPES and (gpu or saved == "bfloat16" and multiplies_bfloat16()):
        return saved
    return "float32"


# --- loading --------------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer from a folder; errors are those of `load_model`."""
    from transformers import AutoTokenizer

    for path in sorted(folder.glob("*.json")):  # transformers ignores some damaged files
        with one_sentence(path):
            json.loads(path.read_bytes())
    with one_sentence(folder), quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    check_backend(tokenizer, folder)
    # transformers continues with an empty vocabulary
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise AssetError(f"{folder} has no tokenizer.json or other vocabulary; {AGAIN}")
    return tokenizer


def check_backend(tokenizer: Any, place: Path | str) -> None:
    """Raise ``AssetError`` for a tokenizer without the methods of transformers' own.

    Where mistral-common is installed, transformers prefers it for a folder with tekken.json.
    """
    if not isinstance(tokenizer.added_tokens_decoder, dict):
        raise AssetError(
            f"the tokenizer of {place} is a {type(tokenizer).__name__}, which lacks the methods of "
            "other tokenizers; load its tokenizer.json by PreTrainedTokenizerFast.from_pretrained, "
            "and give (model, tokenizer) or save it in a folder without tekken.json"
        )


def load_model(
    kind: Any,
    folder: Path,
    dtype: str,
    device: str,
    heads: Sequence[str] = (),
    optional: Sequence[str] = (),
    **settings: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Load a model in evaluation mode, with the tensors of a head of our own beside it.

    Parameters
    ----------
    kind
        One of transformers' ``AutoModel...`` classes.
    dtype : str
        A key of `DTYPES`.
    device : str
        A torch device, or ``auto``: accelerate fills one GPU after the other, so that a model is
        whole on the first if it fits there.
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
        All of `heads` and the existing ones of `optional`, on the CPU in the type of the file.

    Raises
    ------
    AssetError
        When files are missing or damaged, or their keys or shapes are not those of the model.
    """
    quantised = "quantization_config" in settings_of(folder)
    found = files_of(folder)
    if not found:
        raise missing_part(folder, f"weights ({' or '.join(WHOLE)}, or their index)")
    device = usable(device)
    # "auto" of accelerate would split every model over all GPUs
    place = "sequential" if device == "auto" else device
    # first on the meta device: weights of a wrong shape would fill the memory, or be skipped
    for device_map in (place,) if quantised else ("meta", place):
        with one_sentence(folder), quiet_transformers():
            model, report = kind.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                device_map=device_map,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=found[0].suffix == ".safetensors",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **settings,
            )
        # without the rotary positions that files of 2023 contain, which transformers skips
        unexpected = set(report["unexpected_keys"])
        problems = {
            "holds weights of other shapes than its config.json says": report["mismatched_keys"],
            "lacks the weights": {*report["missing_keys"], *(set(heads) - unexpected)},
            "holds the unknown weights": unexpected - {*heads, *optional},
        }
        for problem, keys in problems.items():
            if keys:
                named = f"{problem} {sorted(keys)}"[:300]
                raise AssetError(
                    f"{folder} {named}; save the model inside a wrapper or adapter, download it "
                    "again, or choose the scorer that it is made for"
                )
    return model.eval(), tensors_of(folder, [*heads, *optional])


def check_vocabulary(tokenizer: Any, model: Any, place: Path | str, unread: bool = False) -> None:
    """Raise ``AssetError`` when a tokenizer has ids without an embedding in the model.

    With `unread`, special tokens need no embedding: no prompt becomes a padding token, for example.
    """
    ids = set(tokenizer.get_vocab().values())
    if unread:
        added = tokenizer.added_tokens_decoder.items()
        ids -= {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    known = max(ids, default=-1) + 1
    rows = model.get_input_embeddings().weight.shape[0]
    if known > rows:
        raise AssetError(
            f"the tokenizer in {place} has {known} tokens, but its model has embeddings for "
            f"{rows}; the two belong to different models, so download both again"
        )


def tensors_of(folder: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors with these keys in the files of a folder, on the CPU.

    Only tensors are loaded from pickles.
    """
    from transformers.modeling_utils import load_state_dict

    out: dict[str, torch.Tensor] = {}
    for path in files_of(folder) if keys else ():
        with one_sentence(path):
            state = load_state_dict(path, map_location="cpu", weights_only=True)
        out |= {key: state[key] for key in keys if key in state}
    return out


@contextmanager
def one_sentence(path: Path | str) -> Iterator[None]:
    """Turn any loader's error about a damaged folder or file into one ``AssetError``.

    transformers, safetensors and torch raise many kinds of errors.
    """
    try:
        yield
    except (IgcoreError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the Rust of tokenizers is no Exception
        raise AssetError(
            f"{path} cannot be loaded ({one_line(error):.300}); install the package that it "
            f"names, {AGAIN}, or load another format yourself and give (model, tokenizer), because "
            "code in a model's folder is not run"
        ) from error
