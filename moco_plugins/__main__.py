"""``python -m moco_plugins`` is ``moco-plugins``."""

from .cli import main

raise SystemExit(main())
