"""Write the tables of the pages: ``make readme``, which is ``python -m docs.pages``.

A page has pairs of comments, ``<!-- table main -->`` and ``<!-- end -->``. The command replaces the
text between them:

* ``<!-- table main -->``: the table of that name in ``figures/tables``;
* ``<!-- claims searches -->``: the verdicts on the claims of a profile;
* ``<!-- decidable searches -->``: each verdict beside what imagined arms would get, and the power;
* ``<!-- searches numbers -->``: what an answer costs each arm of a regime of params/searches;
* ``<!-- fidelity paper -->``: the paper's statements and their form in the code;
* ``<!-- takes numbers -->``: what answers within the limit take, for a reader who knows no search;
* ``<!-- answers README.md -->``: what the model alone and the guard of the first Python block of a
  page answer to its questions.

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
from igstudy.files import replace_file, root
from igstudy.report import claims, deciding, searches
from igstudy.report.statistics import clopper_pearson

DOCS = "results harm experiments replication paper fidelity guard cards promise scorers reproduce"
PAGES = ("README.md", *(f"docs/{name}.md" for name in DOCS.split()))
BLOCK = re.compile(r"(<!-- (\w+) ([^>]+) -->\n).*?(<!-- end -->)", re.S)
TREE = "docs/tree.svg"
TAKES = {  # arm -> what a reader calls it who knows no search
    "base": "the model alone",
    "rejection": "whole answers, until one is within the limit",
    "guard-n2": "the paper's Algorithm 1 (two samples, four rounds)",
    "backtracking": "igcore's search: steps back (backtracking)",
}
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


def statements(_name: str, _base: Path) -> str:
    """Return the verdict on each statement of the paper."""
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


def could_go_either_way(profile: str, base: Path) -> str:
    """Return each verdict beside what a perfect and a useless arm would get, and the least power.

    Raises
    ------
    RunError
        When the claims were not decided.
    """
    planned = pd.read_csv(committed("claims_decidable.csv", base))
    decided = pd.read_csv(committed(f"claims_{profile}.csv", base))
    by_claim = planned.groupby("claim", sort=False)
    table = {
        "verdict": decided.groupby("claim")["verdict"].first(),
        "a perfect arm": by_claim["perfect_verdict"].first(),
        "an arm like its rivals": by_claim["useless_verdict"].first(),
        "least power": by_claim["power"].min().map("{:.2f}".format),
        "level of a test": by_claim["level"].first().map("{:.4f}".format),
        "Holm's p": decided.groupby("claim")["p_holm"].first().map("{:.1g}".format),
    }
    shown = pd.DataFrame(table, index=by_claim.groups.keys()).rename_axis("claim").reset_index()
    return shown.to_markdown(index=False, disable_numparse=True)


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
    }
    table = {title: (100 * rows[name]).map("{:.0f}".format) for title, name in shares.items()}
    table["tokens / L"] = rows["tokens_per_answer"].map("{:.2f}".format)
    table["reward"] = rows["reward"].map("{:.3f}".format)
    shown = pd.DataFrame(table).rename(searches.ARMS).rename_axis("arm").reset_index()
    plain = rows.iloc[0]
    return shown.to_markdown(index=False, disable_numparse=True) + (
        f"\n\n{plain['n_prompts']} prompts, L {SHOWN_LENGTH}, S {plain['S']:.2f}. *tokens / L* are "
        "sampled for an answer."
    )


def takes(regime: str, base: Path) -> str:
    """Return what answers within the limit take: counts with 95 % intervals, and tokens.

    Raises
    ------
    RunError
        When the runs of params/searches were not read.
    """
    every = pd.read_csv(committed("ablation_searches.csv", base))
    rows = every.query("regime == @regime and length == @SHOWN_LENGTH").set_index("arm")
    arms = pd.read_csv(committed("claims_arms_searches.csv", base))
    emitted = arms.query("regime == @regime").set_index("arm")
    table = []
    for arm, name in TAKES.items():
        row, n = rows.loc[arm], int(rows.loc[arm, "n_prompts"])
        early, found = (round(row[column] * n) for column in ("within_2", "answered"))
        low, high = (round(100 * end) for end in clopper_pearson(early, n))
        named = searches.ARMS[arm].partition(", M")[0]  # a claim names no number of rounds
        abstained = int(emitted.loc[named, "abstained"])
        sampled = row["tokens_per_answer"] * SHOWN_LENGTH * row["answered"]
        table.append(
            {
                "": name,
                f"within the limit after {2 * SHOWN_LENGTH} tokens": f"{early} of {n} "
                f"[{low}, {high} %]",
                "in the end": f"{found} of {n}",
                "over the limit": n - found - abstained,
                "no answer": abstained,
                "tokens a question": f"{sampled:.0f}",
            }
        )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def answers(page: str, base: Path) -> str:
    """Return the questions of the first Python block of a page with their answers, side by side.

    Numbers are bold. The tree of the first guarded answer becomes ``docs/tree.svg``.
    """
    text = (base / page).read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    with redirect_stdout(io.StringIO()):
        exec(compile(code, page, "exec"), names)
    guard, rows = names["guard"], []
    for question in names["questions"]:
        alone = next(guard.decode([question], method="base")).text
        guarded = guard(question, record=True)
        if not rows:
            replace_file(base / TREE, guarded.tree(masked=False)._repr_svg_() + "\n")
        by_guard = guarded.text + " (`abstained`)" * (guarded.status == "abstained")
        shown = [re.sub(r"\d+", r"**\g<0>**", " ".join(cell.split())) for cell in (alone, by_guard)]
        rows.append([question, *shown])
    columns = ["question", "the model alone", "with the guard"]
    return pd.DataFrame(rows, columns=columns).to_markdown(index=False, disable_numparse=True)


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
    "answers": answers,
    "takes": takes,
    "fidelity": statements,
    "claims": claim_verdicts,
    "decidable": could_go_either_way,
    "searches": search_arms,
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
