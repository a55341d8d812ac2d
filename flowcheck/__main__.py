"""`python -m flowcheck`: the command line without the installed script."""

from flowcheck.cli import main

main()
