"""Install the files of pylock.toml with this environment's pip: `.venv/bin/python docs/lock.py`.

The lock has the addresses of PyPI; pip takes the same files from the index or folder that it is
configured with, and refuses a file whose hash the lock does not have. A torch that is installed
already, such as one for another graphics card, stays.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

# torch 2.13.0+cpu of Python 3.11 to 3.14 on x86-64, from PyTorch's own index; PyPI's builds for
# Linux come with gigabytes of CUDA
CPU = """
6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2
3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6
d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691
""".split()
CUDA = ("cuda-", "nvidia-", "triton")
PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]


def hashes(package: dict) -> list[str]:
    """Return the SHA-256 of each file of a package."""
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
    return [file["hashes"]["sha256"] for file in files]


def requirements(packages: list[dict], torch: list[dict]) -> list[str]:
    """Return pip's lines for packages, each with its hashes.

    Parameters
    ----------
    packages : list of dict
        The packages of pylock.toml.
    torch : list of dict
        pip's report on torch: the file that it would install, or none if torch is installed. Only
        the hash of this file is allowed, because pip prefers a build whose hash an index names to
        one for processors in a folder. CUDA is left out if the file does not need it.

    Raises
    ------
    SystemExit
        If the lock does not have the file of torch.
    """
    known = {package["name"]: hashes(package) for package in packages}
    for file in torch:
        known["torch"] = [each for each in known["torch"] + CPU if each in str(file)]
        if not known["torch"]:
            url = file["download_info"]["url"]
            sys.exit(f"pylock.toml has no file {url}; if you trust it, install it by pip first")
    cuda = any("cuda-" in str(file["metadata"].get("requires_dist")) for file in torch)
    lines = []
    for package in packages:
        if cuda or not package["name"].startswith(CUDA):
            marker = f" ; {package['marker']}" if "marker" in package else ""
            pin = f"{package['name']}=={package['version']}{marker}"
            lines.append(" --hash=sha256:".join([pin, *known[package["name"]]]))
    return lines


def main() -> int:
    """Run pip and return its exit status."""
    packages = tomllib.loads(Path("pylock.toml").read_text())["packages"]
    (torch,) = (f"torch=={each['version']}" for each in packages if each["name"] == "torch")
    report = subprocess.check_output([*PIP, "--quiet", "--dry-run", "--report", "-", torch])
    file = Path(sys.prefix, "lock.txt")
    file.write_text("\n".join(requirements(packages, json.loads(report)["install"])))
    return subprocess.run([*PIP, "--require-hashes", "--requirement", file]).returncode


if __name__ == "__main__":
    sys.exit(main())
