"""What a user of the load generator can cause. Says the value, the limit and the way out."""


class LoadgenError(Exception):
    """The run cannot start: bad option, unreadable prompts, no server. Exit code 2."""
