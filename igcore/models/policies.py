"""The table of policies: from a name, a folder or a repository of the hub to a loaded policy."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch

from ..errors import AssetError, ParameterError, PolicyError, unknown_name
from ..folders import digest_of
from ..policy import Policy
from ..settings import Options, settings
from . import assets
from .hub import snapshot
from .pretrained import (
    DTYPES,
    Device,
    Dtype,
    check_settings,
    check_vocabulary,
    contents_of,
    load_model,
    load_tokenizer,
)
from .registry import named
from .templates import TEMPLATES, TextFormat, check_chat, template_of

OPTIONS = ("template", "revision", "chat_options")  # beside the name of a policy
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Known:
    """A policy that has a name here.

    Attributes
    ----------
    template : str, optional
        How a prompt becomes text, a key of `igcore.models.templates.TEMPLATES`; by default
        ``chat`` where the tokenizer has one.
    asset : str, optional
        Name of the asset of `igcore.models.assets` that holds it.
    repo, revision : str, optional
        Its name on the model hub, and the commit that is taken unless another is given; without one
        its newest state.
    ends : tuple of str
        Special tokens that end a response besides the checkpoint's own end tokens.
    """

    template: str | None = None
    asset: str | None = None
    repo: str | None = None
    revision: str | None = None
    ends: tuple[str, ...] = ()


SMOLLM2 = {"asset": "smollm2", "ends": ("<|endoftext|>", "<|im_start|>")}


POLICIES = {
    # continues the prompt: plays the unaligned policy
    "smollm2-raw": Known("raw", **SMOLLM2),
    # answers in the chat template: plays the aligned policy
    "smollm2-chat": Known("chat", **SMOLLM2),
    "alpaca-7b": Known("safe-rlhf", repo="PKU-Alignment/alpaca-7b-reproduced"),
    "beaver-7b-v3": Known("safe-rlhf", repo="PKU-Alignment/beaver-7b-v3.0"),
    "vicuna-7b": Known(
        "vicuna", repo="lmsys/vicuna-7b-v1.5", revision="3321f76e3f527bd14065daf69dad9344000a201d"
    ),
    "llama-3.1-8b": Known(
        "chat",
        repo="meta-llama/Llama-3.1-8B-Instruct",
        revision="0e9e39f249a16976918f6564b8830bc894c89659",
    ),
}


@settings
class PolicyOptions:
    """How a policy is loaded, see `load_policy`."""

    dtype: Dtype = "float32"
    device: Device = "auto"
    template: TextFormat | None = None
    revision: str | None = None
    chat_options: Options | None = None


def load_policy(
    name: str | Path | Mapping,
    dtype: str = "float32",
    device: str = "auto",
    weights: bool = True,
) -> Policy:
    """Load a policy by name, from a local Hugging Face folder, or from the hub.

    Parameters
    ----------
    name : str, Path or mapping
        A key of `POLICIES`, the path of a folder with ``config.json``, weights and a tokenizer, or
        ``owner/name`` on the hub. A mapping gives options beside its ``name``: ``template``, a key
        of `igcore.models.templates.TEMPLATES`, by default a named policy's own, else ``chat`` where
        a tokenizer has one; ``chat_options``, what else its chat template reads by name, such as
        ``{"enable_thinking": False}``; and ``revision``, see `igcore.models.hub.snapshot`. A
        mapping with a ``server`` names a model in a server, see
        `igcore.models.served.ServedOptions`; dtype and device are then the server's.
    dtype : str
        ``float32``, ``bfloat16`` or ``float16``.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    weights : bool
        Without them the policy answers what an `igcore.Pool` holds, until something is missing.

    Raises
    ------
    ParameterError
        For an unknown name, dtype or template.
    AssetError
        When its files cannot be downloaded, are damaged, or do not belong together.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(name, Mapping) and "server" in name:
        # by its name: what decodes with a local policy does not depend on that module
        return resolve_name("igcore.models.served:load_served")(name)
    name = str(name) if isinstance(name, Path) else name
    name, beside = named(name, "policy", OPTIONS)
    options = PolicyOptions(dtype=dtype, device=device, **beside)
    known = POLICIES.get(name) or _unnamed(name)
    if known.asset:
        folder = assets.sound(known.asset)
    else:
        folder = snapshot(known.repo, options.revision or known.revision)
    tokenizer = load_tokenizer(folder)
    own = known.template or ("chat" if tokenizer.chat_template else "raw")
    template = options.template or own
    check_chat(tokenizer, template, f"policy {name!r}", options.chat_options)
    if weights:
        model, _ = load_model(AutoModelForCausalLM, folder, options.dtype, options.device)
        check_vocabulary(tokenizer, model, folder)
    else:
        model = WithoutWeights(folder, options)
    policy = Policy(
        name=name if name in POLICIES else Path(name).name,
        model=model,
        tokenizer=tokenizer,
        template=template_of(template, options.chat_options),
        eos_ids=eos_ids_of(model, tokenizer, known.ends),
        files=contents_of(folder),
    )
    identity = policy.identity()
    decisive = {key: identity[key] for key in identity if key not in ("name", "digest")}
    return replace(policy, digest=digest_of(decisive))


class WithoutWeights:
    """What stands for a model whose weights are not loaded."""

    def __init__(self, folder: Path, options: PolicyOptions):
        from transformers import AutoConfig, GenerationConfig

        check_settings(folder)
        local = {"local_files_only": True, "trust_remote_code": False}
        self.name, self.config = folder.name, AutoConfig.from_pretrained(folder, **local)
        self.generation_config = GenerationConfig.from_model_config(self.config)
        if (folder / "generation_config.json").is_file():
            self.generation_config = GenerationConfig.from_pretrained(folder, **local)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = DTYPES[options.dtype]
        self.device = torch.device(device if options.device == "auto" else options.device)

    def modules(self) -> list:
        """Return no modules."""
        return []

    def get_output_embeddings(self) -> NoReturn:
        """Refuse to be run."""
        raise PolicyError(
            f"the pool does not have all samples of this search, and {self.name} was loaded "
            "without weights; load it with them, or ask for what the pool holds"
        )


def _unnamed(name: str) -> Known:
    """Return the policy of a folder or of a repository on the hub."""
    settings = os.path.expanduser(os.path.join(name, "config.json"))
    # False for what no path can be
    if not os.path.isfile(settings) and not HUB_NAME.fullmatch(name):
        places = "; or a folder that holds config.json, or owner/name on the hub"
        raise unknown_name("policy", name, POLICIES, places)
    return Known(repo=name)


def policy_of(model: Any, tokenizer: Any) -> Policy:
    """Return a loaded transformers model and its tokenizer as a policy.

    Prompts are written in the tokenizer's chat template if it has one, else as they are.

    Raises
    ------
    ParameterError
        Without a tokenizer.
    """
    if tokenizer is None:
        raise ParameterError("there is no tokenizer; give (model, tokenizer)")
    name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    return Policy(
        name=name,
        model=model,
        tokenizer=tokenizer,
        template=TEMPLATES["chat" if tokenizer.chat_template else "raw"],
        eos_ids=eos_ids_of(model, tokenizer, ()),
    )


def eos_ids_of(model, tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Every end token that the tokenizer or the checkpoint's own settings name, and `ends`."""
    found = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))]
    for config in (model.generation_config, model.config):
        own = config.eos_token_id
        found += own if isinstance(own, list) else [own]
    ends = [token for token in found if token is not None]
    if any(type(token) is not int for token in ends):  # of which transformers checks some only
        raise AssetError(
            f"the end tokens are {ends}, but may be whole numbers only; correct eos_token_id in "
            "generation_config.json and config.json"
        )
    return frozenset(ends)
