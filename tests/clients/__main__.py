"""``make clients-test``: clients of OpenAI's interface, each in front of a served guard.

The clients have an environment of their own, `.venv-clients`. Installing it needs a network; the
checks reach none, because all that would leave this computer goes to a closed port. The programs
are those of docs/serve.md and docs/chat.html, with their addresses and the policy replaced, so that
the page cannot show others. The policy is tiny and random, and writes letters, spaces and digits;
the cost counts the digits. A second guard finds no answer, so it always abstains. All files lie in
runs/clients.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from threading import Timer

import httpx2

from tests.clients.common import KEY, REFUSAL, passes, within
from tests.served.software import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "runs/clients"
BIN = ROOT / ".venv-clients/bin"
# the programs of the page, in its order
PROGRAMS = (
    "costs.py", "guard.yaml", "serve.sh", "with_openai.py", "with_litellm.py", "litellm.yaml",
    "litellm.sh", "with_langchain.py", "app.py", "app.sh", "page.sh",
)  # fmt: skip
# the guard, the one that abstains, LiteLLM, the web page, the application
PORT, STRICT, PROXY, WEB, APP = (str(free_port()) for _ in range(5))
CHANGES = {"8000": PORT, "4000": PROXY, "3000": WEB}
CHANGES |= {"HuggingFaceTB/SmolLM2-1.7B-Instruct": str(FOLDER / "tiny")}
NOWHERE = "http://127.0.0.1:9"
QUIET = {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "no_proxy": "127.0.0.1,localhost"}
QUIET |= {name.upper(): value for name, value in QUIET.items()}
# LiteLLM asks for a table of prices, and counts its users
QUIET |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
MASTER = "sk-of-the-test-0123456789-0123456789"
TEMPLATE = (
    "{% for said in messages %}{{ said['role'] }}: {{ said['content'] }}\n{% endfor %}assistant:"
)
NEVER = f"""
def never(text: str) -> float:
    return float(not text or not {REFUSAL!r}.startswith(text))
"""


def install() -> None:
    """Make the environment of the clients, unless it is there."""
    wanted, done = HERE / "requirements.txt", BIN.parent / "installed"
    if done.is_file() and done.read_text() == wanted.read_text():
        return
    print(f"installing the clients into {BIN.parent}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", BIN.parent], check=True)
    pip = [BIN / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "-r", wanted], check=True)
    shutil.copyfile(wanted, done)


def save_policy() -> None:
    """Save a tiny random policy that writes letters, spaces and fewer digits."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import saved, tiny, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model = tiny("phi", **ids, max_position_embeddings=4096, initializer_range=0.1)
    bias = model.lm_head.bias.data.fill_(-30)
    for letters, weight in (("abcdefghijklmnopqrstuvwxyz", 0), ("0123456789", -1), (" ", 1)):
        bias[tokenizer(letters)["input_ids"]] = weight
    bias[tokenizer.eos_token_id] = -0.5
    saved(FOLDER / "tiny", model, tokenizer)


def write_programs() -> None:
    """Write the programs of the page, and the second guard."""
    page = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    found = dict(zip(PROGRAMS, re.findall(r"```\w+\n(.*?)```", page, re.S), strict=True))
    found["chat.html"] = (ROOT / "docs/chat.html").read_text(encoding="utf-8")
    for name, text in found.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        rewritten(name, name, {old: new for old, new in CHANGES.items() if old in text})
    with (FOLDER / "costs.py").open("a") as costs:
        costs.write(NEVER)
    rewritten("guard.yaml", "never.yaml", {"costs:digits": "costs:never"})
    rewritten("serve.sh", "never.sh", {"guard.yaml": "never.yaml", PORT: STRICT})


def rewritten(name: str, new: str, changes: dict[str, str]) -> str:
    """Write a program again with other words; return its new name."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for old, word in changes.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, word)
    (FOLDER / new).write_text(text, encoding="utf-8")
    return new


# --- processes ------------------------------------------------------------------------------------


def arguments(file: str, name: str) -> list[str]:
    """Return what follows the name of a command in a file of the page."""
    text = (FOLDER / file).read_text().replace("\\\n", "")
    (found,) = re.findall(rf"^(?:\S+=\S+ )*{name} (.*)", text, re.M)
    return shlex.split(found)


def output(*command: str | Path) -> str:
    """Return what a command prints; it must succeed."""
    env = os.environ | QUIET
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@contextmanager
def running(port: str, path: str, command: list[str | Path], **env: str) -> Iterator[None]:
    """Run a server until it is no longer needed; it must answer within two minutes."""
    log, env = FOLDER / f"{port}.log", os.environ | QUIET | env
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=FOLDER, env=env, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 120
        ask = ["curl", "-sf", "--noproxy", "*", "-o", os.devnull, f"http://127.0.0.1:{port}{path}"]
        while subprocess.run(ask).returncode:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def guard(port: str, file: str, *more: str, **env: str):
    """Serve a guard by a command of the page."""
    command = [sys.executable, "-m", "igserve", *arguments(file, "igserve"), *more]
    return running(port, "/healthz", command, PYTHONPATH=str(ROOT), **env)


# --- checks ---------------------------------------------------------------------------------------


def abstains(program: str) -> None:
    """Check that a program of the page shows an abstention of the second guard."""
    changes = {PORT: STRICT, '"none"': repr(KEY)}
    printed = output(BIN / "python", rewritten(program, f"never_{program}", changes))
    assert "content_filter" in printed and printed.count(REFUSAL) >= 2, printed


def openai_client() -> None:
    """openai: its own checks, a line each"""
    urls = [f"http://127.0.0.1:{port}" for port in (PORT, STRICT)]
    command = [BIN / "python", "-m", "tests.clients.openai_client", *urls]
    assert subprocess.run(command, cwd=ROOT, env=os.environ | QUIET).returncode == 0


def openai() -> None:
    """openai: the program of the page; an abstention"""
    printed = output(BIN / "python", "with_openai.py")
    assert "verified_safe" in printed and within(printed) and len(printed.splitlines()) == 3, (
        printed
    )
    abstains("with_openai.py")


def curl() -> None:
    """curl: the command of the page"""
    reply = json.loads(output("curl", *arguments("serve.sh", "curl")))
    assert reply["igcore"]["status"] == "verified_safe"
    assert within(reply["choices"][0]["message"]["content"])


def litellm() -> None:
    """litellm: whole and streamed are one text; an abstention"""
    said, streamed = output(BIN / "python", "with_litellm.py").splitlines()
    assert said in (f"stop {streamed}", f"length {streamed}") and within(said), said
    abstains("with_litellm.py")


def litellm_proxy() -> None:
    """litellm's proxy: the openai client through it; an abstention"""
    config = (FOLDER / "litellm.yaml").read_text()
    strict = config.replace("name: guarded", "name: strict").replace(PORT, STRICT)
    strict = strict.replace("none", KEY).removeprefix("model_list:\n")
    (FOLDER / "litellm.yaml").write_text(config + strict)
    changes = {PORT: PROXY, '"none"': repr(MASTER)}
    guarded = rewritten("with_openai.py", "by_proxy.py", changes)
    strict = rewritten(guarded, "never_by_proxy.py", {'"guarded"': '"strict"'})
    command = [BIN / "litellm", *arguments("litellm.sh", "litellm"), "--host", "127.0.0.1"]
    with running(PROXY, "/health/liveliness", command, LITELLM_MASTER_KEY=MASTER):
        assert output(BIN / "python", guarded) == output(BIN / "python", "with_openai.py")
        printed = output(BIN / "python", strict)
        assert "content_filter abstained" in printed and printed.count(REFUSAL) == 2, printed


def langchain() -> None:
    """langchain: invoke, stream and batch; an abstention"""
    said, streamed, *batch = output(BIN / "python", "with_langchain.py").splitlines()
    assert said in (f"stop {streamed}", f"length {streamed}") and within(said), said
    assert len(batch) == 2 and all(map(within, batch)), batch
    abstains("with_langchain.py")


def fastapi() -> None:
    """fastapi: an application of one's own, whole, in parts, at once"""
    # the project's own packages, and behind them those of the clients
    (site,) = BIN.parent.glob("lib/python*/site-packages")
    start = f"import sys; sys.path.append({str(site)!r}); import uvicorn; uvicorn.main()"
    command = [sys.executable, "-c", start, *arguments("app.sh", "uvicorn"), "--port", APP]
    with running(APP, "/docs", command, PYTHONPATH=str(ROOT)):
        client = httpx2.Client(base_url=f"http://127.0.0.1:{APP}", params={"said": "Hello"})
        whole = client.get("/whole").json()
        assert whole["status"] == "verified_safe" and within(whole["text"]), whole
        with client.stream("GET", "/parts") as reply:
            next(reply.iter_text())  # and no more
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda _: client.get("/parts"), range(4)))
        assert {reply.text for reply in replies} == {whole["text"]}
        with client.stream("GET", "/parts") as reply:
            assert len(list(reply.iter_text())) > 1


def web_page() -> None:
    """web page: a browser shows the text, and an abstention as one"""
    json_type = '"application/json"'
    key = {PORT: STRICT, json_type: f'{json_type}, "authorization": "Bearer {KEY}"'}
    rewritten("chat.html", "never.html", key)
    with running(WEB, "/chat.html", [sys.executable, *arguments("page.sh", "python")]):
        text, abstention = seen("chat"), seen("never")
    assert text and within(text), text
    assert abstention == f"{REFUSAL} [The guard abstains.]", abstention


def seen(page: str) -> str:
    """Return what a browser shows when a button was pressed, and keep a picture of it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=700,160"]
    options += [f"--proxy-server={NOWHERE}", f"--user-data-dir={FOLDER / 'browser'}"]
    options += [f"--screenshot={page}.png", "--dump-dom"]
    # the browser looks when all of a page is loaded or has failed, and this picture fails late
    late = socket.create_server(("127.0.0.1", 0))
    Timer(4, late.close).start()
    with (FOLDER / f"{page}.html").open("a") as file:
        file.write(f'<img src="http://127.0.0.1:{late.getsockname()[1]}" hidden>')
        file.write('<script type="module">document.forms[0].requestSubmit()</script>')
    found = output(BROWSER, *options, f"http://127.0.0.1:{WEB}/{page}.html")
    return unescape(re.search(r"<p[^>]*>(.*?)</p>", found, re.S)[1])


CHECKS = [openai_client, openai, curl, litellm, litellm_proxy, langchain, fastapi]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""


def main() -> int:
    """Run all checks; return the exit status."""
    install()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    save_policy()
    write_programs()
    strict = ["--waiting", "1", "--origin", f"http://127.0.0.1:{WEB}"]
    with guard(PORT, "page.sh"), guard(STRICT, "never.sh", *strict, IGSERVE_KEY=KEY):
        passed = [passes(check) for check in [*CHECKS, *[web_page] * bool(BROWSER)]]
    if not BROWSER:
        print("left out: the web page, because there is no chromium")
    print(f"{sum(passed)} of {len(passed)} passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
