"""A SLURM cluster of one node on this machine, from Debian's packages; nothing is left of it.

All that it writes is in `PLACE`, but for the one file that jobs read in a fixed place. Daemons and
packages are noted there, so that what a killed test has left is taken down by the next one.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from igcore.errors import RunError

PLACE = Path("/run/igcore-slurm")
CONF = Path("/etc/slurm/slurm.conf")  # SLURM_CONF does not reach the steps of a job
MARK = "# written by igcore's `make slurm-test`, which removes it"
PACKAGES = ["slurm-wlm", "munge"]
DAEMONS = ["slurmd", "slurmctld", "munged"]  # in the order in which they are stopped
STEPS = "slurmstepd"  # what slurmd starts for every job
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAIT = 60.0  # seconds until the node is up, or a daemon down
SETTINGS = Path(__file__).parents[1] / "data/slurm.conf"  # with places for what a machine has


@contextmanager
def one_node() -> Iterator[str]:
    """Set up the cluster, and take it down whatever happens inside.

    Yields
    ------
    str
        Versions, processors and memory of the node.

    Raises
    ------
    RunError
        Where it cannot be set up, or where a SLURM of somebody else is.
    """
    check()
    if PLACE.exists():
        print(f"an earlier test has left {PLACE}: it is taken down first")
        take_down()
    try:
        yield set_up()
    finally:
        # a second Ctrl-C must not leave half of it
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDS}
        take_down()
        for number, handler in before.items():
            signal.signal(number, handler)


def check() -> None:
    """Raise ``RunError`` where no cluster can be made without harm to somebody else's."""
    if os.geteuid() != 0:
        raise RunError(
            "this test installs packages and starts daemons; run it as root, on a machine or in a "
            "container of your own"
        )
    if not shutil.which("apt-get"):
        raise RunError("this test takes SLURM from Debian's packages; run it where apt-get is")
    if CONF.exists() and not CONF.read_text(encoding="utf-8").startswith(MARK):
        raise RunError(f"this machine has a SLURM of its own ({CONF}); run the test on another one")
    ours = {read_pid(name) for name in DAEMONS}
    for name in DAEMONS[:2]:
        if foreign := set(running(name)) - ours:
            raise RunError(
                f"{name} runs here as process {min(foreign)}, which this test has not started; run "
                "it on another machine"
            )


def set_up() -> str:
    """Install packages, start the daemons, and wait for the node; return what it is."""
    PLACE.mkdir(mode=0o755)
    install()
    for name in ("ctld", "d", "munge"):
        (PLACE / name).mkdir(mode=0o755)
    key = PLACE / "munge/munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (key.parent, key):
        shutil.chown(path, "munge", "munge")
    node = call("slurmd", "-C").splitlines()[0]  # host name, processors and memory
    host = socket.gethostname().partition(".")[0]
    settings = SETTINGS.read_text(encoding="utf-8").format(host=host, place=PLACE, node=node)
    if not CONF.parent.exists():
        (PLACE / "made").touch()
    CONF.parent.mkdir(exist_ok=True)
    CONF.write_text(f"{MARK}\n{settings}", encoding="utf-8")
    own = [f"--{kind}-file={PLACE}/munge/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    call("runuser", "-u", "munge", "--", "munged", f"--socket={PLACE}/munge/munge.socket", *own)
    call("slurmctld")
    call("slurmd")
    until(idle, "the node is not up")
    return f"{call('sinfo', '--version')}, {node}"


def install() -> None:
    """Install what is not there, and note what came with it."""
    before = installed()
    if not set(PACKAGES) <= before:
        print("installing", *PACKAGES, flush=True)
        call("apt-get", "update", "-qq")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        call("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES, **quiet)
    new = sorted(installed() - before)
    (PLACE / "packages").write_text("\n".join(new), encoding="utf-8")


def installed() -> set[str]:
    """Return the names of all packages that are installed."""
    lines = call("dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package}\n").splitlines()
    return {line.split()[1] for line in lines if line.startswith("ii")}


def take_down() -> None:
    """End all jobs, stop the daemons, and remove files and packages that `set_up` has made."""
    if running("slurmctld"):
        cancel()
    for name in DAEMONS:
        stop(name)
    for pid in running(STEPS):  # of jobs that have not ended; no other SLURM is here
        os.kill(pid, signal.SIGKILL)
    if CONF.exists() and CONF.read_text(encoding="utf-8").startswith(MARK):
        CONF.unlink()
    noted = PLACE / "packages"
    packages = noted.read_text(encoding="utf-8").split() if noted.exists() else []
    if packages:
        print("removing the packages that were installed", flush=True)
        call("apt-get", "purge", "-y", "-qq", *packages, DEBIAN_FRONTEND="noninteractive")
    if (PLACE / "made").exists() and CONF.parent.exists() and not any(CONF.parent.iterdir()):
        CONF.parent.rmdir()
    shutil.rmtree(PLACE, ignore_errors=True)


def cancel() -> None:
    """Cancel every job, and wait until none is left."""
    subprocess.run(["scancel", "--user", "root"], check=False)
    began = time.monotonic()
    while running(STEPS) and time.monotonic() - began < 20:
        time.sleep(0.2)


def stop(name: str) -> None:
    """End a daemon that this test has started."""
    pid = read_pid(name)
    if pid not in running(name):
        return
    os.kill(pid, signal.SIGTERM)
    until(lambda: pid not in running(name), f"{name} does not stop")


def read_pid(name: str) -> int:
    """Return the number of a daemon's process, 0 where it was not started."""
    path = PLACE / ("munge/munge.pid" if name == "munged" else f"{name}.pid")
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else 0


def running(name: str) -> list[int]:
    """Return the numbers of the processes of a program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text(encoding="utf-8").strip() == name:
                found.append(int(path.parent.name))
        except OSError:  # it has ended since
            continue
    return found


def call(*command: str, **environment: str) -> str:
    """Run a command and return what it printed; raise ``RunError`` when it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False
    )
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RunError(f"`{' '.join(command)}` failed ({' '.join(why)})")
    return done.stdout.strip()


def idle() -> bool:
    """Say whether the node takes jobs."""
    command = ["sinfo", "-h", "-o", "%T"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "idle"


def until(there: Callable[[], bool], complaint: str) -> None:
    """Wait for a condition; raise ``RunError`` with a complaint when it does not come."""
    began = time.monotonic()
    while not there():
        if time.monotonic() - began > WAIT:
            last = PLACE / "slurmctld.log"
            said = last.read_text(encoding="utf-8").splitlines()[-1:] if last.exists() else []
            raise RunError(f"{complaint} after {WAIT:.0f} s; slurmctld says {' '.join(said)!r}")
        time.sleep(0.3)
