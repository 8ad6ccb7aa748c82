"""Which variants are measured under which settings; the defaults are those of `Case`."""

from dataclasses import replace

from benchmarks import others, ours
from benchmarks.measure import Case, Pair

VARIANTS = others.VARIANTS | ours.VARIANTS
GENERATE, *_ = others.VARIANTS
GUARD, BACK = ours.VARIANTS
SIZES: list[dict[str, int]] = [
    {},
    {"new_tokens": 128},
    {"new_tokens": 512},
    {"prompt_tokens": 5},
    {"prompt_tokens": 500},
    {"prompt_tokens": 2000},
]
SAMPLES: list[dict[str, int]] = [{"n_samples": 4}, {"n_samples": 64}]
COSTS = [{"cost": "smollm2-harm-2", "checks": checks} for checks in ("word", "block")]


def sections() -> list[list[Case]]:
    """Return the cases by section; those of a section are measured in turn."""
    many, one = [], []  # of N samples, and of one
    for size in SIZES + SAMPLES:
        # its_hub's beam search would take a quarter of an hour for the longest
        short = others.installed() and max(size.values(), default=0) < 512
        names = [GENERATE, *(others.HUB if short else ()), GUARD]
        many.append([Case(name, **size) for name in names])
    for size in [*SIZES, {"prompts": 8}]:
        one.append([Case(name, n_samples=1, **size) for name in (GENERATE, GUARD, BACK)])
    many[0] += [Case(GUARD, **cost) for cost in COSTS]
    one[0] += [Case(BACK, n_samples=1, **cost) for cost in COSTS]
    return many + one


def pairs() -> list[Pair]:
    """Return which cases are compared: the one above the fraction line, and the one below."""
    found: list[Pair] = []
    for cases in sections():
        free = {case.variant: case for case in cases if case.cost == "free"}
        guards = [free[name] for name in (GUARD, BACK) if name in free]
        for case in cases:
            if case.cost != "free":
                found.append((case, free[case.variant]))
            elif case.variant in others.VARIANTS:
                found += [(case, guard) for guard in guards]
    return found


def warm_up(case: Case) -> Case:
    """Return the smallest case that walks the same code: the first call of anything is slow."""
    return replace(case, prompts=1, prompt_tokens=8, n_samples=4, new_tokens=2, block=1)
