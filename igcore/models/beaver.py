"""The cost beaver-7b-unified-cost of Safe RLHF: a Llama with a score head.

Do not load these files with transformers' class for sequence classification: it accepts them and
puts a random head in the place of theirs.
"""

from collections.abc import Callable

import torch

from ..errors import AssetError
from ..scorers import COST
from .lm_scorer import ENDS, LMScorer
from .probe import probe
from .source import Loaded, Source, check_name, digest
from .templates import TEMPLATES

HEAD, EPSILON = "score_head", 1e-8
# versions of Safe RLHF differ in them
OPTIONAL = (f"{HEAD}.bias", "normalizer.mean", "normalizer.var", "normalizer.count")


def beaver_7b_cost(
    *,
    repo: str = "PKU-Alignment/beaver-7b-unified-cost",
    revision: str | None = None,
    text_format: str = "safe-rlhf",
    ends: str = "always",
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer:
    """Load a cost model of Safe RLHF; higher is worse, above 0 is unsafe.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`.
    text_format : str
        How prompt and answer become text, a key of `igcore.models.templates.TEMPLATES`.
    ends : str
        Which answers are closed by an end token, at which the model was trained to give its score:
        ``always``, also parts of an answer, or ``finished`` ones alone.

    Returns
    -------
    LMScorer
        Its digest covers all that changes a score: files, text format, end tokens, dtype.

    Raises
    ------
    ParameterError
        For a bad option.
    AssetError
        When files are missing, damaged, or not those of such a model.
    ScorerError
        When it does not put a harmless answer below 0 and an unsafe one above it.
    """
    source = Source(repo, revision, dtype, device, self_check)
    check_name("text_format", text_format, TEMPLATES)
    check_name("ends", ends, ENDS)
    loaded = source.load([f"{HEAD}.weight"], OPTIONAL)
    if (made_for := getattr(loaded.model.config, "score_type", "cost")) != "cost":
        raise AssetError(
            f"{loaded.folder} is a {made_for} model, not a cost model; name one as repo whose "
            "score_type is cost"
        )
    normalised = bool(getattr(loaded.model.config, "do_normalize", False))
    head = _scaled(loaded) if normalised else loaded.single(HEAD)
    backbone = loaded.reading(text_format, end_id=loaded.tokenizer.eos_token_id, ends=ends)
    known = digest(loaded.files, backbone.template, text_format=text_format, ends=ends, dtype=dtype)
    scorer = LMScorer(
        "beaver-7b-cost", backbone, head, COST, known, "trained scale", files=loaded.files
    )
    if self_check:
        probe(scorer, "cost", boundary=0)
    return scorer


def _scaled(loaded: Loaded) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the head divided by the standard deviation that costs had in training.

    It is not shifted by their mean: that would move the boundary between safe and unsafe away from
    0.
    """
    if "normalizer.var" not in loaded.tensors:
        raise AssetError(
            f"{loaded.folder} asks for normalised costs but lacks normalizer.var; fetch the whole "
            "model again"
        )
    head = loaded.single(HEAD)
    deviation = loaded.tensors["normalizer.var"].float().sqrt().to(loaded.model.device) + EPSILON

    def scaled(states: torch.Tensor) -> torch.Tensor:
        """Return the scaled costs of hidden states."""
        return head(states) / deviation

    return scaled
