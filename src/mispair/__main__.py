"""`python -m mispair`."""

import sys

from mispair.cli import main

sys.exit(main())
