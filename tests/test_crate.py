"""What ties tables to runs: the crate, read by its library, and the manifest of outputs."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from rocrate.rocrate import ROCrate

from docs.crate import crate_of, run_id

ROOT = Path(__file__).parents[1]


def test_every_table_is_reachable_from_the_crate():
    """Guards a table of which the crate does not know the runs."""
    crate = ROCrate(ROOT)
    for path in sorted((ROOT / "figures/tables").glob("*.csv")):
        entity = crate.get(path.relative_to(ROOT).as_posix())
        assert entity is not None and entity in crate.root_dataset["hasPart"], path.name
    results = [entity for entity in crate.get_entities() if entity.get("result")]
    for path in sorted((ROOT / "figures").rglob("*.json")):
        runs, of_table = json.loads(path.read_text())["runs"], path.parent.name == "tables"
        ending, kind = (".csv", "table") if of_table else (".png", "picture")
        table = crate.get(path.with_suffix(ending).relative_to(ROOT).as_posix())
        made_by = {entity for entity in results if table in entity["result"]}
        assert {entity.id for entity in made_by} == {
            *(run_id(name, facts) for name, facts in runs.items()),
            f"#{kind}/{path.stem}",
        }
        for name, facts in runs.items():
            assert crate.get(run_id(name, facts)).get("identifier") == facts["root"]


def test_the_committed_crate_is_that_of_the_committed_tables():
    """Guards tables that were written anew without `make readme`."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git repository, so nothing says when tables last changed")
    made = crate_of(ROOT).metadata.generate()["@graph"]
    committed = json.loads((ROOT / "ro-crate-metadata.json").read_text())["@graph"]
    for graph in (made, committed):
        for entity in graph:
            entity.pop("datePublished", None)  # the day of the commit that holds this file
    assert sorted(made, key=lambda entity: entity["@id"]) == sorted(
        committed, key=lambda entity: entity["@id"]
    )


def test_the_manifest_names_files_that_are_committed():
    """Guards a manifest of files that a walk no longer leaves."""
    files = {
        row["file"] for row in yaml.safe_load((ROOT / "codecheck.yml").read_text())["manifest"]
    }
    found = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    assert found.returncode or files <= set(found.stdout.splitlines())
