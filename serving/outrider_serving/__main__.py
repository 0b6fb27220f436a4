"""`python -m outrider_serving`: the `outrider` command."""

import sys

from outrider_serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
