"""A model behind an endpoint as a cost or a reward: a number for each text, over HTTP.

Whatever comes back in another form, too late or too long is NaN, which is never safe.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasPath, Field

from ..errors import ParameterError, ScorerError, ScorerWarning, said
from ..files import digest_of
from ..models.probe import HELPFUL, probe
from ..models.wording import Wording, filled, label_ids
from ..policy import escape_special_tokens
from ..scorers import COST
from ..settings import Natural, Options, Rows, Seconds, Threads, one_of, settings
from .client import SCORER, Client, Failed, Refused, Request, check_endpoint, key_in, without_key
from .server import Reply

TEXT = "[User]\n{prompt}\n\n[Assistant]\n{response}"  # what a classifier reads
ROUTES = {"classify": "/classify", "vllm-labels": "/generative_scoring"}  # of each kind of endpoint
# options that only one kind has
OPTIONS = {"guard": "vllm-labels", "labels": "classify", "template": "classify"}


class Part(Reply):
    """What a reply says about a text."""

    index: int
    probs: list[float] = []
    score: float = math.nan


class Numbers(Reply):
    """A reply, as far as it is read here; `read` are the tokens that the server has read."""

    data: list[Part]
    read: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


# --- the scorer -----------------------------------------------------------------------------------


@settings(kw_only=True)
class Endpoint:
    """A model that is served: its numbers as a cost, or with `sign` as a reward.

    Its digest covers model, api and wording, and neither key nor address: the same model may be
    served at another address after a stop, and a run goes on there. That it is the same model is
    only what the server says of itself.

    Attributes
    ----------
    model : str
        As the endpoint calls it.
    api : str
        A key of `ROUTES`. ``classify`` is vLLM's route for reward models and classifiers;
        ``vllm-labels`` reads a generative guard as the scorer `guard` does.
    url : str
        Address of the server, with or without ``/v1``.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        Of ``classify`` the classes that count, from 0; their probabilities are added.
    guard : mapping, optional
        Of ``vllm-labels`` what is read: ``unsafe``, ``safe`` and the other fields of
        `igcore.models.wording.Wording`. The number is the probability of unsafe among these labels.
        vLLM tells that of one label, so `unsafe` has a single word.
    template : str, optional
        Of ``classify`` the text that is sent, with ``{response}`` and, where it is to be read,
        ``{prompt}``.
    tokenizer : str, optional
        Folder or name on the hub of the model's tokenizer. ``vllm-labels`` is sent its tokens. For
        ``classify`` it breaks up special tokens that a text spells out, which a server may read as
        such.
    api_key_env : str
        Name of the environment variable that holds the key; it begins with ``IGCORE_SCORER_``. An
        endpoint on this computer needs none.
    timeout : float
        Seconds for all texts of one call together, repeated attempts included.
    batch, workers : int
        Most texts in one request, and most requests at a time.
    max_retries : int
        Further attempts, after ever longer pauses, where the endpoint is busy, fails or breaks off.
    self_check : bool
        Whether fixed texts are scored when it is loaded, see `igcore.models.probe.probe`.
    """

    model: str
    api: Annotated[str, one_of(ROUTES)]
    url: str = "http://localhost:8000"
    sign: Literal["higher is worse", "higher is better"] = "higher is worse"
    labels: list[Natural] | None = None
    guard: Options | None = None
    template: str | None = None
    tokenizer: str | None = None
    api_key_env: str = "IGCORE_SCORER_KEY"
    timeout: Seconds = 120.0
    batch: Rows = 32
    workers: Threads = 8
    max_retries: Natural = 5
    self_check: bool = True

    def __post_init__(self) -> None:
        check_endpoint("url", self.url, self.api_key_env, SCORER)
        for name, api in OPTIONS.items():
            if getattr(self, name) and api != self.api:
                raise ParameterError(f"api {self.api!r} does not read {name}; leave it out")
        if self.api == "vllm-labels":
            if not self.guard or not self.tokenizer:
                raise ParameterError(
                    f"api {self.api!r} needs guard, with the words unsafe and safe, and tokenizer; "
                    "give both"
                )
            if len(self.wording.unsafe) > 1:
                raise ParameterError(
                    f"unsafe is {self.wording.unsafe}, of which vLLM tells the probability of one "
                    "word; give it a single word"
                )
        if self.template is not None and "{response}" not in self.template:
            raise ParameterError("template has no {response}; write it into the text")

    # --- what it is ---

    @property
    def name(self) -> str:
        """Its name in records."""
        role = "cost" if self.sign == COST else "reward"
        return f"endpoint:{self.model.rpartition('/')[2]}-{role}"

    @property
    def unit(self) -> str:
        """What one point means."""
        return "points" if self.api == "classify" else "probability"

    @cached_property
    def digest(self) -> str:
        """Hash of model, api and wording; the example holds what template and tokenizer do."""
        names = ("model", "api", "sign", "tokenizer", *OPTIONS)
        told = {name: getattr(self, name) for name in names}
        return digest_of([told, self._part(*HELPFUL), self.guard and self.label_ids])

    @cached_property
    def wording(self) -> Wording:
        """What a guard reads."""
        return Wording(**self.guard or {})

    @cached_property
    def _words(self) -> Any:
        """The tokenizer."""
        from ..models.hub import snapshot  # here: they need torch, and not every kind does
        from ..models.pretrained import load_tokenizer

        return load_tokenizer(snapshot(self.tokenizer or "", None))

    @cached_property
    def label_ids(self) -> list[int]:
        """The tokens of a guard's labels, unsafe first: vLLM tells the probability of that."""
        text = self.wording.text(self._words, *HELPFUL)
        return label_ids(self._words, text, [*self.wording.unsafe, *self.wording.safe])

    def load(self) -> "Endpoint":
        """Return it, after it was asked once.

        Raises
        ------
        ParameterError
            When labels are not one token each, or the client is not installed.
        ScorerError
            When it gives no number, or puts the two fixed texts in the wrong order.
        """
        if self.self_check:
            _, why = self._ask(*([text] for text in HELPFUL))
            if why:
                raise ScorerError(f"{self._place} {why}; self_check: false loads it all the same")
            probe(self)  # type: ignore[arg-type]  # frozen, and a protocol's attributes are not
        return self

    # --- asking ---

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,) float64, NaN where there is none; `finished` is ignored.

        A warning says why there is none. Of an endpoint that is down it does not raise: the texts
        would be asked for again one by one, and each would take `timeout` seconds.

        Raises
        ------
        ScorerError
            When it refuses several texts together, of which it may take others alone.
        """
        scores, why = self._ask(prompts, responses)
        if why:
            lost = f"{np.isnan(scores).sum()} of {len(scores)} texts count as unsafe"
            warnings.warn(f"{self._place} {why}; {lost}", ScorerWarning, stacklevel=2)
        return scores

    @property
    def _place(self) -> str:
        return f"scorer {self.name!r} at {self.url}"

    def _ask(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[np.ndarray, str]:
        """Return one number per text (n,), NaN where there is none, and why."""
        parts = [self._part(*text) for text in zip(prompts, responses, strict=True)]
        batches = [parts[at : at + self.batch] for at in range(0, len(parts), self.batch)]
        requests = [Request(ROUTES[self.api], self._body(some)) for some in batches]
        replies = dict(self.client.replies(requests, self.timeout))
        failed = [reply for reply in replies.values() if isinstance(reply, Failed)]
        if failed and len(parts) > 1 and all(isinstance(reply, Refused) for reply in failed):
            raise ScorerError(f"{self._place} {failed[0]}")
        read = [self._read(replies[place], some) for place, some in enumerate(batches)]
        numbers = [number for found, _ in read for number in found]
        return np.array(numbers), next((why for _, why in read if why), "")

    def _read(self, reply: bytes | Failed, parts: Sequence[Any]) -> tuple[list[float], str]:
        """Return the numbers of a reply, NaN where there is none, and why."""
        if isinstance(reply, Failed):
            return [math.nan] * len(parts), str(reply)
        try:
            return self._numbers(Numbers.model_validate_json(reply), parts), ""
        except (ValueError, LookupError, ArithmeticError) as error:
            words, route = without_key(said(error), self.client.key), ROUTES[self.api]
            why = f"does not answer as {route} does ({words}); correct api, url or labels"
            return [math.nan] * len(parts), why

    def _numbers(self, reply: Numbers, parts: Sequence[Any]) -> list[float]:
        """Return the numbers of a reply in the order of the texts; raise for another form."""
        if len(reply.data) != len(parts):
            raise ValueError(f"it gives {len(reply.data)} numbers for {len(parts)} texts")
        known = {part.index: part for part in reply.data}
        found = [known[index] for index in range(len(parts))]
        if self.api == "classify":
            if not self.labels and any(len(part.probs) != 1 for part in found):
                raise ValueError("it has several classes; say in labels which count, from 0")
            return [math.fsum(part.probs[i] for i in self.labels or [0]) for part in found]
        # a server may cut the end of a long text off without a word, or put several texts into one
        sent = sum(map(len, parts))
        if reply.read != sent:
            raise ValueError(f"it has read {reply.read} tokens of {sent}")
        return [part.score if 0 <= part.score <= 1 else math.nan for part in found]

    def _body(self, parts: Sequence[Any]) -> dict[str, Any]:
        """Return a request for the classes of texts, or for the labels after them."""
        if self.api == "classify":
            return {"model": self.model, "input": list(parts)}
        labels = {"label_token_ids": self.label_ids, "apply_softmax": True}
        return {"model": self.model, "query": [], "items": list(parts)} | labels

    def _part(self, prompt: str, response: str) -> Any:
        """Return the payload for a text: its tokens, or one text of prompt and response."""
        if self.tokenizer:
            prompt, response = (
                escape_special_tokens(self._words, text) for text in (prompt, response)
            )
        if self.guard:
            text = self.wording.text(self._words, prompt, response)
            return list(self._words(text, add_special_tokens=False)["input_ids"])
        return filled(self.template or TEXT, prompt, response)

    @cached_property
    def client(self) -> Client:
        """The way to the endpoint."""
        key = key_in(self.url, self.api_key_env, SCORER)
        url = self.url.rstrip("/").removesuffix("/v1")
        return Client(
            url, key, timeout=self.timeout, retries=self.max_retries, at_once=self.workers
        )
