"""The applications of Ray Serve that a fleet is, and Ray on this machine alone, which ends to the last process."""

from __future__ import annotations

import http.client
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.errors import MissingExtra, ModelError

from ..jobs.served_model import ServedModel
from .remains import MARK, Undertaker
from .replica import EngineReplica, ReplicaPlan

if TYPE_CHECKING:
    from .app import IngressPlan

APPLICATION, ENGINE, INGRESS = "blockyard", "engine", "ingress"
#: Of Ray's store, in which nothing of ours is: the least that it takes.
_STORE_BYTES = 80 * 2**20
#: Seconds between two looks at a replica's health, and until one that says nothing counts as ill; three in a row are
#: replaced.
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 2.0, 8.0
#: Seconds from a load to a decision about it, over which it is averaged, and from one report of it to the next.
_LOOK_BACK, _REPORT = 10.0, 2.0
#: Seconds that Ray's proxy may take to know the ingresses.
_PROXY_SECONDS = 60.0
#: No ingress has a bound of its own: `ServerLimits` has one.
_MANY = 10_000


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Says how many engines there are: `least`, and up to `most` by their load in tokens.

    token_load: of a replica, at which it is well used (`TokenLoad`). idle_seconds: of less load until one is let go.
    """

    least: int
    most: int
    token_load: float = 0.8
    idle_seconds: float = 120.0

    def options(self) -> dict[str, Any]:
        """Return what Ray Serve is told of it."""
        if self.most == self.least:
            return {"num_replicas": self.least}
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        policy = AutoscalingPolicy(
            policy_function="blockyard_serve.fleet.token_load:TokenLoad", policy_kwargs={"target": self.token_load}
        )
        scaling = AutoscalingConfig(
            min_replicas=self.least,
            max_replicas=self.most,
            upscale_delay_s=_REPORT,
            downscale_delay_s=self.idle_seconds,
            look_back_period_s=_LOOK_BACK,
            metrics_interval_s=_REPORT,
            policy=policy,
        )
        return {"autoscaling_config": scaling}


def engines(
    plan: ReplicaPlan,
    size: FleetSize,
    cost: str,
    silence: float,
    drain_seconds: float,
    num_cpus: float,
    **more: Any,
) -> Any:
    """Return the engines as an application of Ray Serve.

    drain_seconds: that an engine which is let go may take to end its answers. num_cpus: of Ray's, for each. more: other
    options of the deployment, before these.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    router = RequestRouterConfig(
        request_router_class="blockyard_serve.fleet.ray_serve.ExactRouter",
        request_router_kwargs={"cost": cost, "silence": silence},
    )
    options: dict[str, Any] = {
        "name": ENGINE,
        "max_ongoing_requests": plan.capacity,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": int(plan.device.startswith("cuda"))},
        "health_check_period_s": _HEALTH_PERIOD,
        "health_check_timeout_s": _HEALTH_TIMEOUT,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": drain_seconds,
        "max_constructor_retry_count": size.most,
        "request_router_config": router,
        "logging_config": _quiet(),
    }
    return serve.deployment(**options | size.options() | more)(EngineReplica).bind(plan)


def ingresses(engine: Any, plan: IngressPlan, count: int, num_cpus: float) -> Any:
    """Return ingresses before engines as an application of Ray Serve."""
    from ray import serve

    from .ingress import Ingress

    deployment = serve.deployment(
        name=INGRESS,
        num_replicas=count,
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": num_cpus},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=plan.options.limits.request_seconds,
        logging_config=_quiet(),
    )(Ingress)
    return deployment.bind(engine, plan)


def _quiet() -> dict[str, Any]:
    return {"log_level": "ERROR", "enable_access_log": False}


@contextmanager
def ray_here(num_gpus: int) -> Iterator[Callable[[], None]]:
    """Run Ray, with ports on loopback alone, for as long as the block lasts; then nothing of it is left.

    Yields what is to be called when all is ready: until then a signal ends this process at once. What is left then,
    and where it is killed, `remains` ends. Raises `MissingExtra` without Ray.
    """
    mark, folder = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="blockyard-fleet-"))
    _set_environment(mark)
    undertaker = Undertaker(mark, folder)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def is_ready() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        _leave_on(handlers)
        ray = _ray()
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
            yield is_ready
        finally:
            ray.shutdown()
    finally:
        undertaker.close()


@contextmanager
def engines_here(plan: ReplicaPlan, size: FleetSize, cost: str, silence: float, drain_seconds: float) -> Iterator[Any]:
    """Run Ray and engines, whose ingress is this process; yields Ray Serve's handle and the model's sizes.

    Raises `MissingExtra` without Ray, and `ModelError`, with what a replica said, where one does not become ready.
    """
    with ray_here(_num_gpus(plan, size)) as is_ready:
        from ray import serve

        serve.start(proxy_location="Disabled", logging_config=_quiet())
        handle = _run(engines(plan, size, cost, silence, drain_seconds, 0), None)
        model: ServedModel = handle.model.remote().result(timeout_s=60)
        is_ready()
        yield handle, model


@contextmanager
def fleet_here(
    plan: ReplicaPlan, size: FleetSize, front: IngressPlan, num_ingresses: int, num_cpus: float = 0
) -> Iterator[None]:
    """Run Ray, engines and ingresses behind Ray's HTTP proxy, at the host and port of `front`.

    At the end requests that run have the seconds of the limits to end. Raises as `engines_here`.
    """
    with ray_here(_num_gpus(plan, size)) as is_ready:
        from ray import serve

        options = front.options
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": options.host, "port": options.port},
            logging_config=_quiet(),
        )
        engine = engines(plan, size, front.cost, front.silence, options.limits.request_seconds, num_cpus)
        _run(ingresses(engine, front, num_ingresses, num_cpus), "/")
        _require_answer(options.host, options.port)
        is_ready()
        try:
            yield
        finally:
            end = threading.Thread(target=serve.delete, args=(APPLICATION,), daemon=True)
            end.start()
            end.join(options.limits.drain_seconds)


def _num_gpus(plan: ReplicaPlan, size: FleetSize) -> int:
    return size.most if plan.device.startswith("cuda") else 0


def _require_answer(host: str, port: int) -> None:
    """Wait until the proxy passes requests on. Raises `ModelError` where it does not."""
    deadline = time.monotonic() + _PROXY_SECONDS
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(local, port, timeout=_PROXY_SECONDS)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.2)
    raise ModelError(f"Ray's HTTP proxy does not answer at {host}:{port}")


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
            "RAY_worker_niceness": "0",  # 15 by default: engines would give way to all else, the ingress in front too
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that is ill is not waited for as one that is let go
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(_REPORT),
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


def _run(application: Any, route: str | None) -> Any:
    """Start it; return Ray Serve's handle when all of it is ready. Raises `ModelError`."""
    from ray import serve

    try:
        return serve.run(application, name=APPLICATION, route_prefix=route, logging_config=_quiet())
    except RuntimeError as error:
        raise ModelError(f"the replicas did not become ready: {_reason(serve.status()) or error}") from None


def _reason(status: Any) -> str:
    """Return the last line of what a replica said when it could not be made."""
    application = status.applications.get(APPLICATION)
    found = [] if application is None else [each.message for each in application.deployments.values()]
    lines = [line.strip() for line in "\n".join(found).splitlines() if line.strip()]
    return re.sub(r"^blockyard\.[\w.]+: ", "", lines[-1]) if lines else ""
