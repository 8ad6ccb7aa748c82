"""Write ``ro-crate-metadata.json``: every table and picture, and the runs that they were made of.

``make readme`` writes it with the pages. It is a Workflow Run RO-Crate in the small: files, the
actions that made them with commit, versions, processor and the hash over their records, and the
notebooks that are their instruments. The files beside tables and pictures
(`igstudy.report.sources`) say all that.
"""

import json
import subprocess
from mimetypes import guess_type
from pathlib import Path

from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from igcore.files import root

INSTRUMENTS = {  # how the names of runs begin -> what made them
    "critics/": "notebooks/20_train_critic.ipynb",
    "judge/": "notebooks/60_judge.ipynb",
    "": "notebooks/30_decode.ipynb",
}


def crate_of(base: Path) -> ROCrate:
    """Return the crate of a repository."""
    crate = ROCrate(gen_preview=False)
    crate.name = "igcore"
    crate.description = (
        "Guarded decoding of frozen language models: a reproduction of InferenceGuard. Tables and "
        "pictures, and the runs that they were made of."
    )
    crate.license = crate.add_file(base / "LICENSE", "LICENSE")
    crate.datePublished = last_change(base)
    for name in ("README.md", "CITATION.cff", "Snakefile", *INSTRUMENTS.values()):
        crate.add_file(base / name, name)
    for path in sorted([*(base / "figures").rglob("*.*"), *(base / "records").rglob("*.*")]):
        name = path.relative_to(base).as_posix()
        crate.add_file(path, name, properties={"encodingFormat": guess_type(name)[0]})
    for path in sorted((base / "figures").rglob("*.json")):
        add_runs(crate, base, path)
    return crate


def add_runs(crate: ROCrate, base: Path, sidecar: Path) -> None:
    """Add the runs of a table or a picture, each once, and name it among their results."""
    kind, ending = ("table", ".csv") if sidecar.parent.name == "tables" else ("picture", ".png")
    made = crate.get(sidecar.with_suffix(ending).relative_to(base).as_posix())
    said = json.loads(sidecar.read_text(encoding="utf-8"))
    actions = {run_id(name, facts): facts for name, facts in said["runs"].items()}
    actions[f"#{kind}/{sidecar.stem}"] = said["written_by"]
    for identifier, facts in actions.items():
        action = crate.get(identifier)
        if action is None:
            properties = {"@type": "CreateAction", "name": identifier.removeprefix("#")}
            about = [f"commit {facts['commit']}", facts["processor"], facts.get("versions")]
            properties["description"] = ", ".join(filter(None, about))
            action = crate.add(ContextEntity(crate, identifier, properties))
            if root_hash := facts.get("root"):
                action["identifier"] = root_hash
                run = identifier.split("/", 2)[2]
                made_by = next(name for name in INSTRUMENTS if run.startswith(name))
                action["instrument"] = crate.get(INSTRUMENTS[made_by])
            crate.root_dataset.append_to("mentions", action)
        action.append_to("result", made)


def run_id(name: str, facts: dict) -> str:
    """Return the identifier of a run: one that ran again with other records has another."""
    return f"#run/{name}@{str(facts['root'])[:12]}"


def last_change(base: Path) -> str:
    """Return the day of the last commit that changed a table or picture."""
    command = ["git", "-C", str(base), "log", "-1", "--format=%cs", "--", "figures"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Write the metadata at the root of the repository."""
    crate_of(root()).metadata.write(root())


if __name__ == "__main__":
    main()
