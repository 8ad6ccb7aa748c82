"""What OpenAI's own client must see of a served guard; `tests.clients` runs it.

The first server has the guard of docs/serve.md. The second one needs `KEY`, lets one request wait,
and always abstains::

    python -m tests.clients.openai_client http://127.0.0.1:8000 http://127.0.0.1:8001
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai

from tests.clients.common import KEY, REFUSAL, passes, within

SAID = {"role": "user", "content": "What should I see in Paris?"}
CHAT = dict(model="guarded", messages=[SAID])
TEXT = dict(model="guarded", prompt="In Paris, ")


class Checks:
    """One method is one check; its docstring is the line that is printed."""

    def __init__(self, url: str, strict_url: str):
        self.at = dict(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.strict_at = dict(base_url=f"{strict_url}/v1", api_key=KEY, max_retries=0)
        self.client, self.strict = openai.OpenAI(**self.at), openai.OpenAI(**self.strict_at)
        self.ask = partial(self.client.chat.completions.create, **CHAT)
        self.write = partial(self.client.completions.create, **TEXT)

    def refused(self, error: type[Exception], call: Callable[..., Any], **given: Any) -> str:
        """Return the message of the error that a call must raise."""
        try:
            call(**given)
        except error as found:
            return str(found)
        raise AssertionError(f"{given} raised no {error.__name__}")

    # --- answers ---

    def whole(self) -> None:
        """chat: text within budget, reason, usage, verdict; with_raw_response"""
        raw = self.client.chat.completions.with_raw_response.create(**CHAT)
        assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
        reply = raw.parse()
        (choice,) = reply.choices
        assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
        assert choice.message.content and within(choice.message.content)
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert 0 < reply.usage.completion_tokens <= 64 and reply.model == "guarded"
        verdict = reply.model_extra["igcore"]
        assert (verdict["status"], verdict["cost"]) == ("verified_safe", 0)
        assert "receipt" in verdict

    def parts(self) -> None:
        """chat, streamed: several parts, the same text as unstreamed, reason and verdict last"""
        for seed in range(4):
            chunks = list(self.ask(stream=True, seed=seed))
            said = [chunk.choices[0].delta.content or "" for chunk in chunks]
            whole = self.ask(seed=seed).choices[0]
            assert "".join(said) == whole.message.content
            assert chunks[-1].choices[0].finish_reason == whole.finish_reason
            assert chunks[-1].model_extra["igcore"]["status"] == "verified_safe"
            assert len({chunk.id for chunk in chunks}) == 1
            assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
        assert len(said) > 2

    def text(self) -> None:
        """completions: text within budget, reason, usage; streamed, the same text"""
        reply = self.write(seed=3)
        assert reply.choices[0].text and within(reply.choices[0].text)
        assert reply.object == "text_completion" and reply.usage.completion_tokens > 0
        assert reply.choices[0].finish_reason in ("stop", "length")
        said = [chunk.choices[0].text for chunk in self.write(seed=3, stream=True)]
        assert "".join(said) == reply.choices[0].text and len(said) > 2

    def usage(self) -> None:
        """include_usage: one last chunk without choices has the usage"""
        *chunks, last = self.ask(stream=True, stream_options={"include_usage": True})
        assert not last.choices and last.usage == self.ask().usage
        assert all(chunk.usage is None for chunk in chunks)

    def abstention(self) -> None:
        """an abstention: content_filter, the refusal, the verdict; streamed, too"""
        create = partial(self.strict.chat.completions.create, **CHAT)
        reply = create()
        assert reply.choices[0].finish_reason == "content_filter"
        assert reply.choices[0].message.content == REFUSAL
        verdict = reply.model_extra["igcore"]
        assert (verdict["status"], verdict["reason"]) == ("abstained", "exhausted")
        chunks = list(create(stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == REFUSAL and chunks[-1].choices[0].finish_reason == "content_filter"
        text = self.strict.completions.create(**TEXT)
        assert text.choices[0].finish_reason == "content_filter"

    # --- settings ---

    def seeds(self) -> None:
        """seed: repeated gives equal text, another gives another"""
        first, again, other = (
            self.ask(seed=seed, max_tokens=32).choices[0].message.content for seed in (1, 1, 2)
        )
        assert first == again != other

    def lengths(self) -> None:
        """max_tokens and max_completion_tokens: the length, and the reason"""
        for name in ("max_tokens", "max_completion_tokens"):
            reply = self.ask(**{name: 5})
            assert reply.usage.completion_tokens == 5 and reply.choices[0].finish_reason == "length"
        assert self.write(max_tokens=3).usage.completion_tokens == 3

    def stops(self) -> None:
        """stop: a text or several, and the answer ends before it"""
        whole = self.ask().choices[0].message.content
        mark = whole[5:7]
        for stop in (mark, [mark, "###"]):
            choice = self.ask(stop=stop).choices[0]
            assert choice.message.content == whole[: whole.index(mark)]
            assert choice.finish_reason == "stop"
        parts = [chunk.choices[0].delta.content or "" for chunk in self.ask(stop=mark, stream=True)]
        assert "".join(parts) == whole[: whole.index(mark)]

    def sampling(self) -> None:
        """temperature, top_p and top_k by extra_body change the answer"""
        changes = [dict(temperature=0.2), dict(top_p=0.3), dict(extra_body={"top_k": 2})]
        found = {self.ask(**change).choices[0].message.content for change in changes}
        assert len(found | {self.ask().choices[0].message.content}) == 4
        assert all(map(within, found))

    def nothing(self) -> None:
        """fields that ask for nothing are taken"""
        idle = dict(n=1, presence_penalty=0, frequency_penalty=0, logit_bias={}, user="u", tools=[])
        idle |= dict(logprobs=False, store=False, response_format={"type": "text"}, metadata={})
        assert self.ask(**idle).choices[0].message.content == self.ask().choices[0].message.content

    def conversation(self) -> None:
        """response.choices[0].message goes back as it came"""
        said = [{"role": "system", "content": "Be brief."}, SAID]
        said.append(self.ask(messages=said).choices[0].message)
        said.append({"role": "user", "content": [{"type": "text", "text": "And then?"}]})
        assert within(self.ask(messages=said).choices[0].message.content)

    # --- errors ---

    def bad_requests(self) -> None:
        """BadRequestError: a sentence names the field"""
        for name, value in dict(
            n=2, temperature=0, max_tokens=10_000, tools=[{"type": "function"}], logprobs=True,
            messages=[], response_format={"type": "json_object"}, presence_penalty=1, top_p=2,
        ).items():  # fmt: skip
            assert name in self.refused(openai.BadRequestError, self.ask, **{name: value})
        error = self.refused(openai.BadRequestError, self.ask, extra_body={"top_q": 1})
        assert "top_q" in error
        self.refused(openai.BadRequestError, self.write, prompt=["a", "b"])
        self.refused(openai.BadRequestError, self.ask, messages=[{"role": "tool", "content": "a"}])

    def not_found(self) -> None:
        """NotFoundError: another model, and a path that is not served"""
        assert "guarded" in self.refused(openai.NotFoundError, self.ask, model="another")
        embed = self.client.embeddings.create
        self.refused(openai.NotFoundError, embed, model="guarded", input="a")
        self.refused(openai.NotFoundError, self.client.responses.create, model="m", input="a")

    def keys(self) -> None:
        """AuthenticationError: a wrong key, also for the list of models"""
        wrong = self.strict.with_options(api_key="wrong")
        self.refused(openai.AuthenticationError, wrong.models.list)
        self.refused(openai.AuthenticationError, wrong.chat.completions.create, **CHAT)
        assert self.strict.models.list().data[0].id == "guarded"

    def full(self) -> None:
        """InternalServerError, status 503: the queue is full; the others are answered"""

        def one(_: int) -> int:
            try:
                self.strict.chat.completions.create(**CHAT)
            except openai.InternalServerError as error:
                return error.status_code
            return 200

        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(one, range(12))) == {200, 503}

    def impatient(self) -> None:
        """APITimeoutError: the client gives up; the server answers the next request"""
        short = self.client.with_options(timeout=0.001).chat.completions.create
        self.refused(openai.APITimeoutError, short, **CHAT)
        assert self.ask().choices

    def cancelled(self) -> None:
        """a stream that is closed after one part; the next request is answered"""
        with self.ask(stream=True) as stream:
            next(stream)
        assert self.ask().choices

    # --- the client ---

    def models(self) -> None:
        """models: a list of the one; base_url with a slash at its end"""
        (model,) = openai.OpenAI(base_url=f"{self.at['base_url']}/", api_key="none").models.list()
        assert model.id == "guarded" and model.created > 0 and model.object == "model"

    def at_once(self) -> None:
        """16 async calls at once, of them 4 streamed: each has the text of its seed"""

        async def all_of_them() -> list[str]:
            create = partial(openai.AsyncOpenAI(**self.at).chat.completions.create, **CHAT)

            async def whole(seed: int) -> str:
                return (await create(seed=seed)).choices[0].message.content

            async def streamed(seed: int) -> str:
                parts = [part async for part in await create(seed=seed, stream=True)]
                return "".join(part.choices[0].delta.content or "" for part in parts)

            calls = [streamed(i % 3) if i % 4 == 0 else whole(i % 3) for i in range(16)]
            return await asyncio.gather(*calls)

        texts = asyncio.run(all_of_them())
        alone = [self.ask(seed=seed).choices[0].message.content for seed in range(3)]
        assert texts == [alone[i % 3] for i in range(16)]


def main(url: str, strict_url: str) -> int:
    """Run all checks; return the exit status."""
    named = {name: check for name, check in vars(Checks).items() if name[0] != "_"}
    del named["refused"]
    checks = Checks(url, strict_url)
    return 0 if all([passes(check, checks) for check in named.values()]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
