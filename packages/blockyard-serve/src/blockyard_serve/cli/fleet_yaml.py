"""`blockyard fleet serve` as an application for a YAML file of `serve deploy` and `serve run`, on any cluster.

applications:
- import_path: blockyard_serve.cli.fleet_yaml:application
  args: {model: /models/my-llama, num_blocks: 2000, replicas: 3, ingresses: 2}
"""

from __future__ import annotations

from typing import Any

from blockyard.cli import parse
from blockyard.errors import InvalidArgument

from ..fleet.cluster import engine_application, ingress_application
from .fleet_serve import cluster_setup

#: Options that belong to another part of the file.
_ELSEWHERE = {"host": "http_options", "port": "http_options"}


def application(args: dict[str, Any]) -> Any:
    """Return the application. The file may set further options of its deployments, `ingress` and `engine`.

    Raises `InvalidArgument` for an unknown option; otherwise like the command.

    Args:
        args: options of `blockyard fleet serve` by name, with _ for - and without leading dashes. A flag is true, a
            repeated option is a list. Every node needs the model's folder.
    """
    try:
        options = parse(["fleet", "serve", *_words(args)])
    except SystemExit:
        raise InvalidArgument(f"args is {args}; see blockyard fleet serve --help for its options") from None
    options.ingresses = max(options.ingresses, 1)
    setup = cluster_setup(options)
    seconds = setup.server_options.limits.request_seconds
    engines = engine_application(setup.plan, setup.size, setup.policy, seconds, setup.plan.threads)
    return ingress_application(engines, setup.ingress_plan(setup.server_options), options.ingresses, 1)


def _words(args: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in args.items():
        if name in _ELSEWHERE:
            raise InvalidArgument(f"args has {name}; set it in {_ELSEWHERE[name]} of the file")
        if name == "model":
            words.insert(0, str(value))
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not False and value is not None:
            for each in value if isinstance(value, list) else [value]:
                words.append(f"--{name.replace('_', '-')}={each}")
    return words
