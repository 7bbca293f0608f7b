"""Entry point of `python -m blockyard` and `torchrun -m blockyard`."""

import sys

from .cli.main import main

sys.exit(main())
