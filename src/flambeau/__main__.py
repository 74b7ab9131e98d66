"""`python -m flambeau`: the command `flambeau`, also where only the sources are."""

import sys

from flambeau.cli import main

if __name__ == "__main__":
    sys.exit(main())
