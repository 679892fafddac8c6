"""`python -m trimaran` is the `trimaran` command."""

import sys

from trimaran.cli.main import main

sys.exit(main())
