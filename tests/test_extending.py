"""What it takes to add a setting, a method, a scorer or a data set, as CONTRIBUTING says: each is
added to a copy of the packages, and a params file names it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from copiedcode import edit
from tiny import saved, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
SIZE = dict(
    policy="model", prompts="mild", limit=1, methods=["base"], cost="long-sentence", reward=None,
    budget=9.0, max_new_tokens=4, block_size=4, device="cpu",
)  # fmt: skip
SCORER = """
class Letters:
    name, digest, sign, unit = "letters", "v1", "higher is worse", "letters"
    def score(self, prompts, responses, finished):
        return [len(response) for response in responses]
"""
RUN = """
import sys
from pathlib import Path
from igstudy import commands
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.paramfiles import read_recipe
file = Path("decode-a.yaml")
run = decode_run(DecodeParams(**read_recipe(file)), Path(sys.argv[1]))
sys.exit(commands.main(["verify", str(run.responses), "--params", str(file), "--replay", "all"]))
"""
# what is added -> the edit at each place, settings that name it, and what a line has then
ADDED = {
    "setting": (
        [("igcore/config.py", "strict: bool = False", "strict: bool = False\n    drawn: Count = 1"),
         ("igcore/methods.py", "(one_block(config), n_samples=1)",
          "(one_block(config), n_samples=config.drawn)")],
        {"drawn": 3}, {"n_samples": 3},
    ),
    "method": (
        [("igcore/methods.py", '    "backtracking": _STEPWISE,',
          '"any": Method(beams.unranked, one_block, reward=False), "backtracking": _STEPWISE,')],
        {"methods": ["any"], "n_samples": 5}, {"method": "any", "samples_drawn": 5},
    ),
    "scorer": (
        [("igcore/catalog.py", '"maximum":',
          '"letters": "igcore.models.letters:Letters", "maximum":')],
        {"cost": "letters"}, {"cost_scorer": "letters"},
    ),
    "data set": (
        [("igcore/catalog.py", '"mild":', '"greetings": lambda: ["Good day"], "mild":')],
        {"prompts": "greetings"}, {"prompts": "greetings", "prompt": "Good day"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny model, the file of a scorer, and copies of the packages."""
    folder = tmp_path_factory.mktemp("home")
    for package in ("igcore", "igserve", "igstudy"):
        shutil.copytree(ROOT / package, folder / package)
    tokenizer = tiny_tokenizer()
    saved(folder / "model", tiny_model(tokenizer), tokenizer)
    (folder / "igcore/models/letters.py").write_text(SCORER)
    return folder


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_has_one_place_and_a_setting_two(home, name):
    """Bug: a thing that is added in one place is unknown in another: to params files, to the lines
    of a run, or to `verify`.
    """
    places, named, expected = ADDED[name]
    for file, old, new in places:
        edit(home / file, old, new)
    (home / "decode-a.yaml").write_text(json.dumps(SIZE | named))
    command, here = [sys.executable, "-c", RUN, name], os.environ | {"PYTHONPATH": str(home)}
    made = subprocess.run(command, cwd=home, env=here, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    (line,) = map(json.loads, (home / f"{name}/responses.jsonl").read_text().splitlines())
    assert {key: line[key] for key in expected} == expected
