"""`python -m tests.chaos`: every experiment once, as a Markdown table. Exit code 1 if an honest one lost, doubled
or convicted anything, or a broken one did not."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.arena import Row, Scale
from tests.chaos.scenarios import BROKEN, HONEST, two_nodes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join([*HONEST, *BROKEN])}; default: all")
    parser.add_argument("--docs", type=int, default=2000)
    parser.add_argument("--shard", type=int, default=10, help="documents in one")
    parser.add_argument("--poison-every", type=int, default=1000, help="documents")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder to leave the outputs in")
    args = parser.parse_args()
    scale = Scale(
        docs=args.docs, shard=args.shard, poison_every=args.poison_every, workers=args.workers, seed=args.seed
    )
    bad: list[str] = []
    print(Row.header(), flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos", ignore_cleanup_errors=True) as temp:
        for name in args.scenarios or [*HONEST, *BROKEN]:
            root = (args.keep or Path(temp)).absolute() / name
            with two_nodes() as cluster:
                row = (HONEST | BROKEN)[name](cluster, root, scale)
            print(row.line(), flush=True)
            if name in HONEST and not (row.clean and row.dead == scale.poison):
                bad.append(f"{name}: {row}")
            if name in BROKEN and row.clean:
                bad.append(f"{name} is broken, and nothing shows it: {row}")
    for line in bad:
        print(line, file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
