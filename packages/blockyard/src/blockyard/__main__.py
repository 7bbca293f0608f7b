"""`python -m blockyard`, which `torchrun -m blockyard` runs too: the command line."""

import sys

from .cli.main import main

sys.exit(main())
