"""A language model behind any OpenAI-compatible endpoint as a judge."""

from collections.abc import Iterator, Sequence
from typing import Any

from igcore.errors import IgcoreError
from igcore.settings import Count, Discount, Natural, Seconds, Weight, settings
from igserve.client import JUDGE, Client, Failed, Request, check_endpoint, key_in

from .spec import ANSWER, ASPECTS, Question, Reply, read_completion

NO_CHAT = "does not answer as a chat completion does; correct base_url"


class JudgeError(IgcoreError):
    """A judge of answers cannot be reached, or its reply cannot be used."""


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
        Name of the environment variable that holds the key; it begins with ``IGCORE_JUDGE_``. An
        endpoint on this computer needs none.
    temperature, top_p : float
        How the reply is sampled.
    max_tokens : int
        Longest reply, its reasoning included.
    timeout : float
        Seconds to wait for a reply, at most a day; see `igserve.client.Client`.
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

    def __post_init__(self) -> None:
        check_endpoint("base_url", self.base_url, self.api_key_env, JUDGE)

    @property
    def names(self) -> dict[str, str]:
        return dict.fromkeys(ASPECTS, self.model)

    def identity(self) -> dict[str, Any]:
        """Return the inputs of a reply.

        The address is not in it: the same model may be served at another one after a stop.
        """
        return self.sampling | {"wording": [ANSWER, ASPECTS]}

    @property
    def sampling(self) -> dict[str, Any]:
        """The model and sampling settings of a request."""
        return {n: getattr(self, n) for n in ("model", "temperature", "top_p", "max_tokens")}

    def ask(
        self, questions: Sequence[Question], seed: int, workers: int
    ) -> Iterator[tuple[Question, Reply]]:
        # not before: tables of what was judged ask nobody, and need no key
        key = key_in(self.base_url, self.api_key_env, JUDGE)
        address = self.base_url.rstrip("/")
        client = Client(
            address, key, timeout=self.timeout, retries=self.max_retries, at_once=workers
        )
        requests = []
        for question in questions:
            messages = [{"role": "user", "content": question.text}]
            body = self.sampling | {"messages": messages, "seed": seed}
            requests.append(Request("/chat/completions", body))
        failed = None
        for place, content in client.replies(requests):
            try:
                if isinstance(content, Failed):
                    raise content
                yield questions[place], read_completion(content)
            except Failed as error:  # what is under way is waited for
                failed = failed or (questions[place], str(error))
            except ValueError:
                failed = questions[place], NO_CHAT
                break
        if failed:
            question, why = failed
            raise JudgeError(
                f"judge at {self.base_url}, asked about prompt {question.prompt_id}, {why}; what "
                "it said so far is kept: run again to go on"
            )
