"""`python -m deltaplane.cli` is deltactl."""

import sys

from deltaplane.cli.main import main

sys.exit(main())
