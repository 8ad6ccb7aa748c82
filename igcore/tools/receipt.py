"""What somebody else needs to check an answer: digests, the budget after each block, and versions.

A receipt is one line of JSON, with sorted keys, without spaces, in ASCII. It holds no text, so it
can be kept where texts may not. Nothing in it is signed: whoever checks it has the text, a guard of
their own, and with the model answers the prompt again, see ``igserve verify-receipt``.
"""

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..errors import ParameterError
from ..files import digest_of
from ..response import Response
from ..settings import written
from ..setup import Setup


def receipt_of(answer: Response) -> str:
    """Return the receipt of an answer.

    ``z`` is the budget at the start and after each block, charged for all checks inside it;
    ``ends`` are the offsets of the blocks' ends in the judged text. The text is reasoning and
    answer, and the prompt is what scorers read.

    Raises
    ------
    ParameterError
        When the answer is a copy without its guard.
    """
    if answer.guard is None:
        raise ParameterError("this answer is a copy, which has no guard; set answer.guard")
    found = {
        "prompt": text_digest(answer.prompt),
        "set": answer.set_name,  # of the prompt; it and the seed decide the samples
        "text": text_digest(answer.judged),
        "status": answer.status,
        "reason": answer.reason,
        "cost": answer.cost,
        "z": answer.z_trace,
        "ends": answer.block_ends,
        "tokens": answer.n_tokens,
        "finished": answer.finished,
    }
    return canonical(origin_of(answer.guard) | found)


def origin_of(guard: Setup) -> dict[str, Any]:
    """Return what an answer depends on besides its prompt, as JSON values."""
    return {
        "receipt": 1,  # the version of its form
        "method": guard.method,
        "seed": guard.seed,
        "budget": guard.config.budget,
        "settings": digest_of(written(guard.config)),
        "policy": {"name": guard.policy.name, "digest": guard.policy.digest},
        "cost_model": _name_and_digest(guard.cost),
        "reward_model": None if guard.reward is None else _name_and_digest(guard.reward),
        "versions": _versions(),
    }


def canonical(value: Any) -> str:
    """Return a JSON value in the one form that a receipt has; None for a number without a value."""
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def text_digest(text: str | None) -> str | None:
    """Return the sha256 of a text in UTF-8, or None where nothing was emitted."""
    if text is None:
        return None
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _name_and_digest(scorer: Any) -> dict[str, str]:
    return {"name": scorer.name, "digest": scorer.digest}


@cache
def _versions() -> dict[str, str]:
    """Return the versions of what computes an answer."""
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"igcore": __version__, "python": platform.python_version()} | libraries
