"""The table of policies: from a name, a folder or a repository of the hub to a loaded policy."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ParameterError, unknown_name
from ..policy import Policy
from . import assets
from .hub import snapshot
from .pretrained import check_placement, check_vocabulary, contents_of, load_model, load_tokenizer
from .registry import named
from .templates import TEMPLATES

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Known:
    """A policy that has a name here.

    Attributes
    ----------
    template : str
        How a prompt becomes text, a key of `igcore.models.templates.TEMPLATES`.
    asset : str, optional
        Name of the asset of `igcore.models.assets` that holds it.
    repo, revision : str, optional
        Its name on the model hub, and the commit that is taken unless another is given; without one
        its newest state.
    ends : tuple of str
        Special tokens that end a response besides the checkpoint's own end tokens.
    """

    template: str
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


def load_policy(
    name: str | Mapping,
    dtype: str = "float32",
    device: str = "auto",
    template: str | None = None,
    revision: str | None = None,
) -> Policy:
    """Load a policy by name, from a local Hugging Face folder, or from the hub.

    Parameters
    ----------
    name : str or mapping
        A key of `POLICIES`, the path of a folder with ``config.json``, weights and a tokenizer, or
        ``owner/name`` on the hub. A mapping gives `template` and `revision` beside its ``name``.
    dtype : str
        ``float32``, ``bfloat16`` or ``float16``.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    template : str, optional
        A key of `igcore.models.templates.TEMPLATES`. By default a named policy's own, else ``chat``
        where a tokenizer has one.
    revision : str, optional
        See `igcore.models.hub.snapshot`.

    Raises
    ------
    ParameterError
        For an unknown name, dtype or template.
    AssetError
        When its files cannot be fetched, are damaged, or do not belong together.
    """
    from transformers import AutoModelForCausalLM

    name, options = named(name, "policy", ("template", "revision"))
    template, revision = (
        options.get(key, given) for key, given in (("template", template), ("revision", revision))
    )
    check_placement(dtype, device)
    if template is not None and template not in TEMPLATES:
        raise unknown_name("template", template, TEMPLATES)
    known = POLICIES.get(name)
    if (
        known is None
        and not Path(name).joinpath("config.json").is_file()
        and not HUB_NAME.fullmatch(name)
    ):
        raise unknown_name(
            "policy",
            name,
            POLICIES,
            "; or a folder that holds config.json, or owner/name on the hub",
        )
    asset = known and known.asset
    folder = (
        assets.sound(asset)
        if asset
        else snapshot(known.repo if known else name, revision or (known and known.revision))
    )
    tokenizer = load_tokenizer(folder)
    template = template or (
        known.template if known else "chat" if tokenizer.chat_template else "raw"
    )
    if template == "chat" and not tokenizer.chat_template:
        raise ParameterError(
            f"policy {name!r} has no chat template; choose another template: {', '.join(TEMPLATES)}"
        )
    model, _ = load_model(AutoModelForCausalLM, folder, dtype, device)
    check_vocabulary(tokenizer, model, folder)
    policy = Policy(
        name=name if known else Path(name).name,
        model=model,
        tokenizer=tokenizer,
        template=TEMPLATES[template],
        eos_ids=_eos_ids(model, tokenizer, known.ends if known else ()),
        files=contents_of(folder),
    )
    decisive = {
        key: value for key, value in policy.identity().items() if key not in ("name", "digest")
    }
    return replace(
        policy, digest=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    )


def policy_of(model: Any, tokenizer: Any) -> Policy:
    """Return a loaded transformers model and its tokenizer as a policy.

    Prompts are written in the tokenizer's chat template if it has one, else as they are.

    Raises
    ------
    ParameterError
        Without a tokenizer.
    """
    if tokenizer is None:
        raise ParameterError(
            "there is no tokenizer, and scorers read text; give (model, tokenizer)"
        )
    name = Path(getattr(model, "name_or_path", "") or type(model).__name__).name
    return Policy(
        name=name,
        model=model.eval(),
        tokenizer=tokenizer,
        template=TEMPLATES["chat" if tokenizer.chat_template else "raw"],
        eos_ids=_eos_ids(model, tokenizer, ()),
    )


def _eos_ids(model, tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Every end token that the tokenizer or the checkpoint's own settings name, and `ends`."""
    named = [
        tokenizer.eos_token_id,
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
    ]
    named.append(tokenizer.convert_tokens_to_ids(list(ends)))
    flat = [i for item in named for i in (item if isinstance(item, list) else [item])]
    return frozenset(i for i in flat if i is not None)
