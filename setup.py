"""What pyproject.toml cannot say: names, data files and long description are made at the build."""

import os
import sys
from pathlib import Path

# Imported first: it brings a distutils of its own, which Python 3.12 no longer has.
from setuptools import Extension, find_packages, setup  # isort: skip
from distutils.command.install_data import install_data

from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from make.long_description import long_description  # isort: skip
from make.own_names import HERE, INSTALLED, as_installed, packages_installed  # isort: skip


class MadeFiles(install_data):
    """Makes man pages and completion from the parsers, and takes unit and docs with them."""

    def run(self) -> None:
        """Write them to the build's own place, then into the wheel."""
        from make.shipped_files import written

        made = Path(self.get_finalized_command("build").build_base).absolute() / "shipped"
        self.data_files = list(written(made).items())
        super().run()


class OwnNames(build_py):
    """Gives the modules of a wheel the names that they have where others' packages are, too."""

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy one module, and then write it with these names."""
        path, copied = super().build_module(module, module_file, package)
        source = Path(module_file).read_text()
        if (installed := as_installed(source)) != source:
            Path(path).write_text(installed)
        return path, copied


PACKAGES = find_packages(include=["kvfs", "kvfs.*", HERE, f"{HERE}.*"])
#: An editable installation is this tree: nothing is copied, and nothing has another name.
IS_THIS_TREE = "editable_wheel" in sys.argv

READER = "fuse/compiled_reader"
#: Optional: without Cython or a C compiler kvfs does without it (mount/fuse/channel.py).
COMPILED = Extension(
    f"{HERE if IS_THIS_TREE else INSTALLED}.{READER.replace('/', '.')}",
    [f"{HERE}/{READER}.pyx"],
    # As small as a module of others' wheels: no names for a debugger.
    extra_compile_args=["-g0"],
    extra_link_args=["-s"],
    optional=True,
)

# The list of data files is not empty, or setuptools would not ask for them at all.
setup(
    packages=PACKAGES if IS_THIS_TREE else packages_installed(PACKAGES),
    package_dir={} if IS_THIS_TREE else {INSTALLED: HERE},
    cmdclass={"install_data": MadeFiles, "build_py": OwnNames},
    # A wheel for every Python and machine has nothing compiled (make/release.sh).
    ext_modules=[] if os.environ.get("KVFS_PURE") else [COMPILED],
    exclude_package_data={"": ["*.pyx", "*.pyi"]},
    # What Cython writes is not for this tree.
    options={"build_ext": {"cython_c_in_temp": True}},
    data_files=[("share/doc/kvfs", ["README.md"])],
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
