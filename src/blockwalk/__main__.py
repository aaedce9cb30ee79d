"""``python -m blockwalk`` is ``blockwalk``."""

import sys

from blockwalk.cli import main

sys.exit(main())
