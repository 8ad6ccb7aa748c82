"""Receipts of real answers and forged ones: ``python -m tests.receipts``, the second half of
`make serve-audit`.

Forty honest answers of SmolLM2 are checked by a verifier under another instruction set, and sixty
forged ones by the same verifier. Every forgery is made by somebody who knows how a receipt is made,
and repairs each digest that they can compute.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from igcore import Guard, load_prompts
from igcore.prompt import as_prompt
from igcore.tools.receipt import canonical, text_digest
from igserve.recipe import guard_of, read_recipe

Line = dict
RECIPE = """
policy: smollm2-chat
cost: {name: without-new-numbers}
budget: 1
max_new_tokens: 24
"""


def sealed(line: Line, **receipt) -> Line:
    """Return a line whose receipt has other fields, and the digests of its text and prompt."""
    text = None if line["text"] is None else line["reasoning"] + line["text"]
    known = json.loads(line["receipt"]) | {
        "text": text_digest(text),
        "prompt": text_digest(line["prompt"]),
    }
    return line | {"receipt": canonical(known | receipt)}


def written_by_hand(line: Line, other: Line) -> Line:
    """A text that nobody sampled, within budget, of as many blocks."""
    text = "A kind word."
    n = len(json.loads(line["receipt"])["ends"])
    return sealed(line | {"text": text, "reasoning": ""}, cost=0.0, ends=[len(text)] * n)


def of_another_prompt(line: Line, other: Line) -> Line:
    """An honest answer, to another question."""
    return sealed(other | {"prompt": line["prompt"]})


def of_another_seed(line: Line, other: Line) -> Line:
    """The answer that was chosen among those of many seeds."""
    return sealed(line["under another seed"], seed=0)


def of_another_set(line: Line, other: Line) -> Line:
    """The answer that was chosen among those of many names of the prompt's set."""
    return sealed(line["under another set"], set="user")


def one_word_changed(line: Line, other: Line) -> Line:
    """A word in place of another of the same length."""
    text = line["text"]
    return sealed(line | {"text": text[:-1] + ("x" if text[-1:] != "x" else "y")})


def cut_short(line: Line, other: Line) -> Line:
    """The beginning of an answer, up to the end of its first block."""
    receipt = json.loads(line["receipt"])
    end = receipt["ends"][0]
    changed = {"ends": [end], "z": receipt["z"][:2], "tokens": 8}
    return sealed(line | {"text": line["text"][:end]}, **changed)


def claimed(**receipt) -> Callable[[Line, Line], Line]:
    """Return a forgery that claims other fields of the same text."""
    return lambda line, other: sealed(line, **receipt)


FORGERIES: dict[str, Callable[[Line, Line], Line]] = {
    "written by hand": written_by_hand,
    "answer to another prompt": of_another_prompt,
    "another seed": of_another_seed,
    "another set": of_another_set,
    "one letter changed": one_word_changed,
    "cut short": cut_short,
    "lower cost": claimed(cost=-1.0),
    "more budget left": claimed(z=[1.0, 1.0, 1.0, 2.0]),
    "another budget": claimed(budget=0.5),
    "another policy": claimed(policy={"name": "smollm2-chat", "digest": "0" * 64}),
    "another cost": claimed(cost_model={"name": "without-new-numbers", "digest": "0" * 64}),
    "other settings": claimed(settings="0" * 64),
}
EACH = 5  # of every kind


def honest_lines(guard: Guard, prompts: list[str]) -> list[Line]:
    """Return the lines of answers, and what they would be under another seed and another set."""
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for name, given, seed in (
            ("", prompts, 0),
            ("under another seed", prompts, 1),
            ("under another set", [as_prompt(text, "other") for text in prompts], 0),
        ):
            path = Path(folder, f"{name}.jsonl")
            guard.map(given, seed=seed, out=path)
            found = [json.loads(line) for line in path.read_text().splitlines()]
            lines.append((name, found))
    (_, own), *others = lines
    for name, found in others:
        for line, under in zip(own, found, strict=True):
            line[name] = under
    return own


def forged(lines: list[Line], each: int = EACH) -> Iterator[tuple[str, Line]]:
    """Yield forgeries, some of every kind, that differ from what they were made of."""
    for kind, forge in FORGERIES.items():
        made = 0
        for line, other in zip(lines, lines[1:] + lines[:1], strict=True):
            copy = forge(line, other)
            same = copy["receipt"] == line["receipt"] and copy["text"] == line["text"]
            if not same and made < each:
                made += 1
                yield kind, copy
        assert made == each, f"{kind}: {made} forgeries"


def plain(line: Line) -> str:
    """Return a line as it is handed on."""
    return json.dumps({name: part for name, part in line.items() if "under" not in name}) + "\n"


def main() -> None:
    """Make answers and forgeries, let another process check them, and print the counts."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "guard.yaml")
        recipe.write_text(RECIPE)
        prompts = [prompt.text for prompt in load_prompts("benign")][:40]
        lines = honest_lines(guard_of(read_recipe(recipe), recipe.parent), prompts)
        forgeries = list(forged(lines))
        honest, false = Path(folder, "honest.jsonl"), Path(folder, "forged.jsonl")
        honest.write_text("".join(map(plain, lines)))
        false.write_text("".join(plain(line) for _, line in forgeries))
        lowered = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
        counts = {}
        for path in (honest, false):
            command = [sys.executable, "-m", "igserve", "verify-receipt", str(path)]
            printed = subprocess.run(
                [*command, "--guard", str(recipe)],
                env=os.environ | lowered,
                capture_output=True,
                text=True,
            )
            print(printed.stdout.strip().splitlines()[-1], printed.stderr.strip()[-300:])
            counts[path] = printed.stdout.count(" does not hold: ")
    accepted = len(forgeries) - counts[false]
    print(f"{len(lines) - counts[honest]} of {len(lines)} honest answers hold")
    print(f"{accepted} of {len(forgeries)} forgeries are accepted")
    if accepted or counts[honest]:
        sys.exit(1)


if __name__ == "__main__":
    main()
