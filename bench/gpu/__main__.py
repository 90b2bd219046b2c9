"""python -m bench.gpu [PART ...] [--call NAME] [--quick] [--output FOLDER] [--resume FOLDER] [--budget-s 530]
python -m bench.gpu collect FOLDER

Needs the standard library and torch; what else it needs it takes from the archive that `make gpu-wheels` left, where it
is not installed. A call is parts that fit into nine minutes: 1 right, 2 speed, 3 migration, 4 shapes, 5 rest; without a
name of a part or call all of them, as far as the time goes. All that is found goes to one folder. `--resume` goes on from
the folder of an earlier call: what is done there is not run again. `collect` files such a folder under bench/results.

Without a CUDA device the parts run on the CPU with small shapes (as with --quick): whether all works, not how fast. The
first line printed says what counts: FAILED (a fallback on CUDA was chosen), INCOMPLETE or DONE. Exit status: 0 where
every part that was asked for is done, or is left out because this machine cannot show it, and nothing fell back; else 1;
2 where it could not begin. What SIGTERM ends is written down and told all the same.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import order, results
from bench.gpu.fallbacks import verdict
from bench.gpu.page import page
from bench.gpu.results import Document
from bench.gpu.runner import ARCHIVES, REPOSITORY, Machine, Run, commit_of, environment_of, find_machine


def document_of(options: argparse.Namespace, machine: Machine) -> Document:
    """A new one, or the one that is gone on with. Raises `ValueError` where that is of another machine or size."""
    is_quick = options.quick or machine.device == "cpu"
    if options.resume is None:
        commit = options.commit or commit_of(REPOSITORY)
        now = time.strftime("%Y-%m-%dT%H-%M-%S")
        return Document(now, now[:10], machine.device, machine.card, machine.driver, commit, is_quick)
    document = results.load(options.resume / results.STATE)
    of_then, of_now = (document.device, document.card, document.is_quick), (machine.device, machine.card, is_quick)
    if of_then != of_now:
        raise ValueError(
            f"{options.resume} is of {document.card or 'a CPU'}{', small shapes' * document.is_quick}, "
            f"and this is {machine.card or 'a CPU'}{', small shapes' * is_quick}: figures of both do not belong together"
        )
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(order.BY_NAME)}")
    parser.add_argument("--call", action="append", default=[], metavar="NAME", help=", ".join(order.CALLS))
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--output", type=Path, default=REPOSITORY / ".tideway/bench/gpu", help="folder (%(default)s)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="with the results of an earlier call")
    parser.add_argument("--site", type=Path, default=next((file for file in ARCHIVES if file.exists()), None),
                        help="archive of make gpu-wheels (%(default)s)")  # fmt: skip
    parser.add_argument("--budget-s", type=seconds, default=order.BUDGET_S, help="for all parts (%(default)s)")
    parser.add_argument("--commit", default="", help="of the tree, where it is no checkout")
    options = parser.parse_args(arguments)
    if options.parts[:1] == ["collect"]:
        return collect(parser, options.parts[1:])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is known is written down first
    try:
        try:
            asked_for = order.asked_for(options.parts, options.call)
            environment = environment_of(options.site)
            machine = find_machine(environment)
            document = document_of(options, machine)
            document.asked_for = asked_for
            run = Run(document, machine, environment, options.output, budget_s=options.budget_s, earlier=options.resume)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        return finish(run)
    finally:
        signal.signal(signal.SIGTERM, before)


def finish(run: Run) -> int:
    """Runs what is to be run, and prints what is known then, however it ends; returns the status."""
    status = 1
    try:
        try:
            run.run_all()
        finally:
            run.close()
        status = run.status
    except OSError as error:  # a disk that is full, for one
        print(f"INCOMPLETE: not all of it could be written down: {error}")
    finally:
        print(page(run.document))
        print(verdict(run.document))  # again, as a page is long
    return status


def seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value


def collect(parser: argparse.ArgumentParser, folders: list[str]) -> int:
    if len(folders) != 1:
        parser.error("collect FOLDER: one folder, of --output")
    try:
        written = results.collect(Path(folders[0]), REPOSITORY / "bench/results")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(str(path.relative_to(REPOSITORY)) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
