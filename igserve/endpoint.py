"""Models behind an endpoint as a cost or a reward: over vLLM's /classify, or asked a question.

A text whose reply is malformed, late or too long scores NaN, which is never safe.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AliasPath, Field

from igcore.errors import ParameterError, ScorerError, ScorerWarning, one_line
from igcore.files import digest_of
from igcore.models.probe import HELPFUL, probe
from igcore.models.wording import SLOT, Wording, filled
from igcore.scorers import COST, Texts
from igcore.settings import Natural, Rows, Seconds, Threads, settings
from igcore.template import escape_special_tokens

from .client import SCORER, Client, Failed, Refused, Request, check_endpoint, key_in, without_key
from .server import Form, Reply, Tokens

Sized = tuple[Request, int]  # a request, and how many texts it is about
# tokens whose probabilities llama.cpp's server lists, the most probable first
LISTED = 1000
# a number depends on the text alone only when no beginning of it is read from a cache
ONE_TOKEN = {"n_predict": 1, "n_probs": LISTED, "cache_prompt": False}
TEXT = "[User]\n{prompt}\n\n[Assistant]\n{response}"  # what a classifier reads


class Part(Reply):
    """The probabilities of the classes of one text."""

    index: int
    probs: list[float]


class Classes(Reply):
    """A reply: one part for each text, in any order."""

    data: list[Part]


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


# --- the scorers ----------------------------------------------------------------------------------


@settings(kw_only=True)
class Remote:
    """The part that scorers behind an endpoint share.

    The digest covers the model's name and the text that is sent, but neither key nor address: the
    same model may be served at another address after a stop, and a run continues there. Nothing
    here can check that it is the same model.

    Attributes
    ----------
    model : str
        Its name on the server.
    url : str
        Address of the server, with or without ``/v1``.
    api_key_env : str
        Name of the environment variable that holds the key; it begins with ``IGCORE_SCORER_``. An
        endpoint on this computer needs none.
    timeout : float
        Seconds for a reply; no request is repeated after as many since its first attempt.
    workers : int
        Most requests at a time.
    max_retries : int
        Retries, after growing pauses, when the endpoint is busy, fails or drops the connection.
    self_check : bool
        Whether loading scores fixed texts as a check, see `igcore.models.probe.probe`.
    """

    model: str
    url: str = "http://localhost:8000"
    api_key_env: str = "IGCORE_SCORER_KEY"
    timeout: Seconds = 120.0
    workers: Threads = 8
    max_retries: Natural = 5
    self_check: bool = True
    kind: ClassVar[str]  # the name of the scorer without the model
    server: ClassVar[str]  # what the errors call it

    def __post_init__(self) -> None:
        check_endpoint("url", self.url, self.api_key_env, SCORER)

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"{self.kind}:{self.model.rpartition('/')[2]}"

    def load(self) -> Self:
        """Return this scorer, checked unless `self_check` is False.

        Raises
        ------
        ParameterError
            When the client is not installed.
        ScorerError
            When the endpoint gives no number, or scores the two fixed texts in the wrong order.
        """
        if self.self_check:
            _, why = self._scores(*([text] for text in HELPFUL))
            if why:
                raise ScorerError(f"{self._place} {why}; self_check: false loads it all the same")
            probe(self)  # type: ignore[arg-type]  # its kinds have the rest of a scorer
        return self

    # --- scores ---

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return one number per text (n,) float64, NaN where there is none; `finished` is ignored.

        A warning gives the reason for a NaN. It does not raise when the endpoint is down: the
        caller would then retry the texts one by one, and each would take `timeout` seconds.

        Raises
        ------
        ScorerError
            When the endpoint refuses a request with several texts; it may accept some of them
            alone.
        """
        scores, why = self._scores(prompts, responses)
        if why:
            lost = f"{np.isnan(scores).sum()} of {len(scores)} texts count as unsafe"
            warnings.warn(f"{self._place} {why}; {lost}", ScorerWarning, stacklevel=2)
        return scores

    @property
    def _place(self) -> str:
        return f"scorer {self.name!r} at {self.url}"

    def _scores(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[np.ndarray, str]:
        """Return one number per text (n,), NaN where there is none, and the reason."""
        replies: list[tuple[Any, int]]
        try:
            requests = self._requests(prompts, responses)
            found = dict(self.client.replies([request for request, _ in requests], self.timeout))
            replies = [(found[place], n) for place, (_, n) in enumerate(requests)]
        except (Failed, ValueError) as error:
            replies = [(error, len(prompts))]
        failed = [reply for reply, _ in replies if isinstance(reply, Failed)]
        if failed and len(prompts) > 1 and all(isinstance(reply, Refused) for reply in failed):
            raise ScorerError(f"{self._place} {failed[0]}")
        read = [self._read(*reply) for reply in replies]
        numbers = [number for found, _ in read for number in found]
        return np.array(numbers), next((why for _, why in read if why), "")

    def _requests(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Sized]:
        """Return the requests about texts."""
        raise NotImplementedError

    def _read(self, reply: bytes | Exception, n: int) -> tuple[list[float], str]:
        """Return the n numbers of a reply, NaN where there is none, and the reason."""
        try:
            if isinstance(reply, Exception):
                raise reply
            return self._numbers(reply, n), ""
        except Failed as error:
            why = str(error)
        except (ValueError, LookupError, ArithmeticError) as error:
            words = without_key(one_line(error), self.client.key)
            why = f"does not answer as {self.server} does ({words}); correct url or labels"
        return [math.nan] * n, why

    def _numbers(self, reply: bytes, n: int) -> list[float]:
        """Return the numbers of a reply in the order of the n texts; raise if it is malformed."""
        raise NotImplementedError

    @cached_property
    def client(self) -> Client:
        """The HTTP client, with the key."""
        key = key_in(self.url, self.api_key_env, SCORER)
        url = self.url.rstrip("/").removesuffix("/v1")
        return Client(
            url, key, timeout=self.timeout, retries=self.max_retries, at_once=self.workers
        )


@settings(kw_only=True)
class Endpoint(Remote):
    """A model behind vLLM's ``/classify`` as a cost, or with `sign` as a reward.

    Attributes
    ----------
    model, url, api_key_env, timeout, workers, max_retries, self_check
        See `Remote`.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        The classes that count, from 0; their probabilities are added. A model of one class needs
        none.
    template : str, optional
        The text that is sent, with ``{response}`` and, where it should be read, ``{prompt}``.
    tokenizer : str, optional
        Folder or name on the hub of the model's tokenizer. It breaks up special tokens that a text
        spells out, which a server may read as special tokens.
    batch : int
        Most texts in one request.
    """

    sign: Literal["higher is worse", "higher is better"] = "higher is worse"
    labels: list[Natural] | None = None
    template: str | None = None
    tokenizer: str | None = None
    batch: Rows = 32
    unit: ClassVar[str] = "points"
    kind: ClassVar[str] = "endpoint"
    server: ClassVar[str] = "/classify"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None and "{response}" not in self.template:
            raise ParameterError("template has no {response}; write it into the text")

    @property
    def name(self) -> str:
        """Its name in records."""
        role = "cost" if self.sign == COST else "reward"
        return f"{super().name}-{role}"

    @cached_property
    def digest(self) -> str:
        """Hash of the model's name and the options that change a number, and of an example."""
        names = ("model", "sign", "labels", "template", "tokenizer")
        return digest_of([{name: getattr(self, name) for name in names}, self._text(*HELPFUL)])

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer, or None."""
        if self.tokenizer is None:
            return None
        from igcore.models.hub import snapshot  # here: they need torch, and most endpoints do not
        from igcore.models.pretrained import load_tokenizer

        return load_tokenizer(snapshot(self.tokenizer))

    def _requests(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Sized]:
        """Return the requests about texts."""
        texts = [self._text(*text) for text in zip(prompts, responses, strict=True)]
        batches = [texts[at : at + self.batch] for at in range(0, len(texts), self.batch)]
        return [
            (Request(self.server, {"model": self.model, "input": batch}), len(batch))
            for batch in batches
        ]

    def _numbers(self, reply: bytes, n: int) -> list[float]:
        """Return the numbers of a reply in the order of the n texts; raise if it is malformed."""
        found = Classes.model_validate_json(reply)
        if len(found.data) != n:
            raise ValueError(f"it has {len(found.data)} numbers for {n} texts")
        probs = {part.index: part.probs for part in found.data}
        if not self.labels and any(len(classes) != 1 for classes in probs.values()):
            raise ValueError("it has several classes; name in labels those that count, from 0")
        labels = self.labels or [0]
        return [math.fsum(probs[index][label] for label in labels) for index in range(n)]

    def _text(self, prompt: str, response: str) -> str:
        """Return the text that is sent for a prompt and a response."""
        if self._tokenizer is not None:
            prompt = escape_special_tokens(self._tokenizer, prompt)
            response = escape_special_tokens(self._tokenizer, response)
        return filled(self.template or TEXT, prompt, response)


@settings(kw_only=True)
class LlamaLabels(Wording, Remote):
    """A language model behind llama.cpp's server that is asked a question, as a cost.

    The cost is the probability of the labels `unsafe` for the next token, among all labels. Chat
    template and tokens are the server's own. Prompt and response are tokenized apart from the text
    around them, so that they cannot spell its special tokens.

    Attributes
    ----------
    model, url, api_key_env, timeout, workers, max_retries, self_check
        See `Remote`.
    unsafe, safe, messages, chat_options, prefix
        See `igcore.models.wording.Wording`. `messages` is needed, and the last one is the user's: a
        question. A prompt that is a dialogue stays one text.
    """

    url: str = "http://localhost:8080"
    sign: ClassVar[str] = COST
    unit: ClassVar[str] = "probability"
    kind: ClassVar[str] = "llama-labels"
    server: ClassVar[str] = "llama.cpp's server"

    def __post_init__(self) -> None:
        Remote.__post_init__(self)
        Wording.__post_init__(self)
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ParameterError("messages does not end with a user's turn; end it with a question")

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
        ids = set(map(tuple, found := self._tokens(labels, parse_special=False)))
        if len(ids) < len(labels) or any(len(tokens) != 1 for tokens in found):
            raise ScorerError(
                f"labels {labels} are not one token each and distinct for {self.model!r}; give "
                "other words, or their first tokens"
            )
        return [token for (token,) in found]

    @cached_property
    def _frame(self) -> tuple[list[list[int]], list[str]]:
        """The tokens of the text around prompt and response, and the names of the texts between."""
        body = {"messages": self.messages, "chat_template_kwargs": self.chat_options or {}}
        (reply,) = self._replies("/apply-template", [body], Rendered)
        parts = SLOT.split(reply.prompt + self.prefix)
        written = SLOT.findall("\n".join(message["content"] for message in self.messages or ()))
        if sorted(parts[1::2]) != sorted(written):
            raise ScorerError(
                f"the chat template of {self.model!r} leaves out one of the messages, so that it "
                "would not read all of prompt and response; write them into a single user's turn"
            )
        first = self._tokens(parts[:1], add_special=True)
        return first + self._tokens(parts[2::2]), parts[1::2]

    def _tokens(self, texts: Sequence[str], **options: bool) -> list[list[int]]:
        """Return the tokens of texts."""
        bodies = [{"content": text} | options for text in texts]
        return [reply.tokens for reply in self._replies("/tokenize", bodies, Tokens)]

    def _replies(self, path: str, bodies: Sequence[dict[str, Any]], form: type[Form]) -> list[Form]:
        """Return replies; raise `Failed` if one fails, and ``ValueError`` if one is malformed."""
        requests = [Request(path, body) for body in bodies]
        replies: dict[int, Any] = dict(self.client.replies(requests, self.timeout))
        for reply in replies.values():
            if isinstance(reply, Failed):
                raise reply
        return [form.model_validate_json(replies[place]) for place in range(len(bodies))]

    # --- the numbers ---

    def _requests(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Sized]:
        """Return the requests about texts."""
        around, names = self._frame
        inner = self._tokens([*prompts, *responses], parse_special=False)
        requests = []
        for pair in zip(inner[: len(prompts)], inner[len(prompts) :], strict=True):
            texts = dict(zip(("prompt", "response"), pair, strict=True))
            after = [texts[name] for name in names]
            ids = sum(chain(*zip(after, around[1:], strict=True)), around[0])
            body = {"model": self.model, "prompt": ids} | ONE_TOKEN
            requests.append((Request("/completion", body), 1))
        return requests

    def _numbers(self, reply: bytes, n: int) -> list[float]:
        """Return the number in a reply about one text; raise if it is malformed."""
        listed = Next.model_validate_json(reply).listed
        known = {token.id: math.exp(token.logprob) for token in listed}
        if missing := [label for label in self._labels if label not in known]:
            raise LookupError(f"tokens {missing} of labels are not among the {LISTED} listed")
        probs = [known[label] for label in self._labels]
        return [math.fsum(probs[: len(self.unsafe)]) / math.fsum(probs)]
