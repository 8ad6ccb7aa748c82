"""Tests of params files as a whole: grids, changes and where runs go."""

from pathlib import Path

import pytest
import yaml

from igcore.errors import ParameterError
from igserve.yamlfile import parsed, read_yaml
from igstudy.runs.paramfiles import ParamFiles, merged, read_recipe


def folder(tmp_path, **files) -> Path:
    """Write params/paper with these files and params/small with one."""
    for name, content in (
        files | {"../small/critic-raw": {"profile": "small", "run": "raw", "limit": 9}}
    ).items():
        path = tmp_path / "paper" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path


def test_a_grid_has_a_run_for_every_point(tmp_path):
    """Bug: a name with a dot in it is a suffix to Snakemake's patterns."""
    given = {
        "profile": "paper",
        "run": "decode-a",
        "grid": {"keep": [1, 2], "budget": [0.5, 1.0]},
        "seed": 3,
    }
    files = ParamFiles("paper", base=folder(tmp_path, **{"decode-a": given}))
    runs = files.runs()
    assert list(runs) == [f"decode-a-keep-{k}-budget-{b}" for k in (1, 2) for b in ("0_5", "1_0")]
    assert runs["decode-a-keep-2-budget-0_5"] == {
        "profile": "paper", "run": "decode-a-keep-2-budget-0_5", "seed": 3, "keep": 2,
        "budget": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("decode-a", {"run": "decode-a"}),
        ("regime-a", {"run": "regime-a"}),
        ("critic-a", {"run": "a"}),
        ("judge-a", {"run": "a", "figures": "runs/paper/figures"}),
    ],
)
def test_the_place_of_a_file_says_what_it_leaves_out(tmp_path, name, placed):
    """Guards recipes: a file has what differs from a default, and no path of its own."""
    path = folder(tmp_path, **{name: {"seed": 3}}) / f"paper/{name}.yaml"
    assert read_recipe(path) == {"profile": "paper", "seed": 3} | placed
    given = {"profile": "other", "run": "b", "figures": "runs/x"}
    path.write_text(yaml.safe_dump(given))
    assert read_recipe(path) == given


def test_a_named_point_has_settings_of_its_own(tmp_path):
    """Guards a point that takes settings from another, and the product with a grid."""
    given = {"profile": "paper", "run": "decode-a", "seed": 3, "strict": False}
    given |= {"points": {"printed": {"strict": True}, "repaired": {}}, "grid": {"keep": [1, 2]}}
    runs = ParamFiles("paper", base=folder(tmp_path, **{"decode-a": given})).runs()
    found = {run: (settings["strict"], settings["keep"]) for run, settings in runs.items()}
    assert found == {
        "decode-a-printed-keep-1": (True, 1),
        "decode-a-printed-keep-2": (True, 2),
        "decode-a-repaired-keep-1": (False, 1),
        "decode-a-repaired-keep-2": (False, 2),
    }


@pytest.mark.parametrize("points", [{}, ["a"], {"a": None}, None, {"a/b": {}}])
def test_points_are_names_with_settings(tmp_path, points):
    """Guards a list of names, a point without settings, and a name that no folder can have."""
    given = {"profile": "paper", "run": "decode-a", "points": points}
    with pytest.raises(ParameterError, match="parameter points.*: |cannot name a fol"):
        ParamFiles("paper", base=folder(tmp_path, **{"decode-a": given})).runs()


def test_changes_reach_the_settings_they_name_and_move_the_runs(tmp_path):
    """Bug: a rehearsal that read the critics of the real runs, or gave a notebook a parameter that
    it does not have.
    """
    decode = {
        "profile": "paper", "run": "decode-a", "limit": None, "value": "runs/paper/critics/x/value",
        "budget": 0.0,
    }  # fmt: skip
    base = folder(
        tmp_path, **{"decode-a": decode, "critic-x": {"profile": "paper", "run": "x", "epochs": 50}}
    )
    changes = {"profile": "tried", "every": {"limit": 2}, "critic": {"critics": {}}}
    files = ParamFiles("paper", changes, base=base)
    assert files.profile == "tried"
    assert files.runs()["decode-a"] == decode | {
        "profile": "tried",
        "limit": 2,
        "value": "runs/tried/critics/x/value",
    }
    assert files.read(base / "paper" / "critic-x.yaml") == {
        "profile": "tried",
        "run": "x",
        "epochs": 50,
        "limit": 2,
        "critics": {},
    }
    assert files.read(base / "small" / "critic-raw.yaml") == {
        "profile": "small",
        "run": "raw",
        "limit": 9,
    }


def test_a_change_keeps_what_it_does_not_name():
    """Bug: a rehearsal that gave every critic other features, because it made them small."""
    old = {"critics": {"a": {"width": 9, "lr": 1}, "b": {"width": 8}}, "prompts": {"name": "x"}}
    assert merged(old, {"critics": {"every": {"width": 2}, "b": {"lr": 3}}}) == {
        "critics": {"a": {"width": 2, "lr": 1}, "b": {"width": 2, "lr": 3}},
        "prompts": {"name": "x"},
    }
    named = {"prompts": {"name": "y"}, "critics": None}
    assert merged(old | {"prompts": {"name": "x", "part": "test"}}, named) == named
    assert merged({"grid": {"seed": [0]}}, {"grid": {"seed": [1, 2]}}) == {"grid": {"seed": [1, 2]}}
    assert old["critics"]["a"]["width"] == 9


def test_kinds_are_told_apart_by_the_whole_word(tmp_path):
    """Bug: "critic-search.yaml" of another kind, or "decoder-x.yaml", taken for a run."""
    base = folder(
        tmp_path, **{name: {"run": name} for name in ("decode-b", "decode-a", "decoder-x", "judge")}
    )
    files = ParamFiles("paper", base=base)
    assert [path.stem for path in files.files("decode")] == ["decode-a", "decode-b"]
    assert files.named("judge") == {"judge": base / "paper/judge.yaml"}


def test_a_limit_keeps_the_share_of_the_hardest_and_whole_sets_whole(tmp_path):
    """Bug: a set of harmless prompts cut short by the limit of the others."""
    hard = {"profile": "paper", "run": "decode-a", "limit": 16, "hardest": 8}
    whole = {"profile": "paper", "run": "decode-b", "limit": 80}
    files = ParamFiles(
        "paper", limit=48, base=folder(tmp_path, **{"decode-a": hard, "decode-b": whole})
    )
    runs = files.runs()
    assert (runs["decode-a"]["limit"], runs["decode-a"]["hardest"], runs["decode-b"]["limit"]) == (
        48,
        24,
        80,
    )


@pytest.mark.parametrize("name", ["", "../x", "$(touch X)", 2024, None])
def test_the_folder_and_the_changed_profile_are_plain_names(name):
    """Bug: a walk that reads or writes outside its folders."""
    for given in ({"folder": name}, {"folder": "paper", "changes": {"profile": name}}):
        with pytest.raises(ParameterError) as caught:
            ParamFiles(**given)
        assert f" is {name!r}, which cannot name a folder; give text of the letters" in str(
            caught.value
        )


@pytest.mark.parametrize("kind", ["critic", "decode", "regime", "judge"])
@pytest.mark.parametrize("run", ["decode-$(touch X)", None])
def test_a_bad_name_of_a_run_of_any_kind_is_refused_with_its_file(tmp_path, kind, run):
    """Bug: a command in the name of a critic's run, which the shell would find in the path of its
    notebook.
    """
    given = {f"{kind}-a": {"profile": "paper", "run": run}}
    with pytest.raises(ParameterError) as caught:
        ParamFiles("paper", base=folder(tmp_path, **given)).runs()
    assert f"{tmp_path}/paper/{kind}-a.yaml: parameter run is {run!r}" in str(caught.value)


@pytest.mark.parametrize("kind", ["critic", "decode", "regime", "judge"])
def test_a_file_belongs_to_its_folder(tmp_path, kind):
    """Bug: a file copied into a profile of one's own that goes on writing into the old one, or a
    name that is a command.
    """
    for profile in ("small", "../paper", None):
        given = {"profile": profile, "run": "a"}
        with pytest.raises(
            ParameterError, match=f"^profile of {tmp_path}/paper/{kind}-a.yaml is {profile!r}"
        ):
            ParamFiles("paper", base=folder(tmp_path, **{f"{kind}-a": given})).runs()
    (tmp_path / f"paper/{kind}-a.yaml").rename(tmp_path / f"paper/{kind}-$(touch X).yaml")
    with pytest.raises(
        ParameterError, match=r"without .yaml is '\w+-\$\(touch X\)', which cannot name a folder"
    ):
        ParamFiles("paper", base=tmp_path).runs()
    (tmp_path / f"paper/{kind}-$(touch X).yaml").rename(tmp_path / f"paper/{kind}-a.yaml")
    (tmp_path / f"paper/{kind}-a.yaml").write_text("- run")
    with pytest.raises(
        ParameterError, match=f"{kind}-a.yaml cannot be read .*; it must be a mapping of settings"
    ):
        ParamFiles("paper", base=tmp_path).runs()


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ({"methods": [["base"]]}, "a run of the grid of .*base.*, which cannot name a folder"),
        ({"seed": [0], "critic": ["runs/x"]}, "is 'decode-a-seed-0-critic-runs/x', which cannot"),
        ({"policy": ["$(touch X)"]}, r"is 'decode-a-policy-\$\(touch X\)', which cannot"),
        ({"budget": [1e16]}, r"is 'decode-a-budget-1e\+16', which cannot"),
        ({"policy": "raw"}, "parameter grid.policy is 'raw': it must be a valid list"),
        ({name: [1] * 10 for name in "abcde"},
         "make 100000 runs, and may make 10000; give them fewer"),
        ({"seed": []}, "parameter grid.seed is .*: it must have at least 1 item"),
        (["seed"], "parameter grid is .*: it must be a valid dictionary"),
        ({"budget": [1.5, "1_5"]},
         "makes a run 'decode-a-budget-1_5', as another file or point does; give one"),
    ],
)  # fmt: skip
def test_a_grid_makes_names(tmp_path, grid, sentence):
    """Bug: a list in the name of a folder, text taken letter by letter, a point that takes the
    place of another.
    """
    file = {"profile": "paper", "run": "decode-a", "grid": grid}
    files = ParamFiles("paper", base=folder(tmp_path, **{"decode-a": file}))
    with pytest.raises(ParameterError, match=sentence):
        files.runs()


def test_two_files_do_not_make_one_run(tmp_path):
    """Bug: of two files of one run, the first was left out without a word; a critic and a judge may
    be called the same.
    """
    one = {"profile": "paper", "run": "a"}
    base = folder(tmp_path, **{"critic-a": one, "judge-a": one, "decode-a": one})
    ParamFiles("paper", base=base).runs()
    sentence = "paper/regime-a.yaml makes a run 'a', as another file or point does"
    with pytest.raises(ParameterError, match=sentence):
        ParamFiles("paper", base=folder(tmp_path, **{"regime-a": one})).runs()


@pytest.mark.parametrize("limit", [0, None, "16", -4])
def test_a_share_of_nothing_is_left_to_the_notebook(tmp_path, limit):
    """Bug: a ZeroDivisionError, and a TypeError, of a limit that no notebook takes."""
    given = {"profile": "paper", "run": "decode-a", "limit": limit, "hardest": 2}
    files = ParamFiles("paper", limit=8, base=folder(tmp_path, **{"decode-a": given}))
    assert files.runs()["decode-a"]["limit"] == limit


@pytest.mark.parametrize("changes", [{"evry": {"seed": 1}}, {"every": 3}, {"critic": ["limit"]}])
def test_changes_are_of_files_that_there_are(changes):
    """Bug: a misspelt kind changed nothing, and a number ended in a traceback."""
    name = next(iter(changes))
    with pytest.raises(ParameterError, match=f"unknown change, .*: '{name}'; .* decode, every"):
        ParamFiles("paper", changes)


# --- YAML files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # the last of two values won in silence
        ("a: 1\nkeep: 2\nseed: 0\nkeep: 4\n", 'line 4: found duplicate key "keep"'),
        ("search: {rounds: 1, keep: 2, rounds: 3}", 'line 1: found duplicate key "rounds"'),
        ("points:\n  one: {eta: 0.5}\n  one: {eta: 2.0}\n", 'line 3: found duplicate key "one"'),
        # tracebacks, and text of the parser's own with line ends and <unicode string>
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3: expected"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: \x07", "unacceptable character #x0007"),
        ("a: !!int x", "invalid literal for int"),
        ("a: !!python/name:os.system", "line 1: could not determine a constructor"),
        ("? {a: 1}\n: 2", "line 1: found unhashable key"),
        ("{" * 30_000, "recursion"),
        # a few lines that make a billion values, and a value without an end
        ("a: &x [1, 1]\nb: &y [*x, *x]\nc: [*y, *y]", "line 1: &x or its alias is not allowed"),
        ("a: 1\nb: &loop\n  c: *loop", "line 2: &loop or its alias is not allowed"),
        ("a: *none", "line 1: &none or its alias is not allowed"),
        ("? &key a\n: 1", "line 1: &key or its alias"),
    ],
)
def test_what_is_no_plain_yaml_is_one_sentence(text, said):
    """Bug: a budget given twice, and errors in the parser's own words."""
    with pytest.raises(ParameterError) as caught:
        parsed(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml cannot be read (") and said in str(caught.value)
    assert "\n" not in str(caught.value) and "unicode string" not in str(caught.value)


def test_values_are_those_of_yaml_1_2():
    """Bug: a seed of 010 that is 8, a text `on` that is true, 1:30 that is 90, and dates.

    Guards plain settings, quoted text that looks like a value, and what is written by igcore.
    """
    old = "a: 017\nb: -012\nc: 1:02:03\nd: 1:02.5\ne: on\nf: [No]\noff: 3\ng: 2026-11-25\nh: 1e-5"
    assert parsed(old, "") == {
        "a": 17, "b": -12, "c": "1:02:03", "d": "1:02.5", "e": "on", "f": ["No"], "off": 3,
        "g": "2026-11-25", "h": 1e-5,
    }  # fmt: skip
    text = "a: 10\nb: 0.5\nc: -3\nd: true\ne: null\nf: 1_000\ng: 0\nh: 'no'\ni: \"1:30\"\nj: 1.0e-5"
    plain = parsed(text, "")
    expected = [10, 0.5, -3, True, None, 1000, 0, "no", "1:30", 1e-5]
    assert list(plain.values()) == expected
    odd = {"x": ["010", "yes", "1:30", "2026-01-01", "<<", "&a", "*a"], "y": {"on": 1e-7}, "1": 2}
    assert parsed(yaml.safe_dump(odd), "") == odd
    assert parsed("{x: {a: 1}, y: {a: 1}}", "") == {"x": {"a": 1}, "y": {"a": 1}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"- a\n- b\n", r"it is \['a', 'b'\]"),
        (b"budget: 1\n2: 3\n", r"it is \{'budget': 1, 2: 3\}"),
        (b"\xff\xfe\x00", "can't decode byte"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path, content, why):
    path = tmp_path / "x.yaml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ParameterError, match=f"x.yaml cannot be read .*{why}.*; it must"):
        read_yaml(path)
