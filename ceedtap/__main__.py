"""``python -m ceedtap``."""

import sys

from ceedtap.cli import main

sys.exit(main())
