"""The command line. Every mistake of a user's is one line on stderr and exit code 2."""

from __future__ import annotations

import csv
import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.config import Config, load_config, resolve_paths
from jobs.outcome import summary, where_time_went
from jobs.progress import Reporter
from ranker.errors import RankerError
from shards import dlq, export, snapshot, verify
from shards import status as status_
from shards.errors import RescoreError, UsageError
from shards.layout import Layout, check_name
from shards.lock import run_lock
from shards.manifest import Manifest

_BEGAN = time.monotonic()

app = typer.Typer(
    name="rescore",
    help="Re-score a whole text corpus with a new ranker: nothing lost, nothing doubled.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
dlq_app = typer.Typer(
    name="dlq",
    help="Dead letters: documents and shards that will not be tried again by themselves.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(dlq_app)

RunDir = Annotated[str, typer.Argument(metavar="RUN", help="The output directory of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set ranker.dtype=bfloat16"),
]
Root = Annotated[
    str | None,
    typer.Option(help="Directory that relative paths of CONFIG start from (default: the current one)."),
]
ModelVersion = Annotated[
    str | None,
    typer.Option("--model-version", help="Which model_version; default: the one that ran last."),
]


class Format(StrEnum):
    """How `sql` prints rows."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def main() -> None:
    """The program. Exit codes: see `rescore run --help`."""
    try:
        app(standalone_mode=True)
    except (UsageError, RankerError) as e:
        _fail(str(e), 2)
    except RescoreError as e:
        _fail(str(e), 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


def _fail(message: str, code: int) -> None:
    print(f"rescore: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@app.command()
def run(
    config: ConfigFile,
    set_: Overrides = None,
    root: Root = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Each unreadable file becomes one dead letter.")
    ] = False,
) -> None:
    """Plan, score, verify; resumes by itself.

    Exit codes: 0 complete · 3 complete, with more dead letters than retry.dead_letters_ok · 4 stopped by
    the circuit breaker · 5 interrupted, resumable · 2 wrong use or configuration · 1 anything unforeseen.
    """
    from jobs import driver  # loads Ray's and Arrow's share only for the command that needs it

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    overrides = list(set_ or [])
    if skip_unreadable:
        overrides.append("corpus.skip_unreadable=true")
    reporter = Reporter()
    outcome = driver.run(_configured(config, overrides, root), reporter, now=_BEGAN)
    for line in summary(outcome):
        reporter.note(line)
    sys.exit(int(outcome.exit))


def _configured(path: str, overrides: Sequence[str], root: str | None) -> Config:
    """The configuration with absolute paths; a class of the user's own becomes importable."""
    config = resolve_paths(load_config(path, overrides), root=root)
    if root is not None or config.ranker.kind == "custom":
        sys.path.append(str(Path(root or ".").absolute()))
    return config


@app.command()
def fingerprint(config: ConfigFile, json_: AsJson = False, set_: Overrides = None, root: Root = None) -> None:
    """What decides a score, component by component, as `run` would bind it; the last line is the whole.

    Components that the output's plan of this model_version has otherwise are marked. Exit code 1 if the output
    holds scores with another fingerprint (`run` refuses them), else 0. Starts no Ray cluster.
    """
    from jobs import binding, identity  # loads Arrow only for the command that needs it

    checked = _configured(config, list(set_ or []), root)
    check_name(checked.ranker.model_version)
    note = Reporter().note
    with _spinner("Reading the checkpoint", quiet=json_):
        bound = binding.bind(checked, gpus=lambda: identity.gpus(checked), note=note)
    shown = identity.Identity(config=checked, bound=bound, standing=binding.standing(checked, bound))
    if json_:
        print(json.dumps(shown.as_json(), ensure_ascii=False))
    else:
        _print_marked(shown.rows())
        for line in shown.lines():
            note(line)
    sys.exit(1 if shown.refused else 0)


def _print_marked(rows: Sequence[tuple[str, str, str]]) -> None:
    """(name, value, remark) in columns; on a terminal a value is cut to fit, and a difference stands out."""
    console = Console(highlight=False, soft_wrap=True)
    names, remarks = (max(len(row[column]) for row in rows) for column in (0, 2))
    room = max(console.width - names - remarks - 4, 32) if console.is_terminal else 1 << 30
    for name, value, remark in rows:
        shown = value if len(value) <= room else f"{value[: room - 1]}…"
        style = "red" if remark.startswith("≠") else ""
        line = Text.assemble((name, "bold"), " " * (names - len(name) + 2), (shown, style))
        if remark:
            line.append(f"{' ' * max(2, min(room, 32) - len(shown) + 2)}{remark}", style or "dim")
        console.print(line)


@app.command()
def status(
    run: RunDir,
    json_: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second until the run ends.")] = False,
    model_version: ModelVersion = None,
) -> None:
    """How far a run is. Reads the published snapshot: safe at any time, from anywhere."""
    layout = Layout.existing(run)
    read: Callable[[], dict[str, Any]] = lambda: status_.status(layout, model_version)  # noqa: E731
    if json_:
        while True:
            state = read()
            print(json.dumps(state, default=str), flush=True)
            if not watch or state["state"] != "running":
                return
            time.sleep(1.0)
    console = Console(highlight=False)
    if not watch:
        console.print(_status_table(read()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = read()
            live.update(_status_table(state), refresh=True)
            if state["state"] != "running":
                return
            time.sleep(1.0)


def _status_table(state: Mapping[str, Any]) -> Table:
    docs, shards = state["docs"], state["shards"]
    table = Table.grid(padding=(0, 2))
    done = docs["scored"] + docs["dead"]
    share = f" ({done / docs['total']:.1%})" if docs["total"] else ""
    rows = {
        "model_version": state["model_version"],
        "state": state["state"].replace("_", " "),
        "documents": f"{docs['scored']:,} scored, {docs['dead']:,} dead of {docs['total']:,}{share}",
        "shards": ", ".join(f"{n:,} {name}" for name, n in shards.items()),
    }
    if state["state"] == "running":
        rows["rate"] = f"{state['docs_per_s'] or 0:,.0f} docs/s"
        rows["time left"] = _duration(state["eta_s"])
        rows["oldest pending"] = _duration(state["oldest_pending_s"])
        for worker in state["workers"]:
            rows[f"worker {worker['worker']}"] = _worker(worker)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    return table


def _worker(worker: Mapping[str, Any]) -> str:
    shares = worker.get("shares") or {}
    shares = json.loads(shares) if isinstance(shares, str) else shares
    return f"{worker['docs']:,} docs on {worker['device'] or 'cpu'}{where_time_went(shares)}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    s = int(seconds)
    return f"{s // 3600}:{s % 3600 // 60:02}:{s % 60:02}"


@app.command()
def sql(
    run: RunDir,
    query: Annotated[
        str,
        typer.Argument(
            metavar="SQL", help="DuckDB SQL over scores, shards, dead_letters, attempts, runs, lag_samples."
        ),
    ],
    format_: Annotated[Format, typer.Option("--format", help="How to print the rows.")] = Format.TABLE,
) -> None:
    """Query the results, while the run works and after it."""
    result = snapshot.query(Layout.existing(run), query)
    _print_rows(result.columns, result.rows, format_)


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], format_: Format) -> None:
    if format_ is Format.JSON:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True)), default=str, ensure_ascii=False))
    elif format_ is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        # On a terminal a row is one line, cut to fit; elsewhere nothing is cut.
        terminal = sys.stdout.isatty()
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for row in rows:
            table.add_row(*(Text("" if value is None else _cell(value)) for value in row))
        Console(highlight=False, width=None if terminal else 100_000).print(table)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


@dlq_app.command("list")
def dlq_list(
    run: RunDir,
    json_: AsJson = False,
    all_: Annotated[bool, typer.Option("--all", help="Also those that were redriven or resolved.")] = False,
) -> None:
    """List dead letters."""
    letters = dlq.dead_letters(Layout.existing(run), state=None if all_ else "dead")
    if json_:
        for letter in letters:
            print(json.dumps(letter, default=str, ensure_ascii=False))
        return
    if not letters:
        print("No dead letters.")
        return
    columns = ["id", "doc_id", "stage", "error_type", "file", "row", "message"]
    if all_:
        columns.insert(1, "state")
    rows = [[_short(c, letter[c]) for c in columns] for letter in letters]
    _print_rows(columns, rows, Format.TABLE)


def _short(column: str, value: Any) -> Any:
    if column == "file" and isinstance(value, str):
        return value.rsplit("/", 1)[-1]
    if column == "message" and isinstance(value, str):
        return textwrap.shorten(value, 100, placeholder=" …")
    return value


@dlq_app.command("show")
def dlq_show(run: RunDir, id_: Annotated[str, typer.Argument(metavar="ID", help="Or its beginning.")]) -> None:
    """Everything about one dead letter, with its traceback."""
    letter = dlq.dead_letter(Layout.existing(run), id_)
    width = max(len(name) for name in letter)
    for name, value in letter.items():
        if name != "traceback":
            print(f"{name:{width}}  {'' if value is None else value}")
    if letter.get("traceback"):
        print(f"\n{letter['traceback'].rstrip()}")


@dlq_app.command("redrive")
def dlq_redrive(
    run: RunDir,
    where: Annotated[
        str | None, typer.Option(help="SQL condition over dead_letters, such as \"stage = 'read'\".")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be put back.")] = False,
    model_version: ModelVersion = None,
) -> None:
    """Put dead letters back to be tried by the next `rescore run`, with a fresh budget."""
    layout = Layout.existing(run)
    with run_lock(layout, purpose="redrive"), Manifest.open(layout, now=status_.utc_now) as manifest:
        redriven = manifest.redrive(model_version, where=where, dry_run=dry_run)
    what = f"{redriven.letters:,} dead letters ({redriven.docs:,} documents of {redriven.shards:,} shards)"
    if dry_run:
        print(f"Would put back {what}.")
    elif not redriven.letters:
        print("No dead letter matches: nothing to put back.")
    else:
        print(f"Put back {what}. The next `rescore run` tries them.")


@dlq_app.command("export")
def dlq_export(
    run: RunDir,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The Parquet file to write.")],
    where: Annotated[
        str | None, typer.Option(help="SQL condition over dead_letters, such as \"stage = 'read'\".")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    model_version: ModelVersion = None,
) -> None:
    """Write the original documents of dead letters, all their columns, to a Parquet file."""
    path = Path(file).expanduser()
    exported = export.export(Layout.existing(run), path, where=where, model_version=model_version, force=force)
    for line in exported.left_out:
        print(f"not exported: {line}", file=sys.stderr)
    if not exported.letters:
        print("No dead letter matches: nothing to export.")
    elif exported.docs:
        print(f"Exported {exported.docs:,} documents of {exported.letters:,} dead letters to {path}.")
    else:
        print("No document could be exported.")


@app.command("verify")
def verify_command(run: RunDir, json_: AsJson = False, model_version: ModelVersion = None) -> None:
    """Prove from the files alone that nothing is lost and nothing is doubled. Exit code 1 if not."""
    with _spinner("Reading every part", quiet=json_):
        result = verify.verify(Layout.existing(run), model_version)
    if json_:
        print(json.dumps(result.as_json()))
    else:
        for line in result.lines():
            print(line)
    sys.exit(0 if result.ok else 1)


@contextmanager
def _spinner(text: str, *, quiet: bool) -> Any:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
    else:
        with console.status(text):
            yield
