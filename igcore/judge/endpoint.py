"""A language model behind any OpenAI-compatible endpoint as a judge."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from threading import Event
from urllib.parse import urlsplit

from ..errors import JudgeError, ParameterError
from ..settings import Count, Discount, Natural, Positive, Weight, settings
from .spec import ANSWER, ASPECTS, Question, Reply, read_completion
from .trust import PREFIX, VARIABLE, check_variable, is_plain, without_key

HEADERS = {  # of a request; the last tells the client what to return
    *("host", "connection", "accept", "accept-encoding"),
    *("content-type", "content-length", "authorization"),
    "x-stainless-raw-response",
}
LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
WHY = {  # what the client raises -> what its user can do
    "APITimeoutError": "did not reply within {timeout:g} s; raise timeout, or lower workers",
    "APIConnectionError": "cannot be reached; start it, or correct base_url",
    "AuthenticationError": "refuses the key; correct the environment variable {api_key_env}",
    "PermissionDeniedError": "refuses model {model!r}; choose another model or key",
    "NotFoundError": "does not know model {model!r}; give a name that {base_url}/models lists",
    "RateLimitError": "takes no more requests for now; lower workers, or wait",
    "InternalServerError": "keeps failing; look into its log",
    "redirect": "points to another address; give that one as base_url",
    "form": "does not answer as a chat completion does; correct base_url",
    "text": "cannot be sent half a character; correct the prompt or decode it anew",
    "OpenAIError": "does not accept the request; correct the options of the judge",
}


@settings(kw_only=True)
class OpenAIJudge:
    """A language model behind an OpenAI-compatible endpoint.

    Such as ``vllm serve MODEL --reasoning-parser deepseek_r1``.

    Attributes
    ----------
    model : str
        As the endpoint calls it.
    base_url : str
        Address up to ``/v1``.
    api_key_env : str
        Name of the environment variable that holds the key: one that begins with ``IGCORE_JUDGE_``,
        or the one that the variable ``IGCORE_JUDGE_KEY_FROM`` names. An endpoint on this computer
        needs none.
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
    api_key_env: str = "IGCORE_JUDGE_KEY"
    temperature: Weight = 0.6
    top_p: Discount = 0.95
    max_tokens: Count = 4096
    timeout: Positive = 600.0
    max_retries: Natural = 5

    def __post_init__(self):
        if not VARIABLE.fullmatch(self.api_key_env):
            raise ParameterError(  # without the value, which may be the key
                f"parameter api_key_env is no name of an environment variable; give one that "
                f"begins with {PREFIX}, and put the key there"
            )
        if not is_plain(self.base_url):
            raise ParameterError(  # without the value, which may hold a key
                "parameter base_url is no plain http address such as http://localhost:8000/v1; a "
                f"key belongs into the environment variable {self.api_key_env}"
            )

    @property
    def names(self) -> dict[str, str]:
        return dict.fromkeys(ASPECTS, self.model)

    def identity(self) -> dict:
        """Return what a reply depends on.

        The address is not in it: the same model may be served at another one after a stop.
        """
        sampling = {
            name: getattr(self, name) for name in ("model", "temperature", "top_p", "max_tokens")
        }
        return sampling | {"wording": [ANSWER, ASPECTS]}

    @property
    def key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()

    def ask(
        self, questions: Sequence[Question], seed: int, workers: int
    ) -> Iterator[tuple[Question, Reply]]:
        with self._client() as client:
            yield from in_parallel(partial(self._reply, client, seed), questions, workers)

    def _client(self):
        # not before: tables of what was judged ask nobody, and need no key
        check_variable(self.api_key_env)
        try:
            import openai
        except ImportError as error:
            raise JudgeError(
                "judge 'openai' needs the package openai; install it with "
                "`pip install 'igcore[judge]'`"
            ) from error
        local = bool(LOOPBACK.fullmatch(urlsplit(self.base_url).hostname))
        if not self.key and not local:
            raise JudgeError(
                f"the environment variable {self.api_key_env} is empty; put the key of "
                f"{self.base_url} there, or any word if it asks for none"
            )
        if not (self.key.isascii() and self.key.isprintable()):
            raise JudgeError(
                f"the environment variable {self.api_key_env} holds a line break or another sign "
                f"that no key has; put only the key there"
            )
        http = openai.DefaultHttpxClient(
            trust_env=not local,  # no proxy stands between this computer and itself
            follow_redirects=False,  # prompts go to no host that the params file does not name
            event_hooks={"request": [self._clean]},
        )
        return openai.OpenAI(
            base_url=self.base_url,
            api_key=self.key or "none",
            timeout=self.timeout,
            max_retries=self.max_retries,
            http_client=http,
        )

    def _clean(self, request) -> None:
        """Take from a request what the client finds by itself, such as ``OPENAI_ORG_ID``."""
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        request.headers["authorization"] = f"Bearer {self.key or 'none'}"

    def _reply(self, client, seed: int, question: Question) -> Reply:
        import openai

        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": question.text}],
            "seed": seed,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }
        try:
            response = client.chat.completions.with_raw_response.create(**request)
            completion = json.loads(response.http_response.content)
        except openai.OpenAIError as error:
            raise self._failed(error) from None  # its text may hold the key
        except UnicodeError:
            raise self._down("text", f"prompt {question.prompt_id}") from None
        except (ValueError, RecursionError):
            raise self._down("form", "no JSON") from None
        if (reply := read_completion(completion)) is None:
            raise self._down("form", "no message")
        return reply

    def _failed(self, error) -> JudgeError:
        """Return the sentence for what the client raised."""
        status = getattr(error, "status_code", 0)
        if 300 <= status < 400:  # without the address, which may hold a key
            return self._down("redirect", f"status {status}")
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in WHY)
        return self._down(kind, str(error))

    def _down(self, why: str, detail: str) -> JudgeError:
        return JudgeError(
            f"judge at {self.base_url} {WHY[why].format(**asdict(self))} "
            f"({without_key(detail, self.key)}); what it said so far is kept: run again to go on"
        )


def in_parallel(
    reply: Callable[[Question], Reply], questions: Sequence[Question], workers: int
) -> Iterator[tuple[Question, Reply]]:
    """Yield questions and replies as they come.

    After the first error only what is under way is waited for, then it is raised.
    """
    errors: list[JudgeError] = []
    stopped = Event()

    def one(question: Question) -> Reply | None:
        if stopped.is_set():
            return None
        try:
            return reply(question)
        except JudgeError as error:
            stopped.set()
            errors.append(error)

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(one, question): question for question in questions}
        try:
            for done in as_completed(futures):
                if (said := done.result()) is not None:
                    yield futures[done], said
        finally:
            stopped.set()
    if errors:
        raise errors[0]
