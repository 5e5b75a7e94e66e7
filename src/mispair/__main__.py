"""`python -m mispair`."""

import sys

from mispair.cli.main import main

sys.exit(main())
