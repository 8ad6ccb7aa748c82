"""What `generate`, a pipeline and a checkpoint may say to the search, and what is refused."""

import warnings
from collections.abc import Sequence
from traceback import walk_stack
from typing import Any

import torch
from transformers import generation

from igcore.decoding import PromptLike
from igcore.engine.sampling import Sampling
from igcore.errors import ParameterError
from igcore.models.generation import SUPPORTED
from igcore.prompt import as_prompt
from igcore.settings import Options

# `generate` adds them itself
CACHES = {"cache", "past_key_values"}  # the second up to 5.23
INPUTS = CACHES | {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
STOPS = {  # setting -> the stopping criterion that transformers makes of it
    "max_length": generation.MaxLengthCriteria,
    "eos_token_id": generation.EosTokenCriteria,
    "max_time": generation.MaxTimeCriteria,
}


def check_caller(streamer: Any) -> tuple[Options, generation.GenerationConfig, Any]:
    """Refuse arguments that `generate` does not pass on.

    Return the caller's arguments, and the defaults and the prompts of a pipeline.
    """
    callers = {frame.f_code.co_name: frame for frame, _ in reversed(list(walk_stack(None)))}
    calling = callers.get("generate")
    lost = calling.f_locals.get("streamer") if calling else None
    if lost is not None and lost is not streamer:
        lost.end()  # its reader would wait forever
        raise ParameterError(
            "transformers does not pass generate's streamer on; give it to "
            "igcore.custom_generate(guard, streamer=...)"
        )
    for name in ("assistant_model", "negative_prompt_ids"):
        if calling and calling.f_locals.get(name) is not None:
            raise ParameterError(
                f"generate was given {name}, which the search cannot use; leave it out"
            )
    # a decorator around `generate` has the caller's arguments, without transformers' defaults
    named = calling.f_back.f_locals.get("kwargs", {}) if calling and calling.f_back else {}
    sampling = named.get("do_sample", getattr(named.get("generation_config"), "do_sample", None))
    if sampling is False:
        raise ParameterError(
            "generate was given do_sample=False, which is not supported: the search samples from "
            "the model; leave it out"
        )
    forward = callers["_forward"].f_locals if "_forward" in callers else {}
    preset = getattr(forward.get("self"), "_default_generation_config", None)
    return named, preset or generation.GenerationConfig(), _written(forward.get("prompt_text"))


def _written(prompts: Any) -> list[PromptLike] | None:
    """Return the prompts that a pipeline was given; None where it continues an answer."""
    listed = prompts if isinstance(prompts, list) else [prompts]
    chats: list[Any] = [getattr(prompt, "messages", prompt) for prompt in listed]
    try:
        return [as_prompt(prompt) for prompt in chats]
    except ParameterError:  # also where there is no pipeline
        return None


def check_settings(
    settings: generation.GenerationConfig, own: Sequence[Any], named: Options, sampling: Sampling
) -> None:
    """Raise ``ParameterError`` for settings that the search does not support, except defaults.

    A default does not count where the caller named it and the guard's config has another value.
    """
    if settings.num_beams not in (None, 1):
        raise ParameterError(
            f"num_beams is {settings.num_beams}, but the search has its own beams; give generate "
            "num_beams=1"
        )
    defaults, neutral = settings._get_default_generation_params(), {"guidance_scale": 1}
    shape = vars(sampling)  # temperature, top_p and top_k
    for name, value in vars(settings).items():
        if name in SUPPORTED or name.startswith("_") or value is None or value is False:
            continue
        if name == "min_length" and settings.min_new_tokens:  # made of it by transformers
            continue
        checkpoint, pipeline = (getattr(each, name, None) for each in own)
        allowed = [(neutral | shape).get(name)]
        if name not in shape or name not in named:
            allowed += [defaults.get(name), checkpoint]
        if value in allowed:
            continue
        given = f"generate was given {name}={value!r}, which is not supported: the search samples "
        given += "as the guard's config says and returns token ids alone; "
        if value != pipeline:
            where = f", or set it in the guard's config, where {name} is {shape.get(name)}"
            raise ParameterError(f"{given}leave {name} out{where if name in shape else ''}")
        if name in shape:
            warnings.warn(f"{given}the pipeline's value is ignored", stacklevel=2)


def check_processors(parts: Sequence[Any], settings: generation.GenerationConfig) -> None:
    """Raise ``ParameterError`` for a user's logits processors and stopping criteria.

    `check_settings` handles those that transformers makes from settings.
    """
    made = [kind for name, kind in STOPS.items() if getattr(settings, name) is not None]
    for kind in map(type, parts):
        own = not kind.__module__.startswith("transformers.")
        constrains = kind is generation.PrefixConstrainedLogitsProcessor
        stops = issubclass(kind, generation.StoppingCriteria) and kind not in made
        if own or constrains or stops:
            raise ParameterError(
                f"generate was given a {kind.__name__}, which is not supported; leave it out"
            )


def check_inputs(input_ids: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Raise ``ParameterError`` for inputs besides ids (B, L) and mask, and for right padding."""
    # a multimodal model without pictures has an empty mapping of them
    given = {
        name for name, x in inputs.items() if x is not None and not (type(x) is dict and not x)
    }
    refused = given - INPUTS
    refused |= {name for name in CACHES & given if inputs[name].get_seq_length()}
    if refused:
        raise ParameterError(
            f"generate was given {', '.join(sorted(refused))}; the search reads token ids alone: "
            "leave it out"
        )
    if not input_ids.shape[1]:
        raise ParameterError("a prompt has no tokens; give at least one")
    if mask.shape != input_ids.shape or not mask[:, -1].all() or (mask[:, 1:] < mask[:, :-1]).any():
        raise ParameterError(
            "attention_mask does not pad on the left; set tokenizer.padding_side to 'left'"
        )
