"""The command line: every command is a door into the library and holds no logic of its own."""

from ongrid.cli.app import main

__all__ = ["main"]
