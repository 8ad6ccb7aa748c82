"""Which variants are measured under which settings.

Default settings: 16 samples, 4 kept, blocks of 16, 64 new tokens, a prompt of 40 tokens,
SmolLM2-135M as policy and both scorers. All run on the CPU.
"""

from dataclasses import replace

from benchmarks import baselines, ours
from benchmarks.measure import Case

VARIANTS = baselines.VARIANTS | ours.VARIANTS
A1 = Case("A1 one beam at a time, all encoded again", "A1")
A2 = Case("A2 batched generate, scored one at a time", "A2")
A3 = Case("A3 batched generate, batched scoring", "A3")
B = Case("B KV cache, DynamicCache", "B")
C = Case("C KV cache, prompt shared", "C")
C8 = replace(C, prompts=8)
ENGINE = Case("engine alone, one block", "engine")
GUARDED = Case("guarded search, free scorers", "guarded, free")
UNGUARDED = Case("unguarded search, free scorers", "unguarded, free")
ONE_BLOCK = Case("unguarded, one block, free scorers", "one block, free")
NAMED = {"n_samples": 8, "keep": 2, "block": 8}  # as a guard has them by default
RUDE = Case("guarded search, rude cost at every word", "guarded, rude", **NAMED)
HARM = Case("guarded search, harm cost at every word", "guarded, harm", **NAMED)
PEER = {"new_tokens": 32, "block": 8}
GENERATE = Case("transformers generate", "generate", **PEER)
BEST = Case("igcore best-of-n", "sample shared", **PEER)
# one setting of these two at a time is another
SHAPES: dict[str, dict] = {
    "64 samples": {"n_samples": 64},
    "256 new tokens": {"new_tokens": 256},
    "5 prompt tokens": {"prompt_tokens": 5},
    "1,000 prompt tokens": {"prompt_tokens": 1000},
    "prompts of 5 to 200 tokens": {"prompts": 4, "prompt_tokens": 200, "shortest": 5},
    "vocabulary of 128,256 tokens": {"models": "random 128k"},
}
LONG = {"prompt_tokens": 512, "n_samples": 32}
LONG_DYNAMIC = Case("sampling, DynamicCache", "sample dynamic", **LONG)
LONG_SHARED = Case("sampling, prompt shared", "sample shared", **LONG)


def half(case: Case) -> Case:
    """Return a case in bfloat16."""
    return replace(case, dtype="bfloat16")


def shaped(case: Case, name: str) -> Case:
    """Return a case with the setting of `SHAPES` that has this name."""
    return replace(case, variant=f"{case.variant}, {name}", **SHAPES[name])


# eight prompts cost the naive search eight times what one does, as it answers them one by one
A2_HALF = half(replace(A2, prompts=2))


def sections() -> dict[str, list[Case]]:
    """Return the cases by section; those of a section are interleaved."""
    long = [LONG_DYNAMIC, LONG_SHARED]
    return {
        "guarded search": [A1, A2, A3, B, C, C8, A2_HALF, half(B), half(C), half(C8)],
        "long prompts": [*long, *map(half, long), half(replace(GENERATE, **LONG, new_tokens=64))],
        "overheads": [GUARDED, UNGUARDED, ONE_BLOCK, ENGINE],
        "plain sampling": [GENERATE, BEST],
        "costs by name": [RUDE, HARM],
        "other sizes": [shaped(case, name) for name in SHAPES for case in (GENERATE, BEST)],
    }


def ratios() -> list[tuple[str, Case, Case]]:
    """Return which cases are compared, by CPU seconds per prompt.

    Each entry is a name, the case above the fraction line and the one below.
    """
    eight, long = "C with eight prompts", "DynamicCache / shared prompt, 512 prompt tokens"
    pairs: list[tuple[str, Case, Case]] = []
    for name, case in (("A1", A1), ("A2", A2), ("A3", A3)):
        pairs.append((f"{name} / C, float32", case, C))
        pairs.append((f"{name} / {eight}, float32", case, C8))
    pairs += [
        ("B / C, float32", B, C),
        (f"{long}, float32", LONG_DYNAMIC, LONG_SHARED),
        ("A2 / C, bfloat16", A2_HALF, half(C)),
        (f"A2 / {eight}, bfloat16", A2_HALF, half(C8)),
        ("B / C, bfloat16", half(B), half(C)),
        (f"{long}, bfloat16", half(LONG_DYNAMIC), half(LONG_SHARED)),
        ("guarded search / engine alone, equal samples", GUARDED, ENGINE),
        ("guarded search / unguarded search", GUARDED, UNGUARDED),
        ("blockwise / one block", UNGUARDED, ONE_BLOCK),
        (f"{GENERATE.variant} / {BEST.variant}", GENERATE, BEST),
        ("harm cost / rude cost", HARM, RUDE),
    ]
    for name in SHAPES:
        text = f"{GENERATE.variant} / {BEST.variant}, {name}"
        pairs.append((text, shaped(GENERATE, name), shaped(BEST, name)))
    return pairs


def warm_up(case: Case) -> Case:
    """Return the smallest case that walks the same code: the first call of anything is slow."""
    sizes = {"prompt_tokens": 8, "n_samples": 4, "keep": 2, "new_tokens": 2, "block": 1}
    return replace(case, prompts=1, shortest=0, **sizes)
