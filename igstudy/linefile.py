"""The lines of ``responses.jsonl``: their digests, and how they are read.

`igstudy.runs.folders` writes them.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from igcore.errors import RunError
from igcore.files import DIGITS, digest_of
from igcore.response import Counts

from .settings import Settings

# the settings of a method in a line: `stop` and where sampling came from stand in params.json
SETTINGS = [one.name for one in fields(Settings) if one.name not in ("stop", "sampling")]
RECORD_FIELDS = (  # of a line, in its order
    *"prompt_id prompt response tokens policy prompts method seed".split(),
    *SETTINGS,
    *"status finished n_tokens reward cost peak_cost word_peak_cost fail_open_cost".split(),
    *"spread contract z_final z_trace".split(),
    *"block_ends grid_ends grid_size".split(),
    *[field.name for field in fields(Counts)],
    *"trace finals generate_s cost_s reward_s critic_s score_s reason".split(),
    *"cost_scorer cost_digest reward_scorer reward_digest digest".split(),
)
LineKey = tuple[str, str]
Fields = dict[str, Any]  # of a line, of params.json or of a manifest
PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
MOST_UNPACKED, MOST_RATIO = 2**25, 40  # bytes, and times the packed size: records reach 20 times


def comparable(line: Fields) -> Fields:
    """Return the fields that are equal whenever the same work is done again: all but seconds."""
    return {name: value for name, value in line.items() if not name.endswith("_s")}


def line_digest(line: Fields) -> str:
    """Hash the comparable fields of a line, its own digest excepted."""
    content = {name: value for name, value in comparable(line).items() if name != "digest"}
    return digest_of(content)[:DIGITS]


def sealed(line: Fields) -> Fields:
    """Return a line as it is stored, with its digest last.

    JSON has only finite numbers: any other becomes None. The digest covers every field whose
    name does not end in ``_s``, so that an accidental change of a line shows without scoring.
    """
    stored: Fields = json.loads(json.dumps(line), parse_constant=lambda _: None)
    return stored | {"digest": line_digest(stored)}


def text_digest(prompt: Any, response: Any) -> str:
    """Return the sha256 of a prompt and its answer, or the one that `without_texts` has kept."""
    if isinstance(response, dict):
        kept: str = response["digest"]
        return kept
    texts = f"{prompt}\0{response}".encode(errors="surrogatepass")
    return hashlib.sha256(texts).hexdigest()


def withheld(prompt: str, text: str) -> Fields:
    """Return the stored form of a text: its digest, with its prompt, and its length."""
    return {"digest": text_digest(prompt, text), "length": len(text)}


def without_texts(line: Fields) -> Fields:
    """Return a line with digests and lengths in place of its texts, sealed again."""
    prompt, response, tokens = line["prompt"], line["response"], line["tokens"]
    texts = {
        "prompt": withheld("", prompt),
        "response": None if response is None else withheld(prompt, response),
        "tokens": {"digest": digest_of(tokens), "length": len(tokens)},
    }
    return sealed(line | texts)


def has_texts(line: Fields) -> bool:
    """True if a line holds its texts, and not their digests alone."""
    return not isinstance(line["prompt"], dict)


def like(kept: Fields, line: Fields) -> Fields:
    """Return a line without its texts where another one, which is kept, has none either."""
    return line if has_texts(kept) else without_texts(line)


def key(line: Fields) -> LineKey:
    """Return a line's key, (method, prompt_id); raise ``TypeError`` unless both are text."""
    method, prompt_id = line["method"], line["prompt_id"]
    if not (isinstance(method, str) and isinstance(prompt_id, str)):
        raise TypeError(f"{method!r} and {prompt_id!r} are not two texts")
    return method, prompt_id


def root_of(params: Fields, lines: Sequence[Fields], manifest: Fields) -> str:
    """Return one hash over a run: params, lines in any order, and manifest without the hash."""
    content = {name: value for name, value in manifest.items() if name != "root"}
    return digest_of([params, sorted(line_digest(line) for line in lines), content])


def read(path: Path) -> list[Fields]:
    """Read the lines of a file, which may be packed (``.gz``).

    Raises
    ------
    RunError
        When the file cannot be read, a line is no response (the last one may be half-written), or
        two lines answer the same prompt with the same method.
    """
    lines: list[Fields] = []
    numbers: dict[LineKey, int] = {}
    try:
        content = unpacked(path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise RunError(f"cannot read {path} ({error}); decode first, or check the path") from error
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            line = json.loads(text)
            name = key(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(
                f"line {number} of {path} is not a response; run its parameters again"
            ) from error
        if numbers.setdefault(name, number) != number:
            raise RunError(
                f"lines {numbers[name]} and {number} of {path} both answer {name}; delete one"
            )
        lines.append(line)
    return lines


def unpacked(path: Path) -> bytes:
    """Return the content of a file, also of a packed one (``.gz`` or ``.xz``).

    Raises
    ------
    RunError
        For a packed file with more content than `MOST_UNPACKED` and `MOST_RATIO` allow. The excess
        is found without holding any content in memory.
    OSError, EOFError, zlib.error, lzma.LZMAError
        When it cannot be read.
    """
    if path.suffix not in PACKED:
        return path.read_bytes()
    most = max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
    with PACKED[path.suffix](path) as file:
        if file.seek(most + 1) > most:
            raise RunError(
                f"{path} of {path.stat().st_size:,} bytes holds more than {most:,}, as no record "
                "does; unpack it yourself, if you trust it"
            )
        file.seek(0)
        return bytes(file.read())


@dataclass(frozen=True)
class Record:
    """The lines of a run, and the mappings in its params.json and manifest.json."""

    lines: list[Fields]
    params: Fields
    manifest: Fields

    @property
    def root(self) -> str:
        """The hash over all of it, which the manifest should hold, see `root_of`."""
        return root_of(self.params, self.lines, self.manifest)


def read_record(path: Path) -> Record:
    """Read a file of responses and the files beside it; ``RunError`` when one cannot be read."""
    beside = [read_mapping(path.with_name(f"{name}.json")) for name in ("params", "manifest")]
    return Record(read(path), *beside)


def read_mapping(path: Path) -> Fields:
    """Read params.json or manifest.json; raise ``RunError`` when it cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} cannot be read ({type(error).__name__}); run its parameters again, which "
            "finishes the run, or get the files of its folder again"
        ) from error
