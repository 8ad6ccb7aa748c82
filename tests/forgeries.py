"""Answers that nobody sampled, written into honest records, and honest records of other kinds of
processors: how many of each `igstudy verify --replay tokens` accepts.

``python -m tests.forgeries`` decodes with SmolLM2 and prints the counts; ``--moves`` measures
`igstudy.runs.drawn.HALF_TIE` instead. The forger knows this package: everything that anybody can
compute is mended after a change, and every record claims to come from elsewhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np
import torch

from igcore.beams import Beam
from igcore.budget import start
from igcore.contract import Contract
from igcore.engine.agreement import dtype_of
from igcore.engine.sampling import Sampling
from igcore.errors import IgcoreError
from igcore.methods import method_of
from igcore.models.policies import as_policy
from igcore.prompt import as_prompt
from igcore.scoring import Tally
from igcore.verdict import emission_of
from igstudy import linefile
from igstudy.linefile import SETTINGS
from igstudy.runs import decode_run, rescore, verify
from igstudy.runs.asking import Question, logits_of, measure_strain, rounds_of
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.drawn import HALF_TIE, edges_of, moves_of
from igstudy.sources import loaded

METHODS = ["backtracking", "rejection", "inferenceguard"]
DTYPES = ["float32", "bfloat16"]
LONG = dict(methods=["backtracking"], prompts="rtp", limit=128, group_size=32)
HALVES = [("bfloat16", ""), ("float16", ""), ("bfloat16", "default")]  # type, instruction set
RUN = dict(
    profile="x", run="r", policy="smollm2-raw", prompts="mild", limit=8, cost="without-new-numbers",
    reward=None, budget=0, n_samples=2, keep=1, rounds=4, block_size=8, max_new_tokens=24, seed=3,
)  # fmt: skip
ELSEWHERE = {"processor": "abacus", "git_commit": "f" * 40, "versions": {"torch": "9.9"}}
WORDS = [" garden", " window", " morning", " purple", " slowly", " seven"]


def decode(folder, **changes):
    """Decode a run into a folder and return the path of its lines."""
    return decode_run.decode_run(DecodeParams(**RUN | changes), Path(folder)).responses


# --- what a forger does to a line -----------------------------------------------------------------


def by_hand(line, policy, others, rng):
    """Write an answer by hand."""
    text = "By hand, a lovely day in the garden."
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return line | {"tokens": [*ids, min(policy.eos_ids)]}


def a_word_exchanged(line, policy, others, rng):
    """Exchange a single token for that of another word."""
    tokens = list(line["tokens"])
    place = rng.randrange(len(tokens) - (tokens[-1] in policy.eos_ids))
    words = [policy.tokenizer(w, add_special_tokens=False)["input_ids"][0] for w in WORDS]
    tokens[place] = rng.choice([word for word in words if word != tokens[place]])
    return line | {"tokens": tokens}


def of_another_seed(line, policy, others, rng):
    """Take the answer of another seed."""
    return others["seed"][line["prompt_id"]]


def of_another_prompt(line, policy, others, rng):
    """Take the answer to another prompt."""
    lines = others["own"].values()
    other = rng.choice([x for x in lines if x["tokens"] and x["tokens"] != line["tokens"]])
    return other | {name: line[name] for name in ("prompt", "prompt_id")}


def of_another_temperature(line, policy, others, rng):
    """Take the answer at another temperature, with the same keys."""
    return others["temperature"][line["prompt_id"]]


KINDS = [by_hand, a_word_exchanged, of_another_seed, of_another_prompt, of_another_temperature]


def mended(line, policy, params, contract):
    """Return a line with all that follows from its tokens and the request."""
    method = method_of(line["method"])
    config = method.settings_under(params.search())
    tokens, size = line["tokens"], config.block_size
    n, text = len(tokens), policy.text(tokens)
    ends = [*range(size, n, size), n]
    beam = Beam(tokens, text, True, start(config.budget), ends, 0)
    emission = emission_of(beam, policy, params.block_size)
    line |= {name: asdict(config)[name] for name in SETTINGS}
    line |= {"seed": params.seed, "grid_size": params.block_size, "response": text, "n_tokens": n}
    line |= {"block_ends": emission.ends, "grid_ends": emission.grid}
    line |= rescore.recomputed(line, contract, None)
    ids = policy.ids_of(as_prompt(line["prompt"], line["prompts"]))
    question = Question(policy, ids, line, config, params.seed, params.block_size)
    log_p = logits_of(question).log_softmax(-1, dtype=torch.float32)
    line |= {"reward": float(log_p[range(n), tokens].mean())}
    return line | {"z_final": line["z_trace"][-1], "digest": linefile.line_digest(line)}


def forge(record, number, kind, policy, others, rng):
    """Forge one line of a record, in place, and let the record come from elsewhere."""
    params = DecodeParams(**{n: record.params[n] for n in DecodeParams.__dataclass_fields__})
    contract = Contract.examined(loaded(params.cost), Tally(rate=1.0))
    line = kind(record.lines[number], policy, others, rng)
    record.lines[number] = mended(dict(line), policy, params, contract)
    record.params["versions"] = {}
    record.manifest.update(ELSEWHERE)


def write(record, folder):
    """Write the files of a record, with counts and hashes that belong together."""
    manifest = record.manifest | decode_run.summary(record.lines) | {"params": record.params}
    manifest["root"] = linefile.root_of(record.params, record.lines, manifest)
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(line) + "\n" for line in record.lines)
    (folder / "responses.jsonl").write_text(lines)
    (folder / "params.json").write_text(json.dumps(record.params))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "responses.jsonl"


# --- counting -------------------------------------------------------------------------------------


def verdict_on(path, params, replay="tokens"):
    """Return ``holds``, ``refused`` or ``undecided``, and the first sentence."""
    try:
        report = verify.verify(path, params, replay)
    except IgcoreError as error:
        return "refused", str(error)
    if report.problems:
        return "refused", report.problems[0]
    return ("undecided", report.undecided[0]) if report.undecided else ("holds", report.replayed)


def chosen_lines(lines, *others):
    """Return the numbers of a line without a near tie and of one with near ties, if there is one:
    answers that are long enough to be forged, as those of `others` to this prompt are.
    """
    known = (lines, *others)
    answered = [{x["prompt_id"] for x in some if len(x["tokens"]) > 8} for some in known]
    long = [i for i, line in enumerate(lines) if line["prompt_id"] in set.intersection(*answered)]
    tied = [i for i in long if lines[i]["near_ties"]]
    untied = [i for i in long if not lines[i]["near_ties"]]
    return untied[:1] + (tied or untied[1:])[:1]


def forged(folder, methods=METHODS, dtypes=DTYPES, kinds=KINDS, seeds=(3,), **changes):
    """Yield (method, dtype, near ties, kind, verdict, sentence) for each forgery.

    Of the seeds the first counts under which a line has a near tie, if there is one.
    """
    rng = Random(0)
    for dtype in dtypes:
        policy = as_policy(changes.get("policy", RUN["policy"]), dtype=dtype)
        for method in methods:
            asked, place = changes | {"dtype": dtype, "methods": [method]}, folder / method / dtype
            for seed in seeds:
                asked["seed"] = seed
                own = decode(place / f"own-{seed}", **asked)
                lines = linefile.read(own)
                if any(lines[number]["near_ties"] for number in chosen_lines(lines)):
                    break
            others = {
                "own": own,
                "seed": decode(place / "seed", **asked | {"seed": seed + 1}),
                "temperature": decode(place / "temperature", **asked | {"temperature": 1.4}),
            }
            by_id = {
                name: {line["prompt_id"]: line for line in linefile.read(path)}
                for name, path in others.items()
            }
            for number in chosen_lines(lines, *(known.values() for known in by_id.values())):
                for kind in kinds:
                    record = linefile.read_record(own)
                    forge(record, number, kind, policy, by_id, rng)
                    path = write(record, place / f"{kind.__name__}-{number}")
                    found = verdict_on(path, DecodeParams(**RUN | asked))
                    yield method, dtype, lines[number]["near_ties"], kind.__name__, *found


def honest(folder, records, **changes):
    """Yield (method, dtype, instruction set, verdict, sentence) for each honest record."""
    for n in range(records):
        method, dtype = METHODS[n % 3], DTYPES[n // 3 % 2]
        capability = "default" if n // 6 % 2 else ""
        asked = changes | {"dtype": dtype, "methods": [method], "seed": 100 + n, "limit": 2}
        place = folder / f"honest-{n}"
        path, params = decode_apart(place, capability, **asked)
        yield method, dtype, capability, *verdict_on(path, params)


def decode_apart(folder, capability, **asked):
    """Decode in a process of its own, where torch chooses its instruction set: path and request."""
    lowered = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    env = os.environ | (lowered if capability else {})
    code = f"from tests.forgeries import decode; decode({str(folder)!r}, **{asked!r})"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
    return folder / "responses.jsonl", DecodeParams(**RUN | asked)


# --- how far logits move --------------------------------------------------------------------------


def moved(path, params):
    """Return how far an edge on the way to each token of an honest record has moved, in the unit of
    `HALF_TIE`, where the answers are read again one by one.
    """
    policy, numbers = as_policy(params.policy, dtype=params.dtype), []
    for line in linefile.read(path):
        config = method_of(line["method"]).settings_under(params.search())
        ids = policy.ids_of(as_prompt(line["prompt"], line["prompts"]))
        question = Question(policy, ids, line, config, params.seed, params.block_size)
        logits = logits_of(question)
        room = moves_of(logits, dtype_of(policy.model))
        edges = edges_of(logits, torch.tensor(line["tokens"]), room, Sampling.of(config))
        for at in range(len(line["tokens"])):
            one = slice(at, at + 1)
            draws = rounds_of(question, at // question.draw_size)
            found = [measure_strain(question, edges[one], room[one].numpy(), n, at) for n in draws]
            numbers.append(HALF_TIE * min(found))
    return numbers


def main():
    """Print every verdict, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=40, help="honest records")
    parser.add_argument("--moves", action="store_true", help="how far logits move, and no counts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for dtype, capability in HALVES if given.moves else ():
            asked = LONG | {"dtype": dtype}
            found = moved(*decode_apart(folder / dtype / capability, capability, **asked))
            most, usual = np.quantile(found, [1, 0.999])
            print(dtype, capability, f"{len(found)} tokens, most {most:.1f}, 99.9 % {usual:.1f}")
        if given.moves:
            return
        for name, found in (
            ("forged", forged(folder, seeds=range(3, 60, 2))),
            ("honest", honest(folder, given.honest)),
        ):
            counts = Counter()
            for *what, verdict, sentence in found:
                print(name, *what, verdict, f"{sentence:.150}", sep="\t", flush=True)
                counts[verdict] += 1
            print(f"{name}: {dict(counts)} of {sum(counts.values())}", flush=True)


if __name__ == "__main__":
    main()
