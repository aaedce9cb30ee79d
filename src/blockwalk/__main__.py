"""``python -m blockwalk`` is ``blockwalk``."""

from __future__ import annotations

import sys

from blockwalk.cli.main import main

sys.exit(main())
