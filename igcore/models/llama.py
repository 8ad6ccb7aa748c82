"""The reward llama-7b-rm of ARGS: a Llama with a linear head at its last token."""

import re
from collections.abc import Callable
from functools import partial

from ..scorers import REWARD
from .lm_scorer import LMScorer
from .probe import probe
from .source import Source, check_name, digest
from .templates import TEMPLATES

HEAD = "score"
USER = re.compile("human:", re.IGNORECASE)


def _first_turn(whole: Callable[[str, str], str], prompt: str, answer: str) -> str:
    """Write a pair of which the answer ends where a user would speak again."""
    return whole(prompt, USER.split(answer)[0])


def llama_7b_rm(
    *,
    repo: str = "argsearch/llama-7b-rm-float32",
    revision: str | None = None,
    text_format: str = "human-assistant",
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer:
    """Load a ``LlamaForSequenceClassification`` with one output; higher is better.

    The number of labels is that of the head itself, because transformers assumes two when the
    configuration names none. No end token is appended, as in ARGS.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`.
    text_format : str
        How prompt and answer become text, a key of `igcore.models.templates.TEMPLATES`: the model
        was trained on dialogues of ``human-assistant``, in which an answer is read as ARGS reads
        it, up to where it goes on with "human:" in the user's place; ``raw`` joins the two as they
        are, and the formats of the policies are there as well.

    Returns
    -------
    LMScorer
        Its digest covers all that changes a score: files, text format, dtype.

    Raises
    ------
    ParameterError
        For a bad option.
    AssetError
        When files are missing, damaged, or not those of such a model.
    ScorerError
        When it does not put a helpful answer above gibberish.
    """
    source = Source(repo, revision, dtype, device, self_check)
    check_name("text_format", text_format, TEMPLATES)
    loaded = source.load([f"{HEAD}.weight"])
    backbone = loaded.reading(text_format)
    if text_format == "human-assistant":
        # not in the template itself: a cost has to read everything
        backbone.template = partial(_first_turn, backbone.template)
    known = digest(loaded.files, backbone.template, text_format=text_format, dtype=dtype)
    scorer = LMScorer(
        "llama-7b-rm",
        backbone,
        loaded.single(HEAD),
        REWARD,
        known,
        "trained scale",
        files=loaded.files,
    )
    if self_check:
        probe(scorer, "reward")
    return scorer
