"""What the generation settings of a checkpoint say about sampling."""

import logging
from dataclasses import replace

from ..config import SearchConfig
from ..policy import Policy

# settings that the search supports or that change no answer
SUPPORTED = {
    "max_length", "max_new_tokens", "num_beams", "do_sample", "num_return_sequences",
    "return_dict_in_generate", "eos_token_id", "pad_token_id", "bos_token_id",
    "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "compile_config", "disable_compile", "low_memory", "prefill_chunk_size", "renormalize_logits",
    "transformers_version",
}  # fmt: skip

log = logging.getLogger("igcore")


def checkpoint_config(policy: Policy, config: SearchConfig) -> SearchConfig:
    """Return settings with the temperature, top-p and top-k of a policy's checkpoint.

    What else its generation settings say about tokens is named in the log. Transformers' own
    default of top-k 50 is no setting of a checkpoint.

    Raises
    ------
    ParameterError
        For a value outside the range of `SearchConfig`.
    PolicyError
        For a policy in a server, which does not tell its settings.
    """
    own = policy.model.generation_config
    given = {name: value for name, value in vars(own).items() if value is not None}
    shape = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
    shape["top_k"] = shape.get("top_k") or None  # transformers writes 0 for none
    neutral = own._get_default_generation_params()
    left = [n for n in given.keys() - SUPPORTED if given[n] and given[n] != neutral.get(n)]
    if named := ", ".join(sorted(name for name in left if not name.startswith("_"))):
        log.warning("sampling is 'checkpoint', which leaves out %s of %s", named, policy.name)
    return replace(config, sampling=None, **shape)
