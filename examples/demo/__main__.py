"""Streams one question through a base model and two adapters at the same time.

    python -m examples.demo "Where is my umbrella?"

It fetches the small model of the examples, starts a server with both adapters on free ports, and runs
deltactl against it as a person would. Ctrl-C ends it, and the server, at any point.
"""

import sys

try:
    from examples.demo.demo import main

    sys.exit(main())
except KeyboardInterrupt:
    sys.exit(130)
