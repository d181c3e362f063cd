"""Gives an environment only the packages that llm-serving requires, without a download."""

from __future__ import annotations

import shutil
from importlib.metadata import Distribution, PathDistribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement


def link_requirements(site: Path) -> None:
    """Links the packages that the installed llm-serving requires into ``site``, the site-packages of an environment.

    The packages are those of the environment that runs the tests. A package that llm-serving does not require is
    missing in ``site``, even if the tests need it.
    """
    (metadata,) = site.glob("llm_serving-*.dist-info")
    linked: set[tuple[str, str]] = set()
    waiting: list[tuple[Distribution, str]] = [(PathDistribution(metadata), "")]
    while waiting:
        package, extra = waiting.pop()
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                for wanted in {"", *requirement.extras} - {each for name, each in linked if name == requirement.name}:
                    linked.add((requirement.name, wanted))
                    waiting.append((link_package(requirement.name, site), wanted))


def link_package(name: str, site: Path) -> Distribution:
    """Links the files of one package of the tests' environment into ``site``. Returns the package.

    The list of the package's files has no bytecode, because ``make`` compiles it later. It is linked too, so that the
    programs of the environment need not compile the package again.
    """
    package = distribution(name)
    for file in package.files or ():
        if file.parts[0] != ".." and not (site / file).exists():
            source, target = Path(str(package.locate_file(file))), site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, target)
            bytecode = Path(cache_from_source(str(source)))
            target = Path(cache_from_source(str(target)))
            if file.suffix == ".py" and bytecode.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                _link_or_copy(bytecode, target)
    return package


def _link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link, or a copy on another file system. Agents may not read the target of a symbolic link."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy(source, target)
