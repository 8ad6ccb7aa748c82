"""Convert a pinned file to a safe format: safetensors.

Raise `igcore.models.assets.CONVERTER_VERSION` when a function here writes something else: the names
of the cached folders contain it.
"""

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import needs

_LOADING = threading.RLock()


def _forget_lock() -> None:
    """Use a new lock: in a forked child, no thread is left that could release the old one."""
    global _LOADING
    _LOADING = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_lock)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, reports and warnings inside the block."""
    from transformers.utils import logging

    # the settings are of the process: a second thread would take the quiet ones for the former
    with _LOADING, warnings.catch_warnings(action="ignore"):
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()  # in a notebook they are widgets, not text
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


def convert_policy(source: Path, target: Path, tied: bool = False) -> None:
    """Convert the one GGUF file in `source` to float32 safetensors with their tokenizer.

    With `tied` the output matrix is also the embedding: the file holds both, quantised differently,
    of a model that has one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    needs("gguf")
    (gguf,) = source.glob("*.gguf")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, dtype=torch.float32
        )
        if tied:
            model.get_input_embeddings().weight = model.get_output_embeddings().weight
            model.config.tie_word_embeddings = True
        model.hf_quantizer = None  # the weights are float32 now; with a quantizer saving fails
        # _model_name_or_path is the title in the GGUF file, which is no path
        del model.config.quantization_config, model.config._model_name_or_path
        model.save_pretrained(target)
        # without this line the value depends on HF_HUB_OFFLINE
        tokenizer.init_kwargs["local_files_only"] = False
        tokenizer.save_pretrained(target)
    # without the version of transformers, equal settings have equal bytes on all machines
    for path in (target / "config.json", target / "generation_config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        del settings["transformers_version"]
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for path in (*target.glob("*.json"), *target.glob("*.jinja")):  # Windows writes \r\n
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
