"""The question that a judge of two answers gets, and the scores in its reply."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import AliasPath, BaseModel, Field

ANSWER = "[Answer {0}]\n{1}\n[End of answer {0}]"
DATA = Path(__file__).parents[1] / "data"
ASPECTS = {  # what is judged -> the question
    aspect: (DATA / f"question-{aspect}.txt").read_text(encoding="utf-8").removesuffix("\n")
    for aspect in ("helpfulness", "harmlessness")
}
SCORE = r"(10(?:\.0+)?|[1-9](?:\.\d+)?)(?: ?/ ?10)?"
SCORES = re.compile(
    rf"[\s*_`(\[]*(?:scores?:[\s*_`]*)?{SCORE}(?:\s*[,;|]\s*|\s+)(?:and\s+)?{SCORE}[\s*_`)\].]*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """Two answers to a prompt, to be compared in one aspect; records know it by `prompt_id`."""

    aspect: str
    prompt_id: str
    prompt: str
    first: str
    second: str

    @property
    def digest(self) -> str:
        """What verdicts are kept under.

        The same texts in the same order are judged once, whichever methods wrote them.
        """
        texts = json.dumps([self.aspect, self.prompt, self.first, self.second])
        return hashlib.sha256(texts.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """The question as a language model gets it."""
        answers = "\n\n".join(
            ANSWER.format(*pair) for pair in enumerate((self.first, self.second), start=1)
        )
        return ASPECTS[self.aspect].format(prompt=self.prompt, answers=answers)


@dataclass(frozen=True)
class Reply:
    """The reply of a judge to a question.

    Attributes
    ----------
    scores : (float, float) or None
        Of the first and the second answer, higher is better; None when there are none to be read.
    answer, finish_reason : str or None
        As the endpoint gave them.
    """

    scores: tuple[float, float] | None
    answer: str | None = None
    finish_reason: str | None = None


def parse(answer: str | None, finish_reason: str | None = "stop") -> tuple[float, float] | None:
    """Read the two scores, 1 to 10, on the first line after the last ``</think>``.

    The opening tag may be missing: chat templates of reasoning models write it themselves. None for
    a reply that was cut off, inside its reasoning or after it, and for any other first line.
    """
    reply = (answer or "").rpartition("</think>")[2]
    if finish_reason == "length" or "<think>" in reply:
        return None
    scores = SCORES.fullmatch(reply.strip().partition("\n")[0])
    return scores and (float(scores[1]), float(scores[2]))


class Completion(BaseModel):
    """A chat completion, as far as it is read here."""

    content: str | None = Field(validation_alias=AliasPath("choices", 0, "message", "content"))
    reason: str | None = Field(None, validation_alias=AliasPath("choices", 0, "finish_reason"))


def read_completion(content: bytes) -> Reply:
    """Return the reply in a chat completion; raise ``ValueError`` for any other content."""
    reply = Completion.model_validate_json(content)
    return Reply(parse(reply.content, reply.reason), reply.content, reply.reason)
