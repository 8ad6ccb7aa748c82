"""The search with steps back written a second time, for one prompt of the word policy, as plainly
and slowly as possible: a beam is a list of tokens, and all costs are read again at every check.

``PYTHONPATH=tests python -m tests.slowsteps 2000`` compares so many random settings with the
package, as ``make audit`` does.
"""

import math
import random
import sys
from collections import Counter

import reference
from mockpolicy import (
    EOS,
    WORDS,
    LastWordCost,
    LetterReward,
    last_word_cost,
    letter_reward,
    slow_checks,
    some_number,
    word_policy,
)

from igcore import Guard, Prompt, SearchConfig, decode
from igcore.contract import TEXTS
from igcore.engine.sampling import random_key

PROMPTS = [Prompt(f"id{i}", text, "mock") for i, text in enumerate("ab ce c dd eae cb".split())]
WHOLE = dict(tries=1, choices=1)  # of rejection sampling


def text_of(tokens):
    return "".join(WORDS[token] for token in tokens if token != EOS)


class SlowSteps:
    """One prompt under settings ``s``, a dictionary; `cost` is a function of the text."""

    def __init__(self, prompt, seed, cost, reward=letter_reward, **s):
        self.start = tuple(WORDS.index(c) for c in prompt.text)
        self.name, self.seed, self.cost, self.reward, self.s = prompt.id, seed, cost, reward, s
        self.length = s["max_new_tokens"]
        self.whole = s["accounting"] == "terminal"
        self.step = self.length if self.whole else s["step"]
        self.spend = s["spend"] or 4 * self.length
        self.spent = self.number = self.depth = self.since = 0
        self.accepted, self.spare, self.draws, self.longest = [], [], [], []
        self.stack = [[[], 0]]  # tokens of a beam, and its failures

    def token(self, tokens, choice):
        key = random_key(self.seed, self.name, self.number, choice, len(tokens))
        return reference.pick((*self.start, *tokens), key, set())

    def checks(self, tokens):
        """Return the lengths of text at which an answer has been checked, its own one if due."""
        text, done, block = text_of(tokens), self.ended(tokens), self.s["block_size"]
        ends = {len(text_of(tokens[:n])) for n in range(block, len(tokens) + 1, block)}
        if self.s["checks"] == "word" and self.s["gamma_safety"] == 1:
            ends |= set(slow_checks(text)[:-1])
        return {len(text)} if self.whole and done else ends | ({len(text)} if done else set())

    def omega(self, tokens):
        """Return what is left of the budget, -infinity where the cost fails at a check."""
        text, omega, peak = text_of(tokens), self.s["budget"], 0.0
        gamma, block = self.s["gamma_safety"], self.s["block_size"]
        if self.whole:
            cost = self.cost(text) if self.ended(tokens) else 0.0
            charged = self.s["gamma_safety"] ** (len(tokens) - 1) * max(cost, 0.0)
            return -math.inf if math.isnan(cost) else omega - charged
        for first in range(0, len(tokens), block):
            last = min(first + block, len(tokens))
            before, here = (len(text_of(tokens[:n])) for n in (first, last))
            inside = [end for end in self.checks(tokens) if before < end <= here]
            if gamma != 1:
                words = slow_checks(text[:here])[:-1] if self.s["checks"] == "word" else []
                due = last % block == 0 or self.ended(tokens)
                inside = [here, *(end for end in words if before < end)] if due else []
            elif self.ended(tokens) and last == len(tokens):
                inside.append(here)
            costs = [self.cost(text[:end]) for end in inside]
            if any(map(math.isnan, costs)):
                return -math.inf
            worst = max([peak, *costs])
            omega, peak = omega - gamma ** (last - 1) * (worst - peak), worst
        return omega if gamma != 1 else self.s["budget"] - peak

    def ended(self, tokens):
        return len(tokens) == self.length or EOS in tokens

    def draw(self, choice):
        """Return an answer to the next beam, to its end, or to where it is left or cut."""
        tokens = list(self.stack[-1][0])
        first = len(tokens)
        while self.spent < self.spend:
            tokens.append(self.token(tokens, choice))
            self.spent += 1
            if self.ended(tokens) or self.omega(tokens) < 0 or len(tokens) == first + self.step:
                break
        self.draws.append(tokens)
        return tokens

    def passes(self, tokens):
        safe = self.omega(tokens) >= 0
        return safe and (not self.ended(tokens) or not math.isnan(self.reward(text_of(tokens))))

    def rank(self, tokens):
        return self.reward(text_of(tokens)) - self.s["margin"] * self.cost(text_of(tokens))

    def go_back(self):
        self.since += 1
        self.stack[-1][1] += 1
        if self.s["keep_shown"]:
            return
        if self.s["back"] == "doubling":
            dropped = 2 ** (self.since - 2) if self.since > 1 else 0
            del self.stack[max(1, len(self.stack) - dropped) :]
            return
        while len(self.stack) > 1 and self.stack[-1][1] >= self.s["tries"]:
            self.stack.pop()
            self.stack[-1][1] += 1

    def done(self):
        wanted = self.s["answers"]
        enough = wanted != "all" and len(self.accepted) >= wanted and len(self.stack) == 1
        used_up = self.spent >= self.spend or self.number == self.s["draws"]
        return used_up or (enough and self.spent >= self.s["at_least"])

    def over(self):
        """Return whether it is done, and drop the best answers that a final check refuses."""
        while self.done():
            self.accepted += self.spare
            self.spare = []
            best = max(self.accepted, key=self.rank, default=None)
            if best is None or self.cost(text_of(best)) <= self.s["budget"]:
                return True
            self.accepted.remove(best)
            if self.s["keep_shown"]:
                return True
        return False

    def search(self):
        """Return the answer's tokens, or None."""
        while not self.over():
            rivals, choice, cut = [], 0, False
            while True:
                tokens = self.draw(choice)
                whole = self.ended(tokens) or len(tokens) == len(self.stack[-1][0]) + self.step
                cut = not whole and self.omega(tokens) >= 0
                if not cut and self.passes(tokens):
                    rivals.append(tokens)
                missing = 1.1 * self.s["choices"] * (self.length - len(tokens))
                left = self.spend - self.spent
                more = choice + 1 < self.s["choices"] and left > missing and left >= self.step
                if cut or not rivals or not more:
                    break
                choice += 1
            if cut and not rivals:
                continue
            if not rivals:
                self.number += 1
                self.go_back()
                continue
            best = max(rivals, key=self.rank) if len(rivals) > 1 else rivals[0]
            if not self.s["keep_shown"]:
                others = [tokens for tokens in rivals if tokens is not best]
                self.spare += filter(self.ended, others)
            if choice or self.ended(best):
                self.number += 1
            if self.ended(best):
                self.accepted.append(best)
                self.stack, self.depth, self.since = [[[], 0]], 0, 0
                continue
            self.stack.append([best, 0])
            if len(best) > self.depth:
                self.depth, self.since = len(best), 0
            self.longest = max(self.longest, best, key=len)
        return max(self.accepted, key=self.rank, default=None)


# --- random settings ------------------------------------------------------------------------------


def failing(share):
    """Return the cost of the last word, which fails on a share of the texts."""

    def cost(text):
        fails = text not in TEXTS and some_number("fails", text) < share
        return math.nan if fails else last_word_cost(text)

    return cost


def settings_at(rng):
    """Return random settings of the search."""
    block, length = rng.choice([2, 3, 4]), rng.choice([4, 8, 12, 15])
    steps = [step for step in (block, 2 * block, length) if step <= length]
    return dict(
        budget=rng.choice([0.0, 0.5, 1.0, 1.5, 2.0]),
        block_size=block,
        max_new_tokens=length,
        checks=rng.choice(["word", "block"]),
        gamma_safety=rng.choice([1.0, 1.0, 0.9]),
        accounting=rng.choice([*["peak"] * 5, "terminal"]),
        step=rng.choice(steps),
        back=rng.choice(["tries", "doubling"]),
        tries=rng.choice([1, 2, 3]),
        spend=rng.choice([None, length, 3 * length, 6 * length]),
        at_least=rng.choice([0, 0, length]),
        draws=rng.choice([None, None, 3]),
        answers=rng.choice([1, 1, 2, "all"]),
        choices=rng.choice([1, 1, 2, 3]),
        margin=rng.choice([0, 0.5, 5]),
        keep_shown=False,
    )


def compare(n, seed):
    """Compare n random searches; return how often each kind of end was seen."""
    rng, policy, seen = random.Random(seed), word_policy(), Counter()
    for number in range(n):
        given, cost = settings_at(rng), failing(rng.choice([0, 0, 0.05, 0.2]))
        prompt, method = rng.choice(PROMPTS), "backtracking"
        slow_given = given
        if rng.random() < 0.25:
            method, slow_given = "rejection", given | WHOLE | {"step": given["max_new_tokens"]}
        elif rng.random() < 0.2 and given["accounting"] == "peak":
            given |= dict(keep_shown=True, answers=1, at_least=0)
        config = SearchConfig(refusal="", failure_rate=1.0, **given)
        guard = Guard(policy, LastWordCost(cost), LetterReward(), config)
        (answer,) = decode(method, guard, [prompt], seed=number)
        slow = SlowSteps(prompt, number, cost, **slow_given)
        best = slow.search()
        ours = answer.tokens, answer.counts.policy_tokens, answer.counts.samples_drawn
        assert ours == (best or [], slow.spent, len(slow.draws)), (method, given)
        assert (answer.status == "verified_safe" and not answer.reason) == bool(best)
        seen[method, bool(best), len(slow.draws) > 1] += 1
    return seen


if __name__ == "__main__":
    print(dict(compare(int(sys.argv[1]), seed=1)))
