"""Imports of a job at a git revision: modules within the repository come from the revision.

Model: `export_revision` has written the files of a commit to a folder, with links to what git does not track. A path
within the checkout stands for the same path of that folder, unless a link leads back to the checkout: packages of a
virtual environment, compiled modules and submodules stay. The same holds for entries of `sys.path` and `PYTHONPATH`,
and for modules that another finder knows by their place, as of an editable install. A module that the checkout has and
the revision does not have cannot be imported.

Limits: dslc itself is the running one, also in its own repository. Processes that a job starts with a fresh interpreter
see `PYTHONPATH` alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_RUNNING = __name__.partition(".")[0]  # this package, which stays as it is


class RevisionFinder(MetaPathFinder):
    """Finds modules by the finders after it, and takes those that lie within a checkout from an exported revision."""

    def __init__(self, top: str, folder: str) -> None:
        self._top, self._folder = os.path.realpath(top), os.path.realpath(folder)

    def exported(self, path: str) -> str | None:
        """Returns the place of a path in the revision: the path itself if it is not in the checkout, or if git does not
        track it; None if the revision has no such path.
        """
        real = os.path.realpath(path)
        if not (real + os.sep).startswith(self._top + os.sep):
            return path
        place = os.path.join(self._folder, os.path.relpath(real, self._top))
        if not os.path.lexists(place):
            return None
        is_link = not (os.path.realpath(place) + os.sep).startswith(self._folder + os.sep)
        return path if is_link else place

    def exported_paths(self, paths: Sequence[str]) -> list[str]:
        """Returns the places of import paths, without those that the revision does not have."""
        return [place for path in paths if (place := self.exported(path or os.getcwd())) is not None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == _RUNNING:
            return None
        finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next((spec for each in finders if (spec := each.find_spec(fullname, path, target)) is not None), None)
        if spec is None or not (spec.has_location or spec.submodule_search_locations):
            return spec
        if spec.origin is None or not spec.has_location:  # a package without an `__init__.py`
            spec.submodule_search_locations = self.exported_paths(list(spec.submodule_search_locations or ()))
            return spec
        origin = self.exported(spec.origin)
        if origin == spec.origin:
            return spec
        if origin is None:
            raise ModuleNotFoundError(f"the revision has no module `{fullname}`", name=fullname)
        is_package = spec.submodule_search_locations is not None
        return importlib.util.spec_from_file_location(
            fullname, origin, submodule_search_locations=[os.path.dirname(origin)] if is_package else None
        )


@dataclass(frozen=True, kw_only=True)
class ExportedRevision:
    """The files of a revision in `folder`, and the checkout at `top` whose places they take."""

    top: str
    folder: str

    @contextlib.contextmanager
    def imports(self) -> Iterator[None]:
        """Imports modules of the checkout from the revision, in this process and those that are forked from it. Modules
        that this process has imported before stay.
        """
        finder, paths, variable = RevisionFinder(self.top, self.folder), sys.path[:], os.environ.get("PYTHONPATH")
        sys.path[:] = finder.exported_paths(paths)
        sys.meta_path.insert(0, finder)
        if variable:
            entries = [each for each in variable.split(os.pathsep) if each]
            os.environ["PYTHONPATH"] = os.pathsep.join(finder.exported_paths(entries))
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            sys.path[:] = paths
            if variable:
                os.environ["PYTHONPATH"] = variable
