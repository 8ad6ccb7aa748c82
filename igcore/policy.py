"""The reference policy: a frozen language model, its tokenizer and its prompt template. Knows nothing of scores or search.

A policy turns a prompt into token ids and tokens into text; the engine does the decoding in between.
"""

import hashlib
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import assets
from .errors import ParameterError, unknown_name


@dataclass(frozen=True)
class Embedded:
    """A policy that `igcore.assets` provides.

    Attributes
    ----------
    asset : str
        Name of the asset that holds the weights.
    template : str
        How a prompt becomes text, a key of `TEMPLATES`.
    ends : tuple of str
        Special tokens that end a response besides the checkpoint's own end token.
    """

    asset: str
    template: str
    ends: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>")


POLICIES = {
    "smollm2-raw": Embedded("smollm2", "raw"),  # continues the prompt: plays the unaligned policy
    "smollm2-chat": Embedded("smollm2", "chat"),  # answers in the chat template: plays the aligned policy
}
TEMPLATES = {
    "raw": lambda tokenizer, prompt: tokenizer(prompt)["input_ids"],
    "chat": lambda tokenizer, prompt: tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Policy:
    """A frozen causal language model with its way of reading prompts.

    Attributes
    ----------
    name : str
        What records call it.
    model, tokenizer
        transformers objects; the model is in evaluation mode.
    template : str
        A key of `TEMPLATES`.
    digest : str
        Hash of the weights, for manifests.
    eos_ids : frozenset of int
        Tokens that end a response.
    cache : str
        How the engine keeps keys and values, a key of `igcore.engine.CACHES`.
    """

    name: str
    model: object
    tokenizer: object
    template: str = "raw"
    digest: str = ""
    eos_ids: frozenset = field(default=frozenset())
    cache: str = "auto"

    @property
    def context(self) -> int:
        """Longest sequence, prompt and response together, in tokens."""
        return getattr(self.model.config, "max_position_embeddings", None) or 2**31

    def encode(self, prompt: str, max_new_tokens: int = 0) -> list[int]:
        """Return the token ids of the templated prompt.

        Strings such as ``</s>`` inside the prompt are broken up, so that a prompt cannot write the template's own tokens.

        Raises
        ------
        ParameterError
            When the prompt is empty, or does not fit the context together with `max_new_tokens`.
        """
        if not prompt.strip():
            raise ParameterError(f"prompt {prompt!r} is empty; give at least one word")
        ids = TEMPLATES[self.template](self.tokenizer, self._neutralise(prompt))
        if len(ids) + max_new_tokens > self.context:
            raise ParameterError(
                f"prompt {prompt[:40]!r}... has {len(ids)} tokens, which with max_new_tokens {max_new_tokens} exceeds the "
                f"context of {self.context} of {self.name}; shorten the prompt or lower max_new_tokens"
            )
        return list(ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens, without special tokens and without a character cut in its middle.

        The text of a prefix of tokens is a prefix of the text of all: block ends are positions in the emitted text.
        """
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\ufffd")

    def _neutralise(self, prompt: str) -> str:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        for special in sorted({*added, *self.tokenizer.all_special_tokens}, key=lambda s: (-len(s), s)):
            prompt = prompt.replace(special, f"{special[0]} {special[1:]}")
        return prompt


def load_policy(name: str, dtype: str = "float32", device: str = "auto", template: str | None = None) -> Policy:
    """Load a policy by name, or from a local Hugging Face folder.

    Parameters
    ----------
    name : str
        A key of `POLICIES`, or the path of a folder with ``config.json``, safetensors weights and a tokenizer.
    dtype : str
        ``float32``, ``bfloat16`` or ``float16``.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    template : str, optional
        ``raw`` or ``chat``. By default a named policy's own; for a folder ``chat`` when its tokenizer has a chat template.

    Raises
    ------
    ParameterError
        For an unknown name, dtype or template.
    AssetError
        When an embedded policy cannot be fetched or its files are damaged.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if template is not None and template not in TEMPLATES:
        raise unknown_name("template", template, TEMPLATES)
    embedded = POLICIES.get(name)
    if embedded is None and not Path(name).joinpath("config.json").is_file():
        raise unknown_name("policy", name, POLICIES, "; or the path of a folder that holds config.json")
    _check_device(device)
    folder = assets.sound(embedded.asset) if embedded else Path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with _no_bars():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], device_map=device, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    if report["missing_keys"]:  # transformers would go on with random weights
        raise ParameterError(f"{folder} lacks the weights {sorted(report['missing_keys'])}; save the whole model again")
    return Policy(
        name=name if embedded else Path(name).name,
        model=model.eval(),
        tokenizer=tokenizer,
        template=template or (embedded.template if embedded else "chat" if tokenizer.chat_template else "raw"),
        digest=assets.digest(embedded.asset) if embedded else _digest(folder),
        eos_ids=_eos_ids(model, tokenizer, embedded.ends if embedded else ()),
    )


def _check_device(device: str) -> None:
    try:
        torch.device("cpu" if device == "auto" else device)
    except RuntimeError as error:
        raise ParameterError(f"device {device!r} is no torch device; give auto, cpu, cuda or cuda:0") from error


@contextmanager
def _no_bars():
    """Silence the progress bars of transformers, which print dozens of lines into a log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:
        logging.enable_progress_bar()


def _eos_ids(model, tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Every end token that the tokenizer or the checkpoint's own settings name, and `ends`."""
    named = [tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.eos_token_id]
    named.append(tokenizer.convert_tokens_to_ids(list(ends)))
    flat = [i for item in named for i in (item if isinstance(item, list) else [item])]
    return frozenset(i for i in flat if i is not None)


def _digest(folder: Path) -> str:
    """Hash of a folder's weights, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
