"""`python -m sluice.cli` is the same as `sluice`."""

from __future__ import annotations

from sluice.cli import main

if __name__ == "__main__":
    main()
