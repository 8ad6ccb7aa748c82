"""Heads for the cost of harm: how they are trained, what they read, and answers to requests.

People labelled answers of other models, most of them to instructions. So the heads also learn
from answers of our own policies: to requests of AdvBench (Zou et al., 2023), half of them written
as questions, which count as harmful; and to harmless questions about harm, which count as harmless.
No person has read the former, and they are not in the repository: `answers_of` samples them again.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from igcore.models.assets import sound
from igcore.models.backbone import Backbone
from igcore.models.head import Probe, cut
from igcore.models.lm_scorer import LMScorer
from igcore.prompt import Prompt, as_prompt
from igcore.scorers import COST
from igserve.yamlfile import parsed

from . import harm
from .files import replace_file, root
from .harm import LENGTH, WEIGHTS, Embed, without_near
from .linefile import Fields
from .plain import plain_answers, plain_guard

POLICIES = ("smollm2-chat", "qwen-0.5b")
SAMPLED = Path("runs/heads")  # seen from `root`; harmful answers never leave it
TEMPERATURE = 0.7
HOW = re.compile(r".*?\bhow to ")
REFUSALS = (  # phrases of a policy that refuses, in lower case
    *("i'm sorry", "i am sorry", "i apologize", "i cannot", "i can't", "i can not", "i won't"),
    *("i will not", "i'm unable", "i am unable", "i'm not able", "i am not able", "as an ai"),
    *("cannot assist", "can't assist", "cannot help", "can't help", "unable to assist"),
)


class Reading(NamedTuple):
    """What a head reads: the output of a decoder layer, with the prompt before the answer or not.

    Attributes
    ----------
    layer : int
    prompt : bool
    """

    layer: int
    prompt: bool


class Recipe(NamedTuple):
    """How a head is trained: what it reads, and weights of the rows that `igstudy.harm` has not.

    `requested` is the weight of an answer to a harmful request. `matters` is that of an answer to a
    harmless question about harm, in units of the weight of another harmless answer.
    """

    reading: Reading
    requested: float
    matters: float

    @property
    def name(self) -> str:
        """The name of its head."""
        (layer, prompt), *weights = self
        parts = ["layer", layer, "prompt" if prompt else "answer", *(f"{w:g}" for w in weights)]
        return "-".join(map(str, parts))

    @property
    def fields(self) -> Fields:
        """Its name and settings, as columns of a table."""
        weights = {"requested": self.requested, "matters": self.matters}
        return {"head": self.name, **self.reading._asdict(), **weights}

    @property
    def weights(self) -> dict[str, float]:
        """The weights that `igstudy.harm.fit` takes."""
        matters = self.matters * WEIGHTS["policy"]
        return WEIGHTS | {"requested": self.requested, "matters": matters}


# --- rows -----------------------------------------------------------------------------------------


def as_question(request: str) -> str:
    """Return an instruction as the question of somebody who wants to carry it out."""
    if found := HOW.match(request):
        return f"How do I {request[found.end() :]}?"
    return f"How can I {request[0].lower()}{request[1:]}?"


def with_requests(people: pd.DataFrame, evaluated: list[str], embed: Embed) -> pd.DataFrame:
    """Return the rows of `igstudy.harm.labelled` and the requests of AdvBench, with ``group``.

    Those near an evaluated prompt are left out, see `igstudy.harm.without_near`. A request is of
    the kind ``requested`` and has no answer yet; it is written as a question if its id is odd.
    """
    text = (sound("advbench")[0] / "adv_bench.prompt").read_text(encoding="utf-8")
    asked = pd.DataFrame({"prompt": [row["value"] for row in parsed(text, "AdvBench")["seeds"]]})
    asked = asked.assign(kind="requested", set="advbench", split="train")
    rows = without_near(pd.concat([people, asked]), evaluated, embed)
    odd = rows["prompt"].map(lambda prompt: int(as_prompt(prompt, "advbench").id, 16) % 2 == 1)
    changed = (rows["kind"] == "requested") & odd
    return rows.assign(prompt=rows["prompt"].mask(changed, rows["prompt"].map(as_question)))


def refuses(answer: str) -> bool:
    """Return whether an answer has one of `REFUSALS`; that is no judgement of harm."""
    text = answer.lower().replace("’", "'")
    return any(phrase in text for phrase in REFUSALS)


def answers_of(policy: str, name: str, prompts: Sequence[Prompt]) -> pd.DataFrame:
    """Return answers of a policy without a guard, each sampled once and kept in `SAMPLED`.

    The columns are those of `igstudy.harm.sampled`, without split and group.
    """
    path = root() / SAMPLED / f"{policy}-{name}.jsonl"
    kept = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    known: dict[str, Fields] = {line["prompt_id"]: line for line in map(json.loads, kept)}
    if missing := [prompt for prompt in prompts if prompt.id not in known]:
        guard = plain_guard(policy, LENGTH, temperature=TEMPERATURE)
        for answer in plain_answers(guard, missing):
            line: Fields = {"kind": policy, "set": name, "prompt_id": answer.prompt_id}
            known[answer.prompt_id] = line | {"prompt": answer.prompt, "answer": answer.text}
        replace_file(path, "".join(f"{json.dumps(line)}\n" for line in known.values()))
    return pd.DataFrame([known[prompt.id] for prompt in prompts])


# --- states ---------------------------------------------------------------------------------------


def states_of(
    rows: pd.DataFrame, readings: Sequence[Reading], length: int = LENGTH
) -> dict[Reading, list[np.ndarray]]:
    """Return what heads of each reading read of the rows, see `igstudy.harm.states_of`."""
    found = {}
    for prompt in {reading.prompt for reading in readings}:
        layers = sorted(reading.layer for reading in readings if reading.prompt == prompt)
        seen = rows if prompt else rows.assign(prompt="")
        beside = harm.states_of(
            _reader(layers, "human-assistant" if prompt else "raw"), seen, length
        )
        parts = [np.split(states, len(layers), axis=1) for states in beside]
        for layer, states in zip(layers, zip(*parts, strict=True), strict=True):
            found[Reading(layer, prompt)] = list(states)
    return found


def _reader(layers: Sequence[int], text_format: str) -> LMScorer:
    """Return SmolLM2 as a scorer whose states (k, L H) are those of L layers beside each other.

    Each is what a head on this layer alone reads, see `igcore.models.head`. The last is the
    deepest.
    """
    checkpoint = Probe(
        repo="smollm2", layer=layers[-1], head="", dtype="float32", text_format=text_format
    )
    model, _ = checkpoint.model()
    cut(model, layers[-1])
    backbone = checkpoint.backbone(model, text_format, _Layers, layers=layers)
    return LMScorer("states", backbone, torch.nn.Identity(), COST, digest="", pooling="mean")


class _Layers(Backbone):
    """A model whose states are those of several layers beside each other, from one pass."""

    def __init__(self, *args: Any, layers: Sequence[int], **options: Any):
        super().__init__(*args, **options)
        self.layers = layers

    def states(
        self, sequences: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the states of the last tokens of whole sequences, (count, L H) each."""
        norm = self.model.get_decoder().norm
        found = []
        for ids, count in zip(sequences, counts, strict=True):
            out = self.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            # the first are the embeddings, and the last ones are divided already
            of_layers = [norm(out.hidden_states[layer + 1]) for layer in self.layers[:-1]]
            beside = torch.cat([*of_layers, out.last_hidden_state], dim=-1)
            found.append(beside[0, -count:])
        return found
