"""Read YAML files; refuse aliases, and what two versions of YAML read as different things."""

import re
from pathlib import Path
from typing import Any

import yaml

from igcore.errors import ParameterError, shown

# a value that YAML 1.1 takes for another than YAML 1.2 and most people: yes is true there, 010 is
# 8, 1:30 is 90, and 2026-01-31 is no text
AMBIGUOUS = re.compile(r"yes|no|on|off|[-+]?0[0-7_]+|[-+]?[\d_]+:.*|\d{4}-.*", re.IGNORECASE)
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}
REMEDY = "write true, false or a plain number, or put text into quotes"


class Strict(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads YAML without aliases, equal keys and `AMBIGUOUS` values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias, by which a small file can become large, and the anchor of one."""
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise _fault(event, f"&{event.anchor:.60} or its alias is not allowed; write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice; YAML would keep the last silently."""
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        seen = set()
        for place, _ in node.value:
            key = self.construct_object(place, deep=True)
            if key in seen:
                raise _fault(place, f"the key {shown(key)} is given twice; leave one of them")
            seen.add(key)
        return made

    def construct_scalar(self, node: Any) -> Any:
        """Refuse an `AMBIGUOUS` value."""
        if node.tag in PLAIN and AMBIGUOUS.fullmatch(node.value):
            raise _fault(node, f"{shown(node.value)} is another value in old YAML; {REMEDY}")
        return super().construct_scalar(node)


def _fault(node: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def parsed(text: str, source: object) -> Any:
    """Return the value of a YAML text.

    Parameters
    ----------
    source : object
        What an error calls the text.

    Raises
    ------
    ParameterError
        With the line and what is wrong there, of a text that is no YAML, or that `Strict` refuses.
    """
    try:
        return yaml.load(text, Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        # the lines of other errors than a parser's are about Python
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ParameterError(f"{source} cannot be read ({line}{problem:.300})") from None


def read_yaml(path: Path | str, form: str = "it must be a mapping of settings") -> dict[str, Any]:
    """Return the mapping of a YAML file.

    Parameters
    ----------
    form : str
        What the file must be, for errors.

    Raises
    ------
    ParameterError
        When it cannot be read or is no mapping, see `parsed`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ParameterError(f"{path} cannot be read ({why}); {form}") from None
    value = parsed(text, path)
    if not isinstance(value, dict):
        raise ParameterError(f"{path} cannot be read (it is {shown(value, 60)}); {form}")
    return value
