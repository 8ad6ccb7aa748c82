"""Write the tables of the pages: ``make readme``, which is ``python -m docs.pages``.

A page has pairs of comments, ``<!-- table main -->`` and ``<!-- end -->``. The command replaces the
text between them:

* ``<!-- table main -->``: the table of that name in ``figures/tables``;
* ``<!-- arms safety -->``: the arms of a regime that a page shows;
* ``<!-- claims small -->``: the verdicts on the claims of a profile;
* ``<!-- searches numbers -->``: what an answer costs each arm of a regime of params/searches;
* ``<!-- judged harm -->``: what the outside judge found in a regime, in words;
* ``<!-- fidelity paper -->``: the paper's statements and their form in the code;
* ``<!-- output README.md -->``: the output of the first Python block of a page. The tree of its
  ``answer`` becomes ``docs/tree.svg``.

``python -m docs.pages docs/results.md`` writes the blocks of one page.
"""

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd

from docs import fidelity
from igcore.errors import IgcoreError, RunError
from igcore.files import replace_file, root
from igstudy.report import claims, deciding, searches
from igstudy.yamlfile import read_yaml

OF_DOCS = (
    "results harm experiments replication paper fidelity guard cards promise scorers"
).split()
PAGES = ("README.md", *(f"docs/{name}.md" for name in OF_DOCS))
BLOCK = re.compile(r"(<!-- (\w+) ([^>]+) -->\n).*?(<!-- end -->)", re.S)
FRONT = (  # arms of a regime that a page shows
    "base",
    "Best-of-N, augmented",
    "beam search, λ 5",
    "rejection sampling",
    "InferenceGuard as printed",
    "InferenceGuard, M 1",
    "InferenceGuard, M 4",
)
GUARD, TUNED = FRONT[-1], FRONT[2]
TREE = "docs/tree.svg"
SHOWN_LENGTH = 128  # L of the searches that a page shows


def committed(name: str, base: Path) -> Path:
    """Return a file of ``figures/tables``.

    Raises
    ------
    RunError
        When it is not there.
    """
    path = base / "figures/tables" / name
    if not path.is_file():
        raise RunError(
            f"{path} is not there; run `make reproduce`, `make ablations`, `make critic-search` "
            "and `make bench`, each with `make publish`, first"
        )
    return path


def committed_table(name: str, base: Path) -> str:
    """Return a table that a notebook or the benchmark has written, as Markdown."""
    return committed(f"{name}.md", base).read_text(encoding="utf-8").strip()


def arms(regime: str, base: Path) -> str:
    """Return the arms of a regime that a page shows, what its budget means, and how often
    the printed algorithm keeps the constraint that it was built for.

    Raises
    ------
    RunError
        When the claims were not decided.
    """
    path = committed("claims_arms.csv", base)
    every = pd.read_csv(path)
    rows = every.query("regime == @regime").set_index("arm").loc[list(FRONT)]
    n = rows["n_prompts"].iloc[0]
    plain = every.query("arm == 'base'").set_index("regime")
    over = (n * (1 - plain["answered_path_safe"])).round().astype(int)
    twins = ""
    if regime == "harm":
        twins = f" and {over['twins']} of {n} harmless twins ({100 * over['twins'] / n:.0f} %)"

    def percent(name: str) -> pd.Series:
        return (100 * rows[name]).map("{:.1f}".format)

    ends = percent("answered_path_safe_low") + ", " + percent("answered_path_safe_high")
    columns = {
        "safe at the end %": percent("safety_rate"),
        "safe at every word %": percent("answered_path_safe") + " [" + ends + "]",
        "abstained": rows["abstained"],
        "reward": rows["reward_mean"].map("{:.3f}".format),
        "tokens": rows["policy_tokens"].map("{:.0f}".format),
        "scorer calls": rows["scorer_calls"].map("{:.0f}".format),
    }
    shown = pd.DataFrame(columns).rename_axis("method").reset_index()
    meant = pd.read_csv(path.with_name("claims_budgets.csv")).set_index("regime").loc[regime]
    return shown.to_markdown(index=False, disable_numparse=True) + (
        f"\n\n{n} prompts of the regime *{regime}*, 95 % intervals; an abstention is not safe. The "
        f"budget is {meant['budget']:g}: {100 * meant['at_a_word']:.0f} % of harmless answers of "
        f"at most 64 tokens exceed it at some word, and the empty answer costs "
        f"{meant['empty']:.3f}. Plain answers exceed it for {over[regime]} of {n} prompts{twins}. "
        f"*As printed* keeps its own constraint, the summed costs of blocks, for "
        f"{rows['own_constraint_kept']['InferenceGuard as printed']} prompts."
    )


def outside_judge(regime: str, base: Path) -> str:
    """Return in words what the outside judge and the budget say without and with the guard.

    Raises
    ------
    RunError
        When the judge has not read both.
    """
    folder = base / "figures/tables"
    judge = read_yaml(base / "params/small/harm.yaml")["outside"]
    decided = pd.read_csv(folder / "claims.csv").set_index(["regime", "outcome"])
    row = decided.loc[(regime, "harm by the judge")]
    rows = pd.read_csv(folder / "harm.csv").query("judge == @judge").set_index("arm")
    if not {"base", GUARD} <= set(rows.index):
        raise RunError(f"{judge} has not read base and {GUARD}; start its server, run notebook 65")
    plain, guarded = rows.loc["base"], rows.loc[GUARD]
    arms = pd.read_csv(folder / "claims_arms.csv").query("regime == @regime").set_index("arm")
    within = (arms["answered_path_safe"] * arms["n_prompts"]).round().astype(int)
    over = arms["answered"] - within

    def corrected(by: str) -> str:
        share = "{corrected_BY:.2f} [{corrected_BY_low:.2f}, {corrected_BY_high:.2f}]"
        both = [share.replace("BY", by).format(**arm) for arm in (plain, guarded)]
        expected = f"{plain[f'if_harmless_{by}']:.0f} and {guarded[f'if_harmless_{by}']:.0f}"
        return f"{expected} (so shares of {both[0]} and {both[1]} are harmful)"

    return (
        f"Of {plain['n']} harmful requests, the guard answers {within[GUARD]} within the budget "
        f"and {over[GUARD]} over it, and abstains from {guarded['abstained']:.0f}. Without it, "
        f"{over['base']} answers are over it; beam search with a tuned λ answers {within[TUNED]} "
        f"within it. Whether fewer answers do harm is open (the claim is {row['verdict']}): an "
        f"outside judge ({judge}, AUROC {guarded['auroc']:.2f}) calls {plain['harm']:.0f} answers "
        f"harmful without the guard and {guarded['harm']:.0f} with it. Of as many harmless answers "
        f"it would call harmful {corrected('labels')} by its false alarms on answers that people "
        f"labelled, and {corrected('twins')} by those on answers to harmless twins."
    )


def statements(profile: str, base: Path) -> str:
    """Return the verdict on each statement of the paper, unless the files of params contradict.

    Raises
    ------
    RunError
        Naming the first file that does.
    """
    if wrong := fidelity.wrong_settings(base / "params" / profile):
        raise RunError(f"{wrong[0]}; correct the file, or igstudy/paper/data/fidelity.csv")
    return fidelity.page()


def claim_verdicts(profile: str, base: Path) -> str:
    """Return the verdict on each claim of a profile, and how many held.

    Raises
    ------
    RunError
        When nothing was decided, or of a claims file that was edited since.
    """
    file = claims.load_claims(base / "params" / profile / "claims.yaml")
    suffix = f"_{profile}" if profile == "searches" else ""
    path = committed(f"claims{suffix}.csv", base)
    decided = pd.read_csv(path)
    if set(decided["claims_sha256"]) != {file.digest}:
        raise RunError(
            f"{path} does not decide {file.path}; run `make reproduce` and `make publish` first"
        )
    verdicts = decided.drop_duplicates("claim")["verdict"]
    count = f"{(verdicts == 'held').sum()} of {len(verdicts)} claims held."
    return f"{count}\n\n{deciding.in_words(decided).to_markdown(index=False)}"


def search_arms(regime: str, base: Path) -> str:
    """Return the shares that each arm of a regime answers by tokens, and what an answer costs.

    Raises
    ------
    RunError
        When the runs of params/searches were not read.
    """
    every = pd.read_csv(committed("ablation_searches.csv", base))
    rows = every.query("regime == @regime and length == @SHOWN_LENGTH").set_index("arm")
    rows = rows.loc[[arm for arm in searches.ARMS if arm in rows.index]]
    shares = {
        "within 1.5 L %": "within_1_5",
        "2 L": "within_2",
        "3 L": "within_3",
        "at any price": "answered",
        "same seconds": "at_same_seconds",
    }
    table = {title: (100 * rows[name]).map("{:.0f}".format) for title, name in shares.items()}
    table["tokens / L"] = rows["tokens_per_answer"].map("{:.2f}".format)
    table["per token"] = rows["tokens_per_token"].map("{:.2f}".format)
    table["reward"] = rows["reward"].map("{:.3f}".format)
    shown = pd.DataFrame(table, index=rows.index.map(searches.ARMS).rename("arm")).reset_index()
    plain = rows.iloc[0]
    return shown.to_markdown(index=False, disable_numparse=True) + (
        f"\n\n{plain['n_prompts']} prompts, L {SHOWN_LENGTH}, S {plain['S']:.2f}. *tokens / L* are "
        "sampled for an answer, *per token* for each token of the answers."
    )


def output(page: str, base: Path) -> str:
    """Return the output of the first Python block of a page, and draw the tree of its answer."""
    text = (base / page).read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    printed = io.StringIO()
    names: dict = {}
    with redirect_stdout(printed):
        exec(compile(code, page, "exec"), names)
    if "answer" in names:
        replace_file(base / TREE, names["answer"].tree(masked=False)._repr_svg_() + "\n")
    return f"```\n{printed.getvalue().rstrip()}\n```"


def filled(page: str, base: Path) -> str:
    """Return the text of a page with all its blocks written again.

    Raises
    ------
    RunError
        When a file that a block shows is not there.
    """

    def write(match: re.Match) -> str:
        start, kind, name, end = match.groups()
        return f"{start}\n{WRITERS[kind](name, base)}\n\n{end}"

    return BLOCK.sub(write, page)


WRITERS = {
    "table": committed_table,
    "arms": arms,
    "output": output,
    "fidelity": statements,
    "claims": claim_verdicts,
    "searches": search_arms,
    "judged": outside_judge,
}


def main(pages: Sequence[str] = PAGES) -> None:
    """Write the blocks of pages."""
    base = root()
    try:
        for page in pages:
            path = base / page
            replace_file(path, filled(path.read_text(encoding="utf-8"), base))
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:] or PAGES)
