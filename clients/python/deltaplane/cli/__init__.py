"""deltactl: administers a deltaplane server and generates from a terminal."""
