"""Runs of the mock policy: the lines that they write, and whole folders."""

from killed import PARAMS
from killed import PROMPTS as TEXTS
from mockpolicy import LetterCost, LetterCritic, LetterReward, mock_policy

from igcore import METHODS, Guard, decode
from igstudy.runs import decode_run, folders, records
from igstudy.runs.decode_params import Settings

SCORERS = {"letters": LetterCost(), "vowels": LetterReward()}
PROMPTS = ["ab", "fed", "c", "dd"]
UNSTEERED = [name for name in METHODS if not name.startswith("re-control")]


def lines(budget=0.5, methods=UNSTEERED, **settings):
    common = dict(n_samples=4, block_size=3, max_new_tokens=6, keep=1, token_top_k=4)
    config = Settings(**(common | {"budget": budget} | settings))
    scorers = dict(reward=SCORERS["vowels"], cost=SCORERS["letters"])
    guard = Guard(mock_policy(), config=config, critic=LetterCritic(), **scorers)
    return [
        records.record(r, method, guard, seed=0)
        for method in methods
        for r in decode(method, guard, PROMPTS)
    ]


def experiment(p, prompts=TEXTS, policy=None, cost=None):
    guard = Guard(policy or mock_policy(), cost or LetterCost(), LetterReward(), p.search())
    return decode_run.Experiment.of(p, prompts, guard, {})


def fill(run, experiment):
    run.fill(experiment.work, experiment.lines_of, "test")


def decode_into(folder, p=PARAMS):
    with folders.open_run(folder, {"budget": p.budget}) as run:
        fill(run, experiment(p))
        run.finish({"lines": len(run.lines)})
    return run.responses
