"""Go or no-go before a comparison of searches: plain answers, and when they exceed budgets.

``make regimes`` draws plain answers to the pilot prompts of ``params/regimes.yaml``, reads their
costs at every word, and writes a line for each answer and regime, without its text. A set of
answers that has its lines is not drawn again, unless its settings change.
`igstudy.report.regimes` judges the regimes.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from igcore.files import DIGITS, digest_of, replace_file, root
from igcore.policy import Policy
from igcore.response import Response
from igcore.scoring import Cached, readings
from igcore.settings import Budget, Count, Named, Options, settings
from igserve.yamlfile import read_yaml

from ..linefile import Fields
from ..plain import plain_answers, plain_guard
from ..prompts import load_prompts
from ..report import tables
from ..report.regimes import LENGTHS, go_or_no_go
from ..sources import loaded

PARAMS = Path("params/regimes.yaml")
FOLDER = Path("runs/regimes")  # seen from `root`
SEEDS = (101, 102, 103)  # no registered run has them


@settings(kw_only=True)
class Answers:
    """Plain answers of a policy to the prompts of a pilot, and the regimes that they are read for.

    Attributes
    ----------
    policy, prompts, split, limit
        See `igstudy.runs.decode_params.DecodeParams`.
    harmless : str, optional
        A prompt set like that of `prompts`, whose answers should be within budget; as many.
    regimes : dict
        Name -> the settings of a `Regime`.
    """

    policy: Named
    prompts: Any
    split: str = "train"
    limit: Count = 40
    harmless: str | None = None
    regimes: Annotated[dict[str, Options], Field(min_length=1)]


@settings(kw_only=True)
class Regime:
    """A cost, and the budget under which a search would run."""

    cost: Named
    budget: Budget


def breach(answer: Response, policy: Policy, cost: Cached, budget: float) -> float | None:
    """Return how many tokens of an answer lie before its first check over budget, None for none.

    A check is at the end of every word and of the answer. A cost without a number is over budget.
    """
    text = answer.text or ""
    (reading,) = readings(cost, "word", [answer.prompt], [text], [True], [0])
    pairs = zip(reading.ends, reading.costs, strict=True)
    over = next((end for end, value in pairs if not value <= budget), None)
    if over is None:
        return None
    counts = range(len(answer.tokens) + 1)
    return bisect_left(counts, over, key=lambda n: len(policy.decoded(answer.tokens[:n])))


def lines_of(answers: Answers) -> Iterator[Fields]:
    """Yield a line for each plain answer and each of its regimes."""
    guard = plain_guard(answers.policy, LENGTHS[-1])
    sets = {"pilot": load_prompts(answers.prompts, answers.split, answers.limit)}
    if answers.harmless is not None:
        sets["harmless"] = load_prompts(answers.harmless, answers.split, answers.limit)
    regimes = {name: Regime(**given) for name, given in answers.regimes.items()}
    costs = {name: Cached(loaded(each.cost)) for name, each in regimes.items()}
    for (kind, prompts), seed in product(sets.items(), SEEDS):
        for answer in plain_answers(guard, prompts, seed):
            for name, each in regimes.items():
                about: Fields = {"regime": name, "policy": guard.policy.name, "kind": kind}
                about |= {"cost": costs[name].scorer.name, "budget": each.budget}
                about |= {"prompt_id": answer.prompt_id, "seed": seed}
                first = breach(answer, guard.policy, costs[name], each.budget)
                yield about | {"tokens": len(answer.tokens), "breach": first}


def main(file: str = str(PARAMS)) -> None:
    """Draw what is missing, and write the table of regimes."""
    parts = []
    for name, given in read_yaml(root() / file, "it names sets of answers").items():
        path = root() / FOLDER / f"{name}-{digest_of(given)[:DIGITS]}.csv"
        if not path.is_file():
            replace_file(path, pd.DataFrame(lines_of(Answers(**given))).to_csv(index=False))
        parts.append(pd.read_csv(path))
    draws = pd.concat(parts, ignore_index=True)
    stem, table = root() / FOLDER / "figures/tables/regimes", go_or_no_go(draws)
    print(table.round(3).to_string(index=False))
    shown = ["regime", "policy", "S_128", "S_128_low", "S_128_high", "between", "price", "alarms"]
    tables.write(table, stem, {}, table[[*shown, "go"]])
    draws.to_csv(f"{stem}_draws.csv.gz", index=False, compression={"method": "gzip", "mtime": 0})


if __name__ == "__main__":
    main(*sys.argv[1:])
