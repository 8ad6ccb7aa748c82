"""Which variants are measured under which settings.

Default settings: 16 samples, 4 kept, blocks of 16, 64 new tokens, a prompt of 40 tokens,
SmolLM2-135M as policy and both scorers. The samples of ARGS are the tokens that it considers at
each position; only its reward is a language model.
"""

import importlib.util
from dataclasses import replace

import torch

from benchmarks import baselines, ours
from benchmarks.measure import Case

VARIANTS = baselines.VARIANTS | ours.VARIANTS
HAS_ITS_HUB = importlib.util.find_spec("its_hub") is not None
A1 = Case("A1 one beam at a time, all encoded again", "A1")
A2 = Case("A2 batched generate, scored one at a time", "A2")
A3 = Case("A3 batched generate, batched scoring", "A3")
B = Case("B KV cache, DynamicCache", "B")
C = Case("C KV cache, prompt shared", "C")
C8 = replace(C, prompts=8)
ENGINE = Case("engine alone, one block", "engine")
# 128 rows: the engine, and the part of it that samples
WIDE = {"n_samples": 128, "new_tokens": 16}
ENGINE_WIDE = replace(ENGINE, **WIDE)
SAMPLING_WIDE = Case("sampling alone", "sampling", **WIDE)
GUARDED = Case("guarded search, free scorers", "guarded, free")
UNGUARDED = Case("unguarded search, free scorers", "unguarded, free")
ONE_BLOCK = Case("unguarded, one block, free scorers", "one block, free")
PEER = {"new_tokens": 32, "block": 8}
GENERATE = Case("transformers generate", "generate", **PEER)
HUB_BEST = Case("its_hub Best-of-N", "its_hub best-of-n", **PEER)
HUB_BEAM = Case("its_hub beam search", "its_hub beam", **PEER)
BEST = Case("igcore best-of-n", "sample shared", **PEER)
BEAM = Case("igcore beam-augmented", "unguarded, free", **PEER)
PEERS = [GENERATE, HUB_BEST, BEST, HUB_BEAM, BEAM]
LONG = {"prompt_tokens": 512, "n_samples": 32}
LONG_DYNAMIC = Case("sampling, DynamicCache", "sample dynamic", **LONG)
LONG_SHARED = Case("sampling, prompt shared", "sample shared", **LONG)
TOKENWISE = {"new_tokens": 32, "block": 1, "keep": 1}
ARGS = Case("ARGS, KV cache for all", "args", **TOKENWISE)
ARGS_BASELINES = [
    Case("ARGS, all encoded again", "args, uncached", **TOKENWISE),
    Case("ARGS, whole texts scored", "args, KV cache", **TOKENWISE),
]


def half(case: Case) -> Case:
    """Return a case in bfloat16."""
    return replace(case, dtype="bfloat16")


# eight prompts cost the naive search eight times what one does, as it answers them one by one
A2_HALF = half(replace(A2, prompts=2))


def sections(quick: bool = False) -> dict[str, list[Case]]:
    """Return the cases by section; those of a section are interleaved.

    Parameters
    ----------
    quick : bool
        Tiny sizes on random models, for a look at whether everything runs. The 7B part is then tiny
        and on the CPU.
    """
    long = [LONG_DYNAMIC, LONG_SHARED]
    scaling = [replace(GUARDED, n_samples=n) for n in (4, 64)]
    scaling += [replace(GUARDED, new_tokens=n) for n in (32, 128)]
    scaling += [replace(GUARDED, prompts=n) for n in (4, 8)]
    for n in (1, 2, 8):  # the default is 4 blocks
        name = f"{GUARDED.variant}, {n} blocks"
        scaling.append(replace(GUARDED, variant=name, block=GUARDED.new_tokens // n))
    peers = [case for case in PEERS if HAS_ITS_HUB or case not in (HUB_BEST, HUB_BEAM)]
    plan = {
        "guarded search": [A1, A2, A3, B, C, C8, A2_HALF, half(B), half(C), half(C8)],
        "long prompts": [*long, *map(half, long), half(replace(GENERATE, **LONG, new_tokens=64))],
        "overheads": [GUARDED, UNGUARDED, ONE_BLOCK, ENGINE, ENGINE_WIDE, SAMPLING_WIDE],
        "token by token": [*ARGS_BASELINES, ARGS],
        "peers": peers,
        "scaling": scaling,
    }
    if quick or torch.cuda.is_available():
        plan["7B"] = _of_7b()
    if quick:
        return {name: [_tiny(case) for case in cases] for name, cases in plan.items()}
    return plan


def _of_7b() -> list[Case]:
    """Return the cases of a random 7B model on a GPU."""
    cases = []
    for samples in (32, 128):
        for prompts in (1, 8):
            for name, run in (("C without", "guarded, free"), ("C with two 7B", "C")):
                case = Case(f"{name} scorers, random 7B", run, "random 7B", "bfloat16", prompts)
                cases.append(replace(case, n_samples=samples, new_tokens=128, block=64))
    return cases


def ratios(quick: bool = False) -> list[tuple[str, Case, Case]]:
    """Return which cases are compared by CPU seconds per prompt.

    Each entry is a name, the case above the fraction line and the one below.
    """
    eight, long = "C with eight prompts", "DynamicCache / shared prompt, 512 prompt tokens"
    pairs = []
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
        ("share of sampling in decoding at 128 rows", SAMPLING_WIDE, ENGINE_WIDE),
    ]
    pairs += [(f"{case.variant} / KV cache for all", case, ARGS) for case in ARGS_BASELINES]
    for case, mine in ((GENERATE, BEST), (HUB_BEST, BEST), (HUB_BEAM, BEAM)):
        pairs.append((f"{case.variant} / {mine.variant}", case, mine))
    return [(text, _tiny(a), _tiny(b)) if quick else (text, a, b) for text, a, b in pairs]


def _tiny(case: Case) -> Case:
    """Return a case of the same shape on a tiny random model."""
    return replace(
        case,
        models="random tiny",
        prompts=min(case.prompts, 2),
        prompt_tokens=case.prompt_tokens // 8,
        n_samples=case.n_samples // 4,
        keep=1 if case.n_samples < 8 else 2,
        new_tokens=case.new_tokens // 8,
        block=max(case.block // 8, 1),
    )


def warm_up(case: Case) -> Case:
    """Return the smallest case that walks the same code: the first call of anything is slow."""
    return replace(case, prompts=1, prompt_tokens=8, n_samples=4, keep=2, new_tokens=2, block=1)
