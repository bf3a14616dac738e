"""hatchling's hook: compiles the native kernels into the wheel, or beside the sources where the
install is editable. Without a compiler, or where compiling fails, it warns: the wheel is then pure
Python and works on the torch path.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]  # the argument is hatch's own
    """hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Any: a dict of hatchling's, whose values have several types."""
        native = _build_native(Path(self.root))
        try:
            library: Path = native.build(say=self.app.display_info)
        except native.BuildError as error:
            self.app.display_warning(f"specserve will run without its native kernels: {error}")
            return
        if version == "editable":
            return  # the library lies beside its sources, where the package finds it
        build_data["force_include"][str(library)] = f"specserve_kernels/_native/{library.name}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # plain C calls: any Python 3 of this platform


def _build_native(root: Path) -> ModuleType:
    """The module by its path: its package imports torch, which may not be installed here."""
    path = root / "kernels" / "specserve_kernels" / "build_native.py"
    spec = importlib.util.spec_from_file_location("build_native", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
