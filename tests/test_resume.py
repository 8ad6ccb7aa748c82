"""What may change between a stop and a resume: one thing at a time, on a real checkpoint of a tiny
model.

Every change that can alter an answer is noticed and named, and the file ends as that of a fresh
run; what cannot alter any is not.
"""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from copiedcode import edit, edit_json, edit_tensors, forget, know_code_from, swap_letters
from tiny import saved, tiny_model, tiny_tokenizer

from igcore import SCORERS, Guard, RunError, load_policy, search
from igcore.engine import sampling
from igcore.models import registry
from igcore.scorers import of_function
from igstudy import linefile, sources
from igstudy.commands import differences
from igstudy.runs import identity
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}:"
PROMPTS = ["one", "two words", "three", "a fourth", "five of them", "sixth"]
SPLIT, KEY = search.shares_of, sampling.random_key


class Letters:
    """A cost (or, below, a reward) that depends on every character."""

    name, digest, sign, unit = "letters", "v1", "higher is worse", "share"

    def score(self, prompts, responses, finished):
        return [sum(map(ord, text)) % 97 / 97 for text in responses]


def other_score(self, prompts, responses, finished):
    return [sum(map(ord, text)) % 89 / 89 for text in responses]


class Reward(Letters):
    name, sign = "codes", "higher is better"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A sharded checkpoint with an index, as large models come, and a prompt file beside it."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    saved(folder / "model", tiny_model(tokenizer), tokenizer, max_shard_size="20KB")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    assert (folder / "model/model.safetensors.index.json").exists()
    return folder


@pytest.fixture
def world(checkpoint, tmp_path, monkeypatch):
    """A copy of all that a run reads, which a test may change."""
    shutil.copytree(checkpoint, tmp_path / "world")
    monkeypatch.setitem(registry.SCORERS, "letters", Letters)
    monkeypatch.setitem(registry.SCORERS, "codes", Reward)
    return tmp_path / "world"


def params(world, **changes):
    settings = dict(
        profile="test",
        run="run",
        policy=str(world / "model"),
        prompts=str(world / "prompts.txt"),
        cost="letters",
        reward="codes",
        methods=["base", "best-of-n-augmented", "inferenceguard"],
        budget=0.5,
        n_samples=4,
        keep=2,
        block_size=3,
        max_new_tokens=6,
        group_size=2,
        device="cpu",
    )
    return DecodeParams(**(settings | changes))


@pytest.fixture
def stopped(world, tmp_path):
    """A run of which five lines were written before it was stopped, and the lines that it would
    have had.
    """
    run = decode_run(params(world), tmp_path / "run")
    whole = linefile.read(run.responses)
    run.responses.write_text("".join(json.dumps(line) + "\n" for line in whole[:5]))
    run.manifest.unlink()
    return run.folder, whole


def shake(path):
    edit_tensors(path, lambda state: {name: x + 0.3 * x.roll(1, -1) for name, x in state.items()})


def other_weights(world):
    for path in (world / "model").glob("model-*.safetensors"):
        shake(path)


def other_index(world):
    """The index names copies of the shards with other numbers; the shards stay where they were."""
    index = world / "model/model.safetensors.index.json"
    for path in (world / "model").glob("model-*.safetensors"):
        copy = path.with_name(f"z{path.name}")
        shutil.copy(path, copy)
        shake(copy)
    index.write_text(index.read_text().replace('"model-', '"zmodel-'))


def ends(world):
    vocabulary = json.loads((world / "model/tokenizer.json").read_text())["model"]["vocab"]
    letters = [vocabulary[c] for c in "aeiounst"]
    edit_json(world / "model/generation_config.json", eos_token_id=[256, *letters])


FILES = {  # what is changed -> how, and what the sentence names
    "tokenizer": (lambda w: swap_letters(w / "model/tokenizer.json"),
        "policy.files.tokenizer.json"),
    "template": (lambda w: edit(w / "model/chat_template.jinja", ":", "!"),
        "policy.files.chat_template.jinja"),
    "config": (lambda w: edit_json(w / "model/config.json", rms_norm_eps=0.5),
        "policy.files.config.json"),
    "end tokens": (ends, "policy.ends"),
    "weights": (other_weights, "policy.files.model-00001-of-"),
    # named before the index, and six are named
    "index": (other_index, "policy.files.model-00001-of-"),
    "prompts replaced": (
        lambda w: (w / "prompts.txt").write_text("\n".join([*PROMPTS[:3], "x", "y", "z"])),
        "chosen.digest",
    ),
    "prompts shortened": (lambda w: (w / "prompts.txt").write_text("\n".join(PROMPTS[:3])),
        "chosen.n"),
    "prompts longer": (
        lambda w: (w / "prompts.txt").write_text("\n".join([*PROMPTS, "seventh", "eighth"])),
        "chosen.n",
    ),
}  # fmt: skip


def resumed_like_fresh(world, folder, tmp_path, **changes):
    """Resume a run and make it anew elsewhere; return the lines of both."""
    again = linefile.read(decode_run(params(world, **changes), folder).responses)
    fresh = linefile.read(decode_run(params(world, **changes), tmp_path / "fresh").responses)
    assert differences(again, fresh) == []
    assert (folder / "manifest.json").exists()
    return again


@pytest.mark.parametrize("what", FILES)
def test_a_changed_file_is_noticed_and_the_run_ends_as_a_fresh_one(
    what, world, stopped, tmp_path, capsys
):
    """Bug: a tokenizer, template, config, end token or prompt that changed between stop and resume
    mixed two runs in one file.
    """
    (folder, whole), (change, named) = stopped, FILES[what]
    change(world)
    again = resumed_like_fresh(world, folder, tmp_path)
    assert differences(again, whole)  # the change does alter answers
    said = capsys.readouterr().out
    assert "changed since the last run in run" in said and named in said
    (aside,) = (tmp_path / ".replaced").glob("run.*/responses.jsonl")
    assert linefile.read(aside) == whole[:5] and str(aside.parent) in said


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Returns a function that lets the source of a module read as if it had been edited."""

    def edited(module, change):
        if module.startswith("igcore."):
            copied = know_code_from(monkeypatch, tmp_path)
            path = copied.joinpath(*module.split(".")).with_suffix(".py")
        else:
            path, real = tmp_path / "edited.py", sources.source_of
            shutil.copy(real(module), path)
            monkeypatch.setattr(sources, "source_of", lambda n: path if n == module else real(n))
        path.write_text(change(path.read_text()))

    yield edited
    forget()


def first(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    return change


CODE = {  # module -> an edit of its source, and the same for what is loaded
    "igcore.search": (
        first("i < n % len(beams)", "i > n % len(beams)"),
        (search, "shares_of", lambda beams, n: SPLIT(beams, n)[::-1]),
    ),
    "igcore.engine.sampling": (
        first("seed", "seeds"),
        (search, "random_key", lambda seed, *at: KEY(seed + 1, *at)),
    ),
    "test_resume": (first("% 97 / 97", "% 89 / 89"), (Letters, "score", other_score)),
}


@pytest.mark.parametrize("module", CODE)
def test_changed_code_is_noticed(module, world, stopped, tmp_path, monkeypatch, pretend, capsys):
    """Bug: answers of two samplers, or scores of two scorers, in one file."""
    folder, whole = stopped
    change, loaded = CODE[module]
    pretend(module, change)
    monkeypatch.setattr(*loaded)
    again = resumed_like_fresh(world, folder, tmp_path)
    assert differences(again, whole)
    package = module.partition(".")[0]
    assert f"code.{package} changed since the last run in run" in capsys.readouterr().out


FOLDER = {  # what happens to the folder -> how, and what is said
    "params.json deleted": (lambda f: (f / "params.json").unlink(), "params.json was missing"),
    "manifest deleted": (lambda f: (f / "manifest.json").unlink(missing_ok=True), ""),
    "responses deleted": (lambda f: (f / "responses.jsonl").unlink(), ""),
}


@pytest.mark.parametrize("what", FOLDER)
@pytest.mark.parametrize("finished", [False, True])
def test_a_folder_that_was_tampered_with_is_made_whole(
    what, finished, world, stopped, tmp_path, capsys
):
    """Bug: lines of whatever settings were adopted when params.json was gone."""
    (folder, whole), (change, said) = stopped, FOLDER[what]
    if finished:
        decode_run(params(world), folder)
    capsys.readouterr()
    change(folder)
    again = resumed_like_fresh(world, folder, tmp_path)
    assert differences(again, whole) == []
    out = capsys.readouterr().out
    assert re.search(said, out) if said else ".replaced" not in out


def test_a_model_that_moved_is_the_same_model(world, stopped, tmp_path, capsys):
    """Guards caches and mounts: what counts is the content of the files, and settings name the
    place.
    """
    folder, whole = stopped
    before = identity.part_identity(load_policy(str(world / "model"), device="cpu"))
    shutil.move(world / "model", world / "elsewhere")
    (world / "model").symlink_to(world / "elsewhere")
    assert identity.part_identity(load_policy(str(world / "model"), device="cpu")) == before
    assert differences(decode_run(params(world), folder).lines, whole) == []
    assert "changed" not in capsys.readouterr().out


# --- functions as scorers -------------------------------------------------------------------------


def test_a_changed_function_starts_a_run_anew(world, tmp_path, monkeypatch, capsys):
    """Bug: the lines of the old weight were kept, because name and source were the same."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found, told = [], []
    for weight in (0.1, 0.1, 0.2):
        source = f"def weighed(text):\n    return {weight} * (sum(map(ord, text)) % 97) / 97\n"
        (tmp_path / "weighing.py").write_text(source)
        sys.modules.pop("weighing", None)
        run = decode_run(params(world, cost="weighing:weighed", methods=["base"]), tmp_path / "run")
        found.append({line["prompt"]: line["cost"] for line in run.lines})
        said = capsys.readouterr().out
        told.append("parts.cost.digest" in said and "code.weighing" in said)
    assert told == [False, False, True]
    assert found[0] == found[1]
    assert all(found[2][prompt] == pytest.approx(2 * cost) for prompt, cost in found[0].items())


def test_a_run_refuses_what_nobody_can_tell_from_another(world, tmp_path, monkeypatch):
    """Guards the promise that a change starts a run anew; a guard in memory is made as ever."""

    def cost(text):
        return len(text) / 97

    monkeypatch.setitem(registry.SCORERS, "mine", lambda: of_function(cost, "cost"))
    settings = params(world, cost="mine", methods=["base"])
    with pytest.raises(RunError, match="has no digest, .* 'v1', and change that with it"):
        decode_run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    Guard(load_policy(str(world / "model"), device="cpu"), cost, budget=1.0)
    cost.digest = "v1"
    assert decode_run(settings, tmp_path / "run").params["parts"]["cost"]["digest"] == "v1"
    monkeypatch.setitem(registry.SCORERS, "mine", lambda: of_function(cost, "cost", "v2"))
    assert decode_run(settings, tmp_path / "run").params["parts"]["cost"]["digest"] == "v2"


def test_numbers_of_numpy_reach_the_record(world, tmp_path):
    """Bug: a run decoded a group, and then could not write it."""
    changes = dict(budget=np.quantile([1, 2, 3], 0.5, method="nearest"), seed=np.int64(3))
    assert isinstance(changes["budget"], np.int64)
    run = decode_run(params(world, methods=["base"], **changes), tmp_path / "run")
    assert {(line["budget"], line["seed"]) for line in run.lines} == {(2, 3)}


DATED = "{{ strftime_now('%d %B') }}: {{ messages[0].content }}"


@pytest.mark.parametrize("template", [DATED, "{{ messages[0].content }}"])
def test_a_run_goes_on_the_next_day(tmp_path, monkeypatch, capsys, template):
    """Bug: a chat template that writes the date started a run of days over at midnight."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer(chat_template=template)
    tiny_model(tokenizer).save_pretrained("policy"), tokenizer.save_pretrained("policy")
    (tmp_path / "my.txt").write_text("Hello\nWorld\n")
    monkeypatch.setitem(SCORERS, "mine", Letters)
    small = {"methods": ["base"], "max_new_tokens": 8, "cost": "mine", "reward": None}
    params = DecodeParams(
        profile="mine", run="a", policy="policy", prompts="my.txt", budget=9.0, **small
    )
    for _ in range(2):
        run = decode_run(params, tmp_path / "run")
    assert "an earlier start has left 2 of 2" in capsys.readouterr().out
    with identity.dated():
        own = load_policy("policy").identity()["rendered"]
    assert run.params["parts"]["policy"]["rendered"] == own
    assert (load_policy("policy").identity()["rendered"] == own) == (template != DATED)
