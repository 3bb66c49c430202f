"""`python -m ongrid` is the command line."""

from ongrid.cli import main

if __name__ == "__main__":
    main()
