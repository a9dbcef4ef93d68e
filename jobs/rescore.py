"""The entry script: `ray job submit --working-dir . -- python jobs/rescore.py run CONFIG`.

The same program as the `rescore` command.
"""

import sys
from pathlib import Path

# Python puts this file's directory first on sys.path; `config` or `retry` in there would shadow other
# people's modules, and `jobs` itself would not be found. Put the checkout there instead.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

from jobs.cli import main  # noqa: E402 - only importable now

if __name__ == "__main__":
    main()
