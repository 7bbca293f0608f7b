"""Ray runs on this machine alone here, with a folder and a mark of its own, and ends to the last process."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import MissingExtra, ModelError
from ..jobs.served_model import ServedModel
from .remains import MARK, Undertaker
from .replica import EngineReplica, ReplicaPlan

APPLICATION = "blockyard"
#: Of Ray's store, in which nothing of ours is: the least that it takes.
_STORE_BYTES = 80 * 2**20
#: Seconds between two looks at a replica's health, and until one that says nothing counts as ill; three in a row are
#: replaced.
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 2.0, 8.0


@contextmanager
def replicas_here(plan: ReplicaPlan, num_replicas: int, cost: str, silence: float) -> Iterator[tuple[Any, ServedModel]]:
    """Run Ray and replicas, with ports on loopback alone, for as long as the block lasts; then nothing of it is left.

    Yields Ray Serve's handle and the sizes of the model when all replicas are ready. Until then a signal ends this
    process at once; what is left then, and where it is killed, `remains` ends. Raises `MissingExtra` without Ray, and
    `ModelError`, with what a replica said, where one does not become ready.
    """
    mark, folder = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="blockyard-fleet-"))
    _set_environment(mark)
    undertaker = Undertaker(mark, folder)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        _leave_on(handlers)
        ray = _ray()
        num_gpus = num_replicas if plan.device.startswith("cuda") else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local",
                num_cpus=1,  # no replica asks for any: what runs here is counted in memory
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(folder),
            )
        _leave_on(handlers)  # Ray sets one of its own
        try:
            handle = _deploy(plan, num_replicas, cost, silence)
            model = handle.model.remote().result(timeout_s=60)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            yield handle, model
        finally:
            ray.shutdown()
    finally:
        undertaker.close()


def _leave_on(numbers: Iterable[int]) -> None:
    """Have a signal end this process at once, unless it is ignored: Ray, half begun, would be waited for long."""

    def leave(number: int, _: Any) -> None:
        print("blockyard: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + number)

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def _set_environment(mark: str) -> None:
    """Set what Ray reads when it is imported and begun."""
    os.environ.update(
        {
            MARK: mark,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 0 is Ray's way to say: addresses of loopback
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # no other program of this machine may give it work
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_enable_worker_prestart": "0",
        }
    )


def _ray() -> Any:
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise MissingExtra(f"a fleet needs {error.name}: pip install 'blockyard[fleet,serve]'") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray


def _deploy(plan: ReplicaPlan, num_replicas: int, cost: str, silence: float) -> Any:
    """Start the replicas; return Ray Serve's handle when all of them are ready. Raises `ModelError`."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=quiet)
    router = RequestRouterConfig(
        request_router_class="blockyard.fleet.ray_serve.ExactRouter",
        request_router_kwargs={"cost": cost, "silence": silence},
    )
    deployment = serve.deployment(
        name="engine",
        num_replicas=num_replicas,
        max_ongoing_requests=plan.capacity,
        ray_actor_options={"num_cpus": 0, "num_gpus": int(plan.device.startswith("cuda"))},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=2.0,
        max_constructor_retry_count=num_replicas,
        request_router_config=router,
        logging_config=quiet,
    )(EngineReplica)
    try:
        return serve.run(deployment.bind(plan), name=APPLICATION, route_prefix=None, logging_config=quiet)
    except RuntimeError as error:
        raise ModelError(f"the replicas did not become ready: {_reason(serve.status()) or error}") from None


def _reason(status: Any) -> str:
    """Return the last line of what a replica said when it could not be made."""
    application = status.applications.get(APPLICATION)
    found = [] if application is None else [each.message for each in application.deployments.values()]
    lines = [line.strip() for line in "\n".join(found).splitlines() if line.strip()]
    return re.sub(r"^blockyard\.[\w.]+: ", "", lines[-1]) if lines else ""
