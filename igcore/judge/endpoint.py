"""A language model behind any OpenAI-compatible endpoint as a judge."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from threading import Event

from ..endpoints import VARIABLE, is_address, is_local, without_key
from ..errors import JudgeError, ParameterError, needs
from ..settings import Count, Discount, Natural, Seconds, Weight, settings
from .bounds import Bounds
from .spec import ANSWER, ASPECTS, Question, Reply, read_completion
from .trust import PREFIX, check_variable

# of a request; the last tells the client what to return
HEADERS = set(
    "host connection accept accept-encoding content-type content-length authorization "
    "x-stainless-raw-response".split()
)
# what went wrong -> what the user can do
SILENT = "does not reply; start it, correct base_url, or raise timeout"
ENDLESS = "does not come to an end; correct base_url, or raise timeout"
MOVED = "points to another address; give that one as base_url"
REFUSED = "refuses the request or fails; correct the key, model or options, or see its log"
NO_CHAT = "does not answer as a chat completion does; correct base_url"
HALF = "cannot be sent half a character; correct the prompt or decode it anew"


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
        Seconds to wait for a whole reply, at most a day.
    max_retries : int
        Further attempts, after ever longer pauses, before the endpoint counts as down.
    """

    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key_env: str = "IGCORE_JUDGE_KEY"
    temperature: Weight = 0.6
    top_p: Discount = 0.95
    max_tokens: Count = 4096
    timeout: Seconds = 600.0
    max_retries: Natural = 5

    def __post_init__(self):
        if not VARIABLE.fullmatch(self.api_key_env):
            raise ParameterError(  # without the value, which may be the key
                f"parameter api_key_env is no name of an environment variable; give one that "
                f"begins with {PREFIX}, and put the key there"
            )
        if not is_address(self.base_url):
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
        return self.sampling | {"wording": [ANSWER, ASPECTS]}

    @property
    def sampling(self) -> dict:
        """The fields of a request that say how the reply is sampled."""
        return {n: getattr(self, n) for n in ("model", "temperature", "top_p", "max_tokens")}

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
        openai = needs("openai", "judge")
        local = is_local(self.base_url)
        clean = self.key.isascii() and self.key.isprintable()
        if not clean or not (self.key or local):
            raise JudgeError(
                f"the environment variable {self.api_key_env} holds no key; put only the key of "
                f"{self.base_url} there, without a line break, or any word if it asks for none"
            )
        bounds = Bounds(self.timeout)
        http = openai.DefaultHttpxClient(
            trust_env=not local,  # no proxy stands between this computer and itself
            follow_redirects=False,  # prompts go to no host that the params file does not name
            event_hooks={"request": [self._clean, bounds.begin], "response": [bounds.as_sent]},
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

        messages = [{"role": "user", "content": question.text}]
        request = self.sampling | {"messages": messages, "seed": seed}
        try:
            response = client.chat.completions.with_raw_response.create(**request)
            return read_completion(response.http_response.content)
        except openai.APIConnectionError as error:  # its text may hold the key
            raise self._down(SILENT, str(error.__cause__ or error)) from None
        except openai.OpenAIError as error:
            status = getattr(error, "status_code", 0)
            if 300 <= status < 400:  # without the address, which may hold a key
                raise self._down(MOVED, f"status {status}") from None
            raise self._down(REFUSED, str(error)) from None
        except OSError as error:  # of `Bounds`
            raise self._down(ENDLESS, str(error)) from None
        except UnicodeEncodeError:
            raise self._down(HALF, f"prompt {question.prompt_id}") from None
        except ValueError:
            raise self._down(NO_CHAT, "no chat completion") from None

    def _down(self, why: str, detail: str) -> JudgeError:
        return JudgeError(
            f"judge at {self.base_url} {why} ({without_key(detail, self.key)}); what it said so "
            "far is kept: run again to go on"
        )


def in_parallel(
    reply: Callable[[Question], Reply], questions: Sequence[Question], workers: int
) -> Iterator[tuple[Question, Reply]]:
    """Yield questions and replies as they come.

    After the first error only what is under way is waited for, then it is raised.
    """
    stopped = Event()
    failed = []

    def one(question: Question) -> Reply | None:
        if stopped.is_set():
            return None
        try:
            return reply(question)
        except JudgeError:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(one, question): question for question in questions}
        try:
            for done in as_completed(futures):
                if done.exception():
                    failed.append(done)
                elif said := done.result():
                    yield futures[done], said
        finally:
            stopped.set()
    if failed:
        failed[0].result()  # raises
