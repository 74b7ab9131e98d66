"""`python -m flambeau`: the command `flambeau`, which also works from the sources without an installation."""

import sys

from flambeau.cli import main

if __name__ == "__main__":
    sys.exit(main())
