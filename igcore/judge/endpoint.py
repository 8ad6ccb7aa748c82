"""A language model behind any OpenAI-compatible endpoint as a judge. Knows requests and what may go wrong; knows no run or file."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from urllib.parse import urlsplit

from ..config import check_at_least, check_types
from ..errors import JudgeError, ParameterError
from .spec import ANSWER, ASPECTS, Question, Reply, parse

LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
WHY = {  # what the client raises -> what its user can do
    "APITimeoutError": "did not reply within {timeout:g} s; raise timeout, or lower workers",
    "APIConnectionError": "cannot be reached; start it, or correct base_url",
    "AuthenticationError": "refuses the key; put one that it knows into the environment variable {api_key_env}",
    "PermissionDeniedError": "does not let this key use model {model!r}; choose another model or key",
    "NotFoundError": "does not know model {model!r}; give a name that {base_url}/models lists",
    "RateLimitError": "takes no more requests for now; lower workers, or wait",
    "InternalServerError": "keeps failing; look into its log",
    "OpenAIError": "does not accept the request; correct the options of the judge",
}


@dataclass(frozen=True, kw_only=True)
class OpenAIJudge:
    """A language model behind an OpenAI-compatible endpoint, such as ``vllm serve MODEL --reasoning-parser deepseek_r1``.

    Attributes
    ----------
    model : str
        As the endpoint calls it.
    base_url : str
        Address up to ``/v1``.
    api_key_env : str
        Name of the environment variable that holds the key. An endpoint on this computer needs none.
    temperature, top_p : float
        How the reply is sampled.
    max_tokens : int
        Longest reply, its reasoning included.
    timeout : float
        Seconds to wait for a reply.
    max_retries : int
        Further attempts, after ever longer pauses, before the endpoint counts as down.
    """

    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 4096
    timeout: float = 600.0
    max_retries: int = 5

    def __post_init__(self):
        check_types(self)
        check_at_least(self, temperature=0, max_tokens=1, max_retries=0)
        for name, high in (("top_p", 1), ("timeout", float("inf"))):
            if not 0 < getattr(self, name) <= high:
                raise ParameterError(f"parameter {name} is {getattr(self, name)}; it must be above 0 and at most {high}")
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc or address.query:
            raise ParameterError(  # without the value, which may hold a key
                "parameter base_url is no plain http address such as http://localhost:8000/v1; a key belongs into the environment "
                f"variable {self.api_key_env}"
            )

    @property
    def names(self) -> dict[str, str]:
        return dict.fromkeys(ASPECTS, self.model)

    def identity(self) -> dict:
        """Return what a reply depends on; the same model may be served at another address after a stop."""
        sampling = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "max_tokens")}
        return sampling | {"wording": [ANSWER, ASPECTS]}

    @property
    def key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()

    def ask(self, questions: Sequence[Question], seed: int, workers: int) -> Iterator[tuple[Question, Reply]]:
        with self._client() as client:
            yield from in_parallel(partial(self._reply, client, seed), questions, workers)

    def _client(self):
        try:
            import openai
        except ImportError as error:
            raise JudgeError("judge 'openai' needs the package openai; install it with `pip install 'igcore[judge]'`") from error
        local = bool(LOOPBACK.fullmatch(urlsplit(self.base_url).hostname))
        if not self.key and not local:
            raise JudgeError(
                f"the environment variable {self.api_key_env} is empty; put the key of {self.base_url} there, or any word if it "
                "asks for none"
            )
        http = openai.DefaultHttpxClient(trust_env=not local)  # no proxy stands between this computer and itself
        connection = {"timeout": self.timeout, "max_retries": self.max_retries, "http_client": http}
        return openai.OpenAI(base_url=self.base_url, api_key=self.key or "none", **connection)

    def _reply(self, client, seed: int, question: Question) -> Reply:
        import openai

        asked = {"messages": [{"role": "user", "content": question.text}], "seed": seed}
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        try:
            said = client.chat.completions.create(model=self.model, **asked, **sampling)
        except openai.OpenAIError as error:
            names = (cls.__name__ for cls in type(error).__mro__)
            raise self._down(next(WHY[name] for name in names if name in WHY), str(error)) from None  # its text may hold the key
        except ValueError:
            raise self._down("does not speak JSON; correct base_url", "no JSON") from None
        choice = said.choices[0] if getattr(said, "choices", None) else None
        if not getattr(choice, "message", None):
            raise self._down("does not answer as a chat completion does; correct base_url", "no message")
        answer, reason = choice.message.content, choice.finish_reason
        return Reply(parse(answer, reason), answer, reason, said.usage.completion_tokens if said.usage else 0)

    def _down(self, why: str, detail: str) -> JudgeError:
        detail = " ".join(detail.replace(self.key or "\0", "***").split())[:200]
        why = why.format(**asdict(self))
        return JudgeError(f"judge at {self.base_url} {why} ({detail}); what it said so far is kept: run again to go on")


def in_parallel(
    reply: Callable[[Question], Reply], questions: Sequence[Question], workers: int
) -> Iterator[tuple[Question, Reply]]:
    """Yield questions and replies as they come; after the first error only what is under way is waited for, then it is raised."""
    errors: list[JudgeError] = []
    stopped = False

    def one(question: Question) -> Reply | None:
        if errors or stopped:
            return None
        try:
            return reply(question)
        except JudgeError as error:
            errors.append(error)

    with ThreadPoolExecutor(workers) as pool:
        asked = {pool.submit(one, question): question for question in questions}
        try:
            for done in as_completed(asked):
                if (said := done.result()) is not None:
                    yield asked[done], said
        finally:
            stopped = True
    if errors:
        raise errors[0]
