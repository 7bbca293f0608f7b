"""Many independent runs over processes here, or over a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from blockyard.arguments import require_int
from blockyard.errors import BlockyardError, InvalidArgument, MissingExtra

Result = TypeVar("Result")
MAX_JOBS = 4096
#: Where runs may go. "ray" and "dask" are joblib's own back-ends for these clusters.
BACKENDS = ("processes", "ray", "dask")


class WorkerDied(BlockyardError):
    """A process ended before its run did, and there is no result."""


def run_all(
    function: Callable[..., Result],
    cells: Sequence[tuple[Any, ...]],
    *,
    jobs: int = 1,
    backend: str = "processes",
    on_done: Callable[[int], None] | None = None,
) -> list[Result]:
    """Return `function(*cell)` of every cell, in the order of the cells.

    jobs: processes at once; with 1 everything runs in this one, without joblib. Large arrays in a cell are shared
    between processes through the file system. backend: "processes", or the cluster that joblib is to use: "ray" starts
    a local Ray where none is, "dask" needs a running distributed client. on_done: called with the number of results so
    far.

    Raises `MissingExtra` where joblib, ray or dask is not installed, `WorkerDied` where a process ends before its run
    does, and what the function raises.
    """
    require_int("jobs", jobs, 1, MAX_JOBS)
    require_backend(backend)
    if backend == "processes" and jobs == 1:
        return _collected((function(*cell) for cell in cells), on_done)
    joblib = _joblib()
    with _chosen(joblib, backend, jobs):
        # As a generator, so that progress shows while the others run.
        parallel = joblib.Parallel(n_jobs=jobs, return_as=_generator_if_possible(backend))
        with _deaths_told():
            return _collected(parallel(joblib.delayed(function)(*cell) for cell in cells), on_done)


def require_backend(backend: str) -> None:
    """Raises `InvalidArgument` for anything that is none of `BACKENDS`."""
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")


def _collected(results: Iterable[Result], on_done: Callable[[int], None] | None) -> list[Result]:
    return list(_counted(results, on_done))


def _counted(results: Iterable[Result], on_done: Callable[[int], None] | None) -> Iterator[Result]:
    for number, result in enumerate(results, 1):
        if on_done is not None:
            on_done(number)
        yield result


def _generator_if_possible(backend: str) -> str:
    return "generator" if backend == "processes" else "list"


def _joblib() -> Any:
    try:
        import joblib
    except ImportError as error:
        raise MissingExtra(
            "more than one job at once needs joblib: pip install 'blockyard[lab]', or take one, --jobs 1"
        ) from error
    return joblib


def _chosen(joblib: Any, backend: str, jobs: int) -> AbstractContextManager[Any]:
    if backend == "processes":
        return nullcontext()
    if backend == "ray":
        _register_ray()
    try:
        chosen: AbstractContextManager[Any] = joblib.parallel_config(backend=backend, n_jobs=jobs)
    except ValueError as error:  # joblib's for dask without its package, or without a client
        raise MissingExtra(f"backend {backend} cannot be used: {error}") from error
    return chosen


@contextmanager
def _deaths_told() -> Iterator[None]:
    """A process that is killed, by the system for its memory or by a policy's own code, is no bug of this one."""
    try:
        yield
    except BrokenExecutor as error:
        raise WorkerDied("a process ended before its run did, for its memory or by the code of a policy") from error


def _register_ray() -> None:
    try:
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise MissingExtra(f"backend ray needs {error.name}: pip install ray") from error
    register_ray()
