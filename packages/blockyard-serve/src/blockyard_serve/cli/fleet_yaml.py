"""`blockyard fleet serve` as an application that `serve deploy` and `serve run` take from a YAML file, on any cluster.

applications:
- import_path: blockyard_serve.cli.fleet_yaml:application
  args: {model: /models/my-llama, num_blocks: 2000, replicas: 3, ingresses: 2}
"""

from __future__ import annotations

from typing import Any

from blockyard.cli import parse
from blockyard.errors import InvalidArgument

from ..fleet.cluster import engines, ingresses
from .fleet_serve import cluster_setup

#: What the file says elsewhere, or Ray Serve by itself.
_ELSEWHERE = {"host": "http_options", "port": "http_options"}


def application(args: dict[str, Any]) -> Any:
    """Return the application: deployments `ingress` and `engine`, whose other options the file may set.

    args: the options of `blockyard fleet serve` by name, without dashes before it and with _ between words; a flag is
    true, a repeated option a list. The model's folder is on every node. Raises `InvalidArgument` for what the command
    does not have, and what the command raises.
    """
    try:
        options = parse(["fleet", "serve", *_words(args)])
    except SystemExit:
        raise InvalidArgument(f"args is {args}; blockyard fleet serve --help says what it may have") from None
    options.ingresses = max(options.ingresses, 1)
    setup = cluster_setup(options)
    seconds = setup.asked.limits.request_seconds
    engine_application = engines(setup.plan, setup.size, setup.cost, setup.silence, seconds, setup.plan.threads)
    return ingresses(engine_application, setup.front(setup.asked), options.ingresses, 1)


def _words(args: dict[str, Any]) -> list[str]:
    """Return options as a shell would hand them over."""
    words: list[str] = []
    for name, value in args.items():
        if name in _ELSEWHERE:
            raise InvalidArgument(f"args has {name}; it belongs to {_ELSEWHERE[name]} of the file")
        if name == "model":
            words.insert(0, str(value))
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not False and value is not None:
            for each in value if isinstance(value, list) else [value]:
                words.append(f"--{name.replace('_', '-')}={each}")
    return words
