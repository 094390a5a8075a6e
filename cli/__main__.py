"""`python -m dslc`, which is `dslc`: for launchers that start a module, as torchrun does."""

import sys

from dslc.main import main

if __name__ == "__main__":
    sys.exit(main())
