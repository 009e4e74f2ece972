"""`python -m deltaplane_server` is `deltaplane`."""

from deltaplane_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
