"""The policy of a request as a witness: what it gives again, and what it can have given.

`igstudy.runs.verify` calls it. Nothing that a record says of its origin decides: whether a
difference may be excused is read from what is decoded here.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from igcore import Guard, Prompt
from igcore.engine.prepack import use_prepacked
from igcore.engine.sampling import NEAR_TIE
from igcore.methods import method_of
from igcore.progress import progress

from ..linefile import RECORD_FIELDS, Fields, LineKey, Record, has_texts, key, like
from .asking import PENALISED, NotDecided, Question, ask, logits_of
from .decode_params import DecodeParams, network_of
from .decode_run import Experiment, guard_of, with_sampling
from .folders import changes
from .identity import part_identity
from .networks import Networks, load_networks
from .rescore import TOLERANCE, close, differing_fields

TAKEN = ("temperature", "top_p", "top_k")  # which a request may leave to the checkpoint
# fields of a line that cannot be checked afterwards
UNCERTAIN = {"near_ties", *(name for name in RECORD_FIELDS if name.endswith("_s"))}


@dataclass
class Witness:
    """The policy that a request names, and what it has said of a record.

    Attributes
    ----------
    found : Record
    params : DecodeParams
        The request, with the sampling that was taken from the model.
    guard : Guard
        With the policy and the scorers of the request.
    prompts : list of Prompt
        All that the request chooses, those of other shards included.
    problems, undecided : list of str
        A sentence for each thing that does not hold, and for each that cannot be decided here.
    """

    found: Record
    params: DecodeParams
    guard: Guard
    prompts: list[Prompt]
    problems: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = {key(line): line for line in self.found.lines}
        self.prompt = {prompt.id: prompt for prompt in self.prompts}
        self.last: tuple[Any, Tensor] = None, Tensor()

    @classmethod
    def of(cls, found: Record, request: DecodeParams, prompts: list[Prompt]) -> "Witness":
        """Load the policy of a request; it is a problem if it is not the one of the record."""
        torch.set_num_threads(request.threads)  # on which float sums depend
        guard = guard_of(request)
        witness = cls(found, with_sampling(request, vars(guard.config)), guard, prompts)
        witness.compare({"policy": part_identity(guard.policy)})
        taken = {name: getattr(witness.params, name) for name in TAKEN}
        if request.device != "auto":
            taken["device"] = str(guard.policy.model.device)
        witness.problems += differing_fields("params.json", found.params, taken)
        return witness

    def compare(self, parts: Fields) -> None:
        """Note where params.json has other parts than were loaded."""
        given = self.found.params["parts"]
        old = {"parts": {name: given.get(name) for name in parts}}
        new = {"parts": json.loads(json.dumps(parts))}
        if names := ", ".join(list(changes(old, new))[:4]):
            self.problems.append(f"{names} of params.json differ from those loaded here")

    def ask_all(self) -> tuple[set[LineKey], set[LineKey]]:
        """Ask for the tokens of every line, and decode groups again where a penalty hides them.

        Return the keys of the lines whose tokens the policy gives, and of those decoded again.
        """
        given, hidden = set[LineKey](), set[LineKey]()
        undecided: Counter[str] = Counter()
        lines = [line for line in self.found.lines if has_texts(line)]
        lines.sort(key=lambda line: (line["prompt_id"], line["tokens"]))  # equal answers together
        model = self.guard.policy.model  # one view of it for all lines
        with progress(len(lines), "asking the policy") as bar, use_prepacked(model):
            for line in lines:
                problems, why = self.ask(line)
                self.problems += problems
                if why == PENALISED and not network_of(line["method"]):
                    hidden.add(key(line))
                elif why:
                    undecided[why] += 1
                elif line["tokens"] and not problems:
                    given.add(key(line))
                bar.update(1)
        for why, n in undecided.items():
            self.undecided.append(f"{n} lines cannot be decided in one pass: {why}")
        return given, self.decode_again(hidden) if hidden else set()

    def ask(self, line: Fields) -> tuple[list[str], str]:
        """Return why the policy cannot have given a line, and why it cannot tell."""
        policy, params = self.guard.policy, self.params
        config = method_of(line["method"]).settings_under(params.search())
        ids = policy.ids_of(self.prompt[line["prompt_id"]], config.max_new_tokens)
        question = Question(policy, ids, line, config, params.seed, params.block_size)
        problems = []
        try:
            for problem in ask(question, self.read):
                problems.append(f"{line['method']}, prompt {line['prompt_id']}: {problem}")
        except NotDecided as why:
            return problems, "" if problems else str(why)
        return problems, ""

    def read(self, question: Question) -> Tensor:
        """Return the logits of an answer; equal ones that follow one another are read once."""
        name = question.ids, question.line["tokens"]
        if self.last[0] != name:
            self.last = name, logits_of(question)
        return self.last[1]

    def decode_again(self, wanted: set[LineKey]) -> set[LineKey]:
        """Decode the groups of some lines again, and return the keys of all their lines."""
        methods = [name for name in self.params.methods if name in {method for method, _ in wanted}]
        params = replace(self.params, methods=methods)
        networks: Networks = {}
        if any(map(network_of, methods)):
            networks, weights = load_networks(params, self.guard)
            self.compare(weights)
        experiment = Experiment.of(params, self.prompts, self.guard, networks)
        again = set[LineKey]()
        for method, group in experiment.work:
            keys = {(method, prompt.id) for prompt in group}
            if keys & wanted:
                for line in experiment.lines_of(method, group):
                    self.compare_line(line)
                again |= keys
        return again

    def compare_line(self, again: Fields) -> None:
        """Note where a line that was decoded again differs."""
        line = self.lines[key(again)]
        where = f"{again['method']}, prompt {again['prompt_id']}, decoded again"
        differing = list(differences(where, line, again))
        # near ties of this replay, and not the record's: nothing in a record excuses it
        tied = again["near_ties"] or self.guard.policy.model.dtype.itemsize < 4
        if not (differing and tied):
            self.problems += differing
            return
        problems, _ = self.ask(line) if has_texts(line) else ([], "")
        self.problems += problems
        if not problems:
            self.undecided.append(f"{where}: differs, as it may where a near tie falls otherwise")


def differences(where: str, line: Fields, again: Fields) -> Iterator[str]:
    """List where a line differs from the one decoded again, beyond the rounding of batches.

    Hashes are left out, because those of scorers change with their code. Where one of the two has
    no texts, only their digests are compared.
    """
    line = like(again, line)
    expected = {
        name: value
        for name, value in like(line, again).items()
        if name not in UNCERTAIN and not name.endswith("digest")
    }
    allow_for_batch(line["trace"], expected["trace"], line["block_size"])
    return differing_fields(where, line, expected, TOLERANCE)


def allow_for_batch(found: Sequence[Fields], again: Sequence[Fields], block_size: int) -> None:
    """Give a trace decoded again the found diagnostics wherever another batch explains them.

    A batch moves logits by up to `NEAR_TIE`, and so a log-probability by up to twice that. It moves
    neither tokens nor scores: near ties are settled by a draw alone. But perplexity and KL are made
    of log-probabilities.
    """
    for old, new in zip(found, again, strict=False):
        slack = {"kl": 4 * NEAR_TIE * block_size}  # log q and log p of each token of a block
        slack["perplexity"] = math.expm1(2 * NEAR_TIE) * (new["perplexity"] or 0.0)
        for name, most in slack.items():
            if close(old.get(name), new[name], most):
                new[name] = old[name]
