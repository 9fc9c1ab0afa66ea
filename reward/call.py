"""One call of a function of the user's, in a process of its own: `python -P -m reward.call TARGET DIRECTORY PARENT_PID`.

One JSON value comes in on standard input, one goes out on standard output: `{"ok": what it returned}`, or `{"error": why there is
nothing}`. Whoever calls may kill it at any time; it ends when its parent does. What the function prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from reward.lifeline import die_with
from reward.plugin import PluginError, add_to_path, load


def called(target: str, directory: Path, argument: Any) -> dict[str, Any]:
    add_to_path(directory)
    try:
        returned = load(target, directory)(argument)
        return {"ok": msgspec.to_builtins(returned)}
    except PluginError as error:
        return {"error": str(error)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever it is, it is the user's to read
        return {"error": f"{target} raised {type(error).__name__}: {error}"}


def main() -> None:
    target, directory, parent_pid = sys.argv[1:]
    die_with(int(parent_pid))
    sink = os.dup(1)
    os.dup2(2, 1)
    answer = called(target, Path(directory), msgspec.json.decode(sys.stdin.buffer.read()))
    try:
        body = msgspec.json.encode(answer)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        body = msgspec.json.encode({"error": f"{target} returned what is no JSON: {error}"})
    with os.fdopen(sink, "wb") as out:
        out.write(body)


if __name__ == "__main__":
    main()
