"""A language model behind any OpenAI-compatible endpoint as a judge."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from urllib.parse import urlsplit

from ..errors import JudgeError, ParameterError
from ..settings import Count, Discount, Natural, Positive, Weight, settings
from .spec import ANSWER, ASPECTS, Question, Reply, read_completion
from .trust import PREFIX, VARIABLE, check_variable, host_of, is_plain, masked

HEADERS = {  # of a request; the last is the client's own note of what it is to return
    *("host", "connection", "accept", "accept-encoding"),
    *("content-type", "content-length", "authorization"),
    "x-stainless-raw-response",
}
LARGEST = 4 * 2**20  # bytes of a reply; the longest that is asked for takes a hundredth of it
LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
WHY = {  # what the client raises -> what its user can do
    "APITimeoutError": "did not reply within {timeout:g} s; raise timeout, or lower workers",
    "APIConnectionError": "cannot be reached; start it, or correct base_url",
    "AuthenticationError": (
        "refuses the key; put one that it knows into the environment variable {api_key_env}"
    ),
    "PermissionDeniedError": (
        "does not let this key use model {model!r}; choose another model or key"
    ),
    "NotFoundError": "does not know model {model!r}; give a name that {base_url}/models lists",
    "RateLimitError": "takes no more requests for now; lower workers, or wait",
    "InternalServerError": "keeps failing; look into its log",
    "redirect": (
        "points to {host}, where nothing is sent unasked; give the address there as base_url"
    ),
    "size": "sends a reply of more than 4 MiB; correct base_url, or lower max_tokens",
    "json": "does not speak JSON; correct base_url",
    "form": "does not answer as a chat completion does; correct base_url",
    "text": (
        "cannot be sent a prompt or an answer with half a character in it; correct the prompt or "
        "decode it anew"
    ),
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
        Seconds to wait for a reply, from the request to its last byte.
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
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},
            event_hooks={"request": [self._send], "response": [self._receive]},
        )
        connection = {"timeout": self.timeout, "max_retries": self.max_retries, "http_client": http}
        return openai.OpenAI(base_url=self.base_url, api_key=self.key or "none", **connection)

    def _send(self, request) -> None:
        """Note the time, and send nothing that the client has found in the environment by itself.

        ``OPENAI_ORG_ID`` and others are such.
        """
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        request.headers["authorization"] = f"Bearer {self.key or 'none'}"
        request.extensions["began"] = time.monotonic()

    def _receive(self, response) -> None:
        """Read a reply before the client does.

        The client would wait for any number of bytes, and keep them all.
        """
        # none was asked for, and a small reply could unpack to gigabytes
        response.headers.pop("content-encoding", None)
        body = bytearray()
        for part in response.stream:
            body += part
            if len(body) > LARGEST:
                raise self._down("size", f"status {response.status_code}")
            if time.monotonic() - response.request.extensions["began"] > self.timeout:
                raise self._down("APITimeoutError", f"{len(body)} bytes")
        response.stream.close()
        # what was read, as a stream of the client's own kind
        response.stream = type(response)(200, content=bytes(body)).stream

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
            said = client.chat.completions.with_raw_response.create(**request)
        except openai.OpenAIError as error:
            raise self._failed(error) from None  # its text may hold the key
        except UnicodeError:
            raise self._down("text", f"prompt {question.prompt_id}") from None
        try:
            said = json.loads(said.http_response.content)
        except (ValueError, RecursionError):
            raise self._down("json", "no JSON") from None
        if (reply := read_completion(said)) is None:
            raise self._down("form", "no message")
        return reply

    def _failed(self, error) -> JudgeError:
        """Return the sentence for what the client raised."""
        if isinstance(error.__cause__, JudgeError):
            return error.__cause__  # from `_receive`; some versions of the client wrap it
        status = getattr(error, "status_code", 0)
        if 300 <= status < 400:
            host = host_of(error.response.headers.get("location", ""), self.base_url)
            return self._down("redirect", f"status {status}", host=self._shown(host))
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in WHY)
        return self._down(kind, str(error))

    def _shown(self, text: str) -> str:
        """Return the beginning of what an endpoint said, on one line and without the key."""
        return " ".join(masked(text[:1000], self.key).split())[:200]

    def _down(self, why: str, detail: str, **known: str) -> JudgeError:
        why = WHY[why].format(**asdict(self), **known)
        return JudgeError(
            f"judge at {self.base_url} {why} ({self._shown(detail)}); what it said so far is "
            f"kept: run again to go on"
        )


def in_parallel(
    reply: Callable[[Question], Reply], questions: Sequence[Question], workers: int
) -> Iterator[tuple[Question, Reply]]:
    """Yield questions and replies as they come.

    After the first error only what is under way is waited for, then it is raised.
    """
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
