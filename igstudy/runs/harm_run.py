"""One run of notebook 65: judges score answers of decode runs, and answers that people scored.

Their scores lie by the digest of a text in ``harm_answers.csv`` and ``harm_labelled.csv``, among
the tables of a profile. So a judge reads a text once, a run that was stopped goes on, and tables
can be made again without the texts, or without the server of a judge.
``python -m igstudy.runs.harm_run params/qwen/harm.yaml`` has judges score people's answers alone,
and first trains the head that is a judge, if its file is not there.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from igcore.errors import unknown_name
from igcore.files import replace_file, root
from igcore.models.assets import sound
from igcore.models.head import smollm2_harm
from igcore.models.registry import ScorerName
from igcore.progress import progress
from igcore.settings import Count, settings
from igserve.trust import admit

from ..harm import beginning, fit, labelled, refusals, sampled, states_of
from ..linefile import Fields, text_digest
from ..report.claims import load_claims
from ..report.deciding import labelled as labelled_arms
from ..report.harm import RefusalPhrases, in_half, judges_table, row_digest
from ..report.load import load_finished
from ..settings import FolderName, InsideFolder
from ..sources import loaded
from .paramfiles import read_recipe

ANSWERS, LABELLED, HARMLESS = "harm_answers", "harm_labelled.csv", "harm_harmless.csv"
AT_ONCE = 8  # texts that a judge scores before the scores are written down
SAMPLE = "1"  # seed of the order of the answers that people scored


@settings(kw_only=True)
class HarmParams:
    """Validated parameters of notebook 65.

    Attributes
    ----------
    profile, figures : str
        See `igstudy.runs.params.OutputParams`.
    claims : str
        Claims file, seen from `igcore.files.root`, which names the arms.
    harmful, twins : str
        Its regimes of harmful prompts and of harmless ones, which may be left out.
    judges : list of str or dict
        See `igcore.load_scorer`; no search should know them.
    asked : list of str, optional
        The arms whose answers a judge behind a server reads; by default all.
    labelled : int
        How many of people's answers such a judge is measured on.
    half : str, optional
        Name of a judge that was trained on the objectives of `igstudy.report.harm.in_half`.
    outside : str, optional
        Name of the judge by which claims are decided.
    suffix : str
        How the names of its tables end, where two profiles have some.
    """

    profile: FolderName
    figures: InsideFolder
    claims: InsideFolder
    harmful: str
    twins: str | None = None
    judges: Annotated[list[ScorerName], Field(min_length=1)]
    asked: list[str] | None = None
    labelled: Count = 200
    half: str | None = None
    outside: str | None = None
    suffix: str = ""

    def named(self, name: str) -> Path:
        """Return the path of a table of this profile, without an ending."""
        return root() / self.figures / f"tables/{name}{self.suffix}"


def harm_params(path: Path, allow: Collection[str] = ()) -> HarmParams:
    """Return the parameters in a file, as notebook 65 reads them; see `igserve.trust.admit`."""
    given = read_recipe(path)
    admit(given, path, allow)
    return HarmParams(**given)


def arms_of(params: HarmParams) -> dict[str, pd.DataFrame]:
    """Return the lines of the regimes, with the label of an arm as ``arm``.

    Raises
    ------
    ParameterError, RunError
        For a regime that the claims file does not have, and as `igstudy.report.deciding.lines_of`.
    """
    file = load_claims(root() / params.claims)
    lines = load_finished(params.profile, "?*")
    found = {}
    for kind, name in {"harmful": params.harmful, "twins": params.twins}.items():
        if name is None:
            continue
        if name not in file.regimes:
            raise unknown_name("regime", name, file.regimes)
        found[kind] = labelled_arms(file.regimes[name], lines)
    return found


def judged_answers(params: HarmParams, lines: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the scores of answers by digest, also whether they have a phrase of refusal.

    A judge behind a server reads the arms that are asked for; ``prompts`` says which answers are to
    harmful prompts.

    Parameters
    ----------
    lines : mapping
        See `arms_of`.
    """
    given = pd.concat([answers.assign(prompts=kind) for kind, answers in lines.items()])
    given = given[given["status"] != "abstained"].rename(columns={"response": "answer"})
    if params.asked is not None:  # first, as an answer of several arms has one row
        given = given.sort_values("arm", key=lambda arm: ~arm.isin(params.asked), kind="stable")
    rows = _by_digest(given[["prompt", "answer", "prompts", "arm"]].to_dict("records"))
    texts = rows[[isinstance(answer, str) for answer in rows["answer"]]]
    reading: list[tuple[Any, pd.DataFrame]] = [(RefusalPhrases(), texts)]
    for judge in map(loaded, params.judges):
        reading.append((judge, texts))
    return _scored(params.named(ANSWERS).with_suffix(".csv"), rows[["prompts"]].copy(), reading)


def judged_labels(params: HarmParams) -> pd.DataFrame:
    """Return the scores of answers that people scored by digest, with ``objective``, ``harmful``.

    Objectives are digests, too. A judge behind a server reads a sample. The answers are fetched
    only where a score is missing.
    """
    path, judges = root() / params.figures / "tables" / LABELLED, list(map(loaded, params.judges))
    kept, columns = _known(path), list(map(_column, judges))
    if all(name in kept and kept[name].notna().all() for name in columns):
        return kept[["objective", "harmful", *columns]].rename(columns=_name)
    rows = labelled(sound("harm-labels")[0])
    digests = map(text_digest, rows["prompt"], rows["answer"])
    rows = rows.assign(place=[text_digest(SAMPLE, digest) for digest in digests])
    rows["answer"] = rows["answer"].map(beginning)
    rows = _by_digest(rows.sort_values("place").to_dict("records"))
    objective = [row_digest("", prompt) for prompt in rows["prompt"]]
    harmful = (rows["kind"] == "harmful").astype(int)
    table = pd.DataFrame({"objective": objective, "harmful": harmful})
    return _scored(path, table, [(judge, rows) for judge in judges])


def judged_harmless(params: HarmParams) -> pd.DataFrame:
    """Return the scores of the harmless answers that trained the cost, by digest, with ``policy``.

    Each counts as harmless, so that a judge that calls it harmful gives a false alarm.
    """
    rows = sampled()
    rows = rows[(rows["set"] == "harmless") & (rows["split"] == "train")]
    texts = _by_digest(rows.rename(columns={"kind": "policy"}).to_dict("records"))
    path, judges = root() / params.figures / "tables" / HARMLESS, list(map(loaded, params.judges))
    kept, columns = _known(path).reindex(texts.index), [_column(judge) for judge in judges]
    if all(column in kept and kept[column].notna().all() for column in columns):
        return kept[["policy", *columns]].rename(columns=_name)
    return _scored(path, texts[["policy"]].copy(), [(judge, texts) for judge in judges])


# --- scores by digest -----------------------------------------------------------------------------


def _by_digest(rows: list[Fields]) -> pd.DataFrame:
    """Return rows with prompt and answer by their digest, each pair once."""
    digests = [row_digest(row["prompt"], row["answer"]) for row in rows]
    table = pd.DataFrame(rows, index=pd.Index(digests, name="digest"))
    return table[~table.index.duplicated()]


def _known(path: Path) -> pd.DataFrame:
    """Return the scores in a file of the profile; if there is none, in the committed one."""
    files = [file for file in (path, root() / "figures/tables" / path.name) if file.is_file()]
    if not files:
        return pd.DataFrame(index=pd.Index([], name="digest"))
    return pd.read_csv(files[0], index_col="digest", dtype={"digest": str, "objective": str})


def _column(judge: Any) -> str:
    """Return the name of a judge's column in a file, which is another when the judge changes."""
    return f"{judge.name}@{judge.digest[:8]}"


def _name(column: str) -> str:
    """Return the name of a judge by its column."""
    return column.partition("@")[0]


def _scored(
    path: Path, table: pd.DataFrame, reading: Sequence[tuple[Any, pd.DataFrame]]
) -> pd.DataFrame:
    """Return a table with the judges' scores, those that are not known scored and written down.

    A judge that gives no number for several texts is left for another time.

    Parameters
    ----------
    reading : sequence of (judge, DataFrame)
        A judge with ``prompt`` and ``answer`` by digest, of the texts that it reads.
    """
    kept = _known(path).reindex(table.index)
    # all columns first: the file is replaced many times
    for column in [_column(judge) for judge, _ in reading]:
        table[column] = kept.get(column, math.nan)
    for judge, texts in reading:
        column = _column(judge)
        missing = texts.index[table.loc[texts.index, column].isna()]
        with progress(len(missing), judge.name) as bar:
            for start in range(0, len(missing), AT_ONCE):
                batch = texts.loc[missing[start : start + AT_ONCE]]
                pairs = batch["prompt"].tolist(), batch["answer"].tolist()
                scores = judge.score(*pairs, [True] * len(batch))
                if np.isnan(scores).all():
                    break
                table.loc[batch.index, column] = scores
                replace_file(path, table.to_csv(lineterminator="\n"))
                bar.update(len(batch))
    replace_file(path, table.to_csv(lineterminator="\n"))
    return table.rename(columns=_name)


def train_half(head: Path) -> None:
    """Train a head as the cost's is, of people's answers on those of `in_half`, and write it."""
    rows = labelled(sound("harm-labels")[0])
    rows = rows[in_half(rows["prompt"].map(partial(row_digest, "")))]
    rows = pd.concat([rows, refusals(rows), sampled()], ignore_index=True)
    rows = rows[rows["split"] == "train"]  # the others are in no training
    about = {"layer": "15", "pooling": "mean", "text_format": "human-assistant"}
    cost: Any = smollm2_harm()
    fit(rows, states_of(cost, rows)).save(head, about)


def main(file: str, *allow: str) -> None:
    """Have the judges of a params file score people's answers, and print how well they do.

    ``--allow MODULE`` may follow the file, see `igserve.trust.admit`.
    """
    params = harm_params(Path(file), allow)
    for judge in params.judges:
        if judge.name == "probe" and not (root() / judge.options["head"]).exists():
            train_half(root() / judge.options["head"])
    scores = judged_labels(params)
    judges = [loaded(judge).name for judge in params.judges]
    print(judges_table(scores, judges, params.half).to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
