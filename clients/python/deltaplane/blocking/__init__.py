"""The clients that block."""
