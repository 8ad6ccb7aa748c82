"""The requests and replies of OpenAI's interface, in JSON values.

A field that the guard cannot honour is refused by name, unless it asks for nothing.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from igcore import Guard, ParameterError, Prompt, Response, SearchConfig
from igcore.errors import unknown_name
from igcore.prompt import as_prompt
from igcore.settings import Count, Discount, Options, settings

Zero = Annotated[float, Field(ge=0, le=0)]
Null = Literal[None]
CHAT, TEXT = "chat.completion", "text_completion"  # kinds of replies
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
TIME_UP = "the time of the request is used up"


@settings(kw_only=True)
class Body:
    """What both kinds of requests have; the fields of one value ask for nothing."""

    model: str
    seed: int | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: Discount | None = None
    top_k: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    user: str | None = None
    metadata: Options | None = None
    n: Literal[1, None] = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[Options, Field(max_length=0)] | None = None

    @property
    def length(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens


@settings(kw_only=True)
class ChatBody(Body):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[Options], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False, None] = None
    top_logprobs: Literal[0, None] = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False, None] = None

    @property
    def prompt(self) -> Prompt:
        """The conversation; a client may send a field of a message that has no value."""
        given = [{k: v for k, v in said.items() if v is not None} for said in self.messages]
        return as_prompt(given)

    @property
    def length(self) -> int | None:
        """Most tokens of the answer, by its new or its old name."""
        return self.max_completion_tokens or self.max_tokens


@settings(kw_only=True)
class TextBody(Body):
    """A request to ``/v1/completions``."""

    prompt: str
    echo: Literal[False, None] = None
    best_of: Literal[1, None] = None
    logprobs: Null = None
    suffix: Null = None


BODIES: dict[str, type[ChatBody] | type[TextBody]] = {CHAT: ChatBody, TEXT: TextBody}


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that the guard can answer.

    Attributes
    ----------
    kind : str
        `CHAT` or `TEXT`.
    body : ChatBody or TextBody
    prompt : Prompt
    guard : Guard
        With the settings of the request.
    prompt_tokens : int
    """

    kind: str
    body: ChatBody | TextBody
    prompt: Prompt
    guard: Guard
    prompt_tokens: int

    @property
    def together(self) -> tuple[Any, int]:
        """What requests must share that are decoded together."""
        return self.guard.config, self.guard.seed


def read_request(kind: str, given: object, guard: Guard) -> Asked:
    """Return a request, read and checked against a guard.

    Parameters
    ----------
    kind : str
        `CHAT` or `TEXT`.
    given : object
        The body, as JSON gives it.

    Raises
    ------
    ParameterError
        For a field that is unknown, of another type or cannot be honoured, and for a prompt that
        the policy cannot read.
    """
    if not isinstance(given, dict):
        raise ParameterError("the body is no object of JSON; give one with model and a prompt")
    known = [one.name for one in fields(BODIES[kind])]
    for name in given:  # first: pydantic has no sentence about a name with half a character
        if name not in known:
            raise unknown_name("parameter", name, known)
    body = BODIES[kind](**given)
    prompt = body.prompt if isinstance(body, ChatBody) else as_prompt(body.prompt)
    config = replace(guard.config, **changes(body, guard.config))
    seed = guard.seed if body.seed is None else body.seed
    own = replace(guard, config=config, seed=seed)
    own.with_method(own.method)  # refuses what the method cannot do
    ids = own.policy.ids_of(prompt, config.max_new_tokens)
    return Asked(kind, body, prompt, own, len(ids))


def changes(body: ChatBody | TextBody, config: SearchConfig) -> dict[str, Any]:
    """Return the settings of the search that a request changes."""
    found: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    if body.stop is not None:
        found["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    length = body.length
    if length is None:
        return found
    if length > config.max_new_tokens:
        raise ParameterError(
            f"max_tokens is {length}, and this guard writes at most {config.max_new_tokens}; give "
            "at most that, or leave it out"
        )
    found["max_new_tokens"] = length
    found["block_size"] = min(config.block_size, length)
    found["step"] = config.step and min(config.step, length)
    return found


# --- replies --------------------------------------------------------------------------------------


def finish_reason(answer: Response) -> str:
    """Return why an answer ends, in the words of the interface."""
    if answer.status == "abstained":
        return "content_filter"
    config, policy = answer.guard.config, answer.guard.policy
    # at an end token, or at a stop string, which is no part of the text
    ended = policy.eos_ids.intersection(answer.tokens[-1:])
    ended = ended or policy.text(answer.tokens) != answer.judged
    cut = answer.reason == "truncated" or (answer.n_tokens == config.max_new_tokens and not ended)
    return "length" if cut else "stop"


def verdict_of(answer: Response) -> dict[str, Any]:
    """Return what a reply says beyond OpenAI's fields."""
    found = {"status": answer.status, "reason": answer.reason, "cost": answer.cost}
    return found | {"receipt": answer.receipt()}


def usage_of(asked: Asked, answer: Response) -> dict[str, int]:
    """Return the tokens of the prompt and of the answer; those of dropped blocks do not count."""
    n, new = asked.prompt_tokens, answer.n_tokens
    return {"prompt_tokens": n, "completion_tokens": new, "total_tokens": n + new}


def reply(asked: Asked, answer: Response, name: str, created: int) -> dict[str, Any]:
    """Return the reply to a request; its text is all that the cost has judged."""
    text = answer.judged or ""
    said: dict[str, Any] = {"text": text}
    if asked.kind == CHAT:
        said = {"message": {"role": "assistant", "content": text}}
    choice = {"index": 0, "finish_reason": finish_reason(answer), "logprobs": None}
    return {
        "id": name,
        "object": asked.kind,
        "created": created,
        "model": asked.body.model,
        "choices": [choice | said],
        "usage": usage_of(asked, answer),
        "igcore": verdict_of(answer),
    }


def chunk(asked: Asked, name: str, created: int, text: str, end: str | None = None) -> Options:
    """Return a part of a streamed reply; `end` is the reason in the last one."""
    said: dict[str, Any] = {"text": text}
    if asked.kind == CHAT:
        said = {"delta": {"role": "assistant", "content": text} if end is None else {}}
    choice = {"index": 0, "finish_reason": end, "logprobs": None}
    return {
        "id": name,
        "object": f"{asked.kind}.chunk" if asked.kind == CHAT else asked.kind,
        "created": created,
        "model": asked.body.model,
        "choices": [choice | said],
    }


def fault(status: int, message: str) -> dict[str, Any]:
    """Return an error as OpenAI's interface has it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
