"""A model behind an endpoint as a cost or a reward: a number for each text, over HTTP.

`APIS` says for each kind of endpoint which route is asked, how, and how the number is read.
Whatever comes back in another form, too late or too long is NaN, which is never safe.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from ..errors import ParameterError, ScorerError, ScorerWarning
from ..files import digest_of
from ..models.probe import HELPFUL, probe
from ..models.wording import Wording, filled, label_ids
from ..rendering import neutral
from ..scorers import COST
from ..settings import Natural, Options, Rows, Seconds, Threads, one_of, settings
from .client import SCORER, Client, Failed, Refused, Request, check_endpoint, key_in, without_key

JSON: TypeAdapter[Any] = TypeAdapter(Any)  # refuses what is nested without end, too
LARGEST = 1 - 1e-9  # probability whose log odds are told from infinity
TEXT = "[User]\n{prompt}\n\n[Assistant]\n{response}"  # what a classifier reads
# what a reader raises
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


# --- kinds of endpoints ---------------------------------------------------------------------------


def inputs(scorer: "Endpoint", parts: Sequence[Any]) -> dict[str, Any]:
    """Ask for the classes of texts."""
    return {"input": list(parts)}


def classes(scorer: "Endpoint", reply: Any, parts: Sequence[Any]) -> list[float]:
    """Read the sum of the probabilities of the classes that count."""
    probabilities = [part["probs"] for part in in_order(reply["data"])]
    if not scorer.labels and any(len(each) != 1 for each in probabilities):
        raise ValueError("it has several classes; say in labels which count, from 0")
    return [math.fsum(number(each[i]) for i in scorer.labels or [0]) for each in probabilities]


def items(scorer: "Endpoint", parts: Sequence[Any]) -> dict[str, Any]:
    """Ask for the probabilities of labels after token ids."""
    labels = {"label_token_ids": scorer.label_ids, "apply_softmax": True}
    return {"query": [], "items": list(parts)} | labels


def first_label(scorer: "Endpoint", reply: Any, parts: Sequence[Any]) -> list[float]:
    """Read the probability of unsafe from that of the first label, the only one that is told.

    A server may cut the end of a long text off without a word, or put several texts into one. So
    all tokens that were sent must have been read, and no others.
    """
    read, sent = reply["usage"]["prompt_tokens"], sum(map(len, parts))
    if type(read) is not int or read != sent:
        raise ValueError(f"it has read {read} tokens of {sent}")
    first = [number(part["score"]) for part in in_order(reply["data"])]
    return first if len(scorer.wording.unsafe) == 1 else [1 - p for p in first]


def number(value: Any) -> float:
    """Return a number of a reply; one in quotes is none, and neither is a verdict."""
    if type(value) not in (int, float):
        raise TypeError(f"{str(value)[:20]!r} is no number")
    return float(value)


def in_order(data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of a reply in the order of the texts."""
    known = {number(part["index"]): part for part in data}
    return [known[index] for index in range(len(data))]


class Api(NamedTuple):
    """One kind of endpoint.

    Attributes
    ----------
    route : str
    body : callable
        (scorer, what is sent of each text) -> the request besides the model.
    read : callable
        (scorer, reply as JSON values, what was sent of each text) -> their numbers.
    options : tuple of str
        Of the scorer, those that only this kind has.
    """

    route: str
    body: Callable[["Endpoint", Sequence[Any]], dict[str, Any]]
    read: Callable[["Endpoint", Any, Sequence[Any]], list[float]]
    options: tuple[str, ...]


APIS = {
    "classify": Api("/classify", inputs, classes, ("labels", "template")),
    "vllm-labels": Api("/generative_scoring", items, first_label, ("guard", "log_odds")),
}
OPTIONS = ("guard", "labels", "log_odds", "template")


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
        A key of `APIS`. ``classify`` is vLLM's route for reward models and classifiers;
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
        vLLM tells that of one label, so one of the two has a single word.
    template : str, optional
        Of ``classify`` the text that is sent, with ``{response}`` and, where it is to be read,
        ``{prompt}``.
    tokenizer : str, optional
        Folder or name on the hub of the model's tokenizer. ``vllm-labels`` is sent its tokens. For
        ``classify`` it breaks up special tokens that a text spells out, which a server may read as
        such.
    log_odds : bool
        Of ``vllm-labels`` whether the number is log p - log (1 - p) of the probability p.
    api_key_env : str
        Name of the environment variable that holds the key: one that begins with
        ``IGCORE_SCORER_``, or the one that the variable ``IGCORE_SCORER_KEY_FROM`` names. An
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
    api: Annotated[str, one_of(APIS)]
    url: str = "http://localhost:8000"
    sign: Literal["higher is worse", "higher is better"] = COST
    labels: list[Natural] | None = None
    guard: Options | None = None
    template: str | None = None
    tokenizer: str | None = None
    log_odds: bool = False
    api_key_env: str = "IGCORE_SCORER_KEY"
    timeout: Seconds = 120.0
    batch: Rows = 32
    workers: Threads = 8
    max_retries: Natural = 5
    self_check: bool = True

    def __post_init__(self):
        check_endpoint("url", self.url, self.api_key_env, SCORER)
        for name in OPTIONS:
            if getattr(self, name) and name not in self.kind.options:
                raise ParameterError(f"api {self.api!r} does not read {name}; leave it out")
        if self.api == "vllm-labels":
            if not self.guard or not self.tokenizer:
                raise ParameterError(
                    f"api {self.api!r} needs guard, with the words unsafe and safe, and tokenizer; "
                    "give both"
                )
            unsafe, safe = self.wording.unsafe, self.wording.safe
            if min(len(unsafe), len(safe)) > 1:
                raise ParameterError(
                    f"unsafe and safe are {unsafe} and {safe}, of which vLLM tells the probability "
                    "of one word; give one of them a single word"
                )
        if self.template is not None and "{response}" not in self.template:
            raise ParameterError("template has no {response}; write it into the text")

    # --- what it is ---

    @property
    def kind(self) -> Api:
        """The kind of endpoint."""
        return APIS[self.api]

    @property
    def name(self) -> str:
        """Its name in records."""
        role = "cost" if self.sign == COST else "reward"
        return f"endpoint:{self.model.rpartition('/')[2]}-{role}"

    @property
    def unit(self) -> str:
        """What one point means."""
        if self.api == "classify":
            return "points"
        return "log odds" if self.log_odds else "probability"

    @cached_property
    def digest(self) -> str:
        """Hash of model, api and wording; the example holds what template and tokenizer do."""
        names = ("model", "api", "sign", "tokenizer", *OPTIONS)
        told = {name: getattr(self, name) for name in names}
        return digest_of([told, self._part(*HELPFUL), self.guard and self.label_ids])

    @cached_property
    def wording(self) -> Wording:
        """What a guard reads."""
        return Wording(**self.guard)

    @cached_property
    def _words(self):
        """The tokenizer."""
        from ..models.hub import snapshot  # here: they need torch, and not every kind does
        from ..models.pretrained import load_tokenizer

        return load_tokenizer(snapshot(self.tokenizer, None))

    @cached_property
    def label_ids(self) -> list[int]:
        """The tokens of a guard's labels: unsafe first, unless vLLM is to tell that of safe."""
        unsafe, safe = self.wording.unsafe, self.wording.safe
        labels = [*safe, *unsafe] if len(unsafe) > 1 else [*unsafe, *safe]
        text = self.wording.text(self._words, *HELPFUL)
        special = self.wording.special(self._words, self.tokenizer)
        return label_ids(self._words, text, special, labels)

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
            probe(self)
        return self

    # --- asking ---

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,) float64, NaN where there is none; `finished` is ignored.

        A warning says why there is none. It does not raise: the texts would be asked for again one
        by one, and each would take `timeout` seconds of an endpoint that is down.
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
        """Return one number per text (n,), and why there is none for some."""
        parts = [self._part(*text) for text in zip(prompts, responses, strict=True)]
        numbers, reasons = np.full(len(parts), math.nan), []
        end, places = time.monotonic() + self.timeout, list(range(len(parts)))
        batches = [places[at : at + self.batch] for at in range(0, len(parts), self.batch)]
        while batches:
            texts = [[parts[i] for i in batch] for batch in batches]
            bodies = [{"model": self.model} | self.kind.body(self, some) for some in texts]
            requests = [Request(self.kind.route, body) for body in bodies]
            replies = self.client.each(requests, end - time.monotonic())
            asked, batches = batches, []
            down = any(type(reply) is Failed for reply in replies)
            for batch, some, reply in zip(asked, texts, replies, strict=True):
                if isinstance(reply, Refused) and len(batch) > 1 and not down:
                    batches += [[i] for i in batch]  # a text that is refused costs only itself
                    continue
                numbers[batch], why = self._read(reply, some)
                reasons += [why] if why else []
        return numbers, next(iter(reasons), "")

    def _read(self, reply: bytes | Failed, parts: Sequence[Any]) -> tuple[list[float], str]:
        """Return the numbers of a reply, NaN where there is none, and why."""
        if isinstance(reply, Failed):
            return [math.nan] * len(parts), str(reply)
        try:
            found = self.kind.read(self, JSON.validate_json(reply), parts)
            if len(found) != len(parts):
                raise ValueError(f"it gives {len(found)} numbers for {len(parts)} texts")
            return [self.scaled(number) for number in found], ""
        except MALFORMED as error:
            said = without_key(f"{type(error).__name__}: {error}", self.client.key)
            why = f"does not answer as {self.kind.route} does ({said}); correct api, url or labels"
        return [math.nan] * len(parts), why

    def _part(self, prompt: str, response: str) -> Any:
        """Return what is sent of a text: its tokens, or it with its prompt as one text."""
        if self.tokenizer:
            prompt, response = (neutral(self._words, text) for text in (prompt, response))
        if self.guard:
            text = self.wording.text(self._words, prompt, response)
            special = self.wording.special(self._words, self.tokenizer)
            return list(self._words(text, add_special_tokens=special)["input_ids"])
        return filled(self.template or TEXT, prompt, response)

    @cached_property
    def client(self) -> Client:
        """The way to the endpoint; made once, which takes longer than many requests."""
        key = key_in(self.url, self.api_key_env, SCORER, ScorerError)
        limits = {"timeout": self.timeout, "retries": self.max_retries, "at_once": self.workers}
        return Client(self.url.rstrip("/").removesuffix("/v1"), key, **limits)

    def scaled(self, number: float) -> float:
        """Return a number of a reply as a score; NaN for a probability that is none."""
        if self.api == "vllm-labels" and not 0 <= number <= 1:
            return math.nan
        if not self.log_odds:
            return number
        p = min(max(number, 1 - LARGEST), LARGEST)
        return math.log(p) - math.log1p(-p)
