"""Read YAML 1.2 files; refuse aliases and equal keys."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from igcore.errors import ParameterError, shown


class Plain(Composer):
    """Refuses an alias, by which a small file can become large, and the anchor of one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node."""
        event = self.parser.peek_event()
        if anchor := getattr(event, "anchor", None):
            problem = f"&{anchor:.60} or its alias is not allowed; write it out"
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class Constructor(SafeConstructor):
    """Makes text of a date, as YAML 1.2 does."""


Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def parsed(text: str, source: object) -> Any:
    """Return the value of a YAML text.

    Parameters
    ----------
    source : object
        What an error calls the text.

    Raises
    ------
    ParameterError
        With the line and what is wrong there, of a text that is no YAML, gives a key twice or has
        an alias.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = Plain, Constructor
    try:
        return yaml.load(text)
    except (YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        # the lines of other errors than a parser's are about Python
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        problem = " ".join(problem.split())  # a key that is given twice may have several lines
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
    if not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise ParameterError(f"{path} cannot be read (it is {shown(value, 60)}); {form}")
    return value
