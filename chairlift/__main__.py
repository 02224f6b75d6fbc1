"""`python -m chairlift` is the `chairlift` command."""

import sys

from chairlift.cli import main

sys.exit(main())
