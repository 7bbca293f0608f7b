"""What the core's objects say to `copy`, `pickle` and `class`: one sentence, and what to do instead."""


def refuse_copy(what: str, instead: str) -> TypeError:
    """The error for `copy.copy` and `copy.deepcopy`."""
    return TypeError(f"{what} cannot be copied, because two of it would own the same blocks; {instead}")


def refuse_subclass(what: str) -> TypeError:
    """The error for a class statement."""
    return TypeError(f"{what} is compiled and cannot be subclassed; hold one and pass its calls on")


def refuse_pickle(what: str, instead: str) -> TypeError:
    """The error for `pickle`."""
    return TypeError(f"{what} cannot be pickled, because its blocks are those of this process; {instead}")
