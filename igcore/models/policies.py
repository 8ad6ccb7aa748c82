"""The table of policies: from a name, a folder or a repository of the hub to a loaded policy."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..catalog import POLICIES, found, room
from ..errors import AssetError, ParameterError, unknown_name
from ..files import digest_of
from ..policy import Policy
from ..prompt import PROBE
from ..settings import Named, Options, settings, written
from . import assets, pretrained
from .hub import PATHS, SMALL, snapshot
from .templates import TextFormat, template_of

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
Pair = tuple[PreTrainedModel, Tokenizer]
PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any] | Named | Pair
OUTSIDE = ("POLY", "SHADOW", "XLORA")  # kinds of adapters that act outside the wrapped model


@dataclass(frozen=True)
class PolicyEntry:
    """An entry of the table of policies.

    Attributes
    ----------
    template : str, optional
        Template of prompts, a key of `igcore.models.templates.TEMPLATES`; by default ``chat`` if
        the tokenizer has a chat template.
    asset : str, optional
        Name of its asset in `igcore.models.assets`.
    repo, revision : str, optional
        Name on the model hub and default commit; without a commit the newest state.
    ends : tuple of str
        Special tokens that end a response, in addition to the checkpoint's own end tokens.
    """

    template: str | None = None
    asset: str | None = None
    repo: str = ""
    revision: str | None = None
    ends: tuple[str, ...] = ()

    def folder(self, revision: str | None = None, weights: bool = True) -> Path:
        """Return the folder with its files; download missing ones."""
        if self.asset:
            return assets.sound(self.asset)[0]
        return snapshot(self.repo, revision or self.revision, patterns=() if weights else SMALL)


# continues the prompt, like an unaligned policy
SMOLLM2_RAW = PolicyEntry("raw", asset="smollm2", ends=("<|endoftext|>", "<|im_start|>"))
# answers in the chat template, like an aligned policy
SMOLLM2_CHAT = replace(SMOLLM2_RAW, template="chat")


@settings
class PolicyOptions:
    """Options of a policy in addition to its name, see `load_policy`."""

    template: TextFormat | None = None
    revision: str | None = None
    chat_options: Options | None = None


def load_policy(
    name: str | Path | Mapping[str, Any] | Named,
    dtype: str | torch.dtype = "float32",
    device: str = "auto",
) -> Policy:
    """Load a policy by name, from a local Hugging Face folder, or from the hub.

    Parameters
    ----------
    name : str, Path or mapping
        A key of `POLICIES`, the path of a folder with ``config.json``, weights and a tokenizer, or
        ``owner/name`` on the hub. A mapping has a ``name`` and options: ``template``, a key of
        `igcore.models.templates.TEMPLATES`, by default a named policy's own, else ``chat`` if the
        tokenizer has a chat template; ``chat_options``, further variables of the chat template,
        such as ``{"enable_thinking": False}``; and ``revision``, see `igcore.models.hub.snapshot`.
        A mapping with a ``server`` names a model in a server, see
        `igserve.policy.ServedOptions`; the server then sets dtype and device.
    dtype : str or torch.dtype
        ``float32``, ``bfloat16`` or ``float16``; or ``auto``: the type in which the weights were
        saved if the device computes in it, see `igcore.models.pretrained.automatic_dtype`.
    device : str
        A torch device, or ``auto``: accelerate places the model on the available devices.

    Raises
    ------
    ParameterError
        For an unknown name, dtype or template.
    AssetError
        When its files cannot be downloaded, are damaged, or do not belong together.
    """
    chosen = Named.of(name, "policy")
    if "server" in chosen.options:
        served: Policy = room("load_served")(written(chosen))
        return served
    name = chosen.name
    entry: PolicyEntry = found(POLICIES.get(name)) or _unnamed(name)
    options = PolicyOptions(**chosen.options)  # after the entry, which may bring a template
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("auto", *pretrained.DTYPES):
        raise unknown_name("dtype", dtype, ("auto", *pretrained.DTYPES))
    folder = entry.folder(options.revision)
    pretrained.files_of(folder)  # refuses a folder without a model
    tokenizer = pretrained.load_tokenizer(folder)
    if dtype == "auto":
        dtype = pretrained.automatic_dtype(folder, device)
    chosen_template = options.template or entry.template
    template = template_of(tokenizer, chosen_template, f"policy {name!r}", options.chat_options)
    model, _ = pretrained.load_model(AutoModelForCausalLM, folder, dtype, device)
    policy = Policy(
        name=name if name in POLICIES else _last_part(name),
        model=model,
        tokenizer=tokenizer,
        template=template,
        eos_ids=eos_ids_of(model, tokenizer, entry.ends),
        files=pretrained.contents_of(folder),
    )
    _check_prompt(policy, str(folder))
    identity = policy.identity()
    decisive = {key: identity[key] for key in identity if key not in ("name", "digest")}
    return replace(policy, digest=digest_of(decisive))


def as_policy(
    policy: PolicyLike,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    chat_options: Mapping[str, Any] | None = None,
) -> Policy:
    """Return a `Policy`: itself, loaded by name or folder, or made of (model, tokenizer)."""
    options = {"chat_options": dict(chat_options)} if chat_options else {}
    if isinstance(policy, str | os.PathLike | Mapping | Named):
        name = policy if isinstance(policy, Mapping | Named) else os.fspath(policy)
        named = Named.of(name, "policy")
        return load_policy(Named(named.name, named.options | options), dtype, device)
    if (device, dtype) != ("auto", "auto"):
        raise ParameterError(
            f"device is {device!r} and dtype {dtype!r}, but the policy is a model that was loaded "
            "before; move it yourself, such as by model.to(...)"
        )
    if isinstance(policy, Policy) and options:
        raise ParameterError(
            "chat_options is given, but the policy is an igcore.Policy; load it with these options"
        )
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, tuple) and len(policy) == 2:
        return policy_of(*policy, options.get("chat_options"))
    if hasattr(policy, "model") and hasattr(policy, "tokenizer"):
        raise ParameterError("policy is a pipeline; give (pipe.model, pipe.tokenizer)")
    raise ParameterError(
        f"policy is of type {type(policy).__name__}; give the name or folder of a model, a mapping "
        "such as for a server, a pair (model, tokenizer), or an igcore.Policy"
    )


def _unnamed(name: str) -> PolicyEntry:
    """Return an entry for a folder or a repository on the hub."""
    path = os.path.expanduser(name)
    # of a path, loading says that there is no folder
    on_hub = name.startswith(PATHS) or HUB_NAME.fullmatch(name) and not os.path.isfile(path)
    if not on_hub and not os.path.isdir(path):  # False for a file and for an impossible path
        places = (
            "; or a folder with config.json, or owner/name on the hub, such as "
            "openai-community/gpt2; igstudy has the paper's, and qwen-0.5b"
        )
        raise unknown_name("policy", name, POLICIES, places)
    return PolicyEntry(repo=name)


def _last_part(path: str) -> str:
    """Return the name of a folder, also for ``.``."""
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def policy_of(model: PreTrainedModel, tokenizer: Tokenizer, chat: Options | None = None) -> Policy:
    """Return a loaded transformers model and its tokenizer as a policy.

    Prompts are formatted with the tokenizer's chat template if it has one, else used unchanged. The
    policy has a copy of the tokenizer, because a call that pads or truncates changes the tokenizer
    for every thread. A wrapper (torch.compile, DataParallel, PEFT) is replaced by the model inside,
    see `unwrapped`.

    Raises
    ------
    ParameterError
        For a missing tokenizer, a pair in the wrong order, and a model that cannot continue a text.
    """
    model = unwrapped(model)
    _check_pair(model, tokenizer)
    tokenizer = copy.deepcopy(tokenizer)
    policy = Policy(
        name=_last_part(getattr(model, "name_or_path", "") or type(model).__name__),
        model=model,
        tokenizer=tokenizer,
        template=template_of(tokenizer, None, "the pair", chat),
        eos_ids=eos_ids_of(model, tokenizer, ()),
    )
    _check_prompt(policy, "the pair")
    return policy


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside torch.compile, DataParallel or a PEFT wrapper; else the model itself.

    Layers of an adapter stay in the model, so switching the adapter later takes effect.

    Raises
    ------
    ParameterError
        For an adapter that adds tokens or forward passes outside the model.
    """
    if isinstance(model, torch.nn.Module):
        model = extract_model_from_parallel(model, keep_torch_compile=False)
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in model.peft_config.items():
        invoked = getattr(config, "alora_invocation_tokens", None)
        if config.is_prompt_learning or config.peft_type in OUTSIDE or invoked:
            raise ParameterError(
                f"adapter {name!r} of the kind {config.peft_type.value} adds to the prompt or to "
                "the call of the model, which the search does not support; merge it, or give a "
                "plain adapter such as LoRA"
            )
    return model.get_base_model()


def _check_pair(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raise ``ParameterError`` unless these are a causal language model and a tokenizer."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not isinstance(tokenizer, Tokenizer):
        raise ParameterError(
            f"policy is a pair ({kind}, {type(tokenizer).__name__}); give (model, tokenizer), both "
            "loaded by transformers and in this order, or the folder alone"
        )
    pretrained.check_backend(tokenizer, "the pair")
    wrong = ""
    if model.config.is_encoder_decoder:
        wrong = "is an encoder-decoder model; the search needs a decoder-only one"
    elif not model.can_generate() or model.get_output_embeddings() is None:
        wrong = "has no head over the vocabulary; load it by AutoModelForCausalLM or its like"
    if wrong:
        raise ParameterError(f"{kind} {wrong}")


def _check_prompt(policy: Policy, place: str) -> None:
    """Raise ``AssetError`` unless a prompt reaches the model complete and as valid ids."""
    ids = _ids(policy, policy.template.special)
    pretrained.check_vocabulary(policy.tokenizer, policy.model, place, ids)
    check_ending(policy, place)


def _ids(policy: Policy, special: bool) -> list[int]:
    """Return the ids of a fixed prompt in the policy's template, however long it is."""
    opening = policy.template.opening(policy.tokenizer, PROBE)
    return list(policy.tokenizer(opening, add_special_tokens=special)["input_ids"])


def check_ending(policy: Policy, place: str) -> None:
    """Raise ``AssetError`` when the tokenizer writes an end token after every prompt."""
    last = _ids(policy, policy.template.special)[-1:]
    # an end that the template itself writes, as DialoGPT's does, is what the model was trained on
    if policy.eos_ids.intersection(last) and last != _ids(policy, False)[-1:]:
        raise AssetError(
            f"the tokenizer of {place} writes the end token {policy.tokenizer.decode(last)!r} "
            "after every prompt; set its add_eos_token to False, or leave the token out of the "
            "post_processor in tokenizer.json"
        )


def eos_ids_of(model: PreTrainedModel, tokenizer: Tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Return all end tokens of the tokenizer and the checkpoint's settings, and `ends`."""
    found: list[Any] = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))]
    for config in (model.generation_config, model.config):
        own = getattr(config, "eos_token_id", None)  # composite models have it in text_config
        found += own if isinstance(own, list) else [own]
    ids = [token for token in found if token is not None]
    if any(type(token) is not int for token in ids):  # transformers does not check all of them
        raise AssetError(
            f"the end tokens are {ids}, but must be whole numbers; correct eos_token_id in "
            "generation_config.json and config.json"
        )
    return frozenset(ids)
