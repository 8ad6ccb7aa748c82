"""Which environment variables a params file may send to a judge, see `igcore.endpoints`."""

from .. import endpoints

PREFIX = "IGCORE_JUDGE_"  # of the environment variables that a params file may name as the key
# holds the name of one more, which only who starts the run can set
ALLOWED = "IGCORE_JUDGE_KEY_FROM"


def check_variable(name: str) -> None:
    """Raise ``ParameterError`` unless this environment variable may be sent to a judge."""
    endpoints.check_variable(name, PREFIX, ALLOWED)
