"""The generated blocks of the README: tables of results, notebooks, figures and costs.

``python -m igcore.runs.readme`` fills every block. It reads the files that the last runs left and
computes nothing but sums of minutes.
"""

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from ..errors import IgcoreError, ParameterError, RunError
from ..paper import TABLES as PRINTED
from ..paper import swept
from ..report.tables import replace_file
from .plan.report import plan_block

# notebook -> what it shows, whether it needs a GPU, patterns of its executed copies in a profile
NOTEBOOKS = {
    "00_start_here": (
        "one prompt with and without the guard, and the safety state block by block",
        "no",
        "start.ipynb",
    ),
    "10_theory": (
        "every theorem computed exactly, every condition with its counterexample",
        "no",
        "theory.ipynb",
    ),
    "20_train_critic": (
        "rollouts, a critic on the policy's latents, and what it is worth to a search",
        "no",
        "critics/*/executed.ipynb",
    ),
    "30_decode": (
        "a policy, a prompt set, a list of methods; resumable, sharded, verified",
        "no",
        "decode-*/executed.ipynb",
        "examples-*/executed.ipynb",
    ),
    "40_tables": (
        "the main table, the paired comparisons, and the paper's tables",
        "no",
        "tables.ipynb",
    ),
    "45_ablations": (
        "experiments with paired tests, and what the paper sweeps, by `make ablations` and `make "
        "critic-search`",
        "no",
        "../ablations/[!.]*/**/*.ipynb",
        "../critic-search/[!.]*/**/*.ipynb",
    ),
    "50_figures": ("every figure", "no", "figures.ipynb"),
    "60_judge": (
        "who prefers whose answer: a language model behind an endpoint, or two scorers",
        "no",
        "judge/*/executed.ipynb",
    ),
    "70_paper_audit": (
        "what the paper's printed numbers imply, computed from its tables",
        "no",
        "audit.ipynb",
    ),
}
APART = {"45_ablations"}  # not part of `make reproduce`
AFTER = " (by `make ablations` after `make reproduce`)"
FIGURES = {  # picture of `make reproduce` -> what it shows, for those who do not see it
    "overview": (
        "Flow chart of the search: a prompt is continued by N blocks after K beams, each block is "
        "scored with the budget left and with reward or a critic, the K best safe ones go on, "
        "failed blocks are penalised and drawn again, and a final check gives an answer or an "
        "abstention."
    ),
    "tradeoff": (
        "Reward against safety rate of fifteen methods and two policies, with 95 % intervals; "
        "colour is the time per prompt."
    ),
    "pareto": (
        "Reward against safety rate: a point for every method, and fronts of Best-of-N over five "
        "weights of the cost; on the prompts of the sweeps, fronts of other methods over the "
        f"weight and of InferenceGuard over its budget{AFTER}."
    ),
    "rates": "Safe, abstained and unsafe answers of every method, as counts.",
    "distributions": (
        "Distributions of cost and reward over all answers of every method, with the budget as a "
        "line."
    ),
    "budget_sweep": "Share of answers below a budget, for every budget and method.",
    "trajectories": (
        "Safety state z over the tokens of the answer for fifteen methods and two policies, as "
        "medians, quartile bands and the lowest answer, with a line at 0 below which the budget is "
        "broken."
    ),
    "abstention": (
        "Share of prompts without a safe answer among 1 to 4 samples, with intervals, beside the "
        "bound of theory from other samples for up to 16, and what InferenceGuard left unanswered; "
        "two policies."
    ),
    "answers": (
        "What each method answered to one mild prompt, with outcome, cost and reward; words that "
        "the cost model finds offensive are masked."
    ),
    "critic": (
        "AUROC of the critics within a prompt by the number of tokens read, for two policies, with "
        "intervals."
    ),
    "reliability": (
        "Share of prefixes that ended inside the budget against the probability f1 that critics "
        "gave them, after 8, 16, 24 and 32 tokens for two policies, with 95 % intervals and the "
        "diagonal of perfect calibration."
    ),
    "win_rates": (
        "Wins, ties and losses of every method against the base model's answers, judged by two "
        "local scorers, in two aspects."
    ),
}
TABLES = {  # its tables -> what they hold
    "main": "safety, abstentions, rewards and costs of every method, with intervals",
    "comparison": "paired tests of InferenceGuard against each baseline, with Holm's correction",
    "compute": "what each method drew, read and asked",
    "heldout": "verdicts of a judge that took no part in any search, by retry round",
    "critic": "how well critics tell safe from unsafe, by tokens read",
    "win_rates": "the counts behind the picture of that name",
    **{
        f"paper_{name}": (
            "the embedded models in the shape of the printed table "
            f"{name}{AFTER if name in swept.TABLES else ''}"
        )
        for name in PRINTED
    },
}
ABLATIONS = {  # picture of `make ablations` -> what it shows
    "ablation_lambda": (
        "Reward against safety rate over five weights of the cost, a panel for each Lagrangian "
        "method and number of samples, with the front of each and InferenceGuard as a star."
    ),
    "ablation_ndk": (
        "Safety, abstentions, reward and seconds of InferenceGuard over block size, for three "
        "numbers of samples and of beams."
    ),
    "ablation_budget": (
        "Safety, abstentions and reward over four budgets, InferenceGuard beside methods that "
        "never look at the budget."
    ),
    "ablation_retries": (
        "What up to four rounds find, for four ways to retry: prompts answered with the bound of "
        "theory, safe candidates, distance from the policy and perplexity."
    ),
    "ablation_factorial": (
        "Main effects and interactions of pathwise check, retry, penalty and critic on safety, "
        "reward and abstention, with intervals and adjusted p values."
    ),
    "ablation_seeds": (
        "Safety and reward of every main method under three seeds, with intervals over prompts."
    ),
    "ablation_compute": (
        "Safety, abstentions and seconds of the blockwise methods over 2 to 16 samples, with the "
        "bound of theory on finding nothing safe."
    ),
    "ablation_critic": (
        "AUROC of critics that read different features within a prompt, by the number of tokens "
        "read, with intervals."
    ),
}
SUBSET = (
    "*n* is the number of prompts. A method that ran on fewer prompts than others of its policy is "
    "left out of *Reward, all answered*: the mean over the prompts that every remaining method "
    "answered."
)


def main_table(tables: Path) -> str:
    """Return the main table as Markdown, with a note where methods ran on different prompt counts.

    Parameters
    ----------
    tables : Path
        Folder that holds ``main.md`` and ``main.csv``.

    Raises
    ------
    RunError
        When one of them is not there.
    """
    text, rows = _read(tables / "main.md"), pd.read_csv(io.StringIO(_read(tables / "main.csv")))
    differ = rows.groupby("policy")["n_prompts"].nunique() > 1
    return f"{text}\n{SUBSET}" if differ.any() else text


def notebook_table(runs: Path) -> str:
    """Return the table of notebooks as Markdown, with the minutes that each took in the last run.

    The minutes of a notebook are summed over its copies.

    Parameters
    ----------
    runs : Path
        Folder of a profile, such as ``runs/small``.

    Raises
    ------
    RunError
        When a notebook of `make reproduce` was not executed there.
    """
    lines = ["| notebook | what it shows | CPU minutes | needs a GPU |", "|:--|:--|--:|:--|"]
    for name, (shows, gpu, *patterns) in NOTEBOOKS.items():
        copies = [path for pattern in patterns for path in sorted(runs.glob(pattern))]
        if not copies and name not in APART:
            raise RunError(f"{runs / patterns[0]} is not there; run `make reproduce` first")
        seconds = sum(
            json.loads(path.read_text(encoding="utf-8"))["metadata"]["papermill"]["duration"]
            for path in copies
        )
        minutes = f"{seconds / 60:.1f}" if copies else "not run"
        lines.append(f"| [{name}](notebooks/{name}.ipynb) | {shows} | {minutes} | {gpu} |")
    return "\n".join(lines)


def figure_list() -> str:
    """Return what `make reproduce` leaves in ``figures`` as two Markdown tables.

    They include what `make ablations` adds to these files.
    """
    pictures = _listed("picture | what it shows", "figures/{}.png", FIGURES)
    return pictures + "\n\n" + _listed("table | what it holds", "figures/tables/{}.md", TABLES)


def ablation_list() -> str:
    """Return the pictures that `make ablations` leaves in ``figures``, as a Markdown table."""
    return _listed("picture | what it shows", "figures/{}.png", ABLATIONS)


def _listed(heads: str, path: str, names: Mapping[str, str]) -> str:
    """Return a Markdown table of named files and their descriptions."""
    rows = [f"| [{name}]({path.format(name)}) | {text} |" for name, text in names.items()]
    return "\n".join([f"| {heads} |", "|:--|:--|", *rows])


def update_block(readme: Path | str, marker: str, text: str) -> None:
    """Replace the text between ``<!-- marker:start -->`` and ``<!-- marker:end -->``.

    Raises
    ------
    RunError
        When `readme` is not there.
    ParameterError
        Unless it holds each of the two comments once, in this order.
    """
    readme = Path(readme)
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    old = _read(readme)
    if not (old.count(start) == old.count(end) == 1 and old.index(start) < old.index(end)):
        raise ParameterError(
            f"{readme} must hold the lines {start} and {end} once each, in this order; add them"
        )
    before, after = old.split(start)[0], old.split(end)[1]
    replace_file(readme, f"{before}{start}\n\n{text.strip()}\n\n{end}{after}")


def _read(path: Path) -> str:
    """Return the text of a file, or raise ``RunError`` saying which command writes it."""
    if not path.is_file():
        raise RunError(
            f"{path} is not there; give the path of a file, or run `make reproduce`, `make "
            "critic-search` and `make bench` first"
        )
    return path.read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the blocks of a README from the last run of a profile, the last ablations and the last
    benchmark.
    """
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.readme", description=main.__doc__)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument(
        "--tables",
        type=Path,
        default=Path("figures/tables"),
        help="folder of the tables that the commands write",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/small"),
        help="folder that holds the executed notebooks",
    )
    options = parser.parse_args(arguments)
    try:
        blocks = {
            "main-table": main_table(options.tables),
            "notebooks": notebook_table(options.runs),
            "critic-search": _read(options.tables / "ablation_critic_search.md"),
            "bench": _read(options.tables / "bench_ratios.md"),
            "figures": figure_list(),
            "ablation-figures": ablation_list(),
            "paper-plan": plan_block(Path("params/paper")),
        }
        for marker, text in blocks.items():
            update_block(options.readme, marker, text)
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
