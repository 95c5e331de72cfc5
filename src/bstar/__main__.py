"""`python -m bstar`: the same as `bstar`."""

from bstar.interfaces.cli.main import main

main()
