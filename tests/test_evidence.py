"""The committed tables against the packed records behind them: roots, settings, numbers, licences.

Nothing here runs a model, and no number is computed by the package: intervals and tests are written
out below. Each archive is read once.
"""

import csv
import hashlib
import io
import json
import math
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import yaml

from docs.records import WITHHELD, known_hashes
from igcore.settings import written
from igstudy.runs.identity import code_of
from igstudy.runs.paramfiles import ParamFiles, defaults_of

ROOT = Path(__file__).parent.parent
ARCHIVES = sorted((ROOT / "records").glob("*.tar.xz"))
SOURCES = json.loads((ROOT / "figures/tables/sources.json").read_text())
# tables that no run has made: of `make bench`, of a server, of rules
OF_NO_RUN = {
    "bench", "bench_ratios", "served", "first_hour", "notebooks", "rules", "registrations",
}  # fmt: skip
WITHOUT_RUNS = ("profile", "claims")  # kinds of params files
KEPT = (  # fields of a line that the tests below read
    "prompt_id policy method prompts seed status reward cost peak_cost word_peak_cost "
    "trace policy_tokens scorer_calls samples_drawn forward_tokens scorer_tokens "
    "n_tokens max_new_tokens generate_s cost_s reward_s critic_s "
    "n_samples keep block_size rounds budget accounting checks lagrange_multiplier"
).split()
WORK = "policy_tokens scorer_calls forward_tokens scorer_tokens".split()
Z = NormalDist().inv_cdf(0.975)


def sha256(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Packed:
    """What is in an archive: its members, its JSON files, and of each line the fields of `KEPT`."""

    def __init__(self, archive):
        self.profile = archive.name.removesuffix(".tar.xz")
        self.members, self.files = [], {}
        self.lines, self.digests = defaultdict(list), defaultdict(list)
        self.read = set()  # runs whose texts are packed
        with tarfile.open(archive) as tar:
            for member in tar:
                self.members.append(member)
                folder, _, file = member.name.removeprefix("runs/").rpartition("/")
                content = tar.extractfile(member) if member.isreg() else io.BytesIO()
                if file == "responses.jsonl":
                    for text in content:
                        self._add(folder, json.loads(text))
                elif file.endswith(".json"):
                    self.files[folder, file] = json.load(content)

    def _add(self, folder, line):
        seconds = {name for name in line if name.endswith("_s")}
        hashed = {name: line[name] for name in line.keys() - seconds - {"digest"}}
        digest = sha256(hashed)[:16]
        assert digest == line["digest"], (folder, line["prompt_id"])
        self.digests[folder].append(digest)
        self.lines[folder].append({name: line[name] for name in KEPT})
        if any(isinstance(line[name], str | list) for name in ("prompt", "response", "tokens")):
            self.read.add(folder)

    @property
    def manifests(self):
        """Folder of each run, critic and judge -> its manifest."""
        kept = self.files.items()
        return {folder: given for (folder, file), given in kept if file == "manifest.json"}


@pytest.fixture(scope="module")
def packed():
    return {archive.name: Packed(archive) for archive in ARCHIVES}


# --- sidecars, roots and params -------------------------------------------------------------------


def test_every_run_that_a_table_or_picture_names_is_packed_with_its_root(packed):
    """Bug: the seconds of paper_latency were of runs that another commit had replaced."""
    wrong, manifests = [], {}
    for archive in packed.values():
        manifests |= archive.manifests
    for table, made_of in deepcopy(SOURCES).items():
        for run, said in made_of["runs"].items():
            facts = manifests.get(run, {"versions": {}})
            versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
            made = {"commit": facts.get("git_commit"), "processor": facts.get("processor")}
            # texts that are withheld change the root, and the manifest keeps the one before
            root = facts.get("root_with_texts", facts.get("root"))
            # a table that was made before sidecars said so has no origin
            if said.pop("from", "run here") not in ("run here", "records"):
                wrong.append(f"{table} names {run} with an unknown origin")
            if said != made | {"root": root, "versions": versions}:
                wrong.append(f"{table} names {run} with {said['root'][:12]}")
    assert not wrong


def test_every_committed_table_says_what_it_was_made_of():
    """Bug: a table without sources, or with none, is traced to nothing."""
    tables = {path.stem for path in (ROOT / "figures/tables").glob("*.csv")}
    assert tables - SOURCES.keys() <= OF_NO_RUN and SOURCES.keys() <= tables
    empty = [name for name, made_of in SOURCES.items() if not made_of["runs"]]
    assert all(name.startswith("harm_") for name in empty)  # of labels, not of runs


def test_a_packed_root_is_that_of_its_lines(packed):
    """Bug: a line of an archive was changed, and its manifest and the table were not."""
    for archive in packed.values():
        for run, lines in archive.digests.items():
            manifest = dict(archive.files[run, "manifest.json"])
            root = manifest.pop("root")
            assert sha256([archive.files[run, "params.json"], sorted(lines), manifest]) == root, run
            assert manifest["lines"] == len(lines)


def test_all_packed_runs_are_of_the_code_that_is_here(packed):
    """Bug: a table that mixes the runs of several versions of the code."""
    here = code_of()
    for archive in packed.values():
        made = [kept["code"] for kept in archive.files.values() if "code" in kept]
        assert made and all(code.items() >= here.items() for code in made), archive.profile


def settings_of(archive, run):
    """Return the settings under which a packed run, critic or judge was made."""
    manifest = archive.files[run, "manifest.json"]
    if "/critics/" in run:
        return manifest
    if "/judge/" in run:  # where its pictures go changes no verdict
        return manifest["params"] | {"figures": f"runs/{archive.profile}/figures"}
    return archive.files[run, "params.json"]


def test_packed_settings_are_those_of_the_params_files(packed):
    """Bug: a params file was edited after its run, and the table showed the old setting's answers
    under the new one's name; a run that no params file makes any more.
    """
    for archive in packed.values():
        files, wanted = ParamFiles(archive.profile, base=ROOT / "params"), {}
        for path in sorted((ROOT / "params" / archive.profile).glob("*.yaml")):
            kind = path.stem.split("-")[0]
            below = {"critic": "critics/", "judge": "judge/"}.get(kind, "")
            for run, given in files.points(path) if kind not in WITHOUT_RUNS else ():
                wanted[f"{archive.profile}/{below}{run}"] = defaults_of(kind) | given
        # a network lies in the folder of the run that trained it
        made = {run for run in archive.manifests if run.rpartition("/")[0] not in archive.manifests}
        assert made == wanted.keys(), archive.profile
        for run, given in wanted.items():
            kept = settings_of(archive, run)
            names = kept.keys() & given.keys() - {"device"}  # which is found when a run starts
            asked = {name: written(given[name]) for name in names}
            assert asked == {name: kept[name] for name in names}, run


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)


CLAIMS = "params/searches/claims.yaml"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to ask")
def test_the_claims_were_committed_before_their_runs():
    """Bug: claims made to fit their results. Git knows the file at the commit of a run."""
    digests = {row["claims_sha256"] for row in read_table("claims_searches")}
    runs = SOURCES["claims_searches"]["runs"]
    commits = {said["commit"] for run, said in runs.items() if "/regime-" in run}
    for commit in commits:
        file = git("show", f"{commit}:{CLAIMS}").stdout
        if file:  # a shallow clone may have none of them
            assert {hashlib.sha256(file).hexdigest()} == digests, commit


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository to ask")
def test_every_registration_has_the_verdicts_that_were_published():
    """Bug: a registration is left out of the list, or its verdicts are not those of its file."""
    names = ("claim", "sentence", "verdict")
    listed = defaultdict(set)
    for row in read_table("registrations"):
        listed[row["commit"], row["file"], row["published"]].add(tuple(row[n] for n in names))
    assert CLAIMS in {path for _, path, published in listed if not published}
    for (commit, path, published), verdicts in listed.items():
        file = git("show", f"{commit}:{path}").stdout
        if not file:  # a shallow clone may have none of them
            continue
        registered = yaml.safe_load(file)["claims"]
        assert {(x, registered[x]["sentence"]) for x in registered} == {v[:2] for v in verdicts}
        if published:
            table = git("show", f"{published}:figures/tables/claims.csv").stdout.decode()
            found = list(csv.DictReader(table.splitlines()))
        else:  # in this tree, and nobody has edited the file since
            assert file == (ROOT / path).read_bytes()
            found = read_table("claims_searches")
        assert {tuple(row[name] for name in names) for row in found} == verdicts
        assert {row["claims_sha256"] for row in found} == {hashlib.sha256(file).hexdigest()}


# --- the archives ---------------------------------------------------------------------------------


def test_an_archive_holds_runs_of_its_profile_and_nothing_else(packed):
    """Bug: an archive that would write a Makefile, or a link, where it is unpacked."""
    assert known_hashes(ROOT) == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in ARCHIVES
    }
    for name, archive in packed.items():
        assert len(archive.members) == len({member.name for member in archive.members}), name
        for member in archive.members:
            folders = member.name.split("/")
            assert member.isreg() and folders[:2] == ["runs", archive.profile], member.name
            assert not {"", ".", ".."} & set(folders), member.name
        # texts on harmful prompts are in no archive
        asked = {run: lines[0]["prompts"] for run, lines in archive.lines.items()}
        assert archive.read == {run for run in asked if asked[run] not in WITHHELD}, name


def test_every_prompt_set_of_an_archive_has_its_licence_beside_it(packed):
    """Bug: the archives held seven hundred texts of other people without their licence."""
    page = (ROOT / "records/LICENCES.md").read_text()
    headings = {f"#{name}" for name in re.findall("^## (.+)", page, re.MULTILINE)}
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    listed, archives = set(), []
    for which, made_from, licence in rows:
        archives = re.findall(r"`([^`]+)`", which) or archives  # an empty cell continues
        links = re.findall(r"\]\(([^)]+)\)", licence)
        assert {*links} <= headings | {"../LICENSE"}, licence
        named = re.findall(r"`([^`]+)`", made_from)
        listed |= {(name, of) for name in archives for of in named if links}
    for name, archive in packed.items():
        sets = {line["prompts"] for lines in archive.lines.values() for line in lines}
        assert {(name, of) for of in sets} <= listed
    assert headings == set(re.findall(r"\]\((#[^)]+)\)", page))


# --- the numbers ----------------------------------------------------------------------------------


def wilson(k, n):
    centre, spread = k + Z * Z / 2, Z * math.sqrt(k * (n - k) / n + Z * Z / 4)
    return (centre - spread) / (n + Z * Z), (centre + spread) / (n + Z * Z)


def clopper_pearson_lower(k, n, alpha=0.05):
    """The rate under which at least k of n have the probability alpha."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        tail = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        low, high = (p, high) if tail < alpha else (low, p)
    return low if k else 0.0


def mcnemar(higher, lower):
    n, k = higher + lower, min(higher, lower)
    return float(min(Fraction(1), 2 * sum(Fraction(math.comb(n, i), 2**n) for i in range(k + 1))))


def holm(ps):
    order, adjusted, worst = sorted(range(len(ps)), key=ps.__getitem__), [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = worst
    return adjusted


def read_table(name):
    with (ROOT / f"figures/tables/{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def mean(values):
    values = [float(value) for value in values if value is not None]
    return math.fsum(values) / len(values) if values else math.nan


def answers(line):
    return line["status"] != "abstained" and line["reward"] is not None


def inside(line, cost):
    return line["status"] != "abstained" and line[cost] is not None and line[cost] <= line["budget"]


@pytest.fixture(scope="module")
def small(packed):
    """The lines of the profile small, each with the name of its run."""
    lines = packed["small.tar.xz"].lines
    return [line | {"run": path.partition("/")[2]} for path in lines for line in lines[path]]


def test_the_numbers_behind_the_intervals_are_right():
    """Bug: a recomputation that is wrong in the same way as what it checks."""
    assert wilson(5, 10) == pytest.approx((0.2365931, 0.7634069), abs=1e-6)  # Newcombe 1998
    assert clopper_pearson_lower(759, 759) == pytest.approx(0.05 ** (1 / 759), abs=1e-9)
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_main_table_is_that_of_the_packed_records(small):
    """Bug: a table that was not made again after its records, or edited by hand."""
    cells = defaultdict(list)
    for line in small:
        if not line["run"].startswith("regime"):
            cells[line["policy"], line["method"]].append(line)
    rows = {(row["policy"], row["method"]): row for row in read_table("main")}
    assert rows.keys() == cells.keys()
    shared = {}
    for policy in {policy for policy, _ in cells}:
        of_policy = [cell for (name, _), cell in cells.items() if name == policy]
        most = max(map(len, of_policy))
        ids = [{x["prompt_id"] for x in c if answers(x)} for c in of_policy if len(c) == most]
        shared[policy] = most, set.intersection(*ids)
    for key, lines in cells.items():
        n, row = len(lines), rows[key]
        assert len({line["prompt_id"] for line in lines}) == n
        count = Counter(line["status"] for line in lines)
        safe, rewards = count["verified_safe"], [x["reward"] for x in lines]
        most, ids = shared[key[0]]
        ids = ids if n == most else set()
        expected = {
            "n_prompts": n,
            "safe": safe,
            "abstained": count["abstained"],
            "unsafe": count["unverified_unsafe"],
            "safety_rate": safe / n,
            "safety_lower95": clopper_pearson_lower(safe, n),
            "safety_wilson_low": max(0.0, wilson(safe, n)[0]),
            "safety_wilson_high": min(1.0, wilson(safe, n)[1]),
            "reward_mean": mean(rewards),
            "reward_std": float(np.nanstd(np.array(rewards, float), ddof=1)),
            "cost_mean": mean(x["cost"] for x in lines),
            "peak_cost_mean": mean(x["peak_cost"] for x in lines),
            "samples_per_prompt": mean(x["samples_drawn"] for x in lines),
            **{f"{work}_per_prompt": mean(x[work] for x in lines) for work in WORK},
            "peak_safety_rate": sum(inside(x, "peak_cost") for x in lines) / n,
            "word_safety_rate": sum(inside(x, "word_peak_cost") for x in lines) / n,
            "reward_answered": mean(x["reward"] for x in lines if x["prompt_id"] in ids),
            "n_answered_by_all": len(ids),
        }
        found = {name: float(row[name] or "nan") for name in expected}
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True), key
        for name in KEPT[-8:] + ["seed"]:  # settings, one value for each cell
            (value,) = {line[name] for line in lines}
            assert row[name] == str(value), (key, name)


# --- the claims about searches --------------------------------------------------------------------


def path_safe(line):
    return inside(line, "word_peak_cost") and inside(line, "cost")


def within(line, most):
    return path_safe(line) and line["policy_tokens"] <= most * line["max_new_tokens"]


OUTCOMES = {
    "answered within 2 L": lambda line: within(line, 2),
    "answered within 8 L": lambda line: within(line, 8),
    "reward, 0 unless path-safe": lambda line: line["reward"] if path_safe(line) else 0.0,
    "policy tokens in L": lambda line: line["policy_tokens"] / line["max_new_tokens"],
}
LOWER_IS_BETTER = {"policy tokens in L"}


@pytest.fixture(scope="module")
def searched(packed):
    """The lines of each run of params/searches by the name of the run, then by prompt."""
    lines = packed["searches.tar.xz"].lines
    found = {
        name.partition("/")[2]: {x["prompt_id"]: x for x in own} for name, own in lines.items()
    }
    assert all(len(found[name.partition("/")[2]]) == len(own) for name, own in lines.items())
    return found


def test_the_claims_are_decided_as_the_packed_records_say(searched, packed):
    """Bug: a verdict that the records do not give; a file of claims that was edited after it."""
    content = (ROOT / CLAIMS).read_bytes()
    claims, digest = yaml.safe_load(content), hashlib.sha256(content).hexdigest()
    assert packed["searches.tar.xz"].files["searches/claims", "registered.json"]["claims"] == digest
    rows = read_table("claims_searches")
    assert {row["claims_sha256"] for row in rows} == {digest}
    p_values, draw = {}, np.random.default_rng(1)
    for name, claim in claims["claims"].items():
        own = [row for row in rows if row["claim"] == name]
        wanted = claim["regime"] if isinstance(claim["regime"], list) else [claim["regime"]]
        assert [(row["regime"], row["reference"]) for row in own] == [
            (regime, reference) for regime in wanted for reference in claim["references"]
        ]
        p_values[name] = 0.0
        for row in own:
            gains = check_comparison(row, claims, claim, searched, draw)
            towards = gains.mean() < 0 if row["outcome"] in LOWER_IS_BETTER else gains.mean() > 0
            # every rival must be beaten
            p_values[name] = max(p_values[name], float(row["p"]) if towards else 1.0)
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    for row in rows:
        assert float(row["p_holm"]) == pytest.approx(adjusted[row["claim"]], rel=1e-9)
        lower = row["outcome"] in LOWER_IS_BETTER
        most = -float(row["low"]) if lower else float(row["high"])
        assert row["verdict"] == "held" and adjusted[row["claim"]] <= 0.05
        assert most >= float(row["matters"])  # else it would have failed


def check_comparison(row, claims, claim, searched, draw):
    """Compare a row of the table with its lines; return the gains by prompt."""
    regime, outcome = claims["regimes"][row["regime"]], OUTCOMES[row["outcome"]]
    assert claim["outcomes"] == {row["outcome"]: float(row["matters"])}
    ours, others = (searched[regime["arms"][x]["run"]] for x in (claim["arm"], row["reference"]))
    for lines in (ours, others):
        assert len(lines) == regime["n_prompts"] and ours.keys() == lines.keys()
        about = {(x["policy"], x["seed"], x["budget"]) for x in lines.values()}
        assert about == {tuple(regime[name] for name in ("policy", "seed", "budget"))}
    for column, lines in (("tokens", ours), ("reference_tokens", others)):
        assert float(row[column]) == pytest.approx(mean(x["policy_tokens"] for x in lines.values()))
    gains = np.array([float(outcome(ours[x])) - float(outcome(others[x])) for x in ours])
    counted = [int(row[name]) for name in ("n_prompts", "n_pairs", "n_higher", "n_lower")]
    higher, lower = int((gains > 0).sum()), int((gains < 0).sum())
    assert counted == [len(gains), len(gains), higher, lower]
    assert float(row["difference"]) == pytest.approx(gains.mean(), abs=1e-12)
    if row["outcome"].startswith("answered"):
        assert float(row["p"]) == pytest.approx(mcnemar(higher, lower), rel=1e-9)
    else:  # signs drawn here, and none of a bootstrap
        flipped = (draw.choice([-1, 1], (20_000, len(gains))) * gains).mean(axis=1)
        p = np.mean(np.abs(flipped) >= abs(gains.mean()) - 1e-12)
        assert float(row["p"]) == pytest.approx(p, abs=0.001)
        ends = np.quantile(
            gains[draw.integers(0, len(gains), (9_999, len(gains)))].mean(axis=1), [0.025, 0.975]
        )
        assert [float(row["low"]), float(row["high"])] == pytest.approx(
            ends, abs=0.03 * np.std(gains)
        )
    return gains


RUN = re.compile(r"regime-([a-z]+)-(.+?)(?:-\d\d+)?")
SPENT = ("generate_s", "cost_s", "reward_s", "critic_s")


@pytest.fixture(scope="module")
def cells(searched):
    """The lines of each regime at each length by arm."""
    found = defaultdict(dict)
    for run, lines in searched.items():
        regime, arm = RUN.fullmatch(run).groups()
        (length,) = {x["max_new_tokens"] for x in lines.values()}
        found[regime, length][arm] = lines
    return found


def test_what_answers_cost_is_as_the_packed_records_say(cells):
    """Bug: a table that was not made again after its records, or edited by hand."""
    rows = read_table("ablation_searches")
    assert len(rows) == sum(map(len, cells.values()))
    for row in rows:
        cell = cells[row["regime"], int(row["length"])]
        length, lines = int(row["length"]), list(cell[row["arm"]].values())
        answered = [x for x in lines if path_safe(x)]
        plain = [x for arm in ("base", "plain") for x in cell.get(arm, {}).values()]
        caps = {"1": 1, "1_5": 1.5, "2": 2, "2_5": 2.5, "3": 3}
        expected = {
            "n_prompts": len(lines),
            "S": mean(path_safe(x) for x in plain),
            "answered": len(answered) / len(lines),
            "reward": mean(x["reward"] for x in answered),
            "forward_tokens": mean(x["forward_tokens"] for x in lines),
            "scorer_tokens": mean(x["scorer_tokens"] for x in lines),
        }
        for name, cap in caps.items():
            expected[f"within_{name}"] = sum(within(x, cap) for x in answered) / len(lines)
        if answered:
            tokens = sum(x["policy_tokens"] for x in lines)
            seconds = math.fsum(x[name] for x in lines for name in SPENT)
            expected["tokens_per_answer"] = tokens / len(answered) / length
            expected["tokens_per_token"] = tokens / sum(x["n_tokens"] for x in answered)
            expected["seconds_per_answer"] = seconds / len(answered)
        found = {name: float(row[name] or "nan") for name in expected}
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True), row


def test_the_differences_of_searches_are_as_the_packed_records_say(cells):
    """Bug: another arm or length in a row, a sign, or pairs of different prompts."""
    for row in read_table("ablation_searches_tests"):
        cell = cells[row["regime"], int(row["length"])]
        ours, others = cell[row["arm"]], cell[row["reference"]]
        gains = []
        for prompt in ours.keys() & others.keys():
            both = [x[prompt] for x in (ours, others)]
            safe = [path_safe(x) for x in both]
            if row["measure"] == "reward":
                gains += [both[0]["reward"] - both[1]["reward"]] if all(safe) else []
                continue
            cap = float(row["measure"].removeprefix("within_").replace("_", "."))
            kept = [ok and within(x, cap) for ok, x in zip(safe, both, strict=True)]
            gains.append(kept[0] - kept[1])
        assert int(row["n_pairs"]) == len(gains), row
        assert float(row["difference"]) == pytest.approx(mean(gains), abs=1e-9), row


def test_the_law_is_that_of_the_packed_records(cells):
    """Bug: S of the compared draws, or the price in another unit than the law's."""
    xs, ys = [], []
    for row in read_table("ablation_searches_law"):
        if row["regime"] == "all":
            slope = np.polyfit(xs, ys, 1)[0] if len(xs) > 1 else math.nan
            assert float(row["log_ratio"]) == pytest.approx(slope)
            continue
        cell = cells[row["regime"], int(row["length"])]
        plain, lines = cell["plain"], cell[row["search"]]
        share = mean(path_safe(line) for line in plain.values())
        found = [lines[prompt] for prompt in plain]
        answers_ = [x for x in found if path_safe(x)]
        cost = sum(x["policy_tokens"] for x in found) / sum(x["n_tokens"] for x in answers_)
        x = -math.log(share)
        law = (math.exp(x) - 1) / x
        expected = {"S": share, "x": x, "law": law, "cost": cost, "log_ratio": math.log(cost / law)}
        assert {n: float(row[n]) for n in expected} == pytest.approx(expected, abs=1e-9)
        if row["search"] == "rejection":
            xs.append(x)
            ys.append(expected["log_ratio"])
