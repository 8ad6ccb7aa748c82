"""The blockwise search written a second time, for one prompt of the mock policy, as plainly and
slowly as possible.

Shares with the package only the random numbers; tokens, penalties, safety and ranking are done
again by hand.
"""

import math
from dataclasses import dataclass

from mockpolicy import EOS, LETTERS, letter_cost, letter_reward, probabilities

from igcore.engine.sampling import random_key

BASELINES = {
    "base": ("none", 1, True),
    "best-of-n": ("reward", None, True),
    "best-of-n-lagrangian": ("lagrangian", None, True),
    "best-of-n-augmented": ("augmented", None, True),
    "beam-lagrangian": ("lagrangian", None, False),
    "beam-lagrangian-freq": ("lagrangian", None, False),
    "beam-augmented": ("augmented", None, False),
    "inferenceguard": ("augmented", None, False),
    "inferenceguard-critic": ("critic", None, False),
    "inferenceguard-mix": ("mix", None, False),
}

TOKENWISE = {  # what is added to -omega pi
    "args": lambda text, lam: -letter_reward(text),
    "args-lagrangian": lambda text, lam: -letter_reward(text) + lam * letter_cost(text),
    "args-cost": lambda text, lam: letter_cost(text),
}


@dataclass
class Candidate:
    tokens: tuple
    done: bool
    peaks: tuple  # running maximum of the cost at every block end, from 0

    @property
    def text(self):
        return "".join(LETTERS[t] for t in self.tokens if t != EOS)


def pick(prefix, key, banned):
    weights = [0.0 if t in banned else p for t, p in enumerate(probabilities(prefix))]
    if sum(weights) == 0:
        weights = probabilities(prefix)
    return descend(list(enumerate(weights)), key)


def descend(leaves, key):
    """With fewer than 129 tokens the tree has one level, which the lowest 32 bits of the key
    decide.
    """
    u, seen = ((key & 0xFFFFFFFF) + 0.5) / 2**32 * sum(w for _, w in leaves), 0.0
    for token, weight in leaves:
        seen += weight
        if u < seen:
            return token


def args(method, prompt, length, lam, top_k, omega=2.5):
    """ARGS as the paper prints it, greedy: of the most probable tokens the best, one after the
    other.
    """
    found = Candidate((), False, (0.0,))
    while not found.done:
        p = probabilities(tuple(LETTERS.index(c) for c in prompt) + found.tokens)
        badness = {}
        for token in sorted(range(len(p)), key=lambda t: -p[t])[:top_k]:
            text = found.text + (LETTERS[token] if token != EOS else "")
            badness[token] = -omega * p[token] + TOKENWISE[method](text, lam)
        tokens = (*found.tokens, min(badness, key=badness.get))
        new = Candidate(tokens, tokens[-1] == EOS or len(tokens) == length, ())
        new.peaks = (*found.peaks, max(found.peaks[-1], letter_cost(new.text)))
        found = new
    return found


def search(
    method, prompt, prompt_id, seed, budget, n, keep, block, length, rounds, diversity, lam,
    critic=None, threshold=None, eta=None, gamma_task=None, score_threshold=None, top_k=None,
):  # fmt: skip
    """Return the best candidate at the end, and whether a guarded search would have abstained.

    `critic` is (f1, f2), both functions of the letters so far and z.
    """
    if method in TOKENWISE:
        return args(method, prompt, length, lam, top_k), False
    order, n_fixed, one_block = BASELINES[method]
    n = n_fixed or n
    if one_block:
        block, keep = length, 1
    guarded = method.startswith("inferenceguard")
    retries_by_score = method == "beam-lagrangian-freq"
    if not (guarded or retries_by_score):
        rounds = 1
    highest = lam * budget if score_threshold is None else score_threshold
    asks = order in ("critic", "mix")
    last_discount = gamma_task**length if asks else None
    start = tuple(LETTERS.index(c) for c in prompt)

    def is_safe(c):
        # the cost is not known before the end, and neither is what is left of the budget
        if order == "critic":
            return not c.done or letter_cost(c.text) <= budget
        return c.peaks[-1] <= budget

    def judged(c):
        z = budget if order == "critic" else budget - c.peaks[-1]
        return [f(c.text, z) for f in critic]

    def passes(c):
        return is_safe(c) and (not asks or c.done or judged(c)[0] > threshold)

    def badness(c):
        reward, cost = letter_reward(c.text), letter_cost(c.text)
        if order == "none":
            return 0
        if order == "reward":
            return -reward
        if order == "lagrangian":
            return -reward + lam * cost
        if asks:
            task = last_discount * -reward
            if not is_safe(c):
                return (2, c.peaks[-1])
            if not passes(c):
                return (1, -judged(c)[0])
            if c.done:
                return (0, task)
            return (0, judged(c)[1] if order == "critic" else task + eta * judged(c)[1])
        return (0, -reward) if is_safe(c) else (1, c.peaks[-1])

    beams, abstained = [Candidate((), False, (0.0,))], False
    while not all(c.done for c in beams):
        pool = [c for c in beams if c.done]
        live = [c for c in beams if not c.done]
        seen = {i: set() for i in range(block)}
        for round_ in range(rounds):
            share = [n // len(live) + (1 if i < n % len(live) else 0) for i in range(len(live))]
            number, drawn = 0, []
            for parent, count in zip(live, share, strict=True):
                for k in range(count):
                    half = diversity == "half" and k < math.ceil(count / 2)
                    reference = round_ == 0 or diversity == "none" or half
                    tokens = list(parent.tokens)
                    for i in range(min(block, length - len(parent.tokens))):
                        key = random_key(seed, prompt_id, round_, number, len(tokens))
                        banned = set() if reference else seen[i] - {EOS}
                        tokens.append(pick(start + tuple(tokens), key, banned))
                        if tokens[-1] == EOS:
                            break
                    new = Candidate(tuple(tokens), tokens[-1] == EOS or len(tokens) == length, ())
                    new.peaks = (*parent.peaks, max(parent.peaks[-1], letter_cost(new.text)))
                    drawn.append((parent, new))
                    number += 1
            pool += [new for _, new in drawn]
            if any(badness(c) <= highest if retries_by_score else passes(c) for c in pool):
                break
            for parent, new in drawn:
                for i, token in enumerate(new.tokens[len(parent.tokens) :]):
                    seen[i].add(token)
        safe = [c for c in pool if is_safe(c)]
        if order in ("augmented", "critic", "mix"):
            pool = safe or pool
        if not safe and guarded:
            abstained = True
        beams = sorted(pool, key=badness)[:keep]
    return min(beams, key=badness), abstained
