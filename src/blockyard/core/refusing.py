"""What the core's objects say to `copy` and `pickle`: one sentence, and what to do instead."""


def refuse_copy(what: str, instead: str) -> TypeError:
    """The error for `copy.copy` and `copy.deepcopy`."""
    return TypeError(f"{what} cannot be copied, because two of it would own the same blocks; {instead}")


def refuse_pickle(what: str, instead: str) -> TypeError:
    """The error for `pickle`."""
    return TypeError(f"{what} cannot be pickled, because its blocks are those of this process; {instead}")
