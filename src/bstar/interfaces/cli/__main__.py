"""`python -m bstar.interfaces.cli`: the same as `bstar`."""

from bstar.interfaces.cli.main import main

main()
