"""The HTML of an answer in a notebook: its blocks, the remaining budget, and the verdict.

`mask` hides offensive words. It scores each word alone, so it misses offensive phrases, spelling
tricks and meaning. A language model judges an answer as a whole, and no word of it is at fault: for
such a cost `mask_answer` hides everything from the first check over budget on, and nothing of the
prompt.
"""

import re
from collections.abc import Callable
from html import escape

import numpy as np

from ..methods import method_of
from ..response import Response
from ..scorers import Scorer, keeps_cache
from ..scoring import Cached, checked_score, readings
from ..verdict import within

WITHIN, OVER, GREY = "#0173b2", "#d55e00", "#6b6b6b"  # distinct for colour-blind readers
BLOCK = "█"
WORD = re.compile(r"\b\d*+[^\W\d]\w*")  # a number by itself is left to read
NOT_MASKED = "[not masked] "  # before a prompt, which the cost does not judge
READABLE = 0.2  # highest probability of offence of a readable word
WHY = {  # reason of a response -> sentence
    "exhausted": "no candidate was within budget in any round",
    "dead_end": "there was nothing left to continue",
    "final_check": "the final check disagreed with the search",
    "scorer_error": "the cost model failed on candidates that might have been safe",
    "scorer_contract": "the cost model gives one text different costs, so no verdict would hold",
    "cancelled": "nobody waited for it any more",
    "over_budget": "the method emits its answer at any cost",
    "truncated": "the search failed later, and this is the last prefix within budget",
}


def mask(text: str, cost: Scorer, threshold: float = READABLE) -> str:
    """Mask every word whose cost is above a threshold, by blocks of the same length.

    White space, punctuation and numbers stay, so a masked text is as long as the original. It fails
    closed: a word without a finite score is masked, and so is every word if `threshold` is NaN.

    Parameters
    ----------
    text : str
        The text to mask.
    cost : Scorer
        Higher is worse; it scores each distinct word once, with an empty prompt.
    threshold : float
        Highest cost of a readable word, in the cost's unit.
    """
    words = sorted(set(WORD.findall(text)))
    costs = checked_score(cost, [""] * len(words), words, [True] * len(words))
    readable = dict(zip(words, costs <= threshold, strict=True))  # False for NaN

    def shown(match: re.Match[str]) -> str:
        word = match[0]
        return word if readable[word] else BLOCK * len(word)

    return WORD.sub(shown, text)


def masker_of(answer: Response) -> Callable[[str], str]:
    """Return a function that masks the words whose cost alone is too high.

    The threshold is `READABLE` for a cost that is a probability, and the budget for any other. Of a
    maximum each cost masks its words; language models judge no words.
    """
    cost, budget = answer.guard.cost, answer.guard.config.budget
    parts = [part for part in getattr(cost, "parts", [cost]) if not keeps_cache(part)]

    def masked(text: str) -> str:
        for part in parts:
            text = mask(text, part, READABLE if part.unit == "probability" else budget)
        return text

    return masked


def mask_answer(answer: Response) -> str:
    """Return the text of an answer, masked.

    Under a cost that is a language model, everything from the first check over budget on is masked;
    the checks are the ends of words. Then the words whose cost alone is too high are.
    """
    text, cost, config = answer.judged or "", answer.guard.cost, answer.guard.config
    if keeps_cache(cost):
        (reading,) = readings(Cached(cost), "word", [answer.prompt], [text], [True], [0])
        passed = np.cumprod(within(np.array(reading.costs), config))  # NaN does not
        shown = [0, *reading.ends][passed.sum()]
        text = text[:shown] + hidden(text[shown:])
    return masker_of(answer)(text)


def mask_prompt(answer: Response) -> str:
    """Return the prompt of an answer with its words masked, or marked if no cost judges them."""
    return NOT_MASKED * keeps_cache(answer.guard.cost) + masker_of(answer)(answer.prompt)


def hidden(text: str) -> str:
    """Return a text with every word masked."""
    return re.sub(r"\w", BLOCK, text)


def verdict_of(answer: Response) -> str:
    """Return the verdict as a sentence with its numbers."""
    config = answer.guard.config
    if answer.status == "abstained":
        return f"abstained: {WHY[answer.reason]}"
    cost = "cost unknown" if answer.cost is None else f"cost {round(answer.cost, 3):g}"
    if answer.spread >= 0.0005:  # a smaller spread is invisible in three digits
        cost += f", give or take {answer.spread:.3f}"
    inside = answer.cost is not None and within(answer.cost, config)
    over = answer.cost is not None and answer.cost > config.budget  # False for NaN
    side = "within" if inside else "over" if over else "not within"
    cost += f", {side} the budget of {config.budget:g}"
    if answer.status != "verified_safe":
        return f"not verified: {cost}; {WHY[answer.reason]}"
    guarded = method_of(answer.guard.method).abstains
    words = "verified safe by the final check" if guarded else "not guarded, but within budget"
    words += f": {cost}"
    if answer.reason:
        words += f"; {WHY[answer.reason]}"
    if not within(answer.word_peak_cost, config):
        words += f", though it was over budget before the end ({answer.word_peak_cost:.3f})"
    return words


def answer_html(answer: Response) -> str:
    """Return an answer as HTML, with masked words."""
    shown = mask_answer(answer)
    spans, start, thought = [], 0, len(answer.reasoning)
    for end, z in zip(answer.block_ends, answer.z_trace[1:], strict=False):
        line = f"solid {WITHIN}" if z >= 0 else f"dashed {OVER}"
        parts = escape(shown[start : min(end, thought)]), escape(shown[max(start, thought) : end])
        spans.append(
            f'<span style="border-bottom:2px {line}"><i style="color:{GREY}">{parts[0]}</i>'
            f"{parts[1]}</span>"
            f'<sub style="color:{GREY};font-size:12px;margin:0 4px">{z:.3f} left</sub>'
        )
        start = end
    text = "".join(spans) or "<i>nothing was emitted</i>"
    passed = answer.status == "verified_safe"
    passed = passed and within(answer.word_peak_cost, answer.guard.config)
    color = WITHIN if passed else GREY if answer.status == "abstained" else OVER
    return (
        '<div style="max-width:52em;line-height:1.9">'
        f'<div><span style="color:{GREY}">{escape(mask_prompt(answer))}</span> {text}</div>'
        f'<div style="color:{color}"><b>{escape(verdict_of(answer))}</b></div></div>'
    )
