"""A language model behind llama.cpp's server that is asked a question, as a cost."""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import AliasPath, Field

from ..errors import ParameterError, ScorerError, one_line
from ..files import digest_of
from ..models.wording import SLOT, Wording
from ..scorers import COST
from ..settings import settings
from .client import Failed, Refused, Request, without_key
from .endpoint import Remote
from .server import Form, Reply, Tokens

LISTED = 1000  # tokens whose probabilities the server lists, the most probable ones
# a cached beginning of the text changes the last digits of a probability, or even the second one
SETTINGS = {"n_predict": 1, "n_probs": LISTED, "cache_prompt": False}


class Listed(Reply):
    """A token that may come next, and its log-probability."""

    id: int
    logprob: Annotated[float, Field(allow_inf_nan=False)]


class Next(Reply):
    """The tokens that may follow a text, which the server has read to its end."""

    truncated: Literal[False]
    listed: list[Listed] = Field(
        validation_alias=AliasPath("completion_probabilities", 0, "top_logprobs")
    )


class Rendered(Reply):
    """A reply of /apply-template."""

    prompt: str


@settings(kw_only=True)
class LlamaLabels(Wording, Remote):
    """A language model behind llama.cpp's server that is asked a question, as a cost.

    The cost is the probability of the labels `unsafe` for the next token, among all labels. Chat
    template and tokens are the server's own. Prompt and response are tokenized apart from the text
    around them, so that they cannot spell its special tokens.

    Attributes
    ----------
    model, url, api_key_env, timeout, workers, max_retries, self_check
        See `igcore.serve.endpoint.Remote`.
    unsafe, safe, messages, chat_options, prefix
        See `igcore.models.wording.Wording`. `messages` is needed, and the last one is the user's: a
        question. A prompt that is a dialogue stays one text.
    """

    url: str = "http://localhost:8080"
    sign: ClassVar[str] = COST
    unit: ClassVar[str] = "probability"
    route: ClassVar[str] = "/completion"

    def __post_init__(self) -> None:
        Remote.__post_init__(self)
        Wording.__post_init__(self)
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ParameterError("messages does not end with a user's turn; end it with a question")

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"llama-labels:{self.model.rpartition('/')[2]}"

    @cached_property
    def digest(self) -> str:
        """Hash of the model's name and the wording."""
        names = ("model", "unsafe", "safe", "messages", "chat_options", "prefix")
        return digest_of({name: getattr(self, name) for name in names})

    # --- the text in tokens ---

    @cached_property
    def _labels(self) -> list[int]:
        """The token of each label, those of unsafe first."""
        labels = [*self.unsafe, *self.safe]
        found = self._tokens(labels, parse_special=False)
        ids = [tokens[0] for tokens in found if len(tokens) == 1]
        if len(set(ids)) < len(labels):
            raise ParameterError(
                f"labels {labels} are not one token each and distinct for {self.model!r}; give "
                "other words, or their first tokens"
            )
        return ids

    @cached_property
    def _frame(self) -> tuple[list[list[int]], list[str]]:
        """The tokens of the text around prompt and response, and which of them stands between."""
        body = {"messages": self.messages, "chat_template_kwargs": self.chat_options or {}}
        (reply,) = self._asked([Request("/apply-template", body)], Rendered)
        parts = SLOT.split(reply.prompt + self.prefix)
        first = self._tokens(parts[:1], add_special=True)
        return first + self._tokens(parts[2::2]), parts[1::2]

    def _tokens(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        """Return the tokens of texts; raise `Failed` if the server does not tell them."""
        requests = [Request("/tokenize", {"content": text} | options) for text in texts]
        return [reply.tokens for reply in self._asked(requests, Tokens)]

    def _asked(self, requests: Sequence[Request], form: type[Form]) -> list[Form]:
        """Return the replies to requests; raise `Failed` if one fails or is malformed."""
        replies = dict(self.client.replies(requests, self.timeout))
        for reply in replies.values():
            if isinstance(reply, Failed):
                raise reply
        try:
            return [form.model_validate_json(replies[at]) for at in range(len(requests))]
        except ValueError as error:
            words = without_key(one_line(error), self.client.key)
            why = f"does not answer {requests[0].path} as llama.cpp's server does ({words})"
            raise Failed(f"{why}; correct url") from None

    # --- the numbers ---

    def _scores(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[np.ndarray, str]:
        """Return one number per text (n,), NaN where there is none, and the reason."""
        n = len(prompts)
        try:
            around, names = self._frame
            self._labels  # noqa: B018, before the texts: they need tokens of their own
            inner = dict.fromkeys([*prompts, *responses])
            tokens = dict(zip(inner, self._tokens([*inner], parse_special=False), strict=True))
        except Failed as error:
            if n > 1 and isinstance(error, Refused):
                raise ScorerError(f"{self._place} {error}") from None
            return np.full(n, math.nan), str(error)
        requests = []
        for prompt, response in zip(prompts, responses, strict=True):
            texts = {"prompt": tokens[prompt], "response": tokens[response]}
            between = [texts[name] for name in names]
            ids = [*around[0], *chain(*chain(*zip(between, around[1:], strict=True)))]
            body = {"model": self.model, "prompt": ids} | SETTINGS
            requests.append(Request(self.route, body))
        replies = dict(self.client.replies(requests, self.timeout))
        read = [self._read(replies[place], 1) for place in range(n)]
        return np.array([x for (x,), _ in read]), next((why for _, why in read if why), "")

    def _numbers(self, reply: bytes, n: int) -> list[float]:
        """Return the number in a reply about one text; raise if it is malformed."""
        listed = Next.model_validate_json(reply).listed
        known = {token.id: math.exp(token.logprob) for token in listed}
        if missing := [label for label in self._labels if label not in known]:
            raise LookupError(f"tokens {missing} of labels are not among the {LISTED} listed")
        probs = [known[label] for label in self._labels]
        return [math.fsum(probs[: len(self.unsafe)]) / math.fsum(probs)]
