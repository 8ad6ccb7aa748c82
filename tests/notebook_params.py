"""The params files of notebooks: by kind, and in continuous integration."""

from pathlib import Path

# notebook -> the params file of continuous integration, whose settings are its defaults
PARAMS = {"20_train_critic": "critic-raw", "30_decode": "decode-raw", "60_judge": "judge-scorers"}
# kind of a params file -> its notebook
KINDS = {path.split("-")[0]: name for name, path in PARAMS.items()} | {"regime": "30_decode"}


def kind(path: Path) -> str:
    """Return the kind of a params file: its name up to the first hyphen."""
    return path.stem.split("-")[0]
