"""One column of a file of prompts: text, CSV, JSON, JSON lines, or Parquet."""

import csv
import io
import json
import re
from itertools import zip_longest
from pathlib import Path

from ..errors import needs

FORMATS = (".txt", ".csv", ".jsonl", ".json")  # of a user's own file


class Unreadable(Exception):
    """A file holds no table of the wanted form.

    The message says why; the caller makes a full sentence of it.
    """


def column_of(path: Path, column: str = "prompt") -> list:
    """Return the cells of one column in file order; a cell that is not there is None.

    Parameters
    ----------
    path : Path
        A file of one of the `FORMATS`, or of Parquet. In a text file each line is a prompt.

    Raises
    ------
    Unreadable
        When the file cannot be read or has no such column.
    """
    try:
        rows = _rows(path)
    except (OSError, ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise Unreadable(f"{path.name}: {type(error).__name__}: {reason}") from error
    names = list(dict.fromkeys(name for row in rows for name in row))
    if column not in names:
        raise Unreadable(f"{path.name} has the columns {', '.join(names)}, but not {column!r}")
    return [row.get(column) for row in rows]


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read()


def _rows(path: Path) -> list[dict]:
    """Return the rows of a file by column."""
    if path.suffix == ".parquet":
        needs("pyarrow", "study")
        return needs("pandas", "study").read_parquet(path).to_dict("records")
    text = read_text(path)
    if path.suffix == ".txt":
        lines = re.split(r"\r\n|\r|\n", text.rstrip("\r\n")) if text else []
        return [{"prompt": line} for line in lines]
    if path.suffix == ".csv":
        header, *table = csv.reader(io.StringIO(text, newline=""), strict=True)
        if any(len(row) > len(header) for row in table):  # an unquoted comma
            raise ValueError("a row has more cells than there are columns")
        return [dict(zip_longest(header, row, fillvalue="")) for row in table]
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("not every row is a mapping of columns to cells")
    return rows
