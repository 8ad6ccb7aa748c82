"""The scorers of the paper, and a cost that reads the last words alone."""

from igcore.settings import Named

# scorer -> options that say only where and how its model is reached, and change no line
REACHED_BY = {
    "endpoint": ("url", "api_key_env", "timeout", "batch", "workers", "max_retries", "self_check")
}


def scoring_options(scorer: Named | None) -> Named | None:
    """Return a scorer without the options of `REACHED_BY`."""
    if scorer is None:
        return None
    way = REACHED_BY.get(scorer.name, ())
    kept = {name: value for name, value in scorer.options.items() if name not in way}
    if "costs" in kept:  # of a maximum
        kept["costs"] = [scoring_options(Named.of(cost)) for cost in kept["costs"]]
    return Named(scorer.name, kept)
