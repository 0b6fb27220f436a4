"""``python3 -m outrider_local COMMAND``."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (the very point: to say so instead of failing on syntax)
    sys.exit("error: Python 3.11 or newer is needed; choose one: make PYTHON=python3.12 up")

from outrider_local.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
