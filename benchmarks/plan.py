"""Which variants are measured under which settings.

Default settings: 16 samples, 4 kept, blocks of 16, 64 new tokens, a prompt of 40 tokens,
SmolLM2-135M as policy and both scorers. The samples of ARGS are the tokens that it considers at
each position; only its reward is a language model.
"""

import importlib.util
from dataclasses import replace

import torch

from benchmarks import rivals
from benchmarks.measure import Case
from benchmarks.models import SIGNS
from benchmarks.ours import draw_alone, engine_alone, search

VARIANTS: dict[str, rivals.Variant] = {
    "A1": rivals.naive(generate_rows=1, score_rows=1),
    "A2": rivals.naive(generate_rows=None, score_rows=1),
    "A3": rivals.naive(generate_rows=None, score_rows=None),
    "B": search("inferenceguard", "dynamic"),
    "C": search("inferenceguard"),
    "guarded, free": search("inferenceguard", free=SIGNS),
    "unguarded, free": search("beam-augmented", free=SIGNS),
    "one block, free": search("best-of-n-augmented", free=SIGNS),
    "sample dynamic": search("best-of-n", "dynamic", free=SIGNS),
    "sample shared": search("best-of-n", free=SIGNS),
    "args": search("args", free=["cost"]),
    "args, scored anew": rivals.args(carried=True),
    "args, all anew": rivals.args(carried=False),
    "engine": engine_alone,
    "draw": draw_alone,
    "generate": rivals.transformers_generate,
    "its_hub best-of-n": rivals.its_hub_best_of_n,
    "its_hub beam": rivals.its_hub_beam_search,
}
A1 = Case("A1 one beam at a time, all encoded again", "A1")
A2 = Case("A2 batched generate, scored one at a time", "A2")
A3 = Case("A3 batched generate, batched scoring", "A3")
B = Case("B keys and values carried, DynamicCache", "B")
C = Case("C keys and values carried, prompt shared", "C")
ENGINE, DRAW = Case("engine alone, one block", "engine"), Case("draw alone", "draw")
GUARDED = Case("guarded search, free scorers", "guarded, free")
UNGUARDED = Case("unguarded search, free scorers", "unguarded, free")
ONE_BLOCK = Case("unguarded, one block, free scorers", "one block, free")
PEER = {"new_tokens": 32, "block": 8}
GENERATE = Case("transformers generate", "generate", **PEER)
ITS_HUB = [
    Case("its_hub Best-of-N", "its_hub best-of-n", **PEER),
    Case("its_hub beam search", "its_hub beam", **PEER),
]
PEERS = [
    Case("igcore best-of-n", "sample shared", **PEER),
    Case("igcore beam-augmented", "unguarded, free", **PEER),
]
PEERS_OF = (PEERS[0], PEERS[0], PEERS[1])  # of transformers and its_hub, in their order
SAMPLE = [
    Case("sampling, DynamicCache", "sample dynamic"),
    Case("sampling, prompt shared", "sample shared"),
]
TOKENWISE = {"new_tokens": 32, "block": 1, "keep": 1}
ARGS = Case("ARGS, all carried", "args", **TOKENWISE)
ARGS_RIVALS = [
    Case("ARGS, whole texts scored", "args, scored anew", **TOKENWISE),
    Case("ARGS, all encoded again", "args, all anew", **TOKENWISE),
]
SIZES_7B = [(samples, prompts) for samples in (32, 128) for prompts in (1, 8)]


def has_its_hub() -> bool:
    """Say whether its_hub is installed."""
    return importlib.util.find_spec("its_hub") is not None


def sections(quick: bool = False) -> dict[str, list[Case]]:
    """Return the cases by section; those of a section are interleaved.

    Parameters
    ----------
    quick : bool
        Tiny sizes on random models, for a look at whether everything runs. The 7B part is then tiny
        and on the CPU.
    """
    plan = {
        "guarded search": [
            A1,
            A2,
            A3,
            B,
            C,
            replace(C, prompts=8),
            # the naive ones go prompt by prompt: eight cost each what one does
            *(
                replace(case, dtype="bfloat16")
                for case in (replace(A2, prompts=2), B, C, replace(C, prompts=8))
            ),
        ],
        "long prompts": [
            replace(case, prompt_tokens=512, n_samples=32, dtype=dtype)
            for dtype in ("float32", "bfloat16")
            for case in SAMPLE
        ]
        + [replace(GENERATE, prompt_tokens=512, n_samples=32, new_tokens=64, dtype="bfloat16")],
        "overheads": [
            GUARDED,
            UNGUARDED,
            ONE_BLOCK,
            ENGINE,
            *(replace(case, n_samples=128, new_tokens=16) for case in (ENGINE, DRAW)),
        ],
        "token by token": [ARGS, *ARGS_RIVALS],
        "peers": [GENERATE, *(ITS_HUB if has_its_hub() else []), *PEERS],
        "scaling": [
            *(replace(GUARDED, n_samples=n) for n in (4, 16, 64)),
            *(replace(GUARDED, new_tokens=n) for n in (32, 64, 128)),
            *(replace(GUARDED, prompts=n) for n in (1, 4, 8)),
            # above: 4 blocks
            *(
                replace(GUARDED, variant=f"{GUARDED.variant}, {n} blocks", block=64 // n)
                for n in (1, 2, 8)
            ),
        ],
    }
    if quick or torch.cuda.is_available():
        seven = {"models": "random 7B", "dtype": "bfloat16", "new_tokens": 128, "block": 64}
        plan["7B"] = [
            Case(f"{name}, random 7B", run, n_samples=samples, prompts=prompts, **seven)
            for samples, prompts in SIZES_7B
            for name, run in (
                ("C without scorers", "guarded, free"),
                ("C with two 7B scorers", "C"),
            )
        ]
    return {
        name: [_tiny(case) if quick else case for case in dict.fromkeys(cases)]
        for name, cases in plan.items()
    }


def ratios(quick: bool = False) -> list[tuple[str, Case, Case]]:
    """Return which cases are compared by CPU seconds per prompt.

    Each entry is a name, the case above the fraction line and the one below.
    """
    pairs = []
    naive = {
        "float32": (("A1", A1), ("A2", A2), ("A3", A3)),
        "bfloat16": (("A2", replace(A2, prompts=2)),),
    }
    for dtype, rows in naive.items():
        pairs += [
            (f"{name} / {below}, {dtype}", replace(above, dtype=dtype), replace(ours, dtype=dtype))
            for name, above in rows
            for below, ours in (("C", C), ("C with eight prompts", replace(C, prompts=8)))
        ]
        pairs.append((f"B / C, {dtype}", replace(B, dtype=dtype), replace(C, dtype=dtype)))
        long = (replace(case, prompt_tokens=512, n_samples=32, dtype=dtype) for case in SAMPLE)
        pairs.append((f"DynamicCache / shared prompt, 512 prompt tokens, {dtype}", *long))
    pairs += [
        ("guarded search / engine alone, equal samples", GUARDED, ENGINE),
        ("guarded search / unguarded search", GUARDED, UNGUARDED),
        ("blockwise / one block", UNGUARDED, ONE_BLOCK),
        (
            "share of the draw in decoding at 128 rows",
            *(replace(case, n_samples=128, new_tokens=16) for case in (DRAW, ENGINE)),
        ),
        *((f"{case.variant} / all carried", case, ARGS) for case in ARGS_RIVALS),
        *(
            (f"{case.variant} / {ours.variant}", case, ours)
            for case, ours in zip((GENERATE, *ITS_HUB), PEERS_OF, strict=True)
        ),
    ]
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
