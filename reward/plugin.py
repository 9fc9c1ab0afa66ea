"""The user's functions by name: `module:attribute`, or `path/to/file.py:attribute`.

The user's directory comes last on the path, so our packages (and everything installed) always win over folders of the same name. A file
given by path is a module of its own, named after its whole path: two files called alike do not collide.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

OUR_PACKAGES = ("driver", "trainer", "rollout", "reward", "store")
FORMS = "module:attribute or path/to/file.py:attribute"


class PluginError(ValueError):
    """What is wrong with a function's name, or with the file behind it, and what to do."""


def add_to_path(directory: Path) -> None:
    """Let `module:attribute` find modules in this directory, after everything else."""
    entry = str(directory.resolve())
    if entry not in sys.path:
        sys.path.append(entry)


def load(target: str, directory: Path) -> Callable[..., Any]:
    """The callable behind `target`; a relative path counts from `directory`. Runs the user's module. Raises PluginError."""
    where, colon, attribute = target.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise PluginError(f"{target!r} does not name a function; write {FORMS}")
    module = _from_file(where, directory, target) if where.endswith(".py") else _from_name(where, target)
    try:
        found = getattr(module, attribute)
    except AttributeError as error:
        raise PluginError(f"{target!r}: {module.__file__ or where} has no {attribute!r}{_alternatives(module)}") from error
    if not callable(found):
        raise PluginError(f"{target!r} is a {type(found).__name__}, which cannot be called; name a function")
    return found


def version_of(function: Callable[..., Any]) -> str:
    """The first half of a digest of the file that defines it, or `unknown`: what tells two scorers of one name apart."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
        return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16] if source else "unknown"
    except (TypeError, OSError):
        return "unknown"


def _from_file(where: str, directory: Path, target: str) -> ModuleType:
    path = (directory / where).resolve()
    if not path.is_file():
        raise PluginError(f"{target!r}: there is no file {path}; a relative path counts from {directory.resolve()}")
    name = f"headrace_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{target!r}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickles of the user's look their own module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(f"{target!r}: {path} {_raised(error)}") from error
    return module


def _from_name(where: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        root = where.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name is not None and where.startswith(error.name):
            if root in OUR_PACKAGES:
                advice = (
                    f"{root} is a package of Headrace and wins over a folder of yours; rename the folder, or write {root}/….py:attribute"
                )
            else:
                advice = f"install it, put it beside the configuration, or write {FORMS.split(' or ')[1]}"
            raise PluginError(f"{target!r}: there is no module {error.name!r}; {advice}") from error
        raise PluginError(f"{target!r}: importing {where} {_raised(error)}") from error


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


def _alternatives(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    return f"; it has {', '.join(names[:8])}" if names else "; if you meant a file of yours, name it by its path"
