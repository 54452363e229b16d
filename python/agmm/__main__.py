"""The command `agmm`, which `python -m agmm` runs too."""

from __future__ import annotations

import sys

from agmm import _installation


def main() -> None:
    """Runs the command line. It first says in a line what is wrong with the installation, with
    which `doctor` works nevertheless; `--help` and `--version` do not look."""
    try:
        if isinstance(_installation.import_error, KeyboardInterrupt):
            raise KeyboardInterrupt
        fault = None if _installation.asks_for_help() else _installation.fault()
        if fault is not None:
            more = "" if sys.argv[1:2] == ["doctor"] else "; `agmm doctor` says more"
            print(f"agmm: {fault}{more}", file=sys.stderr)
        from agmm.cli.app import app
    except KeyboardInterrupt:
        print("agmm: interrupted", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        if error.name in _installation.EXTRAS:
            reason = _installation.lacks(error.name)
        else:
            reason = f"the commands do not load: {error}"
        print(f"agmm: {reason}", file=sys.stderr)
        sys.exit(1 if sys.argv[1:2] != ["doctor"] else _doctor())
    app(prog_name="agmm")


def _doctor() -> int:
    """The exit code of `agmm doctor`, which needs no extra."""
    from agmm.cli import doctor_command

    try:
        return 0 if doctor_command.run(as_json="--json" in sys.argv[2:]) else 1
    except KeyboardInterrupt:
        print("agmm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    main()
