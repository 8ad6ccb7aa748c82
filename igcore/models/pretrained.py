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
from transformers import AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.modeling_utils import load_state_dict

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
SAVED = (
    "give a folder as save_pretrained of transformers writes it, of an adapter after "
    "merge_and_unload, of a GGUF file after from_pretrained(folder, gguf_file=...)"
)


Dtype = Annotated[str, one_of(DTYPES)]


# --- the files of a folder ------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Return the weight files that transformers loads, by name.

    Raises
    ------
    AssetError
        When the folder lacks a part of a model, its index is damaged, or it has an adapter, which
        transformers would add to the model.
    """
    if (folder / "adapter_config.json").is_file():
        raise AssetError(f"{folder} has an adapter_config.json; {SAVED}")
    for name in WHOLE if (folder / "config.json").is_file() else ():
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
    raise AssetError(
        f"{folder} has no config.json or no weights ({' or '.join(WHOLE)}, or their index); {SAVED}"
    )


def contents_of(folder: Path, weights: bool = True) -> dict[str, str]:
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
    with one_sentence(folder):
        names = {path.relative_to(folder).as_posix() for path in paths}
        return {name: file_digest(folder / name) for name in sorted(names)}


def automatic_dtype(folder: Path, device: str) -> str:
    """Return the type of the saved weights if the device supports it, else ``float32``.

    config.json names the type. A GPU supports ``bfloat16`` and ``float16``, a CPU at most
    ``bfloat16``; without hardware support a model is ten times as slow.
    """
    settings = json.loads((folder / "config.json").read_bytes())
    saved: str | None = settings.get("dtype") or settings.get("torch_dtype")
    gpu = device != "cpu" and torch.accelerator.is_available()
    if saved and saved in DTYPES and (gpu or saved == "bfloat16" and multiplies_bfloat16()):
        return saved
    return "float32"


# --- loading --------------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a tokenizer from a folder; errors are those of `load_model`."""
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


def check_backend(tokenizer: Tokenizer, place: Path | str) -> None:
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
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
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
    weights = files_of(folder)
    # "auto" of accelerate would split every model over all GPUs
    place = "sequential" if usable(device) == "auto" else device
    quantised = b"quantization_config" in (folder / "config.json").read_bytes()
    # first on the meta device: a small file with other shapes than its config would fill the memory
    for device_map in (place,) if quantised else ("meta", place):
        with one_sentence(folder), quiet_transformers():
            model, report = kind.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                device_map=device_map,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=weights[0].suffix == ".safetensors",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
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


def check_vocabulary(
    tokenizer: Tokenizer, model: PreTrainedModel, place: Path | str, prompt: list[int] | None = None
) -> None:
    """Raise ``AssetError`` when a tokenizer has ids without an embedding in the model.

    With the ids of a `prompt`, other special tokens need no embedding: no prompt becomes a padding
    token, for example.
    """
    ids = set(tokenizer.get_vocab().values())
    if prompt is not None:
        added = tokenizer.added_tokens_decoder.items()
        ids -= {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        ids |= {*prompt}
    known = max(ids, default=-1) + 1
    rows = model.get_input_embeddings().weight.shape[0]
    if known > rows:
        raise AssetError(
            f"the tokenizer in {place} has {known} tokens, but its model has embeddings for "
            f"{rows}; call model.resize_token_embeddings(len(tokenizer)) and save both, or "
            "download both again if they belong to different models"
        )


def tensors_of(folder: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors with these keys in the files of a folder, on the CPU.

    Only tensors are loaded from pickles.
    """
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
